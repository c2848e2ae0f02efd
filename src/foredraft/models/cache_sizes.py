"""What key-value caches cost: bytes by kind of layer, bytes of a row, and sizes as people write them. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

from foredraft.errors import ConfigurationError
from foredraft.models.pages import PAGE

LEEWAY = PAGE  # tokens that a row can be rewound by without losing what its windows see
UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
SIZE = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(UNITS)})", re.IGNORECASE | re.ASCII)
FORMS = "write a size such as '6GiB', '500MiB' or '2GB', a fraction of the memory above 0 and up to 1 such as 0.5, or 'auto'"


@dataclass(frozen=True)
class LayerKind:
    """The layers of one kind, together.

    Attributes:
        layers: how many they are.
        token_bytes: bytes of keys and values for each token, or for each token of the source.
        state_bytes: bytes of a recurrent state, which a row holds whatever its length.
        window: tokens that a token sees; None for all.
        of_source: what is kept for the tokens of a source, which an encoder reads.
    """

    name: str
    layers: int
    token_bytes: int = 0
    state_bytes: int = 0
    window: int | None = None
    of_source: bool = False


@dataclass(frozen=True)
class CacheSizes:
    """What the cache of one model costs; ``dtype`` is that of keys and values."""

    model_type: str
    dtype: str
    kinds: Sequence[LayerKind]

    @property
    def token_bytes(self) -> int:
        return sum(each.token_bytes for each in self.kinds if not each.of_source)

    @property
    def page_bytes(self) -> int:
        return PAGE * self.token_bytes

    @property
    def state_bytes(self) -> int:
        return sum(each.state_bytes for each in self.kinds)

    @property
    def source_token_bytes(self) -> int:
        return sum(each.token_bytes for each in self.kinds if each.of_source)

    @property
    def windowed(self) -> bool:
        """Whether some layers see a window only."""
        return any(each.window is not None for each in self.kinds)

    def row_bytes(self, tokens: int, *, source: int = 0, tree: int | None = None) -> int:
        """Bytes of a row of ``tokens`` tokens, in whole pages, whose source has ``source`` tokens.

        Every layer keeps every token, unless the largest ``tree`` is given: then layers with a window give pages back.
        """
        total = self.state_bytes + source * self.source_token_bytes
        for each in self.kinds:
            if not each.of_source:
                total += PAGE * pages_kept(tokens, None if tree is None else each.window, tree or 0) * each.token_bytes
        return total


def pages_kept(tokens: int, window: int | None, written: int) -> int:
    """Pages that a row of ``tokens`` tokens takes at most in layers that see a ``window`` of the text, None for all of it, if ``written``
    tokens are written in one pass."""
    whole = -(-tokens // PAGE)
    return whole if window is None else min(whole, -(-(window + LEEWAY + written) // PAGE) + 1)


def parse_memory(value: str | float) -> int | float | None:
    """How much memory ``value`` means: bytes (an int) for a size, a fraction in (0, 1] (a float) for a number without a unit, None for
    ``"auto"``. GiB is 2**30 bytes and GB is 10**9. Upper and lower case mean the same, and parts of a byte are left out.

    Raises:
        ConfigurationError: anything else; the message lists the forms.
    """
    number: float | None = None
    if isinstance(value, str):
        text = value.strip()
        if text.lower() == "auto":
            return None
        if (found := SIZE.fullmatch(text)) is not None:
            scale = next(scale for unit, scale in UNITS.items() if unit.lower() == found[2].lower())
            if size := int(Fraction(found[1]) * scale):
                return size
        with suppress(ValueError):
            number = float(text)
    elif not isinstance(value, bool) and isinstance(value, (int, float)):
        number = value
    if number is not None and 0 < number <= 1:
        return float(number)
    why = "has no unit, and is no fraction" if number is not None and number > 1 else "is not an amount of memory"
    raise ConfigurationError(f"{value!r} {why}; {FORMS}")


def in_words(size: int) -> str:
    """``size`` bytes in the largest binary unit of which they are one or more, with up to four digits."""
    unit = next(unit for unit in ("TiB", "GiB", "MiB", "KiB", "B") if size >= UNITS[unit] or unit == "B")
    return f"{size / UNITS[unit]:.4g} {unit}"
