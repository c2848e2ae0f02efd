"""What kernels compute for rules that compare p with q is what tensor operations compute, whose law is enumerated elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import needs_kernels
from torch import Tensor

from foredraft.backends import native
from foredraft.logits.noise import Noise
from foredraft.tree import TokenTree
from foredraft.verification import block, create, ratios

pytestmark = needs_kernels
ROWS, NODES = 5, 6


def drafts(vocab_size: int, *, spare: int = 0) -> tuple[TokenTree, Tensor]:
    """Chains of 0 to 5 tokens drawn from q with its distribution at ``spare`` nodes more than a chain needs, and p, 0 in places."""
    random = torch.Generator().manual_seed(vocab_size)
    scores = 3 * torch.randn(ROWS, NODES, vocab_size, generator=random)
    p = torch.softmax(scores.masked_fill(torch.rand(scores.shape, generator=random) < 0.3, -1e30), -1)
    q = torch.softmax(scores[:, : NODES - 1] + 2 * torch.randn(ROWS, NODES - 1, vocab_size, generator=random), -1)
    p[3, :2] = q[3, :2]  # draft and target are equal
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=random).view(ROWS, NODES - 1)
    q = torch.cat([q, q[:, :1].expand(-1, spare, -1)], 1)
    tree = TokenTree.from_chain(torch.cat([torch.zeros(ROWS, 1, dtype=torch.long), tokens], 1), proposal="iid", q=q)
    return tree.truncate([5, 3, 0, 5, 1]), p


@pytest.fixture(autouse=True)
def loaded():
    native.library(torch.float32)
    assert block.kernel is not None and ratios.kernel is not None


def by_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "kernel", None)
    monkeypatch.setattr(ratios, "kernel", None)


@pytest.mark.parametrize("vocab_size", [2, 15, 16, 33, 5000])
@pytest.mark.parametrize("spare", [0, 1])
def test_kernels_judge_chains_as_tensor_operations_do(vocab_size: int, spare: int, monkeypatch: pytest.MonkeyPatch):
    tree, p = drafts(vocab_size, spare=spare)
    assert tree.q is not None
    q = tree.q[:, : tree.nodes - 1]
    accepted = [torch.tensor(each) for each in ([0, 0, 0, 2, 0], [4, 2, 0, 5, 1], [5, 3, 0, 0, 0])]
    scale = torch.tensor([1.0, 0.4, 1.0, 1.0, 0.7])

    def computed() -> list[Tensor]:
        left = [ratios.after(p, q, each, tree.drafted, by) for each in accepted for by in (None, scale)]
        return [*block.judged(tree.tokens, tree.drafted, p, q), *(weights / weights.sum(-1, keepdim=True) for weights in left)]

    found = computed()
    by_tensors(monkeypatch)
    for mine, expected in zip(found, computed()):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)
    assert bool((found[0] < 1).any()) and bool((found[1] == 0).any()) and float(found[1].max()) == 1


@pytest.mark.parametrize("rule", ["block", "rejection"])
def test_verdicts_are_the_same(rule: str, monkeypatch: pytest.MonkeyPatch):
    drafted = [drafts(vocab_size) for vocab_size in range(280, 320)]

    def verdicts() -> list[tuple[list[int], list[int]]]:
        noise = Noise(torch.arange(ROWS), torch.arange(ROWS))
        found = [create(rule).verify(tree, p, noise) for tree, p in drafted]
        return [(each.accepted.tolist(), each.next_token.tolist()) for each in found]

    mine = verdicts()
    by_tensors(monkeypatch)
    assert mine == verdicts()
    assert len({tuple(accepted) for accepted, _ in mine}) > 10


def test_a_residual_of_nothing_is_p():
    p = torch.softmax(torch.randn(1, 2, 40, generator=torch.Generator().manual_seed(0)), -1)
    found = ratios.after(p, p[:, :1], torch.tensor([0]), torch.tensor([1]))
    assert torch.equal(found, p[:, 0])


def test_distributions_in_float64_are_compared_by_tensor_operations():
    tree, p = drafts(40)
    assert tree.q is not None
    assert block.judged(tree.tokens, tree.drafted, p.double(), tree.q.double())[0].dtype == torch.float64


def test_the_results_follow_neither_the_default_device_nor_the_default_dtype():
    tree, p = drafts(40)
    assert tree.q is not None

    def computed() -> list[Tensor]:
        assert tree.q is not None
        return [*block.judged(tree.tokens, tree.drafted, p, tree.q), ratios.after(p, tree.q, tree.drafted - 1, tree.drafted)]

    tree = replace(tree, valid=None)
    expected, before = computed(), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = computed()
    finally:
        torch.set_default_dtype(before)
    assert all(map(torch.equal, found, expected))
