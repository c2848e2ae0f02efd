"""Typical acceptance: what it accepts, which path it takes, and that enumeration finds it biased."""

import math

import pytest
import torch
from laws import law_of

from foredraft.errors import ConfigurationError
from foredraft.logits.noise import Noise
from foredraft.testing import Enumeration, ProbabilityTable, ScriptedDrafter, World, distance, plain_law
from foredraft.tree import TokenTree
from foredraft.verification import create
from foredraft.verification.typical import Typical

PROMPT, P, Q = [0, 1], ProbabilityTable.random(3, seed=1), ProbabilityTable.random(3, seed=2)
NOISE = Noise(torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long))


def verdict(parents, tokens, p, rule=None, valid=None, layout=True):
    """(path, next token) of one row; ``p`` has a line for every node."""
    tree = TokenTree(
        torch.tensor([tokens]),
        torch.tensor([parents]),
        None if valid is None else torch.tensor([valid]),
        static_parents=tuple(parents) if layout else None,
    )
    found = (rule or Typical()).verify(tree, torch.tensor([p]), NOISE)
    return found.path[0, : int(found.accepted) + 1].tolist(), int(found.next_token)


FLAT = [0.25] * 4
SURE = [0.97, 0.01, 0.01, 0.01]


def test_the_threshold_is_the_papers():
    """p(x) > min(ε, δ exp(-H)): under four equal tokens δ / 4 = 0.075 < ε, where p is sure ε decides."""
    tree = TokenTree(torch.tensor([[0, 1]]), torch.tensor([[-1, 0]]), static_parents=(-1, 0))
    bound = Typical().threshold(tree, torch.tensor([[FLAT, SURE]]))
    assert bound[0].tolist() == pytest.approx([0.3 / 4, 1.0])  # the leaf has no child to bound
    entropy = -sum(value * math.log(value) for value in SURE)
    bound = Typical(delta=0.05).threshold(tree, torch.tensor([[SURE, FLAT]]))
    assert bound[0, 0] == pytest.approx(0.05 * math.exp(-entropy))
    assert Typical().threshold(tree, torch.tensor([[SURE, FLAT]]))[0, 0] == pytest.approx(0.09)


def test_the_comparison_is_strict():
    p = [[0.5, 0.25, 0.25, 0.0], FLAT]
    assert verdict([-1, 0], [0, 1], p, Typical(epsilon=0.25, delta=0.999)) == ([0], 0)
    assert verdict([-1, 0], [0, 1], p, Typical(epsilon=0.2499, delta=0.999)) == ([0, 1], 0)


@pytest.mark.parametrize("layout", [True, False])
def test_the_longest_accepted_prefix_wins_and_its_next_token_is_the_argmax(layout):
    parents, tokens = [-1, 0, 0, 2, 2], [0, 0, 1, 3, 2]
    p = [[0.6, 0.4, 0.0, 0.0], FLAT, [0.2, 0.2, 0.35, 0.25], [0.1, 0.2, 0.7, 0.0], [0.1, 0.2, 0.0, 0.7]]
    assert verdict(parents, tokens, p, layout=layout) == ([0, 2, 4], 3)  # of two at depth two the likelier


def test_a_tie_is_broken_by_the_whole_path():
    """0.4 · 0.5 < 0.6 · 0.4: the last token alone would decide otherwise."""
    p = [[0.6, 0.4, 0.0], [0.2, 0.4, 0.4], [0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    assert verdict([-1, 0, 0, 1, 2], [2, 0, 1, 1, 0], p) == ([0, 1, 3], 1)


def test_filler_and_what_hangs_below_a_refusal_do_not_count():
    p = [[0.6, 0.4, 0.0], [0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    assert verdict([-1, 0, 0, 1, 2], [2, 0, 1, 1, 0], p, valid=[True, False, True, False, True]) == ([0, 2, 4], 0)
    assert verdict([-1, 0, 1], [2, 2, 0], [[0.6, 0.4, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]) == ([0], 0)


def test_chains_and_rows():
    tokens = torch.tensor([[0, 0, 1], [0, 0, 0]])
    p = torch.tensor([[SURE, FLAT, FLAT], [SURE, SURE, FLAT]])
    found = Typical().verify(TokenTree.from_chain(tokens, proposal="iid"), p, NOISE)
    assert found.accepted.tolist() == [2, 2]
    found = Typical().verify(TokenTree.from_chain(1 - tokens), p, NOISE)
    assert found.accepted.tolist() == [0, 0] and found.next_token.tolist() == [0, 0]


def test_a_greedy_row_keeps_only_the_argmax():
    one_hot = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    assert verdict([-1, 0, 0], [2, 1, 0], one_hot) == ([0, 2], 2)


def test_enumeration_finds_it_biased():
    """It is far from the target's law with a draft and without one: its own tokens are greedy."""
    for drafter in (ScriptedDrafter(Q, proposal="iid"), ScriptedDrafter(Q, proposal="iid", depth=0)):
        assert distance(law_of(P, drafter, "typical", "chain(2)"), plain_law(P, PROMPT, 3)) > 0.2


def test_it_asks_for_no_noise():
    p = torch.tensor([[FLAT, SURE]])
    Typical().verify(TokenTree.from_chain(torch.tensor([[0, 1]])), p, Enumeration([World({})]).noise())
    assert not create("typical").lossless


@pytest.mark.parametrize("options", [{"epsilon": 0.0}, {"delta": 1.0}, {"epsilon": float("nan")}])
def test_what_can_not_be_is_refused(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Typical(**options)
