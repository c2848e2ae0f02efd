"""What the planner expects of a mixture of experts: passes cost what the experts that their nodes touch cost."""

from __future__ import annotations

import itertools
import json

import pytest

from foredraft.backends.base import Routing
from foredraft.planning.costs import CostModel

ROUTING = Routing(experts=64, chosen=8, weight=0.05)
SIZES = (1, 2, 3, 5, 8, 12, 13, 16, 24, 32)


def random(tokens: float) -> float:
    return 64 * (1 - (1 - 8 / 64) ** tokens)


def touched(tokens: float, share: float) -> float:
    return 8 + share * (random(tokens) - 8)


def seconds(experts: float) -> float:
    """Weights are read at one speed: those that every pass reads, and those of the experts touched."""
    return 5e-3 * (1 + 0.05 * experts)


def measured(rows: int = 1) -> CostModel:
    """Costs of passes over random tokens."""
    costs = CostModel()
    costs.experts.routing = ROUTING
    for size in SIZES:
        costs.target.measured(rows, size, seconds(random(rows * size)))
    return costs


def played(costs: CostModel, nodes: int, share: float, *, branching: bool, rounds: int, counted: bool = True, rows: int = 1) -> None:
    """Rounds whose nodes touch ``share`` of what random ones do beyond one token."""
    found = touched(rows * nodes, share)
    for _ in range(rounds):
        told = found if counted else None
        costs.observe(rows, nodes, 16, seconds(found), 1e-4, None, (), 0, branching=branching, touched=told)


def cost(costs: CostModel, nodes: int, *, branching: bool = False, rows: int = 1) -> float:
    return costs.verify(rows, (nodes,), 16, branching=branching)[0] - 1e-4


@pytest.mark.parametrize("rows", [1, 4])
def test_chains_that_share_experts_cost_less_at_every_length_and_trees_what_was_measured(rows):
    costs = measured(rows)
    played(costs, 6, 0.3, branching=False, rounds=40, rows=rows)
    for nodes in (3, 6, 12):
        assert cost(costs, nodes, rows=rows) == pytest.approx(seconds(touched(rows * nodes, 0.3)), rel=0.05)
        assert cost(costs, nodes, rows=rows, branching=True) == pytest.approx(seconds(random(rows * nodes)), rel=0.05)
    played(costs, 13, 0.9, branching=True, rounds=20, rows=rows)
    for nodes in (6, 13, 24):
        assert cost(costs, nodes, rows=rows, branching=True) == pytest.approx(seconds(touched(rows * nodes, 0.9)), rel=0.05)
        assert cost(costs, nodes, rows=rows) == pytest.approx(seconds(touched(rows * nodes, 0.3)), rel=0.05)


def test_without_a_count_of_experts_one_curve_is_wrong_for_one_of_them():
    costs = measured()
    played(costs, 6, 0.3, branching=False, rounds=40, counted=False)
    assert cost(costs, 6) == pytest.approx(seconds(touched(6, 0.3)), rel=0.05)  # what was seen
    assert cost(costs, 6, branching=True) < 0.8 * seconds(random(6))


def test_the_machine_may_become_slower_meanwhile():
    costs = measured()
    played(costs, 6, 0.3, branching=False, rounds=40)
    for _ in range(40):
        costs.observe(1, 1, 16, 1.5 * seconds(8), 1e-4, None, (), 0, touched=8.0)
    for nodes in (3, 6, 12):
        slower = costs.target.at(1, nodes) / seconds(random(nodes))
        assert 1.25 < slower < 1.6
        assert cost(costs, nodes) == pytest.approx(slower * seconds(touched(nodes, 0.3)), rel=0.08)


def test_more_nodes_never_cost_less():
    costs = measured()
    played(costs, 6, 0.0, branching=False, rounds=40)
    found = costs.verify(1, [float(size) for size in range(1, 40)], 16)
    assert all(a <= b for a, b in itertools.pairwise(found))


def test_a_profile_keeps_what_was_seen():
    costs = measured()
    played(costs, 6, 0.3, branching=False, rounds=40)
    read = CostModel()
    read.experts.routing = ROUTING
    read.load(json.loads(json.dumps(costs.to_dict())))
    assert read.experts.expected(1, 6) == pytest.approx(costs.experts.expected(1, 6))
    assert read.experts.expected(1, 6, branching=True) == pytest.approx(random(6))
    plain = costs.to_dict()
    plain["experts"]["chains"]["1"] = 1.5
    with pytest.raises(ValueError, match="share of experts"):
        CostModel().load(plain)
