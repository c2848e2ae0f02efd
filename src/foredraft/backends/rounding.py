"""How far rounding alone may move the logits of a model.

A pass whose sums have another order rounds otherwise. A model carries such differences from layer to layer, and a deep mixture of experts
enlarges them: a token that is moved a little takes another expert. No fixed bound fits every model, so it is measured here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foredraft.models.encoder_decoder import plain_arguments
from foredraft.models.features import first_tensor
from foredraft.models.layers import decoder_layers
from foredraft.models.support import input_device

TOKENS = 24  # of each pass
DRAWS = 2
MOST = 0.5  # logits that differ by more of their scale are wrong, whatever moves them


@torch.inference_mode()
def explained(model: Any) -> float:
    """The most by which any token's logits move, relative to the largest of all, when each number that a decoder layer reads is moved by up
    to half a unit in its last place; at most ``MOST``. The same model always gives the same bound."""
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or TOKENS
    ids = torch.arange(min(TOKENS, context), device=input_device(model))[None] * 7 % config.vocab_size
    given = plain_arguments(model, ids)

    def logits(draw: int) -> Tensor:
        generator = torch.Generator().manual_seed(draw)

        def move(layer: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            x = first_tensor(args, named)
            if not isinstance(x, Tensor):
                return None
            noise = torch.rand(x.shape, generator=generator).to(x.device) - 0.5 if draw else torch.zeros((), device=x.device)
            moved = (x.double() * (1 + noise * torch.finfo(x.dtype).eps)).to(x.dtype)
            return ((moved, *args[1:]), named) if args else (args, {**named, "hidden_states": moved})

        hooks = [layer.register_forward_pre_hook(move, with_kwargs=True) for layer in decoder_layers(model)]
        try:
            return model(**given, use_cache=False).logits.float()
        finally:
            for hook in hooks:
                hook.remove()

    plain = logits(0)  # with hooks too, which may choose other kernels
    scale = plain.abs().max().clamp(min=1e-6)
    found = max(float((logits(draw) - plain).abs().max() / scale) for draw in range(1, 1 + DRAWS))
    return min(found, MOST)
