"""Medusa heads as FasterDecoding published them: ``{head}.{layer}.linear.weight`` and ``.bias``, ``{head}.{layers}.weight`` the LM head.

``base_model_name_or_path`` names the target. The prefix ``medusa_head.`` is what remains of the model that the heads were part of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from foredraft.heads.formats import OURS, Contents, Format, Stored, block, from_block_as, needs_target
from foredraft.heads.formats.medusa_parts import (
    config_from_tensors,
    one_lm_head,
    refuse_bias,
    tree_is_lost,
    with_own_lm_heads,
    zeros_like_bias,
)
from foredraft.heads.medusa import MedusaConfig, MedusaHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foredraft.heads.base import Head

FILE = "medusa_lm_head.safetensors"
PREFIXES = ("medusa_head.", "medusa_heads.")


class PublishedMedusa(Format):
    name = "medusa"
    kinds = ("medusa",)

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return "medusa_num_heads" in config and config.get("model_type") != "medusa"

    def read(self, stored: Stored, model: PreTrainedModel | None) -> Contents:
        tensors = {_ours(name): tensor for name, tensor in stored.tensors.items()}
        found = from_block_as(MedusaConfig, stored)
        config = config_from_tensors(stored, tensors, needs_target(stored, model)) if found is None else found
        self.layers = config.layers
        return Contents(self.kinds[0], config, tensors)

    def write(self, head: Head, about: Mapping[str, Any], target: str) -> Stored:
        assert isinstance(head, MedusaHead)
        refuse_bias(head, "a published Medusa checkpoint")
        state, config = head.state_dict(), head.config
        tensors: dict[str, Tensor] = {}
        for h in range(config.heads):
            for layer in range(config.layers):
                weight = state[f"blocks.{h}.layers.{layer}.weight"]
                tensors[f"{h}.{layer}.linear.weight"] = weight
                tensors[f"{h}.{layer}.linear.bias"] = state.get(f"blocks.{h}.layers.{layer}.bias", zeros_like_bias(weight))
            tensors[f"{h}.{config.layers}.weight"] = state[f"lm_heads.{h}.weight"] if config.lm_head == "own" else one_lm_head(head).clone()
        described = {
            "medusa_num_heads": config.heads,
            "medusa_num_layers": config.layers,
            "base_model_name_or_path": target,
            "hidden_size": config.target.hidden_size,
            "vocab_size": config.target.vocab_size,
            OURS: block(head, about, with_own_lm_heads(head, bias=True)),
        }
        return Stored(described, tensors, file=FILE)

    def spelled(self, name: str) -> str:
        if match := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(\w+)", name):
            return f"{match[1]}.{match[2]}.linear.{match[3]}"
        if match := re.fullmatch(r"lm_heads\.(\d+)\.(\w+)", name):
            return f"{match[1]}.{self.layers}.{match[2]}"
        return name

    def losses(self, head: Head) -> list[str]:
        return tree_is_lost(head, "the format has no place for one")


def _ours(name: str) -> str:
    bare = name
    for prefix in PREFIXES:
        bare = bare.removeprefix(prefix)
    if match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", bare):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if match := re.fullmatch(r"(\d+)\.(\d+)\.(weight|bias)", bare):
        return f"lm_heads.{match[1]}.{match[3]}"
    return name
