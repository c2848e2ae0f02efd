"""What a user of transformers passes to generate, through both entry points, against transformers on each row alone."""

from __future__ import annotations

import time
from functools import cache, partial

import pytest
import torch
from cover import by_turns, covered
from helpers import PAD, Oracle, added, alone, clone, drafter_names, generate, make_drafter, padded, perturbed, repetitive, tiny, watched
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    StopStringCriteria,
    TextStreamer,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

import foredraft
from foredraft import ConfigurationError, Interrupted, SpeculativeOutput, Speculator
from foredraft.models.cache_names import cache_argument

NEW = 14
ROWS = repetitive((23, 9, 15))
WIDTH = 23


@cache
def plain() -> Speculator:
    return Speculator(tiny(), drafter="none")


@cache
def greedy() -> tuple[list[int], ...]:
    """What transformers adds to each of ROWS."""
    return tuple(alone(tiny(), row, max_new_tokens=NEW) for row in ROWS)


def knowing(texts, rows=ROWS, model=None, **options) -> Speculator:
    """A Speculator whose drafts are right but for every fifth token, so that paths are long and end everywhere."""
    oracle = Oracle([row + text for row, text in zip(rows, texts)])
    return Speculator(tiny() if model is None else model, oracle, **(options or {"draft_length": 5}))


def sampled_alone(rows=ROWS, seed=7, **options) -> list[list[int]]:
    """Plain decoding of each row by itself with the pair it has in the batch."""
    return [generate(plain(), [row], seed=[(seed, index)], do_sample=True, **options)[0] for index, row in enumerate(rows)]


# -- processors -------------------------------------------------------------------------------------------------------

ENDS = [5, 61, 74, 83, 91, 100]
PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram": {"no_repeat_ngram_size": 1},
    "bad_words": {"bad_words_ids": [[5], [74, 6], [91, 5, 74]]},
    "sequence_bias": {"sequence_bias": [[[5, 74], -9.0], [[17], 3.0], [[91], -2.0]]},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": ENDS},
    "min_length": {"min_length": 18, "eos_token_id": ENDS},
    "forced_eos": {"forced_eos_token_id": 7},
    "suppress_tokens": {"suppress_tokens": ENDS},
    "begin_suppress_tokens": {"begin_suppress_tokens": [73, 14, 23, 26]},
    "exponential_decay": {"exponential_decay_length_penalty": (4, 1.6), "eos_token_id": 100},
    "together": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 3, "eos_token_id": ENDS},
}
WARPERS = {
    "temperature": {"temperature": 0.6, "top_k": 0},
    "top_k": {"top_k": 7, "temperature": 1.5},
    "top_p": {"top_p": 0.6, "top_k": 0},
    "min_p": {"min_p": 0.2, "top_k": 0},
    "typical_p": {"typical_p": 0.5, "top_k": 0},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02, "top_k": 0},
    "eta_cutoff": {"eta_cutoff": 0.05, "top_k": 0},
    "renormalize": {"top_p": 0.8, "renormalize_logits": True},
}


@pytest.mark.parametrize(("name", "side"), covered(list(PROCESSORS), ["left", "right"], ways=1))
def test_greedy_with_processors_is_transformers_row_by_row(name, side):
    options = {"max_new_tokens": NEW, "pad_token_id": PAD, **PROCESSORS[name]}
    expected = [_until_end(alone(tiny(), row, **options), options) for row in ROWS]
    assert expected != list(greedy()), "the option changes nothing, so this tests nothing"
    for speculator in (knowing(expected), knowing(greedy()), Speculator(tiny(), drafter="prompt-lookup")):
        out = speculator.generate(**padded(ROWS, side), do_sample=False, **options)
        assert added(out, WIDTH) == expected


@pytest.mark.parametrize(("name", "drafter"), covered([*PROCESSORS, *WARPERS], ["oracle", "draft-model"], ways=1))
def test_sampling_with_processors_is_plain_decoding_row_by_row(name, drafter):
    options = {"max_new_tokens": NEW, "top_k": 0, **PROCESSORS.get(name, {}), **WARPERS.get(name, {})}
    expected = sampled_alone(**options)
    if drafter == "oracle":
        speculator = knowing(expected)
    else:
        speculator = Speculator(tiny(), drafter=make_drafter(drafter), rule="match", shape="chain(5)")
    assert generate(speculator, ROWS, seed=7, do_sample=True, **options) == expected


def _until_end(tokens, options):
    ends = options.get("eos_token_id", [])
    ends = ends if isinstance(ends, list) else [ends]
    stop = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: stop + 1]


class Banner(LogitsProcessor):
    """The user's own: forbids the token that came three places before."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -3:-2], float("-inf")) if input_ids.shape[1] > 2 else scores


def test_a_processor_of_the_users_own():
    expected = [alone(tiny(), row, max_new_tokens=NEW, logits_processor=[Banner()]) for row in ROWS]
    out = generate(knowing(expected), ROWS, max_new_tokens=NEW, logits_processor=[Banner()])
    assert out == expected != list(greedy())


def test_prefix_allowed_tokens():
    def allowed(batch, ids):
        return [token for token in range(3, 128) if token % 3 == int(ids[-1]) % 3]

    expected = [alone(tiny(), row, max_new_tokens=NEW, prefix_allowed_tokens_fn=allowed) for row in ROWS]
    assert generate(knowing(greedy()), ROWS, max_new_tokens=NEW, prefix_allowed_tokens_fn=allowed) == expected


# -- entry points and configuration -----------------------------------------------------------------------------------

CALLS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.2},
    "default top-k": {"do_sample": True, "temperature": 5.0},
    "warped": {"do_sample": True, "top_p": 0.7, "repetition_penalty": 1.3},
    "two of each": {"do_sample": True, "num_return_sequences": 2},
    "ends": {"do_sample": False, "eos_token_id": ENDS},
    "config": {"generation_config": GenerationConfig(do_sample=True, top_k=9, max_new_tokens=NEW, pad_token_id=PAD)},
}


@pytest.mark.parametrize(("name", "side"), covered(list(CALLS), ["left", "right"], ways=1))
def test_both_entry_points_agree(name, side):
    options = {**padded(ROWS, side), **CALLS[name]}
    if name != "config":
        options |= {"max_new_tokens": NEW, "pad_token_id": PAD}
    model = tiny()
    out = Speculator(model, drafter="ngram").generate(**options, seed=3)
    decode = foredraft.custom_generate(drafter="ngram", seed=3)
    theirs = model.generate(**options, custom_generate=decode)
    assert isinstance(theirs, torch.Tensor) and torch.equal(theirs, out.sequences)
    whole = model.generate(**options, custom_generate=decode, return_dict_in_generate=True)
    assert isinstance(whole, SpeculativeOutput) and torch.equal(whole.sequences, out.sequences)
    assert whole.stats.new_tokens == out.stats.new_tokens


def test_sequences_are_padded_as_transformers_pads_them():
    """Left-padded greedy batch with ends: the whole tensor is transformers' own (no penalty is in play, so padding is harmless)."""
    options = {**padded(ROWS), "max_new_tokens": NEW, "do_sample": False, "eos_token_id": ENDS, "pad_token_id": PAD}
    expected = tiny().generate(**options)
    assert torch.equal(knowing(greedy()).generate(**options).sequences, expected)


def test_defaults_of_the_generation_config_are_prepared_alike():
    """An unset top_k means 50 here too, and what the model's own config names is honoured."""
    options = {"max_new_tokens": 30, "temperature": 9.0, "do_sample": True}
    default = generate(plain(), ROWS, seed=1, **options)
    assert default == generate(plain(), ROWS, seed=1, top_k=50, **options)
    assert default != generate(plain(), ROWS, seed=1, top_k=0, **options)
    model = clone(tiny())
    model.generation_config.repetition_penalty = 1.5
    model.generation_config.max_new_tokens = NEW
    expected = [alone(tiny(), row, max_new_tokens=NEW, repetition_penalty=1.5) for row in ROWS]
    assert generate(Speculator(model, drafter="ngram"), ROWS) == expected != list(greedy())


def test_inputs_may_be_positional_and_without_a_mask():
    ids = torch.tensor([ROWS[0]])
    out = Speculator(tiny()).generate(ids, max_new_tokens=NEW)
    assert out.sequences.tolist() == [ROWS[0] + greedy()[0]]
    assert torch.equal(out["sequences"], out.sequences)


def test_max_length_and_max_new_tokens():
    row, options = padded(ROWS[:1]), {"do_sample": False, "pad_token_id": PAD}
    for limits in ({"max_length": 30}, {"max_new_tokens": 4}, {"max_length": 300, "max_new_tokens": 3}, {"max_new_tokens": 1}):
        out = knowing(greedy()).generate(**row, **options, **limits)
        assert torch.equal(out.sequences, tiny().generate(**row, **options, **limits))
        assert out.stats.rows[0].finish_reason == "length"
    batch = knowing(greedy()).generate(**padded(ROWS), max_length=30, pad_token_id=PAD)
    assert batch.sequences.shape == (3, 30) and added(batch, WIDTH) == [text[:7] for text in greedy()]


def test_several_returned_sequences():
    out = Speculator(tiny(), drafter="ngram").generate(
        **padded(ROWS[:2]), max_new_tokens=NEW, do_sample=True, num_return_sequences=3, seed=4, pad_token_id=PAD
    )
    rows = [ROWS[0]] * 3 + [ROWS[1]] * 3
    assert added(out, WIDTH) == sampled_alone(rows, seed=4, max_new_tokens=NEW)
    assert len(out.stats.rows) == 6
    with pytest.raises(ValueError, match="num_return_sequences"):
        Speculator(tiny()).generate(**padded(ROWS), max_new_tokens=NEW, num_return_sequences=2)


def test_several_ends():
    ends = [greedy()[0][6], greedy()[1][2]]
    expected = [_until_end(text, {"eos_token_id": ends}) for text in greedy()]
    assert len({len(text) for text in expected}) > 1
    for length in (1, 3, 5, 12):
        out = knowing(greedy(), draft_length=length).generate(**padded(ROWS), max_new_tokens=NEW, eos_token_id=ends, pad_token_id=PAD)
        assert added(out, WIDTH) == expected
        reasons = [row.finish_reason for row in out.stats.rows]
        assert reasons == ["eos" if text[-1] in ends else "length" for text in expected]
        assert [row.tokens for row in out.stats.rows] == [len(text) for text in expected]


def test_only_what_is_returned_counts_as_accepted():
    """A right draft of twelve that an end cuts after six: six are accepted and kept."""
    row, text = ROWS[0], greedy()[0]
    end = text[6]
    assert end not in text[:6]
    speculator = Speculator(tiny(), drafter=Oracle([row + text], wrong=10**9), draft_length=12)
    out = speculator.generate(**padded([row]), max_new_tokens=NEW, eos_token_id=end, pad_token_id=PAD)
    assert (out.stats.drafted, out.stats.accepted, out.stats.kept, out.stats.row_passes) == (12, 6, 6, 1)
    assert out.stats.accepted_by_depth == [1] * 6 and out.stats.drafted_by_depth == [1] * 12
    assert out.stats.rows[0].finish_reason == "eos"


# -- seeds --------------------------------------------------------------------------------------------------------------


def test_an_int_gives_row_i_the_pair():
    speculator, options = Speculator(tiny(), drafter="ngram"), {"do_sample": True, "max_new_tokens": NEW}
    batch = generate(speculator, ROWS, seed=5, **options)
    for index, row in enumerate(ROWS):
        assert generate(speculator, [row], seed=[(5, index)], **options) == [batch[index]]
    assert generate(speculator, ROWS[:1], seed=5, **options) == generate(speculator, ROWS[:1], seed=[5], **options)
    mixed = generate(speculator, ROWS, seed=[5, (5, 1), (8, 0)], **options)
    assert mixed[:2] == batch[:2] and mixed[2] == generate(speculator, ROWS[2:], seed=8, **options)[0]


def test_no_seed_is_drawn_and_reported():
    speculator, options = (
        Speculator(tiny(), drafter="ngram"),
        {**padded(ROWS), "do_sample": True, "max_new_tokens": NEW, "pad_token_id": PAD},
    )
    torch.manual_seed(3)
    first, second = speculator.generate(**options), speculator.generate(**options)
    assert first.stats.seed != second.stats.seed and not torch.equal(first.sequences, second.sequences)
    assert torch.equal(speculator.generate(**options, seed=first.stats.seed).sequences, first.sequences)
    torch.manual_seed(3)
    assert torch.equal(speculator.generate(**options).sequences, first.sequences)


@pytest.mark.parametrize("seed", [[1, 2], "7", 1.5, [1, 2, None], [1, 2, (1, 2, 3)], True])
def test_a_bad_seed_is_an_error(seed):
    with pytest.raises(ValueError, match="seed"):
        generate(plain(), ROWS, seed=seed, do_sample=True, max_new_tokens=2)


def test_a_seed_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    generate(Speculator(tiny(), drafter=make_drafter("draft-model")), ROWS, seed=1, do_sample=True, max_new_tokens=4)
    assert torch.equal(before, torch.get_rng_state())


# -- stopping -----------------------------------------------------------------------------------------------------------


class Recorder(StoppingCriteria):
    """Remembers what it was asked about; stops a text that ends in ``token``."""

    def __init__(self, token=None):
        self.token, self.seen = token, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        return input_ids[:, -1] == (-1 if self.token is None else self.token)


def test_criteria_see_every_committed_token():
    recorder = Recorder()
    out = knowing(greedy()).generate(**padded(ROWS), max_new_tokens=NEW, stopping_criteria=[recorder], pad_token_id=PAD)
    assert added(out, WIDTH) == list(greedy())
    assert all(len(asked) == 1 for asked in recorder.seen)
    seen = [asked[0] for asked in recorder.seen]
    shown = padded(ROWS)["input_ids"].tolist()
    wanted = [row + text[:count] for row, text in zip(shown, greedy()) for count in range(1, NEW + 1)]
    assert sorted(seen) == sorted(wanted)


def test_criteria_stop_inside_an_accepted_path():
    token = greedy()[0][3]
    expected = [text[: text.index(token) + 1] if token in text else text for text in greedy()]
    speculator = knowing(greedy(), draft_length=12)
    out = speculator.generate(**padded(ROWS), max_new_tokens=NEW, stopping_criteria=[Recorder(token)], pad_token_id=PAD)
    assert added(out, WIDTH) == expected
    assert out.stats.rows[0].finish_reason == "stop"
    assert out.stats.kept == out.stats.new_tokens - len(ROWS) >= out.stats.accepted


def test_max_time():
    out = knowing(greedy()).generate(**padded(ROWS), max_new_tokens=NEW, max_time=1e-9, pad_token_id=PAD)
    assert added(out, WIDTH) == [text[:1] for text in greedy()]
    assert [row.finish_reason for row in out.stats.rows] == ["stop"] * 3
    assert generate(knowing(greedy()), ROWS, max_new_tokens=NEW, max_time=1e6) == list(greedy())


@cache
def zoo():
    """The embedded model in float32, its tokenizer, a prompt and what transformers makes of it."""
    speculator = Speculator("zoo:python-8m", drafter="none", dtype="float32")
    tokenizer = foredraft.zoo.load_tokenizer("python-8m")
    inputs = tokenizer("import os\n\ndef main(", return_tensors="pt", return_token_type_ids=False)
    text = alone(speculator.model, inputs["input_ids"][0].tolist(), max_new_tokens=40, eos_token_id=None)
    return speculator.model, tokenizer, inputs, text


def test_stop_strings_inside_an_accepted_path():
    model, tokenizer, inputs, text = zoo()
    written = tokenizer.decode(text)
    middle = len(tokenizer.decode(text[:17]))
    stops = [written[middle : middle + 3], "no such text"]
    options = {**inputs, "max_new_tokens": 40, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    expected = model.generate(**options, stop_strings=stops, tokenizer=tokenizer)
    assert expected.shape[1] < inputs["input_ids"].shape[1] + 40
    prompt = inputs["input_ids"][0].tolist()
    speculator = knowing([text], [prompt], model, draft_length=12)
    for given in (stops, tuple(stops)):
        out = speculator.generate(**options, stop_strings=list(given), tokenizer=tokenizer)
        assert torch.equal(out.sequences, expected)
        assert out.stats.rows[0].finish_reason == "stop"
    by_config = speculator.generate(
        **inputs, generation_config=GenerationConfig(max_new_tokens=40, stop_strings=stops), tokenizer=tokenizer
    )
    assert torch.equal(by_config.sequences, expected)
    criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=stops)
    through = model.generate(**options, stopping_criteria=[criterion], custom_generate=foredraft.custom_generate("ngram"))
    assert torch.equal(through, expected)
    with pytest.raises(ConfigurationError, match="tokenizer"):
        speculator.generate(**options, stop_strings=stops)


# -- vectors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.4, "bad_words_ids": [[5], [74, 6]]}], ids=["raw", "processed"])
def test_scores_and_logits_are_those_of_transformers(options):
    asked = {
        "max_new_tokens": NEW, "do_sample": False, "output_scores": True, "output_logits": True, "return_dict_in_generate": True,
        "pad_token_id": PAD, **options,
    }  # fmt: skip
    for row, text in zip(ROWS, greedy()):
        theirs = tiny().generate(**padded([row]), **asked)
        ours = knowing([text], [row]).generate(**padded([row]), **asked)
        assert torch.equal(ours.sequences, theirs.sequences)
        for name in ("scores", "logits"):
            assert len(ours[name]) == len(theirs[name]) == NEW
            for mine, wanted in zip(ours[name], theirs[name]):
                assert mine.shape == wanted.shape and mine.dtype == wanted.dtype
                torch.testing.assert_close(mine, wanted, atol=1e-4, rtol=1e-4)


def test_scores_of_a_ragged_batch():
    ends = [greedy()[1][2]]
    asked = {"max_new_tokens": NEW, "eos_token_id": ends, "output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    out = knowing(greedy()).generate(**padded(ROWS), **asked, pad_token_id=PAD)
    steps = out.sequences.shape[1] - WIDTH
    assert len(out.scores) == len(out.logits) == steps == max(row.tokens for row in out.stats.rows)
    assert all(step.shape == (3, 128) for step in (*out.scores, *out.logits))
    for index, row in enumerate(out.stats.rows):
        chosen = [int(step[index].argmax()) for step in out.scores]
        assert chosen == added(out, WIDTH)[index] + [PAD] * (steps - row.tokens)
    without = knowing(greedy()).generate(**padded(ROWS), max_new_tokens=2, pad_token_id=PAD)
    assert without.scores is None and without.logits is None


def test_scores_of_a_sample():
    """The token that was drawn is possible under the recorded scores, and top-k cut the others."""
    out = Speculator(tiny(), drafter=make_drafter("draft-model"), shape="chain(5)").generate(
        **padded(ROWS), max_new_tokens=NEW, do_sample=True, top_k=5, output_scores=True, return_dict_in_generate=True, pad_token_id=PAD
    )
    for step, scores in enumerate(out.scores):
        assert torch.equal(scores.isfinite().sum(-1), torch.tensor([5, 5, 5]))
        assert scores.gather(1, out.sequences[:, WIDTH + step, None]).isfinite().all()


# -- refusals -----------------------------------------------------------------------------------------------------------

CACHE = cache_argument(type(tiny()))
REFUSED = {
    "num_beams": {"num_beams": 2},
    "assistant_model": {"assistant_model": "perturbed"},
    "output_attentions": {"output_attentions": True},
    "output_hidden_states": {"output_hidden_states": True},
    CACHE: {CACHE: "cache"},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 3, 32)},
    "cache_implementation": {"cache_implementation": "static"},
    "watermark": {"watermarking_config": WatermarkingConfig()},
    "guidance_scale": {"guidance_scale": 1.5},
    "use_cache": {"use_cache": False},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "position_ids": {"position_ids": torch.arange(5, 5 + WIDTH)[None]},
    "guidance": {"negative_prompt_ids": torch.tensor([[1]]), "guidance_scale": 2.0},
    "token_type_ids": {"token_type_ids": torch.ones(1, WIDTH, dtype=torch.long)},
    "max_new_tokns": {"max_new_tokns": 5},
    "temprature": {"temprature": 0.5},
}
STAND_INS = {"perturbed": perturbed, "cache": DynamicCache}


@pytest.mark.parametrize(("name", "entry"), covered(list(REFUSED), ["generate", "stream", "custom_generate", "attach"], ways=1))
def test_what_is_not_honoured_is_refused_by_name(name, entry):
    options = {key: STAND_INS[value]() if isinstance(value, str) and value in STAND_INS else value for key, value in REFUSED[name].items()}
    options = {**padded(ROWS[:1]), "max_new_tokens": NEW, "pad_token_id": PAD, **options}
    if (name, entry) == ("assistant_model", "custom_generate"):
        pytest.skip("transformers takes the argument for itself and tells a custom_generate nothing of it")
    calls = []
    if entry == "custom_generate" and name == "inputs_embeds":
        options.pop("input_ids")
    model = clone(tiny())
    if entry == "attach":
        call = foredraft.attach(model, "none", self_test=False)
    elif entry == "custom_generate":
        call = partial(model.generate, custom_generate=foredraft.custom_generate("none", self_test=False))
    else:
        call = getattr(plain(), entry)
    with watched(tiny(), calls.append), watched(model, calls.append), pytest.raises(ValueError, match=name):
        call(**options)
    assert not calls, "refused before the first pass"
    assert generate(plain(), ROWS[:1], max_new_tokens=NEW) == [greedy()[0]]


def test_what_was_not_asked_for_is_not_refused():
    """Defaults spelled out by a careful user."""
    out = plain().generate(
        **padded(ROWS[:1]), max_new_tokens=NEW, pad_token_id=PAD, num_beams=1, use_cache=True, output_attentions=False,
        output_hidden_states=False, guidance_scale=1.0, assistant_model=None, penalty_alpha=None, **{CACHE: None},
    )  # fmt: skip
    assert added(out, WIDTH) == [greedy()[0]]


# -- streams ------------------------------------------------------------------------------------------------------------


class Collector(BaseStreamer):
    def __init__(self):
        self.got = []

    def put(self, value):
        self.got.append((list(value.shape), value.tolist()))

    def end(self):
        self.got.append("end")


def test_a_streamer_gets_what_transformers_gives_it():
    options = {**padded(ROWS[:1]), "max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}
    theirs, ours, through = Collector(), Collector(), Collector()
    tiny().generate(**options, streamer=theirs)
    knowing(greedy()).generate(**options, streamer=ours)
    tiny().generate(**options, custom_generate=foredraft.custom_generate("ngram", streamer=through))
    assert ours.got == theirs.got == through.got
    with pytest.raises(ConfigurationError, match="streamer"):
        plain().generate(**padded(ROWS), max_new_tokens=2, pad_token_id=PAD, streamer=Collector())


def test_a_text_streamer(capsys):
    model, tokenizer, inputs, text = zoo()
    options = {**inputs, "max_new_tokens": 30, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    model.generate(**options, streamer=TextStreamer(tokenizer, skip_prompt=True))
    theirs = capsys.readouterr().out
    knowing([text], [inputs["input_ids"][0].tolist()], model).generate(**options, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out == theirs != ""


@pytest.mark.parametrize("drafter", by_turns(drafter_names(), 1))  # the others in test_failing_rows.py
def test_a_stream_yields_what_generate_returns(drafter):
    options = {**padded(ROWS), "max_new_tokens": NEW, "do_sample": True, "seed": 3, "pad_token_id": PAD, "eos_token_id": ENDS}
    expected = Speculator(tiny(), drafter=make_drafter(drafter), shape="chain(5)").generate(**options)
    texts, over = [[] for _ in ROWS], {}
    stream = Speculator(tiny(), drafter=make_drafter(drafter), shape="chain(5)").stream(**options)
    for tokens in stream:
        assert tokens and 0 <= tokens.accepted <= len(tokens) and tokens.row not in over
        texts[tokens.row] += tokens
        if tokens.finish_reason:
            over[tokens.row] = tokens.finish_reason
        assert stream.stats.new_tokens >= sum(map(len, texts))
    assert texts == added(expected, WIDTH)
    assert [over[index] for index in range(3)] == [row.finish_reason for row in expected.stats.rows]
    assert stream.stats.new_tokens == sum(map(len, texts))
    if drafter != "several":  # which asks a model where that pays by the times it measures
        assert stream.stats.accepted == expected.stats.accepted


def _break(stream, count):
    for index, _ in enumerate(stream):
        if index == count:
            break


def _close(stream, count):
    for _ in range(count):
        next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []


def _raise(stream, count):
    def consume():
        for index, _ in enumerate(stream):
            assert 1 / (index - count)

    with pytest.raises(ZeroDivisionError):
        consume()


@pytest.mark.parametrize(("drafter", "leave", "count"), covered(drafter_names(), [_break, _close, _raise], [0, 1, 4, 7], ways=1))
def test_an_abandoned_stream_leaves_the_speculator_usable(drafter, leave, count):
    speculator = Speculator(tiny(), drafter=make_drafter(drafter), shape="chain(5)")
    stream = speculator.stream(**padded(ROWS), max_new_tokens=NEW, pad_token_id=PAD)
    leave(stream, count)  # still referenced here: nothing but the next call ends it
    assert generate(speculator, ROWS, max_new_tokens=NEW) == list(greedy())
    assert generate(speculator, ROWS[1:2], max_new_tokens=NEW) == [greedy()[1]]


def test_a_stream_whose_speculator_moved_on_says_so():
    speculator = Speculator(tiny(), drafter=make_drafter("draft-model"), shape="chain(5)")
    stream = speculator.stream(**padded(ROWS), max_new_tokens=NEW, pad_token_id=PAD)
    next(stream)
    next(stream)
    assert generate(speculator, ROWS, max_new_tokens=NEW) == list(greedy())
    with pytest.raises(foredraft.ForedraftError, match="another generation"):
        list(stream)
    assert generate(speculator, ROWS, max_new_tokens=NEW) == list(greedy())


def test_closing_a_finished_stream_does_not_end_the_next_one():
    speculator = Speculator(tiny(), drafter="ngram", shape="chain(5)")
    first = speculator.stream(**padded(ROWS[:1]), max_new_tokens=NEW, pad_token_id=PAD)
    list(first)
    second = speculator.stream(**padded(ROWS[:1]), max_new_tokens=NEW, pad_token_id=PAD)
    text = list(next(second))
    first.close()
    del first
    for tokens in second:
        text += tokens
    assert text == greedy()[0]


def test_a_stream_can_be_released_under():
    speculator = Speculator(tiny(), drafter=make_drafter("draft-model"), shape="chain(5)")
    assert generate(speculator, ROWS, max_new_tokens=NEW) == list(greedy())
    speculator.release()
    assert speculator.target.cache.bytes == 0
    assert generate(speculator, ROWS, max_new_tokens=NEW) == list(greedy())


# -- Ctrl-C -------------------------------------------------------------------------------------------------------------


def interrupt_at(count):
    """A hook for `watched`: Ctrl-C inside the pass number ``count``."""
    calls = []

    def seen(kwargs):
        calls.append(1)
        if len(calls) == count:
            raise KeyboardInterrupt

    return seen


@pytest.mark.parametrize(("drafter", "count"), covered(drafter_names(), [1, 2, 4], ways=1))
def test_ctrl_c_in_a_pass_keeps_what_there_is(drafter, count):
    speculator = Speculator(tiny(), drafter=make_drafter(drafter), shape="chain(5)")
    asked = {"output_scores": True, "return_dict_in_generate": True} if count != 2 else {}
    with watched(tiny(), interrupt_at(count)), pytest.raises(Interrupted) as caught:
        speculator.generate(**padded(ROWS), max_new_tokens=NEW, pad_token_id=PAD, **asked)
    output = caught.value.output
    assert isinstance(caught.value, KeyboardInterrupt)
    assert output.sequences[:, :WIDTH].tolist() == padded(ROWS)["input_ids"].tolist()
    texts = added(output, WIDTH)
    assert texts == [text[: len(mine)] for text, mine in zip(greedy(), texts)]
    least = min(count - 1, 1) if drafter in ("layer-skip", "draft-verify") else count - 1  # its drafts are calls of the target, too
    assert all(len(mine) >= least for mine in texts) and output.stats.new_tokens == sum(map(len, texts))
    if asked and count > 1:
        assert len(output.scores) == max(map(len, texts))
    assert generate(speculator, ROWS, max_new_tokens=NEW) == list(greedy())


def test_ctrl_c_in_the_draft_model_and_in_a_criterion():
    drafter = make_drafter("draft-model")
    speculator = Speculator(tiny(), drafter=drafter, shape="chain(5)")
    with watched(drafter.model.model, interrupt_at(3)), pytest.raises(Interrupted):
        speculator.generate(**padded(ROWS), max_new_tokens=NEW, pad_token_id=PAD)
    assert generate(speculator, ROWS, max_new_tokens=NEW) == list(greedy())

    class Impatient(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        speculator.generate(**padded(ROWS), max_new_tokens=NEW, pad_token_id=PAD, stopping_criteria=[Impatient()])
    assert caught.value.output.stats.new_tokens <= 3
    assert generate(speculator, ROWS, max_new_tokens=NEW) == list(greedy())


def test_ctrl_c_through_the_other_entry_point():
    with watched(tiny(), interrupt_at(20)), pytest.raises(Interrupted) as caught:  # the self-test makes the first passes
        tiny().generate(**padded(ROWS), max_new_tokens=NEW, pad_token_id=PAD, custom_generate=foredraft.custom_generate("none"))
    assert caught.value.output.sequences.shape[1] > WIDTH


# -- statistics -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("drafter", "count"), covered(drafter_names(), [1, 3], ways=1))
def test_statistics_say_what_happened(drafter, count):
    rows, shapes = ROWS[:count], []
    speculator = Speculator(tiny(), drafter=make_drafter(drafter), shape="chain(5)")
    began = time.perf_counter()
    with watched(tiny(), lambda kwargs: shapes.append(kwargs["input_ids"].shape)):
        out = speculator.generate(**padded(rows), max_new_tokens=30, pad_token_id=PAD, do_sample=True, seed=2, eos_token_id=ENDS)
    elapsed = time.perf_counter() - began
    stats = out.stats
    assert stats.row_passes == sum(row.passes for row in stats.rows)
    if drafter not in ("layer-skip", "draft-verify"):  # whose drafts are calls of the target, too
        assert stats.target_passes == len(shapes)
        assert stats.row_passes == sum(shape[0] for shape in shapes[1:])
    texts = added(out, WIDTH if count == 3 else len(rows[0]))
    assert stats.new_tokens == sum(map(len, texts)) == sum(row.tokens for row in stats.rows)
    assert stats.kept == stats.new_tokens - count == sum(row.kept for row in stats.rows)
    assert stats.drafted == sum(stats.drafted_by_depth) == sum(row.drafted for row in stats.rows)
    assert stats.accepted == sum(stats.accepted_by_depth) == sum(row.accepted for row in stats.rows)
    assert stats.kept - stats.row_passes <= stats.accepted <= stats.kept
    assert stats.acceptance_length == stats.kept / stats.row_passes >= 1
    assert sorted(stats.accepted_by_depth, reverse=True) == stats.accepted_by_depth
    assert all(low <= high for low, high in zip(stats.accepted_by_depth, stats.drafted_by_depth))
    for row, text in zip(stats.rows, texts):
        assert len(row.token_times) == row.tokens == len(text)
        assert row.token_times == sorted(row.token_times)
        assert row.finish_reason == ("eos" if text[-1] in ENDS else "length")
    parts = [stats.seconds[name] for name in ("prefill", "draft", "target", "overhead")]
    assert all(part >= 0 for part in parts) and sum(parts) == pytest.approx(stats.seconds["total"])
    assert 0 < stats.time_to_first_token < stats.seconds["total"] <= elapsed
    if drafter == "none":
        assert stats.acceptance_length == 1 and stats.drafted == 0
    assert (stats.drafter, stats.seed, stats.lossless) == (drafter, 2, True)
    assert stats.to_dict()["rows"][0]["tokens"] == stats.rows[0].tokens


def test_statistics_of_a_known_pattern():
    """Draft length 4, every fifth token wrong: which tokens are drafted and accepted can be counted by hand."""
    row, text = ROWS[0], greedy()[0]
    out = knowing([text], [row], draft_length=4).generate(**padded([row]), max_new_tokens=NEW, pad_token_id=PAD)
    place, end, drafted, accepted, passes = len(row) + 1, len(row) + NEW, 0, 0, 0
    while place < end:
        limit = min(4, end - place - 1)
        right = next((depth for depth in range(limit) if (place + depth) % 5 == 2), limit)
        drafted, accepted, passes, place = drafted + limit, accepted + right, passes + 1, place + right + 1
    assert (out.stats.drafted, out.stats.accepted, out.stats.row_passes) == (drafted, accepted, passes)
    assert out.stats.target_passes == passes + 1


def test_plain_decoding_keeps_one_token_a_pass():
    stats = plain().generate(**padded(ROWS), max_new_tokens=NEW, pad_token_id=PAD).stats
    assert stats.acceptance_length == 1.0 and stats.drafted == stats.accepted == 0 and stats.target_passes == NEW


def test_vectors_of_rejected_tokens_are_not_kept():
    """A view of a round's vectors would keep all of them."""
    run = Speculator(tiny(), make_drafter("draft-model"), shape="chain(4)").session(record=("scores",))
    slot = run.add(ROWS[0], foredraft.RowParameters(max_new_tokens=NEW))
    while run.live:
        rows = list(run.rows)
        run.step()
    assert run.stats.drafted > run.stats.accepted > 0 and slot == rows[0].slot
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in rows[0].scores)


def test_a_closed_speculator_is_refused():
    speculator = Speculator(clone(tiny()), "none")
    speculator.close()
    speculator.close()
    with pytest.raises(ConfigurationError, match="was closed; make a new one"):
        speculator.generate(**padded(ROWS[:1]), max_new_tokens=2, pad_token_id=PAD)


def test_after_a_model_that_is_refused_the_function_serves_the_one_before():
    decode, options = foredraft.custom_generate("prompt-lookup"), {**padded(ROWS[:1]), "max_new_tokens": NEW, "pad_token_id": PAD}
    model, other = clone(tiny()), clone(tiny())
    wanted = model.generate(**options, custom_generate=decode)
    other.forward = None
    with pytest.raises(Exception):  # noqa: B017 - whatever a broken model raises
        other.generate(**options, custom_generate=decode)
    assert torch.equal(model.generate(**options, custom_generate=decode), wanted)
