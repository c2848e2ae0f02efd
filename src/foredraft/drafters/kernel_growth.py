"""Drafts of a single greedy row by a kernel that grows them in one call."""

from __future__ import annotations

import torch

from foredraft.backends.native_growth import Grower
from foredraft.drafters.base import DraftRequest
from foredraft.drafters.growth import UNSEEN, Growth
from foredraft.shapes import DynamicShape, StaticShape
from foredraft.tree import TokenTree


def greedy(request: DraftRequest) -> bool:
    """Whether kernels can draft for ``request``: the likeliest tokens of one row, with no processor in between."""
    return len(request.rows) == 1 and request.proposal == "deterministic" and request.sampler.plain and not request.needs_q


def grow_by(kernel: Grower, request: DraftRequest) -> Growth | None:
    """What ``kernel`` grows for a request that is :func:`greedy`; None where it cannot go on with that text."""
    shape, ids = request.shape, request.rows[0].ids
    if isinstance(shape, DynamicShape):
        grown = kernel.grow(ids, shape, depth=request.depth, vocab_size=request.vocab_size)
    else:
        assert isinstance(shape, StaticShape)
        grown = kernel.fill(ids, shape.truncate(request.depth), vocab_size=request.vocab_size)
    if grown is None:
        return None
    tokens = [ids[-1], *grown.tokens]
    if shape.is_chain:
        tree = TokenTree.from_chain(torch.tensor([tokens]))
    else:
        parents, pruned = [[-1, *grown.parents]], isinstance(shape, DynamicShape)
        tree = TokenTree.from_lists([tokens], parents, [[True] * len(tokens)], pruned=pruned)
    return Growth(tree, grown.fed, torch.tensor([[0, *(UNSEEN if node < 0 else node for node in grown.own)]]), grown.expected)
