"""A report: shown on the terminal, written as Markdown beside the compressed document that it follows from."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

SUFFIX = ".json.gz"


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


@dataclass(frozen=True)
class Report:
    """A page. ``charts`` are names of images beside it: None for a suite without any, none of them where they could not be drawn."""

    title: str
    notes: Sequence[str]
    tables: Sequence[Table]
    charts: Sequence[str] | None = None

    def markdown(self) -> str:
        text = [f"# {self.title}\n", *(f"{note}\n" for note in self.notes), *(table.markdown() for table in self.tables)]
        if self.charts is not None:
            shown = [f"![{Path(name).stem}]({name})" for name in self.charts] or [NO_CHARTS]
            text.append("## Charts\n\n" + "\n\n".join(shown) + "\n")
        return "\n".join(text)

    def show(self, console: Console) -> None:
        for table in self.tables:
            console.print(table.rich())
        for note in self.notes:
            console.print(note, markup=False, highlight=False)


NO_CHARTS = "No charts: matplotlib is not installed (pip install 'foredraft[plot]')."


def save(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``document`` compressed; the same document makes the same bytes."""
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def load(path: Path) -> dict[str, Any]:
    return dict(json.loads(gzip.decompress(path.read_bytes())))
