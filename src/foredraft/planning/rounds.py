"""What a session tells a planner of a round, what it asks before one, and the planner that always answers the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from foredraft.drafters.base import Drafter, Row
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


class FixedPlanner:
    """The same shape in every round, a :class:`~foredraft.shapes.TreeShape` or a string such as "chain(5)"."""

    def __init__(self, shape: TreeShape | str, *, learns: bool = False):
        self.shape, self.learns = TreeShape.parse(shape), learns

    def prepare(self, target: Target, drafter: Drafter, rows: int) -> float:
        return 0.0

    def plan(self, rows: Sequence[Row], *, greedy: bool, together: bool = True) -> TreeShape:
        return self.shape

    def limits(self, rows: Sequence[Row]) -> list[int] | None:
        return None

    def passes_over(self, rows: int) -> bool:
        return True

    def observe(self, rows: Sequence[Row], done: Round) -> None:
        pass
