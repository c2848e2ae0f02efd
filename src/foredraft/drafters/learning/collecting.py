"""From verified rounds to pieces of text: contexts, and the target's distributions that the pass has computed anyway."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from foredraft.device import to_device
from foredraft.drafters.base import Feedback, Row
from foredraft.drafters.learning.buffer import CONTEXT, LENGTH, PIECE, PLACES, TOP, Piece

OTHERS = 0.25  # of the places at which nothing was rejected
CHUNK = 256  # logits whose largest is looked at first


@dataclass
class Stretch:
    """What was kept of a row's text since its last piece."""

    start: int
    places: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    found: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # log-probabilities and tokens, on the device


class Collector:
    """Makes pieces of what a session generates.

    Args:
        keep: is given every piece.
    """

    def __init__(self, keep: Callable[[Piece], None]):
        self.keep = keep
        self._chance = random.Random(0)
        self._lengths: dict[int, int] = {}  # of the rows' texts, by slot, before the round under way
        self._stretches: dict[int, Stretch] = {}

    def begin(self, rows: Sequence[Row]) -> None:
        self._lengths.update((row.slot, len(row.ids)) for row in rows)

    def observe(self, rows: Sequence[Row], feedback: Feedback, *, wanted: bool = True) -> None:
        """A round is over; where it is not ``wanted`` nothing is kept of it."""
        if wanted and feedback.logits is not None:
            self._keep(rows, feedback)
        self._lengths.update((row.slot, len(row.ids)) for row in rows)

    def end(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._emit(row)
            self._lengths.pop(row.slot, None)

    def reset(self) -> None:
        self._lengths, self._stretches = {}, {}

    def _keep(self, rows: Sequence[Row], feedback: Feedback) -> None:
        assert feedback.logits is not None
        chosen = [(index, *each) for index, row in enumerate(rows) for each in self._chosen(row, feedback, feedback.accepted[index])]
        if not chosen:
            return
        device = feedback.logits.device
        lines, depths = (to_device(list(each), device) for each in list(zip(*chosen))[:2])
        nodes = depths if feedback.path is None else feedback.path.to(device)[lines, depths]
        logs, ids = likeliest(feedback.logits[lines, nodes])
        for (index, _, place, weight), *found in zip(chosen, logs, ids):
            stretch = self._stretch(rows[index], place)
            stretch.places.append(place)
            stretch.weights.append(weight)
            stretch.found.append((found[0], found[1]))

    def _chosen(self, row: Row, feedback: Feedback, accepted: int) -> list[tuple[int, int, float]]:
        """How deep on the path the nodes to keep of a row are, the places in the text that they stand at, and 1 over how likely each was to
        be kept."""
        before = self._lengths.get(row.slot, len(row.ids) + 1)  # of a row that it was not told of, nothing
        rejected, kept = accepted < feedback.tree.height, []
        for depth in range(accepted + 1):
            certain = rejected and depth == accepted
            if (certain or self._chance.random() < OTHERS) and before + depth <= len(row.ids):
                kept.append((depth, before + depth - 1, 1.0 if certain else 1 / OTHERS))
        return kept

    def _stretch(self, row: Row, place: int) -> Stretch:
        """The one that ``place`` belongs to; one that is full becomes a piece."""
        stretch = self._stretches.get(row.slot)
        if stretch is not None and (len(stretch.places) >= PLACES or place - stretch.start >= LENGTH):
            self._emit(row)
            stretch = None
        if stretch is None:
            stretch = self._stretches[row.slot] = Stretch(max(0, place + 1 - CONTEXT))
        return stretch

    def _emit(self, row: Row) -> None:
        stretch = self._stretches.pop(row.slot, None)
        if stretch is not None:
            self.keep(piece_of(row.ids, stretch))


def piece_of(ids: Sequence[int], stretch: Stretch) -> Piece:
    """The one copy from the device to the host."""
    piece, count = np.zeros(1, PIECE)[0], len(stretch.places)
    tokens = ids[stretch.start : min(len(ids), stretch.start + LENGTH)]
    piece["length"], piece["count"] = len(tokens), count
    piece["tokens"][: len(tokens)] = tokens
    piece["places"][:count] = [place - stretch.start for place in stretch.places]
    piece["weights"][:count] = stretch.weights
    width = len(stretch.found[0][0])
    piece["logs"][:, width:] = -np.inf
    piece["logs"][:count, :width] = torch.stack([logs for logs, _ in stretch.found]).cpu().numpy()
    piece["ids"][:count, :width] = torch.stack([ids for _, ids in stretch.found]).cpu().numpy()
    return piece


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """``[n, TOP]`` log-probabilities, float32, and tokens of ``logits`` ``[n, V]``, best first; fewer of a smaller vocabulary."""
    count, vocabulary = min(TOP, logits.shape[1]), logits.shape[1]
    wide = logits.float()
    total = wide.logsumexp(-1, keepdim=True)
    if vocabulary < 4 * CHUNK * TOP:
        best = wide.topk(count, -1)
        return best.values - total, best.indices
    whole = vocabulary // CHUNK * CHUNK  # the best are in the chunks with the largest logits, or in what is left over
    chunks = wide[:, :whole].reshape(len(wide), -1, CHUNK).amax(-1).topk(count, -1).indices
    places = (chunks[..., None] * CHUNK + torch.arange(CHUNK, device=logits.device)).flatten(1)
    rest = torch.arange(whole, vocabulary, device=logits.device).expand(len(logits), -1)
    places = torch.cat([places, rest], 1)
    best = wide.gather(1, places).topk(count, -1)
    return best.values - total, places.gather(1, best.indices)
