"""Parts of the training-time test: drafts from every place of a text at once, without a mask of all steps by all steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

QUERIES = 256  # that look at keys at a time; longer texts keep no scores for the way back but compute them again


def ahead(each: Tensor, by: int) -> Tensor:
    """``[B, S]`` of ``each`` ``[B, S]`` so many places further on; zeros behind the end."""
    return pad(each[:, by:], (0, min(by, each.shape[1])))


def attend(queries: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """``[B, S, H * h]``: what step i of the drafts that began at each place s sees.

    That is the first step's keys up to s, which stand for the text, and of the later steps those of its own draft: of each of them one
    key per query. So the scores are a causal square and i columns beside it.

    Args:
        queries: ``[B, S, H, h]`` of step i.
        keys, values: ``[B, S, K, h]`` each, of steps 0 to i.
    """
    rows, length, heads, size = queries.shape
    groups = keys[0].shape[2]
    grouped = queries.view(rows, length, groups, heads // groups, size).permute(0, 2, 3, 1, 4)  # [B, K, G, S, h]
    text_keys, text_values = (each[0].transpose(1, 2)[:, :, None] for each in (keys, values))  # [B, K, 1, S, h]
    if len(keys) == 1:
        whole = (rows, groups, heads // groups, length, size)
        query, key, value = (each.expand(whole).flatten(1, 2) for each in (grouped, text_keys, text_values))
        return scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
    own_keys, own_values = (torch.stack([each.transpose(1, 2) for each in later[1:]], -2)[:, :, None] for later in (keys, values))
    outputs, again = [], torch.is_grad_enabled() and length > QUERIES
    for first in range(0, length, QUERIES):
        last = min(first + QUERIES, length)
        here = slice(first, last)
        given = (
            grouped[..., here, :],
            text_keys[..., :last, :],
            text_values[..., :last, :],
            own_keys[..., here, :, :],
            own_values[..., here, :, :],
        )
        outputs.append(checkpoint(look, *given, use_reentrant=False) if again else look(*given))
    return torch.cat(outputs, 3).permute(0, 3, 1, 2, 4).flatten(2)


def look(queries: Tensor, text_keys: Tensor, text_values: Tensor, own_keys: Tensor, own_values: Tensor) -> Tensor:
    """``[B, K, G, q, h]``: the last q of the drafts that began at the first n places of a text.

    Args:
        queries: ``[B, K, G, q, h]``.
        text_keys, text_values: ``[B, K, 1, n, h]``.
        own_keys, own_values: ``[B, K, 1, q, i, h]``.
    """
    count, length, scale = queries.shape[-2], text_keys.shape[-2], 1 / math.sqrt(queries.shape[-1])
    text = queries @ text_keys.transpose(-1, -2)  # [B, K, G, q, n]
    hidden = torch.ones(count, length, dtype=torch.bool, device=queries.device).triu(1 + length - count)
    own = (queries[..., None, :] * own_keys).sum(-1)  # [B, K, G, q, i]
    scores = torch.cat([text.masked_fill(hidden, float("-inf")), own], -1)
    weights = torch.softmax(scores.float() * scale, -1).to(queries.dtype)
    return weights[..., :length] @ text_values + (weights[..., length:, None] * own_values).sum(-2)
