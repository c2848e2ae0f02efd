"""What a verification rule is.

A rule is a pure function of (tree, p, noise): no model, no cache, no global random state. It sees the target's
distribution at every node and says which path survives and which token of the target's own follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from foredraft.describing import Described
from foredraft.logits.noise import Randomness
from foredraft.tree import Proposal, TokenTree


@dataclass(frozen=True, eq=False)
class Verdict:
    """The outcome of one round for R rows.

    Attributes:
        path: ``[R, D]`` int64 node indices, the root first, D the height of the tree plus 1; entries after ``accepted`` mean nothing.
        accepted: ``[R]`` int64 number of drafted tokens kept, 0 to D - 1.
        next_token: ``[R]`` int64 the target's own token that follows the path.
        wrong_q: ``[R]`` bool, whether q is no distribution where it should be; None where the rule did not look.
    """

    path: Tensor
    accepted: Tensor
    next_token: Tensor
    wrong_q: Tensor | None = None


class Rule(Described):
    """Base of verification rules. A subclass sets the class variables and defines :meth:`verify`.

    Attributes:
        name: how users call it.
        summary: one line for the list of rules.
        proposals: how draft tokens may have been chosen for the rule to be exact; those it accepts most come first.
        chains_only: the tree must be a chain.
        needs_q: the rule needs the draft's distribution q.
        lossless: the output distribution is the target's.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    proposals: ClassVar[tuple[Proposal, ...]]
    chains_only: ClassVar[bool] = False
    needs_q: ClassVar[bool] = False
    lossless: ClassVar[bool] = True

    def facts(self, *, all: bool = False) -> dict[str, Any]:
        few = {"lossless": self.lossless}
        return {**few, "summary": self.summary, "proposals": ", ".join(self.proposals), "chains_only": self.chains_only} if all else few

    def __str__(self) -> str:
        """As :func:`~foredraft.verification.create` takes it."""
        options = ",".join(f"{name}={value}" for name, value in vars(self).items())
        return f"{self.name}({options})" if options else self.name

    def verify(self, tree: TokenTree, p: Tensor, noise: Randomness) -> Verdict:
        """Verdict for ``tree`` given the target's ``p`` ``[R, N, V]`` (rows sum to 1) at every node."""
        raise TypeError(f"{type(self).__name__} must define verify(tree, p, noise)")

    def refusal(self, proposal: str, *, chain: bool, pruned: bool = False) -> str | None:
        """Why this rule is not exact for such a proposal, or None if it is."""
        if proposal not in self.proposals:
            return f"rule {self.name!r} is not exact for {proposal} proposals (only for {', '.join(sorted(self.proposals))})"
        if pruned and self.needs_q:
            return f"rule {self.name!r} is not exact if drafted tokens were dropped by their probability; use rule='match'"
        if self.chains_only and not chain:
            return f"rule {self.name!r} verifies chains only, and this tree may branch"
        return None


def walk(tree: TokenTree, passes: Tensor) -> Verdict:
    """To the deepest node that ``passes`` ``[R, N]`` together with all nodes above it, the first of several; next token left 0."""
    if tree.valid is not None:
        passes = passes & tree.valid
    if tree.chain:
        return Verdict(tree.depths, passes[:, 1:].cumprod(1).sum(1), torch.zeros_like(tree.tokens[:, 0]))
    last = (tree.depths * reached(tree, passes)).argmax(1)
    path, accepted = path_to(tree, last)
    return Verdict(path, accepted, torch.zeros_like(last))


def reached(tree: TokenTree, passes: Tensor) -> Tensor:
    """``[R, N]`` bool, the root and the nodes that pass, ``passes`` ``[R, N]``, together with all nodes above them."""
    failed = ~passes
    failed[:, 0] = False
    return ~(tree.ancestors & failed[:, None]).any(-1)


def path_to(tree: TokenTree, last: Tensor) -> tuple[Tensor, Tensor]:
    """``[R, D]`` nodes from the root to ``last`` ``[R]``, D the most that a path may have, and how many lie below the root."""
    index = torch.arange(tree.nodes, device=last.device)[None]
    on_path = tree.ancestors.gather(1, last[:, None, None].expand(-1, 1, tree.nodes))[:, 0]  # [R, N]
    path = torch.where(on_path, index, tree.nodes).sort(1).values[:, : tree.height + 1]  # ancestors come first, and in order
    return path.clamp(max=tree.nodes - 1), on_path.sum(1) - 1
