"""Ablations: what a part of a drafter or of the planner brings, in tokens per target pass and in tokens per CPU second.

    OMP_NUM_THREADS=1 FOREDRAFT_CACHE=off python -m benchmarks.ablation STUDY... --out FOLDER

Every arm of a study decodes the same prompts, in one process and with one thread. The arms take turns prompt by prompt, in an order that
alternates. Time is simulated, so that a busy machine disturbs little: the clock that the whole package reads counts CPU seconds of this
process, but a pass of the target counts as the seconds of ``PASS``, which were measured once, by the nodes that it scores; passes over
prompts count nothing. Intervals are 95% bootstrap intervals over prompts, with the same draws for both arms.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
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

from foredraft import Speculator, drafters, zoo  # noqa: E402
from foredraft.bench import datasets, suites  # noqa: E402
from foredraft.bench.drafters import library_files  # noqa: E402
from foredraft.drafters.base import Drafter, DraftRequest, Feedback, Row  # noqa: E402
from foredraft.drafters.datastore import Datastore  # noqa: E402
from foredraft.drafters.merging import assembled, heard_by, lines_of, merge_row, places  # noqa: E402
from foredraft.drafters.several import Several, _paths  # noqa: E402
from foredraft.drafters.suffix import Suffix  # noqa: E402
from foredraft.drafters.suffix_experts import LONGEST, SAME, SHORT, Experts, OwnText  # noqa: E402
from foredraft.loading import fingerprint  # noqa: E402
from foredraft.planning.costs import runs_a_model  # noqa: E402
from foredraft.shapes import DynamicShape, TreeShape  # noqa: E402
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
DRAWS = 4000


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


# -- variants that are not in the package -----------------------------------------------------------------------------------


class Ordered(Several):
    """``several`` without anything learned: the members in order, those that run no model first. ``first`` takes of each row the first
    proposal alone; otherwise all host drafters are asked, and later nodes fill what room the earlier ones leave. A model is asked
    where some row has no proposal."""

    first, lazy = True, False

    def draft(self, request: DraftRequest) -> TokenTree:
        self.expected, self._drafted = None, None
        budget = self.nodes or request.shape.nodes
        asked, empty = [], set(range(len(request.rows)))
        self._parts: dict[int, tuple[TokenTree, list[list[int]]]] = {}
        for member in sorted(self.members, key=lambda each: runs_a_model(each.drafter)):
            if empty or (member.drafter.filler if self.lazy else member.steady) or not (member.costly or self.first):
                begin = self._simple(member, request)
                tree = self._ask(member, begin).tree
                lines = lines_of(tree)
                asked.append((member, tree, lines))
                empty -= {row for row in empty if lines[row].children[0]}
        trees = [tree for _, tree, _ in asked]
        rows = []
        for row, limit in enumerate(request.limits):
            lines = [each[row] for _, _, each in asked]
            kept = [max((i for i, line in enumerate(lines) if line.children[0]), default=0, key=lambda i: -i)] if self.first else None
            rows.append(in_order(lines, budget=budget, depth=limit, kept=kept, branches=not self._chains_only))
        tree = assembled(rows, trees, request.device)
        for (member, own, _), went in zip(asked, places(rows, trees, tree.nodes)):
            self._parts[id(member)] = own, went
        if len(asked) == 1:
            self.expected = asked[0][0].drafter.expected
        return tree

    @staticmethod
    def _simple(member: Any, request: DraftRequest) -> DraftRequest:
        from dataclasses import replace

        if isinstance(request.shape, DynamicShape) and not member.drafter.grows:
            return replace(request, shape=TreeShape.chain(request.depth))
        return request

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        from dataclasses import replace

        parts, self._parts = getattr(self, "_parts", {}), {}
        paths = _paths(feedback)
        for member in self.members:
            told = self._whole_of(member, feedback)
            drafter = member.drafter
            if not (drafter.hears or drafter.wants_logits) or drafter.features or (len(self.members) == 1 and not parts):
                drafter.observe(rows, told)
            elif id(member) in parts:
                own, went = parts[id(member)]
                drafter.observe(rows, heard_by(own, went, told, paths))
            else:
                logits = None if told.logits is None else told.logits[:, :1]
                drafter.observe(rows, replace(told, tree=TokenTree.root(feedback.tree.tokens[:, 0]), accepted=[0] * len(rows), path=None, logits=logits))  # noqa: E501


def in_order(lines: Sequence[Any], *, budget: int, depth: int, kept: Sequence[int] | None, branches: bool) -> Any:
    from foredraft.drafters.merging import Merged

    merged = Merged([lines[0].tokens[0]], went=[{0: 0} for _ in lines])
    below: dict[tuple[int, int], int] = {}
    depths = [0]
    for member, line in enumerate(lines):
        if kept is not None and member not in kept:
            continue
        queue = [(0, child) for child in line.children[0]]
        while queue:
            parent, node = queue.pop(0)
            key = parent, line.tokens[node]
            place = below.get(key)
            if place is None:
                if len(merged.tokens) > budget or depths[parent] >= depth or (not branches and any(above == parent for above in merged.parents)):
                    continue
                place = below[key] = len(merged.tokens)
                merged.tokens.append(line.tokens[node])
                merged.parents.append(parent)
                merged.weights.append(0.0)
                depths.append(depths[parent] + 1)
            merged.went[member][node] = place
            queue += [(place, child) for child in line.children[node]]
    return merged


class OrderedMerge(Ordered):
    first = False


class Lazy(Ordered):
    """Heads too are asked only where some row has no proposal: what ``several`` became."""

    lazy = True


class LongestMatch(Ordered):
    """Of each row the proposal with the longest match, in the order of the members where they are equal. Nobody else is asked where all
    rows have matches of ``firm`` tokens, and no model where all have matches of ``enough``."""

    firm, enough = 8, 4

    def draft(self, request: DraftRequest) -> TokenTree:
        self.expected, self._drafted = None, None
        self._parts = {}
        asked: list[Any] = []
        best = [(-1, 0)] * len(request.rows)
        for member in sorted(self.members, key=lambda each: each.costly):
            enough = self.enough if runs_a_model(member.drafter) else self.firm
            if asked and not (member.steady and not runs_a_model(member.drafter)) and min(best)[0] >= enough:
                continue
            part = self._ask(member, self._simple(member, request))
            lines = lines_of(part.tree)
            matched = [self.enough] * len(lines) if runs_a_model(member.drafter) else part.matched
            for row, line in enumerate(lines):
                worth = matched[row] if line.children[0] else -1
                if worth > best[row][0]:
                    best[row] = worth, len(asked)
            asked.append((member, part.tree, lines))
        budget, trees = self.nodes or request.shape.nodes, [tree for _, tree, _ in asked]
        rows = [
            in_order([each[row] for _, _, each in asked], budget=budget, depth=limit, kept=[best[row][1]], branches=not self._chains_only)
            for row, limit in enumerate(request.limits)
        ]
        tree = assembled(rows, trees, request.device)
        for (member, own, _), went in zip(asked, places(rows, trees, tree.nodes)):
            self._parts[id(member)] = own, went
        if len(asked) == 1:
            self.expected = asked[0][0].drafter.expected
        return tree


class Ways(Experts):
    """The ways to copy ``ways`` alone; without any others nothing is judged."""

    ways = (LONGEST, SHORT, SAME)

    def read(self, ids: Sequence[int]) -> None:
        if len(self.ways) > 1:
            super().read(ids)
        else:
            self.automaton.extend(ids[self.automaton.size :])

    def sources(self, ids: Sequence[int], least: int) -> Any:
        if len(self.ways) == 1:
            only = {"first": self.short, "recent": 4.0} if self.ways == (SHORT,) else {}
            longest = OwnText(self.automaton, self.most, **only)
            return [(longest, 1.0)] if longest.length >= least else []
        if SAME not in self.ways:
            self.source = None
        if SHORT not in self.ways:
            self.right[SHORT] = -1.0
            found = super().sources(ids, least)
            return [each for each in found if not (isinstance(each[0], OwnText) and each[0].recent == 4.0)]
        return super().sources(ids, least)


class SuffixBy(Suffix):
    def __init__(self, *ways: int, **options: Any):
        super().__init__(**options)
        self.made = type("Made", (Ways,), {"ways": ways})

    def _read(self, row: Row) -> Experts:
        text = self._texts.get(row.slot)
        if text is None:
            text = self._texts[row.slot] = self.made(self.max_match, self.short_match, self.memory)
        text.read(row.ids)
        return text


def without_grown(made: Speculator) -> Speculator:
    made.planner.forecaster.grown = None
    return made


def without_schedule(made: Speculator) -> Speculator:
    forecast = made.planner.forecaster.forecast
    made.planner.forecaster.forecast = lambda rows, **named: forecast(rows, **{**named, "together": False})
    return made


def without_looks(made: Speculator) -> Speculator:
    made.planner._deeper = lambda forecast: forecast.best.shape
    return made


def without_tries(made: Speculator) -> Speculator:
    from foredraft.planning import planner, search

    made.planner._pause = 10**9
    del planner, search
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


def members(*names: str) -> list[Drafter]:
    return [drafters.create(name, {}) for name in names]


def several_study(model: str, names: Sequence[str], alone: Sequence[str], **more: Any) -> Study:
    arms: dict[str, Callable[[], Speculator]] = {
        "learned": lambda: speculator(model, Several(members(*names))),
        "always": lambda: speculator(model, Several(members(*names), ask="always")),
        "first": lambda: speculator(model, Ordered(members(*names))),
        "ordered merge": lambda: speculator(model, OrderedMerge(members(*names))),
        "longest match": lambda: speculator(model, LongestMatch(members(*names))),
    }
    for name in alone:
        arms[f"{name.partition(':')[0]} alone"] = lambda name=name: speculator(model, drafters.create(name, {}))
    return Study(arms, **more)


def planner_study(model: str, drafter: str, off: dict[str, Callable[[Speculator], Speculator]], **more: Any) -> Study:
    arms: dict[str, Callable[[], Speculator]] = {"auto": lambda: speculator(model, drafters.create(drafter, {}))}
    for name, change in off.items():
        arms[name] = lambda change=change: change(speculator(model, drafters.create(drafter, {})))
    return Study(arms, **more)


def studies() -> dict[str, Callable[[], Study]]:
    rest, draft = f"rest:{store()}", "draft-model:zoo:python-1m"
    eagle, medusa = f"eagle3:{LARGE}-eagle3", f"medusa:{LARGE}-medusa"
    looks = {"no looks": without_looks}
    both = {"no grown trees": without_grown, **looks}
    fixed = {"shape": "chain(10)"}
    every = (LONGEST, SHORT, SAME)
    return {
        "suffix, chain(10)": lambda: Study(
            {
                "all ways": lambda: speculator(SMALL, SuffixBy(*every), **fixed),
                "longest": lambda: speculator(SMALL, SuffixBy(LONGEST), **fixed),
                "short": lambda: speculator(SMALL, SuffixBy(SHORT), **fixed),
                "longest, short": lambda: speculator(SMALL, SuffixBy(LONGEST, SHORT), **fixed),
                "longest, same": lambda: speculator(SMALL, SuffixBy(LONGEST, SAME), **fixed),
                "prompt-lookup": lambda: speculator(SMALL, "prompt-lookup", **fixed),
            }
        ),
        "suffix, auto": lambda: Study(
            {
                "all ways": lambda: speculator(SMALL, SuffixBy(*every)),
                "longest": lambda: speculator(SMALL, SuffixBy(LONGEST)),
                "short": lambda: speculator(SMALL, SuffixBy(SHORT)),
                "longest, short": lambda: speculator(SMALL, SuffixBy(LONGEST, SHORT)),
                "longest, same": lambda: speculator(SMALL, SuffixBy(LONGEST, SAME)),
                "prompt-lookup": lambda: speculator(SMALL, "prompt-lookup"),
            }
        ),
        "several: suffix, ngram, rest": lambda: several_study(SMALL, ("suffix", "ngram", rest), ("suffix", "ngram")),
        "several: prompt-lookup, ngram": lambda: several_study(SMALL, ("prompt-lookup", "ngram"), ("prompt-lookup", "ngram")),
        "several: prompt-lookup, draft model": lambda: several_study(SMALL, ("prompt-lookup", draft), ("prompt-lookup", draft)),
        "several: suffix, eagle3": lambda: several_study(LARGE, ("suffix", eagle), ("suffix", eagle), prompts=8),
        "several: suffix, eagle3, heads where needed": lambda: Study(
            {
                "learned": lambda: speculator(LARGE, Several(members("suffix", eagle))),
                "first": lambda: speculator(LARGE, Lazy(members("suffix", eagle))),
            },
            prompts=8,
        ),
        "several: suffix, ngram, rest; 4 rows": lambda: several_study(SMALL, ("suffix", "ngram", rest), ("suffix", "ngram"), rows=4),
        "planner: draft model": lambda: planner_study(SMALL, draft, both),
        "planner: prompt-lookup": lambda: planner_study(SMALL, "prompt-lookup", looks),
        "planner: suffix": lambda: planner_study(SMALL, "suffix", looks),
        "planner: eagle3": lambda: planner_study(LARGE, eagle, both, prompts=8),
        "planner: medusa": lambda: planner_study(LARGE, medusa, both, prompts=8),
        "planner: prompt-lookup, 4 rows": lambda: planner_study(SMALL, "prompt-lookup", {"no schedule": without_schedule}, rows=4),
        "planner: draft model, 4 rows": lambda: planner_study(SMALL, draft, {"no schedule": without_schedule}, rows=4),
        "planner: prompt-lookup, 16 rows": lambda: planner_study(SMALL, "prompt-lookup", {"no schedule": without_schedule}, rows=16),
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
    for arm in arms.values():  # measures what the planner wants to know, and warms up
        call(arm, batches[0], 16, seed=0)
        arm.drafter.forget()
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
        arms = list(dict.fromkeys(each.arm for each in sorted(mine, key=lambda e: (e.prompt, e.repeat))))
        lines += [f"### {study}", ""]
        lines += ["| suite | prompts | arm | tokens per pass | drafted per pass | ms drafting per pass | tokens/s of the first arm over it | tokens per pass likewise |"]  # noqa: E501
        lines += ["| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |"]
        base = studies_base(study, arms)
        for suite in (*dict.fromkeys(each.suite for each in mine), "all"):
            of = {arm: per_prompt([each for each in mine if each.arm == arm and suite in (each.suite, "all")]) for arm in arms}
            count = len(of[base])
            draws = np.random.default_rng(0).integers(0, count, (DRAWS, count))
            for arm in [base, *(each for each in arms if each != base)]:
                rows = of[arm]
                tokens, passes, drafted, draft = (sum(getattr(each, what) for each in rows) for what in ("tokens", "passes", "drafted", "draft"))  # noqa: E501
                text = f"| {suite} | {count} | {arm} | {tokens / passes:.2f} | {drafted / passes:.2f} | {1e3 * draft / passes:.2f} |"
                if arm != base:
                    for what in ("seconds", "passes"):
                        value, low, high = quotient([(e.tokens, getattr(e, what)) for e in of[base]], [(e.tokens, getattr(e, what)) for e in rows], draws)  # noqa: E501
                        text += f" {value:.3f} ({low:.3f}–{high:.3f}) |"
                else:
                    text += " | |"
                lines.append(text)
        different = sum(len({each.text for each in mine if each.prompt == prompt}) > 1 for prompt in {each.prompt for each in mine})
        lines += ["", f"Prompts whose text is not the same in all arms: {different}.", ""]
    return "\n".join(lines)


def studies_base(study: str, arms: Sequence[str]) -> str:
    return next(arm for arm in ("all ways", "learned", "auto") if arm in arms)


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
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--suites", nargs="*")
    given = parser.parse_args()
    known = studies()
    given.out.mkdir(parents=True, exist_ok=True)
    random.seed(0)
    for name in given.studies or known:
        from dataclasses import replace

        study = known[name]()
        if given.prompts:
            study = replace(study, prompts=given.prompts)
        if given.suites:
            study = replace(study, suites=tuple(given.suites))
        outcomes = []
        for outcome in run(name, study):
            outcomes.append(outcome)
        slug = "".join(each if each.isalnum() else "-" for each in name)
        (given.out / f"{slug}.json.gz").write_bytes(gzip.compress(json.dumps([asdict(each) for each in outcomes]).encode(), mtime=0))
        print(report(outcomes), flush=True)


if __name__ == "__main__":
    sys.exit(main())
