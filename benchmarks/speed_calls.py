"""Calls of the speed suite as they are recorded, and figures over all of them.

A figure over all prompts is a quotient of sums: tokens, over the sum of each prompt's median seconds. Intervals are bootstraps in which
prompts and repeats are drawn with replacement. All methods of a scenario share the draws, so that a quotient of two is paired by prompt
and by repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foredraft.estimates import Estimate, Grid, quotient

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Measurement:
    """One call.

    Attributes:
        tokens: new tokens, over all rows; ``seconds`` of the whole call.
        times: seconds from the call to each token of the first row; empty where the side does not tell.
        rounds, kept: row-passes after the prompt's, and the tokens that came from them; None where not told.
        same: equal to what the side's own plain decoding returned; None where there is nothing to compare.
        differs: position of the first new token that differs from it.
        same_as_reference, differs_from_reference: the same against the reference, ``PeerSuite.reference``.
        others: CPU seconds that the stopped methods used meanwhile, over the call's.
        more: what else the side told.
    """

    target: str
    dtype: str
    scenario: str
    batch: int
    index: int
    category: str
    method: str
    repeat: int
    tokens: int
    seconds: float
    times: tuple[float, ...] = ()
    rounds: int | None = None
    kept: int | None = None
    passes: int | None = None
    split: dict[str, float] = field(default_factory=dict)
    same: bool | None = None
    differs: int | None = None
    same_as_reference: bool | None = None
    differs_from_reference: int | None = None
    predicted: float | None = None
    others: float | None = None
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Read:
    """A large read of memory, bytes per second, right after Foredraft's plain call of the same prompt and repeat."""

    target: str
    dtype: str
    index: int
    repeat: int
    rate: float


@dataclass(frozen=True)
class Curve:
    """A cost curve of Foredraft's target with ``length`` tokens drafted, as its adapter measured it in one repeat."""

    target: str
    dtype: str
    method: str
    length: int
    rows: int
    repeat: int
    values: dict[str, Any]


def first_difference(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> int | None:
    """The earliest position, over all rows, at which the texts part; None where they are equal."""
    positions = [
        next((at for at, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
        for mine, theirs in zip(expected, got)
        if list(mine) != list(theirs)
    ]
    return min(positions, default=None)


class Calls:
    """All calls of one scenario and batch in one target and dtype, by method."""

    def __init__(self, measurements: Sequence[Measurement]):
        self.cells = sorted({each.index for each in measurements})
        self.repeats = sorted({each.repeat for each in measurements})
        self.by_method: dict[str, list[Measurement]] = {}
        for each in measurements:
            self.by_method.setdefault(each.method, []).append(each)

    @property
    def finished(self) -> list[str]:
        """Methods that made every call; the others have no figures."""
        return [name for name, calls in self.by_method.items() if len(calls) == len(self.cells) * len(self.repeats)]

    def grid(self, name: str, value: Callable[[Measurement], float | None]) -> Grid | None:
        """``[prompts, repeats]`` of a value, or None where a call is missing or does not have it."""
        if name not in self.finished:
            return None
        grid = np.full((len(self.cells), len(self.repeats)), np.nan)
        for each in self.by_method[name]:
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

    def in_turns(self, name: str, other: str) -> Estimate | None:
        """Tokens per second over those of ``other`` in the same turn: the median over repeats, and the mean over prompts. What the machine
        does for longer than a turn is in both, so this tells smaller differences than a quotient of two rates."""
        grids = [self.grid(each, lambda call: call.tokens / call.seconds) for each in (name, other)]
        return None if grids[0] is None or grids[1] is None else quotient(grids[0] / grids[1], np.ones_like(grids[1]))

    def seconds_per_token(self, name: str) -> Grid | None:
        """``[prompts, repeats]`` of the first row, after the tokens of its first pass."""
        return self.grid(name, lambda each: (each.seconds - each.times[0]) / max(1.0, later_tokens(each) or 0.0) if each.times else None)

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
        times = [each.times[0] for each in self.by_method[name] if each.times] if name in self.finished else []
        return float(np.median(times)) if times else None

    def percentiles(self, name: str) -> tuple[float, ...] | None:
        """Seconds between one token and the next, at ``PERCENTILES``; tokens of one round come together."""
        gaps = [gap for each in self.by_method[name] for gap in np.diff(each.times)] if name in self.finished else []
        return tuple(float(value) for value in np.percentile(gaps, PERCENTILES)) if gaps else None

    def equal(self, name: str, reference: bool = False) -> tuple[int, int, int | None]:
        """Calls whose text equals plain decoding's, calls that were compared, and the first position at which one differs."""
        calls = self.by_method.get(name, ())
        said = [each.same_as_reference if reference else each.same for each in calls]
        places = [each.differs_from_reference if reference else each.differs for each in calls]
        return said.count(True), len(said) - said.count(None), min((place for place in places if place is not None), default=None)

    def by_depth(self, name: str) -> list[tuple[int, int]]:
        """Accepted and drafted tokens at each depth, summed over calls."""
        sums: list[list[int]] = []
        for each in self.by_method.get(name, ()):
            for index, key in enumerate(("accepted_by_depth", "drafted_by_depth")):
                for depth, count in enumerate(each.more.get(key, ())):
                    sums += [[0, 0] for _ in range(depth + 1 - len(sums))]
                    sums[depth][index] += count
        return [(accepted, drafted) for accepted, drafted in sums]


def later_tokens(each: Measurement) -> float | None:
    """Tokens of the first row that came after the first moment."""
    return float(sum(moment > each.times[0] for moment in each.times)) if each.times else None
