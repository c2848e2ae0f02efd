"""Heads for inflated targets: the drafts of the small head at the cost of a head of the target's size.

As in :mod:`foredraft.inflation`, new coordinates of a hidden state stay zero: norms are rescaled, and matrices that write to a state get
zero rows. Attention heads, inner units and ranks grow with the width; the new ones meet zero columns. A matrix that reads several states
side by side, the features or the embedding beside the state, keeps the old columns at the beginning of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.errors import ConfigurationError
from foredraft.heads.base import Head
from foredraft.heads.eagle3_config import Eagle3Config
from foredraft.heads.medusa import MedusaConfig
from foredraft.heads.vocabulary import VocabularyHead
from foredraft.inflation import FREE
from foredraft.models.identity import TargetShape, shape_of


@torch.no_grad()
def inflate(head: Head, model: PreTrainedModel, *, seed: int = 0) -> Head:
    """A Medusa or EAGLE-3 head that drafts for ``model`` what ``head`` drafts for the model that was inflated to ``model``.

    It reads the inputs of the same layers, wherever these are among the new ones. It is in the dtype and on the device of ``model``, and
    attached to it. ``head`` is left as it is.

    Raises:
        ConfigurationError: the model was not inflated from the head's target, or there is no inflation of heads of this kind.
    """
    if head.kind not in INFLATED_CONFIGS:
        raise ConfigurationError(f"{head.kind} heads cannot be inflated; only {' and '.join(INFLATED_CONFIGS)} heads can")
    small, target = head.config.target, shape_of(model)
    ratio, rest = divmod(target.hidden_size, small.hidden_size)
    if rest or ratio < 1 or 4 ** round(math.log(ratio, 4)) != ratio or target.layers < small.layers:
        raise ConfigurationError(
            f"{target.name or 'the model'} was not inflated from the head's target: {target.layers} layers of {target.hidden_size} against "
            f"{small.layers} of {small.hidden_size}; the width must be larger by a power of four"
        )
    if target.vocab_size != small.vocab_size:
        raise ConfigurationError(f"{target.name or 'the model'} has {target.vocab_size} tokens, the head's target {small.vocab_size}")
    inflated = type(head)(INFLATED_CONFIGS[head.kind](head.config, target, ratio))  # type: ignore[call-arg]
    generator, features = torch.Generator().manual_seed(seed), len(head.features)
    source = head.state_dict()
    state = {name: _extended(name, source[name], slot.shape, ratio, features, generator) for name, slot in inflated.state_dict().items()}
    inflated.load_state_dict(state, assign=True)
    if isinstance(head, VocabularyHead) and isinstance(inflated, VocabularyHead):
        inflated.log_odds = head.log_odds
    inflated.to(device=model.device, dtype=model.dtype).attach(model)
    return inflated.train(head.training)


def _medusa(config: MedusaConfig, target: TargetShape, ratio: int) -> MedusaConfig:
    return replace(config, target=target, rank=config.rank * ratio)


def _eagle3(config: Eagle3Config, target: TargetShape, ratio: int) -> Eagle3Config:
    return replace(
        config,
        target=target,
        aux_layers=tuple(layer * target.layers // config.target.layers for layer in config.aux_layers),
        intermediate_size=config.intermediate_size * ratio,
        num_attention_heads=config.num_attention_heads * ratio,
        num_key_value_heads=config.num_key_value_heads * ratio,
        rms_norm_eps=config.rms_norm_eps / ratio,
    )


INFLATED_CONFIGS: dict[str, Callable[[Any, TargetShape, int], Any]] = {"medusa": _medusa, "eagle3": _eagle3}


def _extended(name: str, old: Tensor, shape: torch.Size, ratio: int, features: int, generator: torch.Generator) -> Tensor:
    if old.ndim == 1 and old.shape == shape:
        return old.clone()  # the vocabularies, and what a ratio of one leaves alone
    part = name.removesuffix(".weight").removesuffix(".bias").split(".")
    norm = "norm" in name
    old = old.cpu()
    new = torch.empty(shape, dtype=torch.promote_types(old.dtype, torch.float32))
    if old.ndim == 2 and part[-1] in (*FREE, "down"):
        new.uniform_(-0.02, 0.02, generator=generator)  # what these write meets zero columns
    else:
        new.fill_(1.0 if norm else 0.0)
    blocks = features if part[0] in ("fc", "input_norm") else 2 if part[-1] in ("q_proj", "k_proj", "v_proj") and old.ndim == 2 else 1
    rows = new[: old.shape[0]] if old.ndim == 2 else new
    corner = rows.view(*rows.shape[:-1], blocks, -1)[..., : old.shape[-1] // blocks]
    corner.copy_((old.to(new.dtype) / (math.sqrt(ratio) if norm else 1)).view(*old.shape[:-1], blocks, -1))
    return new
