"""The kernels suite: what a pass takes in each execution and kind of weights, by rows, nodes and context; and what one product takes
beside libraries.

Every configuration is a target of its own, loaded by name; they take turns, pass by pass, in an order that turns from repeat to
repeat. Large reads beside them say how fast memory was at the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import libraries, peer_process, suite, xnnpack
from benchmarks.libraries import Timing
from benchmarks.passes import synchroniser
from benchmarks.report import Table
from benchmarks.suite import Suite, option
from benchmarks.xnnpack import Xnnpack
from foredraft.backends import native
from foredraft.errors import ConfigurationError
from foredraft.estimates import Spread, turned
from foredraft.loading import load_model
from foredraft.target import Target
from foredraft.tree import TokenTree

READ = 400 << 20  # bytes of the large read
CONFIGURATIONS = (
    "float32/eager float32/packed float32/auto bfloat16/eager bfloat16/packed bfloat16/auto int8,float32/auto int8,bfloat16/eager "
    "int8,bfloat16/auto"
)


@dataclass(frozen=True)
class Settings(suite.Settings):
    target: str = option("zoo:python-300m", "A path, a hub id or zoo:NAME.")
    configurations: str = option(CONFIGURATIONS, "WEIGHTS/EXECUTION, separated by spaces; int8,DTYPE for weights of eight bits.")
    passes: str = option("1x1 1x6 1x17 1x64 4x1 4x4 16x1 16x3", "ROWSxNODES, separated by spaces: chains.")
    contexts: str = option("64 400", "Tokens in front, separated by spaces.")
    products: str = option(
        "2048x2048 8192x2048 2048x8192",
        "OUTPUTSxINPUTS of products beside libraries; empty for none.",
    )
    tokens: str = option("1 4 8 16 64 256", "Tokens of these products, separated by spaces.")
    repeats: int = option(7, "Measured repeats, after the warm-up.", least=1)
    peers_path: Path | None = option(
        None,
        "Folder with XNNPACK (make peer-xnnpack), which is left out if it is not there; $FOREDRAFT_PEERS or .peers unless given.",
        flag="--peers",
        place=True,
    )

    def __post_init__(self) -> None:
        try:
            given = self.sizes, self.lengths, self.counts if self.matrices else [1]
        except ValueError as error:
            raise ConfigurationError(
                f"passes are ROWSxNODES such as 16x3, products OUTPUTSxINPUTS, contexts and tokens numbers of tokens: {error}"
            ) from None
        if not (all(given) and self.parsed):
            raise ConfigurationError("--passes, --contexts, --configurations and --tokens name one each at least")

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return pairs(self.passes)

    @property
    def matrices(self) -> list[tuple[int, int]]:
        return pairs(self.products)

    @property
    def counts(self) -> list[int]:
        return [int(each) for each in self.tokens.split()]

    @property
    def lengths(self) -> list[int]:
        return [int(each) for each in self.contexts.split()]

    @property
    def parsed(self) -> dict[str, Configuration]:
        return {text: Configuration.parse(text) for text in self.configurations.split()}


def pairs(text: str) -> list[tuple[int, int]]:
    """Those of ``"1x2 3x4"``."""
    return [(int(one), int(other)) for one, other in (each.split("x") for each in text.split())]


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


class Kernels(Suite[Settings]):
    """What a pass takes in each execution and kind of weights, side by side."""

    name = "kernels"
    title = "Passes by execution and kind of weights"
    settings_type = Settings
    measurements: list[Measurement]
    timings: list[Timing]  # of products
    reads: list[float]  # bytes per second
    executions: dict[str, str]  # in use, by configuration

    @property
    def steps(self) -> int:
        settings = self.settings
        return (
            len(settings.parsed)
            + len(settings.lengths) * len({rows for rows, _ in settings.sizes})
            + len(settings.matrices) * len(libraries.KINDS)
        )

    @torch.inference_mode()
    def run(self) -> None:
        settings, targets = self.settings, {}
        torch.set_num_threads(settings.threads)
        for name, each in settings.parsed.items():
            model = load_model(settings.target, dtype=each.dtype, device=settings.device, quantization=each.quantization)
            targets[name] = Target(model, execution=each.execution, owned=True, reuse_prefix=False)
            self.executions[name] = targets[name].execution
            self.advance()
        for context in settings.lengths:
            for rows in dict.fromkeys(rows for rows, _ in settings.sizes):
                self._measure(targets, context, rows)
                self.advance()
        while targets:
            targets.popitem()[1].close()
        if settings.device != "cpu" or native.refusal(torch.bfloat16) is not None:
            return
        library = xnnpack.found(settings.peers_path or peer_process.folder())
        beside = Xnnpack(library, settings.threads) if library else None
        for found in libraries.timings(settings.matrices, settings.counts, settings.repeats, beside):
            self.timings += found
            self.advance()

    def _measure(self, targets: dict[str, Target], context: int, rows: int) -> None:
        """All passes of so many rows behind one context."""
        wait = synchroniser(torch.device(self.settings.device))
        generator = torch.Generator().manual_seed(0)
        for name, target in targets.items():
            texts = torch.randint(0, target.vocab_size, (rows, context), generator=generator).tolist()
            target.open(texts, reserve=[context + max(nodes for _, nodes in self.settings.sizes) + 1] * rows)
            self._timed(wait, name, rows, 0, context, 0, lambda target=target, texts=texts: target.prefill(texts, first=0))  # type: ignore[misc]
        for nodes in (nodes for each, nodes in self.settings.sizes if each == rows):
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
        begin = time.perf_counter()
        call()
        wait()
        seconds = time.perf_counter() - begin
        if repeat or not nodes:
            self.measurements.append(Measurement(name, rows, nodes, context, repeat, seconds))

    def _read(self) -> float:
        """Bytes per second of a large read by as many threads."""
        buffer = torch.rand(READ // 4, device=self.settings.device)
        buffer.sum().item()
        begin = time.perf_counter()
        buffer.sum().item()
        return READ / (time.perf_counter() - begin)

    # -- what is reported -----------------------------------------------------------------------------------------------

    def of(self, *key: Any) -> Spread:
        """Seconds of passes by configuration, rows, nodes and context."""
        return Spread.of([each.seconds for each in self.measurements if (each.configuration, each.rows, each.nodes, each.context) == key])

    def tables(self) -> list[Table]:
        made, sizes = [], self.settings.sizes
        most = max(rows for rows, _ in sizes)
        for context in self.settings.lengths:
            columns = ("weights/execution", "in use", *(f"{rows}×{nodes}" for rows, nodes in sizes), "reading, per token")
            lines = []
            for name, execution in self.executions.items():
                spreads = [self.of(name, rows, nodes, context) for rows, nodes in sizes]
                cells = [f"{each.median * 1e3:.1f} ({each.low * 1e3:.1f})" for each in spreads]
                reading = self.of(name, most, 0, context).median / (most * context)
                lines.append((name, execution, *cells, f"{reading * 1e3:.2f}"))
            made.append(Table(f"Milliseconds per pass, rows × nodes, behind {context} tokens", columns, lines))
        return made + libraries.tables(self.timings)

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        settings, reads = self.settings, sorted(self.reads)
        return [
            f"{settings.target}; medians of {settings.repeats} passes that took turns, after a warm-up, with the shortest in brackets. "
            "Reading a context was timed once, in the largest batch.",
            f"Large reads beside the passes: {reads[len(reads) // 2] / 1e9:.0f} GB/s ({reads[0] / 1e9:.0f}–{reads[-1] / 1e9:.0f}). "
            "The machine is shared: compare within a column.",
            *([libraries.NOTE] if self.timings else []),
        ]
