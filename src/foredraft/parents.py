"""Trees as tuples of parents, without torch."""

from __future__ import annotations

from collections.abc import Sequence


def depths_of(parents: Sequence[int]) -> list[int]:
    """Distance from the root of every node of ``parents``, which come before their children."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths
