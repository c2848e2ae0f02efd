"""Tiny random models, one per architecture family, for tests.

A decoding method that works on llama may be silently wrong elsewhere: another position scheme,
another window, another cache. `ARCHITECTURES` names what the tests sweep over. Importing this
module imports neither torch nor transformers; `build` makes a model in milliseconds.

The weights are drawn wide on purpose. A model at its usual initialisation repeats one token with
nearly tied logits, and then wrong attention still yields equal text. Windows and chunks are far
shorter than a 40-token prompt, so a window that is ignored changes the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 128
CONTEXT = 512
SEED = 0

BOTH = ("sdpa", "eager")
EAGER = ("eager",)


@dataclass(frozen=True)
class Architecture:
    """One family: how to build a tiny model of it, and what may be expected of that model.

    `support` is "tree" (a token tree may be verified in one forward), "chain" (one continuation
    at a time) or "refused" (its state cannot be rolled back, or it is no decoder-only model).
    """

    name: str
    build: Callable[[str], PreTrainedModel]  # attention implementation -> float32, eval mode
    implementations: tuple[str, ...]
    window: int | None  # smallest sliding window or chunk; None if every layer sees everything
    support: str
    note: str = ""


def build(name: str, implementation: str = "sdpa") -> PreTrainedModel:
    """The tiny model `name`, with the same weights for every implementation and every call."""
    if name not in ARCHITECTURES:
        raise KeyError(f"unknown architecture {name!r}; choose from {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name].build(implementation)


# Sizes of which a decoder layer becomes one call of a kernel, for the families that have such: products of 64 outputs and 32 inputs or
# a multiple, heads of 32 numbers.
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}


def build_wide(family: str) -> PreTrainedModel:
    """A family, or "llama wide" and the like for sizes that the kernels take, with the first implementation."""
    name, *wide = family.split()
    make, how = ARCHITECTURES[name].build, ARCHITECTURES[name].implementations[0]
    *shared, options = make.args
    return make.func(*shared, {**options, **WIDE} if wide else options, how)


def _tiny(
    model_class: str,
    implementations: tuple[str, ...],
    std: float,
    options: dict[str, Any],
    implementation: str,
) -> PreTrainedModel:
    """A seeded model of `model_class`; the caller's random state is left as it was."""
    import torch
    import transformers

    if implementation not in implementations:
        raise ValueError(f"{model_class} runs with {implementations}, not {implementation!r}")
    cls = getattr(transformers, model_class)
    config = cls.config_class(**options, attn_implementation=implementation)
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):  # whoever asks first, others may need gradients
        # Not torch.manual_seed, which would reseed the accelerators too.
        torch.default_generator.manual_seed(SEED)
        model = cls(config)
    _widen(model, std)
    return model.float().eval()


def _widen(model: PreTrainedModel, std: float) -> None:
    """Redraw matrices and biases; norms, convolutions and recurrences keep their own start."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            field = name.rpartition(".")[2]
            if any(part in name for part in ("conv", "A_log", "time_", "dt_", "rglru")):
                continue
            if weight.dim() >= 2:
                weight.normal_(0.0, std, generator=generator)
            elif field in ("bias", "sinks"):
                weight.normal_(0.0, 0.2, generator=generator)


_UNTIED = {"tie_word_embeddings": False}  # where a tied head would only echo the last token
_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SIZE = dict(_IDS, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, hidden_size=32)
_MULTI_HEAD = dict(_SIZE, num_hidden_layers=2, num_attention_heads=4)
_HEADS = dict(_MULTI_HEAD, intermediate_size=64)
_GROUPED = dict(_HEADS, num_key_value_heads=2)
_GPT = dict(_IDS, vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4)
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_SHARED = {  # experts beside one that every token takes, behind a layer without any
    "num_hidden_layers": 3,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT = dict(
    _HEADS | _SHARED,
    num_key_value_heads=4,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
)
_INDEXED = dict(_LATENT, index_topk=8, index_head_dim=16, index_n_heads=2)
_MAMBA = {  # the state-space sublayers of bamba, falcon_h1 and granitemoehybrid
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
}
_DELTA = {  # the linear-attention layers of qwen3_next and qwen3_5
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_WINDOW = 12
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def _family(
    support: str,
    name: str,
    model_class: str,
    *sizes: dict[str, Any],
    implementations: tuple[str, ...] = BOTH,
    window: int | None = None,
    std: float = 0.35,
    note: str = "",
    **options: Any,
) -> Architecture:
    """`sizes` and `options` are the configuration, later ones winning."""
    merged = {key: value for size in (*sizes, options) for key, value in size.items()}
    builder = partial(_tiny, model_class, implementations, std, merged)
    return Architecture(name, builder, implementations, window, support, note)


_tree = partial(_family, "tree")
_windowed = partial(_family, "tree", window=_WINDOW, sliding_window=_WINDOW)
_chain = partial(_family, "chain")
_refused = partial(_family, "refused")

_FULL_ATTENTION = (
    _tree("llama", "LlamaForCausalLM", _GROUPED),
    _tree("qwen2", "Qwen2ForCausalLM", _GROUPED),
    _tree("qwen3", "Qwen3ForCausalLM", _GROUPED, head_dim=16),
    _tree(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _GROUPED,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    _tree("gemma", "GemmaForCausalLM", _GROUPED, head_dim=8),
    _tree("gpt2", "GPT2LMHeadModel", _GPT, _NO_DROPOUT),
    _tree("gpt_neox", "GPTNeoXForCausalLM", _HEADS),
    _tree("opt", "OPTForCausalLM", _MULTI_HEAD, std=0.5, ffn_dim=64, word_embed_proj_dim=32),
    _tree("stablelm", "StableLmForCausalLM", _GROUPED),
    _tree("olmo", "OlmoForCausalLM", _GROUPED),
    _tree("olmo2", "Olmo2ForCausalLM", _GROUPED),
    _tree("granite", "GraniteForCausalLM", _GROUPED),
    _tree("cohere", "CohereForCausalLM", _GROUPED, logit_scale=1.0),
    _tree("deepseek_v2", "DeepseekV2ForCausalLM", _LATENT, note="latent keys and values"),
    _tree("deepseek_v3", "DeepseekV3ForCausalLM", _LATENT, note="latent keys and values"),
    _tree(
        "smollm3",
        "SmolLM3ForCausalLM",
        _GROUPED,
        num_hidden_layers=3,
        no_rope_layer_interval=2,
        note="no rotation in every second layer",
    ),
    _tree("glm4", "Glm4ForCausalLM", _GROUPED, head_dim=8),
    _tree("glm", "GlmForCausalLM", _GROUPED, head_dim=8),
    _tree("arcee", "ArceeForCausalLM", _GROUPED),
    _tree("jais2", "Jais2ForCausalLM", _GROUPED),
    _tree("helium", "HeliumForCausalLM", _GROUPED, head_dim=8),
    _tree("hyperclovax", "HyperCLOVAXForCausalLM", _GROUPED),
    _tree("persimmon", "PersimmonForCausalLM", _HEADS, std=0.2),
    _tree("youtu", "YoutuForCausalLM", _LATENT, _UNTIED, note="latent keys and values"),
    _tree("mellum", "MellumForCausalLM", _GROUPED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    _tree("mistral4", "Mistral4ForCausalLM", _LATENT, note="latent keys and values"),
    _tree("seed_oss", "SeedOssForCausalLM", _GROUPED, head_dim=8),
    _tree("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", _GROUPED, head_dim=8),
    _tree("nemotron", "NemotronForCausalLM", _GROUPED, head_dim=8),
    _tree("gpt_bigcode", "GPTBigCodeForCausalLM", _GPT, _NO_DROPOUT, note="one key-value head"),
    _tree("biogpt", "BioGptForCausalLM", _HEADS, _UNTIED, std=0.25),
    _tree(
        "falcon",
        "FalconForCausalLM",
        _MULTI_HEAD,
        _UNTIED,
        std=0.5,
        note="one key-value head",
    ),
    _tree(
        "falcon_grouped",
        "FalconForCausalLM",
        _MULTI_HEAD,
        _UNTIED,
        new_decoder_architecture=True,
        num_kv_heads=2,
    ),
    _tree("phi", "PhiForCausalLM", _GROUPED),
    _tree("ministral3", "Ministral3ForCausalLM", _GROUPED, head_dim=8),
    _tree("ernie4_5", "Ernie4_5ForCausalLM", _GROUPED, head_dim=8),
    _tree("olmoe", "OlmoeForCausalLM", _GROUPED, num_experts=4, num_experts_per_tok=2),
    _tree(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _GROUPED,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    _tree("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", _GROUPED, moe_num_experts=4, moe_k=2, moe_intermediate_size=32),
    _tree("dots1", "Dots1ForCausalLM", _GROUPED, _SHARED, head_dim=8),
    _tree("solar_open", "SolarOpenForCausalLM", _GROUPED, _SHARED, head_dim=8),
    _tree("glm4_moe_lite", "Glm4MoeLiteForCausalLM", _LATENT, note="latent keys and values"),
    _tree(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        _GROUPED,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    _tree(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        _GROUPED,
        head_dim=8,
        num_hidden_layers=3,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        use_qk_norm=True,
    ),
    _tree(
        "gptj",
        "GPTJForCausalLM",
        _GPT,
        implementations=EAGER,
        std=0.5,
        rotary_dim=4,
        tie_word_embeddings=True,
    ),
    _tree(
        "codegen",
        "CodeGenForCausalLM",
        _GPT,
        implementations=EAGER,
        std=0.5,
        rotary_dim=4,
        tie_word_embeddings=True,
    ),
    _tree(
        "xglm",
        "XGLMForCausalLM",
        _IDS,
        _UNTIED,
        implementations=EAGER,
        std=0.6,
        pad_token_id=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        d_model=32,
        ffn_dim=64,
        num_layers=2,
        attention_heads=4,
    ),
    _tree(
        "bloom",
        "BloomForCausalLM",
        _IDS,
        _UNTIED,
        implementations=EAGER,
        std=0.4,
        vocab_size=VOCABULARY,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        note="positions enter through build_alibi_tensor, not position_ids",
    ),
)

_WINDOWED = (
    _windowed("mistral", "MistralForCausalLM", _GROUPED),
    _windowed("ministral", "MinistralForCausalLM", _GROUPED, head_dim=8),
    _windowed("cwm", "CwmForCausalLM", _GROUPED, num_hidden_layers=3, head_dim=8, layer_types=_MIXED, bos_token_id=1),
    _windowed("granite_swa", "GraniteSWAForCausalLM", _GROUPED, _UNTIED, implementations=EAGER, note="attention sinks"),
    _windowed("vaultgemma", "VaultGemmaForCausalLM", _GROUPED, _UNTIED, implementations=EAGER, head_dim=8, note="soft caps"),
    _windowed("mixtral", "MixtralForCausalLM", _GROUPED, num_local_experts=4, num_experts_per_tok=2),
    _windowed("phi3", "Phi3ForCausalLM", _GROUPED),
    _windowed(
        "phi3_longrope",
        "Phi3ForCausalLM",
        _GROUPED,
        original_max_position_embeddings=96,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [4.0, 3.0, 6.0, 2.0],
        },
        note="every rotation changes once a position lies beyond 95",
    ),
    _windowed("starcoder2", "Starcoder2ForCausalLM", _GROUPED),
    _windowed(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        _GROUPED,
        _SHARED,
        head_dim=8,
        num_experts=4,
        num_shared_experts=1,
        sliding_window_pattern=2,
        layer_types=_MIXED,
    ),
    _windowed(
        "qwen2_window",
        "Qwen2ForCausalLM",
        _GROUPED,
        use_sliding_window=True,
        max_window_layers=1,
        note="the first layer sees everything, the second a window",
    ),
    _windowed(
        "gemma2",
        "Gemma2ForCausalLM",
        _GROUPED,
        _UNTIED,
        implementations=EAGER,
        num_hidden_layers=3,
        head_dim=8,
        query_pre_attn_scalar=8,
        layer_types=_MIXED,
        note="soft caps on scores and logits",
    ),
    _windowed(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _GROUPED,
        _UNTIED,
        num_hidden_layers=3,
        head_dim=8,
        query_pre_attn_scalar=8,
        layer_types=_MIXED,
    ),
    _windowed(
        "gemma3n_text",
        "Gemma3nForCausalLM",
        _GROUPED,
        _UNTIED,
        num_hidden_layers=4,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        note="the last two layers reuse the keys and values of the first two",
    ),
    _windowed(
        "cohere2",
        "Cohere2ForCausalLM",
        _GROUPED,
        num_hidden_layers=3,
        layer_types=_MIXED,
        logit_scale=1.0,
    ),
    _windowed("olmo3", "Olmo3ForCausalLM", _GROUPED, num_hidden_layers=3, layer_types=_MIXED),
    _windowed(
        "exaone4",
        "Exaone4ForCausalLM",
        _GROUPED,
        std=0.6,
        num_hidden_layers=3,
        layer_types=_MIXED,
    ),
    _windowed(
        "gpt_oss",
        "GptOssForCausalLM",
        _GROUPED,
        implementations=EAGER,
        num_hidden_layers=3,
        head_dim=8,
        layer_types=_MIXED,
        num_local_experts=4,
        num_experts_per_tok=2,
        note="attention sinks",
    ),
    _tree(
        "llama4_text",
        "Llama4ForCausalLM",
        _GROUPED,
        window=_WINDOW,
        attention_chunk_size=_WINDOW,
        num_hidden_layers=3,
        head_dim=8,
        no_rope_layers=[1, 0, 1],
        intermediate_size_mlp=64,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        note="chunks rather than a sliding window; no rotation in the full layer",
    ),
    _tree(
        "llama4_tuned",
        "Llama4ForCausalLM",
        _GROUPED,
        window=_WINDOW,
        attention_chunk_size=_WINDOW,
        num_hidden_layers=3,
        head_dim=8,
        no_rope_layers=[1, 0, 1],
        attn_temperature_tuning=True,
        floor_scale=3,
        attn_scale=0.5,
        intermediate_size_mlp=64,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        note="the temperature of the full layer changes every third position, counted from the cache's length",
    ),
)

_CHAIN = (
    _chain(
        "gpt_neo",
        "GPTNeoForCausalLM",
        _IDS,
        implementations=EAGER,
        window=_WINDOW,
        window_size=_WINDOW,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        note="the causal and local masks are buffers indexed by slot",
    ),
    _chain(
        "falcon_alibi",
        "FalconForCausalLM",
        _MULTI_HEAD,
        alibi=True,
        note="slot distances; eager adds them twice, so eager and sdpa differ",
    ),
    _chain(
        "mpt",
        "MptForCausalLM",
        _IDS,
        _UNTIED,
        implementations=EAGER,
        std=0.2,
        vocab_size=VOCABULARY,
        max_seq_len=CONTEXT,
        d_model=32,
        n_heads=4,
        n_layers=2,
        note="slot distances",
    ),
    _chain(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _GROUPED,
        _DELTA,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    _chain("qwen3_5", "Qwen3_5ForCausalLM", _GROUPED, _DELTA),
    _chain("bamba", "BambaForCausalLM", _GROUPED, _MAMBA, attn_layer_indices=[1]),
    _chain(
        "zamba2",
        "Zamba2ForCausalLM",
        _HEADS,
        num_hidden_layers=3,
        layers_block_type=["linear_attention", "hybrid", "linear_attention"],
        num_key_value_heads=4,
        mamba_d_state=16,
        n_mamba_heads=4,
        chunk_size=16,
        use_mamba_kernels=False,
    ),
    _chain("falcon_h1", "FalconH1ForCausalLM", _GROUPED, _MAMBA, mamba_d_ssm=64),
    _chain(
        "nemotron_h",
        "NemotronHForCausalLM",
        _SIZE,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        ssm_state_size=16,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=4,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
        use_mamba_kernels=False,
    ),
    _chain(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        _GROUPED,
        _MAMBA,
        layer_types=["linear_attention", "full_attention"],
        shared_intermediate_size=32,
        num_local_experts=4,
    ),
    _chain(
        "lfm2",
        "Lfm2ForCausalLM",
        _GROUPED,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        block_auto_adjust_ff_dim=False,
    ),
    _chain(
        "mamba2",
        "Mamba2ForCausalLM",
        _IDS,
        implementations=EAGER,
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=16,
        state_size=16,
        n_groups=2,
        chunk_size=16,
        note="takes cache_params, not past_key_values",
    ),
    _chain(
        "rwkv",
        "RwkvForCausalLM",
        _IDS,
        implementations=EAGER,
        vocab_size=VOCABULARY,
        context_length=CONTEXT,
        hidden_size=32,
        num_hidden_layers=2,
        note="takes state, a list of tensors, not past_key_values",
    ),
)

_REFUSED = (
    _refused(
        "mamba",
        "MambaForCausalLM",
        _IDS,
        implementations=EAGER,
        vocab_size=VOCABULARY,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
    ),
    _refused(
        "falcon_mamba",
        "FalconMambaForCausalLM",
        _IDS,
        implementations=EAGER,
        vocab_size=VOCABULARY,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
    ),
    _refused(
        "jamba",
        "JambaForCausalLM",
        _GROUPED,
        num_experts=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        use_mamba_kernels=False,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    _refused(
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        _GROUPED,
        _UNTIED,
        window=_WINDOW,
        attention_window_size=_WINDOW,
        num_hidden_layers=3,
        lru_width=32,
    ),
    _refused("minimax", "MiniMaxForCausalLM", _GROUPED, head_dim=8, num_local_experts=4, block_size=16),
    _refused(
        "xlstm",
        "xLSTMForCausalLM",
        _IDS,
        implementations=EAGER,
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_heads=4,
        chunk_size=16,
        autocast_kernel_dtype="float32",
    ),
    _refused("deepseek_v32", "DeepseekV32ForCausalLM", _INDEXED, note="learned key selection"),
    _refused("glm_moe_dsa", "GlmMoeDsaForCausalLM", _INDEXED, note="learned key selection"),
)

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture for architecture in (*_FULL_ATTENTION, *_WINDOWED, *_CHAIN, *_REFUSED)
}
