"""Passes by the kernels in ``native``: whole decoders, and whole language models.

A pass is a list of tokens, row after row; rows may have different numbers of them, so that nothing is computed for filler.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foredraft.backends import experts, huge_pages, native
from foredraft.backends.base import Part, Routing
from foredraft.device import one_thread
from foredraft.models.cache import TreeCache, Window
from foredraft.models.changes import Override, hooks_of
from foredraft.models.features import Features
from foredraft.models.layers import Aside
from foredraft.models.masks import MaskInputs
from foredraft.models.page_stores import Kind
from foredraft.models.pages import PAGE
from foredraft.models.skips import SkipSet

HEADS = (
    *("T5ForConditionalGeneration", "MT5ForConditionalGeneration", "UMT5ForConditionalGeneration"),
    *("BartForConditionalGeneration", "MBartForConditionalGeneration", "PLBartForConditionalGeneration", "MarianMTModel"),
    *("PegasusForConditionalGeneration", "M2M100ForConditionalGeneration", "WhisperForConditionalGeneration"),
    *("BlenderbotForConditionalGeneration", "BlenderbotSmallForConditionalGeneration"),
)
BY_POSITION = ("default", "linear", "llama3", "yarn")
POINTER = ctypes.sizeof(ctypes.c_void_p)
COUNTED = 32768  # slots in a table that is made once
WATCHING = ("output_attentions", "_output_attentions", "output_hidden_states", "output_router_logits")  # kept in a configuration


class Places:
    """Rows and slots of the tokens of a pass, row after row: ``begins`` ``[rows + 1]`` the first token of each row, ``rows`` and ``slots``
    ``[tokens]`` the row and the cache slot of each token, all int32; ``nodes`` the most tokens of a row."""

    def __init__(self, window: Window, *, ragged: bool):
        counts = list(window.counts) if ragged and window.counts is not None else [window.nodes] * window.rows
        self.nodes, self.count = max(counts), sum(counts)
        if window.rows == 1 and window.width <= COUNTED:  # the common case, without new tensors
            self.begins, self.rows = alone(self.count)
            self.positions, self.slots = (each.narrow(0, window.starts[0], self.count) for each in counting())
            return
        each = torch.tensor(counts)
        begins = torch.zeros(len(counts) + 1, dtype=torch.long)
        torch.cumsum(each, 0, out=begins[1:])
        rows = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))  # torch's would wake a second thread, even for two rows
        slots = torch.arange(self.count) + (torch.tensor(window.starts) - begins[:-1])[rows]
        self.positions = slots  # of a chain
        self.begins, self.rows, self.slots = begins.int(), rows.int(), slots.int()


@lru_cache(maxsize=256)
def alone(count: int) -> tuple[Tensor, Tensor]:
    """``begins`` and ``rows`` of a single row of so many tokens."""
    with torch.inference_mode(False):
        return torch.tensor([0, count], dtype=torch.int32), torch.zeros(count, dtype=torch.int32)


@lru_cache(maxsize=1)
def counting() -> tuple[Tensor, Tensor]:
    """The slots from 0 on, int64 and int32."""
    with torch.inference_mode(False):
        return torch.arange(COUNTED), torch.arange(COUNTED, dtype=torch.int32)


class NativePass:
    """What the kernels need to know about a pass, and their scratch memory.

    It belongs to a cache, and so to one target: another target over the same model has its own.

    Args:
        shared: what the layers of the model share; None for kernels that are no layers of a model.
    """

    def __init__(self, shared: object = None) -> None:
        self.about, self.shared = native.Pass(), shared
        self.buffers: tuple[int, Any, Any] = (-1, None, None)  # the cache's ``allocations``, pointers to every layer's keys and values
        self._held: Sequence[Tensor | None] = [None] * len(native.POINTERS[2:])  # keeps alive what the pointers refer to
        self._room, self._scratch = (0, 0), list[Tensor]()  # for so many tokens and threads
        self._experts = torch.empty(0, dtype=torch.uint8)  # their scratch

    @staticmethod
    def over(cache: TreeCache, shared: object) -> NativePass:
        """The one for passes over ``cache``."""
        if cache.scratch is None or cache.scratch.shared is not shared:
            cache.scratch = NativePass(shared)
        return cache.scratch

    def of(self, layer: Kernel, x: Tensor, window: Window, places: Places | None = None) -> native.Pass:
        """For ``x`` ``[n, hidden]`` in ``places``: unless given, the same number of tokens for each row."""
        about, places = self.about, places or Places(window, ragged=False)
        about.threads, about.rows, about.width = torch.get_num_threads(), window.rows, window.width
        about.tokens, about.nodes = places.count, places.nodes
        scratch = self.room(layer.about, x, places.count, int(about.threads))
        held = [places.begins, places.rows, places.slots, *scratch]
        for name, tensor, before in zip(native.POINTERS[2:], held, self._held, strict=True):  # mostly the same as in the last pass
            if tensor is not before:
                setattr(about, name, tensor.data_ptr())
        self._held = held
        about.cos = about.sin = None
        self.make_room_for_experts(about, layer.library, int(layer.about.hidden), places.count)
        native.make_room_for_segments(about, layer.about, window.rows * places.nodes, window.width)
        return about

    def make_room_for_experts(self, about: native.Pass, library: Any, hidden: int, tokens: int) -> None:
        """Allocate scratch for the experts of any layer in a pass over ``tokens`` tokens."""
        mixtures = getattr(self.shared, "experts", ())
        if not mixtures:
            return
        needed = experts.room(mixtures, library, tokens, hidden, int(about.threads))
        if self._experts.numel() < needed:
            self._experts = torch.empty(needed, dtype=torch.uint8)
        about.experts = self._experts.data_ptr()

    def room(self, about: native.Layer, x: Tensor, tokens: int, threads: int) -> list[Tensor]:
        """Scratch for so many tokens or more; it is as large as the largest pass, and others use its beginning."""
        if tokens > self._room[0] or threads > self._room[1]:
            tokens, threads = max(tokens, self._room[0]), max(threads, self._room[1])
            inner = max(about.inner, getattr(self.shared, "inner", 0))
            sizes = (about.hidden, (about.heads + 2 * about.key_heads) * about.size, about.heads * about.size, 2 * inner, inner)
            made = [huge_pages.room((tokens, size), x.dtype) for size in sizes]
            self._scratch = [*made, torch.empty(threads * native.scratch(int(about.size)), dtype=torch.float32)]
            self._room = tokens, threads
        return self._scratch


@dataclass(eq=False)
class Kernel:
    """A decoder layer as the kernels see it: its description ``about``, its ``index``, and what it ``shared`` with all other layers;
    ``held`` keeps alive what its pointers refer to."""

    about: native.Layer
    index: int
    library: Any
    shared: Any
    held: tuple[Any, ...]


class NativeModel(Override):
    """``forward`` of a decoder whose passes :class:`Direct` makes, in one call for all layers; called directly, it runs as its class does.

    Attributes:
        norm, eps: of the norm after the last layer, whose weights and bias are ``last``.
        embedded: the input embeddings.
    """

    def __init__(self, base: Any, layers: Sequence[nn.Module], kernels: Sequence[Kernel], last: Sequence[Tensor], eps: float):
        self.base = self.layer = base
        self.layers, self.kernels, self.shared, self.last, self.eps = layers, kernels, kernels[0].shared, last, eps
        self.norm = native.Norm.of(last[0], last[1] if len(last) > 1 else None) if last else native.Norm()
        table = base.get_input_embeddings().weight
        self.embedded = native.Embedded(tokens=table.data_ptr(), hidden=table.shape[1], padding=-1, scale=1.0)
        self.run = kernels[0].library.model
        self.abouts = pointers([ctypes.addressof(kernel.about) for kernel in kernels])
        self._hooks = hooks_of(base, inside=True)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return type(self.base).forward(self.base, *given, **named)

    @property
    def page_kinds(self) -> list[Kind]:
        """The kinds of layers of a cache in pages."""
        return [Kind(self.page_bytes(self.kernels))]

    @property
    def run_bytes(self) -> int:
        """Bytes of a page of a source; 0 if the model has none."""
        return 0

    def page_bytes(self, kernels: Sequence[Kernel]) -> int:
        """Bytes of a page for ``kernels`` together."""
        vectors = sum(int(kernel.about.key_heads) for kernel in kernels)
        return vectors * PAGE * (self.sizes[0] + self.sizes[-1]) * int(self.base.dtype.itemsize)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of a head's key and value; one number if they are equal."""
        return (int(self.kernels[0].about.size),)

    routing: Routing | None = None  # as of :class:`~foredraft.backends.base.Backend`

    @property
    def touched(self) -> float | None:
        """Experts of a layer that the last pass touched, on average, if all layers were run; None if nothing counts them."""
        return None

    finishes = False  # the model does something to what its LM head returns

    def finished(self, logits: Tensor) -> Tensor:
        """The model's logits, from what its LM head returns."""
        return logits

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """``[n, hidden]`` input embeddings of ``ids`` ``[n]`` at ``positions`` ``[n]``."""
        raise TypeError(f"{type(self).__name__} must define embed")

    def run_over(
        self,
        x: Tensor,
        positions: Tensor,
        where: MaskInputs | None,
        mask: Tensor | None,
        cache: TreeCache,
        places: Places | None = None,
        states: native.States | None = None,
        part: Part | None = None,
    ) -> Tensor:
        """The last hidden states ``[n, hidden]``, after the final norm, for embeddings ``x`` ``[n, hidden]`` at ``positions`` ``[n]``.
        ``x`` is overwritten with those before the norm. ``where`` has the positions of a tree, ``states`` says which other hidden states to
        write where, ``part`` which layers to run."""
        window = cache.window
        assert window is not None
        keys, values = self.held(cache, x)
        about = self.about(x, positions, where, cache, window, places)
        offset = cache.place(about)
        if mask is not None:
            about.mask_row_stride, about.mask_stride = 0 if mask.shape[0] == 1 else mask.stride(0), mask.stride(2)
        out = torch.empty_like(x)
        behind = self.norm, self.eps, out.data_ptr()
        seen = None if mask is None else mask.data_ptr()
        begin, end = (0, len(self.kernels)) if part is None else (part.begin, part.end)
        parts = None if part is None or part.skip is None else sublayers(part.skip, begin, end)
        if begin:
            some = ctypes.c_void_p * (end - begin)
            abouts, keys, values = (some.from_buffer(each, begin * POINTER) for each in (self.abouts, keys, values))
        else:
            abouts = self.abouts
        self.run(abouts, end - begin, about, seen, x.data_ptr(), keys, values, offset, *behind, states, parts)
        return out

    def about(
        self, x: Tensor, positions: Tensor, where: MaskInputs | None, cache: TreeCache, window: Window, places: Places | None
    ) -> native.Pass:
        """What the kernels need to know about a pass; arguments as :meth:`run_over` has them."""
        raise TypeError(f"{type(self).__name__} must define about")

    def place(self, about: native.Growth, given: native.Pass, cache: TreeCache, like: Tensor, most: int) -> bool:
        """Set what depends on positions, all below ``most``, for a draft of the only row; False if that is not possible."""
        raise TypeError(f"{type(self).__name__} must define place")

    @property
    def watched(self) -> bool:
        """There are hooks or requests for inner outputs, or only some of the layers are to run."""
        return any(map(vars(self.base.config).get, WATCHING)) or any(self._hooks) or Aside in map(type, self.layers)

    def held(self, cache: TreeCache, x: Tensor) -> tuple[Any, Any]:
        """Pointers to every layer's keys and values."""
        about, mine = self.kernels[0].about, NativePass.over(cache, self.shared)
        if len(cache.layers) < len(self.kernels) or cache.outgrown or mine.buffers[0] != cache.allocations:
            for kernel in self.kernels:
                cache.buffers(kernel.index, x, int(about.key_heads), *self.sizes)
            held = [cache.layers[kernel.index] for kernel in self.kernels]
            keys, values = (pointers([getattr(layer, name).data_ptr() for layer in held]) for name in ("keys", "values"))
            mine.buffers = cache.allocations, keys, values
        return mine.buffers[1], mine.buffers[2]


class Direct:
    """Logits of a language model whose decoder is one call, without running the classes around that.

    Nothing is computed for filler: if a window says how many nodes of each row count, the logits of the others are zero.
    """

    def __init__(self, model: Any, decoder: NativeModel):
        self.model, self.decoder, self.head = model, decoder, model.get_output_embeddings()
        self._hooks = hooks_of(model)

    @property
    def bias(self) -> Tensor | None:
        """``[1, V]`` what the model adds to the output of its LM head."""
        return getattr(self.model, "final_logits_bias", None)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, V]`` for the last hidden states ``[n, hidden]``."""
        return self.finished(self.head(hidden))

    def finished(self, found: Tensor) -> Tensor:
        """The model's logits, from what its LM head returns."""
        bias = self.bias
        if bias is None and not self.decoder.finishes:
            return found
        with one_thread(found):
            return self.decoder.finished(found if bias is None else found + bias)

    @staticmethod
    def of(model: Any) -> Direct | None:
        """For ``model``, or None if it is no such model."""
        if not passes_are_known(model):
            return None
        decoder = vars(model.get_decoder()).get("forward")
        if type(model).__name__ not in HEADS and type(model).__name__ != getattr(decoder, "head", None):
            return None
        return Direct(model, decoder) if isinstance(decoder, NativeModel) else None

    @property
    def ready(self) -> bool:
        """The model has no hooks or overrides that this would bypass."""
        return not (any(self._hooks) or "forward" in vars(self.model) or self.decoder.watched or torch.is_grad_enabled())

    def __call__(
        self,
        tokens: Tensor,
        window: Window,
        cache: TreeCache,
        context: int | None,
        tree: tuple[MaskInputs, Tensor] | None,
        keep: Sequence[int] | None,
        features: Features | None = None,
        part: Part | None = None,
        ends: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """``[R, nodes, V]`` logits after ``tokens`` ``[R, nodes]``, or those of node ``keep[r]`` of each row alone, ``[R, 1, V]``; and the
        hidden states ``features`` ``[R, nodes, F * d]``, those of ``keep`` alone unless they are wanted for the whole text.

        Args:
            context: positions that the model knows.
            tree: the positions of its nodes, and their mask ``[R or 1, 1, nodes, width]``; None for chains.
            part: the layers that are run; the hidden states are then those of :class:`~foredraft.backends.base.PassOutput`.
            ends: as in :class:`~foredraft.backends.base.ForwardPass`; if not, there are no logits, ``[R, 0, 0]``.
        """
        places = Places(window, ragged=tree is None)
        whole = places.count == tokens.numel()
        ids = tokens.reshape(-1)
        if not whole:
            index = places.rows.long() * window.nodes + torch.arange(places.count) - places.begins[places.rows.long()]
            ids = ids[index]
        if tree is None:
            where, mask, positions = None, None, places.positions
            if context is not None and window.width > context:
                positions = positions.clamp(max=context - 1)
        else:
            (where, mask), positions = tree, tree[0].queries.expand(window.rows, -1).reshape(-1)
        if part is None or part.states is None:
            x = self.decoder.embed(ids, positions)
        else:
            x = part.states.flatten(0, 1)
            x = x.clone() if whole else x[index]
        states, read, wanted = None, None, features.numbers if features is not None and part is None else ()
        if part is not None and part.skip is not None:
            wanted = (part.skip.first,)
        if wanted:
            states = x.new_empty(places.count, len(wanted) * x.shape[-1])
            numbers = (ctypes.c_int64 * len(wanted))(*wanted)
            read = native.States(len(wanted), ctypes.addressof(numbers), states.data_ptr())
        hidden = self.decoder.run_over(x, positions, where, mask, cache, places, read, part)
        last = None if keep is None else [begin + node for begin, node in zip(places.begins.tolist(), keep)]

        def spread(found: Tensor) -> Tensor:
            if whole:
                return found.view(window.rows, window.nodes, -1)
            spread = found.new_zeros(tokens.numel(), found.shape[-1])
            spread[index] = found
            return spread.view(window.rows, window.nodes, -1)

        if part is not None:
            below = states if part.skip is not None else x if part.end < len(self.decoder.kernels) else None
            return spread(self.logits(hidden) if part.logits else hidden), None if below is None else spread(below)
        if states is not None and features is not None:
            states = spread(states) if last is None or features.whole else states[last].view(window.rows, 1, -1)
        if not ends:
            return hidden.new_empty(window.rows, 0, 0), states
        logits = self.logits(hidden if last is None else hidden[last])
        return logits.view(window.rows, 1, -1) if last is not None else spread(logits), states


@lru_cache(maxsize=256)
def sublayers(skip: SkipSet, begin: int, end: int) -> bytes:
    """For each layer from ``begin`` up to ``end``, which of its sublayers are run, as ``layer.c`` has it."""
    return bytes(native.ATTENTION * (layer not in skip.attention) + native.MLP * (layer not in skip.mlp) for layer in range(begin, end))


def passes_are_known(model: Any) -> bool:
    """Whether the ``forward`` of ``model`` is one of transformers'."""
    return type(model).forward.__module__.startswith("transformers.models.")


def pointers(addresses: list[int]) -> Any:
    return (ctypes.c_void_p * len(addresses))(*addresses)


def fits(mask: Tensor | None) -> bool:
    """Whether the kernels can read ``mask``: one byte per node and slot, the same for every head."""
    return mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1 and mask.stride(3) == 1)


def eps_of(norm: Any) -> float:
    return float(next(getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)))
