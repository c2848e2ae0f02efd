"""Arithmetic of the speed suite: medians over repeats, and what they are worth.

A figure over all prompts is a quotient of sums: tokens, over the sum of each prompt's median seconds. Intervals are percentile
bootstraps (Efron and Tibshirani 1993) in which prompts and repeats are drawn with replacement. All contenders of a scenario share
the draws, so that a quotient of two is paired by prompt and by repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.speed_records import Measurement
from benchmarks.verdicts import Spread

RESAMPLES = 2000
LEVEL = 0.95
PERCENTILES = (50, 90, 99)
Grid = NDArray[np.float64]  # [prompts, repeats]


@dataclass(frozen=True)
class Estimate:
    """A ``value``, and the same of every draw of the bootstrap. Quotients and products of two are paired by draw."""

    value: float
    draws: Grid

    def __truediv__(self, other: Estimate | float) -> Estimate:
        if isinstance(other, Estimate):
            return Estimate(self.value / other.value, self.draws / other.draws)
        return Estimate(self.value / other, self.draws / other)

    def __mul__(self, other: Estimate | float) -> Estimate:
        if isinstance(other, Estimate):
            return Estimate(self.value * other.value, self.draws * other.draws)
        return Estimate(self.value * other, self.draws * other)

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(self.value + other.value, self.draws + other.draws)

    @property
    def spread(self) -> Spread:
        low, high = np.quantile(self.draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Spread(self.value, float(low), float(high))

    def better(self, other: Estimate) -> bool:
        return self.value > other.value


def quotient(above: Grid, below: Grid) -> Estimate:
    """Sum over prompts of the median over repeats of ``above``, over the same of ``below``."""
    prompts, repeats = above.shape
    generator = np.random.default_rng(0)  # the same draws for everybody
    rows = generator.integers(prompts, size=(RESAMPLES, prompts))
    columns = generator.integers(repeats, size=(RESAMPLES, repeats))

    def drawn(grid: Grid) -> Grid:
        return np.asarray(np.median(grid[rows[:, :, None], columns[:, None, :]], axis=-1).sum(-1), dtype=np.float64)

    def whole(grid: Grid) -> float:
        return float(np.median(grid, axis=-1).sum())

    return Estimate(whole(above) / whole(below), drawn(above) / drawn(below))


class Calls:
    """All calls of one scenario and batch in one target and dtype, by contender."""

    def __init__(self, measurements: Sequence[Measurement]):
        self.cells = sorted({each.index for each in measurements})
        self.repeats = sorted({each.repeat for each in measurements})
        self.by_contender: dict[str, list[Measurement]] = {}
        for each in measurements:
            self.by_contender.setdefault(each.contender, []).append(each)

    @property
    def finished(self) -> list[str]:
        """Contenders that made every call; the others have no figures."""
        return [name for name, calls in self.by_contender.items() if len(calls) == len(self.cells) * len(self.repeats)]

    def grid(self, name: str, value: Callable[[Measurement], float | None]) -> Grid | None:
        """``[prompts, repeats]`` of a value, or None where a call is missing or does not have it."""
        if name not in self.finished:
            return None
        grid = np.full((len(self.cells), len(self.repeats)), np.nan)
        for each in self.by_contender[name]:
            found = value(each)
            if found is not None:
                grid[self.cells.index(each.index), self.repeats.index(each.repeat)] = found
        return None if np.isnan(grid).any() else grid

    def _quotient(
        self, name: str, above: Callable[[Measurement], float | None], below: Callable[[Measurement], float | None]
    ) -> Estimate | None:
        grids = self.grid(name, above), self.grid(name, below)
        if grids[0] is None or grids[1] is None or not np.median(grids[1], axis=-1).sum():
            return None
        return quotient(grids[0], grids[1])

    def rate(self, name: str) -> Estimate | None:
        """New tokens per second of whole calls, over all rows."""
        return self._quotient(name, lambda each: each.tokens, lambda each: each.seconds)

    def decoding_rate(self, name: str) -> Estimate | None:
        """Tokens per second of the first row after the tokens of its first pass: what rounds make, without the prompt's pass."""
        return self._quotient(name, later_tokens, lambda each: each.seconds - each.times[0] if each.times else None)

    def over_reads(self, name: str, size: int, reads: Mapping[tuple[int, int], float]) -> Estimate | None:
        """Effective bandwidth over that of a large read: the seconds in which ``size`` bytes can be read, over those of a token after the
        first. ``reads`` are bytes per second by prompt and repeat."""

        def per_token(each: Measurement) -> float | None:
            later = later_tokens(each)
            return (each.seconds - each.times[0]) / later if later else None

        def reading(each: Measurement) -> float | None:
            rate = reads.get((each.index, each.repeat))
            return size / rate if rate else None

        return self._quotient(name, reading, per_token)

    def acceptance(self, name: str) -> Estimate | None:
        """Tokens kept per row-pass."""
        return self._quotient(name, lambda each: each.kept, lambda each: each.rounds)

    def predicted_seconds(self, name: str) -> Estimate | None:
        """Decoding seconds that the planner expected, over those that it took: measured speed over predicted speed."""

        def expected(each: Measurement) -> float | None:
            later = later_tokens(each)
            return None if later is None or not each.predicted else later / each.predicted

        return self._quotient(name, expected, lambda each: each.seconds - each.times[0] if each.times else None)

    def share(self, name: str, part: str) -> Estimate | None:
        return self._quotient(name, lambda each: each.split.get(part), lambda each: each.seconds)

    def part(self, name: str, part: str) -> Estimate | None:
        """Seconds of one part of a round, of batch 1."""
        return self._quotient(name, lambda each: each.split.get(part), lambda each: each.rounds)

    def first_token(self, name: str) -> float | None:
        times = [each.times[0] for each in self.by_contender.get(name, ()) if each.times]
        return float(np.median(times)) if times else None

    def percentiles(self, name: str) -> tuple[float, ...] | None:
        """Seconds between one token and the next, at ``PERCENTILES``; tokens of one round come together."""
        gaps = [gap for each in self.by_contender.get(name, ()) for gap in np.diff(each.times)]
        return tuple(float(value) for value in np.percentile(gaps, PERCENTILES)) if gaps else None

    def equal(self, name: str, reference: bool = False) -> tuple[int, int, int | None]:
        """Calls whose text equals plain decoding's, calls that were compared, and the first position at which one differs."""
        calls = self.by_contender.get(name, ())
        said = [each.same_as_reference if reference else each.same for each in calls]
        places = [each.differs_from_reference if reference else each.differs for each in calls]
        return said.count(True), len(said) - said.count(None), min((place for place in places if place is not None), default=None)

    def by_depth(self, name: str) -> list[tuple[int, int]]:
        """Accepted and drafted tokens at each depth, summed over calls."""
        sums: list[list[int]] = []
        for each in self.by_contender.get(name, ()):
            for index, key in enumerate(("accepted_by_depth", "drafted_by_depth")):
                for depth, count in enumerate(each.more.get(key, ())):
                    sums += [[0, 0] for _ in range(depth + 1 - len(sums))]
                    sums[depth][index] += count
        return [(accepted, drafted) for accepted, drafted in sums]


def later_tokens(each: Measurement) -> float | None:
    """Tokens of the first row that came after the first moment."""
    return float(sum(moment > each.times[0] for moment in each.times)) if each.times else None


def best(names: Sequence[str], value: Callable[[str], Estimate | None]) -> tuple[str, Estimate] | None:
    """Whoever of ``names`` has the largest value."""
    found = [(name, estimate) for name in names if (estimate := value(name)) is not None]
    return max(found, key=lambda pair: pair[1].value) if found else None
