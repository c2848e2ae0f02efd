"""Keyed sampling: the text is a function of the seed alone, whatever drafts it, however far, in whatever batch."""

from __future__ import annotations

from functools import cache

import pytest
from cover import covered
from helpers import PAD, Oracle, added, drafter_names, generate, make_drafter, padded, plainly, repetitive, tiny

from foredraft import Speculator

FAMILIES = ["llama", "gemma3_text"]
SEEDS = [0, 11, 2**40 + 3]
NEW = 16


def options(temperature: float) -> dict:
    return {"do_sample": True, "temperature": temperature, "top_p": 0.9, "repetition_penalty": 1.2, "max_new_tokens": NEW}


@cache
def plain(family: str) -> Speculator:
    return Speculator(tiny(family), drafter="none", rule="match")


@cache
def solo(family: str, seed: int, temperature: float) -> list[list[int]]:
    """Plain decoding of each row alone, with the pair that the batch gives it."""
    return [generate(plain(family), [row], seed=[(seed, index)], **options(temperature))[0] for index, row in enumerate(repetitive())]


@pytest.mark.parametrize(
    ("drafter", "temperature", "family", "seed"),
    covered([name for name in drafter_names()[::2] if name != "none"], [0.7, 1.3], FAMILIES, SEEDS, ways=1),
)
def test_speculative_equals_plain(drafter, temperature, family, seed):
    """More seeds of each drafter are below; the other drafters in test_architectures.py."""
    model, rows = tiny(family), repetitive()
    speculator = Speculator(model, drafter=make_drafter(drafter, family), rule="match", shape="chain(5)")
    expected = solo(family, seed, temperature)
    batch = speculator.generate(**padded(rows), seed=seed, pad_token_id=PAD, **options(temperature))
    assert added(batch, max(map(len, rows))) == expected
    assert generate(speculator, rows[:1], seed=seed, **options(temperature)) == expected[:1]
    assert batch.stats.drafted > 0
    if drafter in ("draft-model", "medusa", "hydra", "rnn"):
        assert 0 < batch.stats.accepted < batch.stats.drafted


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_batch_with_acceptances_everywhere(family, temperature):
    """A drafter that knows the text, every fifth token wrong: each row accepts and rejects in every few rounds."""
    model, rows = tiny(family), repetitive()
    expected = solo(family, 5, temperature)
    oracle = Oracle([row + text for row, text in zip(rows, expected)])
    speculator = Speculator(model, drafter=oracle, rule="match", shape="chain(5)")
    assert generate(speculator, rows, seed=5, **options(temperature)) == expected


@pytest.mark.parametrize("siblings", ["keyed", "iid", "top-k"])
def test_the_length_and_kind_of_drafts_do_not_matter(siblings):
    model, rows = tiny(), repetitive()
    expected = plainly(model, rows, seed=3, **options(1.0))
    for length in (1, 2, 4, 9):
        drafter = make_drafter("draft-model", siblings=siblings)
        assert generate(Speculator(model, drafter=drafter, rule="match", draft_length=length), rows, seed=3, **options(1.0)) == expected


def test_seeds_and_rows_differ():
    model, row = tiny(), repetitive()[0]
    plain = Speculator(model, drafter="none")
    texts = [text for seed in SEEDS for text in generate(plain, [row, row], seed=seed, **options(1.3))]
    assert len({tuple(text) for text in texts}) == len(texts)


def test_a_draft_that_shares_the_noise_is_accepted_most():
    """`siblings="auto"` under match is keyed: the draft model draws with the target's own noise."""
    model, rows = tiny(), repetitive()
    rates = {}
    for siblings in ("auto", "keyed", "iid"):
        speculator = Speculator(model, drafter=make_drafter("draft-model", siblings=siblings), rule="match", shape="chain(5)")
        out = [speculator.generate(**padded([row]), seed=9, do_sample=True, max_new_tokens=24, top_k=0) for row in rows]
        rates[siblings] = sum(each.stats.accepted for each in out) / sum(each.stats.drafted for each in out)
    assert rates["auto"] == rates["keyed"] > rates["iid"]


@pytest.mark.nightly
@pytest.mark.parametrize("drafter", drafter_names())
@pytest.mark.parametrize("family", FAMILIES)
def test_many_seeds(family, drafter):
    model, rows = tiny(family), repetitive()
    speculator = Speculator(model, drafter=make_drafter(drafter, family), rule="match")
    for seed in range(30):
        assert generate(speculator, rows, seed=seed, **options(1.3)) == solo(family, seed, 1.3)
