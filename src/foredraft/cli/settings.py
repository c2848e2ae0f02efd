"""What ``foredraft generate`` is asked for, and what it returns. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from foredraft.errors import ConfigurationError

if TYPE_CHECKING:
    from foredraft.cli.detokenizer import Detokenizer
    from foredraft.logits.logprobs import LogProbs
    from foredraft.stats import Stats

PAIRED = {"zoo:python-300m": "draft-model:zoo:python-1m"}  # targets whose passes are dear enough for this drafter to pay


@dataclass(frozen=True)
class Configuration:
    """What is loaded: the options of the same names."""

    target: str
    drafter: str | None = None
    drafter_options: Sequence[str] = ()
    rule: str = "auto"
    shape: str | None = None
    draft_length: int | None = None
    lossless: bool = True
    dtype: str = "auto"
    device: str | None = None
    threads: int | None = None
    quantization: str | None = None

    @property
    def drafter_name(self) -> str:
        return self.drafter or PAIRED.get(self.target, "prompt-lookup")


@dataclass(frozen=True)
class Contest(Configuration):
    """Several drafters that are compared on one target."""

    drafters: Sequence[str] = ()

    @property
    def names(self) -> list[str]:
        """The drafters to compare, each once."""
        embedded = ["draft-model:zoo:python-1m"] if self.target.startswith("zoo:") else []
        return list(dict.fromkeys(self.drafters or [*embedded, "prompt-lookup"]))

    @property
    def plain(self) -> Configuration:
        """Plain decoding with the same target."""
        return replace(self, drafter="none", draft_length=0)


@dataclass(frozen=True)
class Decoding:
    """How each prompt is continued. Sampling is on when ``temperature`` is above 0."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    batch_size: int = 8
    chat: bool = False
    logprobs: int | None = None

    @property
    def sampled(self) -> bool:
        return self.temperature > 0

    def sampling(self) -> dict[str, Any]:
        """How tokens are chosen; what is None stays as the model's generation config has it."""
        filters = {"top_k": self.top_k, "top_p": self.top_p}
        given = {"temperature": self.temperature, **{name: value for name, value in filters.items() if value is not None}}
        return {"do_sample": self.sampled, **(given if self.sampled else {})}

    def arguments(self) -> dict[str, Any]:
        """For ``Speculator.stream``."""
        return {"max_new_tokens": self.max_new_tokens, "output_logprobs": self.logprobs, **self.sampling()}


@dataclass
class Result:
    """One prompt and what it got; ``pieces`` of text, each with whether it was drafted and accepted."""

    index: int
    prompt: str
    ids: list[int]
    detokenizer: Detokenizer
    tokens: list[int] = field(default_factory=list)
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[LogProbs] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)

    def extend(self, tokens: Sequence[int], accepted: int, finish_reason: str | None) -> list[tuple[str, bool]]:
        """Add the tokens of a commit, the first ``accepted`` of them drafted; returns the pieces of text they complete."""
        self.tokens += tokens
        pieces = [(self.detokenizer.feed([token]), number < accepted) for number, token in enumerate(tokens)]
        if finish_reason is not None:
            pieces.append((self.detokenizer.flush(), accepted == len(tokens)))
            self.finish_reason = finish_reason
        self.pieces += pieces
        return pieces

    def interrupt(self) -> list[tuple[str, bool]]:
        return self.extend([], 0, "interrupted")


@dataclass(frozen=True)
class Outcome:
    """All results in the order of the prompts, and the statistics of all batches together, rows in the same order."""

    configuration: Configuration
    results: Sequence[Result]
    stats: Stats
    sampled: bool
    interrupted: bool


def parse_options(given: Sequence[str], flag: str = "--drafter-option") -> dict[str, Any]:
    """``KEY=VALUE`` strings given with ``flag``; a value is read as an int, a float, true, false or none, or else as text."""
    options: dict[str, Any] = {}
    for entry in given:
        key, equals, value = entry.partition("=")
        if not equals or not key:
            raise ConfigurationError(f"{flag} takes KEY=VALUE, got {entry!r}")
        options[key.strip().replace("-", "_")] = parse_value(value.strip())
    return options


def parse_value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for read in (int, float):
        with suppress(ValueError):
            return read(text)
    return text
