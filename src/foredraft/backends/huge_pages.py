"""Memory for weights in huge pages, if the OS provides them: a pass reads hundreds of megabytes, and small pages cause many TLB misses.

Memory that a program has used before cannot become huge pages in time, and an allocator hands out such memory first. So this is new memory
of the OS. Small tensors share a chunk, which is returned to the OS when none of them is left.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

PAGE = 2 << 20  # bytes of a huge page on most machines; harmless where it is another size
CHUNK = 32 << 20  # larger tensors have a chunk of their own
LINE = 64  # each tensor begins with a cache line

_lock = threading.Lock()
_free = torch.empty(0, dtype=torch.uint8)  # what is left of the chunk in use


def room(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor on the CPU.

    Raises:
        MemoryError: there is no memory for it.
    """
    global _free
    size = math.prod(shape) * dtype.itemsize
    with _lock:
        if size > CHUNK:
            found = _chunk(size)
        else:
            if len(_free) < size:
                _free = _chunk(CHUNK)
            found, _free = _free[:size], _free[-(-size // LINE) * LINE :]
    return found.view(dtype).view(tuple(shape))


def moved(values: Tensor) -> Tensor:
    """A contiguous copy of ``values``."""
    return room(values.shape, values.dtype).copy_(values)


def _chunk(size: int) -> Tensor:
    try:
        memory = mmap.mmap(-1, size + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # pages that are never touched take no memory
    except OSError as error:
        raise MemoryError(f"out of memory: {size / 1e6:.0f} MB for weights") from error
    if (advice := getattr(mmap, "MADV_HUGEPAGE", None)) is not None:
        with suppress(OSError):  # an OS that has no huge pages
            memory.madvise(advice)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -raw.data_ptr() % PAGE
    return raw[begin : begin + size]
