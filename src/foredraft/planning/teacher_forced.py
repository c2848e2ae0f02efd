"""What rounds would keep of texts that are there already: no round is run, and intervals are over texts.

Tokens of one text are alike: an interval that took them for independent would be far too narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5 % quantiles for 1, 2, … degrees of freedom
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Share:
    """A ratio of sums over texts, and its 95 % interval; none of one text."""

    value: float
    low: float | None
    high: float | None

    @staticmethod
    def of(parts: Sequence[float] | Numbers, wholes: Sequence[float] | Numbers, *, most: float = np.inf) -> Share:
        """``parts`` over ``wholes``, one of each for every text; texts without a whole do not count. The ratio lies between 0 and
        ``most``.

        The interval is that of a ratio estimator over clusters (Cochran 1977, section 6.4), with Student's t for the number of texts.
        """
        part, whole = np.array([pair for pair in zip(parts, wholes) if pair[1] > 0], dtype=np.float64).T
        value, freedom = float(part.sum() / whole.sum()), len(part) - 1
        if freedom < 1:
            return Share(value, None, None)
        off = part - value * whole
        error = float(np.sqrt((freedom + 1) / freedom * (off**2).sum()) / whole.sum())
        margin = error * (STUDENT[freedom - 1] if freedom <= len(STUDENT) else 1.96 + 2.37 / freedom + 2.8 / freedom**2)
        return Share(value, max(0.0, value - margin), min(most, value + margin))

    def times(self, factor: float) -> Share:
        return Share(factor * self.value, *(None if each is None else factor * each for each in (self.low, self.high)))


def expected_rounds(chances: Sequence[Numbers], most: int) -> Numbers:
    """``[texts, most]`` rounds that each text takes with chains of 1 … ``most`` tokens, if the token at place t of a text, once drafted
    with those before it accepted, is accepted with ``chances[text][t]``.

    A round that begins at t ends with the first token that is rejected, or with the one after the chain. Followed from place to
    place: how likely a token is to be the first, the second, … of its round.
    """
    lengths = np.array([len(each) for each in chances])
    padded = np.zeros((len(chances), lengths.max()))
    for line, each in zip(padded, chances):
        line[: len(each)] = each
    drafted = np.arange(most + 1)[None] < np.arange(1, most + 1)[:, None]  # [most, place in the round]
    likely = np.zeros((len(chances), most, most + 1))
    likely[..., 0] = 1
    rounds = np.zeros((len(chances), most))
    for place in range(padded.shape[1]):
        rounds += likely[..., 0] * (place < lengths)[:, None]
        kept = likely * drafted * padded[:, place, None, None]
        ended = likely.sum(-1) - kept.sum(-1)
        likely = np.concatenate([ended[..., None], kept[..., :-1]], -1)
    return rounds
