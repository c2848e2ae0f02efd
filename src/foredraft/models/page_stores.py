"""The pages of each kind of layer of a paged cache: rows' tables of them, and their tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.device import reserved, to_device
from foredraft.errors import CacheMemoryError
from foredraft.models.cache import Layer, Window
from foredraft.models.cache_sizes import LEEWAY, in_words
from foredraft.models.pages import PAGE, PagePool, WindowPool

SLACK = 16  # one in so many pages of a kind's memory may be of pages that no longer exist
GONE = -1  # in tables: a page that was given back


@dataclass(frozen=True)
class Kind:
    """Layers that keep the keys and values of the same tokens.

    Attributes:
        page_bytes: of a page, all of these layers together.
        window: a query sees so many tokens at most, itself included; None for all.
        layers: their numbers; None for all layers that no other kind has.
    """

    page_bytes: int
    window: int | None = None
    layers: frozenset[int] | None = None


@dataclass(frozen=True, eq=False)
class Places:
    """Where a pass writes and reads pages of one kind, as tensors on the device of their layers.

    Attributes:
        pages, slots: ``[R, N]`` the page of each node, and its slot in the page.
        table: ``[R, blocks]`` the pages that each row reads.
        begin: the first of these if they are consecutive pages of one row, else None.
    """

    pages: Tensor
    slots: Tensor
    table: Tensor
    begin: int | None

    def read(self, held: Tensor, width: int) -> Tensor:
        """``[R, heads, width, head size]`` of ``held`` ``[pages, heads, PAGE, head size]``: a view if they are consecutive pages of one
        row."""
        if self.begin is None:
            return gathered(held, self.table)[:, :, :width]
        return held.transpose(0, 1).narrow(1, self.begin, self.table.shape[1]).flatten(1, 2)[None, :, :width]


class PageStore:
    """The pages of one kind of layer: which rows hold them, and their tensors ``[pages, heads, PAGE, head size]`` per layer.

    Attributes:
        tables: the pages of each live row, in order; :data:`GONE` for those given back.
        opening: tables of rows that are about to be opened.
        layers: those of this kind that have tensors.
        made: pages that were ever used and hold numbers; the others are not even touched.
        room: pages that tensors have room for; the one after them stands for those that a row lacks, and stays zero.
        places: where this pass writes and reads, by device, once that was asked.
        table: ``tables`` as kernels read them, ``[rows, blocks]`` int32; missing pages are the one after :attr:`room`.
        at_once: tensors, which are on the CPU, get room for all pages that the pool allows when they grow, so that they move once.
    """

    def __init__(self, kind: Kind, pool: PagePool):
        self.kind, self.pool = kind, pool
        self.places: dict[torch.device, Places] = {}
        self.at_once = False
        self.reset()

    def reset(self) -> None:
        self.tables: list[list[int]] = []
        self.opening: list[list[int]] = []
        self.layers: list[Layer] = []
        self.room = self.made = 0
        self.begins: list[int] = []  # the first page of each live row that was not given back
        self.table = torch.zeros(1, 1, dtype=torch.int32, device="cpu")
        self.lines: Any = self.table.numpy()

    @property
    def allocated(self) -> int:
        """Pages that take memory: on a CPU only those that were ever used."""
        return self.made if all(layer.keys.device.type == "cpu" for layer in self.layers) else self.room

    def drop(self, table: Sequence[int]) -> None:
        """A row no longer holds these pages."""
        self.pool.drop([page for page in table if page != GONE])

    def put(self, row: int, index: int, page: int) -> None:
        self.lines[row, index] = page if page != GONE else self.room
        self.tables[row][index] = page

    def extend(self, row: int, pages: Sequence[int]) -> None:
        table = self.tables[row]
        self.lines[row, len(table) : len(table) + len(pages)] = [self.room if page == GONE else page for page in pages]
        table += pages

    def shorten(self, row: int, pages: int) -> None:
        """Only the first ``pages`` pages of a row stay."""
        table = self.tables[row]
        if len(table) > pages:
            self.drop(table[pages:])
            self.lines[row, pages : len(table)] = self.room
            del table[pages:]

    def copy(self, source: int, goal: int, tokens: int) -> None:
        for layer in self.layers:
            for store in (layer.keys, layer.values):
                store[goal, :, :tokens] = store[source, :, :tokens]

    def open(self, blocks: int) -> None:
        """The rows that are about to be opened are live."""
        first = len(self.tables)
        self.tables += self.opening
        self.begins += [next((index for index, page in enumerate(table) if page != GONE), len(table)) for table in self.opening]
        self.opening = []
        self.lay_out(first, blocks)

    def compact(self, keep: Sequence[int], blocks: int) -> None:
        for row in set(range(len(self.tables))).difference(keep):
            self.drop(self.tables[row])
        self.tables, self.begins = [self.tables[row] for row in keep], [self.begins[row] for row in keep]
        self.lay_out(0, blocks)

    def lay_out(self, first: int, blocks: int) -> None:
        """Bring ``tables`` from row ``first`` on into the form that kernels read, with room for so many ``blocks``."""
        rows, now = self.table.shape
        needed = max(blocks, *(len(table) for table in self.tables), 1)
        if len(self.tables) > rows or needed > now:
            self.table = torch.zeros(max(len(self.tables), 2 * rows), max(needed, 2 * now), dtype=torch.int32, device="cpu")
            self.lines, first = self.table.numpy(), 0
        self.lines[first:] = self.room
        for row, table in enumerate(self.tables[first:], first):
            self.lines[row, : len(table)] = [self.room if page == GONE else page for page in table]

    def at(self, row: Any, slot: Any) -> tuple[Any, Any]:
        """The page of a slot of a row, and where in the page it is. Both may be tensors."""
        table = to_device(self.table, row.device) if isinstance(row, Tensor) else self.lines
        return table[row, slot // PAGE], slot % PAGE

    def locate(self, window: Window, rows: Tensor, slots: Tensor) -> Places:
        """Where a pass writes and reads, given the ``slots`` ``[R, N]`` of physical ``rows`` ``[R, 1]`` that it writes to."""
        blocks = pages_of(window.width)
        begin = int(self.lines[window.first, 0])
        neighbours = window.rows == 1 and np.array_equal(self.lines[window.first, :blocks], np.arange(begin, begin + blocks))
        table = to_device(self.table, rows.device)
        read = table[window.first : window.last, :blocks].contiguous()
        return Places(table[rows, slots // PAGE], slots % PAGE, read, begin if neighbours else None)

    def until(self, ends: Sequence[int], rows: int, blocks: int) -> Tensor:
        """``[rows, blocks]`` the pages of the first rows, as many as the tokens up to each one's end take. All others are the page after
        :attr:`room`."""
        found = np.full((rows, blocks), self.room)
        for row, end in enumerate(ends):
            found[row, : pages_of(end)] = self.lines[row, : pages_of(end)]
        return torch.from_numpy(found)

    @property
    def fitting(self) -> bool:
        """No page was handed out since tensors had room for all of them."""
        return not self.pool.waits and bool(self.layers)

    def fit(self, ahead: int, blocks: int, *, clean: bool) -> bool:
        """Give tensors room for every page that was taken, or for ``ahead`` if they grow, and zeros where nothing was written:
        garbage could be NaN. ``clean``: also where another row has written. Whether they have moved."""
        grows = self.pool.made > self.room or (not self.layers and ahead > self.room)
        if grows:
            more, limit = max(2 * self.room if self.layers else 0, ahead), self.pool.limit
            if limit is not None:
                more = limit if self.at_once and self.layers else min(more, limit)
            self.room = self._grow(max(self.pool.made, more))
            self.lay_out(0, blocks)
        made, handed_out = self.pool.made, self.pool.handed_out()
        used = [page for page in handed_out if clean and page < self.made]
        for layer in self.layers if used or made > self.made else ():
            for store in (layer.keys, layer.values):
                if made > self.made:
                    store[self.made : made] = 0
                if used:
                    store[to_device(used, store.device)] = 0
        self.made = max(self.made, made)
        return grows

    def _grow(self, room: int) -> int:
        """Give every layer tensors for ``room`` pages or, where memory is short, for fewer, at least those that were taken. Returns for how
        many."""
        try:
            for layer in self.layers:
                self.allocate(layer, layer.keys, layer.values, room)
        except CacheMemoryError:
            if room == self.pool.made:
                raise
            return self._grow(max(self.pool.made, room // 2))
        return room

    def trim(self, blocks: int) -> bool:
        """Return the memory of pages that no longer exist, or must not any more, if they are many. Whether tensors have moved."""
        beyond = 0 if self.pool.limit is None else self.allocated - max(self.pool.made, self.pool.limit)
        many = max(beyond, self.made - self.pool.made) > self.allocated // SLACK
        if many:
            self.made, self.room = min(self.made, self.pool.made), self.pool.made
            for layer in self.layers:
                self.allocate(layer, layer.keys, layer.values, self.room)
            self.lay_out(0, blocks)
        return many

    def allocate(self, layer: Layer, keys: Tensor, values: Tensor, room: int) -> None:
        """Give ``layer`` tensors for ``room`` pages and the one after them, keeping what it holds. The pages of one head are
        contiguous, so that consecutive pages can be read as a view."""
        stores = []
        for old, new in ((layer.keys, keys), (layer.values, values)):
            shape = new.shape[1], room + 1, PAGE, new.shape[3]
            try:
                if self.at_once:
                    store = reserved(*shape, dtype=new.dtype).transpose(0, 1)
                else:
                    store = torch.empty(*shape, dtype=new.dtype, device=new.device).transpose(0, 1)
            except (torch.OutOfMemoryError, RuntimeError, OSError) as error:
                raise CacheMemoryError(
                    f"the key-value cache grows to {in_words(room * self.kind.page_bytes)}, and {keys.device} has no room for it; set "
                    "cache_memory to less, so that rows wait for each other, or use a shorter prompt or a smaller max_new_tokens"
                ) from error
            kept = min(len(old) - 1, self.made) if len(old) else 0
            if kept:
                store[:kept] = old[:kept]
            store[kept : self.made] = store[-1] = 0
            stores.append(store)
        layer.keys, layer.values = stores


class WindowStore(PageStore):
    """The pages of layers with a window. A page belongs to the page of the same tokens in the store of layers that see all of the text."""

    pool: WindowPool

    def __init__(self, kind: Kind, whole: PagePool):
        super().__init__(kind, WindowPool(whole))

    def sees_from(self, length: int) -> int:
        """The first page that a query after ``length`` tokens sees."""
        assert self.kind.window is not None
        return max(0, length - self.kind.window + 1) // PAGE

    def found(self, pages: Sequence[int], length: int, fresh: Callable[[int], bool]) -> int:
        """The most of the first ``length`` tokens, on ``pages`` of the other store, after which a text can continue: the pages that its
        next query sees are there, or will be because the page is ``fresh``."""
        run, runs = 0, []  # how many consecutive pages are there, up to each
        for page in pages[: pages_of(length)]:
            run = run + 1 if fresh(page) or self.pool.of(page) is not None else 0
            runs.append(run)
        while length:
            last = (length - 1) // PAGE
            if last - self.sees_from(length) < runs[last]:
                return length
            length = last * PAGE
        return 0

    def short_of_a_copy(self, length: int) -> bool:
        """Whether there is no room for the pages that a row of ``length`` tokens sees, and for a copy of its last page."""
        return self.pool.room is not None and self.pool.room < pages_of(length) - self.sees_from(length - LEEWAY) + 1

    def begun(self, pages: Sequence[int], length: int) -> list[int]:
        """The table of a row that holds the first ``length`` tokens, on ``pages`` of the other store."""
        first = self.sees_from(length)
        while first > self.sees_from(length - LEEWAY) and self.pool.of(pages[first - 1]) is not None:
            first -= 1
        table = [GONE] * first
        self.opening.append(table)
        for owner in pages[first : pages_of(length)]:
            table.append(self._of(owner))
        return table

    def moved(self, row: int, index: int, owner: int) -> None:
        """The row has its own page of the other store now, ``owner``, and needs a copy of what belonged to the former one."""
        if index < len(self.tables[row]) and (page := self.tables[row][index]) != GONE:
            self.put(row, index, self._of(owner))
            self.pool.drop([page])

    def give_back(self, row: int, start: int) -> None:
        """Give back what no query of row ``row`` from slot ``start`` on sees."""
        table, first = self.tables[row], max(self.begins[row], self.sees_from(start - LEEWAY))
        given_back = range(self.begins[row], min(first, len(table)))
        self.drop([table[index] for index in given_back])
        for index in given_back:
            self.put(row, index, GONE)
        self.begins[row] = first

    def own(self, row: int, start: int, end: int, owners: Sequence[int]) -> None:
        """Have pages for slots ``start`` to ``end`` of row ``row``, whose pages of the other store are ``owners``."""
        table = self.tables[row]
        if (missing := pages_of(end) - len(table)) > 0:
            self.extend(row, [GONE] * missing)
        for index in range(start // PAGE, pages_of(end)):
            if table[index] == GONE:
                self.put(row, index, self._of(owners[index]))
                self.begins[row] = min(self.begins[row], index)

    def _of(self, owner: int) -> int:
        """The page that belongs to page ``owner`` of the other store, now held by one more row."""
        page = self.pool.of(owner)
        if page is None:
            (page,) = self.pool.take(1)
            self.pool.assign(owner, page)
        else:
            self.pool.share([page])
        return page


def put(held: Tensor, new: Tensor, pages: Tensor, slots: Tensor, *, filler: bool = True) -> None:
    """Write ``new`` ``[R, heads, N, head size]`` to ``slots`` of ``pages``, both ``[R, N]``, of ``held`` ``[pages, heads, PAGE, head
    size]``. If there is ``filler``, it goes to the last page, which stays zero."""
    held[pages, :, slots] = new.transpose(1, 2)
    if filler:
        held[-1].zero_()


def gathered(held: Tensor, pages: Tensor) -> Tensor:
    """A copy ``[R, heads, blocks * PAGE, head size]`` of ``pages`` ``[R, blocks]`` of ``held`` ``[pages, heads, PAGE, head size]``."""
    by_head = held.transpose(0, 1)  # contiguous
    return by_head.index_select(1, pages.flatten()).view(len(by_head), len(pages), -1, held.shape[3]).transpose(0, 1)


def pages_of(tokens: int) -> int:
    """Pages that so many tokens are on."""
    return -(-tokens // PAGE)
