"""Medusa heads as vLLM has them: the names of our ``state_dict``, LM heads of their own or one for all.

vLLM shares nothing with the target, so that one LM head for all, ``original_lm_head``, is in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from foredraft.errors import ConfigurationError
from foredraft.heads.formats import OURS, Contents, Format, Stored, block, from_block_as, needs_target
from foredraft.heads.formats.medusa_parts import (
    SHARED,
    config_from_tensors,
    one_lm_head,
    refuse_bias,
    tree_is_lost,
    with_own_lm_heads,
)
from foredraft.heads.formats.shared import same_weights
from foredraft.heads.medusa import MedusaConfig, MedusaHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foredraft.heads.base import Head

PREFIX = "medusa_heads."  # that vLLM passes over


class VllmMedusa(Format):
    name = "vllm"
    kinds = ("medusa",)

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "medusa"

    def read(self, stored: Stored, model: PreTrainedModel | None) -> Contents:
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in stored.tensors.items()}
        found = from_block_as(MedusaConfig, stored)
        if found is None:
            _refuse_the_unknown(stored, tensors)
            config = config_from_tensors(stored, tensors, needs_target(stored, model))
            if SHARED in tensors and model is not None and same_weights(tensors[SHARED], model.get_output_embeddings().weight):
                config = replace(config, lm_head="target")
        else:
            config = found
            if config.lm_head == "target" and model is not None and SHARED in tensors:
                _refuse_another_lm_head(stored, tensors[SHARED], model)
        return Contents(self.kinds[0], config, _lm_heads(config, tensors))

    def write(self, head: Head, about: Mapping[str, Any], target: str) -> Stored:
        assert isinstance(head, MedusaHead)
        refuse_bias(head, "vLLM's Medusa")
        shared = head.config.lm_head != "own"
        tensors = (
            dict(head.state_dict())
            if not shared
            else {name: each for name, each in head.state_dict().items() if name.startswith("blocks.")}
        )
        if shared:
            tensors[SHARED] = one_lm_head(head)
        described = with_own_lm_heads(head) if head.config.lm_head == "low-rank" else head.config
        shape = head.config.target
        config = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
            "truncated_vocab_size": shape.vocab_size,
            "num_heads": head.config.heads,
            "num_hidden_layers": head.config.layers,
            "medusa_fc_bias": head.config.bias,
            "original_lm_head": shared,
            "logit_scale": 1.0,
            "dtype": str(head.dtype).removeprefix("torch."),
            "base_model_name_or_path": target,
            OURS: block(head, about, described),
        }
        return Stored(config, tensors)

    def losses(self, head: Head) -> list[str]:
        return tree_is_lost(head, "vLLM drafts chains of each head's likeliest token")


def _refuse_the_unknown(stored: Stored, tensors: Mapping[str, Tensor]) -> None:
    """What vLLM can do with such heads, and we cannot."""
    vocabulary = stored.config.get("vocab_size")
    if "token_map" in tensors or stored.config.get("truncated_vocab_size") not in (None, vocabulary):
        raise ConfigurationError(
            f"{stored.where} drafts from a part of the vocabulary (token_map, truncated_vocab_size), which is not supported here"
        )
    if stored.config.get("logit_scale", 1.0) != 1.0:
        raise ConfigurationError(
            f"{stored.where} scales its logits by logit_scale {stored.config['logit_scale']}, which is not supported here"
        )


def _refuse_another_lm_head(stored: Stored, theirs: Tensor, model: PreTrainedModel) -> None:
    if same_weights(theirs, model.get_output_embeddings().weight) is False:
        name = model.name_or_path or "this target"
        raise ConfigurationError(
            f"{stored.where} uses its target's LM head, and {SHARED} in it is not that of {name}; load it with its own target"
        )


def _lm_heads(config: MedusaConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the one for all: it is the target's, or every head has a copy."""
    if SHARED not in tensors:
        return tensors
    rest = {name: tensor for name, tensor in tensors.items() if name != SHARED}
    if config.lm_head == "own":
        rest |= {f"lm_heads.{k}.weight": tensors[SHARED] for k in range(config.heads)}
    return rest
