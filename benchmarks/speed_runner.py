"""Calls in turns: Foredraft and the peers that a user would pick instead, in one run; of the speed suite and of the drafters suite.

Every method works in a process of its own environment and continues the same prompts by the same number of tokens, end of text
ignored. They take turns, call by call, in an order that rotates, after warm-up calls of each; while one computes the others are
stopped, which is checked. Memory's speed is measured next to the calls that it explains. What fails is a row that says so and has
no figures.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from benchmarks import checkpoints, datasets
from benchmarks.checkpoints import Checkpoint
from benchmarks.datasets import Prompt
from benchmarks.peer_process import FOREDRAFT, TRANSFORMERS, Peer, PeerError, PeerProcess, find
from benchmarks.speed_calls import Curve, Measurement, Read, first_difference
from benchmarks.speed_plan import DRAFT, LAYER_SKIP, LOOKUP, PLAIN, TEXT, Cell, Method, Settings, cells, hopeless, methods
from benchmarks.suite import Suite
from foredraft.estimates import turned
from foredraft.loading import load_tokenizer

READ = 400 << 20  # bytes of the large read
READS = 3  # at a time, after one that wakes the threads; their median counts
# Tokens that a method reads and writes before each call: caches then hold what it needs, not what the one before needed.
SOME, FEW = 16, 4
REST = 0.03  # seconds between calls, for whatever the last one left to the system
CURVE_REPEATS = 3


Launch = Callable[[Peer, Path], Any]


@dataclass(frozen=True)
class Failure:
    """What could not be measured, and why."""

    target: str
    dtype: str
    method: str
    stage: str
    message: str


P = TypeVar("P", bound=Settings)


class PeerSuite(Suite[P]):
    """A suite whose methods work in processes of their own.

    Args:
        clock: seconds, for the large read.
        launch: starts a peer's process; another one than the default only in tests.
    """

    measurements: list[Measurement]
    failures: list[Failure]
    reads: list[Read]
    curves: list[Curve]
    methods: list[Method]  # everyone who took part
    categories: list[str]  # of the prompts
    turns: int  # of all prompts
    versions: dict[str, dict[str, str]]
    method_notes: dict[str, str]
    bytes_per_pass: dict[str, int | None]  # by target and dtype

    def __init__(
        self,
        settings: P,
        advance: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        launch: Launch | None = None,
    ):
        super().__init__(settings, advance)
        self.clock, self.launch = clock, launch or self._launch

    @property
    def by_name(self) -> dict[str, Method]:
        return {each.name: each for each in self.methods}

    @cached_property
    def prompts(self) -> list[Prompt]:
        return self.read_prompts()

    def read_prompts(self) -> list[Prompt]:
        return [prompt for source in self.settings.prompts for prompt in datasets.read(source, self.settings.limit)]

    def everyone(self) -> list[Method]:
        """All methods; plain ones first."""
        return [*methods(self.settings), *(hopeless(self.settings) if self.settings.worst else [])]

    def cells(self, texts: Sequence[tuple[str, Sequence[int]]], everyone: Sequence[Method], vocabulary: int) -> list[Cell]:
        """All calls of one repeat; ``texts`` are prompts as (category, ids)."""
        return cells(self.settings, texts, everyone, vocabulary)

    def options(self, method: Method, target: Checkpoint) -> dict[str, Any]:
        """What its adapter is told besides."""
        return dict(method.options)

    @property
    def steps(self) -> int:
        """Measured and warm-up calls, if nobody fails; a rough count, for a progress bar."""
        texts = [("", [0, 0]) for prompt in self.prompts for _ in prompt.turns]
        everyone = self.everyone()
        calls = sum(len(cell.methods) for cell in self.cells(texts, everyone, 2)) * self.settings.repeats
        return (calls + len(everyone)) * len(self.settings.targets) * len(self.settings.dtypes)

    @property
    def reference(self) -> str:
        """Whose greedy text the others' are compared with besides their own side's."""
        done = {each.method for each in self.measurements}
        return next((name for name in ("transformers plain", "foredraft plain") if name in done), "")

    def run(self) -> None:
        """Every target in every dtype, one after the other: all methods of one are in memory together."""
        settings = self.settings
        torch.set_num_threads(settings.threads)
        self.methods, self.turns = self.everyone(), sum(len(prompt.turns) for prompt in self.prompts)
        self.categories = list(dict.fromkeys(prompt.category for prompt in self.prompts))
        draft = checkpoints.written(settings.draft, settings.work_folder) if DRAFT in settings.modes else None
        for source in settings.targets:
            target = checkpoints.written(source, settings.work_folder)
            gc.collect()
            for dtype in settings.dtypes:
                self.bytes_per_pass[f"{source} {dtype}"] = checkpoints.pass_bytes(target.path, dtype)
                Block(self, target, draft, dtype).run()

    def _launch(self, peer: Peer, log: Path) -> PeerProcess:
        return PeerProcess(peer, threads=self.settings.threads, log=log)

    def failed(self) -> list[Failure]:
        """Failures of what is installed."""
        return [each for each in self.failures if "not installed: " not in each.message]


class Block:
    """One target in one dtype.

    Attributes:
        ends: whether texts end by themselves, with fewer tokens than were asked for.
        repeats: measured calls of each method with each prompt.
    """

    ends = False

    def __init__(self, run: PeerSuite[Any], target: Checkpoint, draft: Checkpoint | None, dtype: str):
        self.run_, self.settings, self.target, self.draft, self.dtype = run, run.settings, target, draft, dtype
        self.processes: dict[str, Any] = {}
        self.at: dict[str, tuple[Method, str]] = {}  # methods that are ready, and the process they are in
        self.done: list[tuple[Cell, Measurement, list[list[int]]]] = []
        self.repeats = run.settings.repeats

    def run(self) -> None:
        settings = self.settings
        try:
            for method in self.everyone():
                self._load(method)
            prompts, vocabulary = self._texts()
            calls = self.cells(prompts, vocabulary)
            self._warm_up(calls)
            for repeat in range(self.repeats):
                self._forget(self.at)  # or else it would know the texts of the repeat before
                for cell in calls:
                    for name in turned([each for each in cell.methods if each in self.at], repeat + cell.index):
                        self._measure(name, cell, repeat)
                        self.run_.advance()
                    self._between(cell, repeat)
                self._curve(repeat, sum(len(ids) for _, ids in prompts) // len(prompts) + settings.tokens // 2)
        finally:
            self.run_.measurements += self._compared()
            for process in self.processes.values():
                process.close()

    # -- getting ready --------------------------------------------------------------------------------------------------

    def everyone(self) -> list[Method]:
        return self.run_.methods

    def cells(self, texts: Sequence[tuple[str, Sequence[int]]], vocabulary: int) -> list[Cell]:
        return self.run_.cells(texts, self.everyone(), vocabulary)

    @contextmanager
    def _attempt(self, method: str, stage: str) -> Iterator[None]:
        """What fails in it is a row, and the method is out: half a method has no median."""
        try:
            yield
        except PeerError as error:
            self._failed(method, stage, error)
            self.at.pop(method, None)

    def _failed(self, method: str, stage: str, error: PeerError) -> None:
        """A row. It says what happened, and not where on this machine."""
        message = str(error)
        for path, name in ((self.settings.work_folder, "WORK"), (self.settings.peers_folder, "PEERS"), (Path.home(), "~")):
            if len(path.absolute().parts) > 1:
                message = message.replace(str(path.absolute()), name)
        self.run_.failures.append(Failure(self.target.source, self.dtype, method, stage, message))

    def _load(self, method: Method) -> None:
        settings, name = self.settings, method.name
        with self._attempt(name, "set-up"):
            peer = find(method.side, self.settings.peers_folder)
            key = method.side if peer.shared else f"{method.side} {method.mode} {method.setting}"
            if key not in self.processes:
                self._start(key, peer)
            process = self.processes[key]
            draft = checkpoints.untrained(self.draft, self.settings.work_folder) if method.hopeless and self.draft else self.draft
            told = process.ask(
                "load",
                limit=settings.patience,
                name=name,
                checkpoint=self._converted(process, method.side, self.target, method.weights or self.dtype),
                draft=self._converted(process, method.side, draft, self.dtype) if draft and method.mode == DRAFT else None,
                dtype=self.dtype,
                mode=method.mode,
                length=method.length,
                ngram=settings.ngram,
                options=self.run_.options(method, self.target),
            )
            self.at[name] = method, key
            if told.get("note"):
                self.run_.method_notes[f"{name}, {self.dtype}"] = told["note"]

    def _start(self, key: str, peer: Peer) -> None:
        room, need = available_memory(), 1.3 * (self.run_.bytes_per_pass[f"{self.target.source} {self.dtype}"] or 0)
        if room is not None and room < need:
            raise PeerError(f"not enough memory: {room / 1e9:.1f} GB are left, its weights alone take {need / 1.3e9:.1f}")
        process = self.run_.launch(peer, self.settings.work_folder / "logs" / f"{key.replace(' ', '-').replace('/', '-')}-{self.dtype}.log")
        try:
            told = process.ask(
                "start", limit=self.settings.patience, threads=self.settings.threads, device=self.settings.device, folder=str(peer.folder)
            )
        except PeerError:
            process.close()
            raise
        self.processes[key] = process
        self.run_.versions[peer.name] = told.get("versions", {})

    def _converted(self, process: Any, side: str, checkpoint: Checkpoint, weights: str) -> str:
        """The checkpoint in the side's own format, with such weights."""
        if side not in ("llamacpp", "openvino"):
            return str(checkpoint.path)
        folder = (self.settings.work_folder / checkpoint.slug / side).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return str(process.ask("prepare", limit=self.settings.patience, checkpoint=str(checkpoint.path), folder=str(folder), dtype=weights))

    def _texts(self) -> tuple[list[tuple[str, list[int]]], int]:
        """Every turn as a prompt of its own: what came before it, answered as the first method that is ready answers, and itself; and
        how many tokens there are."""
        tokenizer = load_tokenizer(str(self.target.path))
        prompts = [
            (prompt.category, ids)
            for prompt in self.run_.prompts
            for ids in datasets.conversation(prompt, tokenizer, self._answer, chat=self.settings.chat)
        ]
        return prompts, len(tokenizer)

    def _answer(self, ids: list[int]) -> list[int] | None:
        for name in list(self.at):
            with self._attempt(name, "first turn"):
                return list(self._ask(name, [ids], self.settings.tokens, self.settings.temperature)["ids"][0])
        return None

    def _warm_up(self, calls: Sequence[Cell]) -> None:
        """So many calls of each method, on prompts from the first on, and one of each other scenario that it takes part in."""
        for name in list(self.at):
            mine = [cell for cell in calls if name in cell.methods]
            first = [cell for cell in mine if cell.scenario == TEXT][: self.settings.warmups] or mine[:1]
            first += first[: self.settings.warmups - len(first)]
            with self._attempt(name, "warm-up"):
                for cell in [*first, *(cell for cell in mine if cell.scenario != TEXT)]:
                    self._ask(name, cell.ids, cell.tokens, cell.temperature)
                self.run_.advance()

    # -- measuring ------------------------------------------------------------------------------------------------------

    @cached_property
    def buffer(self) -> torch.Tensor:
        """More than most caches hold."""
        return torch.ones(READ // 4, device=self.settings.device)

    def _ask(self, name: str, ids: Any, tokens: int, temperature: float, seed: int = 0) -> dict[str, Any]:
        process = self.processes[self.at[name][1]]
        rows = [list(row) for row in ids]
        told = process.ask("generate", limit=self.settings.timeout, name=name, ids=rows, tokens=tokens, temperature=temperature, seed=seed)
        wrong = [len(row) for row in told["ids"] if len(row) > tokens or (len(row) < tokens and not self.ends)]
        if wrong or len(told["ids"]) != len(rows):
            raise PeerError(f"{len(told['ids'])} rows, {wrong or tokens} tokens came back where {len(rows)} of {tokens} were asked for")
        return dict(told)

    def _forget(self, names: Iterable[str]) -> None:
        """What earlier texts taught Foredraft's drafters; its peers are set up to keep nothing."""
        for name in list(names):
            method, key = self.at[name]
            if method.side == FOREDRAFT and method.mode not in (PLAIN, DRAFT, LOOKUP):
                with self._attempt(name, "measurement"):
                    self.processes[key].ask("forget", limit=self.settings.timeout, name=name)

    def _measure(self, name: str, cell: Cell, repeat: int) -> None:
        method, key = self.at[name]
        with self._attempt(name, "measurement"):
            self._ask(name, [row[:SOME] for row in cell.ids], FEW, cell.temperature)
            if method.fresh:
                self._forget([name])
            time.sleep(REST)
            before = self._sleepers(key)
            told = self._ask(name, cell.ids, cell.tokens, cell.temperature, repeat)
            after = self._sleepers(key)
            others = None if before is None or after is None else (after - before) / told["seconds"]
            measured = self._measurement(
                told,
                target=self.target.source,
                dtype=self.dtype,
                scenario=cell.scenario,
                batch=cell.batch,
                index=cell.index,
                category=cell.category,
                method=name,
                repeat=repeat,
                others=others,
            )
            self.done.append((cell, measured, told["ids"]))
            if name == "foredraft plain" and cell.scenario == TEXT:
                self._read(cell.index, repeat)

    @staticmethod
    def _measurement(told: dict[str, Any], **where: Any) -> Measurement:
        known = ("ids", "seconds", "times", "rounds", "kept", "passes", "split", "predicted")
        return Measurement(
            **where,
            tokens=sum(map(len, told["ids"])),
            seconds=told["seconds"],
            times=tuple(told.get("times") or ()),
            rounds=told.get("rounds"),
            kept=told.get("kept"),
            passes=told.get("passes"),
            split=told.get("split") or {},
            predicted=told.get("predicted"),
            more={name: value for name, value in told.items() if name not in known},
        )

    def _compared(self) -> list[Measurement]:
        """All of the block's calls, with what comparing their texts says. Whoever is compared with may have had its turn later."""
        plain: dict[tuple[str, tuple[str, int, int]], list[list[int]]] = {}
        by_name = self.run_.by_name
        for method in by_name.values():  # a side may have several plain ones: the first counts
            for cell, each, rows in self.done:
                if method.mode == PLAIN and each.method == method.name and cell.temperature == 0:
                    plain.setdefault((method.side, cell.key), rows)
        found = []
        for cell, each, rows in self.done:
            own = plain.get((by_name[each.method].side, cell.key))
            reference = plain.get((TRANSFORMERS, cell.key), plain.get((FOREDRAFT, cell.key)))
            if cell.temperature == 0 and own is not None:
                each = replace(each, same=own == rows, differs=first_difference(own, rows))
            if cell.temperature == 0 and reference is not None:
                each = replace(each, same_as_reference=reference == rows, differs_from_reference=first_difference(reference, rows))
            found.append(each)
        return found

    def _sleepers(self, awake: str) -> float | None:
        used = [process.cpu_seconds() for key, process in self.processes.items() if key != awake]
        return None if None in used else sum(used)

    def _read(self, index: int, repeat: int) -> None:
        """Large reads by as many threads, right after the plain call that they are compared with: the memory of a machine that others use
        too is twice as fast in one minute as in another. On a GPU copies, bytes read and written."""
        clock, seconds = self.run_.clock, []
        for _ in range(READS + 1):
            begin = clock()
            if self.settings.device == "cpu":
                self.buffer.sum()
            else:
                self.buffer.clone()
                torch.cuda.synchronize()
            seconds.append(clock() - begin)
        moved = READ if self.settings.device == "cpu" else 2 * READ
        self.run_.reads.append(Read(self.target.source, self.dtype, index, repeat, moved / median(seconds[1:])))

    def _between(self, cell: Cell, repeat: int) -> None:
        """What is measured after every method's call of a cell."""

    def _curve(self, repeat: int, context: int) -> None:
        """What is measured after a repeat."""
        if repeat < CURVE_REPEATS:
            self._costs(repeat, context)

    def _costs(self, repeat: int, context: int, temperature: float = 0.0, scenario: str = "", index: int | None = None, **how: Any) -> None:
        """Cost curves of Foredraft's draft models, and of drafts with layers of the target, in chains of a fixed length, at ``context``
        tokens, drafts being drawn at ``temperature``; ``index`` is that of a text which was just written."""
        for name, (method, key) in list(self.at.items()):
            if not (method.side == FOREDRAFT and method.mode in (DRAFT, LAYER_SKIP) and method.length):
                continue
            about = {"name": name, "rows": 1, "length": method.length, "context": context, "temperature": temperature, **how}
            try:
                values = self.processes[key].ask("costs", limit=self.settings.timeout, **about)
            except PeerError as error:  # the calls themselves have been measured
                self._failed(f"cost curve of {name}", "measurement", error)
                continue
            found = {**values, "temperature": temperature, "scenario": scenario, "index": index}
            self.run_.curves.append(Curve(self.target.source, self.dtype, name, method.length, 1, repeat, found))


def available_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None
