"""Passes that are made ahead of their rounds, against a pass for each round."""

from __future__ import annotations

import copy

import pytest
import torch
from cover import nightly_but
from kernel_cases import DESCRIBED, DTYPES, build, needs_kernels
from kernel_cases import always as always  # a fixture
from sourced_cases import build as build_sourced
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import foredraft.session as session_module
from foredraft import RowParameters, Speculator, TokenTree
from foredraft.backends.native_growth import NativeGrowth
from foredraft.logits.processors import Pipeline
from foredraft.models.encoder_decoder import some_source
from foredraft.planning.search import chain
from foredraft.target import Target, ahead
from foredraft.target.ahead import Ahead

pytestmark = [needs_kernels, pytest.mark.usefixtures("always")]
TEXT = [(7 * i * i) % 100 for i in range(190)]  # ends two tokens before a page of the cache does, and windows have left its first pages
SEVERAL = ("llama", "gemma2", "gemma3", "granite", "gpt_oss", "deepseek_v3", "qwen3_moe", "stablelm-parallel")
EACH = [(name, dtype) for name in ("llama", *DESCRIBED) for dtype in DTYPES]
SETTINGS = (
    {},
    {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"do_sample": True, "temperature": 1.5, "top_k": 0},
)


def target(name, dtype, **options):
    found = Target(build(name, dtype), execution="native", owned=True, **options)
    assert found.backend.direct is not None, found.reasons
    return found


def root(token):
    return TokenTree.root(torch.tensor([token]))


def rounds(found, count, *, at_once):
    """``[count, V]`` logits of greedy rounds behind ``TEXT``, and how many passes each of them made."""
    ids, logits, passes = list(TEXT), [], []
    found.open([ids])
    last = found.prefill([ids], first=0)[0]
    for _ in range(count):
        ids.append(int(last.argmax()))
        before = found.passes
        how = {"most": count, "ends": (), "draws": None}
        last = (found.score_ahead(root(ids[-1]), ids, **how) if at_once else found.score(root(ids[-1])))[0, 0].clone()
        found.commit(None, [1])
        logits.append(last)
        passes.append(found.passes - before)
    return torch.stack(logits), passes


@torch.inference_mode()
@pytest.mark.parametrize(("name", "dtype"), nightly_but({(name, dtype) for name in SEVERAL for dtype in DTYPES}, EACH))
def test_logits_have_the_bits_of_a_pass_for_each_token(name, dtype):
    found = target(name, dtype)
    wanted, singly = rounds(found, 24, at_once=False)
    found.reset()
    got, passes = rounds(found, 24, at_once=True)
    assert torch.equal(got, wanted)
    assert singly == [1] * 24
    assert passes == [1, 1, 16, *[0] * 15, 16, *[0] * 5]  # behind 191 tokens, one place is left in the page


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", nightly_but({("llama",), ("gemma3",), ("gpt_oss",)}, [(name,) for name in SEVERAL]))
def test_texts_are_those_of_a_pass_for_each_token(name, settings, monkeypatch):
    found = []
    for most in (1, 16):
        monkeypatch.setattr(ahead, "MOST", most)
        speculator = Speculator(build(name, torch.float32), "none", execution="native")
        made = speculator.generate(torch.tensor([TEXT[:60]]), max_new_tokens=40, seed=3, output_scores=True, output_logits=True, **settings)
        found.append((made.sequences.tolist(), made.stats.target_passes, torch.cat(made.scores), torch.cat(made.logits)))
    assert found[0][:2] == found[1][:2]  # every pass that was made ahead was of use
    assert all(torch.equal(*pair) for pair in zip(found[0][2:], found[1][2:]))


@pytest.mark.parametrize("name", ["t5 v1.1", "bart"])
def test_decoders_of_an_encoder_read_ahead(name, monkeypatch):
    given = next(iter(some_source(build_sourced(name, torch.float32), 30, 1).inputs.values()))
    found, calls, kernel = [], [], NativeGrowth.ahead
    monkeypatch.setattr(NativeGrowth, "ahead", lambda self, *args, **how: calls.append(1) or kernel(self, *args, **how))
    for most in (1, 16):
        monkeypatch.setattr(ahead, "MOST", most)
        calls.clear()
        speculator = Speculator(copy.deepcopy(build_sourced(name, torch.float32)), "none", execution="native")
        found.append(speculator.generate(given, max_new_tokens=16, do_sample=False).sequences.tolist())
        assert bool(calls) == (most > 1 and name != "bart")  # which adds a bias to its logits
    assert found[0] == found[1]


def test_nothing_is_read_behind_an_end():
    speculator = Speculator(build("llama", torch.float32), "none", execution="native")
    given = {"max_new_tokens": 30, "do_sample": False}
    text = speculator.generate(torch.tensor([TEXT]), **given).sequences[0, len(TEXT) :].tolist()
    place = next(index for index in range(5, 30) if text[index] not in text[:index])
    ended = speculator.generate(torch.tensor([TEXT]), eos_token_id=[text[place], 1], **given)
    assert ended.sequences[0, len(TEXT) :].tolist() == text[: place + 1]
    assert ended.stats.target_passes == 1 + place  # the prompt's, and one for each token but the end


@torch.inference_mode()
@pytest.mark.parametrize("by", ["score", "score_ahead"])
def test_another_token_than_was_thought(by):
    """It is read by itself. Behind it, nothing that was made ahead is used, even if its own token is the one that was thought."""
    found = target("llama", torch.float32)
    found._ahead.pace = 0.01
    ids = list(TEXT[:130])
    found.open([ids])
    ids.append(int(found.prefill([ids], first=0).argmax()))
    how = {"most": 9, "ends": (), "draws": None}
    first = found.score_ahead(root(ids[-1]), ids, **how).argmax()
    found.commit(None, [1])
    thought = found._ahead._tokens
    assert found.ahead and thought[1] == int(first)
    for token in ((thought[1] + 1) % 100, thought[2]):
        ids.append(token)
        got = found.score(root(token)) if by == "score" and token != thought[2] else found.score_ahead(root(token), ids, **how)
        got = got.clone()
        found.commit(None, [1])
        alone = target("llama", torch.float32)
        alone.open([ids])
        assert torch.equal(got[0, 0], alone.prefill([ids], first=0)[0])


@pytest.mark.parametrize("changed", ["weights", "hook", "nothing"])
def test_a_model_that_changes_between_rounds(changed, monkeypatch):
    """Logits that were made ahead are of the model as it was."""
    texts, seen = [], []
    for most in (1, 16):
        monkeypatch.setattr(ahead, "MOST", most)
        speculator = Speculator(build("llama", torch.float32), "none", execution="native")
        session, text = speculator.session(), []
        seen.clear()
        session.add(TEXT[:70], RowParameters(max_new_tokens=30))
        while session.live:
            text += session.step()[0].tokens
            if len(text) != 12:
                continue
            assert speculator.target.ahead == (most > 1)
            if changed == "weights":
                with torch.no_grad():
                    speculator.model.model.norm.weight.mul_(-1)
            elif changed == "hook":
                speculator.model.model.layers[1].register_forward_hook(lambda *given: seen.append(1))
        assert bool(seen) == (changed == "hook")
        texts.append(text)
    assert texts[0] == texts[1]


def test_rows_join_when_what_was_made_ahead_is_used_up():
    speculator = Speculator(build("llama", torch.float32), "none", execution="native")
    alone = [speculator.generate(torch.tensor([text]), max_new_tokens=40).sequences[0, len(text) :].tolist() for text in (TEXT, TEXT[:50])]
    session = speculator.session(keep_stats=True)
    first = session.add(TEXT, RowParameters(max_new_tokens=40))
    texts = {first: [token for _ in range(6) for commit in session.step() for token in commit.tokens]}
    assert speculator.target.ahead
    passes, steps, second = speculator.target.passes, 0, session.add(TEXT[:50], RowParameters(max_new_tokens=40))
    while second not in texts:
        for commit in session.step():
            texts.setdefault(commit.slot, []).extend(commit.tokens)
        steps += 1
    assert speculator.target.passes == passes + 1  # the second row's prompt
    assert 1 < steps < 16
    while session.live:
        for commit in session.step():
            texts[commit.slot] += commit.tokens
    assert [texts[first], texts[second]] == alone


def test_processors_that_may_change_the_choice_are_waited_for():
    """Temperature, top-k and top-p are foreseen, and others are not: nothing is read in vain."""
    known = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(10), TopPLogitsWarper(0.9)]
    other = [*known, lambda ids, scores: scores.roll(1, -1)]
    for processors, sampled, foreseen in (
        (known, True, True),
        (other, True, False),
        ([RepetitionPenaltyLogitsProcessor(9.0)], False, False),
    ):
        speculator = Speculator(build("llama", torch.float32), "none", execution="native")
        session = speculator.session(keep_stats=True)
        pipeline = Pipeline.alone(LogitsProcessorList(processors), prompt_length=len(TEXT))
        session.add(TEXT, RowParameters(max_new_tokens=20, do_sample=sampled, pipeline=pipeline, seed=(5, 0)))
        seen = []
        while session.live:
            session.step()
            seen.append(speculator.target.ahead)
        assert any(seen) == foreseen
        assert session.stats.target_passes == 20


def test_how_many_passes_are_made_in_a_call():
    made, logits = Ahead(), torch.zeros(4, 10)
    assert made.passes(length=0, asked=50) == 1  # how long one takes is not known
    made.pace = 0.03
    assert [made.passes(length=length, asked=asked) for length, asked in ((0, 50), (0, 2), (62, 50), (63, 50))] == [3, 2, 2, 1]
    made.pace = 1e-5
    assert made.passes(length=0, asked=50) == ahead.MOST
    made.pace = 2.0
    assert made.passes(length=0, asked=50) == 1
    assert made.made("kernel", 100, [5, 6, 7, 8], logits).shape == (1, 1, 10)
    assert made.find("kernel", 101, 7) is None and made.find("another", 101, 6) is None and made.find("kernel", 104, 5) is None
    assert made.find("kernel", 101, 6).shape == (1, 1, 10)
    made.drop()
    assert made.find("kernel", 102, 7) is None and not made.left(102)


@pytest.fixture
def resting(monkeypatch):
    """A Speculator whose planner drafts nothing, and makes 8 passes in a call; and the rounds that it is told of."""
    speculator, told = Speculator(build("llama", torch.float32), "prompt-lookup", execution="native"), []
    monkeypatch.setattr(speculator.planner, "observe", lambda rows, done: told.append(done))
    monkeypatch.setattr(type(speculator.planner), "plan", lambda *args, **how: chain(0))
    monkeypatch.setattr(type(speculator.planner), "resting", 7)
    speculator.target._ahead.pace = 0.1 / 8.5
    return speculator, told


def test_the_rounds_of_a_call_are_one_for_planner_and_speedup(resting):
    speculator, told = resting
    made = speculator.generate(torch.tensor([TEXT[:128]]), max_new_tokens=18, do_sample=False)
    assert made.stats.target_passes == 18 and len(told) == 3  # 8, 8, and the last one
    assert made.stats.seconds["target"] == pytest.approx(8 * told[0].target + 8 * told[1].target + told[2].target)
    assert all(each.target > 0 and each.rest > 0 for each in told)
    found = made.stats.speedup
    assert found.plain_rounds == 17 and found.plain == pytest.approx(found._plain)
    assert found.seconds >= found.plain > made.stats.seconds["target"]
    assert sorted(found._times[1])[-1] < made.stats.seconds["target"]


def test_a_text_that_ends_in_the_middle_of_a_call(resting):
    """Its rounds are no part of the next text's first ones, and their seconds are counted."""
    speculator, told = resting
    session = speculator.session(keep_stats=True)
    for _ in range(2):
        slot = session.add(TEXT[:128], RowParameters(max_new_tokens=18))
        for _ in range(4):
            session.step()
        assert speculator.target.ahead and not told
        session.remove(slot)
        assert not speculator.target.ahead
    assert session.stats.speedup.plain_rounds == 6
    assert session.stats.speedup.seconds > session.stats.seconds["target"]


def test_nothing_is_read_ahead_while_a_row_waits(monkeypatch):
    """Its prompt is read in pieces, one before each round."""
    monkeypatch.setattr(session_module, "PAUSE", 0.0)
    monkeypatch.setattr(session_module, "SHARE", 0.0)
    speculator = Speculator(build("llama", torch.float32), "none", execution="native")
    session = speculator.session()
    first = session.add(TEXT[:20], RowParameters(max_new_tokens=100))
    while not speculator.target.ahead:
        session.step()
    session.add(TEXT, RowParameters(max_new_tokens=1))
    rounds = 0
    while {commit.slot for commit in session.step()} == {first}:
        rounds += 1
    assert 190 // 16 <= rounds < ahead.MOST + 190 // 16 + 2


def test_a_row_that_wants_no_drafts_is_read_ahead():
    speculator = Speculator(build("llama", torch.float32), "prompt-lookup", shape="chain(4)", execution="native")
    session, seen = speculator.session(), []
    session.add(TEXT[:100], RowParameters(max_new_tokens=20, max_draft=0))
    while session.live:
        session.step()
        seen.append(speculator.target.ahead)
    assert sum(seen) > 10
    assert session.stats.target_passes == 20
