"""A state machine over the whole cache: what each row finds in its pages is what a plain dictionary of texts says, in layers that see all
of the text and in layers with a window, whatever rows share, give back, rewind or leave behind."""

from __future__ import annotations

import zlib

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from foredraft.models.cache import Window
from foredraft.models.cache_sizes import LEEWAY
from foredraft.models.page_stores import GONE, Kind
from foredraft.models.paged_cache import PagedCache
from foredraft.models.pages import PAGE

WINDOWS = (None, 70, 3)  # by layer


def numbers(key: str, text: list[int], layer: int, first: int, last: int) -> torch.Tensor:
    """``[1, 1, last - first, 1]``: what a layer computes for some tokens depends on all that come before."""
    return torch.tensor([float(zlib.crc32(repr((key, layer, text[: at + 1])).encode()) >> 8) for at in range(first, last)]).view(
        1, 1, -1, 1
    )


class Contents(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedCache([Kind(1, window, frozenset([layer])) for layer, window in enumerate(WINDOWS)])
        self.rows: list[tuple[str, list[int]]] = []
        self.known: list[list[int]] = [[]]

    def write(self, row: int, text: list[int], start: int, depths: list[int]) -> None:
        """One pass of a row over nodes at ``depths``, whose texts end in ``text``."""
        count, key = len(depths), self.rows[row][0]
        self.cache.enter(Window(row, row + 1, (start,), count))
        for layer in range(len(WINDOWS)):
            values = numbers(key, text, layer, start, start + count)
            self.cache.update(values, -values, layer)

    @rule(key=st.sampled_from("ab"), data=st.data(), chunk=st.sampled_from([20, 64, 300]), share=st.booleans())
    @precondition(lambda self: len(self.rows) < 4)
    def open(self, key, data, chunk, share):
        texts = []
        for _ in range(data.draw(st.integers(1, 2))):
            begin = data.draw(st.sampled_from(self.known))
            cut = data.draw(st.integers(0, len(begin)))
            texts.append(
                [*begin[:cut], *data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=5)), *[7] * data.draw(st.integers(0, 150))]
            )
        first = len(self.rows)
        lengths = self.cache.begin(texts, [text for _, text in self.rows], [key] * len(texts), share=share)
        assert all(length < len(text) for length, text in zip(lengths, texts))
        self.cache.open(lengths)
        self.rows += [(key, text) for text in texts]
        for row, (text, length) in enumerate(zip(texts, lengths), first):
            for start in range(length, len(text), chunk):
                count = min(chunk, len(text) - start)
                self.write(row, text, start, [0] * count)
                self.cache.commit(None, [count])
            self.known.append(text)

    @rule(data=st.data())
    @precondition(lambda self: self.rows)
    def speculate(self, data):
        """A tree of a chain beside a fork: the path that is kept moves forward."""
        row = data.draw(st.integers(0, len(self.rows) - 1))
        key, text = self.rows[row]
        start, count = len(text), data.draw(st.integers(2, 9))
        path = sorted(data.draw(st.sets(st.integers(1, count - 1), min_size=1)))
        kept = [0, *path]
        new = data.draw(st.lists(st.integers(0, 2), min_size=len(kept), max_size=len(kept)))
        self.cache.enter(Window(row, row + 1, (start,), count))
        for layer in range(len(WINDOWS)):
            values = torch.full((1, 1, count, 1), -5.0)
            values[:, :, kept] = numbers(key, [*text, *new], layer, start, start + len(kept))
            self.cache.update(values, -values, layer)
        self.cache.commit(torch.tensor([kept]), [len(kept)])
        text += new

    @rule(data=st.data())
    @precondition(lambda self: self.rows)
    def rewind(self, data):
        row = data.draw(st.integers(0, len(self.rows) - 1))
        text = self.rows[row][1]
        length = max(1, len(text) - data.draw(st.sampled_from([1, 5, LEEWAY, LEEWAY + 1, 200])))
        self.cache.rewind([length if each == row else len(other) for each, (_, other) in enumerate(self.rows)])
        held = self.cache.lengths[row]
        assert held == length or (held == 0 and len(text) - length > LEEWAY - 12)
        del text[length:]
        text += [9]  # the text goes on in another way
        self.write(row, text, held, [0] * (len(text) - held))
        self.cache.commit(None, [len(text) - held])

    @rule(data=st.data())
    @precondition(lambda self: self.rows)
    def leave(self, data):
        row = data.draw(st.integers(0, len(self.rows) - 1))
        self.cache.leave(row, self.rows[row][1])
        self.cache.compact([each for each in range(len(self.rows)) if each != row])
        del self.rows[row]

    @rule(store=st.integers(0, len(WINDOWS) - 1), count=st.integers(1, 5))
    def need(self, store, count):
        """Somebody needs memory."""
        pool = self.cache.stores[store].pool
        if count <= pool.cached:
            pool._evict(count)

    @invariant()
    def each_row_finds_its_text(self):
        for row, (key, text) in enumerate(self.rows):
            assert self.cache.lengths[row] == len(text)
            for layer, window in enumerate(WINDOWS):
                begin = 0 if window is None else max(0, len(text) - window + 1)
                store = self.cache._store(layer)
                pages = [store.tables[row][at // PAGE] for at in range(begin, len(text))]
                assert GONE not in pages
                found = self.cache.layers[layer].keys[pages, 0, [at % PAGE for at in range(begin, len(text))], 0]
                assert found.tolist() == numbers(key, text, layer, begin, len(text)).flatten().tolist()
                assert store.lines[row, : len(store.tables[row])].tolist() == [
                    page if page != GONE else store.room for page in store.tables[row]
                ]

    @invariant()
    def every_page_is_counted(self):
        for store in self.cache.stores:
            pages = [page for table in store.tables for page in table if page != GONE]
            assert store.pool.held == len(set(pages))
            assert store.pool.counts == [pages.count(page) + store.pool._kept(page) for page in range(store.pool.made)]
            assert store.pool.cached == sum(store.pool._kept(page) and page not in pages for page in range(store.pool.made))


TestContents = Contents.TestCase
TestContents.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
