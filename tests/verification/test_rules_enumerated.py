"""Exactness of the verification rules, computed: the law of whole continuations, several rounds deep, against the target's.

The real Session, rules and draws run on probability tables with every outcome of every draw enumerated. Draws keep their
keys, so noise that is shared by mistake, within a round or between two, changes the law here too. Each property is paired
with a fault of the kind seen in practice, which must move the law by a stated amount: a test that cannot fail shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from foredraft.admission import Admission
from foredraft.drafters.base import Drafter, DraftRequest
from foredraft.drafters.none import NoDrafter
from foredraft.logits.noise import Purpose, Randomness
from foredraft.planning import FixedPlanner
from foredraft.rows import RowParameters, SessionRow
from foredraft.session import Session
from foredraft.shapes import TreeShape
from foredraft.testing import (
    Enumeration,
    Law,
    ProbabilityTable,
    ScriptedDrafter,
    TableTarget,
    World,
    continuation_law,
    continuations,
    distance,
    enumerate_law,
    plain_law,
)
from foredraft.tree import Proposal, TokenTree
from foredraft.verification import Rule, create, names, ratios
from foredraft.verification import match as match_module

EXACT = 1e-9
PROMPT = [0, 1]


def tempered(table: ProbabilityTable, temperature: float) -> ProbabilityTable:
    return ProbabilityTable(
        lambda context: torch.softmax(table(context).log() / temperature, 0).tolist(), table.vocab_size, order=table.order
    )


def without_one(table: ProbabilityTable) -> ProbabilityTable:
    """``table`` with probability 0 for one token of each context."""

    def zeroed(context: tuple[int, ...]) -> list[float]:
        weights = table(context)
        weights[sum(context) % table.vocab_size] = 0
        return (weights / weights.sum()).tolist()

    return ProbabilityTable(zeroed, table.vocab_size, order=table.order)


P = ProbabilityTable.random(3, seed=1)
Q = ProbabilityTable.random(3, seed=2)


@dataclass(frozen=True)
class Case:
    """A configuration of the loop; ``count`` new tokens are more than one round can yield, which is three by default."""

    rule: str
    q: ProbabilityTable | None = None  # None: nothing is drafted
    proposal: Proposal = "iid"
    p: ProbabilityTable = P
    shape: str = "chain(2)"
    count: int = 4
    depth: int | None = None
    grow: Callable[[Sequence[int]], bool] = lambda text: True

    def drafter(self) -> Drafter:
        return NoDrafter() if self.q is None else ScriptedDrafter(self.q, proposal=self.proposal, depth=self.depth, grow=self.grow)

    def law(self, *, drafter: Drafter | None = None, rule: Rule | None = None, randomness: Callable[..., Randomness] | None = None) -> Law:
        """The law of the continuation; ``randomness(enumeration, keys, positions)`` replaces the plain enumeration."""

        def session(enumeration: Callable[[Tensor, Tensor], Randomness]) -> Session:
            return Session(
                TableTarget(self.p),
                drafter or self.drafter(),
                rule or create(self.rule),
                proposal=self.proposal,
                planner=FixedPlanner(self.shape),
                randomness=enumeration if randomness is None else lambda *state: randomness(enumeration, *state),
            )

        return continuation_law(session, PROMPT, self.count)

    def error(self, **fault) -> float:
        return distance(self.law(**fault), plain_law(self.p, PROMPT, self.count))


def on_an_even_sum(text: Sequence[int]) -> bool:
    """A depth that depends on the committed text and on the drafted tokens."""
    return sum(text) % 2 == 0


LOSSLESS = [name for name in names() if create(name).lossless]
ON_TREES = [
    (rule, proposal) for rule in LOSSLESS for proposal in create(rule).proposals if not create(rule).chains_only and proposal != "mixed"
]


def on_trees(rule: str, proposal: Proposal) -> dict[str, Case]:
    """Cases of one rule on one kind of proposal. Independent draws have so many outcomes that deep trees get two tokens only."""
    few = proposal in ("deterministic", "keyed") or (proposal == "without-replacement" and rule != "match")
    count, q, p = (4, Q, P) if few else (4, ProbabilityTable.random(2, seed=2), ProbabilityTable.random(2, seed=1))
    zeros = {"q": without_one(Q), "p": without_one(tempered(P, 2.0))}
    return {
        "pairs": Case(rule, Q, proposal, shape="product(2)", count=3),
        "pairs of chains": Case(rule, q, proposal, p=p, shape="product(2,1)", count=count),
        "a ragged tree": Case(rule, q, proposal, p=p, shape="paths(0,1,1.0)", count=3 if proposal == "without-replacement" else count),
        "pairs below a token, zeros in both": Case(rule, proposal=proposal, **zeros, shape="product(1,2)", count=count if few else 3),
        "a chain": Case(rule, q, proposal, p=p, count=count),
        "three siblings": Case(rule, Q, proposal, shape="product(3)", count=3),
    }


TREES = {
    **{f"{rule}, {proposal}, {name}": case for rule, proposal in ON_TREES for name, case in on_trees(rule, proposal).items()},
    **{
        f"match, {proposal}, {shape}": Case("match", Q, proposal, shape=shape, count=4)
        for proposal in ("deterministic", "keyed")
        for shape in ("dynamic(depth=2,k=2,total=3)", "opt(total=4,depth=2,delta=0.1)")
    },
}

CASES = {
    **TREES,
    **{
        f"{rule}{name}": case
        for rule in ("block", "multi-candidate", "k-seq", "traversal")
        for name, case in {
            "": Case(rule, Q, count=4),
            ", zeros in both": Case(rule, without_one(Q), p=without_one(tempered(P, 2.0)), count=4),
            ", ragged depth": Case(rule, Q, grow=on_an_even_sum, shape="chain(3)", count=4),
            ", no drafter": Case(rule, count=3),
        }.items()
    },
    "rejection": Case("rejection", Q),
    "rejection, one draft": Case("rejection", Q, shape="chain(1)"),
    "rejection, longer than the rest": Case("rejection", Q, shape="chain(4)", count=4),
    "rejection, four tokens": Case("rejection", ProbabilityTable.random(4, seed=4), p=ProbabilityTable.random(4, seed=3), count=4),
    "rejection, q = p": Case("rejection", P),
    "rejection, zeros in q": Case("rejection", without_one(Q)),
    "rejection, zeros in p": Case("rejection", Q, p=without_one(P)),
    "rejection, zeros in both": Case("rejection", without_one(Q), p=without_one(tempered(P, 2.0))),
    "rejection, ragged depth": Case("rejection", Q, grow=on_an_even_sum, shape="chain(3)", count=4),
    "rejection, nothing drafted": Case("rejection", Q, depth=0),
    "rejection, no drafter": Case("rejection"),
    "match, no drafter": Case("match"),
    "match, deterministic": Case("match", Q, "deterministic", shape="chain(3)"),
    "match, deterministic, ragged depth": Case("match", Q, "deterministic", shape="chain(3)", grow=on_an_even_sum),
    "match, iid": Case("match", Q, "iid", count=3),
    "match, keyed": Case("match", Q, "keyed"),
    "match, keyed, q = p": Case("match", P, "keyed"),
    "match, keyed, zeros in both": Case("match", without_one(Q), "keyed", p=without_one(P), grow=on_an_even_sum, shape="chain(3)"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_law_of_continuations_is_the_targets(case: Case):
    law = case.law()
    assert sum(law.values()) == pytest.approx(1, abs=EXACT)
    assert distance(law, plain_law(case.p, PROMPT, case.count)) < EXACT


@pytest.mark.parametrize("name", ["rejection", "block", "traversal, iid, a chain", "match, iid"])
def test_so_is_that_of_rows_that_are_set_aside(name: str, monkeypatch: pytest.MonkeyPatch):
    """Each row once, for want of memory: it is read again from its tokens, and goes on."""
    gone: list[SessionRow] = []

    def excess(self: Admission, rows: Sequence[SessionRow]) -> list[SessionRow]:
        found = [row for row in rows if len(row.ids) > len(PROMPT) + 1 and not any(row is each for each in gone)]
        gone[:] = found or gone  # one row lives at a time
        return found

    monkeypatch.setattr(Admission, "excess", excess)
    assert CASES[name].error() < EXACT and gone


@pytest.mark.parametrize("name", ["match, no drafter", "match, deterministic, ragged depth", "match, keyed, zeros in both"])
def test_so_is_that_of_races_that_stop_where_the_drafts_end(name: str, monkeypatch: pytest.MonkeyPatch):
    """Over a large vocabulary the match rule chooses only as far as some draft survives; here over a small one."""
    monkeypatch.setattr(match_module, "ALONE", 1)
    assert CASES[name].error() < EXACT


def test_a_keyed_draft_that_equals_the_target_is_accepted_whole():
    """Only draft and verifier that share each position's noise agree always; the law alone would not tell."""
    enumeration = Enumeration([World({})])
    target, drafter = TableTarget(P), ScriptedDrafter(P, proposal="keyed")
    session = Session(target, drafter, create("match"), proposal="keyed", planner=FixedPlanner("chain(3)"), randomness=enumeration)
    continuations(session, [PROMPT], [RowParameters(max_new_tokens=12, do_sample=True)])
    assert session.stats.accepted == session.stats.drafted > 6
    for seed in range(20):
        session = Session(target, drafter, create("match"), proposal="keyed", planner=FixedPlanner("chain(3)"))
        continuations(session, [PROMPT], [RowParameters(max_new_tokens=12, do_sample=True, seed=(seed, 0))])
        assert session.stats.accepted == session.stats.drafted > 6


def test_every_lossless_rule_has_a_case_for_all_that_it_accepts():
    assert {case.rule for case in CASES.values()} == set(LOSSLESS)
    for name in LOSSLESS:
        cases = [case for case in CASES.values() if case.rule == name and case.q is not None]
        assert {case.proposal for case in cases} >= set(create(name).proposals) - {"mixed"}, name  # mixed: tests/test_tree_rules.py
        assert create(name).chains_only or any(not TreeShape.parse(case.shape).is_chain for case in cases), name


# -- faults that must be seen --------------------------------------------------------------------------------------------


BASE = Case("rejection", Q, count=4)
RAGGED = Case("rejection", Q, count=4, grow=on_an_even_sum)


@dataclass(eq=False)
class Tampering(Drafter):
    """Another drafter, whose trees are changed on their way."""

    drafter: Drafter
    change: Callable[[TokenTree], TokenTree]

    name = "tampering"

    def draft(self, request: DraftRequest) -> TokenTree:
        return self.change(self.drafter.draft(request))


def drop_the_last_when(unwanted: int) -> Callable[[TokenTree], TokenTree]:
    """Takes the last drafted token back if it is ``unwanted``, as a drafter does that stops at a token and leaves it out."""

    def change(tree: TokenTree) -> TokenTree:
        if tree.nodes == 1:
            return tree
        valid = torch.ones_like(tree.tokens, dtype=torch.bool) if tree.valid is None else tree.valid.clone()
        last = valid.sum(1, keepdim=True) - 1
        dropped = (tree.tokens.gather(1, last) == unwanted) & (last > 0)
        return replace(tree, valid=valid.scatter(1, last, ~dropped))

    return change


@pytest.mark.parametrize(("temperature", "amount"), [(0.5, 0.1), (1.1, 0.01), (2.0, 0.05)])
def test_a_q_that_was_not_drawn_from_is_seen(temperature: float, amount: float):
    assert BASE.q is not None

    class Misreporting(ScriptedDrafter):
        def draft(self, request: DraftRequest) -> TokenTree:
            tree = super().draft(request)
            return tree if tree.q is None else replace(tree, q=torch.softmax(tree.q.log() / temperature, -1).nan_to_num())

    assert BASE.error(drafter=Misreporting(BASE.q)) > amount


def test_a_drawn_token_that_is_dropped_is_seen_by_rejection_and_harmless_to_match():
    assert BASE.error(drafter=Tampering(BASE.drafter(), drop_the_last_when(2))) > 0.05
    match = replace(BASE, rule="match")
    assert match.error(drafter=Tampering(match.drafter(), drop_the_last_when(2))) < EXACT


def residual_is_p(p: Tensor, q: Tensor, accepted: Tensor, drafted: Tensor, scale: None) -> Tensor:
    return p[torch.arange(len(p)), accepted]


def residual_of_the_root(p: Tensor, q: Tensor, accepted: Tensor, drafted: Tensor, scale: None) -> Tensor:
    return weights_after(p, q, torch.zeros_like(accepted), drafted)


def residual_one_too_deep(p: Tensor, q: Tensor, accepted: Tensor, drafted: Tensor, scale: None) -> Tensor:
    return weights_after(p, q, (accepted + 1).clamp(max=p.shape[1] - 1), drafted)


def residual_without_bonus(p: Tensor, q: Tensor, accepted: Tensor, drafted: Tensor, scale: None) -> Tensor:
    """[p - q]+ even where the chain ended without a rejection."""
    return weights_after(p, q, accepted, torch.full_like(drafted, p.shape[1] - 1))


weights_after = ratios.after


@pytest.mark.parametrize(
    ("fault", "case", "amount"),
    [
        (residual_is_p, BASE, 0.1),
        (residual_of_the_root, BASE, 0.1),
        (residual_one_too_deep, BASE, 0.1),
        (residual_without_bonus, RAGGED, 0.1),
    ],
)
def test_a_wrong_residual_is_seen(monkeypatch: pytest.MonkeyPatch, fault, case: Case, amount: float):
    monkeypatch.setattr(ratios, "after", fault)
    assert case.error() > amount


@dataclass
class Rekeyed:
    """Randomness that mistakes one key for another."""

    noise: Randomness
    purposes: dict[Purpose, Purpose]

    def race(self, p: Tensor, depths: Tensor) -> Tensor:
        return self.noise.race(p, depths)

    def accept(self, probability: Tensor, node: int = 0) -> Tensor:
        return self.noise.accept(probability, node)

    def draw(self, weights: Tensor, purpose: Purpose, node: int = 0) -> Tensor:
        return self.noise.draw(weights, self.purposes.get(purpose, purpose), node)


def residual_with_the_drafts_noise(enumeration: Enumeration, keys: Tensor, positions: Tensor) -> Randomness:
    return Rekeyed(enumeration(keys, positions), {Purpose.RESIDUAL: Purpose.DRAFT})


def the_same_noise_every_round(enumeration: Enumeration, keys: Tensor, positions: Tensor) -> Randomness:
    return enumeration(keys, torch.zeros_like(positions))


def noise_of_the_root_before(enumeration: Enumeration, keys: Tensor, positions: Tensor) -> Randomness:
    """Off by one wherever a round follows one that committed a single token: both then have the same noise."""
    return enumeration(keys, positions - positions % 2)


@dataclass
class ByPosition:
    """Randomness that keys what is accepted by the position of the token, not by the round and a node."""

    enumeration: Enumeration
    keys: Tensor
    positions: Tensor

    def __getattr__(self, name: str):
        return getattr(self.enumeration(self.keys, self.positions), name)

    def accept(self, probability: Tensor, node: int = 0) -> Tensor:
        passes = [
            self.enumeration(self.keys, self.positions + node + index).accept(each[:, None])
            for index, each in enumerate(probability.unbind(1))
        ]
        return torch.cat(passes, 1)


def what_lies_beyond_the_path_again(enumeration: Enumeration, keys: Tensor, positions: Tensor) -> Randomness:
    """Block and traversal use up noise beyond what they keep; keyed by position, the next round meets it again."""
    return ByPosition(enumeration, keys, positions)


def the_match_races_noise(enumeration: Enumeration, keys: Tensor, positions: Tensor) -> Randomness:
    """The token after the path by the race of the root's own next position, which the next round may hold as well."""
    return Rekeyed(enumeration(keys, positions), {Purpose.RESIDUAL: Purpose.MATCH, Purpose.DRAFT: Purpose.MATCH})


def tree_of(rule: str, proposal: Proposal = "iid") -> Case:
    return on_trees(rule, proposal)["pairs of chains"]


@pytest.mark.parametrize(
    ("fault", "case", "amount"),
    [
        (what_lies_beyond_the_path_again, Case("block", Q, shape="chain(3)", count=4), 0.005),
        (what_lies_beyond_the_path_again, Case("traversal", Q, shape="chain(3)", count=4), 0.005),
        (the_match_races_noise, Case("block", Q, count=4), 0.05),
        (the_same_noise_every_round, Case("block", Q, count=4), 0.05),
        (the_same_noise_every_round, tree_of("traversal"), 0.05),
        (the_same_noise_every_round, tree_of("traversal", "without-replacement"), 0.05),
        (the_same_noise_every_round, tree_of("multi-candidate"), 0.05),
        (the_same_noise_every_round, tree_of("k-seq"), 0.05),
        (residual_with_the_drafts_noise, BASE, 0.1),
        (the_same_noise_every_round, BASE, 0.1),
        (noise_of_the_root_before, BASE, 0.05),
        (the_same_noise_every_round, Case("match", count=4), 0.1),
        (the_same_noise_every_round, Case("match", Q, "deterministic", count=4), 0.1),
    ],
)
def test_noise_that_is_used_twice_is_seen(fault, case: Case, amount: float):
    assert case.error(randomness=fault) > amount


# -- several rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "proposal", "draft_length"), [("rejection", "iid", 1), ("match", "keyed", 1), ("match", "deterministic", 2)]
)
def test_rows_of_a_batch_are_independent(rule: str, proposal: Proposal, draft_length: int):
    """The joint law of two rows with seeds of their own is the product of their laws; with one seed for both it is not.

    The rows have prompts and limits of their own: one drafts less, and leaves earlier, than the other.
    """
    prompts, counts = [[0, 1], [2]], [2, 3]

    def joint(seed_of: Callable[[tuple[int, int]], tuple[int, int]]) -> Law:
        def run(enumeration: Enumeration) -> list[tuple[int, ...]]:
            worlds = len(enumeration.worlds)
            drafter = ScriptedDrafter(Q, proposal=proposal)
            session = Session(
                TableTarget(P),
                drafter,
                create(rule),
                proposal=proposal,
                planner=FixedPlanner(f"chain({draft_length})"),
                randomness=enumeration,
            )
            parameters = [
                RowParameters(max_new_tokens=count, do_sample=True, seed=seed_of(seed))
                for seed, count in zip(enumeration.seeds, counts * worlds)
            ]
            texts = continuations(session, prompts * worlds, parameters)
            return [texts[2 * world] + texts[2 * world + 1] for world in range(worlds)]

        return enumerate_law(run, rows=2)

    laws = [plain_law(P, prompt, count) for prompt, count in zip(prompts, counts)]
    product = {first + second: a * b for first, a in laws[0].items() for second, b in laws[1].items()}
    assert distance(joint(lambda seed: seed), product) < EXACT
    assert distance(joint(lambda seed: (seed[0], 0)), product) > 0.1


# -- the rules as functions ----------------------------------------------------------------------------------------------


def random_distributions(generator: torch.Generator, *shape: int, zeros: float) -> Tensor:
    """``[*shape]`` float64 rows that sum to 1, each entry 0 with probability ``zeros``, but never a whole row."""
    weights = torch.rand(*shape, generator=generator, dtype=torch.float64) + 1e-3
    dead = torch.rand(*shape, generator=generator) < zeros
    dead[..., 0] &= ~dead.all(-1)
    weights = weights.masked_fill(dead, 0)
    return weights / weights.sum(-1, keepdim=True)


def chain_law(rule: Rule, p: Tensor, q: Tensor, *, proposal: Proposal) -> tuple[Law, dict[int, float]]:
    """One round on a chain whose distributions ``p`` ``[γ + 1, V]`` and ``q`` ``[γ, V]`` depend on the depth alone.

    Returns:
        The law of the γ + 1 tokens that come of it, where those after the round's last follow p; and of the number accepted.
    """
    depth, vocab = q.shape

    def run(enumeration: Enumeration) -> list[tuple[tuple[int, ...], int]]:
        noise, worlds = enumeration.noise(), len(enumeration.worlds)
        drafted = [noise.draw(q[at].expand(worlds, -1), Purpose.DRAFT, at) for at in range(depth)]
        tokens = torch.stack([torch.zeros(worlds, dtype=torch.long), *drafted], 1)
        tree = TokenTree.from_chain(tokens, proposal=proposal, q=q.expand(worlds, -1, -1))
        verdict = rule.verify(tree, p.expand(worlds, -1, -1), noise)
        tokens = tokens.gather(1, verdict.path)
        lines = zip(tokens.tolist(), verdict.accepted.tolist(), verdict.next_token.tolist())
        return [((*line[1 : accepted + 1], bonus), accepted) for line, accepted, bonus in lines]

    text: Law = {}
    accepted: dict[int, float] = {}
    for (emitted, count), weight in enumerate_law(run).items():
        accepted[count] = accepted.get(count, 0.0) + weight
        rest = {emitted: weight}
        for at in range(len(emitted), depth + 1):
            rest = {(*line, token): mass * float(p[at, token]) for line, mass in rest.items() for token in range(vocab)}
        for line, mass in rest.items():
            text[line] = text.get(line, 0.0) + mass
    return text, accepted


def product_law(p: Tensor) -> Law:
    law: Law = {(): 1.0}
    for line in p.tolist():
        law = {(*text, token): mass * value for text, mass in law.items() for token, value in enumerate(line)}
    return law


@pytest.mark.parametrize("name", ["match", "rejection", "block", "traversal", "multi-candidate", "k-seq"])
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_one_round_on_random_distributions(name: str, zeros: float):
    generator = torch.Generator().manual_seed(5)
    for vocab, depth in [(3, 1), (4, 1), (4, 2), (3, 2)] * 3:
        p = random_distributions(generator, depth + 1, vocab, zeros=zeros)
        q = random_distributions(generator, depth, vocab, zeros=zeros)
        law, _ = chain_law(create(name), p, q, proposal="iid")
        assert distance(law, product_law(p)) < EXACT


def test_rejection_accepts_as_often_as_the_total_variation_allows():
    """α = 1 - TV(p, q) per token, and a chain of depth two keeps α₁ + α₁α₂ tokens (Leviathan et al. 2023, Corollary 3.6)."""
    generator = torch.Generator().manual_seed(6)
    for zeros in (0.0, 0.4):
        p, q = random_distributions(generator, 3, 4, zeros=zeros), random_distributions(generator, 2, 4, zeros=zeros)
        alpha = (1 - (p[:2] - q).abs().sum(-1) / 2).tolist()
        _, accepted = chain_law(create("rejection"), p, q, proposal="iid")
        assert accepted.get(0, 0.0) == pytest.approx(1 - alpha[0], abs=EXACT)
        assert accepted.get(1, 0.0) == pytest.approx(alpha[0] * (1 - alpha[1]), abs=EXACT)
        assert accepted.get(2, 0.0) == pytest.approx(alpha[0] * alpha[1], abs=EXACT)


@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_block_keeps_at_least_what_rejection_keeps(zeros: float):
    """On any tables, and traversal keeps the same number with the same probability (Sun et al. 2024, Theorem 2)."""
    generator = torch.Generator().manual_seed(8)
    gained = 0.0
    for vocab, depth in [(3, 2), (4, 2), (2, 3), (3, 3)] * 3:
        p = random_distributions(generator, depth + 1, vocab, zeros=zeros)
        q = random_distributions(generator, depth, vocab, zeros=zeros)
        counts = {name: chain_law(create(name), p, q, proposal="iid")[1] for name in ("rejection", "block", "traversal")}
        kept = {name: sum(count * weight for count, weight in law.items()) for name, law in counts.items()}
        assert kept["block"] >= kept["rejection"] - EXACT
        assert distance(counts["block"], counts["traversal"]) < EXACT
        gained += kept["block"] - kept["rejection"]
    assert gained > 0.1


def test_match_accepts_independent_draws_only_as_often_as_two_samples_agree():
    p, q = P(PROMPT).expand(2, -1), Q(PROMPT)[None]
    _, accepted = chain_law(create("match"), p, q, proposal="iid")
    assert accepted[1] == pytest.approx(float((p[0] * q[0]).sum()), abs=EXACT)
    assert accepted[1] < float(torch.minimum(p[0], q[0]).sum()) - 0.1  # which rejection reaches


def test_rejection_needs_q():
    tree = TokenTree.from_chain(torch.tensor([[0, 1]]), proposal="iid")
    with pytest.raises(ValueError, match="needs the draft's q"):
        create("rejection").verify(tree, torch.full((1, 2, 3), 1 / 3), Enumeration([]).noise())
