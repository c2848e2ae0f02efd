"""Rows that limit their drafts, and rows that tell what was drafted for them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers import make_drafter, repetitive, tiny

from foredraft import ConfigurationError, RowParameters, Session, Speculator, rules
from foredraft.drafters.base import Drafter
from foredraft.planning import FixedPlanner
from foredraft.testing import ProbabilityTable, ScriptedDrafter, TableTarget, continuations, distance, enumerate_law, plain_law

PROMPTS = repetitive((30, 17, 3))


def run(speculator, most=(None, None, None), *, session=None, new=24, **options):
    session = session or speculator.session()
    for index, prompt in enumerate(PROMPTS[: len(most)]):
        session.add(prompt, RowParameters(new, do_sample=index == 2, seed=(index, 4), max_draft=most[index], **options))
    commits = []
    while session.live:
        commits += session.step()
    return commits


def texts(commits):
    found: dict[int, list[int]] = {}
    for commit in commits:
        found.setdefault(commit.slot, []).extend(commit.tokens)
    return found


@cache
def plainly():
    return texts(run(Speculator(tiny(), drafter="none")))


# -- limits


@pytest.mark.parametrize("shape", ["chain(4)", "product(3,2,1)", "dynamic(depth=4,k=3,total=10)"])
def test_a_row_is_drafted_for_as_deep_as_it_allows(shape):
    speculator = Speculator(tiny(), drafter=make_drafter("draft-model"), shape=shape, rule="match")
    commits = run(speculator, (0, 1, None))
    assert texts(commits) == plainly()
    drafted = {slot: [commit for commit in commits if commit.slot == slot] for slot in range(3)}
    assert all(commit.drafted == commit.accepted == 0 for commit in drafted[0])
    assert {commit.accepted for commit in drafted[1]} == {0, 1} and max(commit.accepted for commit in drafted[2]) > 1
    if shape == "chain(4)":
        assert {commit.drafted for commit in drafted[1]} == {0, 1}
    speculator.close()


class Refuses(Drafter):
    name, summary = "refuses", "for tests"

    def draft(self, request):
        raise AssertionError("nobody wanted a draft")


def test_where_nobody_wants_a_draft_none_is_made():
    speculator = Speculator(tiny(), drafter=Refuses(), shape="chain(4)")
    commits = run(speculator, (0, 0, 0))
    assert texts(commits) == plainly()
    session = speculator.session()
    session.add(PROMPTS[0], RowParameters(4, max_draft=0))
    session.loop.planner.plan = None  # nobody asks the planner either
    while session.live:
        session.step()
    automatic = Speculator(tiny(), drafter="prompt-lookup")
    assert {commit.drafted for commit in run(automatic, (0, 0, 0))} == {0}
    assert texts(run(automatic, (0, None, 2))) == plainly()


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_row_without_drafts_writes_the_same_beside_others(rule):
    """With a rule whose noise depends on drafts, what others draft must not matter to it."""
    speculator = Speculator(
        tiny(), drafter="draft-model", drafter_options={"source": tiny(), "siblings": "iid"}, rule=rule, shape="chain(3)"
    )
    parameters = RowParameters(12, do_sample=True, seed=(9, 9), max_draft=0)
    session = speculator.session()
    alone = continuations(session, [PROMPTS[0]], [parameters])
    others = [RowParameters(20, do_sample=True, seed=(index, 1)) for index in range(2)]
    assert continuations(speculator.session(), PROMPTS, [parameters, *others])[0] == alone[0]
    speculator.close()


@pytest.mark.parametrize(
    ("rule", "proposal", "shape"), [("block", "iid", "chain(2)"), ("traversal", "without-replacement", "product(2,1)")]
)
def test_no_bias(rule, proposal, shape):
    """The exact law of texts, where rows of one batch have other limits than the shape."""
    table, draft = ProbabilityTable.random(3, seed=1), ProbabilityTable.random(3, seed=2)

    def outcomes(enumeration):
        drafter = ScriptedDrafter(draft, proposal=proposal)
        planner = FixedPlanner(shape)
        session = Session(TableTarget(table), drafter, rules.create(rule), proposal=proposal, planner=planner, randomness=enumeration)
        parameters = [RowParameters(3, do_sample=True, seed=seed, max_draft=1) for seed in enumeration.seeds]
        free = RowParameters(4)  # greedy: it draws nothing, and has the others share a deeper tree
        return continuations(session, [[0, 1]] * (len(parameters) + 1), [*parameters, free])[:-1]

    assert distance(enumerate_law(outcomes), plain_law(table, [0, 1], 3)) < 1e-6


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "2"])
def test_limits_are_numbers(wrong):
    with pytest.raises(ConfigurationError, match="max_draft must be a whole number from 0"):
        RowParameters(3, max_draft=wrong)


# -- traces


@pytest.mark.parametrize(
    ("drafter", "shape", "rule"),
    [
        ("draft-model", "chain(3)", "match"),
        ("draft-model", "product(3,2,1)", "traversal"),
        ("draft-model", "dynamic(depth=3,k=2,total=6)", "match"),
        ("lookahead", "product(2,1)", "match"),
        ("several", "product(2,1)", "match"),
    ],
)
def test_a_trace_is_what_happened(drafter, shape, rule):
    model = tiny()
    made = "several:prompt-lookup,ngram" if drafter == "several" else make_drafter(drafter)
    speculator = Speculator(model, drafter=made, shape=shape, rule=rule)
    commits = run(speculator, trace=True)
    assert texts(commits) == plainly() or rule != "match"
    ended = set()
    ids = [list(prompt) for prompt in PROMPTS]
    for commit in commits:
        trace, text = commit.trace, ids[commit.slot]
        ended.add(trace.ended)
        assert trace.tokens[0] == text[-1] and trace.parents[0] == -1 and trace.p[0] is None and trace.drafters[0] == ""
        assert len(trace.tokens) == len(trace.parents) == len(trace.drafters) == len(trace.p) == commit.drafted + 1
        kept = [trace.tokens[node] for node in trace.path[1:]]
        assert all(trace.parents[node] == before for before, node in zip(trace.path, trace.path[1:]))
        assert [*kept, *([] if trace.bonus is None else [trace.bonus])] == commit.tokens and len(kept) == commit.accepted
        assert (trace.shape == "chain(0)") == (commit.drafted == 0) or trace.shape == shape
        below = {trace.tokens[node] for node, parent in enumerate(trace.parents) if parent == trace.path[-1]}
        if trace.ended == "mismatch":
            assert below and (trace.bonus not in below or rule != "match")
        elif trace.ended == "end of draft":
            assert commit.drafted and not below
        elif trace.ended == "no draft":
            assert not commit.drafted
        else:
            assert trace.ended == commit.finish_reason == "length"
        check(model, text, trace, trace.p)
        if commit.slot == 2 and drafter == "draft-model" and "dynamic" not in shape and commit.drafted:
            check(speculator.drafter.info.draft_model.model, text, replace(trace, bonus=None), trace.q)
        text += commit.tokens
    assert {"mismatch", "length"} <= ended
    speculator.close()


def check(model, text, trace, values):
    """The p, or the q, of every node is that of the model after the text on the way to it."""
    for node in range(1, len(trace.tokens) + 1):
        path = [] if node < len(trace.tokens) else list(trace.path[1:])
        parent = trace.parents[node] if node < len(trace.tokens) else None
        while parent is not None and parent > 0:
            path.insert(0, parent)
            parent = trace.parents[parent]
        token, p = (trace.tokens[node], values[node]) if node < len(trace.tokens) else (trace.bonus, trace.bonus_p)
        if token is None:
            continue
        with torch.inference_mode():
            logits = model(torch.tensor([[*text, *(trace.tokens[each] for each in path)]])).logits[0, -1]
        assert p == pytest.approx(float(logits.softmax(-1)[token]), abs=1e-4)


@pytest.mark.parametrize("shape", ["chain(3)", "product(2,2,1)"])
def test_of_several_each_has_its_own_q(shape):
    """In one tree: of the row that copies there is none, of the others that of the draft model. Texts are those without traces."""
    model, drafter = tiny(), make_drafter("several")
    speculator = Speculator(model, drafter=drafter, shape=shape)

    def commits(trace):
        session = speculator.session()
        for index, prompt in enumerate(PROMPTS):
            session.add(prompt, RowParameters(24, do_sample=True, seed=(index, 4), trace=trace))
        while session.live:
            yield session.step()

    ids, seen = [list(prompt) for prompt in PROMPTS], set()
    for step in commits(True):
        drafters = {commit.trace.drafters[-1] for commit in step}
        seen.add(frozenset(drafters - {""}))
        for commit in step:
            trace = commit.trace
            if trace.drafters[-1] == "draft-model":
                check(drafter.draft_models[0].model, ids[commit.slot], replace(trace, bonus=None), trace.q)
            else:
                assert trace.q is None
            ids[commit.slot] += commit.tokens
    assert frozenset(("draft-model", "prompt-lookup")) in seen and frozenset(("draft-model",)) in seen
    expected = [list(prompt) for prompt in PROMPTS]
    for commit in (each for step in commits(False) for each in step):
        expected[commit.slot] += commit.tokens
    assert ids == expected
    speculator.close()


def test_a_text_that_ends_on_its_path_has_no_bonus():
    whole = plainly()[0]
    speculator = Speculator(tiny(), drafter=make_drafter("draft-model"), shape="chain(4)", rule="match")
    for place, token in enumerate(whole[1:-1], 1):
        if token in whole[:place]:
            continue
        last = run(speculator, (None,), eos=frozenset([token]), trace=True)[-1]
        assert last.trace.ended == last.finish_reason == "eos" and last.tokens[-1] == token
        if last.accepted == len(last.tokens):
            assert last.trace.bonus is last.trace.bonus_p is None and len(last.trace.path) == 1 + last.accepted
            break
    else:
        raise AssertionError("no text ended on a drafted token")
    speculator.close()


def test_nobody_who_does_not_ask_is_told():
    assert {commit.trace for commit in run(Speculator(tiny(), drafter="prompt-lookup"), new=4)} == {None}
