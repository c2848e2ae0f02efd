"""Top-p over a large vocabulary without sorting it.

transformers' ``TopPLogitsWarper`` sorts all V scores of every node, which on a CPU takes longer than everything else between a tree's
logits and its verdict. Where the nucleus ends among the few hundred most likely tokens, and not within rounding of the edge, it is
known without the sort; only the other nodes are handed to transformers' own code. The scores that come out are the same.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

LEADERS = 256
WORTHWHILE = 1 << 14  # smaller vocabularies are sorted as quickly
MARGIN = 1e-5  # what the cumulative sums of two orders of summation may differ by


def top_p(processor: Any, input_ids: Tensor, scores: Tensor) -> Tensor:
    """``[G, V]``, what ``processor(input_ids, scores)`` returns."""
    if scores.device.type != "cpu" or scores.shape[-1] < WORTHWHILE:  # a GPU sorts fast, and waiting to look would cost more
        return processor(input_ids, scores)
    cut, sure = among_leaders(scores, processor.top_p, processor.min_tokens_to_keep)
    out = scores.masked_fill(scores < cut, processor.filter_value)
    if not bool(sure.all()):
        out[~sure] = processor(input_ids[~sure], scores[~sure])
    return out


def among_leaders(scores: Tensor, p: float, least: int) -> tuple[Tensor, Tensor]:
    """``[G, 1]`` the smallest score inside the nucleus of mass ``p`` and at least ``least`` tokens, and ``[G]`` where that is certain."""
    values = scores.topk(LEADERS, -1).values
    mass = (values - scores.logsumexp(-1, keepdim=True)).exp()
    before = mass.cumsum(-1) - mass  # of the tokens ahead of each
    inside = before < p
    inside[:, :least] = True
    count = inside.sum(-1, keepdim=True)
    cut = values.gather(-1, count - 1)
    outside = values.gather(-1, count.clamp(max=LEADERS - 1))  # the best token left out
    clear = ((before - p).abs() > MARGIN).all(-1) & (cut > outside)[:, 0]
    return cut, clear & (count < LEADERS)[:, 0]
