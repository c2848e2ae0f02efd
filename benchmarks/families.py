"""The suite of architectures: how fast models of several shapes decode, beside the peers that take them.

Weights are random, in the shapes that people run; :mod:`benchmarks.families_shapes` says how text comes of them. Of each shape there are
three blocks, whose engines are in memory together: plain decoding with prompts of several lengths and many rows, prompt lookup on text
that copies, and weights of four bits. What is paired is paired within a turn: the calls of one repeat and one prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch

from benchmarks import families_shapes, speed_plan
from benchmarks.families_shapes import NODES, SHAPES, Made
from benchmarks.figures import Figure
from benchmarks.peer_process import FOREDRAFT
from benchmarks.report import Table
from benchmarks.speed_calls import Calls, Measurement, later_tokens
from benchmarks.speed_plan import AUTO, BATCH, LOOKUP, PEERS, PLAIN, TEXT, Cell, Method, theirs
from benchmarks.speed_runner import Block, Failure, PeerSuite
from benchmarks.speed_tables import failed, figures, memory, missing, quiet, sides, speed, unusual
from benchmarks.suite import option
from foredraft.estimates import Spread, turned

COPIES, FIRST, INT4 = "copies", "first token", "int4"
OURS, OUR_LOOKUP, OUR_INT4, THEIR_INT4 = "foredraft plain", "foredraft lookup, auto", "foredraft plain, int4", "llamacpp plain, int4"
HEAD = f"{INT4}, head in int8"
OUR_HEAD = f"foredraft plain, {HEAD}"
VLLM, OPENVINO = "vllm plain", "openvino"
DTYPE, BITS = "bfloat16", "q4_0"
PROMPTS, PROMPT, COPIED = 2, 48, 96  # of a scenario; tokens of a prompt, and of one that is copied from
ROWS = 16
LONG, LONG_REPEATS = 1024, 2  # tokens of a prompt that is read at the end, and how often after a warm-up
SECONDS = 1.0  # of passes of one size, in a turn
# Least, or most, by whether the shape has experts.
OVER, SHARE = {False: 1.3, True: 1.2}, {False: 0.8, True: 0.7}
NEAR, ENOUGH, NEVER = 0.65, 0.85, 1.0  # of read bandwidth: the best peer above which our share counts, that share, and what is left of OVER
PASS, COPYING, LATER, FOUR_BITS, FOUR_BITS_OVER, BATCHED, GUESSING = 1.3, 1.5, 1.05, 0.85, 1.1, 1.2, 0.98

Value = Callable[[Measurement], float | None]


@dataclass(frozen=True)
class Settings(speed_plan.Settings):
    """What is run, besides what the speed suite's settings say."""

    targets: tuple[str, ...] = option(tuple(SHAPES), f"A shape, or NAME{families_shapes.TEST} for a tiny one.", flag="--shape")
    draft: str = ""
    dtypes: tuple[str, ...] = (DTYPE,)
    batches: tuple[int, ...] = (1,)
    rules: tuple[str, ...] = (AUTO,)
    modes: tuple[str, ...] = (PLAIN, LOOKUP)
    drafters: tuple[str, ...] = ()
    peers: tuple[str, ...] = option(PEERS, "Who else takes part.", flag="--peer")
    lengths: tuple[int, ...] = option((5, 10), "γ of the peers' lookups; the best counts.", least=1, flag="--gamma")
    shapes: tuple[str, ...] = (AUTO,)
    contexts: tuple[int, ...] = option((512, 4000), "Tokens of prompts whose first token is waited for.", least=2, flag="--context")
    prompts: tuple[str, ...] = ()
    limit: int | None = None
    chat: bool = False
    tokens: int = option(32, "New tokens per row.")
    repeats: int = option(3, "Measured calls.", least=1)
    temperature: float = 0.0
    worst: bool = False
    timeout: float = option(300.0, "Seconds after which a call has failed.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.targets:
            families_shapes.find(name)

    @property
    def room(self) -> int:
        """Tokens of the longest text."""
        return max(*self.contexts, 2 * COPIED) + self.tokens + 64


@dataclass(frozen=True)
class Pass:
    """Mean seconds of a pass over a chain of ``nodes`` differing tokens, in one repeat."""

    target: str
    method: str
    nodes: int
    repeat: int
    seconds: float


def plain_methods(settings: Settings) -> list[Method]:
    """Ours also with a planner, which has nothing to guess here."""
    return [*(each for side in (FOREDRAFT, *settings.peers) for each in theirs(settings, side, PLAIN)), Method(FOREDRAFT, LOOKUP, AUTO)]


def copying_methods(settings: Settings) -> list[Method]:
    return [Method(FOREDRAFT, LOOKUP, AUTO), *(each for side in settings.peers for each in theirs(settings, side, LOOKUP))]


def narrow_methods(settings: Settings) -> list[Method]:
    """The file that llama.cpp makes is read on both sides; beside OpenVINO, each side makes its own weights."""
    found = []
    if "llamacpp" in settings.peers:
        file = (("gguf_file", f"../llamacpp/{BITS}.gguf"),)
        found += [
            Method("llamacpp", PLAIN, INT4, weights=BITS),
            Method(FOREDRAFT, PLAIN),
            Method(FOREDRAFT, PLAIN, INT4, options=file, weights=BITS),
        ]
    if OPENVINO in settings.peers:
        found += [replace(each, setting=f"{each.setting}, {HEAD}", weights=INT4) for each in theirs(settings, OPENVINO, PLAIN)]
        found.append(Method(FOREDRAFT, PLAIN, HEAD, options=(("quantization", INT4), ("head", "int8")), weights=INT4))
    return found


def plain_cells(settings: Settings, made: Made, methods: Sequence[Method]) -> Iterator[Cell]:
    """Random tokens, and at the end one of the walk: text goes on along it."""
    generator = random.Random(0)

    def prompt(length: int, at: int) -> tuple[int, ...]:
        tokens = range(families_shapes.SPECIAL, made.shape.values["vocab_size"])
        return (*(generator.choice(tokens) for _ in range(length - 1)), made.walk[at % (len(made.walk) - settings.tokens)])

    plain = tuple(each.name for each in methods if each.mode == PLAIN)
    for index in range(PROMPTS):
        everyone = tuple(each.name for each in methods)
        yield Cell(TEXT, index, TEXT, (prompt(PROMPT, index * settings.tokens),), settings.tokens, 0.0, everyone)
    rows = tuple(prompt(PROMPT, row * len(made.walk) // ROWS) for row in range(ROWS))
    yield Cell(BATCH, 0, BATCH, rows, settings.tokens, 0.0, tuple(name for name in (OURS, VLLM) if name in plain))
    for index, length in enumerate(sorted(settings.contexts)):
        yield Cell(FIRST, index, str(length), (prompt(length, 0),), 1, 0.0, plain)


def copying_cells(settings: Settings, made: Made, methods: Sequence[Method]) -> Iterator[Cell]:
    """A piece of the walk, and its first token again."""
    for index in range(PROMPTS):
        piece = made.walk[index * COPIED : (index + 1) * COPIED]
        yield Cell(COPIES, index, COPIES, ((*piece, piece[0]),), settings.tokens, 0.0, tuple(each.name for each in methods))


def narrow_cells(settings: Settings, made: Made, methods: Sequence[Method]) -> Iterator[Cell]:
    names = tuple(each.name for each in methods)
    return (
        replace(cell, scenario=INT4, category=INT4, methods=names) for cell in plain_cells(settings, made, methods) if cell.scenario == TEXT
    )


PARTS = ((plain_methods, plain_cells), (copying_methods, copying_cells), (narrow_methods, narrow_cells))


class FamilyBlock(Block):
    """One part of one shape."""

    def __init__(self, run: Families, made: Made, methods: list[Method], cells: Callable[..., Iterator[Cell]]):
        super().__init__(run, made, None, DTYPE)
        self.run_: Families = run
        self.made, self.methods, self.make = made, methods, cells

    def everyone(self) -> list[Method]:
        return self.methods

    def _texts(self) -> tuple[list[tuple[str, list[int]]], int]:
        return [(TEXT, [0] * PROMPT)], self.made.shape.values["vocab_size"]

    def cells(self, texts: Sequence[tuple[str, Sequence[int]]], vocabulary: int) -> list[Cell]:
        return list(self.make(self.settings, self.made, self.methods))

    def _warm_up(self, calls: Sequence[Cell]) -> None:
        super()._warm_up([cell for cell in calls if len(cell.ids[0]) < LONG])

    def _measure(self, name: str, cell: Cell, repeat: int) -> None:
        """Long prompts last, their warm-ups too: whoever takes too long for them has made its other calls."""
        if len(cell.ids[0]) < LONG:
            super()._measure(name, cell, repeat)
        elif repeat == self.repeats - 1:
            with self._attempt(name, "warm-up"):
                self._ask(name, cell.ids, cell.tokens, cell.temperature)
            for again in range(LONG_REPEATS):
                if name in self.at:
                    super()._measure(name, cell, again)

    def _curve(self, repeat: int, context: int) -> None:
        """Passes over one token and several, of plain methods of ours."""
        for name in [name for name in (OURS, OUR_INT4) if name in self.at and self.make is not copying_cells]:
            for nodes in turned(list(NODES), repeat):
                with self._attempt(name, "passes"):
                    seconds = self.processes[self.at[name][1]].ask(
                        "passes", limit=self.settings.timeout, name=name, nodes=nodes, seconds=SECONDS
                    )
                    self.run_.passes.append(Pass(self.made.source, name, nodes, repeat, seconds))


class Families(PeerSuite[Settings]):
    """Models of several architectures with random weights: decoding speed beside transformers, vLLM, llama.cpp and OpenVINO GenAI.

    Peers that are not installed (make peers) are named in one line. Exits with 1 when something that is installed failed: a peer
    that does not take a shape counts.
    """

    name = "families"
    title = "Architectures: decoding speed beside peers"
    settings_type = Settings
    quick: ClassVar[Mapping[str, Any]] = {
        "targets": ("qwen3-test", "qwen3_moe-test"), "contexts": (64,), "tokens": 8, "repeats": 1, "lengths": (5,)
    }  # fmt: skip
    passes: list[Pass]
    narrow_bytes: dict[str, int]  # that a pass of ours over one token reads of weights of four bits
    touched: dict[str, list[float]]  # distinct experts of a layer, by shape, of chains of NODES

    def everyone(self) -> list[Method]:
        return list({each.name: each for methods, _ in PARTS for each in methods(self.settings)}.values())

    @property
    def steps(self) -> int:
        settings = self.settings
        small = Made("", Path(), "", tuple(range(families_shapes.WALK)), None, families_shapes.find("qwen3"))
        count = 0
        for methods, cells in PARTS:
            count += len(methods(settings)) + settings.repeats * sum(
                len(cell.methods) for cell in cells(settings, small, methods(settings))
            )
        return count * len(settings.targets)

    def options(self, method: Method, target: Any) -> dict[str, Any]:
        room = {"context": self.settings.room, "rows": ROWS} if method.side in ("vllm", "llamacpp") else {}
        return {**super().options(method, target), **room}

    def run(self) -> None:
        """Shape by shape; a run that is interrupted has what was measured until then."""
        settings = self.settings
        torch.set_num_threads(settings.threads)
        self.methods = self.everyone()
        try:
            for name in settings.targets:
                made = families_shapes.written(name, settings.work_folder)
                self.bytes_per_pass[f"{name} {DTYPE}"] = made.pass_bytes
                if made.touched:
                    self.touched[name] = list(made.touched)
                for methods, cells in PARTS:
                    if methods(settings):
                        FamilyBlock(self, made, methods(settings), cells).run()
                file = made.path.parent / "llamacpp" / f"{BITS}.gguf"
                if file.exists() and any((each.target, each.method) == (name, OUR_INT4) for each in self.measurements):
                    self.narrow_bytes[name] = narrow_bytes(file)
        except KeyboardInterrupt:
            self.failures.append(Failure(name, DTYPE, "the run", "measurement", "interrupted; what follows was not measured"))

    # -- what is reported -----------------------------------------------------------------------------------------------

    def figures(self) -> list[Figure]:
        return [figure for name in self.settings.targets for figure in Findings(self, name).figures() if figure.spread is not None]

    def tables(self) -> list[Table]:
        made = [figures(self.figures()), self._passes(), *failed(self)]
        for name, scenario, category in dict.fromkeys((each.target, each.scenario, each.category) for each in self.measurements):
            calls = [each for each in self.measurements if (each.target, each.scenario, each.category) == (name, scenario, category)]
            title = f"{scenario} behind {category} tokens" if scenario == FIRST else f"{ROWS} rows" if scenario == BATCH else scenario
            made.append(speed(f"{name}: {title}", Calls(calls)))
        return made

    def _passes(self) -> Table:
        rows = []
        for name in self.settings.targets:
            found = Findings(self, name)
            for method in (OURS, OUR_INT4):
                if (spread := found.pass_quotient(method)) is not None:
                    seconds = [median(found.pass_seconds(method, nodes).values()) for nodes in NODES]
                    touched = "—" if name not in self.touched else " and ".join(f"{each:.1f}" for each in self.touched[name])
                    rows.append(
                        (
                            f"{name}, {INT4 if method == OUR_INT4 else DTYPE}",
                            *(f"{each * 1e3:.1f}" for each in seconds),
                            spread.text(),
                            touched,
                        )
                    )
        columns = ("shape", *(f"{nodes} nodes, ms" for nodes in NODES), "quotient", "distinct experts of a layer")
        return Table("Passes over chains of differing tokens", columns, rows)

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        settings = self.settings
        return [
            f"Methods, each in a process and environment of its own: {sides(self) or 'none started'}.",
            f"Shapes {', '.join(settings.targets)} with random weights; {DTYPE}, and so the cache; greedy, {settings.tokens} new tokens a "
            f"row, end of text ignored, {settings.repeats} repeats in turns after a warm-up, {settings.threads} threads. Prompts of {LONG} "
            f"tokens and more are read at the end, {LONG_REPEATS} times after a warm-up.",
            "Random weights soon repeat one token; such text needs the same experts in every pass, and every lookup guesses it. So the "
            f"output embeddings of {families_shapes.WALK} tokens are set so that each is by far the likeliest behind the one before, and "
            f"attention writes {families_shapes.SHARE:g} of what it would, experts {families_shapes.OF_EXPERTS:g}. Plain text begins with "
            f"{PROMPT} random tokens and goes on with these: they differ, and no lookup can guess them. Text that copies has {COPIED} of "
            "them in its prompt, and goes on with them again: every drafted token is kept by everybody, so it says how fast copying is at "
            "best. Rows of a batch write different "
            "tokens. The tables say whose text is not that of its own plain decoding.",
            "Ratios are medians over the turns of a run, with the smallest and the largest. The best peer has the best median; of lookups, "
            "the best of its settings. Peers' plain decoding is not repeated on text that copies. Bytes of a pass are those of the weights "
            f"that it reads, of experts the active ones. Where the best peer is above {NEAR} of read bandwidth, plain decoding is to be at "
            f"{ENOUGH} of it, and not below the peer.",
            f"{INT4}: llama.cpp's {BITS.upper()} file, which both sides read, its output layer in six bits; bytes are those of the file. "
            "Beside OpenVINO both sides make four bits in groups of 32, and an output layer in eight bits with a scale per row.",
            missing(self),
            unusual(self),
            memory(self),
            quiet(self),
        ]


class Findings:
    """What the project promises for one shape."""

    def __init__(self, run: Families, name: str):
        self.run, self.name = run, name
        self.routed = families_shapes.find(name).routed
        self.size = run.bytes_per_pass.get(f"{name} {DTYPE}")

    @cached_property
    def reads(self) -> dict[tuple[int, int], float]:
        return {(each.index, each.repeat): each.rate for each in self.run.reads if each.target == self.name}

    def values(self, scenario: str, category: str, value: Value) -> dict[str, dict[tuple[int, int], float]]:
        """By method and turn; methods that made every call."""
        found: dict[str, dict[tuple[int, int], float]] = {}
        for each in self.run.measurements:
            if (each.target, each.scenario, each.category) == (self.name, scenario, category) and (said := value(each)):
                found.setdefault(each.method, {})[each.index, each.repeat] = said
        most = max(map(len, found.values()), default=0)
        return {name: turns for name, turns in found.items() if len(turns) == most}

    def over(
        self, figure: str, scenario: str, value: Value, ours: str, peers: Sequence[str] = (), *, low: float | None = None,
        high: float | None = None, category: str = "", factor: float = 1.0,
    ) -> Figure:  # fmt: skip
        """``factor`` times ours over the best of ``peers``, turn by turn; where less is better, ``high`` is given and not ``low``."""
        found = self.values(scenario, category or scenario, value)
        there = [name for name in peers if name in found]
        if ours not in found or not there:
            return Figure(f"{self.name}: {figure}", None, low, high)
        other = (max if high is None else min)(there, key=lambda name: median(found[name].values()))
        how = f"{ours} {median(found[ours].values()):.4g}, {other} {median(found[other].values()):.4g}"
        return Figure(f"{self.name}: {figure}", quotient(found[ours], found[other], factor), low, high, how)

    def share(self, name: str) -> Spread | None:
        """Of read bandwidth, in plain decoding."""
        found = self.values(TEXT, TEXT, decoding).get(name)
        if found is None or not self.size or not found.keys() & self.reads.keys():
            return None
        return quotient(found, self.reads, self.size)

    def figures(self) -> Iterator[Figure]:
        peers = [each.name for each in self.run.methods if each.side != FOREDRAFT]
        plain = [name for name in peers if self.run.by_name[name].mode == PLAIN and not self.run.by_name[name].weights]
        near = any(share.median > NEAR for share in map(self.share, plain) if share)
        low = NEVER if near else OVER[self.routed]
        yield self.over("plain tokens/s behind the first token, over the best peer", TEXT, decoding, OURS, plain, low=low)
        yield Figure(f"{self.name}: share of read bandwidth, plain", self.share(OURS), ENOUGH if near else SHARE[self.routed])
        if not self.routed:
            yield Figure(f"{self.name}: a pass over {NODES[1]} nodes, over one", self.pass_quotient(OURS), high=PASS)
        yield self.over("prompt lookup on text that copies, over the best peer's", COPIES, rate, OUR_LOOKUP, peers, low=COPYING)
        behind = "prompt lookup on text that copies, behind the first token, over the best peer's"
        yield self.over(behind, COPIES, decoding, OUR_LOOKUP, peers, low=COPYING)
        for length in map(str, self.run.settings.contexts):
            name = f"seconds to the first token behind {length} tokens, over the best peer"
            yield self.over(name, FIRST, lambda each: each.seconds, OURS, plain, high=LATER, category=length)
        yield self.over(f"{ROWS} rows, tokens/s over vLLM's", BATCH, rate, OURS, [VLLM], low=BATCHED)
        if self.size and self.name in self.run.narrow_bytes:
            factor = self.run.narrow_bytes[self.name] / self.size
            name = f"{INT4} over {DTYPE}, plain tokens/s, of the quotient of bytes read ({1 / factor:.2f})"
            yield self.over(name, INT4, decoding, OUR_INT4, [OURS], low=FOUR_BITS, factor=factor)
        yield self.over(f"{INT4} over llama.cpp's, plain tokens/s, same file", INT4, decoding, OUR_INT4, [THEIR_INT4], low=FOUR_BITS_OVER)
        theirs = [name for name in peers if name.startswith(OPENVINO) and name.endswith(HEAD)]
        name = f"{INT4} over OpenVINO's, plain tokens/s, same groups, head in int8"
        yield self.over(name, INT4, decoding, OUR_HEAD, theirs, low=FOUR_BITS_OVER)
        yield self.over("auto drafting over plain, text that cannot be guessed", TEXT, rate, OUR_LOOKUP, [OURS], low=GUESSING)

    def pass_seconds(self, method: str, nodes: int) -> dict[int, float]:
        """By repeat."""
        return {
            each.repeat: each.seconds for each in self.run.passes if (each.target, each.method, each.nodes) == (self.name, method, nodes)
        }

    def pass_quotient(self, method: str) -> Spread | None:
        one, several = (self.pass_seconds(method, nodes) for nodes in NODES)
        return quotient(several, one) if one.keys() & several.keys() else None


def quotient(above: Mapping[Any, float], below: Mapping[Any, float], factor: float = 1.0) -> Spread:
    return Spread.of([factor * above[turn] / below[turn] for turn in above if turn in below])


def rate(each: Measurement) -> float:
    return each.tokens / each.seconds


def decoding(each: Measurement) -> float | None:
    """Tokens per second behind the first one."""
    later = later_tokens(each)
    return later / (each.seconds - each.times[0]) if later else None


def narrow_bytes(file: Path) -> int:
    """Of ``file`` that a pass over one token reads: of experts the active ones, and not the embeddings, unless they are the output layer
    too."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    numbers = {name.partition(".")[2]: field.contents() for name, field in reader.fields.items() if ".expert_" in name}
    active = numbers["expert_used_count"] / numbers["expert_count"] if "expert_count" in numbers else 1.0
    tensors = {each.name: int(each.n_bytes) for each in reader.tensors}
    if "output.weight" in tensors:
        del tensors["token_embd.weight"]
    return round(sum(size * (active if "_exps." in name else 1.0) for name, size in tensors.items()))
