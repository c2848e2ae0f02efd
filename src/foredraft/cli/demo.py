"""``foredraft demo``: transformers, plain decoding and speculative decoding of the same prompts, side by side in one run.

The ways take turns, after a warm-up, and count by their medians. Each run has a share of the seconds that are left, so that the demo ends
in time on a slow machine too, with fewer tokens. The texts are compared token for token: greedy decoding has one answer, up to ties that
rounding decides, so a difference is either explained by the logits or an error.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from foredraft import zoo
from foredraft.cli.figures import counted
from foredraft.cli.generation import load_speculator, make_drafter, pick_device
from foredraft.cli.progress import Progress
from foredraft.cli.settings import Contest
from foredraft.cli.tables import add_row, console, new_table
from foredraft.loading import load_model, load_tokenizer
from foredraft.planning import AutomaticPlanner
from foredraft.preparation import pad
from foredraft.speculator import Speculator
from foredraft.speedup import MEASURED
from foredraft.stats import Stats

TRANSFORMERS, PLAIN = "transformers", "none"
SMALL = "zoo:python-8m"  # one thread is best for it, and leaves the others to whoever keeps the machine busy
WARM_UP, SHORTEST = 8, 0.3  # tokens, and seconds of a run
MEASURING = 0.5  # seconds that a planner may take to measure the machine
TURNS = 5
INFLATED = "a benchmark instrument: the same 8 M model inflated to the cost of 300 M"
KINDS = ("ordinary text", "text that repeats itself")  # of the prompts
ROUNDING = 8  # units in the last place by which rounding may move two logits past each other


@dataclass(frozen=True)
class Setting(Contest):
    """The options of the same names; ``started`` is when the command was given, by ``time.monotonic``."""

    target: str = SMALL
    dtype: str = "float32"
    max_new_tokens: int = 64
    seconds: float = 50.0
    started: float = 0.0


@dataclass(frozen=True)
class Run:
    """What a way made of a prompt in so many ``seconds``; ``stats`` are None for transformers."""

    tokens: list[int]
    seconds: float
    stats: Stats | None = None


@dataclass(frozen=True)
class Difference:
    """Where a way's text leaves that of transformers: the ``position``-th new token, at which the two tokens' logits are ``gap`` apart.

    ``unit`` is the unit in the last place of a logit of this size in the model's dtype.
    """

    way: str
    position: int
    gap: float
    unit: float

    @property
    def explained(self) -> bool:
        """Whether the two logits are so close that rounding decides which one is larger."""
        return abs(self.gap) <= ROUNDING * self.unit


@dataclass(frozen=True)
class Comparison:
    """One prompt under every way."""

    prompt: str
    text: str
    runs: dict[str, list[Run]]
    differences: list[Difference]

    def speed(self, way: str) -> float:
        """Tokens per second, the median of the turns."""
        return statistics.median(len(run.tokens) / run.seconds for run in self.runs[way])


class Demo:
    """Loads the target twice, once as it is for transformers, and makes a Speculator for each drafter."""

    def __init__(self, setting: Setting, progress: Progress):
        if setting.threads is None and setting.target == SMALL:
            setting = replace(setting, threads=1)
        self.setting, self.progress, self.prompts = setting, progress, zoo.prompts("demo")
        self.deadline = setting.started + setting.seconds
        self.tokenizer = load_tokenizer(setting.target)
        drafters = {way: make_drafter(way, {}, self.tokenizer) for way in setting.names if way != PLAIN}
        self.say("laying out weights, compiling kernels")
        # Every run reads its prompt afresh: a cache kept from the run before would flatter whoever comes second.
        plain = load_speculator(setting.plain, self.tokenizer, reuse_prefix=False)
        self.model = plain.model
        self.speculators = {PLAIN: plain}  # the others take its model as it laid the weights out
        for way, drafter in drafters.items():
            self.speculators[way] = Speculator(self.model, drafter, execution="eager", reuse_prefix=False)
            planner = self.speculators[way].planner
            if isinstance(planner, AutomaticPlanner):
                planner.budget = MEASURING
        self.unmodified = load_model(setting.target, dtype=setting.dtype, device=pick_device(setting.device, setting.target))
        self.ways = [TRANSFORMERS, *self.speculators]

    @property
    def left(self) -> float:
        """Seconds until the demo should be over."""
        return max(0.0, self.deadline - time.monotonic())

    def say(self, what: str) -> None:
        self.progress.show(f"{what}; about {self.left:.0f} s left")

    def compare(self) -> Iterator[Comparison]:
        """One comparison after another; the ways take turns within each."""
        for way in self.ways:
            self.say(f"warming up {way}")
            self._run(way, self.prompts[0], SHORTEST, WARM_UP)
        for number, prompt in enumerate(self.prompts, 1):
            runs: dict[str, list[Run]] = {way: [] for way in self.ways}
            share, spent = self.left / (len(self.prompts) - number + 1), 0.0
            for turn in range(TURNS):
                begin = time.monotonic()
                for speculator in self.speculators.values():
                    speculator.drafter.forget()  # the same text comes again
                if turn and spent + spent / turn > share:
                    break
                for index, way in enumerate(self.ways):
                    self.say(f"prompt {number} of {len(self.prompts)}: {way}")
                    slot = (share - spent - (time.monotonic() - begin)) / (len(self.ways) - index)
                    runs[way].append(self._run(way, prompt, max(SHORTEST, slot), self.setting.max_new_tokens))
                spent += time.monotonic() - begin
            longest = max((run.tokens for run in runs[TRANSFORMERS]), key=len)
            text = self.tokenizer.decode(longest, skip_special_tokens=True)
            yield Comparison(prompt, text, runs, list(self._differences(prompt, longest, runs)))

    def _run(self, way: str, prompt: str, seconds: float, most: int) -> Run:
        """At most ``most`` tokens, and those that ``seconds`` allow."""
        inputs = {**self._inputs(prompt), "max_new_tokens": most, "do_sample": False}
        begin = time.perf_counter()
        if way == TRANSFORMERS:
            found = self.unmodified.generate(**inputs, max_time=seconds)
            return Run(found[0, inputs["input_ids"].shape[1] :].tolist(), time.perf_counter() - begin)
        stream, tokens = self.speculators[way].stream(**inputs), list[int]()
        for new in stream:
            tokens += new
            if time.perf_counter() - begin > seconds + stream.stats.seconds.get("planning", 0.0):
                break
        spent = time.perf_counter() - begin
        stream.close()
        return Run(tokens, spent, stream.stats)

    def _differences(self, prompt: str, expected: Sequence[int], runs: dict[str, list[Run]]) -> Iterator[Difference]:
        for way, done in runs.items():
            for run in done:
                position = next((index for index, pair in enumerate(zip(expected, run.tokens)) if pair[0] != pair[1]), None)
                if position is not None:
                    yield self._difference(way, prompt, position, expected[position], run.tokens[position])
                    break

    def _difference(self, way: str, prompt: str, position: int, expected: int, other: int) -> Difference:
        output = self.unmodified.generate(
            **self._inputs(prompt), max_new_tokens=position + 1, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        logits = output.logits[position][0].float()
        best, second = float(logits[expected]), float(logits[other])
        unit = torch.finfo(self.model.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(best), 1e-9)))
        return Difference(way, position, best - second, unit)

    def _inputs(self, prompt: str) -> dict[str, Any]:
        return pad([list(self.tokenizer(prompt)["input_ids"])], self.model.device)


# -- what is shown ----------------------------------------------------------------------------------------------------------


def show(demo: Demo) -> bool:
    """Run the demo and print as it goes; False if a text differed for no reason that rounding explains."""
    out = console()
    demo.progress.clear()
    introduce(out, demo)
    fine = True
    for index, comparison in enumerate(demo.compare()):
        demo.progress.clear()
        report(out, f"prompt {index + 1} of {len(demo.prompts)}: {KINDS[index]}", comparison)
        fine = fine and all(difference.explained for difference in comparison.differences)
    return fine


def introduce(out: Console, demo: Demo) -> None:
    setting = demo.setting
    kinds = {zoo.PREFIX + model.name: model.kind for model in zoo.describe()} if setting.target.startswith(zoo.PREFIX) else {}
    label = f" ({INFLATED})" if kinds.get(setting.target) == "inflated" else ""
    dtype, device = str(demo.model.dtype).removeprefix("torch."), demo.model.device
    threads = f", {counted(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else ""
    out.print(Text(f"Target {setting.target}{label}, {dtype}, {device}{threads}, torch {torch.__version__}."))
    job = f"{counted(len(demo.prompts), 'prompt')}, at most {counted(setting.max_new_tokens, 'new token')} each, greedy, in turns."
    out.print(Text(f"{job} Speeds are medians, prefill included. About {demo.left:.0f} s left."))


def report(out: Console, label: str, comparison: Comparison) -> None:
    out.print()
    out.print(Text(f"── {label}", style="bold"))
    out.print(Text.assemble((comparison.prompt, "dim"), comparison.text.rstrip()), soft_wrap=True)
    out.print()
    _table(out, comparison)
    for way in comparison.runs:
        if way not in (TRANSFORMERS, PLAIN):
            out.print(Text(f"{way}: {verdict(comparison, way)}"))
    if not comparison.differences:
        out.print(Text(f"The text is the same in all {len(comparison.runs)} ways, token for token.", style="green"))
    for difference in comparison.differences:
        out.print(Text(explanation(difference), style="yellow" if difference.explained else "red"))


def explanation(difference: Difference) -> str:
    begin = f"The text of {difference.way} leaves that of transformers at new token {difference.position + 1}"
    if not difference.explained:
        return f"{begin}, and rounding does not explain it (logits {difference.gap:.3g} apart). This is a defect; please report it."
    return f"{begin}: a tie that rounding decides (logits {difference.gap:.3g} apart, the dtype resolves {difference.unit:.3g})."


def verdict(comparison: Comparison, way: str) -> str:
    """As ``stats.summary()``, from the plain runs of this prompt."""
    ratio, stats = comparison.speed(way) / comparison.speed(PLAIN), comparison.runs[way][-1].stats
    if ratio < 1.05 and stats is not None and "nothing lost" in stats.summary():
        return stats.speedup.sentence()
    return f"{ratio:.{1 if ratio >= 1.05 else 2}f}× plain decoding ({MEASURED})"


def _table(out: Console, comparison: Comparison) -> None:
    table = new_table("", ">tokens/s", ">× transformers", ">× plain")
    names = {TRANSFORMERS: "transformers", PLAIN: "Foredraft, plain decoding"}
    for way in comparison.runs:
        speed = comparison.speed(way)
        over = [f"{speed / comparison.speed(each):.1f}×" for each in (TRANSFORMERS, PLAIN)]
        add_row(table, names.get(way, f"Foredraft, {way}"), f"{speed:.1f}", *(over if way != TRANSFORMERS else (over[0], "")))
    out.print(table)
