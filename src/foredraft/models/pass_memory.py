"""What a pass takes besides weights and cache, in bytes. It is made on torch's ``meta`` device, where tensors have no numbers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

_known: dict[Hashable, int | None] = {}


def pass_bytes(model: PreTrainedModel, rows: int, tokens: int) -> int | None:
    """The most that tensors take at once in a pass over ``rows`` texts of ``tokens`` tokens; where kernels compute it, they take less. None
    for a model that does not run without numbers, or that has an encoder."""
    if model.config.is_encoder_decoder:
        return None
    key = type(model), model.config.to_json_string(), model.dtype, model.config._attn_implementation, rows, tokens
    if key not in _known:
        try:
            _known[key] = _measured(model, rows, tokens)
        except Exception:  # what a model raises where there are no numbers has no common type
            _known[key] = None
    return _known[key]


def _measured(model: PreTrainedModel, rows: int, tokens: int) -> int:
    config = copy.deepcopy(model.config)
    scores = config._attn_implementation == "eager"
    config._attn_implementation = "eager" if scores else "sdpa"
    if config._experts_implementation is not None and config._experts_implementation != "eager":
        config._experts_implementation = "grouped_mm"  # a loop over experts looks at numbers
    with torch.device("meta"):
        made = type(model)(config).to(model.dtype).eval()  # transformers' from_config would set torch's default dtype, other threads' too
        ids, positions = torch.zeros(rows, tokens, dtype=torch.long), torch.zeros(rows, tokens, dtype=torch.long)
        mask = torch.zeros(rows, 1, tokens, tokens, dtype=model.dtype if scores else torch.bool)
    with torch.inference_mode(), Fused(), Peak() as peak:
        made(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=1)
    return peak.most


class Fused(TorchFunctionMode):
    """Attention and products by expert as on a device: no scores are kept. On ``meta``, torch would allocate them, or refuses the dtype."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            return args[0].new_empty(*args[0].shape[:-1], args[2].shape[-1])
        if getattr(function, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            return args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        return function(*args, **(kwargs or {}))


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are made inside, as long as they live; ``most`` is the most there were at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._now = 0
        self._living = set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(out):
            storage = each.untyped_storage() if isinstance(each, Tensor) else None
            if storage is not None and storage._cdata not in given | self._living:
                self._living.add(storage._cdata)
                self._now += storage.nbytes()
                self.most = max(self.most, self._now)
                weakref.finalize(storage, self._end, storage._cdata, storage.nbytes())
        return out

    def _end(self, key: int, size: int) -> None:
        self._living.discard(key)
        self._now -= size
