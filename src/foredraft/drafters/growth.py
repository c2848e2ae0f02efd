"""Growing a draft tree level by level, for any drafter that can say what it would do next after every node of a level.

A static shape is filled in: each node's children are the most likely tokens, i.i.d. draws, draws without replacement, or those
that lead the target's own race (``keyed``). A dynamic shape is grown: the best k nodes of a level are expanded to k children each, and
the best ``total`` of all nodes are proposed (EAGLE-2; OPT-Tree). Nodes are compared by the product of q along the path, or if they are
``keyed``, of what :func:`chances_of_leaders` gives. One call of the drafter's model per level, for all rows.

Where a request has ``thresholds``, a draft stops below a token that the drafter is unsure of. The token itself stays, and so do its
siblings: what hangs below a node depends on the path to it alone, so every rule that is exact for the whole tree is exact for this one.

A dynamic shape and thresholds are read on the host, so a device is waited for at every level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from foredraft.backends.native_growth import MOST_KEPT, Draws
from foredraft.device import to_device
from foredraft.drafters.base import DraftRequest, pick
from foredraft.logits.noise import Noise, Purpose, argmax, on_host
from foredraft.logits.sampler import Sampler, fit_vocabulary
from foredraft.shapes import DynamicShape, Level, StaticShape
from foredraft.tree import TokenTree, static_parents_tensor

Expand = Callable[[TokenTree, int], Tensor]
"""``expand(tree, first)`` gives the draft's logits ``[R, N - first, V]`` after the nodes of ``tree`` from ``first`` on; it has been
asked about the nodes before ``first`` already, in trees with the same beginning."""
IMPOSSIBLE = float("-inf")
LEADER, OTHERS, OTHERS_SHARE = 0.25, 0.05, 0.5  # fitted to python-1m for python-8m (docs/log.md); growth.h has the same


@dataclass(frozen=True, eq=False)
class Growth:
    """A proposal, and what the drafter's model saw while it grew.

    Attributes:
        tree: to be verified.
        seen: how many nodes, the root included, the model was fed; they come first in the drafter's own numbering.
        own: ``[R, N]`` the number of each node of ``tree`` in the drafter's own numbering, ``seen`` or more where the model was not
            fed; None where ``tree`` is numbered alike.
        expected: accepted tokens per row if the draft's probabilities hold, where they chose the nodes on the host.
    """

    tree: TokenTree
    seen: int
    own: Tensor | None = None
    expected: float | None = None


def grow(request: DraftRequest, expand: Expand) -> Growth:
    """Grow ``request.shape`` for all rows; ``expand`` is asked at most once per level."""
    if isinstance(request.shape, DynamicShape):
        return grow_dynamic(request, request.shape, expand)
    assert isinstance(request.shape, StaticShape)
    return grow_static(request, request.shape, expand)


def draws_for(request: DraftRequest) -> Draws | None:
    """How kernels draw chains, and trees of what leads the target's race, for ``request``, with the noise that tensor operations draw
    them with; None where they cannot."""
    raced = request.proposal == "keyed" and not request.needs_q
    drawn = request.shape.is_chain and request.proposal in ("iid", "keyed")
    if request.thresholds is not None or request.partial or not (raced or drawn):
        return None
    return draws_of(request.sampler, request.depth, request.vocab_size, keyed=request.proposal == "keyed", keep=request.needs_q)


def draws_of(sampler: Sampler, depth: int, vocab_size: int, *, keyed: bool = True, keep: bool = False) -> Draws | None:
    """How kernels draw ``depth`` tokens of each row; None where they cannot. ``keyed``: with the noise of the rule ``match``."""
    noise = sampler.noise
    if not (type(noise) is Noise and on_host(noise.keys) and all(sampler.sampled)):
        return None
    found = []
    for warping in (pipeline.warping for pipeline in sampler.pipelines):
        if warping is not None and warping.top_k >= vocab_size:
            warping = warping._replace(top_k=0)
        if warping is None or warping.top_k > MOST_KEPT or (warping.top_p < 1 and not warping.top_k):
            return None
        found.append(warping)
    return Draws(noise.chain_words(depth, keyed=keyed), noise.hashes(vocab_size), found, keep=keep)  # of a tree, a word for each level


def one_by_one(request: DraftRequest, logits_after: Callable[[list[Tensor]], Tensor]) -> TokenTree:
    """A chain drafted token by token. ``logits_after(path)`` gives the draft's logits ``[R, V]`` after a path of tokens ``[R]``, the root
    first; it is asked for paths that grow by one token."""
    path, qs = [request.roots()], list[Tensor]()
    draws: Draws | None = None
    lengths = list(request.limits)
    for depth in range(1, request.depth + 1):
        logits = logits_after(path)
        if depth == 1 and Draws.read(logits):
            draws = draws_for(request)
        if draws is not None:
            path.append(draws.draw(logits, depth - 1))
            continue
        logits = fit_vocabulary(logits.to(request.device), request.vocab_size)
        scores, some = filled(request, logits, request.sampler.scores_below(logits, path[1:], lengths))
        if some is not None:
            lengths = [length if left else min(length, depth - 1) for length, left in zip(lengths, some.tolist())]
            if max(lengths) < depth:
                break
        token, q = pick(request, scores, depth - 1)
        path.append(token)
        qs += [] if q is None else [q]
        if request.thresholds is not None and depth < request.depth:
            on = request.goes_on(logits[:, None], token[:, None], token.new_zeros(1))[:, 0].tolist()
            lengths = [length if goes_on else min(length, depth) for length, goes_on in zip(lengths, on)]
            if max(lengths) == depth:
                break
    valid = request.depth_mask(lengths, len(path) - 1)
    q = torch.stack(qs, 1) if qs else None
    if draws is not None:
        q = draws.q if request.needs_q else None
    return TokenTree.from_chain(torch.stack(path, 1), valid=valid, proposal=request.proposal, q=q)


def grow_static(request: DraftRequest, shape: StaticShape, expand: Expand) -> Growth:
    look = request.device.type == "cpu"  # where that waits for no device
    tree = grow_from(TokenTree.root(request.roots()), request, shape, expand, look=look)
    return Growth(tree, next(level.first for level in shape.levels if level.last == tree.nodes))


def grow_from(tree: TokenTree, request: DraftRequest, shape: StaticShape, expand: Expand, *, look: bool = False) -> TokenTree:
    """Fill ``shape`` below the roots ``tree``; no value is read by the host unless it may ``look``."""
    qs: list[Tensor] = []
    on: Tensor | None = None
    for depth, level in enumerate(shape.levels):
        if on is not None and not bool(on.any()):
            break
        logits, scores = scored(request, expand, tree, level.above)
        scores, some = filled(request, logits, scores)
        tokens, possible, q = children(request, scores, level, depth)
        if some is not None:
            left = some[:, places(level, tokens.device)[0]]
            possible = left if possible is None else possible & left
        if request.needs_q:
            assert q is not None
            qs.append(q)
        if min(request.limits) <= depth:  # by its depth alone, so that every rule stays exact
            room = to_device(request.limits, tokens.device)[:, None] > depth
            possible = room.expand(tokens.shape) if possible is None else possible & room
        if request.thresholds is not None:
            where = places(level, tokens.device)[0]
            if on is not None:
                possible = on[:, where] if possible is None else possible & on[:, where]
            on = request.goes_on(logits, tokens, where)
            on = on if possible is None else on & possible
        if look and possible is not None and bool(possible.all()):
            possible = None  # looking costs less than a mask that hides nothing
        tree = extended(tree, shape.parents[: level.last], tokens, possible)
    return replace(tree, proposal=request.proposal, q=torch.cat(qs, 1) if qs else None)


def scored(request: DraftRequest, expand: Expand, tree: TokenTree, first: int) -> tuple[Tensor, Tensor]:
    """``[R, N - first, V]`` raw logits after the newest nodes of ``tree``, and processed scores."""
    logits = fit_vocabulary(expand(tree, first).to(request.device), request.vocab_size)
    return logits, request.sampler.scores(logits, tree, first)


def filled(request: DraftRequest, logits: Tensor, scores: Tensor) -> tuple[Tensor, Tensor | None]:
    """Processed ``scores`` ``[..., V]`` where the draft's ``logits`` allow a token, with any numbers where nothing is left of them, and
    ``[...]`` bool where something is; None for everywhere."""
    if not request.partial:
        return scores, None
    scores = scores.masked_fill(logits == IMPOSSIBLE, IMPOSSIBLE)  # a processor may force another token
    some = scores.amax(-1) > IMPOSSIBLE
    return scores.masked_fill(~some[..., None], 0.0), some


def children(request: DraftRequest, scores: Tensor, level: Level, depth: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """For the nodes of ``level``, below those at ``depth``: tokens ``[R, c]``; which of them the draft holds possible, ``[R, c]`` or
    None for all; and the q ``[R, n, V]`` they were drawn from, None where they are simply the most likely."""
    where = places(level, scores.device)
    if request.proposal == "iid":
        drawn_from = request.sampler.distribution(scores)
        assert request.sampler.noise is not None
        nodes = torch.arange(level.first, level.last, device=scores.device)
        return request.sampler.noise.rank(drawn_from[:, where[0]], 1, Purpose.DRAFT, nodes)[..., 0], None, drawn_from
    ranked, possible, q = siblings(request, scores, 1 + max(level.ranks), first=level.above, depth=depth)
    if ranked.shape[1] * ranked.shape[2] == len(level.parents):  # all of them, in order
        return ranked.flatten(1), None if possible is None else possible.flatten(1), q
    above, rank = where
    return ranked[:, above, rank], None if possible is None else possible[:, above, rank], q


def siblings(request: DraftRequest, scores: Tensor, count: int, *, first: int, depth: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``[R, n, count]`` different children of each of the nodes ``first``.. at ``depth``, best or drawn first; which are possible at all
    (None: all); and q."""
    if request.proposal == "deterministic":
        if count == 1:
            return argmax(scores)[..., None], None, None
        best = scores.topk(count, -1)
        return best.indices, best.values > float("-inf"), None
    q = request.sampler.distribution(scores)
    noise = request.sampler.noise
    assert noise is not None
    if request.proposal == "keyed":  # the target will race with the same noise: what leads here is what it may well choose
        ranked = noise.race_order(q, torch.full((1, 1), depth, device=q.device), count)
    else:
        ranked = noise.rank(q, count, Purpose.DRAFT, torch.arange(first, first + q.shape[1], device=q.device))
    return ranked, None if count == 1 else q.gather(2, ranked) > 0, q


def extended(tree: TokenTree, layout: tuple[int, ...], tokens: Tensor, possible: Tensor | None) -> TokenTree:
    """``tree`` with another level of ``tokens`` ``[R, c]`` below it; what hangs below filler is filler."""
    valid = tree.valid
    if valid is not None or possible is not None:
        parents = static_parents_tensor(layout, tokens.device)[0, tree.nodes :]
        known = torch.ones_like(tree.tokens, dtype=torch.bool) if valid is None else valid
        below = known[:, parents]
        valid = torch.cat([known, below if possible is None else below & possible], 1)
    return TokenTree.from_parents(torch.cat([tree.tokens, tokens], 1), layout, valid=valid)


@lru_cache(maxsize=256)
def places(level: Level, device: torch.device) -> tuple[Tensor, Tensor]:
    """``[c]`` each: where a node's parent stands in the level above, and its rank among its siblings."""
    with torch.inference_mode(False):
        return torch.tensor([parent - level.above for parent in level.parents], device=device), torch.tensor(level.ranks, device=device)


# -- grown by probability -------------------------------------------------------------------------------------------------

UNSEEN = 1 << 30  # the number of a node that the drafter's model did not see


def offered(
    request: DraftRequest, k: int, expand: Expand, tree: TokenTree, first: int, above: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """k children of each node from ``first`` on, at ``depth``, whose paths have log-probability ``above`` ``[R, n]``: tokens
    ``[R, n, k]``, the log-probability of their paths likewise, -inf for those that cannot be, and below which of them the draft may go
    on, None for all."""
    logits, scores = scored(request, expand, tree, first)
    scores, some = filled(request, logits, scores)
    tokens, reached = below(request, scores, above, k, first=first, depth=depth)
    if some is not None:
        reached = reached.masked_fill(~some[..., None], IMPOSSIBLE)
    if request.thresholds is None:
        return tokens, reached, None
    parents = torch.arange(logits.shape[1], device=tokens.device).repeat_interleave(k)
    return tokens, reached, request.goes_on(logits, tokens.flatten(1), parents).view(tokens.shape)


def below(request: DraftRequest, scores: Tensor, above: Tensor, k: int, *, first: int, depth: int) -> tuple[Tensor, Tensor]:
    """The first two of what :func:`offered` gives, by processed ``scores`` ``[R, n, V]``."""
    possible: Tensor | None = None
    if request.proposal == "iid":
        q = request.sampler.distribution(scores)
        assert request.sampler.noise is not None
        spread = torch.arange(q.shape[1], device=q.device).repeat_interleave(k)
        nodes = first * k + 1 + torch.arange(len(spread), device=q.device)
        tokens = request.sampler.noise.rank(q[:, spread], 1, Purpose.DRAFT, nodes).view(*q.shape[:2], k)
    else:
        tokens, possible, _ = siblings(request, scores, k, first=first, depth=depth)
    chances = torch.log_softmax(scores, -1).gather(2, tokens)
    reached = above[..., None] + (chances_of_leaders(chances.exp()).log() if request.proposal == "keyed" else chances)
    reached = reached.nan_to_num(nan=IMPOSSIBLE, neginf=IMPOSSIBLE)  # where the processors leave nothing
    if possible is not None and request.proposal != "deterministic":  # of the likeliest log q says the same
        reached = reached.masked_fill(~possible, IMPOSSIBLE)
    return tokens, reached


def chances_of_leaders(q: Tensor) -> Tensor:
    """How likely the target's race ends with each of the tokens that lead the draft's, the first one first, whose probabilities are ``q``
    ``[..., k]``. Both races have the same noise, so an unlikely token that leads one often leads the other."""
    return torch.cat([LEADER + (1 - LEADER) * q[..., :1], OTHERS + OTHERS_SHARE * q[..., 1:]], -1)


class Found:
    """What one row may propose, candidate by candidate in the order in which they were found, and the drafter's own tree.

    Attributes:
        tokens, scores: of each candidate: its token, and the log-probability of its path, -inf for none at all.
        parents: the candidate that it hangs below, -1 for the root.
        own: the number under which the drafter's model saw it, ``UNSEEN`` if it did not.
    """

    def __init__(self, root: int):
        self.tokens: list[int] = []
        self.scores: list[float] = []
        self.further: list[float] = []  # scores to go on from
        self.parents: list[int] = []
        self.own: list[int] = []
        self.fed_tokens, self.fed_parents, self.fed_valid = [root], [-1], [True]
        self.newest = [-1]  # the candidates that were fed last

    def add(self, tokens: Sequence[int], scores: Sequence[float], on: Sequence[bool] | None) -> None:
        """A level: as many children of each of the newest nodes, one node after the other; ``on`` says below which there may be more."""
        self.tokens += tokens
        self.scores += scores
        self.further += scores if on is None else [score if each else IMPOSSIBLE for score, each in zip(scores, on)]
        self.parents += [number for number in self.newest for _ in range(len(tokens) // len(self.newest))]
        self.own += [UNSEEN] * len(tokens)

    def best(self, first: int, count: int, *, further: bool = False) -> list[int]:
        """The ``count`` best candidates from ``first`` on, best first, to be proposed or to go ``further`` from; of equals the earlier."""
        scores = self.further if further else self.scores
        return sorted(range(first, len(scores)), key=scores.__getitem__, reverse=True)[:count]

    def feed(self, numbers: list[int]) -> list[float]:
        """Hang these candidates into the own tree, as filler those below which there is nothing; returns their scores."""
        for number in numbers:
            above, on = self.parents[number], self.further[number] > IMPOSSIBLE
            self.fed_parents.append(0 if above < 0 else self.own[above])
            self.own[number] = len(self.fed_tokens)
            self.fed_tokens.append(self.tokens[number])
            self.fed_valid.append(on)
        self.newest = numbers
        return [self.further[number] for number in numbers]

    def seen(self, number: int) -> int:
        """The number under which the drafter's model saw a candidate; filler is unseen."""
        own = self.own[number]
        return own if own != UNSEEN and self.fed_valid[own] else UNSEEN


def grow_dynamic(request: DraftRequest, shape: DynamicShape, expand: Expand) -> Growth:
    """Candidates are told apart on the host: each of some thirty tensor calls per level would cost more than its work."""
    k, device = min(shape.k, request.vocab_size), request.device
    found = [Found(row.ids[-1]) for row in request.rows]
    tree = TokenTree.root(request.roots())
    above, expected, first = torch.zeros(tree.rows, 1, device=device), torch.zeros(tree.rows), 0
    for depth in range(shape.depth):
        tokens, reached, on = offered(request, k, expand, tree, first, above, depth)
        begin, level = len(found[0].scores), reached[0].numel()
        going = [None] * len(found) if on is None else on.flatten(1).tolist()
        for each, limit, drawn, scores, more in zip(found, request.limits, tokens.flatten(1).tolist(), reached.flatten(1).tolist(), going):
            each.add(drawn, scores if depth < limit else [IMPOSSIBLE] * level, more)
        if depth + 1 == shape.depth or (on is not None and max(max(each.further[begin:]) for each in found) == IMPOSSIBLE):
            break
        if shape.delta is not None:
            so_far = torch.tensor([each.scores for each in found], dtype=reached.dtype)
            before, expected = expected, summed(so_far, shape.total)
            if not bool((expected - before > shape.delta).any()):
                break
        first = tree.nodes
        above = torch.tensor([each.feed(each.best(begin, k, further=True)) for each in found], dtype=reached.dtype, device=device)
        tree = TokenTree.from_lists(
            [list(each.fed_tokens) for each in found],
            [list(each.fed_parents) for each in found],
            [list(each.fed_valid) for each in found],
            device=device,
        )
    least = lowest(shape)
    total = max(shape.worthwhile(sorted((score for score in each.scores if score >= least), reverse=True)) for each in found)
    kept = [sorted(each.best(0, total)) for each in found]
    numbered = [{-1: 0, **{number: node for node, number in enumerate(numbers, 1)}} for numbers in kept]
    proposed = TokenTree.from_lists(
        [[each.fed_tokens[0], *(each.tokens[number] for number in numbers)] for each, numbers in zip(found, kept)],
        [[-1, *(nodes[each.parents[number]] for number in numbers)] for each, numbers, nodes in zip(found, kept, numbered)],
        [[True, *(each.scores[number] >= least for number in numbers)] for each, numbers in zip(found, kept)],
        device=device,
        proposal=request.proposal,
        pruned=True,
    )
    own = to_device([[0, *map(each.seen, numbers)] for each, numbers in zip(found, kept)], device)
    likely = [math.exp(each.scores[number]) for each, numbers in zip(found, kept) for number in numbers if each.scores[number] >= least]
    return Growth(proposed, tree.nodes, own, sum(likely) / len(found))


def lowest(shape: DynamicShape) -> float:
    """Log-probability that a path must have to be proposed: none that is impossible, and none below the shape's floor."""
    return math.log(shape.floor) if shape.floor > 0 else torch.finfo(torch.float32).min  # a lower one would round to what is impossible


def summed(scores: Tensor, total: int) -> Tensor:
    """``[R]`` the probability of the ``total`` best paths, summed: how many drafted tokens are expected to be accepted."""
    return scores.topk(min(total, scores.shape[1]), -1).values.exp().sum(-1)
