"""A table once, shown on the terminal or written as Markdown; and the one document of a run, written as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """``rows`` of text under ``columns``; the first column is left-aligned, the others are figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def rich(self) -> RichTable:
        table = RichTable(title=self.title, title_justify="left", title_style="bold")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = [" | ".join(cells) for cells in (self.columns, rule, *self.rows)]
        return f"## {self.title}\n\n" + "\n".join(f"| {line} |" for line in lines) + "\n"


def show(tables: Sequence[Table], notes: Sequence[str], console: Console) -> None:
    for table in tables:
        console.print(table.rich())
    for note in notes:
        console.print(note, markup=False, highlight=False)


def write(folder: Path, name: str, document: dict[str, Any], tables: Sequence[Table], notes: Sequence[str], title: str) -> list[Path]:
    """``NAME.json`` and ``NAME.md`` in ``folder``; returns both paths."""
    folder.mkdir(parents=True, exist_ok=True)
    text = [f"# {title}\n", *(f"{note}\n" for note in notes), *(table.markdown() for table in tables)]
    paths = [folder / f"{name}.json", folder / f"{name}.md"]
    paths[0].write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    paths[1].write_text("\n".join(text), encoding="utf-8")
    return paths


def append_images(page: Path, images: Sequence[Path], *, otherwise: str) -> None:
    """Show ``images``, which lie beside ``page``, at its end; without any, say ``otherwise``."""
    shown = [f"![{image.stem}]({image.name})" for image in images] or [otherwise]
    with page.open("a", encoding="utf-8") as file:
        file.write("\n## Charts\n\n" + "\n\n".join(shown) + "\n")
