"""Tools: what the model has to write to call them, and its calls in the form that OpenAI's clients read.

Where a tool has to be called, a grammar sees to it: the text is the arguments of the named tool, or a JSON list of calls. Where the model
is free to call one, its text is read: by the tokenizer's own response template if it has one (``parse_response`` of transformers), else as
``<tool_call>{"name": …, "arguments": …}</tool_call>``, the form of Hermes, Qwen and others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

from foredraft.detokenizer import special_tokens
from foredraft.grammars import ONE_LINE
from foredraft.serving.jobs import Choice
from foredraft.serving.schema import ChatRequest, NamedTool
from foredraft.serving.stops import beginning

log = logging.getLogger("foredraft.serving")
BEGIN, END = "<tool_call>", "</tool_call>"
ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
CUT = re.compile(r'\{"name": "([^"\\]+)", "arguments": (.*)', re.DOTALL)  # the beginning of a call, as the grammar has it written
REASONING = ("reasoning_content", "reasoning", "thinking")  # what response templates call it
ID = 9  # characters of a call's id: some chat templates take no others

Delta = dict[str, Any]


def calls_schema(request: ChatRequest) -> dict[str, Any]:
    """The JSON schema of what has to be written where a tool has to be called."""
    arguments = {tool.function.name: tool.function.parameters or ANY_ARGUMENTS for tool in request.tools}
    if isinstance(request.tool_choice, NamedTool):
        return arguments[request.tool_choice.function.name]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in arguments
    ]
    most = {} if request.parallel_tool_calls else {"maxItems": 1}
    return {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": calls},
        **most,
        "$defs": {name: moved(unnamed(schema), f"#/$defs/{name}") for name, schema in arguments.items()},
    }


def free_calls(request: ChatRequest, tokenizer: Any, ends: Collection[int], form: Any = None) -> str | None:
    """Where the model is free to call a tool, and one of them is strict or answers have the schema ``form``: a Lark grammar of text with
    calls in it, or of calls or such an answer. Any text will do, but behind a tag that begins a call stands one: of a tool that is there,
    with the arguments of its schema if it is strict. None elsewhere, and for a tokenizer with a response template, which may have them
    written in any form."""
    if request.tool_choice not in (None, "auto") or not request.tools or getattr(tokenizer, "response_template", None):
        return None
    if form is None and not any(tool.function.strict for tool in request.tools):
        return None
    tools = [tool.function for tool in request.tools]
    arguments = {tool.name: (tool.parameters if tool.strict else None) or ANY_ARGUMENTS for tool in tools}
    named = [{"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}} for name in arguments]
    orders = [each for members in named for each in (members, dict(reversed(members.items())))]  # models are trained on both
    call = {
        "x-guidance": ONE_LINE,
        "anyOf": [{"type": "object", "properties": each, "required": [*each], "additionalProperties": False} for each in orders],
        "$defs": {name: moved(unnamed(schema), f"#/$defs/{name}") for name, schema in arguments.items()},
    }
    special = special_tokens(tokenizer)
    end = END if END in special else f'"{END}"'
    schema = as_lark(call)
    if form is not None:
        begin = BEGIN if BEGIN in special else f'"{BEGIN}"'
        more = f"(SPACE {begin} SPACE call SPACE {end})*" if request.parallel_tool_calls else ""
        return rf"""
start: {begin} SPACE call SPACE {end} {more} | answer
call: %json {schema}
answer: %json {as_lark({"x-guidance": ONE_LINE, **form} if isinstance(form, dict) else form)}
SPACE: /[ \n]?/
"""
    begin = f"begin: TEXT {BEGIN}" if BEGIN in special else f'begin[lazy]: TEXT "{BEGIN}"'
    others = sorted(number for token, number in special.items() if token not in (BEGIN, END) and number not in ends)
    other = f"(TEXT <[{','.join(map(str, others))}]>)*" if others else ""
    often = "*" if request.parallel_tool_calls else "?"
    return rf"""
start: {other} (begin SPACE call SPACE {end} {other}){often} TEXT
{begin}
call: %json {schema}
SPACE: /[ \n]?/
TEXT: /(.|\n)*/
"""


def as_lark(schema: Any) -> str:
    """``schema`` in a Lark grammar, without the sign by which EBNF is known."""
    return json.dumps(schema).replace("::=", r":\u003a=")


def unnamed(schema: Any) -> Any:
    """``schema`` without an ``$id``, which would be another base for what its parts say of each other."""
    return {word: value for word, value in schema.items() if word != "$id"} if isinstance(schema, dict) else schema


def moved(schema: Any, place: str) -> Any:
    """``schema`` as a part of another, at ``place``: what it says of its own parts goes on to mean them."""
    if isinstance(schema, list):
        return [moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        word: place + value[1:] if word == "$ref" and isinstance(value, str) and value.partition("/")[0] == "#" else moved(value, place)
        for word, value in schema.items()
    }


def as_json(arguments: Any) -> str:
    """The arguments of a call as text that UTF-8 can say: half of a surrogate pair, which JSON can spell, stays spelt. A model may have
    written them as a string already.

    Raises:
        ValueError: a number in them is none that JSON has.
    """
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace").decode()


class Reader(ABC):
    """Turns the text of one choice into deltas of the assistant's message."""

    tags: tuple[str, ...] = ()  # that it looks for, and which are text even where they are special tokens
    calls = 0  # that were found
    cut = False  # the last of them is not complete
    choice: Choice | None = None  # whose text it is

    @abstractmethod
    def feed(self, text: str) -> list[Delta]:
        """What ``text`` adds to the message."""

    def flush(self, tokens: Sequence[int] | None) -> list[Delta]:
        """What was held back, once the text is over; ``tokens`` are all of it, None where a stop string has cut it."""
        return []

    def call(self, name: str, arguments: str) -> Delta:
        """A call. The same request has the same ids, and another prompt others: all calls of a conversation differ."""
        of = None if self.choice is None else (self.choice.parameters.seed, list(self.choice.ids))
        number = hashlib.sha256(repr((of, self.calls)).encode()).hexdigest()[:ID]
        self.calls += 1
        function = {"name": name, "arguments": arguments}
        return {"tool_calls": [{"index": self.calls - 1, "id": number, "type": "function", "function": function}]}


class PlainReader(Reader):
    """The text is the message."""

    def feed(self, text: str) -> list[Delta]:
        return [{"content": text}] if text else []


class NamedReader(Reader):
    """The text is the arguments of one tool; they are shown as they are written."""

    def __init__(self, name: str):
        self.name = name

    def feed(self, text: str) -> list[Delta]:
        if not text:
            return []
        if not self.calls:
            return [self.call(self.name, text)]
        return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}]


class ListReader(Reader):
    """The text is a JSON list of calls; each is shown when it is complete, or at the end as far as it was written."""

    def __init__(self) -> None:
        self.text, self.depth, self.quoted, self.escaped = "", 0, False, False

    def feed(self, text: str) -> list[Delta]:
        found = []
        for letter in text:
            if self.depth:
                self.text += letter
            if self.escaped:
                self.escaped = False
            elif self.quoted:
                self.escaped, self.quoted = letter == "\\", letter != '"'
            elif letter == '"':
                self.quoted = True
            elif letter == "{":
                self.text = self.text if self.depth else letter
                self.depth += 1
            elif letter == "}":
                self.depth -= 1
                if not self.depth:
                    found.append(self.read())
        return found

    def flush(self, tokens: Sequence[int] | None) -> list[Delta]:
        begun = CUT.match(self.text) if self.depth else None
        self.cut = self.depth > 0
        return [] if begun is None else [self.call(begun[1], begun[2])]

    def read(self) -> Delta:
        try:
            call = json.loads(self.text)
            return self.call(call["name"], as_json(call["arguments"]))
        except (RecursionError, ValueError):  # the latter for numbers beyond Python's
            return {"content": self.text}


class TaggedReader(Reader):
    """Text, with calls between tags. A call is shown when it is complete; what is no call after all stays text.

    Whitespace between calls, and behind the last one, is no text.
    """

    tags = (BEGIN, END)

    def __init__(self, names: Sequence[str], *, parallel: bool):
        self.names, self.parallel = set(names), parallel
        self.held = ""
        self.space: str | None = None  # behind a call, while nothing else has followed; None elsewhere

    def feed(self, text: str) -> list[Delta]:
        self.held += text
        found: list[Delta] = []
        while self.held:
            if not self.held.startswith(BEGIN):
                at = self.held.find(BEGIN)
                at = len(self.held) - beginning(self.held, BEGIN) if at < 0 else at
                before, self.held = self.held[:at], self.held[at:]
                found += self.plain(before)
                if not self.held.startswith(BEGIN):
                    break
            inside, end, rest = self.held[len(BEGIN) :].partition(END)
            if not end:
                break
            found += self.tagged(inside)
            self.held = rest
        return found

    def plain(self, text: str) -> list[Delta]:
        if self.space is not None:
            text = self.space + text
            self.space = None if text.strip() else text
        return [] if not text or self.space is not None else [{"content": text}]

    def tagged(self, inside: str) -> list[Delta]:
        try:
            call = json.loads(inside)
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
            known = name in self.names
            written = as_json(arguments)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return self.plain(BEGIN + inside + END)
        if not known or (self.calls and not self.parallel):
            return self.plain(BEGIN + inside + END)
        self.space = ""
        return [self.call(name, written)]

    def flush(self, tokens: Sequence[int] | None) -> list[Delta]:
        held, self.held = self.held, ""
        return self.plain(held)


class TemplateReader(Reader):
    """transformers reads the whole text by the tokenizer's response template, so it is shown at its end. Where calls may not be parallel,
    it is the first that counts."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], tools: Sequence[dict[str, Any]], *, parallel: bool):
        self.tokenizer, self.prompt, self.tools, self.parallel = tokenizer, prompt, tools, parallel
        self.text = ""

    def feed(self, text: str) -> list[Delta]:
        self.text += text
        return []

    def flush(self, tokens: Sequence[int] | None) -> list[Delta]:
        whole = self.text if tokens is None else list(tokens)
        try:
            message = self.tokenizer.parse_response(whole, prefix=list(self.prompt), tools=list(self.tools))
            reasoning = next((message[name] for name in REASONING if message.get(name)), None)
            found: list[Delta] = [{"reasoning_content": reasoning}] if reasoning else []
            found += [{"content": message["content"]}] if message.get("content") else []
            calls = message.get("tool_calls") or []
            for each in calls if self.parallel else calls[:1]:
                function = each["function"]
                found.append(self.call(function["name"], as_json(function.get("arguments", {}))))
        except Exception as error:  # the template is a program of the model's author, and the text may be anything
            log.warning("the response template failed: %s", error)
            self.calls = 0
            return [{"content": self.text}] if self.text else []
        return found


def reader_for(request: ChatRequest, tokenizer: Any, choice: Choice) -> Reader:
    """What reads the text of this choice of the request."""
    found = _reader(request, tokenizer, choice.ids)
    found.choice = choice
    return found


def _reader(request: ChatRequest, tokenizer: Any, prompt: Sequence[int]) -> Reader:
    if isinstance(request.tool_choice, NamedTool):
        return NamedReader(request.tool_choice.function.name)
    if request.tool_choice == "required":
        return ListReader()
    if not request.tools or request.tool_choice == "none":
        return PlainReader()
    if getattr(tokenizer, "response_template", None):
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
        return TemplateReader(tokenizer, prompt, tools, parallel=request.parallel_tool_calls)
    return TaggedReader([tool.function.name for tool in request.tools], parallel=request.parallel_tool_calls)
