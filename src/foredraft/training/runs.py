"""A training run from names to a stored head or model: what ``foredraft train`` does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from foredraft import heads
from foredraft.errors import ConfigurationError
from foredraft.files import has_locks, locked, make_folder
from foredraft.heads.base import Head
from foredraft.heads.checkpoints import save as save_head
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.vocabulary import VocabularyHead
from foredraft.loading import load_model, load_tokenizer, name_of
from foredraft.training.acceptance import Held, calibrated, counted
from foredraft.training.data import Manifest, Texts, refuse_other_data
from foredraft.training.drafts import Draft
from foredraft.training.early_exits import EarlyExits
from foredraft.training.journal import Journal
from foredraft.training.options import DRAFT, LAYERSKIP, WITHOUT_ENCODER, Options
from foredraft.training.trainer import Outcome, Trainer
from foredraft.training.worth import Prices, compared

KINDS: dict[str, type[Head]] = {LAYERSKIP: EarlyExits, DRAFT: Draft}  # that are no heads
RUN = "run"  # checkpoints, log and curves, below the folder of the head
LOCK = "lock"  # there; who holds it writes to that folder


def run(
    target: str,
    data: Sequence[Path],
    out: Path,
    options: Options,
    *,
    resume: bool = False,
    partial: bool = False,
    other_target: bool = False,
    held_out_data: Path | None = None,
    dtype: str = "auto",
    device: str | None = None,
    threads: int | None = None,
    tree_nodes: int | None = None,
    successors: bool = True,
    stored_hidden: bool = False,
    prompt_tokens: int | None = None,
    report: Callable[[Mapping[str, Any]], None] = lambda line: None,
) -> list[str] | None:
    """Train a head, a model by the LayerSkip recipe, or a draft model, and store the best one in ``out``.

    Returns:
        what came of it, in words, or None if the run was stopped before its end.

    Raises:
        ConfigurationError: an unknown kind or option, data of another target, a run that was begun otherwise, or one that goes on.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    kind = KINDS.get(options.kind) or heads.find(options.kind)
    if tree_nodes is not None and not issubclass(kind, VocabularyHead):
        raise ConfigurationError(f"--tree-nodes is for medusa, hydra and rnn, not for {options.kind}; leave it out")
    begun = {LAYERSKIP: target, DRAFT: options.head.get("draft", "")}.get(options.kind)
    for source, what in ((begun, "the model that is to be trained"), (target, "the target")):
        if source and Path(source).expanduser().resolve() == out.resolve():
            raise ConfigurationError(f"{out} is {what}: choose another folder (--out), which gets what is trained")
    if prompt_tokens is not None and options.head.get("stored_probabilities"):
        raise ConfigurationError(
            "probabilities are stored for the answers of the data: leave --prompt-tokens or --stored-probabilities out"
        )
    for folder in data:
        Manifest.read(folder)  # before weights are read
    with alone_in(out / RUN):
        own = device is None or (device in ("cuda", "gpu") and torch.cuda.is_available())  # each of several processes has a GPU of its own
        place = own_device() if own else device
        model = load_model(target, dtype=dtype, device=place, encoders=options.kind not in WITHOUT_ENCODER)
        parts = [Texts(folder, partial=partial, prompt_tokens=prompt_tokens) for folder in data]
        for part in parts:
            refuse_other_data(part.manifest, model, other_target=other_target)
        held = others = None
        if held_out_data is not None:
            others = Texts(held_out_data, partial=True, prompt_tokens=prompt_tokens)
            refuse_other_data(others.manifest, model, other_target=True)
            held = Held([others.prompt(index) for index in range(min(len(others), options.held_out))], options.answer_tokens)
        texts = Texts.together(parts)
        given: dict[str, Any] = {"held": held, "held_texts": others, "resume": resume, "stored": stored_hidden, "report": report}
        trainer = Trainer(model, kind, texts, out / RUN, options, **given)
        if options.kind == DRAFT:
            for note in as_large(trainer.trained, model):
                report({"note": note})
        outcome = trainer.train()
        if not outcome.finished:
            return None
        said: list[str] = []
        if trainer.accelerator.is_main_process and isinstance(outcome.head, EarlyExits):
            said = store_model(trainer, outcome.head, out, target)
        elif trainer.accelerator.is_main_process and isinstance(outcome.head, Draft):
            said = store_draft(trainer, outcome.head, out, target)
        elif trainer.accelerator.is_main_process:
            said = [*store(trainer, outcome, out, tree_nodes, successors=successors), *store_target(trainer, out, target)]
        trainer.accelerator.wait_for_everyone()
        return said


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """No other run writes to ``folder`` meanwhile. Of several processes of this one the first sees to that.

    Raises:
        ConfigurationError: another one does.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    make_folder(folder)
    lock: AbstractContextManager[Any] = nullcontext()
    try:
        lock = locked(folder / LOCK, wait=False)
    except BlockingIOError as error:
        if has_locks(error):  # where there are none, nobody is refused
            raise ConfigurationError(
                f"another run is writing to {str(folder)!r}: pgrep -af 'foredraft train' shows it, and kill PID has it save and end. Or "
                "choose another folder (--out)"
            ) from error
    with lock:
        yield


def store(trainer: Trainer, outcome: Outcome, out: Path, tree_nodes: int | None, *, successors: bool) -> list[str]:
    """Store the head with its tree, its n-gram log-odds and how it was made; each as soon as it is there."""
    head, state, options = outcome.head, outcome.state, trainer.options
    settings = [dict(part.manifest.settings) for part in trainer.texts.parts]
    about = {
        "target": name_of(trainer.model),
        "data": settings[0] if len(settings) == 1 else settings,
        "options": options.to_dict(),
        "steps": state.step,
        "tokens": state.tokens,
        "best_step": state.best,
        "acceptance_length": state.best_length,
    }
    save_head(head, out, about=about)
    said = [
        f"{out}: {options.kind} head of step {state.best}, {state.best_length:.3f} tokens per pass on held-out prompts; use --drafter "
        f"{head.drafter}:{out}"
    ]
    if successors and isinstance(head, MedusaHead):
        found = counted(head, trainer.model, trainer.held, trainer.texts, trainer.order.members)
        save_head(head, out, about=about)
        listed = sum(len(each.tokens) for each in found.lists)
        said += [f"{listed:,} n-gram log-odds are stored with it; weights {', '.join(map(str, found.weights))}"]
    try:
        tree = calibrated(head, trainer.model, trainer.held, nodes=tree_nodes)
    except ConfigurationError as error:
        return [*said, f"no tree is stored with it: {error}"]
    if tree is not None:
        save_head(head, out, about=about)
        by = "" if tree.execution is None else f", chosen by the cost of {tree.execution} passes"
        said += [f"its tree has {tree.tree.nodes} nodes{by}, {tree.expected:.3f} tokens per pass expected of it: {tree.tree}"]
    return said


def store_target(trainer: Trainer, out: Path, target: str) -> list[str]:
    """Store the target, or its adapters, where it was trained too."""
    if trainer.opened is None:
        return []
    lora = trainer.options.backbone == "lora"
    changed = out / ("adapter" if lora else "target")
    trainer.opened.save_pretrained(changed, **({"save_embedding_layers": False} if lora else {}))
    with suppress(ConfigurationError):  # a target without a tokenizer
        load_tokenizer(target).save_pretrained(changed)
    return [f"{changed}: the target, which was trained too; text drafted by this head has its output distribution, not that of {target}"]


def store_model(trainer: Trainer, head: EarlyExits, out: Path, target: str) -> list[str]:
    """Store a model that was trained alone as a checkpoint that needs nothing else; adapters are merged into it."""
    store_checkpoint(trainer, out, target)
    lines = {line["step"]: line for line in Journal.read(trainer.folder) if "held_out_loss" in line}
    length, loss = ([lines[step][name] for step in (0, trainer.state.best)] for name in ("acceptance_length", "held_out_loss"))
    return [
        f"{out}: the model of step {trainer.state.best}. On held-out texts, with exit {head.config.exit}: {length[0]:.3f} → "
        f"{length[1]:.3f} tokens per pass; its own loss {loss[0]:.4f} → {loss[1]:.4f}",
        f"its text has its own output distribution, not that of {target}; use --target {out} --drafter layer-skip --drafter-option "
        f"exit={head.config.exit}",
    ]


def store_draft(trainer: Trainer, head: Draft, out: Path, target: str) -> list[str]:
    """Store a draft as a checkpoint that needs nothing else, and say what it is worth beside the one that training began with."""
    lines = {line["step"]: line for line in Journal.read(trainer.folder) if "alphas" in line}
    model, best, recipe = store_checkpoint(trainer, out, target), trainer.state.best, head.config.recipe
    worth = compared(lines[0], lines[best], Prices.measured(trainer.model, str(out)), recipe.temperature)
    return [
        f"{out}: the draft of step {best}; use --target {target} --drafter draft-model:{out}"
        if best
        else f"{out}: the draft as it was: no step made it better",
        *as_large(model, trainer.model),
        *worth,
    ]


def as_large(draft: Any, target: Any) -> list[str]:
    """A note, where a draft has as many parameters as its target."""
    sizes = [model.num_parameters() for model in (draft, target)]
    if sizes[0] < sizes[1]:
        return []
    return [
        f"the draft is as large as the target ({sizes[0]:,} and {sizes[1]:,} parameters): a round then takes longer than plain decoding"
    ]


def store_checkpoint(trainer: Trainer, out: Path, target: str) -> Any:
    """Write what was trained, with the target's tokenizer, and return it; adapters are merged into it."""
    assert trainer.opened is not None
    model = trainer.opened.merge_and_unload() if trainer.options.backbone == "lora" else trainer.opened
    model.save_pretrained(out)
    with suppress(ConfigurationError):  # a model without a tokenizer
        load_tokenizer(target).save_pretrained(out)
    return model


def own_device() -> str:
    """The GPU of this process, of those that torchrun started, or the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if rank >= torch.cuda.device_count():
        raise ConfigurationError(f"process {rank} has no GPU: there are {torch.cuda.device_count()}; start as many, or pass --device cpu")
    return f"cuda:{rank}"
