"""Whole drafts in one call, where the backend of a draft model or the kernels of a head can make them; chosen here.

A draft loop makes what level-by-level drafting makes. It declines what it cannot make.
"""

from __future__ import annotations

from foredraft.drafters.draft_loops.kernels import KernelLoop
from foredraft.drafters.draft_loops.recorded import RecordedLoop
from foredraft.target import Target

DraftLoop = KernelLoop | RecordedLoop


def draft_loops(model: Target) -> tuple[DraftLoop, ...]:
    """What can be tried for drafts of ``model``, in this order."""
    return (KernelLoop(model), RecordedLoop(model))
