"""Keys and values in pages: whatever rows share, each holds what it would hold alone; on models that the kernels run."""

from __future__ import annotations

import errno
import itertools
import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from cover import covered
from helpers import random_tree
from kernel_cases import DTYPES, TOLERANCE, build, needs_kernels

from foredraft import CacheMemoryError, RowParameters, Speculator, TokenTree
from foredraft.device import can_reserve, reserved
from foredraft.drafters.draft_model import DraftModel
from foredraft.models import page_stores
from foredraft.models.page_stores import GONE
from foredraft.models.pages import PAGE
from foredraft.target import Target

pytestmark = needs_kernels


def text(length: int, seed: int = 0) -> list[int]:
    return [(7 * i * i + 3 * seed * i + seed) % 100 for i in range(length)]


def opened(texts, dtype=torch.float32, **options):
    target = Target(build("qwen3", dtype), execution="native", test=False, **options)
    return target, read(target, texts)


@torch.inference_mode()
def read(target, texts, **options):
    """``[R, V]`` behind new rows."""
    first = len(target.lengths)
    target.open(texts, **options)
    return target.prefill(texts, first=first)


def held(target, row):
    """Keys and values of a row, layer by layer, ``[heads, L, size]``."""
    cache, length = target.cache, target.lengths[row]
    stores = [store for layer in cache.written for store in (layer.keys, layer.values)]
    return [store[cache.tables[row]].transpose(0, 1).flatten(1, 2)[:, :length].clone() for store in stores]


def close(got, wanted):
    assert (got.float() - wanted.float()).abs().max() <= TOLERANCE[got.dtype] * wanted.float().abs().max()


def assert_rows(target, texts, alone):
    """Every row of ``target`` holds what it would hold ``alone``, a target that shares nothing; and every page is counted."""
    assert target.lengths == [len(each) for each in texts]
    for row, each in enumerate(texts):
        alone.reset()
        read(alone, [each])
        for got, wanted in zip(held(target, row), held(alone, 0)):
            close(got, wanted)
    for store in target.cache.stores:
        pool, pages = store.pool, [page for table in store.tables for page in table if page != GONE]
        assert pool.held == len(set(pages)) and pool.shared == sum(pages.count(page) > 1 for page in set(pages))
        assert pool.counts == [pages.count(page) + pool._kept(page) for page in range(pool.made)]


# -- sharing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("over", [False, True], ids=["live", "over"])
def test_a_beginning_is_shared_at_every_offset_within_a_page(over, dtype):
    base = text(150)
    target, _ = opened([base], dtype)
    alone, _ = opened([[1]], dtype, reuse_prefix=False)
    for length in (16, *range(PAGE, 2 * PAGE + 1), 150):
        if over:
            target.reset()
        mine = base[:length] + text(9, seed=length)
        logits, row = read(target, [mine]), len(target.lengths) - 1
        alone.reset()
        close(logits, read(alone, [mine]))
        shared = set(target.cache.tables[row]) & set(target.cache.tables[0]) if not over else ()
        assert over or len(shared) == length // PAGE
        for got, wanted in zip(held(target, row), held(alone, 0)):
            close(got, wanted)
        if not over:
            target.compact([0])
    assert_rows(target, [base] if not over else [mine], alone)


def test_what_is_shared_is_not_computed_again():
    base = text(200)
    target, _ = opened([base])
    for over, length in ((False, 150), (True, 199)):
        if over:
            target.reset()
        before = target.layer_tokens[0]
        read(target, [base[:length] + [5] * 7])
        assert target.layer_tokens[0] - before == 7
    target.reset()
    before = target.layer_tokens[0]
    read(target, [base])  # the last token stays to be computed: its logits are wanted
    assert target.layer_tokens[0] - before == 1


def test_a_full_page_that_was_begun_by_another_text_is_shared_whole():
    target, _ = opened([text(70)])
    mine = text(70) + text(130, 1)
    read(target, [mine])
    target.compact([0])
    longer = [*mine, 3]
    alone, _ = opened([longer], reuse_prefix=False)
    read(target, [longer])
    for got, wanted in zip(held(target, 1), held(alone, 0)):
        close(got, wanted)


@torch.inference_mode()
def test_a_token_that_is_not_read_yet_is_not_shared():
    texts = [text(128), text(128) + [5] * 10]  # the last token of each is the root of the next tree
    target = Target(build("qwen3", torch.float32), execution="native", test=False)
    target.open(texts, unread=2)
    target.prefill([each[:-1] for each in texts], first=0)
    target.advance(torch.tensor([texts[0][-1], 5]))
    assert_rows(target, texts, opened([[1]], reuse_prefix=False)[0])


def test_equal_prompts_of_one_call_share_their_pages():
    target, logits = opened([text(150)] * 4)
    alone, wanted = opened([text(150)], reuse_prefix=False)
    for got in logits:
        close(got, wanted[0])
    assert target.cache.pool.held == 2 + 4  # two full pages together, and a partial one each
    assert_rows(target, [text(150)] * 4, alone)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
def test_trees_and_commits_behind_shared_pages(dtype):
    begin = text(100)
    texts = [begin + text(3, 1), begin + text(40, 2), begin, text(70, 3)]
    target, _ = opened(texts, dtype)
    alone, _ = opened([[1]], dtype, reuse_prefix=False)
    for seed in range(12):  # ends of pages are passed
        tree = random_tree(len(texts), 9, seed)
        tree = TokenTree(tree.tokens % 100, tree.parents)
        logits = target.score(tree)
        path = [[0] for _ in texts]
        for row, parents in enumerate(tree.parents.tolist()):
            while path[row][-1] in parents:
                path[row].append(parents.index(path[row][-1]))
        kept = [len(each) if (seed + row) % 3 else 1 for row, each in enumerate(path)]
        for row, (each, nodes) in enumerate(zip(texts, path)):
            alone.reset()
            close(logits[row, nodes[-1]], read(alone, [each + tree.tokens[row, nodes].tolist()])[0])
        width = max(map(len, path))
        target.commit(torch.tensor([[*nodes, *[0] * (width - len(nodes))] for nodes in path]), kept)
        texts = [each + tree.tokens[row, path[row][: kept[row]]].tolist() for row, each in enumerate(texts)]
        for row, each in enumerate(texts):
            target._texts.live[row][:] = each
        if seed in (3, 8):
            keep = [row for row in range(len(texts)) if row != 1]
            target.compact(keep)
            texts = [texts[row] for row in keep]
            assert_rows(target, texts, alone)
    assert_rows(target, texts, alone)
    target.reset()
    assert target.cache.pool.held == 0


@torch.inference_mode()
def test_a_page_that_others_hold_is_not_written_over():
    texts = [text(150), text(150)]
    target, _ = opened([texts[0]])
    read(target, [texts[1] + [1]])
    before = held(target, 0)
    target.rewind([150, 70])  # into a page that both hold
    target.score(TokenTree.from_chain(torch.tensor([[9] * 5] * 2)))
    target.commit(None, [1, 5])
    for got, wanted in zip(held(target, 0), before):
        assert torch.equal(got[:, :150], wanted)
    alone, _ = opened([[1]], reuse_prefix=False)
    assert_rows(target, [texts[0] + [9], texts[1][:70] + [9] * 5], alone)
    target.reset()  # and those that a text which is over has left behind
    read(target, [texts[0] + [9]])
    target.rewind([20])
    target.score(TokenTree.from_chain(torch.tensor([[8] * 5])))
    target.commit(None, [5])
    target.reset()
    close(read(target, [texts[0] + [3]]), read(opened([[1]], reuse_prefix=False)[0], [texts[0] + [3]])[-1:])


@pytest.mark.parametrize("execution", ["native", "eager"])
def test_isolated_rows_share_with_their_own_kind_alone(execution):
    target = Target(build("qwen3", torch.float32), execution=execution, test=False)
    read(target, [text(80)] * 2, isolations=["a", None])
    for over in (False, True):
        for isolation, missing in (("a", 1), (f"new {over}", 80), (None, 1)):
            if over:
                target.reset()
                read(target, [text(80)] * 2, isolations=["a", None])
            first, before = len(target.lengths), target.layer_tokens[0]
            read(target, [text(80)], isolations=[isolation])
            assert target.layer_tokens[0] - before == missing
            target.compact(range(first))


def test_nothing_is_shared_with_what_other_weights_have_computed():
    target, _ = opened([text(100)])
    name, weight = next((name, each) for name, each in target.model.named_parameters() if "v_proj.weight" in name)
    changed = {name: weight.detach() + 0.1}
    target.rewrite(changed)
    alone, _ = opened([[1]], reuse_prefix=False)
    alone.rewrite(changed)
    alone.reset()
    longer = [*text(100), 1]
    close(read(target, [longer])[0], read(alone, [longer])[0])


# -- passes without kernels -------------------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_that_is_watched_gets_its_keys_gathered(dtype):
    texts = [text(100) + text(30, 1), text(100) + text(3, 2), text(20, 3)]
    target, logits = opened(texts, dtype)
    watched = Target(build("qwen3", dtype), execution="native", test=False)
    seen = []
    watched.model.model.layers[0].register_forward_hook(lambda *given: seen.append(1))
    close(read(watched, texts), logits)
    tree = random_tree(3, 9, 1)
    tree = TokenTree(tree.tokens % 100, tree.parents)
    close(watched.score(tree), target.score(tree))
    assert len(seen) == 2
    for each in (target, watched):
        each.commit(None, [3, 1, 2])
    close(watched.advance(torch.tensor([4, 5, 6])), target.advance(torch.tensor([4, 5, 6])))


# -- memory -----------------------------------------------------------------------------------------------------------


def test_rows_hold_what_they_need():
    target, _ = opened([text(1000), *[text(40, seed) for seed in range(1, 8)]])
    assert target.cache.pool.held == 16 + 7
    target.compact([0, 1])
    assert target.cache.pool.held == 17 and target.cache.pool.cached == 6
    assert target.cache.bytes == target.cache.pool.made * sum(target.page_bytes)


def test_pages_come_back_from_texts_that_are_over():
    target, _ = opened([text(300)])
    made = target.cache.pool.made
    for seed in range(1, 60):
        target.reset()
        read(target, [text(300, seed)])
    pool = target.cache.pool
    assert pool.made <= made + pool.spare + 5 and pool.held == 5


@pytest.mark.parametrize("drafter", ["none", "draft-model"])
def test_without_reuse_nothing_is_kept_of_texts_that_are_over(drafter):
    drafts = DraftModel(build("llama", torch.float32), execution="native") if drafter == "draft-model" else drafter
    speculator = Speculator(build("qwen3", torch.float32), drafts, execution="native", shape="chain(3)", reuse_prefix=False)
    caches = [speculator.target.cache, *([drafts.model.cache] if drafter == "draft-model" else [])]
    for seed in range(3):
        session = speculator.session()
        for number in range(3):
            session.add(text(130, 10 * seed + number), RowParameters(max_new_tokens=70))
            session.step()
        finish(session)
        assert all(cache.pool.cached == 0 and cache.pool.held == 0 for cache in caches)
    assert all(cache.pool.made < 4 * 3 + 9 for cache in caches)


def finish(session):
    while session.live:
        session.step()


def test_an_interrupt_between_taking_pages_and_opening_rows_leaves_nothing_behind():
    """In the cache of the draft, which is not released then, because it has no rows yet."""
    drafter = DraftModel(build("llama", torch.float32), execution="native")
    session = Speculator(build("qwen3", torch.float32), drafter, execution="native", shape="chain(3)").session()
    cache = drafter.model.cache
    for interrupted in (False, True, False):
        session.add(text(130), RowParameters(max_new_tokens=10))
        if interrupted:
            cache.open = lambda lengths: exec("raise KeyboardInterrupt")
            with pytest.raises(KeyboardInterrupt):
                finish(session)
            del cache.open
        while session.live:
            session.step()
            assert len(cache.tables) == len(cache._keys) == len(cache.lengths) and not cache.stores[0].opening
            assert cache.pool.held == len({page for table in cache.tables for page in table})
    assert cache.pool.held == 0


def serve_more_and_more(session):
    """The texts of twenty rows, each longer than the one before."""
    found = {}
    for row in range(20):
        found[session.add(text(130 + 64 * row, row), RowParameters(max_new_tokens=40))] = []
        for commit in session.step():
            found[commit.slot] += commit.tokens
    while session.live:
        for commit in session.step():
            found[commit.slot] += commit.tokens
    return [*found.values()]


@contextmanager
def failing(monkeypatch, fails):
    """Allocations of pages fail where ``fails(how many there were before, pages)``."""
    calls = itertools.count()

    def allocating(function, error):
        def allocate(*shape, **options):
            if fails(next(calls), shape[1]):
                raise error
            return function(*shape, **options)

        return allocate

    with monkeypatch.context() as patch:
        empty = allocating(torch.empty, RuntimeError("DefaultCPUAllocator: can't allocate memory"))
        patch.setattr(page_stores, "torch", SimpleNamespace(**{**vars(torch), "empty": empty}))
        patch.setattr(page_stores, "reserved", allocating(reserved, OSError(errno.ENOMEM, "Cannot allocate memory")))
        yield calls


def with_drafter(drafter):
    drafts = DraftModel(build("llama", torch.float32), execution="native") if drafter == "draft-model" else drafter
    return Speculator(build("qwen3", torch.float32), drafts, execution="native", shape="chain(3)", rule="match")


@pytest.mark.skipif(not can_reserve(), reason="elsewhere nothing is reserved")
@pytest.mark.parametrize("at_once", [True, False])
def test_a_cache_that_is_reserved_moves_only_once_as_texts_come(at_once):
    speculator = with_drafter("prompt-lookup")
    wanted = serve_more_and_more(speculator.session())
    speculator.release()
    if at_once:
        speculator.target.reserve_cache()
    session, cache = speculator.session(), speculator.target.cache
    session.add(text(10), RowParameters(max_new_tokens=1))
    session.step()
    before = cache.allocations
    assert serve_more_and_more(session) == wanted
    assert (cache.allocations == before + 1) == at_once and cache.allocations > before
    assert cache.stores[0].allocated == cache.pool.made, "only pages that were used take memory"


@pytest.mark.skipif(not can_reserve(), reason="elsewhere nothing is reserved")
def test_a_cache_that_cannot_be_reserved_grows_as_it_would_without(monkeypatch):
    speculator = with_drafter("prompt-lookup")
    wanted = serve_more_and_more(speculator.session())
    speculator.release()
    speculator.target.reserve_cache()
    session, cache = speculator.session(), speculator.target.cache
    before = cache.allocations
    with failing(monkeypatch, lambda count, pages: pages > 300):
        assert serve_more_and_more(session) == wanted
    assert 150 <= cache.stores[0].room <= 300 and cache.allocations <= before + len(cache.layers) + 8 and not session.memory.set_aside


def test_nothing_is_reserved_where_linux_counts_what_programs_ask_for(monkeypatch, tmp_path):
    (tmp_path / "overcommit").write_text("2\n")
    for path in (tmp_path / "overcommit", tmp_path / "missing"):
        monkeypatch.setattr("foredraft.device.OVERCOMMIT", path)
        target = with_drafter("prompt-lookup").target
        target.reserve_cache()
        assert not any(store.at_once for store in target.cache.stores)


@pytest.mark.skipif(not can_reserve(), reason="elsewhere nothing is reserved")
def test_a_process_that_has_reserved_more_than_the_memory_of_the_machine_can_fork():
    held = reserved(2, 3 * os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE"), dtype=torch.uint8)
    held[1, -1] = 1
    child = os.fork()
    if not child:
        os._exit(0 if held[1, -1, -1] == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(("drafter", "at"), covered(["prompt-lookup", "draft-model"], (12, 18, 21, 26, 31, 36, 41, 46), ways=1))
def test_a_failed_allocation_of_more_than_is_needed_is_not_noticed(drafter, at, monkeypatch):
    monkeypatch.setattr("foredraft.session.PAUSE", 60.0)  # prompts are read whole, however busy the machine is
    speculator = with_drafter(drafter)
    wanted = serve_more_and_more(speculator.session())
    speculator.release()
    session = speculator.session()
    with failing(monkeypatch, lambda count, pages: count == at) as calls:
        assert serve_more_and_more(session) == wanted
    assert next(calls) > at and not session.memory.set_aside


@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft-model"])
def test_rows_wait_for_each_other_in_less_memory_than_was_promised(drafter, monkeypatch):
    speculator = with_drafter(drafter)
    wanted = serve_more_and_more(speculator.session())
    speculator.release()
    session = speculator.session()
    with failing(monkeypatch, lambda count, pages: pages > 31):
        assert serve_more_and_more(session) == wanted
    assert session.memory.set_aside > 1 and session.memory.limit <= 31


@pytest.mark.parametrize(("drafter", "fewest"), [("prompt-lookup", 0), ("draft-model", 6)])
def test_without_any_memory_there_is_an_error_and_the_next_row_is_served(drafter, fewest, monkeypatch):
    speculator = with_drafter(drafter)
    wanted = serve_more_and_more(speculator.session())
    speculator.release()
    session = speculator.session()
    with failing(monkeypatch, lambda count, pages: count >= fewest), pytest.raises(CacheMemoryError, match="set cache_memory to less"):
        serve_more_and_more(session)
    assert not session.rows
    assert serve_more_and_more(session) == wanted
