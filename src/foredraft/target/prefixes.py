"""Which rows of a cache begin like new texts, so that what they hold need not be computed again."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.backends.rollback import shared_beginning

WORTH_COPYING = 16  # a shorter shared beginning is computed again
CANDIDATES = 8  # rows compared with a prompt that begins as they do


def shared_beginnings(texts: Sequence[Sequence[int]], held: Sequence[tuple[int, Sequence[int], int]], first: int) -> list[tuple[int, int]]:
    """For each text the row that shares the longest beginning with it, and how long it is, (``first``, 0) for none; at least one token
    stays to be computed, because its logits are wanted.

    Args:
        held: rows, their ids, and how many of these their cache holds.
    """
    alike: dict[tuple[int, ...], list[tuple[int, Sequence[int], int]]] = {}
    for row, ids, length in held:
        if length >= WORTH_COPYING:
            alike.setdefault(tuple(ids[:WORTH_COPYING]), []).append((row, ids, length))
    found = []
    for text in texts:
        candidates = alike.get(tuple(text[:WORTH_COPYING]), [])[-CANDIDATES:]
        shared = [(shared_beginning(ids, text, min(length, len(text) - 1)), row) for row, ids, length in candidates]
        length, row = max(shared, default=(0, first))
        found.append((row, length) if length >= WORTH_COPYING else (first, 0))
    return found
