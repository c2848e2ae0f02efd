"""What a seed promises: with ``rule="auto"`` the text, whatever the shapes; and where it does not, the statistics say so."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from helpers import PAD, added, generate, make_drafter, padded, repetitive, tiny

import foredraft
from foredraft import RowParameters, Speculator

ROWS = repetitive((23, 9, 15))
SAMPLED = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.2, "pad_token_id": PAD}
SHAPES = {"auto": None, "chain": "chain(4)", "tree": "product(2,2,1)", "grown": "dynamic(depth=3,k=2,total=6)"}


@cache
def plain(seed):
    seed = list(seed) if isinstance(seed, tuple) else seed
    return generate(Speculator(tiny(), "none"), ROWS, seed=seed, **SAMPLED)


@cache
def speculator(shape, rule="auto"):
    return Speculator(tiny(), make_drafter("draft-model"), shape=SHAPES[shape], rule=rule)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_seed_repeats_the_text_by_default(shape):
    for seed in (1, [4, (5, 6), 7]):
        out = speculator(shape).generate(**padded(ROWS), seed=seed, **SAMPLED)
        assert added(out, 23) == plain(seed if isinstance(seed, int) else tuple(seed))
        assert (out.stats.rule, out.stats.reproducible, out.stats.lossless) == ("match", True, True)
        assert out.stats.accepted > 0 or shape == "auto", "only a shape of its own may draft nothing"


@pytest.mark.parametrize(("shape", "rule"), [("chain", "block"), ("tree", "traversal"), ("auto", "traversal")])
def test_without_a_seed_the_rule_is_the_one_that_accepts_most(shape, rule):
    stats = speculator(shape).generate(**padded(ROWS), **SAMPLED).stats
    assert (stats.rule, stats.reproducible) == (rule, False)
    stats = speculator(shape).generate(**padded(ROWS), seed=3, repeatable=False, **SAMPLED).stats
    assert (stats.rule, stats.reproducible) == (rule, False)
    assert speculator(shape).rule.name == rule


def test_without_a_seed_match_can_still_be_repeated():
    first = speculator("grown").generate(**padded(ROWS), **SAMPLED)
    assert (first.stats.rule, first.stats.reproducible) == ("match", True)
    again = speculator("tree").generate(**padded(ROWS), seed=first.stats.seed, **SAMPLED)
    assert torch.equal(first.sequences, again.sequences)


def test_a_rule_named_by_the_user_is_kept_and_repeats_with_a_fixed_shape_only():
    for shape, rule, repeats in (
        ("auto", "traversal", False),
        ("tree", "traversal", True),
        ("chain", "block", True),
        ("auto", "match", True),
    ):
        first, again = (speculator(shape, rule).generate(**padded(ROWS), seed=5, **SAMPLED) for _ in range(2))
        assert (first.stats.rule, first.stats.reproducible) == (rule, repeats)
        if repeats:
            assert torch.equal(first.sequences, again.sequences)
    assert first.stats.to_dict()["reproducible"]


def test_greedy_texts_need_no_seed():
    stats = speculator("auto", "traversal").generate(**padded(ROWS), max_new_tokens=5, pad_token_id=PAD).stats
    assert stats.reproducible and stats.rule == "match"


def test_streams_sessions_and_custom_generate_promise_the_same():
    texts = [[], [], []]
    stream = speculator("tree").stream(**padded(ROWS), seed=2, **SAMPLED)
    for tokens in stream:
        texts[tokens.row] += tokens
    assert texts == plain(2) and stream.stats.reproducible

    decode = foredraft.custom_generate(make_drafter("draft-model"), shape="product(2,2,1)", seed=2)
    out = tiny().generate(**padded(ROWS), **SAMPLED, custom_generate=decode, return_dict_in_generate=True)
    assert out.sequences[:, 23:].tolist() == plain(2) and out.stats.reproducible

    for repeatable, rule in ((True, True), (False, True)):
        session = speculator("tree").session(repeatable=repeatable)
        assert session.stats.reproducible is rule
    assert not speculator("auto").session().stats.reproducible
    session = speculator("auto").session(repeatable=True)
    parameters = [RowParameters(max_new_tokens=12, do_sample=True, seed=(2, index)) for index in range(3)]
    slots = [session.add(row, each) for row, each in zip(ROWS, parameters)]
    new = {slot: [] for slot in slots}
    while session.live:
        for commit in session.step():
            new[commit.slot] += commit.tokens
    unwarped = {"temperature": 1.0, "top_k": 0}
    assert list(new.values()) == generate(Speculator(tiny(), "none"), ROWS, seed=2, **{**SAMPLED, **unwarped})
