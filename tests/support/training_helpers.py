"""Shared by the tests of training: small data that a tiny model wrote, a run over it, and the same in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from helpers import forked, prompts, tiny

from foredraft.heads.base import LAST, Batch, Head, HeadConfig, Losses
from foredraft.heads.medusa import MedusaHead
from foredraft.models.identity import shape_of
from foredraft.training import generation
from foredraft.training.acceptance import Held, Measured
from foredraft.training.data import Manifest, Texts
from foredraft.training.generation import Answering
from foredraft.training.options import Options
from foredraft.training.trainer import Trainer

HERE = Path(__file__).parent
LENGTHS = [5, 9, 7, 12, 6, 8, 11, 10]


def answering(**changed: Any) -> Answering:
    return Answering(**{"max_new_tokens": 16, "temperatures": (0.0, 1.0), "batch": 4, **changed})


def make_data(folder: Path, *, count: int = 32, per_shard: int = 8, model: Any = None, report: Any = None, **changed: Any) -> Manifest:
    """``count`` prompts answered by a tiny model, in shards of ``per_shard``."""
    model = tiny() if model is None else model
    asked = prompts([LENGTHS[index % len(LENGTHS)] for index in range(count)])
    report = report or (lambda count: None)
    generation.generate(model, asked, answering(**changed), folder, source={}, per_shard=per_shard, report=report)
    return Manifest.read(folder)


@dataclass(frozen=True)
class ToyConfig(HeadConfig):
    heads: int = field(default=1, kw_only=True)


class ToyHead(Head):
    """One matrix on the last hidden state, with dropout, so that the order of random numbers matters."""

    kind = "medusa"
    config_class = ToyConfig

    def __init__(self, config: ToyConfig):
        super().__init__(config)
        self.out = torch.nn.Linear(config.target.hidden_size, config.target.vocab_size)

    @classmethod
    def for_target(cls, model: Any, **options: Any) -> ToyHead:
        return cls(ToyConfig(shape_of(model), **options)).to(model.dtype)

    def loss(self, batch: Batch) -> Losses:
        hidden = torch.nn.functional.dropout(batch.hidden[:, :-2, 0], 0.2)
        counted = (batch.valid & batch.counted)[:, 2:]
        each = torch.nn.functional.cross_entropy(self.out(hidden).float().transpose(1, 2), batch.ids[:, 2:], reduction="none")
        weight = counted.sum()
        total = (each * counted).sum() / weight
        return Losses(total, {"loss_0": total.detach()}, weight)


class ScriptedHeld(Held):
    """Says that acceptance is what a list says, measurement by measurement."""

    def __init__(self, lengths: Sequence[float]):
        super().__init__([[1]], 1)
        object.__setattr__(self, "lengths", list(lengths))

    def measure(self, model: Any, head: Head) -> Measured:
        return Measured(self.lengths.pop(0), (0.5,), 10)


def options(**changed: Any) -> Options:
    settings = {
        "kind": "medusa",
        "head": {"heads": 2},
        "steps": 12,
        "batch_tokens": 96,
        "warmup": 2,
        "learning_rate": 1e-2,
        "precision": "float32",
        "held_out": 4,
        "answer_tokens": 6,
        "evaluate_every": 5,
        "report_every": 1,
        "save_every": 3,
    }
    return Options(**{**settings, **changed})


def trainer(data: Path, folder: Path, *, cls: type[Head] = MedusaHead, model: Any = None, held: Any = None, **changed: Any) -> Trainer:
    more = {name: changed.pop(name) for name in ("resume", "report", "stored") if name in changed}
    if cls is ToyHead and held is None:
        held = ScriptedHeld([1.0] * 50)
    return Trainer(tiny() if model is None else model, cls, Texts(data), folder, options(**changed), held=held, **more)


def in_a_process(code: str, *arguments: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """Run a program with the tests' modules at hand; by torchrun if by several."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    file = Path(arguments[0]).parent / "program.py"
    file.write_text(code)
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, *launcher, str(file), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)


def was_killed(function: Callable[..., Any], *arguments: Any) -> bool:
    """Whether ``function`` kills the process that runs it, which is a copy of this one."""
    process = forked(function, *arguments)
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode == -signal.SIGKILL


def last_hidden(model: Any, ids: torch.Tensor) -> torch.Tensor:
    assert LAST == -1
    return model(input_ids=ids, output_hidden_states=True).hidden_states[LAST]
