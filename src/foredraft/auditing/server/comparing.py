"""Two answers to the same request: where do they differ, and how far are their log-probabilities apart?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from foredraft.auditing.server.answers import Answer

AROUND = 12  # characters shown where texts part


def difference(wanted: Answer, found: Answer) -> str | None:
    """What differs in text, end and tokens; None if nothing does."""
    if wanted.text != found.text:
        place = next(
            (index for index, pair in enumerate(zip(wanted.text, found.text)) if pair[0] != pair[1]),
            min(len(wanted.text), len(found.text)),
        )
        here, there = (text[place : place + AROUND] for text in (wanted.text, found.text))
        return f"{described(wanted)}: at character {place}, {there!r} instead of {here!r}"
    if wanted.finish != found.finish:
        return f"{described(wanted)}: finish_reason {found.finish!r} instead of {wanted.finish!r}"
    if wanted.tokens is not None and found.tokens is not None and names(wanted) != names(found):
        return f"{described(wanted)}: the same text in other tokens"
    return None


def differences(wanted: Sequence[Answer], found: Sequence[Answer]) -> list[str]:
    return [each for pair in zip(wanted, found) if (each := difference(*pair)) is not None]


def described(answer: Answer) -> str:
    request = answer.request
    first = request.prompt.strip().partition("\n")[0][:24]
    return f"{first!r}, " + ("greedy" if request.temperature == 0 else f"seed {request.seed}")


def names(answer: Answer) -> list[str]:
    return [token.text for token in answer.tokens or ()]


def distance(wanted: Answer, found: Answer) -> float:
    """The largest difference between log-probabilities of the same tokens, as far as the texts agree; 0 if there are none."""
    worst = 0.0
    for ours, theirs in zip(wanted.tokens or (), found.tokens or ()):
        others = {each.key: each.logprob for each in theirs.top if each.key is not None}
        pairs = [(each.logprob, others[each.key]) for each in ours.top if each.key in others]
        if ours.text == theirs.text:
            pairs.append((ours.logprob, theirs.logprob))
        worst = max([worst, *(gap(*pair) for pair in pairs)])
        if ours.text != theirs.text:
            break
    return worst


def gap(first: float, second: float) -> float:
    """Infinite where only one of them is a number."""
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    return abs(first - second) if math.isfinite(first - second) else math.inf


def alike(found: Iterable[Answer]) -> tuple[list[tuple[Answer, Answer]], float]:
    """Pairs that have the same text, and the chance that so likely texts agree (at most: Σ over pairs of P(text)); NaN if unknown.

    Under independent draws, P(second = first | first) = P(first).
    """
    answers = list(found)
    pairs = [(one, other) for index, one in enumerate(answers) for other in answers[:index] if one.text == other.text]
    possible = len(answers) * (len(answers) - 1) / 2
    if not pairs:
        return pairs, 1.0
    chances = [math.exp(min(0.0, one.logprob)) if one.tokens is not None else math.nan for one, _ in pairs]
    return pairs, min(1.0, possible * min(chances)) if not any(map(math.isnan, chances)) else math.nan
