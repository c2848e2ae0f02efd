"""Which kinds of models can be verified, by ``model_type``; without torch."""

from __future__ import annotations

ROLLS_BACK = {"full_attention", "sliding_attention", "chunked_attention"}
RECURRENT_IN_STEPS = {  # recurrent, and able to read several tokens from a state in one pass
    "bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "mamba2", "nemotron_h", "qwen3_5", "qwen3_5_text", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_next", "rwkv", "zamba2",
}  # fmt: skip
RECURRENT = {"falcon_mamba", "jamba", "mamba", "minimax", "recurrent_gemma", "xlstm", "zamba"}
SLOT_POSITIONS = {"gpt_neo": "its local attention mask", "mpt": "its position bias"}
UNMASKED_TOKENS = {"led"}  # decoders that drop the mask in a pass over one token per row
REFUSED_WITH_ENCODER = {  # encoder-decoder models, and why they cannot be verified
    "prophetnet": "predicts several tokens from streams of their own, whose positions are slots",
    "xlm-prophetnet": "predicts several tokens from streams of their own, whose positions are slots",
    "fsmt": "takes no mask in a pass with a cache",
    "roformer": "rotates its decoder's keys by cache slots",
    "speech_to_text": "reads features in a layout of its own",
    "t5gemma2": "attends to its source and its text in one attention",
}
