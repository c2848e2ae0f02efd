"""Interrupts at places where they seldom come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class InterruptedConfigs(list[Any]):
    """The configurations of a model. The interrupt comes when the first of them was changed, in the second walk over them."""

    walks = 0

    def __iter__(self) -> Iterator[Any]:
        self.walks += 1
        for index, each in enumerate(super().__iter__()):
            yield each
            if self.walks == 2 and index == 0:
                raise KeyboardInterrupt
