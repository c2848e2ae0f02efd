"""Passes of all rows at once over a :class:`~foredraft.models.cache.TreeCache`: how most models are served."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foredraft.backends.block_masks import spanned
from foredraft.backends.flex import Flex
from foredraft.backends.graphs import Graphs
from foredraft.backends.kernel_pass import Direct
from foredraft.device import to_device
from foredraft.models.alibi import alibi_from, uses_alibi
from foredraft.models.cache import TreeCache, Window
from foredraft.models.masks import MaskBuilder, layout
from foredraft.models.temperature import temperature_from, tuned_layers
from foredraft.tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foredraft.models.features import Features


class TreeExecution:
    """Forward passes over trees and chains, every row behind a prefix of its own length.

    Args:
        model: takes the cache, and a mask of four dimensions where it needs one.
        device: where its input ids go.
        context: positions the model knows; filler is kept inside.

    Attributes:
        flex: attention through FlexAttention, None for the model's own.
        graphs: passes that are replayed, None where all of them are made.
        features: hidden states that passes hand out, None for none; ``hidden`` are those of the last pass, ``[R, nodes, F * d]``, or
            ``[R, 1, F * d]`` where ``keep`` asked for one node per row and they are not wanted for the whole text.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, context: int | None):
        config = model.config.get_text_config()
        self.model, self.device, self.context = model, device, context
        self.cache = TreeCache()
        self.passes = 0
        self.flex: Flex | None = None
        self.graphs: Graphs | None = None
        self.features: Features | None = None
        self.hidden: Tensor | None = None
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._masks = MaskBuilder(config, config._attn_implementation, model.dtype)
        self._alibi = uses_alibi(model)
        self._tuned = tuned_layers(model)
        self._called: tuple[object, Direct | None] = (None, None)
        self._counting = torch.arange(1024, device=device)[None]

    def forward(self, tree: TokenTree, window: Window, *, tokens: Tensor | None = None, keep: Sequence[int] | None = None) -> Tensor:
        """``[R, nodes, V]`` logits of one pass over ``tokens`` (None: the tree's). ``keep`` asks for those of one node per row only,
        ``[R, 1, V]``."""
        self.passes += 1
        model_pass = partial(self._pass, tree, window, tokens, keep)
        if self.graphs is not None and keep is None:
            return self._replayed(tree, window, tree.tokens if tokens is None else tokens, model_pass)
        masked = not (tree.chain and window.uniform) or (window.nodes > 1 and window.starts[0] > 0)
        if self.flex is None or not masked:
            return model_pass()
        flex_pass = partial(self._pass, tree, spanned(window), tokens, keep, self.flex)
        within = self.context is None or window.width <= self.context  # filler beyond it stands where no path does
        return self.flex.run(tree, window, model_pass, flex_pass, timed=keep is None and within)

    def _replayed(self, tree: TokenTree, window: Window, tokens: Tensor, model_pass: Callable[[], Tensor]) -> Tensor:
        """One pass from a recording, where there is one."""
        assert self.graphs is not None

        def eager() -> tuple[Tensor, ...]:
            logits = model_pass()
            return (logits,) if self.hidden is None else (logits, self.hidden)

        logits, *hidden = self.graphs.run(tree, window, tokens, eager)
        self.hidden = hidden[0] if hidden else None
        return logits

    def _pass(self, tree: TokenTree, window: Window, tokens: Tensor | None, keep: Sequence[int] | None, flex: Flex | None = None) -> Tensor:
        """One pass, through the model's own attention or through ``flex``."""
        self.cache.enter(window)
        if flex is None and (direct := self.direct) is not None:
            given = tree.tokens if tokens is None else tokens
            logits, self.hidden = direct(given, window, self.cache, self.context, self._masked(tree, window), keep, self.features)
            return logits
        arguments: dict[str, Any] = {}
        last_only = keep is not None and all(node == tree.nodes - 1 for node in keep)
        positions = self._positions(tree, window)
        if self._takes_positions:
            arguments["position_ids"] = positions[:, -window.nodes :]
        with ExitStack() as overrides:
            if flex is not None:
                arguments["attention_mask"] = flex.masks(tree, window, positions, self.cache)
                overrides.enter_context(flex.in_use())
                if not (tree.chain and window.uniform):
                    overrides.enter_context(self._temperature(positions[:, -window.nodes :], window))
            elif not (tree.chain and window.uniform):
                where = layout(tree, window, positions)
                arguments["attention_mask"] = self._masks(where, self.cache)
                overrides.enter_context(self._temperature(where.queries, window))
                if self._alibi:
                    overrides.enter_context(alibi_from(self.model, where.keys))
            elif not self._alibi and (mask := self._masks.for_chain(window, self.device)) is not None:
                arguments["attention_mask"] = mask
            if keep is not None and self._takes_logits_to_keep:
                arguments["logits_to_keep"] = 1 if last_only else torch.tensor(sorted(set(keep)), device=self.device)
            caught = None if self.features is None else overrides.enter_context(self.features.catching())
            logits = self.model(
                input_ids=tree.tokens if tokens is None else tokens, past_key_values=self.cache, use_cache=True, **arguments
            ).logits
        if caught is not None:
            self.hidden = caught.hidden(None if caught.features.whole else keep)
        if keep is None:
            return logits
        return logits[:, -1:] if last_only else self._pick(logits, keep)

    @property
    def ragged(self) -> bool:
        """Rows pay for their own nodes of a chain."""
        return self.direct is not None

    @property
    def direct(self) -> Direct | None:
        """The model in one call, where its weights are laid out for that and nobody watches."""
        decoder = vars(getattr(self.model, "model", self.model)).get("forward")
        if decoder is None:
            return None
        if decoder is not self._called[0]:
            self._called = decoder, Direct.of(self.model)
        direct = self._called[1]
        return direct if direct is not None and direct.ready else None

    def _masked(self, tree: TokenTree, window: Window) -> tuple[Tensor, Tensor] | None:
        """Positions of the nodes of this pass, and their mask; None for a chain, where slots say both."""
        if tree.chain:
            return None
        where = layout(tree, window, self._positions(tree, window))
        mask = self._masks(where, self.cache)
        return where.queries, mask if isinstance(mask, Tensor) else mask["full_attention"]

    def _temperature(self, queries: Tensor, window: Window) -> AbstractContextManager[None]:
        """For one pass, temperatures that the model would derive from slots come from positions ``queries`` ``[R, N]``."""
        # up to the first floor scale every position has the same temperature, by slots as well
        tuned = [layer for layer in self._tuned if window.width >= layer.floor_scale]
        return temperature_from(tuned, queries) if tuned else nullcontext()

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
        elif window.uniform:
            positions = tree.depths + (window.starts[0] - window.before)
        else:
            positions = to_device(window.starts, self.device)[:, None] - window.before + tree.depths
        if self.context is not None and window.width > self.context:
            positions = positions.clamp(max=self.context - 1)
        return positions
