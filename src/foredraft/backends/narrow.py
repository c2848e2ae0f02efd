"""Weights of fewer bits than the model's dtype, as far as the kernels in ``native`` multiply with them.

torchao's integers of eight bits times a scale per output are exact in bfloat16 and float32, and a product is rounded where torchao's own
is: the sum, then what the scale makes of it. Weights of four and eight bits with a scale, and a zero point, per output and group of inputs
are those of :class:`~foredraft.quantization.grouped.GroupedTensor` and of torchao's ``IntxUnpackedToInt8Tensor``. The kernels multiply sums
over a group with its scale, in float32. The libraries round each weight to the model's dtype before they multiply: the kernels are as
close to what the integers and scales say, or closer.
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

UNIT = 32  # inputs of a matrix, or a multiple of them, that the kernels read
LEAST = 16  # inputs of a group, and of experts in groups, likewise
READ = (
    "torchao's int8 with a scale per output, and weights of 4 or 8 bits in groups of a multiple of 16 inputs: torchao's Intx, AWQ, GPTQ, \
compressed-tensors W4A16 and W8A16, MXFP4, and most of GGUF's"
)


@dataclass(frozen=True)
class Format:
    """What weights must have in common to be one matrix.

    Attributes:
        kind: of ``layer.c``.
        group: inputs that share a scale.
        scales: their dtype.
        zero: what stands for 0; None where each group says so.
        order: a word for the order that the inputs are read in, where they are not in their own.
        nested: groups that share what their scales, or what stands for 0, are multiplied by; 0 where they are not.
        mins: what stands for 0 is.
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
        return self.kind in (native.GROUPS_OF_FOUR, native.GROUPS_OF_EIGHT, native.GROUPS_OF_E2M1)

    @property
    def bits(self) -> int:
        """Of a weight; 0 where they are the model's dtype's."""
        return {native.EIGHTS: 8, native.GROUPS_OF_FOUR: 4, native.GROUPS_OF_EIGHT: 8, native.GROUPS_OF_E2M1: 4}.get(self.kind, 0)

    @property
    def told(self) -> dict[str, int]:
        """What :class:`native.Matrix` says of it."""
        scales = native.SCALES.index(self.scales) if self.scales is not None else 0
        return {"kind": self.kind, "group": self.group, "zero": self.zero or 0, "scales": scales, "nested": self.nested}


PLAIN = Format()


def format_of(weight: Any, unit: int | None = None) -> Format | None:
    """That of ``weight``; None for a quantised weight that the kernels cannot read, as where its inputs are no multiple of ``unit``."""
    if is_int8(weight):
        return Format(native.EIGHTS)
    if isinstance(weight, GroupedTensor):
        order = "" if weight.order is None else hashlib.sha256(weight.order.numpy().tobytes()).hexdigest()[:16]
        zero, unit = None if weight.zeros is not None else weight.zero, unit or (UNIT if weight.ndim == 2 else LEAST)
        found = grouped(weight.bits, weight.group, weight.inputs, weight.scale, zero, unit)
        nested = 0 if weight.over is None and weight.mins is None else weight.nested
        kind = native.GROUPS_OF_E2M1 if weight.floats else native.GROUPS_OF_EIGHT if weight.bits == 8 else native.GROUPS_OF_FOUR
        return found and replace(found, kind=kind, order=order, nested=nested, mins=weight.mins is not None)
    if is_intx(weight):
        bits, inputs = bits_of(weight), weight.shape[1]
        return grouped(bits, weight.block_size[1], inputs, weight.scale, None if weight.zero_point.any() else 1 << (bits - 1))
    return PLAIN if type(weight) in (Tensor, torch.nn.Parameter) else None


def grouped(bits: int, group: int, inputs: int, scale: Tensor, zero: int | None, unit: int = UNIT) -> Format | None:
    if inputs % unit or (group % LEAST and group < inputs) or scale.dtype not in native.SCALES:
        return None
    return Format(native.GROUPS_OF_FOUR if bits == 4 else native.GROUPS_OF_EIGHT, min(group, inputs), scale.dtype, zero)


def is_quantised(weight: Any) -> bool:
    """Whether ``weight`` is one of these."""
    return (found := format_of(weight)) is not None and found is not PLAIN


def is_int8(weight: Any) -> bool:
    """Whether ``weight`` is a torchao tensor with one scale per output, multiplied with activations as they are."""
    if type(weight).__name__ != "Int8Tensor" or not type(weight).__module__.startswith("torchao.") or weight.qdata.ndim != 2:
        return False
    rest = ("act_quant_kwargs", "act_quant_scale", "act_pre_scale")
    whole_rows = list(weight.block_size) == [1, weight.qdata.shape[1]] and weight.scale.numel() == weight.qdata.shape[0]
    symmetric = weight.zero_point is None or not weight.zero_point.any()
    return whole_rows and symmetric and all(getattr(weight, name, None) is None for name in rest)


def is_intx(weight: Any) -> bool:
    """Whether ``weight`` is a torchao tensor with integers of four or eight bits and whole zero points, multiplied likewise."""
    if type(weight).__name__ != "IntxUnpackedToInt8Tensor" or not type(weight).__module__.startswith("torchao.") or weight.qdata.ndim != 2:
        return False
    bits = str(weight.target_dtype).removeprefix("torch.int")
    if bits not in ("4", "8") or weight.activation_quantization is not None or weight.block_size[0] != 1:
        return False
    return bool(weight.zero_point.dtype == torch.int8)


def bits_of(weight: Any) -> int:
    return int(str(weight.target_dtype).removeprefix("torch.int"))


def is_held(weight: Any) -> bool:
    """Whether the numbers are in memory: they were not :func:`taken`."""
    return not (weight.qdata if is_quantised(weight) else weight).is_meta


def parts_of(weight: Any) -> tuple[Tensor, ...]:
    """The tensors that hold the numbers of ``weight``."""
    if not is_quantised(weight):
        return (weight,)
    parts = (getattr(weight, name, None) for name in ("qdata", "scale", "zero_point", "zeros", "order", "over", "mins"))
    return tuple(each for each in parts if isinstance(each, Tensor))


def integers(weight: Any) -> Tensor:
    """What :func:`take` lets go of: int8 ``[N, K]`` of :func:`is_int8`; of groups uint8 ``[N, K * bits / 8]``, the first weight in the
    lowest bits, none below 0."""
    if not is_intx(weight):
        return weight.qdata
    bits = bits_of(weight)
    return bytes_from((weight.qdata.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8), bits)


def scales(weights: Sequence[Any]) -> Tensor:
    """``[N]`` in the dtype that the product is rounded to, of weights with a scale per output, one matrix below the other."""
    return torch.cat([weight.scale.flatten().to(weight.dtype) for weight in weights])


def by_group(weights: Sequence[Any]) -> dict[str, Tensor]:
    """What ``groups.h`` reads beside the integers, in its order, of matrices one below the other."""
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
    """Let go of the integers; shape, scales and whatever else it knows stay."""
    weight.qdata = torch.empty_like(weight.qdata, device="meta")


def give_back(weight: Any, values: Tensor) -> None:
    """The integers that :func:`take` let go of, as :func:`integers` has them."""
    if is_intx(weight):
        bits = bits_of(weight)
        values = (codes_from(values, bits).to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
    weight.qdata = values.contiguous()


def padded_rows(rows: Tensor) -> Tensor:
    """``rows`` ``[N, ...]`` with zeros below, up to a multiple of 64."""
    return torch.cat((rows, rows.new_zeros(-len(rows) % 64, *rows.shape[1:])))


def in_groups(rows: Tensor) -> Tensor:
    """``[N, G]`` as ``groups.h`` reads it: ``[N/64, G, 64]``."""
    return padded_rows(rows).view(-1, 64, rows.shape[1]).transpose(1, 2).contiguous()


def words_of(parts: Sequence[Tensor]) -> Tensor:
    """Integers of groups, of matrices one below the other, as ``groups.h`` reads them."""
    rows = padded_rows(torch.cat(list(parts))).view(torch.int32)
    order = rows.view(-1, 64, rows.shape[1]).transpose(1, 2)
    return native.room(order.shape, order.dtype).copy_(order)


def integers_from(words: Tensor, outputs: int) -> Tensor:
    """What :func:`words_of` was given."""
    return words.transpose(1, 2).reshape(-1, words.shape[1])[:outputs].contiguous().view(torch.uint8)
