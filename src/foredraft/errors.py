"""Everything Foredraft raises on purpose.

::

    Exception
    └── ForedraftError
        ├── ConfigurationError (ValueError)     an argument, option or combination that cannot work
        ├── UnsupportedModelError (ValueError)  a model that cannot roll back or cannot be verified
        ├── TargetOutputError (RuntimeError)    NaN or infinite logits, or every token masked
        ├── DrafterError (RuntimeError)         a drafter returned something that is no proposal
        ├── ExactnessError (RuntimeError)       ``AuditReport.raise_for_fault``: not exact; ``.report`` says what was found
        └── CacheMemoryError (MemoryError)      the key-value cache does not fit
    KeyboardInterrupt
    └── Interrupted                             Ctrl-C during generate; ``.output`` holds what was generated
"""

from __future__ import annotations

from typing import Any


class ForedraftError(Exception):
    """Base of every error that Foredraft raises on purpose."""


class ConfigurationError(ForedraftError, ValueError):
    """An argument, option or combination of them cannot work; the message names the fix."""


class UnsupportedModelError(ForedraftError, ValueError):
    """The model cannot be verified against its own cache, or cannot roll back; the message says what to do instead."""


class TargetOutputError(ForedraftError, RuntimeError):
    """The target returned NaN or infinite logits, or processors masked every token; the message names row and position."""


class DrafterError(ForedraftError, RuntimeError):
    """A drafter returned something that is no proposal, such as a token outside the target's vocabulary."""


class CacheMemoryError(ForedraftError, MemoryError):
    """The key-value cache does not fit into memory; the message says how much was asked for."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during :meth:`Speculator.generate`. ``output`` holds what was generated; the Speculator stays usable."""

    def __init__(self, output: Any):
        super().__init__("generation interrupted; .output holds what was generated")
        self.output = output
