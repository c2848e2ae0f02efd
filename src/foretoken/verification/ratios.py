"""What the rules that compare p with q share: ratios, residuals, and reading a value at each row's node."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.tree import TokenTree


def safe_ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b with 0 / 0 = 0; both are non-negative."""
    return torch.where(a > 0, a / b.clamp(min=torch.finfo(b.dtype).tiny), torch.zeros_like(a))


def at_node(values: Tensor, node: Tensor) -> Tensor:
    """``[R, V]`` of ``values`` ``[R, M, V]`` at ``node`` ``[R]``; nodes beyond M, which have no children, read the last one."""
    index = node.clamp(max=values.shape[1] - 1)[:, None, None].expand(-1, 1, values.shape[2])
    return values.gather(1, index)[:, 0]


def chain_q(tree: TokenTree, rule: str) -> Tensor:
    """``[R, γ, V]`` the distributions that a chain's γ tokens were drawn from.

    Raises:
        ValueError: the tree carries none.
    """
    if tree.q is None:
        raise ValueError(f"rule {rule!r} needs the draft's q at every node that has a child")
    return tree.q[:, : tree.nodes - 1]


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
