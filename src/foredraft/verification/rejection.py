"""Speculative sampling: accept x ~ q with probability min(1, p(x) / q(x)), else draw from the residual.

Leviathan, Kalman and Matias 2023, "Fast Inference from Transformers via Speculative Decoding", Algorithm 1; Chen et al.
2023, "Accelerating Large Language Model Decoding with Speculative Sampling". The identity it preserves, for every x:
min(p, q)(x) + (1 - sum(min(p, q))) * N([p - q]+)(x) = p(x). The expected acceptance of one token is 1 - TV(p, q).

Conditions: x was drawn from exactly the ``q`` given, with noise of its own, and every drawn token is in the chain.
A row that drafted greedily has a one-hot q; with a one-hot p (greedy decoding) the rule then equals ``match``.
"""

from __future__ import annotations

from torch import Tensor

from foredraft.logits.noise import Randomness
from foredraft.tree import TokenTree
from foredraft.verification.ratios import ComparesChains, chain_ratios


class Rejection(ComparesChains):
    name = "rejection"
    summary = "accepts with probability min(1, p/q), else samples from the residual; exact for sampled chains"
    blocks = False

    def judge(self, tree: TokenTree, p: Tensor, q: Tensor, noise: Randomness) -> tuple[Tensor, None]:
        kept = noise.accept(chain_ratios(tree.tokens, p, q))  # u < p/q, strictly
        if tree.valid is not None:
            kept = kept & tree.valid[:, 1:]
        return kept.cumprod(1).sum(1), None
