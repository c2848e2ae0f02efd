"""Rows join and leave at any round, each with parameters of its own, and write what they would write alone."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache

import pytest
from cover import covered
from helpers import drafter_names, make_drafter, prompts, repetitive, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

from foredraft import ConfigurationError, RowParameters, Speculator
from foredraft.logits.processors import Pipeline
from foredraft.observer import Contention

PROMPTS = repetitive((30, 17, 3)) + prompts((40, 1), seed=4)


@dataclass(frozen=True)
class Plan:
    """A row: when it joins, which prompt, how it is continued, and after how many steps it is taken out, if ever."""

    joins: int
    prompt: int
    max_new_tokens: int
    sampled: bool
    penalised: bool
    seed: int
    leaves: int | None

    def parameters(self) -> RowParameters:
        processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)] if self.penalised else [])
        if self.sampled:
            processors += [TemperatureLogitsWarper(1.2), TopPLogitsWarper(0.95)]
        return RowParameters(
            max_new_tokens=self.max_new_tokens,
            do_sample=self.sampled,
            pipeline=Pipeline.alone(processors, prompt_length=len(PROMPTS[self.prompt])),
            seed=(self.seed, 0),
        )


PLANS = st.lists(
    st.builds(
        Plan,
        joins=st.integers(0, 7),
        prompt=st.integers(0, len(PROMPTS) - 1),
        max_new_tokens=st.integers(1, 12),
        sampled=st.booleans(),
        penalised=st.booleans(),
        seed=st.integers(0, 3),
        leaves=st.none() | st.integers(0, 5),
    ),
    min_size=1,
    max_size=5,
)


@cache
def plain(family: str) -> Speculator:
    return Speculator(tiny(family), drafter="none")


@cache
def alone(family: str, plan: Plan) -> list[int]:
    """Plain decoding of the row by itself, to its end."""
    session = plain(family).session()
    session.add(PROMPTS[plan.prompt], plan.parameters())
    text: list[int] = []
    while session.live:
        text += session.step()[0].tokens
    return text


@cache
def speculator(family: str, drafter: str, rule: str) -> Speculator:
    return Speculator(tiny(family), drafter=make_drafter(drafter, family), rule=rule, draft_length=3)


def play(session, plans):
    """Run the schedule; returns per plan its tokens and why it ended."""
    slots: dict[int, int] = {}
    texts: dict[int, list[int]] = {}
    reasons: dict[int, str | None] = {}
    step = 0
    while session.live or any(index not in slots for index in range(len(plans))):
        for index, plan in enumerate(plans):
            if plan.joins == step:
                slots[index] = session.add(PROMPTS[plan.prompt], plan.parameters())
                texts[slots[index]], reasons[slots[index]] = [], None
            leaves_now = plan.leaves is not None and plan.joins + plan.leaves == step
            if leaves_now and reasons[slots[index]] is None:
                session.remove(slots[index])
                reasons[slots[index]] = "removed"
        for commit in session.step() if session.live else ():
            texts[commit.slot] += commit.tokens
            reasons[commit.slot] = commit.finish_reason
        step += 1
    return [(texts[slots[index]], reasons[slots[index]]) for index in range(len(plans))]


@pytest.mark.parametrize(("family", "drafter"), covered(["llama", "gemma3_text"], drafter_names(), ways=1))
@settings(max_examples=4, deadline=None, derandomize=True)
@given(plans=PLANS)
def test_rows_equal_their_solo_runs(family, drafter, plans):
    session = speculator(family, drafter, "match").session(keep_stats=True)
    for plan, (text, reason) in zip(plans, play(session, plans)):
        expected = alone(family, Plan(0, plan.prompt, plan.max_new_tokens, plan.sampled, plan.penalised, plan.seed, None))
        assert text == (expected[: len(text)] if reason == "removed" else expected)
        assert reason in ("length", "removed")
    assert not session.live
    assert session.stats.new_tokens == sum(row.tokens for row in session.stats.rows)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(plans=PLANS)
def test_the_rejection_rule_in_the_same_schedule(plans):
    """Its sampled texts follow the law, not the seed of plain decoding; greedy rows equal their solo runs to the token."""
    session = speculator("llama", "draft-model", "rejection").session()
    for plan, (text, reason) in zip(plans, play(session, plans)):
        if not plan.sampled:
            expected = alone("llama", Plan(0, plan.prompt, plan.max_new_tokens, False, plan.penalised, plan.seed, None))
            assert text == (expected[: len(text)] if reason == "removed" else expected)
        assert reason == "removed" or len(text) == plan.max_new_tokens


@pytest.mark.nightly
@pytest.mark.parametrize("drafter", drafter_names())
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "gpt2"])
@settings(max_examples=150, deadline=None)
@given(plans=PLANS)
def test_many_schedules(family, drafter, plans):
    test_rows_equal_their_solo_runs.hypothesis.inner_test(family, drafter, plans)


def test_a_session_reuses_what_live_and_departed_rows_share():
    plan = Plan(0, 0, 6, False, False, 0, None)
    session = speculator("llama", "ngram", "match").session()
    expected = alone("llama", plan)
    session.add(PROMPTS[0], plan.parameters())
    first = session.step()[0].tokens
    slot = session.add(PROMPTS[0], plan.parameters())  # joins while its twin is alive, and copies its cache
    texts = {0: first, slot: []}
    while session.live:
        for commit in session.step():
            texts[commit.slot] += commit.tokens
    assert texts == {0: expected, slot: expected}


def test_bad_rows_are_refused_and_disturb_nothing():
    plan = Plan(0, 0, 6, False, False, 0, None)
    session = speculator("llama", "none", "match").session()
    slot = session.add(PROMPTS[0], plan.parameters())
    text = session.step()[0].tokens
    for ids in ([], [1, 128], [-1]):
        with pytest.raises(ConfigurationError):
            session.add(ids, plan.parameters())
    with pytest.raises(ConfigurationError, match="max_new_tokens"):
        session.add([1], RowParameters(max_new_tokens=0))
    with pytest.raises(KeyError, match="77"):
        session.remove(77)
    while session.live:
        text += session.step()[0].tokens
    assert text == alone("llama", plan)
    with pytest.raises(KeyError):
        session.remove(slot)
    assert session.step() == []


def test_after_an_error_in_a_step_nothing_is_left():
    plan = Plan(0, 0, 6, False, False, 0, None)
    drafter = make_drafter("prompt-lookup")
    broken = Speculator(tiny(), drafter=drafter, shape="chain(5)")
    session = broken.session()
    session.add(PROMPTS[0], plan.parameters())
    session.step()
    drafter.draft = lambda request: 1 / 0
    with pytest.raises(ZeroDivisionError):
        session.step()
    assert not session.live and broken.target.lengths == [] and broken.target.cache.bytes == 0
    del drafter.draft
    session.add(PROMPTS[0], plan.parameters())
    text = []
    while session.live:
        text += session.step()[0].tokens
    assert text == alone("llama", plan)


def test_a_row_that_waits_can_be_removed():
    plan = Plan(0, 0, 6, False, False, 0, None)
    for keep in (True, False):
        session = speculator("llama", "prompt-lookup", "match").session(keep_stats=keep)
        session.remove(session.add(PROMPTS[0], plan.parameters()))
        assert not session.live
        assert [row.finish_reason for row in session.stats.rows] == ["removed"] * keep


def test_the_statistics_of_rows_that_are_over_are_let_go():
    model = Speculator(tiny(), "prompt-lookup", draft_length=2)
    session, tokens = model.session(), 0
    for number in range(12):
        last = session.add(PROMPTS[0], RowParameters(max_new_tokens=3 + number % 3))
        while session.waiting or len(session.rows) > 2:
            commits = session.step()
            tokens += sum(len(commit.tokens) for commit in commits)
            assert all(commit.stats.tokens == len(commit.stats.token_times) for commit in commits)
            assert len(session.stats.rows) == len(session.rows) + len(session.waiting) <= 3
    session.remove(last)
    session.close()
    assert session.stats.rows == [] and session.stats.new_tokens == tokens


def test_histories_take_the_memory_of_their_text(monkeypatch):
    """Not that of the limit: 4e9 tokens of 8 bytes would be 32 GB."""
    monkeypatch.setattr("foredraft.rows.LEAST", 40)
    session = Speculator(tiny(), "none", self_test=False).session()  # so that its cache has no pages, and no limit
    pipeline = Pipeline.alone(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)]), prompt_length=len(PROMPTS[0]))
    texts = {}
    for limit in (4_000_000_000, 80):
        session.add(PROMPTS[0], RowParameters(max_new_tokens=limit, pipeline=pipeline))
    for _ in range(80):
        for commit in session.step():
            texts.setdefault(commit.slot, []).extend(commit.tokens)
        assert session.loop.committed._ids is None or session.loop.committed._ids.shape[1] <= 2 * (30 + 80) + 1
    wanted = Speculator(tiny(), "none").session()
    wanted.add(PROMPTS[0], RowParameters(max_new_tokens=80, pipeline=pipeline))
    text = [token for _ in range(80) for commit in wanted.step() for token in commit.tokens]
    assert texts == {0: text, 1: text}


def test_a_row_may_leave_before_the_draft_model_has_seen_the_next():
    """The one that joined has been prefilled by the target and has no place in the draft's buffers yet."""
    model = Speculator(tiny(), drafter=make_drafter("draft-model", "llama"), rule="match", draft_length=3)
    session = model.session()
    first, _ = (session.add(PROMPTS[row], RowParameters(max_new_tokens=8)) for row in (0, 1))
    session.step()
    session.step()
    last = session.add(PROMPTS[3], RowParameters(max_new_tokens=8))
    text = session.step()[0].tokens
    session.remove(first)
    while session.live:
        text += [token for commit in session.step() if commit.slot == last for token in commit.tokens]
    assert text == alone("llama", Plan(0, 3, 8, False, False, 0, None))


def test_a_busy_machine_is_named_once():
    contention = Contention()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(100):
            contention.add(0.1, 0.09)  # nearly a core of its own
    with pytest.warns(UserWarning, match="this machine is busy: .* 25% of a core, .* 4.0 times"):
        contention.add(3.0, 0.75)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(100):
            contention.add(0.1, 0.025)
    with pytest.warns(UserWarning, match="got 0% of a core, .* 100.0 times"):  # of a clock that ticks too slowly to tell
        Contention().add(3.0, 0.0)
