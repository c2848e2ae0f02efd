"""A row that cannot go on fails alone: the others write what they would have written without it, and nothing it did stays behind."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from cover import by_turns
from head_cases import make
from helpers import clone, drafter_names, make_drafter, perturbed, prompts, repetitive, tiny
from kernel_cases import build, needs_kernels
from learning_cases import never_started
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, TemperatureLogitsWarper

from foredraft import RowParameters, Speculator, TargetOutputError, drafters
from foredraft.drafters.learning.serving import Learning
from foredraft.logits.processors import Pipeline
from foredraft.logits.sampler import Sampler
from foredraft.models.cache import TreeCache

GOOD, NEW = [[token % 97 for token in prompt] for prompt in repetitive((30, 17))], 9
BAD = prompts((24,), seed=4, vocabulary=97)[0]
POISON = 99  # a token whose embedding is NaN


class Raises(LogitsProcessor):
    """At a length; before that it does nothing."""

    def __init__(self, length, error=ZeroDivisionError):
        self.length, self.error = length, error

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.length:
            raise self.error(f"at {input_ids.shape[1]}")
        return scores


class Forces(LogitsProcessor):
    """One token at a length."""

    def __init__(self, length, token):
        self.length, self.token = length, token

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] != self.length:
            return scores
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([self.token]), 0.0)


class Nothing(LogitsProcessor):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, -torch.inf) if input_ids.shape[1] >= self.length else scores


class Breaks(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **others):
        return 1 / 0 if input_ids.shape[1] >= self.length else torch.zeros(1, dtype=torch.bool)


def parameters(number, prompt, processors=(), sampled=True, **changes):
    processors = [TemperatureLogitsWarper(1.2)] * sampled + list(processors)
    pipeline = Pipeline.alone(LogitsProcessorList(processors), prompt_length=len(prompt))
    return replace(RowParameters(max_new_tokens=NEW, do_sample=sampled, pipeline=pipeline, seed=(number, 0)), **changes)


def poisoned(model):
    """With a token that makes everything behind it NaN."""
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    return model


def run(session, joining):
    """By slot the text of each row, why it ended, and its error; rows join at these steps, ``[(step, prompt, parameters)]``."""
    texts, ends, step = {}, {}, 0
    while session.live or len(texts) < len(joining):
        for when, prompt, given in joining:
            if when == step:
                texts[session.add(prompt, given)] = []
        for commit in session.step():
            texts[commit.slot] += commit.tokens
            ends[commit.slot] = commit.finish_reason, commit.error
            assert (commit.error is None) == (commit.finish_reason != "error")
        step += 1
    return texts, ends


FAULTS = {  # after how many tokens; what is done; the error
    "a processor": lambda length: ({"processors": [Raises(length)]}, ZeroDivisionError),
    "no token": lambda length: ({"processors": [Nothing(length)]}, TargetOutputError),
    "a criterion": lambda length: ({"criteria": [Breaks(length)]}, ZeroDivisionError),
    "NaN": lambda length: ({"processors": [Forces(length, POISON)]}, TargetOutputError),
}
WAYS = {
    "pages": ("auto", {}),
    "one block": ("auto", {"self_test": False}),
    "kernels": ("native", {}),
}


@cache
def served(way, drafter, shape):
    execution, options = WAYS[way]
    model = poisoned(clone(tiny()) if execution == "auto" else build("llama", torch.float32))
    return Speculator(model, make_drafter(drafter), shape=shape, rule="match", execution=execution, **options)


@pytest.mark.parametrize("way", [pytest.param("kernels", marks=needs_kernels), "pages", "one block"])
@pytest.mark.parametrize("after", [0, 3], ids=["in the prefill", "in a later round"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_others_write_what_they_would_have_written(fault, after, way):
    """A chain of what was there before; the row that fails is prefilled with one of the others, and a third joins when it is gone."""
    changes, error = FAULTS[fault](len(BAD) + after)
    bad = [*BAD[:-1], POISON] if fault == "NaN" and not after else BAD
    good = [(0, GOOD[0], parameters(0, GOOD[0], logprobs=1)), (6, GOOD[1], parameters(1, GOOD[1], sampled=False))]
    model = served(way, "prompt-lookup", "chain(3)")
    alone, _ = run(model.session(), good)
    rest = [good[0], (0, bad, parameters(5, bad, **changes)), (0, GOOD[1], parameters(3, GOOD[1])), good[1]]
    session = model.session()
    texts, ends = run(session, rest)
    assert (texts[0], texts[3]) == (alone[0], alone[1])
    assert [ends[slot] for slot in (0, 2, 3)] == [("length", None)] * 3
    assert ends[1][0] == "error" and isinstance(ends[1][1], error)
    counted = {"NaN": after + 1 if after else 0, "a criterion": max(1, after)}
    assert len(texts[1]) == counted.get(fault, after)
    assert not session.live and model.target.lengths == []
    again, _ = run(model.session(), good)
    assert again == alone


@pytest.mark.parametrize("drafter", by_turns(drafter_names(), 0))
def test_every_drafter_goes_on(drafter):
    model = Speculator(poisoned(clone(tiny())), make_drafter(drafter), rule="match", draft_length=3)
    good = [(0, GOOD[0], parameters(0, GOOD[0])), (5, GOOD[1], parameters(1, GOOD[1]))]
    alone, _ = run(Speculator(tiny(), "none").session(), good)
    bad = [(0, BAD, parameters(7, BAD, [Raises(len(BAD) + 2)])), (1, BAD, parameters(8, BAD, [Forces(len(BAD) + 2, POISON)]))]
    texts, ends = run(model.session(), [bad[0], good[0], bad[1], good[1]])
    assert (texts[1], texts[3]) == (alone[0], alone[1])
    assert [ends[slot][0] for slot in range(4)] == ["error", "length", "error", "length"]


# -- a processor that raises on a draft --------------------------------------------------------------------------------------


class Dislikes(LogitsProcessor):
    """Raises where a text ends in a token that plain decoding does not choose there."""

    def __init__(self, prompt, text):
        self.texts = [[*prompt, *text[:length]] for length in range(len(text) + 1)]

    def __call__(self, input_ids, scores):
        if input_ids[0].tolist() not in self.texts:
            raise KeyError("what plain decoding never asks")
        return scores


@pytest.mark.parametrize("drafter", ["draft-model", "prompt-lookup", "ngram"])
@pytest.mark.parametrize("shape", ["chain(3)", "product(2,2)"])
def test_a_processor_that_raises_on_a_rejected_draft_does_no_harm(drafter, shape, monkeypatch):
    """Plain decoding would not have asked it."""
    prompt, asked = BAD if drafter == "draft-model" else GOOD[0], []  # some drafts have to be wrong
    one_by_one = Sampler._one_by_one
    monkeypatch.setattr(Sampler, "_one_by_one", lambda *given: asked.append(given) or one_by_one(*given))
    ((text,), _) = (list(each.values()) for each in run(Speculator(tiny(), "none").session(), [(0, prompt, parameters(0, prompt))]))
    model = Speculator(tiny(), make_drafter(drafter), rule="match", shape=shape)
    texts, ends = run(model.session(), [(0, prompt, parameters(0, prompt, [Dislikes(prompt, text)])), (0, GOOD[1], parameters(1, GOOD[1]))])
    assert texts[0] == text and ends[0] == ("length", None)
    assert asked


def test_what_a_draft_gained_before_an_error_is_kept():
    """The text in front of it is that of plain decoding, however it was drafted."""
    prompt = GOOD[0]
    given = parameters(0, prompt, [Raises(len(prompt) + 5)])
    found = [
        run(Speculator(tiny(), make_drafter(name), rule="match", shape="chain(4)").session(), [(0, prompt, given)])
        for name in ("none", "draft-model")
    ]
    assert found[0][0] == found[1][0] and len(found[0][0][0]) == 5
    assert [str(ends[0][1]) for _, ends in found] == [f"at {len(prompt) + 5}"] * 2


def test_an_end_in_front_of_an_error_counts():
    prompt = GOOD[0]
    text = run(Speculator(tiny(), "none").session(), [(0, prompt, parameters(0, prompt))])[0][0]
    ends = frozenset([text[2]])
    given = parameters(0, prompt, [Raises(len(prompt) + text.index(text[2]) + 1)], eos=ends)
    for name in ("none", "draft-model"):
        session = Speculator(tiny(), make_drafter(name), rule="match", shape="chain(4)").session()
        texts, reasons = run(session, [(0, prompt, given)])
        assert reasons[0] == ("eos", None) and texts[0] == text[: text.index(text[2]) + 1]


# -- callers whose rows are one call ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_a_call_fails_with_its_row(how):
    model = Speculator(tiny(), make_drafter("prompt-lookup"))
    ids = torch.tensor([GOOD[0][:17], GOOD[1]][: 1 if how == "stream" else 2])
    processors = LogitsProcessorList([Raises(20, LookupError)])
    with pytest.raises(LookupError, match="at 20"):
        list(model.stream(ids, max_new_tokens=9, logits_processor=processors)) if how == "stream" else model.generate(
            ids, max_new_tokens=9, logits_processor=processors
        )
    assert model.generate(ids, max_new_tokens=3).stats.new_tokens == 3 * len(ids)


# -- what would be learnt ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["draft-model", "medusa"])
def test_nothing_is_learnt_from_a_row_that_failed(kind, tmp_path, monkeypatch):
    """In its last round the target said nothing, and its hidden states may be NaN."""
    monkeypatch.setitem(Learning.__init__.__kwdefaults__, "start", never_started)
    source, pieces = perturbed() if kind == "draft-model" else make("medusa"), []
    drafter = drafters.find(kind)(source, learn=tmp_path)
    model = Speculator(poisoned(clone(tiny())), drafter, rule="match", shape="chain(3)")
    drafter.learning.duty.elapsed = 1e9  # there is time for every round
    drafter.learning.collector.keep = pieces.append
    bad = [parameters(7, BAD, [Raises(len(BAD) + 5)]), parameters(8, BAD, [Forces(len(BAD) + 4, POISON)])]
    texts, ends = run(
        model.session(), [(0, GOOD[0], parameters(0, GOOD[0], sampled=False, max_new_tokens=24)), *((0, BAD, each) for each in bad)]
    )
    assert [ends[slot][0] for slot in range(3)] == ["length", "error", "error"]
    text, learnt = [*GOOD[0], *texts[0]], [piece["tokens"][: piece["length"]].tolist() for piece in pieces]
    assert learnt and all(any(text[start : start + len(each)] == each for start in range(len(text))) for each in learnt)
    model.close()


# -- what would keep NaN --------------------------------------------------------------------------------------------------------


def test_zeros_take_the_place_of_what_was_no_number():
    cache = TreeCache()
    cache.open([2, 3])
    cache.layers = [type("Some", (), {"keys": torch.full((3, 1, 4, 2), torch.nan), "values": torch.full((3, 1, 4, 2), torch.nan)})()]
    cache.wipe([1])
    for store in (cache.layers[0].keys, cache.layers[0].values):
        assert store[1].eq(0).all() and store[[0, 2]].isnan().all()


def test_features_that_are_no_numbers_reach_no_later_row():
    """They would lie in the cache of the head behind the end of a shorter row, where a longer one beside it has tokens."""
    model = clone(tiny())
    model.get_input_embeddings().register_forward_hook(
        lambda module, given, out: out.masked_fill((given[0] == POISON)[..., None], torch.nan)
    )
    speculator = Speculator(model, make_drafter("eagle3"), rule="block", shape="chain(3)", self_test=False)
    bad, short, long = [*BAD[:4], POISON, *BAD[5:]], BAD[:9], GOOD[0]
    joining = [(0, bad, parameters(0, bad)), (1, short, parameters(1, short)), (1, long, parameters(2, long))]
    _, ends = run(speculator.session(), joining)
    assert ends[0][0] == "error" and isinstance(ends[0][1], TargetOutputError)
    assert ends[1] == ends[2] == ("length", None)
