"""Prompts for audits and tuning: Python for the embedded models, which have seen nothing else; a little of everything for others."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft import zoo
from foredraft.errors import ConfigurationError
from foredraft.loading import name_of
from foredraft.speculator import Speculator
from foredraft.text import encode

GENERAL = (
    "The lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote down the weather in a small blue book. One night",
    'def moving_average(values, window):\n    """Return the mean of every `window` neighbouring values."""\n',
    "Question: A train leaves at 9:40 and arrives at 13:05. How long does the journey take?\nAnswer:",
    '{"name": "Ada", "age": 36, "languages": ["English", "French"]}\n{"name": "Emil", "age": 41, "languages": ["Danish"]}\n{"name":',
    "Rewrite the text with every date in ISO form.\nText: The contract was signed on 3 March 2021 and ends on 28 February 2026. Both sides "
    "may cancel it until 30 November 2025.\nRewritten: The contract was signed on",
    "Die Hauptstadt von Frankreich ist Paris. Die Hauptstadt von Italien ist Rom. Die Hauptstadt von Spanien ist",
    "# Changelog\n\n## 2.1.0\n\n- Faster start\n- Fixed a crash when the configuration file is empty\n\n## 2.0.0\n\n-",
    "Dear Ms Okafor,\n\nthank you for your letter of last week. We have looked into the delay of your order, and",
)


def default_prompts(source: str) -> list[str]:
    """Built-in beginnings of texts for the model ``source``."""
    return zoo.prompts("audit") if source.startswith(zoo.PREFIX) else list(GENERAL)


def token_ids(speculator: Speculator, prompts: Sequence[str | Sequence[int]] | None) -> list[list[int]]:
    """Token ids of ``prompts``, of the built-in ones if None.

    Raises:
        ConfigurationError: no prompt, an empty one, or texts and no tokenizer.
    """
    name = name_of(speculator.model)
    if prompts is None:
        prompts = default_prompts(name)
    if isinstance(prompts, str) or not prompts:
        raise ConfigurationError(f"prompts must be a list of texts or of token id lists, with at least one, got {prompts!r}")
    rows = [encode(speculator.tokenizer, prompt, name) if isinstance(prompt, str) else list(map(int, prompt)) for prompt in prompts]
    if not all(rows):
        raise ConfigurationError("a prompt is empty; give at least one token, for instance the BOS token")
    return rows
