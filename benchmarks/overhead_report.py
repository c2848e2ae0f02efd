"""The overhead suite's document, and its tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks import verdicts
from benchmarks.overhead import Run, mismatches, raw
from benchmarks.report import Table
from benchmarks.verdicts import Claim, Spread

SCHEMA = 1
SUITE = "overhead"
TITLE = "Overhead: a round outside the model's forward passes"


def document(run: Run, *, command: str, environment: dict[str, Any]) -> dict[str, Any]:
    """Everything about a run as plain values; the schema is checked by the tests."""
    return {
        "schema": SCHEMA,
        "suite": SUITE,
        "command": command,
        "environment": environment,
        "settings": asdict(run.settings),
        "failures": [asdict(failure) for failure in run.failures],
        "claims": [claim.plain() for claim in made(run)],
        "medians": {name: _plain(found) for name, found in verdicts.summaries(run.measurements).items()},
        "ratios": {mode: _plain(found) for mode, found in verdicts.ratios(run.measurements).items()},
        "mismatches": mismatches(run.measurements),
        "noise": run.noise,
        "measurements": raw(run.measurements),
    }


def made(run: Run) -> list[Claim]:
    return verdicts.claims(run.measurements, run.noise, with_noise=run.settings.noise_repeats > 0)


def tables(run: Run) -> list[Table]:
    shown = [_claims(run), _contestants(run), _ratios(run)]
    if run.noise:
        shown.append(_noise(run))
    if run.failures:
        shown.append(Table("Failures", ("contestant", "stage", "message"), [(f.contestant, f.stage, f.message) for f in run.failures]))
    return shown


def notes(run: Run, *, command: str, environment: dict[str, Any]) -> list[str]:
    return [f"`{command}`", machine(environment), _conditions(run), *_instrument(run), _tokens(run)]


def machine(environment: dict[str, Any]) -> str:
    packages = environment["packages"]
    changed = " with uncommitted changes" if environment["dirty"] else ""
    return (
        f"foredraft {packages['foredraft']} at commit {environment['commit'] or 'unknown'}{changed}; torch {packages['torch']}, "
        f"transformers {packages['transformers']}, Python {environment['python']}; {environment['cpu']} "
        f"({environment['cpu_capability']}), {environment['cores']} cores, {environment['threads']} threads, device "
        f"{environment['device']}; load {environment['load']} before the run; {environment['date']}."
    )


def _conditions(run: Run) -> str:
    settings = run.settings
    return (
        f"Target {settings.target}, draft {settings.draft}, {settings.dtype}; greedy, {settings.prompts} prompts × {settings.tokens} "
        f"tokens, {settings.repeats} interleaved repeats after a warm-up, γ = {settings.draft_length}, lookup matches of up to "
        f"{settings.max_ngram} tokens. Figures are medians over the repeats, with the smallest and largest in brackets; ratios are ours "
        "over theirs, paired within a repeat. A round is a target pass after the prefill; its overhead is what is not spent in forward "
        "passes of target or draft. The two prompt lookups choose among equally long matches differently (ours the latest, theirs the "
        "first), so their tokens per round differ."
    )


def _instrument(run: Run) -> list[str]:
    if not run.settings.target.startswith("zoo:") or not run.settings.target.endswith("300m"):
        return []
    return [f"{run.settings.target} is a benchmark instrument: a small model inflated to the cost of a large one, with the same function."]


def _tokens(run: Run) -> str:
    if any(each.same_as_plain is None for each in run.measurements):
        return "Tokens were not compared: plain transformers failed."
    differing = {name: count for name, count in mismatches(run.measurements).items() if count}
    if not differing:
        return "Every contestant returned the tokens of plain transformers in every call."
    calls = run.settings.repeats * run.settings.prompts
    each = "; ".join(f"{name} in {count} of {calls} calls" for name, count in differing.items())
    reason = f" In {run.settings.dtype} passes of different lengths round differently, which can flip a near tie."
    return f"Tokens differ from plain transformers: {each}.{'' if run.settings.dtype == 'float32' else reason}"


def _claims(run: Run) -> Table:
    rows = [
        (c.name, f"{'≤' if c.at_most else '≥'} {c.bound:g}", _spread(c.spread, 4 if c.bound < 0.1 else 2), c.verdict) for c in made(run)
    ]
    return Table("Claims", ("claim", "bound", "measured", "verdict"), rows)


def _contestants(run: Run) -> Table:
    columns = (
        "",
        "tokens/s",
        "tokens/s after prefill",
        "tokens per round",
        "rounds",
        "outside per round, µs",
        "target pass, ms",
        "draft pass, ms",
        "prefill done, ms",
    )
    rows = []
    for name, found in verdicts.summaries(run.measurements).items():
        cells = [_spread(found["tokens_per_second"], 1), _spread(found["round_tokens_per_second"], 1)]
        cells += [f"{found['acceptance_length'].median:.2f}", f"{found['rounds'].median:.0f}", _spread(found["outside_per_round"], 0, 1e6)]
        cells += [f"{found[figure].median * 1e3:.2f}" for figure in ("target_pass", "draft_pass", "first_pass_at")]
        rows.append((name, *cells))
    return Table("Contestants", columns, rows)


def _ratios(run: Run) -> Table:
    headings = ("tokens/s", "tokens/s after prefill", "outside per round", "outside per call", "target pass", "prefill done")
    rows = [(mode, *(_spread(spread, 2) for spread in found.values())) for mode, found in verdicts.ratios(run.measurements).items()]
    return Table("Foredraft over transformers", ("", *headings), rows)


def _noise(run: Run) -> Table:
    rows = []
    for each in run.noise:
        milliseconds = [f"{each['median_seconds'][name] * 1e3:.2f}" for name in ("pass", "race", "multinomial")]
        rows.append((str(each["nodes"]), *milliseconds, f"{each['share']:.2%}", f"{each['multinomial_share']:.2%}"))
    columns = ("positions", "target pass, ms", "race, ms", "torch.multinomial, ms", "race / pass", "multinomial / pass")
    return Table(f"Keyed noise at a vocabulary of {run.settings.noise_vocab_size:,}", columns, rows)


def _spread(spread: Spread | None, digits: int, scale: float = 1.0) -> str:
    if spread is None:
        return "failed"
    median, low, high = (f"{value * scale:.{digits}f}" for value in (spread.median, spread.low, spread.high))
    return f"{median} ({low}–{high})"


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    return {name: None if spread is None else asdict(spread) for name, spread in found.items()}
