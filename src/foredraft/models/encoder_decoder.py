"""Models with an encoder: what a row's encoder reads, what is kept of it, and how the decoder is called.

The encoder reads each source once. The keys and values that the decoder's cross-attention makes of it are kept at the source's own length
and shared by rows with equal sources (:mod:`foredraft.models.source_runs`). A pass sees them as the cross-attention half of transformers'
``EncoderDecoderCache``. Everything else of a pass is as for a decoder-only model.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from foredraft.errors import ConfigurationError, UnsupportedModelError, first_line
from foredraft.models.cache_names import cache_argument
from foredraft.models.kinds import UNMASKED_TOKENS
from foredraft.models.positions import bias_from, counting_tokens, embedded_from, first_position, masked_by
from foredraft.models.source_runs import CrossKeys, Encoded, SourcedCache

AUDIO, LONGER = 8000, 1024  # samples of sound that a test reads: at least, and for each token of a text of that length
ENDLESS = 1 << 30  # tokens
READ = ("input_ids", "input_features", "input_values")  # what encoders may read


@dataclass(frozen=True, eq=False)
class Source:
    """What the encoder reads for one row. Sources are equal if they hold the same numbers.

    Attributes:
        inputs: the encoder's arguments, ``[1, ...]`` each, padding included: ``input_ids`` or ``input_features``, ``attention_mask``.
        states: ``[1, S, d]`` the encoder's output, if that is known already.
        ids: its tokens without padding, for drafters that copy from it; none if it is sound, or not known.
    """

    inputs: Mapping[str, Tensor]
    states: Tensor | None = None
    ids: tuple[int, ...] = ()

    @staticmethod
    def of(ids: Sequence[int]) -> Source:
        """A text, without padding."""
        line = torch.tensor([list(ids)])
        return Source({"input_ids": line, "attention_mask": torch.ones_like(line)}, ids=tuple(ids))

    @cached_property
    def key(self) -> tuple[object, ...]:
        parts = {**self.inputs, "states": self.states}
        return tuple((name, each.dtype, each.shape, _digest(each)) for name, each in sorted(parts.items()) if each is not None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Source) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def read_anew(self) -> Source:
        """The source for the encoder of another model.

        Raises:
            ConfigurationError: only the states of this model's encoder are known.
        """
        if not self.inputs.keys() & set(READ):
            raise ConfigurationError("the draft model has an encoder of its own, which cannot read encoder_outputs; pass input_ids as well")
        return replace(self, states=None)


@dataclass
class EncoderOutput(BaseModelOutput):
    """What decoders read of their encoder's output: Moonshine's also the mask of the states, and those with experts the (absent) logits of
    the encoder's routers."""

    attention_mask: Tensor | None = None
    router_logits: tuple[Tensor, ...] | None = None


class Decoder:
    """Calls an encoder–decoder model as if it was a decoder-only one; and calls its encoder.

    Args:
        model: takes ``encoder_outputs``, ``decoder_input_ids`` and an ``EncoderDecoderCache``.
        context: most tokens that its decoder has positions for; None for no limit.
    """

    def __init__(self, model: PreTrainedModel, context: int | None):
        self.model, self.context, self._cache_argument = model, context, cache_argument(type(model))
        parameters, decoder = inspect.signature(model.forward).parameters, model.get_decoder()
        handed_on = inspect.signature(decoder.forward).parameters if model.config.model_type == "encoder-decoder" else {}
        self.takes_positions = "decoder_position_ids" in parameters or "position_ids" in handed_on
        self._biased = [each for each in decoder.modules() if getattr(each, "has_relative_attention_bias", False)]
        self._decoder, self._routers = decoder, routers(decoder)
        tables = [each.embed_positions for each in decoder.modules() if hasattr(each, "embed_positions")]  # TrOCR's lies deeper
        self._embedded = tables[0] if tables and not self.takes_positions else None
        self._first = first_position(decoder) if self.takes_positions else 0
        self._unmasked = [each.self_attn for each in decoder.layers] if decoder.config.model_type in UNMASKED_TOKENS else []
        self._additive = decoder.config._attn_implementation == "eager"

    # -- the encoder ----------------------------------------------------------------------------------------------------

    def length(self, source: Source) -> int:
        """How many states the encoder makes of a source, padding left out; the most that it can be, where only the encoder knows."""
        name = self.model.main_input_name
        if source.states is not None:
            total = source.states.shape[1]
        else:
            total = source.inputs[name].shape[-1]
            if name != "input_ids":
                total = int(getattr(self.model, "_get_feat_extract_output_lengths", int)(total))
        mask = source.inputs.get("attention_mask") if name == "input_ids" else None
        return total if mask is None or mask.shape[1] != total else int(mask.sum())

    @torch.inference_mode()
    def encode(self, sources: Sequence[Source]) -> dict[Source, Tensor]:
        """The encoder's states ``[S, d]`` of ``sources``, without padding. It reads equal ones once.

        Raises:
            ConfigurationError: the encoder cannot read one; the message says why.
        """
        found: dict[Source, Tensor] = {}
        groups: dict[tuple[object, ...], list[Source]] = {}
        for source in dict.fromkeys(sources):
            parts = {**source.inputs, "states": source.states}
            key = tuple((name, None if each is None else each.shape) for name, each in sorted(parts.items()))
            groups.setdefault(key, []).append(source)
        for group in groups.values():
            states, counted = self._read(group)
            for source, line, counts in zip(group, states, counted):
                found[source] = line if counts is None else line[counts]
        return found

    def _read(self, group: Sequence[Source]) -> tuple[Tensor, Sequence[Tensor | None]]:
        """``[n, S, d]`` states of sources of one shape, and for each which of them are not padding."""
        encoder = self.model.get_encoder()
        given = {name: self._moved(together([source.inputs[name] for source in group])) for name in group[0].inputs}
        mask = given.get("attention_mask") if self.model.main_input_name == "input_ids" else None  # that of sound counts frames, not states
        if group[0].states is not None:
            states = self._moved(together([source.states for source in group if source.states is not None]))
        else:
            taken = inspect.signature(encoder.forward).parameters
            anything = "kwargs" in taken or "model_kwargs" in taken
            try:
                output = encoder(**{name: each for name, each in given.items() if anything or name in taken}, return_dict=True)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                raise ConfigurationError(
                    f"the encoder of {type(self.model).__name__} cannot read the source: {first_line(error)}"
                ) from error
            states, mask = output.last_hidden_state, getattr(output, "attention_mask", mask)
        if mask is None or mask.shape != states.shape[:2]:
            return states, [None] * len(states)
        return states, list(mask.bool())

    def _moved(self, given: Tensor) -> Tensor:
        """``given`` on the model's device, and in its dtype unless it holds integers."""
        return given.to(self.model.device, self.model.dtype if given.is_floating_point() else given.dtype)

    # -- the decoder ----------------------------------------------------------------------------------------------------

    def enter(self, cache: SourcedCache) -> None:
        """The next pass is over the rows of the cache's window. A separate pass first makes the keys that some of them lack."""
        assert cache.window is not None
        rows = cache.sources[cache.window.first : cache.window.last]
        fresh = list(dict.fromkeys(row for row in rows if not row.keys))
        if fresh and len(fresh) < len(rows):
            self._make_keys(fresh)
        cache.cross.enter(rows)

    def __call__(self, *, input_ids: Tensor, **arguments: Any) -> Any:
        """A pass over the rows that :meth:`enter` has seen."""
        cache: SourcedCache = arguments[self._cache_argument]
        rows = cache.cross.rows
        arguments[self._cache_argument] = cache.both
        cache.both.is_updated = dict.fromkeys(range(len(rows[0].keys)), True)
        if self._first:  # its table has a row for padding
            behind = arguments["position_ids"] + self._first
            arguments["position_ids"] = behind.where(input_ids != self._first - 1, self._first - 1)
        for ours, theirs in (("attention_mask", "decoder_attention_mask"), ("position_ids", "decoder_position_ids")):
            if ours in arguments:
                arguments[theirs] = arguments.pop(ours)
        mask = arguments.get("decoder_attention_mask") if self._unmasked and input_ids.shape[1] == 1 else None
        with nullcontext() if mask is None else masked_by(self._unmasked, mask):
            return self.model(decoder_input_ids=input_ids, **self._encoder_side(rows, input_ids), **arguments)

    def _make_keys(self, fresh: Sequence[Encoded]) -> None:
        """Make the cross-attention keys of sources, in a pass over one token each, which is thrown away."""
        cross = CrossKeys()
        cross.enter(fresh)
        tokens = torch.zeros(len(fresh), 1, dtype=torch.long, device=self.model.device)
        both = {self._cache_argument: EncoderDecoderCache(DynamicCache(), cross)}
        self.model(decoder_input_ids=tokens, use_cache=True, **both, **self._encoder_side(fresh, tokens))

    def _encoder_side(self, rows: Sequence[Encoded], tokens: Tensor) -> dict[str, Any]:
        """What a pass over ``tokens`` ``[R, N]`` gets as the encoder's output: its states, of which only the shape matters once there are
        keys; and the mask of the sources' lengths."""
        lengths = [len(row.states) for row in rows]
        longest, like = max(lengths), rows[0].states
        if rows[0].keys:
            states = like.new_zeros(1, 1, 1).expand(len(rows), longest, like.shape[1])
        else:
            states = like.new_zeros(len(rows), longest, like.shape[1])
            for line, row in zip(states, rows):
                line[: len(row.states)] = row.states
        mask = None if min(lengths) == longest else self._mask(lengths, tokens, like.dtype)
        return {"encoder_outputs": EncoderOutput(states, attention_mask=mask), "attention_mask": mask}

    def _mask(self, lengths: Sequence[int], tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """``[R, 1, N, S]`` mask of the states that each row sees."""
        ends = torch.tensor(lengths, device=tokens.device)[:, None]
        mask = (torch.arange(max(lengths), device=tokens.device) < ends)[:, None, None].expand(-1, 1, tokens.shape[1], -1)
        if not self._additive:
            return mask
        return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), torch.finfo(dtype).min)

    def positioned(
        self, positions: Tensor, keys: Tensor | None, width: int, *, prompts: Sequence[int] | None
    ) -> AbstractContextManager[object]:
        """Inside, the decoder uses ``positions`` ``[R, N]`` of its nodes rather than their slots, of which there are ``width``, and
        ``keys`` ``[R, width]`` as positions of what the nodes see; None if slots are positions. Experts have no capacity limit but for the
        first ``prompts[r]`` nodes of a row: in plain decoding each other token is alone. None for no such nodes."""
        overrides, reach = ExitStack(), width if self.context is None else min(width, self.context)
        if self._routers:
            overrides.enter_context(uncounted(self._decoder, prompts, positions))
        if keys is not None and self._biased:
            overrides.enter_context(bias_from(self._biased, positions, keys, reach))
        counts = getattr(self._embedded, "padding_idx", None) is not None  # tokens that are not padding, in place of slots
        if self._embedded is not None and (keys is not None or (counts and positions.shape[1] > 1)):
            overrides.enter_context(embedded_from(self._embedded, positions, reach))
        return overrides


def together(parts: Sequence[Tensor]) -> Tensor:
    """``parts`` concatenated; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def routers(model: torch.nn.Module) -> list[Any]:
    """The routers of experts that take a limited number of tokens in a pass."""
    return [each for each in model.modules() if isinstance(getattr(each, "expert_capacity", None), int)]


@contextmanager
def uncounted(decoder: torch.nn.Module, prompts: Sequence[int] | None = None, positions: Tensor | None = None) -> Iterator[None]:
    """Inside, experts have no capacity limit but for the first ``prompts[r]`` of the nodes at ``positions`` ``[R, N]``."""
    found = routers(decoder)
    before = [router.expert_capacity for router in found]
    first: Tensor | None = None
    if prompts is not None and positions is not None:
        first = torch.arange(positions.shape[1], device=positions.device) < torch.tensor(prompts, device=positions.device)[:, None]
    for router in found:
        capacity = router.expert_capacity
        own = None if first is None else torch.where(first, capacity, ENDLESS)[..., None]
        flat = hasattr(router, "moe_eval_capacity_token_fraction")  # NLLB's tokens are those of all rows, one after the other
        router.expert_capacity = ENDLESS if own is None else own.flatten(0, 1) if flat else own
    try:
        yield
    finally:
        for router, capacity in zip(found, before):
            router.expert_capacity = capacity


def _digest(tensor: Tensor) -> bytes:
    return hashlib.blake2b(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


# -- what a call gives ----------------------------------------------------------------------------------------------------


def encoder_arguments(model: Any) -> set[str]:
    """The arguments of ``generate`` for the encoder, and for the decoder's prompt; none if the model has no encoder."""
    if not model.config.is_encoder_decoder:
        return set()
    taken = set(inspect.signature(model.get_encoder().forward).parameters) - {"kwargs", "inputs_embeds"}
    return taken | {"encoder_outputs", "decoder_attention_mask"}


def without_encoding(model: Any, inputs: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """``arguments`` of ``generate`` that keep transformers from running the encoder, which is left to the session.

    Raises:
        ConfigurationError: there is nothing to encode.
    """
    if arguments.get("encoder_outputs") is not None:
        return dict(arguments)
    name = model.main_input_name
    if inputs is None and arguments.get(name) is None:
        raise ConfigurationError(f"{type(model).__name__} has an encoder, and there is nothing for it to read: pass {name}=")
    return {**arguments, "encoder_outputs": EncoderOutput()}


def sources_of(model: Any, inputs: Tensor, rows: int, given: Mapping[str, Any]) -> list[Source]:
    """The sources of ``rows`` rows, from what transformers has prepared.

    Args:
        inputs: the encoder's main input, one row for all that ``num_return_sequences`` makes of it.
        given: ``attention_mask``, ``encoder_outputs`` and whatever else the encoder takes, of every row.
    """
    name, outputs = model.main_input_name, given.get("encoder_outputs")
    copies, taken = rows // len(inputs), inspect.signature(model.get_encoder().forward).parameters
    if rows % len(inputs):
        raise ConfigurationError(f"decoder_input_ids have {rows} rows for {len(inputs)} sources; give as many for each source")
    if name == "input_ids":
        given = {key: spread_over(each, len(inputs), rows) if key in taken else each for key, each in given.items()}
        if (mask := given.get("attention_mask")) is not None and len(mask) != rows:
            raise ConfigurationError(f"attention_mask has {len(mask)} rows for {len(inputs)} sources; give one for each source")
    parts = {key: each for key, each in given.items() if isinstance(each, Tensor) and key in taken and len(each) == rows}
    states = None if outputs is None or not len(outputs) else outputs[0]
    seen = getattr(outputs, "attention_mask", None)  # which states are not padding, where the encoder says that itself
    known = states is None or bool((inputs != -100).all())  # transformers writes this where it got the encoder's output alone
    mask = parts.get("attention_mask") if name == "input_ids" else None  # that of sound counts frames, not states
    if seen is None:
        check_mask(mask, inputs, states)
    found: dict[Source, Source] = {}
    sources = []
    for row in range(rows):
        own = {key: each[row : row + 1] for key, each in parts.items()}
        ids: tuple[int, ...] = ()
        if known:
            own[name] = inputs[row // copies : row // copies + 1]
            if name == "input_ids":
                line = own[name][0] if mask is None or mask.shape[1] != inputs.shape[1] else own[name][0][mask[row].bool()]
                ids = tuple(line.tolist())
        read = None if states is None else states[row : row + 1] if seen is None else states[row : row + 1, seen[row].bool()]
        source = Source(own, read, ids)
        sources.append(found.setdefault(source, source))
    return sources


def spread_over(each: Any, sources: int, rows: int) -> Any:
    """A tensor of every source as one of every row; anything else as it is."""
    whole = isinstance(each, Tensor) and each.ndim > 0 and len(each) == sources != rows
    return each.repeat_interleave(rows // sources, 0) if whole else each


def check_source(model: Any, source: Source) -> None:
    """Refuse what the encoder of ``model`` cannot read.

    Raises:
        ConfigurationError: names what is wrong.
    """
    name, encoder = model.main_input_name, model.get_encoder()
    given, mask = source.inputs.get(name), source.inputs.get("attention_mask")
    if source.states is not None:
        width = getattr(encoder.config, "hidden_size", source.states.shape[-1])
        if source.states.ndim != 3 or source.states.shape[0] != 1 or not source.states.shape[1] or source.states.shape[2] != width:
            raise ConfigurationError(f"the states of a source must be [1, S, {width}], got {list(source.states.shape)}")
        check_mask(mask if name == "input_ids" else None, given, source.states)
    elif given is None:
        raise ConfigurationError(f"the encoder of {type(model).__name__} reads {name}, and the source has none")
    elif name == "input_ids":
        check_ids(model, given)
        if mask is not None and (mask.shape != given.shape or not bool(mask.any())):
            raise ConfigurationError(
                f"the source's attention_mask must be {list(given.shape)}, with a 1 for each token that counts, got {mask.tolist()}"
            )
    elif name == "input_features":
        check_features(model, given)
        frames = 2 * getattr(model.config, "max_source_positions", given.shape[2] / 2)
        if len(given) != 1 or given.shape[2] != frames:
            raise ConfigurationError(f"a source of sound must be [1, bins, {frames}] features, got {list(given.shape)}; pad or cut it")
    elif given.ndim != 2 or len(given) != 1 or getattr(model, "_get_feat_extract_output_lengths", int)(given.shape[1]) < 1:
        raise ConfigurationError(f"a source of sound must be [1, samples], enough for one state, got {list(given.shape)}")


def check_mask(mask: Tensor | None, ids: Tensor | None, states: Tensor | None) -> None:
    """Refuse a ``mask`` that is not ``[n, S]`` for the ``states`` ``[n, S, d]``, or for the ``ids`` ``[n, S]`` if there are no states."""
    counted, kind = (ids, "source tokens") if states is None else (states, "encoder states")
    if mask is not None and counted is not None and mask.shape[1:] != counted.shape[1:2]:
        columns = f"{mask.shape[1]} columns" if mask.ndim == 2 else f"the shape {list(mask.shape)}"
        raise ConfigurationError(f"attention_mask has {columns} for {counted.shape[1]} {kind}; give one column for each of them")


def check_padding(model: Any, ids: Sequence[int]) -> None:
    """Refuse padding inside a prompt of a decoder that gives it no position: what follows would have other positions than in
    transformers."""
    decoder = model.get_decoder()
    padding = getattr(decoder.config, "pad_token_id", None)
    others = [place for place, token in enumerate(ids) if token != padding]
    if others and others[-1] >= len(others) and counting_tokens(decoder) is not None:
        raise ConfigurationError(f"decoder_input_ids have the padding token {padding}, which has no position in this model; leave it out")


def check_ids(model: Any, ids: Tensor) -> None:
    """Refuse a source ``[1, S]`` that the encoder has no embeddings for."""
    if ids.ndim != 2 or len(ids) != 1 or not ids.shape[1] or ids.is_floating_point():
        raise ConfigurationError(f"a source must be [1, S] token ids, at least one of them, got {ids.dtype} {list(ids.shape)}")
    table, longest = model.get_encoder().get_input_embeddings(), longest_source(model)
    if isinstance(table, torch.nn.Embedding) and not 0 <= int(ids.min()) <= int(ids.max()) < table.num_embeddings:
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise ConfigurationError(f"source token {wrong} is outside the encoder's vocabulary of {table.num_embeddings}")
    if longest is not None and ids.shape[1] > longest:
        raise ConfigurationError(f"the source has {ids.shape[1]} tokens, but the encoder's table of positions holds {longest}; shorten it")


def longest_source(model: Any) -> int | None:
    """Most tokens that the encoder's table of positions holds; None if it has none."""
    encoder = model.get_encoder()
    for table in (getattr(encoder, "embed_positions", None), getattr(getattr(encoder, "embeddings", None), "position_embeddings", None)):
        if isinstance(table, torch.nn.Embedding):
            begun = 0 if table.padding_idx is None or hasattr(encoder, "embed_positions") else table.padding_idx + 1
            return table.num_embeddings - int(getattr(table, "offset", begun))
    return None


def fitted(model: Any, source: Source) -> Source:
    """``source`` as far as the encoder of ``model``, a draft, has positions and embeddings for it."""
    given, table, longest = source.inputs.get("input_ids"), embeddings_of(model.get_encoder()), longest_source(model)
    if given is None or source.states is not None or table is None:
        return source
    if int(given.max()) < table.num_embeddings and (longest is None or given.shape[1] <= longest):
        return source
    return Source.of([min(token, table.num_embeddings - 1) for token in (source.ids or given[0].tolist())[:longest]])


def window_of(model: Any) -> tuple[int | None, int | None]:
    """Mel bins of the sound that the encoder reads, and states that it makes of a window; None of what its config does not say."""
    return getattr(model.config, "num_mel_bins", None), getattr(model.config, "max_source_positions", None)


def check_features(model: Any, features: Any) -> None:
    """Refuse sound that the encoder has no filters for."""
    bins = getattr(model.config, "num_mel_bins", None)  # None where it reads no such features
    if features is not None and bins is not None and (not isinstance(features, Tensor) or features.ndim != 3 or features.shape[1] != bins):
        shape = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ConfigurationError(f"{model.main_input_name} must be a tensor [B, {bins}, frames] of log-mel features, got {shape}")


def embeddings_of(part: Any) -> torch.nn.Embedding | None:
    """Those of an encoder or a decoder; None if it has none, or reads no tokens."""
    try:
        table = part.get_input_embeddings()
    except NotImplementedError:  # as transformers says that there are none
        return None
    return table if isinstance(table, torch.nn.Embedding) else None


def one_vocabulary(model: Any) -> bool:
    """Whether a token of the source is the same one in the text, as far as the model says."""
    config, tables = model.config, [embeddings_of(each) for each in (model.get_encoder(), model.get_decoder())]
    if getattr(config, "share_encoder_decoder_embeddings", True) is False:  # Marian
        return False
    if config.model_type == "encoder-decoder" and config.encoder.model_type != config.decoder.model_type:  # each has its own tokenizer
        return False
    return len({table.num_embeddings for table in tables if table is not None}) < 2


def start_of(model: Any) -> int | None:
    """The token that texts of ``model`` start with, where it says so; the first one where it has a list, with one for each row."""
    found: Any = getattr(model.generation_config, "decoder_start_token_id", None)
    found = getattr(model.config, "decoder_start_token_id", None) if found is None else found
    return found[0] if isinstance(found, list) else found


def beginning_of(model: Any) -> list[int]:
    """What texts of ``model`` begin with: its start token, and the one that its generation config forces after it.

    Raises:
        ConfigurationError: it has no start token.
    """
    start, forced = start_of(model), getattr(model.generation_config, "forced_bos_token_id", None)
    if start is None:
        raise ConfigurationError("the generation config names no token that texts begin with; set its decoder_start_token_id")
    return [start, *([] if forced is None else [int(forced)])]


def with_encoder_of(model: Any, decoder: Any) -> Any:
    """``decoder``, a Whisper without an encoder, with the encoder of ``model``."""
    from transformers import WhisperForConditionalGeneration

    config = copy.deepcopy(decoder.config)
    config.is_encoder_decoder = True
    with torch.device("meta"):
        whole = WhisperForConditionalGeneration(config)
    whole.model.encoder, whole.model.decoder, whole.proj_out = model.get_encoder(), decoder.model.decoder, decoder.proj_out
    BORROWERS.add(whole)
    return whole.eval()


def same_encoder(model: Any, other: Any, *, known: bool = True) -> bool:
    """Whether the encoders of two models have the same weights. Unless all are ``known``, those without storage, as they are while packed
    ones replace them, are left out."""
    encoders = [each.get_encoder() for each in (model, other)]
    ours, theirs = (each.state_dict() for each in encoders)
    if type(encoders[0]) is not type(encoders[1]) or ours.keys() != theirs.keys():
        return False
    for one, two in ((ours[name], theirs[name]) for name in ours):
        if type(one) is not Tensor or type(two) is not Tensor or one.shape != two.shape or one.dtype != two.dtype:
            return False  # quantised ones are no plain tensors
        if (known or not one.is_meta) and (one.is_meta or two.is_meta or not torch.equal(one, two)):
            return False
    return True


def borrow_encoder(model: Any, owner: Any) -> None:
    """Give ``model`` the encoder of ``owner`` in place of its own."""
    own = model.get_encoder()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is own:
                setattr(parent, name, owner.get_encoder())
    BORROWERS.add(model)


BORROWERS: WeakSet[torch.nn.Module] = WeakSet()  # models with the encoder of another one


def borrowed_encoder(model: Any) -> torch.nn.Module | None:
    """The encoder of ``model`` if another model owns it; None for others."""
    encoder: torch.nn.Module | None = model.get_encoder() if model in BORROWERS else None
    return encoder


def some_source(model: Any, length: int, seed: int = 0) -> Source:
    """A source to try a model with: ``length`` tokens, or noise where it reads sound.

    Raises:
        UnsupportedModelError: the encoder reads something else.
    """
    encoder, name = model.get_encoder(), model.main_input_name
    if name == "input_ids":
        size = encoder.get_input_embeddings().num_embeddings
        length = min(length, longest_source(model) or length)
        return Source.of([(seed + 3 + 7 * place + place * place) % (size - 4) + 4 for place in range(length)])
    generator = torch.Generator().manual_seed(seed)
    if name == "input_features" and hasattr(model.config, "num_mel_bins"):
        frames = 2 * getattr(model.config, "max_source_positions", length)
        return Source({name: torch.randn(1, model.config.num_mel_bins, frames, generator=generator, device="cpu").to(model.dtype)})
    if name == "input_values":
        samples = AUDIO + LONGER * length
        mask = torch.ones(1, samples, dtype=torch.long)
        return Source({name: torch.randn(1, samples, generator=generator, device="cpu").to(model.dtype), "attention_mask": mask})
    raise UnsupportedModelError(f"{type(model).__name__} reads {name}, which is not supported; use model.generate")


@torch.inference_mode()
def plain_arguments(model: Any, ids: Tensor) -> dict[str, Any]:
    """Arguments of a pass of ``model`` over ``ids`` ``[1, n]``, with :func:`some_source` for its encoder, if it has one."""
    if not model.config.is_encoder_decoder:
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    given = {name: each.to(model.device) for name, each in some_source(model, ids.shape[1]).inputs.items()}
    return {"decoder_input_ids": ids, "encoder_outputs": model.get_encoder()(**given, return_dict=True)}
