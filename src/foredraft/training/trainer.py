"""The trainer: one loop for every kind of head, for a model that learns to exit early, and for a draft model, on one device or many.

accelerate places it: a process alone, or one of several that torchrun started, with gradients averaged (DDP) or weights sharded (FSDP). The
target is frozen, computes in its own dtype, and reads every batch once; the head's weights are float32, its products bfloat16 unless
``precision`` says otherwise.

A run is a function of its settings and its data: checkpoints hold all that the next step depends on, so that a run that was killed and
resumed ends with the same weights, bit for bit on a CPU, as one that was left alone.
"""

from __future__ import annotations

import copy
import inspect
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foredraft.errors import ConfigurationError
from foredraft.files import make_folder
from foredraft.heads.base import Head
from foredraft.training import checkpoints
from foredraft.training.acceptance import Held
from foredraft.training.batches import Order, Tokens
from foredraft.training.checkpoints import State
from foredraft.training.continuations import Continuations
from foredraft.training.data import Texts, changes, weights_digest
from foredraft.training.drafts import Distiller, Draft, StoredProbabilities
from foredraft.training.early_exits import EarlyExitLearner, EarlyExits, held_out_loss
from foredraft.training.features import Reader, StoredReader
from foredraft.training.journal import Journal, Since, Sums
from foredraft.training.learner import BACKBONE, HEAD, Learner, learnt, open_backbone, optimizer_of, part
from foredraft.training.options import FREE, LATER, Options
from foredraft.training.prompts import digest
from foredraft.training.worth import DraftHeld

PATIENCE = timedelta(days=1)  # of processes that wait for one

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Outcome:
    """What a run came to: ``head`` is the one with the longest held-out acceptance, in the target's dtype; ``finished`` is False if it was
    stopped."""

    head: Head
    state: State
    finished: bool


class Trainer:
    """One run, in one folder.

    Args:
        model: the target, as it was loaded, on its device.
        head: the class of heads to train.
        texts: what to train on; the last ``options.held_out`` of them are held out unless ``held_out`` gives prompts.
        folder: for checkpoints, log and curves.
        held: measures acceptance; by default with the drafter of the head's kind.
        held_texts: what a model that is trained alone is measured on beside; by default those that are held out.
        stored: take hidden states from the texts' folder, see :mod:`foredraft.training.features`.
        report: is told every line of the log.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head: type[Head],
        texts: Texts,
        folder: Path,
        options: Options,
        *,
        held: Held | None = None,
        held_texts: Texts | None = None,
        resume: bool = False,
        stored: bool = False,
        report: Callable[[Mapping[str, Any]], None] = lambda line: None,
    ):
        self.model, self.texts = model.eval().requires_grad_(False), texts
        self.folder, self.options, self.report = Path(folder), options, report
        members = range(len(texts)) if held is not None else range(len(texts) - options.held_out)
        if not members:
            raise ConfigurationError(f"{len(texts)} texts, {options.held_out} of them held out, leave none to train on; generate more data")
        lengths = texts.lengths.clip(max=options.max_length or int(texts.lengths.max()))
        if not options.count_prompts and not (lengths > texts.prompt_lengths)[list(members)].any():
            cut = f", cut to {options.max_length} tokens," if options.max_length else ""
            raise ConfigurationError(
                f"there is nothing to train on: the texts{cut} are prompts without answers; use --count-prompts to train on prompts"
            )
        self.accelerator = make_accelerator(options, model.device)
        self.held = held or Held([texts.prompt(index) for index in range(len(members), len(texts))], options.answer_tokens)
        per_step = options.accumulate * self.accelerator.num_processes
        self.order = Order(texts, members, options.batch_tokens, per_step, options.seed, options.max_length, options.count_prompts)
        self.steps = options.steps or max(1, round(options.epochs * self.order.steps(0)))
        self._settings = {**options.to_dict(), "data": texts.digest(), "processes": self.accelerator.num_processes}
        self._settings |= {"dtype": str(model.dtype), "target": weights_digest(model), "held-out prompts": digest(self.held.prompts)}
        self.trained, self.dtype = model, model.dtype
        changes_target = options.trains_backbone and head is not Draft
        self.opened = open_backbone(model, options) if changes_target else None  # what stores a model that changes
        self.drafting = self._fresh(head).requires_grad_(False).eval()  # in the target's dtype; measured, and handed out in the end
        self.continuations: Continuations | None = None
        self.head = self.drafting if head is Draft else beside(model, self.drafting).float().requires_grad_().train()
        if isinstance(self.head, Draft):
            self.plain: nn.Module = self._distiller(self.head)
        elif isinstance(self.head, EarlyExits):
            self.plain = EarlyExitLearner(model, self.head.config.recipe, options.seed)
            apart = range(len(members), len(texts)) if held_texts is None else range(min(options.held_out, len(held_texts)))
            self.apart = Order(held_texts or texts, apart, options.batch_tokens, 1, 0, options.max_length, options.count_prompts)
        else:
            self.plain = Learner(self.head, self._reader(stored), options, backbone=model if changes_target else None)
        self.learner, self.optimizer = self.accelerator.prepare(self.plain, optimizer_of(self.plain, options))
        sharded = str(self.accelerator.distributed_type).endswith("FSDP")
        if asks_for_shards() and not sharded:
            raise ConfigurationError("FSDP shards weights over several processes: start them with torchrun, or train without it")
        if options.trains_backbone and sharded:
            raise ConfigurationError("acceptance is measured with the whole target in one process: train a backbone with DDP, not FSDP")
        self.state = State()
        self._asked = self._stop = False  # this process was told to stop; all have agreed to
        self._begin(resume)

    # -- before ---------------------------------------------------------------------------------------------------------

    def _fresh(self, head: type[Head]) -> Head:
        """As training begins with it: the same in every process, and in every run with this seed."""
        options: dict[str, Any] = dict(self.options.head)
        takes = inspect.signature(head.for_target).parameters
        if "counts" in takes:
            options["counts"] = torch.bincount(torch.from_numpy(self.texts.ids).long(), minlength=self.texts.manifest.vocab_size)
        if "seed" in takes:
            options.setdefault("seed", self.options.seed)
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(self.options.seed)
            return head.for_target(self.model, **options)

    def _reader(self, stored: bool) -> Reader:
        if not stored:
            return Reader(self.model, self.head.features, skip=self.head.skip, train=self.options.trains_backbone)
        if self.head.skip is not None:
            raise ConfigurationError("an exit behind attention reads a pass of its own; leave --stored-hidden out")
        if self.options.trains_backbone:
            raise ConfigurationError("stored hidden states are those of the unchanged target; train a backbone without --stored-hidden")
        return StoredReader(self.model, self.head.features, self.texts)

    def _distiller(self, draft: Draft) -> Distiller:
        """What trains a draft, and measures it greedily and sampled."""
        recipe, options = draft.config.recipe, self.options
        self.trained, self.dtype = draft.model, draft.model.dtype
        self.opened = open_backbone(draft.model, options)
        self.held = DraftHeld(self.held.prompts, self.held.tokens, served_at=recipe.temperature)
        if recipe.rewrites:
            self.continuations = Continuations(self.folder, self.order, recipe, self.steps, draft.model, self.model)
        if recipe.stored_probabilities and options.count_prompts:
            raise ConfigurationError("probabilities are stored for answers only: leave --count-prompts or --stored-probabilities out")
        return Distiller(draft.model, self.model, recipe, StoredProbabilities(self.texts) if recipe.stored_probabilities else None)

    def _begin(self, resume: bool) -> None:
        make_folder(self.folder)
        last = checkpoints.latest(self.folder)
        if last is not None and not resume:
            raise ConfigurationError(
                f"{str(self.folder)!r} already holds a run: continue it with --resume, or choose another folder (--out)"
            )
        if last is None:
            self._forget()
            return
        self.state, before = checkpoints.read(last)
        known = {name: value for name, value in self._settings.items() if name not in FREE and (name in before or name not in LATER)}
        if changed := changes(before, known):
            raise ConfigurationError(
                f"the run in {str(self.folder)!r} was started with other settings: {'; '.join(changed)}. Resume with the same settings, "
                "or start a new run"
            )
        self._forget()

    def _forget(self) -> None:
        if self.continuations is not None and self.accelerator.is_main_process:
            self.continuations.forget(self.state.step)

    # -- the loop ---------------------------------------------------------------------------------------------------------

    def train(self) -> Outcome:
        """Until the steps are done, acceptance grows no more, or SIGTERM or Ctrl-C; saves in any case."""
        options, accelerator = self.options, self.accelerator
        journal = Journal(self.folder, step=self.state.step) if accelerator.is_main_process else None
        finished = self._over()
        with ExitStack() as stack:
            stack.enter_context(self._restored())
            stack.enter_context(self._stoppable())
            begin, already, since = time.monotonic(), self.state.seconds, Since()
            if isinstance(self.head, EarlyExits) and not self.state.step:
                self._measured(journal, self.weights())
            if isinstance(self.head, Draft) and not self.state.step:
                self._evaluate(journal)  # a draft that nothing made better is handed out as it was
            batches = self.order.read(step=self.state.step, rank=accelerator.process_index, processes=accelerator.num_processes)
            while not finished and not self._stop:
                epoch, parts = next(batches)
                line = self._step(self._rewritten(parts))
                step = self.state.step + 1
                tokens = self.state.tokens + int(line.pop("tokens"))
                self.state = replace(self.state, step=step, tokens=tokens, seconds=already + time.monotonic() - begin)
                since.add(line)
                if step % options.report_every == 0 or step == self.steps:
                    self._write(
                        journal, {"step": step, "epoch": epoch, "tokens": tokens, **since.taken(tokens), "seconds": self.state.seconds}
                    )
                if step % options.evaluate_every == 0 or step == self.steps:
                    self._evaluate(journal)
                finished = self._over()
                if finished or self._stop or step % options.save_every == 0:
                    checkpoints.save(accelerator, self.folder, self.state, self._settings)
                    self._forget()
        if journal is not None:
            journal.close()
            journal.draw()
        return Outcome(self.best(), self.state, finished)

    def _over(self) -> bool:
        patience = self.options.patience
        return self.state.step >= self.steps or (patience > 0 and self.state.stale >= patience)

    def _rewritten(self, parts: list[Tokens]) -> list[Tokens]:
        """The texts of this step, where some are written during the run; the first process writes."""
        if self.continuations is None:
            return parts
        if self.accelerator.is_main_process:
            self.continuations.write(self.state.step)
        self.accelerator.wait_for_everyone()
        return self.continuations.read(self.state.step, parts)

    def _step(self, parts: list[Tokens]) -> dict[str, float]:
        """One step of the optimiser: the gradient of the mean loss over all tokens of all processes."""
        accelerator, sums = self.accelerator, Sums(self.accelerator.device)
        for number, tokens in enumerate(parts):
            with accelerator.no_sync(self.learner) if number < len(parts) - 1 else nullcontext():
                with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=self.options.precision == "bf16"):
                    total, counted, losses = self.learner(tokens.to(accelerator.device), self.state.step, self.steps)
                accelerator.backward(total * counted)
            sums.add({"loss": total, **losses}, counted)
        vector = accelerator.reduce(sums.vector(float(self._asked)), "sum")
        self._stop = bool(vector[1] > 0)  # all processes stop at the same step
        everything = float(vector[0])
        for weights in self.learner.parameters():
            if weights.grad is not None:
                weights.grad.mul_(accelerator.num_processes / max(1.0, everything))  # processes were averaged
        norm = accelerator.clip_grad_norm_(self.learner.parameters(), self.options.clip)
        rate = self.options.rate(self.state.step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        facts = {"gradient_norm": float(norm), "learning_rate": rate * self.options.learning_rate, "tokens": everything}
        return {**sums.means(vector), **facts}

    # -- what it comes to -------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """What was learnt so far, float32, under the names of the learner; all processes take part."""
        return learnt(self.accelerator.get_state_dict(self.learner), self.plain)

    def current(self, weights: Mapping[str, Tensor]) -> Head:
        """The head for inference, with these weights."""
        self.drafting.load_state_dict(part(weights, HEAD))
        return self.drafting

    def _evaluate(self, journal: Journal | None) -> None:
        """Measure acceptance, in the first process, and keep the head if it is the best so far."""
        from accelerate.utils import broadcast_object_list

        weights = self.weights()
        length = [self._measured(journal, weights)]
        broadcast_object_list(length)
        if length[0] > self.state.best_length:
            self.state = replace(self.state, best=self.state.step, best_length=length[0], stale=0)
            if self.accelerator.is_main_process:
                checkpoints.save_best(self.folder, self.state.step, weights)
        else:
            self.state = replace(self.state, stale=self.state.stale + 1)

    def _measured(self, journal: Journal | None, weights: Mapping[str, Tensor]) -> float:
        """The acceptance length with ``weights``, which goes into the log with the loss of a model that is trained alone; by the first
        process."""
        if not self.accelerator.is_main_process:
            return 0.0
        measured = self.held.measure(self.model, self.current(weights))
        own = {"held_out_loss": held_out_loss(self.model, self.apart)} if isinstance(self.head, EarlyExits) else {}
        self._write(journal, {"step": self.state.step, **measured.to_dict(), **own})
        return measured.acceptance_length

    def best(self) -> Head:
        """The head with the longest acceptance so far, or the current one if none was measured; a backbone becomes the one beside it."""
        weights = self.weights()
        if self.state.best or isinstance(self.head, Draft):
            weights = checkpoints.load_best(self.folder, self.state.best)
        if self.opened is not None:
            self.trained.load_state_dict(part(weights, BACKBONE), strict=False)
            if self.options.backbone == "full":
                self.trained.to(self.dtype)
        return (self.current(weights) if weights else self.drafting).to(self.dtype)  # of sharded ones the first process alone has all

    def _write(self, journal: Journal | None, line: Mapping[str, Any]) -> None:
        if journal is not None:
            journal.write(line)
            self.report(line)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Weights, optimiser and torch's generators as the last checkpoint left them, or as a run begins; the caller's come back."""
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            last = checkpoints.latest(self.folder)
            if last is None:
                torch.manual_seed(self.options.seed + 1 + self.accelerator.process_index)
            else:
                checkpoints.load(self.accelerator, last)
            yield

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C end the run behind the step that is under way; a second one at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self._asked:
                raise KeyboardInterrupt
            self._asked = True

        previous = {}
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                previous[number] = signal.signal(number, stop)
        except ValueError:  # not in the main thread: whoever runs it there decides
            pass
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def beside(model: PreTrainedModel, head: Head) -> Head:
    """A copy of ``head`` that shares with the target whatever ``head`` does."""
    shared = [model, *model.modules(), *model.parameters(), *model.buffers()]
    return copy.deepcopy(head, {id(each): each for each in shared})


def make_accelerator(options: Options, device: torch.device) -> Accelerator:
    """Raises ConfigurationError if accelerate is not installed."""
    try:
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs
    except ImportError as error:
        raise ConfigurationError("training needs accelerate; install it with: pip install 'foredraft[train]'") from error
    if asks_for_shards():
        return sharding(device)
    patient = InitProcessGroupKwargs(timeout=PATIENCE)  # the first process writes texts and measures while the others wait
    return Accelerator(mixed_precision="bf16" if options.precision == "bf16" else "no", cpu=device.type == "cpu", kwargs_handlers=[patient])


def asks_for_shards() -> bool:
    """More generous than accelerate, to which only "true" is true."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true", "yes", "on")


def sharding(device: torch.device) -> Accelerator:
    """With FSDP2, the whole learner as one unit. accelerate is told of no precision: its policy rounds losses, counts and gradients too,
    and :meth:`Trainer._step` casts products alone, as without FSDP.

    accelerate turns FSDP on for GPUs only (``AcceleratorState.__init__``); what it then calls runs on CPUs as well, with gloo.
    """
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, InitProcessGroupKwargs

    plugin, patient = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP"), InitProcessGroupKwargs(timeout=PATIENCE)
    accelerator = Accelerator(mixed_precision="no", cpu=device.type == "cpu", fsdp_plugin=plugin, kwargs_handlers=[patient])
    if accelerator.distributed_type == DistributedType.MULTI_CPU:
        accelerator.state.fsdp_plugin = plugin
        for state in (PartialState(), accelerator.state):  # the second is made like the first whenever one is asked for
            state.distributed_type = DistributedType.FSDP
    return accelerator
