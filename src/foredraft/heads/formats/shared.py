"""What formats ask of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def same_weights(ours: Tensor, theirs: Tensor) -> bool | None:
    """Whether two matrices are the same, but that one may have been rounded to the other's dtype; None if one cannot be looked at, because
    the target's weights were packed away for its passes."""
    if ours.is_meta or theirs.is_meta:
        return None
    if ours.shape != theirs.shape:
        return False
    dtype = min((ours.dtype, theirs.dtype), key=lambda dtype: torch.finfo(dtype).bits)
    return torch.equal(ours.detach().to("cpu", dtype), theirs.detach().to("cpu", dtype))
