"""Medusa: heads on the target's last hidden state, each of which guesses one token further ahead (Cai et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from foredraft.errors import whole
from foredraft.heads.base import Batch
from foredraft.heads.losses import pairs
from foredraft.heads.vocabulary import Guess, ResidualLayers, VocabularyConfig, VocabularyHead, yes_or_no


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(VocabularyConfig):
    """Attributes, besides those of :class:`~foredraft.heads.vocabulary.VocabularyConfig`:

    heads: tokens that can be drafted in a row.
    layers: residual layers of each head.
    bias: those layers have biases.
    """

    heads: int = 4
    layers: int = 1
    bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("heads", self.heads)
        whole("layers", self.layers)
        yes_or_no("bias", self.bias)

    @property
    def predictions(self) -> int:
        return self.heads


class MedusaHead(VocabularyHead):
    """Head k = 0, 1, … is softmax(W2 (SiLU(W1 h) + h)): with h the last hidden state at position t, which the LM head predicts token
    t + 1 from, it predicts token t + 2 + k. With more ``layers``, x <- x + SiLU(W x) for each, from x = h on. W1 begins as zero and W2 as
    the LM head, so that all heads begin as the LM head.
    """

    kind = "medusa"
    config: MedusaConfig
    config_class = MedusaConfig

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        self.blocks = nn.ModuleList(ResidualLayers(config.target.hidden_size, config.layers, bias=config.bias) for _ in range(config.heads))

    def forward(self, hidden: Tensor, heads: int | None = None) -> Tensor:
        """``[..., K, V]`` logits of the first ``heads`` heads (None: all) from hidden states ``[..., d]``."""
        hidden = hidden.to(self.dtype)
        return self.all_logits([block(hidden) for block in list(self.blocks)[:heads]])

    def guesses(self, batch: Batch) -> Iterator[Guess]:
        hidden = batch.hidden[:, :, 0].flatten(0, 1).to(self.dtype)
        for k, block in enumerate(self.blocks):
            sources, places = pairs(batch, k + 2)
            yield Guess(block(hidden[sources]), places)
