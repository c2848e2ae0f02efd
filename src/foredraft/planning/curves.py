"""Seconds by rows and size: measured points, piecewise linear and monotone in between, corrected by what rounds really take.

A machine that others use as well is slower at one time than at another. So a curve keeps two corrections apart: a ``scale`` common
to all sizes, which follows quickly, and deviations of single sizes, which follow slowly. What was seen of one size in a slow
minute then says nothing against that size.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

FEW = 5  # observations of a size that its median is taken over
STALE = 16  # observations after which earlier ones of a size hardly count
FADING = 0.9997  # of a deviation per observation since it was last seen
TRUSTED = 10  # observations that a point counts for that was measured in this process
LARGEST = 1.0  # that a single median can move the scale, as a logarithm


@dataclass
class Anchor:
    """What rounds of one size said: the ``deviation`` of its logarithm from scale and points, out of ``recent`` observations."""

    deviation: float = 0.0
    count: int = 0
    last: int = 0
    recent: list[float] = field(default_factory=list)

    def median(self) -> float:
        """The lower one: what disturbs a measurement makes it longer."""
        ordered = sorted(self.recent)
        return ordered[(len(ordered) - 1) // 2]


class Curve:
    """Seconds of one kind of work.

    Args:
        prior: seconds for a number of tokens, rows times size, where nothing was measured. Only its proportions count: the first
            observation sets its scale.

    ``trusted`` observations is what a measured point counts for: none, where another process measured it, perhaps in a busy hour.
    """

    def __init__(self, prior: Callable[[float], float]):
        self.prior = prior
        self.trusted = TRUSTED
        self.points: dict[int, dict[int, float]] = {}  # rows, size: seconds
        self.scale = 0.0
        self.checked = 0.0  # the scale when all sizes were last compared
        self.observations = 0
        self._anchors: dict[int, dict[float, Anchor]] = {}
        self._monotone: dict[int, tuple[list[int], list[float]]] = {}

    def measured(self, rows: int, size: int, seconds: float) -> None:
        """Put a point."""
        self.points.setdefault(rows, {})[size] = max(seconds, 1e-9)
        self._monotone.pop(rows, None)

    @property
    def known(self) -> bool:
        return bool(self.points) or self.observations > 0

    def at(self, rows: int, size: float) -> float:
        return self.line(rows, (size,))[0]

    def line(self, rows: int, sizes: Sequence[float]) -> list[float]:
        """Seconds for each of ``sizes``, ascending; never less for more."""
        places, deviations = self._deviations(rows)
        found, most = [], 0.0
        for size in sizes:
            deviation = interpolated(size, places, deviations) if places else 0.0
            most = max(most, self.base(rows, size) * math.exp(self.scale + deviation))
            found.append(most)
        return found

    def _deviations(self, rows: int) -> tuple[list[float], list[float]]:
        """Sizes seen, ascending, and their deviations."""
        anchors = sorted(self._anchors.get(rows, {}).items())
        return [size for size, _ in anchors], [each.deviation * FADING ** (self.observations - each.last) for _, each in anchors]

    def base(self, rows: int, size: float) -> float:
        """Without corrections. Rows that were not measured cost what as many tokens cost in the nearest number of rows that was."""
        if not self.points:
            return self.prior(rows * size)
        nearest = min(self.points, key=lambda each: (abs(math.log(each / rows)), each))
        if nearest not in self._monotone:
            measured = sorted(self.points[nearest].items())
            self._monotone[nearest] = [size for size, _ in measured], monotone([seconds for _, seconds in measured])
        places, values = self._monotone[nearest]
        size = max(size * rows / nearest, places[0])
        if size <= places[-1]:
            return interpolated(size, places, values)
        if len(places) == 1:
            return values[0] * self.prior(nearest * size) / self.prior(nearest * places[0])
        slope = (values[-1] - values[-2]) / (places[-1] - places[-2])
        return values[-1] + slope * (size - places[-1])

    def observe(self, rows: int, size: float, seconds: float) -> None:
        """What a round took."""
        residual = math.log(max(seconds, 1e-9) / self.base(rows, size))
        if not self.known:
            self.scale = self.checked = residual
        self.observations += 1
        anchor = self._anchors.setdefault(rows, {}).get(size) or self._new(rows, size)
        if self.observations - anchor.last > STALE:
            anchor.recent.clear()
            anchor.count = min(anchor.count, 1)
        anchor.recent = [*anchor.recent[1 - FEW :], residual]
        anchor.deviation *= FADING ** (self.observations - anchor.last)
        anchor.last = self.observations
        off = max(-LARGEST, min(LARGEST, anchor.median() - self.scale - anchor.deviation))
        self.scale += 0.25 * anchor.count / (anchor.count + 2) * off  # what is new of a well-known size is new of the machine
        anchor.deviation += max(0.04, 1 / (anchor.count + 1)) * off
        anchor.count += 1
        if self.observations % 8 == 0:
            self._order(rows, size)

    def _new(self, rows: int, size: float) -> Anchor:
        """An anchor as its neighbours would have it."""
        places, deviations = self._deviations(rows)
        trusted = self.trusted if size in self.points.get(rows, ()) else min(1, self.trusted)  # the first time may be a warm-up
        anchor = Anchor(interpolated(size, places, deviations) if places else 0.0, trusted, self.observations)
        self._anchors[rows][size] = anchor
        return anchor

    def _order(self, rows: int, size: float) -> None:
        """Forget what was seen of sizes long ago where it contradicts: more cannot take less."""
        seen, anchors = self._level(rows, size), self._anchors[rows]
        for other in [each for each, anchor in anchors.items() if self.observations - anchor.last > STALE]:
            if (self._level(rows, other) - seen) * (other - size) < 0:
                del anchors[other]

    def _level(self, rows: int, size: float) -> float:
        """Logarithm of the seconds of a size that was seen, the scale left out."""
        return math.log(self.base(rows, size)) + self._anchors[rows][size].deviation

    @property
    def drift(self) -> float:
        """How far the scale went, as a logarithm, since all sizes were last compared."""
        return abs(self.scale - self.checked)

    def recheck(self) -> None:
        """From here on every size is learnt quickly again."""
        self.checked = self.scale
        for anchors in self._anchors.values():
            for anchor in anchors.values():
                anchor.count = 0
                anchor.recent.clear()


def interpolated(place: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Linear between ``places``, ascending, and flat outside."""
    right = bisect_left(places, place)
    if right == 0:
        return values[0]
    if right == len(places):
        return values[-1]
    share = (place - places[right - 1]) / (places[right] - places[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])


def monotone(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to ``values`` in squares: neighbours in the wrong order share their mean."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            above, others = blocks.pop()
            mean, count = (above * others + mean * count) / (others + count), others + count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]
