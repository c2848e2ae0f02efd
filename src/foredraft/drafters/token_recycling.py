"""Token Recycling: what the target said after each token the last time becomes the next tree (Luo et al. 2024).

A matrix holds for every token of the vocabulary its k likeliest successors, as the target's logits had them where the token was last
scored. Every node of a tree that was verified refreshes a line of it, the rejected ones too: what the target computed there is used
after all. A tree is filled from it without a model: the child of rank b says what stands b-th in the line of its parent's token.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.backends import native
from foredraft.device import to_device
from foredraft.drafters.base import Drafter, DrafterInfo, DraftRequest, Feedback, Row
from foredraft.drafters.isolated import Isolated
from foredraft.drafters.stores import FileFormat
from foredraft.errors import ConfigurationError, whole
from foredraft.shapes import DynamicShape, StaticShape, TreeShape
from foredraft.target import Target
from foredraft.tree import TokenTree

K = 8  # successors of a token that are remembered
FILE = FileFormat("foredraft token-recycling", "1", "a token-recycling matrix", "TokenRecycling.save", ("successors",))
RATES = (0.45, 0.15, 0.08, 0.05, 0.035, 0.025, 0.02, 0.015)  # of siblings, for trees that no shape lays out
ISOLATED = 64 << 20  # bytes of the matrices of isolated rows
SMALL = 2**16  # logits that are not worth the call of a kernel


class TokenRecycling(Drafter):
    """Options:

    source: a file written by ``save``; the matrix is empty at first without one. It goes on learning either way.
    k: how many successors of a token are remembered, 8 by default; siblings of a later rank are never drafted. Fixed by a loaded file.

    The matrix is shared by all rows and kept from request to request: 4.8 MB for 150,000 tokens. Rows of each isolation have a matrix of
    their own, which begins as the file is; beyond 64 of these or 64 MiB, the least recently used go first. A prompt teaches it nothing,
    of which only the last token's logits are computed.

    Attributes:
        matrix: ``[V, k]`` int32 on the CPU, -1 where nothing is known. None until the drafter is bound.
    """

    name = "token-recycling"
    summary = "a tree of the tokens that the target predicted after each token the last time"
    info = DrafterInfo(branches=True, needs_logits=True)

    def __init__(self, *, source: str | Path | None = None, k: int | None = None):
        self.source, self.k = source, K if k is None else k
        whole("token-recycling's k", self.k)
        self.matrix: Tensor | None = None
        self._isolated: Isolated[Tensor] | None = None
        self._loaded: Tensor | None = None
        if source is not None:
            self._loaded = load(source)
            if k is not None and k != self._loaded.shape[1]:
                raise ConfigurationError(f"{str(source)!r} holds {self._loaded.shape[1]} successors of a token, not {k}; leave k out")
            self.k = self._loaded.shape[1]

    def bind(self, target: Target) -> None:
        known = self._loaded if self.matrix is None else self.matrix
        if known is not None and len(known) != target.vocab_size:
            where = "this drafter has learned" if self.source is None else f"{str(self.source)!r} holds"
            raise ConfigurationError(
                f"{where} successors of {len(known)} tokens and the target has {target.vocab_size}; make one for this target"
            )
        self.matrix = torch.full((target.vocab_size, self.k), -1, dtype=torch.int32, device="cpu") if known is None else known.clone()
        self._loaded = None
        if self._isolated is None:
            self._isolate()
        dtype = getattr(getattr(target, "model", None), "dtype", None)
        if dtype is not None and target.device.type == "cpu":
            native.refusal(dtype)  # if its kernels have to be compiled, then now and not in the first round

    @property
    def keeps_texts(self) -> bool:
        return True

    def forget(self) -> None:
        if self.matrix is not None:
            self.matrix.fill_(-1)
            if self.source is not None:
                self.matrix.copy_(load(self.source))
            self._isolate()

    def _isolate(self) -> None:
        """Matrices of isolated rows begin as the matrix is now."""
        assert self.matrix is not None
        first = self.matrix.clone()
        self._isolated = Isolated(first.clone, lambda matrix: matrix.nbytes, ISOLATED)

    def _matrix_of(self, row: Row) -> NDArray[np.int32]:
        assert self.matrix is not None and self._isolated is not None
        return self._isolated.of(row, self.matrix).numpy()

    def save(self, path: str | Path) -> None:
        """Write the matrix, but not those of isolated rows, as one safetensors file, which is there whole or not at all; ``source=path``
        loads it again."""
        known = self._loaded if self.matrix is None else self.matrix
        if known is None:
            raise ConfigurationError("there is nothing to save: this token-recycling drafter is not bound to a Speculator yet")
        FILE.write(path, (known.numpy(),), len(known), k=str(self.k))

    # -- a round --------------------------------------------------------------------------------------------------------

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        """Waits for the target's device, where that is not the CPU."""
        tree, logits = feedback.tree, feedback.logits
        if logits is None:
            return
        best = top_k(logits.reshape(-1, logits.shape[-1]), self.k).to("cpu", torch.int32).view(*tree.tokens.shape, self.k)  # [R, N, k]
        real = None if tree.valid is None else tree.valid.cpu().numpy()
        for index, (row, tokens, lines) in enumerate(zip(rows, tree.tokens.cpu().numpy(), best.numpy())):
            if index in feedback.failed:
                continue
            kept = slice(None) if real is None else real[index]
            self._matrix_of(row)[tokens[kept]] = lines[kept]  # of equal indices NumPy lets the last one win

    def draft(self, request: DraftRequest) -> TokenTree:
        """Nodes that no row has an entry for are left out of the tree."""
        if self._isolated is not None:
            self._isolated.keep(request.rows)
        shape = laid_out(request.shape)
        rows = [self._filled(row, shape, limit) for row, limit in zip(request.rows, request.limits)]
        if shape.is_chain:
            return request.chains([line[1 : line.index(-1) if -1 in line else None] for line in rows])
        kept = [node for node in range(shape.nodes + 1) if any(line[node] >= 0 for line in rows)]
        if len(kept) <= 1:
            return request.chains([[] for _ in rows])
        number = {node: index for index, node in enumerate(kept)}
        layout = (-1, *(number[shape.parents[node]] for node in kept[1:]))
        found = to_device([[line[node] for node in kept] for line in rows], request.device)
        whole = not any(line[node] < 0 for line in rows for node in kept)
        return TokenTree.from_parents(found.clamp(min=0), layout, valid=None if whole else found >= 0)

    def _filled(self, row: Row, shape: StaticShape, limit: int) -> list[int]:
        """The token of every node of ``shape`` in a row's tree, -1 where there is none or the node is deeper than ``limit``."""
        matrix, tokens = self._matrix_of(row), [row.ids[-1]]
        for depth, level in enumerate(shape.levels, 1):
            line: list[int] = []
            above = -1
            for parent, rank in zip(level.parents, level.ranks):
                if parent != above:
                    above, token = parent, tokens[parent]
                    line = matrix[token].tolist() if token >= 0 and depth <= limit else []
                tokens.append(line[rank] if rank < len(line) else -1)
        return tokens


@lru_cache(maxsize=256)
def laid_out(shape: TreeShape) -> StaticShape:
    """``shape``, or for one that is to be grown by probabilities, which there are none of here, the tree of its size that is best where
    siblings are accepted as often as ``RATES`` says."""
    if isinstance(shape, StaticShape):
        return shape
    siblings = min(shape.k, len(RATES)) if isinstance(shape, DynamicShape) else len(RATES)
    paths: list[tuple[int, ...]] = []
    heap: list[tuple[float, tuple[int, ...]]] = [(-RATES[0], (0,))]
    while heap and len(paths) < shape.nodes:
        chance, path = heapq.heappop(heap)
        paths.append(path)
        if path[-1] + 1 < siblings:
            heapq.heappush(heap, (chance / RATES[path[-1]] * RATES[path[-1] + 1], (*path[:-1], path[-1] + 1)))
        if len(path) < shape.depth:
            heapq.heappush(heap, (chance * RATES[0], (*path, 0)))
    return TreeShape.paths(paths)


def top_k(logits: Tensor, k: int) -> Tensor:
    """``[N, k]`` int64 the tokens of the k largest of ``logits`` ``[N, V]``, largest first; -1 where V is smaller than k.

    On a CPU ``topk`` takes many times as long as reading does. A kernel, where there is one, reads each line once and sorts what is larger
    than the k-th so far.
    """
    vocab_size = logits.shape[1]
    if k > vocab_size:
        return torch.nn.functional.pad(logits.topk(vocab_size, -1).indices, (0, k - vocab_size), value=-1)
    found = native.largest(logits, k) if logits.device.type == "cpu" and logits.numel() >= SMALL else None
    return logits.topk(k, -1).indices if found is None else found


def load(path: str | Path) -> Tensor:
    """``[V, k]`` int32, as ``save`` wrote it.

    Raises:
        ConfigurationError: there is no such file, or it is none of these.
    """
    if not Path(path).is_file():
        raise ConfigurationError(f"there is no file {str(path)!r} to load token-recycling's matrix from")
    (successors,), _, about = FILE.read(path)
    matrix, said = torch.from_numpy(np.array(successors)), (about.get("vocab_size"), about.get("k"))
    if matrix.ndim != 2 or matrix.dtype != torch.int32 or tuple(map(str, matrix.shape)) != said:
        raise ConfigurationError(f"{str(path)!r} is damaged: its matrix is {list(matrix.shape)} {matrix.dtype}, it says {said}")
    twice = (matrix[:, :, None] == matrix[:, None]).triu(1) & (matrix >= 0)[:, :, None]
    if bool((matrix < -1).any() | (matrix >= len(matrix)).any() | twice.any()):
        raise ConfigurationError(f"{str(path)!r} is damaged: a line names no tokens of the vocabulary, or one of them twice")
    return matrix
