"""layer-skip: the text is plain decoding's, no layer reads a token twice, and the cache holds what a fresh prefill would."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, build, build_wide
from cover import covered, nightly_but
from helpers import PAD, generate, padded, prompts
from own_layers import LAYERS, NEW, ROWS, SAMPLED, SHAPES, check_cache, check_text, counted, error, model, tokens_read
from torch import Tensor
from transformers import LlamaForCausalLM

from foredraft import ConfigurationError, Speculator, UnsupportedModelError
from foredraft.drafters import exits as exits_module
from foredraft.drafters.base import DraftRequest, Feedback
from foredraft.drafters.exits import Exits
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.stopping import Stopping
from foredraft.heads.exit import ExitHead
from foredraft.logits.processors import Pipeline
from foredraft.logits.sampler import Sampler
from foredraft.models.layers import LayerRanges
from foredraft.planning import Round
from foredraft.planning.costs import CostModel, StandIn
from foredraft.rows import RowParameters
from foredraft.shapes import TreeShape
from foredraft.target import Target
from foredraft.testing import ProbabilityTable, TableTarget
from foredraft.tree import TokenTree
from foredraft.verification import create as create_rule

pytestmark = pytest.mark.filterwarnings("ignore:.*longrope")

TREES = [name for name, entry in ARCHITECTURES.items() if entry.support == "tree"]
SHARED = {"gemma3n_text"}  # upper layers read the keys of lower ones


@pytest.mark.parametrize(("shape", "options"), covered(SHAPES[:2], [{"do_sample": False}, SAMPLED], ways=1))
def test_every_layer_reads_every_token_once(shape: str, options: dict):
    for seen in tokens_read(lambda: LayerSkip(exit=2), shape, options):
        assert len(set(seen)) == 1


def test_grown_trees_may_drop_nodes_and_no_more():
    subject = model()
    speculator = Speculator(subject, LayerSkip(exit=2), shape=SHAPES[2], execution="eager", reuse_prefix=False)
    stats = speculator.generate(**padded(ROWS[:1]), max_new_tokens=NEW, do_sample=False, pad_token_id=PAD).stats
    lower, upper = stats.layer_tokens[0], stats.layer_tokens[-1]
    assert upper == len(ROWS[0]) + stats.row_passes + stats.drafted
    assert upper <= lower <= upper + 2 * stats.target_passes  # at most k nodes of the last level but one are fed and then dropped


@pytest.mark.parametrize(("shape", "execution"), covered(SHAPES, ["eager", "packed", "native"], ways=1))
def test_text_is_plain_while_the_exit_changes(shape: str, execution: str):
    drafter = LayerSkip(exit=2)
    check_text(drafter, shape, execution, lambda rounds: setattr(drafter, "exit", 1 + rounds % (LAYERS - 1)))


FAMILIES = [name for name in TREES if name not in SHARED]
FAST = [(name, "product(2,2)") for name in (*FAMILIES[:5], "gemma3_text", "gpt2", "bloom")]


@pytest.mark.parametrize(("family", "shape"), nightly_but(FAST, itertools.product(FAMILIES, SHAPES[:2])))
def test_every_family_keeps_its_text_and_its_cache(family: str, shape: str):
    subject, rows = build(family, ARCHITECTURES[family].implementations[0]), prompts((45, 41, 52))
    speculator = Speculator(subject, "layer-skip", rule="match", shape=shape, execution="eager")
    plain = Speculator(subject, "none", rule="match", execution="eager")
    for options in ({"do_sample": False}, SAMPLED):
        assert generate(speculator, rows, max_new_tokens=6, **options) == generate(plain, rows, max_new_tokens=6, **options)
    check_cache(speculator, rows, [lambda: None] * 3)


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


@pytest.mark.parametrize(("rule", "siblings", "shape"), LAWS)
def test_the_law_is_the_targets(rule: str, siblings: str, shape: str):
    assert error(LayerSkip(exit=1, siblings=siblings), rule, shape) < 1e-9


HEAVY = ("multi-candidate", "k-seq", "traversal")


@pytest.mark.parametrize(
    ("rule", "siblings", "shape", "threshold"),
    [
        *(pytest.param(*each, UNSURE, marks=[pytest.mark.nightly] if each[0] in HEAVY else []) for each in LAWS),
        ("rejection", "iid", "chain(2)", "auto"),
    ],
)
def test_the_law_is_the_targets_where_drafts_stop(rule: str, siblings: str, shape: str, threshold: float | str):
    """Of four tokens, so that there is room for drafts of two."""
    assert error(LayerSkip(exit=1, siblings=siblings, threshold=threshold), rule, shape, count=4) < 1e-9


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


@pytest.mark.parametrize(
    ("shape", "how"),
    covered(["chain(5)", "product(2,2,1)", "dynamic(4,2,7)"], [({"do_sample": False}, ROWS[:1], "auto"), (SAMPLED, ROWS[:2], 0.3)], ways=1),
)
def test_a_draft_that_stops_reads_every_token_once(shape: str, how: tuple[dict, list[list[int]], float | str]):
    """And the text stays plain's, and the draft is shorter than without a threshold."""
    options, rows, threshold = how
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
    stopping.observe(rows, Feedback(chain, (1, 2), None, drafted=False))  # nor by tokens that were not drafted
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


# -- exit=auto ------------------------------------------------------------------------------------------------------------


class Ticking:
    """A clock that stands still but for what is added."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("layers", "expected", "first"),
    [(8, (1, 2, 3, 4, 5, 6), 2), (16, (2, 3, 4, 6, 8, 9, 10, 12), 4), (32, (3, 6, 9, 12, 15, 18, 21, 24), 9), (4, (1, 2, 3), 1)],
)
def test_exits_reach_up_to_three_quarters_of_the_layers(layers: int, expected: tuple[int, ...], first: int):
    exits = Exits.of(layers, first=layers // 3)
    assert exits is not None and exits.layers == expected and exits.layer == first
    assert Exits.of(2, first=1) is None  # no choice


@pytest.mark.parametrize("shape", ["chain(0)", *SHAPES])
@pytest.mark.parametrize("execution", ["eager", "native"])
def test_what_is_kept_is_what_comes_out_of_the_layers(shape: str, execution: str):
    """With a draft or without: the LM head reads from it what a draft there would have read, and no layer reads a token twice."""
    subject, layers = model(), (1, 2, 4)
    speculator = Speculator(subject, LayerSkip(exit=2), rule="match", shape=shape, execution=execution, reuse_prefix=False)
    target, session = speculator.target, speculator.session()
    for row in ROWS[:2]:
        session.add(row, RowParameters(max_new_tokens=NEW))
    session.step()
    target.keep(layers)
    for _ in range(2):
        texts, passes = [list(row.ids) for row in session.rows], target.passes
        session.step()
        assert target.passes == passes + 1 and set(target.kept) == set(layers)
        assert len(set(target.layer_tokens)) == 1 or not TreeShape.parse(shape).static
        for row, text in enumerate(texts):
            with torch.inference_mode():
                expected = subject(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
                for layer in layers:
                    torch.testing.assert_close(target.kept[layer][row, 0], expected[layer][0, -1], rtol=1e-3, atol=1e-4)
                    said = subject.lm_head(subject.model.norm(expected[layer][0, -1:]))
                    torch.testing.assert_close(target.read_out(target.kept[layer][row, :1]), said, rtol=1e-3, atol=1e-3)
    session.close()


class Watched:
    """What an :class:`Exits` asks of a target; ``right`` says which layers agree with it."""

    def __init__(self, right: dict[int, float]):
        self.right, self.kept, self.looks = right, {}, 0
        self._keeping: tuple[int, ...] = ()
        self.generator = torch.Generator().manual_seed(0)

    def keep(self, layers: Any) -> None:
        self._keeping = tuple(layers)

    def score(self, nodes: int) -> Tensor:
        """The target says 1 everywhere."""
        self.kept = {layer: torch.rand(1, nodes, 1, generator=self.generator) < self.right[layer] for layer in self._keeping}
        self.looks += bool(self.kept)
        return torch.tensor([0.0, 1.0, 0.0]).expand(1, nodes, 3)

    def read_out(self, states: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(states[:, 0].long(), 3).float()


def looked(rounds: int, right: dict[int, float], exits: Exits, *, slower: float = 0.0, head: float = 0.0, nodes: int = 3) -> Watched:
    """``rounds`` of a millisecond each, with a look ``slower`` by so much, in which the LM head takes ``head``."""
    target: Any = Watched(right)
    clock: Any = exits.clock
    read_out = target.read_out

    def timed(states: Tensor) -> Tensor:
        clock.now += head
        return read_out(states)

    target.read_out = timed
    exits.begin()
    for _ in range(rounds):
        logits = target.score(nodes)
        clock.now += 1e-3 + (slower if target.kept else 0.0)
        exits.observe(target, logits, [nodes - 1], None)
    return target


def test_looks_take_a_hundredth_of_the_time():
    exits = Exits((1, 2, 3), 1, clock=Ticking())
    target = looked(5000, {1: 0.5, 2: 0.5, 3: 0.5}, exits, slower=3e-4, head=5e-4)
    seconds = target.looks * 8e-4
    assert 0.008 < seconds / exits.clock() < 0.0105
    assert looked(50, {1: 0.5, 2: 0.5, 3: 0.5}, Exits((1, 2, 3), 1, clock=Ticking())).looks == 49  # where they cost nothing


def test_looks_are_rarer_where_nothing_is_drafted():
    exits = Exits((1, 2, 3), 1, clock=Ticking())
    target = looked(5000, {1: 0.5, 2: 0.5, 3: 0.5}, exits, slower=3e-4, head=5e-4, nodes=1)
    assert 0.001 < target.looks * 8e-4 / exits.clock() < 0.0025


def test_looks_at_one_text_say_nothing_of_exits():
    exits = Exits((1, 2, 3), 1, clock=Ticking())
    for text in range(3):
        assert exits.odds(greedy=True) == {}, text
        looked(60, {1: 0.5, 2: 0.5, 3: 0.5}, exits)
    assert exits.odds(greedy=True).keys() == {1, 2, 3}


def test_odds_follow_what_was_seen():
    exits = Exits((1, 2, 3), 2, clock=Ticking())
    assert exits.odds(greedy=True) == {}
    looked(3, {1: 0.2, 2: 0.5, 3: 0.8}, exits)
    assert exits.odds(greedy=True) == {}  # too little
    looked(400, {1: 0.2, 2: 0.5, 3: 0.8}, exits)
    odds = exits.odds(greedy=True)
    assert odds[2] == 1 and 0.12 < odds[1] < 0.3 and 2.5 < odds[3] < 5  # 0.25 and 4, less what may be luck
    assert exits.odds(greedy=False) == {}  # no row sampled
    looked(400, {1: 0.8, 2: 0.5, 3: 0.2}, exits)
    odds = exits.odds(greedy=True)
    assert odds[1] > 2 and odds[3] < 0.5
    exits.forget()
    assert exits.odds(greedy=True) == {}


def test_a_row_that_failed_leaves_nothing_behind():
    """Its states are NaN."""
    exits, right = Exits((1, 2, 3), 2, clock=Ticking()), {1: 0.5, 2: 0.5, 3: 0.5}
    exits.greedy = False
    target: Any = Watched(right)
    target.read_out = lambda states: torch.full((len(states), 3), float("nan"))
    target.keep(exits.layers)
    exits.observe(target, target.score(3), [2], None)
    looked(400, right, exits)
    odds = exits.odds(greedy=False)
    assert odds.keys() == set(right) and all(0 < each < 100 for each in odds.values())


class ByRound(LayerSkip):
    """Leaves at another layer in each round."""

    def bind(self, target: Target) -> None:
        super().bind(target)
        self.rounds = 0

    def draft(self, request: DraftRequest) -> TokenTree:
        self.rounds += 1
        self.exit = (2, 1, 3)[self.rounds % 3]
        return super().draft(request)


@pytest.mark.parametrize(("rule", "siblings", "shape"), [each for each in LAWS if each[0] != "k-seq"])
def test_the_law_is_the_targets_while_the_exit_changes(rule: str, siblings: str, shape: str):
    tables = [ProbabilityTable.random(3, seed=seed) for seed in (2, 3, 4)]
    assert error(ByRound(exit=1, siblings=siblings), rule, shape, early=tables) < 1e-9


def planted() -> LlamaForCausalLM:
    """Layers from the third on do nothing, so that drafts that leave behind two or more are right and those behind one are not."""
    made = model(num_hidden_layers=8)
    with torch.no_grad():
        for layer in made.model.layers[2:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return made


@cache
def plain_of_planted(sampled: bool) -> list[list[int]]:
    plain = Speculator(planted(), "none", rule="match", execution="eager")
    return generate(plain, ROWS[:1], max_new_tokens=160, **(SAMPLED if sampled else {"do_sample": False}))


COSTS = {1: 1.9e-4, **{layer: 1e-4 * layer for layer in range(2, 7)}}


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        *covered(["auto", "chain(3)", "dynamic(3,2,5)"], [{"do_sample": False}, SAMPLED], ways=1),
        pytest.param("product(2,2,1)", {"do_sample": False}, marks=pytest.mark.nightly),
    ],
)
def test_auto_finds_the_cheapest_layer_that_is_right(shape: str, options: dict, monkeypatch: pytest.MonkeyPatch):
    """From the deepest one on; the text stays plain's while the exit changes in mid-run, and every layer reads every token once."""
    subject = planted()
    drafter = LayerSkip(exit="auto")
    speculator = Speculator(subject, drafter, rule="match", shape=shape, execution="eager", reuse_prefix=False)
    exits, planner = drafter.info.exits, speculator.planner
    monkeypatch.setattr(exits_module, "PASSAGE", 4)  # one text counts for many
    assert exits is not None and exits.layer == 2 and exits.layers == tuple(COSTS)
    exits.clock = planner.clock = Ticking()  # neither looks nor plans cost anything, however busy the machine is
    drafter.exit = 6
    planner.costs.exits = {1: COSTS}
    costs: Any = planner.costs
    costs.leave(6)
    for size in (1, 4, 12, 24):
        costs.target.measured(1, size, 1e-3)
    observe = planner.observe

    def observed(rows: Any, done: Round) -> None:
        spent = {"draft": COSTS[drafter.exit] * max(map(len, done.drafted)), "target": 1e-3, "rest": 1e-5}
        observe(rows, replace(done, **spent, shared=False))

    monkeypatch.setattr(planner, "observe", observed)
    found = speculator.generate(**padded(ROWS[:1]), max_new_tokens=160, pad_token_id=PAD, **options)
    assert drafter.exit == 2
    assert [row[len(ROWS[0]) :] for row in found.sequences.tolist()] == plain_of_planted(options["do_sample"])
    assert len(set(found.stats.layer_tokens)) == 1 or "dynamic" in shape or shape == "auto"


def test_passes_to_every_exit_are_timed_beforehand(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    for shape in ("auto", "chain(2)"):
        drafter = LayerSkip(exit="auto")
        speculator = Speculator(planted(), drafter, shape=shape, execution="eager")
        generate(speculator, ROWS[:1], max_new_tokens=2, do_sample=False)
        costs: Any = speculator.planner.costs
        assert list(costs.exits[1]) == list(COSTS) and all(seconds > 0 for seconds in costs.exits[1].values())
    read: Any = CostModel()
    read.load(costs.to_dict())
    assert read.exits == costs.exits


def test_a_model_of_one_layer_is_refused_as_such():
    for options in ({}, {"exit": "auto"}):
        with pytest.raises(ConfigurationError, match="one layer has no lower layers"):
            Speculator(model(num_hidden_layers=1), LayerSkip(**options), execution="eager")


def test_an_exit_that_is_none_is_refused():
    with pytest.raises(ConfigurationError, match="must be auto or lie between 1 and 4"):
        Speculator(model(), LayerSkip(exit="sometimes"), execution="eager")
    head = ExitHead.for_target(model(), exit=2)
    with pytest.raises(ConfigurationError, match="trained for layer 2, not auto; leave exit out"):
        Speculator(model(), LayerSkip(head, exit="auto"), execution="eager")
