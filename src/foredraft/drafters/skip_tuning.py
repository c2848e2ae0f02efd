"""Finds out while texts are written which sublayers a draft can do without (SWIFT, Xia et al. 2025).

A set is judged by a pass over the last tokens of a row without these sublayers: how often its likeliest token is that of a whole pass over
the same tokens. First come sets that leave out the sublayers which change the residual stream least, more and more of them, and sets that
leave out the last layers; then neighbours of the best set. All passes together take 2 % of the time at most. They stand beside the cache
and change nothing in it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor, nn

from foredraft.caching import private_place
from foredraft.drafters.base import Row
from foredraft.drafters.sublayer_costs import KINDS, LENGTHS, Skipped, Sublayer, SublayerCosts, set_of, sublayers_of
from foredraft.errors import ConfigurationError
from foredraft.models.features import first_tensor
from foredraft.models.identity import shape_of
from foredraft.models.skips import SkipSet, read
from foredraft.target import Target

SHARE, IDLE = 0.02, 0.002  # of the time; the latter once nothing better was found for long
PATIENCE = 32  # sets that are judged in vain until then
WINDOW, CONTEXT, FEWEST = 64, 16, 24  # tokens of a pass, those in front that are not counted, and the fewest that are
SETS = 4  # that are judged over the same tokens, besides the best
FIRST = 16  # rounds that the first pass is taken to cost
CAUTION = 4  # tokens that a set is taken to have had wrong besides those that were seen
LARGER = 0.03  # more seconds of a pass for every further token
SIZES = (4, 2, 3, 5, 1, 6)  # eighths of the sublayers that the first sets leave out
TAILS = (6, 4, 2)  # eighths of the layers, the last ones, that sets between them leave out

log = logging.getLogger(__name__)


class SkipTuner:
    """The set in use, and the search for a better one.

    Attributes:
        skip: what to leave out; another set only after :meth:`observe`.
        judged: tokens that were right and all tokens, of each set.
        spent, elapsed: seconds of the search, and of all rounds.
        version: of the target that it is about.
    """

    def __init__(self, target: Target, clock: Callable[[], float] = time.perf_counter):
        self.target, self.clock, self.version = target, clock, target.version
        self.sublayers, self.costs = sublayers_of(target.sublayers), by_size(target)
        self.judged: dict[Skipped, tuple[int, int]] = {}
        self.spent = self.elapsed = 0.0
        self._rounds, self._price, self._last, self._vain = 0, 0.0, clock(), 0
        self._window: tuple[Tensor, int, Tensor] | None = None  # ids [1, W], the first that counts, and what is expected from there on
        self._left: Iterator[Skipped] = iter(())  # to be judged over the window
        self._proposals: Iterator[Skipped | None] | None = None
        self._kept = self._path()
        self._stored = self._best = self._load() or self._mask(target.sublayers.spread)
        self.skip = set_of(self.sublayers, self._best)

    # -- between rounds -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Rows begin: what was before is nobody's time if none were live."""
        self._last = self.clock()

    def observe(self, rows: Sequence[Row]) -> None:
        """A round is over: make a pass of the search, if there is time for it."""
        now = self.clock()
        self.elapsed, self._rounds, self._last = self.elapsed + now - self._last, self._rounds + 1, now
        price = self._price or FIRST * self.elapsed / self._rounds
        if self.spent + price > (SHARE if self._vain < PATIENCE else IDLE) * self.elapsed:
            return
        if self._step(rows):
            self._price = self.clock() - now
            self.spent += self._price

    @torch.inference_mode()
    def _step(self, rows: Sequence[Row]) -> bool:
        """One pass; whether there was enough text for it."""
        for proposed in self._left:
            self._judge(proposed)
            return True
        row = max(rows, key=lambda row: len(row.ids) - row.prompt_length)
        ids = row.ids[-WINDOW:]
        first = max(CONTEXT, row.prompt_length - len(row.ids) + len(ids))
        if len(ids) - first < FEWEST:
            return False
        window = torch.tensor([ids], device=self.target.device)
        if self._proposals is None:
            expected, influence = influenced(self.target, window)
            self._proposals = self._proposed([influence.get(each, 1.0) for each in self.sublayers])
        else:
            expected = self.target.apart(window)
        self._window, self._left = (window, first, expected[0, first - 1 : -1].argmax(-1)), self._next_sets()
        return True

    def _judge(self, skipped: Skipped) -> None:
        assert self._window is not None
        ids, first, expected = self._window
        found = self.target.apart(ids, set_of(self.sublayers, skipped))[0, first - 1 : -1].argmax(-1)
        right, total = self.judged.get(skipped, (0, 0))
        self.judged[skipped] = right + int((found == expected).sum()), total + len(expected)
        best = max(self.judged, key=self._rate)
        self._vain = self._vain + 1 if best == self._best else 0
        self._best, self.skip = best, set_of(self.sublayers, best)

    def _rate(self, skipped: Skipped) -> float:
        """Predicted; a set that was hardly seen is not trusted much."""
        right, total = self.judged[skipped]
        return self.costs.rate(skipped, right / (total + CAUTION))[0]

    # -- what to judge ------------------------------------------------------------------------------------------------

    def _next_sets(self) -> Iterator[Skipped]:
        """The best set, as it fares over these tokens, and a few more."""
        yield self._best
        assert self._proposals is not None
        for _ in range(SETS):
            if (proposed := next(self._proposals)) is None:
                return
            yield proposed

    def _proposed(self, influence: Sequence[float]) -> Iterator[Skipped | None]:
        """Sets that were not judged; None while there is none near the best, which may become another one."""
        count = len(self.sublayers)
        order = sorted(range(count), key=lambda index: influence[index] / self.costs.sublayers[index])
        least = [order[: min(max(1, round(eighths * count / 8)), count - 1)] for eighths in SIZES]
        layers = 1 + max(layer for _, layer in self.sublayers)
        tails = [[index for index, (_, layer) in enumerate(self.sublayers) if 8 * layer >= (8 - eighths) * layers] for eighths in TAILS]
        for chosen in (each for both in zip_longest(least, tails) for each in both if each):
            if (found := tuple(index in chosen for index in range(count))) not in self.judged:
                yield found
        while True:
            more = [index for index in order if not self._best[index]]
            fewer = [index for index in reversed(order) if self._best[index]]
            changed = (index for both in zip_longest(more, fewer) for index in both if index is not None)
            near = (tuple(left_out ^ (place == index) for place, left_out in enumerate(self._best)) for index in changed)
            yield next((each for each in near if each not in self.judged and any(each) and not all(each)), None)

    # -- from one start to the next -----------------------------------------------------------------------------------

    def store(self) -> None:
        """Keep the best set for the next start, if it has changed; that is time of the search as well."""
        if self._kept is None or self._best == self._stored:
            return
        begin = self.clock()
        trials = [
            {**asdict(set_of(self.sublayers, each)), "right": self.judged[each][0], "total": self.judged[each][1]}
            for each in sorted(self.judged, key=self._rate, reverse=True)
        ]
        try:
            self.skip.save(self._kept, self.target.model, trials)
            self._stored = self._best
        except OSError as error:
            log.warning("the skip set %s cannot be written: %s", self._kept, error)
        self.spent += self.clock() - begin

    def _path(self) -> Path | None:
        """The file for this model; None where none are kept."""
        model = self.target.model
        place = private_place("skips", {**asdict(shape_of(model)), "class": type(model).__name__, "dtype": str(model.dtype)})
        return None if place is None else place.with_suffix(".json")

    def _load(self) -> Skipped | None:
        """The best set of the last start."""
        if self._kept is None or not self._kept.exists():
            return None
        try:
            skip, trials = SkipSet.load(self._kept, self.target.model), read(self._kept)["trials"]
            self.target.sublayers.check(skip)
            self.judged = {self._mask(SkipSet(each["attention"], each["mlp"])): (int(each["right"]), int(each["total"])) for each in trials}
        except (ConfigurationError, KeyError, TypeError, ValueError) as error:
            log.warning("the skip set %s cannot be used, a search begins anew: %s", self._kept, error)
            self.judged = {}
            return None
        return self._mask(skip)

    def _mask(self, skip: SkipSet) -> Skipped:
        return tuple(layer in getattr(skip, kind) for kind, layer in self.sublayers)


def influenced(target: Target, ids: Tensor) -> tuple[Tensor, dict[Sublayer, float]]:
    """The logits of a pass over ``ids``, and by how much each sublayer changes the residual stream in it."""
    found, given, share = target.sublayers, dict[int, Tensor](), dict[Sublayer, float]()

    def before(index: int, layer: nn.Module, arguments: object, named: object) -> None:
        given[index] = first_tensor(arguments, named)

    def after(kind: str, index: int, sublayer: nn.Module, arguments: object, output: object) -> None:
        added = first_tensor(output).float().norm(dim=-1).flatten()
        share[kind, index] = float((added / given[index].float().norm(dim=-1).flatten().clamp(min=1e-6)).mean())

    with ExitStack() as hooks:
        for index, layer in enumerate(found.ranges.layers):
            hooks.callback(layer.register_forward_pre_hook(partial(before, index), with_kwargs=True).remove)
            for kind in KINDS:
                if (sublayer := getattr(found, kind)[index]) is not None:
                    hooks.callback(sublayer.register_forward_hook(partial(after, kind, index)).remove)
        return target.apart(ids), share


def by_size(target: Target) -> SublayerCosts:
    """Seconds as the weights have it, which a pass over one token reads once; a pass of the whole target takes 1."""
    found = target.sublayers
    sizes = [sum(weight.numel() for weight in getattr(found, kind)[layer].parameters()) for kind, layer in sublayers_of(found)]
    total = sum(weight.numel() for weight in target.model.parameters())
    outer, inner = target.model.get_output_embeddings().weight, target.model.get_input_embeddings().weight
    if outer is not inner:
        total -= inner.numel()  # of which a row is read
    passes = tuple(1 + LARGER * more for more in range(LENGTHS + 1))
    return SublayerCosts(tuple(size / total for size in sizes), max(1 - sum(sizes) / total, 1e-3), passes)
