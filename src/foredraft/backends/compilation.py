"""Decoder layers compiled by torch, one graph for all of them and for every step.

What changes from step to step, the length of the context, the number of nodes and of rows and which layer it is, must not be part of a
graph, or each step would wait for a compiler. Therefore layers are compiled, not the model: a graph takes the layer's weights,
its buffers of the cache, a mask and the slots to write to as inputs, with dynamic sizes; of a cache in pages, also the pages that rows
write and read. torch specializes on sizes of one, so single tokens and several, one row and several have graphs of their own, all of them
made when the target is built. Freezing, which makes weights constants of a graph, would take one graph per layer.

``forward`` is overridden on single layers, and :meth:`Compilation.undo` undoes that. Layers of one kind differ only in their
``layer_idx``, which torch compiles in as a constant where it is used; the cache inside a graph ignores it.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from foredraft.backends.kernels import difference
from foredraft.backends.static_pass import SlotCache
from foredraft.errors import first_line
from foredraft.models.cache import TreeCache, Window
from foredraft.models.changes import STRUCTURE, Kind, ModelState, Override, hooks_of, take_back
from foredraft.models.layers import decoder_layers
from foredraft.models.page_stores import Places, gathered, put
from foredraft.models.paged_cache import PagedCache
from foredraft.models.positions import tuned_layers
from foredraft.models.skips import LeftOut

PAGES = 2  # fewest in a graph's table, because torch specializes on one
NODES = 64  # most tokens per row of a compiled pass; with more, arithmetic takes the time, and the model's own layers are as fast

Passes = Callable[[], list[Tensor]]


class Compilation:
    """The compiled layers of one model.

    Args:
        model: one that :func:`refusal` accepts.
        passes: runs every kind of pass that is to be compiled through a :class:`TreeCache`, and returns the logits of each.

    Attributes:
        refused: why the model was left as it was; None if it was not.
        graphs: how many kinds of passes were compiled so far.
    """

    def __init__(self, model: nn.Module, passes: Passes):
        self.refused: str | None = None
        expected = passes()
        self._runs: dict[object, Callable[..., Any]] = {}
        self.shared = Shared(masks=model.config._attn_implementation == "sdpa")  # type: ignore[union-attr]
        self._layers = decoder_layers(model)
        self.state = ModelState.of(model)  # type: ignore[arg-type]
        for layer in self._layers:
            vars(layer)["forward"] = CompiledLayer(layer, self)
        try:
            found = passes()
        except Exception as error:  # torch and the C++ compiler may raise anything; the message is passed on
            self.refused = f"torch.compile failed: {first_line(error)}"
        except BaseException:  # Ctrl-C
            self.undo()
            raise
        else:
            worst = max((apart for pair in zip(found, expected) if (apart := difference(*pair)) is not None), default=None)
            if worst is not None:
                self.refused = f"compiled layers gave logits that differ by {worst:.1e} of their scale"
            elif not self._runs:
                self.refused = "its layers do not take the cache in a way that can be compiled"
        if self.refused is not None:
            self.undo()
        self.state.followers.add(self)
        self.state.note()

    name = "compiled"
    hints = ()

    def follow(self, changed: set[Kind]) -> None:
        """Other weights need nothing, since they are inputs of the graphs. Other adapters need other graphs, and other modules end this."""
        if changed & STRUCTURE:
            self.undo()
        elif changed - {"weights", "hooks", "mode"}:
            self._runs = {}

    def pack(self) -> None:
        """Nothing: the weights are the model's own."""

    unpack = pack

    @property
    def graphs(self) -> int:
        return len(self._runs)

    def run(self, kind: object) -> Callable[..., Any]:
        """The compiled function for passes of one kind. Each has code of its own: torch counts graphs per code object."""
        if kind not in self._runs:
            code = types.FunctionType(step.__code__.replace(), step.__globals__, step.__name__)
            self._runs[kind] = torch.compile(code, dynamic=True, fullgraph=True)
        return self._runs[kind]

    def unfuse(self, why: str) -> bool:
        """False: every layer is a call of its own."""
        return False

    def undo(self) -> None:
        """Give every layer the ``forward`` of its class back."""
        self.state.mark()
        for layer in self._layers:
            take_back(layer, CompiledLayer)
        self._layers, self._runs = [], {}
        self.state.note()


class Shared:
    """Inputs that all layers of a pass share, prepared by the first layer, in memory layouts that do not change from pass to pass.

    Args:
        masks: whether a boolean mask may replace a missing one, where a node sees everything.
    """

    def __init__(self, masks: bool):
        self.masks = masks
        self._slots: tuple[object, tuple[Tensor, ...]] = (None, ())
        self._pages: WeakKeyDictionary[Places, tuple[Tensor, ...]] = WeakKeyDictionary()
        self._mask: tuple[object, Tensor] = (None, torch.empty(0))
        self._positions: tuple[object, Tensor] = (None, torch.empty(0))

    def slots(self, window: Window, device: torch.device) -> tuple[Tensor, ...]:
        """``[R, N]``: where the keys of each node go."""
        if window is not self._slots[0] or self._slots[1][0].device != device:
            starts = torch.tensor(window.starts, device=device)
            self._slots = window, (starts[:, None] + torch.arange(window.nodes, device=device),)
        return self._slots[1]

    def pages(self, places: Places) -> tuple[Tensor, ...]:
        """The page of each node, its slot in the page, and the pages that rows read."""
        found = self._pages.get(places)
        if found is None:
            rows, blocks = places.table.shape
            table = places.table.new_zeros(rows, max(blocks, PAGES))
            table[:, :blocks] = places.table
            torch._dynamo.maybe_mark_dynamic(table, 1)  # or torch would take it for equal to another size that it happens to have
            self._pages[places] = found = places.pages, places.slots, table
        return found

    def mask(self, given: Tensor | None, window: Window | None, x: Tensor) -> Tensor:
        """``given`` ``[R or 1, 1, N, L]`` for all rows of ``x`` ``[R, N, H]``, contiguous; None is a mask that hides nothing."""
        key, (rows, nodes, _) = window if given is None else given, x.shape
        if key is not self._mask[0] or self._mask[1].device != x.device:
            if given is None:
                assert window is not None
                made = torch.ones(rows, 1, nodes, window.width, dtype=torch.bool, device=x.device)
            else:
                made = given.expand(rows, -1, -1, -1).contiguous()
            self._mask = key, made
        return self._mask[1]

    def positions(self, given: Tensor) -> Tensor:
        """A copy, since the original may be a slice of a table that is sometimes rebuilt, in another mode of torch."""
        if given is not self._positions[0]:
            self._positions = given, given.clone(memory_format=torch.contiguous_format)
        return self._positions[1]


class CompiledLayer(Override):
    """``forward`` of one decoder layer."""

    def __init__(self, layer: nn.Module, owner: Compilation):
        self.layer, self.owner = layer, owner
        self.names = list(inspect.signature(type(layer).forward).parameters)[1:]
        self._hooks = hooks_of(layer, inside=True)
        self.index = next(index for each in layer.modules() if isinstance(index := vars(each).get("layer_idx"), int))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.names, args)), **kwargs}
        name, cache = next(((name, value) for name, value in given.items() if isinstance(value, TreeCache)), ("", None))
        apart = any(isinstance(each, LeftOut) for each in self.layer._modules.values())
        watched = is_in_torch_dispatch_mode() or any(self._hooks)  # torch compiles nothing while a mode looks at operations
        ready = None if cache is None or apart or watched or torch.is_grad_enabled() else self._ready(cache)
        x, mask, shared = given.get(self.names[0]), given.get("attention_mask"), self.owner.shared
        if cache is None or ready is None or not isinstance(x, Tensor) or not compilable(x, mask, shared.masks):
            return type(self.layer).forward(self.layer, *args, **kwargs)
        keys, values, slots = ready
        rest = {key: value for key, value in given.items() if key not in (name, "attention_mask")}
        if isinstance(rest.get("position_ids"), Tensor):
            rest["position_ids"] = shared.positions(rest["position_ids"])
        run = self.owner.run((x.shape[0] == 1, x.shape[1] == 1))
        return run(self.layer, name, rest, keys, values, slots, shared.mask(mask, cache.window, x))

    def _ready(self, cache: TreeCache) -> tuple[Tensor, Tensor, tuple[Tensor, ...]] | None:
        """This layer's keys and values, and where the pass finds its slots in them: ``[R, heads, capacity, size]`` for the rows of the pass
        and :meth:`Shared.slots`, or all pages and :meth:`Shared.pages`. None if they must be allocated or enlarged first, which a pass
        through the model's own layers does."""
        if isinstance(cache, SlotCache):  # a pass that is recorded
            return cache.written_at(self.index)
        window = cache.window
        if window is None or self.index >= len(cache.layers) or not cache.fits(layer := cache.layers[self.index]):
            return None
        keys, values, shared = layer.keys, layer.values, self.owner.shared
        if isinstance(cache, PagedCache):
            for each in (keys, values):
                torch._dynamo.maybe_mark_dynamic(each, 0)
            store = next(store for store in cache.stores if layer in store.layers)
            return keys, values, shared.pages(cache.places(store, keys.device))
        return keys[window.first : window.last], values[window.first : window.last], shared.slots(window, keys.device)


class Buffers:
    """The cache inside a graph: one layer's buffers. ``slots`` are those of :meth:`Shared.slots` or :meth:`Shared.pages`."""

    def __init__(self, keys: Tensor, values: Tensor, slots: tuple[Tensor, ...], width: int):
        self.keys, self.values, self.slots, self.width = keys, values, slots, width

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As :meth:`TreeCache.update`."""
        if len(self.slots) == 1:
            (slots,) = self.slots
            rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
            self.keys[rows, :, slots] = keys.transpose(1, 2)
            self.values[rows, :, slots] = values.transpose(1, 2)
            return self.keys[:, :, : self.width], self.values[:, :, : self.width]
        pages, slots, table = self.slots
        put(self.keys, keys, pages, slots)
        put(self.values, values, pages, slots)
        return gathered(self.keys, table)[:, :, : self.width], gathered(self.values, table)[:, :, : self.width]


def step(layer: nn.Module, cache: str, rest: dict[str, Any], keys: Tensor, values: Tensor, slots: tuple[Tensor, ...], mask: Tensor) -> Any:
    """One layer over ``rest``, the arguments other than the cache and the mask. This is what is compiled."""
    return type(layer).forward(layer, **rest, **{cache: Buffers(keys, values, slots, mask.shape[-1]), "attention_mask": mask})


def compilable(x: Tensor, mask: Any, masks: bool) -> bool:
    """Whether a pass over ``x`` ``[R, N, H]`` is one of those that are compiled; ``masks``: a missing mask may be replaced."""
    if x.ndim != 3 or x.shape[1] > NODES:
        return False
    if mask is None:
        return masks and x.shape[1] == 1
    return isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1] == 1


def refusal(model: nn.Module, chains_only: str | None) -> str | None:
    """Why the layers of ``model`` cannot be compiled, or None."""
    if chains_only is not None:
        return f"it keeps a cache of its own ({chains_only})"
    if tuned_layers(model):  # type: ignore[arg-type]
        return "its attention temperature is set anew in every pass"
    layers = decoder_layers(model)
    if not layers:
        return f"{type(model).__name__} has no decoder layers that are known as such"
    if any("forward" in vars(module) for layer in layers for module in layer.modules()):
        return "its layers have overrides of their own already (a device map, or another Speculator)"
    device = next(model.parameters()).device.type
    if device == "cpu":
        return _no_compiler()
    return None


def _no_compiler() -> str | None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except (RuntimeError, OSError) as error:  # InvalidCxxCompiler is one; Windows has others
        return f"torch.compile needs a C++ compiler, and {first_line(error)}"
    return None
