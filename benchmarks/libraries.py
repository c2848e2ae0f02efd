"""One matrix product by the kernels, by the libraries that torch has on board, and by XNNPACK, for each kind of weights.

A product over a few tokens is bound by how fast its weights are read from memory. So each side has as many copies of the matrix as do not
fit into a cache, and multiplies with one after the other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.report import Table
from benchmarks.xnnpack import Multiply, UnsupportedHere, Xnnpack
from foredraft import quantization
from foredraft.backends.packing import onednn_lays_out
from foredraft.backends.products import NATIVE, ONEDNN, Product
from foredraft.errors import ConfigurationError
from foredraft.estimates import Spread, turned

OURS = "ours"
COPIES = 256 << 20  # bytes of weights of one side, about
FEW = 16  # tokens up to which all copies are read; behind them reading is little beside computing
GROUP = 128  # weights of four bits that share a scale
PAUSE = 0.02  # seconds before a side is timed: threads of the others may wait for work in a loop
OFF = 0.03  # of the largest result, that one may be off
NOTE = (
    "Products: medians, in turns. Each side has some 256 MB of copies of the matrix and multiplies with one after the other, so that "
    "weights come from memory. oneDNN has its own layout of the weights; for bfloat16 it needs AVX-512. torch's int8 is "
    "`_weight_int8pack_mm`, its int4 `_weight_int4pack_mm_for_cpu` in groups of 128, which has no fast path in float32. XNNPACK is the one "
    "in ExecuTorch's wheel, if `make peer-xnnpack` has installed it and it has a kernel for the CPU. Its results are float32; int8 "
    "inputs are made before the measured time. KleidiAI is for ARM alone."
)


@dataclass(frozen=True)
class Timing:
    """Seconds of one product with a matrix of ``outputs`` x ``inputs`` over so many tokens."""

    kind: str
    side: str
    outputs: int
    inputs: int
    tokens: int
    repeat: int
    seconds: float


def ours(weight: Tensor, dtype: torch.dtype) -> Multiply:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return Product([layer], NATIVE)


def in_torch(weight: Tensor, dtype: torch.dtype) -> Multiply:
    return lambda x: nn.functional.linear(x, weight)


def in_onednn(weight: Tensor, dtype: torch.dtype) -> Multiply:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ONEDNN)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def eights_in_torch(weight: Tensor, dtype: torch.dtype) -> Multiply:
    integers, scales = weight.qdata.contiguous(), weight.scale.flatten().to(dtype)  # type: ignore[attr-defined]
    return lambda x: torch._weight_int8pack_mm(x, integers, scales)


def fours_in_torch(weight: Tensor, dtype: torch.dtype) -> Multiply:
    integers, scales = (weight.qdata + 8).to(torch.int32), weight.scale.T.to(dtype)  # type: ignore[attr-defined]
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 2)
    beside = torch.stack([scales, torch.zeros_like(scales)], 2).contiguous()  # what stands for 8 is 0
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, beside)


@dataclass(frozen=True)
class Kind:
    """Weights, what ``bytes`` one of them takes, and who multiplies with them."""

    dtype: torch.dtype
    quantization: str | None
    bytes: float
    sides: dict[str, Callable[[Tensor, torch.dtype], Multiply]]
    in_xnnpack: tuple[str, Callable[[Xnnpack, Tensor, torch.dtype], Multiply]]

    def here(self, xnnpack: Xnnpack | None) -> dict[str, Callable[[Tensor, torch.dtype], Multiply]]:
        """The sides that this CPU can run."""
        sides = {name: make for name, make in self.sides.items() if make is not in_onednn or onednn_lays_out(self.dtype)}
        return sides | ({self.in_xnnpack[0]: partial(self.in_xnnpack[1], xnnpack)} if xnnpack else {})

    def weights(self, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
        """A matrix, and the same as plain numbers."""
        plain = (torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs + inputs)) / math.sqrt(inputs)).to(self.dtype)
        if self.quantization is None:
            return plain, plain.float()
        made = quantization.quantized(plain, self.quantization)
        return made, made.dequantize().float()


KINDS = {
    "bfloat16": Kind(torch.bfloat16, None, 2, {OURS: ours, "oneDNN, packed": in_onednn, "torch": in_torch}, ("XNNPACK", Xnnpack.values)),
    "float32": Kind(
        torch.float32, None, 4, {OURS: ours, "oneDNN, packed": in_onednn, "torch (MKL)": in_torch}, ("XNNPACK", Xnnpack.values)
    ),
    "int8, bfloat16": Kind(
        torch.bfloat16, "int8", 1, {OURS: ours, "torch's int8": eights_in_torch}, ("XNNPACK, float32 inputs", Xnnpack.eights)
    ),
    "int4, bfloat16": Kind(
        torch.bfloat16, f"int4-{GROUP}", 0.5, {OURS: ours, "torch's int4": fours_in_torch}, ("XNNPACK, int8 inputs", Xnnpack.fours)
    ),
}


def timings(sizes: list[tuple[int, int]], tokens: list[int], repeats: int, xnnpack: Xnnpack | None = None) -> Iterator[list[Timing]]:
    """Of every kind of weights and size of a matrix; the sides take turns.

    Raises:
        ConfigurationError: a side has another result than the weights as plain numbers.
    """
    for name, kind in KINDS.items():
        for outputs, inputs in sizes:
            weight, plain = kind.weights(outputs, inputs)
            x = torch.randn(max(tokens), inputs, generator=torch.Generator().manual_seed(0)).to(kind.dtype)
            expected = x.float() @ plain.T
            if xnnpack:
                xnnpack.forget()
            copies = max(1, round(COPIES / (outputs * inputs * kind.bytes)))
            sides: dict[str, list[Multiply]] = {}
            for side, make in kind.here(xnnpack).items():
                try:
                    sides[side] = [make(weight.clone(), kind.dtype) for _ in range(copies)]
                except UnsupportedHere:
                    continue
                off = float((sides[side][0](x).float() - expected).abs().max() / expected.abs().max())
                if not off <= OFF:
                    raise ConfigurationError(
                        f"{side} multiplies {name} of {outputs}x{inputs} wrongly: off by {off:.2g} of the largest result"
                    )
            found = []
            for count in tokens:
                used = copies if count <= FEW else max(1, copies * FEW // count)
                for repeat in range(repeats + 1):  # the first is the warm-up
                    for side in turned(list(sides), repeat):
                        time.sleep(PAUSE)
                        begin = time.perf_counter()
                        for multiply in sides[side][:used]:
                            multiply(x[:count])
                        seconds = (time.perf_counter() - begin) / used
                        if repeat:
                            found.append(Timing(name, side, outputs, inputs, count, repeat, seconds))
            yield found


def tables(found: list[Timing]) -> list[Table]:
    """A table for each kind of weights."""
    made = []
    for kind in dict.fromkeys(each.kind for each in found):
        some = [each for each in found if each.kind == kind]
        tokens = list(dict.fromkeys(each.tokens for each in some))
        lines = []
        for outputs, inputs in dict.fromkeys((each.outputs, each.inputs) for each in some):
            for side in dict.fromkeys(each.side for each in some):
                cells = []
                for count in tokens:
                    key = (outputs, inputs, count)
                    ours, its = (
                        [each.seconds for each in some if (each.outputs, each.inputs, each.tokens) == key and each.side == name]
                        for name in (OURS, side)
                    )
                    over = "" if side == OURS else f"; {Spread.of([b / a for a, b in zip(ours, its)]).text()}"
                    cells.append(f"{Spread.of(its).median * 1e6:.0f}{over}")
                lines.append((f"{outputs}×{inputs}", side, *cells))
        title = f"Microseconds of a product, {kind}, by tokens; and how often as long as ours"
        made.append(Table(title, ("outputs×inputs", "by", *map(str, tokens)), lines))
    return made
