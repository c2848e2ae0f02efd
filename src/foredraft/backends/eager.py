"""Passes of all rows at once over a :class:`~foredraft.models.cache.TreeCache`: how most models are served.

The model is called as it is, with whatever its layers were replaced by. If its decoder is one call of a kernel, the classes around that
are bypassed.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Hashable, Sequence
from contextlib import ExitStack, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from foredraft.backends.base import Backend, ForwardPass, Overrides, Part, PassOutput, Routing
from foredraft.backends.kernel_pass import Direct
from foredraft.backends.native_growth import Draws, NativeGrowth
from foredraft.device import spread, to_device
from foredraft.models.cache import TreeCache, Window
from foredraft.models.cache_names import cache_argument
from foredraft.models.encoder_decoder import Decoder, Source
from foredraft.models.features import Features, picked
from foredraft.models.layers import LayerRanges
from foredraft.models.masks import KnownMaskInputs, MaskBuilder, MaskInputs
from foredraft.models.paged_cache import PagedCache
from foredraft.models.positions import alibi_from, temperature_from, tuned_layers, uses_alibi
from foredraft.models.skips import Sublayers
from foredraft.models.source_runs import Encoded, SourcedCache, new_cache
from foredraft.models.support import ModelFacts
from foredraft.tree import TokenTree


class ModelCall:
    """Calls of one model, with overrides where it would compute positions from cache slots.

    Attributes:
        decoder: adapts a model with an encoder to these calls; None for other models.
    """

    def __init__(self, facts: ModelFacts):
        self.model = model = facts.model
        config = model.config.get_text_config()
        parameters = inspect.signature(model.forward).parameters
        self.decoder = Decoder(model, facts.context) if facts.sourced else None
        self._called: Any = self.decoder or model
        self._cache_arguments = {each: cache_argument(type(each)) for each in (model, model.base_model)}
        self.masks = MaskBuilder(config, config._attn_implementation, model.dtype)
        self.uses_alibi = uses_alibi(model)
        self.tuned = tuned_layers(model)
        self._takes_positions = "position_ids" in parameters if self.decoder is None else self.decoder.takes_positions
        self._takes_logits_to_keep = "logits_to_keep" in parameters

    @cached_property
    def ranges(self) -> LayerRanges:
        """Parts of the model's layers.

        Raises:
            UnsupportedModelError: they cannot be run in part.
        """
        return LayerRanges(self.model)

    @cached_property
    def sublayers(self) -> Sublayers:
        """The sublayers of these that can be left out.

        Raises:
            UnsupportedModelError: nothing can.
        """
        return Sublayers(self.model, self.ranges)

    def __call__(
        self,
        tokens: Tensor,
        cache: TreeCache,
        positions: Tensor,
        mask: Any,
        *,
        where: MaskInputs | KnownMaskInputs | None,
        width: int,
        keep: Sequence[int] | None = None,
        prompts: Sequence[int] | None = None,
        features: Features | None = None,
        part: Part | None = None,
    ) -> PassOutput:
        """One call over ``tokens`` ``[R, N]`` at ``positions`` ``[R, N]``.

        Args:
            mask: in the model's own form, None if it builds its own.
            where: what the mask was made from; None if slots are positions.
            width: slots that the keys span.
            keep, prompts, part: as in :class:`~foredraft.backends.base.ForwardPass`.
            features: as in :class:`~foredraft.backends.base.Backend`.
        """
        arguments: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
        if self._takes_positions:
            arguments["position_ids"] = positions
        if keep is not None and self._takes_logits_to_keep:
            # With a number, Gemma 4 has its last layers compute the last token alone, which attention over pages does not take.
            paged = "foredraft_pages" in vars(self.model.config.get_text_config())
            last_only = all(node == tokens.shape[1] - 1 for node in keep) and not paged
            kept = sorted(set(keep))  # of a model on several devices a list: accelerate would move a tensor to the first one
            arguments["logits_to_keep"] = 1 if last_only else kept if spread(self.model) else to_device(kept, tokens.device)
        if self.decoder is not None and isinstance(cache, SourcedCache):
            self.decoder.enter(cache)
        with ExitStack() as overrides:
            # below ``floor_scale``, all positions have one temperature, so slots do as well
            if where is not None and (tuned := [layer for layer in self.tuned if width >= layer.floor_scale]):
                overrides.enter_context(temperature_from(tuned, positions))
            if where is not None and self.uses_alibi:
                overrides.enter_context(alibi_from(self.model, where.keys))
            if part is not None:
                only = self.ranges.only(part.begin, part.end, part.states) if part.skip is None else self.sublayers.left_out(part.skip)
                passing = overrides.enter_context(only)
                called = self.model if part.logits else self.model.base_model
                output = called(input_ids=tokens, use_cache=True, **arguments, **{self._cache_arguments[called]: cache})
                return PassOutput(output.logits if part.logits else output[0], passing.found)
            if self.decoder is not None:
                seen = None if where is None else where.keys
                overrides.enter_context(self.decoder.positioned(positions, seen, width, prompts=prompts))
            caught = None if features is None else overrides.enter_context(features.catching())
            arguments[self._cache_arguments[self.model]] = cache
            logits: Tensor = self._called(input_ids=tokens, use_cache=True, **arguments).logits
        hidden = None if caught is None or features is None else caught.hidden(None if features.whole else keep)
        return PassOutput(logits if keep is None else self._pick(logits, keep), hidden)

    def _pick(self, logits: Tensor, keep: Sequence[int]) -> Tensor:
        """``[R, 1, V]`` of ``logits`` at node ``keep[r]``, whether the model kept all nodes or the wanted ones only."""
        kept = sorted(set(keep)) if self._takes_logits_to_keep else range(logits.shape[1])
        return picked(logits, [kept.index(node) for node in keep])


class Eager(Backend):
    """Passes over rows with prefixes of different lengths, in one call of the model."""

    def __init__(self, facts: ModelFacts, overrides: Overrides | None, reasons: dict[str, str]):
        super().__init__(facts, overrides, reasons)
        self.call = ModelCall(facts)
        self._decoder = facts.model.get_decoder() or facts.model
        self._called: tuple[object, Direct | None] = (None, None)
        self._growth: tuple[Direct | None, NativeGrowth | None] = (None, None)
        kernels = self._kernels()
        kinds, run_bytes = (None, 0) if kernels is None else (kernels.decoder.page_kinds, kernels.decoder.run_bytes)
        self.cache = new_cache(sourced=facts.sourced, kinds=kinds, run_bytes=run_bytes)

    def encode(self, sources: Sequence[Source], keys: Sequence[Hashable]) -> None:
        assert self.call.decoder is not None and isinstance(self.cache, SourcedCache)
        self.cache.hold(sources, keys, self.call.decoder.encode)

    def source_length(self, source: Source) -> int:
        assert self.call.decoder is not None
        return self.call.decoder.length(source)

    def encoded(self, sources: Sequence[Source]) -> list[Encoded]:
        """The encoder's output for ``sources``; sources of live rows are not read again."""
        assert self.call.decoder is not None and isinstance(self.cache, SourcedCache)
        held = {run.source: run for run in self.cache.sources}
        states = self.call.decoder.encode([source for source in sources if source not in held])
        return [held.get(source) or Encoded(source, states[source]) for source in sources]

    def forward(self, given: ForwardPass) -> PassOutput:
        part = given.part  # parts are drafts, which do not count
        self.passes += part is None or (part.skip is None and part.end == self.call.ranges.count)
        return self.plain(given)

    def plain(self, given: ForwardPass) -> PassOutput:
        """One pass, not counted."""
        tree, window, direct = given.tree, given.window, self.direct
        pages = self.pages if self.pages is not None and self.pages.serves else None
        if isinstance(self.cache, PagedCache):
            self.cache.handed = direct is None and pages is None
        self.cache.enter(window)
        if direct is not None:
            tree_inputs, context = self._masked(given), self.facts.context
            made = direct(given.tokens, window, self.cache, context, tree_inputs, given.keep, self.features, given.part, given.ends)
            found = PassOutput(*made)
            self.touched = None if given.part is not None else direct.decoder.touched
            return found
        self.touched = None
        positions, where, mask = self.positions(tree, window), None, None
        masks = self.call.masks if pages is None else pages.masks
        if not given.uniform_chain:
            where = MaskInputs(tree, window, positions)
            self._place(where)
            mask = masks(where, self.cache)
        elif not self.call.uses_alibi:
            mask = masks.for_chain(window, self.facts.device)
        with nullcontext() if pages is None else pages.in_use(self.cache):
            return self.called(given, window, positions, mask, where)

    def decode(self, ids: Sequence[int], *, most: int, ends: Collection[int], draws: Draws | None) -> tuple[list[int], Tensor] | None:
        direct = self.direct
        if direct is None or direct.bias is not None or self.features is not None:
            return None
        if direct is not self._growth[0]:
            self._growth = direct, NativeGrowth.of(direct, self.cache, self.facts.context)
        growth = self._growth[1]
        if growth is None:
            return None
        if isinstance(self.cache, PagedCache):
            self.cache.handed = False
        found = growth.decode(ids, most=most, ends=ends, draws=draws)
        if found is not None:
            self.passes += len(found[0])
            self.touched = None if self.routing is None else float(self.routing.chosen)
        return found

    def release(self) -> None:
        super().release()
        self._called = self._growth = (None, None)

    def called(self, given: ForwardPass, window: Window, positions: Tensor, mask: Any, where: MaskInputs | None) -> PassOutput:
        """Call the model in ``window``, which the cache has entered; the last ``positions`` are those of its nodes."""
        how: dict[str, Any] = {"keep": given.keep, "prompts": given.prompts, "features": self.features, "part": given.part}
        return self.call(given.tokens, self.cache, positions[:, -window.nodes :], mask, where=where, width=window.width, **how)

    @property
    def ragged(self) -> bool:  # type: ignore[override]
        return self.direct is not None

    @property
    def direct(self) -> Direct | None:  # type: ignore[override]
        """The model as one call of a kernel, if its weights are packed for that and no hook or request needs the model's own calls."""
        found = self._kernels()
        return found if found is not None and found.ready else None

    @property
    def routing(self) -> Routing | None:
        return None if (direct := self.direct) is None else direct.decoder.routing

    def _kernels(self) -> Direct | None:
        """The same, even if something needs the model's own calls."""
        decoder = vars(self._decoder).get("forward")
        if decoder is None:
            return None
        if decoder is not self._called[0]:
            self._called = decoder, Direct.of(self.facts.model)
        return self._called[1]

    def _masked(self, given: ForwardPass) -> tuple[MaskInputs, Tensor] | None:
        """The positions of this pass's nodes, and their mask; None for a chain, where slots say both."""
        if given.tree.chain:
            return None
        where = MaskInputs(given.tree, given.window, self.positions(given.tree, given.window))
        self._place(where)
        return where, where.visible[:, None]  # the kernels apply windows themselves

    def _place(self, where: MaskInputs) -> None:
        """Give kernels, if there are any, the positions of a tree's nodes."""
        if not where.tree.chain and (self.overrides is not None or self.pages is not None):
            self.cache.positions = where.keys.int()

    def positions(self, tree: TokenTree, window: Window) -> Tensor:
        """``[R, N]`` positions of the tree's nodes (of a uniform chain those of this pass only), filler kept inside the context
        so that learned position tables are not overrun."""
        device, context = self.facts.device, self.facts.context
        if tree.chain and window.uniform:
            start = window.starts[0]
            positions = torch.arange(start, start + window.nodes, device=device).expand(tree.rows, -1)
        elif window.uniform:
            positions = tree.depths + (window.starts[0] - window.before)
        else:
            positions = to_device(window.starts, device)[:, None] - window.before + tree.depths
        if context is not None and window.width > context:
            positions = positions.clamp(max=context - 1)
        return positions
