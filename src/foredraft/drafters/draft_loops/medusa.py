"""The whole draft of one greedy row by Medusa's heads in one call of a kernel: their logits, what successors add, and the tree."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.backends import native
from foredraft.backends.native_growth import WIDEST, Grower
from foredraft.backends.packing import Packing
from foredraft.backends.products import NATIVE, Product, padded_size
from foredraft.heads.medusa import MedusaHead
from foredraft.heads.ngram_log_odds import SHARES, NgramLogOdds


class MedusaGrowth(Grower):
    """Grows trees below the text of the only row. Before each call it is told what the heads read: :attr:`state` ``[d]``, and the latest
    tokens of the text as an array, :attr:`text`.

    Args:
        head: in the target's dtype.
        layers: the matrices of its residual layers, head by head.
        lm_heads: the products of its LM heads.
        successors: on the CPU, or None.
        heed: what followed in the text so far counts as well.
    """

    def __init__(
        self, head: MedusaHead, layers: Sequence[native.Matrix], lm_heads: Sequence[Product], successors: NgramLogOdds | None, *, heed: bool
    ):
        config = head.config
        size = config.target.hidden_size
        self.state, self.text = torch.empty(0), np.empty(0, np.int64)
        self._shares = (ctypes.c_float * len(SHARES))(*SHARES)
        lists = successors.lists if successors is not None else ()
        weights = successors.weights if successors is not None else ()
        fields = ("contexts", "first", "tokens", "odds")
        self._kept = [[getattr(each, name).contiguous() for name in fields] for each in lists]
        self._lists = (native.Lists * max(1, len(lists)))(
            *(native.Lists(*(tensor.data_ptr() for tensor in kept), len(kept[0])) for kept in self._kept)
        )
        self._weights = (ctypes.c_float * config.heads)(
            *(weights[min(k, len(weights) - 1)] if weights else 0.0 for k in range(config.heads))
        )
        self._matrices = tuple((native.Matrix * len(group))(*group) for group in (layers, [each.matrix for each in lm_heads]))
        columns = lm_heads[0].packed_outputs
        like = torch.empty(0, dtype=lm_heads[0].dtype)
        self._about_heads = native.Medusa(
            layers=ctypes.addressof(self._matrices[0]),
            lm_heads=ctypes.addressof(self._matrices[1]),
            hidden=size,
            count=config.layers,
            vocabulary=config.target.vocab_size,
            lists=ctypes.addressof(self._lists),
            weights=ctypes.addressof(self._weights),
            reach=len(lists),
            heed=heed,
            shares=ctypes.addressof(self._shares),
        )
        about = native.Growth(medusa=ctypes.addressof(self._about_heads), missed=1)
        super().__init__(native.library(like.dtype), native.Layer(hidden=size), lm_heads[0], like, about)
        scratch = {"x": like.new_empty(size), "y": like.new_empty(size), "own": like.new_empty(columns)}
        for name, tensor in scratch.items():
            setattr(self._about_heads, name, tensor.data_ptr())
        self._scratch_heads = list(scratch.values())
        self._read = torch.empty(2, 0, dtype=torch.int64)

    @staticmethod
    def fits(head: MedusaHead) -> bool:
        """Whether the kernel is made for such heads."""
        size = head.config.target.hidden_size
        return head.config.lm_head == "own" and padded_size(size) == size

    @staticmethod
    def of(head: MedusaHead, packing: Packing | None, successors: NgramLogOdds | None, *, heed: bool) -> MedusaGrowth | None:
        """For ``head``, or None if its sizes, options or packed weights are not those that the kernel is made for."""
        if packing is None or not MedusaGrowth.fits(head):
            return None
        layers = [packing.matrix(layer) for block in head.blocks for layer in block.layers]  # type: ignore[union-attr]
        lm_heads = [packing.product(each) for each in head.lm_heads]
        matrices = [each for each in layers if each is not None]
        products = [each for each in lm_heads if each is not None and each.hint == NATIVE]
        if len(matrices) < len(layers) or len(products) < len(lm_heads):
            return None
        return MedusaGrowth(head, matrices, products, successors, heed=heed)

    def _begin(self, ids: Sequence[int], widest: int, nodes: int, vocab_size: int) -> Any:
        about, heads = self._about, self._about_heads
        if self._read.shape[1] < 1 + nodes:
            self._read = torch.empty(2, 1 + nodes, dtype=torch.int64)
            self._room: tuple[Tensor, ...] = (
                self._like.new_empty(WIDEST, self.head.packed_outputs),
                torch.empty(WIDEST, dtype=torch.int32),
                torch.empty(2, dtype=torch.int32),
            )
            heads.read, heads.above = (each.data_ptr() for each in self._read)
            about.logits, about.slots, about.begins = (each.data_ptr() for each in self._room)
        self._pass.threads = torch.get_num_threads()
        self._state = self.state.to(self._like.dtype).contiguous()
        heads.state, heads.text, heads.length = self._state.data_ptr(), self.text.ctypes.data, len(self.text)
        about.vocab, about.most = min(vocab_size, self.head.outputs), nodes + 1
        return (ctypes.c_int64 * 1)(ids[-1])
