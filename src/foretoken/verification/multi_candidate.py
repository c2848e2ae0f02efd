"""Several candidates per node, tried in the order in which they were drawn: recursive rejection sampling.

I.i.d. siblings: SpecInfer (Miao et al. 2024), Theorem 4.2: accept x with min(1, p/q); after a rejection p <- N([p - q]+), q
stays. Drawn without replacement: recursive rejection (Sequoia, Chen et al. 2024): the same, and q[x] <- 0, renormalised,
because the next sibling was drawn from that. If all children of a node fail, the next token comes from the p that is left.
Every trial preserves: accepted mass + (1 - accepted) * N([p - q]+) = p, and accepts with 1 - TV of what is left of p and q.

Conditions: children come in draw order and all drawn children are in the tree; a duplicate i.i.d. sibling is a trial too.
On a chain it equals ``rejection``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.sampling import Purpose, Randomness
from foretoken.tree import TokenTree
from foretoken.verification.base import Verdict
from foretoken.verification.ratios import ComparesWithQ, at_node, residual, safe_ratio


class MultiCandidate(ComparesWithQ):
    name = "multi-candidate"
    summary = "tries siblings one after the other against what is left of p; exact for sampled trees"
    proposals = ("without-replacement", "iid")

    def compare(self, tree: TokenTree, p: Tensor, q: Tensor, noise: Randomness) -> Verdict:
        at = torch.zeros_like(tree.tokens[:, 0])  # [R] node reached
        accepted, path = torch.zeros_like(at), torch.zeros_like(tree.tokens)
        p_at, q_at = (
            p[:, 0],
            p[:, 0] if tree.q is None else tree.q[:, 0],
        )  # [R, V] what is left of p, and what the next child was drawn from
        # Parents come before children and siblings in draw order, so one pass over the nodes visits every trial in order.
        for node in range(1, tree.nodes):
            x = tree.tokens[:, node, None]
            tried = tree.parents[:, node] == at
            if tree.valid is not None:
                tried = tried & tree.valid[:, node]
            q_x = q_at.gather(1, x)
            ratio = torch.where(q_x > 0, safe_ratio(p_at.gather(1, x), q_x), 0)
            won = tried & noise.accept(torch.where(tried[:, None], ratio, 0), node)[:, 0]
            lost = (tried & ~won)[:, None]
            left = residual(p_at, q_at)
            p_at = torch.where(lost, left / left.sum(-1, keepdim=True), p_at)
            if tree.proposal == "without-replacement":
                q_at = torch.where(lost, without(q_at, x), q_at)
            p_at = torch.where(won[:, None], p[:, node], p_at)
            q_at = torch.where(won[:, None], at_node(q, torch.full_like(at, node)), q_at)
            accepted = accepted + won
            at = torch.where(won, node, at)
            path = torch.where(won[:, None], path.scatter(1, accepted[:, None], node), path)
        return Verdict(path, accepted, noise.draw(p_at, Purpose.RESIDUAL))


def without(q: Tensor, x: Tensor) -> Tensor:
    """``q`` ``[R, V]`` without token ``x`` ``[R, 1]``, renormalised; nothing where x was all there was."""
    rest = q.scatter(1, x, 0)
    return safe_ratio(rest, rest.sum(-1, keepdim=True))
