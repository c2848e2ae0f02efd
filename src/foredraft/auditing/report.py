"""What an audit found: one dataclass for each part, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from foredraft.errors import ForedraftError

Verdict = Literal["exact", "fault", "lossy", "inconclusive"]
LEFT_OUT, INTERRUPTED = "left out", "interrupted"


class ExactnessError(ForedraftError, RuntimeError):
    """An audit found that a configuration, or a server, is not exact; ``report`` is what it found."""

    def __init__(self, report: Any):
        super().__init__(report.summary)
        self.report = report


@dataclass(frozen=True)
class ExactPart:
    """The rule and the shape, enumerated on probability tables.

    Attributes:
        error: largest total variation between the distribution of whole continuations and the target's, over the tables.
        bound: what rounding explains.
        shape: what was enumerated; ``cut`` says that it is smaller than the configuration's own.
        vocab_size, tokens: of the tables and of the continuations.
        tables: the error on each.
        seconds: what it took.
    """

    error: float
    bound: float
    shape: str
    cut: bool
    vocab_size: int
    tokens: int
    tables: Mapping[str, float]
    seconds: float

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


@dataclass(frozen=True)
class Divergence:
    """Where a speculative text first leaves the plain one.

    Attributes:
        prompt, position: which text, and which new token of it.
        plain, speculative: the two tokens; -1 for a text that ended.
        lead: by how much the plain token wins in plain decoding, in log p + noise (greedy: in score); inf if the processors
            rule the speculative token out.
        rounding: largest difference of the logits there between passes over one token and over several, times the allowance.
        cause: "near tie", "edge of a filter" or "fault".
    """

    prompt: int
    position: int
    plain: int
    speculative: int
    lead: float
    rounding: float
    cause: Literal["near tie", "edge of a filter", "fault"]


@dataclass(frozen=True)
class KeyedPart:
    """Speculative texts against plain ones with the same seeds, token for token.

    Attributes:
        sampled: keyed sampling, or greedy.
        prompts, tokens: texts, and tokens compared in them.
        accepted: drafted tokens that were kept; 0 says that speculation was never put to the test.
        divergences: the first one of each text that has any.
        logits: largest difference between the logits that speculation used and those of plain passes, up to the first divergence.
        rounding: largest difference between plain passes over one token and over several.
        limit: what ``logits`` may reach.
        seconds: what it took.
    """

    sampled: bool
    prompts: int
    tokens: int
    accepted: int
    divergences: Sequence[Divergence]
    logits: float
    rounding: float
    limit: float
    seconds: float

    @property
    def faults(self) -> int:
        return sum(each.cause == "fault" for each in self.divergences)

    @property
    def passed(self) -> bool:
        return self.faults == 0 and self.logits <= self.limit


@dataclass(frozen=True)
class Statistic:
    """A test: its deviation ``z`` in standard errors, or the ``chi2`` of several at once, and the ``p_value`` before correction."""

    name: str
    p_value: float
    z: float | None = None
    chi2: float | None = None
    freedom: int | None = None


@dataclass(frozen=True)
class Tested:
    """What statistical tests came to.

    Attributes:
        statistics: every test, at the last look.
        p_value: the smallest, corrected for their number and that of the looks.
        significance: below this it is a fault; how often what is correct is accused.
        seconds: what it took.
    """

    statistics: Sequence[Statistic]
    p_value: float
    significance: float
    seconds: float

    @property
    def passed(self) -> bool:
        return self.p_value >= self.significance

    @property
    def worst(self) -> Statistic:
        return min(self.statistics, key=lambda each: each.p_value)


@dataclass(frozen=True)
class NoisePart(Tested):
    """The random numbers in use, counted against known distributions.

    Attributes:
        continuations, shape: drawn from a probability table by the audited rule on ``shape``.
        draws, vocab_size: tokens drawn over the model's vocabulary, by the match race and afresh.
    """

    continuations: int
    shape: str
    draws: int
    vocab_size: int


@dataclass(frozen=True)
class Power:
    """How well a bias in one direction would be seen.

    Attributes:
        direction: what leaks into the output.
        smallest: total variation per token that is found with probability 0.9 at these samples.
        planted: total variation of the planted bias, averaged over the tokens.
        found, trials: how often that was found.
    """

    direction: str
    smallest: float
    planted: float
    found: int
    trials: int

    def __str__(self) -> str:
        found = f"finds {self.smallest:.2%} total variation per token with probability 0.9"
        return f"towards {self.direction}: {found}, planted {self.planted:.2%} found in {self.found} of {self.trials}"


def blind(power: Sequence[Power]) -> bool:
    """Whether no bias, however large, would have been found."""
    return all(each.smallest >= 1 for each in power)


@dataclass(frozen=True)
class Sampled(Tested):
    """Sampled tokens against a distribution that is known.

    Attributes:
        tokens: how many were tested.
        looks: how often the samples were looked at; the correction knows.
        power: for several directions of bias.
    """

    tokens: int
    looks: int
    power: Sequence[Power]


@dataclass(frozen=True)
class StatisticalPart(Sampled):
    """Sampled tokens against the target's own distribution after the same text.

    Attributes:
        continuations: how many were drawn.
        rounds: that a continuation took on average.
        acceptance: share of drafted tokens that were kept.
        impossible: tokens that the target never emits there.
        distance: total variation between the distribution of a drafted token and the target's, on average over the texts; of a lossy
            rule that can tell, with a draft model.
    """

    continuations: int
    rounds: float
    acceptance: float
    impossible: int
    distance: float | None = None

    @property
    def passed(self) -> bool:
        return super().passed and self.impossible == 0


@dataclass(frozen=True)
class AuditReport:
    """Whether a configuration is exact, and how sure that is.

    Attributes:
        target, dtype, drafter, rule, shape, proposal: the configuration.
        sampling: the arguments of ``generate``.
        lossless: what the rule claims.
        seed: of everything that was drawn.
        exact, noise, keyed, statistical: the parts; None where one was not run, with the reason in ``skipped``.
    """

    target: str
    dtype: str
    drafter: str
    rule: str
    shape: str
    proposal: str
    sampling: Mapping[str, Any]
    lossless: bool
    seed: int
    exact: ExactPart | None
    noise: NoisePart | None
    keyed: Sequence[KeyedPart]
    statistical: StatisticalPart | None
    skipped: Mapping[str, str]

    @property
    def verdict(self) -> Verdict:
        """``lossy`` if the rule says so itself, ``fault`` if a part found one, ``inconclusive`` if a part that matters was left out, or
        if the samples could have shown no bias at all. The greedy text is the same under every rule, so a fault in it is one under a lossy
        rule, too."""
        if not self.lossless:
            return "lossy" if all(part.passed for part in self.keyed) else "fault"
        if any(not part.passed for part in self.parts):
            return "fault"
        if any(why in (LEFT_OUT, INTERRUPTED) for why in self.skipped.values()) or not self.parts or self._blind:
            return "inconclusive"
        return "exact"

    @property
    def _blind(self) -> bool:
        return self.statistical is not None and blind(self.statistical.power)

    @property
    def complete(self) -> bool:
        """Whether nobody interrupted it."""
        return INTERRUPTED not in self.skipped.values()

    @property
    def parts(self) -> list[ExactPart | NoisePart | KeyedPart | StatisticalPart]:
        return [part for part in (self.exact, self.noise, *self.keyed, self.statistical) if part is not None]

    @property
    def summary(self) -> str:
        """One sentence."""
        name = f"rule {self.rule!r} with drafter {self.drafter!r} and shape {self.shape}"
        if self.verdict == "lossy":
            return f"{name} is lossy by design: it changes the output distribution{self._distance}"
        if self.verdict == "fault":
            return f"{name} is not exact: {'; '.join(self.reasons)}"
        if self.verdict == "inconclusive":
            missing = [f"the {part} part was {why}" for part, why in self.skipped.items() if why in (LEFT_OUT, INTERRUPTED)]
            if self._blind:
                missing.append("nothing could be tested by its samples: they are too few, or the target is sure of every token")
            return f"{name}: no fault found, but {', '.join(missing)}"
        return f"{name} is exact as far as these checks see{self._certainty}"

    @property
    def _distance(self) -> str:
        """How far a lossy rule's distribution is from the target's, as far as the parts that were run can tell."""
        found = []
        if self.statistical is not None and self.statistical.distance is not None:
            found.append(f"by {self.statistical.distance:.4f} in total variation at each drafted token of these texts")
        if self.exact is not None:
            found.append(f"by {self.exact.error:.4f} over {self.exact.tokens} tokens of a small table")
        return ", " + ", and ".join(found) if found else ""

    @property
    def _certainty(self) -> str:
        """How far that is: the bias that the samples would have shown, or that nothing was ever speculated."""
        if not any(part.accepted for part in self.keyed) and not (self.statistical and self.statistical.acceptance):
            return "; but no drafted token was ever kept, so they say nothing about speculation" if self.keyed else ""
        if self.statistical is None:
            return "; the text is plain decoding's own, token for token" if self.keyed else ""
        worst = max(self.statistical.power, key=lambda each: each.smallest)
        if worst.smallest >= 1:
            return "; but its samples could not have shown a bias: they are too few, or the draft is too much like the target"
        return f"; a total variation of {worst.smallest:.1%} per token, or less, would have been found with probability 0.9"

    @property
    def limits(self) -> list[str]:
        """What these checks did not look at, a phrase each."""
        found = [
            "other prompts, lengths and options than these",
            "stop strings and stopping criteria",
            "rows that join and leave a session",
        ]
        if self.exact is not None:
            cut = f", trees larger than {self.exact.shape}" if self.exact.cut else ""
            found.append(f"in the enumeration: the drafter and the noise, which it replaces{cut}")
        if self.noise is not None and self.statistical is None:
            found.append("whether this model's sampled tokens follow its probabilities: the noise was tested on other distributions")
        if self.statistical is not None:
            found.append("in the samples: biases that none of the tested functions sees, and smaller ones than the given")
        if not any(part.sampled for part in self.keyed) and self.statistical is None:
            found.append("sampling with this model")
        if self.dtype != "float32":
            found.append(f"what rounding in {self.dtype} does to the target itself")
        return found

    @property
    def reasons(self) -> list[str]:
        """What is wrong, a phrase per part that found a fault."""
        found = []
        if self.exact is not None and not self.exact.passed:
            found.append(f"enumeration on small tables is off by {self.exact.error:.2g} in total variation")
        if self.noise is not None and not self.noise.passed:
            found.append(f"the random numbers do not follow their distribution (p = {self.noise.p_value:.1g}: {self.noise.worst.name})")
        for part in self.keyed:
            mode = "sampled" if part.sampled else "greedy"
            if part.faults:
                found.append(f"{part.faults} of {part.prompts} {mode} texts leave the plain ones where rounding does not explain it")
            elif not part.passed:
                found.append(f"{mode} logits are off by {part.logits:.2g} where rounding explains {part.limit:.2g}")
        if self.statistical is not None and self.statistical.impossible:
            found.append(f"{self.statistical.impossible} sampled tokens cannot follow their text under the target")
        if self.statistical is not None and self.statistical.p_value < self.statistical.significance:
            p, name = self.statistical.p_value, self.statistical.worst.name
            found.append(f"sampled tokens do not follow the target's distribution (p = {p:.1g}: {name})")
        return found

    def raise_for_fault(self) -> None:
        """Raises:
        ExactnessError: unless the verdict is ``exact``.
        """
        if self.verdict != "exact":
            raise ExactnessError(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values that JSON can hold."""
        own = {"verdict": self.verdict, "complete": self.complete, "summary": self.summary, "reasons": self.reasons, "limits": self.limits}
        document = {**own, **asdict(self)}
        plain = (bool, int, float, str, type(None))
        document["sampling"] = {name: value if isinstance(value, plain) else repr(value) for name, value in self.sampling.items()}
        document["keyed"] = [{**asdict(part), "passed": part.passed} for part in self.keyed]
        for name, part in (("exact", self.exact), ("noise", self.noise), ("statistical", self.statistical)):
            if part is not None:
                document[name]["passed"] = part.passed
        # JSON has no infinity: such numbers become the words "inf" and "nan"
        return json.loads(json.dumps(document), parse_constant=lambda name: str(float(name)))
