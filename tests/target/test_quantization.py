"""Weights of eight bits: what torchao makes of a model is the target, by torch's own passes and by the kernels in ``native``."""

from __future__ import annotations

import builtins
import copy

import pytest
import torch
from cover import covered
from helpers import PAD, alone, generate, repetitive
from kernel_cases import always as always  # a fixture
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, Qwen2Config, Qwen3Config, TorchAoConfig

from foredraft import ConfigurationError, Speculator, TokenTree, audit
from foredraft.backends import native
from foredraft.backends import packing as packing_module
from foredraft.backends.kernel_pass import NativeModel
from foredraft.backends.narrow import is_held, is_int8
from foredraft.backends.packing import HINTS, Kind, Packing, refusal, sharing
from foredraft.backends.products import NATIVE, Product
from foredraft.drafters.draft_model import DraftModel
from foredraft.loading import load_model
from foredraft.quantization import quantize
from foredraft.target import Target

torchao = pytest.importorskip("torchao.quantization")
ROWS = [[3 + token % 90 for token in row] for row in repetitive((23, 9, 15))]
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}  # of the largest value, as for kernels of weights as they are
SIZES = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
MODELS = {
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-biases": LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
}
needs_kernels = pytest.mark.skipif(any(native.refusal(dtype) for dtype in DTYPES), reason="no kernels here")


def plain(name="llama-tied", dtype=torch.float32, seed=3):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name]), attn_implementation="sdpa").to(dtype).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)  # biases and norms that matter
    return model


def quantised(name="llama-tied", dtype=torch.float32):
    """What a user quantises himself and hands in."""
    model = plain(name, dtype)
    quantize(model)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    plain().save_pretrained(folder)
    return str(folder)


def assert_close(got, wanted, dtype):
    assert (got.float() - wanted.float()).abs().max() <= TOLERANCE[dtype] * wanted.float().abs().max()


@torch.inference_mode()
def logits(model, tokens=7):
    return model(input_ids=torch.arange(3, 3 + tokens)[None], use_cache=False).logits


def linear_weights(model):
    return {name: module.weight for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


# -- loading ---------------------------------------------------------------------------------------------------------------


def test_a_name_is_loaded_as_transformers_would(checkpoint):
    wanted = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype="auto", quantization_config=TorchAoConfig(torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    )
    found = load_model(checkpoint, quantization="int8")
    theirs = linear_weights(wanted)
    for name, weight in linear_weights(found).items():
        if name == "lm_head":
            continue
        assert is_int8(weight) and torch.equal(weight.qdata, theirs[name].qdata) and torch.equal(weight.scale, theirs[name].scale)
    assert torch.equal(logits(found), logits(wanted))
    assert not torch.equal(logits(found), logits(plain()))  # another model


@pytest.mark.parametrize("load", [lambda checkpoint: load_model(checkpoint, quantization="int8"), lambda checkpoint: quantised()])
def test_a_tied_head_and_the_embeddings_stay_as_they_are(load, checkpoint):
    model, original = load(checkpoint), plain()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, original.lm_head.weight)
    assert all(is_int8(weight) == (name != "lm_head") for name, weight in linear_weights(model).items())


def test_what_it_does_to_a_weight():
    weight = plain().model.layers[0].mlp.up_proj.weight.detach()
    found = quantised().model.layers[0].mlp.up_proj.weight
    assert found.qdata.dtype == torch.int8 and found.scale.shape == (96, 1)
    assert ((found.dequantize() - weight).abs() <= 0.501 * found.scale).all()  # half a step, or one that was cut at 127.5 of them


def test_an_embedded_model_is_quantised_too():
    speculator = Speculator("zoo:python-1m", drafter="none", quantization="int8", dtype="float32")
    kinds = {name: type(weight).__name__ for name, weight in linear_weights(speculator.model).items()}
    assert set(kinds.values()) == {"Int8Tensor", "Parameter"} and kinds["lm_head"] == "Parameter"
    model = load_model("zoo:python-1m", dtype="float32", quantization="int8")
    assert generate(speculator, ROWS, max_new_tokens=8) == [alone(model, row, max_new_tokens=8) for row in ROWS]


def test_what_can_not_be_done_is_refused(checkpoint, tmp_path):
    with pytest.raises(ConfigurationError, match="unknown quantization 'int3'; choose int8"):
        Speculator("zoo:python-1m", quantization="int3")
    with pytest.raises(ConfigurationError, match="unknown quantization 'int3'; choose int8"):
        Speculator("zoo:python-1m", "draft-model:zoo:python-1m", drafter_options={"quantization": "int3"})
    with pytest.raises(ConfigurationError, match=r"a model object .*quantize it yourself.*TorchAoConfig"):
        Speculator(plain(), quantization="int8")
    with pytest.raises(ConfigurationError, match=r"a model object .*quantize it yourself"):
        DraftModel(plain(), quantization="int8")
    load_model(checkpoint, quantization="int8").save_pretrained(tmp_path / "eight")
    with (
        pytest.raises(ConfigurationError, match="is already quantized; leave quantization out"),
        pytest.warns(UserWarning, match="quantization_config"),
    ):
        load_model(str(tmp_path / "eight"), quantization="int8")
    assert is_int8(load_model(str(tmp_path / "eight")).model.layers[0].mlp.up_proj.weight)
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=50)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ConfigurationError, match="no linear layers that could be quantized"):
        load_model(str(tmp_path / "gpt2"), quantization="int8")


def test_without_torchao_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest, **options):
        if name.startswith("torchao"):
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigurationError, match=r"needs torchao; install it with: pip install 'foredraft\[int8\]'"):
        Speculator("zoo:python-1m", quantization="int8")


# -- the loop --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", ["eager", pytest.param("native", marks=needs_kernels)])
def test_models_that_are_handed_in_are_the_target(execution, checkpoint, always):
    by_transformers = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype="auto", quantization_config=TorchAoConfig(torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    )
    for model in (quantised(), by_transformers):
        expected = [alone(model, row, max_new_tokens=12) for row in ROWS]
        for drafter, shape in (("prompt-lookup", "chain(4)"), (DraftModel(plain()), "product(2,1,1)")):
            speculator = Speculator(model, drafter, shape=shape, execution=execution)
            assert speculator.target.execution == execution
            assert generate(speculator, ROWS, max_new_tokens=12) == expected
            speculator.close()
        assert is_held(model.model.layers[0].mlp.up_proj.weight)
        assert [alone(model, row, max_new_tokens=12) for row in ROWS] == expected


def test_a_draft_of_eight_bits_costs_nothing_in_exactness(checkpoint):
    target = plain()
    expected = [alone(target, row, max_new_tokens=12) for row in ROWS]
    speculator = Speculator(
        target, f"draft-model:{checkpoint}", drafter_options={"quantization": "int8"}, shape="chain(3)", execution="eager"
    )
    assert is_int8(speculator.drafter.model.model.model.layers[0].mlp.up_proj.weight)
    out = speculator.generate(torch.tensor([ROWS[0]]), max_new_tokens=12, pad_token_id=PAD)
    assert out.sequences[0, len(ROWS[0]) :].tolist() == expected[0] and out.stats.acceptance_length > 1.5
    assert generate(speculator, ROWS, max_new_tokens=12) == expected


def test_the_audit_finds_a_target_of_eight_bits_exact(checkpoint):
    speculator = Speculator(checkpoint, f"draft-model:{checkpoint}", shape="chain(2)", quantization="int8")
    report = audit(speculator, prompts=ROWS[:2], parts=("exact", "keyed"), max_new_tokens=12, temperature=1.0, do_sample=True)
    assert report.keyed and all(part.passed for part in report.keyed), report


# -- the kernels -----------------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (100, 64), (192, 352), (17, 96)])
def test_products(outputs, inputs, bias, dtype):
    layer = torch.nn.Linear(inputs, outputs, bias=bias).to(dtype)
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    layer.weight.qdata[:3, :2] = torch.tensor([-128, 127])
    product = Product([layer], NATIVE)
    dense = layer.weight.dequantize(torch.float32)
    with torch.inference_mode():
        for tokens in (1, 2, 3, 5, 6, 7, 13, 31):
            x = torch.randn(2, tokens, inputs).to(dtype)
            exact = torch.nn.functional.linear(x.float(), dense, None if layer.bias is None else layer.bias.float())
            assert_close(product(x), exact, dtype)
            assert (product(x).float() - exact).abs().max() <= 3 * 2.0**-8 * exact.abs().max()  # three roundings to the dtype at most
            assert_close(product(x), layer(x), dtype)
    (values,) = product.weights()
    assert torch.equal(values, layer.weight.qdata)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_gets_the_same_bits_among_any_number(dtype):
    """Of many tokens, weights are widened for a piece of their inputs at a time."""
    inputs = 1024 + 352
    layer = torch.nn.Linear(inputs, 100).to(dtype)
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    product, dense = Product([layer], NATIVE), layer.weight.dequantize(torch.float32)
    x = torch.randn(300, inputs).to(dtype)
    with torch.inference_mode():
        alone = torch.cat([product(token[None]) for token in x])
        for tokens in (2, 3, 7, 15, 16, 17, 32, 33, 49, 65, 300):
            assert torch.equal(product(x[:tokens]), alone[:tokens]), tokens
        assert_close(alone, torch.nn.functional.linear(x.float(), dense, layer.bias.float()), dtype)


@needs_kernels
def test_products_round_where_torchao_rounds():
    """In bfloat16 almost every number is the same; scales or sums that stayed in float32 would differ in a third of them."""
    layer = torch.nn.Linear(352, 192).to(torch.bfloat16)
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    x = torch.randn(64, 352, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    with torch.inference_mode():
        assert (Product([layer], NATIVE)(x) == layer(x)).float().mean() > 0.97


@needs_kernels
@torch.inference_mode()
@pytest.mark.parametrize(("name", "dtype"), covered(list(MODELS), DTYPES, ways=1))
def test_whole_models_ragged_with_trees(name, dtype, always):
    texts = [[(7 * i + row) % 100 for i in range(length)] for row, length in enumerate((40, 3, 17))]
    kernels = Target(quantised(name, dtype), execution="native", owned=True)
    assert kernels.backend.overrides.native == 3
    assert isinstance(vars(kernels.model.model)["forward"], NativeModel)
    assert not is_held(kernels.model.model.layers[0].mlp.up_proj.weight)
    chain = torch.randint(0, 100, (3, 4), generator=torch.Generator().manual_seed(1))
    tree = TokenTree(chain.repeat(1, 2)[:, :5], torch.tensor([[-1, 0, 0, 1, 2]] * 3))
    found = []
    for target in (Target(quantised(name, dtype), execution="eager"), kernels):
        target.open(texts)
        steps = [target.prefill(texts, first=0), target.score(TokenTree.from_chain(chain))]
        target.commit(None, [4, 2, 1])
        steps.append(target.score(tree))
        target.commit(torch.tensor([[0, 2, 4], [0, 1, 3], [0, 1, 3]]), [3, 1, 2])
        steps.append(target.advance(chain[:, 0]))
        found.append(steps)
    for wanted, got in zip(*found):
        assert_close(got, wanted, dtype)
    model = kernels.model
    kernels.close()
    assert torch.equal(logits(model), logits(quantised(name, dtype)))


@needs_kernels
@pytest.mark.parametrize("owned", [True, False])
def test_weights_are_given_back(owned, always):
    model = quantised("llama-biases")
    before = {name: (weight, weight.qdata.clone()) for name, weight in linear_weights(model).items() if is_int8(weight)}
    wanted = logits(model)
    packing = Packing(model, lambda: logits(model), owned=owned, hints=(NATIVE,))
    assert all(is_held(weight) != owned for weight, _ in before.values())
    held = sum(values.numel() for _, values in before.values())
    assert (
        held <= sum(each.packed.nbytes for product, _, _ in packing._products if product.quantised for each in product.pieces) <= 1.4 * held
    )  # padded to 64
    assert_close(logits(model), wanted, torch.float32)
    packing.undo()
    for name, weight in linear_weights(model).items():
        if name in before:
            assert weight is before[name][0] and torch.equal(weight.qdata, before[name][1])
    assert torch.equal(logits(model), wanted)


def test_layers_of_different_widths_are_not_joined():
    model = plain()
    head = model.lm_head
    torchao.quantize_(
        model, torchao.Int8WeightOnlyConfig(set_inductor_config=False), filter_fn=lambda m, name: name.endswith(("q_proj", "up_proj"))
    )
    groups = sharing(model, lambda: logits(model))
    assert all(len({is_int8(layer.weight) for layer in group}) == 1 for group in groups)
    assert [len(group) for group in groups] == [1, 2, 1, 1, 1, 1] * 3 + [1] and groups[-1] == [head]
    assert Kind.of(groups[0]).format.bits == 8 and not Kind.of(groups[1]).format.bits


def test_weights_of_eight_bits_have_one_layout():
    layer = quantised().model.layers[0].mlp.up_proj
    assert packing_module.preferred_hint([[layer]], (*HINTS, NATIVE)) == NATIVE
    assert packing_module.preferred_hint([[layer]], HINTS) is None


def test_other_quantised_tensors_are_left_alone():
    layer = torch.nn.Linear(64, 64)
    for config in (
        torchao.Int8WeightOnlyConfig(granularity=torchao.PerGroup(32), set_inductor_config=False),
        torchao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False),
    ):
        other = copy.deepcopy(layer)
        torchao.quantize_(other, config)
        assert not is_int8(other.weight)
        model = torch.nn.Sequential(other)
        assert refusal(model) == "it has no plain linear layers in float32 or bfloat16"


def test_there_is_no_other_layout():
    with pytest.raises(ConfigurationError, match=r"cannot be packed: its weights have eight bits.*native.*execution='auto'"):
        Target(quantised(), execution="packed")


@needs_kernels
def test_auto_takes_the_kernels_where_there_are_any(checkpoint, always, monkeypatch):
    assert Speculator(checkpoint, "none", quantization="int8").target.execution == "native"
    monkeypatch.setattr(native, "refusal", lambda dtype: "no compiler")
    left = Speculator(checkpoint, "none", quantization="int8").target
    assert left.execution == "eager" and "eight bits" in left.reasons["packed"]
