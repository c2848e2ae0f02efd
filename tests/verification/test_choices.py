"""Greedy choices by the kernels, which are NumPy's."""

import pytest
import torch
from kernel_cases import needs_kernels

from foredraft.backends import native
from foredraft.verification import match
from foredraft.verification.match import Greedy, by_numpy

NODES = [(row, node) for row in range(3) for node in range(4)]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 11, 16, 63, 64, 65, 90, 127, 1000])
def test_the_first_largest_finite_score_is_chosen(dtype, width):
    native.library(dtype)
    scores = torch.randn(3, 4, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    scores[0, 1] = scores[0, 1].roll(width // 2) * 0  # all are equal
    scores[1, 2, width // 2 :] = scores[1, 2].max()
    scores[2, 0] = -float("inf")
    scores[2, 1, -1] = scores[2, 2, 0] = float("nan")
    scores[2, 3, width // 2] = float("inf")
    found = match.kernels[dtype](scores, NODES)
    assert found == by_numpy(scores, NODES)
    assert found[1] == 0 and found[8:] == [-1] * 4
    for part in (scores[:, 1:], scores.transpose(0, 1), scores.repeat(1, 1, 2)[..., ::2]):
        some = [(row, node) for row in range(part.shape[0]) for node in range(part.shape[1])]
        assert match.kernels[dtype](part, some) == by_numpy(part, some)


@needs_kernels
def test_scores_of_other_dtypes_are_left_to_numpy():
    native.library(torch.bfloat16)
    scores = torch.tensor([[[0.0, 2.0, 1.0]], [[3.0, 2.0, 1.0]]], dtype=torch.float64)
    assert Greedy(scores).at([[0], [0]], 0) == [[1], [0]]
    assert Greedy(scores).at([[0], []], 0) == [[1], []]
    assert Greedy(scores.where(scores > 0, torch.nan)).at([[0], [0]], 0) is None
