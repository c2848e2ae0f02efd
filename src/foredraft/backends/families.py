"""What the layers of decoder families are made of, for :mod:`foredraft.backends.described_pass`: a line for most families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Family:
    """A family of decoders: where its parts are, and what they do that is not seen in the modules themselves.

    Attributes:
        model: the decoder's class name without the family's name.
        layers, last: names in the decoder: its layers, and the norm after them.
        qkv, output, wide, down: the linear layers of a layer; several names if they are separate. ``wide`` lead into the MLP's inner size.
        before, after: the norms in front of the attention and of the MLP; None for none.
        attention_given, mlp_given: the norms of their outputs, before these are added.
        head_norms: norms of queries and keys; not every model of a family has them.
        turned_first: ``head_norms`` follow RoPE.
        activation: of the MLP.
        layer_cap: the attention's attribute with the cap of its scores; None for none.
        turns: whether an attention uses RoPE.
        interleaved, once: RoPE pairs are adjacent numbers, or the field of the configuration that says so; RoPE rounds once.
        grouped: ``qkv`` has query, key and value of each head together.
        latent: latent attention, as in DeepSeek-V2; there is no ``qkv`` then.
        in_pairs: interleaved pairs stay so in what latent attention caches.
        parallel: attention and MLP read the same input; or the attribute of a layer that says so.
        halves: RoPE angles are given for one half of the numbers.
        tempered: the factor of queries at given positions, by the configuration; None for none.
        multiplied: logits are multiplied by the configuration's ``logits_scaling``, not divided.
        refused: why a model of this family cannot be run, by its configuration; None if it can.
    """

    model: str = "Model"
    layers: str = "layers"
    last: str = "norm"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    wide: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    before: str | None = "input_layernorm"
    after: str | None = "post_attention_layernorm"
    attention_given: str | None = None
    mlp_given: str | None = None
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    turned_first: bool = False
    activation: str = "mlp.act_fn"
    layer_cap: str | None = None
    turns: Callable[[Any], bool] = lambda attention: True
    interleaved: bool | str = False
    once: bool = False
    grouped: bool = False
    latent: bool = False
    in_pairs: bool = False
    parallel: bool | str = False
    halves: bool = False
    tempered: Callable[[Any, Tensor], Tensor | None] = lambda config, positions: None
    multiplied: bool = False
    refused: Callable[[Any], str | None] = lambda config: None


def both_ways(config: Any) -> str | None:
    return "it attends in both directions" if getattr(config, "use_bidirectional_attention", False) else None


def clipped(config: Any) -> str | None:
    return None if config.clip_qkv is None else "it cuts queries, keys and values at a limit"


def turned_differently(config: Any) -> str | None:
    known = {0, config.rope_parameters["rope_theta"]}
    return None if known.issuperset(config.layer_rope_theta) else "RoPE of its layers differs in theta"


def tempered(config: Any, positions: Tensor) -> Tensor | None:
    """The factor of queries of Ministral 3 and Mistral 4."""
    rope = config.rope_parameters
    beta, most = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return None if beta is None else 1 + beta * torch.log(1 + torch.floor(positions / most))


def theta_is_given(attention: Any) -> bool:
    return bool(attention.config.layer_rope_theta[attention.layer_idx])


def windowed_only(attention: Any) -> bool:
    return attention.sliding_window is not None


def where_windows_are(attention: Any) -> bool:
    return attention.sliding_window is None or bool(attention.is_sliding)


PLAIN = Family()
JOINED = Family(wide=("mlp.gate_up_proj",), activation="mlp.activation_fn")
SANDWICH = Family(
    after="pre_feedforward_layernorm",
    attention_given="post_attention_layernorm",
    mlp_given="post_feedforward_layernorm",
    refused=both_ways,
)
GIVEN = Family(before=None, after=None, attention_given="post_attention_layernorm", mlp_given="post_feedforward_layernorm")
COHERE = Family(after=None, parallel=True, interleaved=True, once=True)
LATENT = Family(qkv=(), head_norms=("q_a_layernorm", "kv_a_layernorm"), interleaved="rope_interleave", latent=True)
FAMILIES = {
    **dict.fromkeys(("Llama", "Mistral", "Ministral", "Cwm", "Qwen2", "Qwen3", "Gemma", "Granite", "SeedOss"), PLAIN),
    "Phi3": replace(JOINED, qkv=("qkv_proj",)),
    "Gemma2": replace(SANDWICH, layer_cap="attn_logit_softcapping"),
    "Gemma3": replace(SANDWICH, model="TextModel"),
    "VaultGemma": Family(after="pre_feedforward_layernorm", layer_cap="attn_logit_softcapping"),
    "GraniteSWA": Family(turns=theta_is_given, refused=turned_differently),
    "HyperCLOVAX": Family(attention_given="post_norm1", mlp_given="post_norm2", multiplied=True),
    "SmolLM3": Family(turns=lambda attention: bool(attention.use_rope)),
    **dict.fromkeys(("Olmo2", "Olmo3"), GIVEN),
    "Exaone4": replace(GIVEN, turns=where_windows_are),
    "ExaoneMoe": Family(turns=where_windows_are),
    "Glm": replace(JOINED, interleaved=True),
    "Glm4": replace(JOINED, interleaved=True, attention_given="post_self_attn_layernorm", mlp_given="post_mlp_layernorm"),
    "Cohere": COHERE,
    "Cohere2": replace(COHERE, turns=windowed_only),
    "Starcoder2": Family(wide=("mlp.c_fc",), down="mlp.c_proj", activation="mlp.act"),
    "GPTNeoX": Family(
        last="final_layer_norm",
        attention="attention",
        qkv=("query_key_value",),
        output="dense",
        wide=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        activation="mlp.act",
        grouped=True,
        parallel="use_parallel_residual",
    ),
    "Phi": Family(
        last="final_layernorm",
        output="dense",
        wide=("mlp.fc1",),
        down="mlp.fc2",
        after=None,
        head_norms=("q_layernorm", "k_layernorm"),
        activation="mlp.activation_fn",
        parallel=True,
    ),
    "Persimmon": Family(
        last="final_layernorm",
        qkv=("query_key_value",),
        output="dense",
        wide=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        head_norms=("q_layernorm", "k_layernorm"),
        activation="mlp.act",
        grouped=True,
    ),
    "StableLm": Family(head_norms=("q_layernorm", "k_layernorm"), parallel="use_parallel_residual"),
    **dict.fromkeys(("Nemotron", "Arcee", "Jais2"), Family(wide=("mlp.up_proj",))),
    **dict.fromkeys(("Ernie4_5", "Ernie4_5_Moe", "Helium"), Family(interleaved=True)),
    "HunYuanDenseV1": Family(head_norms=("query_layernorm", "key_layernorm"), turned_first=True),
    "Ministral3": Family(tempered=tempered),
    **dict.fromkeys(("Mixtral", "Qwen2Moe", "Qwen3Moe", "Glm4Moe", "SolarOpen", "Dots1", "Mellum"), PLAIN),
    "Olmoe": Family(refused=clipped),
    "GptOss": Family(halves=True),
    **dict.fromkeys(("DeepseekV3", "Glm4MoeLite", "Youtu"), LATENT),
    "Mistral4": replace(LATENT, tempered=tempered),
    "DeepseekV2": replace(LATENT, interleaved=True, in_pairs=True, halves=True),
}


def interleaves(family: Family, config: Any) -> bool:
    return family.interleaved if isinstance(family.interleaved, bool) else bool(getattr(config, family.interleaved))


def family_of(model: Any, base: Any) -> str | None:
    """The family of language model ``model`` with the decoder ``base``; None if it is not described here. Models that take images as well
    may have decoders of other families."""
    known = next((each for each, family in FAMILIES.items() if type(base).__name__ == each + family.model), None)
    return known if type(base).__module__.startswith("transformers.models.") and base is model.get_decoder() else None


def heads_of(base: Any) -> tuple[str, ...]:
    """The classes of models that are of the family of the decoder ``base`` themselves."""
    name = next(each for each, family in FAMILIES.items() if type(base).__name__ == each + family.model)
    return f"{name}ForCausalLM", f"{name}ForConditionalGeneration"
