"""Medusa (Cai et al. 2024) as the drafter: one pass of all heads per round, from the hidden state that the root was chosen from.

Head k does not see the tokens drafted before its own. What those make likelier is added (:mod:`foredraft.heads.ngram_log_odds`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.backends.packing import Packing
from foredraft.drafters.base import DraftRequest, Row
from foredraft.drafters.draft_loops.kernels import greedy, grow_by
from foredraft.drafters.draft_loops.medusa import MedusaGrowth
from foredraft.drafters.growth import Expand, Growth
from foredraft.drafters.heads import HeadDrafter
from foredraft.errors import ConfigurationError
from foredraft.heads.base import Head
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.ngram_log_odds import PATH, REACH, REMEMBERED, NgramLogOdds, mix_in_text
from foredraft.logits.sampler import fit_vocabulary
from foredraft.target import Target
from foredraft.tree import TokenTree

Ids = np.ndarray[Any, np.dtype[np.int64]]
SUCCESSORS = ("auto", "stored", "off")


class Medusa(HeadDrafter):
    __doc__ = (
        f"{HeadDrafter.__doc__}"
        """
    successors: ``auto`` adds to the heads' logits what the tokens before make likelier: by the counts beside the head, where it has some,
        and by what followed the same tokens in the text so far; ``stored`` takes the counts alone, ``off`` neither, as other engines do.
    """
    )
    name = kind = "medusa"
    summary = "heads on the target's last hidden state, one per position ahead; chains and trees"
    _packing: Packing | None = None  # of the head's weights, where the target's are packed too
    _hints: Sequence[int] = ()
    _kernel: MedusaGrowth | None = None  # for whole drafts of greedy rows
    _successors: NgramLogOdds | None = None

    def __init__(
        self,
        source: str | Path | Head | None = None,
        *,
        siblings: str = "auto",
        quantization: str | None = None,
        learn: bool | str | Path | Mapping[str, Any] = False,
        successors: str = "auto",
    ):
        super().__init__(source, siblings=siblings, quantization=quantization, learn=learn)
        if successors not in SUCCESSORS:
            raise ConfigurationError(f"drafter {self.name!r}: successors must be {', '.join(SUCCESSORS)}; got {successors!r}")
        self.successors = successors
        self._texts: dict[int, Latest] = {}  # by slot

    def bind(self, target: Target) -> None:
        super().bind(target)
        head: MedusaHead = self.head
        self._successors = None if self.successors == "off" or head.log_odds is None else head.log_odds.to(target.device)
        self._hints = target.backend.hints
        self._pack()

    def _pack(self) -> None:
        """Lay the weights out for kernels, where the target's are laid out too."""
        if not self._hints:
            return
        head: MedusaHead = self.head
        hidden = torch.zeros(1, head.config.target.hidden_size, dtype=head.dtype)
        with torch.inference_mode(False), torch.no_grad():
            self._packing = Packing(head, lambda: head(hidden), owned=head is not self.source, hints=self._hints)
        self._kernel = MedusaGrowth.of(head, self._packing, self._successors, heed=self._heeds)

    def rewrite(self, weights: Mapping[str, Tensor]) -> None:
        self._kernel = None
        if self._packing is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._packing.undo()
        super().rewrite(weights)
        self._pack()

    @property
    def _heeds(self) -> bool:
        return self.successors == "auto"

    def end(self, rows: Sequence[Row]) -> None:
        super().end(rows)
        for row in rows:
            self._texts.pop(row.slot, None)

    def reset(self) -> None:
        super().reset()
        self._texts.clear()

    def _latest(self, row: Row) -> Ids:
        return self._texts.setdefault(row.slot, Latest()).of(row.ids)

    def close(self) -> None:
        super().close()
        self._kernel = None
        if self._packing is not None:
            self._packing.undo()
            self._packing = None

    def _grow(self, request: DraftRequest, *, chain: bool) -> Growth:
        if self._kernel is not None and greedy(request):
            assert self._hidden is not None
            self._kernel.state, self._kernel.text = self._hidden[0], self._latest(request.rows[0])
            if (grown := grow_by(self._kernel, request)) is not None:
                return grown
        return super()._grow(request, chain=chain)

    def _expand(self, request: DraftRequest) -> Expand:
        logits = fit_vocabulary(self.head(self._hidden, request.depth).to(request.device), request.vocab_size)  # [R, D, V]
        levels = iter(range(request.depth))
        if self._successors is None and not self._heeds:
            return lambda tree, first: logits[:, next(levels), None].expand(-1, tree.nodes - first, -1)
        texts = stacked([self._latest(row) for row in request.rows]).to(request.device)
        paths = [torch.nn.functional.pad(texts[:, -PATH:], (max(0, PATH - texts.shape[1]), 0), value=-1).clamp(min=-1)[:, None]]

        def expand(tree: TokenTree, first: int) -> Tensor:
            level = next(levels)
            if first:
                whole = torch.cat(paths, 1)
                above = whole.gather(1, tree.parents[:, first:, None].expand(tree.rows, -1, PATH))
                paths.append(torch.cat([above[..., 1:], tree.tokens[:, first:, None]], -1))
            said = logits[:, level, None].expand(-1, tree.nodes - first, -1)
            if self._successors is not None:
                said = self._successors.added(said, paths[-1][..., -REACH:], level)
            return mix_in_text(said, paths[-1], texts) if self._heeds else said

        return expand


class Latest:
    """The latest tokens of a text that grows, as an array."""

    def __init__(self) -> None:
        self._ids, self._begin, self._end, self._known = np.empty(4 * REMEMBERED, np.int64), 0, 0, 0

    def of(self, ids: Sequence[int]) -> Ids:
        """The last ``REMEMBERED`` of ``ids``, which begins with what it was before."""
        new = ids[max(self._known, len(ids) - REMEMBERED) :]
        if self._end + len(new) > len(self._ids):
            kept = self._ids[max(self._begin, self._end - REMEMBERED) : self._end].copy()
            self._ids[: len(kept)], self._begin, self._end = kept, 0, len(kept)
        self._ids[self._end : self._end + len(new)] = new
        self._end, self._known = self._end + len(new), len(ids)
        return self._ids[max(self._begin, self._end - REMEMBERED) : self._end]


def stacked(texts: Sequence[Ids]) -> Tensor:
    """``[R, W]``, -2 in front of shorter ones."""
    width = max(map(len, texts))
    return torch.from_numpy(np.stack([np.pad(text, (width - len(text), 0), constant_values=-2) for text in texts]))
