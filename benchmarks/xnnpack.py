"""Matrix products by XNNPACK, from the shared library in ExecuTorch's wheel (``make peer-xnnpack``).

Its kernels for four bits take inputs of eight bits. Here inputs are rounded to these before the measured time.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from foredraft.errors import ConfigurationError

SPARE = 64  # values behind the end of an array: it reads some
POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t
Multiply = Callable[[Tensor], Tensor]


def found(peers: Path) -> Path | None:
    """The library under the folder of the peers."""
    return next(peers.glob("xnnpack/executorch/lib/libexecutorch_backend_xnnpack.so"), None)


def padded(data: Tensor) -> Tensor:
    """The same numbers, with others behind them."""
    return torch.cat([data.flatten(), data.new_zeros(SPARE)])[: data.numel()].view(data.shape)


def at(data: Tensor) -> ctypes.c_void_p:
    return POINTER(data.data_ptr())


class Xnnpack:
    """Raises ConfigurationError if the library does not start."""

    def __init__(self, library: Path, threads: int) -> None:
        pools = ctypes.CDLL(str(library.with_name("libexecutorch_threadpool.so")), mode=ctypes.RTLD_GLOBAL)
        pools.pthreadpool_create.restype = POINTER
        self.pool, self.library = POINTER(pools.pthreadpool_create(SIZE(threads))), ctypes.CDLL(str(library))
        self._call("initialize", None)

    def _call(self, name: str, *given: Any) -> None:
        if status := getattr(self.library, f"xnn_{name}")(*given):
            raise ConfigurationError(f"xnn_{name} of {self.library._name} failed with status {status}")

    def _operator(self, name: str, weight: Tensor, *given: Any) -> ctypes.c_void_p:
        """An operator for ``weight`` ``[outputs, inputs]``, without a bias or limits."""
        made, (outputs, inputs) = POINTER(), weight.shape
        sizes = (SIZE(inputs), SIZE(outputs), SIZE(inputs), SIZE(outputs))
        ends = (POINTER(), ctypes.c_float(-math.inf), ctypes.c_float(math.inf), ctypes.c_uint32(0), POINTER())
        self._call(f"create_fully_connected_nc_{name}", *sizes, *given, *ends, ctypes.byref(made))
        return made

    def _multiply(
        self, name: str, operator: ctypes.c_void_p, outputs: int, prepare: Callable[[Tensor], tuple[Tensor, ...]], grouped: bool
    ) -> Multiply:
        """``prepare`` makes the arrays that the operator reads. It runs when the number of tokens changes."""
        kept: list[Any] = [0, None, ()]  # tokens, results, what else must stay in memory

        def multiply(x: Tensor) -> Tensor:
            if kept[0] != len(x):
                y, (inputs, *others), room, work = torch.empty(len(x), outputs), prepare(x), SIZE(), []
                self._call(f"reshape_fully_connected_nc_{name}", operator, SIZE(len(x)), *[ctypes.byref(room)] * grouped, self.pool)
                if grouped:
                    work = [torch.empty(room.value + SPARE, dtype=torch.uint8)]
                self._call(f"setup_fully_connected_nc_{name}", operator, at(inputs), at(y), *map(at, (*work, *others)))
                kept[:] = len(x), y, (inputs, *work, *others)
            self._call("run_operator", operator, self.pool)
            return cast("Tensor", kept[1])

        return multiply

    def values(self, weight: Tensor, dtype: torch.dtype) -> Multiply:
        """Products with bfloat16 or float32. The results are float32."""
        name = "bf16_f32" if dtype == torch.bfloat16 else "f32"
        return self._multiply(name, self._operator(name, weight, at(padded(weight))), len(weight), lambda x: (padded(x),), False)

    def eights(self, weight: Tensor, dtype: torch.dtype) -> Multiply:
        """Products with int8 and a scale for each output. Inputs and results are float32."""
        integers, scales = padded(weight.qdata), weight.scale.float().flatten()  # type: ignore[attr-defined]
        operator = self._operator("f32_qc8w", weight, at(scales), at(integers))
        return self._multiply("f32_qc8w", operator, len(weight), lambda x: (padded(x.float()),), False)

    def fours(self, weight: Tensor, dtype: torch.dtype) -> Multiply:
        """Products with int4 in groups, of inputs of eight bits with a scale for each token."""
        integers, scales = (weight.qdata + 8).to(torch.uint8), weight.scale.bfloat16().contiguous()  # type: ignore[attr-defined]
        packed = padded(integers[:, ::2] | integers[:, 1::2] << 4)
        group = weight.shape[1] // scales.shape[1]
        operator = self._operator("qd8_f32_qb4w", weight, SIZE(group), ctypes.c_uint8(8), at(scales), at(packed))

        def rounded(x: Tensor) -> tuple[Tensor, ...]:
            scale = x.float().abs().amax(1, keepdim=True) / 127
            about = torch.zeros(len(x) + SPARE, 2)  # a zero point, which is an integer, and a scale
            about[: len(x), 1:] = scale
            return padded((x.float() / scale).round().to(torch.int8)), about

        return self._multiply("qd8_f32_qb4w", operator, len(weight), rounded, True)
