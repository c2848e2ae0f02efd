"""The two formats of EAGLE-3 heads: as their authors published them, and as speculators and vLLM read them.

Published files have a llama's ``config.json`` and call the decoder layer ``midlayer``. Speculators has head, decoder layer and target in
one ``config.json``, and calls the layer ``layers.0``. Readers disagree about the default of some fields (``norm_before_residual`` is true
to one and false to another), so every field is written. Hidden states are numbered as the inputs of layers, but under ``eagle_config``,
which SpecForge writes and SGLang reads, as their outputs: one less.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.errors import ConfigurationError
from foredraft.heads.base import Head, embeddings_of
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.eagle3_config import Eagle3Config
from foredraft.heads.formats import OURS, Contents, Format, block, check_size, from_block_as, needs_target, same_weights
from foredraft.heads.formats.folders import Stored, dtype_name
from foredraft.models.identity import TargetShape

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
AUX = "eagle_aux_hidden_state_layer_ids"
SPECULATORS_DEFAULTS = {"norm_before_residual": True}  # what vLLM takes a missing field for
TOKENS = 5  # drafted in a row, at most, where nobody says otherwise
EMBEDDINGS, OUT_BIAS = "embed_tokens.weight", "midlayer.self_attn.o_proj.bias"
FIXED = {"num_hidden_layers": 1, "hidden_act": "silu", "mlp_bias": False, "logit_scale": 1.0}  # what we compute, under llama's names
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")


def layer_config(config: Eagle3Config, dtype: torch.dtype) -> dict[str, Any]:
    """The decoder layer in the fields of a llama's ``config.json``, with every default written out."""
    rope = dict(config.rope_parameters)
    return {
        "model_type": "llama",
        "hidden_size": config.target.hidden_size,
        "vocab_size": config.target.vocab_size,
        **{name: getattr(config, name) for name in SIZES},
        **FIXED,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "tie_word_embeddings": False,
        "dtype": dtype_name(dtype),
    }


def config_from(
    layer: Mapping[str, Any], outer: Mapping[str, Any], aux: Any, defaults: Mapping[str, bool], shape: TargetShape, where: str
) -> Eagle3Config:
    """The configuration of somebody else's head: ``layer`` as :func:`layer_config` has it, ``outer`` what stands beside it, ``aux`` the
    layers that are read, None for the usual ones; ``defaults`` of the flags, which depend on the format.

    Raises:
        ConfigurationError: it asks for what we do not compute, or belongs to another target.
    """
    _refuse_the_unknown(layer, outer, shape, where)
    try:
        heads = int(layer["num_attention_heads"])
        sizes: dict[str, Any] = {
            "intermediate_size": int(layer["intermediate_size"]),
            "num_attention_heads": heads,
            "num_key_value_heads": int(layer.get("num_key_value_heads") or heads),
            "head_dim": int(layer.get("head_dim") or shape.hidden_size // heads),
            "rms_norm_eps": float(layer.get("rms_norm_eps", 1e-6)),
            "max_position_embeddings": int(layer.get("max_position_embeddings", 2048)),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{where}: its config.json lacks a field, or has no number there: {error}") from error
    flags: dict[str, Any] = {name: bool(outer.get(name, layer.get(name, defaults.get(name, False)))) for name in (*FLAGS, "attention_bias")}
    layers = tuple(aux) if aux else (2, shape.layers // 2, shape.layers - 3)
    return Eagle3Config(
        shape,
        aux_layers=layers,
        draft_vocab_size=int(outer.get("draft_vocab_size") or shape.vocab_size),
        rope_parameters=_rope(layer),
        **sizes,
        **flags,
    )


def _refuse_the_unknown(layer: Mapping[str, Any], outer: Mapping[str, Any], shape: TargetShape, where: str) -> None:
    if layer.get("model_type", "llama") != "llama":
        raise ConfigurationError(f"{where} has a decoder layer of {layer['model_type']!r}; only llama's is supported")
    for name, wanted in FIXED.items():
        if layer.get(name, wanted) not in (wanted, None):
            raise ConfigurationError(f"{where} has {name} {layer[name]!r}; only {wanted!r} is supported")
    for found, name in ((layer, "hidden_size"), (layer, "vocab_size"), (outer, "target_hidden_size")):
        check_size(where, name, found.get(name), shape)


def _rope(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Positions as transformers has them now, from either generation of fields."""
    if isinstance(layer.get("rope_parameters"), Mapping):
        return {"rope_type": "default", **layer["rope_parameters"]}
    found = dict(layer.get("rope_scaling") or {})
    if "type" in found:
        found.setdefault("rope_type", found.pop("type"))
    return {"rope_type": "default", "rope_theta": float(layer.get("rope_theta") or 10000.0), **found}


def tensors_in(stored: Stored, config: Eagle3Config, model: PreTrainedModel | None) -> dict[str, Tensor]:
    """The tensors by our names, without those that repeat what the head has anyway.

    Raises:
        ConfigurationError: embeddings or biases of its own, or a draft vocabulary that contradicts itself.
    """
    tensors = {re.sub(r"^(model\.)?(layers\.0\.|midlayer\.)", "midlayer.", name): each for name, each in stored.tensors.items()}
    tensors = {name: each for name, each in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    if EMBEDDINGS in tensors:
        own = tensors.pop(EMBEDDINGS)
        same = None if model is None else same_weights(own, embeddings_of(model).weight)
        if not same:
            unknown = "to see whether they are, load it with its target as that was loaded (--target)"
            raise ConfigurationError(
                f"{stored.where} holds embeddings, {EMBEDDINGS}; only a head that uses its target's is supported: "
                + ("they differ from its target's" if same is False else unknown)
            )
    if OUT_BIAS in tensors and config.attention_bias and not tensors[OUT_BIAS].any():
        del tensors[OUT_BIAS]  # readers of attention_bias want one
    _check_vocabulary(tensors, config, stored.where)
    return tensors


def _check_vocabulary(tensors: dict[str, Tensor], config: Eagle3Config, where: str) -> None:
    """``d2t`` and ``t2d`` describe one draft vocabulary. Where it is the whole one, they may be there and say nothing."""
    size, whole = config.draft_vocab_size, config.target.vocab_size
    offsets, chosen = tensors.get("d2t"), tensors.get("t2d")
    if offsets is None:
        return  # missing where it is needed, and said so with the other tensors
    if offsets.shape != (size,) or offsets.is_floating_point() or (chosen is not None and chosen.shape != (whole,)):
        return  # of another shape, the same
    ids = offsets.long() + torch.arange(size)
    if len(set(ids.tolist())) != size or int(ids.min()) < 0 or int(ids.max()) >= whole:
        raise ConfigurationError(f"{where}: d2t names tokens twice or outside the vocabulary of {whole}")
    mask = torch.zeros(whole, dtype=torch.bool).index_fill_(0, ids, True)
    if chosen is not None and not torch.equal(chosen.bool(), mask):
        raise ConfigurationError(f"{where}: d2t and t2d name different tokens")
    if size == whole:
        if offsets.any():
            raise ConfigurationError(f"{where}: d2t permutes the whole vocabulary, which is not supported")
        tensors.pop("d2t")
        tensors.pop("t2d", None)
    else:
        tensors["d2t"], tensors["t2d"] = offsets.long(), mask


def tensors_of(head: Eagle3Head) -> dict[str, Tensor]:
    """What is stored of ``head``, by our names, and what readers want besides."""
    tensors = dict(head.state_dict())
    if head.config.attention_bias:
        weight = head.midlayer.self_attn.o_proj.weight
        tensors[OUT_BIAS] = torch.zeros(weight.shape[0], dtype=weight.dtype)
    return tensors


def own_fields(config: Eagle3Config) -> dict[str, Any]:
    """The fields that both formats have beside the decoder layer's."""
    sizes = {"draft_vocab_size": config.draft_vocab_size, "target_hidden_size": config.target.hidden_size}
    return {**sizes, **{name: getattr(config, name) for name in FLAGS}}


class Eagle3Format(Format):
    """What both formats share: how a checkpoint becomes contents, and what is lost."""

    kinds = ("eagle3",)
    without_tree = "other engines draft chains"

    @abstractmethod
    def foreign(self, stored: Stored, shape: TargetShape) -> Eagle3Config:
        """The configuration of a head that was not stored by us."""

    def read(self, stored: Stored, model: PreTrainedModel | None) -> Contents:
        config = from_block_as(Eagle3Config, stored) or self.foreign(stored, needs_target(stored, model))
        return Contents("eagle3", config, tensors_in(stored, config, model))


class PublishedEagle3(Eagle3Format):
    name = "eagle3"

    def recognises(self, config: Mapping[str, Any]) -> bool:
        architectures = config.get("architectures") or ()
        return "speculators_model_type" not in config and (
            "draft_vocab_size" in config or any(each in ARCHITECTURES for each in architectures)
        )

    def foreign(self, stored: Stored, shape: TargetShape) -> Eagle3Config:
        config, eagle = stored.config, stored.config.get("eagle_config") or {}
        aux = config.get(AUX) or [layer + 1 for layer in eagle.get(AUX) or ()]
        return config_from(config, {**config, **eagle}, aux, {}, shape, stored.where)

    def write(self, head: Head, about: Mapping[str, Any], target: str) -> Stored:
        assert isinstance(head, Eagle3Head)
        ours = head.config
        config = {
            "architectures": [ARCHITECTURES[0]],
            **layer_config(ours, head.fc.weight.dtype),
            **own_fields(ours),
            "eagle_config": {
                AUX: [layer - 1 for layer in ours.aux_layers],
                "use_aux_hidden_state": True,
                "norm_before_fc": ours.norm_before_fc,
            },
            OURS: block(head, about),
        }
        return Stored(config, tensors_of(head))


class Speculators(Eagle3Format):
    name = "speculators"

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return "speculators_model_type" in config

    def read(self, stored: Stored, model: PreTrainedModel | None) -> Contents:
        if (kind := stored.config["speculators_model_type"]) != "eagle3":
            raise ConfigurationError(f"{stored.where} is a speculator of type {kind!r}; only 'eagle3' is supported")
        return super().read(stored, model)

    def foreign(self, stored: Stored, shape: TargetShape) -> Eagle3Config:
        layer = stored.config.get("transformer_layer_config")
        if not isinstance(layer, Mapping):
            raise ConfigurationError(f"{stored.where}: config.json lacks transformer_layer_config")
        return config_from(layer, stored.config, stored.config.get(AUX), SPECULATORS_DEFAULTS, shape, stored.where)

    def write(self, head: Head, about: Mapping[str, Any], target: str) -> Stored:
        assert isinstance(head, Eagle3Head)
        ours = head.config
        proposal = {"proposal_type": "greedy", "speculative_tokens": min(TOKENS, ours.steps)}
        proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": target, "architectures": []},
            },
            "transformer_layer_config": layer_config(ours, head.fc.weight.dtype),
            **own_fields(ours),
            AUX: list(ours.aux_layers),
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
            "dtype": dtype_name(head.fc.weight.dtype),
            OURS: block(head, about),
        }
        return Stored(config, {self.spelled(name): tensor for name, tensor in tensors_of(head).items()})

    def spelled(self, name: str) -> str:
        return re.sub(r"^midlayer\.", "layers.0.", name)
