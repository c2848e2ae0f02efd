"""The server as a process: its socket, its signals, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send

from foredraft.rows import RowParameters
from foredraft.serving.connections import Connection
from foredraft.serving.engine import Engine
from foredraft.serving.sockets import address_of, cannot_listen
from foredraft.speculator import Speculator

GRACE = 5.0  # seconds that answers have to be sent, once their last tokens are there
CONNECTIONS = 512  # beside those of rows that run or wait; requests on more get 503
KEEP_ALIVE = 75  # seconds that a connection without a request is kept


def log_to_stderr() -> None:
    """What the server's parts log, and warnings, as lines with a time; of libraries warnings alone."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.captureWarnings(True)
    logging.getLogger("foredraft").setLevel(logging.INFO)


def warm_up(speculator: Speculator, engine: Engine) -> None:
    """What no request should wait for: the machine is measured, for one row and for many, where no profile is stored; and the fingerprint
    is worked out."""
    _ = engine.fingerprint  # no assert, which python -O leaves out
    for rows in dict.fromkeys((1, engine.settings.max_rows)):
        session = speculator.session(repeatable=engine.settings.repeatable, wait=True)
        for _ in range(rows):
            session.add([0], RowParameters(max_new_tokens=1, isolation="warm-up"))
        while session.live:
            session.step()


class Server(uvicorn.Server):
    """Uvicorn, with these signals: the first has the engine drain, while the application still answers, if only that it takes no more
    requests; a second one ends the process at once.

    Attributes:
        died: the engine died, so that the process has failed.
    """

    def __init__(
        self, application: Any, engine: Engine, bound: socket.socket, *, ready: Callable[[str], None], said: Callable[[str], None]
    ):
        most = CONNECTIONS + engine.settings.max_rows + engine.settings.max_queue

        async def counting(scope: Scope, receive: Receive, send: Send) -> None:
            scope.setdefault("state", {})["crowded"] = len(self.server_state.connections) > most
            await application(scope, receive, send)

        config = uvicorn.Config(
            counting,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_keep_alive=KEEP_ALIVE,
            http=Connection,
            ws="none",
            proxy_headers=False,  # or each local client could call itself a new one with every request, and take its turn
            timeout_graceful_shutdown=int(GRACE),
        )
        super().__init__(config)
        self.engine, self.bound, self.ready, self.said = engine, bound, ready, said
        self.died = False
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signals = 0

    def serve_until_signal(self) -> None:
        """Serve until a signal, or until the engine dies.

        Raises:
            ConfigurationError: another process, with a socket at the same port, was the first to listen.
        """
        asyncio.run(self.serve([self.bound]))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self.engine.on_death = lambda: loop.call_soon_threadsafe(self._die)
        try:
            await super().startup(sockets)  # type: ignore[no-untyped-call]
        except OSError as error:
            await self.lifespan.shutdown()
            host, port = self.bound.getsockname()[:2]
            raise cannot_listen(host, port, error) from None
        if self.started:
            self.ready(address_of(self.bound))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1 or self._loop is None:
            os._exit(128 + sig)
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        if self._draining is None:
            if self.engine.running or self.engine.waiting:
                self.said(f"stopping: running requests have {self.engine.settings.drain:g} s; a second signal ends them")
            self._draining = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        await self.engine.drain(self.engine.settings.drain)
        self.should_exit = True

    def _die(self) -> None:
        self.died = self.should_exit = True
