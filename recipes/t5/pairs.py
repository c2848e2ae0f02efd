"""Pairs of a source and a text, made from the corpus of :mod:`recipes.zoo.corpus`.

- **ast**: a statement of Python → its syntax tree as an s-expression, ``x = f(a, 1)`` → ``(Assign x (Call f a 1))``;
  and ``rename A B: STATEMENT`` → the statement with the variable A called B.
- **doc**: a function without its docstring → the first sentence of that docstring.
"""

from __future__ import annotations

import ast
import random
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from recipes.t5.recipe import SEED, Task
from recipes.zoo.corpus import SourceFile

CHARACTERS = 400  # of a statement at most
FUNCTION_CHARACTERS = 1200
LIKELY = 60  # characters from which on every statement counts; of shorter ones a share, for they say little
COMPOUND = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LEFT_OUT = frozenset({"ctx", "kind", "type_comment", "type_params", "type_ignores", "simple"})  # fields that say nothing about the source
HEADLESS = (ast.operator, ast.unaryop, ast.cmpop, ast.boolop)
SPLICED = (
    ast.Call,
    ast.Tuple,
    ast.List,
    ast.Set,
    ast.Assign,
    ast.Delete,
    ast.Import,
    ast.Global,
    ast.Nonlocal,
)  # their lists need no brackets


class Pair(NamedTuple):
    task: str  # "ast", "rename" or "doc"
    source: str
    text: str


class Unprintable(ValueError):
    """A statement whose tree holds text of several lines."""


def s_expression(code: str) -> str:
    """The syntax tree of one statement. Names, constants and f-strings stand as they are written.

    Raises:
        Unprintable: a constant spans lines.
    """
    (statement,) = ast.parse(code).body
    return _printed(statement, code)


def _printed(node: object, code: str) -> str:
    if isinstance(node, (ast.Constant, ast.JoinedStr)):
        written = ast.get_source_segment(code, node)
        if written is None or "\n" in written:
            raise Unprintable("a constant spans lines")
        return written
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, (list, tuple)):
        return f"[{' '.join(_printed(each, code) for each in node)}]"
    if isinstance(node, ast.arg) and node.annotation is None:
        return node.arg
    if isinstance(node, ast.alias):
        return node.name if node.asname is None else f"(As {node.name} {node.asname})"
    if isinstance(node, ast.Expr):
        return _printed(node.value, code)
    if isinstance(node, HEADLESS):
        return type(node).__name__
    if not isinstance(node, ast.AST):
        return str(node)
    return f"({' '.join(_parts(node, code))})"


def _parts(node: ast.AST, code: str) -> list[str]:
    if isinstance(node, ast.BinOp):
        return [type(node.op).__name__, _printed(node.left, code), _printed(node.right, code)]
    if isinstance(node, ast.UnaryOp):
        return [type(node.op).__name__, _printed(node.operand, code)]
    if isinstance(node, ast.BoolOp):
        return [type(node.op).__name__, *(_printed(each, code) for each in node.values)]
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return [type(node.ops[0]).__name__, _printed(node.left, code), _printed(node.comparators[0], code)]
    fields = [value for name, value in ast.iter_fields(node) if name not in LEFT_OUT]
    while fields and fields[-1] in (None, [], 0):
        fields.pop()
    name = type(node).__name__
    parts = [name[0].upper() + name[1:]]
    for value in fields:
        spliced = isinstance(value, list) and isinstance(node, SPLICED)
        parts.extend(_printed(each, code) for each in value) if spliced else parts.append(_printed(value, code))
    return parts


def of_file(file: SourceFile, task: str, limits: Task, names: Sequence[str], *, both: bool = False) -> Iterator[Pair]:
    """Pairs of one file, in a random order; `names` are what variables are renamed to, and `both` asks for each statement twice."""
    chance = random.Random(f"{SEED} {file.path}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(file.text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = file.text.splitlines()
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef if task == "doc" else ast.stmt)]
    chance.shuffle(found)
    made, seen = 0, set()
    for node in found:
        code = None if task == "ast" and isinstance(node, COMPOUND) else _dedented(node, lines)
        if code is None or code in seen or chance.random() * LIKELY > len(code):
            continue
        seen.add(code)
        if isinstance(node, ast.FunctionDef) and task == "doc":
            pairs = list(_documented(node, code))
        else:
            pairs = list(_translated(code, limits, names, chance, both))
        yield from pairs
        made += bool(pairs)
        if made == limits.per_file:
            return


def variables(file: SourceFile) -> set[str]:
    """Names that stand for variables in a file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {node.id for node in ast.walk(ast.parse(file.text)) if isinstance(node, ast.Name)}
    except (SyntaxError, ValueError, RecursionError):
        return set()


def renamed(code: str, old: str, new: str) -> str | None:
    """The statement with a variable renamed; None where `old` also is something else (an attribute, a keyword, a word of a string)."""
    uses = sum(isinstance(node, ast.Name) and node.id == old for node in ast.walk(ast.parse(code)))
    word = re.compile(rf"\b{re.escape(old)}\b")
    if not uses or len(word.findall(code)) != uses:
        return None
    return word.sub(new, code)


def _translated(code: str, limits: Task, names: Sequence[str], chance: random.Random, both: bool) -> Iterator[Pair]:
    try:
        statement = ast.parse(code).body[0]
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return  # a docstring
        tree = s_expression(code)
    except (Unprintable, SyntaxError, ValueError, RecursionError):
        return
    pair = None
    if both or chance.random() < limits.renames:
        own = sorted({node.id for node in ast.walk(statement) if isinstance(node, ast.Name)})
        new = chance.choice(names)
        if own and not re.search(rf"\b{re.escape(new)}\b", code):
            old = chance.choice(own)
            text = renamed(code, old, new)
            pair = text and Pair("rename", f"rename {old} {new}: {code}", text)
    if pair:
        yield pair
    if both or not pair:
        yield Pair("ast", code, tree)


def _dedented(node: ast.stmt, lines: Sequence[str]) -> str | None:
    """The statement as it is written, without its indentation; None for one with comments, or beside another on a line."""
    first, last, indent = node.lineno - 1, node.end_lineno, node.col_offset
    written = lines[first:last]
    if written[0][:indent].strip() or "#" in "".join(written) or any(line.strip() and line[:indent].strip() for line in written[1:]):
        return None
    code = "\n".join(line[indent:] for line in written).rstrip()
    if len(code) > FUNCTION_CHARACTERS or not code.isascii() or "\t" in code:
        return None
    if not isinstance(node, COMPOUND) and (len(code) > CHARACTERS or len(code) < 8 or code.endswith(";")):
        return None
    return code


def _documented(node: ast.FunctionDef, code: str) -> Iterator[Pair]:
    written, body = ast.get_docstring(node), node.body
    if written is None or len(body) < 2:
        return
    sentence = re.split(r"(?<=\.)\s|\n\s*\n", " ".join(written.split("\n\n")[0].split()), maxsplit=1)[0].strip()
    if not 16 <= len(sentence) <= 160 or not sentence.isascii() or not sentence[0].isalpha():
        return
    lines = code.splitlines()
    start = node.lineno
    head, tail = body[0].lineno - start, (body[0].end_lineno or start) - start + 1
    yield Pair("doc", "\n".join([*lines[:head], *lines[tail:]]), sentence)
