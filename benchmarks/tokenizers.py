"""The suite of draft models with another tokenizer, beside one with the target's tokenizer and beside transformers.

The draft is made by ``python -m recipes.zoo foreign-tokenizer`` and ``foreign``: the size and training of ``python-1m``, with a
tokenizer in the manner of SentencePiece. All sides decode the same prompts in turns, one at a time, with chains of one length. What they
keep is counted with a small target on many prompts, and timed with a large one on few: both have the same function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from benchmarks.figures import Figure, best
from benchmarks.peers.transformers import Watch
from benchmarks.report import Table
from benchmarks.self_models import texts as corpus_in
from benchmarks.suite import Failure, PairSettings, Suite, instrument, option
from foredraft import ConfigurationError, Speculator
from foredraft.drafters.draft_model import DraftModel
from foredraft.estimates import Estimate, Grid, quotient, turned
from foredraft.loading import load_model, load_tokenizer
from foredraft.training.prompts import windows

SAME, INTERSECTION, TEXT, TRANSFORMERS, PLAIN = "same tokenizer", "intersection", "text", "transformers", "plain"
OURS = (INTERSECTION, TEXT)
FEWER = {INTERSECTION: 2, TEXT: 1}  # tokens of a chain than passes of the draft: where it looks ahead, and the last token of a text
SHIPPED = "transformers, vocabularies in its order"
PROMPT = 64  # tokens
LOST = (
    "Nats per token: what a text that a side wrote costs by the target. When it samples, transformers takes the draft's probabilities for "
    "those of the target's tokens in the order of `get_vocab()`, which need not be that of the ids. It then keeps tokens that the target "
    "would not write: its nats per token are not those of plain decoding. The side that is compared has tokenizers whose `get_vocab()` is "
    f"in the order of the ids; {SHIPPED!r} is transformers as it comes."
)


@dataclass(frozen=True)
class Settings(PairSettings):
    foreign: str = option("", "The draft model with another tokenizer: a path or a hub id.")
    counting: str = option("zoo:python-8m", "The target that bytes per pass are counted with, in float32.")
    length: int = option(5, "Draft passes per round.", least=2)
    counted: int = option(24, "Held-out prompts that are counted.", least=0)
    timed: int = option(6, "Held-out prompts that are timed.", least=0)
    tokens: int = option(64, "New tokens per prompt.", least=2)
    repeats: int = option(3, "Turns.", least=1)
    temperature: tuple[float, ...] = option((0.0, 1.0), "Temperatures; 0 is greedy.")
    corpus: Path | None = option(None, "Folder of python -m recipes.zoo corpus.", place=True)


@dataclass(frozen=True)
class Call:
    """A prompt that a side has continued: ``kept`` bytes, ``passes`` of the target, the prefill left out, ``drafts`` of the draft, and how
    likely the target finds the text; with the large target if it is ``timed``."""

    side: str
    timed: bool
    temperature: float
    prompt: int
    repeat: int
    tokens: int
    kept: int
    passes: int
    drafts: int
    seconds: float
    nats: float


Side = Callable[[list[int], float, int], tuple[list[int], int, int]]  # prompt, temperature, seed: new tokens, target and draft passes


class Tokenizers(Suite[Settings]):
    """Draft models with another tokenizer than the target's."""

    name = "tokenizers"
    title = "Draft models with another tokenizer"
    settings_type = Settings
    quick: ClassVar[Mapping[str, Any]] = {"counted": 2, "timed": 1, "tokens": 24, "repeats": 1}
    calls: list[Call]
    failures: list[Failure]
    about: list[str]  # how the foreign draft was seen by Foredraft

    @property
    def steps(self) -> int:
        prompts = self.settings.counted + self.settings.timed
        return len(self.settings.temperature) * self.settings.repeats * prompts

    def run(self) -> None:
        settings = self.settings
        if not settings.foreign:
            raise ConfigurationError("--foreign is missing: the draft model that python -m recipes.zoo foreign makes")
        if settings.corpus is None:
            raise ConfigurationError("--corpus is missing: the folder that python -m recipes.zoo corpus makes")
        torch.set_num_threads(settings.threads)
        held_out = [each.text for each in corpus_in(settings.corpus.parent, build=False).held_out]
        for timed, count in ((False, settings.counted), (True, settings.timed)):
            if count:
                tokenizer = load_tokenizer(settings.target)
                self._part(timed, windows(tokenizer, held_out, count=count, tokens=PROMPT, seed=int(timed)), tokenizer)

    def _part(self, timed: bool, prompts: list[list[int]], tokenizer: Any) -> None:
        settings = self.settings
        sides = {PLAIN: self._ours(timed, "none"), SAME: self._ours(timed, DraftModel(settings.draft))}
        for name in OURS:
            sides[name] = self._ours(timed, DraftModel(settings.foreign, vocabulary=name), fewer=FEWER[name])
        sides[TRANSFORMERS] = self._theirs(timed, ordered=True)
        judge = None if timed else self._load(timed, settings.counting)
        for temperature in settings.temperature:
            if temperature and not timed:
                sides[SHIPPED] = self._theirs(timed, ordered=False)
            for side in sides.values() if timed else ():
                side(prompts[0], temperature, 0)  # warm-up
            for repeat in range(settings.repeats):
                for number, prompt in enumerate(prompts):
                    for name in turned(list(sides), repeat + number):
                        self._call(name, sides[name], judge, tokenizer, timed, temperature, number, repeat, prompt)
                    self.advance()

    def _call(
        self,
        name: str,
        side: Side,
        judge: Any,
        tokenizer: Any,
        timed: bool,
        temperature: float,
        number: int,
        repeat: int,
        prompt: list[int],
    ) -> None:
        begin = time.perf_counter()
        try:
            new, passes, drafts = side(prompt, temperature, 1000 * repeat + number)
        except (RuntimeError, ValueError) as error:
            self.failures.append(Failure(name, f"temperature {temperature:g}", str(error)))
            return
        seconds = time.perf_counter() - begin
        kept = len(tokenizer.decode(new[1:]).encode())
        nats = 0.0 if timed else self._nats(judge, prompt, new)
        self.calls.append(Call(name, timed, temperature, number, repeat, len(new), kept, passes, drafts, seconds, nats))

    @staticmethod
    def _nats(judge: Any, prompt: list[int], new: list[int]) -> float:
        with torch.no_grad():
            scores = judge(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        return -float(scores.gather(1, torch.tensor(new)[:, None]).sum())

    def _how(self, timed: bool) -> dict[str, Any]:
        return {"dtype": self.settings.dtype if timed else "float32", "device": self.settings.device}

    def _load(self, timed: bool, name: str) -> Any:
        return load_model(name, **self._how(timed))

    def _ours(self, timed: bool, drafter: Any, *, fewer: int = 0) -> Side:
        settings = self.settings
        shape = None if drafter == "none" else f"chain({max(1, settings.length - fewer)})"
        name = settings.target if timed else settings.counting
        speculator = Speculator(name, drafter, shape=shape, reuse_prefix=False, **self._how(timed))
        seen = None if drafter == "none" else speculator.drafter.facts().get("vocabulary")
        if seen is not None:
            self.about.append(str(seen))

        def generate(prompt: list[int], temperature: float, seed: int) -> tuple[list[int], int, int]:
            model = speculator.drafter.info.draft_model
            before = 0 if model is None else model.passes
            torch.manual_seed(seed)
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
            out = speculator.generate(torch.tensor([prompt]), max_new_tokens=settings.tokens, eos_token_id=-1, **sampling)
            assert out.stats is not None
            # With the target's tokenizer kernels may make a chain in one call, which counts as no pass; each of its tokens took one.
            drafts = out.stats.drafted if model is None or seen is None else model.passes - before
            return out.sequences[0, len(prompt) :].tolist(), out.stats.target_passes - 1, drafts

        return generate

    def _theirs(self, timed: bool, *, ordered: bool) -> Side:
        """Models and tokenizers of their own: transformers changes them. ``ordered``: vocabularies come in the order of their ids."""
        settings = self.settings
        target = self._load(timed, settings.target if timed else settings.counting)
        assistant = self._load(timed, settings.foreign)
        tokenizers = [load_tokenizer(each) for each in (settings.target, settings.foreign)]
        for each in tokenizers if ordered else ():
            vocabulary = dict(sorted(each.get_vocab().items(), key=lambda pair: pair[1]))
            each.get_vocab = vocabulary.copy
        target.generation_config.eos_token_id = None
        assistant.generation_config.num_assistant_tokens = settings.length
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        how = {"assistant_model": assistant, "tokenizer": tokenizers[0], "assistant_tokenizer": tokenizers[1]}

        def generate(prompt: list[int], temperature: float, seed: int) -> tuple[list[int], int, int]:
            torch.manual_seed(seed)
            ids = torch.tensor([prompt])
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
            watch = Watch(target, assistant)
            with watch:
                out = target.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=settings.tokens, pad_token_id=0, **sampling, **how
                )
            return out[0, len(prompt) :].tolist(), len(watch.target) - 1, len(watch.draft)

        return generate

    # -- what is reported -----------------------------------------------------------------------------------------------

    def grid(self, side: str, temperature: float, what: str, *, timed: bool = False) -> Grid:
        calls = [each for each in self.calls if (each.side, each.temperature, each.timed) == (side, temperature, timed)]
        numbers = sorted({each.prompt for each in calls})
        return np.array([[getattr(each, what) for each in calls if each.prompt == number] for number in numbers], dtype=np.float64)

    def per(self, side: str, temperature: float, above: str, below: str) -> Estimate | None:
        timed = below == "seconds"
        if any(each.method == side for each in self.failures):
            return None
        calls = self.grid(side, temperature, above, timed=timed)
        whole = len(calls) == (self.settings.timed if timed else self.settings.counted)
        return quotient(calls, self.grid(side, temperature, below, timed=timed)) if whole and calls.size else None

    def figures(self) -> list[Figure]:
        found = []
        for temperature in self.settings.temperature:
            bytes_kept = {side: self.per(side, temperature, "kept", "passes") for side in (SAME, *OURS, TRANSFORMERS)}
            speed = {side: self.per(side, temperature, "tokens", "seconds") for side in (*OURS, TRANSFORMERS)}
            judged: list[tuple[str, tuple[str, Estimate | None] | None, Estimate | None, float]] = []
            if self.settings.counted:
                judged.append((f"bytes per target pass over {SAME}", best(OURS, bytes_kept.get), bytes_kept[SAME], 0.7))
            for side in OURS:
                if self.settings.counted and side == (INTERSECTION if temperature else TEXT):  # as transformers does
                    judged.append(("bytes per target pass over transformers", (side, bytes_kept[side]), bytes_kept[TRANSFORMERS], 1.0))
                if self.settings.timed:
                    judged.append(("tokens/s over transformers", (side, speed[side]), speed[TRANSFORMERS], 2.0))
            for what, ours, theirs, low in judged:
                spread = None if ours is None or ours[1] is None or theirs is None else (ours[1] / theirs).spread
                found.append(Figure(f"{what}, temperature {temperature:g}", spread, low=low, how="" if ours is None else ours[0]))
        return found

    def tables(self) -> list[Table]:
        measured = (("kept", "passes"), ("drafts", "passes"), ("kept", "tokens"), ("nats", "tokens"), ("tokens", "seconds"))
        lines = []
        for temperature in self.settings.temperature:
            for side in (PLAIN, SAME, *OURS, TRANSFORMERS, *([SHIPPED] if temperature else [])):
                cells = [self.per(side, temperature, *pair) for pair in measured]
                lines.append((f"{side}, temperature {temperature:g}", *("–" if each is None else each.spread.text() for each in cells)))
        judged = [
            (each.name, each.how, "–" if each.spread is None else each.spread.text(), each.bound, each.verdict) for each in self.figures()
        ]
        heads = ("side", "bytes per target pass", "draft passes per target pass", "bytes per token", "nats per token", "tokens/s")
        return [Table("Sides", heads, lines), Table("Figures", ("figure", "side", "measured", "bound", "verdict"), judged)]

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        settings = self.settings
        return [
            f"Counted with {settings.counting}, float32, on {settings.counted} held-out prompts; timed with {settings.target}, "
            f"{settings.dtype}, on {settings.timed}; {settings.tokens} new tokens each, {settings.repeats} turns, {settings.length} draft "
            "passes per round. Intervals are 95 % bootstraps over prompts and turns.",
            "transformers drafts by text where it decodes greedily, and in the intersection where it samples: what is kept per pass is "
            "compared where both do the same.",
            *sorted(set(self.about)),
            LOST if settings.counted and any(settings.temperature) else "",
            *(f"{each.method}, {each.stage}: {each.message}" for each in self.failures),
            instrument([settings.target]) if settings.timed else "",
        ]
