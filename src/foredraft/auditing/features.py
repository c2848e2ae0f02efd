"""Functions of the next token that are fixed by the text before it, and biases that they are meant to see.

Under exactness E[f(y) | text] = sum_v p(v) f(v) for every such f, so f(y) minus that is a martingale difference: no second
sample is needed to compare with, and sums over all tokens of all texts are tested. What makes a test strong is f. Rules that
compare p with q go wrong along p - q, wrong temperatures and filters along the order of p, and noise that is used twice ties
a token to the ones before it. A function of the drafted *tokens* would not do: given the draft, the kept token does not follow p.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from foredraft.logits.noise import row_key

LAGS = (1, 2)
FLOOR = 1e-12


@dataclass(eq=False)
class Features:
    """Makes ``[G, J, V]`` features with values in [0, 1], position by position along G texts, J of them by ``names``.

    Args:
        vocab_size: V.
        draft: whether the draft's distribution is known.
        device: where they are wanted.
    """

    vocab_size: int
    draft: bool
    device: torch.device
    history: list[Tensor] = field(default_factory=list)  # per position [G, J], f(y) minus its expectation

    @property
    def names(self) -> list[str]:
        weighted = [f"{lag} after it" for lag in LAGS] + ["as a round begins"]
        return [*self.plain, *(f"{name}, {when}" for name in self.lagged for when in weighted)]

    @property
    def plain(self) -> list[str]:
        names = ["the likeliest token", "likely tokens", "tokens seen before", "one half of the vocabulary"]
        return names + (["tokens drafted too often", "the ratio q / p", "the draft's likeliest token"] if self.draft else [])

    @property
    def lagged(self) -> list[str]:
        """Those that are also tried weighted by how they came out at earlier positions, and where a round begins."""
        return ["the likeliest token", "tokens drafted too often"] if self.draft else ["the likeliest token"]

    def at(self, p: Tensor, q: Tensor | None, ids: Tensor, begins: Tensor) -> Tensor:
        """``[G, J, V]`` after the texts ``ids`` ``[G, L]``, under p and q ``[G, V]``; ``begins`` ``[G]`` says where a round begins.

        That is known before the token is chosen. Where a round ends is not, and would bias the token.
        """
        surprise = (-p.clamp(min=FLOOR).log()).clamp(max=8) / 8
        seen = torch.zeros_like(p).scatter_(1, ids, 1.0)
        features = [only_best(p), 1 - surprise, seen, half(self.vocab_size, p.device).expand_as(p)]
        if q is not None:
            ratio = (q.clamp(min=FLOOR).log() - p.clamp(min=FLOOR).log()).clamp(-3, 3)
            features += [(q > p).to(p.dtype), ratio / 6 + 0.5, only_best(q)]
        for name in self.lagged:
            index = self.plain.index(name)
            features += [features[index] * weight for weight in (*self._weights(index, len(p)), begins[:, None].to(p.dtype))]
        return torch.stack(features, 1)

    def directions(self, p: Tensor, q: Tensor | None) -> dict[str, Tensor]:
        """Distributions ``[G, V]`` that may leak into the output, on the support of p: what kinds of bias the power is stated for."""
        flat = torch.where(p > 0, p.clamp(min=FLOOR).sqrt(), 0)
        found = {"the likeliest token": only_best(p), "a higher temperature": flat / flat.sum(-1, keepdim=True)}
        return {"the draft's distribution": q, **found} if q is not None else found

    def _weights(self, index: int, rows: int) -> list[Tensor]:
        """``[G, 1]`` how feature ``index`` came out so many positions before."""
        none = torch.zeros(rows, 1, device=self.device)
        return [self.history[-lag][:, index, None] if len(self.history) >= lag else none for lag in LAGS]


@lru_cache(maxsize=4)
def half(vocab_size: int, device: torch.device) -> Tensor:
    """``[V]`` 1 for about every other token, without order, else 0."""
    with torch.inference_mode(False):
        return torch.tensor([float(row_key((token, 0)) & 1) for token in range(vocab_size)], device=device)


def only_best(p: Tensor) -> Tensor:
    return torch.zeros_like(p).scatter_(1, p.argmax(-1, keepdim=True), 1.0)
