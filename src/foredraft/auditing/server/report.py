"""What an audit of a server found: one :class:`Check` each, the samples, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from foredraft.auditing.report import INTERRUPTED, ExactnessError, Sampled

FEW = 0.1  # of the tokens
Status = Literal["ok", "fault", "not asked"]
Verdict = Literal["exact", "fault", "not reproducible", "inconclusive"]


@dataclass(frozen=True)
class Check:
    """One question to the server.

    Attributes:
        name: what is checked.
        status: "not asked" says that the server could not be asked, so that nothing is known.
        found: what was seen, or why it could not be asked.
        power: what would have been found, and what could not be seen.
        requests: that it took.
        reproducibility: a fault here does not mean that answers are wrong: the same request gets another one.
        needed: without it the audit is inconclusive.
        differences: the first few.
    """

    name: str
    status: Status
    found: str
    power: str = ""
    requests: int = 0
    reproducibility: bool = False
    needed: bool = True
    differences: Sequence[str] = ()


@dataclass(frozen=True)
class Samples(Sampled):
    """Sampled tokens against the log-probabilities that the server gave for them.

    Attributes:
        answers: how many were drawn.
        alternatives: likeliest tokens that were told apart at each position; all others count as one.
    """

    answers: int
    alternatives: int


@dataclass(frozen=True)
class ServerReport:
    """Whether a server's answers are exact and repeat, and how sure that is.

    Attributes:
        url, model, endpoint: what was asked.
        fingerprints: every ``system_fingerprint`` that it gave.
        seed, max_tokens, at_once: of the requests.
        requests: how many there were, those included that found out what the server takes.
        notes: what it does not take, a phrase each.
        tokens: that the answers have.
        drafted, accepted: tokens drafted and accepted meanwhile, by the server's metrics; None if it does not say.
        checks: every check.
        samples: the last one's numbers; None where the server gave no log-probabilities.
    """

    url: str
    model: str
    endpoint: str
    fingerprints: Sequence[str]
    seed: int
    max_tokens: int
    at_once: int
    requests: int
    notes: Sequence[str]
    tokens: int
    drafted: int | None
    accepted: int | None
    checks: Sequence[Check]
    samples: Samples | None = field(default=None)

    @property
    def verdict(self) -> Verdict:
        """``fault`` if an answer is wrong, ``not reproducible`` if the same request gets different ones, ``inconclusive`` if the server
        could not be asked something that matters."""
        faults = [check for check in self.checks if check.status == "fault"]
        if any(not check.reproducibility for check in faults):
            return "fault"
        if faults:
            return "not reproducible"
        if any(check.needed and check.status == "not asked" for check in self.checks):
            return "inconclusive"
        return "exact"

    @property
    def complete(self) -> bool:
        """Whether nobody interrupted it."""
        return all(check.found != INTERRUPTED for check in self.checks)

    @property
    def reasons(self) -> list[str]:
        """What is wrong, or what could not be asked, a phrase per check."""
        bad = [check for check in self.checks if check.status == "fault"]
        bad = bad or [check for check in self.checks if check.needed and check.status == "not asked"]
        return [f"{check.name}: {check.found}" for check in bad]

    @property
    def summary(self) -> str:
        """One sentence."""
        name, why = f"{self.model} at {self.url}", "; ".join(self.reasons)
        if self.verdict == "fault":
            return f"{name} is not exact: {why}"
        if self.verdict == "not reproducible":
            rest = "no other fault was found" if self.samples is not None else "it could not be asked whether its samples are right"
            return f"{name} is not reproducible, though {rest}: {why}"
        if self.verdict == "inconclusive" and not self.complete:
            return f"{name}: no fault found, but the audit was interrupted"
        if self.verdict == "inconclusive":
            return f"{name}: no fault found, but it could not be asked everything: {why}"
        return f"{name} is exact and reproducible as far as these checks see{self._certainty}"

    @property
    def _certainty(self) -> str:
        if self.samples is None:
            return ""
        worst = max(self.samples.power, key=lambda each: each.smallest)
        if worst.smallest >= 1:
            return "; but its samples are too few to show a bias"
        found = f"; a total variation of {worst.smallest:.1%} per token would have been found with probability 0.9"
        if self.accepted == 0:
            return f"{found}; but no drafted token was accepted, so they say nothing about speculation"
        return found

    @property
    def limits(self) -> list[str]:
        """What these checks did not look at, a phrase each."""
        found = [
            "whether the log-probabilities are the model's own: the server gives them (foredraft audit MODEL compares with transformers)",
            "other prompts, lengths and fields than these",
            "biases that none of the tested functions sees, and smaller ones than the given",
        ]
        if self.accepted is None:
            found.append("whether the server speculates: its metrics do not say")
        elif self.accepted < FEW * self.tokens:
            found.append(f"much of speculation: {self.accepted:,} of {self.tokens:,} tokens were drafted; give the server a fixed --shape")
        return found

    def raise_for_fault(self) -> None:
        """Raises:
        ExactnessError: unless the verdict is ``exact``.
        """
        if self.verdict != "exact":
            raise ExactnessError(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values that JSON can hold."""
        document: Mapping[str, Any] = {
            "verdict": self.verdict, "complete": self.complete, "summary": self.summary, "reasons": self.reasons, "limits": self.limits,
            **asdict(self),
        }  # fmt: skip
        # JSON has no infinity: such numbers become the words "inf" and "nan"
        return json.loads(json.dumps(document), parse_constant=lambda name: str(float(name)))
