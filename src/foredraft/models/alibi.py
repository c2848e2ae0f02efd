"""Attention with linear biases, for models that derive the bias from a two-dimensional padding mask (bloom)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def uses_alibi(model: PreTrainedModel) -> bool:
    return hasattr(model.base_model, "build_alibi_tensor")


@contextmanager
def alibi_from(model: PreTrainedModel, positions: Tensor) -> Iterator[None]:
    """For one pass, build the bias from key ``positions`` ``[R, W]`` rather than from a mask that has four dimensions now.

    Softmax ignores what is constant over keys, so slope x key position is the whole bias. The override lives on this
    instance and is removed afterwards.
    """
    body = model.base_model
    original = body.build_alibi_tensor

    def build(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        pair = torch.ones(1, 2, device=mask.device)
        slopes = original(pair, num_heads, torch.float32)[:, 0, 1]  # [H]: the bias of position 1
        bias = slopes[None, :, None] * positions[:, None].to(slopes)  # [R, H, W]
        return bias.reshape(-1, 1, positions.shape[1]).to(dtype)

    body.build_alibi_tensor = build
    try:
        yield
    finally:
        del body.build_alibi_tensor
