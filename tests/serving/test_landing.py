"""What is said to be kept of a draft on average, beside what rules keep of it in thousands of rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foredraft.logits.noise import Noise
from foredraft.serving.landing import RecordedNoise, landing, levels
from foredraft.shapes import TreeShape
from foredraft.tree import Proposal, TokenTree
from foredraft.verification import create

ROWS, VOCAB = 20_000, 6
SHAPES = ("chain(3)", "product(3,2,1)", "paths(0,1,0.0,0.1,1.0,0.0.0)")
CASES: list[tuple[str, Proposal]] = [
    ("match", "deterministic"),
    ("match", "without-replacement"),
    ("multi-candidate", "without-replacement"),
    ("multi-candidate", "iid"),
    ("k-seq", "iid"),
    ("traversal", "without-replacement"),
    ("traversal", "iid"),
]


def drafted(shape: str, proposal: Proposal, *, filler: bool = False) -> tuple[TokenTree, Tensor]:
    """One draft in all rows, with the last node as ``filler`` if that is wanted, and p."""
    generator = torch.Generator().manual_seed(3)
    parsed = TreeShape.parse(shape)
    assert hasattr(parsed, "parents")
    weights = torch.rand(2, len(parsed.parents), VOCAB, generator=generator) ** 2 + 0.01
    p, q = weights / weights.sum(-1, keepdim=True)
    tokens = torch.zeros(len(parsed.parents), dtype=torch.long)
    for parent in range(len(parsed.parents)):
        children = [node for node, above in enumerate(parsed.parents) if above == parent]
        if children:
            tokens[children] = torch.multinomial(q[parent], len(children), replacement=proposal == "iid", generator=generator)
    valid = torch.arange(len(tokens)).expand(ROWS, -1) < len(tokens) - 1 if filler else None
    how = {"valid": valid, "proposal": proposal, "q": q.expand(ROWS, -1, -1)}
    lines = tokens.expand(ROWS, -1)
    tree = TokenTree.from_chain(lines, **how) if parsed.is_chain else TokenTree.from_parents(lines, parsed.parents, **how)
    return tree, p.expand(ROWS, -1, -1)


def noise() -> Noise:
    return Noise(torch.randint(2**62, (ROWS,), generator=torch.Generator().manual_seed(2)), torch.full((ROWS,), 5))


def off(said: Tensor, accepted: Tensor) -> float:
    """How many standard errors lie between ``said`` ``[D + 1]`` and the shares of 0, 1, … in ``accepted`` ``[R]``, at most."""
    shares = torch.bincount(accepted, minlength=len(said)) / len(accepted)
    return float(((said - shares).abs() / (said * (1 - said) / len(accepted)).clamp(min=1e-7).sqrt()).max())


@pytest.mark.parametrize("filler", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("rule", "proposal"), CASES)
def test_as_much_is_kept_as_is_said(rule, proposal, shape, filler):
    """In 20,000 rounds over one draft. What ``rejection`` keeps of a chain, each node by min(1, p / q), would be found out."""
    made, (tree, p) = create(rule), drafted(shape, proposal, filler=filler)
    recorded, depth = RecordedNoise(noise()), tree.height
    verdict = made.verify(tree, p, recorded)
    said = landing(made, tree, p, verdict, noise=recorded, depth=depth)
    assert said is not None and said.shape == (ROWS, depth + 1)
    torch.testing.assert_close(said.sum(1), torch.ones(ROWS))
    assert said.allclose(said[:1])
    assert off(said[0], verdict.accepted) < 4
    if (rule, shape) not in [("multi-candidate", "chain(3)"), ("k-seq", "chain(3)")]:  # there it is right
        at = tree.parents.clamp(min=0)[:1, :, None].expand(-1, -1, VOCAB)
        p_x, q_x = (values[:1].gather(1, at).gather(2, tree.tokens[:1, :, None])[..., 0] for values in (p, tree.q))
        ratio = (p_x / q_x).clamp(max=1) * (1 if tree.valid is None else tree.valid[:1])
        one = TokenTree.from_parents(tree.tokens[:1], tuple(tree.parents[0].tolist()))
        at_least = levels(one, ratio, depth)[0]
        wrong = at_least - torch.cat([at_least[1:], torch.zeros(1)])
        assert off(wrong.clamp(0, 1), verdict.accepted) > 10


def test_of_a_rule_without_coins_what_came_is_what_had_to_come():
    made, (tree, p) = create("typical"), drafted("product(3,2,1)", "without-replacement")
    recorded = RecordedNoise(noise())
    verdict = made.verify(tree, p, recorded)
    said = landing(made, tree, p, verdict, noise=recorded, depth=tree.height)
    assert said.argmax(1).equal(verdict.accepted) and said.sum() == said.count_nonzero() == ROWS


@pytest.mark.parametrize("shape", ["product(1,1,1)", "product(2,1)", "product(3)"])
@pytest.mark.parametrize("mixed", [False, True])
def test_of_tokens_that_share_the_noise(shape, mixed):
    """Over 20,000 drafts that raced with the target's noise; in a mixed tree every other row copies a draft instead. On average, and among
    those whose first level is the same, as many are kept as is said. By p alone it would be found out."""
    parsed, made, recorded = TreeShape.parse(shape), create("match"), RecordedNoise(noise())
    tree, p = drafted(shape, "keyed")
    q, tokens = tree.q[:1], tree.tokens.contiguous()
    for level, depth in zip(parsed.levels, range(parsed.depth)):
        ranked = recorded.race_order(q[:, level.above : level.first].expand(ROWS, -1, -1), torch.tensor([[depth]]), 1 + max(level.ranks))
        tokens[:, level.first : level.last] = ranked.flatten(1)
    shared = torch.arange(ROWS) % 2 == 0 if mixed else torch.ones(ROWS, dtype=torch.bool)
    tokens[~shared] = tokens[1].clone()
    q = torch.where(shared[:, None, None], tree.q, torch.nan)
    tree = TokenTree.from_parents(tokens, parsed.parents, proposal="mixed" if mixed else "keyed", q=q)
    verdict = made.verify(tree, p, recorded)
    drafts, which = torch.cat([shared[:, None], tokens], 1).unique(dim=0, return_inverse=True)
    one = torch.zeros(len(drafts), dtype=torch.long).scatter(0, which, torch.arange(ROWS))  # a row of each
    few = TokenTree.from_parents(tokens[one], parsed.parents, proposal=tree.proposal, q=q[one])
    said = landing(made, few, p[one], verdict, noise=recorded, depth=parsed.depth)[which]
    torch.testing.assert_close(said.sum(1), torch.ones(ROWS))
    wrong = landing(made, replace(tree, proposal="deterministic"), p, verdict, noise=recorded, depth=parsed.depth)
    firsts, which = tokens[shared][:, 1 : parsed.levels[0].last].unique(dim=0, return_inverse=True)
    groups = [torch.nonzero(shared)[:, 0][which == group] for group in range(len(firsts))]
    groups += [torch.arange(ROWS), *(torch.nonzero(each)[:, 0] for each in (shared, ~shared))]
    assert all(off(said[rows].mean(0), verdict.accepted[rows]) < 4.5 for rows in groups if len(rows) > 500)
    assert off(wrong[shared].mean(0), verdict.accepted[shared]) > 10


@pytest.mark.parametrize("proposal", ["keyed", "iid"])
def test_of_tokens_that_may_be_equal_or_have_no_q_nothing_is_said(proposal):
    made, (tree, p) = create("match"), drafted("product(3,2,1)", proposal)
    tree = replace(tree, q=None)
    recorded = RecordedNoise(noise())
    assert landing(made, tree, p, made.verify(tree, p, recorded), noise=recorded, depth=tree.height) is None


def test_without_a_draft_nothing_can_be_kept():
    tree, p = TokenTree.root(torch.zeros(ROWS, 1, dtype=torch.long)[:, 0]), torch.full((ROWS, 1, VOCAB), 1 / VOCAB)
    for rule in ("match", "block", "traversal", "typical"):
        made, recorded = create(rule), RecordedNoise(noise())
        said = landing(made, tree, p, made.verify(tree, p, recorded), noise=recorded, depth=2)
        assert said.tolist() == [[1.0, 0.0, 0.0]] * ROWS
