"""A recurrent network as the drafter: one step per level, for all nodes of all rows together.

Where it begins at the target's last hidden state nothing is kept of a round but that. Where it reads the text by itself, a row's state
is that after what is committed, but for the root: rejected branches never enter it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.device import to_device
from foredraft.drafters.base import DraftRequest, Row
from foredraft.drafters.growth import Expand
from foredraft.drafters.heads import HeadDrafter, Levels
from foredraft.errors import whole
from foredraft.heads.base import Head
from foredraft.heads.rnn import RnnHead
from foredraft.tree import TokenTree


class Rnn(HeadDrafter):
    __doc__ = f"""{(HeadDrafter.__doc__ or "").rstrip()}
    window: of a prompt no more than so many last tokens are read, where the network begins at no hidden state.
    """
    name = kind = "rnn"
    summary = "a small recurrent network that starts at the target's last hidden state; chains and trees"

    def __init__(
        self,
        source: str | Path | Head | None = None,
        *,
        siblings: str = "auto",
        quantization: str | None = None,
        learn: bool | str | Path | Mapping[str, Any] = False,
        window: int = 512,
    ):
        super().__init__(source, siblings=siblings, quantization=quantization, learn=learn)
        whole("window", window)
        self.window = window
        self._states: Tensor | None = None  # [R, state_size] after the first so many tokens of each row:
        self._lengths: list[int] = []
        self._anew = False

    def begin(self, rows: Sequence[Row]) -> None:
        super().begin(rows)
        if self.info.features:
            return
        head: RnnHead = self.head
        fresh = head.begin(None, len(rows))
        self._states = fresh if self._states is None else torch.cat([self._states, fresh])
        self._lengths += [max(0, len(row.ids) - 1 - self.window) for row in rows]

    def rewrite(self, weights: Mapping[str, Tensor]) -> None:
        super().rewrite(weights)
        self._anew = True

    def _keep(self, rows: list[int]) -> None:
        super()._keep(rows)
        if self._states is not None:
            self._states = self._states[to_device(rows, self._states.device)] if rows else None
            self._lengths = [self._lengths[index] for index in rows]

    def reset(self) -> None:
        super().reset()
        self._states, self._lengths = None, []

    def _expand(self, request: DraftRequest) -> Expand:
        head: RnnHead = self.head
        hidden, levels = self._hidden, Levels()
        states = self._caught_up(request.rows) if hidden is None else head.begin(hidden, len(hidden))
        states = states[:, None]  # [R, n, state_size] of the level before

        def expand(tree: TokenTree, first: int) -> Tensor:
            nonlocal states
            newest, above = tree.tokens[:, first:].to(states.device), levels.above(tree, first).to(states.device)
            if first:
                states = states.gather(1, above[..., None].expand(-1, -1, states.shape[2]))
            outputs, after = head.read(newest.reshape(-1, 1), states.flatten(0, 1))
            states = after.view(*newest.shape, -1)
            return head.say(outputs.view(*newest.shape, -1), None if hidden is None else hidden[:, None])

        return expand

    def _caught_up(self, rows: Sequence[Row]) -> Tensor:
        """States after all tokens of each row but the root."""
        head: RnnHead = self.head
        assert self._states is not None
        if self._anew:  # the states are those of other weights
            self._states = torch.zeros_like(self._states)
            self._lengths, self._anew = [max(0, len(row.ids) - 1 - self.window) for row in rows], False
        new = {index: row.ids[length:-1] for index, (row, length) in enumerate(zip(rows, self._lengths)) if length < len(row.ids) - 1}
        if new:
            longest = max(map(len, new.values()))
            device = self._states.device
            tokens = to_device([ids + [0] * (longest - len(ids)) for ids in new.values()], device)
            where = to_device(list(new), device)
            _, read = head.read(tokens, self._states[where], [len(ids) for ids in new.values()])
            self._states = self._states.index_copy(0, where, read)
            self._lengths = [len(row.ids) - 1 for row in rows]
        return self._states
