"""How many drafted tokens a rule keeps, as a distribution: given the draft, p and q, over all that the coins may be.

Where siblings exclude each other, as they do under all rules but ``block`` and ``traversal``, each node has a probability of being kept
if its parent is. The product along its path is that of being kept, and the sum over a level that of keeping so many tokens or more.
"""

from __future__ import annotations

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
    None where there is no short formula: of trees whose tokens share the target's noise, or of ``mixed`` ones, which may."""
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
    if isinstance(rule, MultiCandidate | KSeq):
        return siblings(rule, tree, p)
    if isinstance(rule, Match) and tree.proposal == "keyed" and tree.chain and tree.q is not None:
        return pad(match_chances(tree, p, tree.q), (1, 0))
    if isinstance(rule, Match) and (tree.proposal in ("deterministic", "without-replacement") or (tree.chain and tree.proposal == "iid")):
        return p.flatten(1).gather(1, tree.parents.clamp(min=0) * p.shape[2] + tree.tokens)
    return None


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


def siblings(rule: MultiCandidate | KSeq, tree: TokenTree, p: Tensor) -> Tensor:
    """``[R, N]`` the probability that each node is the first of its siblings to pass."""
    assert tree.q is not None
    chances, children = torch.zeros_like(p[..., 0]), trials(tree).children.expand(tree.rows, -1, -1)
    for node in range(tree.nodes):
        at = children[:, node]  # [R, K]
        tried = at >= 0 if tree.valid is None else (at >= 0) & tree.valid.gather(1, at.clamp(min=0))
        if not tried.any():
            continue
        tokens = tree.tokens.gather(1, at.clamp(min=0))
        pass_by = against_residuals if isinstance(rule, MultiCandidate) else against_threshold
        passes = pass_by(tree, p[:, node], tree.q[:, node], tokens, tried)
        passes = torch.where(tried, passes.clamp(max=1), 0)
        before = pad((1 - passes).cumprod(1)[:, :-1], (1, 0), value=1.0)  # all before it failed
        chances.scatter_add_(1, at.clamp(min=0), before * passes)
    return chances


def against_residuals(tree: TokenTree, p: Tensor, q: Tensor, tokens: Tensor, tried: Tensor) -> Tensor:
    """``[R, K]`` the probability that each of ``tokens`` ``[R, K]`` passes if those before it failed; p and q ``[R, V]`` above them."""
    left, certain, passes = Remainder.of(p, q, tree.proposal), torch.ones_like(p[:, 0]), []
    for x, mine in zip(tokens[..., None].unbind(1), tried.unbind(1)):
        passes.append(left.ratio(x))
        left.reject(mine, x, certain)
    return torch.stack(passes, 1)


def against_threshold(tree: TokenTree, p: Tensor, q: Tensor, tokens: Tensor, tried: Tensor) -> Tensor:
    """Likewise where all siblings have one threshold."""
    rho = threshold(p, q, tried.sum(1))[:, None]
    q_x = q.gather(1, tokens)
    return safe_ratio(torch.minimum(q_x, p.gather(1, tokens) / rho), q_x)


def match_chances(tree: TokenTree, p: Tensor, q: Tensor) -> Tensor:
    """``[R, γ]`` the probability that the target chooses each token x of a chain that the draft chose by the same noise:
    1 / (q(x) sum_v max(p_v / p_x, q_v / q_x)), which is P(both choose x) / q(x)."""
    x = tree.tokens[:, 1:, None]
    p, q = p[:, : x.shape[1]], q[:, : x.shape[1]]
    p_x, q_x = p.gather(2, x), q.gather(2, x)
    tiny = torch.finfo(p.dtype).tiny
    both = torch.maximum(p / p_x.clamp(min=tiny), q / q_x.clamp(min=tiny)).sum(2)
    return torch.where(p_x[..., 0] > 0, 1 / (both * q_x[..., 0].clamp(min=tiny)), 0)
