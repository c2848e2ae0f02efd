"""Parts of the training-time test: drafts from every place of a text at once, without a mask of all steps by all steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from foredraft.heads.eagle3_layer import Layer
from foredraft.heads.losses import soft_cross_entropy

QUERIES = 256  # that look at keys at a time; longer texts keep no scores for the way back but compute them again
LOGITS = 1 << 22  # that are compared at a time, likewise


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


def divergence(layer: Layer, normed: Tensor, logits: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """Two scalars, summed over m places: the cross-entropy to the target's distribution within the draft vocabulary, and without a
    gradient how often the likeliest token is the target's.

    Args:
        normed: ``[m, d]`` what the head's LM head reads there.
        logits: ``[m, V]`` the target's.
        best: ``[m]`` the target's likeliest tokens, all in the draft vocabulary.
    """
    chunk = max(1, LOGITS // layer.config.draft_vocab_size)
    spent, right = normed.sum() * 0.0, torch.zeros((), device=normed.device)
    for first in range(0, len(normed), chunk):
        given = normed[first : first + chunk], logits[first : first + chunk], best[first : first + chunk]
        again = torch.is_grad_enabled() and len(normed) > chunk
        each = checkpoint(partial(compared, layer), *given, use_reentrant=False) if again else compared(layer, *given)
        spent, right = spent + each[0], right + each[1]
    return spent, right


def compared(layer: Layer, normed: Tensor, logits: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    drafted = layer.logits(normed)
    ids = layer.ids
    likeliest = drafted.detach().argmax(-1)
    right = (likeliest if ids is None else ids[likeliest]) == best
    return soft_cross_entropy(drafted, logits if ids is None else logits[:, ids]), right.sum().float()
