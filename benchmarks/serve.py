"""Servers under load, in turns: ours, llama-server, transformers' and vLLM's, each in its best mode.

    python -m benchmarks serve --peers PEERS --only ours --only vllm --figures throughput

Figures can be measured one by one (``--figures``), for some sides (``--only``), and added to an earlier run (``--earlier FILE.json.gz``). A
server that does not start or fails is a row that says so. All servers stay loaded; those that are not asked are stopped meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from benchmarks import report as reports
from benchmarks import serve_figures
from benchmarks.figures import Figure
from benchmarks.peer_process import FOREDRAFT, PeerError, WorkerProcess, variables, with_threads
from benchmarks.report import Table
from benchmarks.serve_load import Load, Tool, quantile
from benchmarks.serve_plan import FIGURES, OURS, SIDES, Number, Rate, Run, ServeSettings
from benchmarks.serve_servers import FASTEST, MEMORY, MODES, Mode, Server
from benchmarks.suite import Failure, Suite
from foredraft.errors import ConfigurationError

PROMPTS = Path(__file__).with_name("serve_prompts.jsonl")
DIRECT = "session"
CLIENTS = (1, 4, 16)
ALIKE = ("device", "threads", "target", "draft", "drafter", "dtype", "length", "tokens", "prompts")  # settings of all records on a page
SLOW = 0.75  # a peer's mode that is slower than this share of its best one in the warm-up can not be its best


class Serve(Suite[ServeSettings]):
    """Servers under load: throughput, latency, overload, beside llama-server, transformers serve and vLLM."""

    name = "serve"
    title = "The server"
    settings_type = ServeSettings
    quick: ClassVar[Mapping[str, Any]] = {
        "target": "zoo:python-8m", "turns": 1, "tokens": 8, "prompts": 2, "seconds": 2.0, "overload": 3.0, "long": 400, "only": (OURS,),
    }  # fmt: skip
    runs: list[Run]
    rates: list[Rate]
    numbers: list[Number]
    failures: list[Failure]

    @property
    def steps(self) -> int:
        return len(self.settings.chosen)

    # -- measuring ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        settings = self.settings
        for given, known, flag in ((settings.only, SIDES, "--only"), (settings.chosen, FIGURES, "--figures")):
            if wrong := [each for each in given if each not in known]:
                raise ConfigurationError(f"{flag} takes {', '.join(known)}, got {', '.join(wrong)}")
        if settings.earlier is not None:
            self._keep(settings.earlier)
        self.texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
        self.servers: dict[str, Server] = {}
        try:
            self._start()
            for name in settings.chosen:
                with self._noted(name, "run"):
                    getattr(self, f"_{name}")()
                self.advance()
        finally:
            for server in self.servers.values():
                server.close()

    def _keep(self, path: Path) -> None:
        """The records of an earlier run, of what is not measured now, and what failed there.

        Raises:
            ConfigurationError: it was run with other settings.
        """
        document, chosen, only = reports.load(path), self.settings.chosen, self.settings.only
        former: Any = type(self).read(document)
        if other := [name for name in ALIKE if getattr(former.settings, name) != getattr(self.settings, name)]:
            raise ConfigurationError(f"--earlier names a run with other settings: {', '.join(other)}; their records do not mix")
        self.runs += [each for each in former.runs if each.cell not in chosen]
        self.rates += [] if "latency" in chosen else former.rates
        self.numbers += [each for each in former.numbers if each.cell.split()[0].rstrip(",") not in chosen]
        for each in former.failures:
            cell = {each.method, each.stage.partition(",")[0]} & {*chosen}
            again = each.method.partition("-")[0] in only if each.stage == "start" else cell
            self.failures += [] if again else [each]
        about, kept = document["environment"], len(self.runs) + len(self.rates) + len(self.numbers)
        self.numbers.append(Number("records of an earlier run", 0, kept, f"{about['date']}, commit {about['commit']}"))

    def _noted(self, method: str, stage: str) -> Any:
        return Noted(self.failures, method, stage)

    def _start(self) -> None:
        """Every process that is needed; what does not start is a failure."""
        settings = self.settings
        beside = {"throughput", "latency"} & {*settings.chosen}
        wanted = [mode for mode in MODES if mode.side in settings.only and (mode.side == OURS or beside)]
        if "deterministic" in settings.chosen and settings.fastest:
            wanted.append(FASTEST)
        for process in dict.fromkeys(mode.process for mode in wanted):
            with self._noted(process, "start"):
                self.servers[process] = Server(process, settings)
        self.modes = [mode for mode in wanted if mode.process in self.servers]
        if not self.modes:
            raise ConfigurationError("no server has started: " + "; ".join(f"{each.method}: {each.message}" for each in self.failures))

    def _ask(self, mode: Mode, load: str, given: Sequence[Any]) -> Load:
        """What the load tool's method ``load`` comes to while only that server runs.

        Raises:
            PeerError: the server is not there, or requests were neither finished nor refused.
        """
        if mode.process not in self.servers:
            raise PeerError(f"{mode.process} was not started")
        server = self.servers[mode.process]
        server.resume()
        try:
            found: Load = getattr(Tool(server.url, {"model": server.model, **mode.extra}, self.settings.timeout), load)(*given)
        finally:
            server.pause()
        if found.problems:
            raise PeerError(f"{mode}: {len(found.problems)} of {len(found.asked)} requests failed, the first: {found.problems[0]}")
        return found

    def bodies(self, count: int, temperature: float) -> list[dict[str, Any]]:
        """Copying and free prompts in turns, each with a seed of its own."""
        half = len(self.texts) // 2
        mixed = [text for pair in zip(self.texts[:half], self.texts[half:]) for text in pair]
        return [
            {"prompt": mixed[number % len(mixed)], "max_tokens": self.settings.tokens, "temperature": temperature, "seed": number}
            for number in range(count)
        ]

    def _compare(self, cell: str, modes: Sequence[Mode], clients: int, temperature: float) -> None:
        """Modes in turns, after a short warm-up. A mode that fails is left out of the rest of the cell, and so is a peer's slow one."""
        left = list(modes)
        for turn in range(-1, self.settings.turns):
            bodies = self.bodies(max(self.settings.prompts, clients), temperature)
            if turn < 0:
                bodies = [{**body, "max_tokens": max(2, self.settings.tokens // 4)} for body in bodies]
            warm: dict[Mode, float] = {}
            for mode in left[:: -1 if turn % 2 else 1]:
                with self._noted(str(mode), f"{cell}, {clients} clients"):
                    found = self._ask(mode, "closed", (bodies, clients))
                    if turn >= 0:
                        done = sum(each.status == "done" for each in found.asked)
                        how = (cell, mode.side, mode.name, clients, temperature, turn)
                        self.runs.append(Run(*how, found.tokens, done, found.seconds, found.share))
                    else:
                        warm[mode] = found.rate
                    continue
                left.remove(mode)
            for mode, rate in warm.items():
                best = max(each for other, each in warm.items() if other.side == mode.side)
                if mode.side != OURS and rate < SLOW * best:
                    left.remove(mode)
                    why = f"tokens/s of {mode} in the warm-up, below {SLOW} of this server's best mode; not measured further"
                    self.numbers.append(Number(f"{cell}, {clients} clients, temperature {temperature:g}", 0, rate, why))

    def _throughput(self) -> None:
        for temperature in (0.0, 1.0):
            for clients in CLIENTS:
                self._compare("throughput", [mode for mode in self.modes if mode != FASTEST], clients, temperature)

    def _speculation(self) -> None:
        """With few clients, what the throughput has measured serves here too."""
        ours = [mode for mode in self.modes if mode.process == OURS]
        for temperature in (0.0, 1.0):
            for clients in (64,) if "throughput" in self.settings.chosen else (*CLIENTS, 64):
                self._compare("speculation", ours, clients, temperature)

    def _deterministic(self) -> None:
        if FASTEST not in self.modes:
            raise PeerError("not measured: name the flags of the fastest layout with --fastest")
        for clients in (1, 16):
            self._compare("deterministic", [mode for mode in self.modes if mode in (MODES[0], FASTEST)], clients, 0.0)

    def _session(self) -> None:
        """The server beside the Session driven directly, in a process of its own."""
        with session(self.settings) as direct:
            for temperature in (0.0, 1.0):
                for clients in (1, 16):
                    bodies = self.bodies(max(self.settings.prompts, clients), temperature)
                    given = {"prompts": [body["prompt"] for body in bodies], "clients": clients, "temperature": temperature}
                    for turn in range(-1, self.settings.turns):
                        if turn % 2:
                            answer = direct.ask(**given, tokens=self.settings.tokens)
                        found = self._ask(MODES[0], "closed", (bodies, clients))
                        if not turn % 2:
                            answer = direct.ask(**given, tokens=self.settings.tokens)
                        if turn >= 0:
                            how = (clients, temperature, turn)
                            requests = len(bodies)
                            self.runs.append(Run(DIRECT, OURS, "draft", *how, found.tokens, requests, found.seconds, found.share))
                            self.runs.append(Run(DIRECT, DIRECT, "draft", *how, answer["tokens"], requests, answer["seconds"], 0.0))

    def _capacity(self, mode: Mode) -> Load:
        """A closed loop with 16 clients, greedily."""
        return self._ask(mode, "closed", (self.bodies(max(16, self.settings.prompts), 0.0), 16))

    def _latency(self) -> None:
        """At 0.75 of each peer's own capacity in its fastest mode: the peer and ours in turns."""
        settings = self.settings
        for side in [side for side in settings.only if side != OURS]:
            with self._noted(side, "latency"):
                modes = [mode for mode in self.modes if mode.side == side]
                if not modes:
                    raise PeerError("it has not started")
                for mode in (MODES[0], *modes):
                    self._capacity(mode)  # to warm up: all that follows meets prompts that are cached
                capacities = {mode: self._capacity(mode).requests for mode in modes}
                best = max(capacities, key=lambda mode: capacities[mode])
                rate = 0.75 * capacities[best]
                for turn in range(settings.turns):
                    for mode in (MODES[0], best) if turn % 2 else (best, MODES[0]):
                        bodies = self.bodies(len(self.texts), 0.0)
                        found = self._ask(mode, "open", (bodies, rate, settings.seconds, turn))
                        done = [each for each in found.asked if each.status == "done"]
                        between = [each.between for each in done if each.between is not None]
                        if not between:
                            raise PeerError(f"{mode}: no request was finished in {settings.seconds:g} s")
                        first = quantile([each.first - each.begin for each in done], 0.99)
                        p99 = quantile(between, 0.99)
                        self.rates.append(Rate(side, mode.side, turn, rate, first, p99, len(found.asked) - len(done), found.share))

    def _join(self) -> None:
        """Gaps between chunks of four clients while a long prompt joins, and in the same seconds without it."""
        long = ("\n\n".join(self.texts) * 8)[: 3 * self.settings.long]  # three characters a token and more
        tokens = 4 * self.settings.tokens
        bodies = [{**body, "max_tokens": tokens} for body in self.bodies(4, 0.0)]
        self._ask(MODES[0], "beside", (bodies, 4, None, 1.0))  # to warm up
        for turn in range(self.settings.turns):
            text = f"# {turn}\n{long}"  # new each time, so that no beginning is shared
            guest = {"prompt": text, "max_tokens": 2, "temperature": 0.0, "seed": 0}
            worst = []
            for joins in (False, True):
                load = self._ask(MODES[0], "beside", (bodies, 4, guest if joins else None, 1.0))
                gaps = [after - before for each in load.asked[:4] for before, after in zip(each.chunks, each.chunks[1:])]
                if not gaps:
                    raise PeerError("the answers came in one chunk each; give more --tokens")
                worst.append(quantile(gaps, 0.99))
            self.numbers.append(Number("join", turn, worst[1] / worst[0], f"{worst[1] * 1e3:.0f} over {worst[0] * 1e3:.0f} ms"))

    def _overload(self) -> None:
        """Ten times the capacity, for minutes."""
        settings = self.settings
        bodies = self.bodies(len(self.texts), 0.0)
        alone, server = self._ask(MODES[0], "closed", (bodies, 1)), self.servers[OURS]
        texts = [each.text for each in alone.asked]
        self._capacity(MODES[0])  # to warm up: the planner measures what so many rows cost
        capacity = self._capacity(MODES[0])  # of prompts that are cached, as they are in the overload
        self._ask(MODES[0], "open", (bodies, 10 * capacity.requests, settings.overload / 10, 1))  # its memory fills up
        before = server.memory()
        server.resume()
        try:
            found = Tool(server.url, {"model": server.model, **MODES[0].extra}, settings.timeout).open(
                bodies, 10 * capacity.requests, settings.overload, 2
            )
        finally:
            server.pause()
        done = [each for each in found.asked if each.status == "done"]
        wrong = [each for each in done if each.text != texts[each.number % len(texts)]]
        how = f"{len(found.asked):,} requests, {len(done):,} finished; the load tool took {found.share:.2f} cores"
        self.numbers += [
            Number("overload rate", 0, found.rate / capacity.rate, how),
            Number("overload neither", 0, float(len(found.problems) + len(wrong)), "; ".join(found.problems[:1])),
            Number("overload memory", 0, server.memory() / before - 1, f"{before / 2**20:,.0f} MiB before"),
        ]

    # -- what comes of it -------------------------------------------------------------------------------------------------

    def figures(self) -> list[Figure]:
        return serve_figures.figures(self)

    def tables(self) -> list[Table]:
        return serve_figures.tables(self)

    def notes(self, environment: Mapping[str, Any]) -> list[str]:
        settings = self.settings
        return [
            f"{settings.target} in {settings.dtype}, draft {settings.draft} where a server takes one ({settings.length} tokens a round at "
            f"peers; ours has {settings.ours}), {settings.tokens} tokens out, "
            "prompts in benchmarks/serve_prompts.jsonl: half are to copy, half are free.",
            "All servers are loaded; one runs at a time and the others are stopped. Each cell begins with a run of a quarter of the "
            "tokens that does not count, then the servers take turns. The load tool is one process; a column has its CPU time.",
            "A peer's best mode in each cell is the one with the highest median; one that is slower than 0.75 of another in the "
            "warm-up is not measured further. Caches of prompts are left as each server has them; ours and the Session's hold "
            f"{MEMORY}.",
        ]


class Noted:
    """Makes what goes wrong inside a failure."""

    def __init__(self, failures: list[Failure], method: str, stage: str):
        self.failures, self.failure = failures, (method, stage)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, (PeerError, OSError)):
            return False
        self.failures.append(Failure(*self.failure, str(error)))
        return True


def session(settings: ServeSettings) -> WorkerProcess:
    """The process of ``serve_session.py``."""
    alike = {**variables(FOREDRAFT, settings.peers_folder), **with_threads(FOREDRAFT, settings.threads)}  # as the server has them
    worker = WorkerProcess([sys.executable, "-m", "benchmarks.serve_session"], {}, env={**os.environ, **alike})
    worker.ask(target=settings.target, drafter=settings.ours, dtype=settings.dtype, threads=settings.threads, cache_memory=MEMORY)
    return worker
