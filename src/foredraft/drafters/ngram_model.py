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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.drafters.ngram_table import IDS, ROOT, SHIFT, Table
from foredraft.drafters.stores import FileFormat

FILE = FileFormat("foredraft-ngram", "1", "an n-gram model", "NGramModel.save", ("children", "edges", "successors", "tokens", "counts"))

Ids = Sequence[int] | NDArray[np.integer[Any]]


class NGramModel:
    """Counts of every context of up to `order - 1` tokens and of what followed it; `order=2` is the bigram model.

    `vocab_size` is optional: it makes ids outside the vocabulary an error. `fingerprint` names the tokenizer
    that the ids come from, where it is known; it is kept in the file.
    """

    fingerprint: str = ""

    def __init__(self, order: int = 4, vocab_size: int | None = None):
        if order < 2:
            raise ValueError(f"order must be at least 2 (a bigram model), not {order}")
        if vocab_size is not None and not 0 < vocab_size <= IDS:
            raise ValueError(f"vocab_size must lie between 1 and 2**32, not {vocab_size}")
        self.order = order
        self.vocab_size = vocab_size
        self._set_table(Table.empty())

    @classmethod
    def from_tokens(cls, sequences: Iterable[Ids], order: int = 4, *, vocab_size: int | None = None) -> NGramModel:
        """Counts sequences in bulk (about a million tokens a second); no context reaches across two sequences."""
        model = cls(order, vocab_size)
        arrays = [model._checked(sequence) for sequence in sequences]
        if arrays:
            model._set_table(Table.count(arrays, order))
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
        if len(tail) <= min(start, reach):
            return
        singles, delta, nodes, table = self._delta.setdefault(ROOT, {}), self._delta, self._new_nodes, self._table
        known = table.nodes if len(table.edges) else 0  # nodes that may have children in the table
        for position in range(min(start, reach), len(tail)):
            token, node = tail[position], ROOT
            self._count_single(singles, token)
            for back in range(position - 1, max(position - reach, 0) - 1, -1):
                edge = node << SHIFT | tail[back]
                child = nodes.get(edge)
                if child is None and node < known:
                    child = table.child(edge)
                if child is None:
                    child = nodes[edge] = table.nodes + len(nodes)
                node = child
                grown = delta.get(node)
                if grown is None:
                    delta[node] = {token: 1}
                    self._grown += 1
                elif token in grown:
                    grown[token] += 1
                else:
                    grown[token] = 1
                    self._grown += 1

    def compact(self) -> None:
        """Folds what was counted online into the table. Answers stay the same; memory shrinks."""
        if self._delta:
            self._set_table(self._table.merged(self._new_nodes, self._delta))

    def shrink(self, most: int, *, keep: int = 0) -> None:
        """Forgets what was seen least, context by context, until half of `most` pairs are left besides `keep`, or no more than the single
        tokens."""
        min_count = 2
        while self.ngrams > keep + most // 2 and self.contexts > 1:
            self.prune(min_count=min_count)
            min_count *= 2

    def prune(self, *, min_count: int = 1, successors: int | None = None) -> None:
        """Forgets, in every context but the empty one, successors seen fewer than `min_count` times or ranked below `successors`.

        Contexts that predict nothing any more disappear.
        """
        if min_count < 1 or (successors is not None and successors < 1):
            raise ValueError("min_count and successors must be at least 1")
        self.compact()
        self._set_table(self._table.pruned(min_count, successors))

    def copy(self) -> NGramModel:
        """One that counts by itself; what is counted now is in memory once."""
        self.compact()
        own = NGramModel(self.order, self.vocab_size)
        own.fingerprint = self.fingerprint
        own._set_table(self._table)
        return own

    # Answers

    def predict(self, context: Ids) -> int | None:
        """The most frequent successor of the longest suffix of `context` that was seen; ties go to the smallest id.

        None only if nothing was counted at all.
        """
        node = ROOT
        for child in self._walk(context):
            node = child
        return next((token for token, _ in self._ranked_counts(node, 1)), None)

    def likeliest(self, context: Ids, k: int, *, seen: int = 0) -> list[tuple[int, float]]:
        """Up to `k` different successors with about their probability, the likeliest first: as `distribution` has it, but of the `k` most
        frequent successors in each context only, and of the empty context only where no other was seen. None where fewer than `seen`
        of the last tokens were seen in a row."""
        found: dict[int, float] = {}
        left, nodes = 1.0, [ROOT, *self._walk(context)]
        if len(nodes) <= seen:
            return []
        for node in reversed(nodes):
            if node == ROOT and found:
                break
            total, different = self._mass(node)
            for token, count in self._ranked_counts(node, k):
                found[token] = found.get(token, 0.0) + left * count / (total + different)
            left *= different / max(total + different, 1)
            if left < 0.02:
                break
        return sorted(found.items(), key=lambda pair: (-pair[1], pair[0]))[:k]

    def distribution(self, context: Ids, vocab_size: int | None = None) -> NDArray[np.float32]:
        """`[V]` probability of every token after `context`, interpolated by Witten and Bell (1991); all positive, and they sum to 1:

            P(w | h) = (c(h, w) + T(h) · P(w | h')) / (c(h) + T(h))

        with h' the context without its oldest token, c(h) what followed h in all, T(h) the number of different successors,
        and the uniform distribution below the empty context.

        `vocab_size` takes the place of the model's own; what was counted beyond it is left out, and the rest is normalised.
        """
        size = vocab_size or self.vocab_size
        if size is None:
            raise ValueError("probabilities need vocab_size: pass it here or when the model is made")
        law: NDArray[np.float32] | None = None
        for node in [ROOT, *self._walk(context)]:
            total, different = self._mass(node)
            if not total:
                continue
            if node == ROOT:
                law = self._unigrams(size) + np.float32(different / size)
                law /= np.float32(total + different)
                continue
            assert law is not None
            law *= np.float32(different / (total + different))
            for tokens, counts in self._successors(node):
                inside = tokens < size
                law[tokens[inside]] += (counts[inside] / (total + different)).astype(np.float32)
        if law is None:
            return np.full(size, 1.0 / size, np.float32)
        return law / law.sum(dtype=np.float64).astype(np.float32)

    def matched(self, context: Ids) -> int:
        """How many of the last tokens of `context` the model has seen in a row: the length of the context that `predict` uses."""
        return sum(1 for _ in self._walk(context))

    # Size and files

    @property
    def contexts(self) -> int:
        """The number of contexts, the empty one included."""
        return self._table.nodes + len(self._new_nodes)

    @property
    def size(self) -> int:
        """About how many pairs there are, and never fewer; costs nothing."""
        return len(self._table.tokens) + self._grown

    @property
    def ngrams(self) -> int:
        """The number of different (context, successor) pairs, the empty context included."""
        self.compact()
        return len(self._table.tokens)

    def save(self, path: str | Path) -> None:
        """Writes one safetensors file, in the narrowest integers that hold the counts, in place of what was there; a crash on the way
        leaves the old one whole."""
        self.compact()
        FILE.write(path, self._table.to_arrays(), self.vocab_size, order=str(self.order), tokenizer=self.fingerprint)

    @classmethod
    def load(cls, path: str | Path) -> NGramModel:
        """Reads a file written by `save`; a ConfigurationError, which is a ValueError, says why a file cannot be used."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no n-gram model at {path}")
        arrays, vocab_size, about = FILE.read(path)
        model = cls(int(about["order"]), vocab_size)
        model.fingerprint = about.get("tokenizer", "")
        model._set_table(Table.from_arrays(*arrays))
        return model

    def __repr__(self) -> str:
        return f"NGramModel(order={self.order}, vocab_size={self.vocab_size}, contexts={self.contexts})"

    # The two layers

    def _set_table(self, table: Table) -> None:
        self._table = table
        self._new_nodes: dict[int, int] = {}  # edge -> node, for nodes that the table lacks
        self._delta: dict[int, dict[int, int]] = {}  # node -> successor -> count beyond the table's
        self._grown = 0  # pairs in `_delta`
        self._singles = self._new_singles = 0  # tokens counted beyond the table's, and different ones that the table lacks
        self._dense: NDArray[np.float32] | None = None  # counts of single tokens, once asked for

    def _checked(self, ids: Ids) -> NDArray[np.int64]:
        array = np.asarray(ids, dtype=np.int64)
        if array.ndim != 1:
            raise ValueError(f"token ids must form one sequence, not an array of shape {array.shape}")
        limit = self.vocab_size or IDS
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
        edge = node << SHIFT | token
        child = self._new_nodes.get(edge)
        return self._table.child(edge) if child is None and node < self._table.nodes else child

    def _count_single(self, singles: dict[int, int], token: int) -> None:
        self._singles += 1
        if token in singles:
            singles[token] += 1
        else:
            singles[token] = 1
            self._grown += 1
            self._new_singles += not self._table.count_of(ROOT, token)
        if self._dense is not None and token < len(self._dense):
            self._dense[token] += 1

    def _count(self, node: int, token: int) -> int:
        return self._delta.get(node, {}).get(token, 0) + self._table.count_of(node, token)

    def _ranked_counts(self, node: int, k: int) -> list[tuple[int, int]]:
        """The `k` most frequent successors over both layers, with their counts."""
        grown = self._delta.get(node)
        if not grown:
            return self._table.top(node, k)
        if node >= self._table.nodes:
            if len(grown) == 1 or k == 1:
                return [min(grown.items(), key=lambda pair: (-pair[1], pair[0]))]
            return sorted(grown.items(), key=lambda pair: (-pair[1], pair[0]))[:k]
        counts = dict(self._table.top(node, k + len(grown)))
        for token in grown:
            counts[token] = self._count(node, token)
        return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:k]

    def _mass(self, node: int) -> tuple[int, int]:
        """How many successors were counted in all, and how many different ones."""
        start, end = self._table.span(node)
        if node == ROOT:
            more, new = self._singles, self._new_singles
        else:
            grown = self._delta.get(node, {})
            more = sum(grown.values())
            new = len(grown) if start == end else sum(not self._table.count_of(node, token) for token in grown)
        return (int(self._table.total[node]) if start < end else 0) + more, end - start + new

    def _successors(self, node: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Tokens and counts, layer by layer."""
        start, end = self._table.span(node)
        if start < end:
            yield self._table.tokens[start:end].astype(np.int64), self._table.counts[start:end]
        grown = self._delta.get(node)
        if grown:
            yield np.fromiter(grown.keys(), np.int64, len(grown)), np.fromiter(grown.values(), np.int64, len(grown))

    def _unigrams(self, size: int) -> NDArray[np.float32]:
        """`[size]` counts of single tokens; kept up to date from then on."""
        if self._dense is None or len(self._dense) != size:
            self._dense = np.zeros(size, np.float32)
            for tokens, counts in self._successors(ROOT):
                inside = tokens < size
                self._dense[tokens[inside]] += counts[inside].astype(np.float32)
        return self._dense
