"""The embedded models: small, trained on Python source by the recipe in this package, available without a network.

    model = foredraft.zoo.load("python-8m")
    tokenizer = foredraft.zoo.load_tokenizer("python-8m")

Wherever Foredraft takes a model, `"zoo:python-8m"` means the same. `python -m foredraft.zoo.train --help` is how they were made;
`README.md` beside the weights is the model card.

`"python-300m"` is not a better model. It is `python-8m` inflated to the size and cost of a model of 300 million parameters with
the same function: a benchmark instrument, which shows real acceptance at a realistic price on any machine.

Heads that draft for `python-8m` are here too (`python-8m-medusa`, `python-8m-eagle3`); for `python-300m` they are inflated with it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.errors import ConfigurationError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foredraft.drafters.ngram_model import NGramModel
    from foredraft.heads.base import Head

__all__ = ["Embedded", "describe", "head_for", "inflate", "load", "load_head", "load_tokenizer", "names", "path"]

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
HEADS = {  # kind of head → its name, and what it is; listed where its folder is there
    "medusa": (f"{TARGET}-medusa", f"Medusa heads for {TARGET}, and inflated for {INFLATED}"),
    "eagle3": (f"{TARGET}-eagle3", f"EAGLE-3 head for {TARGET}, and inflated for {INFLATED}"),
}


@dataclass(frozen=True)
class Embedded:
    """One line of `foredraft models`."""

    name: str
    kind: str  # "target", "draft", "inflated", "ngram" or "head"
    parameters: int  # for an n-gram table, the number of n-grams
    size: int  # bytes on disk; an inflated model takes none of its own
    bits_per_byte: float | None  # on held-out packages, with the weights as packaged
    description: str


def names() -> list[str]:
    return [*DESCRIPTIONS, *_heads()]


def path(name: str) -> Path:
    """The folder with the files of an embedded model or head. An inflated model has none."""
    name = _canonical(name)
    if name == INFLATED:
        raise ConfigurationError(f"{name} has no files: it is built from {TARGET} when it is loaded; use foredraft.zoo.load({name!r})")
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
    if name in _heads():
        raise ConfigurationError(
            f"{PREFIX}{name} is a draft head, not a model; use it as drafter '{_heads()[name]}:{PREFIX}{name}', or "
            f"foredraft.zoo.load_head({name!r}, target)"
        )
    if name == NGRAM:
        from foredraft.drafters.ngram_model import NGramModel

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
    model.name_or_path = model.config._name_or_path = PREFIX + name
    return model.to(device).eval()


def load_head(name: str, model: PreTrainedModel | None = None) -> Head:
    """An embedded head, attached to its target `model` in its dtype and on its device; inflated, where the target is `python-300m`.
    `python-300m-medusa` names the same head as `python-8m-medusa`.

    Without a target it is as stored, for `python-8m`. Raises ConfigurationError for a name that is no head, or another target.
    """
    from foredraft.heads.checkpoints import load_folder

    present = ", ".join(PREFIX + head for head in _heads()) or "none"
    if (kind := _heads().get(_bare(name))) is None:
        raise ConfigurationError(f"{name!r} is no draft head in this package; embedded heads: {present}")
    if model is None or not _is_inflated(model):
        return load_folder(path(name), model)
    head_inflation = import_module("foredraft.zoo.head_inflation")
    small = load_folder(path(name), dtype=model.dtype)
    head: Head = getattr(head_inflation, f"inflate_{kind}")(small, model)
    head.to(device=model.device, dtype=model.dtype).attach(model)
    return head.eval()


def head_for(model: PreTrainedModel, kind: str) -> str | None:
    """The embedded head of ``kind`` for ``model``, as a drafter's source: ``zoo:NAME``; None where there is none for it."""
    if kind not in HEADS or model.name_or_path not in (PREFIX + TARGET, PREFIX + INFLATED):
        return None
    name = HEADS[kind][0]
    return PREFIX + name if name in _heads() else None


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of an embedded model; all of them share one."""
    from transformers import AutoTokenizer

    _canonical(name)
    return AutoTokenizer.from_pretrained(MODELS / TARGET, local_files_only=True, padding_side="left")


def describe() -> list[Embedded]:
    """What is embedded, from the figures that packaging wrote beside each model. Reads no weights."""
    return [_describe(name) for name in names()]


def inflate(model: PreTrainedModel, *, hidden_size: int, layers: int, intermediate_size: int | None = None) -> PreTrainedModel:
    """A larger model with the same function; see `foredraft.zoo.inflation`."""
    from foredraft.zoo.inflation import inflate

    return inflate(model, hidden_size=hidden_size, layers=layers, intermediate_size=intermediate_size)


def _heads() -> dict[str, str]:
    """The heads that are here, by name, and their kinds."""
    return {name: kind for kind, (name, _) in HEADS.items() if (MODELS / name / "config.json").is_file()}


def _is_inflated(model: PreTrainedModel) -> bool:
    config = model.config
    return (config.hidden_size, config.num_hidden_layers) == (INFLATED_SIZE["hidden_size"], INFLATED_SIZE["layers"])


def _bare(name: str) -> str:
    """Without the prefix; heads of the inflated model are those of the one that it was made of."""
    bare = name.removeprefix(PREFIX)
    return bare.replace(f"{INFLATED}-", f"{TARGET}-") if bare not in DESCRIPTIONS else bare


def _canonical(name: str) -> str:
    bare = _bare(name)
    if bare not in names():
        raise ConfigurationError(f"there is no embedded model {name!r}; there are {', '.join(PREFIX + known for known in names())}")
    return bare


def _describe(name: str) -> Embedded:
    folder = path(TARGET if name == INFLATED else name)
    figures_file = folder / "metrics.json"
    figures: dict[str, Any] = json.loads(figures_file.read_text(encoding="utf-8")) if figures_file.is_file() else {}
    held_out = figures.get("held_out", {})
    return Embedded(
        name=name,
        kind=KINDS.get(name, "head"),
        parameters=_parameters(name, figures),
        size=0 if name == INFLATED else sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        bits_per_byte=held_out.get("bfloat16", held_out).get("bits_per_byte"),
        description=DESCRIPTIONS[name] if name in DESCRIPTIONS else HEADS[_heads()[name]][1],
    )


def _parameters(name: str, figures: dict[str, Any]) -> int:
    """Counted from shapes alone: those of the weights file's header, or those that inflation will make."""
    if name == INFLATED:
        return _llama_parameters(json.loads((path(TARGET) / "config.json").read_text(encoding="utf-8")), **INFLATED_SIZE)
    if name == NGRAM:
        return int(figures.get("parameters", 0))
    with (path(name) / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    floating = [entry for key, entry in header.items() if key != "__metadata__" and entry["dtype"][0] in "BF" and entry["dtype"] != "BOOL"]
    return sum(math.prod(entry["shape"]) for entry in floating)


def _llama_parameters(config: dict[str, Any], *, hidden_size: int, layers: int) -> int:
    """Of a llama architecture with a tied head, widened from ``config`` to ``hidden_size``."""
    ratio = hidden_size // config["hidden_size"]
    heads = (config["num_attention_heads"] + config["num_key_value_heads"]) * ratio * config["head_dim"]
    per_layer = 2 * heads + 3 * config["intermediate_size"] * ratio + 2  # q, o, k, v; gate, up, down; two norms
    return hidden_size * (config["vocab_size"] + layers * per_layer + 1)
