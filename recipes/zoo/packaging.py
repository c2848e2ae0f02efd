"""Turns a finished run into a folder of the package: weights, tokenizer, figures and model card."""

from __future__ import annotations

import json
import platform
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from foredraft.drafters.ngram_model import NGramModel
from foredraft.zoo import DEEP, DRAFT, NGRAM, TARGET, root
from recipes.zoo.evaluation import ROUNDING_SAMPLE
from recipes.zoo.recipe import NGRAM_ORDER

VERSIONS = ("torch", "transformers", "tokenizers", "numpy")

LOSSES = {
    DEEP: "Next-token cross-entropy behind the last layer, behind the fourth, which counts half as much, and behind one of the others in "
    "turn, with layer dropout of up to 10 %"
}

Figures = dict[str, Any]  # what becomes JSON


def package_model(name: str, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, figures: Figures, manifest: Figures) -> Path:
    """Writes bfloat16 weights and what belongs beside them."""
    folder = fresh(name)
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=1)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    figures = {"parameters": model.num_parameters(), **figures}
    finish(folder, _model_card(name, model.config, figures, manifest), figures, manifest)
    return folder


def package_ngram(model: NGramModel, figures: Figures, manifest: Figures) -> Path:
    folder = fresh(NGRAM)
    model.save(folder / "ngram.safetensors")
    figures = {"parameters": model.ngrams, "contexts": model.contexts, **figures}
    finish(folder, _ngram_card(figures, manifest), figures, manifest)
    return folder


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    # The generic class name, so that older readers of the format know the file too.
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    for local in ("is_local", "local_files_only"):
        settings.pop(local, None)
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def fresh(name: str) -> Path:
    folder = root() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def finish(folder: Path, card: str, figures: Figures, manifest: Figures) -> None:
    """Write card and figures beside what is packaged, and make all of it readable."""
    (folder / "README.md").write_text(card, encoding="utf-8")
    corpus = {half: {key: manifest[half][key] for key in ("files", "bytes", "sha256")} for half in ("train", "held_out")}
    versions = {"python": platform.python_version(), **{name: version(name) for name in VERSIONS}}
    document = {**figures, "corpus": corpus, "versions": versions}
    (folder / "metrics.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o644)  # safetensors makes its files private


def data_section(manifest: Figures) -> str:
    def names(half: str) -> str:
        packages = manifest[half]["packages"]
        distributions = [f"{name} {entry['version']}" for name, entry in packages.items() if "version" in entry]
        modules = [name.removeprefix("stdlib:") for name in packages if name.startswith("stdlib:")]
        library = ", ".join(f"`{name}`" for name in modules) if half == "held_out" else f"{len(modules)} modules and packages"
        return f"{', '.join(distributions)}; of the standard library {library}"

    train, held_out = manifest["train"], manifest["held_out"]
    return f"""## Data

Python source that every machine with this project has: the standard library and the installed dependencies, without test suites,
vendored copies, generated tables and near-duplicates (MinHash). The split is by package.

- **Train**: {train["files"]:,} files, {train["bytes"] / 1e6:.1f} MB: {names("train")}.
- **Held out** ({held_out["bytes"] / (train["bytes"] + held_out["bytes"]):.1%}): {held_out["files"]:,} files, \
{held_out["bytes"] / 1e6:.1f} MB: {names("held_out")}.

Each package keeps its own licence; `metrics.json` has the digests of both halves.
"""


def _exits_section(held_out: Figures, plain: Figures | None) -> str:
    beside = (
        ""
        if plain is None
        else (
            "; beside it the same architecture trained on the same tokens without early exits, which has "
            f"{plain['bfloat16']['bits_per_byte']:.4f} bits per byte"
        )
    )
    columns = [held_out["exits"]] if plain is None else [held_out["exits"], plain["exits"]]
    rows = "\n".join(f"| {exit} | {' | '.join(f'{each:.1%}' for each in shares)} |" for exit, shares in enumerate(zip(*columns), 1))
    return f"""## Early exits

How often the most likely token behind so many layers is that of the last layer, on every {ROUNDING_SAMPLE}th held-out document{beside}.

| layers | this model |{"" if plain is None else " without early exits |"}
| --- |{" --- |" * len(columns)}
{rows}

"""


def _distilled_section(distilled: Figures) -> str:
    rows = "\n".join(
        f"| {name} | {each['alpha']:.3f} | {each['agreement']:.1%} | {each['greedy_length']:.3f} | {each['sampled_length']:.3f} |"
        for name, each in (("before", distilled["before"]), ("after", distilled["after"]))
    )
    head, options = distilled["options"]["head"], distilled["options"]
    return f"""## Distilled

After the corpus it was distilled from `{TARGET}` (`foredraft train draft`): loss `{head["loss"]}`, on texts that the target wrote at
temperature 1 after windows of the corpus; {distilled["steps"]:,} steps of {options["batch_tokens"]:,} tokens at a rate of \
{options["learning_rate"]:g}; step {distilled["after"]["step"]:,} was the best and is kept. On {options["held_out"]} held-out prompts, \
chains of 5:

| | α | greedy agreement | tokens per pass, greedy | at temperature 1 |
| --- | --- | --- | --- | --- |
{rows}

"""


def _model_card(name: str, config: LlamaConfig, figures: Figures, manifest: Figures) -> str:
    held_out, trained, baseline = figures["held_out"], figures["training"], figures["baseline"]
    sample = held_out["sample"]
    distilling = "python -m recipes.zoo texts --out RUN\npython -m recipes.zoo distill --out RUN\n" if "distilled" in figures else ""
    role = {
        TARGET: "A small language model of Python source, for demonstrations, tests and benchmarks of speculative decoding: the target.",
        DRAFT: f"The draft model for `{TARGET}`: same tokenizer, an eighth of the parameters, trained on the same corpus"
        f"{' and then distilled from it' if 'distilled' in figures else ''}.",
        DEEP: "A deep and narrow language model of Python source whose lower layers were trained to predict too (LayerSkip, Elhoushi et "
        "al. 2024), for demonstrations, tests and benchmarks of drafting with part of the target.",
    }[name]
    command = {TARGET: "target", DRAFT: "draft", DEEP: "deep"}[name]
    command += f" --budget {trained['budget'] / 1e6} --cooldown {trained['cooldown']}"
    stopped = ", stopped there by hand" if trained["tokens"] < trained["budget"] else ""

    note = f" {trained['note']}" if "note" in trained else ""  # what the command alone does not tell, written by hand

    def row(label: str, score: Figures) -> str:
        return f"| {label} | {score['bits_per_byte']:.4f} | {score['nats_per_token']:.4f} | {score['accuracy']:.1%} |"

    return f"""# {name}

{role} It has seen nothing but Python source and is good for nothing else.

Llama architecture, {figures["parameters"]:,} parameters: {config.num_hidden_layers} layers, width {config.hidden_size}, \
{config.num_attention_heads} heads of {config.head_dim} with {config.num_key_value_heads} key-value heads, SwiGLU of \
{config.intermediate_size}, tied embeddings, byte-level BPE of {config.vocab_size} tokens, context {config.max_position_embeddings}. \
Weights in bfloat16.

## Held-out figures

| | bits per byte | nats per token | next token right |
| --- | --- | --- | --- |
{row("this model, bfloat16 weights as packaged", held_out["bfloat16"])}
{row("n-gram baseline", baseline)}

The baseline is an {baseline["what"]}. This model is {1 - held_out["bfloat16"]["bits_per_byte"] / baseline["bits_per_byte"]:.1%} below it.

Rounding the weights: on every {ROUNDING_SAMPLE}th document {sample["float32"]["bits_per_byte"]:.4f} bits per byte with float32 weights, \
{sample["bfloat16"]["bits_per_byte"]:.4f} with bfloat16.

{_exits_section(held_out, figures.get("plain")) if "exits" in held_out else ""}\
{_distilled_section(figures["distilled"]) if distilling else ""}\
{data_section(manifest)}
## Recipe

```
python -m recipes.zoo corpus --out RUN
python -m recipes.zoo tokenizer --out RUN
python -m recipes.zoo {command} --out RUN
{distilling}\
python -m recipes.zoo evaluate --out RUN
python -m recipes.zoo package --out RUN
```

{trained["tokens"]:,} training tokens ({trained["epochs"]:.2f} epochs) in {trained["seconds"] / 60:.0f} minutes on \
{trained["machine"]}{stopped}.{note}
{LOSSES.get(name, "Next-token cross-entropy")}; Muon and AdamW;
warm-up, stable and decay over the last {trained["cooldown"]:.0%}; bfloat16 autocast over float32 weights;
sequences of {trained["lengths"][0]} tokens, of {trained["lengths"][1]} and then {trained["lengths"][2]} in the cool-down.

## Limits

The text looks like Python and is often wrong. The training data holds names of people and projects, as source code does.
"""


def _ngram_card(figures: Figures, manifest: Figures) -> str:
    return f"""# {NGRAM}

Which tokens follow which in Python source: a back-off table of order {NGRAM_ORDER} (contexts of up to {NGRAM_ORDER - 1} tokens) for \
the `ngram` drafter, with the tokenizer of `{TARGET}`. {figures["parameters"]:,} n-grams in {figures["contexts"]:,} contexts: \
those seen at least {figures["min_count"]} times in training, at most {figures["successors"]} per context.

On the held-out packages the most likely next token is right {figures["held_out"]["accuracy"]:.1%} of the time; before pruning it was \
{figures["baseline"]["accuracy"]:.1%}, and as a probability model (interpolated Witten-Bell) the whole table needed \
{figures["baseline"]["bits_per_byte"]:.4f} bits per byte. The pruned one is for ranking, not for probabilities.

{data_section(manifest)}
## Recipe

```
python -m recipes.zoo corpus --out RUN
python -m recipes.zoo tokenizer --out RUN
python -m recipes.zoo ngram --out RUN
python -m recipes.zoo package --out RUN
```
"""
