"""Calibrated trees, what the planner makes of them, and heads that are inflated with their target."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from helpers import SMALL_IDS, alone, generate, make_drafter, padded, prompts, repetitive, small_llama, taught_head, tiny

from foredraft import ConfigurationError, Speculator, inflate
from foredraft.drafters.medusa import Medusa
from foredraft.drafters.prompt_lookup import PromptLookup
from foredraft.drafters.several import Several
from foredraft.heads import find
from foredraft.heads.base import LAST
from foredraft.heads.calibration import best_tree, calibrate, likeliest_nodes
from foredraft.heads.inflation import inflate as inflate_head
from foredraft.heads.medusa import MedusaHead
from foredraft.planning.acceptance import KNOWN, Acceptance
from foredraft.planning.tree_costs import tree_costs
from foredraft.target import Target

RATES = ((0.6, 0.15, 0.1), (0.5, 0.2, 0.05), (0.3, 0.25, 0.2))


# -- trees ------------------------------------------------------------------------------------------------------------------


def every_tree(rates, nodes: int) -> list[set[tuple[int, ...]]]:
    """All trees of so many nodes, in which every node has its parent and the sibling before it."""
    paths = [path for depth in range(1, len(rates) + 1) for path in itertools.product(*(range(len(line)) for line in rates[:depth]))]
    trees: set[frozenset[tuple[int, ...]]] = {frozenset()}
    for _ in range(nodes):
        trees = {
            tree | {path}
            for tree in trees
            for path in paths
            if path not in tree and (len(path) == 1 or path[:-1] in tree) and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in tree)
        }
    return [set(tree) for tree in trees]


def promised(rates, tree) -> float:
    total = 1.0
    for path in tree:
        reach = 1.0
        for depth, rank in enumerate(path):
            reach *= rates[depth][rank]
        total += reach
    return total


@pytest.mark.parametrize("rates", [RATES, ((0.9, 0.05), (0.9, 0.05), (0.2, 0.2)), ((0.3, 0.3, 0.3), (0.3, 0.3, 0.0))])
@pytest.mark.parametrize("nodes", [1, 2, 4, 5])
def test_the_greedy_tree_is_the_best_of_all(rates, nodes):
    found = list(likeliest_nodes(rates, nodes))
    assert len(found) == nodes
    assert promised(rates, [path for path, _ in found]) == pytest.approx(max(promised(rates, tree) for tree in every_tree(rates, nodes)))
    assert 1 + sum(probability for _, probability in found) == pytest.approx(promised(rates, [path for path, _ in found]))


@pytest.mark.parametrize(("node", "expected"), [(0.0, 39), (0.02, 6), (0.1, 2), (2.0, 1)])
def test_as_many_nodes_as_pay(node, expected):
    def cost(nodes: int) -> float:
        return 1 + node * nodes

    tree, length = best_tree(RATES, cost, 64)
    sizes = [max(promised(RATES, [path for path, _ in likeliest_nodes(RATES, nodes)]) / cost(nodes) for _ in [0]) for nodes in range(1, 40)]
    assert length == pytest.approx(max(sizes) * cost(tree.nodes))
    assert tree.nodes == sizes.index(max(sizes)) + 1
    if node in (0.0, 2.0):
        assert tree.nodes == expected
    assert best_tree(RATES, cost, 3)[0].nodes <= 3


def test_luck_of_later_guesses_and_guesses_that_are_never_right():
    assert [path for path, _ in likeliest_nodes(((0.2, 0.5),), 9)] == [(0,), (1,)]
    assert list(likeliest_nodes(((0.2, 0.5),), 9)) == [((0,), 0.2), ((1,), 0.2)]
    assert [path for path, _ in likeliest_nodes(((0.5, 0.0), (0.0,)), 9)] == [(0,)]
    with pytest.raises(ConfigurationError, match="no guess of the head was right"):
        best_tree(((0.0, 0.0),), lambda nodes: 1.0, 4)


@pytest.mark.parametrize(("kind", "options"), [("medusa", {}), ("hydra", {}), ("rnn", {}), ("rnn", {"hidden_states": False})])
def test_accuracies_are_counted(kind, options):
    """Against one guess at a time, by the drafter itself: how often its ranks at each depth are the text's next tokens."""
    head, rows = taught_head(kind, **options), repetitive((24, 30))
    found = calibrate(head, tiny(), rows, cost=lambda nodes: 1 + 0.05 * nodes, answers=[8, 9], ranks=3)
    steps = 1 if options else 2
    for k in range(steps):
        hits, asked = torch.zeros(3), 0
        for row, first in zip(rows, (8, 9)):
            with torch.no_grad():
                states = tiny()(torch.tensor([row]), output_hidden_states=True).hidden_states[LAST][0]
            ahead = 1 if options else 2 + k
            for place in range(max(first, ahead), len(row)):
                source, asked = place - ahead, asked + 1
                with torch.no_grad():
                    logits = said(head, k, states[source], row, source)
                hits += (logits.topk(3).indices == row[place]).float()
        torch.testing.assert_close(torch.tensor(found.accuracies[k]), (hits / asked), rtol=0, atol=1e-4)
        assert k or found.tokens == asked


def test_a_target_of_several_streams_is_measured_by_what_its_lm_head_reads():
    model, texts = tiny("gemma3n_text"), repetitive((24, 30))
    head = taught_head("medusa", "gemma3n_text", steps=12)
    asked = [(row, torch.tensor([row]), place) for row in texts for place in range(2, len(row))]
    with torch.no_grad():
        hits = [int(head(model.model(ids)[0][0, place - 2])[0].argmax()) == row[place] for row, ids, place in asked]
    assert any(hits)
    found = calibrate(head, model, texts, cost=lambda nodes: 1.0, ranks=3)
    assert found.tokens == len(asked) and found.accuracies[0][0] == pytest.approx(sum(hits) / len(asked), abs=1e-4)


def said(head, k: int, hidden: torch.Tensor, row: list[int], source: int) -> torch.Tensor:
    path = torch.tensor(row[source + 1 : source + 2 + k])
    if isinstance(head, MedusaHead):
        return head(hidden)[k]
    if head.kind == "hydra":
        return head(hidden, path)
    if not head.features:
        return head.say(head.read(torch.tensor([row[: source + 1]]), head.begin(None, 1))[0][0, -1], None)
    return head.say(head.read(path[None], head.begin(hidden[None], 1))[0][0, -1], hidden)


def test_what_can_not_be_calibrated_is_refused():
    head = taught_head("medusa")
    with pytest.raises(ConfigurationError, match="too short for the head to predict a token"):
        calibrate(head, tiny(), [[5, 6]], cost=lambda nodes: 1.0)
    with pytest.raises(ConfigurationError, match="was trained for"):
        calibrate(head, small_llama(), repetitive(), cost=lambda nodes: 1.0)


def test_costs_of_trees_are_measured():
    speculator = Speculator(tiny(), make_drafter("medusa"), draft_length=4)
    cost = tree_costs(speculator.target, speculator.drafter, most_nodes=30, seconds=0.1)
    seconds = [cost(nodes) for nodes in range(31)]
    assert 0 < seconds[0] < seconds[1] and seconds == sorted(seconds)
    assert generate(speculator, repetitive(), max_new_tokens=8) == [alone(tiny(), row, max_new_tokens=8) for row in repetitive()]


# -- what the planner knows of it -------------------------------------------------------------------------------------------


@pytest.fixture
def calibrated():
    head = MedusaHead(taught_head("medusa").config)
    head.load_state_dict(taught_head("medusa").state_dict(), assign=True)
    answered = [row + alone(tiny(), row, max_new_tokens=20) for row in repetitive()]
    firsts = [len(row) for row in repetitive()]
    calibrate(head, tiny(), answered, cost=lambda nodes: 1 + 0.001 * nodes, most_nodes=40, answers=firsts).store(head)
    return head


def test_the_calibrated_tree_bounds_what_auto_looks_at(calibrated):
    speculator = Speculator(tiny(), Medusa(calibrated), shape="auto")
    tree = speculator.drafter.info.calibrated
    assert str(tree) == calibrated.config.tree and tree.nodes > 24
    assert speculator.shape.nodes == tree.nodes and speculator.shape.depth == 8
    assert speculator.shape.siblings == max(4, tree.siblings)
    plain = Speculator(tiny(), make_drafter("medusa"), shape="auto")
    assert (plain.shape.nodes, plain.shape.depth, plain.drafter.info.calibrated) == (24, 8, None)


def test_the_planner_begins_with_the_measured_rates(calibrated):
    speculator = Speculator(tiny(), Medusa(calibrated), shape="auto")
    table = speculator.planner.forecaster.of(True).by_rank(8, 3)
    rates = calibrated.config.accuracies
    assert table[0][0] == pytest.approx(rates[0][0]) and table[0][0] != Acceptance(8, 3).by_rank(8, 3)[0][0]
    for measured, begun in zip(rates, table):
        assert begun[0] == pytest.approx(measured[0], abs=0.1)
    tracker = Acceptance(3, 3, RATES)
    assert [line[0] for line in tracker.by_rank(3, 3)] == pytest.approx(
        [0.6, 0.5 * KNOWN / (KNOWN + 4) + 0.6 * 4 / (KNOWN + 4), 0.375], abs=0.03
    )
    for _ in range(60):
        tracker.observe([3], [[1, 1, 1]], [0])
    assert tracker.by_depth(1)[0] < 0.05


@pytest.mark.parametrize("kind", ["medusa", "hydra", "rnn"])
def test_auto_leaves_the_text_as_it_is(kind):
    speculator = Speculator(tiny(), make_drafter(kind))
    rows = repetitive()
    for count in (1, 3):
        expected = [alone(tiny(), row, max_new_tokens=24) for row in rows[:count]]
        assert generate(speculator, rows[:count], max_new_tokens=24) == expected
    costs = speculator.planner.costs
    assert costs.level.points and not speculator.planner.forecaster.catches_up, "its drafts are timed, and it misses nothing"


def test_a_head_among_several_drafts_as_deep_as_it_can():
    drafter = Several([Medusa(taught_head("medusa")), PromptLookup()])
    rows = repetitive()
    expected = [alone(tiny(), row, max_new_tokens=20) for row in rows]
    for shape in ("auto", "chain(10)", "product(3,2,1)"):
        out = Speculator(tiny(), drafter, shape=shape).generate(**padded(rows), max_new_tokens=20, pad_token_id=0)
        assert [row[-20:] for row in out.sequences.tolist()] == expected
        assert out.stats.accepted > 0 or shape == "auto"  # what pays depends on the clock


def test_a_chain_as_the_calibrated_tree(calibrated):
    calibrated.config = replace(calibrated.config, tree="chain(3)")
    speculator = Speculator(tiny(), Medusa(calibrated), shape="auto")
    assert speculator.shape.nodes == 24 and generate(speculator, prompts((12,)), max_new_tokens=5)


# -- inflation --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"heads": 2, "layers": 3, "bias": True}, {"lm_head": "target"}, {"lm_head": "low-rank", "rank": 6, "layers": 2}]
)
@pytest.mark.parametrize("ratio", [1, 4])
def test_an_inflated_head_says_the_same_of_the_inflated_target(ratio, options):
    model = small_llama()
    large = inflate(model, hidden_size=32 * ratio, layers=5)
    head, generator = MedusaHead.for_target(model, **options), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    before = {name: value.clone() for name, value in head.state_dict().items()}
    inflated = inflate_head(head, large)
    with torch.no_grad():
        small = model(SMALL_IDS, output_hidden_states=True).hidden_states[LAST]
        wide = large(SMALL_IDS, output_hidden_states=True).hidden_states[LAST]
        torch.testing.assert_close(wide, torch.nn.functional.pad(small, (0, 32 * (ratio - 1))), atol=1e-4, rtol=0)
        torch.testing.assert_close(inflated(wide), head(small), atol=1e-3, rtol=0)
    assert inflated.config.target.hidden_size == 32 * ratio and inflated.config.heads == head.config.heads
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())
    sizes = [sum(parameter.numel() for parameter in each.parameters()) for each in (head, inflated)]
    assert ratio * sizes[0] <= sizes[1]
    Speculator(large, Medusa(inflated), draft_length=2)


def test_a_head_for_something_else_is_not_inflated():
    head = find("medusa").for_target(small_llama())
    with pytest.raises(ConfigurationError, match="was not inflated from the head's target"):
        inflate_head(head, tiny())


def test_a_target_alone_can_be_read():
    target = Target(tiny())
    drafter = Medusa(taught_head("medusa"))
    drafter.bind(target)
    assert target.features == (LAST,)
