"""Attention temperature that grows with the position, for models that count positions from the cache's length (llama4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def tuned_layers(model: PreTrainedModel) -> list[Any]:
    """The attention layers that scale their queries by position."""
    return [
        layer
        for layer in model.modules()
        if getattr(layer, "attn_temperature_tuning", False) and hasattr(layer, "floor_scale") and not getattr(layer, "use_rope", True)
    ]


@contextmanager
def temperature_from(layers: Sequence[Any], positions: Tensor) -> Iterator[None]:
    """For one pass, scale the queries of ``layers`` by node ``positions`` ``[R, N]`` rather than by slots.

    The layers' own scaling is switched off and a hook on their query projection does it; both are undone afterwards.
    """
    with ExitStack() as undo:
        for layer in layers:
            scales = torch.log1p(torch.floor((positions.float() + 1) / layer.floor_scale)) * layer.attn_scale + 1

            def scaled(module: nn.Module, inputs: object, queries: Tensor, scales: Tensor = scales) -> Tensor:
                return (queries * scales[:, :, None].to(queries.device)).to(queries.dtype)

            undo.callback(layer.q_proj.register_forward_hook(scaled).remove)
            layer.attn_temperature_tuning = False
            undo.callback(setattr, layer, "attn_temperature_tuning", True)
        yield
