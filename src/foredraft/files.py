"""Files that are read as text or replaced in one step, and files written under the project's former name."""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from foredraft.errors import ConfigurationError

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of file systems that have none


@contextmanager
def replacing(path: str | Path, *, private: bool = False) -> Iterator[Path]:
    """A new file beside ``path`` that takes its place, in one step and on the disk, when the block is done.

    Whoever reads ``path`` meanwhile, or after a crash, finds what was there before; of two writers the last one wins whole. A process
    that is killed leaves a file ``.NAME.….tmp`` behind. Only its owner can read a new file that is ``private``; one that is replaced
    keeps its mode.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    try:
        usual = 0o600 if private else _made_anew(name)
        yield Path(name)
        kept = path.stat().st_mode & 0o777 if private and path.exists() else usual
        os.chmod(name, kept)  # only now: whatever wrote it may have made it anew
        to_disk(name)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the new name as well
        with suppress(OSError):  # some file systems, such as VirtualBox's shared folders, cannot
            to_disk(path.parent)


def locked(path: Path, *, wait: bool) -> BinaryIO:
    """The file ``path``, held against other processes until it is closed, by a crash too.

    Raises:
        BlockingIOError: another process holds it, and this one does not ``wait``.
    """
    file = open(path, "a+b")  # noqa: SIM115
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        file.close()
        raise BlockingIOError(f"{path} cannot be locked: {error}") from error
    return file


def unlocked(file: BinaryIO) -> None:
    """Give back what :func:`locked` returned, also where processes that were forked meanwhile hold the file open."""
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def has_locks(error: BlockingIOError) -> bool:
    """Whether :func:`locked` has raised this because somebody else holds the file, and not because its file system knows no locks."""
    return not isinstance(error.__cause__, OSError) or error.__cause__.errno not in NO_LOCKS


def save_tensors(tensors: Mapping[str, Any], path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a file of tensors of torch.

    Raises:
        OSError: it cannot be written, such as to a full disk; safetensors raises an error of its own.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), str(path), None if metadata is None else dict(metadata))
    except SafetensorError as error:
        raise OSError(str(error)) from error


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, unless it is there.

    Raises:
        ConfigurationError: it cannot be made, or not be written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    if not os.access(path, os.W_OK):
        raise ConfigurationError(f"cannot write {str(path)!r}: permission denied")


def read_text(path: Path) -> str:
    """The text in a file.

    Raises:
        ConfigurationError: a folder, a file that cannot be read, or one that is not UTF-8.
    """
    if path.is_dir():
        raise ConfigurationError(f"{str(path)!r} is a folder; name the files in it, for instance {str(path / '*.txt')!r}")
    try:
        return decoded(path.read_bytes(), repr(str(path)))
    except OSError as error:
        raise ConfigurationError(f"cannot read {str(path)!r}: {error.strerror}") from error


def decoded(data: bytes, where: str) -> str:
    """The text, without the byte order mark that some editors begin with.

    Raises:
        ConfigurationError: ``data`` is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{where} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def json_lines(path: Path) -> Iterator[tuple[Any, str]]:
    """The value on each line of a ``.jsonl`` file, and where it stands; empty lines are left out.

    Raises:
        ConfigurationError: as in :func:`read_text`, or a line is not JSON.
    """
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigurationError(f"{where}: this is not JSON: {error.msg}") from None
            yield value, where


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, or ConfigurationError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path} is not a JSON object")
    return found


def _made_anew(name: str) -> int:
    """Make the file anew, and say which mode the umask leaves it. To ask for the umask itself is to change it, for other threads too."""
    os.unlink(name)
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        return os.stat(name).st_mode & 0o777
    finally:
        os.close(handle)


def to_disk(path: str | Path) -> None:
    """Return when a file or a folder's names are on the disk."""
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # Windows syncs what is open for writing
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def current_name(text: object) -> object:
    """``text`` with the project's former name replaced: files written under it still load. Anything but a string is returned as it is."""
    return text.replace("foretoken", "foredraft") if isinstance(text, str) else text
