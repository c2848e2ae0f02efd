"""How a server is run: one value for every flag of ``foredraft serve``. Importing this loads no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.errors import ConfigurationError, whole

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")


@dataclass(frozen=True)
class Settings:
    """What a server is told beside its Speculator; the flags of ``foredraft serve`` have the same names and defaults.

    Attributes:
        model: the name under which clients ask for the model.
        host: the address that the server listens at; browsers may use others only where they are allowed to.
        keys: API keys by the name of who has each. Without any, everybody may ask, and clients are told apart by their addresses.
        max_rows: most rows that are decoded together.
        max_batch_tokens: most tokens of the rows that are decoded together, their prompts and all that they may still write; None leaves
            it to ``cache_memory``.
        max_queue: most rows that wait for room.
        queue_timeout, request_timeout: seconds that a request may wait, and take in all.
        drain: seconds that running requests have after the signal to stop.
        max_body: bytes of the largest request.
        cors_origins: origins whose pages may use the server; ``"*"`` is any.
        share: what one key's texts teach the drafters, and the pages of its prompts, serve other keys too.
        request_metrics: put ``metrics.speculative_decoding`` into responses.
        page: serve the web page at ``/``.
        chat_template: in place of the tokenizer's; None for its own.
        repeatable: the seed alone decides the text: ``rule="auto"`` means ``match``.
        deterministic: True refuses to start where logits depend on what is computed together; None warns.

    Raises:
        ConfigurationError: a value that cannot work; the message names it.
    """

    model: str = "foredraft"
    host: str = "127.0.0.1"
    keys: Mapping[str, str] = field(default_factory=dict)
    max_rows: int = 16
    max_batch_tokens: int | None = None
    max_queue: int = 256
    queue_timeout: float = 60.0
    request_timeout: float = 600.0
    drain: float = 30.0
    max_body: int = 8 << 20
    cors_origins: Sequence[str] = ()
    share: bool = False
    request_metrics: bool = False
    page: bool = True
    chat_template: str | None = None
    repeatable: bool = True
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_queue", "max_body"):
            whole(name, getattr(self, name))
        if self.max_batch_tokens is not None:
            whole("max_batch_tokens", self.max_batch_tokens, least=2)
        for name in ("queue_timeout", "request_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(
                    f"{name} must be a number of seconds above 0, or no request is served; got {getattr(self, name)!r}"
                )
        if not self.drain >= 0:
            raise ConfigurationError(f"drain must be a number of seconds of at least 0, got {self.drain!r}")
        for origin in self.cors_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ConfigurationError(f"an origin is a scheme and a host, such as https://example.org, or *; got {origin!r}")
        if len(set(self.keys.values())) < len(self.keys) or not all(self.keys.values()):
            raise ConfigurationError("an API key is empty or was given twice; give each once")

    def check_learning(self) -> None:
        """For a draft whose weights learn from what is served. Stores of texts, such as the one of ``suffix``, are kept apart by key.

        Raises:
            ConfigurationError: its drafts would show one key what others wrote, and nobody has allowed that.
        """
        if len(self.keys) > 1 and not self.share:
            raise ConfigurationError(
                "--learn trains one draft on the texts of all keys, and its drafts would tell one what others wrote; add --share to allow "
                "that (in Python, Settings(share=True))"
            )

    def longest(self, target: Any) -> int | None:
        """Most tokens of a prompt and its answer with ``target``; longer answers are cut there. None where nothing limits them."""
        limits = (target.context, target.trained, self.max_batch_tokens)
        return min((each for each in limits if each is not None), default=None)
