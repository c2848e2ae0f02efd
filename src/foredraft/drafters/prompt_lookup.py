"""Prompt lookup: find the last n tokens earlier in the text and propose what followed (Saxena 2023).

The longest match wins, n from ``max_ngram`` down to ``min_ngram``, and among equally long ones the most recent. A copy may
run into itself, so that a text in a loop is proposed to go round again. Good where the output repeats the input:
summaries, edits, code. Costs no model. Behind an encoder, the text is that of the source and then that of the decoder.

Where a tree is wanted, what followed other occurrences branches off that first chain.
"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.drafters.base import Drafter, DraftRequest, Row
from foredraft.drafters.tries import LOOKS_UP, Trie, tree_of
from foredraft.errors import ConfigurationError
from foredraft.models.encoder_decoder import one_vocabulary
from foredraft.target import Target
from foredraft.tree import TokenTree


class PromptLookup(Drafter):
    """Options:

    max_ngram, min_ngram: the longest and shortest match that is tried.
    occurrences: of a match, so many are looked at where a tree is wanted, the most recent ones.
    source: ``on`` copies from what an encoder has read as well as from the text, unless the model says that this has a vocabulary of its
        own; ``off`` from the text alone.
    """

    name = "prompt-lookup"
    summary = "copies what followed the last few tokens earlier in the text; chains and trees"
    info = LOOKS_UP

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 1, occurrences: int = 4, source: str = "on"):
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigurationError(f"prompt-lookup needs 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}")
        if occurrences < 1:
            raise ConfigurationError(f"prompt-lookup needs occurrences of at least 1, got {occurrences}")
        if source not in ("on", "off"):
            raise ConfigurationError(f"source is on, to copy from what an encoder has read as well, or off, got {source!r}")
        self.sizes, self.occurrences, self._reads = range(max_ngram, min_ngram - 1, -1), occurrences, source == "on"
        self._copies = self._reads  # as far as the target's texts have the vocabulary of its sources
        self._indices: dict[int, SuffixIndex] = {}
        self._texts: dict[int, SourcedText] = {}

    def bind(self, target: Target) -> None:
        self._copies = self._reads and (not target.sourced or one_vocabulary(target.model))

    def begin(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._indices[row.slot] = SuffixIndex(self.sizes)
            self._texts[row.slot] = SourcedText(row, read=self._copies)

    def draft(self, request: DraftRequest) -> TokenTree:
        texts = [self._texts[row.slot].of(row, request.vocab_size) for row in request.rows]
        rows = list(zip((self._indices[row.slot] for row in request.rows), texts, request.limits))
        if request.shape.is_chain:
            return request.chains([index.lookup(ids, limit) for index, ids, limit in rows])
        return tree_of(request, [self._trie(index, ids, limit, request.shape.nodes) for index, ids, limit in rows])

    def end(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._indices.pop(row.slot, None)
            self._texts.pop(row.slot, None)

    def reset(self) -> None:
        self._indices.clear()
        self._texts.clear()

    def _trie(self, index: SuffixIndex, ids: Sequence[int], depth: int, budget: int) -> Trie:
        trie = Trie()
        if depth < 1:
            return trie
        found = index.occurrences(ids, self.occurrences)
        merge_copies(trie, [_copy(ids, end, depth) for end in found], budget)
        return trie


class SourcedText:
    """What a row can be copied from: what its encoder has read, if ``read``, and then its text as it grows."""

    def __init__(self, row: Row, *, read: bool):
        source = getattr(row, "source", None)  # other programs' rows may have none
        self._source = source.ids if read and source is not None else ()
        self._ids = list(self._source)

    def of(self, row: Row, vocab_size: int) -> Sequence[int]:
        """Both, one behind the other. A source in another vocabulary than the text's is left out."""
        if self._source and max(self._source) >= vocab_size:
            self._source, self._ids = (), []
        if not self._source:
            return row.ids
        self._ids += row.ids[len(self._ids) - len(self._source) :]
        return self._ids


def merge_copies(trie: Trie, copies: Sequence[Sequence[int]], budget: int) -> None:
    """Hang ``copies`` below the root, the first one whole and, as long as there is room, the others one token deeper by turns."""
    children: dict[tuple[int, int], int] = {}
    heads = [0] * len(copies)  # the node that each copy has come to

    def follow(index: int, token: int) -> None:
        key = heads[index], token
        if key not in children:
            children[key] = trie.add(*key)
        heads[index] = children[key]

    for token in copies[0][:budget] if copies else ():
        follow(0, token)
    for depth in range(max(map(len, copies), default=0)):
        for index in range(1, len(copies)):
            if depth < len(copies[index]):
                if len(trie.tokens) >= budget and (heads[index], copies[index][depth]) not in children:
                    return
                follow(index, copies[index][depth])


class SuffixIndex:
    """Where the n-grams of a growing text ended, so that a lookup costs a few dictionary reads at any length.

    Per size the last end of each n-gram, and per position the one before it.
    """

    def __init__(self, sizes: range):
        self.sizes = sizes
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in sizes]
        self._before: list[list[int]] = [[] for _ in sizes]  # of the n-gram that ends at size + index: its end before, 0 for none
        self._indexed = 0  # n-grams that end before this position are in

    def lookup(self, ids: Sequence[int], count: int) -> Sequence[int]:
        """Up to ``count`` tokens that followed the most recent earlier occurrence of the longest matching suffix of ``ids``."""
        found = self.occurrences(ids, 1) if count > 0 else []
        return _copy(ids, found[0], count) if found else ()

    def occurrences(self, ids: Sequence[int], most: int) -> list[int]:
        """Where earlier occurrences of suffixes of ``ids`` ended: of the longest that has any, the most recent first, then of shorter
        ones; ``most`` of each size at most, none twice."""
        self._extend(ids)
        found: dict[int, None] = {}
        for size, ends, before in zip(self.sizes, self._ends, self._before):
            if len(ids) <= size:
                continue
            end = ends.get(tuple(ids[-size:]), 0)
            for _ in range(most):
                if not end:
                    break
                found[end] = None
                end = before[end - size]
        return list(found)

    def _extend(self, ids: Sequence[int]) -> None:
        """Index the n-grams that end before the last token; the suffix itself is no earlier occurrence."""
        for size, ends, before in zip(self.sizes, self._ends, self._before):
            for end in range(max(self._indexed, size), len(ids)):
                key = tuple(ids[end - size : end])
                before.append(ends.get(key, 0))
                ends[key] = end
        self._indexed = max(self._indexed, len(ids))


def _copy(ids: Sequence[int], start: int, count: int) -> list[int]:
    """``count`` tokens from ``start`` on; behind the end of the text the copy goes on with what it has copied itself."""
    copied = list(ids[start : start + count])
    for source in range(len(copied) + start - len(ids), count - (len(ids) - start)):
        copied.append(copied[source])
    return copied
