"""HTTP connections that cannot be held open for nothing: uvicorn itself waits for a request's head for ever."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from foredraft.serving import sse
from foredraft.serving.failures import refused

HEADERS = 10.0  # seconds for the head of a request: from connecting, or from the first byte of a later one


class Connection(AutoHTTPProtocol):
    """Closes the connection where a request's head takes too long, and cuts it off where the client reads nothing of an answer for long:
    asyncio closes none before all is sent. Bodies have a limit of their own. What is no HTTP gets an error in the form of all others."""

    _timer: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # any unsent byte pauses writing
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for bytes that are no HTTP; its own answer is no JSON. An answer under way ends there."""
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            body = json.dumps(refused(msg, code="invalid_http").body).encode()
            head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._go_on()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._go_on()
        super().resume_writing()

    def _look(self, unsent: int) -> None:
        """Look after a while whether more was sent."""
        self._stalled = self.loop.call_later(sse.STALLED, self._cut_off, unsent)

    def _cut_off(self, before: int) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent < before:
            self._look(unsent)
        else:
            self.transport.abort()

    def _go_on(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # a request is being answered
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADERS, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
