"""Guesses: drafted in place of the drafter's own, without changing a text or what the planner learns."""

from __future__ import annotations

from functools import cache

import pytest
from helpers import make_drafter, repetitive, tiny
from laws import law_of

from foredraft import ConfigurationError, Grammar, RowParameters, Speculator, zoo
from foredraft.drafters.base import Drafter
from foredraft.guesses import AHEAD, FIRST, Guessed, RowGuesses
from foredraft.logits.processors import Pipeline
from foredraft.planning import FixedPlanner
from foredraft.rows import ForcedTokens, Prediction
from foredraft.testing import ProbabilityTable, ScriptedDrafter, distance, plain_law

PROMPTS = repetitive((30, 17, 3))
NEW = 40


class Always:
    """Guesses the same tokens whatever the text is."""

    def __init__(self, *tokens: int):
        self.tokens = tokens

    def after(self, ids, prompt_length):
        return self.tokens


def written(speculator, guesses, **options):
    """The texts of all rows, and what was guessed and accepted of guesses, in all."""
    session = speculator.session()
    for index, prompt in enumerate(PROMPTS):
        parameters = RowParameters(NEW, do_sample=index == 2, seed=(index, 4), guesses=guesses(index), **options)
        session.add(prompt, parameters)
    texts, drafted, guessed = {}, 0, 0
    while session.live:
        for commit in session.step():
            texts.setdefault(commit.slot, []).extend(commit.tokens)
            assert commit.guessed <= min(commit.accepted, commit.guesses_drafted) and commit.guesses_drafted <= commit.drafted
            drafted, guessed = drafted + commit.guesses_drafted, guessed + commit.guessed
    return texts, drafted, guessed


@cache
def plainly():
    return written(Speculator(tiny(), drafter="none"), lambda index: ())[0]


def edited(index):
    """What row ``index`` will write, but for a token that is missing and one that is another; nothing for row 1."""
    text = plainly()[index]
    return () if index == 1 else (Prediction([*text[:15], *text[16:25], 0, *text[26:]]),)


# -- exact, for every drafter


@pytest.mark.parametrize(
    ("drafter", "shape"),
    [
        ("none", "auto"),
        ("prompt-lookup", "auto"),
        ("ngram", "product(3,2)"),
        ("lookahead", "product(3,2)"),
        ("token-recycling", "product(3,2)"),
        ("draft-model", "chain(3)"),
        ("draft-model", "product(3,2)"),
        ("medusa", "product(3,2)"),
        ("eagle3", "chain(3)"),
        ("layer-skip", "chain(2)"),
    ],
)
def test_the_text_is_that_of_plain_decoding(drafter, shape):
    speculator = Speculator(tiny(), drafter=make_drafter(drafter), shape=shape, rule="match")
    texts, drafted, guessed = written(speculator, edited)
    assert texts == plainly()
    assert 30 < guessed < drafted
    speculator.close()


def test_a_threshold_that_follows_acceptance_is_not_told_of_guesses():
    speculator = Speculator(tiny(), drafter=make_drafter("layer-skip", threshold="auto"), shape="chain(2)", rule="match")
    texts, drafted, guessed = written(speculator, edited)
    assert texts == plainly()
    assert 30 < guessed < drafted
    speculator.close()


@pytest.mark.parametrize("proposal", ["deterministic", "keyed", "iid"])
def test_no_bias(proposal):
    """The exact law of texts, with guesses that are likely, unlikely and sometimes there."""
    table, draft = ProbabilityTable.random(3, seed=1), ProbabilityTable.random(3, seed=2)

    class Sometimes(Always):
        def after(self, ids, prompt_length):
            return self.tokens if ids[-1] != 1 else ()

    drafter = ScriptedDrafter(draft, proposal=proposal)
    law = law_of(table, drafter, "match", "chain(2)", guesses=(Sometimes(1, 2, 0),))
    assert distance(law, plain_law(table, [0, 1], 3)) < 1e-6


def test_other_rules_refuse_them():
    speculator = Speculator(tiny(), drafter="draft-model", drafter_options={"source": tiny(), "siblings": "iid"}, rule="rejection")
    session = speculator.session()
    with pytest.raises(ConfigurationError, match="guesses need rule='match', and this session has the rule 'rejection'"):
        session.add([1, 2], RowParameters(3, guesses=(Always(1),)))
    with pytest.raises(ConfigurationError, match="a guess must have a method after"):
        RowParameters(3, guesses=[[1, 2]])


# -- what they cost


class Watched(Drafter):
    """Drafts token 5, and remembers for which rows it was asked."""

    name, summary = "watched", "for tests"

    def __init__(self):
        self.asked = []

    def draft(self, request):
        self.asked.append(list(request.limits))
        return request.chains([[5] * limit for limit in request.limits])


def rounds(drafter, *guesses, planner=None, **options):
    speculator = Speculator(tiny(), drafter=drafter, shape="chain(3)", rule="match")
    session = speculator.session()
    if planner is not None:
        session.observer.planner = planner
        planner.learns = True
    for index, guess in enumerate(guesses):
        session.add(PROMPTS[index], RowParameters(12, guesses=guess, trace=True, **options))
    commits = []
    while session.live:
        commits.append(session.step())
    return commits[1:]


def test_rounds_of_guesses_alone_cost_no_draft():
    drafter = Watched()
    rounds(drafter, (Always(1, 2),), (Always(3),))
    assert drafter.asked == []
    rounds(drafter, (Always(1, 2),), ())
    assert drafter.asked and all(limits[0] == 0 for limits in drafter.asked if len(limits) > 1)


def test_the_first_guess_that_says_anything_counts_and_unknown_tokens_end_it():
    commits = rounds(Watched(), (Always(), Always(7, 8, 10**6), Always(9)), ())
    assert commits[0][0].trace.tokens[1:] == [7, 8] and commits[0][0].trace.drafters == ["", "guess", "guess"]
    assert commits[0][1].trace.tokens[1:] == [5, 5, 5] and commits[0][1].trace.drafters[1] == "watched"
    assert [commit.guesses_drafted for commit in commits[0]] == [2, 0]


def test_no_more_is_guessed_than_a_row_may_draft():
    commits = rounds(Watched(), (Always(1, 2, 3),), max_draft=1)
    assert {commit.drafted for each in commits for commit in each} <= {0, 1}
    assert {commit.drafted for each in rounds(Watched(), (Always(1, 2, 3),), max_draft=0) for commit in each} == {0}


def test_the_planner_learns_nothing_from_guesses():
    class Noting(FixedPlanner):
        def __init__(self):
            super().__init__("chain(3)")
            self.seen = []

        def observe(self, rows, done):
            self.seen.append(done)

    planner = Noting()
    rounds(Watched(), (Prediction(plainly()[0]),), (), planner=planner)
    both = [done for done in planner.seen if len(done.asked) == 2]
    assert both and all(done.asked[0] == done.accepted[0] == sum(done.drafted[0]) == 0 for done in both)
    assert any(done.asked[1] for done in both) and any(done.nodes > 4 for done in both), "the nodes are counted"


def test_the_depth_follows_what_was_right():
    guesses = RowGuesses([Always(*range(1, 60))])

    def once(accepted):
        guess = guesses.after([0], 1, most=32, vocab_size=100)
        assert isinstance(guess, Guessed)
        guesses.observe(guess, min(accepted, len(guess.tokens)), 32)
        return len(guess.tokens)

    assert [once(99) for _ in range(5)] == [FIRST, 8, 16, 32, 32]
    assert [once(2), once(0), once(99), once(99)] == [32, 3, 1, 2]


# -- predictions


def test_a_prediction_is_followed_and_found_again():
    prediction = Prediction([5, 6, 7, 8, 9, 5, 6, 1, 2, 3, 4]).begin()
    ids = [1, 2]  # the prompt says nothing of the place
    assert list(prediction.after(ids, 2)) == [5, 6, 7, 8, 9, 5, 6, 1, 2, 3, 4]
    expected = {6: [7, 8, 9], 0: [], 8: [9, 5, 6], 9: [5, 6, 1], 3: [4], 7: []}
    for tokens, following in (((5, 6), 6), ((0,), 0), ((8,), 8), ((9,), 9), ((3,), 3), ((7,), 7)):
        ids += tokens
        assert list(prediction.after(ids, 2))[:3] == expected[following], ids
    ids += (6, 7)
    assert list(prediction.after(ids, 2))[:2] == [8, 9], "two tokens are enough to go back"


def test_rows_with_one_prediction_do_not_share_a_place():
    shared = Prediction(list(range(20, 40)))
    first, second = RowGuesses([shared]), RowGuesses([shared])
    for guesses, text in ((first, [20, 21]), (second, [20])):
        found = guesses.after([1, *text], 1, most=4, vocab_size=100)
        assert found is not None and found.tokens[0] == text[-1] + 1 and found.name == "prediction"


def test_a_long_prediction_costs_a_round_no_more_than_a_short_one():
    """Neither what it says nor what it reads of the row grows."""
    prediction = Prediction(range(50_000)).begin()
    assert "ends" in vars(prediction), "its places are not looked up in a round"

    class Row(list):
        copied = 0

        def __getitem__(self, key):
            found = super().__getitem__(key)
            Row.copied += len(found) if isinstance(key, slice) else 0
            return found

    row = Row(range(30_000))
    assert len(prediction.after(row, 0)) == AHEAD
    row.append(0)
    Row.copied = 0
    assert prediction.after(row, 0) == () and Row.copied < 10


def test_an_empty_prediction_says_nothing():
    assert list(Prediction([]).begin().after([1, 2, 3], 1)) == []


# -- grammars

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "number": {"type": "integer"}},
    "required": ["name", "number"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("backend", ["llguidance", "outlines"])
def test_forced_tokens_are_drafted(backend):
    pytest.importorskip({"llguidance": "llguidance", "outlines": "outlines_core"}[backend])
    tokenizer = zoo.load_tokenizer("python-1m")
    forced = ForcedTokens(Grammar(tokenizer, json_schema=SCHEMA, backend=backend)).begin()
    ids, said = [7], []
    for token in [None, *tokenizer.encode('{"name": "x", "number": 3}'), tokenizer.eos_token_id]:
        ids += [] if token is None else [token]
        said.append(tokenizer.decode(forced.after(ids, 1)))
        assert list(forced.after(ids, 1)) == list(forced.after(ids, 1)), "asking changes nothing"
    assert said[0].startswith("{") and said[-1] == ""
    if backend == "llguidance":
        assert any("number" in text for text in said[1:])


def test_a_grammar_costs_fewer_passes_and_no_text():
    pytest.importorskip("llguidance")
    tokenizer, model = zoo.load_tokenizer("python-1m"), zoo.load("python-1m")
    grammar, prompt = Grammar(tokenizer, json_schema=SCHEMA), tokenizer.encode("x = ")
    speculator = Speculator(model, drafter="none", execution="eager")
    found = []
    for guesses in ((), (ForcedTokens(grammar),)):
        session = speculator.session()
        pipeline = Pipeline.alone([grammar], prompt_length=len(prompt))
        for seed in range(3):
            session.add(
                prompt,
                RowParameters(
                    30, do_sample=True, seed=(seed, 0), pipeline=pipeline, guesses=guesses, eos=frozenset([tokenizer.eos_token_id])
                ),
            )
        texts = {}
        while session.live:
            for commit in session.step():
                texts.setdefault(commit.slot, []).extend(commit.tokens)
        found.append((texts, session.stats.row_passes, session.stats.accepted))
    assert found[0][0] == found[1][0]
    assert found[1][1] + found[1][2] == found[0][1] and found[1][2] >= 12
    speculator.close()


def test_lengths_of_chains_differ_between_rows():
    commits = rounds("none", (Always(1, 2, 3),), (Always(4),))
    assert [commit.drafted for commit in commits[0]] == [3, 1]


def test_a_guess_that_raises_is_left_out_with_a_warning():
    class Breaks(Always):
        def after(self, ids, prompt_length):
            raise ValueError("no idea")

    with pytest.warns(UserWarning, match="raised ValueError.*goes on without it"):
        commits = rounds("none", (Breaks(), Always(1, 2)))
    assert commits[0][0].trace.tokens[1:] == [1, 2]
