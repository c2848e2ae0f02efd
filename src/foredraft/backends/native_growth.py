"""A draft for one row in one call of a kernel, if the draft model's decoder is one: a greedy tree, or a sampled chain or tree.

If a small model drafts level by level from Python, most of the time passes between its passes, because the target's pass before has
filled the CPU's caches with weights.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from foredraft.backends import native
from foredraft.backends.kernel_pass import Direct, NativePass
from foredraft.backends.products import NATIVE, Product, padded
from foredraft.logits.processors import Warping
from foredraft.models.cache import TreeCache, Window
from foredraft.shapes import DynamicShape, StaticShape

MISSED = 8  # most tokens that are read before the first level; more need a prefill
WIDEST = 16  # most nodes of a level
MOST_KEPT = 128  # ``KEPT`` of ``layer.c``


@dataclass(frozen=True)
class Grown:
    """What was grown below the root of one row.

    Attributes:
        tokens: of the proposed nodes, parents first.
        parents: of the same nodes; 0 is the root, i the node of ``tokens[i - 1]``.
        own: the number under which each was read, the root being 0; -1 for nodes that were not read.
        fed: how many nodes were read, the root included.
        expected: how many of the tokens are accepted if the draft's probabilities are right; None if that was not computed.
    """

    tokens: list[int]
    parents: list[int]
    own: list[int]
    fed: int
    expected: float | None = None


class Draws:
    """How chains and trees are sampled, and from which distributions.

    Args:
        words: ``[R, n]`` int64 words of the noise, one per token of a chain or level of a tree.
        hashes: ``[V]`` int32, of the tokens.
        warpings: what becomes of each row's logits. ``top_p`` needs ``top_k``, of :data:`MOST_KEPT` at most.
        keep: whether q is wanted; otherwise each token's takes the place of the one before.

    Attributes:
        q: ``[R, n or 1, V]`` float32 the distributions that the tokens were drawn from.
    """

    def __init__(self, words: Tensor, hashes: Tensor, warpings: Sequence[Warping], *, keep: bool = True):
        (rows, length), vocab_size = words.shape, len(hashes)
        self.q = torch.empty(rows, length if keep else 1, vocab_size, dtype=torch.float32, device="cpu")
        self._held, apart = (words, hashes), vocab_size if keep else 0
        at = [(words[row].data_ptr(), hashes.data_ptr(), self.q[row].data_ptr(), apart, vocab_size) for row in range(rows)]
        how = [(each.top_k, each.temperature, each.top_p, each.min_p) for each in warpings]
        self.about = (native.Draws * rows)(*(native.Draws(*each, *settings) for each, settings in zip(at, how, strict=True)))

    def draw(self, logits: Tensor, i: int) -> Tensor:
        """``[R]`` token ``i`` of each row, from the ``logits`` ``[R, V']`` after those before it; kernels must :meth:`read` them."""
        kernels, (rows, width) = native.loaded(logits.dtype), logits.shape
        assert kernels is not None
        end = logits.storage_offset() + (rows - 1) * logits.stride(0) + -(-width // 16) * 16  # kernels read 16 values at a time
        if logits.stride(1) != 1 or end * logits.element_size() > logits.untyped_storage().nbytes():
            logits = torch.nn.functional.pad(logits, (0, -width % 16)).contiguous()
        tokens, threads = torch.empty(rows, dtype=torch.int64, device="cpu"), min(torch.get_num_threads(), rows)
        vocab_size = min(width, self.q.shape[2])
        kernels.draw(self.about, rows, i, logits.data_ptr(), logits.stride(0), vocab_size, tokens.data_ptr(), threads)
        return tokens

    @staticmethod
    def read(logits: Tensor) -> bool:
        """Whether kernels for such ``logits`` are loaded."""
        return logits.device.type == "cpu" and native.loaded(logits.dtype) is not None


class Grower:
    """Grows trees below the text of a single row, in one call of a kernel.

    Args:
        library: the kernels.
        layer: the first one of the decoder, for its sizes.
        head: the output layer.
        like: a tensor in the decoder's dtype.
        about: the other arguments of the kernels.
    """

    def __init__(self, library: Any, layer: native.Layer, head: Product, like: Tensor, about: native.Growth):
        self.head = head
        self._library, self._layer, self._like, self._about = library, layer, like, about
        about.head, about.columns = ctypes.addressof(head.matrix), head.packed_outputs
        self._pass = native.Pass()
        self._scratch = NativePass()
        self._sizes = (0, 0, 0, 0)
        self._candidates: tuple[Tensor, ...] = (torch.empty(0),) * 3
        self._held: list[Tensor] = []

    def grow(self, ids: Sequence[int], shape: DynamicShape, *, depth: int, vocab_size: int, draws: Draws | None = None) -> Grown | None:
        """The tree below the last of ``ids``, as level-by-level drafting grows it, at most ``depth`` levels deep: of the most probable
        tokens, or with ``draws`` of those that lead the race. None where this text cannot be continued here.

        The cache then holds the text without its last token, and after it the nodes that were read, which are not committed.
        """
        k = min(shape.k, vocab_size)
        text = self._begin(ids, k, k * (depth - 1), vocab_size) if k <= WIDEST else None
        if text is None:
            return None
        about, prices = self._about, shape.prices
        candidates = k + k * k * (depth - 1)
        about.depth, about.k, about.total = depth, k, min(shape.total, candidates)
        about.delta = -1.0 if shape.delta is None else shape.delta
        about.least = math.log(shape.floor) if shape.floor > 0 else torch.finfo(torch.float32).min
        charged = (ctypes.c_double * len(prices))(*prices) if prices else None
        about.prices = None if charged is None else ctypes.addressof(charged)
        if self._candidates[1].numel() < candidates:
            self._candidates = tuple(torch.empty(each * candidates, dtype=torch.int32) for each in (4, 1, 1))
            about.candidates, about.scores, about.order = (each.data_ptr() for each in self._candidates)
        tokens, parents, own = ((ctypes.c_int64 * about.total)() for _ in range(3))
        fed, expected = ctypes.c_int64(), ctypes.c_double()
        how = None if draws is None else draws.about
        count = self._library.grow(about, self._pass, text, tokens, parents, own, ctypes.byref(fed), ctypes.byref(expected), how)
        self._end(ids, fed.value)
        return Grown(tokens[:count], parents[:count], own[:count], fed.value, expected.value)

    def fill(self, ids: Sequence[int], shape: StaticShape, *, vocab_size: int, draws: Draws | None = None) -> Grown | None:
        """The most probable tokens for all nodes of ``shape`` below the last of ``ids``, or with ``draws`` those that lead the race, and -1
        where there are none; otherwise as :meth:`grow`."""
        layout = laid_out(shape)
        if layout is None or layout.siblings > (vocab_size if draws is None else min(vocab_size, WIDEST)):
            return None
        text = self._begin(ids, layout.widest, layout.read, vocab_size)
        if text is None:
            return None
        tokens = (ctypes.c_int64 * shape.nodes)()
        how = None if draws is None else draws.about
        fed = self._library.fill(self._about, self._pass, text, layout.parents, layout.ranks, shape.nodes, tokens, how)
        self._end(ids, fed)
        own = [node if node < fed else -1 for node in range(1, shape.nodes + 1)]
        return Grown(tokens[:], list(shape.parents[1:]), own, fed)

    def _begin(self, ids: Sequence[int], widest: int, nodes: int, vocab_size: int) -> Any:
        """The tokens ``int64[missed]`` to read first, after making room for ``nodes`` nodes after them, ``widest`` in a level; None if
        there is no room or too much was missed. Sets ``start``, ``missed``, ``most``, ``vocab`` and all pointers."""
        raise TypeError(f"{type(self).__name__} must define _begin(ids, widest, nodes, vocab_size)")

    def _end(self, ids: Sequence[int], fed: int) -> None:
        """``fed`` nodes were read, the root included."""

    def _make_room(self, tokens: int, nodes: int, capacity: int) -> bool:
        """Make scratch for passes over ``tokens`` tokens and trees of which ``nodes`` nodes are read, in a cache of ``capacity``; whether
        it was made anew."""
        wanted = (tokens, nodes, capacity, torch.get_num_threads())
        if all(have >= want for have, want in zip(self._sizes[:2], wanted[:2])) and self._sizes[2:] == wanted[2:]:
            return False
        tokens, nodes = (max(pair) for pair in zip(wanted[:2], self._sizes[:2]))
        self._sizes = tokens, nodes, capacity, wanted[3]
        hidden, size, new = int(self._layer.hidden), int(self._layer.size), self._like.new_empty
        about = {
            "x": new(tokens, hidden),
            "out": new(tokens, hidden),
            "logits": new(tokens, self.head.packed_outputs),
            "angles": new(2, tokens, size),
            "mask": torch.empty(nodes, capacity, dtype=torch.uint8),
            "slots": torch.empty(tokens, dtype=torch.int32),
            "begins": torch.empty(2, dtype=torch.int32),
        }
        for name, tensor in about.items():
            setattr(self._about, name, tensor.data_ptr())
        self._about.stride, self._pass.threads = capacity, wanted[3]
        scratch = self._scratch.room(self._layer, self._like, tokens, wanted[3])
        self._scratch.make_room_for_experts(self._pass, self._library, hidden, tokens)
        native.make_room_for_segments(self._pass, self._layer, tokens, capacity)
        rows = torch.zeros(tokens, dtype=torch.int32)
        for name, tensor in zip(("row_of", "states", "projected", "attended", "wide", "thin", "scratch"), (rows, *scratch), strict=True):
            setattr(self._pass, name, tensor.data_ptr())
        self._held = [*about.values(), rows, *scratch]
        return True


class NativeGrowth(Grower):
    """Grows trees below the text of the only row of ``cache``.

    Args:
        direct: the call of the model that is in use.
        head: its output layer.
        cache, context: of the backend that makes its passes.
    """

    def __init__(self, direct: Direct, head: Product, cache: TreeCache, context: int | None):
        self.direct, self.cache, self.context = direct, cache, context
        decoder, first = direct.decoder, direct.decoder.kernels[0]
        about = native.Growth(layers=ctypes.addressof(decoder.abouts), count=len(decoder.kernels), norm=decoder.norm, eps=decoder.eps)
        super().__init__(first.library, first.about, head, decoder.base.get_input_embeddings().weight.new_empty(0), about)
        self._scratch = NativePass(decoder.shared)
        self._logits = self._like.new_empty(0, 0)
        self._banned: tuple[int, ...] | None = None
        self.ban(())

    @staticmethod
    def of(direct: Direct, cache: TreeCache, context: int | None) -> NativeGrowth | None:
        """None if there is no such kernel for the model."""
        head = getattr(vars(direct.head).get("forward"), "product", None)
        layer = direct.decoder.kernels[0]
        if not direct.decoder.embedded.tokens:  # embeddings that are quantised
            return None
        if not isinstance(head, Product) or head.hint != NATIVE or head.inputs != layer.about.hidden:
            return None
        if native.library(head.dtype) is not layer.library:
            return None
        return NativeGrowth(direct, head, cache, context)

    def ban(self, tokens: tuple[int, ...]) -> None:
        """Do not draft ``tokens`` from now on."""
        if tokens == self._banned:
            return
        self._banned, head, added = tokens, self.head, self.direct.bias
        self._matrix = native.Matrix.from_buffer_copy(head.matrix)
        if added is not None or tokens:
            self._bias = torch.zeros(head.outputs, dtype=head.dtype) if head.bias is None else head.bias[: head.outputs].clone()
            if added is not None:
                self._bias += added[0].to(head.dtype)
            self._bias[[token for token in tokens if 0 <= token < head.outputs]] = -torch.inf
            self._bias = padded(self._bias)
            self._matrix.bias = self._bias.data_ptr()
        self._about.head = ctypes.addressof(self._matrix)

    def decode(self, ids: Sequence[int], *, most: int, ends: Collection[int], draws: Draws | None) -> tuple[list[int], Tensor] | None:
        """Decode behind ``ids``, of which the cache lacks the last token: read that, and then each token that is likeliest, or drawn by
        ``draws``; ``most`` at most and none behind one of ``ends``. Returns these tokens, and ``[n, V]`` the logits that they were chosen
        from, which the next call overwrites; None where this text cannot be continued here. What was read is not committed."""
        text = self._begin(ids, 1, most - 1, self.head.outputs if draws is None else draws.q.shape[2])
        if text is None or self._about.missed != 1:
            return None
        if len(self._logits) < most:
            self._logits = self._like.new_empty(most, self.head.packed_outputs)
        tokens, stop, how = (ctypes.c_int64 * most)(), (ctypes.c_int64 * len(ends))(*ends), None if draws is None else draws.about
        count = self._library.decode(self._about, self._pass, text, most, stop, len(ends), self._logits.data_ptr(), tokens, how)
        self._end(ids, count)
        return tokens[:count], self.direct.finished(self._logits[:count, : self.head.outputs])

    def _begin(self, ids: Sequence[int], widest: int, nodes: int, vocab_size: int) -> Any:
        """What the cache lacks of ``ids``."""
        cache = self.cache
        start = cache.lengths[0]
        missed, most = len(ids) - start, len(ids) + nodes
        if not 1 <= missed <= MISSED or (self.context is not None and most > self.context):
            return None
        decoder, about = self.direct.decoder, self._about
        cache.enter(Window(0, 1, (start,), most - start))
        keys, values = decoder.held(cache, self._like)
        if not decoder.place(about, self._pass, cache, self._like, most):
            return None
        cache.place(self._pass)
        self._make_room(max(MISSED, widest), 1 + nodes, cache.capacity)
        about.embedded = decoder.embedded
        about.keys, about.values = ctypes.addressof(keys), ctypes.addressof(values)
        about.vocab = min(vocab_size, self.head.outputs, decoder.base.get_input_embeddings().num_embeddings)
        about.start, about.missed, about.most = start, missed, most
        return (ctypes.c_int64 * missed)(*ids[start:])

    def _end(self, ids: Sequence[int], fed: int) -> None:
        cache = self.cache
        cache.rewind([len(ids) - 1])
        cache.enter(Window(0, 1, (len(ids) - 1,), fed))


@dataclass(frozen=True)
class StaticParents:
    """A static shape as the kernel takes it: ``parents`` and ``ranks`` of all nodes but the root; ``read`` nodes are read, in
    levels of at most ``widest``; a node has at most ``siblings`` children."""

    parents: Any
    ranks: Any
    read: int
    widest: int
    siblings: int


@lru_cache(maxsize=256)
def laid_out(shape: StaticShape) -> StaticParents | None:
    """For ``shape``, or None if its levels are too wide or not in order."""
    parents = [parent for level in shape.levels for parent in level.parents]
    ranks = [rank for level in shape.levels for rank in level.ranks]
    widest = max((level.last - level.first for level in shape.levels[:-1]), default=1)
    if parents != sorted(parents) or tuple(parents) != shape.parents[1:] or widest > WIDEST:
        return None
    number = ctypes.c_int32 * len(parents)
    return StaticParents(number(*parents), number(*ranks), shape.levels[-1].first - 1, widest, 1 + max(ranks))
