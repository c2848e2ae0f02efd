"""The shape with the most expected tokens per second, zero drafting included.

Chains are tried one by one. Trees are Sequoia's (Chen et al. 2024): the tree of m nodes and at most d levels with the largest expected
number of accepted tokens, and then the m and d with the largest rate under measured costs. Unlike there, p[b] may differ from depth to
depth. No sibling promises more than the one before it, so the best tree of m nodes consists of the m likeliest ones. Pure functions of
numbers: no model, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

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
        verify: ``verify[n - 1]`` seconds of a round outside the draft, over a chain of n nodes per row, the root included.
        draft: seconds of a draft by the widths of its levels.
        once: seconds added to a round that drafts, such as reading what was missed, spread over the rounds that follow.
        available: how often a row gets a draft when asked.
        any_row: how often any row does; otherwise the target's pass has one node.
        own: rows pay for their own nodes, so that one without a draft is as cheap as one that was not asked for.
        trees: as ``verify``, over trees that branch; those of chains where nothing else is known.
        plain: of a round that is planned without a draft, if it takes less than one that gets none.
    """

    verify: Sequence[float]
    draft: Callable[[tuple[int, ...]], float]
    once: float = 0.0
    available: float = 1.0
    any_row: float = 1.0
    own: bool = False
    trees: Sequence[float] = ()
    plain: float | None = None

    def times(self, factor: float) -> Costs:
        """These with drafts that take so many times as long."""
        return replace(self, draft=lambda levels: factor * self.draft(levels))


def plain(costs: Costs) -> Plan:
    """Zero drafting."""
    return Plan(chain(0), 1.0, costs.verify[0] if costs.plain is None else costs.plain)


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


def best_tree(table: Sequence[Sequence[float]], costs: Costs) -> Plan:
    """Over trees of at most as many levels as ``table`` ``[depth][siblings]`` of p[b] has lines; chains included, and zero drafting. No
    sibling promises more than the one before it."""
    most = len(costs.verify) - 1
    first = best_chain([line[0] for line in table[:most]], costs)
    found, paths, accepted = first, list[Path](), 0.0
    best, worse = 0.0, 0
    for depth in range(1, len(table) + 1):
        if worse == PATIENCE:
            break
        likeliest = list(likeliest_nodes(table[:depth], most))
        sums = list(accumulate((chance for _, chance in likeliest), initial=0.0))
        deepest = 0.0
        for nodes in SIZES:
            if not depth <= nodes <= most:
                continue
            level = (1, *(max(1, nodes // depth) for _ in range(depth - 1)))
            reached = sums[min(nodes, len(likeliest))]
            plan = priced(chain(0), reached, level, costs, nodes)
            deepest = max(deepest, plan.rate)
            if plan.rate > found.rate:
                found, paths, accepted = plan, [path for path, _ in likeliest[:nodes]], reached
        best, worse = max(best, deepest), worse + 1 if deepest < best else 0
    if not paths:
        return first
    shape = shape_of(paths)
    return max(first, priced(shape, accepted, widths(shape), costs), key=lambda plan: plan.rate)


def priced(shape: StaticShape, accepted: float, levels: tuple[int, ...], costs: Costs, nodes: int | None = None) -> Plan:
    """A plan of ``shape`` that keeps ``accepted`` drafted tokens where there is a draft, drafted in ``levels`` of such widths."""
    nodes = shape.nodes if nodes is None else nodes
    if costs.own and len(levels) == nodes:
        size = costs.available * nodes
        below = int(size)
        verify = costs.verify[below] + (size - below) * (costs.verify[min(below + 1, nodes)] - costs.verify[below])
    else:
        whole = costs.verify if len(levels) == nodes or not costs.trees else costs.trees
        verify = costs.any_row * whole[nodes] + (1 - costs.any_row) * costs.verify[0]
    return Plan(shape, 1 + costs.available * accepted, verify + costs.draft(levels) + costs.once)


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
