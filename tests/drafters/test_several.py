"""Several drafters in one tree: whom they are asked for, what each is told, merged trees, and the text of the seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from cover import covered
from drafting import Row, request
from helpers import PAD, Oracle, alone, generate, padded, perturbed, plainly, repetitive, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from paging import stored

from foredraft import ConfigurationError, Speculator
from foredraft.drafters.base import Drafter, DrafterInfo, DraftRequest, Feedback
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.merging import Part, kept_paths, merged, own_feedback
from foredraft.drafters.several import Several
from foredraft.rows import RowParameters
from foredraft.shapes import TreeShape
from foredraft.target import Target
from foredraft.tree import TokenTree

VOCAB, DEPTH = 3, 4
CPU = torch.device("cpu")


class Fixed(Drafter):
    """Proposes the same chain for the rows of ``slots``, all if None, and remembers how often it was asked and what it was told."""

    name, summary = "fixed", "for tests"

    def __init__(self, chain: Sequence[int], slots: Sequence[int] | None = None, **info: object):
        self.chain, self.slots = list(chain), slots
        self.info = replace(DrafterInfo(), **info)
        self.asked: list[DraftRequest] = []
        self.told: list[list[int]] = []

    def draft(self, request: DraftRequest) -> TokenTree:
        self.asked.append(request)
        return request.chains([self.chain if self.slots is None or row.slot in self.slots else [] for row in request.rows])

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        self.told.append(list(feedback.accepted))


# -- who is asked ---------------------------------------------------------------------------------------------------------


def test_the_first_proposal_is_taken_and_nobody_else_is_asked():
    first, second, model = Fixed([5, 6], slots=[0]), Fixed([7, 8]), Fixed([9], runs_a_model=True)
    several = Several([model, first, second])  # a model is asked last wherever it stands
    rows = [Row([1, 2, 3], slot=0), Row([1, 2, 4], slot=1)]
    tree = several.draft(request(rows, 3, proposal="mixed"))
    assert tree.chain and tree.tokens.tolist() == [[3, 5, 6], [4, 7, 8]]
    assert [len(each.asked) for each in (first, second, model)] == [1, 1, 0]
    tree = several.draft(request(rows[:1], 3, proposal="mixed"))
    assert tree.tokens.tolist() == [[3, 5, 6]] and (tree.proposal, tree.q) == ("mixed", None)
    assert [len(each.asked) for each in (first, second, model)] == [2, 1, 0]
    second.slots = []
    assert several.draft(request(rows[1:], 3, proposal="mixed")).tokens.tolist() == [[4, 9]]
    model.slots = []
    assert several.draft(request(rows, 3, proposal="mixed")).tokens.tolist() == [[3, 5, 6], [4, 0, 0]]
    assert several.draft(request(rows[1:], 3, proposal="mixed")).nodes == 1


def test_whoever_has_extra_nodes_is_asked_in_every_round():
    first, window = Fixed([5, 6]), Fixed([7], extra_nodes=2)
    Several([first, window]).draft(request([Row([1, 2, 3])], 3, proposal="mixed"))
    assert len(window.asked) == 1


@pytest.mark.parametrize(("branches", "expected"), [(True, "opt(total=8,depth=4,delta=0)"), (False, "chain(4)")])
def test_copies_are_asked_for_chains(branches: bool, expected: str):
    """Also where the planner wants trees that a model grows."""
    assert not Several(["suffix", "ngram"]).info.auto_branches and not Several(["suffix", "ngram"]).info.grows
    branching = Several(["suffix", "token-recycling"])
    assert branching.info.auto_branches and branching.info.grows
    drafter = Fixed([5], branches=True, auto_branches=branches)
    Several([drafter, "ngram"]).draft(request([Row([1, 2, 3])], shape=TreeShape.opt(8, 4, delta=0.0, k=8), proposal="mixed"))
    assert str(drafter.asked[0].shape) == expected


def test_what_the_only_draft_expects_is_what_several_expects():
    first, second = Fixed([5], slots=[0]), Fixed([6])
    first.expected_accepted = 0.75
    several = Several([first, second])
    rows = [Row([1, 2, 3], slot=0), Row([1, 2, 4], slot=1)]
    several.draft(request(rows[:1], 3, proposal="mixed"))
    assert several.expected_accepted == 0.75
    several.draft(request(rows, 3, proposal="mixed"))
    assert several.expected_accepted is None


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("", {}, "several needs the drafters to ask"),
        ("prompt-lookup,,ngram", {}, "several needs the drafters to ask"),
        ("prompt-lookup,nothing", {}, "unknown drafter 'nothing'"),
        ("prompt-lookup,ngram", {"rule": "block"}, "rule 'block' is not exact for mixed proposals"),
        ("prompt-lookup,ngram", {"rule": "traversal"}, "rule 'traversal' is not exact for mixed proposals"),
    ],
)
def test_what_can_not_be_merged(source: str, options: dict, message: str):
    with pytest.raises(ConfigurationError) as error:
        Speculator(tiny(), drafter="several", drafter_options={"source": source}, **options)
    assert message in str(error.value)


def test_the_same_drafter_twice_is_refused():
    drafter = DraftModel(perturbed())
    with pytest.raises(ConfigurationError, match="same drafter object twice"):
        Several([drafter, drafter])


# -- the text -------------------------------------------------------------------------------------------------------------


SAMPLED = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "seed": 4}


@pytest.mark.parametrize(
    ("shape", "options"), covered(["chain(4)", "product(3,2,1)", "dynamic(depth=4,k=3,total=9)"], [{}, SAMPLED], ways=1)
)
def test_the_text_is_that_of_plain_decoding(shape: str, options: dict):
    """Rows of one round take drafts of different drafters: the first one proposes for every other row only."""
    model, rows = tiny("gemma3_text"), repetitive()
    first = Fixed([5, 6, 7], slots=[1])
    expected = plainly(model, rows, max_new_tokens=16, **options)
    speculator = Speculator(model, drafter=Several([DraftModel(perturbed("gemma3_text")), first, "prompt-lookup"]), shape=shape)
    assert (speculator.rule.name, speculator.proposal) == ("match", "mixed")
    assert generate(speculator, rows, max_new_tokens=16, **options) == expected
    assert len(first.asked) > 4


@pytest.mark.parametrize("shape", ["chain(5)", "product(2,1,1)"])
def test_a_draft_model_forgets_what_another_drafter_was_preferred_to(shape):
    """Its cache holds the text and nothing else, also where it was asked beside another drafter or not at all."""

    class Sometimes(Oracle):
        """For one of two rows, and in two of three rounds."""

        rounds = 0

        def draft(self, request: DraftRequest) -> TokenTree:
            self.rounds += 1
            limits = [limit if row.slot == 0 and self.rounds % 3 else 0 for row, limit in zip(request.rows, request.limits)]
            return super().draft(replace(request, limits=limits))

    rows = repetitive((33, 21))
    oracle = Sometimes([row + alone(tiny(), row, max_new_tokens=40) for row in rows], wrong=7)
    drafter = DraftModel(perturbed(amount=0.05))
    session = Speculator(tiny(), drafter=Several([drafter, oracle]), shape=shape).session()
    for row in rows:
        session.add(row, RowParameters(max_new_tokens=40))
    session.step()
    checked = 0
    while session.live:
        session.step()
        for place, row in enumerate(session.rows):
            length = drafter.model.lengths[place]
            fresh = Target(drafter.model.model, test=False)
            fresh.open([row.ids[:length]])
            fresh.prefill([row.ids[:length]], first=0)
            for mine, theirs in zip(stored(drafter.model.cache, place, length), stored(fresh.cache, 0, length), strict=True):
                assert torch.allclose(mine, theirs, atol=1e-4)
            checked += 1
    assert checked > 10 and session.stats.acceptance_length > 2


def test_a_model_that_was_not_asked_reads_what_it_missed():
    row = repetitive((33,))[0]
    drafter, turns = DraftModel(tiny()), iter([False, True, True, False] * 50)
    copy = Fixed([127, 126])
    copies = copy.draft
    copy.draft = lambda request: copies(request) if next(turns) else TokenTree.root(request.roots())  # type: ignore[method-assign]
    seen: list[tuple[int, int]] = []
    observe = drafter.observe
    drafter.observe = lambda rows, feedback: (seen.append((feedback.tree.nodes, feedback.accepted[0])), observe(rows, feedback))[1]
    out = Speculator(tiny(), drafter=Several([drafter, copy]), shape="chain(3)").generate(torch.tensor([row]), max_new_tokens=40)
    assert out.sequences[0, 33:].tolist() == alone(tiny(), row, max_new_tokens=40)
    asked = [accepted for nodes, accepted in seen if nodes > 1][:-1]
    assert asked and all(count == 3 for count in asked), "a draft model that is the target is always right, also after a pause"
    assert any(nodes == 1 for nodes, _ in seen)


def test_one_drafter_alone_stays_a_chain():
    """So that a target which takes chains only takes it, and the drafter hears what became of it."""
    model = tiny("falcon_alibi", "sdpa")
    rows = repetitive((33, 21))
    speculator = Speculator(model, drafter="several:prompt-lookup")
    assert generate(speculator, rows, max_new_tokens=12) == [alone(model, row, max_new_tokens=12) for row in rows]
    speculator = Speculator(tiny(), drafter=Several([DraftModel(tiny())]), shape="chain(5)")
    output = speculator.generate(**padded(rows), max_new_tokens=21, pad_token_id=PAD)
    assert output.stats.acceptance_length == 5  # the last draft is cut at the limit


def test_two_drafters_on_a_target_that_takes_chains_only():
    model, rows = tiny("falcon_alibi", "sdpa"), repetitive((33, 21))
    speculator = Speculator(model, drafter="several:prompt-lookup,ngram", shape="chain(4)")
    assert speculator.target.chains_only
    assert generate(speculator, rows, max_new_tokens=12) == [alone(model, row, max_new_tokens=12) for row in rows]


# -- merging --------------------------------------------------------------------------------------------------------------


@st.composite
def parts(draw: st.DrawFn) -> list[Part]:
    """One to three trees over the same roots, some nodes of them filler, some extra; every row is kept by one of them at most."""
    rows = draw(st.integers(1, 3))
    keepers = [draw(st.integers(-1, 2)) for _ in range(rows)]
    found = []
    for number in range(draw(st.integers(1, 3))):
        nodes, extra, chain = draw(st.integers(1, 6)), draw(st.integers(0, 2)), draw(st.booleans())
        if chain:
            lengths = torch.tensor([draw(st.integers(1, nodes)) for _ in range(rows)])
            tokens = torch.tensor([[row, *(draw(st.integers(0, VOCAB - 1)) for _ in range(nodes - 1))] for row in range(rows)])
            tree = TokenTree.from_chain(tokens, valid=torch.arange(nodes) < lengths[:, None])
        else:
            lines, parents, valid = [], [], []
            for row in range(rows):
                lines.append([row, *(draw(st.integers(0, VOCAB - 1)) for _ in range(nodes - 1 + extra))])
                above, real = [-1], [True]
                for node in range(1, nodes):
                    above.append(draw(st.integers(0, node - 1)))
                    real.append(real[above[-1]] and draw(st.integers(0, 4)) > 0)
                parents.append([*above, *(draw(st.sampled_from([0, *range(nodes, nodes + each)])) for each in range(extra))])
                valid.append([*real, *[False] * extra])
            tree = TokenTree(torch.tensor(lines), torch.tensor(parents), torch.tensor(valid), extra=extra)
        found.append(Part(Fixed([]), tree, [row for row, keeper in enumerate(keepers) if keeper == number]))
    return found


def texts(tree: TokenTree, row: int) -> dict[int, tuple[int, ...]]:
    """The text down to every real node."""
    return {
        node: tuple(tree.tokens[row, tree.path(row, node)].tolist())
        for node in range(tree.nodes)
        if tree.valid is None or bool(tree.valid[row, node])
    }


@settings(max_examples=150, deadline=None)
@given(parts(), st.data())
def test_every_row_keeps_one_tree_and_its_drafter_hears_of_it(given_parts: list[Part], data: st.DataObject):
    tree = merged(given_parts, CPU)
    tree.check_shapes(VOCAB)
    assert tree.proposal == "mixed" and tree.extra == sum(part.tree.extra for part in given_parts)
    rows = tree.rows
    for row in range(rows):
        keeper = next((part for part in given_parts if row in part.rows), None)
        wanted = {0: (row,)} if keeper is None else texts(keeper.tree, row)
        assert sorted(texts(tree, row).values()) == sorted(wanted.values())
        for part in given_parts:
            for node in range(part.proposed, part.tree.nodes):  # extra nodes: the same path below the root, somewhere behind
                path, place = part.tree.path(row, node), part.places[row][node]
                assert place >= tree.nodes - tree.extra
                assert tree.path(row, place) == [part.places[row][each] for each in path]
                assert tree.tokens[row, place] == part.tree.tokens[row, node]
    ends = [data.draw(st.sampled_from(list(texts(tree, row)))) for row in range(rows)]
    paths = [tree.path(row, end) for row, end in enumerate(ends)]
    logits = torch.arange(tree.tokens.numel() * 2.0).view(rows, tree.nodes, 2)
    path = None if tree.chain else torch.tensor([each + [0] * (tree.nodes - len(each)) for each in paths])
    feedback = Feedback(tree, [len(each) - 1 for each in paths], path, logits)
    assert kept_paths(feedback) == paths
    for part in given_parts:
        told = own_feedback(part, feedback, paths)
        assert told.accepted == [len(paths[row]) - 1 if row in part.rows else 0 for row in range(rows)]
        for row, count in enumerate(told.accepted):
            nodes = list(range(count + 1)) if told.path is None else told.path[row, : count + 1].tolist()
            assert tuple(part.tree.tokens[row, nodes].tolist()) == texts(tree, row)[paths[row][count]]
            real = texts(told.tree, row)
            assert set(real) == (set(texts(part.tree, row)) if row in part.rows else {0})
            for node in [*real, *range(part.proposed, part.tree.nodes)]:
                assert torch.equal(told.logits[row, node], logits[row, part.places[row][node]])


def test_extra_nodes_below_what_is_proposed_are_refused():
    below = TokenTree(torch.tensor([[7, 1, 5]]), torch.tensor([[-1, 0, 1]]), torch.tensor([[True, True, False]]), extra=1)
    with pytest.raises(ValueError, match="below the root"):
        merged([Part(Fixed([]), below, [0])], CPU)


# -- what they are told ---------------------------------------------------------------------------------------------------


def test_every_drafter_is_told_how_far_its_own_proposal_held():
    row, other = repetitive()[:2]
    ahead = generate(Speculator(tiny(), drafter="none"), [row, other], max_new_tokens=5)
    right = Fixed(ahead[0][1:], slots=[0])
    half = Fixed([ahead[1][1], (ahead[1][2] + 1) % 128, 3])
    generate(Speculator(tiny(), drafter=Several([right, half]), shape="chain(3)"), [row, other], max_new_tokens=5)
    assert right.told[0] == [3, 0], "in the other row its draft was not verified"
    assert half.told[0] == [0, 1]


class Wanting(Drafter):
    """Proposes a chain that is right for a while, for every other row, and keeps the logits that it is told."""

    name, summary, info = "wanting", "for tests", DrafterInfo(needs_logits=True)

    def __init__(self, texts: Sequence[Sequence[int]]):
        self.texts = [list(text) for text in texts]
        self.heard: list[tuple[list[list[int]], Feedback]] = []

    def draft(self, request: DraftRequest) -> TokenTree:
        self.ids = [list(row.ids) for row in request.rows]
        drafts = [[*text[len(ids) : len(ids) + 2], 9] for text in self.texts for ids in self.ids if text[: len(ids)] == ids]
        return request.chains([draft if row.slot else [] for row, draft in zip(request.rows, drafts)])

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        if feedback.tree.nodes > 1:
            assert feedback.logits is not None
            told = Feedback(feedback.tree, feedback.accepted, feedback.path, feedback.logits.clone())
            self.heard.append((self.ids, told))


def test_a_member_gets_the_logits_of_its_own_nodes():
    rows = repetitive((33, 33))
    wanting = Wanting([row + alone(tiny(), row, max_new_tokens=20) for row in rows])
    several = Several([wanting, "prompt-lookup"])
    assert several.info.needs_logits and not Several(["prompt-lookup"]).info.needs_logits
    generate(Speculator(tiny(), drafter=several, shape="product(2,1,1)"), rows, max_new_tokens=20)
    scored = 0
    for texts_of_rows, feedback in wanting.heard:
        assert feedback.logits.shape[:2] == feedback.tree.tokens.shape
        for row, ids in enumerate(texts_of_rows):
            for node, said in texts(feedback.tree, row).items():
                with torch.no_grad():
                    expected = tiny()(torch.tensor([[*ids[:-1], *said]])).logits[0, -1]
                assert torch.allclose(feedback.logits[row, node], expected, atol=1e-4)
                scored += node > 0
    assert scored > 10


def test_each_drafter_has_options_of_its_own():
    """As the error says that the command line gets, which can give none."""
    speculator = Speculator(tiny(), drafter="several", drafter_options={"source": [["suffix", {"learn": True}], "prompt-lookup"]})
    assert speculator.drafter.drafters[0].learn
    with pytest.raises(
        ConfigurationError, match=r"drafter_options=\{'source': \[\['draft-model', \{'source': ..., 'learn': ...\}\], 'suffix'\]\}"
    ):
        Speculator(tiny(), drafter="several:suffix,prompt-lookup", drafter_options={"learn": True})


def test_a_row_that_is_to_get_no_draft_makes_nobody_be_asked():
    first, second = Fixed([5, 6]), Fixed([7], runs_a_model=True)
    speculator = Speculator(tiny(), drafter=Several([first, second]), shape="chain(2)")
    session = speculator.session()
    for most in (None, 0):
        session.add([1, 2, 3], RowParameters(max_new_tokens=8, max_draft=most))
    while session.live:
        session.step()
    assert first.asked and not second.asked
