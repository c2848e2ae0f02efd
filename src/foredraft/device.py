"""What torch needs to be told of devices: copies that do not wait, and when a second thread of the host is not worth its noise."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def to_device(values: Sequence[int] | Sequence[Sequence[int]] | Tensor, device: torch.device) -> Tensor:
    """Host integers as an int64 tensor, copied without waiting for the device: a copy from memory that is not pinned would end whatever
    runs there first."""
    host = torch.as_tensor(values, dtype=torch.long, device="cpu")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def wait_for(device: torch.device) -> None:
    """Return when ``device``, a GPU of whatever make or the CPU, has done all that it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def default_device() -> str:
    """Where a model given by name is loaded unless somebody says otherwise: a CUDA GPU if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


NORESERVE = 0x4000  # ``MAP_NORESERVE`` of Linux, which :mod:`mmap` has since Python 3.13
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


def can_reserve() -> bool:
    """Whether :func:`reserved` takes no memory before it is written to: on Linux, unless it counts all that programs ask for."""
    try:
        return sys.platform == "linux" and OVERCOMMIT.read_text().strip() != "2"
    except OSError:
        return False


def reserved(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor of zeros on the CPU whose memory counts only once it is written to, if :func:`can_reserve`. So it may be larger than
    the memory of the machine, and a process that has one can still fork, which is refused with such a tensor of :func:`torch.empty`.

    Raises:
        OSError: there are not so many addresses.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def host_by_default(device: torch.device) -> AbstractContextManager[object]:
    """Inside, for a model on the CPU, tensors that name no device are there too, whatever ``torch.set_default_device`` says."""
    away = device.type == "cpu" and torch.get_default_device().type != "cpu"
    return torch.device("cpu") if away else nullcontext()


def autocast_on(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast computes in on ``device``; None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Inside, a model on ``device`` computes in its own dtype."""
    return nullcontext() if autocast_on(device) is None else torch.autocast(device.type, enabled=False)


SOFT = 1  # ``omp_pause_soft``
CGROUPS = (  # where versions 2 and 1 say a container's limit, what it uses, and how much of that are files that can be dropped
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
SMALL = 1 << 21  # elements that one thread has worked through before a second one would have gained what it costs


@contextmanager
def one_thread(values: Tensor) -> Iterator[None]:
    """Inside, tensor operations of the calling thread use no other threads, if ``values`` are few and on a CPU.

    After an operation by several threads, those of OpenMP wait for the next one in a loop, for milliseconds, on the cores that the
    kernels' threads need for the target's pass. Other threads of the program, and new ones, are not affected, as they would be by
    :func:`torch.set_num_threads`. Does nothing where the OpenMP library that torch uses is not found.
    """
    openmp = _openmp() if values.device.type == "cpu" and values.numel() < SMALL else None
    if openmp is None:
        yield
        return
    threads = torch.get_num_threads()
    outside = _outside.threads
    _outside.threads = outside or threads
    openmp.omp_set_num_threads(1)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(threads)
        _outside.threads = outside


class _Outside(threading.local):
    threads = 0  # of this thread outside all :func:`one_thread`, 0 outside


_outside = _Outside()


def host_threads() -> int:
    """How many threads torch uses, as it was set, also inside :func:`one_thread`."""
    return _outside.threads or torch.get_num_threads()


def end_waiting() -> None:
    """End OpenMP's threads that the calling thread has used for torch's operations, which starts them anew with the next one by several
    threads: they would wait for it as :func:`one_thread` says. Does nothing where the OpenMP library that torch uses is not found, or is
    older than OpenMP 5."""
    pause = getattr(_openmp(), "omp_pause_resource_all", None)
    if pause is not None:
        pause(SOFT)


@cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch has loaded; None if there is none."""
    if not hasattr(os, "RTLD_NOLOAD"):  # Windows
        return None
    bundled = sorted(str(path) for path in (Path(torch.__file__).parent / "lib").glob("lib*omp*"))
    for name in (*bundled, "libgomp.so.1", "libomp.so.5", "libiomp5.so"):
        try:
            found = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            set_threads = found.omp_set_num_threads
        except (OSError, AttributeError):
            continue
        set_threads.argtypes, set_threads.restype = [ctypes.c_int], None
        threads = torch.get_num_threads()
        set_threads(threads + 1)
        heard = torch.get_num_threads() == threads + 1
        set_threads(threads)
        if heard:
            return found
    return None


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes of main memory that are free or can be made so, within the limit of the container if there is one; None where the system does
    not say. ``root`` is where Linux's files about that are looked for."""
    try:
        found = [1024 * _numbers(root / "proc/meminfo")["MemAvailable:"]]
    except (OSError, KeyError):
        return None
    for most, now, about, cached in CGROUPS:
        with suppress(OSError, KeyError, ValueError):  # no container, or one without a limit
            limit, used = (int((root / "sys/fs/cgroup" / name).read_text()) for name in (most, now))
            found.append(max(0, limit - used + _numbers(root / "sys/fs/cgroup" / about)[cached]))
    return min(found)


def free_memory_of(device: torch.device) -> int | None:
    """The same of the memory of ``device``, a GPU's or main memory. What torch has reserved there and does not use is free."""
    if device.type != "cuda":
        return free_memory()
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _numbers(path: Path) -> dict[str, int]:
    """What Linux lists in a file, a name and a number per line."""
    return {line.split()[0]: int(line.split()[1]) for line in path.read_text().splitlines()}


def spread(model: Any) -> bool:
    """Whether a device map has put ``model`` on several devices."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
