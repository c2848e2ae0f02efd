"""Rules on branching trees, by enumeration: the law of whole continuations, and how much each rule keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from foredraft.logits.noise import Noise, Purpose, row_key
from foredraft.shapes import depths_of
from foredraft.testing import EnumeratedNoise, Enumeration, Law, World, distance, enumerate_law
from foredraft.tree import TokenTree
from foredraft.verification import Rule, create, names
from foredraft.verification import k_seq as k_seq_module
from foredraft.verification import match as match_module
from foredraft.verification import traversal as traversal_module
from foredraft.verification.match import Keyed, follow, match
from foredraft.verification.ratios import at_node

VOCAB = 3
EXACT = 1e-9


@dataclass(frozen=True)
class Shape:
    """``filler`` nodes are invalid. ``grows`` says below which node the last one hangs, by the first two tokens that were drawn."""

    parents: tuple[int, ...]
    filler: frozenset[int] = frozenset()
    grows: Callable[[int, int], int] | None = None
    known: bool = True  # the host knows the parents

    @property
    def depth(self) -> int:
        return 2 if self.grows else max(depths_of(self.parents))


TREES = {
    "root": Shape((-1,)),
    "chain of 2": Shape((-1, 0, 1)),
    "two siblings": Shape((-1, 0, 0)),
    "three siblings": Shape((-1, 0, 0, 0)),
    "a pair of chains": Shape((-1, 0, 0, 1, 2)),
    "a bush on the first": Shape((-1, 0, 0, 1, 1)),
    "a bush on the second": Shape((-1, 0, 0, 2, 2), known=False),
    "depth three": Shape((-1, 0, 0, 1, 3)),
    "filler in the middle": Shape((-1, 0, 0, 0, 1, 1, 2), frozenset({2, 4, 6})),
    "filler in the middle, not known": Shape((-1, 0, 0, 0, 1, 1), frozenset({1, 4, 5}), known=False),
    "grown by what was drawn": Shape((-1, 0, 0, -2), grows=lambda first, second: 1 if first >= second else 2),
    "another sibling, by what was drawn": Shape((-1, 0, 0, -2), grows=lambda first, second: 0 if first >= second else 2),
}


@cache
def table(seed: int, text: tuple[int, ...]) -> Tensor:
    """``[V]`` a distribution for each text. Not to be changed."""
    generator = torch.Generator().manual_seed(hash((seed, *text)) % 2**40)
    return torch.softmax(1.5 * torch.randn(VOCAB, generator=generator, dtype=torch.float64), 0)


def p_after(text: tuple[int, ...]) -> Tensor:
    return table(1, text)


def q_after(text: tuple[int, ...]) -> Tensor:
    return table(2, text)


def chosen(proposal: str, noise: EnumeratedNoise, left: Tensor, node: int, depths: Tensor) -> Tensor:
    """``[worlds]`` tokens of ``node`` at ``depths`` ``[worlds]``, from what is ``left`` ``[worlds, V]`` of q above it."""
    if proposal == "deterministic" or (proposal == "mixed" and node % 2 == 0):
        return left.argmax(1)
    if proposal == "keyed":
        return noise.race(left[:, None], depths[:, None] - 1)[:, 0]
    return noise.draw(left, Purpose.DRAFT, node)


def grown(shape: Shape, proposal: str, enumeration: Enumeration, *, kind: str | None = None, dropped: int | None = None):
    """One tree per world, its nodes chosen by q at their parents, and p ``[worlds, N, V]``.

    The faults: ``kind`` is what is claimed of the proposal, and nodes with the token ``dropped`` are taken out afterwards.
    """
    noise, worlds = enumeration.noise(), len(enumeration.worlds)
    parents = torch.tensor(shape.parents).repeat(worlds, 1)
    tokens = torch.zeros_like(parents)
    valid = torch.ones_like(parents, dtype=torch.bool)
    texts: list[list[tuple[int, ...]]] = [[()] for _ in range(worlds)]
    left = torch.zeros(worlds, len(shape.parents), VOCAB, dtype=torch.float64)  # what siblings may still be chosen from
    rows = torch.arange(worlds)
    left[:, 0] = q_after(())
    for node in range(1, len(shape.parents)):
        if shape.parents[node] < -1:
            parents[:, node] = torch.tensor([shape.grows(*pair) for pair in tokens[:, 1:3].tolist()])
        above = parents[:, node]
        if node in shape.filler:
            valid[:, node] = False
        else:
            depths = torch.tensor([len(text[at]) + 1 for text, at in zip(texts, above.tolist())])
            tokens[:, node] = chosen(proposal, noise, left[rows, above], node, depths)
            if proposal not in ("iid", "mixed"):
                left[rows, above] = left[rows, above].scatter(1, tokens[:, node, None], 0)
        for world, (token, at) in enumerate(zip(tokens[:, node].tolist(), above.tolist())):
            texts[world].append((*texts[world][at], token))
            left[world, node] = q_after(texts[world][-1])
    q = torch.stack([torch.stack([q_after(text) for text in line]) for line in texts])
    p = torch.stack([torch.stack([p_after(text) for text in line]) for line in texts])
    if dropped is not None:
        valid[:, 1:] &= tokens[:, 1:] != dropped
        valid = valid & valid.gather(1, parents.clamp(min=0)) & valid.gather(1, parents.gather(1, parents.clamp(min=0)).clamp(min=0))
    chain = shape.parents == tuple(range(-1, len(shape.parents) - 1)) and shape.known
    return TokenTree(
        tokens,
        parents,
        valid if shape.filler or dropped is not None else None,
        proposal=kind or proposal,
        q=q,
        pruned=dropped is not None,
        chain=chain,
        static_parents=None if shape.grows or not shape.known else shape.parents,
    ), p


def law_of(rule: Rule, shape: Shape, proposal: str, **fault) -> tuple[Law, float]:
    """The law of depth + 1 tokens, those after the round's last following p, and the expected number accepted."""

    def run(enumeration: Enumeration) -> list[tuple[int, ...]]:
        tree, p = grown(shape, proposal, enumeration, **fault)
        verdict = rule.verify(tree, p, enumeration.noise())
        path = tree.tokens.gather(1, verdict.path).tolist()
        lines = zip(path, verdict.accepted.tolist(), verdict.next_token.tolist())
        return [(*line[1 : accepted + 1], bonus) for line, accepted, bonus in lines]

    law: Law = {}
    accepted = 0.0
    for emitted, weight in enumerate_law(run).items():
        accepted += weight * (len(emitted) - 1)
        for text, mass in continued({emitted: weight}, shape.depth + 1).items():
            law[text] = law.get(text, 0.0) + mass
    return law, accepted


def error_of(rule: Rule, shape: Shape, proposal: str, **fault) -> float:
    law, _ = law_of(rule, shape, proposal, **fault)
    return distance(law, continued({(): 1.0}, len(next(iter(law)))))


def continued(law: Law, count: int) -> Law:
    while any(len(text) < count for text in law):
        law = {
            (*text, token): mass * value
            for text, mass in law.items()
            for token, value in enumerate(p_after(text).tolist())
            if len(text) < count
        }
    return law


LOSSLESS = [create(name) for name in names() if create(name).lossless]
ON_TREES = [(rule.name, proposal) for rule in LOSSLESS if not rule.chains_only for proposal in rule.proposals]
ON_CHAINS = [(rule.name, proposal) for rule in LOSSLESS if rule.chains_only for proposal in rule.proposals]


BY_SIBLINGS = "another sibling, by what was drawn"


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize(("name", "proposal"), ON_TREES)
def test_the_law_is_the_targets(name: str, proposal: str, shape: str):
    if name == "k-seq" and shape == BY_SIBLINGS:
        assert error_of(create(name), TREES[shape], proposal) > 0.001  # k must not depend on the siblings, as it says
        return
    assert error_of(create(name), TREES[shape], proposal) < EXACT


@pytest.mark.parametrize(("name", "proposal"), ON_CHAINS)
@pytest.mark.parametrize("shape", ["root", "chain of 2"])
def test_so_it_is_on_chains(name: str, proposal: str, shape: str):
    assert error_of(create(name), TREES[shape], proposal) < EXACT


@pytest.mark.parametrize("shape", ["two siblings", "depth three", "filler in the middle", "grown by what was drawn"])
@pytest.mark.parametrize("proposal", create("match").proposals)
def test_so_it_is_when_only_nodes_that_are_reached_choose(proposal: str, shape: str, monkeypatch: pytest.MonkeyPatch):
    """Over a large vocabulary the match rule goes level by level; here over a small one."""
    monkeypatch.setattr(match_module, "ALONE", 1)
    assert error_of(create("match"), TREES[shape], proposal) < EXACT


@pytest.mark.parametrize("proposal", create("match").proposals)
def test_nodes_may_be_dropped_by_value_under_match(proposal: str):
    assert error_of(create("match"), TREES["depth three"], proposal, dropped=2) < EXACT


# -- faults that must be seen --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "amount"), [("multi-candidate", 0.05), ("k-seq", 0.05), ("traversal", 0.05)])
def test_nodes_dropped_by_value_are_seen_by_rules_that_use_q(name: str, amount: float):
    """Which is why these refuse such trees."""
    rule = create(name)
    assert error_of(rule, TREES["a bush on the first"], "iid", dropped=2) > amount
    assert rule.refusal("iid", chain=False, pruned=True)


@pytest.mark.parametrize("name", ["multi-candidate", "traversal"])
def test_an_unchanged_q_is_seen(name: str):
    assert error_of(create(name), TREES["a bush on the first"], "without-replacement", kind="iid") > 0.003


@pytest.mark.parametrize("name", ["multi-candidate", "k-seq", "traversal"])
def test_siblings_that_were_not_drawn_are_seen(name: str):
    """The most likely tokens, verified as if they had been drawn."""
    assert error_of(create(name), TREES["two siblings"], "deterministic", kind="iid") > 0.01


def test_a_leaf_that_reads_the_original_p_is_seen(monkeypatch: pytest.MonkeyPatch):
    """Traversal's next token comes from what is left of p at the survivor, not from p itself."""
    monkeypatch.setattr(traversal_module._Walk, "weights_at_survivor", lambda self: at_node(self.p, self.last))
    assert error_of(create("traversal"), TREES["two siblings"], "iid") > 0.01


def test_duplicates_that_are_merged_are_seen(monkeypatch: pytest.MonkeyPatch):
    """An i.i.d. sibling with the token of an earlier one still is a trial."""

    def merging(self, tree, p, q, noise):
        same = (tree.tokens[:, :, None] == tree.tokens[:, None]) & (tree.parents[:, :, None] == tree.parents[:, None])
        return compare(self, replace(tree, valid=~same.tril(-1).any(-1)), p, q, noise)

    rule = type(create("multi-candidate"))
    compare = rule.compare
    monkeypatch.setattr(rule, "compare", merging)
    assert error_of(rule(), Shape((-1, 0, 1, 1, 1)), "iid") > 0.001


def test_block_that_stops_at_the_first_failure_is_seen():
    class Stopping(type(create("block"))):
        def compare(self, tree, p, q, noise):
            accept = noise.accept
            noise.accept = lambda *arguments: accept(*arguments).cumprod(1).bool()
            return super().compare(tree, p, q, noise)

    assert error_of(Stopping(), TREES["chain of 2"], "iid") > 0.01


def test_a_threshold_below_its_root_is_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(k_seq_module, "threshold", lambda p, q, k: torch.ones_like(p[:, 0]))
    assert error_of(create("k-seq"), TREES["three siblings"], "iid") > 0.01


# -- how much is kept ----------------------------------------------------------------------------------------------------


def test_who_keeps_most():
    """Traversal is block verification on a chain, and keeps at least what trying siblings one by one keeps."""
    chain, pair = TREES["chain of 2"], TREES["a pair of chains"]
    kept = {name: law_of(create(name), chain, "iid")[1] for name in ("rejection", "block", "multi-candidate", "k-seq", "traversal")}
    assert kept["block"] == pytest.approx(kept["traversal"], abs=EXACT)
    assert kept["block"] > kept["rejection"] == pytest.approx(kept["multi-candidate"], abs=EXACT)
    assert kept["rejection"] == pytest.approx(kept["k-seq"], abs=1e-6)
    for proposal in ("iid", "without-replacement"):
        assert law_of(create("traversal"), pair, proposal)[1] > law_of(create("multi-candidate"), pair, proposal)[1]


def test_match_follows_the_longer_of_two_equal_siblings(monkeypatch: pytest.MonkeyPatch):
    """Both say the same text, so that either may be kept; the first alone would end the round a token early."""
    monkeypatch.setattr(match_module, "ALONE", 1)
    tokens = torch.tensor([[0, 1, 1, 2]])
    tree = TokenTree(tokens, torch.tensor([[-1, 0, 0, 2]]), proposal="iid")
    for choices in (
        follow(tree, torch.tensor([[1, 2, 2, 0]])),
        match(tree, Keyed(certain_of([1, 2, 2, 0]), Enumeration([World({})]).noise(), tree)),
    ):
        assert (choices.accepted.tolist(), choices.path[0, :3].tolist(), choices.next_token.tolist()) == ([2], [0, 2, 3], [0])


def certain_of(tokens: list[int]) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor([tokens]), VOCAB).double()


def test_the_toy_case_of_block_verification():
    """p = (1/3, 2/3), q = (2/3, 1/3), γ = 2: block keeps 11/9 tokens on average, the token rule 10/9 (Sun et al. 2024)."""
    p, q = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64), torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)

    def kept(name: str) -> float:
        def run(enumeration: Enumeration) -> list[int]:
            noise, worlds = enumeration.noise(), len(enumeration.worlds)
            drafted = [noise.draw(q.expand(worlds, -1), Purpose.DRAFT, node) for node in range(2)]
            tokens = torch.stack([torch.zeros(worlds, dtype=torch.long), *drafted], 1)
            tree = TokenTree.from_chain(tokens, proposal="iid", q=q.expand(worlds, 2, -1))
            return create(name).verify(tree, p.expand(worlds, 3, -1), noise).accepted.tolist()

        return sum(count * weight for count, weight in enumerate_law(run).items())

    assert kept("block") == pytest.approx(11 / 9, abs=EXACT)
    assert kept("rejection") == pytest.approx(10 / 9, abs=EXACT)


# -- float32 ---------------------------------------------------------------------------------------------------------------


class Scripted:
    """Noise whose uniforms are all ``u``; keeps what it was asked."""

    def __init__(self, u: float):
        self.u = u
        self.asked: list[tuple[int, float]] = []
        self.weights: list[Tensor] = []

    def accept(self, probability: Tensor, node: int | Tensor = 0) -> Tensor:
        first = int(node[0]) if isinstance(node, Tensor) else node
        self.asked += [(first + index, float(value)) for index, value in enumerate(probability[0])]
        return self.u < probability

    def draw(self, weights: Tensor, purpose: Purpose, node: int = 0) -> Tensor:
        assert bool(weights.isfinite().all()) and bool((weights >= 0).all()) and bool((weights.sum(-1) > 0).all())
        self.weights.append(weights)
        return weights.argmax(-1)


def one_row(parents: tuple[int, ...], tokens: list[int], p: list[list[float]], q: list[list[float]], proposal: str = "iid"):
    tensors = [torch.tensor([each], dtype=torch.float32) for each in (p, q)]
    chain = parents == tuple(range(-1, len(parents) - 1))
    tree = TokenTree(torch.tensor([tokens]), torch.tensor([parents]), proposal=proposal, q=tensors[1], chain=chain, static_parents=parents)
    return tree, tensors[0]


COMPARING = [rule.name for rule in LOSSLESS if rule.needs_q]


@pytest.mark.parametrize("name", COMPARING)
def test_a_uniform_of_zero_passes_no_token_of_probability_zero(name: str):
    """Not even where q is tiny, or 0 by rounding."""
    for q in ([0.5, 0.5, 0.0], [1e-30, 1.0, 0.0], [0.0, 1.0, 0.0]):
        tree, p = one_row((-1, 0, 1), [0, 0, 1], [[0.0, 0.5, 0.5], [0.2, 0.3, 0.5], [1.0, 0.0, 0.0]], [q, [0.3, 0.3, 0.4], [0.0] * 3])
        noise = Scripted(0.0)
        verdict = create(name).verify(tree, p, noise)
        assert int(verdict.accepted) == 0 and int(verdict.next_token) > 0


@pytest.mark.parametrize("name", COMPARING)
def test_a_residual_that_cancels_leaves_p(name: str):
    """p = q, and a uniform so close to 1 that nothing passes where the ratio rounds below it."""
    same = [0.1, 0.2, 0.7]
    tree, p = one_row((-1, 0, 1), [0, 2, 2], [same] * 3, [same] * 3)
    noise = Scripted(1.0)
    verdict = create(name).verify(tree, p, noise)
    assert int(verdict.accepted) == 0
    weights = noise.weights[0][0]
    assert (weights / weights.sum()).tolist() == pytest.approx(same, abs=1e-6)


@pytest.mark.parametrize("name", ["block", "traversal"])
def test_a_small_residual_is_not_lost_beside_one(name: str):
    """A = 1 and Z = 1e-7: Z / (Z + (1 - A)) is 1, where (Z + 1) - A would make it 0.84."""
    q = [0.5, 0.5, 0.0]
    tree, p = one_row((-1, 0, 1), [0, 0, 0], [[1.0, 0.0, 0.0], [0.5, 0.4999999, 1e-7], q], [q, q, q])
    noise = Scripted(1.0)
    create(name).verify(tree, p, noise)
    assert dict(noise.asked)[0 if name == "block" else 1] == pytest.approx(1, abs=1e-6)


def test_masses_of_every_size_keep_ratios_finite():
    """Siblings rejected until next to nothing is left of p, in float32, never give NaN, and the draw always has something to draw from."""
    generator = torch.Generator().manual_seed(5)
    for round_ in range(30):
        q = torch.softmax(6 * torch.randn(1, 7, 8, generator=generator), -1)
        p = torch.softmax(q.log() + 10.0 ** -(round_ % 8) * torch.randn(1, 7, 8, generator=generator), -1)
        tokens = torch.tensor([[0, 0, 1, 2, 3, 4, 5]])
        for proposal in ("iid", "without-replacement"):
            tree = TokenTree(tokens, torch.zeros(1, 7, dtype=torch.long), proposal=proposal, q=q, static_parents=(-1, *[0] * 6))
            for name in ("multi-candidate", "traversal"):
                for u in (0.0, 0.5, 0.999, 1.0):
                    noise = Scripted(u)
                    create(name).verify(tree, p, noise)
                    assert all(0 <= value < float("inf") for _, value in noise.asked)


@pytest.mark.parametrize("name", [name for name, proposal in ON_TREES if proposal == "iid"])
def test_a_row_does_not_depend_on_its_company(name: str):
    """Trees of three layouts, with filler, in one batch and alone: the same verdicts, by real noise."""
    generator = torch.Generator().manual_seed(6)
    layouts = [[-1, 0, 0, 1, 1], [-1, 0, 1, 2, 3], [-1, 0, 0, 0, 3]]
    for seed in range(20):
        p, q = (torch.softmax(torch.randn(3, 5, 4, generator=generator), -1) for _ in range(2))
        tokens = torch.randint(0, 4, (3, 5), generator=generator)
        valid = torch.tensor([[True] * 5, [True, True, True, False, False], [True, True, False, True, True]])
        keys, positions = torch.tensor([row_key((seed, row)) for row in range(3)]), torch.tensor([3, 4, 5])
        tree = TokenTree(tokens, torch.tensor(layouts), valid, proposal="iid", q=q)
        together = create(name).verify(tree, p, Noise(keys, positions))
        for row, layout in enumerate(layouts):
            one = slice(row, row + 1)
            for known in (None, tuple(layout)):
                alone = TokenTree(tokens[one], tree.parents[one], valid[one], proposal="iid", q=q[one], static_parents=known)
                verdict = create(name).verify(alone, p[one], Noise(keys[one], positions[one]))
                count = int(verdict.accepted)
                assert count == int(together.accepted[row]) and int(verdict.next_token) == int(together.next_token[row])
                assert verdict.path[0, : count + 1].tolist() == together.path[row, : count + 1].tolist()
