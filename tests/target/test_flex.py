"""FlexAttention computes what the model's own attention computes, for every family that takes trees or says why it does not.

Without a GPU torch runs it uncompiled, which evaluates the mask function and ignores the lists of blocks; those are compared with the mask
here, and one test compiles. What needs a GPU is marked ``cuda``.
"""

from __future__ import annotations

import copy
import shutil
from contextlib import nullcontext

import pytest
import torch
from architectures import ARCHITECTURES, build
from cover import nightly_but
from helpers import generate, make_drafter, prompts, random_tree, repetitive, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import InterruptedConfigs
from transformers import GPTJForCausalLM
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from foredraft import ConfigurationError, Speculator, TokenTree
from foredraft.backends import flex
from foredraft.backends.base import differs
from foredraft.backends.block_masks import BLOCK, queries_of, span_of, tree_mask
from foredraft.backends.eager import Eager
from foredraft.backends.flex import Flexed, kernel_options
from foredraft.models.cache import Window
from foredraft.models.masks import MaskBuilder, MaskInputs
from foredraft.target import Target

TOLERANCE = 1e-4  # of the largest logit
NAMES = [name for name, entry in ARCHITECTURES.items() if entry.support == "tree"]
LENGTHS = (30, 17, 22)
REFUSED = {  # every other family attends through FlexAttention
    "falcon": "TypeError",  # adds its mask to the scores, whatever it is
    "falcon_grouped": "TypeError",
    "xglm": "AttributeError",
    "bloom": "bias by position",
} | ({} if GPTJForCausalLM._supports_attention_backend else dict.fromkeys(("gptj", "codegen"), "TypeError"))  # before transformers 5.24
# Of each kind of positions, attention and cache one; the others are nightly.
ONE_OF_EACH = {"gemma3n_text", "gemma2", "gpt_oss", "mistral", "llama4_tuned", "deepseek_v3", "gpt_neox", "opt"}
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def untraced(monkeypatch):
    """Torch traces FlexAttention even where nothing compiles the trace, for each shape anew; here it runs as it is."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


def both(name: str, **options) -> tuple[Target, Target]:
    """The same tiny model through its own attention and through FlexAttention."""
    model = build(name, ARCHITECTURES[name].implementations[0])
    return Target(model, test=False, attention="model", **options), Target(model, attention="flex", **options)


def assert_same(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.shape == wanted.shape
    assert (found.float() - wanted.float()).abs().max() <= tolerance * wanted.float().abs().max()


@torch.inference_mode()
def assert_attends_alike(plain: Target, flexed: Target, nodes: int, tolerance: float = TOLERANCE, levels: bool = True) -> None:
    """Prefill in chunks, a tree, a tree level by level (``levels``), a chain; ragged rows, each keeping another path."""
    texts, device = prompts(LENGTHS), plain.device
    for target in (plain, flexed):
        target.open(texts)
    assert_same(flexed.prefill(texts, first=0), plain.prefill(texts, first=0), tolerance)
    ends = (nodes - 1, nodes - 2, 1)
    tree = random_tree(3, nodes, 1)
    tree = TokenTree(tree.tokens.to(device), tree.parents.to(device))
    paths = [tree.path(row, end) for row, end in enumerate(ends)]
    width = max(map(len, paths))
    kept = torch.tensor([path + [0] * (width - len(path)) for path in paths], device=device)
    before = flexed.backend.flexed
    assert_same(flexed.score(tree), plain.score(tree), tolerance)
    for target in (plain, flexed):
        target.commit(kept, [len(path) for path in paths])
    for first, last in ((0, 1), (1, 4), (4, nodes)) if levels else ():
        part = TokenTree(tree.tokens[:, :last], tree.parents[:, :last])
        assert_same(flexed.score(part, first=first), plain.score(part, first=first), tolerance)
    for target in (plain, flexed) if levels else ():
        target.commit(None, (1, 1, 2))
    chain = TokenTree.from_chain(tree.tokens[:, :5])
    assert_same(flexed.score(chain), plain.score(chain), tolerance)
    assert flexed.backend.flexed - before == (5 if levels else 2)
    for target in (plain, flexed):
        target.reset()


# -- every family -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", nightly_but({(name,) for name in ONE_OF_EACH}, [(name,) for name in NAMES if name not in REFUSED]))
def test_every_other_family_attends_as_it_did(name, untraced):
    plain, flexed = both(name, prefill_chunk=16)
    assert type(plain.backend) is Eager and plain.reasons.get("flex") == "attention='model' was asked for"
    assert flexed.reasons.get("flex") is None
    assert_attends_alike(plain, flexed, nodes=9, levels=False)


@pytest.mark.parametrize(
    "name", ["llama", "gemma3_text", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gpt2", "llama4_text"))]
)
def test_a_tree_of_several_words_of_ancestors(name, untraced):
    plain, flexed = both(name)
    assert_attends_alike(plain, flexed, nodes=131)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_can_not_is_refused_with_the_reason(name, untraced):
    model = build(name, ARCHITECTURES[name].implementations[0])
    with pytest.raises(ConfigurationError, match=f"{type(model).__name__}.*FlexAttention: .*{REFUSED[name]}.*use attention='auto'"):
        Target(model, attention="flex")
    assert type(Target(model).backend) is Eager


@pytest.mark.parametrize("name", ["qwen3_next", "gpt_neo", "rwkv"])
def test_a_model_that_takes_chains_only_keeps_its_attention(name):
    model = build(name, ARCHITECTURES[name].implementations[0])
    with pytest.raises(ConfigurationError, match=r"(recurrent state|cache slots).*use attention='auto'"):
        Target(model, attention="flex")
    assert type(model).__name__ in Target(model).reasons.get("flex")


@torch.inference_mode()
@pytest.mark.parametrize("lengths", [(20,), (20, 20)])
def test_chains_behind_prefixes_of_one_length(lengths, untraced):
    """Without a prefix and for single tokens nothing is masked, and the model's own attention is used."""
    plain, flexed = both("mistral")
    texts = prompts(lengths)
    for target in (plain, flexed):
        target.open(texts)
    assert_same(flexed.prefill(texts, first=0), plain.prefill(texts, first=0))
    assert flexed.backend.flexed == 0
    for nodes, passes in ((1, 0), (4, 1), (17, 2)):
        chain = TokenTree.from_chain(torch.arange(3, 3 + nodes).expand(len(lengths), nodes))
        assert_same(flexed.score(chain), plain.score(chain))
        assert flexed.backend.flexed == passes


def test_auto_is_the_model_s_own_attention():
    target = Target(tiny(), attention="auto")
    assert type(target.backend) is Eager and "no report from a GPU" in target.reasons["flex"]


def test_an_unknown_attention_is_refused():
    with pytest.raises(ConfigurationError, match="unknown attention 'flash'; choose auto, model, flex"):
        Target(tiny(), attention="flash")


def test_it_is_not_used_with_packed_weights():
    with pytest.raises(ConfigurationError, match="execution='packed' was asked for; use execution='eager'"):
        Target(build("llama"), attention="flex", execution="packed")


@torch.inference_mode()
def test_layers_that_attend_otherwise_are_found(monkeypatch):
    """A model that computes something else, and one that never asks the attention interface."""
    true = flex.kernel

    def doubled(query, *others):
        return true(2 * query, *others)

    monkeypatch.setattr(flex, "kernel", doubled)
    with pytest.raises(ConfigurationError, match="logits differ from those of an eager pass by"):
        Target(tiny(), attention="flex")
    monkeypatch.setattr(flex, "kernel", true)
    own = MaskBuilder(tiny().config, "sdpa", torch.float32)
    monkeypatch.setattr(Flexed, "in_use", lambda self: nullcontext())
    monkeypatch.setattr(Flexed, "masks", lambda self, tree, window, positions: own(MaskInputs(tree, window, positions), self.cache))
    with pytest.raises(ConfigurationError, match="layers do not ask transformers' attention interface"):
        Target(tiny(), attention="flex")


@torch.inference_mode()
def test_a_layer_that_makes_its_own_mask_fails_loudly(monkeypatch):
    monkeypatch.setattr(Flexed, "masks", lambda self, tree, window, positions: None)
    with pytest.raises(ConfigurationError, match="a pass failed with AttributeError"):
        Target(tiny(), attention="flex")
    arguments = [torch.zeros(1, 2, 3, 8)] * 3
    with pytest.raises(NotImplementedError, match="a layer asks for Tensor as a mask"):
        flex.attend(tiny().model.layers[0].self_attn, *arguments, torch.zeros(1, 1, 3, 3))
    where = tree_mask(random_tree(1, 3, 1), Window(0, 1, (0,), 3), torch.zeros(1, 3))
    for option in ({"dropout": 0.1}, {"position_bias": torch.zeros(1)}):
        with pytest.raises(NotImplementedError, match=r"dropout|bias by position"):
            flex.attend(tiny().model.layers[0].self_attn, *arguments, where.whole, **option)


@pytest.mark.parametrize(("dtype", "wrong"), [(torch.float32, 1), (torch.bfloat16, 5)])
def test_a_few_nodes_may_be_routed_otherwise_in_half_precision(dtype, wrong):
    """Rounding may choose other experts for a node; a wrong mask or scale shows at most nodes."""
    model = build("llama").to(dtype)
    expected = torch.ones(2, 8, 4, dtype=dtype)
    for count in range(8):
        found = expected.clone()
        found[0, :count] = 3
        assert (differs(model, found, expected) is not None) == (count >= wrong)


# -- the model and its text ---------------------------------------------------------------------------------------------


def grouped_sizes(target: Target, texts: list[list[int]]) -> list[tuple[int, int, int]]:
    """Heads of the queries and of the keys that the kernel is given in a pass over a tree."""
    sizes = []
    true = flex.kernel

    def watched(query, key, value, *others):
        sizes.append((query.shape[1], key.shape[1], value.shape[1]))
        return true(query, key, value, *others)

    target.open(texts)
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        target.prefill(texts, first=0)
        patch.setattr(flex, "kernel", watched)
        target.score(random_tree(len(texts), 5, 1))
    return sizes


def test_grouped_keys_are_not_repeated():
    sizes = grouped_sizes(both("llama")[1], prompts(LENGTHS))
    assert sizes and set(sizes) == {(4, 2, 2)}


@torch.inference_mode()
def test_the_model_is_left_as_it_was():
    model = build("gemma3_text")
    before = copy.deepcopy(vars(model.config))
    target = Target(model, attention="flex")
    target.open(prompts((20, 9)))
    target.prefill(prompts((20, 9)), first=0)
    during = []
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: during.append(model.config._attn_implementation))
    target.score(random_tree(2, 5, 1))
    handle.remove()
    assert during == ["foredraft_flex"]
    assert vars(model.config) == before
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target.score(random_tree(2, 5, 1))
    handle.remove()
    assert vars(model.config) == before and model.config._attn_implementation == "sdpa"
    target.backend._configs = InterruptedConfigs(target.backend._configs)
    with pytest.raises(KeyboardInterrupt):
        target.score(random_tree(2, 5, 1))
    assert vars(model.config) == before


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_the_text_of_a_seed_is_the_same(name):
    rows = repetitive()
    texts = {}
    for attention in ("model", "flex"):
        drafter = make_drafter("draft-model", name)
        speculator = Speculator(tiny(name), drafter=drafter, rule="match", shape="product(2,2,1)", attention=attention)
        texts[attention] = [
            generate(speculator, rows, do_sample=True, temperature=1.1, max_new_tokens=8, seed=5),
            generate(speculator, rows[:1], max_new_tokens=8),
        ]
        assert isinstance(speculator.target.backend, Flexed) == (attention == "flex")
    assert speculator.target.backend.flexed > 0
    assert texts["flex"] == texts["model"]


# -- the mask -----------------------------------------------------------------------------------------------------------


@st.composite
def passes(draw) -> tuple[TokenTree, Window, torch.Tensor]:
    """A tree per row behind ragged prefixes, part of which earlier passes may have written; or chains."""
    rows, nodes = draw(st.integers(1, 3)), draw(st.integers(1, 150))
    before = draw(st.integers(0, nodes - 1))
    starts = tuple(draw(st.lists(st.integers(0, 600), min_size=rows, max_size=rows)))
    window = Window(0, rows, tuple(start + before for start in starts), nodes - before, before)
    if draw(st.booleans()):
        tree = TokenTree.from_chain(torch.zeros(rows, nodes, dtype=torch.long))
    else:
        reach = draw(st.sampled_from([1, 3, nodes]))  # how far back a parent may lie
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        node = torch.arange(nodes).expand(rows, nodes)
        back = 1 + (torch.rand(rows, nodes, generator=generator) * node.clamp(max=reach)).long().clamp(max=reach - 1)
        parents = (node - back).clamp(min=0)
        parents[:, 0] = -1
        tree = TokenTree(torch.zeros_like(parents), parents)
    return tree, window, torch.tensor(starts)[:, None] + tree.depths


def blocks_of(counts: torch.Tensor, indices: torch.Tensor, row: int, block: int) -> list[int]:
    return indices[row, 0, block, : counts[row, 0, block]].tolist()


@settings(max_examples=60, deadline=None)
@given(passes(), st.sampled_from([None, 1, 5, 200]))
def test_bits_say_what_the_boolean_mask_says(drawn, width):
    tree, window, positions = drawn
    where = tree_mask(tree, window, positions)
    wanted = MaskInputs(tree, window, positions)
    visible = wanted.visible
    mask = where.whole
    if width is not None:
        function = sliding_window_causal_mask_function(width)
        mask = where.windowed(function)
        row = torch.arange(window.rows)[:, None, None]
        visible = visible & function(row, row * 0, wanted.queries[:, :, None], wanted.keys[:, None])
    assert mask.shape == (window.rows, 1, queries_of(window.nodes), span_of(window.width))
    rows, slots = torch.arange(window.rows)[:, None, None], torch.arange(mask.shape[3])[None, None]
    found = mask.mask_mod(rows, rows * 0, torch.arange(mask.shape[2])[None, :, None], slots).expand(mask.shape[0], -1, -1)
    assert torch.equal(found[:, : window.nodes, : window.width], visible)
    assert not found[:, : window.nodes, window.width :].any()
    for row in range(window.rows):
        for block in range(-(-window.nodes // BLOCK)):
            seen = found[row, BLOCK * block : min(BLOCK * (block + 1), window.nodes)].unflatten(1, (-1, BLOCK))
            full = blocks_of(mask.full_kv_num_blocks, mask.full_kv_indices, row, block)
            partial = blocks_of(mask.kv_num_blocks, mask.kv_indices, row, block)
            assert len(set(full + partial)) == len(full) + len(partial), "a block that is listed twice is counted twice"
            assert all(seen[:, slot].all() for slot in full)
            assert set(seen.any(2).any(0).nonzero()[:, 0].tolist()) <= set(full + partial)


def test_blocks_outside_a_window_and_behind_the_tree_are_not_read():
    tree = random_tree(1, 9, 1)
    window = Window(0, 1, (1000,), 9)
    where = tree_mask(tree, window, 1000 + tree.depths)
    whole, narrow = where.whole, where.windowed(sliding_window_causal_mask_function(100))
    assert whole.full_kv_num_blocks.tolist() == [[[7]]] and blocks_of(whole.kv_num_blocks, whole.kv_indices, 0, 0) == [7]
    assert narrow.full_kv_num_blocks.tolist() == [[[0]]] and blocks_of(narrow.kv_num_blocks, narrow.kv_indices, 0, 0) == [7]
    wider = where.windowed(sliding_window_causal_mask_function(300))
    assert blocks_of(wider.full_kv_num_blocks, wider.full_kv_indices, 0, 0) == [6]
    assert blocks_of(wider.kv_num_blocks, wider.kv_indices, 0, 0) == [5, 7]
    assert where.windowed(causal_mask_function).full_kv_num_blocks.tolist() == [[[7]]]


def test_few_shapes_serve_many_rounds():
    assert [queries_of(nodes) for nodes in (1, 16, 17, 64, 65, 1024)] == [16, 16, 32, 64, 128, 1024]
    assert [span_of(width) for width in (1, 512, 513, 8192, 8193, 20000)] == [512, 512, 1024, 8192, 12288, 20480]
    assert all(span_of(width) >= width and span_of(width) % BLOCK == 0 for width in range(1, 40000, 7))


@pytest.mark.parametrize("queries", [16, 32, 64])
@pytest.mark.parametrize("shared", [1, 2, 8, 64, 128])
def test_tiles_fit_the_kernel_that_splits_the_keys(queries, shared):
    """What its template asks for: whole groups, a divisor of the mask's blocks, 16 rows or more, no more than the registers hold."""
    tile = kernel_options(queries, 2 * shared, 2)["BLOCK_M"]
    assert tile % shared == 0 and BLOCK % tile == 0 and 16 <= tile <= max(64, shared)
    assert kernel_options(128, 8, 8) is None and kernel_options(16, 6, 2) is None


# -- compiled -----------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@torch.inference_mode()
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_on_a_cpu_it_reads_the_right_blocks():
    """A kernel that reads only the blocks listed: prefixes of several blocks, a window, other trees and lengths in one shape."""
    model = build("mistral")
    model.config.sliding_window = 200
    plain, target = Target(model, test=False), Target(model, test=False)
    target.backend = Flexed(target.backend.facts, {}, compiled=True)
    texts = prompts((400, 130))
    for each in (plain, target):
        each.open(texts)
        each.prefill(texts, first=0)
    for seed in range(3):
        tree = random_tree(2, 12, seed)
        assert_same(target.score(tree), plain.score(tree))
        for each in (plain, target):
            each.commit(None, (1, 2))
    assert target.backend.flexed == 3


@torch.inference_mode()
def test_shapes_beyond_what_torch_compiles_attend_as_the_model_does(monkeypatch):
    from torch._dynamo.exc import FailOnRecompileLimitHit

    def refused(*given):
        raise FailOnRecompileLimitHit("Hard failure due to fullgraph=True")

    monkeypatch.setattr(flex, "compiled_kernel", lambda: refused)
    plain, target = Target(tiny(), test=False), Target(tiny(), test=False)
    target.backend = Flexed(target.backend.facts, {}, compiled=True)
    texts, tree = prompts(LENGTHS), random_tree(3, 9, 1)
    for each in (plain, target):
        each.open(texts)
        each.prefill(texts, first=0)
    assert_same(target.score(tree), plain.score(tree))
    assert target.backend.flexed == 0 and "no more shapes" in target.reasons["flex"]
    for each in (plain, target):
        each.commit(None, (1, 2, 1))
    assert_same(target.score(tree), plain.score(tree))


# -- on a GPU -----------------------------------------------------------------------------------------------------------

HEADS = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 16384}


def on_gpu(name: str, dtype: torch.dtype, **options):
    """A small model with heads that the compiled kernel takes: 16 numbers at least."""
    import transformers

    cls = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "gemma2": "Gemma2ForCausalLM", "gpt_oss": "GptOssForCausalLM"}[
        name
    ]
    made = getattr(transformers, cls)
    how = ARCHITECTURES[name].implementations[0]
    config = made.config_class(vocab_size=128, intermediate_size=256, num_hidden_layers=2, attn_implementation=how, **(HEADS | options))
    torch.manual_seed(0)
    return made(config).to("cuda", dtype).eval()


FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 12},
    "gemma2": {"sliding_window": 12, "query_pre_attn_scalar": 32},
    "gpt_oss": {"sliding_window": 12, "num_local_experts": 2, "num_experts_per_tok": 2},  # no router to flip
}


@cuda
@pytest.mark.cuda
@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", torch.float32), ("llama", torch.float16), *((each, torch.bfloat16) for each in FAMILIES)]
)
def test_compiled_on_a_gpu_it_attends_as_the_model_did(name, dtype):
    torch._dynamo.reset()  # variants of earlier tests would count against its limit
    flex.compiled_kernel.cache_clear()
    tolerance = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
    model = on_gpu(name, dtype, **FAMILIES[name])
    plain, flexed = Target(model, test=False, attention="model"), Target(model, attention="flex")
    assert flexed.backend.compiled and flexed.reasons.get("flex") is None
    for nodes in (9, 70, 131):  # both kernels, and several words of ancestors
        assert_attends_alike(plain, flexed, nodes, tolerance)


@cuda
@pytest.mark.cuda
@pytest.mark.parametrize("shared", [1, 3, 8])
def test_compiled_groups_of_any_size(shared):
    model = on_gpu("llama", torch.float32, hidden_size=64 * shared, num_attention_heads=2 * shared)
    plain, flexed = Target(model, test=False, attention="model"), Target(model, attention="flex")
    assert_attends_alike(plain, flexed, 40, 1e-3)


@cuda
@pytest.mark.cuda
def test_compiled_keys_are_not_repeated():
    """One layer's repeated keys of 8 heads would be 4 times what the cache holds of it; the kernel's sums take about as much as that."""
    model = on_gpu("llama", torch.bfloat16)
    target = Target(model, attention="flex")
    texts = prompts((8000,), vocabulary=128)
    tree = random_tree(1, 16, 1)
    tree = TokenTree(tree.tokens.cuda(), tree.parents.cuda())
    target.open(texts)
    with torch.inference_mode():
        target.prefill(texts, first=0)
        target.score(tree)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        target.score(tree)
    assert torch.cuda.max_memory_allocated() - before < 2 * target.cache.bytes / len(target.cache.written)
