"""The command line: a command for each suite, with the options that its settings name."""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks import SUITES, environment, find, report
from benchmarks import suites as prompt_suites
from benchmarks.suite import Suite
from foredraft.errors import ForedraftError

WIDE = 180  # columns, where the tables go to a file or a pipe

app = typer.Typer(help="Benchmarks of Foredraft.", no_args_is_help=True, add_completion=False)


@app.callback()
def benchmarks() -> None:
    """Benchmarks of Foredraft."""


@app.command()
def suites(
    out: Annotated[Path, typer.Option(file_okay=False, help="The folder that NAME.jsonl of each suite is written into.")],
) -> None:
    """Write suites of prompts made from the text of Python's own library: edits, completions, and chats that repeat themselves.

    Run them with `speed --prompts out/edit.jsonl`.
    """
    with _configured():
        for name, count in prompt_suites.write(out).items():
            typer.echo(f"{out / name}.jsonl: {count} prompts")


@app.command()
def render(
    documents: Annotated[list[Path], typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="NAME.json.gz of earlier runs.")],
) -> None:
    """Write the page of a report again from its raw data, with the charts that lie beside it."""
    for path in documents:
        document = report.load(path)
        page = path.with_name(path.name.removesuffix(report.SUFFIX) + ".md")
        suite = find(document["suite"]).read(document)
        page.write_text(suite.report(document, document.get("charts")).markdown(), encoding="utf-8")
        typer.echo(f"wrote {page}")


def _command(suite: type[Suite[Any]]) -> None:
    """Add the command of ``suite``."""
    hints = get_type_hints(suite.settings_type)
    settings = [each for each in fields(suite.settings_type) if each.metadata]
    parameters = [_parameter(each.name, _type(hints[each.name]), _default(each), _option(each)) for each in settings]
    if suite.quick:
        words = ", ".join(f"{name} {'none' if value == () else value}" for name, value in suite.quick.items())
        parameters.append(_parameter("quick", bool, False, typer.Option("--quick", help=f"Does it work here? Takes {words}.")))
    out = typer.Option(file_okay=False, help="Write NAME.json.gz, NAME.md and charts into this folder.")
    parameters += [
        _parameter("out", Path | None, None, out),
        _parameter("name", str, suite.name, typer.Option(help="Of the files, for runs that are kept side by side.")),
        _parameter("as_json", bool, False, typer.Option("--json", help="Print the document instead of the tables.")),
        _parameter("strict", bool, False, typer.Option("--strict", help="Exit with 1 also when a figure is missed.")),
    ]

    def command(
        invocation: typer.Context, out: Path | None, name: str, as_json: bool, strict: bool, quick: bool = False, **given: Any
    ) -> None:
        left = [each for each in given if getattr(invocation.get_parameter_source(each), "name", "") == "DEFAULT"]
        given |= {each: value for each, value in suite.quick.items() if quick and each in left}
        given |= {each: value for each, value in suite.on_gpu.items() if given["device"] != "cpu" and each in left}
        with _configured():
            run = suite(suite.settings_type(**{each: _value(value) for each, value in given.items()}))
            where = _with_progress(run)
        _report(run, where, out=out, name=name, as_json=as_json)
        missed = strict and any(figure.verdict == "missed" for figure in run.figures())
        raise typer.Exit(1 if run.failed() or missed else 0)

    command.__doc__ = suite.__doc__
    parameters.append(inspect.Parameter("invocation", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    app.command(suite.name)(command)


def _parameter(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _type(hint: Any) -> Any:
    """A field's type as an option's: repeated options are lists."""
    return list[hint.__args__[0]] if getattr(hint, "__origin__", None) is tuple else hint  # type: ignore[name-defined]


def _default(each: Field[Any]) -> Any:
    return list(each.default) if isinstance(each.default, tuple) else each.default


def _option(each: Field[Any]) -> Any:
    said: Mapping[str, Any] = each.metadata
    repeated = " May be repeated; none for nothing." if isinstance(each.default, tuple) else ""
    names = [said["flag"]] if said["flag"] else []
    return typer.Option(*names, help=said["help"] + repeated, min=said["least"], metavar=said["metavar"])


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return () if value == ["none"] else tuple(value)
    return value


@contextmanager
def _configured() -> Iterator[None]:
    """What cannot work as asked ends the command with exit code 2."""
    try:
        yield
    except ForedraftError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(2) from None


def _report(run: Suite[Any], where: Mapping[str, Any], *, out: Path | None, name: str, as_json: bool) -> None:
    """Show what a run found, and write it down."""
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else WIDE)
    document = run.document(command=shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]), environment=where)
    if as_json:
        typer.echo(json.dumps(document, indent=1))
    else:
        run.report(document).show(console)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        document["charts"] = run.charts(out, name)
        raw, page = out / f"{name}{report.SUFFIX}", out / f"{name}.md"
        report.save(raw, document)
        page.write_text(run.report(document, document["charts"]).markdown(), encoding="utf-8")
        for path in (raw, page):
            console.print(f"wrote {path}", markup=False, highlight=False)


def _with_progress(run: Suite[Any]) -> dict[str, Any]:
    """Run, with a bar on the error stream that is drawn between measurements only: a drawing thread would disturb them. Returns where it
    ran."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        task = progress.add_task(run.name)

        def advance() -> None:
            progress.update(task, advance=1, refresh=True)

        run.advance = advance
        progress.update(task, total=run.steps, refresh=True)
        where = {**environment.describe(run.settings.device), "threads": run.settings.threads}
        run.run()
        return where


for _name in SUITES:
    _command(find(_name))
