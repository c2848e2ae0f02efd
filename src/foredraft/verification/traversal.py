"""Traversal verification: block verification for trees, leaves first.

Weng et al. 2025, "Traversal Verification for Speculative Tree Decoding". A(root) = 1 and A(child) = min(1, A(parent) p(x) / q(x))
with the parent's p and q. Leaves are visited depth first, children in draw order. Leaf v survives with probability A(v): then the
whole path to it is kept and the next token comes from v's current p. Otherwise v is deleted, and its parent, with
R = [A p - q]+ and Z = sum R, gets A <- Z / (Z + 1 - A) and p <- R / Z; drawn without replacement, also q[x] <- 0, renormalised.
A parent without children is a leaf; the root's A stays 1, so the walk ends there. On a chain it equals ``block``.

Conditions: those of ``multi-candidate``. Duplicate i.i.d. siblings are separate nodes with subtrees and deletions of their own.
Expected acceptance: over what is drafted below it, v or a node below it survives with probability A(v) as of when v is entered. So
E[accepted] is the sum over nodes of E[A(v); v is entered]; at the root, the chance that anything survives is that of
``multi-candidate``, and below it more does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.logits.noise import Purpose, Randomness
from foredraft.tree import TokenTree
from foredraft.verification.base import Verdict, path_to
from foredraft.verification.host_trees import Visit, common, visits
from foredraft.verification.ratios import ComparesWithQ, Remainder, any_row, at_node, every_row, safe_ratio


class Traversal(ComparesWithQ):
    name = "traversal"
    summary = "block verification for trees, leaves first; exact for sampled trees"
    proposals = ("without-replacement", "iid")

    def compare(self, tree: TokenTree, p: Tensor, q: Tensor, noise: Randomness) -> Verdict:
        walk = _Walk(tree, p, q, noise)
        for visit in visits(walk.common.parents):
            if visit.leaving:
                walk.leave(visit)
            else:
                walk.enter(visit)
            if not any_row(walk.open):
                break
        path, accepted = path_to(tree, walk.last)
        return Verdict(path, accepted, noise.draw(walk.weights_at_survivor(), Purpose.RESIDUAL))


class _Walk:
    """A depth-first walk of R rows in step.

    What deletions leave of a node matters only while the walk is below it, so A ``[R]`` and the remainders of p and q are kept for
    the nodes of the current path alone, one per depth; at the leaf that ends the path, A alone.

    Attributes:
        open: ``[R]`` no node survived yet.
        last: ``[R]`` the survivor; the root, which always survives, until there is one.
    """

    def __init__(self, tree: TokenTree, p: Tensor, q: Tensor, noise: Randomness):
        self.tree, self.p, self.q, self.noise = tree, p, q, noise
        self.common = common(tree)
        self.A = {0: torch.ones_like(p[:, 0, 0])}
        self.left = {0: Remainder.of(p[:, 0], q[:, 0], tree.proposal)}
        self.last = torch.zeros_like(tree.tokens[:, 0])
        self.open = torch.ones_like(self.last, dtype=torch.bool)
        self.weights: Tensor | None = None  # [R, V] what is left of p at survivors that had children
        self.emptied = ~self.open  # [R] the survivor is one of these

    def enter(self, visit: Visit) -> None:
        """A of a node whose subtree is about to be visited, from its parent as it stands now."""
        if not any_row(self._here(visit.node)):
            return
        above = visit.depth - 1
        self.A[visit.depth] = (self.A[above] * self.left[above].ratio(self._token(visit.node))).clamp(max=1)
        if not visit.leaf:
            p, q = self._at(self.p, visit.node), self._at(self.q, visit.node)
            self.left[visit.depth] = Remainder.of(p, q, self.tree.proposal)

    def leave(self, visit: Visit) -> None:
        """A node without children, or without any that is left, survives with probability A, or is deleted and changes its parent."""
        here, depth = self._here(visit.node), visit.depth
        if not any_row(here):
            return
        survives = here
        if depth:
            node = self._own(visit.node)
            A = self.A[depth] if every_row(here) else torch.where(here, self.A[depth], 0)
            survives = here & self.noise.accept(A[:, None], node)[:, 0]
            self.last = torch.where(survives, node, self.last)
            self.open = self.open & ~survives
        if not visit.leaf and any_row(survives):
            left = self.left[depth].p
            self.weights = left if self.weights is None else torch.where(survives[:, None], left, self.weights)
            self.emptied = self.emptied | survives
        deleted = here & ~survives
        if depth and any_row(deleted):
            Z = self.left[depth - 1].reject(deleted, self._token(visit.node), self.A[depth - 1])
            if depth > 1:  # the root's A stays 1
                A = self.A[depth - 1]
                self.A[depth - 1] = torch.where(deleted, safe_ratio(Z, Z + (1 - A)), A)

    def weights_at_survivor(self) -> Tensor:
        """``[R, V]`` what the next token is drawn from: what is left of p at the survivor."""
        own = at_node(self.p, self.last)
        return own if self.weights is None else torch.where(self.emptied[:, None], self.weights, own)

    def _here(self, node: int) -> Tensor:
        """``[R]`` rows that visit ``node`` of the common tree."""
        return self.open if self.common.present is None else self.open & self.common.present[:, node]

    def _own(self, node: int) -> int | Tensor:
        """The number of ``node`` of the common tree in each row's own, ``[R]`` unless it is the same."""
        return node if self.common.nodes is None else self.common.nodes[:, node]

    def _token(self, node: int) -> Tensor:
        """``[R, 1]`` tokens of ``node`` of the common tree."""
        tokens = self.tree.tokens
        return tokens[:, node, None] if self.common.nodes is None else tokens.gather(1, self.common.nodes[:, node, None])

    def _at(self, values: Tensor, node: int) -> Tensor:
        """``[R, V]`` of ``values`` ``[R, M, V]`` at ``node`` of the common tree."""
        return values[:, min(node, values.shape[1] - 1)] if self.common.nodes is None else at_node(values, self.common.nodes[:, node])
