"""The folder for what is measured or compiled once per machine.

``$FOREDRAFT_CACHE``, or else ``foredraft`` under ``$XDG_CACHE_HOME`` or ``~/.cache``; ``FOREDRAFT_CACHE=off`` keeps nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

OFF = ("", "0", "off", "none")

log = logging.getLogger(__name__)


def cache_folder() -> Path | None:
    """Where to keep things, not made yet; None if nothing is to be kept."""
    own = os.environ.get("FOREDRAFT_CACHE")
    if own is not None:
        return None if own.strip().lower() in OFF else Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(shared) if shared else Path.home() / ".cache") / "foredraft"
    except RuntimeError:  # a user without a home
        return None


def private_folder(name: str) -> Path | None:
    """The folder ``name`` in the cache folder, made if need be. None if nothing is to be kept, or if it cannot be had or trusted; the
    log says so once."""
    kept = cache_folder()
    if kept is None:
        return None
    folder = kept / name
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = folder.stat()
    except OSError as error:
        warn_once(f"nothing is kept in {folder}: {error.strerror or error}; set FOREDRAFT_CACHE to a folder of yours, or to off")
        return None
    if os.name == "posix" and (about.st_uid != os.geteuid() or about.st_mode & 0o022):
        what = "belongs to another user" if about.st_uid != os.geteuid() else f"can be written to by others (chmod 700 {folder})"
        warn_once(f"{folder} is not used because it {what}; set FOREDRAFT_CACHE to a folder of yours, or to off")
        return None
    return folder


def private_place(name: str, key: Any) -> Path | None:
    """In :func:`private_folder` ``name``, where what belongs to ``key``, of plain values, is kept."""
    folder = private_folder(name)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return None if folder is None else folder / digest


@lru_cache(maxsize=256)
def warn_once(message: str) -> None:
    log.warning(message)
