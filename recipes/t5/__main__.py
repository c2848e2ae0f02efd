"""The recipe behind the embedded encoder-decoder models.

    python -m recipes.zoo corpus --out RUN
    python -m recipes.t5 all --out RUN

does everything from the installed packages to the folders in the package, in about three hours on one core. Each step is also a
command of its own, reads what the earlier ones left in RUN, and can be repeated. Training can be interrupted at any time and
goes on with --resume.
"""

from __future__ import annotations

import os
import platform
import random
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from recipes.t5 import recipe
from recipes.zoo.__main__ import Out, Resume, _keep_freed_memory, _needed, _read, _write

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


class Named(str, Enum):
    ast = "ast"
    doc = "doc"


class Sized(str, Enum):
    target = "target"
    large = "3m"
    small = "1m"


TaskName = Annotated[Named, typer.Option("--task", help="What the models learn.")]


@app.command()
def pairs(out: Out, task: TaskName = Named.ast) -> None:
    """Make pairs from the corpus, learn the tokenizer from those of `ast`, and encode them (minutes)."""
    import json

    from transformers import PreTrainedTokenizerFast

    from recipes.t5 import tokenization
    from recipes.t5.pairs import Pair, of_file, variables
    from recipes.zoo.corpus import Corpus

    source, limits, folder = Corpus.load(_needed(out / "corpus", "corpus")), recipe.TASKS[task.value], out / f"t5-{task.value}"
    halves: dict[str, list[Pair]] = {}
    seen: set[str] = set()
    for half, files in (("held_out", source.held_out), ("train", source.train)):  # held out first: what both have leaves the training half
        names = sorted(set().union(*map(variables, files)))
        found = [pair for file in files for pair in of_file(file, task.value, limits, names, both=half == "held_out")]
        halves[half] = [pair for pair in found if pair.source.partition(": ")[2] not in seen and pair.source not in seen]
        if half == "held_out":
            halves[half] = list({pair.source: pair for pair in halves[half]}.values())
            seen.update(pair.source for pair in halves[half])
        random.Random(recipe.SEED).shuffle(halves[half])
    if task is Named.ast:
        sample = halves["train"][:: max(1, len(halves["train"]) // 60_000)]
        tokenization.train(text for pair in sample for text in (pair.source, pair.text)).save_pretrained(out / "t5-tokenizer")
    learnt = PreTrainedTokenizerFast.from_pretrained(_needed(out / "t5-tokenizer", "pairs --task ast"))
    for half, found in halves.items():
        encoded, kept = tokenization.encode(learnt, found, limits)
        encoded.save(folder / "pairs" / f"{half}.npz")
        with open(folder / "pairs" / f"{half}.jsonl", "w", encoding="utf-8") as lines:
            lines.writelines(json.dumps(pair._asdict()) + "\n" for pair in kept)
        typer.echo(f"{half}: {len(kept):,} of {len(found):,} pairs, mean tokens of source and text {encoded.lengths.mean(0).round(1)}")


@app.command()
def train(
    out: Out,
    task: TaskName = Named.ast,
    model: Annotated[Sized, typer.Option("--model", help="Which one.")] = Sized.target,
    budget: Annotated[float | None, typer.Option("--budget", help="Million tokens; the recipe's unless given.")] = None,
    cooldown: Annotated[float | None, typer.Option("--cooldown", help="Share of them over which the rate falls to zero.")] = None,
    resume: Resume = False,
) -> None:
    """Train one model (the target an hour and more on one core)."""
    from recipes.t5 import fit
    from recipes.t5.tokenization import Encoded

    _keep_freed_memory()
    chosen = recipe.MODELS[model.value]
    chosen = replace(chosen, budget=budget or chosen.budget, cooldown=cooldown or chosen.cooldown)
    base = out / f"t5-{task.value}"
    folder, found = base / model.value, _needed(base / "pairs", "pairs")
    if not resume and (folder / fit.CHECKPOINT).exists():
        raise typer.BadParameter(f"{folder} already holds a run: pass --resume to go on with it, or choose another --out")
    train, held_out = (Encoded.load(found / f"{half}.npz") for half in ("train", "held_out"))
    run = fit.Run(chosen, folder)
    if resume:
        run.resume()
    typer.echo(f"{run.model.num_parameters():,} parameters, {len(train.tokens):,} tokens per epoch; compiling")
    schedule = fit.Schedule(int(chosen.budget * 1e6), cooldown=chosen.cooldown)
    run.train(train, held_out, schedule)
    account = {
        "tokens": run.progress.tokens,
        "epochs": run.progress.tokens / len(train.tokens),
        "seconds": run.progress.seconds,
        "budget": schedule.budget,
        "cooldown": schedule.cooldown,
        "machine": f"{os.cpu_count()} cores ({platform.machine()})",
    }
    _write(folder / "training.json", account)


if __name__ == "__main__":
    app()
