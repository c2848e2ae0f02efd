"""The acceptance suite: how many tokens a row keeps per target pass, for every rule, on the same prompts and shapes.

Every method continues every prompt with every seed at temperature 1, without top-k or top-p, all prompts of a seed in one batch: neither
batch nor machine changes what is accepted. A row's end-of-sequence ids are taken away, so that all rows are equally long. The figure is
tokens kept over row-passes, summed over rows, then divided.

Intervals are percentile bootstraps over prompts: prompts are drawn with replacement, each with all of its seeds, because texts from one
prompt are alike. All methods share the draws, so that a difference of two is paired by prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import prompts
from benchmarks.figures import Figure
from benchmarks.report import Table
from benchmarks.suite import PairSettings, Suite, option
from foredraft import Speculator, verification
from foredraft.drafters.draft_model import DraftModel
from foredraft.errors import ConfigurationError
from foredraft.estimates import LEVEL, Spread
from foredraft.rows import RowParameters
from foredraft.shapes import TreeShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RESAMPLES = 10_000
CHAIN = (("rejection", "iid"), ("block", "iid"), ("match", "keyed"), ("match", "top-k"), ("match", "iid"))
TREE = (
    ("multi-candidate", "iid"),
    ("multi-candidate", "without-replacement"),
    ("k-seq", "iid"),
    ("traversal", "iid"),
    ("traversal", "without-replacement"),
    ("match", "keyed"),
    ("match", "top-k"),
    ("typical", "top-k"),
)
GROWN = (("match", "keyed"), ("match", "top-k"))
"""Rules with the ways of choosing siblings that they are compared on: on chains, on static trees, on trees grown by probability."""
COMPARED = (("iid", "block", "rejection"), ("without-replacement", "traversal", "multi-candidate"), ("iid", "traversal", "multi-candidate"))
"""Siblings, and the rule that must accept at least as much as the other on the same shape."""


@dataclass(frozen=True)
class Settings(PairSettings):
    target: str = option("zoo:python-8m", "A path, a hub id or zoo:NAME.")
    dtype: str = option("float32", "bfloat16, float32 or float16.")
    prompts: int = option(25, "Beginnings of files, all in one batch.", least=1, flag="--beginnings")
    seeds: int = option(2, "Continuations of each prompt.", least=1)
    tokens: int = option(64, "New tokens per continuation.", least=2)
    chain: str = option("chain(5)", "Chains, separated by spaces.")
    trees: str = option("product(4,2,1) product(2,2,2)", "Static trees, separated by spaces.")
    grown: str = option(
        "dynamic(depth=5,k=4,total=16) opt(total=16,depth=8,delta=0.05)", "Trees grown by probability, separated by spaces."
    )


@dataclass(frozen=True)
class Method:
    """A rule, how siblings are chosen, and the shape."""

    rule: str
    siblings: str
    shape: str

    @property
    def name(self) -> str:
        return f"{self.rule}, {self.siblings}, {self.shape}"

    @property
    def nodes(self) -> int:
        return TreeShape.parse(self.shape).nodes

    @property
    def lossless(self) -> bool:
        return verification.create(self.rule).lossless


@dataclass(frozen=True)
class Measurement:
    """One row: tokens ``kept`` out of ``passes``, and how many tokens were ``drafted`` for it."""

    method: str
    prompt: int
    seed: int
    kept: int
    passes: int
    drafted: int


def methods(settings: Settings) -> list[Method]:
    """All that are compared, shape by shape.

    Raises:
        ConfigurationError: a shape that does not read, or that is not of its kind.
    """
    found = []
    for shapes, rules, fits, kind in (
        (settings.chain, CHAIN, lambda shape: shape.is_chain, "a chain"),
        (settings.trees, TREE, lambda shape: shape.static, "static"),
        (settings.grown, GROWN, lambda shape: not shape.static, "grown by probability"),
    ):
        for shape in shapes.split():
            if not fits(TreeShape.parse(shape)):
                raise ConfigurationError(f"shape {shape} is not {kind}; --chain, --trees and --grown take shapes of one kind each")
            found += [Method(rule, siblings, shape) for rule, siblings in rules]
    return found


class Acceptance(Suite[Settings]):
    """Tokens kept per target pass under every rule at temperature 1, with confidence intervals."""

    name = "acceptance"
    title = "Acceptance length of every rule"
    settings_type = Settings
    measurements: list[Measurement]

    def __init__(self, settings: Settings, advance: Callable[[], None] = lambda: None):
        super().__init__(settings, advance)
        self.methods = {each.name: each for each in methods(settings)}

    @property
    def steps(self) -> int:
        return len(self.methods) * self.settings.seeds

    def run(self) -> None:
        settings = self.settings
        torch.set_num_threads(settings.threads)
        target, draft, tokenizer = settings.load()
        texts = [tokenizer(text)["input_ids"] for text in beginnings(settings.prompts)]
        for method in self.methods.values():
            speculator = built(method, target, draft)
            for seed in range(settings.seeds):
                self.measurements += continued(method.name, speculator, texts, seed, settings.tokens)
                self.advance()

    # -- what is reported -----------------------------------------------------------------------------------------------

    def figures(self) -> list[Figure]:
        """The stronger rule keeps at least as many tokens; a shortfall inside the interval is noise."""
        lengths, found = Lengths(self), []
        for siblings, stronger, weaker in COMPARED:
            for shape in dict.fromkeys(each.shape for each in self.methods.values()):
                name, other = (Method(rule, siblings, shape).name for rule in (stronger, weaker))
                if name in self.methods and other in self.methods:
                    what = f"{stronger} − {weaker}, {siblings}, {shape}"
                    found.append(Figure(what, lengths.difference(name, other), low=0.0, noise=True))
        return found

    def tables(self) -> list[Table]:
        lengths, rows = Lengths(self), []
        for name, each in self.methods.items():
            mine = [one for one in self.measurements if one.method == name]
            passes, drafted = sum(one.passes for one in mine), sum(one.drafted for one in mine)
            spread = lengths.of(name)
            cells = (f"{spread.median:.3f}", f"{spread.low:.3f}–{spread.high:.3f}", f"{drafted / passes:.1f}", str(passes))
            rows.append((each.rule, each.siblings, each.shape, "yes" if each.lossless else "LOSSY", *cells))
        figures = [
            (each.name, "≥ 0", f"{each.spread.median:+.3f}", f"{each.spread.low:+.3f} to {each.spread.high:+.3f}", each.verdict)
            for each in self.figures()
            if each.spread is not None
        ]
        columns = ("rule", "siblings", "shape", "lossless", "acceptance length", "95 % interval", "drafted per pass", "row-passes")
        return [
            Table("Differences", ("paired by prompt", "bound", "measured", "95 % interval", "verdict"), figures),
            Table("Rules", columns, rows),
        ]

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        settings = self.settings
        return [
            f"Target {settings.target}, draft {settings.draft}, {settings.dtype}; temperature 1, no top-k or top-p; {settings.prompts} "
            f"prompts (beginnings of files that the models have not seen) × {settings.seeds} seeds × {settings.tokens} tokens for every "
            "method. Acceptance length is tokens kept over row-passes, the bonus token counted and the prefill left out; the last "
            "passes of a row, which may draft less, are in it.",
            f"Intervals are {LEVEL:.0%} percentile bootstraps over prompts, each drawn with all of its seeds, {RESAMPLES:,} draws that all "
            "methods share, so that differences are paired by prompt. With the match rule a seed's text is the same whatever was "
            "drafted; with the others it is not.",
            "LOSSY: the rule changes the law of the text. It is not comparable with the others and is listed to show what it buys.",
        ]


class Lengths:
    """Acceptance lengths of a run's methods, over all rows and over every draw of the bootstrap."""

    def __init__(self, run: Acceptance):
        names = list(run.methods)
        counts = np.zeros((2, len(names), run.settings.prompts))  # tokens kept and row-passes
        for each in run.measurements:
            counts[:, names.index(each.method), each.prompt] += each.kept, each.passes
        kept, passes = counts
        drawn = np.random.default_rng(0).multinomial(run.settings.prompts, [1 / run.settings.prompts] * run.settings.prompts, RESAMPLES)
        self.whole = dict(zip(names, kept.sum(1) / passes.sum(1)))
        self.drawn: dict[str, NDArray[np.float64]] = dict(zip(names, (kept @ drawn.T) / (passes @ drawn.T)))

    def of(self, name: str) -> Spread:
        return Spread.interval(self.whole[name], self.drawn[name])

    def difference(self, name: str, other: str) -> Spread:
        """``name`` − ``other``, paired by prompt."""
        return Spread.interval(self.whole[name] - self.whole[other], self.drawn[name] - self.drawn[other])


def beginnings(count: int) -> list[str]:
    """``count`` different beginnings of the benchmarks' files, cut after whole lines; every file has its share."""
    files = [text.splitlines(keepends=True) for text in prompts.PYTHON]
    cuts = -(-count // len(files))
    most = min(map(len, files)) // 2
    if not 1 <= cuts <= most:
        raise ConfigurationError(f"prompts must be from 1 to {most * len(files)}, got {count}")
    chosen = [(files[index % len(files)], index // len(files) + 1) for index in range(count)]
    return ["".join(lines[: len(lines) * part // cuts]) for lines, part in chosen]


def built(method: Method, target: PreTrainedModel, draft: PreTrainedModel) -> Speculator:
    drafter = DraftModel(draft, siblings=method.siblings)
    return Speculator(target, drafter, rule=method.rule, shape=method.shape, lossless=method.lossless)


def continued(name: str, speculator: Speculator, texts: Sequence[Sequence[int]], seed: int, tokens: int) -> list[Measurement]:
    """All ``texts`` in one batch, each with randomness of its own."""
    session = speculator.session(keep_stats=True)
    for index, text in enumerate(texts):
        session.add(text, RowParameters(max_new_tokens=tokens, do_sample=True, seed=(seed, index)))
    while session.live:
        session.step()
    return [Measurement(name, index, seed, row.kept, row.passes, row.drafted) for index, row in enumerate(session.stats.rows)]
