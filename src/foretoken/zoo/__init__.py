"""The embedded models: small, trained on Python source by the recipe in this package, available without a network.

    model = foretoken.zoo.load("python-8m")
    tokenizer = foretoken.zoo.load_tokenizer("python-8m")

Wherever Foretoken takes a model, `"zoo:python-8m"` means the same. `python -m foretoken.zoo.train --help` is how they were made;
`README.md` beside the weights is the model card.

`"python-300m"` is not a better model. It is `python-8m` inflated to the size and cost of a model of 300 million parameters with
the same function: a benchmark instrument, which shows real acceptance at a realistic price on any machine.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.errors import ConfigurationError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foretoken.drafters.ngram_model import NGramModel

__all__ = ["Embedded", "describe", "inflate", "load", "load_tokenizer", "names", "path"]

PREFIX = "zoo:"
MODELS = Path(__file__).parent / "models"
TARGET, DRAFT, NGRAM, INFLATED = "python-8m", "python-1m", "python-ngram", "python-300m"
INFLATED_SIZE = {"hidden_size": 1024, "layers": 24}

DESCRIPTIONS = {
    TARGET: "target: a llama-architecture model of Python source",
    DRAFT: "draft for python-8m: same corpus, same tokenizer",
    INFLATED: "benchmark instrument: python-8m inflated, same function at the cost of 300 M parameters; built on the fly",
    NGRAM: "n-gram table of the same corpus, for the ngram drafter",
}
KINDS = {TARGET: "target", DRAFT: "draft", INFLATED: "inflated", NGRAM: "ngram"}


@dataclass(frozen=True)
class Embedded:
    """One line of `foretoken models`."""

    name: str
    kind: str  # "target", "draft", "inflated" or "ngram"
    parameters: int  # for an n-gram table, the number of n-grams
    size: int  # bytes on disk; an inflated model takes none of its own
    bits_per_byte: float | None  # on held-out packages, with the weights as packaged
    description: str


def names() -> list[str]:
    return list(DESCRIPTIONS)


def path(name: str) -> Path:
    """The folder with an embedded model's files. An inflated model has none."""
    name = _canonical(name)
    if name == INFLATED:
        raise ConfigurationError(f"{name} has no files: it is built from {TARGET} when it is loaded; use foretoken.zoo.load({name!r})")
    return MODELS / name


def load(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    attn_implementation: str | None = None,
) -> PreTrainedModel | NGramModel:
    """An embedded model, ready for inference; an `NGramModel` for an n-gram table.

    `dtype` defaults to bfloat16, as packaged; `device` to the CPU; `attn_implementation` to the choice of transformers.
    """
    name = _canonical(name)
    if name == NGRAM:
        from foretoken.drafters.ngram_model import NGramModel

        given = {"dtype": dtype, "device": device, "attn_implementation": attn_implementation}
        for option, value in given.items():
            if value is not None:
                raise ConfigurationError(f"{name} is an n-gram table and takes no {option}")
        return NGramModel.load(path(name) / "ngram.safetensors")

    from transformers import AutoModelForCausalLM

    folder = path(TARGET if name == INFLATED else name)
    options: dict[str, Any] = {"dtype": dtype or "auto"}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
    if name == INFLATED:
        model = inflate(model, **INFLATED_SIZE)
    model.config._name_or_path = PREFIX + name
    return model.to(device).eval()


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of an embedded model; all of them share one."""
    from transformers import AutoTokenizer

    _canonical(name)
    return AutoTokenizer.from_pretrained(MODELS / TARGET, local_files_only=True, padding_side="left")


def describe() -> list[Embedded]:
    """What is embedded, from the figures that packaging wrote beside each model. Reads no weights."""
    return [_describe(name) for name in names()]


def inflate(model: PreTrainedModel, *, hidden_size: int, layers: int, intermediate_size: int | None = None) -> PreTrainedModel:
    """A larger model with the same function; see `foretoken.zoo.inflation`."""
    from foretoken.zoo.inflation import inflate

    return inflate(model, hidden_size=hidden_size, layers=layers, intermediate_size=intermediate_size)


def _canonical(name: str) -> str:
    bare = name.removeprefix(PREFIX)
    if bare not in DESCRIPTIONS:
        raise ConfigurationError(f"there is no embedded model {name!r}; there are {', '.join(PREFIX + known for known in names())}")
    return bare


def _describe(name: str) -> Embedded:
    folder = path(TARGET if name == INFLATED else name)
    figures_file = folder / "metrics.json"
    figures: dict[str, Any] = json.loads(figures_file.read_text(encoding="utf-8")) if figures_file.is_file() else {}
    held_out = figures.get("held_out", {})
    return Embedded(
        name=name,
        kind=KINDS[name],
        parameters=_parameters(name, figures),
        size=0 if name == INFLATED else sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        bits_per_byte=held_out.get("bfloat16", held_out).get("bits_per_byte"),
        description=DESCRIPTIONS[name],
    )


def _parameters(name: str, figures: dict[str, Any]) -> int:
    """Counted from shapes alone: those of the weights file's header, or those that inflation will make."""
    if name == INFLATED:
        return _llama_parameters(json.loads((path(TARGET) / "config.json").read_text(encoding="utf-8")), **INFLATED_SIZE)
    if name == NGRAM:
        return int(figures.get("parameters", 0))
    with (path(name) / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(math.prod(entry["shape"]) for key, entry in header.items() if key != "__metadata__")


def _llama_parameters(config: dict[str, Any], *, hidden_size: int, layers: int) -> int:
    """Of a llama architecture with a tied head, widened from ``config`` to ``hidden_size``."""
    ratio = hidden_size // config["hidden_size"]
    heads = (config["num_attention_heads"] + config["num_key_value_heads"]) * ratio * config["head_dim"]
    per_layer = 2 * heads + 3 * config["intermediate_size"] * ratio + 2  # q, o, k, v; gate, up, down; two norms
    return hidden_size * (config["vocab_size"] + layers * per_layer + 1)
