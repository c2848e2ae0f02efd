"""Medusa (Cai et al. 2024) as the drafter: one pass of all heads per round, from the hidden state that the root was chosen from.

Head k knows nothing of the tokens that were drafted before its own, so that all nodes of a level have the same q. Where siblings are the
most likely tokens, or those that lead the target's own race, every node of a level has the same ones too: they are ranked once per
level, and a tree of any shape is filled by looking them up.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.drafters.base import DraftRequest
from foretoken.drafters.growth import IMPOSSIBLE, Expand, Growth, Offer, grow_offered
from foretoken.drafters.heads import HeadDrafter
from foretoken.drafters.kernel_growth import greedy, grow_by
from foretoken.drafters.medusa_growth import MedusaGrowth
from foretoken.errors import ConfigurationError
from foretoken.heads.base import Head
from foretoken.heads.medusa import MedusaHead
from foretoken.heads.successors import Successors
from foretoken.sampler import fit_vocabulary
from foretoken.sampling import argmax
from foretoken.shapes import DynamicShape, StaticShape
from foretoken.target.packing import NATIVE, Packing
from foretoken.transfers import to_device
from foretoken.tree import TokenTree, layout_ancestors

if TYPE_CHECKING:
    from foretoken.target import Target


class Medusa(HeadDrafter):
    __doc__ = (
        f"{HeadDrafter.__doc__}"
        """
    successors: ``auto`` adds to the heads' logits what the tokens drafted before make likelier, where the head has that beside it; ``off``
        leaves it out, as other engines do.
    """
    )
    name = kind = "medusa"
    summary = "heads on the target's last hidden state, each a token further ahead; one pass of them per round"
    _packing: Packing | None = None  # of the head's weights, where the target's are packed too
    _kernel: MedusaGrowth | None = None  # for whole drafts of greedy rows
    _successors: Successors | None = None

    def __init__(
        self, source: str | Head | None = None, *, siblings: str = "auto", quantization: str | None = None, successors: str = "auto"
    ):
        super().__init__(source, siblings=siblings, quantization=quantization)
        if successors not in ("auto", "off"):
            raise ConfigurationError(f"drafter {self.name!r}: successors must be auto or off, got {successors!r}")
        self.successors = successors

    @property
    def deepest(self) -> int | None:
        head: MedusaHead = self.head
        return head.config.heads

    def bind(self, target: Target) -> None:
        super().bind(target)
        head: MedusaHead = self.head
        if self.successors == "auto" and head.successors is not None:
            self._successors = head.successors.to(target.device)
        if target.kernels is None:
            return
        hidden = torch.zeros(1, head.config.target.hidden_size, dtype=head.dtype)
        with torch.no_grad():
            hints, native = target.kernels.hints, NATIVE in target.kernels.hints and MedusaGrowth.fits(head)
            self._packing = Packing(head, lambda: head(hidden), owned=head is not self.source, hints=hints, native=native)
        self._kernel = MedusaGrowth.of(head, self._packing, self._successors)

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
            self._kernel.state = self._hidden[0]
            if (grown := grow_by(self._kernel, request)) is not None:
                return grown
        if self._successors is not None:
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
        successors, older = self._successors, None
        if successors is not None:  # the tokens in front of the roots
            older = to_device([row.ids[-2] if len(row.ids) > 1 else -1 for row in request.rows], request.device)[:, None]

        def expand(tree: TokenTree, first: int) -> Tensor:
            level = next(levels)
            same = logits[:, level, None].expand(-1, tree.nodes - first, -1)
            if successors is None or older is None:
                return same
            above = older if first == 0 else tree.tokens.gather(1, tree.parents[:, first:].expand(tree.rows, -1))
            return successors.added(same, torch.stack([above, tree.tokens[:, first:]], -1), level)

        return expand


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
        valid: Tensor | None = ~(missing[:, None] & layout_ancestors(shape.parents, tokens.device)).any(-1)
    else:
        valid = None
    return TokenTree.from_layout(tokens, shape.parents, valid=valid, proposal=request.proposal)


def offers(request: DraftRequest, logits: Tensor, k: int) -> Offer:
    """Children of the nodes of a level for a tree that is grown, with the log-probability of their paths."""
    scores, tokens, possible = ranked(request, logits, k)
    likely = torch.log_softmax(scores, -1).gather(2, tokens).nan_to_num(nan=IMPOSSIBLE, neginf=IMPOSSIBLE)
    if possible is not None:
        likely = likely.masked_fill(~possible, IMPOSSIBLE)

    def offer(tree: TokenTree, first: int, above: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        nodes = tree.nodes - first
        return tokens[:, depth, None].expand(-1, nodes, -1), above[..., None] + likely[:, depth, None]

    return offer


@lru_cache(maxsize=256)
def places(shape: StaticShape, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """``[N - 1]`` each of the drafted nodes: the level below whose nodes they hang, and their rank among their siblings; and the most
    siblings of any."""
    depths = [depth for depth, level in enumerate(shape.levels) for _ in level.parents]
    ranks = [rank for level in shape.levels for rank in level.ranks]
    with torch.inference_mode(False):
        return torch.tensor(depths, device=device), torch.tensor(ranks, device=device), 1 + max(ranks)
