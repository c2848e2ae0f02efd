"""Ablations: what a part of a drafter or of the planner brings, in tokens per target pass and in tokens per CPU second.

    OMP_NUM_THREADS=1 FOREDRAFT_CACHE=off python -m benchmarks.ablation STUDY... --out FOLDER

What was measured and deleted is in docs/benchmarks/ablation.md.

Every arm of a study decodes the same prompts, in one process and with one thread. The arms take turns prompt by prompt, in an order that
alternates. Time is simulated, so that a busy machine disturbs little: the clock that the whole package reads counts CPU seconds of this
process, but a pass of the target counts as the seconds of ``PASS``, which were measured once, by the nodes that it scores; passes over
prompts count nothing. Intervals are 95% bootstrap intervals over prompts, with the same draws for both arms.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np


class Clock:
    """CPU seconds of this process, less what was skipped, plus what was charged."""

    def __init__(self) -> None:
        self.offset = 0.0

    def __call__(self) -> float:
        return time.process_time() + self.offset

    def charged(self, call: Callable[..., Any], price: Callable[..., float]) -> Callable[..., Any]:
        """``call``, which takes as long as ``price`` says of its arguments, and not as long as it takes."""

        def run(*given: Any, **named: Any) -> Any:
            begin = self()
            done = call(*given, **named)
            self.offset += begin - self() + price(*given, **named)
            return done

        return run


CLOCK = Clock()
time.perf_counter = CLOCK  # before anything binds it

import torch  # noqa: E402

from benchmarks import datasets, suites  # noqa: E402
from benchmarks.drafters_plan import library_files  # noqa: E402
from foredraft import Speculator, drafters, zoo  # noqa: E402
from foredraft.drafters.base import Drafter  # noqa: E402
from foredraft.drafters.copy_strategies import CopyStrategies, OwnText, Source  # noqa: E402
from foredraft.drafters.datastore import Datastore  # noqa: E402
from foredraft.drafters.suffix import Suffix  # noqa: E402
from foredraft.loading import fingerprint  # noqa: E402
from foredraft.planning import AutomaticPlanner  # noqa: E402
from foredraft.tree import TokenTree  # noqa: E402

MORE = (
    "argparse", "difflib", "tempfile", "uuid", "random", "fractions", "pprint", "contextlib", "functools", "dataclasses", "enum",
    "ftplib", "smtplib", "poplib", "imaplib", "mailbox", "netrc", "optparse", "pickle", "plistlib", "shutil", "tarfile", "threading",
    "tokenize", "traceback", "weakref", "zipfile",
)  # fmt: skip
suites.MODULES += MORE  # so many prompts that intervals are narrow
SMALL, LARGE = "zoo:python-8m", "zoo:python-300m"
PASS = {  # nodes: seconds of a pass of python-300m in bfloat16, packed, behind 128 tokens, one thread of an AMD EPYC with AVX-512
    1: 0.0243, 2: 0.0278, 4: 0.0286, 6: 0.0302, 8: 0.0308, 10: 0.0332, 12: 0.0350, 13: 0.0429, 16: 0.0451,
    20: 0.0535, 24: 0.0604, 32: 0.0754, 48: 0.1032, 64: 0.1310, 256: 0.4700,
}  # fmt: skip
DRAWS, BASE = 4000, "as it is"
HEADER = (
    "| suite | prompts | arm | tokens per pass | drafted per pass | ms drafting per pass | "
    "tokens/s of the first arm over it | tokens per pass likewise |"
)


@dataclass(frozen=True)
class Prompt:
    suite: str
    ids: list[int]


@dataclass(frozen=True)
class Outcome:
    """One call of one arm: new tokens after the first, target passes, drafted nodes, virtual seconds and those of drafting."""

    study: str
    arm: str
    suite: str
    prompt: int
    repeat: int
    tokens: int
    passes: int
    drafted: int
    seconds: float
    draft: float
    text: int
    shapes: dict[str, int]


def charge(nodes: float) -> float:
    sizes = sorted(PASS)
    return float(np.interp(nodes, sizes, [PASS[size] for size in sizes]))


def scored(tree: TokenTree, ragged: bool) -> int:
    if tree.valid is not None and tree.chain and ragged:
        return int(tree.valid.sum())
    return tree.rows * tree.nodes


def speculator(model: str, drafter: Drafter | str, **options: Any) -> Speculator:
    """With a target whose passes are charged for and not timed."""
    made = Speculator(model, drafter, dtype="float32" if model == SMALL else "bfloat16", **options)
    target = made.target

    def priced(tree: TokenTree, *_: Any, **__: Any) -> float:
        return charge(scored(tree, target.ragged))

    target.score = CLOCK.charged(target.score, priced)  # type: ignore[method-assign]
    for name in ("prefill", "commit"):
        setattr(target, name, CLOCK.charged(getattr(target, name), lambda *_, **__: 0.0))
    made.model.generation_config.eos_token_id = None
    return made


# -- variants ---------------------------------------------------------------------------------------------------------------


class LongestAlone(CopyStrategies):
    """The longest match alone, which needs no record."""

    def read(self, ids: Sequence[int]) -> None:
        self.automaton.extend(ids[self.automaton.size :])

    def sources(self, least: int) -> list[tuple[Source, float]]:
        longest = OwnText(self.automaton, self.most)
        return [(longest, 1.0)] if longest.length >= least else []


class SuffixOfLongest(Suffix):
    strategies = LongestAlone


def planner_of(made: Speculator) -> AutomaticPlanner:
    assert isinstance(made.planner, AutomaticPlanner)
    return made.planner


def without_grown(made: Speculator) -> Speculator:
    planner_of(made).forecaster.grown = None
    return made


def without_schedule(made: Speculator) -> Speculator:
    forecaster = planner_of(made).forecaster
    forecast = forecaster.forecast
    forecaster.forecast = lambda rows, **named: forecast(rows, **{**named, "together": False})  # type: ignore[method-assign]
    return made


# -- studies ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Study:
    """``arms`` by name; the first one is the package as it is. ``rows`` prompts are decoded together."""

    arms: dict[str, Callable[[], Speculator]]
    rows: int = 1
    suites: tuple[str, ...] = ("embedded", "edit", "completion", "chat")
    tokens: int = 128
    repeats: int = 1
    prompts: int = 24


def store() -> str:
    """The datastore of the drafters' suites."""
    path = Path(tempfile.gettempdir()) / "ablation-rest.store"
    if not path.exists():
        tokenizer = zoo.load_tokenizer(SMALL)
        texts = [tokenizer(file.read_text(encoding="utf-8", errors="replace"), verbose=False)["input_ids"] for file in library_files()]
        Datastore.build(texts, vocab_size=len(tokenizer), fingerprint=fingerprint(tokenizer)).save(path)
    return str(path)


def several_study(model: str, names: Sequence[str], alone: Sequence[str], **more: Any) -> Study:
    arms: dict[str, Callable[[], Speculator]] = {BASE: lambda: speculator(model, drafters.create("several", {"source": list(names)}))}
    for name in alone:
        arms[f"{name.partition(':')[0]} alone"] = partial(speculator, model, name)
    return Study(arms, **more)


def planner_study(model: str, drafter: str, off: Mapping[str, Callable[[Speculator], Speculator]], **more: Any) -> Study:
    arms: dict[str, Callable[[], Speculator]] = {BASE: partial(speculator, model, drafter)}
    for name, change in off.items():
        arms[name] = partial(_changed, change, model, drafter)
    return Study(arms, **more)


def _changed(change: Callable[[Speculator], Speculator], model: str, drafter: str) -> Speculator:
    return change(speculator(model, drafter))


def studies() -> dict[str, Callable[[], Study]]:
    rest, draft = f"rest:{store()}", "draft-model:zoo:python-1m"
    eagle, medusa = f"eagle3:{LARGE}-eagle3", f"medusa:{LARGE}-medusa"
    grown, schedule = {"no grown trees": without_grown}, {"no schedule": without_schedule}
    return {
        "suffix": lambda: Study(
            {
                BASE: lambda: speculator(SMALL, "suffix"),
                "longest match": lambda: speculator(SMALL, SuffixOfLongest()),
                "prompt-lookup": lambda: speculator(SMALL, "prompt-lookup"),
            }
        ),
        "several: suffix, ngram, rest": lambda: several_study(SMALL, ("suffix", "ngram", rest), ("suffix", "ngram")),
        "several: prompt-lookup, draft model": lambda: several_study(SMALL, ("prompt-lookup", draft), ("prompt-lookup", draft)),
        "several: suffix, eagle3": lambda: several_study(LARGE, ("suffix", eagle), ("suffix", eagle), prompts=8),
        "planner: draft model": lambda: planner_study(SMALL, draft, grown),
        "planner: eagle3": lambda: planner_study(LARGE, eagle, grown, prompts=8),
        "planner: medusa": lambda: planner_study(LARGE, medusa, grown, prompts=8),
        "planner: prompt-lookup, 4 rows": lambda: planner_study(SMALL, "prompt-lookup", schedule, rows=4),
    }


def prompts(study: Study) -> Iterator[Prompt]:
    tokenizer = zoo.load_tokenizer(SMALL)
    plain: list[Speculator] = []

    def answer(ids: list[int]) -> list[int]:
        if not plain:
            plain.append(speculator(SMALL, "prompt-lookup"))
        out = plain[0].generate(torch.tensor([ids]), max_new_tokens=study.tokens, pad_token_id=0, do_sample=False)
        return list(out.sequences[0, len(ids) :].tolist())

    with tempfile.TemporaryDirectory() as folder:
        suites.write(Path(folder))
        for suite in study.suites:
            if suite == "embedded":
                whole = [tokenizer(each.turns[0])["input_ids"] for each in datasets.read("embedded")]
                texts = whole + [ids[: len(ids) * part // 10] for part in (7, 5) for ids in whole]
            else:
                found = datasets.read(str(Path(folder) / f"{suite}.jsonl"))
                turns = [list(datasets.conversation(each, tokenizer, answer)) for each in found]
                texts = [each[-1] for each in turns]
            for ids in texts[: study.prompts if suite != "embedded" else max(15, study.prompts)]:
                yield Prompt(suite, list(ids))


def groups(study: Study) -> list[list[Prompt]]:
    """``rows`` prompts of a suite that are decoded together: each prompt with those after it, so that there are as many groups."""
    given = list(prompts(study))
    if study.rows == 1:
        return [[each] for each in given]
    found = []
    for suite in study.suites:
        mine = [each for each in given if each.suite == suite]
        step = max(1, study.rows // 4)
        found += [[mine[(first + other) % len(mine)] for other in range(study.rows)] for first in range(0, len(mine), step)]
    return found


def run(name: str, study: Study) -> Iterator[Outcome]:
    arms = {arm: make() for arm, make in study.arms.items()}
    batches = groups(study)
    torch.set_num_threads(1)
    for made in arms.values():  # measures what the planner wants to know, and warms up
        call(made, batches[0], 16, seed=0)
        made.drafter.forget()
    for repeat in range(study.repeats):
        for number, batch in enumerate(batches):
            order = list(arms.items())
            order = order[number % len(order) :] + order[: number % len(order)]
            for arm, made in order if repeat % 2 == 0 else reversed(order):
                out, seconds = call(made, batch, study.tokens, seed=number)
                stats = out.stats
                yield Outcome(
                    name, arm, batch[0].suite, number, repeat, stats.kept, stats.row_passes, stats.drafted,
                    seconds, stats.seconds["draft"], hash(tuple(out.sequences.flatten().tolist())) % 2**32, stats.shapes,
                )  # fmt: skip
        for made in arms.values():
            made.drafter.forget()


def call(made: Speculator, batch: Sequence[Prompt], tokens: int, *, seed: int) -> tuple[Any, float]:
    """A batch with rows of ``tokens`` new tokens, of which later rows have fewer where there are several."""
    width = max(len(each.ids) for each in batch)
    ids = torch.tensor([[0] * (width - len(each.ids)) + each.ids for each in batch])
    mask = torch.tensor([[0] * (width - len(each.ids)) + [1] * len(each.ids) for each in batch])
    begin = CLOCK()
    out = made.generate(ids, attention_mask=mask, max_new_tokens=tokens, pad_token_id=0, do_sample=False, seed=seed)
    assert out.stats is not None
    return out, CLOCK() - begin - out.stats.seconds.get("planning", 0.0) - out.stats.seconds["prefill"]


# -- figures ----------------------------------------------------------------------------------------------------------------


def quotient(base: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]], draws: np.ndarray) -> tuple[float, float, float]:
    """Of (tokens, cost) per prompt: ``base``'s tokens per cost over ``other``'s, with its interval."""
    a, b = np.array(base), np.array(other)

    def of(index: np.ndarray) -> np.ndarray:
        x, y = a[index].sum(-2), b[index].sum(-2)
        return (x[..., 0] / x[..., 1]) / (y[..., 0] / y[..., 1])

    low, high = np.percentile(of(draws), [2.5, 97.5])
    return float(of(np.arange(len(a)))), float(low), float(high)


def report(outcomes: Sequence[Outcome]) -> str:
    lines = []
    for study in dict.fromkeys(each.study for each in outcomes):
        mine = [each for each in outcomes if each.study == study]
        arms = [BASE, *dict.fromkeys(each.arm for each in mine if each.arm != BASE)]
        lines += [f"### {study}", ""]
        lines += [HEADER]
        lines += ["| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |"]
        for suite in (*dict.fromkeys(each.suite for each in mine), "all"):
            of = {arm: per_prompt([each for each in mine if each.arm == arm and suite in (each.suite, "all")]) for arm in arms}
            count = len(of[BASE])
            draws = np.random.default_rng(0).integers(0, count, (DRAWS, count))
            for arm in arms:
                rows = of[arm]
                tokens, passes, drafted, draft = (
                    sum(getattr(each, what) for each in rows) for what in ("tokens", "passes", "drafted", "draft")
                )
                text = f"| {suite} | {count} | {arm} | {tokens / passes:.2f} | {drafted / passes:.2f} | {1e3 * draft / passes:.2f} |"
                if arm != BASE:
                    for what in ("seconds", "passes"):
                        value, low, high = quotient(
                            [(e.tokens, getattr(e, what)) for e in of[BASE]], [(e.tokens, getattr(e, what)) for e in rows], draws
                        )
                        text += f" {value:.3f} ({low:.3f}–{high:.3f}) |"
                else:
                    text += " | |"
                lines.append(text)
        different = sum(len({each.text for each in mine if each.prompt == prompt}) > 1 for prompt in {each.prompt for each in mine})
        lines += ["", f"Prompts whose text is not the same in all arms: {different}.", ""]
    return "\n".join(lines)


def per_prompt(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Repeats as one: the sum of tokens and passes, the median of seconds times their number."""
    found = []
    for prompt in sorted({each.prompt for each in outcomes}):
        mine = [each for each in outcomes if each.prompt == prompt]
        sums = {what: sum(getattr(each, what) for each in mine) for what in ("tokens", "passes", "drafted")}
        times = {what: len(mine) * median(getattr(each, what) for each in mine) for what in ("seconds", "draft")}
        found.append(Outcome(**{**asdict(mine[0]), **sums, **times}))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("studies", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("ablation"))
    parser.add_argument("--beginnings", type=int, help="prompts per study")
    parser.add_argument("--suites", nargs="*")
    given = parser.parse_args()
    known = studies()
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.studies or known:
        study = known[name]()
        if given.beginnings:
            study = replace(study, prompts=given.beginnings)
        if given.suites:
            study = replace(study, suites=tuple(given.suites))
        outcomes = []
        for outcome in run(name, study):
            outcomes.append(outcome)
        slug = "".join(each if each.isalnum() else "-" for each in name)
        (given.out / f"{slug}.json.gz").write_bytes(gzip.compress(json.dumps([asdict(each) for each in outcomes]).encode(), mtime=0))
        print(report(outcomes), flush=True)


if __name__ == "__main__":
    main()
