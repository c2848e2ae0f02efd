"""Several drafters: each row is drafted for by the first drafter that proposes something for it.

Drafters that run no model are asked first, in the order given, then those that run one, and nobody is asked once every row has a
draft. The drafts come from different sources and have no common q, so the proposal is ``mixed`` and the match rule verifies it;
drafters that can share the target's noise do. Who is asked depends on the past alone, so the match rule stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.base import Drafter, DrafterInfo, DraftRequest, Feedback, Row
from foredraft.drafters.merging import SHARED, Part, kept_paths, member_feedback, merged
from foredraft.errors import ConfigurationError
from foredraft.models.encoder_decoder import Source
from foredraft.shapes import DynamicShape, TreeShape
from foredraft.target import Target
from foredraft.target.prefixes import Companion
from foredraft.tree import Proposal, TokenTree

SUITS_MATCH: tuple[Proposal, ...] = ("keyed", "mixed", "deterministic", "without-replacement", "iid")


class Several(Drafter):
    """Options:

    source: the drafters, as in ``several:prompt-lookup,draft-model:PATH``; a list may hold names, Drafter instances, and pairs of a
        name and its options.
    """

    name = "several"
    summary = "asks several drafters in order and takes the first draft for each row"
    info = DrafterInfo(proposals=("mixed",), branches=True)

    def __init__(self, source: str | Sequence[str | Drafter | tuple[str, dict[str, Any]]]):
        given = [part.strip() for part in source.split(",")] if isinstance(source, str) else list(source)
        if not given or not all(given):
            raise ConfigurationError("several needs the drafters to ask, for instance 'several:prompt-lookup,ngram'")
        self.drafters = [_made(each) for each in given]
        if len({id(each) for each in self.drafters}) < len(self.drafters):
            raise ConfigurationError("several was given the same drafter object twice; make two objects")
        infos = [drafter.info for drafter in self.drafters]
        if alone := next((drafter.name for drafter in self.drafters if drafter.info.shares_target), None):
            raise ConfigurationError(f"{alone} drafts in the target's own cache and cannot be one of several drafters; use it alone")
        branches = any(info.auto_branches for info in infos)  # copies alone are followed as chains
        self.info = replace(
            self.info,
            needs_logits=any(info.needs_logits for info in infos),
            runs_a_model=any(info.runs_a_model for info in infos),
            auto_branches=branches,
            grows=branches,
        )
        self._chains_only = False
        self._parts: list[Part] = []  # of the round under way

    @property
    def draft_models(self) -> list[Target]:
        return [each for drafter in self.drafters for each in drafter.draft_models]

    @property
    def learnt(self) -> dict[str, Any] | None:
        """Of each drafter that learns, by its name as in :attr:`named`."""
        return {name: facts for name, drafter in self.named.items() if (facts := drafter.learnt) is not None} or None

    @property
    def named(self) -> dict[str, Drafter]:
        """The drafters by their names; a second one of a name has a 2 behind it."""
        found: dict[str, Drafter] = {}
        for drafter in self.drafters:
            count = sum(name.partition(" ")[0] == drafter.name for name in found)
            found[f"{drafter.name} {count + 1}" if count else drafter.name] = drafter
        return found

    @property
    def keeps_texts(self) -> bool:
        return any(drafter.keeps_texts for drafter in self.drafters)

    def bind(self, target: Target) -> None:
        for drafter in self.drafters:
            drafter.bind(target)
        self._read_for_members(target)
        self.info = replace(self.info, extra_nodes=sum(drafter.info.extra_nodes for drafter in self.drafters))
        self._chains_only = target.chains_only is not None

    def _read_for_members(self, target: Target) -> None:
        """Ask the target for the hidden states that any of the drafters reads; each had asked for its own alone."""
        wanted = [drafter.info for drafter in self.drafters]
        features = tuple(dict.fromkeys(number for each in wanted for number in each.features))
        whole = any(each.whole_prompt for each in wanted if each.features)
        self.info = replace(self.info, features=features, whole_prompt=whole)
        if features:
            target.read(features, whole=whole, companion=self.companion)

    @property
    def page_bytes(self) -> int:
        return sum(drafter.page_bytes for drafter in self.drafters)

    @property
    def source_bytes(self) -> int:
        return sum(drafter.source_bytes for drafter in self.drafters)

    @property
    def companion(self) -> Companion | None:
        whole = [drafter for drafter in self.drafters if drafter.info.features and drafter.info.whole_prompt]
        return whole[0].companion if len(whole) == 1 else None  # two may know different beginnings

    def _share(self, drafter: Drafter, hidden: Tensor) -> Tensor:
        """The ``features`` of one member of ``hidden`` ``[..., F * d]``, those of all."""
        features = self.info.features
        if drafter.info.features == features:
            return hidden
        each = hidden.view(*hidden.shape[:-1], len(features), -1)
        return torch.cat([each[..., features.index(number), :] for number in drafter.info.features], -1)

    def refusal(self, shape: TreeShape) -> str | None:
        return next((why for drafter in self.drafters if (why := drafter.refusal(self._own(drafter, shape)))), None)

    def makes_chains(self, shape: TreeShape) -> bool:
        if self._chains_only:  # it would only draft chains, which must not pass for the tree that was asked for
            return shape.is_chain
        return all(drafter.makes_chains(self._own(drafter, shape)) for drafter in self.drafters)

    def check_source(self, source: Source) -> None:
        for drafter in self.drafters:
            drafter.check_source(source)

    def read(self, rows: Sequence[Row], hidden: Sequence[Tensor]) -> None:
        for drafter in self.drafters:
            if drafter.info.features:
                mine = [self._share(drafter, each if drafter.info.whole_prompt else each[-1:]) for each in hidden]
                drafter.read(rows, mine)

    def read_ahead(self, row: Row, text: Sequence[int], hidden: Tensor | None) -> None:
        for drafter in self.drafters:
            drafter.read_ahead(row, text, None if hidden is None or drafter.companion is None else self._share(drafter, hidden))

    def begin(self, rows: Sequence[Row]) -> None:
        for drafter in self.drafters:
            drafter.begin(rows)

    # -- a round --------------------------------------------------------------------------------------------------------

    def draft(self, request: DraftRequest) -> TokenTree:
        self._parts, without = [], {row for row, limit in enumerate(request.limits) if limit > 0}  # rows that have no draft yet
        for drafter in sorted(self.drafters, key=lambda each: each.info.runs_a_model):
            if without or drafter.info.extra_nodes:  # extra nodes carry a state from round to round
                part = Part(drafter, self._ask(drafter, request))
                if len(self.drafters) > 1:
                    part.rows = [row for row in part.proposing() if row in without]
                    without.difference_update(part.rows)
                self._parts.append(part)
        only = self._parts[0] if len(self._parts) == 1 else None
        self.expected_accepted = only.drafter.expected_accepted if only else None
        if only is None:
            return merged(self._parts, request.device)
        return replace(only.tree, proposal="mixed", q=only.tree.q if only.tree.proposal in SHARED else None)

    def drafter_of(self, row: int) -> str:
        found = [part.drafter.drafter_of(row) for part in self._parts if row in part.rows or len(self._parts) == 1]
        return found[0] if found else self.name

    def _ask(self, drafter: Drafter, request: DraftRequest) -> TokenTree:
        shape = self._own(drafter, request.shape)
        offered = drafter.proposals_for(shape)
        proposal = "deterministic" if request.sampler.greedy else next(each for each in SUITS_MATCH if each in offered)
        return drafter.draft(replace(request, shape=shape, proposal=proposal, needs_q=request.needs_q and proposal in SHARED))

    def _own(self, drafter: Drafter, shape: TreeShape) -> TreeShape:
        """What one of the drafters is asked for: no more levels than it can draft, and a chain of one that is to draft chains."""
        info = drafter.info
        shape = shape if info.max_depth is None else shape.truncate(info.max_depth)
        copies = isinstance(shape, DynamicShape) and not info.auto_branches
        return TreeShape.chain(shape.depth) if copies or self._chains_only or not info.branches else shape

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        parts, self._parts = {id(part.drafter): part for part in self._parts}, []
        paths = kept_paths(feedback)
        for drafter in self.drafters:
            drafter.observe(rows, self._feedback(drafter, parts.get(id(drafter)), feedback, paths))

    def _feedback(self, drafter: Drafter, part: Part | None, feedback: Feedback, paths: list[list[int]]) -> Feedback:
        """What one drafter is told of the merged tree."""
        info, hidden = drafter.info, feedback.hidden
        mine = self._share(drafter, hidden) if info.features and hidden is not None else None
        own = replace(feedback, logits=feedback.logits if info.needs_logits else None, hidden=mine)
        return member_feedback(info, part, own, paths)

    # -- the rest -------------------------------------------------------------------------------------------------------

    def end(self, rows: Sequence[Row]) -> None:
        for drafter in self.drafters:
            drafter.end(rows)

    def shared(self) -> list[object]:
        return [*self.drafters, *(each for drafter in self.drafters for each in drafter.shared())]

    def reset(self) -> None:
        self._parts = []
        for drafter in self.drafters:
            drafter.reset()

    def follow(self) -> int:
        return sum(drafter.follow() for drafter in self.drafters)

    def release(self) -> None:
        for drafter in self.drafters:
            drafter.release()

    def forget(self) -> None:
        for drafter in self.drafters:
            drafter.forget()

    def close(self) -> None:
        for drafter in self.drafters:
            drafter.close()


def _made(given: str | Drafter | tuple[str, dict[str, Any]]) -> Drafter:
    from foredraft import drafters  # the registry lists this drafter too

    if isinstance(given, Drafter):
        return given
    name, options = (given, {}) if isinstance(given, str) else given
    return drafters.create(name, options)
