"""What a model caches, from its configuration alone: one token goes through it on torch's ``meta`` device, where tensors have shapes but
no numbers, and the shapes of what transformers caches tell the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from foredraft import hub, zoo
from foredraft.errors import ConfigurationError, first_line
from foredraft.inflation import inflated_config
from foredraft.loading import loader_for, parse_dtype
from foredraft.models.cache_names import cache_argument, cache_of
from foredraft.models.cache_sizes import CacheSizes, LayerKind

FULL, SLIDING, CHUNKED, STATE = "full attention", "sliding window", "chunks", "recurrent state"
SHARED, NONE = "shared: reads the keys of other layers", "no attention"
CROSS, ENCODED = "cross-attention, per source token", "what the encoder made, per source token"
KEYS = ("keys", "values", "indexer_keys", "indexer_position_ids")  # of a cache's layer, one for each token
STATES = ("conv_states", "recurrent_states")


def measure(source: str, dtype: str | torch.dtype | None = None) -> CacheSizes:
    """What a row of the model at ``source``, a path, a hub id or ``zoo:NAME``, caches in ``dtype``, or in that of its configuration.
    Reads no weights.

    Raises:
        ConfigurationError: no model, no configuration, no language model, or one that does not run without numbers.
    """
    config = read_config(source)
    model = build(source, config, dtype)
    try:
        with torch.inference_mode():
            output = one_token(model)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ConfigurationError(f"{source!r} ({config.model_type}) cannot be measured without its weights: {first_line(error)}") from error
    cache = cache_of(output)
    if cache is None:
        raise ConfigurationError(
            f"{source!r} ({config.model_type}) hands out no cache that could be measured; give a model that generates text from a cache"
        )
    decoder = config.get_text_config(decoder=True)
    if isinstance(cache, EncoderDecoderCache):
        own, cross = cache.self_attention_cache, cache.cross_attention_cache.layers
        own.layers = own.layers[: len(cross)]  # transformers may have made as many as the encoder has
        kinds = kinds_of(own, decoder, source)
        kinds.append(LayerKind(CROSS, len(cross), bytes_of([[each.keys, each.values] for each in cross]), of_source=True))
        kinds.append(LayerKind(ENCODED, 0, bytes_of(output["encoder_last_hidden_state"]), of_source=True))
    else:
        kinds = kinds_of(cache, decoder, source)
    return CacheSizes(config.model_type, str(model.dtype).removeprefix("torch."), kinds)


def read_config(source: str) -> PretrainedConfig:
    """Raises:
    ConfigurationError: there is no such model, or it has no configuration that transformers knows.
    """
    if source.startswith(zoo.PREFIX):
        found = zoo.find_model(source)
        config = AutoConfig.from_pretrained(found.path, local_files_only=True)
        if found.inflated is None:
            return config
        return inflated_config(build(source, config, None), found.inflated.hidden_size, found.inflated.layers, None)
    if hub.config_of(source).get("model_type") is None:
        raise ConfigurationError(f"{source!r} has no config.json with a model_type; give a model in the format of transformers")
    path = Path(source).expanduser()
    try:
        return AutoConfig.from_pretrained(
            path if path.exists() else source, local_files_only=hub.on_this_machine(source), trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"the configuration of {source!r} cannot be read: {first_line(error)}") from error


def build(source: str, config: PretrainedConfig, dtype: str | torch.dtype | None) -> PreTrainedModel:
    """The model of ``config`` on the ``meta`` device. It takes ``eager`` attention, whose masks do not depend on numbers.

    Raises:
        ConfigurationError: it is no language model, or transformers cannot build it.
    """
    loader, kind = loader_for({"is_encoder_decoder": config.is_encoder_decoder, "model_type": config.model_type})
    chosen = parse_dtype(dtype) or config.dtype or config.get_text_config(decoder=True).dtype or torch.float32
    try:
        with torch.device("meta"):
            model: PreTrainedModel = loader.from_config(
                config, dtype=chosen, attn_implementation="eager", experts_implementation="batched_mm"
            )
    except (ValueError, RuntimeError, TypeError, AttributeError, LookupError, ImportError) as error:
        raise ConfigurationError(
            f"{source!r} ({config.model_type}) cannot be built as {kind}; give a model that generates text: {first_line(error)}"
        ) from error
    return model.eval()


class Encoded(BaseModelOutput):  # type: ignore[misc]
    """The output of an encoder; other fields, which some encoders return, are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def one_token(model: PreTrainedModel) -> Any:
    """The output of a pass over one token; a source has one token, too, and is not encoded."""
    token = torch.zeros(1, 1, dtype=torch.long, device="meta")
    if not model.config.is_encoder_decoder:
        return model(input_ids=token, use_cache=True, return_dict=True)
    width = getattr(model.get_encoder(), "config", model.config).hidden_size
    states = torch.zeros(1, 1, width, dtype=model.dtype, device="meta")
    cache = {cache_argument(type(model)): EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache())}
    return model(decoder_input_ids=token, encoder_outputs=Encoded(states), use_cache=True, return_dict=True, **cache)


def kinds_of(cache: Any, config: PretrainedConfig, source: str) -> list[LayerKind]:
    """The layers of a decoder with this ``config`` by kind, in the order in which the first of each stands.

    Raises:
        ConfigurationError: a layer of the model at ``source`` keeps what is neither keys and values nor a state.
    """
    layers = getattr(cache, "layers", [])
    types, shared = (getattr(config, name, None) or [] for name in ("layer_types", "kv_sharing_modes"))
    found: dict[tuple[str, int | None], LayerKind] = {}

    def add(name: str, window: int | None = None, *, layers: int = 1, keys: int = 0, state: int = 0) -> None:
        known = found.get((name, window), LayerKind(name, 0, window=window))
        found[name, window] = replace(
            known, layers=known.layers + layers, token_bytes=known.token_bytes + keys, state_bytes=known.state_bytes + state
        )

    for number, layer in enumerate(layers):
        parts = {name: size for name, each in vars(layer).items() if not name.startswith("_") and (size := bytes_of(each))}
        if odd := sorted(parts.keys() - {*KEYS, *STATES}):
            raise ConfigurationError(f"{source!r} ({config.model_type}) caches {', '.join(odd)}, whose growth one token cannot tell")
        keys, state = (sum(parts.get(name, 0) for name in names) for names in (KEYS, STATES))
        window = getattr(layer, "sliding_window", None)
        name = FULL if window is None else CHUNKED if types[number : number + 1] == ["chunked_attention"] else SLIDING
        if keys or state:
            add(f"{name} and {STATE}" if keys and state else name if keys else STATE, window if keys else None, keys=keys, state=state)
        else:
            add(SHARED if shared[number : number + 1] == ["reuse"] else NONE)
    outside = {name: each for name, each in vars(cache).items() if name != "layers"} if layers else cache
    if state := bytes_of(outside):  # a family's own cache: other layers keep their state outside of the list
        add(STATE, layers=config.num_hidden_layers - len(layers), state=state)
    return list(found.values())


def bytes_of(thing: Any) -> int:
    """Bytes of all tensors in ``thing``: a tensor, a container, or an object with attributes."""
    return sum(each.nbytes for each in tensors_in(thing))


def tensors_in(thing: Any) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for each in thing.values():
            yield from tensors_in(each)
    elif isinstance(thing, (list, tuple)):
        for each in thing:
            yield from tensors_in(each)
    elif hasattr(thing, "__dict__") and not isinstance(thing, (type, PretrainedConfig)):
        yield from tensors_in(vars(thing))
