"""The trees suite's claims, document and tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.overhead_report import machine
from benchmarks.report import Table
from benchmarks.trees import PARTS, Round, Run
from benchmarks.verdicts import Claim, Spread

SCHEMA = 1
SUITE = "trees"
TITLE = "Trees: a round outside the models' forward passes"
LIMIT = 0.1  # of a round

FIGURES: dict[str, Callable[[Round], float]] = {
    "share": lambda each: each.share,
    "outside": lambda each: each.outside,
    "wall": lambda each: each.wall,
    "target": lambda each: each.target,
    "draft": lambda each: each.draft,
    **{part: lambda each, part=part: each.parts[part] for part in PARTS},  # type: ignore[misc]
}
"""Seconds of a round, and the share of it that is spent outside forward passes."""


def summary(run: Run, name: str) -> dict[str, Spread]:
    """Every figure: its median over the rounds of a repeat, spread over the repeats."""
    rounds = [each for each in run.rounds if each.contender == name]
    repeats = sorted({each.repeat for each in rounds})
    return {
        figure: Spread.of([median(of(each) for each in rounds if each.repeat == repeat) for repeat in repeats])
        for figure, of in FIGURES.items()
    }


def claims(run: Run) -> list[Claim]:
    """What a round of a tree of so many nodes may cost beside forward passes."""
    return [
        Claim(f"{name}: share of a round outside forwards", LIMIT, True, summary(run, name)["share"])
        for name, contender in run.contenders.items()
        if contender.nodes == run.settings.nodes
    ]


def document(run: Run, *, command: str, environment: dict[str, Any]) -> dict[str, Any]:
    """Everything about a run as plain values; the schema is checked by the tests."""
    return {
        "schema": SCHEMA,
        "suite": SUITE,
        "command": command,
        "environment": environment,
        "settings": asdict(run.settings),
        "claims": [claim.plain() for claim in claims(run)],
        "contenders": {
            name: {
                **asdict(each),
                "nodes": each.nodes,
                "rule": run.rules[name],
                "medians": {figure: asdict(spread) for figure, spread in summary(run, name).items()},
            }
            for name, each in run.contenders.items()
        },
        "rounds": [asdict(each) for each in run.rounds],
    }


def tables(run: Run) -> list[Table]:
    made = [(claim.name, f"≤ {LIMIT:.0%}", _percent(claim.spread), claim.verdict) for claim in claims(run) if claim.spread is not None]
    whole, split = [], []
    for name, contender in run.contenders.items():
        found = summary(run, name)
        mine = [each.tokens for each in run.rounds if each.contender == name]
        times = [f"{found[figure].median * 1e3:.2f}" for figure in ("wall", "target", "draft")]
        whole.append((name, run.rules[name], str(contender.nodes), f"{sum(mine) / len(mine):.2f}", *times, _percent(found["share"])))
        split.append((name, _milliseconds(found["outside"]), *(_milliseconds(found[part]) for part in PARTS)))
    columns = ("", "rule", "nodes", "tokens per round", "round, ms", "target forward, ms", "draft forwards, ms", "outside")
    return [
        Table("Claims", ("claim", "bound", "measured", "verdict"), made),
        Table("Rounds", columns, whole),
        Table("A round outside forward passes, ms", ("", "all", *PARTS), split),
    ]


def notes(run: Run, *, command: str, environment: dict[str, Any]) -> list[str]:
    settings = run.settings
    return [
        f"`{command}`",
        machine(environment),
        f"Target {settings.target}, draft {settings.draft}, {settings.dtype}; one row, greedy and at temperature 1 without top-k or top-p; "
        f"{settings.prompts} prompts × {settings.rounds} rounds × {settings.repeats} interleaved repeats after a warm-up. Figures are "
        "medians over the rounds of a repeat; then the median over the repeats, with the smallest and largest in brackets.",
        "Outside is a round's wall time without the forward passes of target and draft. Growth: choosing the draft's tokens and building "
        "the tree. Draft side and target side: masks, positions and cache of each. Verification: from the target's logits to the verdict "
        "on the host. Rest: the row's noise, checks, committing the text, statistics.",
        "The chain of the same depth is there to compare with.",
    ]


def _percent(spread: Spread) -> str:
    return f"{spread.median:.1%} ({spread.low:.1%}–{spread.high:.1%})"


def _milliseconds(spread: Spread) -> str:
    return f"{spread.median * 1e3:.2f} ({spread.low * 1e3:.2f}–{spread.high * 1e3:.2f})"
