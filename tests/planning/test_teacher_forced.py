"""Rounds that texts would take, against rounds drawn one by one; and intervals over texts that cover what they should."""

from __future__ import annotations

import numpy as np
import pytest

from foredraft.planning.teacher_forced import Share, expected_rounds


def drawn(chances: np.ndarray, length: int, random: np.random.Generator) -> int:
    """Rounds of one text, token by token, as speculative decoding has them."""
    rounds = place = 0
    while place < len(chances):
        rounds += 1
        accepted = 0
        while accepted < length and place + accepted < len(chances) and random.random() < chances[place + accepted]:
            accepted += 1
        place += accepted + 1
    return rounds


def test_rounds_are_those_of_speculative_decoding():
    random = np.random.default_rng(1)
    texts = [random.random(9), random.random(4), np.array([0.3])]
    found = expected_rounds(texts, 4)
    assert found.shape == (3, 4)
    for line, text in zip(found, texts):
        for length, expected in enumerate(line, 1):
            counts = [drawn(text, length, random) for _ in range(4000)]
            assert expected == pytest.approx(np.mean(counts), abs=5 * np.std(counts) / np.sqrt(len(counts)) + 1e-9)


def test_rounds_of_a_constant_chance_are_the_papers():
    """Tokens per pass (1 - α^(γ + 1)) / (1 - α): Leviathan et al. 2023, equation 1."""
    for alpha in (0.3, 0.8):
        tokens = 4000
        found = expected_rounds([np.full(tokens, alpha)], 5)[0]
        formula = [(1 - alpha ** (length + 1)) / (1 - alpha) for length in range(1, 6)]
        assert tokens / found == pytest.approx(np.array(formula), rel=2e-3)


def test_nothing_and_everything_accepted():
    found = expected_rounds([np.zeros(12), np.ones(12)], 3)
    assert found.tolist() == [[12] * 3, [6, 4, 3]]


def test_a_share_is_that_of_all_tokens_and_its_interval_covers_it_as_often_as_it_says():
    """Texts of unequal lengths whose rates differ; an interval over tokens would cover far less often."""
    random = np.random.default_rng(2)
    for texts in (3, 30):
        covered = covered_by_tokens = 0
        for _ in range(800):
            wholes = random.integers(50, 250, texts)
            parts = random.binomial(wholes, random.beta(6, 4, texts))
            share = Share.of(parts, wholes, most=1.0)
            assert share.value == pytest.approx(parts.sum() / wholes.sum()) and share.low is not None and share.high is not None
            covered += share.low <= 0.6 <= share.high
            covered_by_tokens += abs(share.value - 0.6) < 1.96 * np.sqrt(0.24 / wholes.sum())
        assert 0.92 < covered / 800 < 0.98 and covered_by_tokens / 800 < 0.6


def test_one_text_has_no_interval_and_one_without_tokens_does_not_count():
    assert Share.of([3.0], [4.0]) == Share.of([3.0, 0.0], [4.0, 0.0]) == Share(0.75, None, None)
    assert Share.of([3.0, 4.0], [4.0, 4.0], most=1.0).high == 1.0
    assert Share(0.5, 0.4, 0.6).times(2.0) == Share(1.0, 0.8, 1.2) and Share(0.5, None, None).times(2.0) == Share(1.0, None, None)
