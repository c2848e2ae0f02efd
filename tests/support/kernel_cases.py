"""Small models that the native kernels take, and what skips a test where there are no kernels."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from foredraft.backends import native
from foredraft.backends import packing as packing_module

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
needs_kernels = pytest.mark.skipif(
    any(native.refusal(dtype) for dtype in DTYPES), reason=f"no kernels here: {[native.refusal(dtype) for dtype in DTYPES]}"
)


def build(name, dtype):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name]), attn_implementation="sdpa").eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)  # biases and norms that matter
    return model.to(dtype)


@pytest.fixture
def always(monkeypatch):
    """Tiny layers are not worth it; here every one of them is laid out for the kernels."""
    monkeypatch.setattr(packing_module, "preferred_hint", lambda groups, hints: hints[-1])
