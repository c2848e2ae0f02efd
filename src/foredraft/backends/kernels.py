"""Packs a model on a CPU, runs its decoder in one call of the kernels, and checks that its logits stay the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from foredraft.backends import experts
from foredraft.backends.fusion import Fusion
from foredraft.backends.packing import ROUNDING, Packing, one_thread
from foredraft.backends.products import NATIVE
from foredraft.backends.rounding import explained
from foredraft.device import without_autocast
from foredraft.errors import ConfigurationError
from foredraft.models import changes
from foredraft.models.changes import NUMBERS, STRUCTURE, ModelState


class Kernels:
    """Packed weights and kernels on one model, as far as its logits stay the same within rounding.

    Args:
        model: on a CPU; one that :func:`~foredraft.backends.packing.refusal` accepts.
        sample: runs the model over a few tokens and returns their logits.
        owned: nobody else holds the model, so packed weights may replace the originals.
        hints: the layouts to choose among.

    Attributes:
        refused: why the model was left as it was; None if it was not.
        native: how many decoder layers are in one call of the kernels.
        unfused: why they are not; None if they are.
    """

    def __init__(self, model: nn.Module, sample: Callable[[], Tensor], *, owned: bool, hints: Sequence[int]):
        self.model, self.owned, self.hints, self._sample = model, owned, hints, sample
        self.state = ModelState.of(model)  # type: ignore[arg-type]
        self._packing: Packing | None = None
        self._fusion: Fusion | None = None
        self._failed: str | None = None
        self.pack()
        self.state.followers.add(self)

    def pack(self) -> None:
        """Pack the weights, unless they are packed. If that fails or is interrupted, the model is left as it was. Its logits are compared
        in its own dtype, also where a change is followed under autocast."""
        if self._packing is None:
            try:
                with torch.inference_mode(False), torch.no_grad(), without_autocast(torch.device("cpu")), one_thread(self.model):
                    self._lay_out()
            except BaseException:
                self._give_back()
                raise
            self.state.note()

    def _lay_out(self) -> None:
        expected = self._sample()
        self._packing = Packing(self.model, self._sample, owned=self.owned, hints=self.hints)
        if NATIVE in self.hints:
            experts.pack(self._packing)
        routed = bool(self._packing.others)
        self._fusion = Fusion(self.model, self._packing)
        self.unfused = self._fusion.unfused
        trial = self._fusion.trial()
        if trial is not None and (found := difference(*trial, routed)) is not None:
            self._fusion.undo()
            self.unfused = f"the kernels gave states that differ by {found:.1e} of their scale"
        elif (why := self._fusion.wrong(self.model, self._sample)) is not None:
            self._fusion.undo()
            self.unfused = why
        if self._failed is not None:
            self._fusion.undo()
            self.unfused = self._failed
        self.native = self._fusion.native
        self.refused: str | None = None
        if (found := difference(self._sample(), expected, routed)) is not None and not found <= explained(self.model):  # NaN is refused
            self._fusion.undo()
            self._packing.undo()
            self.refused = f"packed weights gave logits that differ by {found:.1e} of their scale"

    @property
    def name(self) -> str:
        return "native" if self.native else "packed"

    @property
    def layouts(self) -> dict[str, int | None]:
        """The layout of each kind of product, by what it is."""
        return {} if self._packing is None else {str(kind): hint for kind, hint in self._packing.hints.items()}

    def originals(self) -> Iterator[tuple[Tensor, Tensor]]:
        """As of :class:`~foredraft.backends.packing.Packing`."""
        return iter(()) if self._packing is None else self._packing.originals()

    def follow(self, changed: set[changes.Kind]) -> None:
        """Pack changed weights anew. After a change of the structure, only undo; the caller then builds another object.

        Raises:
            ConfigurationError: something was written to weights that packed ones have replaced.
        """
        if self._packing is None or not changed & (NUMBERS | STRUCTURE):
            return
        if (lost := self._lost("merged adapters" in changed)) is not None:
            raise ConfigurationError(lost)
        self.undo()
        if not changed & STRUCTURE:
            self.pack()

    def _lost(self, merged: bool) -> str | None:
        """A message about writes to weights that packed ones have replaced; None if there were none."""
        if self._packing is None:
            return None
        what = "an adapter was merged" if merged and self._packing.taken else (lost := self._packing.lost()) and f"{lost} was changed"
        return what and (
            f"{what}, but the model was loaded by name, and packed weights have replaced its own, so the change is lost. Call release() "
            "first, which gives them back, and then change the model; or load the model yourself and pass the object"
        )

    def unpack(self) -> None:
        """Give the weights back until :meth:`pack`.

        Raises:
            ConfigurationError: something was written to packed weights and is lost; the weights are those from before that.
        """
        lost = self._lost(False)
        self.undo()
        if lost is not None:
            raise ConfigurationError(lost)

    def unfuse(self, why: str) -> bool:
        """As :meth:`~foredraft.backends.base.Overrides.unfuse`; the weights stay packed."""
        if not self.native or self._fusion is None:
            return False
        self._fusion.undo()
        self.native, self.unfused, self._failed = 0, why, why
        self.state.note()
        return True

    def undo(self) -> None:
        """Leave the model as it was found."""
        if self._packing is not None:
            self.state.mark("weights")
            self._give_back()
            self.state.note()

    def _give_back(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            if self._fusion is not None:
                self._fusion.undo()
            if self._packing is not None:
                self._packing.undo()
        self._packing = self._fusion = None


def difference(logits: Tensor, expected: Tensor, routed: bool = False) -> float | None:
    """How far ``logits`` ``[..., V]`` lie from what is ``expected``, relative to the largest of these; None if rounding explains it.
    ``routed``: tokens are sent to experts."""
    off = experts.worst(logits.float() - expected.float(), expected.dtype, routed=routed)
    found = float(off / expected.float().abs().max().clamp(min=1e-6))
    return None if found <= ROUNDING[expected.dtype] else found
