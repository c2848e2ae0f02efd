"""What the project promises of its speed, and what a run says about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from benchmarks.peer_process import FOREDRAFT, TRANSFORMERS
from benchmarks.speed import Run
from benchmarks.speed_figures import Calls, Estimate, best
from benchmarks.speed_plan import BATCH, COMPILED, DRAFT, HOPELESS, LOOKUP, PLAIN, RANDOM, TEXT
from benchmarks.verdicts import Spread

PEER_DRAFT = {"bfloat16": 1.5, "float32": 1.2}
PEER_LOOKUP = {"bfloat16": 1.15, "float32": 1.1}
BANDWIDTH, ALLOWED, WORST, BATCHES, ASSISTED = 0.8, 0.95, 0.98, 1.0, 3.0
PREDICTED = (0.9, 1.1)
GPU_ASSISTED, GPU_COMPILED, GPU_BANDWIDTH, GPU_BANDWIDTH_LARGE, LARGE = 4.0, 2.0, 0.55, 0.8, 8e9  # LARGE in bytes per pass


@dataclass(frozen=True)
class Figure:
    """``spread`` must be ``low`` at least, or ``more``, and, where there is a ``high``, that at most. ``how`` says what was divided by
    what."""

    name: str
    low: float
    spread: Spread | None
    high: float | None = None
    how: str = ""
    more: bool = False

    @property
    def verdict(self) -> str:
        if self.spread is None:
            return "not measured"
        enough = self.low < self.spread.median if self.more else self.low <= self.spread.median
        return "met" if enough and (self.high is None or self.spread.median <= self.high) else "missed"

    @property
    def bound(self) -> str:
        if self.more:
            return f"> {self.low:g}"
        return f"≥ {self.low:g}" if self.high is None else f"{self.low:g}–{self.high:g}"

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def made(run: Run) -> list[Figure]:
    """Everything that is promised, for every target and dtype."""
    found: list[Figure] = []
    for target in run.settings.targets:
        for dtype in run.settings.dtypes:
            found += Findings(run, target, dtype).figures()
    return found


class Findings:
    """One target in one dtype."""

    def __init__(self, run: Run, target: str, dtype: str):
        self.run, self.target, self.dtype = run, target, dtype
        self.mine = [each for each in run.measurements if (each.target, each.dtype) == (target, dtype)]
        self.label = dtype if len(run.settings.targets) == 1 else f"{target} {dtype}"
        self.cuda = run.settings.device != "cpu"

    def calls(self, scenario: str, batch: int) -> Calls:
        return Calls([each for each in self.mine if (each.scenario, each.batch) == (scenario, batch)])

    def names(self, mode: str, *, ours: bool, side: str | None = None) -> list[str]:
        """Contenders of a mode, ours or the peers' or those of one side."""
        return [
            name
            for name, each in self.run.everyone.items()
            if each.mode == mode and (each.side == FOREDRAFT) == ours and side in (None, each.side) and not each.hopeless
        ]

    def figures(self) -> list[Figure]:
        text = self.calls(TEXT, 1)
        found = [self.bandwidth(text)]
        if self.cuda:
            found += [
                self.against(text, "transformers' assisted generation", GPU_ASSISTED, DRAFT, self.names(DRAFT, ours=False)),
                self.against(text, "transformers' compiled plain decoding", GPU_COMPILED, DRAFT, self.names(COMPILED, ours=False)),
            ]
        else:
            for mode, word, bounds in ((DRAFT, "draft model", PEER_DRAFT), (LOOKUP, "prompt lookup", PEER_LOOKUP)):
                if self.dtype in bounds:
                    peers = self.names(mode, ours=False)
                    found.append(self.against(text, f"the best peer's, {word}", bounds[self.dtype], mode, peers))
            if self.dtype == "bfloat16":
                theirs = self.names(DRAFT, ours=False, side=TRANSFORMERS)
                found.append(self.against(text, "transformers' assisted generation", ASSISTED, DRAFT, theirs))
        return [*found, *self.allowed(text), *self.predicted(text), *self.worst(), *self.batches()]

    def figure(self, name: str, low: float, value: Estimate | None, high: float | None = None, how: str = "") -> Figure:
        return Figure(f"{self.label}: {name}", low, None if value is None else value.spread, high, how)

    # -- one by one -----------------------------------------------------------------------------------------------------

    def bandwidth(self, text: Calls) -> Figure:
        bytes_, reads = self.run.bytes.get(f"{self.target} {self.dtype}"), self.read_rate()
        rate = text.decoding_rate("foredraft plain")
        low, name = BANDWIDTH, "plain decoding's effective bandwidth over that of a large read"
        if self.cuda:
            low = GPU_BANDWIDTH_LARGE if (bytes_ or 0) > LARGE else GPU_BANDWIDTH
            name = "plain decoding's effective bandwidth over that of a device copy"
        paired = None if not bytes_ else text.over_reads("foredraft plain", bytes_, self.reads())
        if rate is None or paired is None or not bytes_ or reads is None:
            return self.figure(name, low, None)
        how = f"{rate.value * bytes_ / 1e9:.1f} over {reads / 1e9:.1f} GB/s, paired call by call"
        return self.figure(name, low, paired, how=how)

    def reads(self) -> dict[tuple[int, int], float]:
        """Bytes per second, by prompt and repeat."""
        mine = [each for each in self.run.reads if (each.target, each.dtype) == (self.target, self.dtype)]
        return {(each.index, each.repeat): each.rate for each in mine}

    def read_rate(self) -> float | None:
        rates = self.reads().values()
        return median(rates) if rates else None

    def against(self, text: Calls, whom: str, low: float, mode: str, theirs: list[str]) -> Figure:
        """The best of ours in ``mode`` over the best of ``theirs``."""
        ours, other = best(self.names(mode, ours=True), text.rate), best(theirs, text.rate)
        name = f"tokens/s over {whom}"
        if ours is None or other is None:
            return self.figure(name, low, None, how="" if theirs else "none of them takes part")
        how = f"{ours[0]} {ours[1].value:.1f}, {other[0]} {other[1].value:.1f}"
        return self.figure(name, low, ours[1] / other[1], how=how)

    def allowed(self, text: Calls) -> list[Figure]:
        """For each chain of a fixed length γ: speed-up after the prompt, over acceptance length × t(1) / (t(γ + 1) + t_draft)."""
        found = []
        for name in self.names(DRAFT, ours=True):
            length = self.run.everyone[name].length
            if not length:
                continue
            what = f"speed-up over what acceptance and cost curve allow, {name}"
            curves = [
                each.values for each in self.run.curves if (each.target, each.dtype, each.contender) == (self.target, self.dtype, name)
            ]
            rate, plain, kept = text.decoding_rate(name), text.decoding_rate("foredraft plain"), text.acceptance(name)
            if not curves or rate is None or plain is None or kept is None:
                found.append(self.figure(what, ALLOWED, None))
                continue
            t1, tn, draft = (median(each[part] for each in curves) for part in ("t1", "tn", "draft"))
            speedup, most = rate / plain, kept * (t1 / (tn + draft))
            how = f"{speedup.value:.2f} of {kept.value:.2f} × {t1 * 1e3:.1f} / ({tn * 1e3:.1f} + {draft * 1e3:.1f} ms) = {most.value:.2f}"
            found.append(self.figure(what, ALLOWED, speedup / most, how=how))
            found.append(self._allowed_by_calls(text, name, speedup, kept))
        return found

    def _allowed_by_calls(self, text: Calls, name: str, speedup: Estimate, kept: Estimate) -> Figure:
        """The same with the passes and drafts of these very calls in place of a curve that was measured apart."""
        what = f"speed-up over what acceptance and its own passes allow, {name}"
        t1, tn, draft = text.part("foredraft plain", "target"), text.part(name, "target"), text.part(name, "draft")
        if t1 is None or tn is None or draft is None:
            return self.figure(what, ALLOWED, None)
        most = kept * t1 / (tn + draft)
        times = f"{t1.value * 1e3:.1f} / ({tn.value * 1e3:.1f} + {draft.value * 1e3:.1f} ms)"
        return self.figure(what, ALLOWED, speedup / most, how=f"{speedup.value:.2f} of {kept.value:.2f} × {times} = {most.value:.2f}")

    def predicted(self, text: Calls) -> list[Figure]:
        found = []
        for mode in (DRAFT, LOOKUP):
            for name in self.names(mode, ours=True):
                if self.run.everyone[name].automatic:
                    what = f"measured over planner-predicted tokens/s, {name}"
                    found.append(self.figure(what, PREDICTED[0], text.predicted_seconds(name), PREDICTED[1]))
        return found

    def worst(self) -> list[Figure]:
        """Text that cannot be guessed, against plain decoding of the same."""
        found = []
        for scenario in (HOPELESS, RANDOM):
            for batch in self.run.settings.batches:
                calls = self.calls(scenario, batch)
                plain = calls.rate("foredraft plain")
                for name in [each for each in calls.by_contender if self.run.everyone[each].mode != PLAIN] or [scenario]:
                    rate = calls.rate(name)
                    value = None if rate is None or plain is None else rate / plain
                    found.append(self.figure(f"{scenario}, batch {batch}: tokens/s over plain, {name}", WORST, value))
        return found if self.run.settings.worst else []

    def batches(self) -> list[Figure]:
        """With the planner on: over plain decoding at every batch, and the total over that of the next smaller batch."""
        found = []
        batches = sorted(self.run.settings.batches)
        calls = {batch: self.calls(TEXT if batch == 1 else BATCH, batch) for batch in batches}
        for mode in (DRAFT, LOOKUP):
            names = [name for name in self.names(mode, ours=True) if self.run.everyone[name].automatic]
            for name in names:
                rates = {batch: calls[batch].rate(name) for batch in batches}
                for batch in batches:
                    rate, plain = rates[batch], calls[batch].rate("foredraft plain")
                    value = None if rate is None or plain is None else rate / plain
                    found.append(self.figure(f"batch {batch}: tokens/s over plain, {name}", BATCHES, value))
                for small, large in pairwise(batches):
                    before, after = rates[small], rates[large]
                    value = None if before is None or after is None else _unpaired(after, before)
                    found.append(self.figure(f"batch {large} over batch {small}: total tokens/s, {name}", BATCHES, value))
        return found


def _unpaired(above: Estimate, below: Estimate) -> Estimate:
    """The quotient of two that have no calls in common: draws are shuffled against each other."""
    order = np.random.default_rng(1).permutation(len(below.draws))
    return Estimate(above.value / below.value, above.draws / below.draws[order])
