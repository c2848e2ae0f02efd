"""Drafters, by name. Adding one takes a file here and a line in the registry below."""

from __future__ import annotations

import inspect
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from foredraft.errors import ConfigurationError, unknown
from foredraft.registry import Entry, entry

if TYPE_CHECKING:
    from foredraft.drafters.base import Drafter

REGISTRY = {
    "none": "foredraft.drafters.none:NoDrafter",
    "prompt-lookup": "foredraft.drafters.prompt_lookup:PromptLookup",
    "suffix": "foredraft.drafters.suffix:Suffix",
    "ngram": "foredraft.drafters.ngram:NGram",
    "rest": "foredraft.drafters.rest:Rest",
    "token-recycling": "foredraft.drafters.token_recycling:TokenRecycling",
    "lookahead": "foredraft.drafters.lookahead:Lookahead",
    "draft-model": "foredraft.drafters.draft_model:DraftModel",
    "layer-skip": "foredraft.drafters.layer_skip:LayerSkip",
    "draft-verify": "foredraft.drafters.draft_verify:DraftVerify",
    "medusa": "foredraft.drafters.medusa:Medusa",
    "hydra": "foredraft.drafters.hydra:Hydra",
    "rnn": "foredraft.drafters.rnn:Rnn",
    "eagle3": "foredraft.drafters.eagle3:Eagle3",
    "mtp": "foredraft.drafters.mtp:Mtp",
    "several": "foredraft.drafters.several:Several",
}


def names() -> list[str]:
    """The names of all drafters."""
    return list(REGISTRY)


def describe(name: str) -> Entry:
    """What is known of the drafter called ``name``; imports nothing for the built-in ones.

    Raises:
        ConfigurationError: no such drafter; the message lists those there are.
    """
    if name not in REGISTRY:
        raise unknown("unknown drafter", name, REGISTRY)
    return entry(REGISTRY[name])


def find(name: str) -> type[Drafter]:
    """The class of the drafter called ``name``.

    Raises:
        ConfigurationError: no such drafter; the message lists those there are.
    """
    return resolve_name(describe(name).home)


def options(name: str) -> dict[str, inspect.Parameter]:
    """The options of the drafter called ``name``, with their defaults; ``source`` is what follows the colon in ``NAME:SOURCE``."""
    return describe(name).parameters


def check(spec: str, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """The options of the drafter described by ``"NAME"`` or ``"NAME:SOURCE"`` with ``given`` ones, its source among them.

    Raises:
        ConfigurationError: unknown name or option, a source that is missing or not taken.
    """
    name, colon, source = spec.partition(":")
    parameters = options(name)
    given = dict(given or {})
    if colon:
        if "source" not in parameters:
            raise ConfigurationError(f"drafter {name!r} takes no source; write {name!r} without {':' + source!r}")
        given["source"] = source
    for key in sorted(given.keys() - parameters.keys()):
        hint = f"its options: {', '.join(parameters) or 'none'}"
        if name == "several":
            member = f"[['draft-model', {{'source': ..., {key!r}: ...}}], 'suffix']"
            hint = f"use the drafter that it is for alone, or in Python drafter='several' with drafter_options={{'source': {member}}}"
        raise unknown(f"drafter {name!r} has no option", key, parameters, hint=hint)
    required = [key for key, value in parameters.items() if value.default is inspect.Parameter.empty and key not in given]
    if required:
        hint = f"write {name + ':SOURCE'!r}" if required == ["source"] else f"pass drafter_options={{{required[0]!r}: ...}}"
        raise ConfigurationError(f"drafter {name!r} needs {', '.join(required)}; {hint}")
    return given


def create(spec: str, given: dict[str, Any] | None = None) -> Any:
    """The drafter described by ``"NAME"`` or ``"NAME:SOURCE"`` with ``given`` options.

    Raises:
        ConfigurationError: unknown name or option, a source that is missing or not taken.
    """
    return find(spec.partition(":")[0])(**check(spec, given))
