"""The busy suite: what a pass, loading a model and the demo take on a quiet machine, beside a busy loop, and beside other torch processes.

Sides are processes that take turns: Foredraft with all threads and with one, and the peers that are installed, which decode plainly. The
other work is done by processes of strangers, each in a session of its own, as the system shares a machine among its users.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import checkpoints
from benchmarks.figures import Figure
from benchmarks.peer_process import FOREDRAFT, PeerError, PeerProcess, PeerSettings, find
from benchmarks.report import Table
from benchmarks.suite import Failure, Suite, instrument, option
from foredraft.estimates import Spread, turned

QUIET, LOOP, ONE, TWO = "quiet", "one busy loop", "one torch loop", "two torch loops"
TORCH = "import torch\ntorch.set_num_threads(2)\na = torch.rand(1024, 1024)\nwhile True: a @ a"
STATES: dict[str, list[str]] = {QUIET: [], LOOP: ["while True: pass"], ONE: [TORCH], TWO: [TORCH, TORCH]}  # programs beside it
MOST = {LOOP: 3.0, ONE: 5.0, TWO: 5.0}  # times as long as on a quiet machine
BUILD, DEMO = 3.0, 90.0  # times as long; seconds
STARTING = 4.0  # seconds that the other work takes to begin
SINGLE = "foredraft, one thread"
DECODED = "a token, decoded plainly"
PROMPT = list(range(5, 37))


@dataclass(frozen=True)
class Settings(PeerSettings):
    target: str = option("zoo:python-300m", "A path, a hub id or zoo:NAME.")
    dtype: str = option("bfloat16", "bfloat16 or float32.")
    nodes: str = option("1 8", "Sizes of the passes, separated by spaces.")
    turns: int = option(5, "Turns of every state.", least=1)
    seconds: float = option(1.5, "Seconds of passes in a turn.", least=0.01)
    tokens: int = option(24, "Tokens that a peer decodes in a turn.", least=2)
    builds: int = option(2, "Loads of the model in every state.", least=0)
    demos: int = option(1, "Runs of the demo in every state.", least=0)
    peers: tuple[str, ...] = option(("openvino", "vllm", "llamacpp"), "Who else takes part.", flag="--peer")

    @property
    def sizes(self) -> list[int]:
        return [int(each) for each in self.nodes.split()]


@dataclass(frozen=True)
class Measurement:
    """Seconds of one thing of one side: a pass ("1 node", "8 nodes"), a token of plain decoding, "build" or "demo"; of passes the mean of a
    turn."""

    state: str
    what: str
    side: str
    turn: int
    seconds: float


class Busy(Suite[Settings]):
    """What passes, loading and the demo take beside other work."""

    name = "busy"
    title = "On a busy machine"
    settings_type = Settings
    measurements: list[Measurement]
    failures: list[Failure]
    missing: list[str]  # peers
    loads: list[str]  # /proc/loadavg at each turn's begin, before any other work was started

    @property
    def steps(self) -> int:
        return len(STATES) * self.settings.turns

    def run(self) -> None:
        settings = self.settings
        checkpoint = checkpoints.written(settings.target, settings.work_folder)
        sides = {FOREDRAFT: settings.threads, SINGLE: 1, **dict.fromkeys(settings.peers, settings.threads)}
        running: dict[str, PeerProcess] = {}
        try:
            for side, threads in sides.items():
                with self._attempt(side, "set-up"):
                    running[side], _ = self._loaded(side, threads, checkpoint)
            for turn in range(settings.turns):
                self.loads.append(Path("/proc/loadavg").read_text().strip())
                for state in turned(list(STATES), turn):
                    with beside(STATES[state]):
                        self._turn(state, turn, running)
                        self._extras(state, turn, checkpoint)
                    self.advance()
        finally:
            for process in running.values():
                process.close()

    @contextmanager
    def _attempt(self, side: str, stage: str) -> Iterator[None]:
        try:
            yield
        except PeerError as error:
            if stage == "set-up" and "not installed" in str(error):
                self.missing.append(side)
            else:
                self.failures.append(Failure(side, stage, str(error)))

    def _loaded(self, side: str, threads: int, checkpoint: checkpoints.Checkpoint) -> tuple[PeerProcess, float]:
        """A process with the model, and the seconds that loading took."""
        settings, name = self.settings, side.partition(",")[0]
        peer = find(name, settings.peers_folder)
        log = settings.work_folder / "logs" / f"busy-{name}-{threads}.log"
        process, limit = PeerProcess(peer, threads=threads, log=log), settings.patience
        try:
            process.ask("start", limit=limit, threads=threads, device=settings.device, folder=str(peer.folder))
            path = str(checkpoint.path)
            if name in ("llamacpp", "openvino"):
                folder = (settings.work_folder / checkpoint.slug / name).absolute()
                folder.mkdir(parents=True, exist_ok=True)
                path = process.ask("prepare", limit=limit, checkpoint=path, folder=str(folder), dtype=settings.dtype)
            begin = time.perf_counter()
            how = {"mode": "plain", "length": 0, "ngram": 0, "options": {}, "dtype": settings.dtype}
            process.ask("load", limit=limit, name="plain", checkpoint=path, draft=None, **how)
            seconds = time.perf_counter() - begin
            self._decoded(process)  # to warm up
        except PeerError:
            process.close()
            raise
        return process, seconds

    def _decoded(self, process: PeerProcess) -> float:
        """Seconds per token of plain decoding."""
        given = {"ids": [PROMPT], "tokens": self.settings.tokens, "temperature": 0.0, "seed": 0}
        told = process.ask("generate", limit=self.settings.timeout, name="plain", **given)
        return float(told["seconds"]) / self.settings.tokens

    def _turn(self, state: str, turn: int, running: Mapping[str, PeerProcess]) -> None:
        settings = self.settings
        for side in turned(list(running), turn):
            with self._attempt(side, state):
                self.measurements.append(Measurement(state, DECODED, side, turn, self._decoded(running[side])))
                for nodes in settings.sizes if side in (FOREDRAFT, SINGLE) else ():
                    given = {"nodes": nodes, "seconds": settings.seconds}
                    seconds = running[side].ask("passes", limit=settings.timeout + settings.seconds, name="plain", **given)
                    self.measurements.append(Measurement(state, label(nodes), side, turn, float(seconds)))

    def _extras(self, state: str, turn: int, checkpoint: checkpoints.Checkpoint) -> None:
        """Loading and the demo."""
        settings = self.settings
        if turn < settings.builds:
            with self._attempt(FOREDRAFT, f"build, {state}"):
                process, seconds = self._loaded(FOREDRAFT, settings.threads, checkpoint)
                process.close()
                self.measurements.append(Measurement(state, "build", FOREDRAFT, turn, seconds))
        if turn < settings.demos:
            command = [sys.executable, "-m", "foredraft", "demo", "--threads", str(settings.threads)]
            begin = time.perf_counter()
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=settings.patience, check=False)
                why = None if done.returncode == 0 else (done.stderr.strip() or "no message").splitlines()[-1]
            except subprocess.TimeoutExpired:
                why = f"did not end in {settings.patience:g} s"
            if why is None:
                self.measurements.append(Measurement(state, "demo", FOREDRAFT, turn, time.perf_counter() - begin))
            else:
                self.failures.append(Failure(FOREDRAFT, f"demo, {state}", why))

    # -- what is reported -----------------------------------------------------------------------------------------------

    def of(self, state: str, what: str, side: str) -> Spread | None:
        found = [each.seconds for each in self.measurements if (each.state, each.what, each.side) == (state, what, side)]
        return Spread.of(found) if found else None

    def ratio(self, above: tuple[str, str, str], below: tuple[str, str, str]) -> Spread | None:
        """Of two sides or states turn by turn."""
        times = [
            {each.turn: each.seconds for each in self.measurements if (each.state, each.what, each.side) == key} for key in (above, below)
        ]
        quotients = [seconds / times[1][turn] for turn, seconds in times[0].items() if turn in times[1]]
        return Spread.of(quotients) if quotients else None

    @property
    def sides(self) -> list[str]:
        return list(dict.fromkeys(each.side for each in self.measurements))

    def figures(self) -> list[Figure]:
        found, peers = [], [side for side in self.sides if side not in (FOREDRAFT, SINGLE)]
        for state, most in MOST.items():
            for what in map(label, self.settings.sizes):
                own = state, what, FOREDRAFT
                found.append(Figure(f"{what}, {state}: times as long as quiet", self.ratio(own, (QUIET, what, FOREDRAFT)), high=most))
                found.append(Figure(f"{what}, {state}: speed over one thread's", self.ratio((state, what, SINGLE), own), low=0.9))
            found += [
                Figure(f"{state}: speed over {peer}'s", self.ratio((state, DECODED, peer), (state, DECODED, FOREDRAFT)), low=1.0)
                for peer in peers
            ]
            building = self.ratio((state, "build", FOREDRAFT), (QUIET, "build", FOREDRAFT))
            found.append(Figure(f"build, {state}: times as long as quiet", building, high=BUILD))
        return found + [Figure(f"demo, {state}: seconds", self.of(state, "demo", FOREDRAFT), high=DEMO) for state in STATES]

    def tables(self) -> list[Table]:
        lines = []
        whats = [(label(nodes), 1e3) for nodes in self.settings.sizes] + [(DECODED, 1e3), ("build", 1.0), ("demo", 1.0)]
        for what, scale in whats:
            for side in self.sides:
                spreads = [self.of(state, what, side) for state in STATES]
                if any(spreads):
                    unit = "ms" if scale > 1 else "s"
                    cells = ["–" if each is None else each.text(1, scale) for each in spreads]
                    lines.append((f"{what}, {unit}", side, *cells))
        judged = [(each.name, "–" if each.spread is None else each.spread.text(), each.bound, each.verdict) for each in self.figures()]
        return [
            Table("Passes, loading, demo", ("what", "side", *STATES), lines),
            Table("Figures", ("figure", "measured", "bound", "verdict"), judged),
        ]

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        settings = self.settings
        return [
            f"{settings.target}, {settings.dtype}. Medians of {settings.turns} turns with the extremes in brackets; a turn is the mean "
            f"over {settings.seconds:g} s of passes, or {settings.tokens} tokens of plain decoding with their prompt; sides are "
            "compared by the latter.",
            "A torch loop multiplies matrices with two threads. All other work runs in sessions of its own.",
            f"Load averages at the beginning of the turns: {'; '.join(' '.join(each.split()[:3]) for each in self.loads)}. What was above "
            "the suite's own work came from others, so that no state was quieter than that.",
            f"Not installed: {', '.join(self.missing)}." if self.missing else "",
            *(f"{each.method}, {each.stage}: {each.message}" for each in self.failures),
            instrument([settings.target]),
        ]


def label(nodes: int) -> str:
    return f"{nodes} node{'s' if nodes > 1 else ''}"


@contextmanager
def beside(programs: list[str]) -> Iterator[None]:
    """While these Python programs run."""
    running = [subprocess.Popen([sys.executable, "-c", each], start_new_session=True, stderr=subprocess.DEVNULL) for each in programs]
    try:
        if running:
            time.sleep(STARTING)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
