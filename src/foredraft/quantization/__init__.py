"""Weights in eight or four bits, for models that are loaded by name (torchao, weight-only).

In eight bits every weight of a linear layer becomes an integer from -128 to 127 times a scale of its output row; in four bits one from
-8 to 7 times a scale of its group of 32, 64 or 128 weights of a row. Activations keep their dtype. Embeddings and the output
head stay as they are: in many models they are one tensor, and the head has the last word on every token. That is what transformers'
``TorchAoConfig`` makes of a checkpoint with torchao's ``Int8WeightOnlyConfig()``, or with its
``IntxWeightOnlyConfig(torch.int4, PerGroup(32))``, weight for weight. Experts that a model keeps in tensors of three dimensions, which
torchao leaves as they are, get the same integers and scales, expert by expert, in a
:class:`~foredraft.quantization.grouped.GroupedTensor`. Checkpoints that are quantised already are read by
:mod:`foredraft.quantization.checkpoints`.

A quantized model is another model than the one it was made from, with its own output distribution. As a target it is *the* target:
speculation keeps its output distribution, not that of the original. As a draft it costs acceptance at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foredraft.errors import ConfigurationError
from foredraft.quantization.grouped import GroupedTensor, bytes_from

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS = ("int8", "int4", "int4-32", "int4-64", "int4-128")
GROUP = 32  # weights that share a scale, if "int4" does not say
EXPERTS = ("gate_up_proj", "up_proj", "down_proj")  # weights of all experts of a mixture


def check_quantization(kind: str | None, model: object) -> None:
    """Refuse, before any weights are read, a quantization that is not possible for ``model``, a name or a model.

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


def quantize(module: nn.Module, kind: str = "int8") -> None:
    """Quantise a model or another module that is in memory, in place, as :func:`config_for_loading` has it done at loading: its linear
    layers, but for a model's output head, and its experts."""
    from torchao.quantization import quantize_

    head = getattr(module, "get_output_embeddings", lambda: None)()
    check_groups(module, kind)
    quantize_(module, _torchao_config(kind), filter_fn=lambda each, name: isinstance(each, nn.Linear) and each is not head)
    quantize_experts(module, kind)


def quantize_experts(module: nn.Module, kind: str) -> None:
    """The experts in ``module`` that are kept in tensors of three dimensions, in place, one expert after the other."""
    for _, experts, name in experts_in(module):
        weight = getattr(experts, name).detach()
        setattr(experts, name, nn.Parameter(quantized_experts(weight, kind, experts.is_transposed), requires_grad=False))


def quantized_experts(weight: Tensor, kind: str, transposed: bool) -> GroupedTensor:
    """``weight`` ``[E, N, K]``, or ``[E, K, N]`` where it is ``transposed``, with the integers and scales that :func:`quantized` gives."""
    bits, parts = 8 if kind == "int8" else 4, []
    for each in weight:
        made: Any = quantized((each.T if transposed else each).contiguous(), kind)
        parts.append((bytes_from((made.qdata.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8), bits), made.scale))
    qdata, scale = (torch.stack(each) for each in zip(*parts))
    group = group_of(kind) or weight.shape[1 if transposed else 2]
    return GroupedTensor(qdata, scale, 1 << (bits - 1), bits=bits, group=group, dtype=weight.dtype, transposed=transposed)


def experts_in(module: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """The weights of experts in ``module`` that transformers computes in ways of its own (``experts_implementation``): the path of their
    module, the module, and the name of the weight in it."""
    for path, experts in module.named_modules():
        for name in EXPERTS:
            weight = getattr(experts, name, None)
            if hasattr(experts, "is_transposed") and type(weight) is nn.Parameter and weight.ndim == 3 and weight.is_floating_point():
                yield path, experts, name


def quantized(weight: Tensor, kind: str = "int8") -> Tensor:
    """The ``weight`` ``[N, K]`` of a linear layer as ``kind``."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    quantize(layer, kind)
    return layer.weight.data


def group_of(kind: str) -> int | None:
    """Weights that share a scale; None where a whole row does."""
    return None if kind == "int8" else int(kind.partition("-")[2] or GROUP)


def check_groups(module: nn.Module, kind: str) -> None:
    """Refuse linear layers, an output head aside, and experts whose rows are no whole number of groups.

    Raises:
        ConfigurationError: it names the first of them.
    """
    group, head = group_of(kind), getattr(module, "get_output_embeddings", lambda: None)()
    inputs = {name: layer.in_features for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and layer is not head}
    for path, experts, name in experts_in(module):
        inputs[f"{path}.{name}"] = getattr(experts, name).shape[1 if experts.is_transposed else 2]
    for name, size in inputs.items():
        if group is not None and size % group:
            smaller = [each for each in KINDS[2:] if size % (group_of(each) or 1) == 0]
            instead = f"; choose {' or '.join(smaller)}" if smaller else "; int8 takes rows of any size"
            raise ConfigurationError(
                f"quantization={kind!r} makes groups of {group} weights, and rows of {name or 'a layer'} have {size}{instead}"
            )


def check_quantized(model: PreTrainedModel, source: str) -> None:
    """Refuse a model that quantization has not changed.

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
