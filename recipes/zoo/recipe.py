"""What is trained, as constants: the tokenizer, the two architectures and their schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaConfig

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
CONTEXT = 2048
SEED = 0


def llama_config(*, hidden: int, heads: int, kv_heads: int, layers: int, intermediate: int) -> LlamaConfig:
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


def target_config() -> LlamaConfig:
    return llama_config(hidden=256, heads=4, kv_heads=2, layers=8, intermediate=768)


def draft_config() -> LlamaConfig:
    return llama_config(hidden=128, heads=2, kv_heads=1, layers=2, intermediate=352)


@dataclass(frozen=True)
class Batch:
    rows: int = 16
    lengths: tuple[int, int, int] = (512, 1024, 2048)  # until the cool-down, in its first 60 %, and at its end
    micro_tokens: int = 2048  # per backward pass: small enough that activations stay in the cache

    def length(self, cooled: float) -> int:
        return self.lengths[0 if cooled == 0 else 1 if cooled < 0.6 else 2]


@dataclass(frozen=True)
class Rates:
    matrices: float = 0.01  # Muon
    rest: float = 3e-3  # AdamW
    weight_decay: float = 0.1


TARGET_BATCH, TARGET_RATES = Batch(), Rates()
TARGET_BUDGET, TARGET_COOLDOWN = 16.5, 0.13  # million tokens, and the share of them that the cool-down takes
DRAFT_BATCH, DRAFT_RATES = Batch(lengths=(512, 2048, 2048)), Rates(matrices=0.015, rest=4e-3)
DRAFT_BUDGET, DRAFT_COOLDOWN = 16.0, 0.3

NGRAM_ORDER = 4
NGRAM_SUCCESSORS = 4  # kept per context
NGRAM_BYTES = 4_000_000  # the largest table that is packaged

# Heads for the target: its own answers to beginnings of lines from the corpus, half of them greedy, windows of the corpus as they are, and
# how heads learn from them.
HEAD_WINDOWS, HELD_OUT_WINDOWS, WINDOW = 20_000, 256, 64
ANSWER, HELD_OUT_ANSWER = 192, 64
TEXTS_SEED, HELD_OUT_SEED = 1, 2
CORPUS_WINDOWS, CORPUS_WINDOW, CORPUS_SEED, CORPUS_SHARD = 60_000, 256, 3, 4096
TEXTS = {"medusa": ("data", "corpus_texts"), "eagle3": ("data",)}  # what heads of a kind learn from
_HEADS = {"count_prompts": True, "batch_tokens": 2048, "warmup": 100, "evaluate_every": 250}
HEADS = {
    "medusa": {
        **_HEADS,
        "kind": "medusa",
        "head": {"heads": 4, "layers": 2, "labels": "target"},
        "accumulate": 2,
        "learning_rate": 2e-3,
        "evaluate_every": 500,
        "save_every": 250,
    },
    "eagle3": {**_HEADS, "kind": "eagle3", "head": {"steps": 5, "aux_layers": [2, 5, 7]}, "epochs": 1.2, "learning_rate": 1e-3},
}
TREE_NODES = 16  # of the tree that is stored with a head that has one: by its guesses alone, so that it is the same on every machine
