"""The distill suite: which loss and which share of its own texts make a draft better, and what the better draft is worth.

1. **short**: every loss with every λ for a few tokens, one seed.
2. **full**: the best three of them on validation prompts, and ``fkl`` on given texts, for all tokens and all seeds.
3. **test**: the best of these on validation prompts, ``fkl`` on given texts and the draft that all began with, on test prompts. These come
   from other packages than the validation prompts, and nothing was chosen on them.
4. **speed**: tokens per second with the best draft and with the one it began with, in turns.

The folder ``--work`` keeps texts, checkpoints and what was measured of every cell. A run that was stopped is continued by the same command.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from benchmarks.figures import Figure
from benchmarks.report import Table
from benchmarks.self_models import texts as corpus_in
from benchmarks.suite import Settings as Base
from benchmarks.suite import Suite, instrument, option, plain
from foredraft import Speculator
from foredraft.drafters.draft_model import DraftModel
from foredraft.errors import ConfigurationError
from foredraft.estimates import RESAMPLES, Estimate, quotient
from foredraft.loading import load_model, load_tokenizer
from foredraft.losses import Loss
from foredraft.models.identity import shape_of
from foredraft.rows import RowParameters
from foredraft.training import generation, prompts
from foredraft.training.data import changes, write_json
from foredraft.training.distilling import Distilling
from foredraft.training.drafts import Draft, DraftConfig
from foredraft.training.options import DRAFT, Options
from foredraft.training.runs import run as train
from foredraft.training.worth import DraftHeld

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHORT, FULL = "short", "full"
VALIDATION, TEST = "validation", "test"
GREEDY, SAMPLED = 0.0, 1.0
CHAIN = 5
BEGUN, REFERENCE, GIVEN = "the draft they began with", "fkl, λ = 0", "the distilled draft"
TEXT, PROMPT = 256, 64  # tokens of a text that is learnt from, and of its prompt; of a prompt that is answered
BEST = 3


@dataclass(frozen=True)
class Settings(Base):
    threads: int = option(1, "Threads of training and measuring.", least=1)
    target: str = option("zoo:python-8m", "The model to distill from.")
    draft: str = option("zoo:python-1m", "The draft that all begin with.")
    distilled: str = option("", "A draft that was distilled before; figures of acceptance and speed are of it, not of the best full run.")
    served: str = option("zoo:python-300m", "The target of the speed measurement; it writes what --target writes. none for no measurement.")
    losses: tuple[str, ...] = option(("fkl", "rkl", "jsd(0.5)", "tvd", "lk(3)", "ce"), "Losses of the grid.", flag="--loss")
    shares: tuple[float, ...] = option((0.0, 0.5, 1.0), "Shares λ of texts that the draft writes.", flag="--on-policy")
    short: int = option(500_000, "Tokens that every cell is trained on.", least=1)
    full: int = option(8_000_000, "Tokens that the best cells are trained on; 0 for a grid of short runs alone.", least=0)
    seeds: int = option(3, "Full runs of each.", least=1)
    batch_tokens: int = option(2048, "Tokens of a step.", least=TEXT)
    learning_rate: float = option(1e-3, "Peak rate of AdamW.")
    precision: str = option("bf16", "Of products in training, the target's too: bf16 or float32.")
    rewrite_every: int = option(100, "Steps after which texts are written anew.", least=1)
    judged: int = option(128, "Prompts of each held-out half.", least=2)
    tokens: int = option(64, "Tokens that each is answered with.", least=1)
    timed: int = option(12, "Prompts of the speed measurement.", least=2)
    repeats: int = option(3, "Times that each of them is answered.", least=1)
    cells: int | None = option(None, "Train so many cells in this call, and report what is there.", least=0)
    corpus: Path | None = option(None, "Folder of python -m recipes.zoo corpus; collected into --work unless given.", place=True)
    work: Path = option(Path("distill-work"), "Texts, checkpoints and measurements; the same command goes on from there.", place=True)

    def __post_init__(self) -> None:
        for loss in self.losses:
            Loss.parse(loss)
        if wrong := [share for share in self.shares if not 0 <= share <= 1]:
            raise ConfigurationError(f"--on-policy is a share from 0 to 1, got {wrong[0]}")

    @property
    def grid(self) -> list[Cell]:
        found = [Cell(SHORT, loss, share, 0) for loss in self.losses for share in self.shares]
        return found if self.reference in found else [self.reference, *found]

    @property
    def reference(self) -> Cell:
        return Cell(SHORT, "fkl", 0.0, 0)


@dataclass(frozen=True)
class Cell:
    """A run: how long, which loss, which λ and which seed."""

    length: str
    loss: str
    share: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.loss}, λ = {self.share:g}"

    @property
    def slug(self) -> str:
        return f"{self.length}-{self.loss}-{self.share:g}-{self.seed}".replace("(", "").replace(")", "").replace("*", "x")


@dataclass(frozen=True)
class Answer:
    """A held-out prompt continued at a temperature: tokens ``kept`` out of ``passes``."""

    draft: str
    length: str
    seed: int
    half: str
    temperature: float
    prompt: int
    kept: int
    passes: float


@dataclass(frozen=True)
class Trained:
    """What training a cell came to, as its log has it at the step that was kept."""

    cell: str
    length: str
    seed: int
    step: int
    alpha: float
    agreement: float


@dataclass(frozen=True)
class Timed:
    """One answer under the planner, with ``draft``."""

    draft: str
    temperature: float
    prompt: int
    repeat: int
    tokens: int
    seconds: float


class Distill(Suite[Settings]):
    """Drafts distilled with every loss and share of texts of their own: acceptance length and speed over the draft they began with."""

    name = "distill"
    title = "Distilled drafts"
    settings_type = Settings
    quick: ClassVar[Mapping[str, Any]] = {
        "losses": ("fkl", "lk(3)"),
        "shares": (0.0, 1.0),
        "short": 4096,
        "full": 8192,
        "seeds": 1,
        "judged": 4,
        "tokens": 8,
        "timed": 2,
        "repeats": 1,
        "rewrite_every": 2,
        "served": "zoo:python-8m",
    }
    answers: list[Answer]
    trained: list[Trained]
    timings: list[Timed]

    def __init__(self, settings: Settings, advance: Callable[[], None] = lambda: None):
        super().__init__(settings, advance)
        self._left = settings.cells

    @property
    def steps(self) -> int:
        settings = self.settings
        return len(settings.grid) + (settings.seeds * (BEST + 1) if settings.full else 0)

    def run(self) -> None:
        settings = self.settings
        torch.set_num_threads(settings.threads)
        logging.getLogger("accelerate").setLevel(logging.ERROR)  # it warns of tied weights in every checkpoint
        self._claim()
        target, tokenizer = load_model(settings.target, dtype="float32", device=settings.device), load_tokenizer(settings.target)
        held = self._texts(target, tokenizer)
        begun = load_model(settings.draft, dtype="float32", device=settings.device)
        self._judges = {half: DraftHeld(given, settings.tokens) for half, given in held.items()}
        self.answers += self._answered(BEGUN, "", 0, target, begun, [VALIDATION, TEST])
        if settings.distilled:
            distilled = load_model(settings.distilled, dtype="float32", device=settings.device)
            self.answers += self._answered(GIVEN, "", 0, target, distilled, [VALIDATION, TEST])
        for cell in settings.grid:
            self._cell(cell, target, [VALIDATION])
        if settings.full and not self._missing(settings.grid):
            chosen = [each for each in settings.grid if each.name in {*self.best(SHORT)[:BEST], REFERENCE}]
            full = [Cell(FULL, each.loss, each.share, seed) for seed in range(settings.seeds) for each in chosen]
            for cell in full:
                self._cell(cell, target, [VALIDATION, TEST])
        else:
            full = []
        if (settings.distilled or (full and not self._missing(full))) and settings.served != "none":
            self._speed(held[TEST][: settings.timed])

    # -- cells --------------------------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        """Raises ConfigurationError if the folder was begun with other settings."""
        ignored = {"cells", "distilled", "losses", "shares", "seeds", "timed", "repeats", "served", "threads"}
        path = self.settings.work / "settings.json"
        mine = {name: value for name, value in plain(asdict_without_places(self.settings)).items() if name not in ignored}
        self.settings.work.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_json(path, mine)
        if changed := changes(json.loads(path.read_text(encoding="utf-8")), mine):
            raise ConfigurationError(
                f"{str(self.settings.work)!r} was begun with other settings: {'; '.join(changed)}; pass another --work"
            )

    def _texts(self, target: PreTrainedModel, tokenizer: Any) -> dict[str, list[list[int]]]:
        """Write what is learnt from, and return the prompts of both halves of the held-out packages."""
        settings = self.settings
        found = corpus_in(settings.corpus.parent if settings.corpus else settings.work, build=settings.corpus is None)
        count = max(settings.short, settings.full) // TEXT + settings.batch_tokens // TEXT + 32
        windows = prompts.windows(tokenizer, [each.text for each in found.train], count=count, tokens=TEXT, seed=1)
        generation.generate(target, windows, generation.Answering(0), settings.work / "texts", source={"texts": "corpus"}, per_shard=4096)
        packages = sorted({each.package for each in found.held_out})
        halves = {}
        for number, half in enumerate((VALIDATION, TEST)):
            texts = [each.text for each in found.held_out if each.package in packages[number::2]]
            halves[half] = prompts.windows(tokenizer, texts, count=settings.judged, tokens=PROMPT, seed=2 + number)
        return halves

    def _answered(
        self, name: str, length: str, seed: int, target: PreTrainedModel, draft: PreTrainedModel, halves: Sequence[str]
    ) -> list[Answer]:
        """Of validation prompts what is expected of rounds, of test prompts what rounds came to."""
        found = []
        for half in halves:
            judge = self._judges[half]
            found += (expected if half == VALIDATION else answered)(name, length, seed, half, target, draft, judge)
        return found

    def _cell(self, cell: Cell, target: PreTrainedModel, halves: Sequence[str]) -> None:
        """Train and measure it, unless that was done, or ``--cells`` are done."""
        folder = self.settings.work / cell.slug
        path = folder / "measured.json"
        if not path.exists():
            if self._left == 0:
                return
            self._left = None if self._left is None else self._left - 1
            self._train(cell, folder)
            draft = load_model(folder, dtype="float32", device=self.settings.device)
            found = self._answered(cell.name, cell.length, cell.seed, target, draft, halves)
            write_json(path, {"trained": asdict(outcome(cell, folder)), "answers": [asdict(each) for each in found]})
        document = json.loads(path.read_text(encoding="utf-8"))
        self.trained.append(Trained(**document["trained"]))
        self.answers += [Answer(**each) for each in document["answers"]]
        self.advance()

    def _train(self, cell: Cell, folder: Path) -> None:
        settings = self.settings
        steps = max(1, (settings.short if cell.length == SHORT else settings.full) // settings.batch_tokens)
        how = Distilling(settings.draft, cell.loss, on_policy=cell.share, rewrite_every=settings.rewrite_every)
        options = Options(
            kind=DRAFT,
            head=asdict(how),
            steps=steps,
            batch_tokens=settings.batch_tokens,
            learning_rate=settings.learning_rate,
            warmup=min(50, max(1, steps // 10)),
            seed=cell.seed,
            precision=settings.precision,
            held_out=32,
            answer_tokens=min(32, settings.tokens),
            evaluate_every=max(1, steps // 4),
            backbone="full",
            save_every=50,
        )
        given: dict[str, Any] = {"resume": True, "device": settings.device, "threads": settings.threads, "prompt_tokens": PROMPT}
        given["dtype"] = "bfloat16" if settings.precision == "bf16" else "float32"
        if train(settings.target, [settings.work / "texts"], folder, options, **given) is None:
            raise KeyboardInterrupt

    def _missing(self, cells: Sequence[Cell]) -> bool:
        return any(not (self.settings.work / cell.slug / "measured.json").exists() for cell in cells)

    # -- speed --------------------------------------------------------------------------------------------------------------

    def _speed(self, given: Sequence[Sequence[int]]) -> None:
        """Both drafts under the planner in bfloat16, in turns."""
        settings, (best, _) = self.settings, self._chosen()
        runs = [settings.work / each.slug for each in self._full() if each.name == best and each.seed == 0]
        sides = {}
        for name, draft in ((BEGUN, settings.draft), (best, settings.distilled or str(runs[0]))):
            target, drafter = (load_model(each, dtype="bfloat16", device=settings.device) for each in (settings.served, draft))
            sides[name] = Speculator(target, DraftModel(drafter), reuse_prefix=False)
        for repeat in range(-1, settings.repeats):  # the first is a warm-up
            for index, ids in enumerate(given):
                for temperature in (GREEDY, SAMPLED):
                    for name in sorted(sides, reverse=bool((index + repeat) % 2)):
                        made, seconds = timed(sides[name], ids, temperature, settings.tokens, seed=index)
                        if repeat >= 0:
                            self.timings.append(Timed(name, temperature, index, repeat, made, seconds))
        for side in sides.values():
            side.close()

    def _chosen(self) -> tuple[str, str]:
        """The draft that the figures of acceptance and speed are of, and its stage."""
        return (GIVEN, "") if self.settings.distilled else (next(iter(self.best(FULL)), ""), FULL)

    def _full(self) -> list[Cell]:
        return [Cell(FULL, *read(each.cell), each.seed) for each in self.trained if each.length == FULL]

    # -- what is reported -----------------------------------------------------------------------------------------------------

    def lengths(self, name: str, length: str, half: str, temperature: float) -> Estimate | None:
        """Acceptance length - 1 of a draft, all seeds together; prompts are drawn, the same ones for every draft."""
        settings, counts = self.settings, np.zeros((2, self.settings.judged))
        for each in self.answers:
            if (each.draft, each.length, each.half, each.temperature) == (name, length, half, temperature):
                counts[:, each.prompt] += each.kept, each.passes
        if not counts[1].any():
            return None
        drawn = np.random.default_rng(0).multinomial(settings.judged, [1 / settings.judged] * settings.judged, RESAMPLES)
        kept, passes = counts @ drawn.T
        return Estimate(float(counts[0].sum() / counts[1].sum()) - 1, kept / passes - 1)

    def both(self, name: str, length: str, half: str) -> Estimate | None:
        """The mean of greedy and sampled acceptance length - 1."""
        found = [self.lengths(name, length, half, temperature) for temperature in (GREEDY, SAMPLED)]
        return None if found[0] is None or found[1] is None else (found[0] + found[1]) / 2

    def best(self, length: str) -> list[str]:
        """The cells of a stage, best on validation prompts first."""
        names = dict.fromkeys(each.cell for each in self.trained if each.length == length)
        found = {name: estimate.value for name in names if (estimate := self.both(name, length, VALIDATION)) is not None}
        return sorted(found, key=lambda name: -found[name])

    def figures(self) -> list[Figure]:
        (judged, stage), chosen = self._chosen(), next(iter(self.best(FULL)), None)
        found = []
        for temperature, least, what in ((GREEDY, 1.12, "greedy"), (SAMPLED, 1.2, "temperature 1, rule rejection")):
            after = self.lengths(judged, stage, TEST, temperature)
            before = self.lengths(BEGUN, "", TEST, temperature)
            spread = (after / before).spread if after and before else None
            found.append(Figure(f"acceptance length - 1, chain of {CHAIN}, {what}: {judged or GIVEN} over {BEGUN}", spread, low=least))
        mine, theirs = self.both(chosen or "", FULL, TEST), self.both(REFERENCE, FULL, TEST)
        spread = (mine / theirs).spread if mine and theirs else None
        found.append(Figure(f"acceptance length - 1, {chosen or 'the chosen cell'} over {REFERENCE}, test prompts", spread, low=1.02))
        speed = self.speed()
        name = f"tokens/s with {self.settings.served}, planner on, {judged or GIVEN} over {BEGUN}"
        found.append(Figure(name, speed.spread if speed else None, low=1.05))
        return found

    def speed(self) -> Estimate | None:
        """Seconds per token with the first draft over those with the distilled one, paired by prompt."""
        names = [name for name in dict.fromkeys(each.draft for each in self.timings) if name != BEGUN]
        if not names:
            return None
        prompts_, repeats = 1 + max(each.prompt for each in self.timings), 1 + max(each.repeat for each in self.timings)
        grids = {name: np.zeros((2 * prompts_, repeats)) for name in (BEGUN, names[0])}
        for each in self.timings:
            grids[each.draft][2 * each.prompt + (each.temperature > 0), each.repeat] = each.seconds / each.tokens
        return quotient(grids[BEGUN], grids[names[0]])

    def tables(self) -> list[Table]:
        found = [
            Table(
                "Figures",
                ("what", "bound", "measured", "verdict"),
                [(each.name, each.bound, each.spread.text(3) if each.spread else "–", each.verdict) for each in self.figures()],
            )
        ]
        for length, half in ((SHORT, VALIDATION), (FULL, VALIDATION), (FULL, TEST)):
            given = [GIVEN] if self.settings.distilled and length == FULL else []
            names = [BEGUN, *given, *self.best(length)]
            rows = [self._row(name, length, half) for name in (names if len(names) > 1 else [])]
            if rows:
                columns = ("draft", "greedy", "temperature 1", "mean over that at the beginning", "α", "greedy agreement")
                found.append(Table(f"{length.capitalize()} runs: acceptance length - 1, {half} prompts", columns, rows))
        return found

    def _row(self, name: str, length: str, half: str) -> tuple[str, ...]:
        stage = "" if name in (BEGUN, GIVEN) else length
        each = [self.lengths(name, stage, half, temperature) for temperature in (GREEDY, SAMPLED)]
        ours, begun = self.both(name, stage, half), self.both(BEGUN, "", half)
        kept = [run for run in self.trained if (run.cell, run.length) == (name, length)]
        shown = [f"{np.mean([getattr(run, what) for run in kept]):.3f}" if kept else "–" for what in ("alpha", "agreement")]
        ratio = (ours / begun).spread.text(3) if ours and begun else "–"
        return (name, *(value.spread.text(3) if value else "–" for value in each), ratio, *shown)

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        settings, best = self.settings, self.best(FULL)
        done = sum(each.length == SHORT for each in self.trained)
        return [
            f"{settings.draft} distilled from {settings.target} on texts of {TEXT} tokens, with prompts of {PROMPT}, from packages that "
            f"both were trained on: short runs of {settings.short:,} tokens, full runs of {settings.full:,} tokens with {settings.seeds} "
            f"seeds, {settings.batch_tokens} tokens a step. {done} of {len(settings.grid)} cells of the grid are there.",
            "Validation and test prompts are windows from held-out packages, each half from packages of its own; "
            f"{settings.judged} prompts × {settings.tokens} tokens, chains of {CHAIN}. Cells are chosen on validation prompts, by "
            "what p and q say rounds would keep of the target's own answers; test prompts are answered in rounds. Intervals "
            "are bootstraps over prompts, shared by all drafts. α and greedy agreement are those of the run's own held-out texts.",
            f"The distilled draft is {settings.distilled}." if settings.distilled else "",
            f"No cell is better than {REFERENCE} on validation prompts." if best and best[0] == REFERENCE else "",
            instrument([settings.served]) if self.timings else "",
        ]


def asdict_without_places(settings: Settings) -> dict[str, Any]:
    return {name: value for name, value in asdict(settings).items() if not Settings.__dataclass_fields__[name].metadata.get("place")}


def read(name: str) -> tuple[str, float]:
    """Loss and λ of a cell's name."""
    loss, _, share = name.partition(", λ = ")
    return loss, float(share)


def outcome(cell: Cell, folder: Path) -> Trained:
    """From the log of the run, at the step that was kept."""
    from foredraft.training.journal import Journal

    lines = [line for line in Journal.read(folder / "run") if "alpha" in line and "alphas" in line]
    kept = max(lines, key=lambda line: line["acceptance_length"])
    return Trained(cell.name, cell.length, cell.seed, kept["step"], kept["alpha"], kept["agreement"])


def expected(
    name: str, length: str, seed: int, half: str, target: PreTrainedModel, draft: PreTrainedModel, judge: DraftHeld
) -> list[Answer]:
    """What rounds would keep of the target's own answers to all prompts."""
    head, found = Draft(DraftConfig(shape_of(target), recipe=Distilling("draft")), draft), []
    for temperature in (GREEDY, SAMPLED):
        forced = judge.forced(target, head, temperature)
        passes = forced.rounds[:, CHAIN - 1].tolist()
        found += [
            Answer(name, length, seed, half, temperature, index, len(chances), passes[index])
            for index, chances in enumerate(forced.chances)
        ]
    return found


def answered(
    name: str, length: str, seed: int, half: str, target: PreTrainedModel, draft: PreTrainedModel, judge: DraftHeld
) -> list[Answer]:
    """All prompts in one batch, greedily and at temperature 1, with chains and rejection sampling."""
    found = []
    for temperature in (GREEDY, SAMPLED):
        how: dict[str, Any] = {"rule": "rejection", "shape": f"chain({CHAIN})", "self_test": False, "execution": "eager"}
        speculator = Speculator(target, DraftModel(draft, siblings="iid"), **how)
        try:
            session = speculator.session(keep_stats=True)
            for index, ids in enumerate(judge.prompts):
                session.add(ids, RowParameters(max_new_tokens=judge.tokens, do_sample=temperature > 0, seed=(seed, index)))
            while session.live:
                session.step()
            rows = session.stats.rows
        finally:
            speculator.close()
        found += [Answer(name, length, seed, half, temperature, index, row.kept, row.passes) for index, row in enumerate(rows)]
    return found


def timed(side: Speculator, ids: Sequence[int], temperature: float, tokens: int, *, seed: int) -> tuple[int, float]:
    """New tokens, and the seconds that they took; sampled from all of the distribution."""
    begin = time.perf_counter()
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    asked = {**sampling, "seed": seed, "repeatable": False, "max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
    out = side.generate(torch.tensor([list(ids)], device=side.model.device), **asked)
    return out.sequences.shape[1] - len(ids), time.perf_counter() - begin
