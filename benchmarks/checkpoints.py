"""Checkpoint files that every method reads: embedded models are written out once, others are used where they lie.

They are written in float32, which holds bfloat16 values exactly, so that one folder serves both. An inflated model's silent layers
have matrices of zeros, all alike. Engines may keep equal constants once and then read less memory per pass than a model of that
size has; so those zeros become numbers of the order of 1e-12, all different, which vanish in every sum they are added to.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import sound
from foredraft.errors import ConfigurationError
from foredraft.loading import load_model, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TINY = 1e-12
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
DONE = "complete"


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face folder; ``slug`` names what is derived from it."""

    source: str
    path: Path
    slug: str


def written(source: str, work: Path) -> Checkpoint:
    """``source`` as files, under ``work`` if it is embedded or random.

    Raises:
        ConfigurationError: there is no such model.
    """
    slug = source.removeprefix("zoo:").strip("./").replace("/", "--").replace(":", "-")
    if source.startswith(sound.PREFIX):
        path = (work / slug / "hf").absolute()
        if not (path / DONE).exists():
            sound.save(source, path)
            (path / DONE).touch()
        return Checkpoint(source, path, slug)
    if not source.startswith("zoo:"):
        path = Path(source).expanduser()
        if not (path / "config.json").exists():
            raise ConfigurationError(f"{source!r} is no folder with a checkpoint; download it first and give its path, or zoo:NAME")
        return Checkpoint(source, path.absolute(), slug)
    path = (work / slug / "hf").absolute()
    if not (path / DONE).exists():
        model = load_model(source, dtype="float32", encoders=True)
        told_apart(model)
        save(model, source, path)
    return Checkpoint(source, path, slug)


def untrained(draft: Checkpoint, work: Path) -> Checkpoint:
    """A draft of the same size that knows nothing: what it proposes is never right."""
    slug = f"{draft.slug}-untrained"
    path = (work / slug / "hf").absolute()
    if not (path / DONE).exists():
        model = load_model(str(draft.path), dtype="float32")
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]))
        save(model, str(draft.path), path)
    return Checkpoint(slug, path, slug)


def save(model: PreTrainedModel, source: str, path: Path) -> None:
    """Write ``model``, and the tokenizer of ``source``; a folder that lacks the file ``DONE`` is not complete."""
    model.config.dtype = torch.float32
    model.save_pretrained(path)
    load_tokenizer(source).save_pretrained(path)
    (path / DONE).touch()


@torch.no_grad()
def told_apart(model: PreTrainedModel) -> int:
    """Replace matrices of nothing but zeros by tiny numbers, in place; returns how many."""
    generator, count = torch.Generator().manual_seed(0), 0
    for parameter in model.parameters():
        if parameter.dim() == 2 and not parameter.any():
            parameter.copy_(TINY * torch.randn(parameter.shape, generator=generator))
            count += 1
    return count


def pass_bytes(path: Path, dtype: str, *, experts: float = 1.0) -> int | None:
    """Bytes of weights that one pass over one token reads: all matrices, of ``experts`` that share alone, and the embedding only where it
    is the output layer as well. None where there are no safetensors files to count in."""
    sizes: dict[str, int] = {}
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            header: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        sizes |= {name: math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    if not sizes:
        return None
    sizes = {name: size for name, size in sizes.items() if not name.removeprefix("model.").startswith("encoder.")}
    gathered = [name for name in sizes if "embed_tokens" in name or name.endswith("wte.weight")]
    untied = any("lm_head" in name for name in sizes)
    idle = (1 - experts) * sum(size for name, size in sizes.items() if ".experts." in name)
    return SIZES[dtype] * (sum(sizes.values()) - (sum(sizes[name] for name in gathered) if untied else 0) - round(idle))
