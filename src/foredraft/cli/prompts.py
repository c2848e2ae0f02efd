"""Where prompts and other texts come from. Importing this loads no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import ConfigurationError
from foredraft.files import decoded, json_lines, read_text
from foredraft.training.prompts import entry_of


def read_prompts(prompt: str | None, file: Path | None) -> list[str]:
    """From the argument, from a file, or from stdin (no argument, or ``-``).

    Raises:
        ConfigurationError: none given, two sources given, an empty one, or one that is not UTF-8.
    """
    if prompt is not None and file is not None:
        raise ConfigurationError("give a PROMPT or --prompts FILE, not both")
    if file is not None:
        prompts = _from_file(file)
    elif prompt is None or prompt == "-":
        prompts = [_from_stdin(asked=prompt == "-")]
    else:
        prompts = [prompt]
    for number, text in enumerate(prompts, 1):
        which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
        if not text:
            raise ConfigurationError(f"{which} is empty")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ConfigurationError(f"{which} is not UTF-8")
    return prompts


def read_tasks(files: Sequence[Path], limit: int) -> dict[str, list[str]]:
    """The first ``limit`` prompts of each file, by the file's name without its ending.

    Raises:
        ConfigurationError: as in :func:`read_prompts`, or two files of the same name.
    """
    tasks: dict[str, list[str]] = {}
    for file in files:
        if file.stem in tasks:
            raise ConfigurationError(f"two tasks are called {file.stem!r}; rename one of the files")
        tasks[file.stem] = read_prompts(None, file)[:limit]
    return tasks


def _from_stdin(*, asked: bool) -> str:
    if sys.stdin.isatty() and not asked:
        raise ConfigurationError('no prompt; give one: foredraft generate "PROMPT", pipe a text in, or use --prompts FILE')
    return decoded(sys.stdin.buffer.read(), "stdin")


def _from_file(path: Path) -> list[str]:
    if path.suffix == ".jsonl":
        prompts = [_prompt_of(entry, where) for entry, where in json_lines(path)]
    else:
        prompts = [line.rstrip("\r") for line in read_text(path).split("\n") if line.strip()]
    if not prompts:
        raise ConfigurationError(f"{str(path)!r} contains no prompt")
    return prompts


def _prompt_of(entry: Any, where: str) -> str:
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise ConfigurationError(f'{where}: expected an object with a text "prompt"')
    return str(entry["prompt"])


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


def messages(role: str, content: str | None) -> list[dict[str, str]]:
    """One message, or none."""
    return [] if content is None else [{"role": role, "content": content}]
