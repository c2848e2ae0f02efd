"""Scores at every node equal those of `transformers` for the row alone, unpadded, with the node's own history: bit for bit.

The processors under test come from `generate` itself, prepared for a ragged padded batch; the reference comes from `generate`
called with each row alone.
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import transformers
from cover import covered
from helpers import alone, generate, make_drafter, perturbed, prompts, repetitive, tiny
from processor_cases import (
    CASES,
    EOS,
    LENGTHS,
    PARENTS,
    SAMPLE,
    VOCAB,
    Fingerprint,
    OwnPenalty,
    assert_same,
    batch_pipelines,
    committed_rows,
    expected,
    padded_batch,
    prefix_function,
    prepared,
    random_logits,
    random_prompts,
    random_tree,
    reached,
    references,
)
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from foredraft import RowParameters, Speculator, Stats
from foredraft.drafters.draft_model import DraftModel
from foredraft.errors import ConfigurationError
from foredraft.logits.histories import NodeHistories
from foredraft.logits.known_processors import KNOWN, REFUSED
from foredraft.logits.processors import Pipeline, Stage, process, row_pipelines
from foredraft.tree import TokenTree


@pytest.mark.parametrize("new", [(0, 0, 0), (1, 3, 2)], ids=["prefill", "later"])
@pytest.mark.parametrize("shape", ["root", "chain", "tree"])
@pytest.mark.parametrize("name", CASES)
def test_every_node_as_transformers_alone(name, shape, new):
    options, prompts = CASES[name], random_prompts()
    lists = references(prompts, options)
    pipelines = batch_pipelines(prompts, options)
    committed, lengths = committed_rows(prompts, new)
    tree = random_tree(committed, lengths, PARENTS if shape == "tree" else None, nodes=1 if shape == "root" else 6)
    logits = random_logits(tree)
    before = logits.clone()
    scores = process(pipelines, logits, NodeHistories(committed, lengths, tree))
    reference = expected(lists, logits, committed, lengths, tree)
    keep = reached(lists, logits, committed, lengths, tree) if any(pipeline.guarded for pipeline in pipelines) else None
    assert_same(scores, reference, keep)
    assert torch.equal(logits, before)
    if shape == "tree" and new == (0, 0, 0):
        assert not torch.equal(reference, logits), "the case changes nothing, so it tests nothing"


@pytest.mark.parametrize("name", CASES)
def test_the_case_table_covers_every_known_class(name):
    processors, _ = prepared(*padded_batch(random_prompts()), **CASES[name])
    assert processors, "transformers ignored the option"


def test_every_class_of_transformers_is_tested_or_refused():
    tested = {type(p).__name__ for case in CASES.values() for p in prepared(*padded_batch(random_prompts()), **case)[0]}
    tested.add("InfNanRemoveLogitsProcessor")  # has its own test below
    tested.add("WhisperTimeStampLogitsProcessor")  # in tests/target/test_encoder_decoder.py
    assert set(KNOWN) <= tested
    here = {
        name
        for name, cls in vars(hf).items()
        if inspect.isclass(cls) and cls.__module__ == hf.__name__ and "__call__" in vars(cls) and issubclass(cls, LogitsProcessor)
    }
    assert here - {"LogitsProcessor"} <= set(KNOWN) | set(REFUSED)


def test_infinities_and_nan_are_removed_where_asked():
    prompts, options = random_prompts(), {"remove_invalid_values": True}
    committed, lengths = committed_rows(prompts)
    tree = random_tree(committed, lengths)
    logits = random_logits(tree)
    logits[0, 1, 2], logits[1, 0, 3], logits[2, 4, 4] = float("nan"), float("inf"), -float("inf")
    pipelines = batch_pipelines(prompts, options)
    assert all(pipeline.removes_invalid for pipeline in pipelines) and not Pipeline().removes_invalid
    scores = process(pipelines, logits)
    assert_same(scores, expected(references(prompts, options), logits, committed, lengths, tree))
    assert bool(scores.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_cast_before_processing(dtype):
    prompts, options = random_prompts(), CASES["everything"]
    committed, lengths = committed_rows(prompts, (1, 0, 2))
    tree = random_tree(committed, lengths, PARENTS)
    logits = random_logits(tree, dtype)
    lists = references(prompts, options)
    scores = process(batch_pipelines(prompts, options), logits, NodeHistories(committed, lengths, tree))
    assert_same(scores, expected(lists, logits, committed, lengths, tree), reached(lists, logits, committed, lengths, tree))


@pytest.mark.parametrize(
    "name", ["min_new_tokens", "min_length", "forced_eos", "exponential_decay", "begin_suppress", "encoder_no_repeat_ngram"]
)
def test_right_padding_is_rebased_too(name):
    prompts, options = random_prompts(), CASES[name]
    committed, lengths = committed_rows(prompts)
    tree = random_tree(committed, lengths, PARENTS)
    logits = random_logits(tree)
    pipelines = batch_pipelines(prompts, options, side="right")
    scores = process(pipelines, logits, NodeHistories(committed, lengths, tree))
    assert_same(scores, expected(references(prompts, options), logits, committed, lengths, tree))


def test_right_padding_leaves_nothing_of_the_prompt_to_ignore():
    for pipeline in batch_pipelines(random_prompts(), {"repetition_penalty": 1.3}, side="right"):
        assert pipeline.stages[0].processor.prompt_ignore_length is None


def test_own_ignored_prompt_lengths_are_rebased():
    try:
        own = hf.RepetitionPenaltyLogitsProcessor(1.3, torch.tensor([7, 7, 5]))  # of a padded batch of width 7
    except ValueError:
        pytest.skip("this version of transformers takes one length for all rows")
    pipelines = row_pipelines([own], prompt_lengths=LENGTHS, padded_length=7)
    assert [p.stages[0].processor.prompt_ignore_length for p in pipelines] == [7, 1, 2]


def test_rows_repeated_by_num_return_sequences():
    """`generate` repeats the rows but not what the encoder_* penalties hold."""
    prompts = random_prompts((3, 5))
    options = {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2, "repetition_penalty": 1.2, **SAMPLE}
    processors, _ = prepared(*padded_batch(prompts), num_return_sequences=2, **options)
    repeated = [prompts[0], prompts[0], prompts[1], prompts[1]]
    pipelines = row_pipelines(processors, prompt_lengths=[3, 3, 5, 5], padded_length=5, prompts=repeated)
    committed, lengths = committed_rows(repeated, (0, 1, 2, 0))
    tree = random_tree(committed, lengths)
    logits = random_logits(tree)
    scores = process(pipelines, logits, NodeHistories(committed, lengths, tree))
    assert_same(scores, expected(references(repeated, options), logits, committed, lengths, tree))


def test_the_users_own_encoder_ids_stay():
    document = torch.tensor([[3, 4, 5, 3, 6, 7, 8]])  # as wide as the padded prompts, but not one of them
    own = [hf.EncoderRepetitionPenaltyLogitsProcessor(1.5, document), hf.EncoderNoRepeatNGramLogitsProcessor(2, document)]
    prompts = [torch.tensor([9, 9, 10, 9]), torch.tensor([2, 3])]
    penalty, ngrams = row_pipelines(own, prompt_lengths=[4, 2], padded_length=7, prompts=prompts)[0].stages
    assert torch.equal(penalty.processor.encoder_input_ids, document)
    assert ngrams.processor.generated_ngrams == own[1].generated_ngrams


# --- pipelines


def test_rows_share_what_needs_no_rebasing():
    options = {**SAMPLE, "temperature": 0.5, "top_k": 3, "repetition_penalty": 1.2}
    pipelines = batch_pipelines(random_prompts(), options)
    assert len(set(map(id, pipelines))) == 1
    options["min_new_tokens"] = 2
    first, second, third = batch_pipelines(random_prompts((5, 3, 5)), options)
    assert first is third and first != second
    assert [a is b for a, b in zip(first.stages, second.stages)] == [True, False, False, True, True]


def test_separately_made_processors_with_equal_numbers_are_equal():
    def own(temperature):
        return Pipeline.alone([hf.TemperatureLogitsWarper(temperature), hf.TopPLogitsWarper(0.9)], prompt_length=3)

    assert own(0.5) == own(0.5) and hash(own(0.5)) == hash(own(0.5))
    assert own(0.5) != own(0.6)
    one, other = Fingerprint(), Fingerprint()
    assert Pipeline.alone([one], prompt_length=3) == Pipeline.alone([one], prompt_length=9) != Pipeline.alone([other], prompt_length=3)


def test_each_row_of_a_server_has_its_own_parameters():
    prompts = random_prompts((4, 2, 4, 3))
    lists = [
        LogitsProcessorList([hf.TemperatureLogitsWarper(0.5), hf.TopKLogitsWarper(3)]),
        LogitsProcessorList([hf.RepetitionPenaltyLogitsProcessor(1.5), hf.TemperatureLogitsWarper(0.7), hf.TopPLogitsWarper(0.8)]),
        LogitsProcessorList(),
        LogitsProcessorList([hf.MinNewTokensLengthLogitsProcessor(3, 2, EOS), hf.TemperatureLogitsWarper(0.7), Fingerprint()]),
    ]
    committed, lengths = committed_rows(prompts, (0, 2, 1, 1))
    parents = torch.cat([PARENTS, PARENTS[:1]])
    pipelines = [Pipeline.alone(own, prompt_length=len(prompt)) for own, prompt in zip(lists, prompts)]
    for tree in (random_tree(committed, lengths), random_tree(committed, lengths, parents)):
        logits = random_logits(tree)
        scores = process(pipelines, logits, NodeHistories(committed, lengths, tree))
        assert_same(scores, expected(lists, logits, committed, lengths, tree))


def test_history_free_stages_run_once(monkeypatch):
    """Even when an earlier stage differs between the rows."""
    calls = []
    original = hf.TemperatureLogitsWarper.__call__
    monkeypatch.setattr(
        hf.TemperatureLogitsWarper, "__call__", lambda self, ids, scores: calls.append(scores.shape) or original(self, ids, scores)
    )
    processors = [hf.MinNewTokensLengthLogitsProcessor(5, 2, EOS), hf.TemperatureLogitsWarper(0.5)]
    committed, lengths = committed_rows(random_prompts((5, 3, 2)))
    tree = random_tree(committed, lengths)
    pipelines = row_pipelines(processors, prompt_lengths=[5, 3, 2], padded_length=5)
    process(pipelines, random_logits(tree), NodeHistories(committed, lengths, tree))
    assert calls == [(3 * 6, VOCAB)]


def test_banned_tokens_are_those_of_transformers():
    """Of all that only rule tokens out, at each length; some of the tokens lie outside the vocabulary."""
    ends = torch.tensor([EOS, VOCAB + 3])
    own = [
        hf.SuppressTokensLogitsProcessor([3, 0, VOCAB, 3]),
        hf.SuppressTokensAtBeginLogitsProcessor([4, -1], 6),
        hf.MinLengthLogitsProcessor(7, ends),
        hf.MinNewTokensLengthLogitsProcessor(5, 1, ends),
        hf.SuppressTokensLogitsProcessor([]),  # as configs of fine-tuned Whisper models have it
        hf.SuppressTokensAtBeginLogitsProcessor([], 6),
    ]
    for chosen in [*([each] for each in own), own]:
        pipeline, scores = Pipeline.alone(chosen, prompt_length=5), torch.randn(1, VOCAB)
        for length in (5, 6, 7):
            ids, wanted = torch.zeros(1, length, dtype=torch.long), scores
            for each in chosen:
                wanted = each(ids, wanted)
            tree = TokenTree.from_chain(torch.zeros(1, 1, dtype=torch.long))
            assert_same(process([pipeline], scores[:, None], NodeHistories(ids, [length], tree))[:, 0], wanted)
            assert {token for token in pipeline.banned(length) if 0 <= token < VOCAB} == set(wanted.isinf()[0].nonzero()[:, 0].tolist())
    assert Pipeline.alone([*own, hf.TemperatureLogitsWarper(0.5)], prompt_length=5).banned(5) is None


def test_length_stages_are_not_called_where_they_do_nothing(monkeypatch):
    calls, cls, original = [], hf.MinNewTokensLengthLogitsProcessor, Stage.__call__
    monkeypatch.setattr(Stage, "__call__", lambda self, ids, scores: calls.append(ids.shape[1]) or original(self, ids, scores))
    committed, lengths = committed_rows(random_prompts((5,)), (1,))
    tree = random_tree(committed, lengths)
    pipeline = Pipeline.alone([cls(5, 3, EOS)], prompt_length=5)
    process([pipeline], random_logits(tree), NodeHistories(committed, lengths, tree))
    assert calls == [6], "one call for the two lengths at which it acts"


@pytest.mark.parametrize("joined", [True, False], ids=["one call", "one per length"])
@pytest.mark.parametrize("name", ["repetition_penalty", "no_repeat_ngram", "bad_words", "sequence_bias", "encoder_no_repeat_ngram"])
def test_histories_of_several_lengths_in_one_call(name, joined, monkeypatch):
    """Padded where blocks fit a CPU's cache; 16 nodes of 4 ragged rows, long histories, as transformers has them alone."""
    monkeypatch.setattr("foredraft.logits.processors.CACHED", 1 << 20 if joined else 0)
    prompts = random_prompts((9, 23, 14, 18))
    committed, lengths = committed_rows(prompts, (1, 0, 2, 0))
    tree = random_tree(committed, lengths, torch.tensor([[-1, 0, 0, 0, 0, 1, 1, 2, 2, 5, 5, 6, 7, 9, 10, 13]] * 4))
    logits, pipelines = random_logits(tree), batch_pipelines(prompts, CASES[name])
    reference = expected(references(prompts, CASES[name]), logits, committed, lengths, tree)
    stages, calls = {stage for pipeline in pipelines for stage in pipeline.stages}, []
    cls = type(pipelines[0].stages[0].processor)
    original = cls.__call__
    monkeypatch.setattr(cls, "__call__", lambda self, ids, scores: calls.append(ids.shape) or original(self, ids, scores))
    assert_same(process(pipelines, logits, NodeHistories(committed, lengths, tree)), reference)
    assert len(stages) == (4 if name.startswith("encoder") else 1)  # the encoder's n-grams are each row's own
    assert len(calls) == len(stages) if joined else len(calls) >= 16


@pytest.mark.parametrize("processor", [hf.NoRepeatNGramLogitsProcessor(1), hf.RepetitionPenaltyLogitsProcessor(1.5, 4)])
def test_histories_that_must_not_be_padded(processor):
    """A single -1 is the last token of the vocabulary, and ignored positions count from the first."""
    committed, lengths = committed_rows(random_prompts((3, 6)), (0, 1))
    tree = random_tree(committed, lengths, PARENTS[:2])
    logits = random_logits(tree)
    scores = process([Pipeline.alone([processor], prompt_length=3)] * 2, logits, NodeHistories(committed, lengths, tree))
    assert_same(scores, expected([LogitsProcessorList([processor])] * 2, logits, committed, lengths, tree))


def test_properties():
    empty = Pipeline.alone(None, prompt_length=2)
    free = Pipeline.alone([hf.TopKLogitsWarper(3)], prompt_length=2)
    short = Pipeline.alone([hf.MinLengthLogitsProcessor(3, EOS)], prompt_length=2)
    own = Pipeline.alone([Fingerprint()], prompt_length=2)
    assert [p.empty for p in (empty, free, short, own)] == [True, False, False, False]
    assert [p.needs_history for p in (empty, free, short, own)] == [False, False, True, True]
    assert [p.stages[0].foreign for p in (free, short, own)] == [False, False, True]


def test_no_processors_return_the_logits():
    logits = torch.randn(2, 3, VOCAB)
    pipelines = row_pipelines(LogitsProcessorList(), prompt_lengths=[1, 2], padded_length=2)
    assert process(pipelines, logits) is logits
    assert torch.equal(process(pipelines, logits.bfloat16()), logits.bfloat16().float())


def tensors_and_numbers(processor):
    return {name: value.clone() if isinstance(value, torch.Tensor) else copy.copy(value) for name, value in vars(processor).items()}


def test_the_callers_processors_are_not_changed():
    prompts = random_prompts()
    options = dict(CASES["built_in_everything"], encoder_repetition_penalty=1.5, encoder_no_repeat_ngram_size=2)
    options.update(min_length=5, prefix_allowed_tokens_fn=prefix_function, forced_bos_token_id=3, suppress_tokens=[8])
    processors, _ = prepared(*padded_batch(prompts), **options)
    members, before = list(processors), [tensors_and_numbers(processor) for processor in processors]
    paddings = [[0] * (7 - length) for length in LENGTHS]
    pipelines = row_pipelines(processors, prompt_lengths=LENGTHS, padded_length=7, prompts=prompts, paddings=paddings)
    committed, lengths = committed_rows(prompts)
    tree = random_tree(committed, lengths)
    process(pipelines, random_logits(tree), NodeHistories(committed, lengths, tree))
    assert list(processors) == members
    for processor, values in zip(processors, before):
        for name, value in vars(processor).items():
            same = torch.equal(value, values[name]) if isinstance(value, torch.Tensor) else value == values[name]
            assert same, f"{type(processor).__name__}.{name}"


# --- the whole loop

HISTORY = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 6, "logits_processor": [OwnPenalty(1.2)]}


@pytest.mark.parametrize("shape", ["chain(3)", "product(2,2)", "product(3,1,2)", "dynamic(depth=3,k=3,total=7)"])
def test_trees_of_a_ragged_batch_as_transformers_alone(shape):
    rows = prompts()
    wanted = [alone(tiny(), row, max_new_tokens=14, **HISTORY) for row in rows]
    speculator = Speculator(tiny(), make_drafter("draft-model", siblings="top-k"), shape=shape)
    assert generate(speculator, rows, max_new_tokens=14, **HISTORY) == wanted
    assert wanted != [alone(tiny(), row, max_new_tokens=14) for row in rows]


@pytest.mark.parametrize(("siblings", "shape"), [("keyed", "product(2,2)"), ("top-k", "product(3,1,2)")])
def test_sampled_trees_of_a_ragged_batch_as_plain_decoding(siblings, shape):
    options = {**HISTORY, "do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 5, "max_new_tokens": 14}
    plain = Speculator(tiny(), "none")
    speculator = Speculator(tiny(), make_drafter("draft-model", siblings=siblings), shape=shape, rule="match")
    assert generate(speculator, prompts(), **options) == generate(plain, prompts(), **options)


@pytest.mark.parametrize("shape", ["chain(3)", "product(2,2)"])
def test_users_processors_count_as_overhead(shape, monkeypatch):
    """On a clock that only they move: also those that are called while a draft or the prefill is under way."""
    now, calls = [0.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    class Slow(LogitsProcessor):
        def __call__(self, input_ids, scores):
            now[0] += 1.0
            calls.append(input_ids.shape)
            return scores

    speculator = Speculator(tiny(), make_drafter("draft-model", siblings="top-k"), shape=shape)
    session = speculator.session(stats=Stats(started=0.0))
    for row in prompts():
        session.add(row, RowParameters(max_new_tokens=6, pipeline=Pipeline.alone([Slow()], prompt_length=len(row))))
    while session.live:
        session.step()
    seconds = session.stats.seconds
    assert seconds["total"] == seconds["overhead"] == len(calls) > session.stats.target_passes
    assert seconds["draft"] == seconds["target"] == seconds["prefill"] == 0


# --- refusals and bad input


def refused_classes():
    found = {name: getattr(hf, name) for name in REFUSED if hasattr(hf, name)}
    for name, module in {
        "HiggsAudioV2DelayPatternLogitsProcessor": "transformers.models.higgs_audio_v2.generation_higgs_audio_v2",
        "VibeVoiceTokenConstraintProcessor": "transformers.models.vibevoice.generation_vibevoice",
    }.items():
        found[name] = getattr(pytest.importorskip(module), name)
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    cls = refused_classes()[name]
    with pytest.raises(ConfigurationError, match=f"{name}.*without Foredraft"):
        row_pipelines([cls.__new__(cls)], prompt_lengths=[2], padded_length=2)
    derived = type("Derived", (cls,), {})
    with pytest.raises(ConfigurationError, match=r"Derived.*without Foredraft"):
        row_pipelines([derived.__new__(derived)], prompt_lengths=[2], padded_length=2)


def test_refused_through_generate():
    config = transformers.WatermarkingConfig()
    for options in ({"guidance_scale": 1.5}, {"watermarking_config": config}):
        processors, _ = prepared(*padded_batch(random_prompts()), **options)
        with pytest.raises(ConfigurationError, match="not supported"):
            row_pipelines(processors, prompt_lengths=LENGTHS, padded_length=7)


def test_an_unknown_class_of_transformers_is_refused():
    cls = type("NewProcessor", (LogitsProcessor,), {"__module__": hf.__name__})
    with pytest.raises(ConfigurationError, match="NewProcessor"):
        row_pipelines([cls()], prompt_lengths=[2], padded_length=2)


def test_what_is_no_processor_is_refused():
    class Greedy(LogitsProcessor):
        def __call__(self, input_ids, scores, hidden_states):
            return scores

    with pytest.raises(ConfigurationError, match=r"Greedy.*hidden_states"):
        row_pipelines([Greedy()], prompt_lengths=[2], padded_length=2)
    with pytest.raises(TypeError, match="int"):
        row_pipelines([3], prompt_lengths=[2], padded_length=2)


@pytest.mark.parametrize("bad", [lambda ids, scores: scores[:, 1:], lambda ids, scores: None], ids=["shape", "nothing"])
def test_a_foreign_processor_must_return_scores(bad):
    tree = TokenTree.root(torch.tensor([2]))
    with pytest.raises(ConfigurationError, match="must return scores"):
        process([Pipeline.alone([bad], prompt_length=1)], random_logits(tree), NodeHistories(torch.tensor([[2]]), [1], tree))


@pytest.mark.parametrize(
    ("shape", "options"),
    covered(["chain(4)", "product(2,2,2)", "dynamic(depth=3,k=2,total=6)"], [{}, {"do_sample": True}], ways=1),
)
def test_a_function_that_ends_with_the_text_is_never_asked_beyond_it(shape, options):
    """Rows are ragged: one that is almost over is drafted as deep as the others, and its function knows nothing of that."""
    rows = repetitive((14, 9, 11, 14))

    def allowed(row, ids):
        written = len(ids) - max(map(len, rows))
        assert written < 10, f"asked after {written} new tokens of 10"
        return list(range(3, 128, 2 + written % 2))

    speculator = Speculator(tiny(), drafter=DraftModel(perturbed(), siblings="iid" if "product" in shape else "auto"), shape=shape)
    for seed in range(4):
        generate(speculator, rows, max_new_tokens=10, prefix_allowed_tokens_fn=allowed, seed=seed, **options)
