"""Mistakes that are seen without torch, which takes seconds to import: unknown names, missing extras, files and folders."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from inspect import Parameter
from pathlib import Path
from typing import Any

from foredraft import drafters, grammars, hub, verification, zoo
from foredraft.cli.settings import Configuration
from foredraft.errors import ConfigurationError, unknown
from foredraft.files import read_text
from foredraft.shapes import TreeShape

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64", "float", "half", "double")
QUANTIZATIONS = ("int8", "int4", "int4-32", "int4-64", "int4-128")
TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "Path": (str,),
    "None": (type(None),),
    "Mapping[str, Any]": (dict,),
}


def check(
    configuration: Configuration, candidates: Mapping[str, Mapping[str, Any]] | None = None, *, encoders: bool = False, lossy: bool = False
) -> None:
    """Refuse what cannot work, before anything is loaded; ``candidates`` are further drafters and their options, and models may
    have ``encoders``. The command has the option --lossy, if ``lossy``.

    Raises:
        ConfigurationError: names the option and what to write instead.
        UnsupportedModelError: the target is known not to work.
    """
    check_model(configuration.target, configuration.dtype, configuration.device, configuration.quantization, encoders=encoders)
    check_drafter(configuration.drafter_name, configuration.drafter_options, encoders=encoders)
    for each, own in (candidates or {}).items():
        check_drafter(each, own, encoders=encoders)
    shape = None if configuration.shape in (None, "auto") else TreeShape.parse(configuration.shape)
    if shape is not None and configuration.draft_length is not None:
        raise ConfigurationError(f"--draft-length {configuration.draft_length} is --shape 'chain({configuration.draft_length})'; pass one")
    if configuration.rule != "auto":
        check_rule(configuration, shape, lossy=lossy)


def check_model(
    target: str, dtype: str = "auto", device: str | None = None, quantization: str | None = None, *, encoders: bool = False
) -> None:
    """A model's name and how it is to be loaded."""
    check_precision(dtype, quantization)
    if device == "auto" and not target.startswith(zoo.PREFIX):
        check_extra("accelerate", "device-map", "--device auto")
    check_source(target, encoders=encoders)


def check_precision(dtype: str, quantization: str | None) -> None:
    """What a model's weights are to be."""
    if dtype not in DTYPES:
        raise unknown("unknown dtype", dtype, DTYPES[:4])
    if quantization is not None:
        if quantization not in QUANTIZATIONS:
            raise unknown("unknown quantization", quantization, QUANTIZATIONS)
        check_extra("torchao", "int8", f"--quantization {quantization}")


def check_source(source: str, *, encoders: bool = False) -> None:
    """A model by name, target or draft."""
    if source.startswith(zoo.PREFIX):
        zoo.find_model(source)
    if not encoders:
        hub.check_decoder(source, config_here(source))
    else:
        hub.on_this_machine(source)


def config_here(source: str) -> dict[str, Any]:
    """That of a model that is on this machine; what is elsewhere is asked when it is loaded."""
    return hub.config_of(source) if hub.on_this_machine(source) else {}


def check_source_text(target: str, prompt: str | None, source: str | None, file: Path | None, *, languages: Mapping[str, str]) -> None:
    """Refuse what an encoder is to read where there is none, and a text to continue where there is one."""
    if source is not None and (prompt is not None or file is not None):
        raise ConfigurationError("give --source TEXT alone, without PROMPT or --prompts FILE")
    if config := config_here(target):
        encoder = bool(config.get("is_encoder_decoder"))
        check_source_is_read(target, encoder, source=source is not None, prompt=prompt is not None, languages=languages)


def check_source_is_read(target: str, encoder: bool, *, source: bool, prompt: bool, languages: Mapping[str, str]) -> None:
    """Whether there is an ``encoder`` where a ``source`` or ``languages`` were given, and none where a ``prompt`` was.

    Raises:
        ConfigurationError: names what to give instead.
    """
    if source and not encoder:
        raise ConfigurationError(f"{target!r} has no encoder to read --source; give the text as PROMPT")
    if languages and not encoder:
        raise ConfigurationError(f"{next(iter(languages))} is for models with an encoder, and {target!r} has none; leave it out")
    if prompt and encoder:
        raise ConfigurationError(f"{target!r} has an encoder: give what it reads as --source TEXT, and leave PROMPT out")


def check_drafter(spec: str, options: Mapping[str, Any], *, encoders: bool = False) -> None:
    """A drafter, its options and its source."""
    given = drafters.check(spec, dict(options))
    name = spec.partition(":")[0]
    parameters = drafters.options(name)
    for key, value in options.items():
        check_type(name, parameters[key], value)
    check_precision(given.get("dtype") or "auto", given.get("quantization"))
    source, kinds = given.get("source"), str(parameters["source"].annotation) if "source" in parameters else ""
    if not isinstance(source, str):
        return
    if name == "several":
        for part in filter(None, map(str.strip, source.split(","))):
            check_drafter(part, {}, encoders=encoders)
    elif source.startswith(zoo.PREFIX):
        zoo.find(source)
    elif "PreTrainedModel" in kinds:
        check_source(source, encoders=encoders)
    elif "Head" in kinds:
        hub.on_this_machine(source)
    elif not (path := Path(source).expanduser()).exists() and (
        (name == "draft-verify" and source != "auto") or parameters["source"].default is Parameter.empty or not path.parent.is_dir()
    ):
        how = f"; make one with 'foredraft datastore build FILES... --out {source}'" if name == "rest" else ""
        raise ConfigurationError(f"there is no file {source!r} for drafter {name!r} to draft from{how}")


def check_type(drafter: str, option: Parameter, value: object) -> None:
    """An option's value, where its type can be given on a command line."""
    types = [part.strip() for part in str(option.annotation).split("|")] if option.annotation is not Parameter.empty else []
    fitting = [kind for each in types for kind in TYPES.get(each, ())]
    if not fitting or type(value) in fitting:
        return
    names = " or ".join(each for each in types if each in TYPES)
    raise ConfigurationError(f"drafter {drafter!r} cannot take these options: {option.name} must be {names}, got {value!r}")


def check_grammar(json_schema: Path | None, regex: str | None, grammar: Path | None, backend: str | None) -> dict[str, Any]:
    """What the text has to match, as arguments of ``generate``."""
    given: dict[str, Any] = {"regex": regex} if regex is not None else {}
    for name, path in (("json_schema", json_schema), ("grammar", grammar)):
        if path is not None:
            given[name] = read_text(path.expanduser())
    if given:
        grammars.the_source(given.get("json_schema"), regex, given.get("grammar"))
        return {**given, "grammar_backend": grammars.choose_backend(backend or "auto")}
    if backend is not None:
        raise ConfigurationError("--grammar-backend needs --json-schema, --regex or --grammar")
    return {}


def check_rule(configuration: Configuration, shape: TreeShape | None, *, lossy: bool) -> None:
    """A rule by name, with the drafter and the shape; the message names --lossy where the command is ``lossy``, that is, has it."""
    rule, name = verification.describe(configuration.rule), configuration.rule
    if not configuration.lossy and not rule.lossless:
        instead = "pass --lossy to allow that" if lossy else "name another with --rule"
        raise ConfigurationError(f"rule {name!r} is lossy: it changes the output distribution; {instead}")
    spec = configuration.drafter_name
    proposals = drafters.describe(spec.partition(":")[0]).proposals
    if not set(rule.proposals) & set(proposals):
        raise ConfigurationError(
            f"rule {name!r} is not exact for {' or '.join(proposals)} proposals, which drafter {spec!r} makes "
            f"(only for {', '.join(sorted(rule.proposals))}); use --rule auto"
        )
    if rule.chains_only and isinstance(shape, TreeShape) and not shape.is_chain:
        raise ConfigurationError(f"rule {name!r} verifies chains only, and shape {shape} may branch; use --rule auto")


def check_extra(module: str, extra: str, what: str) -> None:
    """An optional package."""
    if find_spec(module) is None:
        raise ConfigurationError(f"{what} needs {module}; install it with: pip install 'foredraft[{extra}]'")


def check_output(path: Path | None) -> None:
    """A file that will be written at the end, perhaps after minutes."""
    if path is None:
        return
    folder = path.parent  # a ~ that the shell has left stays: who writes does not expand it
    why = "it is a folder" if path.is_dir() else f"there is no folder {str(folder)!r}" if not folder.is_dir() else None
    if why is None and not os.access(path if path.exists() else folder, os.W_OK):
        why = "permission denied"
    if why is not None:
        raise ConfigurationError(f"cannot write {str(path)!r}: {why}")


def check_data(folders: Sequence[Path]) -> None:
    """Folders of training data."""
    for each in folders:
        if not each.is_dir():
            raise ConfigurationError(f"{str(each)!r} holds no data; make some with: foredraft data generate --out {each}")
