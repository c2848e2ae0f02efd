"""``foredraft audit``: load a configuration, check it, and say in a few lines what was found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foredraft.auditing import AuditReport, ExactPart, KeyedPart, NoisePart, StatisticalPart, audit
from foredraft.cli.figures import counted
from foredraft.cli.generation import load_speculator
from foredraft.cli.settings import Configuration
from foredraft.loading import load_tokenizer

SHOWN = 3  # divergences


def run(configuration: Configuration, prompts: Sequence[str] | None, parts: Sequence[str] | None, options: dict[str, Any]) -> AuditReport:
    """Audit what ``configuration`` describes; ``options`` are those of :func:`foredraft.audit`."""
    return audit(load_speculator(configuration, load_tokenizer(configuration.target)), prompts=prompts, parts=parts, **options)


def lines(report: AuditReport) -> list[str]:
    """The report for people; the verdict last."""
    sampling = ", ".join(f"{name}={value}" for name, value in report.sampling.items())
    found = [
        f"target {report.target} · drafter {report.drafter} ({report.proposal}) · rule {report.rule} · shape {report.shape}",
        f"{sampling or 'as the generation config has it'} · seed {report.seed}",
        "",
    ]
    if report.exact is not None:
        found.append(_line("exact", report.exact.passed, _exact(report.exact)))
    if report.noise is not None:
        found.append(_line("noise", report.noise.passed, _noise(report.noise)))
    for keyed in report.keyed:
        found.append(_line("keyed", keyed.passed, _keyed(keyed)))
        found += [f"{'':20}{each}" for each in _divergences(keyed)]
    if report.statistical is not None:
        found.append(_line("statistical", report.statistical.passed, _statistical(report.statistical)))
        found += [f"{'':20}{each}" for each in report.statistical.power]
    found += [f"{part:12} {'–':6} {why}" for part, why in report.skipped.items()]
    found += [f"{'not looked at' if index == 0 else '':20}{each}" for index, each in enumerate(report.limits)]
    return [*found, "", f"{report.verdict.upper()}: {report.summary}"]


def _line(part: str, passed: bool, text: str) -> str:
    return f"{part:12} {'ok' if passed else 'FAULT':6} {text}"


def _exact(part: ExactPart) -> str:
    cut = ", cut down from the shape asked for" if part.cut else ""
    return (
        f"error {part.error:.1e} over every outcome of {counted(part.tokens, 'token')}, vocabulary of {part.vocab_size}, {part.shape}{cut}"
    )


def _noise(part: NoisePart) -> str:
    return (
        f"random numbers in use: {part.continuations:,} continuations of a table, {part.draws:,} draws over {part.vocab_size:,} tokens: "
        f"p = {part.p_value:.2g}, corrected (a fault below {part.significance:g})"
    )


def _keyed(part: KeyedPart) -> str:
    mode = "sampled with the same seeds" if part.sampled else "greedy"
    parted = f"{len(part.divergences)} leave the plain text, {part.faults} by a fault" if part.divergences else "all as plain decoding"
    return (
        f"{mode}: {counted(part.prompts, 'text')}, {counted(part.tokens, 'token')}, {part.accepted:,} of them drafted: {parted}; "
        f"logits within {part.logits:.1e} (a fault above {part.limit:.1e})"
    )


def _divergences(part: KeyedPart) -> list[str]:
    return [
        f"text {each.prompt}, token {each.position}: {each.speculative} instead of {each.plain}, which leads by {each.lead:.1e} where "
        f"rounding allows {each.rounding:.1e}: {each.cause}"
        for each in part.divergences[:SHOWN]
    ]


def _statistical(part: StatisticalPart) -> str:
    drawn = f"{counted(part.continuations, 'continuation')}, {counted(part.tokens, 'token')}"
    text = f"{drawn}, {part.rounds:.1f} rounds each, {part.acceptance:.0%} accepted: "
    if part.impossible:
        return text + f"{counted(part.impossible, 'impossible token')}"
    return text + f"p = {part.p_value:.2g}, corrected (a fault below {part.significance:g})"
