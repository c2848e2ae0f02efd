"""Files that are replaced in one step, and files written under the project's former name."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A new file beside ``path`` that takes its place, in one step and on the disk, when the block is done.

    Whoever reads ``path`` meanwhile, or after a crash, finds what was there before; of two writers the last one wins whole. A process
    that is killed leaves a file ``.NAME.….tmp`` behind.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o666 & ~_umask())  # only now: whatever wrote it may have made it anew
        to_disk(name)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the new name as well
        to_disk(path.parent)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def to_disk(path: str | Path) -> None:
    """Return when a file or a folder's names are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def current_name(text: object) -> object:
    """``text`` with the project's former name replaced: files written under it still load. Anything but a string is returned as it is."""
    return text.replace("foretoken", "foredraft") if isinstance(text, str) else text
