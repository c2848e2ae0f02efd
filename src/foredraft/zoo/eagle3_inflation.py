"""An EAGLE-3 head for an inflated target: the drafts of the small head at the cost of a head of the target's size.

As in :mod:`foredraft.zoo.inflation`: new coordinates of a state stay zero, so that norms are rescaled and what writes to a state gets zero
rows; heads and inner units are as many times more as the state is wider, and those that are new meet zero columns. What reads several
states side by side, the features or the embedding beside the state, has the old columns at the beginning of each.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foredraft.errors import ConfigurationError
from foredraft.heads.base import shape_of
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.zoo.inflation import FREE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def inflate_eagle3(head: Eagle3Head, model: PreTrainedModel, *, seed: int = 0) -> Eagle3Head:
    """A head that drafts for ``model``, an inflation of the target of ``head``, what ``head`` drafts for that; in the model's dtype and on
    its device. It reads the inputs of the same layers, wherever these are among the new ones. ``head`` is left as it is.

    Raises:
        ConfigurationError: the model is no inflation of the head's target.
    """
    small, target = head.config, shape_of(model)
    ratio, rest = divmod(target.hidden_size, small.target.hidden_size)
    if rest or ratio < 1 or 4 ** round(math.log(ratio, 4)) != ratio or target.layers < small.target.layers:
        raise ConfigurationError(
            f"{target.name or 'the model'} is no inflation of the head's target: {target.layers} layers of {target.hidden_size} against "
            f"{small.target.layers} of {small.target.hidden_size}; the width must be larger by a power of four"
        )
    if target.vocab_size != small.target.vocab_size:
        raise ConfigurationError(
            f"{target.name or 'the model'} has {target.vocab_size} tokens, the head's target {small.target.vocab_size}"
        )
    config = replace(
        small,
        target=target,
        aux_layers=tuple(layer * target.layers // small.target.layers for layer in small.aux_layers),
        intermediate_size=small.intermediate_size * ratio,
        num_attention_heads=small.num_attention_heads * ratio,
        num_key_value_heads=small.num_key_value_heads * ratio,
        rms_norm_eps=small.rms_norm_eps / ratio,
    )
    inflated = Eagle3Head(config)
    generator = torch.Generator().manual_seed(seed)
    source, features = head.state_dict(), len(config.aux_layers)
    state = {name: extended(name, source[name], slot.shape, ratio, features, generator) for name, slot in inflated.state_dict().items()}
    inflated.load_state_dict(state, assign=True)
    inflated.attach(model)
    return inflated.to(device=model.device, dtype=model.dtype).train(head.training)


def extended(name: str, old: Tensor, shape: torch.Size, ratio: int, features: int, generator: torch.Generator) -> Tensor:
    if old.ndim == 1 and old.shape == shape:
        return old.clone()  # the vocabularies, and what a ratio of one leaves alone
    part = name.removesuffix(".weight").removesuffix(".bias").split(".")
    free, norm = part[-1] in FREE, "norm" in name
    old = old.cpu()
    new = torch.empty(shape, dtype=torch.promote_types(old.dtype, torch.float32))
    if free and old.ndim == 2:
        new.uniform_(-0.02, 0.02, generator=generator)
    else:
        new.fill_(1.0 if norm else 0.0)
    blocks = features if part[0] in ("fc", "input_norm") else 2 if part[-1] in ("q_proj", "k_proj", "v_proj") and old.ndim == 2 else 1
    rows = new[: old.shape[0]] if old.ndim == 2 else new
    corner = rows.view(*rows.shape[:-1], blocks, -1)[..., : old.shape[-1] // blocks]
    corner.copy_((old.to(new.dtype) / (math.sqrt(ratio) if norm else 1)).view(*old.shape[:-1], blocks, -1))
    return new
