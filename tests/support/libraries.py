"""Libraries that ``make compat`` installs, and ``make test`` does not."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import pytest

NEEDED = "FOREDRAFT_COMPAT" in os.environ  # set by make compat


def library(name: str) -> Any:
    """The module ``name``. One that is not installed skips its test, but in ``make compat`` it fails."""
    return import_module(name) if NEEDED else pytest.importorskip(name)
