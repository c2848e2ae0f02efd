"""What a run reports: sums and means of its steps, a JSON line per report, curves as a picture, TensorBoard where it is installed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.training.data import write_bytes

LOG, PICTURE = "log.jsonl", "curves.png"


class Journal:
    """Of one folder. Lines of steps after ``step`` are taken back, because a resumed run makes them again."""

    def __init__(self, folder: Path, *, step: int):
        self.folder, self.path = folder, folder / LOG
        kept = [line for line in self.read(folder) if 0 < step >= line["step"]]  # a run that begins keeps nothing
        write_bytes(self.path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._board = _tensorboard(folder / "tensorboard", step)

    def write(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=True) + "\n")
        if self._board is not None:
            for name, value in line.items():
                each = {f"{name}/{index}": one for index, one in enumerate(value, 1)} if isinstance(value, (list, tuple)) else {name: value}
                for label, number in each.items():
                    if isinstance(number, (int, float)) and name != "step":
                        self._board.add_scalar(label, number, line["step"])

    @staticmethod
    def read(folder: Path) -> list[dict[str, Any]]:
        """All lines of a folder's log; one that a crash cut off is left out."""
        found = []
        if (folder / LOG).exists():
            for line in (folder / LOG).read_text(encoding="utf-8").splitlines():
                try:
                    found.append(json.loads(line))
                except json.JSONDecodeError:
                    continue
        return found

    def close(self) -> None:
        if self._board is not None:
            self._board.close()

    def draw(self) -> None:
        """Draw the curves of losses and acceptance, if matplotlib is installed."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            return
        lines = self.read(self.folder)
        reports = [line for line in lines if "loss" in line]
        measured = [line for line in lines if "acceptance_length" in line]
        figure = Figure(figsize=(12, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        left, middle, right = figure.subplots(1, 3)
        for name in sorted({name for line in reports for name in line if name.startswith("loss")})[:12]:
            left.plot(*zip(*[(line["step"], line[name]) for line in reports if name in line]), label=name, linewidth=1)
        left.set(xlabel="step", title="training loss")
        steps = [line["step"] for line in measured]
        if own := [(line["step"], line["held_out_loss"]) for line in measured if "held_out_loss" in line]:
            left.plot(*zip(*own), marker=".", label="the model's own, held out")
        middle.plot(steps, [line["acceptance_length"] for line in measured], marker=".")
        middle.set(xlabel="step", title="held-out acceptance length, greedy chain")
        for depth, shares in enumerate(zip_longest(*(line["accepted_by_depth"] for line in measured), fillvalue=math.nan), 1):
            right.plot(steps, shares, marker=".", label=f"depth {depth}")
        right.set(xlabel="step", ylim=(0, 1), title="accepted, of those drafted at a depth")
        for each in (left, right):
            if each.lines:
                each.legend(fontsize="x-small")
        figure.savefig(self.folder / PICTURE, dpi=110)


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)


class Sums:
    """Scalars of the micro-batches of a step, each weighted by its tokens, on their device until they are asked for."""

    def __init__(self, device: torch.device):
        self.weight = torch.zeros((), device=device)
        self._sums: dict[str, Tensor] = {}

    def add(self, values: Mapping[str, Tensor], weight: Tensor) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, torch.zeros_like(self.weight)) + value.detach() * weight
        self.weight = self.weight + weight

    def vector(self, *more: float) -> Tensor:
        """``[2 + len(more) + …]`` the weight, ``more``, and the sums: to be added up over processes."""
        others = torch.tensor(more, dtype=self.weight.dtype, device=self.weight.device)
        return torch.cat([self.weight[None], others, *(value[None] for value in self._sums.values())])

    def means(self, vector: Tensor) -> dict[str, float]:
        """From such a vector, without what came before the sums."""
        values = vector[-len(self._sums) :].tolist()
        return {name: value / max(1.0, float(vector[0])) for name, value in zip(self._sums, values)}


class Since:
    """Means over the steps since the last report, and the speed."""

    def __init__(self) -> None:
        self._lines: list[Mapping[str, float]] = []
        self._begin, self._tokens = time.monotonic(), -1

    def add(self, line: Mapping[str, float]) -> None:
        self._lines.append(line)

    def taken(self, tokens: int) -> dict[str, float]:
        """``tokens`` were counted so far in all."""
        lines, now = self._lines, time.monotonic()
        means = {name: sum(line[name] for line in lines) / len(lines) for name in lines[0]}
        if self._tokens >= 0:
            means["tokens_per_second"] = (tokens - self._tokens) / max(1e-9, now - self._begin)
        self._lines, self._begin, self._tokens = [], now, tokens
        return means
