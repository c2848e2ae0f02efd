"""How a model on a CPU is made fast, and the check that it still computes what it computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from foredraft.backends.fusion import Fusion
from foredraft.backends.packing import Packing

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the largest logit: what another order of summation explains


class Kernels:
    """Packed weights and fused layers on one model, as far as its logits stay the same within rounding.

    Args:
        model: on a CPU; :func:`~foredraft.backends.packing.refusal` has nothing against it.
        sample: runs the model over a few tokens and returns their logits.
        owned: nobody else holds the model, so packed weights may replace the originals.
        hints: the layouts to choose among.

    Attributes:
        refused: why the model was left as it was; None if it was not.
        fused: how many decoder layers are fused.
        native: how many of them are one call of a kernel.
        unfused: why not every decoder layer is one call of a kernel; None if all are.
    """

    def __init__(self, model: nn.Module, sample: Callable[[], Tensor], *, owned: bool, hints: Sequence[int]):
        self.model, self.owned, self.hints, self._sample = model, owned, hints, sample
        self._lay_out()

    def _lay_out(self) -> None:
        expected = self._sample()
        self._packing = Packing(self.model, self._sample, owned=self.owned, hints=self.hints)
        self._fusion = Fusion(self.model, self._packing)
        self.unfused = self._fusion.unfused
        if self._fusion.layers and (found := difference(self._sample(), expected)) is not None:
            self._fusion.undo()
            self.unfused = f"fused layers gave logits that differ by {found:.1e} of their scale"
        self.fused, self.native = len(self._fusion.layers), self._fusion.native
        self.refused: str | None = None
        if not self.fused and (found := difference(self._sample(), expected)) is not None:
            self._packing.undo()
            self.refused = f"packed weights gave logits that differ by {found:.1e} of their scale"

    @property
    def name(self) -> str:
        return "native" if self.native else "packed"

    def follow_weights(self) -> None:
        """Packed weights that replaced the model's own are the model's; others are laid out anew."""
        if not self.owned:
            self.undo()
            self._lay_out()

    @property
    def bytes(self) -> int:
        """Memory of the packed weights."""
        return self._packing.bytes

    def undo(self) -> None:
        """Leave the model as it was found."""
        self._fusion.undo()
        self._packing.undo()


def difference(logits: Tensor, expected: Tensor) -> float | None:
    """How far ``logits`` lie from what is ``expected``, in parts of the largest; None if rounding explains it."""
    found = float((logits.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-6))
    return None if found <= TOLERANCE[expected.dtype] else found
