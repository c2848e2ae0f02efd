"""A recorder for a CPU that behaves as CUDA graphs do, so that what would go wrong there goes wrong here.

Every operation is recorded with the very tensors it was called with. A replay does the operations again on those tensors and writes what
comes out into the tensors that came out when it was recorded; no Python runs. So a number that Python knew is baked in, and a tensor that
was made for the occasion stays what it was. What would wait for the device, or read host memory, raises as it does under capture. What is
neither input nor output is spoilt between replays, as memory is that graphs share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

WAITS = {  # operators whose result's shape or value the host has to wait for
    "_local_scalar_dense", "item", "is_nonzero", "nonzero", "nonzero_static", "masked_select", "unique_dim", "_unique2", "equal",
    "unique_consecutive", "bincount", "allclose", "argwhere", "tensor_split", "_unique",
}  # fmt: skip
FROM_HOST = {"pin_memory", "_pin_memory"}
HOST_METHODS = {"tolist", "numpy", "item", "cpu", "pin_memory", "__bool__", "__int__", "__float__", "__index__", "__array__"}
FROM_HOST_FUNCTIONS = {"tensor", "as_tensor", "from_numpy", "manual_seed"}


class Forbidden(RuntimeError):
    """What a graph cannot hold."""


class HostWatch(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in HOST_METHODS or name in FROM_HOST_FUNCTIONS:
            raise Forbidden(f"{name} would wait for the device, or read host memory, while it is recorded")
        return function(*args, **(kwargs or {}))


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []
        self.made: dict[int, Tensor] = {}  # by storage

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name in WAITS or name in FROM_HOST:
            raise Forbidden(f"{name} would wait for the device, or read host memory, while it is recorded")
        if name in ("index", "index_put", "index_put_") and any(
            isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        ):
            raise Forbidden("an index of bools would wait for the device to count them")
        if name == "repeat_interleave" and isinstance(args[-1], Tensor) and kwargs.get("output_size") is None:
            raise Forbidden("repeat_interleave would wait for the device to add the repeats up")
        out = function(*args, **kwargs)
        given = {storage(each) for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)}
        fresh = [(i, each) for i, each in enumerate(tree_flatten(out)[0]) if isinstance(each, Tensor) and storage(each) not in given]
        self.made.update({storage(each): each for _, each in fresh})
        self.steps.append((function, args, kwargs, fresh))
        return out


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def spoil(tensor: Tensor) -> None:
    everything = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    if tensor.is_floating_point() or tensor.is_complex():
        everything.fill_(float("nan"))
    else:
        everything.fill_(tensor.dtype == torch.bool or torch.iinfo(tensor.dtype).max)


class Tape:
    """Stands in for a :class:`foredraft.backends.recorder.CudaRecorder`.

    Attributes:
        recordings, replays: how many there were, of all tapes since :meth:`clear`.
    """

    recordings = replays = 0

    @classmethod
    def clear(cls) -> None:
        cls.recordings = cls.replays = 0

    def capture(self, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        run()  # warm
        with HostWatch(), Recording() as tape:
            outputs = run()
        Tape.recordings += 1
        keep = {storage(each) for each in outputs}
        between = [each for name, each in tape.made.items() if name not in keep]

        def replay() -> None:
            Tape.replays += 1
            for function, args, kwargs, fresh in tape.steps:
                found = tree_flatten(function(*args, **kwargs))[0]
                for place, goal in fresh:
                    goal.copy_(found[place])
            for each in between:
                spoil(each)

        for each in (*between, *outputs):  # what a graph records it does not do
            spoil(each)
        return replay, outputs

    def reset(self) -> None:
        pass
