"""The verification suite: from a tree's logits to a verdict on the host, over a large vocabulary, for every rule.

No model runs: logits are Gaussian, and a draft's are the target's with noise added. Each repeat draws new trees from q with new
noise and times every rule on its own, in an order that turns from repeat to repeat. *Verification* is all that a round does
between the target's pass and the commit: logits processors (temperature and top-p), softmax, the rule, and the copy of the verdict
to the host. Its parts are also timed alone; a rule alone starts from p and ends when the device is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from benchmarks import suite
from benchmarks.figures import Figure
from benchmarks.passes import synchroniser
from benchmarks.report import Table
from benchmarks.suite import Suite, option
from foredraft import verification
from foredraft.errors import ConfigurationError
from foredraft.estimates import Spread, turned
from foredraft.logits.noise import Noise, Purpose, row_key
from foredraft.logits.processors import Pipeline
from foredraft.logits.sampler import Sampler
from foredraft.outcome import decide
from foredraft.shapes import StaticShape, TreeShape
from foredraft.tree import Proposal, TokenTree

LIMIT = 0.002  # seconds, for match and traversal on a GPU
CLAIMED = ("match", "traversal")
PARTS = ("verification", "processors", "softmax", "rule")
POSITION = 100


@dataclass(frozen=True)
class Settings(suite.Settings):
    shape: str = option("product(4,3,4)", "Shape of the trees, for rules that verify trees.")
    chain: str = option("chain(5)", "Shape for rules that verify chains only.")
    vocab_size: int = option(150_000, "V.", least=2)
    rows: int = option(1, "B.", least=1)
    temperature: float = option(0.8, "Of the sampling.", least=0.01)
    top_p: float = option(0.95, "Of the sampling.", least=0.01)
    spread: float = option(3.0, "Standard deviation of the target's logits.", least=0.0)
    error: float = option(1.0, "Standard deviation of the draft's logits against the target's.", least=0.0)
    repeats: int = option(10, "Measured repeats, after the warm-up.", least=1)

    def __post_init__(self) -> None:
        static(self.shape)
        if not static(self.chain).is_chain:
            raise ConfigurationError(f"--chain {self.chain} branches; give chain(γ)")


@dataclass(frozen=True)
class Method:
    """A rule on a kind of proposal."""

    rule: str
    proposal: Proposal
    shape: str
    lossless: bool

    @property
    def name(self) -> str:
        return f"{self.rule}, {self.proposal}, {self.shape}"


@dataclass(frozen=True)
class Measurement:
    """Seconds of one repeat, by part, and the mean number of drafted tokens that were kept."""

    method: str
    repeat: int
    seconds: dict[str, float]
    accepted: float


def methods(settings: Settings) -> list[Method]:
    """Every rule: those that use q on every proposal that they accept, the others, to whom it is all the same, on fixed tokens."""
    found = []
    for name in verification.names():
        rule = verification.create(name)
        shape = settings.chain if rule.chains_only else settings.shape
        kinds: Sequence[Proposal] = rule.proposals if rule.needs_q else ("deterministic",)
        found += [Method(name, kind, shape, rule.lossless) for kind in kinds]
    return found


class Verification(Suite[Settings]):
    """What it takes to verify a tree over a large vocabulary, for every rule, processors included."""

    name = "verification"
    title = "Verification: from a tree's logits to a verdict"
    settings_type = Settings
    methods: list[Method]
    measurements: list[Measurement]

    @property
    def steps(self) -> int:
        return (self.settings.repeats + 1) * len(methods(self.settings))

    @torch.inference_mode()
    def run(self) -> None:
        settings = self.settings
        torch.set_num_threads(settings.threads)
        self.methods = methods(settings)
        by_name = {each.name: each for each in self.methods}
        shapes = {text: static(text) for text in (settings.shape, settings.chain)}
        logits = Logits(settings, max(shape.nodes for shape in shapes.values()) + 1)
        for repeat in range(settings.repeats + 1):
            for name in turned(list(by_name), repeat):
                measured = measure(by_name[name], shapes[by_name[name].shape], logits, settings, repeat - 1)
                if repeat:  # the first is the warm-up
                    self.measurements.append(measured)
                self.advance()

    # -- what is reported -----------------------------------------------------------------------------------------------

    def of(self, name: str, part: str) -> Spread:
        return Spread.of([each.seconds[part] for each in self.measurements if each.method == name])

    def figures(self) -> list[Figure]:
        """What the project aims at, which is about GPUs."""
        if not self.settings.device.startswith("cuda"):
            return []
        return [
            Figure(f"{each.name}: seconds of verification", self.of(each.name, "verification"), high=LIMIT, noise=True)
            for each in self.methods
            if each.rule in CLAIMED
        ]

    def tables(self) -> list[Table]:
        columns = ("rule", "proposal", "shape", "lossless", "verification, ms", "processors, ms", "softmax, ms", "rule, ms", "kept")
        rows = []
        for each in self.methods:
            kept = [one.accepted for one in self.measurements if one.method == each.name]
            cells = [self.of(each.name, part).text(2, 1e3) for part in PARTS]
            safe = "yes" if each.lossless else "LOSSY"
            rows.append((each.rule, each.proposal, each.shape, safe, *cells, f"{sum(kept) / len(kept):.2f}"))
        figures = [(each.name, each.bound, f"{each.spread.median:.5f}", each.verdict) for each in self.figures() if each.spread]
        shown = [Table("Figures to reach", ("figure", "bound", "measured", "verdict"), figures)] if figures else []
        return [*shown, Table("Rules", columns, rows)]

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        settings = self.settings
        return [
            f"{settings.shape} has {static(settings.shape).nodes} drafted nodes. V = {settings.vocab_size:,}, {settings.rows} rows, "
            f"float32, temperature {settings.temperature}, top-p {settings.top_p}; {settings.repeats} interleaved repeats after a warm-up, "
            "each with a tree of its own. Figures are medians over the repeats, with the smallest and largest in brackets.",
            "Verification is all between the target's logits and the verdict on the host: processors, softmax, the rule, the copy. The "
            f"parts are timed alone as well. Logits are Gaussian with a standard deviation of {settings.spread:g}, the draft's are the "
            f"target's with an error of {settings.error:g}: how many drafted tokens are kept (mean over the repeats) says how long the "
            "walks were, not how good a rule is on text. On a CPU a rule stops where its walk does; on a GPU it does the work of the "
            "whole tree.",
        ]


def static(text: str) -> StaticShape:
    shape = TreeShape.parse(text)
    if not isinstance(shape, StaticShape):
        raise ConfigurationError(f"shape {text} depends on a draft's probabilities; give a static one, such as product(4,3,4)")
    return shape


class Logits:
    """``[R, N, V]`` float32 logits of the target and of the draft, the same for all methods."""

    def __init__(self, settings: Settings, nodes: int):
        generator = torch.Generator().manual_seed(0)
        size = (settings.rows, nodes, settings.vocab_size)
        self.target = settings.spread * torch.randn(size, generator=generator)
        self.draft = (self.target + settings.error * torch.randn(size, generator=generator)).to(settings.device)
        self.target = self.target.to(settings.device)


def noise_of(settings: Settings, repeat: int) -> Noise:
    keys = torch.tensor([row_key((repeat, row)) for row in range(settings.rows)], device=settings.device)
    return Noise(keys, torch.full_like(keys, POSITION))


def sampler(settings: Settings, repeat: int) -> Sampler:
    processors = [TemperatureLogitsWarper(settings.temperature), TopPLogitsWarper(settings.top_p)]
    device = torch.device(settings.device)
    pipeline = Pipeline.alone(processors, prompt_length=POSITION, device=device)
    return Sampler(
        pipelines=[pipeline] * settings.rows,
        sampled=[True] * settings.rows,
        lengths=[POSITION + 1] * settings.rows,
        noise=noise_of(settings, repeat),
        committed=lambda: torch.zeros(settings.rows, POSITION + 1, dtype=torch.long, device=device),
    )


def draw(shape: StaticShape, proposal: Proposal, q: Tensor, noise: Noise) -> TokenTree:
    """A tree of ``shape`` with tokens chosen by ``q`` ``[R, N, V]`` at their parents."""
    left = q.clone()
    tokens = torch.zeros(q.shape[0], len(shape.parents), dtype=torch.long, device=q.device)
    for node, parent in enumerate(shape.parents[1:], 1):
        above = left[:, parent]
        tokens[:, node] = above.argmax(-1) if proposal == "deterministic" else noise.draw(above, Purpose.DRAFT, node)
        if proposal != "iid":
            above.scatter_(1, tokens[:, node, None], 0)
    if shape.is_chain:
        return TokenTree.from_chain(tokens, proposal=proposal, q=q[:, : max(shape.parents) + 1])
    return TokenTree.from_parents(tokens, shape.parents, proposal=proposal, q=q[:, : max(shape.parents) + 1])


def measure(method: Method, shape: StaticShape, logits: Logits, settings: Settings, repeat: int) -> Measurement:
    """Draw a tree, and time its verification and each part of it."""
    rule, nodes = verification.create(method.rule), len(shape.parents)
    target, draft = logits.target[:, :nodes], logits.draft[:, :nodes]
    draws = sampler(settings, repeat)
    roots = TokenTree.from_parents(torch.zeros_like(target[..., 0], dtype=torch.long), shape.parents)
    tree = draw(shape, method.proposal, draws.distribution(draws.scores(draft, roots)), noise_of(settings, repeat))
    wait = synchroniser(target.device)

    def timed(work: Callable[[Sampler], Any]) -> tuple[float, Any]:
        fresh = sampler(settings, repeat)  # noise that nobody has looked at
        wait()
        begin = time.perf_counter()
        result = work(fresh)
        wait()
        return time.perf_counter() - begin, result

    seconds: dict[str, float] = {}
    seconds["verification"], outcome = timed(lambda fresh: decide(rule, tree, target, fresh))
    seconds["processors"], scores = timed(lambda fresh: fresh.scores(target, tree))
    seconds["softmax"], p = timed(lambda fresh: fresh.distribution(scores))
    seconds["rule"], _ = timed(lambda fresh: rule.verify(tree, p, noise_of(settings, repeat)))
    accepted = sum(line.accepted for line in outcome.rows) / tree.rows
    return Measurement(method.name, repeat, seconds, accepted)
