"""EAGLE-3 (Li et al. 2025): one decoder layer over hidden states from three depths of the target, fed back its own states from there on.

The step at position t reads the target's features at t and the embedding of the token at t + 1, and predicts the token at t + 2::

    f = fc [h_low; h_mid; h_high]                                   3d -> d
    attention over [RMSNorm(embedding of token t + 1); RMSNorm(f)]   2d wide q, k and v, residual f, rotary position t
    MLP, final norm, an LM head of its own over a draft vocabulary

The next step takes the layer's own output, before the final norm, for f. Training does so too (*training-time test*): the loss runs over
``steps`` steps, and the attention sees what it will see while drafting: the target's features up to where the draft begins, the
head's own states from there on. Names and layout of the tensors are the published ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.errors import ConfigurationError
from foredraft.heads.base import EMBEDDINGS, Batch, Head, HeadConfig, Losses, embeddings_of, lm_head_rows, refuse_unknown_options
from foredraft.heads.eagle3_config import Eagle3Config, rope_like
from foredraft.heads.eagle3_layer import Layer
from foredraft.heads.eagle3_loss import ahead, attend
from foredraft.heads.losses import cross_entropy
from foredraft.models.identity import TargetShape, shape_of

INITIAL = 0.02  # standard deviation of fresh weights


class Attention(nn.Module):
    """Holds the projections; :class:`~foredraft.heads.eagle3_layer.Layer` computes with them."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        width, size, bias = 2 * config.target.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * size, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * size, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * size, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * size, config.target.hidden_size, bias=False)


class Mlp(nn.Module):
    def __init__(self, config: Eagle3Config):
        super().__init__()
        width, inner = config.target.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)


class MidLayer(nn.Module):
    def __init__(self, config: Eagle3Config):
        super().__init__()
        width = config.target.hidden_size
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self.hidden_norm = nn.RMSNorm(width)
        self.input_layernorm = nn.RMSNorm(width)
        self.post_attention_layernorm = nn.RMSNorm(width)


class Eagle3Head(Head):
    """The modules hold weights under their published names; what is computed with them is in :meth:`layer`.

    ``d2t`` ``[Vd]`` int64 is what is to be added to a draft id to get the target's, ``t2d`` ``[V]`` bool says which of the target's
    tokens the head can predict. A head that can predict all of them has neither.

    A head made of its configuration alone has no weights yet (they are on the meta device): they come from :meth:`for_target` or from a
    checkpoint, by ``load_state_dict(..., assign=True)``.
    """

    kind: ClassVar[str] = "eagle3"
    config_class: ClassVar[type[HeadConfig]] = Eagle3Config
    config: Eagle3Config

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        width, vocabulary, fused = config.target.hidden_size, config.draft_vocab_size, config.target.hidden_size * len(config.aux_layers)
        with torch.device("meta"):
            if config.norm_before_fc:
                self.input_norm = nn.RMSNorm(fused)
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(nn.RMSNorm(width) for _ in config.aux_layers)
            self.fc = nn.Linear(fused, width, bias=False)
            self.midlayer = MidLayer(config)
            self.norm = nn.RMSNorm(width)
            self.lm_head = nn.Linear(width, vocabulary, bias=False)
            if vocabulary < config.target.vocab_size:
                self.d2t: Tensor
                self.t2d: Tensor
                self.register_buffer("d2t", torch.empty(vocabulary, dtype=torch.long))
                self.register_buffer("t2d", torch.empty(config.target.vocab_size, dtype=torch.bool))
        self._embeddings: tuple[nn.Module, ...] = ()  # in a tuple, so that it is not registered, moved or stored

    @property
    def features(self) -> tuple[int, ...]:
        return self.config.aux_layers

    @classmethod
    def for_target(cls, model: PreTrainedModel, *, counts: Tensor | None = None, seed: int = 0, **options: Any) -> Eagle3Head:
        """A fresh head with random weights, its LM head a copy of the target's.

        Args:
            counts: ``[V]`` how often each token occurs in the training text; needed for a ``draft_vocab_size`` below the target's.
            seed: of the weights.
            options: fields of :class:`Eagle3Config`; the target's own sizes by default.
        """
        known = [*sorted(set(Eagle3Config.__dataclass_fields__) - {"target"}), "counts", "seed"]
        refuse_unknown_options("an EAGLE-3", options, known)
        target, rows = shape_of(model), lm_head_rows(model.get_output_embeddings())
        config = Eagle3Config(target=target, **{**defaults_for(model, target), **options})
        if config.draft_vocab_size < target.vocab_size and (counts is None or counts.shape != (target.vocab_size,)):
            raise ConfigurationError(
                f"a draft vocabulary of {config.draft_vocab_size} of {target.vocab_size} tokens is chosen by how often they occur: "
                "pass counts, one number per token, or leave draft_vocab_size out"
            )
        head = cls(config).to_empty(device="cpu")
        head.attach(model)
        if counts is not None and config.draft_vocab_size < target.vocab_size:
            head.d2t, head.t2d = draft_vocabulary(counts.cpu(), config.draft_vocab_size)
        with torch.no_grad():
            head._initialise(rows, seed)
        return head.to(device=rows.device, dtype=model.dtype)

    def _initialise(self, rows: Tensor, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0.0, INITIAL, generator=generator)
            else:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
        ids = self.target_ids()
        self.lm_head.weight.copy_(rows if ids is None else rows[ids.to(rows.device)])

    def attach(self, model: PreTrainedModel) -> None:
        embeddings = embeddings_of(model)
        if embeddings.weight.shape[-1] != self.config.target.hidden_size:
            raise ConfigurationError(
                f"the target's embeddings are {embeddings.weight.shape[-1]} wide and its hidden states {self.config.target.hidden_size}; "
                "an EAGLE-3 head reads both and needs equal widths; use another drafter"
            )
        self._embeddings = (embeddings,)

    def target_ids(self) -> Tensor | None:
        """``[Vd]`` the target's ids of the draft vocabulary, None if that is all of them."""
        if self.config.draft_vocab_size == self.config.target.vocab_size:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def layer(self) -> Layer:
        """The computation with the weights as they are now; joined copies, through which gradients reach the parameters."""
        if not self._embeddings:
            raise ConfigurationError("this EAGLE-3 head reads the target's embeddings and has none yet; call attach(model) first")
        attention, mlp, biases = self.midlayer.self_attn, self.midlayer.mlp, None
        embeddings, fc_norms = self._embeddings[0].weight, self.fc_norm if self.config.fc_norm else ()
        assert isinstance(embeddings, Tensor)
        reading = (attention.q_proj, attention.k_proj, attention.v_proj)
        if self.config.attention_bias:
            biases = torch.cat([each.bias for each in reading])
        return Layer(
            config=self.config,
            embeddings=embeddings.detach(),
            fc=self.fc.weight,
            qkv=torch.cat([each.weight for each in reading]),
            qkv_bias=biases,
            o=attention.o_proj.weight,
            gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            down=mlp.down_proj.weight,
            input_layernorm=self.midlayer.input_layernorm.weight,
            hidden_norm=self.midlayer.hidden_norm.weight,
            post_attention_layernorm=self.midlayer.post_attention_layernorm.weight,
            norm=self.norm.weight,
            lm_head=self.lm_head.weight,
            ids=self.target_ids(),
            input_norm=self.input_norm.weight if self.config.norm_before_fc else None,
            fc_norms=tuple(each.get_parameter("weight") for each in fc_norms),
        )

    def unroll(self, layer: Layer, ids: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """Drafting from every place of a text at once: at step i ``[B, S, d]`` what the LM head reads after i + 1 steps that began at
        position s, the first with the target's ``features`` ``[B, S, F * d]`` at s. It predicts the token at s + 2 + i, having read those
        up to s + 1 + i; where the text is over by then there is filler.
        """
        length = ids.shape[1]
        layer.rotary.reserve(length + steps)
        states, keys, values = layer.fused(features), [], []
        for step in range(steps):
            entered = layer.enter(ahead(ids, step + 1), states, slice(step, step + length))
            keys.append(entered.keys)
            values.append(entered.values)
            states, normed = layer.read(layer.leave(entered.residual, attend(entered.queries, keys, values)))
            yield normed

    def loss(self, batch: Batch) -> Losses:
        """The training-time test. ``parts`` has ``loss_i`` and ``accuracy_i`` of every step: how often the likeliest token is the target's,
        where the target's is in the draft vocabulary at all."""
        config, layer, logits, length = self.config, self.layer(), batch.logits, batch.ids.shape[1]
        told = ahead(batch.counted & batch.valid, 1)  # [B, S]: whether the token behind may be predicted
        if layer.ids is not None:
            told, logits = told & self.t2d[logits.argmax(-1)], logits[..., layer.ids]
        best, logits = logits.argmax(-1).flatten(), logits.flatten(0, 1)
        total, parts, weight = torch.zeros((), device=best.device), {}, torch.zeros((), device=best.device)
        for step, normed in enumerate(self.unroll(layer, batch.ids, batch.hidden.flatten(2), config.steps)):
            rows, begins = ahead(told, step + 1).nonzero(as_tuple=True)
            states, places, count = normed[rows, begins], rows * length + begins + step + 1, max(1, len(rows))
            spent, right = cross_entropy(layer.logits, states, best[places], target=logits, places=places)
            total = total + config.decay**step * (spent + 0.0 * states.sum()) / count  # it has a gradient where nothing is counted, too
            parts[f"loss_{step}"], parts[f"accuracy_{step}"] = spent.detach() / count, right / count
            weight = weight + len(rows) if step == 0 else weight
        return Losses(total, parts, weight)

    def said(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        layer, told, length = self.layer(), ahead(batch.counted & batch.valid, 1), batch.ids.shape[1]
        for step, normed in enumerate(self.unroll(layer, batch.ids, batch.hidden.flatten(2), self.config.steps)):
            rows, begins = ahead(told, step + 1).nonzero(as_tuple=True)
            yield layer.full_logits(normed[rows, begins]), rows * length + begins + step + 1

    def frozen(self) -> dict[str, Tensor]:
        embeddings: Any = self._embeddings[0].weight
        return {**super().frozen(), EMBEDDINGS: embeddings.detach()}


def draft_vocabulary(counts: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The ``size`` most frequent tokens, equals by id, as ``d2t`` and ``t2d`` of :class:`Eagle3Head`, from ``counts`` ``[V]``."""
    if counts.ndim != 1 or not 1 <= size <= len(counts):
        raise ConfigurationError(
            f"a draft vocabulary of {size} tokens needs counts of as many or more, one per token; got {list(counts.shape)}"
        )
    kept = counts.sort(descending=True, stable=True).indices[:size].sort().values
    chosen = torch.zeros(len(counts), dtype=torch.bool, device=counts.device)
    chosen[kept] = True
    return kept - torch.arange(size, device=kept.device), chosen


def default_layers(layers: int) -> tuple[int, ...]:
    """The published choice 2, L/2, L - 3; three others, low, middle and high, where a target is too shallow for it, or all there are."""
    if layers >= 7:
        return 2, layers // 2, layers - 3
    return (1, layers // 2, layers - 1) if layers >= 4 else tuple(range(layers))


def defaults_for(model: PreTrainedModel, target: TargetShape) -> dict[str, Any]:
    """Options as the target has them, as far as it is like a llama."""
    config = model.config.get_text_config()

    def size(name: str, otherwise: int) -> int:
        value = getattr(config, name, None)  # some targets have one per layer
        return value if isinstance(value, int) and value > 0 else otherwise

    heads = size("num_attention_heads", max(1, target.hidden_size // 64))
    groups, width = size("num_key_value_heads", heads), size("head_dim", target.hidden_size // heads)
    return {
        "aux_layers": default_layers(target.layers),
        "draft_vocab_size": target.vocab_size,
        "intermediate_size": size("intermediate_size", 4 * target.hidden_size),
        "num_attention_heads": heads,
        "num_key_value_heads": groups if heads % groups == 0 else heads,
        "head_dim": max(2, width - width % 2),
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-5,
        "rope_parameters": rope_like(getattr(config, "rope_parameters", None) or {}),
        "max_position_embeddings": size("max_position_embeddings", 2048),
    }
