"""The suite of draft models with another tokenizer, beside one with the target's tokenizer and beside transformers.

The draft is made by ``python -m recipes.zoo foreign-tokenizer`` and ``foreign``: the size and training of ``python-1m``, with a
tokenizer in the manner of SentencePiece. All sides decode the same prompts in turns, one at a time, with chains of one length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks.figures import Estimate, Figure, Grid, best, quotient
from benchmarks.peers.transformers import Watch
from benchmarks.prompts import PYTHON
from benchmarks.report import Table
from benchmarks.suite import Failure, PairSettings, Suite, instrument, option, turned
from foredraft import ConfigurationError, Speculator
from foredraft.drafters.draft_model import DraftModel
from foredraft.loading import load_model, load_tokenizer

SAME, INTERSECTION, TEXT, TRANSFORMERS, PLAIN = "same tokenizer", "intersection", "text", "transformers", "plain"
OURS = (INTERSECTION, TEXT)


@dataclass(frozen=True)
class Settings(PairSettings):
    foreign: str = option("", "The draft model with another tokenizer: a path or a hub id.")
    length: int = option(5, "Draft passes per round.", least=2)
    beginnings: int = option(12, "Prompts.", least=1)
    tokens: int = option(64, "New tokens per prompt.", least=2)
    repeats: int = option(3, "Turns.", least=1)
    temperature: tuple[float, ...] = option((0.0, 1.0), "Temperatures; 0 is greedy.")


@dataclass(frozen=True)
class Call:
    """A prompt that a side has continued: ``kept`` bytes, ``passes`` of the target, the prefill left out, and ``drafts`` of the draft."""

    side: str
    temperature: float
    prompt: int
    repeat: int
    tokens: int
    kept: int
    passes: int
    drafts: int
    seconds: float


Side = Callable[[list[int], float, int], tuple[list[int], int, int]]  # prompt, temperature, seed: new tokens, target and draft passes


class Tokenizers(Suite[Settings]):
    """Draft models with another tokenizer than the target's."""

    name = "tokenizers"
    title = "Draft models with another tokenizer"
    settings_type = Settings
    quick: ClassVar[Mapping[str, Any]] = {"beginnings": 2, "tokens": 24, "repeats": 1}
    calls: list[Call]
    failures: list[Failure]
    about: list[str]  # how the foreign draft was seen by Foredraft

    @property
    def steps(self) -> int:
        return len(self.settings.temperature) * self.settings.repeats * min(self.settings.beginnings, len(PYTHON))

    def run(self) -> None:
        settings = self.settings
        if not settings.foreign:
            raise ConfigurationError("--foreign is missing: the draft model that python -m recipes.zoo foreign makes")
        torch.set_num_threads(settings.threads)
        target, draft, tokenizer = settings.load()
        sides = {PLAIN: self._ours(target, "none"), SAME: self._ours(target, DraftModel(draft))}
        for name in OURS:
            sides[name] = self._ours(target, DraftModel(self._foreign(), vocabulary=name), text=name == TEXT)
        sides[TRANSFORMERS] = self._theirs(tokenizer)
        prompts = [tokenizer(text)["input_ids"] for text in PYTHON[: settings.beginnings]]
        for temperature in settings.temperature:
            for side in sides.values():
                side(prompts[0], temperature, 0)  # warm-up
            for repeat in range(settings.repeats):
                for number, prompt in enumerate(prompts):
                    for name in turned(list(sides), repeat + number):
                        self._call(name, sides[name], tokenizer, temperature, number, repeat, prompt)
                    self.advance()

    def _call(self, name: str, side: Side, tokenizer: Any, temperature: float, number: int, repeat: int, prompt: list[int]) -> None:
        begin = time.perf_counter()
        try:
            new, passes, drafts = side(prompt, temperature, 1000 * repeat + number)
        except (RuntimeError, ValueError) as error:
            self.failures.append(Failure(name, f"temperature {temperature:g}", str(error)))
            return
        seconds = time.perf_counter() - begin
        kept = len(tokenizer.decode(new[1:]).encode())
        self.calls.append(Call(name, temperature, number, repeat, len(new), kept, passes, drafts, seconds))

    def _foreign(self) -> Any:
        return load_model(self.settings.foreign, dtype=self.settings.dtype, device=self.settings.device)

    def _ours(self, target: Any, drafter: Any, *, text: bool = False) -> Side:
        """A draft by text makes one pass more than its length."""
        settings = self.settings
        shape = None if drafter == "none" else f"chain({settings.length - text})"
        speculator = Speculator(target, drafter, shape=shape, reuse_prefix=False, tokenizer=load_tokenizer(settings.target))
        if drafter != "none" and (seen := speculator.drafter.facts().get("vocabulary")) is not None:
            self.about.append(str(seen))

        def generate(prompt: list[int], temperature: float, seed: int) -> tuple[list[int], int, int]:
            model = speculator.drafter.info.draft_model
            before = 0 if model is None else model.passes
            torch.manual_seed(seed)
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
            out = speculator.generate(torch.tensor([prompt]), max_new_tokens=settings.tokens, eos_token_id=-1, **sampling)
            assert out.stats is not None
            drafts = 0 if model is None else model.passes - before
            return out.sequences[0, len(prompt) :].tolist(), out.stats.target_passes - 1, drafts

        return generate

    def _theirs(self, tokenizer: Any) -> Side:
        """Models of their own: transformers changes the assistant."""
        settings = self.settings
        target, assistant = load_model(settings.target, dtype=settings.dtype, device=settings.device), self._foreign()
        target.generation_config.eos_token_id = None
        assistant.generation_config.num_assistant_tokens = settings.length
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        how = {"assistant_model": assistant, "tokenizer": tokenizer, "assistant_tokenizer": load_tokenizer(settings.foreign)}

        def generate(prompt: list[int], temperature: float, seed: int) -> tuple[list[int], int, int]:
            torch.manual_seed(seed)
            ids = torch.tensor([prompt])
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
            watch = Watch(target, assistant, lambda: None)
            with watch:
                out = target.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=settings.tokens, pad_token_id=0, **sampling, **how
                )
            return out[0, len(prompt) :].tolist(), len(watch.target) - 1, len(watch.draft)

        return generate

    # -- what is reported -----------------------------------------------------------------------------------------------

    def grid(self, side: str, temperature: float, what: str) -> Grid:
        calls = [each for each in self.calls if (each.side, each.temperature) == (side, temperature)]
        numbers = sorted({each.prompt for each in calls})
        return np.array([[getattr(each, what) for each in calls if each.prompt == number] for number in numbers], dtype=np.float64)

    def per(self, side: str, temperature: float, above: str, below: str) -> Estimate | None:
        calls = self.grid(side, temperature, above)
        whole = len(calls) == min(self.settings.beginnings, len(PYTHON)) and not any(each.method == side for each in self.failures)
        return quotient(calls, self.grid(side, temperature, below)) if whole and calls.size else None

    def figures(self) -> list[Figure]:
        found = []
        for temperature in self.settings.temperature:
            bytes_kept = {side: self.per(side, temperature, "kept", "passes") for side in (SAME, *OURS, TRANSFORMERS)}
            speed = {side: self.per(side, temperature, "tokens", "seconds") for side in (*OURS, TRANSFORMERS)}
            at = f"temperature {temperature:g}"
            better, faster = best(OURS, bytes_kept.get), best(OURS, speed.get)
            for what, ours, theirs, low in (
                (f"bytes per target pass over {SAME}", better, bytes_kept[SAME], 0.7),
                ("tokens/s over transformers", faster, speed[TRANSFORMERS], 2.0),
                ("bytes per target pass over transformers", better, bytes_kept[TRANSFORMERS], 1.0),
            ):
                spread = None if ours is None or theirs is None else (ours[1] / theirs).spread
                found.append(Figure(f"{what}, {at}", spread, low=low, how="" if ours is None else ours[0]))
        return found

    def tables(self) -> list[Table]:
        lines = []
        for temperature in self.settings.temperature:
            for side in (PLAIN, SAME, *OURS, TRANSFORMERS):
                cells = [self.per(side, temperature, *pair) for pair in (("kept", "passes"), ("drafts", "passes"), ("tokens", "seconds"))]
                lines.append((f"{side}, temperature {temperature:g}", *("–" if each is None else each.spread.text() for each in cells)))
        judged = [
            (each.name, each.how, "–" if each.spread is None else each.spread.text(), each.bound, each.verdict) for each in self.figures()
        ]
        return [
            Table("Sides", ("side", "bytes per target pass", "draft passes per target pass", "tokens/s"), lines),
            Table("Figures", ("figure", "side", "measured", "bound", "verdict"), judged),
        ]

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        settings = self.settings
        return [
            f"{settings.target}, {settings.dtype}; {settings.beginnings} prompts, {settings.tokens} new tokens each, {settings.repeats} "
            f"turns; {settings.length} draft passes per round. Intervals are 95 % bootstraps over prompts and turns.",
            *self.about,
            *(f"{each.method}, {each.stage}: {each.message}" for each in self.failures),
            instrument([settings.target]),
        ]
