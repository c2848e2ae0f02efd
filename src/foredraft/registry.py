"""What the drafters and rules say of themselves, without importing them: they import torch, which takes seconds.

``registry.json`` beside this file holds it. ``python tests/test_registry.py`` writes it, and a test compares it with the classes. What
is registered by other names, or from elsewhere, is imported and asked.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

STORED = Path(__file__).with_name("registry.json")


@dataclass(frozen=True)
class Entry:
    """One drafter or rule.

    Attributes:
        home: its line in the registry, ``"module:class"``.
        summary, doc: one line, and the class's docstring.
        proposals: that it makes, or that it is exact for.
        options: name, and default and type as far as there are any: what its constructor takes.
        chains_only, lossless: of a rule.
    """

    home: str
    summary: str
    doc: str
    proposals: tuple[str, ...]
    options: Mapping[str, Mapping[str, Any]]
    chains_only: bool
    lossless: bool

    @staticmethod
    def of(home: str) -> Entry:
        """As the class says."""
        cls = resolve_name(home)
        parameters = {} if cls.__init__ is object.__init__ else inspect.signature(cls).parameters
        options = {
            name: {
                **({} if each.default is each.empty else {"default": each.default}),
                **({} if each.annotation is each.empty else {"type": str(each.annotation)}),
            }
            for name, each in parameters.items()
        }
        found = getattr(cls, "info", cls)
        return Entry(
            home,
            cls.summary,
            inspect.cleandoc(vars(cls).get("__doc__") or ""),
            tuple(found.proposals),
            options,
            getattr(cls, "chains_only", False),
            getattr(cls, "lossless", True),
        )

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """The options as Python has them."""
        empty, only = inspect.Parameter.empty, inspect.Parameter.KEYWORD_ONLY
        return {
            name: inspect.Parameter(name, only, default=each.get("default", empty), annotation=each.get("type", empty))
            for name, each in self.options.items()
        }


def entry(home: str) -> Entry:
    """What is known of the class at ``home``."""
    return _stored().get(home) or Entry.of(home)


@cache
def _stored() -> dict[str, Entry]:
    entries = json.loads(STORED.read_text(encoding="utf-8"))
    return {each["home"]: Entry(**{**each, "proposals": tuple(each["proposals"])}) for each in entries}
