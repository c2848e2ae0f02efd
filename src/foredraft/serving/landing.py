"""How many drafted tokens a rule keeps, as a distribution: given the draft, p and q, over all that the coins may be.

Where siblings exclude each other, as they do under all rules but ``block`` and ``traversal``, each node has a probability of being kept
if its parent is. The product along its path is that of being kept, and the sum over a level that of keeping so many tokens or more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from foredraft.logits.noise import Noise, Purpose
from foredraft.tree import TokenTree
from foredraft.verification import Rule, Verdict
from foredraft.verification.block import Block
from foredraft.verification.host_trees import trials
from foredraft.verification.k_seq import KSeq, threshold
from foredraft.verification.match import Match
from foredraft.verification.multi_candidate import MultiCandidate
from foredraft.verification.ratios import Remainder, safe_ratio
from foredraft.verification.rejection import Rejection
from foredraft.verification.traversal import Traversal
from foredraft.verification.typical import Typical


class RecordedNoise(Noise):
    """``noise``, which writes down the coins, ``[R, K]`` each with the node of the first, and the weights of the last draw ``[R, V]``."""

    def __init__(self, noise: Noise):
        super().__init__(noise.keys, noise.positions)
        self.coins: list[tuple[int | Tensor, Tensor, Tensor]] = []  # node, probability, coin
        self.weights: Tensor | None = None

    def accept(self, probability: Tensor, node: int | Tensor = 0) -> Tensor:
        index = torch.arange(probability.shape[1], device=probability.device)
        coins = self._uniforms(node[:, None] + index if isinstance(node, Tensor) else (node + index)[None])
        self.coins.append((node, probability, coins.expand_as(probability)))
        return coins < probability

    def draw(self, weights: Tensor, purpose: Purpose, node: int = 0) -> Tensor:
        self.weights = weights
        return super().draw(weights, purpose, node)


class Refusing(RecordedNoise):
    """Every coin fails, so that a rule that ends with the first that passes looks at all nodes."""

    def accept(self, probability: Tensor, node: int | Tensor = 0) -> Tensor:
        return super().accept(probability, node) & False


def landing(rule: Rule, tree: TokenTree, p: Tensor, verdict: Verdict, *, noise: RecordedNoise, depth: int) -> Tensor | None:
    """``[R, depth + 1]`` the probability that ``rule`` keeps 0, 1, … tokens of ``tree`` by ``p`` ``[R, N, V]``; ``noise`` is what it drew.
    None where nobody can say: under ``match``, of trees whose siblings may be equal, and of drafts by the target's noise without a q."""
    if isinstance(rule, Typical):  # nothing is drawn: what came is what had to come
        return one_hot(verdict.accepted, depth + 1).to(p.dtype)
    if tree.nodes == 1:
        return one_hot(torch.zeros_like(verdict.accepted), depth + 1).to(p.dtype)
    if isinstance(rule, Traversal):
        return survivors(rule, tree, p, Refusing(noise), depth)
    if isinstance(rule, Block):  # it keeps k tokens or more if any of its coins from k on passes
        fails = 1 - real(tree, pad(noise.coins[0][1], (1, 0)))[:, 1:]
        at_least = pad(1 - fails.flip(1).cumprod(1).flip(1), (1, depth - fails.shape[1]))
        at_least[:, 0] = 1
    else:
        chances = kept(rule, tree, p, noise)
        if chances is None:
            return None
        at_least = levels(tree, real(tree, chances), depth)
    return at_least - pad(at_least[:, 1:], (0, 1))


def kept(rule: Rule, tree: TokenTree, p: Tensor, noise: RecordedNoise) -> Tensor | None:
    """``[R, N]`` the probability that each node is kept if its parent is, of rules under which siblings exclude each other."""
    if isinstance(rule, Rejection):
        return pad(noise.coins[0][1], (1, 0))
    if isinstance(rule, MultiCandidate):
        return siblings(tree, p, by_residuals)
    if isinstance(rule, KSeq):
        return siblings(tree, p, by_threshold)
    assert isinstance(rule, Match)
    if tree.proposal in ("keyed", "mixed") and tree.q is not None:
        return siblings(tree, p, by_race)
    if tree.proposal == "keyed" or (tree.proposal == "iid" and not tree.chain):
        return None
    return p.flatten(1).gather(1, tree.parents.clamp(min=0) * p.shape[2] + tree.tokens)


def real(tree: TokenTree, chances: Tensor) -> Tensor:
    """``chances`` ``[R, N]``, at most 1, and 0 of filler."""
    return chances.clamp(max=1) if tree.valid is None else chances.clamp(max=1) * tree.valid


def levels(tree: TokenTree, chances: Tensor, depth: int) -> Tensor:
    """``[R, depth + 1]`` the probability that 0, 1, … tokens or more are kept, with ``chances`` ``[R, N]`` those of each node if its parent
    is."""
    reached = torch.ones_like(chances)
    for node in range(1, tree.nodes):
        reached[:, node] = chances[:, node] * reached.gather(1, tree.parents[:, node, None])[:, 0]
    return torch.zeros_like(chances[:, :1]).repeat(1, depth + 1).scatter_add(1, tree.depths, reached)


def survivors(rule: Rule, tree: TokenTree, p: Tensor, noise: Refusing, depth: int) -> Tensor:
    """``[R, depth + 1]`` the probability that the node that survives has depth 0, 1, …: that its coin passes and none before it did. Up to
    there everything is certain, so that a walk on which none passes sees every coin's probability."""
    rule.verify(tree, p, noise)
    still = torch.ones_like(p[:, 0, 0])
    ends = torch.zeros_like(p[:, 0, :1]).repeat(1, depth + 1)
    for node, probability, _ in noise.coins:
        at = tree.depths[:, node, None] if isinstance(node, int) else tree.depths.gather(1, node[:, None])
        chance = probability[:, 0].clamp(max=1)
        ends.scatter_add_(1, at, (still * chance)[:, None])
        still = still * (1 - chance)
    ends[:, 0] = still
    return ends


BINS = 1024  # for ratios from e^-16 to e^16
Among = Callable[[TokenTree, Tensor, Tensor, Tensor, Tensor], Tensor]


def siblings(tree: TokenTree, p: Tensor, among: Among) -> Tensor:
    """``[R, N]`` the probability that each node is the one that is kept of its siblings, which ``among`` gives for those of one parent, by
    p and q ``[R, V]`` there: of ``tokens`` ``[R, K]``, as far as they are ``tried`` ``[R, K]``."""
    assert tree.q is not None
    chances, children = torch.zeros_like(p[..., 0]), trials(tree).children.expand(tree.rows, -1, -1)
    for node in range(tree.nodes):
        at = children[:, node]  # [R, K]
        tried = at >= 0 if tree.valid is None else (at >= 0) & tree.valid.gather(1, at.clamp(min=0))
        if tried.any():
            tokens = tree.tokens.gather(1, at.clamp(min=0))
            found = among(tree, p[:, node], tree.q[:, node], tokens, tried)
            chances.scatter_add_(1, at.clamp(min=0), torch.where(tried, found, 0).to(chances.dtype))
    return chances


def first_to_pass(passes: Tensor, tried: Tensor) -> Tensor:
    """The probability that each passes and none before it did, where each ``passes`` with a probability ``[R, K]`` if it is its turn."""
    passes = torch.where(tried, passes.clamp(max=1), 0)
    return pad((1 - passes).cumprod(1)[:, :-1], (1, 0), value=1.0) * passes


def by_residuals(tree: TokenTree, p: Tensor, q: Tensor, tokens: Tensor, tried: Tensor) -> Tensor:
    """One after the other, each against what those before it left of p and q."""
    left, certain, passes = Remainder.of(p, q, tree.proposal), torch.ones_like(p[:, 0]), []
    for x, mine in zip(tokens[..., None].unbind(1), tried.unbind(1)):
        passes.append(left.ratio(x))
        left.reject(mine, x, certain)
    return first_to_pass(torch.stack(passes, 1), tried)


def by_threshold(tree: TokenTree, p: Tensor, q: Tensor, tokens: Tensor, tried: Tensor) -> Tensor:
    """One after the other, all against one threshold."""
    rho = threshold(p, q, tried.sum(1))[:, None]
    q_x = q.gather(1, tokens)
    return first_to_pass(safe_ratio(torch.minimum(q_x, p.gather(1, tokens) / rho), q_x), tried)


def by_race(tree: TokenTree, p: Tensor, q: Tensor, tokens: Tensor, tried: Tensor) -> Tensor:
    """The target's race, argmin E / p, has the noise E of the draft's, in which ``tokens`` came first in this order. Rows without a q drew
    without that noise, and keep each by its p."""
    p_x, q_x = p.gather(1, tokens).double(), q.gather(1, tokens).double()
    before = pad(q_x.cumsum(1)[:, :-1], (1, 0))
    # When the draft's race is over: memoryless, each next one takes an exponential time by the rate of those still in it.
    gaps = -torch.log1p(-points(tokens.shape[1], p.device))  # [S, K]
    times = (gaps / (1 - before).clamp(min=1e-12)[:, None]).cumsum(2)  # [R, S, K] E / q
    reached = torch.where(tried[:, None], times * q_x[:, None] / p_x[:, None], torch.inf)  # E / p
    best = reached.clamp(max=1e30).min(2)
    last = times.gather(2, tried.sum(1)[:, None, None].expand(-1, times.shape[1], 1).clamp(min=1) - 1)[..., 0]
    # Of the others, E is above q times that: they all stay behind with probability exp(-sum of max(0, best * p - last * q)).
    here = torch.zeros_like(p).scatter_add(1, tokens, tried.to(p.dtype)) > 0
    p, q = (each.masked_fill(here, 0) for each in (p, q))
    # Tokens whose p / q are alike are taken together: only where that is last / best do they differ.
    rows = BINS * torch.arange(len(p), device=p.device)[:, None]
    index = (rows + bins_of(p.log() - q.log())).flatten()
    sums = [index.bincount(each.flatten().double(), minlength=BINS * len(p)).view(-1, BINS).flip(1).cumsum(1).flip(1) for each in (p, q)]
    at = bins_of(last.log() - best.values.log())
    slower = [best.values * pad(sums[0], (0, 1)).gather(1, each) - last * pad(sums[1], (0, 1)).gather(1, each) for each in (at, at + 1)]
    behind = torch.exp(-torch.maximum(*slower))
    shared = torch.zeros_like(times).scatter(2, best.indices[..., None], behind[..., None]).mean(1)
    return torch.where(q_x.isnan(), p_x, shared)


def bins_of(log_ratios: Tensor) -> Tensor:
    return ((log_ratios.nan_to_num(nan=0) + 16) * (BINS / 32)).clamp(0, BINS - 1).long()


@lru_cache(maxsize=64)
def points(dimensions: int, device: torch.device) -> Tensor:
    """``[S, K]`` float64 points that fill the unit cube evenly, to integrate over it."""
    engine = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=1)  # type: ignore[no-untyped-call]
    return engine.draw(512, dtype=torch.float64).to(device)
