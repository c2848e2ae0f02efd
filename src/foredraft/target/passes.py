"""Passes of a target over trees: through the whole model, or first through a part of its layers and later through the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from foredraft.backends.base import Backend, ForwardPass, Part, PassOutput, Routing, tree_window
from foredraft.backends.eager import Eager
from foredraft.backends.graphs import Recorded
from foredraft.backends.native_growth import Draws
from foredraft.errors import UnsupportedModelError
from foredraft.models.cache import Window
from foredraft.models.layers import LayerRanges, layer_count
from foredraft.models.pages import PAGE
from foredraft.models.skips import SkipSet, Sublayers
from foredraft.models.support import ModelFacts, describe
from foredraft.tree import TokenTree

SECONDS = 0.1  # that several passes in one call should take at most: until it is over nothing is streamed, and no row joins
MOST = 16  # passes of a call


@dataclass(eq=False)
class Early:
    """Nodes of a tree that have been through the layers below ``exit``: ``states[exit]`` ``[R, n, d]`` is the output of these layers, and
    the other entries are outputs of lower layers that are kept."""

    exit: int
    states: dict[int, Tensor]


class Passes:
    """Base of :class:`~foredraft.target.Target`, which chooses the ``backend`` and keeps the rows. Its docstring has the attributes."""

    def __init__(self, facts: ModelFacts):
        self.backend: Backend
        self.model = facts.model
        self.vocab_size, self.context, self.device = facts.vocab_size, facts.context, facts.device
        self.trained, self.sourced = facts.trained, facts.sourced
        self.hidden: Tensor | None = None
        self.prompt_hidden: list[Tensor] | None = None
        self.layer_tokens = [0] * layer_count(self.model)
        self._early: Early | None = None  # the tree of this round as far as lower layers have read it
        self._keeping: tuple[int, ...] = ()
        self._pace: float | None = None  # seconds of a plain pass of one row
        self.single = False
        self.kept: dict[int, Tensor] = {}

    @property
    def chains_only(self) -> str | None:
        """Why this target can verify chains but no branching trees; None if it takes trees."""
        return self.backend.facts.chains_only

    @property
    def reasons(self) -> Mapping[str, str]:
        """Why other ways to make passes are not in use: ``packed``, ``fused`` for the kernels, ``graphs``, ``flex``,
        ``pages`` or ``paged_attention``, and the reason. And why there is no ``batch_invariant``, once that was asked."""
        return MappingProxyType(self.backend.reasons)

    @property
    def execution(self) -> str:
        """What is in use: ``eager``, ``packed``, ``native``, ``compiled`` or ``graphs``."""
        return self.backend.name

    @property
    def cache(self) -> Any:
        """The backend's: a ``TreeCache``, or one of the same verbs for models that can roll back but not branch."""
        return self.backend.cache

    @property
    def passes(self) -> int:
        """Forward passes made so far, the self-test's left out."""
        return self.backend.passes

    @property
    def warm_up(self) -> int:
        """Passes of one kind until they reach their full speed."""
        return self.backend.warm_up

    @property
    def settling(self) -> int:
        """How many passes so far took longer than later ones of their kind will, because they were recorded or compared."""
        return self.backend.settling

    @property
    def routing(self) -> Routing | None:
        """The mixtures of experts of the model, if the kernels count the experts that a pass touches."""
        return self.backend.routing

    @property
    def touched(self) -> float | None:
        """How many experts of a layer, on average, some token of the last whole pass took; None as of :attr:`routing`."""
        return self.backend.touched

    @property
    def lengths(self) -> list[int]:
        """Tokens cached per live row."""
        return self.cache.lengths

    @property
    def ragged(self) -> bool:
        """Rows of a pass over chains pay for their own nodes alone."""
        return self.backend.ragged

    @property
    def features(self) -> tuple[int, ...]:
        """The hidden states that passes return, in order; the number of the last layer is given as ``LAST``."""
        return () if self.backend.features is None else self.backend.features.numbers

    def score(self, tree: TokenTree, *, first: int = 0) -> Tensor:
        """``[R, N - first, V]`` logits at the nodes of ``tree`` from ``first`` on, after each row's prefix. Advances nothing.

        A tree may be scored in several passes, level by level as it grows: the nodes before ``first`` were written by
        earlier passes over the same tree, in the same order, since the last ``commit``.

        A token outside the vocabulary is scored as one inside, because it would otherwise crash the GPU. Callers that make trees have
        to report it themselves.

        Raises:
            ValueError: more nodes than the context holds, or no node to score.
            UnsupportedModelError: a tree that branches, for a model that can only verify chains.
        """
        if self.chains_only is not None and not tree.chain and tree.nodes > 1:
            raise UnsupportedModelError(f"{describe(self.model)} can only verify chains: {self.chains_only}")
        if self.context is not None and tree.nodes > self.context:
            raise ValueError(
                f"the tree has {tree.nodes} nodes per row, but the model's context holds only {self.context}; draft fewer nodes"
            )
        if not 0 <= first < tree.nodes:
            raise ValueError(f"first must name one of the {tree.nodes} nodes of the tree, got {first}")
        if tree.rows != len(self.lengths):
            raise ValueError(f"the tree has {tree.rows} rows and the cache {len(self.lengths)}")
        self.prompt_hidden, self.kept = None, {}
        early, self._early = self._early, None
        if early is None or not early.exit:
            early = Early(0, {})
        if first == 0 and (early.exit or self._keeping):
            return self._finish(tree, early)
        return self._forward(self._pass(tree, first))

    def decode(
        self, tree: TokenTree, ids: Sequence[int], *, most: int, ends: Collection[int], draws: Callable[[int], Draws | None] | None
    ) -> tuple[list[int], Tensor]:
        """Plain decoding of the only row. Where a kernel can, it makes several passes in one call: each pass drives Python's code and data
        out of the CPU's caches, and the kernel needs none of it.

        Args:
            tree: the root alone, which is the last token of ``ids``, the text of the row.
            most: how many passes to make at most. There are fewer if these would take more than :data:`SECONDS`, or write to more than one
                page of the cache.
            ends: tokens behind which nothing is read.
            draws: how so many tokens are sampled, or None if that is not known; not given for greedy decoding.

        Returns:
            The tokens that were read behind the root, and ``[1, n, V]`` logits at the root and at these, as of :meth:`score` over them all.
        """
        begin = time.perf_counter()
        read, logits = self._together(ids, most, ends, draws) or ([], self.score(tree))
        self._pace = (time.perf_counter() - begin) / logits.shape[1]
        return read, logits

    def _together(
        self, ids: Sequence[int], most: int, ends: Collection[int], draws: Callable[[int], Draws | None] | None
    ) -> tuple[list[int], Tensor] | None:
        """:meth:`decode` by several passes in one call, or None."""
        self.single = False
        most = min(most, MOST, PAGE - self.lengths[0] % PAGE)
        if most <= 1 or self._keeping or self._pace is None:
            return None
        count, made = min(most, int(SECONDS / self._pace)), None
        if count > 1 and self.backend.direct is not None:
            how = None if draws is None else draws(count)
            made = None if draws is not None and how is None else self.backend.decode(ids, most=count, ends=ends, draws=how)
        self.single = made is None
        if made is None:
            return None
        following, logits = made
        for layer in range(len(self.layer_tokens)):
            self.layer_tokens[layer] += len(following)
        self._early = self.hidden = self.prompt_hidden = None
        self.kept = {}
        return following[:-1], logits[None]

    def keep(self, layers: Sequence[int]) -> None:
        """From the next tree on, :meth:`score` leaves the outputs of these decoder layers, ascending and counted from 1, in :attr:`kept`;
        no ``layers`` end that. A pass is then made in several parts, which costs a little time."""
        self._keeping = tuple(layers)

    def read_out(self, states: Tensor) -> Tensor:
        """``[n, V]`` logits from the outputs ``states`` ``[n, d]`` of any layer, by the model's final norm and LM head."""
        return self._ranges.read_out(states)

    def score_early(
        self, tree: TokenTree, exit: int | SkipSet, *, first: int = 0, head: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """``[R, N - first, V]`` logits of an early exit at the nodes from ``first`` on: ``head``, or the model's final norm and LM head,
        applied to the outputs ``[R, N - first, d]`` of the layers below ``exit``. If ``exit`` is a set of sublayers, the pass leaves these
        out, and ``head`` is applied after the final norm. The next :meth:`score` of a tree that begins with these nodes runs them only
        through the layers from ``exit``, or from the first layer of the set, on.

        Nodes before ``first`` were read by earlier calls with the same ``exit``, in the same order, since the last ``commit``.
        """
        skip, last = (exit, exit.first) if isinstance(exit, SkipSet) else (None, exit)
        part = Part(0, last if skip is None else self.layers, logits=head is None, skip=skip)
        if first == 0:
            self._early = None
        output, states = self._run(tree, first, part)
        assert (first == 0) == (self._early is None)
        self._early = Early(last, states if self._early is None else _joined(self._early.states, states))
        return output.logits if head is None else head(states[last] if skip is None else output.logits)

    def rearrange_early(self, order: Tensor) -> None:
        """The next tree begins with the nodes ``order`` ``[R, n]`` of those that lower layers have read."""
        assert self._early is not None, "score_early comes first"
        self.cache.commit(order, [order.shape[1]] * len(order))
        self.cache.rewind([length - order.shape[1] for length in self.lengths])
        rows = torch.arange(len(order))[:, None]
        self._early.states = {
            layer: states[rows.to(states.device), order.to(states.device)] for layer, states in self._early.states.items()
        }

    def _finish(self, tree: TokenTree, early: Early) -> Tensor:
        """Logits at the nodes of ``tree``, of which some have been through the lower layers."""
        states, exit = early.states, early.exit
        read = states[exit].shape[1] if exit else tree.nodes
        if read < tree.nodes:
            states = _joined(states, self._run(tree, read, Part(0, exit, logits=False))[1])
        states = {layer: each[:, : tree.nodes] for layer, each in states.items()}
        output, upper = self._run(tree, 0, Part(exit, self.layers, states.get(exit)))
        self.hidden, self.kept = output.hidden, {layer: each for layer, each in (states | upper).items() if layer in self._keeping}
        return output.logits

    def _run(self, tree: TokenTree, first: int, part: Part) -> tuple[PassOutput, dict[int, Tensor]]:
        """``part`` of a pass over the nodes from ``first`` on; and the outputs of its last layer, unless that is the model's last, and
        of the layers before it that are kept."""
        found: dict[int, Tensor] = {}
        between = [] if part.skip is not None else [layer for layer in self._keeping if part.begin < layer < part.end]
        for layer in [*between, part.end]:
            output = self._made(self._pass(tree, first, replace(part, end=layer, logits=part.logits and layer == part.end)))
            if output.hidden is not None:
                found[layer if part.skip is None else part.skip.first] = output.hidden
            part = replace(part, begin=layer, states=output.hidden)
        return output, found

    def _pass(self, tree: TokenTree, first: int, part: Part | None = None) -> ForwardPass:
        tokens = tree.tokens[:, first:].clamp(0, self.vocab_size - 1)
        return ForwardPass(tree, tree_window(tree, self.lengths, first), tokens, part=part)

    @property
    def layers(self) -> int:
        """Decoder layers, for passes of a part of them.

        Raises:
            UnsupportedModelError: they cannot be run in part.
        """
        return self._ranges.count

    @property
    def _ranges(self) -> LayerRanges:
        if self.sourced:
            raise UnsupportedModelError(
                f"the decoder layers of {describe(self.model)}, which has an encoder, are not run in part yet; use another drafter"
            )
        if not (type(self.backend) is Eager or isinstance(self.backend, Recorded)) or self.chains_only:
            passes = f"{type(self.backend).__name__} makes whole passes; use execution='auto' and attention='auto', or another drafter"
            why = f"{self.chains_only}; use another drafter" if self.chains_only else passes
            raise UnsupportedModelError(f"the decoder layers of {describe(self.model)} cannot be run in part: {why}")
        return self.backend.call.ranges

    @property
    def sublayers(self) -> Sublayers:
        """Those of the decoder layers, for passes without some of them.

        Raises:
            UnsupportedModelError: they cannot be left out.
        """
        assert self.layers and isinstance(self.backend, Eager)
        return self.backend.call.sublayers

    def apart(self, ids: Tensor, skip: SkipSet | None = None) -> Tensor:
        """``[1, L, V]`` logits at every token of ``ids`` ``[1, L]``, read as a text of its own: cache and rows stay as they are. The pass
        leaves the sublayers ``skip`` out, if they are given."""
        for layer in set(range(self.layers)).difference(() if skip is None else skip.whole):
            self.layer_tokens[layer] += ids.numel()
        with nullcontext() if skip is None else self.sublayers.left_out(skip):
            return self.model(input_ids=ids, use_cache=False).logits

    def advance(self, tokens: Tensor) -> Tensor:
        """Append one token ``[R]`` to every row; returns the logits after it, ``[R, V]``."""
        root, window = TokenTree.root(tokens), Window(0, len(self.lengths), tuple(self.lengths), 1)
        logits = self._forward(ForwardPass(root, window, root.tokens))[:, 0]
        self.cache.advance()
        return logits

    def commit(self, path: Tensor | None, kept: Sequence[int]) -> None:
        """Keep the first ``kept[r]`` nodes of ``path`` ``[R, D]`` (None: the first nodes in order) of the tree just scored.

        ``path`` names nodes of the whole tree, whatever passes it was scored in.
        """
        self._early = None
        self.cache.commit(path, kept)

    def _made(self, given: ForwardPass) -> PassOutput:
        part, tokens = given.part or Part(0, len(self.layer_tokens)), given.tokens.numel()
        for layer in set(range(part.begin, part.end)).difference(part.skip.whole if part.skip is not None else ()):
            self.layer_tokens[layer] += tokens
        return self.backend.forward(given)

    def _forward(self, given: ForwardPass) -> Tensor:
        output = self._made(given)
        self.hidden = output.hidden
        return output.logits


def _joined(before: Mapping[int, Tensor], after: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The outputs of each layer at some nodes, and at those that come after them."""
    return {layer: torch.cat([states, after[layer]], 1) for layer, states in before.items()}
