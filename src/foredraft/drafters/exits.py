"""How often each layer of a target would have been right, had a draft left the target there.

Now and then the passes of a round keep what comes out of the layers in question, and one product with the LM head over a few nodes of
the accepted paths shows where they agree with the target. That takes ``SHARE`` of the time: after each look there is none until the rounds
since have paid for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from foredraft.target import Target

MOST = 8  # layers that are looked at
SHARE, IDLE = 0.01, 0.002  # of the time that looks may take; the latter where nothing is drafted, and a look sees one node
STATES = 24  # that the LM head reads in one look, at most
MEMORY = 0.995  # of what was known that a node leaves
ENOUGH = 24.0  # nodes looked at, until which nothing is said
PASSAGE, NODES = 128, 8  # rounds of a text that are alike, and nodes that looks at them count for at most: texts differ more than nodes
DOUBT = 1.0  # standard errors by which the rates of layers that are not in use are lowered: the best of many looks better than it is
USUAL = 0.2  # of the seconds of a round without a look that come from the newest one


class Exits:
    """The ``layers`` at which a draft may leave, counted from 1 and ascending, and the ``layer`` in use."""

    def __init__(self, layers: Sequence[int], layer: int, *, clock: Callable[[], float] = time.perf_counter):
        self.layers, self.layer, self.clock = tuple(layers), layer, clock
        self.greedy = True  # whether no row samples; the planner says so in every round
        self._begun: float | None = None  # when the round under way began
        self._usual: dict[int, float] = {}  # seconds of a round without a look, by nodes
        self._debt = 0.0  # seconds that looks took and rounds have not paid for
        self._looks = 0
        self._rounds = 0  # of the passage
        self.forget()

    @staticmethod
    def of(count: int, *, first: int) -> Exits | None:
        """Those of a model of ``count`` layers: up to three quarters of them, evenly spread; ``layer`` is the one nearest to ``first``.
        None where that is no choice."""
        top = max(1, 3 * count // 4)
        number = min(top, MOST)
        layers = sorted({round(index * top / number) for index in range(1, number + 1)})
        return Exits(layers, min(layers, key=lambda layer: abs(layer - first))) if len(layers) > 1 else None

    def forget(self) -> None:
        """What looks have shown."""
        self._seen: dict[bool, float] = {True: 0.0, False: 0.0}
        self._passages, self._new = 0, True  # that were looked at, and whether the present one was not
        self._right = {greedy: torch.zeros(len(self.layers), dtype=torch.float64) for greedy in (True, False)}

    def odds(self, *, greedy: bool) -> dict[int, float]:
        """By layer, the odds that its guess is accepted over those of the layer in use; empty where too little is known."""
        seen = min(self._seen[greedy], NODES * self._passages)
        if seen < ENOUGH or self.layer not in self.layers:
            return {}
        rates = ((self._right[greedy] + 0.5) / (self._seen[greedy] + 1)).tolist()
        low = [rate - DOUBT * (rate * (1 - rate) / seen) ** 0.5 for rate in rates]
        used = self.layers.index(self.layer)
        low[used] = rates[used]
        chances = [max(rate, 0.01) / (1 - max(rate, 0.01)) for rate in low]
        return {layer: chance / chances[used] for layer, chance in zip(self.layers, chances)}

    # -- looking --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A round begins that says nothing of the ones before it, such as the first of new rows."""
        self._begun, self._rounds, self._new = self.clock(), 0, True

    def observe(self, target: Target, logits: Tensor, accepted: Sequence[int], path: Tensor | None, *, drafted: bool = True) -> None:
        """A round is over: look at it, if its states were kept, and have those of the next one kept, if there is time for a look.

        Args:
            logits: ``[R, N, V]`` the target's own.
            accepted, path, drafted: as in :class:`~foredraft.drafters.base.Feedback`.
        """
        nodes = logits.shape[1] if drafted else -logits.shape[1]
        self._rounds += 1
        if self._rounds % PASSAGE == 0:
            self._new = True
        paid = IDLE * self._usual.get(1, 0.0)
        if nodes == 1 and not target.kept and self._debt > 2 * paid > 0:  # nothing to look at, nor in the next round
            self._debt, self._begun = self._debt - paid, None
            return
        now = self.clock()
        usual = self._usual.get(nodes, 0.0)
        took = usual if self._begun is None else now - self._begun
        usual = usual or took
        if target.kept:
            self._look(target, logits, accepted, path)
            self._debt += self.clock() - now + min(max(took - usual, 0.0), usual)
        else:
            self._usual[nodes] = usual + USUAL * (took - usual)
        self._debt = max(0.0, self._debt - (SHARE if nodes > 1 else IDLE) * took)
        target.keep(() if self._debt else self.layers)
        self._begun = self.clock()

    def _look(self, target: Target, logits: Tensor, accepted: Sequence[int], path: Tensor | None) -> None:
        paths = [list(range(count + 1)) for count in accepted] if path is None else path.tolist()
        places = [(row, node) for row, (count, nodes) in enumerate(zip(accepted, paths)) for node in nodes[: count + 1]]
        count = min(max(1, STATES // len(self.layers)), len(places))
        self._looks, self._passages, self._new = self._looks + 1, self._passages + self._new, False
        places = [places[(index * len(places) // count + self._looks) % len(places)] for index in range(count)]
        rows, nodes = (torch.tensor(each, device=logits.device) for each in zip(*places))
        states = torch.cat(
            [target.kept[layer][rows.to(target.kept[layer].device), nodes.to(target.kept[layer].device)] for layer in self.layers]
        )
        ours = target.read_out(states).view(len(self.layers), count, -1).to(logits.device)  # [layers, count, V]
        theirs = logits[rows, nodes]
        self._add(True, ours.argmax(-1) == theirs.argmax(-1))
        if not self.greedy:
            chances = torch.minimum(ours.float().softmax(-1), theirs.float().softmax(-1)).sum(-1)
            self._add(False, chances.nan_to_num())  # a row that failed has NaN, which would stay for ever

    def _add(self, greedy: bool, right: Tensor) -> None:
        """``[layers, count]`` chances of being accepted."""
        memory = MEMORY ** right.shape[1]
        self._seen[greedy] = memory * self._seen[greedy] + right.shape[1]
        self._right[greedy] = memory * self._right[greedy] + right.cpu().double().sum(1)  # MPS has no float64
