"""From raw measurements to medians, paired ratios, and what the project claims, met or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks import noise
from benchmarks.contestants import DRAFT, FOREDRAFT, LOOKUP, MODES, PLAIN, TRANSFORMERS
from benchmarks.overhead import Measurement


@dataclass(frozen=True)
class Spread:
    """A figure over the repeats."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(median(values), min(values), max(values))


@dataclass(frozen=True)
class Claim:
    """``spread`` must be at most or at least ``bound``. ``met`` looks at the median; None means that it could not be measured."""

    name: str
    bound: float
    at_most: bool
    spread: Spread | None

    @property
    def met(self) -> bool | None:
        if self.spread is None:
            return None
        return self.spread.median <= self.bound if self.at_most else self.spread.median >= self.bound

    @property
    def verdict(self) -> str:
        """A median that misses by less than the repeats differ is no finding either way."""
        if self.spread is None:
            return "not measured"
        if self.met:
            return "met"
        return "within noise" if self.spread.low <= self.bound <= self.spread.high else "missed"

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met, "verdict": self.verdict}


Rows = Sequence[Measurement]
Figure = Callable[[Rows], float]


def total(rows: Rows, name: str) -> float:
    return float(sum(getattr(row, name) for row in rows))


FIGURES: dict[str, Figure] = {
    "tokens_per_second": lambda rows: total(rows, "tokens") / total(rows, "wall"),
    "round_tokens_per_second": lambda rows: total(rows, "round_tokens") / total(rows, "round_wall"),
    "acceptance_length": lambda rows: total(rows, "round_tokens") / total(rows, "rounds"),
    "rounds": lambda rows: total(rows, "rounds"),
    "outside_per_round": lambda rows: total(rows, "round_outside") / total(rows, "rounds"),
    "outside_per_call": lambda rows: total(rows, "outside") / len(rows),
    "target_pass": lambda rows: total(rows, "target_seconds") / total(rows, "target_passes"),
    "draft_pass": lambda rows: total(rows, "draft_seconds") / max(total(rows, "draft_passes"), 1),
    "first_pass_at": lambda rows: total(rows, "first_pass_at") / len(rows),
}
"""Over all prompts of one repeat: sums first, quotients last. Seconds, and tokens per second. `round_…` is from the end of the
prefill's pass on; `acceptance_length` is tokens per round."""

COMPARED = ("tokens_per_second", "round_tokens_per_second", "outside_per_round", "outside_per_call", "target_pass", "first_pass_at")


def summaries(measurements: Rows) -> dict[str, dict[str, Spread]]:
    """Per contestant that finished every repeat, every figure over the repeats."""
    return {name: {figure: Spread.of(values) for figure, values in found.items()} for name, found in by_repeat(measurements).items()}


def by_repeat(measurements: Rows) -> dict[str, dict[str, list[float]]]:
    """Per contestant and figure, one value for each repeat. A contestant that failed on the way is left out."""
    repeats = sorted({each.repeat for each in measurements})
    prompts = len({each.prompt for each in measurements})
    found: dict[str, dict[str, list[float]]] = {}
    for name in dict.fromkeys(each.contestant for each in measurements):
        rows = [[each for each in measurements if each.contestant == name and each.repeat == repeat] for repeat in repeats]
        if all(len(row) == prompts for row in rows):
            found[name] = {figure: [compute(row) for row in rows] for figure, compute in FIGURES.items()}
    return found


def ratios(measurements: Rows) -> dict[str, dict[str, Spread | None]]:
    """Per mode, ours over theirs, paired within each repeat; None where a side failed."""
    found = by_repeat(measurements)
    sides = {mode: (found.get(f"{FOREDRAFT} {mode}"), found.get(f"{TRANSFORMERS} {mode}")) for mode in MODES}
    return {
        mode: {figure: None if ours is None or theirs is None else paired(ours[figure], theirs[figure]) for figure in COMPARED}
        for mode, (ours, theirs) in sides.items()
    }


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    return Spread.of([a / b for a, b in zip(ours, theirs)])


def claims(measurements: Rows, noises: Sequence[dict[str, Any]], *, with_noise: bool) -> list[Claim]:
    """Everything that is claimed about overhead, in the order of the documentation."""
    against = ratios(measurements)
    made = [
        Claim(f"{mode}: time outside forwards per round, against transformers", 0.5, True, against[mode]["outside_per_round"])
        for mode in (DRAFT, LOOKUP)
    ]
    made += [
        Claim(f"{mode}: tokens per second, against transformers", 1.0, False, against[mode]["tokens_per_second"])
        for mode in (DRAFT, LOOKUP, PLAIN)
    ]
    if with_noise and not noises:
        made.append(Claim("keyed noise: share of a target pass", noise.LIMIT, True, None))
    for each in noises:
        shares = [race / each["median_seconds"]["pass"] for race in each["seconds"]["race"]]
        made.append(Claim(f"keyed noise, {each['nodes']} positions: share of a target pass", noise.LIMIT, True, Spread.of(shares)))
    return made
