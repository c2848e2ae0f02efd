"""Quantised weights that the kernels in ``native`` multiply.

torchao's int8 weights with a scale per output are exact in bfloat16 and float32, and a product is rounded where torchao's own
is: after the sum, and after the scale. Group-quantised weights of 4 and 8 bits, with a scale and a zero point per output and group of
inputs, come from :class:`~foredraft.quantization.grouped.GroupedTensor` and torchao's ``IntxUnpackedToInt8Tensor``. The kernels multiply
the sum over a group by its scale, in float32. The libraries round each weight to the model's dtype before they multiply, so the kernels
are at least as close to the exact product of integers and scales.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foredraft.backends import native
from foredraft.quantization.grouped import GroupedTensor, bytes_from, codes_from

UNIT = 32  # inputs of a matrix must be a multiple of this
LEAST = 16  # inputs of a group, and of group-quantised experts, must be a multiple of this
OF_BITS = {4: native.GROUPS_OF_FOUR, 6: native.GROUPS_OF_SIX, 8: native.GROUPS_OF_EIGHT}  # kinds of integers in groups
READ = "torchao's int8 with a scale per output, and weights of 4, 6 or 8 bits in groups of a multiple of 16 inputs: torchao's Intx, AWQ, \
GPTQ, compressed-tensors W4A16 and W8A16, MXFP4, most of GGUF's, and torchao's Int4Tensor and Int4TilePackedTo4dTensor in checkpoints that \
are loaded by name"
ELSEWHERE = ("Int4Tensor", "Int4TilePackedTo4dTensor", "Int4PlainInt32Tensor", "Int4PreshuffledTensor")  # torchao has no products on a CPU


@dataclass(frozen=True)
class Format:
    """What weights must have in common to be one matrix.

    Attributes:
        kind: of ``layer.c``.
        group: inputs that share a scale.
        scales: their dtype.
        zero: the zero point; None if each group has its own.
        order: a hash of the order of the inputs; empty if they are in order.
        nested: groups that share a factor of their scales or zero points; 0 if there is none.
        mins: whether zero points have such a factor.
    """

    kind: int = native.VALUES
    group: int = 0
    scales: torch.dtype | None = None
    zero: int | None = 0
    order: str = ""
    nested: int = 0
    mins: bool = False

    @property
    def grouped(self) -> bool:
        return self.kind in (*OF_BITS.values(), native.GROUPS_OF_E2M1)

    @property
    def bits(self) -> int:
        """Bits of a weight; 0 for weights in the model's dtype."""
        return {native.EIGHTS: 8, native.GROUPS_OF_E2M1: 4, **{kind: bits for bits, kind in OF_BITS.items()}}.get(self.kind, 0)

    @property
    def told(self) -> dict[str, int]:
        """The fields of :class:`native.Matrix` that describe it."""
        scales = native.SCALES.index(self.scales) if self.scales is not None else 0
        return {"kind": self.kind, "group": self.group, "zero": self.zero or 0, "scales": scales, "nested": self.nested}


PLAIN = Format()


def format_of(weight: Any, unit: int | None = None) -> Format | None:
    """The format of ``weight``; None for a quantised weight that the kernels cannot read, for instance if its inputs are no multiple of
    ``unit``."""
    if is_int8(weight):
        return Format(native.EIGHTS)
    if isinstance(weight, GroupedTensor):
        order = "" if weight.order is None else hashlib.sha256(weight.order.cpu().numpy().tobytes()).hexdigest()[:16]
        zero, unit = None if weight.zeros is not None else weight.zero, unit or (UNIT if weight.ndim == 2 else LEAST)
        found = grouped(weight.bits, weight.group, weight.inputs, weight.scale, zero, unit)
        nested = 0 if weight.over is None and weight.mins is None else weight.nested
        found = found and replace(found, order=order, nested=nested, mins=weight.mins is not None)
        return replace(found, kind=native.GROUPS_OF_E2M1) if found and weight.floats else found
    if is_intx(weight):
        bits, inputs = bits_of(weight), weight.shape[1]
        return grouped(bits, weight.block_size[1], inputs, weight.scale, None if weight.zero_point.any() else 1 << (bits - 1))
    return PLAIN if type(weight) in (Tensor, torch.nn.Parameter) else None


def grouped(bits: int, group: int, inputs: int, scale: Tensor, zero: int | None, unit: int = UNIT) -> Format | None:
    if inputs % unit or (group % LEAST and group < inputs) or scale.dtype not in native.SCALES:
        return None
    return Format(OF_BITS[bits], min(group, inputs), scale.dtype, zero)


def is_quantised(weight: Any) -> bool:
    """Whether ``weight`` has a quantised format that the kernels read."""
    return (found := format_of(weight)) is not None and found is not PLAIN


def is_int8(weight: Any) -> bool:
    """Whether ``weight`` is a torchao tensor with one scale per output, multiplied with activations that are not quantised."""
    if type(weight).__name__ != "Int8Tensor" or not type(weight).__module__.startswith("torchao.") or weight.qdata.ndim != 2:
        return False
    rest = ("act_quant_kwargs", "act_quant_scale", "act_pre_scale")
    whole_rows = list(weight.block_size) == [1, weight.qdata.shape[1]] and weight.scale.numel() == weight.qdata.shape[0]
    symmetric = weight.zero_point is None or not weight.zero_point.any()
    return whole_rows and symmetric and all(getattr(weight, name, None) is None for name in rest)


def is_intx(weight: Any) -> bool:
    """Whether ``weight`` is a torchao tensor with integers of four or eight bits and integer zero points, multiplied likewise."""
    if type(weight).__name__ != "IntxUnpackedToInt8Tensor" or not type(weight).__module__.startswith("torchao.") or weight.qdata.ndim != 2:
        return False
    bits = str(weight.target_dtype).removeprefix("torch.int")
    if bits not in ("4", "8") or weight.activation_quantization is not None or weight.block_size[0] != 1:
        return False
    return bool(weight.zero_point.dtype == torch.int8)


def has_no_product(weight: Any) -> bool:
    """Whether ``weight`` is on a CPU, on which torchao, whose tensor it is, does not multiply it."""
    return type(weight).__name__ in ELSEWHERE and type(weight).__module__.startswith("torchao.") and weight.device.type == "cpu"


def bits_of(weight: Any) -> int:
    return int(str(weight.target_dtype).removeprefix("torch.int"))


def is_held(weight: Any) -> bool:
    """Whether the numbers are in memory: :func:`take` has not released them."""
    return not (weight.qdata if is_quantised(weight) else weight).is_meta


def parts_of(weight: Any) -> tuple[Tensor, ...]:
    """The tensors that hold the numbers of ``weight``."""
    if not is_quantised(weight):
        return (weight,)
    parts = (getattr(weight, name, None) for name in ("qdata", "scale", "zero_point", "zeros", "order", "over", "mins"))
    return tuple(each for each in parts if isinstance(each, Tensor))


def integers(weight: Any) -> Tensor:
    """The integers that :func:`take` releases: int8 ``[N, K]`` for :func:`is_int8`; for groups uint8 ``[N, K * bits / 8]`` of unsigned
    numbers, the first weight in the lowest bits."""
    if not is_intx(weight):
        return weight.qdata
    bits = bits_of(weight)
    return bytes_from((weight.qdata.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8), bits)


def scales(weights: Sequence[Any]) -> Tensor:
    """``[N]`` in the dtype that the product is rounded to, of weights with a scale per output, one matrix below the other."""
    return torch.cat([weight.scale.flatten().to(weight.dtype) for weight in weights])


def by_group(weights: Sequence[Any]) -> dict[str, Tensor]:
    """What ``groups.h`` reads besides the integers, in its layout once it is contiguous, for matrices one below the other."""
    found = {"scale": torch.cat([weight.scale for weight in weights])}
    if is_intx(weights[0]) and any(weight.zero_point.any() for weight in weights):
        found["zeros"] = torch.cat(
            [(weight.zero_point.to(torch.int16) + (1 << (bits_of(weight) - 1))).to(torch.uint8) for weight in weights]
        )
    for name in ("zeros", "over", "mins"):
        if getattr(weights[0], name, None) is not None:
            found[name] = torch.cat([getattr(weight, name) for weight in weights])
    found = {name: in_groups(each) for name, each in found.items()}
    if (order := getattr(weights[0], "order", None)) is not None:
        found["order"] = order
    return found


def take(weight: Any) -> None:
    """Release the integers; shape, scales and everything else stay."""
    weight.qdata = torch.empty_like(weight.qdata, device="meta")


def give_back(weight: Any, values: Tensor) -> None:
    """Restore the integers that :func:`take` released, from ``values`` as :func:`integers` returns them."""
    if is_intx(weight):
        bits = bits_of(weight)
        values = (codes_from(values, bits).to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
    weight.qdata = values.contiguous()


def dequantized(weight: Any, values: Tensor) -> Tensor:
    """What ``weight`` stands for, with the integers ``values`` in place of its own, which may have been taken."""
    kept = weight.qdata
    give_back(weight, values)
    try:
        found: Tensor = weight.dequantize()
        return found
    finally:
        weight.qdata = kept


def padded_rows(rows: Tensor) -> Tensor:
    """``rows`` ``[N, ...]`` with zeros below, up to a multiple of 64."""
    return torch.cat((rows, rows.new_zeros(-len(rows) % 64, *rows.shape[1:])))


def in_groups(rows: Tensor) -> Tensor:
    """``[N, G]`` as ``groups.h`` reads it once it is contiguous: ``[N/64, G, 64]``."""
    return padded_rows(rows).view(-1, 64, rows.shape[1]).transpose(1, 2)


def words_of(parts: Sequence[Tensor]) -> Tensor:
    """Integers of groups, of matrices one below the other, as ``groups.h`` reads them once they are contiguous."""
    rows = padded_rows(torch.cat(list(parts))).view(torch.int32)
    return rows.view(-1, 64, rows.shape[1]).transpose(1, 2)


def integers_from(words: Tensor, outputs: int) -> Tensor:
    """The inverse of :func:`words_of`."""
    return words.transpose(1, 2).reshape(-1, words.shape[1])[:outputs].contiguous().view(torch.uint8)
