"""Texts to learn from, in a file of a fixed size that the server writes and the learner reads.

A *piece* is a stretch of text with the target's distribution at some of its places: the likeliest tokens, and the rest together. Every
third piece is kept for trials; nobody learns from it until newer ones have taken its place. The newest of the others come next, and of
all before those a uniform sample is kept, so that what was learnt long ago is not forgotten.

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

CONTEXT, LENGTH, PLACES, TOP = 64, 256, 128, 16  # of a piece: tokens in front, tokens, places with a distribution, and tokens of these
TRIAL, NEW, OLD = 8, 120, 1536  # pieces of each part
EVERY = 3  # of so many pieces one is kept for trials

PIECE = np.dtype(
    [
        ("length", "i4"),
        ("count", "i4"),
        ("tokens", "i4", LENGTH),
        ("places", "i4", PLACES),
        ("weights", "f4", PLACES),  # 1 over how likely it was that this place was kept
        ("ids", "i4", (PLACES, TOP)),  # best first
        ("logs", "f4", (PLACES, TOP)),
        ("check", "u4"),
    ]
)
CONTROL = np.dtype(
    [
        # written by the server
        ("written", "u8"),  # pieces so far
        ("granted", "f8"),  # the learner may compute up to this moment
        ("accepted", "u8"),  # the version that the server uses
        ("refused", "u8"),  # the last one that it would not use
        # written by the learner
        ("heartbeat", "f8"),
        ("busy", "u8"),  # 1 while it computes
        ("published", "u8"),  # the newest version
        ("steps", "u8"),
        ("trials", "u8"),
        ("refusals", "u8"),  # trials after which nothing was published
        ("seconds", "f8"),  # of computing
        ("before", "f8"),  # α on the trial pieces, of the last trial: with the version in use, with the new weights,
        ("after", "f8"),
        ("again", "f8"),  # how much higher α is where texts are read again with the new weights than over keys of the former ones
    ]
)
Piece = Any  # a record of PIECE


class Buffer:
    """The file at ``path``.

    Args:
        create: make it if it is not there or is not whole. All of it is allocated at once: a disk that is full later does no harm.

    Raises:
        OSError: it cannot be made, or there is none.
    """

    def __init__(self, path: Path, *, create: bool = False):
        size = CONTROL.itemsize + (TRIAL + NEW + OLD) * PIECE.itemsize
        if create and (not path.exists() or path.stat().st_size != size):
            _allocate(path, size)
        self._bytes = np.memmap(path, np.uint8, "r+")
        if len(self._bytes) != size:
            raise OSError(f"{path} has {len(self._bytes)} bytes, not {size}")
        self.control: Any = self._bytes[: CONTROL.itemsize].view(CONTROL)[0:1]
        self.pieces: Any = self._bytes[CONTROL.itemsize :].view(PIECE)

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
        number = self["written"]
        for first, size, count in self._parts(number):
            slot = count % size
            if first == TRIAL + NEW and count >= size:
                slot = random.Random(count).randrange(count + 1)  # a uniform sample of all that came here
                if slot >= size:
                    break
            before = self.pieces[first + slot].copy() if count >= size else None
            piece["check"] = checksum(piece)
            self.pieces[first + slot] = piece
            if before is None or checksum(before) != before["check"]:
                break
            piece = before
        self["written"] = number + 1

    def clear(self) -> None:
        """Forget all pieces; the other numbers stay."""
        self["written"] = 0
        self.pieces["check"] = 0
        self.pieces["length"] = 0

    # -- the learner --------------------------------------------------------------------------------------------------

    def trial(self) -> list[Piece]:
        """The pieces that nobody has learnt from."""
        return self._whole(range(min(TRIAL, self._counts(self["written"])[0])))

    def draw(self, count: int, chance: random.Random, share: float) -> list[Piece]:
        """So many pieces, about ``share`` of them old."""
        _, new, old = self._counts(self["written"])
        new, old = min(new, NEW), min(old, OLD)
        if not new:
            return []
        first = [TRIAL + NEW if old and chance.random() < share else TRIAL for _ in range(count)]
        return self._whole([start + chance.randrange(new if start == TRIAL else old) for start in first])

    def _whole(self, slots: Any) -> list[Piece]:
        copies = [self.pieces[slot].copy() for slot in slots]
        return [piece for piece in copies if piece["count"] and checksum(piece) == piece["check"]]

    # -- inside -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _counts(written: int) -> tuple[int, int, int]:
        """How many pieces have come to each part."""
        tried = (written + EVERY - 1) // EVERY
        new = written - tried + max(0, tried - TRIAL)
        return tried, new, max(0, new - NEW)

    def _parts(self, number: int) -> list[tuple[int, int, int]]:
        """The parts that piece ``number`` passes through: their first slot, size, and the pieces that have come to them."""
        tried, new, old = self._counts(number)
        later = [(TRIAL, NEW, new), (TRIAL + NEW, OLD, old)]
        return [(0, TRIAL, tried), *later] if number % EVERY == 0 else later


def checksum(piece: Piece) -> int:
    return zlib.crc32(piece.tobytes()[: -PIECE["check"].itemsize]) or 1


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
