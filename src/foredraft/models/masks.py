"""Attention masks for rows with offsets of their own and for trees, out of transformers' own mask functions.

transformers builds a mask by evaluating a ``mask_function(batch, head, query, key)`` over slot indices. Here the same
function is evaluated over *positions* (a node's position is its row's start plus its depth) and intersected with
visibility: the committed prefix, and a node's own ancestors. Causal, sliding and chunked attention therefore need no
code of ours, and no window size is known here.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import create_masks_for_generate

from foredraft.device import to_device
from foredraft.models.cache import TreeCache, Window
from foredraft.tree import TokenTree

NAME = "foredraft_positions"
CHAIN = 64  # longest chain whose mask is cut out of the band


@dataclass(frozen=True, eq=False)
class MaskInputs:
    """The positions of queries and keys in one pass over ``tree``, with ``positions`` ``[R, nodes]`` of all its nodes.

    Queries are the nodes from ``window.before`` on; keys are the prefix and every node so far.
    """

    tree: TokenTree
    window: Window
    positions: Tensor

    @property
    def queries(self) -> Tensor:
        """``[R, N]`` positions."""
        return self.positions[:, self.window.before :]

    @cached_property
    def keys(self) -> Tensor:
        """``[R, W]`` positions."""
        slots, starts, node = self._slots
        return torch.where(slots < starts, slots, self.positions.gather(1, node))

    @cached_property
    def visible(self) -> Tensor:
        """``[R, N, W]`` bool: the prefix, and a node's ancestors and itself."""
        tree, window = self.tree, self.window
        ancestors = tree.ancestors[:, window.before :]
        if ancestors.device.type == "cpu" == self.positions.device.type:
            return seen_on_host(ancestors, window, tree.nodes)
        slots, starts, node = self._slots
        in_tree = (slots >= starts) & (slots < starts + tree.nodes)
        ancestry = ancestors.gather(2, node[:, None].expand(-1, window.nodes, -1))  # [R, N, W]
        return (slots < starts)[:, None] | (in_tree[:, None] & ancestry)

    @cached_property
    def _slots(self) -> tuple[Tensor, Tensor, Tensor]:
        """Slots ``[1, W]``, where each row's tree starts ``[R, 1]``, and the node that a slot would hold ``[R, W]``."""
        device = self.positions.device
        starts = to_device(self.window.starts, device)[:, None] - self.window.before
        slots = torch.arange(self.window.width, device=device)[None]
        return slots, starts, (slots - starts).clamp(0, self.tree.nodes - 1)


@dataclass(frozen=True, eq=False)
class KnownMaskInputs:
    """The same as tensors that are known already: positions of ``queries`` ``[R, N]`` and ``keys`` ``[R, W]``, and what is ``visible``
    ``[R, N, W]``."""

    queries: Tensor
    keys: Tensor
    visible: Tensor


def seen_on_host(ancestors: Tensor, window: Window, nodes: int) -> Tensor:
    """:attr:`MaskInputs.visible` for ``ancestors`` ``[R, N, nodes]`` of the queries, by slices: on a CPU calls cost more than work."""
    seen = np.ones((window.rows, window.nodes, window.width), dtype=np.bool_)
    for row, start, within in zip(seen, window.starts, ancestors.numpy()):
        start -= window.before
        row[:, start : start + nodes] = within
        row[:, start + nodes :] = False
    return torch.from_numpy(seen)


def mask_in_positions(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: Any, config: PreTrainedConfig, **unused: Any
) -> Tensor:
    """A mask builder in transformers' interface: ``[R, 1, N, W]`` bool from the :class:`MaskInputs` that ``config`` carries."""
    where: MaskInputs | KnownMaskInputs = config.foredraft_mask_inputs
    device = where.queries.device
    rows = torch.arange(where.queries.shape[0], device=device)[:, None, None, None]
    heads = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    allowed = mask_function(rows, heads, where.queries[:, None, :, None], where.keys[:, None, None, :])
    return allowed & where.visible[:, None]


AttentionMaskInterface.register(NAME, mask_in_positions)


class MaskBuilder:
    """Builds what a model takes as ``attention_mask``: a tensor, or one per layer type where its config lists several types.

    With one type, every model takes a tensor, also one that reads no layer types though its config lists them.

    ``builder`` names who makes each of them, in transformers' ``AttentionMaskInterface``.
    """

    def __init__(self, config: PreTrainedConfig, implementation: str, dtype: torch.dtype, *, builder: str = NAME):
        self.config = copy.copy(config)
        self.config.__dict__["_attn_implementation_internal"] = builder
        self.additive = implementation == "eager"
        self.dtype = dtype
        kinds = getattr(config, "layer_types", None)
        windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
        self.full = set(kinds) == {"full_attention"} if kinds else windows == [None, None]
        self._keyed = len(set(kinds or ())) > 1
        self._causal = bool(getattr(config, "is_causal", True))
        self._band: Tensor | None = None  # [CHAIN, 2 capacity]

    def __call__(self, where: Any, cache: TreeCache) -> Any:
        """The mask for ``where``, which has the positions of a pass's ``queries`` ``[R, N]`` and what else ``builder`` reads."""
        known = isinstance(where, (MaskInputs, KnownMaskInputs))
        if self.full and self._causal and known:  # a node sees no later position, so causality hides nothing more
            return self._finish(where.visible[:, None])
        self.config.__dict__["foredraft_mask_inputs"] = where
        embeds = torch.empty(*where.queries.shape, 0, dtype=self.dtype, device=where.queries.device)
        masks = create_masks_for_generate(self.config, embeds, None, cache, where.queries)
        del self.config.__dict__["foredraft_mask_inputs"]
        if not isinstance(masks, dict):
            return self._finish(masks)
        finished = {kind: self._finish(mask) for kind, mask in masks.items()}
        return finished if self._keyed else next(iter(finished.values()))

    def for_chain(self, window: Window, device: torch.device) -> Tensor | None:
        """The mask of a short chain after prefixes of one length, cut out of a band made once; None if the model has to
        build its own (windows, long chains) or needs none (a single token, an empty cache)."""
        start, nodes = window.starts[0], window.nodes
        if not self.full or not 1 < nodes <= CHAIN or start == 0:
            return None
        if self._band is None or 2 * window.width > self._band.shape[1] or self._band.device != device:
            capacity = 2 * window.width
            slots = torch.arange(2 * capacity, device=device)
            self._band = self._finish(slots <= capacity + torch.arange(CHAIN, device=device)[:, None])
        middle = self._band.shape[1] // 2  # query i sees up to slot middle + i here, and up to start + i in the cache
        return self._band[:nodes, middle - start : middle + nodes].expand(window.rows, 1, nodes, window.width)

    def _finish(self, mask: Tensor) -> Tensor:
        """sdpa takes the bool mask; eager adds to the scores, where a bool mask would be silently wrong."""
        if not self.additive:
            return mask
        return torch.where(mask, torch.zeros((), dtype=self.dtype, device=mask.device), torch.finfo(self.dtype).min)
