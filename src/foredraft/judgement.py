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

from foredraft.logits.logprobs import LogProbs, log_probabilities
from foredraft.logits.noise import argmax
from foredraft.logits.sampler import Sampler, widened
from foredraft.tree import TokenTree
from foredraft.verification.base import Rule, Verdict
from foredraft.verification.match import follow

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
    """Apply ``rule``, or greedy matching if no row samples, to ``logits`` ``[R, N, V]`` at the nodes of ``tree`` as it was settled;
    those that are ``extra`` are left out.

    ``record`` names vectors to keep along the paths: ``scores`` (processed) and ``logits`` (raw). ``top`` asks for log-probabilities,
    with so many of the likeliest tokens.
    """
    if tree.extra:
        tree = tree.proposed
        logits = logits[:, : tree.nodes]
    if sampler.greedy and sampler.plain and not record and top is None:
        judgement = match_on_host(tree, logits)
        if judgement is not None:
            return judgement
    logits = logits.to(tree.tokens.device)
    inside = replace(tree.with_safe_parents(), tokens=tree.tokens.clamp(0, logits.shape[-1] - 1))  # what is wrong is told of, not read at
    scores = sampler.scores(logits, inside)
    verdict, best = verify(rule, inside, scores, sampler)
    best = torch.stack([logits.amax(-1).to(best.dtype), best], -1)
    lines = to_host(tree, inside, verdict, best, uses_q=rule.needs_q and not sampler.greedy)
    values = {"scores": scores, "logits": logits}
    vectors = {name: values[name].float().gather(1, verdict.path[..., None].expand(-1, -1, logits.shape[-1])) for name in record}
    logprobs = None if top is None else log_probabilities(inside, verdict.path, verdict.accepted, verdict.next_token, logits, top)
    return Judgement(lines, None if tree.chain else verdict.path, vectors, logprobs)


def match_on_host(tree: TokenTree, logits: Tensor) -> Judgement | None:
    """Greedy matching, the common case: comparing a few integers is quicker here than two dozen tensor calls.

    None for what takes a closer look: a tree that may be none or holds a token that is none, a score that counts and is not finite
    (an argmax finds NaN, +inf, and -inf where there is nothing else), and branches on a device that would have to be waited for.
    """
    if logits.device.type == "cpu":
        return walk_on_host(tree, logits)
    lines = chain_on_device(tree, logits) if tree.chain else None
    return None if lines is None else Judgement(lines)


def walk_on_host(tree: TokenTree, logits: Tensor) -> Judgement | None:
    """Reads the logits of nodes that the walk comes to, no others."""
    if not tree.known_well_formed:
        return None
    assert tree.parent_lists is not None and tree.depth_lists is not None
    tokens: list[list[int]] = tree.tokens.tolist()
    real: list[list[bool]] = [[True] * tree.nodes] * tree.rows if tree.valid is None else tree.valid.tolist()
    vocab_size, longest = logits.shape[-1], tree.height + 1
    lines, paths, faults = [], [], [0] * longest
    for row, (drafts, parents, valid, depths) in enumerate(zip(tokens, tree.parent_lists, real, tree.depth_lists)):
        reached = reached_on_host(drafts, parents, valid, logits[row])
        if reached is None:
            return None
        last = max(reached, key=depths.__getitem__)  # the deepest, of several the first
        path = [last]
        while path[-1]:
            path.append(parents[path[-1]])
        path.reverse()
        proposed = drafts if tree.valid is None else [token for token, kept in zip(drafts, valid) if kept]
        outside = min(proposed) < 0 or max(proposed) >= vocab_size
        if tree.chain:
            lines.append(Line(len(path) - 1, reached[last], [1] * (len(proposed) - 1), outside, drafts, faults))
            continue
        if outside:
            return None
        counts = [0] * longest
        for depth, kept in zip(depths, valid):
            counts[depth] += kept
        accepted = len(path) - 1
        path += [tree.nodes - 1] * (longest - len(path))
        paths.append(path)
        lines.append(Line(accepted, reached[last], counts[1:], False, [drafts[node] for node in path], faults, path=path))
    return Judgement(lines, None if tree.chain else torch.tensor(paths))


def reached_on_host(drafts: Sequence[int], parents: Sequence[int], valid: Sequence[bool], logits: Tensor) -> dict[int, int] | None:
    """The nodes of a row that the target's choices lead to, each with the choice there: several at a depth where siblings have the same
    token. ``logits`` ``[N, V]``; None if one that counts is not finite."""
    reached: dict[int, int] = {}
    for node, parent in enumerate(parents):  # parents come before their children
        if node and (parent not in reached or reached[parent] != drafts[node] or not valid[node]):
            continue
        choice = chosen(logits[node])
        if choice is None:
            return None
        reached[node] = choice
    return reached


def chosen(logits: Tensor) -> int | None:
    """The first largest of ``[V]`` logits on a CPU, None if it is not finite."""
    values = widened(logits).numpy()
    token = int(values.argmax())
    return token if isfinite(values.item(token)) else None


def chain_on_device(tree: TokenTree, logits: Tensor) -> list[Line] | None:
    """Chains with one copy to the host."""
    choices = logits.argmax(-1)
    best = logits.gather(-1, choices[..., None])[..., 0]
    columns = torch.cat([tree.tokens, choices.to(tree.tokens.device), best.isfinite().to(tree.tokens.device), tree.drafted[:, None]], 1)
    nodes, faults, lines = tree.nodes, [0] * tree.nodes, []
    for packet in columns.tolist():
        drafts, choice, fine, drafted = packet[:nodes], packet[nodes : 2 * nodes], packet[2 * nodes : 3 * nodes], packet[-1]
        accepted = 0
        while accepted < drafted and drafts[accepted + 1] == choice[accepted]:
            accepted += 1
        if not all(fine[: accepted + 1]):
            return None
        proposed = drafts[: drafted + 1]
        outside = min(proposed) < 0 or max(proposed) >= logits.shape[-1]
        lines.append(Line(accepted, choice[accepted], [1] * drafted, outside, drafts, faults))
    return lines


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
