"""Penalties and biases of OpenAI's API, which transformers does not have: https://platform.openai.com/docs/api-reference/chat/create."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from foredraft.device import to_device
from foredraft.errors import ConfigurationError

from .histories import NodeHistories, put, take


class PresenceFrequencyPenalty:
    """Lowers the score of a token by ``frequency`` for every time that it occurs in the generated text so far, and by ``presence`` if it
    occurs at all. The prompt does not count. Negative numbers raise it."""

    def __init__(self, presence: float = 0.0, frequency: float = 0.0):
        self.presence, self.frequency = float(presence), float(frequency)
        self.prompt_length = 0  # tokens that do not count; set when a row begins

    def begin(self, prompt_length: int) -> PresenceFrequencyPenalty:
        own = copy.copy(self)
        own.prompt_length = prompt_length
        return own

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counted = input_ids[:, self.prompt_length :]  # [G, L]
        return self.applied(counted, torch.ones_like(counted, dtype=torch.bool), scores)

    def applied(self, ids: Tensor, counted: Tensor, scores: Tensor) -> Tensor:
        """``scores`` ``[G, V]`` after texts ``ids`` ``[G, L]``, of which only the tokens that are ``counted`` ``[G, L]`` exist."""
        counts = torch.zeros_like(scores).scatter_add_(1, ids, counted.to(scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class LogitBias:
    """Adds a number to the scores of some tokens.

    Args:
        bias: by token id.
    """

    def __init__(self, bias: Mapping[int, float]):
        for token, value in bias.items():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0 or not abs(value) < float("inf"):
                raise ConfigurationError(f"a logit bias maps token ids from 0 on to finite numbers, got {token!r}: {value!r}")
        self.highest = max(bias, default=-1)
        self.tokens = torch.tensor(list(bias), dtype=torch.long)
        self.values = torch.tensor([float(value) for value in bias.values()], dtype=torch.float32)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.highest >= scores.shape[-1]:
            raise ConfigurationError(f"a logit bias is for token {self.highest}, and the vocabulary has {scores.shape[-1]} tokens")
        tokens, values = self.tokens.to(scores.device), self.values.to(scores)
        return scores.index_add(-1, tokens, values.expand(*scores.shape[:-1], -1))


def penalise_nodes(rows: Sequence[tuple[PresenceFrequencyPenalty, Sequence[int]]], histories: NodeHistories, flat: Tensor) -> None:
    """Apply penalties in ``flat`` ``[R * N, V]``: to the given cells, by the text on the path to each of them."""
    for penalty, cells in rows:
        made = []  # tokens of the generated text, per cell
        for cell in cells:
            row, node = histories.place(cell)
            made.append(histories.lengths[row] + histories.depths[row][node] - penalty.prompt_length)
        ids = histories.padded(cells, 0)[:, -max(made) :] if max(made) > 0 else histories.blank(len(cells), 0)  # [G, L]
        columns = torch.arange(ids.shape[1], device=ids.device)
        counted = columns >= ids.shape[1] - to_device(made, ids.device)[:, None]
        put(flat, cells, penalty.applied(ids, counted, take(flat, cells)))
