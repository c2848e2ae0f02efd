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
from foretoken.verification.base import Rule, Verdict


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
    if tree.chain:
        return _follow_chain(tree, choices)
    at = torch.zeros(tree.rows, dtype=torch.long, device=choices.device)  # [R] current node
    accepted, alive = torch.zeros_like(at), torch.ones_like(at, dtype=torch.bool)
    path = [at]
    for _ in range(tree.nodes - 1):
        choice = choices.gather(1, at[:, None])
        child = (tree.parents == at[:, None]) & (tree.tokens == choice)  # [R, N]
        if tree.valid is not None:
            child &= tree.valid
        alive = alive & child.any(1)
        at = torch.where(alive, child.to(torch.int8).argmax(1), at)
        accepted = accepted + alive
        path.append(at)
    return Verdict(torch.stack(path, 1), accepted, choices.gather(1, at[:, None])[:, 0])


def _follow_chain(tree: TokenTree, choices: Tensor) -> Verdict:
    if tree.nodes == 1:
        none = torch.zeros(tree.rows, dtype=torch.long, device=choices.device)
        return Verdict(tree.depths, none, choices[:, 0])
    hit = tree.tokens[:, 1:] == choices[:, :-1]  # [R, N - 1]
    if tree.valid is not None:
        hit = hit & tree.valid[:, 1:]
    accepted = hit.cumprod(1).sum(1)
    return Verdict(tree.depths, accepted, choices.gather(1, accepted[:, None])[:, 0])
