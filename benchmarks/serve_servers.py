"""The servers of the suite ``serve``: how each is started in each mode, and kept from working while another is measured."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.checkpoints import Checkpoint, written
from benchmarks.peer_process import FOREDRAFT, TRANSFORMERS, PeerError, PeerProcess, find, variables, with_threads
from benchmarks.peers.serve import die_with_parent
from benchmarks.serve_plan import LLAMACPP, OURS, VLLM, ServeSettings

CONTEXT = 2048  # tokens of a row; the target has no more
ROWS = 64
MEMORY = "2GiB"  # of our cache, so that the server and the Session keep as many prompts
NEUTRAL: Mapping[str, Any] = {"top_p": 1.0, "ignore_eos": True}


@dataclass(frozen=True)
class Mode:
    """A way to ask a server: ``process`` is the one that is asked, ``extra`` goes into each body."""

    side: str
    name: str
    process: str
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.side}: {self.name}"


MODES = (
    Mode(OURS, "draft", OURS, NEUTRAL),
    Mode(OURS, "plain", OURS, {**NEUTRAL, "speculation": "off"}),
    Mode(LLAMACPP, "plain", "llamacpp-plain", {**NEUTRAL, "top_k": 0, "min_p": 0}),
    Mode(LLAMACPP, "draft", "llamacpp-draft", {**NEUTRAL, "top_k": 0, "min_p": 0}),
    Mode(TRANSFORMERS, "plain", TRANSFORMERS),
    Mode(VLLM, "plain", "vllm-plain", NEUTRAL),
    Mode(VLLM, "draft", "vllm-draft", NEUTRAL),
    Mode(VLLM, "ngram", "vllm-ngram", NEUTRAL),
)
FASTEST = Mode(OURS, "fastest", "ours-fastest", NEUTRAL)


class Server:
    """One running server.

    Raises:
        PeerError: it is not installed, ended, or was not ready in time.
    """

    def __init__(self, process: str, settings: ServeSettings):
        self.process, self.settings = process, settings
        ours = process.partition("-")[0] == OURS
        self.model = settings.target if ours else str(written(settings.target, settings.work_folder).path)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command, environment = self._command()
        self.log = settings.work_folder / "logs" / f"serve-{process}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as sink:
            self.running = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        self.pause()

    # -- how each is started --------------------------------------------------------------------------------------------

    def _command(self) -> tuple[list[str], dict[str, str]]:
        side, _, mode = self.process.partition("-")
        home = (self.settings.peers_folder / side).absolute()
        if side == OURS:
            return self._ours(mode), {**variables(FOREDRAFT, home), **with_threads(FOREDRAFT, self.settings.threads)}
        environment = {**variables(side, home), **with_threads(side, self.settings.threads)}
        make = {LLAMACPP: self._llamacpp, VLLM: self._vllm, TRANSFORMERS: self._transformers}[side]
        command = make(mode, *(written(each, self.settings.work_folder) for each in (self.settings.target, self.settings.draft)))
        if side == VLLM:
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # its server has no other way
        return command, environment

    def _ours(self, mode: str) -> list[str]:
        settings = self.settings
        flags = settings.fastest.split() if mode == "fastest" else settings.flags.split()
        command = [sys.executable, "-m", "foredraft", "serve", settings.target, "--drafter", settings.ours]
        command += ["--dtype", settings.dtype, "--threads", str(settings.threads), "--max-rows", str(ROWS)]
        return [*command, "--cache-memory", MEMORY, "--no-page", "--port", str(self.port), *flags]

    def _llamacpp(self, mode: str, target: Checkpoint, draft: Checkpoint) -> list[str]:
        peer, settings, threads = find(LLAMACPP, self.settings.peers_folder), self.settings, str(self.settings.threads)
        program = peer.folder / "build" / "bin" / "llama-server"
        if not program.exists():
            raise PeerError("llama-server is missing: make peers builds it")
        converter = PeerProcess(peer, threads=settings.threads, log=settings.work_folder / "logs" / "serve-llamacpp-convert.log")
        try:
            about = {"threads": settings.threads, "device": "cpu", "folder": str(peer.folder)}
            converter.ask("start", limit=settings.patience, **about)
            files = []
            for each in (target, draft):
                folder = settings.work_folder / each.slug / LLAMACPP
                folder.mkdir(parents=True, exist_ok=True)
                given = {"checkpoint": str(each.path), "folder": str(folder), "dtype": settings.dtype}
                files.append(converter.ask("prepare", limit=settings.patience, **given))
        finally:
            converter.close()
        command = [str(program), "-m", files[0], "--host", "127.0.0.1", "--port", str(self.port), "-t", threads, "-tb", threads]
        command += ["-c", str(CONTEXT * 16), "-np", "16"]
        if mode == "draft":
            command += ["-md", files[1], "--spec-type", "draft-simple", "--spec-draft-n-max", str(settings.length), "-td", threads]
        return command

    def _vllm(self, mode: str, target: Checkpoint, draft: Checkpoint) -> list[str]:
        peer, settings = find(VLLM, self.settings.peers_folder), self.settings
        command = [str(peer.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target.path), "--dtype", settings.dtype]
        command += ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(ROWS), "--host", "127.0.0.1", "--port", str(self.port)]
        speculative = {
            "draft": {"method": "draft_model", "model": str(draft.path), "num_speculative_tokens": settings.length},
            "ngram": {"method": "ngram", "num_speculative_tokens": settings.length, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        }.get(mode)
        return command if speculative is None else [*command, "--speculative-config", json.dumps(speculative)]

    def _transformers(self, mode: str, target: Checkpoint, draft: Checkpoint) -> list[str]:
        peer, settings = find(TRANSFORMERS, self.settings.peers_folder), self.settings
        program = peer.python.parent / "transformers"
        if not program.exists():
            raise PeerError("the command transformers is missing: pip install 'transformers[serving]'")
        command = [str(program), "serve", str(target.path), "--continuous-batching", "--device", "cpu", "--dtype", settings.dtype]
        return [*command, "--host", "127.0.0.1", "--port", str(self.port)]

    # -- running ----------------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Until the server says that it is well."""
        deadline = time.monotonic() + self.settings.patience
        with httpx.Client(trust_env=False, timeout=10) as http:
            while time.monotonic() < deadline:
                if self.running.poll() is not None:
                    raise PeerError(f"it ended with {self.running.returncode}: {self._tail()}")
                with suppress(httpx.HTTPError):
                    if http.get(f"{self.url}/health").status_code == 200:
                        return
                time.sleep(0.5)
        raise PeerError(f"it was not ready within {self.settings.patience:g} s: {self._tail()}")

    def _tail(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else "it said nothing"

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def memory(self) -> float:
        """Bytes that it and what it started hold."""
        total = 0
        for each in group(self.running.pid):
            with suppress(OSError, IndexError, ValueError):
                total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return float(total)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self.running.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.running.pid, number)


def group(leader: int) -> Sequence[int]:
    """The processes in ``leader``'s group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[2]) == leader:
                    found.append(int(entry.name))
    return found


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
