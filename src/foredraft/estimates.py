"""Measurements that take turns, their spreads over repeats, and bootstrap intervals.

Intervals are percentile bootstraps (Efron and Tibshirani 1993). All methods of a comparison share the draws, so that a quotient of two
is paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
LEVEL = 0.95
Grid = NDArray[np.float64]  # [prompts, repeats]
T = TypeVar("T")


def turned(names: list[T], by: int) -> list[T]:
    """``names`` rotated, so that none always follows the same one's leftovers in the processor's caches."""
    by %= max(len(names), 1)
    return names[by:] + names[:by]


@dataclass(frozen=True)
class Spread:
    """A value with an interval around it: smallest and largest of the repeats, or a confidence interval."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(median(values), min(values), max(values))

    @staticmethod
    def interval(value: float, draws: NDArray[np.float64]) -> Spread:
        """``value`` with the bootstrap interval of ``draws``."""
        low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Spread(float(value), float(low), float(high))

    def text(self, digits: int = 2, scale: float = 1.0) -> str:
        """Such as ``1.50 (1.42–1.61)``, all three times ``scale``."""
        value, low, high = (f"{each * scale:.{digits}f}" for each in (self.median, self.low, self.high))
        return f"{value} ({low}–{high})"

    def percent(self) -> str:
        return f"{self.median:.1%} ({self.low:.1%}–{self.high:.1%})"


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
        return Spread.interval(self.value, self.draws)


def quotient(above: Grid, below: Grid) -> Estimate:
    """Sum over prompts of the median over repeats of ``above``, over the same of ``below``; prompts and repeats are drawn."""
    prompts, repeats = above.shape
    generator = np.random.default_rng(0)  # the same draws for everybody
    rows = generator.integers(prompts, size=(RESAMPLES, prompts))
    columns = generator.integers(repeats, size=(RESAMPLES, repeats))

    def drawn(grid: Grid) -> Grid:
        return np.asarray(np.median(grid[rows[:, :, None], columns[:, None, :]], axis=-1).sum(-1), dtype=np.float64)

    def whole(grid: Grid) -> float:
        return float(np.median(grid, axis=-1).sum())

    return Estimate(whole(above) / whole(below), drawn(above) / drawn(below))
