"""Calls of tools, read from text: the same however the text comes, and for whatever a model writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from shutil import copytree
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import TINY, events, served, tiny_chat

from foredraft import Speculator
from foredraft.detokenizer import Detokenizer
from foredraft.grammars import Grammar
from foredraft.loading import load_model, load_tokenizer
from foredraft.rows import Commit
from foredraft.serving.formats import wanted
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
    answer.readers = [TemplateReader(Template(tokenizer, fails=fails), [3], tools, parallel=True)]
    answer.take(0, Commit(0, [tokenizer.convert_tokens_to_ids(letter) for letter in "wxyz"], 0, None))
    assert answer.whole()["choices"][0]["message"]["content"] == "wx"


def test_calls_that_a_response_template_reads_in_part_are_none():
    class Half:
        def parse_response(self, response: Any, **options: Any) -> dict[str, Any]:
            return {"tool_calls": [{"function": {"name": "f", "arguments": {}}}, {}]}

    reader = TemplateReader(Half(), [3], [], parallel=True)
    assert message(reader, ["text"]) == ("text", []) and reader.calls == 0


RESPONSE = {  # as models write that have a template of their own; the end of the text is a token of it
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {"close": "<|im_end|>"},
        "thinking": {"open": "[THINK]", "close": "[/THINK]"},
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


def chat(url: str, *, stream: bool, **fields: Any) -> tuple[dict[str, Any], str]:
    """The message and its finish reason. The model has random weights, so a grammar has it write what a trained one would."""
    asked = {"messages": [{"role": "user", "content": "hello"}], "tools": [named("clock"), named("f")], "max_tokens": 300, **fields}
    response = httpx.post(url + "/v1/chat/completions", json=asked | {"stream": stream}, timeout=60)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = {"content": None}
    if stream:
        choices = [choice for each in events(response) for choice in each["choices"]]
        for choice in choices:
            gather(found, choice["delta"])
    else:
        choices = response.json()["choices"]
        found = choices[0]["message"]
    (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return found, reason


def named(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def called(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in message.get("tool_calls") or ()]


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
    found, reason = chat(templated, stream=stream, structured_outputs={"choice": [written]})
    assert reason == ("tool_calls" if calls else "stop")
    assert (found["content"] or None) == content
    assert called(found) == [("clock", {"zone": "Zürich"})] * calls
    assert len({each["id"] for each in found.get("tool_calls") or ()}) == calls


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_response_template_calls_reasoning_is_returned(templated: str, stream: bool):
    found, _ = chat(templated, stream=stream, structured_outputs={"choice": ["[THINK]so[/THINK]yes"]})
    assert found["reasoning_content"] == "so" and found["content"] == "yes"
    history = [{"role": "user", "content": "a"}, {"role": "assistant", **found}]  # as clients send it back
    assert chat(templated, stream=stream, messages=history, max_tokens=1)


def test_calls_that_a_response_template_reads_are_one_where_they_may_not_be_parallel(templated: str):
    found, reason = chat(templated, stream=False, structured_outputs={"choice": [CLOCK + CLOCK]}, parallel_tool_calls=False)
    assert called(found) == [("clock", {"zone": "Zürich"})] and reason == "tool_calls"


# -- tags that are tokens ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a model whose tags are special tokens, in the places of two others."""
    folder = tmp_path_factory.mktemp("tagged") / "model"
    copytree(TINY, folder)
    for path in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        text = path.read_text(encoding="utf-8")
        for old, new in (("<|pad|>", BEGIN), ("<|im_start|>", END)):
            assert old in text
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    assert {BEGIN, END} <= set(tokenizer.all_special_tokens)
    with served(Speculator(load_model(TINY), "none", tokenizer=tokenizer, execution="eager")) as url:
        yield url


@pytest.mark.parametrize("stream", [False, True])
def test_calls_in_tags_that_are_special_tokens_are_read(tagged: str, stream: bool):
    """Of other special tokens, the end among them, nothing is shown; nor of the tags where no tools are."""
    grammar = f'start: "I look. " {BEGIN} %json {{"const": {{"name": "f", "arguments": {{"a": 1}}}}}} {END} "\\n"'
    found, reason = chat(tagged, stream=stream, structured_outputs={"grammar": grammar})
    assert called(found) == [("f", {"a": 1})] and found["content"] == "I look. " and reason == "tool_calls"
    found, reason = chat(tagged, stream=stream, structured_outputs={"grammar": f'start: "a" {BEGIN} "b"'})
    assert found["content"] == f"a{BEGIN}b" and reason == "stop"
    found, _ = chat(tagged, stream=stream, structured_outputs={"grammar": f'start: "a" {BEGIN} "b"'}, tools=[])
    assert found["content"] == "ab"


def test_a_detokenizer_keeps_the_special_tokens_that_it_is_told_to():
    tokenizer = tiny_chat().tokenizer
    ids = tokenizer("é<|im_start|>b<|pad|>c<|im_end|>")["input_ids"]
    for keep, text in (((), "ébc"), (["<|im_start|>"], "é<|im_start|>bc"), (["none"], "ébc")):
        reader = Detokenizer(tokenizer, ids, keep)
        assert reader.feed(ids) + reader.flush() == text


# -- strict tools -----------------------------------------------------------------------------------------------------------

STRICT = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


def allowed(text: str, tokenizer: Any, **fields: Any) -> bool:
    """By the grammar of a strict tool ``f`` and another, ``g``."""
    tools = [named("f", strict=True, parameters=STRICT, description="f ::= a"), named("g", parameters=STRICT)]
    asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "tools": tools, **fields})
    kind, source = wanted(asked, tokenizer, frozenset([tokenizer.eos_token_id])) or ("", {})
    compiled = Grammar(tokenizer, backend="llguidance", **source).compiled
    matcher, ids = compiled.start(), tokenizer(text)["input_ids"]
    assert kind == "tools" and tokenizer.decode(ids) == text
    return all(compiled.accept(matcher, token) for token in ids) and matcher.is_accepting()


def written(arguments: str, name: str = "f", *, turned: bool = False) -> str:
    members = [f'"name": "{name}"', f'"arguments": {arguments}']
    return BEGIN + "\n{" + ", ".join(reversed(members) if turned else members) + "}\n" + END


@pytest.mark.parametrize(
    ("text", "may"),
    [
        ("", True),
        ("é <tool_ca </tool_call> {", True),
        ("<|im_start|> a <|pad|>\n", True),  # other special tokens, which may begin the reasoning
        ("I look. " + written('{"a": 1}') + " and " + written('{"a": 2}', turned=True) + "<|pad|> done", True),
        (written('{"a": 3}'), False),
        (written('{"a": 1, "b": 1}'), False),
        (written('{"a": 3}', "g") + "\n", True),  # it is not strict
        (written("{}", "h"), False),
        (BEGIN + "no call" + END, False),
        (written('{"a": 1}')[:-3], False),
    ],
)
def test_calls_of_strict_tools_match_their_schemas_where_they_are_free(text: str, may: bool):
    assert allowed(text, tiny_chat().tokenizer) == may


def test_strict_calls_are_one_where_they_may_not_be_parallel():
    """Behind it a tag is text, as it is for what reads the calls."""
    text = written('{"a": 1}') + BEGIN + "{"
    assert allowed(text, tiny_chat().tokenizer, parallel_tool_calls=False) and not allowed(text, tiny_chat().tokenizer)


@pytest.mark.parametrize("stream", [False, True])
def test_strict_tools_are_called_as_their_schema_says(tagged: str, url: str, stream: bool):
    """By a model that writes anything, with tags that are tokens, which it likes best, and with tags that are text."""
    tools = [named("f", strict=True, parameters=STRICT)]
    begin = {str(httpx.post(tagged + "/tokenize", json={"prompt": BEGIN}, timeout=60).json()["tokens"][0]): 100}
    found, reason = chat(tagged, stream=stream, tools=tools, logit_bias=begin, seed=1, parallel_tool_calls=False)
    assert found["tool_calls"] and all(name == "f" and arguments["a"] in (1, 2) for name, arguments in called(found))
    assert reason in ("tool_calls", "length")
    assert chat(url, stream=stream, tools=tools, max_tokens=9)[1] in ("stop", "length")


@pytest.mark.parametrize("field", [{"min_tokens": 3}, {"ignore_eos": True}])
def test_strict_tools_do_not_go_with_what_says_where_the_text_ends(url: str, field: dict[str, Any]):
    asked = {"messages": [{"role": "user", "content": "a"}], "tools": [named("f", strict=True)], **field}
    refused = httpx.post(url + "/v1/chat/completions", json=asked, timeout=60)
    assert refused.status_code == 400 and "cannot be combined with tools" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_free_calls_or_an_answer_in_a_format(tagged: str, url: str, stream: bool):
    """With tags that are tokens, and with tags that are text; a bias has the model begin with one, or with the answer."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer", "minimum": 1, "maximum": 5}}}
    for server, first in ((tagged, BEGIN), (url, "<")):
        token = httpx.post(server + "/tokenize", json={"prompt": first}, timeout=60).json()["tokens"][0]
        for strict, bias in ((True, 100), (False, 100), (True, -100)):
            tools = [named("f", strict=strict, parameters=STRICT)]
            how = {"tools": tools, "response_format": form, "parallel_tool_calls": False, "logit_bias": {str(token): bias}}
            found, reason = chat(server, stream=stream, seed=1, **how)
            if bias < 0:
                assert "tool_calls" not in found and json.loads(found["content"]) in range(1, 6) and reason == "stop"
            elif reason != "length":
                ((name, arguments),) = called(found)
                assert name == "f" and reason == "tool_calls" and not found.get("content")
                assert not strict or arguments["a"] in (1, 2)
        how |= {"tool_choice": "none", "logit_bias": {}}
        assert json.loads(chat(server, stream=stream, seed=1, **how)[0]["content"]) in range(1, 6)


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "bad"}}])
def test_the_tool_whose_schema_cannot_be_used_is_named(url: str, choice: Any):
    tools = [named(name, strict=True, parameters=schema) for name, schema in (("good", STRICT), ("bad", {"not": STRICT}))]
    asked = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": choice}
    error = httpx.post(url + "/v1/chat/completions", json=asked, timeout=60).json()["error"]
    assert error["param"] == "tools.1.function.parameters" and "start:" not in error["message"]


def test_with_the_choice_none_tools_are_not_there(url: str):
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 20, "seed": 3, "temperature": 1}
    plain, none, auto = (
        httpx.post(url + "/v1/chat/completions", json=asked | more, timeout=60).json()
        for more in ({}, {"tools": [named("f")], "tool_choice": "none"}, {"tools": [named("f")]})
    )
    assert none["choices"] == plain["choices"] and none["usage"] == plain["usage"]
    assert auto["usage"]["prompt_tokens"] > none["usage"]["prompt_tokens"]


# -- calls that have to be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_max_tokens_cuts_is_shown_as_far_as_it_was_written(url: str, stream: bool):
    tools = [named("f", parameters={"type": "object", "properties": {"a": {"const": "x" * 99}}, "required": ["a"]})]
    found, reason = chat(url, stream=stream, tools=tools, tool_choice="required", max_tokens=90)
    ((name, arguments),) = [(each["function"]["name"], each["function"]["arguments"]) for each in found["tool_calls"]]
    assert (name, reason) == ("f", "length") and re.fullmatch(r'\{"a": "x{20,98}', arguments)
    found, reason = chat(url, stream=stream, tools=tools, tool_choice="required", stop="xxxx")
    assert found["tool_calls"][0]["function"]["arguments"] == '{"a": "' and reason == "stop"  # for nobody can make this call


@pytest.mark.parametrize(
    ("text", "calls", "cut"),
    [
        ("", [], False),
        ('[{"na', [], True),
        ('[{"name": "f", "arguments": ', [("f", "")], True),
        ('[{"name": "f", "arguments": {"a": {"b": "}', [("f", '{"a": {"b": "}')], True),
        ('[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a', [("f", "{}"), ("g", '{"a')], True),
        ('[{"name": "f", "arguments": {}}, ', [("f", "{}")], False),
    ],
)
def test_lists_of_calls_that_are_cut(text: str, calls: list[Any], cut: bool):
    reader = ListReader()
    assert message(reader, list(text)) == (None, calls) and reader.cut == cut


def test_the_same_request_has_the_same_ids_and_others_have_others(url: str):
    def ids(**fields: Any) -> list[str]:
        asked = {"messages": [{"role": "user", "content": "hello"}], "tools": [named("f", parameters=STRICT)], "tool_choice": "required"}
        answer = httpx.post(url + "/v1/chat/completions", json=asked | {"max_tokens": 150, "seed": 4, "n": 2} | fields, timeout=60)
        return [call["id"] for choice in answer.json()["choices"] for call in choice["message"]["tool_calls"]]

    first, later = ids(), ids(messages=[{"role": "user", "content": "hello again"}])
    assert first == ids() and all(re.fullmatch("[a-z0-9]{9}", each) for each in first)  # as the templates of Mistral want them
    every = [*first, *later, *ids(seed=5)]
    assert len(set(every)) == len(every) > 5
