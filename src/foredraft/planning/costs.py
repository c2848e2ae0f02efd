"""What a round takes: the target's pass, the draft, and the rest, from measured points and from every round since."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.device import wait_for
from foredraft.drafters.base import Drafter, DraftRequest, Feedback
from foredraft.logits.processors import Pipeline
from foredraft.logits.sampler import Sampler
from foredraft.models.encoder_decoder import Source
from foredraft.planning.curves import Curve, monotone
from foredraft.planning.expert_costs import ExpertCosts
from foredraft.shapes import StaticShape, TreeShape
from foredraft.speedup import ENOUGH
from foredraft.target import Target
from foredraft.tree import Proposal, TokenTree

BUDGET = 2.0  # seconds that a first measurement may take
RECORDING = 2  # times as long where passes are recorded: a recording takes as long as five passes or so without one
PROMPT = 16  # tokens in the cache while it is made; too few to be found again as the beginning of another text
READ = 256  # tokens of all rows together at most: reading must leave time to measure
LONGER = 8  # times as many as `PROMPT`, to see what a longer context costs
REPEATS = 7
SIZES = (1, 5, 12, 2, 13, 8, 3, 16, 24, 25, 32, 64)  # nodes per row, the root included, most important first; kernels take 12 together
WIDTHS = (4, 12)  # nodes of a level of a draft, besides 1
MISSED = 4  # tokens per row that a draft reads besides without much notice
FEW_TREES, LEAST_SHARE = 2, 0.04  # rounds over trees that "no longer than chains" counts for, and what a round counts of their average
SLOWER = 2.0  # rounds that one over a tree may count longer
FADING_TREES = 0.99  # of what trees take longer is still believed a round without one later: they are tried again
SPARED = 0.2  # what a round counts of what such rounds spare
LEAST_SPARED, MOST_SPARED = 0.001, 0.5  # the least and the most that they spare of a round
TOGETHER = 10  # tokens that are read together in the time of one level, until it was seen
LEVEL, LOOK_UP = 2e-3, 2e-5  # seconds of a draft's level where a target's pass takes 10 ms: of a model, and of a mere look-up


class CostModel:
    """Seconds of target passes, drafts and the rest of a round.

    A draft of levels below w0 = 1, w1, w2, … nodes takes ``fixed + sum level(w)``, and ``catch_up`` for every token that the drafter
    has not seen yet, which are those of the rounds that it sat out.

    Attributes:
        target: of a pass over so many nodes per row, the root included.
        experts: what passes take less because their nodes share experts.
        branching: per number of rows, how much longer rounds took over trees that branch than over chains of their size, on average, and in
            how many rounds.
        level: of one level of the draft, by the nodes it is drafted below.
        rest: of a round outside both: choosing tokens, the verdict, bookkeeping; by nodes.
        context: more per row and token of context beyond ``PROMPT``, in the target's pass.
        spared: by a pass of plain decoding of a single row that is made in one call with others; None until some were seen, 0 where passes
            are not made together.
        fixed, catch_up: per number of rows.
        exits: per number of rows and layer, of a pass over one node that leaves the target there, for a drafter that can choose.
        spent: seconds that measuring took so far.
        plain_passes: of this process that were timed, by the number of rows.
    """

    def __init__(self, *, level: float = LEVEL) -> None:
        """``level`` is what a level of the draft is taken to cost until one was seen, where a target's pass takes 10 ms."""
        self._prior_level = level
        self.spent = 0.0
        self.exits: dict[int, dict[int, float]] = {}
        self.plain_passes: dict[int, int] = {}
        self.experts = ExpertCosts()
        self.forget()

    def forget(self) -> None:
        """Nothing is known of passes and drafts."""
        self.target = Curve(lambda tokens: 1e-2 * (1 + 0.15 * (tokens - 1)))
        self.experts.forget()
        self.branching: dict[int, tuple[float, int]] = {}
        self._checked: dict[int, float] = {}  # what was known of that when all sizes were last compared
        self._tree_drift = 0.0
        self.level = Curve(lambda tokens: self._prior_level * (1 + 0.05 * (tokens - 1)))
        self.rest = Curve(lambda tokens: 1e-4)
        self.spared: float | None = None
        self._warm = False  # passes were made together before
        self._pace = 0.0  # the target's scale when a draft was last timed
        self.context = 0.0
        self.fixed: dict[int, float] = {}
        self.catch_up: dict[int, float] = {}
        self._doubted = False  # what drafts take was read from a profile, and none was timed since

    def plain_seconds(self, rows: int, context: float) -> tuple[float, bool] | None:
        """Seconds of a round of plain decoding, and whether they were measured in this process; None where no pass was ever timed."""
        if not self.target.points and not self.plain_passes:
            return None
        timed = self.plain_passes[min(self.plain_passes, key=lambda each: abs(each - rows))] if self.plain_passes else 0
        return self.plain(rows, context), timed >= ENOUGH

    def plain(self, rows: int, context: float) -> float:
        """Seconds of a round that is planned without a draft."""
        return self.verify(rows, (1,), context)[0] - (self.spared or 0.0 if rows == 1 else 0.0)

    def pass_seconds(self, rows: int, nodes: float, context: float) -> float:
        """Of a whole pass over ``nodes`` per row, the longest row having ``context`` tokens."""
        return self._passes(rows, (nodes,), False)[0] + self.context * rows * max(0, context - PROMPT)

    def verify(self, rows: int, sizes: Sequence[float], context: float, *, branching: bool = False) -> list[float]:
        """Seconds of a pass over each of ``sizes`` nodes per row, ascending, the longest row having ``context`` tokens, and of the rest
        of its round; chains, or ``branching`` trees."""
        more = self.context * rows * max(0, context - PROMPT)
        more += self._longer(rows) if branching else 0.0
        return [pass_ + rest + more for pass_, rest in zip(self._passes(rows, sizes, branching), self.rest.line(rows, sizes))]

    def _passes(self, rows: int, sizes: Sequence[float], branching: bool) -> list[float]:
        """Seconds of the target's pass for each of ``sizes``, ascending; never less for more."""
        found = self.target.line(rows, sizes)
        if self.experts.routing is None:
            return found
        plain = self.target.at(rows, 1)
        found = [each + self.experts.more(rows, size, plain, branching=branching) for size, each in zip(sizes, found)]
        return list(accumulate(found, max))

    def draft_seconds(self, rows: int, widths: Sequence[int], behind: int = 0) -> float:
        """Of levels below ``widths`` nodes, by a drafter that is ``behind`` by so many tokens, summed over rows."""
        return self.drafts(rows)(widths) + self.catching_up(rows, behind) if widths else 0.0

    def drafts(self, rows: int) -> Callable[[Sequence[int]], float]:
        """:meth:`draft_seconds` of drafts that are compared with each other, by a drafter that has read everything."""
        factor, fixed, known = self._factor, self._nearest(self.fixed, rows), dict[frozenset[int], dict[int, float]]()

        def seconds(widths: Sequence[int]) -> float:
            if not widths:
                return 0.0
            some = frozenset(widths)
            if some not in known:
                known[some] = dict(zip(sorted(some), self.level.line(rows, sorted(some))))
            return factor * (fixed + sum(map(known[some].__getitem__, widths)))

        return seconds

    @property
    def drift(self) -> float:
        """How far passes over chains, or over trees, have become slower or quicker, as a logarithm, since all sizes were last compared."""
        return max(self.target.drift, self._tree_drift)

    def recheck(self) -> None:
        """From here on every size is learnt quickly again."""
        self.target.recheck()
        self._checked.clear()
        self._tree_drift = 0.0

    def _longer(self, rows: int) -> float:
        """Seconds that a round over a tree takes more."""
        return max(0.0, self._nearest({count: longer for count, (longer, _) in self.branching.items()}, rows))

    def leave(self, layer: int) -> None:
        """Drafts leave the target at ``layer`` from now on; what a level costs beside such a pass is taken to be the same everywhere."""
        for rows, measured in self.exits.items():
            if layer in measured:
                self.level.measured(rows, 1, measured[layer])

    def leaving(self, rows: int) -> dict[int, float]:
        """:attr:`exits` of the nearest number of rows; empty where nothing was measured."""
        known = {each: found for each, found in self.exits.items() if found}
        return known[min(known, key=lambda each: abs(each - rows))] if known else {}

    def catching_up(self, rows: int, behind: int) -> float:
        """Seconds to read ``behind`` tokens, all rows together."""
        if behind <= 0:
            return 0.0
        price = self._nearest(self.catch_up, rows) if self.catch_up else self.level.at(rows, 1) / (rows * TOGETHER)
        return self._factor * price * behind

    @property
    def _factor(self) -> float:
        """A machine that has become slower since drafts were last timed makes them slower too."""
        return math.exp(self.target.scale - self._pace)

    def observe(
        self,
        rows: int,
        nodes: float,
        context: int,
        target: float,
        rest: float,
        draft: float | None,
        widths: Sequence[int],
        behind: int,
        *,
        branching: bool = False,
        touched: float | None = None,
        together: bool | None = None,
    ) -> None:
        """A round of ``nodes`` per row, the root included; ``draft`` is None where none was made or its time is not known apart. What a
        tree takes says nothing of a plain round: on a small model, its mask and the moves in the cache are a good part of it. ``touched``:
        experts of a layer that some node took, where that is known. ``together``, of a round after which it was certain
        that others would be plain: whether their passes were made in the same call; then the seconds are of one of them."""
        more = self.context * rows * max(0, context - PROMPT)
        alone = max(target - more, 0.1 * target)
        if self.experts.routing is not None and touched is not None:
            alone += self.experts.spared(rows, nodes, self.target.at(rows, 1), touched)  # as if it had been of random tokens
            self.experts.learn(rows, nodes, touched, branching=branching)
        if branching:
            chain = self.target.at(rows, nodes) + self.rest.at(rows, nodes)
            before, count = self.branching.get(rows, (0.0, 0))
            longer = min(alone + rest - chain, before + SLOWER * chain)
            self.branching[rows] = before + max(LEAST_SHARE, 1 / (count + FEW_TREES)) * (longer - before), count + 1
            longer = self._longer(rows)
            self._tree_drift = abs(math.log((chain + longer) / (chain + self._checked.setdefault(rows, longer))))
        else:
            self.target.observe(rows, nodes, alone)
            if not together:
                self.rest.observe(rows, nodes, rest)
            if together is not None and rows == 1:
                self._observe_spared(self.verify(rows, (nodes,), context)[0], target + rest, together)
            self.branching = {each: (FADING_TREES * longer, count) for each, (longer, count) in self.branching.items()}
        if nodes == 1:
            self.plain_passes[rows] = self.plain_passes.get(rows, 0) + 1
        if draft is not None and widths:
            self._observe_draft(rows, draft, widths, behind)

    def _observe_spared(self, usual: float, seconds: float, together: bool) -> None:
        """The first passes that are made together say nothing: their code runs for the first time. A later one that seems to spare nothing
        counts as if it had spared a little: with nothing, no more passes would be made together, and this would never be measured again."""
        if together and not self._warm:
            self._warm = True
            return
        spared = min(max(usual - seconds, LEAST_SPARED * usual), MOST_SPARED * usual) if together else 0.0
        self.spared = spared if self.spared is None else self.spared + SPARED * (spared - self.spared)

    def _observe_draft(self, rows: int, draft: float, widths: Sequence[int], behind: int) -> None:
        """Where much was missed, what is left of the seconds after the levels is the price of that."""
        doubted = self._doubted
        if doubted and behind > 0 and self.catch_up:
            self.catch_up[rows] = min(self._nearest(self.catch_up, rows), draft / behind / self._factor)
        if doubted and behind > MISSED * rows:
            return
        self._doubted = False
        if behind > MISSED * rows and self.level.known:
            price = max(0.0, draft - self.draft_seconds(rows, widths)) / behind / self._factor
            before = self.catch_up.get(rows)
            self.catch_up[rows] = price if before is None else before + 0.3 * (min(price, 3 * before + 1e-9) - before)
            return
        if behind > MISSED * rows:
            draft *= len(widths) / (len(widths) + behind / rows / TOGETHER)
        expected, steady = self.level.at(rows, 1) * self._factor, self.draft_seconds(rows, widths)
        if self.level.known:
            self.level.scale += self.target.scale - self._pace
        self._pace = self.target.scale
        draft = max(draft - self.catching_up(rows, behind), 0.1 * draft)
        self.level.observe(rows, 1, expected * draft / steady)
        if draft < steady and (fixed := self._nearest(self.fixed, rows)) > (most := 0.5 * draft / self._factor):
            self.fixed[rows] = fixed + (1.0 if doubted else 0.25) * (most - fixed)  # levels alone could not make up for it

    @staticmethod
    def _nearest(values: dict[int, float], rows: int) -> float:
        return values[min(values, key=lambda each: abs(each - rows))] if values else 0.0

    def to_dict(self) -> dict[str, Any]:
        """What was measured, for a profile; corrections are of the day."""
        return {
            "target": _written(self.target),
            "level": {} if any(self.exits.values()) else _written(self.level),  # it is that of one exit
            "context": self.context,
            "experts": self.experts.to_dict(),
            "fixed": {str(rows): seconds for rows, seconds in self.fixed.items()},
            "catch_up": {str(rows): seconds for rows, seconds in self.catch_up.items()},
            "exits": {str(rows): {str(layer): seconds for layer, seconds in each.items()} for rows, each in self.exits.items() if each},
            "spent": self.spent,
        }

    def load(self, plain: dict[str, Any]) -> None:
        """Take over what :meth:`to_dict` wrote.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: that is not it.
        """
        target, level = _read(plain["target"]), _read(plain["level"])
        context, spent = _positive(plain["context"]), _positive(plain["spent"])
        fixed, catch_up = ({int(rows): _positive(each) for rows, each in plain[name].items()} for name in ("fixed", "catch_up"))
        exits = {int(rows): {int(layer): _positive(each) for layer, each in some.items()} for rows, some in plain.get("exits", {}).items()}
        self.experts.load(plain["experts"])
        for curve, points in ((self.target, target), (self.level, level)):
            curve.trusted = False
            for rows, size, seconds in points:
                curve.measured(rows, size, seconds)
        self.context, self.spent, self.fixed, self.catch_up, self.exits = context, spent, fixed, catch_up, exits
        self._doubted = True


def _written(curve: Curve) -> dict[str, dict[str, float]]:
    return {str(rows): {str(size): each for size, each in points.items()} for rows, points in curve.points.items()}


def _read(plain: dict[str, dict[str, float]]) -> list[tuple[int, int, float]]:
    points = [(int(rows), int(size), _positive(each)) for rows, sizes in plain.items() for size, each in sizes.items()]
    if any(rows < 1 or size < 1 or seconds <= 0 for rows, size, seconds in points):
        raise ValueError("a measured point is not positive")
    return points


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 <= number < 1e6:
        raise ValueError(f"{value!r} is no number of seconds")
    return number


# -- measuring ------------------------------------------------------------------------------------------------------------


@dataclass
class StandIn:
    """A row that only a measurement sees."""

    slot: int
    ids: list[int]
    capacity: int
    source: Source | None = None
    isolation: str | None = None
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.ids)


def timed_beforehand(drafter: Drafter) -> bool:
    """Whether drafts are timed before the first round: those of a model or a head of its own. Other drafters may learn from what they are
    shown, and the first rounds tell what they cost."""
    return drafter.info.draft_model is not None or drafter.info.head is not None


def measure(
    costs: CostModel,
    target: Target,
    drafter: Drafter,
    *,
    rows: int = 1,
    largest: StaticShape,
    seconds: float = BUDGET,
    drafts: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Time passes of ``rows`` rows over up to as many nodes as ``largest`` has, and ``drafts``: after a warm-up of each, in turns, medians.

    Takes ``seconds`` at most, twice that where passes are recorded, but for the pass under way: fewer sizes and repeats of slow models. No
    row may be live; target and drafter are left without any.

    Returns:
        Which share of a core this thread had meanwhile; 1 on a GPU.
    """
    run = Measurement(target, drafter, rows, largest, clock)
    costs.experts.routing = target.routing
    seconds *= 1 if run.warm_ups == 1 else RECORDING
    begin, by_the_wall, processor = clock(), time.perf_counter(), time.thread_time()
    with target.unlimited():  # these rows are short
        try:
            target.keep(())
            own, exits = drafts and timed_beforehand(drafter), drafter.info.exits
            shares = drafts and drafter.info.shares_target
            run.passes(begin + (0.6 if own or exits or shares else 0.9) * seconds)
            if exits:
                run.exits(exits.layers, begin + (0.8 if shares else 0.9) * seconds)
            if own:
                run.drafts(begin + 0.9 * seconds)
            elif shares:
                run.rounds(begin + seconds)
        finally:
            target.reset()
            drafter.reset()
    run.fill(costs)
    costs.spent += clock() - begin
    on_cpu = target.device.type == "cpu"
    return (time.thread_time() - processor) / (time.perf_counter() - by_the_wall) if on_cpu else 1.0


class Measurement:
    """One measurement: the ``times`` of everything that was timed, by name."""

    def __init__(self, target: Target, drafter: Drafter, rows: int, largest: StaticShape, clock: Callable[[], float]):
        self.target, self.drafter, self.rows, self.largest, self.clock = target, drafter, rows, largest, clock
        self.times: dict[Any, list[float]] = {}
        self.touched: dict[int, list[float]] = {}  # experts of a layer that passes over so many nodes touched
        contexts = [each.trained for each in (target, *drafter.draft_models) if each.trained is not None]
        room = min(contexts, default=10**9) - largest.nodes - 1
        self.prompt = max(1, min(PROMPT, READ // rows, room))
        self.longer = min(PROMPT * LONGER, room)
        self.unread = 0  # tokens that a draft reads besides in "unread"
        self.warm_ups = 1 + max(each.warm_up for each in (target, *drafter.draft_models))
        self._generator = torch.Generator().manual_seed(rows)  # what was read for other numbers of rows is not found again
        ids = self._tokens(max(self.prompt, self.longer)).tolist()
        self.texts = [line[: self.prompt] for line in ids]
        self.prompt_hidden: list[Tensor] | None = None
        self.long_texts = ids

    def timed(self, name: Any, call: Callable[[], object]) -> float:
        wait_for(self.target.device)
        begin = self.clock()
        call()
        wait_for(self.target.device)
        spent = self.clock() - begin
        self.times.setdefault(name, []).append(spent)
        return spent

    def in_turns(self, calls: dict[Any, Callable[[], object]], deadline: float) -> None:
        """Each to warm up, as far as time allows, then those again and again."""
        begun: list[Any] = []
        start = self.clock()
        for name, call in calls.items():
            if begun and self.clock() - start > (0.4 if self.warm_ups == 1 else 0.8) * (deadline - start):
                break
            for _ in range(self.warm_ups):
                self.timed(name, call)
            del self.times[name][:-1]  # the last stands in where there is no time for more
            begun.append(name)
        for repeat in range(REPEATS):
            for name in begun:
                if self.clock() > deadline:
                    return
                self.timed(name, calls[name])
                if repeat == 0:
                    del self.times[name][0]

    def passes(self, deadline: float) -> None:
        self._open(self.texts)
        self.prompt_hidden = self.target.prompt_hidden if self.drafter.info.features else None
        most = self.largest.nodes + 1 + self.drafter.info.extra_nodes
        if self.target.trained is not None:
            most = min(most, self.target.trained - self.prompt)
        sizes = [size for size in dict.fromkeys((*SIZES, most)) if size <= most]
        self.in_turns({("target", size): self._scoring(size) for size in sizes}, deadline)
        self.target.reset()
        prefill, pass_ = self.times["prefill", self.prompt][0], median(self.times["target", 1])
        if self.longer > self.prompt and self.clock() + prefill * self.longer / self.prompt + 4 * pass_ < deadline:
            self._open(self.long_texts)
            self.in_turns({("longer", 1): self._scoring(1)}, self.clock() + 4 * pass_)
            self.target.reset()

    def exits(self, layers: Sequence[int], deadline: float) -> None:
        self._open(self.texts)
        root = self._chain(1)
        self.in_turns({("exit", layer): self._leaving(root, layer) for layer in (layers[0], layers[-1], *layers[1:-1])}, deadline)
        self.target.reset()

    def drafts(self, deadline: float) -> None:
        sources = self.target.some_sources(self.rows)
        rows = [StandIn(slot, list(text), self.prompt + self.largest.nodes + 1, sources[slot]) for slot, text in enumerate(self.texts)]
        self._begin(rows)
        deep = min(4, self.largest.depth)
        shapes: dict[str, TreeShape] = {"one": TreeShape.chain(1), "deep": TreeShape.chain(deep)}
        for width in WIDTHS:
            shape = TreeShape.product(width, 1)
            if (
                not self.largest.is_chain
                and width <= min(self.target.vocab_size, self.largest.nodes)
                and self.drafter.refusal(shape) is None
            ):
                shapes[f"wide {width}"] = shape
        self.in_turns({(name, shape.depth): self._drafting(rows, shape) for name, shape in shapes.items()}, deadline)
        self.drafter.end(rows)
        likely = self.longer / TOGETHER * median(self.times["one", 1])
        texts = [self.texts, self.texts]
        if self.prompt_hidden is None and self.clock() + 2 * likely < deadline:  # few tokens may take as long as many
            texts = [self.long_texts, self._tokens(self.longer).tolist()]
        self.unread = len(texts[0][0]) - 1
        for some in texts:  # the first time, code runs that never ran before
            rows = [StandIn(slot, list(text), len(text) + 2, sources[slot]) for slot, text in enumerate(some)]
            self._begin(rows)
            self.timed("unread", self._drafting(rows, shapes["one"]))
            self.drafter.end(rows)
        del self.times["unread"][0]

    def rounds(self, deadline: float) -> None:
        """Drafts by layers of the target itself, which read from its cache, together with the passes that verify them."""
        self._open(self.texts)
        rows = [StandIn(slot, list(text), self.prompt + self.largest.nodes + 1) for slot, text in enumerate(self.texts)]
        self._begin(rows)
        calls: dict[Any, Callable[[], object]] = {}
        for depth in sorted({1, min(4, self.largest.depth)}):
            calls["round", depth] = self._drafting(rows, TreeShape.chain(depth), verified=True)
            calls["whole", depth] = self._scoring(depth + 1)
        self.in_turns(calls, deadline)
        self.drafter.end(rows)

    def fill(self, costs: CostModel) -> None:
        """Put the medians into ``costs``."""
        medians = {name: median(times) for name, times in self.times.items()}
        for name, seconds in medians.items():
            if name[0] == "target":
                size, touched = name[1], self.touched.get(name[1])
                plain, mean = medians["target", 1], None if touched is None else sum(touched) / len(touched)
                costs.target.measured(self.rows, size, seconds + costs.experts.spared(self.rows, size, plain, mean))
        exits = self.drafter.info.exits
        known = [layer for layer in exits.layers if ("exit", layer) in medians] if exits else []
        if exits:
            costs.exits.setdefault(self.rows, {})  # measured once, whatever was found
        if exits and len(known) > 1:  # a slow model leaves time for the first and the last one
            measured = [medians["exit", layer] for layer in known]
            taken = [float(np.interp(layer, known, measured)) for layer in exits.layers]
            costs.exits[self.rows] = dict(zip(exits.layers, monotone(taken)))
        costs.plain_passes[self.rows] = costs.plain_passes.get(self.rows, 0) + len(self.times["target", 1])
        if ("longer", 1) in medians:
            more = (medians["longer", 1] - medians["target", 1]) / (self.rows * (self.longer - self.prompt))
            costs.context = max(costs.context, more, 0.0)
        for _, depth in [name for name in medians if name[0] == "round"]:  # a draft costs what its round takes on top of a whole pass
            more = medians["round", depth] - medians.get(("whole", depth), costs.target.base(self.rows, depth + 1))
            medians["one" if depth == 1 else "deep", depth] = max(more, 0.05 * medians["round", depth])
        one = medians.get(("one", 1))
        if one is None:
            return
        deep = next(((name[1], seconds) for name, seconds in medians.items() if name[0] == "deep"), None)
        level = one if deep is None or deep[0] == 1 else min(one, max((deep[1] - one) / (deep[0] - 1), 0.05 * one))
        costs.fixed[self.rows] = one - level
        if exits and self.rows in costs.exits:  # what a level takes besides its pass, it takes everywhere
            besides = max(0.0, level - costs.exits[self.rows].get(exits.layer, level))
            costs.exits[self.rows] = {layer: seconds + besides for layer, seconds in costs.exits[self.rows].items()}
        costs.level.measured(self.rows, 1, level)
        for width in WIDTHS:
            if (f"wide {width}", 2) in medians:
                costs.level.measured(self.rows, width, max(medians[f"wide {width}", 2] - one, level))
        if "unread" in medians:
            costs.catch_up[self.rows] = max(0.0, medians["unread"] - one) / (self.rows * max(1, self.unread))

    def _open(self, texts: list[list[int]]) -> None:
        length = len(texts[0])
        reserve, sources = [length + self.largest.nodes + 1] * self.rows, self.target.some_sources(self.rows)
        self.target.open(texts, reserve=reserve, sources=sources)
        self.timed(("prefill", length), lambda: self.target.prefill(texts, first=0))

    def _tokens(self, size: int) -> Tensor:
        """``[rows, size]`` that hardly repeat."""
        return torch.randint(0, self.target.vocab_size, (self.rows, size), generator=self._generator, device="cpu")

    def _chain(self, size: int) -> TokenTree:
        return TokenTree.from_chain(self._tokens(size).to(self.target.device))

    def _scoring(self, size: int) -> Callable[[], object]:
        """Chains of other tokens in every repeat: what a mixture of experts takes depends on how many of them the tokens touch."""
        trees = cycle([self._chain(size) for _ in range(REPEATS)])

        def score() -> None:
            self.target.score(next(trees))
            if (touched := self.target.touched) is not None:
                self.touched.setdefault(size, []).append(touched)

        return score

    def _leaving(self, root: TokenTree, layer: int) -> Callable[[], object]:
        return lambda: self.target.score_early(root, layer)

    def _drafting(
        self,
        rows: Sequence[StandIn],
        shape: TreeShape,
        *,
        verified: bool = False,
        sampler: Sampler | None = None,
        proposal: Proposal = "deterministic",
    ) -> Callable[[], object]:
        """Greedily, unless a ``sampler`` and how drafts are chosen are given."""
        greedy = Sampler(
            pipelines=[Pipeline()] * self.rows,
            sampled=[False] * self.rows,
            lengths=[len(row.ids) for row in rows],
            noise=None,
            committed=self._no_history,
        )
        request = DraftRequest(
            rows=rows,
            shape=shape,
            depth=shape.depth,
            limits=[shape.depth] * self.rows,
            proposal=proposal,
            needs_q=proposal == "iid",
            vocab_size=self.target.vocab_size,
            device=self.target.device,
            sampler=sampler or greedy,
        )

        def draft() -> None:
            tree = self.drafter.draft(request)
            if verified:  # nothing is said of it: some drafters learn from what they are told
                self.target.score(tree.with_safe_parents())
                return
            path = None if tree.chain else torch.zeros(self.rows, shape.depth + 1, dtype=torch.long, device=tree.tokens.device)
            self.drafter.observe(rows, Feedback(tree, [0] * self.rows, path, hidden=self._hidden(tree.nodes)))

        return draft

    def _begin(self, rows: Sequence[StandIn]) -> None:
        if self.prompt_hidden is not None:
            self.drafter.read(rows, self.prompt_hidden)
        self.drafter.begin(rows)

    def _hidden(self, nodes: int) -> Tensor | None:
        """Hidden states at every node, for a drafter that reads some: those of the prompts again."""
        if self.prompt_hidden is None:
            return None
        return torch.stack([states[-1:] for states in self.prompt_hidden]).expand(-1, nodes, -1)

    @staticmethod
    def _no_history() -> Tensor:
        raise AssertionError("no processor reads a history here")
