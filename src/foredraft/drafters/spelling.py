"""What a draft model with another tokenizer would write next, as a distribution over the target's tokens.

Token by token (TLI, Timor et al. 2025), the draft proposes what both vocabularies have. But a token of the target may be several of the
draft's, such as a line break with its indentation, and the text may end within one of the draft's. So three things are added for chains:

- Where the text likely ends within a token of the draft, only tokens count that spell its end and go on.
- Below its likeliest token, if a token of the target may go on there, the draft looks one token ahead. The probability of both goes to
  the token that the target would begin their text with.
- A drafted token may leave the draft ahead of the target's text. Then the next one begins with what it has written already.

Where the draft looks depends on the text and on the tokens drafted before. So the token that is drawn has the distribution that is
reported, and every rule stays exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.device import to_device
from foredraft.drafters.vocabularies import Foreign, Reading
from foredraft.logits.sampler import widened
from foredraft.target import Target

LIKELY = 0.25  # probability of the draft's likeliest token from which on it looks below it
MOST = 64  # likeliest tokens that are joined with text before them


@dataclass(eq=False)
class Branch:
    """What the draft says after some text.

    Attributes:
        said: bytes behind the target's text that the draft has read.
        logits: ``[V']`` log-probabilities of what follows.
        begun: bytes of the token that follows which the target's text has already.
        ways: the draft's likely tokens below: how likely each is, what the target's first token is then, and how many bytes that has.
    """

    said: bytes
    logits: Tensor
    begun: int = 0
    ways: list[tuple[float, int, int, int]] = field(default_factory=list)  # probability, token of the draft, of the target, its bytes

    def find(self, foreign: Foreign) -> None:
        found = self.logits.topk(min(MOST, len(self.logits)))
        for score, token in zip(found.values.exp().tolist(), found.indices.tolist()):
            first = foreign.vocabularies.target.first(self.said + foreign.vocabularies.draft.bytes.get(token, b"")[self.begun :])
            if first is not None and score > 0:
                self.ways.append((score, token, *first))

    def only(self, token: int) -> Tensor:
        """``logits`` without the ways that do not begin with ``token`` of the target."""
        others = [way[1] for way in self.ways if way[2] != token]
        return self.logits.index_fill(0, to_device(others, self.logits.device), -math.inf) if others else self.logits


class Writer:
    """How the draft goes on in one row.

    Attributes:
        back: the draft reads so many tokens less than all of the row's text.
        fed: what it has read below.
        next: what it has to read before it can say more.
        extra: tokens at the end of its cache that it looked at in vain.
    """

    def __init__(self, foreign: Foreign, reading: Reading, scores: Tensor, room: float):
        self._foreign, self._reading, self._room = foreign, reading, room
        self.fed: list[int] = []
        self.next: int | None = None
        self.extra = 0
        self.back, begun, logits = foreign.covering(reading, scores)
        self._here: Branch | None = Branch(b"", logits, begun)
        self._below: Branch | None = None
        self._seen = -1  # the token that was looked below
        self._whole: Tensor | None = None

    def ahead(self) -> int | None:
        """The token to look below."""
        here, self._below, self._seen = self._here, None, -1
        if here is None or self._full(2):
            return None
        score, token = here.logits.max(-1)
        word = self._foreign.vocabularies.draft.bytes.get(int(token), b"")[here.begun :]
        likely = float(score) >= math.log(LIKELY) and word and self._foreign.vocabularies.target.unfinished(here.said + word)
        if likely:
            self._seen = int(token)
        return self._seen if likely else None

    def look(self, logits: Tensor) -> None:
        here = self._here
        assert here is not None
        word = self._foreign.vocabularies.draft.bytes[self._seen][here.begun :]
        self._below = Branch(here.said + word, logits + here.logits[self._seen])
        self._below.find(self._foreign)
        here.logits = here.logits.index_fill(0, to_device([self._seen], here.logits.device), -math.inf)
        self.extra = 1

    def offered(self) -> Tensor:
        """``[V]`` log-probabilities of the target's next token; -inf everywhere where the draft does not go on."""
        here, foreign = self._here, self._foreign
        if here is None:
            return torch.full((len(foreign.known),), -math.inf, device=foreign.intersection.known.device)
        if here.said or here.begun:
            here.find(foreign)
            q = here.logits.new_zeros(len(foreign.known))
        else:
            q = foreign.intersection.scattered(here.logits).exp()
            self._whole = q.clone()
        ways = [way for branch in (here, self._below) if branch is not None for way in branch.ways]
        tokens = to_device([way[2] for way in ways], q.device)
        return q.index_add(0, tokens, torch.tensor([way[0] for way in ways], dtype=q.dtype, device=q.device)).log()

    def take(self, token: int) -> None:
        """The target's next token is ``token``."""
        here, below, whole = self._here, self._below, self._whole
        self._here, self._whole = None, None
        if here is None:
            return
        chances = [sum(way[0] for way in branch.ways if way[2] == token) if branch is not None else 0.0 for branch in (here, below)]
        if whole is not None:
            chances[0] = float(whole[token])
        if max(chances) <= 0:
            return
        branch = here
        if below is not None and chances[1] > chances[0]:
            branch, self.extra = below, 0
            self.fed.append(self._seen)
        word = self._foreign.vocabularies.target.bytes.get(token, b"")
        if branch.said and len(word) <= len(branch.said):
            self._here = Branch(branch.said[len(word) :], branch.only(token).log_softmax(-1))
            return
        if branch is here and whole is not None:
            self.next, ahead = self._foreign.token(token), b""
        else:
            self.next = max(way for way in branch.ways if way[2] == token)[1]
            spelt = branch.said + self._foreign.vocabularies.draft.bytes[self.next][branch.begun :]
            ahead = spelt[len(word) :]
        if self._full(1):
            self.next = None
            return
        self._here = Branch(ahead, branch.logits)

    def read(self, logits: Tensor) -> None:
        assert self._here is not None and self.next is not None
        self.fed.append(self.next)
        self._here.logits, self.next = logits, None

    def _full(self, more: int) -> bool:
        return len(self._reading.ids) - self.back + len(self.fed) + more > self._room


class Spelling:
    """A chain that a draft ``model`` with another tokenizer writes below ``rows``, which are in its tokens.

    Args:
        scores: per row ``[n, V']`` logits at the last tokens that the model has read.
    """

    def __init__(self, foreign: Foreign, model: Target, rows: Sequence[Reading], scores: Sequence[Tensor]):
        self._model, self._rows = model, rows
        room = math.inf if model.trained is None else model.trained
        self._writers = [Writer(foreign, row, widened(each).log_softmax(-1), room) for row, each in zip(rows, scores)]
        model.rewind([length - writer.back for length, writer in zip(model.lengths, self._writers)])

    def after(self, path: Sequence[Tensor]) -> Tensor:
        """``[R, V]`` log-probabilities after a ``path`` of the target's tokens ``[R]``, the root first; they grow by one token."""
        writers = self._writers
        if len(path) > 1:
            for writer, token in zip(writers, path[-1].tolist()):
                writer.take(token)
            self._model.rewind([length - writer.extra for length, writer in zip(self._model.lengths, writers)])
            for writer, logits in self._feed([writer.next for writer in writers]):
                writer.read(logits)
        for writer in writers:
            writer.extra = 0
        for writer, logits in self._feed([writer.ahead() for writer in writers]):
            writer.look(logits)
        return torch.stack([writer.offered() for writer in writers])

    def _feed(self, tokens: Sequence[int | None]) -> list[tuple[Writer, Tensor]]:
        """The rows that have a token to read, and ``[V']`` log-probabilities after it."""
        if all(token is None for token in tokens):
            return []
        lengths = list(self._model.lengths)
        logits = self._model.advance(to_device([token or 0 for token in tokens], self._model.device))
        self._model.rewind([length + (token is not None) for length, token in zip(lengths, tokens)])
        found = zip(self._writers, widened(logits).log_softmax(-1), tokens)
        return [(writer, each) for writer, each, token in found if token is not None]

    def end(self) -> None:
        """The draft is over: the rows remember what the model has read."""
        for row, writer in zip(self._rows, self._writers):
            row.drafted(writer.fed, writer.back)
