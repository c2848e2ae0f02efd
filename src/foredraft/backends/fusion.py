"""Decoder layers of the llama family in a third of the calls.

A layer of such a model is about sixty small operations around four large products. A product of a few megabytes evicts everything else
from the CPU's caches, so each small operation after it costs microseconds, whatever it computes; over all layers they take a third of the
time of the products. Here a layer is the four products and about twenty operations in between, which round where the class rounds; if all
products are in the layout of the kernels in ``native``, it is one call.

``forward`` is overridden on single layers, and :meth:`Fusion.undo` undoes that. Layers stay modules that are called with
what the model gives them, so masks and caches work as before. If something inside a layer is hooked, or its weights change, the
layer runs as its class does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from foredraft.backends.described_pass import DescribedModel
from foredraft.backends.families import FAMILIES
from foredraft.backends.kernel_pass import PLAIN_ARGUMENTS, NativeLayer, NativeModel, fits
from foredraft.backends.native import ATTENTION, MLP
from foredraft.backends.packing import Packing
from foredraft.backends.products import PLAIN, Product
from foredraft.backends.sourced_pass import SourcedModel
from foredraft.models.cache import TreeCache
from foredraft.models.cache_names import cache_argument
from foredraft.models.changes import Override, Structure, hooks_of, take_back
from foredraft.models.paged_cache import PagedCache
from foredraft.models.skips import LeftOut

LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


class Fusion:
    """The fused layers of a model whose products are packed.

    Args:
        model: layers of other families, and those whose products are not all packed, stay as they are.

    Attributes:
        layers: those that are fused; ``native`` of them are one call of a kernel.
        unfused: why not every decoder layer is one call of a kernel; None if all are.
    """

    def __init__(self, model: nn.Module, packing: Packing):
        self.layers: list[nn.Module] = []
        self.native = 0
        self._whole: list[nn.Module] = []
        self.unfused: str | None = None
        try:
            self._fuse(model, packing)
        except BaseException:
            self.undo()
            raise

    def _fuse(self, model: nn.Module, packing: Packing) -> None:
        attention = model.config._attn_implementation  # type: ignore[union-attr]
        known, shared = [layer for layer in model.modules() if is_known(layer) and attention == "sdpa"], Shared()
        for layer in known:
            fused = FusedLayer.of(layer, packing, shared)
            if fused is not None:
                self.layers.append(layer)
                vars(layer)["forward"] = fused
                self.native += fused.kernel is not None
        if attention not in ("sdpa", "eager"):
            self.unfused = f"its attention is {attention!r}, and fused layers attend as 'sdpa' does"
            return
        if not known:
            families = f"none of {', '.join(FAMILIES)}, nor those of a T5, BART or Whisper whose sizes and layouts the kernels take"
            self.unfused = f"its decoder layers are {families}"
        elif len(self.layers) < len(known):
            self.unfused = f"not all products are packed in {len(known) - len(self.layers)} of its {len(known)} decoder layers"
        elif self.native < len(known):
            self.unfused = (
                f"{len(known) - self.native} of its {len(known)} decoder layers have sizes or layouts that the kernel does not take"
            )
        for base in model.modules():
            whole = NativeModel.of(base) or SourcedModel.of(base, packing) or DescribedModel.of(base, packing)
            if isinstance(whole, str):
                self.unfused = self.unfused if known else whole
            elif whole is not None:
                self._whole.append(base)
                vars(base)["forward"] = whole
            if isinstance(whole, (SourcedModel, DescribedModel)):
                self.native, self.unfused = len(whole.kernels), None

    def trial(self) -> tuple[Tensor, Tensor] | None:
        """The output of a decoder that has an encoder: by the kernels, and by its own layers; None if there is none."""
        found = [vars(base)["forward"] for base in self._whole]
        return next((each.trial() for each in found if isinstance(each, SourcedModel)), None)

    def wrong(self, model: nn.Module, sample: Callable[[], Tensor]) -> str | None:
        """How the output of a described decoder differs from that of its classes; None if it does not. ``sample`` runs ``model``."""
        found = [vars(base)["forward"] for base in self._whole]
        return next((why for each in found if isinstance(each, DescribedModel) and (why := each.wrong(model, sample)) is not None), None)

    def undo(self) -> None:
        """Give every layer the ``forward`` of its class back."""
        for module in (*self.layers, *self._whole):
            take_back(module, (FusedLayer, NativeModel))
        self.layers, self._whole, self.native = [], [], 0


class Shared:
    """Inputs that all layers of a pass share, prepared by the first of them that asks. Passes in other threads may replace what is kept
    here at any time, so each value is stored, and read, together with what it was made from."""

    def __init__(self) -> None:
        self._rotation: tuple[object, Tensor, Tensor] = (None, torch.empty(0), torch.empty(0))
        self._masks: list[tuple[object, Tensor]] = []
        self.sizes: tuple[int, ...] | None = None  # of the layers that are one call of a kernel

    def rotation(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """cos and sin ``[B, N, 1, D]``, the first half of sin negated, so that :func:`rotated` need not negate."""
        known = self._rotation
        if given is not known[0]:
            cos, sin = given
            first, second = sin.chunk(2, -1)
            self._rotation = known = given, cos.unsqueeze(2), torch.cat((-first, second), -1).unsqueeze(2)
        return known[1:]

    def mask(self, given: Tensor, group: int) -> Tensor:
        """``[B, 1, group * N, L]``: the rows of ``given`` ``[B, 1, N, L]`` for each query head of a group. A model has few masks."""
        for known, repeated in self._masks:
            if known is given:
                return repeated
        rows, one, nodes, width = given.shape
        repeated = given[:, :, None].expand(rows, one, group, nodes, width).reshape(rows, one, group * nodes, width)
        self._masks = [(given, repeated), *self._masks[:1]]
        return repeated


class FusedLayer(Override):
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
        self._cache_argument = cache_argument(type(layer))
        self._plain_arguments = PLAIN_ARGUMENTS | {self._cache_argument}
        self._hooks, self._structure = hooks_of(layer, inside=True), Structure(layer, inside=True)

    @staticmethod
    def of(layer: Any, packing: Packing, shared: Shared) -> FusedLayer | None:
        """The fused form of ``layer``, one of :data:`LAYERS`, or None if it has none."""
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
        *,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **others: Any,
    ) -> Tensor:
        cache = others.get(self._cache_argument)
        plain = position_embeddings is not None and others.keys() <= self._plain_arguments and not torch.is_grad_enabled()
        changed = self.outdated or (not isinstance(cache, TreeCache) and self._structure.changed)
        if position_embeddings is None or not plain or any(self._hooks) or changed:
            others |= {"attention_mask": attention_mask, "position_embeddings": position_embeddings}
            return type(self.layer).forward(self.layer, hidden_states, **others)
        attends, feeds = (not isinstance(self.layer._modules[name], LeftOut) for name in ("self_attn", "mlp"))
        if self.kernel is not None and isinstance(cache, TreeCache) and fits(attention_mask):
            return self.kernel(hidden_states, attention_mask, cache, position_embeddings, attends * ATTENTION + feeds * MLP)
        x = hidden_states
        if attends:
            x = x + self._attention(x, attention_mask, cache, position_embeddings)
        if not feeds:
            return x
        gate, up = torch.split(self.gate_up(normed(self.after, x)), self.gate_up.sizes, -1)
        return x + self.down(self.activation(gate) * up)

    def _attention(self, x: Tensor, mask: Tensor | None, cache: Any, angles: tuple[Tensor, Tensor]) -> Tensor:
        """``[B, N, H]`` what the attention adds to ``x``."""
        size, queries = self.size, self.queries
        rows, nodes, _ = x.shape
        cos, sin = self.shared.rotation(angles)
        heads = self.qkv(normed(self.before, x)).view(rows, nodes, -1, size)  # of q, k and v
        both = heads[:, :, : self.pairs]
        if self.q_norm is not None:
            both = torch.cat((normed(self.q_norm, both[:, :, :queries]), normed(self.k_norm, both[:, :, queries:])), 2)
        both = rotated(both, cos, sin)
        key, value = both[:, :, queries:].transpose(1, 2), heads[:, :, self.pairs :].transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        if isinstance(cache, PagedCache) and cache.reader is not None:
            return self.output(cache.reader.attended(both[:, :, :queries].transpose(1, 2), key, value, mask, self.scaling).flatten(2))
        return self.output(self._attended(both[:, :, :queries], key, value, mask))

    @property
    def outdated(self) -> bool:
        """As :attr:`Product.outdated`, of any of its products."""
        return self.qkv.outdated or self.output.outdated or self.gate_up.outdated or self.down.outdated

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """``[B, N, heads * D]`` for ``query`` ``[B, N, heads, D]``.

        torch's kernel processes the queries of one head together, and is slow for a single one in bfloat16. Query heads that share their
        keys are therefore passed as more queries of one head, and a single query is passed twice.
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


def is_known(layer: nn.Module) -> bool:
    """Whether ``layer`` is one of :data:`LAYERS` as transformers has them."""
    known = type(layer).__name__ in LAYERS and type(layer).__module__.startswith("transformers.models.")
    return known and not any("forward" in vars(each) and not isinstance(each, nn.Linear) for each in layer.modules())


def alone(layer: Any) -> Product | None:
    """An unpacked linear layer as a product of its own weight."""
    plain = type(layer) is nn.Linear and "forward" not in vars(layer) and not layer.weight.is_meta
    return Product([layer], PLAIN) if plain else None


def normed(norm: Any, x: Tensor) -> Tensor:
    return rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` ``[B, N, heads, D]`` after RoPE."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((second, first), -1) * sin
