"""Plans for batches that end together: against brute force over all depths of all rows, and on cases that speak for themselves."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest

from foredraft.planning import AutomaticPlanner, CostModel, Round, search
from foredraft.planning.batches import RowForecast, RowRecord, best_schedule, plain_schedule, worth
from foredraft.planning.largest import largest_shape

MS = 1e-3


def steps(places, seconds):
    return lambda nodes: np.interp(nodes, places, seconds)


def by_force(rows, accepted, verify, draft):
    """Seconds until the last row is done, for every combination of depths."""
    found = {}
    for limits in itertools.product(range(len(accepted) + 1), repeat=len(rows)):
        tokens = [1 + row.available * min(g, row.factor * (accepted[g - 1] if g else 0.0)) for row, g in zip(rows, limits)]
        needed = [row.remaining / each for row, each in zip(rows, tokens)]
        rounds = max(needed)
        nodes = sum((1 + row.available * g) * n / rounds for row, g, n in zip(rows, limits, needed)) / len(rows)
        found[limits] = rounds * (float(verify(np.array([nodes]))[0]) + (draft(max(limits)) if max(limits) else 0.0))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_no_combination_of_depths_is_better(seed: int):
    """All rows end together in the plan; ending one earlier by drafting more never pays where more nodes never cost less."""
    generator = np.random.default_rng(seed)
    rows = [RowForecast(int(generator.integers(1, 60)), generator.uniform(0.2, 1), generator.uniform(0.2, 2)) for _ in range(3)]
    accepted = np.cumsum(np.cumprod(generator.uniform(0.2, 0.95, 4))).tolist()
    verify = steps([1, 2, 5], np.cumsum(generator.uniform(0.1, 2, 3)))
    price = generator.uniform(0, 0.3)
    draft = lambda depth: price * depth  # noqa: E731
    plan = best_schedule(rows, accepted, verify, draft)
    best = min(by_force(rows, accepted, verify, draft).values())
    assert plan.total == pytest.approx(by_force(rows, accepted, verify, draft)[plan.limits])
    assert plan.total <= best * 1.02  # that a row which ends later makes passes cheaper is not searched for


def test_only_the_row_that_everybody_waits_for_is_drafted_for():
    rows = [RowForecast(10), RowForecast(10), RowForecast(40)]
    plan = best_schedule(rows, [0.8, 1.4, 1.8], steps([1, 4], [1.0, 4.0]), lambda depth: 0.01)
    assert plan.limits[:2] == (0, 0) and plan.limits[2] > 0
    assert plan.total < plain_schedule(rows, steps([1, 4], [1.0, 4.0])).total


def test_where_nodes_are_free_all_alike_rows_are_drafted_for_alike():
    plan = best_schedule([RowForecast(30)] * 4, [0.8, 1.4, 1.8], steps([1, 4], [1.0, 1.0]), lambda depth: 0.0)
    assert plan.limits == (3, 3, 3, 3) and plan.rounds == pytest.approx(30 / 2.8)


def test_where_nodes_cost_as_much_as_tokens_nothing_is_drafted():
    assert best_schedule([RowForecast(30)] * 4, [0.8, 1.4, 1.8], steps([1, 4], [1.0, 4.0]), lambda depth: 0.0).limits == (0,) * 4


def test_rows_that_pay_for_the_deepest_draft_less():
    rows, verify = [RowForecast(10)] * 7 + [RowForecast(30)], steps([1, 4], [1.0, 2.5])
    own, shared = (best_schedule(rows, [0.6, 0.9, 1.1], verify, lambda depth: 0.0, own=each) for each in (True, False))
    assert max(shared.limits) < max(own.limits)


def test_one_row_gets_the_best_rate():
    accepted, verify = [0.7, 1.2, 1.5], steps([1, 2, 3, 4], [1.0, 1.2, 1.5, 2.4])
    plan = best_schedule([RowForecast(50)], accepted, verify, lambda depth: 0.05 * depth)
    rates = [(1 + ([0.0, *accepted][g])) / (float(verify(1.0 + g)) + 0.05 * g) for g in range(4)]
    assert plan.limits == (int(np.argmax(rates)),)
    assert plan.tokens / plan.seconds == pytest.approx(max(rates))


def test_worth_is_what_plain_decoding_takes():
    assert worth([3, 1, 3], lambda rows: 1.0 + rows) == 1 * 4.0 + 2 * 3.0
    assert worth([0, 0], lambda rows: 1.0) == 0.0


def test_a_row_is_average_until_it_was_seen_and_itself_after_long():
    record = RowRecord()
    assert record.forecast(9, 0.7, 1.5) == RowForecast(9, pytest.approx(0.7), pytest.approx(1.0))
    for _ in range(60):
        record.observe(given=True, accepted=3, expected=1.5)
    seen = record.forecast(9, 0.2, 1.5)
    assert seen.factor > 1.6 and seen.available > 0.75
    for _ in range(60):
        record.observe(given=False, accepted=0, expected=1.5)
    assert record.forecast(9, 0.2, 1.5).available < 0.1


# -- through the planner ---------------------------------------------------------------------------------------------------


class World:
    """Rows that end together on a machine with a fake clock. Drafted tokens of row r are accepted with ``rates[r]``, it has a draft with
    ``available[r]``. A pass takes ``seconds`` for its tokens: all rows' own, or as many as the deepest row has, times rows."""

    def __init__(self, rates, *, available=None, tokens=64, own=True, seconds=None, seed=0):
        self.rates, self.available, self.own = rates, available or [1.0] * len(rates), own
        self.seconds = seconds or (lambda tokens: 15 * MS * max(1.0, tokens / 20))
        self.draw = random.Random(seed)
        self.rows = [SimpleNamespace(slot=slot, ids=[0] * 20, prompt_length=20, capacity=20 + tokens) for slot in range(len(rates))]

    def plain(self):
        return sum(self.seconds(len(self.rows)) for _ in range(self.rows[0].capacity - 20))

    def known(self):
        costs, rows = CostModel(level=0.01 * MS), len(self.rows)
        for size in (1, 2, 3, 5, 9, 13):
            costs.target.measured(rows, size, self.seconds(rows * size))
        costs.level.measured(rows, 1, 0.01 * MS)
        costs.fixed[rows] = costs.catch_up[rows] = 0.0
        return costs

    def run(self, planner, together=True):
        planner.forecaster.begin(own=self.own, catches_up=False)
        live, spent = list(self.rows), 0.0
        while live:
            shape = planner.plan(live, greedy=True, together=together)
            limits = planner.limits(live) or [shape.depth] * len(live)
            asked = [min(limit, shape.depth, row.capacity - len(row.ids) - 1) for limit, row in zip(limits, live)]
            drafted = [limit if self.draw.random() < self.available[row.slot] else 0 for limit, row in zip(asked, live)]
            accepted = []
            for row, depth in zip(live, drafted):
                count = next((each for each in range(depth) if self.draw.random() > self.rates[row.slot]), depth)
                accepted.append(count)
                row.ids += [0] * (1 + count)
            nodes = (sum(drafted) / len(live) if self.own else max(drafted)) + 1
            target = self.seconds(len(live) * nodes)
            spent += target
            done = Round(
                shape=shape if max(asked) else search.chain(0), asked=asked, drafted=[[1] * depth for depth in drafted], accepted=accepted,
                nodes=nodes, context=30, draft=0.0, target=target, rest=0.0,
            )  # fmt: skip
            if max(asked) or not planner.passes_over(len(live), 1):
                planner.observe(live, done)
            live = [row for row in live if len(row.ids) < row.capacity]
        return spent


def planning(world):
    return AutomaticPlanner(largest_shape(branches=False), costs=world.known(), budget=0, catches_up=False, clock=lambda: 0.0)


UNEVEN = [0.95, 0.05] * 8


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("rates", [UNEVEN, [0.02] * 16, [0.6] * 16, [0.9] * 4, [0.9, 0.9, 0.9, 0.05]], ids=str)
def test_a_batch_is_over_no_later_than_plainly(rates, own):
    """A few texts with one planner, as in a program that runs: what is lost at most are the first rounds."""
    worlds = [World(rates, own=own, seed=seed) for seed in range(6)]
    planner = planning(worlds[0])
    spent = sum(world.run(planner) for world in worlds)
    assert spent <= 1.02 * sum(world.plain() for world in worlds)


def test_rows_that_hold_everybody_up_are_drafted_for():
    """One row's drafts are good, and it has most left to do: it gets them, and the batch is over earlier."""
    worlds = [World([0.9] * 4, own=True, seed=seed) for seed in range(6)]
    for world in worlds:
        for row in world.rows[1:]:
            row.capacity -= 40
    planner = planning(worlds[0])
    assert sum(world.run(planner) for world in worlds) < 0.5 * sum(world.plain() for world in worlds)


@pytest.mark.parametrize("own", [True, False])
def test_valuing_all_tokens_alike_would_lose_in_an_uneven_batch(own):
    """The control: the same rows planned for as if others followed them. One of them cannot be guessed."""
    totals = []
    for together in (True, False):
        worlds = [World([0.9] * 15 + [0.02], own=own, seed=seed) for seed in range(6)]
        planner = planning(worlds[0])
        totals.append(sum(world.run(planner, together) for world in worlds) / sum(world.plain() for world in worlds))
    assert totals[0] <= 1.02 and totals[1] > 1.15
