"""The whole loop, not one round: the law of five sampled tokens, through the real Speculator, against enumeration.

A real model with a vocabulary of 5 is small enough to compute the probability of all 3,125 continuations, and fast enough
to draw thousands of them, each under a seed of its own. What a per-round check cannot see, such as noise that comes back
in a later round, a cache that keeps a rejected token or a row that takes its neighbour's draws, shows in this law.

The seeds are fixed, so the tests never flicker. Their power is stated and tested: the same samples refute a law in which
the draft's own law leaks into the output with a total variation of 2 %.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from cover import nightly_but
from scipy import stats
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft import Speculator
from foredraft.drafters.base import Drafter
from foredraft.drafters.draft_model import DraftModel
from foredraft.logits.noise import Noise, Purpose
from foredraft.verification import ratios

VOCAB, COUNT, PROMPT = 5, 5, [1, 2, 4]
ROWS, BATCH, SEED = 8_000, 1000, 3
ALPHA = 1e-4
TEXTS = torch.tensor(list(itertools.product(range(VOCAB), repeat=COUNT)))  # [3125, COUNT], a text's row is its number


@cache
def models() -> tuple[Any, Any]:
    """A target and a draft that agree on every other token."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    target, draft = LlamaForCausalLM(config), LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for ours, theirs in zip(target.parameters(), draft.parameters()):
            if ours.ndim > 1:
                ours.normal_(0, 0.45, generator=generator)
                theirs.copy_(ours + 0.16 * torch.randn(ours.shape, generator=generator))
    return target.eval(), draft.eval()


@cache
def law(index: int) -> Tensor:
    """``[3125]`` float64 probability of each text after the prompt, under the target (0) or the draft (1)."""
    ids = torch.cat([torch.tensor(PROMPT).expand(len(TEXTS), -1), TEXTS], 1)
    with torch.no_grad():
        scores = models()[index](ids).logits[:, len(PROMPT) - 1 : -1].double().log_softmax(-1)
    return scores.gather(2, TEXTS[..., None]).sum((1, 2)).exp()


@dataclass(frozen=True)
class Loop:
    """A configuration of the Speculator with drafts of two tokens."""

    drafter: Callable[[], Drafter | str]
    rule: str = "auto"

    def sample(self, rows: int) -> Sample:
        speculator = Speculator(models()[0], self.drafter(), rule=self.rule, draft_length=2)
        counts, passes, drafted, accepted = torch.zeros(len(TEXTS), dtype=torch.long), 0, 0, 0
        for first in range(0, rows, BATCH):
            output = speculator.generate(
                torch.tensor([PROMPT] * BATCH),
                max_new_tokens=COUNT,
                do_sample=True,
                top_k=0,
                seed=[(SEED, row) for row in range(first, first + BATCH)],
            )
            number = (output.sequences[:, len(PROMPT) :] * VOCAB ** torch.arange(COUNT - 1, -1, -1)).sum(1)
            counts += torch.bincount(number, minlength=len(TEXTS))
            assert output.stats is not None
            passes += output.stats.row_passes
            drafted += output.stats.drafted
            accepted += output.stats.accepted
        return Sample(counts, passes / rows, accepted / drafted)


@dataclass(frozen=True)
class Sample:
    """How often each text came, the rounds that a row took on average, and the share of drafted tokens that was accepted."""

    counts: Tensor
    rounds: float
    acceptance: float

    def p_value(self, expected: Tensor) -> float:
        """That the texts follow ``expected``: the smallest of several chi-square tests, times their number.

        One is of whole texts, the rare ones merged; one is of each pair of places; and one of the event that the draft
        thinks a text more likely than the target does, which is where a loop that leaks its draft goes wrong.
        """
        rare = expected * self.counts.sum() < 10
        whole = torch.where(rare, len(TEXTS), torch.arange(len(TEXTS)))
        pairs = [TEXTS[:, first] * VOCAB + TEXTS[:, second] for first, second in itertools.combinations(range(COUNT), 2)]
        groupings = [whole, (law(1) > law(0)).long(), *pairs]
        return min(1.0, len(groupings) * min(self._grouped(expected, grouping) for grouping in groupings))

    def _grouped(self, expected: Tensor, cells: Tensor) -> float:
        cells = cells.unique(return_inverse=True)[1]
        zeros = torch.zeros(int(cells.max()) + 1, dtype=torch.float64)
        observed = zeros.index_add(0, cells, self.counts.double())
        wanted = zeros.index_add(0, cells, expected)
        return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


LOOPS = {
    "match, deterministic": Loop(lambda: "prompt-lookup"),
    "match, keyed": Loop(lambda: DraftModel(models()[1], siblings="keyed"), "match"),
    "rejection": Loop(lambda: DraftModel(models()[1], siblings="iid"), "rejection"),
}
NOW = {("match, keyed",), ("rejection",)}  # the law of "match, deterministic" is enumerated in test_rules_enumerated.py


@cache
def sampled(name: str) -> Sample:
    return LOOPS[name].sample(ROWS)


@pytest.mark.parametrize("name", nightly_but(NOW, [(name,) for name in LOOPS]))
def test_continuations_follow_the_targets_law(name: str):
    sample = sampled(name)
    assert sample.rounds > 2 and 0.1 < sample.acceptance < 0.9  # several rounds, of every outcome
    assert sample.p_value(law(0)) > ALPHA


@pytest.mark.parametrize("name", nightly_but(NOW, [(name,) for name in LOOPS]))
def test_two_percent_of_the_draft_in_the_output_would_be_found(name: str):
    """The same samples against (1 - ε) p + ε q with ε such that the total variation from p is 2 %."""
    epsilon = 0.02 / float((law(0) - law(1)).abs().sum() / 2)
    assert sampled(name).p_value((1 - epsilon) * law(0) + epsilon * law(1)) < ALPHA


words = Noise.words


def same_in_every_round(noise: Noise, purpose: Purpose, offsets: Any, node: Any = 0) -> Tensor:
    """Keys that leave out the position of the root."""
    return words(Noise(noise.keys, torch.zeros_like(noise.positions)), purpose, offsets, node)


def residual_as_drafted(noise: Noise, purpose: Purpose, offsets: Any, node: Any = 0) -> Tensor:
    """The residual draw takes the noise that chose the first drafted token."""
    return words(noise, Purpose.DRAFT if purpose is Purpose.RESIDUAL else purpose, offsets, node)


def same_in_every_row(noise: Noise, purpose: Purpose, offsets: Any, node: Any = 0) -> Tensor:
    """Rows that share a key: each has the right law, a batch of them repeats itself."""
    return words(Noise(noise.keys - noise.keys + noise.keys[:1], noise.positions), purpose, offsets, node)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("rejection", same_in_every_round),
        ("rejection", residual_as_drafted),
        ("rejection", same_in_every_row),
        ("match, deterministic", same_in_every_round),
    ],
)
def test_noise_that_is_used_twice_is_found(name: str, fault, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ratios, "kernel", None)  # it has the words of its noise from no method
    monkeypatch.setattr(Noise, "words", fault)
    assert LOOPS[name].sample(2 * BATCH).p_value(law(0)) < 1e-9
