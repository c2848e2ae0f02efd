"""Traversal verification: block verification for trees, leaves first.

Weng et al. 2025, "Traversal Verification for Speculative Tree Decoding". A(root) = 1 and A(child) = min(1, A(parent) p(x) / q(x))
with the parent's p and q. Leaves are visited depth first, children in draw order. Leaf v survives with probability A(v): then the
whole path to it is kept and the next token comes from v's current p. Otherwise v is deleted, and its parent, with
R = [A p - q]+ and Z = sum R, gets A <- Z / (Z + 1 - A) and p <- R / Z; drawn without replacement, also q[x] <- 0, renormalised.
A parent without children is a leaf; the root's A stays 1, so the walk ends there. On a chain it equals ``block``.

Conditions: those of ``multi-candidate``. Duplicate i.i.d. siblings are separate nodes with subtrees and deletions of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.sampling import Purpose, Randomness
from foretoken.tree import TokenTree
from foretoken.verification.base import Verdict
from foretoken.verification.multi_candidate import without
from foretoken.verification.ratios import ComparesWithQ, safe_ratio


class Traversal(ComparesWithQ):
    name = "traversal"
    summary = "block verification for trees, leaves first; exact for sampled trees"
    proposals = ("without-replacement", "iid")

    def compare(self, tree: TokenTree, p: Tensor, q: Tensor, noise: Randomness) -> Verdict:
        state = _State(tree, p, q)
        for nodes, leaving in schedule(tree):
            if not all(leaving):
                state.enter(nodes, leaving)
            if any(leaving):
                state.leave(nodes, leaving, noise)
        path, accepted = path_to(tree, state.last)
        return Verdict(path, accepted, noise.draw(state.p[state.rows, state.last], Purpose.RESIDUAL))


class _State:
    """What is left of the tree: A ``[R, N]``, p ``[R, N, V]`` and q ``[R, M, V]`` at every node, and the survivor ``last`` ``[R]``."""

    def __init__(self, tree: TokenTree, p: Tensor, q: Tensor):
        self.tree, self.p, self.q = tree, p.clone(), q
        self.replaced = tree.proposal == "without-replacement"
        if self.replaced:
            self.q = q.clone()
        self.rows = torch.arange(tree.rows, device=p.device)
        self.A = torch.ones_like(p[..., 0])
        self.last = torch.zeros_like(tree.tokens[:, 0])
        self.open = torch.ones_like(self.last, dtype=torch.bool)

    def enter(self, nodes: Sequence[int], leaving: Sequence[bool]) -> None:
        """A of nodes whose subtrees are about to be visited, from their parents as they stand now."""
        node, parent, x = self._at(nodes)
        q_x = self.q[self.rows, parent.clamp(max=self.q.shape[1] - 1), x]
        ratio = torch.where(q_x > 0, safe_ratio(self.p[self.rows, parent, x], q_x), 0)
        value = (self.A[self.rows, parent] * ratio).clamp(max=1)
        self.A[self.rows, node] = torch.where(self._mask(leaving), self.A[self.rows, node], value)

    def leave(self, nodes: Sequence[int], leaving: Sequence[bool], noise: Randomness) -> None:
        """Leaves survive with probability A, or are deleted and change their parents."""
        node, parent, x = self._at(nodes)
        trying = self._mask(leaving) & self.open
        survives = trying & noise.accept(torch.where(trying, self.A[self.rows, node], 0)[:, None], node)[:, 0]
        self.last = torch.where(survives, node, self.last)
        self.open = self.open & ~survives
        deleted = trying & ~survives & (node > 0)
        A, p, q = self.A[self.rows, parent], self.p[self.rows, parent], self.q[self.rows, parent.clamp(max=self.q.shape[1] - 1)]
        left = (A[:, None] * p - q).clamp(min=0)  # [R, V]
        Z = left.sum(-1)
        risen = torch.where(parent > 0, safe_ratio(Z, Z + (1 - A)), 1)
        self.A[self.rows, parent] = torch.where(deleted, risen, A)
        self.p[self.rows, parent] = torch.where((deleted & (Z > 0))[:, None], left / Z[:, None], p)
        if self.replaced:
            self.q[self.rows, parent.clamp(max=self.q.shape[1] - 1)] = torch.where(deleted[:, None], without(q, x[:, None]), q)

    def _at(self, nodes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        node = torch.tensor(nodes, device=self.rows.device)
        return node, self.tree.parents[self.rows, node].clamp(min=0), self.tree.tokens[self.rows, node]

    def _mask(self, leaving: Sequence[bool]) -> Tensor:
        return torch.tensor(leaving, device=self.rows.device)


def schedule(tree: TokenTree) -> list[tuple[list[int], list[bool]]]:
    """Depth-first visits, in lockstep over the rows: per step each row's node, and whether it is left or entered.

    A row that is done leaves its root again, which changes nothing any more.
    """
    valid = None if tree.valid is None else tree.valid.tolist()
    rows = [_visits(parents, None if valid is None else valid[row]) for row, parents in enumerate(tree.parents.tolist())]
    longest = max(map(len, rows))
    padded = [visits + [(0, True)] * (longest - len(visits)) for visits in rows]
    return [([node for node, _ in step], [leaving for _, leaving in step]) for step in zip(*padded)]


def _visits(parents: Sequence[int], valid: Sequence[bool] | None) -> list[tuple[int, bool]]:
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0 and (valid is None or valid[node]):
            children[parent].append(node)
    visits, stack = [], [(0, True)] + [(child, False) for child in reversed(children[0])]
    while stack:
        node, leaving = stack.pop()
        visits.append((node, leaving))
        if not leaving:
            stack.append((node, True))
            stack += [(child, False) for child in reversed(children[node])]
    return visits


def path_to(tree: TokenTree, last: Tensor) -> tuple[Tensor, Tensor]:
    """``[R, N]`` nodes from the root to ``last`` ``[R]``, and how many tokens below the root that is."""
    index = torch.arange(tree.nodes, device=last.device)[None]
    on_path = tree.ancestors[torch.arange(tree.rows, device=last.device), last]  # [R, N]
    path = torch.where(on_path, index, tree.nodes).sort(1).values  # ancestors come first, and in order
    return path.clamp(max=tree.nodes - 1), on_path.sum(1) - 1
