"""Streamed answers: server-sent events, pings while nothing happens, and an end for clients that leave or do not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foredraft.serving.failures import ApiError

T = TypeVar("T")
PING = 5.0  # seconds without an event after which a ping is sent
STALLED = 60.0  # seconds after which a client that reads nothing is given up
LINE_ENDS = "\u0085\u2028\u2029"  # where some clients cut lines, too
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # the latter keeps nginx from collecting chunks


def data(value: Any) -> bytes:
    """A value as an event."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for end in LINE_ENDS:
        text = text.replace(end, f"\\u{ord(end):04x}")
    return b"data: " + text.encode() + b"\n\n"


def failure(error: ApiError) -> bytes:
    """An error after the answer has begun."""
    return b"event: error\n" + data(error.body)


DONE = b"data: [DONE]\n\n"
PINGED = b": ping\n\n"


async def unless_left(receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled if the client leaves.

    Raises:
        ClientDisconnect: it has left.
    """
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, leaving):
            while not each.done():  # before Python 3.12, wait_for can lose a cancellation
                each.cancel()
                await asyncio.wait({each}, timeout=0.1)


async def left(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends bytes as they come. In the end, also if the client leaves or does not read for :data:`STALLED` seconds, ``close`` is called."""

    media_type = "text/event-stream"

    def __init__(self, parts: AsyncGenerator[bytes], close: Callable[[], None]):
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self.parts, self.close, self.stalled = parts, close, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_left(receive, self._send(send))
        except (ClientDisconnect, OSError):
            raise ClientDisconnect from None
        except asyncio.CancelledError:
            if self.stalled:
                raise ClientDisconnect from None
            raise
        finally:
            await self.parts.aclose()
            self.close()

    async def _send(self, send: Send) -> None:
        """In a task of its own. A timer cancels it if a part takes too long; asyncio.wait_for would make another task for every part."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def give_up() -> None:
            self.stalled = True
            task.cancel()

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self.parts:
            timer = loop.call_later(STALLED, give_up)
            try:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            finally:
                timer.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
