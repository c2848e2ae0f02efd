"""Which sublayers a draft can do without: a search over sets of them, by predicted tokens per second (Draft & Verify, Zhang et al. 2023).

A set is judged by how often a pass without these sublayers agrees with the target. This and measured seconds give the rate: a chain of g
drafted tokens yields (1 - a^(g+1)) / (1 - a) tokens in the time of g drafts and a pass of the target over g + 1 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random

from foredraft.drafters.sublayer_costs import Skipped, Sublayer, SublayerCosts, set_of
from foredraft.models.skips import SkipSet

SPREAD = (4, 3, 2)  # one sublayer of so many is left out, or all but one of so many
SPREAD_SHARE, GREEDY_SHARE = 0.15, 0.6  # of the trials: spread sets, and those together with elimination
NEIGHBOURS = 4  # of the best set that are judged together
BEHIND = 0.9  # elimination ends once its sets are predicted to reach less than this share of its best rate


@dataclass(frozen=True)
class Trial:
    """A set that was judged. ``rate`` is predicted of chains of ``length``; ``stage`` says what proposed it."""

    skipped: Skipped
    agreement: float
    rate: float
    length: int
    stage: str


class SkipSearch:
    """Judges sets one after the other.

    Args:
        sublayers: all that can be left out.
        agreement: how often a pass without a set agrees with the target.

    Attributes:
        judged: the sets so far with what came of them, in their order. It is complete whatever ends the search.
    """

    def __init__(self, sublayers: Sequence[Sublayer], costs: SublayerCosts, agreement: Callable[[SkipSet], float]):
        self.sublayers, self.costs, self.agreement = tuple(sublayers), costs, agreement
        self.judged: dict[Skipped, Trial] = {}

    @property
    def ranked(self) -> list[Trial]:
        """Best first."""
        return sorted(self.judged.values(), key=lambda trial: -trial.rate)

    def finalists(self, count: int) -> list[Trial]:
        """``count`` sets to be timed: the best one, elimination's best, those that no other beats in agreement and in what a draft costs,
        and then the others, each time the best first. The best alone would be nearly the same set many times over."""
        by_cost = sorted(self.ranked, key=lambda trial: (self.costs.draft(trial.skipped), -trial.agreement))
        front, agreement = list[Trial](), -1.0
        for trial in by_cost:
            if trial.agreement > agreement:
                front.append(trial)
                agreement = trial.agreement
        eliminated = [trial for trial in self.ranked if trial.stage == "greedy"]
        chosen = [*self.ranked[:1], *eliminated[:1], *sorted(front, key=lambda trial: -trial.rate), *self.ranked]
        return list(dict.fromkeys(chosen))[:count]

    def set_of(self, skipped: Skipped) -> SkipSet:
        return set_of(self.sublayers, skipped)

    def judge(self, skipped: Skipped, stage: str) -> Trial:
        agreement = self.agreement(self.set_of(skipped))
        trial = self.judged[skipped] = Trial(skipped, agreement, *self.costs.rate(skipped, agreement), stage)
        return trial

    def fresh(self, skipped: Skipped) -> bool:
        """Whether a set was not judged, and leaves out something but not everything."""
        return skipped not in self.judged and any(skipped) and not all(skipped)

    def run(self, trials: int, seed: int = 0) -> Iterator[Trial]:
        """Judge ``trials`` sets, or all if there are fewer: evenly spread ones, greedy elimination, and what a Gaussian process proposes
        that has seen these. Where it proposes a set again, neighbours of the best set are next."""
        from optuna import create_study, create_trial, logging
        from optuna.distributions import CategoricalDistribution
        from optuna.samplers import GPSampler
        from optuna.trial import TrialState

        logging.set_verbosity(logging.ERROR)
        study, random = create_study(direction="maximize", sampler=GPSampler(seed=seed)), Random(seed)
        space = {str(index): CategoricalDistribution((False, True)) for index in range(len(self.sublayers))}

        def told(skipped: Skipped, stage: str) -> Trial:
            trial = self.judge(skipped, stage)
            study.add_trial(create_trial(params=dict(zip(space, skipped)), distributions=dict(space), value=trial.rate))
            return trial

        for stage, proposals, share in (("spread", self.spread(), SPREAD_SHARE), ("greedy", self.eliminate(), GREEDY_SHARE)):
            for skipped in proposals:
                if len(self.judged) >= max(1, share * trials):
                    break
                if self.fresh(skipped):
                    yield told(skipped, stage)
        while (left := trials - len(self.judged)) > 0:
            asked = study.ask(dict(space))
            proposed = tuple(asked.params[name] for name in space)
            study.tell(asked, state=TrialState.FAIL)  # it is added once it was judged, as the others are
            if self.fresh(proposed):
                yield told(proposed, "bayesian")
                continue
            for _ in range(min(left, NEIGHBOURS)):
                if (near := self.neighbour(random)) is None:
                    return
                yield told(near, "neighbour")

    def neighbour(self, random: Random) -> Skipped | None:
        """A set that was not judged and differs from the best one in as few sublayers as possible; None if there is none."""
        best, count = self.ranked[0].skipped, len(self.sublayers)
        for changed in range(1, count + 1):
            found = list(combinations(range(count), changed))
            for indices in random.sample(found, len(found)):
                near = tuple(left_out ^ (index in indices) for index, left_out in enumerate(best))
                if self.fresh(near):
                    return near
        return None

    def spread(self) -> Iterator[Skipped]:
        """Sets that are evenly spread over the layers: of both kinds of sublayers, and of each."""
        kinds = dict.fromkeys(kind for kind, _ in self.sublayers)
        for every in SPREAD:
            for chosen in (set(kinds), *({kind} for kind in kinds)):
                for few in (True, False):
                    yield tuple(kind in chosen and (layer % every == every // 2) == few for kind, layer in self.sublayers)

    def eliminate(self) -> Iterator[Skipped]:
        """Greedy elimination: leave out the sublayer whose loss costs the least agreement per second saved, again and again. Each set must
        have been judged when the next one is asked for.

        What a loss cost before others were left out is taken for the least that it costs now, so that few sublayers are judged again.
        """
        current, agreement, best = (False,) * len(self.sublayers), 1.0, 0.0
        prices = dict.fromkeys(range(len(self.sublayers)), -1.0)  # those that were never judged come first
        while len(prices) > 1:
            renewed: dict[int, Trial] = {}
            while (index := min(prices, key=lambda each: prices[each])) not in renewed:
                proposed = tuple(left_out or place == index for place, left_out in enumerate(current))
                yield proposed
                renewed[index] = self.judged[proposed]
                prices[index] = max(agreement - renewed[index].agreement, 0.0) / self.costs.sublayers[index]
            del prices[index]
            current, agreement, best = renewed[index].skipped, renewed[index].agreement, max(best, renewed[index].rate)
            if renewed[index].rate < BEHIND * best:
                return
