"""Sampled tokens against the log-probabilities that the server itself gave for them.

As in the audit's statistical part, E[f(y) | text] = Σ p(v) f(v) for every f that is fixed by the text before, so f(y) - Σ p f is a
martingale difference. Of p, the likeliest tokens are known; all others count as one. Which tokens are told apart must not depend on
the token drawn, or the sums are biased: servers add the drawn token to its alternatives, and some show several tokens alike.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from foredraft.auditing.features import LAGS, Features, only_best
from foredraft.auditing.server.answers import Answer, Token
from foredraft.auditing.server.plan import Plan
from foredraft.auditing.server.report import Samples
from foredraft.auditing.statistical import FRACTIONS
from foredraft.auditing.tally import Design, Tally
from foredraft.device import one_thread

FIRST = 1000  # of the seeds of the samples, after the plan's


class Known(Features):
    """Features of the likeliest tokens, and of all others as one."""

    @property
    def names(self) -> list[str]:
        plain = ["the likeliest token", "likely tokens", "tokens that are not listed", "tokens seen before", "one half of the vocabulary"]
        return [*plain, *(f"the likeliest token, {lag} after it" for lag in LAGS)]

    def directions(self, p: Tensor, q: Tensor | None) -> dict[str, Tensor]:
        """Among the tokens that are told apart; the probability of all others is the last of p, and stays."""
        listed, rest = p[:, :-1], p[:, -1:]
        likeliest, flat = only_best(listed) * (listed > 0), listed.sqrt()
        found = {
            "the likeliest token": likeliest * (1 - rest),
            "a higher temperature": flat / flat.sum(-1, keepdim=True).clamp(min=1e-9) * (1 - rest),
        }
        return {name: torch.cat([leak, 1 - leak.sum(-1, keepdim=True)], -1) for name, leak in found.items()}


@dataclass(frozen=True)
class Position:
    """A token and what was known before it: ``p`` of the tokens told apart, and last of all others; ``outcome``, which of them came;
    ``keys``, theirs."""

    p: list[float]
    keys: list[object]
    outcome: int


def check(plan: Plan, *, samples: int | None, significance: float, bias: float) -> Samples:
    """Draw ``samples`` answers, or as many as find ``bias``, and test their tokens."""
    begin = time.perf_counter()
    count, design = plan.abilities.logprobs or 0, Design(significance, bias)
    features = Known(count + 1, False, torch.device("cpu"))
    tally = Tally(features, plan.max_tokens, bias=bias, seed=plan.seed)
    wanted = samples or math.ceil(design.tokens(tally.tests) / plan.max_tokens)
    drawn, alternatives = 0, 0
    for look, fraction in enumerate(FRACTIONS):
        until = math.ceil(fraction * wanted)
        answers = draw(plan, drawn, until)
        drawn = until
        texts = [[position(token, count) for token in answer.tokens or ()] for answer in answers]
        alternatives = max([alternatives, *(len(each.keys) for text in texts for each in text)])
        with one_thread(tally.total):  # the tensors are small, and often a server beside keeps the other cores busy
            add(tally, texts, count + 1)
        statistics = tally.statistics()
        bound = design.bound(look, tally.tests)
        smallest = min((each.p_value for each in statistics), default=1.0)
        if smallest < bound:
            break
    return Samples(
        answers=drawn,
        tokens=tally.tokens,
        alternatives=alternatives,
        looks=look + 1,
        statistics=statistics,
        p_value=min(1.0, smallest * significance / bound),
        significance=significance,
        power=tally.power(bound),
        seconds=time.perf_counter() - begin,
    )


def draw(plan: Plan, first: int, until: int) -> list[Answer]:
    """The answers number ``first`` to ``until``, each with a seed of its own; tokens as ids where the server can write them so."""
    extra = {**plan.abilities.neutral, **({"return_tokens_as_token_ids": True} if plan.abilities.token_ids else {})}
    prompts = plan.prompts
    return plan.client.together(
        [plan.request(prompts[number % len(prompts)], plan.seed + FIRST + number, extra=extra) for number in range(first, until)]
    )


def position(token: Token, count: int) -> Position:
    """``token`` among the first three quarters of its ``count`` alternatives.

    What is shown like others counts as not listed, as does what is as likely as the first that is left out.
    """
    top = token.top
    edge = top[keep].logprob if len(top) > (keep := count - 1 - count // 4) else -math.inf
    kept = [each for each in top if each.logprob > edge and each.key is not None]
    p = [math.exp(each.logprob) for each in kept]
    rest = max(0.0, 1 - math.fsum(p))
    keys = [each.key for each in kept]
    return Position([*p, rest], keys, keys.index(token.key) if token.key in keys else len(keys))


def add(tally: Tally, texts: Sequence[Sequence[Position]], size: int) -> None:
    """Count all tokens of ``texts``, position by position; ``size`` outcomes at most at each."""
    history = torch.zeros(len(texts), tally.total.shape[0] + max(LAGS))  # how the first feature came out; the first columns stay 0
    seen: list[set[object]] = [set() for _ in texts]
    for place in range(tally.total.shape[0]):
        rows = [row for row, text in enumerate(texts) if len(text) > place]
        if not rows:
            return
        here = [texts[row][place] for row in rows]
        lags = torch.stack([history[rows, place + max(LAGS) - lag] for lag in LAGS], 1)
        p = torch.tensor([[*padded(each.p[:-1], size - 1), each.p[-1]] for each in here])
        values = features(p, here, [seen[row] for row in rows])
        values = torch.cat([values, values[:, :1] * lags[..., None]], 1)
        p = p / p.sum(-1, keepdim=True)
        outcomes = torch.tensor([each.outcome if each.outcome < len(each.keys) else size - 1 for each in here])
        came = tally.add(place, values, p, None, outcomes)
        history[rows, place + max(LAGS)] = came[:, 0]
        for row, each in zip(rows, here):
            if each.outcome < len(each.keys):
                seen[row].add(each.keys[each.outcome])


def features(p: Tensor, here: Sequence[Position], seen: Sequence[set[object]]) -> Tensor:
    """``[G, 5, V]``: see :class:`Known`. What is not listed is the last column of p ``[G, V]``."""
    size = p.shape[1] - 1
    listed, none = p[:, :-1], torch.zeros(len(p), 1)
    best = (listed == listed.amax(-1, keepdim=True)) & (listed > 0)
    likely = torch.where(listed > 0, 1 - (-listed.clamp(min=1e-12).log()).clamp(max=8) / 8, 0)
    before = torch.tensor([padded([float(key in known) for key in each.keys], size) for each, known in zip(here, seen)])
    halves = torch.tensor([padded([float(half(key)) for key in each.keys], size) for each in here])
    known = torch.stack([best.float(), likely, torch.zeros_like(listed), before, halves], 1)
    rest = torch.stack([none, none, none + 1, none, none], 1)
    return torch.cat([known, rest], -1)


def padded(values: Sequence[float], size: int) -> list[float]:
    return [*values, *[0.0] * (size - len(values))]


@lru_cache(maxsize=1 << 16)
def half(key: object) -> int:
    """0 for about every other token, without order, else 1."""
    return hashlib.blake2b(str(key).encode(), digest_size=1).digest()[0] & 1
