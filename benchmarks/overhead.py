"""The overhead suite: what a round costs outside the model's forward passes, beside transformers' own generation.

Every contestant decodes every prompt in every repeat, interleaved in one process after a warm-up of each, in an order that turns
from prompt to prompt. For both sides alike, forward passes are timed by :class:`~benchmarks.passes.PassRecorder`; what is
left of the wall time is the overhead. A *round* is a target pass after the prefill. transformers drafts before its first pass
already, so that this pass may yield several tokens: rounds, their tokens and their time are counted from its end on both sides.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import noise, prompts
from benchmarks.contestants import PLAIN, TRANSFORMERS, Contestant, Decode, Field, contestants
from benchmarks.passes import Pass, PassRecorder, synchroniser
from foredraft.errors import ConfigurationError
from foredraft.loading import load_model, load_tokenizer

TARGET, DRAFT = "target", "draft"
REFERENCE = f"{TRANSFORMERS} {PLAIN}"


@dataclass(frozen=True)
class Settings:
    """What is run; ``max_ngram`` is the longest match of both sides' prompt lookup."""

    target: str = "zoo:python-300m"
    draft: str = "zoo:python-1m"
    dtype: str = "bfloat16"
    device: str = "cpu"
    threads: int = 2
    tokens: int = 64
    prompts: int = 5
    repeats: int = 5
    draft_length: int = 5
    max_ngram: int = 3
    noise_vocab_size: int = 150_000
    noise_repeats: int = 20


@dataclass(frozen=True)
class Measurement:
    """One call. Seconds of the whole call, and of the rounds alone: what follows the end of the prefill's pass."""

    contestant: str
    repeat: int
    prompt: int
    tokens: int
    target_passes: int
    draft_passes: int
    wall: float
    target_seconds: float
    draft_seconds: float
    first_pass_at: float
    rounds: int
    round_tokens: int
    round_wall: float
    round_outside: float
    same_as_plain: bool | None  # None where the reference failed

    @property
    def outside(self) -> float:
        return self.wall - self.target_seconds - self.draft_seconds


@dataclass(frozen=True)
class Failure:
    """What could not be measured, and why; it has no figures."""

    contestant: str
    stage: str
    message: str


class Run:
    """One run of the suite; ``advance`` is called after each step of ``steps``."""

    def __init__(self, settings: Settings, advance: Callable[[], None] = lambda: None, *, entrants: Sequence[Contestant] | None = None):
        self.settings, self.advance = settings, advance
        self.entrants = list(contestants() if entrants is None else entrants)
        self.measurements: list[Measurement] = []
        self.failures: list[Failure] = []
        self.noise: list[dict[str, Any]] = []
        self._plain: list[list[int]] | None = None  # the reference's tokens, per prompt

    @property
    def steps(self) -> int:
        return (self.settings.repeats + 1) * self.settings.prompts * len(self.entrants) + 2 * (self.settings.noise_repeats + 1)

    def run(self) -> None:
        """Compare, then measure the noise; what fails is in ``failures`` and the rest goes on.

        Raises:
            ConfigurationError: a model that cannot be loaded, or too few tokens for a round to be sure.
        """
        settings = self.settings
        if settings.tokens < settings.draft_length + 2:
            raise ConfigurationError(
                f"{settings.tokens} tokens may all come from the first pass; ask for {settings.draft_length + 2} or more"
            )
        torch.set_num_threads(settings.threads)
        field, texts = self._load()
        self._compare(field, texts)
        if settings.noise_repeats:
            self.noise = self._attempt("keyed noise", "measurement", partial(self._noise, field, texts[0])) or []

    def _noise(self, field: Field, prompt: Tensor) -> list[dict[str, Any]]:
        return noise.measure(
            field.target,
            prompt[0].tolist(),
            vocab_size=self.settings.noise_vocab_size,
            nodes=(1, self.settings.draft_length + 1),
            repeats=self.settings.noise_repeats,
            advance=self.advance,
        )

    def _load(self) -> tuple[Field, list[Tensor]]:
        settings = self.settings
        target, draft = (load_model(name, dtype=settings.dtype, device=settings.device) for name in (settings.target, settings.draft))
        field = Field(target, draft, settings.tokens, settings.draft_length, settings.max_ngram)
        field.prepare()
        tokenizer = load_tokenizer(settings.target)
        written = prompts.PYTHON[: settings.prompts]
        return field, [tokenizer(text, return_tensors="pt")["input_ids"].to(target.device) for text in written]

    def _compare(self, field: Field, texts: Sequence[Tensor]) -> None:
        ready = {entrant.name: decode for entrant in self.entrants if (decode := self._warm(entrant, field, texts))}
        for repeat in range(self.settings.repeats):
            for index, text in enumerate(texts):
                for name in turned(list(ready), repeat * len(texts) + index):
                    work = partial(self._measure, name, ready[name], field, text, repeat, index)
                    measured = self._attempt(name, "measurement", work)
                    if measured is None:  # out of the rest of the run: half a contestant has no median
                        del ready[name]
                    else:
                        self.measurements.append(measured)
                    self.advance()

    def _warm(self, entrant: Contestant, field: Field, texts: Sequence[Tensor]) -> Decode | None:
        """Build, and decode every prompt once; the reference's tokens are kept."""
        decode: Decode | None = self._attempt(entrant.name, "set-up", partial(entrant.build, field))
        found = []
        for text in texts:
            tokens = self._attempt(entrant.name, "warm-up", partial(decode, text)) if decode else None
            self.advance()
            if tokens is None:
                return None
            found.append(tokens)
        if entrant.name == REFERENCE:
            self._plain = found
        return decode

    def _attempt(self, name: str, stage: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            self.failures.append(Failure(name, stage, f"{type(error).__name__}: {error}"))
            return None

    def _measure(self, name: str, decode: Decode, field: Field, prompt: Tensor, repeat: int, index: int) -> Measurement:
        gc.collect()
        wait = synchroniser(prompt.device)
        with PassRecorder(**{TARGET: field.target, DRAFT: field.draft}) as recorder:
            wait()
            begin = time.perf_counter()
            tokens = decode(prompt)
            wait()
            end = time.perf_counter()
        if len(tokens) != field.tokens:
            raise RuntimeError(f"{len(tokens)} tokens came back where {field.tokens} were asked for")
        same = None if self._plain is None else tokens == self._plain[index]
        return measurement(
            recorder.passes, prompt.shape[1], len(tokens), begin, end, contestant=name, repeat=repeat, prompt=index, same_as_plain=same
        )


def measurement(passes: Sequence[Pass], prompt_length: int, tokens: int, begin: float, end: float, **who: Any) -> Measurement:
    """A call's figures from its forward passes. The next pass shows what a pass yielded: it starts that much further on."""
    target = [each for each in passes if each.model == TARGET]
    prefill = next(index for index, each in enumerate(target) if each.start + each.nodes >= prompt_length)
    rounds = target[prefill + 1 :]
    first_tokens = rounds[0].start - prompt_length + 1 if rounds else tokens
    since = target[prefill].end
    return Measurement(
        **who,
        tokens=tokens,
        target_passes=len(target),
        draft_passes=len(passes) - len(target),
        wall=end - begin,
        target_seconds=sum(each.seconds for each in target),
        draft_seconds=sum(each.seconds for each in passes if each.model == DRAFT),
        first_pass_at=since - begin,
        rounds=len(rounds),
        round_tokens=tokens - first_tokens,
        round_wall=end - since,
        round_outside=end - since - sum(each.seconds for each in passes if each.begin >= since),
    )


def turned(names: list[str], by: int) -> list[str]:
    """``names`` rotated, so that none always follows the same one's leftovers in the processor's caches."""
    by %= max(len(names), 1)
    return names[by:] + names[:by]


def mismatches(measurements: Sequence[Measurement]) -> dict[str, int]:
    """Per contestant, in how many calls the tokens differ from the reference's."""
    found = Counter(each.contestant for each in measurements if each.same_as_plain is False)
    return {name: found[name] for name in dict.fromkeys(each.contestant for each in measurements)}


def raw(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    return [{**asdict(each), "outside": each.outside} for each in measurements]
