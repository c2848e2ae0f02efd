"""Passes of one row at a time over transformers' own cache: for models that can roll back but not branch.

A recurrent state cannot forget a rejected draft. A copy of the state is therefore kept from before the draft. When part of a draft is
rejected, the next pass starts from that copy and reads the kept tokens again, in front of the new draft. Caches that consist of attention
layers alone are cut instead.

The cost: a round is one pass per row, not one per batch. Each pass reads up to ``READ_AGAIN`` tokens again and copies the recurrent
states (not the keys and values). A speed-up is possible at batch 1 only.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from foredraft.backends.base import Backend, ForwardPass, Overrides, PassOutput
from foredraft.models.support import ModelFacts

READ_AGAIN = 32  # kept tokens read again in a pass; more of them get a pass of their own, after which the copy is renewed
CACHE_ARGUMENTS = ("past_key_values", "cache_params", "state")


class State:
    """What a model remembers after reading ``tokens``: a transformers ``Cache``, or a list of tensors (rwkv); None at first."""

    def __init__(self, tokens: list[int], memory: Any):
        self.tokens, self.memory = tokens, memory

    def copy(self) -> State:
        return State(list(self.tokens), copied(self.memory))

    @property
    def can_be_cut(self) -> bool:
        """Whether every layer holds keys and values of all tokens."""
        return isinstance(self.memory, DynamicCache) and all(type(layer) is DynamicLayer for layer in self.memory.layers)

    def cut(self, length: int) -> None:
        """Forget what lies behind the first ``length`` tokens."""
        for layer in self.memory.layers:
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
        del self.tokens[length:]


@dataclass(eq=False)
class RollbackRow:
    """One row: its committed ``text``, the ``drafted`` tokens of the round, the ``live`` state after the last pass, and the
    ``kept`` one, which has read nothing but text that stays. The two may be the same object."""

    text: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    live: State | None = None
    kept: State | None = None

    def take(self, whole: Sequence[int], limit: int) -> State:
        """A state that has read a beginning of ``whole``, at most ``limit`` tokens, to go on from; it becomes ``live``."""
        if self.live is not None and self.live.can_be_cut:
            shared = shared_beginning(self.live.tokens, whole, limit)
            if shared < len(self.live.tokens):
                self.live.cut(shared)
        elif self.live is None or not begins(whole, self.live.tokens, limit):
            usable = self.kept is not None and begins(whole, self.kept.tokens, limit)
            self.live = self.kept if usable else None
        if self.live is None:
            self.live = State([], None)
        elif self.live is self.kept and not self.live.can_be_cut:
            self.live = self.live.copy()
        return self.live


class RollbackCache:
    """The rows of a :class:`Rollback`; the same verbs as :class:`~foredraft.models.cache.TreeCache`."""

    shares = False

    def __init__(self) -> None:
        self.rows: list[RollbackRow] = []
        self.entered: list[RollbackRow] = []  # rows of the pass just made

    @property
    def lengths(self) -> list[int]:
        return [len(row.text) for row in self.rows]

    def open(self, lengths: Sequence[int]) -> None:
        """Append fresh rows; nothing is shared, so every length is 0."""
        self.rows += [RollbackRow() for _ in lengths]

    def reserve(self, tokens: int) -> None:
        """Nothing: transformers allocates as it goes."""

    def gather(self, sources: Sequence[int], lengths: Sequence[int], first: int) -> None:
        """Nothing: no row begins with what another holds."""

    def commit(self, path: Tensor | None, kept: Sequence[int]) -> None:
        """Keep the first ``kept[r]`` tokens of each chain just read; a chain's path is its node order, so ``path`` says no more."""
        if len(kept) != len(self.entered):
            raise ValueError(f"kept must say for each of the {len(self.entered)} rows of the last pass how many nodes stay, got {kept}")
        for row, count in zip(self.entered, kept):
            row.text += row.drafted[:count]
            if row.live is not None and len(row.live.tokens) == len(row.text):
                row.kept = row.live
        self.entered = []

    def advance(self) -> None:
        """Keep the one token per row of the pass just made. It may be taken back, so the kept state stays where it is."""
        for row in self.entered:
            row.text += row.drafted

    def rewind(self, lengths: Sequence[int]) -> None:
        for row, length in zip(self.rows, lengths):
            del row.text[length:]

    def wipe(self, rows: Sequence[int]) -> None:
        """Nothing: every row has a cache of its own."""

    def compact(self, keep: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in keep]
        self.entered = []

    def forget(self) -> None:
        self.rows, self.entered = [], []


class Rollback(Backend):
    """Forward passes over chains, a row at a time, each as transformers' own ``generate`` would make it. Of a row beyond the model's
    context nothing is read; its logits, and those of filler, are zeros.

    Args:
        facts: a model that takes a cache as one of ``CACHE_ARGUMENTS`` and reads several tokens behind it in one pass.
        chunk: most tokens of text read in one pass.
    """

    ragged = True

    def __init__(self, facts: ModelFacts, overrides: Overrides | None, reasons: dict[str, str], chunk: int):
        super().__init__(facts, overrides, reasons)
        self.model, self.chunk = facts.model, chunk
        self.cache = RollbackCache()
        parameters = inspect.signature(facts.model.forward).parameters
        self._cache_argument = next(name for name in CACHE_ARGUMENTS if name in parameters)
        self._takes_positions = "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters

    def forward(self, given: ForwardPass) -> PassOutput:
        tree, window, keep = given.tree, given.window, given.keep
        self.cache.entered = self.cache.rows[window.first : window.last]
        chains = tree.tokens.clamp(0, self.facts.vocab_size - 1).tolist()
        counts = [tree.nodes] * tree.rows if tree.valid is None else tree.valid.sum(-1).tolist()
        if keep is not None:
            counts = [node + 1 for node in keep]
        found = [self._read(row, chain[:count], window.before) for row, chain, count in zip(self.cache.entered, chains, counts)]
        logits = together([each[0] for each in found], window.nodes, last=keep is not None)
        if self.features is None:
            return PassOutput(logits)
        last = keep is not None and not self.features.whole
        return PassOutput(logits, together([each[1] for each in found], window.nodes, last=last))

    def _read(self, row: RollbackRow, drafted: list[int], before: int) -> tuple[Tensor, Tensor]:
        """``[n, V]`` logits and ``[n, F * d]`` hidden states at the n tokens of ``drafted`` from ``before`` on, behind the row's text."""
        row.drafted = drafted
        text, whole = len(row.text), row.text + drafted
        ended = before >= len(drafted)  # in an earlier pass
        if ended or (self.facts.context is not None and len(whole) > self.facts.context):
            sizes = self.facts.vocab_size, 0 if self.features is None else self.features.width
            made = [torch.zeros(max(0, len(drafted) - before), size, dtype=self.model.dtype, device=self.facts.device) for size in sizes]
            return made[0], made[1]
        state = row.take(whole, text + before)
        if text - len(state.tokens) > READ_AGAIN:
            for end in range(len(state.tokens) + self.chunk, text, self.chunk):
                self._pass(state, whole[len(state.tokens) : end], 1)
            self._pass(state, whole[len(state.tokens) : text], 1)
            row.kept = state
            state = row.take(whole, text)
        return self._pass(state, whole[len(state.tokens) :], len(drafted) - before)

    def _pass(self, state: State, tokens: list[int], wanted: int) -> tuple[Tensor, Tensor]:
        """``[wanted, V]`` logits and ``[wanted, F * d]`` hidden states at the last of ``tokens``, which ``state`` reads."""
        if state.memory is None and self._cache_argument != "state":
            state.memory = DynamicCache(config=self.model.config.get_text_config())
        arguments: dict[str, Any] = {self._cache_argument: state.memory}
        if self._takes_positions:
            start = len(state.tokens)
            arguments["position_ids"] = torch.arange(start, start + len(tokens), device=self.facts.device)[None]
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = wanted
        self.passes += 1
        with nullcontext() if self.features is None else self.features.catching() as caught:
            output = self.model(input_ids=torch.tensor([tokens], device=self.facts.device), use_cache=True, **arguments)
        state.memory = getattr(output, self._cache_argument)
        state.tokens += tokens
        logits = output.logits[0, -wanted:]
        return logits, logits.new_empty(wanted, 0) if caught is None else caught.hidden()[0, -wanted:]


def together(found: Sequence[Tensor], nodes: int, *, last: bool) -> Tensor:
    """``[R, nodes, *]`` of what was ``found`` at the tokens of each row, zeros behind it; or the last of each row alone, ``[R, 1, *]``."""
    if last:
        return torch.stack([each[-1:] for each in found])
    whole = found[0].new_zeros(len(found), nodes, found[0].shape[-1])
    for line, each in zip(whole, found):
        line[: len(each)] = each
    return whole


def begins(whole: Sequence[int], tokens: Sequence[int], limit: int) -> bool:
    """Whether ``tokens`` are the first of ``whole``, at most ``limit`` of them."""
    return len(tokens) <= limit and list(whole[: len(tokens)]) == list(tokens)


def shared_beginning(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """How many of the first ``limit`` tokens are the same."""
    limit = min(limit, len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    return next(index for index in range(limit) if a[index] != b[index])


def copied(memory: Any) -> Any:
    """A copy of a cache that later passes over the original leave alone.

    Recurrent states are written in place and so are cloned. Keys and values of dynamic layers are replaced, never
    written to, so that a reference is enough.
    """
    if isinstance(memory, Tensor):
        return memory.clone()
    if isinstance(memory, list):
        return [copied(each) for each in memory]
    if isinstance(memory, dict):
        return {key: copied(value) for key, value in memory.items()}
    if not isinstance(memory, DynamicCache):
        return memory
    twin = copy.copy(memory)
    twin.layers = [copy.copy(layer) for layer in memory.layers]
    for layer in twin.layers:
        for name, value in vars(layer).items():
            if name not in ("keys", "values"):
                setattr(layer, name, copied(value))
    return twin
