"""What a request may say. Every field is honoured or refused by name. Those in :class:`Noted` cannot change a text, nor can ``annotations``
and ``index``, which clients send back with earlier answers, and the ``description`` of a schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

MOST_CHOICES = 128  # of one prompt, as OpenAI has it
MOST_STOPS, LONGEST_STOP = 16, 256
MOST_LOGPROBS = 20
MOST_BIASES = 4096
COOLEST = 1e-3  # the lowest temperature above 0: scores divided by less lose their differences

Text = Annotated[str, Field(max_length=1 << 20)]
Item = TypeVar("Item")
Several = Annotated[list[Item], Field(fail_fast=True)]  # one wrong item is told of, not a million
Ids = Annotated[Several[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=1 << 20)]


def wrong(field: str, message: str) -> PydanticCustomError:
    """What is raised where fields do not fit together; ``field`` is the one that the answer names."""
    return PydanticCustomError("inconsistent", "{message}", {"message": message, "field": field})


class Part(BaseModel):
    """A part of a request: values have exactly the type that they should have, and unknown members are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def one_unknown(cls, data: Any) -> Any:
        """Only the first unknown member is named, however many there are. Members that are null are left out."""
        if not isinstance(data, dict):
            return data
        data = {name: value for name, value in data.items() if value is not None}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        odd = next((name for name in data if name not in known), None)
        return data if odd is None else {name: value for name, value in data.items() if name in known or name == odd}


class StreamOptions(Part):
    """``include_usage``: a last chunk says how many tokens were read and written; ``continuous_usage_stats``: every chunk does."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False

    @field_validator("include_obfuscation")
    @classmethod
    def no_padding(cls, value: bool) -> bool:
        if value:
            raise ValueError("chunks are not padded; leave include_obfuscation out")
        return value


class StructuredOutputs(Part):
    """What the text has to match, as vLLM has it: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Several[str] | None = Field(None, min_length=1, max_length=1024)
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def exactly_one(self) -> StructuredOutputs:
        given = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(each is not None for each in given) != 1:
            raise ValueError("give exactly one of json, regex, choice, grammar and json_object")
        return self


class MaxDraft(Part):
    """At most so many drafted tokens per round."""

    max_draft: int = Field(ge=0, le=1024)


class ContentPart(Part):
    """A piece of a message."""

    type: Literal["text"]
    text: Text


Parts = Annotated[Several[ContentPart], Field(max_length=4096)]


class Prediction(Part):
    """Text that the answer will probably resemble; it is drafted from."""

    type: Literal["content"] = "content"
    content: Text | Parts


class Noted(Part):
    """Accepted, and without any effect: what only says who asks, or what an operator may do with the request."""

    user: str = ""
    metadata: dict[str, Any] = {}
    store: bool = False
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    prompt_cache_retention: str = ""
    service_tier: str = ""


class Sampling(Noted):
    """The fields that both kinds of completion have."""

    model: str = Field("", description="the server's model; the default is the only one that it has")
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63, description="drawn where it is left out; the response names it")
    temperature: float = Field(1.0, ge=0, le=100, description="0 is greedy")
    top_p: float = Field(1.0, ge=0, le=1, description="0 is the likeliest token alone")
    top_k: int = Field(0, ge=-1, lt=1 << 31, description="0 or -1: all tokens")
    min_p: float = Field(0.0, ge=0, lt=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100, description="as transformers has it: over the prompt, too")
    logit_bias: dict[str, float] = Field({}, max_length=MOST_BIASES)
    stop: (
        Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
        | Annotated[Several[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]], Field(max_length=MOST_STOPS)]
    ) = []
    min_tokens: int = Field(0, ge=0, lt=1 << 31)
    ignore_eos: bool = False
    structured_outputs: StructuredOutputs | None = None
    speculation: Literal["off", "auto"] | MaxDraft = "auto"
    prediction: Prediction | None = None
    rounds: bool = Field(False, description="each chunk has member round: what was drafted and what was kept")
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @field_validator("temperature")
    @classmethod
    def not_nearly_greedy(cls, value: float) -> float:
        if 0 < value < COOLEST:
            raise ValueError(f"must be 0, which is greedy, or at least {COOLEST:g}")
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def few(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MOST_BIASES:
            raise ValueError(f"at most {MOST_BIASES} tokens can have a bias, got {len(value)}")
        return value

    @field_validator("logit_bias")
    @classmethod
    def token_ids(cls, value: dict[str, float]) -> dict[str, float]:
        for token, bias in value.items():
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                raise ValueError(f"the keys are token ids as strings, got {token[:50]!r}")
            if not -100 <= bias <= 100:
                raise ValueError(f"a bias lies between -100 and 100, got {bias} for token {token}")
        return value

    @model_validator(mode="after")
    def streams(self) -> Sampling:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise wrong("stream_options", "stream_options needs stream: true")
        if self.rounds and not self.stream:
            raise wrong("rounds", "rounds needs stream: true")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def max_draft(self) -> int | None:
        if isinstance(self.speculation, MaxDraft):
            return self.speculation.max_draft
        return 0 if self.speculation == "off" else None


class CompletionRequest(Sampling):
    """``POST /v1/completions``."""

    prompt: (
        Text
        | Annotated[Several[Text], Field(min_length=1, max_length=1024)]
        | Ids
        | Annotated[Several[Ids], Field(min_length=1, max_length=1024)]
    )
    max_tokens: int = Field(16, ge=0, lt=1 << 31)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False
    best_of: int = Field(1, ge=1)

    @model_validator(mode="after")
    def consistent(self) -> CompletionRequest:
        if self.best_of not in (1, self.n):
            raise wrong("best_of", "best_of is not supported; ask for n choices")
        if self.max_tokens == 0 and not self.echo:
            raise wrong("max_tokens", "max_tokens: 0 is possible with echo: true only")
        return self

    @property
    def limit(self) -> int:
        return self.max_tokens

    @property
    def top(self) -> int | None:
        return self.logprobs


class Called(Part):
    """The function of a tool call in a message."""

    name: str
    arguments: Text
    parsed_arguments: Any = Field(None, description="no effect: openai-python's `parse` and `stream` add it")


class ToolCall(Part):
    """An earlier answer's call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: Called
    index: int = 0


class Message(Part):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Parts | None = None
    name: str | None = None
    tool_calls: Several[ToolCall] | None = Field(None, max_length=128)
    tool_call_id: str | None = None
    reasoning_content: Text | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    parsed: Any = Field(None, description="no effect: openai-python's `parse` and `stream` add it")
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def consistent(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError(f"a message of role {self.role} needs content")
        odd = next((name for name in ("tool_calls", "annotations") if getattr(self, name) and self.role != "assistant"), None)
        if odd:
            raise ValueError(f"only messages of the assistant have {odd}")
        return self


class Function(Part):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Part):
    """A tool: a function, in an envelope."""

    type: Literal["function"]
    function: Function


class NamedFunction(Part):
    """A function by its name."""

    name: str


class NamedTool(Part):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class PlainText(Part):
    """No format."""

    type: Literal["text"]


class JsonObject(Part):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Part):
    """A schema with a name. The answer always matches it, ``strict`` or not."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Part):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class ChatRequest(Sampling):
    """``POST /v1/chat/completions``."""

    messages: Several[Message] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    response_format: Annotated[PlainText | JsonObject | JsonSchemaFormat, Field(discriminator="type")] = PlainText(type="text")
    tools: Several[Tool] = Field([], max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    modalities: Several[Literal["text"]] = ["text"]

    @model_validator(mode="after")
    def consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs", "top_logprobs needs logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise wrong("max_tokens", "give max_tokens or max_completion_tokens, not both")
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise wrong("tools", "two tools have the same name")
        choice = self.tool_choice
        if choice not in (None, "none") and not self.tools:
            raise wrong("tool_choice", "tool_choice needs tools")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise wrong("tool_choice", f"tool_choice names {choice.function.name!r}, which is none of the tools")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Part):
    """``POST /tokenize``: a text, or a conversation."""

    model: str = ""
    prompt: Text | None = None
    messages: Several[Message] | None = Field(None, min_length=1, max_length=4096)
    tools: Several[Tool] = Field([], max_length=128)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def one_of_them(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages")
        odd = sorted(self.model_fields_set & {"tools", "add_generation_prompt", "chat_template_kwargs"})
        if odd and self.messages is None:
            raise wrong(odd[0], f"{odd[0]} needs messages")
        return self


class DetokenizeRequest(Part):
    """``POST /detokenize``."""

    model: str = ""
    tokens: Ids
