"""Tools: what the model has to write to call them, and its calls in the form that OpenAI's clients read.

Where a tool has to be called, a grammar sees to it: the text is the arguments of the named tool, or a JSON list of calls. Where the model
is free to call one, its text is read: by the tokenizer's own response template if it has one (``parse_response`` of transformers), else as
``<tool_call>{"name": …, "arguments": …}</tool_call>``, the form of Hermes, Qwen and others.
"""

from __future__ import annotations

import json
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from foredraft.serving.schema import ChatRequest, NamedTool
from foredraft.serving.stops import beginning

log = logging.getLogger("foredraft.serving")
BEGIN, END = "<tool_call>", "</tool_call>"
ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}

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
        "$defs": {name: moved(schema, f"#/$defs/{name}") for name, schema in arguments.items()},
    }


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

    calls = 0  # that were found

    @abstractmethod
    def feed(self, text: str) -> list[Delta]:
        """What ``text`` adds to the message."""

    def flush(self, tokens: Sequence[int] | None) -> list[Delta]:
        """What was held back, once the text is over; ``tokens`` are all of it, None where a stop string has cut it."""
        return []

    def call(self, name: str, arguments: str) -> Delta:
        """A whole call."""
        self.calls += 1
        function = {"name": name, "arguments": arguments}
        return {"tool_calls": [{"index": self.calls - 1, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}]}


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
    """The text is a JSON list of calls; each is shown when it is complete."""

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
    """transformers reads the whole text by the tokenizer's response template, so it is shown at its end."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], tools: Sequence[dict[str, Any]]):
        self.tokenizer, self.prompt, self.tools = tokenizer, prompt, tools
        self.text = ""

    def feed(self, text: str) -> list[Delta]:
        self.text += text
        return []

    def flush(self, tokens: Sequence[int] | None) -> list[Delta]:
        whole = self.text if tokens is None else list(tokens)
        try:
            message = self.tokenizer.parse_response(whole, prefix=list(self.prompt), tools=list(self.tools))
            found: list[Delta] = [{"content": message["content"]}] if message.get("content") else []
            for each in message.get("tool_calls") or ():
                function = each["function"]
                found.append(self.call(function["name"], as_json(function.get("arguments", {}))))
        except Exception as error:  # the template is a program of the model's author, and the text may be anything
            log.warning("the response template failed: %s", error)
            self.calls = 0
            return [{"content": self.text}] if self.text else []
        return found


def reader_for(request: ChatRequest, tokenizer: Any, prompt: Sequence[int]) -> Reader:
    """What reads the text of a choice of this request."""
    if isinstance(request.tool_choice, NamedTool):
        return NamedReader(request.tool_choice.function.name)
    if request.tool_choice == "required":
        return ListReader()
    if not request.tools or request.tool_choice == "none":
        return PlainReader()
    if getattr(tokenizer, "response_template", None):
        return TemplateReader(tokenizer, prompt, [tool.model_dump(exclude_none=True) for tool in request.tools])
    return TaggedReader([tool.function.name for tool in request.tools], parallel=request.parallel_tool_calls)
