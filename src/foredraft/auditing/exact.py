"""The exact part: the rule and the shape in the real loop, on probability tables, with every outcome of every draw enumerated.

A drafter that follows a table stands in for the configuration's own, and proposes in the same way. The distribution of whole
continuations over several rounds is compared with the target's. Noise keeps its keys, so a draw that is used twice shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foredraft.auditing.report import ExactPart
from foredraft.drafters.base import Drafter
from foredraft.logits.noise import Randomness
from foredraft.planning import FixedPlanner
from foredraft.session import Session
from foredraft.shapes import StaticShape, TreeShape
from foredraft.speculator import Speculator
from foredraft.testing import Context, ProbabilityTable, ScriptedDrafter, TableTarget, continuation_law, distance, plain_law

BOUND = 1e-9
VOCABULARY, PROMPT = 3, [0, 1]
LEVELS, NODES = 2, 3  # of the largest tree that is enumerated
TOKENS = {"dense": 4, "with zeros": 5}  # per continuation: several rounds, and still seconds


def check(speculator: Speculator) -> ExactPart:
    """Enumerate ``speculator``'s rule on its shape, cut down to what takes seconds."""
    begin = time.perf_counter()
    whole = speculator.shape
    shape = cut(whole)
    errors = {name: error(speculator, shape, p, q, TOKENS[name]) for name, (p, q) in tables().items()}
    return ExactPart(
        error=max(errors.values()),
        bound=BOUND,
        shape=str(shape),
        cut=shape != whole,
        vocab_size=VOCABULARY,
        tokens=min(TOKENS.values()),
        tables=errors,
        seconds=time.perf_counter() - begin,
    )


def tables() -> dict[str, tuple[ProbabilityTable, ProbabilityTable]]:
    """Targets and drafts: independent ones, and ones where either rules tokens out that the other does not."""
    p, q = ProbabilityTable.random(VOCABULARY, seed=1), ProbabilityTable.random(VOCABULARY, seed=2)
    return {"dense": (p, q), "with zeros": (without_one(p, 0), without_one(q, 1))}


def without_one(table: ProbabilityTable, shift: int) -> ProbabilityTable:
    """``table`` with probability 0 for one token after each context."""

    def zeroed(context: Context) -> list[float]:
        weights = table(context)
        weights[(sum(context) + shift) % table.vocab_size] = 0
        return [float(each) for each in weights / weights.sum()]

    return ProbabilityTable(zeroed, table.vocab_size, order=table.order)


def error(speculator: Speculator, shape: TreeShape, p: ProbabilityTable, q: ProbabilityTable, count: int) -> float:
    """Total variation between the distribution of ``count`` tokens under the loop and under the target."""
    with torch.inference_mode():
        found = continuation_law(lambda randomness: session_on_tables(speculator, shape, p, q, randomness), PROMPT, count)
    return distance(found, plain_law(p, PROMPT, count))


def session_on_tables(
    speculator: Speculator, shape: TreeShape, p: ProbabilityTable, q: ProbabilityTable, randomness: Callable[[Tensor, Tensor], Randomness]
) -> Session:
    """``speculator``'s loop, rule and proposal; its target is ``p`` and its drafter follows ``q``."""
    drafter: Drafter = ScriptedDrafter(q, proposal=speculator.proposal)
    target: Any = TableTarget(p)
    return Session(target, drafter, speculator.rule, proposal=speculator.proposal, planner=FixedPlanner(shape), randomness=randomness)


def cut(shape: TreeShape) -> TreeShape:
    """``shape`` with at most two levels, two siblings and three nodes."""
    shape = shape.truncate(LEVELS)
    if not isinstance(shape, StaticShape):
        return TreeShape.dynamic(depth=shape.depth, k=2, total=min(shape.nodes, 2 if shape.depth == 1 else NODES))
    if shape.nodes <= NODES:
        return shape
    kept: dict[int, tuple[int, ...]] = {0: ()}
    for level in shape.levels:
        for node, (parent, rank) in enumerate(zip(level.parents, level.ranks), level.first):
            if parent in kept and rank < 2 and len(kept) <= NODES:
                kept[node] = (*kept[parent], rank)
    return TreeShape.paths(path for path in kept.values() if path)
