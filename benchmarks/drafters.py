"""The drafters that need no training: what each is worth on four kinds of text, beside each other and beside vLLM's of the same kind.

Speed is measured as in the speed suite: processes that take turns, call by call. Acceptance at equal draft length is found by simulation
on texts that plain decoding made (:mod:`benchmarks.simulation`), which needs no quiet machine.

What a drafter has learned from one prompt it keeps for the next, as it does for a user; between repeats everything is forgotten, or else
the second repeat would measure memory. Those that keep something are also measured with nothing kept. vLLM's methods keep nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks import checkpoints, datasets, suites
from benchmarks.checkpoints import Checkpoint
from benchmarks.datasets import Prompt
from benchmarks.drafters_plan import (
    COPIES,
    KINDS,
    PROMPT_LOOKUP,
    SEVERAL,
    SUFFIX,
    THEIRS,
    Settings,
    cells,
    datastore,
    methods,
    turns,
    with_store,
)
from benchmarks.figures import Figure, best
from benchmarks.peer_process import FOREDRAFT
from benchmarks.report import Table
from benchmarks.simulation import Kept, Simulation
from benchmarks.speed_calls import Calls
from benchmarks.speed_plan import RANDOM, TEXT, Cell, Method
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
)
from benchmarks.speed_tables import cells as told
from benchmarks.suite import instrument
from foredraft.estimates import LEVEL, RESAMPLES, Estimate, quotient

WORST, MEMBERS, OVER_VLLM = 0.98, 0.98, {"bfloat16": 1.5}
ALL = "all suites"
WHAT = {
    "embedded": "Python files that the embedded models have not seen",
    "edit": f"a module and the beginning of the same with a name changed{' (copy-heavy)' if 'edit' in COPIES else ''}",
    "completion": "a function up to its docstring",
    "chat": "documentation asked for twice, in two turns",
}


class DraftersSuite(PeerSuite[Settings]):
    """The drafters that need no training, on four kinds of text: speed, acceptance, and vLLM's methods of the same kinds beside them.

    What is not installed (make peers) is a row that says so. Exits with 1 when something that is installed failed.
    """

    name = "drafters"
    title = "Drafters that need no training"
    settings_type = Settings
    quick: ClassVar[Mapping[str, Any]] = {"limit": 1, "tokens": 16, "repeats": 1, "worst": False, "replay_limit": 1}
    simulated: list[Kept]
    known: list[int]  # files and tokens of the datastore
    keeps: dict[str, str]  # what drafters keep from text to text

    def read_prompts(self, limit: int | None = None) -> list[Prompt]:
        """Of every suite so many turns; made ones are written as the files that they are published as, and read back."""
        folder, found = self.settings.work_folder / "suites", list[Prompt]()
        if set(self.settings.suites) & suites.SUITES.keys():
            suites.write(folder)
        for name in self.settings.suites:
            source = str(folder / f"{name}.jsonl") if name in suites.SUITES else name
            kind = name if name in KINDS else Path(name).stem
            found += [replace(prompt, category=kind) for prompt in turns(datasets.read(source), limit or self.settings.limit)]
        return found

    def everyone(self) -> list[Method]:
        return methods(self.settings)

    def cells(self, texts: Sequence[tuple[str, Sequence[int]]], everyone: Sequence[Method], vocabulary: int) -> list[Cell]:
        return cells(self.settings, texts, everyone, vocabulary)

    def options(self, method: Method, target: Checkpoint) -> dict[str, Any]:
        """With the datastore in place of its name."""
        found = super().options(method, target)
        if "drafter" in found and self.settings.needs_datastore:
            found["drafter"] = with_store(found["drafter"], self._store(target))
        return found

    def _store(self, target: Checkpoint) -> Path:
        return (self.settings.work_folder / target.slug / "rest.store").absolute()

    @property
    def steps(self) -> int:
        return super().steps + len(Simulation.settings(self.settings))

    def run(self) -> None:
        """Simulate first, which may run on any machine, then the clock."""
        settings, simulates = self.settings, self.settings.replayed not in ("", "none")
        self.keeps = settings.kept
        if settings.needs_datastore:
            for source in dict.fromkeys([*settings.targets, *([settings.replayed] if simulates else [])]):
                target = checkpoints.written(source, settings.work_folder)
                self.known = list(datastore(str(target.path), self._store(target)))
        if simulates:
            stored = self._store(checkpoints.written(settings.replayed, settings.work_folder)) if settings.needs_datastore else None
            self.simulated = Simulation(settings, self.read_prompts(settings.replay_limit), stored, self.advance).run()
        super().run()

    # -- what is reported -----------------------------------------------------------------------------------------------

    def figures(self) -> list[Figure]:
        """Acceptance by simulation, then for every target and dtype what the clock says."""
        return simulation_figures(self.simulated) + [
            figure for each in comparisons(self) for figure in Findings(self, each.target, each.dtype).figures()
        ]

    def tables(self) -> list[Table]:
        made = [figures(self.figures())]
        for comparison in comparisons(self):
            where = comparison.where
            parts = [(category, comparison.calls(category)) for category in self.categories]
            parts += [("All suites", comparison.calls())] if len(parts) > 1 else []
            made += [by_suite(comparison, category, calls) for category, calls in parts if calls.by_method]
            everything = comparison.calls()
            if everything.by_method:
                made += [split(f"Time split, {where}", everything), equality(self, everything, where)]
            random = comparison.calls(scenario=RANDOM)
            if random.by_method:
                made.append(speed(f"Random text, {where}", random))
        return [*made, *simulation_table(self.simulated, self.settings.replayed), *failed(self)]

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        settings = self.settings
        texts = len({each.index for each in self.measurements if each.scenario == TEXT})
        inflated = instrument(settings.targets)
        return [
            f"Methods, each side in a process and environment of its own: {sides(self) or 'none started'}.",
            f"Target {', '.join(settings.targets)}, greedy, batch 1: {texts} prompts of {len(self.categories)} suites × {settings.tokens} "
            f"new tokens, end of text ignored, {settings.repeats} repeats in turns after {settings.warmups} warm-up calls, "
            f"{settings.threads} threads. `auto` is what the planner chooses; chains of γ = {', '.join(map(str, settings.lengths))} are "
            "equally long on both sides.",
            "Suites: "
            + "; ".join(f"{name}: {what}" for name, what in WHAT.items() if name in self.categories)
            + ". Those that are made are made from the source of Python's own library, so their text is that of the Python named above.",
            f"Tokens per second are new tokens over the sum of each prompt's median seconds, prompt included; in brackets {LEVEL:.0%} "
            f"bootstrap intervals over prompts and repeats ({RESAMPLES} draws that all methods share, so that quotients are paired). "
            "After the first token: without the pass over the prompt. Acceptance length is tokens over passes after that one.",
            self._kept(),
            self._merged(),
            self._simulated(),
            missing(self),
            memory(self),
            quiet(self),
            f"{inflated} Its matrices of zeros were replaced by numbers of the order of 1e-12, so that no engine saves reading them."
            if inflated
            else "",
        ]

    def _kept(self) -> str:
        kept = "; ".join(f"{name}: {what}" for name, what in self.keeps.items())
        theirs = " vLLM's ngram and suffix keep nothing (no cached requests)." if self.settings.peers else ""
        what = f"From one prompt to the next drafters keep what they do for a user ({kept}), and" if kept else "No drafter keeps texts, and"
        return (
            f"{what} between repeats everything that texts taught is forgotten. Rows with nothing kept forget before every call. suffix, "
            "prompt-lookup and lookahead know the text at hand alone, rest that and its datastore. The planner keeps what it knows of "
            f"costs and acceptance.{theirs}"
        )

    def _merged(self) -> str:
        files, tokens = self.known or (0, 0)
        store = f" The datastore of rest: {files} other files of Python's library, {tokens} tokens." if files else ""
        merged = f"several merges {', '.join(self.settings.merged)}." if "several" in self.settings.drafters else ""
        return f"{merged}{store}".strip()

    def _simulated(self) -> str:
        if not self.simulated:
            return ""
        count = len({(each.suite, each.prompt) for each in self.simulated})
        return (
            f"Acceptance by replay: plain decoding of {self.settings.replayed} in float32 made {count} texts of "
            f"{self.settings.replay_tokens} new tokens, and each drafter was led through them by the decoding loop; no clock is involved, "
            "and the interval is over texts. Settings of prompt lookup are its shortest and longest match."
        )


def by_suite(comparison: Comparison, category: str, calls: Calls) -> Table:
    """Every method on one suite, those that failed too; ours also over vLLM's best setting of the same kind."""
    rows, heads = [], ("tokens/s", "over own plain", "after the first token", "over vLLM's kind", "acceptance length", "passes per call")
    columns = (*heads, "equal to plain")
    for name, each in comparison.methods.items():
        if not each.hopeless:
            cells = {**told(calls, name), "over vLLM's kind": _over_theirs(comparison, calls, name)}
            rows.append((name, *(cells[column] for column in columns)))
    return Table(f"{category[0].upper()}{category[1:]}, {comparison.where}", ("method", *columns), rows)


def _over_theirs(comparison: Comparison, calls: Calls, name: str) -> str:
    each, rate = comparison.methods[name], calls.rate(name)
    if each.side != FOREDRAFT or each.mode not in THEIRS or rate is None:
        return ""
    theirs = best(comparison.names(THEIRS[each.mode], comparison.run.settings.peers), calls.rate)
    return (rate / theirs[1]).spread.text() if theirs else "—"


# -- by simulation --------------------------------------------------------------------------------------------------------


def acceptance(kept: Sequence[Kept]) -> Estimate | None:
    """Tokens over passes of several texts; the interval is over texts. Those of the same texts are paired."""
    if not kept or not sum(each.passes for each in kept):
        return None
    grids = (np.array([[float(value)] for value in values]) for values in ([each.kept for each in kept], [each.passes for each in kept]))
    return quotient(*grids)


def simulation_figures(kept: Sequence[Kept]) -> list[Figure]:
    """``suffix`` at its defaults against prompt lookup at its own, everywhere, and where text is copied against its best setting."""
    found = []
    names = {each.drafter for each in kept}
    if not {SUFFIX, PROMPT_LOOKUP} <= names:
        return []
    for suite in dict.fromkeys(each.suite for each in kept):
        for length in dict.fromkeys(each.length for each in kept):
            mine = [each for each in kept if (each.suite, each.length) == (suite, length)]
            by_name = {each.name: [other for other in mine if other.name == each.name] for each in mine}
            suffix, lookup = acceptance(by_name[SUFFIX]), acceptance(by_name[PROMPT_LOOKUP])
            name = f"{suite}, γ = {length}: acceptance length of suffix over prompt lookup's"
            found.append(_over(name, suffix, lookup))
            if suite in COPIES:
                tried = {each: acceptance(rows) for each, rows in by_name.items() if each.split(", ")[0] == PROMPT_LOOKUP}
                most = best(list(tried), tried.__getitem__)
                if most is not None:
                    found.append(_over(f"{name} best setting", suffix, most[1], which=f" ({most[0]})", more=True))
    return found


def _over(name: str, ours: Estimate | None, theirs: Estimate | None, *, which: str = "", more: bool = False) -> Figure:
    over = ratio(ours, theirs)
    if ours is None or theirs is None or over is None:
        return Figure(name, None, 1.0, more=more)
    return Figure(name, over.spread, 1.0, how=f"{ours.value:.3f} over {theirs.value:.3f}{which}", more=more)


def simulation_table(kept: Sequence[Kept], target: str) -> list[Table]:
    """Acceptance length of every drafter and setting, by suite and draft length."""
    if not kept:
        return []
    columns = list(dict.fromkeys((each.suite, each.length) for each in kept))
    rows = []
    for name in dict.fromkeys(each.name for each in kept):
        cells = [acceptance([each for each in kept if (each.name, each.suite, each.length) == (name, *column)]) for column in columns]
        rows.append((name, *("—" if cell is None else f"{cell.value:.3f}" for cell in cells)))
    heads = ("drafter", *(f"{suite}, γ = {length}" for suite, length in columns))
    return [Table(f"Acceptance length of chains, replayed texts of {target}", heads, rows)]


# -- by the clock ---------------------------------------------------------------------------------------------------------


class Findings(Comparison):
    """What is promised of drafters that need no training, for one target in one dtype."""

    def figures(self) -> list[Figure]:
        return [*self.several(), *self.random(), *self.against()]

    def several(self) -> list[Figure]:
        """``several`` against the best of its members as they are alone, after the prompt's pass, suite by suite."""
        if SEVERAL not in self.run.settings.drafters:
            return []
        found = []
        for suite in self.run.categories:
            members = [name for member in self.run.settings.merged for name in self.names(member, OURS, length=0)]
            name = f"{suite}: tokens/s of several over its best member's, after the first token"
            found.append(self.over(name, MEMBERS, self.names(SEVERAL, OURS, length=0), members, self.calls(suite).decoding_rate))
        return found

    def random(self) -> list[Figure]:
        """Text that cannot be guessed, against plain decoding of the same."""
        calls = self.calls(scenario=RANDOM)
        return [
            self.over(f"random text: tokens/s over plain, {each.mode}", WORST, [name], [PLAIN_OF_OURS], calls.rate)
            for name, each in self.methods.items()
            if each.hopeless
        ]

    def against(self) -> list[Figure]:
        """vLLM's drafters of the same kinds: the best setting of each side over all suites, and acceptance at equal length."""
        found, calls = [], self.calls()
        low = OVER_VLLM.get(self.dtype, 1.0)
        for drafter, mode in THEIRS.items():
            for side in self.run.settings.peers if drafter in self.run.settings.drafters else ():
                whom = f"{side}'s {'ngram' if mode != SUFFIX else mode}"
                ours, theirs = self.names(drafter, OURS), self.names(mode, (side,))
                for words, rate in (("", calls.rate), (", after the first token", calls.decoding_rate)):
                    name = f"{ALL}: tokens/s of {drafter} over {whom}{words}"
                    found.append(self.over(name, low, ours, theirs, rate, more=low == 1.0))
                for length in self.run.settings.lengths:
                    ours, theirs = (self.names(kind, (each,), length=length) for each, kind in ((FOREDRAFT, drafter), (side, mode)))
                    name = f"{ALL}: acceptance length of {drafter} over {whom}, γ = {length}"
                    found.append(self.over(name, 1.0, ours, theirs, calls.acceptance))
        return found
