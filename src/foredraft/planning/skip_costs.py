"""What attention and MLP sublayers cost on this machine, measured or from a file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from foredraft.drafters.none import NoDrafter
from foredraft.drafters.sublayer_costs import KINDS, LENGTHS, Sublayer, SublayerCosts, sublayers_of
from foredraft.errors import ConfigurationError
from foredraft.files import read_text
from foredraft.models.skips import SkipSet
from foredraft.planning.costs import BUDGET, PROMPT, CostModel, Measurement
from foredraft.shapes import TreeShape
from foredraft.target import Target

TURNS = 25  # of passes that are timed


def read_costs(path: Path, sublayers: Sequence[Sublayer]) -> SublayerCosts:
    """The seconds in a file: a JSON object, or one under "costs", with a list for "attention" and for "mlp", a number for each that can
    be left out; "rest", a number; and "passes", a list of two numbers or more.

    Raises:
        ConfigurationError: it holds something else.
    """
    try:
        held = json.loads(read_text(path))
        held = held.get("costs", held)
        given = {kind: [float(each) for each in held.get(kind, ())] for kind in KINDS}
        rest, passes = float(held["rest"]), tuple(map(float, held["passes"]))
        if min(rest, *passes, *given["attention"], *given["mlp"]) <= 0 or len(passes) < 2:
            raise ValueError("every number of seconds must be above 0, and passes must have at least two")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigurationError(f"{str(path)!r} does not hold seconds of sublayers: {why}") from error
    for kind in KINDS:
        if (has := len(given[kind])) != (needs := sum(of == kind for of, _ in sublayers)):
            raise ConfigurationError(f"{str(path)!r} has seconds of {has} {kind} sublayers, and {needs} can be left out of this model")
    return SublayerCosts((*given["attention"], *given["mlp"]), rest, passes)


@torch.inference_mode()
def measure_costs(target: Target, *, seconds: float = 2 * BUDGET) -> SublayerCosts:
    """Time passes of ``target`` over some tokens, and over one without all sublayers of the same kind and size, in turns. No row may be
    live, and none is left."""
    sublayers, groups = sublayers_of(target.sublayers), dict[tuple[str, int], list[int]]()
    for kind, layer in sublayers:
        size = sum(weight.numel() for weight in getattr(target.sublayers, kind)[layer].parameters())
        groups.setdefault((kind, size), []).append(layer)
    run, begin = SkippedPasses(target, NoDrafter(), 1, TreeShape.chain(LENGTHS), time.perf_counter), time.perf_counter()
    try:
        run.passes(begin + 0.5 * seconds)
        run.without({key: SkipSet(**{key[0]: tuple(layers)}) for key, layers in groups.items()}, begin + seconds)
    finally:
        target.reset()
    costs, whole = CostModel(), median(run.times["whole", 1])
    run.fill(costs)
    saved = {key: max(whole - median(run.times[key]), 1e-3 * whole) / len(layers) for key, layers in groups.items()}
    of = {(kind, layer): saved[kind, size] for (kind, size), layers in groups.items() for layer in layers}
    spent = tuple(of[each] for each in sublayers)
    return SublayerCosts(spent, max(whole - sum(spent), 1e-3 * whole), tuple(costs.verify(1, range(1, LENGTHS + 2), PROMPT)))


class SkippedPasses(Measurement):
    """Times passes that leave sets out, too."""

    def without(self, sets: Mapping[Any, SkipSet], deadline: float) -> None:
        """Passes over one token without each of ``sets``, and whole ones, by the name ``("whole", 1)``."""
        self._open(self.texts)
        root = self._chain(1)
        calls: dict[Any, Callable[[], object]] = {name: partial(self.target.score_early, root, skip) for name, skip in sets.items()}
        calls["whole", 1] = self._scoring(1)
        for turn in range(self.warm_ups + TURNS):
            if turn > self.warm_ups and self.clock() > deadline:
                break
            for name, call in calls.items():
                self.timed(name, call)
        for name in calls:
            del self.times[name][: self.warm_ups]
