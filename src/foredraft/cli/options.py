"""The panels of the help texts, options that several commands share, and how a command takes them in groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` for typer: a parameter that is a dataclass stands for the fields of it that are ``Annotated``, which become options.

    A field that ``command`` has a parameter of its own for takes its value from that.
    """
    hints, groups, parameters = get_type_hints(command, include_extras=True), dict[str, Any](), list[Parameter]()
    for name, parameter in signature(command).parameters.items():
        kind = hints[name]
        if not is_dataclass(kind):
            parameters.append(parameter.replace(annotation=kind))
            continue
        types, groups[name] = get_type_hints(kind, include_extras=True), kind
        parameters += [
            Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=types[each.name])
            for each in fields(kind)
            if each.name not in hints and get_origin(types[each.name]) is Annotated
        ]

    @wraps(command)
    def run(**values: Any) -> None:
        made = {
            name: kind(**{each.name: values[each.name] for each in fields(kind) if each.name in values}) for name, kind in groups.items()
        }
        command(**{name: value for name, value in values.items() if name in hints}, **made)

    vars(run)["__signature__"] = Signature(parameters)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def panel(name: str) -> partial[Any]:
    """``typer.Option`` for options that help shows under ``name``."""
    return partial(typer.Option, rich_help_panel=name)


PROMPTS, MODELS, SPECULATION, SAMPLING, OUTPUT = map(panel, ("Prompts", "Models", "Speculation", "Decoding", "Output"))
LINES = 'One prompt per line; in a .jsonl file, one JSON object with a "prompt" per line.'
BEGINNINGS = "built-in ones"
COMPARED = "prompt-lookup; for zoo targets draft-model:zoo:python-1m too"

Target = Annotated[str, MODELS(help="The model: a path, a hub id, or zoo:NAME (see foredraft models).")]
Dtype = Annotated[str, MODELS(help="auto (as in the checkpoint), float32, bfloat16 or float16.")]
Quantization = Annotated[
    str | None,
    MODELS(
        help="int8 or int4 (int4-64, int4-128: other group sizes than 32) loads the model with such weights (torchao). That is another "
        "model, with its own output distribution.",
        show_default="as in the checkpoint",
    ),
]
Device = Annotated[
    str | None,
    MODELS(help="cpu, gpu, cuda, cuda:1, …, or auto to spread the model over all devices.", show_default="cuda if there is one, else cpu"),
]
Threads = Annotated[int | None, MODELS(min=1, help="CPU threads.", show_default="torch's choice")]
PromptFile = Annotated[Path | None, PROMPTS(metavar="FILE", help=LINES, show_default=BEGINNINGS)]
Candidates = Annotated[
    list[str] | None,
    SPECULATION("--drafter", metavar="NAME[:SOURCE]", help="A drafter to measure; repeat for more.", show_default=COMPARED),
]
Drafter = Annotated[
    str | None,
    SPECULATION(
        metavar="NAME[:SOURCE]",
        help="The drafter (see foredraft drafters); none is plain decoding.",
        show_default="prompt-lookup; for zoo:python-300m, draft-model:zoo:python-1m",
    ),
]
DrafterOption = Annotated[
    list[str] | None,
    SPECULATION(
        metavar="KEY=VALUE",
        show_default=False,
        help="An option of the drafter; repeat for more. Values may be numbers, true, false, none, text or a JSON object.",
    ),
]
VerificationRule = Annotated[
    str, SPECULATION(help="The verification rule: auto, or one of 'foredraft rules', such as lenient(epsilon=0.3).")
]
Learn = Annotated[
    bool,
    SPECULATION(
        "--learn",
        help="The drafter learns from what is generated. A draft model or a head does so in a second process, and the cache folder then "
        "keeps pieces of the texts.",
    ),
]
Shape = Annotated[
    str | None,
    SPECULATION(
        help="The largest tree per round: chain(5), product(4,2,1), paths(0,1,0.0), dynamic(depth=5,k=4,total=16), opt(total=16), or "
        "auto, which chooses in every round by measured costs.",
        show_default="auto",
    ),
]
TopK = Annotated[
    int | None, SAMPLING(min=0, help="Sample from the k most likely tokens; 0 is all.", show_default="the model's, or transformers' 50")
]
TopP = Annotated[
    float | None,
    SAMPLING(min=0.0, max=1.0, help="Sample from the most likely tokens whose probabilities sum to this.", show_default="the model's"),
]
MinP = Annotated[
    float | None,
    SAMPLING(min=0.0, max=1.0, help="Leave out tokens less likely than this share of the most likely one.", show_default="the model's"),
]
RepetitionPenalty = Annotated[
    float | None, SAMPLING(help="Above 1, tokens of the text so far become less likely.", show_default="the model's, or none")
]
ModelsTemperature = Annotated[
    float | None, SAMPLING(min=0.0, help="Above 0, sample; at 0, decode greedily.", show_default="as the model's generation config says")
]
MaxNewTokens = Annotated[int | None, SAMPLING(min=1, help="Most new tokens per prompt.", show_default="the model's, or 256")]
Stop = Annotated[list[str] | None, SAMPLING(metavar="TEXT", help="End where this appears; repeat for more.", show_default=False)]
Seed = Annotated[
    int | None,
    SAMPLING(
        min=0,
        help="The same seed gives the same text; --rule auto then means match. Another --rule also needs a fixed --shape.",
        show_default="drawn, and shown at the end if it repeats the text",
    ),
]
System = Annotated[str | None, PROMPTS(metavar="TEXT", help="A system message for the chat template.", show_default=False)]
Temperature = Annotated[float, SAMPLING(min=0.0, help="Above 0, sample; at 0, decode greedily.")]
JsonSchema = Annotated[Path | None, SAMPLING(metavar="FILE", help="The text is JSON that fits this schema.", show_default=False)]
Regex = Annotated[str | None, SAMPLING(help="The text matches this regular expression.", show_default=False)]
GrammarFile = Annotated[Path | None, SAMPLING(metavar="FILE", help="The text matches this grammar, Lark or EBNF.", show_default=False)]
GrammarBackend = Annotated[
    str | None, SAMPLING(help="The library for these: llguidance, xgrammar or outlines.", show_default="the first that is installed")
]
JsonFile = Annotated[Path | None, OUTPUT("--json", metavar="FILE", help="Write the full report to this file.", show_default=False)]
Verbose = Annotated[bool, OUTPUT("--verbose", help="Show all figures: passes, drafted and accepted tokens, shape, rule, execution.")]
