"""A datastore of token ids: documents in one array, and a suffix array that finds every occurrence of a text in it.

The suffix array lists all positions in the order of the tokens from there on, as far as ``SORTED`` tokens. So the occurrences of a
text lie side by side in it, a binary search finds them, and what followed them comes in order, which makes counting easy.

Files are mapped into memory: a lookup reads a few pages, whatever the size of the store.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.drafters.stores import FileFormat, sorted_positions
from foredraft.drafters.tries import Trie
from foredraft.errors import ConfigurationError

FILE = FileFormat("foredraft-datastore", "1", "a datastore", "Datastore.save", ("tokens", "suffixes", "starts"))
SORTED = 64  # tokens that the order of positions looks at
SIBLINGS = 8  # continuations of one node at most

Ids = Sequence[int] | NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Found:
    """Occurrences of a text of ``length`` tokens: entries ``first`` to ``last`` of the suffix array, the last one not included."""

    length: int
    first: int
    last: int

    @property
    def count(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, eq=False)
class Datastore:
    """Documents as token ids, and where each text occurs in them.

    Attributes:
        tokens: ``[n]`` the documents one after another, each followed by :attr:`separator`.
        suffixes: ``[n - documents]`` the positions of all tokens, sorted by what they begin.
        starts: ``[vocab_size + 1]`` where the positions of each token begin among ``suffixes``.
        vocab_size: token ids lie below it.
        fingerprint: of the tokenizer, "" if it is not known.
    """

    tokens: NDArray[Any]
    suffixes: NDArray[Any]
    starts: NDArray[Any]
    vocab_size: int
    fingerprint: str = ""

    @classmethod
    def build(cls, documents: Iterable[Ids], *, vocab_size: int, fingerprint: str = "") -> Datastore:
        """Takes about 50 bytes of memory per token while it sorts.

        Raises:
            ValueError: no tokens, ids outside the vocabulary, or more tokens than can be numbered.
        """
        if not 0 < vocab_size < 1 << 32:
            raise ValueError(f"vocab_size must lie between 1 and 2**32 - 1, not {vocab_size}")
        dtype = np.dtype(np.uint16 if vocab_size < 1 << 16 else np.uint32)
        separator = np.array([np.iinfo(dtype).max], dtype)
        parts: list[NDArray[Any]] = []
        for document in documents:
            ids = np.asarray(document, dtype=np.int64)
            if ids.ndim != 1:
                raise ValueError(f"a document is one sequence of token ids, not an array of shape {ids.shape}")
            if not ids.size:
                continue
            if ids.min() < 0 or ids.max() >= vocab_size:
                wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
                raise ValueError(f"token id {wrong} is outside the vocabulary of {vocab_size}")
            parts += [ids.astype(dtype), separator]
        if not parts:
            raise ValueError("there are no tokens to build a datastore from")
        tokens = np.concatenate(parts)
        if len(tokens) >= 1 << 32:
            raise ValueError(f"a datastore holds fewer than 2**32 tokens, not {len(tokens)}; split it")
        order = sorted_positions(tokens, SORTED, "stable")
        order = order[tokens[order] != separator[0]]
        starts = np.searchsorted(tokens[order], np.arange(vocab_size + 1)).astype(np.uint32)
        return cls(tokens, order.astype(np.uint32), starts, vocab_size, fingerprint)

    @property
    def separator(self) -> int:
        return int(np.iinfo(self.tokens.dtype).max)

    @property
    def documents(self) -> int:
        return len(self.tokens) - len(self.suffixes)

    # -- files ----------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write one safetensors file in place of what was there; a crash on the way leaves the old one whole."""
        FILE.write(path, (self.tokens, self.suffixes, self.starts), self.vocab_size, tokenizer=self.fingerprint)

    @classmethod
    def load(cls, path: str | Path) -> Datastore:
        """Map a file written by :meth:`save`.

        Raises:
            FileNotFoundError: there is none.
            ConfigurationError: it is none, of another version or damaged.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no datastore at {path}")
        (tokens, suffixes, starts), vocab_size, about = FILE.read(path)
        store = cls(tokens, suffixes, starts, vocab_size or 0, about.get("tokenizer", ""))
        if len(starts) != store.vocab_size + 1 or int(starts[-1]) != len(suffixes) or store.documents < 1:
            raise ConfigurationError(f"{str(path)!r} is damaged: its parts do not fit together; build it again")
        return store

    # -- lookups --------------------------------------------------------------------------------------------------------

    def find(self, context: Sequence[int], *, longest: int, shortest: int = 1) -> Found | None:
        """Where the longest ending of ``context`` that occurs is, of ``longest`` tokens at most and ``shortest`` at least."""
        low, high = 0, min(longest, len(context), SORTED)
        best: Found | None = None
        while low < high:  # every ending of what occurs occurs
            length = (low + high + 1) // 2
            found = self.occurrences(context[-length:])
            if found is None:
                high = length - 1
            else:
                low, best = length, found
        return best if best is not None and best.length >= shortest else None

    def occurrences(self, text: Sequence[int]) -> Found | None:
        """Where ``text``, of ``SORTED`` tokens at most, occurs."""
        if not 0 <= text[0] < self.vocab_size:
            return None
        first, last = self.starts[text[0] : text[0] + 2].tolist()
        wanted, length, tokens, suffixes = list(text), len(text), self.tokens.data, self.suffixes.data

        def at(position: int) -> list[int]:
            return tokens[position : position + length].tolist()

        first = bisect_left(suffixes, wanted, first, last, key=at)
        if first == last or at(suffixes[first]) != wanted:
            return None
        return Found(length, first, bisect_right(suffixes, wanted, first, last, key=at))

    def followers(self, found: Found, depth: int, most: int) -> NDArray[Any]:
        """``[k, d]`` the ``depth`` tokens at most that followed ``most`` occurrences at most, spread evenly over all; rows in order."""
        count, depth = min(found.count, most), min(depth, SORTED - found.length)
        entries = found.first + np.arange(count, dtype=np.int64) * found.count // count
        begin = self.suffixes[entries].astype(np.int64) + found.length
        return np.asarray(self.tokens[np.minimum(begin[:, None] + np.arange(depth), len(self.tokens) - 1)])


def most_frequent(trie: Trie, followers: NDArray[Any], stop: int, *, budget: int, chain: bool) -> None:
    """Hang the ``budget`` most frequent beginnings of the rows of ``followers`` ``[k, d]``, which are in order, below the root of
    ``trie``, the most frequent first; none holds a token from ``stop`` on. In a ``chain`` the most frequent child at each level."""
    if not followers.size:
        return
    differs = np.logical_or.accumulate(followers[1:] != followers[:-1], axis=1)  # from the row before, in this column or an earlier one
    edges: dict[int, list[int]] = {}
    queue: list[tuple[int, int, int, int, int, int]] = []  # -count, order found, parent, first and last row, depth
    found = 0

    def expand(parent: int, first: int, last: int, depth: int) -> None:
        nonlocal found
        if depth >= followers.shape[1]:
            return
        if depth not in edges:
            edges[depth] = (np.flatnonzero(differs[:, depth]) + 1).tolist()
        cuts = edges[depth]
        inner = cuts[bisect_right(cuts, first) : bisect_left(cuts, last)]
        runs = [run for run in zip([first, *inner], [*inner, last]) if followers[run[0], depth] < stop]
        if len(runs) > 1:
            runs = heapq.nsmallest(1 if chain else SIBLINGS, runs, key=lambda run: run[0] - run[1])
        for begin, end in runs:
            heapq.heappush(queue, (begin - end, found, parent, begin, end, depth))
            found += 1

    expand(0, 0, len(followers), 0)
    while queue and len(trie.tokens) < budget:
        _, _, parent, first, last, depth = heapq.heappop(queue)
        expand(trie.add(parent, int(followers[first, depth])), first, last, depth + 1)
