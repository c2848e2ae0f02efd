"""HTTP connections that cannot be held open for nothing: uvicorn itself waits for a request's head for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEADERS = 10.0  # seconds for the head of a request: from connecting, or from the first byte of a later one


class Connection(AutoHTTPProtocol):
    """Closes the connection where a request's head takes too long; bodies and answers have limits of their own."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # a request is being answered
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADERS, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
