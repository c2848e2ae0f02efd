"""Text in, text out: prompts and conversations become token ids, and rows become texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from foredraft.detokenizer import Detokenizer
from foredraft.errors import ConfigurationError
from foredraft.loading import load_tokenizer, name_of
from foredraft.logits.logprobs import LogProbs
from foredraft.models.support import input_device, unwrap
from foredraft.preparation import pad
from foredraft.stats import Stats

Prompt = str | Sequence[Mapping[str, Any]]  # a text, or the messages of a conversation
MAX_NEW_TOKENS = 256  # where neither the call nor the model's generation config says how many


class Text(str):
    """The text that continues a prompt: a ``str`` that knows where it came from.

    Attributes:
        tokens: its token ids, with the end token if there was one.
        finish_reason: eos, stop, length or context.
        stats: of the whole call (:class:`foredraft.Stats`), whose prompts share it.
        logprobs: :class:`foredraft.LogProbs` of the tokens if they were asked for, else None.
    """

    tokens: list[int]
    finish_reason: str | None
    stats: Stats
    logprobs: LogProbs | None

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self)}</pre><small>{escape(self.stats.summary())}</small>"


def is_batch(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether these are several prompts; the messages of one conversation are one."""
    return not isinstance(prompts, (str, bytes)) and isinstance(prompts, Sequence) and not (prompts and isinstance(prompts[0], Mapping))


def encode(tokenizer: Any, prompt: Prompt, name: str | None = None) -> list[int]:
    """The token ids of a text, or of a conversation up to where the next answer begins; errors call the tokenizer's model ``name``.

    Raises:
        ConfigurationError: it is neither, it has no tokens, or the tokenizer has no chat template or one that refuses the conversation.
    """
    name = name or str(tokenizer.name_or_path)
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt)["input_ids"])
        if not ids:
            raise ConfigurationError(f"the tokenizer of {name!r} produces no tokens for the prompt {prompt!r}")
        return ids
    messages: Any = prompt
    if not isinstance(messages, Sequence) or not all(isinstance(each, Mapping) and {"role", "content"} <= each.keys() for each in messages):
        raise ConfigurationError(
            "a prompt is a text, or a list of messages such as {'role': 'user', 'content': 'Hello'}, and this is of type "
            f"{type(prompt).__name__}; generate takes token ids"
        )
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigurationError(
            f"the tokenizer of {name!r} has no chat template; give a text instead of messages (foredraft generate without --chat)"
        )
    try:
        text = str(tokenizer.apply_chat_template([dict(each) for each in messages], tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is a program of the model's author
        raise ConfigurationError(f"the chat template of {name!r} refused the messages: {error}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def decoded(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Text:
    """The text of ``tokens`` that follow ``prompt``."""
    detokenizer = Detokenizer(tokenizer, prompt)
    text = Text(detokenizer.feed(tokens) + detokenizer.flush())
    text.tokens = list(tokens)
    return text


def text_before(model: Any, prompt: Sequence[int]) -> Sequence[int]:
    """What the new text follows: nothing where the prompt is what an encoder reads."""
    return () if model.config.is_encoder_decoder else prompt


def padded(model: Any, rows: Sequence[Sequence[int]], tokenizer: Any) -> dict[str, Any]:
    """Arguments of ``generate`` for texts, as ``model`` reads them."""
    token = next(each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if each is not None)
    device = input_device(unwrap(model))
    if not model.config.is_encoder_decoder:
        return pad(rows, device, token)
    found = pad(rows, device, token, "right")  # encoders count from the first slot
    del found["pad_token_id"]  # the model has its own, with which the decoder may begin
    return found


def with_limit(config: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """``arguments`` of ``generate`` with :data:`MAX_NEW_TOKENS`, unless they or the model's generation ``config`` limit the text."""
    configs = [vars(each) for each in (arguments.get("generation_config"), config) if each is not None]
    limited = any(each.get(name) is not None for each in (arguments, *configs) for name in ("max_new_tokens", "max_length"))
    return {**({} if limited else {"max_new_tokens": MAX_NEW_TOKENS}), **arguments}


class TextStream(Iterator[str]):
    """Iterator over pieces of text, none of which cuts a character in two; ``stats`` holds what happened so far, ``close`` ends it."""

    def __init__(self, stream: Any, detokenizer: Detokenizer):
        self._stream, self._detokenizer = stream, detokenizer

    @property
    def stats(self) -> Stats:
        return self._stream.stats

    def __next__(self) -> str:
        for tokens in self._stream:
            if piece := self._detokenizer.feed(tokens):
                return piece
        if piece := self._detokenizer.flush():
            return piece
        raise StopIteration

    def close(self) -> None:
        """End the generation; the Speculator is ready for the next call."""
        self._stream.close()


class TextInterface:
    """Text in, text out, on top of ``generate`` and ``stream``."""

    model: Any
    _tokenizer: Any = None

    @property
    def tokenizer(self) -> Any:
        """The one that was given, or else the model's own.

        Raises:
            ConfigurationError: there is none.
        """
        if self._tokenizer is None:
            if not self.model.name_or_path:
                raise ConfigurationError("the model was made in memory and names no tokenizer; pass Speculator(..., tokenizer=...)")
            self._tokenizer = load_tokenizer(name_of(self.model))
        return self._tokenizer

    def __call__(self, prompts: Prompt | Sequence[Prompt], **arguments: Any) -> Text | list[Text]:
        """Continue a text, or answer a conversation; a model with an encoder reads the text and writes another.

        Args:
            prompts: a text; a conversation, as a list of messages such as ``{"role": "user", "content": "Hello"}``, which goes through the
                tokenizer's chat template; or a list of either, which makes a batch.
            arguments: those of :meth:`generate`, ``seed`` and ``output_logprobs`` included; stop strings need no tokenizer. Unless these or
                the model's generation config say how long the text may get, it has at most 256 new tokens.

        Returns:
            :class:`foredraft.Text`, a ``str`` with ``tokens``, ``finish_reason``, ``stats`` and ``logprobs``: a list of them for a list of
            prompts, and with ``num_return_sequences`` above 1, as many for each prompt.

        Raises:
            ConfigurationError: as :meth:`generate`; no tokenizer, or one without a chat template.
        """
        batch = is_batch(prompts)
        several: Any = prompts if batch else [prompts]
        rows = [encode(self.tokenizer, prompt, name_of(self.model)) for prompt in several]
        if not rows:
            raise ConfigurationError("no prompts; give at least one")
        output = self.generate(**self._arguments(rows, arguments))  # type: ignore[attr-defined]
        copies, lines, texts = len(output.sequences) // len(rows), output.sequences.tolist(), []
        width = len(lines[0]) - max(row.tokens for row in output.stats.rows)
        for index, (line, row) in enumerate(zip(lines, output.stats.rows)):
            text = decoded(self.tokenizer, text_before(self.model, rows[index // copies]), line[width : width + row.tokens])
            text.finish_reason, text.stats = row.finish_reason, output.stats
            text.logprobs = output.logprobs[index] if output.logprobs else None
            texts.append(text)
        return texts if batch or copies > 1 else texts[0]

    def stream_text(self, prompt: Prompt, **arguments: Any) -> TextStream:
        """As calling with one prompt, but an iterator over pieces of text as they are generated. No piece cuts a character in two."""
        if is_batch(prompt):
            raise ConfigurationError("stream_text takes one prompt; use stream for a batch")
        ids = encode(self.tokenizer, prompt, name_of(self.model))
        detokenizer = Detokenizer(self.tokenizer, text_before(self.model, ids))
        stream = self.stream(**self._arguments([ids], arguments))  # type: ignore[attr-defined]
        if len(stream.stats.rows) > 1:
            stream.close()
            raise ConfigurationError("stream_text writes one text; leave num_return_sequences out, or use stream")
        return TextStream(stream, detokenizer)

    def _arguments(self, rows: Sequence[Sequence[int]], given: Mapping[str, Any]) -> dict[str, Any]:
        return {**padded(self.model, rows, self.tokenizer), "tokenizer": self.tokenizer, **with_limit(self.model.generation_config, given)}
