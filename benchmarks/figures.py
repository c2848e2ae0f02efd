"""Bounds that a report checks its figures against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foredraft.estimates import Estimate, Spread


@dataclass(frozen=True)
class Figure:
    """A figure that a run should reach.

    Attributes:
        spread: what was measured; None where it could not be.
        low: the least that it should be; it should be ``more`` than that if so said.
        high: the most.
        how: the numbers that the figure was computed from.
        noise: whether a miss by less than the interval counts as ``within noise``.
    """

    name: str
    spread: Spread | None
    low: float | None = None
    high: float | None = None
    how: str = ""
    more: bool = False
    noise: bool = False

    @property
    def verdict(self) -> str:
        """``met``, ``missed``, ``within noise`` or ``not measured``; the median decides."""
        if self.spread is None:
            return "not measured"
        value = self.spread.median
        enough = self.low is None or (self.low < value if self.more else self.low <= value)
        if enough and (self.high is None or value <= self.high):
            return "met"
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        return "within noise" if self.noise and any(self.spread.low <= bound <= self.spread.high for bound in bounds) else "missed"

    @property
    def bound(self) -> str:
        if self.low is None:
            return f"≤ {self.high:g}"
        if self.more:
            return f"> {self.low:g}"
        return f"≥ {self.low:g}" if self.high is None else f"{self.low:g}–{self.high:g}"

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def best(names: Sequence[str], value: Callable[[str], Estimate | None]) -> tuple[str, Estimate] | None:
    """The one of ``names`` with the largest value."""
    found = [(name, estimate) for name in names if (estimate := value(name)) is not None]
    return max(found, key=lambda pair: pair[1].value) if found else None
