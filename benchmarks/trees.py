"""The trees suite: what a round costs outside forward passes when it drafts and verifies a tree, and where that time goes.

One row, greedy and sampled, with a draft model. Rounds are timed one by one: the loop's verbs are wrapped on the instances while a
session runs, and forward passes of target and draft are recorded by hooks, as in the overhead suite. Every contender runs every
prompt in every repeat, interleaved, after a warm-up. Only rounds with room for the whole shape are run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import prompts
from benchmarks.overhead import DRAFT, TARGET, turned
from benchmarks.passes import Pass, PassRecorder, synchroniser
from foredraft import Speculator
from foredraft.drafters.draft_model import DraftModel
from foredraft.errors import ConfigurationError
from foredraft.loading import load_model, load_tokenizer
from foredraft.rows import RowParameters
from foredraft.shapes import TreeShape

MODES = ("greedy", "sampled")
GROWTH, DRAFT_SIDE, TARGET_SIDE, VERIFICATION, REST = "growth", "draft side", "target side", "verification", "rest"
OWN = "own"  # calls of the draft model's cache
PARTS = (GROWTH, DRAFT_SIDE, TARGET_SIDE, VERIFICATION, REST)
"""Of a round outside forwards: choosing tokens and building the draft's tree; masks and cache of the draft, and of the target; from
the target's logits to the verdict on the host; and all else."""


@dataclass(frozen=True)
class Settings:
    """What is run. ``shapes`` are separated by spaces; ``nodes`` is the size from which on the claim is made."""

    target: str = "zoo:python-300m"
    draft: str = "zoo:python-1m"
    dtype: str = "bfloat16"
    device: str = "cpu"
    threads: int = 2
    shapes: str = "chain(4) product(4,1,1,1) dynamic(depth=4,k=4,total=16)"
    nodes: int = 16
    prompts: int = 5
    rounds: int = 12
    repeats: int = 3


@dataclass(frozen=True)
class Contender:
    """A mode and a shape."""

    mode: str
    shape: str

    @property
    def name(self) -> str:
        return f"{self.mode}, {self.shape}"

    @property
    def nodes(self) -> int:
        return TreeShape.parse(self.shape).nodes


@dataclass(frozen=True)
class Round:
    """Seconds of one round: the whole, forward passes of target and draft, and the ``parts`` outside them."""

    contender: str
    repeat: int
    prompt: int
    tokens: int
    wall: float
    target: float
    draft: float
    parts: dict[str, float]

    @property
    def outside(self) -> float:
        return self.wall - self.target - self.draft

    @property
    def share(self) -> float:
        return self.outside / self.wall


@dataclass(frozen=True)
class Call:
    """One call of a verb, ``begin`` and ``end`` in ``perf_counter`` seconds."""

    verb: str
    begin: float
    end: float

    def within(self, other: Call) -> bool:
        return other.begin <= self.begin and self.end <= other.end


class Run:
    """One run of the suite; ``advance`` is called after each step of ``steps``."""

    def __init__(self, settings: Settings, advance: Callable[[], None] = lambda: None):
        self.settings, self.advance = settings, advance
        shapes = settings.shapes.split()
        if not all(TreeShape.parse(shape).nodes for shape in shapes):
            raise ConfigurationError(f"a shape without drafted nodes has nothing to measure, got {settings.shapes}")
        self.contenders = {each.name: each for each in (Contender(mode, shape) for mode in MODES for shape in shapes)}
        self.rules: dict[str, str] = {}
        self.rounds: list[Round] = []

    @property
    def steps(self) -> int:
        return (self.settings.repeats + 1) * self.settings.prompts * len(self.contenders)

    def run(self) -> None:
        """Measure every contender on every prompt in every repeat, after a warm-up of each.

        Raises:
            ConfigurationError: a model that cannot be loaded.
        """
        settings = self.settings
        torch.set_num_threads(settings.threads)
        target, draft = (load_model(name, dtype=settings.dtype, device=settings.device) for name in (settings.target, settings.draft))
        tokenizer = load_tokenizer(settings.target)
        texts = [tokenizer(text)["input_ids"] for text in prompts.PYTHON[: settings.prompts]]
        speculators = {each.shape: Speculator(target, DraftModel(draft), shape=each.shape) for each in self.contenders.values()}
        for repeat in range(settings.repeats + 1):
            for index, text in enumerate(texts):
                gc.collect()
                for name in turned(list(self.contenders), repeat * len(texts) + index):
                    contender = self.contenders[name]
                    measured = self._measure(contender, speculators[contender.shape], text, repeat - 1, index)
                    if repeat:  # the first is the warm-up
                        self.rounds += measured
                    self.advance()

    def _measure(self, contender: Contender, speculator: Speculator, text: Sequence[int], repeat: int, index: int) -> list[Round]:
        sampled, rounds = contender.mode == "sampled", self.settings.rounds
        self.rules[contender.name] = speculator.rule.name if sampled else "match"
        session, wait = speculator.session(), synchroniser(speculator.target.device)
        room = (rounds + 2) * (1 + speculator.shape.depth)
        session.add(text, RowParameters(max_new_tokens=room, do_sample=sampled, seed=(repeat, index)))
        session.step()  # the prefill
        session.step()  # a round in which the draft model may have a prompt to read
        measured = []
        with watched(speculator) as (recorder, calls):
            for _ in range(rounds):
                recorder.passes.clear()
                calls.clear()
                wait()
                begin = time.perf_counter()
                (commit,) = session.step()
                wait()
                spent = Spent.of(recorder.passes, calls, begin, time.perf_counter())
                measured.append(Round(contender.name, repeat, index, len(commit.tokens), **vars(spent)))
        session.close()
        return measured


@contextmanager
def watched(speculator: Speculator) -> Iterator[tuple[PassRecorder, list[Call]]]:
    """Record forward passes of both models, and calls of the loop's verbs and of those of the draft model's own cache."""
    drafter, target = speculator.drafter, speculator.target
    assert isinstance(drafter, DraftModel)
    verbs: list[tuple[object, tuple[str, ...], str]] = [
        (drafter, ("draft", "observe"), ""),
        (target, ("score", "commit"), ""),
        (drafter.model, ("score", "advance", "prefill", "rewind", "commit"), OWN),
    ]
    calls: list[Call] = []
    with ExitStack() as stack:
        for owner, names, alias in verbs:
            for verb in names:
                stack.enter_context(_timed(owner, verb, alias or verb, calls))
        yield stack.enter_context(PassRecorder(**{TARGET: target.model, DRAFT: drafter.model.model})), calls


@contextmanager
def _timed(owner: Any, verb: str, name: str, calls: list[Call]) -> Iterator[None]:
    """Add each call of ``owner.verb`` to ``calls``; the wrapper sits on the instance and is taken off afterwards."""
    original = getattr(owner, verb)

    def timed(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        result = original(*arguments, **options)
        calls.append(Call(name, begin, time.perf_counter()))
        return result

    setattr(owner, verb, timed)
    try:
        yield
    finally:
        delattr(owner, verb)


@dataclass(frozen=True)
class Spent:
    """What a round's time went to, in seconds; see :class:`Round`."""

    wall: float
    target: float
    draft: float
    parts: dict[str, float]

    @staticmethod
    def of(passes: Sequence[Pass], calls: Sequence[Call], begin: float, end: float) -> Spent:
        """From what was recorded of a round that lasted from ``begin`` to ``end``."""
        target, draft = (sum(each.seconds for each in passes if each.model == model) for model in (TARGET, DRAFT))
        one = {call.verb: call for call in calls if call.verb != OWN}
        own = outermost([call for call in calls if call.verb == OWN])
        parts = {
            GROWTH: _outside(one["draft"], passes) - sum(_outside(call, passes) for call in own if call.within(one["draft"])),
            DRAFT_SIDE: _outside(one["observe"], passes) + sum(_outside(call, passes) for call in own if call.within(one["draft"])),
            TARGET_SIDE: _outside(one["score"], passes) + _outside(one["commit"], passes),
            VERIFICATION: one["commit"].begin - one["score"].end,
        }
        return Spent(end - begin, target, draft, {**parts, REST: end - begin - target - draft - sum(parts.values())})


def outermost(calls: Sequence[Call]) -> list[Call]:
    """``calls`` that are not made by another of them."""
    return [call for call in calls if not any(call is not other and call.within(other) for other in calls)]


def _outside(call: Call, passes: Sequence[Pass]) -> float:
    return call.end - call.begin - sum(each.seconds for each in passes if call.begin <= each.begin and each.end <= call.end)
