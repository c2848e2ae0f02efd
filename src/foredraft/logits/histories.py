"""The history of every node of a draft tree: its row's committed ids and the tokens on the path from the root to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby, pairwise
from operator import add

import torch
from torch import Tensor

from foredraft.device import to_device
from foredraft.shapes import depths_of
from foredraft.tree import TokenTree


class NodeHistories:
    """The history of the nodes ``first``.. of R trees, gathered when a processor asks for it.

    A node is addressed by its cell, ``row * nodes + node - first``, where ``nodes`` is N - ``first``. Token values are never read
    to the host; the shape of a tree that is not a chain is, once.

    Args:
        committed: ``[R, width]`` int64 committed ids of every row, from its first prompt token, unpadded.
        lengths: how many of them count, the root (``tree.tokens[:, 0]``) included.
        tree: N nodes per row, on the device of ``committed``.
        first: the nodes before it are there as history only.
        ends: per row the tokens that end it; empty for none.
    """

    def __init__(
        self, committed: Tensor, lengths: Sequence[int], tree: TokenTree, first: int = 0, ends: Sequence[frozenset[int]] = ()
    ) -> None:
        self.committed, self.lengths, self.tree, self.first = committed, list(lengths), tree, first
        self.ends = ends
        self.rows, self.nodes = tree.rows, tree.nodes - first
        self._gathered: dict[tuple[int, ...], Tensor] = {}

    @cached_property
    def tokens(self) -> Tensor:
        """``[R, N]`` the tree's tokens, with filler, which may hold anything, as token 0."""
        valid = self.tree.valid
        return self.tree.tokens if valid is None else self.tree.tokens.masked_fill(~valid, 0)

    @cached_property
    def parents(self) -> list[list[int]]:
        """Parent index of every node, on the host; whatever filler holds is made a node that comes before it."""
        if self.tree.layout is not None:
            return [list(self.tree.layout)] * self.rows
        host = self.tree.parents.tolist()
        return [[-1, *(parent if 0 <= parent < node else 0 for node, parent in enumerate(row[1:], 1))] for row in host]

    @property
    def valid(self) -> Tensor | None:
        """``[R, nodes]`` bool, False at filler; None if there is none."""
        return None if self.tree.valid is None else self.tree.valid[:, self.first :]

    @cached_property
    def depths(self) -> list[list[int]]:
        """Distance of every node from its root, on the host."""
        if self.tree.layout is not None:
            return [depths_of(self.tree.layout)] * self.rows
        return [depths_of(parents) for parents in self.parents]

    def place(self, cell: int) -> tuple[int, int]:
        """Row and node."""
        row, node = divmod(cell, self.nodes)
        return row, node + self.first

    def parent(self, cell: int) -> int | None:
        """The parent's cell; None for the root and for a node whose parent lies before ``first``."""
        row, node = self.place(cell)
        parent = self.parents[row][node] - self.first
        return row * self.nodes + parent if parent >= 0 else None

    def token(self, cells: Sequence[int]) -> Tensor:
        """``[len(cells)]`` the tokens of ``cells``."""
        return take(self.tokens[:, self.first :].reshape(-1), cells)

    def by_length(self, cells: Iterable[int]) -> dict[int, list[int]]:
        """``cells`` by the length of their history, in their order."""
        groups: dict[int, list[int]] = {}
        for cell in cells:
            row, node = self.place(cell)
            groups.setdefault(self.lengths[row] + self.depths[row][node], []).append(cell)
        return groups

    def levels(self, rows: Sequence[int]) -> list[list[int]]:
        """The cells of ``rows`` by depth, from the least on; filler is left out, and what a row would have ended before."""
        valid = None if self.valid is None else self.valid.tolist()
        levels: dict[int, list[int]] = {}
        for row in rows:
            over = self._over(row)
            for node, depth in enumerate(self.depths[row][self.first :]):
                if (valid is None or valid[row][node]) and not over[self.first + node]:
                    levels.setdefault(depth, []).append(row * self.nodes + node)
        return [levels[depth] for depth in sorted(levels)]

    def _over(self, row: int) -> list[bool]:
        """Per node of the tree, whether its path from the root holds a token that ends the row."""
        nodes = self.tree.nodes
        if nodes == 1 or not self.ends or not self.ends[row]:
            return [False] * nodes
        ends = to_device(sorted(self.ends[row]), self.tokens.device)
        over = [False, *torch.isin(self.tokens[row, 1:], ends).tolist()]
        for node, parent in enumerate(self.parents[row][1:], 1):
            over[node] = over[node] or over[parent]
        return over

    def gather(self, cells: Sequence[int], length: int) -> Tensor:
        """``[G, length]`` int64 histories of ``cells``, a group of :meth:`by_length`."""
        key = (length, *cells)
        if key not in self._gathered:
            self._gathered[key] = self._along_paths(cells, length)
        return self._gathered[key]

    def padded(self, cells: Sequence[int], fill: int | None) -> Tensor:
        """``[G, longest]`` int64 histories of any lengths, padded on the left with ``fill``, or with their own last token."""
        key = (0, *cells)
        if key not in self._gathered:
            self._gathered[key] = self._to_the_right(cells)
        ids = self._gathered[key]
        return torch.where(ids < 0, ids[:, -1:], ids) if fill is None else torch.where(ids < 0, fill, ids)

    def _to_the_right(self, cells: Sequence[int]) -> Tensor:
        """Histories with -1 before them."""
        places = [self.place(cell) for cell in cells]
        depths = [self.depths[row][node] for row, node in places]
        ends = [self.lengths[row] for row, _ in places]
        width, deepest = max(map(add, ends, depths)), max(depths)
        lines = [
            [row, width - end - depth, *[-1] * (deepest - depth), *self.path(cell, depth)]
            for cell, (row, _), end, depth in zip(cells, places, ends, depths)
        ]
        packet = to_device(lines, self.committed.device)
        rows, shifts, paths = packet[:, :1], packet[:, 1:2], packet[:, 2:]  # [G, 1] and [G, deepest]
        source = torch.arange(width, device=rows.device) - shifts  # [G, width], an index into the committed ids, and then the path
        capacity = self.committed.shape[1]
        ids = self.committed.flatten()[rows * capacity + source.clamp(0, capacity - 1)].masked_fill(source < 0, -1)
        tail = ids[:, width - deepest :]
        tail.copy_(torch.where(paths < 0, tail, self.tokens.flatten()[paths.clamp(min=0)]))
        return ids

    def blank(self, count: int, length: int) -> Tensor:
        """``[count, length]`` zeros without memory, for processors that look at nothing but the shape."""
        return self.committed.new_zeros(1).expand(count, length)

    def _along_paths(self, cells: Sequence[int], length: int) -> Tensor:
        parts = []
        for committed, group in groupby(cells, lambda cell: self.lengths[cell // self.nodes]):
            members = list(group)
            begin = take(self.committed[:, :committed], [cell // self.nodes for cell in members])
            paths = to_device([self.path(cell, length - committed) for cell in members], begin.device)  # [g, depth]
            parts.append(torch.cat([begin, self.tokens.flatten()[paths]], 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def path(self, cell: int, depth: int) -> list[int]:
        """From the root's child down to ``cell``, as indices into ``tokens.flatten()``."""
        row, node = self.place(cell)
        path = []
        for _ in range(depth):
            path.append(row * self.tree.nodes + node)
            node = self.parents[row][node]
        return path[::-1]


def take(block: Tensor, index: Sequence[int]) -> Tensor:
    """``block[index]`` along dimension 0: a view when the indices are evenly spaced, a copy otherwise."""
    even = as_slice(index)
    return block[even] if even is not None else block.index_select(0, to_device(index, block.device))


def put(block: Tensor, index: Sequence[int], values: Tensor) -> None:
    """``block[index] = values`` along dimension 0, in place."""
    even = as_slice(index)
    if even is not None:
        block[even] = values
    else:
        block.index_copy_(0, to_device(index, block.device), values.to(block.dtype))


def as_slice(index: Sequence[int]) -> slice | None:
    """The slice that picks ``index`` (not empty), if there is one."""
    step = index[1] - index[0] if len(index) > 1 else 1
    if step <= 0 or any(after - before != step for before, after in pairwise(index)):
        return None
    return slice(index[0], index[-1] + 1, step)
