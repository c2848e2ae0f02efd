"""From requests to rows: what the session is asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from served import TINY, tiny_chat
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig

from foredraft import ConfigurationError, RowParameters
from foredraft.guesses import ForcedTokens, Prediction
from foredraft.loading import load_tokenizer
from foredraft.rows import Commit
from foredraft.serving import Settings
from foredraft.serving.chat import Chat
from foredraft.serving.failures import ApiError
from foredraft.serving.requests import Plan, Requests
from foredraft.serving.schema import ChatRequest, CompletionRequest, Function, Message, TokenizeRequest, Tool
from foredraft.serving.writers import Prompt, TokenNames, Writer

MESSAGES = [{"role": "user", "content": "hello"}]


def plan(isolation: str | None = None, *, settings: Settings | None = None, guess: bool = True, **body: Any) -> Plan:
    requests = Requests(tiny_chat(), settings or Settings(model="tiny"), guess=guess)
    kind = ChatRequest if "messages" in body else CompletionRequest
    return asyncio.run(requests.plan(kind.model_validate(body), isolation))


def row(**body: Any) -> RowParameters:
    return plan(**{"prompt": "hello"} | body).choices[0].parameters


def test_the_tokenizer_is_changed_by_no_request():
    """Two threads may tokenise at once, and transformers takes back what the tokenizer's file says of truncation at the first text."""
    speculator = tiny_chat()
    backend = speculator.tokenizer.backend_tokenizer
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    Requests(speculator, Settings(model="tiny"), guess=True)
    assert backend.truncation is None and backend.padding is None


def test_rows_keep_to_their_key():
    assert [choice.parameters.isolation for choice in plan("key-1", prompt="a", n=2).choices] == ["key-1", "key-1"]
    assert row().isolation is None


def test_every_choice_has_a_seed_of_its_own():
    made = plan(prompt=["a", "a"], n=2, seed=9)
    assert [choice.parameters.seed for choice in made.choices] == [(9, 0), (9, 1), (9, 2), (9, 3)] and made.seed == 9


def test_processors_are_in_the_order_of_transformers():
    asked = {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 3}
    names = [type(stage.processor).__name__ for stage in row(**asked).pipeline.stages]
    config = GenerationConfig(do_sample=True, min_new_tokens=3, eos_token_id=302, **{k: v for k, v in asked.items() if k != "min_tokens"})
    config._eos_token_tensor = torch.tensor([302])
    expected = tiny_chat().model._get_logits_processor(config, input_ids_seq_length=1, device="cpu")
    assert names == [type(each).__name__ for each in expected]


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_each_penalty_acts_by_itself(penalty):
    assert [type(stage.processor).__name__ for stage in row(**{penalty: 0.5}, temperature=0).pipeline.stages] == [
        "PresenceFrequencyPenalty"
    ]


def test_greedy_rows_have_no_warpers():
    assert row(temperature=0, top_p=0.5).pipeline.empty and not row(temperature=0).do_sample and row().do_sample


def test_limits():
    assert row().max_new_tokens == 16
    assert plan(messages=MESSAGES).choices[0].parameters.max_new_tokens > 1900
    assert row(max_tokens=10**6).max_new_tokens == 2047
    assert plan(messages=MESSAGES, settings=Settings(model="tiny", max_batch_tokens=100)).choices[0].parameters.max_new_tokens < 100


def test_drafts_and_guesses():
    assert (row().max_draft, row(speculation="off").max_draft, row(speculation={"max_draft": 3}).max_draft) == (None, 0, 3)
    assert isinstance(row(prediction={"content": "hello"}).guesses[0], Prediction)
    assert isinstance(row(structured_outputs={"regex": "abc"}).guesses[0], ForcedTokens)
    assert row(structured_outputs={"regex": "abc"}, guess=False).guesses == []
    with pytest.raises(ApiError, match="rule match"):
        row(prediction={"content": "hello"}, guess=False)
    assert row(echo=True, logprobs=2).prompt_logprobs == 2 and row(logprobs=2).prompt_logprobs is None


def test_predictions_are_bounded_and_read_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("foredraft.serving.requests.MOST_PREDICTED", 5)
    made = plan(prompt=["a", "b"], n=2, prediction={"content": "hello " * 1000})
    (guess,) = {choice.parameters.guesses[0] for choice in made.choices}
    assert isinstance(guess, Prediction) and len(guess.tokens) == 5 and "ends" in vars(guess)


def test_without_a_chat_template_chat_says_so():
    requests = Requests(tiny_chat(), Settings(model="tiny"), guess=True)
    requests.chat.template = None
    with pytest.raises(ApiError, match="--chat-template"):
        asyncio.run(requests.plan(ChatRequest.model_validate({"messages": MESSAGES}), None))


def test_an_operators_template_takes_the_place_of_the_tokenizers():
    settings = Settings(model="tiny", chat_template="{{ messages[0].content }}!")
    assert tiny_chat().tokenizer.decode(plan(messages=MESSAGES, settings=settings).prompts[0]) == "hello!"


def test_a_template_that_is_no_jinja_is_refused_at_the_start():
    with pytest.raises(ConfigurationError, match="cannot be read, line 1"):
        Requests(tiny_chat(), Settings(model="tiny", chat_template="{% if %}"), guess=True)
    choosy = Chat(load_tokenizer(TINY), "{{ raise_exception('system messages only') }}")
    with pytest.raises(ApiError, match="system messages only"):
        choosy.text([Message(role="user", content="hello")])


def test_conversations_are_tokenized_with_special_tokens_where_that_is_asked_for():
    """Beside those of the template, as in vLLM."""
    tokenizer, requests = load_tokenizer(TINY), Requests(tiny_chat(), Settings(model="tiny"), guess=True)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|im_end|> $A", special_tokens=[("<|im_end|>", 302)])
    requests.tokenizer = tokenizer
    asked = [TokenizeRequest.model_validate({"messages": MESSAGES, **more}) for more in ({}, {"add_special_tokens": True})]
    plain, special = map(requests.tokenize, asked)
    assert special == [302, *plain]


def test_of_several_chat_templates_the_tokenizer_takes_the_one_that_fits():
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = {"default": "{{ messages[0].content }}!", "tool_use": "{{ tools[0].function.name }}?"}
    chat, messages = Chat(tokenizer, None), [Message(role="user", content="hello")]
    tools = [Tool(type="function", function=Function(name="clock"))]
    assert [chat.text(messages, each) for each in ([], tools)] == ["hello!", "clock?"]


def test_the_token_that_ends_a_text_counts_but_is_not_shown():
    tokenizer = tiny_chat().tokenizer
    writer = Writer(Prompt(tokenizer, [3]), (), logprobs=False)
    end = tokenizer.convert_tokens_to_ids("A")  # as for a model that ends texts with an ordinary token
    piece = writer.add(Commit(0, [*tokenizer("hello")["input_ids"], end], 0, "eos"))
    assert (piece.text, piece.finish_reason, len(writer.tokens)) == ("hello", "stop", 2)


def test_tokens_behind_a_stop_string_do_not_count():
    """However many of them the same round has kept."""
    tokenizer = tiny_chat().tokenizer
    writer = Writer(Prompt(tokenizer, [3]), ("yz",), logprobs=False)
    piece = writer.add(Commit(0, [tokenizer.convert_tokens_to_ids(letter) for letter in "xyzxx"], 0, None))
    assert (piece.text, piece.finish_reason, len(writer.tokens)) == ("x", "stop", 3)


def test_predicted_tokens_behind_a_stop_string_were_not_accepted():
    """No more of them than the text has tokens."""
    tokenizer = tiny_chat().tokenizer
    writer = Writer(Prompt(tokenizer, [3]), ("yz",), logprobs=False)
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in "xyzxxx"]
    writer.add(Commit(0, ids, 5, None, drafted_by_depth=[1] * 5, guesses_drafted=5, guessed=5, drafter="prediction"))
    assert (writer.counts.guesses_drafted, writer.counts.guessed, len(writer.tokens)) == (5, 3, 3)


@pytest.mark.parametrize(
    ("stops", "text", "tokens"),
    [(("xy",), "xy", 4), (("yx",), "xyx", 5), (("xyx", "xyxz"), "xy", 5), (("xyxyx", "xy"), "xy", 4), (("xyxyxyz",), "", 7)],
)
def test_stop_strings_count_that_are_complete_behind_the_least_tokens(stops, text, tokens):
    """As vLLM has it, also where they begin before; with one token, or all of them, in a round."""
    tokenizer = tiny_chat().tokenizer
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in "xyxyxyz"]
    for size in (1, 7):
        writer = Writer(Prompt(tokenizer, [3]), stops, logprobs=False, min_tokens=3)
        shown = "".join(writer.add(Commit(0, ids[at : at + size], 0, None)).text for at in range(0, 7, size) if not writer.over)
        assert (shown, writer.finish_reason, len(writer.tokens)) == (text, "stop", tokens)


def test_halves_of_characters_are_held_back_until_they_are_whole():
    tokenizer = tiny_chat().tokenizer
    ids, writer = tokenizer("é€")["input_ids"], Writer(Prompt(tokenizer, [3]), ("x",), logprobs=False)
    shown = [writer.add(Commit(0, [token], 0, "length" if index == len(ids) - 1 else None)).text for index, token in enumerate(ids)]
    assert shown == ["", "é", "", "", "€"]


def test_names_of_tokens():
    names = TokenNames(tiny_chat().tokenizer)
    first, *_ = tiny_chat().tokenizer("€")["input_ids"]
    assert names.text(first) == "bytes:\\xe2" and names.bytes(first) == b"\xe2"
    assert names.text(302) == "<|im_end|>"
