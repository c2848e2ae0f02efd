"""Texts that are written during a run: a share of them by the draft as it is then (on policy), the others by the target or as given.

The steps of a run are divided into windows of ``rewrite_every``. Where a window begins, the prompts of the texts that it will read are
continued, each to the length that the given text has, so that batches stay as they are. What was written lies beside the checkpoints until
the last of them is past it: a run that was killed reads the same texts again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from foredraft.errors import ConfigurationError
from foredraft.rows import RowParameters
from foredraft.speculator import Speculator
from foredraft.training.batches import Order, Tokens
from foredraft.training.data import save_shard
from foredraft.training.distilling import Distilling
from foredraft.training.generation import Answering, answer

BY_DRAFT, BY_TARGET = 1, 2
Text = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class Continuing(Answering):
    """Answers of ``lengths`` tokens at most, by the number of the prompt."""

    lengths: Mapping[int, int] = field(default_factory=dict)

    def parameters(self, index: int, prompt: Sequence[int], eos: frozenset[int]) -> RowParameters:
        return replace(super().parameters(index, prompt, eos), max_new_tokens=self.lengths[index])


class Continuations:
    """Args:

    folder: of the run.
    order: which texts a step reads.
    steps: of the run.

    Raises:
        ConfigurationError: no text has a prompt and something behind it.
    """

    def __init__(self, folder: Path, order: Order, recipe: Distilling, steps: int, draft: PreTrainedModel, target: PreTrainedModel):
        self.folder, self.order, self.recipe, self.steps = folder, order, recipe, steps
        self.writers = {BY_DRAFT: draft, BY_TARGET: target}
        self._window, self._texts = -1, dict[int, Text]()
        prompts = order.texts.prompt_lengths[np.asarray(order.members)]
        if not ((prompts > 0) & (prompts < order.texts.lengths[np.asarray(order.members)])).any():
            raise ConfigurationError(
                "--on-policy and --teacher-texts continue prompts, and these texts have none with something behind them: pass "
                "--prompt-tokens N, which takes the first N tokens of each text as its prompt"
            )

    def file(self, window: int) -> Path:
        return self.folder / f"written-{window:05d}.safetensors"

    def forget(self, step: int) -> None:
        """Delete what a run whose last checkpoint is of ``step`` makes again, or has left behind."""
        for path in self.folder.glob("written-*.safetensors"):
            begin = int(path.stem.partition("-")[2]) * self.recipe.rewrite_every
            if not begin < step < begin + self.recipe.rewrite_every:
                path.unlink()

    def write(self, step: int) -> None:
        """Write the texts of the window that ``step`` is in, unless they are there."""
        window = step // self.recipe.rewrite_every
        if self.file(window).exists():
            return
        begin = window * self.recipe.rewrite_every
        reads = islice(self.order.read(step=begin), min(self.recipe.rewrite_every, self.steps - begin))
        members = sorted({int(member) for _, parts in reads for tokens in parts for member in tokens.members})
        found: dict[int, Text] = {}
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            for writer, part in self._shares(members, window).items():
                found.update(self._written(writer, part, window))
        texts = [found[member] for member in sorted(found)]
        save_shard(
            self.file(window),
            {
                "members": np.asarray(sorted(found), np.int64),
                "lengths": np.asarray([len(text) for text in texts], np.int64),
                "ids": np.concatenate([*texts, np.zeros(0, np.int32)]),
            },
        )

    def read(self, step: int, parts: Iterable[Tokens]) -> list[Tokens]:
        """``parts``, with the texts that were written for the window of ``step`` in place of the given ones."""
        window = step // self.recipe.rewrite_every
        if window != self._window:
            self._texts, self._window = _load(self.file(window)), window
        return [self.order.tokens(part.members, instead=self._texts) for part in parts]

    def _shares(self, members: Sequence[int], window: int) -> dict[int, list[int]]:
        """Who continues which texts: λ of them the draft."""
        mixed = np.random.default_rng((self.order.seed, window, 2)).permutation(np.asarray(members, np.int64)).tolist()
        count = round(self.recipe.on_policy * len(mixed))
        return {BY_DRAFT: sorted(mixed[:count]), BY_TARGET: sorted(mixed[count:]) if self.recipe.teacher_texts else []}

    def _written(self, writer: int, members: Sequence[int], window: int) -> dict[int, Text]:
        texts, longest = self.order.texts, self.order.longest
        whole = {member: min(int(texts.lengths[member]), longest or int(texts.lengths[member])) for member in members}
        lengths = {member: whole[member] - int(texts.prompt_lengths[member]) for member in members}
        prompts = [(member, texts.prompt(member)) for member in members if lengths[member] > 0 and texts.prompt_lengths[member] > 0]
        if not prompts:
            return {}
        seed = int(np.random.SeedSequence((self.order.seed, window, writer)).generate_state(1)[0])
        how = Continuing(max(lengths.values()), (self.recipe.temperature,), seed=seed, lengths=lengths)
        with closing(Speculator(self.writers[writer], "none", execution="eager", reuse_prefix=False, self_test=False)) as speculator:
            rows = answer(speculator, prompts, how, lambda made, done: None)
        return {member: np.asarray(row.ids, np.int32) for (member, _), row in zip(prompts, rows)}


def _load(path: Path) -> dict[int, Text]:
    from safetensors.numpy import load_file

    found = load_file(path)
    ends = np.cumsum(found["lengths"])
    return {int(member): found["ids"][end - length : end] for member, end, length in zip(found["members"], ends, found["lengths"])}
