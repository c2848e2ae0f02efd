"""Replayed passes and drafts are those of the model itself, whatever was baked in; what cannot be recorded is told, and nothing is lost.

Without a GPU a tape stands in for CUDA graphs (``tape.py``). What needs a GPU is marked ``cuda``.
"""

from __future__ import annotations

import itertools
import threading
import time
import warnings

import pytest
import torch
from architectures import ARCHITECTURES, build
from cover import covered, nightly_but
from helpers import Oracle, added, alone, clone, generate, make_drafter, padded, perturbed, prompts, random_tree, repetitive, tiny
from tape import HOST_METHODS, Tape
from torch.overrides import TorchFunctionMode

from foredraft import ConfigurationError, Speculator, TokenTree, TreeShape
from foredraft.backends import graphs as graphs_module
from foredraft.backends import native, packing, recorder
from foredraft.backends.eager import Eager
from foredraft.backends.graphs import PATIENCE, TRIALS
from foredraft.backends.static_pass import PassFrame, SlotCache, StaticPass
from foredraft.drafters.base import DraftRequest, Feedback
from foredraft.drafters.draft_loops.recorded import SELDOM, LoopFrame
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.several import Several
from foredraft.logits.noise import Noise, _token_hashes
from foredraft.logits.processors import Pipeline
from foredraft.logits.sampler import Sampler
from foredraft.models.paged_cache import PagedCache
from foredraft.planning import FixedPlanner, costs
from foredraft.planning.costs import Measurement
from foredraft.rows import RowParameters
from foredraft.session import Session
from foredraft.target import Target
from foredraft.tree import chain_layout, static_ancestors, static_depths
from foredraft.verification import create

TOLERANCE = 1e-4  # of the largest logit
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 30, "seed": 5}
SHAPES = ["chain(4)", "product(2,2,1)", "dynamic(depth=3,k=2,total=5)"]
TREE = [name for name, entry in ARCHITECTURES.items() if entry.support == "tree"]
REFUSED = {  # every other family that takes trees is recorded
    "xglm": "__bool__ would wait",
    "gemma3n_text": "tensor would wait",
}
# Of each kind of positions, attention, cache and experts one; the others are nightly.
ONE_OF_EACH = {"gemma3_text", "gpt2", "bloom", "falcon_grouped", "gptj", "deepseek_v2", "llama4_text", "qwen3_moe"}
WARM = PATIENCE + TRIALS  # passes of one bucket until it is replayed unwatched
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def taped(monkeypatch):
    monkeypatch.setattr(recorder, "recorder_for", lambda device: Tape())
    Tape.clear()


def of(family: str, implementation: str | None = None):
    return build(family, implementation or ARCHITECTURES[family].implementations[0])


def assert_same(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.shape == wanted.shape
    assert (found.float() - wanted.float()).abs().max() <= tolerance * wanted.float().abs().max()


@torch.inference_mode()
def assert_alike(
    replayed: Target, eager: Target, *, nodes: int = 7, rounds: int = WARM + 2, tolerance: float = TOLERANCE, levels: bool = True
) -> None:
    """Rounds of a tree, a tree level by level (``levels``), a chain and a single token; three ragged rows in a bucket of four, each keeping
    another path."""
    device = eager.device
    texts = prompts((30, 17, 22, 40))
    for target in (replayed, eager):
        target.open(texts)
    assert_same(replayed.prefill(texts, first=0), eager.prefill(texts, first=0), tolerance)
    for target in (replayed, eager):
        target.compact([0, 1, 2])  # buffers of four rows, so that there is filler
    for seed in range(rounds):
        tree = random_tree(3, nodes, seed)
        tree = TokenTree(tree.tokens.to(device), tree.parents.to(device))
        paths = [tree.path(row, max(0, nodes - 1 - row - seed)) for row in range(3)]
        width = max(map(len, paths))
        kept = torch.tensor([path + [0] * (width - len(path)) for path in paths], device=device)
        assert_same(replayed.score(tree), eager.score(tree), tolerance)
        for first, last in ((0, 1), (1, 4), (4, nodes)) if levels else ():
            part = TokenTree(tree.tokens[:, :last], tree.parents[:, :last])
            assert_same(replayed.score(part, first=first), eager.score(part, first=first), tolerance)
        for target in (replayed, eager):
            target.commit(kept, [len(path) for path in paths])
        chain = TokenTree.from_chain(tree.tokens[:, :3])
        assert_same(replayed.score(chain), eager.score(chain), tolerance)
        for target in (replayed, eager):
            target.commit(None, (1, 0, 2))
        assert_same(replayed.advance(tree.tokens[:, 0]), eager.advance(tree.tokens[:, 0]), tolerance)
    for target in (replayed, eager):
        target.reset()


# -- passes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", nightly_but({(name,) for name in ONE_OF_EACH}, [(name,) for name in TREE if name not in REFUSED]))
def test_replayed_passes_are_those_of_the_model(family, taped):
    target, eager = Target(of(family), execution="graphs"), Target(of(family), execution="eager", test=False, attention="model")
    assert target.execution == "graphs" and target.reasons.get("graphs") is None and target.passes == 0
    assert_alike(target, eager, levels=False)
    assert target.backend.recordings.refused is None and target.backend.recordings.replays >= 6


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_can_not_be_recorded_is_refused_with_the_reason(family, taped):
    with pytest.raises(ConfigurationError, match=rf"cannot be recorded: .*{REFUSED[family]}.*use execution='auto'"):
        Target(of(family), execution="graphs")


@pytest.mark.parametrize(("family", "nodes"), covered(["llama", "gemma3_text", "gpt2"], [9, 21, 70], ways=1))
def test_trees_that_need_filler(family, nodes, taped):
    target, eager = Target(of(family), execution="graphs"), Target(of(family), execution="eager", test=False)
    assert_alike(target, eager, nodes=nodes)
    assert target.backend.recordings.refused is None and target.backend.recordings.replays


@torch.inference_mode()
def test_a_cache_that_grows_has_its_passes_recorded_anew(taped, monkeypatch):
    monkeypatch.setattr(graphs_module, "SPAN", 256)
    target, eager = Target(of("mistral"), execution="graphs"), Target(of("mistral"), execution="eager", test=False)
    texts = prompts((40, 52))
    for each in (target, eager):
        each.open(texts)
        each.prefill(texts, first=0)
    captures, capacities = [], set()
    for step in range(240):
        tokens = torch.tensor([3 + step % 50, 7 + step % 90])
        assert_same(target.advance(tokens), eager.advance(tokens))
        captures.append(target.backend.recordings.captures)
        capacities.add(target.cache.capacity)
    assert len(capacities) == 2 and captures[-1] == captures[0] + 2  # two spans or two capacities, one recording each
    assert target.backend.recordings.replays >= 240 - 3 * WARM and target.backend.recordings.refused is None


def test_capacities_are_doubles_and_then_multiples():
    """Doubles would take up to twice the memory behind long texts."""
    assert [graphs_module.roomy(tokens) for tokens in (1, 512, 513, 2048, 2049, 4097)] == [512, 512, 1024, 2048, 4096, 6144]


@torch.inference_mode()
def test_buffers_that_move_take_the_recordings_along(taped):
    """A row joins, for which the buffers are enlarged, and leaves again: what is asked for is the bucket that was recorded before."""
    target, eager = Target(of("llama"), execution="graphs"), Target(of("llama"), execution="eager", test=False)
    texts = prompts((20, 13))
    for each in (target, eager):
        each.open(texts[:1])
        each.prefill(texts[:1], first=0)
    for step in range(WARM + 1):
        assert_same(target.advance(torch.tensor([3 + step])), eager.advance(torch.tensor([3 + step])))
    replays, moved = target.backend.recordings.replays, target.cache.allocations
    for each in (target, eager):
        each.open(texts[1:])
        each.prefill(texts[1:], first=1)
        each.compact([0])
    assert replays and target.cache.allocations > moved
    for step in range(WARM + 1):
        odd = TokenTree.from_chain(torch.arange(40, 48 + step)[None])  # of another size every time: eager, into the buffers of now
        assert_same(target.score(odd), eager.score(odd))
        for each in (target, eager):
            each.commit(None, (2,))
        assert_same(target.advance(torch.tensor([90 - step])), eager.advance(torch.tensor([90 - step])))
    assert target.backend.recordings.replays > replays and target.backend.recordings.refused is None


@torch.inference_mode()
def test_filler_rows_leave_every_row_alone(taped):
    """Three live rows of a bucket of four: the fourth keeps a text that a later row begins with."""
    target, eager = Target(of("llama"), execution="graphs"), Target(of("llama"), execution="eager", test=False)
    texts = prompts((60, 30, 20, 50))
    for each in (target, eager):
        mine = [list(text) for text in texts]
        each.open(mine)
        each.prefill(mine, first=0)
        each.compact([0, 1, 2])
    for step in range(WARM + 3):
        tokens = torch.tensor([[3 + step, 9], [5, 7], [40 + step, 2]])
        assert_same(target.score(TokenTree.from_chain(tokens)), eager.score(TokenTree.from_chain(tokens)))
        for each in (target, eager):
            each.commit(None, (1, 2, 0))
    assert target.backend.recordings.rows(3) == 4 and target.backend.recordings.replays
    again = [*texts[3], 9, 8]
    for each in (target, eager):
        each.open([again])
    assert target.lengths[3] == eager.lengths[3] == 50
    assert_same(target.prefill([again], first=3), eager.prefill([again], first=3))


@torch.inference_mode()
def test_filler_takes_the_end_of_a_row_that_is_gone_and_says_so(taped, monkeypatch):
    monkeypatch.setattr(graphs_module, "SPAN", 256)
    target = Target(of("llama"), execution="graphs")
    texts = prompts((250, 30, 20, 255))
    target.open([list(text) for text in texts])
    target.prefill(texts, first=0)
    target.compact([0, 1, 2])
    for _ in range(WARM + 1):
        target.score(TokenTree.from_chain(torch.tensor([[3, 4, 5]] * 3)))
    assert target.backend.recordings.replays and 200 <= target.cache.spoiled[3] <= 253
    again = [*texts[3], 9]
    target.open([again])
    plain = tiny()(input_ids=torch.tensor([again])).logits[:, -1]
    assert_same(target.prefill([again], first=3), plain)


@torch.inference_mode()
def test_logits_stay_what_they_were(taped):
    target = Target(of("llama"), execution="graphs")
    texts = prompts((20,))
    target.open(texts)
    target.prefill(texts, first=0)
    for _ in range(WARM):
        target.score(TokenTree.from_chain(torch.tensor([[3, 4, 5]])))
    held = target.score(TokenTree.from_chain(torch.tensor([[3, 4, 5]])))
    copy = held.clone()
    target.score(TokenTree.from_chain(torch.tensor([[9, 8, 7]])))
    assert target.backend.recordings.replays >= 2 and torch.equal(held, copy)


@torch.inference_mode()
def test_recordings_are_bounded_and_made_of_what_comes_up_again(taped, monkeypatch):
    monkeypatch.setattr(graphs_module, "MOST", 3)
    sizes = (1, 3, 6, 12, 20, 40)  # one of each bucket
    target, eager = Target(of("llama"), execution="graphs"), Target(of("llama"), execution="eager", test=False)
    texts = prompts((20, 13))
    for each in (target, eager):
        each.open(texts)
        each.prefill(texts, first=0)
    before = target.backend.recordings.captures
    for nodes in sizes:
        tree = TokenTree.from_chain(torch.arange(2 * nodes).view(2, nodes))
        target.score(tree)
    assert target.backend.recordings.captures == before  # each of them once
    for _ in range(WARM):
        for nodes in sizes:
            tree = TokenTree.from_chain(torch.arange(2 * nodes).view(2, nodes))
            assert_same(target.score(tree), eager.score(tree))
            assert len(target.backend.recordings) <= 3


@torch.inference_mode()
def test_chains_of_one_bucket(taped):
    """What filler was a round ago is a node now."""
    target, eager = Target(of("llama"), execution="graphs"), Target(of("llama"), execution="eager", test=False)
    texts = prompts((20, 13))
    for each in (target, eager):
        each.open(texts)
        each.prefill(texts, first=0)
    for nodes in (9, 9, 9, 9, 10, 9, 10, 9):
        tree = TokenTree.from_chain(torch.arange(3, 3 + 2 * nodes).view(2, nodes))
        assert_same(target.score(tree), eager.score(tree))
        for first, last in ((0, nodes - 8), (nodes - 8, nodes)):
            part = TokenTree.from_chain(tree.tokens[:, :last])
            assert_same(target.score(part, first=first), eager.score(part, first=first))
    assert target.backend.recordings.replays >= 8


@torch.inference_mode()
def test_a_recording_keeps_what_it_reads_alive(taped):
    """On a GPU it knows tensors by their address alone; a constant that leaves a cache would leave a hole."""
    drafter = DraftModel(perturbed(), execution="graphs")
    speculator = Speculator(tiny(), drafter, shape="chain(3)", execution="graphs")
    generate(speculator, repetitive((23,)), max_new_tokens=30, **SAMPLED)
    loops = [each for each in drafter.model.backend.recordings._kept.values() if isinstance(each.frame, LoopFrame)]
    storages = {each.untyped_storage()._cdata for loop in loops for each in loop.inputs}
    layer = drafter.model.cache.layers[0]
    cpu, two = torch.device("cpu"), chain_layout(2)
    for read in (
        static_depths(two, cpu), static_ancestors(two, cpu), _token_hashes(drafter.model.vocab_size, cpu), loops[0].frame.inputs,
        loops[0].frame.noise, layer.keys, layer.values, drafter.model.model.lm_head.weight, drafter.model.model.model.rotary_emb.inv_freq,
    ):  # fmt: skip
        assert read.untyped_storage()._cdata in storages


@pytest.mark.parametrize("owned", [False, True])
def test_auto_records_where_it_can(owned, taped, monkeypatch):
    """As on CUDA: a recorder is there and nothing packs weights."""
    monkeypatch.setattr(packing, "refusal", lambda *given: "its weights are on cuda")
    model = of("llama")
    target = Target(model, owned=owned)
    assert target.execution == "graphs" and "no report from a GPU" in target.reasons["flex"] and "packed" in target.reasons
    drafter = DraftModel(perturbed())
    drafter.bind(target)
    assert drafter.model.execution == "graphs"
    assert type(Target(model, execution="eager").backend) is Eager
    flexed = Target(model, attention="flex")
    assert flexed.reasons.get("flex") is None and flexed.reasons["graphs"] == "attention='flex' was asked for"
    xglm = Target(of("xglm"), owned=owned)
    assert type(xglm.backend) is Eager and "__bool__ would wait" in xglm.reasons["graphs"]


def test_auto_records_passes_over_pages(taped, monkeypatch):
    monkeypatch.setattr(packing, "refusal", lambda *given: "its weights are on cuda")
    monkeypatch.setattr(native, "refusal", lambda dtype: "there are none in this test")
    target = Target(of("llama"), cache_memory="64MiB")
    assert target.execution == "graphs" and isinstance(target.cache, PagedCache) and "recorded passes" in target.reasons["paged_attention"]
    xglm = Target(of("xglm"), cache_memory="64MiB")
    assert type(xglm.backend) is Eager and isinstance(xglm.cache, PagedCache) and "not recorded" in xglm.reasons["paged_attention"]


class Told(FixedPlanner):
    """Notes which rounds record something."""

    learns = True

    def __init__(self, shape):
        super().__init__(shape)
        self.settling = []

    def observe(self, rows, done):
        self.settling.append(done.settling)


@pytest.mark.parametrize("several", [False, True])
def test_the_planner_is_told_of_rounds_that_record_something(several, taped):
    """Those of the target alone, and of a draft model alone, in a list too; no others."""
    for recorded in ("target", "draft"):
        how = {name: "graphs" if name == recorded else "eager" for name in ("target", "draft")}
        draft = DraftModel(perturbed(), execution=how["draft"])
        drafter = Several([draft]) if several else draft
        speculator = Speculator(tiny(), drafter, shape="chain(3)", execution=how["target"])
        speculator.planner = told = Told(TreeShape.chain(3))
        for _ in range(2):
            before, told.settling = told.settling, []
            generate(speculator, repetitive((23,)), max_new_tokens=40, min_new_tokens=40)
        assert any(before) and not all(before) and not any(told.settling[:-3]), (recorded, before, told.settling)


class Full(Tape):
    """A device without room for recordings."""

    tries = 0

    def capture(self, run):
        type(self).tries += 1
        raise torch.OutOfMemoryError


def test_a_device_without_room_for_a_recording_makes_eager_passes(taped, monkeypatch):
    speculator = Speculator(tiny(), "prompt-lookup", shape="chain(3)", execution="graphs")
    monkeypatch.setattr(speculator.target.backend.recordings, "recorder", Full())
    rows = repetitive((23, 9, 15))
    assert generate(speculator, rows, max_new_tokens=30) == [alone(tiny(), row, max_new_tokens=30) for row in rows]
    tried, settling = Full.tries, speculator.target.backend.settling
    assert tried > 0 and speculator.target.reasons.get("graphs") is None
    generate(speculator, rows, max_new_tokens=30)
    assert Full.tries <= 2 * tried and speculator.target.backend.settling - settling < settling


@pytest.mark.parametrize("drafter", ["layer-skip", "draft-verify"])
def test_layers_run_in_part_where_passes_are_recorded(drafter, taped):
    """By the model itself, which the self-speculating drafters need."""
    rows = repetitive((23, 9))
    speculator = Speculator(clone(tiny()), drafter, shape="chain(3)", execution="graphs")
    assert generate(speculator, rows, max_new_tokens=24) == [alone(tiny(), row, max_new_tokens=24) for row in rows]
    assert speculator.target.execution == "graphs"


# -- text ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "shape", "options"),
    nightly_but(
        [("gemma3_text", "product(2,2,1)", {}), ("gpt2", "dynamic(depth=3,k=2,total=5)", SAMPLED)],
        list(itertools.product(["llama", "gemma3_text", "gpt2"], SHAPES, [{}, SAMPLED])),
    ),
)
def test_text_is_that_of_eager_passes(family, shape, options, taped):
    rows = repetitive((23, 9, 15))
    texts = []
    for execution in ("graphs", "eager"):
        drafter = make_drafter("draft-model", family, execution=execution)
        speculator = Speculator(tiny(family), drafter, shape=shape, execution=execution, rule="match")
        texts.append(generate(speculator, rows, max_new_tokens=28, **options))
        if execution == "graphs":
            assert speculator.target.execution == drafter.model.execution == "graphs"
            assert speculator.target.backend.recordings.replays and drafter.model.backend.recordings.replays
            assert bool(drafter._loops[1].drafts) == (not shape.startswith("dynamic"))
    assert texts[0] == texts[1]
    if not options:
        assert texts[0] == [alone(tiny(family), row, max_new_tokens=28) for row in rows]


def test_rejected_branches_leave_nothing_behind(taped):
    rows = repetitive((23, 9, 15))
    texts = [row + alone(tiny(), row, max_new_tokens=40) for row in rows]
    speculator = Speculator(tiny(), Oracle(texts), shape="chain(4)", execution="graphs")
    assert generate(speculator, rows, max_new_tokens=40) == [text[len(row) :] for text, row in zip(texts, rows)]
    assert speculator.target.backend.recordings.replays >= 4


@pytest.mark.parametrize("shape", [pytest.param("chain(3)", marks=pytest.mark.nightly), "product(2,1,1)"])
def test_rows_that_join_and_leave(shape, taped):
    target = Target(tiny(), execution="graphs")
    drafter = DraftModel(perturbed(), execution="graphs")
    drafter.bind(target)
    session = Session(target, drafter, create("match"), proposal="keyed", planner=FixedPlanner(shape))
    texts, kept = prompts((24, 11, 17, 30, 9), seed=7), {}
    lengths = [60, 12, 33, 25, 40]
    slots = [session.add(text, parameters(length)) for text, length in zip(texts[:2], lengths)]
    for step in range(200):
        if step in (5, 9, 14):
            slots.append(session.add(texts[len(slots)], parameters(lengths[len(slots)])))
        for row in list(session.rows):
            kept[row.slot] = row
        if not session.live:
            break
        session.step()
    assert [kept[slot].ids[len(text) :] for slot, text in zip(slots, texts)] == [
        alone(tiny(), text, max_new_tokens=length) for text, length in zip(texts, lengths)
    ]
    assert target.backend.recordings.replays and drafter._loops[1].drafts and target.backend.recordings.refused is None


def parameters(length: int) -> RowParameters:
    return RowParameters(pipeline=Pipeline(), do_sample=False, max_new_tokens=length, seed=(0, 0), eos=frozenset(), criteria=())


@pytest.mark.nightly
def test_a_conversation_uses_the_prefix_again(taped):
    speculator = Speculator(tiny(), DraftModel(perturbed(), execution="graphs"), shape="chain(3)", execution="graphs")
    text = prompts((40,))[0]
    for _ in range(4):
        more = generate(speculator, [text], max_new_tokens=20)[0]
        assert more == alone(tiny(), text, max_new_tokens=20)
        text = text + more + [5, 9]


# -- drafts -------------------------------------------------------------------------------------------------------------


def rounds(monkeypatch, execution: str, shape: str, rule: str, siblings: str, options: dict) -> tuple[list[TokenTree], DraftModel]:
    """The trees of a whole run."""
    trees: list[TokenTree] = []
    drafter = DraftModel(perturbed(), siblings=siblings, execution=execution)
    speculator = Speculator(tiny(), drafter, shape=shape, rule=rule, execution="eager")
    real = drafter.draft
    monkeypatch.setattr(drafter, "draft", lambda request: trees.append(real(request)) or trees[-1])
    speculator.generate(**padded(repetitive((23, 9, 15))), pad_token_id=0, max_new_tokens=30, **options)
    return trees, drafter


@pytest.mark.parametrize(
    ("shape", "rule", "siblings", "options"),
    [
        pytest.param("chain(4)", "match", "auto", {}, marks=pytest.mark.nightly),
        pytest.param("chain(4)", "match", "keyed", SAMPLED, marks=pytest.mark.nightly),
        ("chain(4)", "rejection", "iid", SAMPLED),
        pytest.param("product(3,2,1)", "match", "auto", {}, marks=pytest.mark.nightly),
        pytest.param("product(3,2,1)", "match", "keyed", SAMPLED, marks=pytest.mark.nightly),
        ("product(2,2)", "traversal", "without-replacement", SAMPLED),
        pytest.param("product(2,2)", "multi-candidate", "iid", {**SAMPLED, "top_p": 0.8}, marks=pytest.mark.nightly),
        ("paths(0,1,0.0,0.1,1.0,0.0.0)", "match", "top-k", SAMPLED),
    ],
)
def test_a_replayed_draft_is_that_of_single_levels(shape, rule, siblings, options, taped, monkeypatch):
    trees, drafter = rounds(monkeypatch, "graphs", shape, rule, siblings, options)
    plain, _ = rounds(monkeypatch, "eager", shape, rule, siblings, options)
    assert drafter._loops[1].drafts >= 3 and drafter.model.backend.recordings.refused is None
    assert len(trees) == len(plain)
    for mine, wanted in zip(trees, plain):
        real = wanted.valid if wanted.valid is not None else torch.ones_like(wanted.tokens, dtype=torch.bool)
        seen = mine.valid if mine.valid is not None else torch.ones_like(mine.tokens, dtype=torch.bool)
        assert torch.equal(seen, real)
        assert torch.equal(mine.tokens[real], wanted.tokens[real])
        assert (mine.chain, mine.static_parents, mine.proposal, mine.pruned) == (
            wanted.chain,
            wanted.static_parents,
            wanted.proposal,
            wanted.pruned,
        )
        assert torch.equal(mine.parents, wanted.parents)
        assert (mine.q is None) == (wanted.q is None)
        if wanted.q is not None:
            torch.testing.assert_close(mine.q, wanted.q, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("drawn", [False, True])
@torch.inference_mode()
def test_a_chain_without_a_recording_is_cut_from_a_longer_one(drawn, taped):
    """As where a text ends. One that comes up again and again is recorded itself."""
    target, drafters = Target(tiny(), execution="eager"), [DraftModel(perturbed(), execution=each) for each in ("graphs", "eager")]
    rows = [Line(slot, list(text)) for slot, text in enumerate(prompts((30, 21), seed=3))]
    for drafter in drafters:
        drafter.bind(target)
        drafter.begin(rows)
    recordings, captures = drafters[0].model.backend.recordings, []
    lengths = [*[4] * (WARM + 1), *[2] * (SELDOM + WARM + 1), 4, 2, 3]
    for step, length in enumerate(lengths):
        before = recordings.settling
        mine, wanted = (drafter.draft(wish(rows, f"chain({length})", drawn=drawn)) for drafter in drafters)
        assert torch.equal(mine.tokens, wanted.tokens) and mine.nodes == length + 1
        assert (mine.q is None) == (wanted.q is None) == (not drawn)
        if drawn:
            torch.testing.assert_close(mine.q, wanted.q, atol=1e-5, rtol=1e-4)
        accepted = [step % (length + 1), 0]
        for row, kept in zip(rows, accepted):
            row.ids += [*mine.tokens[row.slot, 1 : kept + 1].tolist(), (5 * step + row.slot) % 120 + 3]
        for drafter, tree in zip(drafters, (mine, wanted)):
            drafter.observe(rows, Feedback(tree, accepted, None))
        captures.append(recordings.captures)
        assert recordings.settling > before or length == 4 or step > WARM + SELDOM, "the time of a longer chain passed for its own"
    assert captures[WARM] == captures[WARM + SELDOM] == captures[-1] - 1 and recordings.refused is None


class Line:
    """A row that only a drafter sees."""

    source = isolation = None

    def __init__(self, slot: int, ids: list[int]):
        self.slot, self.ids, self.capacity, self.prompt_length = slot, ids, 500, 1


def wish(rows: list[Line], shape: str, *, drawn: bool = False) -> DraftRequest:
    """Of the likeliest tokens, or of tokens that are ``drawn`` from q."""
    count, wanted, lengths = len(rows), TreeShape.parse(shape), [len(row.ids) for row in rows]
    noise = Noise(torch.tensor([7 + row.slot for row in rows]), torch.tensor(lengths) - 1) if drawn else None
    sampler = Sampler([Pipeline()] * count, [drawn] * count, lengths, noise, lambda: torch.zeros(0))
    how = ("iid", True) if drawn else ("deterministic", False)
    return DraftRequest(rows, wanted, wanted.depth, [wanted.depth] * count, *how, 128, torch.device("cpu"), sampler)


@pytest.mark.parametrize("shape", [pytest.param("chain(3)", marks=pytest.mark.nightly), "product(2,1)"])
@torch.inference_mode()
def test_a_draft_model_whose_rows_come_go_and_run_ahead(shape, taped):
    """Every round another number of tokens is committed, none of them drafted; a row leaves and one that begins like it joins."""
    texts = prompts((30, 21, 17, 60), seed=3)
    target = Target(tiny(), execution="eager")
    found: list[list[TokenTree]] = []
    for execution in ("graphs", "eager"):
        drafter = DraftModel(perturbed(), execution=execution)
        drafter.bind(target)
        rows, trees = [Line(slot, list(text)) for slot, text in enumerate(texts)], []
        drafter.begin(rows)
        for step in range(4 * WARM):
            request = wish(rows, shape)
            tree = drafter.draft(request)
            trees.append(tree)
            for row in rows:
                row.ids += [(5 * step + row.slot + each) % 120 + 3 for each in range(1 + (step * step + row.slot) % 5)]
            path = None if tree.chain else torch.zeros(len(rows), request.depth + 1, dtype=torch.long)
            drafter.observe(rows, Feedback(tree, [0] * len(rows), path))
            if step == WARM:
                drafter.end(rows[3:])
                gone = rows.pop()
            if step == 3 * WARM:
                rows.append(Line(9, [*gone.ids, 7, 8]))
                drafter.begin(rows[3:])
                drafter._open(rows, rows)
                assert drafter.model.lengths[3] >= len(gone.ids) - 6  # it had not seen the last round
        found.append(trees)
        assert execution == "eager" or drafter._loops[1].drafts >= 6
    for mine, wanted in zip(*found):
        assert torch.equal(mine.tokens, wanted.tokens)


WATCHED = list(itertools.product(["chain(3)", "product(2,2)"], ["keyed", "iid", "top-k"]))


class Waits(TorchFunctionMode):
    """Collects where a GPU would be waited for: values read by the host, and lists copied to a device from memory that is not pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in HOST_METHODS or (name in ("tensor", "as_tensor") and (kwargs or {}).get("device") not in (None, "cpu")):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("shape", "siblings"), nightly_but({("chain(3)", "keyed")}, [each for each in WATCHED if each[1] != "iid"]))
def test_a_replayed_draft_and_pass_wait_for_nothing(shape, siblings, taped, monkeypatch):
    drafter = DraftModel(perturbed(), siblings=siblings, execution="graphs")
    speculator = Speculator(tiny(), drafter, shape=shape, rule="match", execution="graphs")
    target, watched = speculator.target, []
    draft, score = drafter.draft, target.score

    def watch(call, count):
        def run(given):
            before = count()
            with Waits() as waits:
                found = call(given)
            if count() > before:  # it was replayed
                watched.append(waits.found)
            return found

        return run

    monkeypatch.setattr(drafter, "draft", watch(draft, lambda: drafter._loops[1].drafts))
    monkeypatch.setattr(target, "score", watch(score, lambda: target.backend.recordings.replays))
    generate(speculator, repetitive((23,)), max_new_tokens=60, **SAMPLED)
    assert len(watched) >= 10 and not any(watched), watched


@pytest.mark.parametrize(
    ("shape", "siblings"),
    nightly_but({("product(2,2)", "iid")}, WATCHED),
)
def test_no_round_copies_a_list_to_the_device_from_memory_that_is_not_pinned(shape, siblings, taped, monkeypatch):
    speculator = Speculator(tiny(), DraftModel(perturbed(), siblings=siblings, execution="graphs"), shape=shape, execution="graphs")
    rounds, step = [], Session.step

    def watched_step(session, **options):
        ending = min((row.remaining for row in session.rows), default=0) < 5  # shapes that are cut short are made once each
        with Waits() as waits:
            found = step(session, **options)
        rounds.append([name for name in waits.found if name not in HOST_METHODS and not ending])
        return found

    monkeypatch.setattr(Session, "step", watched_step)
    generate(speculator, repetitive((23, 9)), max_new_tokens=45, **SAMPLED)
    assert len(rounds) >= 10 and not any(rounds[2 * WARM :]), rounds


def test_the_planner_times_passes_that_have_settled(taped, monkeypatch):
    """Neither those that are made while a recording is tried, nor the recording itself."""
    monkeypatch.setattr(costs, "REPEATS", 7)
    speculator = Speculator(tiny(), DraftModel(perturbed(), execution="graphs"), execution="graphs")
    target, drafter = speculator.target, speculator.drafter
    run, replayed = Measurement(target, drafter, 2, TreeShape.chain(4), time.perf_counter), []
    timed = run.timed

    def watch(name, call):
        before = target.backend.recordings.replays, drafter._loops[1].drafts
        spent = timed(name, call)
        kept.setdefault(name, []).append((target.backend.recordings.replays, drafter._loops[1].drafts) != before)
        return spent

    kept = {}
    run.timed = watch
    with torch.inference_mode():
        run.passes(time.perf_counter() + 60)
        run.drafts(time.perf_counter() + 60)
    for name, times in run.times.items():
        if name[0] in ("target", "longer", "one", "deep"):
            replayed += kept[name][-len(times) :]
    assert len(replayed) >= 30 and all(replayed), kept


def test_what_the_host_must_know_is_drafted_level_by_level(taped):
    drafter = DraftModel(perturbed(), execution="graphs")
    speculator = Speculator(tiny(), drafter, shape="chain(3)", execution="graphs")
    rows = repetitive((23, 9))
    for options in ({"repetition_penalty": 1.3}, {"sequence_bias": [[[7], 2.0]]}):
        expected = [alone(tiny(), row, max_new_tokens=24, **options) for row in rows]
        assert generate(speculator, rows, max_new_tokens=24, **options) == expected
    assert drafter._loops[1].drafts == 0 and drafter.model.backend.recordings.replays


def test_a_draft_with_a_smaller_vocabulary(taped):
    target = clone(tiny())
    target.resize_token_embeddings(144)
    drafter = DraftModel(perturbed(), execution="graphs")
    speculator = Speculator(target, drafter, shape="chain(3)", execution="graphs")
    row = repetitive((23,))[0]
    assert generate(speculator, [row], max_new_tokens=30) == [alone(target, row, max_new_tokens=30)]
    assert drafter._loops[1].drafts


# -- what goes wrong ------------------------------------------------------------------------------------------------------


class Failing(Tape):
    """Fails at its n-th recording."""

    def __init__(self, last: int):
        self.left = last

    def capture(self, run):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("operation not permitted when stream is capturing\nand a page of advice")
        return super().capture(run)


def test_a_recording_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(recorder, "recorder_for", lambda device: Failing(0))
    with pytest.raises(ConfigurationError, match=r"cannot be recorded: .*not permitted when stream is capturing; use execution='auto'$"):
        Target(of("gpt2"), execution="graphs")


@pytest.mark.parametrize("last", [pytest.param(3, marks=pytest.mark.nightly), 4])
def test_a_recording_that_fails_later_loses_nothing(last, monkeypatch):
    monkeypatch.setattr(recorder, "recorder_for", lambda device: Failing(last))
    rows = repetitive((23, 9, 15))
    drafter = DraftModel(perturbed("gpt2"), execution="graphs")
    speculator = Speculator(tiny("gpt2"), drafter, shape="chain(3)", execution="graphs")
    assert generate(speculator, rows, max_new_tokens=30) == [alone(tiny("gpt2"), row, max_new_tokens=30) for row in rows]
    why = [speculator.target.reasons.get("graphs"), drafter.model.reasons.get("graphs")]
    assert any("not permitted" in (each or "") for each in why)
    assert (speculator.target.execution == "eager") == (why[0] is not None)


class Stale(Tape):
    """Replays with the slots and tokens of the recording, as if they had been baked in, and so overwrites what was committed."""

    def __init__(self, good: int):
        self.good = good

    def capture(self, run):
        self.good -= 1
        if self.good >= 0:
            return super().capture(run)
        frame = run.__self__
        inputs = [each for each in (vars(frame).values()) if isinstance(each, torch.Tensor)]
        before = [each.clone() for each in inputs]
        replay, outputs = super().capture(run)

        def stale():
            now = [each.clone() for each in inputs]
            for each, old in zip(inputs, before):
                each.copy_(old)
            replay()
            for each, new in zip(inputs, now):
                each.copy_(new)

        return stale, outputs


@pytest.mark.parametrize("good", [0, pytest.param(3, marks=pytest.mark.nightly), 4])
def test_a_replay_of_something_else_is_noticed_and_loses_nothing(good, monkeypatch):
    monkeypatch.setattr(recorder, "recorder_for", lambda device: Stale(good))
    if good == 0:
        with pytest.raises(ConfigurationError, match="differ from those of an eager pass"):
            Target(of("gpt2"), execution="graphs")
        return
    rows = repetitive((23, 9, 15))
    drafter = DraftModel(perturbed("gpt2"), execution="graphs")
    speculator = Speculator(tiny("gpt2"), drafter, shape="chain(3)", execution="graphs")
    assert generate(speculator, rows, max_new_tokens=30) == [alone(tiny("gpt2"), row, max_new_tokens=30) for row in rows]
    why = [speculator.target.reasons.get("graphs"), drafter.model.reasons.get("graphs")]
    assert any(why) and all("differ" in each or "recorded draft" in each for each in why if each)


@torch.inference_mode()
def test_what_a_wrong_replay_overwrote_is_read_again(monkeypatch):
    """The replay writes to slots that tokens were committed to since. Those of the test at load and of single tokens are right."""
    monkeypatch.setattr(recorder, "recorder_for", lambda device: Stale(4))
    target, eager = Target(of("gpt2"), execution="graphs"), Target(of("gpt2"), execution="eager", test=False)
    text = prompts((20,))
    for each in (target, eager):
        each.open([list(text[0])])
        each.prefill(text, first=0)
    for step in range(5):
        chain = TokenTree.from_chain(torch.arange(4)[None] * 7 + 11 * step)
        assert_same(target.score(chain), eager.score(chain))
        for each in (target, eager):
            each.commit(None, (1,))
            each._texts.live[0].append(11 * step)
        for more in (50, 60, 70):
            token = torch.tensor([more + step])
            assert_same(target.advance(token), eager.advance(token))
            for each in (target, eager):
                each._texts.live[0].append(more + step)
    assert "differ" in target.reasons.get("graphs")


def test_hooks_see_every_pass(taped):
    model, calls = clone(tiny()), []
    speculator = Speculator(model, "prompt-lookup", shape="chain(3)", execution="graphs")
    rows = repetitive((23,))
    generate(speculator, rows, max_new_tokens=20)
    assert speculator.target.backend.recordings.replays
    handle = model.model.layers[0].register_forward_hook(lambda *given: calls.append(1))
    out = speculator.generate(**padded(rows), pad_token_id=0, max_new_tokens=20)
    assert len(calls) == out.stats.target_passes
    handle.remove()
    before = speculator.target.backend.recordings.replays
    assert added(speculator.generate(**padded(rows), pad_token_id=0, max_new_tokens=20), len(rows[0])) == added(out, len(rows[0]))
    assert speculator.target.backend.recordings.replays > before


def test_weights_that_were_replaced_are_used(taped):
    model = clone(tiny())
    speculator = Speculator(model, "prompt-lookup", shape="chain(3)", execution="graphs")
    rows = repetitive((23,))
    generate(speculator, rows, max_new_tokens=20)
    for layer, other in zip(model.model.layers, perturbed().model.layers):
        layer.mlp.down_proj.weight = torch.nn.Parameter(other.mlp.down_proj.weight.clone() * 2)
    assert generate(speculator, rows, max_new_tokens=20) == [alone(model, rows[0], max_new_tokens=20)]
    assert speculator.target.backend.recordings.refused is None


def test_release_gives_the_recordings_back(taped):
    speculator = Speculator(tiny(), "prompt-lookup", shape="chain(3)", execution="graphs")
    generate(speculator, repetitive((23,)), max_new_tokens=20)
    assert len(speculator.target.backend.recordings)
    speculator.target.release()
    assert not len(speculator.target.backend.recordings)
    assert generate(speculator, repetitive((23,)), max_new_tokens=20) == [alone(tiny(), repetitive((23,))[0], max_new_tokens=20)]
    speculator.close()
    assert not len(speculator.target.backend.recordings)


def test_what_can_not_be_recorded_says_why(taped, monkeypatch):
    def refused(model, why):
        with pytest.raises(ConfigurationError, match=rf"cannot be recorded: .*{why}.*use execution='auto'"):
            Target(model, execution="graphs")
        target = Target(model)
        assert target.execution != "graphs" and why in target.reasons["graphs"]

    refused(of("qwen3_next"), "recurrent state")
    refused(of("gpt_neo"), "cache slots")
    with pytest.raises(ConfigurationError, match=r"cannot attend through FlexAttention: .*execution='graphs' was asked for"):
        Target(of("llama"), execution="graphs", attention="flex")
    hooked = clone(tiny())
    hooked.model.layers[0].register_forward_hook(lambda *given: None)
    refused(hooked, "hooks look at its passes")
    wrapped = clone(tiny())
    wrapped.model.layers[0].forward = wrapped.model.layers[0].forward
    refused(wrapped, "overrides of their own")
    spread = clone(tiny())
    spread.lm_head._hf_hook = object()
    refused(spread, "several devices")
    monkeypatch.undo()
    refused(of("llama"), "recorded on a CUDA device, and the model is on cpu")
    assert Target(of("llama"), execution="eager").reasons.get("graphs") == "execution='eager' was asked for"


def test_outside_inference_mode_passes_are_eager(taped):
    target = Target(clone(tiny()), execution="graphs")
    text = prompts((20,))
    with torch.inference_mode():
        target.open(text)
        target.prefill(text, first=0)
    for _ in range(WARM + 1):
        with torch.no_grad():
            target.backend.cache.enter(target.backend.cache.window or window_of(target))
            assert not target.backend.recordings.ready
    assert target.backend.recordings.replays == 0


def window_of(target):
    from foredraft.target import Window

    return Window(0, 1, tuple(target.lengths), 1)


# -- planted faults: each of these has to be noticed ----------------------------------------------------------------------


def bake_positions(monkeypatch):
    real = StaticPass.__call__
    held: dict[tuple, torch.Tensor] = {}

    def call(self, tokens, roots, *others):
        numbers = (
            [int(each) for each in roots.flatten()[:1]] if not torch.utils._python_dispatch._get_current_dispatch_mode() else held["n"]
        )
        held["n"] = numbers
        return real(self, tokens, torch.zeros_like(roots) + numbers[0], *others)

    monkeypatch.setattr(StaticPass, "__call__", call)


def forget_the_tree(monkeypatch):
    monkeypatch.setattr(PassFrame, "_shape", lambda self, tree, window: None)


def write_nothing(monkeypatch):
    def update(self, keys, values, index, *args, **kwargs):
        layer, rows = self.layers[index], len(self._slots)
        return layer.keys[:rows, :, : self._span], layer.values[:rows, :, : self._span]

    monkeypatch.setattr(SlotCache, "update", update)


def forget_the_tokens(monkeypatch):
    real = PassFrame.load

    def load(self, tree, window, tokens):
        real(self, tree, window, tokens)
        self.tokens.zero_()

    monkeypatch.setattr(PassFrame, "load", load)


@pytest.mark.parametrize("fault", [bake_positions, forget_the_tree, write_nothing, forget_the_tokens])
def test_planted_faults_are_found_at_load(fault, taped, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(ConfigurationError, match="differ from those of an eager pass"):
        Target(of("llama"), execution="graphs")


def test_only_the_thread_that_records_must_not_wait(monkeypatch):
    """Torch has one mode for the process; other threads go on generating, and what else is warned of is shown."""
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def wait():
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    def record():
        with recorder.no_waiting():
            other = threading.Thread(target=wait)
            other.start()
            other.join()
            warnings.warn("something else", stacklevel=1)

    with pytest.warns(UserWarning, match="something else"):
        record()
    assert modes == ["default", "warn", "default"]
    with pytest.raises(RuntimeError, match="synchronizing"), recorder.no_waiting():
        wait()
    assert modes[-1] == "default"


# -- on a GPU -------------------------------------------------------------------------------------------------------------


@cuda
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "mistral"])
def test_on_a_gpu_passes_are_those_of_the_model(family, dtype):
    model = clone(tiny(family)).to("cuda", dtype)
    target, eager = Target(model, execution="graphs"), Target(model, execution="eager", test=False, attention="model")
    assert target.execution == "graphs"
    assert_alike(target, eager, tolerance=1e-3 if dtype == torch.float32 else 8e-2)
    assert target.backend.recordings.refused is None and target.backend.recordings.replays


@cuda
@pytest.mark.cuda
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", ["chain(4)", "product(2,2,1)"])
def test_on_a_gpu_text_is_that_of_eager_passes(shape, options):
    rows, texts = repetitive((23, 9, 15)), []
    for execution in ("graphs", "eager"):
        drafter = DraftModel(clone(perturbed()).cuda(), execution=execution)
        speculator = Speculator(clone(tiny()).cuda(), drafter, shape=shape, execution=execution, rule="match")
        batch = {name: tensor.cuda() for name, tensor in padded(rows).items()}
        output = speculator.generate(**batch, pad_token_id=0, max_new_tokens=40, **options)
        texts.append(added(output, max(map(len, rows))))
        if execution == "graphs":
            assert speculator.target.execution == "graphs", speculator.target.reasons.get("graphs")
            assert speculator.target.backend.recordings.replays and drafter._loops[1].drafts
    assert texts[0] == texts[1]


@cuda
@pytest.mark.cuda
@pytest.mark.parametrize("shape", ["chain(4)", "product(2,2,1)"])
def test_on_a_gpu_draft_and_pass_do_not_wait(shape):
    """The whole of draft and score with waiting forbidden; a round waits in its verdict alone."""
    target = Target(clone(tiny()).cuda(), execution="graphs")
    drafter = DraftModel(clone(perturbed()).cuda(), execution="graphs")
    drafter.bind(target)
    session = Session(target, drafter, create("match"), proposal="keyed", planner=FixedPlanner(shape))
    session.add(prompts((20,))[0], parameters(200))
    for _ in range(4 * WARM):
        session.step()
    replays, drafts = target.backend.recordings.replays, drafter._loops[1].drafts
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            session.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert (target.backend.recordings.replays, drafter._loops[1].drafts) == (replays + 1, drafts + 1)
    found = [str(each.message) for each in waits if "synchroniz" in str(each.message)]
    assert len(found) <= 1, found  # the verdict
