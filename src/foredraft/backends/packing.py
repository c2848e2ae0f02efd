"""Weights laid out once for the kernel that reads them, on a CPU.

A pass over a few tokens reads every weight once, and how fast depends on the order in which the weights lie in memory. oneDNN packs
a matrix into blocks for its kernels, and so do the kernels in ``native``; torch's own linear layers pack it anew in every pass,
or read it as it is. Here each linear layer of a model is packed once, and layers that read the same input (query, key and value; gate and
up) become one product. Quantised weights have one layout only, that of ``native``, which keeps their bits.

Layouts sum in different orders, so logits differ in the last bits. The choice therefore depends on the machine and the matrix alone, never
on a time that was measured: the same command gives the same logits every time.

The classes of the model stay unchanged: ``forward`` is overridden on single layers, and :meth:`Packing.undo` undoes that.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foredraft.backends import native
from foredraft.backends.narrow import PLAIN as UNQUANTISED
from foredraft.backends.narrow import READ, UNIT, Format, format_of, give_back, is_held, is_quantised, take
from foredraft.backends.products import BLOCK, NATIVE, ONEDNN, PLAIN, Product, Source, sources_of
from foredraft.models.changes import Override, take_back
from foredraft.models.encoder_decoder import borrowed_encoder

DTYPES = (torch.float32, torch.bfloat16)
HINTS = (PLAIN, ONEDNN)
PREFERRED = (NATIVE, ONEDNN, PLAIN)
TRIED = 8  # inputs that a packed layer of an encoder is tried with
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # relative to the largest output: what another order of summation explains
WORDS = {4: "four", 6: "six", 8: "eight"}
LIGHT = 2 << 30  # bytes of a model; up to this size, one thread prepares it as fast as several


class PackedForward(Override):
    """``forward`` of one layer of a product. A copy of the layer keeps it if it has replaced the layer's weights."""

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
    format: Format = UNQUANTISED
    encoder: bool = False

    @staticmethod
    def of(layers: Sequence[nn.Linear], *, encoder: bool = False) -> Kind:
        found = format_of(layers[0].weight)
        assert found is not None
        return Kind(sum(layer.out_features for layer in layers), layers[0].in_features, len(layers), found, encoder)


class Packed(Protocol):
    """Packed weights of a module that is no linear layer."""

    taken: list[Source]

    def originals(self) -> Iterator[tuple[Tensor, Tensor]]: ...

    def undo(self) -> None: ...


class Packing:
    """The packed linear layers of a model.

    Args:
        model: on a CPU, in float32 or bfloat16; see :func:`refusal`.
        sample: runs the model once over a few tokens, so that layers that read the same input are found. It need not run an encoder,
            whose layers are packed one by one.
        owned: nobody else holds the model. Packed weights then replace the originals, which keeps their memory from doubling;
            parameters are left as placeholders without storage. Otherwise the originals stay beside the packed ones.
        hints: the layouts to choose among.

    Attributes:
        hints: the chosen layout of each kind of product; None where layers stay as they are.
        others: what else was packed and is undone with them.
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
        groups = [(Kind.of(layers), layers) for layers in sharing(model, sample)]
        done = {id(layer) for _, layers in groups for layer in layers}
        groups += [(Kind.of([layer], encoder=True), [layer]) for layer in layers_of_encoder(model) if id(layer) not in done]
        kinds = by_kind(groups)
        self.hints = {kind: (hint_for_texts if kind.encoder else preferred_hint)(alike, hints) for kind, alike in kinds.items()}
        self._products: list[tuple[Product, list[nn.Linear], list[bool]]] = []
        self.others: list[Packed] = []
        self._taken: list[Source] = []
        self._found: dict[int, Product] = {}
        shared = held_elsewhere(model)
        try:
            for kind, layers in groups:
                if (hint := self.hints[kind]) is None:
                    continue
                product = Product(layers, hint)
                if not kind.encoder or agrees(product, layers[0]):
                    self._replace(layers, product, [owned and id(layer.weight) not in shared for layer in layers])
        except BaseException:  # no memory for a layout, Ctrl-C
            self.undo()
            raise

    def _replace(self, layers: list[nn.Linear], product: Product, freed: list[bool]) -> None:
        """Have ``product`` compute ``layers``, and free the weights of some of them."""
        self._products.append((product, layers, freed))
        for index, (layer, free) in enumerate(zip(layers, freed)):
            vars(layer)["forward"] = PackedForward(product, index)
            if free and product.quantised:
                take(layer.weight)
            elif free:
                layer.weight = placeholder(layer.weight)
            self._taken += [source for source in sources_of(layer) if free and source.name == "weight"]
            self._found[id(layer)] = product
        product.sources = [source for layer, free in zip(layers, freed) if not free for source in sources_of(layer)]

    @property
    def taken(self) -> list[Source]:
        """The placeholders of weights that packed ones have replaced."""
        return [*self._taken, *(source for other in self.others for source in other.taken)]

    def add(self, other: Packed) -> None:
        self.others.append(other)

    def matrix(self, layer: nn.Module) -> native.Matrix | None:
        """What the native kernels read of ``layer``, alone or within a product of several; None if it has another layout."""
        found = self._found.get(id(layer))
        if found is None or found.hint != NATIVE or any(size % BLOCK for size in found.sizes):
            return None
        first = sum(found.sizes[: next(index for index, each in enumerate(found.layers) if each is layer)])
        return found.matrix_from(first)

    def product(self, *layers: nn.Module) -> Product | None:
        """The product that computes just these layers, in this order, or None."""
        found = self._found.get(id(layers[0]))
        alike = found is not None and len(found.layers) == len(layers) and all(map(operator.is_, found.layers, layers))
        return found if alike else None

    @property
    def nbytes(self) -> int:
        """Bytes of all products, experts left out."""
        return sum(each.nbytes for each in {id(each): each for each in self._found.values()}.values())

    def lost(self) -> str | None:
        """The name of a parameter that was written to or made although there are only placeholders, so that the write is lost; None if
        there is none."""
        taken = self.taken
        ours = {id(source.parameter) for source in taken} | borrowed(self.model)
        written = {id(source.parameter) for source in taken if source.written}
        named = self.model.named_parameters() if taken else ()
        return next((name for name, each in named if id(each) in written or (each.is_meta and id(each) not in ours)), None)

    def originals(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every placeholder, and the numbers of the weight that it stands for; they are made for one product at a time."""
        for product, layers, freed in self._products:
            if any(freed):
                yield from ((layer.weight, weight) for layer, free, weight in zip(layers, freed, product.weights()) if free)
        for other in self.others:
            yield from other.originals()

    def undo(self) -> None:
        """Give every layer its own ``forward`` and weight back."""
        while self.others:
            self.others.pop().undo()
        self._found, placeholders = {}, {id(source.parameter) for source in self._taken}
        while self._products:
            product, layers, freed = self._products.pop()
            weights = product.weights() if any(freed) else [torch.empty(0)] * len(layers)
            for layer, free, weight in zip(layers, freed, weights):
                take_back(layer, PackedForward)
                if not free or id(layer.weight) not in placeholders:  # of those, some may have been replaced meanwhile
                    continue
                if product.quantised:
                    give_back(layer.weight, weight)
                else:
                    layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
        self._taken = []


def refusal(model: nn.Module, hints: Sequence[int] = (*HINTS, NATIVE)) -> str | None:
    """Why the weights of ``model`` cannot be packed in one of the layouts ``hints``, or None."""
    if not torch._C._has_mkldnn:
        return "this build of torch has no oneDNN"
    theirs = borrowed(model)
    parameters = [each for each in model.parameters() if id(each) not in theirs]
    devices = {parameter.device.type for parameter in parameters}
    if devices != {"cpu"}:
        return f"its weights are on {', '.join(sorted(devices))}, and only those in CPU memory are packed"
    packed = [module for module in model.modules() if packable(module) and id(module) not in theirs]
    formats = (format_of(each) for each in (*(module.weight for module in packed), *parameters))
    bits = sorted({each.bits for each in formats if each is not None and each.bits})
    if getattr(model, "is_quantized", False) and not bits:
        return f"its weights are quantised in a way that the native kernels do not read; they read {READ}"
    if bits and NATIVE not in hints:
        how = " and ".join(", ".join(WORDS[each] for each in bits).rsplit(", ", 1))
        return f"its weights have {how} bits, for which there is no other layout than that of execution='native'"
    if not packed and any(isinstance(vars(module).get("forward"), PackedForward) for module in model.modules()):
        return "another Speculator has packed it; close() that one first"
    if not packed:
        return "it has no plain linear layers in float32 or bfloat16"
    if set(hints) == {NATIVE} and all(int(module.in_features) % UNIT for module in packed):  # type: ignore[arg-type]
        return f"the native kernels read rows of {UNIT} weights or a multiple of that, and none of its linear layers has such"
    return None


def packable(module: nn.Module) -> bool:
    """A linear layer as torch makes it: no subclass, no override, a dtype that oneDNN multiplies or bits that our kernels do."""
    if type(module) is not nn.Linear or module.weight.dtype not in DTYPES or "forward" in vars(module):
        return False
    return format_of(module.weight) is not None and is_held(module.weight)


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
        if id(layer) in seen:  # called twice: the layers that share its input are unknown
            before = None
            continue
        seen.add(id(layer))
        if x is before and together(groups[-1], layer):
            groups[-1].append(layer)
        else:
            groups.append([layer])
        before = x
    return groups


def together(above: Sequence[nn.Linear], layer: nn.Linear) -> bool:
    """Whether one product can compute all: weights of one format, or group-quantised weights, of which the kernels read one matrix after
    the other. A matrix ends with a whole tile where another one follows."""
    formats = [format_of(each.weight) for each in (above[-1], layer)]
    if formats[0] == formats[1]:
        return True
    ends = sum(each.out_features for each in above) % BLOCK == 0
    return ends and all(each is not None and each.grouped and each.order == "" for each in formats)


def layers_of_encoder(model: nn.Module) -> list[nn.Linear]:
    """The packable layers of a model's encoder; none where it has none of its own."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return []
    encoder: nn.Module = model.get_encoder()  # type: ignore[operator]
    theirs = borrowed(model)
    return [module for module in encoder.modules() if packable(module) and id(module) not in theirs]  # type: ignore[misc]


def borrowed(model: nn.Module) -> set[int]:
    """The ids of the modules and parameters of an encoder that ``model`` has from another model. These are that one's to pack: its user may
    hold it, and it may be packed already."""
    encoder = borrowed_encoder(model)
    return set() if encoder is None else {id(each) for each in (*encoder.modules(), *encoder.parameters())}


def by_kind(groups: Sequence[tuple[Kind, list[nn.Linear]]]) -> dict[Kind, list[list[nn.Linear]]]:
    found: dict[Kind, list[list[nn.Linear]]] = {}
    for kind, layers in groups:
        found.setdefault(kind, []).append(layers)
    return found


def preferred_hint(groups: Sequence[list[nn.Linear]], hints: Sequence[int]) -> int | None:
    """The first layout that fits these products, of :data:`PREFERRED` those in ``hints``; None for torch's own layers."""
    weight = groups[0][0].weight
    quantised = is_quantised(weight)
    fits = {
        NATIVE: weight.shape[1] % UNIT == 0,
        ONEDNN: not quantised and onednn_lays_out(weight.dtype),
        PLAIN: not quantised and len(groups[0]) > 1,
    }
    return next((hint for hint in PREFERRED if hint in hints and fits[hint]), None)


def hint_for_texts(groups: Sequence[list[nn.Linear]], hints: Sequence[int]) -> int | None:
    """The same for layers that read many tokens at once: in float32, oneDNN multiplies large matrices faster than the kernels do."""
    faster = ONEDNN in hints and groups[0][0].weight.dtype == torch.float32 and preferred_hint(groups, (ONEDNN,)) is not None
    return ONEDNN if faster else preferred_hint(groups, hints)


def agrees(product: Product, layer: nn.Linear) -> bool:
    """Whether ``product`` computes what its only ``layer`` does, without the layer's hooks, which may expect inputs of another shape."""
    x = torch.randn(TRIED, layer.in_features, generator=torch.Generator().manual_seed(0), device="cpu").to(layer.weight.dtype)
    expected = layer.forward(x)
    return bool((product(x) - expected).abs().max() <= ROUNDING[expected.dtype] * expected.abs().max())


@lru_cache(maxsize=8)
def onednn_lays_out(dtype: torch.dtype) -> bool:
    """Whether oneDNN has layouts for ``dtype`` on this CPU; for bfloat16 it needs AVX-512."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(UNIT, UNIT, dtype=dtype, device="cpu"), ONEDNN)
    except RuntimeError:
        return False
    return True


@contextmanager
def one_thread(model: nn.Module | None = None) -> Iterator[None]:
    """Torch computes with one thread, unless ``model`` is large. On a busy machine torch's threads wait for each other's turn on a core
    after each operation, which can take longer than the operation.

    Torch's number is that of the process, and what a new thread begins with: a second thread in here would find 1, and leave that for good.
    """
    me = threading.get_ident()
    if me in _outside or (model is not None and sum(each.nbytes for each in model.parameters()) > LIGHT):
        yield
        return
    with _entering:
        now = torch.get_num_threads()  # asked in any case: a thread that was not would go back to the process's number once it is
        _outside[me] = next(iter(_outside.values()), now)
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _entering:
            torch.set_num_threads(_outside.pop(me))


_entering = threading.Lock()
_outside: dict[int, int] = {}  # torch's threads outside :func:`one_thread`, by the thread that is inside


def held_elsewhere(model: nn.Module) -> set[int]:
    """The ids of parameters that several modules hold, such as embeddings that are tied to the output."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return {parameter for parameter, count in holders.items() if count > 1}


def placeholder(weight: Tensor) -> nn.Parameter:
    """Shape and dtype of ``weight``, no memory."""
    return nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)
