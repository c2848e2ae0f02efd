"""Texts to learn from, in a file of a fixed size that the server writes and the learner reads.

A *piece* is a stretch of text with the target's distribution at some of its places: the likeliest tokens, and the rest together. For a
head it also has the hidden states of the target that the head reads, at every token. Every third piece is kept for trials; nobody learns
from it until newer ones have taken its place. The newest of the others come next, and of all before those a uniform sample is kept, so
that what was learnt long ago is not forgotten.

The file begins with a few numbers by which server and learner talk. Each of them is written by one side only. A piece has a checksum: one
that is being written, or was when somebody was killed, is passed over.
"""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np

TOP = 16  # tokens of a distribution
TRIAL, NEW, OLD = 8, 120, 1024  # pieces of each part
EVERY = 3  # of so many pieces one is kept for trials
LARGEST = 512 << 20  # bytes of pieces with hidden states: of large ones there are fewer
FEWEST = 8  # new and old ones


class Layout:
    """What a piece looks like, and how many there are.

    Args:
        width: numbers of the hidden states of a token; 0 for pieces without them, which can be longer.

    Attributes:
        context, length, places: of a piece: tokens in front, tokens, and places with a distribution.
        piece: its dtype.
        trial, new, old: pieces of each part.
    """

    def __init__(self, width: int = 0):
        self.width = width
        self.context, self.length, self.places = (32, 128, 64) if width else (64, 256, 192)
        self.piece = np.dtype(
            [
                ("length", "i4"),
                ("count", "i4"),
                ("tokens", "i4", self.length),
                ("places", "i4", self.places),
                ("weights", "f4", self.places),  # 1 over how likely it was that this place was kept
                ("ids", "i4", (self.places, TOP)),  # best first
                ("logs", "f4", (self.places, TOP)),
                *([("states", "i2", (self.length, width))] if width else []),  # bfloat16
                ("check", "u4"),
            ]
        )
        most = max(2 * FEWEST, LARGEST // self.piece.itemsize - TRIAL)
        self.trial, self.new = TRIAL, min(NEW, most // 2)
        self.old = min(OLD, most - self.new)

    @property
    def pieces(self) -> int:
        return self.trial + self.new + self.old


TEXT = Layout()
CONTROL = np.dtype(
    [
        # written by the server
        ("written", "u8"),  # pieces so far
        ("granted", "f8"),  # the learner may compute up to this moment
        ("accepted", "u8"),  # the version that the server uses
        ("unusable", "u8"),  # the last one that it could not use
        # written by the learner
        ("heartbeat", "f8"),
        ("busy", "u8"),  # 1 while it computes
        ("published", "u8"),  # the newest version
        ("steps", "u8"),
        ("trials", "u8"),
        ("refused", "u8"),  # trials after which nothing was published
        ("seconds", "f8"),  # of computing
        ("before", "f8"),  # α on the trial pieces, of the last trial: with the version in use, with the new weights,
        ("after", "f8"),
        ("again", "f8"),  # how much higher α is where texts are read again with the new weights than over keys of the former ones
    ]
)
Piece = Any  # a record of Layout.piece


class Buffer:
    """The file at ``path``, of pieces of ``layout``.

    Args:
        create: make it if it is not there or is not whole. All of it is allocated at once: a disk that is full later does no harm.

    Raises:
        OSError: it cannot be made, or there is none.
    """

    def __init__(self, path: Path, layout: Layout = TEXT, *, create: bool = False):
        self.layout = layout
        size = CONTROL.itemsize + layout.pieces * layout.piece.itemsize
        if create and (not path.exists() or path.stat().st_size != size):
            _allocate(path, size)
        self._bytes = np.memmap(path, np.uint8, "r+")
        if len(self._bytes) != size:
            raise OSError(f"{path} has {len(self._bytes)} bytes, not {size}")
        self.control: Any = self._bytes[: CONTROL.itemsize].view(CONTROL)[0:1]
        self.pieces: Any = self._bytes[CONTROL.itemsize :].view(layout.piece)

    def __getitem__(self, name: str) -> Any:
        """A number of ``CONTROL``."""
        return self.control[name][0].item()

    def __setitem__(self, name: str, value: float) -> None:
        self.control[name][0] = value

    @property
    def bytes(self) -> int:
        return len(self._bytes)

    # -- the server ---------------------------------------------------------------------------------------------------

    def add(self, piece: Piece) -> None:
        """Keep ``piece``; what it takes the place of moves on to the older parts, or is dropped there."""
        number, old = self["written"], self.layout.trial + self.layout.new
        piece["check"] = checksum(piece)
        for first, size, count in self._parts(number):
            slot = count % size
            if first == old and count >= size:
                slot = random.Random(count).randrange(count + 1)  # a uniform sample of all that came here
                if slot >= size:
                    break
            before = self.pieces[first + slot].copy() if count >= size else None
            self.pieces[first + slot] = piece
            if before is None:
                break
            piece = before
        self["written"] = number + 1

    def clear(self) -> None:
        """Erase all pieces, and forget how many steps were taken with them; the other numbers stay."""
        self["written"] = self["steps"] = 0
        self._bytes[CONTROL.itemsize :] = 0

    # -- the learner --------------------------------------------------------------------------------------------------

    def trial(self) -> list[Piece]:
        """The pieces that nobody has learnt from."""
        return self._whole(range(min(self.layout.trial, self._counts(self["written"])[0])))

    def draw(self, count: int, chance: random.Random, share: float) -> list[Piece]:
        """So many pieces, about ``share`` of them old."""
        _, new, old = self._counts(self["written"])
        layout = self.layout
        new, old = min(new, layout.new), min(old, layout.old)
        if not new:
            return []
        first = [layout.trial + layout.new if old and chance.random() < share else layout.trial for _ in range(count)]
        return self._whole([start + chance.randrange(new if start == layout.trial else old) for start in first])

    def _whole(self, slots: Any) -> list[Piece]:
        copies = [self.pieces[slot].copy() for slot in slots]
        return [piece for piece in copies if piece["count"] and checksum(piece) == piece["check"]]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _counts(self, written: int) -> tuple[int, int, int]:
        """How many pieces have come to each part."""
        tried = (written + EVERY - 1) // EVERY
        new = written - tried + max(0, tried - self.layout.trial)
        return tried, new, max(0, new - self.layout.new)

    def _parts(self, number: int) -> list[tuple[int, int, int]]:
        """The parts that piece ``number`` passes through: their first slot, size, and the pieces that have come to them."""
        tried, new, old = self._counts(number)
        layout = self.layout
        later = [(layout.trial, layout.new, new), (layout.trial + layout.new, layout.old, old)]
        return [(0, layout.trial, tried), *later] if number % EVERY == 0 else later


def checksum(piece: Piece) -> int:
    return zlib.crc32(memoryview(piece.tobytes())[: -piece["check"].itemsize]) or 1


def _allocate(path: Path, size: int) -> None:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(handle, 0)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(handle, 0, size)
        else:
            os.write(handle, bytes(size))
    finally:
        os.close(handle)
