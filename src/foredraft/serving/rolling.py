"""One round, many times over the same text, with everything that decided it on record.

A roll is a real round of a :class:`~foredraft.session.Session` whose rule writes down what it was given and what it drew. The rows differ
in their seeds alone, and the last token of the text is the root of every row's tree. Nothing here is estimated: p and q are those that the
rule saw, and the coins are those that it threw.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import inf, pi

import torch
from torch import Tensor

from foredraft.drafters.base import Drafter
from foredraft.logits.noise import Noise, Randomness
from foredraft.logits.processors import Pipeline
from foredraft.planning import FixedPlanner
from foredraft.rows import RowParameters
from foredraft.serving.landing import RecordedNoise, landing
from foredraft.session import Session
from foredraft.shapes import TreeShape
from foredraft.target import Target
from foredraft.traces import RoundTrace, trace_of, values_of
from foredraft.tree import DRAWN, Proposal, TokenTree
from foredraft.verification import Rule, Verdict
from foredraft.verification.rejection import Rejection
from foredraft.verification.typical import Typical

TOGETHER, VALUES = 64, 1 << 24  # most rows in one pass, and most probabilities
FEW = 4  # rows of the first batch, which shows what a batch takes
LIKELIEST = 6  # tokens shown of a distribution
FIRST = 12  # of the target's likeliest first tokens that are always counted


class Recorded(Rule):
    """``rule``, which writes down the trees, the probabilities and the draws of the round."""

    tree: TokenTree
    p: Tensor
    verdict: Verdict
    noise: RecordedNoise

    def __init__(self, rule: Rule, *, needs_q: bool):
        self.rule = rule
        names = ("name", "proposals", "chains_only", "lossless")
        vars(self).update({name: getattr(rule, name) for name in names}, needs_q=needs_q)  # so that there is a q to show under every rule

    def verify(self, tree: TokenTree, p: Tensor, noise: Randomness) -> Verdict:
        assert isinstance(noise, Noise)
        self.tree, self.p, self.noise = tree, p, RecordedNoise(noise)
        self.verdict = self.rule.verify(tree, p, self.noise)
        return self.verdict


@dataclass(frozen=True)
class Likely:
    """A token, its probability before and after something, and the draft's; ``q`` None where there is none."""

    token: int
    p: float
    q: float | None = None
    weight: float | None = None


@dataclass(frozen=True)
class Coin:
    """A drafted token was tried: it is kept if ``coin``, uniform between 0 and 1, lies below ``probability``."""

    node: int
    probability: float
    coin: float


@dataclass(frozen=True)
class Roll(RoundTrace):
    """One round in full.

    Attributes:
        coins: that were thrown, in order.
        thresholds: per node, what p must exceed under the rule ``typical``; else None.
        residual: what the bonus token was drawn from where that is not p: its likeliest tokens, with ``weight``. Else None.
    """

    coins: list[Coin]
    thresholds: list[float | None] | None
    residual: list[Likely] | None


@dataclass
class Tally:
    """What many rolls came to.

    Attributes:
        landed: ``landed[k]`` rolls kept k drafted tokens.
        expected: how many were to be expected to, given what was drafted; None where nobody can say.
        first: the first token of each roll: how often it came, beside p; the likeliest ones are always in it.
        distance: total variation between the frequencies of first tokens and p.
        chance: the distance that so many draws from p have on average, about, those before ``first`` counted as well.
        spread: its standard deviation at most.
    """

    landed: list[int]
    expected: list[float] | None
    first: dict[int, int]
    p: dict[int, float]
    distance: float
    chance: float
    spread: float


@dataclass
class Rounds:
    """The rolls that were made: the first in full, and what all of them came to."""

    proposal: Proposal
    root: int
    roll: Roll
    tally: Tally


def play(
    target: Target,
    drafter: Drafter,
    rule: Rule,
    proposal: Proposal,
    shape: TreeShape,
    ids: Sequence[int],
    *,
    pipeline: Pipeline,
    seed: int,
    first: int,
    rolls: int,
    isolation: str | None,
    seconds: float = inf,
) -> Rounds:
    """Rolls ``first`` to ``first + rolls`` of ``seed`` after ``ids``, two tokens at least. No row of another session is live.
    They are made in batches, first of few; none is begun that would probably take until after ``seconds``."""
    recorded = Recorded(rule, needs_q=rule.needs_q or proposal in DRAWN)
    parameters = RowParameters(shape.depth + 2, do_sample=True, pipeline=pipeline, isolation=isolation)
    together = max(1, min(TOGETHER, VALUES // ((shape.nodes + drafter.info.extra_nodes + 1) * target.vocab_size)))
    counts, firsts, expected, shown, p = [0] * (shape.depth + 1), dict[int, int](), list[Tensor | None](), None, None
    done, size, took = 0, min(FEW, together), 0.0
    end = time.monotonic() + seconds
    while not done or (done < rolls and time.monotonic() + took < end):
        began = time.monotonic()
        with closing(Session(target, drafter, recorded, proposal=proposal, planner=FixedPlanner(shape), wait=True)) as session:
            for index in range(first + done, first + min(rolls, done + size)):
                session.add(ids[:-1], replace(parameters, seed=(seed, index)))
                session.waiting[-1].ids.append(ids[-1])  # as a row that was set aside: its last token is the root of its next tree
            session.step()
        tree, verdict = recorded.tree, recorded.verdict
        if shown is None:
            shown, p = roll_of(recorded, shape=str(shape), drafter=drafter.name), recorded.p[0, 0].clone()
        expected.append(landing(recorded.rule, tree, recorded.p, verdict, noise=recorded.noise, depth=shape.depth))
        for row, (accepted, bonus) in enumerate(zip(verdict.accepted.tolist(), verdict.next_token.tolist())):
            counts[accepted] += 1
            token = int(tree.tokens[row, verdict.path[row, 1]]) if accepted else bonus
            firsts[token] = firsts.get(token, 0) + 1
        done += tree.rows
        took = 2 * (time.monotonic() - began)
        size = min(2 * size, together)
    assert shown is not None and p is not None
    known = [chances for chances in expected if chances is not None]
    wanted = torch.cat(known).sum(0).tolist() if len(known) == len(expected) else None
    return Rounds(proposal, ids[-1], shown, tally_of(counts, firsts, p, wanted, draws=first + done))


def tally_of(landed: list[int], counts: dict[int, int], p: Tensor, expected: list[float] | None, *, draws: int) -> Tally:
    """``p`` ``[V]``, and how often each token came first."""
    rolls = sum(landed)
    tokens = dict.fromkeys([*p.topk(min(FIRST, int((p > 0).sum()))).indices.tolist(), *counts])
    known = {token: float(p[token]) for token in tokens}
    distance = 1 - sum(min(count / rolls, known[token]) for token, count in counts.items())
    return Tally(landed, expected, {token: counts.get(token, 0) for token in tokens}, known, max(0.0, distance), *chance_distance(p, draws))


def chance_distance(p: Tensor, draws: int) -> tuple[float, float]:
    """About the mean total variation between p ``[V]`` and the frequencies of so many draws from it: half the sum of the mean deviations,
    by the normal law where a token is expected often, and at most 2 p where it hardly ever comes. And its standard deviation at most, by
    the inequality of Efron and Stein: one draw more or less moves it by 1 / draws, unless it is the same token."""
    mean = torch.minimum(2 * p, (2 * p * (1 - p) / (pi * draws)).sqrt()).sum() / 2
    return float(mean), float(((1 - (p * p).sum()).clamp(min=0) / (2 * draws)).sqrt())


def roll_of(recorded: Recorded, *, shape: str, drafter: str) -> Roll:
    """The round of the first row as lists."""
    tree, p, verdict, noise = recorded.tree, recorded.p, recorded.verdict, recorded.noise
    path = verdict.path[0].tolist()[: int(verdict.accepted[0]) + 1]
    bonus, last = int(verdict.next_token[0]), path[-1]
    values = values_of(tree, 0, p[0], last, bonus)
    trace = trace_of(values, path, bonus, shape=shape, drafter=drafter, kept=len(path), finish_reason=None)
    nodes = [node for node, real in enumerate(values.real) if real]
    coins = coins_of(recorded, 0, {node: index for index, node in enumerate(nodes)})
    thresholds = recorded.rule.threshold(tree, p)[0].tolist() if isinstance(recorded.rule, Typical) else None
    weights = None if noise.weights is None else noise.weights[0]
    return Roll(
        **vars(trace),
        coins=[coin for coin in coins if coin.node],
        thresholds=None if thresholds is None else [None, *(thresholds[values.parents[node]] for node in nodes[1:])],
        residual=None if weights is None or same(weights, p[0, last]) else residual_of(weights, p[0, last], tree.q, 0, last, bonus),
    )


def same(weights: Tensor, p: Tensor) -> bool:
    return bool(torch.allclose(weights / weights.sum(), p, atol=1e-6))


def residual_of(weights: Tensor, p: Tensor, q: Tensor | None, row: int, node: int, bonus: int) -> list[Likely]:
    """The likeliest tokens by ``weights`` ``[V]``, the one drawn among them."""
    shares = weights / weights.sum()
    tokens = shares.topk(min(LIKELIEST, int((shares > 0).sum()))).indices.tolist()
    tokens += [] if bonus in tokens else [bonus]
    of = None if q is None or node >= q.shape[1] else q[row, node]
    return [Likely(token, float(p[token]), None if of is None else float(of[token]), float(shares[token])) for token in tokens]


def coins_of(recorded: Recorded, row: int, number: dict[int, int]) -> list[Coin]:
    """The coins that decided about ``row``. Rules for chains only number them from the first drafted token on, others by node."""
    noise = recorded.noise
    found, over = [], False
    for node, probability, coin in noise.coins:
        begin = (int(node[row]) if isinstance(node, Tensor) else node) + recorded.rule.chains_only
        for offset, (chance, toss) in enumerate(zip(probability[row].tolist(), coin[row].tolist())):
            tried = chance > 0 or isinstance(recorded.rule, Rejection)  # elsewhere 0 marks what was not looked at
            if begin + offset in number and tried and not over:
                found.append(Coin(number[begin + offset], min(chance, 1.0), toss))
                over = isinstance(recorded.rule, Rejection) and toss >= chance  # what is drafted below is not looked at
    return found
