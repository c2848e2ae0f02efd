"""Heads that learn to draft: what they compute, and how they are stored. Adding one takes a file here, a line below, and its drafter."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from foredraft.errors import unknown

if TYPE_CHECKING:
    from foredraft.heads.base import Head

REGISTRY = {
    "medusa": "foredraft.heads.medusa:MedusaHead",
    "hydra": "foredraft.heads.hydra:HydraHead",
    "eagle3": "foredraft.heads.eagle3:Eagle3Head",
    "rnn": "foredraft.heads.rnn:RnnHead",
    "exit": "foredraft.heads.exit:ExitHead",
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
        raise unknown("unknown kind of head", kind, REGISTRY)
    return resolve_name(REGISTRY[kind])
