"""What can only be seen on a GPU, in one command: ``make gpu``, or ``python -m benchmarks.gpu [FOLDER [MINUTES]]``.

Each stage writes its report (one JSON file) before the next begins: keyed noise against the CPU's, speed beside transformers with models
of two sizes, and the tests marked ``cuda``. A page of all of them is written in the end. The whole takes at most 20 minutes: a stage that
no time is left for is reported as not run. A stage that fails is reported as failed, and the others still run.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import operator
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import describe
from benchmarks.report import Report, Table
from foredraft import Speculator
from foredraft.device import wait_for
from foredraft.drafters.draft_model import DraftModel
from foredraft.inflation import inflate
from foredraft.logits.noise import Noise, Purpose
from foredraft.zoo import DRAFT, TARGET, load, load_tokenizer
from foredraft.zoo import prompts as some_prompts

MINUTES = 20
RESERVE = 30  # seconds that a stage needs to be begun at all
TESTS = 8 * 60  # seconds for the tests at most
WORKERS = 12
SIZES = {"0.3B": (1024, 24, 512), "6.5B": (4096, 32, 2048)}  # width and layers that python-8m is inflated to, and python-1m's width
NEW, PROMPTS, WARM_UPS, REPEATS = 64, 2, 4, 3
THEIRS = "transformers"
ASSISTED = "transformers, assistant"
SAMPLED = "draft model, temperature 1"
DRAFTED = {"drafter": "draft"}
METHODS: dict[str, dict[str, Any]] = {  # what a Speculator is given; a drafter called draft is the draft model
    "plain, eager": {"drafter": "none", "execution": "eager"},
    "plain": {"drafter": "none"},
    "plain, compiled": {"drafter": "none", "execution": "compiled"},
    "prompt-lookup": {"drafter": "prompt-lookup"},
    "draft model": DRAFTED,
    "draft model, chain(5)": {**DRAFTED, "shape": "chain(5)"},
    "draft model, chain(5), compiled": {**DRAFTED, "shape": "chain(5)", "execution": "compiled"},
    "draft model, product(2,2,1)": {**DRAFTED, "shape": "product(2,2,1)"},
    "draft model, chain(5), pages": {**DRAFTED, "shape": "chain(5)", "cache_memory": "4GiB"},
    SAMPLED: DRAFTED,
}
PLAN: dict[str, dict[int, Sequence[str]]] = {  # rows and methods; transformers' are always there. One row has all that others have
    "0.3B": {1: list(METHODS), 4: ["plain", "draft model"]},
    "6.5B": {1: ["plain", "draft model", "draft model, chain(5)", "draft model, chain(5), compiled", SAMPLED]},
}

Stage = Callable[[float], dict[str, Any]]  # seconds left -> report; "ok" says whether it passed
Call = Callable[[dict[str, torch.Tensor]], Any]
Run = tuple[float, list[Any]]  # seconds, and what was returned for each batch


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
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-rs"]  # a second -q would leave the summary out
    if importlib.util.find_spec("xdist"):  # compilers work beside each other
        command += ["-n", str(WORKERS), "--dist", "worksteal"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=min(left, TESTS), check=False)
    except subprocess.TimeoutExpired as error:
        return {"ok": False, "reason": "the tests took too long", "output": str(error.stdout)[-4000:]}
    summary = done.stdout.strip().splitlines()[-1:]
    ok = done.returncode == 0 and "skipped" not in "".join(summary)
    return {"ok": ok, "summary": "".join(summary), "output": done.stdout[-4000:]}


def speed(size: str) -> Stage:
    """Tokens per second of every method, in turns, behind prompts that the models have not seen."""

    def measure(left: float) -> dict[str, Any]:
        end = time.monotonic() + left
        target, draft = models(size)
        figures: dict[str, Any] = {}
        speculators = {name: method(name, target, draft) for name in PLAN[size][1]}
        for count, names in PLAN[size].items():
            batches = prompts(count, target.device)
            calls: dict[str, tuple[Call, Speculator | None]] = {THEIRS: (theirs(target), None)}
            if count == 1:  # it takes no more
                calls[ASSISTED] = theirs(target, draft), None
            for name in names:
                sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0} if name == SAMPLED else {}
                calls[name] = ours(speculators[name], **sampling), speculators[name]
            found: dict[str, list[Run]] = {name: [] for name in calls}
            for turn in range(WARM_UPS + REPEATS):
                for name, (call, mine) in calls.items():
                    warm = turn >= WARM_UPS or (turn > 0 and mine is None)  # theirs record nothing
                    if time.monotonic() < end and (not warm or turn >= WARM_UPS):
                        run = timed(call, batches)
                        found[name] += [run] if warm else []
            for name, (_, mine) in calls.items():
                plain = [] if name in (SAMPLED, "plain") else found["plain"]
                figures[f"{name}, rows: {count}"] = summary(found[name], found[THEIRS], plain, mine)
        parameters = {name: sum(each.numel() for each in model.parameters()) for name, model in (("target", target), ("draft", draft))}
        ok = all(len(each["tokens_per_second"]) == REPEATS for each in figures.values())
        reason = {} if ok else {"reason": "time ended before all turns"}
        return {"ok": ok, **reason, "environment": describe("cuda"), "parameters": parameters, "figures": figures}

    return measure


def models(size: str) -> tuple[Any, Any]:
    """python-8m and python-1m at that size, in bfloat16; no text ends early."""
    width, layers, narrow = SIZES[size]
    target, draft = (load(name).to("cuda", torch.bfloat16) for name in (TARGET, DRAFT))
    made = inflate(target, hidden_size=width, layers=layers), inflate(draft, hidden_size=narrow)
    for each in made:
        each.generation_config.eos_token_id = None
    return made


def prompts(rows: int, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """As many batches as there are prompts to one row; of more rows, one of unequal lengths."""
    texts = some_prompts("benchmarks")
    groups = [texts[:rows]] if rows > 1 else [[text] for text in texts[:PROMPTS]]
    tokenizer = load_tokenizer(TARGET)
    return [dict(tokenizer(group, return_tensors="pt", padding=True).to(device)) for group in groups]


def theirs(model: Any, assistant: Any = None) -> Call:
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
    if assistant is not None:
        assistant.generation_config.num_assistant_tokens = 5
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        how["assistant_model"] = assistant
    return lambda batch: model.generate(**batch, **how)


def method(name: str, target: Any, draft: Any) -> Speculator:
    how = dict(METHODS[name])
    compiled = {"execution": how["execution"]} if how.get("execution") == "compiled" else {}
    if compiled:  # the layers of other methods stay as they are
        target, draft = copy.deepcopy(target), copy.deepcopy(draft)
    if how["drafter"] == "draft":
        how["drafter"] = DraftModel(draft, **compiled)
    return Speculator(target, reuse_prefix=False, **how)


def ours(speculator: Speculator, **sampling: Any) -> Call:
    options: dict[str, Any] = {"max_new_tokens": NEW, "pad_token_id": 0, "seed": 1, "do_sample": False, **sampling}
    return lambda batch: speculator.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **options)


def timed(call: Call, batches: list[dict[str, torch.Tensor]]) -> Run:
    """Seconds for all batches, and what was returned for each."""
    wait_for(torch.device("cuda"))
    began = time.perf_counter()
    outputs = [call(batch) for batch in batches]
    wait_for(torch.device("cuda"))
    return time.perf_counter() - began, outputs


def summary(runs: list[Run], theirs: list[Run], plain: list[Run], speculator: Speculator | None) -> dict[str, Any]:
    """Tokens per second of every run; how many times as many as transformers' in the same turn, the median; and how many rows of the last
    run have the text of plain decoding."""
    rates = [NEW * len(rows(run)) / run[0] for run in runs]
    ratios = [other[0] / run[0] for run, other in zip(runs, theirs)]
    found: dict[str, Any] = {"tokens_per_second": rates, "over_transformers": statistics.median(ratios) if ratios else None}
    if runs and plain:
        found["equal_texts"] = [sum(map(operator.eq, rows(runs[-1]), rows(plain[-1]))), len(rows(plain[-1]))]
    if runs and speculator is not None:
        stats = [output.stats for output in runs[-1][1]]
        found["tokens_per_pass"] = NEW * len(rows(runs[-1])) / sum(each.row_passes for each in stats)
        found["shapes"] = [each.shapes for each in stats]
        found["execution"], found["reasons"] = speculator.target.execution, dict(speculator.target.reasons)
    return found


def rows(run: Run) -> list[list[int]]:
    """The ids of every row of every batch, prompts included."""
    return [row for output in run[1] for row in _ids(output).tolist()]


def _ids(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


def page(folder: Path, names: Iterable[str]) -> Report:
    """What the stages found, as a page; of a stage that failed its reason."""
    stages = {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in names}
    where: dict[str, Any] = next((each["environment"] for each in stages.values() if "environment" in each), {})
    packages = ", ".join(f"{name} {version}" for name, version in where.get("packages", {}).items() if version)
    notes = [
        f"{where.get('device')}, {where.get('cpu')}, {where.get('cores')} cores; Python {where.get('python')}, {packages}.",
        "Targets and draft models are python-8m and python-1m of the zoo, inflated to the size and cost of larger models; the draft "
        f"knows the target as well as it does at their own size. bfloat16, {NEW} new tokens. Every method runs once per turn; "
        f"{WARM_UPS} turns warm up, and figures are medians of {REPEATS} turns; × transformers is the median of each turn's quotient. "
        "Shapes that are not named are the planner's, which also may draft nothing: that is 1.02 tokens per pass. Equal texts are rows "
        "whose greedy text is that of plain decoding; in bfloat16, rounding can choose another of two nearly equal tokens.",
    ]
    for name, stage in stages.items():
        notes.append(f"{name}: " + ("passed." if stage["ok"] else f"failed, {stage.get('reason') or stage.get('summary')}."))
    tables = []
    for name, stage in stages.items():
        lines = []
        for method, each in stage.get("figures", {}).items():
            rates, equal = each["tokens_per_second"], each.get("equal_texts")
            cells = [f"{statistics.median(rates):.0f}", f"{each['over_transformers']:.2f}"] if rates else ["–", "–"]
            cells += [f"{each['tokens_per_pass']:.2f}" if "tokens_per_pass" in each else "–", f"{equal[0]} of {equal[1]}" if equal else "–"]
            lines.append([method, each.get("execution", "–"), *cells])
        if lines:
            columns = ["method", "execution", "tokens/s", "× transformers", "tokens per pass", "equal texts"]
            target, draft = (stage["parameters"][which] / 1e9 for which in ("target", "draft"))
            tables.append(Table(f"{name}: target {target:.2f} B parameters, draft {draft:.3f} B", columns, lines))
    return Report("On a GPU", notes, tables)


def main(arguments: Sequence[str]) -> int:
    folder = Path(arguments[0] if arguments else "build/gpu")
    if not torch.cuda.is_available():
        print("make gpu needs a CUDA device, and torch finds none on this machine", file=sys.stderr)
        return 1
    stages: dict[str, Stage] = {"keyed-noise": noise, **{f"speed-{size}": speed(size) for size in SIZES}, "tests": tests}
    passed = run_stages(stages, folder, minutes=float(arguments[1]) if arguments[1:] else MINUTES)
    (folder / "gpu.md").write_text(page(folder, stages).markdown(), encoding="utf-8")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
