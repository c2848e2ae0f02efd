"""EAGLE-3 as the drafter (Li et al. 2025): one layer that reads hidden states of the target and feeds on its own from there.

Of every committed token its layer keeps keys and values, made from the target's features, never from its own guesses: after a round they
are made from the hidden states that verification came by anyway, when the next draft begins. A draft is written behind them, level by
level in one pass each, and forgotten. The step that stands at position t reads the features at t and the token at t + 1. So texts that
have n + 1 tokens in common share n steps, and the target, which reuses no longer beginning, hands out the features behind these.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foredraft.device import to_device
from foredraft.drafters.base import DraftRequest, Feedback, Row
from foredraft.drafters.draft_loops.eagle3 import Eagle3Growth, Eagle3Step
from foredraft.drafters.draft_loops.kernels import greedy, grow_by
from foredraft.drafters.growth import Expand, Growth
from foredraft.drafters.heads import HeadDrafter
from foredraft.drafters.learning.drafter import LearningDrafter
from foredraft.drafters.siblings import DRAWN
from foredraft.errors import ConfigurationError
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.eagle3_layer import Layer
from foredraft.models.cache import TreeCache, Window
from foredraft.models.masks import MaskInputs
from foredraft.models.page_stores import Kind
from foredraft.models.paged_cache import PagedCache
from foredraft.models.pages import PAGE
from foredraft.target import Target
from foredraft.target.prefixes import Companion, Texts
from foredraft.tree import TokenTree

AT_ONCE = 2048  # tokens of a prompt that are read together
FEW = 16  # tokens per row that a kernel reads whole, though only the last one of each row is asked about


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


class Eagle3(HeadDrafter):
    __doc__ = HeadDrafter.__doc__
    name = kind = "eagle3"
    auto = DRAWN
    info = replace(HeadDrafter.info, proposals=DRAWN.chains, whole_prompt=True, catches_up=True)
    summary = "a one-layer decoder over the target's hidden states, run autoregressively; chains and trees"

    _layer: Layer | None = None
    _kernel: Eagle3Growth | None = None  # for whole drafts of greedy rows
    _step: Eagle3Step | None = None
    _target: Target
    _version: int  # of the target whose features the cache is made of
    _cache: TreeCache
    _texts: Texts  # of the rows in the cache
    _rows: list[Unread]  # of those that have begun
    _prompts: dict[int, Tensor]  # features of prompts whose rows are about to begin, as far as their steps are not in the cache
    _states: Tensor  # [R, N, d] what the steps of the draft under way hand on
    _begins: list[int]  # slots of its roots

    @property
    def layer(self) -> Layer:
        """The head's weights as they were when it was bound, in the target's dtype and on its device."""
        if self._layer is None:
            raise ConfigurationError("this eagle3 head is not bound to a Speculator yet; pass it as Speculator(..., drafter=...)")
        return self._layer

    def bind(self, target: Target) -> None:
        head = self._found(target)
        assert isinstance(head, Eagle3Head)
        head.attach(target.model)
        self._prepare_to_learn(head, target)
        self._target, self._head, self.info = target, head, replace(self.info, head=head, features=head.features)
        self._at = target.device, target.model.dtype
        self._packs = bool(target.backend.hints)
        self._lay_out()
        self._clear()
        target.read(head.features, whole=True, companion=self)

    @torch.inference_mode()
    def _lay_out(self) -> None:
        """Make what drafts of the head's weights."""
        head: Eagle3Head = self.head
        layer = head.layer().to(*self._at)
        if self.quantization is not None:
            layer = layer.quantized(self.quantization)
        self._layer = layer.packed() if self._packs else layer
        self._kernel, self._step = Eagle3Growth.of(self._layer), Eagle3Step.of(self._layer)

    def rewrite(self, weights: Mapping[str, Tensor]) -> None:
        super().rewrite(weights)
        self._lay_out()
        self._texts.share_no_more(self._cache)

    # -- beginnings that rows share -------------------------------------------------------------------------------------------

    @property
    def companion(self) -> Companion:
        return self

    @property
    def page_bytes(self) -> int:
        config, paged = self.head.config, isinstance(self._target.cache, PagedCache)
        return 2 * PAGE * config.num_key_value_heads * config.head_dim * self._at[1].itemsize if paged else 0

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
        self.layer.rotary.reserve(len(text))
        for begin in range(known, last, AT_ONCE):
            end = min(begin + AT_ONCE, last)
            tokens = to_device([text[begin + 1 : end + 1]], features.device)
            states = self.layer.fused(features[None, begin - start : end - start])
            keys, values = self.layer.keys_values(tokens, states, slice(begin, end))
            self._write(keys, values, Window(index, index + 1, (begin,), end - begin))
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
        self._cache = PagedCache([Kind(self.page_bytes)]) if isinstance(self._target.cache, PagedCache) else TreeCache()

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
        kernel, features = self._kernel, self._rows[0].features
        if kernel is None or not greedy(request):
            return None
        kernel.cache, kernel.features = self._cache, features[0] if len(features) == 1 else torch.cat(features)
        grown = grow_by(kernel, request)
        if grown is not None:
            self._rows[0].taken()
        return grown

    def _expand(self, request: DraftRequest) -> Expand:
        def expand(tree: TokenTree, first: int) -> Tensor:
            states, normed = self.layer.read(self._root(request.rows) if first == 0 else self._level(tree, first))
            self._states = states if first == 0 else torch.cat([self._states, states], 1)
            return self.layer.full_logits(normed)

        return expand

    def _root(self, rows: Sequence[Row]) -> Tensor:
        """``[R, 1, d]`` after the last step of each row's text; first, keys and values of what was committed since the last draft."""
        counts = [row.count for row in self._rows]
        most, lengths = max(counts), self._cache.lengths
        features = [row.taken() for row in self._rows]
        tokens = [row.ids[length + 1 : length + 1 + count] for row, length, count in zip(rows, lengths, counts)]
        even = min(counts) == most
        together = torch.stack(features) if even else torch.nn.utils.rnn.pad_sequence(features, batch_first=True)
        padded = to_device([line + [0] * (most - len(line)) for line in tokens], together.device)
        self.layer.rotary.reserve(max(lengths) + most)
        window = Window(0, len(rows), tuple(lengths), most, counts=None if even else tuple(counts))
        positions = self._positions(lengths, most, together.device)
        ends = [length + count for length, count in zip(lengths, counts)]
        self._begins = [end - 1 for end in ends]
        if self._step is not None and (even or most <= FEW):
            states = self._step(padded, self.layer.fused(together), positions, window, self._cache, None)
            self._cache.commit(None, counts)
            return states[:, -1:] if even else states[range(len(counts)), [count - 1 for count in counts]][:, None]
        entered = self.layer.enter(padded, self.layer.fused(together), positions)
        keys, values = self._write(entered.keys, entered.values, window)
        self._cache.commit(None, counts)
        residual, queries, mask = entered.residual[:, -1:], entered.queries[:, -1:], None
        if not even:
            last = to_device(counts, together.device) - 1
            every = torch.arange(len(counts), device=together.device)
            residual, queries = entered.residual[every, last][:, None], entered.queries[every, last][:, None]
        span = max(ends)
        if min(ends) < span:
            mask = (torch.arange(span, device=together.device) < to_device(ends, together.device)[:, None])[:, None, None]
        return self.layer.leave(residual, attended(queries, keys[:, :, :span], values[:, :, :span], mask))

    @staticmethod
    def _positions(begins: Sequence[int], count: int, device: torch.device) -> Tensor | slice:
        if min(begins) == max(begins):
            return slice(begins[0], begins[0] + count)
        return to_device(list(begins), device)[:, None] + torch.arange(count, device=device)

    def _level(self, tree: TokenTree, first: int) -> Tensor:
        """``[R, n, d]`` after the nodes ``first``.. of a draft, each fed the state that the step of its parent left."""
        begins, count = self._begins, tree.nodes - first
        self.layer.rotary.reserve(max(begins) + tree.nodes)
        if tree.chain:
            states, positions = self._states[:, -count:], self._positions([begin + first for begin in begins], count, tree.tokens.device)
        else:
            parents = tree.parents[:, first:, None].expand(tree.rows, count, self._states.shape[-1])
            states = self._states.gather(1, parents)
            positions = tree.depths[:, first:] + to_device(begins, tree.tokens.device)[:, None]
        window = Window(0, tree.rows, tuple(begin + first for begin in begins), count, before=first)
        simple = tree.chain and (self._step is not None or (count == 1 and window.uniform))  # then all that is there is seen
        mask = None if simple else MaskInputs(tree, window, tree.depths).visible[:, None]
        if self._step is not None:
            return self._step(tree.tokens[:, first:], states, positions, window, self._cache, mask)
        entered = self.layer.enter(tree.tokens[:, first:], states, positions)
        keys, values = self._write(entered.keys, entered.values, window)
        return self.layer.leave(entered.residual, attended(entered.queries, keys, values, mask))

    def _write(self, keys: Tensor, values: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        """Put ``keys`` and ``values`` ``[R, n, K, h]`` into the cache; what is there up to the window's end, ``[R, K, span, h]``."""
        self._cache.enter(window)
        return self._cache.update(keys.transpose(1, 2), values.transpose(1, 2), 0)

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        """Takes the target's features along what was kept; they are read when a draft needs them."""
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


def attended(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """``[R, n, H * h]``: what ``queries`` ``[R, n, H, h]`` see of ``keys`` and ``values`` ``[R, K, span, h]`` under ``mask``
    ``[R, 1, n, span]``; all of them without one. The heads that share keys become queries of one head."""
    rows, count, heads, size = queries.shape
    groups, span = keys.shape[1:3]
    shared = heads // groups
    grouped = queries.view(rows, count, groups, shared, size).permute(0, 2, 3, 1, 4).reshape(rows, groups, shared * count, size)
    if mask is not None and shared > 1:
        mask = mask[:, :, None].expand(rows, 1, shared, count, span).reshape(rows, 1, shared * count, span)
    seen = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return seen.view(rows, groups, shared, count, size).permute(0, 3, 1, 2, 4).reshape(rows, count, heads * size)
