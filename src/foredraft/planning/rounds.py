"""What a session tells a planner of a round, what it asks before one, and the planner that always answers the same."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from foredraft.drafters.base import Drafter, Row
from foredraft.drafters.exits import Exits
from foredraft.planning.acceptance import Acceptance
from foredraft.planning.costs import BUDGET, CostModel, measure
from foredraft.planning.exits import ExitChoice
from foredraft.planning.profiles import Profile
from foredraft.planning.search import Plan, chain
from foredraft.shapes import TreeShape
from foredraft.target import Target

FOREVER = 1 << 30  # passes


@dataclass(frozen=True)
class Round:
    """What happened in one round.

    Attributes:
        shape: as it was asked for; zero drafting where there was no room.
        asked: per row, how deep.
        drafted: per row, nodes at each depth.
        accepted: per row, drafted tokens kept.
        nodes: that were verified, per row on average, the root included.
        context: tokens of the longest row.
        draft, target, rest: seconds.
        split: the draft's seconds and the target's are known apart; on a GPU only their sum is.
        shared: the draft ran layers of the target, which the pass then left out.
        static_parents, paths: the tree's parents and the nodes kept per row, where it branches and the host knows them.
        greedy: no row samples.
        expected: accepted tokens per row that the draft's own probabilities predicted, where they chose the nodes.
        touched: experts of a layer that some node of the pass took, on average; None if they are not counted.
        passes: of plain decoding that were made in one call; ``target`` and ``rest`` are the seconds of one of them, on average.
        single: the planner allowed several, and only one could be made.
        settling: passes were recorded in it, or recordings compared: its seconds are not those of later rounds.
    """

    shape: TreeShape
    asked: Sequence[int]
    drafted: Sequence[Sequence[int]]
    accepted: Sequence[int]
    nodes: float
    context: int
    draft: float
    target: float
    rest: float
    split: bool = True
    shared: bool = False
    static_parents: tuple[int, ...] | None = None
    paths: Sequence[Sequence[int]] = ()
    greedy: bool = True
    expected: float | None = None
    touched: float | None = None
    settling: bool = False
    passes: int = 1
    single: bool = False


class Planner(ABC):
    """What a session asks before each round and tells after it.

    Attributes:
        learns: wants to be told about rounds.
        shape: the largest that it may ask for.
        costs: what is known of the machine.
    """

    learns: bool
    shape: TreeShape
    costs: CostModel

    @abstractmethod
    def prepare(self, target: Target, drafter: Drafter, rows: int) -> float:
        """Called while no row is live, before so many begin; returns the seconds that it took."""

    @abstractmethod
    def plan(self, rows: Sequence[Row], *, greedy: bool, together: bool = True) -> TreeShape:
        """The shape to draft for the live rows in this round; ``together`` says that no others join them before they are done."""

    def limits(self, rows: Sequence[Row]) -> list[int] | None:
        """How deep to draft for each row in the round just planned; None for as deep as the shape is."""
        return None

    @property
    def resting(self) -> int:
        """So many plain passes may follow the one just planned, before anything is to be planned, if the rows stay the same."""
        return 0

    def passes_over(self, rows: int, passes: int) -> bool:
        """A round without a draft is over, in which so many passes were made; whether it need not be told about."""
        return True

    @abstractmethod
    def observe(self, rows: Sequence[Row], done: Round) -> None:
        """A round is over."""

    def plain_seconds(self, rows: int, context: float) -> tuple[float, bool] | None:
        """Seconds of a round of plain decoding, and whether they were measured in this process; None if they are not known."""
        return self.costs.plain_seconds(rows, context)


class FixedPlanner(Planner):
    """The same shape in every round, a :class:`~foredraft.shapes.TreeShape` or a string such as "chain(5)".

    Plain passes, with which the speed-up compares, are known from ``profile``, or measured where :attr:`budget` gives seconds for that.
    Where drafts may leave the target at several ``exits``, passes to each are measured, and the best one for the shape is chosen.
    """

    learns = False

    def __init__(self, shape: TreeShape | str, *, profile: Profile | None = None, exits: Exits | None = None):
        self.shape, self.costs, self.profile = TreeShape.parse(shape), CostModel(), profile
        self.budget, self.choice = 0.0, None
        if exits is not None and self.shape.depth:
            self.learns, self.budget, self.choice = True, BUDGET, ExitChoice(exits, self.costs)
        self._acceptance: dict[bool, Acceptance] = {}
        self._seconds: dict[int, float] = {}  # of a round with a draft, by the number of rows

    def prepare(self, target: Target, drafter: Drafter, rows: int) -> float:
        if self.profile is not None and not self.costs.target.points:
            self.profile.read(self.costs)
        known = rows in self.costs.plain_passes if self.choice is None else rows in self.costs.exits
        if self.budget <= 0 or known:
            return 0.0
        begin = time.perf_counter()
        measure(self.costs, target, drafter, rows=rows, largest=chain(0), seconds=self.budget, drafts=False)
        return time.perf_counter() - begin

    def plan(self, rows: Sequence[Row], *, greedy: bool, together: bool = True) -> TreeShape:
        if self.choice is not None:
            self.choice.exits.greedy = greedy
            if greedy in self._acceptance and len(rows) in self._seconds:
                self._choose(self.choice, len(rows), greedy)
        return self.shape

    @property
    def resting(self) -> int:
        return 0 if self.shape.nodes else FOREVER

    def observe(self, rows: Sequence[Row], done: Round) -> None:
        if self.choice is None or not done.shape.nodes:
            return
        self._acceptance.setdefault(done.greedy, Acceptance(self.shape.depth)).observe(done.asked, done.drafted, done.accepted)
        seconds = done.draft + done.target + done.rest
        before = self._seconds.get(len(rows), seconds)
        self._seconds[len(rows)] = before + 0.1 * (min(seconds, 2 * before) - before)

    def _choose(self, choice: ExitChoice, rows: int, greedy: bool) -> None:
        """The exit with the most tokens per second; a level of the draft takes what a pass to it takes."""
        acceptance, depth, levels = self._acceptance[greedy], self.shape.depth, self.costs.leaving(rows)

        def plan(odds: float, seconds: float) -> Plan:
            more = (seconds - 1) * depth * levels[choice.exits.layer]
            return Plan(self.shape, 1 + sum(accumulate(acceptance.by_depth(depth, odds=odds), mul)), self._seconds[rows] + more)

        before = choice.exits.layer
        odds = choice.better(rows, greedy, plan)
        if odds is None:
            return
        for each in self._acceptance.values():
            each.shift(odds)
        self._seconds[rows] += depth * (levels[choice.exits.layer] - levels[before])
