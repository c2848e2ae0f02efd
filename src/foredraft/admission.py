"""Which rows the target's cache has room for: who may join, and who is set aside while pages are short.

A round writes a whole tree behind every row, and no allocation may fail in the middle of it. So the pages of the next round are counted
before it begins, and the youngest rows wait, without their pages, until the others leave room.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace

from foredraft.errors import CacheMemoryError
from foredraft.models.cache_sizes import in_words
from foredraft.models.pages import PAGE, PagePool
from foredraft.rows import SessionRow
from foredraft.stats import CacheMemory
from foredraft.target import Target

LEEWAY = PAGE  # tokens that every row can grow by when another joins, or it would soon be set aside


class Admission:
    """Counts pages for the rows of a session on ``target``. Its rounds write at most ``nodes(rows)`` nodes behind each of their rows, the
    root included. Where the target's cache has no pages, everybody may join."""

    def __init__(self, target: Target, nodes: Callable[[Sequence[SessionRow]], int]):
        self.target, self.nodes = target, nodes
        self.set_aside = 0

    def check(self, row: SessionRow) -> None:
        """Raises CacheMemoryError for a row that can never fit."""
        needed, allowed = self.target.cost(self.target.whole(row.capacity + self.nodes([row]), row.source)), self.target.budget
        if allowed is not None and needed > allowed:
            raise CacheMemoryError(
                f"a prompt of {row.prompt_length} tokens with max_new_tokens={row.parameters.max_new_tokens} needs up to "
                f"{in_words(needed)} of key-value cache, and cache_memory allows {in_words(allowed)}; use a larger cache_memory, "
                f"a smaller max_new_tokens or a shorter {'prompt' if row.source is None else 'source'}"
            )

    def longest(self, most: int, nodes: int) -> int:
        """How many tokens, at most ``most``, a row can ever have in the end if ``nodes`` are written behind it."""
        allowed = self.target.budget
        if allowed is None:
            return most
        return bisect_right(range(most + 1), allowed, key=lambda tokens: self.target.cost(self.target.whole(tokens + nodes))) - 1

    def joining(self, rows: Sequence[SessionRow], waiting: Sequence[SessionRow]) -> list[SessionRow]:
        """Those of ``waiting`` that may join ``rows`` now: in their order, as long as pages last. Rows that were set aside do not join
        together with rows that are new."""
        found: list[SessionRow] = []
        if not waiting:
            return found
        nodes = self.nodes([*rows, *waiting]) + LEEWAY
        taken = self.target.growth(nodes)
        for row in waiting:
            if found and row.begun != found[0].begun:
                break
            alone = row.scored is not None  # it reads its prompt itself, whatever others hold of it
            size = len(row.ids) + nodes
            needed = self.target.whole(size, row.source) if alone else self.target.needed(row.ids, row.isolation, nodes, row.source)
            taken = [sum(pair) for pair in zip(taken, needed)]
            if not self.target.make_room(taken) and (rows or found):
                break
            found.append(row)
        return found

    def excess(self, rows: Sequence[SessionRow]) -> list[SessionRow]:
        """The youngest of ``rows``, as few as leave pages for a round of the others; the oldest always stays."""
        pools = self.target.pools
        if len(rows) == 1 and (not pools or (len(pools) == 1 and type(pools[0]) is PagePool)):  # nobody to set aside, nothing to divide
            return []
        youngest = sorted(range(len(rows)), key=lambda index: -rows[index].slot)
        gone: list[int] = []
        while not self.target.make_room(self.target.growth(self.nodes(rows), without=gone)) and len(gone) < len(rows) - 1:
            gone.append(youngest[len(gone)])
        self.set_aside += len(gone)
        return [rows[index] for index in gone]

    @property
    def memory(self) -> CacheMemory | None:
        found = [
            CacheMemory(pool.limit, size, pool.held, pool.shared, pool.cached, pool.evicted, self.set_aside)
            for pool, size in zip(self.target.pools, self.target.page_bytes)
        ]
        if not found:
            return None
        sources = found.pop() if self.target.counts_sources else None
        return replace(found[0], windows=tuple(found[1:]), sources=sources)
