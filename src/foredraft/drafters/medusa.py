"""Medusa (Cai et al. 2024) as the drafter: one pass of all heads per round, from the hidden state that the root was chosen from.

Head k does not see the tokens drafted before its own. What those make likelier is added (:mod:`foredraft.heads.ngram_log_odds`).
Without that all nodes of a level have the same q, and where siblings are the most likely tokens, or those that lead the target's own race,
the same siblings too: they are ranked once per level, and a tree of any shape is filled by looking them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from foredraft.backends.packing import NATIVE, Packing
from foredraft.drafters.base import DraftRequest, Row
from foredraft.drafters.draft_loops.kernels import greedy, grow_by
from foredraft.drafters.draft_loops.medusa import MedusaGrowth
from foredraft.drafters.growth import IMPOSSIBLE, Expand, Growth, Offer, grow_offered
from foredraft.drafters.heads import HeadDrafter
from foredraft.errors import ConfigurationError
from foredraft.heads.base import Head
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.ngram_log_odds import PATH, REACH, REMEMBERED, NgramLogOdds, mix_in_text
from foredraft.logits.noise import argmax
from foredraft.logits.sampler import fit_vocabulary
from foredraft.shapes import DynamicShape, StaticShape
from foredraft.tree import TokenTree, static_ancestors

if TYPE_CHECKING:
    from foredraft.target import Target

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
    _kernel: MedusaGrowth | None = None  # for whole drafts of greedy rows
    _successors: NgramLogOdds | None = None

    def __init__(
        self, source: str | Path | Head | None = None, *, siblings: str = "auto", quantization: str | None = None, successors: str = "auto"
    ):
        super().__init__(source, siblings=siblings, quantization=quantization)
        if successors not in SUCCESSORS:
            raise ConfigurationError(f"drafter {self.name!r}: successors must be {', '.join(SUCCESSORS)}; got {successors!r}")
        self.successors = successors
        self._texts: dict[int, Latest] = {}  # by slot

    def _max_depth(self) -> int | None:
        head: MedusaHead = self.head
        return head.config.heads

    def bind(self, target: Target) -> None:
        super().bind(target)
        head: MedusaHead = self.head
        self._successors = None if self.successors == "off" or head.log_odds is None else head.log_odds.to(target.device)
        if not target.backend.hints:
            return
        hidden = torch.zeros(1, head.config.target.hidden_size, dtype=head.dtype)
        with torch.no_grad():
            hints = target.backend.hints
            native = NATIVE in hints and MedusaGrowth.fits(head)
            self._packing = Packing(head, lambda: head(hidden), owned=head is not self.source, hints=hints, native=native)
        self._kernel = MedusaGrowth.of(head, self._packing, self._successors, heed=self._heeds)

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

    def _logits(self, request: DraftRequest) -> Tensor:
        """``[R, D, V]`` of the heads that are needed."""
        return fit_vocabulary(self.head(self._hidden, request.depth).to(request.device), request.vocab_size)

    def _grow(self, request: DraftRequest, *, chain: bool) -> Growth:
        if self._kernel is not None and greedy(request):
            assert self._hidden is not None
            self._kernel.state, self._kernel.text = self._hidden[0], self._latest(request.rows[0])
            if (grown := grow_by(self._kernel, request)) is not None:
                return grown
        if self._successors is not None or self._heeds:
            return super()._grow(request, chain=chain)
        alike = request.proposal in ("deterministic", "keyed") and not request.needs_q and not request.sampler.needs_history
        if not alike:
            return super()._grow(request, chain=chain)
        logits = self._logits(request)
        if isinstance(request.shape, DynamicShape):
            return grow_offered(request, request.shape, offers(request, logits, min(request.shape.k, request.vocab_size)))
        assert isinstance(request.shape, StaticShape)
        return Growth(filled(request, request.shape, logits), 0)

    def _expand(self, request: DraftRequest) -> Expand:
        logits, levels = self._logits(request), iter(range(request.depth))
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


def ranked(request: DraftRequest, logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """The best ``count`` children of any node of each level: the processed scores ``[R, D, V]``, tokens ``[R, D, count]``, and which of
    them are possible at all, likewise (None: all)."""
    scores = request.sampler.scores(logits, TokenTree.root(request.roots()))
    if request.proposal == "deterministic":
        if count == 1:
            return scores, argmax(scores)[..., None], None
        best = scores.topk(count, -1)
        return scores, best.indices, best.values > IMPOSSIBLE
    q, noise = request.sampler.distribution(scores), request.sampler.noise
    assert noise is not None
    depths = torch.arange(q.shape[1], device=q.device)[None]
    if count == 1:
        return scores, noise.race(q, depths)[..., None], None
    tokens = noise.race_order(q, depths, count)
    return scores, tokens, q.gather(2, tokens) > 0


def filled(request: DraftRequest, shape: StaticShape, logits: Tensor) -> TokenTree:
    """``shape`` with every node's token looked up by its depth and rank."""
    depths, ranks, most = places(shape, logits.device)
    _, tokens, possible = ranked(request, logits, most)
    tokens = torch.cat([request.roots()[:, None], tokens[:, depths, ranks]], 1)
    if shape.is_chain:
        return TokenTree.from_chain(tokens, proposal=request.proposal)
    if possible is not None and (request.device.type != "cpu" or not bool(possible.all())):  # looking costs less than such a mask
        missing = torch.nn.functional.pad(~possible[:, depths, ranks], (1, 0))
        valid: Tensor | None = ~(missing[:, None] & static_ancestors(shape.parents, tokens.device)).any(-1)
    else:
        valid = None
    return TokenTree.from_parents(tokens, shape.parents, valid=valid, proposal=request.proposal)


def offers(request: DraftRequest, logits: Tensor, k: int) -> Offer:
    """Children of the nodes of a level for a tree that is grown, with the log-probability of their paths."""
    scores, tokens, possible = ranked(request, logits, k)
    likely = torch.log_softmax(scores, -1).gather(2, tokens).nan_to_num(nan=IMPOSSIBLE, neginf=IMPOSSIBLE)
    if possible is not None:
        likely = likely.masked_fill(~possible, IMPOSSIBLE)

    def offer(tree: TokenTree, first: int, above: Tensor, depth: int) -> tuple[Tensor, Tensor, None]:
        nodes = tree.nodes - first
        return tokens[:, depth, None].expand(-1, nodes, -1), above[..., None] + likely[:, depth, None], None

    return offer


@lru_cache(maxsize=256)
def places(shape: StaticShape, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """``[N - 1]`` each of the drafted nodes: the level below whose nodes they hang, and their rank among their siblings; and the most
    siblings of any."""
    depths = [depth for depth, level in enumerate(shape.levels) for _ in level.parents]
    ranks = [rank for level in shape.levels for rank in level.ranks]
    with torch.inference_mode(False):
        return torch.tensor(depths, device=device), torch.tensor(ranks, device=device), 1 + max(ranks)
