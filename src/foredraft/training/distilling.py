"""How a draft model is distilled from its target (DistillSpec, Zhou et al. 2024), as settings; no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from foredraft.errors import ConfigurationError, unknown

POSITIONS = ("all", "rejected")


@dataclass(frozen=True)
class Distilling:
    """Attributes:

    draft: what is trained. A path, a hub id or ``zoo:NAME``; ``target[0,3,7]``, a copy of these layers of the target; or the
        ``config.json`` of a model that is trained from scratch.
    loss: of :mod:`foredraft.losses`.
    temperature: both models' when they are compared, that of the texts that they write, and that of measured acceptance.
    positions: ``all`` counted tokens, or only those ``rejected``: a token drawn from the draft is rejected with probability 1 - α.
    on_policy: λ, the share of the texts that the draft continues, as it is at that time, instead of being read as they are.
    rewrite_every: steps that read the same texts; then they are written anew.
    teacher_texts: the target continues the other texts.
    stored_probabilities: of the target's most likely tokens, as ``foredraft data generate --top-k-probabilities`` stored them, instead of
        a pass of the target.
    """

    draft: str = ""
    loss: str = "lk(3)"
    temperature: float = 1.0
    positions: str = "all"
    on_policy: float = 0.0
    rewrite_every: int = 200
    teacher_texts: bool = False
    stored_probabilities: bool = False

    def __post_init__(self) -> None:
        if not self.draft:
            raise ConfigurationError("which model is to be trained? Pass --draft: a model, 'target[0,3,7]', or a config.json")
        if self.positions not in POSITIONS:
            raise unknown("unknown positions", self.positions, POSITIONS)
        if not 0 < self.temperature < math.inf:
            raise ConfigurationError(
                f"temperature must be above 0, got {self.temperature}; for greedy decoding, train at 1 or with the loss ce"
            )
        if not 0 <= self.on_policy <= 1:
            raise ConfigurationError(f"on_policy is a share from 0 to 1, got {self.on_policy}")
        if self.rewrite_every < 1:
            raise ConfigurationError(f"rewrite_every must be at least 1, got {self.rewrite_every}")
        if self.stored_probabilities and self.rewrites:
            raise ConfigurationError("stored probabilities are those of the given texts: leave --on-policy and --teacher-texts out")
        if self.stored_probabilities and self.temperature != 1:
            raise ConfigurationError(
                f"stored probabilities are those of temperature 1 and do not tell those of {self.temperature:g}: leave "
                "--stored-probabilities out, and the target computes them"
            )

    @property
    def rewrites(self) -> bool:
        """Some texts are written during the run."""
        return self.on_policy > 0 or self.teacher_texts
