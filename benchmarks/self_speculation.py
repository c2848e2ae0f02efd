"""The suite of self-speculation: what drafting with part of the target brings, and what it costs to make a model that can.

Speed is measured as in the speed suite: processes that take turns, call by call. Its targets are inflated in width alone, so that every
layer counts. What early exits know, and what trained ones beside a frozen model add, is counted and needs no quiet machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks import checkpoints, self_models
from benchmarks.checkpoints import Checkpoint
from benchmarks.datasets import Prompt
from benchmarks.figures import Figure, best
from benchmarks.peer_process import FOREDRAFT, TRANSFORMERS
from benchmarks.report import Table
from benchmarks.self_models import BARE, BEHIND_ATTENTION, SIDES, Accepted, Agreement, Bits, share
from benchmarks.self_plan import (
    DEEP,
    DRAFT_VERIFY,
    FROZEN,
    GREEDILY,
    LATER,
    LONG,
    LOST,
    PARTS,
    PLAIN_EVERY,
    PROMPT,
    SAMPLED,
    SEARCHED,
    SEARCHING,
    SHALLOW,
    UNTRAINED,
    WIDE,
    Settings,
    cells,
    long_cells,
    methods,
    pair,
    repeats,
)
from benchmarks.speed import ALLOWED, Findings
from benchmarks.speed_plan import AUTO, EARLY_EXIT, LAYER_SKIP, PLAIN, RANDOM, TEXT, Cell, Method
from benchmarks.speed_runner import Block, Failure, PeerSuite
from benchmarks.speed_tables import PLAIN_OF_OURS, equality, failed, figures, quiet, ratio, sides, speed, split
from foredraft.estimates import LEVEL, RESAMPLES, Estimate, turned
from foredraft.loading import load_model, load_tokenizer
from foredraft.training import prompts
from recipes.zoo.evaluation import WINDOW

EARLY, HALF = 4, 2  # the exit that is judged, and another one of the frozen model
BITS, OVER_UNTRAINED, AGREES = 1.04, 2.5, 0.5
GREEDY, AT_ONE, OVER_THEIRS, OVER_BARE, WORST = 1.2, 1.05, 2.5, 3.0, 0.98
LEFT_OUT, OVER_GREEDILY, SHARE_LATER, FROM_FIRST = 1.1, 1.0, 0.6, 0.98
QUICK = {"limit": 1, "tokens": 16, "repeats": 1, "documents": 4, "answered": 8, "texts": 64, "steps": 8, "trials": 9, "searching": 5 * LONG}
GOALS = {GREEDY: 1.3, AT_ONE: 1.1}


class SelfBlock(Block):
    """Each target has methods of its own."""

    def __init__(self, run: Any, target: Any, draft: Any, dtype: str):
        super().__init__(run, target, draft, dtype)
        self.repeats = repeats(self.settings, target.source)

    def everyone(self) -> list[Method]:
        return methods(self.settings, self.target.source)

    def cells(self, texts: Sequence[tuple[str, Sequence[int]]], vocabulary: int) -> list[Cell]:
        return cells(self.settings, texts, self.everyone(), vocabulary)

    def _warm_up(self, calls: Sequence[Cell]) -> None:
        """With the first text of each scenario."""
        super()._warm_up(list({cell.scenario: cell for cell in reversed(calls)}.values()))

    def _curve(self, repeat: int, context: int) -> None:
        """After the last repeat, what a search does from its first token on."""
        super()._curve(repeat, context)
        settings, run = self.settings, self.run_
        assert isinstance(run, SelfSpeculation)
        if repeat == self.repeats - 1 and self.target.source == WIDE and settings.includes("auto-search"):
            for cell in long_cells(run.windows(settings.searching // LONG)):
                for name in turned([each for each in cell.methods if each in self.at], cell.index):
                    self._measure(name, cell, 0)


class SelfSpeculation(PeerSuite[Settings]):
    """Drafting with part of the target: what early exits know, and how much faster they make it, beside transformers' early exit.

    Exits with 1 when something could not be measured; it is then listed with the reason and has no figures.
    """

    name = "self"
    title = "One model is enough: drafting with part of the target"
    settings_type = Settings
    quick: ClassVar[Mapping[str, Any]] = QUICK
    bits: list[Bits]
    agreements: list[Agreement]
    accepted: list[Accepted]
    parameters: dict[str, int]  # by model
    sets: dict[str, list[str]]  # sublayers that are left out, and how often the draft then agrees, by what found them

    @cached_property
    def _corpus(self) -> Any:
        given = self.settings.corpus
        return self_models.texts(given or self.settings.work_folder / "zoo", build=given is None)

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self.settings.frozen)

    @property
    def _deep(self) -> list[tuple[str, str]]:
        """The model that was trained to exit early and the one that was not, as far as they are asked for."""
        plain = [(UNTRAINED, self.settings.deep_plain)] if self.settings.deep_plain else []
        return [] if self.settings.chosen == ["frozen"] else [(DEEP, self.settings.deep), *plain]

    def windows(self, count: int) -> list[list[int]]:
        return prompts.windows(self._tokenizer, [each.text for each in self._corpus.held_out], count=count, tokens=PROMPT, seed=0)

    def read_prompts(self) -> list[Prompt]:
        made = self.windows(self.settings.limit or 1)
        return [Prompt(f"held-out-{index}", "held-out", (self._tokenizer.decode(ids),)) for index, ids in enumerate(made)]

    def everyone(self) -> list[Method]:
        found = [each for target in self.settings.targets for each in methods(self.settings, target)]
        return list({each.name: each for each in found}.values())

    @property
    def steps(self) -> int:
        settings, count = self.settings, len(self.settings.chosen)
        for target in settings.targets:
            everyone = methods(settings, target)
            calls = cells(settings, [("", [0])] * (settings.limit or 1), everyone, 2)
            count += len(everyone) + repeats(settings, target) * sum(len(cell.methods) for cell in calls)
        return count

    def run(self) -> None:
        settings = self.settings
        torch.set_num_threads(settings.threads)
        for name, source in (*self._deep, (FROZEN, settings.frozen)):  # nothing is measured before all targets are there and make sense
            self_models.refuse_silent_layers(load_model(source), name)
        self.methods, self.categories, self.turns = self.everyone(), ["held-out"], len(self.prompts)
        if settings.includes("exits"):
            with self._attempt(DEEP, "exits"):
                self._exits()
        if settings.includes("frozen"):
            with self._attempt(FROZEN, "trained exits"):
                self._frozen()
        for name, source in ((WIDE, settings.deep), (SHALLOW, settings.frozen)):
            if methods(settings, name):
                with self._attempt(name, "inflation"):
                    target = self._inflated(name, source)
                    if name == WIDE and settings.includes(DRAFT_VERIFY, "auto-search"):
                        with self._attempt(name, "foredraft skip search"):
                            self._search(target)
                    for dtype in settings.dtypes:
                        self.bytes_per_pass[f"{name} {dtype}"] = checkpoints.pass_bytes(target.path, dtype)
                        SelfBlock(self, target, None, dtype).run()

    @contextmanager
    def _attempt(self, what: str, stage: str) -> Iterator[None]:
        """What fails in it is a row."""
        try:
            yield
        except Exception as error:
            self.failures.append(Failure(what, ", ".join(self.settings.dtypes), what, stage, f"{type(error).__name__}: {error}"))
        self.advance()

    def _inflated(self, name: str, source: str) -> Checkpoint:
        model = load_model(source, dtype="float32")
        target = self_models.widened(model, name.replace(" × ", "-x"), self.settings.frozen, self.settings.work_folder)
        return replace(target, source=name)

    @property
    def _data(self) -> Path:
        return (self.settings.corpus or self.settings.work_folder / "zoo") / "corpus" / "train.jsonl"

    def _search(self, target: Checkpoint) -> None:
        """Sets of sublayers for ``target``, judged on texts of the narrow model, which says the same."""
        settings, folder = self.settings, self.settings.work_folder / target.slug
        how = {"trials": settings.trials, "threads": settings.threads}
        assert self._corpus
        self.sets = self_models.search_sets(settings.deep, str(target.path), self._data, folder, **how)

    def options(self, method: Method, target: Checkpoint) -> dict[str, Any]:
        """With the sets that were found."""
        what, found = method.setting.removeprefix(f"{AUTO}, "), super().options(method, target)
        return (
            found
            if what not in (SEARCHED, GREEDILY)
            else {**found, "drafter": f"{DRAFT_VERIFY};skip={self.sets.get(what, ['none found'])[0]}"}
        )

    def _exits(self) -> None:
        """What early exits and single sublayers know, with the recipe and without."""
        settings = self.settings
        files = self_models.documents(self._tokenizer, self._corpus.held_out, settings.documents)
        for name, source in self._deep:
            model = load_model(source, dtype=settings.dtypes[0])
            self.parameters[name] = model.num_parameters()
            self.bits.append(self_models.bits(name, model, files))
            self.agreements += self_models.exits(name, model, files)
            if name == DEEP:
                self.agreements += self_models.sublayers(name, model, files[: max(2, len(files) // 4)])

    def _frozen(self) -> None:
        settings = self.settings
        model = load_model(settings.frozen, dtype=settings.dtypes[0])
        folder = settings.work_folder / f"exits-{self_models.digest(model)}-{settings.texts}-{settings.steps}"
        assert self._corpus  # it is there
        how = {"texts": settings.texts, "steps": settings.steps, "threads": settings.threads}
        trained = self_models.train_exits(settings.frozen, self._data, folder, (EARLY, HALF), **how)
        self.accepted += self_models.frozen(model, trained, self.windows(settings.answered), settings.tokens)

    # -- what is reported -----------------------------------------------------------------------------------------------

    def agreement(self, model: str, what: str) -> Estimate | None:
        found = next((each for each in self.agreements if (each.model, each.what) == (model, what)), None)
        return None if found is None else share(found.same, found.tokens)

    def bits_per_byte(self, model: str) -> Estimate | None:
        found = next((each for each in self.bits if each.model == model), None)
        return None if found is None else share(found.bits, found.bytes)

    def length(self, side: str, exit: int) -> Estimate | None:
        """Acceptance length less 1."""
        found = next((each for each in self.accepted if (each.side, each.exit) == (side, exit)), None)
        return None if found is None or not sum(found.accepted) else share(found.accepted, found.rounds)

    def findings(self, *targets: str) -> list[SelfFindings]:
        """Of each target, or of ``targets``, in every dtype."""
        return [SelfFindings(self, target, dtype) for target in targets or self.settings.targets for dtype in self.settings.dtypes]

    def figures(self) -> list[Figure]:
        settings, found = self.settings, list[Figure]()
        if settings.includes("exits"):
            bits = ratio(self.bits_per_byte(DEEP), self.bits_per_byte(UNTRAINED))
            here, there = self.agreement(DEEP, f"exit {EARLY}"), self.agreement(UNTRAINED, f"exit {EARLY}")
            name = f"{DEEP}, exit {EARLY}: agreement with the last layer"
            found += [
                figure(f"{DEEP}: held-out bits per byte over the same model without the recipe", bits, high=BITS),
                figure(f"{name}, over that of the model without the recipe", ratio(here, there), low=OVER_UNTRAINED),
                figure(name, here, low=AGREES),
            ]
        found += [each for one in self.findings(WIDE) for each in one.figures()]
        if settings.includes("frozen"):
            over = ratio(self.length(BEHIND_ATTENTION, EARLY), self.length(BARE, EARLY))
            found.append(
                figure(f"{FROZEN}, frozen, exit {EARLY}: acceptance length - 1, {BEHIND_ATTENTION}, over bare", over, low=OVER_BARE)
            )
        return found + [each for one in self.findings(SHALLOW) for each in one.worst()]

    def tables(self) -> list[Table]:
        made = [figures(self.figures()), *self._exit_tables(), *self._frozen_tables()]
        for comparison in self.findings():
            target = comparison.where if len(self.settings.dtypes) > 1 else comparison.target
            for scenario in dict.fromkeys(each.scenario for each in comparison.mine):
                calls = comparison.calls(scenario=scenario)
                made.append(speed(f"{scenario.capitalize()}, {target}", calls))
                if scenario == TEXT:
                    made += [split(f"Time split, {target}", calls), equality(self, calls, target)]
        if self.sets:
            rows = [(what, *each) for what, each in self.sets.items()]
            made.append(Table(f"Sublayers of {WIDE} that drafts leave out", ("found by", "set", "agreement"), rows))
        return made + failed(self)

    def _exit_tables(self) -> list[Table]:
        def row(what: str, value: Callable[[str], Estimate | None]) -> tuple[str, ...]:
            each = value(DEEP), value(UNTRAINED)
            return (what, *("—" if one is None else one.spread.text(3) for one in (*each, ratio(*each))))

        whats = [each.what for each in self.agreements if each.model == DEEP]
        known = [row(what, lambda model, what=what: self.agreement(model, what)) for what in whats if what.startswith("exit")]  # type: ignore[misc]
        without = {what: self.agreement(DEEP, what) for what in whats if what.startswith("without")}
        cells = {what.removeprefix("without "): each.spread.text(3) for what, each in without.items() if each}
        layers = dict.fromkeys(what.split()[1] for what in cells)
        columns = ("", DEEP, "without the recipe", "ratio")
        made = [Table("Held-out text", columns, [row("bits per byte", self.bits_per_byte), *known])] if self.bits else []
        if layers:
            rows = [(f"layer {layer}", cells[f"attention {layer}"], cells[f"MLP {layer}"]) for layer in layers]
            made.append(
                Table(f"{DEEP} without one sublayer: agreement with the whole model", ("", "without attention", "without MLP"), rows)
            )
        return made

    def _frozen_tables(self) -> list[Table]:
        rows = []
        for exit in dict.fromkeys(each.exit for each in self.accepted):
            each = [self.length(side, exit) for side in SIDES]
            over = [ratio(one, each[0]) for one in each[1:]]
            rows.append((f"exit {exit}", *("—" if one is None else one.spread.text(3) for one in (*each, *over))))
        title = f"{FROZEN}, frozen: acceptance length - 1 of greedy chains of {self_models.CHAIN}"
        return [Table(title, ("", *SIDES, *(f"{side}, over bare" for side in SIDES[1:])), rows)] if rows else []

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        settings = self.settings
        sizes = ", ".join(f"{name} {count / 1e6:.1f} M parameters" for name, count in self.parameters.items())
        return [
            f"Methods, each side in a process and environment of its own: {sides(self) or 'none started'}.",
            f"{WIDE} is {DEEP}, and {SHALLOW} is {FROZEN}, inflated in width alone, so that every layer counts. A target with a layer "
            "whose attention or MLP writes nothing is refused.",
            f"{settings.limit} windows of {PROMPT} tokens from packages that no model has seen × {settings.tokens} new tokens, end of "
            f"text ignored, batch 1, {settings.repeats} repeats in turns ({repeats(settings, SHALLOW)} on {SHALLOW}, to tell 0.98 from 1) "
            f"after a warm-up with each kind of text, {settings.threads} threads. `{TEXT}` is greedy, `{SAMPLED}` at temperature 1; "
            f"`{RANDOM}`: every token is drawn uniformly; `{LOST}`: random prompts that are continued greedily. `{AUTO}` is what the "
            f"planner chooses, at exit {settings.exit}.",
            f"Tokens per second are new tokens over the sum of each prompt's median seconds, prompt included; in brackets {LEVEL:.0%} "
            f"bootstrap intervals over prompts and repeats ({RESAMPLES} draws that all methods share, so that quotients are paired). "
            "Figures compare tokens/s of calls of the same prompt and turn: the median over repeats, then the mean over prompts. "
            "transformers drafts by a constant schedule without a confidence threshold.",
            f"`{SEARCHING}`: {settings.searching} tokens in texts of {LONG}, one after the other, of which `{LATER}` is the last fifth; "
            f"plain decoding writes every {PLAIN_EVERY}th of the others too."
            if settings.includes("auto-search")
            else "",
            f"Bits per byte and agreement: {settings.documents} held-out files, for single sublayers the first {WINDOW} tokens of a "
            f"quarter of them; intervals are over files. {sizes}."
            if settings.includes("exits")
            else "",
            f"Sublayers to leave out: {settings.trials} trials of `foredraft skip search`, and as many of greedy elimination alone."
            if self.sets
            else "",
            f"Exits of {FROZEN}: {settings.steps} steps on {settings.texts} texts that it wrote; {settings.answered} held-out prompts × "
            f"{settings.tokens} tokens, intervals over prompts."
            if settings.includes("frozen")
            else "",
            f"Parts: {', '.join(settings.chosen)} of {', '.join(PARTS)}.",
            quiet(self),
        ]


def figure(name: str, value: Estimate | None, low: float | None = None, high: float | None = None, how: str = "") -> Figure:
    return Figure(name, None if value is None else value.spread, low, high, how)


class SelfFindings(Findings):
    """What is promised of one target."""

    def figures(self) -> list[Figure]:
        settings, found = self.run.settings, list[Figure]()
        if settings.includes(LAYER_SKIP):
            for scenario, low in ((TEXT, GREEDY), (SAMPLED, AT_ONE)):
                found.append(self.over_plain(LAYER_SKIP, low, scenario, f"goal {GOALS[low]}"))
            found.append(self.planned())
        if settings.includes("transformers"):
            found += [*self.theirs(), *self.allowed(self.calls(), LAYER_SKIP)]
        if settings.includes(DRAFT_VERIFY):
            searched, greedily = (f"{FOREDRAFT} {DRAFT_VERIFY}, {AUTO}, {each}" for each in (SEARCHED, GREEDILY))
            name = f"{TEXT}: tokens/s of {DRAFT_VERIFY}, {SEARCHED}, over"
            found.append(self.figure(f"{name} plain", LEFT_OUT, self.calls().in_turns(searched, PLAIN_OF_OURS)))
            found.append(self.figure(f"{name} {GREEDILY}", OVER_GREEDILY, self.calls().in_turns(searched, greedily)))
        if settings.includes("auto-search"):
            found += self.searching()
        return [*found, *self.worst()]

    def planned(self) -> Figure:
        """The planner's shapes beside the passes and drafts that they took."""
        calls, name = self.calls(), f"{FOREDRAFT} {LAYER_SKIP}, {AUTO}"
        speedup, kept = ratio(calls.decoding_rate(name), calls.decoding_rate(PLAIN_OF_OURS)), calls.acceptance(name)
        if speedup is None or kept is None:
            return self.figure(f"speed-up over what acceptance and its own passes allow, {name}", ALLOWED, None)
        return self._allowed_by_calls(calls, name, speedup, kept)

    def searching(self) -> list[Figure]:
        """What ``draft-verify:auto`` has found by the last fifth of its texts, and what all of them took."""
        early, later = (self.calls(scenario=each) for each in (SEARCHING, LATER))
        name = f"{FOREDRAFT} {DRAFT_VERIFY}, {AUTO}, "
        own, searched, plain = (later.rate(each) for each in (name + SEARCHING, name + SEARCHED, PLAIN_OF_OURS))
        found = ratio(own, plain), ratio(searched, plain)
        gains = [None if each is None else Estimate(each.value - 1, each.draws - 1) for each in found]
        how = "" if found[0] is None or found[1] is None else f"{found[0].value:.2f} and {found[1].value:.2f} times plain"
        calls = [each for part in (early, later) for each in part.by_method.get(name + SEARCHING, ())]
        plains = [each for part in (early, later) for each in part.by_method.get(PLAIN_OF_OURS, ())]
        rates = [share([each.tokens for each in rows], [each.seconds for each in rows]) if rows else None for rows in (calls, plains)]
        words, whole = (
            f"{LATER}: share of the gain of the {SEARCHED}, {DRAFT_VERIFY}:auto",
            f"{SEARCHING}: tokens/s over plain from the first token on",
        )
        return [self.figure(words, SHARE_LATER, ratio(*gains), how=how), self.figure(whole, FROM_FIRST, ratio(*rates))]

    def over_plain(self, mode: str, low: float, scenario: str, how: str = "") -> Figure:
        """The planner's."""
        calls = self.calls(scenario=scenario)
        found = best([each for each in calls.by_method if self.methods[each].mode == mode and self.methods[each].automatic], calls.rate)
        value = None if found is None else calls.in_turns(found[0], PLAIN_OF_OURS)
        return self.figure(f"{scenario}: tokens/s of {mode} over plain", low, value, how=how)

    def theirs(self) -> list[Figure]:
        """The same exit and draft length on both sides; what the planner makes of it, and plain decoding, beside."""
        calls, settings = self.calls(), self.run.settings
        plains = calls.in_turns(PLAIN_OF_OURS, f"{TRANSFORMERS} {PLAIN}")
        beside = "" if plains is None else f"plain over plain {plains.value:.2f}"
        found = []
        for exit in settings.exits:
            for length in settings.lengths:
                ours, other = (
                    f"{side} {mode}, {pair(exit, length)}" for side, mode in ((FOREDRAFT, LAYER_SKIP), (TRANSFORMERS, EARLY_EXIT))
                )
                name = f"{pair(exit, length)}: tokens/s over transformers' early exit"
                found.append(self.figure(name, OVER_THEIRS, calls.in_turns(ours, other), how=beside))
        return found

    def worst(self) -> list[Figure]:
        """Where nothing pays."""
        if not self.run.settings.includes("nothing"):
            return []
        if self.target != SHALLOW:
            return [self.over_plain(LAYER_SKIP, WORST, each) for each in (RANDOM, LOST)]
        modes = [DRAFT_VERIFY] if self.run.settings.includes(DRAFT_VERIFY) else []
        return [self.over_plain(LAYER_SKIP, WORST, SAMPLED), *(self.over_plain(each, WORST, TEXT) for each in (LAYER_SKIP, *modes))]
