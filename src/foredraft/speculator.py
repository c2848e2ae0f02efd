"""Speculator: a target, a drafter and a rule behind transformers' own ``generate`` interface.

Both entry points, :meth:`Speculator.generate` and ``model.generate(custom_generate=foredraft.custom_generate(...))``, let
transformers prepare the call: GenerationConfig and its defaults, logits processors, stopping criteria, padding. What
arrives here is prepared alike; this module unpads it, row by row, and drives a :class:`~foredraft.session.Session`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from foredraft.choices import check_shape, choose_drafter, choose_rule, choose_shape
from foredraft.describing import Described
from foredraft.device import default_device, host_by_default
from foredraft.drafters.base import Drafter
from foredraft.drafters.none import NoDrafter
from foredraft.errors import ConfigurationError, Interrupted
from foredraft.hub import named
from foredraft.loading import load_model, name_of
from foredraft.logits.logprobs import LogProbs
from foredraft.logits.noise import Seed, row_seeds
from foredraft.models.cache_sizes import parse_memory
from foredraft.models.encoder_decoder import check_features
from foredraft.planning import FixedPlanner, Planner, make_planner
from foredraft.planning.profiles import profile
from foredraft.preparation import Prepared, generated, own_generate, prepare, with_grammar
from foredraft.quantization import check_quantization
from foredraft.rows import Commit, successful
from foredraft.session import Session, repeats, turn_of
from foredraft.shapes import TreeShape
from foredraft.stats import Stats
from foredraft.target import Target, unwrap
from foredraft.text import TextInterface
from foredraft.turns import Turn
from foredraft.verification import Rule

ROWS = 32  # bits of a row's number


@dataclass(repr=False)
class SpeculativeOutput(Described, GenerateDecoderOnlyOutput):
    """What transformers returns for a decoder-only model, plus ``stats`` (:class:`foredraft.Stats`) and, if requested, ``logprobs``
    (:class:`foredraft.LogProbs`) per row."""

    stats: Stats | None = None
    logprobs: tuple[LogProbs, ...] | None = None

    def facts(self, *, all: bool = False) -> dict[str, Any]:
        if all:
            return dict(self)
        summary = {} if self.stats is None else {"new_tokens": self.stats.new_tokens, "summary": self.stats.summary()}
        return {"sequences": list(self.sequences.shape), **summary}


@dataclass(repr=False)
class SpeculativeEncoderDecoderOutput(SpeculativeOutput, GenerateEncoderDecoderOutput):
    """The same of a model with an encoder; and ``segments``, where Whisper returns them."""

    segments: list[Any] | None = None


class Tokens(list[int]):
    """The new tokens of one row in one round, as :meth:`Speculator.stream` yields them.

    Attributes:
        row: index in the batch.
        accepted: how many of them, counted from the first, are accepted draft tokens.
        finish_reason: eos, stop, length or context when the row has finished, else None.
        logprobs: their log-probabilities (:class:`foredraft.LogProbs`) if requested, else None.
    """

    def __init__(self, commit: Commit):
        super().__init__(commit.tokens)
        self.row, self.accepted, self.finish_reason = commit.slot, commit.accepted, commit.finish_reason
        self.logprobs = commit.logprobs


class Speculator(TextInterface, Described):
    """Generates text from an unmodified model in fewer forward passes, with the same output distribution.

    Args:
        model: the target: a causal ``PreTrainedModel``, or one with an encoder (docs/encoder-decoder.md), a path, a hub id, or
            ``"zoo:NAME"``.
        drafter: a name, ``"NAME:SOURCE"``, a :class:`~foredraft.drafters.base.Drafter`, or a model object, which becomes a draft model.
        drafter_options: keyword arguments of a drafter given by name.
        rule: ``"auto"``, a name, or a :class:`~foredraft.verification.Rule`. ``"auto"`` is ``match`` in calls with a seed, and otherwise
            the exact rule that accepts most.
        shape: the largest tree per round: a :class:`~foredraft.shapes.TreeShape`, or a string such as ``"chain(5)"``,
            ``"product(4,2,1)"`` or ``"dynamic(depth=5,k=4,total=16)"``. The default, ``"auto"``, chooses in every round by measured
            costs and past acceptance, and drafts nothing where that is faster. The first call then measures the machine, for at most
            two seconds, and saves the result (see docs/planner.md). If you name a ``rule`` other than ``match``, a seed repeats the same
            sampled text only with a fixed shape.
        draft_length: γ, the same as ``shape="chain(γ)"``.
        lossless: False allows a rule that changes the output distribution, such as ``typical``.
        dtype: of a model given by name; the default is that of the checkpoint.
        device: where to load a model given by name; by default on a CUDA GPU if there is one, else on the CPU.
        self_test: check after loading that the model can roll back; a few passes over a handful of tokens.
        reuse_prefix: keep the cache between calls for prompts that begin alike. Costs the memory of the cache.
        prefill_chunk: most prompt tokens of a row per forward pass.
        execution: how forward passes are run: ``eager``, ``packed``, ``native``, ``compiled``, ``graphs`` or ``auto`` (see
            docs/platforms.md).
        attention: ``"model"`` keeps the model's attention; ``"flex"`` uses FlexAttention with a block mask of the tree; ``"auto"``
            is ``"model"``.
        quantization: ``"int8"`` or ``"int4"`` loads a model given by name with such weights (torchao; see docs/quantization.md). The text
            then has the output distribution of that model, not of the original checkpoint.
        gguf_file: the name of a GGUF file at ``model``, a folder or a hub id; its linear layers keep their integers.
        tokenizer: for text in and text out; the model's own unless given.
        cache_memory: most memory for the keys and values of the target and of a draft model: a size such as ``"6GiB"``, a fraction of the
            memory that is free when the Speculator is built, or ``"auto"`` for that memory less what a pass needs. Where it is used up,
            rows wait. Where the cache is one block (docs/memory.md), ``"auto"`` sets no limit. On a GPU, a size or a fraction makes it one
            of pages; models that cannot have these refuse it.
        wait: where another thread is using this Speculator or a model of it, wait until it is done, instead of raising BusyError.

    Threads: one call runs at a time on a Speculator, and on a model object, however many Speculators use it. A call from a second
    thread raises :class:`~foredraft.BusyError` at once, or waits with ``wait=True``. A call lasts until its last token; a stream lasts
    from its first token until it is read to its end, closed or garbage-collected, or its thread ends, and any thread may read it. A new
    call in the thread that read a stream last stops that stream. To generate in several threads at once, give each a Speculator with a
    model object of its own. ``model.generate`` does not take part in this: do not build or close a Speculator while another thread is
    in it.

    Raises:
        ConfigurationError: an unknown name or option, a path without a model, or a rule that is not exact for the drafter.
        UnsupportedModelError: the model cannot roll back; the message says why.
        BusyError: another thread is using the model.
    """

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        drafter: Drafter | PreTrainedModel | str = "prompt-lookup",
        *,
        drafter_options: dict[str, Any] | None = None,
        rule: Rule | str = "auto",
        shape: TreeShape | str | None = None,
        draft_length: int | None = None,
        lossless: bool = True,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        self_test: bool = True,
        reuse_prefix: bool = True,
        prefill_chunk: int = 1024,
        execution: str = "auto",
        attention: str = "auto",
        quantization: str | None = None,
        gguf_file: str | None = None,
        wait: bool = False,
        tokenizer: Any = None,
        cache_memory: str | float = "auto",
    ):
        model, self._tokenizer, owned = named(model), tokenizer, False
        wanted = choose_shape(shape, draft_length)
        if not isinstance(model, str) and not dtype is device is gguf_file is None:
            raise ConfigurationError("dtype, device and gguf_file say how to load a model by name; a model object is used as it is")
        check_quantization(quantization, model)
        parse_memory(cache_memory)
        self.wait, self._closed = wait, False
        self.drafter = choose_drafter(drafter, drafter_options)
        if wanted is None and self.drafter.name == NoDrafter.name:
            wanted = TreeShape.chain(0)
        self.rule, self.proposal = choose_rule(rule, self.drafter, wanted, lossless=lossless)
        if isinstance(model, str):
            model, owned = (
                load_model(
                    model,
                    dtype=dtype,
                    device=default_device() if device is None else device,
                    quantization=quantization,
                    encoders=True,
                    gguf_file=gguf_file,
                ),
                True,
            )
        self.model = model
        # models that were handed in are left as they were if something below is refused
        base = unwrap(self.model)
        with Turn([self.drafter], [base], wait=wait), host_by_default(base.device), ExitStack() as undo:
            self.target = Target(
                self.model,
                test=self_test,
                prefill_chunk=prefill_chunk,
                reuse_prefix=reuse_prefix,
                execution=execution,
                owned=owned,
                attention=attention,
                wait=wait,
                cache_memory=cache_memory,
            )
            undo.callback(self.target.close)
            self.target.tokenizer = tokenizer
            self.drafter.bind(self.target)
            undo.callback(self.drafter.close)
            self.target.share_budget(lambda: (self.drafter.page_bytes, self.drafter.source_bytes))
            self.rule, self.proposal = choose_rule(rule, self.drafter, wanted, lossless=lossless)  # what it offers may depend on the model
            self.drafter.owner = None  # a drafter that served another Speculator starts afresh here
            self.planner = self._plan(wanted, rule, lossless)
            self.automatic = rule == "auto"
            self._seeded = choose_rule("match", self.drafter, self.shape) if self.automatic else (self.rule, self.proposal)
            check_shape(self.shape, self.target, self.drafter)
            undo.pop_all()

    @property
    def shape(self) -> TreeShape:
        """The largest tree that may be drafted in a round; it prints as "auto" where it is chosen anew in each."""
        return self.planner.shape

    def facts(self, *, all: bool = False) -> dict[str, Any]:
        few = {"model": name_of(self.model), "drafter": self.drafter, "rule": self.rule.name, "shape": self.shape}
        about = {"class": type(self.model).__name__, "dtype": self.model.dtype, "device": self.model.device}
        return {**few, **about, "execution": self.target.execution, **self.target.reasons} if all else few

    def __reduce__(self) -> Any:
        raise TypeError("a Speculator cannot be copied or pickled: it holds caches of this process; build one from the model instead")

    def _plan(self, shape: TreeShape | None, rule: Rule | str, lossless: bool) -> Planner:
        """Who chooses the shapes. Where all of them have to be chains, the rule is the one for chains."""
        if shape is not None:
            return FixedPlanner(shape, profile=profile(self.target, self.drafter) if shape.nodes else None, exits=self.drafter.info.exits)
        planner = make_planner(self.target, self.drafter, self.rule, self.proposal)
        if planner.shape.is_chain:
            self.rule, self.proposal = choose_rule(rule, self.drafter, planner.shape, lossless=lossless)
        return planner

    def generate(self, inputs: Tensor | None = None, *, seed: Seed | Sequence[Seed] | None = None, **arguments: Any) -> SpeculativeOutput:
        """Generate as ``model.generate`` does: same arguments, defaults and padding of ``sequences``.

        Args:
            inputs: ``[B, L]`` prompt ids, or ``input_ids=`` with ``attention_mask=``, padded on either side.
            seed: an int for the batch, a list with one entry per row, or None to draw one from torch's global generator. With
                ``rule="auto"``, a call with a seed uses the rule ``match``, so that the same seed gives the same text with any drafter.
                ``stats.reproducible`` says whether it does. ``repeatable=False`` keeps the rule of calls without a seed.
            arguments: those of ``model.generate``. In addition, ``output_logprobs=k`` returns the log-probability of every new token and
                of the k most likely tokens at its position (k = 0: only its own), from the target's raw logits, before temperature and
                every other processor. ``json_schema``, ``regex`` or ``grammar`` makes the text match (:class:`foredraft.Grammar`), with
                the library ``grammar_backend``. ``isolation="name"`` shares cached beginnings of prompts only with calls of that name.

        Returns:
            ``sequences`` ``[B, L + new]``, ``stats``, and ``scores``, ``logits`` and ``logprobs`` if requested. In scores
            and logits, finished rows hold 0 for the padding token and -inf elsewhere; logprobs are as long as each row. Of Whisper, what
            its own ``generate`` returns, and ``stats``.

        Raises:
            ConfigurationError: an unsupported argument; the message names it.
            TargetOutputError: NaN or infinite logits, or processors that forbid every token.
            Interrupted: Ctrl-C; ``.output`` holds what was generated so far.
            BusyError: another thread is using the Speculator or a model of it.
        """
        return begin(self, inputs, seed=seed, **arguments).finish()

    def stream(self, inputs: Tensor | None = None, *, seed: Seed | Sequence[Seed] | None = None, **arguments: Any) -> Stream:
        """Generate as :meth:`generate` does, and yield the new tokens of each row after every round.

        You can stop iterating at any point. ``stats`` of the iterator holds the statistics so far.
        """
        run = begin(self, inputs, seed=seed, **arguments)
        if isinstance(run, Windows):
            raise ConfigurationError(f"{type(self.model).__name__} generates in a way of its own, which cannot be streamed; use generate")
        return Stream(run)

    def session(self, *, repeatable: bool = False, **options: Any) -> Session:
        """A :class:`~foredraft.session.Session` with this configuration, for a server that adds and removes rows. If it is
        ``repeatable``, ``rule="auto"`` means ``match``, so that the text of a row depends on its seed alone.

        Raises:
            ConfigurationError: it was closed.
        """
        if self._closed:
            raise ConfigurationError("this Speculator was closed; make a new one")
        options = {"wait": self.wait, **options}
        rule, proposal = self._seeded if repeatable else (self.rule, self.proposal)
        return Session(self.target, self.drafter, rule, proposal=proposal, planner=self.planner, **options)

    def release(self) -> None:
        """Forget everything that was made from the models: free the memory of the caches, and give packed weights back to the models. The
        next call makes them anew. Changes to a model that cannot be seen need this, see docs/models.md.

        Raises:
            BusyError: another thread is using the Speculator.
        """
        with turn_of(self.target, self.drafter, wait=self.wait), host_by_default(self.target.device):
            self.target.owner = None
            self.drafter.release()
            self.target.unpack()

    def close(self) -> None:
        """Free all memory and restore a model that was passed in. The Speculator cannot be used afterwards.

        Raises:
            BusyError: another thread is using the Speculator or a model of it.
        """
        with turn_of(self.target, self.drafter, wait=self.wait), host_by_default(self.target.device):
            self._closed = True
            self.target.owner = None
            self.drafter.reset()
            self.target.close()
            self.drafter.close()


class Run:
    """One call: a session, its rows, and how they become an output."""

    def __init__(self, speculator: Speculator, prepared: Prepared, stats: Stats | None = None):
        self.prepared = prepared
        stats = stats or Stats(seed=prepared.seed, drafter=speculator.drafter.name, shape=str(speculator.shape), rule="match")
        self.stats = stats
        self.session = speculator.session(stats=stats, record=prepared.record, repeatable=prepared.repeatable, keep_stats=True)
        rule = self.session.loop.rule
        if any(row.do_sample for row in prepared.parameters):
            stats.rule, stats.lossless = rule.name, rule.lossless
            as_named = rule.name == "match" or not speculator.automatic  # else the same call with this seed has another rule
            stats.reproducible = as_named and repeats(rule, speculator.planner)
        for prompt, parameters in zip(prepared.prompts, prepared.parameters):
            self.session.add(prompt, parameters)
        self.rows, self._ended = list(self.session.waiting), False
        self.watchful = True  # others run between the steps, and may change the model

    def steps(self) -> Iterator[list[Commit]]:
        """Step until every row is over; leaves target and drafter usable however it ends."""
        streamer = self.prepared.streamer
        try:
            if streamer is not None:
                streamer.put(self.prepared.input_ids.cpu())
            follow = True
            while self.session.live:
                commits = successful(self.session.step(follow=follow))
                follow = self.watchful
                if streamer is not None:
                    for token in commits[0].tokens:
                        streamer.put(torch.tensor([token], device="cpu"))
                yield commits
        finally:
            if self.session.live:
                self.session.close()
            self.stats.clock()
            self.end_streamer()

    def end_streamer(self) -> None:
        """Once: whoever iterates over it would wait for ever."""
        if self.prepared.streamer is not None and not self._ended:
            self._ended = True
            self.prepared.streamer.end()

    def finish(self) -> SpeculativeOutput:
        self.watchful = False
        try:
            with torch.inference_mode():
                for _ in self.steps():
                    pass
        except KeyboardInterrupt:
            raise Interrupted(self.output()) from None
        return self.output()

    def finish_as_asked(self) -> Tensor | SpeculativeOutput | GenerateEncoderDecoderOutput:
        """As ``model.generate`` returns it: the sequences alone, unless ``return_dict_in_generate`` was asked for. A model that generates
        in a way of its own gets nothing that transformers would not return."""
        output = self.finish()
        if self.prepared.as_dictionary and self.prepared.inside:
            return GenerateEncoderDecoderOutput(sequences=output.sequences, scores=output.scores, logits=output.logits)
        return output if self.prepared.as_dictionary else output.sequences

    def output(self) -> SpeculativeOutput:
        """Prompts as given, padding included, and what every row has, padded to the longest."""
        prompts, pad = self.prepared.input_ids, self.prepared.pad_token_id
        new = [row.ids[row.prompt_length :] for row in self.rows]
        width = max(map(len, new))
        tail = [tokens + [pad] * (width - len(tokens)) for tokens in new]
        sequences = torch.cat([prompts, torch.tensor(tail, dtype=torch.long, device=prompts.device).reshape(len(new), width)], 1)
        vectors: dict[str, Any] = {name: self._stacked(name, width) for name in self.prepared.record}
        logprobs = tuple(LogProbs.joined(row.logprobs) for row in self.rows) if all(row.logprobs for row in self.rows) else None
        kind = SpeculativeEncoderDecoderOutput if self.prepared.sourced else SpeculativeOutput
        return kind(sequences=sequences, stats=self.stats, logprobs=logprobs, **vectors)

    def _stacked(self, name: str, width: int) -> tuple[Tensor, ...]:
        """Per step ``[B, V]``, as transformers has them."""
        if width == 0:
            return ()
        vectors = [getattr(row, name) for row in self.rows]
        like = next(each[0] for each in vectors if each)
        over = torch.full_like(like, float("-inf"))
        pad = self.prepared.pad_token_id
        over[:, pad : pad + 1] = 0.0  # a tokenizer's own may lie beyond the vocabulary
        return tuple(torch.cat([each[step] if step < len(each) else over for each in vectors]) for step in range(width))


class Windows:
    """One call of a ``generate`` of the model's own, such as Whisper's. Each window of sound, and each further try at one, is a
    :class:`Run`; they have one Stats.

    Raises:
        ConfigurationError: an argument that has no meaning for several runs.
    """

    def __init__(self, speculator: Speculator, inputs: Tensor | None, *, seed: Any, **arguments: Any):
        model = speculator.target.model
        if isinstance(seed, Sequence):
            raise ConfigurationError(f"a seed per row is not supported: {type(model).__name__} decodes rows several times; pass one seed")
        check_features(model, inputs if inputs is not None else arguments.get(model.main_input_name))
        how = {"streamer": None, "output_logprobs": None, "repeatable": seed is not None, "isolation": None}
        self._how = {name: arguments.pop(name, default) for name, default in how.items()}
        self.speculator, self._inputs, self._arguments = speculator, inputs, arguments
        _, seed = row_seeds(seed, 1)
        self.stats = Stats(seed=seed, drafter=speculator.drafter.name, shape=str(speculator.shape), rule="match")
        self._runs = 0

    def _decode(self, model: Any, input_ids: Tensor, inputs_tensor: Tensor, **given: Any) -> Any:
        seeds = [(self.stats.seed, self._runs << ROWS | row) for row in range(len(input_ids))]  # no two windows have the same noise
        self._runs += 1
        prepared = Prepared.of(model, input_ids, inputs_tensor=inputs_tensor, seed=seeds, **self._how, **given).as_asked()
        return Run(self.speculator, prepared, self.stats).finish_as_asked()

    def finish_as_asked(self) -> Any:
        model, drafter = self.speculator.target.model, self.speculator.drafter
        with ending(self._how["streamer"]), Turn([], [model, *drafter.shared()], wait=self.speculator.wait):
            return generated(model, self._inputs, self._decode, **self._arguments)

    def finish(self) -> SpeculativeEncoderDecoderOutput:
        if self._arguments.get("output_scores") or self._arguments.get("output_logits"):
            self._arguments.setdefault("return_dict_in_generate", True)  # else there are none
        found = self.finish_as_asked()
        found = {"sequences": found} if isinstance(found, Tensor) else found
        return SpeculativeEncoderDecoderOutput(stats=self.stats, **found)


def begin(
    speculator: Speculator,
    inputs: Tensor | None = None,
    *,
    seed: Seed | Sequence[Seed] | None = None,
    as_asked: bool = False,
    **arguments: Any,
) -> Run | Windows:
    """A call of ``generate``, prepared; ``as_asked`` for what ``model.generate`` returns."""
    base = speculator.target.model
    if speculator.model is not base and hasattr(speculator.model, "generation_config"):  # a PEFT wrapper hands on its own, too
        base.generation_config = speculator.model.generation_config
    with ending(arguments.get("streamer")):
        arguments = with_grammar(speculator.model, arguments, lambda: speculator.tokenizer)
        if own_generate(speculator.target.model):
            return Windows(speculator, inputs, seed=seed, **arguments)
        prepared = prepare(speculator.target.model, inputs, seed=seed, **arguments)
        return Run(speculator, prepared.as_asked() if as_asked else prepared)


@contextmanager
def ending(streamer: Any) -> Iterator[None]:
    """If a call is refused inside, its streamer ends: whoever iterates over it would wait for ever."""
    try:
        yield
    except BaseException:
        if streamer is not None:
            streamer.end()
        raise


class Stream(Iterator[Tokens]):
    """Iterator over :class:`Tokens`; ``stats`` holds what happened so far, ``close`` ends it early."""

    def __init__(self, run: Run):
        self._run = run
        self._turn = Turn([object()], wait=run.session.turn.wait)  # threads that read it take turns
        self._tokens = (Tokens(commit) for commits in run.steps() for commit in commits)

    @property
    def stats(self) -> Stats:
        self._run.session.observer.settle()
        return self._run.stats

    def __next__(self) -> Tokens:
        with self._turn:
            return next(self._tokens)

    def close(self) -> None:
        """End the generation; the Speculator is ready for the next call."""
        with self._turn:
            self._tokens.close()
            self._run.session.close()
            self._run.end_streamer()


def custom_generate(
    drafter: Drafter | str = "prompt-lookup", *, seed: Seed | Sequence[Seed] | None = None, streamer: Any = None, **options: Any
) -> Callable[..., Any]:
    """A function for ``model.generate(..., custom_generate=...)``, which runs the same loop.

    transformers tells such a function nothing of ``streamer``, ``assistant_model``, ``synced_gpus`` and ``tokenizer``: a loop over the
    streamer never ends, and the others are dropped. :func:`foredraft.attach` honours streamer and tokenizer, and refuses the others.

    Args:
        drafter: as in :class:`Speculator`.
        seed: can also be given per call, ``model.generate(..., seed=7)``; so can ``output_logprobs``.
        streamer: must be given here, not to ``generate``.
        options: those of :class:`Speculator`, which is built at the first call and kept in the function.

    Stop strings need the tokenizer: use a ``StopStringCriteria`` in ``stopping_criteria``.
    """
    speculator: Speculator | None = None

    def decode(
        model: Any,
        input_ids: Tensor,
        inputs_tensor: Tensor,
        seed: Seed | Sequence[Seed] | None = seed,
        output_logprobs: int | None = None,
        **given: Any,
    ) -> Any:
        nonlocal speculator
        given |= {"inputs_tensor": inputs_tensor, "streamer": streamer, "output_logprobs": output_logprobs}
        with ending(streamer):
            prepared = Prepared.of(model, input_ids, seed=seed, **given).as_asked()
            if speculator is None or speculator.model is not model:
                if speculator is not None:
                    speculator.close()
                    speculator = None
                speculator = Speculator(model, drafter, **options)
            run = Run(speculator, prepared)
        return run.finish_as_asked()

    return decode
