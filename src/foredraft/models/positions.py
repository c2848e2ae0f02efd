"""Overrides, for the length of one pass, where a model would compute positions from cache slots.

Models with linear biases (bloom) derive them from a padding mask of two dimensions; an attention temperature that grows with the position
(llama4) is derived from the length of the cache. Decoders with an encoder (t5, bart and their like) derive a bias or an embedding from
it. All are given the positions of the nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def uses_alibi(model: PreTrainedModel) -> bool:
    return hasattr(model.base_model, "build_alibi_tensor")


@contextmanager
def alibi_from(model: PreTrainedModel, positions: Tensor) -> Iterator[None]:
    """For one pass, build the bias from key ``positions`` ``[R, W]`` rather than from a mask that has four dimensions now.

    Softmax ignores what is constant over keys, so slope x key position is the whole bias. The override lives on this
    instance and is removed afterwards.
    """
    body = model.base_model
    original = body.build_alibi_tensor

    def build(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        pair = torch.ones(1, 2, device=mask.device)
        slopes = original(pair, num_heads, torch.float32)[:, 0, 1]  # [H]: the bias of position 1
        bias = slopes[None, :, None] * positions[:, None].to(slopes)  # [R, H, W]
        return bias.reshape(-1, 1, positions.shape[1]).to(dtype)

    body.build_alibi_tensor = build
    try:
        yield
    finally:
        del body.build_alibi_tensor


def tuned_layers(model: PreTrainedModel) -> list[Any]:
    """The attention layers that scale their queries by position."""
    return [
        layer
        for layer in model.modules()
        if getattr(layer, "attn_temperature_tuning", False) and hasattr(layer, "floor_scale") and not getattr(layer, "use_rope", True)
    ]


@contextmanager
def temperature_from(layers: Sequence[Any], positions: Tensor) -> Iterator[None]:
    """For one pass, scale the queries of ``layers`` by node ``positions`` ``[R, N]`` rather than by slots.

    The layers' own scaling is switched off and a hook on their query projection does it; both are undone afterwards.
    """
    with ExitStack() as undo:
        for layer in layers:
            scales = torch.log1p(torch.floor((positions.float() + 1) / layer.floor_scale)) * layer.attn_scale + 1

            def scaled(module: nn.Module, inputs: object, queries: Tensor, scales: Tensor = scales) -> Tensor:
                return (queries * scales[:, :, None].to(queries.device)).to(queries.dtype)

            undo.callback(layer.q_proj.register_forward_hook(scaled).remove)
            layer.attn_temperature_tuning = False
            undo.callback(setattr, layer, "attn_temperature_tuning", True)
        yield


def counting_tokens(decoder: nn.Module) -> Any:
    """What gives ``decoder`` positions of the tokens that are not ``padding_idx``, as in M2M-100 and RoBERTa; None in other decoders."""
    return next((each for each in decoder.modules() if hasattr(each, "create_position_ids_from_input_ids")), None)


def first_position(decoder: nn.Module) -> int:
    """The position that ``decoder`` expects for the first token: 0, or in RoBERTa and its like that behind padding's."""
    found = counting_tokens(decoder)
    return int(found.padding_idx) + 1 if hasattr(found, "position_embeddings") else 0


@contextmanager
def bias_from(layers: Sequence[Any], positions: Tensor, keys: Tensor, reach: int) -> Iterator[None]:
    """For one pass, have attention ``layers`` bias scores by the distance from ``positions`` ``[R, N]`` of nodes to those of ``keys``
    ``[R, W]``, all below ``reach``.

    The layer's own function gives the bias of each distance. Keys after a node are hidden by the mask.
    """
    distances = (positions[:, :, None] - keys[:, None]).clamp(min=0)  # [R, N, W]
    with ExitStack() as undo:
        for layer in layers:

            def bias(query_length: int, key_length: int, device: Any = None, past_seen_tokens: int = 0, layer: Any = layer) -> Tensor:
                along = type(layer).compute_bias(layer, 1, reach, device=device, past_seen_tokens=reach - 1)[0, :, 0]  # [H, reach]
                return along.flip(-1)[:, distances].transpose(0, 1)  # [R, H, N, W]

            layer.compute_bias = bias
            undo.callback(delattr, layer, "compute_bias")
        yield


@contextmanager
def masked_by(layers: Sequence[Any], mask: Tensor) -> Iterator[None]:
    """For one pass, have attention ``layers`` use ``mask`` rather than what their model gives them."""
    with ExitStack() as undo:
        for layer in layers:
            forward, before = layer.forward, vars(layer).get("forward")
            layer.forward = lambda *given, forward=forward, **named: forward(*given, **{**named, "attention_mask": mask})
            undo.callback(vars(layer).pop, "forward") if before is None else undo.callback(setattr, layer, "forward", before)
        yield


@contextmanager
def embedded_from(table: nn.Module, positions: Tensor, reach: int) -> Iterator[None]:
    """For one pass, have ``table`` embed ``positions`` ``[R, N]``, all below ``reach``, rather than those that it would count.

    It is called on a text without padding, and on padding if it does not count that, and its rows are picked by position.
    """
    original, padding, before = table.forward, getattr(table, "padding_idx", None), vars(table).get("forward")

    def embed(given: Any, *others: Any, **named: Any) -> Tensor:
        tokens = isinstance(given, Tensor)
        line = given.new_full((1, reach, *given.shape[2:]), 0 if padding != 0 else 1) if tokens else torch.Size((1, reach))
        counted = {"position_ids": torch.arange(reach, device=positions.device)} if "position_ids" in named else {}
        embedded: Tensor = original(line, **counted).reshape(reach, -1)[positions]
        if padding is None or not tokens or given.is_floating_point():
            return embedded
        return torch.where((given == padding)[..., None], original(given.new_full((1, 1), padding)).reshape(-1), embedded)

    table.forward = embed  # type: ignore[method-assign]
    try:
        yield
    finally:
        del table.forward
        if before is not None:  # a hook of accelerate
            table.forward = before
