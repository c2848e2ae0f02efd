"""Decoders that run in one call of the kernels.

``forward`` is overridden on the decoder, and :meth:`Fusion.undo` undoes that. If something inside is hooked, or its weights change, the
decoder runs as its class does.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from foredraft.backends.described_pass import DescribedModel
from foredraft.backends.families import FAMILIES
from foredraft.backends.kernel_pass import NativeModel
from foredraft.backends.packing import Packing
from foredraft.backends.sourced_pass import SourcedModel
from foredraft.models.changes import take_back


class Fusion:
    """The decoders of a model whose products are packed, each as one call of the kernels.

    Attributes:
        native: how many decoder layers are in such calls.
        unfused: why there are none; None if there are.
    """

    def __init__(self, model: nn.Module, packing: Packing):
        self.native = 0
        self._whole: list[nn.Module] = []
        families = f"none of {', '.join(FAMILIES)}, nor those of a T5, BART or Whisper whose sizes and layouts the kernels take"
        self.unfused: str | None = f"its decoder layers are {families}"
        try:
            self._fuse(model, packing)
        except BaseException:
            self.undo()
            raise

    def _fuse(self, model: nn.Module, packing: Packing) -> None:
        attention = model.config._attn_implementation  # type: ignore[union-attr]
        if attention not in ("sdpa", "eager"):
            self.unfused = f"its attention is {attention!r}, and the kernels attend as 'sdpa' does"
            return
        if any(getattr(each, "is_kv_shared_layer", False) for each in model.modules()):
            self.unfused = "some of its layers attend over the keys and values of earlier ones, which the kernels do not"
            return
        for base in model.modules():
            whole = SourcedModel.of(base, packing) or DescribedModel.of(base, packing)
            if isinstance(whole, str):
                self.unfused = whole
            elif whole is not None:
                self._whole.append(base)
                vars(base)["forward"] = whole
                self.native, self.unfused = len(whole.kernels), None

    def trial(self) -> tuple[Tensor, Tensor] | None:
        """The output of a decoder that has an encoder: by the kernels, and by its own layers; None if there is none."""
        found = [vars(base)["forward"] for base in self._whole]
        return next((each.trial() for each in found if isinstance(each, SourcedModel)), None)

    def wrong(self, model: nn.Module, sample: Callable[[], Tensor]) -> str | None:
        """How the output of a described decoder differs from that of its classes; None if it does not. ``sample`` runs ``model``."""
        found = [vars(base)["forward"] for base in self._whole]
        return next((why for each in found if isinstance(each, DescribedModel) and (why := each.wrong(model, sample)) is not None), None)

    def undo(self) -> None:
        """Give every decoder the ``forward`` of its class back."""
        for module in self._whole:
            take_back(module, NativeModel)
        self._whole, self.native = [], 0
