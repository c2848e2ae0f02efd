"""How much the learner may compute: as much as serving loses the share that it may lose.

What a round takes while the learner computes is compared with what rounds of the same rows and nodes take while it does not. The difference
is what learning costs. Time between calls costs nothing.
"""

from __future__ import annotations

from collections.abc import Hashable

SLICE = 0.25  # seconds that the learner is granted at once
SAVED = 60.0  # seconds of serving whose share can be saved up
GUESS = 0.5  # of the time of a round is lost while the learner computes, until that is known
PRIOR = 1.0  # seconds that the guess counts for
RECENT = 0.05  # what one more round counts for


class Duty:
    """The account of one learner.

    Args:
        share: of serving time that learning may cost; 0 for none: it then learns between calls only.

    Attributes:
        elapsed: seconds of serving.
    """

    def __init__(self, share: float):
        self.share = share
        self.elapsed = 0.0
        self._spent = self._slowed = 0.0  # on collecting and swapping; by which rounds were longer, which noise can make negative
        self._plain: dict[Hashable, float] = {}  # seconds of rounds without the learner
        self._lost, self._seen = GUESS * PRIOR, PRIOR  # seconds lost of those that the learner computed in
        self._balance = 0.0

    def round(self, seconds: float, kind: Hashable, *, busy: bool) -> None:
        """A round of one ``kind`` took so long; ``busy``: the learner computed meanwhile."""
        self.elapsed += seconds
        self._balance = min(self._balance + self.share * seconds, self.share * SAVED)
        plain = self._plain.get(kind)
        if not busy:
            self._plain[kind] = seconds if plain is None else plain + RECENT * (seconds - plain)
            return
        lost = seconds * self.rate if plain is None else seconds - plain
        if plain is not None:
            self._lost, self._seen = (1 - RECENT) * self._lost + lost, (1 - RECENT) * self._seen + seconds
        self._slowed += lost
        self._balance -= lost

    def spend(self, seconds: float) -> None:
        """So much serving time went to collecting or swapping."""
        self._spent += seconds
        self._balance -= seconds

    @property
    def lost(self) -> float:
        """Seconds of serving that learning has cost. Rounds do not get faster by it: shorter ones only make up for noise in longer ones."""
        return self._spent + max(0.0, self._slowed)

    @property
    def rate(self) -> float:
        """The part of a round that is lost while the learner computes, between 1 % and all of it."""
        return min(1.0, max(0.01, self._lost / self._seen))

    def allows(self) -> bool:
        """Whether one more slice is covered."""
        return self.share > 0 and self._balance >= SLICE * self.rate
