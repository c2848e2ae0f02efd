"""What is asked of an OpenAI server, and its answers, in one form for both endpoints, streamed or not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

UNCLEAR = "\N{REPLACEMENT CHARACTER}"  # what a part of a character is shown as, whichever part it is


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        prompt: a text; for the chat endpoint, the user's message.
        seed: None leaves the field out.
        logprobs: alternatives to ask for at each token; None for no log-probabilities.
        extra: further fields of the body.
    """

    prompt: str
    seed: int | None = None
    max_tokens: int = 48
    temperature: float = 1.0
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    logprobs: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, model: str, chat: bool) -> dict[str, Any]:
        """As JSON for ``/v1/chat/completions`` or ``/v1/completions``."""
        content: dict[str, Any] = {"messages": [{"role": "user", "content": self.prompt}]} if chat else {"prompt": self.prompt}
        body = {"model": model, **content, "max_tokens": self.max_tokens, "temperature": self.temperature, "top_p": 1.0}
        if self.seed is not None:
            body["seed"] = self.seed
        if self.n > 1:
            body["n"] = self.n
        if self.stop:
            body["stop"] = list(self.stop)
        if self.stream:
            body["stream"] = True
        if self.logprobs is not None:
            body.update({"logprobs": True, "top_logprobs": self.logprobs} if chat else {"logprobs": self.logprobs})
        return {**body, **self.extra}


@dataclass(frozen=True)
class Entry:
    """A token and its log-probability.

    Attributes:
        text: as the server shows it.
        key: what tells it from other tokens; None where several tokens are shown alike.
        logprob: NaN where the server gave none.
    """

    text: str
    key: Any
    logprob: float


@dataclass(frozen=True)
class Token(Entry):
    """A token of the text, and the likeliest tokens at its position, likeliest first."""

    top: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class Answer:
    """One choice.

    Attributes:
        pieces: the text as it came, in one piece unless streamed.
        tokens: None where the server gave no log-probabilities.
        usage: ``completion_tokens`` of the whole answer; None if not said.
    """

    request: Request
    pieces: tuple[str, ...]
    tokens: tuple[Token, ...] | None
    finish: str | None
    usage: int | None
    fingerprint: str | None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def logprob(self) -> float:
        """Of the whole text; NaN where the server did not say."""
        return math.nan if self.tokens is None else math.fsum(token.logprob for token in self.tokens)


def answers(request: Request, documents: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """The choices of a response, which is one document, or of the chunks of a stream.

    Raises:
        ValueError: it has no choice, or one without the members that the API promises.
    """
    parts: dict[int, list[Mapping[str, Any]]] = {index: [] for index in range(request.n)}
    for document in documents:
        for choice in document.get("choices") or ():
            parts.setdefault(choice.get("index", 0), []).append(choice)
    if any(not part for part in parts.values()):
        raise ValueError(f"{sum(map(bool, parts.values()))} choices where {request.n} were asked for")
    usages = [usage for document in documents if (usage := document.get("usage"))]
    fingerprints = [each for document in documents if (each := document.get("system_fingerprint"))]
    return [
        Answer(
            request,
            tuple(piece for choice in part if (piece := text_of(choice))),
            tokens_of([choice.get("logprobs") for choice in part], request.logprobs),
            next((choice["finish_reason"] for choice in reversed(part) if choice.get("finish_reason")), None),
            usages[-1].get("completion_tokens") if usages else None,
            fingerprints[-1] if fingerprints else None,
        )
        for _, part in sorted(parts.items())
    ]


def text_of(choice: Mapping[str, Any]) -> str:
    """Of a choice of either endpoint, whole or a chunk."""
    if "text" in choice:
        return choice["text"] or ""
    return (choice.get("delta") or choice.get("message") or {}).get("content") or ""


def tokens_of(parts: Sequence[Any], count: int | None) -> tuple[Token, ...] | None:
    """From the member ``logprobs`` of the chunks of a choice, with at most ``count`` alternatives each; None if none has any."""
    if count is None or not any(parts):
        return None
    found: list[Token] = []
    for part in filter(None, parts):
        if "content" in part:
            found += (token_of_chat(item, count) for item in part["content"] or ())
        else:
            names, values = part.get("tokens") or (), part.get("token_logprobs") or ()
            lists = part.get("top_logprobs") or [None] * len(names)
            found += (token_of_completion(*each, count) for each in zip(names, values, lists))
    return tuple(found)


def token_of_chat(item: Mapping[str, Any], count: int) -> Token:
    """The newer form: a list of objects, with the bytes of each token."""
    own = entry(item)
    return Token(own.text, own.key, own.logprob, likeliest(map(entry, item.get("top_logprobs") or ()), count))


def entry(item: Mapping[str, Any]) -> Entry:
    text, content = item.get("token") or "", item.get("bytes")
    key = item["id"] if "id" in item else tuple(content) if content else text if clear(text) else None
    return Entry(text, key, number(item.get("logprob")))


def token_of_completion(name: str, value: float | None, alternatives: Mapping[str, float] | None, count: int) -> Token:
    """The older form: parallel lists, and an object of alternatives."""
    listed = (Entry(text, text if clear(text) else None, number(each)) for text, each in (alternatives or {}).items())
    return Token(name, name if clear(name) else None, number(value), likeliest(listed, count))


def clear(text: str) -> bool:
    """Whether only one token is shown as ``text``."""
    return bool(text) and UNCLEAR not in text


def likeliest(entries: Any, count: int) -> tuple[Entry, ...]:
    """The ``count`` likeliest. Servers add the token itself where it is not among them: that is cut off."""
    return tuple(sorted(entries, key=lambda each: -each.logprob)[:count])


def number(value: Any) -> float:
    return math.nan if value is None else float(value)
