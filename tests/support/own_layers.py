"""A tiny model that can draft with some of its own layers, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS = 5


def model(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """A tiny llama of five layers, whose lower layers guess some tokens: the upper ones add little."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, **options}
    torch.manual_seed(seed)
    sizes = {"vocab_size": 128, "num_hidden_layers": LAYERS, **sizes}
    made = LlamaForCausalLM(LlamaConfig(eos_token_id=None, bos_token_id=None, **sizes)).eval()
    with torch.no_grad():
        made.model.embed_tokens.weight.normal_(0, 1)
        for index, layer in enumerate(made.model.layers):
            for weight in layer.parameters():
                if weight.ndim > 1:
                    weight.normal_(0, 0.12 if index < 2 else 0.09)
    return made


def counted(subject: LlamaForCausalLM) -> list[int]:
    """Tokens that each decoder layer is called with from now on."""
    counts = [0] * LAYERS

    def count(index: int, given: Any, named: Any) -> None:
        states: Tensor = given[0] if given else named["hidden_states"]
        counts[index] += states.shape[0] * states.shape[1]

    for index, layer in enumerate(subject.model.layers):
        layer.register_forward_pre_hook(lambda module, given, named, index=index: count(index, given, named), with_kwargs=True)
    return counts
