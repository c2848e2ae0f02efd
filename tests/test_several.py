"""Several drafters in one tree: merging against sets of texts, what each drafter hears back, and the text of the seed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from helpers import PAD, Oracle, alone, generate, padded, perturbed, repetitive, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken import ConfigurationError, Speculator
from foretoken.drafters.base import Drafter, DraftRequest, Feedback, Row
from foretoken.drafters.draft_model import DraftModel
from foretoken.drafters.several import Several, merged, seen_by
from foretoken.rows import RowParameters
from foretoken.target import Target
from foretoken.tree import TokenTree

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
def test_the_text_is_that_of_plain_decoding(shape: str, options: dict):
    model, rows = tiny("gemma3_text"), repetitive()
    drafters = [DraftModel(perturbed("gemma3_text")), "prompt-lookup", DraftModel(perturbed("gemma3_text", seed=9))]
    expected = generate(Speculator(model, drafter="none"), rows, max_new_tokens=16, **options)
    speculator = Speculator(model, drafter=Several(drafters), shape=shape)
    assert (speculator.rule.name, speculator.proposal) == ("match", "mixed")
    assert generate(speculator, rows, max_new_tokens=16, **options) == expected


def test_two_drafters_are_accepted_at_least_as_often_as_one():
    model, rows = tiny(), repetitive()

    def length(drafter: Drafter) -> float:
        speculator = Speculator(model, drafter=drafter, rule="match")
        out = [speculator.generate(torch.tensor([row]), max_new_tokens=40, do_sample=True, top_k=0, seed=3) for row in rows]
        return sum(each.stats.kept for each in out) / sum(each.stats.row_passes for each in out)

    one, two = DraftModel(perturbed(seed=5)), DraftModel(perturbed(seed=9))
    assert length(Several([DraftModel(perturbed(seed=5)), DraftModel(perturbed(seed=9))])) > max(length(one), length(two))


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("", {}, "several needs the drafters to merge"),
        ("prompt-lookup,,ngram", {}, "several needs the drafters to merge"),
        ("prompt-lookup,nothing", {}, "unknown drafter 'nothing'"),
        ("prompt-lookup,ngram", {"rule": "block"}, "rule 'block' is not exact for mixed proposals"),
        ("prompt-lookup,ngram", {"rule": "traversal"}, "rule 'traversal' is not exact for mixed proposals"),
    ],
)
def test_what_can_not_be_merged(source: str, options: dict, message: str):
    with pytest.raises(ConfigurationError) as error:
        Speculator(tiny(), drafter="several", drafter_options={"source": source}, **options)
    assert message in str(error.value)


@pytest.mark.parametrize("shape", ["chain(5)", "product(2,1,1)"])
def test_a_draft_model_forgets_what_another_drafter_was_preferred_to(shape):
    """Its cache holds the text and nothing else, also where the branch of another drafter was kept."""
    (row,) = repetitive((33,))
    oracle = Oracle([row + alone(tiny(), row, max_new_tokens=40)], wrong=7)
    drafter = DraftModel(perturbed(amount=1.0))
    session = Speculator(tiny(), drafter=Several([drafter, oracle]), shape=shape).session()
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
