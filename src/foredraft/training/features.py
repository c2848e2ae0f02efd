"""What the target computes of a batch, once for every head that is trained on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foredraft.models.features import features_of, taps_of
from foredraft.training.batches import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Reader:
    """Hidden states and logits of texts.

    Args:
        model: the target.
        features: which hidden states, numbered as heads number them.
        train: keep the graph, for a backbone that is trained too.

    Raises:
        ConfigurationError, UnsupportedModelError: hidden states that there are not, or that cannot be had.
    """

    def __init__(self, model: PreTrainedModel, features: Sequence[int], *, train: bool = False):
        self.model, self.count, self.train = model, len(features), train
        few = torch.arange(3, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
        self.features = features_of(model, features, taps_of(model, few), whole=True, device=model.device)

    def __call__(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """``[B, S, F, d]`` at every token, in the order of the features, and logits ``[B, S, V]``.

        Padding must be behind the texts, where no token sees it.
        """
        with torch.set_grad_enabled(self.train), self.features.catching() as caught:
            logits = self.model(input_ids=tokens.ids, use_cache=False).logits
            hidden = caught.hidden()
        return hidden.view(*tokens.ids.shape, self.count, -1), logits
