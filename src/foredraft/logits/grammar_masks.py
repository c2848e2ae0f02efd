"""Grammars at the nodes of draft trees: one mask per path, computed once, by a matcher that walks the paths.

Each row has a :class:`Walk`. Its matcher stands after the row's text. To reach a node it accepts the tokens on the node's path; to
reach the next one it goes back only as far as the two paths differ. Masks are kept by path until the row's text has passed them, so a
node that is scored twice, in the draft and by the target, costs one mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from foredraft.errors import ConfigurationError, GrammarError
from foredraft.grammars import Compiled, Grammar

from .histories import NodeHistories, put, take

if TYPE_CHECKING:
    from foredraft.grammars import Masks

Path = tuple[int, ...]  # the tokens between a row's text and a node, the node's own included


@dataclass(eq=False)
class Walk:
    """One row's way through a grammar.

    Attributes:
        compiled: the grammar.
        read: how many tokens of the row, prompt included, are behind the matcher's base.
        matcher: has accepted the row's text and then ``below``.
        masks: by path; None where the grammar forbids the path.
        over: the row's text has an end token.
    """

    compiled: Compiled
    read: int
    matcher: Any
    below: Path = ()
    masks: dict[Path, Masks | None] = field(default_factory=dict)
    over: bool = False

    @staticmethod
    def begin(grammar: Grammar | Walk, prompt_length: int) -> Walk:
        return Walk(grammar.compiled, prompt_length, grammar.compiled.start())

    def follow(self, tokens: Sequence[int]) -> None:
        """The row's text has grown by ``tokens``. Where the grammar forbids them this raises, however often it is asked."""
        grown = tuple(tokens)
        self.over = self.over or self.ended(grown)
        if grown and not self.over and not self.move(grown):
            raise ConfigurationError(f"the text holds token {grown[-1]}, which its grammar forbids: another logits processor allows it")
        self.read += len(grown)
        if self.over or not grown:
            return
        self.below = ()
        self.masks = {path[len(grown) :]: mask for path, mask in self.masks.items() if path[: len(grown)] == grown}

    def ended(self, path: Path) -> bool:
        return self.over or not set(path).isdisjoint(self.compiled.ends)

    def move(self, path: Path) -> bool:
        """Bring the matcher to ``path``; False if the grammar forbids it."""
        shared = 0
        while shared < min(len(self.below), len(path)) and self.below[shared] == path[shared]:
            shared += 1
        if shared < len(self.below):
            self.compiled.rollback(self.matcher, len(self.below) - shared)
        self.below = path[:shared]
        for token in path[shared:]:
            if not self.compiled.accept(self.matcher, token):
                return False
            self.below += (token,)
        return True


def mask_nodes(rows: Sequence[tuple[Walk, Sequence[int]]], histories: NodeHistories, flat: Tensor) -> None:
    """Forbid, in ``flat`` ``[R * N, V]``, what the grammars forbid at the given cells of each row.

    Nodes that the grammar cannot reach keep their scores: decoding does not reach them either.
    """
    paths = read_paths(rows, histories)
    for walk, at in paths:
        walk.masks.update((path, walk.compiled.end_mask) for path in at.values() if walk.ended(path))
    fill([(walk, [path for path in dict.fromkeys(at.values()) if path not in walk.masks]) for walk, at in paths])
    found = [(cell, walk.masks[path], walk.compiled.width) for walk, at in paths for cell, path in at.items()]
    for size in {width for _, _, width in found}:
        masks = {cell: mask for cell, mask, width in found if width == size and mask is not None}
        if masks:
            forbid(flat, list(masks), np.stack(list(masks.values())), size)


def read_paths(rows: Sequence[tuple[Walk, Sequence[int]]], histories: NodeHistories) -> list[tuple[Walk, dict[int, Path]]]:
    """The walks, after they have followed their rows, with the path to each cell that is no filler. One copy to the host."""
    numbers = [cells[0] // histories.nodes for _, cells in rows]
    ends, nodes = [histories.lengths[row] for row in numbers], histories.tree.nodes
    parts = [histories.committed[row, walk.read : end] for row, end, (walk, _) in zip(numbers, ends, rows)]
    parts += [each.flatten() for each in (histories.tokens, histories.tree.valid) if each is not None]
    packet, result = iter(torch.cat(parts).tolist()), []
    for end, (walk, _) in zip(ends, rows):
        walk.follow(list(islice(packet, end - walk.read)))
    tokens = list(islice(packet, histories.rows * nodes))
    valid = list(packet)
    for walk, cells in rows:
        at = {}
        for cell in cells:
            row, node = histories.place(cell)
            if not valid or valid[row * nodes + node]:
                at[cell] = tuple(tokens[each] for each in histories.path(cell, histories.depths[row][node]))
        result.append((walk, at))
    return result


def fill(missing: Sequence[tuple[Walk, list[Path]]]) -> None:
    """Compute masks: in each turn one path of every row, so that a library can fill the rows' masks in one call."""
    for turn in range(max((len(paths) for _, paths in missing), default=0)):
        ready: dict[tuple[type, int, tuple[int, ...]], list[tuple[Walk, Path]]] = {}
        for walk, paths in missing:
            if turn < len(paths):
                if walk.move(paths[turn]):
                    like = walk.compiled
                    ready.setdefault((type(like), like.words, like.ends), []).append((walk, paths[turn]))
                else:
                    walk.masks[paths[turn]] = None
        for (_, words, _), group in ready.items():
            masks = np.zeros((len(group), words), np.int32)
            try:
                group[0][0].compiled.fill([walk.matcher for walk, _ in group], masks)
            except GrammarError:
                raise
            except Exception as error:
                raise GrammarError(f"the grammar library gave up: {str(error).strip()}; simplify the grammar") from error
            for (walk, path), mask in zip(group, masks):
                walk.masks[path] = mask


def forbid(flat: Tensor, cells: Sequence[int], masks: Masks, width: int) -> None:
    """Set the scores of ``flat[cells]`` to -inf where the bits of ``masks`` are 0, and beyond the ``width`` tokens that they cover."""
    bits = np.unpackbits(~masks.view(np.uint8), axis=1, count=width, bitorder="little").view(np.bool_)[:, : flat.shape[1]]
    scores = take(flat, cells)
    scores[:, :width].masked_fill_(torch.from_numpy(bits).to(flat.device), -torch.inf)
    scores[:, width:] = -torch.inf
    put(flat, cells, scores)
