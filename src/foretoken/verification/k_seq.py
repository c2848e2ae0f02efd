"""K-sequential selection: i.i.d. siblings, each accepted with min(1, p / (ρ q)), with one ρ for all k of them.

Sun et al. 2023, "SpecTr: Fast Speculative Decoding via Optimal Transport", Algorithm 3. With b(ρ) = sum_x min(q, p / ρ), ρ in
[1, k] solves 1 - (1 - b)^k = ρ b; with A = 1 - (1 - b)^k, the token after k failures comes from p - min(q, p / ρ) A / b,
normalised. The identity it preserves: min(q, p / ρ) A / b + (1 - A) * residual = p. A node accepts one of its children with
probability A, at least (1 - 1/e) times what the best possible rule would.

Conditions: siblings are i.i.d. draws from q, duplicates included, none dropped. ρ is rounded up: below its
root the residual would be negative.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.sampling import Purpose, Randomness
from foretoken.tree import TokenTree
from foretoken.verification.base import Verdict, walk
from foretoken.verification.ratios import ComparesWithQ, at_node, safe_ratio

BISECTIONS = 60


class KSeq(ComparesWithQ):
    name = "k-seq"
    summary = "one threshold for all k siblings (SpecTr); exact for i.i.d. trees"
    proposals = ("iid",)

    def compare(self, tree: TokenTree, p: Tensor, q: Tensor, noise: Randomness) -> Verdict:
        inner = min(q.shape[1], tree.nodes)
        q, p_inner = q[:, :inner], p[:, :inner]
        k = children(tree)[:, :inner]  # [R, M]
        rho = threshold(p_inner, q, k)  # [R, M]
        kept = torch.minimum(q, p_inner / rho[..., None])  # [R, M, V]
        parents, x = tree.parents[:, 1:].clamp(max=inner - 1), tree.tokens[:, 1:]
        pick = parents * p.shape[2] + x
        chance = safe_ratio(kept.flatten(1).gather(1, pick), q.flatten(1).gather(1, pick))  # min(1, p / (ρ q)) at each child
        passes = noise.accept(chance, 1)
        verdict = walk(tree, torch.cat([torch.zeros_like(passes[:, :1]), passes], 1))
        last = verdict.path.gather(1, verdict.accepted[:, None])[:, 0]
        return Verdict(verdict.path, verdict.accepted, noise.draw(self.rest(p, kept, k, last), Purpose.RESIDUAL))

    @staticmethod
    def rest(p: Tensor, kept: Tensor, k: Tensor, last: Tensor) -> Tensor:
        """``[R, V]`` weights after all children of node ``last`` failed; p itself at a leaf."""
        p_at, kept_at = at_node(p, last), at_node(kept, last)
        count = torch.where(last < k.shape[1], k.gather(1, last[:, None].clamp(max=k.shape[1] - 1))[:, 0], 0)[:, None]
        b = kept_at.sum(-1, keepdim=True)
        left = (p_at - kept_at * safe_ratio(1 - (1 - b) ** count, b)).clamp(min=0)
        return torch.where((count > 0) & (left.sum(-1, keepdim=True) > 0), left, p_at)


def children(tree: TokenTree) -> Tensor:
    """``[R, N]`` number of valid children of every node."""
    real = torch.ones_like(tree.tokens) if tree.valid is None else tree.valid.long()
    return torch.zeros_like(tree.tokens).scatter_add(1, tree.parents.clamp(min=0)[:, 1:], real[:, 1:])


def threshold(p: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """``[R, M]`` ρ by bisection; the upper end is returned, where 1 - (1 - b)^k <= ρ b surely holds."""
    low = torch.ones_like(p[..., 0])
    high = k.clamp(min=1).to(p.dtype)
    for _ in range(BISECTIONS):
        rho = (low + high) / 2
        b = torch.minimum(q, p / rho[..., None]).sum(-1)
        enough = 1 - (1 - b) ** k <= rho * b
        low, high = torch.where(enough, low, rho), torch.where(enough, rho, high)
    return high
