"""layer-skip: the text is plain decoding's, no layer reads a token twice, and the cache holds what a fresh prefill would."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, build, build_wide
from cover import nightly_but
from helpers import PAD, generate, padded, prompts
from own_layers import LAYERS, counted, model

from foredraft import ConfigurationError, Speculator, UnsupportedModelError
from foredraft.drafters.base import DraftRequest, Feedback
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.stopping import Stopping
from foredraft.logits.processors import Pipeline
from foredraft.logits.sampler import Sampler
from foredraft.models.layers import LayerRanges
from foredraft.planning import FixedPlanner, Round
from foredraft.planning.costs import StandIn
from foredraft.rows import RowParameters
from foredraft.session import Session
from foredraft.shapes import TreeShape
from foredraft.target import Target
from foredraft.testing import ProbabilityTable, TableTarget, continuation_law, distance, plain_law
from foredraft.tree import TokenTree
from foredraft.verification import create as create_rule

pytestmark = pytest.mark.filterwarnings("ignore:.*longrope")

NEW = 17
TREES = [name for name, entry in ARCHITECTURES.items() if entry.support == "tree"]
SHARED = {"gemma3n_text"}  # upper layers read the keys of lower ones
SHAPES = ["chain(4)", "product(2,2,1)", "dynamic(3,2,5)"]
ROWS = prompts((12, 5, 9))
SAMPLED = {"do_sample": True, "seed": 7, "temperature": 1.0, "top_k": 0}


@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("options", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
def test_every_layer_reads_every_token_once(shape: str, options: dict):
    subject = model()
    counts = counted(subject)
    speculator = Speculator(subject, LayerSkip(exit=2), shape=shape, execution="eager", reuse_prefix=False)
    before = list(counts)
    for rows in (ROWS[:1], ROWS):
        stats = speculator.generate(**padded(rows), max_new_tokens=NEW, pad_token_id=PAD, **options).stats
        seen = [after - earlier for after, earlier in zip(counts, before)]
        before = list(counts)
        assert stats.layer_tokens == seen and len(set(seen)) == 1
        assert stats.accepted > 0 and (stats.accepted < stats.drafted or len(rows) == 1)
        if len(rows) == 1:  # without filler: the prompt, a root in every pass after the prefill, and every drafted token
            assert seen[0] == len(rows[0]) + stats.row_passes + stats.drafted
    for execution in ("packed", "native"):
        other = Speculator(model(), LayerSkip(exit=2), shape=shape, execution=execution, reuse_prefix=False)
        assert other.generate(**padded(ROWS), max_new_tokens=NEW, pad_token_id=PAD, **options).stats.layer_tokens == seen


def test_grown_trees_may_drop_nodes_and_no_more():
    subject = model()
    speculator = Speculator(subject, LayerSkip(exit=2), shape=SHAPES[2], execution="eager", reuse_prefix=False)
    stats = speculator.generate(**padded(ROWS[:1]), max_new_tokens=NEW, do_sample=False, pad_token_id=PAD).stats
    lower, upper = stats.layer_tokens[0], stats.layer_tokens[-1]
    assert upper == len(ROWS[0]) + stats.row_passes + stats.drafted
    assert upper <= lower <= upper + 2 * stats.target_passes  # at most k nodes of the last level but one are fed and then dropped


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("execution", ["eager", "packed", "native"])
def test_text_is_plain_while_the_exit_changes(shape: str, execution: str):
    plain = Speculator(model(), "none", rule="match", execution="eager")
    drafter = LayerSkip(exit=2)
    speculator = Speculator(model(), drafter, rule="match", shape=shape, execution=execution)
    for options in ({"do_sample": False}, SAMPLED):
        expected = generate(plain, ROWS, max_new_tokens=NEW, **options)
        session = speculator.session()
        texts = {}
        for index, row in enumerate(ROWS):
            seed = (7, index)
            texts[session.add(row, RowParameters(max_new_tokens=NEW, do_sample=bool(options["do_sample"]), seed=seed))] = []
        rounds = 0
        while session.live:
            drafter.exit = 1 + rounds % (LAYERS - 1)
            rounds += 1
            for commit in session.step():
                texts[commit.slot] += commit.tokens
        session.close()
        assert list(texts.values()) == expected


FAMILIES = [name for name in TREES if name not in SHARED]
FAST = [(name, "product(2,2)") for name in (*FAMILIES[:5], "gemma3_text", "gpt2", "bloom")]


@pytest.mark.parametrize(("family", "shape"), nightly_but(FAST, itertools.product(FAMILIES, SHAPES[:2])))
def test_every_family_keeps_its_text_and_its_cache(family: str, shape: str):
    subject, rows = build(family, ARCHITECTURES[family].implementations[0]), prompts((45, 41, 52))
    speculator = Speculator(subject, "layer-skip", rule="match", shape=shape, execution="eager")
    plain = Speculator(subject, "none", rule="match", execution="eager")
    for options in ({"do_sample": False}, SAMPLED):
        assert generate(speculator, rows, max_new_tokens=6, **options) == generate(plain, rows, max_new_tokens=6, **options)
    session = speculator.session()
    for row in rows:
        session.add(row, RowParameters(max_new_tokens=12))
    for _ in range(3):
        session.step()
    cache, fresh = speculator.target.cache, Target(subject, test=False, execution="eager")
    texts = [row.ids[:length] for row, length in zip(session.rows, cache.lengths)]
    fresh.open(texts)
    fresh.prefill(texts, first=0)
    for ours, theirs in zip(cache.written, fresh.cache.written):
        for row, text in enumerate(texts):
            for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                torch.testing.assert_close(a[row, :, : len(text)], b[row, :, : len(text)], rtol=1e-3, atol=1e-4)
    session.close()


LAWS = [
    ("match", "keyed", "chain(2)"),
    ("rejection", "iid", "chain(2)"),
    ("block", "iid", "chain(2)"),
    ("traversal", "without-replacement", "product(2,1)"),
    ("multi-candidate", "iid", "product(2,1)"),
    ("k-seq", "iid", "product(2,1)"),
    ("match", "keyed", "product(2,1)"),
    ("match", "top-k", "dynamic(2,2,3)"),
    ("match", "keyed", "dynamic(2,2,3)"),
]
UNSURE = 0.45  # above some q of the tables below and below others


def error(drafter: LayerSkip, rule: str, shape: str, count: int = 3) -> float:
    """How far the law of a text that is drafted with ``drafter`` is from the target's."""
    p, q = ProbabilityTable.random(3, seed=1), ProbabilityTable.random(3, seed=2)
    whole = TreeShape.parse(shape)

    def session(randomness: Any) -> Session:
        target: Any = TableTarget(p, early=q)
        drafter.bind(target)
        proposal = drafter.proposals_for(whole)[0]
        return Session(target, drafter, create_rule(rule), proposal=proposal, planner=FixedPlanner(whole), randomness=randomness)

    with torch.inference_mode():
        return distance(continuation_law(session, [0, 1], count), plain_law(p, [0, 1], count))


@pytest.mark.parametrize("threshold", [None, UNSURE, "auto"])
@pytest.mark.parametrize(("rule", "siblings", "shape"), LAWS)
def test_the_law_is_the_targets(rule: str, siblings: str, shape: str, threshold: float | str | None):
    assert error(LayerSkip(exit=1, siblings=siblings, threshold=threshold), rule, shape) < 1e-9


class DropsUnsure(LayerSkip):
    """The planted fault: the token that stopped the draft is dropped as well."""

    dropped = 0

    def draft(self, request: DraftRequest) -> TokenTree:
        tree = super().draft(request)
        assert tree.q is not None
        q = tree.q[torch.arange(tree.rows)[:, None], tree.parents[:, 1:], tree.tokens[:, 1:]]
        sure = torch.cat([torch.ones(tree.rows, 1, dtype=torch.bool), q >= UNSURE], 1)
        sure[:, 1:] &= sure.gather(1, tree.parents[:, 1:])
        valid = sure if tree.valid is None else tree.valid & sure
        self.dropped += int((~valid).sum())
        return replace(tree, valid=valid)


@pytest.mark.parametrize(("rule", "siblings", "shape"), [each for each in LAWS if create_rule(each[0]).needs_q])
def test_dropping_the_token_that_stopped_the_draft_is_found(rule: str, siblings: str, shape: str):
    faulty = DropsUnsure(exit=1, siblings=siblings, threshold=UNSURE)
    assert error(faulty, rule, shape) > 0.01 and faulty.dropped


@pytest.mark.parametrize("shape", ["chain(5)", "product(2,2,1)", "dynamic(4,2,7)"])
@pytest.mark.parametrize(("options", "rows", "threshold"), [({"do_sample": False}, ROWS[:1], "auto"), (SAMPLED, ROWS[:2], 0.3)])
def test_a_draft_that_stops_reads_every_token_once(shape: str, options: dict, rows: list[list[int]], threshold: float | str):
    """And the text stays plain's, and the draft is shorter than without a threshold."""
    subject = model()
    plain = Speculator(model(), "none", rule="match", execution="eager")
    speculator = Speculator(subject, LayerSkip(exit=2, threshold=threshold), rule="match", shape=shape, execution="eager")
    counts = counted(subject)
    found = speculator.generate(**padded(rows), max_new_tokens=NEW, pad_token_id=PAD, **options)
    counts = list(counts)
    assert found.stats.layer_tokens == counts
    assert generate(speculator, rows, max_new_tokens=NEW, **options) == generate(plain, rows, max_new_tokens=NEW, **options)
    assert 0 < found.stats.drafted < (TreeShape.parse(shape).nodes - 1) * found.stats.row_passes
    if shape.startswith("chain") and len(rows) == 1:
        assert set(counts) == {len(rows[0]) + found.stats.row_passes + found.stats.drafted}


def asked(q: ProbabilityTable, text: list[int], shape: TreeShape, threshold: float) -> TokenTree:
    """What a bound drafter proposes after ``text``."""
    target: Any = TableTarget(q, early=q)
    drafter = LayerSkip(exit=1, siblings="top-k", threshold=threshold)
    drafter.bind(target)
    target.open([text])
    target.prefill([text[:-1]], first=0)
    sampler = Sampler([Pipeline()], [False], [len(text)], None, lambda: torch.tensor([text]))
    row = StandIn(0, text, 100)
    depth = shape.depth
    return drafter.draft(DraftRequest([row], shape, depth, [depth], "deterministic", False, 5, torch.device("cpu"), sampler))


@pytest.mark.parametrize("shape", ["chain(6)", "product(2,2,2,1)", "dynamic(4,2,9)"])
def test_nothing_is_drafted_below_a_token_that_is_unlikely(shape: str):
    """Siblings are all there, whatever their q; a token below the threshold stays and has no children."""
    static, unlikely, stopped = TreeShape.parse(shape), 0, 0
    for seed in range(12):
        q, text = ProbabilityTable.random(5, seed=seed), [seed % 5, 2]
        tree = asked(q, text, static, 0.3)
        tree.check(5)
        valid = [True] * tree.nodes if tree.valid is None else tree.valid[0].tolist()
        parents = tree.parents[0].tolist()
        stopped += sum(valid) < 1 + int(asked(q, text, static, 0.0).drafted)
        for node in range(1, tree.nodes):
            path = tree.tokens[0, tree.path(0, node)].tolist()
            sure = float(q([*text[:-1], *path[:-1]])[path[-1]]) >= 0.3
            below = [child for child, parent in enumerate(parents) if parent == node and valid[child]]
            unlikely += valid[node] and not sure
            assert sure or not below
    assert unlikely and stopped


def test_the_threshold_follows_the_acceptance_of_its_row():
    """Draft & Verify's rule by hand: up while too little is accepted, down where all of a draft that stopped early is."""
    stopping = Stopping("auto")
    rows = [StandIn(slot, [1, 2], 100) for slot in (3, 7)]
    sampler = Sampler([Pipeline()] * 2, [False, True], [2, 2], None, lambda: torch.zeros(2, 2))
    request = DraftRequest(rows, TreeShape.chain(4), 4, [4, 4], "deterministic", False, 5, torch.device("cpu"), sampler)
    chain = TokenTree.from_chain(torch.zeros(2, 5, dtype=torch.long), valid=torch.tensor([[True] * 5, [True] * 3 + [False] * 2]))

    def after(*accepted: int) -> list[float]:
        stopping.observe(rows, Feedback(chain, accepted, None))
        found = stopping.request(request).thresholds
        assert found is not None
        return list(found)

    assert stopping.request(request).thresholds == [0.8, 0.5]
    assert after(1, 2) == pytest.approx([0.801, 0.501])  # 0.125 and 0.5 of what was drafted, on average
    for _ in range(3):
        after(4, 2)
    assert after(4, 2) == pytest.approx([0.804, 0.501])  # above 0.9 at last; the second row is since the fourth round, and stopped early
    stopping.end(rows[:1])
    assert stopping.request(request).thresholds == pytest.approx([0.8, 0.501])
    stopping.observe(rows, Feedback(TokenTree.root(torch.zeros(2, dtype=torch.long)), [0, 0], None))  # without a draft nothing moves
    assert stopping.request(request).thresholds == pytest.approx([0.8, 0.501])


@pytest.mark.parametrize("threshold", [-0.1, 1.5, "high", True, float("nan")])
def test_a_threshold_that_is_none_is_refused(threshold: Any):
    with pytest.raises(ConfigurationError, match="from 0 to 1, 'auto', or None"):
        LayerSkip(threshold=threshold)


@pytest.mark.parametrize("exit", [0, LAYERS, LAYERS + 3, -1])
def test_an_exit_outside_the_model_is_refused(exit: int):
    with pytest.raises(ConfigurationError, match=f"between 1 and {LAYERS - 1}"):
        Speculator(model(), "layer-skip", drafter_options={"exit": exit}, execution="eager")


@pytest.mark.parametrize("family", sorted(SHARED))
def test_layers_that_share_keys_are_refused_by_name(family: str):
    with pytest.raises(UnsupportedModelError, match="keys of lower ones"):
        Speculator(build(family, ARCHITECTURES[family].implementations[0]), "layer-skip", execution="eager")


def test_models_that_take_chains_only_are_refused_by_name():
    family = next(name for name, entry in ARCHITECTURES.items() if entry.support == "chain")
    with pytest.raises(UnsupportedModelError, match="cannot be run in part"):
        Speculator(build_wide(family), "layer-skip")


def test_it_is_refused_among_several():
    with pytest.raises(ConfigurationError, match="use it alone"):
        Speculator(model(), "several:prompt-lookup,layer-skip", execution="eager")


def test_a_draft_costs_what_comes_on_top_of_a_whole_pass():
    """The lower layers' work counts once: the planner expects of plain rounds what they take, and of drafting rounds the sum."""
    subject = model()
    speculator = Speculator(subject, LayerSkip(exit=2), execution="eager")
    generate(speculator, ROWS[:1], max_new_tokens=4, do_sample=False)
    planner: Any = speculator.planner
    plain = planner.costs.pass_seconds(1, 1, 20)
    four = planner.costs.pass_seconds(1, 4, 20)
    rows = [StandIn(0, ROWS[0], 100)]
    for _ in range(40):  # a whole pass over four nodes would take `four`; here half of that was done while drafting
        spent = {"draft": 0.6 * four, "target": 0.5 * four, "rest": 1e-5}
        planner.observe(rows, Round(TreeShape.chain(3), [3], [[1, 1, 1]], [1], 4, 20, **spent, shared=True))
    assert planner.costs.pass_seconds(1, 1, 20) == pytest.approx(plain, rel=0.05)
    total = planner.costs.pass_seconds(1, 4, 20) + planner.costs.draft_seconds(1, [1, 1, 1])
    assert total == pytest.approx(1.1 * four, rel=0.1)


def interrupting(code: Any, lines: int) -> Any:
    """A tracer: Ctrl-C comes in ``code``, before so many lines have run."""

    def trace(frame: Any, event: str, given: Any) -> Any:
        nonlocal lines
        if frame.f_code is not code:
            return None
        lines -= event == "line"
        if lines == 0:
            raise KeyboardInterrupt
        return trace

    return trace


def test_ctrl_c_while_layers_are_set_aside_leaves_them_in_place():
    ranges = LayerRanges(model())
    before, code = list(ranges.layers), LayerRanges.only.__wrapped__.__code__
    for number in itertools.count(1):  # before each line that is run on the way in
        inside = ranges.only(0, 2)
        sys.settrace(interrupting(code, number))
        try:
            inside.__enter__()
        except KeyboardInterrupt:
            assert list(ranges.layers) == before, f"at line {number}"
        else:
            break
        finally:
            sys.settrace(None)
    assert number > 4 and list(ranges.layers) != before
    inside.__exit__(None, None, None)
    assert list(ranges.layers) == before


def test_its_own_exit_is_that_of_the_model_it_is_bound_to():
    drafter = LayerSkip()
    for layers, exit in ((9, 3), (3, 1), (12, 4)):
        drafter.bind(Target(model(num_hidden_layers=layers), execution="eager"))
        assert drafter.exit == exit
