"""Texts that a pair of models is compared on, by category. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import ConfigurationError
from foredraft.files import json_lines, read_text
from foredraft.training.prompts import entry_of


@dataclass(frozen=True)
class Text:
    """A text, a list of chat messages, or a folder of texts that a model wrote."""

    category: str
    content: str | list[Any] | Path


def read_texts(sources: Sequence[Path], key: str) -> list[Text]:
    """From .jsonl files, with categories under ``key`` of each line or named after the file; from other files, each of which is one
    text; and from folders, which are not read yet.

    Raises:
        ConfigurationError: a file that cannot be read, or a line that holds no text.
    """
    found = []
    for path in sources:
        if path.is_dir():
            found.append(Text(path.name, path))
        elif path.suffix == ".jsonl":
            for entry, where in json_lines(path):
                content = entry_of(entry, where)
                found.append(Text(str(entry.get(key, path.stem)), content))
        else:
            found.append(Text(path.stem, read_text(path)))
    if not found:
        raise ConfigurationError("there is no text in " + ", ".join(repr(str(path)) for path in sources))
    return found
