"""Checkpoints of a run, from which it goes on exactly: weights, optimiser, random state, and where it stands.

A checkpoint is a folder that appears in one step when all of it is on the disk; older ones are deleted only then.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from foredraft.errors import ConfigurationError
from foredraft.files import to_disk
from foredraft.training.data import write_bytes, write_json

if TYPE_CHECKING:
    from accelerate import Accelerator

STATE = "state.json"


@dataclass(frozen=True)
class State:
    """Where a run stands after ``step`` steps; ``best`` is the step with the longest held-out acceptance, ``stale`` the measurements
    since."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: int = 0
    best_length: float = 0.0
    stale: int = 0


def best_file(folder: Path, step: int) -> Path:
    """The head as it was when acceptance was longest."""
    return folder / f"best-{step:07d}.safetensors"


def save_best(folder: Path, step: int, weights: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save

    write_bytes(best_file(folder, step), save({name: value.detach().cpu().contiguous() for name, value in weights.items()}))


def load_best(folder: Path, step: int) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(best_file(folder, step))


def latest(folder: Path) -> Path | None:
    """The checkpoint of the latest step, None if there is none."""
    return max((path.parent for path in folder.glob(f"checkpoint-{7 * '[0-9]'}/{STATE}")), default=None)


def save(accelerator: Accelerator, folder: Path, state: State, settings: Mapping[str, Any]) -> Path:
    """All processes take part; the first names it."""
    final, partial = folder / f"checkpoint-{state.step:07d}", folder / f".checkpoint-{state.step:07d}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_json(partial / STATE, {"state": asdict(state), "settings": settings})
        for path in partial.rglob("*"):
            if path.is_file():
                to_disk(path)
        if final.exists():
            shutil.rmtree(final)
        partial.replace(final)
        for path in set(folder.glob("checkpoint-*")) - {final}:
            shutil.rmtree(path)
        for path in set(folder.glob("best-*.safetensors")) - {best_file(folder, state.best)}:
            path.unlink()
    accelerator.wait_for_everyone()
    return final


def load(accelerator: Accelerator, path: Path) -> None:
    """Restore weights, optimiser and torch's random state. accelerate restores Python's and numpy's generators too; training does not use
    them, but callers may, so they are put back."""
    python, numbers = random.getstate(), np.random.get_state()
    try:
        accelerator.load_state(str(path))
    finally:
        random.setstate(python)
        np.random.set_state(numbers)


def read(path: Path) -> tuple[State, dict[str, Any]]:
    """Where the run stood, and its settings."""
    try:
        found = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigurationError(f"{str(path)!r} is not a readable checkpoint: {error}; delete it to start again") from error
    return State(**found["state"]), found["settings"]
