"""Several drafters at once: their proposals become one tree, in which what two of them agree on is one node.

Each drafts as if it were alone. Merged nodes come from different sources and lose any common q, so the proposal is ``mixed`` and the
match rule verifies it; drafters that can share the target's noise do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.drafters.base import Drafter, DraftRequest, Feedback, Row
from foretoken.errors import ConfigurationError
from foretoken.shapes import TreeShape
from foretoken.tree import Proposal, TokenTree

if TYPE_CHECKING:
    from foretoken.target import Target

SUITS_MATCH: tuple[Proposal, ...] = ("keyed", "mixed", "deterministic", "without-replacement", "iid")


class Several(Drafter):
    """Options:

    source: the drafters, as in ``several:prompt-lookup,draft-model:PATH``; a list may hold names, Drafter instances, and pairs of a
        name and its options. Where two propose the same continuation the nodes are shared; the order breaks no ties otherwise.
    """

    name = "several"
    summary = "merges the proposals of several drafters into one tree"
    proposals: tuple[Proposal, ...] = ("mixed",)
    branches = True

    def __init__(self, source: str | Sequence[str | Drafter | tuple[str, dict[str, Any]]]):
        given = [part.strip() for part in source.split(",")] if isinstance(source, str) else list(source)
        if not given or not all(given):
            raise ConfigurationError("several needs the drafters to merge, for instance 'several:prompt-lookup,ngram'")
        self.drafters = [_made(each) for each in given]
        if len({id(each) for each in self.drafters}) < len(self.drafters):
            raise ConfigurationError("several was given the same drafter twice, which keeps the state of one; make two")
        self._trees: list[TokenTree] = []
        self._merged: list[Tensor] = []  # per drafter [R, n], where each of its nodes went in the last tree

    def bind(self, target: Target) -> None:
        for drafter in self.drafters:
            drafter.bind(target)

    def refusal(self, shape: TreeShape) -> str | None:
        return next((why for drafter in self.drafters if (why := drafter.refusal(_own(drafter, shape)))), None)

    def makes_chains(self, shape: TreeShape) -> bool:
        return len(self.drafters) == 1 and self.drafters[0].makes_chains(shape)

    def begin(self, rows: Sequence[Row]) -> None:
        for drafter in self.drafters:
            drafter.begin(rows)

    def draft(self, request: DraftRequest) -> TokenTree:
        trees = []
        for drafter in self.drafters:
            shape = _own(drafter, request.shape)
            offered = drafter.proposals_for(shape)
            proposal = "deterministic" if request.sampler.greedy else next(each for each in SUITS_MATCH if each in offered)
            trees.append(drafter.draft(replace(request, shape=shape, proposal=proposal, needs_q=False)))
        self._trees = trees
        if len(trees) == 1 and trees[0].chain:  # stays one: there are targets that take nothing else
            return replace(trees[0], proposal="mixed", q=None)
        tree, self._merged = merged(trees, request.depth)
        return tree

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        if not self._merged:  # one chain as it came, or a round without a draft
            for drafter in self.drafters:
                drafter.observe(rows, feedback)
        for drafter, tree, went in zip(self.drafters, self._trees, self._merged):
            drafter.observe(rows, seen_by(tree, went, feedback))
        self._trees, self._merged = [], []

    def end(self, rows: Sequence[Row]) -> None:
        for drafter in self.drafters:
            drafter.end(rows)

    def reset(self) -> None:
        self._trees, self._merged = [], []
        for drafter in self.drafters:
            drafter.reset()

    def close(self) -> None:
        for drafter in self.drafters:
            drafter.close()


def _made(given: str | Drafter | tuple[str, dict[str, Any]]) -> Drafter:
    from foretoken import drafters  # the registry lists this drafter too

    if isinstance(given, Drafter):
        return given
    name, options = (given, {}) if isinstance(given, str) else given
    drafter: Drafter = drafters.create(name, options)
    return drafter


def _own(drafter: Drafter, shape: TreeShape) -> TreeShape:
    """What a drafter among several is asked for: one that makes chains only adds a chain to the tree."""
    return shape if drafter.branches else TreeShape.chain(shape.depth)


def merged(trees: Sequence[TokenTree], depth: int) -> tuple[TokenTree, list[Tensor]]:
    """One tree of all continuations in ``trees``, which have the same roots and are at most ``depth`` deep.

    Returns:
        The tree, and for each of ``trees`` ``[R, n]`` where its nodes went, -1 for filler.
    """
    device, rows = trees[0].tokens.device, trees[0].rows
    offsets, nodes = [], 1
    for tree in trees:
        offsets.append(nodes - 1)
        nodes += tree.nodes - 1
    tokens = torch.cat([trees[0].tokens[:, :1], *(tree.tokens[:, 1:] for tree in trees)], 1)
    parents = [torch.where(tree.parents > 0, tree.parents + offset, 0)[:, 1:].expand(rows, -1) for tree, offset in zip(trees, offsets)]
    parent = torch.cat([torch.zeros_like(tokens[:, :1]), *parents], 1)
    valid = torch.cat([torch.ones_like(tokens[:, :1], dtype=torch.bool), *(_real(tree)[:, 1:] for tree in trees)], 1)
    index = torch.arange(nodes, device=device).expand(rows, nodes)
    first = index  # [R, N] the first node that says the same text
    alike = (tokens[:, :, None] == tokens[:, None]) & valid[:, :, None] & valid[:, None]
    alike[:, 0], alike[:, :, 0] = False, False
    for _ in range(depth):
        above = first.gather(1, parent)
        same = alike & (above[:, :, None] == above[:, None])
        first = torch.where(same.any(-1), same.int().argmax(-1), index)
    kept = valid & (first == index)
    number = kept.long().cumsum(1) - 1
    order = kept.long().argsort(dim=1, descending=True, stable=True)[:, : int(kept.sum(1).max())]
    above = number.gather(1, first.gather(1, parent)).gather(1, order)
    above[:, 0] = -1
    tree = TokenTree(tokens.gather(1, order), above.clamp(max=order.shape[1] - 1), kept.gather(1, order), "mixed")
    went = torch.where(valid, number.gather(1, first), -1)
    places = [torch.cat([went[:, :1], went[:, offset + 1 : offset + one.nodes]], 1) for one, offset in zip(trees, offsets)]
    return tree, places


def seen_by(tree: TokenTree, went: Tensor, feedback: Feedback) -> Feedback:
    """``feedback`` on the merged tree as feedback on ``tree``, whose nodes ``went`` ``[R, n]`` there."""
    assert feedback.path is not None
    depth = torch.arange(feedback.path.shape[1], device=went.device)
    on_path = depth <= torch.tensor(feedback.accepted, device=went.device)[:, None]
    hit = (went[:, None] == feedback.path[:, :, None]) & on_path[..., None]  # [R, D, n]: node n is the path's node at depth D
    accepted = hit.any(-1).long().cumprod(1).sum(1) - 1
    return Feedback(tree, accepted.tolist(), hit.int().argmax(-1))


def _real(tree: TokenTree) -> Tensor:
    return torch.ones_like(tree.tokens, dtype=torch.bool) if tree.valid is None else tree.valid
