"""What the rules that compare p with q share: the round without a draft, ratios, residuals, a value at each row's node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foredraft.logits.noise import Noise, Purpose, Randomness, on_host
from foredraft.tree import Proposal, TokenTree
from foredraft.verification.base import Rule, Verdict


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


class ComparesChains(ComparesWithQ):
    """Base of such rules for sampled chains; a subclass writes :meth:`judge`.

    Attributes:
        blocks: whether kernels judge a chain at once, as :mod:`foredraft.verification.block` has it, or token by token.
    """

    proposals = ("iid",)
    chains_only = True
    blocks: ClassVar[bool]

    def compare(self, tree: TokenTree, p: Tensor, q: Tensor, noise: Randomness) -> Verdict:
        if kernel is None or type(noise) is not Noise or not for_kernels(p, q):
            accepted, scale = self.judge(tree, p, q, noise)
            return Verdict(tree.depths, accepted, noise.draw(after(p, q, accepted, tree.drafted, scale), Purpose.RESIDUAL))
        accepted, following, wrong, P = kernel(tree.tokens, tree.drafted, p, q, noise, self.blocks)
        if any_row(following < 0):  # rounding decides: the same draw by tensor operations
            scale = torch.nn.functional.pad(P, (1, 0), value=1.0).gather(1, accepted[:, None])[:, 0] if self.blocks else None
            drawn = noise.draw(after(p, q, accepted, tree.drafted, scale), Purpose.RESIDUAL)
            following = torch.where(following < 0, drawn, following)
        return Verdict(tree.depths, accepted, following, wrong.any(1))

    def judge(self, tree: TokenTree, p: Tensor, q: Tensor, noise: Randomness) -> tuple[Tensor, Tensor | None]:
        """``[R]`` tokens kept, and ``[R]`` what scales p in the weights of the token after them, as :func:`after` takes it."""
        raise TypeError(f"{type(self).__name__} must define judge(tree, p, q, noise)")


kernel: Callable[[Tensor, Tensor, Tensor, Tensor, Noise, bool], tuple[Tensor, Tensor, Tensor, Tensor]] | None = None
"""Once kernels are loaded, :func:`foredraft.backends.native.chains` by these."""


def for_kernels(p: Tensor, q: Tensor) -> bool:
    """Whether kernels can compare ``p`` ``[R, N, V]`` with ``q`` at all nodes but one, or more of them."""
    (rows, nodes, width), plain = p.shape, on_host(p) and q.device == p.device and p.dtype == q.dtype == torch.float32
    return plain and (q.shape[0], q.shape[2]) == (rows, width) and q.shape[1] >= nodes - 1


def any_row(rows: Tensor) -> bool:
    """Whether work on ``rows`` (bool) may still change something: looked up on a CPU, assumed where looking would wait for a device."""
    return rows.device.type != "cpu" or bool(rows.any())


def every_row(rows: Tensor) -> bool:
    """Whether all ``rows`` (bool) are known to be True; not known where looking would wait for a device."""
    return rows.device.type == "cpu" and bool(rows.all())


def safe_ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b with 0 / 0 = 0; both are non-negative."""
    return torch.where(a > 0, a / b.clamp(min=torch.finfo(b.dtype).tiny), torch.zeros_like(a))


def at_node(values: Tensor, node: Tensor) -> Tensor:
    """``[R, V]`` of ``values`` ``[R, M, V]`` at ``node`` ``[R]``; nodes beyond M, which have no children, read the last one."""
    index = node.clamp(max=values.shape[1] - 1)[:, None, None].expand(-1, 1, values.shape[2])
    return values.gather(1, index)[:, 0]


def chain_ratios(tokens: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """``[R, γ]`` p(x) / q(x) of the drafted ones of ``tokens`` ``[R, γ + 1]``; 0 where q(x) is 0, which a drawn token never has."""
    drafted = tokens[:, 1:, None]
    p_x, q_x = p[:, :-1].gather(2, drafted)[..., 0], q.gather(2, drafted)[..., 0]
    return torch.where(q_x > 0, safe_ratio(p_x, q_x), torch.zeros_like(p_x))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """``[R, V]`` weights [p - q]+, of ``p`` scaled as the rule wants it.

    A residual that sums to nothing is reached by rounding only (p = q): any draw from p is right then.
    """
    left = (p - q).clamp(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


def after(p: Tensor, q: Tensor, accepted: Tensor, drafted: Tensor, scale: Tensor | None = None) -> Tensor:
    """``[R, V]`` weights of the token that follows the first ``accepted`` ``[R]`` tokens of chains: p after all that were ``drafted``
    ``[R]``, else [scale p - q]+ with ``scale`` ``[R]``, 1 if it is left out."""
    p_at, q_at = at_node(p, accepted), at_node(q, accepted)
    scaled = p_at if scale is None else scale[:, None] * p_at
    return torch.where((accepted < drafted)[:, None], residual(scaled, q_at), p_at)


@dataclass(eq=False)
class Remainder:
    """What rejected children leave of p and q at one node of each row, up to a factor that is carried along.

    Attributes:
        p: ``[R, V]`` weights; p is these over ``p_mass`` ``[R]``.
        minus_q: ``[R, V]`` weights times -1, ready to be added to; q is the weights over ``q_mass`` ``[R]``.
        replaced: children are drawn without replacement, so that q loses each that was rejected.
    """

    p: Tensor
    minus_q: Tensor
    p_mass: Tensor
    q_mass: Tensor
    replaced: bool

    @staticmethod
    def of(p: Tensor, q: Tensor, proposal: Proposal) -> Remainder:
        """All of ``p`` and ``q`` ``[R, V]``, of which no child was rejected yet."""
        whole = torch.ones_like(p[:, 0])
        return Remainder(p, -q, whole, whole, proposal == "without-replacement")

    def ratio(self, x: Tensor) -> Tensor:
        """``[R]`` p(x) / q(x) of tokens ``x`` ``[R, 1]``; 0 where q(x) is 0, which a drawn token never has."""
        over = -self.minus_q.gather(1, x)[:, 0] * self.p_mass
        return torch.where(over > 0, self.p.gather(1, x)[:, 0] * self.q_mass / over, 0)

    def reject(self, rejected: Tensor, x: Tensor, A: Tensor) -> Tensor:
        """p <- N([A p - q]+) in the rows where ``x`` ``[R, 1]`` was ``rejected`` ``[R]``; returns Z ``[R]``, what [A p - q]+ sums to.

        A residual that sums to nothing is reached by rounding only, or with A = 0: p then stays as it is.
        """
        left = torch.addcmul(self.minus_q, self.p, (A * self.q_mass / self.p_mass)[:, None]).clamp_(min=0)  # [A p - q]+ times q_mass
        mass = left.sum(-1)
        changed = rejected & (mass >= torch.finfo(mass.dtype).tiny)
        Z = safe_ratio(mass, self.q_mass)
        if every_row(changed):
            self.p, self.p_mass = left, mass
        else:
            self.p, self.p_mass = torch.where(changed[:, None], left, self.p), torch.where(changed, mass, self.p_mass)
        if self.replaced:
            self.minus_q.scatter_(1, x, torch.where(rejected[:, None], 0, self.minus_q.gather(1, x)))
            self.q_mass = -self.minus_q.sum(-1)
        return Z
