"""Weights in eight bits, for models that are loaded by name (torchao, weight-only).

Every weight of a linear layer becomes an integer from -128 to 127 times a scale of its output row; what is multiplied with it keeps
its dtype. Embeddings and the output head stay as they are: in many models they are one tensor, and the head has the last word on
every token. That is what transformers' ``TorchAoConfig(Int8WeightOnlyConfig())`` makes of a checkpoint, weight for weight.

A quantized model is another model than the one it was made from, with its own output distribution. As a target it is *the* target:
speculation keeps its output distribution, not that of the original. As a draft it costs acceptance at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from foredraft.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KINDS = ("int8",)


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
    _torchao_config()


def config_for_loading(kind: str) -> Any:
    """The ``quantization_config`` of ``from_pretrained`` for ``kind``, one of :data:`KINDS`."""
    from transformers import TorchAoConfig

    return TorchAoConfig(_torchao_config())


def quantize(model: PreTrainedModel) -> None:
    """Quantise a model that is in memory, in place, as :func:`config_for_loading` has it done at loading."""
    from torchao.quantization import quantize_

    head = model.get_output_embeddings()
    quantize_(model, _torchao_config(), filter_fn=lambda module, name: isinstance(module, nn.Linear) and module is not head)


def quantize_linear_layers(module: nn.Module) -> None:
    """All of ``module``, in place."""
    from torchao.quantization import quantize_

    quantize_(module, _torchao_config())


def quantized(weight: Tensor) -> Tensor:
    """The ``weight`` ``[N, K]`` of a linear layer in eight bits."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    quantize_linear_layers(layer)
    return layer.weight.data


def check_quantized(model: PreTrainedModel, source: str) -> None:
    """Refuse a model that asking for quantisation changed nothing about.

    Raises:
        ConfigurationError: a checkpoint that was quantised already, or a model without linear layers.
    """
    if getattr(getattr(model, "hf_quantizer", None), "pre_quantized", False):
        raise ConfigurationError(f"the checkpoint {source!r} is already quantized; leave quantization out to load it as it is")
    if not any(type(parameter).__module__.startswith("torchao") for parameter in model.parameters()):
        raise ConfigurationError(f"{source!r} has no linear layers that could be quantized ({type(model).__name__})")


def _torchao_config() -> Any:
    try:
        from torchao.quantization import Int8WeightOnlyConfig
    except ImportError as error:
        raise ConfigurationError("quantization='int8' needs torchao; install it with: pip install 'foredraft[int8]'") from error
    return Int8WeightOnlyConfig(set_inductor_config=False)  # which would change settings of the whole process
