"""What happened to one row in one round, on the host: every drafted token, what target and draft gave it, and where the path ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foredraft.tree import TokenTree

ENDS = {"eos": "eos", "length": "length", "context": "length"}  # by finish reason


@dataclass(frozen=True)
class RoundTrace:
    """One row's tree, and what was kept of it. Lists are per node; node 0 is the root, the last token of the text so far.

    Attributes:
        shape: what was to be drafted in this round, for all rows; "chain(0)" for nothing.
        tokens, parents: of each node; the root has the parent -1.
        drafters: the names of those who proposed the nodes, of a drafter or of a guess; "" for the root.
        p: what the target gave each token after its parent, once the row's processors were through; None for the root. Of a greedy row
            as well, from the softmax of its scores.
        q: likewise what the draft gave it; None where it was not drawn, or the tree was grown and nobody kept its q.
        path: the nodes that the text gained, root first.
        bonus, bonus_p: the target's own token behind the path, and its p; None where the text ended on the path.
        ended: why the path ended: "mismatch" (the target chose another token than those drafted), "end of draft" (all was kept),
            "no draft"; or why the text did: "eos", "length", "stop" for a stopping criterion, or "error".
    """

    shape: str
    tokens: list[int]
    parents: list[int]
    drafters: list[str]
    p: list[float | None]
    q: list[float | None] | None
    path: list[int]
    bonus: int | None
    bonus_p: float | None
    ended: str


@dataclass(frozen=True)
class NodeValues:
    """What a trace tells of one row's nodes, filler included; ``real`` says which are none."""

    tokens: list[int]
    parents: list[int]
    real: list[bool]
    p: list[float]
    q: list[float] | None
    bonus_p: float


def values_of(tree: TokenTree, row: int, p: Tensor, last: int, bonus: int) -> NodeValues:
    """Read what a trace tells of ``row`` of ``tree``. ``p`` ``[N, V]`` are the target's at the row's nodes, once processors are through,
    and it chose ``bonus`` at the node ``last``. Waits for a device."""
    tokens, above = tree.tokens[row], tree.parents[row].clamp(min=0)  # [N]
    q = None
    if tree.q is not None:  # of nodes with children alone; NaN where another drafter than those with a q drafted for the row
        drawn = tree.q[row].float()[above.clamp(max=tree.q.shape[1] - 1), tokens]
        q = None if bool(drawn.isnan().all()) else drawn.tolist()
    real = [True] * tree.nodes if tree.valid is None else tree.valid[row].tolist()
    return NodeValues(tokens.tolist(), tree.parents[row].tolist(), real, p[above, tokens].tolist(), q, float(p[last, bonus]))


def trace_of(
    values: NodeValues, path: Sequence[int], bonus: int, *, shape: str, drafter: str, kept: int, finish_reason: str | None
) -> RoundTrace:
    """The trace of a row whose text gained ``kept`` tokens of those on ``path``, nodes with the root first, and ``bonus`` behind them."""
    nodes = [node for node, real in enumerate(values.real) if real]
    number = {node: index for index, node in enumerate(nodes)}
    whole = kept == len(path)  # the bonus token as well
    ended = ("end of draft" if len(nodes) > 1 else "no draft") if path[-1] not in {values.parents[node] for node in nodes} else "mismatch"
    if finish_reason is not None:
        ended = ENDS.get(finish_reason, finish_reason)
    return RoundTrace(
        shape=shape,
        tokens=[values.tokens[node] for node in nodes],
        parents=[number.get(values.parents[node], -1) for node in nodes],
        drafters=["", *[drafter] * (len(nodes) - 1)],
        p=[None, *(values.p[node] for node in nodes[1:])],
        q=None if values.q is None else [None, *(values.q[node] for node in nodes[1:])],
        path=[number[node] for node in path[: kept + 1]],
        bonus=bonus if whole else None,
        bonus_p=values.bonus_p if whole else None,
        ended=ended,
    )
