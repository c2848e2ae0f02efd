"""The heads suite's claims, document and tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.heads import Compared, Run, Side, totals
from benchmarks.overhead_report import machine
from benchmarks.report import Table
from benchmarks.verdicts import Claim, Spread

SCHEMA = 1
SUITE = "heads"
TITLE = "Exported heads in vLLM"
TOLERANCE = 0.05
SAME = 0.99  # of the drafts in float32, where only what is very close to a tie can be rounded the other way


def cases(run: Run) -> dict[str, list[Compared]]:
    found: dict[str, list[Compared]] = {}
    for each in run.compared:
        found.setdefault(each.case.name, []).append(each)
    return found


def claims(run: Run) -> list[Claim]:
    """vLLM accepts what Foredraft accepts; in float32 because it drafts the same. Spreads are over prompts, medians of all together."""
    found, made = cases(run), []
    for case in run.cases:
        mine = found.get(case.name)
        made.append(Claim(f"{case.name}: acceptance length in vLLM beside ours", TOLERANCE, True, _apart(mine) if mine else None))
        if case.dtype == "float32":
            made.append(Claim(f"{case.name}: drafts that are the same", SAME, False, _alike(mine) if mine else None))
    return made


def _apart(mine: list[Compared]) -> Spread:
    whole, apart = totals(mine), [abs(each.theirs.acceptance / each.ours.acceptance - 1) for each in mine]
    return Spread(abs(whole["theirs"] / whole["ours"] - 1), min(apart), max(apart))


def _alike(mine: list[Compared]) -> Spread:
    shares = [each.alike / max(1, each.shared) for each in mine]
    return Spread(sum(each.alike for each in mine) / max(1, sum(each.shared for each in mine)), min(shares), max(shares))


def document(run: Run, *, command: str, environment: dict[str, Any]) -> dict[str, Any]:
    """Everything about a run as plain values; the schema is checked by the tests."""
    return {
        "schema": SCHEMA,
        "suite": SUITE,
        "command": command,
        "environment": environment,
        "versions": run.versions,
        "settings": asdict(run.settings),
        "claims": [claim.plain() for claim in claims(run)],
        "cases": {name: {"tree": run.trees[name], **totals(found)} for name, found in cases(run).items()},
        "prompts": [_plain(each) for each in run.compared],
        "failures": [{"case": each.case.name, "message": each.message} for each in run.failures],
    }


def _plain(each: Compared) -> dict[str, Any]:
    def side(one: Side) -> dict[str, Any]:
        return {"rounds": one.rounds, "kept": one.kept, "acceptance": one.acceptance}

    told = {"parted": each.parted, "gap": each.gap, "shared": each.shared, "alike": each.alike, "difference": each.difference}
    return {
        "case": each.case.name,
        "prompt": each.prompt,
        **{name: side(getattr(each, name)) for name in ("ours", "theirs", "tree")},
        **told,
    }


def tables(run: Run) -> list[Table]:
    found = cases(run)
    whole, prompts = [], []
    for name, mine in found.items():
        sums = totals(mine)
        drafts = f"{sum(each.alike for each in mine)} of {sum(each.shared for each in mine)}"
        whole.append(
            (
                name,
                f"{sums['ours']:.3f}",
                f"{sums['theirs']:.3f}",
                f"{sums['theirs'] / sums['ours'] - 1:+.1%}",
                drafts,
                f"{sums['tree']:.3f}",
                run.trees[name],
            )
        )
        prompts += [
            (
                f"{name}: {each.prompt}",
                f"{each.ours.acceptance:.3f} ({each.ours.rounds})",
                f"{each.theirs.acceptance:.3f} ({each.theirs.rounds})",
                f"{each.tree.acceptance:.3f} ({each.tree.rounds})",
                f"{each.alike} of {each.shared}",
                each.difference,
            )
            for each in mine
        ]
    checked = [
        (
            claim.name,
            f"{'≤' if claim.at_most else '≥'} {claim.bound:.0%}",
            "–" if claim.spread is None else f"{claim.spread.median:.1%}",
            claim.verdict,
        )
        for claim in claims(run)
    ]
    made = [
        Table("Claims", ("", "bound", "found", "verdict"), checked),
        Table(
            "Acceptance length",
            ("", "Foredraft, chain", "vLLM, chain", "apart", "drafts that are the same", "Foredraft, tree", "tree"),
            whole,
        ),
        Table("By prompt: acceptance length (rounds)", ("", "Foredraft", "vLLM", "tree", "same drafts", "difference"), prompts),
    ]
    if run.failures:
        made.append(Table("Not measured", ("", "why"), [(each.case.name, each.message) for each in run.failures]))
    return made


def notes(run: Run, *, command: str, environment: dict[str, Any]) -> list[str]:
    settings = run.settings
    engine = ", ".join(f"{name} {version}" for name, version in run.versions.items()) or "not run"
    return [
        f"`{command}`",
        machine(environment) + f" vLLM's side: {engine}.",
        f"Greedy, {settings.tokens} new tokens per prompt, suite {settings.suite}. Acceptance length is tokens per target "
        "pass behind the prompt's, summed over prompts and then divided. vLLM loads the folder that `foredraft export --to vllm` writes. "
        "Drafts are compared token by token where both sides draft at the same place of the same text.",
        "In bfloat16 the two sides round at different places, which decides near ties among drafted tokens the other way now and then; in "
        "float32 that is rare, so that the same drafts there say that both sides compute the same. No times are taken here; the speed "
        "suite has them.",
    ]
