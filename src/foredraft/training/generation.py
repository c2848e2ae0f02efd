"""Self-distillation data: the target answers prompts, and its answers are what heads learn to foresee (Cai et al. 2024, Medusa, section
2.3.2).

A shard is generated from nothing but its prompts, the settings and the seed: rows join as others leave, in one order, on a cache that is
given back between shards. A run that was killed therefore makes the same files as one that was not, on the same machine with the same
number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from foredraft.errors import ConfigurationError
from foredraft.loading import fingerprint_of, name_of
from foredraft.logits.known_processors import warpers
from foredraft.logits.logprobs import LogProbs
from foredraft.logits.processors import Pipeline
from foredraft.models.encoder_decoder import Source, beginning_of, check_ids
from foredraft.rows import RowParameters, SessionRow, successful
from foredraft.session import Session
from foredraft.speculator import Speculator
from foredraft.training.data import SOURCES, Manifest, Shard, save_shard, shard_file, weights_digest
from foredraft.training.prompts import digest


@dataclass(frozen=True)
class Answering:
    """How prompts are answered.

    Attributes:
        max_new_tokens: of an answer, at most; it ends earlier with an end-of-text token of the model. 0: prompts are texts as they are.
        temperatures: prompt i is answered at the (i mod n)-th of them; 0 is greedy.
        top_k, top_p, min_p: filters of sampled answers; None for none.
        top: record so many of the likeliest tokens at every place, with log-probabilities; 0 for none.
        seed: of the answers; prompt i is keyed by (seed, i).
        batch: rows that are answered together.
        dtype: the target's.
        execution: how passes are made, as of a Speculator; "eager" leaves nothing to timings.
    """

    max_new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0,)
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    top: int = 0
    seed: int = 0
    batch: int = 64
    dtype: str = "auto"
    execution: str = "eager"

    def __post_init__(self) -> None:
        if not self.temperatures or any(not 0 <= each < float("inf") for each in self.temperatures):
            raise ConfigurationError(f"temperatures must be 0 (greedy) or above, got {self.temperatures}")
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if value is not None and not 0 < value <= 1:
                raise ConfigurationError(f"{name} must be above 0 and at most 1, got {value}")
        for name, least in (("max_new_tokens", 0), ("batch", 1)):
            if getattr(self, name) < least:
                raise ConfigurationError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.top and not self.max_new_tokens:
            raise ConfigurationError("top_k_probabilities are recorded for answers, and max_new_tokens=0 makes no answers")

    def parameters(self, index: int, prompt: Sequence[int], eos: frozenset[int]) -> RowParameters:
        """Of prompt ``index``."""
        temperature = self.temperatures[index % len(self.temperatures)]
        reshaping = warpers(temperature, self.top_k, self.top_p, self.min_p) if temperature > 0 else []
        pipeline = Pipeline.alone(reshaping, prompt_length=len(prompt))
        return RowParameters(
            self.max_new_tokens, temperature > 0, pipeline, (self.seed, index), eos, logprobs=self.top if self.top else None
        )


@dataclass(frozen=True)
class Count:
    """Where a run stands: shards, texts and tokens of answers made by it, the texts of its part in all, and its seconds."""

    shards: int
    rows: int
    tokens: int
    of_rows: int
    seconds: float


def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    answering: Answering,
    folder: Path,
    *,
    source: dict[str, Any],
    per_shard: int = 1024,
    part: tuple[int, int] = (1, 1),
    report: Callable[[Count], None] = lambda count: None,
) -> Count:
    """Let a model answer ``prompts``, which its encoder reads if it has one, and make the shards that are missing in ``folder``; ``source``
    says where the prompts come from. Of n parts, each a process of its own, ``part = (i, n)`` makes every n-th.

    Raises:
        ConfigurationError: the folder was started with other settings, or a prompt that the target cannot read.
    """
    sourced = bool(model.config.is_encoder_decoder)
    if sourced:
        check_sources(model, prompts, answering)
    manifest = Manifest(
        target=name_of(model),
        vocabulary=fingerprint_of(model) or "",
        weights=weights_digest(model),
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
        prompts=digest(prompts),
        count=len(prompts),
        per_shard=per_shard,
        settings={**source, **asdict(answering), "temperatures": list(answering.temperatures), **({SOURCES: True} if sourced else {})},
    )
    manifest.claim(folder)
    mine = range(part[0] - 1, manifest.shards, part[1])
    begin, of_rows = time.monotonic(), sum(len(manifest.members(shard)) for shard in mine)
    shards = rows = tokens = 0

    def count(more_tokens: int = 0, more_rows: int = 0) -> Count:
        return Count(shards, rows + more_rows, tokens + more_tokens, of_rows, time.monotonic() - begin)

    with closing(Speculator(model, "none", execution=answering.execution, reuse_prefix=False)) as speculator:
        for path, members in ((shard_file(folder, shard), manifest.members(shard)) for shard in mine):
            if path.exists():
                continue
            asked = [(index, prompts[index]) for index in members]
            shard = _answered(speculator, asked, answering, lambda *more: report(count(*more)))
            save_shard(path, shard.arrays())
            shards, rows, tokens = shards + 1, rows + len(asked), tokens + int((shard.lengths - shard.prompt_lengths).sum())
            report(count())
        return count()


def _answered(
    speculator: Speculator, prompts: Sequence[tuple[int, Sequence[int]]], answering: Answering, progress: Callable[[int, int], None]
) -> Shard:
    """A shard of numbered prompts with their answers."""
    if not answering.max_new_tokens:
        return Shard.of([prompt for _, prompt in prompts], [len(prompt) for _, prompt in prompts])
    rows = answer(speculator, prompts, answering, progress)
    sources = [row.source.ids for row in rows if row.source is not None]
    shard = Shard.of([row.ids for row in rows], [row.prompt_length for row in rows], sources)
    if not answering.top:
        return shard
    found = LogProbs.joined([part for row in rows for part in row.logprobs])
    return replace(shard, top_ids=found.ids.cpu().numpy().astype(np.int32), top_logprobs=found.values.cpu().numpy().astype(np.float32))


def check_sources(model: PreTrainedModel, sources: Sequence[Sequence[int]], answering: Answering) -> None:
    """Raises ConfigurationError if ``model`` cannot write texts behind ``sources``."""
    if model.main_input_name != "input_ids":
        raise ConfigurationError(f"{name_of(model)} reads {model.main_input_name}, and data is generated for models that read text")
    if not answering.max_new_tokens:
        raise ConfigurationError("behind a source there is nothing but an answer: max_new_tokens must be at least 1")
    beginning_of(model)
    for each in sources:
        check_ids(model, torch.tensor([list(each)]))


def add(session: Session, index: int, prompt: Sequence[int], answering: Answering, eos: frozenset[int]) -> None:
    """Add the row that answers prompt ``index``, which an encoder reads if there is one."""
    ids, source = (beginning_of(session.target.model), Source.of(prompt)) if session.target.sourced else (prompt, None)
    session.add(ids, replace(answering.parameters(index, ids, eos), source=source))


def answer(
    speculator: Speculator, prompts: Sequence[tuple[int, Sequence[int]]], answering: Answering, progress: Callable[[int, int], None]
) -> list[SessionRow]:
    """The rows of numbered prompts in their order, all answered; a row joins whenever another one has left."""
    ends = speculator.model.generation_config.eos_token_id
    eos = frozenset() if ends is None else frozenset([ends] if isinstance(ends, int) else ends)
    session = speculator.session()
    queue, rows, made, done = list(reversed(prompts)), [], 0, 0
    try:
        while queue or session.live:
            free = answering.batch - len(session.rows)
            # A pass for every row that leaves would cost more than waiting for a few.
            if queue and (free >= max(1, answering.batch // 8) or not session.live):
                for index, prompt in (queue.pop() for _ in range(min(free, len(queue)))):
                    add(session, index, prompt, answering, eos)
                rows += session.waiting
            commits = successful(session.step())
            made += sum(len(commit.tokens) for commit in commits)
            done += sum(commit.finish_reason is not None for commit in commits)
            progress(made, done)
    finally:
        session.close()
        speculator.release()  # the next shard begins on a cache of its own, as it would in another process
    return rows
