"""What a session tells a planner of a round, what it asks before one, and the planner that always answers the same."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from foredraft.drafters.base import Drafter, Row
from foredraft.planning.costs import CostModel, measure
from foredraft.planning.profiles import Profile
from foredraft.planning.search import chain
from foredraft.shapes import TreeShape

if TYPE_CHECKING:
    from foredraft.target import Target


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


class Planner(Protocol):
    """What a session asks before each round and tells after it."""

    @property
    def learns(self) -> bool:
        """Wants to be told about rounds."""

    @property
    def shape(self) -> TreeShape:
        """The largest that it may ask for."""

    def prepare(self, target: Target, drafter: Drafter, rows: int) -> float:
        """Called while no row is live, before so many begin; returns the seconds that it took."""

    def plan(self, rows: Sequence[Row], *, greedy: bool, together: bool = True) -> TreeShape:
        """The shape to draft for the live rows in this round; ``together`` says that no others join them before they are done."""

    def limits(self, rows: Sequence[Row]) -> list[int] | None:
        """How deep to draft for each row in the round just planned; None for as deep as the shape is."""

    def passes_over(self, rows: int) -> bool:
        """A round without a draft is over; whether it need not be told about."""

    def observe(self, rows: Sequence[Row], done: Round) -> None:
        """A round is over."""

    def plain_seconds(self, rows: int, context: float) -> tuple[float, bool] | None:
        """Seconds of a round of plain decoding, and whether they were measured in this process; None if they are not known."""


class FixedPlanner:
    """The same shape in every round, a :class:`~foredraft.shapes.TreeShape` or a string such as "chain(5)".

    Plain passes, with which the speed-up compares, are known from ``profile``, or measured where ``budget`` gives seconds for that.
    """

    def __init__(self, shape: TreeShape | str, *, learns: bool = False, profile: Profile | None = None, budget: float = 0.0):
        self.shape, self.learns = TreeShape.parse(shape), learns
        self.costs, self.profile, self.budget = CostModel(), profile, budget

    def prepare(self, target: Target, drafter: Drafter, rows: int) -> float:
        if self.profile is not None and not self.costs.target.points:
            self.profile.read(self.costs)
        if self.budget <= 0 or rows in self.costs.plain_passes:
            return 0.0
        begin = time.perf_counter()
        measure(self.costs, target, drafter, rows=rows, largest=chain(0), seconds=self.budget, drafts=False)
        return time.perf_counter() - begin

    def plan(self, rows: Sequence[Row], *, greedy: bool, together: bool = True) -> TreeShape:
        return self.shape

    def limits(self, rows: Sequence[Row]) -> list[int] | None:
        return None

    def passes_over(self, rows: int) -> bool:
        return True

    def observe(self, rows: Sequence[Row], done: Round) -> None:
        pass

    def plain_seconds(self, rows: int, context: float) -> tuple[float, bool] | None:
        return self.costs.plain_seconds(rows, context)
