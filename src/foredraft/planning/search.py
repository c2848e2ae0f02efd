"""The shape with the most expected tokens per second, zero drafting included.

Chains are tried one by one. Trees are Sequoia's (Chen et al. 2024): by dynamic programming the tree of m nodes and at most d levels
with the largest expected number of accepted tokens, and then the m and d with the largest rate under measured costs. Unlike there,
p[b] may differ from depth to depth. Where no sibling promises more than the one before it, the best tree of m nodes is simply that of the
m likeliest ones, which is found in a quarter of the time. Pure functions of numbers: no model, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import numpy as np

from foredraft.shapes import DynamicShape, Path, StaticShape, TreeShape, likeliest_nodes

PATIENCE = 2  # numbers of levels in a row that promise less than fewer did, after which no more are tried
# Drafted nodes of trees: few, so that compiled shapes are used again, and with the root multiples of what kernels take together.
SIZES = (1, 2, 3, 4, 5, 7, 9, 11, 15, 19, 23, 31, 47, 63)


@dataclass(frozen=True)
class Plan:
    """A ``shape``, the ``tokens`` per row that a round with it should keep, and the ``seconds`` that it should take."""

    shape: TreeShape
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second and row."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Costs:
    """What one number of rows pays, and how often it gets a draft for it.

    Attributes:
        verify: ``verify[n - 1]`` seconds of a round outside the draft, over n nodes per row, the root included.
        draft: seconds of a draft by the widths of its levels.
        once: seconds added to a round that drafts, such as reading what was missed, spread over the rounds that follow.
        available: how often a row gets a draft when asked.
        any_row: how often any row does; otherwise the target's pass has one node.
        own: rows pay for their own nodes, so that one without a draft is as cheap as one that was not asked for.
    """

    verify: Sequence[float]
    draft: Callable[[tuple[int, ...]], float]
    once: float = 0.0
    available: float = 1.0
    any_row: float = 1.0
    own: bool = False

    def times(self, factor: float) -> Costs:
        """These with drafts that take so many times as long."""
        return replace(self, draft=lambda levels: factor * self.draft(levels))


def plain(costs: Costs) -> Plan:
    """Zero drafting."""
    return Plan(chain(0), 1.0, costs.verify[0])


def best_chain(rates: Sequence[float], costs: Costs) -> Plan:
    """Over gamma = 0 .. as many as there are ``rates``, Pr(accepted | its parent was) at each depth, and costs."""
    return max(chains(rates, costs), key=lambda plan: plan.rate)


def chains(rates: Sequence[float], costs: Costs) -> list[Plan]:
    """All chains from zero drafting on, shortest first."""
    plans = [plain(costs)]
    reach, tokens = 1.0, 0.0
    for length, rate in enumerate(rates[: len(costs.verify) - 1], 1):
        reach *= rate
        tokens += reach
        plans.append(priced(chain(length), tokens, (1,) * length, costs))
    return plans


def best_tree(table: Sequence[Sequence[float]], costs: Costs, *, most: int | None = None) -> Plan:
    """Over trees of at most ``most`` drafted nodes, as many levels as ``table`` ``[depth][siblings]`` of p[b] has lines; chains
    included, and zero drafting."""
    most = min(len(costs.verify) - 1, most if most is not None else len(costs.verify) - 1)
    first = best_chain([line[0] for line in table[:most]], costs)
    found: tuple[float, int, int] | None = None
    trees = Likeliest.of if all(line == sorted(line, reverse=True) for line in table) else Program.of
    programs: dict[int, Trees] = {}
    best, worse = 0.0, 0
    for depth in range(1, len(table) + 1):
        if worse == PATIENCE:
            break
        programs[depth] = program = trees(table[:depth], most)
        deepest = 0.0
        for nodes in SIZES:
            if not depth <= nodes <= most:
                continue
            level = (1, *(max(1, nodes // depth) for _ in range(depth - 1)))
            plan = priced(chain(0), program.value(nodes), level, costs, nodes)
            deepest = max(deepest, plan.rate)
            if plan.rate > (found[0] if found else first.rate):
                found = plan.rate, depth, nodes
        best, worse = max(best, deepest), worse + 1 if deepest < best else 0
    if found is None:
        return first
    _, depth, nodes = found
    shape = shape_of(programs[depth].paths(nodes))
    return max(first, priced(shape, programs[depth].value(nodes), widths(shape), costs), key=lambda plan: plan.rate)


def priced(shape: StaticShape, accepted: float, levels: tuple[int, ...], costs: Costs, nodes: int | None = None) -> Plan:
    """A plan of ``shape`` that keeps ``accepted`` drafted tokens where there is a draft, drafted in ``levels`` of such widths."""
    nodes = shape.nodes if nodes is None else nodes
    if costs.own and len(levels) == nodes:
        size = costs.available * nodes
        below = int(size)
        verify = costs.verify[below] + (size - below) * (costs.verify[min(below + 1, nodes)] - costs.verify[below])
    else:
        verify = costs.any_row * costs.verify[nodes] + (1 - costs.any_row) * costs.verify[0]
    return Plan(shape, 1 + costs.available * accepted, verify + costs.draft(levels) + costs.once)


class Trees(Protocol):
    """The best trees of each number of nodes."""

    def value(self, nodes: int) -> float:
        """Accepted tokens to expect of the best tree with ``nodes`` drafted nodes at most."""

    def paths(self, nodes: int) -> list[Path]:
        """Paths of ranks of such a tree."""


@dataclass(frozen=True)
class Likeliest:
    """Nodes by how likely they are to be accepted; every parent comes before its children, and every sibling before later ones.

    Attributes:
        order: paths of ranks.
        sums: accepted tokens to expect of the first 0, 1, … of them.
    """

    order: list[Path]
    sums: list[float]

    @staticmethod
    def of(table: Sequence[Sequence[float]], most: int) -> Likeliest:
        """Of a table in which no sibling promises more than the one before it."""
        nodes = list(likeliest_nodes(table, most))
        return Likeliest([path for path, _ in nodes], list(accumulate((chance for _, chance in nodes), initial=0.0)))

    def value(self, nodes: int) -> float:
        return self.sums[min(nodes, len(self.order))]

    def paths(self, nodes: int) -> list[Path]:
        return self.order[:nodes]


@dataclass(frozen=True)
class Program:
    """The tables of the dynamic program for one number of levels and up to M nodes.

    Attributes:
        values: ``values[d]`` ``[M + 1]`` accepted tokens to expect below a node at depth d, from at most so many descendants.
        splits: ``splits[d][b]`` ``[M + 1]`` how many of them the child of rank b has for itself and what is below it.
    """

    values: list[np.ndarray]
    splits: list[list[np.ndarray]]

    @staticmethod
    def of(table: Sequence[Sequence[float]], most: int) -> Program:
        """From the leaves up: T[d, m] of rank b and later = max over y of p_d[b] (1 + T[d + 1, y - 1]) + that of rank b + 1 with m - y."""
        depth = len(table)
        values = [np.zeros(most + 1) for _ in range(depth + 1)]
        splits: list[list[np.ndarray]] = [[] for _ in range(depth)]
        gap, possible = _gaps(most)
        for level in reversed(range(depth)):
            rest = np.zeros(most + 1)
            for chance in reversed(table[level]):
                own = np.zeros(most + 1)
                own[1:] = chance * (1 + values[level + 1][:-1])
                totals = np.where(possible, own[None] + rest[gap], -1.0)  # [m, y]
                totals[:, 0] = 0.0  # without this child there is none after it
                choice = totals.argmax(1)
                splits[level].insert(0, choice)
                rest = totals[np.arange(most + 1), choice]
            values[level] = rest
        return Program(values, splits)

    def value(self, nodes: int) -> float:
        return float(self.values[0][nodes])

    def paths(self, nodes: int) -> list[Path]:
        """Paths of ranks of a best tree with ``nodes`` drafted nodes at most."""
        found: list[Path] = []

        def below(path: Path, left: int) -> None:
            if len(path) == len(self.splits):
                return
            for rank, split in enumerate(self.splits[len(path)]):
                taken = int(split[left])
                if taken == 0:
                    return
                found.append((*path, rank))
                below((*path, rank), taken - 1)
                left -= taken

        below((), nodes)
        return found


@lru_cache(maxsize=8)
def _gaps(most: int) -> tuple[np.ndarray, np.ndarray]:
    """``[M + 1, M + 1]`` m - y, and where that is possible."""
    gap = np.arange(most + 1)[:, None] - np.arange(most + 1)[None]
    return gap.clip(0), gap >= 0


@lru_cache(maxsize=128)
def chain(length: int) -> StaticShape:
    return TreeShape.chain(length)


def shape_of(paths: Sequence[Path]) -> StaticShape:
    """The shape with a node per path; a chain where it is one."""
    if all(rank == 0 for path in paths for rank in path):
        return chain(len(paths))
    return _shape(tuple(sorted(paths)))


@lru_cache(maxsize=256)
def _shape(paths: tuple[Path, ...]) -> StaticShape:
    return TreeShape.paths(paths)


@lru_cache(maxsize=1024)
def widths(shape: TreeShape) -> tuple[int, ...]:
    """How many nodes each level of a draft of ``shape`` is drafted below."""
    if isinstance(shape, StaticShape):
        return (1, *(level.last - level.first for level in shape.levels[:-1])) if shape.depth else ()
    width = shape.k if isinstance(shape, DynamicShape) else shape.nodes
    return (1, *(min(width, 8) for _ in range(shape.depth - 1)))
