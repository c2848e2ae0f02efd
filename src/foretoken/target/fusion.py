"""Decoder layers of the llama family in a third of the calls.

A layer of such a model is some sixty small operations around four large products. Right after a product of a few megabytes the
processor's caches hold nothing of ours, so that each small one costs microseconds, whatever it computes; over all layers they
take as long as a third of the products. Here a layer is the four products and some twenty operations in between, in the same
order of rounding as the class has them; and where all of them are in the layout of the kernels in ``native``, one call.

``forward`` is overridden on single layers, and :meth:`Fusion.undo` takes that back. Layers stay modules that are called with
what the model gives them, so masks, caches and hooks work as before.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from transformers.modeling_outputs import BaseModelOutputWithPast

from foretoken.target import native
from foretoken.target.cache import TreeCache
from foretoken.target.packing import NATIVE, PLAIN, Packing, Product

MODELS = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")
LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
BY_POSITION = ("default", "linear", "llama3", "yarn")
PLAIN_ARGUMENTS = {"position_ids", "use_cache", "logits_to_keep", "output_attentions", "output_hidden_states", "return_dict"}


class Fusion:
    """The fused layers of a model whose products are packed.

    Args:
        model: layers of other families, and those whose products are not all packed, stay as they are.
    """

    def __init__(self, model: nn.Module, packing: Packing):
        shared = Shared()
        self.layers: list[nn.Module] = []
        self.native = 0
        self._whole: list[nn.Module] = []
        if model.config._attn_implementation != "sdpa":  # type: ignore[union-attr]
            return
        for layer in model.modules():
            fused = FusedLayer.of(layer, packing, shared)
            if fused is not None:
                vars(layer)["forward"] = fused
                self.layers.append(layer)
                self.native += fused.kernel is not None
        for base in model.modules():
            whole = NativeModel.of(base)
            if whole is not None:
                vars(base)["forward"] = whole
                self._whole.append(base)

    def undo(self) -> None:
        """Give every layer the ``forward`` of its class back."""
        for module in (*self.layers, *self._whole):
            del module.forward
        self.layers, self._whole, self.native = [], [], 0


class Shared:
    """What all layers of a pass need alike, prepared by the first of them that asks."""

    def __init__(self) -> None:
        self._rotation: tuple[object, Tensor, Tensor] = (None, torch.empty(0), torch.empty(0))
        self._masks: list[tuple[object, Tensor]] = []
        self.native = NativePass()

    def rotation(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """cos and sin ``[B, N, 1, D]``, the first half of sin negated, so that :func:`rotated` need not negate."""
        if given is not self._rotation[0]:
            cos, sin = given
            first, second = sin.chunk(2, -1)
            self._rotation = given, cos.unsqueeze(2), torch.cat((-first, second), -1).unsqueeze(2)
        return self._rotation[1:]

    def mask(self, given: Tensor, group: int) -> Tensor:
        """``[B, 1, group * N, L]``: the rows of ``given`` ``[B, 1, N, L]`` for each query head of a group. A model has few masks."""
        for known, repeated in self._masks:
            if known is given:
                return repeated
        rows, one, nodes, width = given.shape
        repeated = given[:, :, None].expand(rows, one, group, nodes, width).reshape(rows, one, group * nodes, width)
        self._masks = [(given, repeated), *self._masks[:1]]
        return repeated


class FusedLayer:
    """``forward`` of one decoder layer."""

    def __init__(self, layer: Any, products: tuple[Product, Product, Product, Product], shared: Shared):
        attention, mlp = layer.self_attn, layer.mlp
        self.layer, self.shared = layer, shared
        self.qkv, self.output, self.gate_up, self.down = products
        self.index, self.size, self.scaling = attention.layer_idx, attention.head_dim, attention.scaling
        self.queries, self.pairs = (sum(self.qkv.sizes[:count]) // self.size for count in (1, 2))  # heads of q, of q and k
        self.group = self.queries // (self.pairs - self.queries)
        self.activation = nn.functional.silu if type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation") else mlp.act_fn
        self.before, self.after = layer.input_layernorm, layer.post_attention_layernorm
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.kernel = NativeLayer.of(self)

    @staticmethod
    def of(layer: Any, packing: Packing, shared: Shared) -> FusedLayer | None:
        """The fused form of ``layer``, or None if it has none."""
        if type(layer).__name__ not in LAYERS or not type(layer).__module__.startswith("transformers.models."):
            return None
        attention, mlp = layer.self_attn, layer.mlp
        qkv = packing.product(attention.q_proj, attention.k_proj, attention.v_proj)
        output = packing.product(attention.o_proj) or alone(attention.o_proj)
        gate_up = packing.product(mlp.gate_proj, mlp.up_proj)
        down = packing.product(mlp.down_proj) or alone(mlp.down_proj)
        if qkv is None or output is None or gate_up is None or down is None:
            return None
        return FusedLayer(layer, (qkv, output, gate_up, down), shared)

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **others: Any,
    ) -> Tensor:
        if position_embeddings is None or not others.keys() <= PLAIN_ARGUMENTS or torch.is_grad_enabled():
            whole = {"attention_mask": attention_mask, "past_key_values": past_key_values, "position_embeddings": position_embeddings}
            original: Tensor = type(self.layer).forward(self.layer, hidden_states, **whole, **others)
            return original
        if self.kernel is not None and isinstance(past_key_values, TreeCache) and fits(attention_mask):
            return self.kernel(hidden_states, attention_mask, past_key_values, position_embeddings)
        x, size, queries = hidden_states, self.size, self.queries
        rows, nodes, _ = x.shape
        cos, sin = self.shared.rotation(position_embeddings)
        heads = self.qkv(normed(self.before, x)).view(rows, nodes, -1, size)  # of q, k and v
        both = heads[:, :, : self.pairs]
        if self.q_norm is not None:
            both = torch.cat((normed(self.q_norm, both[:, :, :queries]), normed(self.k_norm, both[:, :, queries:])), 2)
        both = rotated(both, cos, sin)
        key, value = both[:, :, queries:].transpose(1, 2), heads[:, :, self.pairs :].transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.index)
        x = x + self.output(self._attended(both[:, :, :queries], key, value, attention_mask))
        gate, up = torch.split(self.gate_up(normed(self.after, x)), self.gate_up.sizes, -1)
        return x + self.down(self.activation(gate) * up)

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """``[B, N, heads * D]`` for ``query`` ``[B, N, heads, D]``.

        torch's kernel takes queries of one head together, and is slow for a single one in bfloat16. Query heads that read the same
        keys are therefore laid side by side as if they were more queries, and a lone one is asked twice.
        """
        rows, nodes, heads, size = query.shape
        group, attend = self.group, scaled_dot_product_attention
        if mask is None and nodes > 1:
            attended = attend(query.transpose(1, 2), key, value, is_causal=True, scale=self.scaling, enable_gqa=group > 1)
        elif group > 1 and (mask is None or mask.shape[1] == 1):
            wide = query.view(rows, nodes, -1, group, size).permute(0, 2, 3, 1, 4).reshape(rows, -1, group * nodes, size)
            wide_mask = None if mask is None else self.shared.mask(mask, group)
            attended = attend(wide, key, value, attn_mask=wide_mask, scale=self.scaling)
            return attended.view(rows, -1, group, nodes, size).permute(0, 3, 1, 2, 4).reshape(rows, nodes, heads * size)
        elif nodes == 1 and query.dtype == torch.bfloat16:
            twice = query.expand(rows, 2, heads, size).transpose(1, 2)
            attended = attend(twice, key, value, attn_mask=mask, scale=self.scaling, enable_gqa=group > 1)[:, :, :1]
        else:
            attended = attend(query.transpose(1, 2), key, value, attn_mask=mask, scale=self.scaling, enable_gqa=group > 1)
        return attended.transpose(1, 2).reshape(rows, nodes, heads * size)


class NativePass:
    """What the kernels need to know about a pass, filled in by its first layer."""

    def __init__(self) -> None:
        self.about = native.Pass()
        self._given: tuple[object, object] = (None, None)
        self._held: list[Tensor] = []  # what the pointers point to
        self._scratch: dict[tuple[int, int, int], list[Tensor]] = {}

    def of(self, layer: NativeLayer, x: Tensor, cache: TreeCache, angles: tuple[Tensor, Tensor]) -> native.Pass:
        about, window = self.about, cache.window
        if angles is self._given[0] and window is self._given[1]:
            return about
        assert window is not None
        rows, nodes, _ = x.shape
        cos, sin = (each.contiguous() for each in angles)
        slots = cache.slots
        about.threads, about.rows, about.nodes, about.width = torch.get_num_threads(), rows, nodes, window.width
        about.angle_stride = 0 if cos.shape[0] == 1 else nodes * layer.about.size
        scratch = self._room(layer, x, rows * nodes, window.width, int(about.threads))
        for name, tensor in zip(
            ("cos", "sin", "slots", "states", "projected", "attended", "wide", "thin", "scores"), (cos, sin, slots, *scratch)
        ):
            setattr(about, name, tensor.data_ptr())
        self._held = [cos, sin, slots, *scratch]
        self._given = angles, window
        return about

    def _room(self, layer: NativeLayer, x: Tensor, tokens: int, width: int, threads: int) -> list[Tensor]:
        """Scratch for so many tokens and slots, kept for the next pass of that size."""
        width = -(-width // 256) * 256
        key = tokens, width, threads
        if key not in self._scratch:
            if len(self._scratch) >= 16:
                self._scratch.clear()
            about = layer.about
            sizes = (about.hidden, (about.heads + 2 * about.key_heads) * about.size, about.heads * about.size, 2 * about.inner, about.inner)
            made = [x.new_empty(tokens, size) for size in sizes]
            self._scratch[key] = [*made, torch.empty(threads * 8 * (width + 16))]
        return self._scratch[key]


class NativeLayer:
    """A decoder layer in one call of a kernel."""

    def __init__(self, layer: FusedLayer):
        self.shared, self.index, self.run = layer.shared, layer.index, native.library(layer.qkv.packed.dtype).layer
        products = {"qkv": layer.qkv, "output": layer.output, "gate_up": layer.gate_up, "down": layer.down}
        norms = {"before": layer.before, "after": layer.after, "query_norm": layer.q_norm, "key_norm": layer.k_norm}
        self._held = [layer, *products.values()]  # the pointers below point into them
        self.about = native.Layer(
            hidden=layer.qkv.inputs,
            inner=layer.down.inputs,
            heads=layer.queries,
            key_heads=layer.pairs - layer.queries,
            size=layer.size,
            eps=layer.before.variance_epsilon,
            head_eps=0.0 if layer.q_norm is None else layer.q_norm.variance_epsilon,
            scaling=layer.scaling,
            **{name: product.packed.data_ptr() for name, product in products.items()},
            **{f"{name}_bias": None if product.bias is None else product.bias.data_ptr() for name, product in products.items()},
            **{name: None if norm is None else norm.weight.data_ptr() for name, norm in norms.items()},
        )

    @staticmethod
    def of(layer: FusedLayer) -> NativeLayer | None:
        """The kernel for ``layer``, or None if its sizes or layouts are not those that the kernel is made for."""
        products = (layer.qkv, layer.output, layer.gate_up, layer.down)
        whole = [layer.qkv.outputs, layer.output.outputs, layer.gate_up.outputs, layer.down.outputs]
        if any(product.hint != NATIVE for product in products) or any(size % 64 for size in whole) or layer.down.inputs % 32:
            return None
        norms = [each for each in (layer.before, layer.after, layer.q_norm, layer.k_norm) if each is not None]
        if (
            layer.size % 32
            or layer.activation is not nn.functional.silu
            or any(each.weight.dtype != layer.qkv.packed.dtype for each in norms)
        ):
            return None
        return NativeLayer(layer)

    def __call__(self, x: Tensor, mask: Tensor | None, cache: TreeCache, angles: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = cache.buffers(self.index, x, int(self.about.key_heads), int(self.about.size))
        about = self.shared.native.of(self, x, cache, angles)
        about.row_stride, about.head_stride = keys.stride(0), keys.stride(1)
        if mask is not None:
            about.mask_row_stride, about.mask_stride = 0 if mask.shape[0] == 1 else mask.stride(0), mask.stride(2)
        out = x.clone(memory_format=torch.contiguous_format)
        self.run(self.about, about, None if mask is None else mask.data_ptr(), out.data_ptr(), keys.data_ptr(), values.data_ptr())
        return out


class NativeModel:
    """``forward`` of a decoder whose layers are all kernels and see the whole text: one call for all of them."""

    def __init__(self, base: Any, kernels: list[NativeLayer]):
        self.base, self.kernels, self.shared = base, kernels, kernels[0].shared
        self.run = native.library(base.norm.weight.dtype).model
        self.abouts = pointers([ctypes.addressof(kernel.about) for kernel in kernels])
        self._tables: tuple[Tensor, Tensor] | None = None  # cos and sin by position
        self._buffers: tuple[object, Any, Any] = (None, None, None)

    @staticmethod
    def of(base: Any) -> NativeModel | None:
        """The kernel for ``base``, or None if it is no such model."""
        if type(base).__name__ not in MODELS or not type(base).__module__.startswith("transformers.models."):
            return None
        config = base.config
        layers = list(base.layers)[: config.num_hidden_layers]
        kernels = [getattr(vars(layer).get("forward"), "kernel", None) for layer in layers]
        windows = set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"} or (
            getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None) is not None
        )
        if windows or not kernels or any(kernel is None for kernel in kernels):
            return None
        if type(base.embed_tokens) is not nn.Embedding or base.norm.weight.dtype != base.embed_tokens.weight.dtype:
            return None
        return NativeModel(base, [kernel for kernel in kernels if kernel is not None])

    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> Any:
        if not self._serves(input_ids, attention_mask, position_ids, past_key_values, others):
            given = {"attention_mask": attention_mask, "position_ids": position_ids, "past_key_values": past_key_values}
            return type(self.base).forward(self.base, input_ids, **given, **others)
        assert input_ids is not None and position_ids is not None
        cache: TreeCache = past_key_values
        window = cache.window
        assert window is not None
        x = nn.functional.embedding(input_ids, self.base.embed_tokens.weight)
        first, norm = self.kernels[0], self.base.norm
        keys, values, row_stride, head_stride = self._held(cache, x)
        about = self.shared.native.of(first, x, cache, self._angles(x, position_ids, window.width))
        about.row_stride, about.head_stride = row_stride, head_stride
        if attention_mask is not None:
            about.mask_row_stride = 0 if attention_mask.shape[0] == 1 else attention_mask.stride(0)
            about.mask_stride = attention_mask.stride(2)
        mask = None if attention_mask is None else attention_mask.data_ptr()
        out, offset = torch.empty_like(x), window.first * row_stride
        where = norm.weight.data_ptr(), norm.variance_epsilon, out.data_ptr()
        self.run(self.abouts, len(self.kernels), about, mask, x.data_ptr(), keys, values, offset, *where)
        return BaseModelOutputWithPast(last_hidden_state=out, past_key_values=cache)

    def _serves(self, ids: Tensor | None, mask: Any, positions: Tensor | None, cache: Any, others: dict[str, Any]) -> bool:
        config, layers = self.base.config, self.base.layers
        return (
            ids is not None
            and positions is not None
            and isinstance(cache, TreeCache)
            and (mask is None or (isinstance(mask, Tensor) and mask.ndim == 4 and fits(mask)))
            and others.keys() <= PLAIN_ARGUMENTS | {"inputs_embeds"}
            and not any(others.get(name) for name in ("output_attentions", "output_hidden_states"))
            and others.get("inputs_embeds") is None
            and not (config.output_attentions or config.output_hidden_states or torch.is_grad_enabled())
            and not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
        )

    def _held(self, cache: TreeCache, x: Tensor) -> tuple[Any, Any, int, int]:
        """Pointers to every layer's keys and values, and the strides of all of them."""
        about = self.kernels[0].about
        stale = len(cache.layers) < len(self.kernels) or cache.layers[0].keys.shape[0] < cache.row_capacity
        if stale or cache.layers[0].keys.shape[2] < cache.capacity or self._buffers[0] != (id(cache), cache.allocations):
            for kernel in self.kernels:
                cache.buffers(kernel.index, x, int(about.key_heads), int(about.size))
            held = [cache.layers[kernel.index] for kernel in self.kernels]
            where = [pointers([getattr(layer, name).data_ptr() for layer in held]) for name in ("keys", "values")]
            self._buffers = (id(cache), cache.allocations), *where
        keys = cache.layers[0].keys
        return self._buffers[1], self._buffers[2], keys.stride(0), keys.stride(1)

    def _angles(self, x: Tensor, positions: Tensor, needed: int) -> tuple[Tensor, Tensor]:
        """cos and sin ``[R or 1, N, D]``, from a table where they depend on the position alone, which is below ``needed``."""
        rotary = self.base.rotary_emb
        if getattr(rotary, "rope_type", None) not in BY_POSITION:
            angles: tuple[Tensor, Tensor] = rotary(x, position_ids=positions)
            return angles
        if self._tables is None or self._tables[0].shape[0] < needed:
            cos, sin = rotary(x, position_ids=torch.arange(max(1024, 2 * needed))[None])
            self._tables = cos[0].contiguous(), sin[0].contiguous()
        return self._tables[0][positions], self._tables[1][positions]


def pointers(addresses: list[int]) -> Any:
    return (ctypes.c_void_p * len(addresses))(*addresses)


def fits(mask: Tensor | None) -> bool:
    """Whether the kernels can read ``mask``: one byte per node and slot, the same for every head."""
    return mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1 and mask.stride(3) == 1)


def alone(layer: Any) -> Product | None:
    """A linear layer that was not worth packing, as a product of its own weight."""
    return Product([layer], PLAIN) if type(layer) is nn.Linear and not layer.weight.is_meta else None


def normed(norm: Any, x: Tensor) -> Tensor:
    return rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` ``[B, N, heads, D]`` turned by its position."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((second, first), -1) * sin
