"""The embedded models: small models of Python source that need no network, from the distribution ``foredraft-zoo``.

    pip install 'foredraft[zoo]'

    model = foredraft.zoo.load("python-8m")
    tokenizer = foredraft.zoo.load_tokenizer("python-8m")

Wherever Foredraft takes a model, ``"zoo:python-8m"`` means the same. The ``README.md`` beside the weights is the model card.

``python-300m`` is not a better model. It is ``python-8m`` inflated (:mod:`foredraft.inflation`) to the size and cost of a model of 300
million parameters, with the same function: an instrument that shows real acceptance at a realistic price on any machine.
``python-deep-100m`` is ``python-deep`` at four times the width, with no layer added: for drafts that leave layers out.

``t5-ast`` has an encoder: it reads a statement of Python and writes its syntax tree, or reads ``rename A B: STATEMENT`` and writes the
statement with the variable renamed. ``t5-ast-1m`` drafts for it, and ``t5-ast-130m`` is it at four times the width.

Draft heads for ``python-8m`` are included (``python-8m-medusa``, ``python-8m-eagle3``); :func:`foredraft.heads.checkpoints.load` loads
them, and inflates them where the target is ``python-300m``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.errors import ConfigurationError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Embedded", "describe", "find", "head_for", "is_inflated", "load", "load_tokenizer", "names", "path", "prompts", "root"]

PREFIX = "zoo:"
TARGET, DRAFT, NGRAM, INFLATED = "python-8m", "python-1m", "python-ngram", "python-300m"
DEEP, WIDE = "python-deep", "python-deep-100m"
T5, T5_DRAFT, T5_INFLATED = "t5-ast", "t5-ast-1m", "t5-ast-130m"


@dataclass(frozen=True)
class Inflated:
    """What an inflated model is inflated to."""

    hidden_size: int
    layers: int
    parameters: int


@dataclass(frozen=True)
class Embedded:
    """An entry of the zoo; one line of ``foredraft models``.

    Attributes:
        kind: "target", "draft", "inflated", "ngram" or "head".
        folder: the folder of its files below :func:`root`; an inflated model has that of the model that it is built from.
        drafter: the drafter that runs a head, or an n-gram table.
        inflated: the size of an inflated model.
    """

    name: str
    kind: str
    description: str
    folder: str
    drafter: str = ""
    inflated: Inflated | None = None

    @property
    def path(self) -> Path:
        return root() / self.folder

    @property
    def encoder(self) -> bool:
        """Whether it has one, and reads a source."""
        return self.folder.startswith(T5)

    @property
    def figures(self) -> dict[str, Any]:
        """What was measured when it was made."""
        return json.loads((self.path / "metrics.json").read_text(encoding="utf-8"))

    @property
    def parameters(self) -> int:
        """Their number; for an n-gram table, the number of n-grams."""
        return self.inflated.parameters if self.inflated else int(self.figures["parameters"])

    @property
    def size(self) -> int:
        """Bytes of weights on disk; an inflated model has none of its own."""
        return 0 if self.inflated else sum(file.stat().st_size for file in self.path.glob("*.safetensors"))

    @property
    def bits_per_byte(self) -> float | None:
        """On held-out packages, with the weights as stored; None for what is no language model."""
        value = self.figures.get("held_out", {}).get("bfloat16", {}).get("bits_per_byte")
        return None if value is None else float(value)


CATALOGUE = {
    each.name: each
    for each in (
        Embedded(TARGET, "target", "target: a llama-architecture model of Python source", TARGET),
        Embedded(DRAFT, "draft", f"draft for {TARGET}: same corpus, same tokenizer", DRAFT),
        Embedded(
            INFLATED,
            "inflated",
            f"benchmark instrument: {TARGET} at the cost of 300 M parameters",
            TARGET,
            inflated=Inflated(1024, 24, 306_234_368),
        ),
        Embedded(DEEP, "target", "target: sixteen narrow layers, the lower ones trained to draft for the others", DEEP),
        Embedded(
            WIDE, "inflated", f"benchmark instrument: {DEEP} at the cost of 100 M parameters", DEEP, inflated=Inflated(768, 16, 103_834_368)
        ),
        Embedded(NGRAM, "ngram", "n-gram table of the same corpus, for the ngram drafter", NGRAM, "ngram"),
        Embedded(f"{TARGET}-medusa", "head", f"Medusa heads for {TARGET}, and inflated for {INFLATED}", f"{TARGET}-medusa", "medusa"),
        Embedded(f"{TARGET}-eagle3", "head", f"EAGLE-3 head for {TARGET}, and inflated for {INFLATED}", f"{TARGET}-eagle3", "eagle3"),
        Embedded(T5, "target", "target with an encoder: a statement of Python to its syntax tree, or with a variable renamed", T5),
        Embedded(T5_DRAFT, "draft", f"draft for {T5}: same pairs, same tokenizer", T5_DRAFT),
        Embedded(
            T5_INFLATED,
            "inflated",
            f"benchmark instrument: {T5} at the cost of 130 M parameters",
            T5,
            inflated=Inflated(1024, 4, 130_046_976),
        ),
    )
}


def root() -> Path:
    """The folder of the distribution ``foredraft-zoo``.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        return Path(str(files("foredraft_zoo")))
    except ModuleNotFoundError as error:
        how = "pip install 'foredraft[zoo]', or ./zoo in a checkout"
        raise ConfigurationError(f"the embedded models (zoo:NAME) are not installed: {how}") from error


def names() -> list[str]:
    """The names of what is installed."""
    return [each.name for each in describe()]


def describe() -> list[Embedded]:
    """What is installed. Reads no weights."""
    return [each for each in CATALOGUE.values() if each.path.is_dir()]


def find(name: str) -> Embedded:
    """The entry of ``name``, with or without the prefix ``zoo:``. ``python-300m-medusa`` names the head ``python-8m-medusa``.

    Raises:
        ConfigurationError: there is no such entry, or the zoo is not installed.
    """
    bare = name.removeprefix(PREFIX)
    bare = bare.replace(f"{INFLATED}-", f"{TARGET}-")
    if bare not in (known := names()):
        made = "; t5-doc is made by the recipe recipes/t5 of a checkout" if bare.startswith("t5-doc") else ""
        raise ConfigurationError(f"there is no embedded model {name!r}; there are {', '.join(PREFIX + each for each in known)}{made}")
    return CATALOGUE[bare]


def find_model(name: str) -> Embedded:
    """The same for a model.

    Raises:
        ConfigurationError: also for a head or an n-gram table; the message says how to use it.
    """
    found = find(name)
    if found.drafter:
        what = "a draft head" if found.kind == "head" else "an n-gram table"
        raise ConfigurationError(f"{PREFIX}{found.name} is {what}, not a model; use it as drafter '{found.drafter}:{PREFIX}{found.name}'")
    return found


def path(name: str) -> Path:
    """The folder with the files of an embedded model, n-gram table or head.

    Raises:
        ConfigurationError: an unknown name, or an inflated model, which has no files.
    """
    found = find(name)
    if found.inflated:
        raise ConfigurationError(f"{found.name} has no files: it is built from {found.folder} when foredraft.zoo.load loads it")
    return found.path


def load(
    name: str, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None, attn_implementation: str | None = None
) -> PreTrainedModel:
    """An embedded model, in evaluation mode.

    Args:
        dtype: bfloat16, as stored, unless given.
        device: the CPU unless given.
        attn_implementation: the choice of transformers unless given.

    Raises:
        ConfigurationError: an unknown name, or that of a head or an n-gram table; the message says how to use it.
    """
    found = find_model(name)
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind = AutoModelForSeq2SeqLM if found.encoder else AutoModelForCausalLM
    options: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    model: PreTrainedModel = kind.from_pretrained(found.path, local_files_only=True, dtype=dtype or "auto", **options)
    if found.inflated:
        from foredraft.inflation import inflate

        model = inflate(model, hidden_size=found.inflated.hidden_size, layers=found.inflated.layers)
    model.name_or_path = model.config._name_or_path = PREFIX + found.name
    return model.to(device).eval()


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of an embedded model. Those with an encoder share one, and so do all the others."""
    from transformers import AutoTokenizer

    encoder = find(name).encoder
    side = "right" if encoder else "left"
    return AutoTokenizer.from_pretrained(path(T5 if encoder else TARGET), local_files_only=True, padding_side=side)


def prompts(name: str) -> list[str]:
    """What the embedded models have not seen: beginnings of Python files ("audit", "demo" or "benchmarks"), and sources for a model with
    an encoder ("ast" or "rename")."""
    lines = (root() / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def head_for(model: PreTrainedModel, drafter: str) -> str | None:
    """The embedded head of ``drafter`` for ``model``, as a source: ``zoo:NAME``; None if there is none."""
    if model.name_or_path not in (PREFIX + TARGET, PREFIX + INFLATED):
        return None
    return next((PREFIX + each.name for each in describe() if each.kind == "head" and each.drafter == drafter), None)


def is_inflated(model: PreTrainedModel) -> bool:
    """Whether ``model`` has the size of ``python-300m``."""
    config, size = model.config, CATALOGUE[INFLATED].inflated
    return size is not None and (config.hidden_size, config.num_hidden_layers) == (size.hidden_size, size.layers)
