"""The command line, ``foredraft``.

Importing it is fast: torch and transformers are imported by the commands that need them.
"""

from foredraft.cli.commands import app, main

__all__ = ["app", "main"]
