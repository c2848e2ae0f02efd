"""K-sequential selection: i.i.d. siblings, each accepted with min(1, p / (ρ q)), with one ρ for all k of them.

Sun et al. 2023, "SpecTr: Fast Speculative Decoding via Optimal Transport", Algorithm 3. With b(ρ) = sum_x min(q, p / ρ), ρ in
[1, k] solves 1 - (1 - b)^k = ρ b; with A = 1 - (1 - b)^k, the token after k failures comes from p - min(q, p / ρ) A / b,
normalised. The identity it preserves: min(q, p / ρ) A / b + (1 - A) * residual = p.

Conditions: siblings are i.i.d. draws from q, duplicates included, none dropped, and how many there are does not depend on
them: growth that looks at siblings before it adds another one needs ``multi-candidate`` or ``traversal``. Any ρ from its root
upwards is exact; below the root the residual would be negative, so ρ is rounded up. Expected acceptance: A per node, at least
(1 - 1/e) times what the best possible rule would reach. With one child it equals ``rejection``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.logits.noise import Purpose, Randomness
from foredraft.tree import TokenTree
from foredraft.verification.base import Verdict
from foredraft.verification.ratios import ComparesWithQ, any_row, at_node, safe_ratio

BISECTIONS = 20  # leaves ρ at most (k - 1) / 2^20 above its root


class KSeq(ComparesWithQ):
    name = "k-seq"
    summary = "judges k siblings against one threshold (SpecTr); exact for i.i.d. trees"
    proposals = ("iid",)

    def compare(self, tree: TokenTree, p: Tensor, q: Tensor, noise: Randomness) -> Verdict:
        at = torch.zeros_like(tree.tokens[:, 0])  # [R] node reached
        path, accepted, left = [at], at, p[:, 0]
        alive = torch.ones_like(at, dtype=torch.bool)
        for _ in range(tree.height):
            children = (tree.parents == at[:, None]) & alive[:, None]  # [R, N]
            if tree.valid is not None:
                children = children & tree.valid
            k = children.sum(1)
            q_at = at_node(q, at)
            kept = torch.minimum(q_at, left / threshold(left, q_at, k)[:, None])  # [R, V]
            chance = safe_ratio(kept.gather(1, tree.tokens), q_at.gather(1, tree.tokens))  # min(1, p / (ρ q))
            passes = noise.accept(torch.where(children, chance, 0)) & children
            won = passes.any(1)
            left = torch.where((k > 0)[:, None], rest(left, kept, k), left)
            at = torch.where(won, passes.int().argmax(1), at)  # the first in draw order
            left = torch.where(won[:, None], at_node(p, at), left)
            alive, accepted = won, accepted + won
            path.append(at)
            if not any_row(alive):
                break
        return Verdict(torch.stack(path, 1), accepted, noise.draw(left, Purpose.RESIDUAL))


def rest(p: Tensor, kept: Tensor, k: Tensor) -> Tensor:
    """``[R, V]`` weights after all ``k`` ``[R]`` children failed, from ``p`` and ``kept`` = min(q, p / ρ), ``[R, V]``."""
    b = kept.sum(-1, keepdim=True)
    left = (p - kept * safe_ratio(1 - (1 - b).clamp(min=0) ** k[:, None], b)).clamp(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def threshold(p: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """``[R]`` ρ by bisection; the upper end is returned, where 1 - (1 - b)^k <= ρ b surely holds."""
    low = torch.ones_like(p[:, 0])
    high = k.clamp(min=1).to(p.dtype)
    for _ in range(BISECTIONS):
        rho = (low + high) / 2
        b = torch.minimum(q, p / rho[:, None]).sum(-1)
        enough = 1 - (1 - b).clamp(min=0) ** k <= rho * b
        low, high = torch.where(enough, low, rho), torch.where(enough, rho, high)
    return high
