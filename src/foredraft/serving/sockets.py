"""The address of a server. Importing this loads no torch, so that a port in use is said at once."""

from __future__ import annotations

import os
import socket

from foredraft.errors import ConfigurationError


def bind(host: str, port: int) -> socket.socket:
    """A socket at ``host`` and ``port``, 0 for any free one; nobody can connect before the server listens.

    Raises:
        ConfigurationError: there is no such address here, or another process has the port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind, protocol)
        if os.name == "posix":  # on Windows it would take a port that another process has
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, UnicodeError) as error:  # the latter where no name is like that
        raise cannot_listen(host, port, error) from None
    return bound


def cannot_listen(host: str, port: int, error: Exception) -> ConfigurationError:
    why = getattr(error, "strerror", None) or error
    return ConfigurationError(f"cannot listen at {host} port {port}: {why}; give another --host or --port, or --port 0 for any free one")


def address_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if bound.family == socket.AF_INET6 else f"http://{host}:{port}"
