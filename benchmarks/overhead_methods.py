"""Methods of the overhead suite: two sides, three ways of decoding each: plain, with a draft model, by prompt lookup.

Both sides get the same model instances, prompts and lengths. End-of-sequence ids are taken away, so that every run yields the same
number of tokens and neither side pays for looking for them. transformers is called as its users call it: caches and compilation
are left to its defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foredraft.drafters.base import Drafter

Decode = Callable[[Tensor], list[int]]  # [1, L] prompt ids → the new tokens
TRANSFORMERS, FOREDRAFT = "transformers", "foredraft"
PLAIN, DRAFT, LOOKUP = "plain", "draft-model", "prompt-lookup"
MODES = (PLAIN, DRAFT, LOOKUP)


@dataclass(frozen=True)
class Field:
    """What all methods decode with."""

    target: PreTrainedModel
    draft: PreTrainedModel
    tokens: int
    draft_length: int
    max_ngram: int

    def prepare(self) -> None:
        """No end-of-sequence ids; and what transformers reads from the assistant about how much to draft: always γ tokens."""
        for model in (self.target, self.draft):
            model.generation_config.eos_token_id = None
        self.draft.generation_config.num_assistant_tokens = self.draft_length
        self.draft.generation_config.num_assistant_tokens_schedule = "constant"
        self.draft.generation_config.assistant_confidence_threshold = 0.0

    def arguments(self, prompt: Tensor) -> dict[str, Any]:
        return {
            "input_ids": prompt,
            "attention_mask": prompt.new_ones(prompt.shape),
            "max_new_tokens": self.tokens,
            "do_sample": False,
            "pad_token_id": 0,
        }


@dataclass(frozen=True)
class Method:
    """One way to decode, of one side; ``build`` may fail, and so may what it returns."""

    side: str
    mode: str
    build: Callable[[Field], Decode]

    @property
    def name(self) -> str:
        return f"{self.side} {self.mode}"


def methods() -> list[Method]:
    """All six, sides alternating; the texts of the first are the reference."""
    return [
        Method(TRANSFORMERS, PLAIN, of_transformers),
        Method(FOREDRAFT, PLAIN, lambda field: of_foredraft(field, "none")),
        Method(TRANSFORMERS, DRAFT, lambda field: of_transformers(field, assistant_model=field.draft)),
        Method(FOREDRAFT, DRAFT, _draft_of_foredraft),
        Method(TRANSFORMERS, LOOKUP, _lookup_of_transformers),
        Method(FOREDRAFT, LOOKUP, lambda field: of_foredraft(field, "prompt-lookup", {"max_ngram": field.max_ngram})),
    ]


def of_transformers(field: Field, **mode: Any) -> Decode:
    """``model.generate``, and the arguments that choose the mode."""

    def decode(prompt: Tensor) -> list[int]:
        sequences = field.target.generate(**field.arguments(prompt), **mode)
        return list(sequences[0, prompt.shape[1] :].tolist())

    return decode


def of_foredraft(field: Field, drafter: Drafter | str, options: dict[str, Any] | None = None) -> Decode:
    """``Speculator.generate``; nothing is carried over from one call to the next, so that both sides prefill alike."""
    from foredraft import Speculator

    speculator = Speculator(field.target, drafter, drafter_options=options, draft_length=field.draft_length, reuse_prefix=False)

    def decode(prompt: Tensor) -> list[int]:
        sequences = speculator.generate(**field.arguments(prompt)).sequences
        return list(sequences[0, prompt.shape[1] :].tolist())

    return decode


def _draft_of_foredraft(field: Field) -> Decode:
    from foredraft.drafters.draft_model import DraftModel

    return of_foredraft(field, DraftModel(field.draft))


def _lookup_of_transformers(field: Field) -> Decode:
    return of_transformers(field, prompt_lookup_num_tokens=field.draft_length, max_matching_ngram_size=field.max_ngram)
