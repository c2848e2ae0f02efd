"""What the API asks of the engine, and what it gets back.

The API's coroutines make a :class:`Job` and give it to :meth:`Engine.submit`. The engine thread alone touches the session. It answers with
events, which arrive in the job's own queue on the event loop of the API. A client that does not read is bounded: once ``BOUND`` events are
unread, the engine drops the job. A :class:`Call` is a function that runs in that thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.rows import Commit, RowParameters

log = logging.getLogger("foredraft.serving")

BOUND = 4096  # events that a client may leave unread


class QueueFullError(ForedraftError, RuntimeError):
    """Too many requests wait. ``retry_after``: seconds until one more would probably be taken."""

    def __init__(self, message: str, retry_after: float):
        super().__init__(message)
        self.retry_after = retry_after


class DrainingError(ForedraftError, RuntimeError):
    """The server takes no new requests: it is about to stop, or its engine has died."""


class JobTimeoutError(ForedraftError, TimeoutError):
    """The request waited or ran for longer than the server allows."""


@dataclass(frozen=True)
class Choice:
    """One row: a prompt, and how to continue it."""

    ids: Sequence[int]
    parameters: RowParameters


@dataclass(frozen=True)
class Joined:
    """The first row of the job is in the session."""


@dataclass(frozen=True)
class Progress:
    """What one step added to the choice number ``choice`` of the job."""

    choice: int
    commit: Commit


@dataclass(frozen=True)
class Failed:
    """The job is over: nothing more comes."""

    error: Exception


Event = Joined | Progress | Failed


@dataclass(eq=False)
class Job:
    """One request.

    Attributes:
        choices: its rows.
        owner: whose turn it takes in the queue: the API key's name, or the client's address.
        id: of the request, for the log.
        arrived: when it arrived, by ``time.monotonic``.
        grammar: the field of the request that has the grammar of its texts, if there is one.
        unfinished: numbers of the choices that are not over; the engine's.
        begun: a row of it was decoded; the engine's.
        longest: tokens of its longest row that is over; the engine's.
    """

    choices: Sequence[Choice]
    owner: str
    id: str
    arrived: float
    grammar: str | None = None
    unfinished: set[int] = field(default_factory=set)
    begun: bool = False
    longest: int = 0
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _events: asyncio.Queue[Event | None] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.unfinished = set(range(len(self.choices)))

    @property
    def unread(self) -> int:
        """Events that the API has not read; any thread may ask."""
        return self._events.qsize()

    # -- on the event loop ----------------------------------------------------------------------------------------------

    def put(self, event: Event) -> None:
        """Called for the engine, which hands over the events of a step together."""
        self._events.put_nowait(event)

    async def events(self) -> AsyncIterator[Event]:
        """Everything the engine says, until every choice is over or the job has failed."""
        async for event in self.events_or_pauses(None):
            assert event is not None
            yield event

    async def events_or_pauses(self, seconds: float | None) -> AsyncIterator[Event | None]:
        """The same; and None each time nothing has come for so many ``seconds``."""
        over = 0
        while over < len(self.choices):
            timer = None if seconds is None else self.loop.call_later(seconds, self._events.put_nowait, None)
            try:
                event = await self._events.get()
            finally:
                if timer is not None:
                    timer.cancel()
            yield event
            if isinstance(event, Failed):
                return
            over += isinstance(event, Progress) and event.commit.finish_reason is not None


@dataclass(eq=False)
class Call:
    """A function that is to run in the engine's thread, and a coroutine that waits for its ``result``."""

    function: Callable[[], Any]
    result: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def run(self) -> None:
        """In the thread."""
        try:
            value = self.function()
        except Exception as error:
            self.fail(error)
        else:
            self._settle(lambda: self.result.set_result(value))

    def fail(self, error: Exception) -> None:
        self._settle(lambda: self.result.set_exception(error))

    def _settle(self, settle: Callable[[], None]) -> None:
        call_soon(self.result.get_loop(), lambda: None if self.result.done() else settle())


def send(events: Sequence[tuple[Job, Event]]) -> None:
    """Events go to the event loops of their jobs, one call for each loop."""
    for loop in {job.loop for job, _ in events}:
        call_soon(loop, deliver, [each for each in events if each[0].loop is loop])


def deliver(events: Iterable[tuple[Job, Event]]) -> None:
    """On the event loop of the jobs."""
    for job, event in events:
        job.put(event)


def call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    """In the thread of ``loop``, unless that is over."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        log.debug("an event loop is closed, and what was to be said there is lost")
