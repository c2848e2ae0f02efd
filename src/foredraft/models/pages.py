"""Who holds which page of a paged key-value cache, and which pages hold the beginnings of which texts. Pure bookkeeping: no tensors.

A page has room for the keys and values of 64 tokens, in buffers that the cache owns. Rows hold the pages of their text, and several
rows may hold the same page (Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention"). The
pages of finished texts stay in a radix tree (Zheng et al. 2024, "SGLang: Efficient Execution of Structured Language Model Programs"),
where later texts with the same beginning find them, until the memory is needed.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from operator import attrgetter

from foredraft.errors import CacheMemoryError

PAGE = 64  # tokens per page
IDS = attrgetter("ids")


class LimitedPool:
    """What pools have in common, those of pages and those of runs: how much rows may hold.

    Attributes:
        held: pages that some row holds.
    """

    held: int
    _limit: int | None
    _exceeds = False

    def _shrink(self) -> None:
        """Keep to the limit, as far as rows do not hold more."""
        raise TypeError(f"{type(self).__name__} must define _shrink()")

    @property
    def limit(self) -> int | None:
        return self._limit

    @limit.setter
    def limit(self, limit: int | None) -> None:
        self._limit = limit
        self._shrink()

    def keep_to(self, other: LimitedPool) -> None:
        """Have the limit that ``other`` has now. Rows may take pages beyond it, once nothing is cached that could go instead."""
        self._exceeds = True
        if self._limit != other._limit:
            self.limit = other._limit

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        """Rows may take pages beyond the limit meanwhile, once nothing is cached that could go instead."""
        self._exceeds = True
        try:
            yield
        finally:
            self._exceeds = False
            self._shrink()

    @property
    def room(self) -> int | None:
        """Pages that rows could take now: free, cached or not made yet. None if there is no limit now."""
        return None if self._limit is None or self._exceeds else max(0, self._limit - self.held)


class PagePool(LimitedPool):
    """Counts who holds each page, hands out pages that nobody holds, and takes back those that only the prefix tree holds.

    Without a limit, it never makes more pages than twice the most that rows held at once, plus ``spare``.

    Args:
        limit: the most pages that may exist. Pages beyond a limit that is lowered disappear as soon as no row holds them.
        spare: the tree may keep so many pages, or as many as rows ever held at once, before new pages are made at its expense.
        page: tokens per page.

    Attributes:
        counts: how many holders each page has: rows, and the tree. ``[made]``
        held: pages that some row holds.
        shared: pages that two or more rows hold.
        cached: pages that only the tree holds.
        evicted: how many pages have been taken back from the tree.
        prefixes: the tree.
    """

    def __init__(self, limit: int | None = None, spare: int = 64, page: int = PAGE):
        self._limit, self.spare, self.page = limit, spare, page
        self.windows: list[WindowPool] = []  # pools of other layers, whose pages belong to pages of this one
        self.prefixes = PrefixTree(self)
        self.clear()

    def clear(self) -> None:
        """Forgets every page, row and text."""
        self.counts: list[int] = []
        self._free = bytearray()  # [made]: 1 for a page that nobody holds
        self.held = self.shared = self.cached = self.evicted = 0
        self._most_held = 0
        self._handed_out: list[int] = []
        self.prefixes._forget()
        for each in self.windows:
            each.clear()

    @property
    def made(self) -> int:
        """Page ids are below this; the buffers must have room for so many pages."""
        return len(self.counts)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """``count`` pages for a row, in ascending order, with one holder each.

        Free pages come first: those behind the page ``after``, the row's last one, else the lowest run of neighbours that is long enough,
        else the longest runs. If there are too few of them, pages are evicted while the tree has more than its share, then new ones are
        made, and at the limit more are evicted. This may free what :meth:`PrefixTree.match` has just found, unless the caller shares it
        before.

        Raises:
            CacheMemoryError: there is no room for so many; nothing has changed.
        """
        if self.room is not None and count > self.room:
            raise CacheMemoryError(f"the key-value cache has room for {self.room} more pages of {self.page} tokens, and {count} are needed")
        short = max(0, count - (self.made - self.held - self.cached))
        new = short - min(short, max(0, self.cached - max(self.spare, self._most_held)))
        if self._limit is not None:
            new = max(min(new, max(0, self._limit - self.made)), short - self.cached)
        if short > new:
            behind = count == 1 and after is not None and self._evict_leaf(after + 1)
            self._evict(short - new - behind)
            self.evicted += short - new
        self.counts += [0] * new
        self._free += b"\1" * new
        run = b"\1" * count
        first = self._free.find(run) if after is None or not self._free.startswith(run, after + 1) else after + 1
        if first >= 0:
            pages = list(range(first, first + count))
        else:
            runs = sorted((run.span() for run in re.finditer(b"\1+", self._free)), key=lambda run: run[0] - run[1])
            pages = sorted(islice((page for run in runs for page in range(*run)), count))
        for page in pages:
            self.counts[page], self._free[page] = 1, 0
        self._handed_out += pages
        self.held += count
        self._most_held = max(self._most_held, self.held)
        return pages

    @property
    def waits(self) -> bool:
        """Pages were handed out since :meth:`handed_out` was asked last."""
        return bool(self._handed_out)

    def handed_out(self) -> list[int]:
        """Pages that were handed out since this was asked last."""
        found, self._handed_out = self._handed_out, []
        return found

    def share(self, pages: Sequence[int]) -> None:
        """One more row holds each of the pages. Raises ValueError for a free page."""
        for page in pages:
            rows = self.rows(page)
            if not rows and not self._kept(page):
                raise ValueError(f"nobody holds page {page}")
            self.counts[page] += 1
            self.shared += rows == 1
            if not rows:
                self.held += 1
                self.cached -= 1
        self._most_held = max(self._most_held, self.held)

    def drop(self, pages: Sequence[int]) -> None:
        """One row fewer holds each of the pages; those that nobody holds then are free. Raises ValueError for a page that no row holds."""
        for page in pages:
            rows = self.rows(page)
            if not rows:
                raise ValueError(f"no row holds page {page}")
            self.counts[page] -= 1
            self.shared -= rows == 2
            if rows == 1:
                self.held -= 1
                if self.counts[page]:
                    self.cached += 1
                    self._idle(page)
                else:
                    self._free[page] = 1
                    self._freed(page)
        self._shrink()

    def rows(self, page: int) -> int:
        """How many rows hold a page."""
        return self.counts[page] - self._kept(page) if 0 <= page < self.made else 0

    # -- what is kept of texts that are over -----------------------------------------------------------------------------

    def _kept(self, page: int) -> bool:
        """Whether the tree holds the page."""
        return page in self.prefixes._nodes

    def _keep(self, page: int) -> None:
        """The tree holds the page from now on."""
        self.counts[page] += 1
        for each in self.windows:
            each._keep_for(page)

    def _release(self, page: int) -> None:
        """The tree, which has just forgotten the page, no longer holds it."""
        for each in self.windows:
            each._release_for(page)
        self.counts[page] -= 1
        if not self.counts[page]:
            self.cached -= 1
            self._free[page] = 1
            self._freed(page)

    def _idle(self, page: int) -> None:
        """From now on the tree alone holds the page."""
        self.prefixes._queue(self.prefixes._nodes[page])

    def _evict(self, count: int) -> None:
        self.prefixes._evict(count)

    def _evict_leaf(self, page: int) -> bool:
        """Free one page, if only the tree holds it and nothing follows it there. Whether it did."""
        node = self.prefixes._nodes.get(page)
        if node is None or not self.prefixes._can_go(node):
            return False
        self.prefixes._remove(node)
        return True

    def _give_up(self, page: int) -> None:
        """The tree gives up a page that it holds."""
        self.prefixes._prune(self.prefixes._nodes[page])

    def _freed(self, page: int) -> None:
        """Nobody holds the page now."""

    def lacks_windows(self, page: int) -> bool:
        """Whether layers with a window have given up what belongs to a page."""
        return any(each.of(page) is None for each in self.windows)

    def _shrink(self) -> None:
        """Pages beyond the limit disappear from the end, up to the first that a row holds."""
        cached = self.cached
        while self._limit is not None and self.made > self._limit and not self.rows(self.made - 1):
            if self._kept(self.made - 1):
                self._give_up(self.made - 1)
            self.counts.pop()
            self._free.pop()
        self.evicted += cached - self.cached


class WindowPool(PagePool):
    """The pages of layers that see a window of the text only. Each belongs to a page of the layers that see all of it, and holds the same
    tokens. Rows give their pages back as the window moves on. Those that belong to pages in the tree are kept until they are needed.

    Args:
        whole: the pool of the layers that see all of the text.
    """

    def __init__(self, whole: PagePool):
        self._whole = whole
        super().__init__(spare=0, page=whole.page)
        whole.windows.append(self)

    def clear(self) -> None:
        self._of: dict[int, int] = {}  # by page of the other pool
        self._owner: dict[int, int] = {}  # the other way round
        self._held: dict[int, None] = {}  # pages that are kept for the tree; the least recently used one first
        super().clear()

    def of(self, owner: int) -> int | None:
        """The page that belongs to a page of the other pool."""
        return self._of.get(owner)

    def assign(self, owner: int, page: int) -> None:
        """A page that was taken belongs to a page of the other pool, which has none so far."""
        self._of[owner], self._owner[page] = page, owner
        if self._whole._kept(owner):
            self._keep_for(owner)

    def share(self, pages: Sequence[int]) -> None:
        super().share(pages)
        for page in pages:
            if page in self._held:
                self._held[page] = self._held.pop(page)

    def _keep_for(self, owner: int) -> None:
        page = self._of.get(owner)
        if page is not None and page not in self._held:
            self._held[page] = None
            self.counts[page] += 1

    def _release_for(self, owner: int) -> None:
        page = self._of.get(owner)
        if page in self._held:
            self._give_up(page)

    def _kept(self, page: int) -> bool:
        return page in self._held

    def _idle(self, page: int) -> None:
        pass

    def _evict(self, count: int) -> None:
        for page in list(islice((page for page in self._held if self.counts[page] == 1), count)):
            self._give_up(page)

    def _give_up(self, page: int) -> None:
        del self._held[page]
        self._release(page)

    def _freed(self, page: int) -> None:
        owner = self._owner.pop(page, None)
        if owner is not None:
            del self._of[owner]


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """The tokens of one page, and where they stand in the tree; only those of a full page have children."""

    ids: tuple[int, ...]
    page: int
    parent: Node | None
    children: list[Node] = field(default_factory=list)  # sorted by ids, none the beginning of another
    used: int = 0  # when it was used last; later than its children
    queued: bool = False

    def closest(self, ids: tuple[int, ...]) -> tuple[Node | None, int]:
        """The child that has the longest beginning in common with ``ids``, and the length of that.

        In sorted order it is next to where ``ids`` would stand, however many children begin alike.
        """
        at = bisect_left(self.children, ids, key=IDS)
        if at < len(self.children) and self.children[at].ids == ids:
            return self.children[at], len(ids)
        found, length = None, 0
        for child in self.children[max(at - 1, 0) : at + 1]:
            same = next((index for index, (a, b) in enumerate(zip(child.ids, ids)) if a != b), min(len(child.ids), len(ids)))
            if same > length:
                found, length = child, same
        return found, length


@dataclass(eq=False, repr=False, slots=True)
class Root(Node):
    """Where the texts of one key begin."""

    key: Hashable = None


class PrefixTree:
    """A radix tree over pages: which pages hold the beginnings of which texts. It holds one count of every page in it.

    The page that goes first is the least recently used one that has no children and that no row holds. A heap of candidates finds it:
    entries are not updated when a node is used, but checked when they come to the top. So evicting n of m pages costs n log m.
    """

    def __init__(self, pool: PagePool):
        self._pool = pool
        self._forget()

    def _forget(self) -> None:
        self._roots: dict[Hashable, Root] = {}
        self._nodes: dict[int, Node] = {}  # by page
        self._candidates: list[tuple[int, Node]] = []  # a heap of (used, node), where used may be out of date and the node in use or gone
        self._clock = 0

    def __len__(self) -> int:
        """Pages in the tree."""
        return len(self._nodes)

    def match(self, key: Hashable, ids: Sequence[int], most: int) -> tuple[list[int], int]:
        """The longest beginning of ``ids[:most]`` that the tree holds under ``key``: its pages, in order, and its length in tokens.

        If the length is no multiple of the page size, only that many tokens of the last page are in common, and the caller must copy it
        rather than share it. Marks the pages as just used. Nobody holds them for the caller until :meth:`PagePool.share`.
        """
        size, most = self._pool.page, min(most, len(ids))
        node: Node | None = self._roots.get(key)
        path: list[Node] = []
        length = 0
        while node and length < most:
            node, same = node.closest(tuple(ids[length : min(length + size, most)]))
            length += same
            if node:
                path.append(node)
            if same < size:
                break
        self._touch(path)
        return [node.page for node in path], length

    def insert(self, key: Hashable, ids: Sequence[int], pages: Sequence[int]) -> None:
        """Adds a text, so that later texts that begin like it find its pages.

        What the tree holds already stays as it is: it keeps its own page and does not add the given one, unless layers with a window have
        given up what belongs to its own. A last page that is only partly full gives way to one that begins with the same tokens and has
        more. Once a page is in the tree, the tokens ``ids`` on it must not be overwritten.

        Args:
            pages: the pages that hold the tokens ``ids``, in order; a row must hold those that are new to the tree.

        Raises:
            ValueError: the number of pages does not fit the tokens, or a page is free or already in the tree with other tokens.
        """
        size, pool = self._pool.page, self._pool
        if len(pages) != -(-len(ids) // size):
            raise ValueError(f"{len(ids)} tokens are on {-(-len(ids) // size)} pages of {size}, got {len(pages)}")
        node: Node = self._roots.get(key) or Root((), -1, None, key=key)
        path: list[Node] = []
        try:
            for index, page in enumerate(pages):
                piece = tuple(ids[index * size : (index + 1) * size])
                child, same = node.closest(piece)
                if child and child.ids == piece and child.page != page and page not in self._nodes and pool.lacks_windows(child.page):
                    self._extend(child, piece, page)
                elif child is None or same < len(piece):
                    replaced = child if child and same == len(child.ids) else None
                    if not pool.rows(page) or self._nodes.get(page, replaced) is not replaced:
                        raise ValueError(f"page {page} is free, or in the tree with other tokens")
                    child = self._extend(replaced, piece, page) if replaced else self._add(node, piece, page)
                path.append(child)
                node = child
        finally:
            self._touch(path)

    def _add(self, parent: Node, ids: tuple[int, ...], page: int) -> Node:
        """A new child of ``parent``."""
        node = self._nodes[page] = Node(ids, page, parent)
        parent.children.insert(bisect_left(parent.children, ids, key=IDS), node)
        self._pool._keep(page)
        if isinstance(parent, Root):
            self._roots[parent.key] = parent
        return node

    def _extend(self, node: Node, ids: tuple[int, ...], page: int) -> Node:
        """The leaf now stands for more tokens, on a page that may be another one; its place among its siblings is the same."""
        node.ids = ids
        if node.page != page:
            del self._nodes[node.page]
            self._pool._release(node.page)
            node.page = page
            self._nodes[page] = node
            self._pool._keep(page)
        return node

    def clear(self) -> None:
        """Forgets every text; pages that no row holds are free."""
        pages = list(self._nodes)
        self._forget()
        for page in pages:
            self._pool._release(page)

    def _touch(self, path: Sequence[Node]) -> None:
        """The nodes, from a root's child downwards, have just been used."""
        for node in reversed(path):
            self._clock += 1
            node.used = self._clock

    def _can_go(self, node: Node) -> bool:
        return self._nodes.get(node.page) is node and not node.children and self._pool.counts[node.page] == 1

    def _queue(self, node: Node) -> None:
        """Makes the node a candidate if it can be evicted and is none yet."""
        if not node.queued and self._can_go(node):
            node.queued = True
            heappush(self._candidates, (node.used, node))

    def _evict(self, count: int) -> None:
        """Frees ``count`` pages, of at least as many that only the tree holds."""
        while count and self._candidates:
            used, node = heappop(self._candidates)
            node.queued = False
            if used != node.used:
                self._queue(node)
            elif self._can_go(node):
                self._remove(node)
                count -= 1
        if count:  # the others have children that a row holds: it had pages of its own for their tokens when it was inserted
            cached = [node for node in self._nodes.values() if self._pool.counts[node.page] == 1]
            for node in sorted(cached, key=attrgetter("used"))[:count]:
                self._prune(node)

    def _prune(self, node: Node) -> None:
        """Removes a node and all its descendants."""
        found = [node]
        for each in found:
            found.extend(each.children)
        for each in reversed(found):
            self._remove(each)

    def _remove(self, node: Node) -> None:
        """Removes a node without children, and a root that has none left."""
        parent = node.parent
        assert parent is not None
        del parent.children[bisect_left(parent.children, node.ids, key=IDS)]
        del self._nodes[node.page]
        self._pool._release(node.page)
        if not isinstance(parent, Root):
            self._queue(parent)
        elif not parent.children:
            del self._roots[parent.key]
