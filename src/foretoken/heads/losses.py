"""Cross-entropies over vocabularies that are too large for all positions at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from foretoken.heads.base import Batch

AT_ONCE = 1 << 25  # logits that are held at once: 128 MiB in float32


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
        logits = project(states).float()
        right = (logits.detach().argmax(-1) == labels[first:last]).float().sum()
        if target is None:
            return functional.cross_entropy(logits, labels[first:last], reduction="sum"), right
        assert places is not None
        p = torch.softmax(target[places[first:last]].float(), -1)
        return functional.cross_entropy(logits, p, reduction="sum"), right

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


def _rows_at_once(project: Callable[[Tensor], Tensor], states: Tensor) -> int:
    if not len(states):
        return 1
    with torch.no_grad():
        vocabulary = project(states[:1]).shape[-1]
    return max(1, AT_ONCE // vocabulary)
