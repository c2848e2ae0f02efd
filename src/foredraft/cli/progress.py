"""A line on stderr that says what is going on, on a terminal only; it is gone before anything else is written."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.status import Status


class Progress:
    def __init__(self, what: str):
        self._console = Console(stderr=True)
        self._status: Status | None = None
        self.show(what)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.clear()

    def show(self, what: str) -> None:
        if not self._console.is_terminal:
            return
        if self._status is None:
            self._status = self._console.status(what)
            self._status.start()
        else:
            self._status.update(what)

    def clear(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
