"""The command line: ``foredraft generate``, ``audit``, ``demo``, ``models``, ``drafters`` and ``rules``.

Importing it is fast: torch and transformers are imported by the commands that need them.
"""

from foredraft.cli.commands import app, main

__all__ = ["app", "main"]
