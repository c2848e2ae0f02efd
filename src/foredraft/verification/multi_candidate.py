"""Several candidates per node, tried in the order in which they were drawn: recursive rejection sampling.

I.i.d. siblings: SpecInfer (Miao et al. 2024), Theorem 4.2: accept x with min(1, p/q); after a rejection p <- N([p - q]+), q
stays. Drawn without replacement: recursive rejection (Sequoia, Chen et al. 2024): the same, and q[x] <- 0, renormalised,
because the next sibling was drawn from that. If all children of a node fail, the next token comes from the p that is left.
Every trial preserves: accepted mass + (1 - accepted) * N([p - q]+) = p.

Conditions: children come in draw order and all drawn children are in the tree; a duplicate i.i.d. sibling is a trial too.
Expected acceptance: 1 - prod_j TV(p_j, q_j) per node, with p_j and q_j what is left at the j-th trial. On a chain it equals
``rejection``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.logits.noise import Purpose, Randomness
from foredraft.tree import TokenTree
from foredraft.verification.base import Verdict
from foredraft.verification.host_trees import trials
from foredraft.verification.ratios import ComparesWithQ, Remainder, any_row, at_node


class MultiCandidate(ComparesWithQ):
    name = "multi-candidate"
    summary = "tries siblings one after the other against the residual of p; exact for sampled trees"
    proposals = ("without-replacement", "iid")

    def compare(self, tree: TokenTree, p: Tensor, q: Tensor, noise: Randomness) -> Verdict:
        at = torch.zeros_like(tree.tokens[:, 0])  # [R] node reached
        path, weights, plan = [at], p[:, 0], trials(tree)
        children = plan.children.expand(tree.rows, -1, -1)
        alive = torch.ones_like(at, dtype=torch.bool)
        accepted = at
        for width in plan.widths:
            below = children.gather(1, at[:, None, None].expand(-1, 1, children.shape[2]))[:, 0, :width]  # [R, width]
            left = Remainder.of(at_node(p, at), at_node(q, at), tree.proposal)
            won = try_children(tree, below, alive, left, noise)
            weights = torch.where(alive[:, None], left.p, weights)
            alive = won >= 0
            at, accepted = torch.where(alive, won, at), accepted + alive
            path.append(at)
            if not any_row(alive):
                break
        if any_row(alive):
            weights = torch.where(alive[:, None], at_node(p, at), weights)
        return Verdict(torch.stack(path, 1), accepted, noise.draw(weights, Purpose.RESIDUAL))


def try_children(tree: TokenTree, children: Tensor, alive: Tensor, left: Remainder, noise: Randomness) -> Tensor:
    """``[R]`` the first of the ``children`` ``[R, K]`` to be accepted in rows that are ``alive``, else -1; ``left`` shrinks."""
    won = torch.full_like(children[:, 0], -1)
    certain = torch.ones_like(left.p_mass)
    for node in children.unbind(1):
        tried = alive & (node >= 0) & (won < 0)
        node = node.clamp(min=0)
        if tree.valid is not None:
            tried = tried & tree.valid.gather(1, node[:, None])[:, 0]
        if not any_row(tried):
            continue
        x = tree.tokens.gather(1, node[:, None])
        passed = tried & noise.accept(torch.where(tried, left.ratio(x), 0)[:, None], node)[:, 0]
        won = torch.where(passed, node, won)
        lost = tried & ~passed
        if any_row(lost):
            left.reject(lost, x, certain)
    return won
