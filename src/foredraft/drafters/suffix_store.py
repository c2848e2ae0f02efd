"""A bounded store of token sequences that finds the longest suffix of a text in any of them. NumPy only.

A suffix automaton keeps half a kilobyte per token; what does not grow token by token can be had for twelve bytes: the sequences, and the
order of all their positions by the text before them, read backwards (a suffix array of the reversed text). Equal contexts
are neighbours in that order, so one binary search finds the longest context that occurs, and what followed it lies side by side.

The order is that of a *segment* of sequences. A new sequence is a segment of its own, and segments of about one size are joined, so
that there are few of them and a token is sorted a few times in its life. The oldest sequences go when there are too many.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foredraft.drafters.stores import sorted_positions
from foredraft.drafters.suffix_files import digest, latest, read, write
from foredraft.errors import ConfigurationError

Tokens = NDArray[np.uint32]

REACH = 64  # tokens of a context that are compared
JOINED = 4  # a segment is joined with the one before it, if that is not so many times as large
SPARE = 8  # where the store is full, one part in so many is freed
END = 0xFFFFFFFF  # between two sequences; no token


@dataclass(frozen=True)
class Matches:
    """Where the longest suffix that occurs, ``length`` tokens, occurs: ``after`` holds what followed, the latest sequence first, each
    up to ``END`` at most."""

    length: int
    after: list[list[int]]


class SuffixStore:
    """Sequences of at most ``capacity`` tokens in all, an end each included; the oldest are evicted.

    Args:
        capacity: tokens.
        vocab_size: of the target that the sequences are for, None while it is not known.
        tokenizer: what its vocabulary is recognised by (:func:`~foredraft.drafters.suffix_files.fingerprint`), None if not known.
    """

    def __init__(self, capacity: int = 1 << 20, *, vocab_size: int | None = None, tokenizer: str | None = None):
        if isinstance(capacity, bool) or not isinstance(capacity, int) or not 2 <= capacity < 1 << 31:
            raise ConfigurationError(f"capacity must be a number of tokens from 2 to 2**31 - 1, got {capacity!r}")
        self.capacity, self.vocab_size, self.tokenizer = capacity, vocab_size, tokenizer
        self.size = 0
        self.added = 0  # tokens, evicted ones too, since it was made or copied
        self._segments: list[Segment] = []
        self._known: set[bytes] = set()

    def __len__(self) -> int:
        """Sequences held."""
        return len(self._known)

    def sequences(self) -> Iterator[Tokens]:
        """The oldest first."""
        for segment in self._segments:
            yield from segment.sequences

    def add(self, tokens: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        """Keep a sequence, unless it is held already; of one that is longer than the capacity its end."""
        kept = np.array(tokens[-(self.capacity - 1) :], np.uint32)
        name = digest(kept)
        if len(kept) < 2 or name in self._known:
            return
        if self.size + len(kept) + 1 > self.capacity:
            self._evict(len(kept) + 1)
        self._known.add(name)
        self.size += len(kept) + 1
        self.added += len(kept) + 1
        joined, size = [kept], len(kept)
        while self._segments and len(self._segments[-1]) < JOINED * size:
            before = self._segments.pop()
            joined, size = [*before.sequences, *joined], size + len(before)
        self._segments.append(Segment(joined))

    def copy(self) -> SuffixStore:
        """One that learns by itself; what is held now, which never changes, is in memory once."""
        own = SuffixStore(self.capacity, vocab_size=self.vocab_size, tokenizer=self.tokenizer)
        own.size, own._segments, own._known = self.size, list(self._segments), set(self._known)
        return own

    def fill(self, sequences: Sequence[Tokens]) -> None:
        """Make these, the oldest first, all that is held, as far as there is room; sorted at once, a million tokens in a second."""
        unlike = {digest(each): each for each in sequences if len(each) > 1}
        kept = [each.copy() for each in latest(list(unlike.values()), self.capacity)]
        self._known = {digest(each) for each in kept}
        self._segments = [Segment(kept)] if kept else []
        self.size = sum(len(each) + 1 for each in kept)

    def find(self, ids: Sequence[int], *, most: int, least: int, depth: int, samples: int = 64) -> Matches | None:
        """Occurrences of the longest suffix of ``ids``, of ``least`` to ``most`` tokens, with up to ``depth`` tokens after it.

        Of more than ``samples`` occurrences in a segment as many are taken at equal distances.
        """
        key = struct.pack(f">{min(most, len(ids))}I", *reversed(ids[-most:]))
        longest = max(least, 1)
        found: list[tuple[Segment, int]] = []
        for segment in reversed(self._segments):
            length, begin = segment.search(key)
            if length < longest:
                continue
            if length > longest:
                longest, found = length, []
            found.append((segment, begin))
        after: list[list[int]] = []
        for segment, begin in found:
            after += segment.continuations(key[: 4 * longest], begin, depth, samples)
        return Matches(longest, after) if after else None

    def bind(self, vocab_size: int, *, known: bool = False) -> None:
        """From now on it is for a target of ``vocab_size`` tokens; ``known`` says that its tokenizer is known to be that of the store.

        Raises:
            ConfigurationError: it was made for a vocabulary of another size, or holds a token that the target lacks.
        """
        if self.vocab_size not in (None, vocab_size) and not known:
            raise ConfigurationError(
                f"the store of past texts was made for a vocabulary of {self.vocab_size} tokens, the target has {vocab_size}; "
                "use one made with the target's tokenizer"
            )
        highest = max((int(each.max()) for each in self.sequences()), default=-1)
        if highest >= vocab_size:
            raise ConfigurationError(
                f"the store of past texts holds token {highest}, the target has {vocab_size}; use one made with the target's tokenizer"
            )
        self.vocab_size = vocab_size

    def save(self, path: str | Path) -> None:
        """Write the store to ``path``, at once or not at all; what another process saved there stays, as older than this.

        Raises:
            ConfigurationError: the file there is no store, or one for another vocabulary or tokenizer.
        """
        write(path, list(self.sequences()), self.vocab_size, self.tokenizer, self.capacity)

    @classmethod
    def load(cls, path: str | Path, capacity: int = 1 << 20) -> SuffixStore:
        """What :meth:`save` wrote, the latest ``capacity`` tokens of it.

        Raises:
            ConfigurationError: there is no such file, it is no store, or there is no room for its latest sequence.
        """
        held = read(path)
        store = cls(capacity, vocab_size=held.vocab_size, tokenizer=held.tokenizer)
        longest = len(held.sequences[-1]) if held.sequences else 0
        if longest >= capacity:
            raise ConfigurationError(
                f"the latest text in {str(path)!r} has {longest} tokens and the store room for {capacity}; pass capacity={2 * longest}"
            )
        store.fill(held.sequences)
        return store

    def _evict(self, tokens: int) -> None:
        """Make room for so many tokens and some more, so that it is not done for every sequence."""
        goal = max(0, self.capacity - max(tokens, self.capacity // SPARE))
        while self.size > goal:
            oldest = self._segments[0]
            count, freed = 0, 0
            for each in oldest.sequences:
                if self.size - freed <= goal:
                    break
                self._known.discard(digest(each))
                count, freed = count + 1, freed + len(each) + 1
            self.size -= freed
            if count == len(oldest.sequences):
                self._segments.pop(0)
            else:
                self._segments[0] = oldest.without(count)


class Segment:
    """Sequences and the order of their positions.

    ``text`` is ``END``, the last sequence backwards, ``END``, the one before it backwards, …, ``END``; big-endian, so that its bytes
    compare as its tokens do. What precedes a token in its sequence comes after it, and what followed it comes before it.
    """

    def __init__(self, sequences: list[Tokens], text: NDArray[Any] | None = None, order: NDArray[np.int32] | None = None):
        self.sequences = sequences
        if text is None or order is None:
            end = np.array([END], np.uint32)
            tokens = np.concatenate([end, *(part for each in reversed(sequences) for part in (each[::-1], end))])
            places = sorted_positions(tokens, REACH)
            order = places[(tokens[places] != END) & (tokens[places - 1] != END)].astype(np.int32)
            text = tokens.astype(">u4")
        self._bytes, self._places = text.tobytes(), order.data
        self.text, self.order = np.frombuffer(self._bytes, ">u4"), order

    def __len__(self) -> int:
        return len(self.text)

    def search(self, key: bytes) -> tuple[int, int]:
        """How many tokens of ``key``, a text backwards, occur; and where in the order a context of so many is or would be."""
        data, places, width = self._bytes, self._places, len(key)
        index = bisect_left(places, key, key=lambda place: data[4 * place : 4 * place + width])
        longest = 0
        for near in (index - 1, index):
            if 0 <= near < len(places):
                place = 4 * places[near]
                longest = max(longest, _common(key, data[place : place + width]))
        return longest, index

    def continuations(self, key: bytes, near: int, depth: int, samples: int) -> list[list[int]]:
        """What followed the contexts that begin with ``key``, which lie around ``near`` in the order, the latest first."""
        data, places, width = self._bytes, self._places, len(key)

        def context(place: int) -> bytes:
            return data[4 * place : 4 * place + width]

        begin = bisect_left(places, key, 0, near, key=context)
        end = bisect_right(places, key, near, len(places), key=context)
        chosen = np.sort(self.order[begin : end : 1 + (end - begin - 1) // samples])
        after = np.maximum(chosen[:, None] - np.arange(1, depth + 1), 0)  # [n, depth]; in front lies an END
        return self.text[after].tolist()

    def without(self, count: int) -> Segment:
        """Without the ``count`` oldest sequences: no context reaches over an ``END``, so the order of the others stays."""
        kept = self.sequences[count:]
        size = 1 + sum(len(each) + 1 for each in kept)
        return Segment(kept, self.text[:size], self.order[self.order < size])


def _common(one: bytes, other: bytes) -> int:
    """Tokens that both begin with."""
    width = min(len(one), len(other))
    different = int.from_bytes(one[:width], "big") ^ int.from_bytes(other[:width], "big")
    return (8 * width - different.bit_length()) // 32
