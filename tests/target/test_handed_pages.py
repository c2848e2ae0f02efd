"""Models that the kernels do not attend for are handed keys and values from pages: the logits are those of a cache without pages."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES, build
from cover import nightly_but
from paging import close, read, text, texts_of, through

from foredraft import RowParameters, Speculator, TokenTree
from foredraft.backends import native
from foredraft.models.cache import Window
from foredraft.models.paged_cache import PagedCache
from foredraft.models.pages import PAGE
from foredraft.target import Target

CASES = [(name, how) for name, entry in ARCHITECTURES.items() if entry.support == "tree" for how in entry.implementations]
CASES = [case for case in CASES if case[0] not in ("phi3_longrope", "llama4_tuned")]  # their text ends, or changes, before ours
NAMES = list(dict.fromkeys(name for name, _ in CASES))
TURNS = {(name, ARCHITECTURES[name].implementations[turn % len(ARCHITECTURES[name].implementations)]) for turn, name in enumerate(NAMES)}


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    monkeypatch.setattr(native, "refusal", lambda dtype: "there are none in this test")


def pair(model):
    handed, plain = Target(model, execution="eager"), Target(model, execution="eager", test=False)
    assert isinstance(handed.cache, PagedCache) and handed.backend.pages is None, handed.reasons
    assert not isinstance(plain.cache, PagedCache)
    return handed, plain


@pytest.mark.parametrize(("name", "how"), nightly_but(TURNS, CASES))
def test_logits_are_those_of_a_cache_without_pages(name, how):
    through(pair(build(name, how)), [text(150, 1), text(63, 2), text(20, 3)], seeds=(0, 1))


@pytest.mark.parametrize("name", ["deepseek_v3", "falcon", "gptj", "bloom", "gemma3_text"])
def test_rows_share_what_they_begin_with(name):
    base = text(150)
    handed, plain = pair(build(name, ARCHITECTURES[name].implementations[0]))
    through([handed, plain], [base, [*base[:140], 3, 4, 5], base[:80]], seeds=(0,))
    handed.reset()
    plain.reset()
    for length in (17, PAGE, PAGE + 5, 149):
        before = handed.layer_tokens[0]
        mine = [*base[:length], *text(9, length)]
        close(read(handed, [mine]), read(plain, [mine]))
        assert handed.layer_tokens[0] - before == len(mine) - length


@torch.inference_mode()
def test_a_row_whose_pages_are_neighbours_is_handed_a_view():
    handed, _ = pair(build("falcon"))
    read(handed, [text(130)])
    for _ in range(PAGE):
        handed.advance(torch.tensor([5]))
    store, layer = handed.cache.stores[0], handed.cache.layers[0]
    read(handed, [text(100, 1)])
    for first, last in ((0, 1), (1, 2), (0, 2)):
        lengths = handed.lengths[first:last]
        slots = torch.tensor(lengths)[:, None]
        places = store.locate(Window(first, last, tuple(lengths), 1), torch.arange(first, last)[:, None], slots)
        keys = places.read(layer.keys, max(lengths) + 1)
        assert (keys.untyped_storage().data_ptr() == layer.keys.untyped_storage().data_ptr()) == (last == first + 1)
        for row, (table, length) in enumerate(zip(store.tables[first:last], lengths)):
            assert torch.equal(keys[row, :, :length], layer.keys[table].transpose(0, 1).flatten(1, 2)[:, :length])


@torch.inference_mode()
def test_pages_of_a_row_alone_stay_neighbours_beside_those_of_texts_that_are_over():
    handed, _ = pair(build("falcon"))
    handed.cache.pool.limit = 6
    handed.cache.fill()
    read(handed, [text(3 * PAGE, 1), text(PAGE, 2), text(PAGE, 3), text(PAGE, 4)])
    handed.reset()
    assert handed.cache.pool.prefixes.match((None,), text(PAGE, 2), PAGE) == ([3], PAGE)  # now others have been used longer ago
    read(handed, [[*text(3 * PAGE, 1), 5]])  # a chat goes on
    for _ in range(2 * PAGE):
        handed.advance(torch.tensor([5]))
    assert handed.cache.tables == [[0, 1, 2, 3, 4, 5]]


@torch.inference_mode()
def test_what_others_have_written_reaches_nobody():
    """Neither numbers of a text that is over, on pages that were used again, nor those of filler."""
    handed, plain = pair(build("falcon"))
    read(handed, [text(200, 9), text(100, 8)])
    for layer in handed.cache.written:
        for store in (layer.keys, layer.values):
            store[:] = torch.nan
            store[handed.cache.stores[0].room] = 0
    handed.reset()
    handed.cache.share_no_more()
    texts = [text(150, 1), text(62, 2), text(20, 3)]
    close(read(handed, list(map(list, texts))), read(plain, list(map(list, texts))))
    valid = torch.tensor([[True] * 9, [True] * 2 + [False] * 7, [True] * 9])
    chain = TokenTree.from_chain(torch.arange(9).expand(3, 9), valid=valid)
    hook = handed.model.get_input_embeddings().register_forward_hook(
        lambda module, given, out: out.masked_fill(~valid[..., None], torch.nan)
    )
    handed.score(chain)  # the second row ends with its page, so that filler has none
    hook.remove()
    plain.score(chain)
    for target in (handed, plain):
        target.commit(None, [9, 2, 9])
    close(*(target.advance(torch.tensor([5, 6, 7])) for target in (handed, plain)))


@pytest.mark.parametrize("name", ["bloom", pytest.param("deepseek_v3", marks=pytest.mark.nightly)])
def test_keyed_texts_within_a_budget_are_those_of_plain_decoding(name):
    """Rows are set aside, share, and join at any round."""
    how = ARCHITECTURES[name].implementations[0]
    base, free = text(30), Speculator(build(name, how), "none", self_test=False)
    prompts = [[*base, *text(5 * row, row)] for row in range(3)]
    parameters = [RowParameters(max_new_tokens=120, do_sample=True, seed=(7, row)) for row in range(3)]
    wanted = []
    for prompt, each in zip(prompts, parameters):
        wanted += texts_of(free.session(), [prompt], [each])
    page = sum(Target(build(name, how), execution="eager").page_bytes)
    tight = Speculator(build(name, how), "prompt-lookup", rule="match", shape="chain(3)", cache_memory=f"{6 * page}B")
    session = tight.session()
    assert texts_of(session, prompts, parameters) == wanted
    assert session.memory.set_aside > 0 and session.memory.held == 0
