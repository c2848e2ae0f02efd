"""EAGLE-3 as the drafter (Li et al. 2025): one layer that reads hidden states of the target and feeds on its own from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foredraft.device import to_device
from foredraft.drafters.base import DraftRequest, Row
from foredraft.drafters.draft_loops.eagle3 import Eagle3Growth, Eagle3Step
from foredraft.drafters.draft_loops.kernels import greedy, grow_by
from foredraft.drafters.features import FeatureDrafter
from foredraft.drafters.growth import Expand, Growth
from foredraft.drafters.heads import HeadDrafter
from foredraft.errors import ConfigurationError
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.eagle3_layer import Layer
from foredraft.models.cache import TreeCache, Window
from foredraft.models.masks import MaskInputs
from foredraft.models.page_stores import Kind
from foredraft.models.paged_cache import PagedCache
from foredraft.models.pages import PAGE
from foredraft.target import Target
from foredraft.tree import TokenTree

FEW = 16  # tokens per row that a kernel reads whole, though only the last one of each row is asked about


class Eagle3(FeatureDrafter):
    __doc__ = HeadDrafter.__doc__
    name = kind = "eagle3"
    summary = "a one-layer decoder over the target's hidden states, run autoregressively; chains and trees"

    _layer: Layer | None = None
    _kernel: Eagle3Growth | None = None  # for whole drafts of greedy rows
    _step: Eagle3Step | None = None

    @property
    def layer(self) -> Layer:
        """The head's weights as they were when it was bound, in the target's dtype and on its device."""
        if self._layer is None:
            raise ConfigurationError("this eagle3 head is not bound to a Speculator yet; pass it as Speculator(..., drafter=...)")
        return self._layer

    def bind(self, target: Target) -> None:
        head = self._found(target)
        assert isinstance(head, Eagle3Head)
        head.attach(target.model)
        self._prepare_to_learn(head, target)
        self._target, self._head, self.info = target, head, replace(self.info, head=head, features=head.features)
        self._at = target.device, target.model.dtype
        self._packs = bool(target.backend.hints)
        self._lay_out()
        self._clear()
        target.read(head.features, whole=True, companion=self)

    @torch.inference_mode()
    def _lay_out(self) -> None:
        """Make what drafts of the head's weights."""
        head: Eagle3Head = self.head
        layer = head.layer().to(*self._at)
        if self.quantization is not None:
            layer = layer.quantized(self.quantization)
        self._layer = layer.packed() if self._packs else layer
        self._kernel, self._step = Eagle3Growth.of(self._layer), Eagle3Step.of(self._layer)

    def rewrite(self, weights: Mapping[str, Tensor]) -> None:
        super().rewrite(weights)
        self._lay_out()
        self._texts.share_no_more(self._cache)

    @property
    def page_bytes(self) -> int:
        config, paged = self.head.config, isinstance(self._target.cache, PagedCache)
        return 2 * PAGE * config.num_key_value_heads * config.head_dim * self._at[1].itemsize if paged else 0

    def _fresh_cache(self) -> TreeCache:
        return PagedCache([Kind(self.page_bytes)]) if isinstance(self._target.cache, PagedCache) else TreeCache()

    def _fill(self, tokens: Tensor, features: Tensor, window: Window) -> None:
        self.layer.rotary.reserve(window.width)
        keys, values = self.layer.keys_values(tokens, self.layer.fused(features), slice(window.starts[0], window.width))
        self._write(keys, values, window)

    # -- a round --------------------------------------------------------------------------------------------------------------

    def _by_kernel(self, request: DraftRequest) -> Growth | None:
        kernel, features = self._kernel, self._rows[0].features
        if kernel is None or not greedy(request):
            return None
        kernel.cache, kernel.features = self._cache, features[0] if len(features) == 1 else torch.cat(features)
        grown = grow_by(kernel, request)
        if grown is not None:
            self._rows[0].taken()
        return grown

    def _expand(self, request: DraftRequest) -> Expand:
        def expand(tree: TokenTree, first: int) -> Tensor:
            states, normed = self.layer.read(self._root(request.rows) if first == 0 else self._level(tree, first))
            self._states = states if first == 0 else torch.cat([self._states, states], 1)
            return self.layer.full_logits(normed)

        return expand

    def _root(self, rows: Sequence[Row]) -> Tensor:
        """``[R, 1, d]`` after the last step of each row's text; first, keys and values of what was committed since the last draft."""
        steps = self._missed(rows)
        counts, window, device = steps.counts, steps.window, steps.features.device
        self.layer.rotary.reserve(window.width)
        positions = self._positions(window.starts, window.nodes, device)
        if self._step is not None and (steps.even or window.nodes <= FEW):
            states = self._step(steps.tokens, self.layer.fused(steps.features), positions, window, self._cache, None)
            self._cache.commit(None, counts)
            return steps.last(states)
        entered = self.layer.enter(steps.tokens, self.layer.fused(steps.features), positions)
        keys, values = self._write(entered.keys, entered.values, window)
        self._cache.commit(None, counts)
        ends, mask = [begin + 1 for begin in self._begins], None
        span = max(ends)
        if min(ends) < span:
            mask = (torch.arange(span, device=device) < to_device(ends, device)[:, None])[:, None, None]
        attention = attended(steps.last(entered.queries), keys[:, :, :span], values[:, :, :span], mask)
        return self.layer.leave(steps.last(entered.residual), attention)

    @staticmethod
    def _positions(begins: Sequence[int], count: int, device: torch.device) -> Tensor | slice:
        if min(begins) == max(begins):
            return slice(begins[0], begins[0] + count)
        return to_device(list(begins), device)[:, None] + torch.arange(count, device=device)

    def _level(self, tree: TokenTree, first: int) -> Tensor:
        """``[R, n, d]`` after the nodes ``first``.. of a draft, each fed the state that the step of its parent left."""
        begins, count = self._begins, tree.nodes - first
        self.layer.rotary.reserve(max(begins) + tree.nodes)
        states, window = self._above(tree, first)
        if tree.chain:
            positions = self._positions(window.starts, count, tree.tokens.device)
        else:
            positions = tree.depths[:, first:] + to_device(begins, tree.tokens.device)[:, None]
        simple = tree.chain and (self._step is not None or (count == 1 and window.uniform))  # then all that is there is seen
        mask = None if simple else MaskInputs(tree, window, tree.depths).visible[:, None]
        if self._step is not None:
            return self._step(tree.tokens[:, first:], states, positions, window, self._cache, mask)
        entered = self.layer.enter(tree.tokens[:, first:], states, positions)
        keys, values = self._write(entered.keys, entered.values, window)
        return self.layer.leave(entered.residual, attended(entered.queries, keys, values, mask))

    def _write(self, keys: Tensor, values: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        """Put ``keys`` and ``values`` ``[R, n, K, h]`` into the cache; what is there up to the window's end, ``[R, K, span, h]``."""
        self._cache.enter(window)
        return self._cache.update(keys.transpose(1, 2), values.transpose(1, 2), 0)


def attended(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """``[R, n, H * h]``: what ``queries`` ``[R, n, H, h]`` see of ``keys`` and ``values`` ``[R, K, span, h]`` under ``mask``
    ``[R, 1, n, span]``; all of them without one. The heads that share keys become queries of one head."""
    rows, count, heads, size = queries.shape
    groups, span = keys.shape[1:3]
    shared = heads // groups
    grouped = queries.view(rows, count, groups, shared, size).permute(0, 2, 3, 1, 4).reshape(rows, groups, shared * count, size)
    if mask is not None and shared > 1:
        mask = mask[:, :, None].expand(rows, 1, shared, count, span).reshape(rows, 1, shared * count, span)
    seen = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return seen.view(rows, groups, shared, count, size).permute(0, 3, 1, 2, 4).reshape(rows, count, heads * size)
