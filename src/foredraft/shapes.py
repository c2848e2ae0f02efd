"""Tree shapes: how many tokens a drafter may propose, and where.

A static shape fixes every node beforehand, whatever is drafted: a chain, a product of sibling counts (Medusa, Cai et al. 2024),
or a list of paths. A dynamic one lets the draft's own probabilities decide: expand the k best nodes of each level and keep the
best ``total`` of all (EAGLE-2, Li et al. 2024), or grow until another level gains too little (OPT-Tree, Wang et al. 2024).
Because it drops nodes for the tokens drawn there, only the match rule is exact for it.

A shape is written as it prints: ``chain(5)``, ``product(4,2,1)``, ``paths(0,1,0.0)``, ``dynamic(depth=5,k=4,total=16)``,
``opt(total=16,depth=8,delta=0.05)``.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from foredraft.errors import ConfigurationError, unknown, whole

MOST_NODES = 4096
Path = tuple[int, ...]
"""Ranks among siblings from the root down to a node."""


class TreeShape:
    """How many tokens a drafter may propose, and where they stand in the tree.

    Make one with :meth:`chain`, :meth:`product`, :meth:`paths`, :meth:`dynamic`, :meth:`opt` or :meth:`parse`.
    """

    @property
    def depth(self) -> int:
        """Levels below the root."""
        raise TypeError(f"{type(self).__name__} must define depth")

    @property
    def nodes(self) -> int:
        """Most draft nodes, without the root."""
        raise TypeError(f"{type(self).__name__} must define nodes")

    @property
    def grown_nodes(self) -> int:
        """Most draft nodes that a model reads while it grows the tree, if they are more than :attr:`nodes`."""
        return self.nodes

    @property
    def is_chain(self) -> bool:
        return False

    @property
    def static(self) -> bool:
        """Every node is known before drafting, so no node is dropped for its token."""
        return False

    def truncate(self, depth: int) -> TreeShape:
        """This shape without the levels below ``depth``."""
        raise TypeError(f"{type(self).__name__} must define truncate(depth)")

    @staticmethod
    def chain(length: int) -> StaticShape:
        """A chain of γ = ``length`` tokens; 0 is plain decoding."""
        whole("chain: length", length, least=0)
        _bounded(length, f"chain({length})")
        return StaticShape(tuple(range(-1, length)), f"chain({length})")

    @staticmethod
    def product(*counts: int) -> StaticShape:
        """Every node of level i has ``counts[i]`` children."""
        for count in counts:
            whole("product: a sibling count", count)
        if not counts:
            raise ConfigurationError("product() needs a sibling count per level, for instance product(4,2,1)")
        parents, level = [-1], [0]
        for count in counts:
            first = len(parents)
            _bounded(first - 1 + len(level) * count, f"product({','.join(map(str, counts))})")
            parents += [node for node in level for _ in range(count)]
            level = list(range(first, len(parents)))
        return StaticShape(tuple(parents), f"product({','.join(map(str, counts))})")

    @staticmethod
    def paths(paths: Iterable[Sequence[int]]) -> StaticShape:
        """A node per path of sibling ranks: ``[(0,), (0, 0), (1,)]`` is the best token, its best continuation, and the second best."""
        wanted = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        for rank in (rank for path in wanted for rank in path):
            whole("paths: a rank", rank, least=0)
        _bounded(len(wanted), "paths(...)")
        if not wanted or not all(wanted):
            raise ConfigurationError("paths need at least one path, and none may be empty; for instance [(0,), (0, 0), (1,)]")
        number = {(): 0, **{path: node for node, path in enumerate(wanted, 1)}}
        for path in wanted:
            for needed, what in ((path[:-1], "its beginning"), ((*path[:-1], path[-1] - 1), "the sibling ranked before it")):
                if needed and needed[-1] >= 0 and needed not in number:
                    raise ConfigurationError(f"paths hold {_dotted(path)} without {what}, {_dotted(needed)}; add that one too")
        return StaticShape((-1, *(number[path[:-1]] for path in wanted)), f"paths({','.join(map(_dotted, wanted))})")

    @staticmethod
    def dynamic(depth: int = 5, k: int = 4, total: int = 16) -> DynamicShape:
        """Expand the ``k`` best nodes of each of ``depth`` levels to ``k`` children, then keep the ``total`` best of all (EAGLE-2)."""
        for name, value in (("depth", depth), ("k", k), ("total", total)):
            whole(f"dynamic: {name}", value)
        if total > k + (depth - 1) * k * k:
            raise ConfigurationError(
                f"dynamic(depth={depth},k={k}) grows {k + (depth - 1) * k * k} nodes; total={total} must not be above that"
            )
        _bounded(k + (depth - 1) * k * k, f"dynamic(depth={depth},k={k},total={total})")
        return DynamicShape(depth, k, total)

    @staticmethod
    def opt(total: int = 16, depth: int = 8, delta: float = 0.05, floor: float = 0.0, k: int | None = None) -> DynamicShape:
        """Keep the ``total`` best nodes; grow level by level, at most ``depth``, while their summed probability, the expected number
        of accepted tokens, rises by more than ``delta`` (OPT-Tree). Of each level the ``k`` best nodes are expanded (None: ``total``);
        nodes whose path is less likely than ``floor`` are left out."""
        k = total if k is None else k
        for name, value in (("total", total), ("depth", depth), ("k", k)):
            whole(f"opt: {name}", value)
        for name, share in (("delta", delta), ("floor", floor)):
            if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
                raise ConfigurationError(f"opt: {name} must be a number from 0 to 1, got {share!r}")
        _bounded(k + (depth - 1) * k * k, f"opt(total={total},depth={depth})")
        return DynamicShape(depth, k, min(total, k + (depth - 1) * k * k), float(delta), float(floor))

    @staticmethod
    def parse(shape: TreeShape | str) -> TreeShape:
        """The shape that a string describes; a shape is returned as it is.

        Raises:
            ConfigurationError: unknown name or option, or numbers that make no tree.
        """
        if isinstance(shape, TreeShape):
            return shape
        match = re.fullmatch(r"\s*([\w-]+)\s*\((.*)\)\s*", shape) if isinstance(shape, str) else None
        if match is None or match[1] not in ("paths", *MAKERS):
            word = re.match(r"\s*[\w-]*", str(shape))
            raise unknown("unknown shape", shape, ["auto", "paths", *MAKERS], word and word[0], f"write {EXAMPLES}, or pass a TreeShape")
        try:
            if match[1] == "paths":
                return TreeShape.paths([tuple(map(int, part.split("."))) for part in match[2].split(",") if part.strip()])
            positional, named = _numbers(match[2])
            return MAKERS[match[1]](*positional, **named)
        except (TypeError, ValueError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"cannot parse shape {shape!r}: {error}; write {EXAMPLES}") from error


@dataclass(frozen=True)
class Level:
    """The nodes at one depth: ``first`` to ``last``, below those from ``above`` on. Child i hangs below node ``parents[i]`` as its
    sibling number ``ranks[i]``."""

    above: int
    first: int
    last: int
    parents: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class StaticShape(TreeShape):
    """The ``parents`` of every node, the root (-1) first, level by level; siblings in the order in which they are drawn."""

    parents: tuple[int, ...]
    label: str

    def __str__(self) -> str:
        return self.label

    @cached_property
    def depth(self) -> int:  # type: ignore[override]
        return max(depths_of(self.parents))

    @property
    def nodes(self) -> int:
        return len(self.parents) - 1

    @cached_property
    def is_chain(self) -> bool:  # type: ignore[override]
        return self.depth == self.nodes

    @property
    def static(self) -> bool:
        return True

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        depths = depths_of(self.parents)
        levels = []
        for depth in range(1, self.depth + 1):
            above, first = depths.index(depth - 1), depths.index(depth)
            last = first + depths.count(depth)
            parents = self.parents[first:last]
            ranks = tuple(parents[:index].count(parent) for index, parent in enumerate(parents))
            levels.append(Level(above, first, last, parents, ranks))
        return tuple(levels)

    @cached_property
    def siblings(self) -> int:
        """Children that a node has at most."""
        return 1 + max((max(level.ranks) for level in self.levels), default=-1)

    def truncate(self, depth: int) -> StaticShape:
        return self if depth >= self.depth else _cut(self, max(0, depth))


@lru_cache(maxsize=256)
def _cut(shape: StaticShape, depth: int) -> StaticShape:
    kept = sum(each <= depth for each in depths_of(shape.parents))
    return StaticShape(shape.parents[:kept], f"{shape.label} to depth {depth}")


@dataclass(frozen=True)
class DynamicShape(TreeShape):
    """Grown by the draft's probabilities: ``k`` nodes of each level are expanded to ``k`` children each, the best ``total`` stay;
    with ``delta`` growth ends where another level raises their summed probability by no more than that, and paths less likely than
    ``floor`` are left out. Where there are ``prices``, what 0, 1, … ``total`` nodes cost in tokens, as many are kept as leave most of
    their summed probability."""

    levels: int
    k: int
    total: int
    delta: float | None = None
    floor: float = 0.0
    prices: tuple[float, ...] = ()

    def __str__(self) -> str:
        if self.delta is None:
            return f"dynamic(depth={self.levels},k={self.k},total={self.total})"
        more = f",floor={self.floor:g}" if self.floor else ""
        more += f",k={self.k}" if self.k != self.total else ""
        return f"opt(total={self.total},depth={self.levels},delta={self.delta:g}{more})"

    @property
    def depth(self) -> int:
        return self.levels

    @property
    def nodes(self) -> int:
        return self.total

    @property
    def grown_nodes(self) -> int:
        return max(self.total, self.k * (self.levels - 1))

    def truncate(self, depth: int) -> DynamicShape:
        if depth >= self.levels:
            return self
        total = min(self.total, self.k + (depth - 1) * self.k * self.k)
        return DynamicShape(depth, self.k, total, self.delta, self.floor, self.prices[: total + 1])

    def worthwhile(self, scores: Sequence[float]) -> int:
        """How many of the best nodes to keep, of which ``scores`` are the log-probabilities of their paths, best first."""
        if not self.prices:
            return min(self.total, len(scores))
        best, most, so_far = 0, -self.prices[0], 0.0
        for count, (score, price) in enumerate(zip(scores, self.prices[1:]), 1):
            so_far += math.exp(score)
            if so_far - price > most:
                best, most = count, so_far - price
        return best


def depths_of(parents: Sequence[int]) -> list[int]:
    """Distance from the root of every node of ``parents``, which come before their children."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def likeliest_nodes(table: Sequence[Sequence[float]], most: int) -> Iterator[tuple[Path, float]]:
    """At most ``most`` nodes, as paths of ranks, and how likely each is to be accepted, likeliest first; none that never is. No sibling
    promises more than the one before it."""
    queue: list[tuple[float, int, Path, float]] = []  # -probability, depth, path, probability of its parent

    def push(path: Path, above: float) -> None:
        level, rank = len(path) - 1, path[-1]
        if level < len(table) and rank < len(table[level]) and above * table[level][rank] > 0:
            heapq.heappush(queue, (-above * table[level][rank], len(path), path, above))

    push((0,), 1.0)
    for _ in range(most):
        if not queue:
            return
        probability, _, path, above = heapq.heappop(queue)
        yield path, -probability
        push((*path, 0), -probability)
        push((*path[:-1], path[-1] + 1), above)


EXAMPLES = "chain(5), product(4,2,1), paths(0,1,0.0), dynamic(depth=5,k=4,total=16) or opt(total=16,depth=8,delta=0.05)"


def _numbers(text: str) -> tuple[list[Any], dict[str, Any]]:
    """The positional and named arguments of ``1, 2, k=3``."""
    positional, named = [], {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = part.rpartition("=")
        number = int(value) if re.fullmatch(r"\s*[+-]?\d+\s*", value) else float(value)
        if equals:
            named[name.strip()] = number
        else:
            positional.append(number)
    return positional, named


MAKERS: dict[str, Callable[..., TreeShape]] = {
    "chain": TreeShape.chain,
    "product": TreeShape.product,
    "dynamic": TreeShape.dynamic,
    "opt": TreeShape.opt,
}


def _dotted(path: Sequence[int]) -> str:
    return ".".join(map(str, path))


def _bounded(nodes: int, shape: str) -> None:
    if nodes > MOST_NODES:
        raise ConfigurationError(f"{shape} has {nodes} nodes; a tree may have {MOST_NODES} at most")
