"""Decoders of encoder-decoder models in one call of the kernels: those of T5, BART, Whisper and their families.

Their layers differ from those of the llama family: there is no RoPE, and each layer also attends to a source. In T5,
scores get a bias by the distance of query and key; the others add a position embedding to each token.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.backends import native
from foredraft.backends.experts import ACTIVATIONS
from foredraft.backends.kernel_pass import Kernel, NativeModel, NativePass, Places, eps_of, pointers
from foredraft.backends.packing import Packing
from foredraft.backends.products import NATIVE
from foredraft.device import end_waiting, one_thread
from foredraft.models.cache import TreeCache, Window
from foredraft.models.encoder_decoder import Source
from foredraft.models.masks import MaskInputs
from foredraft.models.page_stores import Kind
from foredraft.models.pages import PAGE
from foredraft.models.source_runs import SourcedCache, SourcedPages


@dataclass(frozen=True)
class Parts:
    """Names of the parts of a decoder: its ``layers``, and the norm after them (``last``); the others are within a layer. ``norms`` are
    those of attention, cross-attention and MLP; ``wide`` are the linear layers into the MLP's inner size, gated or plain."""

    layers: str
    last: str
    attention: str
    cross: str
    projections: tuple[str, str, str, str]
    sizes: tuple[str, str]  # of an attention: its heads, and the size of one
    norms: tuple[str, str, str]
    wide: tuple[tuple[str, ...], ...]
    down: str
    activation: str


T5 = Parts(
    layers="block",
    last="final_layer_norm",
    attention="layer.0.SelfAttention",
    cross="layer.1.EncDecAttention",
    projections=("q", "k", "v", "o"),
    sizes=("n_heads", "key_value_proj_dim"),
    norms=("layer.0.layer_norm", "layer.1.layer_norm", "layer.2.layer_norm"),
    wide=(("layer.2.DenseReluDense.wi_0", "layer.2.DenseReluDense.wi_1"), ("layer.2.DenseReluDense.wi",)),
    down="layer.2.DenseReluDense.wo",
    activation="layer.2.DenseReluDense.act",
)
BART = Parts(
    layers="layers",
    last="layer_norm",
    attention="self_attn",
    cross="encoder_attn",
    projections=("q_proj", "k_proj", "v_proj", "out_proj"),
    sizes=("num_heads", "head_dim"),
    norms=("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
    wide=(("fc1",),),
    down="fc2",
    activation="activation_fn",
)


@dataclass(frozen=True)
class Family:
    """What is special about decoders of one class.

    Attributes:
        behind: post-norm: norms apply after a sublayer's output was added, rather than to its input.
        early: the norm of the embeddings, where there is one, comes before positions are added.
        scales: if embeddings are scaled, the decoder does it, rather than the embedding module.
        scaled: the field of the config that says that logits are scaled.
    """

    parts: Parts = BART
    behind: bool = False
    early: bool = False
    scales: bool = False
    scaled: str = ""


FAMILIES = {
    "T5Stack": Family(T5, scaled="scale_decoder_outputs"),
    "MT5Stack": Family(T5),
    "UMT5Stack": Family(T5, scaled="tie_word_embeddings"),
    **dict.fromkeys(("MBartDecoder", "M2M100Decoder", "BlenderbotDecoder", "WhisperDecoder"), Family()),
    "PegasusDecoder": Family(scales=True),
    **dict.fromkeys(("BartDecoder", "PLBartDecoder"), Family(behind=True)),
    "MarianDecoder": Family(behind=True, scales=True),
    "BlenderbotSmallDecoder": Family(behind=True, early=True),
}
TRIED = 5  # tokens of a trial
WIDEST = 8192  # most values of a state that is normed in place, ``TAKEN`` of ``layer.c``


@dataclass(eq=False)
class SourcedLayer(Kernel):
    """One layer, as the kernels see it; ``cross`` are the linear layers for keys and values of a source."""

    cross: Sequence[nn.Module]

    @staticmethod
    def of(layer: Any, index: int, family: Family, bias: Tensor | None, packing: Packing, shared: object) -> SourcedLayer | None:
        """None if the kernels do not support its sizes or layouts."""
        parts, inside = family.parts, dict(layer.named_modules())
        attention, cross = inside[parts.attention], inside[parts.cross]
        (*qkv, output), (query, *cross_keys, cross_output) = (
            [getattr(each, name) for name in parts.projections] for each in (attention, cross)
        )
        wide = next(names for names in parts.wide if inside.keys() >= {*names})
        groups = {
            "qkv": qkv,
            "output": [output],
            "gate_up": [inside[name] for name in wide],
            "down": [inside[parts.down]],
            "cross_query": [query],
            "cross_output": [cross_output],
        }
        found = {name: packing.product(*each) for name, each in groups.items()}
        products = {name: each for name, each in found.items() if each is not None and each.hint == NATIVE and each.outputs % 64 == 0}
        norms = dict(zip(("before", "between", "after"), (inside[name] for name in parts.norms)))
        activation = ACTIVATIONS.get(type(inside[parts.activation]).__name__)
        heads, size = (getattr(attention, name) for name in parts.sizes)
        if len(products) < len(groups) or activation is None or size % 32 or products["down"].inputs % 32:
            return None
        dtypes, hidden = {each.dtype for each in products.values()}, products["qkv"].inputs
        if len(dtypes) > 1 or len({eps_of(each) for each in norms.values()}) > 1 or (family.behind and hidden > WIDEST):
            return None
        if any(each.dtype != products["qkv"].dtype for norm in norms.values() for each in norm.parameters()):
            return None
        about = native.Layer(
            hidden=hidden,
            inner=products["down"].inputs,
            heads=heads,
            key_heads=heads,
            size=size,
            eps=eps_of(norms["before"]),
            scaling=attention.scaling,
            bias=None if bias is None else bias.data_ptr(),
            reach=0 if bias is None else bias.shape[1],
            activation=activation | (0 if len(wide) > 1 else native.ALONE),
            behind=family.behind,
            **{name: product.matrix for name, product in products.items()},
            **{name: native.Norm.of(norm.weight, getattr(norm, "bias", None)) for name, norm in norms.items()},
        )
        return SourcedLayer(about, index, native.library(dtypes.pop()), shared, (bias, *products.values(), *norms.values()), cross_keys)

    def keys(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[heads, S, size]`` of a source."""
        shape = len(states), self.about.heads, self.about.size
        keys, values = (product(states).view(shape).transpose(0, 1) for product in self.cross)
        with one_thread(keys):
            return keys.contiguous(), values.contiguous()


class SourcedModel(NativeModel):
    """A decoder that reads a source."""

    kernels: Sequence[SourcedLayer]
    scale: float  # of the states that the head reads
    table: Tensor | None  # ``[positions, hidden]`` position embeddings

    @staticmethod
    def of(base: Any, packing: Packing) -> SourcedModel | None:
        """The kernel for ``base``, or None if it is no such model."""
        family = FAMILIES.get(type(base).__name__)
        if family is None or not type(base).__module__.startswith("transformers.models.") or not getattr(base, "is_decoder", True):
            return None
        if not packing.model.config.is_encoder_decoder:  # type: ignore[union-attr]
            return None
        if any("forward" in vars(each) and not isinstance(each, nn.Linear) for each in base.modules()):
            return None
        config, shared, blocks = base.config, object(), list(getattr(base, family.parts.layers))
        biased = [block.get_submodule(family.parts.attention) for block in blocks]
        biases = {each: by_distance(each) for each in biased if getattr(each, "has_relative_attention_bias", False)}
        layers = [
            SourcedLayer.of(block, index, family, biases.get(attention, biases.get(biased[0])), packing, shared)
            for index, (block, attention) in enumerate(zip(blocks, biased))
        ]
        kernels = [each for each in layers if each is not None]
        last, normed, table = (getattr(base, name, None) for name in (family.parts.last, "layernorm_embedding", "embed_positions"))
        parameters = [each for norm in (last, normed, table) if norm is not None for each in (*norm.parameters(), *norm.buffers())]
        alike = len({id(each.library) for each in kernels}) == 1 and {each.dtype for each in parameters} <= {base.embed_tokens.weight.dtype}
        if len(kernels) < len(layers) or not alike:
            return None
        scale = config.d_model**-0.5 if getattr(config, family.scaled or "-", False) else 1.0
        behind = () if last is None else (last.weight.detach() * scale, *([] if (bias := getattr(last, "bias", None)) is None else [bias]))
        found = SourcedModel(base, blocks, kernels, behind, 0.0 if last is None else eps_of(last))
        found.scale, found.table = scale, None if table is None else by_position(table, config)
        found._describe(normed, family)
        return found

    def _describe(self, normed: nn.LayerNorm | None, family: Family) -> None:
        """Describe the input embeddings: token embeddings, scaled, plus position embeddings, ``normed``."""
        base, about = self.base, self.embedded
        about.scale = getattr(base if family.scales else base.embed_tokens, "embed_scale", 1.0)
        if normed is not None:
            about.norm, about.eps, about.before = native.Norm.of(normed.weight, normed.bias), normed.eps, family.early
        if self.table is not None:
            about.positions = self.table.data_ptr()
            if counts(base.embed_positions):
                about.padding = base.embed_positions.padding_idx

    @property
    def run_bytes(self) -> int:
        about, itemsize = self.kernels[0].about, self.base.embed_tokens.weight.itemsize
        return PAGE * itemsize * (2 * len(self.kernels) * int(about.heads * about.size) + int(self.kernels[0].cross[0].in_features))  # type: ignore[arg-type]

    def trial(self) -> tuple[Tensor, Tensor]:
        """The last states ``[1, n, hidden]`` of a few tokens with a source, by the kernels and by the class."""
        like, cache, padding = self.base.embed_tokens.weight, SourcedPages([Kind(0)], run_bytes=0), self.base.embed_tokens.padding_idx
        ids, positions = torch.tensor([token for token in range(TRIED + 1) if token != padding][:TRIED]), torch.arange(TRIED)
        states = torch.randn(1, TRIED, like.shape[1], generator=torch.Generator().manual_seed(0)).to(like.dtype)
        source = Source({})
        cache.hold([source], [None], lambda sources: {source: states[0]})
        cache.open([0])
        cache.enter(Window(0, 1, (0,), TRIED))
        own = self(input_ids=ids[None], encoder_hidden_states=states, use_cache=False).last_hidden_state
        return self.run_over(self.embed(ids, positions), positions, None, None, cache)[None], own * self.scale

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        ids, positions, like = ids.contiguous(), positions.contiguous(), self.base.embed_tokens.weight
        tables = ("token", ids, like), ("position", positions, self.table)
        for what, given, table in tables:
            if table is not None and not 0 <= int(given.min()) <= (most := int(given.max())) < len(table):
                raise IndexError(f"{what} {most} lies beyond the decoder's table of {len(table)}")
        out = like.new_empty(len(ids), like.shape[1])
        self.kernels[0].library.embed(self.embedded, ids.data_ptr(), positions.data_ptr(), out.data_ptr(), len(ids))
        return out

    def about(
        self, x: Tensor, positions: Tensor, where: MaskInputs | None, cache: TreeCache, window: Window, places: Places | None
    ) -> native.Pass:
        about = NativePass.over(cache, self.shared).of(self.kernels[0], x, window, places)
        self._point(about, cache, window)
        return about

    def place(self, about: native.Growth, given: native.Pass, cache: TreeCache, like: Tensor, most: int) -> bool:
        assert cache.window is not None
        if self.table is not None and most > len(self.table):
            return False
        self._point(given, cache, cache.window)
        if self.kernels[0].about.reach:
            cache.positions = torch.arange(cache.capacity, dtype=torch.int32)[None]
        return True

    def _point(self, about: native.Pass, cache: TreeCache, window: Window) -> None:
        """Set pointers to the cross-attention keys of the rows' sources, which are made if there are none yet."""
        assert isinstance(cache, SourcedCache)
        rows, cross = cache.sources[window.first : window.last], cache.cross
        fresh = dict.fromkeys(each for each in rows if not each.keys)
        for row in fresh:
            row.keys += [kernel.keys(row.states) for kernel in self.kernels]
        if fresh:
            end_waiting()  # after the encoder
        if not cross.over(rows) or cross.pointers is None:
            held = [pointers([row.keys[layer][which].data_ptr() for layer in range(len(self.kernels)) for row in rows]) for which in (0, 1)]
            strides = torch.tensor([row.keys[0][0].stride(0) for row in rows])
            ends = torch.tensor([len(row.states) - 1 for row in rows], dtype=torch.int32)
            cross.pointers = *held, strides, ends
        keys, values, strides, ends = cross.pointers
        about.cross_keys, about.cross_values = ctypes.addressof(keys), ctypes.addressof(values)
        about.cross_head_strides, about.ends = strides.data_ptr(), ends.data_ptr()


def by_distance(attention: Any) -> Tensor:
    """``[heads, reach]`` the bias of ``attention`` by distance; longer distances count as the longest."""
    reach = attention.relative_attention_max_distance + 1
    return type(attention).compute_bias(attention, 1, reach, past_seen_tokens=reach - 1)[0, :, 0].detach().flip(-1).float().contiguous()


def counts(table: Any) -> bool:
    """Whether ``table`` takes as positions the numbers of tokens that are not padding."""
    return hasattr(table, "make_weights")


def by_position(table: Any, config: Any) -> Tensor:
    """``[positions, hidden]`` the position embeddings of ``table``."""
    if counts(table):
        line = torch.full((1, config.max_position_embeddings), 1 if table.padding_idx == 0 else 0)
        return type(table).forward(table, line)[0]
    return table.weight.detach()[getattr(table, "offset", 0) :]
