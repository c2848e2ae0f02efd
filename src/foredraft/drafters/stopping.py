"""Drafts that stop where they grow unsure (Draft & Verify, Zhang et al. 2023): adaptive exit.

Nothing is drafted below a token whose q, by the draft's raw softmax, lies under the row's threshold. A drafter whose tokens are chosen by
:mod:`foredraft.drafters.growth` passes on ``stopping.request(request)`` in place of ``request``, and calls :meth:`Stopping.observe` and
:meth:`Stopping.end`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from foredraft.drafters.base import DraftRequest, Feedback, Row
from foredraft.errors import ConfigurationError

GREEDY, SAMPLED = 0.8, 0.5  # thresholds that rows begin with
TARGET, STEP = 0.9, 0.01  # acceptance to keep, and how far a round may want to move the threshold
ACCEPTANCE_MEMORY, MEMORY = 0.5, 0.9  # of the acceptance and of the threshold that a round leaves


@dataclass
class Follower:
    """A row's threshold, the share of drafted tokens that were accepted, and how deep its newest draft was to be."""

    threshold: float
    acceptance: float = 0.0
    asked: int = 0

    def observe(self, drafted: int, accepted: int) -> None:
        """A round of the row whose draft was ``drafted`` tokens deep."""
        self.acceptance = ACCEPTANCE_MEMORY * self.acceptance + (1 - ACCEPTANCE_MEMORY) * accepted / drafted
        if self.acceptance < TARGET:
            wanted = self.threshold + STEP
        else:
            wanted = self.threshold - (STEP if drafted < self.asked else 0.0)
        self.threshold = MEMORY * self.threshold + (1 - MEMORY) * min(max(wanted, 0.0), 1.0)


class Stopping:
    """The thresholds of all rows: a fixed ``threshold``, ``"auto"`` for one that follows each row's acceptance, or None for drafts that do
    not stop.

    Raises:
        ConfigurationError: a threshold that is none of them.
    """

    def __init__(self, threshold: float | str | None):
        number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
        if not (threshold in (None, "auto") or (number and 0 <= threshold <= 1)):  # type: ignore[operator]
            raise ConfigurationError(f"threshold must be a number from 0 to 1, 'auto', or None to draft without one; got {threshold!r}")
        self.threshold = threshold
        self._rows: dict[int, Follower] = {}  # by slot

    def request(self, request: DraftRequest) -> DraftRequest:
        """``request`` with the rows' thresholds."""
        if self.threshold is None:
            return request
        if self.threshold != "auto":
            return replace(request, thresholds=[float(self.threshold)] * len(request.rows))
        rows = [
            self._rows.setdefault(row.slot, Follower(SAMPLED if sampled else GREEDY))
            for row, sampled in zip(request.rows, request.sampler.sampled)
        ]
        for follower, limit in zip(rows, request.limits):
            follower.asked = limit
        return replace(request, thresholds=[follower.threshold for follower in rows])

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        """A round is over."""
        tree = feedback.tree
        if self.threshold != "auto" or tree.nodes == 1 or not feedback.drafted:
            return
        depths = tree.with_safe_parents().depths
        depths = depths if tree.valid is None else torch.where(tree.valid, depths, 0)
        for row, drafted, accepted in zip(rows, depths.amax(1).tolist(), feedback.accepted):
            if drafted:
                self._rows[row.slot].observe(drafted, accepted)

    def end(self, rows: Sequence[Row] | None = None) -> None:
        """These rows are gone; all of them, if none are named."""
        for slot in [row.slot for row in rows] if rows is not None else list(self._rows):
            self._rows.pop(slot, None)
