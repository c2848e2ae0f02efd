"""The draft of an EAGLE-3 head for one greedy row, in one call of a kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from foretoken.drafters.eagle3_cache import LayerCache
from foretoken.heads.eagle3_layer import Layer
from foretoken.target import native
from foretoken.target.native_growth import MISSED, Grower
from foretoken.target.packing import padded_size

WHOLE = ("fc", "qkv", "o", "gate_up", "down")  # products whose outputs the kernels do not pad
UNIT = 32  # numbers that the kernels take together


class Eagle3Growth(Grower):
    """Grows trees below the text of the only row that ``layer``, which is packed, reads. Before each call it is told what is new:
    :attr:`cache` and :attr:`features` ``[n, F * d]``, the target's along the last n tokens of the text, not in the cache yet.
    """

    def __init__(self, layer: Layer):
        config, products = layer.config, layer.products
        matrices = {name: product.matrix for name, product in products.items()}
        self.layer = layer
        self.cache, self.features = LayerCache(), layer.embeddings.new_empty(0)
        self._decoder = native.Layer(
            hidden=config.target.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            size=config.head_dim,
            eps=config.rms_norm_eps,
            scaling=config.head_dim**-0.5,
            qkv=matrices["qkv"],
            output=matrices["o"],
            gate_up=matrices["gate_up"],
            down=matrices["down"],
            after=layer.post_attention_layernorm.data_ptr(),
        )
        self._eagle = native.Eagle(
            fuse=matrices["fc"],
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
            norm=layer.norm.data_ptr(),
            eps=config.rms_norm_eps,
            embeddings=layer.embeddings.data_ptr(),
            eagle=ctypes.addressof(self._eagle),
        )
        head = products["lm_head"]
        super().__init__(native.library(head.dtype, head.int8), self._decoder, head, layer.norm.new_empty(0), about)
        self._angles: tuple[Tensor, Tensor] | None = None
        self._scratch_steps: tuple[Tensor, ...] = ()

    @staticmethod
    def of(layer: Layer) -> Eagle3Growth | None:
        """For ``layer``, or None if its sizes or options are not those that the kernel is made for."""
        products, config = layer.products, layer.config
        if not {*WHOLE, "lm_head"} <= products.keys() or layer.input_norm is not None or layer.fc_norms:
            return None
        if any(padded_size(products[name].outputs) != products[name].outputs for name in WHOLE) or config.head_dim % UNIT:
            return None
        if layer.embeddings.dtype != layer.norm.dtype or not layer.embeddings.is_contiguous():
            return None
        return Eagle3Growth(layer)

    def _begin(self, ids: Sequence[int], widest: int, nodes: int, vocab_size: int) -> Any:
        layer, cache, about, eagle = self.layer, self.cache, self._about, self._eagle
        start, missed = cache.lengths[0], len(self.features)
        if missed > MISSED or vocab_size < layer.config.target.vocab_size:
            return None
        config, most = layer.config, start + missed + nodes
        buffer = cache.reserve(most, layer.norm.new_empty(0, 0, config.num_key_value_heads, config.head_dim))
        if self._make_room(max(MISSED, widest), 1 + nodes, buffer.shape[3]):
            tokens, read = self._sizes[:2]
            width = config.target.hidden_size
            self._scratch_steps = layer.norm.new_empty(tokens, 2 * width), layer.norm.new_empty(read, width)
            eagle.inputs, eagle.states = (each.data_ptr() for each in self._scratch_steps)
        self._turn_up_to(most)
        self._features = self.features.to(layer.norm.dtype).contiguous()
        eagle.features = self._features.data_ptr()
        self._places = (ctypes.c_void_p * 1)(buffer[0].data_ptr()), (ctypes.c_void_p * 1)(buffer[1].data_ptr())
        about.keys, about.values = (ctypes.addressof(each) for each in self._places)
        self._pass.row_stride, self._pass.head_stride = buffer.stride(1), buffer.stride(2)
        about.vocab = self.head.outputs
        about.start, about.missed, about.most = start, missed, most
        return (ctypes.c_int64 * missed)(*ids[start + 1 :])

    def _turn_up_to(self, length: int) -> None:
        """Angles of positions below ``length``, as the kernel reads them."""
        if self._angles is not None and len(self._angles[0]) >= length:
            return
        self.layer.rotary.reserve(length)
        cosines, sines = self.layer.rotary.tables(self.layer.norm)
        half = sines.shape[-1] // 2
        turned = sines.clone()
        turned[:, :half].neg_()
        self._angles = cosines.contiguous(), turned
        self._about.cos, self._about.sin = (each.data_ptr() for each in self._angles)

    def _end(self, ids: Sequence[int], fed: int) -> None:
        self.cache.lengths[0] += len(self.features)
