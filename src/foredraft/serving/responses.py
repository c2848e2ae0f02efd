"""Answers in OpenAI's form: whole ones, and the chunks of streamed ones, which add up to the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from foredraft.rows import Commit
from foredraft.serving.requests import Plan
from foredraft.serving.schema import ChatRequest, CompletionRequest, NamedTool
from foredraft.serving.tools import Delta, Reader, reader_for
from foredraft.serving.writers import LEAST, Entry, Piece, Prompt, TokenNames, Writer, round_json


@dataclass(frozen=True)
class Facts:
    """What every answer says about itself."""

    id: str
    created: int
    model: str
    fingerprint: str
    metrics: bool  # put metrics.speculative_decoding into it
    depth: int  # of the deepest draft


class Answer(ABC):
    """The answer to one request."""

    prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, request: Any, plan: Plan, facts: Facts, tokenizer: Any, names: TokenNames, keep: Collection[str] = ()):
        self.request, self.plan, self.facts, self.names = request, plan, facts, names
        logprobs, echo = request.top is not None, getattr(request, "echo", False)
        only_echo = echo and request.limit == 0
        prompts = [Prompt(tokenizer, ids) for ids in plan.prompts]
        self.writers = [
            Writer(
                prompts[index // request.n],
                request.stops,
                logprobs=logprobs,
                min_tokens=request.min_tokens,
                echo=echo,
                only_echo=only_echo,
                keep=keep,
            )
            for index in range(len(plan.choices))
        ]

    @property
    def over(self) -> bool:
        return all(writer.over for writer in self.writers)

    def begin(self) -> list[dict[str, Any]]:
        """Choices of the first chunks, before there is any text."""
        return []

    def take(self, index: int, commit: Commit) -> list[dict[str, Any]]:
        """What ``commit`` adds to choice ``index``: choices of chunks, most often one, none if nothing can be seen yet."""
        writer = self.writers[index]
        if writer.over:  # a stop string was found, and the row went on until the engine knew
            return []
        first = not writer.tokens
        piece = writer.add(commit)
        ids = self.request.return_token_ids
        if piece.empty and not (ids and piece.tokens):
            return []
        found = self._choices(index, piece)
        if piece.round is not None and found:
            found[0]["round"] = round_json(piece.round, self.names)
        if ids and found:
            found[0]["token_ids"] = list(piece.tokens)
            if first:
                found[0] |= self._prompt_ids(index)
        return found

    @abstractmethod
    def _choices(self, index: int, piece: Piece) -> list[dict[str, Any]]: ...

    @abstractmethod
    def _whole(self, index: int) -> dict[str, Any]:
        """Choice ``index``, complete."""

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        """What choice ``index`` says of its prompt's tokens, where they are asked for."""
        return {}

    def chunk(self, choices: Sequence[dict[str, Any]], *, usage: bool = False) -> dict[str, Any]:
        """A chunk with these choices. Where usage is asked for, the last chunk has it, and no choices."""
        found, options = self._envelope(self.chunk_object, list(choices)), self.request.stream_options
        if usage or options.continuous_usage_stats:
            found["usage"] = self.usage()
        elif options.include_usage:
            found["usage"] = None
        return found

    def about_all(self) -> dict[str, Any]:
        """What an answer says of itself once it is complete."""
        return {"metrics": self.metrics()} if self.facts.metrics else {}

    def whole(self) -> dict[str, Any]:
        """The whole answer, once all choices are over."""
        choices = []
        for index, writer in enumerate(self.writers):
            choice: dict[str, Any] = {
                "index": index,
                **self._whole(index),
                "finish_reason": writer.finish_reason,
                "stop_reason": writer.stop_reason,
            }
            if self.request.return_token_ids:
                choice |= {"token_ids": writer.tokens, **self._prompt_ids(index)}
            choices.append(choice)
        return self._envelope(self.object, choices) | {"usage": self.usage()} | self.about_all()

    def _envelope(self, object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.facts.id}",
            "object": object,
            "created": self.facts.created,
            "model": self.facts.model,
            "system_fingerprint": self.facts.fingerprint,
            "seed": self.plan.seed,
            "choices": choices,
        }

    def usage(self) -> dict[str, Any]:
        """Tokens read and written so far."""
        read, written = sum(map(len, self.plan.prompts)), sum(len(writer.tokens) for writer in self.writers)
        found: dict[str, Any] = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        if self.request.prediction is not None:
            guessed = sum(writer.counts.guessed for writer in self.writers)
            rejected = sum(writer.counts.guesses_drafted for writer in self.writers) - guessed
            found["completion_tokens_details"] = {"accepted_prediction_tokens": guessed, "rejected_prediction_tokens": rejected}
        return found

    def metrics(self) -> dict[str, Any]:
        """``metrics`` as vLLM has them: of a single choice, else null."""
        if len(self.writers) != 1:
            return {"speculative_decoding": None}
        counts = self.writers[0].counts
        steps = sum(counts.rounds.values())
        histogram = [counts.rounds[accepted] for accepted in range(max(self.facts.depth, 0, *counts.rounds) + 1)]
        return {
            "speculative_decoding": {
                "mean_acceptance_length": 1 + counts.accepted / steps if steps else None,
                "draft_acceptance_rate": counts.accepted / counts.drafted if counts.drafted else None,
                "acceptance_histogram": histogram,
                "num_spec_steps": steps,
                "num_accepted_draft_tokens": counts.accepted,
                "num_draft_tokens": counts.drafted,
                "num_spec_tokens": len(histogram) - 1,
            }
        }

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.request.return_tokens_as_token_ids else self.names.text(token)


class CompletionAnswer(Answer):
    """The answer to ``/v1/completions``."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"
    request: CompletionRequest

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.texts = ["" for _ in self.writers]
        self.entries: list[list[Entry]] = [[] for _ in self.writers]

    def _choices(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        self.texts[index] += piece.text
        self.entries[index] += piece.entries
        logprobs = self._logprobs(piece.entries) if self.request.logprobs is not None else None
        stop_reason = self.writers[index].stop_reason
        return [
            {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason, "stop_reason": stop_reason}
        ]

    def _whole(self, index: int) -> dict[str, Any]:
        logprobs = self._logprobs(self.entries[index]) if self.request.logprobs is not None else None
        return {"text": self.texts[index], "logprobs": logprobs}

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.writers[index].prompt.ids)}

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        return {
            "tokens": [self.name(each.token) for each in entries],
            "token_logprobs": [each.logprob for each in entries],
            "top_logprobs": [self._top(each) for each in entries],
            "text_offset": [each.start for each in entries],
        }

    def _top(self, entry: Entry) -> dict[str, float] | None:
        """The token itself is one of them, whether or not it is among the most likely."""
        if entry.logprob is None:
            return None
        found: dict[str, float] = {}
        for token, value in entry.top:  # of equal names the likeliest stays
            found.setdefault(self.name(token), value)
        return found | {self.name(entry.token): entry.logprob}


class ChatAnswer(Answer):
    """The answer to ``/v1/chat/completions``."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    request: ChatRequest

    def __init__(self, request: ChatRequest, plan: Plan, facts: Facts, tokenizer: Any, names: TokenNames):
        self.readers: list[Reader] = [reader_for(request, tokenizer, choice) for choice in plan.choices]
        super().__init__(request, plan, facts, tokenizer, names, self.readers[0].tags)
        self.messages: list[Delta] = [{"role": "assistant", "content": None, "refusal": None} for _ in self.writers]
        self.contents: list[list[dict[str, Any]]] = [[] for _ in self.writers]

    def begin(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for index in range(len(self.writers))]

    def chunk(self, choices: Sequence[dict[str, Any]], *, usage: bool = False) -> dict[str, Any]:
        """With the prompt's tokens where a choice begins, as vLLM has it."""
        begins = any("role" in choice["delta"] for choice in choices)
        return super().chunk(choices, usage=usage) | (self._prompt() if begins else {})

    def whole(self) -> dict[str, Any]:
        return super().whole() | self._prompt()

    def _prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.plan.prompts[0])} if self.request.return_token_ids else {}

    def _choices(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        writer, reader = self.writers[index], self.readers[index]
        deltas = reader.feed(piece.text)
        if piece.finish_reason is not None:
            ended = writer.finish_reason == "stop"  # by a token, where no stop string was found
            deltas += reader.flush(writer.tokens[: len(writer.tokens) - ended] if writer.stop_reason is None else None)
            forced = isinstance(self.request.tool_choice, NamedTool)  # whose finish reason is "stop" with OpenAI
            if reader.calls and not reader.cut and writer.finish_reason == "stop" and not forced:
                writer.finish_reason = "tool_calls"
        for delta in deltas:
            gather(self.messages[index], delta)
        entries = [self._entry(each) for each in piece.entries] if self.request.logprobs else []
        self.contents[index] += entries
        found: list[dict[str, Any]] = [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
        if not found or (writer.finish_reason is not None and "tool_calls" in deltas[-1]):
            # openai-python tells that a call is complete only if the finish reason comes in a chunk behind it
            found.append({"index": index, "delta": {}, "logprobs": None, "finish_reason": None})
        if self.request.logprobs:
            found[0]["logprobs"] = {"content": entries, "refusal": None}
        found[-1] |= {"finish_reason": writer.finish_reason, "stop_reason": writer.stop_reason}
        return found

    def _whole(self, index: int) -> dict[str, Any]:
        message = self.messages[index]
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
        return {"message": message, "logprobs": {"content": self.contents[index], "refusal": None} if self.request.logprobs else None}

    def _entry(self, entry: Entry) -> dict[str, Any]:
        top = [self._named(token, value) for token, value in entry.top]
        return {**self._named(entry.token, LEAST if entry.logprob is None else entry.logprob), "top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.name(token), "logprob": logprob, "bytes": list(self.names.bytes(token))}


def gather(message: Delta, delta: Delta) -> None:
    """Add a delta to a message, as clients do."""
    for name in ("content", "reasoning_content"):
        if delta.get(name):
            message[name] = (message.get(name) or "") + delta[name]
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
