"""The text of one choice as it grows: what a client may see of it after each step, and what is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from foredraft.detokenizer import Detokenizer
from foredraft.grammars import token_bytes
from foredraft.logits.logprobs import LogProbs
from foredraft.rows import Commit, Prediction
from foredraft.serving.stops import StopStrings
from foredraft.traces import RoundTrace

LEAST = -9999.0  # in place of minus infinity, which JSON does not have; as OpenAI writes it
REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


class TokenNames:
    """What single tokens are called in log-probabilities and rounds."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        try:
            self._known = token_bytes(tokenizer)
        except (ValueError, AttributeError, KeyError):  # neither byte-level BPE nor SentencePiece
            self._known = {}

    def bytes(self, token: int) -> bytes:
        """Those that the token stands for; of a special token, those of its name."""
        found = self._known.get(token)
        return str(self.tokenizer.decode([token], skip_special_tokens=False)).encode() if found is None else found

    def text(self, token: int) -> str:
        """The token's text; ``bytes:\\xe2`` and the like where its bytes are no text alone."""
        found = self.bytes(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{each:02x}" for each in found)


@dataclass(frozen=True)
class Entry:
    """A token with its log-probability, or None where it has none, and the ``top`` tokens in its place with theirs; the token's text
    begins and ends at these characters of the choice's text."""

    token: int
    logprob: float | None
    top: Sequence[tuple[int, float]]
    start: int
    end: int


class Prompt:
    """A prompt, whose text is needed where it is repeated. The choices of one prompt share it."""

    def __init__(self, tokenizer: Any, ids: Sequence[int]):
        self.tokenizer, self.ids = tokenizer, ids

    @cached_property
    def text(self) -> str:
        return str(self.tokenizer.decode(self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Where the text of each token begins and ends."""
        reader = Detokenizer(self.tokenizer)
        ends = [0, *accumulate(len(reader.feed([token])) for token in self.ids)]
        return list(pairwise(ends))


@dataclass(frozen=True)
class Piece:
    """What a step adds to what the client sees."""

    text: str
    tokens: Sequence[int]
    entries: Sequence[Entry] = ()
    round: RoundTrace | None = None
    finish_reason: str | None = None

    @property
    def empty(self) -> bool:
        return not (self.text or self.entries or self.round or self.finish_reason)


@dataclass(eq=False)
class Counts:
    """What was drafted for a choice, in rounds after the prompt was read."""

    drafted: int = 0
    accepted: int = 0
    guesses_drafted: int = 0  # tokens of a prediction
    guessed: int = 0  # how many of these were accepted
    rounds: Counter[int] = field(default_factory=Counter)  # with a draft, by how many of its tokens were accepted

    def add(self, commit: Commit, tokens: int) -> None:
        """So many ``tokens`` of ``commit`` count; a stop string leaves out the rest."""
        self.drafted += commit.drafted
        self.accepted += commit.accepted
        if commit.drafter == Prediction.name:
            self.guesses_drafted += commit.guesses_drafted
            self.guessed += min(commit.guessed, tokens)
        if commit.drafted:
            self.rounds[commit.accepted] += 1


class Writer:
    """One choice.

    A token counts up to the one that completes a stop string. The token that ends a text counts too, and has a log-probability, but no
    text. Where a stop string was found, tokens that lie in it alone have no entry.

    Args:
        prompt: what the text follows.
        stops: stop strings, which count if they are complete behind the first ``min_tokens`` tokens.
        logprobs: entries are wanted.
        echo: the text begins with the prompt; ``only_echo``: and ends there.
        keep: special tokens that are text.
    """

    def __init__(
        self,
        prompt: Prompt,
        stops: Sequence[str],
        *,
        logprobs: bool,
        min_tokens: int = 0,
        echo: bool = False,
        only_echo: bool = False,
        keep: Collection[str] = (),
    ):
        self.prompt, self.logprobs, self.only_echo = prompt, logprobs, only_echo
        self.stops, self.min_tokens = StopStrings(stops), min_tokens
        self.tokens: list[int] = []
        self.counts = Counts()
        self.finish_reason: str | None = None
        self._detokenizer = Detokenizer(prompt.tokenizer, prompt.ids, keep)
        self._echo = echo
        self._decoded = 0  # characters so far, held back ones included
        self._shown = 0
        self._entries: list[Entry] = []  # that are held back

    @property
    def over(self) -> bool:
        return self.finish_reason is not None

    @property
    def stop_reason(self) -> str | None:
        return self.stops.hit

    def add(self, commit: Commit) -> Piece:
        """What ``commit`` adds to what may be seen."""
        echoed = self._begin(commit) if self._echo else ""
        if self.only_echo:
            self.finish_reason = "length"
            return Piece(echoed, (), self._released(), finish_reason=self.finish_reason)
        before = len(self.tokens)
        text = self._read(commit)
        self.counts.add(commit, len(self.tokens) - before)
        if self.stops.hit is not None:
            self.finish_reason = "stop"
        elif commit.finish_reason is not None:
            self.finish_reason = REASONS.get(commit.finish_reason, commit.finish_reason)
            text += self._show(self._detokenizer.flush()) + self.stops.flush()
        self._shown += len(text)
        return Piece(echoed + text, self.tokens[before:], self._released(), commit.trace, self.finish_reason)

    def _read(self, commit: Commit) -> str:
        """The text of the commit's tokens, as far as it can be shown."""
        spoken = len(commit.tokens) - (commit.finish_reason == "eos")
        text, entries = "", self._numbers(commit.logprobs)
        for index, token in enumerate(commit.tokens):
            self.tokens.append(token)
            start = self._decoded
            text += self._show(self._detokenizer.feed([token]) if index < spoken else "")
            if entries:
                self._entries.append(Entry(token, *entries[index], start, self._decoded))
            if self.stops.hit is not None:
                break
        return text

    def _show(self, text: str) -> str:
        self._decoded += len(text)
        return self.stops.feed(text, counts=len(self.tokens) > self.min_tokens)

    def _released(self) -> list[Entry]:
        """Entries whose text the client sees, once it sees all of it."""
        if self.stops.hit is not None:
            released = [each for each in self._entries if each.start < self._shown]
            self._entries = []
            return released
        if self.over:
            released, self._entries = self._entries, []
            return released
        count = next((index for index, each in enumerate(self._entries) if each.end > self._shown), len(self._entries))
        released, self._entries = self._entries[:count], self._entries[count:]
        return released

    def _begin(self, commit: Commit) -> str:
        """The prompt's own text, with entries for its tokens; the first has no log-probability."""
        self._echo = False
        if self.logprobs:
            numbers = [(None, ()), *self._numbers(commit.prompt_logprobs)]
            for token, (logprob, top), span in zip(self.prompt.ids, numbers, self.prompt.spans):
                self._entries.append(Entry(token, logprob, top, *span))
        self._decoded = self._shown = len(self.prompt.text)
        return self.prompt.text

    @staticmethod
    def _numbers(logprobs: LogProbs | None) -> list[tuple[float | None, Sequence[tuple[int, float]]]]:
        """Per token its own log-probability, and the most likely tokens with theirs."""
        if logprobs is None:
            return []
        lines = zip(logprobs.chosen.tolist(), logprobs.ids.tolist(), logprobs.values.tolist())
        return [(max(own, LEAST), [(token, max(value, LEAST)) for token, value in zip(ids, values)]) for own, ids, values in lines]


def round_json(trace: RoundTrace, names: TokenNames) -> dict[str, Any]:
    """A round as the page draws it."""
    bonus = None if trace.bonus is None else {"token": trace.bonus, "text": names.text(trace.bonus), "p": trace.bonus_p}
    return {
        "shape": trace.shape,
        "tokens": trace.tokens,
        "texts": [names.text(token) for token in trace.tokens],
        "parents": trace.parents,
        "drafters": trace.drafters,
        "p": trace.p,
        "q": trace.q,
        "path": trace.path,
        "accepted": len(trace.path) - 1,
        "bonus": bonus,
        "ended": trace.ended,
    }
