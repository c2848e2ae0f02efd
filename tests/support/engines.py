"""Engines for tests: a Speculator that is made of tables, and coroutines that ask it for texts."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from foredraft import RowParameters
from foredraft.planning import FixedPlanner
from foredraft.serving.engine import Engine
from foredraft.serving.jobs import Choice, Failed, Job, Progress
from foredraft.serving.settings import Settings
from foredraft.session import Session
from foredraft.testing import ProbabilityTable, ScriptedDrafter, TableTarget
from foredraft.verification.match import Match


class Slow(ScriptedDrafter):
    """Drafts as its table says, once ``gate`` is open, and fails as often as it is told to."""

    def __init__(self, q: ProbabilityTable):
        super().__init__(q, proposal="keyed")
        self.gate, self.failures, self.rounds, self.pause = threading.Event(), 0, 0, 0.0
        self.gate.set()

    def draft(self, request: Any) -> Any:
        self.rounds += 1
        time.sleep(self.pause)
        assert self.gate.wait(10)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("a planted fault")
        return super().draft(request)


def table_speculator() -> Any:
    """A Speculator's double: a target and a drafter that are tables of five tokens."""
    target, drafter = TableTarget(ProbabilityTable.random(5, seed=1)), Slow(ProbabilityTable.random(5, seed=2))

    def session(*, repeatable: bool, **options: Any) -> Session:
        return Session(target, drafter, Match(), proposal="keyed", planner=FixedPlanner("chain(2)"), **options)  # type: ignore[arg-type]

    return SimpleNamespace(session=session, target=target, drafter=drafter)


def parameters(new: int = 8, seed: int = 0, **options: Any) -> RowParameters:
    return RowParameters(max_new_tokens=new, do_sample=True, seed=(seed, 0), **options)


def job(*choices: Choice, owner: str = "a", **options: Any) -> Job:
    return Job(choices or [Choice([0], parameters())], owner=owner, id="", arrived=time.monotonic(), **options)


@asynccontextmanager
async def running(speculator: Any, **settings: Any) -> Any:
    engine = Engine(speculator, Settings(**settings))
    engine.start()
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.stop)


async def read(job: Job) -> tuple[list[list[int]], list[str | None], Exception | None]:
    """The tokens of every choice, how each ended, and why the job failed if it did."""
    texts: list[list[int]] = [[] for _ in job.choices]
    ends: list[str | None] = [None] * len(job.choices)
    async for event in job.events():
        if isinstance(event, Failed):
            return texts, ends, event.error
        if isinstance(event, Progress):
            texts[event.choice] += event.commit.tokens
            ends[event.choice] = event.commit.finish_reason
    return texts, ends, None


async def ask(engine: Engine, *choices: Choice, **options: Any) -> list[list[int]]:
    asked = job(*choices, **options)
    engine.submit(asked)
    texts, _, error = await asyncio.wait_for(read(asked), 20)
    assert error is None
    return texts


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))
