"""What a speed run records: calls, large reads, cost curves, and what failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Measurement:
    """One call.

    Attributes:
        tokens: new tokens, over all rows; ``seconds`` of the whole call.
        times: seconds from the call to each token of the first row; empty where the side does not tell.
        rounds, kept: row-passes after the prompt's, and the tokens that came from them; None where not told.
        same: equal to what the side's own plain decoding returned; None where there is nothing to compare.
        differs: position of the first new token that differs from it.
        same_as_reference, differs_from_reference: the same against the reference, ``Run.reference``.
        others: CPU seconds that the stopped contenders used meanwhile, over the call's.
        more: what else the side told.
    """

    target: str
    dtype: str
    scenario: str
    batch: int
    index: int
    category: str
    contender: str
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
class Failure:
    """What could not be measured, and why."""

    target: str
    dtype: str
    contender: str
    stage: str
    message: str


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
    contender: str
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


def raw(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    return [{**asdict(each), "times": [round(moment, 6) for moment in each.times]} for each in measurements]
