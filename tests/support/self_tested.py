"""The self-test of targets, and that of attention over pages, once per process for each model: tests build the same small models hundreds
of times.

Models are the same if they have the same configuration, modules and weights. Those with hooks or overrides are tested each time, and so is
every model in a test that patches something.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

LARGEST = 1 << 21  # weights of a model of which this is told; others are used once or twice

patching = False  # whether the test that runs may have patched what the self-test would find


def once(test: Callable[..., Any]) -> Callable[..., Any]:
    passed: dict[Any, Any] = {}

    @wraps(test)
    def self_test(backend: Any, *given: Any) -> Any:
        key = None if patching or backend.overrides is not None else same(backend)
        if key is None:
            return test(backend, *given)
        if (key, given) not in passed:
            passed[key, given] = test(backend, *given)
        return passed[key, given]

    return self_test


def same(backend: Any) -> Any:
    """What is equal for two backends of models that compute the same; None if that cannot be told at little cost."""
    model = backend.facts.model
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if sum(each.numel() for each in tensors.values()) > LARGEST or any(each.device.type != "cpu" for each in tensors.values()):
        return None
    modules = list(model.named_modules())
    if any("forward" in vars(each) or each._forward_hooks or each._forward_pre_hooks for _, each in modules):
        return None
    return (
        type(backend),
        backend.facts.chains_only,
        model.config._attn_implementation,
        model.config.to_json_string(),
        model.training,
        tuple((name, type(each)) for name, each in modules),
        tuple((name, each.dtype, tuple(each.shape), hash(content(each))) for name, each in tensors.items()),
    )


def content(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
