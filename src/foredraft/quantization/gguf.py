"""GGUF files: linear layers and experts keep their integers, in groups; other tensors are widened to the model's dtype.

The weights of 32 inputs, or of 256 in the kinds whose name ends in K, are a block: scales, and integers of four to eight bits, or in MXFP4
floats of four. Integers of five bits take six here. llama.cpp applies RoPE to adjacent numbers of a head, transformers to its two
halves: rows of queries and keys of its ``llama`` are in another order.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foredraft.errors import ConfigurationError, first_line
from foredraft.quantization.grouped import bytes_from

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "gpt-oss")
GEMMA = ("gemma2", "gemma3")  # whose norms llama.cpp has with 1 added
KINDS = {  # bytes of a block
    "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "MXFP4": 17,
}  # fmt: skip
UNQUANTIZED = {"F64", "F32", "F16", "BF16"}
ROTARY = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OWN = {  # names
    "gemma2": SANDWICH,
    "gemma3": SANDWICH,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gpt-oss": {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router", "attn_sinks": "self_attn.sinks"},
}
GPT_OSS = {  # what a configuration calls the numbers of a file
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "expert_feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "sliding_window": "attention.sliding_window",
}
FACTORS = {"rope_freqs.weight": "", "rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
EXPERTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}  # a weight in transformers, and its parts in a file


def blocks_of(data: Tensor, kind: str) -> dict[str, Tensor]:
    """The tensors of a :class:`~foredraft.quantization.grouped.GroupedTensor`, from rows of blocks ``[N, bytes]`` of a ``kind`` in
    :data:`KINDS`; ``zeros`` is ``[1]`` if all groups have one zero point."""
    blocks = data.view(len(data), -1, KINDS[kind])

    def halves(begin: int) -> Tensor:
        return blocks[:, :, begin : begin + 2].contiguous().view(torch.float16).flatten(1)

    def pieces(begin: int, end: int, bits: int, width: int) -> Tensor:
        """Integers of ``bits`` bits: the lowest bits of ``width`` bytes are as many weights, the next bits the next weights, and so on."""
        found = blocks[:, :, begin:end].reshape(*blocks.shape[:2], -1, 1, width)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1)
        return (found >> shifts & ((1 << bits) - 1)).flatten(1)

    if kind.endswith("_K"):
        return kinds_of_256(kind, blocks, halves, pieces)
    if kind == "MXFP4":
        scale = torch.pow(2.0, blocks[:, :, 0].double() - 128).to(torch.bfloat16)  # of integers that are twice the floats
        return {"qdata": bytes_from(pieces(1, 17, 4, 16), 4), "scale": scale, "zeros": torch.zeros(1, dtype=torch.uint8)}
    begin = 4 if kind.endswith("1") else 2
    mins = {"mins": -halves(2)} if kind.endswith("1") else {}
    if kind == "Q8_0":
        codes = blocks[:, :, 2:].flatten(1) ^ 128
    elif kind.startswith("Q5"):
        fifth = blocks[:, :, begin : begin + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1
        codes = pieces(begin + 4, begin + 20, 4, 16) | fifth.flatten(1) << 4
    else:
        codes = pieces(begin, begin + 16, 4, 16)
    bits = 4 if kind.startswith("Q4") else 8 if kind == "Q8_0" else 6
    zero = 0 if mins else {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}[kind]
    return {"qdata": bytes_from(codes, bits), "scale": halves(0), "zeros": torch.tensor([zero], dtype=torch.uint8), **mins}


def kinds_of_256(kind: str, blocks: Tensor, halves: Any, pieces: Any) -> dict[str, Tensor]:
    if kind == "Q6_K":
        codes, scale = pieces(0, 128, 4, 64) | pieces(128, 192, 2, 32) << 4, blocks[:, :, 192:208].contiguous().view(torch.int8).flatten(1)
        return {"qdata": bytes_from(codes, 6), "scale": scale, "zeros": torch.tensor([32], dtype=torch.uint8), "over": halves(208)}
    first, second, rest = blocks[:, :, 4:16].reshape(*blocks.shape[:2], 3, 4).unbind(2)  # eight scales and eight of `zeros`, of six bits
    scale = torch.cat((first & 63, rest & 15 | first >> 2 & 48), -1).flatten(1)
    zeros = torch.cat((second & 63, rest >> 4 | second >> 2 & 48), -1).flatten(1)
    codes = pieces(blocks.shape[2] - 128, blocks.shape[2], 4, 32)
    if kind == "Q5_K":
        codes |= pieces(16, 48, 1, 32) << 4
    shared = {"over": halves(0), "mins": halves(2)}
    return {"qdata": bytes_from(codes, 4 if kind == "Q4_K" else 6), "scale": scale.view(torch.int8), "zeros": zeros, **shared}


def rows_of(heads: int, rows: int) -> Tensor:
    """The place of each row of queries or keys of ``heads`` heads in a file of llama.cpp's ``llama``."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def name_of(tensor: str, architecture: str) -> str | None:
    """The name of ``tensor`` in transformers; None if it has none."""
    found, names = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", tensor), NAMES | OWN.get(architecture, {})
    if found is None or found[2] not in names:
        return None
    layer = "" if found[1] is None else f"model.layers.{found[1]}."
    return f"{layer}{names[found[2]]}" + ("" if found[2] == "attn_sinks" else f".{found[3]}")


def opened(path: Path) -> Any:
    """gguf's reader of the file at ``path``.

    Raises:
        ConfigurationError: gguf is missing, or this is no whole GGUF file, or one of several.
    """
    try:
        import gguf
    except ImportError as error:
        raise ConfigurationError("reading GGUF files needs gguf; install it with: pip install 'foredraft[gguf]'") from error
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ConfigurationError(f"{str(path)!r} is no GGUF file, or only a part of one: {first_line(error)}") from error
    parts = reader.fields.get("split.count")
    if parts is not None and (count := parts.contents()) > 1:
        raise ConfigurationError(
            f"{str(path)!r} is one of {count} files of a model; make one of them with llama.cpp's llama-gguf-split --merge, and load that"
        )
    return reader


def architecture_of(path: Path, reader: Any) -> str:
    """llama.cpp's name of the kind of model in a file that is :func:`opened`.

    Raises:
        ConfigurationError: such models are not read.
    """
    field = reader.fields.get("general.architecture")
    architecture = None if field is None else field.contents()
    if architecture not in ARCHITECTURES:
        raise ConfigurationError(
            f"{str(path)!r} has a model of llama.cpp's {architecture!r}; of GGUF files {', '.join(ARCHITECTURES)} are read"
        )
    return str(architecture)


def gpt_oss_config(path: Path, reader: Any) -> Any:
    """The configuration of a gpt-oss in a file that is :func:`opened`. transformers takes the wrong part of fields that scale positions.

    Raises:
        ConfigurationError: the file lacks a number.
    """
    from transformers import GptOssConfig

    def field(name: str) -> Any:
        found = reader.fields.get(name)
        return None if found is None else found.contents()

    sizes = {name: field(f"gpt-oss.{key}") for name, key in GPT_OSS.items()}
    if missing := [GPT_OSS[name] for name, size in sizes.items() if size is None]:
        raise ConfigurationError(f"{str(path)!r} does not say gpt-oss.{missing[0]}; load another file of this model")
    table = next((tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"), None)
    vocabulary = {} if table is None else {"vocab_size": int(table.shape[-1])}
    tokens = {
        f"{name}_token_id": field(f"tokenizer.ggml.{key}_token_id") for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return GptOssConfig(**sizes, **vocabulary, **tokens)


def end_turns(generation: Any, reader: Any) -> None:
    """Let texts end also at the token that ends a turn of a chat, if the file names one."""
    field = reader.fields.get("tokenizer.ggml.eot_token_id")
    ends = generation.eos_token_id
    ends = ends if isinstance(ends, list) else [ends] if ends is not None else []
    if field is not None and (end := int(field.contents())) not in ends:
        generation.eos_token_id = [*ends, end]


def read(path: Path, reader: Any, architecture: str, config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a file that is :func:`opened`, as :class:`~foredraft.quantization.checkpoints.Layer` and the model have them, those
    that are widened in ``dtype``; ``config`` gets what transformers does not read.

    Raises:
        ConfigurationError: the file has something that is not supported.
    """
    import gguf

    def field(name: str) -> Any:
        found = reader.fields.get(f"{architecture}.{name}")
        return None if found is None else found.contents()

    configure(config, architecture, field, path)
    factors = {FACTORS[each.name]: torch.from_numpy(np.array(each.data)) for each in reader.tensors if each.name in FACTORS}
    if (given := factors.pop("", None)) is not None:
        config.rope_parameters = {**config.rope_parameters, **rotary(given, config, path)}
    if factors:
        config.rope_parameters |= {"rope_type": "longrope", **{name: each.tolist() for name, each in factors.items()}}
    state: dict[str, Tensor] = {}
    widened: set[str] = set()
    names = {tensor.name for tensor in reader.tensors}
    if architecture in ("llama", "gpt-oss"):
        config.attention_bias = "blk.0.attn_q.bias" in names
    if architecture == "llama":
        config.mlp_bias = "blk.0.ffn_up.bias" in names
    alternating = architecture == "gpt-oss"
    ends = ("_exps.weight", "_exps.bias")[: 1 + alternating]
    experts = {name: part for tensor in reader.tensors if tensor.name.endswith(ends) for name, part in apart(tensor)}
    for number in range(config.num_hidden_layers if experts else 0):
        state |= of_experts(experts, number, path, dtype, alternating=alternating)
        wide = [parts for name, parts in EXPERTS.items() if f"model.layers.{number}.mlp.experts.{name}" in state]
        widened |= {experts[f"blk.{number}.ffn_{part}_exps.weight"].tensor_type.name for parts in wide for part in parts}
    for tensor in reader.tensors:
        if tensor.name.endswith(ends) or tensor.name in FACTORS:
            continue
        name, kind = name_of(tensor.name, architecture), tensor.tensor_type.name
        if name is None:
            raise ConfigurationError(f"{str(path)!r} has a tensor {tensor.name!r}, which is not read")
        prefix, _, last = name.rpartition(".")
        order = None
        if architecture == "llama" and prefix.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if prefix.endswith("q_proj") else config.num_key_value_heads
            order = rows_of(heads, int(tensor.shape[-1]))
        tied = prefix == "model.embed_tokens" and "output.weight" not in names
        keeps = last == "weight" and kind in KINDS and (prefix.endswith("_proj") or prefix == "lm_head" or tied)
        if not keeps and last == "weight" and (prefix.endswith("_proj") or prefix == "lm_head"):
            widened.add(kind)
        if keeps:
            parts = blocks_of(torch.from_numpy(np.array(tensor.data)), kind)
            rows = {each: part if order is None or len(part) == 1 else part[order] for each, part in parts.items()}
            state |= {f"{'lm_head' if tied else prefix}.{each}": part.contiguous() for each, part in rows.items()}
        if not keeps or tied:
            found = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
            found = found if order is None else found[order]
            state[name] = (found - 1 if architecture in GEMMA and prefix.endswith("norm") else found).to(dtype)
    if kinds := sorted(widened - UNQUANTIZED):
        warnings.warn(
            f"{str(path)!r} has weights in {', '.join(kinds)}, which no kernel reads: they are widened to the model's dtype, and take more "
            f"memory and time. These stay at their bits: {', '.join(KINDS)}",
            stacklevel=2,
        )
    return state


def configure(config: Any, architecture: str, field: Callable[[str], Any], path: Path) -> None:
    """Tell ``config`` what transformers does not ask a file for, and llama.cpp's defaults for what a file does not say. ``field`` gives
    what the file has for its architecture, or None.

    Raises:
        ConfigurationError: positions are scaled in a way that is not read.
    """
    factor = field("rope.scaling.factor") or field("rope.scale_linear")  # the older name
    scaling = field("rope.scaling.type") or ("linear" if factor else None)
    if scaling not in (None, "none", "linear", "yarn") or (scaling == "yarn" and field("rope.scaling.attn_factor") not in (None, 1.0)):
        raise ConfigurationError(
            f"{str(path)!r} scales positions in a way that is not read ({scaling}); "
            "load the checkpoint that it was made from, with quantization='int4'"
        )
    scaled = {"rope_type": scaling, "factor": factor} if scaling in ("linear", "yarn") else {}
    if architecture == "gpt-oss":
        scaled |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    if scaling == "yarn":
        scaled["original_max_position_embeddings"] = field("rope.scaling.original_context_length") or config.max_position_embeddings
    rope = {"rope_type": "default", "rope_theta": field("rope.freq_base") or (1e6 if architecture == "gemma3" else 1e4), **scaled}
    if (size := field("attention.key_length")) is not None:
        config.head_dim = size
    if (size := field("expert_feed_forward_length")) is not None:
        config.moe_intermediate_size = size
    if (config.pad_token_id or 0) >= config.vocab_size:
        config.pad_token_id = None  # a default of the family
    if architecture == "phi3":
        rotated, size = field("rope.dimension_count"), config.hidden_size // config.num_attention_heads
        config.sliding_window = field("attention.sliding_window") or None
        config.original_max_position_embeddings = field("rope.scaling.original_context_length") or config.max_position_embeddings
        partial = {"partial_rotary_factor": 1.0 if rotated is None else rotated / size}
        config.rope_parameters = {**rope, **partial, "original_max_position_embeddings": config.original_max_position_embeddings}
    elif architecture in GEMMA:  # llama.cpp knows what the largest models scale queries by from their number of layers
        largest = config.num_hidden_layers == (46 if architecture == "gemma2" else 62)
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if largest else config.head_dim
        config.final_logit_softcapping = field("final_logit_softcapping") or (30.0 if architecture == "gemma2" else None)
        config.attn_logit_softcapping = field("attn_logit_softcapping") or (50.0 if architecture == "gemma2" else None)
        local = {"rope_type": "default", "rope_theta": field("rope.freq_base_swa") or 1e4}
        config.rope_parameters = rope if architecture == "gemma2" else {"full_attention": rope, "sliding_attention": local}
        window = field("attention.sliding_window")
        if window == 0 or (window is None and architecture == "gemma3"):
            config.layer_types = ["full_attention"] * config.num_hidden_layers
    elif architecture == "gpt-oss":
        config.rope_parameters = rope
    elif scaled:
        config.rope_parameters = {**config.rope_parameters, **scaled}


class Half(NamedTuple):
    """The rows of one part of a tensor."""

    data: np.ndarray[Any, Any]
    tensor_type: Any


def apart(tensor: Any) -> list[tuple[str, Any]]:
    """The names and rows of gate and `up` if ``tensor`` is of experts and has both, as ``--fuse-gate-up-exps`` of llama.cpp's converter
    makes it; else itself."""
    if "_gate_up_exps." not in tensor.name:
        return [(tensor.name, tensor)]
    data, inner = tensor.data, tensor.data.shape[1] // 2
    halves = {"gate": data[:, :inner], "up": data[:, inner:]}
    return [(tensor.name.replace("gate_up", part), Half(rows, tensor.tensor_type)) for part, rows in halves.items()]


def of_experts(given: Mapping[str, Any], number: int, path: Path, dtype: torch.dtype, *, alternating: bool) -> dict[str, Tensor]:
    """The experts of layer ``number``. Those of a kind that is not kept, and a gate and `up` of different kinds, are widened. As gpt_oss
    has them, rows of gate and `up` are ``alternating``, weights that are widened are transposed, and there are biases.

    Raises:
        ConfigurationError: the file lacks some.
    """
    import gguf

    def plain(tensors: Sequence[Any]) -> list[Tensor]:
        return [torch.from_numpy(np.array(gguf.dequantize(each.data, each.tensor_type), dtype=np.float32)).to(dtype) for each in tensors]

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(parts), 2).flatten(1, 2) if alternating else torch.cat(list(parts), 1)

    state: dict[str, Tensor] = {}
    for name, parts in EXPERTS.items():
        wanted = [f"blk.{number}.ffn_{part}_exps.{last}" for last in ("weight", "bias")[: 1 + alternating] for part in parts]
        if missing := [each for each in wanted if each not in given]:
            raise ConfigurationError(f"{str(path)!r} has experts, but no tensor {missing[0]!r}; load a file with all layers and experts")
        tensors, target = [given[each] for each in wanted], f"model.layers.{number}.mlp.experts.{name}"
        tensors, biases = tensors[: len(parts)], tensors[len(parts) :]
        kinds = {tensor.tensor_type.name for tensor in tensors}
        if biases:
            state[f"{target}_bias"] = joined(plain(biases))
        if len(kinds) == 1 and kinds <= KINDS.keys():
            data = joined([torch.from_numpy(np.array(tensor.data)) for tensor in tensors])
            for part, each in blocks_of(data.flatten(0, 1), kinds.pop()).items():
                state[f"{target}_{part}"] = each if len(each) == 1 else each.view(*data.shape[:2], -1).contiguous()
        else:
            found = joined(plain(tensors))
            state[target] = found.transpose(1, 2).contiguous() if alternating else found
    return state


def rotary(given: Tensor, config: Any, path: Path) -> dict[str, Any]:
    """The RoPE parameters by which transformers divides its frequencies by ``given``, as Llama 3.1 and its successors do.

    Raises:
        ConfigurationError: ``given`` scales them in another way.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    like = copy.deepcopy(config)
    found = {**ROTARY, "factor": float(given.max())}
    plain = config.rope_parameters["rope_theta"] ** (torch.arange(0, -len(given), -1, dtype=torch.float32) / len(given))
    like.rope_parameters = {**config.rope_parameters, **found}
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](like, torch.device("cpu"))
    if len(frequencies) != len(given) or not torch.allclose(frequencies, plain / given, rtol=1e-4):
        raise ConfigurationError(
            f"{str(path)!r} scales positions in another way than Llama 3.1 to 3.3, which is not read; "
            "load the checkpoint that it was made from, with quantization='int4'"
        )
    return found
