"""Inflation: a larger model of the llama or T5 architecture that computes exactly the same function.

A benchmark of speculative decoding needs two things that small machines rarely have together: a target that is expensive to run
and a draft that really predicts it. Inflation separates them. The inflated model costs what a model of its size costs, and its
logits are those of the small model, so acceptance is real. **It is an instrument for measuring, not a better model.**

How each part is extended, for width ratio r (hidden sizes h → r·h):

- **Residual stream.** Its new coordinates stay zero: the embedding, and every matrix that writes to the stream (`o_proj`,
  `down_proj`), gets zero rows there.
- **RMSNorm** divides by √(mean(x²) + ε). The mean now runs over r times as many coordinates, of which all new ones are zero, so it
  shrinks by r. Dividing ε by r and the weight by √r undoes both. With r a power of four, √r is a power of two, and the rescaled
  weights are exact in bfloat16 too.
- **Attention and MLP.** r times as many heads and inner units. The old ones keep their place, the output of the new ones meets
  zero columns in `o_proj` and `down_proj`.
- **New layers** write nothing at all to the stream: `o_proj` and `down_proj` are zero. T5 grows in width alone.
- **T5's head** multiplies the last states by the width to the power of -½, which is √r smaller then: the decoder's last norm keeps its
  weight and so undoes it.

Weights whose value cannot matter are small random numbers, so that the processor multiplies real numbers everywhere.
"""

from __future__ import annotations

import copy
import math
import re

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

SILENT = ("embed_tokens", "lm_head", "o_proj", "down_proj", "shared", "o", "wo")  # outside the old corner these must be zero
FREE = (
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "q",
    "k",
    "v",
    "wi",
    "wi_0",
    "wi_1",
    "relative_attention_bias",
)  # any number will do
NORMS = ("input_layernorm", "post_attention_layernorm", "norm", "layer_norm", "final_layer_norm")


@torch.no_grad()
def inflate(
    model: PreTrainedModel, *, hidden_size: int, layers: int | None = None, intermediate_size: int | None = None, seed: int = 0
) -> PreTrainedModel:
    """Returns a model of `hidden_size` and `layers`, or its own, with the logits of `model`, in its dtype and on its device.

    Heads keep their size, their number grows with the width, and so does the MLP unless `intermediate_size` says otherwise.
    The original layers are spread evenly among the new ones. `model` is left as it is.
    """
    layers = layers or model.config.num_hidden_layers
    config = inflated_config(model, hidden_size, layers, intermediate_size)
    with torch.device("meta"):
        inflated = type(model)(config)
    source = model.state_dict()
    ratio = hidden_size // model.config.hidden_size
    origin = _spread(model.config.num_hidden_layers, layers)
    generator = torch.Generator(model.device).manual_seed(seed)
    state: dict[str, Tensor] = {}
    for name, slot in inflated.state_dict().items():
        if config.tie_word_embeddings and name in model._tied_weights_keys:
            continue
        state[name] = _extended(name, _source_tensor(name, source, origin), slot.shape, ratio, generator, model)
    if config.model_type == "t5" and config.scale_decoder_outputs:
        state["decoder.final_layer_norm.weight"] *= math.sqrt(ratio)
    inflated.load_state_dict(state, strict=False, assign=True)
    if config.model_type == "llama":
        # The rotary frequencies are a buffer that no checkpoint stores; they do not depend on the width.
        inflated.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    inflated.tie_weights()
    inflated.generation_config = copy.deepcopy(model.generation_config)
    return inflated.train(model.training).requires_grad_(False)


def inflated_config(model: PreTrainedModel, hidden_size: int, layers: int, intermediate_size: int | None) -> PretrainedConfig:
    """That of the model that :func:`inflate` makes; the weights of ``model`` are not read."""
    config = copy.deepcopy(model.config)
    if config.model_type not in ("llama", "t5"):
        raise ValueError(f"only models of the llama or T5 architecture can be inflated, not {config.model_type!r}")
    ratio, rest = divmod(hidden_size, config.hidden_size)
    if rest or ratio < 1 or 4 ** round(math.log(ratio, 4)) != ratio:
        raise ValueError(
            f"hidden_size must be {config.hidden_size} times a power of four (1, 4, 16, …), so that the rescaled norms stay exact; "
            f"{hidden_size} is not"
        )
    if layers < config.num_hidden_layers:
        raise ValueError(f"layers must be at least the model's {config.num_hidden_layers}, not {layers}")
    own = config.d_ff if config.model_type == "t5" else config.intermediate_size
    intermediate_size = intermediate_size or own * ratio
    if intermediate_size < own:
        raise ValueError(f"intermediate_size must be at least the model's {own}, not {intermediate_size}")
    config.hidden_size = hidden_size
    config.num_attention_heads *= ratio
    if config.model_type == "t5":
        if layers != config.num_hidden_layers:
            raise ValueError(f"a T5 model grows in width alone: layers must be its own {config.num_hidden_layers}, not {layers}")
        config.d_ff = intermediate_size
        config.layer_norm_epsilon /= ratio
        return config
    config.head_dim = model.model.layers[0].self_attn.head_dim
    config.num_key_value_heads *= ratio
    config.num_hidden_layers = layers
    config.intermediate_size = intermediate_size
    config.rms_norm_eps /= ratio
    return config


def _spread(old: int, new: int) -> dict[int, int]:
    """Which layer of the inflated model each old layer becomes, inverted: {new index: old index}, in order, evenly spaced."""
    return {index * new // old: index for index in range(old)}


def _source_tensor(name: str, source: dict[str, Tensor], origin: dict[int, int]) -> Tensor | None:
    """The old tensor that belongs at `name`; None in a layer that is new."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is None:
        return source[name]
    old = origin.get(int(layer[1]))
    return None if old is None else source[name.replace(layer[0], f"model.layers.{old}.")]


def _extended(name: str, old: Tensor | None, shape: torch.Size, ratio: int, generator: torch.Generator, model: PreTrainedModel) -> Tensor:
    part = name.split(".")[-2]
    new = torch.empty(shape, dtype=model.dtype, device=model.device)
    if part in SILENT:
        new.zero_()
    elif part in FREE:
        new.uniform_(-0.02, 0.02, generator=generator)
    elif part in NORMS:
        new.fill_(1.0)
    else:
        raise ValueError(f"cannot inflate {name!r}: not a part of its architecture as it is known here")
    if old is not None:
        new[tuple(slice(size) for size in old.shape)] = old / math.sqrt(ratio) if part in NORMS else old
    return new
