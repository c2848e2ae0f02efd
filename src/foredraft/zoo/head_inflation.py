"""Heads for inflated targets: the same function, at the cost of heads of that size; see :mod:`foredraft.zoo.inflation`.

An inflated model's hidden states are those of the small one and zeros behind them, also what its LM head reads: there the final norm's
rescaled weight undoes the larger mean. What a head writes into the new coordinates is kept zero too; weights that meet zeros are small
random numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foredraft.errors import ConfigurationError
from foredraft.heads.base import shape_of
from foredraft.heads.medusa import MedusaHead
from foredraft.zoo.eagle3_inflation import inflate_eagle3

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["inflate_eagle3", "inflate_medusa"]


@torch.no_grad()
def inflate_medusa(head: MedusaHead, model: PreTrainedModel, *, seed: int = 0) -> MedusaHead:
    """A head for ``model``, which is the target of ``head`` inflated, with the logits of ``head``; in its dtype and on its device.

    A low-rank LM head grows in rank as the target does in width. ``head`` is left as it is.

    Raises:
        ConfigurationError: the model is not so many times as wide, or has another vocabulary.
    """
    small, shape = head.config.target, shape_of(model)
    ratio, rest = divmod(shape.hidden_size, small.hidden_size)
    if rest or not ratio or shape.vocab_size != small.vocab_size:
        raise ConfigurationError(
            f"a head for {small.hidden_size} hidden units and {small.vocab_size} tokens cannot be inflated to {shape.hidden_size} and "
            f"{shape.vocab_size}; give the model that its target was inflated to"
        )
    inflated = MedusaHead(replace(head.config, target=shape, rank=head.config.rank * ratio))
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    old = head.state_dict()
    for name, slot in inflated.state_dict().items():
        mine = old[name]
        new = torch.zeros(slot.shape, dtype=torch.promote_types(mine.dtype, torch.float32))
        if name != "up.weight":  # its new columns meet what the new rows before it say
            new.uniform_(-0.02, 0.02, generator=generator)
        if name.startswith("blocks."):  # what these write are hidden states, whose new coordinates stay zero
            new[len(mine) :] = 0
        new[tuple(slice(size) for size in mine.shape)] = mine.cpu().to(new.dtype)
        state[name] = new.to(device=model.device, dtype=mine.dtype)
    inflated.load_state_dict(state, assign=True)
    inflated.successors = head.successors
    inflated.attach(model)
    return inflated.to(model.dtype)
