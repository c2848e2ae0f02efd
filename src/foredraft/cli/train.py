"""``foredraft train``: a head or a draft model for a target, from texts, or the target itself by the LayerSkip recipe."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from foredraft import heads
from foredraft.cli.checks import check_data, check_model
from foredraft.cli.failures import INTERRUPTED, note
from foredraft.cli.options import panel
from foredraft.cli.settings import parse_options
from foredraft.errors import ConfigurationError, unknown
from foredraft.training.distilling import POSITIONS, Distilling
from foredraft.training.layerskip import CURRICULA, SCHEDULES, Recipe
from foredraft.training.options import ALONE, WITHOUT_ENCODER, Options

DATA, LENGTH, OPTIMISER = map(panel, ("Data", "Length", "Optimiser"))
MEASURE, BACKBONE, MACHINE = map(panel, ("Held-out acceptance", "Backbone", "Machine"))
RECIPE, DISTILLING = panel("layerskip"), panel("draft")
ONLY = {  # the options of some kinds
    "heads": ("head_option", "stored_hidden", "successors", "tree_nodes", "backbone_rate", "head_weight", "head_warmup"),
    "layerskip": tuple(Recipe.__dataclass_fields__),
    "draft": (*Distilling.__dataclass_fields__, "prompt_tokens"),
}
RECIPES: dict[str, Any] = {"layerskip": Recipe, "draft": Distilling}
RATES = {"layerskip": 1e-4, "draft": 5e-4}


def train(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="medusa, hydra, eagle3, rnn or exit; layerskip, which trains the target; or draft, which distills a draft model.",
            show_default=False,
        ),
    ],
    target: Annotated[str, typer.Option(help="The model to draft for, or to train: a path, a hub id, or zoo:NAME.", show_default=False)],
    data: Annotated[
        list[Path], DATA(metavar="FOLDER", help="A folder made by foredraft data generate; repeat for more.", show_default=False)
    ],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where the head or model, checkpoints, log and curves go.", show_default=False)
    ],
    head_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", show_default=False, help="An option of the head, such as heads=4; repeat for more."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in FOLDER.")] = False,
    partial: Annotated[bool, DATA("--partial", help="Accept incomplete data.")] = False,
    other_target: Annotated[bool, DATA("--other-target", help="Accept texts that another model wrote.")] = False,
    stored_hidden: Annotated[bool, DATA("--stored-hidden", help="Read hidden states stored by foredraft data hidden.")] = False,
    count_prompts: Annotated[bool, DATA("--count-prompts", help="Train on prompts too, not only on answers.")] = False,
    successors: Annotated[
        bool,
        DATA(
            "--successors/--no-successors",
            help="Count n-grams in the texts and store their log-odds with a Medusa head, which improves its drafts.",
        ),
    ] = True,
    max_length: Annotated[int | None, DATA(min=2, help="Cut longer texts to this many tokens.", show_default="whole texts")] = None,
    steps: Annotated[int | None, LENGTH(min=1, show_default="from --epochs")] = None,
    epochs: Annotated[float, LENGTH(help="Passes over the data.")] = 1.0,
    batch_tokens: Annotated[int, LENGTH(min=1, help="Tokens of a micro-batch, per process.")] = 4096,
    accumulate: Annotated[int, LENGTH(min=1, help="Micro-batches per step, per process.")] = 1,
    learning_rate: Annotated[
        float | None, OPTIMISER(help="Peak learning rate of AdamW.", show_default="1e-3; 1e-4 for layerskip, 5e-4 for draft")
    ] = None,
    warmup: Annotated[int, OPTIMISER(min=0, help="Steps until the peak; a cosine follows.")] = 100,
    weight_decay: Annotated[float, OPTIMISER(min=0.0)] = 0.0,
    clip: Annotated[float, OPTIMISER(help="Largest gradient norm.")] = 1.0,
    seed: Annotated[int, OPTIMISER(min=0, help="Seed of the weights and of the order of texts.")] = 0,
    evaluate_every: Annotated[
        int, MEASURE(min=1, help="Steps between evaluations. The head or model with the longest acceptance length is kept.")
    ] = 500,
    patience: Annotated[int, MEASURE(min=0, help="Stop after this many evaluations without improvement; 0 is never.")] = 0,
    held_out: Annotated[int, MEASURE(min=1, help="Prompts to evaluate on: the last ones of the data, which are not trained on.")] = 32,
    held_out_data: Annotated[
        Path | None, MEASURE(metavar="FOLDER", help="Evaluate on the first prompts of this folder instead.", show_default=False)
    ] = None,
    answer_tokens: Annotated[int, MEASURE(min=1, help="Tokens per prompt.")] = 64,
    tree_nodes: Annotated[
        int | None, MEASURE(min=1, help="Nodes of the tree that is stored with the head.", show_default="chosen by measured costs")
    ] = None,
    backbone: Annotated[
        str | None,
        BACKBONE(
            help="frozen, lora or full. lora and full also train the target, and the changed target then verifies the drafts. For draft: "
            "whether the draft is trained whole or by adapters, which are merged into it.",
            show_default="frozen; full for layerskip and draft",
        ),
    ] = None,
    backbone_rate: Annotated[float | None, BACKBONE(help="Learning rate of the backbone.", show_default="a quarter of the heads'")] = None,
    head_weight: Annotated[float, BACKBONE(help="Weight of the heads' loss relative to the target's, after warm-up.")] = 0.2,
    head_warmup: Annotated[float, BACKBONE(help="Share of the steps that warm it up.")] = 0.2,
    lora_rank: Annotated[int, BACKBONE(min=1, help="Rank of the adapters.")] = 16,
    dropout: Annotated[float, RECIPE(help="How often a text leaves out the last layer; lower layers less often.")] = Recipe.dropout,
    schedule: Annotated[str, RECIPE(help=f"Of the dropout: {' or '.join(SCHEDULES)} (from 0, for a new model).")] = Recipe.schedule,
    scale: Annotated[float, RECIPE(help="Weight of early exits relative to the last layer; 0 trains none but --exit.")] = Recipe.scale,
    curriculum: Annotated[str, RECIPE(help=f"Which exits learn in a step: {', '.join(CURRICULA)}.")] = Recipe.curriculum,
    rotation: Annotated[
        int, RECIPE(min=1, help="With rotational: every so many layers, the next ones in the next step.")
    ] = Recipe.rotation,
    exit: Annotated[
        int | None,
        RECIPE(
            min=1,
            help="Favour the exit behind so many layers: it learns in every step, and acceptance is measured with it.",
            show_default="none; measured with a third of the layers",
        ),
    ] = Recipe.exit,
    favour: Annotated[float, RECIPE(help="Weight of --exit relative to the last layer.")] = Recipe.favour,
    draft: Annotated[
        str,
        DISTILLING(
            metavar="MODEL",
            help="What is trained: a path, a hub id or zoo:NAME; target[0,3,7] for a copy of these layers; or a config.json, from scratch.",
            show_default=False,
        ),
    ] = Distilling.draft,
    loss: Annotated[
        str, DISTILLING(help="fkl, rkl, jsd(β), tvd, lk(η) or ce, or a sum of them such as 0.5*fkl+0.5*tvd.")
    ] = Distilling.loss,
    temperature: Annotated[float, DISTILLING(help="At which the draft will be served.")] = Distilling.temperature,
    positions: Annotated[str, DISTILLING(help=f"Which tokens count: {' or '.join(POSITIONS)}.")] = Distilling.positions,
    on_policy: Annotated[
        float, DISTILLING(metavar="λ", help="Share of the texts that the draft itself continues, as it is at that time.")
    ] = Distilling.on_policy,
    rewrite_every: Annotated[
        int, DISTILLING(min=1, metavar="N", help="Steps after which texts are written anew.")
    ] = Distilling.rewrite_every,
    teacher_texts: Annotated[bool, DISTILLING("--teacher-texts", help="The target continues the other texts.")] = Distilling.teacher_texts,
    stored_probabilities: Annotated[
        bool,
        DISTILLING("--stored-probabilities", help="Read the target's top-k probabilities from the data instead of computing them all."),
    ] = Distilling.stored_probabilities,
    prompt_tokens: Annotated[
        int | None, DISTILLING(min=1, help="Take this many tokens of each text as its prompt.", show_default="the prompts of the data")
    ] = None,
    precision: Annotated[str, MACHINE(help="bf16: products in bfloat16 over float32 weights; or float32.")] = "bf16",
    dtype: Annotated[str, MACHINE(help="The target's: auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, MACHINE(help="cpu, cuda, ….", show_default="the process's GPU if there is one")] = None,
    threads: Annotated[int | None, MACHINE(min=1, help="CPU threads.", show_default="torch's choice")] = None,
    save_every: Annotated[int, MACHINE(min=1, help="Steps between checkpoints.")] = 200,
    report_every: Annotated[int, MACHINE(min=1, help="Steps between lines of the log.")] = 20,
) -> None:
    """Train a head for a target, on texts that the target generated. Use it as --drafter KIND:FOLDER (exit: layer-skip:FOLDER).

    layerskip trains the target itself to exit early, by the LayerSkip recipe. Use the result as --target FOLDER --drafter layer-skip.

    draft distills the draft model --draft from the target. Use the result as --drafter draft-model:FOLDER.

    On several devices: torchrun --nproc-per-node N -m foredraft train …. Ctrl-C or SIGTERM saves; the same command with --resume goes on
    exactly. Exit codes: 0 success, 1 failure while running, 2 invalid arguments, 130 stopped and saved.
    """
    given = {name: value for name, value in locals().items() if name in inspect.signature(train).parameters}
    if kind not in (kinds := [*heads.names(), *ALONE]):
        raise unknown("unknown kind of head", kind, kinds)
    check_options(kind if kind in ALONE else "heads", kind, given)
    check_backbone(backbone or ("full" if kind in ALONE else "frozen"), given)
    check_model(target, dtype, device, encoders=kind not in WITHOUT_ENCODER)
    check_data(data if held_out_data is None else [*data, held_out_data])
    from foredraft.training.runs import run

    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it warns of tied weights in every checkpoint
    named = {name: given[name] for name in Options.__dataclass_fields__ if name in given}
    named["backbone"] = backbone or ("full" if kind in ALONE else "frozen")
    named["learning_rate"] = RATES.get(kind, 1e-3) if learning_rate is None else learning_rate
    recipe = {name: given[name] for name in RECIPES[kind].__dataclass_fields__} if kind in ALONE else head_options(head_option or ())
    if kind in ALONE:
        RECIPES[kind](**recipe)  # what is wrong with it is said before anything is loaded
    options = Options(**named, head=recipe)
    own = {name: given[name] for name in inspect.signature(run).parameters if name in given}
    finished = run(**own, options=options, report=show)
    if finished is None:
        note(f"stopped and saved; the same command with --resume goes on from there: {out}")
        raise typer.Exit(INTERRUPTED)
    for line in finished:
        typer.echo(line)


def check_options(group: str, kind: str, given: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for an option that another group of kinds than ``group`` takes."""
    for other, names in ONLY.items():
        for name in names:
            if other != group and given[name] != inspect.signature(train).parameters[name].default:
                raise ConfigurationError(f"--{name.replace('_', '-')} is for {other}, not for {kind}; leave it out")


def check_backbone(backbone: str, given: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for an option of another way to train the backbone."""
    trained = ("lora", "full")
    for name, ways in {"backbone_rate": trained, "head_weight": trained, "head_warmup": trained, "lora_rank": ("lora",)}.items():
        if backbone not in ways and given[name] != inspect.signature(train).parameters[name].default:
            raise ConfigurationError(f"--{name.replace('_', '-')} is for --backbone {' or '.join(ways)}; pass that, or leave it out")


def head_options(given: Sequence[str]) -> dict[str, Any]:
    """``KEY=VALUE`` strings; whole numbers with commas between them are several, as in ``aux_layers=1,4,6``."""
    found = parse_options(given, "--head-option")
    for name, value in found.items():
        parts = value.split(",") if isinstance(value, str) else []
        if len(parts) > 1 and all(part.strip().isdecimal() for part in parts):
            found[name] = [int(part) for part in parts]
    return found


def show(line: Mapping[str, Any]) -> None:
    """A line of the log, for people."""
    if "note" in line:
        note(line["note"])
        return
    if "acceptance_length" in line:
        depths = " ".join(f"{share:.0%}" for share in line["accepted_by_depth"])
        more = f"; own loss {line['held_out_loss']:.4f}" if "held_out_loss" in line else ""
        if "alpha" in line:
            more = f"; greedy {line['greedy_length']:.3f}, sampled {line['sampled_length']:.3f}, α {line['alpha']:.3f}"
        typer.echo(f"{line['step']:>7}  held out: {line['acceptance_length']:.3f} tokens per pass (accepted by depth {depths}){more}")
        return
    speed = f"  {line['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in line else ""
    typer.echo(f"{line['step']:>7}  loss {line['loss']:.4f}  rate {line['learning_rate']:.2e}  norm {line['gradient_norm']:.2f}{speed}")
