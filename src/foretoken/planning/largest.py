"""The largest shape that the automatic planner chooses from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from foretoken.drafters.base import Drafter
from foretoken.shapes import StaticShape, TreeShape

if TYPE_CHECKING:
    from foretoken.target import Target

AUTO = "auto"
DEPTH, SIBLINGS, NODES = 12, 4, 24


def largest_shape(*, branches: bool, vocab_size: int = SIBLINGS, depth: int = DEPTH, nodes: int = NODES) -> StaticShape:
    """What the automatic planner chooses from: every shape within this one's depth, number of nodes and of siblings. It is a chain
    where nothing may branch."""
    depth = max(0, depth)
    if not branches or vocab_size < 2 or depth < 2:
        return StaticShape(TreeShape.chain(depth).parents, AUTO)
    siblings, spare = min(SIBLINGS, vocab_size), max(0, nodes - depth)
    parents, above = [-1], 0
    for _ in range(depth):
        first = len(parents)
        extra = min(siblings - 1, spare)
        spare -= extra
        parents += [above] * (1 + extra)
        above = first
    return StaticShape(tuple(parents), AUTO)


def largest_fitting(target: Target, drafter: Drafter, fits: Callable[[TreeShape], bool]) -> StaticShape:
    """The largest shape that the target, the drafter and whoever else has a say in ``fits`` can do; a chain where trees are out."""
    room = None if target.context is None else target.context // 4
    depth = DEPTH if room is None else max(1, min(DEPTH, room))
    if drafter.branches and drafter.auto_branches and target.chains_only is None:
        nodes = NODES if room is None else max(depth, min(NODES, room))
        tree = largest_shape(branches=True, vocab_size=target.vocab_size, depth=depth, nodes=nodes)
        if not tree.is_chain and drafter.refusal(tree) is None and fits(tree):
            return tree
    while depth > 1 and drafter.refusal(TreeShape.chain(depth)) is not None:
        depth -= 1
    return largest_shape(branches=False, depth=depth)
