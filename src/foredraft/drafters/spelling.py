"""What a draft model with another tokenizer would write next, as a distribution over the target's tokens.

Token by token (TLI, Timor et al. 2025), the draft proposes tokens that are in both vocabularies. But a token of the target may be several
of the draft's, such as a line break with its indentation, and the text may end within one of the draft's. So chains have more:

- Where the text likely ends within a token of the draft, only those of its tokens are used that begin with that end and are longer.
- After its likeliest token, if the target has longer tokens that begin with it, the draft looks one token ahead. The product of both
  probabilities goes to the token that the target would begin their text with.
- A drafted token may leave the draft ahead of the target's text. Then the next one begins with what the draft has written already.

Where the draft looks depends only on the text and on the tokens drafted before. So the token that is drawn has the distribution that is
reported, and every rule stays exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.device import to_device
from foredraft.drafters.foreign import Foreign
from foredraft.drafters.vocabularies import Reading
from foredraft.logits.sampler import widened
from foredraft.target import Target

LIKELY = 0.25  # probability of the draft's likeliest token from which on it looks ahead
MOST = 64  # likeliest tokens that are joined with text before them


@dataclass(eq=False)
class Branch:
    """What the draft says after some text.

    Attributes:
        said: what the draft has read beyond the target's text.
        logits: ``[V']`` log-probabilities of the draft's next token.
        begun: how many bytes of that token the target's text has already.
        ways: the likeliest next tokens: the probability of each, the token, and the target's first token if it follows.
    """

    said: bytes
    logits: Tensor
    begun: int = 0
    ways: list[tuple[float, int, int]] = field(default_factory=list)

    def find(self, foreign: Foreign) -> None:
        words = foreign.vocabularies
        found = self.logits.topk(min(MOST, len(self.logits)))
        for likely, token in zip(found.values.exp().tolist(), found.indices.tolist()):
            first = words.target.first(self.said + words.draft.bytes.get(token, b"")[self.begun :])
            if first is not None and first < len(foreign.known) and likely > 0:
                self.ways.append((likely, token, first))

    def chance(self, token: int) -> float:
        return sum(likely for likely, _, first in self.ways if first == token)

    def only(self, token: int) -> Tensor:
        """``logits`` without the ways that do not begin with ``token`` of the target."""
        others = [way for _, way, first in self.ways if first != token]
        return self.logits.index_fill(0, torch.tensor(others, dtype=torch.long), -math.inf).log_softmax(-1)


class Writer:
    """How the draft goes on in one row, on the host.

    Attributes:
        back: how many of the last tokens of the row's text the draft does not read.
        fed: what it has read in their place and since.
        next: the token that it has to read before it can say more.
        extra: how many tokens are to be removed from the end of its cache, because it looked ahead in vain.
    """

    def __init__(self, foreign: Foreign, reading: Reading, scores: Tensor, room: float):
        self._foreign, self._reading, self._room = foreign, reading, room
        self.fed: list[int] = []
        self.next: int | None = None
        self.extra = 0
        self.back, begun, logits = foreign.covering(reading, scores)
        self._here: Branch | None = Branch(b"", logits, begun)
        self._ahead: tuple[int, Branch] | None = None  # the token that was looked at, and what follows it
        self._shared: Tensor | None = None  # [V] log-probabilities of the tokens that both know, where the draft is not ahead of the text

    def looks(self) -> int | None:
        """The token after which to look ahead."""
        here, self.extra = self._here, 0
        if here is None or self._full(2):
            return None
        likely, token = here.logits.max(-1)
        words = self._foreign.vocabularies
        word = words.draft.bytes.get(int(token), b"")[here.begun :]
        return int(token) if float(likely) >= math.log(LIKELY) and word and words.target.unfinished(here.said + word) else None

    def look(self, token: int, logits: Tensor) -> None:
        """It has read ``token``, with ``logits`` after it."""
        here = self._here
        assert here is not None
        ahead = Branch(here.said + self._foreign.vocabularies.draft.bytes[token][here.begun :], logits + here.logits[token])
        ahead.find(self._foreign)
        self._ahead, self.extra = (token, ahead), 1
        left = max(0.0, math.exp(here.logits[token]) - sum(likely for likely, _, _ in ahead.ways))  # whatever follows else
        here.logits = here.logits.index_fill(0, torch.tensor([token]), math.log(left) if left > 0 else -math.inf)

    def offered(self) -> Tensor:
        """``[V]`` log-probabilities of the target's next token; -inf everywhere where the draft does not go on."""
        here, foreign = self._here, self._foreign
        if here is None:
            return torch.full((len(foreign.known),), -math.inf)
        if here.said or here.begun:
            here.find(foreign)
            q = here.logits.new_full((len(foreign.known),), -math.inf)
        else:
            q = foreign.on_host.scattered(here.logits)
            self._shared = q.clone()
        chances: dict[int, float] = {}
        for branch in (here, *(() if self._ahead is None else self._ahead[1:])):
            for likely, _, first in branch.ways:
                chances[first] = chances.get(first, 0.0) + likely
        tokens = torch.tensor(list(chances), dtype=torch.long)
        q[tokens] = torch.logaddexp(q[tokens], torch.tensor(list(chances.values()), dtype=q.dtype).log())
        return q

    def take(self, token: int) -> None:
        """The target's next token is ``token``."""
        here, seen, shared = self._here, self._ahead, self._shared
        self._here = self._ahead = self._shared = None
        if here is None:
            return
        word = self._foreign.vocabularies.target.bytes.get(token, b"")
        likely = here.chance(token) if shared is None else math.exp(shared[token])
        branch = here
        if seen is not None and seen[1].chance(token) > likely:
            branch, likely, self.extra = seen[1], seen[1].chance(token), 0
            self.fed.append(seen[0])
        if likely == 0:
            return
        if branch.said and len(word) <= len(branch.said):
            self._here = Branch(branch.said[len(word) :], branch.only(token))
        elif self._full(1):
            return
        elif branch is here and shared is not None:
            self.next, self._here = int(self._foreign.on_host.known[token]), Branch(b"", branch.logits)
        else:
            _, self.next, _ = max(way for way in branch.ways if way[2] == token)  # the likeliest
            spelt = branch.said + self._foreign.vocabularies.draft.bytes[self.next][branch.begun :]
            self._here = Branch(spelt[len(word) :], branch.logits)

    def read(self, logits: Tensor) -> None:
        """It has read ``next``, with ``logits`` after it."""
        assert self._here is not None and self.next is not None
        self.fed.append(self.next)
        self._here.logits, self.next = logits, None

    def stop(self) -> None:
        self._here = self._ahead = self._shared = None

    def _full(self, more: int) -> bool:
        return len(self._reading.ids) - self.back + len(self.fed) + more > self._room


class Spelling:
    """A chain that a draft ``model`` with another tokenizer writes after each of ``rows``, which are in its tokens.

    Args:
        scores: per row ``[n, V']`` logits at the last n tokens of its text, over the V' tokens of the draft.
        limits: how many tokens of the target each row drafts at most.
    """

    def __init__(self, foreign: Foreign, model: Target, rows: Sequence[Reading], scores: Sequence[Tensor], limits: Sequence[int]):
        self._model, self._rows, self._limits = model, rows, limits
        room = math.inf if model.trained is None else model.trained
        self._writers = [Writer(foreign, row, log_probabilities(each), room) for row, each in zip(rows, scores)]
        model.rewind([length - writer.back for length, writer in zip(model.lengths, self._writers)])

    def after(self, path: Sequence[Tensor]) -> Tensor:
        """``[R, V]`` log-probabilities after a ``path`` of the target's tokens ``[R]``, the root first; they grow by one token."""
        writers = self._writers
        for writer, token, limit in zip(writers, path[-1].tolist(), self._limits):
            if len(path) > limit:
                writer.stop()
            elif len(path) > 1:
                writer.take(token)
        if len(path) > 1:
            self._model.rewind([length - writer.extra for length, writer in zip(self._model.lengths, writers)])
            for writer, _, logits in self._feed([writer.next for writer in writers]):
                writer.read(logits)
        for writer, token, logits in self._feed([writer.looks() for writer in writers]):
            writer.look(token, logits)
        return torch.stack([writer.offered() for writer in writers])

    def _feed(self, tokens: Sequence[int | None]) -> list[tuple[Writer, int, Tensor]]:
        """The rows that have a token to read, that token, and ``[V']`` log-probabilities after it."""
        if all(token is None for token in tokens):
            return []
        lengths = list(self._model.lengths)
        logits = log_probabilities(self._model.advance(to_device([token or 0 for token in tokens], self._model.device)))
        self._model.rewind([length + (token is not None) for length, token in zip(lengths, tokens)])
        return [(writer, token, each) for writer, token, each in zip(self._writers, tokens, logits) if token is not None]

    def end(self) -> None:
        """The draft is over: the rows remember what the model has read."""
        for row, writer in zip(self._rows, self._writers):
            row.drafted(writer.fed, writer.back)


def log_probabilities(logits: Tensor) -> Tensor:
    """Log-probabilities on the host, where tokens are told apart one by one."""
    return widened(logits.cpu()).log_softmax(-1)
