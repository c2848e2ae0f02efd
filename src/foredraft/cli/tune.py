"""``foredraft tune``: measure what passes and drafts cost here, and say what to write, how much it gains and how sure that is.

Prompts are decoded greedily with each drafter and the planner, until its pick has settled. Then all picks, as fixed shapes, and plain
decoding, the one baseline, take turns on every prompt.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foredraft.auditing.prompts import default_prompts
from foredraft.cli.figures import counted
from foredraft.cli.generation import load_speculator, make_drafter
from foredraft.cli.plots import picture
from foredraft.cli.progress import Progress
from foredraft.cli.settings import Contest
from foredraft.cli.tables import add_row, new_table
from foredraft.errors import ConfigurationError
from foredraft.estimates import quotient, turned
from foredraft.loading import load_tokenizer
from foredraft.planning import AUTO, AutomaticPlanner
from foredraft.planning.search import Plan
from foredraft.preparation import pad
from foredraft.shapes import TreeShape
from foredraft.speculator import Speculator
from foredraft.stats import Stats
from foredraft.text import encode

NEW = 48  # tokens per prompt and run
TRIALS = 2  # runs of every prompt until the pick is taken to have settled
REPEATS = 3
BAR = 40  # characters
SHOWN = 8  # depths
NOISY = 1.25  # how much longer one of the same runs may take than another
Grid = list[list[float]]


@dataclass(frozen=True)
class Setting(Contest):
    """The options of the same names."""

    batch_size: int = 1
    prompts: Sequence[str] = ()


@dataclass(frozen=True)
class Prediction:
    """What is known of one drafter before it is compared with the others.

    Attributes:
        costs: seconds of a pass over 1, 2, … nodes per row, and the rest of its round.
        draft: seconds of a chain of 1, 2, … tokens.
        acceptance: Pr(accepted | its parent was) by depth.
        available: how often there was a draft at all.
        choices: for each length of a chain from 0 on, and for the pick, the predicted speed-up over plain decoding.
        pick: the best shape; chain(0) where drafting does not pay.
        predicted: its speed-up.
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

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self)}


@dataclass(frozen=True)
class Candidate(Prediction):
    """And afterwards.

    Attributes:
        plain, speculative: measured seconds per token of a row: medians of each prompt's runs, and their mean over prompts.
        low, high: the 95 % interval of the speed-up.
        acceptance_length: tokens per row and pass, measured with the pick.
    """

    plain: float
    speculative: float
    low: float
    high: float
    acceptance_length: float
    batches: int

    @property
    def measured(self) -> float:
        """Speed-up."""
        return self.plain / self.speculative

    @property
    def pays(self) -> bool:
        return self.pick != "chain(0)" and self.measured > 1

    @property
    def sure(self) -> bool:
        """Whether the interval says the same as the measurement. A single batch tells nothing of other texts."""
        return self.pick == "chain(0)" or (self.batches > 1 and not self.low <= 1 <= self.high)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "measured": self.measured, "measured_over_predicted": self.measured / self.predicted, "sure": self.sure}


@dataclass
class Contender:
    """A drafter that has chosen its shape, and the seconds per token of its runs, ``[prompt, run]``."""

    name: str
    speculator: Speculator
    planner: AutomaticPlanner | None = None
    plans: Sequence[Plan] = ()
    pick: Plan | None = None
    rule: str = ""
    seconds: Grid = field(default_factory=list)
    kept: list[Stats] = field(default_factory=list)


class Tuning:
    """Loads the target once and measures one drafter after the other.

    Attributes:
        spread: how much longer the slowest of the same plain runs took than the fastest, the median over prompts.
        complete: nobody interrupted :meth:`run`.
    """

    def __init__(self, setting: Setting, progress: Progress):
        self.setting, self.progress, self.spread, self.complete = setting, progress, 1.0, False
        self.tokenizer = load_tokenizer(setting.target)
        texts = setting.prompts or default_prompts(setting.target)
        rows = [encode(self.tokenizer, text, setting.target) for text in texts]
        self.batches = [
            [rows[(start + offset) % len(rows)] for offset in range(setting.batch_size)]
            for start in range(0, len(rows), setting.batch_size)
        ]
        self.given = [make_drafter(name, {}, self.tokenizer) for name in setting.names]  # unknown names before any weights are read
        self.plain = Contender("plain", load_speculator(setting.plain, self.tokenizer))
        self.contenders: list[Contender] = []

    def run(self) -> Sequence[Prediction]:
        """Best first. After Ctrl-C, only repeats in which everybody had every prompt count; where there is none, what is predicted of the
        drafters that have settled is all."""
        try:
            self._measure()
            self.complete = True
        except KeyboardInterrupt:
            if not self.contenders:
                raise
        everyone = [self.plain, *self.contenders]
        whole = min((len(runs) for each in everyone for runs in each.seconds), default=0)
        if not whole:
            return [self._prediction(each) for each in self.contenders]
        for each in everyone:
            each.seconds = [runs[:whole] for runs in each.seconds]
        self.spread = median(max(runs) / min(runs) for runs in self.plain.seconds)
        return sorted(map(self._candidate, self.contenders), key=lambda each: each.speculative)

    def _measure(self) -> None:
        for name, drafter in zip(self.setting.names, self.given):
            self.contenders.append(self._settled(name, drafter))
        self.progress.show("comparing with plain decoding")
        everyone = [self.plain, *self.contenders]
        for each in everyone:
            each.seconds = [[] for _ in self.batches]
        for repeat in range(REPEATS + 1):
            for each in everyone:
                each.speculator.drafter.forget()  # the same texts come again
            for number, batch in enumerate(self.batches):
                for each in turned(everyone, repeat):
                    spent, stats = self._time(each.speculator, batch)
                    if repeat:  # the first is the warm-up
                        each.seconds[number].append(spent)
                        each.kept.append(stats)

    def _settled(self, name: str, drafter: Any) -> Contender:
        self.progress.show(f"{name}: measuring")
        model = self.plain.speculator.model
        # "eager" leaves the model as it is, packed where the Speculator that loaded it packed it
        automatic = Speculator(model, drafter, shape=AUTO, reuse_prefix=False, execution="eager")
        planner = automatic.planner
        assert isinstance(planner, AutomaticPlanner)
        for _ in range(TRIALS):
            drafter.forget()
            for batch in self.batches:
                self._time(automatic, batch)
        plans = planner.compare(self.setting.batch_size, context=max(len(row) for batch in self.batches for row in batch) + NEW // 2)
        pick = max(plans, key=lambda plan: plan.rate)
        fixed = Speculator(model, drafter, shape=pick.shape, reuse_prefix=False, execution="eager")
        return Contender(name, fixed, planner, plans, pick, automatic.rule.name)

    def _candidate(self, found: Contender) -> Candidate:
        passes = sum(stats.row_passes for stats in found.kept)
        if not passes:
            raise ConfigurationError(f"{self.setting.target} ends every text at once; give other --prompts")
        spread = quotient(np.array(self.plain.seconds), np.array(found.seconds)).spread
        return Candidate(
            **vars(self._prediction(found)),
            plain=typical(self.plain.seconds),
            speculative=typical(found.seconds),
            low=spread.low,
            high=spread.high,
            acceptance_length=sum(stats.kept for stats in found.kept) / passes,
            batches=len(self.batches),
        )

    def _prediction(self, found: Contender) -> Prediction:
        planner, plans, pick = found.planner, found.plans, found.pick
        assert planner is not None and pick is not None
        acceptance = planner.acceptance[True]
        count, depth = self.setting.batch_size, min(SHOWN, planner.largest.depth)
        return Prediction(
            drafter=found.name,
            rule=found.rule,
            costs=planner.costs.verify(count, range(1, planner.largest.nodes + 2), 64),
            draft=[planner.costs.draft_seconds(count, (1,) * length) for length in range(1, depth + 1)],
            acceptance=acceptance.by_depth(depth),
            available=acceptance.availability,
            choices={str(plan.shape): plan.rate / plans[0].rate for plan in plans},
            pick=str(pick.shape),
            predicted=pick.rate / plans[0].rate,
        )

    def _time(self, speculator: Speculator, batch: Sequence[Sequence[int]]) -> tuple[float, Stats]:
        """Seconds per token of a row after the prefill."""
        prompts = pad(batch, speculator.target.device)
        stats = speculator.generate(**prompts, do_sample=False, min_new_tokens=None, max_new_tokens=NEW).stats
        assert stats is not None
        return after_prefill(stats, len(batch)), stats


def after_prefill(stats: Stats, rows: int) -> float:
    """Seconds per token of a row, without the prompt and its token."""
    spent = stats.seconds["total"] - stats.seconds["prefill"] - stats.seconds.get("planning", 0.0)
    return spent / max(1, stats.new_tokens - rows) * rows


def typical(seconds: Grid) -> float:
    """The mean over prompts of the median of their runs."""
    return mean(median(runs) for runs in seconds)


def document(setting: Setting, found: Sequence[Prediction], spread: float = 1.0, *, complete: bool = True) -> dict[str, Any]:
    """Everything, for JSON; the best drafter first. There is no pick where a run that is not ``complete`` compared nothing."""
    best, pick = found[0], None
    if isinstance(best, Candidate):
        command, python = to_write(setting, best)
        pick = {"drafter": best.drafter, "shape": best.pick, "command": command, "python": python}
    return {
        "schema": 2,
        "target": setting.target,
        "dtype": setting.dtype,
        "quantization": setting.quantization,
        "threads": torch.get_num_threads(),
        "batch_size": setting.batch_size,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "complete": complete,
        "pick": pick,
        "plain_spread": spread,
        "noisy": spread > NOISY,
        "candidates": [each.to_dict() for each in found],
    }


def to_write(setting: Setting, best: Candidate) -> tuple[str, str]:
    """The command and the line of Python for ``best``, or for plain decoding where it does not pay."""
    chosen = {"drafter": best.drafter, "shape": best.pick} if best.pays else {"drafter": "none"}
    given = {name: value for name in ("dtype", "quantization", "device") if (value := getattr(setting, name)) not in (None, "auto")}
    more = {"temperature": 0, **({} if setting.threads is None else {"threads": setting.threads})}  # greedy, as it was measured
    flags = {"target": setting.target, **chosen, **given, **more}
    command = " ".join(["foredraft generate", *(f"--{name} {shlex.quote(str(value))}" for name, value in flags.items()), '"PROMPT"'])
    arguments = ", ".join([json.dumps(setting.target), *(f"{name}={json.dumps(value)}" for name, value in {**chosen, **given}.items())])
    return command, f"foredraft.Speculator({arguments})"


def answer(setting: Setting, found: Sequence[Candidate], spread: float = 1.0) -> list[str]:
    """What to write, how much it gains, how sure that is, and whether the machine was too noisy to tell."""
    best = found[0]
    command, python = to_write(setting, best)
    gain = f"{best.measured:.2f}× plain decoding, 95 % interval {best.low:.2f} to {best.high:.2f}"
    if not best.pays:
        gain = f"none: drafting does not pay here; the best is {best.drafter}, {best.pick}: {gain}"
    sure = "yes" if best.sure else "no, the interval includes 1: give more --prompts, or run it again"
    if best.batches == 1 and best.pick != "chain(0)":
        sure = "no, a single batch of texts tells nothing of others: give more --prompts"
    if len(found) > 1 and best.pays and (second := found[1]).pays and second.high > best.low:
        sure += f"; {second.drafter} may be as fast ({second.measured:.2f}×)"
    lines = [f"write   {command}", f"        {python}", f"gain    {gain}", f"sure    {sure}"]
    if spread > NOISY:
        lines.append(
            f"noise   the machine was too noisy: the same plain decoding took up to {spread:.1f} times as long from one run to the next. "
            "Close other programs and run it again."
        )
    return lines


def report(setting: Setting, measured: Sequence[Prediction], spread: float = 1.0, *, verbose: bool = False) -> RenderableType:
    """For a terminal: the drafters side by side and the answer; what passes cost, acceptance and predictions if ``verbose``, or if nothing
    was compared."""
    found = [each for each in measured if isinstance(each, Candidate)]
    parts: list[RenderableType] = []
    if verbose or not found:
        parts = [_cost_curve(measured[0], setting)]
        for each in reversed(measured):
            head = Text(f"drafter {each.drafter}, rule {each.rule} (match when greedy)", style="bold")
            parts += [Text(), head, _choices(each), *([_check(each)] if isinstance(each, Candidate) else [])]
        parts.append(Text())
    if not found:
        return Group(*parts, Text("Interrupted before the drafters were compared: the speed-ups are predicted, none was measured."))
    table = new_table("drafter", "shape", ">tokens/s per row", ">against plain", ">95 % interval", ">tokens per pass")
    add_row(table, "none (plain decoding)", "", f"{1 / found[0].plain:.1f}", "", "", "")
    for each in found:
        figures = (
            f"{1 / each.speculative:.1f}",
            f"{each.measured:.2f}×",
            f"{each.low:.2f} to {each.high:.2f}",
            f"{each.acceptance_length:.2f}",
        )
        add_row(table, each.drafter, each.pick, *figures)
    return Group(*parts, table, Text(), *(Text(line) for line in answer(setting, found, spread)))


def _cost_curve(best: Prediction, setting: Setting) -> Table:
    table = new_table(">nodes per row", ">ms per pass", "")
    for nodes in (1, 2, 3, 4, 5, 7, 9, 13, 17, 25):
        if nodes <= len(best.costs):
            seconds = best.costs[nodes - 1]
            add_row(table, str(nodes), f"{1e3 * seconds:.2f}", bar(seconds / best.costs[-1]))
    table.title = f"{setting.target}, {counted(setting.batch_size, 'row')}"
    table.title_justify = "left"
    return table


def _choices(each: Prediction) -> Table:
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


def draw(path: Path, setting: Setting, measured: Sequence[Prediction]) -> None:
    """The picture of a run that is complete."""
    found = [each for each in measured if isinstance(each, Candidate)]
    best = found[0]
    with picture(path, 3, size=(13, 4)) as (left, middle, right):
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
