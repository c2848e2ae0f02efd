"""The match rule: the target chooses its own token at every node; a drafted token survives iff it is that choice.

Greedy decoding, and sampling with keyed noise: y = argmin_v E[position, v] / p(v) with E ~ Exp(1) has law p, and is
emitted whatever was drafted, so the output law is the target's for any proposal that does not depend on the verifier's
noise; and for proposals that share the noise (``keyed``) the text is a function of the seed alone (Daliri et al. 2024,
"Coupling without Communication and Drafter-Invariant Speculative Decoding").
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.sampling import ALONE, Randomness
from foretoken.tree import TokenTree
from foretoken.verification.base import Rule, Verdict, walk


class Match(Rule):
    name = "match"
    summary = "the target's own choice at every node, greedy or with keyed noise; exact for every proposal"
    proposals = ("keyed", "mixed", "deterministic", "without-replacement", "iid")

    def verify(self, tree: TokenTree, p: Tensor, noise: Randomness) -> Verdict:
        if tree.chain and p.device.type == "cpu" and p.shape[-1] >= ALONE:
            return follow(tree, choices_as_needed(tree, p, noise))
        return follow(tree, noise.race(p, tree.depths))


def choices_as_needed(tree: TokenTree, p: Tensor, noise: Randomness) -> Tensor:
    """``[R, N]`` the target's choices along chains, up to where the last row leaves its draft.

    Over a large vocabulary a race costs more than looking, where looking needs no wait for a device. What is not chosen
    stays 0, and lies behind a mismatch.
    """
    choices = torch.zeros_like(tree.tokens)
    alive = torch.ones_like(tree.tokens[:, 0], dtype=torch.bool)
    for node in range(tree.nodes):
        choices[:, node] = noise.race(p[:, node : node + 1], tree.depths[:, node : node + 1])[:, 0]
        if node + 1 < tree.nodes:
            alive &= tree.tokens[:, node + 1] == choices[:, node]
            if tree.valid is not None:
                alive &= tree.valid[:, node + 1]
            if not bool(alive.any()):
                break
    return choices


def follow(tree: TokenTree, choices: Tensor) -> Verdict:
    """Walk from the root along the drafted tokens that equal the target's ``choices`` ``[R, N]``."""
    chosen = choices.roll(1, 1) if tree.chain else choices.gather(1, tree.parents.clamp(min=0))
    verdict = walk(tree, tree.tokens == chosen)
    last = verdict.accepted[:, None] if tree.chain else verdict.path.gather(1, verdict.accepted[:, None])
    return Verdict(verdict.path, verdict.accepted, choices.gather(1, last)[:, 0])
