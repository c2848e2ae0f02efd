"""Sums and means of what a run reports."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor


class Sums:
    """Scalars of the micro-batches of a step, each weighted by its tokens, on their device until they are asked for."""

    def __init__(self, device: torch.device):
        self.weight = torch.zeros((), device=device)
        self._sums: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor], weight: Tensor) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, torch.zeros_like(self.weight)) + value.detach() * weight
        self.weight = self.weight + weight

    def vector(self, *more: float) -> Tensor:
        """``[2 + len(more) + …]`` the weight, ``more``, and the sums: to be added up over processes."""
        others = torch.tensor(more, dtype=self.weight.dtype, device=self.weight.device)
        return torch.cat([self.weight[None], others, *(value[None] for value in self._sums.values())])

    def means(self, vector: Tensor) -> dict[str, float]:
        """From such a vector, without what came before the sums."""
        values = vector[-len(self._sums) :].tolist()
        return {name: value / max(1.0, float(vector[0])) for name, value in zip(self._sums, values)}


class Since:
    """Means over the steps since the last report, and the speed."""

    def __init__(self) -> None:
        self._lines: list[Mapping[str, float]] = []
        self._begin, self._tokens = time.monotonic(), -1

    def add(self, line: Mapping[str, float]) -> None:
        self._lines.append(line)

    def taken(self, tokens: int) -> dict[str, float]:
        """``tokens`` were counted so far in all."""
        lines, now = self._lines, time.monotonic()
        means = {name: sum(line[name] for line in lines) / len(lines) for name in lines[0]}
        if self._tokens >= 0:
            means["tokens_per_second"] = (tokens - self._tokens) / max(1e-9, now - self._begin)
        self._lines, self._begin, self._tokens = [], now, tokens
        return means
