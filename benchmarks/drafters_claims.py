"""What is promised of the drafters that need no training, and what a run says about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.drafters import COPIES, PROMPT_LOOKUP, SEVERAL, SUFFIX, THEIRS, Run
from benchmarks.replays import Kept
from benchmarks.speed_claims import WORST, Figure
from benchmarks.speed_figures import Calls, Estimate, best, quotient
from benchmarks.speed_plan import RANDOM, TEXT
from benchmarks.verdicts import Spread

MEMBERS, OVER_VLLM = 0.98, {"bfloat16": 1.5}
ALL = "all suites"


def made(run: Run) -> list[Figure]:
    """Everything that is promised: acceptance by replay, then for every target and dtype."""
    found = replays(run)
    for target in run.settings.targets:
        for dtype in run.settings.dtypes:
            found += Findings(run, target, dtype).figures()
    return found


# -- by replay ------------------------------------------------------------------------------------------------------------


def acceptance(kept: Sequence[Kept]) -> Estimate | None:
    """Tokens over passes of several texts; the interval is over texts. Those of the same texts are paired."""
    if not kept or not sum(each.passes for each in kept):
        return None
    grids = (np.array([[float(value)] for value in values]) for values in ([each.kept for each in kept], [each.passes for each in kept]))
    return quotient(*grids)


def replays(run: Run) -> list[Figure]:
    """``suffix`` at its defaults against prompt lookup at its own, everywhere, and where text is copied against its best setting."""
    found = []
    names = {each.drafter for each in run.replays}
    if not {SUFFIX, PROMPT_LOOKUP} <= names:
        return []
    for suite in dict.fromkeys(each.suite for each in run.replays):
        for length in dict.fromkeys(each.length for each in run.replays):
            mine = [each for each in run.replays if (each.suite, each.length) == (suite, length)]
            by_name = {each.name: [other for other in mine if other.name == each.name] for each in mine}
            suffix, lookup = acceptance(by_name[SUFFIX]), acceptance(by_name[PROMPT_LOOKUP])
            name = f"{suite}, γ = {length}: acceptance length of suffix over prompt lookup's"
            found.append(_ratio(name, suffix, lookup, 1.0))
            if suite in COPIES:
                settings = [each for each in by_name if each.split(", ")[0] == PROMPT_LOOKUP]
                most = best(settings, lambda each, by_name=by_name: acceptance(by_name[each]))  # type: ignore[misc]
                if most is not None:
                    figure = _ratio(f"{name} best setting", suffix, most[1], 1.0, more=True)
                    found.append(Figure(figure.name, 1.0, figure.spread, how=f"{figure.how} ({most[0]})", more=True))
    return found


def _ratio(name: str, ours: Estimate | None, theirs: Estimate | None, low: float, *, more: bool = False) -> Figure:
    if ours is None or theirs is None:
        return Figure(name, low, None, more=more)
    return Figure(name, low, _spread(ours / theirs), how=f"{ours.value:.3f} over {theirs.value:.3f}", more=more)


def _spread(estimate: Estimate) -> Spread:
    return estimate.spread


# -- by the clock ---------------------------------------------------------------------------------------------------------


class Findings:
    """One target in one dtype."""

    def __init__(self, run: Run, target: str, dtype: str):
        self.run, self.target, self.dtype = run, target, dtype
        self.mine = [each for each in run.measurements if (each.target, each.dtype) == (target, dtype)]
        self.label = dtype if len(run.settings.targets) == 1 else f"{target} {dtype}"

    def calls(self, suite: str | None = None, scenario: str = TEXT) -> Calls:
        """Of one suite, or of all together."""
        return Calls([each for each in self.mine if each.scenario == scenario and suite in (None, each.category)])

    def names(self, side: str, mode: str, *, length: int | None = None) -> list[str]:
        """Settings of one drafter on one side that keep what they learn as they come, of one draft length or of any."""
        return [
            name
            for name, each in self.run.everyone.items()
            if (each.side, each.mode) == (side, mode) and not each.hopeless and not each.fresh and length in (None, each.length)
        ]

    def figures(self) -> list[Figure]:
        return [*self.several(), *self.random(), *self.against()]

    def figure(
        self, name: str, low: float, ours: tuple[str, Estimate] | None, theirs: tuple[str, Estimate] | None, *, more: bool = False
    ) -> Figure:
        """``ours`` over ``theirs``, each with whom it is of."""
        name = f"{self.label}: {name}"
        if ours is None or theirs is None:
            return Figure(name, low, None, how="" if theirs else "nothing to compare with", more=more)
        how = f"{ours[0]} {ours[1].value:.2f}, {theirs[0]} {theirs[1].value:.2f}"
        return Figure(name, low, (ours[1] / theirs[1]).spread, how=how, more=more)

    def several(self) -> list[Figure]:
        """``several`` against the best of its members as they are alone, after the prompt's pass, suite by suite."""
        if SEVERAL not in self.run.settings.drafters:
            return []
        found = []
        for suite in self.run.suites:
            calls = self.calls(suite)
            members = [name for member in self.run.settings.members for name in self.names("foredraft", member, length=0)]
            ours, theirs = (best(names, calls.decoding_rate) for names in (self.names("foredraft", SEVERAL, length=0), members))
            found.append(self.figure(f"{suite}: tokens/s of several over its best member's, after the first token", MEMBERS, ours, theirs))
        return found

    def random(self) -> list[Figure]:
        """Text that cannot be guessed, against plain decoding of the same."""
        calls = self.calls(scenario=RANDOM)
        plain = best(["foredraft plain"], calls.rate)
        names = [name for name, each in self.run.everyone.items() if each.hopeless]
        return [
            self.figure(f"random text: tokens/s over plain, {self.run.everyone[name].mode}", WORST, best([name], calls.rate), plain)
            for name in names
        ]

    def against(self) -> list[Figure]:
        """vLLM's drafters of the same kinds: the best setting of each side over all suites, and acceptance at equal length."""
        found, calls = [], self.calls()
        low = OVER_VLLM.get(self.dtype, 1.0)
        for drafter, mode in THEIRS.items():
            for side in self.run.settings.peers if drafter in self.run.settings.drafters else ():
                whom = f"{side}'s {'ngram' if mode != SUFFIX else mode}"
                rates: list[tuple[str, Callable[[str], Estimate | None]]] = [
                    ("", calls.rate),
                    (", after the first token", calls.decoding_rate),
                ]
                for words, rate in rates:
                    ours, theirs = best(self.names("foredraft", drafter), rate), best(self.names(side, mode), rate)
                    found.append(self.figure(f"{ALL}: tokens/s of {drafter} over {whom}{words}", low, ours, theirs, more=low == 1.0))
                for length in self.run.settings.lengths:
                    ours, theirs = (
                        best(self.names(each, kind, length=length), calls.acceptance)
                        for each, kind in (("foredraft", drafter), (side, mode))
                    )
                    found.append(self.figure(f"{ALL}: acceptance length of {drafter} over {whom}, γ = {length}", 1.0, ours, theirs))
        return found
