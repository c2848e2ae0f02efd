"""What is trained, as constants: the tokenizer, the architectures and their schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipes.zoo.recipe import Rates

if TYPE_CHECKING:
    from transformers import T5Config

VOCABULARY = 4096
PAD, END = "<pad>", "</s>"  # ids 0 and 1; a text starts with the first
SEED = 0


@dataclass(frozen=True)
class Task:
    """What a model is taught.

    Attributes:
        source: tokens of a source at most, its end included.
        text: the same of a text.
        per_file: statements or functions of one file at most, so that large files do not drown the rest.
        renames: the share of pairs that ask for a renamed statement.
    """

    source: int
    text: int
    per_file: int
    renames: float = 0.0


TASKS = {"ast": Task(source=96, text=192, per_file=120, renames=0.45), "doc": Task(source=256, text=48, per_file=60)}


@dataclass(frozen=True)
class Recipe:
    """One model: its architecture and how it is trained.

    Attributes:
        budget: million tokens of sources and texts.
        cooldown: the share of them over which the learning rate falls to zero.
        step_tokens, micro_tokens: of an optimizer step and of a backward pass.
    """

    width: int
    intermediate: int
    encoder: int  # layers
    decoder: int
    rates: Rates
    budget: float
    cooldown: float
    step_tokens: int = 3600
    micro_tokens: int = 2048

    def config(self) -> T5Config:
        """T5 v1.1 (gated GELU) with heads of 64 and a tied head."""
        from transformers import T5Config

        return T5Config(
            vocab_size=VOCABULARY,
            d_model=self.width,
            d_kv=64,
            d_ff=self.intermediate,
            num_layers=self.encoder,
            num_decoder_layers=self.decoder,
            num_heads=self.width // 64,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )


MODELS = {
    "target": Recipe(256, 768, 4, 4, Rates(matrices=0.02, rest=1e-2), 12.0, 0.25),
    "1m": Recipe(128, 192, 2, 2, Rates(matrices=0.02, rest=1e-2), 12.0, 0.3),
    "3m": Recipe(192, 384, 3, 2, Rates(matrices=0.02, rest=1e-2), 12.0, 0.3),
}
NGRAM_ORDER = 4  # of the baseline
