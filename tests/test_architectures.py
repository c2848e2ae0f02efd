"""Greedy text equals transformers' own, token for token, in float32: every architecture, implementation and drafter."""

from __future__ import annotations

import pytest
from architectures import ARCHITECTURES, build
from helpers import LENGTHS, PAD, Oracle, alone, drafter_names, generate, make_drafter, padded, prompts, repetitive, tiny

from foretoken import Speculator, UnsupportedModelError

TREE = [(name, how) for name, entry in ARCHITECTURES.items() if entry.support == "tree" for how in entry.implementations]
REFUSED = ["gpt_neo", "falcon_alibi", "mpt"] + [name for name, entry in ARCHITECTURES.items() if entry.support == "refused"]
NEW = 25


def assert_equals_transformers(speculator, rows, expected, **options):
    """One row, then the ragged batch; returns the statistics of both."""
    stats = []
    for count in (1, len(rows)):
        out = speculator.generate(**padded(rows[:count]), max_new_tokens=NEW, do_sample=False, pad_token_id=PAD, **options)
        assert out.sequences[:, -NEW:].tolist() == expected[:count]
        stats.append(out.stats)
    return stats


@pytest.mark.parametrize(("name", "implementation"), TREE)
def test_greedy_text_is_that_of_transformers(name, implementation):
    model, rows = build(name, implementation), prompts()
    assert min(LENGTHS) > (ARCHITECTURES[name].window or 0)
    expected = [alone(model, row, max_new_tokens=NEW) for row in rows]
    oracle = Oracle([row + text for row, text in zip(rows, expected)])
    for stats in assert_equals_transformers(Speculator(model, drafter=oracle), rows, expected):
        assert 0 < stats.accepted < stats.drafted
        assert stats.target_passes < NEW


@pytest.mark.parametrize("drafter", drafter_names())
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_every_drafter_leaves_the_text_alone(name, drafter):
    model, rows = tiny(name), repetitive()
    expected = [alone(model, row, max_new_tokens=NEW) for row in rows]
    speculator = Speculator(model, drafter=make_drafter(drafter, name))
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


@pytest.mark.parametrize("name", [name for name, entry in ARCHITECTURES.items() if entry.support == "chain"])
def test_a_recurrent_model_is_exact_or_refused(name):
    """Architectures that could be verified along a chain only: either the text is right, or the model is refused by name."""
    model, rows = build(name, ARCHITECTURES[name].implementations[0]), prompts()
    refusal = ""
    try:
        texts = generate(Speculator(model, drafter="ngram"), rows, max_new_tokens=10)
    except UnsupportedModelError as error:
        refusal = str(error)
    assert type(model).__name__ in refusal or texts == [alone(model, row, max_new_tokens=10) for row in rows]


@pytest.mark.nightly
@pytest.mark.parametrize("drafter", drafter_names())
@pytest.mark.parametrize(("name", "implementation"), TREE)
def test_the_full_product(name, implementation, drafter):
    model, rows = build(name, implementation), repetitive()
    expected = [alone(model, row, max_new_tokens=NEW) for row in rows]
    for length in (1, 5):
        speculator = Speculator(model, drafter=make_drafter(drafter, name, implementation), draft_length=length)
        assert_equals_transformers(speculator, rows, expected)
