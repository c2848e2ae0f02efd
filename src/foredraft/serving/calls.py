"""Between the engine's thread and the event loops: a function that runs in the one, and what is said to the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from foredraft.serving.jobs import Event, Job

log = logging.getLogger("foredraft.serving")


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


def send(events: Iterable[tuple[Job, Event]]) -> None:
    """Events go to the event loops of their jobs, one call for each loop."""
    events = list(events)
    for loop in {id(job.loop): job.loop for job, _ in events}.values():
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
