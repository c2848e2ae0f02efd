"""Held-out acceptance: how many tokens a pass yields with the head as it is, which is what a head is trained for. And what a trained head
gets besides its weights: the tree that it drafts by default, chosen by how often its guesses are right, and the log-odds of n-grams in the
texts that it was trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from foredraft import drafters
from foredraft.device import host_by_default
from foredraft.drafters.base import Drafter
from foredraft.heads.base import Head
from foredraft.heads.calibration import Calibration, calibrate, weigh_log_odds
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.ngram_log_odds import NgramLogOdds
from foredraft.heads.vocabulary import VocabularyHead
from foredraft.planning.tree_costs import tree_costs
from foredraft.rows import SessionRow, successful
from foredraft.speculator import Speculator
from foredraft.stats import Stats
from foredraft.target import Target
from foredraft.training.data import Texts
from foredraft.training.generation import Answering, add

BATCH = 32  # prompts that are answered together
DEPTH = 5  # of the chains that acceptance is measured with, where the head does not say how deep it drafts
COUNTED = 1 << 26  # tokens of the texts that n-grams are counted in


def drafter_of(head: Head) -> Drafter:
    """The drafter of the head's kind, with this very head."""
    return drafters.create(head.drafter, head.drafter_options)


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
    """Measures heads on ``prompts``, answered with ``tokens`` tokens each, over ``shape``: by default chains as deep as the head drafts.

    An encoder reads the prompts where the target has one. The answers are greedy, or drawn at ``temperature`` and verified by ``rule``.
    """

    prompts: Sequence[Sequence[int]]
    tokens: int
    drafter: Callable[[Head], Drafter] = drafter_of
    shape: str | None = None
    temperature: float = 0.0
    rule: str = "auto"

    def measure(self, model: PreTrainedModel, head: Head) -> Measured:
        """Leaves the generators of torch as they were."""
        stats, _ = self._answer(model, head)
        depths = zip_longest(stats.accepted_by_depth, stats.drafted_by_depth, fillvalue=0)
        return Measured(stats.acceptance_length, tuple(accepted / max(1, drafted) for accepted, drafted in depths), stats.kept)

    def answers(self, model: PreTrainedModel, head: Head) -> dict[str, Any]:
        """Arguments of :func:`~foredraft.heads.calibration.calibrate`: the prompts with their answers, the number of the first token of
        each answer, and their sources if there are any."""
        _, rows = self._answer(model, head)
        sources = [row.source for row in rows if row.source is not None]
        return {"texts": [row.ids for row in rows], "answers": [row.prompt_length for row in rows], "sources": sources}

    def _answer(self, model: PreTrainedModel, head: Head) -> tuple[Stats, list[SessionRow]]:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            shape = self.shape or f"chain({min(DEPTH, getattr(head.config, 'heads', DEPTH))})"
            how: dict[str, Any] = {"rule": self.rule, "self_test": False, "reuse_prefix": False, "execution": "eager"}
            asked, rows = Answering(self.tokens, (self.temperature,)), list[SessionRow]()
            with closing(Speculator(model, self.drafter(head), shape=shape, **how)) as speculator:
                session = speculator.session()
                for start in range(0, len(self.prompts), BATCH):
                    for index, prompt in enumerate(self.prompts[start : start + BATCH], start):
                        add(session, index, prompt, asked, frozenset())
                    rows += session.waiting
                    while session.live:
                        successful(session.step())
        return session.stats, rows


def calibrated(head: Head, model: PreTrainedModel, held: Held, *, nodes: int | None = None) -> Calibration | None:
    """Measure ``head`` on the answers to the held-out prompts and put its tree into its configuration; None for kinds that have none.

    Args:
        nodes: the tree has so many, those that are accepted most often; None for as many as pay by what passes cost on this machine.
    """
    if not isinstance(head, VocabularyHead):
        return None
    answers, (cost, execution) = held.answers(model, head), ((lambda count: 1.0), None) if nodes else costs(head, model)
    found = replace(calibrate(head, model, cost=cost, most_nodes=nodes or 64, **answers), execution=execution)
    found.store(head)
    return found


def counted(head: MedusaHead, model: PreTrainedModel, held: Held, texts: Texts, members: Sequence[int]) -> NgramLogOdds:
    """Count what follows what in the texts ``members``, as many as ``COUNTED`` tokens, and put that beside the head, weighed by the answers
    to the held-out prompts."""
    many = int(np.searchsorted(np.cumsum(texts.lengths[list(members)]), COUNTED)) + 1
    lines = [texts[index] for index in members[:many]]
    head.log_odds = NgramLogOdds.count(lines, head.config.target.vocab_size, heads=head.config.heads)
    head.log_odds = weigh_log_odds(head, model, **held.answers(model, head))
    return head.log_odds


def costs(head: Head, model: PreTrainedModel) -> tuple[Callable[[int], float], str]:
    """Seconds of a round by its drafted nodes, as this machine runs the model where it is loaded by name; and by which execution."""
    drafter = drafter_of(head)
    with as_served(model, drafter) as target:
        return tree_costs(target, drafter), target.execution


@contextmanager
def as_served(model: PreTrainedModel, drafter: Drafter) -> Iterator[Target]:
    """The target and its ``drafter`` as they run where ``model`` is loaded by name: until the end, packed weights take the place of its
    own, so that none are held twice."""
    with host_by_default(model.device), closing(Target(model, owned=True, reuse_prefix=False, test=False)) as target:
        drafter.bind(target)
        with closing(drafter):
            yield target
