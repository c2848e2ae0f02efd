"""The log-probabilities themselves: are they possible, does the token agree with its alternatives, is greedy the likeliest?"""

from __future__ import annotations

import math
from dataclasses import replace

from foredraft.auditing.server.answers import Token
from foredraft.auditing.server.comparing import described
from foredraft.auditing.server.contents import verdict
from foredraft.auditing.server.plan import NotAskedError, Plan
from foredraft.auditing.server.report import Check

NEVER = -30.0  # nats: a vocabulary of a million tokens as unlikely as this would show one in ten million tokens
ROUNDING = 1e-4  # nats, of what JSON and float32 do to a number
OVER = 1e-3  # that probabilities may sum to above 1


def sane(plan: Plan) -> Check:
    """What no distribution could give."""
    tokens = [(answer, token) for answer in plan.client.seen for token in answer.tokens or ()]
    if not tokens:
        raise NotAskedError("the server gives no log-probabilities")
    most = max(len(token.top) for _, token in tokens)
    off = [
        f"{described(answer)}, token {token.text!r}: {problem}"
        for answer, token in tokens
        if (problem := impossible(token, most) or (unlikely(token) if answer.request.temperature == 1 else None))
    ]
    fine = f"{len(tokens):,} tokens, each with up to {most} alternatives, none impossible"
    return replace(verdict("log-probabilities are possible", off, len(tokens), fine, what="tokens"), power="" if most else BLIND)


BLIND = "without alternatives, a log-probability of 0 that is wrong cannot be told from a right one"


def impossible(token: Token, most: int) -> str | None:
    """What is wrong with a token's numbers; other tokens have up to ``most`` alternatives."""
    value, top = token.logprob, token.top
    if math.isnan(value) or value > ROUNDING:
        return f"log-probability {value}"
    if value == 0 and len(top) <= 1 < most:
        return "log-probability 0 and no alternatives, which other tokens have"
    if (total := math.fsum(math.exp(min(each.logprob, 1.0)) for each in top)) > 1 + OVER:
        return f"the probabilities of the alternatives sum to {total:.3g}"
    if token.key is None or not top:
        return None
    own = next((each.logprob for each in top if each.key == token.key), None)
    if own is None and len(top) == most and all(each.key is not None for each in top) and value > top[-1].logprob + ROUNDING:
        return f"log-probability {value:.4g}, but it is not among the alternatives, of which the last has {top[-1].logprob:.4g}"
    if own is not None and not abs(own - value) <= ROUNDING:
        return f"log-probability {value:.4g}, but {own:.4g} among the alternatives"
    return None


def unlikely(token: Token) -> str | None:
    return f"sampled with log-probability {token.logprob:.4g}" if token.logprob < NEVER else None


def greedy(plan: Plan) -> Check:
    """At temperature 0, each token is the likeliest by the server's own numbers."""
    asked = [answer for answer in plan.client.seen if answer.request.temperature == 0]
    tokens = [(answer, token) for answer in asked for token in answer.tokens or () if token.top]
    if not tokens:
        raise NotAskedError("the server gives no alternatives")
    off = [
        f"{described(answer)}: {token.text!r} has {token.logprob:.4g}, {token.top[0].text!r} {token.top[0].logprob:.4g}"
        for answer, token in tokens
        if token.logprob < token.top[0].logprob - ROUNDING
    ]
    fine = f"{len(tokens):,} tokens are the likeliest of their alternatives"
    return verdict("greedy takes the likeliest token", off, len(tokens), fine, what="tokens")
