"""How objects show themselves: one line as ``repr``, a table in notebooks, and everything by ``details()``."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any


class Described:
    """A subclass says what is worth knowing of it in :meth:`facts`."""

    def facts(self, *, all: bool = False) -> Mapping[str, Any]:
        """By name, the few that identify the object, or ``all``."""
        return {}

    def details(self) -> str:
        """The long form: a line for each fact."""
        return "\n".join([type(self).__name__, *(f"  {name}: {value}" for name, value in self.facts(all=True).items())])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self.facts().items())})"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in self.facts().items())
        return f"<table><caption>{escape(type(self).__name__)}</caption>{rows}</table>"
