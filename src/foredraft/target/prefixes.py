"""Which rows of a cache begin like new texts, so that what they hold need not be computed again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from foredraft.backends.rollback import shared_beginning

WORTH_COPYING = 16  # a shorter shared beginning is computed again
CANDIDATES = 8  # rows compared with a prompt that begins as they do


def shared_beginnings(
    texts: Sequence[Sequence[int]],
    keys: Sequence[Hashable],
    held: Sequence[tuple[int, Hashable, Sequence[int], int]],
    first: int,
    unread: int = 1,
) -> list[tuple[int, int]]:
    """For each text the row of the same key that shares the longest beginning with it, and how long it is, (``first``, 0) for none.

    Args:
        keys: of ``texts``.
        held: rows, their keys, their ids, and how many of these their cache holds.
        unread: so many tokens of each text stay to be computed.
    """
    alike: dict[Hashable, list[tuple[int, Sequence[int], int]]] = {}
    for row, key, ids, length in held:
        if length >= WORTH_COPYING:
            alike.setdefault((key, *ids[:WORTH_COPYING]), []).append((row, ids, length))
    found = []
    for text, key in zip(texts, keys):
        candidates = alike.get((key, *text[:WORTH_COPYING]), [])[-CANDIDATES:]
        shared = [(shared_beginning(ids, text, min(length, len(text) - unread)), row) for row, ids, length in candidates]
        length, row = max(shared, default=(0, first))
        found.append((row, length) if length >= WORTH_COPYING else (first, 0))
    return found
