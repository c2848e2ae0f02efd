"""``foredraft data generate`` and ``info``: texts that a target writes for heads to learn from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft import hub
from foredraft.cli.checks import check_data, check_model
from foredraft.cli.failures import note
from foredraft.cli.figures import counted
from foredraft.cli.options import Device, Dtype, Threads
from foredraft.cli.progress import Progress
from foredraft.errors import ConfigurationError

if TYPE_CHECKING:
    from foredraft.training.generation import Count

app = typer.Typer(help="Make training data for foredraft train: texts that the target itself generates.", no_args_is_help=True)

Folder = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the shards go.", show_default=False, file_okay=False)]


@app.command()
def generate(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILES...",
            show_default=False,
            help='Prompts: in a .jsonl file, per line an object with "prompt", "messages" (chat) or "text"; any other file is one text.',
        ),
    ],
    target: Annotated[str, typer.Option(help="The model that answers: a path, a hub id, or zoo:NAME.", show_default=False)],
    out: Folder,
    windows: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default=False,
            help="Cut N prompts from random places of the texts instead of taking each text's beginning.",
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens at the beginning of each text that form the prompt.", show_default="all; 64 with --windows"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Most tokens per answer; 0 writes the texts as they are.")] = 256,
    temperature: Annotated[str, typer.Option(help="0 is greedy; 0,1 alternates between prompts.", metavar="T[,T...]")] = "0",
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the k most likely tokens.", show_default="all")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the most likely tokens whose probabilities sum to this.", show_default="all")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Leave out tokens less likely than this share of the most likely one.", show_default="none")
    ] = None,
    top_k_probabilities: Annotated[
        int, typer.Option(min=0, metavar="K", help="Record the K most likely tokens at every position, with log-probabilities.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of windows and answers.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that are answered together.")] = 64,
    shard_size: Annotated[int, typer.Option(min=1, help="Prompts per file. A killed run loses at most one file.")] = 1024,
    part: Annotated[str, typer.Option(metavar="I/N", help="Make part I of N, so that N processes can share one folder.")] = "1/1",
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    execution: Annotated[str, typer.Option(help="As in Speculator.")] = "eager",
) -> None:
    """Let the target answer prompts, and store the answers as token ids. A target with an encoder reads each prompt as a source.

    The same command goes on where it stopped, however it stopped. Exit codes: 0 success, 1 failure while running, 2 invalid arguments, 130
    Ctrl-C.
    """
    check_model(target, dtype, device, encoders=True)
    note(f"loading {target}")
    import torch

    from foredraft.cli.generation import pick_device
    from foredraft.loading import load_model, load_tokenizer
    from foredraft.text import encode
    from foredraft.training import generation, prompts

    if threads is not None:
        torch.set_num_threads(threads)
    answering = generation.Answering(
        max_new_tokens=max_new_tokens,
        temperatures=_numbers(temperature),
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        top=top_k_probabilities,
        seed=seed,
        batch=batch_size,
        dtype=dtype,
        execution=execution,
    )
    share = _part(part)
    entries = list(prompts.read_entries(files))
    if not entries:
        raise ConfigurationError("there is no prompt in " + ", ".join(map(repr, map(str, files))))
    if (windows or prompt_tokens) and hub.config_of(target).get("is_encoder_decoder"):
        raise ConfigurationError(f"{target!r} has an encoder, which reads whole texts: leave --windows and --prompt-tokens out")
    tokenizer = load_tokenizer(target)
    if windows is not None:
        ids = prompts.windows(tokenizer, entries, count=windows, tokens=prompt_tokens or 64, seed=seed)
    else:
        ids = [encode(tokenizer, each, target)[:prompt_tokens] for each in entries]
    model = load_model(target, dtype=dtype, device=pick_device(device, target), encoders=True)
    source = {"files": [path.name for path in files], "windows": windows, "prompt_tokens": prompt_tokens}
    with Progress(f"answering {counted(len(ids), 'prompt')}") as progress:
        count = generation.generate(model, ids, answering, out, source=source, per_shard=shard_size, part=share, report=shown_by(progress))
    typer.echo(
        f"{out}: {counted(count.shards, 'shard')} made, {counted(count.rows, 'text')}, {counted(count.tokens, 'token')}, "
        f"{count.seconds:.0f} s"
    )


@app.command()
def hidden(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", show_default=False, help="Made by foredraft data generate.")],
    target: Annotated[str, typer.Option(help="The model that wrote the texts.", show_default=False)],
    features: Annotated[
        str, typer.Option(metavar="N[,N...]", help="0 is the embeddings, i the output of layer i, -1 the output of the final norm.")
    ] = "-1",
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens per pass.")] = 8192,
    dtype: Dtype = "auto",
    device: Device = None,
) -> None:
    """Store the target's hidden states for foredraft train --stored-hidden. They take 2 bytes x width x features per token in
    bfloat16: 1.5 KB for width 256 and three features."""
    check_model(target, dtype, device, encoders=True)
    check_data([folder])
    from foredraft.cli.generation import pick_device
    from foredraft.loading import load_model
    from foredraft.training.features import store

    try:
        wanted = [int(number) for number in features.split(",")]
    except ValueError:
        raise ConfigurationError(f"--features takes whole numbers with commas between them, got {features!r}") from None
    model = load_model(target, dtype=dtype, device=pick_device(device, target), encoders=True)
    with Progress(f"reading {folder}") as progress:
        made = store(model, folder, wanted, batch_tokens=batch_tokens, report=lambda done, of: progress.show(f"{done} of {of} shards"))
    typer.echo(f"{folder}: hidden states {features} of {counted(made, 'shard')} stored")


@app.command()
def info(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", show_default=False, help="Made by foredraft data generate.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Summarize a folder of texts."""
    from foredraft.training.data import Texts

    texts = Texts(folder, partial=True)
    manifest = texts.manifest
    facts: dict[str, Any] = {
        "target": manifest.target,
        "shards": len(texts.shards),
        "of_shards": manifest.shards,
        "texts": len(texts),
        "prompt_tokens": int(texts.prompt_lengths.sum() if not texts.sources else texts.sizes[:, 1].sum()),
        "answer_tokens": int((texts.lengths - texts.prompt_lengths).sum()),
        "settings": dict(manifest.settings),
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    typer.echo(
        f"{folder}: {counted(facts['texts'], 'text')} by {facts['target']}, "
        f"{facts['shards']} of {counted(facts['of_shards'], 'shard')}; "
        f"{counted(facts['prompt_tokens'], 'token')} of {'sources' if texts.sources else 'prompts'}, {facts['answer_tokens']:,} of answers"
    )
    typer.echo(", ".join(f"{name} {value}" for name, value in facts["settings"].items() if value not in (None, 0)))


def shown_by(progress: Progress) -> Callable[[Count], None]:
    """How far a run is, and a line for each shard."""
    said = 0

    def show(count: Count) -> None:
        nonlocal said
        speed = f"{count.tokens / max(count.seconds, 1e-9):,.0f} tokens/s"
        if count.shards > said:
            said = count.shards
            progress.clear()
            note(f"{counted(said, 'shard')}, {counted(count.tokens, 'token')}, {speed}")
        progress.show(f"{count.rows:,} of {counted(count.of_rows, 'text')}, {speed}")

    return show


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigurationError(f"--temperature takes numbers with commas between them, got {text!r}") from None


def _part(text: str) -> tuple[int, int]:
    first, _, count = text.partition("/")
    if first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count):
        return int(first), int(count)
    raise ConfigurationError(f"--part takes I/N with I from 1 to N, got {text!r}")
