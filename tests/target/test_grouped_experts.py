"""Mixtures of experts with weights of four and eight bits: what the kernels make of them, and what is read of checkpoints."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from cover import covered, nightly_but
from helpers import alone, generate
from kernel_cases import DTYPES, config_of, needs_kernels
from kernel_cases import always as always  # a fixture
from safetensors.torch import save_file
from stored import ABOUT, in_blocks, stored
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from foredraft import ConfigurationError, Speculator
from foredraft.backends import native
from foredraft.backends.experts import Mixture
from foredraft.backends.narrow import is_held, parts_of
from foredraft.loading import load_model, load_tokenizer
from foredraft.quantization import quantize, quantized
from foredraft.quantization.grouped import GroupedTensor, bytes_from
from foredraft.target import Target

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}  # of the largest number


def grouped(like, *, bits=4, group=32, kind="zeros", transposed=False, seed=0):
    """A weight of the shape of ``like`` with random integers, scales that differ, and extreme zero points."""
    random, limit = torch.Generator().manual_seed(seed), (1 << bits) - 1
    count, outputs, inputs = like.shape if not transposed else like.transpose(1, 2).shape
    codes = torch.randint(0, limit + 1, (count, outputs, inputs), generator=random).to(torch.uint8)
    groups = -(-inputs // group)
    scale = (0.3 / limit * 10 ** (torch.rand(count, outputs, groups, generator=random) - 0.5)).half()
    zeros, others = limit // 2 + 1, {}
    if kind == "floats":
        scale, zeros, others = torch.pow(2.0, (scale.float() * 3).log2().round()).bfloat16(), 0, {"floats": True}
    elif kind != "one zero":
        zeros = torch.randint(0, limit + 1, scale.shape, generator=random).to(torch.uint8)
    if kind == "nested":
        numbers = (3e-3 / limit * (1 + torch.rand(count, outputs, groups // 2, generator=random))).half()
        scale, zeros = torch.randint(1, 64, scale.shape, generator=random).to(torch.int8), zeros & 63
        others = {"over": numbers, "mins": numbers.flip(-1).contiguous()}
    how = {"bits": bits, "group": group, "dtype": like.dtype, "transposed": transposed}
    return GroupedTensor(bytes_from(codes, bits), scale, zeros, **others, **how)


def made(name, dtype, **changes):
    config = config_of(name)
    for key, value in changes.items():
        setattr(config, key, value)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)  # biases and norms that matter
    return model.to(dtype)


def with_groups(model, **how):
    """``model`` with the weights of all experts in groups."""
    for seed, module in enumerate(each for each in model.modules() if hasattr(each, "is_transposed")):
        for name in ("gate_up_proj", "down_proj"):
            made = grouped(getattr(module, name), transposed=module.is_transposed, seed=seed, **how)
            setattr(module, name, torch.nn.Parameter(made, requires_grad=False))
    return model


def experts_of(model):
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


def in_double(module, x, chosen, scores):
    """What the experts make of ``x``, from the weights that their integers stand for."""
    gate_up, down = (getattr(module, name).dequantize(torch.float32).double() for name in ("gate_up_proj", "down_proj"))
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for expert, score in zip(chosen[token].tolist(), scores[token].double()):
            both = gate_up[expert] @ x[token].double()
            if module.has_bias:
                both += module.gate_up_proj_bias[expert].double()
            thin = down[expert] @ module._apply_gate(both[None])[0]
            if module.has_bias:
                thin += module.down_proj_bias[expert].double()
            out[token] += score * thin
    return out


FORMATS = [
    {"bits": 4, "group": 32},
    {"bits": 4, "group": 64, "kind": "one zero"},  # the last group of the inner inputs is shorter
    {"bits": 8, "group": 32},
    {"bits": 8, "group": 16, "kind": "nested"},
    {"bits": 4, "group": 4096},
    {"bits": 4, "group": 32, "kind": "floats"},
]


@needs_kernels
@torch.inference_mode()
@pytest.mark.parametrize(("name", "how", "dtype"), covered(["qwen3_moe", "gpt_oss"], FORMATS, DTYPES), ids=str)
def test_experts_at_their_bits(name, how, dtype, always, monkeypatch):
    """For some tokens, one, many that share an expert, and an expert that nobody takes."""
    inner = {"moe_intermediate_size": 96 if how.get("kind") == "nested" else 112} if name == "qwen3_moe" else {"intermediate_size": 96}
    model = with_groups(made(name, dtype, **inner), **how)
    wanted, generator = experts_of(model)[0], torch.Generator().manual_seed(1)
    x = torch.randn(61, 64, generator=generator).to(dtype)
    count = wanted.down_proj.shape[0]
    chosen = torch.stack([torch.randperm(count - 1, generator=generator)[:2] for _ in range(61)])
    chosen[:40, 0], chosen[:40, 1] = count - 2, torch.randint(0, count - 2, (40,), generator=generator)
    scores = torch.rand(61, 2, generator=generator)
    exact, theirs = in_double(wanted, x, chosen, scores), wanted(x, chosen, scores)
    target = Target(model, execution="native")
    module = experts_of(target.model)[0]
    assert isinstance(vars(module)["forward"], Mixture)
    found = module(x, chosen, scores)
    assert (found.double() - exact).abs().max() <= LIMIT[dtype] * exact.abs().max()
    assert (theirs.double() - exact).abs().max() <= 4 * LIMIT[dtype] * exact.abs().max()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # of the kernels
    assert torch.equal(module(x, chosen, scores), found)
    for begin, end in ((0, 1), (3, 4), (0, 6), (30, 61), (60, 61)):
        alone = module(x[begin:end].contiguous(), chosen[begin:end].contiguous(), scores[begin:end].contiguous())
        assert torch.equal(alone, found[begin:end]), "bits that depend on who else takes an expert"


# -- int4 and int8 ---------------------------------------------------------------------------------------------------------

INNER = {
    "qwen3_moe": "moe_intermediate_size",
    "qwen2_moe": "moe_intermediate_size",
    "mixtral": "intermediate_size",
    "gpt_oss": "intermediate_size",
}


def unquantised(name="qwen3_moe", dtype=torch.float32):
    return made(name, dtype, **{INNER[name]: 96})


def widened(model, name, dtype):
    """A plain model with the weights that those of ``model`` stand for."""
    found, state = unquantised(name, dtype), {}
    for key, each in model.named_parameters():
        state[key] = each.dequantize() if hasattr(each, "dequantize") and type(each) is not torch.nn.Parameter else each
    found.load_state_dict(state)
    return found


@torch.inference_mode()
def logits(model, tokens=7):
    return model(input_ids=torch.arange(3, 3 + tokens)[None], use_cache=False).logits


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_get_the_integers_of_linear_layers(name, kind):
    pytest.importorskip("torchao.quantization")
    model, before = unquantised(name), unquantised(name)
    held = sum(each.nbytes for each in before.parameters() if each.ndim == 3)
    quantize(model, kind)
    bits, kept = {"int4": 4, "int8": 8}[kind], 0
    for module, plain in zip(experts_of(model), experts_of(before), strict=True):
        for key in ("gate_up_proj", "down_proj"):
            weight, original = getattr(module, key), getattr(plain, key).detach()
            assert isinstance(weight, GroupedTensor) and weight.shape == original.shape and weight.bits == bits
            kept += sum(part.nbytes for part in parts_of(weight))
            for expert in range(len(original)):
                rows = original[expert].T.contiguous() if module.is_transposed else original[expert]
                theirs, mine = quantized(rows, kind), weight.mapped(lambda each, e=expert: each[e], transposed=False)
                assert torch.equal(mine.dequantize(), theirs.dequantize()) and torch.equal(mine.scale, theirs.scale)
                assert torch.equal(weight[expert], mine.dequantize().T if module.is_transposed else mine.dequantize())
    assert kept <= held * (bits / 32 + 1 / 16)


@torch.inference_mode()
@pytest.mark.parametrize("sums", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_without_kernels_experts_are_what_their_integers_stand_for(name, sums):
    pytest.importorskip("torchao.quantization")
    model = unquantised(name)
    quantize(model, "int4")
    expected = widened(model, name, torch.float32)
    for each in (model, expected):
        each.set_experts_implementation(sums)
    assert (logits(model) - logits(expected)).abs().max() <= 1e-5 * logits(expected).abs().max()
    assert not torch.allclose(logits(model), logits(unquantised(name)), atol=1e-3)


@needs_kernels
@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    nightly_but(
        {
            ("qwen3_moe", "int4", torch.bfloat16),
            ("qwen2_moe", "int8", torch.float32),
            ("mixtral", "int8", torch.bfloat16),
            ("gpt_oss", "int4", torch.float32),
        },
        [(name, kind, dtype) for name in INNER for kind in ("int4", "int8") for dtype in DTYPES],
    ),
)
def test_whole_models(name, kind, dtype, always):
    pytest.importorskip("torchao.quantization")
    model = unquantised(name, dtype)
    quantize(model, kind)
    exact, theirs = widened(model, name, torch.float32), widened(model, name, dtype)
    fresh = logits(model)
    target = Target(model, execution="native", owned=True)
    assert target.backend.overrides.native == 3, target.reasons
    assert all(isinstance(vars(module)["forward"], Mixture) for module in experts_of(model))
    assert not any(is_held(module.down_proj) for module in experts_of(model))
    texts = [[[(7 * i * i + number) % 100 for i in range(60)]] for number in range(9)]
    found = []
    for each in (Target(exact, execution="eager"), Target(theirs, execution="eager"), target):
        of_texts = []
        for text in texts:
            each.reset()
            each.open(text)
            of_texts.append(torch.stack([each.prefill(text, first=0), each.advance(torch.tensor([7]))]).float())
        found.append(torch.stack(of_texts))
    wanted, theirs, ours = found
    if dtype == torch.float32:
        assert (ours - wanted).abs().max() <= 5e-5 * wanted.abs().max()
    else:  # where rounding decides between two experts, a text is far off
        off, their_off = ((each - wanted).std(dim=(1, 2, 3)).median() for each in (ours, theirs))
        assert off <= 1.5 * their_off <= 0.5 * wanted.std()
    assert target.batch_invariant, target.reasons
    target.close()
    assert torch.equal(logits(model), fresh)


@needs_kernels
def test_texts_of_a_model_by_name(tmp_path, always):
    pytest.importorskip("torchao.quantization")
    unquantised().save_pretrained(tmp_path)
    model = load_model(str(tmp_path), quantization="int4")
    assert all(isinstance(module.down_proj, GroupedTensor) for module in experts_of(model))
    rows = [[(3 * i + row) % 100 for i in range(length)] for row, length in enumerate((23, 9, 15))]
    texts = [alone(widened(model, "qwen3_moe", torch.float32), row, max_new_tokens=12) for row in rows]
    for drafter, shape in (("none", None), (f"draft-model:{tmp_path}", "product(2,1)")):
        speculator = Speculator(str(tmp_path), drafter, shape=shape, quantization="int4", execution="native")
        assert speculator.target.execution == "native"
        assert generate(speculator, rows, max_new_tokens=12) == texts
        speculator.close()


def test_experts_of_sizes_that_make_no_groups_are_refused(tmp_path):
    pytest.importorskip("torchao.quantization")
    model = made("qwen3_moe", torch.float32)
    message = r"int4' makes groups of 32 weights, and rows of model\.layers\.0\.mlp\.experts\.down_proj have 48; int8 takes"
    with pytest.raises(ConfigurationError, match=message):
        quantize(model, "int4")
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        load_model(str(tmp_path), quantization="int4")


# -- MXFP4 -----------------------------------------------------------------------------------------------------------------


def mxfp4_checkpoint(folder, dtype=torch.bfloat16, change=None):
    """A folder with a gpt_oss whose experts are stored in MXFP4, and the model with the weights that transformers unpacks from it."""
    model, random = unquantised("gpt_oss", dtype), torch.Generator().manual_seed(5)
    state = {name: each.detach().clone() for name, each in model.state_dict().items()}
    for path, module in model.named_modules():
        for name in ("gate_up_proj", "down_proj") if hasattr(module, "is_transposed") else ():
            count, inputs, outputs = getattr(module, name).shape
            blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), generator=random).to(torch.uint8)
            scales = torch.randint(121, 126, blocks.shape[:-1], generator=random).to(torch.uint8)
            scales[0, :3, 0] = torch.tensor([0, 1, 60])
            getattr(module, name).data = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
            del state[f"{path}.{name}"]
            state |= {f"{path}.{name}_blocks": blocks, f"{path}.{name}_scales": scales}
    model.config.save_pretrained(folder)
    about = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    if change is not None:
        change(about, state)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": about, "dtype": str(dtype)[6:]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return model


DOWN = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpoint_in_mxfp4_is_read_at_its_bits(dtype, tmp_path):
    """Weight for weight as transformers unpacks it, without its packages for GPUs."""
    expected = mxfp4_checkpoint(tmp_path, dtype)
    model = load_model(str(tmp_path))
    weights = dict(expected.named_parameters())
    for name, each in model.named_parameters():
        assert torch.equal(each.dequantize() if isinstance(each, GroupedTensor) else each, weights[name]), name
        if isinstance(each, GroupedTensor):
            assert sum(part.nbytes for part in parts_of(each)) == each.numel() * 4.5 / 8
    assert sum(isinstance(each, GroupedTensor) for each in model.parameters()) == 2 * 3
    assert model.config.quantization_config.quant_method != "mxfp4" and not list(experts_of(model)[0].buffers())
    assert (logits(model) - logits(expected)).abs().max() <= (1e-5 if dtype == torch.float32 else 0.05) * logits(expected).abs().max()


@needs_kernels
@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_by_the_kernels(dtype, tmp_path, always):
    expected = mxfp4_checkpoint(tmp_path, dtype)
    target = Target(load_model(str(tmp_path)), execution="native", owned=True)
    assert target.backend.overrides.native == 3 and target.batch_invariant, target.reasons
    text, found = [[(7 * i * i) % 100 for i in range(60)]], []
    for each in (Target(copy.deepcopy(expected).float(), execution="eager"), Target(expected, execution="eager"), target):
        each.open(text)
        found.append(torch.stack([each.prefill(text, first=0), each.advance(torch.tensor([7]))]).float())
    wanted, theirs, ours = found
    if dtype == torch.float32:
        assert (ours - wanted).abs().max() <= 5e-5 * wanted.abs().max()
    else:
        assert (ours - wanted).std() <= 1.5 * (theirs - wanted).std() <= 0.5 * wanted.std()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about, state: state.pop(f"{DOWN}_scales"), r"by half: .*1.mlp.experts.down_proj has blocks, but no scales"),
        (
            lambda about, state: state.update({f"{DOWN}_scales": torch.zeros(4, 64, 2, dtype=torch.uint8)}),
            r"contradicts its configuration: .*layers.1.mlp.experts.down_proj has scales of shape \(4, 64, 2\) where 4 experts of 64 x 96",
        ),
        (
            lambda about, state: [state.pop(key) for key in list(state) if "_proj_" in key and "bias" not in key],
            "layer or experts with blocks",
        ),
    ],
)
def test_mxfp4_that_contradicts_itself_is_refused(change, message, tmp_path):
    mxfp4_checkpoint(tmp_path, change=change)
    with pytest.raises(ConfigurationError, match=message):
        load_model(str(tmp_path))
    with pytest.raises(ConfigurationError, match="is already quantized"):
        load_model(str(tmp_path), quantization="int4")


# -- GGUF ------------------------------------------------------------------------------------------------------------------


def gguf_file(folder, kinds, change=lambda name: True, name="qwen3_moe", fused=False):
    """A model as llama.cpp's converter makes it, with experts of ``kinds`` for gate, up and down, the first two ``fused`` or not; and the
    model it stands for."""
    gguf = pytest.importorskip("gguf")
    sizes = {"intermediate_size" if name == "gpt_oss" else "moe_intermediate_size": 256, "hidden_size": 256, "num_hidden_layers": 2}
    model = made(name, torch.float32, **sizes)
    architecture = {"qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss"}[name]
    config, writer = model.config, gguf.GGUFWriter(folder / "model.gguf", architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(256)
    writer.add_expert_count(config.num_local_experts if name == "gpt_oss" else config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if name == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, name.upper().replace("3_M", "3M")), config.num_hidden_layers)

    def keep(target, tensor, kind):
        """``tensor`` becomes what is written for it."""
        if kind is None or tensor.ndim == 1:
            writer.add_tensor(target, tensor.contiguous().numpy())
            return
        sort = getattr(gguf.GGMLQuantizationType, kind)
        packed = in_blocks(tensor.flatten(0, -2), kind).reshape(*tensor.shape[:-1], -1)
        if change(target):
            writer.add_tensor(target, packed, raw_dtype=sort)
        tensor.copy_(torch.from_numpy(gguf.dequantize(packed, sort)))

    for key, tensor in model.state_dict().items():
        layer, last = f"{key}.".split(".")[2], "bias" if key.endswith("_bias") else "weight"
        rows = tensor.transpose(1, 2) if name == "gpt_oss" and key.endswith(("gate_up_proj", "experts.down_proj")) else tensor
        if "gate_up_proj" in key:
            parts = (rows[:, ::2], rows[:, 1::2]) if name == "gpt_oss" else rows.chunk(2, 1)
            if fused:
                both = torch.cat(parts, 1)
                keep(f"blk.{layer}.ffn_gate_up_exps.{last}", both, None if last == "bias" else kinds[0])
                for part, half in zip(parts, both.chunk(2, 1)):
                    part.copy_(half)
                continue
            for kind, which, part in zip(kinds, ("gate", "up"), parts):
                keep(f"blk.{layer}.ffn_{which}_exps.{last}", part, None if last == "bias" else kind)
        elif "experts.down_proj" in key:
            keep(f"blk.{layer}.ffn_down_exps.{last}", rows, None if last == "bias" else kinds[2])
        elif key.endswith("sinks"):
            keep(f"blk.{layer}.attn_sinks.weight", tensor, None)
        else:
            target = f"{names.get_name(key.rpartition('.')[0])}.{key.rpartition('.')[2]}"
            keep(target, tensor, "Q8_0" if "_proj" in key else None)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    return model


@pytest.mark.parametrize(
    ("kinds", "name", "fused"),
    [
        (("Q4_0",) * 3, "qwen3_moe", False),
        (("Q4_0",) * 3, "qwen3_moe", True),
        (("Q4_K", "Q4_K", "Q6_K"), "qwen3_moe", False),
        (("Q5_1", "Q5_1", "Q8_0"), "qwen3_moe", False),
        (("Q4_0", "Q8_0", "Q4_1"), "qwen3_moe", False),
        (("MXFP4",) * 3, "gpt_oss", False),
        (("MXFP4",) * 3, "gpt_oss", True),
        (("Q5_1", "MXFP4", "Q8_0"), "gpt_oss", False),
    ],
)
def test_the_experts_of_a_gguf_file_keep_their_bits(kinds, name, fused, tmp_path, always):
    expected = gguf_file(tmp_path, kinds, name=name, fused=fused)
    model = load_model(str(tmp_path), gguf_file="model.gguf", dtype="float32")
    weights = dict(expected.named_parameters())
    for name, each in model.named_parameters():
        assert torch.equal(each.dequantize() if isinstance(each, GroupedTensor) else each, weights[name]), name
    for module in experts_of(model):
        assert isinstance(module.gate_up_proj, GroupedTensor) == (kinds[0] == kinds[1])  # or they are widened
        assert module.down_proj.bits == {"Q6_K": 6, "Q8_0": 8}.get(kinds[2], 4)
    if name == "qwen3_moe":
        assert model.config.moe_intermediate_size == 256 and model.config.norm_topk_prob
    assert (logits(model) - logits(expected)).abs().max() <= 1e-5 * logits(expected).abs().max()
    if all(native.refusal(dtype) is None for dtype in DTYPES):
        target, wanted = Target(model, execution="native", owned=True), logits(expected)
        assert target.backend.overrides.native == 2, target.reasons
        assert (logits(model) - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def test_a_gguf_file_that_lacks_experts_is_refused(tmp_path):
    gguf_file(tmp_path, ("Q4_0",) * 3, lambda name: name != "blk.1.ffn_up_exps.weight")
    with pytest.raises(ConfigurationError, match=r"has experts, but no tensor 'blk\.1\.ffn_up_exps\.weight'; load a file with all"):
        load_model(str(tmp_path), gguf_file="model.gguf")


def test_a_gguf_file_of_gpt_oss_that_lacks_a_number_is_refused(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    monkeypatch.setattr(gguf.GGUFWriter, "add_sliding_window", lambda self, size: None)
    gguf_file(tmp_path, ("MXFP4",) * 3, name="gpt_oss")
    with pytest.raises(ConfigurationError, match=r"does not say gpt-oss\.attention\.sliding_window; load another file of this model"):
        load_model(str(tmp_path), gguf_file="model.gguf")
    with pytest.raises(ConfigurationError, match=r"has no loadable tokenizer.*or put it into its folder"):
        load_tokenizer(str(tmp_path / "model.gguf"))


# -- AWQ, GPTQ and compressed-tensors --------------------------------------------------------------------------------------


def listed_checkpoint(folder, method, change=None, name="qwen3_moe"):
    """A folder with a model whose linear layers and experts, one by one, are stored by ``method``; and the model it stands for."""
    model, number = unquantised(name), 0
    gate, up, down = ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    state = {name: each for name, each in model.state_dict().items() if not name.endswith(("gate_up_proj", "experts.down_proj"))}

    def keep(prefix, tensor):
        nonlocal number
        parts, weight = stored(method, *tensor.shape, number := number + 1)
        state.pop(f"{prefix}.weight", None)
        state.update({f"{prefix}.{part}": each.contiguous() for part, each in parts.items()})
        tensor.data.copy_(weight)

    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and path != "lm_head":
            keep(path, module.weight)
        for expert in range(len(module.down_proj)) if hasattr(module, "is_transposed") else ():
            for each, rows in zip((gate, up), module.gate_up_proj[expert].chunk(2)):
                keep(f"{path}.{expert}.{each}", rows)
            keep(f"{path}.{expert}.{down}", module.down_proj[expert])
    if name == "mixtral":
        state = {key.replace(".mlp.", ".block_sparse_moe."): each for key, each in state.items()}
    model.config.save_pretrained(folder)
    if change is not None:
        change(state)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": ABOUT[method], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return model


LISTED = [("qwen3_moe", method) for method in ABOUT if method != "gptq-ordered"]


@pytest.mark.parametrize(("name", "method"), [*LISTED, ("mixtral", "awq"), ("mixtral", "compressed-4")])
def test_experts_that_files_list_one_by_one(name, method, tmp_path, always):
    with torch.no_grad():
        expected = listed_checkpoint(tmp_path, method, name=name)
    model = load_model(str(tmp_path))
    weights = dict(expected.named_parameters())
    for key, each in model.named_parameters():
        assert torch.equal(each.dequantize() if isinstance(each, GroupedTensor) else each, weights[key]), key
    for each in experts_of(model):
        assert isinstance(each.gate_up_proj, GroupedTensor) and not any(key.isdigit() for key, _ in each.named_children())
    assert (logits(model) - logits(expected)).abs().max() <= 1e-5 * logits(expected).abs().max()
    if all(native.refusal(dtype) is None for dtype in DTYPES):
        target, wanted = Target(model, execution="native", owned=True), logits(expected)
        assert target.backend.overrides.native == 3, target.reasons
        assert (logits(model) - wanted).abs().max() <= 3e-5 * wanted.abs().max()


EXPERT = "model.layers.1.mlp.experts.3"


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("gptq-ordered", lambda state: None, r"contradicts its configuration: .*experts has groups of inputs in an order of their own"),
        ("awq", lambda state: state.pop(f"{EXPERT}.up_proj.scales"), r"by half: .*experts\.3 has gate_proj, down_proj, but no up_proj"),
        ("awq", lambda state: state.pop(f"{EXPERT}.up_proj.qzeros"), r"by half: .*experts\.3\.up_proj has qweight, scales, but no qzeros"),
        (
            "awq",
            lambda state: state.update({"model.layers.0.mlp.gate.scales": torch.ones(2, 8)}),
            r"has model\.layers\.0\.mlp\.gate quantized with awq, which is not read .*with quantization='int4'",
        ),
        (
            "gptq",
            lambda state: state.update({"model.layers.0.block.experts.0.w1.scales": torch.ones(2, 8)}),
            r"has model\.layers\.0\.block\.experts\.0\.w1 quantized with gptq, which is not read",
        ),
    ],
)
@torch.no_grad()
def test_listed_experts_that_are_not_read_are_refused(method, change, message, tmp_path):
    listed_checkpoint(tmp_path, method, change)
    with pytest.raises(ConfigurationError, match=message):
        load_model(str(tmp_path))
