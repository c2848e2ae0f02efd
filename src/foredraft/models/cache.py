"""The key-value cache of the loop: preallocated, one length per row, and able to forget.

``update`` writes at each row's own offset and advances nothing; only ``commit`` advances, after gathering the accepted
path to the front. Rejected entries stay behind as garbage that the mask hides and the next pass overwrites. Sliding
layers are stored full length: the mask does the windowing, so that every layer can roll back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from foredraft.device import to_device
from foredraft.errors import CacheMemoryError

BLOCK = 64  # capacities are multiples of this many tokens
FEW = 4  # up to so many vectors per buffer are moved one by one
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers of so many bytes


@dataclass(frozen=True, eq=False)
class Window:
    """Where one forward pass reads and writes: physical rows ``first`` to ``last``, N tokens from each row's start on.

    ``before`` nodes of the same tree are in front of the starts, written by earlier passes. ``counts`` says for a chain how many nodes of
    each row are real, if that is known: the others need not be computed.
    """

    first: int
    last: int
    starts: tuple[int, ...]
    nodes: int
    before: int = 0
    counts: tuple[int, ...] | None = None

    @cached_property
    def rows(self) -> int:
        return self.last - self.first

    @cached_property
    def width(self) -> int:
        """How many slots the keys returned to the model span."""
        return max(self.starts) + self.nodes

    @cached_property
    def uniform(self) -> bool:
        """Every row starts at the same slot."""
        return self.starts.count(self.starts[0]) == len(self.starts)


class Layer:
    """Keys and values of one attention layer, ``[capacity rows, heads, capacity, head size]``; sizes come with the first write."""

    is_sliding = False
    is_compileable = False

    def __init__(self) -> None:
        self.keys = self.values = torch.empty(0, 0, 0, 0)

    def get_seq_length(self) -> int:
        raise TypeError("rows have lengths of their own: ask the TreeCache")


class TreeCache(Cache):
    """A transformers ``Cache`` whose rows have lengths of their own and can forget tokens.

    A pass writes the keys and values of a tree after each row's tokens; :meth:`commit` keeps those of the accepted path.

    Args:
        reserve: tokens per row to allocate for at first; the capacity doubles when it is outgrown.

    Attributes:
        lengths: tokens cached per live row, in physical order.
        scratch: what kernels keep between passes over this cache.
        positions: ``[R, W]`` int32 position of what is in each slot of the window. Kernels add up what a node sees in the order of
            positions. None if slots are positions.
    """

    is_compileable = False

    def __init__(self, *, reserve: int = 256):
        super().__init__(layers=[])
        self.layers: list[Layer]
        self.lengths: list[int] = []
        self.row_capacity = 1
        self.capacity = self._least = _blocks(reserve)
        self.window: Window | None = None
        self.spoiled: dict[int, int] = {}  # rows after the live ones: the slot from which on they were overwritten
        self.allocations = 0  # so far; pointers into the buffers are stale when this changes
        self.scratch: Any = None
        self.positions: Tensor | None = None
        self._indices: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._viewed: list[Movable] | None = None

    @property
    def written(self) -> list[Layer]:
        """The layers that hold something; some models share keys between layers and leave a few unused."""
        return [layer for layer in self.layers if len(layer.keys)]

    # -- what transformers asks during a forward pass ---------------------------------------------------------------

    @property
    def is_sliding(self) -> list[bool]:
        return []

    @property
    def is_initialized(self) -> bool:
        return True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._window.starts[0] if self.window is not None else max(self.lengths, default=0)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._window.width, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write ``[R, heads, N, head size]`` at the window's slots; return each row's keys and values up to its width."""
        window, layer = self._window, self._layer(layer_idx, key_states, value_states)
        keys, values = layer.keys, layer.values
        if window.rows < len(keys):
            keys, values = keys.narrow(0, window.first, window.rows), values.narrow(0, window.first, window.rows)
        if window.uniform:
            keys.narrow(2, window.starts[0], window.nodes).copy_(key_states)
            values.narrow(2, window.starts[0], window.nodes).copy_(value_states)
        else:
            rows, slots = self._write_indices(key_states.device)
            keys[rows, :, slots] = key_states.transpose(1, 2)
            values[rows, :, slots] = value_states.transpose(1, 2)
        return keys.narrow(2, 0, window.width), values.narrow(2, 0, window.width)

    # -- what a kernel asks that writes keys and values itself ---------------------------------------------------------

    @property
    def outgrown(self) -> bool:
        """Rows, or the tokens of a row, need more room than buffers have; :meth:`buffers` makes it."""
        return not self.fits(self.layers[0])

    def fits(self, layer: Layer) -> bool:
        """The buffers of ``layer`` have room for what passes may ask for; otherwise its next write makes room."""
        return layer.keys.shape[0] >= self.row_capacity and layer.keys.shape[2] >= self.capacity

    def place(self, about: Any, layer_idx: int = 0) -> int:
        """Set in a pass of the kernels where a layer's slots are; the offset of the pass's first row, in values."""
        keys = self.layers[layer_idx].keys
        about.row_stride, about.head_stride, about.table = keys.stride(0), keys.stride(1), None
        about.positions = None if self.positions is None else self.positions.data_ptr()
        return self._window.first * keys.stride(0)

    def buffers(self, layer_idx: int, like: Tensor, heads: int, *sizes: int) -> tuple[Tensor, Tensor]:
        """The keys and values ``[rows of the pass, heads, capacity, size]`` of a layer, of one size or of one ``sizes`` each, in the dtype
        of ``like``; the pass writes at the window's slots and reads up to its width."""
        window, layer = self._window, self._layer(layer_idx, *(like.new_empty(0, heads, 0, size) for size in (sizes[0], sizes[-1])))
        return layer.keys[window.first : window.last], layer.values[window.first : window.last]

    # -- what the target asks between forward passes ----------------------------------------------------------------

    def open(self, lengths: Sequence[int]) -> None:
        """Append rows that hold ``lengths`` tokens already (0 for fresh rows)."""
        self.lengths.extend(lengths)
        self.spoiled = {row: slot for row, slot in self.spoiled.items() if row >= len(self.lengths)}
        if len(self.lengths) > self.row_capacity:
            self.row_capacity = max(len(self.lengths), 2 * self.row_capacity if self.layers else 1)

    def reserve(self, tokens: int) -> None:
        """Have room for ``tokens`` per row from the next write on."""
        self.capacity = max(self.capacity, _blocks(tokens))

    def enter(self, window: Window) -> None:
        """Set where the next forward pass reads and writes, growing the capacity if it must."""
        self.window, self.positions = window, None
        self._indices.clear()
        if window.width > self.capacity:
            self.reserve(max(window.width, 2 * self.capacity))

    def commit(self, path: Tensor | None, kept: Sequence[int]) -> None:
        """Keep the first ``kept[r]`` nodes of each row's ``path`` ``[R, D]`` (None: node order) of the tree after its tokens."""
        window = self._window
        if len(kept) != window.rows or not 0 <= min(kept) <= max(kept) <= window.before + window.nodes:
            raise ValueError(
                f"kept must say for each of {window.rows} rows how many of {window.before + window.nodes} nodes stay, got {kept}"
            )
        if path is not None and not (path.device.type == "cpu" and self._move_path(path.tolist(), kept, window.first)):
            self._gather_path(path[:, : max(kept)], window)
        for row, count in zip(range(window.first, window.last), kept):
            self.lengths[row] += count
        self.window = None

    def advance(self) -> None:
        """Keep the one token per row of the pass just made."""
        self.commit(None, [1] * len(self.lengths))

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget the tokens after the first ``lengths[r]`` of each row."""
        self.lengths[:] = lengths

    def compact(self, keep: Sequence[int]) -> None:
        """Drop every row not in ``keep`` (ascending physical indices), moving later rows forward."""
        for goal, source in enumerate(keep):
            length = self.lengths[source]
            if goal != source and length:  # a row that was opened and never written may lie beyond the buffers
                for layer in self.written:
                    layer.keys[goal, :, :length] = layer.keys[source, :, :length]
                    layer.values[goal, :, :length] = layer.values[source, :, :length]
        for row in range(len(keep), len(self.lengths)):
            self.spoiled.pop(row, None)
        self.lengths = [self.lengths[row] for row in keep]

    def wipe(self, rows: Sequence[int]) -> None:
        """Put zeros into all slots of ``rows``."""
        for layer in self.written:
            for store in (layer.keys, layer.values):
                store[[row for row in rows if row < len(store)]] = 0

    def share_no_more(self) -> None:
        """The weights have changed: later rows share nothing that is kept of others."""

    def spoil(self, rows: int, slot: int) -> None:
        """Rows after the live ones, up to ``rows``, are about to lose what they hold from ``slot`` on."""
        for row in range(len(self.lengths), rows):
            self.spoiled[row] = min(slot, self.spoiled.get(row, slot))

    @contextmanager
    def restored(self, rows: int, span: int) -> Iterator[None]:
        """Inside, anything may be written to the first ``span`` slots of the first ``rows`` rows; afterwards they are as they were."""
        stores = [store[:rows, :, :span] for layer in self.written for store in (layer.keys, layer.values)]
        before = [store.clone() for store in stores]
        try:
            yield
        finally:
            for store, kept in zip(stores, before):
                store.copy_(kept)

    def gather(self, sources: Sequence[int], lengths: Sequence[int], first: int) -> None:
        """Copy the first ``lengths[i]`` tokens of physical row ``sources[i]`` to row ``first + i``; sources are read first."""
        if all(source == first + i or not length for i, (source, length) in enumerate(zip(sources, lengths))):
            return
        longest = max(lengths)
        rows = first + len(sources)
        for layer in self.written:
            if layer.keys.shape[0] < rows:
                self._allocate(layer, layer.keys[:, :, :0], layer.values[:, :, :0])
            for store in (layer.keys, layer.values):
                store[first:rows, :, :longest] = store[list(sources), :, :longest]

    def forget(self) -> None:
        """Release every buffer and row; the next ones begin as small as the first."""
        self.layers, self.lengths, self.window = [], [], None
        self._viewed, self.scratch, self.spoiled = None, None, {}
        self.row_capacity, self.capacity = 1, self._least

    @property
    def bytes(self) -> int:
        """Memory held by keys and values."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.written)

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _window(self) -> Window:
        if self.window is None:
            raise RuntimeError("this cache serves passes made by a foredraft Target only; do not hand it to the model yourself")
        return self.window

    def _gather_path(self, path: Tensor, window: Window) -> None:
        """Bring the nodes of ``path`` ``[R, D]`` to the front of each row's tree."""
        starts = to_device(self.lengths[window.first : window.last], path.device)[:, None]
        source, goal = starts + path, starts + torch.arange(path.shape[1], device=path.device)
        rows = torch.arange(window.first, window.last, device=path.device)[:, None]
        for at, layers in self._places():
            moves: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
            for layer in layers:
                device = layer.keys.device
                if device not in moves:
                    moves[device] = [at(rows.to(device), slots.to(device)) for slots in (source, goal)]
                (of, out), (to, into) = moves[device]
                for store in (layer.keys, layer.values):
                    store[to, :, into] = store[of, :, out]

    def _move_path(self, path: Sequence[Sequence[int]], kept: Sequence[int], first: int) -> bool:
        """The same on a CPU: the first ``kept[r]`` nodes of each row, and only those that are not in their place. False if some buffers
        are elsewhere."""
        moves = [
            (row, place, node)
            for row, (nodes, count) in enumerate(zip(path, kept), first)
            for place, node in enumerate(nodes[:count])
            if node != place
        ]
        if not moves:
            return True
        movable = self._movable()
        for at, arrays in movable:
            goals, sources = ([at(row, self.lengths[row] + each[which]) for row, *each in moves] for which in (0, 1))
            if len(moves) <= FEW and all(node > place for _, place, node in moves):  # then none is overwritten before it was moved
                for goal, source in zip(goals, sources):
                    for store in arrays:
                        store[goal[0], :, goal[1]] = store[source[0], :, source[1]]
            else:
                (to, into), (of, out) = (([each[0] for each in some], [each[1] for each in some]) for some in (goals, sources))
                for store in arrays:
                    store[to, :, into] = store[of, :, out]
        return bool(movable)

    def _movable(self) -> list[Movable]:
        """For some layers together, where a slot of a row is in dimensions 0 and 2 of their buffers, and these as NumPy arrays of their
        bits, in which vectors are moved in a fraction of the time; none if a buffer is on another device."""
        if self._viewed is None:
            fits = all(
                store.device.type == "cpu" and store.element_size() in BITS
                for layer in self.written
                for store in (layer.keys, layer.values)
            )
            self._viewed = [(at, as_arrays(layers)) for at, layers in self._places() if layers] if fits else []
        return self._viewed

    def _places(self) -> list[tuple[Callable[[Any, Any], tuple[Any, Any]], Sequence[Layer]]]:
        """For some layers together, a function from a row and a slot, or tensors of them, to their indices in dimensions 0 and 2 of the
        buffers."""
        return [(lambda row, slot: (row, slot), self.written)]

    def _write_indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._indices:
            starts = to_device(self._window.starts, device)
            rows = torch.arange(len(self._window.starts), device=device)[:, None]
            self._indices[device] = rows, starts[:, None] + torch.arange(self._window.nodes, device=device)
        return self._indices[device]

    def _layer(self, index: int, keys: Tensor, values: Tensor) -> Layer:
        """The layer with room for such ``keys`` and ``values``, in the current capacity."""
        while len(self.layers) <= index:
            self.layers.append(Layer())
        layer = self.layers[index]
        if not self.fits(layer) or layer.keys.dtype != keys.dtype:
            self._allocate(layer, keys, values)
        return layer

    def _allocate(self, layer: Layer, keys: Tensor, values: Tensor) -> None:
        """Give ``layer`` zeroed buffers of the current capacity (garbage there could be NaN), keeping what it holds."""
        stores = []
        for old, new in ((layer.keys, keys), (layer.values, values)):
            shape = (self.row_capacity, new.shape[1], self.capacity, new.shape[3])
            try:
                store = torch.zeros(shape, dtype=new.dtype, device=new.device)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                raise self._no_room(keys, values) from error
            if len(old):
                store[: old.shape[0], :, : old.shape[2]] = old
            stores.append(store)
        layer.keys, layer.values = stores
        self.allocations, self._viewed = self.allocations + 1, None

    def _no_room(self, keys: Tensor, values: Tensor) -> CacheMemoryError:
        per_token = sum(each.shape[1] * each.shape[3] * each.element_size() for each in (keys, values))
        total = per_token * self.row_capacity * self.capacity
        return CacheMemoryError(
            f"the key-value cache needs {total / 2**20:,.0f} MiB per layer ({self.row_capacity} rows x {self.capacity} tokens, "
            f"{len(self.layers)} or more layers) and {keys.device} has no room for it; use a smaller batch, a shorter prompt "
            "or a smaller max_new_tokens"
        )


Movable = tuple[Callable[[Any, Any], tuple[Any, Any]], list[Any]]


def as_arrays(layers: Sequence[Layer]) -> list[Any]:
    """The buffers of ``layers`` as NumPy arrays of their bits."""
    return [store.view(BITS[store.element_size()]).numpy() for layer in layers for store in (layer.keys, layer.values)]


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK
