"""The immutable layer of a back-off n-gram model: a few sorted arrays. See :mod:`foredraft.drafters.ngram_model`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = 0
SHIFT = 32
IDS = 1 << SHIFT


@dataclass(frozen=True)
class Table:
    """The immutable layer. Nodes are numbered by depth, then parent, then token, so `edges` is sorted and leads node i + 1."""

    edges: NDArray[np.uint64]  # [nodes - 1]
    first: NDArray[np.int64]  # [nodes + 1]: successors of node i are first[i] … first[i + 1], most frequent first
    tokens: NDArray[np.uint32]  # [ngrams]
    counts: NDArray[np.int64]  # [ngrams]

    @cached_property
    def nodes(self) -> int:
        return len(self.first) - 1

    def child(self, edge: int) -> int | None:
        key = np.uint64(edge)
        index = int(self.edges.searchsorted(key))
        return index + 1 if index < len(self.edges) and self.edges[index] == key else None

    def span(self, node: int) -> tuple[int, int]:
        if node >= self.nodes:
            return 0, 0
        return int(self.first[node]), int(self.first[node + 1])

    def top(self, node: int, k: int) -> list[tuple[int, int]]:
        start, end = self.span(node)
        if start == end:
            return []
        end = min(end, start + k)
        return list(zip(self.tokens[start:end].tolist(), self.counts[start:end].tolist()))

    def count_of(self, node: int, token: int) -> int:
        start, end = self.span(node)
        if start == end:  # most contexts that are counted while text is made are new
            return 0
        (hits,) = np.nonzero(self.tokens[start:end] == token)
        return int(self.counts[start + hits[0]]) if len(hits) else 0

    @cached_property
    def total(self) -> NDArray[np.int64]:
        """How many successors each node counted in all."""
        return np.diff(np.concatenate(([0], np.cumsum(self.counts)))[self.first])

    # Construction

    @classmethod
    def empty(cls) -> Table:
        return cls(np.empty(0, np.uint64), np.zeros(2, np.int64), np.empty(0, np.uint32), np.empty(0, np.int64))

    @classmethod
    def count(cls, sequences: Sequence[NDArray[np.int64]], order: int) -> Table:
        """Counts level by level: the nodes of one depth, for all positions at once, come from those of the depth above."""
        stream = np.concatenate(sequences).astype(np.uint64)
        lengths = np.array([len(sequence) for sequence in sequences])
        history = np.arange(len(stream)) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # tokens before each position
        positions = np.arange(len(stream))
        node = np.zeros(len(stream), np.uint64)  # of the context at each of `positions`
        edges, pairs, repeats = [], [], []
        nodes = 1
        for depth in range(order):
            if depth:
                inside = history[positions] >= depth
                positions, node = positions[inside], node[inside]
                level, inverse = np.unique(node << np.uint64(SHIFT) | stream[positions - depth], return_inverse=True)
                node = inverse.astype(np.uint64) + np.uint64(nodes)
                nodes += len(level)
                edges.append(level)
            pair, repeat = np.unique(node << np.uint64(SHIFT) | stream[positions], return_counts=True)
            pairs.append(pair)
            repeats.append(repeat)
        return cls._from_pairs(np.concatenate(edges), np.concatenate(pairs), np.concatenate(repeats), nodes)

    @classmethod
    def _from_pairs(cls, edges: NDArray[np.uint64], pairs: NDArray[np.uint64], counts: NDArray[np.int64], nodes: int) -> Table:
        """From (node, successor) pairs in any order; a successor's edge looks like a child's: `node << 32 | token`."""
        node, token = _split(pairs)
        order = np.lexsort((token, -counts, node))
        first = np.concatenate(([0], np.cumsum(np.bincount(node, minlength=nodes))))
        return cls(edges, first.astype(np.int64), token[order].astype(np.uint32), counts[order].astype(np.int64))

    def pairs(self) -> NDArray[np.uint64]:
        node = np.repeat(np.arange(self.nodes, dtype=np.uint64), np.diff(self.first))
        return node << np.uint64(SHIFT) | self.tokens.astype(np.uint64)

    def merged(self, new_nodes: dict[int, int], delta: dict[int, dict[int, int]]) -> Table:
        """This table plus what was counted on top of it."""
        edges = np.concatenate((self.edges, np.array(list(new_nodes), dtype=np.uint64)))
        grown = [(node << SHIFT | token, count) for node, row in delta.items() for token, count in row.items()]
        keys, counts = (np.array(column) for column in zip(*grown))
        pairs, where = np.unique(np.concatenate((self.pairs(), keys.astype(np.uint64))), return_inverse=True)
        total = np.zeros(len(pairs), np.int64)
        np.add.at(total, where, np.concatenate((self.counts, counts)))
        return self._renumbered(edges, np.ones(len(edges), bool), pairs, total)

    def pruned(self, min_count: int, successors: int | None) -> Table:
        node = np.repeat(np.arange(self.nodes), np.diff(self.first))
        rank = np.arange(len(self.tokens)) - self.first[node]
        keep = (self.counts >= min_count) & (rank < (successors or len(self.tokens) + 1)) | (node == ROOT)
        # A successor of a context follows its suffixes at least as often, so the suffixes of what is kept are kept.
        alive = np.zeros(self.nodes, bool)
        alive[node[keep]] = True
        return self._renumbered(self.edges, alive[1:], self.pairs()[keep], self.counts[keep])

    @classmethod
    def _renumbered(
        cls, edges: NDArray[np.uint64], alive: NDArray[np.bool_], pairs: NDArray[np.uint64], counts: NDArray[np.int64]
    ) -> Table:
        """Gives the nodes that stay (edge i leads to node i + 1; parents come before children) their numbers by depth."""
        parent, token = _split(edges)
        number = np.full(len(edges) + 1, -1, np.int64)  # old node -> new node
        number[ROOT] = ROOT
        levels = [np.empty(0, np.uint64)]
        nodes, previous = 1, np.zeros(len(edges) + 1, bool)
        previous[ROOT] = True
        while True:
            (level,) = np.nonzero(previous[parent] & alive)
            if not len(level):
                break
            keys = number[parent[level]].astype(np.uint64) << np.uint64(SHIFT) | token[level].astype(np.uint64)
            order = np.argsort(keys)
            levels.append(keys[order])
            number[level[order] + 1] = np.arange(nodes, nodes + len(level))
            nodes += len(level)
            previous[:] = False
            previous[level + 1] = True
        node, successor = _split(pairs)
        pairs = number[node].astype(np.uint64) << np.uint64(SHIFT) | successor.astype(np.uint64)
        # Without this the pairs of a node that lost its parent would move to a wrong one; `pruned` says why there are none.
        pairs, counts = pairs[number[node] >= 0], counts[number[node] >= 0]
        return cls._from_pairs(np.concatenate(levels), pairs, counts, nodes)

    # Files

    def to_arrays(self) -> list[NDArray[Any]]:
        """What :meth:`from_arrays` takes, in the narrowest integers that hold it."""
        parent, token = _split(self.edges)
        children = np.bincount(parent, minlength=self.nodes)
        return [_narrow(array) for array in (children, token, np.diff(self.first), self.tokens, self.counts)]

    @classmethod
    def from_arrays(
        cls, children: NDArray[Any], edges: NDArray[Any], successors: NDArray[Any], tokens: NDArray[Any], counts: NDArray[Any]
    ) -> Table:
        """From the number of children and of successors of each node, the tokens of the edges, and the successors with their counts."""
        parent = np.repeat(np.arange(len(children), dtype=np.uint64), children.astype(np.int64))
        first = np.concatenate(([0], np.cumsum(successors.astype(np.int64))))
        return cls(parent << np.uint64(SHIFT) | edges.astype(np.uint64), first, tokens.astype(np.uint32), counts.astype(np.int64))


def _split(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return (keys >> np.uint64(SHIFT)).astype(np.int64), (keys & np.uint64(IDS - 1)).astype(np.int64)


def _narrow(array: NDArray[Any]) -> NDArray[Any]:
    largest = int(array.max(initial=0))
    return array.astype(next(kind for kind in (np.uint8, np.uint16, np.uint32, np.uint64) if largest <= np.iinfo(kind).max))
