"""Recording what a function does on a device, to do it again without Python: CUDA graphs.

A recorded function reads its inputs from tensors that stay where they are, and leaves its outputs in tensors that stay where they are.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

WARM_UP = 1  # runs before the one that is checked for waiting; libraries initialize themselves in them
CHECKING = threading.Lock()  # torch's mode and Python's warnings are those of the process

Outputs = tuple[Tensor, ...]


class CudaRecorder:
    """CUDA graphs on one device, with memory that they share: they are replayed one after the other, on one stream.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def capture(self, run: Callable[[], Outputs]) -> tuple[Callable[[], Any], Outputs]:
        """A function that replays ``run``, and the tensors that hold its outputs afterwards. ``run`` is called several times first.

        Raises:
            Exception: whatever the device, or a function that waits for it, raises.
        """
        with torch.cuda.device(self.device):
            self._warm_up(run)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
                    outputs = run()
            except BaseException:
                torch.cuda.set_stream(current)  # a recording that became invalid can leave its own stream in use
                raise
        return graph.replay, outputs

    def reset(self) -> None:
        """Recordings so far are not replayed any more; their memory may be freed."""
        torch.cuda.synchronize(self.device)  # what is dropped may still be running
        self._pool = None  # a pool without recordings cannot be used again

    def _warm_up(self, run: Callable[[], Outputs]) -> None:
        """Run on the stream that is recorded later. A function that waits for the device fails here, before anything is recorded."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                for _ in range(WARM_UP):
                    run()
                with no_waiting():
                    run()
        finally:
            current.wait_stream(self.stream)  # the passes wrote to the cache


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raises RuntimeError in the end if this thread has waited for a CUDA device inside. Other threads may wait: torch's mode "error" would
    end what they are generating."""
    thread, waits = threading.get_ident(), list[str]()
    with CHECKING, warnings.catch_warnings():
        shown = warnings.showwarning

        def note(message: Any, *about: Any, **named: Any) -> None:
            if "synchronizing CUDA operation" not in str(message):
                shown(message, *about, **named)
            elif threading.get_ident() == thread:
                waits.append(str(message))

        warnings.simplefilter("always")
        warnings.showwarning = note
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    if waits:
        raise RuntimeError(waits[0])


class Witness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the tensors that a function reads and did not make itself."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[int, Tensor] = {}  # by storage, as long as it lives
        self._made: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        self.found.update({key: each for each in given if (key := _storage(each)) not in self._made})
        out = function(*args, **(kwargs or {}))
        self._made.update(key for each in tree_flatten(out)[0] if isinstance(each, Tensor) and (key := _storage(each)) not in self.found)
        return out


def _storage(tensor: Tensor) -> int:
    """The key of a tensor's storage; that of a subclass that wraps others, such as a quantised weight, is the subclass itself."""
    return tensor.untyped_storage()._cdata if type(tensor) in (Tensor, torch.nn.Parameter) else id(tensor)


def inputs_of(run: Callable[[], Outputs]) -> list[Tensor]:
    """Every tensor that ``run``, which was recorded, reads and did not make. A recording knows them by address, so constants of torch, of
    the model or of our caches have to live as long as it does."""
    with Witness() as witness:
        run()
    return list(witness.found.values())


def recorder_for(device: torch.device) -> CudaRecorder | None:
    """None where nothing can be recorded."""
    return CudaRecorder(device) if device.type == "cuda" else None
