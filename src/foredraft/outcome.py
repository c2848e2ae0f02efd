"""How a round ended, as the host knows it: from the target's logits to what every row keeps. The round's one synchronisation.

Everything that the host has to know travels together: what was accepted, the tokens, and whether a token could be chosen from the
scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foredraft.device import one_thread
from foredraft.logits.logprobs import LogProbs, log_probabilities
from foredraft.logits.sampler import Failures, Sampler
from foredraft.traces import NodeValues, values_of
from foredraft.tree import TokenTree
from foredraft.verification.base import Rule, Verdict
from foredraft.verification.host_trees import HostRows
from foredraft.verification.match import Ends, Greedy, Keyed, Match, match, match_on_host

NAN, INFINITE, EMPTY, OVERFLOW = 1, 2, 4, 8  # what can be wrong with a node's scores: the first two raw, the others after the processors


@dataclass(frozen=True)
class RowOutcome:
    """One row: how many drafted tokens were ``accepted`` and how many there were at each depth, the ``bonus`` token, the
    ``tokens`` along the path and the ``faults`` of the scores there, whether any token of the tree is ``outside`` the vocabulary, and
    whether the tree is ``broken``: its parents make no tree, or its q is no distribution. ``path`` holds the path's nodes where the tree
    is no chain. ``failures``: exceptions of the row's processors, by their depth on the path."""

    accepted: int
    bonus: int
    drafted: Sequence[int]
    outside: bool
    tokens: Sequence[int]
    faults: Sequence[int]
    broken: bool = False
    path: Sequence[int] = ()
    failures: Mapping[int, Exception] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Outcome:
    """How R rows ended; ``path`` ``[R, D]`` unless paths are in node order; ``vectors`` ``[R, D, V]`` asked for by name;
    ``logprobs`` per row along its whole path, the bonus token included; ``traced`` by row, where that was asked for."""

    rows: list[RowOutcome]
    path: Tensor | None = None
    vectors: dict[str, Tensor] = field(default_factory=dict)
    logprobs: Sequence[LogProbs] | None = None
    traced: Mapping[int, NodeValues] = field(default_factory=dict)


def decide(
    rule: Rule,
    tree: TokenTree,
    logits: Tensor,
    sampler: Sampler,
    *,
    record: frozenset[str] = frozenset(),
    top: int | None = None,
    traced: Sequence[int] = (),
) -> Outcome:
    """Apply ``rule``, or greedy matching if no row samples, to ``logits`` ``[R, N, V]`` at the nodes of ``tree``, parents made
    safe; those that are ``extra`` are left out.

    ``record`` names vectors to keep along the paths: ``scores`` (processed) and ``logits`` (raw). ``top`` asks for log-probabilities,
    with so many of the likeliest tokens. Of the rows ``traced``, what a trace tells is read.
    """
    if tree.extra:
        tree = tree.proposed
        logits = logits[:, : tree.nodes]
    brief = not record and top is None and not traced and logits.device.type == "cpu" and tree.known_well_formed
    if brief and sampler.greedy and sampler.plain:
        outcome = on_host(tree, Greedy(logits), logits.shape[-1])
        if outcome is not None:
            return outcome
    logits = logits.to(tree.tokens.device)
    inside = replace(tree.with_safe_parents(), tokens=tree.tokens.clamp(0, logits.shape[-1] - 1))  # faults are reported, not read
    failures: Failures = {}
    scores = sampler.scores(logits, inside, failures=failures)
    sound = brief and not failures and finite(scores, logits, sampler)
    if sound and (sampler.greedy or type(rule) is Match):
        with one_thread(scores):
            if sampler.noise is None:
                choices: Greedy | Keyed = Greedy(scores)
            else:
                choices = Keyed(sampler.distribution(scores), sampler.noise, inside)
            outcome = on_host(tree, choices, logits.shape[-1])
        if outcome is not None:
            return outcome
    uses_q = rule.needs_q and not sampler.greedy
    with one_thread(scores):
        verdict, best = verify(rule, inside, scores, sampler)
        if uses_q and tree.q is not None and verdict.wrong_q is None:
            verdict = replace(verdict, wrong_q=inside.wrong_q.any(1))
        if sound and (verdict.wrong_q is None or not bool(verdict.wrong_q.any())):
            last = verdict.accepted if tree.chain else verdict.path.gather(1, verdict.accepted[:, None])[:, 0]
            outcome = outcome_of(tree, HostRows.of(tree), Ends(last.tolist(), verdict.next_token.tolist()), logits.shape[-1])
            if outcome is not None:
                return outcome
        best = scores.amax(-1) if best is None else best
        best = torch.stack([logits.amax(-1).to(best.dtype), best], -1)
        rows = to_host(tree, inside, verdict, best)
        logprobs = None if top is None else log_probabilities(inside, verdict.path, verdict.accepted, verdict.next_token, logits, top)
    if failures:
        rows = [with_failures(line, index, failures) for index, line in enumerate(rows)]
    values = {"scores": scores, "logits": logits}
    vectors = {name: values[name].float().gather(1, verdict.path[..., None].expand(-1, -1, logits.shape[-1])) for name in record}
    path = None if tree.chain else verdict.path
    ends = {row: rows[row].accepted if tree.chain else rows[row].path[rows[row].accepted] for row in traced}
    values_by_row = {row: values_of(inside, row, torch.softmax(scores[row], -1), end, rows[row].bonus) for row, end in ends.items()}
    return Outcome(rows, path, vectors, logprobs, values_by_row)


def finite(scores: Tensor, logits: Tensor, sampler: Sampler) -> bool:
    """At every node a token can be chosen: the largest score is finite, raw and processed. Warpers keep NaN and infinity, so after them the
    raw scores need no look."""
    warped = all(pipeline.warping is not None for pipeline in sampler.pipelines)
    with one_thread(scores):
        return all(bool(each.amax(-1).isfinite().all()) for each in ([scores] if warped else [scores, logits]))


def on_host(tree: TokenTree, choices: Greedy | Keyed, vocab_size: int) -> Outcome | None:
    """Where the target's ``choices`` end, on a CPU: comparing a few integers is quicker here than two dozen tensor calls.

    None for what takes a closer look: a token outside the vocabulary, and a score that counts and is not finite.
    """
    rows = HostRows.of(tree)
    ends = match_on_host(rows, choices)
    return None if ends is None else outcome_of(tree, rows, ends, vocab_size)


def outcome_of(tree: TokenTree, rows: HostRows, ends: Ends, vocab_size: int) -> Outcome | None:
    """What the walks through ``rows``, which are those of ``tree``, came to; None if a branching tree holds a token outside the
    vocabulary."""
    outcomes, paths, longest = [], [], tree.height + 1
    faults = [0] * longest
    for row, (end, bonus, drafts) in enumerate(zip(ends.nodes, ends.next_tokens, rows.tokens)):
        valid = None if rows.valid is None else rows.valid[row]
        proposed = drafts if valid is None else [token for token, real in zip(drafts, valid) if real]
        outside = min(proposed) < 0 or max(proposed) >= vocab_size
        if tree.chain:
            outcomes.append(RowOutcome(end, bonus, [1] * (len(proposed) - 1), outside, drafts, faults))
            continue
        if outside:
            return None
        assert tree.parent_lists is not None and tree.depth_lists is not None
        counts = [0] * longest
        for node, depth in enumerate(tree.depth_lists[row]):
            counts[depth] += valid is None or valid[node]
        path = [end]
        while path[-1]:
            path.append(tree.parent_lists[row][path[-1]])
        accepted = len(path) - 1
        path = path[::-1] + [tree.nodes - 1] * (longest - len(path))
        paths.append(path)
        outcomes.append(RowOutcome(accepted, bonus, counts[1:], False, [drafts[node] for node in path], faults, path=path))
    return Outcome(outcomes, None if tree.chain else torch.tensor(paths))


def verify(rule: Rule, tree: TokenTree, scores: Tensor, sampler: Sampler) -> tuple[Verdict, Tensor | None]:
    """The verdict, and ``[R, N]`` the largest score of each node, where it is known without another look."""
    if sampler.greedy:
        choices = Greedy(scores)
        return match(tree, choices), choices.best
    assert sampler.noise is not None
    return rule.verify(tree, sampler.distribution(scores), sampler.noise), None


def to_host(tree: TokenTree, inside: TokenTree, verdict: Verdict, best: Tensor) -> list[RowOutcome]:
    """``verdict`` on ``inside``, which is ``tree`` made safe, with the largest raw and processed scores ``best`` ``[R, N, 2]``; these
    tell NaN, infinity and empty support."""
    tokens = tree.tokens
    outside = tokens != inside.tokens
    if tree.valid is not None:
        outside = outside & tree.valid
    broken = tree.malformed
    if verdict.wrong_q is not None:
        broken = broken | verdict.wrong_q
    raw, processed = best.unbind(-1)
    over = processed.isnan() | (processed == float("inf"))
    faults = raw.isnan() * NAN + raw.isinf() * INFINITE + processed.isneginf() * EMPTY + over * OVERFLOW  # [R, N]
    if not tree.chain:
        tokens, faults = tokens.gather(1, verdict.path), faults.gather(1, verdict.path)
    columns = [levels(inside), tokens, faults] if tree.chain else [levels(inside), tokens, faults, verdict.path]
    head = torch.stack([verdict.accepted, verdict.next_token, outside.any(1), broken], 1)
    depth, below = tokens.shape[1], 1 if tree.chain else inside.height
    return [
        RowOutcome(
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


def with_failures(line: RowOutcome, row: int, failures: Failures) -> RowOutcome:
    path = line.path or range(len(line.tokens))
    return replace(line, failures={depth: failures[row, node] for depth, node in enumerate(path) if (row, node) in failures})


def levels(tree: TokenTree) -> Tensor:
    """``[R, height]`` drafted nodes at each depth from 1 on; of chains, whose levels hold one at most, ``[R, 1]`` how many there are."""
    if tree.chain:
        return tree.drafted[:, None]
    counts = torch.zeros(tree.rows, tree.height + 1, dtype=torch.long, device=tree.tokens.device)
    real = torch.ones_like(tree.tokens) if tree.valid is None else tree.valid.long()
    return counts.scatter_add(1, tree.depths, real)[:, 1:]
