"""Hydra: Medusa's heads, each of which also sees the tokens that were drafted before its own (Ankner et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from foredraft.errors import whole
from foredraft.heads.base import Batch
from foredraft.heads.losses import pairs
from foredraft.heads.medusa import MedusaConfig
from foredraft.heads.vocabulary import Guess, ResidualLayers, VocabularyHead


@dataclass(frozen=True, kw_only=True)
class HydraConfig(MedusaConfig):
    """As Medusa's; ``layers`` counts those of each head's MLP, of which the first reads the hidden state and the embeddings.

    ``embedding_size`` is the width of the target's embeddings. It is taken from the target and is no option.
    """

    embedding_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("embedding_size", self.embedding_size)


class HydraBlock(nn.Module):
    """x = h + SiLU(W [h; e_1; …; e_n]), and x <- x + SiLU(W x) for every further layer."""

    def __init__(self, size: int, read: int, layers: int, *, bias: bool):
        super().__init__()
        with torch.device("meta"):
            self.first = nn.Linear(size + read, size, bias=bias)
        self.rest = ResidualLayers(size, layers - 1, bias=bias)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """``[..., d]`` from ``hidden`` ``[..., d]`` and the embeddings of n tokens, ``[..., n * e]``."""
        return self.rest(hidden + functional.silu(self.first(torch.cat([hidden, embedded], -1))))


class HydraHead(VocabularyHead):
    """Head k = 0, 1, … predicts token t + 2 + k from the hidden state at position t and the embeddings of tokens t + 1 to t + 1 + k:
    the root, and what was drafted below it. The embeddings are the target's, attached and not stored. First layers begin as zero and
    LM heads as the target's, so that all heads begin as its LM head.
    """

    kind = "hydra"
    config: HydraConfig
    config_class = HydraConfig

    def __init__(self, config: HydraConfig):
        super().__init__(config)
        size, read = config.target.hidden_size, config.embedding_size
        self.blocks = nn.ModuleList(HydraBlock(size, (k + 1) * read, config.layers, bias=config.bias) for k in range(config.heads))

    def forward(self, hidden: Tensor, path: Tensor) -> Tensor:
        """``[..., V]`` logits after ``path`` ``[..., k + 1]``, the root and the k tokens drafted below it; ``hidden`` is ``[..., d]``."""
        k = path.shape[-1] - 1
        return self.logits(self.blocks[k](hidden.to(self.dtype), self.embed(path).flatten(-2)), k)

    def guesses(self, batch: Batch) -> Iterator[Guess]:
        hidden, ids = batch.hidden[:, :, 0].flatten(0, 1).to(self.dtype), batch.ids.flatten()
        for k, block in enumerate(self.blocks):
            sources, places = pairs(batch, k + 2)
            path = ids[sources[:, None] + torch.arange(1, k + 2, device=ids.device)]
            yield Guess(block(hidden[sources], self.embed(path).flatten(-2)), places)
