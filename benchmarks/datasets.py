"""Prompts for the speed suite: the embedded ones, random token ids, or files in the formats that benchmarks are published in.

==========  ===========================================================================================================
text        one prompt a line, as ``foredraft generate --prompts`` has it; the formats below are those of ``.jsonl`` files
jsonl       one ``{"prompt": "…"}`` a line
spec-bench  ``question.jsonl``: ``question_id``, ``category``, ``turns``; turns after the first follow the answer before
humaneval   ``task_id``, ``prompt``
gsm8k       ``question``, ``answer``; only the question is used
==========  ===========================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import prompts
from foredraft.cli.prompts import read_prompts
from foredraft.errors import ConfigurationError
from foredraft.files import json_lines

EMBEDDED = "embedded"


@dataclass(frozen=True)
class Prompt:
    """What one conversation asks, turn by turn; ``category`` groups prompts in the report."""

    name: str
    category: str
    turns: tuple[str, ...]


def read(source: str, limit: int | None = None) -> list[Prompt]:
    """The prompts of ``source``: ``"embedded"``, or a file; the first ``limit`` of each category.

    Raises:
        ConfigurationError: the file cannot be read, or a line of it is not in its format; the message has the line's number.
    """
    found = embedded() if source == EMBEDDED else from_file(Path(source))
    if limit is None:
        return found
    taken: dict[str, int] = {}
    kept = []
    for prompt in found:
        taken[prompt.category] = taken.get(prompt.category, 0) + 1
        if taken[prompt.category] <= limit:
            kept.append(prompt)
    return kept


def conversation(
    prompt: Prompt, tokenizer: Any, answer: Callable[[list[int]], list[int] | None], *, chat: bool = False
) -> Iterator[list[int]]:
    """The token ids that each turn is asked with, what came before it included: earlier turns and what ``answer`` made of them; as far as
    that has answers. ``chat`` applies the tokenizer's template.

    Raises:
        ConfigurationError: the tokenizer makes no token of it.
    """
    ids: list[int] = []
    messages: list[dict[str, str]] = []
    for number, turn in enumerate(prompt.turns, 1):
        messages.append({"role": "user", "content": turn})
        if chat:
            ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
        else:
            ids = ids + list(tokenizer(turn, add_special_tokens=number == 1)["input_ids"])
        if not ids:
            raise ConfigurationError(f"the target's tokenizer makes no token of prompt {prompt.name}")
        yield list(ids)
        if number < len(prompt.turns):
            said = answer(ids)
            if said is None:
                return
            messages.append({"role": "assistant", "content": tokenizer.decode(said, skip_special_tokens=True)})
            ids = ids + said


def embedded() -> list[Prompt]:
    return [Prompt(f"python-{index}", "python", (text,)) for index, text in enumerate(prompts.PYTHON)]


def from_file(path: Path) -> list[Prompt]:
    """A ``.jsonl`` file in any of the formats, recognised by the members of its first object; any other file has a prompt per line."""
    if path.suffix != ".jsonl":
        return [Prompt(f"{path.stem}-{number}", path.stem, (text,)) for number, text in enumerate(read_prompts(None, path), 1)]
    found: list[Prompt] = []
    parse: Parser | None = None
    for number, (entry, where) in enumerate(json_lines(path), 1):
        if not isinstance(entry, dict):
            raise ConfigurationError(f"{where}: expected an object, got {type(entry).__name__}")
        parse = parse or _recognised(entry, where)
        prompt = parse(entry, f"{path.stem}-{number}", path.stem)
        if isinstance(prompt, str):
            raise ConfigurationError(f"{where}: {prompt}")
        found.append(prompt)
    if not found:
        raise ConfigurationError(f"{str(path)!r} contains no prompt")
    return found


Parser = Callable[[dict[str, Any], str, str], "Prompt | str"]  # entry, name, category; a text says what is wrong


def _spec_bench(entry: dict[str, Any], name: str, category: str) -> Prompt | str:
    turns = entry.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        return 'expected "turns", a list of texts'
    if not isinstance(entry.get("category"), str):
        return 'expected "category", a text'
    return Prompt(str(entry.get("question_id", name)), entry["category"], tuple(turns))


def _one_text(member: str, naming: str) -> Parser:
    def parse(entry: dict[str, Any], name: str, category: str) -> Prompt | str:
        text = entry.get(member)
        if not isinstance(text, str) or not text:
            return f'expected "{member}", a text'
        return Prompt(str(entry.get(naming, name)), category, (text,))

    return parse


FORMATS: Sequence[tuple[str, Parser]] = (
    ("turns", _spec_bench),
    ("task_id", _one_text("prompt", "task_id")),
    ("question", _one_text("question", "id")),
    ("prompt", _one_text("prompt", "id")),
)
"""The member that a format is known by, in the order in which they are looked for."""


def _recognised(entry: dict[str, Any], where: str) -> Parser:
    for member, parse in FORMATS:
        if member in entry:
            return parse
    wanted = ", ".join(f'"{member}"' for member, _ in FORMATS)
    raise ConfigurationError(f"{where}: no known format; expected an object with one of {wanted}")
