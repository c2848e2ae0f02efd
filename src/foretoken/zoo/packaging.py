"""Turns a finished run into a folder of the package: weights, tokenizer, figures and model card."""

from __future__ import annotations

import json
import platform
import shutil
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from foretoken.drafters.ngram_model import NGramModel
from foretoken.zoo import DRAFT, MODELS, NGRAM, TARGET
from foretoken.zoo.recipe import NGRAM_ORDER


def package_model(name: str, run: Path, tokenizer: PreTrainedTokenizerFast, figures: dict, manifest: dict) -> Path:
    """Writes bfloat16 weights from a run's checkpoint, and what belongs beside them."""
    folder = _fresh(name)
    model = load_run(run).to(torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=1)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    figures = {"parameters": model.num_parameters(), **figures}
    _write_figures(folder, figures, manifest)
    (folder / "README.md").write_text(_model_card(name, model.config, figures, manifest), encoding="utf-8")
    return folder


def package_ngram(model: NGramModel, figures: dict, manifest: dict) -> Path:
    folder = _fresh(NGRAM)
    model.save(folder / "ngram.safetensors")
    figures = {"parameters": model.ngrams, "contexts": model.contexts, **figures}
    _write_figures(folder, figures, manifest)
    (folder / "README.md").write_text(_ngram_card(figures, manifest), encoding="utf-8")
    return folder


def load_run(run: Path) -> LlamaForCausalLM:
    """The model of a run's checkpoint, in float32."""
    from foretoken.zoo.fit import load_weights

    return load_weights(run)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    # The generic class name, so that older readers of the format know the file too.
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _fresh(name: str) -> Path:
    folder = MODELS / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _write_figures(folder: Path, figures: dict, manifest: dict) -> None:
    corpus = {half: {key: manifest[half][key] for key in ("files", "bytes", "sha256")} for half in ("train", "held_out")}
    versions = {name: version(name) for name in ("torch", "transformers", "tokenizers", "numpy")}
    versions["python"] = platform.python_version()
    document = {**figures, "corpus": corpus, "versions": versions}
    (folder / "metrics.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _data_section(manifest: dict) -> str:
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


def _model_card(name: str, config, figures: dict, manifest: dict) -> str:
    held_out, trained, baseline = figures["held_out"], figures["training"], figures["baseline"]
    role = {
        TARGET: "A small language model of Python source, for demonstrations, tests and benchmarks of speculative decoding: the target.",
        DRAFT: f"The draft model for `{TARGET}`: same tokenizer, a ninth of the parameters, distilled from it.",
    }[name]
    command = {TARGET: "target", DRAFT: "draft"}[name]
    return f"""# {name}

{role} It has seen nothing but Python source and is good for nothing else.

Llama architecture, {figures["parameters"]:,} parameters: {config.num_hidden_layers} layers, width {config.hidden_size}, \
{config.num_attention_heads} heads of {config.head_dim} with {config.num_key_value_heads} key-value heads, SwiGLU of \
{config.intermediate_size}, tied embeddings, byte-level BPE of {config.vocab_size} tokens, context {config.max_position_embeddings}. \
Weights in bfloat16.

## Held-out figures

| | bits per byte | nats per token | next token right |
| --- | --- | --- | --- |
| float32 weights | {held_out["float32"]["bits_per_byte"]:.4f} | {held_out["float32"]["nats_per_token"]:.4f} | {held_out["float32"]["accuracy"]:.1%} |
| bfloat16 weights, as packaged | {held_out["bfloat16"]["bits_per_byte"]:.4f} | {held_out["bfloat16"]["nats_per_token"]:.4f} | \
{held_out["bfloat16"]["accuracy"]:.1%} |
| n-gram baseline | {baseline["bits_per_byte"]:.4f} | | |

The baseline is an {baseline["what"]}. This model is {1 - held_out["bfloat16"]["bits_per_byte"] / baseline["bits_per_byte"]:.1%} below it.

{_data_section(manifest)}
## Recipe

```
python -m foretoken.zoo.train corpus --out RUN
python -m foretoken.zoo.train tokenizer --out RUN
python -m foretoken.zoo.train {command} --out RUN
python -m foretoken.zoo.train evaluate --out RUN
python -m foretoken.zoo.train package --out RUN
```

{trained["tokens"]:,} training tokens ({trained["epochs"]:.2f} epochs) in {trained["seconds"] / 60:.0f} minutes on {trained["machine"]}. \
{trained["objective"]}; Muon and AdamW, warm-up, stable and decay; bfloat16 autocast over float32 weights; \
sequences of {trained["lengths"][0]} tokens, of {trained["lengths"][1]} in the cool-down.

## Limits

The text looks like Python and is often wrong. The training data holds names of people and projects, as source code does.
"""


def _ngram_card(figures: dict, manifest: dict) -> str:
    return f"""# {NGRAM}

Which tokens follow which in Python source: a back-off table of order {NGRAM_ORDER} (contexts of up to {NGRAM_ORDER - 1} tokens) for the `ngram`
drafter, with the tokenizer of `{TARGET}`. {figures["parameters"]:,} n-grams in {figures["contexts"]:,} contexts: those seen at least \
{figures["min_count"]} times in training, at most {figures["successors"]} per context.

On the held-out packages the most likely next token is right {figures["held_out"]["accuracy"]:.1%} of the time. As a probability model
(interpolated Witten-Bell) the table needs {figures["held_out"]["bits_per_byte"]:.4f} bits per byte; before pruning, {figures["baseline"]["bits_per_byte"]:.4f}.

{_data_section(manifest)}
## Recipe

```
python -m foretoken.zoo.train corpus --out RUN
python -m foretoken.zoo.train tokenizer --out RUN
python -m foretoken.zoo.train ngram --out RUN
python -m foretoken.zoo.train package --out RUN
```
"""
