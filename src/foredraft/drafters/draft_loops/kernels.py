"""Drafts of a single row by a kernel that makes them in one call: greedy trees, and chains and trees that are drawn."""

from __future__ import annotations

import torch

from foredraft.backends.kernel_pass import Direct
from foredraft.backends.native_growth import Draws, Grower, NativeGrowth
from foredraft.drafters.base import DraftRequest
from foredraft.drafters.growth import UNSEEN, Growth, draws_for
from foredraft.shapes import DynamicShape, StaticShape
from foredraft.target import Target
from foredraft.tree import TokenTree


def likeliest(request: DraftRequest) -> bool:
    """Whether ``request`` is for the likeliest tokens of one row."""
    return len(request.rows) == 1 and request.proposal == "deterministic" and not request.needs_q


def greedy(request: DraftRequest) -> bool:
    """Whether kernels can draft for ``request``: the likeliest tokens of one row, with no processor in between."""
    return likeliest(request) and request.sampler.plain


def grow_by(kernel: Grower, request: DraftRequest, draws: Draws | None = None) -> Growth | None:
    """What ``kernel`` grows for a request that is :func:`greedy`, or draws; None where it cannot go on with that text."""
    shape, ids = request.shape, request.rows[0].ids
    if isinstance(shape, DynamicShape):
        grown = kernel.grow(ids, shape, depth=request.depth, vocab_size=request.vocab_size, draws=draws)
    else:
        assert isinstance(shape, StaticShape)
        grown = kernel.fill(ids, shape.truncate(request.depth), vocab_size=request.vocab_size, draws=draws)
    if grown is None:
        return None
    tokens, parents = [ids[-1], *grown.tokens], (-1, *grown.parents)
    found = torch.tensor([tokens]).clamp(min=0)
    if shape.is_chain:
        q = None if draws is None or not request.needs_q else draws.q
        tree = TokenTree.from_chain(found, proposal=request.proposal, q=q)
    elif isinstance(shape, StaticShape):
        real = None if min(tokens) >= 0 else torch.tensor([tokens]) >= 0
        tree = TokenTree.from_parents(found, parents, valid=real, proposal=request.proposal)
    else:
        tree = TokenTree.from_lists([tokens], [[*parents]], [[True] * len(tokens)], proposal=request.proposal, pruned=True)
    return Growth(tree, grown.fed, torch.tensor([[0, *(UNSEEN if node < 0 else node for node in grown.own)]]), grown.expected)


class KernelLoop:
    """Drafts of a model that is one call of a kernel. Like every draft loop it makes a whole draft of a draft model in one call."""

    def __init__(self, model: Target):
        self.model = model
        self._direct: Direct | None = None
        self._kernel: NativeGrowth | None = None  # for that

    def draft(self, request: DraftRequest, *, chain: bool) -> Growth | None:
        """The draft for ``request``, whose ``depth`` is that of its shape; None where it has to be made level by level. ``chain`` says
        that the shape was asked for as a chain: a tree that was cut to one is drawn as a tree is.

        Afterwards the draft model's cache holds every node that was fed behind the root, uncommitted.
        """
        model, direct = self.model, self.model.backend.direct
        if direct is None or model.device != request.device:
            return None
        drawn = chain or request.proposal == "keyed"
        draws = draws_for(request) if drawn and len(request.rows) == 1 and not likeliest(request) else None
        if draws is None and not likeliest(request):
            return None
        banned = () if draws else request.sampler.pipelines[0].banned(request.sampler.lengths[0])
        if direct is not self._direct:
            self._direct, self._kernel = direct, NativeGrowth.of(direct, model.cache, model.trained)
        if self._kernel is None or banned is None or max(request.rows[0].ids[model.lengths[0] :], default=0) >= model.vocab_size:
            return None
        self._kernel.ban(banned)
        return grow_by(self._kernel, request, draws)
