"""What is known about the logits processors of `transformers`: what each one reads, how it is rebased to one row, which are refused.

Attribute names are those of `transformers.generation.logits_process`; a class of that module that is not listed here is refused
rather than guessed at, because it may hold lengths that count padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor

from foredraft.errors import ConfigurationError
from foredraft.grammars import Grammar

from .grammar_masks import Walk, mask_nodes
from .histories import NodeHistories
from .nucleus import top_p
from .penalties import LogitBias, PresenceFrequencyPenalty, penalise_nodes

Processor = Callable[[Tensor, Tensor], Tensor]
Reads = Literal["nothing", "length", "tokens"]
MODULE = "transformers.generation.logits_process"


@dataclass(frozen=True)
class Row:
    """Where one row sits in the padded batch that `transformers` prepared the processors for."""

    index: int
    rows: int
    length: int  # of its prompt, unpadded
    padding: int
    min_new_tokens: int | None
    forced_bos: bool
    prompt: Tensor | None  # [length], where the row is padded
    shown: tuple[int, ...]  # ids in place of the padding
    sourced: bool = False  # the encoder_* penalties hold another text than the prompt

    def source(self, batch: int) -> int:
        """The index of this row in data held for ``batch`` rows, before `num_return_sequences` repeated them."""
        if self.rows % batch:
            raise ConfigurationError(f"a processor holds the ids of {batch} prompts, which do not divide the batch of {self.rows} rows")
        return self.index // (self.rows // batch)


@dataclass(frozen=True)
class Padding:
    """How histories of at least ``least`` tokens can be padded on the left without changing any score.

    Attributes:
        least: shorter ones take a call per length.
        fill: -1, which is no token, or None for the history's own last token, where every token is looked up in the scores.
    """

    least: int
    fill: int | None


@dataclass(frozen=True)
class Kind:
    """What is known about one processor class of `transformers`.

    Attributes:
        reads: what it looks at: nothing of the history, only its length, or its tokens.
        rebase: attributes to replace for one row; None means that every row can share the processor.
        active: for ``reads="length"``, whether it changes any score at this length.
        alike: for ``reads="length"``, it does the same at all lengths at which it is active, so one call serves them.
        padding: for ``reads="tokens"``, how one call can serve histories of different lengths; None where it cannot.
        guarded: it calls the user's code, so it sees one history at a time, padded as in the batch, and only histories that decoding
            can reach.
        strict: it raises on NaN scores.
        call: a quicker way to the same scores, called with the processor and its arguments.
        bans: tokens whose scores become -inf while it is active, which is all that it does.
        begin: makes the processor that keeps the state of one row, from the processor and the length of the row's prompt.
        at_nodes: changes scores ``[R * N, V]`` in place, called with (processor, cells) of each row, histories and scores.
        library: its time is that of another library, which is told apart.
    """

    reads: Reads
    rebase: Callable[[Any, Row], dict[str, Any]] | None = None
    active: Callable[[Any, int], bool] | None = None
    alike: bool = False
    padding: Callable[[Any], Padding | None] | None = None
    guarded: bool = False
    strict: bool = False
    call: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    bans: Callable[[Any], Tensor] | None = None
    begin: Callable[[Any, int], Any] | None = None
    at_nodes: Callable[[Sequence[tuple[Any, Sequence[int]]], NodeHistories, Tensor], None] | None = None
    library: bool = False


def shifted(name: str) -> Callable[[Any, Row], dict[str, Any]]:
    """Rebase a length counted in the padded batch."""
    return lambda processor, row: {name: getattr(processor, name) - row.padding}


def min_length(processor: Any, row: Row) -> dict[str, Any]:
    """`generate` turns min_new_tokens into a padded min_length; a min_length of the user's own counts the row as it is."""
    derived = row.min_new_tokens is not None and processor.min_length == row.min_new_tokens + row.length + row.padding
    return {"min_length": processor.min_length - row.padding if derived else processor.min_length}


def begin_index(processor: Any, row: Row) -> dict[str, Any]:
    """The first new position; alone, a row of one token with a forced BOS starts one later, which its padding hid."""
    index = processor.begin_index - row.padding
    return {"begin_index": index + (row.padding > 0 and index == row.length == 1 and row.forced_bos)}


def ignored_prompt(processor: Any, row: Row) -> dict[str, Any]:
    """`generate` passes the left padding of every row as a tensor, so nothing of an unpadded row is left to ignore."""
    ignored = processor.prompt_ignore_length
    if not isinstance(ignored, Tensor):
        return {}
    if ignored.shape[0] != row.rows:
        raise ConfigurationError(f"prompt_ignore_length holds {ignored.shape[0]} lengths for a batch of {row.rows} rows")
    return {"prompt_ignore_length": max(int(ignored[row.index]) - row.padding, 0) or None}


def encoder_ids(processor: Any, row: Row) -> dict[str, Any]:
    """The row's own prompt; ids that are not the padded prompt are the user's own and stay."""
    ids = processor.encoder_input_ids[row.source(processor.encoder_input_ids.shape[0])]  # [L]
    if row.prompt is not None and row.padding and not row.sourced and len(ids) == row.length + row.padding:
        prompt = row.prompt.to(ids.device)
        if torch.equal(ids[row.padding :], prompt) or torch.equal(ids[: row.length], prompt):
            ids = prompt
    return {"encoder_input_ids": ids[None]}


def encoder_ngrams(processor: Any, row: Row) -> dict[str, Any]:
    """The n-grams of the row's own prompt; those that are not of the padded prompt are the user's own and stay."""
    ngrams = processor.generated_ngrams[row.source(processor.batch_size)]
    whole = row.length + row.padding - processor.ngram_size + 1
    if row.prompt is not None and row.padding and not row.sourced and sum(map(len, ngrams.values())) == whole:
        own = type(processor)(processor.ngram_size, row.prompt[None]).generated_ngrams[0]
        if all(set(last) <= set(ngrams.get(prefix, ())) for prefix, last in own.items()):
            ngrams = own
    return {"batch_size": 1, "generated_ngrams": [ngrams]}


@dataclass(frozen=True)
class RowPrefix:
    """One row's `prefix_allowed_tokens_fn`: it is asked with the row's batch id whatever group the row is called in."""

    allowed: Callable[[int, Tensor], list[int]]
    batch_id: int

    def __call__(self, _: int, sentence: Tensor) -> list[int]:
        tokens = self.allowed(self.batch_id, sentence)
        if len(tokens) == 0:
            raise ValueError(f"`prefix_allowed_tokens_fn` returned an empty list for batch ID {self.batch_id}: nothing may follow")
        return tokens


def row_prefix(processor: Any, row: Row) -> dict[str, Any]:
    beams = processor._num_beams or 1
    return {"_prefix_allowed_tokens_fn": RowPrefix(processor._prefix_allowed_tokens_fn, row.index // beams), "_num_beams": 1}


def unordered(processor: Any) -> Padding | None:
    """Which tokens occur is all that counts, unless the first few are to be ignored."""
    return Padding(1, None) if processor.prompt_ignore_length is None else None


def ngrams(processor: Any) -> Padding | None:
    """An n-gram that holds -1 is never met; a single -1 would be taken for the last token of the vocabulary."""
    return Padding(processor.ngram_size, -1) if processor.ngram_size > 1 else None


def sequences(processor: Any) -> Padding:
    """Versions differ at histories that are as short as what comes before a sequence's last token."""
    return Padding(max(map(len, processor.sequence_bias)), -1)


FREE, END = Kind("nothing"), attrgetter("eos_token_id")
BIASED = Kind("tokens", lambda processor, row: {"prepared_bias_variables": False}, padding=sequences)  # caches stay off the caller's
KNOWN: dict[str, Kind] = {
    "TemperatureLogitsWarper": FREE,
    "TopKLogitsWarper": FREE,
    "TopPLogitsWarper": Kind("nothing", call=top_p),
    "TopHLogitsWarper": Kind("nothing", strict=True),
    "MinPLogitsWarper": FREE,
    "TypicalLogitsWarper": FREE,
    "EpsilonLogitsWarper": FREE,
    "EtaLogitsWarper": Kind("nothing", strict=True),
    "SuppressTokensLogitsProcessor": Kind("nothing", bans=attrgetter("suppress_tokens")),
    "InfNanRemoveLogitsProcessor": FREE,
    "LogitNormalization": FREE,
    "EncoderRepetitionPenaltyLogitsProcessor": Kind("nothing", encoder_ids),
    "MinLengthLogitsProcessor": Kind("length", min_length, lambda p, length: length < p.min_length, alike=True, bans=END),
    "MinNewTokensLengthLogitsProcessor": Kind(
        "length",
        shifted("prompt_length_to_skip"),
        lambda p, length: length - p.prompt_length_to_skip < p.min_new_tokens,
        alike=True,
        bans=END,
    ),
    "ForcedBOSTokenLogitsProcessor": Kind("length", None, lambda p, length: length == 1),
    "ForcedEOSTokenLogitsProcessor": Kind("length", shifted("max_length"), lambda p, length: length == p.max_length - 1),
    "ExponentialDecayLengthPenalty": Kind("length", shifted("regulation_start"), lambda p, length: length > p.regulation_start),
    "SuppressTokensAtBeginLogitsProcessor": Kind(
        "length", begin_index, lambda p, length: length == p.begin_index, bans=attrgetter("begin_suppress_tokens")
    ),
    "RepetitionPenaltyLogitsProcessor": Kind("tokens", ignored_prompt, padding=unordered),
    "NoRepeatNGramLogitsProcessor": Kind("tokens", padding=ngrams),
    "EncoderNoRepeatNGramLogitsProcessor": Kind("tokens", encoder_ngrams, padding=ngrams),
    "SequenceBiasLogitsProcessor": BIASED,
    "NoBadWordsLogitsProcessor": BIASED,
    "WhisperTimeStampLogitsProcessor": Kind("tokens", shifted("begin_index")),
    "PrefixConstrainedLogitsProcessor": Kind("tokens", row_prefix, guarded=True),
}
FOREIGN = Kind("tokens", guarded=True)
OWN: dict[type, Kind] = {
    Grammar: Kind("tokens", begin=Walk.begin, at_nodes=mask_nodes, library=True),
    PresenceFrequencyPenalty: Kind("tokens", begin=PresenceFrequencyPenalty.begin, at_nodes=penalise_nodes),
    LogitBias: FREE,
}

SPEECH = "it belongs to a speech or audio model; use that model's own generate, without Foredraft"
GUIDANCE = "guidance needs a second pass of the model for every token; leave guidance_scale unset, or generate without Foredraft"
WATERMARK = "a watermark is drawn token by token, in the order of the calls; leave watermarking_config unset, or generate without Foredraft"
REFUSED: dict[str, str] = {
    "WhisperNoSpeechDetection": SPEECH,  # Whisper's own generate adds it, and then it is no processor of rows
    "BarkEosPrioritizerLogitsProcessor": SPEECH,
    "AlternatingCodebooksLogitsProcessor": SPEECH,
    "DiaClassifierFreeGuidanceLogitsProcessor": SPEECH,
    "DiaEOSChannelFilterLogitsProcessor": SPEECH,
    "DiaEOSDelayPatternLogitsProcessor": SPEECH,
    "HiggsAudioV2DelayPatternLogitsProcessor": SPEECH,
    "VibeVoiceTokenConstraintProcessor": SPEECH,
    "ClassifierFreeGuidanceLogitsProcessor": GUIDANCE,
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": GUIDANCE,
    "WatermarkLogitsProcessor": WATERMARK,
    "SynthIDTextWatermarkLogitsProcessor": WATERMARK,
}


# A matcher per batch index, fed one token per call: no function of the histories.
STATEFUL = ("xgrammar.contrib.hf", "outlines.processors.base_logits_processor")


def kind_of(processor: Any) -> Kind:
    """What is known about ``processor``; a ConfigurationError names its class if it cannot be supported."""
    if own := next((kind for cls, kind in OWN.items() if isinstance(processor, cls)), None):
        return own
    name = type(processor).__name__
    for cls in type(processor).__mro__:
        if cls.__module__ in STATEFUL:
            raise ConfigurationError(
                f"{name} of {cls.__module__.partition('.')[0]} is not supported: it keeps its state by batch index and order of calls; "
                "use json_schema=, regex=, grammar= or foredraft.Grammar instead (docs/constrained-decoding.md)"
            )
        if cls.__module__.startswith("transformers.") and cls.__name__ in REFUSED:
            raise ConfigurationError(f"{name} is not supported: {REFUSED[cls.__name__]}")
    if type(processor).__module__ == MODULE:
        if name not in KNOWN:
            raise ConfigurationError(f"{name} is not supported: this version of Foredraft does not know it; use model.generate")
        return KNOWN[name]
    if not callable(processor):
        raise TypeError(f"a logits processor must be callable with (input_ids, scores), got {name}")
    extra = list(inspect.signature(processor.__call__).parameters)[2:]
    if extra:
        raise ConfigurationError(f"{name} is not supported: it asks for {', '.join(extra)} besides input_ids and scores")
    return FOREIGN


def warpers(temperature: float, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None) -> list[Any]:
    """Those of `transformers`, in its order, for a row that samples. None leaves one out, as does the temperature 1."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    classes = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
    given = zip(classes, (None if temperature == 1 else temperature, top_k, top_p, min_p))
    return [warper(value) for warper, value in given if value is not None]
