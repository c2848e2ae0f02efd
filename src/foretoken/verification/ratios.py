"""What the rules that compare p with q share: the round without a draft, ratios, residuals, a value at each row's node."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.sampling import Purpose, Randomness
from foretoken.tree import TokenTree
from foretoken.verification.base import Rule, Verdict


class ComparesWithQ(Rule):
    """Base of rules that need the draft's own distribution; a subclass writes :meth:`compare`."""

    needs_q = True

    def verify(self, tree: TokenTree, p: Tensor, noise: Randomness) -> Verdict:
        if tree.nodes == 1:
            return Verdict(tree.depths, torch.zeros_like(tree.tokens[:, 0]), noise.draw(p[:, 0], Purpose.RESIDUAL))
        if tree.q is None:
            raise ValueError(f"rule {self.name!r} needs the draft's q at every node that has a child")
        return self.compare(tree, p, tree.q[:, : tree.nodes - 1] if tree.chain else tree.q, noise)

    def compare(self, tree: TokenTree, p: Tensor, q: Tensor, noise: Randomness) -> Verdict:
        """Verdict for a tree that was drafted, with ``q`` ``[R, M, V]`` at its first M nodes (a chain: all but the leaf)."""
        raise TypeError(f"{type(self).__name__} must define compare(tree, p, q, noise)")


def safe_ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b with 0 / 0 = 0; both are non-negative."""
    return torch.where(a > 0, a / b.clamp(min=torch.finfo(b.dtype).tiny), torch.zeros_like(a))


def at_node(values: Tensor, node: Tensor) -> Tensor:
    """``[R, V]`` of ``values`` ``[R, M, V]`` at ``node`` ``[R]``; nodes beyond M, which have no children, read the last one."""
    index = node.clamp(max=values.shape[1] - 1)[:, None, None].expand(-1, 1, values.shape[2])
    return values.gather(1, index)[:, 0]


def chain_ratios(tree: TokenTree, p: Tensor, q: Tensor) -> Tensor:
    """``[R, γ]`` p(x) / q(x) of a chain's drafted tokens; 0 where q(x) is 0, which a drawn token never has."""
    drafted = tree.tokens[:, 1:, None]
    p_x, q_x = p[:, :-1].gather(2, drafted)[..., 0], q.gather(2, drafted)[..., 0]
    return torch.where(q_x > 0, safe_ratio(p_x, q_x), torch.zeros_like(p_x))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """``[R, V]`` weights [p - q]+, of ``p`` scaled as the rule wants it.

    A residual that sums to nothing is reached by rounding only (p = q): any draw from p is right then.
    """
    left = (p - q).clamp(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)
