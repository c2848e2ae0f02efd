"""Methods in processes of their own: where their environments are, and how they are asked.

Each process is started with the interpreter of its environment, runs ``peers/serve.py`` with one adapter, and speaks JSON lines.
What it prints goes to a log file, whose end is quoted when it dies. Between an answer and the next request it is stopped, threads that
would spin or poll included, so that whoever computes has the machine for itself.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import foredraft
from benchmarks.suite import Settings, option
from foredraft.errors import ForedraftError

ADAPTERS = Path(__file__).parent / "peers"
VARIABLE = "FOREDRAFT_PEERS"
DEFAULT = ".peers"
FOREDRAFT, TRANSFORMERS = "foredraft", "transformers"
OWN = (FOREDRAFT, TRANSFORMERS)  # run in this environment where they have none of their own
SHARED = (FOREDRAFT, TRANSFORMERS, "llamacpp", "openvino")  # several methods of these share a process, and the weights


class PeerError(ForedraftError):
    """A method said no, died, or did not answer in time; the message is what its row says."""


@dataclass(frozen=True)
class Peer:
    """Where a method's ``adapter`` runs: the ``python`` of its environment, the ``folder`` of what was installed for it, and
    environment variables to add."""

    name: str
    adapter: Path
    python: Path
    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def shared(self) -> bool:
        return self.name in SHARED


def folder() -> Path:
    """Where the peers are unless a setting says otherwise."""
    return Path(os.environ.get(VARIABLE) or DEFAULT)


@dataclass(frozen=True)
class PeerSettings(Settings):
    """Settings of suites that start peers."""

    peers_path: Path | None = option(
        None, "Folder of the peers' environments; $FOREDRAFT_PEERS or .peers unless given.", flag="--peers", place=True
    )
    work_path: Path | None = option(
        None,
        "Folder for checkpoints and what peers make of them, kept for the next run; work, among the peers, unless given.",
        flag="--work",
        place=True,
    )
    timeout: float = option(120.0, "Seconds after which a call has failed.", least=1)
    patience: float = option(900.0, "Seconds after which loading or converting has failed.", least=1)

    @property
    def peers_folder(self) -> Path:
        return self.peers_path or folder()

    @property
    def work_folder(self) -> Path:
        return self.work_path or self.peers_folder / "work"


def find(name: str, folder: Path) -> Peer:
    """The peer of that name under ``folder``.

    Raises:
        PeerError: it has no adapter, or is not installed.
    """
    adapter = ADAPTERS / f"{name}.py"
    if name == "serve" or not adapter.exists():
        raise PeerError(f"there is no adapter for {name!r}; there are {', '.join(names())}")
    home = (folder / name).absolute()
    candidates = [home / "venv" / "bin" / "python", home / "bin" / "python"]
    python = next((each for each in candidates if each.exists()), None)
    if python is None and name in OWN:
        python = Path(sys.executable)
    if python is None:
        raise PeerError("not installed: make peers installs it")
    return Peer(name, adapter, python, home, variables(name, home))


def names() -> list[str]:
    return sorted(path.stem for path in ADAPTERS.glob("*.py") if path.stem not in ("__init__", "serve"))


def variables(name: str, home: Path) -> dict[str, str]:
    """What a peer's environment needs besides: nobody asks a network, and what its makers recommend for speed."""
    found = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if name == FOREDRAFT:
        found["FOREDRAFT_CACHE"] = "off"  # costs are measured in the warm-up, not remembered from another day
        found["PYTHONPATH"] = os.pathsep.join([str(Path(foredraft.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    if name == "vllm":
        preloaded = [*sorted(home.glob("tcmalloc/**/libtcmalloc_minimal.so.4")), *sorted(home.glob("venv/lib/libiomp5.so"))]
        found |= {
            "LD_PRELOAD": ":".join(map(str, preloaded)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_CACHE_ROOT": str(home / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(home / "cache" / "inductor"),
        }
    return found


def with_threads(name: str, threads: int) -> dict[str, str]:
    """The same number of threads for everyone, however it is asked for it."""
    if name == "vllm":  # it binds threads to cores, and does without OMP_NUM_THREADS
        cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else list(range(threads))
        return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
    return {each: str(threads) for each in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}


class PeerProcess:
    """One running adapter.

    Args:
        peer: what to run.
        threads: CPU threads it is told to use.
        log: where its output goes.
        environment: variables to add.
        clock: seconds, for time limits.
    """

    def __init__(
        self,
        peer: Peer,
        *,
        threads: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.peer, self.log, self.clock = peer, log, clock
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = {**os.environ, **peer.variables, **with_threads(peer.name, threads), **(environment or {})}
        with log.open("ab") as sink:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [str(peer.python), str(ADAPTERS / "serve.py"), str(peer.adapter)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env=variables,
                start_new_session=True,  # so that whatever it starts ends with it
            )
        self._buffer = b""

    def ask(self, op: str, *, limit: float, **arguments: Any) -> Any:
        """Send a request and wait for its answer, ``limit`` seconds at most. After a time limit the process is dead.

        Raises:
            PeerError: it refused, died, answered nonsense, or was too slow.
        """
        stdin = self._stdin()
        self._signal(signal.SIGCONT)
        try:
            stdin.write((json.dumps({"op": op, **arguments}) + "\n").encode())
            stdin.flush()
        except OSError:
            raise PeerError(self._death()) from None
        line = self._line(op, limit)
        self._signal(signal.SIGSTOP)
        try:
            answer = json.loads(line)
            if answer["ok"]:
                return answer["result"]
            error = str(answer["error"])
        except (ValueError, KeyError, TypeError):
            self.close()
            raise PeerError(f"its answer to {op!r} is no answer: {line[:80]!r}") from None
        raise PeerError(error)

    def _stdin(self) -> IO[bytes]:
        if self.process.stdin is None or self.process.stdin.closed:
            raise PeerError("its process has ended")
        return self.process.stdin

    def _line(self, op: str, limit: float) -> str:
        assert self.process.stdout is not None
        out, deadline = self.process.stdout.fileno(), self.clock() + limit
        while b"\n" not in self._buffer:
            left = deadline - self.clock()
            if left <= 0 or not select.select([out], [], [], left)[0]:
                self.close()
                raise PeerError(f"no answer to {op!r} within {limit:g} s; it was ended")
            piece = os.read(out, 1 << 16)
            if not piece:
                raise PeerError(self._death())
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", "replace")

    def _death(self) -> str:
        """What there is to say about a process that is gone."""
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        if code is None:
            how = "closed its output"
        elif code < 0:
            how = f"was killed by signal {signal.Signals(-code).name}"
        else:
            how = f"ended with {code}"
        last = [line for line in self._tail() if line.strip()]
        return f"its process {how}" + (f": {last[-1].strip()[:300]}" if last else "")

    def _tail(self) -> list[str]:
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
            return file.read().decode("utf-8", "replace").splitlines()

    def cpu_seconds(self) -> float | None:
        """CPU time that it and the programs it started have used so far, or None where that cannot be read."""
        try:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            return sum(_cpu_seconds(each) for each in (str(self.process.pid), *children))
        except (OSError, IndexError, ValueError):
            return None

    def _signal(self, number: signal.Signals) -> None:
        """To it and to everything it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """End it and everything it started."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(OSError):  # what could not be written any more
                    stream.close()


class WorkerProcess:
    """A process that answers each object in JSON, one per line, with another.

    Args:
        command: what starts it.
        always: what is asked with every question.
        how: arguments of ``Popen``.
    """

    def __init__(self, command: Sequence[str], always: Mapping[str, Any], **how: Any):
        self.always = always
        self.process: subprocess.Popen[str] = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **how)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *given: object) -> None:
        self.process.kill()
        self.process.communicate()

    def ask(self, **given: Any) -> dict[str, Any]:
        """Its answer, or PeerError if it has ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({**self.always, **given}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except (BrokenPipeError, ValueError):  # it has ended, or had ended before
            line = ""
        if not line:
            self.process.wait()
            raise PeerError(f"exit code {self.process.returncode}: {(self.process.communicate()[1] or '').strip()[-300:]}")
        return dict(json.loads(line))


def _cpu_seconds(process: str) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
