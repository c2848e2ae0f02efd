"""The parts of the planner: search against brute force, tracked acceptance, cost curves, profiles, and measuring by a clock of its own."""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import known_costs, make_drafter, perturbed, prompts, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft import Speculator
from foredraft.caching import cache_folder
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.prompt_lookup import PromptLookup
from foredraft.planning import AutomaticPlanner, Round, search
from foredraft.planning import costs as costs_module
from foredraft.planning.acceptance import Acceptance, expected
from foredraft.planning.costs import PROMPT, CostModel, Measurement, measure
from foredraft.planning.curves import MOST, Curve, interpolated, monotone
from foredraft.planning.largest import largest_fitting, largest_shape
from foredraft.planning.profiles import Profile, describe, profile
from foredraft.planning.search import widths
from foredraft.shapes import TreeShape, likeliest_nodes
from foredraft.target import Target
from foredraft.testing import ProbabilityTable, TableTarget

# -- search ---------------------------------------------------------------------------------------------------------------


def all_trees(depth: int, siblings: int, nodes: int) -> Iterator[frozenset[tuple[int, ...]]]:
    """Every tree of paths of ranks with at most so many nodes, the empty one included."""
    found = {frozenset()}
    grown = found
    for _ in range(nodes):
        grown = {tree | {path} for tree in grown for path in growths(tree, depth, siblings)}
        found |= grown
    return iter(found)


def growths(tree: frozenset[tuple[int, ...]], depth: int, siblings: int) -> Iterator[tuple[int, ...]]:
    for above in [(), *tree]:
        rank = sum(path[:-1] == above for path in tree if path)
        if len(above) < depth and rank < siblings:
            yield (*above, rank)


def value(tree: frozenset[tuple[int, ...]], table: Sequence[Sequence[float]]) -> float:
    return sum(math.prod(table[level][rank] for level, rank in enumerate(path)) for path in tree)


@pytest.mark.parametrize("seed", range(12))
def test_the_likeliest_nodes_are_the_best_tree(seed: int):
    draw = random.Random(seed)
    depth, siblings, most = draw.choice([(3, 2, 6), (2, 3, 6), (4, 2, 5), (3, 3, 5)])
    table = [sorted((draw.choice([0.0, draw.random()]) / siblings for _ in range(siblings)), reverse=True) for _ in range(depth)]
    trees = list(all_trees(depth, siblings, most))
    likeliest = list(likeliest_nodes(table, most))
    for nodes in range(1, most + 1):
        paths = [path for path, _ in likeliest[:nodes]]
        best = max(value(tree, table) for tree in trees if len(tree) <= nodes)
        assert frozenset(paths) in trees  # it is a tree
        assert sum(chance for _, chance in likeliest[:nodes]) == pytest.approx(best, abs=1e-12)
        if paths:
            assert expected(search.shape_of(paths).parents, table) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_the_best_shape_has_the_best_rate_of_all_trees(seed: int):
    draw = random.Random(100 + seed)
    table = [sorted((draw.random() / 2 for _ in range(2)), reverse=True) for _ in range(3)]
    verify = list(itertools.accumulate([1.0] + [draw.choice([0.01, 0.1, 0.4]) for _ in range(5)]))
    per_level = draw.choice([0.01, 0.1, 0.5])
    costs = search.Costs(verify, lambda levels: per_level * len(levels), once=draw.choice([0.0, 0.2]))
    plan = search.best_tree(table, costs)
    rates = {
        tree: (1 + value(tree, table)) / (verify[len(tree)] + per_level * max(map(len, tree), default=0) + (costs.once if tree else 0))
        for tree in all_trees(3, 2, 5)
    }
    assert plan.rate == pytest.approx(max(rates.values()), rel=1e-12)
    assert plan.shape.nodes == 0 or plan.tokens == pytest.approx(1 + expected(plan.shape.parents, table))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=8),
    st.lists(st.floats(0, 1), min_size=1, max_size=8),
    st.floats(0, 1),
)
def test_the_best_chain_is_the_best_of_all_lengths(rates: list[float], steps: list[float], draft: float):
    verify = [1.0, *itertools.accumulate(steps, initial=1.0)][1:]
    plan = search.best_chain(rates, search.Costs(verify, lambda levels: draft * len(levels)))
    every = [
        (1 + sum(math.prod(rates[:k]) for k in range(1, length + 1))) / (verify[length] + draft * length)
        for length in range(min(len(rates), len(verify) - 1) + 1)
    ]
    assert plan.rate == pytest.approx(max(every)) and plan.shape.is_chain | (plan.shape.nodes == 0)


def test_zero_drafting_is_always_a_candidate():
    costs = search.Costs([1.0, 1.5, 2.0, 2.5], lambda levels: 0.1 * len(levels))
    assert search.best_chain([0.3] * 3, costs).shape.nodes == 0
    assert search.best_tree([[0.3, 0.1]] * 3, costs).shape.nodes == 0
    assert search.best_chain([0.9] * 3, costs).shape.nodes == 2


def test_cheap_nodes_and_dear_levels_make_trees_and_dear_nodes_make_chains():
    table = [[0.5, 0.25, 0.1]] * 4
    flat = search.Costs([1 + 0.001 * n for n in range(13)], lambda levels: 0.3 * len(levels))
    tree = search.best_tree(table, flat).shape
    assert not tree.is_chain and tree.depth < 4
    steep = search.Costs([1 + 0.25 * n for n in range(13)], lambda levels: 0.0)
    chain = search.best_tree([[0.9, 0.05]] * 4, steep).shape
    assert chain.is_chain and chain.depth == 4


def test_a_draft_that_is_seldom_there_costs_a_long_pass_seldom():
    costs = search.Costs([1.0, 1.9], lambda levels: 0.0, available=0.1, any_row=0.1)
    plan = search.best_chain([0.95], costs)
    assert plan.shape.nodes == 1
    assert (plan.tokens, plan.seconds) == pytest.approx((1.095, 1.09))


# -- acceptance -------------------------------------------------------------------------------------------------------------


def test_acceptance_by_depth_is_of_those_that_got_there():
    tracker = Acceptance(4)
    for _ in range(200):  # two rows: one accepts all of three, one only the first
        tracker.observe([3, 3], [[1, 1, 1], [1, 1, 1]], [3, 1])
    first, second, third, fourth = tracker.by_depth(4)
    assert (first, second, third) == pytest.approx((1.0, 0.5, 1.0), abs=0.06)
    assert fourth == third  # never drafted: as the level above


def test_acceptance_forgets():
    tracker = Acceptance(1)
    for _ in range(300):
        tracker.observe([1], [[1]], [1])
    before = tracker.by_depth(1)[0]
    for _ in range(100):
        tracker.observe([1], [[1]], [0])
    assert before > 0.99 and tracker.by_depth(1)[0] < 0.06


def test_rows_without_room_or_without_a_draft_say_nothing_of_acceptance():
    tracker, asked = Acceptance(2), Acceptance(2)
    for _ in range(50):
        tracker.observe([2, 0, 2], [[1, 1], [], []], [2, 0, 0])
        asked.observe([2], [[1, 1]], [2])
    assert tracker.by_depth(2) == asked.by_depth(2)
    assert tracker.availability == pytest.approx(0.5, abs=0.02) and asked.availability == pytest.approx(1)


def test_acceptance_by_rank_is_sequoias():
    """Siblings at both levels: rank 0 is accepted in half of the rounds, rank 1 in half of the rest, rank 2 never."""
    shape = TreeShape.product(3, 3)
    tracker, draw = Acceptance(2, 3), random.Random(1)
    ranks = {0: 0.5, 1: 0.25, 2: 0.0}
    for _ in range(4000):
        path = [0]
        for level in shape.levels:
            u, rank = draw.random(), None
            for each, share in ranks.items():
                rank = each if rank is None and u < share else rank
                u -= share
            if rank is None:
                break
            path.append(next(node for node in range(level.first, level.last) if level.parents[node - level.first] == path[-1] and level.ranks[node - level.first] == rank))  # fmt: skip # noqa: E501
        accepted = len(path) - 1
        tracker.observe([2], [[3, 9]], [accepted], static_parents=shape.parents, paths=[path + [0] * (3 - len(path))], memory=0.999)
    for line in tracker.by_rank(2, 3):
        assert line == pytest.approx([0.5, 0.25, 0.0], abs=0.06)


def test_ranks_are_never_better_than_the_sibling_before():
    tracker = Acceptance(1, 3)
    for _ in range(100):
        tracker.observe([1], [[3]], [1], static_parents=(-1, 0, 0, 0), paths=[[0, 3]])
    (line,) = tracker.by_rank(1, 3)
    assert line == sorted(line, reverse=True) and sum(line) <= 1 + 1e-9


# -- costs ------------------------------------------------------------------------------------------------------------------


def test_monotone_pools_what_is_in_the_wrong_order():
    assert monotone([1, 3, 2, 4]) == [1, 2.5, 2.5, 4]
    assert monotone([3, 2, 1]) == [2, 2, 2]
    assert monotone([]) == []


def test_interpolation_is_linear_and_flat_outside():
    assert [interpolated(place, [1, 5, 9], [1.0, 2.0, 4.0]) for place in (0, 1, 3, 5, 6, 9, 20)] == [1, 1, 1.5, 2, 2.5, 4, 4]


def curve(points: dict[int, float], rows: int = 1) -> Curve:
    made = Curve(lambda tokens: 1 + 0.1 * tokens)
    for size, seconds in points.items():
        made.measured(rows, size, seconds)
    return made


def test_a_curve_goes_through_its_points_and_on_behind_them():
    measured = curve({1: 1.0, 5: 2.0, 9: 4.0})
    assert measured.line(1, (1, 3, 5, 9, 11)) == pytest.approx([1, 1.5, 2, 4, 5])
    assert measured.at(2, 1) == measured.at(1, 2) and measured.at(2, 4) == measured.at(1, 8)  # as many tokens


def test_a_slow_machine_is_slow_at_all_sizes():
    measured = curve({1: 1.0, 5: 2.0})
    for _ in range(30):
        measured.observe(1, 5, 6.0)
    assert measured.at(1, 5) == pytest.approx(6, rel=0.02)
    assert 2 < measured.at(1, 1) / 1.0 < 3.01
    assert measured.drift > 0.3


def test_one_size_that_is_dearer_than_measured_is_learnt():
    measured = curve({1: 1.0, 5: 2.0})
    for _ in range(200):
        measured.observe(1, 1, 1.0)
        measured.observe(1, 5, 5.0)
    assert measured.line(1, (1, 5)) == pytest.approx([1, 5], rel=0.1)


def test_a_size_that_was_seen_before_the_scale_was_known_is_put_right():
    """All sizes take 1.3 times what was measured. The first observation may be of its size alone; others say that it is not."""
    measured = curve({1: 1.0, 5: 2.0, 9: 3.0})
    measured.observe(1, 5, 2.6)
    for _ in range(40):
        measured.observe(1, 1, 1.3)
    assert measured.line(1, (1, 5, 9)) == pytest.approx([1.3, 2.6, 3.9], rel=0.04)


def test_a_machine_that_becomes_slower_is_followed_at_once_and_told_from_a_curve_that_became_steeper():
    measured = curve({1: 1.0, 5: 2.0})
    for _ in range(20):
        measured.observe(1, 5, 2.0)
        measured.observe(1, 1, 1.0)
    for _ in range(4):
        measured.observe(1, 5, 8.0)
    assert measured.at(1, 5) == pytest.approx(8, rel=0.05) and measured.drift > 1
    for _ in range(4):
        measured.observe(1, 1, 1.0)
    assert measured.line(1, (1, 5)) == pytest.approx([1, 8], rel=0.2) and measured.drift == 0


def test_a_slower_machine_is_followed_where_no_size_is_seen_twice():
    measured = curve({1: 1.0, 5: 2.0})
    for size in range(10, 30):
        measured.observe(1, size / 4, measured.base(1, size / 4))
    for size in range(30, 42):
        measured.observe(1, size / 4, 3 * measured.base(1, size / 4))
    assert 4.5 < measured.at(1, 5) < 6.5 and measured.drift > 0.7


def test_few_sizes_are_told_apart():
    measured = curve({1: 1.0, 100: 2.0})
    for rows in (1, 2):
        for size in range(1, 200):
            measured.observe(rows, size, 1.5)
    assert sum(map(len, measured._seen.values())) == len(measured._mean) - 1 <= MOST
    assert measured.at(2, 199) == pytest.approx(1.5, rel=0.1)


def test_outliers_move_nothing():
    measured = curve({1: 1.0, 5: 2.0})
    for number in range(100):
        measured.observe(1, 5, 40.0 if number % 5 == 4 else 2.0)
    assert measured.at(1, 5) == pytest.approx(2, rel=0.01)


def test_more_is_never_cheaper():
    measured = curve({1: 1.0, 5: 2.0})
    for _ in range(50):
        measured.observe(1, 1, 3.0)
        measured.observe(1, 5, 1.0)
    line = measured.line(1, range(1, 9))
    assert line == sorted(line)


def test_a_draft_costs_its_levels_and_what_was_missed():
    costs = CostModel()
    costs.level.measured(1, 1, 1.0)
    costs.level.measured(1, 4, 1.6)
    costs.fixed[1], costs.catch_up[1] = 0.5, 0.25
    assert costs.draft_seconds(1, widths(TreeShape.chain(3))) == pytest.approx(3.5)
    assert costs.draft_seconds(1, widths(TreeShape.product(4, 1, 1)), behind=4) == pytest.approx(0.5 + 1 + 1.6 + 1.6 + 1)
    assert costs.draft_seconds(1, ()) == 0
    for _ in range(60):
        costs.observe(1, 4, 10, 1e-2, 1e-4, 7.0, (1, 1, 1), 0)
    assert costs.draft_seconds(1, (1, 1, 1)) == pytest.approx(7, rel=0.02)


def test_what_trees_took_longer_is_forgotten_in_time():
    """Else a tree that was slow in a busy minute would never be tried again."""
    costs = CostModel()
    for size, seconds in ((1, 1e-3), (8, 1.1e-3)):
        costs.target.measured(1, size, seconds)
    for _ in range(100):
        costs.observe(1, 8, 16, 3e-3, 1e-4, None, (), 0, branching=True)
    chain, tree = (costs.verify(1, (8,), 16, branching=branching)[0] for branching in (False, True))
    assert tree == pytest.approx(3.1e-3, rel=0.02) and chain == pytest.approx(1.2e-3)
    for _ in range(300):
        costs.observe(1, 1, 16, 1e-3, 1e-4, None, (), 0)
    assert costs.verify(1, (8,), 16, branching=True)[0] < 1.1 * costs.verify(1, (8,), 16)[0]


def test_drafts_slow_down_with_the_machine_until_they_are_timed_again():
    costs = CostModel()
    costs.target.measured(1, 1, 1.0)
    costs.level.measured(1, 1, 0.1)
    for _ in range(60):
        costs.observe(1, 1, 10, 3.0, 1e-4, None, (), 0)
    assert 0.2 < costs.draft_seconds(1, (1,)) < 0.31


class Clock:
    """Advances only when something is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_passes_that_seem_to_spare_nothing_are_still_made_together():
    """Otherwise a measurement in a bad moment would hold forever."""
    costs = known_costs(pass_=1e-2, level=1e-3)
    for _ in range(40):
        costs.observe(1, 1, PROMPT, 1e-2, 2e-3, None, (), 0)
    for seconds in (2e-2, 3e-2):
        costs.observe(1, 1, PROMPT, 1e-2, seconds, None, (), 0, together=True)
    assert costs.spared is not None and 0 < costs.spared < 1e-4
    for _ in range(40):
        costs.observe(1, 1, PROMPT, 1e-2, 5e-4, None, (), 0, together=True)
    assert costs.spared > 1e-3


def test_plain_rounds_whose_passes_are_made_together_take_less():
    costs = known_costs(pass_=1e-2, level=1e-3)
    for _ in range(40):
        costs.observe(1, 1, PROMPT, 1e-2, 2e-3, None, (), 0)  # a draft was asked for and not found
    assert costs.spared is None and costs.plain(1, PROMPT) == costs.verify(1, (1,), PROMPT)[0] == pytest.approx(1.2e-2, rel=0.01)
    costs.observe(1, 1, PROMPT, 1e-2, 2e-2, None, (), 0, together=True)  # runs that code for the first time, which says nothing
    assert costs.spared is None
    for _ in range(40):
        costs.observe(1, 1, PROMPT, 1e-2, 5e-4, None, (), 0, together=True)
    assert costs.verify(1, (1,), PROMPT)[0] == pytest.approx(1.2e-2, rel=0.01)
    assert costs.plain(1, PROMPT) == costs.plain_seconds(1, PROMPT)[0] == pytest.approx(1.05e-2, rel=0.01)
    assert costs.plain(2, PROMPT) == costs.verify(2, (1,), PROMPT)[0]
    rarely = search.Costs(verify=[1.2e-2, 1.2e-2], draft=lambda levels: 0.0, available=0.1, any_row=0.1)
    assert max(search.chains([0.9], rarely), key=lambda plan: plan.rate).shape.nodes == 1
    assert max(search.chains([0.9], replace(rarely, plain=1.05e-2)), key=lambda plan: plan.rate).shape.nodes == 0
    for _ in range(40):
        costs.observe(1, 1, PROMPT, 1e-2, 2e-3, None, (), 0, together=False)  # something keeps passes from being made together now
    assert costs.plain(1, PROMPT) == pytest.approx(costs.verify(1, (1,), PROMPT)[0], rel=0.01)


class TimedTarget(TableTarget):
    """A pass over n nodes of R rows takes ``seconds(R, n)`` on ``clock``."""

    def __init__(self, clock: Clock, seconds):
        super().__init__(ProbabilityTable.random(5, seed=1))
        self.clock, self.seconds = clock, seconds

    def score(self, tree, *, first=0):
        self.clock.now += self.seconds(tree.rows, tree.nodes)
        return super().score(tree, first=first)

    def prefill(self, prompts, *, first):
        self.clock.now += self.seconds(len(prompts), max(map(len, prompts)))
        return super().prefill(prompts, first=first)


@pytest.mark.parametrize("rows", [1, 3])
def test_measuring_finds_the_cost_curve_and_leaves_nothing_behind(rows: int):
    clock, costs, drafter = Clock(), CostModel(), PromptLookup()
    target = TimedTarget(clock, lambda rows, nodes: 1e-3 * (1 + 0.2 * rows * nodes))
    measure(costs, target, drafter, rows=rows, largest=largest_shape(branches=False), clock=clock)
    for nodes in (1, 2, 4, 9, 13):
        assert costs.target.at(rows, nodes) == pytest.approx(1e-3 * (1 + 0.2 * rows * nodes))
    assert target.lengths == [] and 0 < costs.spent <= 2


class RoutedTarget(TableTarget):
    """A token takes one of 16 experts. A pass takes a millisecond for each that it touches."""

    def __init__(self, clock: Clock):
        super().__init__(ProbabilityTable.random(160, seed=1))
        self.clock, self.seen = clock, {}

    def score(self, tree, *, first=0):
        self.clock.now += 1e-3 * len((tree.tokens % 16).unique())
        self.seen.setdefault(tree.nodes, set()).add(tuple(tree.tokens.flatten().tolist()))
        return super().score(tree, first=first)


def test_passes_over_a_mixture_are_measured_on_tokens_that_touch_as_many_experts_as_others_do(monkeypatch):
    monkeypatch.setattr(costs_module, "REPEATS", 7)
    clock, costs = Clock(), CostModel()
    target = RoutedTarget(clock)
    measure(costs, target, PromptLookup(), largest=largest_shape(branches=False), clock=clock)
    for nodes in (5, 8, 13):
        assert costs.target.at(1, nodes) == pytest.approx(16e-3 * (1 - (15 / 16) ** nodes), rel=0.2)
    assert all(len(trees) == 7 for nodes, trees in target.seen.items() if nodes > 1)


def test_a_slow_model_is_measured_at_fewer_sizes_within_the_budget():
    clock, costs = Clock(), CostModel()
    measure(costs, TimedTarget(clock, lambda rows, nodes: 0.3), PromptLookup(), largest=largest_shape(branches=False), clock=clock)
    assert costs.spent <= 2.0 + 0.3 and 1 <= len(costs.target.points[1]) <= 3
    clock, costs = Clock(), CostModel()
    measure(costs, TimedTarget(clock, lambda rows, nodes: 30.0), PromptLookup(), largest=largest_shape(branches=False), clock=clock)
    assert list(costs.target.points[1]) == [1]


def test_many_rows_are_measured_within_the_budget():
    """Where a token takes 5 ms, reading 16 of each would take five seconds."""
    clock, costs = Clock(), CostModel()
    measure(
        costs,
        TimedTarget(clock, lambda rows, nodes: 5e-3 * rows * nodes),
        PromptLookup(),
        rows=64,
        largest=largest_shape(branches=False),
        clock=clock,
    )
    assert costs.spent <= 2.0 + 0.4 and costs.target.at(64, 1) == pytest.approx(0.32)


def test_about_so_many_rows_are_measured_once():
    """The first request that comes to an idle server waits for it, and any number of others may have come with it."""
    clock, planner = Clock(), AutomaticPlanner(largest_shape(branches=False))
    planner.clock = clock
    target, drafter = TimedTarget(clock, lambda rows, nodes: 1e-3 * (1 + rows * nodes)), PromptLookup()
    waited = {rows: planner.prepare(target, drafter, rows) for rows in (1, 2, 3, 5, 6, 7, 16, 9, 31, 40, 16, 1)}
    assert list(planner.costs.target.points) == [1, 3, 7, 16, 40]
    assert all(waited[rows] == 0.0 for rows in (2, 5, 6, 9, 31))
    assert planner.costs.target.at(2, 4) == pytest.approx(9e-3, rel=0.05)  # as in one row of eight


def test_a_measured_draft_model_and_its_target_are_left_as_they_were():
    target, drafter = Target(tiny()), make_drafter("draft-model")
    drafter.bind(target)
    costs = CostModel()
    measure(costs, target, drafter, rows=2, largest=largest_shape(branches=True), seconds=0.5)
    assert target.lengths == [] and drafter.model.lengths == []
    assert costs.level.points[2].keys() >= {1} and costs.fixed[2] >= 0 and costs.catch_up[2] >= 0
    assert all(seconds > 0 for seconds in costs.target.points[2].values())


def test_what_reading_a_token_takes_is_measured_on_many(monkeypatch):
    """Where launches take the time, as on a GPU, sixteen tokens take as long as a hundred, and a draft would seem too dear to be tried."""
    clock, costs = Clock(), CostModel()
    target, drafter = Target(tiny()), make_drafter("draft-model")
    drafter.bind(target)
    for each in (target, drafter.model):
        forward = each.backend.forward

        def timed(given, forward=forward):
            clock.now += 1e-3 if given.tokens.shape[1] < PROMPT - 1 else 4e-3
            return forward(given)

        monkeypatch.setattr(each.backend, "forward", timed)
    measure(costs, target, drafter, largest=largest_shape(branches=False), clock=clock)
    drafter.end(())
    assert costs.draft_seconds(1, (1,)) == pytest.approx(1e-3)
    assert 0 < costs.catching_up(1, 100) <= 4e-3


@torch.inference_mode()
@pytest.mark.parametrize("rows", [2, 12])
def test_measuring_takes_the_place_of_what_is_cached(rows: int):
    """And no memory beyond the budget but for what its rows need; twelve rows need more."""
    page = sum(Target(tiny()).page_bytes)
    target = Target(tiny(), cache_memory=f"{8 * page}B")
    cache, held = target.cache, []
    take = cache.pool.take
    cache.pool.take = lambda count, **how: (take(count, **how), held.append(cache.pool.held))[0]
    for text in prompts((120, 110, 100, 120), seed=3):
        target.open([text])
        target.prefill([text], first=0)
        target.reset()
    assert cache.pool.cached == cache.pool.limit == 8
    held.clear()
    measure(CostModel(), target, PromptLookup(), rows=rows, largest=largest_shape(branches=False), seconds=0.5)
    most = max(8, *held)
    assert (most > 8) == (rows > 8)
    assert cache.pool.made <= 8 and cache.stores[0].room <= most and cache.pool.limit == 8


def test_a_draft_by_layers_of_the_target_is_charged_by_the_round_and_by_the_token():
    """A round takes 2 ms more than a whole pass of its size, and 3 ms for every token that is drafted."""
    costs, run = (
        CostModel(),
        Measurement(TimedTarget(Clock(), lambda rows, nodes: 0.0), PromptLookup(), 1, largest_shape(branches=False), Clock()),
    )
    run.times = {("target", size): [1e-2 * size] for size in (1, 2, 5)}
    for depth in (1, 4):
        run.times["round", depth], run.times["whole", depth] = [5e-3 + 1e-2 * (depth + 1) + 3e-3 * (depth - 1)], [1e-2 * (depth + 1)]
    run.fill(costs)
    assert costs.draft_seconds(1, (1,)) == pytest.approx(5e-3) and costs.draft_seconds(1, (1,) * 6) == pytest.approx(20e-3)
    del run.times["whole", 1], run.times["round", 4]  # a slow model left no time for it
    run.fill(costs)
    assert costs.draft_seconds(1, (1,)) == pytest.approx(5e-3)


def test_what_learns_from_texts_is_not_shown_invented_ones():
    target, drafter = Target(tiny()), make_drafter("ngram")
    drafter.bind(target)
    before = drafter.model.predict([1])
    measure(CostModel(), target, drafter, rows=1, largest=largest_shape(branches=False), seconds=0.2)
    assert before is None and drafter.model.predict([1]) is None


# -- profiles -----------------------------------------------------------------------------------------------------------------


def filled() -> CostModel:
    costs = CostModel()
    for rows, size, seconds in ((1, 1, 0.01), (1, 5, 0.02), (4, 1, 0.03)):
        costs.target.measured(rows, size, seconds)
    costs.level.measured(1, 1, 0.001)
    costs.context, costs.fixed, costs.catch_up, costs.spent = 1e-6, {1: 0.1}, {1: 0.2}, 1.5
    return costs


def test_a_profile_comes_back_as_it_was(tmp_path):
    file = Profile(tmp_path / "deep" / "file.json", {"target": "a"})
    assert file.write(filled())
    read = CostModel()
    assert file.read(read) and read.to_dict() == filled().to_dict()
    assert [path.name for path in file.path.parent.iterdir()] == ["file.json"]  # nothing half-written beside it


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        json.dumps({"schema": 0, "key": {"target": "a"}, "costs": {}}),
        json.dumps({"schema": 1, "key": {"target": "b"}, "costs": filled().to_dict()}),
        json.dumps({"schema": 1, "key": {"target": "a"}, "costs": {}}),
        json.dumps({"schema": 1, "key": {"target": "a"}, "costs": {**filled().to_dict(), "target": {"1": {"1": -1}}}}),
        json.dumps({"schema": 1, "key": {"target": "a"}, "costs": {**filled().to_dict(), "target": 3}}),
        json.dumps({"schema": 1, "key": {"target": "a"}, "costs": {**filled().to_dict(), "level": {"1": {"1": "fast"}}}}),
    ],
)
def test_an_unusable_profile_is_ignored_with_a_note(tmp_path, text, caplog):
    file = Profile(tmp_path / "file.json", {"target": "a"})
    file.path.write_text(text)
    costs = CostModel()
    with caplog.at_level(logging.WARNING, "foredraft"):
        assert not file.read(costs)
    assert "file.json cannot be used" in caplog.text
    assert costs.to_dict() == CostModel().to_dict()
    assert file.write(filled()) and file.read(costs)


def test_binary_rubbish_and_unwritable_places_are_no_crash(tmp_path, caplog):
    file = Profile(tmp_path / "file.json", {})
    file.path.write_bytes(b"\xff\xfe\x00")
    assert not file.read(CostModel())
    (tmp_path / "blocked").write_text("a file where a folder is wanted")
    assert not Profile(tmp_path / "blocked" / "file.json", {}).write(CostModel())
    assert "cannot be written" in caplog.text
    assert not Profile(tmp_path / "missing.json", {}).read(CostModel())


def test_where_profiles_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    for off in ("off", "OFF", "0", ""):
        monkeypatch.setenv("FOREDRAFT_CACHE", off)
        assert cache_folder() is None
    monkeypatch.delenv("FOREDRAFT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "foredraft"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "foredraft"


def test_a_profile_is_of_one_model_drafter_dtype_number_of_threads_and_set_of_instructions(monkeypatch, tmp_path):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    monkeypatch.delenv("FOREDRAFT_INSTRUCTIONS", raising=False)
    target, drafter = Target(tiny()), make_drafter("draft-model")
    drafter.bind(target)
    paths = {profile(target, drafter).path, profile(target, PromptLookup()).path, profile(Target(tiny("gpt2")), PromptLookup()).path}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    paths.add(profile(target, drafter).path)
    monkeypatch.setenv("FOREDRAFT_INSTRUCTIONS", "avx2")
    paths.add(profile(target, drafter).path)
    assert len(paths) == 5
    assert describe(target, drafter)["drafter"]["model"]["dtype"] == "torch.float32"


def test_the_profile_of_a_head_whose_configuration_has_tuples_is_read_again(monkeypatch, tmp_path):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    target, drafter = Target(tiny()), make_drafter("eagle3")
    drafter.bind(target)
    assert isinstance(drafter.head.config.aux_layers, tuple)
    assert profile(target, drafter).write(filled()) and profile(target, drafter).read(CostModel())
    target.close()


def test_the_second_speculator_reads_what_the_first_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    rows = prompts((24, 24))
    options = {"max_new_tokens": 4, "pad_token_id": 0}
    first = Speculator(tiny(), make_drafter("draft-model"))
    assert first.generate(torch.tensor(rows), **options).stats.seconds["planning"] > 0
    assert len(list((tmp_path / "profiles").iterdir())) == 1
    second = Speculator(tiny(), make_drafter("draft-model"))
    monkeypatch.setattr("foredraft.planning.planner.measure", lambda *_, **__: pytest.fail("measured again"))
    assert "planning" not in second.generate(torch.tensor(rows), **options).stats.seconds
    assert second.planner.costs.target.points == first.planner.costs.target.points


def test_what_was_measured_on_a_busy_machine_is_not_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr("foredraft.planning.planner.QUIET", 1.5)  # of a core, which no thread ever has
    speculator = Speculator(tiny(), make_drafter("draft-model"))
    assert speculator.generate(torch.tensor(prompts((24,))), max_new_tokens=4, pad_token_id=0).stats.seconds["planning"] > 0
    assert speculator.planner.costs.target.points and not list((tmp_path / "profiles").iterdir())


def test_a_stored_profile_that_is_wrong_is_found_out_at_once(tmp_path):
    """It was measured while plain passes took as long as those of thirteen nodes: after a few plain rounds the planner knows better."""
    stored = CostModel()
    for size in (1, 2, 5, 13, 25):
        stored.target.measured(1, size, 0.030)
    stored.level.measured(1, 1, 0.010)
    profile = Profile(tmp_path / "file.json", {})
    assert profile.write(stored)
    planner = AutomaticPlanner(largest_shape(branches=False), profile=profile, rates=[[0.6]] * 12)
    target, drafter = Target(tiny()), make_drafter("draft-model")
    drafter.bind(target)
    assert planner.prepare(target, drafter, 1) == 0.0
    shapes = []
    for _ in range(24):
        shape = planner.plan([row(30)], greedy=True)
        nodes = 1 + shape.nodes
        shapes.append(shape.nodes)
        done = Round(shape, [shape.depth], [(1,) * shape.depth], [min(1, shape.depth)], nodes, 30, 0.010 * shape.depth, 0.012 * nodes, 0.0)
        planner.observe([row(30)], done)
    assert shapes[:3] == [0, 0, 0] and shapes[-8:] == [0] * 8
    assert planner.plain_seconds(1, 30) == (pytest.approx(0.012, rel=0.1), True)


def row(ids: int, slot: int = 0, capacity: int = 10**6) -> SimpleNamespace:
    return SimpleNamespace(slot=slot, ids=[0] * ids, prompt_length=1, capacity=capacity)


def test_largest_shapes():
    chain, tree = largest_shape(branches=False), largest_shape(branches=True)
    assert (str(chain), str(tree)) == ("auto", "auto") and chain.is_chain and not tree.is_chain
    assert (tree.depth, tree.nodes, 1 + max(max(level.ranks) for level in tree.levels)) == (12, 24, 4)
    assert largest_shape(branches=True, vocab_size=2).levels[0].ranks == (0, 1)
    assert largest_shape(branches=True, depth=5, nodes=5).is_chain


def test_the_drafters_context_bounds_the_largest_shape():
    assert isinstance(make_drafter("draft-model"), DraftModel)
    speculator = Speculator(tiny(), make_drafter("draft-model"), shape="auto")
    assert speculator.shape.depth <= 12 and str(speculator.shape) == "auto" and speculator.rule.name == "traversal"


# -- passes that are recorded ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [True, False])
def test_rounds_that_record_something_say_what_is_accepted_and_not_what_it_costs(told: bool):
    """The first rounds of a draft take as long as sixty others. A planner that is not told takes that for the price of a pass."""
    planner = AutomaticPlanner(largest_shape(branches=False), costs=known_costs(pass_=1e-2, level=1e-3), budget=0, clock=lambda: 0.0)
    rows = [row(50)]
    for _ in range(6):
        shape = planner.plan(rows, greedy=True)
        depth = shape.depth
        assert depth
        seconds = {"draft": 1e-3 * depth, "target": 0.6, "rest": 1e-12, "split": False, "settling": told}
        planner.observe(rows, Round(shape, [depth], [(1,) * depth], [min(2, depth)], 1 + depth, 50, **seconds))
    assert (planner.costs.target.at(1, 1) == pytest.approx(1e-2)) == told
    assert planner.forecaster.rounds(True) >= 6 - (not told)  # one that stalls once is passed over


def test_a_check_in_which_something_is_recorded_is_made_up_for_once():
    planner = AutomaticPlanner(largest_shape(branches=False), costs=known_costs(pass_=1e-2, level=1e-3), budget=0, clock=lambda: 0.0)
    planner._checks = 1
    for plans in (True, False, False):  # no plan is made for rows that all have guesses
        shape = planner.plan([row(50)], greedy=True) if plans else TreeShape.chain(0)
        assert shape.nodes == 0
        planner.observe([row(50)], Round(shape, [0], [()], [0], 1, 50, 0.0, 0.6, 1e-12, split=False, settling=True))
    assert planner._checks == 1


def test_a_draft_model_that_is_recorded_makes_chains(monkeypatch):
    drafter, target = DraftModel(perturbed()), Target(tiny())
    drafter.bind(target)
    assert not largest_fitting(target, drafter, lambda shape: True).is_chain
    monkeypatch.setattr(type(drafter.info.draft_model), "warm_up", 4)
    assert largest_fitting(target, drafter, lambda shape: True).is_chain


def test_chains_of_copies_have_as_many_tokens_as_trees_of_others():
    target = Target(tiny())
    assert largest_fitting(target, PromptLookup(), lambda shape: True).depth == 24
    drafter = DraftModel(perturbed())
    drafter.bind(target)
    assert largest_fitting(target, drafter, lambda shape: shape.is_chain).depth == 12
