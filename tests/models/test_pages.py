"""The pages of the key-value cache: who holds them, where later texts find them, and which go first.

The state machine at the end compares the pool and its tree with a model that keeps whole texts and searches all of them.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from itertools import pairwise, takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from foredraft.errors import CacheMemoryError
from foredraft.models.pages import PAGE, Node, PagePool


def pool_of_4(limit=None, spare=64):
    """Pages of 4 tokens."""
    return PagePool(limit, spare, page=4)


def leave(pool, ids, key="a"):
    """A row reads ``ids`` on pages of its own, leaves them to the tree and ends; the pages."""
    pages = pool.take(-(-len(ids) // pool.page))
    pool.prefixes.insert(key, ids, pages)
    pool.drop(pages)
    return pages


def common(first, second):
    """How many tokens two texts have in common at their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second)))


def in_the_tree(pool):
    """``{(key, tokens up to the end of the page): page}``, and what must hold of every tree."""
    found = {}
    stack = [(key, (), root) for key, root in pool.prefixes._roots.items()]
    assert all(root.children for _, _, root in stack)
    while stack:
        key, before, parent = stack.pop()
        pieces = [child.ids for child in parent.children]
        assert pieces == sorted(pieces)
        assert not any(common(a, b) == len(a) for a, b in pairwise(pieces)), "one child is the beginning of another"
        for child in parent.children:
            assert child.parent is parent and pool.prefixes._nodes[child.page] is child
            assert len(child.ids) == pool.page or not child.children
            found[key, before + child.ids] = child.page
            stack.append((key, before + child.ids, child))
    assert len(found) == len(set(found.values())) == len(pool.prefixes)
    return found


# -- the pool ---------------------------------------------------------------------------------------------------------


def test_pages_hold_64_tokens():
    assert PagePool().page == PAGE == 64


def test_new_pages_are_neighbours_with_one_holder_each():
    pool = PagePool()
    assert pool.take(3) == [0, 1, 2] and pool.take(2) == [3, 4] and pool.take(0) == []
    assert pool.counts == [1] * 5 and (pool.made, pool.held, pool.cached, pool.shared, pool.room) == (5, 5, 0, 0, None)


def test_free_pages_come_before_new_ones_in_the_lowest_run_that_is_long_enough():
    pool = PagePool()
    pool.take(12)
    pool.drop([1, 4, 5, 6, 8, 9, 10])
    assert pool.take(2) == [4, 5]
    assert pool.take(1) == [1]
    assert pool.take(3) == [8, 9, 10]
    pool.drop([0, 3, 4, 9])
    assert pool.take(3) == [0, 3, 4], "no run is long enough: the longest, then the lowest"
    assert pool.take(3) == [6, 9, 12]


def test_a_row_gets_the_pages_behind_its_last_one_if_they_are_free():
    pool = pool_of_4()
    pool.take(8)
    pool.drop([0, 3, 4, 5, 7])
    assert pool.take(1, after=2) == [3] and pool.take(2, after=3) == [4, 5]
    assert pool.take(1, after=5) == [0] and pool.take(1, after=7) == [7] and pool.take(2, after=7) == [8, 9]


def test_where_a_page_is_evicted_it_is_the_one_behind_the_last_if_nothing_follows_it():
    pool = pool_of_4(6, 6)
    first, rest = leave(pool, [1, 2]), leave(pool, [5, 6, 7, 8, 9])
    (row,) = pool.take(1)
    last = leave(pool, [3, 4])
    pool.take(1)
    assert (first, rest, row, last) == ([0], [1, 2], 3, [4])
    assert pool.take(1, after=row) == [4] and pool.evicted == 1, "though another page was used longer ago"
    assert pool.take(1, after=0) == [0], "a page that is followed by another stays"
    assert set(in_the_tree(pool).values()) == {1, 2} and pool.evicted == 2


def test_a_page_is_free_when_its_last_holder_drops_it():
    pool = PagePool()
    (page,) = pool.take(1)
    pool.share([page])
    assert (pool.counts, pool.held, pool.shared) == ([2], 1, 1)
    pool.drop([page])
    assert (pool.counts, pool.held, pool.shared) == ([1], 1, 0) and pool.take(1) == [1]
    pool.drop([page])
    assert (pool.counts, pool.held) == ([0, 1], 1) and pool.take(1) == [page]


def test_pages_that_nobody_holds_can_be_neither_shared_nor_dropped():
    pool = pool_of_4()
    cached = leave(pool, [1, 2])
    free = pool.take(1)
    pool.drop(free)
    for page in (*free, 2, -1):
        with pytest.raises(ValueError, match="nobody holds"):
            pool.share([page])
        with pytest.raises(ValueError, match="no row holds"):
            pool.drop([page])
    with pytest.raises(ValueError, match="no row holds"):
        pool.drop(cached)
    assert (pool.counts, pool.held, pool.cached) == ([1, 0], 0, 1)


def test_the_pages_of_the_tree_are_cached_until_a_row_shares_them():
    pool = pool_of_4()
    pages = leave(pool, range(10))
    assert (pool.counts, pool.held, pool.cached, pool.shared) == ([1, 1, 1], 0, 3, 0)
    pool.share(pages[:2])
    assert (pool.counts, pool.held, pool.cached, pool.shared) == ([2, 2, 1], 2, 1, 0)
    pool.share(pages[:1])
    assert (pool.counts, pool.held, pool.cached, pool.shared) == ([3, 2, 1], 2, 1, 1)


def test_too_many_pages_for_the_limit_change_nothing():
    pool = pool_of_4(limit=5)
    leave(pool, range(8))
    pool.take(2)
    assert pool.room == 3
    before = in_the_tree(pool), pool.counts.copy()
    with pytest.raises(CacheMemoryError, match="room for 3 more pages of 4 tokens, and 4 are needed"):
        pool.take(4)
    assert (in_the_tree(pool), pool.counts) == before and (pool.held, pool.cached, pool.evicted) == (2, 2, 0)
    assert len(pool.take(3)) == 3 and (pool.made, pool.room, pool.evicted) == (5, 0, 2)


def test_the_limit_can_be_raised_and_lowered():
    pool = pool_of_4(limit=2)
    pages = pool.take(2)
    pool.limit = 4
    assert pool.room == 2 and pool.take(2) == [2, 3]
    pool.drop(pages)
    pool.limit = 3
    assert (pool.made, pool.room) == (4, 1), "a row holds the last page"
    pool.drop([2])
    assert (pool.made, pool.room) == (4, 2)
    pool.drop([3])
    assert (pool.made, pool.room) == (3, 3), "the page beyond the limit is gone with its row"
    pool.limit = None
    assert pool.room is None and pool.take(4) == [0, 1, 2, 3]


def test_beyond_the_limit_what_is_cached_goes_first():
    pool = pool_of_4(limit=5, spare=5)
    leave(pool, range(20))
    with pool.unlimited():
        assert pool.room is None
        pages = pool.take(3)
        assert (pool.made, pool.cached, pool.evicted) == (5, 2, 3)
        pages += pool.take(4)
        assert (pool.made, pool.cached) == (7, 0)
        pool.drop(pages)
    assert (pool.made, pool.room) == (5, 5)


def test_a_lowered_limit_takes_pages_beyond_it_from_the_tree():
    pool = pool_of_4()
    leave(pool, range(16))
    leave(pool, [7] * 4, key="b")
    pool.limit = 2
    assert (pool.made, pool.cached, pool.evicted) == (2, 2, 3)
    assert in_the_tree(pool) == {("a", (0, 1, 2, 3)): 0, ("a", tuple(range(8))): 1}


def test_every_page_that_is_handed_out_is_told_once():
    """Also one that had disappeared beyond a limit: its tensors may still hold numbers of a text that is over."""
    pool = pool_of_4(limit=4)
    pool.drop(pool.take(4))
    assert pool.handed_out() == [0, 1, 2, 3]
    pool.limit = 2
    pool.limit = 4
    assert pool.take(3) == pool.handed_out() == [0, 1, 2]
    assert pool.handed_out() == []


def test_pages_that_could_not_be_allocated_are_given_back():
    """The cache runs out of memory while its buffers grow: it drops the pages and sets the limit to what there is."""
    pool = PagePool()
    pool.take(3)
    pool.drop(pool.take(5))
    pool.limit = 4
    assert (pool.made, pool.room) == (4, 1) and pool.take(1) == [3]


def test_clear_forgets_everything():
    pool = pool_of_4(limit=9)
    leave(pool, range(8))
    pool.take(8)
    assert pool.evicted == 1
    tree = pool.prefixes
    pool.clear()
    assert (pool.counts, pool.made, pool.held, pool.cached, pool.shared, pool.evicted, pool.room) == ([], 0, 0, 0, 0, 0, 9)
    assert pool.prefixes is tree and len(tree) == 0 and tree.match("a", range(8), 8) == ([], 0) and pool.take(2) == [0, 1]


# -- the tree ---------------------------------------------------------------------------------------------------------


def test_a_match_is_the_longest_beginning():
    pool = pool_of_4()
    pages = leave(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    match = pool.prefixes.match
    assert match("a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], 12) == (pages, 10)
    assert match("a", [1, 2, 3, 4, 5, 6, 0, 8], 8) == (pages[:2], 6)
    assert match("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], 8) == (pages[:2], 8)
    assert match("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], 5) == (pages[:2], 5)
    assert match("a", [1, 2, 3, 4], 9) == (pages[:1], 4)
    assert match("a", [1, 2, 3, 4, 9], 5) == (pages[:1], 4)
    assert match("a", [2, 2, 3, 4], 4) == match("a", [1, 2], 0) == match("a", [], 3) == ([], 0)


def test_of_several_children_the_longest_beginning_wins():
    pool = pool_of_4()
    texts = [(1, 1, 1, 1), (1, 1, 2, 2), (1, 1, 2, 3), (1, 3), (2, 1, 1, 1)]
    pages = [leave(pool, text)[0] for text in texts]
    for text in [*texts, (1, 1, 2, 9), (1, 1, 2, 0), (1, 1, 1), (1, 3, 5), (1, 4), (1, 1, 9, 9), (3, 1), (0,), (2, 9)]:
        found, length = pool.prefixes.match("a", text, 4)
        assert length == max(common(text, each) for each in texts)
        assert found == [] if length == 0 else common(texts[pages.index(found[0])], text) == length


def test_keys_separate_texts_and_empty_roots_disappear():
    pool = pool_of_4(limit=2)
    first = leave(pool, [1, 2, 3, 4], key="a")
    assert pool.prefixes.match("b", [1, 2, 3, 4], 4) == ([], 0)
    second = leave(pool, [1, 2, 3, 4], key=("b", 1))
    assert pool.prefixes.match("a", [1, 2, 3, 4], 4) == (first, 4) and pool.prefixes.match(("b", 1), [1, 2, 3, 4], 4) == (second, 4)
    pool.take(1)
    assert set(pool.prefixes._roots) == {("b", 1)}
    pool.take(1)
    assert pool.prefixes._roots == {}


def test_what_the_tree_holds_keeps_its_pages():
    pool = pool_of_4()
    first = leave(pool, range(8))
    second = pool.take(3)
    pool.prefixes.insert("a", range(10), second)
    assert pool.prefixes.match("a", range(10), 10) == ([*first, second[2]], 10)
    assert (pool.counts, len(pool.prefixes)) == ([1, 1, 1, 1, 2], 3)
    pool.drop(second)
    assert (pool.counts, pool.held, pool.cached) == ([1, 1, 0, 0, 1], 0, 3)


def test_a_partial_page_that_is_covered_is_not_added():
    pool = pool_of_4()
    leave(pool, range(8))
    leave(pool, range(7))
    leave(pool, range(3))
    assert len(pool.prefixes) == 2 and pool.counts == [1, 1, 0, 0]


def test_a_partial_page_gives_way_to_one_with_more_tokens():
    pool = pool_of_4()
    leave(pool, [0, 1, 2, 3, 4])
    longer = leave(pool, [0, 1, 2, 3, 4, 5, 6])
    assert in_the_tree(pool) == {("a", (0, 1, 2, 3)): 0, ("a", (0, 1, 2, 3, 4, 5, 6)): longer[1]} and pool.counts == [1, 0, 0, 1]
    full = leave(pool, range(9))
    assert pool.prefixes.match("a", range(9), 9) == ([0, *full[1:]], 9) and (pool.cached, pool.evicted) == (3, 0)


def test_a_row_can_leave_its_page_to_the_tree_and_go_on_writing_behind_it():
    pool = pool_of_4()
    pages = pool.take(1)
    pool.prefixes.insert("a", [1, 2], pages)
    pool.prefixes.insert("a", [1, 2, 3], pages)
    assert pool.prefixes.match("a", [1, 2, 3, 4], 4) == (pages, 3) and (pool.counts, len(pool.prefixes)) == ([2], 1)


def test_what_cannot_be_inserted():
    pool = pool_of_4()
    pages = pool.take(3)
    for wrong in (pages[:1], pages):
        with pytest.raises(ValueError, match="5 tokens are on 2 pages of 4"):
            pool.prefixes.insert("a", range(5), wrong)
    for wrong in ([0, 0], [3, 4], [0, -1]):
        with pytest.raises(ValueError, match="free, or in the tree with other tokens"):
            pool.prefixes.insert("b", range(8), wrong)
    with pytest.raises(ValueError, match="free, or in the tree with other tokens"):
        pool.prefixes.insert("b", [9], [0])
    pool.prefixes.insert("c", [], [])
    pool.drop(pages)
    assert in_the_tree(pool) == {("b", (0, 1, 2, 3)): 0}


def test_clearing_the_tree_leaves_rows_their_pages():
    pool = pool_of_4()
    pages = leave(pool, range(12))
    pool.share(pages[:1])
    pool.prefixes.clear()
    assert (pool.counts, pool.held, pool.cached, pool.evicted, len(pool.prefixes)) == ([1, 0, 0], 1, 0, 0, 0)
    assert pool.take(2) == pages[1:]


# -- eviction ---------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first_and_parents_after_their_children():
    pool = pool_of_4(limit=5)
    leave(pool, [0, 0, 0, 0, 1])
    leave(pool, [0, 0, 0, 0, 2])
    leave(pool, [3])
    leave(pool, [4])
    pool.prefixes.match("a", [0, 0, 0, 0, 1], 5)
    gone = []
    for _ in range(5):
        before = set(in_the_tree(pool))
        pool.take(1)
        gone += [text for _, text in before - set(in_the_tree(pool))]
    assert gone == [(0, 0, 0, 0, 2), (3,), (4,), (0, 0, 0, 0, 1), (0, 0, 0, 0)]


def test_pages_of_rows_are_not_evicted():
    pool = pool_of_4(limit=4)
    pages = leave(pool, range(8))
    leave(pool, [9] * 5)
    pool.share(pages)
    assert pool.room == 2 and pool.take(1) == [3] and pool.take(1) == [2]
    assert pool.prefixes.match("a", range(8), 8) == (pages, 8)
    with pytest.raises(CacheMemoryError):
        pool.take(1)
    pool.drop(pages)
    assert pool.take(1) == [1] and pool.take(1) == [0]


def test_pages_behind_which_a_row_holds_its_own_are_evicted_last():
    """Two rows read the same text at the same time. The tree has the first one's pages, and behind them one of the second."""
    pool = pool_of_4(limit=6)
    first, second = pool.take(2), pool.take(3)
    pool.prefixes.insert("a", range(8), first)
    pool.prefixes.insert("a", range(10), second)
    pool.drop(first)
    leave(pool, [5])
    assert (pool.cached, pool.room) == (3, 3)
    pool.take(1)
    assert pool.prefixes.match("a", range(10), 10) == ([*first, second[2]], 10)
    assert sorted(pool.take(2)) == first and len(pool.prefixes) == 0 and pool.evicted == 3
    assert [pool.counts[page] for page in second] == [1, 1, 1]


def test_new_pages_are_made_while_the_tree_has_no_more_than_its_share():
    pool = pool_of_4(spare=3)
    for token in range(3):
        leave(pool, [token])
    assert (pool.made, pool.cached) == (3, 3)
    leave(pool, [3])
    assert (pool.made, pool.cached, pool.evicted) == (4, 4, 0)
    leave(pool, [4])
    assert (pool.made, pool.cached, pool.evicted) == (4, 4, 1), "more than spare: the first one went"
    pool.drop(pool.take(6))
    assert (pool.made, pool.cached, pool.evicted) == (9, 3, 2)
    for token in range(10, 30):
        leave(pool, [token])
    assert (pool.made, pool.cached) == (9, 9), "rows held 6 at once, but 9 are there: free pages come first"
    pool.take(3)
    assert (pool.made, pool.cached) == (9, 6)
    pool.take(1)
    assert (pool.made, pool.cached) == (10, 6)


def test_pages_that_rows_share_from_the_tree_count_as_held_at_once():
    pool = pool_of_4(spare=2)
    pages = [*leave(pool, [0]), *leave(pool, [1]), *leave(pool, [2])]
    pool.share(pages)
    pool.drop(pages)
    assert pool.take(1) == [3] and (pool.cached, pool.evicted) == (3, 0)


def test_memory_is_bounded_without_a_limit():
    pool = pool_of_4(spare=5)
    for token in range(200):
        pages = pool.take(7)
        leave(pool, [token] * 13)
        pool.drop(pages)
    assert pool.made <= 2 * 11 + 5


def test_used_pages_go_back_into_the_queue(monkeypatch):
    """The cost of evicting n of m pages: a few heap operations each."""
    pool = PagePool(limit=400, page=4)
    for token in range(400):
        leave(pool, [token])
    for token in range(300):
        pool.prefixes.match("a", [token], 1)
    looks = []
    can_go = pool.prefixes._can_go
    monkeypatch.setattr(pool.prefixes, "_can_go", lambda node: looks.append(node) or can_go(node))
    for _ in range(400):
        pool.take(1)
    assert pool.evicted == 400 and len(looks) <= 2 * 400


# -- large trees ------------------------------------------------------------------------------------------------------


class Token(int):
    """Counts how often a token is compared."""

    compared = 0

    def __eq__(self, other):
        Token.compared += 1
        return int(self) == int(other)

    def __lt__(self, other):
        Token.compared += 1
        return int(self) < int(other)

    __hash__ = int.__hash__


@pytest.mark.parametrize("alike", [0, 2])
def test_ten_thousand_children_are_not_searched_one_by_one(alike):
    pool = pool_of_4(spare=20_000)
    for token in range(10_000):
        leave(pool, [7] * (4 + alike) + [token, 1])
    assert len(pool.prefixes) == 10_001
    Token.compared = 0
    assert pool.prefixes.match("a", [Token(each) for each in [7] * (4 + alike) + [5000, 1, 8]], 9)[1] == 6 + alike
    assert pool.prefixes.match("a", [Token(each) for each in [7] * (4 + alike) + [10_001, 1]], 8)[1] == 4 + alike
    assert 0 < Token.compared < 300


def nodes() -> int:
    """How many there are, in caches that other tests have left behind too."""
    gc.collect()
    return sum(isinstance(each, Node) for each in gc.get_objects())


def test_a_text_of_a_million_tokens():
    before = nodes()
    pool = PagePool(limit=15_700)
    text = list(range(1_000_000))
    pages = leave(pool, text)
    assert pool.prefixes.match("a", text, len(text)) == (pages, len(text))
    pool.take(15_600)
    assert len(pool.prefixes) == 100 and pool.evicted == 15_525
    pool.clear()
    leave(pool, text)
    pool.limit = 10
    assert (pool.made, len(pool.prefixes)) == (10, 10)
    pool.limit = None
    leave(pool, text)
    pool.prefixes.clear()
    assert pool.held == pool.cached == 0 and nodes() <= before


# -- everything together ----------------------------------------------------------------------------------------------


@dataclass
class Row:
    key: str
    text: list[int]
    pages: list[int]


@dataclass
class Kept:
    """A page of the tree. ``used`` is larger for later uses and, of one use, for earlier pages."""

    page: int
    used: tuple[int, int]


SIZE = 3  # tokens per page
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=3 * SIZE)
KEYS = st.sampled_from("ab")
LIMITS = st.integers(3, 12).map(lambda limit: None if limit == 3 else limit)
PICKS = st.integers(0, 1000)


class Pages(RuleBasedStateMachine):
    """Rows open, grow, shrink and leave.

    The model has rows with whole texts, the tokens that are written on each page, and the texts that the tree holds.
    """

    @initialize(limit=LIMITS, spare=st.integers(0, 4))
    def start(self, limit, spare):
        self.pool = PagePool(limit, spare, page=SIZE)
        self.forget()

    def forget(self):
        self.rows: list[Row] = []
        self.written: list[list[int]] = []  # [made] the tokens on each page
        self.tree: dict[tuple[str, tuple[int, ...]], Kept] = {}  # by key and tokens up to the end of the page
        self.uses = self.evicted = self.most_held = 0

    # what the model says

    def holders(self, page):
        return sum(page in row.pages for row in self.rows)

    def held(self):
        return {page for row in self.rows for page in row.pages}

    def cached(self):
        return {kept.page for kept in self.tree.values()} - self.held()

    def free(self):
        return set(range(len(self.written))) - self.held() - self.cached()

    def behind(self, key, text):
        return [(k, t) for k, t in self.tree if k == key and len(t) > len(text) and t[: len(text)] == text]

    def use(self, key, texts):
        self.uses += 1
        for text in texts:
            self.tree[key, text].used = (self.uses, -len(text))

    def evict_one(self):
        """The least recently used page that no row holds and that has none behind it; if there is none, one with those behind it."""
        cached = self.cached()
        candidates = [entry for entry, kept in self.tree.items() if kept.page in cached]
        entry = min([each for each in candidates if not self.behind(*each)] or candidates, key=lambda each: self.tree[each].used)
        for each in [entry, *self.behind(*entry)]:
            del self.tree[each]
        self.evicted += 1

    def take(self, count):
        """Pages of the pool, or None; the model must come to the same."""
        limit = self.pool.limit
        if limit is not None and count > max(0, limit - len(self.held())):
            before = self.pool.counts.copy()
            with pytest.raises(CacheMemoryError):
                self.pool.take(count)
            assert self.pool.counts == before
            return None
        while len(self.free()) < count:
            if len(self.cached()) > max(self.pool.spare, self.most_held) or (limit is not None and len(self.written) >= limit):
                self.evict_one()
            else:
                self.written.append([])
        free = self.free()
        pages = self.pool.take(count)
        assert len(pages) == len(set(pages)) == count and pages == sorted(pages) and set(pages) <= free
        runs = [first for first in sorted(free) if all(first + step in free for step in range(count))]
        assert not runs or not pages or (pages[0], pages[-1]) == (runs[0], runs[0] + count - 1)
        for page in pages:
            self.written[page] = []
        return pages

    def shrink(self):
        """Pages beyond the limit that no row holds are gone, from the end."""
        while self.pool.limit is not None and len(self.written) > self.pool.limit and len(self.written) - 1 not in self.held():
            cached = self.cached()
            for entry in [entry for entry, kept in self.tree.items() if kept.page == len(self.written) - 1]:
                for each in [entry, *self.behind(*entry)]:
                    del self.tree[each]
            self.evicted += len(cached - self.cached())
            self.written.pop()

    def drop(self, row, pages):
        """The last ``pages`` of a row."""
        self.pool.drop(pages)
        row.pages = row.pages[: len(row.pages) - len(pages)]
        self.shrink()

    def covered(self, page):
        """How many tokens of a page the tree relies on."""
        return max([(len(text) - 1) % SIZE + 1 for (_, text), kept in self.tree.items() if kept.page == page], default=0)

    def write(self, row, tokens):
        """Appends tokens, on a copy of the last page if somebody else needs what is there; whether there was room."""
        used = len(row.text) % SIZE
        copy = used and (self.holders(row.pages[-1]) > 1 or self.covered(row.pages[-1]) > used)
        new = self.take(-(-(len(row.text) + len(tokens)) // SIZE) - len(row.pages) + bool(copy))
        if new is None:
            return False
        row.pages += new
        self.most_held = max(self.most_held, len(self.held()))
        if copy:
            at = len(row.text) // SIZE
            self.written[new[0]] = self.written[row.pages[at]][:used]
            old = row.pages.pop(at)
            self.pool.drop([old])
            self.shrink()
        for token in tokens:
            page = row.pages[len(row.text) // SIZE]
            self.written[page] = [*self.written[page][: len(row.text) % SIZE], token]
            row.text.append(token)
        return True

    # what rows do

    @rule(key=KEYS, text=TOKENS, most=st.integers(0, 3 * SIZE), data=st.data())
    def open(self, key, text, most, data):
        known = sorted({*(text for k, text in self.tree if k == key), *(tuple(row.text) for row in self.rows if row.text)})
        if known and data.draw(st.booleans()):
            text = [*data.draw(st.sampled_from(known)), *text]
            most += len(text) - 1
        pages, length = self.pool.prefixes.match(key, text, most)
        wanted = text[:most]
        assert length == max([common(wanted, each) for k, each in self.tree if k == key], default=0)
        full = length // SIZE
        assert len(pages) == -(-length // SIZE)
        path = [tuple(text[: (index + 1) * SIZE]) for index in range(full)]
        assert [self.tree[key, each].page for each in path] == pages[:full]
        if length % SIZE:
            path += [t for (k, t), kept in self.tree.items() if kept.page == pages[-1]]
            assert common(path[-1], wanted) == length
        self.use(key, path)
        self.pool.share(pages)
        row = Row(key, list(text[:length]), pages)
        self.rows.append(row)
        self.most_held = max(self.most_held, len(self.held()))
        if not self.write(row, text[length:]):
            self.drop(row, row.pages)
            self.rows.remove(row)

    @precondition(lambda self: self.rows)
    @rule(pick=PICKS, tokens=TOKENS, kept=st.integers(0, 3 * SIZE))
    def extend_and_commit(self, pick, tokens, kept):
        row = self.rows[pick % len(self.rows)]
        length = len(row.text) + min(kept, len(tokens))
        if self.write(row, tokens):
            self.cut(row, length)

    def cut(self, row, length):
        del row.text[length:]
        self.drop(row, row.pages[-(-length // SIZE) :])

    @precondition(lambda self: self.rows)
    @rule(pick=PICKS, back=st.integers(1, 3 * SIZE))
    def rewind(self, pick, back):
        row = self.rows[pick % len(self.rows)]
        self.cut(row, max(0, len(row.text) - back))

    @precondition(lambda self: self.rows)
    @rule(pick=PICKS, stay=st.booleans())
    def leave(self, pick, stay):
        """The text goes into the tree; the row may go on."""
        row = self.rows[pick % len(self.rows)]
        path = []
        for index, page in enumerate(row.pages):
            text = tuple(row.text[: (index + 1) * SIZE])
            longer = [t for (k, t) in self.tree if k == row.key and t[: len(text)] == text and len(t) <= (index + 1) * SIZE]
            if not longer:
                for covered in [t for (k, t) in self.tree if k == row.key and index * SIZE < len(t) and text[: len(t)] == t]:
                    del self.tree[row.key, covered]
                self.tree[row.key, text] = Kept(page, (0, 0))
            path.append(min(longer, default=text))
        self.use(row.key, path)
        self.pool.prefixes.insert(row.key, row.text, row.pages)
        if not stay:
            self.drop(row, row.pages)
            self.rows.remove(row)

    @precondition(lambda self: self.rows)
    @rule(pick=PICKS)
    def set_aside(self, pick):
        row = self.rows.pop(pick % len(self.rows))
        self.drop(row, row.pages)

    @precondition(lambda self: len(self.tree) > 4)
    @rule(rows=st.booleans())
    def clear(self, rows):
        if rows:
            self.pool.clear()
            self.forget()
        else:
            self.pool.prefixes.clear()
            self.tree.clear()

    @precondition(lambda self: len(self.tree) > 2)
    @rule(limit=LIMITS)
    def change_limit(self, limit):
        self.pool.limit = limit
        self.shrink()

    # what must always be so

    @invariant()
    def counts_are_exact(self):
        pool, rows, kept = self.pool, self.rows, {kept.page for kept in self.tree.values()}
        assert pool.made == len(pool.counts) == len(self.written)
        assert pool.counts == [self.holders(page) + (page in kept) for page in range(pool.made)]
        assert pool.held == len(self.held()) and pool.cached == len(self.cached())
        assert pool.held + pool.cached + len(self.free()) == pool.made
        assert pool.shared == sum(self.holders(page) > 1 for page in range(pool.made))
        assert pool.evicted == self.evicted
        assert pool.room == (None if pool.limit is None else max(0, pool.limit - pool.held))
        assert pool.limit is None or pool.made <= max(pool.limit, max(self.held(), default=-1) + 1)
        assert pool.made <= 2 * self.most_held + pool.spare
        assert all(len(row.pages) == len(set(row.pages)) == -(-len(row.text) // SIZE) for row in rows)

    @invariant()
    def the_tree_holds_the_texts(self):
        assert in_the_tree(self.pool) == {entry: kept.page for entry, kept in self.tree.items()}
        for (_, text), kept in self.tree.items():
            piece = text[(len(text) - 1) // SIZE * SIZE :]
            assert tuple(self.written[kept.page][: len(piece)]) == piece

    @invariant()
    def rows_read_their_own_texts(self):
        for row in self.rows:
            for index, page in enumerate(row.pages):
                piece = row.text[index * SIZE : (index + 1) * SIZE]
                assert self.written[page][: len(piece)] == piece
                for other in self.rows:
                    if page in other.pages and other is not row:
                        end = min(len(row.text), len(other.text), (index + 1) * SIZE)
                        assert other.pages[index] == page and other.key == row.key and other.text[:end] == row.text[:end]

    def teardown(self):
        for row in getattr(self, "rows", []):
            self.pool.drop(row.pages)
        if hasattr(self, "pool"):
            self.pool.prefixes.clear()
            assert self.pool.held == self.pool.cached == self.pool.shared == 0 and not any(self.pool.counts)
            self.pool.limit = None
            assert self.pool.take(self.pool.made) == list(range(self.pool.made))


Pages.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestPages = Pages.TestCase
