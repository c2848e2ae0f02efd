"""The target's own log-probabilities of the tokens that were committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import ConfigurationError
from foredraft.tree import TokenTree


@dataclass(frozen=True, eq=False)
class LogProbs:
    """The target's own log-probabilities of L tokens that were committed in a row: the log-softmax of its raw logits in float32,
    before temperature, top-k, top-p and every other processor.

    Attributes:
        chosen: ``[L]`` float32, of the tokens themselves.
        ids: ``[L, k]`` int64 the k most likely tokens at each place, best first; of equally likely ones those with the lowest ids.
        values: ``[L, k]`` float32 their log-probabilities.
    """

    chosen: Tensor
    ids: Tensor
    values: Tensor

    def __len__(self) -> int:
        return len(self.chosen)

    def cut(self, length: int, k: int) -> LogProbs:
        """The first ``length`` places, and the ``k`` best of each."""
        return LogProbs(self.chosen[:length], self.ids[:length, :k], self.values[:length, :k])

    @staticmethod
    def none(k: int) -> LogProbs:
        """Of no tokens."""
        return LogProbs(torch.empty(0), torch.empty(0, k, dtype=torch.long), torch.empty(0, k))

    @staticmethod
    def joined(parts: Sequence[LogProbs]) -> LogProbs:
        """``parts``, at least one, one after the other."""
        return LogProbs(*(torch.cat([getattr(part, name) for part in parts]) for name in ("chosen", "ids", "values")))


def check_logprobs(top: Any, vocab_size: int, name: str = "output_logprobs") -> None:
    """Raise ConfigurationError, which says the ``name``, unless ``top`` is None or a number of tokens out of ``vocab_size``."""
    if top is None or (isinstance(top, int) and not isinstance(top, bool) and 0 <= top <= vocab_size):
        return
    raise ConfigurationError(
        f"{name} must be a whole number from 0 (only the tokens' own) to the vocabulary's {vocab_size}, got {top!r}; leave it out for none"
    )


def log_probabilities(tree: TokenTree, path: Tensor, accepted: Tensor, next_token: Tensor, logits: Tensor, top: int) -> list[LogProbs]:
    """Log-probabilities along what a verdict keeps: at depth d the token of depth d + 1, and the bonus token at the last node kept.

    ``path`` ``[R, D]``, ``accepted`` ``[R]`` and ``next_token`` ``[R]`` are the verdict's, ``logits`` ``[R, N, V]`` the target's.
    Nothing leaves the device. Positions after the bonus token hold whatever was drafted there.
    """
    along, tokens = logits, tree.tokens
    if not tree.chain:
        along, tokens = logits.gather(1, path[..., None].expand(-1, -1, logits.shape[-1])), tokens.gather(1, path)
    along = along.float()  # [R, D, V]
    following = tokens.roll(-1, 1).scatter(1, accepted[:, None], next_token[:, None])  # [R, D]
    total = log_total(along)
    chosen = (along.gather(-1, following[..., None]) - total).squeeze(-1)
    values, ids = best(along, top)
    return [LogProbs(*row) for row in zip(chosen, ids, values - total)]


def log_total(logits: Tensor) -> Tensor:
    """The log-sum-exp ``[..., 1]`` of each row of ``logits`` ``[..., V]``, the same to the last bit whatever rows are beside it.

    On a CPU, torch splits the sum of a single row between threads, and of several rows sums each in one; so a single row gets company.
    """
    if logits.numel() == logits.shape[-1]:
        return torch.stack([logits, logits]).logsumexp(-1, keepdim=True)[0]
    return logits.logsumexp(-1, keepdim=True)


def of_tokens(logits: Tensor, tokens: Tensor, top: int) -> LogProbs:
    """Log-probabilities of ``tokens`` ``[n]``, each chosen from the target's ``logits`` ``[n, V]``, and of the ``top`` best."""
    wide = logits.float()
    total = log_total(wide)
    values, ids = best(wide, top)
    return LogProbs((wide.gather(-1, tokens[:, None]) - total)[:, 0], ids, values - total)


def best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` highest of float32 ``scores`` ``[..., V]``, and where they are: ``[..., k]`` each, best first, ties by place.

    ``topk`` orders ties differently for every k, so the best 5 of 20 need not be the best 5.
    """
    flat = scores.flatten(0, -2)
    if flat.device.type == "cpu" and 0 < k < flat.shape[-1]:  # where a look costs no wait
        values, ids = flat.topk(k + 1, -1)
        ids = ids[:, :k]
        for row in (values[:, k - 1] == values[:, k]).nonzero()[:, 0].tolist():  # the last is as likely as one that is left out
            above = int((values[row] > values[row, k]).sum())
            ids[row, above:] = (flat[row] == values[row, k]).nonzero()[: k - above, 0]
        ids = ids.sort(-1).values
        ids = ids.gather(-1, flat.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices)
    else:
        ids = best_by_place(flat, k)
    ids = ids.reshape(*scores.shape[:-1], k)
    return scores.gather(-1, ids), ids


def best_by_place(scores: Tensor, k: int) -> Tensor:
    """Where the ``k`` highest of ``scores`` ``[n, V]`` are, by a search among keys that are never equal: the score's bits, in an order of
    whole numbers, and behind them the place."""
    bits = (scores + 0.0).view(torch.int32)  # minus zero is zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    places = torch.arange(scores.shape[-1], device=scores.device)
    return ((ordered << 32) - places).topk(k, -1).indices
