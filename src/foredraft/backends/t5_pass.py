"""Decoders of the T5 family in one call of the kernels.

Their layers differ from those of the llama family: scores get a bias by the distance of query and key, nothing is turned by its position,
and each layer also attends to a source.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.backends import native
from foredraft.backends.kernel_pass import NativeModel, NativePass, Places, pointers
from foredraft.backends.packing import NATIVE, Packing
from foredraft.models.cache import TreeCache, Window
from foredraft.models.encoder_decoder import Encoded, Source, SourcedCache
from foredraft.models.masks import MaskInputs

STACKS = {"T5Stack": "scale_decoder_outputs", "MT5Stack": "", "UMT5Stack": "tie_word_embeddings"}  # and what says that logits are scaled
GATED = {"SiLUActivation": native.SILU, "SiLU": native.SILU, "NewGELUActivation": native.GELU}
UNGATED = {"ReLU": native.RELU}
TRIED = 5  # tokens of a trial


@dataclass(eq=False)
class T5Layer:
    """One layer, as the kernels see it; ``held`` is what their pointers point to."""

    about: native.Layer
    index: int
    library: Any
    shared: object
    cross: Any
    held: tuple[Any, ...]

    @staticmethod
    def of(block: Any, index: int, bias: Tensor, packing: Packing, shared: object) -> T5Layer | None:
        """None if its sizes or layouts are not those that the kernels are made for."""
        attention, cross, dense = block.layer[0].SelfAttention, block.layer[1].EncDecAttention, block.layer[2].DenseReluDense
        gated = hasattr(dense, "wi_1")
        layers = {
            "qkv": (attention.q, attention.k, attention.v),
            "output": (attention.o,),
            "gate_up": (dense.wi_0, dense.wi_1) if gated else (dense.wi,),
            "down": (dense.wo,),
            "cross_query": (cross.q,),
            "cross_output": (cross.o,),
        }
        found = {name: packing.product(*each) for name, each in layers.items()}
        products = {name: each for name, each in found.items() if each is not None and each.hint == NATIVE and each.outputs % 64 == 0}
        norms = {name: block.layer[place].layer_norm for name, place in (("before", 0), ("between", 1), ("after", 2))}
        activation = (GATED if gated else UNGATED).get(type(dense.act).__name__)
        if len(products) < len(layers) or activation is None or attention.key_value_proj_dim % 32 or products["down"].inputs % 32:
            return None
        kinds = {(each.dtype, each.int8) for each in products.values()}
        if len(kinds) > 1 or any(each.weight.dtype != products["qkv"].dtype for each in norms.values()):
            return None
        about = native.Layer(
            hidden=products["qkv"].inputs,
            inner=products["down"].inputs,
            heads=attention.n_heads,
            key_heads=attention.n_heads,
            size=attention.key_value_proj_dim,
            eps=norms["before"].variance_epsilon,
            scaling=attention.scaling,
            bias=bias.data_ptr(),
            reach=bias.shape[1],
            activation=activation,
            **{name: product.matrix for name, product in products.items()},
            **{name: norm.weight.data_ptr() for name, norm in norms.items()},
        )
        return T5Layer(about, index, native.library(*kinds.pop()), shared, cross, (bias, *products.values(), *norms.values()))

    def keys(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[heads, S, size]`` of a source."""
        shape = len(states), self.about.heads, self.about.size
        return tuple(product(states).view(shape).transpose(0, 1).contiguous() for product in (self.cross.k, self.cross.v))  # type: ignore[return-value]


class T5Model(NativeModel):
    """The decoder whose passes :class:`~foredraft.backends.kernel_pass.Direct` makes; called itself, it runs as its class does."""

    kernels: Sequence[T5Layer]
    scale: float  # of the states that the head reads

    @staticmethod
    def of(base: Any, packing: Packing) -> T5Model | None:  # type: ignore[override]
        """The kernel for ``base``, or None if it is no such model."""
        if type(base).__name__ not in STACKS or not type(base).__module__.startswith("transformers.models.") or not base.is_decoder:
            return None
        if any("forward" in vars(each) and not isinstance(each, nn.Linear) for each in base.modules()):
            return None
        norm, config, shared = base.final_layer_norm, base.config, object()
        biased = [block.layer[0].SelfAttention for block in base.block]
        biases = {each: by_distance(each) for each in biased if each.has_relative_attention_bias}
        layers = [
            T5Layer.of(block, index, biases.get(attention, biases[biased[0]]), packing, shared)
            for index, (block, attention) in enumerate(zip(base.block, biased))
        ]
        kernels = [each for each in layers if each is not None]
        alike = len({id(each.library) for each in kernels}) == 1 and norm.weight.dtype == base.embed_tokens.weight.dtype
        if len(kernels) < len(layers) or not alike:
            return None
        scale = config.d_model**-0.5 if getattr(config, STACKS[type(base).__name__] or "-", False) else 1.0
        found = T5Model(base, list(base.block), kernels, norm.weight.detach() * scale, norm.variance_epsilon)
        found.scale = scale
        return found

    def __call__(self, *given: Any, **named: Any) -> Any:
        return type(self.base).forward(self.base, *given, **named)

    def trial(self) -> tuple[Tensor, Tensor]:
        """The last states ``[1, n, hidden]`` of a few tokens behind a source, by the kernels and by the class."""
        ids, table, cache = torch.arange(TRIED)[None], self.base.embed_tokens, SourcedCache()
        states = torch.randn(1, TRIED, table.embedding_dim, generator=torch.Generator().manual_seed(0)).to(table.weight.dtype)
        cache.sources = [Encoded(Source({}), states[0])]
        cache.open([0])
        cache.enter(Window(0, 1, (0,), TRIED))
        own = self(input_ids=ids, encoder_hidden_states=states, use_cache=False).last_hidden_state
        return self.run_over(table(ids), ids, None, None, cache), own * self.scale

    def about(
        self, x: Tensor, positions: Tensor, where: MaskInputs | None, cache: TreeCache, window: Window, places: Places | None
    ) -> native.Pass:
        known = NativePass.over(cache, self.shared)
        about = known.of(self.kernels[0], x, window, None, places)
        self._point(about, cache, window)
        known.positions = None if where is None else where.keys.int()
        about.positions = None if known.positions is None else known.positions.data_ptr()
        return about

    def place(self, about: native.Growth, given: native.Pass, cache: TreeCache, like: Tensor, most: int) -> bool:
        assert cache.window is not None
        self._point(given, cache, cache.window)
        known = NativePass.over(cache, self.shared)
        known.positions = torch.arange(cache.capacity, dtype=torch.int32)
        given.positions = known.positions.data_ptr()
        return True

    def _point(self, about: native.Pass, cache: TreeCache, window: Window) -> None:
        """Say where the keys of the rows' sources are, which are made if there are none yet."""
        assert isinstance(cache, SourcedCache)
        rows, cross = cache.sources[window.first : window.last], cache.cross
        for row in {each: None for each in rows if not each.keys}:
            row.keys += [kernel.keys(row.states) for kernel in self.kernels]
        cross.enter(rows)
        if cross.pointers is None:
            held = [[each.data_ptr() for each in some] for some in zip(*((layer.keys, layer.values) for layer in cross.layers))]
            ends = torch.tensor([len(row.states) - 1 for row in rows], dtype=torch.int32)
            cross.pointers = *map(pointers, held), ends
        keys, values, ends = cross.pointers
        about.cross_keys, about.cross_values, about.ends = ctypes.addressof(keys), ctypes.addressof(values), ends.data_ptr()
        about.cross_row_stride, about.cross_head_stride = cross.layers[0].keys.stride()[:2]


def by_distance(attention: Any) -> Tensor:
    """``[heads, reach]`` what ``attention`` adds to scores; further keys are as the last one."""
    reach = attention.relative_attention_max_distance + 1
    line: Tensor = type(attention).compute_bias(attention, 1, reach, past_seen_tokens=reach - 1)[0, :, 0]
    return line.detach().flip(-1).float().contiguous()
