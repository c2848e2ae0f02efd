"""Lenient speculative sampling (lossy): rejection that asks less of the target by a factor ε, the lenience.

Zhou et al. 2024, "DistillSpec: Improving Speculative Decoding via Knowledge Distillation"; Leviathan et al. 2023, "Fast Inference
from Transformers via Speculative Decoding", appendix A.5. Token x ~ q is accepted with probability min(1, p(x) / (ε q(x))). After a
rejection the token is drawn from N([p - ε q]+).

What it does to the output distribution: with S = sum(min(p, ε q)), a drafted position's token has the distribution
min(q, p / ε) + (1 - S / ε) / (1 - S) * [p - ε q]+. No token becomes likelier than p(x) / ε. With ε = 1 this is p, and the rule is
``rejection``, bit for bit; as ε falls it goes to q, where p is not 0. The token after a whole chain is drawn from p. A row that
decodes greedily has one-hot p and q, and the text is the target's. The expected acceptance of one token is S / ε.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.errors import ConfigurationError
from foredraft.logits.noise import Randomness
from foredraft.tree import TokenTree
from foredraft.verification.base import Verdict
from foredraft.verification.ratios import residual
from foredraft.verification.rejection import Rejection

LEAST = 1e-6  # times q, this is still a number that float32 holds


class Lenient(Rejection):
    """Args: ``epsilon``, the lenience: 1 is ``rejection``, and near 0 the draft is hardly checked."""

    name = "lenient"
    summary = "as rejection, with min(1, p/(epsilon q)) (DistillSpec); changes the output distribution"
    lossless = False

    def __init__(self, *, epsilon: float = 0.5):
        if not LEAST <= epsilon <= 1:
            raise ConfigurationError(f"rule 'lenient': epsilon must lie between {LEAST:g} and 1, got {epsilon!r}")
        self.epsilon = epsilon

    def compare(self, tree: TokenTree, p: Tensor, q: Tensor, noise: Randomness) -> Verdict:
        return super().compare(tree, p, self.epsilon * q, noise)

    def law(self, p: Tensor, q: Tensor) -> Tensor:
        """``[R, V]`` the distribution of a drafted position's token, for ``p`` and ``q`` ``[R, V]``."""
        kept = torch.minimum(q, p / self.epsilon)
        left = residual(p, self.epsilon * q)
        return kept + (1 - kept.sum(-1, keepdim=True)) * left / left.sum(-1, keepdim=True)
