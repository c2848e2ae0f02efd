"""Which shape to draft this round.

A shape may depend on everything that is past, on clocks too, and never on what is drawn in the round itself; then whatever rule is
exact for each of the shapes stays exact (the shape is a constant given the text so far).

The automatic planner never bets more than it can lose. It keeps an account in seconds: a round that drafts is credited with what its
tokens would have taken plainly, and debited with what it takes; a plain round earns ``SHARE`` of its seconds. Where drafting is not
expected to pay, it is tried again only when the account covers a try, less and less often. Where it is expected to pay and does not,
the account runs into its limit and ends it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from foretoken.drafters.base import Drafter, Row
from foretoken.planning import search
from foretoken.planning.acceptance import HASTE, MEMORY, Acceptance, expected
from foretoken.planning.costs import BUDGET, CostModel, measure, runs_a_model, widths
from foretoken.planning.profiles import Profile
from foretoken.shapes import StaticShape, TreeShape

if TYPE_CHECKING:
    from foretoken.target import Target

AUTO = "auto"
DEPTH, SIBLINGS, NODES = 12, 4, 24  # of the largest shape that is considered
SHARE = 0.01  # of the time of plain rounds may go into tries
STAKE, LIMIT, SAVINGS = 1.0, -1.0, 8.0  # plain rounds that the account begins with, at least and at most holds
GAIN = 1.01  # drafting has to be better than none by so much
SWITCH = 1.02  # another shape has to be better than the one in use by so much
HOPE, TRY = 0.7, 4  # acceptance that a try is made for, and its length at most
FIRST_PAUSE, LONGEST_PAUSE = 4, 64  # rounds between tries
LOOK = 12  # rounds after which a chain is drafted one longer than is best
HORIZON = 32  # rounds that what the drafter missed is spread over
DRIFT, CHECKS, BETWEEN_CHECKS, EVERY = 0.3, 3, 64, 256  # see `AutomaticPlanner._check`
HASTY = 8  # first rounds with a draft, each of which is followed by a new plan
SELDOM = 4  # of so many plain rounds in a row one is looked at closely: they may be very short
LAZY = 150  # between two plans lies so many times what a plan takes


@dataclass(frozen=True)
class Round:
    """What happened in one round.

    Attributes:
        shape: as it was asked for; zero drafting where there was no room.
        asked: per row, how deep.
        drafted: per row, nodes at each depth.
        accepted: per row, drafted tokens kept.
        nodes: of the tree that was verified, per row, the root included.
        context: tokens of the longest row.
        draft, target, rest: seconds.
        split: the draft's seconds and the target's are known apart; on a GPU only their sum is.
        layout, paths: the tree's parents and the nodes kept per row, where it branches and the host knows them.
        greedy: no row samples.
    """

    shape: TreeShape
    asked: Sequence[int]
    drafted: Sequence[Sequence[int]]
    accepted: Sequence[int]
    nodes: int
    context: int
    draft: float
    target: float
    rest: float
    split: bool = True
    layout: tuple[int, ...] | None = None
    paths: Sequence[Sequence[int]] = ()
    greedy: bool = True


class Planner(Protocol):
    """What a session asks before each round and tells after it."""

    @property
    def learns(self) -> bool:
        """Wants to be told about rounds."""

    @property
    def shape(self) -> TreeShape:
        """The largest that it may ask for."""

    def prepare(self, target: Target, drafter: Drafter, rows: int) -> float:
        """Called while no row is live, before so many begin; returns the seconds that it took."""

    def plan(self, rows: Sequence[Row], *, greedy: bool) -> TreeShape:
        """The shape to draft for the live rows in this round."""

    def passes_over(self, rows: int) -> bool:
        """A round without a draft is over; whether it need not be told about."""

    def observe(self, rows: Sequence[Row], done: Round) -> None:
        """A round is over."""


@dataclass(frozen=True)
class FixedPlanner:
    """The same shape in every round."""

    shape: TreeShape
    learns: bool = False

    def prepare(self, target: Target, drafter: Drafter, rows: int) -> float:
        return 0.0

    def plan(self, rows: Sequence[Row], *, greedy: bool) -> TreeShape:
        return self.shape

    def passes_over(self, rows: int) -> bool:
        return True

    def observe(self, rows: Sequence[Row], done: Round) -> None:
        pass


@dataclass
class Forecast:
    """One decision: the best plan, and zero drafting; ``possible`` plans for the record."""

    best: search.Plan
    plain: search.Plan
    chains: list[search.Plan] = field(default_factory=list)


class AutomaticPlanner:
    """Picks shapes by measured cost and tracked acceptance.

    Args:
        largest: from :func:`largest_shape`; says how deep, how wide and how large a tree may be, and whether it may branch.
        costs: what is known of the machine; filled by :meth:`prepare` where it is not.
        profile: where measured costs are kept between runs, None for nowhere.
        budget: seconds that measuring may take, 0 to learn from rounds alone.
        catches_up: the drafter has to read what it missed in rounds without a draft.
        clock: seconds, for the time that planning itself takes.
    """

    learns = True

    def __init__(
        self,
        largest: StaticShape,
        *,
        costs: CostModel | None = None,
        profile: Profile | None = None,
        budget: float = BUDGET,
        catches_up: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.largest = largest
        self.siblings = 1 if largest.is_chain else 1 + max(max(level.ranks) for level in largest.levels)
        self._sizes = range(1, largest.nodes + 2)
        self.costs = costs or CostModel()
        self.profile, self.budget, self.catches_up, self.clock = profile, budget, catches_up, clock
        self.acceptance: dict[bool, Acceptance] = {}  # greedy or not: drafts are made differently
        self.account: float | None = None  # seconds
        self._checks, self._since_check = 0, 0
        self._pause, self._since_try, self._trying = FIRST_PAUSE, 0, False
        self._seen: dict[int, int] = {}  # slot: tokens that the drafter has read
        self._forecast: Forecast | None = None
        self._forecast_for: tuple[int, bool] | None = None
        self._rounds, self._next, self._drafting = 0, 0, 0
        self._earliest = 0.0
        self._plain = (0, 0.0)  # rows, and seconds of a plain round of theirs

    @property
    def shape(self) -> StaticShape:
        return self.largest

    # -- before the first round -----------------------------------------------------------------------------------------

    def prepare(self, target: Target, drafter: Drafter, rows: int) -> float:
        """Read the profile, and measure what it lacks for so many rows; the two seconds are shared between numbers of rows."""
        begin = self.clock()
        self.catches_up = runs_a_model(drafter)
        self._seen.clear()
        if self.profile is not None and not self.costs.target.points:
            self.profile.read(self.costs)
        left = self.budget / (1 + len(self.costs.target.points))
        if rows in self.costs.target.points or left <= 0:
            return 0.0
        measure(self.costs, target, drafter, rows=rows, largest=self.largest, seconds=left, clock=self.clock)
        self._forecast = None
        if self.profile is not None:
            self.profile.write(self.costs)
        return self.clock() - begin

    # -- each round -----------------------------------------------------------------------------------------------------

    def plan(self, rows: Sequence[Row], *, greedy: bool) -> TreeShape:
        self._rounds += 1
        zero = search.chain(0)
        self._trying = False
        if self._checks > 0:
            self._checks -= 1
            return zero
        forecast = self.forecast(rows, greedy=greedy)
        plain = forecast.plain.seconds
        if self.account is None:
            self.account = STAKE * plain
        if forecast.best.shape.nodes:
            return self._deeper(forecast.best.shape) if self.account > LIMIT * plain else zero
        self._since_try += 1
        if self._since_try < self._pause or self.account <= 0:
            return zero
        costs = self._costs(rows, self.acceptance[greedy], horizon=1)
        attempt = try_out(costs, min(TRY, self.largest.depth))
        missing = attempt.seconds - plain - self.account
        if missing > 0:  # ask again when it has been earned
            self._since_try = min(self._since_try, self._pause) - math.ceil(missing / (SHARE * plain))
            return zero
        self._trying = True
        return attempt.shape

    def _deeper(self, shape: StaticShape) -> StaticShape:
        """Now and then a chain is drafted one longer, or what the next depth would bring would never be known."""
        self._drafting += 1
        look = self._drafting % LOOK == 0 and shape.is_chain and shape.depth < self.largest.depth
        return search.chain(shape.depth + 1) if look and self.account is not None and self.account > 0 else shape

    def forecast(self, rows: Sequence[Row], *, greedy: bool) -> Forecast:
        """The best plan as things stand; searched for anew only every few rounds, and never so often that it would show."""
        key = len(rows), greedy
        if self._forecast is not None and key == self._forecast_for and (self._rounds < self._next or self.clock() < self._earliest):
            return self._forecast
        begin = self.clock()
        forecast = self._search(rows, greedy=greedy)
        before = self._forecast
        if before is not None and key == self._forecast_for and before.best.shape != forecast.best.shape:
            same = self.price(before.best.shape, rows, greedy=greedy)
            if forecast.best.rate < SWITCH * same.rate and (same.shape.nodes == 0 or same.rate > GAIN * forecast.plain.rate):
                forecast.best = same
        self._forecast, self._forecast_for = forecast, key
        self._next = self._rounds + 4
        end = self.clock()
        self._earliest = end + LAZY * (end - begin)
        return forecast

    def _search(self, rows: Sequence[Row], *, greedy: bool) -> Forecast:
        acceptance = self.acceptance.get(greedy)
        if acceptance is None:
            acceptance = self.acceptance[greedy] = Acceptance(self.largest.depth, self.siblings)
        costs = self._lasting(rows, acceptance)
        chains = search.chains(acceptance.by_depth(self.largest.depth), costs)
        best = max(chains, key=lambda plan: plan.rate)
        if self.siblings > 1:
            tree = search.best_tree(acceptance.by_rank(self.largest.depth, self.siblings), costs)
            best = max(best, tree, key=lambda plan: plan.rate)
        if best.rate < GAIN * chains[0].rate:
            best = chains[0]
        return Forecast(best, chains[0], chains)

    def passes_over(self, rows: int) -> bool:
        count, seconds = self._plain
        if rows != count or self._since_check <= CHECKS or self._rounds % SELDOM == 0:
            return False
        self._since_check += 1
        self.account = min((self.account or 0.0) + SHARE * seconds, SAVINGS * seconds)
        return True

    def observe(self, rows: Sequence[Row], done: Round) -> None:
        count, drafting = len(done.asked), done.shape.nodes > 0
        levels = widths(done.shape.within(max(done.asked))) if drafting else ()
        behind = 0
        if self.catches_up and drafting:
            behind = max(0, self._behind(rows) - sum(done.accepted) - count)
            self._seen = {row.slot: len(row.ids) for row in rows}
        draft, target = done.draft, done.target
        if not done.split:  # the target's part is what is left of the sum
            draft = min(self.costs.draft_seconds(count, levels, behind), 0.9 * (draft + target))
            target = done.draft + done.target - draft
        self.costs.observe(count, done.nodes, done.context, target, done.rest, draft if drafting and done.split else None, levels, behind)
        self._check()
        plain, verify = self.costs.verify(count, (1, done.nodes), done.context)
        if self.account is None:
            self.account = STAKE * plain
        if not drafting:
            self._plain = count, plain
            self.account = min(self.account + SHARE * plain, SAVINGS * plain)
            return
        gain = (1 + sum(done.accepted) / count) * plain - verify - self.costs.draft_seconds(count, levels, behind)
        self.account = min(self.account + gain, SAVINGS * plain)
        acceptance = self.acceptance.get(done.greedy)
        if acceptance is None:
            acceptance = self.acceptance[done.greedy] = Acceptance(self.largest.depth, self.siblings)
        memory = HASTE if self._trying else MEMORY
        acceptance.observe(done.asked, done.drafted, done.accepted, layout=done.layout, paths=done.paths, memory=memory)
        if acceptance.rounds <= HASTY:
            self._next, self._earliest = 0, 0.0
        if self._trying and any(done.drafted):  # a try without a draft cost nothing and says nothing
            self._since_try = 0
            self._pause = 1 if gain > 0 else min(2 * max(self._pause, FIRST_PAUSE // 2), LONGEST_PAUSE)
            self._next = 0

    def price(self, shape: StaticShape, rows: Sequence[Row], *, greedy: bool) -> search.Plan:
        """What ``shape`` promises."""
        acceptance = self.acceptance[greedy]
        costs = self._lasting(rows, acceptance)
        if not shape.nodes:
            return search.plain(costs)
        accepted = expected(shape.parents, acceptance.by_rank(self.largest.depth, self.siblings))
        return search.priced(shape, accepted, widths(shape), costs)

    def compare(self, rows: int, *, context: int, greedy: bool = True) -> list[search.Plan]:
        """What is to be expected of zero drafting, of every chain, and of the best tree where it is better, in a batch of so many rows;
        nobody being behind."""
        acceptance = self.acceptance.get(greedy) or Acceptance(self.largest.depth, self.siblings)
        costs = self._priced(rows, acceptance, context, once=0.0)
        plans = search.chains(acceptance.by_depth(self.largest.depth), costs)
        if self.siblings > 1:
            tree = search.best_tree(acceptance.by_rank(self.largest.depth, self.siblings), costs)
            plans += [tree] if all(tree.shape != plan.shape for plan in plans) else []
        return plans

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _lasting(self, rows: Sequence[Row], acceptance: Acceptance) -> search.Costs:
        """Costs with what the drafter missed spread over the rounds to come."""
        return self._costs(rows, acceptance, horizon=max(1, min(HORIZON, min(row.capacity - len(row.ids) for row in rows))))

    def _costs(self, rows: Sequence[Row], acceptance: Acceptance, *, horizon: int) -> search.Costs:
        once = self.costs.catching_up(len(rows), self._behind(rows)) / horizon
        return self._priced(len(rows), acceptance, max(len(row.ids) for row in rows), once=once)

    def _priced(self, rows: int, acceptance: Acceptance, context: int, *, once: float) -> search.Costs:
        available = acceptance.availability
        return search.Costs(
            verify=self.costs.verify(rows, self._sizes, context),
            draft=lambda levels: self.costs.draft_seconds(rows, levels),
            once=once,
            available=available,
            any_row=1 - (1 - available) ** rows,
        )

    def _behind(self, rows: Sequence[Row]) -> int:
        """Tokens that the drafter has not read, the roots left out, over all rows."""
        return sum(max(0, len(row.ids) - 1 - self._seen.get(row.slot, 0)) for row in rows) if self.catches_up else 0

    def _check(self) -> None:
        """Where passes have become much slower or quicker, a few plain rounds show whether all of them have: while a shape is in use,
        its seconds alone say nothing of what zero drafting would take. So does one every now and then."""
        self._since_check += 1
        if self.costs.target.drift > DRIFT and self._since_check >= BETWEEN_CHECKS:
            self.costs.target.recheck()
            self._checks, self._since_check, self._next = CHECKS, 0, 0
        elif self._since_check >= EVERY:
            self._checks, self._since_check = 1, 0


def try_out(costs: search.Costs, depth: int) -> search.Plan:
    """The chain that promises most tokens for the seconds it costs more than a plain round, if drafting did work."""
    plans = search.chains([HOPE] * depth, costs)
    return max(plans[1:], key=lambda plan: (plan.tokens - 1) / max(plan.seconds - plans[0].seconds, 1e-12))


def largest_shape(*, branches: bool, vocab_size: int = SIBLINGS, depth: int = DEPTH, nodes: int = NODES) -> StaticShape:
    """What the automatic planner chooses from: every shape within this one's depth, number of nodes and of siblings. It is a chain
    where nothing may branch."""
    depth = max(0, depth)
    if not branches or vocab_size < 2 or depth < 2:
        return StaticShape(TreeShape.chain(depth).parents, AUTO)
    siblings, spare = min(SIBLINGS, vocab_size), max(0, nodes - depth)
    parents, above = [-1], 0
    for _ in range(depth):
        first = len(parents)
        extra = min(siblings - 1, spare)
        spare -= extra
        parents += [above] * (1 + extra)
        above = first
    return StaticShape(tuple(parents), AUTO)


def largest_fitting(target: Target, drafter: Drafter, fits: Callable[[TreeShape], bool]) -> StaticShape:
    """The largest shape that the target, the drafter and whoever else has a say in ``fits`` can do; a chain where trees are out."""
    room = None if target.context is None else target.context // 4
    depth = DEPTH if room is None else max(1, min(DEPTH, room))
    if drafter.branches and target.chains_only is None:
        nodes = NODES if room is None else max(depth, min(NODES, room))
        tree = largest_shape(branches=True, vocab_size=target.vocab_size, depth=depth, nodes=nodes)
        if not tree.is_chain and drafter.refusal(tree) is None and fits(tree):
            return tree
    while depth > 1 and drafter.refusal(TreeShape.chain(depth)) is not None:
        depth -= 1
    return largest_shape(branches=False, depth=depth)
