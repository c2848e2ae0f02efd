"""The kernels suite: what a pass takes in each execution and kind of weights, by rows, nodes and context.

Every configuration is a target of its own, loaded by name; they take turns, pass by pass, in an order that turns from repeat to
repeat. Large reads beside them say how fast memory was at the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.overhead import turned
from benchmarks.overhead_report import machine
from benchmarks.passes import synchroniser
from benchmarks.report import Table
from benchmarks.verdicts import Spread
from foredraft.errors import ConfigurationError
from foredraft.loading import load_model
from foredraft.target import Target
from foredraft.tree import TokenTree

SCHEMA = 1
SUITE = "kernels"
TITLE = "Passes by execution and kind of weights"
READ = 400 << 20  # bytes of the large read
CONFIGURATIONS = (
    "float32/eager float32/packed float32/auto bfloat16/eager bfloat16/packed bfloat16/auto int8,float32/auto int8,bfloat16/eager "
    "int8,bfloat16/auto"
)


@dataclass(frozen=True)
class Settings:
    """What is run. ``configurations`` are WEIGHTS/EXECUTION, weights a dtype or ``int8,`` and the dtype of everything else; ``passes``
    are ROWSxNODES, chains behind each of ``contexts`` tokens."""

    target: str = "zoo:python-300m"
    configurations: str = CONFIGURATIONS
    passes: str = "1x1 1x6 1x17 1x64 4x1 4x4 16x1 16x3"
    contexts: str = "64 400"
    device: str = "cpu"
    threads: int = 2
    repeats: int = 7


@dataclass(frozen=True)
class Configuration:
    """One way of running the target."""

    dtype: str
    quantization: str | None
    execution: str

    @staticmethod
    def parse(text: str) -> Configuration:
        """Raises ConfigurationError where ``text`` is not WEIGHTS/EXECUTION."""
        weights, slash, execution = text.partition("/")
        quantization, comma, dtype = weights.rpartition(",")
        if not (slash and dtype and execution):
            raise ConfigurationError(
                f"a configuration is WEIGHTS/EXECUTION, for instance bfloat16/auto or int8,bfloat16/auto; got {text!r}"
            )
        return Configuration(dtype, quantization if comma else None, execution)


@dataclass(frozen=True)
class Measurement:
    """Seconds of a pass over ``rows`` x ``nodes`` behind ``context`` tokens; ``nodes`` 0 stands for reading the context itself."""

    configuration: str
    rows: int
    nodes: int
    context: int
    repeat: int
    seconds: float


class Run:
    """One run of the suite; ``advance`` is called after each step of ``steps``.

    Raises:
        ConfigurationError: passes, contexts or configurations that do not read, or a target that cannot have them.
    """

    def __init__(self, settings: Settings, advance: Callable[[], None] = lambda: None, *, clock: Callable[[], float] = time.perf_counter):
        self.settings, self.advance, self.clock = settings, advance, clock
        try:
            self.contexts = [int(each) for each in settings.contexts.split()]
            self.passes = [(int(rows), int(nodes)) for rows, nodes in (each.split("x") for each in settings.passes.split())]
        except ValueError as error:
            raise ConfigurationError(f"passes are ROWSxNODES such as 16x3, and contexts numbers of tokens: {error}") from None
        self.configurations = {text: Configuration.parse(text) for text in settings.configurations.split()}
        self.measurements: list[Measurement] = []
        self.reads: list[float] = []
        self.executions: dict[str, str] = {}

    @property
    def steps(self) -> int:
        return len(self.configurations) + len(self.contexts) * len({rows for rows, _ in self.passes})

    @torch.inference_mode()
    def run(self) -> None:
        torch.set_num_threads(self.settings.threads)
        targets = {}
        for name, each in self.configurations.items():
            model = load_model(self.settings.target, dtype=each.dtype, device=self.settings.device, quantization=each.quantization)
            targets[name] = Target(model, execution=each.execution, owned=True, reuse_prefix=False)
            self.executions[name] = targets[name].execution
            self.advance()
        for context in self.contexts:
            for rows in dict.fromkeys(rows for rows, _ in self.passes):
                self._measure(targets, context, rows)
                self.advance()
        for target in targets.values():
            target.close()

    def _measure(self, targets: dict[str, Target], context: int, rows: int) -> None:
        """All passes of so many rows behind one context."""
        wait = synchroniser(torch.device(self.settings.device))
        generator = torch.Generator().manual_seed(0)
        for name, target in targets.items():
            texts = torch.randint(0, target.vocab_size, (rows, context), generator=generator).tolist()
            target.open(texts, reserve=[context + max(nodes for _, nodes in self.passes) + 1] * rows)
            self._timed(wait, name, rows, 0, context, 0, lambda target=target, texts=texts: target.prefill(texts, first=0))  # type: ignore[misc]
        for nodes in (nodes for each, nodes in self.passes if each == rows):
            tree = TokenTree.from_chain(torch.arange(nodes, device=self.settings.device).expand(rows, nodes).contiguous())
            for repeat in range(self.settings.repeats + 1):  # the first is the warm-up
                for name in turned(list(targets), repeat):
                    self._timed(wait, name, rows, nodes, context, repeat, lambda name=name, tree=tree: targets[name].score(tree))  # type: ignore[misc]
            self.reads.append(self._read())
        for target in targets.values():
            target.release()

    def _timed(
        self, wait: Callable[[], None], name: str, rows: int, nodes: int, context: int, repeat: int, call: Callable[[], Any]
    ) -> None:
        wait()
        begin = self.clock()
        call()
        wait()
        seconds = self.clock() - begin
        if repeat or not nodes:
            self.measurements.append(Measurement(name, rows, nodes, context, repeat, seconds))

    def _read(self) -> float:
        """Bytes per second of a large read by as many threads."""
        buffer = torch.rand(READ // 4, device=self.settings.device)
        buffer.sum()
        begin = self.clock()
        buffer.sum().item()
        return READ / (self.clock() - begin)


# -- what is reported -----------------------------------------------------------------------------------------------------


def of(run: Run, name: str, rows: int, nodes: int, context: int) -> Spread:
    found = [
        each.seconds
        for each in run.measurements
        if (each.configuration, each.rows, each.nodes, each.context) == (name, rows, nodes, context)
    ]
    return Spread.of(found)


def document(run: Run, *, command: str, environment: dict[str, Any]) -> dict[str, Any]:
    """Everything about a run as plain values."""
    return {
        "schema": SCHEMA,
        "suite": SUITE,
        "command": command,
        "environment": environment,
        "settings": asdict(run.settings),
        "executions": run.executions,
        "reads": run.reads,
        "measurements": [asdict(each) for each in run.measurements],
    }


def tables(run: Run) -> list[Table]:
    made = []
    for context in run.contexts:
        columns = ("weights/execution", "in use", *(f"{rows}×{nodes}" for rows, nodes in run.passes), "reading, per token")
        lines = []
        for name in run.configurations:
            cells = [_milliseconds(of(run, name, rows, nodes, context)) for rows, nodes in run.passes]
            most = max(rows for rows, _ in run.passes)
            reading = of(run, name, most, 0, context).median / (most * context)
            lines.append((name, run.executions[name], *cells, f"{reading * 1e3:.2f}"))
        made.append(Table(f"Milliseconds per pass, rows × nodes, behind {context} tokens", columns, lines))
    return made


def _milliseconds(spread: Spread) -> str:
    return f"{spread.median * 1e3:.1f} ({spread.low * 1e3:.1f})"


def notes(run: Run, *, command: str, environment: dict[str, Any]) -> Sequence[str]:
    settings, reads = run.settings, sorted(run.reads)
    return [
        f"`{command}`",
        machine(environment),
        f"{settings.target}; medians of {settings.repeats} passes that took turns, after a warm-up, with the shortest in brackets. "
        "Reading a context was timed once, in the largest batch.",
        f"Large reads beside the passes: {reads[len(reads) // 2] / 1e9:.0f} GB/s ({reads[0] / 1e9:.0f}–{reads[-1] / 1e9:.0f}). "
        "The machine is shared: compare within a column.",
    ]
