"""Which rows of a cache begin like new texts, so that what they hold need not be computed again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from foredraft.backends.rollback import RollbackCache
from foredraft.backends.states import shared_beginning
from foredraft.models.paged_cache import PagedCache

WORTH_COPYING = 16  # a shorter shared beginning is computed again
KEEPING = PagedCache, RollbackCache  # caches that keep what finished texts have left, and find it themselves
CANDIDATES = 8  # rows compared with a prompt that begins as they do


def shared_beginnings(
    texts: Sequence[Sequence[int]],
    keys: Sequence[Hashable],
    held: Sequence[tuple[int, Hashable, Sequence[int], int]],
    first: int,
    unread: int = 1,
    most: Sequence[int] | None = None,
) -> list[tuple[int, int]]:
    """For each text the row of the same key that shares the longest beginning with it, and how long it is, (``first``, 0) for none.

    Args:
        keys: of ``texts``.
        held: rows, their keys, their ids, and how many of these their cache holds.
        unread: so many tokens of each text must still be computed.
        most: tokens of each text that it may share at most.
    """
    alike: dict[Hashable, list[tuple[int, Sequence[int], int]]] = {}
    for row, key, ids, length in held:
        if length >= WORTH_COPYING:
            alike.setdefault((key, *ids[:WORTH_COPYING]), []).append((row, ids, length))
    found = []
    for text, key, limit in zip(texts, keys, most or map(len, texts)):
        candidates = alike.get((key, *text[:WORTH_COPYING]), [])[-CANDIDATES:]
        shared = [(shared_beginning(ids, text, min(length, limit, len(text) - unread)), row) for row, ids, length in candidates]
        length, row = max(shared, default=(0, first))
        found.append((row, length) if length >= WORTH_COPYING else (first, 0))
    return found


class Companion(Protocol):
    """Keeps data of its own for the tokens of a target's rows, made from their hidden states. So it needs the hidden states of every token
    that it does not hold already. Only :meth:`open` changes anything."""

    def open(self, texts: Sequence[Sequence[int]], groups: Sequence[Hashable], *, share: bool, unread: int) -> Sequence[int]:
        """The target is about to open rows, as in :meth:`~foredraft.target.Target.open`. For each row, how many tokens at its beginning
        have hidden states that need not be computed again."""

    def needed(self, text: Sequence[int], group: Hashable, nodes: int) -> int:
        """As :meth:`~foredraft.target.Target.needed`, by what this holds."""

    def known(self, text: Sequence[int], group: Hashable) -> int:
        """Tokens at the beginning of ``text`` that it holds from finished texts."""


class Texts:
    """The texts of a cache's rows, by which rows that begin alike find each other. Where the cache has no pages, a row that was dropped
    stays after the live ones, where it can be copied from until another takes its place.

    Args:
        ahead: what a slot holds of its token also depends on so many tokens after it, as in EAGLE. So the first slot of a row stands
            for its token number ``ahead``, and what rows share ends as many tokens before their texts differ.

    Attributes:
        live: of live rows, in their order; lists that their owners extend.
    """

    def __init__(self, *, ahead: int = 0):
        self.ahead = ahead
        self.live: list[Sequence[int]] = []
        self._groups: list[Hashable] = []
        self._dropped: dict[int, tuple[Hashable, Sequence[int]]] = {}  # by physical row

    def find(
        self,
        cache: Any,
        texts: Sequence[Sequence[int]],
        groups: Sequence[Hashable],
        *,
        share: bool,
        unread: int,
        most: Sequence[int] | None = None,
    ) -> tuple[list[int], list[int]]:
        """For ``texts``, whose rows are about to be appended to ``cache``: the rows to copy from, none if nothing must be copied; and how
        many slots of each are filled already, at most ``most``, and all but ``unread``."""
        own, keys = [self._own(text) for text in texts], [self._key(*each) for each in zip(texts, groups)]
        if isinstance(cache, KEEPING):
            live = [self._own(text) for text in self.live]
            return [], cache.begin(own, live, keys, share=share, unread=unread, most=most)
        held: list[tuple[int, Hashable, Sequence[int], int]] = []
        if share:
            for row, each in enumerate(zip(self.live, self._groups)):
                held.append((row, self._key(*each), self._own(each[0]), cache.lengths[row]))
            for row, (key, ids) in self._dropped.items():
                held.append((row, key, ids, min(len(ids), cache.spoiled.get(row, len(ids)))))
        found = shared_beginnings(own, keys, held, len(self.live), unread, most)
        return [row for row, _ in found], [length for _, length in found]

    def add(self, texts: Sequence[Sequence[int]], groups: Sequence[Hashable]) -> None:
        """Their rows were appended."""
        self.live += texts
        self._groups += groups
        self._dropped = {row: text for row, text in self._dropped.items() if row >= len(self.live)}

    def compact(self, cache: Any, keep: Sequence[int], *, share: bool) -> None:
        """Drop every row not in ``keep``, ascending, here and in ``cache``. ``share``: whether later texts may share what they hold."""
        if isinstance(cache, KEEPING):
            for row in set(range(len(self.live))).difference(keep) if share else ():
                cache.leave(row, self._own(self.live[row]))
        else:
            for row in range(len(keep), len(self.live)):
                text = self.live[row]
                self._dropped[row] = self._key(text, self._groups[row]), list(self._own(text)[: cache.lengths[row]])
        cache.compact(keep)
        self.live, self._groups = [self.live[row] for row in keep], [self._groups[row] for row in keep]

    def wipe(self, cache: Any, rows: Sequence[int]) -> None:
        """Nobody may share or read what ``rows`` hold."""
        for row in rows:
            self.live[row] = []
        cache.share_no_more()
        cache.wipe(rows)

    def share_no_more(self, cache: Any) -> None:
        """The weights have changed: later texts share nothing that ``cache`` holds."""
        self.live, self._dropped = [[] for _ in self.live], {}
        cache.share_no_more()

    def clear(self) -> None:
        """The cache is empty."""
        self.live, self._groups, self._dropped = [], [], {}

    def needed(self, cache: PagedCache | RollbackCache, text: Sequence[int], group: Hashable, nodes: int, written: int) -> list[int]:
        """Pages of each kind for ``text`` and ``nodes`` after it, beyond those that live rows hold; see :meth:`PagedCache.needed`."""
        return cache.needed(self._own(text), self._key(text, group), nodes + self.ahead, written)

    def known(self, cache: PagedCache | RollbackCache, text: Sequence[int], group: Hashable) -> int:
        """Slots for ``text`` that finished texts have left filled."""
        return cache.known(self._own(text), self._key(text, group))

    def _own(self, text: Sequence[int]) -> Sequence[int]:
        """The tokens that slots stand for."""
        return text[self.ahead :] if self.ahead else text

    def _key(self, text: Sequence[int], group: Hashable) -> Hashable:
        return (group, *text[: self.ahead])
