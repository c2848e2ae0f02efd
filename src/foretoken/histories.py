"""The history of every node of a draft tree: its row's committed ids and the tokens on the path from the root to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from .tree import TokenTree


class NodeHistories:
    """The history of every node of R trees, gathered when a processor asks for it.

    A node is addressed by its cell, ``row * N + node``. Token values are never read to the host; the shape of a tree that is
    not a chain is, once.

    Args:
        committed: ``[R, capacity]`` int64 committed ids of every row, from its first prompt token, unpadded.
        lengths: how many of them count, the root (``tree.tokens[:, 0]``) included.
        tree: the nodes, N per row, on the device of ``committed``.

    Raises:
        ValueError: the shapes or devices disagree, or a length is outside ``1..capacity``.
    """

    def __init__(self, committed: Tensor, lengths: Sequence[int], tree: TokenTree) -> None:
        if committed.ndim != 2 or not committed.shape[0] == len(lengths) == tree.rows:
            raise ValueError(f"committed {list(committed.shape)}, {len(lengths)} lengths and a tree of {tree.rows} rows disagree")
        if any(not 1 <= length <= committed.shape[1] for length in lengths):
            raise ValueError(f"lengths {list(lengths)} must lie between 1 and {committed.shape[1]}, the width of committed")
        if committed.device != tree.tokens.device:
            raise ValueError(f"committed is on {committed.device}, the tree on {tree.tokens.device}")
        self.committed, self.lengths, self.tree = committed, list(lengths), tree
        self.rows, self.nodes = tree.rows, tree.nodes
        self._gathered: dict[tuple[int, ...], Tensor] = {}

    @cached_property
    def tokens(self) -> Tensor:
        """``[R, N]`` the tree's tokens, with filler, which may hold anything, as token 0."""
        valid = self.tree.valid
        return self.tree.tokens if valid is None else self.tree.tokens.masked_fill(~valid, 0)

    @cached_property
    def parents(self) -> list[list[int]]:
        """Parent index of every node, on the host; whatever filler holds is made a node that comes before it."""
        if self.tree.chain:
            return [list(range(-1, self.nodes - 1))] * self.rows
        host = self.tree.parents.tolist()
        return [[-1, *(parent if 0 <= parent < node else 0 for node, parent in enumerate(row[1:], 1))] for row in host]

    @cached_property
    def depths(self) -> list[list[int]]:
        """Distance of every node from its root, on the host."""
        if self.tree.chain:
            return [list(range(self.nodes))] * self.rows
        depths = []
        for parents in self.parents:
            mine = [0]
            for parent in parents[1:]:
                mine.append(mine[parent] + 1)
            depths.append(mine)
        return depths

    def parent(self, cell: int) -> int:
        row, node = divmod(cell, self.nodes)
        return row * self.nodes + self.parents[row][node]

    def by_length(self, cells: Iterable[int]) -> dict[int, list[int]]:
        """``cells`` by the length of their history, in their order."""
        groups: dict[int, list[int]] = {}
        for cell in cells:
            row, node = divmod(cell, self.nodes)
            groups.setdefault(self.lengths[row] + self.depths[row][node], []).append(cell)
        return groups

    def levels(self, rows: Sequence[int]) -> list[list[int]]:
        """The cells of ``rows`` at depth 0, 1, ...; filler is left out."""
        valid = None if self.tree.valid is None else self.tree.valid.tolist()
        levels: list[list[int]] = [[] for _ in range(1 + max(max(self.depths[row]) for row in rows))]
        for row in rows:
            for node, depth in enumerate(self.depths[row]):
                if valid is None or valid[row][node]:
                    levels[depth].append(row * self.nodes + node)
        return levels

    def committed_length(self, cell: int) -> int:
        return self.lengths[cell // self.nodes]

    def gather(self, cells: Sequence[int], length: int) -> Tensor:
        """``[G, length]`` int64 histories of ``cells``, a group of :meth:`by_length`."""
        key = tuple(cells)
        if key not in self._gathered:
            self._gathered[key] = self._along_chain(key, length) if self.tree.chain else self._along_paths(key, length)
        return self._gathered[key]

    def blank(self, count: int, length: int) -> Tensor:
        """``[count, length]`` zeros without memory, for processors that look at nothing but the shape."""
        return self.committed.new_zeros(1).expand(count, length)

    def _along_chain(self, cells: Sequence[int], length: int) -> Tensor:
        return take(self._lines[:, :length], [cell // self.nodes for cell in cells])

    @cached_property
    def _lines(self) -> Tensor:
        """``[R, max(lengths) + N - 1]``: committed ids, then the chain. Every history of a chain is a beginning of it."""
        longest = max(self.lengths)
        if min(self.lengths) == longest:
            return torch.cat([self.committed[:, :longest], self.tokens[:, 1:]], 1)
        width = longest + self.nodes - 1
        position = torch.arange(width, device=self.committed.device)[None]
        ends = to_device(self.lengths, self.committed.device)[:, None]
        drafted = self.tokens.gather(1, (position - ends + 1).clamp(0, self.nodes - 1))
        return torch.where(position < ends, pad(self.committed[:, :longest], (0, self.nodes - 1)), drafted)

    def _along_paths(self, cells: Sequence[int], length: int) -> Tensor:
        parts = []
        for committed, group in groupby(cells, self.committed_length):
            members = list(group)
            begin = take(self.committed[:, :committed], [cell // self.nodes for cell in members])
            paths = to_device([self._path(cell, length - committed) for cell in members], begin.device)  # [g, depth]
            parts.append(torch.cat([begin, self.tokens.flatten()[paths]], 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _path(self, cell: int, depth: int) -> list[int]:
        """The cells from the root's child down to ``cell``."""
        path = []
        for _ in range(depth):
            path.append(cell)
            cell = self.parent(cell)
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


def to_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Host integers as an int64 tensor, copied without waiting for the device."""
    host = torch.tensor(values, dtype=torch.long)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
