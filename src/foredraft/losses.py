"""How far a draft's distribution q is from the target's p: what distilling makes small.

- ``fkl``: KL(p‖q).
- ``rkl``: KL(q‖p).
- ``jsd(β)``: β KL(p‖m) + (1 - β) KL(q‖m) with m = β p + (1 - β) q (Agarwal et al. 2024, GKD). β is 0.5 if left out.
- ``tvd``: TV(p, q) = 1 - α. α = Σ min(p, q) is how often rejection sampling accepts a token drawn from q.
- ``lk(η)``: w KL(p‖q) + (1 - w) TV(p, q), where w = exp(-η α) counts as a constant for the gradient. This is the hybrid of Samarin et al.
  2026, "LK Losses: Direct Acceptance Rate Optimization for Speculative Decoding", arXiv 2602.23881, with a weight for every position. η is
  3, their best, if left out.
- ``ce``: -log q(x) of the target's likeliest token x.

Sums are written ``0.5*fkl+0.5*tvd``. All are functions of log-probabilities over the same outcomes: the whole vocabulary, or a few tokens
and all others together (:class:`Few`). Joining outcomes makes no divergence larger, so what the few show is a lower bound.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from foredraft.errors import ConfigurationError, unknown
from foredraft.heads.losses import IN_CACHE

FLOOR = -1e4  # log-probabilities below count as this, so that what is impossible costs much and not infinitely much
FORM = re.compile(r"(?:([0-9.]+)\*)?([a-z]+)(?:\(([0-9.]+)\))?")

Divergence = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p‖q), ``[M]`` of ``[M, V]``."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """α = Σ min(p, q) = 1 - TV(p, q), ``[M]``."""
    return torch.minimum(log_p, log_q).exp().sum(-1)


def _jsd(log_p: Tensor, log_q: Tensor, best: Tensor, beta: float) -> Tensor:
    middle = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
    return beta * kl(log_p, middle) + (1 - beta) * kl(log_q, middle)


def _lk(log_p: Tensor, log_q: Tensor, best: Tensor, eta: float) -> Tensor:
    alpha = overlap(log_p, log_q)
    weight = torch.exp(-eta * alpha.detach())
    return weight * kl(log_p, log_q) + (1 - weight) * (1 - alpha)


LOSSES: dict[str, Divergence] = {
    "fkl": lambda log_p, log_q, best, _: kl(log_p, log_q),
    "rkl": lambda log_p, log_q, best, _: kl(log_q, log_p),
    "jsd": _jsd,
    "tvd": lambda log_p, log_q, best, _: 1 - overlap(log_p, log_q),
    "lk": _lk,
    "ce": lambda log_p, log_q, best, _: -log_q.gather(-1, best[:, None]).squeeze(-1),
}
PARAMETERS = {"jsd": 0.5, "lk": 3.0}  # of the losses that have one: its default


@dataclass(frozen=True)
class Term:
    """``weight`` times one of ``LOSSES``."""

    name: str
    parameter: float
    weight: float = 1.0

    def __str__(self) -> str:
        each = f"{self.name}({self.parameter:g})" if self.name in PARAMETERS else self.name
        return each if self.weight == 1 else f"{self.weight:g}*{each}"


@dataclass(frozen=True)
class Loss:
    """A weighted sum of losses."""

    terms: tuple[Term, ...]

    @classmethod
    def parse(cls, text: str) -> Loss:
        """Such as ``lk(3)`` or ``0.5*fkl+0.5*tvd``.

        Raises:
            ConfigurationError: an unknown loss, or a number that it does not take.
        """
        return cls(tuple(_term(each, text) for each in text.replace(" ", "").split("+")))

    def __call__(self, log_p: Tensor, log_q: Tensor, best: Tensor) -> Tensor:
        """``[M]`` of log-probabilities ``[M, V]`` over the same outcomes; ``best`` ``[M]``: which of them is the target's
        likeliest token."""
        return torch.stack([each.weight * LOSSES[each.name](log_p, log_q, best, each.parameter) for each in self.terms]).sum(0)

    def __str__(self) -> str:
        return "+".join(map(str, self.terms))


def _term(text: str, whole: str) -> Term:
    found = FORM.fullmatch(text)
    if found is None:
        raise ConfigurationError(f"cannot read the loss {whole!r}; write it like 'lk(3)' or '0.5*fkl+0.5*tvd', of {', '.join(LOSSES)}")
    weight, name, parameter = found.groups()
    if name not in LOSSES:
        raise unknown("unknown loss", name, LOSSES)
    if parameter is not None and name not in PARAMETERS:
        raise ConfigurationError(f"the loss {name} takes no number; write {name!r}, not {text!r}")
    try:
        term = Term(name, float(parameter) if parameter else PARAMETERS.get(name, 0.0), float(weight) if weight else 1.0)
    except ValueError as error:
        raise ConfigurationError(f"cannot read the loss {text!r}: {error}") from error
    if name == "jsd" and not 0 < term.parameter < 1:
        raise ConfigurationError(f"the β of jsd(β) must lie between 0 and 1, got {term.parameter:g}; fkl and rkl are its limits")
    return term


@dataclass(frozen=True, eq=False)
class Few:
    """A distribution of which only ``log_probabilities`` ``[M, K]`` of the tokens ``ids`` ``[M, K]`` are known, best first; all other
    tokens together have the rest."""

    ids: Tensor
    log_probabilities: Tensor

    def __getitem__(self, rows: slice | Tensor) -> Few:
        return Few(self.ids[rows], self.log_probabilities[rows])


def outcomes(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``log_p``, ``log_q`` and ``best``, as losses take them, from the draft's ``logits`` ``[M, V]`` and the target's."""
    log_p = torch.log_softmax(target.to(logits.dtype), -1)
    return log_p.clamp(min=FLOOR), torch.log_softmax(logits, -1).clamp(min=FLOOR), log_p.argmax(-1)


@dataclass(frozen=True, eq=False)
class Compared:
    """At M positions: ``loss`` ``[M]``, the only one with a gradient; ``alpha`` ``[M]`` = Σ min(p, q); ``agrees`` ``[M]`` 1 where the
    likeliest tokens are the same."""

    loss: Tensor
    alpha: Tensor
    agrees: Tensor


def compare(loss: Loss, logits: Tensor, target: Tensor | Few, temperature: float = 1.0) -> Compared:
    """Compare the draft's ``logits`` ``[M, V]`` with the target's logits ``[M, V]`` or a few of its probabilities, both at
    ``temperature``.

    Raises:
        ConfigurationError: only a few of the target's probabilities are known, and another temperature than theirs is asked for.
    """
    if isinstance(target, Few):
        if temperature != 1:
            raise ConfigurationError(f"a few stored probabilities are those of temperature 1, and say nothing of {temperature:g}")
        values, ids = target.log_probabilities, target.ids
    else:
        values, ids = target, None
    found: tuple[Tensor, ...] = _Compare.apply(logits, values, ids, loss, temperature)  # type: ignore[no-untyped-call]
    return Compared(*found)


def _whole(logits: Tensor, target: Tensor, loss: Loss, wanted: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Of ``logits`` and a ``target`` ``[M, V]``: loss, α and the target's likeliest token ``[M]``, and, where ``wanted``, the gradient."""
    own = logits.detach().requires_grad_(wanted)
    log_p, log_q, best = outcomes(own, target)
    each = loss(log_p, log_q, best)
    gradient = torch.autograd.grad(each.sum(), own)[0] if wanted else None
    return each.detach(), overlap(log_p, log_q).detach(), best, gradient


def _joined(logits: Tensor, target: Few, loss: Loss, wanted: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As :func:`_whole`, of a few tokens and all others together. The gradient is written down: autograd would go over all tokens many
    times. A token beyond V, which the target alone has, is one that neither draws."""
    log_q = torch.log_softmax(logits.detach(), -1)
    outside = target.ids >= logits.shape[-1]
    inside = target.ids.gather(-1, outside.int().argmin(-1, keepdim=True))  # of each line the first
    ids = torch.where(outside, inside, target.ids).clamp(max=logits.shape[-1] - 1)
    some, others = log_q.gather(-1, ids), log_q.exp().scatter_(-1, ids, 0.0)
    rest = others.sum(-1, keepdim=True).clamp(min=torch.finfo(log_q.dtype).tiny)
    known = target.log_probabilities.to(log_q.dtype).masked_fill(outside, -torch.inf)
    log_p = torch.cat([known, torch.log(1 - known.exp().sum(-1, keepdim=True).clamp(max=1))], -1).clamp(min=FLOOR)
    joined = torch.cat([some.masked_fill(outside, -torch.inf), rest.log()], -1).requires_grad_(wanted)
    bounded = joined.clamp(min=FLOOR)
    each, gradient = loss(log_p, bounded, torch.zeros_like(ids[:, 0])), None
    if wanted:
        by_outcome = torch.autograd.grad(each.sum(), joined)[0]
        total = by_outcome.sum(-1, keepdim=True)
        gradient = others.mul_(by_outcome[:, -1:] / rest - total).scatter_(-1, ids, -some.exp() * total)
        gradient.scatter_add_(-1, ids, by_outcome[:, :-1])  # a token may be there twice
    return each.detach(), overlap(log_p, bounded).detach(), target.ids[:, 0], gradient


class _Compare(torch.autograd.Function):
    """The gradient is made together with the loss, a few rows at a time: float32 numbers stay in the cache, and all that is kept is the
    gradient in the dtype of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, values: Tensor, ids: Tensor | None, loss: Loss, temperature: float) -> tuple[Tensor, ...]:
        wanted, rows = ctx.needs_input_grad[0], max(1, IN_CACHE // logits.shape[-1])
        dtype = torch.promote_types(logits.dtype, torch.float32)
        gradient = torch.empty_like(logits) if wanted else None
        losses, alphas, agreeing = (torch.empty(len(logits), dtype=dtype, device=logits.device) for _ in range(3))
        for first in range(0, len(logits), rows):
            here = slice(first, first + rows)
            own = logits[here].to(dtype) / temperature if temperature != 1 else logits[here].to(dtype)
            with torch.enable_grad():
                if ids is None:
                    losses[here], alphas[here], token, slope = _whole(own, values[here] / temperature, loss, wanted)
                else:
                    losses[here], alphas[here], token, slope = _joined(own, Few(ids[here], values[here]), loss, wanted)
            agreeing[here] = (own.argmax(-1) == token).to(dtype)
            if gradient is not None and slope is not None:
                gradient[here] = slope / temperature
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(alphas, agreeing)
        return losses, alphas, agreeing

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * scale[:, None].to(gradient.dtype), None, None, None, None
