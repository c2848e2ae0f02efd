"""``foredraft skip search``: what a draft of ``draft-verify`` can leave out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli.checks import check_data, check_extra, check_model, check_output
from foredraft.cli.failures import INTERRUPTED
from foredraft.cli.options import Device, Dtype, Threads
from foredraft.files import read_text

app = typer.Typer(help="Find the sublayers of a model that the drafter draft-verify can do without.", no_args_is_help=True)


@app.callback()
def root() -> None:
    pass


@app.command()
def search(
    target: Annotated[str, typer.Option(help="The model: a path, a hub id, or zoo:NAME.", show_default=False)],
    data: Annotated[Path, typer.Option(metavar="FOLDER", help="Texts that it wrote, made by foredraft data generate.", show_default=False)],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the set goes; an existing file is replaced.", show_default=False)],
    trials: Annotated[int, typer.Option(min=1, metavar="N", help="Sets that are tried.")] = 200,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of answers that each trial reads.")] = 4096,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
    finalists: Annotated[int, typer.Option(min=0, help="Time so many of the best sets; 0 stores the one with the best prediction.")] = 10,
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default="measured",
            help="Seconds of sublayers, for instance from an earlier search's FILE. Nothing is timed then, and the same seed gives the "
            "same set.",
        ),
    ] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Accept incomplete data.")] = False,
    other_target: Annotated[bool, typer.Option("--other-target", help="Accept texts that another model wrote.")] = False,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Search the attention and MLP sublayers that a draft leaves out, for --drafter draft-verify:FILE.

    Sets are compared by predicted tokens per second, then the best are timed. Ctrl-C or SIGTERM stores the best set so far.

    Exit codes: 0 success, 1 failure while running, 2 invalid arguments, 130 interrupted.
    """
    given = dict(locals())
    check_model(target, dtype, device)
    check_data([data])
    check_output(out)
    if costs is not None:
        read_text(costs)
    for module in ("optuna", "scipy"):
        check_extra(module, "search", "foredraft skip search")
    from foredraft.cli.generation import pick_device
    from foredraft.training.skips import run

    if not run(**{**given, "device": pick_device(device, target)}, report=typer.echo):
        raise typer.Exit(INTERRUPTED)
