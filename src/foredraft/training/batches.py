"""Which texts a step reads: a function of the seed and the step's number alone, so that a resumed run reads on where it was.

A micro-batch holds texts of similar length, padded on the right, of ``batch_tokens`` at most with the padding. A step takes as many in a
row as there are processes times accumulated micro-batches; process r of n takes the r-th of every n. So two processes read what one does
that accumulates twice as much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.errors import ConfigurationError
from foredraft.training.data import Texts

POOL = 4096  # texts that are sorted by length together: little padding, and batches still of unrelated texts

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Tokens:
    """``ids`` ``[B, S]``, ``valid`` ``[B, S]`` where there is no padding, ``counted`` ``[B, S]`` what losses may predict; ``members``
    ``[B]`` which texts; ``source`` the arguments of the encoder, where the target has one."""

    ids: Tensor
    valid: Tensor
    counted: Tensor
    members: Numbers
    source: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> Tokens:
        source = {name: each.to(device) for name, each in self.source.items()}
        return Tokens(self.ids.to(device), self.valid.to(device), self.counted.to(device), self.members, source)


@dataclass(frozen=True)
class Order:
    """The order of the texts ``members`` of ``texts``.

    Attributes:
        batch_tokens: of a micro-batch, padding included.
        per_step: micro-batches of a step, of all processes together.
        longest: texts are cut off behind so many tokens; None for not at all.
        everything: prompts are predicted too, not only answers.
    """

    texts: Texts
    members: Sequence[int]
    batch_tokens: int
    per_step: int
    seed: int
    longest: int | None = None
    everything: bool = False

    def __post_init__(self) -> None:
        longest = int(self._sizes.sum(1).max()) if len(self.members) else 0
        if longest > self.batch_tokens:
            what = "a text and its source have" if self.texts.sources else "a text has"
            raise ConfigurationError(
                f"{what} {longest} tokens and --batch-tokens is {self.batch_tokens}: raise it, or cut texts with --max-length"
            )
        if not self.steps(0):
            raise ConfigurationError(
                f"{len(self.members)} texts make fewer than the {self.per_step} micro-batches of a step: lower --batch-tokens or "
                "--accumulate, or generate more data"
            )

    @cached_property
    def _sizes(self) -> Numbers:
        """``[members, 1]``, or ``[members, 2]`` with sources: tokens that a micro-batch pads for each."""
        sizes = self.texts.sizes[np.asarray(self.members, dtype=np.int64)].copy()
        if self.longest is not None:
            sizes[:, 0] = np.minimum(sizes[:, 0], self.longest)
        return sizes

    def epoch(self, number: int) -> list[Numbers]:
        """The micro-batches of one epoch."""
        random = np.random.default_rng((self.seed, number))
        members, sizes = np.asarray(self.members, dtype=np.int64), self._sizes
        shuffled = random.permutation(len(members))
        batches = []
        for start in range(0, len(shuffled), POOL):
            pool = shuffled[start : start + POOL]
            pool = pool[np.argsort(sizes[pool].sum(1), kind="stable")]
            first, widest = 0, np.zeros(sizes.shape[1], dtype=np.int64)
            for place in range(len(pool)):
                widest = np.maximum(widest, sizes[pool[place]])
                if (place + 1 - first) * widest.sum() > self.batch_tokens:
                    batches.append(members[pool[first:place]])
                    first, widest = place, sizes[pool[place]]
            batches.append(members[pool[first:]])
        return [batches[index] for index in random.permutation(len(batches))]

    def steps(self, epoch: int) -> int:
        """How many steps an epoch has; what is left over is not read."""
        return len(self.epoch(epoch)) // self.per_step

    def read(self, *, step: int, rank: int = 0, processes: int = 1) -> Iterator[tuple[int, list[Tokens]]]:
        """From step ``step`` on, without an end: the epoch, and the micro-batches of this process."""
        epoch = 0
        while step >= (steps := self.steps(epoch)):
            step, epoch = step - steps, epoch + 1
        while True:
            batches = self.epoch(epoch)
            for first in range(step * self.per_step, len(batches) - self.per_step + 1, self.per_step):
                yield epoch, [self.tokens(each) for each in batches[first + rank : first + self.per_step : processes]]
            step, epoch = 0, epoch + 1

    def tokens(self, members: Numbers, instead: Mapping[int, np.ndarray[Any, Any]] = MappingProxyType({})) -> Tokens:
        """The texts, padded; those of ``instead`` in place of the ones that were given."""
        texts = [instead.get(int(member), self.texts[int(member)])[: self.longest] for member in members]
        ids, valid = padded(texts)
        begins = torch.tensor([0 if self.everything else int(self.texts.prompt_lengths[member]) for member in members])
        counted = valid & (torch.arange(ids.shape[1]) >= begins[:, None])
        if not self.texts.sources:
            return Tokens(ids, valid, counted, members)
        read, mask = padded([self.texts.sources[member] for member in members])
        return Tokens(ids, valid, counted, members, {"input_ids": read, "attention_mask": mask.long()})


def padded(texts: Sequence[np.ndarray[Any, Any]]) -> tuple[Tensor, Tensor]:
    """``[B, S]`` ids, with 0 behind shorter texts, and where there is no padding."""
    ids, valid = (np.zeros((len(texts), max(map(len, texts))), dtype=kind) for kind in (np.int64, bool))
    for row, text in enumerate(texts):
        ids[row, : len(text)], valid[row, : len(text)] = text, True
    return torch.from_numpy(ids), torch.from_numpy(valid)
