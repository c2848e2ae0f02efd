"""Every forward pass of a model during a call: when it began and ended, and what it read.

Recorded through forward hooks on the instances, which are taken off afterwards, so both sides of a comparison are measured the
same way, nothing of theirs is replaced, and what a library finds out by inspecting ``model.forward`` stays as it is.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from foredraft.models.cache_names import cache_argument


@dataclass(frozen=True)
class Pass:
    """One forward pass: ``nodes`` tokens went in behind ``start`` cached ones; ``begin`` and ``end`` in ``perf_counter`` seconds."""

    model: str
    begin: float
    end: float
    nodes: int
    start: int

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class PassRecorder:
    """Context manager that records the passes of ``models``, given by the name they are recorded under."""

    def __init__(self, **models: Any):
        self.models = models
        self.passes: list[Pass] = []
        self._handles = ExitStack()

    def __enter__(self) -> PassRecorder:
        for name, model in self.models.items():
            self._watch(name, model)
        return self

    def __exit__(self, *failure: object) -> None:
        self._handles.close()

    def _watch(self, name: str, model: Any) -> None:
        open_pass: list[tuple[float, int, int]] = []
        wait, name_of_cache = synchroniser(model.device), cache_argument(type(model))

        def before(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            tokens = arguments[0] if arguments else options["input_ids"]
            cache = options.get(name_of_cache)
            start = 0 if cache is None else int(cache.get_seq_length())
            wait()
            open_pass[:] = [(time.perf_counter(), tokens.shape[1], start)]

        def after(module: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            wait()
            end = time.perf_counter()
            begin, nodes, start = open_pass[0]
            self.passes.append(Pass(name, begin, end, nodes, start))

        for handle in (
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after, with_kwargs=True),
        ):
            self._handles.callback(handle.remove)


def synchroniser(device: torch.device) -> Any:
    """A function that waits until the device has done what it was given."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
