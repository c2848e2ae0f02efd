"""Base of drafters with keys and values of their own, made from the target's hidden states: EAGLE-3, MTP layers.

For every committed token, their layer keeps keys and values that are made from the target's features, never from its own guesses. The
target computes these features in verification anyway; when the next draft begins, the layer reads those that are new. A draft is written
behind them, level by level in one pass each, and then forgotten.

The step at position t reads the features at t and the token at t + 1. So texts that share n + 1 tokens share n steps. The target then
reuses no more than these n tokens, and returns the features of all tokens after them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foredraft.device import to_device
from foredraft.drafters.base import DraftRequest, Feedback, Row
from foredraft.drafters.growth import Growth
from foredraft.drafters.heads import HeadDrafter
from foredraft.drafters.learning.drafter import LearningDrafter
from foredraft.drafters.siblings import DRAWN
from foredraft.models.cache import TreeCache, Window
from foredraft.models.paged_cache import PagedCache
from foredraft.target import Target
from foredraft.target.prefixes import Companion, Texts
from foredraft.tree import TokenTree

AT_ONCE = 2048  # tokens of a prompt that are read together


@dataclass
class Unread:
    """Of a row, the target's features ``[n, F * d]`` of the last n positions of its text that have some and are not in the cache yet."""

    features: list[Tensor] = field(default_factory=list)
    count: int = 0
    last: Tensor | None = None  # [1, F * d] what was taken last

    def add(self, features: Tensor) -> None:
        self.features.append(features)
        self.count += len(features)

    def taken(self) -> Tensor:
        taken = self.features[0] if len(self.features) == 1 else torch.cat(self.features)
        self.features, self.count, self.last = [], 0, taken[-1:]
        return taken


@dataclass(frozen=True)
class Steps:
    """The steps of every row that are not in the cache yet: ``tokens`` ``[R, n]`` and ``features`` ``[R, n, F * d]``, and where they go,
    the ``window`` of the cache. Of row r, the first ``counts[r]`` steps are real, and the others are padding."""

    tokens: Tensor
    features: Tensor
    counts: list[int]
    window: Window

    @property
    def even(self) -> bool:
        return self.window.counts is None

    def last(self, made: Tensor) -> Tensor:
        """``[R, 1, ...]`` of what was ``made`` ``[R, n, ...]`` of all steps, that of the last real one of each row."""
        if self.even:
            return made[:, -1:]
        return made[range(len(self.counts)), [count - 1 for count in self.counts]][:, None]


class FeatureDrafter(HeadDrafter):
    """Base of these drafters. A subclass writes :meth:`bind`, which sets ``_target`` and calls :meth:`_clear`; and :meth:`_fresh_cache`,
    :meth:`_fill` and :meth:`_expand`."""

    auto = DRAWN
    info = replace(HeadDrafter.info, proposals=DRAWN.chains, whole_prompt=True, catches_up=True)

    _target: Target
    _version: int  # of the target whose features the cache is made of
    _cache: TreeCache
    _texts: Texts  # of the rows in the cache
    _rows: list[Unread]  # of those that have begun
    _prompts: dict[int, Tensor]  # features of prompts whose rows are about to begin, as far as their steps are not in the cache
    _states: Tensor  # [R, N, d] what the steps of the draft under way hand on
    _begins: list[int]  # slots of its roots

    def _fresh_cache(self) -> TreeCache:
        """An empty one, in pages if the target's is."""
        raise TypeError(f"{type(self).__name__} must define _fresh_cache()")

    def _fill(self, tokens: Tensor, features: Tensor, window: Window) -> None:
        """Write the keys and values of the steps ``tokens`` ``[1, n]`` and ``features`` ``[1, n, F * d]`` into the cache."""
        raise TypeError(f"{type(self).__name__} must define _fill(tokens, features, window)")

    # -- beginnings that rows share -------------------------------------------------------------------------------------------

    @property
    def companion(self) -> Companion:
        return self

    def open(self, texts: Sequence[Sequence[int]], groups: Sequence[Hashable], *, share: bool, unread: int) -> Sequence[int]:
        return self._open(len(self._target.lengths), texts, groups, share=share, unread=unread)

    def _open(self, first: int, texts: Sequence[Sequence[int]], groups: Sequence[Hashable], *, share: bool, unread: int) -> Sequence[int]:
        """Append rows behind the first ``first``."""
        if self._version != self._target.version:
            self._clear()
        self._keep_to_budget()
        first = min(first, len(self._texts.live))
        self._drop(range(first))  # those that were opened and never begun
        read = [text[: len(text) + 1 - unread] for text in texts]
        rows, lengths = self._texts.find(self._cache, read, groups, share=share, unread=0)
        self._cache.open(lengths)
        if rows:
            self._cache.gather(rows, lengths, first)
        self._texts.add(texts, groups)
        return lengths

    def _keep_to_budget(self) -> None:
        if isinstance(self._cache, PagedCache) and isinstance(self._target.cache, PagedCache):
            self._cache.keep_to(self._target.cache)

    def needed(self, text: Sequence[int], group: Hashable, nodes: int) -> int:
        return self._texts.needed(self._paged, text, group, nodes, AT_ONCE)[0]

    def known(self, text: Sequence[int], group: Hashable) -> int:
        return self._texts.known(self._paged, text, group)

    @property
    def _paged(self) -> PagedCache:
        if self._version != self._target.version:
            self._clear()
        assert isinstance(self._cache, PagedCache), "pages are counted where the target has some"
        return self._cache

    # -- rows -----------------------------------------------------------------------------------------------------------------

    def read(self, rows: Sequence[Row], hidden: Sequence[Tensor]) -> None:
        self._prompts = {row.slot: each for row, each in zip(rows, hidden)}

    def begin(self, rows: Sequence[Row]) -> None:
        """Reads the prompts, but for the last position: that is where the first draft begins."""
        first, texts = len(self._rows), [row.ids for row in rows]
        if [id(text) for text in self._texts.live[first:]] != [id(text) for text in texts]:  # the target has opened none for them
            self._open(first, texts, [row.isolation for row in rows], share=False, unread=2)
        features = [self._prompts.pop(row.slot) for row in rows]
        starts = [max(0, len(text) - 1 - len(each)) for text, each in zip(texts, features)]
        features = [each[: len(text) - 1 - start] for text, start, each in zip(texts, starts, features)]
        if self.learning is not None:
            self.learning.begin(rows, features)
        LearningDrafter.begin(self, rows)
        for text, start, each in zip(texts, starts, features):
            self._read_steps(len(self._rows), text, start, each)
            self._rows.append(Unread())
            self._rows[-1].add(each[-1:].clone())  # not a view that keeps the whole prompt's

    def read_ahead(self, row: Row, text: Sequence[int], hidden: Tensor | None) -> None:
        assert hidden is not None
        first = len(self._rows)
        self._read_steps(first, text, len(text) - len(hidden), hidden)
        self._drop(range(first))

    def _read_steps(self, index: int, text: Sequence[int], start: int, features: Tensor) -> None:
        """Fill row ``index`` of the cache up to the position of the last of ``features`` ``[n, F * d]``, which begin at ``start``."""
        known, last = self._cache.lengths[index], start + len(features) - 1
        assert start <= known <= last, "of some steps that are not in the cache there are no hidden states"
        for begin in range(known, last, AT_ONCE):
            end = min(begin + AT_ONCE, last)
            tokens = to_device([text[begin + 1 : end + 1]], features.device)
            self._fill(tokens, features[None, begin - start : end - start], Window(index, index + 1, (begin,), end - begin))
            self._cache.commit(None, [end - begin])

    def _drop(self, keep: Sequence[int]) -> None:
        """Drop every row of the cache not in ``keep``."""
        self._texts.compact(self._cache, keep, share=self._target.reuse_prefix)

    def _keep(self, rows: list[int]) -> None:
        self._drop(rows)
        self._rows = [self._rows[index] for index in rows]

    def reset(self) -> None:
        super().reset()
        if self._texts.live:  # an interrupted round leaves drafted tokens behind
            self._clear()

    def release(self) -> None:
        super().release()
        self._clear()

    def _clear(self) -> None:
        """Forget every row, and what was kept of those that are over."""
        self._version, self._texts, self._rows, self._prompts = self._target.version, Texts(ahead=1), [], {}
        self._cache = self._fresh_cache()

    # -- a round --------------------------------------------------------------------------------------------------------------

    def _grow(self, request: DraftRequest, *, chain: bool) -> Growth:
        self._keep_to_budget()
        for index, row in enumerate(self._rows):
            if not row.count:  # a text that was drafted for already
                assert row.last is not None
                row.add(row.last)
                self._cache.lengths[index] -= 1
        return self._by_kernel(request) or super()._grow(request, chain=chain)

    def _by_kernel(self, request: DraftRequest) -> Growth | None:
        """The whole draft in one call of a kernel; None where there is none for it."""
        return None

    def _missed(self, rows: Sequence[Row]) -> Steps:
        """What was committed since the last draft, and the root of the next one. The steps are for the caller to read."""
        counts, lengths = [row.count for row in self._rows], self._cache.lengths
        most, features = max(counts), [row.taken() for row in self._rows]
        tokens = [row.ids[length + 1 : length + 1 + count] for row, length, count in zip(rows, lengths, counts)]
        even = min(counts) == most
        together = torch.stack(features) if even else torch.nn.utils.rnn.pad_sequence(features, batch_first=True)
        padded = to_device([line + [0] * (most - len(line)) for line in tokens], together.device)
        self._begins = [length + count - 1 for length, count in zip(lengths, counts)]
        return Steps(padded, together, counts, Window(0, len(rows), tuple(lengths), most, counts=None if even else tuple(counts)))

    def _above(self, tree: TokenTree, first: int) -> tuple[Tensor, Window]:
        """For the nodes ``first``.. of a draft, ``[R, n, d]`` the states that the steps of their parents left; and their window."""
        begins, count = self._begins, tree.nodes - first
        window = Window(0, tree.rows, tuple(begin + first for begin in begins), count, before=first)
        if tree.chain:
            return self._states[:, -count:], window
        return self._states.gather(1, tree.parents[:, first:, None].expand(tree.rows, count, self._states.shape[-1])), window

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        """Stores the target's features of the accepted tokens; they are read when the next draft begins."""
        hidden, path, most = feedback.hidden, feedback.path, max(feedback.accepted) + 1
        assert hidden is not None
        if path is None:
            kept = hidden[:, :most].clone()
        else:
            kept = hidden.gather(1, path[:, :most, None].clamp(min=0).expand(-1, -1, hidden.shape[-1]))
        for index, row in enumerate(rows):
            count = len(row.ids) - 1 - self._cache.lengths[index] - self._rows[index].count  # a stop may cut what was accepted
            if count > 0:
                self._rows[index].add(kept[index, :count])
        self.learn_from(rows, feedback)
