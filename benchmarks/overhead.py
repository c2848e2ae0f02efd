"""The overhead suite: what a round costs outside the model's forward passes, beside transformers' own generation.

For both sides alike, forward passes are timed by :class:`~benchmarks.passes.PassRecorder`; what is left of the wall time is the overhead. A
*round* is a target pass after the prefill. transformers drafts before its first pass already, so that this pass may yield several tokens:
rounds, their tokens and their time are counted from its end on both sides.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import noise, prompts
from benchmarks.figures import Figure
from benchmarks.overhead_methods import DRAFT, FOREDRAFT, LOOKUP, MODES, PLAIN, TRANSFORMERS, Decode, Field, Method, methods
from benchmarks.passes import Pass, PassRecorder, synchroniser
from benchmarks.report import Table
from benchmarks.suite import Failure, PairSettings, Suite, instrument, option
from foredraft.errors import ConfigurationError
from foredraft.estimates import Spread, turned

REFERENCE = f"{TRANSFORMERS} {PLAIN}"
TARGET_PASS, DRAFT_PASS = "target", "draft"


@dataclass(frozen=True)
class Settings(PairSettings):
    tokens: int = option(64, "New tokens per prompt.", least=2)
    prompts: int = option(5, "How many of the five prompts.", least=1, flag="--beginnings")
    repeats: int = option(5, "Measured repeats, after the warm-up.", least=1)
    draft_length: int = option(5, "γ, tokens drafted per round.", least=1)
    max_ngram: int = option(3, "Longest match that prompt lookup tries, on both sides.", least=1)
    noise_vocab_size: int = option(150_000, "Vocabulary of the noise section.", least=2)
    noise_repeats: int = option(20, "Repeats of the noise section; 0 leaves it out.", least=0)

    def __post_init__(self) -> None:
        if self.tokens < self.draft_length + 2:
            raise ConfigurationError(f"{self.tokens} tokens may all come from the first pass; ask for {self.draft_length + 2} or more")


@dataclass(frozen=True)
class Measurement:
    """One call. Seconds of the whole call, and of the rounds alone: what follows the end of the prefill's pass. ``outside`` is what no
    forward pass took; ``same_as_plain`` is None where the reference failed."""

    method: str
    repeat: int
    prompt: int
    tokens: int
    target_passes: int
    draft_passes: int
    wall: float
    target_seconds: float
    draft_seconds: float
    first_pass_at: float
    rounds: int
    round_tokens: int
    round_wall: float
    round_outside: float
    same_as_plain: bool | None

    @property
    def outside(self) -> float:
        return self.wall - self.target_seconds - self.draft_seconds


class Overhead(Suite[Settings]):
    """What a round costs outside the model's forward passes, beside transformers' own generation.

    Exits with 1 when something could not be measured; it is then listed as a failure and has no figures.
    """

    name = "overhead"
    title = "Overhead: a round outside the model's forward passes"
    settings_type = Settings
    measurements: list[Measurement]
    failures: list[Failure]
    noise: list[dict[str, Any]]

    def __init__(self, settings: Settings, advance: Callable[[], None] = lambda: None, *, compared: Sequence[Method] | None = None):
        super().__init__(settings, advance)
        self.compared = list(methods() if compared is None else compared)
        self._plain: list[list[int]] | None = None  # the reference's tokens, per prompt

    @property
    def steps(self) -> int:
        return (self.settings.repeats + 1) * self.settings.prompts * len(self.compared) + 2 * (self.settings.noise_repeats + 1)

    def run(self) -> None:
        """Compare, then measure the noise; what fails is in ``failures`` and the rest goes on."""
        settings = self.settings
        torch.set_num_threads(settings.threads)
        target, draft, tokenizer = settings.load()
        field = Field(target, draft, settings.tokens, settings.draft_length, settings.max_ngram)
        field.prepare()
        written = prompts.PYTHON[: settings.prompts]
        texts = [tokenizer(text, return_tensors="pt")["input_ids"].to(target.device) for text in written]
        self._compare(field, texts)
        if settings.noise_repeats:
            self.noise = self._attempt("keyed noise", "measurement", partial(self._noise, field, texts[0])) or []

    def _noise(self, field: Field, prompt: Tensor) -> list[dict[str, Any]]:
        return noise.measure(
            field.target,
            prompt[0].tolist(),
            vocab_size=self.settings.noise_vocab_size,
            nodes=(1, self.settings.draft_length + 1),
            repeats=self.settings.noise_repeats,
            advance=self.advance,
        )

    def _compare(self, field: Field, texts: Sequence[Tensor]) -> None:
        ready = {method.name: decode for method in self.compared if (decode := self._warm(method, field, texts))}
        for repeat in range(self.settings.repeats):
            for index, text in enumerate(texts):
                for name in turned(list(ready), repeat * len(texts) + index):
                    work = partial(self._measure, name, ready[name], field, text, repeat, index)
                    measured = self._attempt(name, "measurement", work)
                    if measured is None:  # out of the rest of the run: half a method has no median
                        del ready[name]
                    else:
                        self.measurements.append(measured)
                    self.advance()

    def _warm(self, method: Method, field: Field, texts: Sequence[Tensor]) -> Decode | None:
        """Build, and decode every prompt once; the reference's tokens are kept."""
        decode: Decode | None = self._attempt(method.name, "set-up", partial(method.build, field))
        found = []
        for text in texts:
            tokens = self._attempt(method.name, "warm-up", partial(decode, text)) if decode else None
            self.advance()
            if tokens is None:
                return None
            found.append(tokens)
        if method.name == REFERENCE:
            self._plain = found
        return decode

    def _attempt(self, name: str, stage: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            self.failures.append(Failure(name, stage, f"{type(error).__name__}: {error}"))
            return None

    def _measure(self, name: str, decode: Decode, field: Field, prompt: Tensor, repeat: int, index: int) -> Measurement:
        gc.collect()
        wait = synchroniser(prompt.device)
        with PassRecorder(**{TARGET_PASS: field.target, DRAFT_PASS: field.draft}) as recorder:
            wait()
            begin = time.perf_counter()
            tokens = decode(prompt)
            wait()
            end = time.perf_counter()
        if len(tokens) != field.tokens:
            raise RuntimeError(f"{len(tokens)} tokens came back where {field.tokens} were asked for")
        same = None if self._plain is None else tokens == self._plain[index]
        return measurement(
            recorder.passes, prompt.shape[1], len(tokens), begin, end, method=name, repeat=repeat, prompt=index, same_as_plain=same
        )

    # -- what is reported -----------------------------------------------------------------------------------------------

    def figures(self) -> list[Figure]:
        against = ratios(self.measurements)
        found = [
            Figure(
                f"{mode}: time outside forwards per round, against transformers", against[mode]["outside_per_round"], high=0.5, noise=True
            )
            for mode in (DRAFT, LOOKUP)
        ]
        found += [
            Figure(f"{mode}: tokens per second, against transformers", against[mode]["tokens_per_second"], low=1.0, noise=True)
            for mode in (DRAFT, LOOKUP, PLAIN)
        ]
        if self.settings.noise_repeats and not self.noise:
            found.append(Figure("keyed noise: share of a target pass", None, high=noise.LIMIT, noise=True))
        for each in self.noise:
            shares = [race / each["median_seconds"]["pass"] for race in each["seconds"]["race"]]
            name = f"keyed noise, {each['nodes']} positions: share of a target pass"
            found.append(Figure(name, Spread.of(shares), high=noise.LIMIT, noise=True))
        return found

    def tables(self) -> list[Table]:
        figures = [
            (each.name, each.bound, _text(each.spread, 4 if each.high and each.high < 0.1 else 2), each.verdict) for each in self.figures()
        ]
        shown = [Table("Figures to reach", ("figure", "bound", "measured", "verdict"), figures), self._methods(), self._ratios()]
        if self.noise:
            shown.append(self._noise_table())
        if self.failures:
            rows = [(each.method, each.stage, each.message) for each in self.failures]
            shown.append(Table("Failures", ("method", "stage", "message"), rows))
        return shown

    def _methods(self) -> Table:
        columns = ("", "tokens/s", "tokens/s after prefill", "tokens per round", "rounds", "outside per round, µs", "target pass, ms")
        rows = []
        for name, found in summaries(self.measurements).items():
            cells = [found["tokens_per_second"].text(1), found["round_tokens_per_second"].text(1)]
            cells += [f"{found['acceptance_length'].median:.2f}", f"{found['rounds'].median:.0f}", found["outside_per_round"].text(0, 1e6)]
            cells += [f"{found[figure].median * 1e3:.2f}" for figure in ("target_pass", "draft_pass", "first_pass_at")]
            rows.append((name, *cells))
        return Table("Methods", (*columns, "draft pass, ms", "prefill done, ms"), rows)

    def _ratios(self) -> Table:
        headings = ("tokens/s", "tokens/s after prefill", "outside per round", "outside per call", "target pass", "prefill done")
        rows = [(mode, *(_text(spread, 2) for spread in found.values())) for mode, found in ratios(self.measurements).items()]
        return Table("Foredraft over transformers", ("", *headings), rows)

    def _noise_table(self) -> Table:
        rows = []
        for each in self.noise:
            milliseconds = [f"{each['median_seconds'][name] * 1e3:.2f}" for name in ("pass", "race", "multinomial")]
            rows.append((str(each["nodes"]), *milliseconds, f"{each['share']:.2%}", f"{each['multinomial_share']:.2%}"))
        columns = ("positions", "target pass, ms", "race, ms", "torch.multinomial, ms", "race / pass", "multinomial / pass")
        return Table(f"Keyed noise at a vocabulary of {self.settings.noise_vocab_size:,}", columns, rows)

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        settings = self.settings
        return [
            f"Target {settings.target}, draft {settings.draft}, {settings.dtype}; greedy, {settings.prompts} prompts × {settings.tokens} "
            f"tokens, {settings.repeats} interleaved repeats after a warm-up, γ = {settings.draft_length}, lookup matches of up to "
            f"{settings.max_ngram} tokens. Figures are medians over the repeats, with the smallest and largest in brackets; ratios are "
            "ours over theirs, paired within a repeat. A round is a target pass after the prefill; its overhead is what is not spent in "
            "forward passes of target or draft. The two prompt lookups choose among equally long matches differently (ours the latest, "
            "theirs the first), so their tokens per round differ.",
            instrument([settings.target]),
            self._equality(),
        ]

    def _equality(self) -> str:
        if any(each.same_as_plain is None for each in self.measurements):
            return "Tokens were not compared: plain transformers failed."
        differing = Counter(each.method for each in self.measurements if each.same_as_plain is False)
        if not differing:
            return "Every method returned the tokens of plain transformers in every call."
        calls = self.settings.repeats * self.settings.prompts
        names = [name for name in dict.fromkeys(each.method for each in self.measurements) if differing[name]]
        each = "; ".join(f"{name} in {differing[name]} of {calls} calls" for name in names)
        reason = f" In {self.settings.dtype} passes of different lengths round differently, which can flip a near tie."
        return f"Tokens differ from plain transformers: {each}.{'' if self.settings.dtype == 'float32' else reason}"


def _text(spread: Spread | None, digits: int) -> str:
    return "failed" if spread is None else spread.text(digits)


def measurement(passes: Sequence[Pass], prompt_length: int, tokens: int, begin: float, end: float, **who: Any) -> Measurement:
    """A call's figures from its forward passes. The next pass shows what a pass yielded: it starts that much further on."""
    target = [each for each in passes if each.model == TARGET_PASS]
    prefill = next(index for index, each in enumerate(target) if each.start + each.nodes >= prompt_length)
    rounds = target[prefill + 1 :]
    first_tokens = rounds[0].start - prompt_length + 1 if rounds else tokens
    since = target[prefill].end
    return Measurement(
        **who,
        tokens=tokens,
        target_passes=len(target),
        draft_passes=len(passes) - len(target),
        wall=end - begin,
        target_seconds=sum(each.seconds for each in target),
        draft_seconds=sum(each.seconds for each in passes if each.model == DRAFT_PASS),
        first_pass_at=since - begin,
        rounds=len(rounds),
        round_tokens=tokens - first_tokens,
        round_wall=end - since,
        round_outside=end - since - sum(each.seconds for each in passes if each.begin >= since),
    )


Rows = Sequence[Measurement]


def total(rows: Rows, name: str) -> float:
    return float(sum(getattr(row, name) for row in rows))


FIGURES: dict[str, Callable[[Rows], float]] = {
    "tokens_per_second": lambda rows: total(rows, "tokens") / total(rows, "wall"),
    "round_tokens_per_second": lambda rows: total(rows, "round_tokens") / total(rows, "round_wall"),
    "acceptance_length": lambda rows: total(rows, "round_tokens") / total(rows, "rounds"),
    "rounds": lambda rows: total(rows, "rounds"),
    "outside_per_round": lambda rows: total(rows, "round_outside") / total(rows, "rounds"),
    "outside_per_call": lambda rows: total(rows, "outside") / len(rows),
    "target_pass": lambda rows: total(rows, "target_seconds") / total(rows, "target_passes"),
    "draft_pass": lambda rows: total(rows, "draft_seconds") / max(total(rows, "draft_passes"), 1),
    "first_pass_at": lambda rows: total(rows, "first_pass_at") / len(rows),
}
"""Over all prompts of one repeat: sums first, quotients last. Seconds, and tokens per second. `round_…` is from the end of the
prefill's pass on; `acceptance_length` is tokens per round."""

COMPARED = ("tokens_per_second", "round_tokens_per_second", "outside_per_round", "outside_per_call", "target_pass", "first_pass_at")


def summaries(measurements: Rows) -> dict[str, dict[str, Spread]]:
    """Per method that finished every repeat, every figure over the repeats."""
    return {name: {figure: Spread.of(values) for figure, values in found.items()} for name, found in by_repeat(measurements).items()}


def by_repeat(measurements: Rows) -> dict[str, dict[str, list[float]]]:
    """Per method and figure, one value for each repeat. A method that failed on the way is left out."""
    repeats = sorted({each.repeat for each in measurements})
    prompts = len({each.prompt for each in measurements})
    found: dict[str, dict[str, list[float]]] = {}
    for name in dict.fromkeys(each.method for each in measurements):
        rows = [[each for each in measurements if each.method == name and each.repeat == repeat] for repeat in repeats]
        if all(len(row) == prompts for row in rows):
            found[name] = {figure: [compute(row) for row in rows] for figure, compute in FIGURES.items()}
    return found


def ratios(measurements: Rows) -> dict[str, dict[str, Spread | None]]:
    """Per mode, ours over theirs, paired within each repeat; None where a side failed."""
    found = by_repeat(measurements)
    sides = {mode: (found.get(f"{FOREDRAFT} {mode}"), found.get(f"{TRANSFORMERS} {mode}")) for mode in MODES}
    return {
        mode: {
            figure: None if ours is None or theirs is None else Spread.of([a / b for a, b in zip(ours[figure], theirs[figure])])
            for figure in COMPARED
        }
        for mode, (ours, theirs) in sides.items()
    }
