"""Cross-entropies over vocabularies that are too large for all positions at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from foredraft.heads.base import Batch

AT_ONCE = 1 << 25  # logits that are held at once: 128 MiB in float32
IN_CACHE = 1 << 20  # of them in float32 at a time, where each is read several times


def pairs(batch: Batch, ahead: int) -> tuple[Tensor, Tensor]:
    """Where a token ``ahead`` places further on is to be predicted: ``[M]`` each, the place that predicts and the place of the token,
    both as numbers in the flattened batch. The token is counted, and neither is padding."""
    length = batch.ids.shape[1]
    if ahead >= length:
        empty = torch.empty(0, dtype=torch.long, device=batch.ids.device)
        return empty, empty
    wanted = batch.valid[:, : length - ahead] & batch.valid[:, ahead:] & batch.counted[:, ahead:]
    row, place = wanted.nonzero(as_tuple=True)
    return row * length + place, row * length + place + ahead


def before(batch: Batch, places: Tensor) -> Tensor:
    """``[M, 2]`` the two tokens before each of ``places``, numbers in the flattened batch; -1 where a text begins."""
    ids, column = batch.ids.flatten(), places % batch.ids.shape[1]
    return torch.stack([torch.where(column >= back, ids[(places - back).clamp(min=0)], -1) for back in (2, 1)], -1)


def cross_entropy(
    project: Callable[[Tensor], Tensor], states: Tensor, labels: Tensor, *, target: Tensor | None = None, places: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """-Σ p(x) log q(x) with q = softmax(project(states)), summed over M positions, and how many have the likeliest token right.

    Logits of at most ``AT_ONCE`` numbers are held at once; where there are more, they are computed again for the gradient.

    Args:
        project: from ``[m, d]`` to logits ``[m, V]``.
        states: ``[M, d]``.
        labels: ``[M]`` tokens: p is all theirs, unless ``target`` is given; whether a guess is right is told by them in either case.
        target: ``[P, V]`` logits of which p is the softmax, at the rows ``places`` ``[M]``.

    Returns:
        two float32 scalars, of which the first has a gradient.
    """

    def part(states: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        logits = project(states)
        with torch.no_grad():
            right = (logits.gather(-1, labels[first:last, None]).squeeze(-1) == logits.amax(-1)).float().sum()
        if target is None:
            return functional.cross_entropy(logits.float(), labels[first:last], reduction="sum"), right
        assert places is not None
        return soft_cross_entropy(logits, target[places[first:last]]), right

    total = states.new_zeros((), dtype=torch.float32)
    right = states.new_zeros((), dtype=torch.float32)
    count, size = len(states), _rows_at_once(project, states)
    for first in range(0, count, size):
        last = min(first + size, count)
        if last - first < count and torch.is_grad_enabled():
            loss, hits = checkpoint(part, states[first:last], first, last, use_reentrant=False, preserve_rng_state=False)
        else:
            loss, hits = part(states[first:last], first, last)
        total, right = total + loss, right + hits
    return total, right


class _SoftCrossEntropy(torch.autograd.Function):
    """The gradient, softmax(logits) - p, is made together with the loss, a few rows at a time: float32 numbers stay in the cache, and all
    that is kept is the gradient in the dtype of ``logits``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        rows = max(1, IN_CACHE // logits.shape[-1])
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty_like(logits) if wanted else None
        loss = torch.zeros((), dtype=torch.float32, device=logits.device)
        for first in range(0, len(logits), rows):
            here = slice(first, first + rows)
            p = torch.softmax(target[here], -1, dtype=torch.float32)
            likely = torch.log_softmax(logits[here], -1, dtype=torch.float32)
            loss -= torch.dot(p.flatten(), likely.flatten())
            if gradient is not None:
                gradient[here] = likely.exp_().sub_(p)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * scale.to(gradient.dtype), None


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """-Σ p log softmax(logits) with p = softmax(target), summed over the rows of ``[m, V]``; float32, a gradient for ``logits`` only."""
    return _SoftCrossEntropy.apply(logits, target)  # type: ignore[no-untyped-call]


def _rows_at_once(project: Callable[[Tensor], Tensor], states: Tensor) -> int:
    if not len(states):
        return 1
    # Not under no_grad: older versions of torch keep a weight that autocast has cast there, and it then gets no gradient.
    vocabulary = project(states[:1].detach()).shape[-1]
    return max(1, AT_ONCE // vocabulary)
