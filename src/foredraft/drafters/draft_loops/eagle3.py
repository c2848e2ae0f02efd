"""The layer of an EAGLE-3 head by a kernel: one step of any rows, or the whole draft of one greedy row, in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foredraft.backends import native
from foredraft.backends.kernel_pass import NativePass
from foredraft.backends.narrow import UNIT
from foredraft.backends.native_growth import MISSED, Grower
from foredraft.backends.products import padded_size
from foredraft.heads.eagle3_layer import Layer
from foredraft.models.cache import TreeCache, Window

WHOLE = ("fc", "qkv", "o", "gate_up", "down")  # products whose outputs the kernels do not pad


class Angles:
    """Cosines and sines ``[positions, h]`` of a layer, as the kernels read them."""

    def __init__(self, layer: Layer):
        self.layer = layer
        self.cosines = self.sines = layer.norm.new_empty(0, layer.config.head_dim)

    def reserve(self, length: int) -> bool:
        """Positions below ``length`` will be asked for; whether they are elsewhere now."""
        if len(self.cosines) >= length:
            return False
        self.layer.rotary.reserve(length)
        self.cosines, signed = (each.contiguous() for each in self.layer.rotary.tables(self.layer.norm))
        half = signed.shape[-1] // 2
        self.sines = signed.clone()
        self.sines[:, :half].neg_()
        return True


def kernel_layer(layer: Layer) -> native.Layer | None:
    """What the kernels need to know of ``layer``, which is packed; None if its sizes are not those that they are made for."""
    products, config = layer.products, layer.config
    if not {*WHOLE, "lm_head"} <= products.keys() or config.head_dim % UNIT:
        return None
    if any(padded_size(products[name].outputs) != products[name].outputs for name in WHOLE):
        return None
    if layer.embeddings.dtype != layer.norm.dtype or not layer.embeddings.is_contiguous():
        return None
    return native.Layer(
        hidden=config.target.hidden_size,
        inner=config.intermediate_size,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        size=config.head_dim,
        eps=config.rms_norm_eps,
        scaling=config.head_dim**-0.5,
        qkv=products["qkv"].matrix,
        output=products["o"].matrix,
        gate_up=products["gate_up"].matrix,
        down=products["down"].matrix,
        after=native.Norm.of(layer.post_attention_layernorm),
    )


class Eagle3Step:
    """One step of ``layer`` over as many tokens of every row, in one call."""

    def __init__(self, layer: Layer, about: native.Layer):
        self.layer, self._about = layer, about
        self._library = native.library(layer.products["lm_head"].dtype)
        self._pass, self._scratch, self._angles = native.Pass(), NativePass(), Angles(layer)

    @staticmethod
    def of(layer: Layer) -> Eagle3Step | None:
        """For ``layer``, or None if its sizes are not those that the kernel is made for."""
        about = kernel_layer(layer)
        return None if about is None else Eagle3Step(layer, about)

    def __call__(
        self, tokens: Tensor, states: Tensor, positions: Tensor | slice, window: Window, cache: TreeCache, mask: Tensor | None
    ) -> Tensor:
        """``[R, n, d]`` what the layer makes of ``tokens`` ``[R, n]`` and ``states`` ``[R, n, d]``; their keys and values go to the
        ``window`` of ``cache``. They see what ``mask`` ``[R, 1, n, span]`` says; without one every slot up to their own."""
        layer, config, about = self.layer, self.layer.config, self._pass
        rows, count = tokens.shape
        residual, inputs = layer.inputs(tokens, states)
        x, inputs = residual.clone(memory_format=torch.contiguous_format), inputs.contiguous()
        cache.enter(window)
        keys, values = cache.buffers(0, layer.norm, config.num_key_value_heads, config.head_dim)
        self._angles.reserve(window.width)
        angles = [each[positions] for each in (self._angles.cosines, self._angles.sines)]
        if isinstance(positions, slice):
            angles = [each.expand(rows, -1, -1) for each in angles]
        cosines, sines = (each.contiguous() for each in angles)
        firsts = torch.arange(rows + 1, dtype=torch.int32) * count
        row_of = torch.arange(rows, dtype=torch.int32).repeat_interleave(count)
        slots = (torch.tensor(window.starts, dtype=torch.int32)[:, None] + torch.arange(count, dtype=torch.int32)).contiguous()
        about.threads, about.rows, about.tokens, about.nodes = torch.get_num_threads(), rows, rows * count, count
        about.width = window.width
        cache.place(about)
        if mask is not None:
            about.mask_row_stride, about.mask_stride = mask.stride(0), mask.stride(2)
        scratch = self._scratch.room(self._about, x, rows * count, int(about.threads))
        native.make_room_for_segments(about, self._about, rows * count, window.width)
        for name, tensor in zip(native.POINTERS, (cosines, sines, firsts, row_of, slots, *scratch), strict=True):
            setattr(about, name, tensor.data_ptr())
        seen = None if mask is None else mask.data_ptr()
        self._library.layer_over(
            self._about, about, seen, x.data_ptr(), inputs.data_ptr(), inputs.shape[-1], keys.data_ptr(), values.data_ptr()
        )
        return x


class Eagle3Growth(Grower):
    """Grows trees below the text of the only row that ``layer``, which is packed, reads. Before each call it is told what is new:
    :attr:`cache` and :attr:`features` ``[n, F * d]``, the target's along the last n tokens of the text, not in the cache yet.
    """

    def __init__(self, layer: Layer, decoder: native.Layer):
        config, products = layer.config, layer.products
        self.layer = layer
        self.cache, self.features = TreeCache(), layer.embeddings.new_empty(0)
        self._decoder = decoder
        self._eagle = native.Eagle(
            fuse=products["fc"].matrix,
            of_embedding=layer.input_layernorm.data_ptr(),
            of_state=layer.hidden_norm.data_ptr(),
            ids=None if layer.ids is None else layer.ids.data_ptr(),
            width=products["fc"].inputs,
            residual_normed=config.norm_before_residual,
            output_normed=config.norm_output,
        )
        self._layers = (ctypes.c_void_p * 1)(ctypes.addressof(self._decoder))
        about = native.Growth(
            layers=ctypes.addressof(self._layers),
            count=1,
            norm=native.Norm.of(layer.norm),
            eps=config.rms_norm_eps,
            embedded=native.Embedded(tokens=layer.embeddings.data_ptr()),
            eagle=ctypes.addressof(self._eagle),
        )
        head = products["lm_head"]
        super().__init__(native.library(head.dtype), self._decoder, head, layer.norm.new_empty(0), about)
        self._angles = Angles(layer)
        self._scratch_steps: tuple[Tensor, ...] = ()

    @staticmethod
    def of(layer: Layer) -> Eagle3Growth | None:
        """For ``layer``, or None if its sizes or options are not those that the kernel is made for."""
        decoder = kernel_layer(layer)
        return None if decoder is None or layer.input_norm is not None or layer.fc_norms else Eagle3Growth(layer, decoder)

    def _begin(self, ids: Sequence[int], widest: int, nodes: int, vocab_size: int) -> Any:
        layer, cache, about, eagle = self.layer, self.cache, self._about, self._eagle
        start, missed = cache.lengths[0], len(self.features)
        if missed > MISSED or vocab_size < layer.config.target.vocab_size:
            return None
        config, most = layer.config, start + missed + nodes
        cache.enter(Window(0, 1, (start,), missed + nodes))
        keys, values = cache.buffers(0, layer.norm, config.num_key_value_heads, config.head_dim)
        if self._make_room(max(MISSED, widest), 1 + nodes, cache.capacity):
            tokens, read = self._sizes[:2]
            width = config.target.hidden_size
            self._scratch_steps = layer.norm.new_empty(tokens, 2 * width), layer.norm.new_empty(read, width)
            eagle.inputs, eagle.states = (each.data_ptr() for each in self._scratch_steps)
        if self._angles.reserve(most):
            about.cos, about.sin = self._angles.cosines.data_ptr(), self._angles.sines.data_ptr()
        self._features = self.features.to(layer.norm.dtype).contiguous()
        eagle.features = self._features.data_ptr()
        self._places = (ctypes.c_void_p * 1)(keys.data_ptr()), (ctypes.c_void_p * 1)(values.data_ptr())
        about.keys, about.values = (ctypes.addressof(each) for each in self._places)
        cache.place(self._pass)
        about.vocab = self.head.outputs
        about.start, about.missed, about.most = start, missed, most
        return (ctypes.c_int64 * missed)(*ids[start + 1 :])

    def _end(self, ids: Sequence[int], fed: int) -> None:
        self.cache.commit(None, [len(self.features)])
