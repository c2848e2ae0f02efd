"""The largest shape that the automatic planner chooses from."""

from __future__ import annotations

from collections.abc import Callable

from foredraft.drafters.base import Drafter
from foredraft.shapes import StaticShape, TreeShape
from foredraft.target import Target

AUTO = "auto"
DEPTH, SIBLINGS, NODES = 12, 4, 24


def largest_shape(
    *, branches: bool, vocab_size: int | None = None, depth: int = DEPTH, nodes: int = NODES, siblings: int = SIBLINGS
) -> StaticShape:
    """What the automatic planner chooses from: every shape within this one's depth, number of nodes and of siblings. It is a chain
    where nothing may branch."""
    depth, siblings = max(0, depth), siblings if vocab_size is None else min(siblings, vocab_size)
    if not branches or siblings < 2 or depth < 2:
        return StaticShape(TreeShape.chain(depth).parents, AUTO)
    spare, sizes = max(0, nodes - depth), [1] * depth
    for all_of_them in (False, True):  # children of the first node of each level, and then of the others too
        for level in range(depth):
            above = sizes[level - 1] if level and all_of_them else 1
            extra = min(siblings * above - sizes[level], spare)
            sizes[level], spare = sizes[level] + extra, spare - extra
    parents, above = [-1], 0
    for size in sizes:
        first = len(parents)
        parents += [above + child // siblings for child in range(size)]
        above = first
    return StaticShape(tuple(parents), AUTO)


def largest_fitting(target: Target, drafter: Drafter, fits: Callable[[TreeShape], bool]) -> StaticShape:
    """The largest shape that the target, the drafter and whoever else has a say in ``fits`` can do; a chain where trees are out. Where
    copies are followed as chains, these may have as many tokens as a tree has elsewhere: copying more costs nothing."""
    room = None if target.trained is None else target.trained // 4
    info = drafter.info
    depth = NODES if info.copies else DEPTH
    depth = depth if room is None else max(1, min(depth, room))
    depth = depth if info.max_depth is None else min(depth, info.max_depth)
    recorded = any(each.warm_up for each in drafter.draft_models)  # anew for every shape of a tree
    if info.branches and info.auto_branches and target.chains_only is None and not recorded:
        known = info.calibrated
        most = NODES if known is None else max(NODES, known.nodes)
        nodes = most if room is None else max(depth, min(most, room))
        siblings = SIBLINGS if known is None else max(SIBLINGS, known.siblings)
        tree = largest_shape(branches=True, vocab_size=target.vocab_size, depth=depth, nodes=nodes, siblings=siblings)
        if not tree.is_chain and drafter.refusal(tree) is None and fits(tree):
            return tree
    while depth > 1 and drafter.refusal(TreeShape.chain(depth)) is not None:
        depth -= 1
    return largest_shape(branches=False, depth=depth)
