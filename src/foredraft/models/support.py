"""Which models can be verified, and how.

A model takes trees if its cache is a key-value cache over attention layers of the types transformers masks for us (full,
sliding, chunked), so that rejected tokens can be forgotten and siblings kept apart. Some others can verify chains. Those
in kinds.py are known to differ; the self-test of a target (self_test.py) catches what no list knows.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from foredraft.errors import UnsupportedModelError
from foredraft.models.kinds import RECURRENT, RECURRENT_IN_STEPS, REFUSED_WITH_ENCODER, ROLLS_BACK, SLOT_POSITIONS
from foredraft.models.positions import first_position

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
# how many positions a decoder has, in configurations; the last two are of Whisper and LED
LONGEST = ("max_position_embeddings", "max_seq_len", "max_target_positions", "max_decoder_position_embeddings")


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """A model, and what everybody who makes passes of it has to know.

    Attributes:
        device: where input ids go.
        vocab_size: ids that it has logits for.
        context: most tokens that a row may hold; None if the model sets no limit.
        trained: tokens that the model was made for; with rotary positions, rows go on beyond. None if the model does not say.
        chains_only: why it can verify chains but no branching trees; None if it takes trees.
        sourced: it has an encoder, which reads a source for every row (:mod:`foredraft.models.encoder_decoder`).
    """

    model: PreTrainedModel
    device: torch.device
    vocab_size: int
    context: int | None
    trained: int | None
    chains_only: str | None
    sourced: bool

    @staticmethod
    def of(model: PreTrainedModel) -> ModelFacts:
        """
        Raises:
            UnsupportedModelError: see :func:`check_model`.
        """
        check_model(model)
        if any(getattr(each, "alora_invocation_tokens", None) for each in (getattr(model, "peft_config", None) or {}).values()):
            raise UnsupportedModelError("activated LoRA acts from its invocation tokens on, which is not supported; use model.generate")
        config = model.config.get_text_config()
        vocab_size: int = getattr(model.get_output_embeddings(), "out_features", None) or config.vocab_size
        sourced = bool(model.config.is_encoder_decoder)
        context, trained = context_of(config)
        if sourced and context is not None:
            context -= first_position(model.get_decoder())
        return ModelFacts(model, input_device(model), vocab_size, context, trained, chains_only(model), sourced)


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, adapters included, or inside ``torch.compile``, or the model itself.

    Raises:
        UnsupportedModelError: a PEFT method that puts virtual tokens into the cache, or one that acts from certain tokens on.
    """
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        if getattr(model, "active_peft_config", None) is not None and model.active_peft_config.is_prompt_learning:
            raise UnsupportedModelError(
                "prompt-learning adapters put virtual tokens into the cache, which is not supported; use LoRA, or model.generate"
            )
        return model.get_base_model()
    if not hasattr(model, "generate") or not hasattr(model, "config"):
        raise UnsupportedModelError(f"expected a transformers causal language model, got {type(model).__name__}")
    return model


def input_device(model: PreTrainedModel) -> torch.device:
    """Where input ids go: the device of the embeddings, also under a device map."""
    embeddings = model.get_input_embeddings()
    device: torch.device = embeddings.weight.device if embeddings is not None else model.device
    if device.type != "meta":
        return device
    hook = getattr(embeddings, "_hf_hook", None)  # accelerate: an offloaded weight is nowhere until it is needed
    return torch.device(getattr(hook, "execution_device", None) or "cpu")


def describe(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} ({model.config.get_text_config().model_type})"


def check_model(model: PreTrainedModel) -> None:
    """Refuse by name what cannot work.

    Raises:
        UnsupportedModelError: says why and what to do instead.
    """
    config = model.config.get_text_config()
    name = describe(model)
    sourced = bool(model.config.is_encoder_decoder)
    kinds_of_parts = (model.config.model_type, config.model_type)  # of an EncoderDecoderModel also that of its decoder
    if sourced and (why := next((REFUSED_WITH_ENCODER[each] for each in kinds_of_parts if each in REFUSED_WITH_ENCODER), None)):
        raise UnsupportedModelError(f"{name} {why}; use model.generate")
    if model.get_output_embeddings() is None:
        loader = "AutoModelForSeq2SeqLM" if sourced else "AutoModelForCausalLM"
        raise UnsupportedModelError(f"{name} has no language-modelling head; load it with {loader}")
    kinds = set(getattr(config, "layer_types", None) or ())
    parts = [model, model.get_decoder()] if sourced else [model]
    recurrent = config.model_type in RECURRENT or any(getattr(each, "_is_stateful", False) for each in parts) or kinds - ROLLS_BACK
    if recurrent and config.model_type not in RECURRENT_IN_STEPS:
        odd = f" (layers: {', '.join(sorted(kinds - ROLLS_BACK))})" if kinds - ROLLS_BACK else ""
        raise UnsupportedModelError(f"{name} keeps a recurrent state{odd} that cannot roll back a rejected token; use model.generate")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise UnsupportedModelError(
            f"{name} is loaded with attn_implementation={config._attn_implementation!r}, which takes no tree mask; "
            "load it with attn_implementation='sdpa' (or 'eager')"
        )


def context_of(config: PreTrainedConfig) -> tuple[int | None, int | None]:
    """Most tokens that a row may hold, None if there is no limit; and how many the model was made for, None if it does not say.

    A table of positions ends. Rotary positions do not, and transformers goes on with them. But with longrope and dynamic scaling, the
    whole pass is rotated in another way once any position lies beyond a boundary: a draft that reaches beyond it would change the logits
    before it, and what is cached would no longer fit. Such a model ends there, and says so.
    """
    longest: int | None = next((most for name in LONGEST if (most := getattr(config, name, None))), None)
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = [rope for rope in [ropes, *ropes.values()] if isinstance(rope, dict) and rope.get("rope_type")]
    changing = [rope for rope in kinds if rope["rope_type"] == "longrope" or "dynamic" in rope["rope_type"]]
    if config.model_type.startswith("hunyuan"):  # its dynamic scaling is a fixed one where there is an alpha
        changing = [rope for rope in changing if not rope.get("alpha")]
    if not changing or longest is None:
        return (None if kinds else longest), longest
    rope_type = changing[0]["rope_type"]
    boundary = longest
    if rope_type == "longrope":
        boundary = min(longest, changing[0].get("original_max_position_embeddings") or longest)
    if boundary < longest or rope_type != "longrope":
        of = f" (of {longest})" if boundary < longest else ""
        warnings.warn(
            f"{config.model_type} with {rope_type} rotary positions rotates every token in another way beyond {boundary} tokens; Foredraft "
            f"serves it up to there{of}",
            stacklevel=4,
        )
    return boundary, boundary


def chains_only(model: PreTrainedModel) -> str | None:
    """Why ``model``, which passed :func:`check_model`, can verify chains but no branching trees; None if it takes trees."""
    config = model.config.get_text_config()
    name = describe(model)
    layers = set(getattr(config, "layer_types", None) or ())
    if config.model_type in RECURRENT_IN_STEPS and not (layers and layers <= ROLLS_BACK):  # Granite 4 has some without a recurrent layer
        return f"{name} keeps a recurrent state, which can roll back but not branch"
    if config.model_type in SLOT_POSITIONS:
        return f"{name} computes {SLOT_POSITIONS[config.model_type]} from cache slots, so it can roll back but not branch"
    if config.model_type == "falcon" and getattr(config, "alibi", False):
        return f"{name} with alibi computes its position bias from cache slots, so it can roll back but not branch"
    return None


def tolerance(model: PreTrainedModel) -> float:
    """How much logits from two ways to compute the same may differ, relative to the largest."""
    return TOLERANCE.get(model.dtype, 0.1)  # half precision and quantised weights round differently per shape


def is_half(model: PreTrainedModel) -> bool:
    return model.dtype not in (torch.float32, torch.float64)


def is_routed(model: PreTrainedModel) -> bool:
    """Whether its tokens choose among experts."""
    config = model.config.get_text_config()
    return any((getattr(config, name, None) or 0) > 1 for name in ("num_experts", "num_local_experts", "n_routed_experts"))
