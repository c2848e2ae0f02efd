"""Rules on branching trees, by enumeration: the law of whole continuations, and how much each rule keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foretoken.sampling import Purpose
from foretoken.testing import Enumeration, Law, distance, enumerate_law
from foretoken.tree import TokenTree
from foretoken.verification import Rule, create
from foretoken.verification import k_seq as k_seq_module
from foretoken.verification import traversal as traversal_module

VOCAB = 3
EXACT = 1e-9
TREES = {
    "chain of 2": [-1, 0, 1],
    "two siblings": [-1, 0, 0],
    "three siblings": [-1, 0, 0, 0],
    "a pair of chains": [-1, 0, 0, 1, 2],
    "a bush on the first": [-1, 0, 0, 1, 1],
}


def table(seed: int, text: tuple[int, ...]) -> Tensor:
    """``[V]`` a distribution for each text."""
    generator = torch.Generator().manual_seed(hash((seed, *text)) % 2**40)
    return torch.softmax(1.5 * torch.randn(VOCAB, generator=generator, dtype=torch.float64), 0)


def p_after(text: tuple[int, ...]) -> Tensor:
    return table(1, text)


def q_after(text: tuple[int, ...]) -> Tensor:
    return table(2, text)


def grown(parents: list[int], proposal: str, enumeration: Enumeration, *, changed_q: bool = True) -> tuple[TokenTree, Tensor]:
    """One tree per world, each node drawn from q at its parent, and p ``[worlds, N, V]``."""
    noise, worlds = enumeration.noise(), len(enumeration.worlds)
    texts: list[list[tuple[int, ...]]] = [[()] * worlds]
    left: list[Tensor] = []  # what siblings may still be drawn from, per node
    for node, parent in enumerate(parents):
        if node:
            token = noise.draw(left[parent], Purpose.DRAFT, node)
            texts.append([(*text, value) for text, value in zip(texts[parent], token.tolist())])
            if proposal == "without-replacement":
                left[parent] = left[parent].scatter(1, token[:, None], 0)
        left.append(torch.stack([q_after(text) for text in texts[node]]))
    tokens = torch.tensor([[text[-1] if text else 0 for text in line] for line in texts]).T
    q = torch.stack([torch.stack([q_after(text) for text in line]) for line in texts], 1)
    p = torch.stack([torch.stack([p_after(text) for text in line]) for line in texts], 1)
    chain = parents == list(range(-1, len(parents) - 1))
    kind = proposal if changed_q else "iid"  # the fault: siblings drawn without replacement, verified with an unchanged q
    return TokenTree(tokens, torch.tensor(parents).expand(worlds, -1), proposal=kind, q=q, chain=chain), p


def law_of(rule: Rule, parents: list[int], proposal: str, **fault: bool) -> tuple[Law, float]:
    """The law of depth + 1 tokens, those after the round's last following p, and the expected number accepted."""

    def run(enumeration: Enumeration) -> list[tuple[int, ...]]:
        tree, p = grown(parents, proposal, enumeration, **fault)
        verdict = rule.verify(tree, p, enumeration.noise())
        path = tree.tokens.gather(1, verdict.path).tolist()
        lines = zip(path, verdict.accepted.tolist(), verdict.next_token.tolist())
        return [(*line[1 : accepted + 1], bonus) for line, accepted, bonus in lines]

    depth = max(len(TokenTree(*[torch.tensor([parents])] * 2).path(0, node)) for node in range(len(parents))) - 1
    law: Law = {}
    accepted = 0.0
    for emitted, weight in enumerate_law(run).items():
        accepted += weight * (len(emitted) - 1)
        for text, mass in continued({emitted: weight}, depth + 1).items():
            law[text] = law.get(text, 0.0) + mass
    return law, accepted


def continued(law: Law, count: int) -> Law:
    while any(len(text) < count for text in law):
        law = {
            (*text, token): mass * value
            for text, mass in law.items()
            for token, value in enumerate(p_after(text).tolist())
            if len(text) < count
        }
    return law


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize(
    ("name", "proposal"),
    [
        ("multi-candidate", "iid"),
        ("multi-candidate", "without-replacement"),
        ("k-seq", "iid"),
        ("traversal", "iid"),
        ("traversal", "without-replacement"),
    ],
)
def test_the_law_is_the_targets(name: str, proposal: str, shape: str):
    parents = TREES[shape]
    law, _ = law_of(create(name), parents, proposal)
    assert distance(law, continued({(): 1.0}, len(next(iter(law))))) < EXACT


@pytest.mark.parametrize("name", ["multi-candidate", "traversal"])
def test_an_unchanged_q_is_found(name: str):
    law, _ = law_of(create(name), TREES["a bush on the first"], "without-replacement", changed_q=False)
    assert distance(law, continued({(): 1.0}, 3)) > 0.003


def test_a_leaf_that_reads_the_original_p_is_found(monkeypatch: pytest.MonkeyPatch):
    """Traversal's next token comes from what is left of p at the survivor, not from p itself."""

    class Faulty(traversal_module._State):
        def leave(self, *arguments):
            before = self.p.clone()
            super().leave(*arguments)
            self.p = before

    monkeypatch.setattr(traversal_module, "_State", Faulty)
    law, _ = law_of(create("traversal"), TREES["two siblings"], "iid")
    assert distance(law, continued({(): 1.0}, 2)) > 0.01


def test_block_that_stops_at_the_first_failure_is_found():
    class Stopping(type(create("block"))):
        def compare(self, tree, p, q, noise):
            accept = noise.accept
            noise.accept = lambda *arguments: accept(*arguments).cumprod(1).bool()
            return super().compare(tree, p, q, noise)

    law, _ = law_of(Stopping(), TREES["chain of 2"], "iid")
    assert distance(law, continued({(): 1.0}, 3)) > 0.01


def test_a_threshold_below_its_root_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(k_seq_module, "threshold", lambda p, q, k: torch.ones_like(p[..., 0]))
    law, _ = law_of(create("k-seq"), TREES["three siblings"], "iid")
    assert distance(law, continued({(): 1.0}, 2)) > 0.01


def test_who_keeps_most():
    """Traversal is block verification on a chain, and keeps at least what trying siblings one by one keeps."""
    chain, pair = TREES["chain of 2"], TREES["a pair of chains"]
    kept = {name: law_of(create(name), chain, "iid")[1] for name in ("rejection", "block", "multi-candidate", "traversal")}
    assert kept["block"] == pytest.approx(kept["traversal"], abs=EXACT)
    assert kept["block"] > kept["rejection"] == pytest.approx(kept["multi-candidate"], abs=EXACT)
    for proposal in ("iid", "without-replacement"):
        assert law_of(create("traversal"), pair, proposal)[1] > law_of(create("multi-candidate"), pair, proposal)[1]


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
