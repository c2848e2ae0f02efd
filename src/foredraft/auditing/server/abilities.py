"""What a server can be asked: found out with a few short requests before the checks begin."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foredraft.auditing.server.answers import Answer, Request
from foredraft.auditing.server.client import Client, ServerError
from foredraft.errors import ConfigurationError

ALTERNATIVES = (20, 5, 1, 0)  # at each token: the most that OpenAI's servers give, then less
NEUTRAL: dict[str, Any] = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # servers have defaults of their own for these
UNKNOWN = "no_server_has_this_field"
COUNTERS = ("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")


@dataclass(frozen=True)
class Abilities:
    """What a server takes.

    Attributes:
        logprobs: alternatives that it gives at each token; None if it gives no log-probabilities.
        neutral: fields that turn its own sampling filters off, of those that it takes.
        refused: fields of :data:`NEUTRAL` that it does not take.
        strict: it refuses unknown fields; otherwise taking one says nothing.
        speculation: it takes the field ``speculation``.
        token_ids: it can write tokens as ids, so that no two look alike.
    """

    logprobs: int | None
    neutral: Mapping[str, Any]
    refused: tuple[str, ...]
    strict: bool
    speculation: bool
    token_ids: bool


def find_model(client: Client, model: str | None) -> str:
    """``model``, or the first that the server has.

    Raises:
        ConfigurationError: nothing answers at the address, or it has no such model.
    """
    try:
        document = client.get("/v1/models").json()
        names = [each["id"] for each in document.get("data") or ()]
    except ServerError as error:
        if error.status in (401, 403):
            raise ConfigurationError(f"{client.url} wants another key ({error}); give it with --api-key KEY") from error
        if error.refused and model is not None:
            return model
        raise ConfigurationError(f"{error}; --server takes the address of a server that runs") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{client.url}/v1/models is no list of models; is an OpenAI server at this address?") from error
    if model is None and not names:
        raise ConfigurationError(f"{client.url}/v1/models lists no model; name one with --model NAME")
    if model is not None and names and model not in names:
        raise ConfigurationError(f"the server has no model {model!r}; it lists {', '.join(map(str, names))}")
    return str(model or names[0])


def find(client: Client, prompt: str) -> Abilities:
    """Set the client's endpoint, and say what it takes.

    Raises:
        ConfigurationError: neither endpoint answers a plain request.
    """
    short = Request(prompt, seed=1, max_tokens=2)
    choose_endpoint(client, short)
    client.stream_usage = True
    client.stream_usage = ask(client, short, stream=True) is not None
    strict = ask(client, short, extra={UNKNOWN: 1}) is None
    neutral = {name: value for name, value in NEUTRAL.items() if ask(client, short, extra={name: value}) is not None}
    logprobs: int | None = None
    for count in ALTERNATIVES:
        given = alternatives(ask(client, short, logprobs=count))
        logprobs = given if logprobs is None else logprobs  # no alternatives is better than nothing
        if given:
            logprobs = given
            break
    token_ids = None
    if logprobs and not client.chat:
        token_ids = ask(client, short, logprobs=logprobs, extra={"return_tokens_as_token_ids": True})
    return Abilities(
        logprobs=logprobs,
        neutral=neutral,
        refused=tuple(name for name in NEUTRAL if name not in neutral),
        strict=strict,
        speculation=ask(client, short, extra={"speculation": "off"}) is not None,
        token_ids=bool(token_ids and token_ids.tokens and token_ids.tokens[0].text.startswith("token_id:")),
    )


def choose_endpoint(client: Client, request: Request) -> None:
    """Completions, or chat where the server has no completions."""
    said = []
    for client.chat in (False, True):
        try:
            client.ask(request)
            return
        except ServerError as error:
            said.append(str(error))
            if not error.refused:
                break
    raise ConfigurationError(f"{client.url} does not answer a plain request: {'; '.join(said)}")


def ask(client: Client, request: Request, **changes: Any) -> Answer | None:
    """The answer; None if the server does not take the request."""
    try:
        return client.one(Request(**{**vars(request), **changes}))
    except ServerError as error:
        if error.refused:
            return None
        raise


def alternatives(answer: Answer | None) -> int | None:
    """How many each token of ``answer`` has at most, which may be fewer than asked for; None without log-probabilities."""
    return None if answer is None or not answer.tokens else max(len(token.top) for token in answer.tokens)


def drafted(client: Client) -> tuple[int, int] | None:
    """Tokens drafted and accepted since the server has run, by its metrics under vLLM's names; None if it does not say."""
    try:
        text = client.get("/metrics").text
    except ServerError:
        return None
    found = []
    for name in COUNTERS:
        values = re.findall(rf"^\w+:{name}(?:\{{.*\}})? ([0-9.eE+]+)$", text, re.MULTILINE)
        if not values:
            return None
        found.append(int(sum(map(float, values))))
    return found[0], found[1]
