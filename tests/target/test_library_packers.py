"""Layers as the libraries themselves pack them: what is read is, bit for bit, what each library unpacks."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from stored import about_compressed

from foredraft.quantization.checkpoints import Stored

FILE = Path(__file__).parents[1] / "packed" / "layers.safetensors"  # made by python tests/packed
SHAPE = 32, 96
with safe_open(FILE, "pt") as opened:
    LAYERS = {name: json.loads(about) for name, about in opened.metadata().items() if name != "libraries"}


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
