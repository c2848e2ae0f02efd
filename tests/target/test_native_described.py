"""Decoders that run on the kernels by a description of their layers, against their own classes."""

from __future__ import annotations

import copy
import ctypes
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cover import nightly_but
from helpers import generate
from kernel_cases import DESCRIBED, DTYPES, TOLERANCE, build, needs_kernels
from kernel_cases import always as always  # a fixture
from torch import nn
from transformers import DynamicCache, Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig
from transformers.models.gemma import modeling_gemma

from foredraft import Speculator, TokenTree
from foredraft.backends import described_pass, native
from foredraft.backends.described_pass import DescribedModel
from foredraft.backends.families import FAMILIES, PLAIN
from foredraft.backends.native_growth import NativeGrowth
from foredraft.drafters.draft_model import DraftModel
from foredraft.models.page_stores import GONE
from foredraft.quantization import quantize
from foredraft.shapes import DynamicShape
from foredraft.target import Target

pytestmark = [needs_kernels, pytest.mark.usefixtures("always")]
TREE = (-1, 0, 0, 1, 1, 2, 3, 3, 6)
DEEP = (-1, 0, 0, *range(2, 19))  # deeper than narrow windows, and nodes are not in the slots of their positions
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
FIRST = ("phi3", "phi3-window-partial", "gemma", "gemma2", "gemma3", "gemma3-cap")
EACH = [(name, dtype) for name in DESCRIBED for dtype in DTYPES]
# Of each kind of layer one; logits are compared for every family.
TEXTS = (*FIRST, "granite", "gpt_neox", "stablelm-parallel", "gpt_oss", "mixtral-window", "deepseek_v3", "deepseek_v2-lite", "ministral3")


def target(name, dtype, **options):
    found = Target(build(name, dtype), execution="native", owned=True, **options)
    assert found.execution == "native" and isinstance(vars(found.model.get_decoder())["forward"], DescribedModel), found.reasons
    assert "fused" not in found.reasons and found.backend.overrides.native == 3
    return found


def assert_close(got, wanted, dtype, routed=False):
    """In bfloat16 rounding may choose other experts for a token."""
    errors = (got.float() - wanted.float()).abs().amax(-1).flatten()
    share = 0.75 if routed and dtype == torch.bfloat16 else 1.0
    assert errors.quantile(share, interpolation="lower") <= TOLERANCE[dtype] * wanted.float().abs().max()


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "dtype"), nightly_but({*((name, torch.float32) for name in DESCRIBED), *((n, d) for n in FIRST for d in DTYPES)}, EACH)
)
def test_ragged_prefills_chains_trees_and_commits(name, dtype):
    """Behind texts on several pages, most of which windows have left, in rows of unequal lengths."""
    texts = [[(7 * i * i + row) % 100 for i in range(length)] for row, length in enumerate((190, 3, 70))]
    chain, nodes = (torch.randint(0, 100, (3, count), generator=torch.Generator().manual_seed(count)) for count in (4, len(TREE)))
    valid = torch.ones_like(nodes, dtype=torch.bool)
    valid[1, 5:] = False  # filler
    found = []
    for each in (Target(build(name, dtype), execution="eager"), target(name, dtype)):
        each.open(texts)
        steps = [each.prefill(texts, first=0), each.score(TokenTree.from_chain(chain))]
        each.commit(None, [4, 2, 1])
        steps.append(each.score(TokenTree(nodes, torch.tensor([TREE] * 3), valid))[valid])
        each.commit(torch.tensor([[0, 2, 5], [0, 1, 3], [0, 1, 4]]), [3, 1, 2])
        steps.append(each.advance(chain[:, 0]))
        each.compact([0, 2])
        steps += [each.score(TokenTree.from_chain(chain[:2, :1])), each.score(TokenTree.from_chain(chain[:2]))]
        steps.append(each.score(TokenTree(torch.arange(40).view(2, 20), torch.tensor([DEEP] * 2))))
        found.append(steps)
    routed = any(path.endswith("experts") for path, _ in each.model.named_modules())
    for wanted, got in zip(*found):
        assert_close(got, wanted, dtype, routed)
    windows = each.cache.windows
    assert all(GONE in store.tables[0] for store in windows if store.kind.window < 64)
    assert bool(windows) == any(isinstance(store, int) for store in [DESCRIBED[name][1].get("sliding_window")])


@pytest.mark.parametrize(
    ("name", "dtype"),
    nightly_but({*((name, torch.float32) for name in FIRST), ("gemma3", torch.bfloat16), ("cohere2", torch.bfloat16)}, EACH),
)
def test_bits_depend_on_the_text_alone(name, dtype):
    found = target(name, dtype)
    assert found.batch_invariant, found.reasons


@pytest.mark.parametrize("name", nightly_but({(name,) for name in TEXTS}, [(name,) for name in DESCRIBED]))
def test_greedy_text_is_that_of_transformers(name):
    model = build(name, torch.float32)
    wanted = copy.deepcopy(model).generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False)[0, len(PROMPT) :].tolist()
    speculator = Speculator(model, "several:prompt-lookup,ngram", shape="product(2,1,1)", execution="native")
    assert speculator.target.backend.overrides.native == 3
    assert generate(speculator, [PROMPT], max_new_tokens=24) == [wanted]


SHAPES = ("product(3,2)", "chain(5)", "dynamic(depth=4,k=3,total=9)")


@pytest.mark.parametrize(
    ("name", "shape"),
    nightly_but({(name, shape) for name, shape in zip(FIRST, SHAPES * 2)}, [(name, shape) for name in DESCRIBED for shape in SHAPES]),
)
def test_drafts_in_one_call_are_those_made_level_by_level(name, shape, monkeypatch):
    """A wrong position, window or logit shows in the trees of the rounds that follow."""
    made, seen, draft, ends = [], [], DraftModel.draft, NativeGrowth._end
    monkeypatch.setattr(NativeGrowth, "_end", lambda self, *given: made.append(given) or ends(self, *given))
    monkeypatch.setattr(DraftModel, "draft", lambda self, request: seen.append(draft(self, request)) or seen[-1])
    trees, found = [], []
    for alone in (False, True):
        drafter = DraftModel(build(name, torch.float32), execution="native")
        speculator = Speculator(build("llama", torch.float32), drafter, shape=shape)
        drafter._loops = () if alone else drafter._loops
        found.append(generate(speculator, [PROMPT * 4], max_new_tokens=24))
        trees.append([(tree.tokens.tolist(), tree.parents.tolist()) for tree in seen])
        assert bool(made) != alone
        made.clear(), seen.clear()
    assert trees[0] == trees[1] and len(trees[0]) >= 5
    assert found[0] == found[1]


@pytest.mark.parametrize("name", list(DESCRIBED))
@torch.inference_mode()
def test_numbers_are_rounded_where_the_class_rounds_them(name):
    """Keys of the first layer, behind its norms and turned, but for those that another order of summation has moved."""
    with torch.inference_mode(False):
        found = target(name, torch.bfloat16, test=False)
        cache = DynamicCache()
        build(name, torch.bfloat16)(torch.tensor([PROMPT]), past_key_values=cache)
    found.open([PROMPT])
    found.prefill([PROMPT], first=0)
    store = found.cache._store(0)
    keys = found.cache.layers[0].keys[store.tables[0][0], :, : len(PROMPT)]
    assert float((keys == cache.layers[0].keys[0]).float().mean()) > 0.98


@pytest.mark.parametrize("name", ["gemma3", "gpt_neox"])
@torch.inference_mode()
def test_weights_of_eight_bits(name):
    pytest.importorskip("torchao")
    found = []
    for execution in ("eager", "native"):
        with torch.inference_mode(False):
            model = build(name, torch.float32)
            quantize(model)
            each = Target(model, execution=execution, owned=True)
        assert execution == "eager" or (each.execution == "native" and "fused" not in each.reasons)
        each.open([PROMPT])
        found.append([each.prefill([PROMPT], first=0), each.score(TokenTree(torch.arange(20)[None], torch.tensor([DEEP])))])
    for wanted, got in zip(*found):
        assert_close(got, wanted, torch.float32)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_embeddings_that_are_quantised(name):
    torchao = pytest.importorskip("torchao.quantization")

    def quantised():
        model = build(name, torch.float32)
        config = torchao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=torchao.PerAxis(0))
        torchao.quantize_(model, config, filter_fn=lambda module, _: isinstance(module, nn.Embedding))
        return model

    wanted = generate(Speculator(quantised(), "none", execution="eager"), [PROMPT], max_new_tokens=12)
    speculator = Speculator(quantised(), DraftModel(quantised(), execution="native"), execution="native", shape="chain(3)")
    assert generate(speculator, [PROMPT], max_new_tokens=12) == wanted
    assert speculator.target.execution == speculator.drafter.model.execution == "native"


@pytest.mark.parametrize("kind", [nn.Parameter, torch.clone])
def test_a_bias_of_the_logits(kind):
    """However the model keeps it; a model of a family that has none, as a fork of it may."""
    found, bias = target("qwen3", torch.float32), torch.randn(1, 100)
    hidden = torch.randn(1, 3, found.model.config.hidden_size)
    with torch.inference_mode():
        plain = found.backend.direct.logits(hidden)
        found.model.final_logits_bias = kind(bias)
        assert torch.equal(found.backend.direct.logits(hidden), plain + bias)


def test_a_part_that_is_missing(monkeypatch):
    monkeypatch.setitem(FAMILIES, "Gemma", replace(FAMILIES["Gemma"], down="mlp.down"))
    found = Target(build("gemma", torch.float32), execution="native", owned=True)
    assert found.execution == "packed" and "lacks a part that its description names: 'mlp.down'" in found.reasons["fused"]


def test_a_model_that_takes_images_as_well():
    text = build("gemma3", torch.float32)
    vision = SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    ids = {"image_token_id": 99, "boi_token_index": 97, "eoi_token_index": 98, "mm_tokens_per_image": 4}
    config = Gemma3Config(text_config=text.config, vision_config=vision, tie_word_embeddings=False, **ids)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    found = Target(model, execution="native", owned=True)
    assert found.execution == "native" and found.batch_invariant, found.reasons
    with torch.inference_mode():
        logits = []
        for each in (Target(text, execution="eager"), found):
            each.open([PROMPT])
            logits.append(each.prefill([PROMPT], first=0))
        assert_close(logits[1], logits[0], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3-halves", "deepseek_v2"])
@torch.inference_mode()
def test_latents_are_kept_as_the_class_keeps_them(name, dtype):
    """Passes by the kernels and by the class take turns over one cache."""
    with torch.inference_mode(False):
        plain, found = Target(build(name, dtype), execution="eager"), target(name, dtype)
    steps = []
    for each in (plain, found):
        each.open([PROMPT * 4, PROMPT])
        steps.append([each.prefill([PROMPT * 4, PROMPT], first=0)])
        for index in range(4):
            hook = each.model.model.layers[1].register_forward_hook(lambda *given: None) if index % 2 == 0 else None
            steps[-1].append(each.advance(torch.tensor([index, 9])))
            if hook is not None:
                assert each.backend.direct is None
                hook.remove()
    for wanted, got in zip(*steps):
        assert_close(got, wanted, dtype, routed=True)
    assert found.backend.direct is not None
    layer = found.cache.layers[0]
    assert (layer.keys.shape[1:], layer.values.shape[1:]) == ((1, 64, 128), (1, 64, 64))
    assert sum(found.page_bytes) == 3 * 64 * (128 + 64) * dtype.itemsize


@pytest.mark.parametrize("kind", ["int8", "int4-32"])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_latents_whose_weights_are_quantised(kind, dtype):
    pytest.importorskip("torchao")
    steps = []
    for execution in ("eager", "native"):
        with torch.inference_mode(False):
            model = build("deepseek_v3", dtype, moe_intermediate_size=64)
            quantize(model, kind)
            each = Target(model, execution=execution, owned=execution == "native")
        each.open([PROMPT * 4])
        steps.append([each.prefill([PROMPT * 4], first=0), each.score(TokenTree.from_chain(torch.tensor([PROMPT[:10]])))])
    assert each.execution == "native" and "fused" not in each.reasons
    for wanted, got in zip(*steps):
        assert_close(got, wanted, dtype, routed=True)


def test_angles_that_depend_on_the_length():
    """Beyond the length that a model was first trained for, all of its angles are others."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [1.0 + i / 4 for i in range(16)], "original_max_position_embeddings": 64}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 8.0, **factors}
    found = []
    for execution in ("eager", "native"):
        each = Target(build("phi3", torch.float32, rope_parameters=rope), execution=execution, owned=True)
        with torch.inference_mode():
            each.open([PROMPT, PROMPT * 3])
            steps = [each.prefill([PROMPT, PROMPT * 3], first=0), each.score(TokenTree.from_chain(torch.tensor([PROMPT[:10]] * 2)))]
        found.append(steps)
    for wanted, got in zip(*found):
        assert_close(got, wanted, torch.float32)
    assert not each.batch_invariant and "length of the text" in each.reasons["batch_invariant"]
    each.reset()
    with torch.inference_mode():
        direct = each.backend.direct
        each.open([PROMPT])
        growth = NativeGrowth.of(direct, each.cache, None)
        assert growth.grow(PROMPT[:3], DynamicShape(2, 2, 4), depth=2, vocab_size=100) is None


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe-window", "deepseek_v3"])
def test_bits_do_not_depend_on_the_number_of_threads(name):
    found, before, logits = target(name, torch.float32), torch.get_num_threads(), []
    try:
        for threads in (1, 3, 2):
            torch.set_num_threads(threads)
            with torch.inference_mode():
                found.open([PROMPT * 8])
                logits.append(found.prefill([PROMPT * 8], first=0).clone())
            found.reset()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, logits[0]) for each in logits)


def test_every_described_family_is_documented_and_tested():
    table = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text().partition("## Families")[2].partition("[Decoders behind")[0]
    documented = {kind for line in table.splitlines() if line.startswith("| `") for kind in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert documented == {kind for kind, _ in DESCRIBED.values()} | {"llama"}
    models = [type(build(name, torch.float32)).__name__.removesuffix("ForCausalLM") for name in (*DESCRIBED, "llama")]
    assert {*models} == FAMILIES.keys()


# -- descriptions that are wrong -----------------------------------------------------------------------------------------


WRONG = [  # the model, the family, what its description says instead, and what is said of it
    ("gemma3", "Gemma3", {"attention_given": None}, r"layer 0 \(Gemma3DecoderLayer\) computes something else"),
    ("gemma3", "Gemma3", {"after": "post_attention_layernorm"}, "layer 0 .* computes something else"),
    ("gemma2", "Gemma2", {"layer_cap": None}, "layer 0 .* computes something else"),
    ("phi3", "Phi3", {"interleaved": True}, "layer 0 .* computes something else"),
    ("glm4", "Glm4", {"interleaved": False}, "layer 0 .* computes something else"),
    ("smollm3", "SmolLM3", {"turns": lambda attention: True}, r"layer 1 \(SmolLM3DecoderLayer\) computes something else"),
    ("hunyuan_v1_dense", "HunYuanDenseV1", {"turned_first": False}, "layer 0 .* computes something else"),
    ("gpt_neox", "GPTNeoX", {"grouped": False}, "layer 0 .* computes something else"),
    ("gpt_neox", "GPTNeoX", {"parallel": False}, "layer 0 .* computes something else"),
    ("qwen3-window", "Qwen3", {"head_norms": ("none", "none")}, "layer 0 .* computes something else"),
    ("deepseek_v3", "DeepseekV3", {"interleaved": False}, "layer 0 .* computes something else"),
    ("deepseek_v2", "DeepseekV2", {"interleaved": False}, "layer 0 .* computes something else"),
    ("deepseek_v3", "DeepseekV3", {"head_norms": ("q_a_layernorm", "none")}, "layer 0 .* computes something else"),
    ("gemma", "Gemma", {"wide": ("mlp.up_proj", "mlp.gate_proj")}, "linear layers for gate_up are not packed together"),
]


def refused(name, dtype=torch.float32):
    """The model ``name``, not on the kernels, whose logits are right all the same."""
    plain, found = (Target(build(name, dtype), execution=execution, owned=True) for execution in ("eager", "native"))
    assert found.execution == "packed" and "forward" not in vars(found.model.get_decoder())
    with torch.inference_mode():
        logits = []
        for each in (plain, found):
            each.open([PROMPT])
            logits.append(each.prefill([PROMPT], first=0))
        assert_close(logits[1], logits[0], dtype)
    return found


EVERY = [(number, dtype) for number in range(len(WRONG)) for dtype in DTYPES]


@pytest.mark.parametrize(("number", "dtype"), nightly_but({each for each in EVERY if each[1] == torch.float32 or not each[0] % 4}, EVERY))
def test_a_wrong_description_is_not_used(number, dtype, monkeypatch):
    name, family, instead, said = WRONG[number]
    monkeypatch.setitem(FAMILIES, family, replace(FAMILIES[family], **instead))
    assert re.search(said, refused(name, dtype).reasons["fused"])


def test_what_begins_behind_many_tokens_is_seen(monkeypatch):
    """Ministral 3 scales queries from original_max_position_embeddings on."""
    monkeypatch.setitem(FAMILIES, "Ministral3", PLAIN)
    rope = {**DESCRIBED["ministral3"][1]["rope_parameters"], "original_max_position_embeddings": 300}
    found = Target(build("ministral3", torch.float32, rope_parameters=rope), execution="native", owned=True)
    assert found.execution == "packed" and "computes something else" in found.reasons["fused"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_large_number_hides_no_fault(dtype, monkeypatch):
    """Trained models have such numbers in the residual stream, which norms make small."""
    monkeypatch.setitem(FAMILIES, "Qwen3", replace(FAMILIES["Qwen3"], head_norms=("none", "none")))
    model = build("qwen3", dtype)
    model.get_input_embeddings().weight.data[:, 3] = 1000.0
    for name, weight in model.named_parameters():
        if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")):
            weight.data *= 125
            weight.data[3] = 0
    found = Target(model, execution="native", owned=True)
    assert found.execution == "packed" and "layer 0" in found.reasons["fused"]


def test_the_first_tokens_of_a_vocabulary_may_be_alike(monkeypatch):
    """Many are never trained."""
    monkeypatch.setitem(FAMILIES, "Glm", replace(FAMILIES["Glm"], interleaved=False))
    model = build("glm", torch.float32, vocab_size=2000)
    model.get_input_embeddings().weight.data[:100] = 1.0
    found = Target(model, execution="native", owned=True, test=False)
    assert found.execution == "packed" and "layer 0" in found.reasons["fused"]


def sinks_of_other_heads(patch):
    of_layer, kept = native.Layer, []

    def other(**fields):
        count = fields["heads"]
        sinks = list((ctypes.c_float * count).from_address(fields["sinks"]))
        kept.append((ctypes.c_float * count)(*sinks[1:], sinks[0]))
        return of_layer(**{**fields, "sinks": ctypes.addressof(kept[-1])})

    patch.setattr(native, "Layer", other)


def weight_without_one(patch):
    of_norm = described_pass.described_norm

    def other(*given):
        norm, kept = of_norm(*given)
        assert norm.kind & native.PLUS_ONE
        return native.Norm(norm.weight, norm.bias, norm.kind & ~native.PLUS_ONE), kept

    patch.setattr(described_pass, "described_norm", other)


def up_for_gate(patch):
    """In the class, since the kernels' gate lies before up in one matrix."""

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(self.act_fn(up) * gate)

    patch.setattr(modeling_gemma.GemmaMLP, "forward", forward)


def logits_without(name, value):
    """A factor, divisor or cap of the logits that is left out."""

    def plant(patch):
        of_model = DescribedModel.__init__

        def other(self, *given):
            of_model(self, *given)
            assert getattr(self, name) != value
            setattr(self, name, value)

        patch.setattr(DescribedModel, "__init__", other)

    return plant


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "plant", "said"),
    [
        ("gpt_oss", sinks_of_other_heads, "layer 0 .* computes something else"),
        ("gemma", weight_without_one, "layer 0 .* computes something else"),
        ("gemma", up_for_gate, "layer 0 .* computes something else"),
        ("gemma2", logits_without("cap", 0.0), "the kernels gave logits that differ by"),
        ("granite", logits_without("divided", 1.0), "the kernels gave logits that differ by"),
        ("cohere", logits_without("scaled", 1.0), "the kernels gave logits that differ by"),
    ],
)
def test_numbers_that_are_wrong_are_found(name, plant, said, dtype, monkeypatch):
    """In bfloat16, sinks of other heads change a layer by about as much as rounding may; else they are seen in the logits."""
    plant(monkeypatch)
    said += "|the kernels gave logits that differ by" * (name == "gpt_oss" and dtype == torch.bfloat16)
    assert re.search(said, refused(name, dtype).reasons["fused"])


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [
        ("NORMS", (0, native.ONCE), "norm before, GemmaRMSNorm, is of no kind that the kernels know"),
        ("ACTIVATIONS", {}, "its activation is GELUTanh"),
        ("WIDEST", 32, None),
    ],
)
def test_what_the_kernels_do_not_know(attribute, value, said, monkeypatch):
    monkeypatch.setattr(described_pass, attribute, value)
    name = "gemma" if said else "olmo2"
    found = Target(build(name, torch.float32), execution="native", owned=True)
    assert found.execution == "packed" and (said or "norms of queries and keys are of another shape") in found.reasons["fused"]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("arcee", {"hidden_act": "relu6"}, "its activation is ReLU6"),
        ("arcee", {"hidden_act": "gelu_10"}, "its activation is ClippedGELUActivation"),
        ("qwen3-window", {"head_dim": 48, "num_key_value_heads": 1}, "linear layers for qkv have 288 outputs, and the kernels take"),
        ("deepseek_v3", {"head_dim": 16, "qk_rope_head_dim": 16}, "its kv_a_proj_with_mqa has 144 outputs, and the kernels take"),
        ("granite_swa", {"layer_rope_theta": [10000.0, 0, 500000.0]}, "RoPE of its layers differs in theta"),
        ("hyperclovax", {"use_post_norm": False}, "the norm attention_given has no weights of its own"),
    ],
)
def test_options_that_the_kernels_do_not_know(name, options, said):
    found = Target(build(name, torch.float32, **options), execution="native", owned=True)
    assert found.execution == "packed" and said in found.reasons["fused"]


def test_layers_of_others_run_as_they_are():
    """A subclass, as adapters put one in."""

    class Other(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = build("gemma3", torch.float32)
    model.model.layers[1].mlp.down_proj.__class__ = Other
    found = Target(model, execution="native", owned=True)
    assert found.execution == "packed" and "linear layers for down are not packed" in found.reasons["fused"]


def test_whoever_watches_the_model_is_called():
    found, calls = target("gemma3", torch.float32), []
    with torch.inference_mode():
        assert found.backend.direct is not None
        handle = found.model.model.layers[1].register_forward_hook(lambda *given: calls.append(given))
        assert found.backend.direct is None
        found.open([PROMPT])
        watched = found.prefill([PROMPT], first=0)
        handle.remove()
        found.reset()
        found.open([PROMPT])
        assert_close(found.prefill([PROMPT], first=0), watched, torch.float32)
    assert len(calls) == 1
    found.close()
    assert "forward" not in vars(found.model.get_decoder())
