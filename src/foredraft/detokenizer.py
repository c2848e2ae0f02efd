"""Text from tokens, piece by piece, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WINDOW = 8  # tokens of context that are decoded again with every piece
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what decoders make of bytes that are no character, or not yet


class Detokenizer:
    """The text of one growing row.

    A character may take several tokens, and a token's text may depend on those before it (a leading space). So the last few
    tokens are decoded together each time, and what is new and cannot change any more is given out.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._given = 0  # characters of the window's text that were given out
        self._given = len(self._shortened())

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that ``tokens`` complete; empty while a character is unfinished."""
        self._ids += tokens
        text = self._decode(self._ids)
        finished = text.rstrip(UNFINISHED)
        piece = finished[self._given :]
        self._given = max(self._given, len(finished))
        if finished == text and len(self._ids) > 4 * WINDOW:
            self._given = len(self._shortened())
        return piece

    def flush(self) -> str:
        """What was held back, once the row is over."""
        text = self._decode(self._ids)
        piece = text[self._given :]
        self._given = len(text)
        return piece

    def _shortened(self) -> str:
        """The window's text, after cutting the window where no character is cut in two."""
        tail = self._decode(self._ids[-WINDOW:])
        if UNFINISHED in tail:
            return self._decode(self._ids)
        self._ids = self._ids[-WINDOW:]
        return tail

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
