"""Checkpoints that torchao has quantised: transformers loads them, and says little where their tensors are not whole. Integers of four bits
that torchao lays out for GPUs, and does not multiply on a CPU, get the layout of :class:`~foredraft.quantization.grouped.GroupedTensor`
there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import cached_file

from foredraft.errors import ConfigurationError, first_line
from foredraft.quantization.grouped import GroupedTensor, bytes_from

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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


def lay_out_for_cpu(model: PreTrainedModel, source: str) -> None:
    """Replace the weights of linear layers for which :func:`for_cpu` has another layout, and raise what it raises."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and (weight := for_cpu(layer.weight, model.dtype, source, name)) is not None:
            layer.weight = nn.Parameter(weight, requires_grad=False)


def for_cpu(weight: Any, dtype: torch.dtype, source: str, name: str) -> GroupedTensor | None:
    """An ``Int4Tensor`` or ``Int4TilePackedTo4dTensor`` of torchao's that is in CPU memory, in another layout, for inputs in ``dtype``.

    Both stand for ``(q - 8) * scale + zero``, with q from 0 to 15 and a zero in bfloat16 or float16; below 2^-17 it is rounded to a
    multiple of 2^-24. None for all other weights, and for those whose inputs torchao scales or quantises.

    Raises:
        ConfigurationError: its tensors have shapes that contradict each other, or zeros beyond float16.
    """
    kind = type(weight).__name__
    if kind not in ("Int4Tensor", "Int4TilePackedTo4dTensor") or weight.device.type != "cpu" or weight.ndim != 2:
        return None
    if weight.act_pre_scale is not None or getattr(weight, "activation_dtype", None) not in (None, torch.bfloat16):
        return None
    (outputs, inputs), group = weight.shape, weight.block_size[-1]
    groups = -(-inputs // group)
    if kind == "Int4Tensor":
        qdata, scale, zero = weight.qdata.view(torch.uint8) ^ 0x88, weight.scale.T, weight.zero_point.T  # q - 8 in two's complement
    else:
        scale, zero = (each.T[:outputs, :groups] for each in weight.scale_and_zero.unbind(-1))
        qdata = bytes_from(from_tiles(weight.qdata)[:outputs, :inputs], 4)
    found = {"qdata": qdata, "scale": scale, "zero": zero}
    for part, wanted in {"qdata": (outputs, inputs // 2), "scale": (outputs, groups), "zero": (outputs, groups)}.items():
        if tuple(found[part].shape) != wanted:
            raise contradiction(source, f"{name}.weight", f"{part} of shape {tuple(found[part].shape)} where {wanted} is needed")
    mins = (-zero).to(torch.float16).contiguous()
    if not mins.isfinite().all():
        raise ConfigurationError(f"the checkpoint {source!r} has zeros in {name}.weight that float16 does not hold; use a GPU")
    return GroupedTensor(qdata, scale.contiguous(), 8, mins=mins, bits=4, group=group, dtype=dtype)


def from_tiles(words: Tensor) -> Tensor:
    """Integers ``[N, K]`` uint8 from the layout of tensor cores, ``[N / 8, K / (32 P), 32, P]`` int32: of 16 inputs, lane 4 n + j has
    inputs 2 j, 2 j + 1, 2 j + 8 and 2 j + 9 of output n. A word has those of two such tiles, first the even inputs."""
    blocks, steps, lanes, pairs = words.shape
    nibbles = words[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32) & 15
    parts = nibbles.view(blocks, steps, lanes // 4, 4, pairs, 2, 2, 2)  # output, j; pair of tiles; odd, tile, upper half
    order = parts.permute(0, 2, 1, 4, 6, 7, 3, 5)
    return order.reshape(blocks * lanes // 4, -1).to(torch.uint8)


def contradiction(source: str, name: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the checkpoint {source!r} contradicts itself: {name} has {what}; load a folder whose files and config.json are of the same model"
    )
