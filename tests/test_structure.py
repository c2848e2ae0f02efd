"""The public API is flat and lazy, and imports point one way.

An import counts wherever it stands: in a function, for type checkers alone, or as ``import_module`` of a fixed name. The registries, which
name a drafter, a rule or a kind of head by a string, do not count.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import faults

import foredraft

SOURCE = Path(foredraft.__file__).parent
ROOTS = {name: SOURCE if name == "foredraft" else SOURCE.parents[1] / name for name in ("foredraft", "benchmarks", "recipes")}
LAYERS = [
    {
        "errors",
        "estimates",
        "caching",
        "files",
        "grammars",
        "device",
        "describing",
        "detokenizer",
        "speedup",
        "stats",
        "theory",
        "inflation",
        "registry",
        "shapes",
        "tree",
        "turns",
    },
    {"zoo"},
    {"hub"},
    {"logits"},
    {"models", "verification", "quantization", "loading"},
    {"backends"},
    {"target"},
    {"heads"},
    {"traces", "guesses", "losses"},
    {"outcome", "rows"},
    {"drafters"},
    {"planning", "checks"},
    {"admission", "observer", "choices"},
    {"round"},
    {"session", "testing"},
    {"preparation"},
    {"text"},
    {"speculator"},
    {"auditing", "training", "attachment", "serving"},
    {"__init__"},  # the public API
    {"cli", "__main__"},
    {"benchmarks", "recipes"},
]
KNOWN_CIRCLES: list[set[str]] = []
KNOWN_UPWARDS: set[tuple[str, str]] = set()


@cache
def modules() -> dict[str, Path]:
    """Every module of the package, the benchmarks and the recipes, by name."""
    found = {}
    for name, root in ROOTS.items():
        for file in sorted(root.rglob("*.py")):
            parts = [name, *file.relative_to(root).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(source: str, package: str) -> Iterator[str]:
    """The names that ``source`` imports, in a module of ``package``: of ``from x import y`` the name ``x.y``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            yield from (".".join([*base, *([node.module] if node.module else []), alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and isinstance(node.args[0], ast.Constant):
            yield str(node.args[0].value)


def module_of(name: str) -> str | None:
    """The module in which ``name`` is found; None for other packages' names."""
    package, _, attribute = name.rpartition(".")
    if package == "foredraft" and attribute in foredraft._HOMES:
        return foredraft._HOMES[attribute].partition(":")[0]
    return next((each for each in (name, package) if each in modules()), None)


@cache
def graph() -> dict[str, set[str]]:
    """Each module, and the modules that it imports."""
    edges = {}
    for name, file in modules().items():
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        edges[name] = {found for each in imported(file.read_text(encoding="utf-8"), package) if (found := module_of(each))} - {name}
    return edges


def circles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of more than one module: modules that reach each other."""

    def reached(start: str) -> set[str]:
        seen, stack = set(), [start]
        while stack:
            for following in edges.get(stack.pop(), set()) - seen:
                seen.add(following)
                stack.append(following)
        return seen

    reach = {name: reached(name) for name in edges}
    found: list[set[str]] = []
    for name in edges:
        if name in reach[name] and not any(name in each for each in found):
            found.append({other for other in reach[name] if name in reach.get(other, set())})
    return found


def layer(module: str) -> int:
    package, _, rest = module.partition(".")
    room = package if package != "foredraft" else rest.partition(".")[0] or "__init__"
    return next(index for index, rooms in enumerate(LAYERS) if room in rooms)


def test_imports_point_one_way():
    assert len(graph()) > 100 and any(graph().values())
    upwards = [(module, each) for module, found in graph().items() for each in found if layer(each) > layer(module)]
    assert not set(upwards) - KNOWN_UPWARDS, "modules that must not import those"
    drafters = {module: found for module, found in graph().items() if module.startswith("foredraft.drafters")}
    assert len(drafters) > 10
    rules = [(module, each) for module, found in drafters.items() for each in found if each.startswith("foredraft.verification")]
    assert not rules, "drafters know trees, not rules"


def test_no_modules_import_each_other():
    assert [sorted(each) for each in circles(graph()) if not any(each <= known for known in KNOWN_CIRCLES)] == []


def test_circles_and_hidden_imports_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"f"}, "f": {"e"}}) == [{"b", "c"}, {"e", "f"}]
    hidden = "if TYPE_CHECKING:\n from ..tree import TokenTree\ndef f():\n import a.b\n import_module('c.d')\n"
    assert sorted(imported(hidden, "foredraft.target")) == ["a.b", "c.d", "foredraft.tree.TokenTree"]
    assert module_of("foredraft.tree.TokenTree") == module_of("foredraft.TokenTree") == "foredraft.tree" and module_of("torch.nn") is None


def test_everything_public_is_there_and_documented():
    assert set(foredraft.__all__) - {"__version__"} == set(foredraft._HOMES)
    for name in foredraft._HOMES:
        assert getattr(foredraft, name).__doc__, name


def test_planted_faults_are_in_the_source_and_their_tests_exist():
    """What make mutants changes, one at a time."""
    assert [why for fault in faults.FAULTS if isinstance(why := faults.place(fault), str)] == []
    assert all((faults.ROOT / test).exists() for fault in faults.FAULTS for test in fault.tests)


def test_import_is_fast_because_it_loads_no_torch():
    code = "import foredraft, sys; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'heavy'"
    subprocess.run([sys.executable, "-c", code], check=True)
