"""Block masks for FlexAttention, made from token trees: the mask as a function that the kernel evaluates.

A query sees the prefix, and those slots whose node's bit is set in its words of ancestor bits. Windows are
transformers' own mask functions over positions, as in masks.py. No tensor is as large as nodes x slots, except for windows, whose blocks
are found by evaluating them once per pass and layer type. Shapes are padded to a few buckets: one compiled kernel serves many rounds.

Where keys and values are in pages, a block of the mask is a page, and the mask function looks up which slots of a row a page holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad
from transformers import AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import causal_mask_function

from foredraft.models.cache import Window
from foredraft.models.pages import PAGE
from foredraft.tree import TokenTree, static_ancestors

NAME = "foredraft_flex"
BLOCK = 128  # slots, and queries, per block of the mask
SHIFT = 6
WORD = 1 << SHIFT  # nodes per word of ancestor bits
FEWEST = 16  # queries of the smallest kernel
FINE = 8192  # spans are powers of two up to here, then multiples of half of it

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # row, head, query, slot -> bool


def queries_of(nodes: int) -> int:
    """The queries of the kernel that serves ``nodes``: the next power of two."""
    return max(FEWEST, 1 << (nodes - 1).bit_length())


def span_of(width: int) -> int:
    """The slots of the kernel that serves keys up to ``width``: few sizes, and at most twice as many or half of ``FINE`` more."""
    return max(4 * BLOCK, 1 << (width - 1).bit_length()) if width <= FINE else -(-width // (FINE // 2)) * (FINE // 2)


@dataclass(frozen=True, eq=False)
class Spanned(Window):
    """A window whose keys are returned up to a whole span; slots after the last one written are masked."""

    @cached_property
    def width(self) -> int:
        return span_of(max(self.starts) + self.nodes)


def spanned(window: Window) -> Spanned:
    return Spanned(window.first, window.last, window.starts, window.nodes, window.before, window.counts)


@dataclass(frozen=True, eq=False)
class TreeMask:
    """What a slot's visibility depends on. ``Q`` queries are the ``nodes`` of the pass and filler; ``T`` nodes fill whole words.

    Attributes:
        queries: ``[R, N]`` positions of the nodes of this pass.
        starts: ``[R]`` int32, the slot of each row's root.
        before: nodes of the tree that earlier passes wrote.
        span: slots that the keys span.
        block: slots per block.
        padded: ``[R, Q]`` int32 positions of the queries.
        positions: ``[R, T]`` int32 positions of all nodes so far, None for a chain: its slots are its positions.
        bits: ``[R, Q, T / 64]`` int64; bit ``j`` of a query's words says that node ``j`` is its ancestor or itself. None for a chain.
    """

    queries: Tensor
    starts: Tensor
    before: int
    span: int
    block: int
    padded: Tensor
    positions: Tensor | None
    bits: Tensor | None

    @property
    def nodes(self) -> int:
        return self.queries.shape[1]

    def visible(self) -> Mask:
        """The prefix, and a node's ancestors and itself."""
        if self.bits is None:
            first = self.starts + self.before

            def in_chain(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
                return slot <= first[row] + query

            return in_chain
        starts, bits, limit = self.starts, self.bits, WORD * self.bits.shape[2]

        def in_tree(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
            node = slot - starts[row]
            inside = node.clamp(0, limit - 1)
            ancestor = (bits[row, query, inside >> SHIFT] >> (inside & (WORD - 1))) & 1
            return (node < 0) | ((node < limit) & (ancestor == 1))

        return in_tree

    def within(self, window: Mask) -> Mask:
        """transformers' mask function ``window`` over positions instead of slots."""
        starts, queries, nodes = self.starts, self.padded, self.positions
        if nodes is None:
            return lambda row, head, query, slot: window(row, head, queries[row, query], slot)
        limit = nodes.shape[1]

        def in_window(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
            node = slot - starts[row]
            key = torch.where(node < 0, slot, nodes[row, node.clamp(0, limit - 1)])
            return window(row, head, queries[row, query], key)

        return in_window

    @cached_property
    def whole(self) -> BlockMask:
        """The mask of layers without a window. Its blocks follow from ``starts``, so the mask function is not evaluated here."""
        ends = self._ends
        blocks = torch.arange(self.span // self.block, dtype=torch.int32, device=ends.device)
        full = (self.starts // self.block)[:, None].expand_as(ends)  # blocks that lie in the prefix
        partial = (ends + self.block - 1) // self.block - full
        listed = (full[..., None] + blocks).clamp(max=len(blocks) - 1)
        return self._block_mask(self.visible(), partial, listed, full, blocks.expand(*full.shape, -1))

    def windowed(self, window: Mask) -> BlockMask:
        """The mask of layers with a window, which is evaluated once to find the blocks that any query sees."""
        visible, within = self.visible(), self.within(window)
        device, count, block = self.starts.device, self.span // self.block, self.block
        rows = torch.arange(len(self.starts), device=device)[:, None, None]
        zero = torch.zeros(1, 1, 1, dtype=torch.long, device=device)
        slots = torch.arange(self.span, device=device)[None, None]
        seen = within(rows, zero, torch.arange(self.padded.shape[1], device=device)[None, :, None], slots)  # [R, Q, span]
        height = min(BLOCK, self.padded.shape[1])
        seen = seen.expand(len(rows), -1, -1).reshape(len(rows), -1, height, count, block)  # blocks by blocks
        blocks = torch.arange(count, device=device)
        written = block * blocks < self._ends[..., None]  # [R, query blocks, slot blocks]
        full = seen.all(4).all(2) & (block * (blocks + 1) <= self.starts[:, None, None])
        partial = seen.any(4).any(2) & written & ~full
        return self._block_mask(lambda b, h, q, k: visible(b, h, q, k) & within(b, h, q, k), *_listed(partial), *_listed(full))

    @property
    def _ends(self) -> Tensor:
        """``[R, query blocks]`` int32: the end of the slots that queries of the block may see. Parents precede their children."""
        last = torch.arange(1, -(-self.padded.shape[1] // BLOCK) + 1, dtype=torch.int32, device=self.starts.device) * BLOCK
        return self.starts[:, None] + self.before + last.clamp(max=self.nodes)

    def _block_mask(self, mask: Mask, partial: Tensor, listed: Tensor, full: Tensor, listed_full: Tensor) -> BlockMask:
        lists = [each[:, None].to(torch.int32).contiguous() for each in (partial, listed, full, listed_full)]
        return made_of(lists, self.block, mask, self.padded.shape[1], self.span)


def made_of(lists: Sequence[Tensor], block: int, mask: Mask, queries: int, slots: int) -> BlockMask:
    """A block mask from the ``lists`` of :meth:`BlockMask.from_kv_blocks`, with ``block`` slots per block."""
    made = BlockMask.from_kv_blocks(
        lists[0],
        lists[1],
        lists[2],
        lists[3],
        BLOCK_SIZE=(BLOCK, block),
        mask_mod=mask,
        seq_lengths=(queries, slots),
        compute_q_blocks=False,
    )
    made.ndim = 4  # type: ignore[attr-defined]  # gpt2 asks whether its mask has four dimensions, as this one has
    return made


def in_pages(mask: BlockMask, table: Tensor, holds: Tensor) -> BlockMask:
    """``mask``, whose blocks are pages, over all pages there are instead of the slots of each row.

    Args:
        table: ``[R, blocks]`` the pages of each row.
        holds: ``[R, pages]`` which block of a row a page is, negative if it is none.
    """

    def seen(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        block = holds[row, slot // PAGE]
        return (block >= 0) & mask.mask_mod(row, head, query, block.clamp(min=0) * PAGE + slot % PAGE)

    def pages(blocks: Tensor | None) -> Tensor:
        assert blocks is not None
        return table.gather(1, blocks.flatten(1).long()).view(blocks.shape).to(torch.int32)

    assert mask.full_kv_num_blocks is not None
    lists = (mask.kv_num_blocks, pages(mask.kv_indices), mask.full_kv_num_blocks, pages(mask.full_kv_indices))
    return made_of(lists, PAGE, seen, mask.seq_lengths[0], PAGE * holds.shape[1])


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many of ``blocks`` ``[R, query blocks, slot blocks]`` bool are set, and their indices in front, in order."""
    return blocks.sum(-1), blocks.byte().argsort(dim=-1, descending=True, stable=True)


def tree_mask(tree: TokenTree, window: Window, positions: Tensor, block: int = BLOCK) -> TreeMask:
    """The mask of ``tree`` after each row's prefix; ``positions`` from :meth:`Eager.positions`, of all nodes or of this pass's. Its blocks
    have so many slots."""
    starts = torch.tensor(window.starts, dtype=torch.int32, device=positions.device) - window.before
    queries = positions[:, -window.nodes :]
    padded = torch.cat([queries, queries[:, -1:].expand(-1, queries_of(window.nodes) - window.nodes)], 1).to(torch.int32)
    nodes = bits = None
    if not tree.chain:
        if tree.static_parents is not None:
            bits = layout_bits(tree.static_parents, window.before, positions.device).expand(tree.rows, -1, -1).contiguous()
        else:
            bits = packed(tree.ancestors, window.before)
        nodes = pad(positions, (0, WORD * bits.shape[2] - tree.nodes)).to(torch.int32)
    return TreeMask(queries, starts, window.before, span_of(max(window.starts) + window.nodes), block, padded, nodes, bits)


def packed(ancestors: Tensor, before: int) -> Tensor:
    """``[R, Q, T / 64]`` int64 words of ``ancestors`` ``[R, T', T']`` bool, for nodes from ``before`` on, and filler without ancestors."""
    nodes = ancestors.shape[1] - before
    words = queries_of(max(WORD, ancestors.shape[2])) // WORD
    padding = (0, WORD * words - ancestors.shape[2], 0, queries_of(nodes) - nodes)
    spread = pad(ancestors[:, before:], padding).reshape(len(ancestors), -1, words, WORD)
    return (spread.long() << torch.arange(WORD, device=ancestors.device)).sum(-1)


@lru_cache(maxsize=256)
def layout_bits(layout: tuple[int, ...], before: int, device: torch.device) -> Tensor:
    return packed(static_ancestors(layout, device), before)


def block_mask_in_positions(*, mask_function: Any, config: PreTrainedConfig, **unused: Any) -> BlockMask:
    """A mask builder in transformers' interface: a block mask from the :class:`TreeMask` that ``config`` carries."""
    where: TreeMask = config.foredraft_mask_inputs
    return where.whole if mask_function is causal_mask_function else where.windowed(mask_function)


AttentionMaskInterface.register(NAME, block_mask_in_positions)
