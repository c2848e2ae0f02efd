"""Whisper's shapes with random weights, as checkpoints: ``random:whisper-SIZE`` and ``random:whisper-SIZE-draft``.

The draft is made as Distil-Whisper is: the target's encoder, embeddings and final norm, and its first decoder layers alone. In a target of
random weights such a draft would agree on nothing. So the layers behind those of the draft write so little to the residual stream that
the draft agrees on about three tokens in four. No special token is ever written: their embeddings are zero.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from foredraft.errors import ConfigurationError

PREFIX, DRAFT = "random:whisper-", "-draft"
SHAPES = {  # width, layers of the encoder and as many of the decoder, heads
    "test": (32, 4, 2),
    "tiny": (384, 4, 6),
    "base": (512, 6, 8),
    "small": (768, 12, 12),
    "medium": (1024, 24, 16),
    "large": (1280, 32, 20),
}
DRAFTED = 2  # decoder layers of the draft
SHARE = 0.1  # what the other layers write, over what those of the draft write
WEIGHT, EMBEDDING = 2.0, 0.02  # standard deviations: of what a linear layer makes of normed states, and of an embedding
MADE = (
    f"The draft is the target's encoder, embeddings and first {DRAFTED} decoder layers. The other layers write {SHARE:g} times as much as "
    "these to the residual stream, so that drafts are kept about as often as those of a distilled draft. Special tokens have embeddings of "
    "zero and are never written."
)
END, START, VOCABULARY = 50257, 50258, 51865
FEATURES = {"num_mel_bins": 80, "max_source_positions": 1500}
SMALL = {"num_mel_bins": 8, "max_source_positions": 30}  # of the size "test"


def save(source: str, path: Path) -> None:
    """Write the checkpoint ``source``, in float32.

    Raises:
        ConfigurationError: there is no such size.
    """
    size = source.removeprefix(PREFIX).removesuffix(DRAFT)
    if not source.startswith(PREFIX) or size not in SHAPES:
        raise ConfigurationError(f"{source!r} is no random model; there are {', '.join(PREFIX + each for each in SHAPES)}")
    model = whisper(size)
    found = drafted(model) if source.endswith(DRAFT) else model
    found.save_pretrained(path)


@torch.no_grad()
def whisper(size: str) -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    width, layers, heads = SHAPES[size]
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in shape(width, layers, heads).items()}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": END, "eos_token_id": END, "bos_token_id": END, "decoder_start_token_id": START}
    free = {"suppress_tokens": None, "begin_suppress_tokens": None}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        config = WhisperConfig(d_model=width, **sides, **tokens, **free, **(SMALL if size == "test" else FEATURES))
        model = WhisperForConditionalGeneration(config).eval()
        model.generation_config.is_multilingual = False
        decoder = model.model.decoder
        for name, weight in decoder.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=EMBEDDING if "embed" in name else WEIGHT / math.sqrt(weight.shape[1]))
    decoder.embed_tokens.weight[END:] = 0
    for layer in decoder.layers[DRAFTED:]:
        for last in (layer.self_attn.out_proj, layer.encoder_attn.out_proj, layer.fc2):
            last.weight.mul_(SHARE * math.sqrt(DRAFTED / (layers - DRAFTED)))
    return model


def shape(width: int, layers: int, heads: int) -> dict[str, int]:
    return {"layers": layers, "attention_heads": heads, "ffn_dim": 4 * width}


def drafted(model: Any) -> Any:
    """The draft: the first layers of the decoder, without an encoder."""
    from transformers import WhisperForCausalLM

    config = type(model.config).from_dict({**model.config.to_dict(), "decoder_layers": DRAFTED})
    draft = WhisperForCausalLM(config).eval()
    draft.model.decoder.load_state_dict(model.model.decoder.state_dict(), strict=False)
    draft.proj_out.weight = draft.model.decoder.embed_tokens.weight
    draft.generation_config = model.generation_config
    return draft
