"""How deep to draft for each row of a batch that ends together.

A batch of ``generate`` is over when its slowest row is. A drafted token of a row that would be done early anyway only makes passes
dearer, and one of the row that everybody waits for saves a whole pass. So the best plan lets all rows end at the same time: for a
number of rounds, every row drafts as little as it needs to be done by then; and the best number is the one with the least seconds
in all. Pure functions of numbers: no model, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RowForecast:
    """What is to be expected of one row: ``remaining`` tokens, how often it has a draft when asked (``available``), and its accepted
    tokens over those of an average row with a draft (``factor``)."""

    remaining: int
    available: float = 1.0
    factor: float = 1.0


@dataclass(frozen=True)
class Schedule:
    """How deep to draft for each row, the ``rounds`` until the last one is done, the ``tokens`` per row and ``seconds`` of each."""

    limits: tuple[int, ...]
    rounds: float
    tokens: float
    seconds: float

    @property
    def total(self) -> float:
        """Seconds until the last row is done."""
        return self.rounds * self.seconds


def plain_schedule(rows: Sequence[RowForecast], verify: Callable[[np.ndarray], np.ndarray]) -> Schedule:
    """Zero drafting."""
    remaining = np.array([row.remaining for row in rows], dtype=float)
    rounds = float(remaining.max())
    seconds = float(verify(np.array([remaining.sum() / rounds / len(rows)]))[0])
    return Schedule((0,) * len(rows), rounds, float(remaining.sum() / rounds / len(rows)), seconds)


def best_schedule(
    rows: Sequence[RowForecast],
    accepted: Sequence[float],
    verify: Callable[[np.ndarray], np.ndarray],
    draft: Callable[[int], float],
    *,
    once: float = 0.0,
    own: bool = True,
) -> Schedule:
    """The plan with the least seconds until the last row is done, zero drafting included.

    Args:
        rows: at least one, each with tokens remaining.
        accepted: ``accepted[g - 1]`` tokens to expect of an average row's draft of g tokens.
        verify: seconds of a round outside the draft over so many nodes per row on average, the roots included; for an array of them.
        draft: seconds of a draft so deep.
        once: seconds added to each round that drafts.
        own: rows pay for their own nodes; otherwise all pay for the deepest one's, in each round in which any has a draft.
    """
    deepest = len(accepted)
    remaining = np.array([row.remaining for row in rows], dtype=float)
    available, factor = (np.array([getattr(row, name) for row in rows]) for name in ("available", "factor"))
    depths = np.arange(deepest + 1)
    hope = np.minimum(depths, factor[:, None] * np.concatenate([[0.0], accepted]))
    tokens = 1 + available[:, None] * np.maximum.accumulate(hope, axis=1)  # [R, depths]
    needed = remaining[:, None] / tokens  # rounds, the fewer the deeper
    rounds = np.unique(needed)[:, None, None]
    rounds = rounds[rounds[:, 0, 0] >= needed[:, -1].max() - 1e-9]
    limits = (needed > rounds + 1e-9).sum(-1)  # [candidates, R]: the least depth that suffices
    rounds = rounds[:, 0, 0]
    lines = np.arange(len(rows))
    lasting = np.minimum(1.0, needed[lines, limits] / rounds[:, None])  # of the rounds that a row takes part in
    deep = limits.max(1)
    if own:
        nodes = ((1 + available * limits) * lasting).sum(1) / len(rows)
        seconds = verify(nodes)
    else:
        some = 1 - np.prod(np.where(limits > 0, 1 - available, 1.0), axis=1)
        bare, wide = verify(lasting.sum(1) / len(rows)), verify((1 + deep) * lasting.sum(1) / len(rows))
        seconds = some * wide + (1 - some) * bare
    seconds = seconds + np.array([0.0, *(draft(depth) + once for depth in range(1, deepest + 1))])[deep]
    best = int((rounds * seconds).argmin())
    return Schedule(
        tuple(limits[best].tolist()), float(rounds[best]), float(remaining.sum() / rounds[best] / len(rows)), float(seconds[best])
    )


def worth(remaining: Sequence[int], plain: Callable[[int], float]) -> float:
    """Seconds that plain decoding takes to give rows so many tokens each, ``plain(rows)`` being those of one round."""
    seconds, before = 0.0, 0
    left = sorted(remaining)
    for index, tokens in enumerate(left):
        if tokens > before:
            seconds += (tokens - before) * plain(len(left) - index)
            before = tokens
    return seconds


class RowRecord:
    """What was seen of one row's drafts; old rounds are forgotten."""

    MEMORY, WEIGHT = 0.9, 4.0  # of what was known that a round leaves; rounds that an average row counts for

    def __init__(self) -> None:
        self.asked = self.given = self.accepted = self.expected = 0.0

    def observe(self, *, given: bool, accepted: int, expected: float) -> None:
        """A round in which the row was asked for a draft of which ``expected`` tokens should have been accepted."""
        self.asked = self.MEMORY * self.asked + 1
        self.given = self.MEMORY * self.given + given
        if given:
            self.accepted = self.MEMORY * self.accepted + accepted
            self.expected = self.MEMORY * self.expected + expected

    def forecast(self, remaining: int, available: float, usual: float) -> RowForecast:
        """Between what was seen and an average row's: ``available``, and ``usual`` tokens accepted of a draft."""
        weight = self.WEIGHT * max(usual, 1e-3)
        there = (self.given + self.WEIGHT * available) / (self.asked + self.WEIGHT)
        return RowForecast(remaining, there, (self.accepted + weight) / (self.expected + weight))
