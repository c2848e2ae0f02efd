"""Weights laid out once for the kernel that reads them, on a CPU.

A pass over a few tokens reads every weight once, and how fast depends on the order in which the weights lie in memory. oneDNN packs
a matrix into blocks for its kernels, and so do the kernels in ``native``; torch's own linear layers pack it anew in every pass,
or read it as it is. Here each linear layer of a model is packed once, and layers that read the same input (query, key and value; gate and
up) become one product. torchao's weights of eight bits have one layout only, that of ``native``.

Layouts sum in different orders, so logits differ in the last bits. So which one is taken depends on the machine and the matrix alone, never
on a time that was measured: the same command gives the same logits every time.

The classes of the model stay what they are: ``forward`` is overridden on single layers, and :meth:`Packing.undo` takes that back.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.backends import native
from foredraft.backends.int8 import give_back, integers, is_held, is_int8, scales, take
from foredraft.models.changes import Override, hooks_of, take_back

DTYPES = (torch.float32, torch.bfloat16)
PLAIN = 0  # the layout that torch has them in
NATIVE = -1  # the layout of the kernels in ``native``
ONEDNN = 8  # oneDNN's layout for so many tokens; 2 to 16 make the same one
HINTS = (PLAIN, ONEDNN)
PREFERRED = (NATIVE, ONEDNN, PLAIN)
BLOCK = 64  # outputs that the kernels in ``native`` compute together
UNIT = 32  # numbers in a row of weights, or a multiple of them, that the kernels in ``native`` read
LIGHT = 2 << 30  # bytes of a model up to which one thread prepares it as fast


class Product:
    """One matrix product for linear layers that read the same input.

    Args:
        layers: their outputs are computed together and handed out layer by layer.
        hint: the number of tokens that oneDNN's layout is made for; ``PLAIN`` only joins the matrices; ``NATIVE``.
    """

    def __init__(self, layers: Sequence[nn.Linear] | Sequence[Rows], hint: int):
        self.layers, self.sizes, self.hint = layers, [layer.out_features for layer in layers], hint
        self.outputs, self.inputs = sum(self.sizes), layers[0].in_features
        self.dtype, self.int8 = layers[0].weight.dtype, is_int8(layers[0].weight)
        weights = [layer.weight if self.int8 else layer.weight.detach() for layer in layers]
        self.bias = joined_bias(layers)
        if hint == NATIVE:
            self.packed = blocked(integers(weights) if self.int8 else joined(weights), self.dtype)
            self.bias = None if self.bias is None else padded(self.bias)
            self.scale = padded(scales(weights)) if self.int8 else None
            parts = (self.packed, self.scale, self.bias)
            self.matrix = native.Matrix(*(None if part is None else part.data_ptr() for part in parts))
            self._linear = native.library(self.dtype, self.int8).linear
        else:
            weight = joined(weights)
            self.packed = weight if hint == PLAIN else torch.ops.mkldnn._reorder_linear_weight(weight, hint)
        self.sources = [source for layer in layers if isinstance(layer, nn.Linear) for source in sources_of(layer)]
        self._hooks = [hooks for layer in layers if isinstance(layer, nn.Linear) for hooks in hooks_of(layer)]
        self._computed: tuple[Tensor | None, Sequence[Tensor]] = (None, ())  # an input and the outputs for it

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., sum of outputs]`` for ``x`` ``[..., inputs]``."""
        if self.hint == PLAIN:
            return nn.functional.linear(x, self.packed, self.bias)
        if self.hint == NATIVE:
            return self._by_kernel(x.contiguous())
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return product

    def _by_kernel(self, x: Tensor) -> Tensor:
        if x.dtype != self.dtype:
            raise RuntimeError(f"expected an input in {self.dtype}, got {x.dtype}")
        width = padded_size(self.outputs)
        y = torch.empty(*x.shape[:-1], width, dtype=x.dtype)
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
        """The output of layer ``index``: the first layer to be asked computes for all, and the last one lets go of it."""
        if len(self.layers) == 1:
            return self(x)
        given, outputs = self._computed  # another thread may replace both at any time
        if x is not given or any(self._hooks):  # which may write to the input between two layers
            outputs = torch.split(self(x), self.sizes, -1)
        self._computed = (None, ()) if index == len(self.layers) - 1 else (x, outputs)
        return outputs[index]

    def weights(self) -> Sequence[Tensor]:
        """The weights as they were, one matrix per layer; of eight bits the integers."""
        dense = self.packed
        if self.hint == NATIVE:
            dense = unblocked(dense, self.outputs)
        elif self.hint != PLAIN:
            dense = dense.to_dense()
        return [part.clone() for part in torch.split(dense, self.sizes)]


@dataclass(frozen=True, eq=False)
class Source:
    """A weight or a bias, and the tensor that holds its numbers, as it was when it was packed."""

    parameters: dict[str, Any]
    name: str
    parameter: Any
    numbers: Tensor
    version: int | None

    @property
    def written(self) -> bool:
        return self.version is not None and self.numbers._version != self.version

    @property
    def kept(self) -> bool:
        """It is what it was."""
        return self.parameters.get(self.name) is self.parameter and not self.written


def sources_of(layer: nn.Linear) -> list[Source]:
    found = []
    each: Any
    for name, each in layer._parameters.items():
        if each is not None:
            numbers = each.qdata if is_int8(each) else each
            found.append(Source(layer._parameters, name, each, numbers, None if numbers.is_inference() else numbers._version))
    return found


class PackedForward(Override):
    """``forward`` of one layer of a product. It is copied with a layer whose own weights it has replaced."""

    def __init__(self, product: Product, index: int):
        self.product, self.index = product, index
        self.layer: Any = product.layers[index]

    def __call__(self, x: Tensor) -> Tensor:
        if self.product.outdated and not self.layer.weight.is_meta:
            return type(self.layer).forward(self.layer, x)
        return self.product.part(x, self.index)

    def __reduce_ex__(self, protocol: Any) -> Any:
        kept = any(source.parameters is self.layer._parameters for source in self.product.sources)
        return super().__reduce_ex__(protocol) if kept else object.__reduce_ex__(self, protocol)


@dataclass(frozen=True)
class Kind:
    """Products of one size, which share a layout."""

    outputs: int
    inputs: int
    layers: int
    int8: bool = False

    @staticmethod
    def of(layers: Sequence[nn.Linear]) -> Kind:
        return Kind(sum(layer.out_features for layer in layers), layers[0].in_features, len(layers), is_int8(layers[0].weight))


class Packing:
    """The packed linear layers of a model.

    Args:
        model: on a CPU, in float32 or bfloat16; see :func:`refusal`.
        sample: runs the model once over a few tokens, so that layers that read the same input are found.
        owned: nobody else holds the model. Packed weights then replace the originals, which keeps their memory from doubling;
            parameters are left as placeholders without storage. Otherwise the originals stay beside the packed ones.
        hints: the layouts to choose among.

    Attributes:
        hints: the chosen layout of each kind of product; None where layers stay as they are.
        taken: the placeholders of weights that packed ones have replaced.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Callable[[], Any],
        *,
        owned: bool,
        hints: Sequence[int] = HINTS,
    ):
        self.model, self.owned = model, owned
        groups = sharing(model, sample)
        self.hints = {kind: preferred_hint(alike, hints) for kind, alike in by_kind(groups).items()}
        self._products: list[tuple[Product, list[nn.Linear], list[bool]]] = []
        self.taken: list[Source] = []  # placeholders
        self._found: dict[int, Product] = {}
        shared = held_elsewhere(model)
        try:
            for layers in groups:
                if (hint := self.hints[Kind.of(layers)]) is not None:
                    self._replace(layers, Product(layers, hint), [owned and id(layer.weight) not in shared for layer in layers])
        except BaseException:  # no memory for a layout, Ctrl-C
            self.undo()
            raise

    def _replace(self, layers: list[nn.Linear], product: Product, freed: list[bool]) -> None:
        """Have ``product`` compute ``layers``, and free the weights of some of them."""
        self._products.append((product, layers, freed))
        for index, (layer, free) in enumerate(zip(layers, freed)):
            vars(layer)["forward"] = PackedForward(product, index)
            if free and product.int8:
                take(layer.weight)
            elif free:
                layer.weight = placeholder(layer.weight)
            self.taken += [source for source in sources_of(layer) if free and source.name == "weight"]
            self._found[id(layer)] = product
        product.sources = [source for layer, free in zip(layers, freed) if not free for source in sources_of(layer)]

    def matrix(self, layer: nn.Module) -> native.Matrix | None:
        """What the native kernels read of ``layer``, alone or within a product of several; None if it has another layout."""
        found = self._found.get(id(layer))
        if found is None or found.hint != NATIVE or any(size % BLOCK for size in found.sizes):
            return None
        first = sum(found.sizes[: next(index for index, each in enumerate(found.layers) if each is layer)])
        starts = ((found.packed, first * found.inputs), (found.scale, first), (found.bias, first))
        return native.Matrix(*(None if part is None else part.data_ptr() + at * part.element_size() for part, at in starts))

    def product(self, *layers: nn.Module) -> Product | None:
        """The product that computes just these layers, in this order, or None."""
        found = self._found.get(id(layers[0]))
        alike = found is not None and len(found.layers) == len(layers) and all(map(operator.is_, found.layers, layers))
        return found if alike else None

    def lost(self) -> str | None:
        """A parameter that somebody wrote to, or made, where there are only placeholders, so that nothing was written; None if none is."""
        ours = {id(source.parameter) for source in self.taken}
        written = {id(source.parameter) for source in self.taken if source.written}
        named = self.model.named_parameters() if self.taken else ()
        return next((name for name, each in named if id(each) in written or (each.is_meta and id(each) not in ours)), None)

    def originals(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every placeholder, and the numbers of the weight that it stands for; they are made for one product at a time."""
        for product, layers, freed in self._products:
            if any(freed):
                yield from ((layer.weight, weight) for layer, free, weight in zip(layers, freed, product.weights()) if free)

    def undo(self) -> None:
        """Give every layer its own ``forward`` and weight back."""
        self._found, placeholders = {}, {id(source.parameter) for source in self.taken}
        while self._products:
            product, layers, freed = self._products.pop()
            weights = product.weights() if any(freed) else [torch.empty(0)] * len(layers)
            for layer, free, weight in zip(layers, freed, weights):
                take_back(layer, PackedForward)
                if not free or id(layer.weight) not in placeholders:  # of those, some may have been replaced meanwhile
                    continue
                if product.int8:
                    give_back(layer.weight, weight)
                else:
                    layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
        self.taken = []


def refusal(model: nn.Module, hints: Sequence[int] = (*HINTS, NATIVE)) -> str | None:
    """Why the weights of ``model`` cannot be packed in one of the layouts ``hints``, or None."""
    if not torch._C._has_mkldnn:
        return "this build of torch has no oneDNN"
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cpu"}:
        return f"its weights are on {', '.join(sorted(devices))}, and only those in CPU memory are packed"
    packed = [module for module in model.modules() if packable(module)]
    int8 = any(is_int8(module.weight) for module in packed)
    if getattr(model, "is_quantized", False) and not int8:
        return "its weights are quantised, and not by torchao to eight bits with a scale per output"
    if int8 and NATIVE not in hints:
        return "its weights have eight bits, for which there is no other layout than that of the native kernels"
    if not packed:
        return "it has no plain linear layers in float32 or bfloat16"
    if set(hints) == {NATIVE} and all(int(module.in_features) % UNIT for module in packed):  # type: ignore[arg-type]
        return f"the native kernels read rows of {UNIT} weights or a multiple of that, and none of its linear layers has such"
    return None


def packable(module: nn.Module) -> bool:
    """A linear layer as torch makes it: no subclass, no override, a dtype that oneDNN multiplies or eight bits that our kernels do."""
    if type(module) is not nn.Linear or module.weight.dtype not in DTYPES or "forward" in vars(module):
        return False
    return (type(module.weight) is nn.Parameter or is_int8(module.weight)) and is_held(module.weight)


def sharing(model: nn.Module, sample: Callable[[], Any]) -> list[list[nn.Linear]]:
    """The packable layers of ``model``, those together that were called one after the other with the same input."""
    called: list[tuple[nn.Linear, Tensor]] = []
    hooks = [
        module.register_forward_pre_hook(lambda layer, inputs: called.append((layer, inputs[0])))
        for module in model.modules()
        if packable(module)
    ]
    try:
        sample()
    finally:
        for hook in hooks:
            hook.remove()
    groups: list[list[nn.Linear]] = []
    before: Tensor | None = None
    seen: set[int] = set()
    for layer, x in called:
        if id(layer) in seen:  # called twice: whoever shares its input is not known
            before = None
            continue
        seen.add(id(layer))
        if x is before and is_int8(layer.weight) == is_int8(groups[-1][0].weight):
            groups[-1].append(layer)
        else:
            groups.append([layer])
        before = x
    return groups


def by_kind(groups: Sequence[list[nn.Linear]]) -> dict[Kind, list[list[nn.Linear]]]:
    found: dict[Kind, list[list[nn.Linear]]] = {}
    for layers in groups:
        found.setdefault(Kind.of(layers), []).append(layers)
    return found


def preferred_hint(groups: Sequence[list[nn.Linear]], hints: Sequence[int]) -> int | None:
    """The first layout that fits these products, of :data:`PREFERRED` those in ``hints``; None for torch's own layers."""
    weight = groups[0][0].weight
    int8 = is_int8(weight)
    fits = {
        NATIVE: weight.shape[1] % UNIT == 0,
        ONEDNN: not int8 and onednn_lays_out(weight.dtype),
        PLAIN: not int8 and len(groups[0]) > 1,
    }
    return next((hint for hint in PREFERRED if hint in hints and fits[hint]), None)


@lru_cache(maxsize=8)
def onednn_lays_out(dtype: torch.dtype) -> bool:
    """Whether oneDNN has layouts for ``dtype`` on this CPU; for bfloat16 it needs AVX-512."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(UNIT, UNIT, dtype=dtype), ONEDNN)
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True)
class Rows:
    """A linear layer that is none of torch's."""

    weight: Tensor
    bias: Tensor | None
    out_features: int
    in_features: int


@contextmanager
def one_thread(model: nn.Module | None = None) -> Iterator[None]:
    """Torch computes with one thread, unless ``model`` is large. On a busy machine torch's threads wait for each other's turn on a core
    after each operation, which can take longer than the operation."""
    threads = torch.get_num_threads()
    if model is not None and sum(each.nbytes for each in model.parameters()) > LIGHT:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def held_elsewhere(model: nn.Module) -> set[int]:
    """The ids of parameters that a module other than a plain linear layer reads too: embeddings that are tied to the output."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return {parameter for parameter, count in holders.items() if count > 1}


def joined(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


def joined_bias(layers: Sequence[nn.Linear] | Sequence[Rows]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    dtype = layers[0].weight.dtype
    return joined([torch.zeros(layer.out_features, dtype=dtype) if layer.bias is None else layer.bias.detach() for layer in layers])


def placeholder(weight: Tensor) -> nn.Parameter:
    """Shape and dtype of ``weight``, no memory."""
    return nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)


def padded_size(outputs: int) -> int:
    return -(-outputs // 64) * 64


def padded(row: Tensor) -> Tensor:
    """``row`` with zeros behind, for the outputs that pad a matrix."""
    return nn.functional.pad(row, (0, padded_size(len(row)) - len(row)))


def blocked(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``weight`` ``[N, K]`` as ``layer.c`` reads it for products in ``dtype``, its own by default."""
    fill = padded_size(len(weight)) - len(weight)
    rows = nn.functional.pad(weight, (0, 0, 0, fill)) if fill else weight.contiguous()
    pairs = (dtype or weight.dtype) == torch.bfloat16
    if pairs:  # each moved as one number
        rows = rows.view(torch.int32 if weight.dtype == torch.bfloat16 else torch.int16)
    order = rows.view(-1, 16, rows.shape[1]).transpose(1, 2)
    packed = native.room(order.shape, order.dtype).copy_(order).view(weight.dtype)
    return packed.view(*order.shape, 2) if pairs else packed


def unblocked(packed: Tensor, outputs: int) -> Tensor:
    """The ``[N, K]`` matrix that :func:`blocked` was given."""
    rows = packed.permute(0, 2, 1, 3).flatten(2) if packed.ndim == 4 else packed.permute(0, 2, 1)
    return rows.flatten(0, 1)[:outputs]
