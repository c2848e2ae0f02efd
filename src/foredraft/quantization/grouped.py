"""Group-quantized weights of 4, 6 or 8 bits, with a scale and a zero point for each output and group of inputs.

Whatever the layout of a checkpoint, here they have one form: integers q, and weights ``(q - zero) * scale`` or
``(q - zero) * scale - zeros * mins``. For floats of 4 bits (e2m1), q is twice the float. Scales may be int8, times a factor that several
groups share. :meth:`GroupedTensor.dequantize` is the reference with which the results of kernels are compared. A tensor stands for the
weight of a plain linear layer, which torch's own products widen as a whole, or for the weights of all experts of a mixture, which torch
widens one expert after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

TWICE_E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32)  # four-bit floats, doubled


class GroupedTensor(Tensor):
    """A weight ``[N, K]``; or those of E experts, ``[E, N, K]``, or ``[E, K, N]`` where they are ``transposed``. Everything but ``order``
    then has E in front of the shape below.

    Attributes:
        qdata: ``[N, K * bits / 8]`` uint8, the first weight in the lowest bits; of six bits as :func:`bytes_from` has them.
        scale: ``[N, G]`` float16, bfloat16 or float32; or int8, and then ``over`` holds what they are multiplied by.
        zeros: ``[N, G]`` uint8 zero points, or None if all are ``zero``. With ``mins``, factors of those; None if all are 1.
        over: ``[N, G / nested]`` float16 factors of the scales; None for none.
        mins: ``[N, G / nested]`` float16, which are subtracted, times ``zeros``; None for none.
        order: ``[K]`` int32 the input of each column of ``qdata``; None if they are in order.
        bits: of a weight, 4, 6 or 8.
        group: columns that share a scale; the last group may be shorter.
        nested: groups that share a factor in ``over`` and in ``mins``.
        floats: ``qdata`` has indices into :data:`TWICE_E2M1`, whose entries are q; there are no zero points then.
        transposed: the last two dimensions of the weight are swapped.
        inputs: K.
    """

    qdata: Tensor
    scale: Tensor
    zeros: Tensor | None
    order: Tensor | None
    over: Tensor | None
    mins: Tensor | None

    @staticmethod
    def __new__(cls, qdata: Tensor, *others: Any, bits: int, dtype: torch.dtype, transposed: bool = False, **named: Any) -> GroupedTensor:
        *experts, outputs, inputs = *qdata.shape[:-1], qdata.shape[-1] * 8 // bits
        shape = (*experts, inputs, outputs) if transposed else (*experts, outputs, inputs)
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=qdata.device)  # type: ignore[attr-defined,no-any-return]

    def __init__(
        self,
        qdata: Tensor,
        scale: Tensor,
        zeros: Tensor | int,
        order: Tensor | None = None,
        over: Tensor | None = None,
        mins: Tensor | None = None,
        *,
        bits: int,
        group: int,
        dtype: torch.dtype,
        transposed: bool = False,
        floats: bool = False,
    ):
        self.qdata, self.scale, self.order, self.over, self.mins, self.bits, self.group = qdata, scale, order, over, mins, bits, group
        self.nested = next((scale.shape[-1] // each.shape[-1] for each in (over, mins) if each is not None), 1)
        self.transposed, self.floats, self.inputs = transposed, floats, qdata.shape[-1] * 8 // bits
        self.zeros, self.zero = (zeros, 0) if isinstance(zeros, Tensor) else (None, zeros)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """The weights, computed in float32 and rounded once."""
        scale, zeros = self.scale.float(), self._zeros.float()
        if self.over is not None:
            scale = scale * self._by_group(self.over)
        codes = codes_from(self.qdata, self.bits)
        codes = TWICE_E2M1.to(codes.device)[codes.int()] if self.floats else codes.float()
        if self.mins is None:
            found = (codes - self._by_input(zeros)) * self._by_input(scale)
        else:
            least = self._by_group(self.mins) if self.zeros is None else zeros * self._by_group(self.mins)
            found = (codes - self.zero) * self._by_input(scale) - self._by_input(least)
        found = found.to(dtype or self.dtype)
        if self.transposed:
            return found.transpose(-2, -1)
        if self.order is None:
            return found
        return torch.empty_like(found).index_copy_(1, self.order.long(), found)

    @property
    def _zeros(self) -> Tensor:
        return self.scale.new_full(self.scale.shape, self.zero, dtype=torch.uint8) if self.zeros is None else self.zeros

    def _by_group(self, shared: Tensor) -> Tensor:
        return shared.float().repeat_interleave(self.nested, -1)

    def _by_input(self, groups: Tensor) -> Tensor:
        return groups.repeat_interleave(self.group, -1)[..., : self.inputs]

    def expert(self, number: int | Tensor) -> GroupedTensor:
        """The weight ``[N, K]`` of an expert; of several ``[n, N, K]``. They are transposed as all are."""
        return self.mapped(lambda each: each[number])

    def mapped(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None, transposed: bool | None = None) -> GroupedTensor:
        """A copy with ``change`` applied to each of its tensors; ``dtype`` is that of the weights."""
        zeros = self.zero if self.zeros is None else change(self.zeros)
        others = (None if each is None else change(each) for each in (self.order, self.over, self.mins))
        how: dict[str, Any] = {"bits": self.bits, "group": self.group, "dtype": dtype or self.dtype}
        how |= {"transposed": self.transposed if transposed is None else transposed, "floats": self.floats}
        return GroupedTensor(change(self.qdata), change(self.scale), zeros, *others, **how)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GroupedTensor(shape={tuple(self.shape)}, bits={self.bits}, group={self.group}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is functional.linear and len(args) > 1 and isinstance(args[1], GroupedTensor):
            x, weight, *bias = args
            return functional.linear(x, weight.dequantize(x.dtype), *bias, **(kwargs or {}))
        if function is GROUPED_MM and len(args) > 1 and isinstance(args[1], GroupedTensor):
            return by_expert(args[0], args[1], **(kwargs or {}))
        if args and isinstance(self := args[0], GroupedTensor) and self.qdata.ndim == 3:
            if function is Tensor.__getitem__ and isinstance(args[1], (int, Tensor)):
                return self.expert(args[1]).dequantize()
            if function is Tensor.transpose and {each % 3 for each in args[1:]} == {1, 2}:
                return self.mapped(lambda each: each, transposed=not self.transposed)
        if function == Tensor.data.__set__ and isinstance(args[1], GroupedTensor):  # type: ignore[attr-defined]
            vars(args[0]).update(vars(args[1]))  # Module.to does this; torch does not know of the tensors inside
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named, aten, self = dict(kwargs or {}), torch.ops.aten, args[0] if args else None
        if isinstance(self, GroupedTensor):
            if function in (aten.detach.default, aten.alias.default):
                return self.mapped(lambda each: each)
            if function is aten.clone.default:
                return self.mapped(torch.clone)
            if function is aten._to_copy.default:
                device = named.get("device")
                return self.mapped(lambda each: each.to(device=device, copy=True), named.get("dtype"))
        if function._schema.is_mutable:
            raise RuntimeError(f"weights of {cls.__name__} cannot be written to; {function} would")
        plain = pytree.tree_map(lambda each: each.dequantize() if isinstance(each, GroupedTensor) else each, (args, named))
        return function(*plain[0], **plain[1])


def stacked(experts: Sequence[Sequence[GroupedTensor]]) -> GroupedTensor:
    """``[E, N, K]`` of the matrices of each expert, one below the other.

    Raises:
        ValueError: they are of several formats, or of one that is not read for experts.
    """
    every = [each for matrices in experts for each in matrices]
    first = every[0]
    if any(each.order is not None for each in every):
        raise ValueError("groups of inputs in an order of their own (act-order), which are not read for experts")
    if any(part is not None for each in every for part in (each.over, each.mins)):
        raise ValueError("groups that share factors of their scales, or that have minima, which are not read for experts")
    if len({(each.bits, each.group, each.scale.dtype, each.inputs) for each in every}) > 1:
        raise ValueError("weights of several formats")
    alike = all(each.zeros is None and each.zero == first.zero for each in every)

    def of(part: Callable[[GroupedTensor], Tensor]) -> Tensor:
        return torch.stack([torch.cat([part(each) for each in matrices]) for matrices in experts])

    zeros = first.zero if alike else of(lambda each: each._zeros)
    how: dict[str, Any] = {"bits": first.bits, "group": first.group, "dtype": first.dtype}
    return GroupedTensor(of(lambda each: each.qdata), of(lambda each: each.scale), zeros, **how)


GROUPED_MM = getattr(functional, "grouped_mm", None)


def by_expert(x: Tensor, weight: GroupedTensor, *, offs: Tensor) -> Tensor:
    """What ``grouped_mm`` gives: ``[S, N]`` of ``x`` ``[S, K]``, whose rows up to ``offs[e]`` are those of the experts up to e."""
    out, begin = x.new_zeros(len(x), weight.shape[-1]), 0
    for expert, end in enumerate(offs.tolist()):
        if end > begin:
            out[begin:end] = x[begin:end] @ weight[expert]
        begin = end
    return out


FIRST = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14]  # of sixteen weights of six bits, those that have a byte
LAST = [9, 11, 13, 15]  # those of which each third byte has two bits
SIXTEEN = [(FIRST + LAST).index(weight) for weight in range(16)]


def codes_from(packed: Tensor, bits: int) -> Tensor:
    """Unpack ``[..., K * bits / 8]`` into integers ``[..., K]`` uint8."""
    if bits == 6:
        blocks = packed.reshape(*packed.shape[:-1], -1, 12)
        low, middle, high = (blocks >> 6).reshape(*blocks.shape[:-1], 3, 4).unbind(-2)
        return torch.cat((blocks & 63, low | middle << 2 | high << 4), -1)[..., SIXTEEN].flatten(-2)
    return packed if bits == 8 else torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def bytes_from(codes: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`codes_from`. Sixteen integers of six bits are twelve bytes: each has one of :data:`FIRST` and above it two bits
    of one of :data:`LAST`, the lowest ones in the first four bytes."""
    if bits == 6:
        blocks = codes.reshape(*codes.shape[:-1], -1, 16)
        last = blocks[..., LAST]
        return (blocks[..., FIRST] | torch.cat([(last >> place & 3) << 6 for place in (0, 2, 4)], -1)).flatten(-2)
    return codes.contiguous() if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4
