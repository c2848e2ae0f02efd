"""Conversations: messages as a chat template reads them, and the text that it makes of them."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateSyntaxError

from foredraft.errors import ConfigurationError
from foredraft.serving.failures import refused
from foredraft.serving.protect import check_values
from foredraft.serving.schema import ContentPart, Message, Tool


class Chat:
    """The chat template of a tokenizer, or the one that the operator has given. A request can give none.

    Raises:
        ConfigurationError: the operator's is no Jinja.
    """

    def __init__(self, tokenizer: Any, template: str | None):
        if template:
            check_syntax(tokenizer, template)
        self.tokenizer = tokenizer
        self.template = template or getattr(tokenizer, "chat_template", None)
        self._reserved = {*inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map, "messages"}

    @property
    def source(self) -> str:
        """The template's text; of several, all of them."""
        return "\n".join(self.template.values()) if isinstance(self.template, dict) else str(self.template or "")

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        begin_answer: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the template writes it, its special tokens included, up to where the answer begins.

        Raises:
            ApiError: 400; there is no template, or it refuses the messages.
        """
        if not self.template:
            raise refused(
                "the model has no chat template: use /v1/completions, or start the server with --chat-template FILE",
                "messages",
                "no_chat_template",
            )
        if tools and "tools" not in self.source:
            raise refused("the model's chat template knows no tools; leave tools out", "tools", "no_tools")
        options = dict(options or {})
        if odd := sorted(self._reserved & options.keys()):
            raise refused(f"chat_template_kwargs.{odd[0]} cannot be set by a request", "chat_template_kwargs", "unknown_field")
        if odd := sorted(name for name in options if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", self.source)):
            raise refused(
                f"chat_template_kwargs.{odd[0][:100]}: the model's chat template does not read it; leave it out",
                "chat_template_kwargs",
                "unknown_field",
            )
        native = "developer" in self.source
        shown = [as_template_reads(message, developer=native) for message in messages]
        given = [tool.model_dump(exclude_none=True) for tool in tools] or None
        template = self.template if isinstance(self.template, str) else None  # of several, the tokenizer takes the one that fits
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    shown, tools=given, chat_template=template, tokenize=False, add_generation_prompt=begin_answer, **options
                )
            )
        except Exception as error:  # a template is a program of the model's author
            raise refused(f"the chat template refused the messages: {str(error)[:500]}", "messages", "chat_template") from error


def check_syntax(tokenizer: Any, template: str) -> None:
    """Raises:
    ConfigurationError: ``template`` is no Jinja. What else a template refuses depends on the conversation.
    """
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template=template, tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigurationError(
            f"the chat template given cannot be read, line {error.lineno}: {error.message}; correct it there"
        ) from error
    except Exception:  # a template may refuse this conversation and take others
        return


def as_template_reads(message: Message, *, developer: bool) -> dict[str, Any]:
    """Templates read text as one string, arguments of calls as objects, and mostly know no developers."""
    shown: dict[str, Any] = {"role": message.role if developer or message.role != "developer" else "system"}
    shown["content"] = text_of(message.content)
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            shown[name] = value
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": arguments_of(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return shown


def text_of(content: str | Sequence[ContentPart] | None) -> str:
    """Parts of a message stand below each other."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def arguments_of(text: str) -> Any:
    """What a template is given: the text itself where it is no JSON, as in a call that was cut."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    check_values(found)
    return found
