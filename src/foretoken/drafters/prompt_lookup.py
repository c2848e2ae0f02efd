"""Prompt lookup: find the last n tokens earlier in the text and propose what followed (Saxena 2023).

The longest match wins, n from ``max_ngram`` down to ``min_ngram``, and among equally long ones the most recent. A copy may
run into itself, so that a text in a loop is proposed to go round again. Good where the output repeats the input:
summaries, edits, code. Costs no model.
"""

from __future__ import annotations

from collections.abc import Sequence

from foretoken.drafters.base import Drafter, DraftRequest, Row
from foretoken.errors import ConfigurationError
from foretoken.tree import TokenTree


class PromptLookup(Drafter):
    """Options: ``max_ngram`` and ``min_ngram``, the longest and shortest match that is tried."""

    name = "prompt-lookup"
    summary = "copies what followed the last few tokens earlier in the text"

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 1):
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigurationError(f"prompt-lookup needs 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}")
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self._indices: dict[int, SuffixIndex] = {}

    def begin(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._indices[row.slot] = SuffixIndex(self.sizes)

    def draft(self, request: DraftRequest) -> TokenTree:
        return request.chains([self._indices[row.slot].lookup(row.ids, limit) for row, limit in zip(request.rows, request.limits)])

    def end(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._indices.pop(row.slot, None)

    def reset(self) -> None:
        self._indices.clear()


class SuffixIndex:
    """Where each n-gram of a growing text last ended, so that a lookup costs a few dictionary reads at any length."""

    def __init__(self, sizes: range):
        self.sizes = sizes
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in sizes]
        self._indexed = 0  # n-grams that end before this position are in

    def lookup(self, ids: Sequence[int], count: int) -> Sequence[int]:
        """Up to ``count`` tokens that followed the most recent earlier occurrence of the longest matching suffix of ``ids``."""
        self._extend(ids)
        for size, ends in zip(self.sizes, self._ends):
            if len(ids) > size and count > 0:
                end = ends.get(tuple(ids[-size:]))
                if end is not None:
                    return _copy(ids, end, count)
        return ()

    def _extend(self, ids: Sequence[int]) -> None:
        """Index the n-grams that end before the last token; the suffix itself is no earlier occurrence."""
        for size, ends in zip(self.sizes, self._ends):
            for end in range(max(self._indexed, size), len(ids)):
                ends[tuple(ids[end - size : end])] = end
        self._indexed = max(self._indexed, len(ids))


def _copy(ids: Sequence[int], start: int, count: int) -> list[int]:
    """``count`` tokens from ``start`` on; behind the end of the text the copy goes on with what it has copied itself."""
    copied = list(ids[start : start + count])
    for source in range(len(copied) + start - len(ids), count - (len(ids) - start)):
        copied.append(copied[source])
    return copied
