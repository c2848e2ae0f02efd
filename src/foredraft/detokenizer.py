"""Text from tokens, piece by piece, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

WINDOW = 8  # tokens of context that are decoded again with every piece
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what decoders make of bytes that are no character, or not yet


class Detokenizer:
    """The text of one growing row.

    A character may take several tokens, and a token's text may depend on those before it (a leading space). So the last few
    tokens are decoded together each time, and what is new and cannot change any more is given out.

    Args:
        tokenizer: of the tokens.
        prompt: tokens in front of the row.
        keep: special tokens that are text; all others are none.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), keep: Collection[str] = ()):
        self._tokenizer = tokenizer
        special = special_tokens(tokenizer) if keep else {}
        self._dropped = {number for token, number in special.items() if token not in keep} if special.keys() & keep else None
        self._ids = list(prompt[-4 * WINDOW :])
        text = self._decode(self._ids)
        self._given = len(text)  # characters of the window's text that were given out
        self._shorten(text)

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that ``tokens`` complete; empty while a character is unfinished. One by one, so that the text does not depend on how
        many of them come together."""
        return "".join(map(self._feed, tokens))

    def _feed(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        finished = len(text.rstrip(UNFINISHED))
        piece = text[self._given : finished]
        self._given = max(self._given, finished)
        # no character takes as many tokens as the second bound, so these bytes are none
        if len(self._ids) > (4 * WINDOW if finished == len(text) else 8 * WINDOW):
            piece += self._shorten(text)
        return piece

    def flush(self) -> str:
        """What was held back, once the row is over."""
        text = self._decode(self._ids)
        piece = text[self._given :]
        self._given = len(text)
        return piece

    def _shorten(self, text: str) -> str:
        """Cut the window, whose text is ``text``, to its last tokens, where that cuts no character in two. Returns what was held back and
        is no longer in the window."""
        size = WINDOW
        while not text.endswith(tail := self._decode(self._ids[-size:])) and size < 2 * WINDOW:
            size += 1
        self._ids = self._ids[-size:]
        held = min(len(text) - self._given, len(tail))
        piece = text[self._given : len(text) - held]
        self._given = len(tail) - held
        return piece

    def _decode(self, ids: Sequence[int]) -> str:
        if self._dropped is not None:
            ids = [each for each in ids if each not in self._dropped]
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._dropped is None, clean_up_tokenization_spaces=False))


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The tokens that decoding leaves out where special tokens are skipped."""
    return {str(token): number for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
