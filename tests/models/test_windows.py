"""Layers with a sliding window give pages back, and what is left is enough for every later tree; by the gathering path, which takes any
model."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from helpers import alone, generate, random_tree
from kernel_cases import MODELS, SIZES, needs_kernels
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

from foredraft import RowParameters, Speculator, TokenTree
from foredraft.admission import Admission
from foredraft.drafters.draft_model import DraftModel
from foredraft.models import windows
from foredraft.models.cache_sizes import LEEWAY, pages_kept
from foredraft.models.page_stores import GONE, Kind
from foredraft.models.paged_cache import PagedCache
from foredraft.models.pages import PAGE
from foredraft.models.windows import windows_of
from foredraft.target import Target

WINDOW = 100
CONFIGS = {
    "gemma3": Gemma3TextConfig(**{**SIZES, "sliding_window": WINDOW, "max_position_embeddings": 2048, "pad_token_id": None}),
    "mistral-window": copy.deepcopy(MODELS["mistral-window"]),
}
CONFIGS["gemma3"].layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS["mistral-window"].sliding_window, CONFIGS["mistral-window"].max_position_embeddings = WINDOW, 2048


def build(name):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation="sdpa").eval()


def targets(name, **options):
    """One whose cache is in pages, and one whose cache keeps everything."""
    model = build(name)
    paged, plain = (Target(model, execution="eager", test=False, **each) for each in (options, {"reuse_prefix": False}))
    paged.backend.cache = PagedCache(kinds(model))
    return paged, plain


def kinds(model):
    windows, page = windows_of(model), 2 * 2 * PAGE * 32 * 4
    layers = {window: frozenset(index for index, each in enumerate(windows) if each == window) for window in set(windows)}
    return [Kind(page * len(some), window, some) for window, some in layers.items()]


def text(length, seed=0):
    return [(7 * i * i + 3 * seed * i + seed) % 100 for i in range(length)]


@torch.inference_mode()
def read(target, texts, **options):
    first = len(target.lengths)
    target.open(texts, **options)
    return target.prefill(texts, first=first)


def close(got, wanted):
    assert (got - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def counted(target):
    """Every page of every kind is counted, and belongs to the right one."""
    cache = target.cache
    for store in cache.stores:
        pages = [page for table in store.tables for page in table if page != GONE]
        assert store.pool.held == len(set(pages))
        assert store.pool.counts == [pages.count(page) + store.pool._kept(page) for page in range(store.pool.made)]
    for store in cache.windows:
        assert len(store.pool._of) == len(store.pool._owner) == store.pool.held + store.pool.cached
        assert all(cache.pool._kept(store.pool._owner[page]) for page in store.pool._held)
        for row, table in enumerate(store.tables):
            owners = cache.tables[row]
            assert all(page == GONE or store.pool.of(owners[index]) == page for index, page in enumerate(table))


@pytest.mark.parametrize("name", list(CONFIGS))
def test_windows_are_found(name):
    assert windows_of(build(name)) == ([WINDOW, None, WINDOW] if name == "gemma3" else [WINDOW] * 3)


def test_a_size_that_no_mask_follows_is_no_window(monkeypatch):
    model = build("gemma3")
    monkeypatch.setitem(windows.SIZES, "full_attention", "sliding_window")
    model.config.layer_types = ["full_attention"] * 3
    assert windows_of(model) == [None] * 3


@needs_kernels
@pytest.mark.parametrize("execution", ["native", "eager"])
def test_a_window_as_wide_as_the_context_is_one(execution, monkeypatch):
    """Rotary positions go on behind max_position_embeddings, and so does the window."""
    monkeypatch.setattr(CONFIGS["mistral-window"], "max_position_embeddings", WINDOW)
    model = build("mistral-window")
    assert windows_of(model) == [WINDOW] * 3
    ids = text(3 * WINDOW)
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0, -1]
    close(read(Target(model, execution=execution), [ids])[0], wanted)


@pytest.mark.parametrize("execution", ["native", "eager"])
def test_layer_types_that_a_model_does_not_read(execution):
    """Its class takes one mask for all layers."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = LlamaConfig(**SIZES, layer_types=["full_attention"] * 3)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    expected = alone(model, text(20), max_new_tokens=8)
    speculator = Speculator(model, "prompt-lookup", shape="chain(3)", execution=execution)
    assert generate(speculator, [text(20)], max_new_tokens=8) == [expected]


@torch.inference_mode()
@pytest.mark.parametrize("name", list(CONFIGS))
def test_logits_are_those_of_a_cache_that_keeps_everything(name):
    paged, plain = targets(name, prefill_chunk=50)
    texts = [text(420), text(90, 1), text(7, 2), text(230, 3)]
    close(read(paged, texts), read(plain, texts))
    counted(paged)
    for seed in range(30):
        tree = random_tree(len(texts), 9, seed)
        tree = TokenTree(tree.tokens % 100, tree.parents)
        close(paged.score(tree), plain.score(tree))
        path = [[0] for _ in texts]
        for row, parents in enumerate(tree.parents.tolist()):
            while path[row][-1] in parents:
                path[row].append(parents.index(path[row][-1]))
        width = max(map(len, path))
        padded = torch.tensor([[*nodes, *[0] * (width - len(nodes))] for nodes in path])
        for each in (paged, plain):
            each.commit(padded, [len(nodes) if (seed + row) % 3 else 1 for row, nodes in enumerate(path)])
        counted(paged)
        if seed == 12:
            for each in (paged, plain):
                each.compact([0, 1, 3])
            texts = [texts[0], texts[1], texts[3]]
    for store in paged.cache.windows:
        for row, length in enumerate(paged.lengths):
            held = sum(page != GONE for page in store.tables[row])
            assert held <= -(-min(length, WINDOW + LEEWAY) // PAGE) + 2
    paged.reset()
    assert all(store.pool.held == 0 for store in paged.cache.stores)


@torch.inference_mode()
@pytest.mark.parametrize("back", [1, 40, LEEWAY, LEEWAY + 1, 300])
def test_rewinding(back):
    """As far as the leeway a row goes on where it is; further back it is read again."""
    paged, plain = targets("gemma3")
    for length in range(350, 350 + PAGE, 1 if back == LEEWAY else 7):
        for each in (paged, plain):
            each.reset()
            read(each, [text(length)])
            each.advance(torch.tensor([5]))
            each.rewind([length - back])
        assert paged.lengths == ([0] if paged.lengths[0] == 0 and back > LEEWAY else [length - back])
        again = [*text(length)[: length - back], 8, 9]
        close(paged.prefill([again], first=0), plain.prefill([again], first=0))
        paged._texts.live[0][:] = again  # what it holds now, for those that come after it
        counted(paged)
    assert back <= LEEWAY or paged.lengths == plain.lengths


@torch.inference_mode()
@pytest.mark.parametrize("over", [False, True], ids=["live", "over"])
def test_beginnings_are_shared_as_far_as_their_windows_are_there(over):
    paged, plain = targets("gemma3", prefill_chunk=64)  # windows move on while it is read
    base = text(400)
    read(paged, [base])
    if over:
        paged.reset()
    for length in (399, 330, 200, 64, 17):
        mine = base[:length] + text(9, seed=length)
        before = paged.layer_tokens[0]
        logits = read(paged, [mine])[-1:]
        plain.reset()
        close(logits, read(plain, [mine]))
        counted(paged)
        paged.compact(range(len(paged.lengths) - 1))
        paged.cache.windows[0].pool._evict(1)
        counted(paged)
    for again in range(3):
        for _page in list(paged.cache.windows[0].pool._held) if again == 0 else []:
            paged.cache.windows[0].pool._evict(1)  # nothing is left
        before = paged.layer_tokens[0]
        logits = read(paged, [[*base[:200], again, 2, 3]])[-1:]
        computed = paged.layer_tokens[0] - before
        assert computed <= 3 + PAGE if again else computed == 203, "what was given up is kept again once it has been computed"
        plain.reset()
        close(logits, read(plain, [[*base[:200], again, 2, 3]]))
        paged.compact(range(len(paged.lengths) - 1))
        counted(paged)


@torch.inference_mode()
@pytest.mark.parametrize("limits", [(14, 8), (10, 40)])
def test_what_belongs_to_a_page_goes_with_it(limits):
    paged, plain = targets("gemma3", prefill_chunk=64)
    for store, limit in zip(paged.cache.stores, limits):
        store.pool.limit = limit
    texts = [text(300, seed) for seed in range(7)]
    for mine in [*texts, texts[0], texts[5]]:
        logits = read(paged, [mine])
        plain.reset()
        close(logits, read(plain, [mine]))
        counted(paged)
        paged.reset()
        counted(paged)
        paged.cache.windows[0].pool.spare = 40
    assert paged.cache.pool.evicted and all(store.pool.made <= store.pool.limit for store in paged.cache.stores)


@torch.inference_mode()
def test_equal_prompts_of_one_call_share_their_pages():
    paged, plain = targets("gemma3", prefill_chunk=64)
    texts = [text(300)] * 3 + [[*text(300)[:250], 1, 2]]
    before = paged.layer_tokens[0]
    close(read(paged, texts), read(plain, texts))
    assert paged.layer_tokens[0] - before == 300 + 3 * 60  # the last three in one pass
    counted(paged)
    for seed in range(8):
        tree = random_tree(4, 9, seed)
        tree = TokenTree(tree.tokens % 100, tree.parents)
        close(paged.score(tree), plain.score(tree))
        for each in (paged, plain):
            each.commit(None, [3, 1, 2, 3])
    counted(paged)


@torch.inference_mode()
def test_a_page_that_others_hold_is_not_written_over():
    paged, plain = targets("gemma3")
    texts = [text(250), [*text(250), 1]]
    for each in (paged, plain):
        read(each, texts[:1])
        read(each, texts[1:])
        each.rewind([250, 200])
        each.score(TokenTree.from_chain(torch.tensor([[9] * 5] * 2)))
        each.commit(None, [1, 5])
    counted(paged)
    tree = TokenTree.from_chain(torch.tensor([[4] * 3] * 2))
    close(paged.score(tree), plain.score(tree))


def test_a_budget_is_for_all_kinds_together():
    cache = PagedCache(kinds(build("gemma3")))
    full, windowed = (store.kind.page_bytes for store in cache.stores)
    memory = 100 * cache.page_bytes
    cache.limit(memory, 0)
    limits = [store.pool for store in cache.stores]
    assert [pool.limit for pool in limits] == [100, 100] and windowed == 2 * full
    assert cache.make_room([100, 90]) and [pool.limit for pool in limits] == [100, 100], "there is room"
    assert cache.make_room([250, 10]) and sum(pool.limit * size for pool, size in zip(limits, (full, windowed))) <= memory
    assert limits[0].limit >= 250 and limits[1].limit >= 10
    before = [pool.limit for pool in limits]
    assert not cache.make_room([281, 10]) and [pool.limit for pool in limits] == before
    assert cache.make_room([0, 150]) and limits[1].limit == 150 and limits[0].limit == 0


@needs_kernels
def test_memory_moves_between_kinds_as_traffic_changes():
    """Short rows take as many pages of either kind, and a long row many of one; all the while no more memory is in use than is allowed."""
    model = build("gemma3")
    size = sum(each.page_bytes for each in kinds(model))
    memory = 20 * size
    how = {"execution": "eager", "rule": "match", "prefill_chunk": 64}
    speculator = Speculator(model, "none", cache_memory=f"{memory}B", **how)
    plain = Speculator(model, "none", reuse_prefix=False, **how)
    cache = speculator.target.cache
    for texts in ([text(60, seed) for seed in range(12)], [text(1400, 50)], [text(100, seed) for seed in range(60, 72)]):
        session, found = speculator.session(), {}
        slots = [session.add(each, RowParameters(max_new_tokens=20)) for each in texts]
        while session.live:
            for commit in session.step():
                found.setdefault(commit.slot, []).extend(commit.tokens)
            assert sum(store.pool.held * store.kind.page_bytes for store in cache.stores) <= memory
            assert cache.bytes <= memory * 1.1
        assert [found[slot] for slot in slots] == serve(plain, texts, 20, sampled=False)[0]


@torch.inference_mode()
def test_a_long_row_takes_a_fraction_of_what_full_layers_would():
    paged, _ = targets("gemma3", prefill_chunk=128)
    most = 0
    forward = paged.backend.forward

    def watched(given):
        nonlocal most
        found = forward(given)
        most = max(most, paged.cache.windows[0].pool.held)
        return found

    paged.backend.forward = watched
    read(paged, [text(1900)])
    assert most <= pages_kept(1900, WINDOW, 128) == 6 and paged.cache.pool.held == 30


@needs_kernels
@pytest.mark.parametrize("pages", [3, 4, 5])
def test_a_row_that_fills_the_memory_is_read_beside_what_others_left(pages):
    """Where all layers have windows, no other kind is short of pages before."""
    model = build("mistral-window")
    size = sum(each.page_bytes for each in kinds(model))
    speculator = Speculator(model, "none", execution="eager", cache_memory=f"{pages * size}B")
    plain = Speculator(model, "none", execution="eager", reuse_prefix=False)
    for last in range(3):
        mine = [*text(PAGE * pages - 15), *[last] * 4]
        assert serve(speculator, [mine], 5)[0] == serve(plain, [mine], 5)[0]


# -- whole sessions ---------------------------------------------------------------------------------------------------


def serve(speculator, texts, new=70, sampled=True):
    session = speculator.session()
    slots = {
        session.add(each, RowParameters(max_new_tokens=new, seed=(7, row), do_sample=sampled and bool(row % 2))): row
        for row, each in enumerate(texts)
    }
    found = [[] for _ in texts]
    while session.live:
        for commit in session.step():
            found[slots[commit.slot]] += commit.tokens
    return found, session.memory


@needs_kernels
@pytest.mark.parametrize("drafter", [pytest.param("prompt-lookup", marks=pytest.mark.nightly), "draft-model"])
def test_texts_are_those_of_rows_without_drafts_while_memory_is_short(drafter, monkeypatch):
    """A draft model has windows too, and takes back what it drafted."""
    model, texts = build("gemma3"), [text(150, seed) for seed in (1, 2)] + [text(150, 1)[:120] + text(60, seed) for seed in (3, 4)]
    wanted, _ = serve(Speculator(model, "none", execution="eager", reuse_prefix=False), texts)
    drafts = DraftModel(build("gemma3"), execution="eager") if drafter == "draft-model" else drafter
    few = f"{2 * sum(each.page_bytes * pages_kept(250, each.window, PAGE) for each in kinds(model))}B"
    how = {"execution": "eager", "rule": "match", "shape": "chain(3)", "prefill_chunk": 64}
    for memory, chance in (("auto", 0.0), (few, 0.0), ("auto", 0.2)):
        speculator, dice = Speculator(model, drafts, cache_memory=memory, **how), random.Random(5)
        assert isinstance(speculator.target.cache, PagedCache) and len(speculator.target.cache.windows) == 1
        if chance:
            monkeypatch.setattr(Admission, "excess", lambda self, rows: [row for row in rows if dice.random() < chance])  # noqa: B023
        found, held = serve(speculator, texts)
        assert found == wanted
        assert held.windows[0].held == held.held == 0 and (memory == "auto" or held.evicted + held.windows[0].evicted > 0)


@pytest.mark.parametrize("pages", [144, 150, 160, 174])
def test_pages_that_windows_have_moved_on_from_are_free_before_others_take_them(pages):
    """Rows that were just read hold what no later query of theirs sees, and others join before they have a pass."""
    model, texts = build("gemma3"), [text(900, seed) for seed in range(8)]
    unit = min(each.page_bytes for each in kinds(model))  # of a page of the one layer without a window
    wanted, _ = serve(Speculator(model, "none", execution="eager", reuse_prefix=False), texts, 20)
    speculator = Speculator(model, "none", execution="eager", rule="match", cache_memory=f"{pages * unit}B")
    assert serve(speculator, texts, 20)[0] == wanted


def test_a_prompt_is_read_in_pieces_whose_windows_fit_the_budget():
    """Else a prompt of 1,100 tokens would be said never to fit into a budget that holds it."""
    ids, memory = torch.tensor([text(1100)]), 12 * PAGE * 2 * 2 * 32 * 4 * 3
    speculators = [Speculator(build("gemma3"), "none", execution="native", cache_memory=each) for each in (f"{memory}B", "auto")]
    assert [each.target.prefill_chunk for each in speculators] == [128, 1024]
    found = [each.generate(ids, max_new_tokens=20, do_sample=False).sequences.tolist() for each in speculators]
    assert found[0] == found[1]
