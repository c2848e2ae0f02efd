"""A model that is trained alone, by the LayerSkip recipe (:mod:`foredraft.training.layerskip`), as the trainer sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.heads.base import Batch, Head, HeadConfig, refuse_unknown_options
from foredraft.heads.losses import cross_entropy, pairs
from foredraft.models.features import first_tensor
from foredraft.models.identity import shape_of
from foredraft.models.layers import LayerRanges
from foredraft.training.batches import Order, Tokens
from foredraft.training.layerskip import Recipe
from foredraft.training.learner import language_loss


@dataclass(frozen=True, kw_only=True)
class EarlyExitsConfig(HeadConfig):
    """``exit`` is what acceptance is measured with: the exit that the recipe favours, or that of a third of the layers."""

    exit: int
    recipe: Recipe = field(default_factory=Recipe)


class EarlyExits(Head):
    """Stands where a head stands in other runs, and has no weights: ``layer-skip`` drafts with the model itself."""

    kind = "layerskip"
    drafter = "layer-skip"
    config: EarlyExitsConfig
    config_class = EarlyExitsConfig

    @classmethod
    def for_target(cls, model: PreTrainedModel, **options: Any) -> EarlyExits:
        """Options: those of :class:`~foredraft.training.layerskip.Recipe`."""
        refuse_unknown_options("a layerskip", options, [each.name for each in fields(Recipe)])
        shape, recipe = shape_of(model), Recipe(**options)
        recipe.check(shape.layers)
        return cls(EarlyExitsConfig(shape, exit=recipe.exit or max(1, shape.layers // 3), recipe=recipe))

    @property
    def drafter_options(self) -> dict[str, Any]:
        return {"exit": self.config.exit}


class EarlyExitLearner(nn.Module):
    """One forward pass is the recipe's loss of a micro-batch.

    Args:
        backbone: the model; its decoder layers can be run in part.
        seed: of the layers that rows leave out: a function of it, of the step and of the text.

    Raises:
        ConfigurationError: the model has no exit that the recipe names.
        UnsupportedModelError: its layers cannot be run in part.
    """

    def __init__(self, backbone: PreTrainedModel, recipe: Recipe, seed: int):
        super().__init__()
        self.backbone, self.recipe, self.seed = backbone, recipe, seed
        self.ranges = LayerRanges(backbone)
        recipe.check(self.ranges.count)

    def forward(self, tokens: Tokens, step: int, steps: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The mean loss in step ``step`` of ``steps``, the tokens it is a mean of, and its parts."""
        weights = self.recipe.weights(self.ranges.count, step, steps)
        exits = [layer for layer, weight in enumerate(weights[:-1]) if weight]
        with torch.enable_grad(), self._leaving_out(self.kept(tokens, step, steps), exits) as states:
            logits = self.backbone(input_ids=tokens.ids, use_cache=False).logits
        batch = Batch(tokens.ids, tokens.valid, tokens.counted, logits, logits)
        places, labels = pairs(batch, 1)
        own = language_loss(batch)
        total, parts = weights[-1] * own, {"loss_model": own.detach()}
        for layer in exits:
            nats, _ = cross_entropy(self.ranges.read_out, states[layer].flatten(0, 1)[places], tokens.ids.flatten()[labels])
            early = nats / max(1, len(places))
            total = total + weights[layer] * early
            if layer + 1 == self.recipe.exit:
                parts[f"loss_exit_{layer + 1}"] = early.detach()
        return total, torch.tensor(float(len(places)), device=total.device), parts

    def kept(self, tokens: Tokens, step: int, steps: int) -> Tensor:
        """``[L, B]`` False where a text leaves a layer out."""
        draws = [np.random.default_rng((self.seed, step, int(member), 1)).random(self.ranges.count) for member in tokens.members]
        return torch.from_numpy(np.stack(draws, 1) >= np.asarray(self.recipe.dropped(self.ranges.count, step, steps))[:, None])

    @contextmanager
    def _leaving_out(self, kept: Tensor, exits: list[int]) -> Iterator[dict[int, Tensor]]:
        """Inside, a pass of the model leaves layers out by ``kept`` ``[L, B]`` and its states ``[B, S, d]`` behind the layers ``exits``
        in what this gives."""
        found: dict[int, Tensor] = {}

        def after(index: int, given: Any, named: Any, output: Any) -> Any:
            states = first_tensor(output)
            if not kept[index].all():
                states = torch.where(kept[index].to(states.device)[:, None, None], states, first_tensor(given, named))
            if index in exits:
                found[index] = states
            return states if isinstance(output, Tensor) else (states, *output[1:])

        handles = [
            layer.register_forward_hook(lambda _, *seen, index=index: after(index, *seen), with_kwargs=True)
            for index, layer in enumerate(self.ranges.layers)
            if index in exits or not kept[index].all()
        ]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, order: Order) -> float:
    """Mean cross-entropy of ``model`` over the counted tokens of all texts of ``order``."""
    total, count = 0.0, 0
    for members in order.epoch(0):
        tokens = order.tokens(members).to(model.device)
        logits = model(input_ids=tokens.ids, use_cache=False).logits
        batch = Batch(tokens.ids, tokens.valid, tokens.counted, logits, logits)
        here = len(pairs(batch, 1)[0])
        total, count = total + float(language_loss(batch)) * here, count + here
    return total / max(1, count)
