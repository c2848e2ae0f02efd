"""Matrix products by XNNPACK, from the shared library in ExecuTorch's wheel (``make peer-xnnpack``).

Its kernels for four bits take inputs of eight bits. Here inputs are rounded to these before the measured time.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import ConfigurationError

SPARE = 64  # numbers behind the end of an array: it reads some
UNSUPPORTED = 5  # its status where it has no kernel for a CPU
POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t
Multiply = Callable[[Tensor], Tensor]


class UnsupportedHere(Exception):
    """XNNPACK has no such kernel for this CPU."""


def found(peers: Path) -> Path | None:
    """The library under the folder of the peers."""
    return next(peers.glob("xnnpack/executorch/lib/libexecutorch_backend_xnnpack.so"), None)


def padded(data: Tensor) -> Tensor:
    """The same numbers, with others behind them."""
    return torch.cat([data.flatten(), data.new_zeros(SPARE)])[: data.numel()].view(data.shape)


def at(data: Tensor) -> ctypes.c_void_p:
    return POINTER(data.data_ptr())


class Xnnpack:
    """All products share the memory of inputs and outputs until :meth:`forget`, as those of other libraries do.

    Raises:
        ConfigurationError: the library does not start.
    """

    def __init__(self, library: Path, threads: int) -> None:
        pools = ctypes.CDLL(str(library.with_name("libexecutorch_threadpool.so")), mode=ctypes.RTLD_GLOBAL)
        pools.pthreadpool_create.restype = POINTER
        self.pool, self.library = POINTER(pools.pthreadpool_create(SIZE(threads))), ctypes.CDLL(str(library))
        self._kept: dict[Any, tuple[Tensor, ...]] = {}
        self._call("initialize", None)

    def forget(self) -> None:
        """The products so far are not computed again."""
        self._kept.clear()

    def _call(self, name: str, *given: Any) -> None:
        status = getattr(self.library, f"xnn_{name}")(*given)
        if status == UNSUPPORTED:
            raise UnsupportedHere(name)
        if status:
            raise ConfigurationError(f"xnn_{name} of {self.library._name} failed with status {status}")

    def _shared(self, key: Any, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def _multiply(
        self, name: str, weight: Tensor, *given: Any, prepare: Callable[[Tensor], tuple[Tensor, ...]], grouped: bool = False
    ) -> Multiply:
        """Products with ``weight`` ``[outputs, inputs]``, which it copies as it is told by ``given``. ``prepare`` makes the arrays that it
        reads; that is done when the number of tokens changes."""
        operator, (outputs, inputs), before = POINTER(), weight.shape, 0
        sizes = (SIZE(inputs), SIZE(outputs), SIZE(inputs), SIZE(outputs))
        ends = (POINTER(), ctypes.c_float(-math.inf), ctypes.c_float(math.inf), ctypes.c_uint32(0), POINTER())  # no bias, no limits
        addresses = [at(each) if isinstance(each, Tensor) else each for each in given]
        self._call(f"create_fully_connected_nc_{name}", *sizes, *addresses, *ends, ctypes.byref(operator))

        def multiply(x: Tensor) -> Tensor:
            nonlocal before
            (y,) = self._shared((outputs, len(x)), lambda: (torch.empty(len(x), outputs),))
            if before != len(x):
                read, *others = self._shared((name, len(x)), lambda: prepare(x))
                room, work = SIZE(), list[Tensor]()
                self._call(f"reshape_fully_connected_nc_{name}", operator, SIZE(len(x)), *[ctypes.byref(room)] * grouped, self.pool)
                if grouped:
                    work = [torch.empty(room.value + SPARE, dtype=torch.uint8)]
                    self._kept[name, "work", id(multiply)] = tuple(work)
                self._call(f"setup_fully_connected_nc_{name}", operator, at(read), at(y), *map(at, (*work, *others)))
                before = len(x)
            self._call("run_operator", operator, self.pool)
            return y

        weakref.finalize(multiply, self.library.xnn_delete_operator, operator)
        return multiply

    def values(self, weight: Tensor, dtype: torch.dtype) -> Multiply:
        """Products with bfloat16 or float32. The results are float32."""
        return self._multiply("bf16_f32" if dtype == torch.bfloat16 else "f32", weight, padded(weight), prepare=lambda x: (padded(x),))

    def eights(self, weight: Tensor, dtype: torch.dtype) -> Multiply:
        """Products with int8 and a scale for each output. Inputs and results are float32."""
        integers, scales = padded(weight.qdata), weight.scale.float().flatten()  # type: ignore[attr-defined]
        return self._multiply("f32_qc8w", weight, scales, integers, prepare=lambda x: (padded(x.float()),))

    def fours(self, weight: Tensor, dtype: torch.dtype) -> Multiply:
        """Products with int4 in groups, of inputs of eight bits with a scale for each token."""
        integers, scales = (weight.qdata + 8).to(torch.uint8), weight.scale.bfloat16().contiguous()  # type: ignore[attr-defined]
        packed = padded(integers[:, ::2] | integers[:, 1::2] << 4)
        about = SIZE(weight.shape[1] // scales.shape[1]), ctypes.c_uint8(8)  # inputs of a group, and the zero point
        return self._multiply("qd8_f32_qb4w", weight, *about, scales, packed, prepare=rounded, grouped=True)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of eight bits; and for each token a zero point and a scale, with those of the last one again behind it: it writes rows of
    a tile that has too few tokens to the last one's place."""
    scale = x.float().abs().amax(1, keepdim=True) / 127
    about = torch.cat([torch.zeros_like(scale), scale], 1)  # a zero point is an integer; that of 0 has no bits set
    return padded((x.float() / scale).round().to(torch.int8)), torch.cat([about, about[-1:].expand(SPARE, -1)])
