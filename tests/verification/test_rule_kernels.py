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


def judged(tree: TokenTree, p: Tensor, q: Tensor) -> list[Tensor]:
    """All that kernels compute of chains: P and h, and the weights of the next token wherever the rows end."""
    P, h = block.judged(tree.tokens, tree.drafted, p, q)
    ends = [tree.drafted.clamp(max=end) for end in range(tree.nodes)]
    scales = P.clamp(min=0.1)  # no row ends where P is 0
    left = [ratios.after(p, q, end, tree.drafted, by) for end in ends for by in (None, scales.gather(1, end[:, None])[:, 0])]
    return [P, h, *left]


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


def test_a_token_that_p_makes_impossible_ends_all_chances_behind_it(monkeypatch: pytest.MonkeyPatch):
    """NaN is behind it where the token was one that the target cannot read: nothing there may be kept."""
    tree, p = drafts(40)
    tokens = tree.tokens
    assert tree.q is not None
    for row, node in ((0, 1), (1, 0), (3, 3)):
        p[row, node, tokens[row, node + 1]] = 0
        p[row, node + 1 :] = torch.nan
    p[0, 0, tokens[0, 1] - 1] = torch.nan  # one of many
    found = judged(tree, p, tree.q)
    by_tensors(monkeypatch)
    torch.testing.assert_close(found, judged(tree, p, tree.q), rtol=1e-4, atol=1e-6, equal_nan=True)
    P, h = found[:2]
    assert not P[0, 2:].any() and not h[0, 1:].any() and not P[1, 1:].any() and not h[1].any()


def test_quotients_that_are_too_large_or_nothing(monkeypatch: pytest.MonkeyPatch):
    """A q that is almost 0, one that is 0, and a token beyond the vocabulary, which stands where nothing was drafted."""
    tree, p = drafts(40)
    assert tree.q is not None
    q, tokens = tree.q.clone(), tree.tokens.clone()
    p[0, 0, tokens[0, 1]], p[0, 1, tokens[0, 2]], q[0, 1, tokens[0, 2]] = 0, 0.5, 1e-44
    q[1, 0, tokens[1, 1]] = 0
    p[4, 0, tokens[4, 1]] = p[4, 0, 39] = p[2, 1, 0] = 0.5
    q[3, 0, tokens[3, 1]] = 1e-44
    found = judged(tree, p, q)
    assert torch.equal(found[0][0, 1:], torch.zeros(5)) and not found[0][1, 1:].any() and float(found[0][3, 1]) == 1
    assert float(found[0][4, 1]) > 0
    tokens[4, 2:], tokens[2, 1:] = -1, 40
    P, h = block.judged(tokens, tree.drafted, p, q)
    assert torch.equal(h, found[1]) and not P[4, 2:].any() and not P[2, 1:].any()
    by_tensors(monkeypatch)
    torch.testing.assert_close(found, judged(tree, p, q), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_layout_and_the_threads_change_nothing(threads: int):
    tree, p = drafts(33)
    assert tree.q is not None
    q = tree.q[:, :1].expand(-1, NODES - 1, -1)  # the same at every node
    expected, before = judged(tree, p, q.contiguous()), torch.get_num_threads()
    wide = torch.full((ROWS, NODES, 50), 7.0)
    wide[..., 5:38] = p
    wide_q = torch.full((ROWS, NODES + 1, 50), 7.0)
    wide_q[:, : NODES - 1, 2:35] = q
    turned = tree.tokens.t().contiguous().t()
    torch.set_num_threads(threads)
    try:
        for given in (q, q.contiguous(), wide_q[:, :, 2:35], wide_q[:, : NODES - 1, 2:35]):
            found = judged(replace(tree, tokens=turned), wide[..., 5:38], given)
            assert all(map(torch.equal, found, expected))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("spoil", [lambda q: q[..., :-1], lambda q: q[:, :-1], lambda q: q[:-1], lambda q: q.to("meta")])
def test_kernels_do_not_read_beyond_q(spoil):
    tree, p = drafts(33)
    assert tree.q is not None and ratios.for_kernels(p, tree.q) and not ratios.for_kernels(p, spoil(tree.q))
