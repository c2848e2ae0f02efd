"""What a row's text will likely be, as far as somebody knows more of it than a drafter does: a text that is expected, or a grammar.

The loop asks a row's guesses before it asks the drafter. They are drafted as a chain, and the target verifies them like any draft.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

from foredraft.errors import notice
from foredraft.grammars import Compiled, Grammar

SIZES = (3, 2, 1)  # tokens by which a prediction finds its place again, the longest match first
ALONE = 2  # tokens that must match where the place is looked for in all of a prediction
FIRST = 4  # guessed tokens in a row's first round with a guess
AHEAD = 64  # tokens that a prediction says at once
MOST = 8  # guessed tokens in a round at most, where the planner's largest shape has fewer


@runtime_checkable
class Guess(Protocol):
    """One that keeps a state per row has a method ``begin()`` too, which gives a guess for one row and is called when the row is added. An
    attribute ``name`` is what a trace calls the tokens; "guess" without one."""

    def after(self, ids: Sequence[int], prompt_length: int) -> Sequence[int]:
        """Tokens that will likely follow ``ids``, a row's prompt and its text so far; none where nothing is known. It must not depend on
        anything that is drawn later than ``ids``."""


class Prediction:
    """Guesses from a text that is expected, such as a file that is to be edited.

    It goes on where the row's text stands in the prediction. After a difference it looks for the row's last tokens behind that place, the
    nearest match of the most tokens, and then anywhere.

    Args:
        tokens: of the expected text.
    """

    name = "prediction"

    def __init__(self, tokens: Sequence[int]):
        self.tokens = list(tokens)
        self._place: int | None = 0  # where the row's text goes on; None where it is lost
        self._last = 0  # the last place where it was not
        self._read = 0  # tokens of the row, its prompt included

    def prepare(self) -> None:
        """Do now what the first row that uses it would wait for."""
        assert self.ends is not None

    def begin(self) -> Prediction:
        own = Prediction(())
        own.tokens, own.ends = self.tokens, self.ends
        return own

    @cached_property
    def ends(self) -> dict[tuple[int, ...], list[int]]:
        """Behind which places the n-grams of the prediction end, ascending."""
        found: dict[tuple[int, ...], list[int]] = {}
        for size in SIZES:
            for end in range(size, len(self.tokens) + 1):
                found.setdefault(tuple(self.tokens[end - size : end]), []).append(end)
        return found

    def after(self, ids: Sequence[int], prompt_length: int) -> Sequence[int]:
        for token in ids[max(self._read, prompt_length) :]:
            if self._place is None:
                continue
            self._last = self._place
            self._place = self._place + 1 if self.tokens[self._place : self._place + 1] == [token] else None
        self._read = len(ids)
        if self._place is None:
            self._place = self._found(ids[max(prompt_length, len(ids) - SIZES[0]) :])
        return () if self._place is None else self.tokens[self._place : self._place + AHEAD]

    def _found(self, text: Sequence[int]) -> int | None:
        """Where the end of ``text``, the row's last tokens, stands in the prediction."""
        for first, least in ((self._last + 1, 1), (0, ALONE)):
            for size in SIZES:
                ends = self.ends.get(tuple(text[-size:]), []) if least <= size <= len(text) else []
                at = bisect_left(ends, first)
                if at < len(ends):
                    return ends[at]
        return None


class ForcedTokens:
    """Guesses what a grammar leaves no choice about, such as the keys of a JSON object. The text may still be written with other tokens,
    which the target decides."""

    name = "grammar"

    def __init__(self, grammar: Grammar | Compiled):
        self.compiled = grammar.compiled if isinstance(grammar, Grammar) else grammar
        self._matcher = self.compiled.start()
        self._read = 0  # tokens of the row, its prompt included
        self._over = False

    def begin(self) -> ForcedTokens:
        return ForcedTokens(self.compiled)

    def after(self, ids: Sequence[int], prompt_length: int) -> Sequence[int]:
        for token in ids[max(self._read, prompt_length) :]:
            self._over = self._over or token in self.compiled.ends or not self.compiled.accept(self._matcher, token)
        self._read = len(ids)
        return () if self._over else self.compiled.forced(self._matcher)


@dataclass(frozen=True)
class Guessed:
    """A chain for one row in one round, and the name of the guess."""

    tokens: Sequence[int]
    name: str


class RowGuesses:
    """The guesses of one row. They are drafted as deep as they were right of late."""

    def __init__(self, guesses: Sequence[Guess]):
        self.guesses = [guess.begin() if hasattr(guess, "begin") else guess for guess in guesses]
        self.window = FIRST

    def after(self, ids: Sequence[int], prompt_length: int, *, most: int, vocab_size: int) -> Guessed | None:
        """What the first of them that says anything says, up to ``most`` tokens, and to the first that the target does not know."""
        limit = min(most, self.window)
        for guess in list(self.guesses) if limit > 0 else ():
            try:
                tokens = list(guess.after(ids, prompt_length)[:limit])
            except Exception as error:  # it may be the user's
                self.guesses.remove(guess)
                notice(f"the guess {guess!r} raised {error!r}; the row goes on without it, with the same text")
                continue
            unknown = next((at for at, token in enumerate(tokens) if not 0 <= token < vocab_size), None)
            if tokens[:unknown]:
                return Guessed(tokens[:unknown], getattr(guess, "name", "guess"))
        return None

    def observe(self, guessed: Guessed, accepted: int, most: int) -> None:
        """So many tokens of a chain were ``accepted``."""
        if accepted < len(guessed.tokens):
            self.window = accepted + 1
        elif accepted == self.window:
            self.window = min(2 * self.window, most)
