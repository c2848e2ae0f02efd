"""One matrix product for linear layers that read the same input, in one of the layouts that weights are packed in."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.backends import huge_pages, narrow, native
from foredraft.backends.narrow import PLAIN as UNQUANTISED
from foredraft.backends.narrow import format_of, is_quantised
from foredraft.models.changes import hooks_of

PLAIN = 0  # the layout that torch has them in
NATIVE = -1  # the layout of the kernels in ``native``
ONEDNN = 8  # oneDNN's layout for so many tokens; 2 to 16 make the same one
BLOCK = 64  # outputs that the kernels in ``native`` compute together


@dataclass(frozen=True, eq=False)
class Source:
    """A weight or a bias, and the tensor that holds its numbers, as it was when it was packed."""

    parameters: dict[str, Any]
    name: str
    parameter: Any
    numbers: Tensor
    dtype: torch.dtype
    version: int | None

    @property
    def written(self) -> bool:
        """Whether it was written to, or converted by ``Module.to``, which leaves no other trace."""
        return self.numbers.dtype != self.dtype or (self.version is not None and self.numbers._version != self.version)

    @property
    def kept(self) -> bool:
        """It is what it was."""
        return self.parameters.get(self.name) is self.parameter and not self.written


def sources_of(layer: nn.Module) -> list[Source]:
    found = []
    each: Any
    for held in (layer._parameters, layer._buffers):
        for name, each in held.items():
            if each is not None:
                numbers = each.qdata if is_quantised(each) else each
                found.append(Source(held, name, each, numbers, numbers.dtype, None if numbers.is_inference() else numbers._version))
    return found


class Piece:
    """Weights of one format, one matrix below the other, as the kernels in ``native`` read them.

    Attributes:
        packed: the weights.
        parts: what is read besides them, as :class:`native.Matrix` names it.
    """

    def __init__(self, weights: Sequence[Any], bias: Tensor | None, dtype: torch.dtype):
        self.format, self.sizes = format_of(weights[0]) or UNQUANTISED, [len(weight) for weight in weights]
        self.outputs = sum(self.sizes)
        parts: dict[str, Tensor] = {}
        if self.format.grouped:
            self.packed = huge_pages.moved(narrow.words_of([narrow.integers(weight) for weight in weights]))
            parts = narrow.by_group(weights)
        elif self.format != UNQUANTISED:
            self.packed = blocked(torch.cat([narrow.integers(weight) for weight in weights]), dtype)
            parts = {"scale": padded(narrow.scales(weights))}
        else:
            self.packed = blocked(joined(weights), dtype)
        if bias is not None:
            parts["bias"] = padded(bias)
        self.parts = {name: huge_pages.moved(part) for name, part in parts.items()}

    def matrix_from(self, first: int) -> native.Matrix:
        """What the kernels read of the outputs from number ``first`` on, a multiple of 64."""
        rows = padded_size(self.outputs)
        found = {
            name: part.data_ptr() + (0 if name == "order" else first * (part.numel() // rows) * part.element_size())
            for name, part in {"values": self.packed, **self.parts}.items()
        }
        return native.Matrix(**found, **self.format.told, outputs=self.outputs - first)

    def weights(self) -> Sequence[Tensor]:
        """As :meth:`Product.weights`."""
        found = narrow.integers_from(self.packed, self.outputs) if self.format.grouped else unblocked(self.packed, self.outputs)
        return torch.split(found, self.sizes)


class Product:
    """One matrix product for linear layers that read the same input.

    Args:
        layers: their outputs are computed together and returned layer by layer.
        hint: the number of tokens that oneDNN's layout is made for; ``PLAIN`` only joins the matrices; ``NATIVE``.
    """

    def __init__(self, layers: Sequence[nn.Linear] | Sequence[Rows], hint: int):
        self.layers, self.sizes, self.hint = layers, [layer.out_features for layer in layers], hint
        self.outputs, self.inputs = sum(self.sizes), layers[0].in_features
        self.dtype, self.format = layers[0].weight.dtype, format_of(layers[0].weight) or UNQUANTISED
        weights = [layer.weight if self.quantised else layer.weight.detach() for layer in layers]
        self.bias = joined_bias(layers)
        self.pieces: list[Piece] = []  # for ``NATIVE``: one, or with group-quantised weights one for each run of layers of one format
        if hint == NATIVE:
            self._lay_out(weights)
            self.matrix = self.matrix_from(0)
            self._linear = native.library(self.dtype).linear
        else:
            weight = joined(weights)
            self.packed = weight if hint == PLAIN else torch.ops.mkldnn._reorder_linear_weight(weight, hint)
        self.sources = [source for layer in layers if isinstance(layer, nn.Linear) for source in sources_of(layer)]
        self._hooks = [hooks for layer in layers if isinstance(layer, nn.Linear) for hooks in hooks_of(layer)]
        self._computed: tuple[Tensor | None, int | None, Sequence[Tensor]] = (None, None, ())  # an input, its version, and the outputs

    def _lay_out(self, weights: Sequence[Any]) -> None:
        """For the native kernels, at their bits."""
        first = 0
        for _, run in itertools.groupby(weights, format_of):
            alike = list(run)
            outputs = sum(map(len, alike))
            self.pieces.append(Piece(alike, None if self.bias is None else self.bias[first : first + outputs], self.dtype))
            first += outputs
        self._below = [piece.matrix_from(0) for piece in self.pieces[1:]]  # kept, since those above point to them
        for above, below in itertools.pairwise(self._below):
            above.next = ctypes.addressof(below)

    def matrix_from(self, first: int) -> native.Matrix:
        """What the native kernels read of the outputs from number ``first`` on, a multiple of 64."""
        index = 0
        while first >= self.pieces[index].outputs and index + 1 < len(self.pieces):
            first -= self.pieces[index].outputs
            index += 1
        found = self.pieces[index].matrix_from(first)
        if index < len(self._below):
            found.next = ctypes.addressof(self._below[index])
        return found

    @property
    def nbytes(self) -> int:
        """Bytes that the product reads."""
        if self.hint != NATIVE:
            return int(self.packed.nbytes)
        return sum(part.nbytes for piece in self.pieces for part in (piece.packed, *piece.parts.values()))

    @property
    def quantised(self) -> bool:
        return self.format != UNQUANTISED

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., sum of outputs]`` for ``x`` ``[..., inputs]``."""
        if self.hint == PLAIN:
            return nn.functional.linear(x, self.packed, self.bias)
        if torch.is_autocast_enabled("cpu"):  # which knows of torch's own layers only
            x = x.to(self.dtype)
        if self.hint == NATIVE:
            return self._by_kernel(x.contiguous())
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def _by_kernel(self, x: Tensor) -> Tensor:
        if x.dtype != self.dtype or x.device.type != "cpu" or x.shape[-1] != self.inputs:
            found = f"{list(x.shape)} in {x.dtype} on {x.device}"
            raise RuntimeError(f"expected an input in {self.dtype} on the CPU, [..., {self.inputs}], got {found}")
        width = padded_size(self.outputs)
        y = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device="cpu")
        sizes = x.numel() // self.inputs, self.inputs, width
        self._linear(ctypes.byref(self.matrix), x.data_ptr(), y.data_ptr(), *sizes, torch.get_num_threads())
        return y if width == self.outputs else y[..., : self.outputs]

    @property
    def packed_outputs(self) -> int:
        """How many outputs the kernels compute, those that pad the matrix included."""
        return padded_size(self.outputs)

    @property
    def outdated(self) -> bool:
        """The layers have other weights by now, or a gradient is wanted of them."""
        return bool(self.sources) and (torch.is_grad_enabled() or not all(source.kept for source in self.sources))

    def part(self, x: Tensor, index: int) -> Tensor:
        """The output of layer ``index``: the first layer that is called computes all outputs, and the last one releases them."""
        if len(self.layers) == 1:
            return self(x)
        given, before, outputs = self._computed  # another thread may replace them at any time
        version = None if x.is_inference() else x._version
        if x is not given or version != before or any(self._hooks):  # which may write to the input between two layers
            outputs = torch.split(self(x), self.sizes, -1)
        self._computed = (None, None, ()) if index == len(self.layers) - 1 else (x, version, outputs)
        return outputs[index]

    def weights(self) -> Sequence[Tensor]:
        """The weights as they were, one matrix per layer; for quantised ones the integers, as :func:`narrow.integers` has them."""
        if self.pieces:
            return [part.clone() for piece in self.pieces for part in piece.weights()]
        dense = self.packed if self.hint == PLAIN else self.packed.to_dense()
        return [part.clone() for part in torch.split(dense, self.sizes)]


@dataclass(frozen=True)
class Rows:
    """A linear layer that is not a module of torch."""

    weight: Tensor
    bias: Tensor | None
    out_features: int
    in_features: int


def joined(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


def joined_bias(layers: Sequence[nn.Linear] | Sequence[Rows]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    dtype = layers[0].weight.dtype
    return joined([torch.zeros(layer.out_features, dtype=dtype) if layer.bias is None else layer.bias.detach() for layer in layers])


def padded_size(outputs: int) -> int:
    return -(-outputs // 64) * 64


def padded(row: Tensor) -> Tensor:
    """``row`` with zeros after it, for the outputs that pad a matrix."""
    return nn.functional.pad(row, (0, padded_size(len(row)) - len(row)))


def blocked(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``weight`` ``[N, K]`` as ``products.h`` reads it for products in ``dtype``, its own by default."""
    return in_blocks(huge_pages.moved(in_order(weight, dtype)), weight.dtype)


def in_order(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A view of the same, in which each pair of numbers that is moved together is one number."""
    fill = padded_size(len(weight)) - len(weight)
    rows = nn.functional.pad(weight, (0, 0, 0, fill)) if fill else weight.contiguous()
    pairs = (dtype or weight.dtype) == torch.bfloat16
    if pairs:
        rows = rows.view(torch.int32 if weight.dtype == torch.bfloat16 else torch.int16)
    return rows.view(-1, 16, rows.shape[1]).transpose(1, 2)


def in_blocks(order: Tensor, dtype: torch.dtype) -> Tensor:
    """What :func:`in_order` returned, once it is contiguous, as weights in ``dtype``."""
    return order if order.dtype == dtype else order.view(dtype).view(*order.shape, 2)


def unblocked(packed: Tensor, outputs: int) -> Tensor:
    """The ``[N, K]`` matrix that :func:`blocked` was given."""
    rows = packed.permute(0, 2, 1, 3).flatten(2) if packed.ndim == 4 else packed.permute(0, 2, 1)
    return rows.flatten(0, 1)[:outputs]
