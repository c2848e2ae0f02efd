"""One thread that owns the :class:`~foredraft.session.Session` of a server: jobs come in, events go out.

Coroutines :meth:`~Engine.submit` jobs and read their events; what they ask for is noted under a lock, and the thread looks at it between
two steps. It does nothing else than steps: no tokenising, no JSON. While there is nothing to do it sleeps.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal, TypeVar

from foredraft.errors import BusyError
from foredraft.rows import Commit
from foredraft.serving.fingerprint import check_exact, dated, system_fingerprint, template_of
from foredraft.serving.jobs import BOUND, Call, DrainingError, Event, Failed, Job, JobTimeoutError, Joined, Progress, QueueFullError, send
from foredraft.serving.metrics import REASONS, Metrics
from foredraft.serving.queue import DrainRate, FairQueue, Live, Waiting
from foredraft.serving.settings import Settings
from foredraft.serving.sizes import sizes_of
from foredraft.speculator import Speculator

T = TypeVar("T")
State = Literal["new", "ready", "draining", "dead"]

log = logging.getLogger("foredraft.serving")

LOOK = 0.05  # seconds between two looks for requests that have waited or run for too long
FATAL = 3  # steps that fail with no row done in between before the engine gives up
CALLS = 8  # of :meth:`Engine.alone` that may wait
MARGIN = 0.6  # of the time that a request may wait: if it is likely to wait longer, it is refused, for rows differ and end in waves
PATIENCE = 5.0  # seconds that a call of :meth:`Engine.alone` waits until no row is live


class EngineError(RuntimeError):
    """A step failed. Its cause says why; that is a defect, or the machine's."""


class Engine:
    """:meth:`submit`, :meth:`leave`, :meth:`finish`, :meth:`alone` and :meth:`drain` are for the event loop; only the thread that
    :meth:`start` begins touches the session.

    Attributes:
        state: ``new`` until it is started; ``ready``; ``draining`` once no more jobs are taken; ``dead`` when steps fail again and again.
        on_death: called in the engine's thread when it dies.
        session: the rows; other threads may read its statistics.
        metrics: what ``/metrics`` answers.

    Raises:
        ConfigurationError: ``settings.deterministic`` was asked for, and cannot be had; or a draft learns from several keys' texts unasked.
    """

    def __init__(self, speculator: Speculator, settings: Settings):
        self.speculator, self.settings = speculator, settings
        self.session = speculator.session(repeatable=settings.repeatable, wait=True)
        self.metrics = Metrics(settings.model, self.session, self)
        check_exact(self.session, settings)
        self.state: State = "new"
        self.on_death: Callable[[], object] = lambda: None
        self._changed = threading.Condition()  # guards what follows
        self._queue = FairQueue(settings.max_queue)
        self._leavers: deque[tuple[Job, int | None, Exception | None]] = deque()  # jobs, or one choice of them, and what they are told
        self._alone: deque[Call] = deque()
        self._stopping = False
        # of the thread alone
        self._live: dict[int, Live] = {}  # by slot
        self._learns = self.session.drafter.learnt is not None  # its weights change while rows are live; nobody else's do
        if self._learns:
            settings.check_learning()
        self._outbox: list[tuple[Job, Event]] = []
        self._tokens = 0  # that the live rows have at most in the end
        self._blocked = False  # the head of the queue did not fit, and no row has left since
        self._joined = False  # the last step read new rows, so that the live ones have waited
        self._failures = 0
        self._looked = 0.0
        self._rate = DrainRate(settings.max_rows)
        self._thread = threading.Thread(target=self._run, name="foredraft-engine", daemon=True)

    # -- on the event loop ----------------------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """``system_fingerprint`` of responses; the first use reads all weights."""
        return dated(*self._fingerprint)

    @cached_property
    def _fingerprint(self) -> tuple[str, str]:
        return system_fingerprint(self.speculator, self.session, self.settings), template_of(self.speculator, self.settings)

    @property
    def running(self) -> int:
        """Rows that are being decoded."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Rows in the queue."""
        return len(self._queue)

    def start(self) -> None:
        self.state = "ready"
        self._thread.start()

    def submit(self, job: Job, sizes: Sequence[int] | None = None) -> None:
        """Queue the rows of ``job``; its events say what becomes of them. ``sizes``: what ``sizes_of`` says, if known already.

        Raises:
            ConfigurationError, CacheMemoryError: a row of it can never run.
            QueueFullError: too many rows wait, or rows are done so slowly that it would wait for longer than it may.
            DrainingError: the server is about to stop, or was not started.
        """
        sizes = sizes_of(job.choices, self.session, self.settings) if sizes is None else sizes
        rows = [Waiting(job, index, size) for index, size in enumerate(sizes)]
        with self._changed:
            yielding = self._room(job.owner, len(rows))
            for other in yielding:  # none of them is at the head, which the thread may be about to take
                self._queue.remove(other)
                other.unfinished = set()  # it was refused, and its client does not leave anything
                send([(other, Failed(self._full(len(other.choices))))])
            self._queue.push(rows)
            self._changed.notify()

    def check_room(self, owner: str) -> None:
        """Refuse at once what :meth:`submit` would refuse even if it were one row: a refusal must not cost the work of reading a prompt.

        Raises:
            QueueFullError, DrainingError: as :meth:`submit`.
        """
        with self._changed:
            self._room(owner, 1)

    def _room(self, owner: str, rows: int) -> list[Job]:
        """The jobs that must leave the queue before ``rows`` of ``owner`` may join it."""
        self.check_ready()
        excess = self._queue.excess(rows)
        yielding = self._queue.yielding(owner, rows) if excess else []
        if excess and not yielding:
            raise self._full(excess)
        self._check_wait(owner)
        return yielding

    def _full(self, excess: int) -> QueueFullError:
        """What a job is told for which there is no place until so many rows have left."""
        self.metrics.refused += 1
        seconds = self._rate.seconds(excess)
        return QueueFullError(f"the queue is full (waiting: {len(self._queue)}); try again in {seconds:.0f} s", seconds)

    def _check_wait(self, owner: str) -> None:
        """Refuse at once what would most likely wait for longer than ``queue_timeout``."""
        free = 0 if self._blocked else max(0, self.settings.max_rows - len(self._live))
        ahead = max(0, self._queue.ahead(owner) - free)
        rate, most = self._rate.per_second, MARGIN * self.settings.queue_timeout
        if rate is not None and ahead / rate > most:
            self.metrics.refused += 1
            seconds = self._rate.seconds(ahead - int(rate * most))
            raise QueueFullError(
                f"{ahead} rows are to be served before this one, which takes about {ahead / rate:.0f} s, and a request may wait for "
                f"{self.settings.queue_timeout:g} s; try again in {seconds:.0f} s",
                seconds,
            )

    def check_ready(self) -> None:
        """
        Raises:
            DrainingError: the server is about to stop, or was not started.
        """
        if self.state == "new":
            raise DrainingError("the engine was not started: an application that mounts this one must run its lifespan as well")
        if self.state != "ready":
            raise DrainingError("the server is about to stop; ask again later")

    def leave(self, job: Job) -> None:
        """The client has left: drop the job. It gets no more events."""
        self._dismiss(job)

    def finish(self, job: Job, choice: int) -> None:
        """The choice needs no more tokens, for instance because of a stop string. Its last event is a commit without tokens whose
        ``finish_reason`` is "removed", unless the row was over before."""
        self._dismiss(job, choice)

    def _dismiss(self, job: Job, choice: int | None = None, error: Exception | None = None) -> None:
        with self._changed:
            self._leavers.append((job, choice, error))
            self._changed.notify()

    async def alone(self, function: Callable[[], T], *, patience: float = PATIENCE) -> T:
        """The result of ``function``, which runs in the engine's thread while no row is live; those that wait go on waiting meanwhile.

        Raises:
            BusyError: rows were live for all of ``patience`` seconds, or :data:`CALLS` calls are waiting already.
            DrainingError: the server is about to stop.
        """
        call = Call(function)
        with self._changed:
            self.check_ready()
            if len(self._alone) >= CALLS:
                raise BusyError("too many others want the server alone; try again when it is idle")
            self._alone.append(call)
            self._changed.notify()
        try:
            await asyncio.wait([call.result], timeout=patience)
        finally:
            with self._changed:
                if late := call in self._alone:
                    self._alone.remove(call)
        if late:
            raise BusyError("the server is decoding for others, and this needs it alone; try again when it is idle")
        return await call.result

    async def drain(self, seconds: float) -> None:
        """Take no more jobs; wait until those that were taken are over. After ``seconds`` the rest are told that the server stops."""
        with self._changed:
            if self.state != "dead":
                self.state = "draining"
        end = time.monotonic() + seconds
        while self._thread.is_alive() and (jobs := self._jobs()):
            if time.monotonic() >= end:
                for job in jobs:
                    what = "the text ends here" if job.begun else "the request was not begun; send it again later"
                    self._dismiss(job, error=DrainingError(f"the server stops; {what}"))
                end += 1.0
            await asyncio.sleep(0.02)

    def _jobs(self) -> set[Job]:
        with self._changed:
            return {row.job for row in self._queue} | {live.waiting.job for live in list(self._live.values())}

    def stop(self) -> None:
        """End the thread; whoever is still waiting is told. It takes until the end of the step that is under way."""
        with self._changed:
            if self.state != "dead":
                self.state = "draining"
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    # -- in the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._sleep():
                self._dismiss_leavers()
                self._dismiss_late()
                if not self._live:
                    self._run_alone()
                self._admit()
                if self._live:
                    self._step()
                self._flush()
        except BaseException as error:
            log.exception("the engine has died")
            self.state = "dead"
            self._tell_all(error)
            self.on_death()
        else:
            self._tell_all(DrainingError("the server stops; the text ends here"))
            self.session.close()

    def _sleep(self) -> bool:
        """Wait until there is something to do; False once the engine is to stop."""
        with self._changed:
            while not (self._stopping or self._live or self._queue or self._leavers or self._alone):
                self._changed.wait()
            return not self._stopping

    def _dismiss_leavers(self) -> None:
        with self._changed:
            leavers, self._leavers = self._leavers, deque()
        for job, choice, error in leavers:
            if choice is None:
                self._drop(job, error)
            elif choice in job.unfinished:
                self._finish(job, choice)

    def _finish(self, job: Job, choice: int) -> None:
        """The API wants no more of one row."""
        self._unqueue(job, choice)
        job.unfinished.discard(choice)
        slot = next((slot for slot, live in self._live.items() if (live.waiting.job, live.waiting.index) == (job, choice)), -1)
        self._outbox.append((job, Progress(choice, Commit(slot, [], 0, "removed"))))  # first: what follows may end the engine
        if slot >= 0:
            self._failures = 0  # its steps went well
            self.metrics.over(self._remove(slot), "stop")

    def _dismiss_late(self) -> None:
        """Drop requests that have waited or run for longer than allowed."""
        now, settings = time.monotonic(), self.settings
        if now - self._looked < LOOK:
            return
        self._looked = now
        with self._changed:
            waiting = {row.job for row in self._queue}
        live = {each.waiting.job for each in self._live.values()}
        for job in waiting | live:
            age = now - job.arrived
            if age > settings.request_timeout:
                self._drop(job, JobTimeoutError(f"the request took longer than the {settings.request_timeout:g} s that it may take"))
            elif age > settings.queue_timeout and not job.begun:
                self._drop(job, JobTimeoutError(f"the request waited for {settings.queue_timeout:g} s, and still has no turn; try later"))

    def _drop(self, job: Job, error: Exception | None) -> None:
        """``job`` is over; it is told why, unless its client has left."""
        if not job.unfinished:
            return
        self._unqueue(job)
        unfinished, job.unfinished = job.unfinished, set()
        self.metrics.finished["abort" if error is None else "error"] += len(unfinished)
        if error is not None:
            self._outbox.append((job, Failed(error)))  # first: what follows may end the engine
        for slot in [slot for slot, live in self._live.items() if live.waiting.job is job]:
            if slot in self._live:
                self._remove(slot)

    def _unqueue(self, job: Job, choice: int | None = None) -> None:
        """Its rows, or one of them, wait no more; another row may be at the head."""
        with self._changed:
            if self._queue.remove(job, choice):
                self._blocked = False

    def _remove(self, slot: int) -> Live:
        """Take the row out of the session."""
        live = self._over(slot)
        try:
            self.session.remove(slot)
        except Exception as error:
            self._broken(error)
        self._rate.step(0.0, 1)  # the row has left, which the rate at which rows leave must count
        return live

    def _over(self, slot: int) -> Live:
        """The row is no longer live."""
        live = self._live.pop(slot)
        self._tokens -= live.waiting.size
        self._blocked = False
        return live

    def _run_alone(self) -> None:
        """One of the calls; those behind it wait until the rows that wait meanwhile are over."""
        with self._changed:
            call = self._alone.popleft() if self._alone else None
        if call is not None:
            call.run()

    def _admit(self) -> None:
        """Hand rows to the session as far as there is room. It reads them at once, so that the queue alone decides whose turn it is; and
        after a step that read some, those that waited for them have a round."""
        if self._blocked or self.session.waiting or (self._joined and self._live):
            return
        most = self.settings.max_batch_tokens
        while len(self._live) < self.settings.max_rows:
            with self._changed:
                row = self._queue.head
            if row is None:
                return
            if most is not None and self._live and self._tokens + row.size > most:
                return
            try:
                if self.session.fits(row.choice.ids, row.choice.parameters) == "later":
                    self._blocked = True
                    return
                slot = self.session.add(row.choice.ids, row.choice.parameters)
            except Exception as error:  # it could run when it was submitted
                self._drop(row.job, error)
                continue
            live = Live(row, time.monotonic())
            with self._changed:  # in one piece: whoever looks sees the row here or there
                self._queue.pop()
                self._live[slot] = live
            if not row.job.begun:
                row.job.begun = True
                self._outbox.append((row.job, Joined()))
            self.metrics.joined(live)
            self._tokens += row.size

    def _step(self) -> None:
        new, begin = len(self.session.waiting), time.monotonic()
        try:
            commits = self.session.step(follow=self._learns or new == len(self._live))
        except Exception as error:
            self._broken(error)
            return
        now, done, tokens = time.monotonic(), 0, 0
        self._joined = new > len(self.session.waiting)
        stepped = [(self._live[commit.slot], commit) for commit in commits]
        for commit in commits:
            if commit.finish_reason is not None:  # the session has removed it, so nothing below may do so again
                self._over(commit.slot)
        for live, commit in stepped:
            if live.waiting.index not in live.waiting.job.unfinished:  # its job was dropped for another row's failure in this step
                continue
            tokens += self.metrics.progress(live, commit, now)
            self._progress(live, commit)
            done += commit.finish_reason is not None
        self.metrics.seen["iteration_tokens_total"](tokens)
        if done:
            self._failures = 0
        self._rate.step(now - begin, done)

    def _progress(self, live: Live, commit: Commit) -> None:
        """Tell the job what a step added to its row."""
        job, index, reason = live.waiting.job, live.waiting.index, commit.finish_reason
        if commit.error is not None:
            self._drop(job, commit.error)
        elif job.unread >= BOUND:
            self._drop(job, JobTimeoutError(f"the client has left {BOUND} events unread"))
        else:
            self._outbox.append((job, Progress(index, commit)))
            if reason is not None:
                job.unfinished.discard(index)
                self.metrics.over(live, REASONS.get(reason, "error"))

    def _broken(self, error: Exception) -> None:
        """A step failed, and the session has dropped its rows. Everybody in it is told; unless that goes on, the next ones may fare
        better."""
        log.error("a step failed: %s", error, exc_info=error)
        jobs = {live.waiting.job for live in self._live.values()}
        self._live.clear()
        self._tokens, self._blocked, self._joined = 0, False, False
        failure = EngineError(f"the engine failed: {error}")
        failure.__cause__ = error
        for job in jobs:
            self._drop(job, failure)
        self._failures += 1
        if self._failures >= FATAL:
            raise failure
        self.session.close()

    def _tell_all(self, error: BaseException) -> None:
        failure = error if isinstance(error, Exception) else EngineError(f"the engine has died: {error!r}")
        with self._changed:
            jobs = {row.job for row in self._queue} | {live.waiting.job for live in self._live.values()}
            calls = list(self._alone)
            self._alone.clear()
        self._live.clear()
        for job in jobs:
            self._drop(job, failure)
        for call in calls:
            call.fail(failure)
        self._flush()

    def _flush(self) -> None:
        """Send what has happened, all that is for one event loop in one call."""
        if self._outbox:
            send(self._outbox)
            self._outbox = []
