"""Seconds by rows and size: measured points, piecewise linear and monotone in between, corrected by what rounds really take.

A machine that others use as well is slower at one time than at another. So a curve keeps two corrections apart, as logarithms: a ``scale``
common to all sizes, which follows quickly, and a deviation of each size that was seen, which follows slowly. A Kalman filter (Kalman 1960)
estimates them together. If a size was seen while the scale was not known well, what is then learnt of the scale corrects its deviation. So
what was seen of a size in a slow minute says nothing against that size.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# Standard deviations, as logarithms:
NOISE = 0.08  # of one observation
PACE = 0.03  # of the scale's change between two observations
CHANGE = 0.002  # of the same of a deviation
START = 0.3  # of the scale before the first observation
OWN, STRANGE = 0.05, 0.3  # of the deviation of a size that was measured in this process, and of any other; less beside one that was seen
FADING = 0.9997  # of a deviation per observation
SURPRISE, CONVINCED = 3.0, 3  # standard deviations beyond which an observation is not believed, until so many in a row say the same
STALE = 16  # observations after which what contradicts newer ones is forgotten
MOST = 48  # sizes, of all numbers of rows, that are told apart


@dataclass
class Seen:
    """A size that was seen: its ``place`` in the filter's state, the number of the ``last`` observation, and ``surprises``, as of a
    :class:`Curve`."""

    place: int
    last: int
    surprises: int = 0


class Curve:
    """Seconds of one kind of work.

    Args:
        prior: seconds for a number of tokens, rows times size, where nothing was measured. Only its proportions count: the first
            observation sets its scale.

    Attributes:
        points: measured seconds by rows and size.
        trusted: whether they were measured in this process, and not in another one, perhaps in a busy hour.
        surprises: how many of the last observations in a row were not believed, negative where less was observed than expected.
    """

    def __init__(self, prior: Callable[[float], float]):
        self.prior = prior
        self.trusted = True
        self.points: dict[int, dict[int, float]] = {}
        self.checked = 0.0  # the scale when a single node was last observed
        self.observations = self.surprises = 0
        self._seen: dict[int, dict[float, Seen]] = {}  # by rows and size
        self._mean, self._covariance = np.zeros(1), np.full((1, 1), START**2)  # of the scale, and then of the deviations
        self._monotone: dict[int, tuple[list[int], list[float]]] = {}

    def measured(self, rows: int, size: int, seconds: float) -> None:
        """Put a point."""
        self.points.setdefault(rows, {})[size] = max(seconds, 1e-9)
        self._monotone.pop(rows, None)

    @property
    def known(self) -> bool:
        return bool(self.points) or self.observations > 0

    @property
    def scale(self) -> float:
        """The logarithm of the factor for all sizes."""
        return float(self._mean[0])

    @scale.setter
    def scale(self, scale: float) -> None:
        self._mean[0] = scale

    def at(self, rows: int, size: float) -> float:
        return self.line(rows, (size,))[0]

    def line(self, rows: int, sizes: Sequence[float]) -> list[float]:
        """Seconds for each of ``sizes``, ascending; never less for more."""
        seen = sorted(self._seen.get(rows, {}).items())
        places, deviations = [size for size, _ in seen], [float(self._mean[each.place]) for _, each in seen]
        found, most, scale = [], 0.0, self.scale
        for size in sizes:
            deviation = interpolated(size, places, deviations) if places else 0.0
            most = max(most, self.base(rows, size) * math.exp(scale + deviation))
            found.append(most)
        return found

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
        seen = self._seen.setdefault(rows, {}).get(size) or self._add(rows, size)
        covariance, place = self._covariance, seen.place
        self._mean[1:] *= FADING
        covariance[0, 0] += PACE**2
        covariance[place, place] += min(CHANGE**2 * (self.observations - seen.last), OWN**2)
        seen.last = self.observations
        off = residual - float(self._mean[0] + self._mean[place])
        believed = abs(off) <= SURPRISE * math.sqrt(self._variance(place))
        for each in (self, seen):
            each.surprises = 0 if believed else max(each.surprises, 0) + 1 if off > 0 else min(each.surprises, 0) - 1
        if convinced := max(abs(self.surprises), abs(seen.surprises)) >= CONVINCED:
            covariance[0, 0] += off**2
            covariance[place, place] += off**2 / 4
        if believed or convinced:  # else the machine may have stopped for a moment
            variance, along = self._variance(place), covariance[0] + covariance[place]
            self._mean += off / variance * along
            covariance -= np.outer(along, along) / variance
            self.checked = self.scale if size == 1 else self.checked
        if self.observations % 8 == 0:
            self._order(rows, size)

    def _variance(self, place: int) -> float:
        """Of an observation of the size in ``place``."""
        known = self._covariance
        return float(known[0, 0] + 2 * known[0, place] + known[place, place]) + NOISE**2

    def _add(self, rows: int, size: float) -> Seen:
        """A size that was not seen before deviates as its neighbours do, as far as that is known."""
        if len(self._mean) > MOST:
            self._drop(
                *min(
                    ((rows, size) for rows, some in self._seen.items() for size in some), key=lambda each: self._seen[each[0]][each[1]].last
                )
            )
        others = sorted(self._seen[rows].items())
        weights = np.zeros(len(self._mean))
        for index, (_, other) in enumerate(others):
            weights[other.place] = interpolated(size, [each for each, _ in others], [float(each == index) for each in range(len(others))])
        along = self._covariance @ weights
        gap = min((abs(math.log(size / other)) for other, _ in others), default=1.0)
        own = (OWN if self.trusted and size in self.points.get(rows, ()) else STRANGE) * math.sqrt(min(1.0, gap))
        self._covariance = np.block([[self._covariance, along[:, None]], [along[None], weights @ along + own**2]])
        self._mean = np.append(self._mean, weights @ self._mean)
        self._seen[rows][size] = Seen(len(self._mean) - 1, self.observations)
        return self._seen[rows][size]

    def _drop(self, rows: int, size: float) -> None:
        """Forget what was seen of a size."""
        gone = self._seen[rows].pop(size).place
        self._mean = np.delete(self._mean, gone)
        self._covariance = np.delete(np.delete(self._covariance, gone, 0), gone, 1)
        for some in self._seen.values():
            for each in some.values():
                each.place -= each.place > gone

    def _order(self, rows: int, size: float) -> None:
        """Forget what was seen of sizes long ago where it contradicts: more cannot take less."""
        level, some = self._level(rows, size), self._seen[rows]
        for other in [each for each, seen in some.items() if self.observations - seen.last > STALE]:
            if (self._level(rows, other) - level) * (other - size) < 0:
                self._drop(rows, other)

    def _level(self, rows: int, size: float) -> float:
        """Logarithm of the seconds of a size that was seen, the scale left out."""
        return math.log(self.base(rows, size)) + float(self._mean[self._seen[rows][size].place])

    @property
    def drift(self) -> float:
        """How far the scale went, as a logarithm, since a single node was last observed."""
        return abs(self.scale - self.checked)

    def recheck(self) -> None:
        """From here on every size is learnt quickly again."""
        self._covariance.flat[len(self._covariance) + 1 :: len(self._covariance) + 1] += OWN**2


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
