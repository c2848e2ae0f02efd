"""Everything Foredraft raises on purpose.

::

    Exception
    └── ForedraftError
        ├── ConfigurationError (ValueError)     an argument, option or combination that cannot work
        ├── UnsupportedModelError (ValueError)  a model that cannot roll back or cannot be verified
        ├── TargetOutputError (RuntimeError)    NaN or infinite logits, or every token masked
        ├── BusyError (RuntimeError)            another thread is using this Speculator or this model
        ├── DrafterError (RuntimeError)         a drafter returned something that is no proposal
        ├── ExactnessError (RuntimeError)       ``raise_for_fault`` of an audit's report: not exact; ``.report`` says what was found
        └── CacheMemoryError (MemoryError)      the key-value cache does not fit
    KeyboardInterrupt
    └── Interrupted                             Ctrl-C during generate or audit; ``.output`` holds what was done
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from typing import Any


class ForedraftError(Exception):
    """Base of every error that Foredraft raises on purpose."""


class ConfigurationError(ForedraftError, ValueError):
    """An argument, option or combination of them cannot work; the message names the fix."""


def unknown(what: str, given: object, names: Iterable[str], word: str | None = None, hint: str | None = None) -> ConfigurationError:
    """The error for a ``given`` name that is none of ``names``; it asks whether the closest of them was meant.

    Args:
        what: the beginning of the message; the name follows.
        word: the part of ``given`` that is compared; all of it unless given.
        hint: what to do; to choose one of ``names`` unless given.
    """
    from difflib import get_close_matches

    names = list(names)
    word = str(given if word is None else word).strip().lower()
    meant = get_close_matches(word, names, 1, 0.76) or [name for name in names if len(word) > 3 and word in name]
    hint = hint or f"choose {', '.join(names)}"
    end = f", did you mean {meant[0]!r}? {hint[0].upper()}{hint[1:]}" if meant else f"; {hint}"
    return ConfigurationError(f"{what} {given!r}{end}")


def whole(what: str, value: object, *, least: int = 1) -> None:
    """Raises ConfigurationError unless ``value`` is an int, no bool, of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{what} must be a whole number of at least {least}, got {value!r}")


def first_line(error: BaseException) -> str:
    """What it says, or its name; a compiler's message goes on for pages."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class UnsupportedModelError(ForedraftError, ValueError):
    """The model cannot be verified against its own cache, or cannot roll back; the message says what to do instead."""


class TargetOutputError(ForedraftError, RuntimeError):
    """The target returned NaN or infinite logits, or processors masked every token; the message names row and position."""


class BusyError(ForedraftError, RuntimeError):
    """Another thread is using this Speculator or a model of it, or the call comes from inside another one; the message names the fix."""


class DrafterError(ForedraftError, RuntimeError):
    """A drafter returned something that is no proposal, such as a token outside the target's vocabulary."""


class GrammarError(ConfigurationError):
    """A grammar needs too much work at a place that its text has come to. Its row alone ends."""


class CacheMemoryError(ForedraftError, MemoryError):
    """The key-value cache does not fit into memory; the message says how much was asked for."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during :meth:`Speculator.generate` or an audit. ``output`` holds what was generated, or the report of what was checked until
    then; the Speculator stays usable."""

    def __init__(self, output: Any):
        super().__init__("interrupted; .output holds what was done until then")
        self.output = output


def notice(message: str) -> None:
    """A warning in the middle of a round. Where warnings are errors, it is logged: the round must not end by it."""
    try:
        warnings.warn(message, stacklevel=3)
    except Warning:
        logging.getLogger("foredraft").warning(message)
