"""The configuration of an EAGLE-3 head, stored beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foredraft.errors import ConfigurationError, whole
from foredraft.heads.base import HeadConfig
from foredraft.models.identity import TargetShape

ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose frequencies do not depend on the length of the text
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
ROPE_KEYS = {"rope_type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}
ROPE_KEYS |= {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}


@dataclass(frozen=True)
class Eagle3Config(HeadConfig):
    """What an EAGLE-3 head is made of; its width is the target's.

    Attributes:
        aux_layers: the hidden states of the target that are fused, ascending, numbered as in ``output_hidden_states``: the input of the
            layer of that index, which is also what vLLM's ``eagle_aux_hidden_state_layer_ids`` mean.
        draft_vocab_size: how many tokens it can predict; the target's vocabulary size for all.
        norm_before_residual: the residual is the normed state, not the state.
        norm_before_fc: an RMSNorm over the concatenated features; ``fc_norm``: one over each.
        norm_output: what is fed back is behind the final norm, not before it.
        attention_bias: q, k and v have biases.
        steps, decay: of the training loss, the sum over steps i of decay^i times the cross-entropy there.
    """

    aux_layers: tuple[int, ...]
    draft_vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: dict(ROPE))
    max_position_embeddings: int = 2048
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention_bias: bool = False
    steps: int = 7
    decay: float = 0.8

    def __post_init__(self) -> None:
        layers: Any = self.aux_layers
        object.__setattr__(self, "aux_layers", tuple(layers) if isinstance(layers, (list, tuple)) else (layers,))
        for layer in self.aux_layers:
            whole("a layer in aux_layers", layer, least=0)
        check_layers(self.aux_layers, self.target)
        check_rope(self.rope_parameters)
        sizes = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "steps", "draft_vocab_size")
        for name in sizes:
            whole(f"{name} of an EAGLE-3 head", getattr(self, name))
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise ConfigurationError(
                f"num_attention_heads must be a multiple of num_key_value_heads and head_dim even, got {self.num_attention_heads}, "
                f"{self.num_key_value_heads} and {self.head_dim}"
            )
        if not 1 <= self.draft_vocab_size <= self.target.vocab_size:
            raise ConfigurationError(f"draft_vocab_size must lie between 1 and {self.target.vocab_size}, got {self.draft_vocab_size}")
        if not 0 < self.decay <= 1:
            raise ConfigurationError(f"decay must lie above 0 and be at most 1, got {self.decay}")


def check_layers(layers: tuple[int, ...], target: TargetShape) -> None:
    """Raises ConfigurationError unless ``layers`` are inputs of the target's layers, ascending."""
    if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < target.layers:
        raise ConfigurationError(
            f"aux_layers must be different and ascending, from 0 to {target.layers - 1} for a target of {target.layers} layers (0 is its "
            f"embeddings, i what comes out of layer i), got {list(layers)}"
        )


def check_rope(parameters: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for rotary positions that a head cannot have."""
    kind = parameters.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise ConfigurationError(f"an EAGLE-3 head cannot have rope_type {kind!r}; it takes {', '.join(ROPE_TYPES)}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigurationError(
            f"an EAGLE-3 head turns whole heads; partial_rotary_factor {parameters['partial_rotary_factor']} is not supported"
        )
    theta = parameters.get("rope_theta")
    if not isinstance(theta, (int, float)) or theta <= 0:
        raise ConfigurationError(f"rope_parameters of an EAGLE-3 head need a positive rope_theta, got {theta!r}")


def rope_like(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What a head for a target with the rotary ``parameters`` begins with: the same where it can have them, or else plain ones."""
    if parameters.get("rope_type") in ROPE_TYPES and parameters.get("rope_theta") and parameters.get("partial_rotary_factor", 1.0) == 1.0:
        return {name: value for name, value in parameters.items() if name in ROPE_KEYS}
    theta = parameters.get("rope_theta")
    return {**ROPE, **({"rope_theta": float(theta)} if theta else {})}
