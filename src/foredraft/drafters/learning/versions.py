"""The folder of a drafter that learns: what it began with, the versions that came of it, and whom it is for.

Weights are written in one step, so that whoever reads them, also after a crash, finds a version whole or not at all. One process at a time
learns in a folder; the others use what it publishes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from foredraft.caching import warn_once
from foredraft.errors import ConfigurationError
from foredraft.files import has_locks, locked, replacing, save_tensors, unlocked

ABOUT, FIRST, FROZEN, LOCK, TEXTS = "about.json", "first.safetensors", "frozen.safetensors", "lock", "texts.bin"


class Versions:
    """The versions of one draft in ``folder``.

    Args:
        keep: how many of the newest are kept.
    """

    def __init__(self, folder: Path, *, keep: int = 3):
        self.folder, self.keep = folder, keep
        self._lock: BinaryIO | None = None

    # -- whose it is --------------------------------------------------------------------------------------------------

    def begin(self, about: Mapping[str, Any], first: Mapping[str, Tensor], frozen: Callable[[], Mapping[str, Tensor]] = dict) -> None:
        """Make the folder what ``about`` says, with the ``first`` weights, unless it is that already. ``frozen`` makes what the learner
        needs besides, and does not train.

        Raises:
            ConfigurationError: it cannot be written, or belongs to another target or another draft.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            there = {path.name for path in self.folder.iterdir()}  # looked at once: another process may be beginning as well
            if ABOUT in there:
                self._compare(about)
            elif any(name != LOCK and not name.endswith(".tmp") for name in there):
                raise ConfigurationError(f"{str(self.folder)!r} holds something else; give learning a folder of its own")
            else:
                with replacing(self.folder / ABOUT, private=True) as path:
                    path.write_text(json.dumps(about, indent=1), encoding="utf-8")
            if (self.folder / FIRST).exists():  # the last: with them the folder is whole
                return
            if also := frozen():
                with replacing(self.folder / FROZEN, private=True) as path:
                    save_tensors({name: value.contiguous() for name, value in also.items()}, path)
            with replacing(self.folder / FIRST, private=True) as path:
                save_tensors(first, path)
        except OSError as error:
            raise ConfigurationError(
                f"what is learnt cannot be written to {str(self.folder)!r}: {error.strerror or error}; name a folder of yours, learn=FOLDER"
            ) from error

    def about(self) -> dict[str, Any]:
        return json.loads((self.folder / ABOUT).read_text(encoding="utf-8"))

    def frozen(self) -> dict[str, Tensor]:
        """What was given to :meth:`begin`; nothing is read of it before it is used."""
        path = self.folder / FROZEN
        return load_file(path) if path.exists() else {}

    def _compare(self, about: Mapping[str, Any]) -> None:
        try:
            before = self.about()
        except ValueError as error:
            raise ConfigurationError(f"{str(self.folder / ABOUT)!r} cannot be read: {error}; delete the folder, or name another") from error
        for what in ("target", "draft"):
            was, now = before.get(what, {}), about[what]
            if any(was.get(name) != value for name, value in now.items() if name != "name"):
                raise ConfigurationError(
                    f"{str(self.folder)!r} holds what was learnt for another {what}, {was.get('name') or 'one without a name'}; "
                    "name another folder, or delete this one"
                )

    def lead(self) -> bool:
        """Whether this process learns here; the lock is held until :meth:`close`, and given back by a crash too."""
        if self._lock is not None:
            return True
        try:
            self._lock = locked(self.folder / LOCK, wait=False)
        except BlockingIOError as error:
            if has_locks(error):
                return False
            warn_once(f"the file system of {self.folder} has no locks: let only one process learn there")
            self._lock = open(os.devnull, "rb")  # noqa: SIM115
        return True

    def close(self) -> None:
        if self._lock is not None:
            unlocked(self._lock)
            self._lock = None

    def leave(self) -> None:
        """In a process that was forked: the lock is its parent's."""
        self._lock = None

    # -- weights ------------------------------------------------------------------------------------------------------

    def numbers(self) -> list[int]:
        """The versions that are there, oldest first; 0 are the first weights, which always are."""
        return [0, *sorted(int(path.stem.partition("-")[2]) for path in self.folder.glob(f"version-{7 * '[0-9]'}.safetensors"))]

    def path(self, number: int) -> Path:
        return self.folder / (f"version-{number:07d}.safetensors" if number else FIRST)

    def save(self, number: int, weights: Mapping[str, Tensor]) -> None:
        """Keep ``weights`` as a version, and drop the oldest."""
        self._tidy()
        with replacing(self.path(number), private=True) as path:
            save_tensors({name: value.contiguous() for name, value in weights.items()}, path)
        for old in self.numbers()[1 : -self.keep]:
            self.path(old).unlink(missing_ok=True)

    def load(self, number: int) -> dict[str, Tensor]:
        """Raises ValueError if that version cannot be used: it is gone, not whole, or has numbers that are none."""
        try:
            weights = load_file(self.path(number))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"version {number} cannot be read: {error}") from error
        if not all(bool(torch.isfinite(value).all()) for value in weights.values()):
            raise ValueError(f"version {number} has weights that are NaN or infinite")
        return weights

    def drop(self, number: int) -> None:
        if number:
            self.path(number).unlink(missing_ok=True)

    def clear(self) -> None:
        """Drop all versions but the first weights."""
        self._tidy()
        for number in self.numbers():
            self.drop(number)

    def _tidy(self) -> None:
        """Delete what a process that was killed had half written."""
        for left in self.folder.glob(".*.tmp"):
            left.unlink(missing_ok=True)
