"""The keyed part: with the match rule, and greedily with any, the text is a function of the seed, so it must equal the plain one.

A divergence is excused only by rounding. What rounding can do is measured on the model without the audited loop: logits of
passes over one token against passes over several, and over the whole text. A divergence counts as floating point if some change of the
logits no larger than that, times an allowance, makes plain decoding choose the speculative token; that covers near ties of
log p + noise and the edges of top-p and top-k alike. Besides, the logits that speculation used are compared with the plain
ones at every committed token: a wrong mask or a cache row that is off shows there before it flips a token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from foredraft.auditing.reference import Reference
from foredraft.auditing.report import Divergence, KeyedPart
from foredraft.preparation import pad
from foredraft.speculator import Speculator

ALLOWANCE = 4  # times the measured rounding: other shapes of a pass round differently again
LIMIT = 16  # times the largest measured rounding: beyond it logits are wrong, not rounded


@dataclass(frozen=True, eq=False)
class Plain:
    """A plain text: its ``tokens``, the raw ``logits`` ``[T, V]`` they were chosen from, and the ``rounding`` ``[T]`` of those."""

    tokens: list[int]
    logits: Tensor
    rounding: Tensor


@dataclass(frozen=True, eq=False)
class Speculative:
    """The same from the audited loop."""

    tokens: list[int]
    logits: Tensor


def check(
    speculator: Speculator, references: Sequence[Reference], *, count: int, nodes: int, seed: int, arguments: dict[str, Any]
) -> KeyedPart:
    """Compare ``count`` tokens after every prompt, with passes of up to ``nodes`` tokens."""
    begin = time.perf_counter()
    texts, accepted = generate(speculator, references, count, seed, arguments)
    plain = [decode(reference, count, (seed, index), nodes, len(references)) for index, reference in enumerate(references)]
    found, differences = [], []
    for index, (reference, ours, theirs) in enumerate(zip(references, texts, plain)):
        position = first_difference(ours.tokens, theirs.tokens)
        differences.append(largest(ours.logits, theirs.logits, position))
        if position is not None:
            found.append(divergence(reference, index, position, ours, theirs, (seed, index)))
    rounding = max(float(each.rounding.max()) for each in plain)
    return KeyedPart(
        sampled=references[0].sampled,
        prompts=len(references),
        tokens=sum(len(each.tokens) for each in plain),
        accepted=accepted,
        divergences=found,
        logits=max(differences),
        rounding=rounding,
        limit=LIMIT * rounding,
        seconds=time.perf_counter() - begin,
    )


def generate(
    speculator: Speculator, references: Sequence[Reference], count: int, seed: int, arguments: dict[str, Any]
) -> tuple[list[Speculative], int]:
    """Speculative texts of all prompts in one ragged batch, and how many drafted tokens were kept.

    They are made twice, because keeping the logits takes another way through the loop; where the two differ, the text made without counts.
    """
    seeds = [(seed, index) for index in range(len(references))]
    sourced = speculator.target.sourced
    batch = pad([reference.inputs for reference in references], speculator.model.device, side="right" if sourced else "left")
    width = len(references[0].prompt) if sourced else batch["input_ids"].shape[1]
    if sourced:
        del batch["pad_token_id"]  # the model has its own
    options = {"max_new_tokens": count, "seed": seeds, **batch, **arguments}
    output = speculator.generate(**options)
    recorded = speculator.generate(output_logits=True, return_dict_in_generate=True, **options)
    assert output.stats is not None and recorded.stats is not None and recorded.logits is not None
    texts = []
    for row in range(len(references)):
        lengths = [stats.rows[row].tokens for stats in (output.stats, recorded.stats)]
        tokens, again = (each.sequences[row, width : width + length].tolist() for each, length in zip((output, recorded), lengths))
        logits = torch.stack([step[row] for step in recorded.logits[: lengths[1]]])
        same = first_difference(tokens, again)
        texts.append(Speculative(tokens, logits if same is None else logits[: same + 1]))
    return texts, output.stats.accepted


def decode(reference: Reference, count: int, seed: tuple[int, int], nodes: int, copies: int) -> Plain:
    """The plain text, and how its logits differ between passes of several widths and batch sizes."""
    tokens, logits = reference.decode(count, seed)
    whole = torch.tensor([tokens], device=logits.device)
    others = [reference.logits(whole)[0], reference.logits(whole.expand(max(2, copies), -1))[0], reference.logits_in_steps(tokens, nodes)]
    rounding = torch.stack([gap(other, logits) for other in others]).amax(0)
    unit = torch.finfo(logits.dtype).eps * logits.float().nan_to_num(0, 0, 0).abs().amax(-1)
    return Plain(tokens, logits, torch.maximum(rounding, unit))


def gap(a: Tensor, b: Tensor) -> Tensor:
    """``[T]`` largest difference of ``[T, V]`` logits; infinities that agree do not differ."""
    a, b = a.float(), b.float().to(a.device)
    return torch.where(a == b, 0, (a - b).abs()).amax(-1)


def largest(ours: Tensor, plain: Tensor, position: int | None) -> float:
    """The largest difference up to where the texts part, that position included."""
    count = min(len(ours), len(plain), math.inf if position is None else position + 1)
    return float(gap(ours[: int(count)].to(plain.device), plain[: int(count)]).max())


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which two texts differ; where one ends, if it is the beginning of the other."""
    return next((index for index in range(max(len(a), len(b))) if list(a[index : index + 1]) != list(b[index : index + 1])), None)


def divergence(reference: Reference, prompt: int, position: int, ours: Speculative, theirs: Plain, seed: tuple[int, int]) -> Divergence:
    """What happened at ``position``, judged by the plain logits alone."""
    spoken = ours.tokens[position] if position < len(ours.tokens) else -1
    if spoken < 0 or position >= len(theirs.tokens):
        plain = theirs.tokens[position] if position < len(theirs.tokens) else -1
        return Divergence(prompt, position, plain, spoken, math.inf, 0.0, "fault")
    plain = theirs.tokens[position]
    ids = torch.tensor([[*reference.prompt, *theirs.tokens[:position]]], device=theirs.logits.device)
    logits, allowed = theirs.logits[position].float(), ALLOWANCE * float(theirs.rounding[position])
    lead = reference.lead(ids, logits, seed, plain, spoken)
    cause: Literal["near tie", "edge of a filter", "fault"] = "fault"
    if any(reference.choose(ids, changed, seed) == spoken for changed in changes(logits, plain, spoken, allowed)):
        cause = "near tie" if math.isfinite(lead) else "edge of a filter"
    return Divergence(prompt, position, plain, spoken, lead, allowed, cause)


def changes(logits: Tensor, plain: int, spoken: int, amount: float) -> list[Tensor]:
    """``logits`` ``[V]`` moved by no more than ``amount`` so as to favour ``spoken`` over ``plain``: all others up, down or left alone."""
    found = []
    for others in (-amount, 0.0, amount):
        for mine, yours in ((amount, others), (others, -amount), (amount, -amount)):
            changed = logits + others
            changed[spoken] = logits[spoken] + mine
            changed[plain] = logits[plain] + yours
            found.append(changed)
    return found
