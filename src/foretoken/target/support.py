"""Which models can be verified, and the self-test that makes sure.

A model qualifies if its cache is a key-value cache over attention layers of the types transformers masks for us (full,
sliding, chunked), so that rejected tokens can be forgotten. Names below are those known to go wrong; the self-test
catches the others, because several architectures give wrong logits without an exception.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foretoken.errors import UnsupportedModelError
from foretoken.tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foretoken.target.target import Target

ROLLS_BACK = {"full_attention", "sliding_attention", "chunked_attention"}
RECURRENT = {
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h",
    "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
}  # fmt: skip
SLOT_POSITIONS = {"gpt_neo": "its local attention mask", "mpt": "its position bias"}
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}


def check_model(model: PreTrainedModel) -> None:
    """Refuse by name what cannot work.

    Raises:
        UnsupportedModelError: says why and what to do instead.
    """
    config = model.config.get_text_config()
    name = f"{type(model).__name__} ({config.model_type})"
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; Foretoken speeds up decoder-only language models")
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no language-modelling head; load it with AutoModelForCausalLM")
    kinds = set(getattr(config, "layer_types", None) or ())
    if config.model_type in RECURRENT or getattr(model, "_is_stateful", False) or kinds - ROLLS_BACK:
        odd = f" (layers: {', '.join(sorted(kinds - ROLLS_BACK))})" if kinds - ROLLS_BACK else ""
        raise UnsupportedModelError(f"{name} keeps a recurrent state{odd} that cannot roll back a rejected token; use model.generate")
    if config.model_type in SLOT_POSITIONS:
        raise UnsupportedModelError(f"{name} computes {SLOT_POSITIONS[config.model_type]} from cache slots; use model.generate")
    if config.model_type == "falcon" and getattr(config, "alibi", False):
        raise UnsupportedModelError(f"{name} with alibi computes its position bias from cache slots; use model.generate")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise UnsupportedModelError(
            f"{name} is loaded with attn_implementation={config._attn_implementation!r}, which takes no tree mask; "
            "load it with attn_implementation='sdpa' (or 'eager')"
        )


@torch.inference_mode()
def self_test(target: Target) -> None:
    """Score a draft behind two prefixes of unequal length, keep part of it, score on, and compare with fresh passes.

    Raises:
        UnsupportedModelError: the cached logits differ from those of one pass over the whole text.
    """
    prefixes, drafts = ([3, 5, 7, 9, 4], [6, 8, 2]), ([1, 4, 2], [9, 3, 5])
    tokens = [[token % target.vocab_size for token in prefix] for prefix in prefixes]
    drafted = torch.tensor(drafts, device=target.device) % target.vocab_size
    target.open(tokens)
    try:
        target.prefill(tokens, first=0)
        for kept in ((1, 2), (3, 1)):
            logits = target.score(TokenTree.from_chain(drafted))
            target.commit(None, kept)
            for row, count in enumerate(kept):
                whole = tokens[row] + drafted[row].tolist()
                _compare(target, logits[row], _fresh_logits(target, whole)[-drafted.shape[1] :])
                tokens[row] = whole[: len(whole) - drafted.shape[1] + count]
    finally:
        target.release()


def _fresh_logits(target: Target, tokens: list[int]) -> torch.Tensor:
    """``[L, V]`` logits of one pass over ``tokens`` with no cache of ours."""
    ids = torch.tensor([tokens], device=target.device)
    return target.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]


def _compare(target: Target, cached: torch.Tensor, fresh: torch.Tensor) -> None:
    difference = (cached.float() - fresh.float().to(cached.device)).abs().max()
    scale = fresh.float().abs().max().clamp(min=1e-6)
    allowed = TOLERANCE.get(target.model.dtype, 0.1)  # half precision and quantised weights round differently per shape
    if not bool(difference <= allowed * scale):
        raise UnsupportedModelError(
            f"{type(target.model).__name__}: logits through a rolled-back cache differ from a plain pass by "
            f"{float(difference / scale):.1e} of their scale (allowed {allowed:.0e}); generation would be wrong. If you know "
            "that it is rounding, pass self_test=False; else use model.generate"
        )
