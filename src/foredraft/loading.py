"""Models and tokenizers by name: a path, a hub id, or ``zoo:NAME``; and whether two models speak the same vocabulary."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foredraft import hub, zoo
from foredraft.device import default_device
from foredraft.errors import ConfigurationError, first_line
from foredraft.quantization import (
    already_quantized,
    check_groups,
    check_quantization,
    check_quantized,
    config_for_loading,
    quantize,
    quantize_experts,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYER = re.compile(r"(.*\b(?:layers|layer|h|blocks|block))\.(\d+)\.")  # of a weight's name: the list of layers, and the number of one
UNREADABLE = (OSError, ValueError, LookupError, ImportError, TypeError, AttributeError, RuntimeError, ArithmeticError)  # of wrong files
OF_QUANTIZED = (".qweight", ".qzeros", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_zero_point")  # beside weights
PADDING = 1024  # vocabularies that differ by less are taken for one vocabulary padded differently


def load_model(
    source: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    quantization: str | None = None,
    encoders: bool = False,
    gguf_file: str | None = None,
) -> PreTrainedModel:
    """The language model at ``source``, in evaluation mode.

    Args:
        source: a path, a hub id or ``zoo:NAME``; or one of the first two, a slash, and the name of a GGUF file there.
        dtype: a torch dtype, its name, or None for the checkpoint's own.
        device: where to put it; ``"auto"`` spreads it over what there is (accelerate), None means the CPU.
        quantization: ``"int8"`` makes the weights of linear layers and experts eight bits wide, ``"int4"`` four (torchao); see
            :mod:`foredraft.quantization`.
        encoders: take models with an encoder as well.
        gguf_file: the name of that file, where ``source`` does not name it.

    Raises:
        ConfigurationError: ``source`` is no model; the message says what was tried.
        UnsupportedModelError: it has an encoder, and is to have none.
    """
    source = str(hub.named(source))
    if gguf_file is not None:
        source = f"{source}/{gguf_file}"
    check_quantization(quantization, source)
    device = parse_device(device)
    config = hub.config_of(source)
    if not encoders:
        hub.check_decoder(source, config)
    if source.startswith(zoo.PREFIX):
        device = default_device() if device == "auto" else device  # there is nothing to spread
        if quantization is None:
            return zoo.load(source, dtype=parse_dtype(dtype), device=device)
        embedded = zoo.load(source, dtype=parse_dtype(dtype))
        quantize(embedded, quantization)
        return embedded.to(device)
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoConfig

    from foredraft.quantization import torchao_files
    from foredraft.quantization.checkpoints import CAN, config_to_load, load_gguf

    loader, kind = loader_for(config)
    how: dict[str, Any] = {"device_map": "auto"} if device == "auto" else {}
    how["local_files_only"] = hub.on_this_machine(source)
    folder, file = hub.parted(source)
    try:
        own = config_to_load(source, config, local_files_only=how["local_files_only"]) if file is None else None
        if quantization is not None and (file is not None or own is not None):
            raise already_quantized(source)
        if own is not None:
            how["config"] = own
        elif quantization is not None:
            how["quantization_config"] = config_for_loading(quantization)
        if quantization is not None and quantization != "int8":
            with torch.device("meta"):
                made = AutoConfig.from_pretrained(source, local_files_only=how["local_files_only"], trust_remote_code=False)
                check_groups(loader.from_config(made), quantization)
        if file is not None:
            model = load_gguf(loader, folder, file, parse_dtype(dtype), **how)
        else:
            how |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # told by check_weights
            load = partial(loader.from_pretrained, source, dtype=parse_dtype(dtype) or "auto", trust_remote_code=False, **how)
            model, info = torchao_files.loaded(load, source, config)
            check_weights(source, model, info)
            if device in (None, "auto") or torch.device(device).type == "cpu":
                torchao_files.lay_out_for_cpu(model, source)
    except ConfigurationError:
        raise
    except (*UNREADABLE, SafetensorError, StrictDataclassError) as error:
        own_code = "; load it with trust_remote_code=True yourself, and pass the object" if "auto_map" in config else ""
        can = f". {CAN}" if config.get("quantization_config") else ""
        raise ConfigurationError(f"{source!r} cannot be loaded as {kind}: {first_line(error)}{own_code}{can}") from error
    if quantization is not None:
        check_quantized(model, source)
        quantize_experts(model, quantization)
    return model.eval() if device in (None, "auto") else model.to(device).eval()


def check_weights(source: str, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigurationError: by the loading ``info`` of transformers, the model has weights that are not those of the files.
    """
    if wrong := sorted(info["mismatched_keys"]):
        name, found, wanted = wrong[0]
        raise ConfigurationError(
            f"the checkpoint {source!r} contradicts its config.json: {name} has shape {tuple(found)} in the files, and {tuple(wanted)} "
            "in a model of that configuration; load a folder whose files and config.json are of the same model"
        )
    if lacking := sorted(info["missing_keys"]):
        more = f", and {len(lacking) - 1} others" if len(lacking) > 1 else ""
        raise ConfigurationError(
            f"the checkpoint {source!r} lacks {lacking[0]}{more}, which transformers would fill with random numbers; load one with all "
            "weights of its config.json"
        )
    for name in sorted(info["unexpected_keys"]):
        if name.endswith(OF_QUANTIZED) and part_at(model, name.rpartition(".")[0]) is not None:
            raise ConfigurationError(
                f"the checkpoint {source!r} has {name}, of quantized weights, but its config.json does not say how they are quantized; "
                "load a folder whose files and config.json are of the same model"
            )
        if found := LAYER.match(name):
            count = layers_at(model, found[1])
            if count is not None and int(found[2]) >= count:
                raise ConfigurationError(
                    f"the checkpoint {source!r} contradicts its config.json: the files have {name}, and a model of that configuration has "
                    f"{count} layers; load a folder whose files and config.json are of the same model"
                )


def layers_at(model: PreTrainedModel, path: str) -> int | None:
    """How many layers files may have at ``path``, such as ``model.layers``, with those that predict further tokens; None where the model
    has no list of layers."""
    found = part_at(model, path)
    if not isinstance(found, torch.nn.ModuleList):
        return None
    return len(found) + int(getattr(model.config.get_text_config(), "num_nextn_predict_layers", None) or 0)


def part_at(model: PreTrainedModel, path: str) -> torch.nn.Module | None:
    """What files call ``path``, with or without the prefix of the base model; None where the model has nothing there."""
    for name in (path, f"{model.base_model_prefix}.{path}"):
        try:
            return model.get_submodule(name)
        except AttributeError:
            continue
    return None


def loader_for(config: Mapping[str, Any]) -> tuple[Any, str]:
    """The class that loads a model with this ``config``, and what that is."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq
    from transformers.models.auto import modeling_auto as names

    kind = config.get("model_type")
    if not config.get("is_encoder_decoder"):
        if kind in names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and kind not in names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return AutoModelForImageTextToText, "a model that reads text and images"
        return AutoModelForCausalLM, "a causal language model"
    if kind in names.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES:
        return AutoModelForSpeechSeq2Seq, "a model that writes down speech"
    return AutoModelForSeq2SeqLM, "an encoder-decoder language model"


def load_tokenizer(source: str | Path, *, local: bool = False) -> Any:
    """The tokenizer at ``source``: a path, a hub id or ``zoo:NAME``; ``local`` asks no network. That of a GGUF file is the one beside
    it, or else the one in it.

    Raises:
        ConfigurationError: there is none.
    """
    source = str(hub.named(source))
    if source.startswith(zoo.PREFIX):
        return zoo.load_tokenizer(source)
    hub.check_path(source)
    from transformers import AutoTokenizer

    local = local or hub.on_this_machine(source)
    folder, file = hub.parted(source)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=local)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if file is not None:
            return _tokenizer_in(source, folder, file, local=local)
        place = Path(folder).expanduser()
        why = "it has no config.json" if place.is_dir() and not (place / "config.json").exists() else first_line(error)
        files = sorted(str(each) for each in place.glob("*.gguf")) if place.is_dir() else []
        instead = f"; name a GGUF file in it, such as {files[0]!r}" if files else ""
        raise ConfigurationError(f"{source!r} has no loadable tokenizer: {why}{instead}") from error


def _tokenizer_in(source: str, folder: str, file: str, *, local: bool) -> Any:
    """That of the GGUF file ``source``."""
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    from foredraft.quantization import gguf

    try:
        gguf.opened(Path(cached_file(folder, file, local_files_only=local)))
        return AutoTokenizer.from_pretrained(folder, gguf_file=file, local_files_only=local)
    except ConfigurationError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{source!r} has no loadable tokenizer, nor is there one beside it: {first_line(error)}. Pass the tokenizer of the checkpoint "
            "that it was made from, or put it into its folder"
        ) from error


def name_of(model: PreTrainedModel) -> str:
    """What a model is called: as it was asked for, not the folder that it was found in; its class if it was made in memory."""
    return str(getattr(model.config, "_name_or_path", "") or model.name_or_path or type(model).__name__)


def parse_device(device: str | torch.device | None) -> str | torch.device | None:
    """``device``; where it is ``"gpu"``, the one that torch has here, by whatever name.

    Raises:
        ConfigurationError: there is none.
    """
    if device != "gpu":
        return device
    if not torch.accelerator.is_available():
        raise ConfigurationError("device 'gpu' cannot be used here: torch finds no GPU; leave device out, or write 'cpu'")
    return torch.accelerator.current_accelerator()


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype from itself, from its name, or None from None or ``"auto"``."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return None
    named = getattr(torch, dtype, None)
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise ConfigurationError(f"unknown dtype {dtype!r}; choose auto, float32, bfloat16 or float16")
    return named


def vocabulary_difference(target: PreTrainedModel, draft: PreTrainedModel, target_tokenizer: Any, draft_tokenizer: Any) -> str | None:
    """What differs between two models' vocabularies, or None if a token id means the same to both.

    The tokenizers are compared where both are known; otherwise only the sizes, which may differ by padding.
    """
    if target_tokenizer is not None and draft_tokenizer is not None:
        ours, theirs = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
        differing = sorted((token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)), key=str)
        if not differing:
            return None
        shown = ", ".join(f"{token!r} is {ours.get(token, 'missing')} and {theirs.get(token, 'missing')}" for token in differing[:3])
        return f"{len(differing)} tokens differ between the tokenizers (target and draft: {shown})"
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (target, draft)]
    if abs(sizes[0] - sizes[1]) > PADDING:
        return f"the target has {sizes[0]} tokens, the draft {sizes[1]}"
    return None


def fingerprint(tokenizer: Any) -> str:
    """A word for what the ids of ``tokenizer`` mean: a hash of its vocabulary."""
    digest = hashlib.sha256()
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        digest.update(f"{number}\t{token}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()[:32]


def fingerprint_of(model: PreTrainedModel) -> str | None:
    """That of the model's tokenizer, None if no tokenizer is found on this machine under the model's name."""
    tokenizer = tokenizer_of(model)
    return None if tokenizer is None else fingerprint(tokenizer)


def tokenizer_of(model: PreTrainedModel) -> Any:
    """The model's own; None where none is found on this machine under the model's name."""
    try:
        return load_tokenizer(model.name_or_path, local=True) if model.name_or_path else None
    except (ConfigurationError, ImportError):
        return None
