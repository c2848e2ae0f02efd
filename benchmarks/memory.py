"""What the key-value cache in pages costs and saves, beside the checkout before it.

    git worktree add /tmp/present 9cd4dee
    python -m benchmarks memory --present /tmp/present --peers .peers

Both sides are processes of their own (``memory_worker.py``), which load one model each and wait while the other works. Speed is compared in
turns; the figure is the median over turns of the quotient. Where vLLM is installed (``make peer-vllm``), its blocks are counted beside.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import benchmarks
from benchmarks.figures import Figure
from benchmarks.peer_process import PeerError, PeerProcess, PeerSettings, WorkerProcess, find
from benchmarks.report import Table
from benchmarks.suite import Failure, Suite, option
from foredraft.errors import ConfigurationError
from foredraft.estimates import Spread

PAGES, PRESENT, VLLM = "pages", "present", "vllm"
ROOT = Path(benchmarks.__file__).parents[1]


@dataclass(frozen=True)
class Cell:
    """What a side with a model is asked in a turn, and the least quotient of tokens/s."""

    name: str
    model: str
    what: str
    least: float
    given: Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    cell: str
    side: str
    turn: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Count:
    """A number that does not depend on the clock, ``side`` by side."""

    what: str
    side: str
    name: str
    value: float


@dataclass(frozen=True)
class FirstToken:
    """Seconds to the first token of a request whose beginning is ``new``, and of one that has it ``shared``."""

    turn: int
    new: float
    shared: float


@dataclass(frozen=True)
class MemorySettings(PeerSettings):
    present: Path | None = option(None, "A checkout of the commit before pages; it is compared with this one.", place=True)
    model: str = option("0.6b", "The shape that speed is measured with: 0.6b, small or tiny; qwen3 with random weights, bfloat16.")
    contexts: str = option("100 4000 30000", "Tokens in front of one row.")
    families: str = option("gemma3 phi3 gpt_neox qwen3_moe", "Shapes of models that the kernels do not run.")
    behind: int = option(4000, "Tokens in front of one row of each of these.", least=64)
    family_rounds: int = option(6, "Rounds per turn of each of these.", least=1)
    windowed: int = option(16000, "Tokens of the row of the model with sliding windows.", least=64)
    longest: int = option(1500, "Tokens of the longest of the rows of unequal length.", least=15)
    rows: int = option(16, "How many these are.", least=1)
    rounds: int = option(24, "Rounds per turn.", least=1)
    turns: int = option(7, "Turns.", least=1)
    shared: int = option(4000, "Tokens that a request shares with one before.", least=64)
    requests: int = option(10000, "Requests that arrive and leave.", least=200)
    trace: int = option(30000, "Tokens of the long row of the trace.", least=2000)


class Memory(Suite[MemorySettings]):
    """What the key-value cache in pages costs and saves, beside the checkout before it."""

    name = "memory"
    title = "Keys and values in pages"
    settings_type = MemorySettings
    quick: ClassVar[Mapping[str, Any]] = {
        "model": "small", "contexts": "100 1000", "longest": 300, "rows": 4, "rounds": 4, "turns": 2, "shared": 1000, "requests": 300,
        "trace": 3000, "families": "windows", "behind": 1000, "windowed": 2000,
    }  # fmt: skip
    turns: list[Turn]
    counts: list[Count]
    first_tokens: list[FirstToken]
    failures: list[Failure]
    vllm: str  # its version, or why its blocks were not counted

    @property
    def cells(self) -> list[Cell]:
        settings = self.settings
        given: dict[str, Any] = {"longest": settings.longest, "rows": settings.rows, "new": settings.rounds, "shape": "none"}
        found = [Cell(f"{settings.rows} rows of unequal length", settings.model, "batch", 1.1, given)]
        trees = ((1, "one token"), (16, "a tree of 16"))
        for tokens in map(int, settings.contexts.split()):
            for nodes, what in trees:
                given = {"tokens": tokens, "nodes": nodes, "rounds": settings.rounds}
                found.append(Cell(f"one row behind {tokens:,}, {what}", settings.model, "behind", 0.98, given))
        for family in settings.families.split():
            for nodes, what in trees:
                given = {"tokens": settings.behind, "nodes": nodes, "rounds": settings.family_rounds}
                found.append(Cell(f"{family}: one row behind {settings.behind:,}, {what}", family, "family", 1.0, given))
        return found

    @property
    def steps(self) -> int:
        return len(self.cells) + 7

    def run(self) -> None:
        if self.settings.present is None or not (self.settings.present / "src" / "foredraft").is_dir():
            raise ConfigurationError("--present needs a checkout of the commit before pages: git worktree add /tmp/present 9cd4dee")
        for model in dict.fromkeys(cell.model for cell in self.cells):
            sides = {name: checkout(folder, model, self.settings.threads) for name, folder in self._folders().items()}
            with sides[PRESENT], sides[PAGES]:
                for cell in self.cells:
                    if cell.model == model:
                        self._attempt(cell.name, lambda cell=cell, sides=sides: self._compare(cell, sides))
        self._attempt("first token", self._first_tokens)
        trace = {"long": self.settings.trace, "rows": 15, "common": 1000}
        counts = {
            "trace": ((PRESENT, PAGES), trace),
            "chat": ((PRESENT, PAGES), {"pages": 292, "requests": 80}),  # 2 GiB of the 0.6 B shape
            "churn": ((PAGES,), {"requests": self.settings.requests, "settled": self.settings.requests // 10}),
            "short": ((PAGES,), {"rows": 48, "share": 0.5}),
            "windows": ((PAGES,), {"tokens": self.settings.windowed, "new": 8}),
        }
        for what, (counted, given) in counts.items():
            for side in counted:
                self._attempt(what, lambda what=what, side=side, given=given: self._count(what, side, given), advance=side == PAGES)
        self._attempt(VLLM, lambda: self._blocks(trace))

    def _attempt(self, name: str, call: Any, advance: bool = True) -> None:
        try:
            call()
        except PeerError as error:
            self.failures.append(Failure(name, "run", str(error)))
        if advance:
            self.advance()

    def _compare(self, cell: Cell, sides: Mapping[str, WorkerProcess]) -> None:
        for turn in range(-1, self.settings.turns):  # the first is a warm-up
            for name in (PRESENT, PAGES) if turn % 2 else (PAGES, PRESENT):
                answer = sides[name].ask(what=cell.what, **cell.given)
                if name == PAGES and not answer.get("pages", True):
                    raise PeerError("its keys and values are not in pages")
                if turn >= 0:
                    self.turns.append(Turn(cell.name, name, turn, answer["tokens"], answer["seconds"]))

    def _first_tokens(self) -> None:
        with checkout(ROOT, self.settings.model, self.settings.threads) as ours:
            for turn in range(-1, 3):
                answer = ours.ask(what="first_token", shared=self.settings.shared if turn >= 0 else 128, own=32, seed=2 + turn)
                if turn >= 0:
                    self.first_tokens.append(FirstToken(turn, answer["new"], answer["shared"]))

    def _count(self, what: str, name: str, given: Mapping[str, Any]) -> None:
        with checkout(self._folders()[name], "windows" if what == "windows" else "tiny", self.settings.threads) as worker:
            for key, value in worker.ask(what=what, **given).items():
                self.counts.append(Count(what, name, key, value))

    def _blocks(self, trace: Mapping[str, Any]) -> None:
        """What vLLM holds for the same trace."""
        settings = self.settings
        try:
            peer = find(VLLM, settings.peers_folder)
        except PeerError as error:
            self.vllm = str(error)
            return
        with tempfile.TemporaryDirectory() as folder:
            with checkout(ROOT, "tiny", settings.threads) as ours:
                given = ours.ask(what="written", folder=folder, **trace)
            process = PeerProcess(peer, threads=settings.threads, log=settings.work_folder / "logs" / "memory-vllm.log")
            try:
                about = process.ask("start", limit=settings.patience, threads=settings.threads, device="cpu", folder=str(peer.folder))
                found = process.ask("blocks", limit=settings.patience, checkpoint=folder, dtype="bfloat16", **given)
            finally:
                process.close()
        self.vllm = about["versions"]["vllm"]
        self.counts += [Count("trace", VLLM, key, value) for key, value in found.items()]

    def _folders(self) -> dict[str, Path]:
        assert self.settings.present is not None
        return {PRESENT: self.settings.present, PAGES: ROOT}

    # -- what comes of it ---------------------------------------------------------------------------------------------

    def quotients(self, cell: str) -> list[float]:
        """Tokens/s with pages over those of the present cache, turn by turn."""
        rates = {(each.side, each.turn): each.tokens / each.seconds for each in self.turns if each.cell == cell}
        both = sorted({turn for _, turn in rates if (PAGES, turn) in rates and (PRESENT, turn) in rates})
        return [rates[PAGES, turn] / rates[PRESENT, turn] for turn in both]

    def count(self, what: str, side: str, name: str) -> float | None:
        return next((each.value for each in self.counts if (each.what, each.side, each.name) == (what, side, name)), None)

    def figures(self) -> list[Figure]:
        def spread(*values: float | None) -> Spread | None:
            return None if not values or None in values else Spread.of([value for value in values if value is not None])

        chat = [self.count("chat", side, "rows") for side in (PAGES, PRESENT)]
        rows = chat[0] / chat[1] if chat[0] is not None and chat[1] else None
        peaks = [self.count("trace", side, "peak") for side in (PAGES, VLLM)]
        blocks = peaks[0] / peaks[1] if peaks[0] is not None and peaks[1] else None
        windows = f"sliding windows, {self.settings.windowed:,} tokens: bytes held over those of layers of full length"
        return [
            Figure("bytes held over bytes of distinct tokens", spread(self.count("trace", PAGES, "ratio")), high=1.10),
            Figure("most bytes held, over vLLM's blocks", spread(blocks), high=1.05),
            Figure(windows, spread(self.count("windows", PAGES, "ratio")), high=0.25),
            Figure(f"{windows}, the most while it is read", spread(self.count("windows", PAGES, "peak ratio")), high=0.25),
            *(Figure(f"tokens/s, {cell.name}", spread(*self.quotients(cell.name)), low=cell.least) for cell in self.cells),
            Figure(
                f"first token behind {self.settings.shared:,} shared tokens and 32, over reading all",
                spread(*(each.shared / each.new for each in self.first_tokens)),
                high=0.05,
            ),
            Figure("rows at once, chat trace, over the present cache", spread(rows), low=4),
            Figure(f"growth of pages, {self.settings.requests:,} requests", spread(self.count("churn", PAGES, "pages")), high=0),
            Figure("growth of resident size", spread(self.count("churn", PAGES, "resident")), high=0.01),
            Figure("half the memory: tokens computed again", spread(self.count("short", PAGES, "again")), high=0.3),
        ]

    def tables(self) -> list[Table]:
        found = [[each.name, each.bound, "–" if each.spread is None else each.spread.text(3), each.verdict] for each in self.figures()]
        speeds = [
            [cell.name, *(self._rate(cell.name, side) for side in (PRESENT, PAGES))] for cell in self.cells if self.quotients(cell.name)
        ]
        counts = [[f"{each.what}: {each.name}", each.side, f"{each.value:,.3f}".rstrip("0").rstrip(".")] for each in self.counts]
        return [
            Table("Figures", ["figure", "bound", "median (lowest–highest)", "verdict"], found),
            Table("Tokens per second, medians", ["cell", PRESENT, PAGES], speeds),
            Table("Counts", ["count", "side", "value"], counts),
            *([Table("Failures", ["what", "why"], [[each.method, each.message] for each in self.failures])] if self.failures else []),
        ]

    def _rate(self, cell: str, side: str) -> str:
        return Spread.of([each.tokens / each.seconds for each in self.turns if (each.cell, each.side) == (cell, side)]).text(1)

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        return [
            f"Speed: qwen3 in the shape {self.settings.model}, random weights, bfloat16. One row behind a text: passes over one token or a "
            "tree of 16 nodes, of which one token is kept; behind the first 1,024 tokens the text is filler. Both sides take turns.",
            "Counts: a model of one layer, because only what is held counts. The trace: one long row and 15 of 200 to 2,000 tokens with a "
            "common beginning of 1,000, while trees are scored; the worst round counts. The chat trace: 80 requests (1,000 common tokens, "
            "100 to 1,500 of their own, 200 new) within 292 pages, which are 2 GiB of the 0.6 B shape; the mean number of live rows while "
            "others wait, over the rows that join one by one before their block is larger. Half "
            "the memory: 48 rows that need twice the pages.",
            f"Families: {self.settings.families}, each a few layers of the shape of a released model with random weights, bfloat16, "
            "execution packed on both sides; behind the first 64 tokens the text is filler.",
            "Sliding windows: gemma3 with 26 narrow layers, of which 22 have a window of 512. What the row holds behind its prompt and 8 "
            "tokens, and the most while the prompt was read in pieces of 1,024, over whole pages of all its tokens in every layer.",
            self._beside_vllm(),
            "Not measured: sliding windows and families on a GPU, vLLM on a GPU (where its blocks have 16 tokens), and families in other "
            "executions than packed.",
        ]

    def _beside_vllm(self) -> str:
        if self.count("trace", VLLM, "peak") is None:
            return f"vLLM's blocks are not measured: {self.vllm or 'see the failures'}."
        return (
            f"vLLM {self.vllm}, its CPU engine: the same trace and model, prefix caching on, {self.count('trace', VLLM, 'block size'):.0f} "
            "tokens per block as it chooses, no drafts; the most blocks that running requests hold in a step, without those that only its "
            "prefix cache holds. Ours is the most while trees of 21 nodes (the root counted) are scored."
        )


def checkout(folder: Path, model: str, threads: int) -> WorkerProcess:
    """A process with one checkout."""
    paths = [folder / "src", folder / "zoo", folder]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    script = f"import runpy; runpy.run_path({str(ROOT / 'benchmarks' / 'memory_worker.py')!r}, run_name='__main__')"
    always = {"model": model, "threads": threads}
    return WorkerProcess([sys.executable, "-c", script], always, env=environment, cwd=folder, stderr=subprocess.PIPE)
