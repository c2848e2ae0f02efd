"""The line of figures under a generation, and one set of statistics out of several calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from foredraft.stats import Stats, by_drafter


def combine(parts: Sequence[Stats], *, seed: int | None) -> Stats:
    """The statistics of calls that ran one after another: counts and seconds add up, rows follow each other."""
    total = replace(deepcopy(parts[0]), seed=seed, learning=deepcopy(parts[-1].learning))
    for part in parts[1:]:
        for name in ("target_passes", "row_passes", "new_tokens", "kept", "drafted", "accepted"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        for name in ("drafted_by_depth", "accepted_by_depth"):
            setattr(total, name, [sum(pair) for pair in zip_longest(getattr(total, name), getattr(part, name), fillvalue=0)])
        for phase, seconds in part.seconds.items():
            total.seconds[phase] = total.seconds.get(phase, 0.0) + seconds
        for shape, rounds in part.shapes.items():
            total.shapes[shape] = total.shapes.get(shape, 0) + rounds
        total.speedup.add(part.speedup)
        total.rows += part.rows
    return total


def sentence(stats: Stats, *, sampled: bool, interrupted: bool = False) -> str:
    """Whether it was faster than plain decoding, and what must not be overlooked."""
    parts = ["interrupted"] * interrupted + [stats.summary()] + [f"seed {stats.seed}"] * (sampled and stats.reproducible)
    if not stats.lossless and sampled:
        parts.append(f"LOSSY: rule {stats.rule} changes the output distribution")
    return " · ".join(parts)


def figures_line(stats: Stats, *, drafter: str, sampled: bool) -> str:
    """The rest, with ``--verbose``, and a line for each drafter that learns; ``Stats.to_dict`` has it all."""
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
        "sampled" if sampled else "greedy",
    ]
    lines = [" · ".join(figures), *(learning_line(name, facts) for name, facts in by_drafter(stats.learning, drafter).items())]
    return "\n".join(lines)


def learning_line(drafter: str, facts: Mapping[str, Any]) -> str:
    """What a drafter that learns has learnt."""
    figures = [f"{drafter} learns", f"version {facts['version']}", counted(facts["swaps"], "swap")]
    if "steps" in facts:  # another process learns where they are missing
        figures += [counted(facts["steps"], "step"), f"{counted(facts['trials'], 'trial')}, {facts['refused']} refused"]
    if facts["alpha"]:
        figures.append(f"α {number(facts['alpha'][-1][1], 3)}")
    return " · ".join([*figures, f"cost {facts['seconds']['lost']:.1f} s"])


def execution_line(execution: str, reasons: Mapping[str, str]) -> str:
    """How the target's passes are made, and what keeps them from the kernels, with ``--verbose``."""
    why = "; ".join(reasons[name] for name in ("packed", "fused") if name in reasons)
    return f"execution {execution}" + (f" ({why})" if why else "")


def shape_of(stats: Stats) -> str:
    """The shape, and the one most used where it was chosen anew in every round."""
    if stats.shape != "auto" or not stats.shapes:
        return stats.shape
    return f"auto, mostly {max(stats.shapes, key=lambda shape: stats.shapes[shape])}"


def counted(count: int, noun: str, plural: str = "s") -> str:
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def number(value: float, digits: int) -> str:
    return "–" if math.isnan(value) else f"{value:.{digits}f}"
