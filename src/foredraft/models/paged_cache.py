"""A key-value cache in pages (Kwon et al. 2023): each row has a table of pages of :data:`PAGE` tokens, and rows share what they begin with.

Layers that see a sliding window of the text have pages of their own, which a row gives back as the window moves on. Kernels read pages
in place. A model that runs without them gets keys and values from the cache: as a view if a single row has consecutive pages, otherwise
as a copy, in each layer of each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from foredraft.models.cache import Layer, TreeCache, Window
from foredraft.models.cache_sizes import pages_kept
from foredraft.models.page_stores import GONE, Kind, PageStore, Places, WindowStore, pages_of, put
from foredraft.models.pages import PAGE, PagePool

WORTH_SHARING = 16  # a shorter beginning is computed again


class PagedCache(TreeCache):
    """As :class:`~foredraft.models.cache.TreeCache`, with keys and values in pages.

    A page that more than one row holds, or that a finished text has left behind, is never written: a row that would write there gets a
    copy of its own.

    Args:
        kinds: of layers; one at most without a window.
        handed: as the attribute, until the first pass.

    Attributes:
        handed: models get keys and values from the cache, including those that the mask hides. None of these may be another row's,
            because a NaN times a weight of zero is NaN. Hooks can change this, and whoever makes passes sets it for each.
        pool: who holds which page of the layers without a window. If there are none, it counts pages that take no memory.
        stores: the pages of each kind, those without a window first.
        reader: reads keys and values in place during a pass; None if the cache returns them to the model.
    """

    def __init__(self, kinds: Sequence[Kind], *, handed: bool = False) -> None:
        super().__init__()
        whole = next((kind for kind in kinds if kind.window is None), Kind(0, None, frozenset()))
        self.pool = PagePool()
        self.windows = [WindowStore(kind, self.pool) for kind in kinds if kind.window is not None]
        self.stores: list[PageStore] = [PageStore(whole, self.pool), *self.windows]
        self.handed = handed
        self.reader: Any = None
        self._memory: int | None = None
        self._beside = 0
        self._reset()

    def _reset(self) -> None:
        self._keys: list[Hashable] = []  # of live rows: rows with equal keys share
        self._prompts: list[int] = []  # pages that were taken for each live row when it was opened
        self._told: list[int] = []  # tokens of live rows that the prefix tree knows of
        self._filled: list[int] = []  # most tokens that live rows have held
        self._ahead = 0  # tokens that rows will hold in the end, as far as that is known
        for store in self.stores:
            store.reset()

    @property
    def tables(self) -> list[list[int]]:
        """The pages of each live row, in order, in :attr:`pool`."""
        return self.stores[0].tables

    @property
    def pools(self) -> list[Any]:
        """Who holds which page of each kind of layer."""
        return [store.pool for store in self.stores]

    @property
    def unit_bytes(self) -> list[int]:
        """Of a page of each kind of layer."""
        return [store.kind.page_bytes for store in self.stores]

    @property
    def page_bytes(self) -> int:
        """Of a page, all layers together."""
        return sum(self.unit_bytes)

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
        another text began like it. A text may share with those before it in ``texts``, which are computed first, and before any row leaves.

        Args:
            live: the texts of live rows.
            keys: of ``texts``; only rows with equal keys share.
            share: whether they may share at all.
            unread: so many tokens of each must still be computed.
            most: tokens of each that it may share at most.

        Raises:
            CacheMemoryError: there are not enough pages; nothing has changed.
        """
        if self.stores[0].opening or len(self._keys) > len(self.lengths):
            self._open_none()  # an interrupt came between this and `open`
        if any(filled < told for filled, told in zip(self._filled, self._told)):
            self.pool.prefixes.clear()  # a row was opened and has not been read yet
            self._told = [0] * len(self._told)
        for row, text in enumerate(live) if share else ():
            self._tell(row, text)
        lengths, told, fresh = list[int](), list[int](), set[int]()
        whole = self.stores[0]
        try:
            for text, key, limit in zip(texts, keys, most or map(len, texts)):
                pages, length = self._longest(text, key, live, min(limit, len(text) - unread)) if share else ([], 0)
                if length % PAGE and pages[-1] in fresh:  # its content is not computed yet
                    length -= length % PAGE
                length = self._found(pages, length, fresh)
                kept, partly = pages[: length // PAGE], pages[length // PAGE :][: length % PAGE]
                self.pool.share([*kept, *partly])
                count, room = pages_of(len(text)) - len(kept), self.pool.room
                if partly and ((room is not None and room < count) or any(store.short_of_a_copy(length) for store in self.windows)):
                    # no room for the original beside the copy
                    self.pool.drop(partly)
                    partly, length = [], self._found(kept, len(kept) * PAGE, fresh)
                    self.pool.drop(kept[length // PAGE :])
                    del kept[length // PAGE :]
                    count = pages_of(len(text)) - len(kept)
                table = [*kept, *partly]  # all that the row holds, if anything fails
                whole.opening.append(table)
                for store in self.windows:
                    store.begun(table, length)
                taken = self.pool.take(count, after=kept[-1] if kept else None)
                table += taken
                self._fit()
                if partly:
                    whole.copy(partly[0], taken[0], length % PAGE)
                    self.pool.drop(partly)
                    table[:] = [*kept, *taken]
                    for store in self.windows:
                        self._own_copy(store, store.opening[-1], length, taken[0])
                fresh.update(taken)
                full = max(0, len(text) - max(0, unread - 1)) // PAGE if share else 0  # pages that will be full when the row has been read
                self.pool.prefixes.insert(key, text[: full * PAGE], table[:full])
                told.append(full * PAGE)
                lengths.append(length)
        except BaseException:
            self._open_none()
            raise
        self._keys += keys
        self._prompts += map(len, whole.opening)
        self._told += told
        return lengths

    def _open_none(self) -> None:
        """The rows that were about to be opened will not be."""
        for store in reversed(self.stores):
            for table in store.opening:
                store.drop(table)
            store.opening = []
        self.pool.prefixes.clear()  # it may know of pages that will never be filled
        for held in (self._keys, self._prompts, self._told):
            del held[len(self.lengths) :]

    def _own_copy(self, store: WindowStore, table: list[int], length: int, owner: int) -> None:
        """The last page of ``table``, of which another row's text fills a part, becomes a copy that belongs to ``owner``."""
        (mine,) = store.pool.take(1)
        store.pool.assign(owner, mine)
        former, table[-1] = table[-1], mine
        self._fit()
        store.copy(former, mine, length % PAGE)
        store.pool.drop([former])

    def _longest(self, text: Sequence[int], key: Hashable, live: Sequence[Sequence[int]], most: int) -> tuple[list[int], int]:
        """The longest beginning of ``text[:most]`` that finished texts hold, or live rows, and its pages."""
        pages, length = self.pool.prefixes.match(key, text, most)
        for row, other in enumerate(live):
            end = min(self.lengths[row], len(other), most)
            if end > length and key == self._keys[row] and other[:length] == text[:length]:
                shared = next((i for i in range(length, end) if other[i] != text[i]), end)
                if shared > length:
                    pages, length = self.tables[row][: pages_of(shared)], shared
        return (pages, length) if length >= WORTH_SHARING else ([], 0)

    def _found(self, pages: Sequence[int], length: int, fresh: set[int]) -> int:
        """How many of the first ``length`` tokens, on ``pages``, can be shared: layers with a window may have given some up."""
        before = -1
        while self.windows and length != before:
            before = length
            for store in self.windows:
                length = store.found(pages, length, fresh.__contains__)
        return length if length >= WORTH_SHARING else 0

    def _tell(self, row: int, text: Sequence[int]) -> None:
        """Let later texts share the full pages of a live row."""
        known = min(self.lengths[row], len(text)) // PAGE * PAGE
        if known > self._told[row]:
            self.pool.prefixes.insert(self._keys[row], text[:known], self.tables[row][: known // PAGE])
            self._told[row] = known

    def leave(self, row: int, text: Sequence[int]) -> None:
        """Row ``row`` is about to be dropped: keep its pages for texts that begin like ``text`` until their memory is needed."""
        if self._filled[row] < self._told[row]:
            self.pool.prefixes.clear()  # the row was given up before its prompt was read
            return
        held = list(text[: self.lengths[row]])
        self.pool.prefixes.insert(self._keys[row], held, self.tables[row][: pages_of(len(held))])

    def share_no_more(self) -> None:
        """The weights have changed: later texts share nothing that is held."""
        self.pool.prefixes.clear()

    # -- how much room there is -----------------------------------------------------------------------------------------

    def needed(self, text: Sequence[int], key: Hashable, nodes: int, written: int) -> list[int]:
        """Pages of each kind that a row would take for ``text`` and ``nodes`` after it, beyond those that live rows hold, if ``written``
        tokens are written in one pass."""
        pages, length = self.pool.prefixes.match(key, text, len(text) - 1)
        shared = sum(self.pool.rows(page) > 0 for page in pages[: self._found(pages, length, set()) // PAGE])
        first, *others = self.whole(len(text) + nodes, written)
        return [first - shared, *others]

    def whole(self, tokens: int, written: int) -> list[int]:
        """Pages of each kind that a row of so many ``tokens`` takes, at most."""
        return [pages_kept(tokens, store.kind.window, min(written, tokens)) for store in self.stores]

    def known(self, text: Sequence[int], key: Hashable) -> int:
        """Tokens at the beginning of ``text`` that finished texts have left in the cache, for rows of ``key``."""
        return self._found(*self.pool.prefixes.match(key, text, len(text) - 1), set())

    def growth(self, nodes: int, without: Sequence[int]) -> list[int]:
        """Pages of each kind that live rows would take for ``nodes`` each, less those that nobody would hold any more, of the rows
        ``without``. What windows have moved on from is given back first: others may take it before these rows have a pass."""
        for row, length in enumerate(self.lengths):
            for windowed in self.windows:
                windowed.give_back(row, length)
        rows = [row for row in range(len(self.tables)) if row not in without]
        found = []
        for store in self.stores:
            wanted = sum(max(0, pages_of(self.lengths[row] + nodes) - len(store.tables[row])) for row in rows)
            freed = set[int]()
            if without:
                freed = set[int]().union(*store.tables).difference(*(store.tables[row] for row in rows))
            found.append(wanted - len(freed - {GONE}))
        return found

    def limit(self, memory: int | None, beside: int) -> None:
        """All pages together take at most ``memory`` bytes, None for no limit. Every kind gets as many at first; see :meth:`make_room`.

        Args:
            beside: bytes that a draft model takes for each page of 64 tokens.
        """
        self._memory, self._beside = memory, beside
        for pool, size in zip(self.pools, self._sizes):
            pool.limit = None if memory is None or not size else memory // sum(self._sizes)

    def keep_to(self, other: PagedCache) -> None:
        """Keep no more pages of any kind than ``other``, whose budget counts one of each beside each of its own, unless rows need them: a
        draft model may have more tokens than its target."""
        self.pool.spare = other.pool.spare
        for store in self.stores:
            store.pool.keep_to(other.pool)

    def fill(self) -> None:
        """Finished texts may stay until the limit is reached, however little live rows hold."""
        for pool in self.pools:
            pool.spare = pool.limit or pool.spare

    def make_room(self, pages: Sequence[int]) -> bool:
        """Whether rows can take so many more ``pages`` of each kind. If necessary, the limits of the kinds are set in proportion to what
        rows then hold. Cached pages beyond these limits are evicted, and their memory is freed when another kind takes it."""
        if all(pool.room is None or more <= pool.room for pool, more in zip(self.pools, pages)):
            return True
        wanted = [max(0, pool.held + more) for pool, more in zip(self.pools, pages)]
        total = self.cost(wanted)
        if self._memory is None or total > self._memory:
            return False
        for pool, count, size in zip(self.pools, wanted, self._sizes):
            if size:
                pool.limit = count * self._memory // total
        return True

    def cost(self, pages: Sequence[int]) -> int:
        """Bytes of so many ``pages`` of each kind, including what a draft model takes beside them."""
        return sum(count * size for count, size in zip(pages, self._sizes))

    @property
    def _sizes(self) -> list[int]:
        """Bytes of a page of each kind, including what a draft model takes beside it."""
        first, *others = self.unit_bytes
        return [first + self._beside, *others]

    # -- what kernels ask ---------------------------------------------------------------------------------------------

    def fits(self, layer: Layer) -> bool:
        return len(layer.keys) > 0  # buffers grow before a pass

    def place(self, about: Any, layer_idx: int = 0) -> int:
        store, keys = self._store(layer_idx), self.layers[layer_idx].keys
        about.page_stride, about.head_stride = keys.stride(0), keys.stride(1)
        about.table_stride, about.spare = store.table.shape[1], store.room
        about.positions = None if self.positions is None else self.positions.data_ptr()
        about.table = store.table.data_ptr() + self._window.first * store.lines.strides[0]
        return 0

    def buffers(self, layer_idx: int, like: Tensor, heads: int, *sizes: int) -> tuple[Tensor, Tensor]:
        layer = self._layer(layer_idx, *(like.new_empty(0, heads, 0, size) for size in (sizes[0], sizes[-1])))
        return layer.keys, layer.values

    # -- what transformers asks ---------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        layer = self._layer(layer_idx, key_states, value_states)
        if self.reader is not None:
            return self.reader.write(layer_idx, key_states, value_states)
        store, width = self.write(layer_idx, key_states, value_states), self._window.width
        places = self.places(store, key_states.device)
        return places.read(layer.keys, width), places.read(layer.values, width)

    def write(self, layer_idx: int, key_states: Tensor, value_states: Tensor) -> PageStore:
        """Write ``[R, heads, N, head size]`` at the window's slots of a layer, whose pages are returned."""
        store, layer = self._store(layer_idx), self.layers[layer_idx]
        places, filler = self.places(store, key_states.device), self._window.counts is not None
        put(layer.keys, key_states, places.pages, places.slots, filler=filler)
        put(layer.values, value_states, places.pages, places.slots, filler=filler)
        return store

    def places(self, store: PageStore, device: torch.device) -> Places:
        """Where the pass writes and reads pages of ``store``, as tensors on ``device``."""
        if device not in store.places:
            rows, slots = self._write_indices(device)
            store.places[device] = store.locate(self._window, rows + self._window.first, slots)
        return store.places[device]

    # -- what the target asks -----------------------------------------------------------------------------------------

    def open(self, lengths: Sequence[int]) -> None:
        if not self.stores[0].opening:  # nothing was asked of what they share
            self.begin([range(length) for length in lengths], [], [None] * len(lengths), share=False)
        self.lengths.extend(lengths)
        self._filled += lengths
        for store in self.stores:
            store.open(self.capacity // PAGE)

    def reserve(self, tokens: int) -> None:
        """Have room in the tables for ``tokens`` per row. Pages are taken when they are written."""
        super().reserve(tokens)
        self._ahead = max(self._ahead, tokens)
        for store in self.stores:
            if store.table.shape[1] * PAGE < self.capacity:
                store.lay_out(0, self.capacity // PAGE)

    def enter(self, window: Window) -> None:
        super().enter(window)
        for store in self.stores:
            store.places = {}
        for row, start in enumerate(window.starts, window.first):
            for store in self.windows:
                store.give_back(row, start - window.before)
        for row, start in enumerate(window.starts, window.first):
            end = start + (window.nodes if window.counts is None else window.counts[row - window.first])
            self._own(row, start, end)
            for store in self.windows:
                store.own(row, start - window.before, end, self.tables[row])
        self._fit()

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget the tokens after the first ``lengths[r]`` of each row. A row whose windows have moved on by more than
        :data:`LEEWAY` since then forgets all of it."""
        lost = [any(store.begins[row] > store.sees_from(length) for store in self.windows) for row, length in enumerate(lengths)]
        super().rewind([0 if gone else length for length, gone in zip(lengths, lost)])
        self._filled = [max(pair) for pair in zip(self._filled, self.lengths)]  # this may also go forward, to keep a draft

    def commit(self, path: Tensor | None, kept: Sequence[int]) -> None:
        first = self._window.first
        super().commit(path, kept)
        for row in range(first, first + len(kept)):
            length = self.lengths[row]
            self._filled[row] = max(self._filled[row], length)
            for store in reversed(self.stores):
                store.shorten(row, max(pages_of(length), self._prompts[row]))

    def wipe(self, rows: Sequence[int]) -> None:
        """Put zeros into the pages that only one of ``rows`` holds."""
        for store in self.stores:
            pages = [page for row in rows for page in store.tables[row] if page != GONE and store.pool.rows(page) <= 1]
            for layer in store.layers:
                layer.keys[pages] = layer.values[pages] = 0

    @contextmanager
    def restored(self, rows: int, span: int) -> Iterator[None]:
        kept = []
        for store in self.stores:
            pages = [*{page for table in store.tables for page in table if page != GONE}, store.room]
            kept += [(held, pages, held[pages]) for layer in store.layers for held in (layer.keys, layer.values)]
        try:
            yield
        finally:
            for held, pages, before in kept:
                held[pages] = before

    def compact(self, keep: Sequence[int]) -> None:
        for store in reversed(self.stores):
            store.compact(keep, self.capacity // PAGE)
        for name in ("lengths", "_keys", "_prompts", "_told", "_filled"):
            held = getattr(self, name)
            setattr(self, name, [held[row] for row in keep])

    def forget(self) -> None:
        super().forget()
        self.pool.clear()
        self._reset()

    @property
    def bytes(self) -> int:
        """Memory that keys and values have ever taken."""
        return sum(store.allocated * store.kind.page_bytes for store in self.stores)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _own(self, row: int, start: int, end: int) -> None:
        """Give slots ``start`` to ``end`` of a row pages, and copies of pages that others read."""
        store, table = self.stores[0], self.tables[row]
        if (missing := pages_of(end) - len(table)) > 0:
            store.extend(row, self.pool.take(missing, after=table[-1] if table else None))
        over = pages_of(min(end, self._filled[row])) if start < self._filled[row] else 0  # nobody has read anything after it
        for index in range(start // PAGE, over):
            if self.pool.counts[table[index]] > 1:
                self._move(row, index)

    def _move(self, row: int, index: int) -> None:
        """Give a row a copy of a page that it shares."""
        (mine,) = self.pool.take(1)
        former = [store.tables[row][index] if index < len(store.tables[row]) else GONE for store in self.stores]
        for window in self.windows:
            window.moved(row, index, mine)
        self._fit()
        self.stores[0].put(row, index, mine)
        for store, source in zip(self.stores, former):
            if source != GONE:
                store.copy(source, store.tables[row][index], PAGE)
        self.pool.drop(former[:1])

    def _fit(self) -> None:
        """Every page that was taken has its place in the tensors."""
        if all(store.fitting for store in self.stores):  # as in most passes over one node
            return
        rows = len(self.tables) + len(self.stores[0].opening)
        if any(store.pool.made != store.made for store in self.stores):
            for store in self.stores:
                if store.trim(self.capacity // PAGE):
                    self.allocations, self._viewed = self.allocations + 1, None
        for store in self.stores:
            if store.fit(rows * pages_kept(self._ahead, store.kind.window, PAGE), self.capacity // PAGE, clean=self.handed):
                self.allocations, self._viewed = self.allocations + 1, None

    def _store(self, index: int) -> PageStore:
        """The pages of a layer."""
        return next((store for store in self.windows if store.kind.layers is None or index in store.kind.layers), self.stores[0])

    def _layer(self, index: int, keys: Tensor, values: Tensor) -> Layer:
        while len(self.layers) <= index:
            self.layers.append(Layer())
        layer = self.layers[index]
        if not len(layer.keys) or layer.keys.dtype != keys.dtype:
            store = self._store(index)
            store.allocate(layer, keys, values, store.room)
            if layer not in store.layers:
                store.layers.append(layer)
            self.allocations, self._viewed = self.allocations + 1, None
        return layer

    def _places(self) -> list[tuple[Callable[[Any, Any], tuple[Any, Any]], Sequence[Layer]]]:
        return [(store.at, store.layers) for store in self.stores]
