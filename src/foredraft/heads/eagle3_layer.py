"""What an EAGLE-3 head computes, written once, for training as for drafting: one decoder layer over fused hidden states and embeddings.

Weights that read the same input are joined, so that a step is few products: q, k and v, and the two halves of the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from foredraft.backends import native
from foredraft.backends.narrow import UNIT
from foredraft.backends.products import NATIVE, Product, Rows
from foredraft.heads.eagle3_config import Eagle3Config
from foredraft.quantization import quantized

MATRICES = ("fc", "o", "gate_up", "down", "lm_head")
ELSEWHERE = -1e30  # a logit outside the draft vocabulary: probability 0 exactly, unless the processors leave nothing else


@dataclass(frozen=True, eq=False)
class Entered:
    """Tokens and states on their way into the attention, of R rows and n places: the ``residual`` ``[R, n, d]``, and with their
    positions applied ``queries`` ``[R, n, H, h]``, ``keys`` and ``values`` ``[R, n, K, h]``."""

    residual: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class Layer:
    """The weights of a head, joined, and the embeddings it borrows from the target.

    States are what a head hands from step to step, ``[..., d]``: at first the fused features, then its own output before the final norm.
    """

    config: Eagle3Config
    embeddings: Tensor  # [V', d], the target's
    fc: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    gate_up: Tensor
    down: Tensor
    input_layernorm: Tensor
    hidden_norm: Tensor
    post_attention_layernorm: Tensor
    norm: Tensor
    lm_head: Tensor  # [Vd, d]
    ids: Tensor | None  # [Vd] the target's ids of the draft vocabulary; None if it is the target's
    input_norm: Tensor | None = None
    fc_norms: tuple[Tensor, ...] = ()
    kv: Tensor | None = None  # the part of qkv that makes keys and values, where it cannot be cut from it
    products: Mapping[str, Product] = field(default_factory=dict)  # what stands in for weights that are packed
    rotary: Rotary = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rotary", Rotary(self.config))

    def to(self, device: torch.device, dtype: torch.dtype) -> Layer:
        """Copies for drafting, which what becomes of the head leaves alone; the embeddings stay the target's."""

        def moved(given: Any) -> Any:
            if isinstance(given, tuple):
                return tuple(map(moved, given))
            if not isinstance(given, Tensor):
                return given
            return given.detach().to(device, dtype if given.is_floating_point() else given.dtype, copy=True)

        given = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        embeddings = given.pop("embeddings").to(device)
        return Layer(embeddings=embeddings, **{name: moved(each) for name, each in given.items()})

    def quantized(self, kind: str = "int8") -> Layer:
        """This layer with matrices of eight or four bits (torchao), for drafting."""
        keys = self.qkv[self._queries :]
        changed: dict[str, Any] = {name: quantized(getattr(self, name), kind) for name in (*MATRICES, "qkv")}
        return replace(self, kv=quantized(keys, kind), **changed)

    def packed(self) -> Layer:
        """This layer with its matrices laid out for the kernels of :mod:`foredraft.backends.native` alone, as far as they can read them:
        on a CPU a step is bound by reading the weights. Training needs the matrices themselves."""
        if self.norm.device.type != "cpu" or native.refusal(self.norm.dtype) is not None:
            return self
        matrices: dict[str, tuple[Tensor, Tensor | None]] = {name: (getattr(self, name), None) for name in MATRICES}
        matrices["qkv"], matrices["kv"] = (self.qkv, self.qkv_bias), self._keys_values
        products = {
            name: Product([Rows(weight, bias, *weight.shape)], NATIVE)
            for name, (weight, bias) in matrices.items()
            if weight.shape[1] % UNIT == 0
        }
        gone: dict[str, Any] = {name: self.norm.new_empty(0) for name in (*MATRICES, "qkv") if name in products}
        return replace(self, products=products, kv=None if "kv" in products else self.kv, **gone)

    @property
    def _queries(self) -> int:
        """Rows of ``qkv`` that make queries."""
        return self.config.num_attention_heads * self.config.head_dim

    @property
    def _keys_values(self) -> tuple[Tensor, Tensor | None]:
        """The weights and biases of ``qkv`` that make keys and values."""
        rest = self._queries
        return self.qkv[rest:] if self.kv is None else self.kv, None if self.qkv_bias is None else self.qkv_bias[rest:]

    def _product(self, name: str, x: Tensor) -> Tensor:
        if name in self.products:
            return self.products[name](x)
        if name == "kv":
            return linear(x, *self._keys_values)
        return linear(x, getattr(self, name), self.qkv_bias if name == "qkv" else None)

    def _normed(self, states: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(states, weight.shape, weight, self.config.rms_norm_eps)

    def fused(self, features: Tensor) -> Tensor:
        """States ``[..., d]`` from the target's hidden states ``[..., F * d]``."""
        features = features.to(self.norm.dtype)
        if self.input_norm is not None:
            features = self._normed(features, self.input_norm)
        if self.fc_norms:
            parts = features.chunk(len(self.fc_norms), -1)
            features = torch.cat([self._normed(part, weight) for part, weight in zip(parts, self.fc_norms)], -1)
        return self._product("fc", features)

    def inputs(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The residual ``[R, n, d]``, and what the attention reads ``[R, n, 2 * d]``."""
        normed = self._normed(states, self.hidden_norm)
        embedded = self._normed(embedding(tokens, self.embeddings).to(states.dtype), self.input_layernorm)
        return normed if self.config.norm_before_residual else states, torch.cat([embedded, normed], -1)

    def enter(self, tokens: Tensor, states: Tensor, positions: Tensor | slice) -> Entered:
        """``tokens`` ``[R, n]`` after texts that end in ``states`` ``[R, n, d]``, at ``positions`` ``[R, n]``, or those of a slice for all
        rows: a step that predicts the token at position t + 2 from the token at t + 1 stands at t."""
        config = self.config
        residual, inputs = self.inputs(tokens, states)
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        joined = self._product("qkv", inputs)
        joined = joined.view(*joined.shape[:-1], heads + 2 * groups, config.head_dim)
        turned = self.rotary.turned(joined[..., : heads + groups, :], positions)
        return Entered(residual, turned[..., :heads, :], turned[..., heads:, :], joined[..., heads + groups :, :])

    def keys_values(self, tokens: Tensor, states: Tensor, positions: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Those of :meth:`enter` alone: of a token whose text goes on nobody asks anything else, since there is one layer only."""
        config = self.config
        joined = self._product("kv", self.inputs(tokens, states)[1])
        keys, values = joined.view(*joined.shape[:-1], 2 * config.num_key_value_heads, config.head_dim).chunk(2, -2)
        return self.rotary.turned(keys, positions), values

    def leave(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The new states, from what the attention gives ``[R, n, H * h]``."""
        states = residual + self._product("o", attended)
        gate, up = self._product("gate_up", self._normed(states, self.post_attention_layernorm)).chunk(2, -1)
        return states + self._product("down", silu(gate) * up)

    def read(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """What :meth:`leave` gave, as the next step takes it, and as the LM head does, ``[..., d]`` each."""
        normed = self._normed(states, self.norm)
        return normed if self.config.norm_output else states, normed

    def logits(self, normed: Tensor) -> Tensor:
        """``[..., Vd]`` over the draft vocabulary, after what :meth:`read` gave for the LM head."""
        return self._product("lm_head", normed)

    def full_logits(self, normed: Tensor) -> Tensor:
        """``[..., V]`` over the target's vocabulary; :data:`ELSEWHERE` outside the draft vocabulary."""
        logits = self.logits(normed)
        if self.ids is None:
            return logits
        elsewhere = max(ELSEWHERE, torch.finfo(logits.dtype).min)  # float16 holds no such number
        return logits.new_full((*logits.shape[:-1], self.config.target.vocab_size), elsewhere).index_copy_(-1, self.ids, logits)


class Rotary:
    """Rotary positions: tables of cosines and signed sines ``[positions, h]``, made when they are needed, doubled when too short."""

    def __init__(self, config: Eagle3Config):
        self.config = config
        self.length = 256
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def reserve(self, length: int) -> None:
        """Positions below ``length`` will be asked for."""
        if length > self.length:
            self.length = 1 << (length - 1).bit_length()
            self._tables.clear()

    def turned(self, heads: Tensor, positions: Tensor | slice) -> Tensor:
        """``heads`` ``[R, n, heads, h]`` at ``positions``, as :meth:`Layer.enter` takes them."""
        cosines, sines = (each[positions].unsqueeze(-2) for each in self.tables(heads))
        return heads * cosines + heads.roll(self.config.head_dim // 2, -1) * sines

    def tables(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines, and sines of which the first half of a head's has the sign turned, as far as they were reserved, for ``like``."""
        key = like.device, like.dtype
        if key not in self._tables:
            self._tables[key] = self._made(like)
        return self._tables[key]

    def _made(self, like: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            frequencies, scale = frequencies_of(self.config)
            angles = torch.arange(self.length, dtype=torch.float32, device="cpu")[:, None] * frequencies.cpu()
            cosines, sines = (angles.cos() * scale).repeat(1, 2), angles.sin() * scale
            return cosines.to(like), torch.cat([-sines, sines], -1).to(like)


def frequencies_of(config: Eagle3Config) -> tuple[Tensor, float]:
    """``[h / 2]`` float32 rotary frequencies, and what scales cosines and sines, as transformers computes them for llama."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    known = LlamaConfig(
        hidden_size=config.target.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),
    )
    rotary = LlamaRotaryEmbedding(known)
    return rotary.inv_freq.float(), float(rotary.attention_scaling)
