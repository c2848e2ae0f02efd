"""What a session knows of one row: how it is to be continued, its state, and what a step added to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor
from transformers import MaxLengthCriteria, StoppingCriteria

from foredraft.device import to_device
from foredraft.errors import ConfigurationError
from foredraft.guesses import ForcedTokens as ForcedTokens
from foredraft.guesses import Guess, RowGuesses
from foredraft.guesses import Prediction as Prediction
from foredraft.logits.logprobs import LogProbs, of_tokens
from foredraft.logits.processors import Pipeline
from foredraft.models.encoder_decoder import Source
from foredraft.stats import RowStats
from foredraft.traces import RoundTrace

LEAST = 256  # ids per row that have room at first


@dataclass(frozen=True)
class RowParameters:
    """How to continue one row.

    Attributes:
        max_new_tokens: most new tokens.
        do_sample: sample; otherwise decode greedily.
        pipeline: logits processors of this row.
        seed: a pair of ints that determines all random draws of the row.
        eos: token ids that end the row. The end token itself is kept.
        criteria: further stopping criteria, called after every committed token with the row's ids, ``[1, L]``, and with its scores so far,
            one ``[1, V]`` per new token, or None where these are not recorded.
        padding: ids that the criteria see in front of the row.
        source: what the encoder reads for the row; None where the model has no encoder.
        logprobs: k, to record the log-probabilities of the row's tokens and of the k most likely tokens at each position; None for none.
        prompt_logprobs: k, to record the same of the prompt, all tokens but its first, for the first :class:`Commit`; None for none. The
            row then reuses no cached beginning, because that has no scores.
        isolation: the row shares cached beginnings only with rows that have the same string here, or None. Users who have different strings
            cannot tell from the time to the first token what others have asked.
        max_draft: how many tokens deep to draft for the row in a round at most; 0 to decode it plainly among rows that draft; None for as
            many as are planned. With the rule ``match`` the text is the same.
        guesses: what knows more of the row's text than a drafter does (:class:`~foredraft.guesses.Guess`), such as a
            :class:`Prediction`. In a round in which one of them says something, that is drafted in place of the drafter's own. With the
            rule ``match`` only, with which the text is the same.
        trace: have every :class:`Commit` tell what the round drafted for the row (:class:`~foredraft.traces.RoundTrace`). Plain
            decoding then makes one pass per round.
    """

    max_new_tokens: int
    do_sample: bool = False
    pipeline: Pipeline = field(default_factory=Pipeline)
    seed: tuple[int, int] = (0, 0)
    eos: frozenset[int] = frozenset()
    criteria: Sequence[StoppingCriteria] = ()
    logprobs: int | None = None
    padding: Sequence[int] = ()
    source: Source | None = None
    isolation: str | None = None
    max_draft: int | None = None
    guesses: Sequence[Guess] = ()
    trace: bool = False
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        most = self.max_draft
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
            raise ConfigurationError(f"max_draft must be a whole number from 0, or None for no limit, got {most!r}")
        if wrong := next((guess for guess in self.guesses if not isinstance(guess, Guess)), None):
            raise ConfigurationError(f"a guess must have a method after(ids, prompt_length), as rows.Prediction has, got {wrong!r}")
        if not (self.isolation is None or isinstance(self.isolation, str)):
            raise ConfigurationError(f"isolation must be a string or None, got {self.isolation!r}")


@dataclass(eq=False)
class SessionRow:
    """A row's state; drafters read it as :class:`foredraft.drafters.base.Row`. ``scores`` and ``logits`` hold ``[1, V]`` per new token
    where they are recorded."""

    slot: int
    ids: list[int]
    prompt_length: int
    parameters: RowParameters
    capacity: int
    stats: RowStats
    key: int
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    logprobs: list[LogProbs] = field(default_factory=list)
    prompt_logprobs: list[LogProbs] = field(default_factory=list)
    guesses: RowGuesses = field(init=False)

    def __post_init__(self) -> None:
        self.guesses = RowGuesses(self.parameters.guesses)

    @property
    def source(self) -> Source | None:
        return self.parameters.source

    @property
    def isolation(self) -> str | None:
        return self.parameters.isolation

    @property
    def begun(self) -> bool:
        """It has new tokens: it was live before, and is read again rather than prefilled."""
        return len(self.ids) > self.prompt_length

    @property
    def remaining(self) -> int:
        return self.capacity - len(self.ids)

    @property
    def room(self) -> int:
        """How deep to draft for it at most: the round adds a token of the target's own."""
        most = self.parameters.max_draft
        return self.remaining - 1 if most is None else min(most, self.remaining - 1)

    @property
    def scored(self) -> int | None:
        """How many tokens at the beginning of the prompt the target need not read any more for the log-probabilities of the next ones; None
        where these are not wanted, or all known."""
        known = sum(map(len, self.prompt_logprobs))
        return None if self.parameters.prompt_logprobs is None or known == self.prompt_length - 1 else known

    def score_prompt(self, first: int, logits: Tensor) -> None:
        """The target has read a piece of the prompt from place ``first`` on, which gave ``logits`` ``[n, V]``."""
        known, top = self.scored, self.parameters.prompt_logprobs
        assert top is not None
        if known is None or first + len(logits) <= known:
            return
        following = self.ids[known + 1 : min(first + len(logits) + 1, self.prompt_length)]
        places = logits[known - first : known - first + len(following)]
        self.prompt_logprobs.append(of_tokens(places, to_device(following, logits.device), top))

    def append(
        self,
        tokens: Sequence[int],
        accepted: int,
        device: torch.device,
        error: Exception | None = None,
        *,
        drafter: str = "",
        drafted: Sequence[int] = (),
    ) -> Commit:
        """Commit ``tokens`` one by one, as plain decoding would, up to the first that ends the row; the first ``accepted`` were drafted by
        ``drafter``, of those ``drafted`` at each depth. Stopping criteria get the text on ``device``; one that raises ends the row. So does
        an ``error``, if the row goes on so far."""
        start, reason, padding = len(self.ids), None, self.parameters.padding
        text = to_device([[*padding, *self.ids, *tokens]], device) if self.parameters.criteria else None
        for token in tokens:
            self.ids.append(token)
            try:
                reason = self._finish_reason(token, None if text is None else text[:, : len(padding) + len(self.ids)])
            except Exception as raised:  # a user's criterion raises what it likes
                reason, error = "error", raised
            if reason:
                break
        reason = reason or (None if error is None else "error")
        kept = self.ids[start:]
        self.stats.finish_reason = reason
        error = error if reason == "error" else None
        accepted = min(accepted, len(kept))
        return Commit(self.slot, kept, accepted, reason, stats=self.stats, error=error, drafter=drafter, drafted_by_depth=drafted)

    def _finish_reason(self, token: int, text: Tensor | None) -> str | None:
        if token in self.parameters.eos:
            return "eos"
        if text is not None:
            scores = tuple(self.scores[: len(self.ids) - self.prompt_length]) or None
            if any(bool(torch.as_tensor(done(text, scores)).any()) for done in self.parameters.criteria):
                return "stop"
        if self.remaining > 0:
            return None
        return "length" if len(self.ids) - self.prompt_length == self.parameters.max_new_tokens else "context"


def read_lengths(criteria: Iterable[StoppingCriteria], length: int) -> tuple[float, list[StoppingCriteria]]:
    """How many new tokens the MaxLengthCriteria among ``criteria`` allow after ``length`` tokens, padding included, and the other criteria.
    They allow at least one, because transformers calls criteria after a token only."""
    criteria = list(criteria)
    limit = min((each.max_length for each in criteria if type(each) is MaxLengthCriteria), default=inf)
    return max(1, limit - length), [each for each in criteria if type(each) is not MaxLengthCriteria]


class CommittedIds:
    """``[R, width]`` committed ids of the live rows on ``device``, with ``room`` for a draft behind. Made when a logits processor first
    reads them, and then kept up to date; made anew, twice as wide, when a row outgrows them."""

    def __init__(self, device: torch.device, *, room: int):
        self.device, self.room = device, room
        self._ids: Tensor | None = None
        self._rows: Sequence[SessionRow] | None = None  # that they are of

    def of(self, rows: Sequence[SessionRow]) -> Tensor:
        if self._ids is None or rows is not self._rows:
            width = min(max(row.capacity for row in rows), max(LEAST, 2 * max(len(row.ids) for row in rows)))
            ids = torch.zeros(len(rows), width + self.room, dtype=torch.long, device="cpu")
            for line, row in zip(ids, rows):
                line[: len(row.ids)] = torch.tensor(row.ids, device="cpu")
            self._ids, self._rows = ids.to(self.device), rows
        return self._ids

    def append(self, rows: Sequence[SessionRow], index: int, tokens: Sequence[int]) -> None:
        """``rows[index]`` has gained ``tokens``."""
        if self._ids is not None and rows is self._rows:
            end = len(rows[index].ids)
            if end + self.room > self._ids.shape[1]:
                self.clear()
                return
            self._ids[index, end - len(tokens) : end] = to_device(list(tokens), self.device)

    def clear(self) -> None:
        """Rows have joined or left."""
        self._ids = self._rows = None


@dataclass(frozen=True)
class Commit:
    """What a step added to one row.

    Attributes:
        tokens: the new ones, the first ``accepted`` of them drafted.
        drafter: the name of the drafter, or of the guess, whose tokens these are.
        drafted_by_depth: how many tokens it drafted for the row at each depth, in all branches; ``drafted`` is their sum.
        guesses_drafted, guessed: how many of these came from one of the row's guesses, and how many of the accepted ones.
        finish_reason: why it is over; None while it is not. A row whose next token cannot be chosen is over as "error".
        error: why it is over as "error".
        logprobs: of the tokens, where the row's parameters ask for them.
        prompt_logprobs: of the prompt's tokens but the first, in the row's first commit, where they ask for that.
        trace: of the round, where they ask for it.
        stats: the counts of the row so far.
    """

    slot: int
    tokens: list[int]
    accepted: int
    finish_reason: str | None
    logprobs: LogProbs | None = None
    stats: RowStats | None = field(default=None, compare=False)
    error: Exception | None = field(default=None, compare=False)
    drafter: str = ""
    drafted_by_depth: Sequence[int] = ()
    guesses_drafted: int = 0
    guessed: int = 0
    prompt_logprobs: LogProbs | None = None
    trace: RoundTrace | None = None

    @property
    def drafted(self) -> int:
        return sum(self.drafted_by_depth)


def successful(commits: list[Commit]) -> list[Commit]:
    """``commits``; for callers whose rows are one call, which fails with the first of them."""
    for commit in commits:
        if commit.error is not None:
            raise commit.error
    return commits
