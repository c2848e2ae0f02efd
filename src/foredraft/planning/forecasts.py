"""What the next round promises with each shape: the search between measured costs and tracked acceptance, from what rounds have said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foredraft.drafters.base import Row
from foredraft.drafters.exits import Exits
from foredraft.planning import batches, search
from foredraft.planning.acceptance import HASTE, MEMORY, PRIOR, RUNNING, Acceptance, expected
from foredraft.planning.costs import CostModel
from foredraft.planning.exits import ExitChoice
from foredraft.planning.rounds import Round
from foredraft.shapes import DynamicShape, StaticShape, TreeShape

GAIN = 1.01  # drafting has to be better than none by so much
SWITCH = 1.02  # another shape has to be better than the one in use by so much
TRIAL_ACCEPTANCE, TRIAL_LENGTH = 0.7, 4  # acceptance that a try is made for, and its length at most
HORIZON = 32  # rounds that what the drafter missed is spread over
GROWN_K, GROWN_DEPTH = 4, 8  # nodes of a level that are expanded in a grown tree, and levels at most, unless told otherwise
GROWN_TRIES = 12  # rounds that a first opinion of grown trees takes
GROWN_MEMORY = 0.96  # of what was known of grown trees that a round leaves
SURER, SURE_OF_IT = 1.5, 8.0  # times as many tokens of a greedy draft are accepted as its probabilities say, and tokens that stand for it
CALIBRATION_MEMORY = 0.98  # of how far they do that a round leaves
DOUBT = 4.0  # accepted tokens that were expected and kept before anything was seen
LEAST = 0.7  # of the tokens that were expected: where still fewer were kept, the text has changed, and acceptance follows it
FINEST = 0.25  # nodes per row that costs are told apart by, where rows have different numbers of them


@dataclass
class Forecast:
    """One decision: the best plan, and zero drafting; ``limits`` by slot, where rows are drafted for differently; ``other`` is tried
    now and then."""

    best: search.Plan
    plain: search.Plan
    limits: dict[int, int] | None = None
    other: search.Plan | None = None

    @property
    def lasts(self) -> bool:
        """It is not made for what is left of a batch, or for the rate of the moment."""
        return self.limits is None and isinstance(self.best.shape, StaticShape)


class Grown:
    """How grown trees have done: ``tokens`` kept per round, in ``seconds`` of which one is a plain round's."""

    def __init__(self, greedy: bool) -> None:
        self.tokens = self.seconds = 1.0
        self.rounds = 0
        self._accepted, self._expected = SURE_OF_IT * (SURER if greedy else 1.0), SURE_OF_IT

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def surer(self) -> float:
        """Times as many tokens are accepted as the draft's probabilities say: where the target does not draw but takes its likeliest token,
        they say too little."""
        return self._accepted / self._expected

    def observe(self, tokens: float, seconds: float, expected: float | None = None) -> None:
        """A round that kept so many tokens in so many plain rounds; the draft ``expected`` so many to be accepted."""
        self.rounds += 1
        if expected is not None:
            self._accepted = CALIBRATION_MEMORY * self._accepted + tokens - 1
            self._expected = CALIBRATION_MEMORY * self._expected + expected
        share = max(1 - GROWN_MEMORY, 1 / self.rounds)
        self.tokens += share * (tokens - self.tokens)
        self.seconds += share * (min(seconds, 3 * self.seconds + 3) - self.seconds)


class PlanRecord:
    """How many of the expected tokens the chosen shapes kept: the best of many shapes looks better than it is, in part by luck."""

    def __init__(self) -> None:
        self.kept = self.expected = DOUBT

    def observe(self, kept: float, expected_tokens: float) -> None:
        self.kept = GROWN_MEMORY * self.kept + kept
        self.expected = GROWN_MEMORY * self.expected + expected_tokens

    def of(self, plan: search.Plan) -> search.Plan:
        """``plan`` with its accepted tokens scaled by the share that such plans have kept."""
        share = max(LEAST, min(self.kept / max(self.expected, 1e-9), 1.0))
        return replace(plan, tokens=1 + (plan.tokens - 1) * share)


class Forecaster:
    """Promises, and the memory behind them.

    Args:
        largest: how deep, how wide and how large a tree may be, and whether it may branch.
        costs: what is known of the machine.
        grows, levels: in which rounds trees may be grown by the draft's probabilities, True for greedy ones and False for those that
            sample; and so many levels deep.
        catches_up: the drafter has to read what it missed in rounds without a draft.
        rates: how often the drafter's guesses are right, as far as that is known beforehand; see :class:`Acceptance`.
        exits: where drafts may leave the target, if there is a choice.
        copies: drafts are copied from texts. A copy that was right so far is likely to go on, and most others are wrong at once. So
            acceptance in rounds of a single row is tracked apart behind a round that kept its whole draft.

    Attributes:
        own: rows of a batch pay for their own nodes.
        acceptance: of greedy rounds, and of others: drafts are made differently.
        running: the last round kept its whole draft; False where that makes no difference.
        grown: how grown trees have done in such rounds, where they may be grown.
    """

    def __init__(
        self,
        largest: StaticShape,
        costs: CostModel,
        *,
        grows: Sequence[bool] = (),
        levels: int = GROWN_DEPTH,
        catches_up: bool = True,
        rates: Sequence[Sequence[float]] = (),
        exits: Exits | None = None,
        copies: bool = False,
    ):
        self.largest, self.costs, self.catches_up, self.rates = largest, costs, catches_up, rates
        self.choice = None if exits is None else ExitChoice(exits, costs)
        self.siblings = 1 if largest.is_chain else largest.siblings
        self.acceptance: dict[bool, Acceptance] = {}
        self.copies, self.running = copies, False
        self._apart: dict[tuple[bool, bool], Acceptance] = {}  # of copies of a single row, greedy or not, by ``running``
        self.grown, self.levels = {greedy: Grown(greedy) for greedy in grows}, levels
        self.plan_record = PlanRecord()
        self.own = False
        self._filler, self._reads_prompts = 0, False
        self._seen: dict[int, int] = {}  # slot: tokens that the drafter has read
        self._records: dict[int, batches.RowRecord] = {}  # by slot

    def begin(self, *, own: bool, catches_up: bool, filler: int = 0, text: bool = False, reads_prompts: bool = False) -> None:
        """Other rows than before, or another ``text`` of a single row. ``filler`` nodes are scored besides those that a draft proposes;
        rows cannot pay for their own then, as they do in chains alone. A drafter that ``reads_prompts`` does so before the first round."""
        self.own, self.catches_up, self._filler, self._reads_prompts = own and not filler, catches_up, filler, reads_prompts
        self._seen.clear()
        self._records.clear()
        self.running = False
        if text:
            self.plan_record = PlanRecord()
            for each in (*self.acceptance.values(), *self._apart.values()):
                each.begin_text()

    def forecast(self, rows: Sequence[Row], *, greedy: bool, together: bool, growing: bool = False) -> Forecast:
        """The best plan for rows of which no others join them, if they are ``together``; ``growing`` says that a grown tree is in use."""
        acceptance = self.of(greedy, rows=len(rows))
        costs = self._lasting(rows, acceptance)
        if self.choice is not None and self._leaves_elsewhere(self.choice, len(rows), acceptance, costs, greedy):
            costs = self._lasting(rows, acceptance)
        if together and max(len(rows), len(self._records)) > 1:
            return self._search_batch(rows, acceptance, costs)
        chains = search.chains(acceptance.by_depth(self.largest.depth), costs)
        best = max(chains, key=lambda plan: plan.rate)
        if self.siblings > 1:
            tree = search.best_tree(acceptance.by_rank(self.largest.depth, self.siblings), costs)
            best = max(best, tree, key=lambda plan: plan.rate)
        best = self.plan_record.of(best)
        if best.rate < GAIN * chains[0].rate:
            best = chains[0]
        other = None
        if greedy in self.grown and len(rows) == 1:
            best, other = self._with_grown(self.grown[greedy], best, chains[0], costs, growing)
        return Forecast(best, chains[0], other=other)

    def of(self, greedy: bool, *, rows: int = 0) -> Acceptance:
        """Acceptance of such rounds, all together. Of copies for a single one of ``rows`` that was in no batch: that behind rounds like the
        last one, by :attr:`running`."""
        if greedy not in self.acceptance:
            self.acceptance[greedy] = Acceptance(self.largest.depth, self.siblings, self.rates)
        if not self.copies or rows != 1 or self._records:
            return self.acceptance[greedy]
        key = greedy, self.running
        if key not in self._apart:
            self._apart[key] = Acceptance(self.largest.depth, self.siblings, self.rates, prior=RUNNING if self.running else PRIOR)
        return self._apart[key]

    def ran(self, done: Round) -> None:
        """Call at the end of each round, after :meth:`learn`: it sets :attr:`running`."""
        self.running = self.copies and len(done.drafted) == 1 and 0 < sum(done.drafted[0]) == done.accepted[0]

    def rounds(self, greedy: bool) -> int:
        """With a draft so far, of such rows."""
        return self.of(greedy).rounds + (self.grown[greedy].rounds if greedy in self.grown else 0)

    def attempt(self, rows: Sequence[Row], *, greedy: bool, most: float) -> search.Plan:
        """The chain that promises most tokens for the seconds it costs more than a plain round, if drafting did work; of those that cost
        ``most`` more at most, and the shortest if none does."""
        depth = min(TRIAL_LENGTH, self.largest.depth)
        plain, *plans = search.chains([TRIAL_ACCEPTANCE] * depth, self._costs(rows, self.of(greedy, rows=len(rows)), horizon=1))
        affordable = [plan for plan in plans if plan.seconds - plain.seconds <= most] or plans[:1]
        return max(affordable, key=lambda plan: (plan.tokens - 1) / max(plan.seconds - plain.seconds, 1e-12))

    def catch_up(self, rows: Sequence[Row], done: Round) -> tuple[int, int]:
        """Tokens that the drafter had to read before the round that is over, and those of them that were in texts it had read nothing of;
        now it has."""
        if not self.catches_up:
            return 0, 0
        fresh = self._behind([row for row in rows if row.slot not in self._seen])
        behind = max(0, self._behind(rows) - sum(done.accepted) - len(done.asked))
        self._seen = {row.slot: len(row.ids) for row in rows}
        return behind, min(fresh, behind)

    def learn(self, rows: Sequence[Row], done: Round, cost: float, *, trying: bool, expected_tokens: float | None = None) -> None:
        """A round that drafted is over; it took ``cost`` plain rounds. ``trying`` where drafts are only made now and then; its shape was
        chosen for ``expected_tokens``."""
        acceptance = self.of(done.greedy)
        if expected_tokens is not None and expected_tokens > 1 and len(rows) == 1 and isinstance(done.shape, StaticShape):
            self.plan_record.observe(done.accepted[0], expected_tokens - 1)
        if isinstance(done.shape, DynamicShape) and done.greedy in self.grown:  # of ranks and depths it says nothing
            self.grown[done.greedy].observe(1 + sum(done.accepted) / len(rows), cost, done.expected)
            return
        alone = len(rows) == 1 and not self._records  # then it is the average
        usual = [] if alone else _summed(acceptance.by_depth(self.largest.depth))
        for row, asked, drafted, kept in zip(rows, done.asked, done.drafted, done.accepted):
            if asked > 0 and usual:
                self._record(row).observe(given=any(drafted), accepted=kept, expected=usual[min(asked, len(usual)) - 1])
        if len(self._records) > 4 * len(rows) + 64:  # rows have come and gone
            self._records = {row.slot: self._record(row) for row in rows}
        memory = HASTE if trying else MEMORY
        for each in dict.fromkeys((acceptance, self.of(done.greedy, rows=len(rows)))):
            each.observe(done.asked, done.drafted, done.accepted, static_parents=done.static_parents, paths=done.paths, memory=memory)

    def worth(self, rows: Sequence[Row], done: Round, plain: float, *, together: bool) -> float:
        """Seconds of plain decoding that a round's tokens save: of rows that end together, those until the last one is done."""
        count = len(rows)
        if count == 1 or not together:
            return (1 + sum(done.accepted) / count) * plain
        alone = self.costs.verify(1, (1,), done.context)[0]
        each = (max(0.0, plain - alone)) / (count - 1)
        after = [max(0, row.capacity - len(row.ids)) for row in rows]
        before = [left + 1 + kept for left, kept in zip(after, done.accepted)]
        seconds = [batches.worth(left, lambda live: plain - (count - live) * each) for left in (before, after)]
        return seconds[0] - seconds[1]

    def price(self, shape: TreeShape, rows: Sequence[Row], *, greedy: bool) -> search.Plan:
        """What ``shape`` promises."""
        acceptance = self.of(greedy, rows=len(rows))
        costs = self._lasting(rows, acceptance)
        if not isinstance(shape, StaticShape):
            return search.Plan(shape, self.grown[greedy].tokens, self.grown[greedy].seconds * search.plain(costs).seconds)
        if not shape.nodes:
            return search.plain(costs)
        accepted = expected(shape.parents, acceptance.by_rank(self.largest.depth, self.siblings))
        return self.plan_record.of(search.priced(shape, accepted, search.widths(shape), costs))

    def compare(self, rows: int, *, context: int, greedy: bool = True) -> list[search.Plan]:
        """What is to be expected of zero drafting, of every chain, and of the best tree where it is better, in a batch of so many rows;
        nobody being behind."""
        acceptance = self.of(greedy)
        costs = self._priced(rows, acceptance, context, once=0.0)
        plans = search.chains(acceptance.by_depth(self.largest.depth), costs)
        if self.siblings > 1:
            tree = search.best_tree(acceptance.by_rank(self.largest.depth, self.siblings), costs)
            plans += [tree] if all(tree.shape != plan.shape for plan in plans) else []
        return plans

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _leaves_elsewhere(self, choice: ExitChoice, rows: int, acceptance: Acceptance, costs: search.Costs, greedy: bool) -> bool:
        """Choose the exit by what the best drafts of each promise; whether it is another now."""

        def chain(odds: float, seconds: float) -> search.Plan:
            plans = search.chains(acceptance.by_depth(self.largest.depth, odds=odds), costs.times(seconds))
            return max(plans[1:], key=lambda plan: plan.rate)

        def any_shape(odds: float, seconds: float) -> search.Plan:
            tree = search.best_tree(acceptance.by_rank(self.largest.depth, self.siblings, odds=odds), costs.times(seconds))
            return max(tree, chain(odds, seconds), key=lambda plan: plan.rate)

        odds = choice.better(rows, greedy, chain, chain if self.siblings == 1 else any_shape)
        if odds is None:
            return False
        for each in self.acceptance.values():
            each.shift(odds)
        self.grown = {greedy: Grown(greedy) for greedy in self.grown}  # what grown trees kept was of another exit
        return True

    def _with_grown(
        self, grown: Grown, best: search.Plan, plain: search.Plan, costs: search.Costs, growing: bool
    ) -> tuple[search.Plan, search.Plan | None]:
        """The better of ``best`` and a tree that is grown by the draft's probabilities, as far as a node and a level are worth what they
        cost at the best rate so far; and the other one. Grown trees are known by what they have kept, so they are tried first."""
        rate = max(best.rate, grown.rate / plain.seconds)
        level = costs.draft((1, GROWN_K, GROWN_K)) - costs.draft((1, GROWN_K))
        depth = min(self.levels, self.largest.depth)
        shape = TreeShape.opt(self.largest.nodes, depth, delta=_coarse(level * rate / grown.surer), k=GROWN_K)
        prices = tuple(rate / grown.surer * (seconds - costs.verify[0]) for seconds in costs.trees[: shape.total + 1])
        shape = replace(shape, prices=prices)
        plan = search.Plan(shape, grown.tokens, grown.seconds * plain.seconds)
        if grown.rounds < GROWN_TRIES:
            return (search.Plan(shape, best.tokens, best.seconds), None) if best.shape.nodes else (best, None)
        if plan.rate > max(best.rate * (1 if growing else SWITCH), GAIN * plain.rate):
            return plan, best if best.shape.nodes else None
        return best, plan

    def _search_batch(self, rows: Sequence[Row], acceptance: Acceptance, costs: search.Costs) -> Forecast:
        """Rows that end together: a depth for each of them, or one tree for all."""
        count, context, deepest = len(rows), max(len(row.ids) for row in rows), self.largest.depth
        accepted = _summed(acceptance.by_depth(deepest))
        sizes = np.arange(1, deepest + 1 + FINEST, FINEST if self.own else 1.0)
        seconds = self.costs.verify(count, self._scored(sizes.tolist()), context)

        def verify(nodes: np.ndarray) -> np.ndarray:
            return np.interp(nodes, sizes, seconds)

        forecasts = [
            self._record(row).forecast(max(1, row.capacity - len(row.ids)), costs.available, accepted[-1] if accepted else 0.0)
            for row in rows
        ]
        plain = batches.plain_schedule(forecasts, verify)
        best = batches.best_schedule(forecasts, accepted, verify, lambda depth: costs.draft((1,) * depth), once=costs.once, own=self.own)
        zero = search.Plan(search.chain(0), plain.tokens, plain.seconds)
        total = plain.total / GAIN
        found, limits = zero, None
        if any(best.limits) and best.total < total:
            total, found = best.total, search.Plan(search.chain(max(best.limits)), best.tokens, best.seconds)
            limits = {row.slot: limit for row, limit in zip(rows, best.limits)}
        if self.siblings > 1:
            tree = search.best_tree(acceptance.by_rank(deepest, self.siblings), costs)
            if not tree.shape.is_chain and plain.rounds / tree.tokens * tree.seconds < total:
                found, limits = tree, None
        return Forecast(found, zero, limits)

    def _record(self, row: Row) -> batches.RowRecord:
        return self._records.setdefault(row.slot, batches.RowRecord())

    def _lasting(self, rows: Sequence[Row], acceptance: Acceptance) -> search.Costs:
        """Costs with what the drafter missed spread over the rounds to come."""
        return self._costs(rows, acceptance, horizon=max(1, min(HORIZON, min(row.capacity - len(row.ids) for row in rows))))

    def _costs(self, rows: Sequence[Row], acceptance: Acceptance, *, horizon: int) -> search.Costs:
        once = self.costs.catching_up(len(rows), self._behind(rows)) / horizon
        return self._priced(len(rows), acceptance, max(len(row.ids) for row in rows), once=once)

    def _priced(self, rows: int, acceptance: Acceptance, context: int, *, once: float) -> search.Costs:
        available, sizes = acceptance.availability, self._scored(range(1, self.largest.nodes + 2))
        verify = self.costs.verify(rows, sizes, context)
        trees = [verify[0], *self.costs.verify(rows, sizes, context, branching=True)[1:]] if self.siblings > 1 else []
        return search.Costs(
            verify=verify,
            trees=trees,
            draft=self.costs.drafts(rows),
            once=once,
            available=available,
            any_row=1.0 if self._filler else 1 - (1 - available) ** rows,
            own=self.own and rows > 1,
            plain=self.costs.plain(rows, context),
        )

    def _scored(self, sizes: Sequence[float]) -> list[float]:
        """Nodes that a pass has where trees of ``sizes`` nodes are proposed, their roots included."""
        return [size + self._filler if size > 1 else size for size in sizes]

    def _behind(self, rows: Sequence[Row]) -> int:
        """Tokens that the drafter has not read, the roots left out, over all rows."""
        if not self.catches_up:
            return 0
        return sum(max(0, len(row.ids) - 1 - self._seen.get(row.slot, row.prompt_length if self._reads_prompts else 0)) for row in rows)


def _coarse(share: float) -> float:
    """A probability as a power of the square root of two, so that few different shapes come about."""
    return round(2 ** (round(2 * math.log2(min(max(share, 1 / 256), 0.5))) / 2), 4)


def _summed(rates: Sequence[float]) -> list[float]:
    """Accepted tokens to expect of a chain of each length."""
    return np.cumsum(np.cumprod(rates)).tolist() if rates else []
