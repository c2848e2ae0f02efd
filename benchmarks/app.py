"""The command line of the benchmarks; each suite is a command."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

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
    from benchmarks import suites as made

    with _configured():
        for name, count in made.write(out).items():
            typer.echo(f"{out / name}.jsonl: {count} prompts")


@app.command()
def overhead(
    target: Annotated[str, typer.Option(help="A path, a hub id or zoo:NAME.")] = "zoo:python-300m",
    draft: Annotated[str, typer.Option(help="The draft model, with the target's tokenizer.")] = "zoo:python-1m",
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or float16.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 2,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt.")] = 64,
    prompts: Annotated[int, typer.Option(min=1, max=5, help="How many of the five prompts.")] = 5,
    repeats: Annotated[int, typer.Option(min=1, help="Measured repeats, after the warm-up.")] = 5,
    draft_length: Annotated[int, typer.Option(min=1, help="γ, tokens drafted per round.")] = 5,
    max_ngram: Annotated[int, typer.Option(min=1, help="Longest match that prompt lookup tries, on both sides.")] = 3,
    noise_vocab_size: Annotated[int, typer.Option(min=2, help="Vocabulary of the noise section.")] = 150_000,
    noise_repeats: Annotated[int, typer.Option(min=0, help="Repeats of the noise section; 0 leaves it out.")] = 20,
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Write overhead.json and overhead.md into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document instead of the tables.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 also when a claim is missed.")] = False,
) -> None:
    """What a round costs outside the model's forward passes, beside transformers' own generation.

    Exits with 1 when something could not be measured; it is then listed as a failure and has no figures.
    """
    given = locals()
    from transformers.utils import logging

    from benchmarks import environment, overhead_report, report
    from benchmarks.overhead import Run, Settings

    settings = Settings(**{field.name: given[field.name] for field in fields(Settings)})
    logging.disable_progress_bar()
    run = _reported(Run, settings, environment.describe, overhead_report, report, out=out, as_json=as_json)
    missed = strict and any(claim.verdict == "missed" for claim in overhead_report.made(run))
    raise typer.Exit(1 if run.failures or missed else 0)


@app.command()
def verification(
    shape: Annotated[str, typer.Option(help="Shape of the trees, for rules that verify trees.")] = "product(4,3,4)",
    chain: Annotated[str, typer.Option(help="Shape for rules that verify chains only.")] = "chain(5)",
    vocab_size: Annotated[int, typer.Option(min=2, help="V.")] = 150_000,
    rows: Annotated[int, typer.Option(min=1, help="B.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of the sampling.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="Of the sampling.")] = 0.95,
    spread: Annotated[float, typer.Option(min=0.0, help="Standard deviation of the target's logits.")] = 3.0,
    error: Annotated[float, typer.Option(min=0.0, help="Standard deviation of the draft's logits against the target's.")] = 1.0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Measured repeats, after the warm-up.")] = 10,
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Write verification.json and verification.md into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document instead of the tables.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 when a claim is missed.")] = False,
) -> None:
    """What it takes to verify a tree over a large vocabulary, for every rule, processors included."""
    given = locals()
    from benchmarks import environment, report
    from benchmarks import verification as suite

    settings = suite.Settings(**{field.name: given[field.name] for field in fields(suite.Settings)})
    run = _reported(suite.Run, settings, environment.describe, suite, report, out=out, as_json=as_json)
    missed = strict and any(claim.verdict == "missed" for claim in suite.claims(run))
    raise typer.Exit(1 if missed else 0)


@app.command()
def kernels(
    target: Annotated[str, typer.Option(help="A path, a hub id or zoo:NAME.")] = "zoo:python-300m",
    configurations: Annotated[str, typer.Option(help="WEIGHTS/EXECUTION, separated by spaces; int8,DTYPE for weights of eight bits.")] = "",
    passes: Annotated[str, typer.Option(help="ROWSxNODES, separated by spaces.")] = "1x1 1x6 1x17 1x64 4x1 4x4 16x1 16x3",
    contexts: Annotated[str, typer.Option(help="Tokens in front, separated by spaces.")] = "64 400",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Measured repeats, after the warm-up.")] = 7,
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Write kernels.json and kernels.md into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document instead of the tables.")] = False,
) -> None:
    """What a pass takes in each execution and kind of weights, side by side."""
    given = locals()
    from benchmarks import environment, report
    from benchmarks import kernels as suite

    given["configurations"] = configurations or suite.CONFIGURATIONS
    settings = suite.Settings(**{field.name: given[field.name] for field in fields(suite.Settings)})
    _reported(suite.Run, settings, environment.describe, suite, report, out=out, as_json=as_json)


@app.command()
def hosts(
    target: Annotated[str, typer.Option(help="A path, a hub id or zoo:NAME.")] = "zoo:python-300m",
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or float16.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 2,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the text at the beginning.")] = 32768,
    drafters: Annotated[str, typer.Option(help="Drafters, separated by spaces; all that need no training, unless given.")] = "",
    members: Annotated[str, typer.Option(help="What several merges.")] = "suffix,ngram,rest",
    shapes: Annotated[str, typer.Option(help="Shapes, separated by spaces.")] = "chain(5) product(3,2,1,1)",
    kept: Annotated[int, typer.Option(min=1, help="Tokens that every round adds.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 30,
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Write hosts.json and hosts.md into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document instead of the tables.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 when a claim is missed.")] = False,
) -> None:
    """What drafters that need no training take on the host behind a long text, beside a pass of the target."""
    given = locals()
    from benchmarks import environment, report
    from benchmarks import hosts as suite

    given["drafters"] = drafters or suite.Settings.drafters
    settings = suite.Settings(**{field.name: given[field.name] for field in fields(suite.Settings)})
    run = _reported(suite.Run, settings, environment.describe, suite, report, out=out, as_json=as_json)
    raise typer.Exit(1 if strict and any(claim.verdict == "missed" for claim in suite.claims(run)) else 0)


@app.command()
def acceptance(
    target: Annotated[str, typer.Option(help="A path, a hub id or zoo:NAME.")] = "zoo:python-8m",
    draft: Annotated[str, typer.Option(help="The draft model, with the target's tokenizer.")] = "zoo:python-1m",
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 2,
    prompts: Annotated[int, typer.Option(min=1, help="Beginnings of files, all in one batch.")] = 25,
    seeds: Annotated[int, typer.Option(min=1, help="Continuations of each prompt.")] = 2,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens per continuation.")] = 64,
    chain: Annotated[str, typer.Option(help="Chains, separated by spaces.")] = "chain(5)",
    trees: Annotated[str, typer.Option(help="Static trees, separated by spaces.")] = "product(4,2,1) product(2,2,2)",
    grown: Annotated[
        str, typer.Option(help="Trees grown by probability, separated by spaces.")
    ] = "dynamic(depth=5,k=4,total=16) opt(total=16,depth=8,delta=0.05)",
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Write acceptance.json and acceptance.md into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document instead of the tables.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 when a claim is missed.")] = False,
) -> None:
    """Tokens kept per target pass under every rule at temperature 1, with confidence intervals."""
    given = locals()
    from transformers.utils import logging

    from benchmarks import acceptance_report, environment, report
    from benchmarks.acceptance import Run, Settings

    logging.disable_progress_bar()
    settings = Settings(**{field.name: given[field.name] for field in fields(Settings)})
    run = _reported(Run, settings, environment.describe, acceptance_report, report, out=out, as_json=as_json)
    missed = strict and any(claim.verdict == "missed" for claim in acceptance_report.claims(run))
    raise typer.Exit(1 if missed else 0)


@app.command()
def trees(
    target: Annotated[str, typer.Option(help="A path, a hub id or zoo:NAME.")] = "zoo:python-300m",
    draft: Annotated[str, typer.Option(help="The draft model, with the target's tokenizer.")] = "zoo:python-1m",
    dtype: Annotated[str, typer.Option(help="bfloat16, float32 or float16.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 2,
    shapes: Annotated[str, typer.Option(help="Separated by spaces.")] = "chain(4) product(4,1,1,1) dynamic(depth=4,k=4,total=16)",
    nodes: Annotated[int, typer.Option(min=1, help="Drafted nodes of the shapes that the claim is about.")] = 16,
    prompts: Annotated[int, typer.Option(min=1, max=5, help="How many of the five prompts.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds per prompt.")] = 12,
    repeats: Annotated[int, typer.Option(min=1, help="Measured repeats, after the warm-up.")] = 3,
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Write trees.json and trees.md into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document instead of the tables.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 when a claim is missed.")] = False,
) -> None:
    """What a round with a tree costs outside forward passes, and where that time goes."""
    given = locals()
    from transformers.utils import logging

    from benchmarks import environment, report, trees_report
    from benchmarks.trees import Run, Settings

    logging.disable_progress_bar()
    settings = Settings(**{field.name: given[field.name] for field in fields(Settings)})
    run = _reported(Run, settings, environment.describe, trees_report, report, out=out, as_json=as_json)
    missed = strict and any(claim.verdict == "missed" for claim in trees_report.claims(run))
    raise typer.Exit(1 if missed else 0)


@app.command()
def speed(
    target: Annotated[list[str] | None, typer.Option(help="A checkpoint folder or zoo:NAME; may be repeated.")] = None,
    draft: Annotated[str, typer.Option(help="The draft model, with the target's tokenizer.")] = "zoo:python-1m",
    dtype: Annotated[list[str] | None, typer.Option(help="bfloat16, float32; may be repeated. Both, unless given.")] = None,
    mode: Annotated[list[str] | None, typer.Option(help="plain, draft, lookup, compiled; may be repeated.")] = None,
    drafter: Annotated[
        list[str] | None, typer.Option(metavar="NAME[:SOURCE][;KEY=VALUE]", help="A further drafter of Foredraft's; may be repeated.")
    ] = None,
    rule: Annotated[list[str] | None, typer.Option(help="Of Foredraft's, where it samples; may be repeated.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Rows; may be repeated. 1, 4 and 16, unless given.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Of Foredraft's drafts, auto for the planner; may be repeated.")] = None,
    gamma: Annotated[list[int] | None, typer.Option(min=1, help="γ of the peers' drafts; may be repeated, the best counts.")] = None,
    ngram: Annotated[int, typer.Option(min=1, help="Longest match of prompt lookup, on all sides that can set it.")] = 3,
    peer: Annotated[list[str] | None, typer.Option(help="Who else takes part; may be repeated, none for nobody.")] = None,
    peers: Annotated[
        Path | None, typer.Option(file_okay=False, show_default="$FOREDRAFT_PEERS or .peers", help="Folder of the peers' environments.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option(file_okay=False, show_default="work, among the peers", help="Folder for checkpoints in every format.")
    ] = None,
    prompts: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="embedded, or a file in any format of benchmarks.datasets.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each category, at most.")] = 3,
    chat: Annotated[bool, typer.Option("--chat", help="Each turn is a user's message; apply the chat template.")] = False,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens per row.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Measured calls.")] = 3,
    warmups: Annotated[int, typer.Option(min=1, help="Calls before, of each contender.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="Above 0 Foredraft samples, and no peer takes part.")] = 0.0,
    worst: Annotated[bool, typer.Option(help="Also text that cannot be guessed.")] = True,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads of every contender.")] = 2,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a call has failed.")] = 120.0,
    patience: Annotated[float, typer.Option(min=1, help="Seconds after which loading or converting has failed.")] = 900.0,
    quick: Annotated[bool, typer.Option("--quick", help="2 prompts × 32 tokens × 1 repeat, batch 1, no hopeless text.")] = False,
    charts: Annotated[bool, typer.Option(help="Draw charts beside the report.")] = True,
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Write NAME.json, NAME.md and charts into this folder.")] = None,
    name: Annotated[str, typer.Option(help="Of the files, for runs that are kept side by side.")] = "speed",
    as_json: Annotated[bool, typer.Option("--json", help="Print the document instead of the tables.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 also when a figure is missed.")] = False,
) -> None:
    """Tokens per second beside transformers, vLLM, llama.cpp and OpenVINO GenAI, each in its own environment.

    Peers that are not installed (make peers) are rows that say so. Exits with 1 when something that is installed failed.
    """
    given = locals()
    from functools import partial

    from transformers.utils import logging

    from benchmarks import environment, report, speed_plots, speed_report
    from benchmarks.peer_process import peers_folder
    from benchmarks.speed import Run
    from benchmarks.speed_plan import ON_CUDA, Settings

    logging.disable_progress_bar()
    several = {"targets": target, "dtypes": dtype, "modes": mode, "drafters": drafter, "rules": rule, "batches": batch, "shapes": shape}
    several |= {"lengths": gamma, "prompts": prompts, "peers": peer}
    chosen: dict[str, Any] = {name: tuple(values) for name, values in several.items() if values}
    if device != "cpu":
        chosen.setdefault("peers", ON_CUDA)
        chosen.setdefault("modes", ("plain", "compiled", "draft", "lookup"))
    if chosen.get("peers") == ("none",):
        chosen["peers"] = ()
    if quick:
        chosen = {"batches": (1,), **chosen}
        given |= {"limit": min(limit, 2), "tokens": min(tokens, 32), "repeats": 1, "warmups": 1, "worst": False}
    single = ("draft", "ngram", "limit", "chat", "tokens", "repeats", "warmups", "temperature", "worst", "device", "threads", "timeout")
    where = peers_folder(peers)
    begin = partial(Run, peers=where, work=work or where / "work")
    with _configured():
        settings = Settings(**chosen, **{name: given[name] for name in single}, patience=patience)
    run = _reported(begin, settings, environment.describe, speed_report, report, out=out, as_json=as_json, name=name)
    if out is not None and charts:
        drawn = speed_plots.draw(run, out, name)
        report.append_images(out / f"{name}.md", drawn, otherwise=speed_plots.MISSING)
    failed = [each for each in run.failures if not each.message.startswith("not installed")]
    raise typer.Exit(1 if failed or (strict and speed_report.missed(run)) else 0)


@app.command()
def drafters(
    target: Annotated[
        list[str] | None, typer.Option(help="A checkpoint folder or zoo:NAME; may be repeated. zoo:python-300m, unless given.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bfloat16, float32; may be repeated. bfloat16, unless given.")] = None,
    drafter: Annotated[list[str] | None, typer.Option(help="May be repeated. All that need no training, unless given.")] = None,
    members: Annotated[str, typer.Option(metavar="NAME,NAME", help="What several merges.")] = "suffix,ngram,rest",
    gamma: Annotated[
        list[int] | None, typer.Option(min=1, help="γ of chains on both sides; may be repeated. 5 and 10, unless given.")
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(help="embedded, edit, completion, chat, or a file of prompts; may be repeated. All four, unless given."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Turns of each suite, at most.")] = 2,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens per turn.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Measured calls.")] = 3,
    warmups: Annotated[int, typer.Option(min=1, help="Calls before, of each contender.")] = 1,
    worst: Annotated[bool, typer.Option(help="Also text that cannot be guessed.")] = True,
    replayed: Annotated[
        str, typer.Option(help="Whose texts acceptance is measured on without a clock; none to leave it out.")
    ] = "zoo:python-8m",
    replay_limit: Annotated[int, typer.Option(min=1, help="Turns of each suite there, at most.")] = 6,
    replay_tokens: Annotated[int, typer.Option(min=2, help="New tokens per turn there.")] = 128,
    vllm: Annotated[bool, typer.Option(help="Beside vLLM's methods of the same kinds.")] = True,
    peers: Annotated[
        Path | None, typer.Option(file_okay=False, show_default="$FOREDRAFT_PEERS or .peers", help="Folder of the peers' environments.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option(file_okay=False, show_default="work, among the peers", help="Folder for checkpoints, suites and stores.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every contender.")] = 2,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a call has failed.")] = 120.0,
    patience: Annotated[float, typer.Option(min=1, help="Seconds after which loading has failed.")] = 900.0,
    quick: Annotated[bool, typer.Option("--quick", help="1 turn of each suite × 16 tokens × 1 repeat, without random text.")] = False,
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Write NAME.json and NAME.md into this folder.")] = None,
    name: Annotated[str, typer.Option(help="Of the files, for runs that are kept side by side.")] = "drafters",
    as_json: Annotated[bool, typer.Option("--json", help="Print the document instead of the tables.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 also when a figure is missed.")] = False,
) -> None:
    """The drafters that need no training, on four kinds of text: speed, acceptance, and vLLM's methods of the same kinds beside them.

    What is not installed (make peers) is a row that says so. Exits with 1 when something that is installed failed.
    """
    given = locals()
    from functools import partial

    from transformers.utils import logging

    from benchmarks import drafters_claims, drafters_report, environment, report
    from benchmarks.drafters import Run, Settings
    from benchmarks.peer_process import peers_folder

    logging.disable_progress_bar()
    repeated = {"targets": target, "dtypes": dtype, "drafters": drafter, "lengths": gamma, "suites": suite}
    chosen: dict[str, Any] = {name: tuple(values) for name, values in repeated.items() if values}
    chosen |= {"members": tuple(members.split(",")), "replayed": "" if replayed == "none" else replayed}
    if not vllm:
        chosen["peers"] = ()
    if quick:
        given |= {"limit": 1, "tokens": min(tokens, 16), "repeats": 1, "warmups": 1, "worst": False, "replay_limit": 1}
    single = ("limit", "tokens", "repeats", "warmups", "worst", "replay_limit", "replay_tokens", "threads", "timeout", "patience")
    where = peers_folder(peers)
    with _configured():
        settings = Settings(**chosen, **{name: given[name] for name in single})
    begin = partial(Run, peers=where, work=work or where / "work")
    run = _reported(begin, settings, environment.describe, drafters_report, report, out=out, as_json=as_json, name=name)
    failed = [each for each in run.failures if "not installed: " not in each.message]
    missed = strict and any(figure.verdict == "missed" for figure in drafters_claims.made(run))
    raise typer.Exit(1 if failed or missed else 0)


@app.command()
def heads(
    target: Annotated[
        list[str] | None,
        typer.Option(help="A checkpoint folder or zoo:NAME; may be repeated. zoo:python-8m and zoo:python-300m, unless given."),
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND[:SOURCE]", help="medusa or eagle3; may be repeated. Both, as embedded for the target, unless given."),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="May be repeated. float32 and bfloat16, unless given.")] = None,
    gamma: Annotated[int, typer.Option(min=1, help="Tokens that an EAGLE-3 head drafts; a Medusa head drafts one with each head.")] = 4,
    tree: Annotated[str, typer.Option(help="A shape to draft here besides.", show_default="the head's own")] = "",
    suite: Annotated[str, typer.Option(help="embedded, or a file of prompts.")] = "embedded",
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each category, at most.")] = 5,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt.")] = 96,
    peers: Annotated[
        Path | None, typer.Option(file_okay=False, show_default="$FOREDRAFT_PEERS or .peers", help="Folder of the peers' environments.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option(file_okay=False, show_default="work, among the peers", help="Folder for checkpoints and exported heads.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of both sides.")] = 2,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a call has failed.")] = 120.0,
    patience: Annotated[float, typer.Option(min=1, help="Seconds after which loading has failed.")] = 900.0,
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Write heads.json and heads.md into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document instead of the tables.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit with 1 also when a claim is missed.")] = False,
) -> None:
    """Exported heads in vLLM beside the same heads here: acceptance prompt by prompt, and draft by draft.

    Exits with 1 when something could not be measured; it is then listed as a failure and has no figures.
    """
    given = locals()
    from functools import partial

    from transformers.utils import logging

    from benchmarks import environment, heads_report, report
    from benchmarks.heads import Run, Settings
    from benchmarks.peer_process import peers_folder

    logging.disable_progress_bar()
    repeated = {"targets": target, "heads": head, "dtypes": dtype}
    chosen: dict[str, Any] = {name: tuple(values) for name, values in repeated.items() if values}
    where = peers_folder(peers)
    with _configured():
        single = ("tree", "suite", "limit", "tokens", "threads", "timeout", "patience")
        settings = Settings(**chosen, length=gamma, **{name: given[name] for name in single})
    begin = partial(Run, peers=where, work=work or where / "work")
    run = _reported(begin, settings, environment.describe, heads_report, report, out=out, as_json=as_json)
    missed = strict and any(claim.verdict == "missed" for claim in heads_report.claims(run))
    raise typer.Exit(1 if run.failures or missed else 0)


@contextmanager
def _configured() -> Iterator[None]:
    """What cannot work as asked ends the command with exit code 2."""
    from foredraft.errors import ForedraftError

    try:
        yield
    except ForedraftError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(2) from None


def _reported(
    run_class: Any, settings: Any, describe: Any, suite: Any, report: Any, *, out: Path | None, as_json: bool, name: str = ""
) -> Any:
    """Run a suite, show what it found and write it down; ``suite`` is the module with its document, tables and notes. The files bear its
    name, or ``name``."""
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else WIDE)
    with _configured():
        run, where = _with_progress(settings, run_class, describe, suite.SUITE)
    said: dict[str, Any] = {"command": _command(), "environment": where}
    document, tables, notes = suite.document(run, **said), suite.tables(run), suite.notes(run, **said)
    if as_json:
        typer.echo(json.dumps(document, indent=1))
    else:
        report.show(tables, notes, console)
    if out is not None:
        for path in report.write(out, name or suite.SUITE, document, tables, notes, suite.TITLE):
            console.print(f"wrote {path}", markup=False, highlight=False)
    return run


def _with_progress(settings: Any, run_class: Any, describe: Any, suite: str) -> tuple[Any, dict[str, Any]]:
    """Run, with a bar on the error stream that is drawn between measurements only: a drawing thread would disturb them."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        task = progress.add_task(suite)

        def advance() -> None:
            progress.update(task, advance=1, refresh=True)

        run = run_class(settings, advance)
        progress.update(task, total=run.steps, refresh=True)
        where = {**describe(settings.device), "threads": settings.threads}
        run.run()
        return run, where


def _command() -> str:
    """The command as it was typed."""
    return shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
