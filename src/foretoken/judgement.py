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

NAN, INFINITE, EMPTY, OVERFLOW = 1, 2, 4, 8  # what can be wrong with a node's scores: the first two raw, the others after the processors


@dataclass(frozen=True)
class Line:
    """One row's verdict: how many drafted tokens were ``accepted`` and how many there were at each depth, the ``bonus`` token, the
    ``tokens`` along the path and the ``faults`` of the scores there, whether any token of the tree is ``outside`` the vocabulary, and
    whether the tree is ``broken``: its parents make no tree, or its q is no distribution. ``path`` holds the path's nodes where the tree
    is no chain."""

    accepted: int
    bonus: int
    drafted: Sequence[int]
    outside: bool
    tokens: Sequence[int]
    faults: Sequence[int]
    broken: bool = False
    path: Sequence[int] = ()


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
    """Apply ``rule``, or greedy matching if no row samples, to ``logits`` ``[R, N, V]`` at the nodes of ``tree`` as it was settled.

    ``record`` names vectors to keep along the paths: ``scores`` (processed) and ``logits`` (raw). ``top`` asks for log-probabilities,
    with so many of the likeliest tokens.
    """
    if sampler.greedy and sampler.plain and tree.chain and not record and top is None:
        lines = match_on_host(tree, sampler.scores(logits, tree))
        if lines is not None:
            return Judgement(lines)
    logits = logits.to(tree.tokens.device)
    inside = replace(tree.settled(), tokens=tree.tokens.clamp(0, logits.shape[-1] - 1))  # what is wrong is told of, not read at
    scores = sampler.scores(logits, inside)
    verdict, best = verify(rule, inside, scores, sampler)
    best = torch.stack([logits.amax(-1).to(best.dtype), best], -1)
    lines = to_host(tree, inside, verdict, best, uses_q=rule.needs_q and not sampler.greedy)
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
        lines.append(Line(accepted, chosen[accepted], [1] * drafted, min(proposed) < 0 or max(proposed) >= vocab_size, drafts, faults))
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


def to_host(tree: TokenTree, inside: TokenTree, verdict: Verdict, best: Tensor, *, uses_q: bool) -> list[Line]:
    """``verdict`` on ``inside``, which is ``tree`` made safe, with the largest raw and processed scores ``best`` ``[R, N, 2]``; these
    tell NaN, infinity and empty support."""
    tokens = tree.tokens
    outside = tokens != inside.tokens
    if tree.valid is not None:
        outside = outside & tree.valid
    broken = tree.malformed
    if uses_q and tree.q is not None:
        broken = broken | inside.wrong_q.any(1)
    raw, processed = best.unbind(-1)
    over = processed.isnan() | (processed == float("inf"))
    faults = raw.isnan() * NAN + raw.isinf() * INFINITE + processed.isneginf() * EMPTY + over * OVERFLOW  # [R, N]
    if not tree.chain:
        tokens, faults = tokens.gather(1, verdict.path), faults.gather(1, verdict.path)
    columns = [levels(inside), tokens, faults] if tree.chain else [levels(inside), tokens, faults, verdict.path]
    head = torch.stack([verdict.accepted, verdict.next_token, outside.any(1), broken], 1)
    depth, below = tokens.shape[1], 1 if tree.chain else inside.height
    return [
        Line(
            accepted,
            bonus,
            [1] * rest[0] if tree.chain else rest[:below],
            bool(out),
            rest[below : below + depth],
            rest[below + depth : below + 2 * depth],
            bool(bad),
            rest[below + 2 * depth :],
        )
        for accepted, bonus, out, bad, *rest in torch.cat([head, *columns], 1).tolist()
    ]


def levels(tree: TokenTree) -> Tensor:
    """``[R, height]`` drafted nodes at each depth from 1 on; of chains, whose levels hold one at most, ``[R, 1]`` how many there are."""
    if tree.chain:
        return tree.drafted[:, None]
    counts = torch.zeros(tree.rows, tree.height + 1, dtype=torch.long, device=tree.tokens.device)
    real = torch.ones_like(tree.tokens) if tree.valid is None else tree.valid.long()
    return counts.scatter_add(1, tree.depths, real)[:, 1:]
