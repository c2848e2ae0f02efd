"""The verification suite: from a tree's logits to a verdict on the host, over a large vocabulary, for every rule.

No model runs: logits are Gaussian, and a draft's are the target's with noise added. Each repeat draws new trees from q with new
noise and times every rule on its own, in an order that turns from repeat to repeat. *Verification* is all that a round does
between the target's pass and the commit: logits processors (temperature and top-p), softmax, the rule, and the copy of the verdict
to the host. Its parts are also timed alone; a rule alone starts from p and ends when the device is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from benchmarks.overhead import turned
from benchmarks.overhead_report import machine
from benchmarks.passes import synchroniser
from benchmarks.report import Table
from benchmarks.verdicts import Claim, Spread
from foredraft import verification
from foredraft.errors import ConfigurationError
from foredraft.logits.noise import Noise, Purpose, row_key
from foredraft.logits.processors import Pipeline
from foredraft.logits.sampler import Sampler
from foredraft.outcome import decide
from foredraft.shapes import StaticShape, TreeShape
from foredraft.tree import Proposal, TokenTree

SCHEMA = 1
SUITE = "verification"
TITLE = "Verification: from a tree's logits to a verdict"
LIMIT = 0.002  # seconds, for match and traversal on a GPU
CLAIMED = ("match", "traversal")
PARTS = ("verification", "processors", "softmax", "rule")
POSITION = 100


@dataclass(frozen=True)
class Settings:
    """What is run. ``shape`` is for rules that verify trees, ``chain`` for those that verify chains only; ``spread`` is the standard
    deviation of the target's logits and ``error`` that of the draft's against them."""

    shape: str = "product(4,3,4)"
    chain: str = "chain(5)"
    vocab_size: int = 150_000
    rows: int = 1
    temperature: float = 0.8
    top_p: float = 0.95
    spread: float = 3.0
    error: float = 1.0
    device: str = "cpu"
    threads: int = 2
    repeats: int = 10


@dataclass(frozen=True)
class Entrant:
    """A rule on a kind of proposal."""

    rule: str
    proposal: Proposal
    shape: str

    @property
    def name(self) -> str:
        return f"{self.rule}, {self.proposal}, {self.shape}"


@dataclass(frozen=True)
class Measurement:
    """Seconds of one repeat, by part, and the mean number of drafted tokens that were kept."""

    entrant: str
    repeat: int
    seconds: dict[str, float]
    accepted: float


def entrants(settings: Settings) -> list[Entrant]:
    """Every rule: those that use q on every proposal that they accept, the others, to whom it is all the same, on fixed tokens."""
    found = []
    for name in verification.names():
        rule = verification.create(name)
        shape = settings.chain if rule.chains_only else settings.shape
        kinds: Sequence[Proposal] = rule.proposals if rule.needs_q else ("deterministic",)
        found += [Entrant(name, kind, shape) for kind in kinds]
    return found


class Run:
    """One run of the suite; ``advance`` is called after each step of ``steps``."""

    def __init__(self, settings: Settings, advance: Callable[[], None] = lambda: None):
        self.settings, self.advance = settings, advance
        self.entrants = {entrant.name: entrant for entrant in entrants(settings)}
        self.measurements: list[Measurement] = []

    @property
    def steps(self) -> int:
        return (self.settings.repeats + 1) * len(self.entrants)

    @torch.inference_mode()
    def run(self) -> None:
        """Measure every entrant in every repeat, after a warm-up of each.

        Raises:
            ConfigurationError: a shape that is not static, or a chain that branches.
        """
        settings = self.settings
        torch.set_num_threads(settings.threads)
        shapes = {text: static(text) for text in (settings.shape, settings.chain)}
        if not shapes[settings.chain].is_chain:
            raise ConfigurationError(f"--chain {settings.chain} branches; give chain(γ)")
        logits = Logits(settings, max(shape.nodes for shape in shapes.values()) + 1)
        for repeat in range(settings.repeats + 1):
            for name in turned(list(self.entrants), repeat):
                entrant = self.entrants[name]
                measured = measure(entrant, shapes[entrant.shape], logits, settings, repeat - 1)
                if repeat:  # the first is the warm-up
                    self.measurements.append(measured)
                self.advance()


def static(text: str) -> StaticShape:
    shape = TreeShape.parse(text)
    if not isinstance(shape, StaticShape):
        raise ConfigurationError(f"shape {text} depends on a draft's probabilities; give a static one, such as product(4,3,4)")
    return shape


class Logits:
    """``[R, N, V]`` float32 logits of the target and of the draft, the same for all entrants."""

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


def measure(entrant: Entrant, shape: StaticShape, logits: Logits, settings: Settings, repeat: int) -> Measurement:
    """Draw a tree, and time its verification and each part of it."""
    rule, nodes = verification.create(entrant.rule), len(shape.parents)
    target, draft = logits.target[:, :nodes], logits.draft[:, :nodes]
    draws = sampler(settings, repeat)
    roots = TokenTree.from_parents(torch.zeros_like(target[..., 0], dtype=torch.long), shape.parents)
    tree = draw(shape, entrant.proposal, draws.distribution(draws.scores(draft, roots)), noise_of(settings, repeat))
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
    return Measurement(entrant.name, repeat, seconds, accepted)


# -- what is reported -----------------------------------------------------------------------------------------------------


def of(run: Run, name: str, part: str) -> Spread:
    return Spread.of([each.seconds[part] for each in run.measurements if each.entrant == name])


def claims(run: Run) -> list[Claim]:
    """What the project promises, which is about GPUs."""
    if not run.settings.device.startswith("cuda"):
        return []
    return [
        Claim(f"{name}: seconds of verification", LIMIT, True, of(run, name, "verification"))
        for name, entrant in run.entrants.items()
        if entrant.rule in CLAIMED
    ]


def document(run: Run, *, command: str, environment: dict[str, Any]) -> dict[str, Any]:
    """Everything about a run as plain values; the schema is checked by the tests."""
    return {
        "schema": SCHEMA,
        "suite": SUITE,
        "command": command,
        "environment": environment,
        "settings": asdict(run.settings),
        "entrants": {name: {**asdict(entrant), "lossless": lossless(entrant)} for name, entrant in run.entrants.items()},
        "claims": [claim.plain() for claim in claims(run)],
        "medians": {name: {part: asdict(of(run, name, part)) for part in PARTS} for name in run.entrants},
        "measurements": [asdict(each) for each in run.measurements],
    }


def lossless(entrant: Entrant) -> bool:
    return verification.create(entrant.rule).lossless


def tables(run: Run) -> list[Table]:
    columns = ("rule", "proposal", "shape", "lossless", "verification, ms", "processors, ms", "softmax, ms", "rule, ms", "kept")
    rows = []
    for name, entrant in run.entrants.items():
        kept = [each.accepted for each in run.measurements if each.entrant == name]
        cells = [_milliseconds(of(run, name, part)) for part in PARTS]
        safe = "yes" if lossless(entrant) else "LOSSY"
        rows.append((entrant.rule, entrant.proposal, entrant.shape, safe, *cells, f"{sum(kept) / len(kept):.2f}"))
    made = [Table("Rules", columns, rows)]
    if claims(run):
        lines = [(claim.name, f"≤ {claim.bound:g}", f"{claim.spread.median:.5f}", claim.verdict) for claim in claims(run) if claim.spread]
        made.insert(0, Table("Claims", ("claim", "bound", "measured", "verdict"), lines))
    return made


def _milliseconds(spread: Spread) -> str:
    median, low, high = (f"{value * 1e3:.2f}" for value in (spread.median, spread.low, spread.high))
    return f"{median} ({low}–{high})"


def notes(run: Run, *, command: str, environment: dict[str, Any]) -> Sequence[str]:
    settings = run.settings
    nodes = static(settings.shape).nodes
    return [
        f"`{command}`",
        machine(environment),
        f"{settings.shape} has {nodes} drafted nodes. V = {settings.vocab_size:,}, {settings.rows} rows, float32, temperature "
        f"{settings.temperature}, top-p {settings.top_p}; {settings.repeats} interleaved repeats after a warm-up, each with a tree of its "
        "own. Figures are medians over the repeats, with the smallest and largest in brackets.",
        "Verification is all between the target's logits and the verdict on the host: processors, softmax, the rule, the copy. The "
        f"parts are timed alone as well. Logits are Gaussian with a standard deviation of {settings.spread:g}, the draft's are the "
        f"target's with an error of {settings.error:g}: how many drafted tokens are kept (mean over the repeats) says how long the walks "
        "were, not how good a rule is on text. On a CPU a rule stops where its walk does; on a GPU it does the work of the whole tree.",
    ]
