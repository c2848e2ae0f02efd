"""What kernels make of chains is what tensor operations make of them, whose law is enumerated elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import needs_kernels
from torch import Tensor

from foredraft.backends import native
from foredraft.logits.noise import Noise
from foredraft.tree import TokenTree
from foredraft.verification import Verdict, block, create, ratios

pytestmark = needs_kernels
ROWS, NODES, RULES, TRIALS = 5, 6, ("block", "rejection"), 40


def drafts(vocab_size: int, *, spare: int = 0) -> tuple[TokenTree, Tensor]:
    """Chains of 0 to 5 tokens drawn from q with its distribution at ``spare`` nodes more than a chain needs, and p, 0 in places."""
    random = torch.Generator().manual_seed(vocab_size)
    scores = 3 * torch.randn(ROWS, NODES, vocab_size, generator=random)
    p = torch.softmax(scores.masked_fill(torch.rand(scores.shape, generator=random) < 0.1, -1e30), -1)
    q = torch.softmax(scores[:, : NODES - 1] + torch.randn(ROWS, NODES - 1, vocab_size, generator=random), -1)
    p[3, :2] = q[3, :2]  # draft and target are equal
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=random).view(ROWS, NODES - 1)
    q = torch.cat([q, q[:, :1].expand(-1, spare, -1)], 1)
    tree = TokenTree.from_chain(torch.cat([torch.zeros(ROWS, 1, dtype=torch.long), tokens], 1), proposal="iid", q=q)
    return tree.truncate([5, 3, 0, 5, 1]), p


@pytest.fixture(autouse=True)
def loaded():
    native.library(torch.float32)
    assert ratios.kernel is not None


def verdict(rule: str, tree: TokenTree, p: Tensor, seed: int = 0) -> Verdict:
    return create(rule).verify(tree, p, Noise(torch.arange(ROWS) + 1000 * seed - 500, torch.arange(ROWS) + seed))


def verdicts(rule: str, tree: TokenTree, p: Tensor) -> list[tuple[list[int], list[int]]]:
    found = [verdict(rule, tree, p, seed) for seed in range(TRIALS)]
    return [(each.accepted.tolist(), each.next_token.tolist()) for each in found]


def both(rule: str, tree: TokenTree, p: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Verdicts under many noises, which are the same by kernels and by tensor operations."""
    found = verdicts(rule, tree, p)
    with monkeypatch.context() as patch:
        patch.setattr(ratios, "kernel", None)
        assert found == verdicts(rule, tree, p)
    return found


def kernel(tree: TokenTree, p: Tensor, *, blocks: bool = True) -> tuple[Tensor, ...]:
    assert ratios.kernel is not None and tree.q is not None
    return ratios.kernel(tree.tokens, tree.drafted, p, tree.q, Noise(torch.arange(ROWS), torch.arange(ROWS)), blocks)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocab_size", [2, 15, 16, 33, 300, 5000])
@pytest.mark.parametrize("spare", [0, 1])
def test_verdicts_are_those_of_tensor_operations(rule: str, vocab_size: int, spare: int, monkeypatch: pytest.MonkeyPatch):
    found = both(rule, *drafts(vocab_size, spare=spare), monkeypatch)
    kept = list(zip(*(accepted for accepted, _ in found)))
    assert len({*kept[0], *kept[3]}) > 2 and max(kept[1]) <= 3 and not any(kept[2]) and max(kept[4]) <= 1


@pytest.mark.parametrize("vocab_size", [2, 33, 5000])
def test_the_chance_that_tokens_survive(vocab_size: int):
    tree, p = drafts(vocab_size)
    assert tree.q is not None
    expected = block.survival(ratios.chain_ratios(tree.tokens, p, tree.q))[:, 1:]
    torch.testing.assert_close(kernel(tree, p)[3], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rule", RULES)
def test_a_residual_of_nothing_is_p(rule: str, monkeypatch: pytest.MonkeyPatch):
    """No token of the draft can be kept, and q is more than p everywhere."""
    tree, p = drafts(40)
    assert tree.q is not None
    p[:, :-1] = tree.q * 0.5
    p[:, 0].scatter_(1, tree.tokens[:, 1:2], 0)
    assert not any(any(accepted) for accepted, _ in both(rule, tree, p, monkeypatch))


@pytest.mark.parametrize("rule", RULES)
def test_a_race_that_rounding_may_decide_is_left_to_tensor_operations(rule: str, monkeypatch: pytest.MonkeyPatch):
    tree, p = drafts(40)
    p[1:] *= 1e-33
    assert (kernel(tree, p)[1] < 0).tolist() == [False, *[True] * (ROWS - 1)]
    both(rule, tree, p, monkeypatch)


def test_distributions_in_float64_are_compared_by_tensor_operations():
    tree, p = drafts(40)
    assert tree.q is not None
    assert verdict("block", replace(tree, q=tree.q.double()), p.double()).wrong_q is None


@pytest.mark.parametrize("rule", RULES)
def test_the_results_follow_neither_the_default_device_nor_the_default_dtype(rule: str):
    tree, p = drafts(40)
    noise = Noise(torch.arange(ROWS), torch.arange(ROWS))
    expected, before = create(rule).verify(tree, p, noise), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = create(rule).verify(tree, p, noise)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found.accepted, expected.accepted) and torch.equal(found.next_token, expected.next_token)


@pytest.mark.parametrize("rule", RULES)
def test_a_token_that_p_makes_impossible_ends_all_chances_behind_it(rule: str, monkeypatch: pytest.MonkeyPatch):
    """NaN is behind it where the token was one that the target cannot read: nothing there may be kept."""
    tree, p = drafts(40)
    for row, node in ((0, 1), (1, 0), (3, 3)):
        p[row, node, tree.tokens[row, node + 1]] = 0
        p[row, node + 1 :] = torch.nan
    assert tree.q is not None
    first = tree.tokens[0, 1]
    p[0, 0, first], p[0, 0, first - 1] = tree.q[0, 0, first] * 0.5, torch.nan  # one of many, in what is drawn from now and then
    found = both(rule, tree, p, monkeypatch)
    kept = list(zip(*(accepted for accepted, _ in found)))
    assert {*kept[0]} == {0, 1} and max(kept[1]) == 0 and max(kept[3]) <= 3


@pytest.mark.parametrize("rule", RULES)
def test_quotients_that_are_too_large_or_nothing(rule: str, monkeypatch: pytest.MonkeyPatch):
    """A q that is almost 0, one that is 0, and a token beyond the vocabulary, which stands where nothing was drafted."""
    tree, p = drafts(40)
    assert tree.q is not None
    q, tokens = tree.q, tree.tokens
    p[0, 0, tokens[0, 1]], p[0, 1, tokens[0, 2]], q[0, 1, tokens[0, 2]] = 0, 0.5, 1e-44
    q[1, 0, tokens[1, 1]] = 0
    p[4, 0, tokens[4, 1]] = p[4, 0, 39] = p[2, 1, 0] = 0.5
    q[3, 0, tokens[3, 1]] = 1e-44
    found = both(rule, tree, p, monkeypatch)
    kept = list(zip(*(accepted for accepted, _ in found)))
    assert not any(kept[0]) and not any(kept[1]) and min(kept[3]) >= (rule == "rejection")
    P = kernel(tree, p)[3]
    assert not P[0].any() and not P[1].any() and float(P[3, 0]) == 1 and float(P[4, 0]) > 0
    tokens[4, 2:], tokens[2, 1:] = -1, 40
    beyond = kernel(tree, p)[3]
    assert torch.equal(beyond[:2], P[:2]) and not beyond[4, 1:].any() and not beyond[2].any()
    assert verdicts(rule, tree, p) == found


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_layout_and_the_threads_change_nothing(threads: int):
    tree, p = drafts(33)
    assert tree.q is not None
    q = tree.q[:, :1].expand(-1, NODES - 1, -1)  # the same at every node
    expected, before = kernel(replace(tree, q=q.contiguous()), p), torch.get_num_threads()
    wide = torch.full((ROWS, NODES, 50), 7.0)
    wide[..., 5:38] = p
    wide_q = torch.full((ROWS, NODES + 1, 50), 7.0)
    wide_q[:, : NODES - 1, 2:35] = q
    turned = tree.tokens.t().contiguous().t()
    torch.set_num_threads(threads)
    try:
        for given in (q, q.contiguous(), wide_q[:, :, 2:35], wide_q[:, : NODES - 1, 2:35]):
            found = kernel(replace(tree, tokens=turned, q=given), wide[..., 5:38])
            assert all(map(torch.equal, found, expected))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("spoil", [lambda q: q[..., :-1], lambda q: q[:, :-1], lambda q: q[:-1], lambda q: q.to("meta")])
def test_kernels_do_not_read_beyond_q(spoil):
    tree, p = drafts(33)
    assert tree.q is not None and ratios.for_kernels(p, tree.q) and not ratios.for_kernels(p, spoil(tree.q))


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("spoil", ["too much", "too little", "negative", "NaN", "infinite"])
def test_a_q_that_is_no_distribution_is_told(spoil: str, blocks: bool):
    """At nodes that something was drafted from."""
    tree, p = drafts(33)
    assert tree.q is not None and not kernel(tree, p, blocks=blocks)[2].any()
    for row, node in ((0, 4), (1, 2), (1, 3), (2, 0), (4, 0)):  # the third and the fourth have nothing drafted
        line = tree.q[row, node]
        if spoil in ("too much", "too little"):
            line *= 1.01 if spoil == "too much" else 0.99
        else:
            line[7], line[8] = {"negative": (-0.01, line[7] + line[8] + 0.01), "NaN": (torch.nan, 0), "infinite": (torch.inf, 0)}[spoil]
    found = kernel(tree, p, blocks=blocks)[2].bool()
    assert torch.equal(found, tree.wrong_q[:, :-1])
    assert found.nonzero().tolist() == [[0, 4], [1, 2], [4, 0]]
