"""What the suite ``serve`` is asked, and its records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.peer_process import TRANSFORMERS, PeerSettings
from benchmarks.suite import option

OURS, LLAMACPP, VLLM = "ours", "llamacpp", "vllm"
SIDES = (OURS, LLAMACPP, TRANSFORMERS, VLLM)
FIGURES = ("throughput", "session", "speculation", "latency", "join", "overload", "deterministic")


@dataclass(frozen=True)
class ServeSettings(PeerSettings):
    target: str = option("zoo:python-300m", "The target.")
    draft: str = option("zoo:python-1m", "The draft model, wherever a server takes one.")
    drafter: str = option("", "The drafter of foredraft serve; the draft model unless given.")
    dtype: str = option("bfloat16", "Of the weights.")
    length: int = option(5, "Drafted tokens per round of peers; ours plans.", least=1)
    only: tuple[str, ...] = option(SIDES, f"A side: {', '.join(SIDES)}.")
    chosen: tuple[str, ...] = option(FIGURES, f"What is measured: {', '.join(FIGURES)}.", flag="--figures")
    turns: int = option(3, "Turns of each cell.", least=1)
    tokens: int = option(128, "Tokens out.", least=2)
    prompts: int = option(16, "Prompts of a run, half of them copying; with more clients, as many as clients.", least=2)
    seconds: float = option(60.0, "Of a run at a rate.", least=1)
    overload: float = option(300.0, "Seconds of the overload.", least=1)
    long: int = option(2000, "Tokens of the prompt that joins, about.", least=64)
    flags: str = option("", "Further flags of foredraft serve.")
    fastest: str = option("", "Flags of foredraft serve for the fastest layout, which the deterministic one is compared with.")
    earlier: Path | None = option(None, "NAME.json.gz of an earlier run, whose records are kept.", place=True)

    @property
    def ours(self) -> str:
        """The drafter of our server."""
        return self.drafter or f"draft-model:{self.draft}"


@dataclass(frozen=True)
class Run:
    """A closed loop, or the Session driven directly. ``share`` is the load tool's CPU time, in cores."""

    cell: str
    side: str
    mode: str
    clients: int
    temperature: float
    turn: int
    tokens: int
    requests: int
    seconds: float
    share: float


@dataclass(frozen=True)
class Rate:
    """An open loop at ``rate`` requests/s: p99 of seconds to the first token, and per token after it."""

    peer: str
    side: str
    turn: int
    rate: float
    first: float
    between: float
    refused: int
    share: float


@dataclass(frozen=True)
class Number:
    """One more measured value of a cell."""

    cell: str
    turn: int
    value: float
    how: str = ""
