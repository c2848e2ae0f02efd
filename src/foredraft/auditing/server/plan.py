"""What all checks share: the client, what the server takes, and the requests that are repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foredraft.auditing.server.abilities import Abilities
from foredraft.auditing.server.answers import Answer, Request
from foredraft.auditing.server.client import Client, ServerError
from foredraft.auditing.server.report import Check

PROMPTS, SEEDS = 4, 2  # of the requests that are repeated
SHOWN = 5  # differences that a report has


class NotAskedError(Exception):
    """A check cannot be made; says why."""


@dataclass
class Plan:
    """Attributes:
    alone: the answers to :meth:`requests`, each asked alone.
    steady: for each of these, whether it was the same a second time.
    loaded: answers alone, and to the same requests under load.
    """

    client: Client
    abilities: Abilities
    prompts: Sequence[str]
    seed: int
    max_tokens: int
    alone: list[Answer] = field(default_factory=list)
    steady: list[bool] = field(default_factory=list)
    loaded: list[tuple[Answer, Answer]] = field(default_factory=list)

    def request(self, prompt: str, seed: int | None, **more: Any) -> Request:
        """One that samples from the model's own distribution, with log-probabilities if there are any."""
        own = {"max_tokens": self.max_tokens, "logprobs": self.abilities.logprobs, "extra": self.abilities.neutral, **more}
        return Request(prompt, seed, **own)

    def requests(self) -> list[Request]:
        """Each prompt with two seeds, and greedily."""
        prompts = self.prompts[:PROMPTS]
        sampled = [self.request(prompt, self.seed + number) for prompt in prompts for number in range(SEEDS)]
        return sampled + [self.request(prompt, self.seed, temperature=0.0) for prompt in prompts]

    def repeated(self, **changes: Any) -> tuple[list[Answer], list[Request]]:
        """The answers that were the same twice, and requests that should get the same, which differ in ``changes``.

        Raises:
            NotAskedError: there are none.
        """
        wanted = [answer for answer, steady in zip(self.alone, self.steady) if steady]
        if not wanted:
            raise NotAskedError("no request got the same answer twice, so there is nothing to compare with")
        return wanted, [replace(answer.request, **changes) for answer in wanted]


def run(check: Callable[[Plan], Check], plan: Plan, name: str, **known: Any) -> Check:
    """``check`` with the number of requests that it took; what cannot be asked is said."""
    before = plan.client.requests
    try:
        found = check(plan)
    except (NotAskedError, ServerError) as error:
        found = Check(name, "not asked", str(error), **known)
    return replace(found, requests=plan.client.requests - before)
