"""Whole drafts in one call, where the backend of a draft model or the kernels of a head can make them; chosen here.

A draft loop makes what level-by-level drafting makes. It declines what it cannot make.
"""

from __future__ import annotations

from typing import Protocol

from foredraft.drafters.base import DraftRequest
from foredraft.drafters.draft_loops.kernels import KernelLoop
from foredraft.drafters.draft_loops.recorded import RecordedLoop
from foredraft.drafters.growth import Growth
from foredraft.target import Target


class DraftLoop(Protocol):
    """A whole draft of a draft model in one call."""

    def draft(self, request: DraftRequest, *, chain: bool) -> Growth | None:
        """The draft for ``request``, whose ``depth`` is that of its shape; None where it has to be made level by level. ``chain`` says
        that the shape was asked for as a chain: a tree that was cut to one is drawn as a tree is.

        Afterwards the draft model's cache holds every node that was fed behind the root, uncommitted.
        """


def draft_loops(model: Target) -> tuple[DraftLoop, ...]:
    """What can be tried for drafts of ``model``, in this order."""
    return (KernelLoop(model), RecordedLoop(model))
