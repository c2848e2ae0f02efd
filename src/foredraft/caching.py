"""The folder for what is measured or compiled once per machine.

``$FOREDRAFT_CACHE``, or else ``foredraft`` under ``$XDG_CACHE_HOME`` or ``~/.cache``; ``FOREDRAFT_CACHE=off`` keeps nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

OFF = ("", "0", "off", "none")


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
