"""The statistical part: tokens sampled through the real loop, tested against the target's own distribution after the same text.

Many continuations of several rounds are drawn in batches, each under a seed of its own. The distribution of every token
given its text is known: one plain pass over each continuation and transformers' processors give p. Sums of f(y) - E_p f over
all tokens, for several functions f, are tested together, with Bonferroni's correction over tests and over looks; a look after
an eighth, a quarter and half of the samples ends early what is grossly wrong.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.auditing.features import Features
from foredraft.auditing.reference import Reference
from foredraft.auditing.report import Statistic, StatisticalPart
from foredraft.auditing.tally import Design, Tally
from foredraft.drafters.draft_model import DraftModel
from foredraft.speculator import Speculator
from foredraft.verification.lenient import Lenient

FRACTIONS = (0.125, 0.25, 0.5, 1.0)
CELLS = 1 << 24  # numbers per feature tensor
EDGE = 16  # units in the last place of the largest logit: a token this close to the edge of a filter is not impossible


@dataclass(frozen=True, eq=False)
class Batch:
    """Continuations ``tokens`` ``[G, T]`` of one prompt: ``alive`` ``[G, T]`` where a text has not ended, ``begins`` ``[G, T]`` where
    a token is the first of its round."""

    reference: Reference
    tokens: Tensor
    alive: Tensor
    begins: Tensor


@dataclass
class Sums:
    """Counts of the loop itself."""

    continuations: int = 0
    row_passes: int = 0
    drafted: int = 0
    accepted: int = 0
    impossible: int = 0
    distance: float = 0.0


def check(
    speculator: Speculator,
    references: Sequence[Reference],
    *,
    length: int,
    samples: int | None,
    batch_size: int,
    seed: int,
    design: Design,
    arguments: dict[str, Any],
) -> StatisticalPart:
    """Test ``samples`` continuations of ``length`` tokens, or as many as ``design`` asks for, some after every prompt."""
    begin = time.perf_counter()
    draft, rule = draft_of(speculator), speculator.rule
    law = rule.law if isinstance(rule, Lenient) and draft is not None else None
    features = Features(speculator.target.vocab_size, draft is not None, speculator.target.device)
    tally, sums = Tally(features, length, bias=design.bias, seed=seed), Sums()
    wanted = samples or math.ceil(design.tokens(tally.tests) / length)
    most = max(1, min(batch_size, wanted // len(references)))  # in larger batches some prompts would have no turn
    statistics: list[Statistic] = []
    for look, fraction in enumerate(FRACTIONS):
        while sums.continuations < math.ceil(fraction * wanted):
            count = min(most, math.ceil(fraction * wanted) - sums.continuations)
            reference = references[sums.continuations // most % len(references)]
            seeds = [(seed, row) for row in range(sums.continuations, sums.continuations + count)]
            measure(sample(speculator, reference, length, seeds, sums, arguments), draft, tally, sums, law)
        statistics = tally.statistics()
        bound = design.bound(look, tally.tests)
        smallest = min((each.p_value for each in statistics), default=1.0)
        if smallest < bound or sums.impossible:
            break
    return StatisticalPart(
        continuations=sums.continuations,
        tokens=tally.tokens,
        rounds=sums.row_passes / sums.continuations,
        acceptance=sums.accepted / max(1, sums.drafted),
        looks=look + 1,
        impossible=sums.impossible,
        statistics=statistics,
        p_value=min(1.0, smallest * design.significance / bound),
        significance=design.significance,
        power=tally.power(bound),
        seconds=time.perf_counter() - begin,
        distance=None if law is None else sums.distance / max(1, tally.tokens),
    )


def draft_of(speculator: Speculator) -> Any:
    """The draft model, if the drafter is one that reads the target's tokens: its distribution after a text is then known."""
    drafter = speculator.drafter
    return drafter.model.model if isinstance(drafter, DraftModel) and drafter.foreign is None else None


def sample(
    speculator: Speculator, reference: Reference, length: int, seeds: Sequence[tuple[int, int]], sums: Sums, arguments: dict[str, Any]
) -> Batch:
    """One continuation per seed through the audited loop."""
    prompt = torch.tensor([reference.inputs], device=speculator.model.device).expand(len(seeds), -1)
    options = {**arguments, "max_new_tokens": length, "seed": list(seeds), "repeatable": False}
    if not speculator.target.sourced:
        options = {"pad_token_id": 0, **options}
    texts: list[list[int]] = [[] for _ in seeds]
    begins = torch.zeros(len(seeds), length, dtype=torch.bool)
    with closing(speculator.stream(prompt, attention_mask=torch.ones_like(prompt), **options)) as stream:
        for tokens in stream:
            begins[tokens.row, len(texts[tokens.row])] = True
            texts[tokens.row] += tokens
        stats = stream.stats
    sums.continuations += len(seeds)
    sums.row_passes += stats.row_passes
    sums.drafted += stats.drafted
    sums.accepted += stats.accepted
    alive = torch.arange(length) < torch.tensor([len(text) for text in texts])[:, None]
    whole = torch.tensor([text + [0] * (length - len(text)) for text in texts])
    return Batch(reference, *(each.to(prompt.device) for each in (whole, alive, begins)))


@torch.inference_mode()
def measure(batch: Batch, draft: Any, tally: Tally, sums: Sums, law: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
    """Add every token of ``batch`` to ``tally``, in parts that fit into memory; and how far the rule's ``law`` is from p there."""
    vocab_size = tally.vocab_size
    rows = max(1, CELLS // (len(tally.names) * vocab_size))
    for tokens, alive, begins in zip(*(torch.split(each, rows) for each in (batch.tokens, batch.alive, batch.begins))):
        logits = batch.reference.logits(tokens)
        others = None if draft is None else batch.reference.logits(tokens, model=draft)
        features = Features(vocab_size, draft is not None, tokens.device)
        prompt = torch.tensor(batch.reference.prompt, device=tokens.device).expand(len(tokens), -1)
        for position in range(tokens.shape[1]):
            ids = torch.cat([prompt, tokens[:, :position]], 1)
            p = batch.reference.distribution(ids, logits[:, position])
            q = None if others is None else batch.reference.distribution(ids, others[:, position], vocab_size=vocab_size)
            if q is not None:
                q = torch.where(q.isnan(), p, q)  # a draft that knows no token that is left does not draft
            here = possible(batch.reference, ids, logits[:, position], p, tokens[:, position], alive[:, position], sums)
            came = torch.zeros(len(tokens), len(tally.names), device=tokens.device)
            if bool(here.any()):
                values = features.at(p, q, ids, begins[:, position])[here]
                if law is not None and q is not None:
                    sums.distance += float((law(p[here], q[here]) - p[here]).abs().sum()) / 2
                came[here] = tally.add(position, values, p[here], None if q is None else q[here], tokens[here, position])
            features.history.append(came)


def possible(reference: Reference, ids: Tensor, logits: Tensor, p: Tensor, tokens: Tensor, alive: Tensor, sums: Sums) -> Tensor:
    """``[G]`` whether a text is ``alive`` and the target may emit its token; counts those that it may not even within rounding."""
    fine = p.gather(1, tokens[:, None])[:, 0] > 0
    for row in (alive & ~fine).nonzero()[:, 0].tolist():
        raised = logits[row].float().clone()
        unit = EDGE * torch.finfo(logits.dtype).eps * float(raised.nan_to_num(0, 0, 0).abs().max())
        raised -= unit
        raised[tokens[row]] += 2 * unit
        sums.impossible += int(reference.distribution(ids[row, None], raised[None])[0, tokens[row]] == 0)
    return alive & fine
