"""The engine's thread: texts as alone whatever else happens, turns, bounds, leavers, failures."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import repetitive, tiny
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from foredraft import BusyError, ConfigurationError, RowParameters, Speculator
from foredraft.logits.processors import Pipeline
from foredraft.planning import FixedPlanner
from foredraft.serving import jobs
from foredraft.serving.engine import FATAL, Engine, EngineError
from foredraft.serving.jobs import Choice, DrainingError, Failed, Job, JobTimeoutError, Joined, Progress, QueueFullError
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


def test_a_job_is_told_when_it_begins_what_it_gains_and_that_it_is_over():
    async def main() -> None:
        async with running(table_speculator()) as engine:
            asked = job(Choice([0, 1], parameters(7)), Choice([2], parameters(5, seed=1)))
            engine.submit(asked)
            events = [event async for event in asked.events()]
            assert isinstance(events[0], Joined) and events[0].waited >= 0
            assert [sum(len(e.commit.tokens) for e in events[1:] if e.choice == each) for each in (0, 1)] == [7, 5]
            assert engine.running == engine.waiting == 0 and not engine.session.live

    run(main())
