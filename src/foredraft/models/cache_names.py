"""The name under which a model takes and returns its cache. It differs between families, and transformers 5.24 renamed most of them."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import GenerationMixin

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")


def cache_argument(model: type) -> str:
    """The argument that models or layers of this class take their cache as; where ``forward`` does not name it, what
    ``transformers.generate`` passes."""
    for function in (model.forward, GenerationMixin.prepare_inputs_for_generation):  # type: ignore[attr-defined]
        found = [name for name in CACHE_NAMES if name in inspect.signature(function).parameters]
        if found:
            return found[0]
    raise AssertionError("transformers passes the cache under another name")


def cache_of(output: Any) -> Any:
    """The cache in a model's ``output``; None if there is none. Remote code may take it under another name than this one."""
    return next((value for name, value in output.items() if name in CACHE_NAMES), None)
