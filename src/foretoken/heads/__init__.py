"""Heads that learn to draft: what they compute, and how they are stored. Adding one takes a file here, a line below, and its drafter."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from foretoken.errors import ConfigurationError

if TYPE_CHECKING:
    from foretoken.heads.base import Head

REGISTRY = {
    "medusa": "foretoken.heads.medusa:MedusaHead",
    "hydra": "foretoken.heads.hydra:HydraHead",
    "eagle3": "foretoken.heads.eagle3:Eagle3Head",
    "rnn": "foretoken.heads.rnn:RnnHead",
}


def names() -> list[str]:
    """The kinds of heads."""
    return list(REGISTRY)


def find(kind: str) -> type[Head]:
    """The class of heads of ``kind``.

    Raises:
        ConfigurationError: no such kind; the message lists those there are.
    """
    if kind not in REGISTRY:
        raise ConfigurationError(f"unknown kind of head {kind!r}; choose {', '.join(REGISTRY)}")
    module, _, attribute = REGISTRY[kind].partition(":")
    return getattr(import_module(module), attribute)
