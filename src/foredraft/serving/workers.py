"""Work of requests in a few threads, such as tokenising: owners take turns, and what waits is bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from foredraft.serving.failures import busy

T = TypeVar("T")


class Workers:
    """``threads`` threads for one event loop. At most ``most`` pieces of work wait for one; of several owners each is next in turn."""

    def __init__(self, threads: int, most: int, name: str):
        self.most = most
        self._threads, self._free = ThreadPoolExecutor(threads, name), threads
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by owner, the one whose turn it is first

    async def run(self, owner: str, work: Callable[[], T]) -> T:
        """
        Raises:
            ApiError: 503; too much waits already.
        """
        if self._free:
            self._free -= 1
        else:
            await self._turn(owner)
        made: asyncio.Future[T] = asyncio.get_running_loop().run_in_executor(self._threads, work)
        made.add_done_callback(self._done)  # which may be long after whoever asked has left
        return await asyncio.shield(made)

    async def _turn(self, owner: str) -> None:
        if sum(map(len, self._waiting.values())) >= self.most:
            raise busy(f"{self.most} requests wait to be read; try again later")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it came at the same moment
                self._next()
            elif (turns := self._waiting.get(owner)) is not None and turn in turns:  # or else it has been passed over already
                turns.remove(turn)
                if not turns:
                    del self._waiting[owner]
            raise

    def _done(self, made: asyncio.Future[Any]) -> None:
        self._next()
        if not made.cancelled():
            made.exception()  # so that asyncio does not complain where nobody waits for it any more

    def _next(self) -> None:
        while self._waiting:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns  # behind all others
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
