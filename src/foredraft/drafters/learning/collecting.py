"""From verified rounds to pieces of text: contexts, and the target's distributions that the pass has computed anyway."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from foredraft.backends import native
from foredraft.device import one_thread, to_device
from foredraft.drafters.base import Feedback, Row
from foredraft.drafters.learning.buffer import TEXT, TOP, Layout, Piece

OTHERS = 0.25  # of the places at which nothing was rejected, in pieces with hidden states, and at least; without hidden states, all of
LIGHT = 32_768  # a vocabulary of so many tokens, and of a larger one as many logits as of that
CHUNK = 256  # logits whose largest is looked at first


@dataclass
class Stretch:
    """What was kept of a row's text since its last piece. All tensors are on the device."""

    start: int
    places: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    found: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # log-probabilities and tokens
    states: list[Tensor] = field(default_factory=list)  # [n, width] bfloat16, of all tokens from ``start`` on
    read: int = 0  # tokens with states


class Collector:
    """Makes pieces of what a session generates.

    Args:
        keep: is given every piece.
        layout: of the pieces. Where they hold hidden states, these are kept from round to round: a piece has no gaps.
    """

    def __init__(self, keep: Callable[[Piece], None], layout: Layout = TEXT):
        self.keep, self.layout = keep, layout
        self._chance = random.Random(0)
        self._lengths: dict[int, int] = {}  # of the rows' texts, by slot, before the round under way
        self._stretches: dict[int, Stretch] = {}

    def begin(self, rows: Sequence[Row], hidden: Sequence[Tensor] = ()) -> None:
        """``hidden[r]`` ``[n, width]`` are the states of the last n tokens of each prompt."""
        self._lengths.update((row.slot, len(row.ids)) for row in rows)
        for row, states in zip(rows, hidden):
            known = states[-self.layout.context :].to(torch.bfloat16, copy=True)
            self._stretches[row.slot] = Stretch(len(row.ids) - 1 - len(known), states=[known], read=len(known))

    def observe(self, rows: Sequence[Row], feedback: Feedback, *, wanted: bool = True) -> bool:
        """A round is over; where it is not ``wanted``, only pieces with hidden states go on. Whether something was kept. Of a row that
        has failed, nothing more is."""
        for index in feedback.failed:
            self._stretches.pop(rows[index].slot, None)
        going = [index for index, row in enumerate(rows) if index not in feedback.failed and (wanted or self._goes_on(row))]
        some = going if feedback.logits is not None else []
        if some:
            self._keep(rows, some, feedback)
        self._lengths.update((row.slot, len(row.ids)) for row in rows)
        return bool(some)

    def end(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._emit(row)
            self._stretches.pop(row.slot, None)
            self._lengths.pop(row.slot, None)

    def reset(self) -> None:
        self._lengths, self._stretches = {}, {}

    def _goes_on(self, row: Row) -> bool:
        """A piece with hidden states is under way, and must have no gap. Before its first place it is dropped instead."""
        stretch = self._stretches.get(row.slot) if self.layout.width else None
        if stretch is not None and not stretch.places:
            del self._stretches[row.slot]
            return False
        return stretch is not None

    def _keep(self, rows: Sequence[Row], some: Sequence[int], feedback: Feedback) -> None:
        assert feedback.logits is not None
        if self.layout.width:
            self._keep_states(rows, some, feedback)
        chosen = [(index, *each) for index in some for each in self._chosen(rows[index], feedback, feedback.accepted[index])]
        if chosen:
            with one_thread(feedback.logits):  # another one would have to be woken, beside a learner that has its core
                logs, ids = likeliest(along(feedback.logits, feedback, *list(zip(*chosen))[:2]))
            for (index, _, place, weight), *found in zip(chosen, logs, ids):
                stretch = self._stretch(rows[index], place)
                stretch.places.append(place)
                stretch.weights.append(weight)
                stretch.found.append((found[0], found[1]))
        if self.layout.width:
            for index in some:
                self._cut(rows[index], feedback.tree.height + 1)

    def _keep_states(self, rows: Sequence[Row], some: Sequence[int], feedback: Feedback) -> None:
        """Of all tokens that the pass read and that were kept."""
        assert feedback.hidden is not None
        before = [self._lengths.get(rows[index].slot, len(rows[index].ids) + 1) for index in some]
        counts = [min(feedback.accepted[index] + 1, len(rows[index].ids) - length + 1) for index, length in zip(some, before)]
        nodes = [(index, depth) for index, count in zip(some, counts) for depth in range(count)]
        if not nodes:
            return
        states = torch.split(along(feedback.hidden, feedback, *zip(*nodes)).to(torch.bfloat16), counts)
        for index, length, mine in zip(some, before, states):
            stretch = self._stretches.setdefault(rows[index].slot, Stretch(length - 1))
            stretch.states.append(mine)
            stretch.read += len(mine)

    def _cut(self, row: Row, more: int) -> None:
        """Make a piece of what has no room for so many ``more`` tokens; the next one begins with its last ones."""
        stretch, layout = self._stretches.get(row.slot), self.layout
        if stretch is not None and (stretch.read + more >= layout.length or len(stretch.places) + more > layout.places):
            self._emit(row)
            last = torch.cat(stretch.states)[-layout.context :]
            self._stretches[row.slot] = Stretch(stretch.start + stretch.read - len(last), states=[last], read=len(last))

    def _chosen(self, row: Row, feedback: Feedback, accepted: int) -> list[tuple[int, int, float]]:
        """How deep on the path the nodes to keep of a row are, the places in the text that they stand at, and 1 over how likely each was to
        be kept."""
        assert feedback.logits is not None
        share = OTHERS if self.layout.width else max(OTHERS, min(1.0, LIGHT / feedback.logits.shape[-1]))
        before = self._lengths.get(row.slot, len(row.ids) + 1)  # of a row that it was not told of, nothing
        rejected, kept = accepted < feedback.tree.height, []
        for depth in range(accepted + 1):
            certain = rejected and depth == accepted
            if (certain or self._chance.random() < share) and before + depth <= len(row.ids):
                kept.append((depth, before + depth - 1, 1.0 if certain else 1 / share))
        return kept

    def _stretch(self, row: Row, place: int) -> Stretch:
        """The one that ``place`` belongs to; one that is full becomes a piece."""
        stretch, layout = self._stretches.get(row.slot), self.layout
        if not layout.width and stretch is not None and (len(stretch.places) >= layout.places or place - stretch.start >= layout.length):
            self._emit(row)
            stretch = None
        if stretch is None:
            stretch = self._stretches[row.slot] = Stretch(max(0, place + 1 - layout.context))
        return stretch

    def _emit(self, row: Row) -> None:
        stretch = self._stretches.pop(row.slot, None)
        if stretch is not None and stretch.places:
            self.keep(piece_of(row.ids, stretch, self.layout))


def along(each: Tensor, feedback: Feedback, lines: Sequence[int], depths: Sequence[int]) -> Tensor:
    """``[n, ...]`` of ``each`` ``[R, N, ...]`` at the nodes of the rows ``lines`` that lie so deep on what was kept."""
    rows, nodes = to_device(list(lines), each.device), to_device(list(depths), each.device)
    return each[rows, nodes if feedback.path is None else feedback.path.to(each.device)[rows, nodes]]


def piece_of(ids: Sequence[int], stretch: Stretch, layout: Layout) -> Piece:
    """The one copy from the device to the host."""
    places = [place - stretch.start for place in stretch.places if place - stretch.start < layout.length][: layout.places]
    piece, count = np.zeros(1, layout.piece)[0], len(places)
    tokens = ids[stretch.start : stretch.start + min(layout.length, stretch.read + 1 if layout.width else layout.length)]
    piece["length"], piece["count"] = len(tokens), count
    piece["tokens"][: len(tokens)] = tokens
    piece["places"][:count], piece["weights"][:count] = places, stretch.weights[:count]
    width = len(stretch.found[0][0])
    piece["logs"][:, width:] = -np.inf
    piece["logs"][:count, :width] = torch.stack([logs for logs, _ in stretch.found[:count]]).cpu().numpy()
    piece["ids"][:count, :width] = torch.stack([ids for _, ids in stretch.found[:count]]).cpu().numpy()
    if layout.width:
        states = torch.cat(stretch.states)[: len(tokens)]
        piece["states"][: len(states)] = states.view(torch.int16).cpu().numpy()
    return piece


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """``[n, TOP]`` log-probabilities, float32, and tokens of ``logits`` ``[n, V]``, best first; fewer of a smaller vocabulary."""
    count, vocabulary = min(TOP, logits.shape[1]), logits.shape[1]
    found = native.likeliest(logits, count) if logits.device.type == "cpu" else None
    if found is not None:
        return found
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
