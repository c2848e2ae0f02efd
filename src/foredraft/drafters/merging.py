"""Trees of several drafters as one: every row keeps the tree of one drafter, and extra nodes of all of them stand behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import nan

import torch
from torch import Tensor

from foredraft.drafters.base import Drafter, DrafterInfo, Feedback
from foredraft.tree import Proposal, TokenTree

SHARED: tuple[Proposal, ...] = ("keyed", "mixed")  # drawn with the target's noise, where there is a q


@dataclass(eq=False)
class Part:
    """One drafter's part in a round: its ``tree``, the ``rows`` that keep it, and per row the ``places`` of its nodes in the merged
    tree, -1 where they are not in it; without places the tree stands alone."""

    drafter: Drafter
    tree: TokenTree
    rows: list[int] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)

    @property
    def proposed(self) -> int:
        """Nodes without the extra ones, the root included."""
        return self.tree.nodes - self.tree.extra

    def proposing(self) -> list[int]:
        """The rows for which it proposes anything. Waits for the device of the tree."""
        if self.proposed == 1:
            return []
        if self.tree.valid is None:
            return list(range(self.tree.rows))
        return torch.nonzero(self.tree.valid[:, 1 : self.proposed].any(1))[:, 0].tolist()


def merged(parts: Sequence[Part], device: torch.device) -> TokenTree:
    """One ``mixed`` tree of the rows that ``parts`` keep, and their extra nodes behind; notes the places of all nodes. A row that
    nobody keeps has its root alone."""
    rows, width = parts[0].tree.rows, max((part.proposed for part in parts if part.rows), default=1)
    tokens = [[root] + [0] * (width - 1) for root in parts[0].tree.tokens[:, 0].tolist()]
    parents = [[-1] + [0] * (width - 1) for _ in range(rows)]
    valid = [[True] + [False] * (width - 1) for _ in range(rows)]
    chains, behind = True, width
    for part in parts:
        tree, count = part.tree, part.proposed
        part.places = [[0] + [-1] * (count - 1) + list(range(behind, behind + tree.extra)) for _ in range(rows)]
        lines, above = tree.tokens.tolist(), tree.parents.expand(rows, -1).tolist()
        real = [[True] * tree.nodes] * rows if tree.valid is None else tree.valid.tolist()
        for row in part.rows:
            tokens[row][:count], parents[row][:count], valid[row][:count] = lines[row][:count], above[row][:count], real[row][:count]
            part.places[row][:count] = range(count)
            chains = chains and tree.chain
        for row in range(rows if tree.extra else 0):
            tokens[row] += lines[row][count:]
            parents[row] += [_behind(parent, count, behind) for parent in above[row][count:]]
            valid[row] += [False] * tree.extra
        behind += tree.extra
    q = _merged_q(parts, rows, width)
    if chains and behind == width:
        real_nodes = None if all(map(all, valid)) else torch.tensor(valid, device=device)
        return TokenTree.from_chain(torch.tensor(tokens, device=device), valid=real_nodes, proposal="mixed", q=q)
    return TokenTree.from_lists(tokens, parents, valid, device=device, proposal="mixed", q=q, extra=behind - width)


def _merged_q(parts: Sequence[Part], rows: int, width: int) -> Tensor | None:
    """``[R, N, V]`` the ``q`` of those who drew with the target's noise, NaN in the rows of others; None if there are only others."""
    shared = [part for part in parts if part.rows and part.tree.proposal in SHARED]
    known = [(part.rows, part.tree.q[:, :width]) for part in shared if part.tree.q is not None]
    if not known:
        return None
    q = known[0][1].new_full((rows, width, known[0][1].shape[2]), nan)
    for kept, own in known:
        q[kept, : own.shape[1]] = own[kept]
    return q


def _behind(parent: int, first: int, behind: int) -> int:
    """Where the parent of an extra node is, whose tree has its extra nodes from ``first`` on and the merged one from ``behind``."""
    if 0 < parent < first:
        raise ValueError("extra nodes can be merged where they hang below the root or each other, not below what is proposed")
    return 0 if parent == 0 else behind + parent - first


def kept_paths(feedback: Feedback) -> list[list[int]]:
    """The nodes kept per row, root first."""
    if feedback.path is None:
        return [list(range(count + 1)) for count in feedback.accepted]
    return [path[: count + 1] for path, count in zip(feedback.path.tolist(), feedback.accepted)]


def own_feedback(part: Part, feedback: Feedback, paths: Sequence[Sequence[int]]) -> Feedback:
    """``feedback`` on the merged tree as feedback on the tree of ``part``; ``paths`` are the nodes kept per row, root first. In rows
    that keep another tree only its root was verified, and its other nodes are filler without logits of their own."""
    tree, device = part.tree, part.tree.tokens.device
    mine = [list(path) if row in part.rows else [0] for row, path in enumerate(paths)]
    if len(part.rows) < tree.rows:
        kept = torch.tensor([[place >= 0 for place in places] for places in part.places], device=device)
        tree = replace(tree, valid=kept if tree.valid is None else kept & tree.valid)
    longest = max(map(len, mine))
    path = None if tree.chain else torch.tensor([nodes + [0] * (longest - len(nodes)) for nodes in mine], device=device)
    return Feedback(tree, [len(nodes) - 1 for nodes in mine], path, _gathered(feedback.logits, part.places), failed=feedback.failed)


def member_feedback(info: DrafterInfo, part: Part | None, feedback: Feedback, paths: Sequence[Sequence[int]]) -> Feedback:
    """``feedback`` for one of those who drafted: on its own nodes, or, without a ``part``, on a round without a draft. One that reads
    hidden states gets feedback on the whole tree, because it needs those of every node that was kept, whoever proposed it."""
    if info.features or not feedback.drafted or not (info.learns_from_feedback or info.needs_logits):
        return feedback
    if part is None:
        logits = None if feedback.logits is None else feedback.logits[:, :1]
        return Feedback(TokenTree.root(feedback.tree.tokens[:, 0]), [0] * feedback.tree.rows, None, logits, failed=feedback.failed)
    return own_feedback(part, feedback, paths) if part.places else replace(feedback, tree=part.tree)


def _gathered(logits: Tensor | None, places: Sequence[Sequence[int]]) -> Tensor | None:
    """``[R, n, V]`` those of ``logits`` ``[R, N, V]`` at the ``places`` of a tree's nodes."""
    if logits is None:
        return None
    index = torch.tensor(places, device=logits.device).clamp(min=0)
    return logits[torch.arange(len(index), device=logits.device)[:, None], index]
