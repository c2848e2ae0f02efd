"""The speed suite: tokens per second of Foredraft and of the peers that a user would pick instead.

:mod:`benchmarks.speed_runner` says how calls are made and recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import numpy as np

from benchmarks import speed_plots
from benchmarks.figures import Figure, best
from benchmarks.peer_process import FOREDRAFT, TRANSFORMERS
from benchmarks.report import Table
from benchmarks.speed_calls import PERCENTILES, Calls
from benchmarks.speed_plan import BATCH, COMPILED, DRAFT, HOPELESS, LOOKUP, ON_CUDA, PLAIN, RANDOM, TEXT, Settings
from benchmarks.speed_runner import PeerSuite
from benchmarks.speed_tables import (
    OURS,
    PLAIN_OF_OURS,
    Comparison,
    comparisons,
    equality,
    failed,
    figures,
    memory,
    missing,
    quiet,
    ratio,
    sides,
    speed,
    split,
    unusual,
)
from benchmarks.suite import instrument
from foredraft.estimates import LEVEL, RESAMPLES, Estimate

PEER_DRAFT = {"bfloat16": 1.5, "float32": 1.2}
PEER_LOOKUP = {"bfloat16": 1.15, "float32": 1.1}
BANDWIDTH, ALLOWED, WORST, BATCHES, ASSISTED = 0.8, 0.95, 0.98, 1.0, 3.0
PREDICTED = (0.9, 1.1)
GPU_ASSISTED, GPU_COMPILED, GPU_BANDWIDTH, GPU_BANDWIDTH_LARGE, LARGE = 4.0, 2.0, 0.55, 0.8, 8e9  # LARGE in bytes per pass


class Speed(PeerSuite[Settings]):
    """Tokens per second beside transformers, vLLM, llama.cpp and OpenVINO GenAI, each in its own environment.

    Peers that are not installed (make peers) are named in one line. Exits with 1 when something that is installed failed.
    """

    name = "speed"
    title = "Speed: Foredraft beside its peers"
    settings_type = Settings
    quick: ClassVar[Mapping[str, Any]] = {"limit": 2, "tokens": 32, "repeats": 1, "batches": (1,), "worst": False}
    on_gpu: ClassVar[Mapping[str, Any]] = {"peers": ON_CUDA, "modes": (PLAIN, COMPILED, DRAFT, LOOKUP)}

    def figures(self) -> list[Figure]:
        return [figure for each in comparisons(self) for figure in Findings(self, each.target, each.dtype).figures()]

    def groups(self) -> list[tuple[Comparison, str, int, Calls]]:
        """Calls that are comparable, in the order in which they were made, by scenario and batch."""
        found = {(each.target, each.dtype): each for each in comparisons(self)}
        keys = dict.fromkeys((each.target, each.dtype, each.scenario, each.batch) for each in self.measurements)
        return [
            (found[target, dtype], scenario, batch, found[target, dtype].calls(scenario=scenario, batch=batch))
            for target, dtype, scenario, batch in keys
        ]

    def tables(self) -> list[Table]:
        shown = [figures(self.figures())]
        for comparison, scenario, batch, calls in self.groups():
            where = comparison.where
            if scenario == TEXT:
                shown += [speed(f"Tokens per second, {where}", calls), self._best(comparison, calls), latency(f"Latency, {where}", calls)]
                shown += [split(f"Time split, {where}", calls), equality(self, calls, where), *by_category(calls, where)]
            else:
                shown.append(speed(f"{scenario.capitalize()} {batch if scenario == BATCH else f'at batch {batch}'}, {where}", calls))
        return [*shown, *failed(self)]

    def _best(self, comparison: Comparison, calls: Calls) -> Table:
        """The best setting of each side, mode by mode, and ours over it."""
        rows = []
        for mode in dict.fromkeys(each.mode for each in self.methods):
            ours = best(comparison.names(mode, OURS), calls.rate)
            for side in (FOREDRAFT, *self.settings.peers):
                found = best(comparison.names(mode, (side,)), calls.rate)
                if found is None:
                    continue
                over = "" if ours is None or side == FOREDRAFT else (ours[1] / found[1]).spread.text()
                rows.append((f"{mode}: {side}", found[0].partition(", ")[2] or "—", found[1].spread.text(1), over))
        return Table(f"Best setting of each side, {comparison.where}", ("side", "setting", "tokens/s", "Foredraft over it"), rows)

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        settings = self.settings
        how = "greedy" if settings.temperature == 0 else f"at temperature {settings.temperature:g}"
        inflated = instrument(settings.targets)
        return [
            f"Methods, each in a process and environment of its own: {sides(self) or 'none started'}.",
            f"Target {', '.join(settings.targets)}, draft {settings.draft}; {how}, {self.turns} prompts × {settings.tokens} new tokens, "
            f"end of text ignored, {settings.repeats} repeats in turns after {settings.warmups} warm-up calls, {settings.threads} threads. "
            "Everyone reads the same checkpoint files, converted where an engine has a format of its own. "
            f"γ = {', '.join(map(str, settings.lengths))} for peers; {', '.join(settings.shapes)} for Foredraft; lookup matches of up to "
            f"{settings.ngram} tokens where that can be set.",
            f"Tokens per second are new tokens over the sum of each prompt's median seconds, prompt included; in brackets {LEVEL:.0%} "
            f"bootstrap intervals over prompts and repeats ({RESAMPLES} draws that all methods share, so that quotients are paired). "
            "After the first token: of the first row, without the pass over the prompt. Acceptance length is tokens over passes, after the "
            "pass over the prompt. Tokens of one round come together, so that times between tokens are 0 or a round.",
            missing(self),
            unusual(self),
            memory(self),
            quiet(self),
            f"{inflated} Its matrices of zeros were replaced by numbers of the order of 1e-12, so that no engine saves reading them."
            if inflated
            else "",
            "Prompt lookups are not one algorithm: engines differ in which match they take and how long it must be, so acceptance lengths "
            "stand beside the speeds. Passes are counted at the target, alike for all; llama.cpp's pass over the prompt makes no token, "
            "its first round does what the others' prompt pass does.",
        ]

    def charts(self, folder: Path, name: str) -> list[str]:
        return [path.name for path in speed_plots.draw(self, folder, name)]


def latency(title: str, calls: Calls) -> Table:
    rows = []
    for name in calls.by_method:
        first, percentiles = calls.first_token(name), calls.percentiles(name)
        cells = ["—"] * len(PERCENTILES) if percentiles is None else [f"{value * 1e3:.1f}" for value in percentiles]
        rows.append((name, "—" if first is None else f"{first * 1e3:.0f}", *cells))
    return Table(title, ("method", "first token, ms", *(f"between tokens p{each}, ms" for each in PERCENTILES)), rows)


def by_category(calls: Calls, where: str) -> list[Table]:
    """Tokens per second by category, where there are several."""
    every = [each for rows in calls.by_method.values() for each in rows]
    categories = list(dict.fromkeys(each.category for each in every))
    if len(categories) < 2:
        return []
    parts = [Calls([each for each in every if each.category == category]) for category in categories]
    rows = []
    for name in calls.by_method:
        rates = [part.rate(name) for part in parts]
        rows.append((name, *("failed" if rate is None else f"{rate.value:.1f}" for rate in rates)))
    return [Table(f"Tokens per second by category, {where}", ("method", *categories), rows)]


class Findings(Comparison):
    """What the project promises of its speed, for one target in one dtype."""

    def figures(self) -> list[Figure]:
        text = self.calls()
        found = [self.bandwidth(text)]
        if self.run.settings.device != "cpu":
            found += [
                self.against(text, "transformers' assisted generation", GPU_ASSISTED, DRAFT, self.names(DRAFT, self.run.settings.peers)),
                self.against(
                    text, "transformers' compiled plain decoding", GPU_COMPILED, DRAFT, self.names(COMPILED, self.run.settings.peers)
                ),
            ]
        else:
            for mode, word, bounds in ((DRAFT, "draft model", PEER_DRAFT), (LOOKUP, "prompt lookup", PEER_LOOKUP)):
                if self.dtype in bounds:
                    peers = self.names(mode, self.run.settings.peers)
                    found.append(self.against(text, f"the best peer's, {word}", bounds[self.dtype], mode, peers))
            if self.dtype == "bfloat16":
                theirs = self.names(DRAFT, (TRANSFORMERS,))
                found.append(self.against(text, "transformers' assisted generation", ASSISTED, DRAFT, theirs))
        return [*found, *self.allowed(text), *self.predicted(text), *self.worst(), *self.batches()]

    # -- one by one -----------------------------------------------------------------------------------------------------

    def bandwidth(self, text: Calls) -> Figure:
        bytes_, reads = self.run.bytes_per_pass.get(f"{self.target} {self.dtype}"), self.read_rate()
        rate = text.decoding_rate(PLAIN_OF_OURS)
        low, name = BANDWIDTH, "plain decoding's effective bandwidth over that of a large read"
        if self.run.settings.device != "cpu":
            low = GPU_BANDWIDTH_LARGE if (bytes_ or 0) > LARGE else GPU_BANDWIDTH
            name = "plain decoding's effective bandwidth over that of a device copy"
        paired = None if not bytes_ else text.over_reads(PLAIN_OF_OURS, bytes_, self.reads())
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
        return self.over(f"tokens/s over {whom}", low, self.names(mode, OURS), theirs, text.rate, digits=1)

    def allowed(self, text: Calls, mode: str = DRAFT) -> list[Figure]:
        """For each chain of a fixed length γ: speed-up after the prompt, over acceptance length × t(1) / (t(γ + 1) + t_draft)."""
        found = []
        for name in self.names(mode, OURS):
            length = self.methods[name].length
            if not length:
                continue
            what = f"speed-up over what acceptance and cost curve allow, {name}"
            curves = [each.values for each in self.run.curves if (each.target, each.dtype, each.method) == (self.target, self.dtype, name)]
            rate, plain, kept = text.decoding_rate(name), text.decoding_rate(PLAIN_OF_OURS), text.acceptance(name)
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
        t1, tn, draft = text.part(PLAIN_OF_OURS, "target"), text.part(name, "target"), text.part(name, "draft")
        if t1 is None or tn is None or draft is None:
            return self.figure(what, ALLOWED, None)
        most = kept * t1 / (tn + draft)
        times = f"{t1.value * 1e3:.1f} / ({tn.value * 1e3:.1f} + {draft.value * 1e3:.1f} ms)"
        return self.figure(what, ALLOWED, speedup / most, how=f"{speedup.value:.2f} of {kept.value:.2f} × {times} = {most.value:.2f}")

    def predicted(self, text: Calls) -> list[Figure]:
        found = []
        for mode in (DRAFT, LOOKUP):
            for name in self.names(mode, OURS):
                if self.methods[name].automatic:
                    what = f"measured over planner-predicted tokens/s, {name}"
                    found.append(self.figure(what, PREDICTED[0], text.predicted_seconds(name), PREDICTED[1]))
        return found

    def worst(self) -> list[Figure]:
        """Text that cannot be guessed, against plain decoding of the same."""
        found = []
        for scenario in (HOPELESS, RANDOM):
            for batch in self.run.settings.batches:
                calls = self.calls(scenario=scenario, batch=batch)
                plain = calls.rate(PLAIN_OF_OURS)
                for name in [each for each in calls.by_method if self.methods[each].mode != PLAIN] or [scenario]:
                    value = ratio(calls.rate(name), plain)
                    found.append(self.figure(f"{scenario}, batch {batch}: tokens/s over plain, {name}", WORST, value))
        return found if self.run.settings.worst else []

    def batches(self) -> list[Figure]:
        """With the planner on: over plain decoding at every batch, and the total over that of the next smaller batch."""
        found = []
        batches = sorted(self.run.settings.batches)
        calls = {batch: self.calls(scenario=TEXT if batch == 1 else BATCH, batch=batch) for batch in batches}
        for mode in (DRAFT, LOOKUP):
            names = [name for name in self.names(mode, OURS) if self.methods[name].automatic]
            for name in names:
                rates = {batch: calls[batch].rate(name) for batch in batches}
                for batch in batches:
                    value = ratio(rates[batch], calls[batch].rate(PLAIN_OF_OURS))
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
