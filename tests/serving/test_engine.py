"""The engine's thread: texts as alone whatever else happens, turns, bounds, leavers, failures."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from engines import ask, job, parameters, read, run, running, table_speculator
from helpers import drafter_names, make_drafter, repetitive, tiny
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper

from foredraft import BusyError, ConfigurationError, RowParameters, Speculator
from foredraft.logits.processors import Pipeline
from foredraft.rows import SessionRow
from foredraft.serving.engine import CALLS, FATAL, Engine, EngineError
from foredraft.serving.failures import ApiError
from foredraft.serving.jobs import Choice, DrainingError, Failed, Job, JobTimeoutError, Joined, Progress, QueueFullError
from foredraft.serving.queue import DrainRate, FairQueue, Live, Waiting
from foredraft.serving.settings import Settings
from foredraft.serving.sizes import sizes_of
from foredraft.session import Session


def test_a_job_is_told_when_it_begins_what_it_gains_and_that_it_is_over():
    async def main() -> None:
        async with running(table_speculator()) as engine:
            asked = job(Choice([0, 1], parameters(7)), Choice([2], parameters(5, seed=1)))
            engine.submit(asked)
            events = [event async for event in asked.events()]
            assert isinstance(events[0], Joined)
            assert [sum(len(e.commit.tokens) for e in events[1:] if e.choice == each) for each in (0, 1)] == [7, 5]
            assert engine.running == engine.waiting == 0 and not engine.session.live

    run(main())


def test_a_job_that_cannot_run_is_refused_at_once():
    async def main() -> None:
        async with running(table_speculator(), max_batch_tokens=20, max_queue=3) as engine:
            for wrong, why in (([], "empty"), ([7], "vocabulary")):
                with pytest.raises(ConfigurationError, match=why):
                    engine.submit(job(Choice(wrong, parameters())))
            with pytest.raises(ApiError, match=r"allows 20 in all \(--max-batch-tokens\)") as found:
                engine.submit(job(Choice([0] * 13, parameters())))
            assert (found.value.param, found.value.code) == ("max_tokens", "context_length_exceeded")
            with pytest.raises(ApiError, match="4 texts"):
                engine.submit(job(*[Choice([0], parameters())] * 4))

    run(main())


def test_owners_take_turns_and_each_is_served_in_order():
    async def main() -> None:
        speculator = table_speculator()
        async with running(speculator, max_rows=1) as engine:
            speculator.drafter.gate.clear()
            asked = [job(owner=owner) for owner in "aaaabbc"]
            for each in asked:
                engine.submit(each)
            order: list[int] = []

            async def watch(number: int) -> None:
                async for event in asked[number].events():
                    if isinstance(event, Joined):
                        order.append(number)

            watching = asyncio.gather(*map(watch, range(len(asked))))
            speculator.drafter.gate.set()
            await watching
            assert order == [0, 4, 6, 1, 5, 2, 3]

    run(main())


def test_no_more_rows_run_together_than_allowed_and_no_more_tokens():
    async def main(most: int, **settings: Any) -> None:
        speculator = table_speculator()
        async with running(speculator, **settings) as engine:
            for _ in range(2):  # the second time, in the place of rows that are over
                asked = [job(Choice([0, 1], parameters(8, seed=number)), owner=str(number)) for number in range(9)]
                for each in asked:
                    engine.submit(each)
                seen = 0
                readers = asyncio.gather(*map(read, asked))
                while not readers.done():
                    seen = max(seen, len(engine.session.rows))
                    assert len(engine.session.rows) <= most
                    await asyncio.sleep(0)
                assert seen == most

    run(main(3, max_rows=3))
    run(main(4, max_batch_tokens=49))


def test_a_full_queue_refuses_says_for_how_long_and_still_lets_others_in():
    async def main() -> None:
        speculator = table_speculator()
        async with running(speculator, max_rows=1, max_queue=4) as engine:
            await asyncio.gather(*(ask(engine) for _ in range(3)))  # so that the rate is known
            speculator.drafter.gate.clear()
            taken = [job() for _ in range(5)]
            engine.submit(taken[0])
            while engine.running == 0:
                await asyncio.sleep(0.001)
            for each in taken[1:]:
                engine.submit(each)
            with pytest.raises(QueueFullError, match=r"waiting: 4") as refusal:
                engine.submit(job())
            assert 1 <= refusal.value.retry_after <= 120 and engine.metrics.refused == 1
            engine.submit(other := job(owner="b"))  # b has less than its share: the newest job of a makes room
            assert engine.waiting == 4 and engine.metrics.refused == 2
            *_, told = await read(taken.pop())
            assert isinstance(told, QueueFullError) and 1 <= told.retry_after <= 120
            speculator.drafter.gate.set()
            assert all(error is None for *_, error in await asyncio.gather(*map(read, [*taken, other])))

    run(main())


def test_who_makes_room_in_a_full_queue():
    def push(queue: FairQueue, owner: str, rows: int) -> Job:
        found = job(*[Choice([0], parameters())] * rows, owner=owner)
        queue.push([Waiting(found, index, 9) for index in range(rows)])
        return found

    async def main() -> None:
        queue = FairQueue(6)
        _, _, third, _ = [push(queue, *each) for each in (("a", 1), ("a", 2), ("a", 2), ("b", 1))]
        assert queue.yielding("c", 1) == [third], "the newest job of whoever has most rows"
        assert queue.yielding("b", 2) == [third], "b may have three of six rows, and c two"
        assert queue.yielding("c", 3) == queue.yielding("a", 1) == []
        queue.remove(third)
        assert queue.excess(2) == 0 and queue.excess(3) == 1
        queue = FairQueue(3)
        push(queue, "a", 3)
        assert queue.yielding("b", 1) == [], "its turn has come"
        push(queue, "b", 1)
        queue.pop()
        assert queue.yielding("c", 1) == [], "a row of it has left"

    run(main())


def test_the_rate_counts_busy_seconds_alone():
    rate = DrainRate()
    assert rate.seconds(3) == 3
    for _ in range(20):
        rate.step(0.5, 1)
    assert rate.seconds(30) == pytest.approx(15)
    for _ in range(1000):
        rate.step(0.5, 0)  # nothing was done for long
    assert rate.seconds(30) == 120


def test_rows_that_end_together_do_not_look_quick():
    """Sixty-four at once, every forty seconds."""
    rate = DrainRate(64)
    for burst in range(12):
        for _ in range(400):
            rate.step(0.1, 0)
        rate.step(0.1, 64)
        assert rate.per_second == pytest.approx(1.6, rel=0.01), burst


def test_a_client_that_leaves_frees_its_rows_within_a_round():
    async def main() -> None:
        speculator = table_speculator()
        async with running(speculator, max_rows=2, max_queue=9) as engine:
            leaver = job(Choice([0], parameters(5000)), Choice([1], parameters(5000, seed=1)), Choice([2], parameters(5000)))
            engine.submit(leaver)
            events = leaver.events()
            while not isinstance(await anext(events), Progress):
                pass
            assert (engine.running, engine.waiting) == (2, 1)
            engine.leave(leaver)
            rounds = speculator.drafter.rounds
            texts = await ask(engine, Choice([0, 2], parameters(3)))
            assert len(texts[0]) == 3 and engine.running == engine.waiting == 0
            assert speculator.drafter.rounds - rounds <= 1 + 3  # the one under way, and those of the other
            assert engine.metrics.finished["abort"] == 3

    run(main())


def test_a_choice_is_finished_and_the_others_go_on():
    async def main() -> None:
        speculator = table_speculator()
        async with running(speculator) as engine:
            asked = job(Choice([0], parameters(3000)), Choice([1], parameters(40, seed=1)))
            engine.submit(asked)
            engine.finish(asked, 0)
            engine.finish(asked, 0)
            texts, ends, error = await read(asked)
            assert error is None and ends == ["removed", "length"] and len(texts[1]) == 40 and len(texts[0]) < 3000
            assert texts[1] == (await ask(engine, Choice([1], parameters(40, seed=1))))[0]

    run(main())


def test_rows_that_are_finished_early_or_left_are_done_as_well():
    """Stop strings may end all texts of a server. Its rate must not fall as if nothing were done, nor its failures add up."""

    async def main() -> None:
        speculator = table_speculator()
        async with running(speculator) as engine:
            for _ in range(FATAL):
                speculator.drafter.failures = 1
                engine.submit(failing := job())
                assert isinstance((await read(failing))[2], EngineError)
                engine.submit(asked := job(Choice([0], parameters(100_000))))
                events = asked.events()
                await anext(events)
                engine.finish(asked, 0)
                async for _ in events:
                    pass
            engine.submit(leaver := job(Choice([0], parameters(100_000))))
            await anext(leaver.events())
            engine.leave(leaver)
            await ask(engine)
            assert engine.state == "ready" and len(engine._rate._done) - 1 == FATAL + 2  # the first is the beginning

    run(main())


def test_leaving_or_finishing_what_is_over_changes_nothing():
    """The API leaves every job in the end, and finishes choices that may be over."""

    async def main() -> None:
        async with running(table_speculator()) as engine:
            engine.submit(asked := job(Choice([0], parameters(3)), Choice([1], parameters(4))))
            await read(asked)
            engine.finish(asked, 1)
            engine.leave(asked)
            await ask(engine)
            assert asked.unread == 0 and engine.metrics.finished == {"stop": 0, "length": 3, "abort": 0, "error": 0}

    run(main())


def test_a_client_that_does_not_read_is_dropped_and_slows_nobody(monkeypatch):
    monkeypatch.setattr("foredraft.serving.engine.BOUND", 5)

    async def main() -> None:
        async with running(table_speculator()) as engine:
            stalled = job(Choice([0], parameters(100_000)))
            engine.submit(stalled)
            assert len((await ask(engine, Choice([1], parameters(50))))[0]) == 50
            while engine.running:
                await asyncio.sleep(0.001)
            *_, error = await read(stalled)
            assert isinstance(error, JobTimeoutError) and "unread" in str(error)

    run(main())


def test_requests_that_wait_or_run_for_too_long_are_told():
    async def main() -> None:
        speculator = table_speculator()
        async with running(speculator, max_rows=1, queue_timeout=0.2, request_timeout=0.6) as engine:
            speculator.drafter.pause = 0.02
            runs, waits = job(Choice([0], parameters(100_000))), job()
            engine.submit(runs)
            engine.submit(waits)
            (*_, late), (texts, _, over) = await asyncio.gather(read(waits), read(runs))
            assert isinstance(late, JobTimeoutError) and "waited" in str(late)
            assert isinstance(over, JobTimeoutError) and "longer than" in str(over) and texts[0]
            speculator.drafter.pause = 0.0
            assert len((await ask(engine))[0]) == 8 and engine.metrics.finished["error"] == 2

    run(main())


def test_what_would_wait_for_too_long_is_refused_at_once():
    """One row per second is done, and a request may wait for 10: behind six rows it is most likely in time, behind seven it is not."""

    async def main() -> None:
        speculator = table_speculator()
        async with running(speculator, max_rows=1, queue_timeout=10) as engine:
            speculator.drafter.pause = 0.01
            for _ in range(10):
                engine._rate.step(1.0, 1)
            engine._rate.step = lambda *_: None  # however long the steps below take
            jobs = [job(Choice([0], parameters(100_000)), owner="busy")]
            engine.submit(jobs[0])
            while not engine.running:
                await asyncio.sleep(0.001)
            for _ in range(7):
                jobs.append(job(Choice([0], parameters(10)), owner="busy"))
                engine.submit(jobs[-1])
            with pytest.raises(QueueFullError, match="7 rows are to be served before this one, which takes about 7 s") as refusal:
                engine.submit(job(Choice([0], parameters(10)), owner="busy"))
            assert refusal.value.retry_after == 1.0 and engine.metrics.refused == 1
            with pytest.raises(QueueFullError, match="7 rows"):
                engine.check_room("busy")
            engine.check_room("other")
            jobs.append(job(Choice([0], parameters(10)), owner="other"))
            engine.submit(jobs[-1])  # behind one of the others'
            for each in jobs:
                engine.leave(each)

    run(main())


def test_nobody_is_refused_while_there_are_free_places():
    """However slowly rows are done."""

    async def main() -> None:
        speculator = table_speculator()
        async with running(speculator, max_rows=4, queue_timeout=30) as engine:
            for _ in range(3):
                engine._rate.step(60.0, 1)
            engine._rate.step = lambda *_: None
            jobs = [job(Choice([0], parameters(100_000)))]
            engine.submit(jobs[0])
            while not engine.running:
                await asyncio.sleep(0.001)
            speculator.drafter.gate.clear()  # nobody joins meanwhile
            await asyncio.sleep(0.1)
            for _ in range(4):
                jobs.append(job(Choice([0], parameters(10))))
                engine.submit(jobs[-1])
            with pytest.raises(QueueFullError, match="1 rows are to be served before this one"):
                engine.submit(job(Choice([0], parameters(10))))
            speculator.drafter.gate.set()
            for each in jobs:
                engine.leave(each)

    run(main())


def test_a_job_that_was_not_begun_is_told_so_when_the_server_stops():
    async def main() -> None:
        speculator = table_speculator()
        async with running(speculator, max_rows=1) as engine:
            speculator.drafter.pause = 0.01
            running_one, waiting = job(Choice([0], parameters(100_000))), job(Choice([1], parameters(5)))
            engine.submit(running_one)
            engine.submit(waiting)
            reading = asyncio.gather(read(running_one), read(waiting))
            await engine.drain(0.3)
            (*_, told), (*_, unbegun) = await reading
            assert "the text ends here" in str(told)
            assert isinstance(unbegun, DrainingError) and "the request was not begun" in str(unbegun)

    run(main())


def test_draining_lets_running_jobs_end_and_tells_the_rest():
    async def main() -> None:
        speculator = table_speculator()
        async with running(speculator) as engine:
            speculator.drafter.pause = 0.01
            short, long = job(Choice([0], parameters(20))), job(Choice([1], parameters(100_000)))
            engine.submit(short)
            engine.submit(long)
            reading = asyncio.gather(read(short), read(long))
            begin = time.monotonic()
            await engine.drain(1.0)
            assert 0.9 < time.monotonic() - begin < 5 and engine.state == "draining"
            (_, ends, error), (*_, told) = await reading
            assert ends == ["length"] and error is None and isinstance(told, DrainingError) and "the text ends here" in str(told)
            with pytest.raises(DrainingError):
                engine.submit(job())
            begin = time.monotonic()
            await engine.drain(60.0)  # nothing is left
            assert time.monotonic() - begin < 1

    run(main())


def test_stopping_tells_whoever_is_there():
    async def main() -> None:
        async with running(table_speculator(), max_rows=1) as engine:
            asked = [job(Choice([0], parameters(100_000))) for _ in range(2)]
            for each in asked:
                engine.submit(each)
        assert all(isinstance(error, DrainingError) for *_, error in await asyncio.gather(*map(read, asked)))
        with pytest.raises(DrainingError):
            await engine.alone(lambda: 0)

    run(main())


def test_a_step_that_fails_is_told_to_those_in_flight_and_the_next_ones_run():
    async def main() -> None:
        speculator = table_speculator()
        async with running(speculator, max_rows=2) as engine:
            speculator.drafter.failures = 1
            asked = [job() for _ in range(3)]
            for each in asked:
                engine.submit(each)
            errors = [error for *_, error in await asyncio.gather(*map(read, asked))]
            assert sum(isinstance(error, EngineError) and "planted" in str(error) for error in errors) in (1, 2) and errors[2] is None
            assert len((await ask(engine))[0]) == 8 and engine.state == "ready"
            speculator.drafter.failures = FATAL - 1  # a row was done in between, so these count anew
            for _ in range(FATAL - 1):
                engine.submit(failing := job())
                assert isinstance((await read(failing))[2], EngineError)
            assert len((await ask(engine))[0]) == 8

    run(main())


def test_steps_that_go_on_failing_end_the_engine_and_everybody_is_told():
    async def main() -> None:
        speculator, died = table_speculator(), threading.Event()
        async with running(speculator, max_rows=1) as engine:
            engine.on_death = died.set
            speculator.drafter.failures = 10**6
            asked = [job() for _ in range(FATAL + 2)]
            for each in asked:
                engine.submit(each)
            assert all(isinstance(error, EngineError) for *_, error in await asyncio.gather(*map(read, asked)))
            assert died.wait(5) and engine.state == "dead"
            with pytest.raises(DrainingError):
                engine.submit(job())

    run(main())


def test_who_is_dropped_is_told_even_if_that_ends_the_engine(monkeypatch):
    """Two steps have failed, and then a row cannot be removed."""

    def broken(slot: int) -> None:
        raise RuntimeError("a planted fault")

    async def main() -> None:
        async with running(table_speculator()) as engine:
            monkeypatch.setattr(engine.session, "remove", broken)
            died = threading.Event()
            engine._failures, engine.on_death = FATAL - 1, died.set
            engine.submit(asked := job(Choice([0], parameters(100_000))))
            await anext(asked.events())
            engine._dismiss(asked, error=DrainingError("the server stops"))
            *_, error = await asyncio.wait_for(read(asked), 10)
            assert isinstance(error, DrainingError) and died.wait(5) and engine.state == "dead"

    run(main())


def test_a_function_runs_alone_in_the_engines_thread():
    async def main() -> None:
        speculator = table_speculator()
        async with running(speculator) as engine:
            assert await engine.alone(lambda: (threading.current_thread().name, engine.running)) == ("foredraft-engine", 0)
            with pytest.raises(ZeroDivisionError):
                await engine.alone(lambda: 1 / 0)
            engine.submit(long := job(Choice([0], parameters(100_000))))
            while not engine.running:
                await asyncio.sleep(0.001)
            with pytest.raises(BusyError, match="idle"):
                await engine.alone(lambda: 0, patience=0.1)
            waiting = asyncio.ensure_future(engine.alone(lambda: engine.running, patience=10))
            await asyncio.sleep(0.01)
            engine.leave(long)
            assert await waiting == 0
            waited = asyncio.ensure_future(engine.alone(lambda: time.sleep(0.3)))  # it may take long once it has begun
            await asyncio.sleep(0.05)
            assert len((await ask(engine))[0]) == 8 and waited.done()

    run(main())


def test_functions_that_run_alone_keep_nobody_from_its_turn():
    """However many ask, and again as soon as they are answered: rows go first, and what is too much is refused."""

    async def main() -> None:
        async with running(table_speculator()) as engine:
            over = False

            async def again_and_again() -> int:
                done = 0
                while not over:
                    try:
                        await engine.alone(lambda: time.sleep(0.02))
                        done += 1
                    except BusyError:
                        await asyncio.sleep(0.001)
                return done

            asking = asyncio.gather(*(again_and_again() for _ in range(3)))
            await asyncio.sleep(0.1)
            for _ in range(3):
                begin = time.monotonic()
                assert len((await ask(engine))[0]) == 8 and time.monotonic() - begin < 1
            over = True
            assert sum(await asking) > 3
            first = asyncio.ensure_future(engine.alone(lambda: time.sleep(0.1)))
            await asyncio.sleep(0.02)
            found = await asyncio.gather(*(engine.alone(lambda: 1) for _ in range(CALLS + 2)), first, return_exceptions=True)
            assert found[:CALLS] == [1] * CALLS and all("too many" in str(each) for each in found[CALLS:-1])

    run(main())


def test_a_row_that_is_handed_over_is_seen_all_the_while():
    """Else :meth:`Engine.drain` could take the engine for idle in between."""

    async def main() -> None:
        async with running(table_speculator()) as engine:
            seen: list[set[Job]] = []
            lookers: list[threading.Thread] = []

            class Watched(dict[int, Live]):
                def __setitem__(self, slot: int, live: Live) -> None:
                    lookers.append(threading.Thread(target=lambda: seen.append(engine._jobs())))
                    lookers[-1].start()
                    lookers[-1].join(0.1)  # it has to wait if all is well
                    super().__setitem__(slot, live)

            engine._live = Watched()
            await ask(engine, Choice([0], parameters(50)))
            for each in lookers:
                each.join()
            assert [len(jobs) for jobs in seen] == [1]

    run(main())


def test_choices_of_one_prompt_are_checked_once(monkeypatch):
    session, checked = table_speculator().session(repeatable=True), []
    check = session.check
    monkeypatch.setattr(session, "check", lambda ids, parameters: checked.append(ids) or check(ids, parameters))
    long, short, same = [0] * 50, [1], parameters(9)
    choices = [*[Choice(long, replace(same, seed=(1, index))) for index in range(5)], Choice(short, same), Choice(short, parameters(10))]
    assert sizes_of(choices, session, Settings()) == [59] * 5 + [10, 11] and checked == [long, short, short]


def test_an_engine_that_was_not_started_says_so():
    async def main() -> None:
        engine = Engine(table_speculator(), Settings())
        for ask_for in (lambda: engine.submit(job()), lambda: asyncio.wait_for(engine.alone(lambda: 0), 1)):
            with pytest.raises(DrainingError, match="lifespan"):
                await (ask_for() or asyncio.sleep(0))

    run(main())


def test_an_idle_engine_sleeps():
    async def main() -> None:
        async with running(table_speculator()) as engine:
            await ask(engine)
            woken = 0
            looks = engine._dismiss_leavers

            def count() -> None:
                nonlocal woken
                woken += 1
                looks()

            engine._dismiss_leavers = count  # type: ignore[method-assign]
            await asyncio.sleep(0.2)
            assert woken <= 1

    run(main())


def test_an_event_loop_that_is_gone_stops_nobody():
    async def main(engine: Engine) -> None:
        engine.submit(job(Choice([0], parameters(200))))

    async def other(engine: Engine) -> None:
        assert len((await ask(engine))[0]) == 8

    engine = Engine(table_speculator(), Settings())
    engine.start()
    run(main(engine))
    run(other(engine))
    engine.stop()


@cache
def random_jobs() -> list[tuple[list[Choice], list[list[int]]]]:
    """200 jobs, and what each of their rows gets alone, without a draft. Every row has a seed of its own."""
    generator, prompts = random.Random(3), repetitive((30, 17, 3, 44))

    def choice() -> Choice:
        prompt, sampled = generator.choice(prompts), generator.random() < 0.7
        pipeline = Pipeline.alone(LogitsProcessorList([TemperatureLogitsWarper(1.3)] if sampled else []), prompt_length=len(prompt))
        seed = generator.randrange(1 << 30), generator.randrange(4)
        return Choice(prompt, RowParameters(generator.randint(1, 12), sampled, pipeline, seed=seed, isolation=generator.choice("ab")))

    asked = [[choice() for _ in range(generator.choice([1, 1, 1, 2, 3]))] for _ in range(200)]
    speculator = Speculator(tiny(), "none", self_test=False)
    session = speculator.session()
    texts = [[alone(session, each) for each in choices] for choices in asked]
    speculator.close()
    return list(zip(asked, texts))


def alone(session: Session, choice: Choice) -> list[int]:
    session.add(choice.ids, choice.parameters)
    text: list[int] = []
    while session.live:
        text += [token for commit in session.step() for token in commit.tokens]
    return text


@pytest.mark.parametrize("drafter", drafter_names())
def test_random_jobs_with_leavers_get_their_solo_texts(drafter):
    """They come at random times, a fifth of them leave, and each row that stays has the text that its seed gives it alone."""
    jobs, generator = random_jobs(), random.Random(drafter)
    speculator = Speculator(tiny(), make_drafter(drafter), self_test=False)
    stayed = 0

    async def client(engine: Engine, number: int, leaves: bool) -> None:
        nonlocal stayed
        choices, texts = jobs[number]
        await asyncio.sleep(generator.random())
        engine.submit(own := job(*choices, owner=str(number % 3)))
        if not leaves:
            assert await read(own) == (texts, ["length"] * len(texts), None)
            stayed += 1
            return
        async for _ in own.events():
            if generator.random() < 0.3:
                break
        engine.leave(own)

    async def main() -> None:
        async with running(speculator, max_rows=5, max_queue=1000, queue_timeout=600) as engine:
            await asyncio.gather(*(client(engine, number, generator.random() < 0.2) for number in range(len(jobs))))
            await engine.drain(10)
            assert engine.running == engine.waiting == 0 and stayed > 120

    run(main())
    speculator.close()


def test_a_poisoned_row_fails_its_own_job_alone():
    """Other jobs have their solo texts, and the rows of the same job are over as well."""

    class Poisoned(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            if input_ids.shape[1] > 33:
                raise ValueError("a planted fault")
            return scores

    jobs = random_jobs()[:12]
    speculator = Speculator(tiny(), "prompt-lookup", self_test=False)
    prompt = repetitive((30,))[0]
    pipeline = Pipeline.alone(LogitsProcessorList([Poisoned()]), prompt_length=len(prompt))

    async def main() -> None:
        async with running(speculator, max_rows=6) as engine:
            poisoned = [job(Choice(prompt, RowParameters(20, pipeline=pipeline)), Choice(prompt, RowParameters(900))) for _ in range(3)]
            asked = [job(*choices) for choices, _ in jobs]
            for number, each in enumerate(asked):
                engine.submit(each)
                if number % 4 == 1:
                    engine.submit(poisoned[number // 4])
            for found, (_, texts) in zip(await asyncio.gather(*map(read, asked)), jobs):
                assert found == (texts, ["length"] * len(texts), None)
            for texts, _, error in await asyncio.gather(*map(read, poisoned)):
                assert "a planted fault" in str(error) and len(texts[0]) >= 3
            assert engine.state == "ready" and engine.metrics.finished["error"] == 6
            await engine.drain(5)
            assert engine.running == engine.waiting == 0

    run(main())
    speculator.close()


@pytest.mark.parametrize("fails", [True, False])
def test_rows_of_a_job_that_end_in_the_same_step_end_nothing_else(fails, monkeypatch):
    """The session has removed both already when the first is told: because of an error, or because nobody reads."""

    class Poisoned(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            raise ValueError("a planted fault")

    processors = LogitsProcessorList([Poisoned()] if fails else [])
    pipeline = Pipeline.alone(processors, prompt_length=1)

    async def main() -> None:
        async with running(table_speculator()) as engine:
            other = job(Choice([0], parameters(30)))
            twins = [job(*[Choice([0], parameters(1, seed, pipeline=pipeline)) for seed in range(2)]) for _ in range(FATAL)]
            if not fails:
                for each in twins:
                    monkeypatch.setattr(type(each), "unread", property(lambda self: 10**6 if self in twins else 0))
            for each in [other, *twins]:
                engine.submit(each)
            (texts, ends, error), *failed = await asyncio.gather(*map(read, [other, *twins]))
            assert (error, ends, len(texts[0])) == (None, ["length"], 30) and engine.state == "ready"
            assert all(("a planted fault" if fails else "unread") in str(told) for *_, told in failed)
            assert engine.metrics.finished["error"] == 2 * FATAL

    run(main())


def test_what_is_over_leaves_nothing_behind(caplog):
    """Neither jobs nor rows, nor counts of them: a server runs for months."""

    def kept() -> list[Any]:
        return [each for each in gc.get_objects() if isinstance(each, (Job, Live, SessionRow))]

    there = kept()  # of other tests' servers
    before = set(map(id, there))

    async def jobs(engine: Engine, speculator: Any) -> None:
        for number in range(30):
            speculator.drafter.failures = number % 10 == 3
            engine.submit(asked := job(Choice([0, number % 5], parameters(9, seed=number)), Choice([1], parameters(4)), owner=str(number)))
            if number % 4 == 0:
                engine.leave(asked)
            else:
                await read(asked)
        await ask(engine)

    async def main() -> None:
        speculator = table_speculator()
        async with running(speculator) as engine:
            await jobs(engine, speculator)
            await asyncio.sleep(0.05)
            gc.collect()
            left = Counter(type(each).__name__ for each in kept() if id(each) not in before)
            assert left <= Counter(SessionRow=1), left  # the loop knows the last round
            assert engine.session.stats.rows == [] and not engine._queue._owners and not engine._leavers

    with caplog.at_level(logging.CRITICAL, "foredraft.serving"):  # what is logged is kept, with the frames of the failures
        run(main())


def test_one_draft_learns_from_the_texts_of_several_keys_only_where_that_was_allowed(monkeypatch):
    speculator, keys = table_speculator(), {"a": "one", "b": "two"}
    Engine(speculator, Settings(keys=keys))
    monkeypatch.setattr(type(speculator.drafter), "learnt", {})
    with pytest.raises(ConfigurationError, match=r"add --share to allow that \(in Python, Settings\(share=True\)\)"):
        Engine(speculator, Settings(keys=keys))
    for settings in (Settings(keys=keys, share=True), Settings(keys={"a": "one"}), Settings()):
        Engine(speculator, settings)


def test_settings_that_cannot_work_are_named():
    for wrong, why in (
        ({"max_rows": 0}, "max_rows"),
        ({"max_batch_tokens": 1}, "max_batch_tokens"),
        ({"drain": -1}, "drain"),
        ({"queue_timeout": float("nan")}, "queue_timeout"),
        ({"queue_timeout": 0}, "queue_timeout must be a number of seconds above 0"),
        ({"request_timeout": 0}, "request_timeout"),
        ({"drain": -1}, "drain"),
        ({"keys": {"a": "same", "b": "same"}}, "API key"),
        ({"keys": {"a": ""}}, "API key"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            Settings(**wrong)


def test_pauses_are_counted_from_the_last_event():
    """The timer of a pause ends with the event that it waited for."""
    timers: list[tuple[float, Any]] = []

    class Loop:
        def call_later(self, seconds: float, function: Any, *arguments: Any) -> Any:
            timers.append((seconds, asyncio.get_running_loop().create_future()))
            return timers[-1][1]

    async def go() -> list[Any]:
        asked = Job([Choice([1], RowParameters(max_new_tokens=1))], "owner", "id", 0.0, loop=Loop())  # type: ignore[arg-type]
        for event in (Joined(), None, Failed(ValueError("over"))):
            asked.put(event)  # type: ignore[arg-type]
        return [event async for event in asked.events_or_pauses(7.0)]

    found = asyncio.run(go())
    assert [type(event) for event in found] == [Joined, type(None), Failed]
    assert [seconds for seconds, _ in timers] == [7.0] * 3 and all(timer.cancelled() for _, timer in timers)
