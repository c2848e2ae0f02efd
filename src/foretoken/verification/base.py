"""What a verification rule is.

A rule is a pure function of (tree, p, noise): no model, no cache, no global random state. It sees the target's
distribution at every node and says which path survives and which token of the target's own follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foretoken.sampling import Randomness
from foretoken.tree import Proposal, TokenTree


@dataclass(frozen=True, eq=False)
class Verdict:
    """The outcome of one round for R rows.

    Attributes:
        path: ``[R, D]`` int64 node indices, the root first; entries after ``accepted`` are meaningless.
        accepted: ``[R]`` int64 number of drafted tokens kept, 0 to D - 1.
        next_token: ``[R]`` int64 the target's own token that follows the path.
    """

    path: Tensor
    accepted: Tensor
    next_token: Tensor


class Rule:
    """Base of verification rules; a subclass sets the class variables and writes :meth:`verify`.

    ``proposals`` are the sibling choices it is exact for, those it accepts most first, ``chains_only`` that a tree must be a
    chain, ``needs_q`` that it compares with the draft's own distribution, ``lossless`` that the output law is the target's.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    proposals: ClassVar[tuple[Proposal, ...]]
    chains_only: ClassVar[bool] = False
    needs_q: ClassVar[bool] = False
    lossless: ClassVar[bool] = True

    def verify(self, tree: TokenTree, p: Tensor, noise: Randomness) -> Verdict:
        """Verdict for ``tree`` given the target's ``p`` ``[R, N, V]`` (rows sum to 1) at every node."""
        raise TypeError(f"{type(self).__name__} must define verify(tree, p, noise)")

    def refusal(self, proposal: str, *, chain: bool, pruned: bool = False) -> str | None:
        """Why this rule is not exact for such a proposal, or None if it is."""
        if proposal not in self.proposals:
            return f"rule {self.name!r} is not exact for {proposal} proposals (only for {', '.join(sorted(self.proposals))})"
        if pruned and self.needs_q:
            return f"rule {self.name!r} is not exact once drafted tokens were dropped after looking at them; use rule='match'"
        if self.chains_only and not chain:
            return f"rule {self.name!r} verifies chains only"
        return None


def walk(tree: TokenTree, passes: Tensor) -> Verdict:
    """From the root to the first child that ``passes`` ``[R, N]``, and on from there; the verdict's next token is left 0."""
    nothing = torch.zeros_like(tree.tokens[:, 0])
    if tree.valid is not None:
        passes = passes & tree.valid
    if tree.chain:
        return Verdict(tree.depths, passes[:, 1:].cumprod(1).sum(1), nothing)
    at, accepted = nothing, nothing  # [R] current node
    alive = torch.ones_like(at, dtype=torch.bool)
    path = [at]
    for _ in range(tree.nodes - 1):
        child = (tree.parents == at[:, None]) & passes  # [R, N]
        alive = alive & child.any(1)
        at = torch.where(alive, child.to(torch.int8).argmax(1), at)
        accepted = accepted + alive
        path.append(at)
    return Verdict(torch.stack(path, 1), accepted, nothing)
