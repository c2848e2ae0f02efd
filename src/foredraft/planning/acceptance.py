"""How often drafted tokens are accepted, tracked as rounds go by.

By depth: Pr(the first child is accepted | its parent was). By sibling rank: Pr(a child of this rank is accepted | its parent was, and
the children before it were not). Their products are Sequoia's p[b] = Pr(siblings 1..b-1 rejected, b accepted) (Chen et al. 2024), here
for each depth. Old rounds are forgotten exponentially. All of it is arithmetic on the host's own numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from foredraft.shapes import depths_of

MEMORY = 0.97  # of what was known that a round leaves
HASTE = 0.7  # the same where drafting is only being tried now and then, so that a change is noticed after a few tries
PRIOR, WEIGHT = 0.4, 2.0  # of the first token, and trials that it counts for
RUNNING = 0.8  # the same behind a round that kept its whole draft
DEEPER = 4.0  # trials that the level above counts for at each depth
LATER, LATER_WEIGHT = 0.15, 3.0  # the same of siblings after the first
KNOWN = 8.0  # trials that rates which were measured beforehand count for
FORMER, TEXTS = 6.0, 0.8  # trials that former texts count for when one begins, and of what they showed that another one leaves
USUAL, FEW = 0.6, 0.5  # of a text that stands before the first, and texts that it counts for: a single one may be of a kind of its own


@dataclass
class Tally:
    """Hits among trials, forgotten exponentially."""

    hits: float = 0.0
    trials: float = 0.0

    def add(self, hits: int, trials: int, memory: float) -> None:
        self.hits = self.hits * memory + hits
        self.trials = self.trials * memory + trials

    def rate(self, prior: float, weight: float) -> float:
        return (self.hits + prior * weight) / (self.trials + weight)


class Acceptance:
    """Rates of one way of drafting; ``depth`` and ``siblings`` at most. ``known[depth][rank]`` says how often the guess of each rank is
    right at each depth, as far as that was measured beforehand; ``prior`` stands in for the first guess."""

    def __init__(self, depth: int, siblings: int = 1, known: Sequence[Sequence[float]] = (), *, prior: float = PRIOR):
        self.first = [Tally() for _ in range(depth)]
        self.first[:1] = [Tally(prior * WEIGHT, WEIGHT)] if depth else []
        self.later = [Tally() for _ in range(siblings - 1)]
        self.offered = Tally(2.0, 2.0)
        self.former = [Tally(USUAL * FEW, FEW) for _ in self.first]  # texts count as trials
        self.rounds = 0
        self._begin(known)

    def _begin(self, known: Sequence[Sequence[float]]) -> None:
        """Count ``known`` rates as trials; those of later siblings, which are tracked for all depths together, as often as each depth is
        reached."""
        hits, trials, reach = [0.0] * len(self.later), [0.0] * len(self.later), 1.0
        for tally, line in zip(self.first, known):
            tally.hits, tally.trials, missed = KNOWN * line[0], KNOWN, 1 - line[0]
            for rank, rate in enumerate(line[1 : 1 + len(self.later)]):
                hits[rank] += reach * rate
                trials[rank] += reach * missed
                missed -= rate
            reach *= line[0]
        for tally, caught, tried in zip(self.later, hits, trials):
            if tried > 0:
                tally.hits, tally.trials = KNOWN * caught / tried, KNOWN

    @property
    def availability(self) -> float:
        """How often a row that was asked got a draft at all."""
        return self.offered.rate(1.0, 1e-6)

    def by_depth(self, depth: int, *, odds: float = 1.0) -> list[float]:
        """Pr(the first child is accepted | its parent was), for depths 1 to ``depth``; of a draft with so many times these ``odds``."""
        rates: list[float] = []
        for tally in self.first[:depth]:
            rates.append(tally.rate(rates[-1], DEEPER) if rates else tally.rate(0.0, 1e-6))
        return rates if odds == 1.0 else [shifted(rate, odds) for rate in rates]

    def by_rank(self, depth: int, siblings: int, *, odds: float = 1.0) -> list[list[float]]:
        """``[depth][siblings]`` Sequoia's p[b] at each depth, not above that of the sibling before; of a draft whose first children have so
        many times these ``odds``."""
        table = []
        caught = [tally.rate(LATER, LATER_WEIGHT) for tally in self.later[: siblings - 1]]
        for rate in self.by_depth(depth, odds=odds):
            line, missed = [rate], 1 - rate
            for each in caught:
                line.append(min(line[-1], missed * each))
                missed -= line[-1]
            table.append(line)
        return table

    def begin_text(self) -> None:
        """Another text begins: from here on the last one counts as one of many."""
        for tally, former in zip(self.first, self.former):
            if tally.trials > FORMER:
                former.hits, former.trials = TEXTS * former.hits + tally.hits / tally.trials, TEXTS * former.trials + 1
                tally.hits, tally.trials = FORMER * former.hits / former.trials, FORMER

    def shift(self, odds: float) -> None:
        """From here on drafts are made otherwise, with so many times these ``odds``, as far as that is known beforehand."""
        for tally in self.first:
            if tally.trials:
                rate, tally.trials = tally.hits / tally.trials, min(tally.trials, KNOWN)
                tally.hits = tally.trials * shifted(rate, odds)
        self.former = [Tally(USUAL * FEW, FEW) for _ in self.first]

    def observe(
        self,
        asked: Sequence[int],
        drafted: Sequence[Sequence[int]],
        accepted: Sequence[int],
        *,
        static_parents: tuple[int, ...] | None = None,
        paths: Sequence[Sequence[int]] = (),
        memory: float = MEMORY,
    ) -> None:
        """A round in which something was asked for.

        Args:
            asked: per row, how deep it was to be drafted for; 0 for a row without room.
            drafted: per row, nodes at each depth.
            accepted: per row, how many were kept.
            static_parents: parents of every node, where the tree branches and the host knows them; with ``paths``, per row the nodes kept.
        """
        self.rounds += 1
        given = [bool(levels) and levels[0] > 0 for levels in drafted]
        wanted = [room > 0 for room in asked]
        self.offered.add(sum(a and b for a, b in zip(wanted, given)), sum(wanted), MEMORY)
        deepest = max(asked, default=0)
        hits, trials = [0] * deepest, [0] * deepest
        later_hits, later_trials = [0] * len(self.later), [0] * len(self.later)
        ranks, families = family(static_parents) if static_parents is not None and paths else ((), ())
        for row, count in enumerate(accepted):
            if not given[row]:
                continue
            for depth in range(min(count + 1, asked[row])):
                trials[depth] += 1
                if not ranks:
                    hits[depth] += depth < count
                    continue
                path = paths[row]
                size = families[path[depth]]
                rank = ranks[path[depth + 1]] if depth < count else size
                hits[depth] += rank == 0 and size > 0
                for later in range(1, min(rank + 1, size, len(self.later) + 1)):
                    later_trials[later - 1] += 1
                    later_hits[later - 1] += rank == later
        for tally, hit, trial in zip(self.first, hits, trials):
            if trial:
                tally.add(hit, trial, memory)
        for tally, hit, trial in zip(self.later, later_hits, later_trials):
            if trial:
                tally.add(hit, trial, memory)


def shifted(rate: float, odds: float) -> float:
    """The probability that has so many times the ``odds`` of ``rate``."""
    return odds * rate / (1 - rate + odds * rate)


@lru_cache(maxsize=256)
def family(static_parents: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of each node its rank among its siblings, and how many children it has."""
    children = [0] * len(static_parents)
    ranks = []
    for parent in static_parents:
        ranks.append(children[parent] if parent >= 0 else 0)
        if parent >= 0:
            children[parent] += 1
    return tuple(ranks), tuple(children)


def expected(parents: Sequence[int], table: Sequence[Sequence[float]]) -> float:
    """Accepted tokens to expect from a tree with ``parents``, root first, under p[b] at each depth, as ``table`` has it."""
    ranks, _ = family(tuple(parents))
    depths = depths_of(parents)
    reach = [1.0]
    for node in range(1, len(parents)):
        reach.append(reach[parents[node]] * table[depths[node] - 1][ranks[node]])
    return sum(reach[1:])
