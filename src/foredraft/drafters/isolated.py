"""What drafters learn from texts, kept apart by the ``isolation`` of the rows: nobody is drafted for from what others have written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from foredraft.drafters.base import Row

STORES = 64  # values of isolation whose stores are kept

Store = TypeVar("Store")


class Isolated(Generic[Store]):
    """A store for each value of ``isolation`` but None, whose store is the drafter's own. The least recently used are dropped, but none of
    rows that live: these take turns, so that each would find its store gone.

    Args:
        make: a store that knows what the drafter was given, and nothing that was learnt.
        size: of a store, what it has learnt.
        most: sum of the sizes.
    """

    def __init__(self, make: Callable[[], Store], size: Callable[[Store], int], most: int):
        self.make, self.size, self.most = make, size, most
        self.stores: dict[str, Store] = {}  # the least recently used first
        self._live: set[str | None] = set()

    def keep(self, rows: Sequence[Row]) -> None:
        """These are the rows that live."""
        self._live = {getattr(row, "isolation", None) for row in rows}

    def of(self, row: Row, shared: Store) -> Store:
        """The store of a row; ``shared`` is that of rows without an isolation."""
        isolation = getattr(row, "isolation", None)  # other programs' rows may have none
        if isolation is None:
            return shared
        store = self.stores.pop(isolation) if isolation in self.stores else self.make()
        self.stores[isolation] = store
        while len(self.stores) > STORES or sum(map(self.size, self.stores.values())) > self.most:
            oldest = next((each for each in self.stores if each != isolation and each not in self._live), None)
            if oldest is None:
                break
            del self.stores[oldest]
        return store
