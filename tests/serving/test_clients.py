"""OpenAI's own client, as people use it: sync, async, streams, tools, parsed output."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel
from served import served, tiny_chat

MESSAGES = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(url: str):
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as found:
        yield found


def test_completions(client: openai.OpenAI):
    whole = client.completions.create(model="tiny", prompt="hello", max_tokens=10, seed=1, logprobs=2)
    parts = list(client.completions.create(model="tiny", prompt="hello", max_tokens=10, seed=1, stream=True))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert whole.choices[0].finish_reason == parts[-1].choices[0].finish_reason
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.tokens)


def test_chat_whole_and_streamed(client: openai.OpenAI):
    arguments = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 10, "seed": 1, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**arguments)
    parts = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content and whole.choices[0].message.role == "assistant"
    assert parts[-1].usage == whole.usage
    tokens = [entry for part in parts if part.choices and part.choices[0].logprobs for entry in part.choices[0].logprobs.content]
    assert tokens == whole.choices[0].logprobs.content and all(len(entry.top_logprobs) == 2 for entry in tokens)


def test_async_and_two_at_once(url: str):
    async def both() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:

            async def one(seed: int) -> str:
                stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10, seed=seed, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(one(1), one(2), one(1))

    first, second, third = asyncio.run(both())
    assert first == third != second


class Answer(BaseModel):
    """What the client parses."""

    city: Literal["Paris", "Rome"]
    sunny: bool


def test_parsed_output(client: openai.OpenAI):
    done = client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Answer, max_tokens=100)
    assert isinstance(done.choices[0].message.parsed, Answer)


def test_streamed_parsed_output(client: openai.OpenAI):
    schema = {"type": "json_schema", "json_schema": {"name": "w", "strict": True, "schema": WEATHER["function"]["parameters"]}}
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, response_format=schema, max_tokens=100) as stream:
        done = stream.get_final_completion()
    assert json.loads(done.choices[0].message.content)["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=["required", "named"])
def test_forced_tools(client: openai.OpenAI, choice: object, stream: bool):
    arguments = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 150, "seed": 4}
    if stream:
        with client.chat.completions.stream(**arguments, parallel_tool_calls=False) as found:
            done = found.get_final_completion()
    else:
        done = client.chat.completions.create(**arguments, parallel_tool_calls=False)
    (call,) = done.choices[0].message.tool_calls
    assert call.function.name == "weather" and call.id and call.type == "function"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    assert done.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert not done.choices[0].message.content


@pytest.mark.parametrize("speculation", ["auto", "off"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_streams_tell_that_a_call_is_complete(client: openai.OpenAI, choice: object, speculation: str):
    """Whatever was drafted, and so however many chunks it came in."""
    arguments = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 150, "seed": 4}
    with client.chat.completions.stream(**arguments, parallel_tool_calls=False, extra_body={"speculation": speculation}) as events:
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert len(done) == 1 and done[0].name == "weather" and json.loads(done[0].arguments)["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("written", "content", "calls"),
    [
        (CALL, None, ["weather"]),
        ("I look. " + CALL, "I look. ", ["weather"]),
        (CALL + "\n" + CALL, None, ["weather", "weather"]),
        ("a <tool_call>no JSON</tool_call> b", "a <tool_call>no JSON</tool_call> b", []),
        ('<tool_call>{"name": "unknown"}</tool_call>', '<tool_call>{"name": "unknown"}</tool_call>', []),
        ('<tool_call>{"name": "clock"}</tool_call>', None, ["clock"]),
        ("a <tool_ca", "a <tool_ca", []),
    ],
)
def test_free_tools(client: openai.OpenAI, written: str, content: str | None, calls: list[str], stream: bool):
    """The model has random weights, so a grammar has it write what a trained one would."""
    arguments = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER, CLOCK], "max_tokens": 300, "tool_choice": "auto"}
    extra = {"structured_outputs": {"choice": [written]}}
    if stream:
        with client.chat.completions.stream(**arguments, extra_body=extra) as found:
            done = found.get_final_completion()
    else:
        done = client.chat.completions.create(**arguments, extra_body=extra)
    message = done.choices[0].message
    assert [call.function.name for call in message.tool_calls or []] == calls
    assert (message.content or None) == content
    assert done.choices[0].finish_reason == ("tool_calls" if calls else "stop")
    if "weather" in calls:
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Paris", "days": 3}


def test_tool_results_go_back(client: openai.OpenAI):
    """With what clients keep of an answer: the place of a streamed call, annotations that are none or some."""
    call = {"id": "call_1", "index": 0, "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    for notes in ([], [{"type": "url_citation"}]):
        answer = {"role": "assistant", "content": None, "refusal": None, "annotations": notes, "tool_calls": [call]}
        history = [*MESSAGES, answer, {"role": "tool", "tool_call_id": "call_1", "content": "noon"}]
        assert client.chat.completions.create(model="tiny", messages=history, tools=[CLOCK], max_tokens=4).choices


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_client_has_parsed_goes_back(client: openai.OpenAI, stream: bool):
    def message(**how):
        if not stream:
            return client.chat.completions.parse(model="tiny", messages=MESSAGES, max_tokens=150, seed=4, **how).choices[0].message
        with client.chat.completions.stream(model="tiny", messages=MESSAGES, max_tokens=150, seed=4, **how) as events:
            return events.get_final_completion().choices[0].message

    called = message(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "12 degrees"}
    written = message(response_format=Answer)
    history = [*MESSAGES, called, result, written, *MESSAGES]
    assert called.tool_calls[0].function.parsed_arguments and written.parsed
    assert client.chat.completions.create(model="tiny", messages=history, tools=[WEATHER], max_tokens=4).choices


def test_a_call_that_was_cut_goes_back(client: openai.OpenAI):
    arguments = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required", "seed": 4}
    done = client.chat.completions.create(**arguments, max_tokens=40).choices[0]
    (call,) = done.message.tool_calls
    assert done.finish_reason == "length"
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(call.function.arguments)
    history = [*MESSAGES, done.message, {"role": "tool", "tool_call_id": call.id, "content": "?"}]
    assert client.chat.completions.create(model="tiny", messages=history, tools=[WEATHER], max_tokens=4).choices


def test_a_format_is_that_of_answers_in_words(client: openai.OpenAI):
    """A call that is required has the schema of its tool."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    arguments = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER], "max_tokens": 150, "seed": 4, "response_format": form}
    called = client.chat.completions.create(**arguments, tool_choice="required", parallel_tool_calls=False).choices[0].message
    assert called.tool_calls[0].function.name == "weather" and not called.content
    assert json.loads(client.chat.completions.create(**arguments, tool_choice="none").choices[0].message.content) is not None


def test_errors_are_openais_own(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.responses.create(model="tiny", input="a")
    assert client.models.list().data[0].id == "tiny"


def test_keys():
    with served(tiny_chat(), keys={"a": "one", "b": "two"}) as url:
        for key in ("one", "two"):
            assert openai.OpenAI(base_url=url + "/v1", api_key=key).models.list().data
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url + "/v1", api_key="three", max_retries=0).models.list()
