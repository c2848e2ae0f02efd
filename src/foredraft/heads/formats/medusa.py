"""The two formats of Medusa heads: as FasterDecoding published them, and as vLLM reads them.

Published files name their tensors ``{head}.{layer}.linear.weight`` and ``.bias``, and ``{head}.{layers}.weight`` is the LM head;
``base_model_name_or_path`` names the target. vLLM has the names of our ``state_dict``. It shares nothing with the target, so that an
LM head that all heads share is in the file (``original_lm_head``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from foredraft.errors import ConfigurationError, whole
from foredraft.heads.base import Head, lm_head_rows
from foredraft.heads.formats import OURS, Contents, Format, block, check_size, from_block_as, needs_target, same_weights
from foredraft.heads.formats.folders import Stored, dtype_name
from foredraft.heads.medusa import MedusaConfig, MedusaHead
from foredraft.models.identity import TargetShape

FILE = "medusa_lm_head.safetensors"
PUBLISHED_PREFIXES = ("medusa_head.", "medusa_heads.")  # what remains of the model that the heads were part of
VLLM_PREFIX = "medusa_heads."  # which vLLM ignores
SHARED = "lm_head.weight"  # one LM head for all


def config_from_tensors(stored: Stored, tensors: Mapping[str, Tensor], shape: TargetShape) -> MedusaConfig:
    """The configuration of somebody else's heads, ``tensors`` under our names. Published files hold more heads than their ``config.json``
    says, so that the tensors count; what the configuration says besides must agree with them.

    Raises:
        ConfigurationError: there are no heads in it, or fewer or other ones than ``config.json`` says.
    """
    found = [match for name in tensors if (match := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.weight", name))]
    if not found:
        raise ConfigurationError(f"{stored.where} holds no Medusa heads: it has {', '.join(sorted(tensors)[:5]) or 'no tensors'}")
    heads, layers = (1 + max(int(match[group]) for match in found) for group in (1, 2))
    said = {"heads": _said(stored, "medusa_num_heads", "num_heads"), "layers": _said(stored, "medusa_num_layers", "num_hidden_layers")}
    if (said["heads"] or 0) > heads or said["layers"] not in (None, layers):
        raise ConfigurationError(
            f"{stored.where}: config.json describes {said['heads']} heads of {said['layers']} layers, "
            f"the tensors are {heads} heads of {layers}"
        )
    for name in ("hidden_size", "vocab_size"):
        check_size(stored.where, name, stored.config.get(name), shape)
    bias = any(re.fullmatch(r"blocks\.\d+\.layers\.\d+\.bias", name) for name in tensors)
    return MedusaConfig(shape, heads=heads, layers=layers, bias=bias)


def _said(stored: Stored, *names: str) -> int | None:
    """The first of these fields that ``config.json`` has."""
    for name in names:
        if name in stored.config:
            value = stored.config[name]
            whole(f"{stored.where}: {name}", value)
            return value
    return None


def one_lm_head(head: MedusaHead) -> Tensor:
    """``[V, d]`` the LM head that all of them share: the target's, or the product of low rank.

    Raises:
        ConfigurationError: it is the target's, and no target is attached.
    """
    if head.config.lm_head == "low-rank":
        product = head.up.weight.detach().float() @ head.down.weight.detach().float()
        return product.to(head.dtype)
    if not head._lm_head:
        raise ConfigurationError(
            "this head uses the target's LM head, which the format stores too: load the head with its target (--target)"
        )
    return lm_head_rows(head._lm_head[0]).to(head.dtype)


def refuse_bias(head: MedusaHead, readers: str) -> None:
    if head.config.lm_head_bias:
        raise ConfigurationError(f"{readers} has LM heads without a bias, and this head's have one")


class PublishedMedusa(Format):
    name = "medusa"
    kinds = ("medusa",)
    without_tree = "the format has no place for one"

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return "medusa_num_heads" in config and config.get("model_type") != "medusa"

    def read(self, stored: Stored, model: PreTrainedModel | None) -> Contents:
        tensors = {_ours(name): tensor for name, tensor in stored.tensors.items()}
        found = from_block_as(MedusaConfig, stored)
        config = config_from_tensors(stored, tensors, needs_target(stored, model)) if found is None else found
        self.layers = config.layers
        return Contents("medusa", config, tensors)

    def write(self, head: Head, about: Mapping[str, Any], target: str) -> Stored:
        assert isinstance(head, MedusaHead)
        refuse_bias(head, "a published Medusa checkpoint")
        state, config = head.state_dict(), head.config
        tensors: dict[str, Tensor] = {}
        for h in range(config.heads):
            for layer in range(config.layers):
                weight = state[f"blocks.{h}.layers.{layer}.weight"]
                tensors[f"{h}.{layer}.linear.weight"] = weight
                tensors[f"{h}.{layer}.linear.bias"] = state.get(f"blocks.{h}.layers.{layer}.bias", weight.new_zeros(len(weight)))
            tensors[f"{h}.{config.layers}.weight"] = state[f"lm_heads.{h}.weight"] if config.lm_head == "own" else one_lm_head(head).clone()
        described = {
            "medusa_num_heads": config.heads,
            "medusa_num_layers": config.layers,
            "base_model_name_or_path": target,
            "hidden_size": config.target.hidden_size,
            "vocab_size": config.target.vocab_size,
            OURS: block(head, about, replace(config, lm_head="own", rank=0, bias=True)),
        }
        return Stored(described, tensors, file=FILE)

    def spelled(self, name: str) -> str:
        if match := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(\w+)", name):
            return f"{match[1]}.{match[2]}.linear.{match[3]}"
        if match := re.fullmatch(r"lm_heads\.(\d+)\.(\w+)", name):
            return f"{match[1]}.{self.layers}.{match[2]}"
        return name


def _ours(name: str) -> str:
    bare = name
    for prefix in PUBLISHED_PREFIXES:
        bare = bare.removeprefix(prefix)
    if match := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", bare):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if match := re.fullmatch(r"(\d+)\.(\d+)\.(weight|bias)", bare):
        return f"lm_heads.{match[1]}.{match[3]}"
    return name


class VllmMedusa(Format):
    name = "vllm"
    kinds = ("medusa",)
    without_tree = "vLLM drafts chains of each head's likeliest token"

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "medusa"

    def read(self, stored: Stored, model: PreTrainedModel | None) -> Contents:
        tensors = {name.removeprefix(VLLM_PREFIX): tensor for name, tensor in stored.tensors.items()}
        found, same = from_block_as(MedusaConfig, stored), None
        if SHARED in tensors and model is not None and (found is None or found.lm_head == "target"):
            same = same_weights(tensors[SHARED], model.get_output_embeddings().weight)
        if found is not None:
            config = found
            if same is False:
                assert model is not None
                raise ConfigurationError(
                    f"{stored.where} uses its target's LM head, and {SHARED} in it is not that of {model.name_or_path or 'this target'}; "
                    "load it with its own target"
                )
        else:
            _refuse_unsupported(stored, tensors)
            config = config_from_tensors(stored, tensors, needs_target(stored, model))
            config = replace(config, lm_head="target") if same else config
        if SHARED in tensors:  # the target's LM head, or each head gets a copy
            lm_head = tensors.pop(SHARED)
            if config.lm_head == "own":
                tensors |= {f"lm_heads.{k}.weight": lm_head for k in range(config.heads)}
        return Contents("medusa", config, tensors)

    def write(self, head: Head, about: Mapping[str, Any], target: str) -> Stored:
        assert isinstance(head, MedusaHead)
        refuse_bias(head, "vLLM's Medusa")
        shared = head.config.lm_head != "own"
        tensors = dict(head.state_dict())
        if shared:
            tensors = {**{name: each for name, each in tensors.items() if name.startswith("blocks.")}, SHARED: one_lm_head(head)}
        described = replace(head.config, lm_head="own", rank=0) if head.config.lm_head == "low-rank" else head.config
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
            "dtype": dtype_name(head.dtype),
            "base_model_name_or_path": target,
            OURS: block(head, about, described),
        }
        return Stored(config, tensors)


def _refuse_unsupported(stored: Stored, tensors: Mapping[str, Tensor]) -> None:
    """Raise ConfigurationError for what vLLM can do with such heads and we cannot."""
    vocabulary, scale = stored.config.get("vocab_size"), stored.config.get("logit_scale", 1.0)
    if "token_map" in tensors or stored.config.get("truncated_vocab_size") not in (None, vocabulary):
        raise ConfigurationError(
            f"{stored.where} drafts from a part of the vocabulary (token_map, truncated_vocab_size), which is not supported here"
        )
    if scale != 1.0:
        raise ConfigurationError(f"{stored.where} scales its logits by logit_scale {scale}, which is not supported here")
