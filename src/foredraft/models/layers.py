"""The decoder layers of a model as a list of which a part can be run.

Layers that are not run in a pass are replaced by modules that return their input. The list keeps its length, because several families
count or index it, and the layers' own hooks see nothing of a pass in which they are not run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from foredraft.errors import UnsupportedModelError
from foredraft.models.support import describe, input_device


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """What transformers calls decoder layers: those that gradient checkpointing knows, and that attend."""
    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return [layer for layer in found if any(isinstance(vars(each).get("layer_idx"), int) for each in layer.modules())]


def layer_count(model: PreTrainedModel) -> int:
    """How many layers the decoder has."""
    if model.config.is_encoder_decoder:
        return len(decoder_layers(model.get_decoder()))
    return model.config.get_text_config().num_hidden_layers


@torch.inference_mode()
def outputs_of(model: PreTrainedModel, modules: Iterable[nn.Module]) -> dict[nn.Module, Any]:
    """What ``modules`` return in a pass over two tokens."""
    found: dict[nn.Module, Any] = {}
    handles = [module.register_forward_hook(lambda module, given, output: found.update({module: output})) for module in modules]
    try:
        model(input_ids=torch.arange(2, device=input_device(model))[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


@dataclass(eq=False)
class Passing:
    """A pass through some layers: ``given`` replaces the input of the first of them, ``found`` is the output of the last one, if that is
    not the model's last."""

    given: Tensor | None = None
    found: Tensor | None = None


class Aside(nn.Module):
    """Stands in for decoder layer ``layer``, and has its attributes."""

    def __init__(self, layer: nn.Module, ranges: LayerRanges, index: int):
        super().__init__()
        vars(self).update(layer=layer, ranges=ranges, index=index)  # not as submodules

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["layer"], name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = self.ranges.stand_in(self.index, hidden_states)
        return (out,) if self.ranges.tuples else out


class LayerRanges:
    """Runs parts of a model's decoder layers.

    Raises:
        UnsupportedModelError: its layers cannot be run in part; the message says why.
    """

    def __init__(self, model: PreTrainedModel):
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
        layers, config = decoder_layers(model), model.config.get_text_config()
        found = [each for each in lists if len(each) == len(layers) and all(a is b for a, b in zip(each, layers))]
        if getattr(config, "num_kv_shared_layers", 0):
            raise self._refusal(model, "upper layers read the keys of lower ones")
        if len(found) != 1 or len(layers) != config.num_hidden_layers:
            raise self._refusal(model, "they do not stand in one list")
        self.model, self.layers, self.count = model, found[0], len(layers)
        self.tuples = isinstance(outputs_of(model, layers[:1])[layers[0]], tuple)
        self._asides = [Aside(layer, self, index) for index, layer in enumerate(layers)]
        self._span, self._passing = (0, self.count), Passing()

    @staticmethod
    def _refusal(model: PreTrainedModel, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"the decoder layers of {describe(model)} cannot be run in part: {why}; use another drafter")

    @contextmanager
    def only(self, begin: int, end: int, given: Tensor | None = None, aside: Collection[int] = ()) -> Iterator[Passing]:
        """Inside, a pass of the model runs layers ``begin`` up to ``end`` (exclusive) except those ``aside``. The first one reads
        ``given``, which must be there if there are layers below."""
        self._span, self._passing = (begin, end), Passing(given)
        modules, kept = self.layers._modules, dict(self.layers._modules)
        hook = None
        if begin == 0 and given is not None:
            hook = self.layers[0].register_forward_pre_hook(self._enter, with_kwargs=True)
        try:
            modules.update({str(index): each for index, each in enumerate(self._asides) if not begin <= index < end or index in aside})
            yield self._passing
        finally:
            modules.update(kept)
            self._passing.given = None
            if hook is not None:
                hook.remove()

    def _enter(self, layer: nn.Module, args: Any, named: Any) -> Any:
        """The arguments of the first layer, with ``given`` for the embeddings."""
        given = self._passing.given
        return ((given, *args[1:]), named) if args else (args, {**named, "hidden_states": given})

    def read_out(self, states: Tensor) -> Tensor:
        """``[n, V]`` logits from outputs ``states`` ``[n, d]`` of any layer, by the model's final norm, LM head, scaling and caps."""
        nothing = torch.zeros(len(states), 1, dtype=torch.long, device=states.device)
        with self.only(self.count, self.count, states[:, None]):
            return self.model(input_ids=nothing, use_cache=False).logits[:, 0]

    def stand_in(self, index: int, hidden: Tensor) -> Tensor:
        """What is returned in place of layer ``index``, which is not run in this pass."""
        begin, end = self._span
        if index == end:
            self._passing.found = hidden
        if index == begin - 1 and self._passing.given is not None:
            return self._passing.given
        return hidden
