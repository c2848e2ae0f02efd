"""Typical acceptance (lossy): a drafted token survives if the target finds it likely enough, for how sure the target is.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", section 2.3.1. Below a node
whose distribution is p with entropy H(p), token x is accepted iff p(x) > min(ε, δ exp(-H(p))). The longest accepted prefix
wins, ties by its probability under p, and the next token is argmax p: the root of the next tree, which is therefore always the
greedy choice, as in the paper.

What it does to the output distribution: nothing is random any more once the draft is given. Tokens under the threshold never come, the
root is greedy, and what comes among the likely ones is what the drafter prefers: the output distribution is not the target's. A row that
decodes greedily has a one-hot p, and only its argmax passes. Expected acceptance: a child drawn from q survives with probability
sum of q(x) over x with p(x) > min(ε, δ exp(-H(p))), so a drafter that proposes only likely tokens is never refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.errors import ConfigurationError
from foredraft.logits.noise import Randomness
from foredraft.tree import TokenTree
from foredraft.verification.base import Rule, Verdict, path_to, reached
from foredraft.verification.ratios import at_node


class Typical(Rule):
    """Args: ``epsilon``, a probability that is always enough; ``delta``, the share of exp(-H), a typical token's probability, that is."""

    name = "typical"
    summary = "accepts tokens above an entropy-dependent threshold (Medusa); changes the output distribution"
    proposals = ("mixed", "deterministic", "without-replacement", "iid", "keyed")
    lossless = False

    def __init__(self, *, epsilon: float = 0.09, delta: float = 0.3):
        for name, value in {"epsilon": epsilon, "delta": delta}.items():
            if not 0 < value < 1:
                raise ConfigurationError(f"rule 'typical': {name} must lie between 0 and 1, got {value!r}")
        self.epsilon, self.delta = epsilon, delta

    def verify(self, tree: TokenTree, p: Tensor, noise: Randomness) -> Verdict:
        parents = tree.parents.clamp(min=0)
        p_x = p.flatten(1).gather(1, parents * p.shape[2] + tree.tokens)  # [R, N]
        passes = p_x > self.threshold(tree, p).gather(1, parents)
        if tree.valid is not None:
            passes = passes & tree.valid
        kept = reached(tree, passes)
        depth = (tree.depths * kept).amax(1, keepdim=True)  # [R, 1]
        likelihood = torch.where(tree.ancestors, p_x.log()[:, None], 0)[..., 1:].sum(-1)  # [R, N], the root's token left out
        last = torch.where(kept & (tree.depths == depth), likelihood, float("-inf")).argmax(1)
        path, accepted = path_to(tree, last)
        return Verdict(path, accepted, at_node(p, last).argmax(-1))

    def threshold(self, tree: TokenTree, p: Tensor) -> Tensor:
        """``[R, N]`` what a child's probability must exceed; left 1 at nodes that are known to have no child."""
        parents = tree.layout
        inner = list(range(tree.nodes)) if parents is None else sorted({parent for parent in parents if parent >= 0})
        bound = torch.ones_like(p[..., 0])
        for node in inner:  # one at a time: over a large vocabulary the entropies of a whole tree would fill the memory
            entropy = torch.special.entr(p[:, node]).sum(-1)
            bound[:, node] = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
        return bound
