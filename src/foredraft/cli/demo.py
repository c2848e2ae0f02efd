"""``foredraft demo``: plain and speculative decoding of the same prompts, side by side in one run.

The ways take turns, after a warm-up, and count by their medians. Their texts are compared token for token: greedy decoding
has one answer, up to ties that rounding decides, so a difference is either explained by the logits or an error.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foredraft import zoo
from foredraft.cli.failures import quiet
from foredraft.cli.generation import load_speculator, make_drafter
from foredraft.cli.settings import Contest
from foredraft.loading import load_tokenizer
from foredraft.speculator import Speculator
from foredraft.stats import Stats

PLAIN = "none"
WARM_UP = 8  # tokens
ROUNDING = 8  # units in the last place by which rounding may move two logits past each other


@dataclass(frozen=True)
class Setting(Contest):
    """The options of the same names."""

    target: str = "zoo:python-300m"
    dtype: str = "bfloat16"
    max_new_tokens: int = 40
    repeats: int = 3


@dataclass(frozen=True)
class Run:
    tokens: list[int]
    stats: Stats


@dataclass(frozen=True)
class Difference:
    """Where a way's text leaves the plain one: the ``position``-th new token, at which the two tokens' logits are ``gap`` apart.

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

    def seconds(self, way: str) -> float:
        return statistics.median(run.stats.seconds["total"] for run in self.runs[way])

    def stats(self, way: str) -> Stats:
        """Its counts; they are the same in every run."""
        return self.runs[way][0].stats


class Demo:
    """Loads the target once and makes a Speculator for each drafter."""

    def __init__(self, setting: Setting):
        quiet()
        self.setting, self.prompts = setting, zoo.prompts("demo")
        self.tokenizer = load_tokenizer(setting.target)
        drafters = {way: make_drafter(way, {}, self.tokenizer) for way in setting.names if way != PLAIN}
        # Every run reads its prompt afresh: a cache kept from the run before would flatter whoever comes second.
        plain = load_speculator(setting.plain, self.tokenizer, reuse_prefix=False)
        self.model = plain.model
        self.speculators = {PLAIN: plain}  # the others take its model as it laid the weights out
        for way, drafter in drafters.items():
            self.speculators[way] = Speculator(self.model, drafter, execution="eager", reuse_prefix=False)

    def compare(self) -> Iterator[Comparison]:
        """One comparison after another; the ways take turns within each."""
        for way in self.speculators:
            self._generate(way, self.prompts[0], max_new_tokens=WARM_UP)
        for prompt in self.prompts:
            runs: dict[str, list[Run]] = {way: [] for way in self.speculators}
            for _ in range(self.setting.repeats):
                for way, done in runs.items():
                    done.append(self._run(way, prompt))
            text = self.tokenizer.decode(runs[PLAIN][0].tokens, skip_special_tokens=True)
            yield Comparison(prompt, text, runs, list(self._differences(prompt, runs)))

    def _run(self, way: str, prompt: str) -> Run:
        output = self._generate(way, prompt, max_new_tokens=self.setting.max_new_tokens)
        return Run(output.sequences[0, len(self._encode(prompt)) :].tolist(), output.stats)

    def _differences(self, prompt: str, runs: dict[str, list[Run]]) -> Iterator[Difference]:
        expected = runs[PLAIN][0].tokens
        for way in runs:
            other = next((run.tokens for run in runs[way] if run.tokens != expected), None)
            if other is not None:
                yield self._difference(way, prompt, expected, other)

    def _difference(self, way: str, prompt: str, expected: Sequence[int], other: Sequence[int]) -> Difference:
        position = next((index for index, pair in enumerate(zip(expected, other)) if pair[0] != pair[1]), None)
        if position is None:  # one text goes on where the other ends: no tie can do that
            return Difference(way, min(len(expected), len(other)), math.inf, 0.0)
        output = self._generate(PLAIN, prompt, max_new_tokens=position + 1, output_logits=True)
        logits = output.logits[position][0].float()
        best, second = float(logits[expected[position]]), float(logits[other[position]])
        unit = torch.finfo(self.model.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(best), 1e-9)))
        return Difference(way, position, best - second, unit)

    def _generate(self, way: str, prompt: str, **options: Any) -> Any:
        speculator = self.speculators[way]
        ids = torch.tensor([self._encode(prompt)], device=speculator.target.device)
        return speculator.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)

    def _encode(self, prompt: str) -> list[int]:
        return list(self.tokenizer(prompt)["input_ids"])
