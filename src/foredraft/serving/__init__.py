"""A server that speaks the OpenAI API, on one :class:`~foredraft.session.Session`.

``foredraft serve`` runs it; :func:`app` makes it an ASGI application. Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foredraft.serving.settings import Settings

if TYPE_CHECKING:
    from foredraft.serving.application import app

__all__ = ["Settings", "app"]


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from foredraft.serving.application import app

    return app
