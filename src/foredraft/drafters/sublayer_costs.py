"""What attention and MLP sublayers cost in a pass over one token, and so what a draft without some of them gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.models.skips import SkipSet, Sublayers

KINDS = ("attention", "mlp")
LENGTHS = 8  # of the chains that rates are predicted of, at most
Skipped = tuple[bool, ...]  # whether each sublayer is left out
Sublayer = tuple[str, int]  # one of ``KINDS``, and the layer, from 0


@dataclass(frozen=True)
class SublayerCosts:
    """Seconds on one machine.

    Attributes:
        sublayers: of each sublayer, in a pass over one token.
        rest: of a drafted token besides them.
        passes: of a round besides its draft, with a pass of the whole target over 1, 2, … tokens.
    """

    sublayers: tuple[float, ...]
    rest: float
    passes: tuple[float, ...]

    def rate(self, skipped: Skipped, agreement: float) -> tuple[float, int]:
        """Tokens per second of the chains that suit best, drafted without ``skipped``, and how long these are."""
        draft = self.draft(skipped)
        tokens, best = 1.0, (0.0, 0)
        for length in range(1, len(self.passes)):
            tokens += agreement**length
            best = max(best, (tokens / (length * draft + self.passes[length]), length))
        return best

    def draft(self, skipped: Skipped) -> float:
        """Seconds of a drafted token."""
        return self.rest + sum(seconds for seconds, left_out in zip(self.sublayers, skipped) if not left_out)

    def to_dict(self, sublayers: Sequence[Sublayer]) -> dict[str, Any]:
        """As :func:`read_costs` reads it."""
        by_kind = {kind: [spent for (of, _), spent in zip(sublayers, self.sublayers) if of == kind] for kind in KINDS}
        return {**by_kind, "rest": self.rest, "passes": list(self.passes)}

    @property
    def plain(self) -> float:
        """Tokens per second without drafts."""
        return 1 / self.passes[0]


def sublayers_of(found: Sublayers) -> list[Sublayer]:
    """All that can be left out."""
    return [(kind, layer) for kind in KINDS for layer in getattr(found.most, kind)]


def set_of(sublayers: Sequence[Sublayer], skipped: Skipped) -> SkipSet:
    """``skipped`` as a set."""
    left_out = [each for each, out in zip(sublayers, skipped) if out]
    return SkipSet(*(tuple(layer for kind, layer in left_out if kind == wanted) for wanted in KINDS))
