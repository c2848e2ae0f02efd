"""Greedy text equals transformers' own, token for token, in float32: every architecture, implementation and drafter."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES, build
from cover import nightly_but
from helpers import LENGTHS, PAD, Oracle, alone, drafter_names, generate, make_drafter, padded, prompts, repetitive, tiny

from foredraft import ConfigurationError, Speculator, TokenTree, UnsupportedModelError

TREE = [(name, how) for name, entry in ARCHITECTURES.items() if entry.support == "tree" for how in entry.implementations]
CHAIN = [(name, how) for name, entry in ARCHITECTURES.items() if entry.support == "chain" for how in entry.implementations]
NAMES = [name for name, entry in ARCHITECTURES.items() if entry.support == "tree"]
TURNS = {(name, ARCHITECTURES[name].implementations[turn % len(ARCHITECTURES[name].implementations)]) for turn, name in enumerate(NAMES)}
CHAINS = list(dict.fromkeys(name for name, _ in CHAIN))
CHAIN_TURNS = {
    (name, ARCHITECTURES[name].implementations[turn % len(ARCHITECTURES[name].implementations)]) for turn, name in enumerate(CHAINS)
}
UNFIT = {  # drafters that a family's layers rule out, and why
    ("gemma3n_text", "layer-skip"): r"layers of Gemma3nForCausalLM .* cannot be run in part: upper layers read the keys of lower ones",
    ("gemma3n_text", "draft-verify"): r"layers of Gemma3nForCausalLM .* cannot be run in part: upper layers read the keys of lower ones",
    ("gemma3n_text", "eagle3"): r"hidden state 1 of Gemma3nForCausalLM .* cannot be passed to a drafter: it does not come by any module",
}
REFUSED = [name for name, entry in ARCHITECTURES.items() if entry.support == "refused"]
NEW, LONG = 16, 25  # drafters that learn from the text need some of it


def assert_equals_transformers(speculator, rows, expected, **options):
    """One row, then the ragged batch; returns the statistics of both."""
    stats = []
    new = len(expected[0])
    for count in (1, len(rows)):
        out = speculator.generate(**padded(rows[:count]), max_new_tokens=new, do_sample=False, pad_token_id=PAD, **options)
        assert out.sequences[:, -new:].tolist() == expected[:count]
        stats.append(out.stats)
    return stats


@pytest.mark.parametrize(("name", "implementation"), nightly_but(TURNS, TREE))
def test_greedy_text_is_that_of_transformers(name, implementation):
    model, rows = tiny(name, implementation), prompts(LENGTHS[:2])
    assert min(LENGTHS) > (ARCHITECTURES[name].window or 0)
    expected = [alone(model, row, max_new_tokens=NEW) for row in rows]
    oracle = Oracle([row + text for row, text in zip(rows, expected)])
    speculator = Speculator(model, drafter=oracle, shape="chain(5)")
    assert speculator.target.chains_only is None
    for stats in assert_equals_transformers(speculator, rows, expected):
        assert 0 < stats.accepted < stats.drafted
        assert stats.target_passes < NEW


# Every second drafter; the others in test_keyed.py, by the text of a seed.
GREEDILY = {(("llama", "gemma3_text")[place // 2 % 2], drafter) for place, drafter in enumerate(drafter_names()) if place % 2}


@pytest.mark.parametrize(
    ("name", "drafter"), nightly_but(GREEDILY, [(name, drafter) for name in ("llama", "gemma3_text") for drafter in drafter_names()])
)
def test_every_drafter_leaves_the_text_alone(name, drafter):
    model, rows = tiny(name), repetitive()
    expected = [alone(model, row, max_new_tokens=LONG) for row in rows]
    speculator = Speculator(model, drafter=make_drafter(drafter, name), shape="chain(5)")
    for stats in assert_equals_transformers(speculator, rows, expected):
        assert (stats.drafted > stats.accepted) == (drafter != "none")
        if drafter == "draft-model":
            assert stats.accepted > 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_roll_back_is_refused_by_name(name):
    model = build(name, ARCHITECTURES[name].implementations[0])
    with pytest.raises(UnsupportedModelError, match=type(model).__name__):
        Speculator(model, drafter="none")
    with pytest.raises(UnsupportedModelError, match=type(model).__name__):
        Speculator(model, drafter="none", self_test=False)


SAMPLED = {"do_sample": True, "temperature": 1.1, "repetition_penalty": 1.2, "max_new_tokens": 9, "seed": 5}
GREEDY = {"max_new_tokens": 9}


def assert_trees_equal_plain(name, implementation, shape, *, ways=((SAMPLED, 3), (SAMPLED, 1), (GREEDY, 3), (GREEDY, 1))):
    """Keyed sampling and greedy, a row alone and a ragged batch, through a draft model's trees."""
    model, rows = tiny(name, implementation), repetitive()
    plain = Speculator(model, drafter="none")
    speculator = Speculator(model, drafter=make_drafter("draft-model", name, implementation), rule="match", shape=shape)
    for options, count in ways:
        assert generate(speculator, rows[:count], **options) == generate(plain, rows[:count], **options)


SEEDED = {"gemma3_text", "gemma3n_text", "llama", *NAMES[1::4]}


@pytest.mark.parametrize("name", nightly_but({(name,) for name in SEEDED}, [(name,) for name in NAMES]))
def test_the_text_of_a_seed_is_the_same_with_trees(name):
    """Greedy batches with trees, of every family, are in test_execution_families.py, and logits of trees in test_trees.py."""
    ways = ((SAMPLED, 3), (GREEDY, 1)) if name == "llama" else ((SAMPLED, 3),)
    assert_trees_equal_plain(name, ARCHITECTURES[name].implementations[-1], "product(2,2,1)", ways=ways)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", ["product(3,2)", "paths(0,1,0.0,0.1,0.0.0)", "dynamic(depth=4,k=3,total=8)"])
@pytest.mark.parametrize(("name", "implementation"), TREE)
def test_the_text_of_a_seed_is_the_same_with_any_tree(name, implementation, shape):
    assert_trees_equal_plain(name, implementation, shape)


@pytest.mark.parametrize(("name", "implementation"), nightly_but(CHAIN_TURNS, CHAIN))
def test_chains_only_text_is_that_of_transformers(name, implementation):
    model, rows = tiny(name, implementation), prompts(LENGTHS[:2])
    expected = [alone(model, row, max_new_tokens=NEW) for row in rows]
    speculator = Speculator(model, drafter=Oracle([row + text for row, text in zip(rows, expected)]), shape="chain(5)")
    assert type(model).__name__ in speculator.target.chains_only
    for stats in assert_equals_transformers(speculator, rows, expected):
        assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("name", [name for name, entry in ARCHITECTURES.items() if entry.support == "chain"])
def test_a_tree_is_refused_where_only_chains_work(name):
    model = build(name, ARCHITECTURES[name].implementations[0])
    with pytest.raises(ConfigurationError, match=rf"{type(model).__name__}.*use shape='chain\(2\)'"):
        Speculator(model, drafter=make_drafter("draft-model"), shape="product(2,2)")
    assert Speculator(model, drafter="several:prompt-lookup,ngram", shape="chain(5)").shape.is_chain
    with pytest.raises(ConfigurationError, match=r"only verify chains|use shape='chain\(2\)'"):
        Speculator(model, drafter="several:prompt-lookup,ngram", shape="product(2,2)")
    target = Speculator(model, drafter="none").target
    target.open([[5, 6, 7]])
    target.prefill([[5, 6, 7]], first=0)
    tree = TokenTree(torch.tensor([[4, 5, 6]]), torch.tensor([[-1, 0, 0]]))
    with pytest.raises(UnsupportedModelError, match=f"{type(model).__name__}.*only verify chains.*(recurrent state|cache slots)"):
        target.score(tree)


@pytest.mark.nightly
@pytest.mark.parametrize("drafter", drafter_names())
@pytest.mark.parametrize(("name", "implementation"), TREE)
def test_the_full_product(name, implementation, drafter):
    model, rows = build(name, implementation), repetitive()
    if why := UNFIT.get((name, drafter)):
        with pytest.raises(UnsupportedModelError, match=why):
            Speculator(model, drafter=make_drafter(drafter, name, implementation))
        return
    expected = [alone(model, row, max_new_tokens=LONG) for row in rows]
    for length in (1, 5):
        speculator = Speculator(model, drafter=make_drafter(drafter, name, implementation), draft_length=length)
        assert_equals_transformers(speculator, rows, expected)
