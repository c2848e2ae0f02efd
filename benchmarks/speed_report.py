"""The speed suite's document, its tables and notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks import speed_claims
from benchmarks.overhead_report import machine
from benchmarks.report import Table
from benchmarks.speed import Run
from benchmarks.speed_claims import Figure, Findings
from benchmarks.speed_figures import LEVEL, PERCENTILES, RESAMPLES, Calls, Estimate, best
from benchmarks.speed_plan import TEXT
from benchmarks.speed_records import raw
from benchmarks.verdicts import Spread

SCHEMA = 1
SUITE = "speed"
TITLE = "Speed: Foredraft beside its peers"
PARTS = ("prefill", "draft", "target", "overhead")
BUSY = 0.05  # CPU seconds of the sleepers per second of a call, from which on a note says so


def document(run: Run, *, command: str, environment: dict[str, Any]) -> dict[str, Any]:
    """Everything about a run as plain values; the schema is checked by the tests."""
    return {
        "schema": SCHEMA,
        "suite": SUITE,
        **calls_and_conditions(run, command=command, environment=environment),
        "claims": [figure.plain() for figure in speed_claims.made(run)],
        "figures": [figures(group, calls, name) for group, calls in groups(run) for name in calls.by_contender],
    }


def calls_and_conditions(run: Run, *, command: str, environment: dict[str, Any]) -> dict[str, Any]:
    """What was run, where, and what came of every call."""
    return {
        "command": command,
        "environment": environment,
        "settings": asdict(run.settings),
        "versions": run.versions,
        "contenders": {name: {**asdict(each), "options": dict(each.options)} for name, each in run.everyone.items()},
        "contender_notes": run.notes,
        "interval": {"method": "percentile bootstrap over prompts and repeats, paired", "level": LEVEL, "resamples": RESAMPLES},
        "failures": [asdict(failure) for failure in run.failures],
        "bytes_per_pass": run.bytes,
        "reads": [asdict(each) for each in run.reads],
        "curves": [asdict(each) for each in run.curves],
        "measurements": raw(run.measurements),
    }


Group = tuple[str, str, str, int]  # target, dtype, scenario, batch


def groups(run: Run) -> list[tuple[Group, Calls]]:
    """Calls that are comparable, in the order in which they were made."""
    keys = dict.fromkeys((each.target, each.dtype, each.scenario, each.batch) for each in run.measurements)
    return [
        (key, Calls([each for each in run.measurements if (each.target, each.dtype, each.scenario, each.batch) == key])) for key in keys
    ]


def figures(group: Group, calls: Calls, name: str) -> dict[str, Any]:
    equal, compared, first = calls.equal(name)
    found: dict[str, Any] = dict(zip(("target", "dtype", "scenario", "batch"), group))
    found |= {"contender": name, "finished": name in calls.finished}
    for figure, estimate in (("tokens_per_second", calls.rate(name)), ("acceptance_length", calls.acceptance(name))):
        found[figure] = None if estimate is None else asdict(estimate.spread)
    found["over_own_plain"] = _spread_or_none(over_plain(calls, name))
    found["time_to_first_token"] = calls.first_token(name)
    percentiles = calls.percentiles(name)
    found["inter_token"] = None if percentiles is None else dict(zip(map(str, PERCENTILES), percentiles))
    found["same_as_plain"] = {"equal": equal, "compared": compared, "first_difference": first}
    equal, compared, first = calls.equal(name, reference=True)
    found["same_as_reference"] = {"equal": equal, "compared": compared, "first_difference": first}
    return found


def _spread_or_none(estimate: Estimate | None) -> dict[str, float] | None:
    return None if estimate is None else asdict(estimate.spread)


def over_plain(calls: Calls, name: str) -> Estimate | None:
    """Tokens per second over those of the same side's plain decoding, the faster one where it has two."""
    side = name.split()[0]
    plain = [rate for other in calls.by_contender if other.startswith(f"{side} plain") and (rate := calls.rate(other)) is not None]
    rate = calls.rate(name)
    return None if rate is None or not plain else rate / max(plain, key=lambda each: each.value)


# -- tables ---------------------------------------------------------------------------------------------------------------


def tables(run: Run) -> list[Table]:
    shown = [claims(speed_claims.made(run))]
    for (target, dtype, scenario, batch), calls in groups(run):
        where = ", ".join([*([target] if len(run.settings.targets) > 1 else []), dtype])
        if scenario == TEXT:
            shown += [speed(f"Tokens per second, {where}", calls), _best(run, target, dtype, calls, where)]
            shown += [latency(f"Latency, {where}", calls), split(f"Time split, {where}", calls), equality(run, calls, where)]
            shown += _categories(calls, where)
        else:
            shown.append(speed(f"{scenario.capitalize()} {batch if scenario == 'batch' else f'at batch {batch}'}, {where}", calls))
    return [*shown, *failed(run)]


def failed(run: Run) -> list[Table]:
    rows = [(each.contender, each.dtype, each.stage, each.message) for each in run.failures]
    return [Table("Failed", ("contender", "dtype", "stage", "reason"), rows)] if rows else []


def claims(made: Sequence[Figure]) -> Table:
    rows = [(each.name, each.bound, "—" if each.spread is None else bracketed(each.spread, 2), each.verdict, each.how) for each in made]
    return Table("Figures to reach", ("figure", "at least", "measured", "verdict", "from"), rows)


def speed(title: str, calls: Calls) -> Table:
    columns = ("contender", "tokens/s", "after the first token", "over own plain", "acceptance length", "passes per call", "equal to plain")
    rows = []
    for name in calls.by_contender:
        rate, later, over, kept = calls.rate(name), calls.decoding_rate(name), over_plain(calls, name), calls.acceptance(name)
        passes = [each.passes for each in calls.by_contender[name] if each.passes is not None]
        equal, compared, _ = calls.equal(name)
        rows.append(
            (
                name,
                "failed" if rate is None else bracketed(rate.spread, 1),
                "—" if later is None else f"{later.value:.1f}",
                "—" if over is None else bracketed(over.spread, 2),
                "—" if kept is None else f"{kept.value:.2f}",
                f"{sum(passes) / len(passes):.1f}" if passes else "—",
                f"{equal}/{compared}" if compared else "—",
            )
        )
    return Table(title, columns, rows)


def _best(run: Run, target: str, dtype: str, calls: Calls, where: str) -> Table:
    """The best setting of each side, mode by mode, and ours over it."""
    findings, rows = Findings(run, target, dtype), []
    modes = list(dict.fromkeys(each.mode for each in run.everyone.values()))
    for mode in modes:
        ours = best(findings.names(mode, ours=True), calls.rate)
        for side in ("foredraft", *run.settings.peers):
            names = findings.names(mode, ours=side == "foredraft", side=side)
            found = best(names, calls.rate)
            if found is None:
                continue
            ratio = "" if ours is None or side == "foredraft" else bracketed((ours[1] / found[1]).spread, 2)
            rows.append((f"{mode}: {side}", found[0].partition(", ")[2] or "—", bracketed(found[1].spread, 1), ratio))
    return Table(f"Best setting of each side, {where}", ("side", "setting", "tokens/s", "Foredraft over it"), rows)


def latency(title: str, calls: Calls) -> Table:
    rows = []
    for name in calls.by_contender:
        first, percentiles = calls.first_token(name), calls.percentiles(name)
        cells = ["—"] * len(PERCENTILES) if percentiles is None else [f"{value * 1e3:.1f}" for value in percentiles]
        rows.append((name, "—" if first is None else f"{first * 1e3:.0f}", *cells))
    return Table(title, ("contender", "first token, ms", *(f"between tokens p{each}, ms" for each in PERCENTILES)), rows)


def split(title: str, calls: Calls) -> Table:
    rows = []
    for name in calls.by_contender:
        shares = [calls.share(name, part) for part in PARTS]
        if any(share is not None for share in shares):
            rows.append((name, *("—" if share is None else f"{share.value:.1%}" for share in shares)))
    return Table(title, ("contender", *PARTS), rows)


def equality(run: Run, calls: Calls, where: str) -> Table:
    rows = []
    for name in calls.by_contender:
        cells = []
        for reference in (False, True):
            equal, compared, first = calls.equal(name, reference)
            cells += [f"{equal} of {compared}" if compared else "—", "—" if first is None else str(first)]
        rows.append((name, *cells))
    whose = run.reference or "nobody"
    columns = ("contender", "equal to own plain", "first difference at", f"equal to {whose}", "first difference at")
    return Table(f"Equality of texts, {where}", columns, rows)


def _categories(calls: Calls, where: str) -> list[Table]:
    """Tokens per second by category, where there are several."""
    every = [each for rows in calls.by_contender.values() for each in rows]
    categories = list(dict.fromkeys(each.category for each in every))
    if len(categories) < 2:
        return []
    parts = [Calls([each for each in every if each.category == category]) for category in categories]
    rows = []
    for name in calls.by_contender:
        rates = [part.rate(name) for part in parts]
        rows.append((name, *("failed" if rate is None else f"{rate.value:.1f}" for rate in rates)))
    return [Table(f"Tokens per second by category, {where}", ("contender", *categories), rows)]


# -- notes ----------------------------------------------------------------------------------------------------------------


def notes(run: Run, *, command: str, environment: dict[str, Any]) -> list[str]:
    settings = run.settings
    turns = sum(len(prompt.turns) for prompt in run.prompts)
    where = "; ".join(
        f"{name} ({', '.join(f'{package} {version}' for package, version in found.items())})" for name, found in run.versions.items()
    )
    how = "greedy" if settings.temperature == 0 else f"at temperature {settings.temperature:g}"
    found = [
        f"`{command}`",
        machine(environment),
        f"Contenders, each in a process and environment of its own: {where or 'none started'}.",
        f"Target {', '.join(settings.targets)}, draft {settings.draft}; {how}, {turns} prompts × {settings.tokens} new tokens, end of "
        f"text ignored, {settings.repeats} repeats in turns after {settings.warmups} warm-up calls, {settings.threads} threads. Everyone "
        "reads the same checkpoint files, converted where an engine has a format of its own. "
        f"γ = {', '.join(map(str, settings.lengths))} for peers; {', '.join(settings.shapes)} for Foredraft; lookup matches of up to "
        f"{settings.ngram} tokens where that can be set.",
        f"Tokens per second are new tokens over the sum of each prompt's median seconds, prompt included; in brackets {LEVEL:.0%} "
        f"bootstrap intervals over prompts and repeats ({RESAMPLES} draws that all contenders share, so that quotients are paired). "
        "After the first token: of the first row, without the pass over the prompt. Acceptance length is tokens over passes, after the "
        "pass over the prompt. Tokens of one round come together, so that times between tokens are 0 or a round.",
        missing(run),
        memory(run),
        quiet(run),
        instrument(run),
        "Prompt lookups are not one algorithm: engines differ in which match they take and how long it must be, so acceptance lengths "
        "stand beside the speeds. Passes are counted at the target, alike for all; llama.cpp's pass over the prompt makes no token, its "
        "first round does what the others' prompt pass does.",
    ]
    return [note for note in found if note]


def missing(run: Run) -> str:
    absent = {each.contender.split()[0]: each.message for each in run.failures if each.stage == "set-up"}
    started = {each.split()[0] for each in {m.contender for m in run.measurements}}
    gone = [f"{name} ({message})" for name, message in absent.items() if name not in started]
    return f"Not measured: {'; '.join(gone)}." if gone else ""


def memory(run: Run) -> str:
    said = []
    for target in run.settings.targets:
        for dtype in run.settings.dtypes:
            rates = [each.rate / 1e9 for each in run.reads if (each.target, each.dtype) == (target, dtype)]
            if rates:
                said.append(f"{dtype} {median(rates):.1f} GB/s ({min(rates):.1f}–{max(rates):.1f}, {len(rates)} reads)")
    what = "a sum over 400 MB by as many threads" if run.settings.device == "cpu" else "a copy of 400 MB, read and written"
    return f"Memory, {what}, beside plain calls: {'; '.join(said)}." if said else ""


def quiet(run: Run) -> str:
    busy = [each.others for each in run.measurements if each.others is not None]
    if not busy:
        return ""
    worst = sorted(busy)[int(0.99 * (len(busy) - 1))]
    warning = " That is too much: a contender was not stopped." if worst > BUSY else ""
    return f"While one contender computed, all others together used {worst:.1%} of a CPU at most (99th percentile).{warning}"


def instrument(run: Run) -> str:
    inflated = [each for each in run.settings.targets if each.startswith("zoo:") and each.endswith("300m")]
    if not inflated:
        return ""
    return (
        f"{inflated[0]} is a benchmark instrument: a small model inflated to the cost of a large one, with the same function. Its matrices "
        "of zeros were replaced by numbers of the order of 1e-12, so that no engine saves reading them."
    )


def missed(run: Run) -> Sequence[str]:
    return [figure.name for figure in speed_claims.made(run) if figure.verdict == "missed"]


def bracketed(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}–{spread.high:.{digits}f})"
