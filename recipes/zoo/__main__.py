"""The recipe behind the embedded models.

    python -m recipes.zoo all --out RUN

does everything from the installed packages to the folders in the package, in about eight hours on two cores. Each step is also a
command of its own, reads what the earlier ones left in RUN, and can be repeated. Training can be interrupted at any time and
goes on with --resume.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recipes.zoo import recipe

if TYPE_CHECKING:
    from recipes.zoo.fit import Run, Schedule
    from recipes.zoo.tokenization import Encoded

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None)

Out = Annotated[Path, typer.Option("--out", help="Folder for the corpus, checkpoints and figures.", file_okay=False)]
Budget = Annotated[float, typer.Option("--budget", help="Training tokens in millions; the cool-down ends exactly there.")]
Cooldown = Annotated[float, typer.Option("--cooldown", help="Share of the budget over which the learning rate falls to zero.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the run's checkpoint; the budget may be another one.")]


@app.command()
def corpus(out: Out) -> None:
    """Collect Python source from this machine and split it by package (half a minute)."""
    from recipes.zoo.corpus import build

    built = build()
    built.save(out / "corpus")
    for half in ("train", "held_out"):
        account = built.manifest[half]
        typer.echo(f"{half}: {account['files']:,} files, {account['bytes']:,} bytes, {len(account['packages'])} packages")
    typer.echo("left out: " + ", ".join(f"{count:,} {reason}" for reason, count in built.manifest["dropped"].items()))


@app.command()
def tokenizer(out: Out) -> None:
    """Learn the byte-level BPE and encode both halves of the corpus (half a minute)."""
    from recipes.zoo import tokenization
    from recipes.zoo.corpus import Corpus

    source = Corpus.load(_needed(out / "corpus", "corpus"))
    learnt = tokenization.train(source.train)
    learnt.save_pretrained(out / "tokenizer")
    for half, files in (("train", source.train), ("held_out", source.held_out)):
        encoded = tokenization.encode(learnt, files)
        encoded.save(out / "tokens" / f"{half}.npz")
        typer.echo(f"{half}: {len(encoded.tokens):,} tokens, {encoded.sizes.sum() / len(encoded.tokens):.3f} bytes per token")


@app.command()
def target(out: Out, budget: Budget = recipe.TARGET.budget, cooldown: Cooldown = recipe.TARGET.cooldown, resume: Resume = False) -> None:
    """Train the target on the corpus (an hour and more)."""
    _fit(out, "target", replace(recipe.TARGET, budget=budget, cooldown=cooldown), resume)


@app.command()
def draft(out: Out, budget: Budget = recipe.DRAFT.budget, cooldown: Cooldown = recipe.DRAFT.cooldown, resume: Resume = False) -> None:
    """Train the draft model on the corpus (a quarter of an hour)."""
    _fit(out, "draft", replace(recipe.DRAFT, budget=budget, cooldown=cooldown), resume)


@app.command()
def foreign_tokenizer(out: Out, source: Annotated[Path, typer.Option("--corpus", help="Folder with the corpus.", file_okay=False)]) -> None:
    """Learn a SentencePiece-like tokenizer from a few packages, and encode the corpus with it; not packaged."""
    from recipes.zoo import tokenization
    from recipes.zoo.corpus import Corpus

    found = Corpus.load(_needed(source, "corpus"))
    group = [file for file in found.train if file.package in recipe.FOREIGN_PACKAGES]
    learnt = tokenization.train_foreign(group[::4])  # more takes minutes and changes little
    learnt.save_pretrained(out / "tokenizer")
    for half, files in (("train", found.train), ("held_out", found.held_out)):
        encoded = tokenization.encode(learnt, files)
        encoded.save(out / "tokens" / f"{half}.npz")
        typer.echo(f"{half}: {len(encoded.tokens):,} tokens, {encoded.sizes.sum() / len(encoded.tokens):.3f} bytes per token")


@app.command()
def foreign(out: Out, budget: Budget = recipe.FOREIGN.budget, cooldown: Cooldown = recipe.FOREIGN.cooldown, resume: Resume = False) -> None:
    """Train the draft model with that tokenizer, and save it as a checkpoint in OUT/checkpoint (a quarter of an hour)."""
    from transformers import PreTrainedTokenizerFast

    from recipes.zoo import fit

    learnt = PreTrainedTokenizerFast.from_pretrained(_needed(out / "tokenizer", "foreign-tokenizer"))
    _fit(out, "draft", replace(recipe.FOREIGN, budget=budget, cooldown=cooldown), resume)
    fit.load_weights(out / "draft").save_pretrained(out / "checkpoint")
    learnt.save_pretrained(out / "checkpoint")


@app.command()
def deep(out: Out, budget: Budget = recipe.DEEP.budget, cooldown: Cooldown = recipe.DEEP.cooldown, resume: Resume = False) -> None:
    """Train the deep model, whose lower layers learn to draft, on the corpus (hours)."""
    _fit(out, "deep", replace(recipe.DEEP, budget=budget, cooldown=cooldown), resume)


@app.command()
def deep_plain(out: Out, budget: Budget = recipe.DEEP.budget, cooldown: Cooldown = recipe.DEEP.cooldown, resume: Resume = False) -> None:
    """Train the same model without early exits, to see what they cost (hours); it is not packaged."""
    _fit(out, "deep-plain", replace(recipe.DEEP_PLAIN, budget=budget, cooldown=cooldown), resume)


@app.command()
def ngram(out: Out) -> None:
    """Count the n-gram table, prune it to its size limit, and measure the n-gram baseline (a few minutes)."""
    from foredraft.drafters.ngram_model import NGramModel
    from recipes.zoo import evaluation

    _keep_freed_memory()
    train, held_out = _tokens(out)
    table = NGramModel.from_tokens(train.documents(), recipe.NGRAM_ORDER, vocab_size=recipe.VOCABULARY)
    baseline = {
        "what": evaluation.BASELINE.format(order=recipe.NGRAM_ORDER),
        "ngrams": table.ngrams,
        **asdict(evaluation.score_ngram(table, held_out)),
    }
    typer.echo(f"baseline: {baseline['bits_per_byte']:.4f} bits per byte with {baseline['ngrams']:,} n-grams")
    min_count, file = 1, out / "ngram" / "ngram.safetensors"
    while min_count == 1 or file.stat().st_size > recipe.NGRAM_BYTES:
        min_count += 1
        table.prune(min_count=min_count, successors=recipe.NGRAM_SUCCESSORS)
        table.save(file)
    figures = {
        "min_count": min_count,
        "successors": recipe.NGRAM_SUCCESSORS,
        "baseline": baseline,
        # Pruning takes the probabilities apart and leaves the ranks, which is all that a draft needs.
        "held_out": {"accuracy": evaluation.score_ngram(table, held_out).accuracy},
    }
    _write(out / "ngram" / "figures.json", figures)
    typer.echo(f"table: {table.ngrams:,} n-grams seen at least {min_count} times")


@app.command()
def evaluate(out: Out) -> None:
    """Measure bits per byte on the held-out packages, with bfloat16 weights; float32 ones, and early exits, on a sample (minutes)."""
    import torch

    from recipes.zoo import evaluation, heads

    _keep_freed_memory()
    _, held_out = _tokens(out)
    for name in [each for each in ("target", "draft", "deep", "deep-plain") if (out / each).exists()]:
        model = heads.weights(out, name)
        sample = held_out.sample(evaluation.ROUNDING_SAMPLE)
        scores: dict[str, Any] = {"sample": {"float32": asdict(evaluation.score_model(model, sample))}}
        model.to(torch.bfloat16)
        scores["sample"]["bfloat16"] = asdict(evaluation.score_model(model, sample))
        scores["bfloat16"] = asdict(evaluation.score_model(model, held_out))
        if name.startswith("deep"):
            scores["exits"] = evaluation.score_exits(model, sample)
        typer.echo(f"{name}: {scores['bfloat16']['bits_per_byte']:.4f} bits per byte")
        _write(out / name / "scores.json", scores)


@app.command()
def package(out: Out) -> None:
    """Write weights, tokenizer, figures and model cards into the package."""
    from transformers import PreTrainedTokenizerFast

    from foredraft.drafters.ngram_model import NGramModel
    from foredraft.zoo import DEEP, DRAFT, TARGET
    from recipes.zoo import heads, packaging

    manifest = _read(_needed(out / "corpus", "corpus") / "manifest.json")
    learnt = PreTrainedTokenizerFast.from_pretrained(_needed(out / "tokenizer", "tokenizer"))
    ngram_figures = _read(_needed(out / "ngram", "ngram") / "figures.json")
    for name, run in ((TARGET, "target"), (DRAFT, "draft"), (DEEP, "deep")):
        if not (out / run).exists():
            continue
        figures = {
            "training": _read(out / run / "training.json"),
            "held_out": _read(_needed(out / run / "scores.json", "evaluate")),
            "baseline": ngram_figures["baseline"],
        }
        if run == "deep" and (out / "deep-plain" / "scores.json").exists():
            figures["plain"] = _read(out / "deep-plain" / "scores.json")
        if run == "draft" and (found := heads.distilled(out)):
            figures["distilled"] = found
        typer.echo(packaging.package_model(name, heads.weights(out, run), learnt, figures, manifest))
    table = NGramModel.load(out / "ngram" / "ngram.safetensors")
    typer.echo(packaging.package_ngram(table, ngram_figures, manifest))


@app.command()
def texts(out: Out) -> None:
    """Let the embedded target write the texts that heads and the draft learn from (most of an hour, 5 GB)."""
    from recipes.zoo import heads

    _needed(out / "corpus", "corpus")
    for line in heads.write_texts(out):
        typer.echo(line)


@app.command()
def medusa(out: Out, resume: Resume = False) -> None:
    """Train the Medusa heads of the embedded target on its texts (most of an hour)."""
    _head(out, "medusa", resume)


@app.command()
def eagle3(out: Out, resume: Resume = False) -> None:
    """Train the EAGLE-3 head of the embedded target on its texts (most of an hour)."""
    _head(out, "eagle3", resume)


@app.command()
def distill(out: Out, resume: Resume = False) -> None:
    """Train the draft on from the embedded target (an hour); `evaluate` and `package` then take the distilled draft."""
    _needed(out / "draft", "draft")
    _head(out, "draft", resume)


@app.command()
def package_heads(out: Out) -> None:
    """Write the heads that were trained, with figures and model cards, into the package."""
    from recipes.zoo import heads

    manifest = _read(_needed(out / "corpus", "corpus") / "manifest.json")
    for kind in recipe.HEADS.keys() - {heads.DISTILLED}:
        if (heads.folder(out, kind) / "config.json").exists():
            typer.echo(heads.package(out, kind, manifest))


@app.command(name="all")
def everything(out: Out) -> None:
    """All steps in order, with the budgets of the recipe."""
    for step in (corpus, tokenizer, ngram, target, draft, deep, deep_plain, evaluate, package, texts, medusa, eagle3, package_heads):
        step(out)
    for step in (distill, evaluate, package):  # again, with the distilled draft
        step(out)


def _head(out: Path, kind: str, resume: bool) -> None:
    from foredraft.cli.train import show
    from recipes.zoo import heads

    _needed(heads.folder(out, "data"), "texts")
    _keep_freed_memory()
    said = heads.train(out, kind, resume=resume, report=show)
    typer.echo("\n".join(said or ["stopped and saved; go on with --resume"]))


def _fit(out: Path, name: str, chosen: recipe.Recipe, resume: bool) -> None:
    from recipes.zoo import fit

    train, held_out = _tokens(out)
    schedule = fit.Schedule(int(chosen.budget * 1e6), cooldown=chosen.cooldown)
    made = partial(fit.Run, recipe.llama_config(**chosen.architecture), batch=chosen.batch, rates=chosen.rates, early=chosen.early)
    _train(out / name, made, train.tokens, held_out.tokens, len(train.tokens), schedule, resume, lengths=chosen.batch.lengths)


def _train(
    folder: Path, made: Callable[[Path], Run], train: Any, held_out: Any, tokens: int, schedule: Schedule, resume: bool, **facts: Any
) -> None:
    """Begin or go on with what ``made`` makes of ``folder``, and write there what it took; an epoch has so many ``tokens``."""
    from recipes.zoo.fit import CHECKPOINT

    if not resume and (folder / CHECKPOINT).exists():
        raise typer.BadParameter(f"{folder} already holds a run: pass --resume to go on with it, or choose another --out")
    _keep_freed_memory()
    run = made(folder)
    if resume:
        run.resume()
    typer.echo(f"{run.model.num_parameters():,} parameters, {tokens:,} tokens per epoch; compiling")
    run.train(train, held_out, schedule)
    account = {
        "tokens": run.progress.tokens,
        "epochs": run.progress.tokens / tokens,
        "seconds": run.progress.seconds,
        "budget": schedule.budget,
        "cooldown": schedule.cooldown,
        **facts,
        "machine": f"{os.cpu_count()} cores ({platform.machine()})",
    }
    _write(folder / "training.json", account)


def _keep_freed_memory() -> None:
    """Tells glibc not to return freed memory to the system: a step frees and asks for the same gigabyte, and page faults
    cost more than the arithmetic where pages come slowly (virtual machines)."""
    if sys.platform == "linux":
        trim_threshold, mmap_threshold = -1, -3
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 2**31 - 1)
        libc.mallopt(trim_threshold, 2**31 - 1)


def _tokens(out: Path) -> tuple[Encoded, Encoded]:
    from recipes.zoo.tokenization import Encoded

    folder = _needed(out / "tokens", "tokenizer")
    return Encoded.load(folder / "train.npz"), Encoded.load(folder / "held_out.npz")


def _needed(path: Path, step: str, recipe: str = "zoo") -> Path:
    if not path.exists():
        raise typer.BadParameter(f"{path} is missing: run `python -m recipes.{recipe} {step} --out …` first")
    return path


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
