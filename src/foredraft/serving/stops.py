"""Stop strings, found in text as it grows. What may be the beginning of one is held back, so that none is ever shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for the ``stops`` in the text of one row.

    The text ends before the stop string that is complete first; of two that are complete at the same character, before the longer. So
    where it ends depends on the text alone, not on the pieces in which it comes.

    Attributes:
        hit: the stop string that was found.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = list(stops)
        self.hit: str | None = None
        self._held = ""

    def feed(self, text: str, *, counts: bool = True) -> str:
        """The text that can be shown now that ``text`` has been added; a stop string that is complete in it ends the text if that
        ``counts``."""
        if not self.stops or self.hit is not None:
            return "" if self.hit is not None else text
        held, before = self._held + text, len(self._held)
        found = [(at + len(stop), at, stop) for stop in self.stops if (at := held.find(stop, max(0, before - len(stop) + 1))) >= 0]
        if found and counts:
            _, at, self.hit = min(found)
            self._held = ""
            return held[:at]
        keep = max(beginning(held, stop) for stop in self.stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """What was held back, once the row is over."""
        held, self._held = self._held, ""
        return held


def beginning(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``stop``."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
