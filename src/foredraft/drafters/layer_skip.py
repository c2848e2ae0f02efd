"""The target's own lower layers as the drafter (LayerSkip, Elhoushi et al. 2024).

The target's final norm and LM head, or a trained exit (:mod:`foredraft.heads.exit`), turn the states behind layer ``exit`` into a draft.
Nothing is computed twice: the lower layers write their keys and values into the target's own cache, and their states are kept, so that
verification runs them only for nodes that they have not read. For models whose lower layers were trained to predict (Meta's
``layerskip-*`` checkpoints), or with an exit that was trained for the model; the bare layers of other models guess badly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from foredraft.drafters.base import Drafter, DrafterInfo, DraftRequest, Feedback, Row
from foredraft.drafters.exits import Exits
from foredraft.drafters.growth import UNSEEN, Growth, grow, one_by_one
from foredraft.drafters.siblings import DRAWN, offered
from foredraft.drafters.stopping import Stopping
from foredraft.errors import ConfigurationError
from foredraft.heads import checkpoints
from foredraft.heads.base import Head, refuse_another_target
from foredraft.heads.exit import ExitHead
from foredraft.hub import named
from foredraft.models.skips import SkipSet
from foredraft.target import Target
from foredraft.tree import TokenTree


class LayerSkip(Drafter):
    """Options:

    source: a trained exit: a folder, a hub id or a head itself; none for the target's own final norm.
    exit: draft with so many of the target's layers, from the first on; a third of them, or those of the trained exit, by default.
        ``auto`` begins with a third, and the planner then chooses by what it measures; :attr:`exit` says what is in use.
    siblings: how tokens are chosen when sampling, as for ``draft-model``.
    threshold: how likely a drafted token must be for the draft to go on below it: a number, ``auto`` for one that follows each row's
        acceptance, or None for drafts that are as deep as they were planned.
    """

    name = "layer-skip"
    summary = "the target's own lower layers; for models trained to exit early"
    info = DrafterInfo(proposals=DRAWN.chains, branches=True, runs_a_model=True, shares_target=True, learns_from_feedback=False)

    def __init__(
        self,
        source: str | Path | Head | None = None,
        *,
        exit: int | str | None = None,
        siblings: str = "auto",
        threshold: float | str | None = None,
    ):
        self.source = named(source)
        self._wanted, self._offer = exit, offered(siblings, DRAWN)
        self._exit: int | None = None  # of the model that it is bound to
        self.info = replace(self.info, proposals=self._offer.chains, learns_from_feedback=threshold == "auto")
        self.stopping = Stopping(threshold)
        self._target: Target | None = None
        self._head: Head | None = None

    @property
    def target(self) -> Target:
        if self._target is None:
            raise ConfigurationError(f"{self.name} is not bound to a Speculator yet; pass it as Speculator(..., drafter=...)")
        return self._target

    @property
    def part(self) -> object:
        return self._leaving if self.info.exits is None else "auto"

    @property
    def _leaving(self) -> int | SkipSet:
        """The layer that drafts leave at, or what they leave out."""
        skip = None if self._head is None else self._head.skip
        return self.exit if skip is None else skip

    @property
    def exit(self) -> int:
        """The layer that the next draft leaves at."""
        found = self._exit if self.info.exits is None else self.info.exits.layer
        if found is None:
            raise ConfigurationError("layer-skip is not bound to a Speculator yet; pass it as Speculator(..., drafter=...)")
        return found

    @exit.setter
    def exit(self, layer: int) -> None:
        self._exit = layer
        if self.info.exits is not None:
            self.info.exits.layer = layer

    def bind(self, target: Target) -> None:
        layers, exit, exits = target.layers, self._wanted, None
        if layers < 2:
            raise ConfigurationError("a model of one layer has no lower layers to draft with; use another drafter")
        if self.source is not None:
            self._head, exit = self._loaded(self.source, target)
        elif exit is None or exit == "auto":
            first = max(1, layers // 3)
            exits = Exits.of(layers, first=first) if exit == "auto" else None
            exit = first if exits is None else exits.layer
        if isinstance(exit, bool) or not isinstance(exit, int) or not 0 < exit < layers:
            raise ConfigurationError(f"exit must be auto or lie between 1 and {layers - 1} for a model of {layers} layers, got {exit!r}")
        self.info = replace(self.info, exits=exits, needs_logits=exits is not None)
        self.exit, self._target = exit, target

    def _loaded(self, source: str | Head, target: Target) -> tuple[Head, int]:
        """The trained exit at ``source``, and where it leaves."""
        head = checkpoints.load(source, target.model) if isinstance(source, str) else source
        if not isinstance(head, ExitHead):
            raise ConfigurationError(f"{source!r} is a {head.kind} head; use drafter '{head.drafter}:{source}'")
        refuse_another_target(head.config, target.model)
        if self._wanted not in (None, head.config.exit):
            raise ConfigurationError(f"the exit in {source!r} was trained for layer {head.config.exit}, not {self._wanted}; leave exit out")
        if head.skip is not None:
            target.sublayers.check(head.skip)
        head.attach(target.model)
        return head, head.config.exit

    def draft(self, request: DraftRequest) -> TokenTree:
        request = self.stopping.request(request)
        if request.shape.is_chain:
            return one_by_one(request, self._after)
        grown = grow(request, self._expand)
        self.expected_accepted = grown.expected
        return grown.tree if grown.own is None else self._arranged(grown, grown.own)

    def _after(self, path: list[Tensor]) -> Tensor:
        return self._expand(TokenTree.from_chain(torch.stack(path, 1)), len(path) - 1)[:, 0]

    def _expand(self, tree: TokenTree, first: int) -> Tensor:
        return self.target.score_early(tree.with_safe_parents(), self._leaving, first=first, head=self._head)

    def _arranged(self, grown: Growth, own: Tensor) -> TokenTree:
        """The proposed tree with the nodes that the lower layers have read in front, in the order in which they were read."""
        tree = grown.tree
        read = own < grown.seen
        order = torch.where(read, own, UNSEEN).sort(dim=1, stable=True).indices  # [R, N] nodes of the proposed tree in their new order
        front = int(read.sum(1).min())
        place = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
        parents = tree.parents.expand(tree.rows, -1).gather(1, order)
        parents = torch.where(parents < 0, parents, place.gather(1, parents.clamp(min=0)))
        self.target.rearrange_early(own.gather(1, order)[:, :front])
        valid = None if tree.valid is None else tree.valid.gather(1, order)
        return TokenTree(tree.tokens.gather(1, order), parents, valid, tree.proposal, pruned=tree.pruned)

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        self.stopping.observe(rows, feedback)
        if self.info.exits is not None:
            assert feedback.logits is not None
            self.info.exits.observe(self.target, feedback.logits, feedback.accepted, feedback.path, drafted=feedback.drafted)

    def begin(self, rows: Sequence[Row]) -> None:
        if self.info.exits is not None:
            self.info.exits.begin()

    def end(self, rows: Sequence[Row]) -> None:
        self.stopping.end(rows)

    def reset(self) -> None:
        self.stopping.end()

    def forget(self) -> None:
        if self.info.exits is not None:
            self.info.exits.forget()
