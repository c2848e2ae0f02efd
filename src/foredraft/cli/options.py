"""The panels of the help texts, and options that several commands share."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer


def panel(name: str) -> partial[Any]:
    """``typer.Option`` for options that help shows under ``name``."""
    return partial(typer.Option, rich_help_panel=name)


PROMPTS, MODELS, SPECULATION, SAMPLING, OUTPUT = map(panel, ("Prompts", "Models", "Speculation", "Decoding", "Output"))
LINES = 'One prompt per line; in a .jsonl file, one JSON object with a "prompt" per line.'
BEGINNINGS = "six beginnings of Python, for the embedded models"
COMPARED = "prompt-lookup; for zoo targets draft-model:zoo:python-1m too"

Target = Annotated[str, MODELS(help="The model: a path, a hub id, or zoo:NAME (see foredraft models).")]
Dtype = Annotated[str, MODELS(help="auto (as in the checkpoint), float32, bfloat16 or float16.")]
Quantization = Annotated[
    str | None,
    MODELS(
        help="int8 loads the model with int8 weights (torchao). That is another model, with its own output distribution.",
        show_default="as in the checkpoint",
    ),
]
Device = Annotated[
    str | None,
    MODELS(help="cpu, cuda, cuda:1, …, or auto to spread the model over all devices.", show_default="cuda if there is one, else cpu"),
]
Threads = Annotated[int | None, MODELS(min=1, help="CPU threads.", show_default="torch's choice")]
PromptFile = Annotated[Path | None, PROMPTS(metavar="FILE", help=LINES, show_default=BEGINNINGS)]
Candidates = Annotated[
    list[str] | None, SPECULATION(metavar="NAME[:SOURCE]", help="A drafter to measure; repeat for more.", show_default=COMPARED)
]
Temperature = Annotated[float, SAMPLING(min=0.0, help="Above 0, sample; at 0, decode greedily.")]
JsonFile = Annotated[Path | None, OUTPUT("--json", metavar="FILE", help="Write the full report to this file.", show_default=False)]
