"""The recipe behind the embedded encoder-decoder models.

    python -m recipes.zoo corpus --out RUN
    python -m recipes.t5 all --out RUN

does everything from the installed packages to the folders in the package. The target and the 1 M draft of `ast` take about three
hours on one core. Each step is also a command of its own, reads what the earlier ones left in RUN, and can be repeated. Training can
be interrupted at any time and goes on with --resume.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft import zoo
from recipes.t5 import recipe
from recipes.zoo.__main__ import Out, Resume, _needed, _read, _train, _write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_made = partial(_needed, recipe="t5")  # by a step of this recipe
app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


class Named(str, Enum):
    ast = "ast"
    doc = "doc"


class Sized(str, Enum):
    target = "target"
    large = "3m"
    small = "1m"


ModelName = Annotated[Sized, typer.Option("--model", help="Which one.")]
TaskName = Annotated[Named, typer.Option("--task", help="What the models learn.")]


@app.command()
def pairs(out: Out, task: TaskName = Named.ast) -> None:
    """Make pairs from the corpus, learn the tokenizer from those of `ast`, and encode them (minutes)."""
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
    learnt = _tokenizer(out)
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
    model: ModelName = Sized.target,
    budget: Annotated[float | None, typer.Option("--budget", help="Million tokens; the recipe's unless given.")] = None,
    cooldown: Annotated[float | None, typer.Option("--cooldown", help="Share of them over which the rate falls to zero.")] = None,
    resume: Resume = False,
) -> None:
    """Train one model (the target an hour and more on one core)."""
    from recipes.t5 import fit
    from recipes.t5.tokenization import Encoded
    from recipes.zoo.fit import Schedule

    chosen = recipe.MODELS[model.value]
    schedule = Schedule(int((budget or chosen.budget) * 1e6), cooldown=cooldown or chosen.cooldown)
    base = out / f"t5-{task.value}"
    train, held_out = (Encoded.load(_made(base / "pairs", "pairs") / f"{half}.npz") for half in ("train", "held_out"))
    _train(base / model.value, partial(fit.Run, chosen), train, held_out, len(train.tokens), schedule, resume)


@app.command()
def evaluate(
    out: Out,
    task: TaskName = Named.ast,
    only: Annotated[str | None, typer.Option("--only", help="target, 1m, 3m, or baselines.")] = None,
) -> None:
    """Measure exact match and nats per token on held-out packages, with bfloat16 weights, and of both baselines (minutes)."""
    import torch

    from recipes.t5 import evaluation, fit
    from recipes.t5.tokenization import Encoded
    from recipes.zoo.fit import CHECKPOINT

    base, limits = out / f"t5-{task.value}", recipe.TASKS[task.value]
    train, held_out = (Encoded.load(_made(base / "pairs", "pairs") / f"{half}.npz") for half in ("train", "held_out"))
    lines = (base / "pairs" / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    chosen = evaluation.sample([json.loads(line)["task"] for line in lines])

    def measured(name: str, score: Callable[[list[int]], evaluation.Score]) -> None:
        scores = {kind: asdict(score(indices)) for kind, indices in chosen.items()}
        for kind, each in scores.items():
            typer.echo(f"{name}, {kind}: {each['exact_match']:.1%} exact, {each['nats_per_token']:.4f} nats per token")
        _write(base / f"scores-{name}.json", scores)

    for name in [each for each in recipe.MODELS if only in (each, None) and (base / each / CHECKPOINT).exists()]:
        model = fit.load_weights(base / name).to(torch.bfloat16)
        measured(name, partial(evaluation.score_model, model, held_out))
    if only not in ("baselines", None):
        return
    measured("copy", lambda indices: evaluation.score_copy(train, held_out, indices))
    table = evaluation.ngram_model(train)
    measured("n-gram", lambda indices: evaluation.score_ngram(table, held_out, indices, limits.text))


@app.command()
def package(out: Out) -> None:
    """Write the target and the 1 M draft of `ast`, with tokenizer, figures, model cards and held-out sources, into the package."""
    from recipes.t5 import fit, packaging

    base, manifest = out / "t5-ast", _read(_needed(out / "corpus", "corpus") / "manifest.json")
    for name, run in ((zoo.T5, "target"), (zoo.T5_DRAFT, "1m")):
        typer.echo(packaging.package_model(name, fit.load_weights(base / run), _tokenizer(out), _figures(base, run), manifest))
    for kind in ("ast", "rename"):
        typer.echo(packaging.write_prompts(base / "pairs", _tokenizer(out), kind, zoo.root() / "prompts" / f"{kind}.jsonl"))


@app.command()
def checkpoint(
    out: Out,
    task: TaskName = Named.ast,
    model: ModelName = Sized.target,
    width: Annotated[int, typer.Option("--width", help="Inflate it to so many times its width.")] = 1,
) -> None:
    """Write a trained model as a checkpoint, with a model card, into OUT/t5-TASK/MODEL-WIDTHx, and held-out sources into
    OUT/t5-TASK/TASK.jsonl."""
    import torch

    from foredraft import inflate
    from recipes.t5 import fit, packaging
    from recipes.zoo.fit import CHECKPOINT

    base = out / f"t5-{task.value}"
    trained = fit.load_weights(_made(base / model.value / CHECKPOINT, "train").parent).to(torch.bfloat16)
    figures, manifest = _figures(base, model.value), _read(_needed(out / "corpus", "corpus") / "manifest.json")
    folder = base / f"{model.value}-{width}x"
    widened = inflate(trained, hidden_size=trained.config.d_model * width)
    packaging.save(widened, _tokenizer(out), folder)
    command = f"checkpoint --task {task.value} --model {model.value} --width {width}"
    packaging.describe(folder, widened, task.value, model.value, command, figures, manifest)
    typer.echo(folder)
    typer.echo(packaging.write_prompts(base / "pairs", _tokenizer(out), task.value, base / f"{task.value}.jsonl"))


@app.command(name="all")
def everything(
    out: Out, only: Annotated[Named | None, typer.Option("--task", help="The models of this task alone; both unless given.")] = None
) -> None:
    """All steps in order, with the budgets of the recipe: the target and both drafts of each task; those of `ast` go into the package."""
    for task in (Named.ast,) if only is Named.ast else Named:
        pairs(out, task)  # those of `ast` have the tokenizer of both
        if only in (task, None):
            for model in Sized:
                train(out, task, model)
            evaluate(out, task)
    if only is not Named.doc:
        package(out)


def _figures(base: Path, run: str) -> dict[str, Any]:
    """Of training, and what `evaluate` found of the model and of the baselines."""
    step = f"evaluate --task {base.name.removeprefix('t5-')}"
    scores = {name: _read(_made(base / f"scores-{name}.json", step)) for name in (run, "copy", "n-gram")}
    return {"training": _read(base / run / "training.json"), "held_out": scores.pop(run), "baselines": scores}


def _tokenizer(out: Path) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(_made(out / "t5-tokenizer", "pairs --task ast"))


if __name__ == "__main__":
    app()
