"""Base of drafters whose weights may change between two rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from foredraft.drafters.base import Drafter, Feedback, Row
from foredraft.drafters.learning.serving import Learning


class LearningDrafter(Drafter):
    """A subclass sets :attr:`learning` where it is to learn, tells it of rows that begin, calls :meth:`learn_from` after rounds, and
    writes :meth:`rewrite`. What it keeps of rows it drops in :meth:`_keep`."""

    learning: Learning | None = None
    _slots: Sequence[int] = ()  # of the rows, in the order of what is kept of them

    @property
    def learnt(self) -> dict[str, Any] | None:
        return None if self.learning is None else self.learning.facts()

    def rewrite(self, weights: Mapping[str, Tensor]) -> None:
        """Draft with ``weights`` from now on, for all rows."""
        raise TypeError(f"{type(self).__name__} must define rewrite(weights)")

    def rewritten(self, rows: Sequence[Row]) -> None:
        """The weights are others now, and these ``rows`` go on."""

    def learn_from(self, rows: Sequence[Row], feedback: Feedback) -> None:
        """A round is over."""
        if self.learning is not None:
            self._take_up(self.learning.observe(rows, feedback), rows)

    def begin(self, rows: Sequence[Row]) -> None:
        self._slots = [*self._slots, *(row.slot for row in rows)]

    def end(self, rows: Sequence[Row]) -> None:
        gone = {row.slot for row in rows}
        keep = [index for index, slot in enumerate(self._slots) if slot not in gone]
        self._keep(keep)
        self._slots = [self._slots[index] for index in keep]
        if self.learning is not None:
            self._take_up(self.learning.end(rows))

    def _keep(self, rows: list[int]) -> None:
        """Of all rows only these are left."""

    def _take_up(self, version: int | None, rows: Sequence[Row] = ()) -> None:
        learning = self.learning
        if learning is None or version is None:
            return
        begin = learning.clock()
        if (weights := learning.load(version)) is not None:
            self.rewrite(weights)
            learning.swapped(version, learning.clock() - begin)
            self.rewritten(rows)

    def reset(self) -> None:
        if self.learning is not None:
            self.learning.reset()

    def forget(self) -> None:
        if self.learning is not None:
            self.learning.forget()
            self._take_up(0)

    def close(self) -> None:
        if self.learning is not None:
            self.learning.close()
