"""Base of drafters whose weights may change between two rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from foredraft.drafters.base import Drafter, Feedback, Row
from foredraft.drafters.learning.serving import Learning


class LearningDrafter(Drafter):
    """A subclass sets :attr:`learning` where it is to learn, tells it of rows that begin, calls :meth:`learn_from` after rounds and
    :meth:`learn_to_the_end` for rows that are over, and writes :meth:`rewrite`."""

    learning: Learning | None = None

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

    def learn_to_the_end(self, rows: Sequence[Row]) -> None:
        """These rows are over."""
        if self.learning is not None:
            self._take_up(self.learning.end(rows))

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
