"""Suites of prompts made from text that is on every machine: the source and the documentation of Python's own library.

Three kinds of text that drafters without a model are meant for, each in a format that benchmarks are published in, so that files of
such benchmarks can take their place:

==========  ==========  ===============================================================================================
edit        spec-bench  the beginning of a module, and the same again with a name changed, to be gone on with: long copies
completion  humaneval   a module up to the signature and docstring of one of its functions
chat        spec-bench  questions about functions answered by their documentation, some of them asked twice; two turns
==========  ==========  ===============================================================================================
"""

from __future__ import annotations

import ast
import inspect
import json
import keyword
import re
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

MODULES: tuple[str, ...] = (
    "textwrap",
    "heapq",
    "fnmatch",
    "configparser",
    "statistics",
    "string",
    "shlex",
    "bisect",
    "gettext",
    "cmd",
    "csv",
    "calendar",
)
EDITED, BEGUN = 48, 14  # lines of a module that is edited, and of its new version that are given
CONTEXT = 40  # lines in front of a function that is to be completed
USES = 4  # of a name that is changed, at least


def write(folder: Path) -> dict[str, int]:
    """Write ``NAME.jsonl`` for every suite into ``folder``; returns how many prompts each has."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for name, make in SUITES.items():
        lines = [json.dumps(entry, ensure_ascii=False) for module in MODULES for entry in make(import_module(module))]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        counts[name] = len(lines)
    return counts


def edits(module: ModuleType) -> Iterator[dict[str, Any]]:
    """The same lines again, with the name that they use most changed."""
    lines = source(module)
    begin = next(index for index, line in enumerate(lines) if line.startswith(("def ", "class ", "@")))
    text = "\n".join(lines[begin : begin + EDITED])
    uses = Counter(word for word in re.findall(r"[A-Za-z_]\w{3,}", text) if not keyword.iskeyword(word))
    if not uses or max(uses.values()) < USES:
        return
    name = max(uses, key=lambda word: (uses[word], word))
    new = f"new_{name}"
    after = re.sub(rf"\b{name}\b", new, text).split("\n")
    prompt = f"{text}\n\n\n# The same code, in which {name} is called {new}:\n\n" + "\n".join(after[:BEGUN]) + "\n"
    yield {"question_id": module.__name__, "category": "edit", "turns": [prompt]}


def completions(module: ModuleType) -> Iterator[dict[str, Any]]:
    """The last documented function of a module, without its body."""
    lines = source(module)
    found = [node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)]
    inner = [node for node in found if len(node.body) > 2 and node.lineno > CONTEXT // 2]
    if not inner:
        return
    function = max(inner, key=lambda node: node.lineno)
    head = function.body[0].end_lineno or function.lineno
    prompt = "\n".join(lines[max(0, function.lineno - 1 - CONTEXT) : head]) + "\n"
    yield {"task_id": f"{module.__name__}.{function.name}", "prompt": prompt}


def chats(module: ModuleType) -> Iterator[dict[str, Any]]:
    """Two functions or classes are asked for, then the first one again; the second turn asks for the second one again."""
    documented = [
        (f"{module.__name__}.{name}", inspect.cleandoc(value.__doc__))
        for name, value in sorted(vars(module).items())
        if (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
        and value.__doc__
        and len(value.__doc__) > 100
    ][:2]
    if len(documented) < 2:
        return
    asked = [f">>> help({name})\n{text}\n\n" for name, text in documented]
    again = [f">>> help({name})\n{text.split('.')[0][:40]}" for name, text in documented]
    yield {"question_id": module.__name__, "category": "chat", "turns": ["".join(asked) + again[0], "\n\n" + again[1]]}


def source(module: ModuleType) -> list[str]:
    return inspect.getsource(module).split("\n")


SUITES: dict[str, Callable[[ModuleType], Iterator[dict[str, Any]]]] = {"edit": edits, "completion": completions, "chat": chats}
