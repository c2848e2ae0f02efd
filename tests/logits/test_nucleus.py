"""Top-p without a sort gives transformers' own scores, bit for bit, and says where it cannot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TopPLogitsWarper

from foredraft.logits.nucleus import LEADERS, WORTHWHILE, among_leaders, top_p

VOCAB = WORTHWHILE


@st.composite
def scores(draw: st.DrawFn) -> torch.Tensor:
    """Peaked and flat rows, rows with ties, rows that an earlier processor left little of."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    rows = draw(st.integers(1, 4))
    values = (
        torch.randn(rows, VOCAB, generator=generator)
        * torch.tensor([draw(st.sampled_from([0.1, 1.0, 3.0, 8.0])) for _ in range(rows)])[:, None]
    )
    if draw(st.booleans()):
        values = values.mul(draw(st.sampled_from([1, 4]))).round()  # many equal scores
    if draw(st.booleans()):
        kept = values.topk(draw(st.integers(1, 60)), -1).indices
        values = torch.full_like(values, float("-inf")).scatter(1, kept, values.gather(1, kept))
    return values


@settings(max_examples=75, deadline=None)
@given(scores(), st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999]), st.integers(1, 5))
def test_the_scores_are_those_of_transformers(values: torch.Tensor, p: float, least: int):
    warper, ids = TopPLogitsWarper(p, min_tokens_to_keep=least), torch.zeros(len(values), 0, dtype=torch.long)
    assert top_p(warper, ids, values.clone()).equal(warper(ids, values.clone()))


def test_it_knows_where_it_can_not_know():
    peaked = torch.zeros(VOCAB)
    peaked[:3] = torch.tensor([20.0, 19.5, 18.0])
    flat, tied = torch.zeros(VOCAB), torch.full((VOCAB,), -30.0)
    tied[:4] = 1.0
    edge = torch.full((VOCAB,), float("-inf"))
    edge[:2] = torch.tensor([0.5, 0.5]).log()
    values = torch.stack([peaked, flat, tied, edge])
    assert among_leaders(values, 0.6, 1)[1].tolist() == [True, False, False, True]
    assert among_leaders(values, 0.5, 1)[1].tolist() == [True, False, False, False], "the second token lies on the edge"
    assert len(values[0]) > 4 * LEADERS


@pytest.mark.parametrize("vocabulary", [WORTHWHILE - 1, WORTHWHILE])
def test_the_sort_is_saved_only_where_it_is_dear(vocabulary: int):
    calls = []

    class Counting(TopPLogitsWarper):
        def __call__(self, input_ids, scores):
            calls.append(len(scores))
            return super().__call__(input_ids, scores)

    values = torch.zeros(3, vocabulary)
    values[:2, 0] = 30.0
    ids = torch.zeros(3, 0, dtype=torch.long)
    expected = TopPLogitsWarper(0.9)(ids, values)
    assert top_p(Counting(0.9), ids, values).equal(expected)
    assert calls == ([3] if vocabulary < WORTHWHILE else [1])
