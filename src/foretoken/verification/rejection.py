"""Speculative sampling: accept x ~ q with probability min(1, p(x) / q(x)), else draw from the residual.

Leviathan, Kalman and Matias 2023, "Fast Inference from Transformers via Speculative Decoding", Algorithm 1; Chen et al.
2023, "Accelerating Large Language Model Decoding with Speculative Sampling". The identity it preserves, for every x:
min(p, q)(x) + (1 - sum(min(p, q))) * N([p - q]+)(x) = p(x). The expected acceptance of one token is 1 - TV(p, q).

Conditions: x was drawn from exactly the ``q`` given, with noise of its own, and every drawn token is in the chain.
A row that drafted greedily has a one-hot q; with a one-hot p (greedy decoding) the rule then equals ``match``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.sampling import Purpose, Randomness
from foretoken.tree import TokenTree
from foretoken.verification.base import Rule, Verdict


class Rejection(Rule):
    name = "rejection"
    summary = "accept with probability min(1, p/q), else resample from the residual; exact for sampled chains"
    proposals = ("iid",)
    chains_only = True
    needs_q = True

    def verify(self, tree: TokenTree, p: Tensor, noise: Randomness) -> Verdict:
        if tree.nodes == 1:
            return Verdict(tree.depths, torch.zeros_like(tree.tokens[:, 0]), noise.draw(p[:, 0], Purpose.RESIDUAL))
        if tree.q is None:
            raise ValueError("rule 'rejection' needs the draft's q at every node that has a child")
        q = tree.q[:, : tree.nodes - 1]
        drafted = tree.tokens[:, 1:, None]
        p_x, q_x = p[:, :-1].gather(2, drafted)[..., 0], q.gather(2, drafted)[..., 0]  # [R, γ]
        ratio = torch.where(q_x > 0, p_x / q_x.clamp(min=torch.finfo(q_x.dtype).tiny), torch.zeros_like(p_x))
        kept = noise.accept(ratio)  # u < p/q, strictly
        if tree.valid is not None:
            kept = kept & tree.valid[:, 1:]
        accepted = kept.cumprod(1).sum(1)
        return Verdict(tree.depths, accepted, noise.draw(residual(tree, p, q, accepted), Purpose.RESIDUAL))


def residual(tree: TokenTree, p: Tensor, q: Tensor, accepted: Tensor) -> Tensor:
    """``[R, V]`` weights of the token after the accepted prefix: [p - q]+ after a rejection, p after a whole chain."""
    at = accepted[:, None, None]
    p_at = p.gather(1, at.expand(-1, 1, p.shape[2]))[:, 0]
    q_at = q.gather(1, at.clamp(max=q.shape[1] - 1).expand(-1, 1, q.shape[2]))[:, 0]
    rejected = accepted < tree.drafted
    left = torch.where(rejected[:, None], (p_at - q_at).clamp(min=0), p_at)
    # A residual that sums to nothing is reached by rounding only (p = q): any draw from p is right then.
    return torch.where(left.sum(1, keepdim=True) > 0, left, p_at)
