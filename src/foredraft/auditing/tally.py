"""Sums of martingale differences, the tests made of them, and how well planted biases show in the same sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from foredraft.auditing.features import Features
from foredraft.auditing.report import Power, Statistic

ENOUGH = 100.0  # variance that a sum of differences in [-1, 1] needs to be taken for normal
POWER = 0.9
TRIALS = 40  # planted biases of each kind
CLOSE = 1e-4  # correlation eigenvalues below this count as 0


@dataclass(frozen=True)
class Design:
    """What is tested, how often, and at which level.

    Attributes:
        significance: probability of accusing a correct configuration, over everything.
        bias: total variation per token of planted biases, which the default number of samples is made for.
        shares: part of the significance that each look may spend.
    """

    significance: float
    bias: float
    shares: Sequence[float] = (0.05, 0.1, 0.2, 0.65)

    def bound(self, look: int, tests: int) -> float:
        """The p-value of a single test below which it is a fault at this look."""
        return self.significance * self.shares[look] / tests

    def tokens(self, tests: int) -> int:
        """Enough to find ``bias`` with probability 0.9 along the worst event, one of probability 1/2."""
        z = critical(self.bound(-1, tests)) + NormalDist().inv_cdf(POWER)
        return math.ceil((z * 0.5 / self.bias) ** 2)


class Tally:
    """Sums over tokens of J features.

    Args:
        features: which.
        length: positions of a text.
        bias: total variation of the planted biases.
        seed: of the planted biases.
    """

    def __init__(self, features: Features, length: int, *, bias: float, seed: int):
        self.names, self.vocab_size, self.bias, self.tokens = features.names, features.vocab_size, bias, 0
        self._leaks = features.directions
        count = len(self.names)
        self.total = torch.zeros(length, count, dtype=torch.float64)
        self.covariance = torch.zeros(length, count, count, dtype=torch.float64)
        any_two = torch.full((1, 2), 0.5)
        self.directions = list(self._leaks(any_two, any_two if features.draft else None))
        self.shift = torch.zeros(len(self.directions), count, dtype=torch.float64)  # expected, of the planted bias
        self.planted = torch.zeros(len(self.directions), TRIALS, count, dtype=torch.float64)  # as it came out
        self.distance = torch.zeros(len(self.directions), dtype=torch.float64)
        self._generator = torch.Generator().manual_seed(seed % 2**63)  # seeds of rows may be larger

    @property
    def tests(self) -> int:
        """How many tests :meth:`statistics` makes at most."""
        return 2 * len(self.names) + 1

    def add(self, position: int, features: Tensor, p: Tensor, q: Tensor | None, tokens: Tensor) -> Tensor:
        """Count ``tokens`` ``[G]`` at ``position``; returns ``[G, J]`` how each feature came out, less its expectation."""
        expected = (features * p[:, None]).sum(-1)  # [G, J]
        outcome = features.gather(2, tokens[:, None, None].expand(-1, features.shape[1], 1))[..., 0]
        second = torch.einsum("gjv,gkv->jk", features * p[:, None], features)
        self.tokens += len(tokens)
        self.total[position] += (outcome - expected).cpu().double().sum(0)  # MPS has no float64
        self.covariance[position] += (second - expected.T @ expected).cpu().double()
        self._plant(features, p, q, expected)
        return outcome - expected

    def _plant(self, features: Tensor, p: Tensor, q: Tensor | None, expected: Tensor) -> None:
        """The same texts, with fresh tokens from p, of which some come from another distribution instead: as many as make the total
        variation ``bias``."""
        fresh = self._draw(p)
        for index, leak in enumerate(self._leaks(p, q).values()):
            distance = (leak - p).abs().sum(-1) / 2
            chance = torch.where(distance > 0, self.bias / distance.clamp(min=1e-9), 0).clamp(max=1)  # [G]
            self.distance[index] += float((chance * distance).sum())
            self.shift[index] += (chance[:, None] * ((features * leak[:, None]).sum(-1) - expected)).cpu().double().sum(0)
            hit = torch.rand(fresh.shape, generator=self._generator).to(p.device) < chance[:, None]
            tokens = torch.where(hit, self._draw(leak), fresh)  # [G, TRIALS]
            outcomes = features.gather(2, tokens[:, None].expand(-1, features.shape[1], -1)) - expected[..., None]
            self.planted[index] += outcomes.cpu().double().sum(0).T

    def _draw(self, p: Tensor) -> Tensor:
        """``[G, TRIALS]`` tokens from p ``[G, V]``, by its cumulative distribution."""
        u = torch.rand(len(p), TRIALS, generator=self._generator).to(p.device)
        cumulative = p.cumsum(-1)
        tokens = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
        return tokens.clamp(max=p.shape[1] - 1)

    # -- tests --------------------------------------------------------------------------------------------------------

    def statistics(self) -> list[Statistic]:
        """Each feature's sum, its sums by position, and all features at once."""
        return [*self._overall(self.total.sum(0)), *self._by_position()]

    def _overall(self, total: Tensor) -> list[Statistic]:
        """Tests of the sums ``total`` ``[J]`` over all positions."""
        variance = self.covariance.sum(0).diagonal()
        found = [
            Statistic(name, math.erfc(abs(z) / math.sqrt(2)), z=z)  # two-sided
            for name, z, enough in zip(self.names, (total / variance.clamp(min=1e-30).sqrt()).tolist(), variance >= ENOUGH)
            if enough
        ]
        together = self._together(total)
        return found if together is None else [*found, together]

    def _together(self, total: Tensor) -> Statistic | None:
        """The squared length of all sums, in the metric of their covariance."""
        covariance = self.covariance.sum(0)
        use = (covariance.diagonal() >= ENOUGH).nonzero()[:, 0]
        if len(use) < 2:
            return None
        scale = covariance.diagonal()[use].sqrt()
        values, vectors = torch.linalg.eigh(covariance[use][:, use] / (scale[:, None] * scale))
        kept = values > CLOSE
        along = vectors.T @ (total[use] / scale)
        chi2, freedom = float((along[kept] ** 2 / values[kept]).sum()), int(kept.sum())
        return Statistic("all of these together", upper_tail(chi2, freedom), chi2=chi2, freedom=freedom)

    def _by_position(self) -> list[Statistic]:
        variance = self.covariance.diagonal(dim1=1, dim2=2)  # [T, J]
        found = []
        for index, name in enumerate(self.names):
            use = variance[:, index] >= ENOUGH
            if int(use.sum()) > 1:
                chi2, freedom = float((self.total[use, index] ** 2 / variance[use, index]).sum()), int(use.sum())
                found.append(Statistic(f"{name}, by position", upper_tail(chi2, freedom), chi2=chi2, freedom=freedom))
        return found

    # -- power --------------------------------------------------------------------------------------------------------

    def power(self, bound: float) -> list[Power]:
        """What would be found with single tests at p-value ``bound``, per direction of bias."""
        variance = self.covariance.sum(0).diagonal()
        scale = variance.clamp(min=1e-30).sqrt()
        needed = critical(bound) + NormalDist().inv_cdf(POWER)
        found = []
        for index, direction in enumerate(self.directions):
            planted = float(self.distance[index]) / max(1, self.tokens)
            z = torch.where(variance >= ENOUGH, self.shift[index].abs() / scale, 0)
            smallest = planted * needed / float(z.max()) if float(z.max()) > 0 else math.inf
            hits = sum(min((each.p_value for each in self._overall(total)), default=1.0) < bound for total in self.planted[index])
            found.append(Power(direction, min(1.0, smallest), planted, hits, TRIALS))
        return found


def critical(p_value: float) -> float:
    """The deviation in standard errors whose two-sided p-value this is."""
    return -NormalDist().inv_cdf(p_value / 2)


def upper_tail(chi2: float, freedom: int) -> float:
    """Of the chi-square distribution."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(chi2 / 2, dtype=torch.float64)))
