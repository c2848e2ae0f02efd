"""torchao's weights of eight bits, as far as the kernels in ``native`` multiply with them: integers times a scale per output.

The integers are exact in bfloat16 and float32. A product is rounded where torchao's own is: the sum, then what the scale makes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_int8(weight: Any) -> bool:
    """Whether ``weight`` is a torchao tensor with one scale per output, multiplied with activations as they are."""
    if type(weight).__name__ != "Int8Tensor" or not type(weight).__module__.startswith("torchao.") or weight.qdata.ndim != 2:
        return False
    rest = ("act_quant_kwargs", "act_quant_scale", "act_pre_scale")
    whole_rows = list(weight.block_size) == [1, weight.qdata.shape[1]] and weight.scale.numel() == weight.qdata.shape[0]
    symmetric = weight.zero_point is None or not weight.zero_point.any()
    return whole_rows and symmetric and all(getattr(weight, name, None) is None for name in rest)


def is_held(weight: Any) -> bool:
    """Whether the numbers are in memory: they were not :func:`taken`."""
    return not (weight.qdata if is_int8(weight) else weight).is_meta


def integers(weights: Sequence[Any]) -> Tensor:
    """``[N, K]`` int8 of matrices one below the other."""
    return torch.cat([weight.qdata for weight in weights])


def scales(weights: Sequence[Any]) -> Tensor:
    """``[N]`` in the dtype that the product is rounded to."""
    return torch.cat([weight.scale.flatten().to(weight.dtype) for weight in weights])


def take(weight: Any) -> None:
    """Let go of the integers; shape, scales and whatever else it knows stay."""
    weight.qdata = torch.empty_like(weight.qdata, device="meta")


def give_back(weight: Any, values: Tensor) -> None:
    """The integers that :func:`take` let go of."""
    weight.qdata = values.contiguous()
