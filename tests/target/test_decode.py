"""Several passes of plain decoding in one call, against a call for each."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from cover import nightly_but
from kernel_cases import DESCRIBED, DTYPES, build, needs_kernels
from kernel_cases import always as always  # a fixture
from sourced_cases import build as build_sourced
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import foredraft.round as round_module
import foredraft.session as session_module
from foredraft import RowParameters, Speculator, TokenTree
from foredraft.backends.native_growth import NativeGrowth
from foredraft.drafters.draft_model import DraftModel
from foredraft.logits.noise import Noise
from foredraft.logits.processors import Pipeline
from foredraft.models.encoder_decoder import some_source
from foredraft.planning.search import chain
from foredraft.target import Target
from foredraft.target import passes as passes_module

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


def decoded(found, count, *, most):
    """The tokens and ``[count, V]`` logits of greedy passes behind ``TEXT``, and how many were made in each call."""
    ids, logits, calls = list(TEXT), [], []
    found.open([ids])
    ids.append(int(found.prefill([ids], first=0).argmax()))
    while len(logits) < count:
        read, got = found.decode(root(ids[-1]), ids, most=min(most, count - len(logits)), ends=(), draws=None)
        found.commit(None, [1 + len(read)])
        logits += got[0].clone()
        calls.append(len(got[0]))
        ids += [*read, int(got[0, -1].argmax())]
    return ids[len(TEXT) :], torch.stack(logits), calls


@torch.inference_mode()
@pytest.mark.parametrize(("name", "dtype"), nightly_but({(name, dtype) for name in SEVERAL for dtype in DTYPES}, EACH))
def test_logits_have_the_bits_of_a_call_for_each_pass(name, dtype):
    found = target(name, dtype)
    tokens, wanted, singly = decoded(found, 24, most=1)
    found.reset()
    passes = found.passes
    got_tokens, got, calls = decoded(found, 24, most=24)
    assert torch.equal(got, wanted) and got_tokens == tokens
    assert singly == [1] * 24
    assert calls == [1, 1, 16, 6] or calls == [2, 16, 6]  # up to the end of the page; before the first pass its seconds are not known
    assert found.passes - passes == 1 + 24


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", nightly_but({("llama",), ("gemma3",), ("gpt_oss",)}, [(name,) for name in SEVERAL]))
def test_texts_are_those_of_a_call_for_each_pass(name, settings, monkeypatch):
    found = []
    for most in (1, 16):
        monkeypatch.setattr(passes_module, "MOST", most)
        speculator = Speculator(build(name, torch.float32), "none", execution="native")
        made = speculator.generate(torch.tensor([TEXT[:60]]), max_new_tokens=40, seed=3, output_scores=True, output_logits=True, **settings)
        found.append((made.sequences.tolist(), made.stats.target_passes, torch.cat(made.scores), torch.cat(made.logits)))
    assert found[0][:2] == found[1][:2]  # every pass was of use
    assert all(torch.equal(*pair) for pair in zip(found[0][2:], found[1][2:]))


@pytest.mark.parametrize("name", ["t5 v1.1", "bart"])
def test_decoders_of_an_encoder(name, monkeypatch):
    given = next(iter(some_source(build_sourced(name, torch.float32), 30, 1).inputs.values()))
    found, calls, kernel = [], [], NativeGrowth.decode
    monkeypatch.setattr(NativeGrowth, "decode", lambda self, *args, **how: calls.append(1) or kernel(self, *args, **how))
    for most in (1, 16):
        monkeypatch.setattr(passes_module, "MOST", most)
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


def test_another_token_than_the_kernel_has_chosen(monkeypatch):
    """Noise of other places makes it choose others. The rule has the last word, and what was read behind is not kept."""
    texts, drawn = [], round_module.draws_of
    settings = {"do_sample": True, "temperature": 1.2, "max_new_tokens": 40, "seed": 3}
    for wrong in (False, True):
        with monkeypatch.context() as patch:
            if wrong:
                patch.setattr(round_module, "draws_of", lambda sampler, count, **how: drawn(moved(sampler), count, **how))
            speculator = Speculator(build("llama", torch.float32), "none", execution="native")
            made = speculator.generate(torch.tensor([TEXT[:60]]), **settings)
        texts.append(made.sequences.tolist())
        assert made.stats.target_passes > 60 if wrong else made.stats.target_passes == 40
    assert texts[0] == texts[1]


def moved(sampler):
    """It with the noise of the places behind."""
    return dataclasses.replace(sampler, noise=Noise(sampler.noise.keys, sampler.noise.positions + 1))


@pytest.mark.parametrize("changed", ["weights", "hook", "nothing"])
def test_a_model_that_changes_between_calls(changed, monkeypatch):
    texts, seen = [], []
    for most in (1, 16):
        monkeypatch.setattr(passes_module, "MOST", most)
        speculator = Speculator(build("llama", torch.float32), "none", execution="native")
        session, text, steps = speculator.session(), [], 0
        seen.clear()
        session.add(TEXT[:70], RowParameters(max_new_tokens=40))
        while session.live:
            text += session.step()[0].tokens
            steps += 1
            if len(text) != 18:
                continue
            assert steps == (18 if most == 1 else 3)
            if changed == "weights":
                with torch.no_grad():
                    speculator.model.model.norm.weight.mul_(-1)
            elif changed == "hook":
                speculator.model.model.layers[1].register_forward_hook(lambda *given: seen.append(1))
        assert bool(seen) == (changed == "hook")
        texts.append(text)
    assert texts[0] == texts[1]


def test_a_row_joins_behind_a_call():
    speculator = Speculator(build("llama", torch.float32), "none", execution="native")
    alone = [speculator.generate(torch.tensor([text]), max_new_tokens=40).sequences[0, len(text) :].tolist() for text in (TEXT, TEXT[:50])]
    session = speculator.session(keep_stats=True)
    first = session.add(TEXT, RowParameters(max_new_tokens=40))
    texts = {first: [token for _ in range(4) for commit in session.step() for token in commit.tokens]}
    assert len(texts[first]) > 16
    second = session.add(TEXT[:50], RowParameters(max_new_tokens=40))
    assert [commit.slot for commit in session.step()] == [second] or second
    while session.live:
        for commit in session.step():
            texts.setdefault(commit.slot, []).extend(commit.tokens)
    assert texts[first] == alone[0] and alone[1][-len(texts[second]) :] == texts[second]


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
        session.add(TEXT[:150], RowParameters(max_new_tokens=20, do_sample=sampled, pipeline=pipeline, seed=(5, 0)))
        steps = 0
        while session.live:
            session.step()
            steps += 1
        assert steps == (4 if foreseen else 20)
        assert session.stats.target_passes == 20


@torch.inference_mode()
def test_how_many_passes_are_made_in_a_call(monkeypatch):
    """As many as are asked for, take a tenth of a second, and write to one page."""
    found, asked = target("llama", torch.float32), []
    monkeypatch.setattr(found.backend, "decode", lambda ids, *, most, **how: asked.append(most))
    for length, pace, most, expected in (
        (10, None, 50, None),  # how long one takes is not known
        (10, 0.03, 50, 3),
        (10, 0.03, 2, 2),
        (62, 0.03, 50, 2),
        (63, 0.03, 50, None),
        (10, 1e-5, 50, passes_module.MOST),
        (10, 2.0, 50, None),
    ):
        found.open([TEXT[:length]])
        found.prefill([TEXT[:length]], first=0)
        found._pace = pace
        read, logits = found.decode(root(5), [*TEXT[:length], 5], most=most, ends=(), draws=None)
        assert read == [] and logits.shape[1] == 1
        assert asked == ([] if expected is None else [expected])
        asked.clear()
        found.reset()


@pytest.fixture
def resting(monkeypatch):
    """A Speculator whose planner drafts nothing, and makes 8 passes in a call; and the rounds that it is told of."""
    speculator, told = Speculator(build("llama", torch.float32), "prompt-lookup", execution="native"), []
    monkeypatch.setattr(speculator.planner, "observe", lambda rows, done: told.append(done))
    monkeypatch.setattr(type(speculator.planner), "plan", lambda *args, **how: chain(0))
    monkeypatch.setattr(type(speculator.planner), "resting", 7)
    monkeypatch.setattr(passes_module, "MOST", 8)
    speculator.target._pace = 1e-5
    return speculator, told


def test_what_planner_speedup_and_statistics_are_told(resting):
    speculator, told = resting
    made = speculator.generate(torch.tensor([TEXT[:128]]), max_new_tokens=18, do_sample=False)
    assert [each.passes for each in told] == [8, 8, 1]
    assert made.stats.target_passes == 18 and made.stats.shapes == {"chain(0)": 17}
    assert made.stats.row_passes == made.stats.kept == 17 and made.stats.drafted == made.stats.accepted == 0
    assert made.stats.seconds["target"] == pytest.approx(sum(each.passes * each.target for each in told))
    assert all(each.target > 0 and each.rest > 0 and not any(each.drafted) and each.nodes == 1 for each in told)
    found = made.stats.speedup
    assert found.plain_rounds == 17 and found.plain == pytest.approx(found._plain)
    assert found.seconds >= found.plain > made.stats.seconds["target"]
    assert sorted(found._times[1])[-1] < made.stats.seconds["target"]


def test_whether_several_passes_could_be_made_is_told_only_where_that_lasts(resting, monkeypatch):
    speculator, told = resting
    text, wanted = torch.tensor([TEXT[:127]]), {"max_new_tokens": 9, "do_sample": False}
    speculator.generate(text, **wanted)
    assert [(each.passes, each.single) for each in told] == [(1, False), (7, False)]  # a page of the cache ends behind the first one
    for name, value, passes, single in (("_pace", 2.0, 1, True), ("_pace", None, 1, False), ("_pace", 1e-5, 1, True)):
        if value == 1e-5:
            monkeypatch.setattr(speculator.target.backend, "decode", lambda *args, **how: None)
        told.clear()
        setattr(speculator.target, name, value)
        speculator.generate(text[:, :100], **wanted)
        assert (told[0].passes, told[0].single) == (passes, single)
    told.clear()
    speculator.generate(text[:, :100], repetition_penalty=1.3, **wanted)
    assert [each.single for each in told] == [True] * 7 + [False]  # the last pass was to be alone


def test_a_text_that_ends_in_the_middle_of_a_call(resting):
    """The passes behind its end are made in vain, and are no rounds of it."""
    speculator, told = resting
    ends = [lambda ids, scores: ids.shape[1] == 128 + 12]
    made = speculator.generate(torch.tensor([TEXT[:128]]), max_new_tokens=40, do_sample=False, stopping_criteria=ends)
    assert made.sequences.shape[1] == 140 and [each.passes for each in told] == [8, 8]
    assert made.stats.target_passes == 17 and made.stats.shapes == {"chain(0)": 11}
    assert made.stats.row_passes == made.stats.kept == 11 and made.stats.acceptance_length == 1.0
    assert made.stats.speedup.plain_rounds == 11 and made.stats.speedup.value == pytest.approx(1.0, abs=0.5)
    assert made.stats.speedup.plain == pytest.approx(made.stats.speedup._plain)


@pytest.mark.parametrize("name", ["token-recycling", "lookahead"])
def test_drafters_learn_from_the_logits_of_every_pass(name, resting, monkeypatch):
    """And not how often drafts are right."""
    found = []
    for most in (1, 8):
        monkeypatch.setattr(passes_module, "MOST", most)
        speculator, logits, sizes = Speculator(build("llama", torch.float32), name, execution="native"), [], []

        def told(rows, feedback, observe=speculator.drafter.observe, logits=logits, sizes=sizes):
            logits.append(feedback.logits[0].clone())
            sizes.append(feedback.tree.nodes)
            assert feedback.drafted == (sizes[-1] == 1)
            observe(rows, feedback)

        monkeypatch.setattr(speculator.drafter, "observe", told)
        speculator.target._pace = 1e-5
        speculator.generate(torch.tensor([TEXT[:128]]), max_new_tokens=18, do_sample=False)
        assert sizes == ([1] * 17 if most == 1 else [8, 8, 1])
        found.append(torch.cat(logits))
    assert torch.equal(*found)


def test_a_try_that_finds_nothing_is_the_first_of_several_passes(monkeypatch):
    speculator, told = Speculator(build("llama", torch.float32), "prompt-lookup", execution="native"), []
    monkeypatch.setattr(speculator.planner, "observe", lambda rows, done: told.append(done))
    monkeypatch.setattr(type(speculator.planner), "plan", lambda *args, **how: chain(4))
    monkeypatch.setattr(type(speculator.planner), "resting", 5)
    speculator.target._pace = 1e-5
    text = [*range(40), 7]
    monkeypatch.setattr(speculator.drafter, "draft", lambda request: request.chains([()]))
    made = speculator.generate(torch.tensor([text]), max_new_tokens=13, do_sample=False)
    assert [each.passes for each in told] == [6, 6]
    assert all(each.shape == chain(4) and each.asked == [4] and not any(each.drafted) for each in told)
    assert made.stats.shapes == {"chain(4)": 2, "chain(0)": 10}


def test_traces_are_of_a_pass_each():
    speculator = Speculator(build("llama", torch.float32), "none", execution="native")
    session, commits = speculator.session(), []
    session.add(TEXT[:128], RowParameters(max_new_tokens=20, trace=True))
    while session.live:
        commits += session.step()
    assert len(commits) == 20 and all(len(each.tokens) == 1 for each in commits)


def test_a_pass_is_made_alone_while_a_row_waits(monkeypatch):
    """Its prompt is read in pieces, one before each round."""
    monkeypatch.setattr(session_module, "PAUSE", 0.0)
    monkeypatch.setattr(session_module, "SHARE", 0.0)
    speculator = Speculator(build("llama", torch.float32), "none", execution="native")
    session = speculator.session()
    first = session.add(TEXT[:20], RowParameters(max_new_tokens=100))
    assert [len(session.step()[0].tokens) for _ in range(3)] == [1, 1, 16]
    session.add(TEXT, RowParameters(max_new_tokens=1))
    rounds = []
    while {(commit := session.step()[0]).slot} == {first}:
        rounds.append(len(commit.tokens))
    assert len(rounds) >= 190 // 16 and set(rounds) == {1}


@pytest.mark.parametrize("rule", ["match", "block"])
def test_a_row_that_wants_no_drafts(rule):
    draft = DraftModel(build("llama", torch.float32))
    speculator = Speculator(build("llama", torch.float32), draft, rule=rule, shape="chain(4)", execution="native")
    session, sizes = speculator.session(keep_stats=True), []
    session.add(TEXT[:100], RowParameters(max_new_tokens=20, max_draft=0))
    while session.live:
        sizes.append(len(session.step()[0].tokens))
    assert sizes == [1, 1, 16, 2]
    assert session.stats.target_passes == 20
