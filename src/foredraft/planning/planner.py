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
from dataclasses import dataclass

from foredraft.drafters.base import Drafter, Row
from foredraft.drafters.exits import Exits
from foredraft.planning import search
from foredraft.planning.costs import BUDGET, CostModel, measure
from foredraft.planning.forecasts import FINEST, GAIN, GROWN_DEPTH, SWITCH, Forecast, Forecaster
from foredraft.planning.profiles import Profile
from foredraft.planning.rounds import Planner, Round
from foredraft.shapes import DynamicShape, StaticShape, TreeShape
from foredraft.target import Target

SHARE = 0.01  # of the time of plain rounds may go into tries
STAKE, LIMIT, SAVINGS = 1.0, -1.0, 8.0  # plain rounds that the account begins with, that end drafting, and that it holds at most
DEBT = 1.5 * LIMIT  # plain rounds that it holds at least: what noise has cost must not end drafting for ever
FIRST_PAUSE, LONGEST_PAUSE = 4, 192  # rounds between tries
LOSS = 0.005  # of the time of plain rounds that tries which lose may take without coming less and less often
VAIN_PAUSE = 32  # at most, between those that find nothing to draft: a copy may begin at any time
DRIFT, CHECKS, BETWEEN_CHECKS, EVERY = 0.3, 3, 64, 256  # see `AutomaticPlanner._check`
FIRST_CHECKS = 2  # plain rounds before the first draft by layers of the target, whose rounds say little of plain ones
LOOKS = 3  # first rounds that draft whatever a stored profile says of drafts: it may be of a busy hour, and would never be found out
WRONG = 1.5  # times as long as such a round takes is what shows that it is wrong
HASTY = 8  # first rounds with a draft, each of which is followed by a new plan
SELDOM, SELDOM_PLAIN = 4, 16  # of so many like rounds, drafted and plain, one is looked at closely: every look costs after a pass
FIRST_TRIAL, TRIAL_ROUNDS = 48, 2  # rounds until the first trial of the kind of tree that is not in use, and rounds that one takes
LONGEST_BETWEEN = 768  # rounds between two trials at most: every trial that changes nothing doubles them
COMPARED, MUCH = 6, 1.3  # plain passes in a row that show what they take together, unless drafting is so many times better than others
COMPARISONS = 4  # of these at most, until it is known: the end of a page of the cache or of a text says nothing
QUIET = 0.8  # of a core is what the thread that measures has on a quiet machine, and more
LAZY, LAZY_PLAIN = 400, 1600  # between two plans lies so many times what a plan takes, where the last one drafts and where it does not
DEAREST = 0.05  # seconds that a plan takes at most; more is a machine that stood still
COLD, SLOW = 0.03, 1.5  # seconds that rounds which take so many times too long may take more before it counts: code runs for the first time
SETTLING = 8  # rounds in a row whose seconds are left out because something is recorded; more of them are what rounds take
STALL = 4  # times as long as it should take is what says nothing of a draft, unless it happens twice in a row
PROVEN, BROKEN = 6, 0.7  # a plan that has kept less than this part of its promise after so many rounds is made anew
ALIKE = 2  # times as many rows, or as few, are not measured: a server would measure for every number, while its first request waits
NOTHING = search.chain(0)


@dataclass
class InUse:
    """A ``forecast`` that is followed until round ``next`` and time ``earliest``, with the rounds that ``used`` its shape, and the tokens
    that they ``kept``."""

    forecast: Forecast
    next: int
    earliest: float
    used: int = 0
    kept: int = 0


class AutomaticPlanner(Planner):
    """Picks shapes by measured cost and tracked acceptance.

    Args:
        largest: from :func:`largest_shape`; says how deep, how wide and how large a tree may be, and whether it may branch.
        grows: in which rounds trees may be grown by the draft's probabilities: True for greedy ones, False for those that sample.
        levels: of a grown tree at most; where a level is a pass of a model, fewer are worth it.
        costs: what is known of the machine; filled by :meth:`prepare` where it is not.
        profile: where measured costs are kept between runs, None for nowhere.
        budget: seconds that measuring may take, 0 to learn from rounds alone.
        catches_up: the drafter has to read what it missed in rounds without a draft.
        rates: how often the drafter's guesses are right at each depth and rank, as far as that is known beforehand.
        exits: where drafts may leave the target, if there is a choice.
        copies: drafts are copied from texts; see :class:`~foredraft.planning.forecasts.Forecaster`.
        clock: seconds, for the time that planning itself takes.
    """

    learns = True

    def __init__(
        self,
        largest: StaticShape,
        *,
        grows: Sequence[bool] = (),
        levels: int = GROWN_DEPTH,
        costs: CostModel | None = None,
        profile: Profile | None = None,
        budget: float = BUDGET,
        catches_up: bool = True,
        rates: Sequence[Sequence[float]] = (),
        exits: Exits | None = None,
        copies: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.largest = self.shape = largest
        self.costs = costs or CostModel()
        self.forecaster = Forecaster(
            largest, self.costs, grows=grows, levels=levels, catches_up=catches_up, rates=rates, exits=exits, copies=copies
        )
        self.acceptance, self.compare = self.forecaster.acceptance, self.forecaster.compare
        self.profile, self.budget, self.clock = profile, budget, clock
        self.account: float | None = None  # seconds
        self._checks, self._since_check = 0, 0
        self._wrong = False  # the profile was
        self._looks, self._looking = 0, False  # rounds to come that look what drafts cost, and whether the present one is of them
        self._pause, self._since_try, self._trying = FIRST_PAUSE, FIRST_PAUSE, False
        self._vain_pause = FIRST_PAUSE  # rounds between tries that find nothing to draft
        self._together = True
        self._limits: dict[int, int] | None = None
        self._in_use: dict[bool, InUse] = {}  # by whether the row's last draft was kept whole
        self._for: tuple[int, bool] | None = None  # rows that these are for, and whether they are greedy
        self._rounds, self._drafting = 0, 0
        self._growing, self._trial_after, self._next_trial = False, FIRST_TRIAL, FIRST_TRIAL
        self._cold = COLD
        self._checking, self._settling = False, 0  # whether the present round is a check; rounds in a row that recorded something
        self._stalled = False  # the last round with a draft took many times as long as it should
        self._plain = (0, 0.0)  # rows, and seconds of a plain round of theirs
        self._alike: tuple[TreeShape | None, float, float, int] = (None, 0.0, 0.0, 0)  # shape, seconds plainly and with it, and how often
        self._rest, self._resting = 0, False  # plain rounds to come that need no plan, and whether the present one is of them
        self._rest_for: tuple[int, bool] | None = None
        self._waived = 0  # plain passes to come that need no plan if the present try finds nothing to draft
        self._comparisons = 1 + COMPARISONS  # times that plain rounds are to be compared at most, a single pass first
        self._again, self._empty = 0, False  # rounds to come of the same shape, the last one having had no draft; whether that was so

    # -- before the first round -----------------------------------------------------------------------------------------

    def prepare(self, target: Target, drafter: Drafter, rows: int) -> float:
        """Read the profile, and measure what it lacks for about so many rows; the two seconds are shared between numbers of rows.

        What another process measured is checked by a few plain rounds at the beginning, and a few that draft. What was measured on a busy
        machine is not kept for others.
        """
        begin = self.clock()
        self._rest, self._resting, self._again = 0, False, 0
        self.costs.experts.routing = target.routing
        info = drafter.info
        how = {"catches_up": info.catches_up, "reads_prompts": info.whole_prompt}
        self.forecaster.begin(own=target.ragged, filler=info.extra_nodes, text=rows == 1, **how)
        if rows == 1 and self.account is not None:
            self.account = max(self.account, 0.0)  # what another text has cost is no reason against drafts for this one
        self._in_use = {kept: each for kept, each in self._in_use.items() if each.forecast.limits is None}
        self._make_anew()  # they were made for another text, and those with limits for other rows
        if self.profile is not None and not self.costs.target.points and not self._wrong:
            self._checks, self._looks = (CHECKS, LOOKS) if self.profile.read(self.costs) else (0, 0)
            if drafter.info.exits is not None:
                self._looks = 0  # tries at other exits are looks
                self.costs.leave(drafter.info.exits.layer)
        left = self.budget / (1 + len(self.costs.target.points))
        known = [each for each in self.costs.target.points if drafter.info.exits is None or each in self.costs.exits]
        if any(max(rows, each) <= ALIKE * min(rows, each) for each in known) or left <= 0:
            return 0.0
        share = measure(self.costs, target, drafter, rows=rows, largest=self.largest, seconds=left, clock=self.clock)
        if drafter.info.exits is not None:
            self.costs.leave(drafter.info.exits.layer)
        self._checks = FIRST_CHECKS if drafter.info.shares_target else 0
        self._in_use.clear()
        if self.profile is not None and share >= QUIET:
            self.profile.write(self.costs)
        return self.clock() - begin

    # -- each round -----------------------------------------------------------------------------------------------------

    def plan(self, rows: Sequence[Row], *, greedy: bool, together: bool = True) -> TreeShape:
        if self._waived:  # what came of the try was never told
            self._rest = 0
        self._resting = self._rest > 0 and self._rest_for == (len(rows), greedy)
        if not self._resting:
            self._rest, self._waived = 0, 0
        again = self._again if not self._resting and self._for == (len(rows), greedy) else 0
        self._again = max(0, again - 1)
        if self._resting:
            self._rest -= 1
            return NOTHING
        self._rounds += 1
        if again and self._alike[0] is not None:
            return self._alike[0]
        if self.forecaster.choice is not None:
            self.forecaster.choice.exits.greedy = greedy
        self._trying, self._looking, self._together, self._limits = False, False, together, None
        self._checking = self._checks > 0
        if self._checking:
            self._checks -= 1
            return NOTHING
        forecast = self.forecast(rows, greedy=greedy)
        plain = forecast.plain.seconds
        if self.account is None:
            self.account = STAKE * plain
        if len(rows) == 1 and forecast.best.rate < MUCH * forecast.plain.rate and self._compares_plain(greedy):
            return NOTHING
        if forecast.best.shape.nodes:
            self._looks = 0  # its rounds show what drafts cost
            if self.account <= LIMIT * plain:
                return NOTHING
            self._limits = forecast.limits
            return self._or_other(forecast) if forecast.limits is None else forecast.best.shape
        if self._looks > 0:
            self._looks, self._trying, self._looking = self._looks - 1, True, True
            return self.forecaster.attempt(rows, greedy=greedy, most=self.account).shape
        self._since_try += 1
        if self._since_try < self._pause or self.account <= 0:
            self._sit_out(len(rows), greedy, plain)
            return NOTHING
        attempt = self.forecaster.attempt(rows, greedy=greedy, most=self.account)
        missing = attempt.seconds - plain - self.account
        if missing > 0:  # ask again when it has been earned
            self._since_try = min(self._since_try, self._pause) - math.ceil(missing / (SHARE * plain))
            self._sit_out(len(rows), greedy, plain)
            return NOTHING
        self._trying = True
        available = self.forecaster.of(greedy).availability
        self._vain_pause = max(FIRST_PAUSE, min(VAIN_PAUSE, round(1 / max(available, 1 / VAIN_PAUSE))))
        if len(rows) == 1 and self.costs.spared:
            self._rest = self._waived = min(VAIN_PAUSE, max(self._pause, self._vain_pause)) - 1
            self._rest_for = 1, greedy
        return attempt.shape

    def _compares_plain(self, greedy: bool) -> bool:
        """After the first drafts, a few plain rounds show once what they take where their passes are made together: the first one shows how
        long a pass takes, the next ones run that code for the first time, and the others count."""
        if not self._comparisons or self.costs.spared is not None or self.forecaster.rounds(greedy) <= HASTY:
            return False
        self._comparisons -= 1
        if self._comparisons < COMPARISONS:
            self._rest, self._rest_for = COMPARED - 1, (1, greedy)
        return True

    def _sit_out(self, rows: int, greedy: bool, plain: float) -> None:
        """Plan no round until the next one that is looked at or may be a try: nothing changes before. Behind a pass, with cold caches, even
        a plan that is known takes half a percent of a small model's round."""
        if rows != self._plain[0] or self._since_check <= CHECKS:
            return
        wait = self._pause - self._since_try if self.account and self.account > 0 else SELDOM_PLAIN
        most = VAIN_PAUSE if self.costs.spared else SELDOM_PLAIN
        self._rest, self._rest_for = max(0, min(most, wait) - 1), (rows, greedy)
        self._count_rest(self._rest, plain)

    def _count_rest(self, rounds: int, plain: float) -> None:
        self._rounds += rounds
        self._since_try += rounds
        self._since_check += rounds
        self._credit(SHARE * plain * rounds, plain)

    def limits(self, rows: Sequence[Row]) -> list[int] | None:
        limits = self._limits
        return None if limits is None else [limits.get(row.slot, self.largest.depth) for row in rows]

    def _or_other(self, forecast: Forecast) -> TreeShape:
        """The best shape, or now and then the other kind of tree, whose acceptance would never be known otherwise."""
        self._drafting += 1
        best, other = forecast.best.shape, forecast.other
        return other.shape if other is not None and self._is_trial(isinstance(best, DynamicShape)) else best

    def _is_trial(self, growing: bool) -> bool:
        """Whether it is time to try the kind of tree that is not in use; ``growing`` says which is."""
        if growing != self._growing:
            self._growing, self._trial_after, self._next_trial = growing, FIRST_TRIAL, self._drafting + FIRST_TRIAL
        if self._drafting >= self._next_trial + TRIAL_ROUNDS:
            self._trial_after = min(2 * self._trial_after, LONGEST_BETWEEN)
            self._next_trial = self._drafting + self._trial_after
        return self._drafting >= self._next_trial

    def forecast(self, rows: Sequence[Row], *, greedy: bool) -> Forecast:
        """The best plan as things stand; searched for anew only every few rounds, and never so often that it would show."""
        if self._for != (len(rows), greedy):
            self._in_use.clear()
            self._for = len(rows), greedy
        before = self._in_use.get(self.forecaster.running)
        if before is not None and (self._rounds < before.next or self.clock() < before.earliest):
            return before.forecast
        begin = self.clock()
        growing = before is not None and isinstance(before.forecast.best.shape, DynamicShape)
        layer = self._layer
        forecast = self.forecaster.forecast(rows, greedy=greedy, together=self._together, growing=growing)
        if layer != self._layer:  # what was known of a shape was of another exit
            before, self._alike, self._pause = None, (None, 0.0, 0.0, 0), FIRST_PAUSE
        if before is not None and before.forecast.lasts and forecast.lasts and before.forecast.best.shape != forecast.best.shape:
            same = self.forecaster.price(before.forecast.best.shape, rows, greedy=greedy)
            if forecast.best.rate < SWITCH * same.rate and (same.shape.nodes == 0 or same.rate > GAIN * forecast.plain.rate):
                forecast.best = same
        end = self.clock()
        earliest = end + (LAZY if forecast.best.shape.nodes else LAZY_PLAIN) * min(end - begin, DEAREST)
        self._in_use[self.forecaster.running] = InUse(forecast, self._rounds + 4, earliest)
        return forecast

    def _make_anew(self, *, now: bool = True) -> None:
        """Replace the plans in use: ``now``, or as soon as the time between two plans is over."""
        for each in self._in_use.values():
            each.next, each.earliest = 0, 0.0 if now else each.earliest

    @property
    def resting(self) -> int:
        return self._rest

    def passes_over(self, rows: int, passes: int) -> bool:
        resting = self._resting
        self._rest = max(0, self._rest - (passes - 1))
        return resting

    def observe(self, rows: Sequence[Row], done: Round) -> None:
        self._observe(rows, done)
        self.forecaster.ran(done)

    def _observe(self, rows: Sequence[Row], done: Round) -> None:
        count, drafting, empty = len(done.asked), done.shape.nodes > 0, not any(done.drafted)
        waived, self._waived = self._waived, 0
        if drafting:
            self._rest = max(0, self._rest - (done.passes - 1)) if empty else 0
        self._settling = self._settling + 1 if done.settling else 0
        if 0 < self._settling <= SETTLING:
            self._settle(rows, done)
            return
        if drafting and count == 1 and self._as_before(rows, done):
            return
        grown = isinstance(done.shape, DynamicShape)
        levels = search.widths(done.shape.truncate(max(done.asked))) if drafting else ()
        behind, fresh = self.forecaster.catch_up(rows, done) if drafting else (0, 0)
        draft, target, nodes = done.draft, done.target, max(1.0, round(done.nodes / FINEST) * FINEST)
        branching, spent = nodes > 1 and not done.shape.is_chain, draft + target + done.rest
        if drafting:
            expected = self.costs.verify(count, (nodes,), done.context, branching=branching)[0]
            expected += self.costs.draft_seconds(count, levels, behind)
            if self._stalls(spent, expected):
                return
            if self._looking and WRONG * spent < expected:
                self.costs.forget()
                self._checks, self._looks, self._wrong = CHECKS, 0, True
        cold = drafting and self._cold > 0 and self.costs.target.known and spent > SLOW * expected and not self._looking
        if cold:
            self._cold -= spent - expected
        split = done.split and not (done.shared and branching)
        if not split:  # the target's part is what is left of the sum
            draft = min(self.costs.draft_seconds(count, levels, behind), 0.9 * (draft + target))
            target = done.draft + done.target - draft
        elif done.shared and drafting:  # what a whole pass takes is the pass; a draft costs what comes on top
            target = min(self.costs.pass_seconds(count, nodes, done.context), 0.95 * (draft + target))
            draft = done.draft + done.target - target
        known = drafting and split and not grown  # how many levels were grown is not
        if not cold:
            drafts = draft if known else None, levels, behind
            together = True if done.passes > 1 else False if done.single else None
            told = count, nodes, done.context, target, done.rest, *drafts
            self.costs.observe(*told, branching=branching, touched=done.touched, together=together)
        self._check()
        plain, verify = self.costs.plain(count, done.context), self.costs.verify(count, (nodes,), done.context, branching=branching)[0]
        verify = plain if done.passes > 1 else verify
        if self.account is None:
            self.account = STAKE * plain
        if not drafting:
            self._plain = count, plain
            self._credit(SHARE * plain, plain)
            return
        usual = verify + self.costs.draft_seconds(count, levels, 0)
        cost = verify + (draft if grown and not cold else self.costs.draft_seconds(count, levels, behind))
        if self._looking:  # what the profile says is what is doubted
            cost = done.draft + done.target + done.rest
        elif self._trying and not cold:  # with cold caches, which the costs of rounds one after the other do not show
            cost = max(cost, done.draft + done.target + done.rest)
        if not self._trying or self._looking:  # a text is read once, and its price was spread over rounds when drafting was chosen
            cost = max(verify, cost - self.costs.catching_up(count, fresh))
        gain = self.forecaster.worth(rows, done, plain, together=self._together) - cost
        self._credit(gain, plain)
        alike = count == 1 and (empty or not self._trying)
        self._alike = (done.shape, plain, usual if empty else cost, 0) if alike else (None, 0.0, 0.0, 0)
        vain = count == 1 and self._in_vain(empty)
        self._empty, self._again = empty, SELDOM - 1 if empty and count == 1 and not self._looking and not vain else 0
        self.forecaster.learn(rows, done, cost / plain, trying=self._trying, expected_tokens=self._expected_tokens(done))
        if self.forecaster.rounds(done.greedy) <= HASTY:
            self._make_anew()
        if self._looking:
            self._make_anew()
        elif self._trying and not empty:
            self._since_try = 0
            longest = min(LONGEST_PAUSE, max(VAIN_PAUSE, math.ceil(-gain / (LOSS * plain))))
            self._pause = max(1, self._pause // FIRST_PAUSE) if gain > 0 else min(2 * max(self._pause, FIRST_PAUSE // 2), longest)
            self._make_anew(now=gain > 0)
        elif vain:
            self._since_try = min(0, self._pause - self._vain_pause)
            self._count_rest(waived, plain)

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _credit(self, gain: float, plain: float) -> None:
        """Add seconds to the account, a plain round taking ``plain``."""
        self.account = max(DEBT * plain, min((self.account or 0.0) + gain, SAVINGS * plain))

    def _settle(self, rows: Sequence[Row], done: Round) -> None:
        """A round whose seconds say nothing of later ones. What was drafted was right or wrong all the same. One that was to show what
        passes or drafts cost is made up for."""
        if not done.shape.nodes:
            self._checks += self._checking
            self._checking = False
            return
        self._looks += self._looking
        behind, _ = self.forecaster.catch_up(rows, done)
        count, levels = len(done.asked), search.widths(done.shape.truncate(max(done.asked)))
        plain, verify = self.costs.plain(count, done.context), self.costs.verify(count, (max(1.0, done.nodes),), done.context)[0]
        cost = verify + self.costs.draft_seconds(count, levels, behind)
        self.forecaster.learn(rows, done, cost / plain, trying=self._trying, expected_tokens=None)
        if self.forecaster.rounds(done.greedy) <= HASTY:
            self._make_anew()

    def _as_before(self, rows: Sequence[Row], done: Round) -> bool:
        """A round of one row like the one before, of which only acceptance is noted; False for a round that is to be looked at."""
        shape, plain, cost, often = self._alike
        steady = shape == done.shape and isinstance(shape, StaticShape) and done.asked[0] >= shape.depth
        empty = not any(done.drafted)
        if (
            not steady
            or empty != self._empty
            or self._in_vain(empty)
            or often + 1 >= SELDOM
            or self.forecaster.rounds(done.greedy) <= HASTY
        ):
            return False
        self._alike = shape, plain, cost, often + 1
        self._since_check += 1
        self._credit((1 + done.accepted[0]) * plain - cost, plain)
        self.forecaster.catch_up(rows, done)
        self.forecaster.learn(rows, done, cost / plain, trying=self._trying, expected_tokens=self._expected_tokens(done))
        return True

    def _in_vain(self, empty: bool) -> bool:
        """Whether a round was a try that found nothing to draft, and may have cost something: passes could have been made together."""
        return self._trying and empty and self.costs.spared != 0.0

    def _stalls(self, spent: float, expected: float) -> bool:
        """Whether the machine stopped for a while in a round that drafted, as it does to collect garbage: a single such round would
        otherwise end all drafting for hundreds."""
        before, self._stalled = self._stalled, self.costs.target.known and spent > STALL * expected
        return self._stalled and not before

    @property
    def _layer(self) -> int | None:
        """Where drafts leave the target, if there is a choice."""
        choice = self.forecaster.choice
        return None if choice is None else choice.exits.layer

    def _expected_tokens(self, done: Round) -> float | None:
        """Tokens that the round was to keep, if it was of the plan in use; a plan that does not keep its promise is made anew."""
        plan = self._in_use.get(self.forecaster.running)
        if plan is None or self._trying or plan.forecast.best.shape != done.shape or len(done.accepted) != 1:
            return None
        expected = plan.forecast.best.tokens
        plan.used, plan.kept = plan.used + 1, plan.kept + 1 + done.accepted[0]
        if plan.used >= PROVEN and plan.kept < BROKEN * expected * plan.used:
            plan.next, plan.earliest = 0, 0.0
        return expected

    def _check(self) -> None:
        """Where passes have become much slower or quicker, a few plain rounds show whether all of them have: while a shape is in use,
        its seconds alone say nothing of what zero drafting would take. So does one every now and then."""
        self._since_check += 1
        if self.costs.drift > DRIFT and self._since_check >= BETWEEN_CHECKS:
            self.costs.recheck()
            self._checks, self._since_check = CHECKS, 0
            self._make_anew(now=False)
        elif self._since_check >= EVERY:
            self._checks, self._since_check = 1, 0
