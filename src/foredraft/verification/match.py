"""The match rule: the target chooses its own token at every node; a drafted token survives iff it is that choice.

Greedy decoding, and sampling with keyed noise: y = argmin_v E[position, v] / p(v) with E ~ Exp(1) has law p, and is
emitted whatever was drafted, so the output law is the target's for any proposal that does not depend on the verifier's
noise; and for proposals that share the noise (``keyed``) the text is a function of the seed alone (Daliri et al. 2024,
"Coupling without Communication and Drafter-Invariant Speculative Decoding").

Conditions: none on how nodes were chosen, dropped or merged, as long as the verifier's noise had no part in it other than
through ``keyed``. Expected acceptance: children whose tokens make up the set S let a node go on with probability p(S), which no
rule betters where S is deterministic. A keyed child does with sum_j 1 / sum_i max(p_i / p_j, q_i / q_j), j over the common
support, at least (1 - TV) / (1 + TV); an independent draw from q only with sum_x p(x) q(x).
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.logits.noise import ALONE, Randomness
from foredraft.tree import TokenTree
from foredraft.verification.base import Rule, Verdict, path_to, walk


class Match(Rule):
    name = "match"
    summary = "accepts what the target itself chooses, greedily or with keyed noise; exact for every draft"
    proposals = ("keyed", "mixed", "deterministic", "without-replacement", "iid")

    def verify(self, tree: TokenTree, p: Tensor, noise: Randomness) -> Verdict:
        if p.device.type == "cpu" and p.shape[-1] >= ALONE:
            return level_by_level(tree, p, noise)
        return follow(tree, noise.race(p, tree.depths))


def level_by_level(tree: TokenTree, p: Tensor, noise: Randomness) -> Verdict:
    """As :func:`follow`, racing only at nodes that the walk comes to, until the last row has left its draft.

    Over a large vocabulary a race costs more than looking, where looking needs no wait for a device. Nodes that are reached
    at one depth say the same text, so that the first of them speaks for all.
    """
    rows, parents = torch.arange(tree.rows), tree.parents.clamp(min=0)
    reached = torch.zeros_like(tree.tokens, dtype=torch.bool)
    reached[:, 0] = True  # and then the nodes reached at one depth
    going = torch.ones_like(reached[:, 0])
    last = torch.zeros_like(tree.tokens[:, 0])
    choice = last
    for depth in range(tree.height + 1):
        last = torch.where(going, reached.int().argmax(1), last)
        first = int(last[0])
        p_at = p[:, first] if bool((last == first).all()) else p[rows, last]
        drawn = noise.race(p_at[:, None], torch.full_like(last, depth)[:, None])[:, 0]
        choice = torch.where(going, drawn, choice)
        reached = reached.gather(1, parents) & (tree.tokens == choice[:, None])
        reached[:, 0] = False
        if tree.valid is not None:
            reached &= tree.valid
        going = reached.any(1)
        if not bool(going.any()):
            break
    if tree.chain:
        return Verdict(tree.depths, last, choice)
    path, accepted = path_to(tree, last)
    return Verdict(path, accepted, choice)


def follow(tree: TokenTree, choices: Tensor) -> Verdict:
    """Walk from the root along the drafted tokens that equal the target's ``choices`` ``[R, N]``."""
    chosen = choices.roll(1, 1) if tree.chain else choices.gather(1, tree.parents.clamp(min=0))
    verdict = walk(tree, tree.tokens == chosen)
    last = verdict.accepted[:, None] if tree.chain else verdict.path.gather(1, verdict.accepted[:, None])
    return Verdict(verdict.path, verdict.accepted, choices.gather(1, last)[:, 0])
