"""The model inside what it is wrapped in, and what it is made of at the moment, so that nothing computed from it is kept beyond it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from foredraft.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, adapters included, or inside ``torch.compile``, or the model itself.

    Raises:
        UnsupportedModelError: a PEFT method that puts virtual tokens into the cache, or one that acts from certain tokens on.
    """
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        if getattr(model, "active_peft_config", None) is not None and model.active_peft_config.is_prompt_learning:
            raise UnsupportedModelError(
                "prompt-learning adapters put virtual tokens into the cache, which is not supported; use LoRA, or model.generate"
            )
        if any(getattr(config, "alora_invocation_tokens", None) for config in model.peft_config.values()):
            raise UnsupportedModelError("activated LoRA acts from its invocation tokens on, which is not supported; use model.generate")
        return model.get_base_model()
    if not hasattr(model, "generate") or not hasattr(model, "config"):
        raise UnsupportedModelError(f"expected a transformers causal language model, got {type(model).__name__}")
    return model


def fingerprint(model: PreTrainedModel) -> object:
    """Changes when the weights were trained in place, replaced or converted, or another adapter was switched on, so that no stale
    cache is reused. What is written through ``.data`` in place leaves no trace: call ``Speculator.release`` after that."""
    versions = tuple((id(each), _address(each), each.dtype, 0 if each.is_inference() else each._version) for each in model.parameters())
    adapters = tuple(
        (str(module.active_adapters), bool(module.disable_adapters), str(module.merged_adapters))
        for module in model.modules()
        if hasattr(module, "merged_adapters") and hasattr(module, "active_adapters")
    )
    return versions, adapters


def _address(parameter: Tensor) -> int:
    """Where its values lie; 0 for one that says not, such as a quantised weight."""
    try:
        return parameter.data_ptr()
    except RuntimeError:
        return 0
