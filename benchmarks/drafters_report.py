"""The document, tables and notes of the suite of drafters that need no training."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks import drafters_claims, speed_report
from benchmarks.drafters import COPIES, THEIRS, Run
from benchmarks.drafters_claims import Findings, acceptance
from benchmarks.overhead_report import machine
from benchmarks.report import Table
from benchmarks.speed_figures import LEVEL, RESAMPLES, Calls
from benchmarks.speed_plan import RANDOM, TEXT
from benchmarks.speed_report import bracketed

SCHEMA = 1
SUITE = "drafters"
TITLE = "Drafters that need no training"


def document(run: Run, *, command: str, environment: dict[str, Any]) -> dict[str, Any]:
    """Everything about a run as plain values: the speed suite's members, by suite, and the replays."""
    return {
        "schema": SCHEMA,
        "suite": SUITE,
        **speed_report.calls_and_conditions(run, command=command, environment=environment),
        "keeps": run.settings.kept,
        "datastore": {"files": run.known[0], "tokens": run.known[1]},
        "claims": [figure.plain() for figure in drafters_claims.made(run)],
        "figures": [
            {"suite": suite, **speed_report.figures((target, dtype, scenario, 1), calls, name)}
            for target, dtype, scenario, suite, calls in groups(run)
            for name in calls.by_contender
        ],
        "replays": [asdict(each) for each in run.replays],
    }


def groups(run: Run) -> list[tuple[str, str, str, str, Calls]]:
    """Calls that are comparable: target, dtype, scenario, suite."""
    keys = dict.fromkeys((each.target, each.dtype, each.scenario, each.category) for each in run.measurements)
    return [
        (*key, Calls([each for each in run.measurements if (each.target, each.dtype, each.scenario, each.category) == key])) for key in keys
    ]


# -- tables ---------------------------------------------------------------------------------------------------------------


def tables(run: Run) -> list[Table]:
    made = [speed_report.claims(drafters_claims.made(run))]
    for target in run.settings.targets:
        for dtype in run.settings.dtypes:
            where = ", ".join([*([target] if len(run.settings.targets) > 1 else []), dtype])
            findings = Findings(run, target, dtype)
            parts = [(suite, findings.calls(suite)) for suite in run.suites]
            parts += [("All suites", findings.calls())] if len(parts) > 1 else []
            made += [by_suite(findings, suite, calls, where) for suite, calls in parts if calls.by_contender]
            everything = findings.calls()
            if everything.by_contender:
                made += [speed_report.split(f"Time split, {where}", everything), speed_report.equality(run, everything, where)]
            random = findings.calls(scenario=RANDOM)
            if random.by_contender:
                made.append(speed_report.speed(f"Random text, {where}", random))
    return [*made, *replays(run), *speed_report.failed(run)]


def by_suite(findings: Findings, suite: str, calls: Calls, where: str) -> Table:
    """Every contender on one suite, those that failed too; ours also over vLLM's best setting of the same kind."""
    columns = (
        "contender",
        "tokens/s",
        "over own plain",
        "after the first token",
        "over vLLM's kind",
        "acceptance length",
        "passes per call",
        "equal to plain",
    )
    rows = []
    for name, each in findings.run.everyone.items():
        if each.hopeless:
            continue
        rate, later, kept = calls.rate(name), calls.decoding_rate(name), calls.acceptance(name)
        over = speed_report.over_plain(calls, name)
        passes = [call.passes for call in calls.by_contender.get(name, ()) if call.passes is not None]
        equal, compared, _ = calls.equal(name)
        rows.append(
            (
                name,
                "failed" if rate is None else bracketed(rate.spread, 1),
                "—" if over is None else bracketed(over.spread, 2),
                "—" if later is None else f"{later.value:.1f}",
                _over_theirs(findings, calls, name),
                "—" if kept is None else f"{kept.value:.2f}",
                f"{sum(passes) / len(passes):.1f}" if passes else "—",
                f"{equal}/{compared}" if compared else "—",
            )
        )
    return Table(f"{suite[0].upper()}{suite[1:]}, {where}", columns, rows)


def _over_theirs(findings: Findings, calls: Calls, name: str) -> str:
    each, rate = findings.run.everyone[name], calls.rate(name)
    if each.side != "foredraft" or each.mode not in THEIRS or rate is None:
        return ""
    theirs = [
        other
        for side in findings.run.settings.peers
        for one in findings.names(side, THEIRS[each.mode])
        if (other := calls.rate(one)) is not None
    ]
    return bracketed((rate / max(theirs, key=lambda one: one.value)).spread, 2) if theirs else "—"


def replays(run: Run) -> list[Table]:
    """Acceptance length of every drafter and setting, by suite and draft length."""
    if not run.replays:
        return []
    columns = list(dict.fromkeys((each.suite, each.length) for each in run.replays))
    rows = []
    for name in dict.fromkeys(each.name for each in run.replays):
        cells = [
            acceptance([each for each in run.replays if (each.name, each.suite, each.length) == (name, *column)]) for column in columns
        ]
        rows.append((name, *("—" if cell is None else f"{cell.value:.3f}" for cell in cells)))
    heads = ("drafter", *(f"{suite}, γ = {length}" for suite, length in columns))
    return [Table(f"Acceptance length of chains, replayed texts of {run.settings.replayed}", heads, rows)]


# -- notes ----------------------------------------------------------------------------------------------------------------


def notes(run: Run, *, command: str, environment: dict[str, Any]) -> list[str]:
    settings = run.settings
    where = "; ".join(
        f"{name} ({', '.join(f'{package} {version}' for package, version in found.items())})" for name, found in run.versions.items()
    )
    texts = len({each.index for each in run.measurements if each.scenario == TEXT})
    found = [
        f"`{command}`",
        machine(environment),
        f"Contenders, each side in a process and environment of its own: {where or 'none started'}.",
        f"Target {', '.join(settings.targets)}, greedy, batch 1: {texts} prompts of {len(run.suites)} suites × {settings.tokens} new "
        f"tokens, end of text ignored, {settings.repeats} repeats in turns after {settings.warmups} warm-up calls, {settings.threads} "
        f"threads. `auto` is what the planner chooses; chains of γ = {', '.join(map(str, settings.lengths))} are equally long on both "
        "sides.",
        "Suites: "
        + "; ".join(f"{name}: {what}" for name, what in WHAT.items() if name in run.suites)
        + ". Those that are made are made from the source of Python's own library, so their text is that of the Python named above.",
        f"Tokens per second are new tokens over the sum of each prompt's median seconds, prompt included; in brackets {LEVEL:.0%} "
        f"bootstrap intervals over prompts and repeats ({RESAMPLES} draws that all contenders share, so that quotients are paired). After "
        "the first token: without the pass over the prompt. Acceptance length is tokens over passes after that one.",
        _kept(run),
        _merged(run),
        _replayed(run),
        speed_report.missing(run),
        speed_report.memory(run),
        speed_report.quiet(run),
        speed_report.instrument(run),
    ]
    return [note for note in found if note]


WHAT = {
    "embedded": "Python files that the embedded models have not seen",
    "edit": f"a module and the beginning of the same with a name changed{' (copy-heavy)' if 'edit' in COPIES else ''}",
    "completion": "a function up to its docstring",
    "chat": "documentation asked for twice, in two turns",
}


def _kept(run: Run) -> str:
    kept = "; ".join(f"{name}: {what}" for name, what in run.settings.kept.items())
    theirs = " vLLM's ngram and suffix keep nothing (no cached requests)." if run.settings.peers else ""
    what = f"From one prompt to the next drafters keep what they do for a user ({kept}), and" if kept else "No drafter keeps texts, and"
    return (
        f"{what} between repeats everything that texts taught is forgotten. Rows with nothing kept forget before every call. suffix, "
        "prompt-lookup and lookahead know the text at hand alone, rest that and its datastore. The planner keeps what it knows of costs "
        f"and acceptance.{theirs}"
    )


def _merged(run: Run) -> str:
    files, tokens = run.known
    store = f" The datastore of rest: {files} other files of Python's library, {tokens} tokens." if files else ""
    merged = f"several merges {', '.join(run.settings.members)}." if "several" in run.settings.drafters else ""
    return f"{merged}{store}".strip()


def _replayed(run: Run) -> str:
    if not run.replays:
        return ""
    count = len({(each.suite, each.prompt) for each in run.replays})
    return (
        f"Acceptance by replay: plain decoding of {run.settings.replayed} in float32 made {count} texts of {run.settings.replay_tokens} "
        "new tokens, and each drafter was led through them by the decoding loop; no clock is involved, and the interval is over texts. "
        "Settings of prompt lookup are its shortest and longest match."
    )
