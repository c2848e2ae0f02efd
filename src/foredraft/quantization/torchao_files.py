"""Checkpoints that torchao has quantised: transformers loads them, and says little where their tensors are not whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers.utils import cached_file

from foredraft.errors import ConfigurationError, first_line


def loaded(load: Callable[[], tuple[Any, Any]], source: str, config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The model and what else ``load`` returns, checked if the checkpoint with this ``config`` is torchao's."""
    if (config.get("quantization_config") or {}).get("quant_method") != "torchao":
        return load()
    try:
        model, others = load()
    except RuntimeError as error:
        check_files(source)
        raise ConfigurationError(f"the checkpoint {source!r} of torchao cannot be loaded: {first_line(error)}") from error
    check_files(source)
    check_shapes(model, source)
    return model, others


def check_files(source: str) -> None:
    """
    Raises:
        ConfigurationError: the files, which are on this machine, lack a tensor of a weight, or its tensors have shapes that contradict
            each other.
    """
    shapes: dict[str, list[int]] = {}
    weights: dict[str, Any] = {}
    for file in Path(cached_file(source, "config.json", local_files_only=True)).parent.glob("*.safetensors"):
        with safe_open(str(file), "pt") as opened:
            shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118 (it is no dictionary)
            weights |= {name: json.loads(about) for name, about in (opened.metadata() or {}).items() if about.startswith("{")}
    for name, about in weights.items():
        layer, _, own = name.rpartition(".")
        needed = about.get("_tensor_data_names", ())
        there = {part: shapes[f"{layer}._{own}_{part}"] for part in needed if f"{layer}._{own}_{part}" in shapes}
        if missing := [part for part in needed if part not in there]:
            raise ConfigurationError(
                f"the checkpoint {source!r} is quantized by half: {name} has {', '.join(there) or 'nothing'}, but no "
                f"{', '.join(missing)}; download it again, or load the checkpoint that it was made from"
            )
        if about.get("_type") in ("Int8Tensor", "IntxUnpackedToInt8Tensor") and len(there["qdata"]) == 2:
            (outputs, inputs), (rows, size) = there["qdata"], about["_data"]["block_size"]
            if inputs % size:
                raise contradiction(source, name, f"{inputs} inputs, which are no whole number of groups of {size}")
            groups = [outputs // rows, inputs // size]
            for part in there.keys() - {"qdata"}:
                if part in ("scale", "zero_point") and there[part] != groups:
                    raise contradiction(source, name, f"{part} of shape {tuple(there[part])} where {tuple(groups)} is needed")


def check_shapes(model: nn.Module, source: str) -> None:
    """
    Raises:
        ConfigurationError: a weight is not of the size of its layer.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and tuple(layer.weight.shape) != (wanted := (layer.out_features, layer.in_features)):
            raise contradiction(source, f"{name}.weight", f"shape {tuple(layer.weight.shape)}, and not {wanted}")


def contradiction(source: str, name: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the checkpoint {source!r} contradicts itself: {name} has {what}; load a folder whose files and config.json are of the same model"
    )
