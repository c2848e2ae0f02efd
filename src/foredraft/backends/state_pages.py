"""Keys and values of models that cannot branch, in pages: those of a row, and of the copies of its states that are stored.

Passes are made of one row at a time over transformers' own cache. Only its layers that keep the keys and values of all tokens are replaced
by layers that write into the pages of that row. A stored state holds the pages of the tokens that it has read, and copies none.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer

from foredraft.models.cache import Window
from foredraft.models.page_stores import Kind, PageStore, pages_of
from foredraft.models.paged_cache import PagedCache
from foredraft.models.pages import PAGE, PagePool
from foredraft.models.windows import page_bytes


class StatePool(PagePool):
    """Pages of rows and of stored states, which may hold the same ones. Without a limit: that of the states, in bytes, counts them."""

    def __init__(self) -> None:
        super().__init__(spare=sys.maxsize)

    def clear(self) -> None:
        self._stored = Counter[int]()  # how many states hold each page
        super().clear()

    def rows(self, page: int) -> int:
        return self.counts[page] - self._stored[page] if 0 <= page < self.made else 0

    def keep(self, pages: Sequence[int]) -> None:
        """One more state holds these pages, each of which a row holds."""
        self._stored.update(pages)
        for page in pages:
            self.counts[page] += 1

    def give_up(self, pages: Sequence[int]) -> None:
        """One state fewer holds these pages; those that nobody holds then are free."""
        self._stored.subtract(pages)
        for page in pages:
            self._release(page)

    def _kept(self, page: int) -> bool:
        return self._stored[page] > 0

    def _idle(self, page: int) -> None:
        pass


@dataclass(eq=False, kw_only=True)
class RowPages:
    """The ``pages`` of a row. Others may read its first ``read`` slots, so that pages are copied before these are written."""

    pages: list[int] = field(default_factory=list)
    read: int = 0


class StatePages(PagedCache):
    """The pages of all rows and stored states. Its one live row is the one whose pass is made."""

    pool: StatePool

    def __init__(self) -> None:
        super().__init__([])
        self.pool = StatePool()
        self.stores = [PageStore(Kind(0), self.pool)]

    def turn_to(self, row: RowPages, start: int, tokens: int) -> None:
        """The next pass reads so many ``tokens`` of ``row`` from slot ``start`` on."""
        self.stores[0].tables, self._filled = [row.pages], [row.read]
        self.stores[0].lay_out(0, pages_of(start + tokens))
        self.enter(Window(0, 1, (start,), tokens))

    def take_up(self, row: RowPages, pages: Sequence[int], tokens: int) -> None:
        """``row`` begins with the first ``tokens`` tokens on ``pages``, which a stored state holds. It gets a copy of the last page if that
        is not full."""
        full = tokens // PAGE
        last = pages[full : pages_of(tokens)]
        self.pool.share(pages[:full])
        self.drop(row)
        row.pages, row.read = list(pages[:full]), full * PAGE
        if last:
            row.pages += self.pool.take(1)
            self._fit()
            self.stores[0].copy(last[0], row.pages[full], tokens % PAGE)

    def drop(self, row: RowPages) -> None:
        """``row`` holds no pages any more."""
        self.pool.drop(row.pages)
        row.pages = []

    def measure(self) -> None:
        """Learn from what was written how much memory a page takes."""
        self.stores[0].kind = Kind(sum(map(page_bytes, self.written)))


class InPages:
    """What a layer of transformers' cache does if its keys and values are in ``pages``, under its number ``index``."""

    pages: StatePages
    index: int

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.pages.update(key_states, value_states, self.index)

    def get_seq_length(self) -> int:
        return self.pages.get_seq_length()


class PagedLayer(InPages, DynamicLayer):  # type: ignore[misc]
    """A layer with attention."""


class PagedHybridLayer(InPages, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A layer with attention and a recurrent state."""


PAGED = {DynamicLayer: PagedLayer, LinearAttentionAndFullAttentionLayer: PagedHybridLayer}


def in_pages(memory: DynamicCache, pages: StatePages) -> int:
    """Have the layers of an empty cache that keep keys and values of all tokens keep them in ``pages``. Returns how many these are."""
    found = [(index, layer) for index, layer in enumerate(memory.layers) if type(layer) in PAGED]
    for index, layer in found:
        memory.layers[index] = twin = PAGED[type(layer)]()
        vars(twin).update(vars(layer), pages=pages, index=index)
    return len(found)
