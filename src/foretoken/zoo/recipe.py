"""What is trained, as constants: the tokenizer, the two architectures and their schedules."""

from __future__ import annotations

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
CONTEXT = 2048
SEED = 0


def llama_config(*, hidden: int, heads: int, kv_heads: int, layers: int, intermediate: int):
    """A llama architecture with heads of 64 and tied embeddings."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        initializer_range=0.02,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )


def target_config():
    return llama_config(hidden=256, heads=4, kv_heads=2, layers=8, intermediate=768)


def draft_config():
    return llama_config(hidden=128, heads=2, kv_heads=1, layers=2, intermediate=352)

NGRAM_ORDER = 4
NGRAM_SUCCESSORS = 4  # kept per context
NGRAM_BYTES = 4_000_000  # the largest table that is packaged
