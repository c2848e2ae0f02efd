"""A key-value cache in pages (Kwon et al. 2023): each row has a table of pages of :data:`PAGE` tokens, and rows share what they begin with.

Kernels read pages where they lie. A model that runs without them gets its keys gathered: one copy per layer and pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import CacheMemoryError
from foredraft.models.cache import Layer, TreeCache, Window
from foredraft.models.cache_sizes import in_words
from foredraft.models.pages import PAGE, PagePool

WORTH_SHARING = 16  # a shorter beginning is computed again


class PagedCache(TreeCache):
    """As :class:`~foredraft.models.cache.TreeCache`, with keys and values ``[pages, heads, PAGE, head size]`` per layer.

    A page that more than one row holds, or that a finished text has left behind, is never written: a row that would write there gets a
    copy of its own.

    Args:
        page_bytes: of a page, all layers together.

    Attributes:
        pool: who holds which page.
        tables: the pages of each live row, in order.
    """

    def __init__(self, page_bytes: int) -> None:
        super().__init__()
        self.page_bytes = page_bytes
        self.pool = PagePool()
        self._reset()

    def _reset(self) -> None:
        self.tables: list[list[int]] = []
        self._keys: list[Hashable] = []  # of live rows: rows with equal keys share
        self._prompts: list[int] = []  # pages that were taken for each live row when it was opened
        self._told: list[int] = []  # tokens of live rows that the prefix tree knows of
        self._filled: list[int] = []  # most tokens that live rows have held
        self._opening: list[list[int]] = []  # tables of rows that are about to be opened
        self._room = 0  # pages that buffers have room for; one more behind them takes what nobody reads
        self._ahead = 0  # pages that rows will hold in the end, as far as that is known
        self._zeroed = 0  # pages that were ever used; the others are not even touched
        self._table = torch.zeros(1, self.capacity // PAGE, dtype=torch.int32)  # `tables`, for kernels; behind them the page for nobody
        self._lines: Any = self._table.numpy()

    # -- sharing ------------------------------------------------------------------------------------------------------

    def begin(
        self,
        texts: Sequence[Sequence[int]],
        live: Sequence[Sequence[int]],
        keys: Sequence[Hashable],
        *,
        share: bool = True,
        unread: int = 1,
        most: Sequence[int] | None = None,
    ) -> list[int]:
        """Take pages for ``texts``, whose rows :meth:`open` is about to append. How many tokens of each the cache holds already, because
        another text began like it. A text may share with those before it in ``texts``, which are computed first.

        Args:
            live: the texts of live rows.
            keys: of ``texts``; only rows with equal keys share.
            share: whether they may share at all.
            unread: so many tokens of each stay to be computed.
            most: tokens of each that it may share at most.

        Raises:
            CacheMemoryError: there are not enough pages; nothing has changed.
        """
        if any(filled < told for filled, told in zip(self._filled, self._told)):
            self.pool.prefixes.clear()  # a row was opened and has not been read yet
            self._told = [0] * len(self._told)
        for row, text in enumerate(live):
            self._tell(row, text)
        lengths, told, fresh = list[int](), list[int](), set[int]()
        try:
            for text, key, limit in zip(texts, keys, most or map(len, texts)):
                pages, length = self._longest(text, key, live, min(limit, len(text) - unread)) if share else ([], 0)
                if length % PAGE and pages[-1] in fresh:  # what it shall hold is not computed yet
                    length -= length % PAGE
                whole, partly = pages[: length // PAGE], pages[length // PAGE :][: length % PAGE]
                self.pool.share([*whole, *partly])
                count, room = _pages(len(text)) - len(whole), self.pool.room
                if partly and room is not None and room < count:  # no room for the original beside the copy
                    self.pool.drop(partly)
                    partly, length = [], len(whole) * PAGE
                table = [*whole, *partly]  # all that the row holds, should anything fail
                self._opening.append(table)
                taken = self.pool.take(count)
                table += taken
                self._fit()
                if partly:
                    self._copy(partly[0], taken[0], length % PAGE)
                    self.pool.drop(partly)
                    table[:] = [*whole, *taken]
                fresh.update(taken)
                full = (len(text) - max(0, unread - 1)) // PAGE if share else 0  # pages that will be full when the row has been read
                self.pool.prefixes.insert(key, text[: full * PAGE], table[:full])
                told.append(full * PAGE)
                lengths.append(length)
        except BaseException:
            for table in self._opening:
                self.pool.drop(table)
            self._opening = []
            self.pool.prefixes.clear()  # it may know of pages that will never be filled
            raise
        self._keys += keys
        self._prompts += map(len, self._opening)
        self._told += told
        return lengths

    def _longest(self, text: Sequence[int], key: Hashable, live: Sequence[Sequence[int]], most: int) -> tuple[list[int], int]:
        """The longest beginning of ``text[:most]`` that finished texts hold, or live rows, and its pages."""
        pages, length = self.pool.prefixes.match(key, text, most)
        for row, other in enumerate(live):
            end = min(self.lengths[row], len(other), most)
            if end > length and key == self._keys[row] and other[:length] == text[:length]:
                shared = next((i for i in range(length, end) if other[i] != text[i]), end)
                if shared > length:
                    pages, length = self.tables[row][: _pages(shared)], shared
        return (pages, length) if length >= WORTH_SHARING else ([], 0)

    def _tell(self, row: int, text: Sequence[int]) -> None:
        """Let later texts share the full pages of a live row."""
        known = min(self.lengths[row], len(text)) // PAGE * PAGE
        if known > self._told[row]:
            self.pool.prefixes.insert(self._keys[row], text[:known], self.tables[row][: known // PAGE])
            self._told[row] = known

    def leave(self, row: int, text: Sequence[int]) -> None:
        """Row ``row`` is about to be dropped: keep its pages for texts that begin like ``text`` as long as nobody needs them."""
        if self._filled[row] < self._told[row]:
            self.pool.prefixes.clear()  # the row was given up before its prompt was read
            return
        held = list(text[: self.lengths[row]])
        self.pool.prefixes.insert(self._keys[row], held, self.tables[row][: _pages(len(held))])

    def share_no_more(self) -> None:
        """What is held was computed with other weights than what comes."""
        self.pool.prefixes.clear()

    def needed(self, text: Sequence[int], key: Hashable, nodes: int) -> int:
        """Pages that a row would take for ``text`` and ``nodes`` behind it, beside those that live rows hold."""
        pages, length = self.pool.prefixes.match(key, text, len(text) - 1)
        return _pages(len(text) + nodes) - sum(self.pool.rows(page) > 0 for page in pages[: length // PAGE])

    def known(self, text: Sequence[int], key: Hashable) -> int:
        """Tokens of ``text`` that texts which are over have left in the cache, at its beginning; rows of ``key`` find them."""
        return self.pool.prefixes.match(key, text, len(text) - 1)[1]

    def growth(self, nodes: int, without: Sequence[int]) -> int:
        """Pages that live rows would take for ``nodes`` each, less those that only the rows ``without`` hold."""
        rows = [row for row in range(len(self.tables)) if row not in without]
        wanted = sum(max(0, _pages(self.lengths[row] + nodes) - len(self.tables[row])) for row in rows)
        return wanted - (len(set[int]().union(*self.tables) - set[int]().union(*(self.tables[row] for row in rows))) if without else 0)

    # -- what kernels ask ---------------------------------------------------------------------------------------------

    @property
    def outgrown(self) -> bool:
        return False  # buffers grow before a pass

    def place(self, about: Any, layer_idx: int = 0) -> int:
        keys = self.layers[layer_idx].keys
        about.page_stride, about.head_stride = keys.stride(0), keys.stride(1)
        about.table_stride = self._table.shape[1]
        about.table = self._table.data_ptr() + self._window.first * self._lines.strides[0]
        return 0

    def buffers(self, layer_idx: int, like: Tensor, heads: int, size: int) -> tuple[Tensor, Tensor]:
        shaped = like.new_empty(0, heads, 0, size)
        layer = self._layer(layer_idx, shaped, shaped)
        return layer.keys, layer.values

    # -- what transformers asks ---------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        window, layer = self._window, self._layer(layer_idx, key_states, value_states)
        pages, slots = self._write_indices(key_states.device)
        layer.keys[pages, :, slots] = key_states.transpose(1, 2)
        layer.values[pages, :, slots] = value_states.transpose(1, 2)
        seen = self._table[window.first : window.last, : _pages(window.width)].long()
        keys, values = (store[seen].transpose(1, 2).flatten(2, 3)[:, :, : window.width] for store in (layer.keys, layer.values))
        return keys, values

    # -- what the target asks -----------------------------------------------------------------------------------------

    def open(self, lengths: Sequence[int]) -> None:
        if not self._opening:  # nothing was asked of what they share
            self.begin([range(length) for length in lengths], [], [None] * len(lengths), share=False)
        self.lengths.extend(lengths)
        self.tables += self._opening
        self._filled += lengths
        self._opening = []
        self._lay_out(len(self.tables) - len(lengths))

    def reserve(self, tokens: int) -> None:
        """Have room in the tables for ``tokens`` per row. Pages are taken when they are written."""
        super().reserve(tokens)
        self._ahead = max(self._ahead, len(self.tables) * _pages(tokens))
        if self._table.shape[1] * PAGE < self.capacity:
            self._lay_out(0)

    def enter(self, window: Window) -> None:
        super().enter(window)
        for row, start in enumerate(window.starts):
            count = window.nodes if window.counts is None else window.counts[row]
            self._own(window.first + row, start, start + count)
        self._fit()

    def commit(self, path: Tensor | None, kept: Sequence[int]) -> None:
        first = self._window.first
        super().commit(path, kept)
        for row in range(first, first + len(kept)):
            length, table = self.lengths[row], self.tables[row]
            self._filled[row] = max(self._filled[row], length)
            needed = max(_pages(length), self._prompts[row])
            if len(table) > needed:
                self.pool.drop(table[needed:])
                self._lines[row, needed : len(table)] = self._room
                del table[needed:]

    def compact(self, keep: Sequence[int]) -> None:
        for row in set(range(len(self.tables))).difference(keep):
            self.pool.drop(self.tables[row])
        for name in ("tables", "lengths", "_keys", "_prompts", "_told", "_filled"):
            held = getattr(self, name)
            setattr(self, name, [held[row] for row in keep])
        self._lay_out(0)

    def forget(self) -> None:
        super().forget()
        self.pool.clear()
        self._reset()

    @property
    def bytes(self) -> int:
        """Memory that keys and values have ever taken."""
        return self._zeroed * self.page_bytes

    # -- inside -------------------------------------------------------------------------------------------------------

    def _own(self, row: int, start: int, end: int) -> None:
        """Slots ``start`` to ``end`` of a row have pages, and what others read there is not written over."""
        table, needed = self.tables[row], _pages(end)
        if needed > len(table):
            self._lines[row, len(table) : needed] = taken = self.pool.take(needed - len(table))
            table += taken
        over = _pages(min(end, self._filled[row])) if start < self._filled[row] else 0  # behind it nobody has read anything
        for index in range(start // PAGE, over):
            if self.pool.counts[table[index]] > 1:
                (mine,) = self.pool.take(1)
                self._fit()
                self._copy(table[index], mine, PAGE)
                self.pool.drop([table[index]])
                self._lines[row, index] = table[index] = mine

    def _copy(self, source: int, goal: int, tokens: int) -> None:
        for layer in self.written:
            for store in (layer.keys, layer.values):
                store[goal, :, :tokens] = store[source, :, :tokens]

    def _fit(self) -> None:
        """Buffers have room for every page that was taken, and hold zeros where nothing was written: garbage could be NaN."""
        if self.pool.made > self._room or not self.layers:
            more, limit = max(2 * self._room if self.layers else 0, self._ahead), self.pool.limit
            room = max(self.pool.made, more if limit is None else min(more, limit))
            for layer in self.written:
                self._allocate(layer, layer.keys, layer.values, room)
            self._room = room
            self._lay_out(0)
        if self.pool.made > self._zeroed:
            for layer in self.written:
                for store in (layer.keys, layer.values):
                    store[self._zeroed : self.pool.made] = 0
            self._zeroed = self.pool.made

    def _layer(self, index: int, keys: Tensor, values: Tensor) -> Layer:
        while len(self.layers) <= index:
            self.layers.append(Layer())
        layer = self.layers[index]
        if not len(layer.keys) or layer.keys.dtype != keys.dtype:
            self._allocate(layer, keys, values, self._room)
        return layer

    def _allocate(self, layer: Layer, keys: Tensor, values: Tensor, room: int) -> None:  # type: ignore[override]
        stores = []
        for old, new in ((layer.keys, keys), (layer.values, values)):
            try:
                store = torch.empty(new.shape[1], room + 1, PAGE, new.shape[3], dtype=new.dtype, device=new.device).transpose(0, 1)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                raise self._no_room(room, keys.device) from error
            kept = min(len(old) - 1, self._zeroed) if len(old) else 0
            if kept:
                store[:kept] = old[:kept]
            store[kept : self._zeroed] = store[-1] = 0
            stores.append(store)
        layer.keys, layer.values = stores
        self.allocations, self._viewed = self.allocations + 1, None

    def _no_room(self, room: int, device: torch.device) -> CacheMemoryError:  # type: ignore[override]
        return CacheMemoryError(
            f"the key-value cache grows to {in_words(room * self.page_bytes)}, and {device} has no room for it; set "
            "cache_memory to less, so that rows wait for each other, or use a shorter prompt or a smaller max_new_tokens"
        )

    def _lay_out(self, first: int) -> None:
        """Bring ``tables`` from row ``first`` on into the form that kernels read."""
        rows, blocks = self._table.shape
        needed = max(self.capacity // PAGE, *(len(table) for table in self.tables), 1)
        if len(self.tables) > rows or needed > blocks:
            self._table = torch.zeros(max(len(self.tables), 2 * rows), max(needed, 2 * blocks), dtype=torch.int32)
            self._lines, first = self._table.numpy(), 0
        self._lines[first:] = self._room
        for row, table in enumerate(self.tables[first:], first):
            self._lines[row, : len(table)] = table

    def _write_indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._indices:
            rows, slots = super()._write_indices(device)
            self._indices[device] = self._table.long()[rows + self._window.first, slots // PAGE], slots % PAGE
        return self._indices[device]

    def _at(self, row: int, slot: int) -> tuple[int, int]:
        return self.tables[row][slot // PAGE], slot % PAGE


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)
