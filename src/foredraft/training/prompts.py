"""Prompts for self-distillation: what the target is asked to continue."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foredraft.errors import ConfigurationError
from foredraft.files import json_lines, read_text

KEYS = ("prompt", "messages", "text")
LETTERS_PER_TOKEN = 16  # a window is cut from so many letters per token at first, and from all that follow where these do not do


def read_entries(files: Sequence[Path]) -> Iterator[str | list[Any]]:
    """Texts, or lists of chat messages, from files: one per line of a ``.jsonl`` file, under "prompt", "messages" or "text"; any other file
    is one text.

    Raises:
        ConfigurationError: a file that cannot be read, or a line that holds none of these.
    """
    for path in files:
        if path.suffix == ".jsonl":
            yield from (entry_of(found, where) for found, where in json_lines(path))
        else:
            yield read_text(path)


def entry_of(found: Any, where: str) -> str | list[Any]:
    """What a line holds; raises as :func:`read_entries` does."""
    key = next((key for key in KEYS if isinstance(found, dict) and key in found), None)
    if key is None or not isinstance(found[key], list if key == "messages" else str) or not found[key]:
        raise ConfigurationError(f'{where}: expected an object with a text "prompt" or "text", or a list of "messages"')
    return found[key]


def windows(tokenizer: Any, entries: Sequence[str | list[Any]], *, count: int, tokens: int, seed: int) -> list[list[int]]:
    """``count`` windows of ``tokens`` tokens, from the beginnings of lines at random places of the texts; every letter of a text is as
    likely as any other to be in the line that a window begins with, so that long texts count for what they hold.

    Raises:
        ConfigurationError: messages among the entries, or no text that is long enough.
    """
    if any(isinstance(each, list) for each in entries):
        raise ConfigurationError('--windows cuts prompts from texts and does not apply to "messages"; leave --windows out')
    import numpy as np  # here, so that mistakes in files are said without it

    texts = [str(each) for each in entries]
    ends = np.cumsum([len(text) for text in texts])
    short = ConfigurationError(f"no text with {tokens} tokens was found; give longer texts, or a smaller --prompt-tokens")
    if not ends[-1]:
        raise short
    random = np.random.default_rng((seed, count, tokens))
    found: list[list[int]] = []
    misses = 0
    while len(found) < count:
        place = int(random.integers(ends[-1]))
        text = int(np.searchsorted(ends, place, side="right"))
        inside = place - int(ends[text] - len(texts[text]))
        ids = _window(tokenizer, texts[text], inside, tokens)
        if len(ids) == tokens:
            found.append(ids)
            misses = 0
        elif (misses := misses + 1) > 1000:
            raise short
    return found


def _window(tokenizer: Any, text: str, place: int, tokens: int) -> list[int]:
    begin = text.rfind("\n", 0, place) + 1
    ids = tokenizer(text[begin : begin + LETTERS_PER_TOKEN * tokens], add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) <= tokens and len(text) > begin + LETTERS_PER_TOKEN * tokens:
        ids = tokenizer(text[begin:], add_special_tokens=False, verbose=False)["input_ids"]
    return ids[:tokens]


def digest(prompts: Sequence[Sequence[int]]) -> str:
    """A word for exactly these prompts in this order."""
    import numpy as np

    found = hashlib.sha256()
    for ids in prompts:
        found.update(np.asarray([len(ids), *ids], dtype=np.int64).tobytes())
    return found.hexdigest()[:32]
