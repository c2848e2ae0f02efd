"""The LayerSkip recipe (Elhoushi et al. 2024): how often a training step leaves a layer out, and what each early exit counts in its loss.

Layers are numbered from 0 to L - 1, steps from 0 to T - 1. Exit E comes behind E layers, so it is that of layer E - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.errors import ConfigurationError, unknown

CURRICULA = ("rotational", "gradual", "all")
SCHEDULES = ("constant", "exponential")


@dataclass(frozen=True)
class Recipe:
    """Attributes:

    dropout: p_max, how often the last layer is left out once the schedule is through; lower layers less often, the first never.
    schedule: S(t): "constant" is 1, for a model that is trained already; "exponential" is 2^(t/(T-1)) - 1, from 0 to 1, for a new one.
    scale: s, what early exits count beside the last layer; 0 is training without early exits.
    curriculum: which exits learn in a step, besides the last layer and ``exit``. "rotational": every ``rotation``-th layer, the next
        ones in the next step; "gradual": from the last layer down, one more every T/(2L) steps; "all": every one.
    exit: an exit that learns in every step and counts ``favour`` times as much as the last layer.
    """

    dropout: float = 0.1
    schedule: str = "constant"
    scale: float = 0.2
    curriculum: str = "rotational"
    rotation: int = 8
    exit: int | None = None
    favour: float = 0.5

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise unknown("unknown schedule", self.schedule, SCHEDULES)
        if self.curriculum not in CURRICULA:
            raise unknown("unknown curriculum", self.curriculum, CURRICULA)
        if not 0 <= self.dropout < 1:
            raise ConfigurationError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        for name in ("scale", "favour"):
            if not getattr(self, name) >= 0:
                raise ConfigurationError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.rotation < 1:
            raise ConfigurationError(f"rotation must be at least 1, got {self.rotation}")

    def check(self, layers: int) -> None:
        """Raises ConfigurationError if a model of so many layers has no exit ``exit``."""
        if self.exit is not None and not 0 < self.exit < layers:
            raise ConfigurationError(f"exit must lie between 1 and {layers - 1} for a model of {layers} layers, got {self.exit}")

    def dropped(self, layers: int, step: int, steps: int) -> list[float]:
        """p(l, t) = S(t) D(l) p_max with D(l) = 2^(l/(L-1)) - 1: how often each layer is left out in step ``step`` of ``steps``."""
        through = 1.0 if self.schedule == "constant" else 2 ** (step / max(1, steps - 1)) - 1
        return [through * (2 ** (layer / max(1, layers - 1)) - 1) * self.dropout for layer in range(layers)]

    def weights(self, layers: int, step: int, steps: int) -> list[float]:
        """ẽ(l, t) = C(l, t) e(l) / Σ C e, which sum to 1, with e(l) = s Σ_{i<=l} i and e(L-1) = L - 1 + s Σ_{i<=L-2} i: what the
        cross-entropy of each layer counts."""
        last = layers - 1
        each = [self.scale * layer * (layer + 1) / 2 for layer in range(last)] + [last + self.scale * last * (last - 1) / 2]
        counted = [value if self._learns(layer, layers, step, steps) else 0.0 for layer, value in enumerate(each)]
        if self.exit is not None:
            counted[self.exit - 1] = self.favour * each[last]
        return [value / sum(counted) for value in counted] if last else [1.0]

    def _learns(self, layer: int, layers: int, step: int, steps: int) -> bool:
        if layer == layers - 1 or self.curriculum == "all":
            return True
        if self.curriculum == "rotational":
            return layer % self.rotation == step % self.rotation
        return layers - 1 - layer <= 2 * layers * step / max(1, steps)
