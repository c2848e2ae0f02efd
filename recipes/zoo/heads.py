"""The embedded heads: texts that the embedded target writes, the trainer's runs over them, and the folders in the package."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from foredraft.drafters.medusa import Medusa
from foredraft.errors import ConfigurationError
from foredraft.heads import checkpoints
from foredraft.heads.ngram_log_odds import NgramLogOdds
from foredraft.speculator import Speculator
from foredraft.training import generation, prompts
from foredraft.training.acceptance import Held
from foredraft.training.data import Texts
from foredraft.training.journal import Journal
from foredraft.training.options import Options
from foredraft.training.runs import RUN, run
from foredraft.training.trees import calibrated
from foredraft.zoo import CATALOGUE, PREFIX, TARGET, load, load_tokenizer, root
from recipes.zoo import packaging, recipe

Figures = dict[str, Any]


def folder(out: Path, what: str) -> Path:
    """Of a run's data, held-out prompts, or heads of a kind."""
    return out / "heads" / what


def write_texts(out: Path) -> str:
    """The target's answers to windows of both halves of the corpus, and windows as they are; goes on where it was stopped."""
    execution = fastest()
    halves = (
        (
            "train",
            "data",
            recipe.HEAD_WINDOWS,
            generation.Answering(recipe.ANSWER, (0.0, 1.0), seed=recipe.TEXTS_SEED, execution=execution),
        ),
        (
            "held_out",
            "held_out",
            recipe.HELD_OUT_WINDOWS,
            generation.Answering(recipe.HELD_OUT_ANSWER, seed=recipe.HELD_OUT_SEED, execution=execution),
        ),
    )
    said = []
    for half, name, count, answering in halves:
        source = out / "corpus" / f"{half}.jsonl"
        entries = list(prompts.read_entries([source]))
        asked = prompts.windows(load_tokenizer(TARGET), entries, count=count, tokens=recipe.WINDOW, seed=answering.seed)
        where = {"files": [source.name], "windows": count, "prompt_tokens": recipe.WINDOW}
        made = generation.write(load(TARGET), asked, answering, folder(out, name), source=where)
        said.append(f"{name}: {made.rows:,} texts, {made.tokens:,} tokens, {made.seconds:.0f} s")
    source = out / "corpus" / "train.jsonl"
    count, tokens, seed = recipe.CORPUS_WINDOWS, recipe.CORPUS_WINDOW, recipe.CORPUS_SEED
    asked = prompts.windows(load_tokenizer(TARGET), list(prompts.read_entries([source])), count=count, tokens=tokens, seed=seed)
    where = {"files": [source.name], "windows": count, "prompt_tokens": tokens}
    as_they_are = generation.Answering(0, seed=seed)
    made = generation.write(load(TARGET), asked, as_they_are, folder(out, "corpus_texts"), source=where, per_shard=recipe.CORPUS_SHARD)
    return "\n".join([*said, f"corpus_texts: {made.rows:,} texts"])


def fastest() -> str:
    """How this machine runs the target: by its own kernels if it can."""
    try:
        Speculator(load(TARGET), "none", execution="native").close()  # type: ignore[arg-type]
    except ConfigurationError:
        return "eager"
    return "native"


def train(out: Path, kind: str, *, resume: bool, report: Callable[[Mapping[str, Any]], None]) -> list[str] | None:
    """The head of ``kind`` by the recipe; None if it was stopped."""
    return run(
        PREFIX + TARGET,
        [folder(out, name) for name in recipe.TEXTS[kind]],
        folder(out, kind),
        Options(**recipe.HEADS[kind]),  # type: ignore[arg-type]
        held_out_data=folder(out, "held_out"),
        tree_nodes=recipe.TREE_NODES,
        resume=resume,
        report=report,
    )


def package(out: Path, kind: str, manifest: Figures) -> Path:
    """Weights, configuration, figures and model card, as Foredraft reads them."""
    trained, name = folder(out, kind), f"{TARGET}-{kind}"
    model, data = load(TARGET), [Texts(folder(out, name)) for name in recipe.TEXTS[kind]]
    head = checkpoints.load(trained, model)  # type: ignore[arg-type]
    others = Texts(folder(out, "held_out"))
    asked = [others.prompt(index) for index in range(len(others))]
    if not head.config.tree and calibrated(head, model, Held(asked, recipe.HELD_OUT_ANSWER), nodes=recipe.TREE_NODES):  # type: ignore[arg-type]
        checkpoints.save(head, trained, about=about_training(trained))
    shapes = {"chain": None} | ({"tree": head.config.tree} if head.config.tree else {})
    held_out = {}
    successors = getattr(head, "log_odds", None)
    for label, shape in shapes.items():
        said = {} if shape is None else {"shape": shape, "nodes": _nodes(shape)}
        if successors is not None:
            measured = Held(asked, recipe.HELD_OUT_ANSWER, drafter=by_itself, shape=shape).measure(model, head)  # type: ignore[arg-type]
            held_out[f"{label}_without_successors"] = {**said, **measured.to_dict()}
        measured = Held(asked, recipe.HELD_OUT_ANSWER, shape=shape).measure(model, head)  # type: ignore[arg-type]
        held_out[label] = {**said, **measured.to_dict()}
    lines = list(Journal.read(trained / RUN))
    reports = [line for line in lines if "loss" in line]
    about = about_training(trained)
    figures = {
        "parameters": sum(weight.numel() for weight in head.parameters()),
        **({} if successors is None else {"successors": _facts(successors)}),
        "held_out": held_out,
        "prompts": len(asked),
        "training": {
            "steps": reports[-1]["step"],
            "tokens": reports[-1]["tokens"],
            "seconds": round(reports[-1]["seconds"]),
            "tokens_per_second": round(median(line["tokens_per_second"] for line in reports if "tokens_per_second" in line)),
            "held_out": time_to_quality(lines),
            "options": about["options"],
            "texts": [len(each) for each in data],
            "text_tokens": [int(each.lengths.sum()) for each in data],
            "answers": [dict(each.manifest.settings) for each in data],
        },
    }
    destination = root() / name
    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir(parents=True)
    for file in ("config.json", "model.safetensors", checkpoints.LOG_ODDS):
        if (trained / file).exists():
            (destination / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(trained / file, destination / file)
    packaging.finish(destination, card(name, kind, figures), figures, manifest)
    return destination


def by_itself(head: Any) -> Medusa:
    """Medusa's drafter without successors."""
    return Medusa(head, successors="off")


def _facts(successors: NgramLogOdds) -> Figures:
    return {
        "contexts": [len(each.contexts) for each in successors.lists],
        "listed": [len(each.tokens) for each in successors.lists],
        "weights": [round(weight, 3) for weight in successors.weights],
    }


def time_to_quality(lines: Sequence[Mapping[str, Any]]) -> list[Figures]:
    """Each measurement of acceptance in a run's journal, with the tokens that had been predicted and the seconds that had gone by then."""
    found, last = [], {"tokens": 0, "seconds": 0.0}
    for line in lines:
        if "loss" in line:
            last = {"tokens": line["tokens"], "seconds": line["seconds"]}
        elif "acceptance_length" in line:
            length = round(line["acceptance_length"], 3)
            found.append({"step": line["step"], "tokens": last["tokens"], "seconds": round(last["seconds"]), "acceptance_length": length})
    return found


def about_training(trained: Path) -> Figures:
    """What the head's configuration says of how it was trained."""
    found: Figures = json.loads((trained / "config.json").read_text(encoding="utf-8"))["foredraft"]["about"]
    return found


def _nodes(shape: str) -> int:
    from foredraft.shapes import TreeShape

    return TreeShape.parse(shape).nodes


def card(name: str, kind: str, figures: Figures) -> str:
    """The model card, every figure of it from ``figures``."""
    training, chain, tree = figures["training"], figures["held_out"]["chain"], figures["held_out"].get("tree")
    depths = ", ".join(f"{share:.1%}" for share in chain["accepted_by_depth"])
    rows = ""
    for label, without in (("", False), (", the heads alone", True)) if "successors" in figures else (("", False),):
        suffix = "_without_successors" if without else ""
        line = figures["held_out"]["chain" + suffix]
        rows += f"| chain of {len(chain['accepted_by_depth'])}{label} | {line['acceptance_length']:.3f} |\n"
        if tree is not None:
            line = figures["held_out"]["tree" + suffix]
            rows += f"| its tree of {tree['nodes']} nodes{label} | {line['acceptance_length']:.3f} |\n"
    rows = rows.removesuffix("\n")
    corpus = ""
    if len(training["texts"]) > 1:
        corpus = f", and on {training['texts'][1]:,} windows of {recipe.CORPUS_WINDOW} tokens of that corpus as they are"
    beside = ""
    if "successors" in figures:
        found = figures["successors"]
        weights = ", ".join(map(str, found["weights"]))
        beside = f"""
Beside it lie successors: {found["listed"][0]:,} tokens behind {found["contexts"][0]:,} single ones and {found["listed"][1]:,} behind \
{found["contexts"][1]:,} pairs, counted in the same texts; weights {weights}.
"""
    options = ", ".join(f"`{key}={value}`" for key, value in training["options"]["head"].items())
    steps = [
        f"| {each['step']:,} | {each['tokens'] / 1e6:.2f} M | {each['seconds'] / 60:.0f} | {each['acceptance_length']:.2f} |"
        for each in training["held_out"]
    ]
    quality = "\n".join(steps)
    return f"""# {name}

{CATALOGUE[name].description}: `--drafter {kind}` with `--target {PREFIX}{TARGET}` takes it by itself.

{figures["parameters"]:,} parameters in bfloat16; options {options}.
{beside}
## Held-out acceptance

{figures["prompts"]} windows of {recipe.WINDOW} tokens from packages that neither the target nor the head has seen, continued greedily by \
{recipe.HELD_OUT_ANSWER} tokens ({chain["measured_on"]:,} counted):

| draft | tokens per pass |
| --- | --- |
{rows}

Accepted at each depth of the chain, of what was drafted there: {depths}.

## Training

On {training["texts"][0]:,} texts ({training["text_tokens"][0]:,} tokens) that `{TARGET}` wrote itself: windows of {recipe.WINDOW} tokens \
of its training corpus, continued by {recipe.ANSWER} tokens, half of them greedily and half sampled at temperature 1{corpus}. \
{training["steps"]:,} \
steps over {training["tokens"]:,} predicted tokens in {training["seconds"] / 60:.0f} minutes on two cores; the head with the longest \
held-out acceptance was kept. {training["tokens_per_second"]:,} predicted tokens per second (median of its reports; the machine had \
other work at times). Time to quality, on {training["options"]["held_out"]} held-out prompts, chains of the head alone:

| step | predicted tokens | minutes | tokens per pass |
| --- | --- | --- | --- |
{quality}

```
python -m recipes.zoo corpus --out RUN
python -m recipes.zoo texts --out RUN
python -m recipes.zoo {kind} --out RUN
python -m recipes.zoo package-heads --out RUN
```
"""
