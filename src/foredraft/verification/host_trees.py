"""The trees of a round as the host knows them: what the rules that go through a tree node by node loop over.

Where all rows share a layout that the host knows (a chain, or a static shape) nothing is read from the device; otherwise the
parents are read once. What is filler is told by ``valid`` on the device, and costs trips that change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from foredraft.shapes import depths_of
from foredraft.tree import TokenTree, children_of

Parents = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Common:
    """One tree that holds every row's tree: a node's place is its rank among its siblings, and its parent's place.

    Attributes:
        parents: of the U nodes, those before their children, siblings in the order of the rows.
        nodes: ``[R, U]`` int64, the number that each has in a row's own tree; None where it is the same number everywhere.
        present: ``[R, U]`` bool, whether a row has it, as a real node below real nodes; None where every row has all.
    """

    parents: Parents
    nodes: Tensor | None
    present: Tensor | None


@dataclass(frozen=True)
class Visit:
    """A step of a depth-first walk: ``node`` at ``depth`` is entered, or left after its children."""

    node: int
    depth: int
    leaf: bool
    leaving: bool


def all_parents(tree: TokenTree) -> list[Parents]:
    """The parents of each row, or of all rows at once where they are the same."""
    if tree.layout is not None:
        return [tree.layout]
    rows = [tuple(parents) for parents in tree.parents.tolist()]
    return rows[:1] if len(set(rows)) == 1 else rows


@dataclass(frozen=True, eq=False)
class HostRows:
    """The trees of R rows as lists, for rules that walk them on the host.

    Attributes:
        tokens: per row, of every node.
        children: per row and node; children come after their parents.
        valid: per row, whether a node is real; None where all are.
    """

    tokens: list[list[int]]
    children: Sequence[Sequence[Sequence[int]]]
    valid: list[list[bool]] | None

    @staticmethod
    def of(tree: TokenTree) -> HostRows:
        """``tree`` on a CPU, whose :attr:`~foredraft.tree.TokenTree.parent_lists` are known."""
        assert tree.parent_lists is not None
        children = [children_of(parents) for parents in tree.parent_lists]
        return HostRows(tree.tokens.tolist(), children, None if tree.valid is None else tree.valid.tolist())


def common(tree: TokenTree) -> Common:
    """The tree that holds every row's tree."""
    rows = all_parents(tree)
    if len(rows) == 1:
        return Common(rows[0], None, real(tree))
    places: dict[tuple[int, int], int] = {}
    merged = [_placed(parents, places) for parents in rows]
    own = torch.full((len(rows), 1 + len(places)), -1)
    for line, at in zip(own, merged):
        line[at] = torch.arange(len(at))
    own = own.to(tree.tokens.device)
    present, nodes = own >= 0, own.clamp(min=0)
    valid = real(tree)
    return Common((-1, *(parent for parent, _ in places)), nodes, present if valid is None else present & valid.gather(1, nodes))


def _placed(parents: Parents, places: dict[tuple[int, int], int]) -> list[int]:
    """The common node of each of a row's nodes; ``places`` gives it by (parent, rank) and grows."""
    at: list[int] = [0]
    ranks: dict[int, int] = {}
    for parent in parents[1:]:
        above = at[parent]
        rank = ranks[above] = ranks.get(above, -1) + 1
        at.append(places.setdefault((above, rank), 1 + len(places)))
    return at


def real(tree: TokenTree) -> Tensor | None:
    """``[R, N]`` bool, nodes that are no filler and hang below none; None where all are real."""
    return None if tree.valid is None else ~(tree.ancestors & ~tree.valid[:, None]).any(-1)


@lru_cache(maxsize=256)
def visits(parents: Parents) -> tuple[Visit, ...]:
    """Depth first, children in draw order; the root is left last and never entered."""
    children = children_of(parents)
    found: list[Visit] = []
    stack = [Visit(0, 0, not children[0], leaving=False)]
    while stack:
        visit = stack.pop()
        found.append(visit)
        if not visit.leaving:
            stack.append(Visit(visit.node, visit.depth, visit.leaf, leaving=True))
            stack += [Visit(child, visit.depth + 1, not children[child], leaving=False) for child in reversed(children[visit.node])]
    return tuple(found[1:])


@dataclass(frozen=True, eq=False)
class Trials:
    """The children of every node, in draw order.

    Attributes:
        children: ``[R or 1, N, K]`` int64 node numbers, -1 where there are fewer than K.
        widths: for each depth, the most children that a node there has.
    """

    children: Tensor
    widths: tuple[int, ...]


def trials(tree: TokenTree) -> Trials:
    """What is tried from each node on."""
    return _trials_of(tuple(all_parents(tree)), tree.tokens.device)


@lru_cache(maxsize=256)
def _trials_of(rows: tuple[Parents, ...], device: torch.device) -> Trials:
    below = [list(zip(children_of(parents), depths_of(parents))) for parents in rows]
    most = max(1, *(len(children) for row in below for children, _ in row))
    table = [[[*children, *[-1] * (most - len(children))] for children, _ in row] for row in below]
    height = max(depth for row in below for _, depth in row)
    widths = [max(len(children) for row in below for children, depth in row if depth == level) for level in range(height)]
    with torch.inference_mode(False):
        return Trials(torch.tensor(table, device=device), tuple(widths))
