"""Keys and values of an EAGLE-3 head's one layer, for rows that stand at different offsets, and what a tree in front of them may see."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from foredraft.device import to_device
from foredraft.heads.eagle3_layer import Entered
from foredraft.tree import TokenTree

SMALLEST = 256  # slots


class LayerCache:
    """One buffer ``[2, rows, K, slots, h]``: the place of a key is its position in the text. It doubles when it is too short.

    ``lengths[r]`` keys of row r stand for its text; what lies behind is a draft's, and is written over.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._buffer: Tensor | None = None

    def open(self, rows: int) -> None:
        """So many more rows, with nothing in them."""
        self.lengths += [0] * rows
        if self._buffer is not None:
            self._buffer = pad(self._buffer, (0, 0, 0, 0, 0, 0, 0, rows))

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows, in this order."""
        if list(rows) == list(range(len(self.lengths))):
            return
        self.lengths = [self.lengths[row] for row in rows]
        if self._buffer is not None:
            self._buffer = self._buffer[:, to_device(list(rows), self._buffer.device)] if rows else None

    def write(self, keys: Tensor, values: Tensor, begins: Sequence[int], *, row: int | None = None) -> None:
        """``keys`` and ``values`` ``[R, n, K, h]`` from slot ``begins[r]`` of each row on; of one ``row`` alone if it is given."""
        count = keys.shape[1]
        buffer = self.reserve(max(begins) + count, keys)
        both = torch.stack([keys, values])  # [2, R, n, K, h]
        if row is not None:
            buffer[:, row : row + 1, :, begins[0] : begins[0] + count] = both.transpose(2, 3)
        elif min(begins) == max(begins):
            buffer[:, :, :, begins[0] : begins[0] + count] = both.transpose(2, 3)
        else:
            slots = to_device(list(begins), keys.device)[:, None] + torch.arange(count, device=keys.device)
            rows = torch.arange(len(begins), device=keys.device)[:, None]
            buffer[:, rows, :, slots] = both.permute(1, 2, 0, 3, 4)

    def reserve(self, slots: int, like: Tensor) -> Tensor:
        """The buffer, with that many slots at least, for keys like ``like`` ``[.., .., K, h]``."""
        buffer = self._buffer
        if buffer is None:
            shape = (2, len(self.lengths), like.shape[2], max(SMALLEST, 1 << (slots - 1).bit_length()), like.shape[3])
            buffer = self._buffer = like.new_zeros(shape)
        elif buffer.shape[3] < slots:
            buffer = self._buffer = pad(buffer, (0, 0, 0, (1 << (slots - 1).bit_length()) - buffer.shape[3]))
        return buffer

    def attend(self, queries: Tensor, span: int, mask: Tensor | None) -> Tensor:
        """``[R, n, H * h]``: what ``queries`` ``[R, n, H, h]`` see of the first ``span`` slots under ``mask`` ``[R, 1, n, span]``; all of
        them without one. The heads that share keys become queries of one head."""
        assert self._buffer is not None
        rows, count, heads, size = queries.shape
        groups = self._buffer.shape[2]
        shared = heads // groups
        grouped = queries.view(rows, count, groups, shared, size).permute(0, 2, 3, 1, 4).reshape(rows, groups, shared * count, size)
        if mask is not None and shared > 1:
            mask = mask[:, :, None].expand(rows, 1, shared, count, span).reshape(rows, 1, shared * count, span)
        keys, values = self._buffer[0, :, :, :span], self._buffer[1, :, :, :span]
        seen = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return seen.view(rows, groups, shared, count, size).permute(0, 3, 1, 2, 4).reshape(rows, count, heads * size)

    def add_text(self, entered: Entered, counts: Sequence[int]) -> None:
        """Behind each row's text the keys of ``counts[r]`` more tokens, the first ones of ``entered``."""
        self.write(entered.keys, entered.values, self.lengths)
        self.lengths = [length + count for length, count in zip(self.lengths, counts)]


def root_mask(lengths: Sequence[int], device: torch.device) -> Tensor | None:
    """``[R, 1, 1, span]`` bool: each row's text; None if all are as long."""
    if min(lengths) == max(lengths):
        return None
    return (torch.arange(max(lengths), device=device) < to_device(list(lengths), device)[:, None])[:, None, None]


def tree_mask(tree: TokenTree, first: int, begins: Sequence[int]) -> Tensor | None:
    """``[R, 1, n, span]`` bool for the nodes ``first``.. of a tree whose root stands in slot ``begins[r]``, node i in the i-th behind it:
    the text before the root, and a node's ancestors. None if that is everything."""
    same = min(begins) == max(begins)
    if same and tree.nodes - first == 1 and tree.chain:
        return None
    ancestors = tree.ancestors[:, first:]  # [R, n, N]
    if same:
        return pad(ancestors, (begins[0], 0), value=True)[:, None]
    device, span = ancestors.device, max(begins) + tree.nodes
    node = torch.arange(span, device=device) - to_device(list(begins), device)[:, None]  # [R, span], below 0 in the text
    where = node.clamp(0, tree.nodes - 1)[:, None].expand(-1, ancestors.shape[1], -1)
    seen = ancestors.gather(2, where) & (node < tree.nodes)[:, None]
    return (seen | (node < 0)[:, None])[:, None]
