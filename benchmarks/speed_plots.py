"""Charts of a speed run, beside its report. matplotlib is an extra, ``foredraft[plot]``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.speed_calls import Calls
from benchmarks.speed_runner import PeerSuite
from benchmarks.speed_tables import PARTS, Comparison, comparisons
from foredraft.estimates import Spread

COLOURS = {"foredraft": "#c0392b", "transformers": "#7f8c8d", "vllm": "#2980b9", "llamacpp": "#27ae60", "openvino": "#8e44ad"}
MARKERS = {"plain": "o", "draft": "s", "lookup": "^"}


def draw(run: PeerSuite[Any], folder: Path, begin: str = "speed") -> list[Path]:
    """Four PNG files for each target and dtype with calls on text; none without matplotlib, or of what there is nothing to show."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    charts: dict[str, Callable[[Comparison, Calls, Any], bool]] = {
        "speedup": speedups,
        "split": splits,
        "depth": depths,
        "cost": costs,
    }
    written = []
    for comparison in comparisons(run):
        calls, target, dtype = comparison.calls(), comparison.target, comparison.dtype
        if not calls.by_method:
            continue
        several = f"-{target.removeprefix('zoo:').replace('/', '-')}" if len(run.settings.targets) > 1 else ""
        for name, chart in charts.items():
            figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
            if chart(comparison, calls, axes):
                path = folder / f"{begin}-{name}-{dtype}{several}.png"
                axes.set_title(axes.get_title() + f", {dtype}")
                figure.savefig(path, dpi=120)
                written.append(path)
            pyplot.close(figure)
    return written


def speedups(comparison: Comparison, calls: Calls, axes: Any) -> bool:
    """Tokens per second over the fastest plain decoding of all, against acceptance length: what a token is worth to each side."""
    plain = [rate.value for name in calls.by_method if comparison.methods[name].mode == "plain" and (rate := calls.rate(name))]
    shown = []
    for name in calls.by_method:
        rate, kept, method = calls.rate(name), calls.acceptance(name), comparison.methods[name]
        if rate is None or kept is None or not plain:
            continue
        spread: Spread = (rate / max(plain)).spread
        colour, marker = COLOURS.get(method.side, "black"), MARKERS.get(method.mode, "D")
        axes.errorbar(
            kept.value,
            spread.median,
            yerr=[[max(0.0, spread.median - spread.low)], [max(0.0, spread.high - spread.median)]],
            color=colour,
            marker=marker,
            linestyle="",
            label=name,
        )
        shown.append(kept.value)
    if not shown:
        return False
    axes.plot([1, max(shown)], [1, max(shown)], color="0.8", linestyle="--", zorder=0, label="every kept token saves a pass")
    axes.set(xlabel="acceptance length", ylabel="tokens/s over the fastest plain decoding", title="Speed-up against acceptance length")
    axes.figure.legend(fontsize=6, loc="outside right upper")
    return True


def splits(comparison: Comparison, calls: Calls, axes: Any) -> bool:
    """Milliseconds per token by where they go."""
    rows = []
    for name in calls.by_method:
        rate, shares = calls.rate(name), [calls.share(name, part) for part in PARTS]
        if rate is not None and all(share is not None for share in shares):
            rows.append((name, [1e3 / rate.value * share.value for share in shares if share is not None]))
    if not rows:
        return False
    for index, part in enumerate(PARTS):
        left = [sum(values[:index]) for _, values in rows]
        axes.barh([name for name, _ in rows], [values[index] for _, values in rows], left=left, label=part)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set(xlabel="ms per token", title="Where the time goes")
    axes.legend(fontsize=7, loc="lower right")
    return True


def depths(comparison: Comparison, calls: Calls, axes: Any) -> bool:
    """Of the tokens drafted at a depth, how many were accepted."""
    shown = False
    for name in calls.by_method:
        found = [(accepted / drafted, depth) for depth, (accepted, drafted) in enumerate(calls.by_depth(name), 1) if drafted]
        if found:
            shown = True
            axes.plot([depth for _, depth in found], [share for share, _ in found], marker="o", label=name)
    if shown:
        axes.set(xlabel="depth", ylabel="accepted of the drafted", ylim=(0, 1), title="Acceptance by depth")
        axes.legend(fontsize=7)
    return shown


def costs(comparison: Comparison, calls: Calls, axes: Any) -> bool:
    """Seconds of the target's pass over so many tokens."""
    curves = [each.values["target"] for each in comparison.run.curves if (each.target, each.dtype) == (comparison.target, comparison.dtype)]
    sizes = sorted({int(size) for curve in curves for size in curve})
    if not sizes:
        return False
    values = [[curve[str(size)] * 1e3 for curve in curves if str(size) in curve] for size in sizes]
    axes.plot(sizes, [median(each) for each in values], marker="o", color=COLOURS["foredraft"])
    axes.fill_between(sizes, [min(each) for each in values], [max(each) for each in values], alpha=0.2, color=COLOURS["foredraft"])
    axes.set(xlabel="tokens in the pass", ylabel="ms", ylim=(0, None), title="Cost of a target pass")
    return True
