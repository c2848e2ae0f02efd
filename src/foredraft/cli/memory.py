"""``foredraft memory``: what a row's key-value cache costs, by a model's configuration alone, and how many rows fit into some memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group

from foredraft.cli.checks import check_model, check_output
from foredraft.cli.failures import write_json, writing
from foredraft.cli.options import OUTPUT, Dtype, JsonFile, grouped, panel
from foredraft.cli.progress import Progress
from foredraft.cli.tables import console, filled, in_markdown
from foredraft.errors import ConfigurationError
from foredraft.models.cache_sizes import CacheSizes, LayerKind, in_words, parse_memory
from foredraft.models.pages import PAGE

ROWS = panel("Rows")
LENGTHS: Any = (1000, 4000, 30000)
KINDS = ("model", "layers", "kind", ">per token", f">per {PAGE} tokens", ">per row")


@dataclass(frozen=True)
class Setting:
    """The options of the same names."""

    tokens: Annotated[list[int], ROWS(min=1, help="Tokens of a row; repeat for more.")] = LENGTHS
    source: Annotated[int, ROWS(min=1, help="Tokens of its source, for models with an encoder.")] = 500
    tree: Annotated[int, ROWS(min=1, help="Nodes of the largest tree, which layers with a window keep beside it.")] = 64
    cache_memory: Annotated[
        str | None, ROWS(metavar="SIZE", help="Say how many rows fit into this: 6GiB, 500MiB, 2GB.", show_default=False)
    ] = None


@dataclass(frozen=True)
class Row:
    """What one row of so many tokens takes: with every token in every layer, and where layers with a window give back what lies before
    it. ``fit`` and ``fit_windows`` are how many such rows the memory holds, None where none was given."""

    tokens: int
    bytes: int
    bytes_windows: int
    fit: int | None
    fit_windows: int | None


@grouped
def memory(
    *,
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL", help="A path, a hub id, or zoo:NAME. A folder with a config.json is enough.", show_default=False),
    ],
    dtype: Dtype = "auto",
    setting: Setting,
    as_json: JsonFile = None,
    markdown: Annotated[Path | None, OUTPUT(metavar="FILE", help="Write the tables as Markdown.", show_default=False)] = None,
) -> None:
    """Say what a row's key-value cache costs: bytes per token by kind of layer, bytes of rows, and how many rows fit into a memory.

    Only the configuration is read. One token goes through the model without its weights, and the shapes of what it caches are counted.

    Exit codes: 0 success, 2 invalid arguments.
    """
    room = memory_of(setting.cache_memory)
    for each in models:
        check_model(each, dtype, encoders=True)
    for path in (as_json, markdown):
        check_output(path)
    with Progress("measuring") as progress:
        from foredraft.models.cache_measuring import measure

        found = {}
        for each in models:
            progress.show(f"measuring {each}")
            found[each] = measure(each, dtype)
        tables = [kinds_table(found), rows_table(setting, found, room)]
        if as_json is not None:
            write_json(as_json, document(setting, found, room))
        if markdown is not None:
            with writing(markdown):
                markdown.write_text("\n".join(in_markdown(*each) for each in tables), encoding="utf-8")
    console().print(Group(filled(*tables[0]), "", filled(*tables[1])), soft_wrap=True)


def memory_of(text: str | None) -> int | None:
    """Bytes.

    Raises:
        ConfigurationError: no size; a part of a memory is one of a device's, at which nobody looks here.
    """
    if text is None:
        return None
    size = parse_memory(text)
    if not isinstance(size, int):
        raise ConfigurationError(f"--cache-memory takes a size here, such as 6GiB, 500MiB or 2GB; {text!r} depends on the machine")
    return size


def rows_of(setting: Setting, sizes: CacheSizes, room: int | None) -> list[Row]:
    found = []
    for tokens in setting.tokens:
        both = [sizes.row_bytes(tokens, source=setting.source, tree=tree) for tree in (None, setting.tree)]
        found.append(Row(tokens, *both, *(None if room is None else room // each for each in both)))
    return found


def document(setting: Setting, found: dict[str, CacheSizes], room: int | None) -> dict[str, Any]:
    """Everything, for JSON."""
    own = {"page": PAGE, "source": setting.source, "tree": setting.tree, "cache_memory": room}
    models = [
        {
            "model": name,
            **asdict(sizes),
            "token_bytes": sizes.token_bytes,
            "page_bytes": sizes.page_bytes,
            "state_bytes": sizes.state_bytes,
            "source_token_bytes": sizes.source_token_bytes,
            "rows": [asdict(each) for each in rows_of(setting, sizes, room)],
        }
        for name, sizes in found.items()
    ]
    return {"schema": 1, "report": "memory", **own, "models": models}


# -- what is shown ----------------------------------------------------------------------------------------------------------

Lines = tuple[Sequence[str], list[list[str]]]  # titles, of which those of figures begin with >, and cells


def kinds_table(found: dict[str, CacheSizes]) -> Lines:
    lines = []
    for name, sizes in found.items():
        what = f"{sizes.model_type}, {sizes.dtype}"
        cells = [*map(kind_cells, sizes.kinds), total_cells(sizes)]
        lines += [[title, *own] for title, own in zip([name, what, *[""] * len(cells)], cells)]
    return KINDS, lines


def kind_cells(kind: LayerKind) -> list[str]:
    name = kind.name if kind.window is None else f"{kind.name} of {kind.window:,} tokens"
    keys = [kind.token_bytes, PAGE * kind.token_bytes]
    return [str(kind.layers or "–"), name, *map(amount, (*keys, kind.state_bytes))]


def amount(size: int) -> str:
    return in_words(size) if size else "–"


def total_cells(sizes: CacheSizes) -> list[str]:
    figures = (sizes.token_bytes, sizes.page_bytes, sizes.state_bytes)
    layers = sum(each.layers for each in sizes.kinds if not each.of_source)
    return [str(layers), "all but the source" if sizes.source_token_bytes else "all", *map(amount, figures)]


def rows_table(setting: Setting, found: dict[str, CacheSizes], room: int | None) -> Lines:
    titles = ["model", ">tokens", ">a row takes", ">if window pages are freed"]
    if room is not None:
        titles += [f">rows in {setting.cache_memory}", ">rows if window pages are freed"]
    lines = []
    for name, sizes in found.items():
        for title, each in zip([name, *[""] * len(setting.tokens)], rows_of(setting, sizes, room)):
            length = f"{each.tokens:,}" + (f" + {setting.source:,} of the source" if sizes.source_token_bytes else "")
            line = [title, length, in_words(each.bytes), in_words(each.bytes_windows) if sizes.windowed else "–"]
            if room is not None:
                line += [f"{each.fit:,}", f"{each.fit_windows:,}" if sizes.windowed else "–"]
            lines.append(line)
    return titles, lines
