"""Two commits in turns: what a change did to speed.

    git worktree add /tmp/old COMMIT
    python -m benchmarks.commits --old /tmp/old --new . --turns 12 --out docs/benchmarks/commits

Each side is a process of its own that loads the models once and waits. A turn runs every cell on both sides, one directly after the other,
and who begins alternates. The figure of a cell is the median over turns of new tokens per second over old ones, with a 95 % bootstrap
interval. Only the public API is used, so that the same code measures both.

Overhead cells use a target so small (0.9 M parameters) that most of a round is the loop; speed cells a model of 300 M in bfloat16.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

PROMPTS = [
    "def read_lines(path):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items",
    "import os\nimport sys\n\n\ndef main(argv):\n    for name in argv:\n        print(name)\n\n\ndef walk(folder):\n    ",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / len(values)\n\n\n"
    "def variance(values):\n    ",
]
SMALL, LARGE, DRAFT = "zoo:python-1m", "zoo:python-300m", "zoo:python-1m"
# name: target, dtype, drafter, shape, rows, sampled, new tokens
CELLS: dict[str, tuple[str, str, str, str, int, bool, int]] = {
    "overhead: plain, greedy": (SMALL, "float32", "none", "chain(0)", 1, False, 96),
    "overhead: plain, sampled": (SMALL, "float32", "none", "chain(0)", 1, True, 96),
    "overhead: lookup, greedy": (SMALL, "float32", "prompt-lookup", "chain(5)", 1, False, 128),
    "overhead: lookup, sampled": (SMALL, "float32", "prompt-lookup", "chain(5)", 1, True, 128),
    "overhead: draft model, greedy": (SMALL, "float32", f"draft-model:{DRAFT}", "chain(5)", 1, False, 256),
    "overhead: draft model, sampled": (SMALL, "float32", f"draft-model:{DRAFT}", "chain(5)", 1, True, 256),
    "overhead: draft model, tree": (SMALL, "float32", f"draft-model:{DRAFT}", "product(4,2,1)", 1, False, 128),
    "overhead: lookup, 4 rows": (SMALL, "float32", "prompt-lookup", "chain(5)", 4, False, 96),
    "speed: plain": (LARGE, "bfloat16", "none", "chain(0)", 1, False, 32),
    "speed: draft model": (LARGE, "bfloat16", f"draft-model:{DRAFT}", "auto", 1, False, 64),
    "speed: lookup": (LARGE, "bfloat16", "prompt-lookup", "auto", 1, False, 64),
    "speed: draft model, sampled": (LARGE, "bfloat16", f"draft-model:{DRAFT}", "auto", 1, True, 64),
    "speed: draft model, 4 rows": (LARGE, "bfloat16", f"draft-model:{DRAFT}", "auto", 4, False, 48),
}


def serve(threads: int) -> None:
    """The worker: reads names of cells, answers with a JSON line each."""
    beside = str(Path(__file__).resolve().parent)
    sys.path[:] = [path for path in sys.path if str(Path(path).resolve()) != beside]  # its modules hide others of the same names

    import torch

    import foredraft

    torch.set_num_threads(threads)
    tokenizer = foredraft.zoo.load_tokenizer(SMALL)
    tokenizer.padding_side = "left"
    built: dict[tuple[str, ...], Any] = {}
    for line in sys.stdin:
        name, turn = json.loads(line)
        target, dtype, drafter, shape, rows, sampled, tokens = CELLS[name]
        key = (target, dtype, drafter, shape)
        if key not in built:
            built[key] = foredraft.Speculator(target, drafter, dtype=dtype, shape=shape)
        chosen = [PROMPTS[(turn + index) % len(PROMPTS)] for index in range(rows)]
        inputs = tokenizer(chosen, return_tensors="pt", padding=True)
        begin, used = time.perf_counter(), time.process_time()
        out = built[key].generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=sampled, seed=turn)
        seconds, used = time.perf_counter() - begin, time.process_time() - used
        print(json.dumps([out.stats.new_tokens, seconds, used, out.stats.target_passes]), flush=True)


class Side:
    """One commit's process."""

    def __init__(self, folder: Path, threads: int):
        paths = [folder / "src", folder / "zoo"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "FOREDRAFT_CACHE": "off", "HF_HUB_OFFLINE": "1"}
        environment |= {"OMP_NUM_THREADS": str(threads), "TRANSFORMERS_VERBOSITY": "error"}
        command = [sys.executable, __file__, "--worker", "--threads", str(threads)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)  # type: ignore[call-overload]
        asked = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]  # the commit, and whether files differ from it
        self.commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip()

    def run(self, name: str, turn: int) -> list[float]:
        self.process.stdin.write(json.dumps([name, turn]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.commit} ended in {name!r}")
        return json.loads(line)


def interval(ratios: list[float], draws: int = 2000) -> tuple[float, float, float]:
    """Median and 95 % bootstrap interval."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(draws))
    return statistics.median(ratios), medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path, default=Path())
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cells", default="", help="only cells whose names contain this")
    parser.add_argument("--cpu", action="store_true", help="compare CPU seconds, for a machine that is busy")
    parser.add_argument("--out", type=Path, help="path without an ending; .md and .json.gz are written")
    arguments = parser.parse_args()
    if arguments.worker:
        serve(arguments.threads)
        return
    from benchmarks.environment import cpu_model

    sides = [Side(arguments.old.resolve(), arguments.threads), Side(arguments.new.resolve(), arguments.threads)]
    names = [name for name in CELLS if arguments.cells in name]
    calls: dict[str, list[list[list[float]]]] = {name: [] for name in names}
    for turn in range(-2, arguments.turns):  # two turns to warm up: costs are measured, kernels settle
        for name in names:
            order = (0, 1) if turn % 2 else (1, 0)
            found = {side: sides[side].run(name, max(turn, 0)) for side in order}
            if turn >= 0:
                calls[name].append([found[0], found[1]])
    which = 2 if arguments.cpu else 1
    lines = ["| cell | new over old | 95 % interval | old tokens/s | tokens per pass, old and new |", "|---|---|---|---|---|"]
    for name in names:
        rates = [[call[0] / call[which] for call in pair] for pair in calls[name]]
        middle, low, high = interval([new / old for old, new in rates])
        passes = [sum(pair[side][0] for pair in calls[name]) / sum(pair[side][3] for pair in calls[name]) for side in (0, 1)]
        rate = statistics.median(old for old, _ in rates)
        lines.append(f"| {name} | {middle:.3f} | {low:.3f}–{high:.3f} | {rate:.1f} | {passes[0]:.2f} {passes[1]:.2f} |")
    turns = zip(*([new[0] / new[which] / (old[0] / old[which]) for old, new in calls[name]] for name in names))
    middle, low, high = interval([statistics.median(turn) for turn in turns])  # what a turn's cells share is not independent
    lines.append(f"| all cells | {middle:.3f} | {low:.3f}–{high:.3f} | | |")
    about = f"{sides[1].commit} over {sides[0].commit}; {arguments.turns} turns; {arguments.threads} threads; "
    about += f"{'CPU seconds' if arguments.cpu else 'seconds'}; torch {version('torch')}, transformers {version('transformers')}, "
    about += f"Python {platform.python_version()}; {cpu_model()}"
    text = "\n".join([f"# Two commits in turns\n\n{about}.\n", *lines, ""])
    print(text)
    if arguments.out:
        arguments.out.with_suffix(".md").write_text(text)
        data = json.dumps({"about": about, "calls": calls}, separators=(",", ":"))
        arguments.out.with_suffix(".json.gz").write_bytes(gzip.compress(data.encode(), mtime=0))


if __name__ == "__main__":
    main()
