"""Small models that the native kernels take, and what skips a test where there can be no kernels."""

from __future__ import annotations

import copy
import os
import platform

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    LlamaConfig,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from foredraft.backends import native
from foredraft.backends import packing as packing_module

AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)  # transformers loads it as part of Mistral 3 only
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
SIZES = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "llama-biases": LlamaConfig(**{**SIZES, "attention_bias": True, "mlp_bias": True}),
    "llama-heads": LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "llama-one-key-head": LlamaConfig(**{**SIZES, "num_key_value_heads": 1, "head_dim": 64}),
    "mistral-window": MistralConfig(**{**SIZES, "sliding_window": 12}),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
}
ROUTED = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
BY_SIGMOID = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
LATENT = {
    "head_dim": 64, "num_key_value_heads": 4, "kv_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip
ERNIE = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 48, "moe_num_shared_experts": 2, "moe_norm_min": 0.4}
MIXTURES = {
    "qwen3_moe": Qwen3MoeConfig(**{**SIZES, **ROUTED, "norm_topk_prob": True}),
    "qwen3_moe-not-normed": Qwen3MoeConfig(**{**SIZES, **ROUTED, "norm_topk_prob": False}),
    "qwen3_moe-some-layers": Qwen3MoeConfig(**{**SIZES, **ROUTED, "mlp_only_layers": [0]}),
    "mixtral": MixtralConfig(**{**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2_moe": Qwen2MoeConfig(**{**SIZES, **ROUTED, "shared_expert_intermediate_size": 96}),
    "glm4_moe": Glm4MoeConfig(**{**SIZES, **BY_SIGMOID, "use_qk_norm": True}),
    "glm4_moe-not-normed": Glm4MoeConfig(**{**SIZES, **BY_SIGMOID, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
    "ernie4_5_moe": Ernie4_5_MoeConfig(**{**SIZES, **ERNIE, "pad_token_id": None}),
}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
WIDER = {"intermediate_size": 128}  # a multiple of 64 also where nothing lies beside it
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
DESCRIBED = {  # families that run by a description: the model type, and what differs from SIZES
    "cwm": ("cwm", {"bos_token_id": 1, "sliding_window": 12, "layer_types": MIXED, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }}),
    "ministral": ("ministral", {"sliding_window": 12, "layer_types": MIXED}),
    "phi3": ("phi3", {"num_attention_heads": 2, "tie_word_embeddings": True}),
    "phi3-window-partial": ("phi3", {"num_attention_heads": 2, "sliding_window": 12, "rope_parameters": HALF}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {
        "sliding_window": 12, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 20,
    }),
    "gemma3": ("gemma3_text", {"sliding_window": 12, "layer_types": MIXED, "query_pre_attn_scalar": 20}),
    "gemma3-cap": ("gemma3_text", {"sliding_window": 70, "layer_types": MIXED, "final_logit_softcapping": 3.0, "num_key_value_heads": 1}),
    "granite": ("granite", {
        "attention_multiplier": 0.3, "residual_multiplier": 0.6, "embedding_multiplier": 3.0, "logits_scaling": 3.0, "attention_bias": True,
    }),
    "granite_swa": ("granite_swa", {
        "attention_multiplier": 0.3, "residual_multiplier": 0.6, "embedding_multiplier": 3.0, "logits_scaling": 3.0, "sliding_window": 12,
        "layer_types": MIXED, "layer_rope_theta": [10000.0, 0, 10000.0],
    }),
    "hyperclovax": ("hyperclovax", {
        "attention_multiplier": 0.3, "residual_multiplier": 0.6, "embedding_multiplier": 3.0, "logits_scaling": 3.0, "attention_bias": True,
    }),
    "vaultgemma": ("vaultgemma", {
        "sliding_window": 12, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 20,
    }),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 12, "layer_types": MIXED}),
    "glm": ("glm", {"num_attention_heads": 2, "attention_bias": True}),
    "glm4": ("glm4", {"num_attention_heads": 2, "attention_bias": True}),
    "cohere": ("cohere", {"num_attention_heads": 2, "logit_scale": 0.3}),
    "cohere2": ("cohere2", {"sliding_window": 12, "layer_types": MIXED, "logit_scale": 0.3}),
    "starcoder2": ("starcoder2", {**WIDER, "num_attention_heads": 2, "sliding_window": 12}),
    "gpt_neox": ("gpt_neox", {**WIDER, "num_attention_heads": 2, "rope_parameters": {**HALF, "partial_rotary_factor": 0.25}}),
    "gpt_neox-serial": ("gpt_neox", {**WIDER, "num_attention_heads": 2, "use_parallel_residual": False}),
    "phi": ("phi", {**WIDER, "num_attention_heads": 2, "rope_parameters": HALF}),
    "phi-norms": ("phi", {**WIDER, "num_attention_heads": 2, "qk_layernorm": True}),
    "persimmon": ("persimmon", {**WIDER, "num_attention_heads": 2}),
    "stablelm": ("stablelm", {"num_attention_heads": 2, "use_qkv_bias": True, "rope_parameters": {**HALF, "partial_rotary_factor": 0.25}}),
    "stablelm-parallel": ("stablelm", {"head_dim": 16, "use_parallel_residual": True}),
    "nemotron": ("nemotron", {**WIDER, "num_attention_heads": 2}),
    "seed_oss": ("seed_oss", {"attention_bias": True}),
    "arcee": ("arcee", {**WIDER, "mlp_bias": True}),
    "jais2": ("jais2", {**WIDER, "attention_bias": True, "mlp_bias": True}),
    "helium": ("helium", {"num_attention_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "ernie4_5": ("ernie4_5", {}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "mistral-wide-window": ("mistral", {"sliding_window": 70}),
    "qwen2-window": ("qwen2", {"sliding_window": 12, "use_sliding_window": True, "layer_types": MIXED}),
    "qwen3-window": ("qwen3", {"sliding_window": 12, "use_sliding_window": True, "layer_types": MIXED}),
    "exaone4": ("exaone4", {"sliding_window": 12, "layer_types": MIXED}),
    "olmoe": ("olmoe", {"num_attention_heads": 2, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 12, "layer_types": MIXED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": ("mixtral", {"sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe-window": ("qwen3_moe", {**ROUTED, "sliding_window": 12, "use_sliding_window": True, "mlp_only_layers": [1]}),
    "qwen2_moe-window": ("qwen2_moe", {**ROUTED, "sliding_window": 12, "use_sliding_window": True, "layer_types": MIXED}),
    "mellum": ("mellum", {
        **ROUTED, "sliding_window": 12, "layer_types": MIXED, "mlp_layer_types": ["dense", "sparse", "sparse"], "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }),
    "glm4_moe-partial": ("glm4_moe", {**BY_SIGMOID, "use_qk_norm": True, "attention_bias": True, "rope_parameters": HALF}),
    "ernie4_5_moe-some-layers": ("ernie4_5_moe", {**ERNIE, "moe_layer_interval": 2}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, **BY_SIGMOID, "q_lora_rank": 64}),
    "deepseek_v3-halves": ("deepseek_v3", {**LATENT, **BY_SIGMOID, "q_lora_rank": None, "rope_interleave": False}),
    "deepseek_v2": ("deepseek_v2", {**LATENT, **BY_SIGMOID, "q_lora_rank": 64, "topk_method": "group_limited_greedy"}),
    "deepseek_v2-lite": ("deepseek_v2", {
        **LATENT, **BY_SIGMOID, "q_lora_rank": None, "topk_method": "greedy", "n_group": None, "topk_group": None,
    }),
    "glm4_moe_lite": ("glm4_moe_lite", {**LATENT, **BY_SIGMOID, "q_lora_rank": 64}),
    "youtu": ("youtu", {**LATENT, "q_lora_rank": 64}),
    "mistral4": ("mistral4", {**LATENT, **BY_SIGMOID, "q_lora_rank": 64, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "mscale": 0.2, "mscale_all_dim": 0.3, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 4, "partial_rotary_factor": 1.0,
    }}),
    "dots1": ("dots1", {**BY_SIGMOID, "sliding_window": 12, "layer_types": MIXED}),
    "solar_open": ("solar_open", {**BY_SIGMOID, "attention_bias": True}),
    "exaone_moe": ("exaone_moe", {
        **BY_SIGMOID, "num_experts": 8, "num_shared_experts": 2, "sliding_window": 12, "sliding_window_pattern": 2, "layer_types": MIXED,
    }),
    "ministral3": ("ministral3", {"sliding_window": 12, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16,
    }}),
}  # fmt: skip
REFUSALS = [why for dtype in DTYPES if (why := native.refusal(dtype))]
WANTED = any(map(os.environ.get, ("FOREDRAFT_SANITIZE", "FOREDRAFT_INSTRUCTIONS"))) or (
    "CI" in os.environ and platform.system() == "Linux" and platform.machine() in native.INSTRUCTIONS
)
if REFUSALS and (WANTED or "could not be compiled" in str(REFUSALS)):  # else a run without any kernel is green
    raise RuntimeError(f"there should be kernels here: {REFUSALS}")
needs_kernels = pytest.mark.skipif(bool(REFUSALS), reason=f"no kernels here: {REFUSALS}")


def config_of(name, **others):
    if name in (*MODELS, *MIXTURES):
        return copy.deepcopy({**MODELS, **MIXTURES}[name])
    kind, options = DESCRIBED[name]
    given = {**SIZES, "pad_token_id": None, "mlp_bias": False, "attention_bias": kind == "gpt_neox", **copy.deepcopy(options), **others}
    return AutoConfig.for_model(kind, **given)


def build(name, dtype, experts_implementation=None, **others):
    how = {"attn_implementation": "sdpa"} if name not in DESCRIBED else {}
    how |= {} if experts_implementation is None else {"experts_implementation": experts_implementation}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config_of(name, **others), **how).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)  # biases and norms that matter
    return rounded(model, dtype)


def rounded(model, dtype):
    """``model`` in ``dtype``, but for what transformers keeps in float32 when it loads one; corrections of routers matter."""
    names = model._keep_in_fp32_modules_strict or ()
    kept = {name: each for name, each in model.state_dict().items() if any(part in name for part in names)}
    model.to(dtype)
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, numbers in kept.items():
        correction = 0.3 * torch.randn(numbers.shape, generator=torch.Generator().manual_seed(5))
        held[name].data = numbers + correction if "correction" in name else numbers
    return model


@pytest.fixture
def always(monkeypatch):
    """Tiny layers are not worth it; here every one of them is laid out for the kernels."""
    monkeypatch.setattr(packing_module, "preferred_hint", lambda groups, hints: hints[-1])
