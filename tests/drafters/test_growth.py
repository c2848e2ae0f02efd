"""Growing trees: static and dynamic shapes against their definitions, draws against their laws, the draft model's own cache."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from itertools import permutations

import drafting
import pytest
import torch
from cover import covered
from helpers import alone, clone, generate, padded, perturbed, plainly, prompts, repetitive, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from foredraft import ConfigurationError, Speculator, TreeShape
from foredraft.drafters.base import Drafter, DraftRequest
from foredraft.drafters.draft_model import DraftModel
from foredraft.logits.noise import Noise, Purpose
from foredraft.logits.sampler import fit_vocabulary
from foredraft.planning import FixedPlanner
from foredraft.rows import RowParameters
from foredraft.session import Session
from foredraft.shapes import DynamicShape, StaticShape
from foredraft.testing import ProbabilityTable, ScriptedDrafter, TableTarget
from foredraft.tree import TokenTree
from foredraft.verification import create

VOCAB = 5
TREES = ["product(3,2,1)", "paths(0,1,2,0.0,0.1,1.0,0.0.0)", "dynamic(depth=4,k=3,total=9)", "opt(total=8,depth=5,delta=0.05)"]


def request(texts: Sequence[Sequence[int]], shape: TreeShape, proposal: str, limits: Sequence[int] | None = None) -> DraftRequest:
    rows, limits = [drafting.Row(list(text), 77 + slot) for slot, text in enumerate(texts)], limits or [shape.depth] * len(texts)
    needs_q = shape.static and proposal in ("iid", "without-replacement")
    return drafting.request(rows, vocabulary=VOCAB, shape=shape, proposal=proposal, needs_q=needs_q, limits=limits)


def texts_of(tree: TokenTree, row: int) -> list[tuple[int, ...]]:
    """The drafted tokens down to every valid node."""
    valid = torch.ones_like(tree.tokens, dtype=torch.bool) if tree.valid is None else tree.valid
    nodes = [node for node in range(1, tree.nodes) if bool(valid[row, node])]
    return [tuple(tree.tokens[row, tree.path(row, node)].tolist()[1:]) for node in nodes]


# -- against the definitions -----------------------------------------------------------------------------------------------


def likeliest(q: ProbabilityTable, text: Sequence[int], k: int) -> list[int]:
    return q(text).sort(descending=True, stable=True).indices[:k].tolist()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), shape=st.sampled_from(["product(3,2,1)", "product(2,2)", "paths(0,1,0.0,0.1,1.0,0.0.0)", "product(5)"]))
def test_a_static_tree_holds_the_likeliest_tokens(seed: int, shape: str):
    q, text, static = ProbabilityTable.random(VOCAB, seed=seed), [seed % VOCAB, 1], TreeShape.parse(shape)
    tree = ScriptedDrafter(q, proposal="deterministic").draft(request([text], static, "deterministic"))
    tree.check(VOCAB)
    assert isinstance(static, StaticShape) and tree.static_parents == static.parents and not tree.pruned
    expected: list[tuple[int, ...]] = [()]
    for level in static.levels:
        for parent, rank in zip(level.parents, level.ranks):
            expected.append((*expected[parent], likeliest(q, [*text, *expected[parent]], rank + 1)[rank]))
    assert texts_of(tree, 0) == expected[1:]


def grown_by_hand(q: ProbabilityTable, text: Sequence[int], shape: DynamicShape, limit: int) -> dict[tuple[int, ...], float]:
    """The paths that a dynamic shape keeps, with their probability."""
    found: dict[tuple[int, ...], float] = {}
    level, before = {(): 1.0}, 0.0
    for _ in range(min(shape.depth, limit)):
        below = {
            (*path, token): mass * float(q([*text, *path])[token])
            for path, mass in level.items()
            for token in likeliest(q, [*text, *path], shape.k)
        }
        found |= below
        if shape.delta is not None:
            expected = sum(sorted(found.values(), reverse=True)[: shape.total])
            if not expected - before > shape.delta:
                break
            before = expected
        level = dict(sorted(below.items(), key=lambda item: -item[1])[: shape.k])
    return {path: mass for path, mass in sorted(found.items(), key=lambda item: -item[1])[: shape.total] if mass >= shape.floor}


@settings(max_examples=60, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 1000), min_size=1, max_size=3),
    shape=st.sampled_from(["dynamic(depth=3,k=2,total=5)", "dynamic(depth=4,k=3,total=9)", "dynamic(depth=1,k=4,total=3)"]),
    limits=st.lists(st.integers(1, 4), min_size=3, max_size=3),
)
def test_a_dynamic_tree_keeps_the_best_nodes(seeds: list[int], shape: str, limits: list[int]):
    q, dynamic = ProbabilityTable.random(VOCAB, seed=seeds[0]), TreeShape.parse(shape)
    assert isinstance(dynamic, DynamicShape)
    texts = [[seed % VOCAB, seed % 3] for seed in seeds]
    tree = ScriptedDrafter(q, proposal="deterministic").draft(request(texts, dynamic, "deterministic", limits[: len(texts)]))
    tree.check(VOCAB)
    assert tree.pruned and tree.nodes <= 1 + dynamic.total  # filler that no row needs is left out
    for row, (text, limit) in enumerate(zip(texts, limits)):
        by_hand = grown_by_hand(q, text, dynamic, limit)
        assert set(texts_of(tree, row)) == set(by_hand)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    delta=st.sampled_from([0.0, 0.1, 0.3, 0.6]),
    floor=st.sampled_from([0.0, 0.05, 0.2, 0.9]),
    k=st.sampled_from([2, 4]),
)
def test_opt_grows_while_another_level_is_worth_it(seed: int, delta: float, floor: float, k: int):
    q, shape = ProbabilityTable.random(VOCAB, seed=seed, spread=3.0), TreeShape.opt(total=4, depth=5, delta=delta, floor=floor, k=k)
    tree = ScriptedDrafter(q, proposal="deterministic").draft(request([[1, 2]], shape, "deterministic"))
    assert set(texts_of(tree, 0)) == set(grown_by_hand(q, [1, 2], shape, 5))


@pytest.mark.parametrize("proposal", ["iid", "without-replacement", "keyed", "deterministic"])
@pytest.mark.parametrize("shape", ["product(4,2)", "dynamic(depth=3,k=4,total=9)"])
def test_impossible_tokens_are_filler(proposal: str, shape: str):
    """Two of five tokens are possible, so at most two siblings are real; what hangs below filler is filler."""
    q = ProbabilityTable(lambda context: [0.7, 0.0, 0.3, 0.0, 0.0], VOCAB)
    tree = ScriptedDrafter(q, proposal=proposal).draft(request([[0], [2]], TreeShape.parse(shape), proposal))
    tree.check(VOCAB)
    for row in range(2):
        assert all(set(text) <= {0, 2} for text in texts_of(tree, row))
        first = [text for text in texts_of(tree, row) if len(text) == 1]
        assert proposal == "iid" or len(first) == len(set(first)) <= 2


# -- draws ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_token_that_the_draft_lacks_is_drafted_only_if_it_is_forced(dtype: torch.dtype):
    scores = fit_vocabulary(torch.tensor([[0.0, 1.0, -50.0]], dtype=dtype), VOCAB)
    assert torch.softmax(scores, -1)[0, 3:].tolist() == [0.0, 0.0]
    forced = scores.masked_fill(torch.arange(VOCAB) != 4, float("-inf"))
    assert torch.softmax(forced, -1).tolist() == [[0.0, 0.0, 0.0, 0.0, 1.0]]


def test_rank_draws_without_replacement_in_order():
    """The law of ordered draws, by a chi-square over all of them; sorted afterwards it fails."""
    q, k, count = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0]), 3, 40_000
    ranked = Noise(torch.arange(count), torch.full((count,), 9)).rank(q.expand(count, 1, -1), k, Purpose.DRAFT, torch.tensor([4]))[:, 0]
    law = {}
    for order in permutations(range(4), k):
        chance, left = 1.0, 1.0
        for token in order:
            chance, left = chance * float(q[token]) / left, left - float(q[token])
        law[order] = chance
    assert math.isclose(sum(law.values()), 1.0, abs_tol=1e-6)

    def p_value(draws: torch.Tensor) -> float:
        seen = Counter(map(tuple, draws.tolist()))
        assert set(seen) <= set(law)
        return float(stats.chisquare([seen[order] for order in law], [count * law[order] / sum(law.values()) for order in law]).pvalue)

    assert p_value(ranked) > 1e-3
    assert p_value(ranked.sort(-1).values) < 1e-9


def test_draws_of_different_nodes_are_independent_and_iid_siblings_may_repeat():
    q, count = torch.tensor([0.5, 0.3, 0.2]), 20_000
    noise = Noise(torch.arange(count), torch.full((count,), 9))
    draws = noise.rank(q.expand(count, 2, -1), 1, Purpose.DRAFT, torch.tensor([1, 2]))[..., 0]
    seen = Counter(map(tuple, draws.tolist()))
    mass = q.double() / q.double().sum()
    wanted = {(a, b): count * float(mass[a] * mass[b]) for a in range(3) for b in range(3)}
    assert float(stats.chisquare([seen[pair] for pair in wanted], list(wanted.values())).pvalue) > 1e-3


def test_keyed_siblings_are_the_leaders_of_the_targets_race():
    p = torch.softmax(torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(1)), -1)
    noise, depths = Noise(torch.arange(3), torch.tensor([5, 9, 9])), torch.full((1, 1), 2)
    order = noise.race_order(p, depths, 3)
    assert order[..., 0].equal(noise.race(p, depths.expand(3, 4)))
    without = p.scatter(2, order[..., :1], 0.0)
    assert order[..., 1].equal(noise.race(without, depths.expand(3, 4)))
    assert noise.race_order(p, depths, 1)[..., 0].equal(order[..., 0])


# -- the draft model --------------------------------------------------------------------------------------------------------


class Checked(DraftModel):
    """Compares the q of every inner node, in every round, with a plain pass of the draft over that node's text."""

    rounds = 0

    def draft(self, request: DraftRequest) -> TokenTree:
        tree = super().draft(request)
        tree.check(request.vocab_size)
        assert tree.q is not None
        valid = torch.ones_like(tree.tokens, dtype=torch.bool) if tree.valid is None else tree.valid
        for row, mine in enumerate(request.rows):
            for node in {int(parent) for parent in tree.parents[row, 1:][valid[row, 1:]]}:
                text = [*mine.ids[:-1], *tree.tokens[row, tree.path(row, node)].tolist()]
                logits = self.model.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].float()
                difference = (tree.q[row, node] - torch.softmax(logits / 0.8, -1)).abs().max()
                assert difference < 1e-5, f"round {self.rounds}, row {row}, node {node}: {float(difference)}"
        self.rounds += 1
        return tree


@pytest.mark.parametrize(
    ("family", "tree"),
    covered(
        ["llama", "gemma3_text", "gpt2"],
        [("product(3,2,1)", "without-replacement"), ("product(2,2,2)", "iid"), ("product(3)", "iid")],
        ways=1,
    ),
)
def test_the_draft_model_knows_its_own_probabilities(family: str, tree: tuple[str, str]):
    """So that its cache holds the accepted path and nothing else, round after round, in a ragged batch whose rows end early."""
    shape, siblings = tree
    drafter = Checked(perturbed(family), siblings=siblings)
    speculator = Speculator(tiny(family), drafter=drafter, shape=shape, rule="traversal")
    stats = speculator.generate(
        **padded(repetitive()), do_sample=True, temperature=0.8, top_k=0, max_new_tokens=20, seed=2, pad_token_id=0
    ).stats
    assert drafter.rounds > 4 and 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("shape", ["dynamic(depth=4,k=3,total=9)", "product(3,2,1)"])
def test_a_draft_model_that_is_the_target_is_always_right(shape: str):
    """Greedy: the best path is the target's own text, whatever was accepted before: the draft's cache lost and gained nothing."""
    model, rows = clone(tiny()), repetitive()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)  # so sure of itself that its own text is the best path
    speculator = Speculator(model, drafter=DraftModel(model, siblings="top-k"), shape=shape)
    stats = speculator.generate(**padded(rows), max_new_tokens=21, pad_token_id=0).stats
    depth = TreeShape.parse(shape).depth
    assert stats.acceptance_length == pytest.approx(20 / math.ceil(20 / (depth + 1)))


@pytest.mark.parametrize("shape", ["product(2,1,1)", "dynamic(depth=3,k=1,total=3)"])
def test_keyed_siblings_of_the_targets_own_model_are_always_right(shape: str):
    """The same noise at the same positions: the leader of the draft's race is the target's choice, at every depth."""
    model, rows = tiny(), repetitive()
    speculator = Speculator(model, drafter=DraftModel(model, siblings="keyed"), shape=shape)
    stats = speculator.generate(**padded(rows), max_new_tokens=21, do_sample=True, top_k=0, seed=3, pad_token_id=0).stats
    assert stats.acceptance_length == pytest.approx(4.0)


OF_A_SEED = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "max_new_tokens": 16, "seed": 3}


@pytest.mark.parametrize(("shape", "siblings"), covered(TREES, ["auto", "keyed", "iid", "without-replacement", "top-k"], ways=1))
def test_under_match_any_tree_gives_the_text_of_the_seed(shape: str, siblings: str):
    model, rows = tiny("gemma3_text"), repetitive()
    speculator = Speculator(model, drafter=DraftModel(perturbed("gemma3_text"), siblings=siblings), rule="match", shape=shape)
    assert generate(speculator, rows, **OF_A_SEED) == plainly(model, rows, **OF_A_SEED)
    greedy = plainly(model, rows, max_new_tokens=16)
    assert generate(speculator, rows, max_new_tokens=16) == greedy
    assert generate(speculator, rows[1:2], max_new_tokens=16) == greedy[1:2]


class Deep(Drafter):
    """Drafts deeper than the row's limit."""

    name, summary, branches = "deep", "for tests", True

    def draft(self, request: DraftRequest) -> TokenTree:
        layout = (-1, 0, 0, 1, 3, 4)
        tokens = torch.ones(len(request.rows), len(layout), dtype=torch.long)
        tokens[:, 0] = request.roots()
        return TokenTree.from_parents(tokens, layout)


def test_nodes_below_a_rows_limit_are_never_proposed():
    always = ProbabilityTable(lambda context: [0.0, 1.0, 0.0], 3)
    session = Session(TableTarget(always), Deep(), create("match"), proposal="deterministic", planner=FixedPlanner("product(2,1)"))
    for count in (2, 3, 6):
        session.add([0], RowParameters(max_new_tokens=count, do_sample=True))
    commits = []
    while session.live:
        commits += session.step()
    assert session.stats.new_tokens == 2 + 3 + 6 and max(len(commit.tokens) for commit in commits) == 3


@pytest.mark.parametrize(("shape", "prompt"), [("dynamic(depth=2,k=4,total=20)", 248), ("dynamic(depth=3,k=4,total=36)", 236)])
def test_a_tree_wider_than_what_the_draft_read_fits_at_the_end_of_its_buffers(shape, prompt):
    """The cache has 256 slots at first; the padded path of a tree is wider than what was fed of it."""
    speculator = Speculator(tiny(), drafter=DraftModel(perturbed()), shape=shape)
    (row,) = prompts((prompt,))  # alone, so that its last slots are the buffer's
    assert generate(speculator, [row], max_new_tokens=256 - prompt) == [alone(tiny(), row, max_new_tokens=256 - prompt)]


def test_a_shape_that_grows_beyond_the_drafts_context_is_refused():
    config = copy.deepcopy(perturbed().config)
    config.max_position_embeddings = 64
    draft = type(perturbed())(config).eval()
    Speculator(tiny(), drafter=DraftModel(draft), shape="dynamic(depth=5,k=14,total=16)")
    with pytest.raises(ConfigurationError, match="grows 70 nodes, but the draft model's context holds only 64"):
        Speculator(tiny(), drafter=DraftModel(draft), shape="dynamic(depth=6,k=14,total=16)")
