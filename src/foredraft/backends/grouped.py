"""Attention of heads that share keys, under a mask, without repeating the keys in memory.

transformers' sdpa path repeats keys and values for every head that shares them as soon as there is a mask, and so does torch's own
``enable_gqa`` on CUDA, where only kernels that take no mask know groups. Here the queries of a group become more queries of one head,
which attends to keys where they lie; the mask, repeated for the group, is made once per pass and not once per layer.

The function is registered under a name of its own, and a model uses it for the length of a pass only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "foredraft_grouped"
LAYER_TYPES = 4  # with masks of their own, at most; more are made again where they are asked for


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None, **options: Any
) -> tuple[Tensor, None]:
    """An attention function in transformers' interface. ``query`` ``[R, H, N, D]``; ``key``, ``value`` ``[R, groups, W, D]``.

    What it does not know is left to transformers' own.
    """
    rows, heads, nodes, size = query.shape
    groups = key.shape[1]
    plain = not any(value is not None and value is not False for name, value in options.items() if name in ("position_bias", "softcap"))
    if groups == heads or attention_mask is None or attention_mask.shape[1] != 1 or not plain or options.get("dropout"):
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return found
    grouped: Grouped = module.config.foredraft_grouped
    grouped.calls += 1
    share = heads // groups
    packed = query.reshape(rows, groups, share * nodes, size)
    mask = grouped.mask(attention_mask, share, query.dtype)
    out = scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(rows, heads, nodes, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)


class Grouped:
    """Grouped attention in the passes of one model.

    Attributes:
        calls: of the attention function, in passes that were not replayed.
    """

    def __init__(self, model: nn.Module):
        configs = [vars(module).get("config") for module in model.modules()]
        self._configs = list({id(each): each for each in configs if isinstance(each, PreTrainedConfig)}.values())
        self._made: list[tuple[Tensor, Tensor]] = []  # masks of the pass under way: as they were given, and packed
        self.calls = 0

    @staticmethod
    def of(model: Any) -> Grouped | None:
        """None where no heads share keys, or the model does not attend through torch's kernels."""
        config = model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None)
        groups = getattr(config, "num_key_value_heads", None) or heads
        return Grouped(model) if config._attn_implementation == "sdpa" and groups != heads else None

    def mask(self, given: Tensor, share: int, dtype: torch.dtype) -> Tensor:
        """``given`` ``[R, 1, N, W]`` bool, for ``share`` queries each, in the form that kernels add to the scores."""
        for known, made in self._made:
            if known is given:
                return made
        rows, _, nodes, span = given.shape
        added = torch.zeros(given.shape, dtype=dtype, device=given.device).masked_fill_(~given, float("-inf"))
        made = added[:, :, None].expand(rows, 1, share, nodes, span).reshape(rows, 1, share * nodes, span)
        self._made = [*self._made[1 - LAYER_TYPES :], (given, made)]
        return made

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """For one pass, the model's attention is :func:`attend`."""
        before = [config.__dict__["_attn_implementation_internal"] for config in self._configs]
        for config in self._configs:
            config.__dict__.update(_attn_implementation_internal=NAME, foredraft_grouped=self)
        try:
            yield
        finally:
            self._made.clear()
            for config, implementation in zip(self._configs, before):
                config.__dict__["_attn_implementation_internal"] = implementation
                del config.__dict__["foredraft_grouped"]
