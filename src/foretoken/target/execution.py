"""Passes of all rows at once over a :class:`~foretoken.target.cache.TreeCache`: how most models are served."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.target.alibi import alibi_from, uses_alibi
from foretoken.target.cache import TreeCache, Window
from foretoken.target.masks import Layout, MaskBuilder, layout
from foretoken.target.temperature import temperature_from, tuned_layers
from foretoken.tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TreeExecution:
    """Forward passes over trees and chains, every row behind a prefix of its own length.

    Args:
        model: takes the cache, and a mask of four dimensions where it needs one.
        device: where its input ids go.
        context: positions the model knows; filler is kept inside.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, context: int | None):
        config = model.config.get_text_config()
        self.model, self.device, self.context = model, device, context
        self.cache = TreeCache()
        self.passes = 0
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._masks = MaskBuilder(config, config._attn_implementation, model.dtype)
        self._alibi = uses_alibi(model)
        self._tuned = tuned_layers(model)
        self._counting = torch.arange(1024, device=device)[None]

    def forward(self, tree: TokenTree, window: Window, *, tokens: Tensor | None = None, keep: Sequence[int] | None = None) -> Tensor:
        """``[R, nodes, V]`` logits of one pass over ``tokens`` (None: the tree's). ``keep`` asks for those of one node per row only,
        ``[R, 1, V]``."""
        self.cache.enter(window)
        arguments: dict[str, Any] = {}
        overrides: AbstractContextManager[None] = nullcontext()
        last_only = keep is not None and all(node == tree.nodes - 1 for node in keep)
        positions = self._positions(tree, window)
        if self._takes_positions:
            arguments["position_ids"] = positions[:, -window.nodes :]
        if not (tree.chain and window.uniform):
            where = layout(tree, window, positions)
            arguments["attention_mask"] = self._masks(where, self.cache)
            overrides = self._from_positions(where)
        elif not self._alibi and (mask := self._masks.for_chain(window, self.device)) is not None:
            arguments["attention_mask"] = mask
        if keep is not None and self._takes_logits_to_keep:
            arguments["logits_to_keep"] = 1 if last_only else torch.tensor(sorted(set(keep)), device=self.device)
        self.passes += 1
        with overrides:
            logits: Tensor = self.model(
                input_ids=tree.tokens if tokens is None else tokens, past_key_values=self.cache, use_cache=True, **arguments
            ).logits
        if keep is None:
            return logits
        return logits[:, -1:] if last_only else self._pick(logits, keep)

    @contextmanager
    def _from_positions(self, where: Layout) -> Iterator[None]:
        """For one pass, whatever the model would derive from slots comes from positions."""
        alibi = alibi_from(self.model, where.keys) if self._alibi else nullcontext()
        # up to the first floor scale every position has the same temperature, by slots as well
        tuned = [layer for layer in self._tuned if where.keys.shape[1] >= layer.floor_scale]
        temperature = temperature_from(tuned, where.queries) if tuned else nullcontext()
        with alibi, temperature:
            yield

    def _pick(self, logits: Tensor, keep: Sequence[int]) -> Tensor:
        """``[R, 1, V]`` of ``logits`` at node ``keep[r]``, whether the model kept all nodes or the wanted ones only."""
        kept = sorted(set(keep)) if self._takes_logits_to_keep else list(range(logits.shape[1]))
        index = torch.tensor([kept.index(node) for node in keep], device=logits.device)
        return logits[torch.arange(len(keep), device=logits.device), index][:, None]

    def _positions(self, tree: TokenTree, window: Window) -> Tensor:
        """``[R, N]`` positions of the tree's nodes (of a uniform chain those of this pass only), filler kept inside the context
        so that learned position tables are not overrun."""
        if tree.chain and window.uniform:
            start = window.starts[0]
            if start + window.nodes > self._counting.shape[1]:
                self._counting = torch.arange(2 * (start + window.nodes), device=self.device)[None]
            positions = self._counting.narrow(1, start, window.nodes)
            if tree.rows > 1:
                positions = positions.expand(tree.rows, -1)
        else:
            positions = torch.tensor(window.starts, device=self.device)[:, None] - window.before + tree.depths
        if self.context is not None and window.width > self.context:
            positions = positions.clamp(max=self.context - 1)
        return positions
