"""Acceptance length by simulation: drafters against texts that are known beforehand, in the one loop that decodes.

Plain decoding makes the texts, once. Then every drafter goes through them with a target that says nothing but what comes next in the
text it is in, so that as many tokens are accepted as greedy decoding of that target accepts. Nothing is timed, and nothing depends on the
machine. Drafters that read the target's logits are not for this: there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks import datasets
from benchmarks.drafters_plan import PROMPT_LOOKUP as LOOKUP
from benchmarks.drafters_plan import SEVERAL, with_store
from foredraft import Speculator, drafters
from foredraft.choices import choose_rule
from foredraft.loading import load_tokenizer
from foredraft.planning import FixedPlanner
from foredraft.rows import RowParameters
from foredraft.session import Session
from foredraft.shapes import TreeShape
from foredraft.testing import ProbabilityTable, TableTarget

if TYPE_CHECKING:
    from benchmarks.datasets import Prompt
    from benchmarks.drafters_plan import Settings
    from foredraft.drafters.base import Drafter

LEARN_FROM_LOGITS = ("token-recycling", "lookahead")


@dataclass(frozen=True)
class Kept:
    """One text: tokens ``kept`` out of ``passes`` over chains of ``length`` drafted tokens at most, ``drafted`` in all.

    Attributes:
        drafter, setting: who drafted; the setting is empty for the drafter's own defaults.
    """

    suite: str
    prompt: int
    drafter: str
    setting: str
    length: int
    kept: int
    passes: int
    drafted: int

    @property
    def name(self) -> str:
        return f"{self.drafter}, {self.setting}" if self.setting else self.drafter


@dataclass(frozen=True)
class Setting:
    """A drafter in one of its settings."""

    drafter: str
    setting: str = ""
    options: tuple[tuple[str, Any], ...] = field(default=())


@dataclass(frozen=True)
class Reading:
    """A whole ``text`` of a suite, of which ``prompt`` tokens are given."""

    suite: str
    prompt: int
    text: list[int]


class Simulation:
    """All settings on all prompts; ``store`` is the datastore of ``rest``, ``advance`` is called after each setting."""

    def __init__(self, settings: Settings, prompts: Sequence[Prompt], store: Path | None, advance: Callable[[], None] = lambda: None):
        self.given, self.prompts, self.store, self.advance = settings, prompts, store, advance

    @staticmethod
    def settings(given: Settings) -> list[Setting]:
        """The drafters that read no logits; prompt lookup with every longest match, and with shortest ones of 1 to 3."""
        left_out = {*LEARN_FROM_LOGITS} | ({SEVERAL} if set(LEARN_FROM_LOGITS) & set(given.merged) else set())
        found = [Setting(name) for name in given.drafters if name not in left_out]
        if LOOKUP in given.drafters:
            tried = [(longest, least) for longest in given.ngrams for least in (1, 2, 3) if least <= longest]
            found += [
                Setting(LOOKUP, f"{least} to {longest}", (("max_ngram", longest), ("min_ngram", least)))
                for longest, least in tried
                if (longest, least) != (3, 1)  # these are the defaults
            ]
        return found

    def run(self) -> list[Kept]:
        """Raises:
        ConfigurationError: the target cannot be loaded.
        """
        torch.set_num_threads(self.given.threads)
        speculator = Speculator(self.given.replayed, "none", dtype="float32")
        speculator.model.generation_config.eos_token_id = None
        readings = list(self._readings(speculator))
        found = []
        for setting in self.settings(self.given):
            for length in self.given.lengths:
                for suite in dict.fromkeys(each.suite for each in readings):
                    drafter = self._drafter(setting)
                    drafter.bind(speculator.target)
                    found += simulated(
                        setting, drafter, [each for each in readings if each.suite == suite], length, speculator.target.vocab_size
                    )
            self.advance()
        return found

    def _readings(self, speculator: Speculator) -> Iterator[Reading]:
        """Every turn of every prompt, as plain decoding goes on."""
        tokenizer, tokens = load_tokenizer(self.given.replayed), self.given.replay_tokens

        def answer(ids: list[int]) -> list[int]:
            out = speculator.generate(torch.tensor([ids]), max_new_tokens=tokens, pad_token_id=0, do_sample=False)
            return list(out.sequences[0, len(ids) :].tolist())

        for prompt in self.prompts:
            for ids in datasets.conversation(prompt, tokenizer, answer):
                yield Reading(prompt.category, len(ids), ids + answer(ids))

    def _drafter(self, setting: Setting) -> Drafter:
        name = self.given.spec(setting.drafter)
        drafter: Drafter = drafters.create(with_store(name, self.store) if self.store else name, dict(setting.options))
        return drafter


def simulated(setting: Setting, drafter: Drafter, readings: Sequence[Reading], length: int, vocab_size: int) -> list[Kept]:
    """One text after the other, so that what a drafter learns from one it knows in the next."""
    target: Any = TableTarget(Texts([each.text for each in readings], vocab_size))
    shape = TreeShape.chain(length)
    rule, proposal = choose_rule("match", drafter, shape)
    session = Session(target, drafter, rule, proposal=proposal, planner=FixedPlanner(shape), keep_stats=True)
    for each in readings:
        session.add(each.text[: each.prompt], RowParameters(max_new_tokens=len(each.text) - each.prompt))
        while session.live:
            session.step()
    return [
        Kept(each.suite, number, setting.drafter, setting.setting, length, row.kept, row.passes, row.drafted)
        for number, (each, row) in enumerate(zip(readings, session.stats.rows))
    ]


class Texts(ProbabilityTable):
    """Known texts as a target: behind a beginning of one of them the next token is certain, behind anything else token 0."""

    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int):
        super().__init__(lambda _: (), vocab_size)
        self.texts = [list(text) for text in texts]

    def batch(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """``[len(texts), V]``"""
        found = torch.zeros(len(texts), self.vocab_size)
        for line, given in zip(found, texts):
            count, known = len(given), list(given)
            line[next((text[count] for text in self.texts if len(text) > count and text[:count] == known), 0)] = 1.0
        return found
