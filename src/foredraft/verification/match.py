"""The match rule: the target chooses its own token at every node; a drafted token survives iff it is that choice.

Greedy decoding takes the likeliest token. Sampling takes y = argmin_v E[position, v] / p(v) with keyed noise E ~ Exp(1): y has the
distribution p and is emitted whatever was drafted, so the output distribution is the target's for any proposal that does not
depend on the verifier's noise. For proposals that share the noise (``keyed``) the text is a function of the seed alone (Daliri et
al. 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding").

Conditions: none on how nodes were chosen, dropped or merged, as long as the verifier's noise had no part in it other than
through ``keyed``. Expected acceptance: children whose tokens make up the set S let a node go on with probability p(S), which no
rule betters where S is deterministic. A keyed child does with sum_j 1 / sum_i max(p_i / p_j, q_i / q_j), j over the common
support, at least (1 - TV) / (1 + TV); an independent draw from q only with sum_x p(x) q(x).

The rule is :func:`match`: it takes the target's choices, :class:`Greedy` or :class:`Keyed`, and follows them down the tree. On a CPU,
where nothing waits for a device, :func:`match_on_host` makes choices only at nodes that the walk reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import cast

import torch
from torch import Tensor

from foredraft.logits.noise import ALONE, Randomness, argmax
from foredraft.logits.sampler import widened
from foredraft.tree import TokenTree
from foredraft.verification.base import Rule, Verdict, path_to, walk
from foredraft.verification.host_trees import HostRows

kernels: dict[torch.dtype, Callable[[Tensor, Sequence[tuple[int, int]]], list[int]]] = {}
"""Once kernels are loaded, :func:`foredraft.backends.native.choices` by these, by the dtype of scores. None are compiled for this alone."""
Level = Sequence[Sequence[int]]
"""Per row, the nodes at one depth that the target's choices lead to; none where its walk has ended."""


class Match(Rule):
    name = "match"
    summary = "accepts what the target itself chooses, greedily or with keyed noise; exact for every draft"
    proposals = ("keyed", "mixed", "deterministic", "without-replacement", "iid")

    def verify(self, tree: TokenTree, p: Tensor, noise: Randomness) -> Verdict:
        return match(tree, Keyed(p, noise, tree))


def by_numpy(scores: Tensor, nodes: Sequence[tuple[int, int]]) -> list[int]:
    """As :func:`foredraft.backends.native.choices`."""
    found = []
    for node in nodes:
        values = widened(scores[node]).numpy()  # NumPy has no bfloat16
        token = int(values.argmax())
        found.append(token if isfinite(values.item(token)) else -1)  # an argmax finds NaN, +inf, and -inf where there is nothing else
    return found


@dataclass(frozen=True, eq=False)
class Greedy:
    """The likeliest token at every node, by ``scores`` ``[R, N, V]``: logits, or what processors made of them."""

    scores: Tensor
    one_by_one: bool = False

    @cached_property
    def tokens(self) -> Tensor:
        return argmax(self.scores)

    @property
    def best(self) -> Tensor:
        """``[R, N]`` the score of each choice."""
        return self.scores.gather(-1, self.tokens[..., None])[..., 0]

    def at(self, level: Level, depth: int) -> list[list[int]] | None:
        choose = kernels.get(self.scores.dtype, by_numpy)
        found = choose(self.scores, [(row, node) for row, nodes in enumerate(level) for node in nodes])
        tokens = iter(found)
        return None if min(found) < 0 else [[next(tokens) for _ in nodes] for nodes in level]


@dataclass(frozen=True, eq=False)
class Keyed:
    """The winner of the race of ``p`` ``[R, N, V]`` with ``noise``, at the nodes of ``tree``.

    Over a large vocabulary on a CPU a race costs more than looking whether the next one is needed.
    """

    p: Tensor
    noise: Randomness
    tree: TokenTree

    @property
    def one_by_one(self) -> bool:
        return self.p.device.type == "cpu" and self.p.shape[-1] >= ALONE

    @property
    def tokens(self) -> Tensor:
        return self.noise.race(self.p, self.tree.depths)

    @cached_property
    def _told(self) -> list[list[int]]:
        return cast("list[list[int]]", self.tokens.tolist())

    def at(self, level: Level, depth: int) -> list[list[int]]:
        """Nodes of one level that the walk reaches hold the same text, so the first of them decides for all."""
        if not self.one_by_one:
            return [[told[node] for node in nodes] for told, nodes in zip(self._told, level)]
        first = [nodes[0] if nodes else -1 for nodes in level]
        reached = {node for node in first if node >= 0}
        p = self.p[:, reached.pop()] if len(reached) == 1 else self.p[torch.arange(len(first)), torch.tensor(first).clamp(min=0)]
        tokens = self.noise.race(p[:, None], torch.full((len(first), 1), depth))[:, 0].tolist()
        return [[token] * len(nodes) for token, nodes in zip(tokens, level)]


def match(tree: TokenTree, choices: Greedy | Keyed) -> Verdict:
    """Follow the target's ``choices`` from the root of every row, as far as they were drafted."""
    if not choices.one_by_one:
        return follow(tree, choices.tokens)
    ends = match_on_host(HostRows.of(tree), choices)
    assert ends is not None, "races have no scores that are not finite"
    last = torch.tensor(ends.nodes)
    path, accepted = (tree.depths, last) if tree.chain else path_to(tree, last)
    return Verdict(path, accepted, torch.tensor(ends.next_tokens))


@dataclass(frozen=True)
class Ends:
    """Where the walks through the rows' trees ended: the last node kept, and the target's token that follows it."""

    nodes: list[int]
    next_tokens: list[int]


def match_on_host(rows: HostRows, choices: Greedy | Keyed) -> Ends | None:
    """The walk of :func:`follow`, level by level in lists, without a choice at any node that it does not reach. None if a score that
    counts is not finite."""
    count = len(rows.tokens)
    level: list[list[int]] = [[0]] * count
    last, following, depth = [0] * count, [0] * count, 0
    while any(level):
        chosen = choices.at(level, depth)
        if chosen is None:
            return None
        for row, (nodes, wanted) in enumerate(zip(level, chosen)):
            if not nodes:
                continue
            tokens, children, below = rows.tokens[row], rows.children[row], []
            last[row], following[row] = nodes[0], wanted[0]
            for node, token in zip(nodes, wanted):
                for child in children[node]:
                    if tokens[child] == token and (rows.valid is None or rows.valid[row][child]):
                        below.append(child)
            if len(below) > 1:
                below.sort()  # of several at one depth the first one counts
            level[row] = below
        depth += 1
    return Ends(last, following)


def follow(tree: TokenTree, choices: Tensor) -> Verdict:
    """Walk from the root along the drafted tokens that equal the target's ``choices`` ``[R, N]``, on any device without waiting."""
    chosen = choices.roll(1, 1) if tree.chain else choices.gather(1, tree.parents.clamp(min=0))
    verdict = walk(tree, tree.tokens == chosen)
    last = verdict.accepted[:, None] if tree.chain else verdict.path.gather(1, verdict.accepted[:, None])
    return Verdict(verdict.path, verdict.accepted, choices.gather(1, last)[:, 0])
