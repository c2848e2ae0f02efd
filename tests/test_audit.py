"""The audit finds faults planted in the real target, drafter or rule, passes what is exact, and tells rounding from a fault."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import foretoken
from foretoken import ConfigurationError, Speculator
from foretoken.auditing import keyed
from foretoken.auditing.reference import Reference
from foretoken.auditing.report import AuditReport
from foretoken.drafters.base import DraftRequest
from foretoken.drafters.draft_model import DraftModel
from foretoken.sampling import Purpose, Randomness
from foretoken.tree import TokenTree
from foretoken.verification.base import Verdict
from foretoken.verification.block import Block, chances, survival
from foretoken.verification.ratios import at_node, chain_ratios, residual
from foretoken.verification.rejection import Rejection

VOCAB = 24
PROMPTS = [[1, 2, 4, 7, 9, 3, 3, 8], [3, 5, 8]]
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 0, "top_p": 0.95}


@cache
def models() -> tuple[Any, Any]:
    """A target and a draft that agree on some tokens."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    target, draft = LlamaForCausalLM(config), LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for ours, theirs in zip(target.parameters(), draft.parameters()):
            if ours.ndim > 1:
                ours.normal_(0, 0.35, generator=generator)
                theirs.copy_(ours + 0.12 * torch.randn(ours.shape, generator=generator))
    return target.eval(), draft.eval()


def speculator(rule: Any, drafter: DraftModel | None = None, *, shape: str = "chain(3)", siblings: str = "iid") -> Speculator:
    return Speculator(models()[0], drafter or DraftModel(models()[1], siblings=siblings), rule=rule, shape=shape)


def audited(subject: Speculator, *parts: str, **options: Any) -> AuditReport:
    return foretoken.audit(subject, **{"prompts": PROMPTS, "parts": parts or None, "max_new_tokens": 24, **SAMPLED, **options})


# -- what is exact passes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "siblings"), [("rejection", "iid"), ("block", "iid"), ("traversal", "iid"), ("match", "keyed")]
)
def test_an_exact_configuration_passes_every_part(rule: str, siblings: str):
    report = audited(speculator(rule, siblings=siblings))
    assert report.verdict == "exact", report.reasons
    assert report.exact is not None and report.exact.error < 1e-12 and report.exact.cut
    assert [part.sampled for part in report.keyed] == ([False] if rule != "match" else [False, True])
    assert all(part.accepted > 5 and not part.divergences and part.tokens == 48 for part in report.keyed)
    if rule == "match":
        assert report.statistical is None and "seed" in report.skipped["statistical"]
        return
    found = report.statistical
    assert found is not None and found.rounds > 2.5 and 0.1 < found.acceptance < 0.9
    for power in found.power:  # a bias of 1 % is found, by calculation and when it is planted
        assert power.smallest < 0.01 and power.planted == pytest.approx(0.01, abs=2e-3) and power.found >= 0.9 * power.trials
    report.raise_for_fault()


def test_greedy_decoding_draws_nothing():
    report = foretoken.audit(speculator("rejection"), prompts=PROMPTS, max_new_tokens=24)
    assert report.verdict == "exact" and report.statistical is None and len(report.keyed) == 1


# -- faults in the rule ----------------------------------------------------------------------------------------------------


class StopsAtTheFirstFailure(Block):
    def compare(self, tree: TokenTree, p: Tensor, q: Tensor, noise: Randomness) -> Verdict:
        P = survival(chain_ratios(tree, p, q))
        drafted = tree.drafted[:, None]
        index = torch.arange(1, tree.nodes, device=p.device)[None]
        passes = noise.accept(torch.where(index <= drafted, chances(P, p, q, drafted), 0))
        accepted = passes.cumprod(1).sum(1)
        left = residual(P.gather(1, accepted[:, None]) * at_node(p, accepted), at_node(q, accepted))
        left = torch.where(accepted[:, None] < drafted, left, at_node(p, accepted))
        return Verdict(tree.depths, accepted, noise.draw(left, Purpose.RESIDUAL))


class NoiseOfTheMatchRace:
    """Acceptance decided by the noise of the match race, which is keyed by the position alone and so comes back in the next round."""

    def __init__(self, noise: Randomness):
        self.noise = noise

    def accept(self, probability: Tensor, node: int = 1) -> Tensor:
        coin = torch.stack([probability.clamp(0, 1), 1 - probability.clamp(0, 1)], -1)
        return self.noise.race(coin, torch.arange(probability.shape[1])[None].expand(probability.shape)) == 0

    def draw(self, weights: Tensor, purpose: Purpose, node: int = 0) -> Tensor:
        return self.noise.draw(weights, purpose, node)


class ReusesNoise(Block):
    def compare(self, tree: TokenTree, p: Tensor, q: Tensor, noise: Randomness) -> Verdict:
        return super().compare(tree, p, q, NoiseOfTheMatchRace(noise))  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", [StopsAtTheFirstFailure(), ReusesNoise()], ids=lambda rule: type(rule).__name__)
def test_a_fault_in_the_rule_is_found_by_enumeration_and_by_sampling(rule: Block):
    report = audited(speculator(rule), "exact", "statistical")
    assert report.verdict == "fault"
    assert report.exact is not None and report.exact.error > 1e-3
    assert report.statistical is not None and not report.statistical.passed
    with pytest.raises(foretoken.ForetokenError, match="not exact"):
        report.raise_for_fault()


# -- faults in the drafter -------------------------------------------------------------------------------------------------


class AnotherTemperature(DraftModel):
    """Draws at one temperature and reports the q of another."""

    def draft(self, request: DraftRequest) -> TokenTree:
        tree = super().draft(request)
        return tree if tree.q is None else replace(tree, q=torch.softmax(tree.q.log() / 0.8, -1))


class DropsTheLast(DraftModel):
    """Stops where it is unsure, and leaves out the token that it was unsure of."""

    def draft(self, request: DraftRequest) -> TokenTree:
        tree = super().draft(request)
        if tree.q is None:
            return tree
        sure = tree.q.gather(2, tree.tokens[:, 1:, None])[..., 0] > 0.2
        kept = torch.cat([torch.ones_like(sure[:, :1]), sure.cumprod(1).bool()], 1)
        return replace(tree, valid=kept if tree.valid is None else kept & tree.valid)


@pytest.mark.parametrize("drafter", [AnotherTemperature, DropsTheLast])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_fault_in_the_drafter_is_found_by_sampling(drafter: type[DraftModel], rule: str):
    report = audited(speculator(rule, drafter(models()[1], siblings="iid")))
    assert report.exact is not None and report.exact.passed and all(part.passed for part in report.keyed)  # these can not see it
    assert report.statistical is not None and not report.statistical.passed
    assert report.verdict == "fault"


# -- faults in the target ---------------------------------------------------------------------------------------------------


def off_by_one(subject: Speculator) -> None:
    """After a draft was kept, the cache believes to hold one token less than it does."""
    commit = subject.target.cache.commit
    subject.target.cache.commit = lambda path, kept: commit(path, [count - (count > 1) for count in kept])  # type: ignore[method-assign]


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_a_fault_in_the_target_is_found_token_for_token(rule: str):
    subject = speculator(rule, siblings="keyed" if rule == "match" else "iid")
    off_by_one(subject)
    report = audited(subject, "exact", "keyed")
    assert report.exact is not None and report.exact.passed
    assert not any(part.passed for part in report.keyed) and report.verdict == "fault"
