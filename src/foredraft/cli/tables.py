"""``foredraft models``, ``drafters`` and ``rules``: what there is, read from the registries."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from foredraft import drafters, verification, zoo

if TYPE_CHECKING:
    from foredraft.tree import Proposal

PIPED_WIDTH = 140


def console() -> Console:
    """Stdout; wide enough for whole lines where no terminal says how wide it is."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)


def models() -> Table:
    table = new_table("model", "kind", ">parameters", ">on disk", ">bits per byte", "")
    for model in zoo.describe():
        bits = "–" if model.bits_per_byte is None else f"{model.bits_per_byte:.3f}"
        count = f"{model.parameters:,}" + (" n-grams" if model.kind == "ngram" else "")
        size = f"{model.size / 1e6:.1f} MB" if model.size else "–"
        kind = "benchmark instrument" if model.kind == "inflated" else model.kind
        add_row(table, zoo.PREFIX + model.name, kind, count, size, bits, model.description)
    return table


def all_drafters() -> Table:
    table = new_table("drafter", "options and defaults", "")
    for name in drafters.names():
        takes = "\n".join(_option(option) for option in drafters.options(name).values()) or "–"
        add_row(table, name, takes, drafters.describe(name).summary)
    return table


def one_drafter(name: str) -> Text:
    """Everything about one drafter.

    Raises:
        ConfigurationError: no such drafter.
    """
    known = drafters.describe(name)
    options = drafters.options(name)
    usage = f"--drafter {name}" + (":SOURCE" if "source" in options else "")
    usage += "".join(f" [--drafter-option {key}=…]" for key in options if key != "source")
    lines = [f"{name}: {known.summary}", f"proposals: {', '.join(known.proposals)}", f"usage: {usage}", ""]
    lines += [f"  {_option(option)}" for option in options.values()]
    lines += ["", known.doc]
    return Text("\n".join(lines).strip())


def rules() -> Table:
    table = new_table("rule", "lossless", "exact for proposals", "")
    for name in verification.names():
        rule = verification.describe(name)
        exact = ", ".join(sorted(rule.proposals)) + (" (chains only)" if rule.chains_only else "") if rule.lossless else "none"
        add_row(table, name, "yes" if rule.lossless else "LOSSY", exact, rule.summary)
    add_row(table, "auto", "yes", "", f"whichever accepts most: {_automatic(verification.AUTO)}")
    return table


def _automatic(choices: Mapping[Proposal, tuple[str, str]]) -> str:
    kinds: dict[str, list[str]] = {}
    for proposal, rules in choices.items():
        for rule, where in zip(rules, ("chains", "trees")):
            kinds.setdefault(rule, []).append(proposal if rules[0] == rules[1] else f"{proposal} {where}")
    return "; ".join(f"{rule} for {', '.join(dict.fromkeys(proposals))}" for rule, proposals in kinds.items())


def _option(option: inspect.Parameter) -> str:
    return f"{option.name} (required)" if option.default is inspect.Parameter.empty else f"{option.name}={option.default!r}"


def new_table(*titles: str) -> Table:
    """A plain table; ``>`` before a title sets its column to the right, and a column without a title may wrap."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for title in titles:
        bare = title.removeprefix(">")
        table.add_column(bare, justify="right" if bare != title else "left", no_wrap=bool(bare))
    return table


def add_row(table: Table, *cells: str) -> None:
    """Cells are text, never markup."""
    table.add_row(*map(Text, cells))


def filled(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    table = new_table(*titles)
    for line in lines:
        add_row(table, *line)
    return table


def in_markdown(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """The same table for a file."""
    rule = ["---:" if each.startswith(">") else "---" for each in titles]
    rows = [[each.removeprefix(">") for each in titles], rule, *([cell.replace("|", r"\|") for cell in line] for line in lines)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
