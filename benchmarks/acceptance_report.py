"""The acceptance suite's figures with their confidence intervals, its claims, document and tables.

Intervals are percentile bootstraps over prompts (Efron and Tibshirani 1993): prompts are drawn with replacement, each with all of
its seeds, because texts from one prompt are alike; the acceptance length of a draw is its tokens kept over its row-passes. All
contenders share the draws, so that a difference of two is paired by prompt.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.acceptance import Contender, Run
from benchmarks.overhead_report import machine
from benchmarks.report import Table
from benchmarks.verdicts import Claim, Spread

SCHEMA = 1
SUITE = "acceptance"
TITLE = "Acceptance length of every rule"
RESAMPLES = 10_000
LEVEL = 0.95
COMPARED = (("iid", "block", "rejection"), ("without-replacement", "traversal", "multi-candidate"), ("iid", "traversal", "multi-candidate"))
"""Siblings, and the rule that must accept at least as much as the other on the same shape."""


class Lengths:
    """Acceptance lengths of a run's contenders, over all rows and over every draw of the bootstrap."""

    def __init__(self, run: Run):
        names = list(run.contenders)
        counts = np.zeros((2, len(names), run.settings.prompts))  # tokens kept and row-passes
        for each in run.measurements:
            counts[:, names.index(each.contender), each.prompt] += each.kept, each.passes
        kept, passes = counts
        drawn = np.random.default_rng(0).multinomial(run.settings.prompts, [1 / run.settings.prompts] * run.settings.prompts, RESAMPLES)
        self.whole = dict(zip(names, kept.sum(1) / passes.sum(1)))
        self.drawn: dict[str, NDArray[np.float64]] = dict(zip(names, (kept @ drawn.T) / (passes @ drawn.T)))

    def of(self, name: str) -> Spread:
        return _interval(self.whole[name], self.drawn[name])

    def difference(self, name: str, other: str) -> Spread:
        """``name`` − ``other``, paired by prompt."""
        return _interval(self.whole[name] - self.whole[other], self.drawn[name] - self.drawn[other])


def _interval(value: float, draws: NDArray[np.float64]) -> Spread:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Spread(float(value), float(low), float(high))


def claims(run: Run) -> list[Claim]:
    """The stronger rule keeps at least as many tokens; a shortfall inside the interval is noise."""
    lengths, made = Lengths(run), []
    for siblings, stronger, weaker in COMPARED:
        for shape in dict.fromkeys(contender.shape for contender in run.contenders.values()):
            name, other = (Contender(rule, siblings, shape).name for rule in (stronger, weaker))
            if name in run.contenders and other in run.contenders:
                made.append(Claim(f"{stronger} − {weaker}, {siblings}, {shape}", 0.0, False, lengths.difference(name, other)))
    return made


def document(run: Run, *, command: str, environment: dict[str, Any]) -> dict[str, Any]:
    """Everything about a run as plain values; the schema is checked by the tests."""
    lengths = Lengths(run)
    return {
        "schema": SCHEMA,
        "suite": SUITE,
        "command": command,
        "environment": environment,
        "settings": asdict(run.settings),
        "interval": {"method": "percentile bootstrap over prompts", "level": LEVEL, "resamples": RESAMPLES},
        "claims": [claim.plain() for claim in claims(run)],
        "contenders": {
            name: {**asdict(each), "nodes": each.nodes, "lossless": each.lossless, "acceptance_length": _plain(lengths.of(name))}
            for name, each in run.contenders.items()
        },
        "measurements": [asdict(each) for each in run.measurements],
    }


def _plain(spread: Spread) -> dict[str, float]:
    return {"value": spread.median, "low": spread.low, "high": spread.high}


def tables(run: Run) -> list[Table]:
    lengths, rows = Lengths(run), []
    for name, each in run.contenders.items():
        mine = [one for one in run.measurements if one.contender == name]
        passes, drafted = sum(one.passes for one in mine), sum(one.drafted for one in mine)
        spread = lengths.of(name)
        cells = (f"{spread.median:.3f}", f"{spread.low:.3f}–{spread.high:.3f}", f"{drafted / passes:.1f}", str(passes))
        rows.append((each.rule, each.siblings, each.shape, "yes" if each.lossless else "LOSSY", *cells))
    verdicts = [
        (claim.name, "≥ 0", f"{claim.spread.median:+.3f}", f"{claim.spread.low:+.3f} to {claim.spread.high:+.3f}", claim.verdict)
        for claim in claims(run)
        if claim.spread is not None
    ]
    columns = ("rule", "siblings", "shape", "lossless", "acceptance length", "95 % interval", "drafted per pass", "row-passes")
    return [
        Table("Differences", ("paired by prompt", "bound", "measured", "95 % interval", "verdict"), verdicts),
        Table("Rules", columns, rows),
    ]


def notes(run: Run, *, command: str, environment: dict[str, Any]) -> list[str]:
    settings = run.settings
    return [
        f"`{command}`",
        machine(environment),
        f"Target {settings.target}, draft {settings.draft}, {settings.dtype}; temperature 1, no top-k or top-p; {settings.prompts} prompts "
        f"(beginnings of files that the models have not seen) × {settings.seeds} seeds × {settings.tokens} tokens for every contender. "
        "Acceptance length is tokens kept over row-passes, the bonus token counted and the prefill left out; the last passes of a row, "
        "which may draft less, are in it.",
        f"Intervals are {LEVEL:.0%} percentile bootstraps over prompts, each drawn with all of its seeds, {RESAMPLES:,} draws that all "
        "contenders share, so that differences are paired by prompt. With the match rule a seed's text is the same whatever was drafted; "
        "with the others it is not.",
        "LOSSY: the rule changes the law of the text. It is not comparable with the others and is listed to show what it buys.",
    ]
