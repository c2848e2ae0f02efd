"""See :mod:`foredraft.detokenizer`."""

from foredraft.detokenizer import UNFINISHED, Detokenizer

__all__ = ["UNFINISHED", "Detokenizer"]
