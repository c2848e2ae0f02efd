"""Attention over pages in models whose layers are their own: the logits are those of the model's own attention, whatever rows share."""

from __future__ import annotations

import copy

import pytest
import torch
from architectures import ARCHITECTURES, build
from cover import nightly_but
from encoder_decoders import build as build_sourced
from interrupts import InterruptedConfigs
from kernel_cases import DTYPES, needs_kernels
from kernel_cases import build as build_native
from paging import close, pair, read, text, through, wide

from foredraft import ConfigurationError, Speculator, TokenTree
from foredraft.backends import paged_attention
from foredraft.backends.paged_attention import attention_test
from foredraft.models.cache_sizes import in_words
from foredraft.models.paged_cache import PagedCache
from foredraft.models.pages import PAGE
from foredraft.target import Target

pytestmark = needs_kernels

FAMILIES = ("gemma2", "gemma3_text", "phi3", "gpt_neox", "gpt_oss", "qwen3_moe", "starcoder2", "mistral", "llama4_text", "gemma3n_text")


# -- the same logits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    nightly_but(
        {(name, DTYPES[turn % 2]) for turn, name in enumerate(FAMILIES)},
        [(name, dtype) for name in FAMILIES for dtype in DTYPES if name != "llama4_text" or dtype == torch.float32],  # its experts
    ),
)
def test_logits_are_those_of_the_models_own_attention(name, dtype):
    """Behind texts that outgrow windows and end in other pages."""
    targets = pair(wide(name, dtype))
    through(targets, [text(150, 1), text(63, 2), text(20, 3)])
    assert targets[0].backend.pages.calls > 0


@pytest.mark.parametrize("size", [16, 48, 80])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_any_multiple_of_16(size, dtype):
    through(pair(wide("gemma3_text", dtype, size=size)), [text(70, 1), text(5, 2)], seeds=(0,))


@pytest.mark.parametrize("family", ["mistral-window", "llama"])
def test_packed_layers_attend_over_pages(family):
    """On the kernels, with windows, and beside packed products."""
    model = build_native(family, torch.float32)
    other = copy.deepcopy(model)
    execution = "native" if family == "mistral-window" else "packed"
    paged, plain = Target(model, execution=execution), Target(other, execution="eager", test=False)
    assert isinstance(paged.cache, PagedCache), paged.reasons
    through([paged, plain], [text(150, 1), text(20, 3)])
    paged.close()


def test_rows_share_what_they_begin_with():
    base = text(150)
    paged, contiguous = pair(wide("gemma3_text"))
    through([paged, contiguous], [base, [*base[:140], 3, 4, 5], base[:80]], seeds=(0,))
    paged.reset()
    contiguous.reset()
    before = paged.layer_tokens[0]
    close(read(paged, [base]), read(contiguous, [base]))
    assert paged.layer_tokens[0] - before < PAGE, "a page of a text that is over is found again"


def test_a_row_has_the_same_bits_whatever_else_is_in_the_pass():
    model = wide("phi3")
    alone, among = Target(model, execution="eager"), Target(model, execution="eager")
    asked = [torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)]
    found = []
    for target, lengths in ((alone, [70]), (among, [9, 70, 130])):
        cache, pages = target.cache, target.backend.pages
        cache.open(lengths)
        tree = TokenTree.from_chain(torch.zeros(len(lengths), 3, dtype=torch.long))
        target.score(tree)
        row = lengths.index(70)
        generator = torch.Generator().manual_seed(5)
        for store in (cache.layers[0].keys, cache.layers[0].values):
            store[cache._store(0).tables[row]] = torch.randn(2, *store.shape[1:], generator=generator)
        with torch.inference_mode(), pages.in_use(cache):
            query, key, value = (torch.cat([each if at == row else each + at for at in range(len(lengths))]) for each in asked)
            found.append(pages.attended(query, *cache.update(key, value, 0), None, None)[row])
    assert torch.equal(*found)


@torch.inference_mode()
def test_filler_of_a_row_that_is_nan_reaches_nobody():
    """Two rows end with their pages, so that the filler of both has none."""
    targets = pair(wide("gpt_neox"))
    for target in targets:
        read(target, [text(62, 1), text(62, 2), text(20, 3)])
    valid = torch.tensor([[True] * 2 + [False] * 7] * 2 + [[True] * 9])
    chain = TokenTree.from_chain(torch.arange(9).expand(3, 9), valid=valid)
    hook = (
        targets[0]
        .model.get_input_embeddings()
        .register_forward_hook(lambda module, given, out: out.index_fill(0, torch.tensor([1]), torch.nan))
    )
    paged, plain = (target.score(chain) for target in targets)
    hook.remove()
    assert targets[0].backend.pages is not None and paged[1].isnan().all()
    for row, count in ((0, 2), (2, 9)):
        close(paged[row, :count], plain[row, :count])


def hooked(where):
    """A native model with a hook, so that its passes are no single call; and one without pages."""
    model = build_native("llama", torch.float32)
    other = copy.deepcopy(model)
    paged, plain = Target(model, execution="native", owned=True), Target(other, execution="eager", test=False)
    with torch.inference_mode():
        assert isinstance(paged.cache, PagedCache) and paged.backend.direct is not None
        model.get_submodule(where).register_forward_hook(lambda *given: None)
        assert paged.backend.pages is paged.backend.direct is None
    return paged, plain


@pytest.mark.parametrize("where", ["lm_head", "model.layers.1.mlp"])
def test_filler_of_a_row_that_is_nan_reaches_nobody_through_kernels_that_compute_it(where):
    """In one call for all layers, and in one for each."""
    paged, _ = targets = hooked(where)
    texts = [[token % 99 for token in text(length, seed)] for length, seed in ((62, 1), (62, 2), (20, 3))]
    valid = torch.tensor([[True] * 2 + [False] * 7] * 2 + [[True] * 9])
    tokens = torch.arange(9).repeat(3, 1)
    tokens[1] = 99
    with torch.inference_mode():
        for target in targets:
            read(target, list(map(list, texts)))
        paged.model.get_input_embeddings().weight[99] = torch.nan
        found, wanted = (target.score(TokenTree.from_chain(tokens, valid=valid)) for target in targets)
    assert found[1].isnan().all()
    for row, count in ((0, 2), (2, 9)):
        close(found[row, :count], wanted[row, :count])
    paged.close()


def test_layers_of_a_native_model_that_run_by_themselves_read_nothing_of_rows_that_are_gone():
    paged, _ = targets = hooked("model.layers.1.mlp")
    with torch.inference_mode():
        read(paged, [text(200, 9), text(100, 8)])
        for layer in paged.cache.written:
            for store in (layer.keys, layer.values):
                store[: paged.cache.stores[0].room] = torch.nan
        paged.reset()
        paged.cache.share_no_more()
        close(*(read(target, [text(150, 1), text(63, 2)]) for target in targets))
        for token in (5, 6):  # with the second one, the shorter row goes on in another page
            close(*(target.advance(torch.tensor([token, token])) for target in targets))
    paged.close()


# -- who has pages, and who has not ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("llama", {"size": 8}, "its heads have 8 numbers"),
        ("deepseek_v2", {}, "unequal sizes"),
        ("falcon", {}, "do not ask transformers' attention interface"),
        ("bloom", None, "adds a bias by position"),
    ],
)
def test_why_a_model_is_handed_its_keys(name, options, why):
    model = build(name, ARCHITECTURES[name].implementations[0]) if options is None else wide(name, **options)
    target = Target(model)
    assert isinstance(target.cache, PagedCache) and target.backend.pages is None and "pages" not in target.reasons
    price = f"{in_words(sum(target.page_bytes) // PAGE)} per token"
    assert why in target.reasons["paged_attention"] and price in target.reasons["paged_attention"]


@pytest.mark.parametrize(("name", "why"), [("mamba2", "recurrent state"), ("t5", "has an encoder")])
def test_why_a_model_has_no_pages(name, why):
    target = Target(build_sourced(name) if name == "t5" else build(name, "eager"))
    assert not isinstance(target.cache, PagedCache) and why in target.reasons["pages"]


def test_a_cache_that_counts_nothing_has_no_budget():
    with pytest.raises(ConfigurationError, match="cache_memory needs a cache in pages"):
        Target(wide("phi3"), execution="eager", test=False, cache_memory="1GiB")


def test_other_ways_to_make_passes_have_no_pages():
    assert "attention='flex' was asked for" in Target(wide("phi3"), attention="flex").reasons["pages"]
    assert "no comparison" in Target(wide("phi3"), test=False).reasons["pages"]


def test_the_model_is_left_as_it_was():
    model = wide("gemma2")
    before = dict(vars(model.config))
    target = Target(model, execution="eager")
    read(target, [text(20)])
    assert dict(vars(model.config)) == before
    target.backend.pages._configs = InterruptedConfigs(target.backend.pages._configs)
    with pytest.raises(KeyboardInterrupt):
        read(target, [text(20)])
    assert dict(vars(model.config)) == before and target.cache.reader is None


@torch.inference_mode()
def test_attention_weights_are_those_of_the_model():
    """Who asks for them gets the model's own attention, over keys and values gathered from the pages."""
    paged, contiguous = pair(wide("gemma3_text", how="eager"))
    through([paged, contiguous], [text(70, 1), text(5, 2)], seeds=(0,))
    calls, seen = paged.backend.pages.calls, []
    paged.model.config.output_attentions = True
    paged.model.model.layers[0].self_attn.register_forward_hook(lambda module, given, out: seen.append(out[1]))
    chain = TokenTree.from_chain(torch.tensor([[3, 4]]).expand(len(paged.lengths), -1))
    close(paged.score(chain), contiguous.score(chain))
    assert paged.backend.pages.calls == calls and len(seen) == 2 and all(each is not None for each in seen)


def test_a_budget_for_a_family_without_kernels():
    speculator = Speculator(wide("gemma2"), "prompt-lookup", cache_memory="1MiB")
    ids = torch.tensor([text(100)])
    out = speculator.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    again = Speculator(wide("gemma2"), "none", self_test=False)
    same = again.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    assert out.sequences.tolist() == same.sequences.tolist() and out.stats.memory.held > 0


# -- planted faults ---------------------------------------------------------------------------------------------------


def without_cap(self, *given):
    return ATTENDED(self, *given[:5], None, *given[6:])


def sinks_rolled(self, *given):
    return ATTENDED(self, *given[:6], given[6].roll(1))


def without_mask(self, query, key, value, mask, *given):
    return ATTENDED(self, query, key, value, None, *given)


ATTENDED = paged_attention.PagedAttention.attended


@pytest.mark.parametrize(("name", "fault"), [("gemma2", without_cap), ("gpt_oss", sinks_rolled), ("phi3", without_mask)])
def test_a_fault_is_found_when_a_target_is_built(name, fault, monkeypatch):
    monkeypatch.setattr(paged_attention.PagedAttention, "attended", fault)
    target = Target(wide(name), execution="eager")
    assert target.backend.pages is None and "differ" in target.reasons["paged_attention"]


def test_pages_of_another_row_are_found_when_a_target_is_built(monkeypatch):
    place = PagedCache.place

    def wrong(self, about, layer_idx=0):
        offset = place(self, about, layer_idx)
        about.table_stride = 0
        return offset

    monkeypatch.setattr(PagedCache, "place", wrong)
    target = Target(wide("phi3"), execution="eager")
    assert target.backend.pages is None and "differ" in target.reasons["paged_attention"]


def test_where_nothing_can_be_compared_there_are_no_pages():
    backend = Target(wide("phi3"), execution="eager", test=False).backend
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "cannot be compared" in attention_test(backend)
