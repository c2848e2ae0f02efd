"""Prompts for the embedded models, which have seen Python; other models need prompts of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foredraft import zoo
from foredraft.errors import ConfigurationError
from foredraft.loading import load_tokenizer


def name_of(model: Any) -> str:
    """What it was loaded from, ``zoo:NAME`` for an embedded model; empty for one made in memory."""
    return str(getattr(model.config, "_name_or_path", "") or model.name_or_path)


def token_ids(model: Any, prompts: Sequence[str | Sequence[int]] | None) -> list[list[int]]:
    """Token ids of ``prompts``; of Python beginnings for an embedded model if None.

    Raises:
        ConfigurationError: no prompts for another model, an empty one, or texts and no tokenizer.
    """
    if prompts is None:
        if not name_of(model).startswith(zoo.PREFIX):
            raise ConfigurationError("give prompts=[...], texts or token ids; only the embedded models have default prompts")
        prompts = zoo.prompts("audit")
    if isinstance(prompts, str) or not prompts:
        raise ConfigurationError(f"prompts must be a list of texts or of token id lists, with at least one, got {prompts!r}")
    tokenizer: Any = None
    rows = []
    for prompt in prompts:
        if isinstance(prompt, str):
            tokenizer = tokenizer or load_tokenizer(name_of(model))
            prompt = tokenizer(prompt)["input_ids"]
        if not len(prompt):
            raise ConfigurationError("a prompt is empty; give at least one token, for instance the BOS token")
        rows.append([int(token) for token in prompt])
    return rows
