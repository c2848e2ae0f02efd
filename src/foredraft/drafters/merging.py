"""Several token trees over the same roots as one: what two of them say is one node, and only the best nodes stay.

A node's weight is the probability that the target comes to it, as far as is known of those who proposed it: every proposer of a
child has odds of being right, the odds of those who agree are added, and children that say different things exclude each other, so
that each gets its odds over one plus those of all. Weights are multiplied along the path; no node weighs more than the one above.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foredraft.drafters.base import Feedback
from foredraft.tree import TokenTree

SUREST = 0.999  # that a node is taken to be
Rates = Sequence[Sequence[float]]
"""``[depth][rank]`` Pr(a child of this rank among its siblings is accepted | its parent was); the last ones stand for all further."""


@dataclass(frozen=True)
class Line:
    """One row of one tree, on the host: ``tokens`` of all nodes, and of each its real ``children`` in order."""

    tokens: list[int]
    children: list[list[int]]

    def along(self, text: Sequence[int]) -> list[tuple[int, int]]:
        """For each token of ``text`` behind the root, until none fits: how many children there were, and which of them it was, the
        number of children for none."""
        node, steps = 0, []
        for token in text:
            below = self.children[node]
            rank = next((rank for rank, child in enumerate(below) if self.tokens[child] == token), len(below))
            steps.append((len(below), rank))
            if rank == len(below):
                break
            node = below[rank]
        return steps


def lines_of(tree: TokenTree) -> list[Line]:
    """The rows of ``tree``, without nodes that are ``extra``. Waits for the device that it is on."""
    tree = tree.proposed
    tokens: list[list[int]] = tree.tokens.tolist()
    parents: list[list[int]] = tree.parent_lists or tree.parents.expand(tree.rows, -1).tolist()
    valid: list[list[bool]] = [[True] * tree.nodes] * tree.rows if tree.valid is None else tree.valid.tolist()
    lines = []
    for row, above, real in zip(tokens, parents, valid):
        children: list[list[int]] = [[] for _ in row]
        for node in range(1, len(row)):
            if real[node]:
                children[above[node]].append(node)
        lines.append(Line(row, children))
    return lines


@dataclass
class Merged:
    """One row's tree: ``tokens``, ``parents`` and ``weights`` of its nodes, root first, parents before their children, best first until
    :meth:`lead` puts the likeliest path in front.

    ``went[i]`` says where the nodes of line i went.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    weights: list[float] = field(default_factory=lambda: [1.0])
    went: list[dict[int, int]] = field(default_factory=list)

    @property
    def hope(self) -> float:
        """Accepted tokens to expect."""
        return sum(self.weights) - 1.0

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

    def cut(self, nodes: int) -> None:
        """Keep the best ``nodes``, the root not counted."""
        del self.tokens[nodes + 1 :], self.parents[nodes + 1 :], self.weights[nodes + 1 :]
        self.went = [{own: node for own, node in each.items() if node <= nodes} for each in self.went]

    def lead(self) -> None:
        """Number the likeliest path first, and then the others as they were: the keys of what is accepted along it are in their place."""
        likeliest: dict[int, int] = {}
        for node in range(len(self.tokens) - 1, 0, -1):
            above, weight = self.parents[node], self.weights[node]
            if above not in likeliest or weight >= self.weights[likeliest[above]]:
                likeliest[above] = node
        path = [0]
        while path[-1] in likeliest:
            path.append(likeliest[path[-1]])
        if path == list(range(len(path))):
            return
        taken = set(path)
        order = path + [node for node in range(len(self.tokens)) if node not in taken]
        number = {node: place for place, node in enumerate(order)}
        self.tokens = [self.tokens[node] for node in order]
        self.weights = [self.weights[node] for node in order]
        self.parents = [-1, *(number[self.parents[node]] for node in order[1:])]
        self.went = [{own: number[node] for own, node in each.items()} for each in self.went]

    def reach(self, text: Sequence[int]) -> int:
        """How many tokens of ``text`` lie on one path below the root."""
        below = {(parent, token): node for node, (parent, token) in enumerate(zip(self.parents, self.tokens))}
        node, count = 0, 0
        for token in text:
            if (node, token) not in below:
                break
            node, count = below[node, token], count + 1
        return count


def merge_row(
    lines: Sequence[Line], rates: Sequence[Rates], *, budget: int, depth: int, floor: float = 0.0, branches: bool = True
) -> Merged:
    """The ``budget`` best nodes of ``lines``, which have the same root, no deeper than ``depth`` and none that weighs less than
    ``floor``; the best path alone unless it ``branches``."""
    merged = Merged([lines[0].tokens[0]], went=[{0: 0} for _ in lines])
    queue: list[tuple[float, int, int, int, list[tuple[int, int]]]] = []  # -weight, order found, parent, token, who says it where
    found = 0
    depths = [0]

    def expand(node: int, sources: Sequence[tuple[int, int]]) -> None:
        nonlocal found
        level = depths[node]
        odds: dict[int, float] = {}
        says: dict[int, list[tuple[int, int]]] = {}
        for member, own in sources:
            line, known = lines[member], rates[member]
            table = known[min(level, len(known) - 1)]
            for rank, child in enumerate(line.children[own]):
                rate = min(table[min(rank, len(table) - 1)], SUREST)
                token = line.tokens[child]
                odds[token] = odds.get(token, 0.0) + rate / (1.0 - rate)
                says.setdefault(token, []).append((member, child))
        share = merged.weights[node] / (1.0 + sum(odds.values()))
        offered = says if branches or not says else [max(odds, key=odds.__getitem__)]
        for token in offered:
            heapq.heappush(queue, (-odds[token] * share, found, node, token, says[token]))
            found += 1

    if depth > 0:
        expand(0, [(member, 0) for member in range(len(lines))])
    while queue and len(merged.tokens) <= budget and -queue[0][0] >= floor:
        weight, _, parent, token, sources = heapq.heappop(queue)
        node = len(merged.tokens)
        merged.tokens.append(token)
        merged.parents.append(parent)
        merged.weights.append(-weight)
        depths.append(depths[parent] + 1)
        for member, own in sources:
            merged.went[member][own] = node
        if depths[node] < depth:
            expand(node, sources)
    return merged


def assembled(rows: Sequence[Merged], trees: Sequence[TokenTree], device: torch.device) -> TokenTree:
    """The rows as one ``mixed`` tree, with whatever is ``extra`` in ``trees`` behind their nodes."""
    nodes = max(len(row.tokens) for row in rows)
    padding = [nodes - len(row.tokens) for row in rows]
    tokens = [row.tokens + [0] * short for row, short in zip(rows, padding)]
    extra = sum(tree.extra for tree in trees)
    if not extra and all(row.is_chain for row in rows):
        lengths = torch.tensor([len(row.tokens) for row in rows], device=device)
        filler = torch.arange(nodes, device=device) < lengths[:, None] if any(padding) else None
        return TokenTree.from_chain(torch.tensor(tokens, device=device), valid=filler, proposal="mixed", pruned=True)
    parents = [row.parents + [0] * short for row, short in zip(rows, padding)]
    valid = [[True] * len(row.tokens) + [False] * (short + extra) for row, short in zip(rows, padding)]
    for tree in trees:
        if tree.extra:
            first, begin = tree.nodes - tree.extra, len(tokens[0])
            for index, (line, above) in enumerate(zip(tree.tokens.tolist(), tree.parents.expand(tree.rows, -1).tolist())):
                tokens[index] += line[first:]
                parents[index] += [_extra_parent(parent, first, begin) for parent in above[first:]]
    if device.type == "cpu":
        return TokenTree.from_lists(tokens, parents, valid, proposal="mixed", pruned=True, extra=extra)
    made = [torch.tensor(each, device=device) for each in (tokens, parents, valid)]
    return TokenTree(made[0], made[1], made[2], "mixed", pruned=True, extra=extra)


def _extra_parent(parent: int, first: int, begin: int) -> int:
    if 0 < parent < first:
        raise ValueError("extra nodes can be merged where they hang below the root or each other, not below what is proposed")
    return 0 if parent == 0 else begin + parent - first


def places(rows: Sequence[Merged], trees: Sequence[TokenTree], nodes: int) -> list[list[list[int]]]:
    """Per tree and row, where each of its nodes went in the tree of ``nodes`` that :func:`assembled` made; -1 for nowhere."""
    behind = nodes - sum(tree.extra for tree in trees)
    found = []
    for member, tree in enumerate(trees):
        tail = list(range(behind, behind + tree.extra))
        behind += tree.extra
        found.append([[row.went[member].get(node, -1) for node in range(tree.nodes - tree.extra)] + tail for row in rows])
    return found


def heard_by(tree: TokenTree, went: Sequence[Sequence[int]], feedback: Feedback, paths: Sequence[Sequence[int]]) -> Feedback:
    """``feedback`` on a merged tree as feedback on ``tree``, whose nodes ``went`` there; ``paths`` are the nodes kept per row, root
    first. Nodes that were left out are filler, and so have no logits of their own."""
    accepted, own_paths = [], []
    for places_, path in zip(went, paths):
        own = {place: node for node, place in reversed(list(enumerate(places_))) if place >= 0}
        kept = []
        for node in path:
            if node not in own:
                break
            kept.append(own[node])
        accepted.append(len(kept) - 1)
        own_paths.append(kept)
    if any(place < 0 for places_ in went for place in places_):
        scored = torch.tensor([[place >= 0 for place in places_] for places_ in went], device=tree.tokens.device)
        real = scored if tree.valid is None else scored & tree.valid
        tree = replace(tree, valid=real)
    longest = max(map(len, own_paths))
    path_tensor = (
        None if tree.chain else torch.tensor([kept + [0] * (longest - len(kept)) for kept in own_paths], device=tree.tokens.device)
    )
    return Feedback(tree, accepted, path_tensor, _gathered(feedback.logits, went))


def _gathered(logits: Tensor | None, went: Sequence[Sequence[int]]) -> Tensor | None:
    """``[R, n, V]`` those of ``logits`` ``[R, N, V]`` at the places where a tree's nodes ``went``."""
    if logits is None:
        return None
    if all(list(places_) == list(range(len(places_))) for places_ in went):
        return logits[:, : len(went[0])]
    index = torch.tensor(went, device=logits.device).clamp(min=0)
    return logits[0, index[0]][None] if len(index) == 1 else logits[torch.arange(len(index), device=logits.device)[:, None], index]


# -- on a device, without waiting for it ----------------------------------------------------------------------------------


def merged(
    trees: Sequence[TokenTree], depth: int, *, budget: int | None = None, floor: float = 0.0, rates: Sequence[Tensor] | None = None
) -> tuple[TokenTree, list[Tensor]]:
    """One tree of the continuations in ``trees``, which have the same roots and are at most ``depth`` deep.

    Args:
        budget: drafted nodes that stay at most, None for all; the best by ``rates``, and none that weighs less than ``floor``. A node
            weighs what its best proposer makes of it.
        rates: per tree ``[R, depth, ranks]``, as :data:`Rates`.

    Returns:
        The tree, and for each of ``trees`` ``[R, n]`` where its nodes went, -1 for nowhere.
    """
    device, rows = trees[0].tokens.device, trees[0].rows
    offsets, nodes = [], 1
    for tree in trees:
        offsets.append(nodes - 1)
        nodes += tree.nodes - 1
    tokens = torch.cat([trees[0].tokens[:, :1], *(tree.tokens[:, 1:] for tree in trees)], 1)
    parents = [torch.where(tree.parents > 0, tree.parents + offset, 0)[:, 1:].expand(rows, -1) for tree, offset in zip(trees, offsets)]
    parent = torch.cat([torch.zeros_like(tokens[:, :1]), *parents], 1)
    valid = torch.cat([torch.ones_like(tokens[:, :1], dtype=torch.bool), *(_real(tree)[:, 1:] for tree in trees)], 1)
    index = torch.arange(nodes, device=device).expand(rows, nodes)
    first = index  # [R, N] the first node that says the same text
    alike = (tokens[:, :, None] == tokens[:, None]) & valid[:, :, None] & valid[:, None]
    alike[:, 0], alike[:, :, 0] = False, False
    for _ in range(depth):
        above = first.gather(1, parent)
        same = alike & (above[:, :, None] == above[:, None])
        first = torch.where(same.any(-1), same.int().argmax(-1), index)
    kept = valid & (first == index)
    if budget is not None and rates is not None:
        each = [weights_of(tree, table)[:, 1:] for tree, table in zip(trees, rates)]
        weight = torch.cat([torch.full((rows, 1), 2.0, device=device), *each], 1).masked_fill(~valid, -1.0)
        best = torch.full_like(weight, -1.0).scatter_reduce(1, first, weight, "amax").masked_fill(~kept, -1.0)
        leading = best.sort(dim=1, descending=True, stable=True).indices[:, : budget + 1]  # equals go to the earlier: ancestors stay
        kept = kept & torch.zeros_like(kept).scatter_(1, leading, True) & (best >= floor)
    width = nodes if budget is None else min(nodes, budget + 1)
    if budget is None or device.type == "cpu":
        width = int(kept.sum(1).max())
    number = kept.long().cumsum(1) - 1
    order = kept.long().argsort(dim=1, descending=True, stable=True)[:, :width]
    above = number.gather(1, first.gather(1, parent)).gather(1, order)
    above[:, 0] = -1
    above[:, 1:].clamp_(min=0)
    tree = TokenTree(tokens.gather(1, order), above.clamp(max=width - 1), kept.gather(1, order), "mixed", pruned=budget is not None)
    went = torch.where(valid & kept.gather(1, first), number.gather(1, first), -1)
    where = [torch.cat([went[:, :1], went[:, offset + 1 : offset + one.nodes]], 1) for one, offset in zip(trees, offsets)]
    return tree, where


def weights_of(tree: TokenTree, rates: Tensor) -> Tensor:
    """``[R, N]`` the product of ``rates`` ``[R, depth, ranks]`` along the path to each node, with a rank among real siblings."""
    levels, ranks = rates.shape[1:]
    earlier = torch.ones(tree.nodes, tree.nodes, dtype=torch.bool, device=rates.device).tril(-1)
    parents = tree.parents.expand(tree.rows, -1)
    before = (parents[:, :, None] == parents[:, None]) & _real(tree)[:, None] & earlier
    rows = torch.arange(tree.rows, device=rates.device)[:, None]
    step = rates[rows, (tree.depths - 1).clamp(0, levels - 1), before.sum(-1).clamp(max=ranks - 1)].log()
    step[:, 0] = 0.0
    return (tree.ancestors.to(step.dtype) @ step[..., None])[..., 0].exp()


def seen_by(tree: TokenTree, went: Tensor, feedback: Feedback) -> Feedback:
    """``feedback`` on the merged tree as feedback on ``tree``, whose nodes ``went`` ``[R, n]`` there; what was left out is filler."""
    path = feedback.path
    if path is None:
        path = torch.arange(1 + max(feedback.accepted), device=went.device).expand(went.shape[0], -1)
    depth = torch.arange(path.shape[1], device=went.device)
    on_path = depth <= torch.tensor(feedback.accepted, device=went.device)[:, None]
    hit = (went[:, None] == path[:, :, None]) & on_path[..., None]  # [R, D, n]: node n is the path's node at depth D
    accepted = hit.any(-1).long().cumprod(1).sum(1) - 1
    logits = feedback.logits
    if logits is not None:
        logits = logits[torch.arange(went.shape[0], device=logits.device)[:, None], went.to(logits.device).clamp(min=0)]
    return Feedback(replace(tree, valid=_real(tree) & (went >= 0)), accepted.tolist(), hit.int().argmax(-1), logits)


def _real(tree: TokenTree) -> Tensor:
    return torch.ones_like(tree.tokens, dtype=torch.bool) if tree.valid is None else tree.valid
