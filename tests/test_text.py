"""Text in, text out: prompts, conversations, streams of whole characters, paths and model objects, and how objects show themselves."""

from __future__ import annotations

import copy
import pickle
from functools import cache

import pytest
from helpers import Oracle, make_drafter, tiny
from transformers import GenerationConfig, LogitsProcessor

import foredraft
from foredraft import ConfigurationError, Speculator, Text, rules, text, zoo

PROMPT = "def area(radius):\n    "
TEMPLATE = (
    "{% for each in messages %}# {{ each.role }}: {{ each.content }}\n{% endfor %}{% if add_generation_prompt %}# assistant: {% endif %}"
)


@cache
def speculator(template: str | None = None) -> Speculator:
    tokenizer = zoo.load_tokenizer("python-1m")
    tokenizer.chat_template = template
    return Speculator(zoo.load("python-1m", dtype="float32"), tokenizer=tokenizer)


class Script(LogitsProcessor):
    """Forces the tokens of a text."""

    def __init__(self, prompt: int, tokens: list[int]):
        self.prompt, self.tokens = prompt, tokens

    def __call__(self, input_ids, scores):
        done = input_ids.shape[1] - self.prompt
        forced = scores.new_full(scores.shape, float("-inf"))
        forced[:, self.tokens[done] if done < len(self.tokens) else 0] = 0.0
        return forced


def test_a_text_comes_back_as_a_text():
    found = speculator()(PROMPT, max_new_tokens=12)
    tokenizer = speculator().tokenizer
    out = speculator().generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=12)
    assert isinstance(found, str) and isinstance(found, Text) and f"{found}" == str(found)
    whole = tokenizer.decode(out.sequences[0], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert PROMPT + found == whole and found.tokens == out.sequences[0].tolist()[-12:]
    assert found.finish_reason == "length" and found.stats.new_tokens == 12 and found.logprobs is None
    assert len(speculator()(PROMPT, max_new_tokens=3, output_logprobs=1).logprobs.chosen) == 3
    again = pickle.loads(pickle.dumps(found))
    assert again == found and again.tokens == found.tokens and copy.copy(found) == found


def test_lists_are_batches():
    one, two = speculator()(PROMPT, max_new_tokens=8), speculator()("import", max_new_tokens=8)
    assert speculator()([PROMPT, "import"], max_new_tokens=8) == [one, two]
    drawn = speculator()(PROMPT, max_new_tokens=8, do_sample=True, seed=1, num_return_sequences=3)
    assert len(drawn) == 3 and all(isinstance(each, Text) and len(each.tokens) == 8 for each in drawn)


def test_messages_go_through_the_chat_template():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    expected = speculator()("# system: Be brief.\n# user: hi\n# assistant: ", max_new_tokens=8)
    answering = speculator(TEMPLATE)
    assert answering(messages, max_new_tokens=8) == expected
    assert answering([messages, messages], max_new_tokens=8) == [expected] * 2
    assert "".join(answering.stream_text(messages, max_new_tokens=8)) == expected


@pytest.mark.parametrize("written", ["日本語のテキスト、中文字符", "👩‍👩‍👧 🎉é🇩🇰 ok", "naïve ζωή"])
def test_streamed_text_never_cuts_a_character(written):
    tokenizer = speculator().tokenizer
    tokens, prompt = tokenizer(written)["input_ids"], tokenizer("x = 日")["input_ids"]
    options = {"logits_processor": [Script(len(prompt), tokens)], "max_new_tokens": len(tokens)}
    assert "\N{REPLACEMENT CHARACTER}" in "".join(tokenizer.decode([token]) for token in tokens)  # token by token it would
    stream = speculator().stream_text("x = 日", **options)
    pieces = list(stream)
    assert "".join(pieces) == written and not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert len(pieces) > 3 and stream.stats.new_tokens == len(tokens)
    assert speculator()("x = 日", **options) == written
    cut = speculator()("x = 日", **{**options, "max_new_tokens": 1})
    assert len(cut.tokens) == 1  # a text that ends inside a character says so instead of hiding the token
    assert cut in (written[:1], "\N{REPLACEMENT CHARACTER}")


def test_a_stream_can_be_left():
    stream = speculator().stream_text(PROMPT, max_new_tokens=64)
    assert next(stream)
    stream.close()
    assert speculator()(PROMPT, max_new_tokens=2).stats.new_tokens == 2


def test_texts_end(monkeypatch):
    monkeypatch.setattr(text, "MAX_NEW_TOKENS", 5)
    assert speculator()(PROMPT, eos_token_id=None).stats.new_tokens == 5
    assert speculator()(PROMPT, max_length=12, eos_token_id=None).stats.new_tokens == 12 - len(speculator().tokenizer(PROMPT)["input_ids"])
    assert speculator()("x = ", stop_strings=["\n"], max_new_tokens=64).finish_reason in ("stop", "length")


def test_the_models_limit_counts_beside_a_configuration_of_the_call():
    call = {"generation_config": GenerationConfig(do_sample=True)}
    assert text.with_limit(GenerationConfig(max_new_tokens=7), call) == call
    assert text.with_limit(GenerationConfig(), call) == {"max_new_tokens": text.MAX_NEW_TOKENS, **call}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 2], "generate takes token ids"),
        ([], "no prompts"),
        ("", "no tokens"),
        ([{"role": "user", "content": "hi"}], "no chat template"),
        ([[{"role": "user"}]], "list of messages"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt, message):
    with pytest.raises(ConfigurationError, match=message):
        speculator()(prompt)


def test_a_batch_cannot_be_streamed_as_text_and_a_model_in_memory_needs_a_tokenizer():
    with pytest.raises(ConfigurationError, match="takes one prompt"):
        speculator().stream_text(["a", "b"])
    with pytest.raises(ConfigurationError, match="tokenizer=") as refused:
        Speculator(tiny(), "none")("x")
    assert "in memory" in str(refused.value)


def test_paths_and_model_objects_are_sources():
    path = zoo.path("python-1m")
    by_path = Speculator(path, "draft-model", drafter_options={"source": path}, dtype="float32", draft_length=2)
    expected = speculator()(PROMPT, max_new_tokens=8)
    assert by_path(PROMPT, max_new_tokens=8) == expected
    assert Speculator(zoo.load("python-1m", dtype="float32"), by_path.model, draft_length=2)(PROMPT, max_new_tokens=8) == expected
    with pytest.raises(ConfigurationError, match="no such path"):
        Speculator(path / "nothing", "none")
    with pytest.raises(ConfigurationError, match="no such path"):
        Speculator(path, "draft-model", drafter_options={"source": path / "nothing"})
    with pytest.raises(ConfigurationError, match="no such path"):
        foredraft.audit(path / "nothing")


def shown(value) -> str:
    assert "\n" not in repr(value) and len(repr(value)) < 250, repr(value)
    assert value._repr_html_().startswith("<") and "at 0x" not in repr(value)
    return repr(value)


def test_objects_show_themselves_in_one_line():
    small = speculator()
    out = small.generate(**small.tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=8, output_logits=True)
    assert shown(small) == "Speculator(model=zoo:python-1m, drafter=PromptLookup(), rule=match, shape=auto)"
    assert shown(out).startswith("SpeculativeOutput(sequences=[1, ") and "plain" in shown(out)
    assert shown(out.stats).startswith("Stats(new_tokens=8, target_passes=") and out.stats.summary() in shown(out.stats)
    assert shown(out.stats.rows[0]).endswith("finish_reason=length)")
    for name in rules.names():
        assert shown(rules.create(name)) == f"{type(rules.create(name)).__name__}(lossless={name not in ('lenient', 'typical')})"
    for name in ("prompt-lookup", "draft-model", "several", "medusa", "suffix"):
        shown(make_drafter(name))
    assert shown(Oracle([])) == "Oracle()"
    tagged = Text("<b>")
    tagged.stats = out.stats
    assert tagged._repr_html_().startswith("<pre>&lt;b&gt;</pre>")


def test_the_long_form_on_request():
    small = speculator()
    stats = small(PROMPT, max_new_tokens=4).stats
    assert "seconds: {" in stats.details() and "drafted_by_depth" in stats.details() and "drafted_by_depth" not in repr(stats)
    assert "dtype: torch.float32" in small.details() and "execution: " in small.details()
    assert "proposals" in small.drafter.details() and "proposals" in small.rule.details()


def test_a_stream_of_text_is_one_text():
    with pytest.raises(ConfigurationError, match="stream_text writes one text"):
        speculator().stream_text(PROMPT, do_sample=True, num_return_sequences=2, max_new_tokens=4)
    assert "".join(speculator().stream_text(PROMPT, max_new_tokens=4))
