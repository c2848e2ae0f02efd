"""Hydra (Ankner et al. 2024) as the drafter: Medusa's heads, each of which reads the path that it continues; one pass per level."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.drafters.base import DraftRequest
from foredraft.drafters.growth import Expand
from foredraft.drafters.heads import HeadDrafter, Levels
from foredraft.tree import TokenTree


class Hydra(HeadDrafter):
    __doc__ = HeadDrafter.__doc__
    name = kind = "hydra"
    summary = "heads on the target's last hidden state that also read the tokens drafted so far; chains and trees"

    def _expand(self, request: DraftRequest) -> Expand:
        assert self._hidden is not None
        hidden, levels, paths = self._hidden, Levels(), torch.empty(0)

        def expand(tree: TokenTree, first: int) -> Tensor:
            nonlocal paths
            newest = tree.tokens[:, first:, None].to(hidden.device)
            above = levels.above(tree, first).to(hidden.device)
            if first:  # [R, n, k + 1] tokens from the root down
                newest = torch.cat([paths.gather(1, above[..., None].expand(-1, -1, paths.shape[2])), newest], 2)
            paths = newest
            return self.head(hidden[:, None].expand(-1, newest.shape[1], -1), paths)

        return expand
