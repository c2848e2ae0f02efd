"""Several drafters in one tree: merging against sets of texts, the budget, whom to ask, what each hears back, and the text of the seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from helpers import PAD, Oracle, alone, generate, padded, perturbed, repetitive, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft import ConfigurationError, Speculator
from foredraft.drafters.base import Drafter, DrafterInfo, DraftRequest, Feedback, Row
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.draft_seconds import DraftSeconds, time_drafts
from foredraft.drafters.merging import Line, Merged, assembled, heard_by, lines_of, merge_row, merged, places, seen_by, weights_of
from foredraft.drafters.prompt_lookup import PromptLookup
from foredraft.drafters.several import Several
from foredraft.drafters.track_records import HOPES, LONGEST_PAUSE, Credit, Record, Worth
from foredraft.logits.processors import Pipeline
from foredraft.logits.sampler import Sampler
from foredraft.rows import RowParameters
from foredraft.shapes import TreeShape
from foredraft.target import Target
from foredraft.tree import TokenTree

VOCAB, DEPTH = 3, 4


@st.composite
def proposals(draw: st.DrawFn) -> list[TokenTree]:
    """One to three trees over the same roots; tokens repeat among siblings, and some nodes are filler."""
    rows = draw(st.integers(1, 2))
    trees = []
    for _ in range(draw(st.integers(1, 3))):
        nodes = draw(st.integers(1, 6))
        tokens = [[row, *(draw(st.integers(0, VOCAB - 1)) for _ in range(nodes - 1))] for row in range(rows)]
        parents, valid = [], []
        for _ in range(rows):
            line, depths, real = [-1], [0], [True]
            for node in range(1, nodes):
                parent = draw(st.sampled_from([each for each in range(node) if depths[each] < DEPTH]))
                line.append(parent)
                depths.append(depths[parent] + 1)
                real.append(real[parent] and draw(st.integers(0, 4)) > 0)
            parents.append(line)
            valid.append(real)
        trees.append(TokenTree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(valid)))
    return trees


def texts(tree: TokenTree, row: int) -> dict[int, tuple[int, ...]]:
    """The text down to every real node."""
    return {
        node: tuple(tree.tokens[row, tree.path(row, node)].tolist())
        for node in range(tree.nodes)
        if tree.valid is None or bool(tree.valid[row, node])
    }


@settings(max_examples=200, deadline=None)
@given(proposals())
def test_merging_is_the_union_of_texts(trees: list[TokenTree]):
    tree, places = merged(trees, DEPTH)
    tree.check(VOCAB)
    assert tree.proposal == "mixed"
    for row in range(tree.rows):
        mine = texts(tree, row)
        assert len(set(mine.values())) == len(mine), "what several say is said once"
        assert set(mine.values()) == {text for each in trees for text in texts(each, row).values()}
        for each, went in zip(trees, places):
            for node, text in texts(each, row).items():
                assert mine[int(went[row, node])] == text
            assert all(int(went[row, node]) == -1 for node in range(each.nodes) if node not in texts(each, row))
    assert tree.nodes == max(len(texts(tree, row)) for row in range(tree.rows))


@settings(max_examples=200, deadline=None)
@given(proposals(), st.data())
def test_each_drafter_hears_of_its_own_nodes(trees: list[TokenTree], data: st.DataObject):
    tree, places = merged(trees, DEPTH)
    ends = [data.draw(st.sampled_from(list(texts(tree, row)))) for row in range(tree.rows)]
    paths = [tree.path(row, end) for row, end in enumerate(ends)]
    path = torch.tensor([each + [0] * (DEPTH + 1 - len(each)) for each in paths])
    feedback = Feedback(tree, [len(each) - 1 for each in paths], path)
    for each, went in zip(trees, places):
        heard = seen_by(each, went, feedback)
        for row, end in enumerate(ends):
            kept = texts(tree, row)[end]
            own = set(texts(each, row).values())
            longest = max(length for length in range(1, len(kept) + 1) if kept[:length] in own)
            assert heard.accepted[row] == longest - 1
            assert heard.path is not None
            nodes = heard.path[row, :longest].tolist()
            assert tuple(each.tokens[row, nodes].tolist()) == kept[:longest]


class Fixed(Drafter):
    """Proposes the same chain always, and remembers what it hears."""

    name, summary = "fixed", "for tests"

    def __init__(self, chain: Sequence[int]):
        self.chain = list(chain)
        self.heard: list[int] = []

    def draft(self, request: DraftRequest) -> TokenTree:
        return request.chains([self.chain] * len(request.rows))

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        self.heard += feedback.accepted


def test_every_drafter_is_told_how_far_its_own_proposal_held():
    row = repetitive()[0]
    ahead = generate(Speculator(tiny(), drafter="none"), [row], max_new_tokens=4)[0]
    right, half = Fixed(ahead[1:]), Fixed([ahead[1], (ahead[2] + 1) % 128, 3])
    generate(Speculator(tiny(), drafter=Several([right, half]), shape="chain(3)"), [row], max_new_tokens=4)
    assert right.heard[0] == 2 or right.heard[0] == 3
    assert half.heard[0] == 1


@pytest.mark.parametrize("shape", ["chain(4)", "product(3,2,1)", "dynamic(depth=4,k=3,total=9)"])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 4}])
@pytest.mark.parametrize("ask", ["always", "auto"])
def test_the_text_is_that_of_plain_decoding(shape: str, options: dict, ask: str):
    model, rows = tiny("gemma3_text"), repetitive()
    drafters = [DraftModel(perturbed("gemma3_text")), "prompt-lookup", DraftModel(perturbed("gemma3_text", seed=9))]
    expected = generate(Speculator(model, drafter="none"), rows, max_new_tokens=16, **options)
    speculator = Speculator(model, drafter=Several(drafters, ask=ask), shape=shape)
    assert (speculator.rule.name, speculator.proposal) == ("match", "mixed")
    assert generate(speculator, rows, max_new_tokens=16, **options) == expected


def test_two_drafters_are_accepted_at_least_as_often_as_one():
    model, rows = tiny(), repetitive()

    def length(drafter: Drafter) -> float:
        speculator = Speculator(model, drafter=drafter, rule="match")
        out = [speculator.generate(torch.tensor([row]), max_new_tokens=40, do_sample=True, top_k=0, seed=3) for row in rows]
        return sum(each.stats.kept for each in out) / sum(each.stats.row_passes for each in out)

    one, two = DraftModel(perturbed(seed=5)), DraftModel(perturbed(seed=9))
    both = Several([DraftModel(perturbed(seed=5)), DraftModel(perturbed(seed=9))], nodes=10, ask="always")
    assert length(both) > max(length(one), length(two))


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("", {}, "several needs the drafters to merge"),
        ("prompt-lookup,,ngram", {}, "several needs the drafters to merge"),
        ("prompt-lookup,nothing", {}, "unknown drafter 'nothing'"),
        ("prompt-lookup,ngram", {"rule": "block"}, "rule 'block' is not exact for mixed proposals"),
        ("prompt-lookup,ngram", {"rule": "traversal"}, "rule 'traversal' is not exact for mixed proposals"),
        ("prompt-lookup,ngram", {"nodes": 0}, "nodes of at least 1"),
        ("prompt-lookup,ngram", {"ask": "never"}, "choose auto or always"),
    ],
)
def test_what_can_not_be_merged(source: str, options: dict, message: str):
    own = {name: value for name, value in options.items() if name != "rule"}
    with pytest.raises(ConfigurationError) as error:
        Speculator(tiny(), drafter="several", drafter_options={"source": source, **own}, rule=options.get("rule", "auto"))
    assert message in str(error.value)


@pytest.mark.parametrize("shape", ["chain(5)", "product(2,1,1)"])
def test_a_draft_model_forgets_what_another_drafter_was_preferred_to(shape):
    """Its cache holds the text and nothing else, also where the branch of another drafter was kept."""
    (row,) = repetitive((33,))
    oracle = Oracle([row + alone(tiny(), row, max_new_tokens=40)], wrong=7)
    drafter = DraftModel(perturbed(amount=1.0))
    session = Speculator(tiny(), drafter=Several([drafter, oracle], ask="always", nodes=20), shape=shape).session()
    session.add(row, RowParameters(max_new_tokens=40))
    session.step()
    while session.live:
        session.step()
        if not session.rows:
            break
        (length,), ids = drafter.model.lengths, session.rows[0].ids
        fresh = Target(drafter.model.model, test=False)
        fresh.open([ids[:length]])
        fresh.prefill([ids[:length]], first=0)
        for mine, theirs in zip(drafter.model.cache.written, fresh.cache.written):
            assert torch.allclose(mine.keys[0, :, :length], theirs.keys[0, :, :length], atol=1e-4)
    assert session.stats.acceptance_length > 3


def test_one_drafter_alone_stays_a_chain():
    """So that a target which takes chains only takes it, and the drafter hears what became of it."""
    model = tiny("falcon_alibi", "sdpa")
    rows = repetitive((33, 21))
    speculator = Speculator(model, drafter="several:prompt-lookup")
    assert generate(speculator, rows, max_new_tokens=12) == [alone(model, row, max_new_tokens=12) for row in rows]
    speculator = Speculator(tiny(), drafter=Several([DraftModel(tiny())]))
    output = speculator.generate(**padded(rows), max_new_tokens=21, pad_token_id=PAD)
    assert output.stats.acceptance_length == 5  # the last draft is cut at the limit


def test_the_same_drafter_twice_is_refused():
    drafter = DraftModel(perturbed())
    with pytest.raises(ConfigurationError, match="same drafter twice"):
        Several([drafter, drafter])


# -- merging on the host, and the budget ----------------------------------------------------------------------------------

FLAT = [(0.5, 0.4, 0.3)] * DEPTH
LIMITS = st.lists(st.integers(0, DEPTH), min_size=2, max_size=2)


def on_host(
    trees: list[TokenTree], *, budget: int = 99, depth: int = DEPTH, floor: float = 0.0
) -> tuple[TokenTree, list[Merged], list[list[list[int]]]]:
    lines = [lines_of(tree) for tree in trees]
    options = {"budget": budget, "depth": depth, "floor": floor}
    rows = [merge_row([each[row] for each in lines], [FLAT] * len(trees), **options) for row in range(trees[0].rows)]
    tree = assembled(rows, trees, torch.device("cpu"))
    return tree, rows, places(rows, trees, tree.nodes)


@settings(max_examples=200, deadline=None)
@given(proposals())
def test_merging_on_the_host_gives_the_same_texts(trees: list[TokenTree]):
    tree, _, went = on_host(trees)
    reference, _ = merged(trees, DEPTH)
    tree.check(VOCAB)
    assert (tree.proposal, tree.nodes) == ("mixed", reference.nodes)
    for row in range(tree.rows):
        mine = texts(tree, row)
        assert sorted(mine.values()) == sorted(texts(reference, row).values())
        for each, where in zip(trees, went):
            for node, text in texts(each, row).items():
                assert mine[where[row][node]] == text
            assert all(where[row][node] == -1 for node in range(each.nodes) if node not in texts(each, row))


@settings(max_examples=200, deadline=None)
@given(proposals(), st.integers(1, 8), st.integers(0, DEPTH), st.sampled_from([0.0, 0.1, 0.3]))
def test_a_budget_keeps_the_heaviest_nodes(trees: list[TokenTree], budget: int, depth: int, floor: float):
    tree, rows, went = on_host(trees, budget=budget, depth=depth, floor=floor)
    _, everything, _ = on_host(trees)
    tree.check(VOCAB)
    for row, (kept, whole) in enumerate(zip(rows, everything)):
        assert len(kept.tokens) - 1 <= budget
        weights = dict(zip(texts(assembled([whole], [], torch.device("cpu")), 0).values(), whole.weights))
        allowed = sorted((weight for text, weight in weights.items() if len(text) <= depth + 1 and weight >= floor), reverse=True)
        assert kept.weights == pytest.approx(allowed[: budget + 1])
        assert all(weight <= kept.weights[parent] for weight, parent in zip(kept.weights[1:], kept.parents[1:]))
        for each, where in zip(trees, went):
            for node, text in texts(each, row).items():
                place = where[row][node]
                assert place == -1 or texts(tree, row)[place] == text


@settings(max_examples=200, deadline=None)
@given(proposals(), st.data())
def test_what_the_host_tells_is_what_tensors_tell(trees: list[TokenTree], data: st.DataObject):
    tree, _, went = on_host(trees, budget=data.draw(st.integers(1, 10)))
    ends = [data.draw(st.sampled_from(list(texts(tree, row)))) for row in range(tree.rows)]
    paths = [tree.path(row, end) for row, end in enumerate(ends)]
    logits = torch.arange(tree.tokens.numel() * 2.0).view(tree.rows, tree.nodes, 2)
    path = None if tree.chain else torch.tensor([each + [0] * (DEPTH + 1 - len(each)) for each in paths])
    feedback = Feedback(tree, [len(each) - 1 for each in paths], path, logits)
    for each, where in zip(trees, went):
        told, reference = heard_by(each, where, feedback, paths), seen_by(each, torch.tensor(where), feedback)
        assert told.accepted == reference.accepted
        real = torch.tensor(where) >= 0
        assert told.logits is not None and torch.equal(told.logits[real], reference.logits[real])
        assert torch.equal(told.logits[real], logits[torch.nonzero(real)[:, 0], torch.tensor(where)[real]])
        for row, count in enumerate(told.accepted):
            nodes = told.path[row, : count + 1].tolist()
            assert [where[row][node] for node in nodes] == paths[row][: count + 1]
        for row in range(tree.rows):
            assert set(texts(told.tree, row)) == {node for node in texts(each, row) if where[row][node] >= 0}


@settings(max_examples=100, deadline=None)
@given(proposals(), st.integers(1, 8))
def test_tensors_keep_the_heaviest_nodes_too(trees: list[TokenTree], budget: int):
    rates = [
        torch.tensor([[(0.7, 0.2), (0.6, 0.1), (0.5, 0.1), (0.4, 0.1)]] * trees[0].rows) * (1 - 0.1 * index) for index in range(len(trees))
    ]
    tree, went = merged(trees, DEPTH, budget=budget, rates=rates)
    tree.check(VOCAB)
    for row in range(tree.rows):
        best: dict[tuple[int, ...], float] = {}
        for each, table in zip(trees, rates):
            for node, weight in enumerate(weights_of(each, table)[row].tolist()):
                if node in texts(each, row):
                    text = texts(each, row)[node]
                    best[text] = max(best.get(text, 0.0), weight)
        kept = texts(tree, row)
        assert len(kept) == min(budget + 1, len(best))
        assert sorted((best[text] for text in kept.values()), reverse=True) == pytest.approx(
            sorted(best.values(), reverse=True)[: len(kept)]
        )
        for each, where in zip(trees, went):
            for node, text in texts(each, row).items():
                place = int(where[row, node])
                assert kept[place] == text if place >= 0 else text not in kept.values()


def chain_of(*tokens: int) -> Line:
    return Line([0, *tokens], [[node + 1] for node in range(len(tokens))] + [[]])


def test_who_agrees_counts_more_and_who_differs_less():
    even, sure = [(0.5,)] * 3, [(0.9,)] * 3
    alone = merge_row([chain_of(1, 2)], [even], budget=9, depth=3)
    assert alone.weights == [1.0, 0.5, 0.25] and alone.is_chain
    agreed = merge_row([chain_of(1), chain_of(1)], [even, even], budget=9, depth=3)
    assert agreed.tokens == [0, 1] and agreed.weights[1] == pytest.approx(2 / 3)
    opposed = merge_row([chain_of(1), chain_of(2)], [even, sure], budget=9, depth=3)
    assert opposed.tokens == [0, 2, 1] and opposed.weights[1:] == pytest.approx([9 / 11, 1 / 11])
    assert merge_row([chain_of(1), chain_of(2, 3)], [even, sure], budget=9, depth=3, branches=False).tokens == [0, 2, 3]


def test_nodes_that_cost_more_than_they_promise_are_left_out():
    row = StandIn([1, 2, 3, 4] * 5 + [1, 2])
    shape = TreeShape.opt(8, 4, delta=0.0)
    several = Several(["prompt-lookup", Fixed([9, 9])])
    several.begin([row])
    free = several.draft(ordered(row, shape))
    weights = several._merge(several._drafted.parts, ordered(row, shape))[0].weights
    dear = several.draft(ordered(row, replace(shape, prices=tuple(0.6 * count for count in range(9)))))
    kept = sum(weight > 0.6 for weight in weights[1:])
    assert 0 < kept < free.nodes - 1 and dear.nodes - 1 == kept
    assert several.draft(ordered(row, replace(shape, prices=tuple(2.0 * count for count in range(9))))).nodes == 1


@pytest.mark.parametrize("price", [0.0, 0.2, 0.45, 2.0])
def test_the_only_chain_is_cut_as_merging_would_cut_it(price: float):
    row = StandIn([1, 2, 3])
    shape = replace(TreeShape.opt(6, 5, delta=0.0, floor=0.1), prices=tuple(price * count for count in range(7)))
    several = Several([Fixed([4, 5, 6, 7, 8, 9, 1])])
    several.nodes = 6  # else one member alone is not merged at all
    tree = several.draft(ordered(row, shape))
    (merged,) = several._merge(several._drafted.parts, ordered(row, shape))
    assert tree.chain and tree.tokens[0].tolist() == merged.tokens
    assert several.expected_accepted == pytest.approx(merged.hope)
    assert several._drafted.parts[0].went is None


def test_copies_are_asked_for_chains():
    copying, branching = Several(["suffix", "ngram"]).info, Several(["suffix", "token-recycling"]).info
    assert not copying.auto_branches and not copying.grows
    assert branching.auto_branches and branching.grows


@settings(max_examples=100, deadline=None)
@given(proposals())
def test_the_likeliest_path_stands_first_and_nothing_else_changes(trees: list[TokenTree]):
    lines = [lines_of(tree) for tree in trees]
    rates = [[(0.5, 0.3, 0.2)] * DEPTH] * len(trees)
    for row in range(trees[0].rows):
        before, after = (merge_row([each[row] for each in lines], rates, budget=8, depth=DEPTH) for _ in range(2))
        after.lead()

        def said(merged: Merged) -> list[tuple[int, ...]]:
            paths = [(merged.tokens[0],)]
            for node in range(1, len(merged.tokens)):
                assert 0 <= merged.parents[node] < node
                paths.append((*paths[merged.parents[node]], merged.tokens[node]))
            return paths

        old, new = said(before), said(after)
        assert sorted(old) == sorted(new) and after.hope == pytest.approx(before.hope)
        assert dict(zip(old, before.weights)) == dict(zip(new, after.weights))
        for one, other in zip(before.went, after.went):
            assert {own: old[node] for own, node in one.items()} == {own: new[node] for own, node in other.items()}
        first = [node for node in range(1, len(new)) if after.parents[node] == node - 1]
        node, path = 0, [0]
        while children := [child for child in range(len(new)) if after.parents[child] == node]:
            node = max(children, key=lambda child: after.weights[child])
            if sum(after.weights[child] == after.weights[node] for child in children) > 1:
                break  # either will do
            path.append(node)
        assert path == list(range(len(path))) and len(first) >= len(path) - 1


@dataclass
class StandIn:
    ids: list[int]
    slot: int = 0
    prompt_length: int = 1
    capacity: int = 500


def ordered(row: StandIn, shape: TreeShape) -> DraftRequest:
    sampler = Sampler([Pipeline()], [False], [len(row.ids)], None, lambda: torch.zeros(1, 1))
    limits = [shape.depth]
    return DraftRequest([row], shape, shape.depth, limits, "mixed", False, 128, torch.device("cpu"), sampler)


def test_extra_nodes_stay_behind_and_keep_their_places():
    """Root, two proposed nodes, and two extra ones below the root; beside a chain."""
    own = TokenTree(
        torch.tensor([[7, 1, 2, 5, 6]]), torch.tensor([[-1, 0, 1, 0, 3]]), torch.tensor([[True, True, True, False, False]]), extra=2
    )
    chain = TokenTree.from_chain(torch.tensor([[7, 1, 4]]))
    tree, _, went = on_host([own, chain])
    tree.check_shapes(VOCAB)
    assert (tree.extra, tree.nodes) == (2, 6)
    assert tree.tokens[0, -2:].tolist() == [5, 6] and tree.parents[0, -2:].tolist() == [0, 4]
    assert went[0][0][3:] == [4, 5] and not tree.valid[0, 4:].any() and tree.valid[0, :4].all()
    told = heard_by(own, went[0], Feedback(tree, [1], torch.tensor([[0, 1, 1]]), torch.arange(6.0).view(1, 6, 1)), [[0, 1]])
    assert told.accepted == [1] and told.logits.flatten().tolist() == [0, 1, went[0][0][2], 4, 5]
    below = TokenTree(torch.tensor([[7, 1, 5]]), torch.tensor([[-1, 0, 1]]), torch.tensor([[True, True, False]]), extra=1)
    with pytest.raises(ValueError, match="below the root"):
        on_host([below])


# -- what is learnt, and whom to ask --------------------------------------------------------------------------------------


def test_a_record_learns_by_match_depth_and_rank():
    record = Record()
    before = record.rates(4)[0][0]
    for _ in range(60):
        record.observe(4, [(3, 0), (3, 1), (2, 2)])
    after = record.rates(4)
    assert after[0][0] > 0.9 > before and after[1][0] < 0.2 and after[2][0] < 0.2
    assert after[1][1] > after[1][2] and 0.3 < after[1][1] < 0.6  # second of three at one depth in three
    assert record.rates(1)[0][0] == Record().rates(1)[0][0], "other lengths of match are told apart"
    assert record.expected(4, 1) == pytest.approx(after[0][0])
    for _ in range(200):
        record.observe(4, [(3, 3)])
    assert record.rates(4)[0][0] < 0.1, "what was long ago is forgotten"


def test_a_copy_that_goes_on_goes_on():
    record = Record()
    for _ in range(4):
        record.observe(16, [(1, 1)])  # wrong from the beginning
    known = record.rates(16)
    assert known[0][0] < 0.4 and known[1][0] > 0.9, "where it did begin well, nothing speaks against it"
    for _ in range(20):
        record.observe(16, [(1, 0), (1, 1)])
    known = record.rates(16)
    assert known[0][0] > 0.7 and known[1][0] < 0.3 and known[2][0] < 0.5


def credited(added: Sequence[int], *, matched: int = 2, seconds: float = 0.001, rate: float = 100.0, rounds: int = 160) -> list[bool]:
    """Whether a member is asked that adds so many tokens, in turns, whenever it is asked."""
    credit, asked = Credit(), []
    for _ in range(rounds):
        asked.append(credit.pays([matched], rate))
        if asked[-1]:
            credit.was_asked([matched], [added[sum(asked) % len(added)]], seconds)
    return asked


def test_who_adds_nothing_is_asked_now_and_then():
    assert all(credited([1]))
    assert all(credited([0, 0, 0, 0, 4])), "seldom, and then much"
    never = credited([0])
    assert sum(never[-2 * LONGEST_PAUSE :]) == 2
    assert not all(credited([0, 0, 1], seconds=0.01)) and all(credited([0, 0, 1], seconds=0.0005))
    assert not all(credited([0, 0, 1], rate=2000.0)), "the faster decoding is, the more a millisecond counts"


def test_credit_depends_on_what_is_copied_already():
    credit = Credit()
    for _ in range(40):
        credit.was_asked([1], [1], 0.001)
        credit.was_asked([32], [0], 0.001)
    assert all(credit.pays([1], 200.0) for _ in range(80))
    asked = 0
    for _ in range(80):
        if credit.pays([32], 200.0):
            credit.was_asked([32], [0], 0.001)
            asked += 1
    assert asked == 3, "the 8th time, 16 later, 32 later"


class Told(Fixed):
    """Always drafts, and says how long its match is."""

    def __init__(self, chain: Sequence[int], matched: int):
        super().__init__(chain)
        self.match, self.asked = matched, 0

    def draft(self, request: DraftRequest) -> TokenTree:
        self.asked += 1
        return super().draft(request)

    def matched(self, rows: Sequence[Row]) -> list[int]:
        return [self.match] * len(rows)


@pytest.mark.parametrize(("ask", "all_rounds"), [("always", True), ("auto", False)])
def test_the_first_member_is_asked_always_and_who_adds_nothing_seldom(ask: str, all_rounds: bool):
    row = repetitive()[0]
    first, other = Told([127, 127], 4), Told([126, 125], 4)
    ticks = iter(range(10**6))
    several = Several([first, other], ask=ask)
    several.clock = lambda: next(ticks) * 1e-3
    text = generate(Speculator(tiny(), drafter=several, shape="product(2,1)"), [row], max_new_tokens=48)
    assert text == [alone(tiny(), row, max_new_tokens=48)]
    assert first.asked > 40 and (other.asked == first.asked) == all_rounds and other.asked > 4


def test_what_several_expects_is_what_its_nodes_weigh():
    row = StandIn([1, 2, 3])
    several = Several([Told([5, 6], 4)], nodes=4)
    for member in several.drafters:
        member.bind(Target(tiny()))
    several._chains_only = False
    several.draft(ordered(row, TreeShape.parse("opt(4,2,0.0)")))
    rates = Record().rates(4)
    assert several.expected_accepted == pytest.approx(rates[0][0] * (1 + rates[1][0]))


TIMED = DraftSeconds(fixed=0.001, level=0.001, unread=0.0001, plain=0.01)  # a chain of four in half a plain round


def asked_worth(*, added: float, rate: float = 100.0, rounds: int = 400, hope: float = 0.0, slower: float = 1.0) -> list[bool]:
    """Whether a drafter that adds so many tokens is asked, round by round of a hundredth of a second."""
    worth, asked, debt = Worth(TIMED), [], 0.0
    for _ in range(rounds):
        asked.append(worth.pays([hope], 1.0, rate, depth=4))
        if asked[-1]:
            debt += added
            worth.was_asked([hope], [int(debt)], slower * TIMED.of(4), 0.01, depth=4)
            debt -= int(debt)
        else:
            worth.was_not_asked(0.01)
    return asked


def test_a_model_is_asked_where_it_adds_more_than_its_time_is_worth():
    assert all(asked_worth(added=0.8))  # 0.8 tokens for the time of 0.5
    seldom = asked_worth(added=0.3)  # 0.3 tokens for the time of 0.5
    assert sum(seldom[:100]) < 25, "a few rounds suffice to see it"
    assert 0 < sum(seldom[100:]) <= 6, "tries take a hundredth of the time, 6 of 300 rounds"
    slow = asked_worth(added=0.8, slower=3.0)
    assert slow[0] and sum(slow[1:100]) < 10, "it takes longer than was timed"
    copying = asked_worth(added=5.0, rate=1000, rounds=20, hope=HOPES[-1])
    assert not any(copying), "a long copy leaves little to add"
    assert Worth().pays([9.0], 0.0, 100.0, depth=4), "what was not timed is asked"


def test_what_was_missed_has_to_be_read_first():
    worth = Worth(TIMED)
    assert worth.pays([0.0], 0.6, 100.0, depth=4, missed=0)
    assert not worth.pays([0.0], 0.6, 100.0, depth=4, missed=1000), "which takes as long as six rounds do"
    assert not worth.pays([0.0], 0.4, 0.0, depth=4) and worth.pays([0.0], 0.6, 0.0, depth=4), "until there is a pace, a plain one's counts"


def test_a_try_is_not_made_where_there_is_much_to_hope_for():
    worth, tries = Worth(TIMED), []
    for index in range(3000):
        hope = 3.0 * (index % 2)
        if worth.pays([hope], 0.1, 100.0, depth=4):
            tries.append(hope)
            worth.was_asked([hope], [0], TIMED.of(4), 0.01, depth=4)
        else:
            worth.was_not_asked(0.01)
    assert 10 < len(tries) <= 60 and set(tries) == {0.0}


def test_drafts_are_timed_beforehand_and_leave_nothing_behind():
    clock = [0.0]
    drafter = Counting(perturbed(), clock, 0.5)
    target = Target(tiny(), test=False)
    drafter.bind(target)
    timed = time_drafts(drafter, target, lambda: clock[0])
    assert (timed.fixed, timed.level, timed.unread, timed.plain) == (0.5, 0.0, 0.0, 0.0)
    assert timed.of(3) == 0.5 and TIMED.of(4, 10) == pytest.approx(0.006)
    assert not drafter.model.lengths and not target.lengths


class Counting(DraftModel):
    """A draft model that counts how often it is asked, and takes ``seconds`` of a clock that stands still otherwise."""

    def __init__(self, model, clock: list[float], seconds: float):
        super().__init__(model)
        self.clock, self.seconds, self.drafts = clock, seconds, 0

    def draft(self, request):
        self.drafts += 1
        self.clock[0] += self.seconds
        return super().draft(request)


class Ticking(PromptLookup):
    """Prompt lookup, each of whose rounds takes a second."""

    clock: list[float]

    def draft(self, request):
        self.clock[0] += 1.0
        return super().draft(request)


def counted(seconds: float, rows: list[list[int]]) -> tuple[int, int]:
    """How often a model that takes so many rounds of time is asked beside prompt lookup, and in how many rounds; the text is checked."""
    clock = [0.0]
    model, lookup = Counting(perturbed(amount=0.02), clock, seconds), Ticking()
    lookup.clock = clock
    several = Several([model, lookup])
    several.clock = lambda: clock[0]
    speculator = Speculator(tiny(), drafter=several, shape="chain(4)")
    model.drafts = 0
    out = speculator.generate(**padded(rows), max_new_tokens=80, pad_token_id=PAD)
    assert [row[-80:] for row in out.sequences.tolist()] == [alone(tiny(), row, max_new_tokens=80) for row in rows]
    return model.drafts, out.stats.target_passes


def test_a_cheap_model_is_asked_and_a_dear_one_is_not():
    rows = repetitive((33,))
    cheap, rounds = counted(0.0, rows)
    dear, more = counted(50.0, rows)
    assert cheap >= rounds - 3 and dear < 0.5 * more
    assert more > rounds, "and that is what it was good for"


def test_a_model_that_was_not_asked_reads_what_it_missed():
    row = repetitive((33,))[0]
    several = Several([DraftModel(tiny()), "prompt-lookup"])
    member, turns = several.members[0], iter([True, False, False, True] * 50)
    member.worth.pays = lambda *_, **__: next(turns)  # type: ignore[method-assign]
    seen: list[tuple[int, int]] = []
    drafter = several.drafters[0]
    observe = drafter.observe
    drafter.observe = lambda rows, feedback: (seen.append((feedback.tree.nodes, feedback.accepted[0])), observe(rows, feedback))[1]
    speculator = Speculator(tiny(), drafter=several, shape="chain(3)")
    seen.clear()  # of the drafts that were timed
    out = speculator.generate(torch.tensor([row]), max_new_tokens=40)
    assert out.sequences[0, 33:].tolist() == alone(tiny(), row, max_new_tokens=40)
    asked = [accepted for nodes, accepted in seen if nodes > 1][:-1]
    assert asked and all(count == 3 for count in asked), "a draft model that is the target is always right, also after a pause"
    assert any(nodes == 1 for nodes, _ in seen)


class Wanting(Drafter):
    """Proposes a chain that is right for a while, and keeps the logits that it is told."""

    name, summary, info = "wanting", "for tests", DrafterInfo(needs_logits=True)

    def __init__(self, text: Sequence[int]):
        self.text = list(text)
        self.heard: list[tuple[list[int], Feedback]] = []

    def draft(self, request: DraftRequest) -> TokenTree:
        self.ids = list(request.rows[0].ids)
        place = len(self.ids)
        return request.chains([[*self.text[place : place + 2], 9]])

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        if feedback.tree.nodes > 1:
            assert feedback.logits is not None
            self.heard.append((self.ids, Feedback(feedback.tree, feedback.accepted, feedback.path, feedback.logits.clone())))


def test_a_member_gets_the_logits_of_its_own_nodes():
    row = repetitive((33,))[0]
    text = row + alone(tiny(), row, max_new_tokens=20)
    wanting = Wanting(text)
    several = Several(["prompt-lookup", wanting])
    assert several.info.needs_logits and not Several(["prompt-lookup"]).info.needs_logits
    Speculator(tiny(), drafter=several, shape="product(2,1,1)").generate(torch.tensor([row]), max_new_tokens=20)
    scored = 0
    for ids, feedback in wanting.heard:
        real = texts(feedback.tree, 0)
        assert feedback.logits.shape[:2] == feedback.tree.tokens.shape
        for node, said in real.items():
            with torch.no_grad():
                expected = tiny()(torch.tensor([[*ids[:-1], *said]])).logits[0, -1]
            assert torch.allclose(feedback.logits[0, node], expected, atol=1e-4)
            scored += node > 0
    assert scored > 10


def test_two_drafters_on_a_target_that_takes_chains_only():
    model, rows = tiny("falcon_alibi", "sdpa"), repetitive((33, 21))
    speculator = Speculator(model, drafter="several:prompt-lookup,ngram", shape="chain(4)")
    assert speculator.target.chains_only
    assert generate(speculator, rows, max_new_tokens=12) == [alone(model, row, max_new_tokens=12) for row in rows]


@pytest.mark.parametrize("nodes", [1, 3, None])
def test_all_drafters_share_one_budget(nodes: int | None):
    row = repetitive((33,))[0]
    several = Several(["prompt-lookup", Fixed([5, 6, 7, 8]), DraftModel(perturbed())], nodes=nodes, ask="always")
    sizes: list[int] = []
    draft = several.draft

    def watched_draft(request: DraftRequest) -> TokenTree:
        tree = draft(request)
        sizes.append(int(tree.drafted[0]))
        return tree

    several.draft = watched_draft  # type: ignore[method-assign]
    out = Speculator(tiny(), drafter=several, shape="product(2,2,1)").generate(torch.tensor([row]), max_new_tokens=20)
    assert out.sequences[0, 33:].tolist() == alone(tiny(), row, max_new_tokens=20)
    assert max(sizes) == (10 if nodes is None else nodes)


@pytest.mark.parametrize("shape", ["chain(4)", "product(3,2,1)", "dynamic(depth=4,k=3,total=9)"])
def test_merging_on_a_device_changes_nothing_of_the_text(shape: str, monkeypatch: pytest.MonkeyPatch):
    """The path that waits for no device, taken on the CPU."""
    calls: list[int] = []
    monkeypatch.setattr(Several, "_would_wait", staticmethod(lambda *_: calls.append(1) or True))
    model, rows = tiny("gemma3_text"), repetitive()
    for options in ({}, {"do_sample": True, "temperature": 0.9, "seed": 4}):
        expected = generate(Speculator(model, drafter="none"), rows, max_new_tokens=16, **options)
        several = Several([DraftModel(perturbed("gemma3_text")), "prompt-lookup"], ask="always")
        speculator = Speculator(model, drafter=several, shape=shape)
        out = speculator.generate(**padded(rows), max_new_tokens=16, pad_token_id=PAD, **options)
        assert [row[-16:] for row in out.sequences.tolist()] == expected
        assert out.stats.accepted > 0 and out.stats.drafted <= out.stats.row_passes * speculator.shape.nodes
    assert calls
