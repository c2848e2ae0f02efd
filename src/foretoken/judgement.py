"""From a tree's logits to a verdict on the host: the round's one synchronisation.

Everything that the host has to know travels together: what was accepted, the tokens, and whether the scores were fit to
choose from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

import torch
from torch import Tensor

from foretoken.logprobs import LogProbs, log_probabilities
from foretoken.sampler import Sampler
from foretoken.sampling import argmax
from foretoken.tree import TokenTree
from foretoken.verification.base import Rule, Verdict
from foretoken.verification.match import follow

NAN, INFINITE, EMPTY = 1, 2, 4  # what can be wrong with a node's scores: raw, raw, after the processors


@dataclass(frozen=True)
class Line:
    """One row's verdict: how many drafted tokens were ``accepted`` and how many there were, the ``bonus`` token, the
    ``tokens`` along the path and the ``faults`` of the scores there, and whether any token of the tree is ``outside`` the vocabulary."""

    accepted: int
    bonus: int
    drafted: int
    outside: bool
    tokens: Sequence[int]
    faults: Sequence[int]


@dataclass(frozen=True, eq=False)
class Judgement:
    """The verdicts of R rows; ``path`` ``[R, D]`` unless paths are in node order; ``vectors`` ``[R, D, V]`` asked for by name;
    ``logprobs`` per row along its whole path, the bonus token included."""

    lines: list[Line]
    path: Tensor | None = None
    vectors: dict[str, Tensor] = field(default_factory=dict)
    logprobs: Sequence[LogProbs] | None = None


def judge(
    rule: Rule, tree: TokenTree, logits: Tensor, sampler: Sampler, *, record: frozenset[str] = frozenset(), top: int | None = None
) -> Judgement:
    """Apply ``rule``, or greedy matching if no row samples, to ``logits`` ``[R, N, V]``.

    ``record`` names vectors to keep along the paths: ``scores`` (processed) and ``logits`` (raw). ``top`` asks for log-probabilities,
    with so many of the likeliest tokens.
    """
    if sampler.greedy and sampler.plain and tree.chain and not record and top is None:
        lines = match_on_host(tree, sampler.scores(logits, tree))
        if lines is not None:
            return Judgement(lines)
    logits = logits.to(tree.tokens.device)
    inside = replace(tree, tokens=tree.tokens.clamp(0, logits.shape[-1] - 1))  # others are told of, not read at
    scores = sampler.scores(logits, inside)
    verdict, best = verify(rule, inside, scores, sampler)
    lines = to_host(tree, verdict, torch.stack([logits.amax(-1).to(best.dtype), best], -1), logits.shape[-1])
    values = {"scores": scores, "logits": logits}
    vectors = {name: values[name].float().gather(1, verdict.path[..., None].expand(-1, -1, logits.shape[-1])) for name in record}
    logprobs = None if top is None else log_probabilities(inside, verdict, logits, top)
    return Judgement(lines, None if tree.chain else verdict.path, vectors, logprobs)


def match_on_host(tree: TokenTree, scores: Tensor) -> list[Line] | None:
    """Greedy chains, the common case: comparing a few integers is quicker here than a dozen tensor calls.

    None if a score that counts is not finite, which takes a closer look. An argmax finds NaN, +inf, and -inf where there is
    nothing else.
    """
    tokens, choices, finite, lengths = (chain_on_cpu if scores.device.type == "cpu" else chain_on_device)(tree, scores)
    vocab_size, faults = scores.shape[-1], [0] * tree.nodes
    lines = []
    for drafted, drafts, chosen, fine in zip(lengths, tokens, choices, finite):
        accepted = 0
        while accepted < drafted and drafts[accepted + 1] == chosen[accepted]:
            accepted += 1
        if not all(fine[: accepted + 1]):
            return None
        proposed = drafts[: drafted + 1]
        lines.append(Line(accepted, chosen[accepted], drafted, min(proposed) < 0 or max(proposed) >= vocab_size, drafts, faults))
    return lines


def chain_on_cpu(tree: TokenTree, scores: Tensor) -> tuple[list[list[int]], list[list[int]], list[list[bool]], list[int]]:
    """Tokens, choices, whether their scores are finite, and drafted lengths, without a tensor call more than it takes."""
    values = scores.numpy()
    choices = values.argmax(-1).tolist()
    finite = [[isfinite(values.item(row, node, token)) for node, token in enumerate(chosen)] for row, chosen in enumerate(choices)]
    lengths = [tree.nodes - 1] * tree.rows if tree.valid is None else [sum(valid) - 1 for valid in tree.valid.tolist()]
    return tree.tokens.tolist(), choices, finite, lengths


def chain_on_device(tree: TokenTree, scores: Tensor) -> tuple[list[list[int]], list[list[int]], list[list[bool]], list[int]]:
    """The same with one copy to the host."""
    choices = scores.argmax(-1)
    best = scores.gather(-1, choices[..., None])[..., 0]
    columns = torch.cat([tree.tokens, choices.to(tree.tokens.device), best.isfinite().to(tree.tokens.device), tree.drafted[:, None]], 1)
    nodes = tree.nodes
    packet = columns.tolist()
    return (
        [line[:nodes] for line in packet],
        [line[nodes : 2 * nodes] for line in packet],
        [line[2 * nodes : 3 * nodes] for line in packet],
        [line[-1] for line in packet],
    )


def verify(rule: Rule, tree: TokenTree, scores: Tensor, sampler: Sampler) -> tuple[Verdict, Tensor]:
    """The verdict, and ``[R, N]`` the largest score of each node."""
    if sampler.greedy:
        choices = argmax(scores)
        return follow(tree, choices), scores.gather(-1, choices[..., None])[..., 0]
    assert sampler.noise is not None
    return rule.verify(tree, sampler.distribution(scores), sampler.noise), scores.amax(-1)


def to_host(tree: TokenTree, verdict: Verdict, best: Tensor, vocab_size: int) -> list[Line]:
    """``verdict`` with the largest raw and processed scores ``best`` ``[R, N, 2]``, which tell NaN, infinity and empty support."""
    tokens = tree.tokens
    outside = (tokens < 0) | (tokens >= vocab_size)
    if tree.valid is not None:
        outside = outside & tree.valid
    raw, processed = best.unbind(-1)
    faults = raw.isnan() * NAN + raw.isinf() * INFINITE + ~processed.isfinite() * EMPTY  # [R, N]
    if not tree.chain:
        tokens, faults = tokens.gather(1, verdict.path), faults.gather(1, verdict.path)
    head = torch.stack([verdict.accepted, verdict.next_token, tree.drafted, outside.any(1)], 1)
    depth = tokens.shape[1]
    return [
        Line(accepted, bonus, drafted, bool(bad), along[:depth], along[depth:])
        for accepted, bonus, drafted, bad, *along in torch.cat([head, tokens, faults], 1).tolist()
    ]
