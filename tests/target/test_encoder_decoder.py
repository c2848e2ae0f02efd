"""Models with an encoder: greedy text equals transformers', keyed text equals plain decoding's, and what is read once is read once."""

from __future__ import annotations

import copy
import itertools
import json
import time
from contextlib import nullcontext
from functools import cache

import pytest
import torch
import transformers
import vocabularies
from architectures import VOCABULARY
from cover import nightly_but
from encoder_decoders import _BART, CONTEXT, FAMILIES, PAD, START, build, padded, perturbed, rows_of, save_t5, sources, texts
from helpers import random_tree
from kernel_cases import always as always  # a fixture
from sourced_cases import compact_all_but_sources
from transformers.generation.logits_process import WhisperNoSpeechDetection
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateEncoderDecoderOutput
from transformers.modeling_outputs import BaseModelOutput
from typer.testing import CliRunner

import foredraft
from foredraft import ConfigurationError, RowParameters, Source, Speculator, UnsupportedModelError, preparation
from foredraft.backends.packing import PackedForward
from foredraft.backends.self_test import sources_of_test
from foredraft.cli import app
from foredraft.drafters.datastore import Datastore
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.rest import Rest
from foredraft.models import encoder_decoder
from foredraft.models.source_runs import SourcedCache
from foredraft.models.support import ModelFacts
from foredraft.planning.costs import CostModel, measure
from foredraft.shapes import TreeShape
from foredraft.target import Target

NEW = 14
SHAPES = ("chain(4)", "product(2,2)", "dynamic(depth=4,k=3,total=8)")
DRAFTERS = [(name,) for name in ("prompt-lookup", "lookahead", "rest", "suffix", "ngram", "token-recycling", "several:prompt-lookup,ngram")]
NAMES = [name for name, family in FAMILIES.items() if family.support == "tree" and family.reads != "features"]
PADDED = [(name, side) for name in NAMES for side in ("left", "right")]
SHAPED = [(name, shape) for name in NAMES for shape in SHAPES]
MODELS = [(name, how) for name in NAMES for how in FAMILIES[name].implementations]
ALWAYS = ("t5", "umt5", "bart", "m2m_100", "switch", "roberta2roberta")  # the others run every night
TURNS = {(name, FAMILIES[name].implementations[turn % len(FAMILIES[name].implementations)]) for turn, name in enumerate(ALWAYS)}
OPTIONS = {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.6}
SAMPLED = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.2, "seed": 5}


@cache
def drafting(name, shape="chain(4)", how=None):
    """A speculator with a draft that is wrong now and then."""
    return Speculator(build(name, how), DraftModel(perturbed(name, how)), shape=shape, rule="match")


@pytest.mark.parametrize(("name", "how"), nightly_but(TURNS, MODELS))
def test_greedy_text_is_that_of_transformers(name, how):
    model, side = build(name, how), "left" if how == "eager" else "right"
    given = sources(name, side)
    expected = model.generate(**given, **OPTIONS)
    for shape in SHAPES[:2]:
        speculator = drafting(name, shape, how)
        assert speculator.target.chains_only is None
        output = speculator.generate(**given, **OPTIONS)
        assert torch.equal(output.sequences, expected)
        assert 0 < output.stats.accepted < output.stats.drafted
        assert torch.equal(speculator.generate(**rows_of(given, 1), **OPTIONS).sequences[0], expected[1])


@pytest.mark.parametrize(("name", "side"), nightly_but({("t5", "left"), ("bart", "right"), ("m2m_100", "left")}, PADDED))
def test_prompts_of_unequal_lengths_count_their_own_tokens(name, side):
    model, given = build(name), sources(name)
    prompts = [[START, *text] for text in texts((4, 1, 6), seed=7)]
    alone = [
        model.generate(**rows_of(given, row), decoder_input_ids=torch.tensor([prompt]), **OPTIONS)[0, len(prompt) :].tolist()
        for row, prompt in enumerate(prompts)
    ]
    for shape in SHAPES[:2]:
        output = drafting(name, shape).generate(**given, **padded(prompts, side, "decoder_"), **OPTIONS)
        assert output.sequences[:, 7:].tolist() == alone


@pytest.mark.parametrize(("name", "shape"), nightly_but({("t5", SHAPES[2]), ("bart", SHAPES[1]), ("m2m_100", SHAPES[0])}, SHAPED))
def test_the_text_of_a_seed_is_that_of_plain_decoding(name, shape):
    model, given = build(name), sources(name)
    expected = Speculator(model, "none").generate(**given, **SAMPLED).sequences
    assert torch.equal(drafting(name, shape).generate(**given, **SAMPLED).sequences, expected)


@pytest.mark.parametrize("drafter", nightly_but({("prompt-lookup",), ("lookahead",), ("rest",)}, DRAFTERS))
def test_every_drafter_leaves_the_text_of_a_seed_alone(drafter):
    model, given = build("t5"), sources("t5")
    expected = Speculator(model, "none").generate(**given, **SAMPLED).sequences
    seen = Datastore.build([[*text[:7], *text[:7]] for text in expected.tolist()], vocab_size=VOCABULARY)  # right, and then wrong
    output = Speculator(model, Rest(seen) if drafter == "rest" else drafter, shape="chain(4)").generate(**given, **SAMPLED)
    assert torch.equal(output.sequences, expected) and output.stats.drafted > 0
    assert drafter != "rest" or 0 < output.stats.accepted < output.stats.drafted


@pytest.mark.parametrize("name", nightly_but({(name,) for name in ALWAYS}, [(name,) for name in NAMES]))
def test_greedy_text_of_states_that_are_given(name):
    model, given = build(name), sources(name)
    states = {"encoder_outputs": model.get_encoder()(**given, return_dict=True), "attention_mask": given["attention_mask"]}
    expected = model.generate(**states, **OPTIONS)
    assert torch.equal(drafting(name).generate(**{**given, **states}, **OPTIONS).sequences, expected)
    assert torch.equal(Speculator(model, "ngram", shape=SHAPES[1]).generate(**states, **OPTIONS).sequences, expected)


@pytest.mark.parametrize("name", nightly_but({("t5",), ("m2m_100",)}, [(name,) for name in NAMES]))
def test_prompts_without_the_start_token_get_it(name):
    given = {**rows_of(sources(name), 0, 1), "decoder_input_ids": torch.tensor([[8, 9, 10], [7, 7, 7]])}
    expected = build(name).generate(**given, **OPTIONS)
    assert expected[:, :4].tolist() == [[START, 8, 9, 10], [START, 7, 7, 7]]
    assert torch.equal(drafting(name).generate(**given, **OPTIONS).sequences, expected)


@pytest.mark.parametrize("name", ["t5", "m2m_100"])
def test_tree_logits_are_those_of_the_paths(name):
    model, target = build(name), Target(build(name))
    prompts, read = [[START, 5, 9, 11], [START, 8]], [texts((40,))[0], texts((7,))[0]]
    target.open(prompts, sources=[Source.of(text) for text in read])
    target.prefill(prompts, first=0)
    tree = random_tree(2, 9, seed=4)
    logits = target.score(tree)
    for row, node in ((0, 8), (1, 8), (0, 5)):
        path = tree.path(row, node)
        ids = torch.tensor([[*prompts[row], *tree.tokens[row, path].tolist()]])
        expected = model(input_ids=torch.tensor([read[row]]), decoder_input_ids=ids).logits[0, -len(path) :]
        torch.testing.assert_close(logits[row, path], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["m2m_100", "roberta2roberta"])
def test_padding_that_is_generated_has_the_position_of_padding(name):
    model, given = build(name), sources(name)
    options = {**OPTIONS, "suppress_tokens": sorted({*range(VOCABULARY)} - {PAD, 8})}
    expected = model.generate(**given, **options)
    assert (expected[:, 2:-1] == PAD).any()
    for shape in SHAPES[:2]:
        assert torch.equal(drafting(name, shape).generate(**given, **options).sequences, expected)


# -- what the self-test finds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "what", "fault"),
    [
        ("t5", "bias_from", lambda *given: nullcontext()),
        ("umt5", "bias_from", lambda *given: nullcontext()),
        ("bart", "embedded_from", lambda *given: nullcontext()),
        ("m2m_100", "embedded_from", lambda *given: nullcontext()),
        ("bert2trocr", "embedded_from", lambda *given: nullcontext()),
        ("roberta2roberta", "first_position", lambda decoder: 0),
    ],
)
def test_positions_from_slots_are_found(name, what, fault, monkeypatch):
    monkeypatch.setattr(encoder_decoder, what, fault)
    with pytest.raises(UnsupportedModelError, match="differ from a plain pass"):
        Target(build(name))


def test_the_cross_keys_of_another_row_are_found(monkeypatch):
    monkeypatch.setattr(SourcedCache, "compact", compact_all_but_sources)
    assert "differed from a plain pass" in Target(build("t5")).chains_only


@pytest.mark.parametrize("name", nightly_but({("bart",), ("moonshine",)}, [(name,) for name in NAMES]))
def test_padding_of_a_source_that_is_seen_is_found(name, monkeypatch):
    facts = ModelFacts.of(build(name))
    short, long = encoder_decoder.Decoder(facts.model, facts.context).encode(sources_of_test(facts)).values()
    assert len(short) + 2 <= len(long)
    monkeypatch.setattr(encoder_decoder.Decoder, "_mask", lambda self, *given: None)
    with pytest.raises(UnsupportedModelError, match="differ from a plain pass"):
        Target(build(name))


def test_experts_take_drafted_tokens_as_plain_decoding_does(monkeypatch):
    model, given = copy.deepcopy(build("switch")), sources("switch")
    expected = model.generate(**given, **OPTIONS)
    assert torch.equal(drafting("switch", SHAPES[1]).generate(**given, **OPTIONS).sequences, expected)
    positioned = encoder_decoder.Decoder.positioned
    counting = lambda self, places, *given, prompts: positioned(self, places, *given, prompts=[99] * len(places))  # noqa: E731
    monkeypatch.setattr(encoder_decoder.Decoder, "positioned", counting)
    with pytest.raises(UnsupportedModelError, match="differ from a plain pass"):
        Target(model)


@pytest.mark.parametrize("again", [False, True])
def test_experts_take_a_text_that_is_read_again_as_plain_decoding_does(again, monkeypatch):
    """Its prompt counts, and what was generated does not. Of prompts, neither a beginning that is known nor scoring changes what counts."""
    model, read = copy.deepcopy(build("switch")), texts((13,))
    prompts = [[START, *text] for text in texts((20, 22, 21), seed=7)]
    prompts[1][:18] = prompts[2][:18] = prompts[0][:18]
    expected = [
        model.generate(torch.tensor([read[0]]), decoder_input_ids=torch.tensor([prompt]), **OPTIONS)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    speculator = Speculator(model, DraftModel(perturbed("switch")), shape="chain(3)", rule="match")
    pipelines = [preparation.prepare(model, torch.tensor([read[0]]), seed=None, **OPTIONS).parameters[0].pipeline for _ in prompts]
    session, found = speculator.session(), {}
    for prompt, pipeline, scored in zip(prompts, pipelines, (None, 0, None)):
        row = RowParameters(max_new_tokens=NEW, source=Source.of(read[0]), pipeline=pipeline, prompt_logprobs=scored)
        found[session.add(prompt, row)] = []
    for step in itertools.count():
        if not session.live:
            break
        if again and step % 2:
            session._set_aside(session.rows[1:])
        for commit in session.step():
            found[commit.slot] += commit.tokens
    assert list(found.values()) == expected


# -- what is read, and how often --------------------------------------------------------------------------------------------


@pytest.fixture
def counted():
    """A model, and how many rows its encoder has read."""
    model, read = copy.deepcopy(build("bart")), []
    model.get_encoder().register_forward_hook(lambda module, given, named, output: read.append(len(output[0])), with_kwargs=True)
    return model, read


def test_the_encoder_reads_every_source_once(counted):
    model, read = counted
    speculator = Speculator(model, "ngram", shape="chain(3)")
    given = rows_of(sources("bart"), 0, 1, 0, 2)
    del read[:]
    output = speculator.generate(**given, **OPTIONS)
    assert read == [3]
    assert torch.equal(output.sequences[0], output.sequences[2])
    several = speculator.generate(**rows_of(given, 0), **SAMPLED, num_return_sequences=5)
    assert read == [3], "what is kept of a source was not found"
    speculator.generate(**rows_of(given, 0), **SAMPLED, isolation="another")
    assert read == [3, 1], "others were told that somebody has sent this source before"
    assert len({tuple(line) for line in several.sequences.tolist()}) > 1


def test_rows_with_one_source_share_its_keys():
    target, ids = Target(build("t5")), texts((30,))[0]
    target.open([[START]] * 4, sources=[Source.of(ids) for _ in range(4)])
    target.prefill([[START]] * 4, first=0)
    shared = target.cache.bytes
    target.reset()
    target.open([[START]], sources=[Source.of(ids)])
    target.prefill([[START]], first=0)
    alone = target.cache
    keys = sum(each.nbytes for pair in alone.sources[0].keys for each in pair)
    assert keys == 2 * 2 * 30 * 32 * 4 and alone.cross.layers[0].keys.shape == (1, 4, 30, 8)
    assert shared - keys == super(type(alone), alone).bytes


def test_encoder_outputs_are_taken_as_they_are(counted):
    model, read = counted
    given = sources("bart", "left")
    expected = model.generate(**given, **OPTIONS)
    states = model.get_encoder()(**given)
    speculator = Speculator(model, "ngram", shape="product(2,2)")
    del read[:]
    for outputs in (states, BaseModelOutput(last_hidden_state=states[0])):
        output = speculator.generate(encoder_outputs=outputs, attention_mask=given["attention_mask"], **OPTIONS)
        assert torch.equal(output.sequences, expected)
    assert read == []


def test_rows_join_and_leave_with_their_sources():
    model, read = build("t5"), texts((12, 5, 30, 8))
    speculator = drafting("t5")
    session, found = speculator.session(), {}
    lengths = (9, 3, 14, 6)
    expected = [
        model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=length)[0, 1:].tolist() for ids, length in zip(read, lengths)
    ]
    for ids, length in zip(read, lengths):
        slot = session.add([START], RowParameters(max_new_tokens=length, source=Source.of(ids)))
        found[slot] = []
        for commit in session.step():
            found[commit.slot] += commit.tokens
    while session.live:
        for commit in session.step():
            found[commit.slot] += commit.tokens
    assert list(found.values()) == expected


@pytest.mark.parametrize(("name", "context"), [("whisper", CONTEXT), ("led", CONTEXT), ("roberta2roberta", CONTEXT - PAD - 1)])
def test_a_text_ends_where_the_positions_of_the_decoder_do(name, context):
    """Some configurations have a name of their own for how many there are. Near the end, what is drafted for another row is filler."""
    source, found = encoder_decoder.some_source(build(name), 9), []
    for speculator in (Speculator(build(name), "none"), drafting(name, SHAPES[1])):
        session, new = speculator.session(), {}
        for length in (context - 3, 3):
            new[session.add([START, *texts((length,))[0]], RowParameters(max_new_tokens=6, source=source))] = []
        while session.live:
            for commit in session.step():
                new[commit.slot] += commit.tokens
        found.append([*new.values()])
    assert found[0] == found[1] and [*map(len, found[0])] == [2, 6]


def test_a_mask_that_is_dropped_is_found(monkeypatch):
    """LED's decoder drops it where a pass reads one token of each row."""
    monkeypatch.setattr(encoder_decoder, "UNMASKED_TOKENS", set())
    with pytest.raises(UnsupportedModelError, match="differ from a plain pass"):
        Target(build("led"))


def test_padding_that_an_encoder_names_itself_is_not_seen():
    """Its states are fewer than the samples that it reads."""
    model, given = build("moonshine"), sources("moonshine")
    outputs = model.get_encoder()(**given)
    found = encoder_decoder.sources_of(model, given["input_values"], 3, {**given, "encoder_outputs": outputs})
    assert [each.states.shape[1] for each in found] == outputs.attention_mask.sum(1).tolist()
    speculating = foredraft.custom_generate("ngram", shape="chain(3)")
    assert torch.equal(model.generate(**given, **OPTIONS, custom_generate=speculating), model.generate(**given, **OPTIONS))


def test_a_model_that_changes_reads_its_sources_again(counted):
    model, read = counted
    given = rows_of(sources("bart"), 0)
    speculator = Speculator(model, "none")
    stream = speculator.stream(**given, **OPTIONS)
    next(stream)
    with torch.no_grad():
        model.get_encoder().layers[0].fc1.weight.mul_(1.5)
    before = len(read)
    for _ in stream:
        pass
    assert len(read) == before + 1


# -- entry points -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_without_a_source_a_speculator_and_an_attached_model_refuse(name):
    model = copy.deepcopy(build(name))
    message = f"nothing for it to read: pass {model.main_input_name}="
    with pytest.raises(ConfigurationError, match=message):
        Speculator(model, "none").generate(max_new_tokens=3)
    foredraft.attach(model, "none")
    with pytest.raises(ConfigurationError, match=message):
        model.generate(max_new_tokens=3)


def test_without_a_source_custom_generate_does_what_transformers_does():
    """transformers has run the encoder before; a start token that it put in place of a source looks like one that was given."""
    speculating = {"max_new_tokens": 3, "custom_generate": foredraft.custom_generate("none")}
    assert torch.equal(build("bart").generate(**speculating), build("bart").generate(max_new_tokens=3, do_sample=False))
    with pytest.raises(ValueError, match="Make sure to provide either `input_features` or"):
        build("whisper").generate(**speculating)
    model = copy.deepcopy(build("t5"))
    model.generation_config.bos_token_id = None  # as that of T5
    with pytest.raises(ValueError, match="`bos_token_id` has to be defined"):
        model.generate(**speculating)


def test_outputs_are_those_of_transformers():
    model, given = build("bart"), sources("bart")
    asked = {**OPTIONS, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = model.generate(**given, **asked)
    custom = model.generate(**given, **asked, custom_generate=foredraft.custom_generate("ngram", shape="chain(3)"))
    for output in (drafting("bart").generate(**given, **asked), custom):
        assert isinstance(output, GenerateEncoderDecoderOutput) and torch.equal(output.sequences, expected.sequences)
        for ours, theirs in zip((*output.scores, *output.logits), (*expected.scores, *expected.logits)):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_attached_models_return_sequences():
    model, given = copy.deepcopy(build("t5")), sources("t5")
    expected = model.generate(**given, **OPTIONS)
    foredraft.attach(model, "prompt-lookup", shape="chain(3)")
    assert torch.equal(model.generate(**given, **OPTIONS), expected)
    foredraft.detach(model)


class Heard(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        pass


def test_a_stream_and_a_streamer_get_every_token():
    model, given = build("t5"), rows_of(sources("t5"), 0)
    expected = model.generate(**given, **OPTIONS)[0].tolist()
    heard = Heard()
    drafting("t5").generate(**given, **OPTIONS, streamer=heard)
    streamed = [token for tokens in drafting("t5").stream(**given, **OPTIONS) for token in tokens]
    assert heard.tokens == expected == [START, *streamed]


PROCESSED = {
    "forced BOS and EOS": {"forced_bos_token_id": 9, "forced_eos_token_id": 11},
    "encoder repetition": {"encoder_repetition_penalty": 1.8},
    "encoder n-grams": {"encoder_no_repeat_ngram_size": 2},
    "suppressed": {"suppress_tokens": [17, 50], "begin_suppress_tokens": [30, 31]},
    "least lengths": {"min_new_tokens": 6, "eos_token_id": list(range(60, 110))},
    "bad words": {"bad_words_ids": [[7, 8], [12]], "no_repeat_ngram_size": 2},
}


@pytest.mark.parametrize("options", PROCESSED.values(), ids=PROCESSED)
def test_processors_see_every_node(options):
    name = "bart"
    model, given = build(name), sources(name)
    expected = model.generate(**given, **(OPTIONS | options))
    for shape in SHAPES[:2]:
        assert torch.equal(drafting(name, shape).generate(**given, **(OPTIONS | options)).sequences, expected)


def test_the_source_of_a_padded_batch_is_not_its_prompt():
    """Encoder penalties hold the source; here it is as long as the padded prompts."""
    model, given = build("t5"), padded(texts((4, 4)))
    prompts, options = [[START, 8], [START, 8, 9, 5]], {**OPTIONS, "encoder_no_repeat_ngram_size": 3, "encoder_repetition_penalty": 1.8}
    alone = [
        model.generate(**rows_of(given, row), decoder_input_ids=torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        for row, prompt in enumerate(prompts)
    ]
    output = drafting("t5").generate(**given, **padded(prompts, "left", "decoder_"), **options)
    assert output.sequences[:, 4:].tolist() == alone


# -- what is refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.support == "refused"])
def test_what_cannot_be_verified_is_refused_by_name(name):
    with pytest.raises(UnsupportedModelError, match=rf"{FAMILIES[name].model}.*use model.generate") as refused:
        Speculator(build(name), "none")
    assert "self_test" not in str(refused.value)


@pytest.mark.parametrize("name", ["bert2gpt2", "t5"])
def test_a_decoder_that_keeps_a_state_is_refused_by_name(name, monkeypatch):
    assert Target(build(name)).chains_only is None
    for part in (build(name).get_decoder(), build(name)):
        with monkeypatch.context() as planted:
            planted.setattr(type(part), "_is_stateful", True)
            with pytest.raises(UnsupportedModelError, match=f"{FAMILIES[name].model} .* keeps a recurrent state"):
                Target(build(name))


@pytest.mark.parametrize("name", ["m2m_100", "roberta2roberta"])
def test_padding_inside_a_prompt_is_refused_where_it_has_no_position(name):
    session, source = Speculator(build(name), "none").session(), Source.of([5, 6])
    for text in ([START, 7, PAD, 9], [START, PAD, 9, PAD], [PAD, START]):
        with pytest.raises(ConfigurationError, match=f"decoder_input_ids have the padding token {PAD}"):
            session.add(text, RowParameters(max_new_tokens=3, source=source))
    for text in ([START, 7, PAD], [PAD]):
        begun = {"input_ids": torch.tensor([[5, 6]]), "decoder_input_ids": torch.tensor([text])}
        assert torch.equal(drafting(name).generate(**begun, **OPTIONS).sequences, build(name).generate(**begun, **OPTIONS))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"nothing for it to read: pass input_ids="),
        ({"input_ids": [[5, 6]], "num_beams": 4}, "pass num_beams=1 for greedy decoding"),
        ({"input_ids": [[5, 4000]]}, "source token 4000 is outside the encoder's vocabulary"),
        ({"input_ids": [[5] * (CONTEXT + 1)]}, f"the source has {CONTEXT + 1} tokens"),
        ({"input_ids": [[5, 6]], "decoder_input_ids": [[START] * CONTEXT]}, f"the prompt has {CONTEXT} tokens"),
        ({"input_ids": [[5, 6]], "decoder_position_ids": [[0]]}, "decoder_position_ids is not supported"),
        ({"input_ids": [[5, 6]], "decoder_input_ids": [[8, 9]], "decoder_attention_mask": [[0, 1]]}, f"begin each text with {START}"),
        (
            {"input_ids": [[5, 6]], "decoder_input_ids": [[START, 5, 8, 9]], "decoder_attention_mask": [[1, 1, 0, 1]]},
            "decoder_attention_mask leaves a hole inside the prompt",
        ),
        (
            {"input_ids": [[5, 6]], "decoder_input_ids": [[START, 5]], "decoder_attention_mask": [[1, 1, 1]]},
            r"decoder_attention_mask must have the shape of the prompts, \[1, 2\], got \[1, 3\]",
        ),
        ({"input_ids": [[5, 6, 7]], "attention_mask": [[1, 1]]}, "attention_mask has 2 columns for 3 source tokens"),
        ({"encoder_outputs": (torch.zeros(1, 9, 32),), "attention_mask": [[1, 1]]}, "attention_mask has 2 columns for 9 encoder states"),
        (
            {"input_features": torch.zeros(1, 8, 60)},
            "reads text, not sound: pass input_ids, token ids of its tokenizer, not input_features",
        ),
        ({"inputs": torch.zeros(1, 8, 60)}, "input_ids must be integers, got torch.float32; the model reads the token ids"),
    ],
)
def test_bad_calls(given, message):
    given = {name: torch.tensor(each) if isinstance(each, list) else each for name, each in given.items()}
    with pytest.raises(ConfigurationError, match=message):
        Speculator(build("bart"), "none").generate(**given, max_new_tokens=3)


def test_rows_without_a_source():
    session = Speculator(build("t5"), "none").session()
    with pytest.raises(ConfigurationError, match=r"RowParameters\(source=Source.of\(ids\)\)"):
        session.add([START], RowParameters(max_new_tokens=3))


def features(*shape):
    return Source({"input_features": torch.zeros(shape)})


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("bart", Source.of([5, 999999]), "source token 999999 is outside the encoder's vocabulary"),
        ("bart", Source.of([5, -3]), "source token -3 is outside the encoder's vocabulary"),
        ("bart", Source.of([5] * (CONTEXT + 1)), f"the source has {CONTEXT + 1} tokens"),
        ("bert2gpt2", Source.of([5] * (CONTEXT + 1)), f"the source has {CONTEXT + 1} tokens"),
        ("bart", Source.of([]), "at least one"),
        ("bart", features(1, 8, 60), "reads input_ids, and the source has none"),
        ("bart", Source({}, torch.zeros(1, 5, 16)), r"must be \[1, S, 32\], got \[1, 5, 16\]"),
        ("bart", Source({"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.ones(1, 3)}), r"attention_mask must be \[1, 4\]"),
        ("bart", Source({"attention_mask": torch.ones(1, 4)}, torch.zeros(1, 5, 32)), "attention_mask has 4 columns for 5 encoder states"),
        ("bart", Source({"attention_mask": torch.ones(5)}, torch.zeros(1, 5, 32)), r"the shape \[5\] for 5 encoder states"),
        ("bart", Source({}, torch.zeros(1, 5, 32)), "cannot read encoder_outputs"),
        ("whisper", features(1, 9, 60), r"\[B, 8, frames\]"),
        ("whisper", features(1, 8, 50), r"\[1, bins, 60\] features, got \[1, 8, 50\]; pad or cut it"),
        ("whisper", Source.of([5]), "reads input_features, and the source has none"),
        ("moonshine", Source({"input_values": torch.zeros(1, 9)}), "enough for one state"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused_and_other_rows_go_on(name, source, message):
    session, found = drafting(name).session(), {}
    good = RowParameters(max_new_tokens=6, source=encoder_decoder.some_source(build(name), 9))
    found[session.add([START], good)] = []
    session.step()
    for refused in (session.add, session.check, session.fits):
        with pytest.raises(ConfigurationError, match=message):
            refused([START], RowParameters(max_new_tokens=6, source=source))
    while session.live:
        for commit in session.step():
            found[commit.slot] += commit.tokens
    assert all(found.values()) and len(session.waiting) == 0


def test_a_draft_reads_as_much_of_a_source_as_it_can():
    """Its encoder has fewer positions, and fewer tokens."""
    model, given = build("bart"), padded(texts((40, 9)))
    config = copy.deepcopy(model.config)
    config.max_position_embeddings, config.vocab_size = 24, 90
    draft = transformers.BartForConditionalGeneration(config).eval()
    output = Speculator(model, DraftModel(draft), shape="chain(3)").generate(**given, **OPTIONS)
    assert torch.equal(output.sequences, model.generate(**given, **OPTIONS)) and output.stats.drafted > 0
    other = copy.deepcopy(build("whisper").config)
    other.num_mel_bins = 9
    with pytest.raises(ConfigurationError, match="reads"):
        Speculator(build("whisper"), DraftModel(transformers.WhisperForConditionalGeneration(other).eval()))


@pytest.mark.parametrize("drafter", ["draft-verify:2", "layer-skip:1"])
def test_drafters_that_read_layers_are_refused(drafter):
    with pytest.raises((UnsupportedModelError, ConfigurationError), match="which has an encoder"):
        Speculator(build("t5"), drafter, shape="chain(2)")


def test_drafts_of_another_kind():
    from helpers import tiny

    with pytest.raises(ConfigurationError, match="has no encoder to read the target's source with"):
        Speculator(build("t5"), DraftModel(tiny()))
    with pytest.raises(ConfigurationError, match="has an encoder and the target has none"):
        Speculator(tiny(), DraftModel(build("t5")))


PACKED = ("t5", "t5 v1.1", "bart", "marian", "umt5", "m2m_100")


@pytest.mark.parametrize("name", nightly_but({("t5 v1.1",)}, [(name,) for name in PACKED]))
def test_packed_decoders_give_the_same_text(name, always):
    model, given = copy.deepcopy(build(name)), sources(name, "left")
    expected = model.generate(**given, **OPTIONS)
    speculator = Speculator(model, DraftModel(perturbed(name)), shape=SHAPES[1], rule="match", execution="packed")
    assert speculator.target.execution == "packed" and isinstance(vars(model.lm_head)["forward"], PackedForward)
    assert packed_layers(model.get_encoder())
    assert torch.equal(speculator.generate(**given, **OPTIONS).sequences, expected)
    speculator.close()
    assert torch.equal(model.generate(**given, **OPTIONS), expected) and not packed_layers(model)


def packed_layers(model):
    return [each for each in model.modules() if isinstance(vars(each).get("forward"), PackedForward)]


def test_packed_decoders_are_chosen_for_models_loaded_by_name(tmp_path, monkeypatch):
    save_t5(tmp_path)
    assert "handed in" in Target(build("t5")).reasons["packed"]
    assert Speculator(tmp_path, "none").target.execution in ("packed", "native")
    monkeypatch.setattr("foredraft.backends.kernels.difference", lambda *given: 0.5)
    other = Speculator(tmp_path, "none").target
    assert other.execution == "eager" and "differ by 5.0e-01" in other.reasons["packed"]
    for execution in ("compiled", "graphs"):
        with pytest.raises(ConfigurationError, match=f"cannot be {execution}: the model has an encoder"):
            Target(build("t5"), execution=execution)
    assert PAD != START


def test_a_draft_reads_the_states_of_the_targets_encoder():
    model, given, read = build("bart"), sources("bart"), []
    draft = copy.deepcopy(perturbed("bart"))
    draft.get_encoder().load_state_dict(model.get_encoder().state_dict())
    shared, own = (Speculator(model, DraftModel(draft, encoder=which), shape="chain(4)") for which in ("target", "own"))
    expected = own.generate(**given, **OPTIONS)
    draft.get_encoder().register_forward_hook(lambda *given: read.append(given))
    output = shared.generate(**given, **OPTIONS)
    assert read == [] and torch.equal(output.sequences, expected.sequences) and output.stats.accepted == expected.stats.accepted > 0
    narrow = transformers.BartForConditionalGeneration(transformers.BartConfig(**{**draft.config.to_dict(), "d_model": 16})).eval()
    with pytest.raises(ConfigurationError, match="whose states have the same width"):
        Speculator(model, DraftModel(narrow, encoder="target"))
    with pytest.raises(ConfigurationError, match="unknown encoder 'targets'"):
        DraftModel(draft, encoder="targets")


def test_what_the_encoder_of_a_draft_takes_counts_as_draft_seconds():
    model, draft = build("bart"), copy.deepcopy(perturbed("bart"))
    speculator = Speculator(model, DraftModel(draft, encoder="own"), shape="chain(3)")
    draft.get_encoder().register_forward_hook(lambda *given: time.sleep(0.5))
    seconds = speculator.generate(**rows_of(sources("bart"), 0), max_new_tokens=4, do_sample=False).stats.seconds
    assert seconds["draft"] >= 0.5


@pytest.mark.parametrize("execution", ["eager", "packed"])
def test_a_draft_with_the_targets_encoder_shares_it(execution, tmp_path, always):
    """As distil-whisper's checkpoints have it."""
    model = copy.deepcopy(build("whisper"))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        draft = transformers.WhisperForConditionalGeneration(copy.deepcopy(model.config)).eval()
    draft.get_encoder().load_state_dict(model.get_encoder().state_dict())
    other = copy.deepcopy(draft)
    other.get_encoder().layers[1].fc2.weight.data[0, 0] += 1e-3
    for name, each in {"target": model, "same": draft, "other": other}.items():
        each.save_pretrained(tmp_path / name)
    given, read = {**sources("whisper"), "max_new_tokens": 8, "do_sample": False}, []
    expected = model.generate(**given)
    for name, shared, options in (("same", True, {}), ("other", False, {}), ("same", False, {"encoder": "own"})):
        drafter = DraftModel(str(tmp_path / name), **options)
        speculator = Speculator(str(tmp_path / "target"), drafter, shape="chain(3)", execution=execution)
        assert speculator.target.execution == execution
        assert (drafter.model.model.get_encoder() is speculator.model.get_encoder()) == shared == (drafter._states is not None)
        drafter.model.model.get_encoder().register_forward_hook(lambda *given: read.append(1))
        assert torch.equal(speculator.generate(**given).sequences, expected)
        speculator.close()
        assert len(read) == 1, "the target's encoder once, or the draft's"
        del read[:]
    held = Speculator(copy.deepcopy(model), DraftModel(draft), shape="chain(3)").drafter
    assert held._states is not None and held.model.model.get_encoder() is draft.get_encoder()


@pytest.mark.parametrize("vocabulary", nightly_but({("intersection",)}, [("intersection",), ("text",), ("auto",)]))
def test_drafts_with_another_tokenizer_read_the_source_as_text(vocabulary, monkeypatch):
    text, tokenizers, models = "def area(width): caf\u00e9", [vocabularies.tokenizer(kind) for kind in ("byte-level", "unigram")], []
    for start, tokenizer in enumerate(tokenizers):
        config = copy.deepcopy(build("t5").config)
        config.vocab_size, config.decoder_start_token_id, config.eos_token_id = len(tokenizer), start, None
        models.append(transformers.T5ForConditionalGeneration(config).eval())
        models[-1].generation_config.pad_token_id = start
    ids = tokenizers[0](text, return_tensors="pt").input_ids
    plain = Speculator(models[0], "none").generate(ids, max_new_tokens=8, do_sample=False)
    drafter = DraftModel(models[1], tokenizer=tokenizers[1], vocabulary=vocabulary)
    speculator = Speculator(models[0], drafter, tokenizer=tokenizers[0], shape="chain(3)", rule="match")
    opened, open_rows = [], drafter.model.open
    monkeypatch.setattr(drafter.model, "open", lambda rows, **given: opened.append((rows, given["sources"])) or open_rows(rows, **given))
    assert torch.equal(speculator.generate(ids, max_new_tokens=8, do_sample=False).sequences, plain.sequences)
    (((row,), (source,)),) = opened
    assert source.ids == tuple(tokenizers[1](text).input_ids) and row[0] == 1 != row[-1]
    with pytest.raises(ConfigurationError, match="reads the source as text, and there is none"):
        speculator.generate(encoder_outputs=models[0].get_encoder()(ids), max_new_tokens=8)


TEMPLATE = "Source: {source}\nTree:"


def cycling(ids, size):
    """A T5 and a Llama without layers that matter, which write ``ids`` round and round, whatever they have read before the last token."""
    width = 32
    table = torch.nn.functional.normalize(torch.randn(size, width, generator=torch.Generator().manual_seed(2)), dim=1)
    head = torch.zeros(size, width)
    head[[*ids[1:], ids[0]]] = table[ids]
    t5 = copy.deepcopy(build("t5 v1.1").config)
    t5.vocab_size, t5.decoder_start_token_id, t5.eos_token_id = size, ids[-1], None
    llama = copy.deepcopy(vocabularies.model("byte-level").config)
    llama.vocab_size = size
    models = [transformers.T5ForConditionalGeneration(t5).eval(), transformers.LlamaForCausalLM(llama).eval()]
    with torch.no_grad():
        for model in models:
            model.get_input_embeddings().weight.copy_(table)
            model.lm_head.weight = torch.nn.Parameter(head)
            for name, weight in model.named_parameters():
                if name.endswith(("o.weight", "wo.weight", "o_proj.weight", "down_proj.weight")):
                    weight.zero_()
    models[0].generation_config.pad_token_id = 0
    return models


def test_a_causal_draft_reads_source_and_text_through_a_template():
    tokenizer = vocabularies.tokenizer("byte-level")
    words = sorted(number for token, number in tokenizer.get_vocab().items() if token.startswith("\u0120") and len(token) > 2)
    target, draft = cycling(words[:8], len(tokenizer))  # the last of them is the start
    inputs = tokenizer("def area(width)", return_tensors="pt").input_ids
    drafter = DraftModel(draft, tokenizer=tokenizer, template=TEMPLATE + "{text}")
    speculator = Speculator(target, drafter, tokenizer=tokenizer, shape="chain(4)")
    read, begin = [], drafter.begin
    drafter.begin = lambda rows: (begin(rows), read.append(list(drafter.foreign.readings[rows[0].slot].ids)))
    output = speculator.generate(inputs, max_new_tokens=21)
    assert torch.equal(output.sequences, target.generate(inputs, max_new_tokens=21))
    assert output.stats.acceptance_length == 5  # every draft is right
    prompt = TEMPLATE.replace("{source}", "def area(width)")
    assert tokenizer.decode(read[0]) == prompt + tokenizer.decode(output.sequences[0, 1:2])


READERS = [(kind, vocabulary) for kind in ("unigram", "byte-level") for vocabulary in ("intersection", "text", "auto")]


@pytest.mark.parametrize(("kind", "vocabulary"), nightly_but(READERS[:1], READERS))
def test_texts_with_a_causal_draft(kind, vocabulary):
    own, theirs = vocabularies.tokenizer("unigram"), vocabularies.tokenizer(kind)
    config = copy.deepcopy(build("t5").config)
    config.vocab_size, config.decoder_start_token_id, config.eos_token_id = len(own), own.bos_token_id, None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        model = transformers.T5ForConditionalGeneration(config).eval()
    model.generation_config.pad_token_id = 0
    drafter = DraftModel(vocabularies.model(kind), tokenizer=theirs, template=TEMPLATE, vocabulary=vocabulary)
    speculator, plain = (Speculator(model, each, tokenizer=own, shape="chain(3)", rule="match") for each in (drafter, "none"))
    rows = [own(text).input_ids for text in ("def area(width): caf\u00e9", "the", "hello world, and more")]
    given = padded(rows) | padded([[own.bos_token_id], [own.bos_token_id, *rows[1][1:3]], [own.bos_token_id]], "left", "decoder_")
    assert torch.equal(speculator.generate(**given, max_new_tokens=NEW).sequences, model.generate(**given, max_new_tokens=NEW))
    sampled, expected = (each.generate(**given, **SAMPLED) for each in (speculator, plain))
    assert torch.equal(sampled.sequences, expected.sequences) and sampled.stats.drafted > 0


def test_templates_that_say_too_little_are_refused():
    for template in ("Tree:", "{text} of {source}", "{source} {text} "):
        with pytest.raises(ConfigurationError, match="ends where the text begins"):
            DraftModel("anywhere", template=template)
    draft, tokenizer = vocabularies.model("byte-level"), vocabularies.tokenizer("byte-level")
    with pytest.raises(ConfigurationError, match=r"drafter_options=\{'template'"):
        Speculator(build("t5"), DraftModel(draft))
    for target in (draft, build("whisper")):
        with pytest.raises(ConfigurationError, match="a target that reads text"):
            Speculator(target, DraftModel(draft, template=TEMPLATE, tokenizer=tokenizer), tokenizer=tokenizer)


def test_texts_that_start_with_another_token_are_refused():
    other = copy.deepcopy(build("t5"))
    other.generation_config.decoder_start_token_id = 5
    with pytest.raises(ConfigurationError, match=f"texts start with token {START}, and those of the draft .* with 5"):
        Speculator(build("t5"), DraftModel(other))
    other.generation_config.decoder_start_token_id = [START]
    Speculator(build("t5"), DraftModel(other)).close()


def test_drafts_with_another_tokenizer_cannot_read_sound(monkeypatch):
    monkeypatch.setattr("foredraft.drafters.foreign.vocabulary_difference", lambda *given: "100 tokens differ")
    with pytest.raises(ConfigurationError, match=r"another vocabulary \(100 tokens differ\), and what its encoder reads is no text"):
        Speculator(build("whisper"), DraftModel(perturbed("whisper")))


# -- Whisper ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whisper():
    model = copy.deepcopy(build("whisper"))
    settings = {"eos_token_id": 3, "no_timestamps_token_id": 100, "is_multilingual": False, "suppress_tokens": [50, 60]}
    for name, value in {**settings, "begin_suppress_tokens": [30], "prev_sot_token_id": 4, "return_timestamps": False}.items():
        setattr(model.generation_config, name, value)
    return model


LANGUAGES = {"<|en|>": 110, "<|de|>": 111}
TASKS = {"transcribe": 112, "translate": 113}


@pytest.fixture(scope="module")
def multilingual(whisper):
    """The timestamps begin with token 101."""
    model = copy.deepcopy(whisper)
    for name, value in {"is_multilingual": True, "lang_to_id": LANGUAGES, "task_to_id": TASKS}.items():
        setattr(model.generation_config, name, value)
    return model


LONG = {"return_timestamps": True, "condition_on_prev_tokens": True, "return_segments": True}
HEARD = {
    "short": {},
    "timestamps": {"return_timestamps": True},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
    "prompt": {"prompt_ids": torch.tensor([4, 70, 71])},
    "long": LONG,
    "fallback": {**LONG, "temperature": (0.0, 0.7), "logprob_threshold": -3.0, "compression_ratio_threshold": 2.0},
}


def heard(case):
    frames, generator = 200 if case in ("long", "fallback") else 60, torch.Generator().manual_seed(1)
    given = {"input_features": torch.randn(2, 8, frames, generator=generator), "attention_mask": torch.ones(2, frames, dtype=torch.long)}
    given["attention_mask"][1, 3 * frames // 4 :] = 0
    return {**given, **HEARD[case], "max_new_tokens": 16}


SPOKEN = {
    "detected": {},
    "language and task": {"language": "de", "task": "translate"},
    "language of each": {"language": ["de", "en"], "return_timestamps": True},
    "windows": {**LONG, "task": "translate"},
    "prompt": {"language": "en", "prompt_ids": torch.tensor([4, 70, 71])},
}


@pytest.mark.parametrize("case", SPOKEN)
def test_a_multilingual_whisper(multilingual, case):
    given = {**heard("long" if case == "windows" else "short"), **SPOKEN[case]}
    expected = multilingual.generate(**given)
    draft = DraftModel(perturbed("whisper"))
    same(multilingual.generate(**given, custom_generate=foredraft.custom_generate(draft, shape="chain(3)")), expected)
    output = Speculator(multilingual, DraftModel(perturbed("whisper")), shape="chain(3)").generate(**given)
    same(output, expected)
    assert output.stats.drafted > 0


@pytest.mark.parametrize("spoken", [False, True])
@pytest.mark.parametrize("timestamps", [False, True])
def test_silence_is_detected_as_transformers_does(whisper, multilingual, spoken, timestamps, monkeypatch):
    """With timestamps, in one language, the prompt is a single token, and transformers reads the scores of the first step."""
    model, noted, notes = (multilingual if spoken else whisper), [], WhisperNoSpeechDetection.__call__

    def noting(detection, *given):
        scores = notes(detection, *given)
        if given[0].shape[1] == detection.begin_index:
            noted.append(detection.no_speech_prob.clone())
        return scores

    monkeypatch.setattr(WhisperNoSpeechDetection, "__call__", noting)
    given = {**heard("long" if timestamps else "short"), "return_timestamps": timestamps, "temperature": 0.0, "logprob_threshold": 0.0}
    found = []
    for drafting in (None, foredraft.custom_generate("prompt-lookup", shape="chain(3)")):
        for threshold in (1.0, 0.0):  # all is skipped, or nothing
            found.append((model.generate(**given, no_speech_threshold=threshold, custom_generate=drafting), [*noted]))
            del noted[:]
    for (output, ours), (expected, theirs) in zip(found[2:], found[:2]):
        same(output, expected)
        assert len(ours) == len(theirs) > 0
        for one, other in zip(ours, theirs):
            torch.testing.assert_close(one, other)


def same(output, expected):
    output, expected = ({"sequences": each} if isinstance(each, torch.Tensor) else each for each in (output, expected))
    assert torch.equal(output["sequences"], expected["sequences"])
    assert len(output.get("scores") or ()) == len(expected.get("scores") or ())
    for ours, theirs in zip(output.get("scores") or (), expected.get("scores") or ()):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", nightly_but({("long",), ("scores",)}, [(name,) for name in HEARD]))
def test_whisper_in_its_own_generate(whisper, case):
    expected = whisper.generate(**heard(case))
    draft = DraftModel(perturbed("whisper"))
    for drafter, shape in (("prompt-lookup", SHAPES[0]), (draft, SHAPES[1])):
        speculating = foredraft.custom_generate(drafter, shape=shape, seed=3)
        output = whisper.generate(**heard(case), custom_generate=speculating)
        assert type(output) is type(expected)
        if case == "fallback":  # which samples
            continue
        same(output, expected)


@pytest.mark.parametrize("case", nightly_but({("short",), ("long",)}, [(name,) for name in HEARD]))
def test_whisper_through_a_speculator(whisper, case):
    speculator = Speculator(whisper, DraftModel(perturbed("whisper")), shape="chain(3)")
    output = speculator.generate(**heard(case), seed=3)
    assert type(output).__name__ == "SpeculativeEncoderDecoderOutput" and output.stats.acceptance_length > 1
    if case == "fallback":
        assert torch.equal(speculator.generate(**heard(case), seed=3).sequences, output.sequences)
        return
    expected = whisper.generate(**heard(case))
    same(output, expected)
    if case == "long":
        assert [len(each) for each in output.segments] == [len(each) for each in expected["segments"]]
    assert (len(output.stats.rows) > 2) == (case == "long")  # one for each window


def test_windows_have_noise_of_their_own(whisper, monkeypatch):
    seeds, of = [], preparation.Prepared.of
    monkeypatch.setattr(preparation.Prepared, "of", lambda *given, seed, **more: seeds.append(seed) or of(*given, seed=seed, **more))
    Speculator(whisper, "none").generate(**heard("long"), seed=5)
    pairs = [pair for each in seeds for pair in each]
    assert pairs[:2] == [(5, 0), (5, 1)] and len(seeds) > 2 and len(set(pairs)) == len(pairs)


def test_an_attached_whisper(whisper):
    expected = whisper.generate(**heard("short"))
    attached = foredraft.attach(whisper, DraftModel(perturbed("whisper")), shape="chain(3)")
    try:
        output = whisper.generate(**heard("short"))
        assert torch.equal(output, expected) and attached.stats.acceptance_length > 1
        assert len(whisper.generate(**heard("long"))["segments"]) == 2
    finally:
        foredraft.detach(whisper)


def test_a_mask_of_frames_says_nothing_of_states(whisper):
    """Of half a window there are as many frames as the encoder makes states of the whole one."""
    given = {"input_features": torch.randn(2, 8, 30, generator=torch.Generator().manual_seed(1)), "max_new_tokens": 12}
    given["attention_mask"] = torch.ones(2, 30, dtype=torch.long)
    given["attention_mask"][1, 8:] = 0
    speculator = Speculator(whisper, "prompt-lookup", shape="chain(3)")
    assert torch.equal(speculator.generate(**given, isolation="one").sequences, whisper.generate(**given))
    source = Source({"input_features": torch.randn(1, 8, 60), "attention_mask": given["attention_mask"][1:]})
    assert [len(each.states) for each in speculator.target.backend.encoded([source])] == [30]


def test_a_draft_that_reads_sound_needs_more_than_states(whisper):
    states = whisper.get_encoder()(torch.randn(1, 8, 60, generator=torch.Generator().manual_seed(1)))
    given = {"encoder_outputs": states, "max_new_tokens": 12}
    output = Speculator(whisper, "ngram", shape="chain(3)").generate(**given)
    assert torch.equal(output.sequences, whisper.generate(**given))
    with pytest.raises(ConfigurationError, match="which cannot read encoder_outputs"):
        Speculator(whisper, DraftModel(perturbed("whisper")), shape="chain(3)").generate(**given)


def test_what_whisper_refuses(whisper):
    speculator = Speculator(whisper, "none")
    for given, message in (
        ({"input_features": torch.randn(1, 9, 60)}, r"\[B, 8, frames\]"),
        ({}, "pass input_features="),
        ({**heard("short"), "seed": [1, 2]}, "pass one seed"),
        ({**heard("short"), "output_logprobs": 2}, "output_logprobs"),
        ({**heard("short"), "num_beams": 2}, "num_beams=1"),
        ({**heard("short"), "return_token_timestamps": True}, "return_token_timestamps is not supported: times of words"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            speculator.generate(**given)
    other = copy.deepcopy(whisper)
    other.generation_config.alignment_heads = [[0, 0]]
    with pytest.raises(ConfigurationError, match="return_token_timestamps=True is not supported: times of words"):
        other.generate(**heard("short"), return_token_timestamps=True, custom_generate=foredraft.custom_generate("prompt-lookup"))
    with pytest.raises(ConfigurationError, match="use generate"):
        speculator.stream(**heard("short"))


def test_a_whisper_without_an_encoder_gets_the_states_of_the_target(whisper):
    draft, whole = transformers.WhisperForCausalLM(copy.deepcopy(whisper.config)).eval(), perturbed("whisper")
    draft.model.decoder.load_state_dict(whole.model.decoder.state_dict())
    draft.proj_out.load_state_dict(whole.proj_out.state_dict())
    given = {"input_features": torch.randn(2, 8, 60, generator=torch.Generator().manual_seed(1)), "max_new_tokens": 12}
    read, hook = [], lambda module, inputs, output: read.append(len(output[0]))
    speculating = foredraft.custom_generate(DraftModel(draft), shape="chain(3)")
    output = whisper.generate(**given, custom_generate=speculating)
    handle = whisper.get_encoder().register_forward_hook(hook)
    assert torch.equal(whisper.generate(**given, custom_generate=speculating), output)
    handle.remove()
    assert read == [2]
    assert torch.equal(whisper.generate(**given), output)
    drafter = Speculator(whisper, DraftModel(draft), shape="chain(3)").drafter
    measure(costs := CostModel(), drafter._states, drafter, largest=TreeShape.chain(3), seconds=0.1)
    assert costs.draft_seconds(1, (1, 1, 1)) > 0


def test_a_model_that_reads_text_in_a_generate_of_its_own():
    sizes = {"hidden_size": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 128}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": CONTEXT, "eos_token_id": None}
    sizes |= {"t2u_vocab_size": 64, "speech_encoder_layers": 1, "t2u_encoder_layers": 1, "t2u_decoder_layers": 1}
    model = transformers.SeamlessM4TForTextToText(transformers.SeamlessM4TConfig(**sizes, speech_encoder_attention_heads=4)).eval()
    model.generation_config.text_decoder_lang_to_code_id = {"eng": 7}
    given = {**sources("bart"), "tgt_lang": "eng", **OPTIONS}
    expected = model.generate(**given)
    assert torch.equal(Speculator(model, "prompt-lookup", shape="chain(3)").generate(**given).sequences, expected)
    speculating = foredraft.custom_generate("prompt-lookup", shape="chain(3)")
    assert torch.equal(model.generate(**given, custom_generate=speculating), expected)


# -- copying from the source ------------------------------------------------------------------------------------------------


def copying(drafter, model=None, **options):
    """What is drafted first where the text begins with the fourth token of its source, and what follows there."""
    speculator = Speculator(build("t5") if model is None else model, drafter, shape="chain(4)", drafter_options=options)
    source, drafted, score = texts((12,))[0], [], speculator.target.score
    speculator.target.score = lambda tree, **given: drafted.append(tree.tokens[0].tolist()) or score(tree, **given)
    speculator.generate(torch.tensor([source]), forced_bos_token_id=source[3], max_new_tokens=8)
    return drafted[0][1:], source[4:8]


@pytest.mark.parametrize(
    ("drafter", "off"), [("prompt-lookup", {"source": "off"}), ("suffix", {"source": "off"}), ("several:prompt-lookup,ngram", None)]
)
def test_copies_go_on_as_the_source_does(drafter, off):
    found, expected = copying(drafter)
    assert found == expected
    if off is not None:
        found, expected = copying(drafter, **off)
        assert found != expected


def test_a_source_in_another_vocabulary_is_not_copied():
    speculator = Speculator(build("t5"), "prompt-lookup", shape="chain(4)")
    session = speculator.session()
    source = Source({"input_ids": torch.tensor([[9, 8, 7]])}, ids=(9, 8, 4000))
    session.add([START, 9, 8], RowParameters(max_new_tokens=6, source=source))
    while session.live:
        session.step()


MARIAN = {"decoder_vocab_size": VOCABULARY, "share_encoder_decoder_embeddings": False}


@pytest.mark.parametrize("drafter", ["prompt-lookup", "suffix"])
@pytest.mark.parametrize(("name", "copied"), [("bart", True), ("marian", True), ("two vocabularies", False), ("bert2gpt2", False)])
def test_a_source_is_copied_where_the_text_has_its_vocabulary(name, copied, drafter):
    if name == "two vocabularies":
        model = transformers.MarianMTModel(transformers.MarianConfig(**{**FAMILIES["marian"].options, **MARIAN})).eval()
        model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    else:
        model = build(name)
    found, expected = copying(drafter, model)
    assert (found == expected) == copied


def test_other_values_of_source():
    with pytest.raises(ConfigurationError, match="source is on"):
        Speculator(build("t5"), "prompt-lookup:somewhere")


# -- text and the command line ------------------------------------------------------------------------------------------------


def test_text_is_read_by_the_encoder(tmp_path):
    save_t5(tmp_path)
    speculator = Speculator(tmp_path, "prompt-lookup", shape="chain(2)")
    tokenizer = speculator.tokenizer
    expected = []
    for text in ("def first(x):", "while True"):
        ids = speculator.model.generate(**tokenizer(text, return_tensors="pt", return_token_type_ids=False), max_new_tokens=6)
        expected.append(tokenizer.decode(ids[0], skip_special_tokens=True))
    assert speculator(["def first(x):", "while True"], max_new_tokens=6) == expected
    assert "".join(speculator.stream_text("while True", max_new_tokens=6)) == expected[1]


def test_the_command_line_reads_a_source(tmp_path, capsys):
    save_t5(tmp_path)
    given = ["generate", "--target", str(tmp_path), "--max-new-tokens", "4", "--dtype", "float32"]
    runner = CliRunner()
    done = runner.invoke(app, [*given, "--source", "def first(x):", "--json", "--shape", "chain(2)"])
    assert done.exit_code == 0 and json.loads(done.stdout)["prompt"] == "def first(x):"
    causal = ["--drafter", "draft-model:zoo:python-1m", "--drafter-option", "template={source}  # "]
    drafted = runner.invoke(app, [*given, "--source", "def first(x):", "--json", "--shape", "chain(2)", *causal])
    assert drafted.exit_code == 0 and json.loads(drafted.stdout)["text"] == json.loads(done.stdout)["text"]
    for more, message in (
        (["def first(x):"], "give what it reads as --source TEXT"),
        (["--source", "x", "def first(x):"], "give --source TEXT alone"),
    ):
        refused = runner.invoke(app, [*given, *more])
        assert refused.exit_code == 2 and message in refused.stderr
    tuned = runner.invoke(app, ["tune", "--target", str(tmp_path)])
    assert tuned.exit_code != 0 and "is an encoder-decoder model" in tuned.stderr


@pytest.mark.parametrize(
    ("kind", "model", "source", "target"),
    [
        (transformers.NllbTokenizer, transformers.M2M100ForConditionalGeneration, "fra_Latn", "deu_Latn"),
        (transformers.MBart50Tokenizer, transformers.MBartForConditionalGeneration, "fr_XX", "de_DE"),
    ],
)
def test_the_command_line_translates_between_languages(kind, model, source, target, tmp_path):
    tokenizer = kind()
    tokenizer.save_pretrained(tmp_path)
    config = {**_BART, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    model(model.config_class(**config)).save_pretrained(tmp_path)
    read, runner = [], CliRunner()
    given = ["generate", "--target", str(tmp_path), "--source", "a", "--max-new-tokens", "3", "--json", "--drafter", "none"]
    with pytest.MonkeyPatch.context() as patch:
        stream = Speculator.stream
        patch.setattr(Speculator, "stream", lambda self, **asked: read.append(asked) or stream(self, **asked))
        done = runner.invoke(app, [*given, "--source-language", source, "--target-language", target])
    assert done.exit_code == 0, done.output
    tokens = tokenizer.convert_tokens_to_ids([source, target])
    assert read[0]["input_ids"][0, 0] == tokens[0] and read[0]["forced_bos_token_id"] == tokens[1]
    assert json.loads(done.stdout)["tokens"][0] == tokens[1]
    refused = runner.invoke(app, [*given, "--target-language", "klingon"])
    assert refused.exit_code == 2 and "--target-language: unknown language 'klingon'" in refused.stderr
    assert "such as a" in refused.stderr and "<s>" not in refused.stderr  # no special token that is no language


def test_languages_are_refused_where_there_are_none(tmp_path, monkeypatch):
    save_t5(tmp_path)
    run = lambda *given: CliRunner().invoke(app, ["generate", *given, "--max-new-tokens", "3"])  # noqa: E731
    for option in ("--source-language", "--target-language"):
        refused = run("--target", str(tmp_path), "--source", "a b", option, "en")
        assert refused.exit_code == 2 and f"knows no languages; leave {option} out" in refused.stderr
        refused = run("--target", "zoo:python-1m", "a b", option, "en")
        assert refused.exit_code == 2 and f"{option} is for models with an encoder" in refused.stderr


def test_audit_compares_with_transformers(monkeypatch):
    prompts, given = texts((12, 5), seed=9), {"max_new_tokens": 5, "parts": ["keyed"], "do_sample": True, "temperature": 1.1}
    report = foredraft.audit(drafting("bart"), prompts=prompts, **given)
    assert [(part.sampled, part.faults, part.divergences) for part in report.keyed] == [(False, 0, []), (True, 0, [])]
    monkeypatch.setattr(encoder_decoder.Decoder, "_mask", lambda self, *given: None)  # padding of the shorter source is seen
    assert any(part.faults for part in foredraft.audit(drafting("bart"), prompts=prompts, **given).keyed)
    with pytest.raises(ConfigurationError, match="reads input_features, and audit gives models text"):
        foredraft.audit(Speculator(build("whisper"), "none"), prompts=[[5]])


@pytest.mark.nightly
@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_audit_of_all_parts(rule):
    speculator = Speculator(build("t5"), DraftModel(perturbed("t5")), shape="chain(3)", rule=rule)
    report = foredraft.audit(speculator, prompts=texts((12, 5), seed=9), max_new_tokens=10, samples=512, do_sample=True)
    assert report.verdict == "exact", report.summary


@pytest.mark.nightly
def test_the_command_line_audits_and_tabulates(tmp_path):
    save_t5(tmp_path / "model")
    (tmp_path / "task.txt").write_text("def first(x):\nwhile True\n")
    runner, given = CliRunner(), [str(tmp_path / "model"), "--drafter", f"draft-model:{tmp_path / 'model'}"]
    audited = runner.invoke(app, ["audit", *given, "--prompts", str(tmp_path / "task.txt"), "--max-new-tokens", "6", "--part", "keyed"])
    assert "all as plain decoding" in " ".join(audited.output.split())
    files = ["--task", str(tmp_path / "task.txt"), "--json", str(tmp_path / "table.json")]
    tabled = runner.invoke(app, ["table", "--target", *given, *files, "--gamma", "2", "--max-new-tokens", "8", "--repeats", "1"])
    assert tabled.exit_code == 0, tabled.output
    cells = json.loads((tmp_path / "table.json").read_text())["cells"]
    assert {cell["draft"] for cell in cells} == {"bigram", given[-1]}
    assert all(cell["alpha"]["value"] == cell["c_operations"] == 1 for cell in cells if cell["draft"] == given[-1])


def test_one_padded_source_for_several_beginnings():
    """The mask is the source's; in transformers it counts for every row."""
    model = build("bart")
    given = padded([*texts((9,)), [*texts((5,))[0]]])
    several = {"input_ids": given["input_ids"][1:], "attention_mask": given["attention_mask"][1:]}
    begun = torch.tensor([[START, 7], [START, 8], [START, 9]])
    alone = {"input_ids": torch.tensor([texts((5,))[0]])}
    wanted = [model.generate(**alone, decoder_input_ids=begun[row : row + 1], **OPTIONS)[0] for row in range(3)]
    found = drafting("bart").generate(**several, decoder_input_ids=begun, **OPTIONS).sequences
    assert all(found[row, : len(line)].tolist() == line.tolist() for row, line in enumerate(wanted))
    with pytest.raises(ConfigurationError, match="decoder_input_ids have 1 rows for 2 sources"):
        drafting("bart").generate(**given, decoder_input_ids=begun[:1], **OPTIONS)


def test_a_grammar_and_a_token_that_is_forced_are_refused_together():
    with pytest.raises(ConfigurationError, match="forced_bos_token_id=7 is no text that a grammar allows"):
        drafting("bart").generate(**sources("bart"), **OPTIONS, forced_bos_token_id=7, regex="a+", tokenizer=object())


def test_the_command_line_reads_what_the_model_reads(tmp_path, monkeypatch):
    """Also where nothing is known of a model before it is loaded; and beams that its configuration asks for are left out."""
    save_t5(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_beams": 4}))
    monkeypatch.setattr("foredraft.cli.checks.config_here", lambda source: {})
    run = lambda *given: CliRunner().invoke(app, ["generate", "--target", str(tmp_path), "--max-new-tokens", "3", *given])  # noqa: E731
    assert run("--source", "a b").exit_code == 0
    assert "give what it reads as --source TEXT" in run("a b").stderr.replace("\n", " ")
