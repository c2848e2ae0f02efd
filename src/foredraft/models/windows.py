"""How much of the text each layer sees: the sliding windows and chunks of a model, as transformers' own masks have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foredraft.models.cache import Layer, TreeCache, Window
from foredraft.models.masks import KnownMaskInputs, MaskBuilder
from foredraft.models.page_stores import Kind
from foredraft.models.pages import PAGE

SIZES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}  # by layer type, in configurations


def windows_of(model: Any) -> list[int | None]:
    """For each decoder layer how many tokens a query sees at most, itself included; None for all.

    A size that the configuration names counts only if the mask of that layer type hides everything in front of it.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or [_only_kind(config)] * config.num_hidden_layers
    if not type(model).__module__.startswith("transformers.models."):
        return [None] * len(kinds)
    sizes = {kind: _size(model, config, kind) for kind in set(kinds)}
    return [sizes[kind] for kind in kinds]


def kinds_of(model: Any, layers: Sequence[Layer]) -> list[Kind]:
    """The kinds of decoder layers of a model, whose keys and values are like those in ``layers``."""
    found: dict[int | None, list[int]] = {}
    windows = dict(enumerate(windows_of(model)))  # configurations of models with an encoder may count its layers
    for index, layer in enumerate(layers):
        if len(layer.keys):
            found.setdefault(windows.get(index), []).append(index)
    return [Kind(sum(page_bytes(layers[index]) for index in some), window, frozenset(some)) for window, some in found.items()]


def page_bytes(layer: Layer) -> int:
    """Bytes of a page of a layer whose keys and values are like those of ``layer``."""
    return sum(each.shape[1] * PAGE * each.shape[3] * each.itemsize for each in (layer.keys, layer.values))


def _only_kind(config: Any) -> str:
    """The type of all layers, where the configuration does not list them."""
    return next((kind for kind, size in SIZES.items() if getattr(config, size, None) is not None), "full_attention")


def _size(model: Any, config: Any, kind: str) -> int | None:
    size = getattr(config, SIZES.get(kind, ""), None)
    if size is None:
        return None
    build = MaskBuilder(config, config._attn_implementation, model.dtype)
    hidden = all(not bool(_mask(build, kind, query)[..., : query - size + 1].any()) for query in (2 * size - 1, 2 * size))
    return size if hidden else None


def _mask(build: MaskBuilder, kind: str, query: int) -> Tensor:
    """``[query + 1]`` bool: what a token at position ``query`` sees."""
    cache, one = TreeCache(), torch.tensor([[query]])
    cache.window = Window(0, 1, (query,), 1)
    found = build(KnownMaskInputs(one, torch.arange(query + 1)[None], torch.ones(1, 1, query + 1, dtype=torch.bool)), cache)
    mask: Tensor = found[kind] if isinstance(found, dict) else found
    return mask.flatten() if mask.dtype == torch.bool else mask.flatten() == 0
