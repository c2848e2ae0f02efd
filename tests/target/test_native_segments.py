"""The kernels' attention over texts of several segments of keys: against float64, and the same bits whatever else is in a pass."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from cover import covered
from kernel_cases import DTYPES, needs_kernels

from foredraft.backends import native
from foredraft.backends.native import KEY_SEGMENT, KEYS

pytestmark = needs_kernels
HEADS, SIZE, NODES, ROOM = 4, 32, 24, 2 * KEY_SEGMENT + 3 * KEYS
KINDS = {
    "plain": {},
    "one key head": {"key_heads": 1},
    "pages": {"pages": True},
    "window": {"window": KEY_SEGMENT - 100},  # its beginning and its end are in any segment
    "narrow window and sinks": {"window": 70, "sinks": True},
    "sinks and cap": {"sinks": True, "cap": 4.0},
    "all": {"key_heads": 1, "pages": True, "window": KEY_SEGMENT + 10, "sinks": True, "cap": 6.0},
}
TREE = (-1, 0, 0, 1, 1, 2, 5, 4, 6, 7, 9, 10, 11, 8, 13)  # parents; paths lie scattered


@cache
def some(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(HEADS, ROOM, SIZE, generator=generator) * scale for scale in (3.0, 1.0, 1.0)]


@dataclass
class Text:
    """Of one row: queries, keys and values ``[heads, ROOM, SIZE]`` by slot. Its last ``new`` tokens of ``length`` ask, which are a chain or
    the nodes of ``TREE``."""

    seed: int
    length: int
    new: int = 1
    tree: bool = False
    q: torch.Tensor = field(init=False)
    k: torch.Tensor = field(init=False)
    v: torch.Tensor = field(init=False)

    def __post_init__(self):
        self.q, self.k, self.v = some(self.seed)

    def of(self, slots, length, new):
        """The text whose tokens are those in ``slots``."""
        other = Text(self.seed, length, new)
        other.q, other.k, other.v = (torch.cat([each[:, slots], each[:, len(slots) :]], 1) for each in (self.q, self.k, self.v))
        return other


def path(node):
    return [node] if TREE[node] < 0 else [*path(TREE[node]), node]


def sink_of(heads):
    """The first is off."""
    return torch.tensor([-torch.inf, *torch.linspace(-3.0, 6.0, heads - 1).tolist()])


def attend(dtype, texts, threads=1, *, key_heads=2, window=0, sinks=False, cap=0.0, pages=False, room=True):
    """``[tokens, heads, size]`` by the kernels."""
    counts = {"k": key_heads, "v": key_heads, "q": HEADS}
    held = [torch.stack([getattr(text, name)[:heads] for text in texts]).to(dtype) for name, heads in counts.items()]
    rows, news = len(texts), [text.new for text in texts]
    for row, text in enumerate(texts):  # what lies behind a text is not read
        held[0][row, :, text.length :] = held[1][row, :, text.length :] = torch.nan
    slots = torch.cat([torch.arange(text.length - text.new, text.length) for text in texts]).int()
    row_of = torch.tensor([row for row, new in enumerate(news) for _ in range(new)], dtype=torch.int32)
    begins = torch.tensor([0, *torch.tensor(news).cumsum(0).tolist()], dtype=torch.int32)
    asked = held[2][row_of.long(), :, slots.long()].contiguous()
    width, table, shape = max(text.length for text in texts), None, (ROOM * key_heads * SIZE, ROOM * SIZE)
    if pages:  # in any order
        order = torch.randperm(rows * ROOM // KEYS, generator=torch.Generator().manual_seed(7))
        table = order.view(rows, ROOM // KEYS).int()
        apart = [each.view(rows, key_heads, ROOM // KEYS, KEYS, SIZE).transpose(1, 2).flatten(0, 1) for each in held[:2]]
        held[:2] = [torch.empty_like(each).index_copy(0, order, each).transpose(0, 1).contiguous() for each in apart]
        shape = (0, len(order) * KEYS * SIZE)
    out = torch.full_like(asked, torch.nan)
    apart = sink_of(HEADS)
    layer = native.Layer(heads=HEADS, key_heads=key_heads, size=SIZE, scaling=SIZE**-0.5, window=window, cap=cap)
    layer.sinks = apart.data_ptr() if sinks else None
    about = native.Pass(threads=threads, rows=rows, tokens=len(asked), nodes=max(news), width=width)
    about.row_stride, about.head_stride = shape
    mask = positions = None
    if any(text.tree for text in texts):
        mask, positions = torch.zeros(rows, max(news), width, dtype=torch.bool), torch.arange(width, dtype=torch.int32).repeat(rows, 1)
        for row, text in enumerate(texts):
            root = text.length - text.new
            for node in range(text.new):
                above = path(node) if text.tree else list(range(node + 1))
                mask[row, node, :root] = True
                mask[row, node, [root + each for each in above]] = True
                positions[row, root + node] = root + len(above) - 1
        about.mask_row_stride, about.mask_stride, about.positions = mask.stride(0), mask.stride(1), positions.data_ptr()
    if pages:
        about.table, about.table_stride, about.page_stride = table.data_ptr(), table.stride(0), KEYS * SIZE
    scratch = torch.empty(threads * native.scratch(SIZE))
    pointers = {"begins": begins, "row_of": row_of, "slots": slots, "projected": asked, "attended": out, "scratch": scratch}
    for name, tensor in pointers.items():
        setattr(about, name, tensor.data_ptr())
    if room:
        native.make_room_for_segments(about, layer, rows * max(news), width)
    assert bool(about.segments_room) == (room and threads > 1 and width > KEY_SEGMENT)
    seen, stores = None if mask is None else mask.data_ptr(), [each.data_ptr() for each in held[:2]]
    native.library(dtype).attend_over(ctypes.byref(layer), ctypes.byref(about), seen, *stores)
    return list(out.split(news))


def expected(dtype, text, *, key_heads=2, window=0, sinks=False, cap=0.0, pages=False):
    """The same of one row in float64."""
    q, k, v = (each.to(dtype).double() for each in (text.q, text.k[:key_heads], text.v[:key_heads]))
    k, v = (each.repeat_interleave(HEADS // key_heads, 0) for each in (k, v))
    found, root = [], text.length - text.new
    for node in range(text.new):
        seen = [*range(root), *(root + each for each in (path(node) if text.tree else range(node + 1)))]
        seen = seen[-window:] if window else seen
        scores = torch.einsum("hd,hkd->hk", q[:, root + node], k[:, seen]) * SIZE**-0.5
        scores = cap * torch.tanh(scores / cap) if cap else scores
        beside = sink_of(HEADS)[:, None].double() if sinks else torch.full((HEADS, 1), -torch.inf)
        found.append(torch.einsum("hk,hkd->hd", torch.cat([scores, beside], 1).softmax(1)[:, :-1], v[:, seen]))
    return torch.stack(found)


def same(found, wanted):
    assert len(found) == len(wanted) and all(torch.equal(*pair) for pair in zip(found, wanted))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_any_threads_over_rows_of_unequal_lengths(kind, dtype):
    """Rows of one segment, of several, and with a tree that goes from one into the next, alone and together."""
    texts = [
        Text(1, 2 * KEY_SEGMENT + 30, NODES),
        Text(2, 30, 2),
        Text(3, KEY_SEGMENT + 1, 1),
        Text(4, KEY_SEGMENT + 4, len(TREE), tree=True),
        Text(5, KEY_SEGMENT, 7),
    ]
    found = attend(dtype, texts, **KINDS[kind])
    allowed = 1e-5 if dtype == torch.float32 else 2e-2
    for got, text in zip(found, texts):
        torch.testing.assert_close(got.double(), expected(dtype, text, **KINDS[kind]), rtol=0, atol=allowed)
        for threads in (1, 2, 3, 11):
            same(attend(dtype, [text], threads, **KINDS[kind]), [got])
    for threads in (2, 3, 11):  # the last are so many that texts are divided
        same(attend(dtype, texts, threads, **KINDS[kind]), found)
    same(attend(dtype, texts, 3, room=False, **KINDS[kind]), found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_over_many_tokens_and_one_for_each(kind, dtype):
    """Across the end of a segment. The longest window is longer than one, and begins on either side of another end."""
    last = 2 * KEY_SEGMENT + 20
    for threads in (1, 3):
        (together,) = attend(dtype, [Text(6, last, NODES)], threads, **KINDS[kind])
        for node in range(NODES):
            (alone,) = attend(dtype, [Text(6, last - NODES + 1 + node)], threads, **KINDS[kind])
            assert torch.equal(together[node], alone[0])


@pytest.mark.parametrize(
    ("root", "kind", "dtype"),
    covered([KEY_SEGMENT - 3, KEY_SEGMENT - len(TREE) + 1, 2 * KEY_SEGMENT - 6], list(KINDS), DTYPES),
)
def test_a_node_of_a_tree_is_the_last_token_of_its_path(root, kind, dtype):
    tree = Text(8, root + len(TREE), len(TREE), tree=True)
    for threads in (1, 3):
        (found,) = attend(dtype, [tree], threads, **KINDS[kind])
        for node in range(len(TREE)):
            nodes = path(node)
            chain = tree.of([*range(root), *(root + each for each in nodes)], root + len(nodes), 1)
            assert torch.equal(found[node], attend(dtype, [chain], threads, **KINDS[kind])[0][0])
