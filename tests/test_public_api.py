"""What users build on: the names of the package, their signatures, the registered names, the command line. ``public_api.txt`` holds it."""

import difflib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

import foredraft
from foredraft.cli import app

COMMITTED = Path(__file__).with_name("public_api.txt")
UPDATE = "python tests/test_public_api.py"


def signature(called: Any) -> str:
    found = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(called)))
    return found.replace(" cache: transformers.", " past_key_values: transformers.")  # as transformers before 5.24 has it


def members(cls: type) -> Iterator[str]:
    """Methods, properties and attributes with annotations, those of bases in the package included."""
    found: dict[str, str] = {}
    for each in reversed([base for base in cls.__mro__ if base.__module__.startswith("foredraft.")]):
        found |= {name: f"{name}: {kind}" for name, kind in inspect.get_annotations(each).items()}
        for name, member in vars(each).items():
            if isinstance(member, (classmethod, staticmethod)):
                found[name] = f"{type(member).__name__} {name}{signature(member.__func__)}"
            elif isinstance(member, property):
                found[name] = f"property {name}"
            elif inspect.isfunction(member):
                found[name] = f"{name}{signature(member)}"
    yield from (f"    {line}" for name, line in sorted(found.items()) if not name.startswith("_"))


def names() -> Iterator[str]:
    for name in sorted(foredraft.__all__):
        value = getattr(foredraft, name)
        if isinstance(value, ModuleType):
            yield f"module {name}"
            public = [each for each in getattr(value, "__all__", []) if each not in foredraft.__all__]
            for each in sorted(public):
                thing = getattr(value, each)
                yield f"    {each}{signature(thing)}" if inspect.isfunction(thing) else f"    {each}"
        elif inspect.isclass(value):
            yield f"class {name}{signature(value) if inspect.isfunction(value.__init__) else ''}"
            yield from members(value)
        elif callable(value):
            yield f"{name}{signature(value)}"
        else:
            yield name


def commands(command: Any, path: str) -> Iterator[str]:
    yield path
    for option in command.params:
        if option.name != "help":
            yield f"    {' '.join([*option.opts, *option.secondary_opts])}{' (required)' if option.required else ''}"
    for name, each in sorted(getattr(command, "commands", {}).items()):
        yield from commands(each, f"{path} {name}")


def public_api() -> str:
    parts = (
        ("Names", names()),
        ("Drafters", foredraft.drafters.names()),
        ("Rules", foredraft.rules.names()),
        ("Commands", commands(typer.main.get_command(app), "foredraft")),
    )
    return "\n\n".join(f"# {title}\n" + "\n".join(lines) for title, lines in parts) + "\n"


def test_the_public_api_is_the_committed_one():
    committed, found = COMMITTED.read_text().splitlines(), public_api().splitlines()
    changes = "\n".join(difflib.unified_diff(committed, found, "committed", "found", lineterm="", n=0))
    assert not changes, f"the public API has changed. If that is intended, write a line in CHANGELOG.md and run {UPDATE!r}:\n{changes}"


if __name__ == "__main__":
    COMMITTED.write_text(public_api())
