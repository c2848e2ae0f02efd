"""The target without some of its sublayers as the drafter (Draft & Verify, Zhang et al. 2023).

Any set of attention and MLP sublayers is left out while drafting. The draft writes into the target's own cache. Below the first
sublayer that is left out, keys, values and states are those of the whole model and are kept; verification runs the layers from there on,
and overwrites what they wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from foredraft.drafters.base import Feedback, Row
from foredraft.drafters.layer_skip import LayerSkip
from foredraft.drafters.skip_tuning import SkipTuner
from foredraft.errors import ConfigurationError
from foredraft.models.skips import SkipSet
from foredraft.target import Target
from foredraft.tree import TokenTree

AUTO = "auto"  # the source that searches


class DraftVerify(LayerSkip):
    """Options:

    source: a file that ``foredraft skip search`` wrote for the target; or ``auto``, to search while texts are written.
    skip: what to leave out, in place of a file: a ``SkipSet``, or the same in words, such as ``attention=2,3 mlp=1,2``, layers from 0 on.
        With neither, the MLP of every second layer.
    siblings: how tokens are chosen when sampling, as for ``draft-model``.
    threshold: as for ``layer-skip``.
    """

    name = "draft-verify"
    summary = "the target without some of its attention and MLP sublayers"

    def __init__(
        self,
        source: str | Path | None = None,
        *,
        skip: SkipSet | str | None = None,
        siblings: str = "auto",
        threshold: float | str | None = None,
    ):
        if source is not None and skip is not None:
            raise ConfigurationError("draft-verify takes a file or a set of sublayers to leave out, not both; leave skip out")
        super().__init__(source, siblings=siblings, threshold=threshold)
        self._given = skip if skip is None or isinstance(skip, SkipSet) else SkipSet.parse(skip)
        self._skip = self._given  # of the model that it is bound to
        self.tuner: SkipTuner | None = None

    @property
    def skip(self) -> SkipSet:
        """What is left out; another set may be given between rounds."""
        if self.tuner is not None:
            return self.tuner.skip
        if self._skip is None:
            raise ConfigurationError("which sublayers are left out is not known before the drafter is bound to a Speculator")
        return self._skip

    @skip.setter
    def skip(self, skip: SkipSet) -> None:
        if self._target is not None:
            self._target.sublayers.check(skip)
        self._skip, self.tuner = skip, None

    @property
    def part(self) -> object:
        return self.skip

    def bind(self, target: Target) -> None:
        if self.source == AUTO:
            self._target, self.tuner = target, SkipTuner(target)
            return
        sublayers = target.sublayers
        skip = self._given or sublayers.spread if self.source is None else SkipSet.load(self.source, target.model)
        sublayers.check(skip)
        self._target, self._skip = target, skip

    def _expand(self, tree: TokenTree, first: int) -> Tensor:
        return self.target.score_early(tree.with_safe_parents(), self.skip, first=first)

    def begin(self, rows: Sequence[Row]) -> None:
        super().begin(rows)
        if self.tuner is not None:
            if self.tuner.version != self.target.version:  # of the model as it was, little is known of it as it is
                self.tuner = SkipTuner(self.target)
            self.tuner.begin()
        self.target.sublayers.check(self.skip)  # the model may have fewer layers by now

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        super().observe(rows, feedback)
        if self.tuner is not None:
            self.tuner.observe(rows)

    def end(self, rows: Sequence[Row]) -> None:
        super().end(rows)
        if self.tuner is not None:
            self.tuner.store()

    def forget(self) -> None:
        super().forget()
        if self.tuner is not None:
            self.tuner = SkipTuner(self.target)
