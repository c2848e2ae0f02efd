"""What a pass of a mixture of experts takes, by the experts that its nodes touch.

A pass reads each expert that some node takes once. Random tokens share few experts; the nodes of a real chain share more. So a cost curve
keeps the seconds of passes over random tokens, and this module says how many experts real rounds touch less, and what one is worth.
"""

from __future__ import annotations

from typing import Any

from foredraft.backends.base import Routing

LEAST_SHARE, PRIOR = 0.05, 2  # what a round counts of the average at least; rounds that the assumption of random tokens counts for
TELLING = 0.5  # experts that random tokens must touch more than one token does, for a round to say anything
KINDS = ("chains", "trees")


class ExpertCosts:
    """How many experts of a layer the nodes of a round touch, and what that changes.

    Attributes:
        routing: the mixtures of the model; None if it has none, or if the experts that a pass touches are not counted.
        sharing: for chains and for trees, per number of rows, by how much the experts touched grow with the nodes, relative to random
            tokens (1); and in how many rounds that was seen.
    """

    def __init__(self) -> None:
        self.routing: Routing | None = None
        self.forget()

    def forget(self) -> None:
        """Nothing is known of rounds."""
        self.sharing: dict[str, dict[int, tuple[float, int]]] = {kind: {} for kind in KINDS}

    def random(self, tokens: float) -> float:
        """Experts of a layer that so many tokens touch if each takes its own at random."""
        assert self.routing is not None
        return self.routing.experts * (1 - (1 - self.routing.chosen / self.routing.experts) ** tokens)

    def expected(self, rows: int, nodes: float, *, branching: bool = False) -> float:
        """Experts of a layer that a round over ``nodes`` per row touches, as those before it did."""
        assert self.routing is not None
        known, one = self.sharing[KINDS[branching]], self.routing.chosen
        share = known[min(known, key=lambda each: abs(each - rows))][0] if known else 1.0
        return one + share * (self.random(rows * nodes) - one)

    def learn(self, rows: int, nodes: float, touched: float, *, branching: bool) -> None:
        """A round over ``nodes`` per row touched so many experts of a layer."""
        assert self.routing is not None
        one = self.routing.chosen
        if (most := self.random(rows * nodes) - one) < TELLING:
            return
        known = self.sharing[KINDS[branching]]
        before, count = known.get(rows, (1.0, 0))
        share = min(1.0, max(0.0, (touched - one) / most))
        known[rows] = before + max(LEAST_SHARE, 1 / (count + PRIOR)) * (share - before), count + 1

    def more(self, rows: int, nodes: float, plain: float, *, branching: bool = False) -> float:
        """Seconds that such a round takes more than one over random tokens; mostly less than 0. A round of one node per row takes
        ``plain``."""
        assert self.routing is not None
        return self.price(rows, plain) * (self.expected(rows, nodes, branching=branching) - self.random(rows * nodes))

    def spared(self, rows: int, nodes: float, plain: float, touched: float | None) -> float:
        """Seconds that a pass took less than one over random tokens would have, because it touched so many experts of a layer."""
        if self.routing is None or touched is None:
            return 0.0
        return self.price(rows, plain) * (self.random(rows * nodes) - touched)

    def price(self, rows: int, plain: float) -> float:
        """Seconds to read one expert of every layer, where ``rows`` random tokens take ``plain`` seconds: weights are read at one speed."""
        assert self.routing is not None
        return plain * self.routing.weight / (1 + self.random(rows) * self.routing.weight)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """For a profile."""
        return {kind: {str(rows): share for rows, (share, _) in known.items()} for kind, known in self.sharing.items()}

    def load(self, plain: dict[str, dict[str, Any]]) -> None:
        """Take over what :meth:`to_dict` wrote.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: that is not it.
        """
        found = {kind: {int(rows): (float(share), 1) for rows, share in plain[kind].items()} for kind in KINDS}
        if any(not 0 <= share <= 1 for known in found.values() for share, _ in known.values()):
            raise ValueError("a share of experts is not between 0 and 1")
        self.sharing = found
