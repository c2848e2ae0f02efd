"""The arithmetic of speculative decoding (Leviathan, Kalman and Matias 2023), for chains whose tokens are accepted independently.

α is the probability that a drafted token is accepted. γ is how many tokens a round drafts. c is the time of a drafted token over the time
of a pass of the target, and ĉ the same of arithmetic operations. All values are expectations, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from foredraft.errors import ConfigurationError

LONGEST = 100  # γ of the longest chain that is tried


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens per pass of the target: 1 + α + … + α^γ."""
    if not 0 <= alpha < 1:
        raise ConfigurationError(f"α must be at least 0 and less than 1, got {alpha:g}")
    if gamma < 0:
        raise ConfigurationError(f"γ must not be negative, got {gamma}")
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


def speedup(alpha: float, gamma: int, c: float) -> float:
    """Over plain decoding: a round takes γ c + 1 passes."""
    return expected_tokens(alpha, gamma) / (gamma * ratio("c", c) + 1)


def operations(alpha: float, gamma: int, c: float) -> float:
    """Arithmetic operations per token over those of plain decoding; ``c`` is ĉ. The target computes γ + 1 tokens in each pass."""
    return (gamma * ratio("ĉ", c) + gamma + 1) / expected_tokens(alpha, gamma)


def calls(alpha: float, gamma: int, tokens: int) -> float:
    """Passes of the target for so many ``tokens``."""
    return tokens / expected_tokens(alpha, gamma)


def best_gamma(alpha: float, c: float) -> int:
    """γ of the largest speed-up, 0 where no draft pays, at most :data:`LONGEST`."""
    return max(range(LONGEST + 1), key=lambda gamma: speedup(alpha, gamma, c))


def below_one(alpha: float) -> float:
    """A measured α of 1 as the nearest that the formulas take."""
    return min(alpha, 1 - 1e-9)


def ratio(name: str, value: float) -> float:
    if not 0 <= value < inf:
        raise ConfigurationError(f"{name} must be a number of at least 0, got {value:g}")
    return value


@dataclass(frozen=True)
class Work:
    """Passes of target and draft for one text, and the tokens that these passes read."""

    target_passes: float
    target_tokens: float
    draft_passes: float
    draft_tokens: float

    def seconds(self, per_pass: float, per_token: float, c: float) -> float:
        """A pass of the target takes ``per_pass`` seconds, and ``per_token`` more for each token that it reads; one of the draft c times
        that."""
        target = self.target_passes * per_pass + self.target_tokens * per_token
        return target + c * (self.draft_passes * per_pass + self.draft_tokens * per_token)


def work(alpha: float, gamma: int, *, prompt: int, tokens: int, cached: bool) -> Work:
    """For ``tokens`` new tokens behind a ``prompt``. Without a cache each pass reads the whole text again.

    The first pass reads the prompt together with the first draft. With γ = 0 this is plain decoding.
    """
    if prompt < 1 or tokens < 1:
        raise ConfigurationError(f"the prompt and the text must have at least 1 token each, got {prompt} and {tokens}")
    kept = expected_tokens(alpha, gamma)
    passes = tokens / kept
    drafts = passes * gamma
    if cached:
        read = prompt - 1 + passes * (gamma + 1)
        return Work(passes, read, drafts, prompt - 1 + drafts if gamma else 0.0)
    before = passes * prompt + kept * passes * (passes - 1) / 2  # summed over passes: tokens of the text so far
    return Work(passes, before + drafts, drafts, gamma * before + drafts * (gamma - 1) / 2)
