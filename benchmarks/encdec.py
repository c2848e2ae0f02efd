"""The suite of models with an encoder: Foredraft beside transformers, plain and assisted by the same draft.

A source is a prompt. Texts end by themselves: they are as long as the model makes them, so that rows of a batch leave one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import torch

from benchmarks import checkpoints, datasets, sound, speed_plan
from benchmarks.datasets import Prompt
from benchmarks.figures import Figure
from benchmarks.peer_process import FOREDRAFT, TRANSFORMERS
from benchmarks.report import Table
from benchmarks.speed_calls import Calls, Measurement, later_tokens
from benchmarks.speed_plan import AUTO, DRAFT, LOOKUP, PLAIN, Cell, Method
from benchmarks.speed_runner import Block, PeerSuite
from benchmarks.speed_tables import OURS, PLAIN_OF_OURS, Comparison, equality, failed, figures, quiet, ratio, sides, speed, split
from benchmarks.suite import option
from foredraft import zoo
from foredraft.estimates import LEVEL, RESAMPLES, Estimate, Grid, quotient

EMBEDDED = ("ast", "rename")
GREEDY, SAMPLED = "greedy", "temperature 1"
TEMPERATURES = {GREEDY: 0.0, SAMPLED: 1.0}
BETWEEN = 0.25  # seconds for the costs of passes and drafts, after each text
SUFFIX, BIGRAM, BIGRAM_LENGTH = "suffix", "bigram", 3
ASSISTED = {"bfloat16": 2.0, "float32": 1.5}
OVER_PLAIN = {("ast", GREEDY): 2.0, ("ast", SAMPLED): 1.5, ("doc", GREEDY): 1.5, ("doc", SAMPLED): 1.2}
LOOKING, BATCHES, DECODING, BIGRAM_PREDICTED = 2.5, 1.0, 1.0, 0.9
PREDICTED_MEDIAN, PREDICTED_WORST = 0.95, 0.85
NOISE, NOISES, HEARD, HEARING = "noise", 4, (3, 5), 1.5  # windows of sound, γ, and tokens/s over transformers' assisted generation


@dataclass(frozen=True)
class Settings(speed_plan.Settings):
    """What is run, besides what the speed suite's settings say."""

    targets: tuple[str, ...] = option(
        (f"zoo:{zoo.T5_INFLATED}",),
        f"A checkpoint folder, zoo:NAME, or {sound.PREFIX}SIZE ({', '.join(sound.SHAPES)}): Whisper's shapes, which read noise.",
        flag="--target",
    )
    draft: str = option(f"zoo:{zoo.T5_DRAFT}", "The draft model, with the target's tokenizer; a random Whisper has one of its own.")
    rules: tuple[str, ...] = (AUTO,)
    modes: tuple[str, ...] = (PLAIN, DRAFT, LOOKUP)
    drafters: tuple[str, ...] = ()
    peers: tuple[str, ...] = (TRANSFORMERS,)
    shapes: tuple[str, ...] = (AUTO, "chain(5)")
    prompts: tuple[str, ...] = option(("ast", "rename"), "ast, rename, or a file of sources, named as its task.", metavar="TASK|FILE")
    limit: int | None = option(16, "Sources of each task, at most.", least=1)
    chat: bool = False
    tokens: int = option(192, "New tokens per row, at most.")
    repeats: int = option(3, "Measured calls.", least=1)
    temperature: float = 0.0
    worst: bool = False


def hears(target: str) -> bool:
    return target.startswith(sound.PREFIX)


def scenario(task: str, how: str) -> str:
    return f"{task}, {how}"


def methods(settings: Settings) -> list[Method]:
    """Everyone; plain ones first."""
    found = [Method(FOREDRAFT, PLAIN), *(Method(side, PLAIN) for side in settings.peers)]
    for shape in settings.shapes:
        found.append(ours(DRAFT, shape))
    for length in settings.lengths:
        found += assisted(settings, length)
    return [*found, ours(LOOKUP, AUTO), ours(SUFFIX, AUTO, SUFFIX), ours(BIGRAM, f"chain({BIGRAM_LENGTH})", "ngram;order=2")]


def hearing(settings: Settings) -> list[Method]:
    """Everyone who writes down noise, each γ on both sides."""
    drafts = [each for length in HEARD for each in (ours(DRAFT, f"chain({length})"), *assisted(settings, length))]
    return [Method(FOREDRAFT, PLAIN), *(Method(side, PLAIN) for side in settings.peers), ours(DRAFT, AUTO), *drafts]


def assisted(settings: Settings, length: int) -> list[Method]:
    return [Method(side, DRAFT, f"γ={length}", length) for side in settings.peers]


def ours(mode: str, shape: str, drafter: str = "") -> Method:
    options = {**({} if shape == AUTO else {"shape": shape}), **({"drafter": drafter} if drafter else {})}
    length = 0 if shape == AUTO else int(shape.removeprefix("chain(").removesuffix(")"))
    return Method(FOREDRAFT, mode, shape, length, tuple(options.items()))


def cells(settings: Settings, texts: Sequence[tuple[str, Sequence[int]]], everyone: Sequence[Method]) -> list[Cell]:
    """Every source alone, and sources of a task together; transformers assists one row at a time, and only greedily here."""
    found = []
    mine = [each.name for each in everyone if each.side == FOREDRAFT]
    planned = [each.name for each in everyone if each.side == FOREDRAFT and (each.mode == PLAIN or each.automatic)]
    for task in dict.fromkeys(task for task, _ in texts):
        rows = [tuple(ids) for each, ids in texts if each == task]
        for how, temperature in TEMPERATURES.items():
            for batch in settings.batches:
                who = planned if batch > 1 else mine if temperature else [each.name for each in everyone]
                for index in range(len(rows) if batch == 1 else max(1, len(rows) // batch)):
                    chosen = tuple(rows[(index * batch + row) % len(rows)] for row in range(batch))
                    found.append(Cell(scenario(task, how), index, task, chosen, settings.tokens, temperature, tuple(who)))
    return found


class EncDecBlock(Block):
    """Texts end by themselves."""

    ends = True

    def cells(self, texts: Sequence[tuple[str, Sequence[int]]], vocabulary: int) -> list[Cell]:
        return cells(self.settings, texts, self.everyone())

    def _curve(self, repeat: int, context: int) -> None:
        """Nothing: costs are measured between calls, for the machine is faster in one minute than in another."""

    def _between(self, cell: Cell, repeat: int) -> None:
        """What passes and drafts cost in the middle of a text as long as those just written, of which the decoder has read nothing else."""
        written = [len(row) for each, _, rows in self.done if each.key == cell.key for row in rows]
        if cell.batch == 1 and written:
            self._costs(repeat, int(median(written)) // 2, cell.temperature, cell.scenario, cell.index, seconds=BETWEEN, sizes=False)

    def _warm_up(self, calls: Sequence[Cell]) -> None:
        """With the first sources of each scenario and batch."""
        super()._warm_up(list({(cell.scenario, cell.batch): cell for cell in reversed(calls)}.values()))


class HearingBlock(EncDecBlock):
    """Texts of a fixed length, one row at a time, of noise; greedy."""

    ends = False

    def everyone(self) -> list[Method]:
        return hearing(self.settings)

    def _texts(self) -> tuple[list[tuple[str, list[int]]], int]:
        return [(NOISE, [index]) for index in range(heard(self.settings))], sound.VOCABULARY

    def cells(self, texts: Sequence[tuple[str, Sequence[int]]], vocabulary: int) -> list[Cell]:
        who, tokens = tuple(each.name for each in self.everyone()), self.settings.tokens
        return [Cell(scenario(task, GREEDY), index, task, (tuple(ids),), tokens, 0.0, who) for index, (task, ids) in enumerate(texts)]

    def _between(self, cell: Cell, repeat: int) -> None:
        """Nothing: speed-ups of noise are compared with nothing that theory says."""


def heard(settings: Settings) -> int:
    return min(NOISES, settings.limit or NOISES)


class EncDec(PeerSuite[Settings]):
    """Encoder-decoder models: plain decoding, draft models and copying from the source, beside transformers.

    Exits with 1 when something failed.
    """

    name = "encdec"
    title = "Encoder-decoder models"
    settings_type = Settings
    quick: ClassVar[Mapping[str, Any]] = {"limit": 2, "tokens": 48, "repeats": 1, "batches": (1,), "dtypes": ("bfloat16",)}

    def read_prompts(self) -> list[Prompt]:
        found: list[Prompt] = []
        for source in [] if all(map(hears, self.settings.targets)) else self.settings.prompts:
            if source in EMBEDDED:
                texts = zoo.prompts(source)[: self.settings.limit]
                found += [Prompt(f"{source}-{index}", source, (text,)) for index, text in enumerate(texts)]
            else:
                found += datasets.read(source, self.settings.limit)
        return found

    def everyone(self) -> list[Method]:
        kinds = {hears(target) for target in self.settings.targets}
        found = [*(methods(self.settings) if False in kinds else []), *(hearing(self.settings) if True in kinds else [])]
        return list({each.name: each for each in found}.values())

    @property
    def steps(self) -> int:
        settings, count = self.settings, 0
        reading, listening = methods(settings), len(hearing(settings))
        for target in settings.targets:
            if hears(target):
                count += listening * (heard(settings) * settings.repeats + 1)
            else:
                calls = cells(settings, [(prompt.category, [0]) for prompt in self.prompts], reading)
                count += sum(len(cell.methods) for cell in calls) * settings.repeats + len(reading)
        return count * len(settings.dtypes)

    def run(self) -> None:
        settings = self.settings
        torch.set_num_threads(settings.threads)
        self.methods, self.turns = self.everyone(), len(self.prompts)
        self.categories = list(dict.fromkeys(prompt.category for prompt in self.prompts))
        for source in settings.targets:
            name, block = (f"{source}{sound.DRAFT}", HearingBlock) if hears(source) else (settings.draft, EncDecBlock)
            target, draft = (checkpoints.written(each, settings.work_folder) for each in (source, name))
            for dtype in settings.dtypes:
                self.bytes_per_pass[f"{source} {dtype}"] = checkpoints.pass_bytes(target.path, dtype)
                block(self, target, draft, dtype).run()

    # -- what is reported -----------------------------------------------------------------------------------------------

    def findings(self) -> list[Findings | Hearing]:
        return [
            Hearing(self, target, dtype) if hears(target) else Findings(self, target, dtype)
            for target in self.settings.targets
            for dtype in self.settings.dtypes
        ]

    def figures(self) -> list[Figure]:
        return [figure for each in self.findings() for figure in each.figures()]

    def tables(self) -> list[Table]:
        made = [figures(self.figures())]
        for found in self.findings():
            made.append(found.predictions())
            for scenario, batch in dict.fromkeys((each.scenario, each.batch) for each in found.mine):
                calls, where = found.calls(scenario=scenario, batch=batch), f"{scenario}, batch {batch}, {found.where}"
                made.append(speed(f"Tokens per second, {where}", calls))
                if batch == 1:
                    made.append(split(f"Time split, {where}", calls))
                    made += [equality(self, calls, where)] if scenario.endswith(GREEDY) else []
        return [*made, *failed(self)]

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        settings = self.settings
        texts, sounds = ([each for each in settings.targets if hears(each) is kind] for kind in (False, True))
        how = f"{settings.repeats} repeats in turns after warm-up calls, {settings.threads} threads."
        return [
            f"Methods, each side in a process and environment of its own: {sides(self) or 'none started'}.",
            f"Target {', '.join(texts)}, draft {settings.draft}; {self.turns} held-out sources; at most {settings.tokens} new tokens, and "
            f"texts end by themselves; {how}"
            if texts
            else "",
            f"{', '.join(sounds)}: Whisper's shapes with random weights, which read {heard(settings)} windows of noise through their own "
            f"generate and write {settings.tokens} tokens of each; {how} {sound.MADE}"
            if sounds
            else "",
            f"zoo:{zoo.T5_INFLATED} is a benchmark instrument: a small model inflated to the cost of a large one, with the same function."
            if f"zoo:{zoo.T5_INFLATED}" in settings.targets
            else "",
            f"Tokens per second are new tokens over the sum of each source's median seconds, encoder included; in brackets {LEVEL:.0%} "
            f"bootstrap intervals over sources and repeats ({RESAMPLES} draws that all methods share, so that quotients are paired). "
            "transformers drafts by a constant schedule without a confidence threshold, one row at a time.",
            "Predicted speed-ups: tokens per round, times the seconds of a plain pass, over those of a draft and the pass that verifies "
            f"it, timed one after the other in the middle of a text, {BETWEEN} s after each source, and a share of what the draft's "
            "encoder takes, which reads the source once; what a round takes besides is not in them. Each text is compared with the costs "
            "timed once all methods have written it, because the machine is faster in one minute than in another; sources count by their "
            "seconds. α is the share of drafted tokens that are kept, up to the first that is not.",
            quiet(self),
        ]


class Hearing(Comparison):
    """What the project promises for a Whisper in one dtype."""

    run: EncDec

    def figures(self) -> list[Figure]:
        name = f"{NOISE}, {GREEDY}: tokens/s over transformers' assisted generation, same draft, γ = "
        return [self.over(f"{name}{length}", HEARING, *self.pair(length), self.heard.rate, digits=1) for length in HEARD]

    def pair(self, length: int) -> tuple[list[str], list[str]]:
        return self.names(DRAFT, OURS, length=length), self.names(DRAFT, self.run.settings.peers, length=length)

    @property
    def heard(self) -> Calls:
        return self.calls(scenario=scenario(NOISE, GREEDY))

    def predictions(self) -> Table:
        """None; but what both sides' drafts are worth once the encoder has read the sound."""
        rows = []
        for length in HEARD:
            for name, theirs in zip(*self.pair(length)):
                share, rate = alpha(self.heard, name), self.heard.decoding_rate
                over = [ratio(rate(name), rate(other)) for other in (PLAIN_OF_OURS, theirs)]
                said = ["—" if each is None else each.spread.text() for each in over]
                rows.append((name, "—" if share is None else f"{share:.3f}", *said))
        columns = ("method", "α", "over plain, after the first token", "over transformers' assisted, after the first token")
        return Table(f"Drafts of a random Whisper, {self.where}", columns, rows)


class Findings(Comparison):
    """What the project promises for one target in one dtype."""

    run: EncDec

    def figures(self) -> list[Figure]:
        found = []
        for task in self.run.categories:
            for how in TEMPERATURES:
                calls = self.calls(scenario=scenario(task, how))
                where = scenario(task, how)
                if how == GREEDY:
                    same = [each for each in self.names(DRAFT, OURS) if self.methods[each].length]
                    lengths = {self.methods[each].length for each in same}
                    theirs = [each for each in self.names(DRAFT, self.run.settings.peers) if self.methods[each].length in lengths]
                    name = f"{where}: tokens/s over transformers' assisted generation, same draft and γ"
                    found.append(self.over(name, ASSISTED.get(self.dtype, 1.0), same, theirs, calls.rate, digits=1))
                    plain = self.names(PLAIN, self.run.settings.peers)
                    name = f"{where}: plain decoding over transformers', without the encoder and the first token"
                    found.append(self.over(name, DECODING, [PLAIN_OF_OURS], plain, calls.decoding_rate, digits=1))
                if (task, how) in OVER_PLAIN:
                    drafts = [each.name for each in self.run.methods if each.side == FOREDRAFT and each.mode not in (PLAIN, BIGRAM)]
                    name = f"{where}: best draft over plain decoding"
                    found.append(self.over(name, OVER_PLAIN[task, how], drafts, [PLAIN_OF_OURS], calls.rate, digits=1))
                if (task, how) == ("rename", GREEDY):
                    name = f"{where}: source lookup alone over plain decoding"
                    found.append(self.over(name, LOOKING, self.names(LOOKUP, OURS), [PLAIN_OF_OURS], calls.rate, digits=1))
                found += self.batched(task, how)
        return [*found, *self.predicted()]

    def batched(self, task: str, how: str) -> list[Figure]:
        found = []
        for batch in [each for each in self.run.settings.batches if each > 1]:
            calls = self.calls(scenario=scenario(task, how), batch=batch)
            drafts = [name for name in calls.by_method if self.methods[name].mode == DRAFT]
            name = f"{scenario(task, how)}: draft model over plain decoding, batch {batch}"
            found.append(self.over(name, BATCHES, drafts, [PLAIN_OF_OURS], calls.rate, digits=1))
        return found

    def predicted(self) -> list[Figure]:
        name = "measured over predicted speed-up, by the cost curve"
        drafted = sorted((each for mode, each in self.compared() if mode == DRAFT), key=lambda each: each.value)
        middle = next((each for each in drafted if each.value >= median(each.value for each in drafted)), None)
        bigram = sorted((each for mode, each in self.compared() if mode == BIGRAM), key=lambda each: each.value)
        return [
            self.figure(f"{name}: the median of {len(drafted)} cells", PREDICTED_MEDIAN, middle),
            self.figure(f"{name}: the worst", PREDICTED_WORST, next(iter(drafted), None)),
            self.figure(
                f"bigram, γ = {BIGRAM_LENGTH}: measured over (1 - α^4)/(1 - α), the worst", BIGRAM_PREDICTED, next(iter(bigram), None)
            ),
        ]

    def compared(self) -> list[tuple[str, Estimate]]:
        """Measured over predicted speed-up, by mode; of every cell whose chains have a fixed length."""
        return [(mode, fraction) for mode, *_, fraction in self.predictions_of()]

    def predictions_of(self) -> list[tuple[str, str, str, float, Estimate, float, Estimate]]:
        """By mode, method and texts: α, the speed-up after the first token, what is predicted, and measured over predicted speed-up text by
        text: the machine is faster in one minute than in another, and costs are timed after all methods have written a text. Texts
        count by their seconds: of plain decoding at the method's number of tokens, over what they would be if the prediction held."""
        found = []
        for task in self.run.categories:
            for how in TEMPERATURES:
                where = scenario(task, how)
                calls = self.calls(scenario=where)
                for name in calls.by_method:
                    method = self.methods[name]
                    if method.side != FOREDRAFT or method.length == 0:
                        continue
                    measured = ratio(calls.decoding_rate(name), calls.decoding_rate(PLAIN_OF_OURS))
                    expected = self.expected(calls, name, where)
                    mine, plain = calls.seconds_per_token(name), calls.seconds_per_token(PLAIN_OF_OURS)
                    tokens = calls.grid(name, later_tokens)
                    if measured is None or expected is None or mine is None or plain is None or tokens is None:
                        continue
                    fraction = quotient(plain * tokens, mine * expected * tokens)
                    predicted = quotient(mine * expected * tokens, mine * tokens).value
                    found.append((method.mode, name, where, alpha(calls, name) or 0.0, measured, predicted, fraction))
        return found

    def expected(self, calls: Calls, name: str, where: str) -> Grid | None:
        """``[prompts, repeats]`` the predicted speed-up in the scenario ``where``."""
        method, share = self.methods[name], alpha(calls, name)
        if method.mode == BIGRAM:
            whole = None if share is None else sum(share**depth for depth in range(method.length + 1))
            return calls.grid(name, lambda each: whole)
        curves = [each for each in self.run.curves if (each.target, each.dtype, each.method) == (self.target, self.dtype, name)]
        mine = {(each.values.get("index"), each.repeat): each.values for each in curves if each.values.get("scenario") == where}
        if not mine:
            return None
        usual = {part: median(each[part] for each in mine.values()) for part in ("t1", "tn", "draft", "begin")}  # where timing failed

        def predicted(each: Measurement) -> float:
            costs, rounds = mine.get((each.index, each.repeat), usual), max(1, each.rounds or 0)  # a text may end with its first token
            begin = costs["begin"] / rounds  # the draft's encoder reads a source once
            return (later_tokens(each) or 0.0) / rounds * float(costs["t1"]) / (costs["tn"] + costs["draft"] + begin)

        return calls.grid(name, predicted)

    def predictions(self) -> Table:
        rows = [
            (where, name, f"{share:.3f}", measured.spread.text(), f"{predicted:.2f}", fraction.spread.text())
            for _, name, where, share, measured, predicted, fraction in self.predictions_of()
        ]
        columns = ("texts", "method", "α", "over plain, after the first token", "predicted", "measured over predicted, text by text")
        return Table(f"Speed-ups and what theory predicts, {self.where}", columns, rows)


def alpha(calls: Calls, name: str) -> float | None:
    """A round that keeps k of γ drafted tokens has k successes, and one failure unless k = γ."""
    mine = [each for each in calls.by_method.get(name, ()) if each.rounds and each.more.get("accepted_by_depth")]
    if not mine:
        return None
    kept = sum(sum(each.more["accepted_by_depth"]) for each in mine)
    depth = max(len(each.more["accepted_by_depth"]) for each in mine)
    whole = sum(each.more["accepted_by_depth"][-1] for each in mine if len(each.more["accepted_by_depth"]) == depth)
    return kept / (kept + sum(each.rounds or 0 for each in mine) - whole)
