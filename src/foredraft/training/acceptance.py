"""Held-out acceptance: how many tokens a pass really yields with the head as it is, which is what a head is trained for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from foredraft import drafters
from foredraft.heads.base import Head
from foredraft.rows import RowParameters, SessionRow
from foredraft.speculator import Speculator
from foredraft.stats import Stats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foredraft.drafters.base import Drafter

DEPTH = 5  # of the chains that acceptance is measured with, where the head does not say how deep it drafts


def drafter_of(head: Head) -> Drafter:
    """The drafter of the head's kind, with this very head."""
    return drafters.create(head.kind, {"source": head})


@dataclass(frozen=True)
class Measured:
    """Tokens per target pass, the share of drafted tokens accepted at each depth, and how many tokens that was seen on."""

    acceptance_length: float
    by_depth: tuple[float, ...]
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        return {"acceptance_length": self.acceptance_length, "accepted_by_depth": list(self.by_depth), "measured_on": self.tokens}


@dataclass(frozen=True, eq=False)
class Held:
    """Measures heads on ``prompts``, answered greedily with ``tokens`` tokens each, ``batch`` prompts at a time, over ``shape``: chains as
    deep as the head drafts, unless it says otherwise."""

    prompts: Sequence[Sequence[int]]
    tokens: int
    batch: int = 32
    drafter: Callable[[Head], Drafter] = drafter_of
    shape: str | None = None

    def measure(self, model: PreTrainedModel, head: Head) -> Measured:
        """Leaves the generators of torch as they were."""
        stats, _ = self._answer(model, head)
        accepted = [*stats.accepted_by_depth, *[0] * (len(stats.drafted_by_depth) - len(stats.accepted_by_depth))]
        by_depth = tuple(kept / max(1, drafted) for kept, drafted in zip(accepted, stats.drafted_by_depth))
        return Measured(stats.acceptance_length, by_depth, stats.kept)

    def answers(self, model: PreTrainedModel, head: Head) -> tuple[list[list[int]], list[int]]:
        """The prompts with their answers, and the number of the first token of each answer."""
        _, rows = self._answer(model, head)
        return [row.ids for row in rows], [row.prompt_length for row in rows]

    def _answer(self, model: PreTrainedModel, head: Head) -> tuple[Stats, list[SessionRow]]:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            drafter = self.drafter(head)
            shape = self.shape or f"chain({min(DEPTH, getattr(head.config, 'heads', DEPTH))})"
            speculator = Speculator(model, drafter, shape=shape, self_test=False, reuse_prefix=False, execution="eager")
            rows: list[SessionRow] = []
            try:
                session = speculator.session()
                for start in range(0, len(self.prompts), self.batch):
                    for prompt in self.prompts[start : start + self.batch]:
                        session.add(prompt, RowParameters(max_new_tokens=self.tokens))
                    rows += session.waiting
                    while session.live:
                        session.step()
            finally:
                speculator.close()
        return session.stats, rows
