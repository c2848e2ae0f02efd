"""What a session knows of one row: how it is to be continued, its state, and what a step added to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from foredraft.logits.logprobs import LogProbs
from foredraft.logits.processors import Pipeline
from foredraft.stats import RowStats

if TYPE_CHECKING:
    from transformers import StoppingCriteria


@dataclass(frozen=True)
class RowParameters:
    """How to continue one row.

    Attributes:
        max_new_tokens: most new tokens.
        do_sample: sample; otherwise decode greedily.
        pipeline: logits processors of this row.
        seed: a pair of ints that determines all random draws of the row.
        eos: token ids that end the row. The end token itself is kept.
        criteria: further stopping criteria, checked after every committed token on ``[1, L]`` unpadded ids.
        logprobs: k, to record the log-probabilities of the row's tokens and of the k most likely tokens at each position; None for none.
    """

    max_new_tokens: int
    do_sample: bool = False
    pipeline: Pipeline = field(default_factory=Pipeline)
    seed: tuple[int, int] = (0, 0)
    eos: frozenset[int] = frozenset()
    criteria: Sequence[StoppingCriteria] = ()
    logprobs: int | None = None


@dataclass(eq=False)
class SessionRow:
    """A row's state; drafters read it as :class:`foredraft.drafters.base.Row`."""

    slot: int
    ids: list[int]
    prompt_length: int
    parameters: RowParameters
    capacity: int
    stats: RowStats
    key: int
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    logprobs: list[LogProbs] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        return self.capacity - len(self.ids)


@dataclass(frozen=True)
class Commit:
    """What a step added to one row: ``tokens``, the first ``accepted`` of them drafted; ``finish_reason`` once it is over;
    ``logprobs`` of the tokens where the row's parameters ask for them."""

    slot: int
    tokens: list[int]
    accepted: int
    finish_reason: str | None
    logprobs: LogProbs | None = None
