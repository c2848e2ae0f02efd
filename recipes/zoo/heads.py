"""What learns from the embedded target: the texts, the training of heads and of the draft, and the heads' folders in ``foredraft_zoo``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from foredraft.drafters.medusa import Medusa
from foredraft.heads import checkpoints
from foredraft.heads.base import Head
from foredraft.shapes import TreeShape
from foredraft.training import generation, prompts
from foredraft.training.acceptance import Held, calibrated
from foredraft.training.data import Texts
from foredraft.training.journal import Journal
from foredraft.training.options import Options
from foredraft.training.runs import RUN, run
from foredraft.zoo import CATALOGUE, PREFIX, TARGET, load, load_tokenizer
from recipes.zoo import fit, packaging, recipe

DISTILLED = "draft"  # a kind of what is trained, as heads are

Figures = dict[str, Any]


def folder(out: Path, what: str) -> Path:
    """Of a run's data, held-out prompts, or heads of a kind."""
    return out / "heads" / what


def write_texts(out: Path) -> Iterator[str]:
    """Write the texts that heads learn from, and the held-out prompts; go on where it was stopped. Yields a line for each set."""
    tokenizer = load_tokenizer(TARGET)
    for name, texts in recipe.TEXT_SETS.items():
        source = out / "corpus" / f"{texts.half}.jsonl"
        entries = list(prompts.read_entries([source]))
        windows = prompts.windows(tokenizer, entries, count=texts.windows, tokens=texts.tokens, seed=texts.seed)
        answering = generation.Answering(texts.answer, texts.temperatures, seed=texts.seed, top=texts.top, execution="auto")
        about = {"files": [source.name], "windows": texts.windows, "prompt_tokens": texts.tokens}
        made = generation.generate(load(TARGET), windows, answering, folder(out, name), source=about, per_shard=texts.per_shard)
        yield f"{name}: {made.rows:,} texts, {made.tokens:,} tokens, {made.seconds:.0f} s"


def train(out: Path, kind: str, *, resume: bool, report: Callable[[Mapping[str, Any]], None]) -> list[str] | None:
    """The head of ``kind`` by the recipe, or the draft, which begins with what it learnt from the corpus; None if it was stopped."""
    options: Figures = dict(recipe.HEADS[kind])
    if kind == DISTILLED:
        options["head"] = {**options["head"], "draft": str(begun(out))}
    return run(
        PREFIX + TARGET,
        [folder(out, name) for name in recipe.TEXTS[kind]],
        folder(out, kind),
        Options(**options),
        held_out_data=folder(out, "held_out"),
        tree_nodes=recipe.TREE_NODES if kind == "medusa" else None,
        resume=resume,
        report=report,
    )


def begun(out: Path) -> Path:
    """The draft as it comes from the corpus, as a checkpoint."""
    path = folder(out, "draft-begun")
    if not path.exists():
        fit.load_weights(out / "draft").to(torch.bfloat16).save_pretrained(path)
        load_tokenizer(TARGET).save_pretrained(path)
    return path


def weights(out: Path, name: str) -> LlamaForCausalLM:
    """Of a model; the distilled draft's, if there is one."""
    if name == "draft" and (folder(out, DISTILLED) / "config.json").exists():
        return LlamaForCausalLM.from_pretrained(folder(out, DISTILLED), dtype=torch.float32).eval()
    return fit.load_weights(out / name)


def distilled(out: Path) -> Figures:
    """What the draft's card says of its second training; nothing if there was none."""
    path = folder(out, DISTILLED)
    if not (path / "config.json").exists():
        return {}
    journal = list(Journal.read(path / RUN))
    measured = [line for line in journal if "alpha" in line and "alphas" in line]
    kept = ("step", "alpha", "agreement", "greedy_length", "sampled_length")
    chosen = max(measured, key=lambda line: line["acceptance_length"])
    facts = {"before": measured[0], "after": chosen}
    last = [line for line in journal if "loss" in line][-1]
    return {
        **{name: {each: line[each] for each in kept if each in line} for name, line in facts.items()},
        "steps": last["step"],
        "tokens": last["tokens"],
        "options": asdict(Options(**recipe.HEADS[DISTILLED])),  # type: ignore[arg-type]
    }


def package(out: Path, kind: str, manifest: Figures) -> Path:
    """Write the head with figures and model card into ``foredraft_zoo``."""
    trained, model = folder(out, kind), load(TARGET)
    head = checkpoints.load(trained, model)
    held_out = Texts(folder(out, "held_out"))
    held = Held([held_out.prompt(index) for index in range(len(held_out))], recipe.TEXT_SETS["held_out"].answer)
    about: Figures = json.loads((trained / "config.json").read_text(encoding="utf-8"))["foredraft"]["about"]
    if not head.config.tree and calibrated(head, model, held, nodes=recipe.TREE_NODES):
        checkpoints.save(head, trained, about=about)
    figures = {
        "parameters": sum(weight.numel() for weight in head.parameters()),
        "held_out": measure(head, model, held),
        "prompts": len(held.prompts),
        "training": training(list(Journal.read(trained / RUN)), [Texts(folder(out, name)) for name in recipe.TEXTS[kind]], about),
    }
    if (log_odds := getattr(head, "log_odds", None)) is not None:
        figures["log_odds"] = {
            "contexts": [len(each.contexts) for each in log_odds.lists],
            "listed": [len(each.tokens) for each in log_odds.lists],
            "weights": [round(weight, 3) for weight in log_odds.weights],
        }
    name = f"{TARGET}-{kind}"
    destination = packaging.fresh(name)
    for file in ("config.json", "model.safetensors", checkpoints.LOG_ODDS):
        if (trained / file).exists():
            (destination / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(trained / file, destination / file)
    packaging.finish(destination, card(name, kind, figures), figures, manifest)
    return destination


def measure(head: Head, model: PreTrainedModel, held: Held) -> Figures:
    """Acceptance of a chain, and of the head's tree if it has one; without its n-gram log-odds too, where it has them."""
    found = {}
    for label, shape in {"chain": None, **({"tree": head.config.tree} if head.config.tree else {})}.items():
        facts = {} if shape is None else {"shape": shape, "nodes": TreeShape.parse(shape).nodes}
        if getattr(head, "log_odds", None) is not None:
            alone = replace(held, drafter=lambda head: Medusa(head, successors="off"), shape=shape)
            found[f"{label}_without_log_odds"] = {**facts, **alone.measure(model, head).to_dict()}
        found[label] = {**facts, **replace(held, shape=shape).measure(model, head).to_dict()}
    return found


def training(journal: Sequence[Mapping[str, Any]], texts: Sequence[Texts], about: Figures) -> Figures:
    """What a run's journal and its texts say of the training."""
    reports = [line for line in journal if "loss" in line]
    return {
        "steps": reports[-1]["step"],
        "tokens": reports[-1]["tokens"],
        "seconds": round(reports[-1]["seconds"]),
        "tokens_per_second": round(median(line["tokens_per_second"] for line in reports if "tokens_per_second" in line)),
        "held_out": time_to_quality(journal),
        "options": about["options"],
        "texts": [len(each) for each in texts],
        "text_tokens": [int(each.lengths.sum()) for each in texts],
        "answers": [dict(each.manifest.settings) for each in texts],
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


def card(name: str, kind: str, figures: Figures) -> str:
    """The model card, every figure of it from ``figures``."""
    training, chain = figures["training"], figures["held_out"]["chain"]
    data, held_out, windows = (recipe.TEXT_SETS[each] for each in ("data", "held_out", "corpus_texts"))
    rows = []
    for suffix, label in (("", ""), ("_without_log_odds", ", the heads alone")):
        for shape in ("chain", "tree"):
            if (line := figures["held_out"].get(shape + suffix)) is not None:
                what = f"chain of {len(chain['accepted_by_depth'])}" if shape == "chain" else f"its tree of {line['nodes']} nodes"
                rows.append(f"| {what}{label} | {line['acceptance_length']:.3f} |")
    corpus = f", and on {training['texts'][1]:,} windows of {windows.tokens} tokens of that corpus" if len(training["texts"]) > 1 else ""
    log_odds = ""
    if (found := figures.get("log_odds")) is not None:
        log_odds = f"""
It comes with n-gram log-odds, counted in the same texts: {found["listed"][0]:,} tokens after {found["contexts"][0]:,} single tokens and \
{found["listed"][1]:,} after {found["contexts"][1]:,} pairs; weights {", ".join(map(str, found["weights"]))}.
"""
    options = ", ".join(f"`{key}={value}`" for key, value in training["options"]["head"].items())
    steps = [
        f"| {each['step']:,} | {each['tokens'] / 1e6:.2f} M | {each['seconds'] / 60:.0f} | {each['acceptance_length']:.2f} |"
        for each in training["held_out"]
    ]
    return f"""# {name}

{CATALOGUE[name].description}. `--drafter {kind}` with `--target {PREFIX}{TARGET}` uses it.

{figures["parameters"]:,} parameters in bfloat16; options {options}.
{log_odds}
## Held-out acceptance

{figures["prompts"]} windows of {held_out.tokens} tokens from packages that neither the target nor the head has seen, continued greedily \
by {held_out.answer} tokens ({chain["measured_on"]:,} counted):

| draft | tokens per target pass |
| --- | --- |
{chr(10).join(rows)}

Accepted at each depth of the chain, of what was drafted there: {", ".join(f"{share:.1%}" for share in chain["accepted_by_depth"])}.

## Training

On {training["texts"][0]:,} texts ({training["text_tokens"][0]:,} tokens) that `{TARGET}` wrote: windows of {data.tokens} tokens \
of its training corpus, continued by {data.answer} tokens, half of them greedily and half sampled at temperature 1{corpus}. \
{training["steps"]:,} steps over {training["tokens"]:,} predicted tokens in {training["seconds"] / 60:.0f} minutes on two cores, \
{training["tokens_per_second"]:,} tokens per second (median; the machine had other work at times). The head with the longest held-out \
acceptance was kept. Acceptance during training, on {training["options"]["held_out"]} held-out prompts, chains of the head alone:

| step | predicted tokens | minutes | tokens per target pass |
| --- | --- | --- | --- |
{chr(10).join(steps)}

```
python -m recipes.zoo corpus --out RUN
python -m recipes.zoo texts --out RUN
python -m recipes.zoo {kind} --out RUN
python -m recipes.zoo package-heads --out RUN
```
"""
