"""Plain decoding ahead of its rounds.

A pass reads hundreds of megabytes of weights and leaves nothing of Python in the CPU's caches, so what a round does besides takes several
times as long as it should. Where no drafts are planned, several passes are made in one call of a kernel, and the rounds find their logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from foredraft.models.pages import PAGE

SECONDS = 0.1  # that a call should take at most: until it is over nothing is streamed, and no row joins
MOST = 16  # passes of a call


class Ahead:
    """Logits of the only row, from passes that were made ahead of their rounds.

    Attributes:
        pace: seconds of a pass; None before the first.
    """

    def __init__(self) -> None:
        self.pace: float | None = None
        self.drop()

    def drop(self) -> None:
        """Another pass is made, or rows change."""
        self._start, self._tokens = 0, list[int]()
        self._logits: Tensor | None = None
        self._maker: Any = None

    def passes(self, length: int, asked: int) -> int:
        """How many to make in one call behind ``length`` cached tokens, of ``asked`` at most. They write to one page of the cache."""
        allowed = 1 if self.pace is None else int(SECONDS / self.pace)
        return max(1, min(asked, allowed, MOST, PAGE - length % PAGE))

    def made(self, maker: Any, length: int, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """A call of ``maker`` has read ``tokens`` behind ``length`` others, which gave ``logits`` ``[n, V]``. Returns ``[1, 1, V]``, the
        first of these."""
        self._maker, self._start, self._tokens, self._logits = maker, length, list(tokens), logits
        return logits[None, :1]

    def find(self, maker: Any, length: int, token: int) -> Tensor | None:
        """``[1, 1, V]`` logits after ``token`` behind ``length`` others, if ``maker`` has made them."""
        index = length - self._start
        if self._logits is None or maker is not self._maker or not self.left(length) or self._tokens[index] != token:
            return None
        return self._logits[None, index : index + 1]

    def left(self, length: int) -> bool:
        """Whether a pass behind ``length`` cached tokens was made ahead."""
        return 0 < length - self._start < len(self._tokens)
