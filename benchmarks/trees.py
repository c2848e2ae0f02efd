"""The trees suite: what a round costs outside forward passes when it drafts and verifies a tree, and where that time goes.

One row, greedy and sampled, with a draft model. Rounds are timed one by one: the loop's verbs are wrapped on the instances while a
session runs, and forward passes of target and draft are recorded by hooks, as in the overhead suite. Only rounds with room for the whole
shape are run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks import prompts
from benchmarks.figures import Figure
from benchmarks.passes import Pass, PassRecorder, synchroniser
from benchmarks.report import Table
from benchmarks.suite import PairSettings, Suite, option
from foredraft import Speculator
from foredraft.drafters.draft_model import DraftModel
from foredraft.errors import ConfigurationError
from foredraft.estimates import Spread, turned
from foredraft.rows import RowParameters
from foredraft.shapes import TreeShape

LIMIT = 0.1  # of a round
TARGET, DRAFT = "target", "draft"
MODES = ("greedy", "sampled")
GROWTH, DRAFT_SIDE, TARGET_SIDE, VERIFICATION, REST = "growth", "draft side", "target side", "verification", "rest"
OWN = "own"  # calls of the draft model's cache
PARTS = (GROWTH, DRAFT_SIDE, TARGET_SIDE, VERIFICATION, REST)
"""Of a round outside forwards: choosing tokens and building the draft's tree; masks and cache of the draft, and of the target; from
the target's logits to the verdict on the host; and all else."""


@dataclass(frozen=True)
class Settings(PairSettings):
    shapes: str = option("chain(4) product(4,1,1,1) dynamic(depth=4,k=4,total=16)", "Separated by spaces.")
    nodes: int = option(16, "Drafted nodes of the shapes that the figure is about.", least=1)
    prompts: int = option(5, "How many of the five prompts.", least=1, flag="--beginnings")
    rounds: int = option(12, "Measured rounds per prompt.", least=1)
    repeats: int = option(3, "Measured repeats, after the warm-up.", least=1)

    def __post_init__(self) -> None:
        if not all(TreeShape.parse(shape).nodes for shape in self.shapes.split()):
            raise ConfigurationError(f"a shape without drafted nodes has nothing to measure, got {self.shapes}")


@dataclass(frozen=True)
class Method:
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

    method: str
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


FIGURES: dict[str, Callable[[Round], float]] = {
    "share": lambda each: each.share,
    "outside": lambda each: each.outside,
    "wall": lambda each: each.wall,
    "target": lambda each: each.target,
    "draft": lambda each: each.draft,
    **{part: lambda each, part=part: each.parts[part] for part in PARTS},  # type: ignore[misc]
}
"""Seconds of a round, and the share of it that is spent outside forward passes."""


class Trees(Suite[Settings]):
    """What a round with a tree costs outside forward passes, and where that time goes."""

    name = "trees"
    title = "Trees: a round outside the models' forward passes"
    settings_type = Settings
    rounds: list[Round]
    rules: dict[str, str]  # by method

    @property
    def methods(self) -> dict[str, Method]:
        return {each.name: each for each in (Method(mode, shape) for mode in MODES for shape in self.settings.shapes.split())}

    @property
    def steps(self) -> int:
        return (self.settings.repeats + 1) * self.settings.prompts * len(self.methods)

    def run(self) -> None:
        settings, methods = self.settings, self.methods
        torch.set_num_threads(settings.threads)
        target, draft, tokenizer = settings.load()
        texts = [tokenizer(text)["input_ids"] for text in prompts.PYTHON[: settings.prompts]]
        speculators = {each.shape: Speculator(target, DraftModel(draft), shape=each.shape) for each in methods.values()}
        for repeat in range(settings.repeats + 1):
            for index, text in enumerate(texts):
                gc.collect()
                for name in turned(list(methods), repeat * len(texts) + index):
                    measured = self._measure(methods[name], speculators[methods[name].shape], text, repeat - 1, index)
                    if repeat:  # the first is the warm-up
                        self.rounds += measured
                    self.advance()

    def _measure(self, method: Method, speculator: Speculator, text: Sequence[int], repeat: int, index: int) -> list[Round]:
        sampled, rounds = method.mode == "sampled", self.settings.rounds
        self.rules[method.name] = speculator.rule.name if sampled else "match"
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
                measured.append(Round(method.name, repeat, index, len(commit.tokens), **vars(spent)))
        session.close()
        return measured

    # -- what is reported -----------------------------------------------------------------------------------------------

    def summary(self, name: str) -> dict[str, Spread]:
        """Every figure: its median over the rounds of a repeat, spread over the repeats."""
        rounds = [each for each in self.rounds if each.method == name]
        repeats = sorted({each.repeat for each in rounds})
        return {
            figure: Spread.of([median(of(each) for each in rounds if each.repeat == repeat) for repeat in repeats])
            for figure, of in FIGURES.items()
        }

    def figures(self) -> list[Figure]:
        """What a round with a tree of so many nodes may cost beside forward passes."""
        return [
            Figure(f"{name}: share of a round outside forwards", self.summary(name)["share"], high=LIMIT, noise=True)
            for name, each in self.methods.items()
            if each.nodes == self.settings.nodes
        ]

    def tables(self) -> list[Table]:
        figures = [(each.name, f"≤ {LIMIT:.0%}", each.spread.percent(), each.verdict) for each in self.figures() if each.spread]
        whole, split = [], []
        for name, method in self.methods.items():
            found = self.summary(name)
            mine = [each.tokens for each in self.rounds if each.method == name]
            times = [f"{found[figure].median * 1e3:.2f}" for figure in ("wall", "target", "draft")]
            whole.append((name, self.rules[name], str(method.nodes), f"{sum(mine) / len(mine):.2f}", *times, found["share"].percent()))
            split.append((name, found["outside"].text(2, 1e3), *(found[part].text(2, 1e3) for part in PARTS)))
        columns = ("", "rule", "nodes", "tokens per round", "round, ms", "target forward, ms", "draft forwards, ms", "outside")
        return [
            Table("Figures to reach", ("figure", "bound", "measured", "verdict"), figures),
            Table("Rounds", columns, whole),
            Table("A round outside forward passes, ms", ("", "all", *PARTS), split),
        ]

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        settings = self.settings
        return [
            f"Target {settings.target}, draft {settings.draft}, {settings.dtype}; one row, greedy and at temperature 1 without top-k or "
            f"top-p; {settings.prompts} prompts × {settings.rounds} rounds × {settings.repeats} interleaved repeats after a warm-up. "
            "Figures are medians over the rounds of a repeat; then the median over the repeats, with the smallest and largest in brackets.",
            "Outside is a round's wall time without the forward passes of target and draft. Growth: choosing the draft's tokens and "
            "building the tree. Draft side and target side: masks, positions and cache of each. Verification: from the target's logits to "
            "the verdict on the host. Rest: the row's noise, checks, committing the text, statistics.",
            "The chain of the same depth is there to compare with.",
        ]


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
