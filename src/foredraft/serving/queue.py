"""Who is next: round-robin between owners, first come first served within each. And how fast the queue drains."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from foredraft.serving.jobs import Choice, Job

LEAST_WAIT, MOST_WAIT = 1.0, 120.0  # seconds that a client is asked to wait; openai-python waits no longer than the latter
DONE = 64  # newest rows that are over, whose rate counts


@dataclass(frozen=True)
class Waiting:
    """A row that waits: the choice number ``index`` of ``job``, with at most ``size`` tokens in the end."""

    job: Job
    index: int
    size: int

    @property
    def choice(self) -> Choice:
        return self.job.choices[self.index]


@dataclass(eq=False)
class Live:
    """A row that is decoded.

    Attributes:
        waiting: what it was before.
        joined, first, last: when it was handed to the session, had its first token, and gained tokens last.
        tokens: how many it has gained.
    """

    waiting: Waiting
    joined: float
    first: float | None = None
    last: float = 0.0
    tokens: int = 0


class FairQueue:
    """Rows that wait, at most ``bound``. Where it is full, an owner who has less than an equal share of it still gets in, in the place of
    the newest job of whoever has most: nobody can shut the others out."""

    def __init__(self, bound: int):
        self.bound = bound
        self._owners: OrderedDict[str, deque[Waiting]] = OrderedDict()  # the first is next
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Waiting]:
        for rows in self._owners.values():
            yield from rows

    def excess(self, rows: int) -> int:
        """How many rows have to leave before so many may be added; 0 if they may now."""
        return max(0, self._length + rows - self.bound)

    def yielding(self, owner: str, rows: int) -> list[Job]:
        """The jobs that make room for so many rows of ``owner``; none if it would have more than an equal share, or if there would not be
        room enough: a job whose turn it is stays, as does one of which a row has left the queue."""
        own = len(self._owners.get(owner, ()))
        share = self.bound // (len(self._owners) + (owner not in self._owners))
        if own + rows > share:
            return []
        others = [[row.job for row in waiting] for name, waiting in self._owners.items() if name != owner]
        found: list[Job] = []
        excess = self.excess(rows)
        while excess > 0:
            most = max(others, key=len)
            job = most[-1]
            count = most.count(job)
            if count < len(job.choices) or (self.head is not None and job is self.head.job):
                return []
            del most[-count:]
            found.append(job)
            excess -= count
        return found

    def ahead(self, owner: str) -> int:
        """How many rows have their turn before a new one of ``owner``, as owners take turns."""
        own = len(self._owners.get(owner, ()))
        return own + sum(min(len(rows), own + 1) for name, rows in self._owners.items() if name != owner)

    def push(self, rows: list[Waiting]) -> None:
        """``rows`` of one job, behind those of the same owner."""
        self._owners.setdefault(rows[0].job.owner, deque()).extend(rows)
        self._length += len(rows)

    @property
    def head(self) -> Waiting | None:
        """The row whose turn it is."""
        return next(iter(self._owners.values()))[0] if self._owners else None

    def pop(self) -> Waiting:
        """Take it out; the next turn is another owner's."""
        owner, rows = next(iter(self._owners.items()))
        row = rows.popleft()
        self._length -= 1
        self._owners.move_to_end(owner)
        if not rows:
            del self._owners[owner]
        return row

    def remove(self, job: Job, index: int | None = None) -> bool:
        """Take out the row ``index`` of ``job``, or all of its rows; False if there was none."""
        rows = self._owners.get(job.owner, deque())
        left = deque(row for row in rows if row.job is not job or index not in (None, row.index))
        removed = len(rows) - len(left)
        self._length -= removed
        if left:
            self._owners[job.owner] = left
        elif removed:
            del self._owners[job.owner]
        return removed > 0


class DrainRate:
    """How many rows are over per second in which rows were decoded, whatever ended them: the last :data:`DONE` of them count, or those of
    four times as many ``rows`` as live at once, if these are more. Rows that began together end together, so fewer would say nothing."""

    def __init__(self, rows: int = 1) -> None:
        self._done: deque[float] = deque([0.0], maxlen=1 + max(DONE, 4 * rows))  # the beginning, then by the clock below
        self._busy = 0.0  # seconds of decoding so far

    def step(self, seconds: float, done: int) -> None:
        """A step took so many seconds, and so many rows were over after it."""
        self._busy += seconds
        self._done.extend([self._busy] * done)

    @property
    def per_second(self) -> float | None:
        """None before two rows are done."""
        spent = self._busy - self._done[0]
        return (len(self._done) - 1) / spent if spent > 0 and len(self._done) > 2 else None

    def seconds(self, rows: int) -> float:
        """About how long until ``rows`` more are done, as clients are told."""
        return min(MOST_WAIT, max(LEAST_WAIT, rows / (self.per_second or 1.0)))
