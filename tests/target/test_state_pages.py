"""Models that can only verify chains keep keys and values in pages: texts are those without pages, and what rows and stored states share is
there once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from architectures import ARCHITECTURES, build
from cover import by_turns
from helpers import make_drafter

from foredraft import RowParameters, Speculator, TokenTree
from foredraft.backends.state_pages import InPages
from foredraft.models.pages import PAGE
from foredraft.target import Target

CHAINS = [name for name, entry in ARCHITECTURES.items() if entry.support == "chain"]
FAMILIES = [name for name in CHAINS if name not in ("mamba2", "rwkv")]
HYBRIDS = ["qwen3_next", "falcon_h1", "nemotron_h"]  # attention beside, in and behind layers with a state


def model_of(family):
    return build(family, ARCHITECTURES[family].implementations[0])


def text(length, seed=0):
    return [3 + (7 * i * i + 3 * seed * i + seed) % 100 for i in range(length)]


def check(cache):
    """Every page is held by those who say so, and by nobody else."""
    pool, states = cache.pages.pool, [state for some in cache.states._states.values() for state, _ in some.values()]
    rows, kept = (Counter(page for each in some for page in each.pages) for some in (cache.rows, states))
    assert pool.counts == [rows[page] + kept[page] for page in range(pool.made)]
    assert (pool.held, pool.cached, pool.shared) == (len(rows), len(kept.keys() - rows.keys()), sum(each > 1 for each in rows.values()))
    assert [bool(free) for free in pool._free] == [not count for count in pool.counts]


@torch.inference_mode()
def read(target, *texts):
    """The logits after new rows."""
    first = len(target.lengths)
    target.open(texts)
    return target.prefill(texts, first=first)


@torch.inference_mode()
def score(target, chain, kept):
    """The logits at a ``chain`` behind every row, of which ``kept`` tokens stay."""
    logits = target.score(TokenTree.from_chain(torch.tensor([chain] * len(target.lengths))))
    target.commit(None, [kept] * len(target.lengths))
    return logits


def close(got, wanted):
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@torch.inference_mode()
def right(target, got, ids):
    """``got`` is what one pass without a cache returns behind ``ids``."""
    whole = torch.tensor([list(ids)])
    wanted = target.model(input_ids=whole, attention_mask=torch.ones_like(whole), use_cache=False).logits[0, -1]
    assert (got - wanted).abs().max() <= 3e-4 * wanted.abs().max()


@pytest.fixture
def without_pages(monkeypatch):
    def switch():
        monkeypatch.setattr("foredraft.backends.rollback.in_pages", lambda memory, pages: 0)

    return switch


@pytest.mark.parametrize("family", by_turns(FAMILIES, 0, always=HYBRIDS))
def test_texts_and_logits_are_those_without_pages(family, without_pages):
    """Rows begin alike, wait for a budget, and all of them come twice."""
    base = text(140)
    prompts = [[*base, *text(7 * row, row)] for row in (0, 1, 1, 2)]
    chain = text(5, 3)

    def everything(**budget):
        model, found = model_of(family), []
        target = Target(model)
        logits = [read(target, *prompts), score(target, chain, 2), score(target, chain, 4), read(target, base[:100], prompts[2])]
        for sampled in (False, True):
            speculator = Speculator(model, make_drafter("ngram"), rule="match", shape="chain(3)", **budget)
            for _ in range(2):
                session, texts = speculator.session(), {}
                for row, prompt in enumerate(prompts):
                    session.add(prompt, RowParameters(max_new_tokens=20, do_sample=sampled, seed=(3, row)))
                while session.live:
                    for commit in session.step():
                        texts.setdefault(commit.slot, []).extend(commit.tokens)
                    if target.cache.pages.pool.made:
                        check(speculator.target.cache)
                found.append([texts[slot] for slot in sorted(texts)])
        return target, logits, found

    target, logits, texts = everything(cache_memory=f"{Target(model_of(family)).whole(500)[0]}B")
    assert "pages" not in target.reasons and target.cache.pages.pool.held
    check(target.cache)
    without_pages()
    target, wanted, wanted_texts = everything()
    assert "no layer" in target.reasons["pages"] and not target.cache.pages.pool.made
    for pair in zip(logits, wanted):
        close(*pair)
    assert texts == wanted_texts


@pytest.mark.parametrize("family", HYBRIDS)
def test_equal_prompts_are_on_the_same_pages(family):
    target, prompt = Target(model_of(family)), text(2 * PAGE + 20)
    pool = target.cache.pages.pool
    read(target, prompt, prompt, prompt)
    score(target, text(3, 1), 3)
    tables = [row.pages for row in target.cache.rows]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2] and len({table[2] for table in tables}) == 3
    assert (pool.held, pool.shared, pool.cached) == (5, 2, 0), "the first row and the stored state have the same last page"
    size = target.cache.pages.page_bytes
    assert target.pools[0].shared == 2 * size and target.pools[0].held == 3 * target.cache.memory.states(len(prompt) + 3) + 5 * size
    check(target.cache)
    target.compact([1])
    check(target.cache)
    assert (pool.held, pool.shared, pool.cached) == (3, 0, 1), "the last page of the first row; the third ended as it did"
    target.compact([])
    assert (pool.held, pool.cached) == (0, 3), "all three texts were the same"
    check(target.cache)
    target.release()
    assert not pool.made


@pytest.mark.parametrize("family", HYBRIDS)
def test_instructions_are_on_the_same_pages(family):
    """Where texts parted, a state is stored. The third row begins there, and the pages are not copied."""
    target, base = Target(model_of(family)), text(2 * PAGE + 20)
    prompts = [[*base, 100 + row, *text(15, row)] for row in range(4)]
    logits = read(target, *prompts)
    tables = [row.pages for row in target.cache.rows]
    assert tables[1][:2] == tables[2][:2] == tables[3][:2] and tables[0][:2] != tables[1][:2]
    check(target.cache)
    for got, ids in zip(logits, prompts):
        right(target, got, ids)
    for got, ids in zip(score(target, text(3, 1), 3), prompts):
        right(target, got[-1], [*ids, *text(3, 1)])


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_stored_state_stays_what_it_is(family):
    """Its row is taken back to before it, writes on, and leaves; then many others use pages."""
    target, prompt = Target(model_of(family)), text(PAGE + 30)
    read(target, prompt)
    target.rewind([20])
    target.cache.rows[0].key = "another"
    score(target, text(60, 5), 60)
    check(target.cache)
    target.compact([])
    read(target, *(text(100, seed) for seed in (7, 8, 9)))
    before = target.passes
    right(target, read(target, [*prompt, 9])[0], [*prompt, 9])
    assert target.passes == before + 1
    right(target, score(target, [4], 1)[-1, 0], [*prompt, 9, 4])
    check(target.cache)


@pytest.mark.parametrize("family", ["qwen3_next", "mpt"])
def test_pages_are_free_when_the_states_that_hold_them_are_gone(family):
    target, prompt = Target(model_of(family)), text(3 * PAGE)
    pool, states = target.cache.pages.pool, target.cache.states
    read(target, prompt)
    target.compact([])
    assert pool.cached == 3 and states.bytes == states._bytes + 3 * target.cache.pages.page_bytes > states._bytes
    states.limit = 0
    read(target, text(20, 4))
    assert len(states) == 1 and states.evicted == 1 and (pool.held, pool.cached) == (1, 0)
    check(target.cache)
    target.cache.share_no_more()
    assert not len(states) and states.bytes == 0 and pool.held == 1


def test_a_row_whose_pages_are_neighbours_is_handed_a_view(monkeypatch):
    target, update, views = Target(model_of("qwen3_next")), InPages.update, []

    def watched(layer, *given):
        keys, values = update(layer, *given)
        views.append(keys.untyped_storage().data_ptr() == target.cache.pages.layers[layer.index].keys.untyped_storage().data_ptr())
        return keys, values

    monkeypatch.setattr(InPages, "update", watched)
    read(target, text(3 * PAGE + 20))
    score(target, text(3, 1), 3)
    assert views == [True, True]
    read(target, text(20, 1))
    score(target, text(PAGE, 1), PAGE)
    assert views[2:] == [True, False, False], "each row has a page in front of its last one that is the other's"


def test_a_budget_holds_rows_that_share_and_not_as_many_that_do_not():
    prompt, parameters = text(6 * PAGE), RowParameters(max_new_tokens=4)
    plain = Target(model_of("qwen3_next"))
    size = plain.cache.pages.page_bytes
    most = plain.whole(8 * PAGE)[0] + 2 * (plain.cache.memory.states(1) + 2 * size)
    speculator = Speculator(model_of("qwen3_next"), "none", cache_memory=f"{most}B")
    session = speculator.session()
    session.add(prompt, RowParameters(max_new_tokens=40))
    session.step()
    assert session.fits([*prompt, 7], parameters) == "now" and session.fits(text(6 * PAGE, 1), parameters) == "later"
    for token in (7, 8):
        session.add([*prompt, token], parameters)
    session.step()
    assert len(session.rows) == 3 and session.memory.shared == 6 * size and session.memory.held <= most
    session.close()


def test_states_make_room_for_a_row_that_is_alone():
    """A text that grows takes memory of the states of those that have ended."""
    most = Target(model_of("qwen3_next")).whole(700)[0]
    session = Speculator(model_of("qwen3_next"), "none", cache_memory=f"{most}B").session()
    for each in range(6):
        session.add(text(60, each), RowParameters(max_new_tokens=1))
        while session.live:
            session.step()
    session.add(text(60, 7), RowParameters(max_new_tokens=560))
    while session.live:
        session.step()
        assert session.memory.held + session.memory.cached <= most
    assert session.memory.evicted
    session.close()


def test_a_draft_that_shares_pages_is_rewound():
    """A draft model takes back more tokens than a stored copy has read."""
    target, prompt = Target(model_of("zamba2")), text(PAGE + 10)
    read(target, prompt)
    with torch.inference_mode():
        for token in (5, 6, 7):
            target.advance(torch.tensor([token]))
        target.rewind([PAGE])
        logits = target.score(TokenTree.from_chain(torch.tensor([text(12, 4)])))
    right(target, logits[0, -1], [*prompt[:PAGE], *text(12, 4)])
    right(target, read(target, [*prompt, 9])[0], [*prompt, 9])
    check(target.cache)
