"""The same request gets the same bytes: again, under load, streamed, with and without speculation. Other seeds get other texts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from foredraft.auditing.server.answers import Answer, Request
from foredraft.auditing.server.comparing import alike, differences, distance
from foredraft.auditing.server.plan import SHOWN, NotAskedError, Plan
from foredraft.auditing.server.report import Check

ROUNDS = 3  # under load
OTHERS = 8  # requests beside, in each round
LONGEST = 96  # tokens of these
DRAWS = 8  # seeds that are compared
CHANCE = 1e-6  # texts that agree with a smaller one are a fault
TOLERANCE = 0.5  # nats between two log-probabilities of a token, which no rounding explains


def again(plan: Plan) -> Check:
    """Each request alone, twice; the first answers are what the other checks compare with."""
    plan.alone = plan.client.in_turn(plan.requests())
    second = plan.client.in_turn(plan.requests())
    plan.steady = [not differences([one], [other]) for one, other in zip(plan.alone, second)]
    return compared("the same request again", plan.alone, second, reproducibility=True)


def streamed(plan: Plan) -> Check:
    wanted, requests = plan.repeated(stream=True)
    found = plan.client.in_turn(requests)
    check = compared("streamed or not", wanted, found)
    pieces = sum(len(answer.pieces) for answer in found)
    return replace(check, found=f"{check.found}; {pieces} pieces") if check.status == "ok" else check


def without_logprobs(plan: Plan) -> Check:
    if plan.abilities.logprobs is None:
        raise NotAskedError("the server gives no log-probabilities at all")
    wanted, requests = plan.repeated(logprobs=None)
    return compared("with log-probabilities or not", wanted, plan.client.in_turn(requests), reproducibility=True)


def speculation(plan: Plan) -> Check:
    """The field ``speculation``: off, and a drafted token per round."""
    if not plan.abilities.speculation:
        raise NotAskedError("the server does not take the field speculation")
    if not plan.abilities.strict:
        raise NotAskedError("the server takes unknown fields, so it may ignore speculation; audit it once with a draft and once without")
    wanted, requests = plan.repeated()
    found = []
    for value in ("off", {"max_draft": 1}):
        found += plan.client.in_turn(replace(each, extra={**each.extra, "speculation": value}) for each in requests)
    return compared("speculation on and off", wanted * 2, found, reproducibility=True)


def under_load(plan: Plan) -> Check:
    """Beside other requests of many lengths."""
    generator = random.Random(plan.seed)
    for number in range(ROUNDS):
        ours, requests = plan.repeated(stream=number % 2 == 1)
        mixed = [*enumerate(requests), *((-1, other(plan, generator)) for _ in range(OTHERS))]
        generator.shuffle(mixed)
        answers = plan.client.together([request for _, request in mixed])
        plan.loaded += [(ours[index], answer) for (index, _), answer in zip(mixed, answers) if index >= 0]
    check = compared("the same request under load", *map(list, zip(*plan.loaded)), reproducibility=True)
    return replace(check, found=f"{check.found}, beside other requests, {plan.client.at_once} at once")


def other(plan: Plan, generator: random.Random) -> Request:
    """A request that is only there to be beside the others."""
    length, seed = generator.randint(1, LONGEST), generator.randrange(1 << 31)
    return replace(
        plan.request(generator.choice(plan.prompts), seed, max_tokens=length),
        temperature=generator.choice((0.0, 0.7, 1.0)),
        stream=generator.random() < 0.5,
    )


def probabilities(plan: Plan) -> Check:
    """Log-probabilities under load against those alone."""
    name, pairs = "log-probabilities under load", [(one, other) for one, other in plan.loaded if one.tokens and other.tokens]
    if not pairs:
        raise NotAskedError("no request with log-probabilities was answered both alone and under load")
    gaps = [distance(*pair) for pair in pairs]
    worst, changed = max(gaps), sum(each > 0 for each in gaps)
    fingerprints = {answer.fingerprint for _, answer in pairs} - {None}
    promised = bool(fingerprints) and not any(str(each).endswith("-approx") for each in fingerprints)
    if worst == 0:
        return Check(name, "ok", f"equal bit for bit in {len(gaps)} answers", caught(len(gaps), "changes the log-probabilities of"))
    off = f"{changed} of {len(gaps)} answers differ, by up to {worst:.2g} nats"
    if worst > TOLERANCE:
        return Check(name, "fault", f"{off}, more than rounding explains ({TOLERANCE})")
    if promised:
        why = f"{off}, and system_fingerprint {', '.join(sorted(map(str, fingerprints)))} does not end in -approx"
        return Check(name, "fault", why, reproducibility=True)
    return Check(name, "ok", f"{off}; that can be rounding, and the server promises nothing else", f"a fault above {TOLERANCE} nats")


def seeds(plan: Plan) -> Check:
    """Other seeds, and requests without one, get other texts."""
    prompt = least_sure(plan)
    given = [plan.request(prompt, plan.seed + 100 + number) for number in range(DRAWS)]
    without = [plan.request(prompt, None) for _ in range(DRAWS // 2)]
    return distinct("other seeds, other texts", plan.client.in_turn(given + without), "requests with other seeds, or with none")


def least_sure(plan: Plan) -> str:
    """The prompt after which a text was least likely: other draws are other texts there."""
    sampled = [answer for answer in plan.alone if answer.request.temperature > 0 and answer.tokens]
    return min(sampled, key=lambda answer: answer.logprob).request.prompt if sampled else plan.prompts[0]


def choices(plan: Plan) -> Check:
    """n > 1: the choices differ, and repeat."""
    name = "n choices"
    request = plan.request(least_sure(plan), plan.seed + 7, n=DRAWS // 2)
    first, second = plan.client.ask(request), plan.client.ask(request)
    check = distinct(name, first, f"choices of one request with n = {request.n}")
    if check.status == "fault":
        return check
    repeated = compared(name, first, second, reproducibility=True)
    return repeated if repeated.status == "fault" else replace(check, found=f"{check.found}; asked again, they are the same")


def distinct(name: str, found: Sequence[Answer], what: str) -> Check:
    """Texts that should be independent draws: equal ones are a fault, unless the model is that sure of the text."""
    pairs, chance = alike(found)
    texts = len({answer.text for answer in found})
    seen = f"{texts} texts from {len(found)} {what}"
    if not pairs:
        telling = sum(alike([*found, answer])[1] < CHANCE for answer in found)
        seldom = "a few equal texts would be no fault: they are too likely, or their probabilities are unknown"
        return Check(name, "ok", seen, caught(telling - 1, "repeats the text of another in") if telling > 1 else seldom)
    if math.isnan(chance):
        if texts > 1:
            return Check(name, "ok", f"{seen}; how likely equal texts are is unknown without log-probabilities")
        return Check(name, "fault", f"{seen} (or the model is sure of it: without log-probabilities, that is unknown)")
    if chance < CHANCE:
        return Check(name, "fault", f"{seen}; that equal ones are a coincidence has probability {chance:.1g}")
    return Check(name, "ok", f"{seen}; the equal ones are likely under the model", "seeds that are ignored do not show in texts so likely")


def compared(name: str, wanted: Sequence[Answer], found: Sequence[Answer], *, reproducibility: bool = False) -> Check:
    """Byte for byte."""
    off = differences(wanted, found)
    if off:
        seen = f"{len(off)} of {len(found)} answers differ"
        return Check(name, "fault", f"{seen}, the first with {off[0]}", reproducibility=reproducibility, differences=off[:SHOWN])
    return Check(name, "ok", f"{len(found)} answers are equal byte for byte", caught(len(found)), reproducibility=reproducibility)


def caught(count: int, what: str = "changes the text of") -> str:
    """Which share of answers would have shown among ``count``."""
    return f"a fault that {what} {1 - 0.1 ** (1 / count):.0%} of answers would have been found with probability 0.9"
