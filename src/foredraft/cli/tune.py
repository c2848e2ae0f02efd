"""``foredraft tune``: measure what passes and drafts cost here, say which shape that makes best, and check the claim.

Prompts are decoded greedily, plainly and with the planner, until its pick has settled. Then the pick, as a fixed shape, and plain
decoding are run in turns, and what was measured is set against what was predicted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foredraft.auditing.prompts import default_prompts
from foredraft.cli.failures import quiet, writing
from foredraft.cli.figures import counted
from foredraft.cli.generation import load_speculator, make_drafter
from foredraft.cli.progress import Progress
from foredraft.cli.prompts import encode
from foredraft.cli.settings import Contest
from foredraft.cli.tables import add_row, new_table
from foredraft.errors import ConfigurationError
from foredraft.loading import load_tokenizer
from foredraft.planning import AUTO, AutomaticPlanner
from foredraft.preparation import pad
from foredraft.shapes import TreeShape
from foredraft.speculator import Speculator
from foredraft.stats import Stats

NEW = 48  # tokens per prompt and run
TRIALS = 2  # runs of every prompt until the pick is taken to have settled
REPEATS = 3
BAR = 40  # characters
SHOWN = 8  # depths


@dataclass(frozen=True)
class Setting(Contest):
    """The options of the same names."""

    batch_size: int = 1
    prompts: Sequence[str] = ()


@dataclass(frozen=True)
class Candidate:
    """What is known of one drafter.

    Attributes:
        costs: seconds of a pass over 1, 2, … nodes per row, and the rest of its round.
        draft: seconds of a chain of 1, 2, … tokens.
        acceptance: Pr(accepted | its parent was) by depth.
        available: how often there was a draft at all.
        choices: for each length of a chain from 0 on, and for the pick, the predicted speed-up over plain decoding.
        pick: the best shape; chain(0) where drafting does not pay.
        predicted: its speed-up.
        plain, speculative: measured seconds per token of a row, medians.
        acceptance_length: tokens per row and pass, measured with the pick.
    """

    drafter: str
    rule: str
    costs: Sequence[float]
    draft: Sequence[float]
    acceptance: Sequence[float]
    available: float
    choices: dict[str, float]
    pick: str
    predicted: float
    plain: float
    speculative: float
    acceptance_length: float

    @property
    def measured(self) -> float:
        """Speed-up."""
        return self.plain / self.speculative

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "measured": self.measured, "measured_over_predicted": self.measured / self.predicted}


class Tuning:
    """Loads the target once and measures one drafter after the other."""

    def __init__(self, setting: Setting, progress: Progress):
        quiet()
        self.setting, self.progress = setting, progress
        self.tokenizer = load_tokenizer(setting.target)
        texts = setting.prompts or default_prompts(setting.target)
        rows = encode(self.tokenizer, texts, chat=False, target=setting.target)
        self.batches = [
            [rows[(start + offset) % len(rows)] for offset in range(setting.batch_size)]
            for start in range(0, len(rows), setting.batch_size)
        ]
        self.given = [make_drafter(name, {}, self.tokenizer) for name in setting.names]  # unknown names before any weights are read
        self.plain = load_speculator(setting.plain, self.tokenizer)

    def run(self) -> list[Candidate]:
        """Best first."""
        found = [self._candidate(name, drafter) for name, drafter in zip(self.setting.names, self.given)]
        return sorted(found, key=lambda each: each.speculative)

    def _candidate(self, name: str, drafter: Any) -> Candidate:
        self.progress.show(f"{name}: measuring")
        # "eager" leaves the model as it is, packed where the Speculator that loaded it packed it
        automatic = Speculator(self.plain.model, drafter, shape=AUTO, reuse_prefix=False, execution="eager")
        planner = automatic.planner
        assert isinstance(planner, AutomaticPlanner)
        for _ in range(TRIALS):
            for batch in self.batches:
                self._time(automatic, batch)
        plans = planner.compare(self.setting.batch_size, context=max(len(row) for batch in self.batches for row in batch) + NEW // 2)
        plain, pick = plans[0], max(plans, key=lambda plan: plan.rate)
        fixed = Speculator(self.plain.model, drafter, shape=pick.shape, reuse_prefix=False, execution="eager")
        self.progress.show(f"{name}: comparing {pick.shape} with plain decoding")
        seconds: dict[str, list[float]] = {"plain": [], "pick": []}
        kept: list[Stats] = []
        for repeat in range(REPEATS + 1):
            for batch in self.batches:
                spent, _ = self._time(self.plain, batch)
                ours, stats = self._time(fixed, batch)
                if repeat:  # the first is the warm-up
                    seconds["plain"].append(spent)
                    seconds["pick"].append(ours)
                    kept.append(stats)
        acceptance = planner.acceptance[True]
        count, depth = self.setting.batch_size, min(SHOWN, planner.largest.depth)
        return Candidate(
            drafter=name,
            rule=automatic.rule.name,
            costs=planner.costs.verify(count, range(1, planner.largest.nodes + 2), 64),
            draft=[planner.costs.draft_seconds(count, (1,) * length) for length in range(1, depth + 1)],
            acceptance=acceptance.by_depth(depth),
            available=acceptance.availability,
            choices={str(plan.shape): plan.rate / plain.rate for plan in plans},
            pick=str(pick.shape),
            predicted=pick.rate / plain.rate,
            plain=median(seconds["plain"]),
            speculative=median(seconds["pick"]),
            acceptance_length=sum(stats.kept for stats in kept) / sum(stats.row_passes for stats in kept),
        )

    def _time(self, speculator: Speculator, batch: Sequence[Sequence[int]]) -> tuple[float, Stats]:
        """Seconds per token of a row after the prefill."""
        prompts = pad(batch, speculator.target.device)
        stats = speculator.generate(**prompts, do_sample=False, min_new_tokens=None, max_new_tokens=NEW).stats
        assert stats is not None
        spent = stats.seconds["total"] - stats.seconds["prefill"] - stats.seconds.get("planning", 0.0)
        return spent / max(1, stats.new_tokens - len(batch)) * len(batch), stats


def document(setting: Setting, found: Sequence[Candidate]) -> dict[str, Any]:
    """Everything, for JSON; the best drafter first."""
    return {
        "schema": 1,
        "target": setting.target,
        "dtype": setting.dtype,
        "quantization": setting.quantization,
        "threads": torch.get_num_threads(),
        "batch_size": setting.batch_size,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "pick": {"drafter": found[0].drafter, "shape": found[0].pick},
        "candidates": [each.to_dict() for each in found],
    }


def report(setting: Setting, found: Sequence[Candidate]) -> RenderableType:
    """For a terminal: what passes cost, and for each drafter acceptance, predictions and the check; the best drafter last."""
    parts: list[RenderableType] = [_cost_curve(found[0], setting)]
    for each in reversed(found):
        parts += [Text(), Text(f"drafter {each.drafter}, rule {each.rule} (match when greedy)", style="bold"), _choices(each), _check(each)]
    best = found[0]
    parts += [Text(), Text(f"pick: --drafter {best.drafter} --shape '{best.pick}'" if best.pick != "chain(0)" else "pick: --drafter none")]
    return Group(*parts)


def _cost_curve(best: Candidate, setting: Setting) -> Table:
    table = new_table(">nodes per row", ">ms per pass", "")
    for nodes in (1, 2, 3, 4, 5, 7, 9, 13, 17, 25):
        if nodes <= len(best.costs):
            seconds = best.costs[nodes - 1]
            add_row(table, str(nodes), f"{1e3 * seconds:.2f}", bar(seconds / best.costs[-1]))
    table.title = f"{setting.target}, {counted(setting.batch_size, 'row')}"
    table.title_justify = "left"
    return table


def _choices(each: Candidate) -> Table:
    table = new_table("shape", ">accepted there", ">draft ms", ">predicted", "")
    top = max(each.choices.values())
    for shape, gain in each.choices.items():
        length = int(shape[6:-1]) if shape.startswith("chain(") else 0
        if length > SHOWN and shape != each.pick:
            continue
        inside = 0 < length <= len(each.acceptance)
        rate = f"{each.acceptance[length - 1]:.0%}" if inside else "–"
        draft = f"{1e3 * each.draft[length - 1]:.2f}" if inside else "–"
        mark = " ← pick" if shape == each.pick else ""
        add_row(table, shape, rate, draft, f"{gain:.2f}×", bar(gain / top) + mark)
    return table


def _check(each: Candidate) -> Text:
    if each.pick == "chain(0)":
        return Text(f"zero drafting: nothing pays here; measured {each.measured:.2f}× plain decoding")
    return Text(
        f"{each.pick}: measured {each.measured:.2f}× plain decoding ({1 / each.speculative:.1f} against {1 / each.plain:.1f} tokens/s per "
        f"row), acceptance length {each.acceptance_length:.2f}; measured over predicted {each.measured / each.predicted:.2f}"
    )


def bar(share: float) -> str:
    return "█" * max(1, round(BAR * min(1.0, share)))


def plotter() -> Callable[[Path, Setting, Sequence[Candidate]], None]:
    """What draws the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def draw(path: Path, setting: Setting, found: Sequence[Candidate]) -> None:
        figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4))
        best = found[0]
        left.plot(range(1, len(best.costs) + 1), [1e3 * seconds for seconds in best.costs], marker=".")
        left.set(xlabel="nodes per row", ylabel="ms per pass", ylim=(0, None), title=f"{setting.target}, batch {setting.batch_size}")
        for each in found:
            middle.plot(range(1, len(each.acceptance) + 1), each.acceptance, marker=".", label=each.drafter)
            chains = [gain for shape, gain in each.choices.items() if shape.startswith("chain(")]
            right.plot(range(len(chains)), chains, marker=".", label=each.drafter)
            length = TreeShape.parse(each.pick).nodes
            right.plot([length], [each.measured], marker="*", markersize=12, color=right.lines[-1].get_color())
        middle.set(xlabel="depth", ylabel="accepted there", ylim=(0, 1), title="acceptance")
        right.set(xlabel="drafted nodes", ylabel="speed-up", title="predicted, and measured at the pick (star)")
        right.axhline(1, color="grey", linewidth=0.8)
        middle.legend()
        figure.tight_layout()
        try:
            with writing(path):
                figure.savefig(path, dpi=120)
        except ValueError as error:  # matplotlib knows no such kind of file
            raise ConfigurationError(f"cannot write {str(path)!r}: {error}") from error
        finally:
            pyplot.close(figure)

    return draw
