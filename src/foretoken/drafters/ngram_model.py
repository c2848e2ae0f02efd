"""A back-off n-gram model over token ids: counts, predictions, probabilities. NumPy only.

Contexts live in a *suffix trie*. Its root is the empty context; a child extends its parent's context by one token **into the
past**. So one walk, from the most recent token backwards, passes through every context that matches, shortest first, and
the last node it reaches is the longest context seen: back-off is nothing but stopping early. Each node lists the tokens that
followed its context and how often.

    tokens   … x a b │ ?         root ──b──▶ (b) ──a──▶ (a b) ──x──▶ (x a b)
                                  "?" after: anything   "b"    "a b"     "x a b"

Nodes are chained by number, an edge is the 64-bit integer `parent << 32 | token`. Nothing is hashed or packed by vocabulary
size, so any order and any vocabulary up to 2**32 is exact.

There are two layers. The *table* is immutable, a few sorted arrays: what was counted from a corpus or loaded from a file. The
*growth* on top of it is made of dictionaries: what was counted since, one token at a time, for instance the target's own
output. Every answer is about the sum of both; `compact` folds the growth into the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT, VERSION = "foretoken-ngram", "1"
ROOT = 0

Ids = Sequence[int] | NDArray[np.integer[Any]]

_SHIFT = 32
_IDS = 1 << _SHIFT


class NGramModel:
    """Counts of every context of up to `order - 1` tokens and of what followed it; `order=2` is the bigram model.

    `vocab_size` is optional: it makes ids outside the vocabulary an error, and `log_probs` needs it.
    """

    def __init__(self, order: int = 4, vocab_size: int | None = None):
        if order < 2:
            raise ValueError(f"order must be at least 2 (a bigram model), not {order}")
        if vocab_size is not None and not 0 < vocab_size <= _IDS:
            raise ValueError(f"vocab_size must lie between 1 and 2**32, not {vocab_size}")
        self.order = order
        self.vocab_size = vocab_size
        self._set_table(_Table.empty())

    @classmethod
    def from_tokens(cls, sequences: Iterable[Ids], order: int = 4, *, min_count: int = 1, vocab_size: int | None = None) -> NGramModel:
        """Counts sequences in bulk (about a million tokens a second); no context reaches across two sequences."""
        model = cls(order, vocab_size)
        arrays = [model._checked(sequence) for sequence in sequences]
        if arrays:
            model._set_table(_Table.count(arrays, order))
        if min_count > 1:
            model.prune(min_count=min_count)
        return model

    # Counting

    def count(self, ids: Ids) -> None:
        """Counts one sequence."""
        self.update(ids, 0)

    def update(self, sequence: Ids, start: int) -> None:
        """Counts the tokens of `sequence` from position `start` on, each after the contexts that precede it.

        Calling this with the whole sequence so far and the first new position counts every token exactly once.
        """
        if start < 0:
            raise ValueError(f"start must not be negative, not {start}")
        reach = self.order - 1
        tail = self._checked(sequence[max(0, start - reach) :]).tolist()
        for position in range(min(start, reach), len(tail)):
            self._add(ROOT, tail[position])
            node = ROOT
            for back in range(position - 1, max(position - reach, 0) - 1, -1):
                node = self._child_or_new(node, tail[back])
                self._add(node, tail[position])

    def compact(self) -> None:
        """Folds what was counted online into the table. Answers stay the same; memory shrinks."""
        if self._delta:
            self._set_table(self._table.merged(self._new_nodes, self._delta))

    def prune(self, *, min_count: int = 1, successors: int | None = None) -> None:
        """Forgets, in every context but the empty one, successors seen fewer than `min_count` times or ranked below `successors`.

        Contexts that predict nothing any more disappear.
        """
        if min_count < 1 or (successors is not None and successors < 1):
            raise ValueError("min_count and successors must be at least 1")
        self.compact()
        self._set_table(self._table.pruned(min_count, successors))

    # Answers

    def predict(self, context: Ids) -> int | None:
        """The most frequent successor of the longest suffix of `context` that was seen; ties go to the smallest id.

        None only if nothing was counted at all.
        """
        node = ROOT
        for child in self._walk(context):
            node = child
        best = self._best.get(node)
        if best is None:
            start, end = self._table.span(node)
            return int(self._table.tokens[start]) if start < end else None
        return best[1]

    def candidates(self, context: Ids, k: int) -> list[int]:
        """Up to `k` different successors: those of the longest context by frequency, then those of shorter ones."""
        found: dict[int, None] = {}
        for node in reversed([ROOT, *self._walk(context)]):
            found.update(dict.fromkeys(token for token in self._ranked(node, k) if token not in found))
            if len(found) >= k:
                break
        return list(found)[:k]

    def matched(self, context: Ids) -> int:
        """How many of the last tokens of `context` the model has seen in a row: the length of the context that `predict` uses."""
        return sum(1 for _ in self._walk(context))

    def log_probs(self, ids: Ids) -> NDArray[np.float64]:
        """Natural log probability of every token of `ids` given those before it, interpolated by Witten and Bell (1991):

            P(w | h) = (c(h, w) + T(h) · P(w | h')) / (c(h) + T(h))

        with h' the context without its oldest token, c(h) what followed h in all, T(h) the number of different successors,
        and the uniform distribution below the empty context.
        """
        if self.vocab_size is None:
            raise ValueError("probabilities need vocab_size: pass it when the model is made")
        self.compact()
        return self._table.log_probs(self._checked(ids), self.order, self.vocab_size)

    # Size and files

    @property
    def contexts(self) -> int:
        """The number of contexts, the empty one included."""
        return self._table.nodes + len(self._new_nodes)

    @property
    def ngrams(self) -> int:
        """The number of different (context, successor) pairs, the empty context included."""
        self.compact()
        return len(self._table.tokens)

    def save(self, path: str | Path) -> None:
        """Writes one safetensors file, in the narrowest integers that hold the counts."""
        from safetensors.numpy import save_file

        self.compact()
        metadata = {"format": FORMAT, "version": VERSION, "order": str(self.order), "vocab_size": str(self.vocab_size or "")}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_file(self._table.to_arrays(), str(path), metadata)

    @classmethod
    def load(cls, path: str | Path) -> NGramModel:
        """Reads a file written by `save`; a ValueError says why a file cannot be used."""
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no n-gram model at {path}")
        try:
            with safe_open(str(path), framework="numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is no n-gram model: not a safetensors file ({error})") from None
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} is no n-gram model: it was not written by NGramModel.save")
        if metadata.get("version") != VERSION:
            raise ValueError(f"{path} has format version {metadata.get('version')}; this Foretoken reads version {VERSION}")
        model = cls(int(metadata["order"]), int(metadata["vocab_size"]) if metadata["vocab_size"] else None)
        model._set_table(_Table.from_arrays(arrays))
        return model

    def __repr__(self) -> str:
        return f"NGramModel(order={self.order}, vocab_size={self.vocab_size}, contexts={self.contexts})"

    # The two layers

    def _set_table(self, table: _Table) -> None:
        self._table = table
        self._new_nodes: dict[int, int] = {}  # edge -> node, for nodes that the table lacks
        self._delta: dict[int, dict[int, int]] = {}  # node -> successor -> count beyond the table's
        self._best: dict[int, tuple[int, int]] = {}  # node -> (-count, token) of the best successor, for nodes that grew

    def _checked(self, ids: Ids) -> NDArray[np.int64]:
        array = np.asarray(ids, dtype=np.int64)
        if array.ndim != 1:
            raise ValueError(f"token ids must form one sequence, not an array of shape {array.shape}")
        limit = self.vocab_size or _IDS
        if array.size and not (array.min() >= 0 and array.max() < limit):
            wrong = array[(array < 0) | (array >= limit)][0]
            raise ValueError(f"token id {wrong} is outside the vocabulary of {limit}")
        return array

    def _walk(self, context: Ids) -> Iterator[int]:
        """The nodes of the contexts that match, shortest first, without the root."""
        node = ROOT
        for index in range(len(context) - 1, max(len(context) - self.order, -1), -1):
            child = self._child(node, int(context[index]))
            if child is None:
                return
            yield child
            node = child

    def _child(self, node: int, token: int) -> int | None:
        edge = node << _SHIFT | token
        child = self._new_nodes.get(edge)
        return self._table.child(edge) if child is None and node < self._table.nodes else child

    def _child_or_new(self, node: int, token: int) -> int:
        child = self._child(node, token)
        if child is None:
            child = self._table.nodes + len(self._new_nodes)
            self._new_nodes[node << _SHIFT | token] = child
        return child

    def _add(self, node: int, token: int) -> None:
        grown = self._delta.setdefault(node, {})
        grown[token] = grown.get(token, 0) + 1
        rank = (-self._count(node, token), token)
        best = self._best.get(node)
        if best is None:
            top = self._table.top(node, 1)
            best = (-top[0][1], top[0][0]) if top else rank
        self._best[node] = min(best, rank)

    def _count(self, node: int, token: int) -> int:
        return self._delta.get(node, {}).get(token, 0) + self._table.count_of(node, token)

    def _ranked(self, node: int, k: int) -> list[int]:
        """The `k` most frequent successors over both layers."""
        grown = self._delta.get(node, {})
        counts = dict(self._table.top(node, k + len(grown)))
        for token in grown:
            counts[token] = self._count(node, token)
        return sorted(counts, key=lambda token: (-counts[token], token))[:k]


@dataclass(frozen=True)
class _Table:
    """The immutable layer. Nodes are numbered by depth, then parent, then token, so `edges` is sorted and leads node i + 1."""

    edges: NDArray[np.uint64]  # [nodes - 1]
    first: NDArray[np.int64]  # [nodes + 1]: successors of node i are first[i] … first[i + 1], most frequent first
    tokens: NDArray[np.uint32]  # [ngrams]
    counts: NDArray[np.int64]  # [ngrams]

    @property
    def nodes(self) -> int:
        return len(self.first) - 1

    def child(self, edge: int) -> int | None:
        key = np.uint64(edge)
        index = int(self.edges.searchsorted(key))
        return index + 1 if index < len(self.edges) and self.edges[index] == key else None

    def span(self, node: int) -> tuple[int, int]:
        return (int(self.first[node]), int(self.first[node + 1])) if node < self.nodes else (0, 0)

    def top(self, node: int, k: int) -> list[tuple[int, int]]:
        start, end = self.span(node)
        end = min(end, start + k)
        return list(zip(self.tokens[start:end].tolist(), self.counts[start:end].tolist()))

    def count_of(self, node: int, token: int) -> int:
        start, end = self.span(node)
        (hits,) = np.nonzero(self.tokens[start:end] == token)
        return int(self.counts[start + hits[0]]) if len(hits) else 0

    @cached_property
    def _by_pair(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Pairs in ascending order and their counts."""
        pairs = self.pairs()
        order = np.argsort(pairs)
        return pairs[order], self.counts[order]

    @cached_property
    def _total(self) -> NDArray[np.int64]:
        """How many successors each node counted in all."""
        return np.diff(np.concatenate(([0], np.cumsum(self.counts)))[self.first])

    # Construction

    @classmethod
    def empty(cls) -> _Table:
        return cls(np.empty(0, np.uint64), np.zeros(2, np.int64), np.empty(0, np.uint32), np.empty(0, np.int64))

    @classmethod
    def count(cls, sequences: Sequence[NDArray[np.int64]], order: int) -> _Table:
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
                level, inverse = np.unique(node << np.uint64(_SHIFT) | stream[positions - depth], return_inverse=True)
                node = inverse.astype(np.uint64) + np.uint64(nodes)
                nodes += len(level)
                edges.append(level)
            pair, repeat = np.unique(node << np.uint64(_SHIFT) | stream[positions], return_counts=True)
            pairs.append(pair)
            repeats.append(repeat)
        return cls._from_pairs(np.concatenate(edges), np.concatenate(pairs), np.concatenate(repeats), nodes)

    @classmethod
    def _from_pairs(cls, edges: NDArray[np.uint64], pairs: NDArray[np.uint64], counts: NDArray[np.int64], nodes: int) -> _Table:
        """From (node, successor) pairs in any order; a successor's edge looks like a child's: `node << 32 | token`."""
        node, token = _split(pairs)
        order = np.lexsort((token, -counts, node))
        first = np.concatenate(([0], np.cumsum(np.bincount(node, minlength=nodes))))
        return cls(edges, first.astype(np.int64), token[order].astype(np.uint32), counts[order].astype(np.int64))

    def pairs(self) -> NDArray[np.uint64]:
        node = np.repeat(np.arange(self.nodes, dtype=np.uint64), np.diff(self.first))
        return node << np.uint64(_SHIFT) | self.tokens.astype(np.uint64)

    def merged(self, new_nodes: dict[int, int], delta: dict[int, dict[int, int]]) -> _Table:
        """This table plus what was counted on top of it."""
        edges = np.concatenate((self.edges, np.array(list(new_nodes), dtype=np.uint64)))
        grown = [(node << _SHIFT | token, count) for node, row in delta.items() for token, count in row.items()]
        keys, counts = (np.array(column) for column in zip(*grown))
        pairs, where = np.unique(np.concatenate((self.pairs(), keys.astype(np.uint64))), return_inverse=True)
        total = np.zeros(len(pairs), np.int64)
        np.add.at(total, where, np.concatenate((self.counts, counts)))
        return self._renumbered(edges, np.ones(len(edges), bool), pairs, total)

    def pruned(self, min_count: int, successors: int | None) -> _Table:
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
    ) -> _Table:
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
            keys = number[parent[level]].astype(np.uint64) << np.uint64(_SHIFT) | token[level].astype(np.uint64)
            order = np.argsort(keys)
            levels.append(keys[order])
            number[level[order] + 1] = np.arange(nodes, nodes + len(level))
            nodes += len(level)
            previous[:] = False
            previous[level + 1] = True
        node, successor = _split(pairs)
        pairs = number[node].astype(np.uint64) << np.uint64(_SHIFT) | successor.astype(np.uint64)
        # Without this the pairs of a node that lost its parent would move to a wrong one; `pruned` says why there are none.
        pairs, counts = pairs[number[node] >= 0], counts[number[node] >= 0]
        return cls._from_pairs(np.concatenate(levels), pairs, counts, nodes)

    # Probabilities

    def log_probs(self, ids: NDArray[np.int64], order: int, vocab_size: int) -> NDArray[np.float64]:
        by_pair, counts = self._by_pair
        total, different = self._total, np.diff(self.first)
        stream = ids.astype(np.uint64)
        probability = np.full(len(ids), 1.0 / vocab_size)
        positions = np.arange(len(ids))
        node = np.zeros(len(ids), np.int64)
        for depth in range(order):
            if depth:
                positions, node = positions[positions >= depth], node[positions >= depth]
                found, index = _find(self.edges, node.astype(np.uint64) << np.uint64(_SHIFT) | stream[positions - depth])
                positions, node = positions[found], index[found] + 1
            found, index = _find(by_pair, node.astype(np.uint64) << np.uint64(_SHIFT) | stream[positions])
            seen = np.where(found, counts[index] if len(counts) else 0, 0)
            mass = total[node] + different[node]
            known = mass > 0
            positions, node = positions[known], node[known]
            below = probability[positions]
            probability[positions] = (seen[known] + different[node] * below) / mass[known]
        return np.log(probability)

    # Files

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        parent, token = _split(self.edges)
        arrays = {
            "children": np.bincount(parent, minlength=self.nodes),
            "edges": token,
            "successors": np.diff(self.first),
            "tokens": self.tokens,
            "counts": self.counts,
        }
        return {name: _narrow(array) for name, array in arrays.items()}

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray[Any]]) -> _Table:
        children = arrays["children"].astype(np.int64)
        parent = np.repeat(np.arange(len(children), dtype=np.uint64), children)
        edges = parent << np.uint64(_SHIFT) | arrays["edges"].astype(np.uint64)
        first = np.concatenate(([0], np.cumsum(arrays["successors"].astype(np.int64))))
        return cls(edges, first, arrays["tokens"].astype(np.uint32), arrays["counts"].astype(np.int64))


def _split(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return (keys >> np.uint64(_SHIFT)).astype(np.int64), (keys & np.uint64(_IDS - 1)).astype(np.int64)


def _find(keys: NDArray[np.uint64], wanted: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """For each wanted key whether it is among the sorted `keys`, and a valid index (its own, if it is)."""
    if not len(keys):
        return np.zeros(len(wanted), bool), np.zeros(len(wanted), np.int64)
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return keys[index] == wanted, index


def _narrow(array: NDArray[Any]) -> NDArray[Any]:
    largest = int(array.max(initial=0))
    return array.astype(next(kind for kind in (np.uint8, np.uint16, np.uint32, np.uint64) if largest <= np.iinfo(kind).max))
