"""The command line: ``foretoken generate``, ``audit``, ``demo``, ``models``, ``drafters`` and ``rules``.

Importing it is fast: torch and transformers are imported by the commands that need them.
"""

from foretoken.cli.commands import app, main

__all__ = ["app", "main"]
