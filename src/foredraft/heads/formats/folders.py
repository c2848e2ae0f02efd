"""Checkpoints as files: ``config.json`` and safetensors, whole or in shards. Nothing is unpickled here.

Weights are written beside what is there and take its place in one step, then the configuration does. A crash in between leaves a
configuration and weights that each are whole; that they belong together is checked tensor by tensor when they are read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import ConfigurationError
from foredraft.files import current_name, read_json, replacing

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED = (".pt", ".bin", ".pth")


@dataclass(frozen=True, eq=False)
class Stored:
    """A checkpoint as it lies in a folder: ``config`` is the JSON, ``tensors`` are by the names in the files, ``where`` is for messages,
    ``file`` what the weights are written to."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    where: str = field(default="the head", kw_only=True)
    file: str = field(default=WEIGHTS, kw_only=True)


def read_config(folder: Path) -> dict[str, Any]:
    """The JSON of ``config.json``.

    Raises:
        ConfigurationError: there is none, or it is not a JSON object.
    """
    path = folder / CONFIG
    if not folder.is_dir():
        raise ConfigurationError(f"there is no head at {str(folder)!r}: no such folder")
    if not path.is_file():
        raise ConfigurationError(f"there is no head in {str(folder)!r}: it has no {CONFIG}" + _pickled_hint(folder))
    found = read_json(path)
    renamed = {str(current_name(key)): current_name(value) if key == "model_type" else value for key, value in found.items()}
    return renamed if len(renamed) == len(found) else found


def read(folder: Path) -> Stored:
    """The whole checkpoint in ``folder``.

    Raises:
        ConfigurationError: a file is missing, is not a safetensors file, or contradicts the index.
    """
    config, index = read_config(folder), folder / INDEX
    files = [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else sorted(folder.glob("*.safetensors"))
    if index.is_file():
        tensors = _sharded(folder, index)
    elif len(files) == 1:  # some are published under another name, as medusa_lm_head.safetensors
        tensors, _ = read_tensors(files[0])
    elif files:
        raise ConfigurationError(
            f"{folder} holds {', '.join(each.name for each in files)}, but neither {WEIGHTS} nor {INDEX}, so it is unclear which to read"
        )
    else:
        raise ConfigurationError(f"there are no weights in {str(folder)!r}: it has no {WEIGHTS}" + _pickled_hint(folder))
    return Stored(config, tensors, where=str(folder))


def write(stored: Stored, folder: Path) -> None:
    """Make or replace the checkpoint in ``folder``. The same contents make the same bytes.

    Raises:
        ConfigurationError: ``folder`` holds other weights, which readers would take for a part of it, or the configuration is no JSON.
    """
    from safetensors.torch import save_file

    others = [each.name for each in (*folder.glob("*.safetensors"), folder / INDEX) if each.is_file() and each.name != stored.file]
    if others:
        raise ConfigurationError(f"{str(folder)!r} holds other weights, {', '.join(sorted(others))}; choose another folder, or remove them")
    try:
        text = json.dumps(stored.config, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"about= must hold plain JSON values: {error}") from error
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in stored.tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / stored.file) as new:
        save_file(tensors, str(new), {"format": "pt"})
    with replacing(folder / CONFIG) as new:
        new.write_text(text, encoding="utf-8")


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, and its metadata.

    Raises:
        ConfigurationError: ``path`` is not a safetensors file, or is cut short.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is not a readable safetensors file: {error}") from error


def dtype_name(dtype: torch.dtype) -> str:
    """As configuration files and messages have it, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def _sharded(folder: Path, index: Path) -> dict[str, Tensor]:
    try:
        placed = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        names = sorted(set(map(str, placed.values())))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{index} is not an index of shards: {error}") from error
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigurationError(f"{index} names {name!r}, which is not a safetensors file beside it")
        if not (folder / name).is_file():
            raise ConfigurationError(f"{index} names {name!r}, which is not there")
    tensors: dict[str, Tensor] = {}
    for name in names:
        found, _ = read_tensors(folder / name)
        if differing := sorted(found.keys() ^ {key for key, shard in placed.items() if shard == name}):
            raise ConfigurationError(f"{folder / name} and {index.name} disagree about {', '.join(map(repr, differing))}")
        tensors |= found
    return tensors


def _pickled_hint(folder: Path) -> str:
    found = sorted(each for each in folder.iterdir() if each.suffix in PICKLED)
    return f"; {refusal(found[0])}" if found else ""


def refusal(path: Path) -> str:
    """What to do about a pickled file."""
    return f"{path.name} is a pickle, which can run code when it is read: make it safetensors with foredraft convert {path} --out FOLDER"
