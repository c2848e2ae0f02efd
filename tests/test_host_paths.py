"""What is done on the host where calls on small tensors cost more than their work, against the same in tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, build
from cover import by_turns
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.masking_utils import create_masks_for_generate

from foredraft import outcome
from foredraft.drafters import growth
from foredraft.drafters.base import DraftRequest
from foredraft.logits.noise import Noise
from foredraft.logits.processors import Pipeline
from foredraft.logits.sampler import Sampler
from foredraft.models import masks
from foredraft.models.cache import TreeCache, Window
from foredraft.models.masks import MaskBuilder, MaskInputs
from foredraft.outcome import outcome_of
from foredraft.shapes import DynamicShape, TreeShape
from foredraft.tree import TokenTree, reach, reach_on_host
from foredraft.verification import create
from foredraft.verification.match import Greedy, Match

VOCAB = 5
often = settings(max_examples=100, deadline=None)


@st.composite
def trees(draw: st.DrawFn, *, faulty: bool = False, most: int = 9) -> TokenTree:
    """Trees with filler and equal siblings; ``faulty`` ones may have tokens that are none, parents that make no tree and nodes below
    filler."""
    rows, nodes = draw(st.integers(1, 3)), draw(st.integers(1, most))
    low, high = (-1, VOCAB) if faulty and draw(st.booleans()) else (0, VOCAB - 1)
    tokens = [draw(st.lists(st.integers(low, high), min_size=nodes, max_size=nodes)) for _ in range(rows)]
    if draw(st.booleans()):
        parents = [[-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))]] * rows
    else:
        parents = [[-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes))] for _ in range(rows)]
    layout = tuple(parents[0]) if parents.count(parents[0]) == rows and draw(st.booleans()) else None
    valid = None
    if draw(st.booleans()):
        valid = torch.ones(rows, nodes, dtype=torch.bool)
        for row in range(rows):
            for node in range(1, nodes):
                valid[row, node] = draw(st.booleans()) and bool(faulty or valid[row, parents[row][node]])
    given_parents = torch.tensor(parents)
    if faulty and draw(st.booleans()):
        given_parents[draw(st.integers(0, rows - 1)), draw(st.integers(0, nodes - 1))] = draw(
            st.integers(-2, nodes if layout is None else nodes - 1)
        )
    if layout is None and draw(st.booleans()):
        given_parents = (torch.arange(nodes) - 1).expand(rows, -1)
        prefix = None if valid is None else valid.long().cumprod(1).bool()
        return TokenTree(torch.tensor(tokens), given_parents, valid if faulty else prefix, chain=True)
    return TokenTree(torch.tensor(tokens), given_parents, valid, static_parents=layout)


def afresh(tree: TokenTree) -> TokenTree:
    """The same tree, of which nothing is known yet, and will not be on the host."""
    copy = replace(tree)
    copy.__dict__.update(parent_lists=None, depth_lists=None, sound=False)
    return copy


# -- trees ------------------------------------------------------------------------------------------------------------------


@often
@given(trees())
def test_ancestors_and_depths(tree: TokenTree):
    known = tree.parents.tolist()
    assert torch.equal(reach_on_host(known), reach(tree.parents))
    assert torch.equal(tree.ancestors, afresh(tree).ancestors) and torch.equal(tree.depths, afresh(tree).depths)
    assert tree.depths.dtype == torch.long


@often
@given(trees(faulty=True))
def test_what_is_malformed(tree: TokenTree):
    wrong = afresh(tree).malformed
    assert torch.equal(tree.malformed, wrong)
    assert tree.known_well_formed == (not bool(wrong.any()) and tree.parent_lists is not None)
    assert tree.known_well_formed or bool(wrong.any())
    assert torch.equal(tree.with_safe_parents().parents, afresh(tree).with_safe_parents().parents)


@often
@given(trees(), st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_what_lies_within_limits(tree: TokenTree, limits: list[int]):
    ours, theirs = tree.truncate(limits[: tree.rows]), afresh(tree).truncate(limits[: tree.rows])
    everything = torch.ones_like(tree.tokens, dtype=torch.bool)
    assert torch.equal(everything if ours.valid is None else ours.valid, everything if theirs.valid is None else theirs.valid)


# -- verdicts ---------------------------------------------------------------------------------------------------------------


WARPERS = [TemperatureLogitsWarper(1.3), TopKLogitsWarper(3), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)]


def sampler_of(rows: int, sampled: Sequence[bool] = (False,) * 3, seed: int = 0, *, warped: bool = False) -> Sampler:
    pipeline = Pipeline.alone(WARPERS if warped else [], prompt_length=3)
    noise = Noise(torch.arange(rows) + seed, torch.arange(rows) + 2) if any(sampled[:rows]) else None
    return Sampler([pipeline] * rows, list(sampled[:rows]), [3] * rows, noise, lambda: torch.zeros(1, 1))


def on_host(tree: TokenTree, logits: Tensor) -> outcome.Outcome | None:
    return outcome.on_host(tree, Greedy(logits), VOCAB)


def in_tensors(tree: TokenTree, logits: Tensor, monkeypatch: pytest.MonkeyPatch, sampler: Sampler | None = None) -> outcome.Outcome:
    with monkeypatch.context() as patched:
        patched.setattr(outcome, "on_host", lambda *_: None)
        return outcome.decide(Match(), afresh(tree), logits, sampler or sampler_of(tree.rows))


def assert_judged_alike(ours: outcome.Outcome, theirs: outcome.Outcome) -> None:
    assert len(ours.rows) == len(theirs.rows) and (ours.path is None) == (theirs.path is None)
    assert ours.path is None or (torch.equal(ours.path, theirs.path) and ours.path.dtype == theirs.path.dtype)
    for mine, other in zip(ours.rows, theirs.rows):
        assert (mine.outside, mine.broken, list(mine.path)) == (other.outside, other.broken, list(other.path))
        assert (list(mine.tokens), list(mine.drafted)) == (list(other.tokens), list(other.drafted))
        if not mine.outside:  # with a token that is none the round ends, whatever was accepted
            assert (mine.accepted, mine.bonus) == (other.accepted, other.bonus)
            assert any(mine.faults[: mine.accepted + 1]) == any(other.faults[: other.accepted + 1])


@often
@given(trees() | trees() | trees(faulty=True), st.data())
def test_a_greedy_walk(tree: TokenTree, data: st.DataObject):
    """Logits of few values, so that there are ties, and now and then one that nothing can be chosen from."""
    odd = data.draw(st.sampled_from([None, None, float("nan"), float("inf"), float("-inf")]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 20)))
    logits = torch.randint(0, 4, (tree.rows, tree.nodes, VOCAB), generator=generator).to(
        data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    )
    if odd is not None:
        logits[torch.rand(logits.shape[:2], generator=generator) < 0.3] = odd
    monkeypatch = pytest.MonkeyPatch()
    theirs = in_tensors(tree, logits, monkeypatch)
    ours = on_host(tree, logits) if tree.known_well_formed else None
    if ours is None:
        at_fault = any(line.broken or line.outside or any(line.faults) for line in theirs.rows)
        assert at_fault or odd is not None
    else:
        assert_judged_alike(ours, theirs)
        assert_judged_alike(outcome.decide(Match(), tree, logits, sampler_of(tree.rows)), theirs)


@often
@given(trees() | trees() | trees(faulty=True), st.lists(st.booleans(), min_size=3, max_size=3), st.data())
def test_a_sampled_walk(tree: TokenTree, sampled: list[bool], data: st.DataObject):
    """Some rows may be greedy. Probabilities are steep, so that choices are among the drafted tokens often enough."""
    odd = data.draw(st.sampled_from([None, None, float("nan"), float("inf"), float("-inf")]))
    seed = data.draw(st.integers(0, 1 << 20))
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randint(0, 4, (tree.rows, tree.nodes, VOCAB), generator=generator)
    if odd is not None:
        logits[torch.rand(logits.shape[:2], generator=generator) < 0.3] = odd
    sampler, monkeypatch = sampler_of(tree.rows, sampled, seed, warped=data.draw(st.booleans())), pytest.MonkeyPatch()
    theirs = in_tensors(tree, logits, monkeypatch, sampler)
    with monkeypatch.context() as patched:
        quick = []
        patched.setattr(outcome, "outcome_of", lambda *given: quick.append(outcome_of(*given)) or quick[-1])
        ours = outcome.decide(Match(), tree, logits, sampler)
    assert_judged_alike(ours, theirs)
    at_fault = any(line.broken or line.outside or any(line.faults) for line in theirs.rows)
    assert any(each is ours for each in quick) or at_fault or odd is not None


@often
@given(trees() | trees(faulty=True), st.sampled_from(["rejection", "block", "multi-candidate", "traversal"]), st.data())
def test_a_verdict_of_a_rule_that_compares_with_q(tree: TokenTree, name: str, data: st.DataObject):
    """Now and then a q is no distribution, which only counts where something was drafted from it."""
    rule, seed = create(name), data.draw(st.integers(0, 1 << 20))
    assume(tree.chain or not rule.chains_only)
    generator = torch.Generator().manual_seed(seed)
    q = torch.softmax(torch.randn(tree.rows, tree.nodes, VOCAB, generator=generator), -1)
    if spoilt := data.draw(st.booleans()):
        q[torch.rand(q.shape[:2], generator=generator) < 0.2] *= 1.5
    tree = replace(tree, q=q)
    logits = torch.randn(tree.rows, tree.nodes, VOCAB, generator=generator)
    sampler = sampler_of(tree.rows, (True,) * 3, seed)
    theirs = outcome.decide(rule, afresh(tree), logits, sampler)
    with pytest.MonkeyPatch().context() as patched:
        quick = []
        patched.setattr(outcome, "outcome_of", lambda *given: quick.append(outcome_of(*given)) or quick[-1])
        ours = outcome.decide(rule, tree, logits, sampler)
    for mine, other in zip(ours.rows, theirs.rows, strict=True):
        assert (mine.outside, mine.broken, list(mine.drafted)) == (other.outside, other.broken, list(other.drafted))
        assert mine.outside or mine.broken or (mine.accepted, mine.bonus) == (other.accepted, other.bonus)
        kept = min(mine.accepted, other.accepted) + 1
        assert list(mine.path[:kept]) == list(other.path[:kept]) and list(mine.tokens[:kept]) == list(other.tokens[:kept])
    at_fault = any(line.broken or line.outside for line in theirs.rows)
    assert any(each is ours for each in quick) or at_fault
    assert spoilt or not any(line.broken for line in theirs.rows) or not tree.known_well_formed


def test_of_equal_siblings_the_one_that_leads_deeper_is_walked(monkeypatch: pytest.MonkeyPatch):
    tree = TokenTree(torch.tensor([[0, 2, 2, 3]]), torch.tensor([[-1, 0, 0, 2]]))
    logits = torch.zeros(1, 4, VOCAB)
    logits[0, torch.arange(4), torch.tensor([2, 3, 3, 1])] = 1.0
    ours = on_host(tree, logits)
    assert ours is not None and ours.rows[0].accepted == 2 and list(ours.rows[0].path)[:3] == [0, 2, 3]
    assert_judged_alike(ours, in_tensors(tree, logits, monkeypatch))


@pytest.mark.parametrize(("valid", "node"), [(None, 1), ([True, True, True], 1), ([True, False, True], 2), ([True, False, False], 0)])
def test_of_equal_leaves_the_first_that_is_no_filler_is_kept(valid: list[bool] | None, node: int, monkeypatch: pytest.MonkeyPatch):
    tree = TokenTree(torch.tensor([[0, 2, 2]]), torch.tensor([[-1, 0, 0]]), None if valid is None else torch.tensor([valid]))
    logits = torch.zeros(1, 3, VOCAB)
    logits[0, torch.arange(3), torch.tensor([2, 3, 4])] = 1.0
    ours = on_host(tree, logits)
    assert ours is not None and ours.rows[0].bonus == 2 + node and list(ours.rows[0].path)[ours.rows[0].accepted] == node
    assert_judged_alike(ours, in_tensors(tree, logits, monkeypatch))


def test_only_nodes_on_the_way_are_read():
    tree = TokenTree(torch.tensor([[0, 1, 2, 3]]), torch.tensor([[-1, 0, 0, 1]]))
    logits = torch.full((1, 4, VOCAB), float("nan"))
    logits[0, 0], logits[0, 2] = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])
    judged = on_host(tree, logits)
    assert judged is not None and (judged.rows[0].accepted, judged.rows[0].bonus) == (1, 4)
    logits[0, 2, 0] = float("nan")
    assert on_host(tree, logits) is None


# -- growth -----------------------------------------------------------------------------------------------------------------


class Row:
    def __init__(self, root: int, slot: int):
        self.ids, self.slot, self.prompt_length, self.capacity = [0, 1, root], slot, 1, 500


def request_of(roots: list[int], shape: TreeShape, proposal: Any, limits: list[int]) -> DraftRequest:
    rows = len(roots)
    noise = Noise(torch.arange(rows) + 7, torch.full((rows,), 2))
    sampler = Sampler([Pipeline()] * rows, [proposal != "deterministic"] * rows, [3] * rows, noise, lambda: torch.zeros(1, 1))
    drafted = [Row(root, slot) for slot, root in enumerate(roots)]
    return DraftRequest(drafted, shape, shape.depth, limits, proposal, False, VOCAB, torch.device("cpu"), sampler)


def expanding(seed: int, spread: float):
    """Logits that are a function of the text down to a node, in steps, so that many are equal, and some impossible."""

    def after(text: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, text)) % (1 << 31))
        steps = torch.randint(-1, 4, (VOCAB,), generator=generator).float()
        return torch.where(steps < 0, float("-inf"), steps * spread)

    asked: list[list[list[int]]] = []

    def expand(tree: TokenTree, first: int) -> Tensor:
        tree.check(VOCAB)
        asked.append(tree.tokens.tolist())
        texts = [[tuple(tree.tokens[row, tree.path(row, node)].tolist()) for node in range(first, tree.nodes)] for row in range(tree.rows)]
        return torch.stack([torch.stack([after(text) for text in row]) for row in texts])

    return expand, asked


def proposed(grown: growth.Growth, row: int) -> list[tuple[list[int], int]]:
    """Of each node of a row that is no filler, in order, its text and its number in the drafter's own tree."""
    tree, own = grown.tree, grown.own
    assert own is not None
    real = [node for node in range(tree.nodes) if tree.valid is None or bool(tree.valid[row, node])]
    return [(tree.tokens[row, tree.path(row, node)].tolist(), int(own[row, node])) for node in real]


@often
@given(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3),
    st.sampled_from(
        ["dynamic(depth=4,k=3,total=9)", "dynamic(depth=3,k=5,total=20)", "dynamic(depth=5,k=1,total=4)", "opt(total=7,depth=5,delta=0.2)"]
    ),
    st.sampled_from(["deterministic", "keyed", "iid", "without-replacement"]),
    st.lists(st.integers(1, 5), min_size=3, max_size=3),
    st.integers(0, 1 << 20),
    st.sampled_from([0.0, 0.7, 3.0]),
)
def test_dynamic_growth(roots: list[int], text: str, proposal: str, limits: list[int], seed: int, spread: float):
    shape = TreeShape.parse(text)
    assert isinstance(shape, DynamicShape)
    request = request_of(roots, shape, proposal, limits[: len(roots)])
    expand, asked = expanding(seed, spread)
    grown = growth.grow(request, expand)
    assert grown.seen == len(asked[-1][0])
    for row in range(len(roots)):
        for text, number in proposed(grown, row):  # what the drafter's model saw under a node's number is the node
            assert number == growth.UNSEEN or asked[-1][row][number] == text[-1]
    assert grown.tree.tokens.dtype == grown.tree.parents.dtype == torch.long
    assert (grown.tree.proposal, grown.tree.pruned) == (proposal, True)
    assert grown.tree.parent_lists == grown.tree.parents.tolist()
    grown.tree.check(VOCAB)


# -- masks ------------------------------------------------------------------------------------------------------------------


def spelled_out(tree: TokenTree, window: Window) -> Tensor:
    """``[R, N, W]`` what each node sees, slot by slot."""
    seen = torch.zeros(tree.rows, window.nodes, window.width, dtype=torch.bool)
    for row, start in enumerate(window.starts):
        for node in range(window.nodes):
            path = tree.path(row, window.before + node)
            for slot in range(window.width):
                seen[row, node, slot] = slot < start - window.before or slot - (start - window.before) in path
    return seen


@st.composite
def passes(draw: st.DrawFn) -> tuple[TokenTree, Window]:
    tree = draw(trees())
    before = draw(st.integers(0, tree.nodes - 1))
    starts = draw(st.lists(st.integers(1, 20), min_size=tree.rows, max_size=tree.rows))
    if draw(st.booleans()):
        starts = starts[:1] * tree.rows
    return tree, Window(0, tree.rows, tuple(start + before for start in starts), tree.nodes - before, before)


def positions_of(tree: TokenTree, window: Window) -> Tensor:
    return torch.tensor(window.starts)[:, None] - window.before + tree.depths


@often
@given(passes())
def test_what_is_visible(drawn: tuple[TokenTree, Window]):
    tree, window = drawn
    assert torch.equal(MaskInputs(tree, window, positions_of(tree, window)).visible, spelled_out(tree, window))


@lru_cache(maxsize=64)
def config_of(name: str) -> Any:
    return build(name, ARCHITECTURES[name].implementations[-1]).config.get_text_config()


@pytest.mark.parametrize("name", by_turns([name for name, entry in ARCHITECTURES.items() if entry.support == "tree"], 0))
@settings(max_examples=5, deadline=None)
@given(drawn=passes(), cut=st.sampled_from([None, 0, 1, 3]))
def test_full_attention_needs_no_mask_functions(name: str, drawn: tuple[TokenTree, Window], cut: int | None):
    """With filler kept inside a small context too, where several nodes share a position."""
    tree, window = drawn
    positions = positions_of(tree, window)
    if cut is not None:
        positions = positions.clamp(max=int(positions[:, 0].max()) + cut)
    asked: list[str] = []

    def spied(*given: Any) -> Any:
        asked.append(name)
        return create_masks_for_generate(*given)

    for implementation in ARCHITECTURES[name].implementations:
        quick, slow = (MaskBuilder(config_of(name), implementation, torch.float32) for _ in range(2))
        asked.clear()
        slow.full = False
        held = TreeCache()
        held.enter(window)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(masks, "create_masks_for_generate", spied)
            ours, theirs = (builder(MaskInputs(tree, window, positions), held) for builder in (quick, slow))
        assert len(asked) == 2 - quick.full
        pairs = [(ours[kind], theirs[kind]) for kind in theirs] if isinstance(theirs, dict) else [(ours, theirs)]
        assert isinstance(ours, dict) == isinstance(theirs, dict) and (not isinstance(ours, dict) or ours.keys() == theirs.keys())
        for mine, other in pairs:
            assert mine.dtype == other.dtype and torch.equal(mine, other)


# -- the cache --------------------------------------------------------------------------------------------------------------


@often
@given(trees(), st.data())
def test_committing_a_path_moves_what_a_gather_would(tree: TokenTree, data: st.DataObject):
    ends = [data.draw(st.integers(0, tree.nodes - 1)) for _ in range(tree.rows)]
    paths = [tree.path(row, end) for row, end in enumerate(ends)]
    kept = [data.draw(st.integers(1, len(path))) for path in paths]
    if data.draw(st.booleans()):  # as nothing of ours has it
        paths = [data.draw(st.permutations(range(tree.nodes))) for _ in paths]
    width = max(map(len, paths))
    path = torch.tensor([[*row, *[tree.nodes - 1] * (width - len(row))] for row in paths])
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(3)
    lengths = [data.draw(st.integers(0, 5)) for _ in paths]
    ours, theirs = TreeCache(), TreeCache()
    for cache in (ours, theirs):
        cache.open(lengths)
        cache.reserve(5 + tree.nodes)
        for layer in range(2):
            cache.enter(Window(0, tree.rows, (0,) * tree.rows, 5 + tree.nodes))
            states = torch.randn(tree.rows, 2, 5 + tree.nodes, 3, generator=torch.Generator().manual_seed(layer)).to(dtype)
            cache.update(states, -states, layer)
        cache.enter(Window(0, tree.rows, tuple(lengths), tree.nodes))
    del generator
    ours.commit(path, kept)
    theirs._gather_path(path, theirs._window)
    assert ours.lengths == [length + count for length, count in zip(lengths, kept)]
    for mine, other in zip(ours.layers, theirs.layers):
        for name in ("keys", "values"):
            for row, (length, count) in enumerate(zip(lengths, kept)):
                assert torch.equal(getattr(mine, name)[row, :, : length + count], getattr(other, name)[row, :, : length + count])


def test_what_was_looked_at_is_let_go_when_the_buffers_grow():
    cache = TreeCache()
    cache.open([0])
    for capacity in (64, 600):
        cache.reserve(capacity)
        cache.enter(Window(0, 1, (0,), 4))
        states = torch.arange(4.0)[None, None, :, None]
        cache.update(states, states, 0)
        cache.commit(torch.tensor([[0, 3]]), [2])
        assert cache.layers[0].keys[0, 0, :2, 0].tolist() == [0.0, 3.0]
        cache.rewind([0])
        assert cache._viewed is not None
    cache.forget()
    assert cache._viewed is None
