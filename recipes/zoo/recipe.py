"""What is trained, as constants: the tokenizer, the two architectures and their schedules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from foredraft.training import layerskip

if TYPE_CHECKING:
    from transformers import LlamaConfig

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
CONTEXT = 2048
SEED = 0


def llama_config(*, hidden: int, heads: int, kv_heads: int, layers: int, intermediate: int, vocabulary: int = VOCABULARY) -> LlamaConfig:
    """A llama architecture with heads of 64 and tied embeddings."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocabulary,
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


@dataclass(frozen=True)
class Recipe:
    """One model: its architecture, as :func:`llama_config` takes it, and how it is trained.

    Attributes:
        budget: million tokens.
        cooldown: the share of them over which the learning rate falls to zero.
        early: what lets its lower layers draft; none for next-token cross-entropy alone.
    """

    architecture: Mapping[str, int]
    batch: Batch
    rates: Rates
    budget: float
    cooldown: float
    early: layerskip.Recipe | None = None


TARGET = Recipe({"hidden": 256, "heads": 4, "kv_heads": 2, "layers": 8, "intermediate": 768}, Batch(), Rates(), 16.5, 0.13)
DRAFT = Recipe(
    {"hidden": 128, "heads": 2, "kv_heads": 1, "layers": 2, "intermediate": 352},
    Batch(lengths=(512, 2048, 2048)),
    Rates(matrices=0.015, rest=4e-3),
    16.0,
    0.3,
)
FOREIGN_VOCABULARY = 3000
FOREIGN_PACKAGES = ("sympy", "mpmath", "networkx", "scipy", "numpy")  # that its tokenizer learns from
FOREIGN = replace(DRAFT, architecture={**DRAFT.architecture, "vocabulary": FOREIGN_VOCABULARY})  # the draft, with another tokenizer
DEEP_PLAIN = Recipe({"hidden": 192, "heads": 3, "kv_heads": 1, "layers": 16, "intermediate": 512}, Batch(), Rates(), 16.5, 0.2)
DEEP = replace(DEEP_PLAIN, early=layerskip.Recipe(dropout=0.1, schedule="exponential", rotation=15, exit=4, favour=0.5))

NGRAM_ORDER = 4
NGRAM_SUCCESSORS = 4  # kept per context
NGRAM_BYTES = 4_000_000  # the largest table that is packaged


@dataclass(frozen=True)
class TextSet:
    """Windows of one half of the corpus, from the beginnings of lines, that the target continues; with ``answer=0`` as they are."""

    half: str
    windows: int
    tokens: int  # of a window
    answer: int  # tokens of the target
    temperatures: tuple[float, ...]  # window i is continued at the (i mod n)-th
    seed: int
    per_shard: int = 1024
    top: int = 0  # probabilities that are kept of each place


TEXT_SETS = {
    "data": TextSet("train", 20_000, 64, 192, (0.0, 1.0), seed=1),
    "held_out": TextSet("held_out", 256, 64, 64, (0.0,), seed=2),
    "corpus_texts": TextSet("train", 60_000, 256, 0, (0.0,), seed=3, per_shard=4096),
    "probabilities": TextSet("train", 34_816, 64, 192, (1.0,), seed=21, top=64),  # 3.4 GB
}
TEXTS = {"medusa": ("data", "corpus_texts"), "eagle3": ("data",), "draft": ("probabilities",)}  # what each kind learns from
_HEADS = {"count_prompts": True, "batch_tokens": 2048, "warmup": 100}
_MEDUSA = {"kind": "medusa", "head": {"heads": 4, "layers": 2, "labels": "target"}}
_EAGLE3 = {"kind": "eagle3", "head": {"steps": 5, "aux_layers": [2, 5, 7]}}
HEADS = {  # the options of their training
    "medusa": {**_HEADS, **_MEDUSA, "accumulate": 2, "learning_rate": 2e-3, "evaluate_every": 500, "save_every": 250},
    "eagle3": {**_HEADS, **_EAGLE3, "epochs": 1.2, "learning_rate": 1e-3, "evaluate_every": 250},
    "draft": {
        "kind": "draft",
        "backbone": "full",
        "head": {"loss": "jsd(0.5)", "stored_probabilities": True},
        "steps": 9000,
        "batch_tokens": 2048,
        "learning_rate": 1e-3,
        "warmup": 50,
        "held_out": 64,
        "evaluate_every": 1000,
    },
}
TREE_NODES = 16  # of the tree that is stored with a head that has one
