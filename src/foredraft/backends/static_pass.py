"""A forward pass that is a function of tensors alone, so that it can be recorded once and played again.

All that changes from pass to pass is in tensors: the tokens, the slots of the trees' roots, the number of earlier nodes, the depths and
the ancestors of the nodes. Positions, masks and the slots that keys are written to are derived from them inside the pass, for a fixed
span of slots. The cache's own buffers are read and written in place. Where they are pages, the rows' tables are tensors too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from foredraft.backends.base import PassOutput
from foredraft.backends.eager import ModelCall
from foredraft.device import to_device
from foredraft.models.cache import TreeCache, Window
from foredraft.models.features import Features
from foredraft.models.masks import KnownMaskInputs
from foredraft.models.page_stores import PageStore, gathered, put
from foredraft.models.paged_cache import PagedCache
from foredraft.models.pages import PAGE
from foredraft.models.support import ModelFacts
from foredraft.tree import TokenTree


class StaticPass:
    """Passes of one model over slots of its cache.

    Args:
        facts, cache: as a backend has them.

    Attributes:
        features: hidden states that passes return, None for none.
    """

    def __init__(self, facts: ModelFacts, cache: TreeCache):
        self.facts, self.cache = facts, cache
        self.call = ModelCall(facts)
        self.features: Features | None = None

    def __call__(
        self,
        tokens: Tensor,
        roots: Tensor,
        first: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        span: int,
        tables: Mapping[PageStore, Tensor] = MappingProxyType({}),
    ) -> PassOutput:
        """Logits ``[R, N, V]`` after ``tokens`` ``[R, N]``, rows 0 to R of the cache; their keys are written.

        Args:
            roots: ``[R]`` slots of the trees' roots, which are the numbers of tokens before them.
            first: ``[R]`` or ``[1]`` numbers of the first node of this pass; what is before it was written by earlier passes.
            depths: ``[R or 1, T]`` of all nodes so far and more.
            ancestors: ``[R or 1, N, T]`` bool, of the nodes of this pass; every node is its own.
            span: slots that keys are read from; every slot that is written lies inside.
            tables: of a cache in pages, by kind of layer: ``[R, span / PAGE]`` the pages of each row.
        """
        (rows, nodes), total = tokens.shape, depths.shape[1]
        root = roots[:, None]
        own = (first[:, None] + torch.arange(nodes, device=tokens.device)).expand(rows, nodes)  # their numbers in the tree
        positions = root + depths
        if self.facts.context is not None:
            positions = positions.clamp(max=self.facts.context - 1)  # filler, so that learned position tables are not overrun
        slots = torch.arange(span, device=tokens.device)[None]
        node = slots - root  # [R, W] that a slot would hold
        inside = node.clamp(0, total - 1)
        ancestry = ancestors.expand(rows, nodes, total).gather(2, inside[:, None].expand(rows, nodes, span))
        where = KnownMaskInputs(
            positions.gather(1, own),
            torch.where(node < 0, slots, positions.gather(1, inside)),
            (node < 0)[:, None] | ((node < total)[:, None] & ancestry),
        )
        view = SlotCache(self.cache, root + own, span, roots[0], tables)
        mask = self.call.masks(where, view)
        return self.call(tokens, view, where.queries, mask, where=where, width=span, features=self.features)

    def tables(self, rows: int, span: int, device: torch.device) -> dict[PageStore, Tensor]:
        """Static ``tables`` of a pass over so many rows; none if the cache has no pages."""
        stores = self.cache.stores if isinstance(self.cache, PagedCache) else []
        return {store: torch.zeros(rows, span // PAGE, dtype=torch.long, device=device) for store in stores}


class SlotCache(TreeCache):
    """The buffers of ``cache`` for one pass that writes at ``slots`` ``[R, N]`` and reads ``span`` of them, by ``tables`` in pages.

    Nothing here depends on a number that the host knows: a model that asks for a length is given a tensor, and one that needs it on the
    host fails while it is recorded.
    """

    def __init__(self, cache: TreeCache, slots: Tensor, span: int, start: Tensor, tables: Mapping[PageStore, Tensor]):
        super().__init__()
        self.layers = cache.layers
        self._slots, self._span, self._start = slots, span, start
        self._rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        self._pages = {store: (table.gather(1, slots // PAGE), slots % PAGE, table) for store, table in tables.items()}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._start  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._span, 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As :meth:`TreeCache.update`."""
        layer = self.layers[layer_idx]
        if layer.keys.dtype != key_states.dtype:
            raise RuntimeError(f"layer {layer_idx} writes {key_states.dtype} to a buffer in {layer.keys.dtype}")
        keys, values, places = self.written_at(layer_idx)
        if len(places) > 1:
            pages, slots, table = places
            put(keys, key_states, pages, slots)
            put(values, value_states, pages, slots)
            return gathered(keys, table), gathered(values, table)
        keys[self._rows, :, self._slots] = key_states.transpose(1, 2)
        values[self._rows, :, self._slots] = value_states.transpose(1, 2)
        return keys[:, :, : self._span], values[:, :, : self._span]

    def written_at(self, layer_idx: int) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The keys and values of a layer, and where the pass writes: ``[R, heads, capacity, head size]`` and the slots ``[R, N]``; or all
        pages, and the page and the slot of each node ``[R, N]`` and the table of the rows."""
        layer, rows = self.layers[layer_idx], len(self._slots)
        for store, places in self._pages.items():
            if layer in store.layers:
                return layer.keys, layer.values, places
        if len(layer.keys) < rows or layer.keys.shape[2] < self._span:
            raise RuntimeError(f"layer {layer_idx} writes to a buffer that earlier passes did not allocate")
        return layer.keys[:rows], layer.values[:rows], (self._slots,)


@dataclass(frozen=True)
class Bucket:
    """What a recorded pass is made for: rows, nodes of the pass, nodes of the tree so far, slots that are read."""

    rows: int
    nodes: int
    total: int
    span: int


class PassFrame:
    """The static inputs of the passes of one bucket, and the pass over them.

    Filler rows are at the end of the span, and overwrite what finished rows left there; filler nodes follow the tree. In a cache in
    pages, both go to the page that no row holds, apart from filler nodes on a page that a row's last nodes are on.
    Both see themselves, so that they write no NaN.
    """

    def __init__(self, passes: StaticPass, bucket: Bucket, device: torch.device):
        rows, nodes, total = bucket.rows, bucket.nodes, bucket.total
        self.passes, self.bucket = passes, bucket
        self.tokens = torch.zeros(rows, nodes, dtype=torch.long, device=device)
        self.places = torch.zeros(2, rows, dtype=torch.long, device=device)  # of the roots, and of the first node in the tree
        self.depths = torch.zeros(rows, total, dtype=torch.long, device=device)
        self.ancestors = torch.zeros(rows, nodes, total, dtype=torch.bool, device=device)
        self._itself = torch.eye(total, dtype=torch.bool, device=device)
        self.tables = passes.tables(rows, bucket.span, device)
        self._form: object = None
        self._loaded = (rows, nodes)

    def load(self, tree: TokenTree, window: Window, tokens: Tensor) -> None:
        """Copy the inputs of the pass over ``tokens`` ``[r, n]``, the newest nodes of ``tree``, to where the recorded pass finds them."""
        self._loaded = window.rows, window.nodes
        filler = self.bucket.rows - window.rows
        roots = [start - window.before for start in window.starts] + [self.bucket.span - self.bucket.total] * filler
        upload(self.places, [roots, [window.before] * self.bucket.rows])
        for store, table in self.tables.items():
            upload(table, store.until([start + window.nodes for start in window.starts], *table.shape))
        self.tokens[: window.rows, : window.nodes].copy_(tokens)
        known = "chain" if tree.chain else tree.static_parents
        form = None if known is None else (known, window.rows, window.nodes, window.before)
        if form is None or form != self._form:
            self._shape(tree, window)
            self._form = form

    def run(self) -> tuple[Tensor, ...]:
        """``[R, N, V]`` logits of the bucket, and the hidden states ``[R, N, F * d]`` where some are wanted."""
        output = self.passes(self.tokens, self.places[0], self.places[1], self.depths, self.ancestors, self.bucket.span, self.tables)
        return (output.logits,) if output.hidden is None else (output.logits, output.hidden)

    def cut(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The part of the bucket's ``outputs`` that belongs to the pass that was loaded."""
        rows, nodes = self._loaded
        return tuple(each[:rows, :nodes] for each in outputs)

    def _shape(self, tree: TokenTree, window: Window) -> None:
        before, nodes, total = window.before, self.bucket.nodes, window.before + window.nodes
        self.depths.zero_()
        self.depths[: window.rows, :total].copy_(tree.depths)
        self.ancestors.copy_(self._itself[before : before + nodes])
        self.ancestors[: window.rows, : window.nodes, :total].copy_(tree.ancestors[:, before:])


def upload(goal: Tensor, values: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> None:
    """Copy host integers into ``goal`` without waiting for the device: pinned memory is kept until the copy is made."""
    goal.copy_(to_device(values, goal.device), non_blocking=True)
