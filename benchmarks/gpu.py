"""What can only be seen on a GPU, in one command: ``make gpu``, or ``python -m benchmarks.gpu [FOLDER]``.

Each stage writes its report (one JSON file) before the next begins: keyed noise against the CPU's, the tests marked ``cuda``, and a model
of the size and shape of Llama 3.2 1B with random weights: its speed per dtype and backend, and with its cache in pages and in one block.
The whole takes at most 20 minutes: a stage that no time is left for is reported as not run. A stage that fails is reported as failed, and
the others still run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from foredraft import Speculator
from foredraft.device import wait_for
from foredraft.logits.noise import Noise, Purpose

MINUTES = 20
RESERVE = 30  # seconds that a stage needs to be begun at all
TESTS = 8 * 60  # seconds for the tests at most
NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BACKENDS = {"eager": {"execution": "eager"}, "graphs": {"execution": "graphs"}, "flex": {"attention": "flex"}}
PAGES = "bfloat16"  # in which pages are timed
PAGED = {**BACKENDS, "compiled": {"execution": "compiled"}}
CACHES = {"block": "auto", "pages": "4GiB"}  # cache_memory of each
ROWS = (1, 8)
SHAPES = {"none": None, "chain(4)": "chain(4)", "product(2,2,1)": "product(2,2,1)"}
PROMPT, NEW, REPEATS = 512, 128, 5
LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}

Stage = Callable[[float], dict[str, Any]]  # seconds left -> report; "ok" says whether it passed


def run_stages(stages: dict[str, Stage], folder: Path, *, minutes: float = MINUTES, clock: Callable[[], float] = time.monotonic) -> bool:
    """Run ``stages`` in order, each report on disk before the next stage begins; returns whether all of them passed."""
    folder.mkdir(parents=True, exist_ok=True)
    end, passed = clock() + 60 * minutes, True
    for name, stage in stages.items():
        left, began = end - clock(), clock()
        report: dict[str, Any]
        if left < RESERVE:
            report = {"ok": False, "reason": f"not run: the {minutes:g} minutes are used up"}
        else:
            try:
                report = stage(left)
            except Exception as error:  # whatever a device raises, the other stages are to be seen
                report = {"ok": False, "reason": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
        report = {"stage": name, "seconds": round(clock() - began, 2), **report}
        (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {'ok' if report['ok'] else 'failed, ' + str(report.get('reason', 'see the report'))}", flush=True)
        passed = passed and bool(report["ok"])
    return passed


def noise(left: float) -> dict[str, Any]:
    """Words and races of keyed noise have the same values on the GPU as on the CPU, and exponentials but for their rounding."""
    found = {}
    for device in ("cpu", "cuda"):
        made = Noise(torch.arange(1, 9, device=device) * 7919, torch.arange(8, device=device) * 31)
        p = torch.softmax(torch.arange(8 * 4 * 997, dtype=torch.float64).reshape(8, 4, 997).sin(), -1).float().to(device)
        depths = torch.arange(4, device=device).expand(8, 4)
        words, race = made.words(Purpose.MATCH, depths + 1), made.race(p, depths)
        found[device] = {"words": words.cpu(), "exponentials": made.exponentials(words, 997).cpu(), "race": race.cpu()}
    equal = alike(found["cpu"], found["cuda"])
    return {"ok": all(equal.values()), "equal": equal}


def alike(here: dict[str, torch.Tensor], there: dict[str, torch.Tensor]) -> dict[str, bool]:
    """What is the same in both. Devices round the logarithm in an exponential differently, in its last bits."""
    equal = {name: torch.equal(here[name], there[name]) for name in ("words", "race")}
    return {**equal, "exponentials": torch.allclose(there["exponentials"], here["exponentials"], rtol=1e-6, atol=0)}


def tests(left: float) -> dict[str, Any]:
    """The tests marked ``cuda``, skipped ones counted as not passed."""
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-rs", "-p", "no:xdist"]  # a second -q would leave the summary out
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=min(left, TESTS), check=False)
    except subprocess.TimeoutExpired as error:
        return {"ok": False, "reason": "the tests took too long", "output": str(error.stdout)[-4000:]}
    summary = done.stdout.strip().splitlines()[-1:]
    return {"ok": done.returncode == 0 and "skipped" not in "".join(summary), "output": done.stdout[-4000:]}


def speed(dtype: str, backend: str) -> Stage:
    """Tokens per second of one row, greedy, with and without a draft, behind a prompt that repeats itself."""

    def measure(left: float) -> dict[str, Any]:
        end = time.monotonic() + left
        model = llama_1b(NAMES[dtype])
        batch = prompts(1, model.device)
        figures: dict[str, Any] = {}
        for name, shape in SHAPES.items():
            drafter = "none" if shape is None else "prompt-lookup"
            speculator = Speculator(model, drafter, shape=shape, **BACKENDS[backend])  # type: ignore[arg-type]
            rates: list[float] = []
            for repeat in range(1 + REPEATS):  # the first warms up
                if time.monotonic() > end:
                    break
                found = rate(speculator, batch)
                rates += [found] if repeat else []
            used, reasons = speculator.target.execution, dict(speculator.target.reasons)
            figures[name] = {"tokens_per_second": rates, "median": statistics.median(rates) if rates else None, "execution": used}
            figures[name]["reasons"] = reasons
            speculator.close()
        return {"ok": all(each["median"] for each in figures.values()), "gpu": torch.cuda.get_device_name(), "figures": figures}

    return measure


def prompts(rows: int, device: torch.device) -> dict[str, Any]:
    """Texts that repeat themselves; each is 40 tokens shorter than the one before, and padded."""
    places = torch.arange(PROMPT, device=device)
    mask = places >= 40 * torch.arange(rows, device=device)[:, None]
    return {"input_ids": (places % 61 + 3).expand(rows, -1), "attention_mask": mask.long()}


def rate(speculator: Speculator, batch: dict[str, Any]) -> float:
    """New tokens of all rows per second."""
    wait_for(speculator.target.device)
    began = time.perf_counter()
    speculator.generate(**batch, pad_token_id=0, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    wait_for(speculator.target.device)
    return NEW * len(batch["input_ids"]) / (time.perf_counter() - began)


def pages(backend: str) -> Stage:
    """Tokens per second with the cache in pages and with it in one block, in turns, for one row and for rows of unequal lengths. ``ratio``
    is the median of pages over block."""

    def measure(left: float) -> dict[str, Any]:
        end = time.monotonic() + left
        models = {cache: llama_1b(NAMES[PAGES]) for cache in CACHES}  # two, because layers are compiled in place
        figures: dict[str, Any] = {}
        reasons: dict[str, Any] = {}
        for name, shape in SHAPES.items():
            how: dict[str, Any] = {"drafter": "none" if shape is None else "prompt-lookup", "shape": shape, **PAGED[backend]}
            made = {cache: Speculator(models[cache], cache_memory=memory, **how) for cache, memory in CACHES.items()}
            reasons = {cache: dict(speculator.target.reasons) for cache, speculator in made.items()}
            for rows in ROWS:
                batch, turns = prompts(rows, made["pages"].target.device), list[dict[str, float]]()
                for turn in range(1 + REPEATS):  # the first warms up
                    if time.monotonic() < end:
                        found = {cache: rate(speculator, batch) for cache, speculator in made.items()}
                        turns += [found] if turn else []
                ratio = statistics.median(turn["pages"] / turn["block"] for turn in turns) if turns else None
                figures[f"{name}, rows: {rows}"] = {"tokens_per_second": turns, "ratio": ratio}
            for speculator in made.values():
                speculator.close()
        ok = all(each["ratio"] for each in figures.values())
        return {"ok": ok, "gpu": torch.cuda.get_device_name(), "figures": figures, "reasons": reasons}

    return measure


def llama_1b(dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        return LlamaForCausalLM(LlamaConfig(**LLAMA_1B)).to(dtype).eval()


def main() -> int:
    if not torch.cuda.is_available():
        print("make gpu needs a CUDA device, and torch finds none on this machine", file=sys.stderr)
        return 1
    stages: dict[str, Stage] = {"noise": noise, "tests": tests}
    for dtype in ("bfloat16", "float16", "float32"):
        stages.update({f"speed-{dtype}-{backend}": speed(dtype, backend) for backend in BACKENDS})
        if dtype == PAGES:
            stages.update({f"pages-{backend}": pages(backend) for backend in PAGED})
    return 0 if run_stages(stages, Path(sys.argv[1] if len(sys.argv) > 1 else "build/gpu")) else 1


if __name__ == "__main__":
    sys.exit(main())
