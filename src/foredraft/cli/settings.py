"""What ``foredraft generate`` is asked for, and what it returns. Importing this loads no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foredraft import drafters
from foredraft.cli import options
from foredraft.errors import ConfigurationError, unknown

if TYPE_CHECKING:
    from foredraft.detokenizer import Detokenizer
    from foredraft.logits.logprobs import LogProbs
    from foredraft.stats import RowStats, Stats

PAIRED = {  # targets whose passes are dear enough for this drafter to pay
    "zoo:python-300m": "draft-model:zoo:python-1m",
    "zoo:t5-ast-130m": "draft-model:zoo:t5-ast-1m",
}
EMBEDDED = {"zoo:t5-ast": "draft-model:zoo:t5-ast-1m"}  # that are compared on zoo targets; for the others it is python-1m


@dataclass(frozen=True)
class Loading:
    """How a target is loaded: the options of the same names."""

    target: str
    dtype: options.Dtype = "auto"
    quantization: options.Quantization = None
    device: options.Device = None
    threads: options.Threads = None


@dataclass(frozen=True)
class Configuration(Loading):
    """The target and how drafts are made and verified: the options of the same names."""

    drafter: options.Drafter = None
    drafter_option: options.DrafterOption = None
    rule: options.VerificationRule = "auto"
    shape: options.Shape = None
    learn: bool = False
    draft_length: int | None = None
    lossy: bool = False

    @property
    def drafter_name(self) -> str:
        return self.drafter or PAIRED.get(self.target, "prompt-lookup")

    @property
    def drafter_options(self) -> dict[str, Any]:
        """Raises ConfigurationError for one that is not of the form KEY=VALUE, and for two that say whether to learn."""
        found = parse_options(self.drafter_option or ())
        if self.learn and "learn" in found:
            raise ConfigurationError(f"--learn and --drafter-option learn={found['learn']} exclude each other; leave --learn out")
        return {**found, **({"learn": True} if self.learn else {})}


@dataclass(frozen=True)
class Contest(Loading):
    """Several drafters that are compared on one target."""

    drafters: options.Candidates = None
    drafter_option: Sequence[str] | None = None  # of the commands that have --drafter-option

    @property
    def names(self) -> list[str]:
        """The drafters to compare, each once."""
        own = {**PAIRED, **EMBEDDED}.get(self.target, "draft-model:zoo:python-1m")
        embedded = [own] if self.target.startswith("zoo:") else []
        return list(dict.fromkeys(self.drafters or [*embedded, "prompt-lookup"]))

    @property
    def options(self) -> dict[str, dict[str, Any]]:
        """By drafter to compare, the options that it knows.

        Raises:
            ConfigurationError: an option that none of them knows.
        """
        given = parse_options(self.drafter_option or ())
        known = {name: drafters.options(name.partition(":")[0]) for name in self.names}
        for key in given.keys() - set().union(*known.values()):
            raise unknown("none of the drafters has an option", key, sorted(set().union(*known.values()) - {"source"}))
        return {name: {key: value for key, value in given.items() if key in own} for name, own in known.items()}

    @property
    def plain(self) -> Configuration:
        """Plain decoding with the same target."""
        return Configuration(self.target, self.dtype, self.quantization, self.device, self.threads, drafter="none", draft_length=0)


@dataclass(frozen=True)
class Decoding:
    """How each prompt is continued; what is None stays as the model's generation config has it, as in Python. A ``temperature`` above 0
    samples, 0 is greedy. ``longest`` limits the new tokens where neither ``max_new_tokens`` nor the model does."""

    max_new_tokens: options.MaxNewTokens = None
    temperature: options.ModelsTemperature = None
    top_k: options.TopK = None
    top_p: options.TopP = None
    min_p: options.MinP = None
    repetition_penalty: options.RepetitionPenalty = None
    stop: options.Stop = None
    seed: options.Seed = None
    batch_size: int = 8
    chat: bool = False
    system: str | None = None
    logprobs: int | None = None
    source_language: str | None = None
    target_language: str | None = None
    longest: int = 256
    matched: Mapping[str, Any] = field(default_factory=dict)  # json_schema, regex or grammar, and grammar_backend

    @property
    def languages(self) -> dict[str, str]:
        """Those that were given, by the option."""
        given = {"--source-language": self.source_language, "--target-language": self.target_language}
        return {option: code for option, code in given.items() if code is not None}

    def sampled(self, defaults: Any) -> bool:
        """Whether a model with ``defaults``, its generation config, samples."""
        return bool(defaults.do_sample) if self.temperature is None else self.temperature > 0

    def filters(self) -> dict[str, Any]:
        """What only matters when sampling, as far as it was given."""
        filters = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        return {name: value for name, value in filters.items() if value is not None}

    def sampling(self) -> dict[str, Any]:
        """How tokens are chosen."""
        if self.temperature is None:
            return self.filters()
        return {"do_sample": True, "temperature": self.temperature, **self.filters()} if self.temperature > 0 else {"do_sample": False}

    def arguments(self, defaults: Any, tokenizer: Any) -> dict[str, Any]:
        """For ``Speculator.stream`` of a model with ``defaults``."""
        given = {"output_logprobs": self.logprobs, "repetition_penalty": self.repetition_penalty, "max_new_tokens": self.max_new_tokens}
        if self.max_new_tokens is None and defaults.max_new_tokens is None and defaults.max_length is None:
            given["max_new_tokens"] = self.longest
        read = {"tokenizer": tokenizer, **self.matched} if self.stop or self.matched else {}
        stop = {"stop_strings": list(self.stop)} if self.stop else {}
        sampling = self.sampling() if self.sampled(defaults) else {"do_sample": False}
        beams = {"num_beams": 1} if (defaults.num_beams or 1) > 1 else {}  # as many checkpoints for translation ask for
        return {**{name: value for name, value in given.items() if value is not None}, **read, **stop, **sampling, **beams}


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
    stats: RowStats | None = None

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
    """``KEY=VALUE`` strings given with ``flag``; a value is read as an int, a float, true, false, none or a JSON object, or
    else as text."""
    found: dict[str, Any] = {}
    for entry in given:
        key, equals, value = entry.partition("=")
        if not equals or not key:
            raise ConfigurationError(f"{flag} takes KEY=VALUE, got {entry!r}")
        found[key.strip().replace("-", "_")] = parse_value(value.strip())
    return found


def parse_value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    if text.startswith("{"):
        with suppress(ValueError):
            return json.loads(text)
    for read in (int, float):
        with suppress(ValueError):
            return read(text)
    return text
