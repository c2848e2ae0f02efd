"""A branching tree's logits are those of its paths, for every architecture that takes trees, behind prefixes longer than the window."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES, build
from cover import nightly_but
from helpers import prompts, random_tree

from foredraft import TokenTree
from foredraft.target import Target

TOLERANCE = 1e-4  # largest difference, relative to the largest logit
TREE = [(name, how) for name, entry in ARCHITECTURES.items() if entry.support == "tree" for how in entry.implementations]
NAMES = [name for name, entry in ARCHITECTURES.items() if entry.support == "tree"]
TURNS = {(name, ARCHITECTURES[name].implementations[~turn % len(ARCHITECTURES[name].implementations)]) for turn, name in enumerate(NAMES)}
LENGTHS = (30, 17, 22)


def assert_scores_like_its_paths(model, texts, tree, logits):
    """``logits`` ``[R, N, V]`` against plain passes over each whole path, with no cache."""
    for row, text in enumerate(texts):
        for leaf in set(range(tree.nodes)) - set(tree.parents[row].tolist()):
            path = tree.path(row, leaf)
            ids = torch.tensor([text + tree.tokens[row, path].tolist()])
            wanted = model(input_ids=ids, use_cache=False).logits[0, -len(path) :]
            assert (logits[row, path] - wanted).abs().max() <= TOLERANCE * wanted.abs().max(), f"row {row}, path {path}"


@torch.inference_mode()
def check(name, implementation, nodes, seeds):
    """Trees behind ragged prefixes, each keeping another path of the one before."""
    model, texts = build(name, implementation), prompts(LENGTHS)
    assert min(LENGTHS) > (ARCHITECTURES[name].window or 0)
    target = Target(model, test=False)
    target.open(texts)
    target.prefill(texts, first=0)
    for seed in seeds:
        tree = random_tree(len(texts), nodes, seed)
        assert_scores_like_its_paths(model, texts, tree, target.score(tree))
        ends = [tree.path(row, max(0, nodes - 1 - row)) for row in range(len(texts))]
        width = max(map(len, ends))
        target.commit(torch.tensor([path + [0] * (width - len(path)) for path in ends]), [len(path) for path in ends])
        texts = [text + tree.tokens[row, path].tolist() for row, (text, path) in enumerate(zip(texts, ends))]


@pytest.mark.parametrize(("name", "implementation"), nightly_but(TURNS, TREE))  # test_architectures.py has the other ones
def test_a_branching_tree_scores_like_its_paths(name, implementation):
    check(name, implementation, nodes=7, seeds=(1, 2))


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", [2, 16, 40])
@pytest.mark.parametrize(("name", "implementation"), TREE)
def test_trees_of_other_sizes(name, implementation, nodes):
    check(name, implementation, nodes, seeds=range(3, 7))


@torch.inference_mode()
def test_a_draft_does_not_reach_over_the_longrope_boundary():
    """Filler and rejected nodes behind the last position would change the rotation of the whole pass."""
    model, texts = build("phi3_longrope"), [list(text) for text in prompts((88, 70))]
    with pytest.warns(UserWarning, match="beyond 96 tokens"):
        target = Target(model)
    assert target.context == 96
    target.open(texts)
    target.prefill(texts, first=0)
    chain = TokenTree.from_chain(torch.arange(3, 15).expand(2, 12))  # the first row has room for 8 of them
    logits = target.score(chain)
    for row, (text, room) in enumerate(zip(texts, (8, 12))):
        wanted = model(input_ids=torch.tensor([text + chain.tokens[row, :room].tolist()]), use_cache=False).logits[0, -room:]
        assert (logits[row, :room] - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
    over = model(input_ids=torch.tensor([texts[0] + chain.tokens[0].tolist()]), use_cache=False).logits[0, -12:]
    assert (logits[0, :8] - over[:8]).abs().max() > 0.1, "beyond the boundary the logits before it are others"


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_temperature_is_left_as_it_was(implementation):
    model = build("llama4_tuned", implementation)
    layers = [layer.self_attn for layer in model.model.layers]
    before = [layer.attn_temperature_tuning for layer in layers]
    Target(model)
    assert [layer.attn_temperature_tuning for layer in layers] == before
    assert not any(layer.q_proj._forward_hooks for layer in layers)
