"""What transformers prepared, unpadded: prompts, per-row parameters, and refusal by name of what cannot be honoured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import EosTokenCriteria, GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import WhisperNoSpeechDetection
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from foredraft.errors import ConfigurationError
from foredraft.grammars import Grammar, Kind
from foredraft.logits.noise import Seed, row_seeds
from foredraft.logits.processors import row_pipelines
from foredraft.models.cache_names import CACHE_NAMES
from foredraft.models.encoder_decoder import READ, encoder_arguments, sources_of, start_of, without_encoding
from foredraft.rows import RowParameters, read_lengths

WORD_TIMES = (
    "times of words are read from attentions, and those of a draft tree are not those of plain decoding; use return_timestamps=True, for "
    "segments, or call the model's own generate without Foredraft"
)
# Arguments of generate that name another way to decode, or something this loop does not produce.
REFUSED_ARGUMENTS = {
    **dict.fromkeys(CACHE_NAMES, "Foredraft keeps its own cache, and reuses it for prompts that begin alike"),
    "adapter_names": "one adapter serves the whole call; choose it with set_adapter",
    "assistant_model": "the drafter is given to foredraft instead: drafter='draft-model:...'",
    "assistant_tokenizer": "pass the tokenizer as Speculator(..., drafter_options={'tokenizer': ...}) if the draft model names none",
    "cache_implementation": "Foredraft keeps its own cache",  # "paged" would have transformers decode instead
    "custom_generate": "a Speculator is its own decoding method",
    "inputs_embeds": "prompts must be token ids",
    "negative_prompt_ids": "classifier-free guidance is not supported",
    "negative_prompt_attention_mask": "classifier-free guidance is not supported",
    "position_ids": "positions are those of the unpadded text",
    "synced_gpus": "sharded data-parallel generation is not supported",
    "token_type_ids": "drop it from the inputs (return_token_type_ids=False)",
    "return_token_timestamps": WORD_TIMES,
    "trust_remote_code": "it belongs to custom_generate",
}
# Fields of the generation config likewise; a default value means that it was not asked for.
REFUSED_CONFIG = {
    "cache_implementation": "Foredraft keeps its own cache",
    "cache_config": "Foredraft keeps its own cache",
    "compile_config": "the loop is not compiled",
    "output_attentions": "a draft tree's attentions are not those of plain decoding",
    "output_hidden_states": "not recorded; use output_scores or output_logits",
    "prompt_lookup_num_tokens": "use drafter='prompt-lookup'",
    "assistant_early_exit": "use a drafter of Foredraft",
    "token_healing": "not supported",
    "guidance_scale": "classifier-free guidance is not supported",
    "watermarking_config": "a watermark keys on its own call order",
}
# Likewise of models with an encoder.
REFUSED_WITH_ENCODER = {
    **dict.fromkeys(CACHE_NAMES, "Foredraft keeps its own cache"),
    "inputs_embeds": "sources must be token ids, or features of sound",
    "decoder_inputs_embeds": "prompts must be token ids",
    "decoder_position_ids": REFUSED_ARGUMENTS["position_ids"],
}
# What transformers itself puts into the model's arguments, and this loop replaces.
EXPECTED_KWARGS = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position", *CACHE_NAMES}


@dataclass(frozen=True)
class Prepared:
    """One call: ``input_ids`` ``[B, L]`` as given, ``prompts`` unpadded, ``parameters`` per row. Of a model with an encoder, which is
    ``sourced``, these are the decoder's."""

    input_ids: Tensor
    prompts: list[list[int]]
    parameters: list[RowParameters]
    pad_token_id: int
    record: frozenset[str]
    seed: Any
    repeatable: bool
    streamer: Any = None
    as_dictionary: bool = True
    sourced: bool = False
    inside: bool = False  # a generate of the model's own

    def as_asked(self) -> Prepared:
        """For a caller who returns what ``model.generate`` returns: nothing is recorded for somebody who gets the sequences alone."""
        if self.as_dictionary:
            return self
        if any(row.logprobs is not None for row in self.parameters):
            raise ConfigurationError("output_logprobs needs return_dict_in_generate=True")
        return replace(self, record=frozenset())

    @staticmethod
    def of(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        *,
        seed: Seed | Sequence[Seed] | None,
        streamer: Any,
        output_logprobs: int | None,
        repeatable: bool | None = None,
        isolation: str | None = None,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Prepared:
        """From what transformers hands to a custom decoding function.

        Raises:
            ConfigurationError: an unsupported argument; the message names it.
        """
        config = generation_config
        refuse_arguments(model, config, model_kwargs)
        if output_logprobs is not None and own_generate(model):
            raise ConfigurationError(f"output_logprobs is not supported: the generate of {type(model).__name__} returns none")
        sourced = bool(model.config.is_encoder_decoder)
        masked = "decoder_attention_mask" if sourced else "attention_mask"
        mask = model_kwargs.get(masked)
        prompts, paddings = unpad(input_ids, mask, start_of(model) if sourced else None, name=masked)
        sources: list[Any] = [None] * len(prompts)
        if sourced and inputs_tensor is not None:
            sources = sources_of(model, inputs_tensor, len(prompts), model_kwargs)
        check_positions(model_kwargs.get("position_ids"), mask)
        if streamer is not None and len(prompts) > 1:
            raise ConfigurationError("a streamer works for one row only; use Speculator.stream for a batch")
        width, lengths = input_ids.shape[1], [len(prompt) for prompt in prompts]
        logits_processor = without_detection(model, logits_processor, input_ids, model_kwargs)
        pipelines = row_pipelines(
            logits_processor,
            prompt_lengths=lengths,
            padded_length=width,
            min_new_tokens=config.min_new_tokens,
            prompts=[torch.tensor(prompt, device="cpu") for prompt in prompts],
            paddings=paddings,
            device=input_ids.device if model.device.type == "meta" else model.device,
            sourced=sourced,
        )
        limit, others = read_lengths(stopping_criteria, width)
        eos, criteria = split_criteria(others)
        seeds, reported = row_seeds(seed, len(prompts))
        parameters = [
            RowParameters(
                max_new_tokens=int(limit),
                do_sample=bool(config.do_sample),
                pipeline=pipeline,
                seed=pair,
                eos=eos,
                criteria=[of_one_row(criterion) for criterion in criteria],
                logprobs=output_logprobs,
                padding=padding,
                source=source,
                isolation=isolation,
            )
            for pipeline, pair, padding, source in zip(pipelines, seeds, paddings, sources)
        ]
        pad = getattr(config, "_pad_token_tensor", None)
        asked = {"scores": config.output_scores, "logits": config.output_logits}
        record = frozenset(name for name, wanted in asked.items() if wanted)
        as_dictionary = bool(config.return_dict_in_generate)
        repeatable = seed is not None if repeatable is None else repeatable
        pad_token_id = 0 if pad is None else int(pad)
        how = {"streamer": streamer, "as_dictionary": as_dictionary, "sourced": sourced, "inside": own_generate(model)}
        return Prepared(input_ids, prompts, parameters, pad_token_id, record, reported, repeatable, **how)


def prepare(
    model: Any,
    inputs: Tensor | None,
    *,
    seed: Seed | Sequence[Seed] | None,
    streamer: Any = None,
    output_logprobs: int | None = None,
    repeatable: bool | None = None,
    isolation: str | None = None,
    **arguments: Any,
) -> Prepared:
    """Let transformers prepare a call of ``model.generate`` and stop it before the first pass."""
    own = {"seed": seed, "streamer": streamer, "output_logprobs": output_logprobs, "repeatable": repeatable, "isolation": isolation}

    def stop(model: Any, input_ids: Tensor, inputs_tensor: Tensor, **given: Any) -> Prepared:
        return Prepared.of(model, input_ids, inputs_tensor=inputs_tensor, **own, **given)

    return generated(model, inputs, stop, **arguments)  # type: ignore[no-any-return]


def generated(model: Any, inputs: Tensor | None, decode: Callable[..., Any], *, tokenizer: Any = None, **arguments: Any) -> Any:
    """What ``model.generate`` returns where ``decode`` does the decoding.

    Raises:
        ConfigurationError: an unsupported argument; the message names it.
    """
    sourced = bool(model.config.is_encoder_decoder)
    for name, why in (REFUSED_ARGUMENTS | (REFUSED_WITH_ENCODER if sourced else {})).items():
        if arguments.get(name) is not None and arguments[name] is not False:
            raise ConfigurationError(f"{name} is not supported: {why}")
    arguments.pop("custom_generate", None)  # a wrapper may hand on None
    if arguments.get("synced_gpus") is None and is_sharded(model):
        raise ConfigurationError(
            "the model is sharded over processes, where transformers sets synced_gpus=True; that is not supported. If every process holds "
            "the whole weights during this call, pass synced_gpus=False"
        )
    if model.main_input_name == "input_ids":
        check_shape(arguments.get("input_ids") if inputs is None else inputs)
        if sound := next((name for name in READ[1:] if arguments.get(name) is not None), None):
            raise ConfigurationError(
                f"{type(model).__name__} reads text, not sound: pass input_ids, token ids of its tokenizer, not {sound}"
            )
    if sourced:
        encoded = without_encoding(model, inputs, arguments)
        arguments = arguments if own_generate(model) else encoded
    arguments = with_stop_strings(model, arguments, tokenizer)
    given = () if inputs is None else (inputs,)
    return type(model).generate(model, *given, custom_generate=decode, **arguments)  # the class's: the object's own may be ours


def own_generate(model: Any) -> bool:
    """Whether a model with an encoder, such as Whisper, has a ``generate`` around that of transformers."""
    return bool(model.config.is_encoder_decoder) and type(model).generate is not GenerationMixin.generate


@torch.no_grad()
def without_detection(model: Any, processors: Sequence[Any], input_ids: Tensor, given: Mapping[str, Any]) -> list[Any]:
    """``processors`` without Whisper's detection of silence, which changes no score. It is called as at the first token, and notes what the
    model says after ``input_ids`` ``[B, L]``; ``given`` are the model's arguments."""
    detection = next((each for each in processors if isinstance(each, WhisperNoSpeechDetection)), None)
    if detection is None:
        return list(processors)
    mask = given.get("decoder_attention_mask")
    where = {} if mask is None else {"decoder_position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}  # padding has none
    logits = model(encoder_outputs=given["encoder_outputs"], decoder_input_ids=input_ids, decoder_attention_mask=mask, **where).logits
    scores = logits[:, -1].float()
    for each in processors:
        scores = each(input_ids, scores)
        if each is detection:
            break
    return [each for each in processors if each is not detection]


def is_sharded(model: Any) -> bool:
    """Whether the model is sharded in a way for which transformers sets ``synced_gpus=True``."""
    sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    return sharded and torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def refuse_arguments(model: Any, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Refuse by name whatever was asked for and is not honoured; what only the model's own defaults say about caches and
    compilation changes no text and is not asked for.

    Raises:
        ConfigurationError: names the argument.
    """
    defaults = GenerationConfig()
    defaults.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    if (config.num_beams or 1) > 1:
        own = " (the model's generation config asks for it)" if model.generation_config.num_beams == config.num_beams else ""
        raise ConfigurationError(
            f"num_beams={config.num_beams}{own}: beam search is not speculative decoding; pass num_beams=1 for greedy decoding, or use "
            "model.generate"
        )
    if getattr(config, "return_token_timestamps", None):  # it sets output_attentions
        raise ConfigurationError(f"return_token_timestamps=True is not supported: {WORD_TIMES}")
    for name, why in REFUSED_CONFIG.items():
        value = getattr(config, name, None)
        if name.startswith(("cache_", "compile_")) and value == getattr(model.generation_config, name, None):
            continue
        if value not in (None, False, getattr(defaults, name, None)) and not (name == "guidance_scale" and value == 1):
            raise ConfigurationError(f"{name}={value!r} is not supported: {why}")
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ConfigurationError(f"generation mode {mode.value!r} is not supported; use greedy decoding or sampling")
    if config.use_cache is False and model.generation_config.use_cache is not False:  # as a model's own default it was not asked for
        raise ConfigurationError("use_cache=False is not supported: Foredraft verifies drafts against its cache")
    for name in CACHE_NAMES:
        if isinstance(model_kwargs.get(name), list) or getattr(model_kwargs.get(name), "_is_user_defined", False):
            raise ConfigurationError(f"{name} is not supported: {REFUSED_ARGUMENTS[name]}")
    expected = EXPECTED_KWARGS | encoder_arguments(model)
    odd = sorted(name for name, value in model_kwargs.items() if name not in expected and not unset(value))
    if odd:
        why = (REFUSED_ARGUMENTS | REFUSED_WITH_ENCODER).get(odd[0], "it would have to reach every pass of the model")
        raise ConfigurationError(f"{', '.join(odd)} is not supported: {why}")


def unset(value: Any) -> bool:
    """Whether an argument says nothing; transformers gives models that read images an empty dictionary of what their encoder returned."""
    return value is None or value is False or (isinstance(value, dict) and not value)


def check_shape(input_ids: Any) -> None:
    if isinstance(input_ids, Tensor) and input_ids.is_floating_point():
        raise ConfigurationError(f"input_ids must be integers, got {input_ids.dtype}; the model reads the token ids of its tokenizer")
    if input_ids is not None and (not isinstance(input_ids, Tensor) or input_ids.ndim != 2):
        shape = list(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ConfigurationError(f"input_ids must be a tensor [B, L] of token ids, got {shape}; tokenize with return_tensors='pt'")
    if input_ids is not None and 0 in input_ids.shape:
        raise ConfigurationError("the prompt is empty; give at least one token, for instance the BOS token")


def configured(model: Any, arguments: dict[str, Any], name: str) -> Any:
    """What transformers takes ``name`` for: the argument, or that of the generation config given, or the model's own."""
    given = arguments.get("generation_config")
    sources = (arguments, vars(given) if given is not None else {}, vars(model.generation_config))
    return next((each[name] for each in sources if each.get(name) is not None), None)


def with_grammar(model: Any, arguments: dict[str, Any], tokenizer: Callable[[], Any]) -> dict[str, Any]:
    """``arguments`` with what the text has to match turned into a logits processor; ``tokenizer`` gives the one to use if none is given."""
    given = {name: arguments[name] for name in (*get_args(Kind), "grammar_backend") if arguments.get(name) is not None}
    rest = {name: value for name, value in arguments.items() if name not in (*get_args(Kind), "grammar_backend")}
    if not given:
        return rest
    if model.config.is_encoder_decoder and (forced := configured(model, rest, "forced_bos_token_id")) is not None:
        raise ConfigurationError(
            f"forced_bos_token_id={forced} is no text that a grammar allows; put it into decoder_input_ids, behind the start token, and "
            "set model.generation_config.forced_bos_token_id = None"
        )
    backend, eos = given.pop("grammar_backend", "auto"), configured(model, rest, "eos_token_id")
    own = Grammar(rest.get("tokenizer") or tokenizer(), backend=backend, eos=eos, **given)
    return {**rest, "logits_processor": LogitsProcessorList([*(rest.get("logits_processor") or ()), own])}


def with_stop_strings(model: Any, arguments: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """``arguments`` with stop strings turned into a criterion: transformers does not hand a tokenizer to custom decoding."""
    given = arguments.get("generation_config")
    stop_strings = configured(model, arguments, "stop_strings")
    if stop_strings is None:
        return arguments
    if tokenizer is None:
        raise ConfigurationError("stop_strings needs the tokenizer: pass tokenizer=...")
    if model.generation_config.stop_strings is not None:
        raise ConfigurationError(
            "the model's generation_config has stop_strings, which transformers cannot pass to custom decoding; set "
            "model.generation_config.stop_strings = None and pass stop_strings=..."
        )
    arguments = {name: value for name, value in arguments.items() if name != "stop_strings"}
    if given is not None:
        arguments["generation_config"] = copy.deepcopy(given)
        arguments["generation_config"].stop_strings = None
    criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings)
    arguments["stopping_criteria"] = StoppingCriteriaList([*(arguments.get("stopping_criteria") or ()), criterion])
    return arguments


def pad(prompts: Sequence[Sequence[int]], device: torch.device, token: int = 0, side: str = "left") -> dict[str, Any]:
    """Arguments of ``generate`` for prompts of several lengths: ``input_ids`` and ``attention_mask`` ``[B, L]``, padded on one ``side``."""
    rows = [torch.tensor(list(prompt), dtype=torch.long, device="cpu") for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=token, padding_side=side)
    mask = pad_sequence(list(map(torch.ones_like, rows)), batch_first=True, padding_side=side)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "pad_token_id": token}


def unpad(
    input_ids: Tensor, mask: Tensor | None, start: int | None = None, *, name: str = "attention_mask"
) -> tuple[list[list[int]], list[list[int]]]:
    """Each row's ids without its padding, left or right; and its padding. Where no row begins with ``start``, transformers has put it in
    front of all of them. ``name`` is that of the mask.

    Raises:
        ConfigurationError: a row that is empty, or masked in its middle, or a mask of another shape.
    """
    rows = input_ids.tolist()
    if mask is None:
        return rows, [[] for _ in rows]
    if mask.shape != input_ids.shape:
        raise ConfigurationError(f"{name} must have the shape of the prompts, {list(input_ids.shape)}, got {list(mask.shape)}")
    prompts, paddings = [], []
    for index, (row, keep) in enumerate(zip(rows, mask.bool().tolist())):
        if True not in keep:
            raise ConfigurationError(f"row {index}: the prompt is empty; give at least one token, for instance the BOS token")
        first, last = keep.index(True), len(keep) - keep[::-1].index(True)
        if False in keep[first:last] and row[0] == start and keep[:2] == [True, False]:
            raise ConfigurationError(
                f"row {index}: transformers has put the start token {start} in front of the padding, because no row of decoder_input_ids "
                f"begins with it; begin each text with {start}, without a column that is padding in every row, or pad on the right"
            )
        if False in keep[first:last]:
            raise ConfigurationError(f"row {index}: {name} leaves a hole inside the prompt; only padding at either end is supported")
        prompts.append(row[first:last])
        paddings.append(row[:first] + row[last:])
    return prompts, paddings


def check_positions(position_ids: Tensor | None, mask: Tensor | None) -> None:
    """transformers always makes position ids; others than its own were asked for by the user."""
    if position_ids is None:
        return
    usual = torch.arange(position_ids.shape[-1], device=position_ids.device)[None] if mask is None else (mask.long().cumsum(-1) - 1)
    real = torch.ones_like(usual, dtype=torch.bool) if mask is None else mask.bool()
    if not bool(((position_ids == usual) | ~real).all()):
        raise ConfigurationError(f"position_ids is not supported: {REFUSED_ARGUMENTS['position_ids']}")


def split_criteria(criteria: Sequence[Any]) -> tuple[frozenset[int], list[Any]]:
    """The ids that end a row, and the criteria that must be called."""
    ends = [each for each in criteria if type(each) is EosTokenCriteria]
    eos = frozenset(token for each in ends for token in each.eos_token_id.flatten().tolist())
    return eos, [each for each in criteria if type(each) is not EosTokenCriteria]


def of_one_row(criterion: Any) -> Any:
    """``criterion``; or, if it counts in ``done_tracker`` which rows of the batch have ended, as lm-eval's does, a copy that counts one."""
    if isinstance(getattr(criterion, "done_tracker", None), list):
        criterion = copy.copy(criterion)
        criterion.done_tracker = [False]
    return criterion
