"""Checkpoints whose linear layers are stored in four or eight bits: AWQ, GPTQ, and compressed-tensors' W4A16 and W8A16; and those whose
experts are, in MXFP4, as of gpt_oss.

transformers loads them through libraries that are made for GPUs. Here the tensors of the files are read as they are, and become weights of
plain linear layers and experts at the same number of bits (:class:`~foredraft.quantization.grouped.GroupedTensor`). transformers does the
loading, through the interface that it has for such methods; nothing of it is changed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from foredraft.errors import ConfigurationError
from foredraft.quantization import EXPERTS, experts_in, gguf
from foredraft.quantization.grouped import GroupedTensor, bytes_from, stacked

METHODS = ("awq", "gptq", "compressed-tensors", "mxfp4")
NAME = "foredraft-groups"  # of this way to load, for transformers
BLOCK = 32  # inputs of MXFP4 that share a scale
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where AWQ keeps outputs 0, 1, .. of eight in a word
PARTS = {  # the tensors of a layer in the files: required ones, and optional ones
    "awq": (("qweight", "qzeros", "scales"), ()),
    "gptq": (("qweight", "qzeros", "scales"), ("g_idx",)),
    "pack-quantized": (("weight_packed", "weight_scale"), ("weight_shape", "weight_zero_point", "weight_g_idx")),
    "int-quantized": (("weight", "weight_scale"), ("weight_zero_point", "weight_g_idx")),
    "gguf": (("qdata", "scale", "zeros"), ("over", "mins")),
    "mxfp4": (("blocks", "scales"), ()),
}
LISTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # what files list for each expert
SEVERAL = {"gate_up_proj": (0, 1), "down_proj": (2,)}  # a weight of experts, and which of these it has
CAN = (
    "Foredraft reads AWQ (gemm) of 4 bits, GPTQ of 4 and 8, compressed-tensors with integer weights of 4 and 8 bits and activations as "
    "they are, torchao's int8 and int4, MXFP4 and GGUF"
)
DTYPES = {"I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def config_to_load(source: str, config: Mapping[str, Any], *, local_files_only: bool) -> Any:
    """The model's configuration as ``from_pretrained`` is to have it, for a checkpoint of :data:`METHODS`; None for others.

    Raises:
        ConfigurationError: it is of such a method, but in a form that is not read; or of a method that nobody knows.
    """
    about = config.get("quantization_config")
    if not isinstance(about, Mapping):
        return None
    method = str(about.get("quant_method", "")).lower()
    if method not in METHODS:
        if method and method not in AUTO_QUANTIZER_MAPPING:  # transformers would take the integers for weights
            raise ConfigurationError(f"the checkpoint {source!r} is quantized with {method}, which is not read. {CAN}")
        return None
    about = {**about, "quant_method": method}
    stored = Stored.of(about, source)
    found = AutoConfig.from_pretrained(source, local_files_only=local_files_only, trust_remote_code=False)
    found.quantization_config = {"quant_method": NAME, "original": dict(about), "form": stored.form, "source": source}
    return found


def load_gguf(loader: Any, source: str, name: str, dtype: torch.dtype | None, *, local_files_only: bool, **how: Any) -> Any:
    """The model in the GGUF file ``name`` in the folder, or of the hub id, ``source``; in bfloat16 unless ``dtype`` says otherwise.

    Raises:
        ConfigurationError: the file cannot be read, or its tensors are not those of the model that it says it is.
    """
    from transformers.utils import cached_file

    path = Path(cached_file(source, name, local_files_only=local_files_only))
    reader = gguf.opened(path)
    architecture = gguf.architecture_of(path, reader)  # before transformers reads it, which fails on some
    if architecture == "gpt-oss":
        config = gguf.gpt_oss_config(path, reader)
    else:
        config = AutoConfig.from_pretrained(source, gguf_file=name, local_files_only=local_files_only, trust_remote_code=False)
    state = gguf.read(path, reader, architecture, config, dtype or torch.bfloat16)
    config.tie_word_embeddings = "lm_head.weight" not in state and "lm_head.qdata" not in state
    if any(each.endswith("qdata") for each in state):
        there = {each: (tensor.dtype, list(tensor.shape)) for each, tensor in state.items()}
        about = {"quant_method": "gguf"}
        config.quantization_config = {"quant_method": NAME, "original": about, "form": "gguf", "source": f"{source}/{name}", "there": there}
    made = loader._model_mapping[type(config)]  # the class itself: the loader asks what is at a path, and there is none
    model, info = made.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype or torch.bfloat16, output_loading_info=True, ignore_mismatched_sizes=True, **how
    )
    others = [name for name, _, _ in info["mismatched_keys"]]
    for what, tensors in (("has", info["unexpected_keys"]), ("lacks", info["missing_keys"]), ("has another shape of", others)):
        if tensors:
            raise ConfigurationError(
                f"{str(path)!r} {what} {min(tensors)}, unlike a {made.__name__}; load the checkpoint that it was made from, with "
                "quantization='int4'"
            )
    model.name_or_path = model.config._name_or_path = f"{source}/{name}"
    with suppress(OSError):  # there is none beside the file
        model.generation_config = GenerationConfig.from_pretrained(source, local_files_only=local_files_only)
    gguf.end_turns(model.generation_config, reader)
    return model


@dataclass(frozen=True)
class Stored:
    """How a checkpoint stores its linear layers. ``gguf`` is what :mod:`foredraft.quantization.gguf` makes of such a file.

    Attributes:
        form: of :data:`PARTS`.
        group: inputs that share a scale; None if all of an output do, and for ``gguf``, whose tensors show it.
        first: what is added to zero points: GPTQ's first format stores them minus one.
        bits: that a weight may have; empty where the tensors alone show it.
    """

    form: str
    group: int | None
    first: int = 0
    bits: frozenset[int] = frozenset()

    @staticmethod
    def of(about: Mapping[str, Any], source: str) -> Stored:
        """As the ``quantization_config`` of a checkpoint says."""
        method = str(about["quant_method"])
        if method in ("gguf", "mxfp4"):
            return Stored(method, None if method == "gguf" else BLOCK)

        def refuse(why: str) -> ConfigurationError:
            return ConfigurationError(f"the checkpoint {source!r} is quantized with {method}, {why}. {CAN}")

        if method == "compressed-tensors":
            return Stored._of_compressed_tensors(about, refuse)
        bits, group = int(about.get("bits", about.get("w_bit", 4))), int(about.get("group_size", about.get("q_group_size", 128)))
        form = next(str(about[key]).lower() for key in ("checkpoint_format", "version", "format", "quant_method") if key in about)
        known = {"awq": ("awq", "gemm"), "gptq": ("gptq", "gptq_v2", "none")}[method]
        if bits not in ((4,) if method == "awq" else (4, 8)):
            raise refuse(f"with {bits} bits")
        if form not in known:
            raise refuse(f"in the format {form!r}")
        stated = frozenset[int]() if about.get("dynamic") else frozenset([bits])  # GPTQModel's layers may have bits of their own
        return Stored(method, group if group > 0 else None, first=int(method == "gptq" and form != "gptq_v2"), bits=stated)

    @staticmethod
    def _of_compressed_tensors(about: Mapping[str, Any], refuse: Callable[[str], ConfigurationError]) -> Stored:
        found, bits = {}, set[int]()
        transforms = (about.get("transform_config") or {}).get("config_groups", {}).values()
        if any(not each["location"].startswith("weight_") for group in transforms for each in group.get("apply", ())):
            raise refuse("with transforms of activations")
        for group in about.get("config_groups", {}).values():
            weights, form = group.get("weights") or {}, group.get("format") or about.get("format")
            if group.get("input_activations") or group.get("output_activations"):
                raise refuse("activations included")
            if form not in ("pack-quantized", "int-quantized"):
                raise refuse(f"in the format {form!r}")
            if weights.get("type", "int") != "int" or weights.get("num_bits") not in (4, 8):
                raise refuse(f"with weights of {weights.get('num_bits')} bits of type {weights.get('type')!r}")
            if weights.get("strategy") not in ("group", "channel", "tensor"):
                raise refuse(f"with scales by {weights.get('strategy')!r}")
            if weights["strategy"] == "group" and int(weights.get("group_size") or 0) < 1:
                raise refuse(f"with groups of {weights.get('group_size')} inputs")
            bits.add(weights["num_bits"])
            found[form, weights.get("group_size") if weights["strategy"] == "group" else None] = True
        if len(found) != 1:
            raise refuse("in several ways" if found else "and says not how")
        (form, size), *_ = found
        return Stored(form, size, bits=frozenset(bits))

    def weight(self, parts: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> GroupedTensor:
        """The weight ``[N, K]`` of a layer, from its tensors in the files.

        Raises:
            ValueError: these contradict each other; the message says how.
        """
        outputs, inputs = shape
        if self.form == "gguf":
            return self._of_gguf(parts, shape, dtype)
        size = inputs if self.group is None else self.group
        bits, codes, scale, zeros, given = self._unpacked(parts, outputs, inputs)
        if self.bits and bits not in self.bits:
            raise ValueError(f"weights of {bits} bits each where {' and '.join(map(str, sorted(self.bits)))} are stated")
        groups = math.ceil(inputs / size)
        if inputs % size and self.form != "gptq":
            raise ValueError(f"{inputs} inputs, which are no whole number of groups of {size}")
        expected = {"weights": (codes, (outputs, inputs)), "scales": (scale, (outputs, groups)), "zero points": (zeros, (outputs, groups))}
        for what, (found, wanted) in expected.items():
            if isinstance(found, Tensor) and tuple(found.shape) != wanted:
                raise ValueError(f"{what} of shape {tuple(found.shape)} where groups of {size} inputs need {wanted}")
        if given is not None and self.form != "gptq" and bool((given == -1).all()):
            given = None  # older releases say so that there is no order
        order = None if given is None else order_of(given, inputs, size, groups)
        if order is not None:
            codes = codes[:, order.long()]
        if isinstance(zeros, Tensor):
            least, most, limit = int(zeros.min()), int(zeros.max()), (1 << bits) - 1
            if least < 0 or most > limit:  # as integers of compressed-tensors, they could be
                raise ValueError(f"zero points from {least} to {most} where weights of {bits} bits have 0 to {limit}")
            zeros = least if least == most else zeros.to(torch.uint8).contiguous()
        return GroupedTensor(bytes_from(codes, bits), scale.contiguous(), zeros, order, bits=bits, group=size, dtype=dtype)

    def experts(self, parts: Mapping[str, Tensor], plain: Any, transposed: bool) -> GroupedTensor:
        """The weights of all experts, in place of the ``plain`` ones, from their tensors in the files.

        Raises:
            ValueError: these contradict each other; the message says how.
        """
        count, *sizes = plain.shape
        inputs, outputs = sizes if transposed else sizes[::-1]
        if self.form == "gguf":
            return self._of_gguf(parts, (count, outputs, inputs), plain.dtype, transposed)
        if inputs % BLOCK:
            raise ValueError(f"{inputs} inputs, which are no whole number of blocks of {BLOCK}")
        blocks, scales = parts["blocks"], parts["scales"]
        expected = {
            "blocks": (blocks, (count, outputs, inputs // BLOCK, BLOCK // 2)),
            "scales": (scales, (count, outputs, inputs // BLOCK)),
        }
        for what, (found, wanted) in expected.items():
            if tuple(found.shape) != wanted:
                raise ValueError(
                    f"{what} of shape {tuple(found.shape)} where {count} experts of {outputs} x {inputs} weights need {wanted}"
                )
        scale = torch.pow(2.0, scales.double() - 128).to(torch.bfloat16)  # half of 2^(e - 127), since integers are twice the floats
        return GroupedTensor(blocks.flatten(2), scale, 0, bits=4, group=BLOCK, dtype=plain.dtype, transposed=transposed, floats=True)

    @staticmethod
    def _of_gguf(parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype, transposed: bool = False) -> GroupedTensor:
        (*outputs, inputs), qdata, scale, zeros = shape, parts["qdata"], parts["scale"], parts["zeros"]
        (*found, width) = qdata.shape
        if found != outputs or width not in (inputs // 2, inputs * 3 // 4, inputs):
            given, wanted = (" x ".join(map(str, each)) for each in (found, outputs))
            raise ValueError(f"weights of {given} outputs in {width} bytes each where {wanted} of {inputs} weights are needed")
        stands = int(zeros) if zeros.ndim == 1 else zeros
        about: dict[str, Any] = {"bits": width * 8 // inputs, "group": inputs // scale.shape[-1], "transposed": transposed}
        about["floats"] = scale.dtype == torch.bfloat16  # MXFP4; other kinds have scales in float16 or integers
        return GroupedTensor(qdata, scale, stands, over=parts.get("over"), mins=parts.get("mins"), dtype=dtype, **about)

    def _unpacked(self, parts: Mapping[str, Tensor], outputs: int, inputs: int) -> tuple[int, Tensor, Tensor, Tensor | int, Tensor | None]:
        """The bits; for each output the integers, none below 0, the scales and the zero points; and the group of each input."""
        if self.form == "awq":
            codes, zeros = (in_awq_order(fields(parts[name], 4)).T for name in ("qweight", "qzeros"))
            return 4, codes, parts["scales"].T, zeros, None
        if self.form == "gptq":
            bits = bits_of(parts["qweight"].shape[0], inputs)
            ones = self.first * sum(1 << bit for bit in range(0, 32, bits))  # added to whole words, with carries
            words = (parts["qzeros"].long() + ones).to(torch.int32)
            codes, zeros = fields(parts["qweight"].T, bits)[:, :inputs], fields(words, bits).T
            return bits, codes, parts["scales"].T, zeros, parts.get("g_idx")
        scale, zero = parts["weight_scale"], parts.get("weight_zero_point")
        scale = scale.expand(outputs, -1) if scale.ndim == 2 else scale.reshape(-1, 1).expand(outputs, 1)
        packed = self.form == "pack-quantized"
        if not packed and parts["weight"].dtype != torch.int8:
            raise ValueError(f"weights of {parts['weight'].dtype} beside their scales, where integers of 8 bits are needed")
        bits = bits_of(parts["weight_packed"].shape[1], inputs) if packed else 8
        codes = fields(parts["weight_packed"], bits)[:, :inputs] if packed else (parts["weight"].to(torch.int16) + 128).to(torch.uint8)
        half = 1 << (bits - 1)
        if zero is None:
            stands: Tensor | int = half
        elif packed and zero.dtype == torch.int32:
            stands = fields(zero.T, bits)[:, :outputs].T
        else:  # by tensor, and as older releases have them
            stands = (zero.reshape(-1, scale.shape[1]).to(torch.int16) + half).expand(scale.shape)
        return bits, codes, scale, stands, parts.get("weight_g_idx")


def bits_of(words: int, inputs: int) -> int:
    found = {math.ceil(inputs * bits / 32): bits for bits in (4, 8)}.get(words)
    if found is None:
        raise ValueError(f"{words} words for the {inputs} weights of an output, which are neither 4 nor 8 bits each")
    return found


def fields(packed: Tensor, bits: int) -> Tensor:
    """Unpack words ``[M, n]`` int32 into numbers ``[M, n * 32 / bits]`` uint8, those in the lowest bits first."""
    found = packed.contiguous().view(torch.uint8)  # the lowest byte of a word is its first one
    return found if bits == 8 else torch.stack([found & 15, found >> 4], -1).flatten(1)


def in_awq_order(rows: Tensor) -> Tensor:
    return rows.view(len(rows), -1, 8)[:, :, list(AWQ_ORDER)].flatten(1)


def order_of(given: Tensor, inputs: int, size: int, groups: int) -> Tensor | None:
    """``[K]`` int32 the inputs sorted by group, from the group of each input; None if they are sorted already.

    Raises:
        ValueError: groups of other sizes.
    """
    given = given.long()
    if tuple(given.shape) != (inputs,) or int(given.min()) < 0 or int(given.max()) >= groups:
        raise ValueError(f"g_idx of shape {tuple(given.shape)} and groups up to {int(given.max())} where {inputs} inputs have {groups}")
    counts = [min(size, inputs - size * group) for group in range(groups)]
    if torch.bincount(given, minlength=groups).tolist() != counts:
        raise ValueError(f"g_idx makes groups of other sizes than {size} inputs")
    order = torch.argsort(given, stable=True).int()
    return None if torch.equal(order, torch.arange(len(order), dtype=torch.int32, device=order.device)) else order


def renamed(model: nn.Module, there: Mapping[str, Any]) -> dict[str, Any]:
    """``there`` by the names that transformers gives the tensors in ``model``."""
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    found = {}
    for name, about in there.items():
        for each in renamings:
            name, _ = each.rename_source_key(name)
        found[name] = about
    return found


class Layer(nn.Module):
    """The tensors of one linear layer in the files, while they are read."""

    def __init__(self, linear: nn.Linear, parts: Mapping[str, tuple[torch.dtype, Sequence[int]]]):
        super().__init__()
        self.linear, self.names = [linear], list(parts)  # in a list, so that it is no submodule
        for name, (dtype, shape) in parts.items():
            self.register_buffer(name, torch.empty(tuple(shape), dtype=dtype, device="meta"))
        if linear.bias is not None:
            self.bias = linear.bias

    def loaded(self, stored: Stored, dtype: torch.dtype) -> nn.Linear:
        """The layer, with its weight at the bits that it has in the files."""
        (linear,) = self.linear
        shape = linear.out_features, linear.in_features
        weight = stored.weight({name: getattr(self, name) for name in self.names}, shape, dtype)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if linear.bias is not None:
            linear.bias = self.bias
        return linear


@register_quantization_config(NAME)
class GroupsConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """What transformers hands on to :class:`GroupsQuantizer`."""

    def __init__(self, original: Mapping[str, Any], form: str, source: str, there: Mapping[str, Any] | None = None, **others: Any):
        self.quant_method, self.original, self.form, self.source, self.there = NAME, dict(original), form, source, there


@register_quantizer(NAME)
class GroupsQuantizer(HfQuantizer):  # type: ignore[misc]
    """Reads the layers that :class:`Stored` knows."""

    requires_calibration = True
    is_trainable = False

    def is_serializable(self) -> bool:
        return False

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Scales keep theirs."""
        return dtype if dtype in (torch.float32, torch.bfloat16, torch.float16) else None

    def _process_model_before_weight_loading(self, model: nn.Module, checkpoint_files: Sequence[str] | None = None, **others: Any) -> None:
        config = self.quantization_config
        needed, possible = PARTS[config.form]
        there = renamed(model, headers(checkpoint_files or ())) if config.there is None else config.there
        there = {name.replace(".block_sparse_moe.", ".mlp."): each for name, each in there.items()}  # as transformers renames Mixtral's
        config.there = None
        found = self._make_room_for_experts(model, there)
        self._list_experts(model, there)
        for name, module in list(model.named_modules()):
            parts = {part: there[f"{name}.{part}"] for part in (*needed, *possible) if f"{name}.{part}" in there}
            if not isinstance(module, nn.Linear) or not parts or (set(parts) == {"weight"} and there[f"{name}.weight"][0] != torch.int8):
                continue
            missing = [part for part in needed if part not in parts]
            if missing:
                raise self._by_half(name, parts, missing)
            found += 1
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Layer(module, parts))
        loading: Any = model
        if isinstance(loading.get_output_embeddings(), Layer):  # no part of the input embeddings, whatever the configuration says
            loading.config.get_text_config().tie_word_embeddings, loading.all_tied_weights_keys = False, {}
        self._check_nothing_is_left(model, there)
        if not found:
            raise ConfigurationError(
                f"the checkpoint {config.source!r} says that it is quantized with {config.original['quant_method']}, but has no linear "
                f"layer or experts with {', '.join(needed)}; load a folder whose files and config.json are of the same model"
            )

    def _make_room_for_experts(self, model: nn.Module, there: Mapping[str, Any]) -> int:
        """Register buffers for the tensors of experts in the files. Returns for how many weights."""
        found, (needed, possible) = 0, PARTS[self.quantization_config.form]
        for path, experts, name in list(experts_in(model)):
            parts = {part: there[f"{path}.{name}_{part}"] for part in (*needed, *possible) if f"{path}.{name}_{part}" in there}
            if not parts:
                continue
            if missing := [part for part in needed if part not in parts]:
                raise self._by_half(f"{path}.{name}", parts, missing)
            vars(experts)[name] = experts._parameters.pop(name)  # still there where transformers initialises what is missing
            for part, (dtype, shape) in parts.items():
                experts.register_buffer(f"{name}_{part}", torch.empty(tuple(shape), dtype=dtype, device="meta"))
            found += 1
        return found

    def _list_experts(self, model: nn.Module, there: Mapping[str, Any]) -> None:
        """Add linear layers to experts whose weights are in the files one by one."""
        mark = PARTS[self.quantization_config.form][0][-1]
        for path, module in list(model.named_modules()):
            experts: Any = module
            names = next((each for each in LISTS if f"{path}.0.{each[-1]}.{mark}" in there), None)
            if names is None or not SEVERAL.keys() <= experts._parameters.keys() or experts.is_transposed:
                continue
            count, hidden, inner = experts.down_proj.shape
            sizes = dict(zip(names, ((hidden, inner), (hidden, inner), (inner, hidden))))
            for number in range(count):
                layers = {name: nn.Linear(*size, bias=False, device="meta") for name, size in sizes.items()}
                if lacking := [name for name in layers if f"{path}.{number}.{name}.{mark}" not in there]:
                    raise self._by_half(f"{path}.{number}", [name for name in layers if name not in lacking], lacking)
                experts.add_module(str(number), nn.ModuleDict(layers))
            vars(experts).update({name: experts._parameters.pop(name) for name in SEVERAL})

    def _check_nothing_is_left(self, model: nn.Module, there: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigurationError: the files have quantised weights of a part of the model that nothing above reads.
        """
        config, modules = self.quantization_config, dict(model.named_modules())
        mark = f".{PARTS[config.form][0][-1]}"
        ignored: Any = model._keys_to_ignore_on_load_unexpected or ()  # such as layers that predict further tokens
        for name in (each.removesuffix(mark) for each in there if each.endswith(mark)):
            if any(re.search(each, name) for each in ignored):
                continue
            if not isinstance(modules.get(name), Layer) and (name in modules or ".experts." in name):
                raise ConfigurationError(
                    f"the checkpoint {config.source!r} has {name} quantized with {config.original['quant_method']}, which is not read for "
                    "this part of the model; load the checkpoint that it was made from, with quantization='int4'"
                )

    def _by_half(self, name: str, there: Iterable[str], missing: Iterable[str]) -> ConfigurationError:
        source = self.quantization_config.source
        return ConfigurationError(
            f"the checkpoint {source!r} is quantized by half: {name} has {', '.join(there)}, but no {', '.join(missing)}; download it "
            "again, or load the checkpoint that it was made from"
        )

    def _process_model_after_weight_loading(self, model: nn.Module, **others: Any) -> nn.Module:
        config = self.quantization_config
        stored = Stored.of(config.original, config.source)
        dtype = next(each.dtype for each in model.parameters() if each.is_floating_point())
        for name, module in list(model.named_modules()):
            if isinstance(module, Layer):
                parent, _, last = name.rpartition(".")
                with self._naming(name):
                    setattr(model.get_submodule(parent), last, module.loaded(stored, dtype))
        for path, module in model.named_modules():
            experts: Any = module
            if "0" in experts._modules and SEVERAL.keys() <= vars(experts).keys():
                with self._naming(path):
                    self._join(experts)
            for name in [each for each in EXPERTS if each in vars(experts)]:
                plain = vars(experts).pop(name)
                kept = [each for each in experts._buffers if each.startswith(f"{name}_")]
                parts = {each.removeprefix(f"{name}_"): experts._buffers.pop(each) for each in kept}
                with self._naming(f"{path}.{name}"):
                    setattr(experts, name, nn.Parameter(stored.experts(parts, plain, experts.is_transposed), requires_grad=False))
        return model

    @staticmethod
    def _join(experts: Any) -> None:
        """Join the layers that :meth:`_list_experts` has added into one weight again."""
        listed = [list(experts._modules.pop(str(number)).values()) for number in range(len(experts.down_proj))]
        for name, parts in SEVERAL.items():
            del vars(experts)[name]
            weight = stacked([[each[part].weight for part in parts] for each in listed])
            setattr(experts, name, nn.Parameter(weight, requires_grad=False))

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, RuntimeError, IndexError, TypeError, ArithmeticError) as error:
            source = self.quantization_config.source
            raise ConfigurationError(
                f"the checkpoint {source!r} contradicts its configuration: {name} has {error}; load a folder whose files and config.json "
                "are of the same model"
            ) from error


def headers(files: Sequence[str]) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Dtype and shape of every tensor in safetensors files."""
    found = {}
    for file in map(str, files):
        if not file.endswith(".safetensors"):
            raise ConfigurationError(f"{file!r} is no safetensors file, and quantized checkpoints are read from these only; convert it")
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dictionary)
                piece = opened.get_slice(name)
                found[name] = DTYPES.get(piece.get_dtype(), torch.uint8), piece.get_shape()
    return found
