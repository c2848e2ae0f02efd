"""Curves with measured points, as text for a terminal and as PNG files. matplotlib is an extra, ``foredraft[plot]``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from math import log10
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from foredraft.cli.failures import writing
from foredraft.errors import ConfigurationError

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 72, 14  # characters


@dataclass(frozen=True)
class Curve:
    """``points`` of a line, and those that were ``measured``."""

    label: str
    points: Points
    measured: Points = ()


@dataclass(frozen=True)
class Plot:
    """``name`` is that of its file; ``log`` is for the y axis."""

    name: str
    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    log: bool = False


def text_of(plot: Plot) -> str:
    """For a terminal: one letter per curve, in upper case where it was measured."""
    scale = log10 if plot.log else float
    everything = [point for curve in plot.curves for point in (*curve.points, *curve.measured)]
    xs, ys = [x for x, _ in everything], [y for _, y in everything]
    left, low = min(xs), scale(min(ys))
    across, up = (WIDTH - 1) / (max(xs) - left or 1), (HEIGHT - 1) / (scale(max(ys)) - low or 1)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    letters = list(zip(cycle(ascii_lowercase), plot.curves))
    drawn = [(letter, curve.points) for letter, curve in letters] + [(letter.upper(), curve.measured) for letter, curve in letters]
    for letter, points in drawn:
        for x, y in points:
            grid[HEIGHT - 1 - round((scale(y) - low) * up)][round((x - left) * across)] = letter
    names = {0: f"{max(ys):.4g}", HEIGHT - 1: f"{min(ys):.4g}"}
    lines = [f"{names.get(number, ''):>8} │{''.join(line).rstrip()}" for number, line in enumerate(grid)]
    ends = f"{left:.4g}{f'{max(xs):.4g}'.rjust(WIDTH - len(f'{left:.4g}'))}"
    legend = "   ".join(f"{letter} {curve.label}" for letter, curve in letters)
    return "\n".join([f"{plot.y} against {plot.x}", *lines, f"{'':9}└{'─' * WIDTH}", f"{'':10}{ends}", f"{'':10}{legend}"])


@contextmanager
def picture(path: Path, columns: int = 1, *, size: tuple[float, float] = (6.5, 4)) -> Iterator[Any]:
    """Axes of matplotlib, ``columns`` beside each other; written to ``path`` at the end.

    Raises:
        ConfigurationError: ``path`` cannot be written, or does not end as a picture's name does.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    FigureCanvasAgg(figure)
    yield figure.subplots(1, columns)
    figure.tight_layout()
    try:
        with writing(path):
            figure.savefig(path, dpi=120)
    except ValueError as error:  # matplotlib knows no such kind of file
        raise ConfigurationError(f"cannot write {str(path)!r}: {error}") from error


def draw(plot: Plot, folder: Path) -> None:
    """Write ``plot`` to its PNG file."""
    with picture(folder / f"{plot.name}.png") as axes:
        for curve in plot.curves:
            (line,) = axes.plot(*zip(*curve.points), label=curve.label)
            if curve.measured:
                axes.plot(*zip(*curve.measured), linestyle="", marker="o", color=line.get_color())
        axes.set(xlabel=plot.x, ylabel=plot.y, title=plot.title, **({"yscale": "log"} if plot.log else {}))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
