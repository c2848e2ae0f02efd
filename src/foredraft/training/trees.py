"""What a trained head gets besides its weights: the tree that it drafts unless it is told otherwise, chosen by how often its guesses
are right, and what follows what in the texts that it was trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from foredraft.heads.base import Head
from foredraft.heads.calibration import Calibration, calibrate, weigh_log_odds
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.ngram_log_odds import NgramLogOdds
from foredraft.heads.vocabulary import VocabularyHead
from foredraft.planning.tree_costs import tree_costs
from foredraft.speculator import Speculator
from foredraft.training.acceptance import Held, drafter_of
from foredraft.training.data import Texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COUNTED = 1 << 26  # tokens of the texts that n-grams are counted in


def calibrated(head: Head, model: PreTrainedModel, held: Held, *, nodes: int | None = None) -> Calibration | None:
    """Measure ``head`` on the answers to the held-out prompts and put its tree into its configuration; None for kinds that have none.

    Args:
        nodes: the tree has so many, those that are accepted most often; None for as many as pay by what passes cost on this machine.
    """
    if not isinstance(head, VocabularyHead):
        return None
    texts, answers = held.answers(model, head)
    found = calibrate(
        head, model, texts, cost=(lambda count: 1.0) if nodes else costs(head, model), answers=answers, most_nodes=nodes or 64
    )
    found.store(head)
    return found


def counted(head: MedusaHead, model: PreTrainedModel, held: Held, texts: Texts) -> NgramLogOdds:
    """Count what follows what in ``texts``, as many as ``COUNTED`` tokens, and put that beside the head, weighed by the answers to the
    held-out prompts."""
    many = int(np.searchsorted(np.cumsum(texts.lengths), COUNTED)) + 1
    lines = [texts[index] for index in range(min(many, len(texts)))]
    head.log_odds = NgramLogOdds.count(lines, head.config.target.vocab_size, heads=head.config.heads)
    answered, firsts = held.answers(model, head)
    head.log_odds = weigh_log_odds(head, model, answered, answers=firsts)
    return head.log_odds


def costs(head: Head, model: PreTrainedModel) -> Callable[[int], float]:
    """Seconds of a round by its drafted nodes, as this machine runs the model."""
    speculator = Speculator(model, drafter_of(head), shape="chain(1)", self_test=False, reuse_prefix=False)
    try:
        return tree_costs(speculator.target, speculator.drafter)
    finally:
        speculator.close()
