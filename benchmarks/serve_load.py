"""The load tool of the suite ``serve``: one process, one event loop, streamed completions; its own share of a core is in every run."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import httpx


@dataclass(frozen=True)
class Asked:
    """One request; seconds since the run began.

    Attributes:
        first, last: of its text; NaN-free: equal to ``begin`` where nothing came.
        chunks: when each chunk with text came.
        tokens: by the server's own count, else one per chunk.
        status: "done", "refused" (429 or 503), or what went wrong.
    """

    number: int
    begin: float
    first: float
    last: float
    tokens: int
    status: str
    chunks: tuple[float, ...] = ()
    text: str = ""

    @property
    def between(self) -> float | None:
        """Seconds per token after the first."""
        return (self.last - self.first) / (self.tokens - 1) if self.status == "done" and self.tokens > 1 else None


@dataclass(frozen=True)
class Load:
    """A run: ``seconds`` from its first request to the end of its last, and the load tool's CPU time over that."""

    seconds: float
    share: float
    asked: Sequence[Asked] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.asked if each.status == "done")

    @property
    def rate(self) -> float:
        """Tokens of finished requests per second."""
        return self.tokens / self.seconds

    @property
    def requests(self) -> float:
        """Finished requests per second."""
        return sum(each.status == "done" for each in self.asked) / self.seconds

    @property
    def problems(self) -> list[str]:
        return [each.status for each in self.asked if each.status not in ("done", "refused")]


class Tool:
    """Asks one server; ``body`` has what all requests to it have in common, ``timeout`` the seconds that it may be silent. Each request
    under way has an HTTP client of its own: one for hundreds of them looks through all of its connections for each."""

    def __init__(self, url: str, body: Mapping[str, Any], timeout: float = 120.0):
        self.url, self.body, self.timeout = url, body, httpx.Timeout(timeout, connect=10)
        self._idle: list[httpx.AsyncClient] = []

    def closed(self, bodies: Sequence[Mapping[str, Any]], clients: int) -> Load:
        """``clients`` at a time, each asking the next when its last has ended."""
        return self._run(self._closed(bodies, clients))

    def open(self, bodies: Sequence[Mapping[str, Any]], rate: float, seconds: float, seed: int) -> Load:
        """Requests at random times, ``rate`` per second on average, whatever becomes of earlier ones."""
        return self._run(self._open(bodies, rate, seconds, seed))

    def beside(self, bodies: Sequence[Mapping[str, Any]], clients: int, guest: Mapping[str, Any] | None, after: float) -> Load:
        """``clients`` that stay, and ``guest``, which comes after so many seconds; its answer is the last."""
        return self._run(self._beside(bodies, clients, guest, after))

    def _run(self, work: Any) -> Load:
        cpu, begin = time.process_time(), time.perf_counter()
        asked = asyncio.run(self._closing(work))
        seconds = time.perf_counter() - begin
        return Load(seconds, (time.process_time() - cpu) / seconds, asked)

    async def _closing(self, work: Awaitable[list[Asked]]) -> list[Asked]:
        try:
            return await work
        finally:
            for http in self._idle:
                await http.aclose()
            self._idle = []

    async def _closed(self, bodies: Sequence[Mapping[str, Any]], clients: int) -> list[Asked]:
        waiting, begin = iter(enumerate(bodies)), time.perf_counter()

        async def client() -> list[Asked]:
            return [await self._ask(number, body, begin) for number, body in waiting]

        found = await asyncio.gather(*(client() for _ in range(clients)))
        return sorted((each for part in found for each in part), key=lambda each: each.number)

    async def _open(self, bodies: Sequence[Mapping[str, Any]], rate: float, seconds: float, seed: int) -> list[Asked]:
        begin, tasks = time.perf_counter(), []
        for number, (moment, body) in enumerate(zip(arrivals(rate, seconds, seed), cycle(bodies))):
            await asyncio.sleep(max(0.0, moment - (time.perf_counter() - begin)))
            tasks.append(asyncio.create_task(self._ask(number, body, begin)))
        return list(await asyncio.gather(*tasks))

    async def _beside(
        self, bodies: Sequence[Mapping[str, Any]], clients: int, guest: Mapping[str, Any] | None, after: float
    ) -> list[Asked]:
        begin = time.perf_counter()
        tasks = [asyncio.create_task(self._ask(number, bodies[number % len(bodies)], begin)) for number in range(clients)]
        if guest is not None:
            await asyncio.sleep(after)
            tasks.append(asyncio.create_task(self._ask(clients, guest, begin)))
        return list(await asyncio.gather(*tasks))

    async def _ask(self, number: int, body: Mapping[str, Any], start: float) -> Asked:
        def now() -> float:
            return time.perf_counter() - start

        begin, chunks, pieces, tokens, status = now(), list[float](), list[str](), 0, "the stream ended early"
        asked = {**self.body, **body, "stream": True, "stream_options": {"include_usage": True}}
        http = self._idle.pop() if self._idle else httpx.AsyncClient(timeout=self.timeout, trust_env=False, verify=False)
        try:
            async with http.stream("POST", f"{self.url}/v1/completions", json=asked) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    status = "refused" if response.status_code in (429, 503) else f"HTTP {response.status_code}: {text.strip()[:200]}"
                else:
                    async for line in response.aiter_lines():
                        if not line.startswith("data:"):
                            continue
                        if (data := line[5:].strip()) == "[DONE]":
                            status = "done"
                            break
                        document = json.loads(data)
                        if document.get("error"):
                            status = str(document["error"])[:200]
                            break
                        if text := "".join(choice.get("text") or "" for choice in document.get("choices") or ()):
                            chunks.append(now())
                            pieces.append(text)
                        if any(choice.get("finish_reason") for choice in document.get("choices") or ()):
                            status = "done"  # transformers serve sends no [DONE]
                        tokens = (document.get("usage") or {}).get("completion_tokens") or tokens
        except (httpx.HTTPError, ValueError) as error:
            status = f"{type(error).__name__}: {error}"
        finally:
            self._idle.append(http)
        first, last = (chunks[0], chunks[-1]) if chunks else (begin, begin)
        return Asked(number, begin, first, last, tokens or len(chunks), status, tuple(chunks), "".join(pieces))


def arrivals(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Moments of a Poisson process, the same for every server."""
    chance, moment = random.Random(seed), 0.0
    while (moment := moment + chance.expovariate(rate)) < seconds:
        yield moment


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that ``share`` of ``values`` do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
