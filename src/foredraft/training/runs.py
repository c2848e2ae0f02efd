"""A training run from names to a stored head: what ``foredraft train`` does."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from foredraft import heads
from foredraft.errors import ConfigurationError
from foredraft.heads.medusa import MedusaHead
from foredraft.loading import load_model, load_tokenizer
from foredraft.training.acceptance import Held, calibrated, counted
from foredraft.training.data import Manifest, Texts, name_of, refuse_other_data
from foredraft.training.options import Options
from foredraft.training.trainer import Outcome, Trainer

RUN = "run"  # checkpoints, log and curves, below the folder of the head


def run(
    target: str,
    data: Path | Sequence[Path],
    out: Path,
    options: Options,
    *,
    resume: bool = False,
    partial: bool = False,
    other_target: bool = False,
    held_out_data: Path | None = None,
    dtype: str = "auto",
    device: str | None = None,
    threads: int | None = None,
    tree_nodes: int | None = None,
    successors: bool = True,
    stored_hidden: bool = False,
    report: Callable[[Mapping[str, Any]], None] = lambda line: None,
) -> list[str] | None:
    """Train a head and store the best one in ``out``; what came of it, in words, or None if the run was stopped before its end.

    Raises:
        ConfigurationError: an unknown kind or option, data of another target, or a run that was begun otherwise.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    kind = heads.find(options.kind)
    folders = [data] if isinstance(data, Path) else list(data)
    for folder in folders:
        Manifest.read(folder)  # before weights are read
    model = load_model(target, dtype=dtype, device=device or own_device())
    parts = [Texts(folder, partial=partial) for folder in folders]
    for part in parts:
        refuse_other_data(part.manifest, model, other_target=other_target)
    texts = Texts.together(parts)
    held = None
    if held_out_data is not None:
        others = Texts(held_out_data, partial=True)
        refuse_other_data(others.manifest, model, other_target=True)
        held = Held([others.prompt(index) for index in range(min(len(others), options.held_out))], options.answer_tokens)
    trainer = Trainer(model, kind, texts, out / RUN, options, held=held, resume=resume, stored=stored_hidden, report=report)
    outcome = trainer.train()
    if not outcome.finished:
        return None
    facts = {"target": name_of(model), "data": settings_of(texts), "options": options.to_dict()}
    said = store(trainer, outcome, target, out, facts, tree_nodes, successors=successors) if trainer.accelerator.is_main_process else []
    trainer.accelerator.wait_for_everyone()
    return said


def store(
    trainer: Trainer,
    outcome: Outcome,
    target: str,
    out: Path,
    facts: Mapping[str, Any],
    tree_nodes: int | None = None,
    *,
    successors: bool = True,
) -> list[str]:
    """Store the head with its tree, its n-gram log-odds and how it was made, and the target where that was trained too."""
    from foredraft.heads import checkpoints

    state, kind = outcome.state, trainer.options.kind
    training = {"steps": state.step, "tokens": state.tokens, "best_step": state.best, "acceptance_length": state.best_length}
    about = {**facts, **training}
    checkpoints.save(outcome.head, out, about=about)
    said = [
        f"{out}: {kind} head of step {state.best}, {state.best_length:.3f} tokens per pass on held-out prompts; use --drafter {kind}:{out}"
    ]
    if successors and isinstance(outcome.head, MedusaHead):
        found = counted(outcome.head, trainer.model, trainer.held, trainer.texts)
        checkpoints.save(outcome.head, out, about=about)
        listed = sum(len(each.tokens) for each in found.lists)
        said += [f"{listed:,} n-gram log-odds are stored with it; weights {', '.join(map(str, found.weights))}"]
    try:
        tree = calibrated(outcome.head, trainer.model, trainer.held, nodes=tree_nodes)
    except ConfigurationError as error:
        said += [f"no tree is stored with it: {error}"]
    else:
        if tree is not None:
            checkpoints.save(outcome.head, out, about=about)
            said += [f"its tree has {tree.tree.nodes} nodes, {tree.expected:.3f} tokens per pass expected of it: {tree.tree}"]
    if trainer.opened is None:
        return said
    changed = out / ("adapter" if trainer.options.backbone == "lora" else "target")
    trainer.opened.save_pretrained(changed, **({"save_embedding_layers": False} if trainer.options.backbone == "lora" else {}))
    tokenizer = tokenizer_of(target)
    if tokenizer is not None:
        tokenizer.save_pretrained(changed)
    return [
        *said,
        f"{changed}: the target, which was trained too; text drafted by this head has its output distribution, not that of {target}",
    ]


def settings_of(texts: Texts) -> Any:
    """How the texts were written: of one folder, or a list of each."""
    found = [dict(part.manifest.settings) for part in texts.parts]
    return found[0] if len(found) == 1 else found


def tokenizer_of(target: str) -> Any:
    """None where it has none."""
    try:
        return load_tokenizer(target)
    except ConfigurationError:
        return None


def own_device() -> str:
    """The GPU of this process, of those that torchrun started, or the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if rank >= torch.cuda.device_count():
        raise ConfigurationError(f"process {rank} has no GPU: there are {torch.cuda.device_count()}; start as many, or pass --device cpu")
    return f"cuda:{rank}"
