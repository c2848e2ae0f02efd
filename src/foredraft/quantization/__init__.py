"""Weights in eight or four bits, for models that are loaded by name (torchao, weight-only).

In eight bits every weight of a linear layer becomes an integer from -128 to 127 times a scale of its output row; in four bits one from
-8 to 7 times a scale of its group of 32, 64 or 128 weights of a row. What is multiplied with it keeps its dtype. Embeddings and the output
head stay as they are: in many models they are one tensor, and the head has the last word on every token. That is what transformers'
``TorchAoConfig`` makes of a checkpoint with torchao's ``Int8WeightOnlyConfig()``, or with its
``IntxWeightOnlyConfig(torch.int4, PerGroup(32))``, weight for weight. Checkpoints that are quantised already are read by
:mod:`foredraft.quantization.checkpoints`.

A quantized model is another model than the one it was made from, with its own output distribution. As a target it is *the* target:
speculation keeps its output distribution, not that of the original. As a draft it costs acceptance at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foredraft.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS = ("int8", "int4", "int4-32", "int4-64", "int4-128")
GROUP = 32  # weights that share a scale, where "int4" does not say


def check_quantization(kind: str | None, model: object) -> None:
    """Refuse before any weights are read what cannot be done to ``model``, a name or a model.

    Raises:
        ConfigurationError: an unknown kind, torchao is missing, or the model is not loaded here.
    """
    if kind is None:
        return
    if kind not in KINDS:
        raise ConfigurationError(f"unknown quantization {kind!r}; choose {', '.join(KINDS)}, or None for weights as they are")
    if not isinstance(model, str):
        raise ConfigurationError(
            "quantization says how to load a model by name; a model object is used as it is: quantize it yourself, with "
            "torchao.quantization.quantize_, or load it with transformers' TorchAoConfig"
        )
    _torchao_config(kind)


def config_for_loading(kind: str) -> Any:
    """The ``quantization_config`` of ``from_pretrained`` for ``kind``, one of :data:`KINDS`."""
    from transformers import TorchAoConfig

    return TorchAoConfig(_torchao_config(kind))


def quantize(model: PreTrainedModel, kind: str = "int8") -> None:
    """Quantise a model that is in memory, in place, as :func:`config_for_loading` has it done at loading."""
    from torchao.quantization import quantize_

    head = model.get_output_embeddings()
    check_groups(model, kind)
    quantize_(model, _torchao_config(kind), filter_fn=lambda module, name: isinstance(module, nn.Linear) and module is not head)


def quantize_linear_layers(module: nn.Module, kind: str = "int8") -> None:
    """All of ``module``, in place."""
    from torchao.quantization import quantize_

    check_groups(module, kind)
    quantize_(module, _torchao_config(kind))


def quantized(weight: Tensor, kind: str = "int8") -> Tensor:
    """The ``weight`` ``[N, K]`` of a linear layer as ``kind``."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    quantize_linear_layers(layer, kind)
    return layer.weight.data


def group_of(kind: str) -> int | None:
    """Weights that share a scale; None where a whole row does."""
    return None if kind == "int8" else int(kind.partition("-")[2] or GROUP)


def check_groups(module: nn.Module, kind: str) -> None:
    """Refuse linear layers, an output head aside, whose rows are no whole number of groups.

    Raises:
        ConfigurationError: it names the first such layer.
    """
    group, head = group_of(kind), getattr(module, "get_output_embeddings", lambda: None)()
    for name, layer in module.named_modules():
        if group is not None and isinstance(layer, nn.Linear) and layer is not head and layer.in_features % group:
            smaller = [each for each in KINDS[2:] if layer.in_features % (group_of(each) or 1) == 0]
            instead = f"; choose {' or '.join(smaller)}" if smaller else ""
            raise ConfigurationError(
                f"quantization={kind!r} makes groups of {group} weights, and rows of {name or 'a layer'} have {layer.in_features}{instead}"
            )


def check_quantized(model: PreTrainedModel, source: str) -> None:
    """Refuse a model that asking for quantisation changed nothing about.

    Raises:
        ConfigurationError: a checkpoint that was quantised already, or a model without linear layers.
    """
    if getattr(getattr(model, "hf_quantizer", None), "pre_quantized", False):
        raise already_quantized(source)
    if not any(type(parameter).__module__.startswith("torchao") for parameter in model.parameters()):
        raise ConfigurationError(f"{source!r} has no linear layers that could be quantized ({type(model).__name__})")


def already_quantized(source: str) -> ConfigurationError:
    return ConfigurationError(f"the checkpoint {source!r} is already quantized; leave quantization out to load it as it is")


def _torchao_config(kind: str) -> Any:
    try:
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
        from torchao.quantization.granularity import PerGroup
    except ImportError as error:
        raise ConfigurationError(f"quantization={kind!r} needs torchao; install it with: pip install 'foredraft[int8]'") from error
    if (group := group_of(kind)) is not None:
        return IntxWeightOnlyConfig(
            weight_dtype=torch.int4,  # type: ignore[attr-defined]
            granularity=PerGroup(group),
        )
    return Int8WeightOnlyConfig(set_inductor_config=False)  # which would change settings of the whole process
