"""Checkpoints of a run, from which it goes on exactly: weights, optimiser, random state, and where it stands.

A checkpoint is a folder that appears in one step when all of it is on the disk; older ones are deleted only then.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from foredraft.errors import ConfigurationError
from foredraft.training.data import write_bytes, write_json

if TYPE_CHECKING:
    from accelerate import Accelerator

NAME = re.compile(r"checkpoint-(\d+)")
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
    found = [path for path in folder.glob("checkpoint-*") if NAME.fullmatch(path.name) and (path / STATE).exists()]
    return max(found, key=lambda path: int(path.name.partition("-")[2]), default=None)


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
        _settle(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.replace(final)
        for path in folder.glob("checkpoint-*"):
            if path != final:
                shutil.rmtree(path)
        for path in folder.glob("best-*.safetensors"):
            if path != best_file(folder, state.best):
                path.unlink()
    accelerator.wait_for_everyone()
    return final


def load(accelerator: Accelerator, path: Path) -> None:
    """Put weights, optimiser and random state back as they were."""
    with _untouched():
        accelerator.load_state(str(path))


def state_of(path: Path) -> State:
    """Where the run stood."""
    return State(**_document(path)["state"])


def settings_of(path: Path) -> dict[str, Any]:
    """What the run was asked to do."""
    return _document(path)["settings"]


def _document(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigurationError(f"{str(path)!r} is not a readable checkpoint: {error}; delete it to start again") from error


def _settle(folder: Path) -> None:
    """Make sure that all of it is on the disk before it gets its name."""
    import os

    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


@contextmanager
def _untouched() -> Iterator[None]:
    """accelerate puts back Python's and numpy's generators too, which training does not use and callers may."""
    python, numbers = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
