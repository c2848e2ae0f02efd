"""The line of figures under a generation, and one set of statistics out of several calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

from foredraft.stats import Stats


def combine(parts: Sequence[Stats], *, seed: int | None) -> Stats:
    """The statistics of calls that ran one after another: counts and seconds add up, rows follow each other."""
    first = parts[0]
    same = {name: getattr(first, name) for name in ("rule", "drafter", "shape", "lossless", "time_to_first_token")}
    total = Stats(seed=seed, **same)
    for part in parts:
        for name in ("target_passes", "row_passes", "new_tokens", "kept", "drafted", "accepted"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        total.drafted_by_depth = _added(total.drafted_by_depth, part.drafted_by_depth)
        total.accepted_by_depth = _added(total.accepted_by_depth, part.accepted_by_depth)
        phases = [*total.seconds, *(part.seconds.keys() - total.seconds.keys())]
        total.seconds = {phase: total.seconds.get(phase, 0.0) + part.seconds.get(phase, 0.0) for phase in phases}
        for shape, rounds in part.shapes.items():
            total.shapes[shape] = total.shapes.get(shape, 0) + rounds
        total.rows += part.rows
    return total


def _added(ours: Sequence[int], theirs: Sequence[int]) -> list[int]:
    return [sum(pair) for pair in zip_longest(ours, theirs, fillvalue=0)]


def figures_line(stats: Stats, *, drafter: str, sampled: bool, interrupted: bool = False) -> str:
    """One line for people; ``Stats.to_dict`` has it all."""
    first = stats.time_to_first_token
    figures = [
        counted(stats.new_tokens, "token"),
        f"{number(stats.tokens_per_second, 1)} tokens/s",
        f"acceptance length {number(stats.acceptance_length, 2)}",
        counted(stats.target_passes, "target pass", "es"),
        f"{stats.drafted} drafted, {stats.accepted} accepted",
        "no token yet" if first is None else f"first token after {first:.2f} s",
        f"drafter {drafter}",
        f"shape {shape_of(stats)}",
        f"rule {stats.rule}",
        f"seed {stats.seed}" if sampled else "greedy",
    ]
    if not stats.lossless and sampled:
        figures.append(f"LOSSY: rule {stats.rule} changes the output distribution")
    if interrupted:
        figures.insert(0, "interrupted")
    return " · ".join(figures)


def shape_of(stats: Stats) -> str:
    """The shape, and the one most used where it was chosen anew in every round."""
    if stats.shape != "auto" or not stats.shapes:
        return stats.shape
    return f"auto, mostly {max(stats.shapes, key=lambda shape: stats.shapes[shape])}"


def counted(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"


def number(value: float, digits: int) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}f}"
