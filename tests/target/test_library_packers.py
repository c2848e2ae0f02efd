"""Layers as the libraries themselves pack them: what is read is, bit for bit, what each library unpacks. And rows that are no whole number
of groups, and torchao's checkpoints that are not whole."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stored import ABOUT, about_compressed, awq, compressed, gptq, numbers
from transformers import AutoModelForCausalLM, Qwen3Config, TorchAoConfig

from foredraft import ConfigurationError, Speculator, UnsupportedModelError
from foredraft.backends import native
from foredraft.loading import load_model
from foredraft.quantization.checkpoints import BLOCK, Stored
from foredraft.quantization.grouped import GroupedTensor, codes_from
from foredraft.quantization.torchao_files import for_cpu, from_tiles

FILE = Path(__file__).parents[1] / "packed" / "layers.safetensors"  # made by python tests/packed
SHAPE = 32, 96
with safe_open(FILE, "pt") as opened:
    LAYERS = {name: json.loads(about) for name, about in sorted(opened.metadata().items()) if name != "libraries"}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_autoawq_and_gptqmodel(name):
    """The file has hashes of the float16 weights."""
    parts = {key.rpartition(".")[2]: each for key, each in load_file(FILE).items() if key.startswith(f"{name}.")}
    weight = Stored.of(LAYERS[name], "here").weight(parts, SHAPE, torch.float16)
    assert (weight.bits, weight.order is not None) == (LAYERS[name]["bits"], "ordered" in name)
    assert hashlib.sha256(weight.dequantize().numpy().tobytes()).hexdigest() == LAYERS[name]["sha256"]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["group", "channel", "tensor"])
@pytest.mark.parametrize(("form", "bits"), [("pack-quantized", 4), ("pack-quantized", 8), ("int-quantized", 8)])
def test_layers_of_compressed_tensors(form, bits, strategy, symmetric):
    library = pytest.importorskip("compressed_tensors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.utils import calculate_qparams

    outputs, group = SHAPE[0], 32 if strategy == "group" else None
    about = about_compressed(bits, group, form, strategy=strategy, symmetric=symmetric)
    scheme = quantization.QuantizationScheme(**about["config_groups"]["group_0"])
    made = torch.randn(SHAPE, generator=torch.Generator().manual_seed(bits)).bfloat16()
    made[0], made[1] = made[0].abs(), -made[1].abs()
    grouped = {"group": made.view(outputs, -1, 32), "channel": made[:, None], "tensor": made.view(1, 1, -1)}[strategy]
    scale, zero = (
        each.reshape(outputs if strategy != "tensor" else 1, -1) for each in calculate_qparams(*grouped.aminmax(dim=-1), scheme.weights)
    )
    if strategy == "tensor":
        scale, zero = scale[0], zero[0]
    compressor = library.compressors.BaseCompressor.load_from_registry(form)
    parts = compressor.compress({"weight": made, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    weight = Stored.of(about, "here").weight(parts, SHAPE, torch.bfloat16)
    assert weight.bits == bits and torch.equal(weight.dequantize(), compressor.decompress(parts, scheme)["weight"])


# -- rows that are no whole number of groups ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "group"), [(96, 64), (100, 32), (40, 64)])
@pytest.mark.parametrize("method", ["gptq", "gptq-8"])
def test_the_last_group_of_gptq_may_be_shorter(method, inputs, group):
    bits = 8 if "8" in method else 4
    made = numbers(32, inputs, bits=bits, group=group)
    codes, zeros = codes_from(made.qdata, bits), made.zeros.clamp(1, (1 << bits) - 1)
    padded = torch.cat((codes, codes.new_zeros(32, -inputs % (32 // bits))), 1)
    about = ABOUT[method] | {"group_size": group, "checkpoint_format": "gptq"}
    parts = gptq(padded, made.scale, zeros, group, bits=bits)
    parts["g_idx"] = parts["g_idx"][:inputs]
    groups = torch.arange(inputs) // group
    wanted = (codes.float() - zeros.float()[:, groups]) * made.scale.float()[:, groups]
    assert torch.equal(Stored.of(about, "here").weight(parts, (32, inputs), torch.float32).dequantize(), wanted)


@pytest.mark.parametrize("method", ["awq", "compressed-4", "compressed-8"])
def test_groups_of_awq_and_compressed_tensors_are_whole(method):
    """The libraries make no others."""
    bits, group = 8 if "8" in method else 4, 64
    made = numbers(32, 96, bits=bits, group=group)
    codes, zeros = codes_from(made.qdata, bits), made.zeros.clamp(1, (1 << bits) - 1)
    if method == "awq":
        about, parts = ABOUT["awq"] | {"group_size": group}, awq(codes, made.scale, zeros, group)
    else:
        about, parts = about_compressed(bits, group), compressed(codes, made.scale, zeros, group, bits=bits)
    with pytest.raises(ValueError, match="96 inputs, which are no whole number of groups of 64"):
        Stored.of(about, "here").weight(parts, (32, 96), torch.float32)


@pytest.mark.parametrize(("point", "found"), [(-9, "-1 to -1"), (100, "108 to 108")])
def test_zero_points_are_integers_of_as_many_bits_as_weights(point, found):
    """Older releases of compressed-tensors do not pack zero points, so files may hold others."""
    made = numbers(32, 96, group=32, zeros=False)
    parts = compressed(codes_from(made.qdata, 4), made.scale, None, 32)
    parts["weight_zero_point"] = torch.full((32, 3), point, dtype=torch.int8)
    with pytest.raises(ValueError, match=f"zero points from {found} where weights of 4 bits have 0 to 15"):
        Stored.of(about_compressed(4, 32), "here").weight(parts, (32, 96), torch.float32)


def test_a_layer_of_compressed_tensors_may_say_that_it_has_no_order():
    made = numbers(32, 96, group=32)
    parts = compressed(codes_from(made.qdata, 4), made.scale, made.zeros.clamp(1, 15), 32)
    stored = Stored.of(about_compressed(4, 32), "here")
    wanted = stored.weight(parts, (32, 96), torch.float32)
    found = stored.weight({**parts, "weight_g_idx": torch.full((96,), -1)}, (32, 96), torch.float32)
    assert found.order is None and torch.equal(found.dequantize(), wanted.dequantize())


def test_blocks_of_mxfp4_are_whole():
    parts = {"blocks": torch.zeros(2, 32, 2, 16, dtype=torch.uint8), "scales": torch.zeros(2, 32, 2, dtype=torch.uint8)}
    plain = torch.empty(2, 32, 48, device="meta")
    with pytest.raises(ValueError, match=f"48 inputs, which are no whole number of blocks of {BLOCK}"):
        Stored.of({"quant_method": "mxfp4"}, "here").experts(parts, plain, False)


# -- torchao's checkpoints ---------------------------------------------------------------------------------------------------


SIZES = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module", params=["int8", "int4"])
def torchao_folder(request, tmp_path_factory):
    torchao = pytest.importorskip("torchao.quantization")
    kinds = {
        "int8": torchao.Int8WeightOnlyConfig(set_inductor_config=False),
        "int4": torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(32)),
    }
    plain, folder = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(Qwen3Config(**SIZES)).save_pretrained(plain)
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=TorchAoConfig(kinds[request.param])).save_pretrained(folder)
    return folder


def changed(folder, to, change):
    """A copy of a checkpoint of torchao in the folder ``to``; ``change`` is given its tensors, its metadata and its configuration."""
    with safe_open(folder / "model.safetensors", "pt") as opened:
        state, about = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    config = json.loads((folder / "config.json").read_text())
    change(state, about, config)
    save_file(state, to / "model.safetensors", about)
    (to / "config.json").write_text(json.dumps(config))
    return str(to)


@pytest.mark.parametrize("part", ["qdata", "scale", "zero_point"])
def test_a_part_that_a_torchao_checkpoint_lacks_is_named(part, torchao_folder, tmp_path):
    folder = changed(torchao_folder, tmp_path, lambda state, about, config: state.pop(f"{UP}._weight_{part}"))
    with pytest.raises(ConfigurationError, match=rf"quantized by half: {UP}\.weight has \w+, \w+, but no {part}; download it again"):
        load_model(folder)


def shorter(part):
    def change(state, about, config):
        state[f"{UP}._weight_{part}"] = state[f"{UP}._weight_{part}"][:-1].contiguous()

    return change


def of_48(state, about, config):
    known = json.loads(about[f"{UP}.weight"])
    known["_data"]["block_size"] = [1, 48]
    about[f"{UP}.weight"] = json.dumps(known)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shorter("qdata"), r"up_proj\.weight has \w+ of shape \(96, \d\) where \(95, \d\) is needed"),
        (shorter("scale"), r"up_proj\.weight has scale of shape \(95, \d\) where \(96, \d\) is needed"),
        (shorter("zero_point"), r"up_proj\.weight has zero_point of shape \(95, \d\) where \(96, \d\) is needed"),
        (of_48, r"up_proj\.weight has 64 inputs, which are no whole number of groups of 48"),
        (
            lambda state, about, config: config.update(intermediate_size=128),
            r"gate_proj\.weight has shape \(96, 64\), and not \(128, 64\)",
        ),
    ],
)
def test_a_torchao_checkpoint_that_contradicts_itself_is_refused(change, message, torchao_folder, tmp_path):
    with pytest.raises(ConfigurationError, match=f"contradicts itself: .*{message}; load a folder whose files"):
        load_model(changed(torchao_folder, tmp_path, change))


def test_a_torchao_checkpoint_that_is_whole_is_loaded(torchao_folder, tmp_path):
    found = load_model(changed(torchao_folder, tmp_path, lambda *given: None))
    theirs = AutoModelForCausalLM.from_pretrained(torchao_folder)
    assert torch.equal(found.get_submodule(UP).weight.dequantize(), theirs.get_submodule(UP).weight.dequantize())


def test_a_torchao_checkpoint_with_one_scale_for_a_weight_is_loaded(torchao_folder, tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    layer = torch.nn.Linear(64, 96, bias=False)
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig(granularity=torchao.PerTensor(), set_inductor_config=False))

    def change(state, about, config):
        for name in [name for name in state if name.startswith(UP)]:
            del state[name]
        tensors, known = support.flatten_tensor_state_dict({f"{UP}.weight": layer.weight})
        state.update(tensors)
        about[f"{UP}.weight"] = known[f"{UP}.weight"]

    found = load_model(changed(torchao_folder, tmp_path, change))
    assert torch.equal(found.get_submodule(UP).weight.dequantize(), layer.weight.dequantize())
    (other := tmp_path / "other").mkdir()
    with pytest.raises(ConfigurationError, match=r"contradicts itself: .*scale of shape \(2, 1\) where \(1, 1\) is needed"):
        load_model(changed(tmp_path, other, lambda state, *rest: state.update({f"{UP}._weight_scale": torch.ones(2, 1)})))


def in_tiles(codes):
    """As torch's own packer for GPUs has them (``_convert_weight_to_int4pack``, 8 tiles of 16 inputs), with room for whole tiles."""
    outputs, inputs = -(-codes.shape[0] // 8) * 8, -(-codes.shape[1] // 1024) * 1024
    words = np.zeros((outputs // 8, inputs // 128, 32, 4), dtype=np.uint32)
    for (output, place), code in np.ndenumerate(codes.numpy().astype(np.uint32)):
        step, place = divmod(place, 128)
        pair, place = divmod(place, 32)
        tile, place = divmod(place, 16)
        upper, place = divmod(place, 8)
        words[output // 8, step, output % 8 * 4 + place // 2, pair] |= code << np.uint32(4 * (place % 2 * 4 + tile * 2 + upper))
    return torch.from_numpy(words.view(np.int32))


def for_gpus(kind, shape, group=32, **how):
    """A weight of torchao's for GPUs, and the numbers it stands for."""
    torchao = pytest.importorskip("torchao.quantization")
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    (outputs, inputs), generator = shape, torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, shape, generator=generator, dtype=torch.int32)
    scale = (0.01 + 0.02 * torch.rand(outputs, inputs // group, generator=generator)).bfloat16()
    zero = (0.03 * torch.randn(outputs, inputs // group, generator=generator)).bfloat16()
    expected = primitives._dequantize_affine_tinygemm(
        codes, (1, group), scale.float(), zero.float(), torch.int32, 0, 15, output_dtype=torch.float32
    )
    if kind == "Int4Tensor":
        signed = (codes - 8).to(torch.int8)
        packed = signed[:, ::2] & 15 | signed[:, 1::2] << 4
        return torchao.Int4Tensor(packed, scale.T.contiguous(), zero.T.contiguous(), [1, group], torch.Size(shape), **how), expected
    qdata = in_tiles(codes)
    both = torch.zeros(qdata.shape[1] * 128 // group, qdata.shape[0] * 8, 2, dtype=torch.bfloat16)
    both[: inputs // group, :outputs] = torch.stack((scale.T, zero.T), -1)
    return torchao.Int4TilePackedTo4dTensor(qdata, both, [1, group], torch.Size(shape), **how), expected


def with_weights(made):
    """A change for :func:`changed`: the weights of these layers are these."""
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")

    def change(state, about, config):
        for name, weight in made.items():
            for part in [part for part in state if part.startswith(name)]:
                del state[part]
            tensors, known = support.flatten_tensor_state_dict({f"{name}.weight": weight})
            state.update(tensors)
            about[f"{name}.weight"] = known[f"{name}.weight"]

    return change


GPUS = pytest.mark.parametrize("kind", ["Int4Tensor", "Int4TilePackedTo4dTensor"])


@GPUS
@pytest.mark.parametrize(("shape", "group"), [((20, 96), 32), ((8, 1024), 128), ((64, 64), 64)])
def test_int4_of_gpus_is_read_on_a_cpu(kind, shape, group):
    """The second kind is what pytorch/*-INT4 have on the hub."""
    weight, expected = for_gpus(kind, shape, group)
    found = for_cpu(weight, torch.float16, "here", "layer")
    assert (found.bits, found.group, found.dtype) == (4, group, torch.float16)
    assert torch.allclose(found.dequantize(torch.float32), expected, rtol=1e-6, atol=0)
    scaled, _ = for_gpus(kind, shape, group, act_pre_scale=torch.ones(shape[1]))
    assert for_cpu(scaled, torch.float16, "here", "layer") is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tiles_are_those_of_torchs_own_packer():
    codes = torch.randint(0, 16, (64, 1024), dtype=torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack((codes[:, ::2] << 4 | codes[:, 1::2]).cuda(), 8).cpu()
    assert torch.equal(packed, in_tiles(codes)) and torch.equal(from_tiles(packed), codes)


@GPUS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_checkpoint_for_gpus_runs_on_a_cpu(kind, dtype, torchao_folder, tmp_path):
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES), dtype=torch.float32)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and name != "lm_head"}
    made = {name: for_gpus(kind, tuple(layer.weight.shape)) for name, layer in layers.items()}
    folder = changed(torchao_folder, tmp_path, with_weights({name: weight for name, (weight, _) in made.items()}))
    target = Speculator(folder, "none", dtype=dtype).target
    assert {type(target.model.get_submodule(name).weight) for name in made} == {GroupedTensor}
    if native.refusal(torch.float32) is None:
        assert target.execution == "native" and "fused" not in target.reasons
    others = {name: each for name, each in load_model(folder, dtype="float32").state_dict().items() if name.rpartition(".")[0] not in made}
    model.load_state_dict(others | {f"{name}.weight": expected for name, (_, expected) in made.items()})
    ids = torch.randint(0, 100, (1, 12))
    with torch.inference_mode():
        logits, scale = model(input_ids=ids).logits[0, -1], model(input_ids=ids).logits.abs().max()
        target.open([ids[0].tolist()])
        found = target.prefill([ids[0].tolist()], first=0)
    assert (found[0].float() - logits).abs().max() < (0.03 if dtype == "bfloat16" else 1e-4) * scale


@GPUS
def test_int4_of_gpus_keeps_its_layout_for_other_devices(kind, torchao_folder, tmp_path):
    weight, _ = for_gpus(kind, (96, 64))
    folder = changed(torchao_folder, tmp_path, with_weights({UP: weight}))
    assert type(load_model(folder, device="meta").get_submodule(UP).weight).__name__ == kind
    assert type(load_model(folder, device="auto").get_submodule(UP).weight) is GroupedTensor


@GPUS
def test_int4_of_gpus_that_cannot_be_read_is_refused(kind, torchao_folder, tmp_path):
    weight, _ = for_gpus(kind, (96, 64), act_pre_scale=torch.ones(64))
    with pytest.raises(UnsupportedModelError, match=rf"torchao's {kind}, which no CPU multiplies. Foredraft reads .*Intx, AWQ"):
        Speculator(changed(torchao_folder, tmp_path, with_weights({UP: weight})), "none")
    weight, _ = for_gpus(kind, (96, 64))
    change = with_weights({UP: weight})
    folder = changed(torchao_folder, tmp_path, lambda *given: (change(*given), given[0].pop(f"{UP}._weight_qdata")))
    with pytest.raises(ConfigurationError, match=f"{UP}.weight has .*, but no qdata"):
        load_model(folder)
    weight.qdata = weight.qdata[..., :-1] if kind == "Int4Tensor" else weight.qdata[:-1]
    with pytest.raises(ConfigurationError, match=rf"contradicts itself: {UP}.weight has qdata of shape .* where \(96, 32\) is needed"):
        load_model(changed(torchao_folder, tmp_path, with_weights({UP: weight})))
