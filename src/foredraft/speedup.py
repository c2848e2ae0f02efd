"""How much faster a call was than plain decoding of the same text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median, stdev
from typing import Any

ENOUGH = 3  # plain passes in this process, from which on their time counts as measured
RECENT = 64  # plain rounds whose times are kept for each number of rows
NOTHING_LOST = 0.98  # the lower bound from which on a call that was decoded plainly lost nothing
MEASURED, ESTIMATED = "measured", "estimated from the stored profile"

Price = Callable[[int, float], "tuple[float, bool] | None"]


@dataclass
class Speedup:
    """The speed-up of the rounds after the prefill: the seconds in which plain decoding makes the same tokens, over their own seconds.

    Plain decoding makes one token per row and pass, so a round that drafted is worth as many plain passes as it carried the row that is
    furthest; in a session that rows join, as many as it kept tokens per row. The seconds of a plain pass are the median of the plain rounds
    of the call if there are at least three, else those that the planner knows for this number of rows and this context.

    Attributes are as of the last call of :meth:`settle`, which a session makes when a row ends:
        seconds: of all rounds, planning included, but those in which a pass was recorded (CUDA graphs).
        plain: what the rounds without a draft would have taken without a drafter and a planner.
        replaced, low: what plain decoding would have taken in place of the rounds that drafted, and its lower 95 % bound; 0 as a bound
            where too few plain rounds ran to know. ``replaced`` is None where a plain pass was never timed.
        plain_rounds, drafted_rounds: passes without a draft, and rounds with one.
        source: ``measured``, or ``estimated from the stored profile``.
    """

    seconds: float = 0.0
    plain: float = 0.0
    replaced: float | None = 0.0
    low: float = 0.0
    plain_rounds: int = 0
    drafted_rounds: int = 0
    source: str = MEASURED
    _seconds: float = field(default=0.0, repr=False)  # so far, as those without underscore
    _plain: float = field(default=0.0, repr=False)
    _passes: dict[int, tuple[float, float]] = field(default_factory=dict, repr=False)  # rows: plain passes, and those times their context
    _times: dict[int, deque[float]] = field(default_factory=dict, repr=False)  # rows: seconds of plain rounds

    @property
    def value(self) -> float | None:
        """None where there was no round, or plain decoding was never timed."""
        return (self.plain + self.replaced) / self.seconds if self.seconds and self.replaced is not None else None

    @property
    def lower_bound(self) -> float | None:
        return (self.plain + self.low) / self.seconds if self.seconds and self.replaced is not None else None

    def plain_round(self, rows: int, passes: float, seconds: float, whole: float, count: int = 1) -> None:
        """A round of ``count`` passes took ``whole`` seconds with what the drafter and the planner did, and ``seconds`` per pass without
        that. Each pass stands for so many ``passes`` per row."""
        self._seconds += whole
        self._plain += count * passes * seconds
        self.plain_rounds += count
        self._times.setdefault(rows, deque(maxlen=RECENT)).append(seconds)

    def drafted_round(self, rows: int, passes: float, context: int, whole: float) -> None:
        """A round with a draft took ``whole`` seconds and stands for so many plain ``passes``."""
        self._seconds += whole
        self.drafted_rounds += 1
        before, weighted = self._passes.get(rows, (0.0, 0.0))
        self._passes[rows] = before + passes, weighted + passes * context

    def settle(self, price: Price) -> None:
        """Work out ``replaced``, ``low`` and ``source``; ``price`` gives the planner's seconds of a plain pass for a number of rows and a
        context, and whether they were measured in this process."""
        self.seconds, self.plain = self._seconds, self._plain
        self.replaced, self.low, estimated = 0.0, 0.0, 0.0
        for rows, (passes, weighted) in list(self._passes.items()):  # another thread may be in a round
            if passes == 0:
                continue
            times = list(self._times.get(rows, ()))
            if len(times) >= ENOUGH:
                seconds = median(times)
                self.low += passes * max(0.0, seconds - 2.5 * stdev(times) / len(times) ** 0.5)  # a median varies 1.25 times as a mean
            else:
                known = price(rows, weighted / passes)
                if known is None:
                    self.replaced = None
                    return
                seconds, measured = known
                estimated += 0.0 if measured else passes * seconds
            self.replaced += passes * seconds
        self.source = ESTIMATED if estimated > 0.5 * self.replaced else MEASURED

    def add(self, other: Speedup) -> None:
        """Another call ran after this one."""
        self.source = max(self, other, key=lambda each: each.replaced or 0.0).source  # of the larger part, so before they are summed
        self.replaced = None if self.replaced is None or other.replaced is None else self.replaced + other.replaced
        for name in ("seconds", "plain", "low", "plain_rounds", "drafted_rounds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "lower_bound": self.lower_bound, "source": self.source if self.value is not None else None}

    def sentence(self) -> str:
        """``1.6× plain decoding (measured)``, or that drafting does not pay."""
        value, low = self.value, self.lower_bound
        if value is None or low is None:
            if self.drafted_rounds:
                return "not compared with plain decoding, whose passes were not timed; shape auto times them"
            return "too few tokens to compare with plain decoding"
        gain = f"{value:.{1 if value >= 1.05 else 2}f}× plain decoding ({self.source})"
        if self.plain_rounds <= self.drafted_rounds or value >= 1.05:
            return gain
        if low >= NOTHING_LOST:
            return "drafting does not pay here: decoded plainly, nothing lost"
        return gain if value >= 1 else f"drafting does not pay here: {gain}"
