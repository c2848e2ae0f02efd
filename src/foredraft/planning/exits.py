"""Which layer drafts leave the target at, where the drafter has a choice.

What the exit in use promises is known from the rounds. Another one's guesses are right as many times more or less often, in odds, as looks
have shown (:mod:`foredraft.drafters.exits`), and a level of its draft takes as many times longer as a pass to it was measured to take.
"""

from __future__ import annotations

from collections.abc import Callable

from foredraft.drafters.exits import Exits
from foredraft.planning.costs import CostModel
from foredraft.planning.search import Plan

SWITCH = 1.03  # another exit has to be better than the one in use by so much
FINAL = 2  # of the exits that promise most, so many are compared in full
EVERY = 16  # plans between two comparisons


class ExitChoice:
    """Chooses ``exits.layer``."""

    def __init__(self, exits: Exits, costs: CostModel):
        self.exits, self.costs = exits, costs
        self._wait = 0

    def better(
        self,
        rows: int,
        greedy: bool,
        promised: Callable[[float, float], Plan],
        in_full: Callable[[float, float], Plan] | None = None,
    ) -> float | None:
        """Take another exit if it is better; returns by how many times it has the odds of the one before, None if that stays.

        Args:
            promised: the best plan of drafts with so many times the odds of the exit in use, that take so many times as long.
            in_full: the same from among more shapes, asked for a few exits only.
        """
        self._wait -= 1
        if self._wait > 0:
            return None
        used, leaving, odds = self.exits.layer, self.costs.leaving(rows), self.exits.odds(greedy=greedy)
        if used not in leaving or not odds:
            return None
        self._wait = EVERY
        given = {layer: (odds[layer], leaving[layer] / leaving[used]) for layer in odds if layer in leaving}
        plans = {layer: promised(*each) for layer, each in given.items()}
        if in_full is not None:
            others = sorted(plans.keys() - {used}, key=lambda layer: plans[layer].rate)[-FINAL:]
            plans = {layer: in_full(*given[layer]) for layer in (used, *others)}
        best = max(plans, key=lambda layer: plans[layer].rate)
        if plans[best].rate < SWITCH * plans[used].rate or best == used:
            return None
        self.exits.layer = best
        self.costs.leave(best)
        return odds[best]
