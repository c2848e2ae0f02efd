"""Pages in the ways to make passes that a GPU has: the logits are those of a cache without pages, and rows share and grow as on a CPU.

Without a GPU, layers are traced and not compiled, a tape stands in for CUDA graphs, FlexAttention is not compiled, and paths of trees are
moved by tensor operations, as they are on a device. What needs a GPU is marked ``cuda``.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from architectures import ARCHITECTURES, build
from cover import nightly_but
from helpers import random_tree
from paging import close, read, stored, text, texts_of, wide
from tape import Tape
from tracing import trace

from foredraft import ConfigurationError, RowParameters, Speculator, TokenTree
from foredraft.backends import compilation, flex, native, paged_attention, recorder
from foredraft.backends.eager import Eager
from foredraft.backends.flex import Flexed
from foredraft.backends.graphs import PATIENCE, TRIALS, Recorded
from foredraft.drafters.draft_loops.recorded import RecordedLoop
from foredraft.drafters.draft_model import DraftModel
from foredraft.models.cache import Window
from foredraft.models.page_stores import Kind, PageStore, Places
from foredraft.models.paged_cache import PagedCache
from foredraft.models.pages import PAGE
from foredraft.target import Target

WAYS = {
    "eager": {"execution": "eager"},
    "compiled": {"execution": "compiled"},
    "graphs": {"execution": "graphs"},
    "flex": {"attention": "flex"},
}
MEMORY = "64MiB"
WARM = PATIENCE + TRIALS
FAMILIES = ["llama", "gemma3_text", "gpt_oss", "deepseek_v2", "gpt2"]
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TURNS = {("eager", "gpt2"), ("graphs", "gemma3_text"), ("flex", "gemma3_text"), ("flex", "gpt_oss")}


@pytest.fixture(autouse=True)
def as_on_a_gpu(request, monkeypatch):
    if request.node.get_closest_marker("cuda"):
        return
    monkeypatch.setattr(native, "refusal", lambda dtype: "there are none in this test")
    monkeypatch.setattr(PagedCache, "_movable", lambda self: [])
    monkeypatch.setattr(recorder, "recorder_for", lambda device: Tape())
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    Tape.clear()
    trace(monkeypatch)


def of(family):
    return build(family, ARCHITECTURES[family].implementations[0])


def pair(family, way, make=of):
    paged, plain = Target(make(family), **WAYS[way], cache_memory=MEMORY), Target(make(family), execution="eager", test=False)
    assert isinstance(paged.cache, PagedCache) and not isinstance(plain.cache, PagedCache), paged.reasons
    return paged, plain


def alike(found, wanted):
    if found.device.type == "cpu":
        close(found, wanted)
    else:
        tolerance = 1e-3 if found.dtype == torch.float32 else 8e-2
        assert (found.float() - wanted.float()).abs().max() <= tolerance * wanted.float().abs().max()


@torch.inference_mode()
def rounds(paged, plain, count, nodes=9):
    """A tree of which each row keeps another path, a tree level by level, a chain, and a token."""
    for seed in range(count):
        rows = len(plain.lengths)
        tree = random_tree(rows, nodes, seed)
        tree = TokenTree((tree.tokens % 100).to(plain.device), tree.parents.to(plain.device))
        paths = [tree.path(row, max(0, nodes - 1 - row - seed)) for row in range(rows)]
        kept = torch.tensor([path + [0] * (max(map(len, paths)) - len(path)) for path in paths], device=plain.device)
        alike(*(target.score(tree) for target in (paged, plain)))
        for first, last in ((0, 1), (1, nodes)):
            part = TokenTree(tree.tokens[:, :last], tree.parents[:, :last])
            alike(*(target.score(part, first=first) for target in (paged, plain)))
        for target in (paged, plain):
            target.commit(kept, [len(path) for path in paths])
        alike(*(target.score(TokenTree.from_chain(tree.tokens[:, :5])) for target in (paged, plain)))
        for target in (paged, plain):
            target.commit(None, [5 - row % 2 for row in range(rows)])
        alike(*(target.advance(tree.tokens[:, 0]) for target in (paged, plain)))


@pytest.mark.parametrize(("way", "family"), nightly_but(TURNS, [(way, family) for way in WAYS for family in FAMILIES]))
def test_logits_are_those_of_a_cache_without_pages(way, family):
    assert_alike(*pair(family, way), way, windows=family in ("gemma3_text", "gpt_oss"))


@torch.inference_mode()
def assert_alike(paged, plain, way, windows):
    """Rows of unequal lengths; one leaves, and another begins as one of them does."""
    base = text(150, 1)
    alike(*(read(target, [list(base), text(62, 2), text(20, 3)]) for target in (paged, plain)))
    count = WARM + 2 if way == "graphs" else 2
    rounds(paged, plain, count)
    for target in (paged, plain):
        target.compact([0, 2])
    before, joins = paged.layer_tokens[0], [*base[: PAGE + 7], *text(30, 9)]
    alike(*(read(target, [list(joins)]) for target in (paged, plain)))
    assert windows or paged.layer_tokens[0] - before == 30
    assert paged.cache.pool.shared > 0
    rounds(paged, plain, count)
    backend = paged.backend
    recorded = way == "graphs" or (way == "compiled" and plain.device.type == "cuda")
    assert type(backend) is (Recorded if recorded else {"flex": Flexed}.get(way, Eager))
    assert way != "graphs" or (backend.recordings.refused is None and backend.recordings.replays >= 8)
    assert way != "flex" or backend.flexed >= 8


@pytest.mark.parametrize("way", nightly_but({("eager",), ("graphs",), ("flex",)}, [(way,) for way in WAYS]))
@torch.inference_mode()
def test_what_others_have_written_reaches_nobody(way):
    """NaN on pages of a text that is over, and on those of another row."""
    paged, plain = pair("llama", way)
    read(paged, [text(200, 9), text(100, 8)])
    for layer in paged.cache.written:
        for held in (layer.keys, layer.values):
            held[:-1] = torch.nan
    paged.reset()
    paged.cache.share_no_more()
    for target in (paged, plain):
        read(target, [text(150, 1), text(62, 2)])
    rounds(paged, plain, WARM + 1 if way == "graphs" else 1)
    pages = paged.cache.tables[0]
    for layer in paged.cache.written:
        layer.keys[pages] = layer.values[pages] = torch.nan
    chain = TokenTree.from_chain(torch.tensor([[3, 4, 5]] * 2))
    for _ in range(WARM + 1):
        found, wanted = (target.score(chain) for target in (paged, plain))
        assert found[0].isnan().all()
        close(found[1], wanted[1])


@pytest.mark.parametrize("way", nightly_but({("eager",), ("graphs",)}, [(way,) for way in WAYS]))
def test_keyed_texts_within_a_budget_are_those_of_plain_decoding(way):
    assert_keyed_texts_alike(way, of)


def assert_keyed_texts_alike(way, make):
    """Rows are set aside, share, and join at any round."""
    base, free = text(30), Speculator(make("llama"), "none", self_test=False)
    prompts = [[*base, *text(5 * row, row)] for row in range(3)]
    parameters = [RowParameters(max_new_tokens=100, do_sample=True, seed=(7, row)) for row in range(3)]
    wanted = []
    for prompt, each in zip(prompts, parameters):
        wanted += texts_of(free.session(), [prompt], [each])
    page = sum(Target(make("llama"), cache_memory=MEMORY, execution="eager").page_bytes)
    tight = Speculator(make("llama"), "prompt-lookup", rule="match", shape="chain(3)", cache_memory=f"{5 * page}B", **WAYS[way])
    session = tight.session()
    assert texts_of(session, prompts, parameters) == wanted
    assert session.memory.set_aside > 0 and session.memory.held == 0 and session.memory.limit == 5


# -- compiled layers and recordings stay while rows grow ----------------------------------------------------------------


@torch.inference_mode()
def test_no_graph_is_compiled_once_a_target_is_built():
    paged, plain = pair("gemma3_text", "compiled")
    assert paged.backend.overrides.graphs == 4 and "copy" in paged.reasons["paged_attention"] and "pages" not in paged.reasons
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ((5,), (63, 3), (130, 70, 5), (300,)):
            for target in (paged, plain):
                read(target, [text(length, row) for row, length in enumerate(lengths)])
            rounds(paged, plain, 2)
            for target in (paged, plain):
                target.reset()
    assert paged.backend.overrides.graphs == 4


@torch.inference_mode()
def test_recordings_stay_while_rows_take_pages():
    target, plain = pair("llama", "graphs")
    texts = [text(40, 1), text(52, 2)]
    target.open([list(each) for each in texts], reserve=[240, 240])
    plain.open([list(each) for each in texts])
    close(*(each.prefill(texts, first=0) for each in (target, plain)))
    captures, pages = [], set()
    for step in range(180):
        tokens = torch.tensor([3 + step % 50, 7 + step % 90])
        close(target.advance(tokens), plain.advance(tokens))
        captures.append(target.backend.recordings.captures)
        pages.add(target.cache.pool.held)
    assert len(pages) >= 6 and captures[-1] == captures[WARM]
    assert target.backend.recordings.replays >= 180 - WARM and target.backend.recordings.refused is None


@torch.inference_mode()
def test_filler_goes_to_no_page_that_others_hold():
    """A row that was rewound still has a page in its table that another row shares; the filler of its bucket would lie there."""
    target, plain = pair("llama", "graphs")
    base = text(150, 1)
    for each in (target, plain):
        read(each, [list(base)])
        read(each, [[*base[:140], 5, 6]])
        each.rewind([38, 142])
    assert target.cache.tables[0][1] == target.cache.tables[1][1]
    before = [each.clone() for each in stored(target.cache, 1, 142)]
    chain = TokenTree.from_chain(torch.tensor([list(range(25))] * 2))
    for _ in range(WARM + 1):
        close(*(each.score(chain) for each in (target, plain)))
    assert target.backend.recordings.replays
    assert all(map(torch.equal, before, stored(target.cache, 1, 142)))


# -- planted faults: an entry of another row in a table -----------------------------------------------------------------


def of_another_row(way, monkeypatch):
    if way == "eager":
        locate = PageStore.locate

        def wrong(self, *given):
            found = locate(self, *given)
            return Places(found.pages, found.slots, found.table.roll(1, 0), found.begin)

        monkeypatch.setattr(PageStore, "locate", wrong)
    elif way == "compiled":
        pages = compilation.Shared.pages
        monkeypatch.setattr(compilation.Shared, "pages", lambda self, places: (*pages(self, places)[:2], pages(self, places)[2].roll(1, 0)))
    elif way == "graphs":
        until = PageStore.until
        monkeypatch.setattr(PageStore, "until", lambda self, *given: until(self, *given).roll(1, 0))
    else:
        true = flex.in_pages
        monkeypatch.setattr(flex, "in_pages", lambda mask, table, holds: true(mask, table, holds.roll(1, 0)))


@pytest.mark.parametrize("way", WAYS)
def test_an_entry_of_another_row_is_found_when_a_target_is_built(way, monkeypatch):
    of_another_row(way, monkeypatch)
    model = of("llama")
    with pytest.raises(ConfigurationError, match="differ"):
        Target(model, **WAYS[way], cache_memory=MEMORY)
    assert not any("forward" in vars(module) for module in model.modules())


# -- who has pages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [pytest.param("compiled", marks=pytest.mark.nightly), "graphs", "flex"])
def test_without_a_limit_there_are_no_pages(way):
    target = Target(of("llama"), **WAYS[way])
    assert not isinstance(target.cache, PagedCache) and not target.pools
    said = {"compiled": "its layers are compiled", "graphs": "its passes are recorded", "flex": "attention='flex' was asked for"}[way]
    assert target.reasons["pages"] == f"{said}; {paged_attention.ASK}"


@pytest.mark.parametrize("way", ["graphs", "flex"])
def test_reasons_say_what_is_copied(way):
    target = Target(of("llama"), **WAYS[way], cache_memory=0.1)
    assert "pages" not in target.reasons and "cop" in target.reasons["paged_attention"] and target.pools[0].limit > 0


@pytest.mark.parametrize("way", ["eager", "graphs"])
def test_a_draft_model_has_pages_where_its_target_has_them(way):
    made = Speculator(of("llama"), DraftModel(of("llama")), shape="chain(3)", rule="match", cache_memory=MEMORY, **WAYS[way])
    assert isinstance(made.drafter.info.draft_model.cache, PagedCache)
    session, plain = made.session(), Speculator(of("llama"), "none", self_test=False).session()
    parameters = [RowParameters(max_new_tokens=30, do_sample=True, seed=(7, row)) for row in range(2)]
    assert texts_of(session, [text(30), text(70, 1)], parameters) == texts_of(plain, [text(30), text(70, 1)], parameters)
    assert session.memory.held == 0


@pytest.mark.parametrize("shape", ["chain(3)", "product(2,2)"])
def test_whole_drafts_are_recorded_over_pages(shape):
    draft = DraftModel(of("llama"), execution="graphs")
    made = Speculator(of("llama"), draft, execution="graphs", shape=shape, rule="match", cache_memory=MEMORY)
    loop, recordings = draft._loops[-1], draft.model.backend.recordings
    assert isinstance(draft.model.cache, PagedCache) and isinstance(loop, RecordedLoop)
    session, plain = made.session(), Speculator(of("llama"), "none", self_test=False).session()
    parameters = [RowParameters(max_new_tokens=80, do_sample=True, seed=(7, row)) for row in range(2)]
    assert texts_of(session, [text(30), text(70, 1)], parameters) == texts_of(plain, [text(30), text(70, 1)], parameters)
    assert recordings.refused is None and recordings.replays > 0 and loop.drafts > 0
    assert session.stats.accepted > 0


@torch.inference_mode()
def test_a_recorded_draft_writes_over_no_page_that_others_hold():
    """It reads the token before the root again, which lies on another page where the root begins one."""
    draft = DraftModel(of("llama"), execution="graphs")
    made = Speculator(of("llama"), draft, execution="graphs", shape="chain(3)", rule="match", cache_memory=MEMORY)
    session, cache = made.session(), draft.model.cache
    for _ in range(2):
        texts_of(session, [text(PAGE)], [RowParameters(max_new_tokens=60)])
    page = next(page for page, node in cache.pool.prefixes._nodes.items() if node.ids == tuple(text(PAGE)))
    cache.layers[0].keys[page, :, -1] = 7.0
    before, drafts = cache.layers[0].keys[page].clone(), draft._loops[-1].drafts
    session.add(text(PAGE), RowParameters(max_new_tokens=60))
    for _ in range(2):
        session.step()
    assert draft._loops[-1].drafts == drafts + 1 and len(draft.model.lengths) == 1
    assert torch.equal(cache.layers[0].keys[page], before)


@torch.inference_mode()
def test_filler_of_ragged_prompts_takes_no_pages_where_attention_is_flex():
    model = of("llama")
    page = sum(Target(model, attention="flex", cache_memory=MEMORY).page_bytes)
    tight, plain = Target(model, attention="flex", cache_memory=f"{8 * page}B"), Target(model, execution="eager", test=False)
    base = text(2 * PAGE, 1)
    texts = [[*base, *text(10, 2)], text(300, 3)]
    for target in (tight, plain):
        read(target, [list(base)])
        target.reset()
    close(*(read(target, list(map(list, texts))) for target in (tight, plain)))
    assert tight.backend.flexed == 1 and tight.cache.pool.shared == 0 < tight.cache.pool.held == 8


def test_on_a_gpu_memory_that_was_never_used_counts_and_goes_to_another_kind():
    """Tensors on torch's ``meta`` device stand for those on a GPU."""
    cache = PagedCache([Kind(1, None, frozenset([0])), Kind(1, 100, frozenset([1]))], handed=True)
    cache.limit(40, 0)
    cache.fill()

    def read_on(rows, start, tokens):
        cache.enter(Window(0, rows, (start,) * rows, tokens))
        for layer in (0, 1):
            cache.update(*[torch.empty(rows, 2, tokens, 8, device="meta")] * 2, layer)
        cache.commit(None, [tokens] * rows)

    cache.reserve(10 * PAGE)
    cache.open([0] * 4)
    read_on(4, 0, 50)
    whole, window = cache.stores
    assert window.made == 4 < window.room
    assert cache.bytes == whole.room + window.room <= 40
    cache.compact([])
    assert cache.make_room([30, 4])
    cache.open([0])
    for start in range(0, 30 * PAGE, PAGE):
        read_on(1, start, PAGE)
        assert cache.bytes == whole.room + window.room <= 40
    assert whole.pool.held == 30


def test_a_draft_model_has_no_pages_beside_states_or_on_another_device():
    for target in (Target(of("gpt_neo"), execution="eager"), Target(of("llama"), execution="graphs", cache_memory=MEMORY)):
        assert target.pools
        if isinstance(target.cache, PagedCache):
            target.device = torch.device("cuda")
        draft = DraftModel(of("llama"), execution="graphs")
        draft.bind(target)
        assert not isinstance(draft.model.cache, PagedCache) and draft.page_bytes == 0


def test_a_pass_reads_nothing_back_from_the_device_of_the_cache():
    """Tensors on torch's ``meta`` device have no numbers."""
    cache, device = PagedCache([Kind(1, None, frozenset([0])), Kind(1, 100, frozenset([1]))], handed=True), torch.device("meta")
    cache.open([0, 0])
    for starts, nodes, counts in (((0, 0), 200, (200, 197)), ((200, 197), 70, None)):
        cache.enter(Window(0, 2, starts, nodes, counts=counts))
        new = torch.empty(2, 2, nodes, 8, device=device)
        found = [each for layer in (0, 1) for each in cache.update(new, new, layer)]
        assert {(each.device, each.shape) for each in found} == {(device, (2, 2, max(starts) + nodes, 8))}
        for store in cache.stores:
            places = store.places[device]
            assert {places.pages.device, places.slots.device, places.table.device} == {device}
        cache.commit(None if counts else torch.zeros(2, 3, dtype=torch.long, device=device), counts or (3, 1))


def test_on_a_gpu_pages_are_there_on_request():
    model = SimpleNamespace(parameters=lambda: [SimpleNamespace(device=torch.device("cuda"))])
    facts = SimpleNamespace(chains_only=None, sourced=False, model=model)
    assert "no report from a GPU" in paged_attention.refusal(facts, "auto", "auto", False)
    assert paged_attention.refusal(facts, "auto", "auto", True) is None
    assert not paged_attention.on_cpu(model) and paged_attention.on_cpu(of("llama"))


def test_a_model_that_changes_keeps_its_pages():
    target = Target(of("llama"), execution="graphs", cache_memory=MEMORY)
    with torch.no_grad():
        target.model.lm_head.weight.mul_(2)
    target.model.to(torch.bfloat16)
    read(target, [text(20)])
    assert isinstance(target.cache, PagedCache) and target.execution == "graphs" and target.pools[0].limit is not None


# -- on a GPU -----------------------------------------------------------------------------------------------------------


def on_gpu(dtype):
    return lambda family: wide(family).to("cuda", dtype)


@cuda
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("way", WAYS)
def test_on_a_gpu_logits_are_those_of_a_cache_without_pages(way, family, dtype):
    assert_alike(*pair(family, way, on_gpu(dtype)), way, windows=family == "gemma3_text")


@cuda
@pytest.mark.cuda
@pytest.mark.parametrize("way", WAYS)
def test_on_a_gpu_keyed_texts_within_a_budget_are_those_of_plain_decoding(way):
    assert_keyed_texts_alike(way, on_gpu(torch.float32))


@cuda
@pytest.mark.cuda
def test_on_a_gpu_there_are_no_pages_without_a_limit():
    target = Target(on_gpu(torch.float32)("llama"))
    assert not isinstance(target.cache, PagedCache) and "passes are recorded" in target.reasons["pages"]
