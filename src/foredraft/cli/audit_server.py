"""``foredraft audit --server``: ask a server, and say in a table what was found."""

from __future__ import annotations

import textwrap

from foredraft.auditing.server import ServerReport
from foredraft.cli.figures import counted

SIGNS = {"ok": "ok", "fault": "FAULT", "not asked": "–"}
INDENT, WIDTH = 6, 140
SHOWN = 3  # differences


def lines(report: ServerReport) -> list[str]:
    """The report for people; the verdict last."""
    fingerprints = ", ".join(report.fingerprints) or "none"
    speculated = "its metrics do not say whether it drafts"
    if report.drafted is not None:
        speculated = f"{report.drafted:,} tokens drafted, {report.accepted:,} of the {report.tokens:,} in the answers"
    found = [
        f"model {report.model} · {report.url}{report.endpoint} · system_fingerprint {fingerprints}",
        f"{counted(report.requests, 'request')} of up to {report.max_tokens} tokens · {report.at_once} at once under load · {speculated}",
        *report.notes,
        "",
    ]
    width = max(len(check.name) for check in report.checks) + 2
    for check in report.checks:
        found += hanging(f"{check.name:{width}}{SIGNS[check.status]:{INDENT}} ", check.found)
        if check.power:
            found += hanging(" " * (width + INDENT + 1), check.power)
        for each in check.differences[1:SHOWN]:  # ``found`` has the first
            found += hanging(" " * (width + INDENT + 1), each)
    for index, each in enumerate(report.limits):
        found += hanging(f"{'not looked at' if index == 0 else '':{width + INDENT}} ", each)
    return [*found, "", f"{report.verdict.upper()}: {report.summary}"]


def hanging(head: str, text: str) -> list[str]:
    """``text`` after ``head``, its further lines below its beginning."""
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False) or [head.rstrip()]
