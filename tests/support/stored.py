"""Weights as AWQ, GPTQ, compressed-tensors and GGUF files have them."""

from __future__ import annotations

import pytest
import torch

from foredraft.quantization.grouped import GroupedTensor, bytes_from, codes_from


def numbers(outputs, inputs, *, bits=4, group=32, zeros=True, order=False, scales=torch.float16, dtype=torch.float32, seed=0):
    """A weight with random integers, scales that span three powers of ten, and extreme zero points."""
    random = torch.Generator().manual_seed(seed)
    groups, limit = -(-inputs // group), (1 << bits) - 1
    codes = torch.randint(0, limit + 1, (outputs, inputs), generator=random).to(torch.uint8)
    scale = (10 ** (torch.rand(outputs, groups, generator=random) * 3 - 3)).to(scales)
    found = torch.randint(0, limit + 2 if bits == 4 else 256, (outputs, groups), generator=random)
    found[0], found[-1] = 0, min(limit + 1, 255)
    how = torch.randperm(inputs, generator=random).int() if order else None
    return GroupedTensor(
        bytes_from(codes, bits), scale, found.to(torch.uint8) if zeros else 1 << (bits - 1), how, bits=bits, group=group, dtype=dtype
    )


def awq(codes, scale, zeros, group):
    """As AutoAWQ's ``WQLinear_GEMM`` packs it."""
    outputs = len(codes)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(rows):
        words = torch.zeros(len(rows), outputs // 8, dtype=torch.int64)
        for column in range(outputs // 8):
            for i in range(8):
                words[:, column] |= rows[:, column * 8 + order[i]].long() << (4 * i)
        return signed(words)

    return {"qweight": packed(codes.T), "qzeros": packed(zeros.T), "scales": scale.T.contiguous()}


def gptq(codes, scale, zeros, group, *, g_idx=None, first=1, bits=4):
    """As GPTQModel packs it: one is taken from every zero point of a word at once, so that a 0 borrows from its neighbour."""
    (outputs, inputs), count = codes.shape, 32 // bits
    qweight, stored = torch.zeros(inputs // count, outputs, dtype=torch.int64), zeros.T.long()
    qzeros = torch.zeros(len(stored), outputs // count, dtype=torch.int64)
    for k in range(inputs):
        qweight[k // count] |= codes[:, k].long() << (bits * (k % count))
    for n in range(outputs):
        qzeros[:, n // count] |= stored[:, n] << (bits * (n % count))
    qzeros = (qzeros - first * sum(1 << bit for bit in range(0, 32, bits))) & 0xFFFFFFFF
    found = {"qweight": signed(qweight), "qzeros": signed(qzeros), "scales": scale.T.contiguous()}
    return found | {"g_idx": torch.arange(inputs, dtype=torch.int32) // group if g_idx is None else g_idx.int()}


def compressed(codes, scale, zeros, group, *, bits=4):
    """As compressed-tensors' own code packs it."""
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    half = 1 << (bits - 1)
    found = {
        "weight_packed": library.pack_to_int32((codes.short() - half).to(torch.int8), bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor(codes.shape),
    }
    if zeros is not None:
        found["weight_zero_point"] = library.pack_to_int32((zeros.short() - half).to(torch.int8), bits, packed_dim=0).contiguous()
    return found


def signed(words):
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def about_compressed(bits=4, group=32, form="pack-quantized", activations=None, **others):
    weights = {
        "num_bits": bits,
        "type": "int",
        "strategy": "group" if group else "channel",
        "group_size": group,
        "symmetric": False,
        **others,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


ABOUT = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    "gptq-ordered": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
    "gptq-8": {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": False, "checkpoint_format": "gptq_v2"},
    "compressed-4": about_compressed(),
    "compressed-8": about_compressed(8, None),
    "compressed-int8": about_compressed(8, None, "int-quantized"),
}
VARIANTS = {  # of compressed-tensors
    "compressed-symmetric": about_compressed(symmetric=True),
    "compressed-ordered": about_compressed(actorder="group"),
    "compressed-8-groups": about_compressed(8),
    "compressed-int8-tensor": about_compressed(8, None, "int-quantized", strategy="tensor"),
}


def stored(method, outputs, inputs, seed):
    """What the files have for a layer, and the weights that it stands for."""
    bits = 8 if "8" in method else 4
    group = inputs if bits == 8 and "groups" not in method else 32
    g_idx = None
    made = numbers(outputs, inputs, bits=bits, group=group, seed=seed)
    codes, scale, zeros = codes_from(made.qdata, bits), (made.scale.float() * (8 if bits == 4 else 1) / 64).to(torch.float16), made.zeros
    zeros = zeros.clamp(0, (1 << bits) - 1)
    if "gptq" not in method:
        zeros = zeros.clamp(min=1)
    if method == "compressed-symmetric":
        zeros = torch.full_like(zeros, 8)
    if method == "compressed-int8-tensor":
        scale, zeros = scale[:1].expand_as(scale), zeros[:1].expand_as(zeros)
    if "ordered" in method:
        g_idx = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs)) // group
    if method == "awq":
        parts = awq(codes, scale, zeros, group)
    elif "gptq" in method:
        parts = gptq(codes, scale, zeros, group, g_idx=g_idx, first=int(bits == 4), bits=bits)
    elif "int8" in method:
        parts = {"weight_scale": scale, "weight_zero_point": (zeros.short() - 128).to(torch.int8)}
        if method == "compressed-int8-tensor":
            parts = {name: part[0] for name, part in parts.items()}
        parts["weight"] = (codes.short() - 128).to(torch.int8)
    else:
        parts = compressed(codes, scale, None if method == "compressed-symmetric" else zeros, group, bits=bits)
        if g_idx is not None:
            parts["weight_g_idx"] = g_idx.int()
    groups = torch.arange(inputs) // group if g_idx is None else g_idx
    return parts, (codes.float() - zeros.float()[:, groups]) * scale.float()[:, groups]


def in_blocks(weight, kind):
    """``weight`` as blocks of a ``kind``; numbers of its size in those that gguf does not make."""
    gguf = pytest.importorskip("gguf")
    sort = getattr(gguf.GGMLQuantizationType, kind)
    if not kind.endswith("_K"):
        return gguf.quantize(weight.numpy(), sort)
    size, at = {"Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,))}[kind]
    random = torch.Generator().manual_seed(weight.numel())
    blocks = torch.randint(0, 256, (len(weight), weight.shape[1] // 256, size), generator=random).to(torch.uint8)
    for begin in at:
        numbers = 1e-4 * (1 + torch.rand(*blocks.shape[:2], 1, generator=random))
        blocks[:, :, begin : begin + 2] = numbers.half().view(torch.uint8)
    return blocks.flatten(1).numpy()
