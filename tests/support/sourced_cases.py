"""Tiny random models with an encoder whose decoders the kernels compute in one call."""

from __future__ import annotations

from functools import cache

import torch
import transformers

from foredraft.models.encoder_decoder import some_source
from foredraft.models.source_runs import SourcedCache

SIZES = {
    "vocab_size": 128, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4,
    "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    "pad_token_id": 1, "decoder_start_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
SIDE = {"layers": 2, "attention_heads": 2, "ffn_dim": 128}
BART = {
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIDE.items()},
    "vocab_size": 128, "d_model": 64, "max_position_embeddings": 256, "dropout": 0.0, "pad_token_id": 1, "bos_token_id": 0,
    "decoder_start_token_id": 2, "eos_token_id": 3, "scale_embedding": True,
}  # fmt: skip
WHISPER = {
    **BART, "num_mel_bins": 8, "max_source_positions": 30, "max_target_positions": 256, "suppress_tokens": None,
    "begin_suppress_tokens": None, "scale_embedding": False,
}  # fmt: skip
MODELS = {
    "t5 v1.1": ("T5", {**SIZES, "tie_word_embeddings": False}),
    "t5": ("T5", {**SIZES, "feed_forward_proj": "relu"}),
    "mt5": ("MT5", SIZES),
    "umt5": ("UMT5", {**SIZES, "feed_forward_proj": "gated-silu"}),
    "bart": ("Bart", BART),
    "mbart": ("MBart", BART),
    "plbart": ("PLBart", {**BART, "activation_function": "relu"}),
    "pegasus": ("Pegasus", {**BART, "activation_function": "gelu_new"}),
    "m2m_100": ("M2M100", {**BART, "activation_function": "relu"}),
    "marian": ("Marian", {**BART, "activation_function": "swish"}),
    "blenderbot": ("Blenderbot", BART),
    "blenderbot-small": ("BlenderbotSmall", BART),
    "whisper": ("Whisper", WHISPER),
}


@cache
def build(name, dtype, seed=3):
    kind, options = MODELS[name]
    with torch.inference_mode(False), torch.random.fork_rng():  # whoever asks first
        torch.manual_seed(seed)
        model = getattr(transformers, "MarianMTModel" if kind == "Marian" else f"{kind}ForConditionalGeneration")
        model = model(getattr(transformers, f"{kind}Config")(**options))
        for part, weight in model.named_parameters():
            scale = 1 if "bias" in part or "positions" in part else 0.1
            flat = 0.3 * torch.randn(weight.shape) + (not part.endswith("bias"))
            weight.data = flat if weight.ndim == 1 else torch.randn(weight.shape) * scale
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(std=0.3)
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model.to(dtype).eval()


def read_by(name, dtype, *lengths):
    """Sources of so many tokens, or noise."""
    return [some_source(build(name, dtype), length, seed=length) for length in lengths]


_compact = SourcedCache.compact


def compact_all_but_sources(cache: SourcedCache, keep: list[int]) -> None:
    """A fault to plant in :meth:`SourcedCache.compact`: rows that move get the source of the row whose place they take."""
    stay = cache.sources[: len(keep)]
    _compact(cache, keep)
    cache.sources = stay
