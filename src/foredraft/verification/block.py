"""Block verification: judge the whole draft at once; never keeps fewer tokens in expectation than ``rejection``.

Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", Algorithm 2. With P_0 = 1 and
P_i = min(1, P_{i-1} p(x_i) / q(x_i)), Z_i = sum_x [P_i p(x | X^i) - q(x | X^i)]+, h_i = Z_i / (Z_i + 1 - P_i) for i < γ and
h_γ = P_γ, the number of tokens kept is the *last* i with u_i < h_i (stopping at the first failure would be biased). The
next token comes from p after a whole draft, else from N([P_τ p - q]+). The identity it preserves: Pr(τ >= i | X^i) = P_i,
so that E[tokens] = 1 + sum_i E[P_i].

Conditions: those of ``rejection``; q must be the whole distribution at every node. With a one-hot q it equals ``rejection``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.logits.noise import Randomness
from foredraft.tree import TokenTree
from foredraft.verification.ratios import ComparesChains, chain_ratios, safe_ratio


class Block(ComparesChains):
    name = "block"
    summary = "judges the whole draft; accepts at least as much as rejection on average; exact for sampled chains"
    blocks = True

    def judge(self, tree: TokenTree, p: Tensor, q: Tensor, noise: Randomness) -> tuple[Tensor, Tensor]:
        index, drafted = torch.arange(1, tree.nodes, device=p.device), tree.drafted[:, None]
        P = survival(chain_ratios(tree.tokens, p, q))
        h = torch.where(index <= drafted, chances(P, p, q, drafted), 0)
        accepted = (noise.accept(h) * index).amax(1)  # the last that passed, not the first that failed
        return accepted, P.gather(1, accepted[:, None])[:, 0]


def survival(ratios: Tensor) -> Tensor:
    """``[R, γ + 1]`` P_0 … P_γ from ``ratios`` ``[R, γ]``: the chance that at least so many tokens survive."""
    P = [torch.ones_like(ratios[:, 0])]
    for ratio in ratios.unbind(1):
        P.append((P[-1] * ratio).clamp(max=1))
    return torch.stack(P, 1)


def chances(P: Tensor, p: Tensor, q: Tensor, drafted: Tensor) -> Tensor:
    """``[R, γ]`` h_1 … h_γ for rows that ``drafted`` ``[R, 1]`` tokens; h is P at the end of a row's own draft."""
    inner = P[:, 1:-1]
    Z = (inner[..., None] * p[:, 1:-1] - q[:, 1:]).clamp(min=0).sum(-1)  # [R, γ - 1], at nodes 1 … γ - 1
    h = torch.cat([safe_ratio(Z, Z + (1 - inner)), P[:, -1:]], 1)  # Z + (1 - P), never (Z + 1) - P, which cancels
    index = torch.arange(1, P.shape[1], device=P.device)[None]
    return torch.where(index == drafted, P[:, 1:], h)
