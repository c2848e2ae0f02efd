"""Calls of tools, read from text: the same however the text comes, and for whatever a model writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import TINY, events, served, tiny_chat

from foredraft import Speculator
from foredraft.grammars import Grammar
from foredraft.loading import load_model, load_tokenizer
from foredraft.rows import Commit
from foredraft.serving.jobs import Choice
from foredraft.serving.requests import Plan, RowParameters
from foredraft.serving.responses import ChatAnswer, Facts, gather
from foredraft.serving.schema import ChatRequest
from foredraft.serving.tools import BEGIN, END, ListReader, Reader, TaggedReader, TemplateReader, calls_schema
from foredraft.serving.writers import TokenNames

CALL = BEGIN + '{"name": "f", "arguments": {"a": 1}}' + END


def message(reader: Reader, pieces: list[str]) -> tuple[Any, list[Any]]:
    """The content and the calls that the pieces come to."""
    found: dict[str, Any] = {"content": None}
    for delta in [*(delta for piece in pieces for delta in reader.feed(piece)), *reader.flush([])]:
        gather(found, delta)
    return found["content"], [(call["function"]["name"], call["function"]["arguments"]) for call in found.get("tool_calls", ())]


@given(st.lists(st.sampled_from([CALL, " ", "\n", "a", "</", BEGIN + "b" + END]), max_size=7), st.data())
def test_a_message_does_not_depend_on_how_its_text_is_cut(parts: list[str], data: st.DataObject):
    text = "".join(parts)
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6))), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(cuts)]
    whole = message(TaggedReader(["f"], parallel=True), [text])
    assert message(TaggedReader(["f"], parallel=True), pieces) == whole == message(TaggedReader(["f"], parallel=True), list(text))


def test_whitespace_around_calls_is_no_text():
    def content(text: str) -> Any:
        return message(TaggedReader(["f"], parallel=True), list(text))[0]

    assert content(CALL + "\n" + CALL + " \n") is None
    assert content(CALL + "\n a b ") == "\n a b "
    assert content("a " + CALL) == "a "


DEEP = 100_000  # lists in each other, which no Python reads; from 3.12 on the C stack decides, and 5,000 are read


@pytest.mark.parametrize(
    "inside",
    [
        '{"name": "f", "arguments": ' + "[" * DEEP + "]" * DEEP + "}",
        '{"name": "f", "arguments": {"a": 1e999}}',
        '{"name": ["f"]}',
        '["f"]',
        '{"name": "g"}',
        "{",
    ],
    ids=["deep", "infinite", "list", "no object", "unknown", "no JSON"],
)
def test_what_is_no_call_stays_text(inside: str):
    assert message(TaggedReader(["f"], parallel=True), [BEGIN + inside + END]) == (BEGIN + inside + END, [])


def test_half_surrogates_stay_spelt():
    """JSON can spell them, UTF-8 cannot say them."""
    spelt = '{"a": "\\ud800é"}'
    written = [json.dumps("\ud800"), spelt]
    for given_arguments in written:
        text = '{"name": "f", "arguments": ' + given_arguments + "}"
        for reader, whole in ((TaggedReader(["f"], parallel=True), BEGIN + text + END), (ListReader(), f"[{text}]")):
            _, ((_, arguments),) = message(reader, [whole])
            assert arguments.encode() and arguments == ("\\ud800" if given_arguments == written[0] else spelt)


@pytest.mark.parametrize("value", ["[" * DEEP + "]" * DEEP, "9" * 5000, "1e999"], ids=["deep", "long", "infinite"])
def test_forced_calls_that_python_cannot_read_are_shown_as_text(value: str):
    text = '{"name": "f", "arguments": {"a": ' + value + "}}"
    assert message(ListReader(), [f"[{text}]"]) == (text, [])


def tool(name: str, item: str) -> dict[str, Any]:
    """Its arguments have an item, and may have arguments like themselves in them."""
    schema = {
        "type": "object",
        "properties": {"item": {"$ref": "#/$defs/Item"}, "inner": {"$ref": "#"}},
        "required": ["item"],
        "additionalProperties": False,
        "$defs": {"Item": {"enum": [item]}},
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ({"item": "a"}, True),
        ({"item": "b"}, False),
        ({"item": "a", "inner": {"item": "a"}}, True),
        ({"item": "a", "inner": {"item": "b"}}, False),
        ({"item": "a", "inner": []}, False),
    ],
)
def test_references_of_a_tool_mean_its_own_schema(arguments: dict[str, Any], allowed: bool):
    """Another tool may have a definition of the same name."""
    asked = {"messages": [{"role": "user", "content": "a"}], "tools": [tool("f", "a"), tool("g", "b")], "tool_choice": "required"}
    tokenizer = tiny_chat().tokenizer
    schema = calls_schema(ChatRequest.model_validate(asked))
    compiled = Grammar(tokenizer, json_schema=schema, backend="llguidance").compiled
    matcher = compiled.start()
    text = json.dumps([{"name": "f", "arguments": arguments}])
    assert all(compiled.accept(matcher, token) for token in tokenizer(text)["input_ids"]) == allowed


def test_definitions_that_are_none_are_the_clients_mistake(url: str):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"$defs": [1], "$ref": "#/$defs/a"}}}]
    asked = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": "required"}
    assert httpx.post(url + "/v1/chat/completions", json=asked, timeout=60).status_code == 400


class Template:
    """What a tokenizer with a response template would make of text or tokens."""

    def __init__(self, tokenizer: Any, *, fails: bool):
        self.tokenizer, self.fails = tokenizer, fails

    def parse_response(self, response: Any, **options: Any) -> dict[str, Any]:
        if self.fails:
            raise ValueError("no")
        return {"content": response if isinstance(response, str) else self.tokenizer.decode(response)}


@pytest.mark.parametrize("fails", [False, True])
def test_a_stop_string_cuts_what_a_response_template_reads(fails: bool):
    """The tokens go on to the end of the stop string; the text that was shown does not."""
    tokenizer = tiny_chat().tokenizer
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "tools": tools, "stop": "yz"})
    plan = Plan([[3]], [Choice([3], RowParameters(9))], 0)
    answer = ChatAnswer(asked, plan, Facts("id", 0, "tiny", "fp", metrics=False, depth=1), tokenizer, TokenNames(tokenizer))
    answer.readers = [TemplateReader(Template(tokenizer, fails=fails), [3], tools)]
    answer.take(0, Commit(0, [tokenizer.convert_tokens_to_ids(letter) for letter in "wxyz"], 0, None))
    assert answer.whole()["choices"][0]["message"]["content"] == "wx"


def test_calls_that_a_response_template_reads_in_part_are_none():
    class Half:
        def parse_response(self, response: Any, **options: Any) -> dict[str, Any]:
            return {"tool_calls": [{"function": {"name": "f", "arguments": {}}}, {}]}

    reader = TemplateReader(Half(), [3], [])
    assert message(reader, ["text"]) == ("text", []) and reader.calls == 0


RESPONSE = {  # as models write that have a template of their own; the end of the text is a token of it
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {"close": "<|im_end|>"},
        "tool_calls": {
            "open": "[CALL]",
            "close": "[/CALL]",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}},
        },
    },
}
CLOCK = '[CALL]{"name": "clock", "arguments": {"zone": "Zürich"}}[/CALL]'


@pytest.fixture(scope="module")
def templated() -> Iterator[str]:
    """A server of a model whose tokenizer has a response template."""
    tokenizer = load_tokenizer(TINY)
    tokenizer.response_template = RESPONSE
    with served(Speculator(load_model(TINY), "none", tokenizer=tokenizer, execution="eager")) as url:
        yield url


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("written", "content", "calls"),
    [
        (CLOCK, None, 1),
        ("I look. " + CLOCK, "I look.", 1),
        (CLOCK + CLOCK, None, 2),
        ("no call", "no call", 0),
        ("[CALL]no JSON[/CALL]", "[CALL]no JSON[/CALL]", 0),
        ('<tool_call>{"name": "clock"}</tool_call>', '<tool_call>{"name": "clock"}</tool_call>', 0),
    ],
)
def test_free_calls_are_read_by_the_response_template(templated: str, written: str, content: str | None, calls: int, stream: bool):
    asked = {
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [{"type": "function", "function": {"name": "clock"}}],
        "tool_choice": "auto",
        "structured_outputs": {"choice": [written]},  # the model has random weights
        "max_tokens": 300,
    }
    response = httpx.post(templated + "/v1/chat/completions", json=asked | {"stream": stream}, timeout=60)
    found: dict[str, Any] = {"content": None}
    if stream:
        choices = [choice for each in events(response) for choice in each["choices"]]
        for choice in choices:
            gather(found, choice["delta"])
    else:
        choices = response.json()["choices"]
        found = choices[0]["message"]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls" if calls else "stop"]
    assert (found["content"] or None) == content
    called = [(each["type"], each["function"]["name"], json.loads(each["function"]["arguments"])) for each in found.get("tool_calls") or ()]
    assert called == [("function", "clock", {"zone": "Zürich"})] * calls
    assert len({each["id"] for each in found.get("tool_calls") or ()}) == calls
