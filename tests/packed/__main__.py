"""Writes ``layers.safetensors``: layers of random numbers as AutoAWQ and GPTQModel pack them, and hashes of what they unpack.

    python tests/packed AUTOAWQ

It needs GPTQModel, and the folder of AutoAWQ's source distribution. Of that, only the file that packs is imported: AutoAWQ 0.2.9 does not
go with today's transformers. The tests need neither library.
"""

from __future__ import annotations

import hashlib
import json
import sys
import types
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

FILE = Path(__file__).with_name("layers.safetensors")
OUTPUTS, INPUTS = 32, 96
CASES = {  # of GPTQ: bits, inputs of a group, whether inputs are in an order of their own, and the format
    "gptq-4": (4, 32, False, 1),
    "gptq-4-ordered": (4, 32, True, 1),
    "gptq-4-tail": (4, 64, False, 1),
    "gptq-4-tail-ordered": (4, 64, True, 1),
    "gptq-4-second": (4, 32, False, 2),
    "gptq-8": (8, INPUTS, False, 1),
    "gptq-8-ordered": (8, 16, True, 2),
}


def hash_of(weight: Tensor) -> str:
    """Of the weights ``[N, K]`` in float16."""
    return hashlib.sha256(weight.half().contiguous().numpy().tobytes()).hexdigest()


def scales_and_zeros(weight: Tensor, of: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """``[N, G]`` each, for inputs of group ``of`` ``[K]``: from the least number to the largest, except in the first two outputs, whose
    numbers are all above or below zero."""
    weight[0], weight[1] = weight[0].abs(), -weight[1].abs()
    parts = [weight[:, of == group] for group in range(int(of.max()) + 1)]
    least, most = (torch.stack([at(part, 1) for part in parts], 1) for at in (torch.amin, torch.amax))
    least, most = least.clamp(max=0), most.clamp(min=0)
    scale = ((most - least) / (2**bits - 1)).half().float()
    return scale, (-least / scale).round().clamp(0, 2**bits - 1)


def awq(folder: Path, random: torch.Generator) -> dict[str, Tensor]:
    sys.path.insert(0, str(folder))
    for name in ("awq", "awq.modules", "awq.modules.linear", "awq.utils"):  # without what their __init__ imports
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(folder / name.replace(".", "/"))]  # type: ignore[attr-defined]
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    linear = nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight.data = torch.randn(OUTPUTS, INPUTS, generator=random)
    scale, zeros = scales_and_zeros(linear.weight.data, torch.arange(INPUTS) // 32, 4)
    made = WQLinear_GEMM.from_linear(linear, 4, 32, scales=scale.T.contiguous(), zeros=zeros.T.contiguous())
    parts = {name: getattr(made, name) for name in ("qweight", "qzeros", "scales")}
    return parts | {"weight": dequantize_gemm(**parts, bits=4, group_size=32).T}


def gptq(bits: int, group: int, ordered: bool, form: int, random: torch.Generator) -> dict[str, Tensor]:
    """GPTQModel packs in the second format, and turns it into the first when it saves a model."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    of = torch.arange(INPUTS) // group
    of = of[torch.randperm(INPUTS, generator=random)] if ordered else of
    linear = nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight.data = torch.randn(OUTPUTS, INPUTS, generator=random)
    scale, zeros = scales_and_zeros(linear.weight.data, of, bits)
    made = TorchLinear(
        bits=bits,
        group_size=group,
        sym=False,
        desc_act=ordered,
        in_features=INPUTS,
        out_features=OUTPUTS,
        bias=False,
        register_buffers=True,
    )
    made.pack_original(linear, scale, zeros, of.int())
    made.post_init()
    weight = made.dequantize_weight().T
    if form == 1:
        convert_gptq_v2_to_v1_format_module(made, QuantizeConfig(bits=bits, group_size=group))
    return {part: getattr(made, part) for part in ("qweight", "qzeros", "scales", "g_idx")} | {"weight": weight}


def main(folder: Path) -> None:
    random = torch.Generator().manual_seed(0)
    layers = {name: gptq(*case, random) for name, case in CASES.items()} | {"awq": awq(folder, random)}
    about = {"libraries": f"GPTQModel {version('gptqmodel')}, {folder.name}"}
    for name, parts in layers.items():
        bits, group, _, form = CASES.get(name, (4, 32, False, 0))
        known = {"quant_method": name.partition("-")[0], "bits": bits, "group_size": group, "sha256": hash_of(parts.pop("weight"))}
        about[name] = json.dumps(known | ({"checkpoint_format": ("gptq", "gptq_v2")[form - 1]} if form else {}))
    state = {f"{name}.{part}": each.contiguous() for name, parts in layers.items() for part, each in parts.items()}
    save_file(state, FILE, about)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
