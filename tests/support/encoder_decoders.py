"""Tiny random models with an encoder, one per family, and what their encoders read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from architectures import EAGER, SEED, VOCABULARY, _widen

import foredraft.zoo

PAD, START, CONTEXT = 1, 2, 256
_LAYERS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
_WIDTHS = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": CONTEXT}
_IDS = {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": START, "vocab_size": VOCABULARY}
_BART = {**_LAYERS, **_WIDTHS, **_IDS, "tie_word_embeddings": False}
_UNNAMED = {name: value for name, value in _BART.items() if name != "max_position_embeddings"}  # where it has another name
_RELATIVE = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
_T5 = {**_IDS, **_RELATIVE, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
_SPARSE = {"num_experts": 4, "expert_capacity": 1, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 2}
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


@dataclass(frozen=True)
class Family:
    """How to build a tiny model, and what may be expected of it: "tree", "chain" or "refused".

    ``reads`` is "ids", "features" or "samples".
    """

    model: str
    options: dict[str, Any]
    std: float = 0.3
    support: str = "tree"
    reads: str = "ids"
    implementations: tuple[str, ...] = ("sdpa", "eager")
    make: Callable[[str], Any] | None = None


_LED = {"attention_window": 4, "max_encoder_position_embeddings": CONTEXT, "max_decoder_position_embeddings": CONTEXT}
_PROPHET = {
    **_IDS,
    "hidden_size": 32,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}
_WHISPER = {**_UNNAMED, "num_mel_bins": 8, "max_source_positions": 30, "max_target_positions": CONTEXT, "suppress_tokens": None}
_WHISPER |= {"begin_suppress_tokens": None}
_S2T = {**_BART, "input_feat_per_channel": 8, "max_source_positions": 60, "max_target_positions": CONTEXT, "conv_channels": 16}
_MOONSHINE = {
    **_IDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}
_FSMT = {name: value for name, value in _BART.items() if name != "vocab_size"}
_FSMT |= {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "langs": ["en", "de"]}


def _t5gemma(implementation: str) -> Any:
    part = {
        **_IDS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "attn_implementation": implementation,
    }
    modules = [transformers.T5GemmaModuleConfig(**part) for _ in range(2)]
    modules = {"encoder": modules[0], "decoder": modules[1]}
    config = transformers.T5GemmaConfig(**modules, attn_implementation=implementation, tie_word_embeddings=False, vocab_size=VOCABULARY)
    return transformers.T5GemmaForConditionalGeneration(config)


def _pair(encoder: str, decoder: str) -> Callable[[str], Any]:
    def make(implementation: str) -> Any:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        both = {**sizes, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "attn_implementation": implementation}
        decoding = {"is_decoder": True, "add_cross_attention": True, "tie_word_embeddings": False}
        configs = transformers.AutoConfig.for_model(encoder, **both), transformers.AutoConfig.for_model(decoder, **both, **decoding)
        config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*configs)
        config.pad_token_id, config.decoder_start_token_id = PAD, START
        return transformers.EncoderDecoderModel(config=config)

    return make


FAMILIES = {
    "t5": Family("T5ForConditionalGeneration", _T5),
    "t5 v1.1": Family("T5ForConditionalGeneration", {**_T5, **_GATED}),
    "mt5": Family("MT5ForConditionalGeneration", {**_T5, **_GATED}),
    "umt5": Family("UMT5ForConditionalGeneration", {**_T5, **_GATED}),
    "longt5": Family("LongT5ForConditionalGeneration", {**_T5, **_GATED, "local_radius": 4}, implementations=EAGER),
    "longt5 global": Family(
        "LongT5ForConditionalGeneration",
        {**_T5, **_GATED, "local_radius": 4, "global_block_size": 4, "encoder_attention_type": "transient-global"},
        implementations=EAGER,
    ),
    "bart": Family("BartForConditionalGeneration", _BART),
    "mbart": Family("MBartForConditionalGeneration", _BART),
    "plbart": Family("PLBartForConditionalGeneration", _BART),
    "pegasus": Family("PegasusForConditionalGeneration", _BART),
    "blenderbot": Family("BlenderbotForConditionalGeneration", _BART),
    "marian": Family("MarianMTModel", _BART),
    "m2m_100": Family("M2M100ForConditionalGeneration", _BART),
    "blenderbot-small": Family("BlenderbotSmallForConditionalGeneration", _BART),
    "pegasus_x": Family("PegasusXForConditionalGeneration", {**_BART, "block_size": 16, "num_global_tokens": 4}, implementations=EAGER),
    "led": Family("LEDForConditionalGeneration", {**_UNNAMED, **_LED}, implementations=EAGER),
    "bigbird_pegasus": Family(
        "BigBirdPegasusForConditionalGeneration", {**_BART, "attention_type": "original_full"}, implementations=EAGER
    ),
    "nllb-moe": Family("NllbMoeForConditionalGeneration", {**_BART, "num_experts": 4, "expert_capacity": 1}, implementations=EAGER),
    "switch": Family("SwitchTransformersForConditionalGeneration", {**_T5, **_SPARSE}, implementations=EAGER),
    "prophetnet": Family("ProphetNetForConditionalGeneration", _PROPHET, support="refused", implementations=EAGER),
    "t5gemma": Family("T5GemmaForConditionalGeneration", {}, make=_t5gemma, implementations=EAGER),
    "bert2bert": Family("EncoderDecoderModel", {}, make=_pair("bert", "bert")),
    "bert2gpt2": Family("EncoderDecoderModel", {}, make=_pair("bert", "gpt2")),
    "roberta2roberta": Family("EncoderDecoderModel", {}, make=_pair("roberta", "roberta")),
    "bert2trocr": Family("EncoderDecoderModel", {}, make=_pair("bert", "trocr"), implementations=EAGER),
    "bert2xlm-roberta": Family("EncoderDecoderModel", {}, make=_pair("bert", "xlm-roberta"), implementations=EAGER),
    "bert2camembert": Family("EncoderDecoderModel", {}, make=_pair("bert", "camembert"), implementations=EAGER),
    "bert2data2vec": Family("EncoderDecoderModel", {}, make=_pair("bert", "data2vec-text"), implementations=EAGER),
    "bert2roformer": Family("EncoderDecoderModel", {}, make=_pair("bert", "roformer"), support="refused", implementations=EAGER),
    "fsmt": Family("FSMTForConditionalGeneration", _FSMT, support="refused", implementations=EAGER),
    "whisper": Family("WhisperForConditionalGeneration", _WHISPER, reads="features"),
    "moonshine": Family("MoonshineForConditionalGeneration", _MOONSHINE, reads="samples"),
    "speech_to_text": Family("Speech2TextForConditionalGeneration", _S2T, support="refused", reads="features", implementations=EAGER),
}


@cache
def build(name: str, implementation: str | None = None) -> Any:
    """The tiny model ``name``, with the same weights for every implementation."""
    family = FAMILIES[name]
    implementation = implementation or family.implementations[0]
    cls = getattr(transformers, family.model)
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):  # whoever asks first
        torch.default_generator.manual_seed(SEED)
        if family.make is not None:
            model = family.make(implementation)
        else:
            model = cls(cls.config_class(**family.options, attn_implementation=implementation))
    _widen(model, family.std)
    config = model.generation_config
    config.eos_token_id = config.forced_eos_token_id = config.forced_bos_token_id = None
    config.pad_token_id, config.decoder_start_token_id, config.num_beams = PAD, START, 1
    return model.float().eval()


@cache
def perturbed(name: str, implementation: str | None = None, amount: float = 0.04) -> Any:
    """A model that mostly agrees with ``build(name)``."""
    model = copy.deepcopy(build(name, implementation))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(amount * weight.std(correction=0) * torch.randn(weight.shape, generator=generator))
    return model


def texts(lengths: Sequence[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def padded(rows: Sequence[Sequence[int]], side: str = "right", prefix: str = "") -> dict[str, torch.Tensor]:
    """Ids and mask of a ragged batch, as arguments whose names begin with ``prefix``."""
    width = max(map(len, rows))
    ids, mask = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for line, keep, row in zip(ids, mask, rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        line[where], keep[where] = torch.tensor(row), 1
    return {f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask}


def sources(name: str, side: str = "right", rows: int = 3) -> dict[str, torch.Tensor]:
    """What the encoder of ``build(name)`` reads for a batch, of unequal lengths where it takes a mask; two rows are alike."""
    generator, reads = torch.Generator().manual_seed(3), FAMILIES[name].reads
    if reads == "features":
        return {"input_features": torch.randn(rows, 8, 60, generator=generator)}
    if reads == "samples":
        mask = torch.ones(rows, 5000, dtype=torch.long)
        mask[1, 3000:] = 0
        return {"input_values": torch.randn(rows, 5000, generator=generator) * mask, "attention_mask": mask}
    return padded(texts((13, 6, 9))[:rows], side)


def rows_of(given: dict[str, torch.Tensor], *rows: int) -> dict[str, torch.Tensor]:
    return {name: each[list(rows)] for name, each in given.items()}


def save_t5(folder: Path) -> None:
    """A tiny T5 with a tokenizer, as a checkpoint."""
    tokenizer = foredraft.zoo.load_tokenizer("zoo:python-8m")
    end = tokenizer.eos_token_id
    ids = {"vocab_size": len(tokenizer), "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": end}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**{**_T5, **ids}))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
