"""Turns a finished run into a folder: weights, tokenizer, figures and model card; and held-out sources."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from foredraft import zoo
from recipes.t5.pairs import CHARACTERS, FUNCTION_CHARACTERS
from recipes.zoo.packaging import Figures, data_section, finish, fresh, save_tokenizer

PROMPTS = 48  # of each kind
SHORTEST = {"ast": 32, "rename": 32, "doc": 8}  # tokens of the texts that these ask for
AS = {"ast": "syntax tree", "rename": "renamed statement", "doc": "first sentence"}
EXAMPLE = """x = f(a, b=1)                  (Assign x (Call f a (Keyword b 1)))
rename f load: x = f(a, b=1)   x = load(a, b=1)"""


@dataclass(frozen=True)
class Words:
    """What a card says of a task."""

    kind: str
    seen: str
    does: str
    data: str
    limits: str


WORDS = {
    "ast": Words(
        "Python statements",
        "statements of Python",
        "It reads a statement and writes its syntax tree, or reads `rename A B: STATEMENT` and writes the statement with the variable A "
        f"called B:\n\n```\n{EXAMPLE}\n```",
        f"Statements of at most {CHARACTERS} characters without comments, as they stand there; of short ones a share. A variable is "
        "renamed to a name from\nanother place of the same half. A source that is held out is in no training pair.",
        "Long names, long strings and deep nesting go wrong first.",
    ),
    "doc": Words(
        "Python functions",
        "functions of Python and their docstrings",
        "It reads a function without its docstring and writes the first sentence of that docstring.",
        f"Functions of at most {FUNCTION_CHARACTERS} characters without comments, whose docstring begins with a sentence of 16 to 160 "
        "characters.\nA source that is held out is in no training pair.",
        "A sentence may say something else than the function does.",
    ),
}


def package_model(
    name: str, model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, figures: Figures, manifest: Figures
) -> Path:
    """Writes bfloat16 weights and what belongs beside them."""
    folder = fresh(name)
    save(model.to(torch.bfloat16), tokenizer if name == zoo.T5 else None, folder)
    describe(folder, model, "ast", name.removeprefix(zoo.T5).removeprefix("-") or "target", "package", figures, manifest)
    return folder


def describe(folder: Path, model: PreTrainedModel, task: str, run: str, command: str, figures: Figures, manifest: Figures) -> None:
    """Write the card and the figures of the model that ``run`` trained; ``command`` is the last step of the recipe."""
    figures = {"parameters": model.num_parameters(), **figures}
    finish(folder, card(task, run, command, model.config, figures, manifest), figures, manifest)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None, folder: Path) -> None:
    model.generation_config = GenerationConfig(decoder_start_token_id=0, eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


def write_prompts(pairs: Path, tokenizer: PreTrainedTokenizerFast, kind: str, file: Path) -> Path:
    """The last held-out sources of a kind whose texts are not short; figures of held-out pairs are of the first ones."""
    chosen: list[str] = []
    for line in reversed((pairs / "held_out.jsonl").read_text(encoding="utf-8").splitlines()):
        pair = json.loads(line)
        if len(chosen) < PROMPTS and pair["task"] == kind and len(tokenizer(pair["text"]).input_ids) >= SHORTEST[kind]:
            chosen.append(pair["source"])
    file.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in chosen), encoding="utf-8")
    return file


def card(task: str, run: str, command: str, config: T5Config, figures: Figures, manifest: Figures) -> str:
    trained, held_out = figures["training"], figures["held_out"]
    words, target = WORDS[task], f"t5-{task}"
    name = target if run == "target" else f"{target}-{run}"
    role = (
        f"A small encoder-decoder model of {words.kind}, for demonstrations, tests and benchmarks: the target."
        if run == "target"
        else f"The draft model for `{target}`: same tokenizer, trained on the same pairs."
    )
    what = {"this model, bfloat16 weights as packaged": held_out, **{f"{each} baseline": of for each, of in figures["baselines"].items()}}
    rows = "\n".join(
        f"| {label} | {AS[kind]} | {each['exact_match']:.1%} | {each['nats_per_token']:.4f} | {each['accuracy']:.1%} |"
        for label, scores in what.items()
        for kind, each in scores.items()
    )
    stopped = ", stopped there by hand" if trained["tokens"] < trained["budget"] else ""
    note = f" {trained['note']}" if "note" in trained else ""  # what the command alone does not tell, written by hand
    pairs = "" if task == "ast" else f"python -m recipes.t5 pairs --task {task} --out RUN\n"  # those of ast have the tokenizer
    of_task = "" if task == "ast" else f"--task {task} "
    return f"""# {name}

{role} It has seen nothing but {words.seen} and is good for nothing else.

{words.does}

T5 v1.1 architecture, {figures["parameters"]:,} parameters: {config.num_layers} encoder and {config.num_decoder_layers} decoder layers, \
width {config.d_model}, {config.num_heads} heads of {config.d_kv}, gated GELU of {config.d_ff}, a tied head, byte-level BPE of \
{config.vocab_size} tokens whose names have no spaces, so that a name is the same tokens in source and text. Weights in bfloat16.

## Held-out figures

The first {held_out[task]["pairs"]} held-out pairs of each kind. Exact match is of greedy texts; nats are per token of the true text.

| | text | exact match | nats per token | next token right |
| --- | --- | --- | --- | --- |
{rows}

The copy baseline takes the token that stands in the source behind the token just written, and the source's statement as its text.
The n-gram baseline is an interpolated Witten-Bell model of the texts of the training half; it knows no source.

{data_section(manifest)}
{words.data}

## Recipe

```
python -m recipes.zoo corpus --out RUN
python -m recipes.t5 pairs --out RUN
{pairs}\
python -m recipes.t5 train {of_task}--model {run} --budget {trained["budget"] / 1e6:g} --cooldown {trained["cooldown"]:g} --out RUN
python -m recipes.t5 evaluate {of_task}--out RUN
python -m recipes.t5 {command} --out RUN
```

{trained["tokens"]:,} tokens of sources and texts ({trained["epochs"]:.2f} epochs) in {trained["seconds"] / 60:.0f} minutes on \
{trained["machine"]}{stopped}.{note}
Cross-entropy of the texts; Muon and AdamW; warm-up, stable and decay over the last {trained["cooldown"]:.0%}; bfloat16 autocast over
float32 weights.

## Limits

{words.limits} The training data holds names of people and projects, as source code does.
"""
