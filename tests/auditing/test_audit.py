"""The audit finds faults planted in the real target, drafter or rule, passes what is exact, and tells rounding from a fault."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cover import nightly_but
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import foredraft
from foredraft import ConfigurationError, Speculator, session
from foredraft.auditing import keyed, noise, statistical
from foredraft.auditing.exact import PROMPT, tables
from foredraft.auditing.features import Features
from foredraft.auditing.reference import Reference
from foredraft.auditing.report import AuditReport, KeyedPart, Power, StatisticalPart
from foredraft.auditing.statistical import FRACTIONS
from foredraft.auditing.tally import Design, Tally
from foredraft.backends import eager as execution
from foredraft.drafters.base import DraftRequest
from foredraft.drafters.draft_model import DraftModel
from foredraft.logits import noise as numbers
from foredraft.logits.noise import Noise, Purpose, Randomness, row_key
from foredraft.testing import plain_law
from foredraft.tree import TokenTree
from foredraft.verification import create as create_rule
from foredraft.verification.base import Rule, Verdict
from foredraft.verification.block import Block, chances, survival
from foredraft.verification.multi_candidate import MultiCandidate
from foredraft.verification.ratios import at_node, chain_ratios, residual

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


@pytest.fixture(autouse=True)
def few_continuations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tables, in tests that are not about small faults in the noise."""
    monkeypatch.setattr(noise, "CONTINUATIONS", 512)
    monkeypatch.setattr(noise, "BATCH", 512)


def audited(subject: Speculator, *parts: str, **options: Any) -> AuditReport:
    """With a quarter of the samples that the default bias takes."""
    made = {"prompts": PROMPTS, "parts": parts or None, "max_new_tokens": 24, "bias": 0.02, **SAMPLED}
    return foredraft.audit(subject, **{**made, **options})


# -- what is exact passes -----------------------------------------------------------------------------------------------


EXACT = {
    "rejection": ("rejection", "iid", "chain(3)"),
    "block": ("block", "iid", "chain(3)"),
    "traversal": ("traversal", "without-replacement", "product(2,2)"),
    "multi-candidate": ("multi-candidate", "iid", "product(2,1)"),
}


@pytest.mark.parametrize(
    ("rule", "siblings", "shape", "bias"),
    nightly_but(((*EXACT["block"], 0.02),), [(*each, bias) for each in EXACT.values() for bias in (0.01, 0.02)]),
)
def test_an_exact_configuration_passes_every_part(rule: str, siblings: str, shape: str, bias: float):
    report = audited(speculator(rule, siblings=siblings, shape=shape), bias=bias)
    assert report.verdict == "exact", report.reasons
    assert report.exact is not None and report.exact.error < 1e-12
    assert report.noise is not None and report.noise.passed
    (greedy,) = report.keyed
    assert greedy.accepted > 5 and not greedy.divergences and greedy.tokens == 48
    found = report.statistical
    assert found is not None and found.rounds > 2.5 and 0.1 < found.acceptance < 0.9
    assert {power.direction for power in found.power} == {"the draft's distribution", "the likeliest token", "a higher temperature"}
    for power in found.power:  # the bias is found, by calculation with probability 0.9 at least, and so when it is planted 40 times
        assert power.smallest < bias and power.planted == pytest.approx(bias, rel=0.2) and power.found >= 0.8 * power.trials
    report.raise_for_fault()


@pytest.mark.parametrize(("rule", "siblings", "shape"), nightly_but({EXACT["rejection"], EXACT["traversal"]}, list(EXACT.values())))
def test_an_exact_configuration_is_found_exact_by_enumeration(rule: str, siblings: str, shape: str):
    report = audited(speculator(rule, siblings=siblings, shape=shape), "exact")
    assert report.exact is not None and report.exact.error < 1e-12


@pytest.mark.parametrize(
    ("siblings", "shape"),
    [
        pytest.param("keyed", "chain(3)", marks=pytest.mark.nightly),
        ("keyed", "product(2,2)"),
        ("top-k", "dynamic(depth=3,k=2,total=5)"),
    ],
)
def test_texts_that_are_a_function_of_the_seed_are_compared_token_for_token(siblings: str, shape: str):
    report = audited(speculator("match", siblings=siblings, shape=shape))
    assert report.verdict == "exact", report.reasons
    assert [part.sampled for part in report.keyed] == [False, True]
    assert all(part.accepted > 5 and not part.divergences and part.tokens == 48 for part in report.keyed)
    assert report.statistical is None and "seed" in report.skipped["statistical"]


def test_a_grown_tree_of_one_level_is_enumerated():
    report = audited(speculator("match", siblings="top-k", shape="dynamic(depth=1,k=3,total=3)"), "exact")
    assert report.exact is not None and report.exact.passed and report.exact.shape == "dynamic(depth=1,k=2,total=2)"


def test_a_forced_end_is_the_last_token_of_plain_decoding_too():
    report = audited(speculator("rejection"), "keyed", "statistical", samples=100, forced_eos_token_id=5)
    assert len(report.parts) == 2 and not report.reasons


def test_greedy_decoding_draws_nothing():
    report = foredraft.audit(speculator("rejection"), prompts=PROMPTS, max_new_tokens=24)
    assert report.verdict == "exact" and report.statistical is None and len(report.keyed) == 1


# -- faults in the rule ----------------------------------------------------------------------------------------------------


class StopsAtTheFirstFailure(Block):
    def compare(self, tree: TokenTree, p: Tensor, q: Tensor, noise: Randomness) -> Verdict:
        P = survival(chain_ratios(tree.tokens, p, q))
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


class SharesNoise(Block):
    """The residual is drawn with the noise of the match race, which a keyed draft has used too."""

    proposals = ("keyed",)

    def compare(self, tree: TokenTree, p: Tensor, q: Tensor, noise: Randomness) -> Verdict:
        verdict = super().compare(tree, p, q, noise)
        P, accepted = survival(chain_ratios(tree.tokens, p, q)), verdict.accepted
        left = residual(P.gather(1, accepted[:, None]) * at_node(p, accepted), at_node(q, accepted))
        left = torch.where((accepted < tree.drafted)[:, None], left, at_node(p, accepted))
        return replace(verdict, next_token=noise.race(left[:, None], accepted[:, None])[:, 0])


class KeepsQ(MultiCandidate):
    """Takes draws without replacement for i.i.d. ones: q stays as it was after a rejection."""

    def compare(self, tree: TokenTree, p: Tensor, q: Tensor, noise: Randomness) -> Verdict:
        return super().compare(replace(tree, proposal="iid"), p, q, noise)


@pytest.mark.parametrize(
    ("rule", "siblings", "shape"),
    [
        (StopsAtTheFirstFailure(), "iid", "chain(3)"),
        pytest.param(SharesNoise(), "keyed", "chain(3)", marks=pytest.mark.nightly),
        pytest.param(KeepsQ(), "without-replacement", "product(2,2)", marks=pytest.mark.nightly),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Rule) else "",
)
def test_a_fault_in_the_rule_is_found_by_enumeration_and_by_sampling(rule: Rule, siblings: str, shape: str):
    bias = 0.01 if isinstance(rule, SharesNoise) else 0.02  # what it does is smaller
    report = audited(speculator(rule, siblings=siblings, shape=shape), "exact", "statistical", bias=bias)
    assert report.verdict == "fault"
    assert report.exact is not None and report.exact.error > 1e-3
    assert report.statistical is not None and not report.statistical.passed
    with pytest.raises(foredraft.ForedraftError, match="not exact"):
        report.raise_for_fault()


def test_noise_that_comes_back_in_the_next_round_is_found_by_enumeration():
    """Per token it is below what the statistical part is made for."""
    report = audited(speculator(ReusesNoise()), "exact")
    assert report.verdict == "fault" and report.exact is not None and report.exact.error > 1e-2


def test_noise_that_both_sides_share_is_tested_when_the_statistical_part_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    sound = audited(speculator("match", siblings="keyed"), "statistical", samples=1000)
    assert sound.statistical is not None and sound.statistical.passed
    words = Noise.words

    def twice(self: Noise, purpose: Purpose, offsets: Any, node: Any = 0) -> Tensor:
        """Two neighbouring positions share their noise."""
        return words(Noise(self.keys, torch.zeros_like(self.positions)), purpose, (self.positions[:, None] + offsets) // 2, node)

    monkeypatch.setattr(Noise, "words", twice)
    report = audited(speculator("match", siblings="keyed"), "keyed", "statistical", samples=1000)
    assert all(part.passed for part in report.keyed) and report.statistical is not None and not report.statistical.passed


# -- faults in the noise ---------------------------------------------------------------------------------------------------


def accepts_by_position(patch: pytest.MonkeyPatch) -> None:
    """Whether a node is accepted is keyed by the node's own position, so that the next round draws the same again."""

    def accept(self: Noise, probability: Tensor, node: Any = 0) -> Tensor:
        first = node[:, None] if isinstance(node, Tensor) else node
        places = first + torch.arange(probability.shape[1])[None]
        return numbers._unit(self.words(Purpose.ACCEPT, places).to(torch.int32)).neg_() < probability

    patch.setattr(Noise, "accept", accept)


def races_with_uniforms(patch: pytest.MonkeyPatch) -> None:
    """The match race runs with uniform noise in place of exponential."""
    exponentials = numbers._negative_exponentials
    patch.setattr(numbers, "_negative_exponentials", lambda words, vocab_size: exponentials(words, vocab_size).exp_().sub_(1))


def rows_share(patch: pytest.MonkeyPatch) -> None:
    """The rows of a seed draw the same."""
    patch.setattr(session, "row_key", lambda seed: row_key((seed[0], 0)))


def tokens_share(patch: pytest.MonkeyPatch) -> None:
    """The last tokens of the vocabulary share their noise, so that the likeliest of them is drawn in place of the others."""
    hashes = numbers._token_hashes
    patch.setattr(numbers, "_token_hashes", lambda size, device: hashes(size, device)[torch.arange(size).clamp(max=size - size // 4)])


@pytest.mark.parametrize(
    ("rule", "siblings", "fault", "seen", "count"),
    [
        ("block", "iid", accepts_by_position, "whole continuations", 12_288),
        ("match", "keyed", races_with_uniforms, "whole continuations", 512),
        ("match", "keyed", rows_share, "rows 1 apart", 512),
        ("match", "keyed", tokens_share, "match race", 4096),
    ],
)
def test_a_fault_in_the_noise_is_found_by_counting(
    rule: str, siblings: str, fault: Callable[[pytest.MonkeyPatch], None], seen: str, count: int, monkeypatch: pytest.MonkeyPatch
):
    """The exact part replaces the noise, and the keyed part uses it on both sides: they see nothing, unless rows share."""
    fault(monkeypatch)
    monkeypatch.setattr(noise, "CONTINUATIONS", count)
    report = audited(speculator(rule, siblings=siblings), "exact", "noise", "keyed")
    assert report.exact is not None and report.exact.passed
    assert fault is rows_share or all(part.passed for part in report.keyed)
    assert report.noise is not None and not report.noise.passed and report.verdict == "fault"
    assert any(seen in each.name and each.p_value < 1e-5 for each in report.noise.statistics)


@pytest.mark.parametrize(("shift", "least", "most"), [(0.04, 0.95, 1), (0.03, 0.7, 0.97), (0.02, 0.05, 0.4), (0.0, 0, 0)])
def test_how_large_a_shift_of_whole_continuations_is_found(shift: float, least: float, most: float):
    """As docs/audit.md says."""
    law = plain_law(tables()["dense"][0], PROMPT, noise.TOKENS)
    keys, found, trials, generator = list(law), 0, 60, torch.Generator().manual_seed(0)
    p = torch.tensor([*law.values()], dtype=torch.float64)
    for _ in range(trials):
        change = torch.randn(len(p), generator=generator, dtype=torch.float64) * p
        change -= p * change.sum()
        shifted = (p + change * 2 * shift / change.abs().sum()).clamp(min=0)
        outcomes = [keys[index] for index in torch.multinomial(shifted, 12_288, replacement=True, generator=generator).tolist()]
        found += 7 * noise.chi_square("", outcomes, law).p_value < 1e-3
    assert least <= found / trials <= most


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


class Prunes(DraftModel):
    """Draws a tree and proposes only the leaves that it thinks likely."""

    def draft(self, request: DraftRequest) -> TokenTree:
        tree = super().draft(request)
        if tree.q is None:
            return tree
        valid = torch.ones_like(tree.tokens, dtype=torch.bool) if tree.valid is None else tree.valid.clone()
        for node in range(max(1, tree.nodes - 4), tree.nodes):
            parent, x = int(tree.parents[0, node]), tree.tokens[:, node, None]
            valid[:, node] &= tree.q[:, parent].gather(1, x)[:, 0] > 0.2
        return replace(tree, valid=valid)


@pytest.mark.parametrize(
    ("drafter", "rule", "shape"),
    nightly_but(
        {(AnotherTemperature, "rejection", "chain(3)"), (DropsTheLast, "block", "chain(3)"), (Prunes, "traversal", "product(2,2)")},
        [
            (AnotherTemperature, "rejection", "chain(3)"),
            (AnotherTemperature, "block", "chain(3)"),
            (DropsTheLast, "rejection", "chain(3)"),
            (DropsTheLast, "block", "chain(3)"),
            (Prunes, "traversal", "product(2,2)"),
            (Prunes, "multi-candidate", "product(2,2)"),
        ],
    ),
)
def test_a_fault_in_the_drafter_is_found_by_sampling(drafter: type[DraftModel], rule: str, shape: str):
    report = audited(speculator(rule, drafter(models()[1], siblings="iid"), shape=shape), "keyed", "statistical")
    assert len(report.keyed) == 1 and report.keyed[0].passed  # greedy drafting is sound
    assert report.statistical is not None and not report.statistical.passed
    assert report.verdict == "fault"


# -- faults in the target ---------------------------------------------------------------------------------------------------


def one_short(subject: Speculator) -> None:
    """After a draft was kept, the cache believes to hold one token less than it does."""
    commit = subject.target.cache.commit
    subject.target.cache.commit = lambda path, kept: commit(path, [count - (count > 1) for count in kept])  # type: ignore[method-assign]


def neighbours_row(subject: Speculator) -> None:
    """Compaction keeps the row before the accepted one, where a path leaves the first branch."""
    commit = subject.target.cache.commit
    subject.target.cache.commit = lambda path, kept: commit(None if path is None else torch.where(path > 1, path - 1, path), kept)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("rule", "siblings", "shape", "fault"),
    [
        pytest.param("match", "keyed", "chain(3)", one_short, marks=pytest.mark.nightly),
        ("rejection", "iid", "chain(3)", one_short),
        ("match", "keyed", "product(2,2)", neighbours_row),
        pytest.param("traversal", "without-replacement", "product(2,2)", neighbours_row, marks=pytest.mark.nightly),
    ],
)
def test_a_cache_row_that_is_off_by_one_is_found_token_for_token(rule: str, siblings: str, shape: str, fault: Callable[[Speculator], None]):
    subject = speculator(rule, siblings=siblings, shape=shape)
    fault(subject)
    report = audited(subject, "exact", "keyed")
    assert report.exact is not None and report.exact.passed
    assert not any(part.passed for part in report.keyed) and report.verdict == "fault"


def with_siblings(tree: TokenTree) -> TokenTree:
    """Ancestors of a node, and the siblings of those above it. (Attention in pages reads one slot per position, and so not a sibling of the
    node itself.)"""
    above = tree.ancestors & ~torch.eye(tree.nodes, dtype=torch.bool)
    siblings = tree.parents[:, :, None] == tree.parents[:, None]
    leaky = replace(tree)
    leaky.__dict__["ancestors"] = tree.ancestors | (above.float() @ siblings.float()).bool()
    return leaky


@pytest.mark.parametrize(
    ("rule", "siblings"), [("match", "keyed"), pytest.param("traversal", "without-replacement", marks=pytest.mark.nightly)]
)
def test_a_mask_that_lets_a_node_see_its_parents_sibling_is_found(rule: str, siblings: str, monkeypatch: pytest.MonkeyPatch):
    subject = speculator(rule, siblings=siblings, shape="product(2,2)")
    layout = execution.MaskInputs
    monkeypatch.setattr(execution, "MaskInputs", lambda tree, *where: layout(tree if tree.chain else with_siblings(tree), *where))
    report = audited(subject, "exact", "keyed")
    assert report.exact is not None and report.exact.passed
    assert not any(part.passed for part in report.keyed) and report.verdict == "fault"
    assert max(part.logits / part.limit for part in report.keyed) > 100


# -- rounding is no fault -----------------------------------------------------------------------------------------------------


def reference(**options: Any) -> Reference:
    return Reference.of(models()[0], PROMPTS[0], {"do_sample": True, "top_k": 0, **options})


def plain_and_changed(subject: Reference, change: Callable[[Tensor, int], Tensor]) -> tuple[keyed.Plain, keyed.Speculative]:
    """A plain text, and one whose logits at the third token are changed, which then chooses another token there."""
    plain = keyed.decode(subject, 6, (0, 0), 3, 2)
    logits = plain.logits.clone()
    logits[2] = change(logits[2], plain.tokens[2])
    ids = torch.tensor([[*subject.prompt, *plain.tokens[:2]]])
    return plain, keyed.Speculative([*plain.tokens[:2], subject.choose(ids, logits[2], (0, 0)), 0, 0, 0], logits)


def runner_up(subject: Reference, plain: keyed.Plain) -> tuple[int, float]:
    """The token that comes second at the third place, and by how much."""
    ids = torch.tensor([[*subject.prompt, *plain.tokens[:2]]])
    leads = [subject.lead(ids, plain.logits[2], (0, 0), plain.tokens[2], token) for token in range(VOCAB)]
    leads[plain.tokens[2]] = math.inf
    return leads.index(min(leads)), min(leads)


@pytest.mark.parametrize(("allowed", "cause"), [(1.0, "near tie"), (0.2, "fault")])
def test_a_near_tie_is_told_from_a_fault_by_the_measured_rounding(allowed: float, cause: str):
    """The runner-up wins after a change of the logits; whether that is rounding depends on how large rounding is."""
    subject = reference()
    first = keyed.decode(subject, 6, (0, 0), 3, 2)
    token, lead = runner_up(subject, first)

    def raise_runner_up(logits: Tensor, _: int) -> Tensor:
        return logits + 1.01 * lead * torch.nn.functional.one_hot(torch.tensor(token), VOCAB)

    plain, spoken = plain_and_changed(subject, raise_runner_up)
    assert spoken.tokens[2] == token != plain.tokens[2]
    measured = replace(plain, rounding=torch.full((6,), allowed * lead / 4))
    found = keyed.divergence(subject, 0, 2, spoken, measured, (0, 0))
    assert (found.cause, found.plain, found.speculative) == (cause, plain.tokens[2], token)
    assert found.lead == pytest.approx(lead)


@pytest.mark.parametrize(("allowed", "cause"), [(1e-3, "edge of a filter"), (1e-9, "fault")])
def test_so_is_the_edge_of_a_filter(allowed: float, cause: str):
    """With top_p a little smaller the plain token is ruled out; speculation that still chose it was off by rounding, or wrong."""
    whole, ids, seed = reference(), torch.tensor([PROMPTS[0]]), (0, 0)
    logits = whole.logits(torch.tensor([[0]]))[0, 0]
    p = torch.softmax(logits, -1)
    seed = next((each, 0) for each in range(50) if whole.choose(ids, logits, (each, 0)) != int(p.argmax()))
    token = whole.choose(ids, logits, seed)
    tight = reference(top_p=float(p[p > p[token]].sum()) - 1e-6)
    other = tight.choose(ids, logits, seed)
    assert other != token
    plain = keyed.Plain([other], logits[None], torch.tensor([allowed / 4]))
    found = keyed.divergence(tight, 0, 0, keyed.Speculative([token], logits[None]), plain, seed)
    assert found.cause == cause and math.isinf(found.lead)


def test_a_text_that_ends_elsewhere_is_a_fault():
    plain = keyed.decode(reference(), 4, (0, 0), 3, 2)
    found = keyed.divergence(reference(), 0, 3, keyed.Speculative(plain.tokens[:3], plain.logits), plain, (0, 0))
    assert found.cause == "fault" and found.speculative == -1


# -- the report, and what is refused ----------------------------------------------------------------------------------------


def test_a_lossy_rule_is_called_lossy_and_its_error_is_shown():
    report = foredraft.audit(
        models()[0], DraftModel(models()[1], siblings="top-k"), rule="typical", prompts=PROMPTS, parts=["exact"], **SAMPLED
    )
    assert report.verdict == "lossy" and report.exact is not None and report.exact.error > 0.01
    with pytest.raises(foredraft.ExactnessError, match="lossy"):
        report.raise_for_fault()


def test_a_lenient_rule_says_how_far_from_the_target_each_drafted_token_is():
    """Near 0 that is the draft's own distance from the target, and at 1 it is none."""
    found = {}
    for epsilon in (1.0, 0.6, 1e-6):
        rule, drafter = f"lenient(epsilon={epsilon})", DraftModel(models()[1], siblings="iid")
        parts = ["exact", "statistical"] if epsilon == 0.6 else ["statistical"]
        options = {"prompts": PROMPTS, "parts": parts, "samples": 64, "do_sample": True, "temperature": 0.9, "shape": "chain(3)"}
        report = foredraft.audit(models()[0], drafter, rule=rule, **options)
        assert report.verdict == "lossy" and report.rule == str(create_rule(rule)) and report.statistical is not None
        found[epsilon] = report.statistical.distance
        assert f"by {found[epsilon]:.4f} in total variation at each drafted token" in report.summary
        assert epsilon != 0.6 or f"by {report.exact.error:.4f} over 4 tokens of a small table" in report.summary
    assert found[1.0] == pytest.approx(0, abs=1e-6) and 0.01 < found[0.6] < found[1e-6]
    tokens = torch.tensor([PROMPTS[0]])
    p, q = (torch.softmax(model(tokens).logits[0, 2:].detach() / 0.9, -1) for model in models())
    assert found[1e-6] == pytest.approx(float((p - q).abs().sum(-1).mean()) / 2, rel=0.5)


def test_a_part_that_matters_and_was_left_out_leaves_the_verdict_open():
    report = audited(speculator("block"), "exact")
    assert report.verdict == "inconclusive" and "statistical" in report.summary
    assert "sampling with this model" in report.limits
    assert audited(speculator("match", siblings="keyed"), "exact", "noise", "keyed").verdict == "exact"


def report_of(subject: Speculator, **parts: Any) -> AuditReport:
    """With the parts that are given, made up."""
    made: dict[str, Any] = {"exact": None, "noise": None, "keyed": [], "statistical": None, "skipped": {}, **parts}
    names = {"target": "t", "dtype": "float32", "drafter": "d", "rule": str(subject.rule), "shape": "chain(3)", "proposal": "iid"}
    return AuditReport(**names, sampling={}, lossless=subject.rule.lossless, seed=0, **made)


def test_samples_that_are_too_few_to_show_a_bias_are_said_to_be():
    def found(smallest: float, least: float = 0.02) -> AuditReport:
        power = [Power("one", least, 0.01, 40, 40), Power("other", smallest, 0.01, 0, 40)]
        part = StatisticalPart([], 1.0, 1e-3, 1.0, 90, 4, power, continuations=10, rounds=3.0, acceptance=0.5, impossible=0)
        return report_of(speculator("rejection"), statistical=part)

    assert "its samples could not have shown a bias" in found(1.0).summary
    assert "a total variation of 40.0% per token, or less, would have been found" in found(0.4).summary
    nothing = found(1.0, 1.0)
    assert nothing.verdict == "inconclusive" and "no fault found, but nothing could be tested by its samples" in nothing.summary
    assert found(1.0).verdict == "exact"


def test_a_fault_in_the_greedy_text_is_one_under_a_lossy_rule_too():
    subject = Speculator(models()[0], DraftModel(models()[1], siblings="iid"), rule="lenient", shape="chain(3)", lossless=False)
    sound = KeyedPart(False, 2, 48, 9, [], 1e-6, 1e-6, 1.6e-5, 1.0)
    assert report_of(subject, keyed=[sound]).verdict == "lossy"
    wrong = report_of(subject, keyed=[replace(sound, logits=0.1)])
    assert wrong.verdict == "fault" and "greedy logits are off by 0.1" in wrong.summary


@pytest.mark.parametrize(("wanted", "batch"), [(160, 256), (5, 256), (1000, 10), (1000, 1000)])
def test_every_prompt_has_its_turn(wanted: int, batch: int, monkeypatch: pytest.MonkeyPatch):
    turns: list[tuple[Any, int]] = []

    def sample(_: Any, reference: Any, length: int, seeds: Any, sums: Any, arguments: Any) -> None:
        turns.append((reference, len(seeds)))
        sums.continuations += len(seeds)

    monkeypatch.setattr(statistical, "sample", sample)
    monkeypatch.setattr(statistical, "measure", lambda *given: None)
    references: Any = list("abcde")
    options: dict[str, Any] = {"length": 6, "batch_size": batch, "seed": 0, "design": Design(1e-3, 0.01), "arguments": {}}
    found = statistical.check(speculator("rejection"), references, samples=wanted, **options)
    assert {reference for reference, _ in turns} == {*references} and max(count for _, count in turns) <= batch
    assert found.continuations == sum(count for _, count in turns) == wanted


def test_seeds_of_any_size_draw():
    """Those of rows are hashed; torch's own generators take 64 bits."""
    seed, cpu = 10**20, torch.device("cpu")
    Tally(Features(3, False, cpu), 2, bias=0.01, seed=seed)
    assert all(each.p_value > 1e-6 for each in noise.over_the_vocabulary(8, 64, seed, cpu))


def test_a_draft_that_knows_no_token_leaves_the_tests_as_they_are():
    """Its q is then NaN, which would spread to every sum."""
    target, draft = models()
    subject = Reference(target, PROMPTS[0], PROMPTS[0], lambda ids, scores: scores.masked_fill(scores < -1e4, -math.inf), True, frozenset())
    tally, tokens = Tally(Features(VOCAB, True, torch.device("cpu")), 2, bias=0.01, seed=0), torch.tensor([[3, 4], [5, 6]])
    silent: Any = lambda **given: SimpleNamespace(logits=draft(**given).logits - 1e5)  # noqa: E731
    silent.forward, silent.device, silent.config = draft.forward, draft.device, draft.config
    batch = statistical.Batch(subject, tokens, torch.ones(2, 2, dtype=torch.bool), torch.zeros(2, 2, dtype=torch.bool))
    statistical.measure(batch, silent, tally, statistical.Sums())
    assert tally.tokens == 4 and bool(tally.total.isfinite().all()) and bool(tally.distance.isfinite().all())


def test_the_significance_is_spent_once_over_all_tests_and_looks():
    design, tests = Design(1e-3, 0.01), 27
    assert sum(design.bound(look, tests) * tests for look in range(len(design.shares))) == pytest.approx(1e-3)
    assert len(design.shares) == len(FRACTIONS)
    assert design.tokens(tests) == pytest.approx(75_000, rel=0.02)  # (z of the bound + z of the power)^2 / (4 * 0.01^2)


def test_a_report_is_plain_data():
    report = audited(speculator("rejection"), samples=300, batch_size=100)
    again = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert again["verdict"] == report.verdict and again["exact"]["passed"] is True
    assert again["statistical"]["power"][0]["smallest"] > 0.01  # 300 texts are too few, and the report says so


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": ["keyed", "guess"]}, "exact, noise, keyed, statistical"),
        ({"significance": 0}, "between 0 and 0.5"),
        ({"seed": 1, "max_length": 30}, "max_length"),
        ({"prompts": None}, "names no tokenizer; pass Speculator"),
        ({"prompts": [[]]}, "empty"),
        ({"prompts": []}, "at least one"),
        ({"rule": "block"}, "already has a drafter"),
        ({"samples": 0}, "samples"),
        ({"samples": "many"}, "samples must be a whole number"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate is not supported"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"stopping_criteria": [lambda ids, scores: False]}, "stopping criteria"),
    ],
)
def test_what_can_not_work_is_refused(options: dict, message: str):
    with pytest.raises(ConfigurationError, match=message):
        foredraft.audit(speculator("rejection"), **{"prompts": PROMPTS, **options})
