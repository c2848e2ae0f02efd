"""Which combinations of parameters run every time; the others of the full product run with ``make nightly``."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import pytest


def cover(*axes: Sequence[Any], ways: int = 2) -> list[tuple[int, ...]]:
    """Indices such that every combination of the values of ``ways`` axes occurs; found greedily, so not always the fewest."""
    product = list(itertools.product(*(range(len(axis)) for axis in axes)))
    combinations = list(itertools.combinations(range(len(axes)), ways))

    def parts(indices: tuple[int, ...]) -> set[tuple[Any, ...]]:
        return {(places, *(indices[place] for place in places)) for places in combinations}

    missing = set().union(*map(parts, product))
    chosen: list[tuple[int, ...]] = []
    used = [[0] * len(axis) for axis in axes]

    def gain(indices: tuple[int, ...]) -> tuple[int, int]:
        """What it adds, and among those that add as much what was seldom used."""
        return len(parts(indices) & missing), -sum(used[axis][index] for axis, index in enumerate(indices))

    while missing:
        best = max(product, key=gain)
        chosen.append(best)
        missing -= parts(best)
        for axis, index in enumerate(best):
            used[axis][index] += 1
    return chosen


def covered(*axes: Sequence[Any], ways: int = 2) -> list[Any]:
    """For ``parametrize``: the full product of ``axes``, of which what is not in the cover is nightly."""
    chosen = set(cover(*axes, ways=ways))
    return [
        pytest.param(*(axis[index] for axis, index in zip(axes, indices)), marks=() if indices in chosen else pytest.mark.nightly)
        for indices in itertools.product(*(range(len(axis)) for axis in axes))
    ]


def by_turns(values: Sequence[Any], turn: int, *, always: Collection[Any] = (), left_out: Collection[Any] = ()) -> list[Any]:
    """For ``parametrize``: of ``values`` those in odd places, or with ``turn`` 0 in even ones, and those to run ``always``; the others are
    nightly. So two ways that tell the same faults share the values between them."""
    kept = [(place % 2 == turn or value in always, value) for place, value in enumerate(values) if value not in left_out]
    return [value if now else pytest.param(value, marks=pytest.mark.nightly) for now, value in kept]


def nightly_but(always: Collection[Any], values: Sequence[Any]) -> list[Any]:
    """For ``parametrize``: ``values``, of which those that are not among ``always`` are nightly."""
    return [pytest.param(*each, marks=() if each in always else pytest.mark.nightly) for each in values]
