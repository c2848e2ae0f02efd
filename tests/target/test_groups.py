"""Weights of four, six and eight bits in groups: what is read of checkpoints, what the kernels make of it, and texts."""

from __future__ import annotations

import copy
import ctypes
import json
import sys

import huggingface_hub
import pytest
import torch
from cover import covered
from helpers import alone, generate, repetitive
from kernel_cases import DTYPES, needs_kernels
from kernel_cases import always as always  # a fixture
from safetensors.torch import load_file, save_file
from stored import ABOUT, VARIANTS, about_compressed, in_blocks, numbers, stored
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, LlamaConfig, Phi3Config, Qwen3Config

from foredraft import ConfigurationError, Speculator, TokenTree, UnsupportedModelError, hub, zoo
from foredraft.backends import native
from foredraft.backends.invariance import invariance_test
from foredraft.backends.kernel_pass import NativeModel
from foredraft.backends.narrow import READ, format_of, is_held
from foredraft.backends.packing import HINTS, Packing, refusal
from foredraft.backends.products import NATIVE, Product
from foredraft.caching import warn_once
from foredraft.cli.figures import execution_line
from foredraft.loading import load_model, load_tokenizer, name_of, tokenizer_of
from foredraft.quantization import quantize
from foredraft.quantization.gguf import configure
from foredraft.quantization.grouped import GroupedTensor, bytes_from, codes_from
from foredraft.target import Target

ROWS = [[3 + token % 90 for token in row] for row in repetitive((23, 9, 15))]
SIZES = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
BLOCKS = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # for kinds of GGUF whose blocks have 256 weights
GEMMA = {**BLOCKS, "tie_word_embeddings": True, "query_pre_attn_scalar": 64, "sliding_window": 12, "pad_token_id": None}
LONG = {"short_factor": [1 + i / 9 for i in range(32)], "long_factor": [2 + i / 9 for i in range(32)]}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, attention_bias=True),
    "qwen3": Qwen3Config(**SIZES),
    "wide-llama": LlamaConfig(**BLOCKS),
    "wide-qwen3": Qwen3Config(**{**BLOCKS, "tie_word_embeddings": True}),
    "wide-qwen3-yarn": Qwen3Config(
        **BLOCKS,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "wide-gemma2": Gemma2Config(**{**GEMMA, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 9.0}),
    "wide-gemma3": Gemma3TextConfig(
        **{
            **GEMMA,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        }
    ),
    "wide-phi3": Phi3Config(
        **{
            **BLOCKS,
            "pad_token_id": None,
            "sliding_window": 12,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        }
    ),
    "wide-phi3-long": Phi3Config(
        **{
            **BLOCKS,
            "pad_token_id": None,
            "sliding_window": None,
            "original_max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **LONG},
        }
    ),
}


def plain(name="qwen3", dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        how = "eager" if "gemma2" in name else "sdpa"
        return AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=how).to(dtype).eval()


def layer_of(weight, bias=False):
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias, dtype=weight.dtype)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


def by_hand(weight):
    """The weights one by one."""
    codes, found = codes_from(weight.qdata, weight.bits), torch.empty(weight.shape)
    for k in range(weight.shape[1]):
        group = k // weight.group
        zero = float(weight.zero) if weight.zeros is None else weight.zeros[:, group].float()
        found[:, k if weight.order is None else int(weight.order[k])] = (codes[:, k].float() - zero) * weight.scale[:, group].float()
    return found


@torch.inference_mode()
def logits(model, tokens=7):
    return model(input_ids=torch.arange(3, 3 + tokens)[None], use_cache=False).logits


def widened(model, dtype=torch.float32):
    """The model with the weights that its integers stand for."""
    found = AutoModelForCausalLM.from_config(CONFIGS[model.config.model_type], attn_implementation="sdpa").to(dtype).eval()
    state = {name: each.dequantize(dtype) if isinstance(each, GroupedTensor) else each for name, each in model.named_parameters()}
    found.load_state_dict({name: each.to(dtype) for name, each in state.items()}, strict=False)
    return found


# -- products --------------------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize(
    ("outputs", "inputs", "group"),
    [(64, 32, 32), (100, 160, 64), (192, 352, 128), (17, 288, 288), (70, 192, 16), (64, 256, 32), (33, 128, 64)],
)
@pytest.mark.parametrize(("zeros", "order"), [(False, False), (True, False), (True, True)])
def test_products(outputs, inputs, group, bits, zeros, order, dtype):
    scales = (torch.float16, torch.bfloat16, torch.float32)[outputs % 3]
    weight = numbers(outputs, inputs, bits=bits, group=group, zeros=zeros, order=order, scales=scales, dtype=dtype)
    assert torch.equal(weight.dequantize(torch.float32), by_hand(weight))
    layer = layer_of(weight, bias=order)
    product = Product([layer], NATIVE)
    with torch.inference_mode():
        x = torch.randn(150, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
        exact = torch.nn.functional.linear(x.double(), by_hand(weight).double(), None if layer.bias is None else layer.bias.double())
        found = product(x)
        limit = 1e-5 if dtype == torch.float32 else 2.0**-8
        assert (found.double() - exact).abs().max() <= limit * exact.abs().max()
        for tokens in (1, 2, 3, 4, 5, 6, 7, 13, 24, 25, 33, 129):
            assert torch.equal(product(x[:tokens].contiguous()), found[:tokens]), "bits that depend on how many tokens there are"
    assert torch.equal(product.weights()[0], weight.qdata)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_many_inputs(dtype):
    """Fewer tokens are prepared together then."""
    weight = numbers(64, 40960, group=128, dtype=dtype)
    product = Product([layer_of(weight)], NATIVE)
    with torch.inference_mode():
        x = torch.randn(31, 40960, generator=torch.Generator().manual_seed(1)).to(dtype)
        exact, found = x.double() @ weight.dequantize(torch.float32).double().T, product(x)
        assert (found.double() - exact).abs().max() <= (1e-5 if dtype == torch.float32 else 2.0**-8) * exact.abs().max()
        assert all(torch.equal(product(x[:tokens].contiguous()), found[:tokens]) for tokens in (1, 6, 7, 13))


def nested(outputs, inputs, *, bits, group, of, mins, dtype):
    """A weight whose scales are integers that a number for ``of`` groups is multiplied with."""
    like = numbers(outputs, inputs, bits=bits, group=group, dtype=dtype)
    random = torch.Generator().manual_seed(inputs)
    scale = torch.randint(-32 if not mins else 0, 64, like.scale.shape, generator=random).to(torch.int8)
    over, less = (10 ** (torch.rand(outputs, scale.shape[1] // of, generator=random) * 2 - 4) for _ in range(2))
    zeros = like.zeros & 63 if mins else 32
    return GroupedTensor(
        like.qdata, scale, zeros, over=over.half(), mins=less.half() if mins else None, bits=bits, group=group, dtype=dtype
    )


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bits", "group", "of", "mins"), [(4, 32, 8, True), (6, 32, 8, True), (6, 16, 16, False), (8, 16, 16, False), (4, 64, 2, True)]
)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 256), (100, 1280)])
def test_products_with_nested_scales(outputs, inputs, bits, group, of, mins, dtype):
    weight = nested(outputs, inputs, bits=bits, group=group, of=of, mins=mins, dtype=dtype)
    codes = codes_from(weight.qdata, bits).double()
    by_input = [
        None if each is None else each.double().repeat_interleave(inputs // each.shape[1], 1)
        for each in (weight.scale, weight.over, weight.mins, weight.zeros)
    ]
    scale = by_input[0] * by_input[1]
    stands = codes * scale - by_input[3] * by_input[2] if mins else (codes - 32) * scale
    assert torch.allclose(weight.dequantize(torch.float32).double(), stands, rtol=1e-6, atol=1e-9)
    product = Product([layer_of(weight)], NATIVE)
    with torch.inference_mode():
        x = torch.randn(61, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
        exact, found = x.double() @ stands.T, product(x)
        assert (found.double() - exact).abs().max() <= (1e-5 if dtype == torch.float32 else 2.0**-8) * exact.abs().max()
        for tokens in (1, 2, 3, 6, 7, 24, 25):
            assert torch.equal(product(x[:tokens].contiguous()), found[:tokens]), "bits that depend on how many tokens there are"


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_products_of_inputs_of_all_sizes(bits, dtype):
    """Inputs beside one that is very large keep what the dtype has of them, next to that; what is no number stays so."""
    weight = numbers(64, 256, bits=bits, group=64, scales=torch.float32, dtype=dtype)
    product, stands = Product([layer_of(weight)], NATIVE), by_hand(weight).double()
    random = torch.Generator().manual_seed(2)
    x = torch.randn(40, 256, generator=random) * 10 ** (torch.rand(40, 256, generator=random) * 6 - 5)
    x[:4], x[4:8], x[8:12] = 0, x[4:8] * 1e-25, x[8:12] * 1e30
    x = x.to(dtype)
    with torch.inference_mode():
        exact, found = x.double() @ stands.T, product(x)
        size = (x.double().abs() @ stands.abs().T).clamp(min=1e-30)
        assert ((found.double() - exact).abs() / size).max() <= (3e-6 if dtype == torch.float32 else 2.0**-8)
        for odd in (float("inf"), float("-inf"), float("nan")):
            x[3, 70] = odd
            found = product(x)
            assert not found[3].isfinite().any() and found[:3].isfinite().all() and found[4:].isfinite().all()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_products_with_extreme_scales(bits, dtype):
    """The smallest and the largest that float16 has, subnormal, negative and zero ones, alone and side by side in an output."""
    weight, random = numbers(96, 256, bits=bits, dtype=dtype), torch.Generator().manual_seed(4)
    extremes = torch.tensor([2.0**-24, 2.0**-14, 65504, 0, -65504, -(2.0**-24)], dtype=torch.float16)
    weight.scale.copy_(extremes[torch.randint(len(extremes), weight.scale.shape, generator=random)])
    weight.scale[:16], weight.scale[16:32], weight.scale[32:48] = extremes[0], extremes[2], extremes[3]
    product, stands = Product([layer_of(weight)], NATIVE), by_hand(weight).double()
    assert torch.equal(weight.dequantize(torch.float32).double(), stands)
    with torch.inference_mode():
        x = torch.randn(31, 256, generator=random).to(dtype)
        exact, found = x.double() @ stands.T, product(x)
        size = x.double().abs() @ stands.abs().T
        assert ((found.double() - exact).abs() <= (3e-6 if dtype == torch.float32 else 2.0**-8) * size).all()
        assert all(torch.equal(product(x[:tokens].contiguous()), found[:tokens]) for tokens in (1, 6, 7, 13, 25))


@needs_kernels
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_an_input_that_dwarfs_the_others_does_not_hide_them(bits):
    dtype = torch.bfloat16
    weight = numbers(64, 96, bits=bits, zeros=False, scales=torch.float32, dtype=dtype)
    codes = codes_from(weight.qdata, bits)
    codes[:, [5, 40]] = weight.zero  # the weights of those inputs are 0
    weight = GroupedTensor(bytes_from(codes, bits), weight.scale, weight.zero, bits=bits, group=32, dtype=dtype)
    x = torch.randn(30, 96, generator=torch.Generator().manual_seed(1))
    x[3, 5], x[17, [5, 40]], x[18] = 3e4, torch.tensor([-1e6, 2e5]), 0
    x = x.to(dtype)
    product = Product([layer_of(weight)], NATIVE)
    with torch.inference_mode():
        exact, found = x.double() @ by_hand(weight).double().T, product(x)
        assert ((found.double() - exact).abs().amax(1) <= 2.0**-8 * exact.abs().amax(1)).all()
        for tokens in (1, 4, 18, 20):
            assert torch.equal(product(x[:tokens].contiguous()), found[:tokens])
        assert torch.equal(product(x[18:19].contiguous()), found[18:19])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_several_formats_are_one_product(dtype):
    four, three = (numbers(outputs, 256, zeros=zeros, dtype=dtype, seed=outputs) for outputs, zeros in ((128, True), (64, False)))
    six = nested(100, 256, bits=6, group=16, of=16, mins=False, dtype=dtype)
    model = torch.nn.ModuleList([layer_of(each, bias=True) for each in (four, four, six, three)])
    biases = [each.bias.detach().clone() for each in model]

    def sample(x=None):
        x = torch.ones(1, 256, dtype=dtype) if x is None else x
        return [layer(x) for layer in model]

    packing = Packing(model, sample, owned=False, hints=(NATIVE,))
    product = packing.product(*model[:3])
    assert product is not None and len(product.pieces) == 2 and packing.product(model[3]) is not None  # 100 outputs are no whole tiles
    with torch.inference_mode():
        x = torch.randn(29, 256, generator=torch.Generator().manual_seed(5)).to(dtype)
        for found, weight, bias in zip(sample(x), (four, four, six, three), biases):
            exact = x.double() @ weight.dequantize(torch.float32).double().T + bias.double()
            assert (found.double() - exact).abs().max() <= (1e-5 if dtype == torch.float32 else 2.0**-8) * exact.abs().max()
        whole, rest = product(x), torch.empty(29, 192, dtype=dtype)
        product._linear(ctypes.byref(product.matrix_from(192)), x.data_ptr(), rest.data_ptr(), 29, 256, 192, 2)
        assert torch.equal(
            rest, whole[:, 192:384] if whole.shape[1] >= 384 else torch.cat((whole[:, 192:], rest[:, whole.shape[1] - 192 :]), 1)
        )
        assert all(torch.equal(product(x[:tokens].contiguous()), whole[:tokens]) for tokens in (1, 5, 24))
    assert all(torch.equal(given, weight.qdata) for given, weight in zip(product.weights(), (four, four, six)))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_another_format_follows_whole_tiles_only(dtype):
    """The two layers of the first format have 160 outputs together."""
    weights = [numbers(outputs, 256, zeros=zeros, dtype=dtype, seed=outputs) for outputs, zeros in ((96, True), (64, True), (64, False))]
    model = torch.nn.ModuleList([layer_of(each) for each in weights])
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(5)).to(dtype)

    def sample():
        return [layer(x) for layer in model]

    packing = Packing(model, sample, owned=False, hints=(NATIVE,))
    assert packing.product(*model[:2]) is not None and packing.product(model[2]) is not None
    with torch.inference_mode():
        for found, weight in zip(sample(), weights):
            exact = x.double() @ weight.dequantize(torch.float32).double().T
            assert (found.double() - exact).abs().max() <= (1e-5 if dtype == torch.float32 else 2.0**-8) * exact.abs().max()


@needs_kernels
def test_sizes_that_the_kernels_do_not_read_are_left_to_torch():
    for weight in (numbers(8, 96, group=24), numbers(8, 48, group=16)):
        layer = layer_of(weight)
        assert format_of(layer.weight) is None
        model = torch.nn.Sequential(layer)
        model.is_quantized = True
        assert refusal(model) == f"its weights are quantised in a way that the native kernels do not read; they read {READ}"
        x = torch.randn(3, weight.shape[1])
        assert torch.allclose(layer(x), x @ by_hand(weight).T, rtol=1e-4, atol=1e-3)


def test_a_module_that_is_moved_has_the_moved_numbers():
    """``Module.to`` writes to ``data``."""
    layer, other = layer_of(numbers(8, 64)), numbers(8, 64, seed=1)
    layer.weight.data = other
    assert torch.equal(layer.weight.dequantize(), by_hand(other)) and isinstance(layer.weight, torch.nn.Parameter)
    assert torch.equal(layer.bfloat16().weight.dequantize(), by_hand(other).bfloat16())


def test_a_weight_can_be_copied_and_moved_but_not_written_to():
    weight = numbers(8, 64, order=True)
    for other in (weight.clone(), weight.detach(), weight.to("cpu"), torch.nn.Parameter(weight, requires_grad=False)):
        assert isinstance(other, GroupedTensor) and torch.equal(other.dequantize(), by_hand(weight))
    assert weight.to(torch.bfloat16).dtype == torch.bfloat16 and torch.equal(weight.abs(), by_hand(weight).abs())
    with pytest.raises(RuntimeError, match="cannot be written to"):
        weight.mul_(2)


# -- checkpoints -----------------------------------------------------------------------------------------------------------


def checkpoint(folder, method, name="qwen3", dtype=torch.float32, change=None):
    """A folder with a model whose linear layers but the head are stored by ``method``; and the same model with those weights in float32."""
    model = plain(name)
    state = model.state_dict()
    for number, (prefix, module) in enumerate(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and prefix != "lm_head":
            parts, weight = stored(method, module.out_features, module.in_features, number)
            del state[f"{prefix}.weight"]
            state |= {f"{prefix}.{part}": each.contiguous() for part, each in parts.items()}
            module.weight.data = weight
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": copy.deepcopy((ABOUT | VARIANTS)[method]),
        "dtype": str(dtype)[6:],
    }
    if change is not None:
        change(config["quantization_config"], state)
    if not config["quantization_config"]:
        del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("method", [*ABOUT, *VARIANTS])
def test_a_checkpoint_is_read_at_its_bits(method, tmp_path):
    expected = checkpoint(tmp_path, method)
    found = load_model(str(tmp_path))
    wanted = dict(expected.named_parameters())
    bits = 8 if "8" in method else 4
    for name, each in found.named_parameters():
        if isinstance(each, GroupedTensor):
            assert each.bits == bits and each.scale.dtype == torch.float16
            assert torch.equal(each.dequantize(torch.float32), wanted[name]), name
    assert sum(isinstance(each, GroupedTensor) for each in found.parameters()) == 2 * 7
    assert torch.equal(logits(found), logits(expected))


def test_zero_points_that_are_not_packed(tmp_path):
    """As older releases of compressed-tensors have them."""
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")

    def change(about, state):
        for name in [name for name in state if name.endswith("weight_zero_point")]:
            shape = state[name.replace("zero_point", "scale")].shape
            state[name] = library.unpack_from_int32(state[name], 4, shape, packed_dim=0).to(torch.int8).contiguous()

    expected = checkpoint(tmp_path, "compressed-4", change=change)
    assert torch.equal(logits(load_model(str(tmp_path))), logits(expected))


@needs_kernels
@torch.inference_mode()
@pytest.mark.parametrize(("method", "dtype"), covered(list(ABOUT), DTYPES, ways=1))
def test_whole_models_ragged_with_trees(method, dtype, tmp_path, always):
    name = "llama" if "gptq" in method else "qwen3"
    exact = checkpoint(tmp_path, method, name)
    rounded = copy.deepcopy(exact).to(dtype)
    texts = [[(7 * i + row) % 100 for i in range(length)] for row, length in enumerate((40, 3, 17))]
    kernels = Target(load_model(str(tmp_path), dtype=dtype), execution="native", owned=True)
    assert kernels.backend.overrides.native == 2
    assert isinstance(vars(kernels.model.model)["forward"], NativeModel)
    assert not is_held(kernels.model.model.layers[0].mlp.up_proj.weight)
    chain = torch.randint(0, 100, (3, 4), generator=torch.Generator().manual_seed(1))
    tree = TokenTree(chain.repeat(1, 2)[:, :5], torch.tensor([[-1, 0, 0, 1, 2]] * 3))
    found = []
    for target in (Target(exact, execution="eager"), Target(rounded, execution="eager"), kernels):
        target.open(texts)
        steps = [target.prefill(texts, first=0), target.score(TokenTree.from_chain(chain))]
        target.commit(None, [4, 2, 1])
        steps.append(target.score(tree))
        target.commit(torch.tensor([[0, 2, 4], [0, 1, 3], [0, 1, 3]]), [3, 1, 2])
        steps.append(target.advance(chain[:, 0]))
        found.append([step.float() for step in steps])
    wanted, theirs, ours = (torch.cat([step.flatten() for step in steps]) for steps in found)
    if dtype == torch.float32:
        assert (ours - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    else:  # torch rounds every weight, and the kernels do not
        assert (ours - wanted).std() <= 1.2 * (theirs - wanted).std() <= 0.1 * wanted.std()
    model = kernels.model
    kernels.close()
    fresh = load_model(str(tmp_path), dtype=dtype)
    assert torch.equal(logits(model), logits(fresh))
    for mine, theirs in zip(model.parameters(), fresh.parameters()):
        assert not isinstance(mine, GroupedTensor) or torch.equal(mine.qdata, theirs.qdata)


@needs_kernels
@pytest.mark.parametrize("method", ["awq", "gptq-ordered", "compressed-4"])
def test_texts_are_those_of_the_weights_in_float32(method, tmp_path, always):
    expected = checkpoint(tmp_path, method)
    texts = [alone(expected, row, max_new_tokens=12) for row in ROWS]
    for drafter, shape in (("none", None), ("prompt-lookup", "chain(4)"), (f"draft-model:{tmp_path}", "product(2,1,1)")):
        speculator = Speculator(str(tmp_path), drafter, shape=shape, execution="native")
        assert speculator.target.execution == "native"
        assert generate(speculator, ROWS, max_new_tokens=12) == texts
        speculator.close()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["awq", "gptq-ordered", "compressed-8"])
def test_bits_depend_on_the_text_alone(method, dtype, tmp_path):
    checkpoint(tmp_path, method)
    target = Target(load_model(str(tmp_path), dtype=dtype), execution="native", owned=True)
    assert invariance_test(target.backend) is None


@needs_kernels
def test_layers_that_stay_as_they_are_share_a_model_with_others(tmp_path, always):
    """One layer was left in the model's dtype, and one has groups of another size."""

    def change(about, state):
        prefix = "model.layers.0.mlp.down_proj"
        for part in [name for name in state if name.startswith(prefix)]:
            del state[part]
        state[f"{prefix}.weight"] = torch.randn(64, 96) / 8

    checkpoint(tmp_path, "awq", change=change)
    model = load_model(str(tmp_path))
    wanted = logits(widened(model))
    target = Target(model, execution="native", owned=True)
    assert target.backend.overrides.native == 2
    assert (logits(target.model) - wanted).abs().max() <= 2e-5 * wanted.abs().max()


# -- four bits made at loading ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    plain().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("load", "name", "group"), [("by name", "qwen3", 32), *(("in memory", "wide-qwen3", each) for each in (32, 64, 128))]
)
def test_what_int4_makes_of_a_checkpoint(load, name, group, original):
    """Weight for weight torchao's; close to the nearest of sixteen steps."""
    torchao = pytest.importorskip("torchao.quantization")
    model = load_model(original, quantization="int4") if load == "by name" else plain(name)
    if load == "in memory":
        quantize(model, f"int4-{group}")
    expected, given = plain(name), dict(plain(name).named_parameters())
    config = torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(group))
    torchao.quantize_(expected, config, filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and name != "lm_head")
    for (of, mine), theirs in zip(model.named_parameters(), expected.parameters()):
        if "proj.weight" in of:
            assert torch.equal(mine.qdata, theirs.qdata) and torch.equal(mine.scale, theirs.scale) and mine.block_size == (1, group)
            assert format_of(mine).bits == 4 and format_of(mine).group == group
            step = mine.scale.repeat_interleave(group, 1)
            assert ((mine.dequantize() - given[of]).abs() <= 0.51 * step).all()
        else:
            assert torch.equal(mine, given[of])
    assert torch.equal(logits(model), logits(expected))


@needs_kernels
@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("asymmetric", [True, False])
def test_torchao_weights_are_read_at_four_bits_and_given_back(owned, asymmetric, always):
    torchao = pytest.importorskip("torchao.quantization")
    from torchao.quantization.quant_primitives import MappingType

    model, kind = plain(), MappingType.ASYMMETRIC if asymmetric else MappingType.SYMMETRIC
    config = torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(32), mapping_type=kind)
    torchao.quantize_(model, config, filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and name != "lm_head")
    before = {name: (each, each.qdata.clone()) for name, each in model.named_parameters() if "proj.weight" in name}
    wanted = logits(model)
    packing = Packing(model, lambda: logits(model), owned=owned, hints=(NATIVE,))
    assert (logits(model) - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    assert all(is_held(each) != owned for each, _ in before.values())
    held = sum(codes.numel() for _, codes in before.values())
    assert (
        held / 2
        <= sum(each.packed.nbytes for product, _, _ in packing._products if product.quantised for each in product.pieces)
        <= 0.7 * held
    )  # padded to 64
    packing.undo()
    for name, each in model.named_parameters():
        assert name not in before or (each is before[name][0] and torch.equal(each.qdata, before[name][1]))
    assert torch.equal(logits(model), wanted)


@needs_kernels
def test_int4_as_target_and_as_draft(original):
    pytest.importorskip("torchao.quantization")
    model = load_model(original, quantization="int4")
    texts = [alone(model, row, max_new_tokens=12) for row in ROWS]
    for drafter, options in (("prompt-lookup", None), (f"draft-model:{original}", {"quantization": "int4-32"})):
        speculator = Speculator(original, drafter, drafter_options=options, shape="chain(3)", quantization="int4")
        assert speculator.target.execution == "native"
        assert generate(speculator, ROWS, max_new_tokens=12) == texts


# -- without the kernels ---------------------------------------------------------------------------------------------------


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setattr(native, "refusal", lambda dtype: "no C compiler was found")
    warn_once.cache_clear()


@pytest.mark.parametrize(("kind", "bits"), [("Q4_K", "four"), ("Q5_0", "six"), ("Q6_K", "six")])
def test_a_gguf_file_runs_without_the_kernels(kind, bits, tmp_path, without_kernels, caplog):
    expected = gguf_file(tmp_path, kind, "wide-llama")
    options = {"gguf_file": "model.gguf", "dtype": "float32"}
    for _ in range(2):
        speculator = Speculator(str(tmp_path), "prompt-lookup", shape="chain(3)", **options)
    reasons = speculator.target.reasons
    assert speculator.target.execution == "eager" and f"its weights have {bits} bits" in reasons["packed"]
    assert "no C compiler" in reasons["fused"] and execution_line("eager", reasons).endswith(f"{reasons['fused']})")
    said = [record.message for record in caplog.records if "widens" in record.message]
    assert len(said) == 1 and "saves no time: the native kernels cannot be used: no C compiler" in said[0]
    speculator.model.generation_config.eos_token_id = None
    assert generate(speculator, ROWS, max_new_tokens=12) == [alone(expected, row, max_new_tokens=12) for row in ROWS]
    with pytest.raises(ConfigurationError, match=f"cannot be packed: its weights have {bits} bits"):
        Speculator(str(tmp_path), "none", execution="packed", **options)


def test_bits_of_several_widths_are_listed():
    layers = [layer_of(numbers(64, 64, bits=bits)) for bits in (4, 6, 8)]
    assert "its weights have four, six and eight bits" in refusal(torch.nn.Sequential(*layers), HINTS)
    assert "its weights have six and eight bits" in refusal(torch.nn.Sequential(*layers[1:]), HINTS)


@needs_kernels
def test_a_float16_checkpoint_says_that_bfloat16_is_faster(tmp_path, caplog):
    checkpoint(tmp_path, "awq", dtype=torch.float16)
    warn_once.cache_clear()
    target = Speculator(str(tmp_path), "none").target
    assert target.model.dtype == torch.float16 and target.execution == "eager" and "not torch.float16" in target.reasons["fused"]
    assert "not torch.float16; load the model with dtype='bfloat16'" in caplog.text
    caplog.clear()
    assert "fused" not in Speculator(str(tmp_path), "none", dtype="bfloat16").target.reasons and "widens" not in caplog.text


def test_int4_without_the_kernels_says_what_it_does_not_save(original, without_kernels, caplog):
    pytest.importorskip("torchao.quantization")
    target = Speculator(original, "none", quantization="int4").target
    assert target.execution == "eager" and "saves no time, and int4 no memory beside int8: the native kernels" in caplog.text


def test_a_quantized_model_object_says_what_is_faster(original, caplog):
    pytest.importorskip("torchao.quantization")
    warn_once.cache_clear()
    model = load_model(original, quantization="int4")
    target = Speculator(model, "none", self_test=False).target
    assert target.execution == "eager" and "execution='native' accepts that" in caplog.text
    caplog.clear()
    assert Speculator(plain(), "none").target.execution == "eager" and "widens" not in caplog.text


def test_weights_that_nothing_multiplies_on_a_cpu_are_named():
    torchao = pytest.importorskip("torchao.quantization")
    model = plain(dtype=torch.bfloat16)
    weight, groups = model.model.layers[1].mlp.up_proj.weight, torch.ones(2, 96, dtype=torch.bfloat16)
    made = torchao.Int4Tensor(torch.zeros(96, 32, dtype=torch.int8), groups, groups, [1, 32], weight.shape)
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(made, requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"torchao's Int4Tensor, which no CPU multiplies. Foredraft reads .*Intx, AWQ"):
        Target(model)


def test_rows_that_are_no_whole_number_of_groups_are_refused(original):
    pytest.importorskip("torchao.quantization")
    message = r"quantization='int4-128' makes groups of 128 weights, and rows of model.layers.0.self_attn.q_proj have 64; choose .*int4-32"
    model = plain()
    with pytest.raises(ConfigurationError, match=message):
        quantize(model, "int4-128")
    with pytest.raises(ConfigurationError, match=message):
        load_model(original, quantization="int4-128")


# -- what is wrong ---------------------------------------------------------------------------------------------------------


def without(part):
    def change(about, state):
        for name in [name for name in state if name.endswith(part)]:
            del state[name]

    return change


def turned(part):
    def change(about, state):
        for name in [name for name in state if name.endswith(part)]:
            state[name] = state[name][:-1].contiguous()

    return change


Q = "model.layers.0.self_attn.q_proj"


def of_one_dimension(part):
    def change(about, state):
        state[f"{Q}.{part}"] = state[f"{Q}.{part}"].flatten()

    return change


def as_if_plain(about, state):
    """Files with plain weights as well, and a configuration that says nothing."""
    about.clear()
    for name in [name for name in state if name.endswith(".qweight")]:
        module = plain().get_submodule(name.removesuffix(".qweight"))
        state[name.replace(".qweight", ".weight")] = module.weight.data.clone()


def in_floats(about, state):
    for name in [name for name in state if name.endswith("proj.weight")]:
        state[name] = state[name].float()


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("awq", without("scales"), r"is quantized by half: model.layers.0.self_attn.q_proj has qweight, qzeros, but no scales"),
        ("compressed-4", without("weight_scale"), r"quantized by half: .*q_proj has weight_packed.* but no weight_scale"),
        ("gptq", lambda about, state: about.update(group_size=128), r"contradicts its configuration: .*groups of 128 inputs need"),
        ("gptq", lambda about, state: about.update(bits=8), r"contradicts its configuration: .*weights of 4 bits each where 8 are stated"),
        (
            "compressed-4",
            lambda about, state: about["config_groups"]["group_0"]["weights"].update(num_bits=8),
            r"weights of 4 bits each where 8",
        ),
        ("awq", turned("scales"), r"contradicts its configuration: .*q_proj has scales of shape \(128, 1\) where groups of 32 inputs need"),
        ("gptq", turned("qweight"), r"contradicts its configuration: .* which are neither 4 nor 8 bits each"),
        ("gptq", lambda about, state: about.update(bits=3), r"quantized with gptq, with 3 bits. Foredraft reads AWQ \(gemm\) of 4 bits"),
        ("awq", lambda about, state: about.update(version="gemv"), r"quantized with awq, in the format 'gemv'"),
        ("gptq", lambda about, state: about.update(format="marlin"), r"quantized with gptq, in the format 'marlin'"),
        ("compressed-4", lambda about, state: about.update(format="nvfp4-pack-quantized"), r"in the format 'nvfp4-pack-quantized'"),
        (
            "compressed-8",
            lambda about, state: about["config_groups"]["group_0"].update(input_activations={"num_bits": 8}),
            "activations included",
        ),
        (
            "compressed-4",
            lambda about, state: about.update(transform_config={"config_groups": {"u": {"apply": [{"location": "output"}]}}}),
            "with transforms of activations",
        ),
        ("compressed-4", lambda about, state: about.update(config_groups={}), "and says not how"),
        (
            "compressed-4",
            lambda about, state: about["config_groups"].update(other=about_compressed(group=64)["config_groups"]["group_0"]),
            "in several ways",
        ),
        ("compressed-4", lambda about, state: about["config_groups"]["group_0"]["weights"].update(strategy="block"), "scales by 'block'"),
        (
            "awq",
            lambda about, state: [without(part)(about, state) for part in ("qweight", "qzeros", "scales")],
            "has no linear layer or experts with qweight",
        ),
        (
            "awq",
            lambda about, state: about.update(quant_method="modelopt"),
            "is quantized with modelopt, which is not read. Foredraft reads AWQ",
        ),
        ("awq", lambda about, state: about.update(quant_method="auto-round"), "cannot be loaded.*Foredraft reads AWQ"),
        ("awq", as_if_plain, r"has model.layers.0.mlp.down_proj.qweight, of quantized weights, but its config.json does not say how"),
        ("gptq", of_one_dimension("qweight"), "contradicts its configuration: model.layers.0.self_attn.q_proj has"),
        ("awq", of_one_dimension("qzeros"), "contradicts its configuration: model.layers.0.self_attn.q_proj has"),
        (
            "gptq",
            lambda about, state: state.update({f"{Q}.g_idx": torch.full((64,), 2**31 - 1, dtype=torch.int32)}),
            "groups up to 2147483647",
        ),
        ("gptq", lambda about, state: state.update({f"{Q}.g_idx": torch.zeros(63, dtype=torch.int32)}), r"g_idx of shape \(63,\)"),
        ("compressed-4", lambda about, state: about["config_groups"]["group_0"]["weights"].update(group_size=0), "with groups of 0 inputs"),
        ("compressed-4", lambda about, state: about["config_groups"]["group_0"]["weights"].update(group_size=33), "number of groups of 33"),
        ("compressed-int8-tensor", in_floats, "weights of torch.float32 beside their scales, where integers of 8 bits are needed"),
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_refused(method, change, message, tmp_path):
    checkpoint(tmp_path, method, change=change)
    with pytest.raises(ConfigurationError, match=message):
        load_model(str(tmp_path))


def test_quantized_weights_of_parts_that_the_model_lacks_are_left_out(tmp_path):
    """Such as layers that predict further tokens."""

    def change(about, state):
        state["mtp.0.mlp.up_proj.qweight"] = state["model.layers.0.mlp.up_proj.qweight"].clone()

    expected = checkpoint(tmp_path, "awq", change=change)
    assert torch.equal(logits(load_model(str(tmp_path))), logits(expected))


def test_names_and_numbers_as_people_write_them(tmp_path):
    expected = checkpoint(tmp_path, "awq", change=lambda about, state: about.update(quant_method="AWQ", bits="4"))
    assert torch.equal(logits(load_model(str(tmp_path))), logits(expected))


def test_a_quantized_head_is_not_tied(tmp_path):
    """Though the configuration says so."""
    model = plain()

    def change(about, state):
        parts, weight = stored("compressed-4", model.lm_head.out_features, model.lm_head.in_features, 99)
        state.pop("lm_head.weight", None)
        state.update({f"lm_head.{part}": each.contiguous() for part, each in parts.items()})
        model.lm_head.weight.data = weight

    model_of_body = checkpoint(tmp_path, "compressed-4", change=change)
    model_of_body.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data)
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(logits(load_model(str(tmp_path))), logits(model_of_body))


def test_quantized_weights_in_other_files_say_so(tmp_path):
    checkpoint(tmp_path, "gptq")
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="bin' is no safetensors file, and quantized checkpoints are read from these only"):
        load_model(str(tmp_path))


def test_groups_of_other_sizes_are_refused(tmp_path):
    def change(about, state):
        name = "model.layers.0.self_attn.q_proj.g_idx"
        state[name] = torch.zeros_like(state[name])

    checkpoint(tmp_path, "gptq", change=change)
    with pytest.raises(ConfigurationError, match="g_idx makes groups of other sizes than 32 inputs"):
        load_model(str(tmp_path))


def test_a_checkpoint_that_is_quantised_already_is_not_quantised_again(tmp_path):
    checkpoint(tmp_path, "awq")
    with pytest.raises(ConfigurationError, match="is already quantized; leave quantization out"):
        load_model(str(tmp_path), quantization="int4")


def test_what_the_files_have_is_what_the_test_wrote(tmp_path):
    checkpoint(tmp_path, "awq")
    state = load_file(tmp_path / "model.safetensors")
    assert state["model.layers.0.self_attn.q_proj.qweight"].shape == (64, 16)


# -- GGUF ------------------------------------------------------------------------------------------------------------------


def gguf_file(folder, kind, name="llama", rotary=None, scaling=None, without=(), more=()):
    """A file as llama.cpp's converter makes it, of ``kind``; and the model with the weights that it stands for. ``without`` some of these,
    and with tensors of ones that are named in ``more``."""
    gguf = pytest.importorskip("gguf")
    model, sort, architecture = plain(name), getattr(gguf.GGMLQuantizationType, kind), name.removeprefix("wide-").partition("-")[0]
    for key, each in model.named_parameters():
        if key.endswith(".bias"):  # zero in a new model
            each.data.uniform_(-0.2, 0.2, generator=torch.Generator().manual_seed(len(key)))
    config, writer = model.config, gguf.GGUFWriter(folder / "model.gguf", architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if architecture != "phi3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_dimension_count(int(64 * rope.get("partial_rotary_factor", 1)) if architecture == "phi3" else config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if rotary is not None:
        writer.add_tensor("rope_freqs.weight", rotary.numpy())
    if architecture in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if (original := rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)) is not None:
        writer.add_rope_scaling_orig_ctx_len(original)
    if scaling is not None:
        writer.add_rope_scaling_type(scaling)
    for which in ("long", "short") if rope["rope_type"] == "longrope" else ():
        writer.add_tensor(f"rope_factors_{which}.weight", torch.tensor(rope[f"{which}_factor"]).numpy())
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        if (key == "lm_head.weight" and config.tie_word_embeddings) or key in without:
            continue
        target = f"{names.get_name(key.rpartition('.')[0])}.{key.rpartition('.')[2]}"
        turned = architecture == "llama" and ("q_proj" in key or "k_proj" in key)
        heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
        given = tensor
        if turned:  # ``permute`` of llama.cpp's converter
            given = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        if tensor.ndim == 1:
            writer.add_tensor(target, (given + 1 if "gemma" in name else given).numpy())
            continue
        packed = in_blocks(given, kind)
        writer.add_tensor(target, packed, raw_dtype=sort)
        stands = torch.from_numpy(gguf.dequantize(packed, sort))
        if turned:
            stands = stands.reshape(heads, len(tensor) // heads // 2, 2, -1).swapaxes(1, 2).reshape(tensor.shape)
        tensor.copy_(stands)
    for target in more:
        writer.add_tensor(target, torch.ones(2, 32, 32).numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    return model


KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
OTHERS = [("Q4_0", "wide-qwen3-yarn"), ("Q4_0", "wide-gemma2"), ("Q4_K", "wide-gemma3"), ("Q6_K", "wide-phi3"), ("Q4_0", "wide-phi3-long")]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("Q4_0", "llama"), ("Q8_0", "qwen3"), *covered(KINDS, ["wide-llama", "wide-qwen3"], ways=1), *OTHERS],
)
def test_a_gguf_file_keeps_its_bits(kind, name, tmp_path, always):
    expected = gguf_file(tmp_path, kind, name)
    found = load_model(str(tmp_path), gguf_file="model.gguf", dtype="float32")
    wanted = expected.state_dict()
    weights = {key: each for key, each in found.named_parameters() if isinstance(each, GroupedTensor)}
    assert len(weights) == expected.config.num_hidden_layers * (4 if "phi3" in name else 7) + 1 and {
        each.bits for each in weights.values()
    } == {8 if kind == "Q8_0" else 4 if kind.startswith("Q4") else 6}
    assert all(torch.equal(each.dequantize(), wanted[key]) for key, each in weights.items())
    assert torch.equal(found.get_input_embeddings().weight, wanted["model.embed_tokens.weight"])
    assert torch.allclose(logits(found), logits(expected), atol=1e-5)
    if all(native.refusal(dtype) is None for dtype in DTYPES):
        speculator = Speculator(
            str(tmp_path), "prompt-lookup", gguf_file="model.gguf", dtype="float32", shape="chain(3)", execution="native"
        )
        speculator.model.generation_config.eos_token_id = None
        assert generate(speculator, ROWS, max_new_tokens=12) == [alone(expected, row, max_new_tokens=12) for row in ROWS]


def test_a_gguf_file_of_a_chat_model_ends_at_the_end_of_a_turn(tmp_path, monkeypatch):
    """And settings beside it are used."""
    gguf = pytest.importorskip("gguf")
    write = gguf.GGUFWriter.write_header_to_file

    def with_ends(self):
        self.add_eos_token_id(1)
        self.add_eot_token_id(6)
        write(self)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_ends)
    gguf_file(tmp_path, "Q4_0")
    assert load_model(str(tmp_path), gguf_file="model.gguf").generation_config.eos_token_id == [1, 6]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 5], "top_k": 7, "do_sample": true}')
    found = load_model(str(tmp_path), gguf_file="model.gguf").generation_config
    assert (found.eos_token_id, found.top_k) == ([1, 5, 6], 7)


@pytest.mark.parametrize("kind", ["TQ2_0", "F16", "Q4_0"])
def test_what_a_gguf_file_has_in_other_kinds_is_widened_and_said(kind, tmp_path, recwarn):
    """Not silently: it takes several times the memory that the file's size promises."""
    gguf_file(tmp_path, kind, "wide-llama")
    found = load_model(str(tmp_path), gguf_file="model.gguf", dtype="float32")
    said = [str(each.message) for each in recwarn if "widened" in str(each.message)]
    assert isinstance(found.model.layers[0].mlp.down_proj.weight, GroupedTensor) == (kind == "Q4_0")
    if kind in ("F16", "Q4_0"):
        assert not said
    else:
        (said,) = said
        assert f"weights in {kind}, which no kernel reads" in said and said.endswith("Q4_K, Q5_K, Q6_K, MXFP4")


def test_the_positions_of_llama_3_are_scaled_as_its_gguf_file_says(tmp_path):
    frequency = 1e4 ** (-torch.arange(0, 64, 2) / 64)
    length = 2 * torch.pi / frequency
    smooth = (8192 / length - 1) / 3
    between = 1 / ((1 - smooth) / 8 + smooth)
    factors = torch.where(length > 8192, 8.0, torch.where(length < 2048, 1.0, between))
    gguf_file(tmp_path, "Q8_0", "wide-llama", rotary=factors.float())
    found = load_model(str(tmp_path), gguf_file="model.gguf", dtype="float32")
    assert torch.allclose(found.model.rotary_emb.inv_freq, frequency / factors, rtol=1e-5) and factors.max() > 1
    gguf_file(tmp_path, "Q8_0", "wide-llama", rotary=factors.float() * 2)
    with pytest.raises(ConfigurationError, match="scales positions in another way than Llama"):
        load_model(str(tmp_path), gguf_file="model.gguf")


def test_positions_that_are_scaled_in_another_way_are_refused(tmp_path):
    gguf = pytest.importorskip("gguf")
    gguf_file(tmp_path, "Q8_0", "wide-llama", scaling=gguf.RopeScalingType.LONGROPE)
    with pytest.raises(ConfigurationError, match=r"model\.gguf' scales positions in a way that is not read \(longrope\)"):
        load_model(str(tmp_path), gguf_file="model.gguf")


def test_what_a_gguf_file_does_not_say_is_what_llama_cpp_takes_it_for(tmp_path):
    gemma = Gemma2Config(**{**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None})
    configure(gemma, "gemma2", {}.get, tmp_path)
    assert (gemma.attn_logit_softcapping, gemma.final_logit_softcapping) == (50.0, 30.0)
    assert gemma.layer_types == ["sliding_attention", "full_attention"]
    for said in ({"rope.scale_linear": 4.0}, {"rope.scaling.factor": 4.0}):
        llama = LlamaConfig(**BLOCKS)
        configure(llama, "llama", said.get, tmp_path)
        assert llama.rope_parameters["rope_type"] == "linear" and llama.rope_parameters["factor"] == 4.0


EXPERTS = [f"blk.{layer}.ffn_{part}_exps.weight" for layer in range(2) for part in ("gate", "up", "down")]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"without": ["model.layers.1.mlp.up_proj.weight"]}, r"model\.gguf' lacks model\.layers\.1\.mlp\.up_proj\.weight, unlike a Llama"),
        ({"more": EXPERTS}, r"has model\.layers\.0\.mlp\.experts\.down_proj, unlike a LlamaForCausalLM; load .* with quantization='int4'"),
    ],
)
def test_a_gguf_file_with_other_tensors_than_its_model_is_refused(how, message, tmp_path):
    """Such as Mixtral's, which llama.cpp calls a llama."""
    gguf_file(tmp_path, "Q8_0", "wide-llama", **how)
    with pytest.raises(ConfigurationError, match=message):
        load_model(tmp_path / "model.gguf")


def test_a_gguf_file_whose_tensors_contradict_what_it_says_is_refused(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    said, wrote = gguf.GGUFWriter.add_feed_forward_length, gguf.GGUFWriter.add_tensor
    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_feed_forward_length", lambda self, size: said(self, size + 32))
        gguf_file(tmp_path, "Q8_0")
    with pytest.raises(
        ConfigurationError, match=r"contradicts its configuration: .*mlp\.\w+_proj has weights of .* are needed; load a folder"
    ):
        load_model(tmp_path / "model.gguf")

    def longer(self, name, tensor, **options):
        wrote(self, name, torch.ones(96).numpy() if name == "output_norm.weight" else tensor, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", longer)
    gguf_file(tmp_path, "Q8_0")
    with pytest.raises(ConfigurationError, match=r"model\.gguf' has another shape of model\.norm\.weight, unlike a LlamaForCausalLM"):
        load_model(tmp_path / "model.gguf")


@pytest.mark.parametrize("architecture", ["mamba", "deepseek2"])
def test_gguf_files_of_other_architectures_are_refused(architecture, tmp_path):
    """Before transformers reads what they say of the model."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(32.0)
    writer.add_tensor("token_embd.weight", torch.ones(4, 4).numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    with pytest.raises(ConfigurationError, match=rf"has a model of llama\.cpp's '{architecture}'; of GGUF files llama, .* are read"):
        load_model(tmp_path / "model.gguf")


def test_several_gguf_files_of_a_model_are_to_be_merged(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=1)
    for name in ("token_embd.weight", "output_norm.weight"):
        writer.add_tensor(name, torch.ones(4, 4).numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    for number in (1, 2):
        with pytest.raises(ConfigurationError, match=r"-of-00002\.gguf' is one of 2 files of a model; .* llama-gguf-split --merge"):
            load_model(tmp_path / f"model-0000{number}-of-00002.gguf")


def test_a_gguf_file_may_be_named_by_its_path(tmp_path):
    expected = gguf_file(tmp_path, "Q8_0")
    zoo.load_tokenizer("zoo:python-1m").save_pretrained(tmp_path)
    for name in (tmp_path / "model.gguf", str(tmp_path / "model.gguf")):
        found = load_model(name, dtype="float32")
        assert torch.allclose(logits(found), logits(expected), atol=1e-5)
    assert name_of(found) == str(tmp_path / "model.gguf") and tokenizer_of(found) is not None
    assert hub.parted("owner/name/file.gguf") == ("owner/name", "file.gguf") and hub.parted("file.gguf") == (".", "file.gguf")


def test_gguf_files_that_are_not_read_say_so(tmp_path):
    pytest.importorskip("gguf")
    gguf_file(tmp_path, "Q4_0")
    with pytest.raises(ConfigurationError, match=r"there is no file 'other\.gguf' in"):
        load_model(str(tmp_path), gguf_file="other.gguf")
    with pytest.raises(ConfigurationError, match="is already quantized"):
        load_model(str(tmp_path), gguf_file="model.gguf", quantization="int4")


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_files_that_are_no_gguf_files_are_named(load, tmp_path, monkeypatch):
    gguf_file(tmp_path, "Q8_0", "wide-llama")
    whole = (tmp_path / "model.gguf").read_bytes()
    for content in (whole[:-1000], b"something else", b""):
        (tmp_path / "other.gguf").write_bytes(content)
        with pytest.raises(ConfigurationError, match=r"^'.*other\.gguf' is no GGUF file, or only a part of one: "):
            load(tmp_path / "other.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigurationError, match=r"needs gguf; install it with: pip install 'foredraft\[gguf\]'"):
        load(tmp_path / "model.gguf")


def test_a_folder_with_gguf_files_alone_says_how_to_name_one(tmp_path):
    gguf_file(tmp_path, "Q8_0")
    with pytest.raises(ConfigurationError, match=r"it has no config\.json; name a GGUF file in it, such as '.*model\.gguf'"):
        load_tokenizer(tmp_path)


def test_a_gguf_file_of_the_hub_is_asked_for_by_the_id_of_its_repository(tmp_path, monkeypatch):
    asked = []
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    def download(repository, name, **how):
        asked.append((repository, name))
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "unreachable", lambda endpoint: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert hub.config_of("owner/name/model.gguf") == {"model_type": "llama"} and asked == [("owner/name", "config.json")]
