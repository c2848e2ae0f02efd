"""The suite of learning while serving: a draft that was distilled on one group of packages serves another one, and learns.

α is Σ min(p, q), the probability that a token drawn from the draft is accepted. It is measured beside serving, on other texts that the
target wrote: each version of the draft reads the same tokens, so that versions differ by what they learnt alone. Speeds are those of calls
that take turns. The learner works while its own side serves and not between its calls, where it would take from the others.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import self_models
from benchmarks.figures import Figure
from benchmarks.report import Table
from benchmarks.suite import Failure, Suite, TargetSettings, instrument, option
from foredraft import Speculator
from foredraft.drafters.base import Drafter, Feedback
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.learning.collecting import Collector
from foredraft.drafters.none import NoDrafter
from foredraft.errors import ConfigurationError
from foredraft.estimates import Spread, turned
from foredraft.loading import load_model, load_tokenizer
from foredraft.planning.costs import StandIn
from foredraft.target import Target
from foredraft.training.prompts import windows
from foredraft.tree import TokenTree

A, B = "A", "B"
GROUPS = {A: ("sympy", "mpmath", "networkx", "scipy", "numpy"), B: ("transformers", "peft")}
LEARNING, FROZEN, PLAIN = "learning", "not learning", "plain decoding"
SHIFT, HOME, BACK = "shift", "stationary", "back"
NEW, PROMPT = 256, 64  # tokens of a call and of its prompt
FIRST, LAST = 15_000, 20_000  # tokens of B over which what was closed is counted
SERVED = 10  # of so many files one is served
TOGETHER = 16  # texts that α is measured on and that are written at once
LEAST_GAP, CLOSED, KEPT, GAIN, STATIONARY, COLLECTING = 0.05, 0.4, 0.97, 1.0, 0.95, 0.02
VOCABULARY, DRAFTED, TRIALS = 150_000, 5, 20  # of the model that collecting is timed beside


@dataclass(frozen=True)
class Settings(TargetSettings):
    draft: str = option("", "A draft that was distilled on group A.", flag="--draft-a")
    other: str = option("", "A draft that was distilled on group B.", flag="--draft-b")
    tokens: int = option(100_000, "Tokens of B that are served.", least=1)
    stationary: int = option(20_000, "Tokens of A that are served to see what learning costs.", least=0)
    seeds: int = option(3, "Runs, each with other prompts.", least=1)
    later: int = option(20_000, "Tokens of B in the runs after the first.", least=1)
    compared: int = option(4, "One of so many texts of B is also written by the sides that do not learn.", least=1)
    every: int = option(5_000, "Tokens between two points of the curve.", least=1)
    texts: int = option(48, "Texts of each group that α is measured on.", least=1)
    share: float = option(0.05, "Of the serving speed, for learning.", least=0)
    layers: int = option(24, "Layers of the model that collecting is timed beside; 0 leaves it out.", least=0)
    corpus: Path | None = option(None, "The folder with the packages; made where it is missing.", place=True)
    work_folder: Path = option(Path("online-work"), "Where drafts learn.", place=True)


@dataclass(frozen=True)
class Call:
    """One call of a side, which writes a ``text`` of its part; ``served`` are tokens of the part before it."""

    part: str
    seed: int
    side: str
    text: int
    served: int
    tokens: int
    seconds: float
    version: int
    steps: int


@dataclass(frozen=True)
class Alpha:
    """α of a draft on the texts of a ``group``; of one that learns, ``version`` by ``version``."""

    draft: str
    seed: int
    version: int
    group: str
    alpha: float


class Online(Suite[Settings]):
    """A draft that learns while it serves: how fast it follows a change of the text, what it costs, and what it forgets.

    Needs two drafts: `foredraft data generate` and `foredraft train draft` on the texts in WORK/groups/A.jsonl and B.jsonl, which a first
    run writes.
    """

    name = "online"
    title = "Learning while serving"
    settings_type = Settings
    quick: ClassVar[Mapping[str, Any]] = {"tokens": 1024, "stationary": 512, "seeds": 1, "every": 256, "layers": 1, "texts": 3}
    calls: list[Call]
    alphas: list[Alpha]
    collecting: dict[str, list[float]]  # seconds of collecting and of passes
    failures: list[Failure]

    @property
    def steps(self) -> int:
        settings = self.settings
        texts = [-(-self._tokens(seed) // NEW) for seed in range(settings.seeds)]
        shifted = sum(count + 2 * -(-count // settings.compared) for count in texts)
        return shifted + settings.seeds * (2 * -(-settings.stationary // NEW) + 1) + 1

    def _tokens(self, seed: int) -> int:
        """Of B that are served in a run."""
        return self.settings.tokens if seed == 0 else min(self.settings.later, self.settings.tokens)

    def run(self) -> None:
        """Seed by seed; a run that is interrupted has what was measured until then."""
        settings = self.settings
        torch.set_num_threads(settings.threads)
        texts = self._texts()
        if not (settings.draft and settings.other):
            where = settings.work_folder / "groups"
            raise ConfigurationError(
                f"two drafts are needed: --draft-a, distilled on {where / 'A.jsonl'}, and --draft-b, distilled on {where / 'B.jsonl'} "
                "(foredraft data generate, foredraft train draft)"
            )
        if settings.layers:
            self.collecting = timed_collecting(settings.layers)
        self.advance()
        for seed in range(settings.seeds):
            try:
                self._run(seed, texts)
            except KeyboardInterrupt:
                self.failures.append(Failure(f"seed {seed}", "measurement", "interrupted; what follows was not measured"))
                return

    def _run(self, seed: int, texts: Mapping[str, list[str]]) -> None:
        settings, tokenizer = self.settings, load_tokenizer(self.settings.target)
        prompts = {
            group: windows(tokenizer, each, count=settings.texts + settings.tokens // NEW + 1, tokens=PROMPT, seed=seed)
            for group, each in texts.items()
        }
        judge = Judge(self._speculator(NoDrafter()), {group: each[: settings.texts] for group, each in prompts.items()}, seed)
        for name in (settings.draft, settings.other):
            draft = load_model(name, dtype=settings.dtype, device=settings.device)
            self.alphas += [Alpha(name, seed, 0, group, judge.alpha(draft, group)) for group in texts]
        self._serve(SHIFT, B, prompts[B][settings.texts :], seed, self._tokens(seed), judge)
        self._serve(HOME, A, prompts[A][settings.texts :], seed, settings.stationary, None)
        self.advance()

    def _texts(self) -> dict[str, list[str]]:
        """What is served of each group: one file in ten of its packages. The others are written for those who distil drafts on them."""
        folder = self.settings.work_folder / "groups"
        files = {name: folder / f"{name}-served.jsonl" for name in GROUPS}
        if not all(path.exists() for path in files.values()):
            corpus = self_models.texts(self.settings.corpus or self.settings.work_folder, build=self.settings.corpus is None)
            folder.mkdir(parents=True, exist_ok=True)
            for name, packages in GROUPS.items():
                lines = [json.dumps({"text": each.text}) + "\n" for each in corpus.train if each.package in packages]
                files[name].write_text("".join(lines[::SERVED]), encoding="utf-8")
                (folder / f"{name}.jsonl").write_text("".join(line for index, line in enumerate(lines) if index % SERVED), encoding="utf-8")
        return {name: [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()] for name, path in files.items()}

    def _speculator(self, drafter: Drafter) -> Speculator:
        return Speculator(self.settings.target, drafter, rule="auto", dtype=self.settings.dtype, device=self.settings.device)

    def _serve(self, part: str, group: str, prompts: Sequence[Sequence[int]], seed: int, tokens: int, judge: Judge | None) -> None:
        """``tokens`` of a group by the side that learns, and texts of them by the others, in turns; every version in use is judged."""
        settings, folder = self.settings, self.settings.work_folder / f"{part}-{seed}-{int(time.time())}"
        learn = {"folder": str(folder), "share": settings.share, "between": False, "keep": 10_000}
        sides = {
            LEARNING: lambda: DraftModel(settings.draft, learn=learn),
            FROZEN: lambda: DraftModel(settings.draft),
            **({PLAIN: NoDrafter} if part == SHIFT else {}),
        }
        made = {name: self._speculator(sides[name]()) for name in turned(list(sides), seed)}  # copies of weights differ by where they lie
        every = settings.compared if part == SHIFT else 1
        try:
            for index in range(-(-tokens // NEW)):
                for name in turned(list(sides), index // every) if index % every == 0 else [LEARNING]:
                    call = called(made[name], prompts[index % len(prompts)], (seed, index))
                    self.calls.append(replace(call, part=part, side=name, seed=seed, text=index, served=index * NEW))
                    self.advance()
            if judge is not None:
                self._judge(made[LEARNING], seed, judge)
        finally:
            for each in made.values():
                each.close()

    def _judge(self, speculator: Speculator, seed: int, judge: Judge) -> None:
        drafter = speculator.drafter
        assert isinstance(drafter, DraftModel) and drafter.learning is not None
        learning = drafter.learning
        draft = load_model(self.settings.draft, dtype=self.settings.dtype, device=self.settings.device)
        used = sorted({each.version for each in self._calls(SHIFT, seed, LEARNING)})
        parameters = dict(draft.named_parameters())
        for version in used:
            with torch.no_grad():
                for name, value in learning.versions.load(version).items():
                    parameters[name].copy_(value)
            groups = (A, B) if version == used[-1] else (B,)
            self.alphas += [Alpha(LEARNING, seed, version, group, judge.alpha(draft, group)) for group in groups]

    # -- what is reported -----------------------------------------------------------------------------------------------

    def _alpha(self, draft: str, seed: int, group: str, version: int = 0) -> float | None:
        wanted = draft, seed, version, group
        return next((each.alpha for each in self.alphas if (each.draft, each.seed, each.version, each.group) == wanted), None)

    def _calls(self, part: str, seed: int, side: str) -> list[Call]:
        return [each for each in self.calls if (each.part, each.seed, each.side) == (part, seed, side)]

    def closed(self, first: int, last: int) -> list[float]:
        """Of each seed, the share of the gap that is closed on average over the calls of these tokens."""
        found = []
        for seed in range(self.settings.seeds):
            low, high = (self._alpha(name, seed, B) for name in (self.settings.draft, self.settings.other))
            versions = [each.version for each in self._calls(SHIFT, seed, LEARNING) if first <= each.served < last]
            alphas = [alpha for each in versions if (alpha := self._alpha(LEARNING, seed, B, each)) is not None]
            if alphas and low is not None and high is not None and high != low:
                found.append((sum(alphas) / len(alphas) - low) / (high - low))
        return found

    def gaps(self) -> list[float]:
        pairs = [[self._alpha(name, seed, B) for name in (self.settings.other, self.settings.draft)] for seed in range(self.settings.seeds)]
        return [high - low for high, low in pairs if high is not None and low is not None]

    def kept(self) -> list[float]:
        """α on A of what was learnt on B, over that of the draft before."""
        found = []
        for seed in range(self.settings.seeds):
            after = [each.alpha for each in self.alphas if (each.draft, each.seed, each.group) == (LEARNING, seed, A)]
            if after and (before := self._alpha(self.settings.draft, seed, A)):
                found.append(after[-1] / before)
        return found

    def speeds(self, part: str, other: str) -> list[float]:
        """Of each seed, tokens per second while learning over those of another side, in the texts that both have written."""
        found = []
        for seed in range(self.settings.seeds):
            theirs = self._calls(part, seed, other)
            texts = {each.text for each in theirs}
            ours = [each for each in self._calls(part, seed, LEARNING) if each.text in texts]
            rates = [rate(ours), rate(theirs)]
            if all(rates):
                found.append(rates[0] / rates[1])
        return found

    def figures(self) -> list[Figure]:
        beside = self.collecting
        share = [each / median(beside["passes"]) for each in beside["collecting"]] if beside else []
        return [
            Figure("gap in α between the drafts of A and B, on B", mean(self.gaps()), low=LEAST_GAP),
            Figure(f"share of the gap closed over tokens {FIRST:,} to {LAST:,} of B", mean(self.closed(FIRST, LAST)), low=CLOSED),
            Figure("α back on A over what it was", mean(self.kept()), low=KEPT),
            Figure("tokens/s on B, learning over not learning", mean(self.speeds(SHIFT, FROZEN)), low=GAIN),
            Figure("tokens/s on B, learning over plain decoding", mean(self.speeds(SHIFT, PLAIN)), low=GAIN),
            Figure("tokens/s on A, learning over not learning", mean(self.speeds(HOME, FROZEN)), low=STATIONARY),
            Figure("host time of collecting, of a pass", Spread.of(share) if share else None, high=COLLECTING),
        ]

    def tables(self) -> list[Table]:
        settings = self.settings
        figures = [[each.name, "—" if each.spread is None else each.spread.text(3), each.bound, each.verdict] for each in self.figures()]
        curve = []
        for first in range(0, settings.tokens, settings.every):
            closed = mean(self.closed(first, first + settings.every))
            calls = [each for each in self.calls if each.part == SHIFT and first <= each.served < first + settings.every]
            found = [rate([each for each in calls if each.side == side]) for side in (LEARNING, FROZEN, PLAIN)]
            rates = [f"{each:.1f}" if each else "—" for each in found]
            steps = max((each.steps for each in calls), default=0)
            curve.append([f"{first:,}–{first + settings.every:,}", "—" if closed is None else closed.text(), *rates, str(steps)])
        fixed = [each for each in self.alphas if each.draft != LEARNING]
        drafts = [[Path(each.draft).name, str(each.seed), each.group, f"{each.alpha:.4f}"] for each in fixed]
        return [
            Table("Figures", ["figure", "measured", "bound", ""], figures),
            Table("The curve", ["tokens of B", "gap closed", *(f"{side}, tokens/s" for side in (LEARNING, FROZEN, PLAIN)), "steps"], curve),
            Table("The drafts", ["draft", "seed", "texts", "α"], drafts),
        ]

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        packages = "; ".join(f"{name}: {', '.join(each)}" for name, each in GROUPS.items())
        settings = self.settings
        means = (
            "Values are means over seeds, with the smallest and the largest. The sides that do not learn write one text of B in "
            f"{settings.compared}; speeds are those in texts that both sides wrote. The first seed serves {self._tokens(0):,} tokens of B, "
            f"each other one {self._tokens(1):,}."
        )
        failures = [f"{each.method}: {each.message}." for each in self.failures]
        return [f"Groups of packages: {packages}. {means}", *failures, instrument([self.settings.target])]


class Judge:
    """Measures α on texts of the target's own, which ``speculator`` writes; it is closed then."""

    def __init__(self, speculator: Speculator, prompts: Mapping[str, Sequence[Sequence[int]]], seed: int):
        self.texts = {group: list(written(speculator, each, seed)) for group, each in prompts.items()}
        speculator.close()
        with torch.inference_mode():
            self.known = {group: [probabilities(speculator.model, text) for text in each] for group, each in self.texts.items()}

    @torch.inference_mode()
    def alpha(self, draft: Any, group: str) -> float:
        pairs = zip(self.texts[group], self.known[group])
        found = [torch.minimum(p.float(), probabilities(draft, text).float()).sum(-1) for text, p in pairs]
        return float(torch.cat(found).mean())


def written(speculator: Speculator, prompts: Sequence[Sequence[int]], seed: int) -> Iterator[Tensor]:
    for first in range(0, len(prompts), TOGETHER):
        some = torch.tensor([list(prompt) for prompt in prompts[first : first + TOGETHER]])
        seeds = [(seed, first + row) for row in range(len(some))]
        arguments = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0, "eos_token_id": None}
        yield from speculator.generate(some, seed=seeds, **arguments).sequences[:, None]


def probabilities(model: Any, text: Tensor) -> Tensor:
    """``[NEW, V]`` after each token but the prompt's and the last."""
    return model(text.to(model.device)).logits[0, PROMPT - 1 : -1].float().softmax(-1).half()


def called(speculator: Speculator, prompt: Sequence[int], seed: tuple[int, int]) -> Call:
    """One call, as a part of no run yet."""
    text = torch.tensor([list(prompt)], device=speculator.model.device)
    arguments = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.0, "top_k": 0, "eos_token_id": None}
    stats = speculator.generate(text, seed=[seed], repeatable=False, **arguments).stats
    assert stats is not None
    learnt = stats.learning or {}
    return Call("", 0, "", 0, 0, stats.new_tokens, stats.seconds["total"], learnt.get("version", 0), learnt.get("steps", 0))


def timed_collecting(layers: int) -> dict[str, list[float]]:
    """Seconds of collecting after a pass over a root and a draft, and of that pass, of a model with a vocabulary of 150,000 and, with 24
    layers, about 300 M parameters outside its head."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 16}
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, eos_token_id=None, bos_token_id=None, **sizes)
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    target, collector, chance = Target(model, owned=True, test=False), Collector(lambda piece: None), random.Random(0)
    row = StandIn(0, list(range(40)), 4096)
    passes, collecting = [], []
    with torch.inference_mode():
        target.open([row.ids])
        target.prefill([row.ids[:-1]], first=0)
        collector.begin([row])
        for trial in range(TRIALS + 3):
            tree = TokenTree.from_chain(torch.tensor([[chance.randrange(VOCABULARY) for _ in range(DRAFTED + 1)]]))
            begin = time.perf_counter()
            logits = target.score(tree)
            between = time.perf_counter()
            accepted = chance.randrange(DRAFTED + 1)
            row.ids += [1] * (accepted + 1)
            collector.observe([row], Feedback(tree, [accepted], None, logits))
            end = time.perf_counter()
            if trial >= 3:
                passes.append(between - begin)
                collecting.append(end - between)
            target.commit(None, [accepted + 1])
    target.close()
    return {"collecting": collecting, "passes": passes}


def rate(calls: Sequence[Call]) -> float:
    """Tokens per second; 0 of no calls."""
    return sum(each.tokens for each in calls) / sum(each.seconds for each in calls) if calls else 0.0


def mean(values: Sequence[float]) -> Spread | None:
    return Spread(sum(values) / len(values), min(values), max(values)) if values else None
