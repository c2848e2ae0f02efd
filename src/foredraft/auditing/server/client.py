"""HTTP to an OpenAI server: requests one after another or at once, streamed or whole."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import httpx

from foredraft.auditing.server.answers import Answer, Request, answers
from foredraft.errors import ConfigurationError, ForedraftError

READ, CONNECT = 600.0, 10.0  # seconds
TRIES, LONGEST_WAIT = 60, 10.0  # while a server's queue is full


class ServerError(ForedraftError, RuntimeError):
    """The server answered with an error, or not at all. ``status`` is None in the second case."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status

    @property
    def refused(self) -> bool:
        """Whether it did not take the request as it was."""
        return self.status in (400, 404, 405, 415, 422, 501)


class Client:
    """Talks to one model of one server.

    Args:
        url: of the server, with or without ``/v1``.
        transport: in place of the network, for tests.

    Raises:
        ConfigurationError: ``url`` is none, or ``api_key`` cannot be sent.
    """

    def __init__(self, url: str, *, api_key: str | None = None, at_once: int = 8, transport: httpx.BaseTransport | None = None):
        if not url.startswith(("http://", "https://")):
            raise ConfigurationError(f"--server takes an address such as http://127.0.0.1:8000, got {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=4 * at_once, max_keepalive_connections=4 * at_once)
        timeout = httpx.Timeout(READ, connect=CONNECT)
        try:
            self._http = httpx.Client(
                base_url=self.url, headers=headers, timeout=timeout, limits=limits, transport=transport, trust_env=False
            )
        except httpx.InvalidURL as error:
            raise ConfigurationError(f"--server takes an address such as http://127.0.0.1:8000, got {url!r}: {error}") from error
        except UnicodeEncodeError as error:
            raise ConfigurationError("a server's key has ASCII characters only; check --api-key and FOREDRAFT_API_KEY") from error
        self.model, self.chat, self.stream_usage, self.at_once = "", False, False, at_once
        self.seen: list[Answer] = []
        self.requests = 0
        self._lock = Lock()

    def close(self) -> None:
        self._http.close()

    # -- requests -----------------------------------------------------------------------------------------------------

    def ask(self, request: Request) -> list[Answer]:
        """The choices that ``request`` gets.

        Raises:
            ServerError: it gets none.
        """
        body = request.body(self.model, self.chat)
        if request.stream and self.stream_usage:
            body["stream_options"] = {"include_usage": True}
        documents = self._post("/v1/chat/completions" if self.chat else "/v1/completions", body, stream=request.stream)
        try:
            found = answers(request, documents)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ServerError(f"the answer cannot be read: {type(error).__name__}: {error}") from error
        with self._lock:
            self.seen += found
        return found

    def one(self, request: Request) -> Answer:
        return self.ask(request)[0]

    def in_turn(self, requests: Iterable[Request]) -> list[Answer]:
        """Each alone, the next when the last has ended."""
        return [self.one(each) for each in requests]

    def together(self, requests: Sequence[Request]) -> list[Answer]:
        """``at_once`` at a time; the answers in the order of ``requests``."""
        with ThreadPoolExecutor(self.at_once) as pool:
            return list(pool.map(self.one, requests))

    # -- HTTP ---------------------------------------------------------------------------------------------------------

    def get(self, path: str) -> httpx.Response:
        """Raises ServerError where nothing answers, or with an error."""
        try:
            response = self._http.get(path)
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url} does not answer: {error or type(error).__name__}") from error
        check(response.status_code, response.text)
        return response

    def _post(self, path: str, body: Mapping[str, Any], *, stream: bool) -> list[Any]:
        """The documents of the answer, of which a stream has several. A full queue is waited for."""
        for _ in range(TRIES):
            with self._lock:
                self.requests += 1
            try:
                with self._http.stream("POST", path, json=body) as response:
                    if response.status_code != 429:
                        if response.status_code != 200:
                            check(response.status_code, response.read().decode(errors="replace"))
                        return list(events(response)) if stream else [json.loads(response.read())]
                    wait = response.headers.get("retry-after", "")
            except httpx.HTTPError as error:
                raise ServerError(f"the connection broke: {error or type(error).__name__}") from error
            except ValueError as error:
                raise ServerError(f"the answer is no JSON: {error}") from error
            time.sleep(min(float(wait) if wait.isdigit() else 1.0, LONGEST_WAIT))
        raise ServerError("the server's queue stayed full (429)", 429)


def check(status: int, text: str) -> None:
    """Raises ServerError unless ``status`` says that all is well; ``text`` is the answer's."""
    if status == 200:
        return
    try:
        document = json.loads(text)
        error = document.get("error", document)
        message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        message = text
    raise ServerError(f"HTTP {status}: {str(message or 'no message').strip()[:300]}", status)


def lines(response: httpx.Response) -> Iterator[str]:
    """Cut at line feeds alone, where httpx cuts at some characters of a text as well."""
    rest = ""
    for part in response.iter_text():
        *whole, rest = (rest + part).split("\n")
        yield from whole
    yield rest


def events(response: httpx.Response) -> Iterable[Any]:
    """The chunks of a stream of server-sent events.

    Raises:
        ServerError: an error among them, or no end.
    """
    for line in lines(response):
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if isinstance(chunk, dict) and chunk.get("error"):
            raise ServerError(f"the stream ended with an error: {chunk['error']}")
        yield chunk
    raise ServerError("the stream ended without [DONE]")
