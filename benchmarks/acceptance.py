"""The acceptance suite: how many tokens a row keeps per target pass, for every rule, on the same prompts and shapes.

Every contender continues every prompt with every seed at temperature 1, without top-k or top-p, all prompts of a seed in one
batch: neither batch nor machine changes what is accepted. A row's end-of-sequence ids are taken away, so that all rows are equally
long. The figure is tokens kept over row-passes, summed over rows, then divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks import prompts
from foredraft import Speculator, verification
from foredraft.drafters.draft_model import DraftModel
from foredraft.errors import ConfigurationError
from foredraft.loading import load_model, load_tokenizer
from foredraft.rows import RowParameters
from foredraft.shapes import TreeShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


@dataclass(frozen=True)
class Settings:
    """What is run. ``trees`` and ``grown`` are shapes, separated by spaces."""

    target: str = "zoo:python-8m"
    draft: str = "zoo:python-1m"
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 2
    prompts: int = 25
    seeds: int = 2
    tokens: int = 64
    chain: str = "chain(5)"
    trees: str = "product(4,2,1) product(2,2,2)"
    grown: str = "dynamic(depth=5,k=4,total=16) opt(total=16,depth=8,delta=0.05)"


@dataclass(frozen=True)
class Contender:
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

    contender: str
    prompt: int
    seed: int
    kept: int
    passes: int
    drafted: int


def contenders(settings: Settings) -> list[Contender]:
    """All that are compared, shape by shape.

    Raises:
        ConfigurationError: a shape that does not read, or that is not of its kind.
    """
    found = []
    for shapes, entrants, fits, kind in (
        (settings.chain, CHAIN, lambda shape: shape.is_chain, "a chain"),
        (settings.trees, TREE, lambda shape: shape.static, "static"),
        (settings.grown, GROWN, lambda shape: not shape.static, "grown by probability"),
    ):
        for shape in shapes.split():
            if not fits(TreeShape.parse(shape)):
                raise ConfigurationError(f"shape {shape} is not {kind}; --chain, --trees and --grown take shapes of one kind each")
            found += [Contender(rule, siblings, shape) for rule, siblings in entrants]
    return found


class Run:
    """One run of the suite; ``advance`` is called after each step of ``steps``."""

    def __init__(self, settings: Settings, advance: Callable[[], None] = lambda: None):
        self.settings, self.advance = settings, advance
        self.contenders = {contender.name: contender for contender in contenders(settings)}
        self.measurements: list[Measurement] = []

    @property
    def steps(self) -> int:
        return len(self.contenders) * self.settings.seeds

    def run(self) -> None:
        """Every contender on every prompt with every seed.

        Raises:
            ConfigurationError: a model that cannot be loaded.
        """
        settings = self.settings
        torch.set_num_threads(settings.threads)
        target, draft = (load_model(name, dtype=settings.dtype, device=settings.device) for name in (settings.target, settings.draft))
        tokenizer = load_tokenizer(settings.target)
        texts = [tokenizer(text)["input_ids"] for text in beginnings(settings.prompts)]
        for contender in self.contenders.values():
            speculator = built(contender, target, draft)
            for seed in range(settings.seeds):
                self.measurements += continued(contender.name, speculator, texts, seed, settings.tokens)
                self.advance()


def beginnings(count: int) -> list[str]:
    """``count`` different beginnings of the benchmarks' files, cut after whole lines; every file has its share."""
    files = [text.splitlines(keepends=True) for text in prompts.PYTHON]
    cuts = -(-count // len(files))
    most = min(map(len, files)) // 2
    if not 1 <= cuts <= most:
        raise ConfigurationError(f"prompts must be from 1 to {most * len(files)}, got {count}")
    chosen = [(files[index % len(files)], index // len(files) + 1) for index in range(count)]
    return ["".join(lines[: len(lines) * part // cuts]) for lines, part in chosen]


def built(contender: Contender, target: PreTrainedModel, draft: PreTrainedModel) -> Speculator:
    drafter = DraftModel(draft, siblings=contender.siblings)
    return Speculator(target, drafter, rule=contender.rule, shape=contender.shape, lossless=contender.lossless)


def continued(name: str, speculator: Speculator, texts: Sequence[Sequence[int]], seed: int, tokens: int) -> list[Measurement]:
    """All ``texts`` in one batch, each with randomness of its own."""
    session = speculator.session()
    for index, text in enumerate(texts):
        session.add(text, RowParameters(max_new_tokens=tokens, do_sample=True, seed=(seed, index)))
    while session.live:
        session.step()
    return [Measurement(name, index, seed, row.kept, row.passes, row.drafted) for index, row in enumerate(session.stats.rows)]
