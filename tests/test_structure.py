"""The public API is flat and lazy, and imports point one way."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import foredraft

SOURCE = Path(foredraft.__file__).parent
LAYERS = [
    {"errors", "caching", "files", "device", "tree", "stats"},
    {"shapes"},
    {"logits"},
    {"models", "verification", "quantization", "loading"},
    {"backends"},
    {"target"},
    {"heads"},
    {"judgement", "rows"},
    {"drafters"},
    {"planning", "checks"},
    {"session", "testing"},
    {"preparation"},
    {"speculator"},
    {"auditing", "training"},
    {"cli", "__main__"},
]


def layer(room: str) -> int:
    return next(index for index, rooms in enumerate(LAYERS) if room in rooms)


def home(name: str) -> str:
    """The module that a name of the public API lives in."""
    return foredraft._HOMES.get(name, f"foredraft.{name}").partition(":")[0]


def rooms_imported(file: Path) -> set[str]:
    """Rooms of the package that ``file`` imports when it is imported; what only type checkers see does not count."""
    names: set[str] = set()
    package = ["foredraft", *file.relative_to(SOURCE).parts[:-1]]
    stack: list[ast.AST] = [ast.parse(file.read_text())]
    while stack:
        for node in ast.iter_child_nodes(stack.pop()):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) + 1 - node.level] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                names |= {home(alias.name) for alias in node.names} if module == "foredraft" else {module}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                stack.append(node)
    return {name.split(".")[1] for name in names if name.startswith("foredraft.") and name != "foredraft.__version__"}


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_point_one_way(file: Path):
    room = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room in ("__init__", "zoo"):
        return
    for imported in rooms_imported(file) - {room, "zoo"}:
        assert layer(imported) <= layer(room), f"{room} must not import {imported}"
    assert not (room == "drafters" and "verification" in rooms_imported(file)), "drafters know trees, not rules"


def test_the_package_imports_no_instrument():
    pattern = re.compile(r"^\s*(?:from|import) (?:benchmarks|recipes|tests)\b", re.MULTILINE)
    assert pattern.search("    from benchmarks import speed")
    assert not [str(file) for file in SOURCE.rglob("*.py") if pattern.search(file.read_text())]


def test_everything_public_is_there_and_documented():
    assert set(foredraft.__all__) - {"__version__"} == set(foredraft._HOMES)
    for name in foredraft._HOMES:
        assert getattr(foredraft, name).__doc__, name


def test_import_is_fast_because_it_loads_no_torch():
    code = "import foredraft, sys; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'heavy'"
    subprocess.run([sys.executable, "-c", code], check=True)
