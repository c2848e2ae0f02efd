"""Passes of one row at a time over transformers' own cache: for models that can roll back but not branch.

A recurrent state cannot forget a rejected draft. A copy of the state is therefore kept from before the draft. When part of a draft is
rejected, the next pass starts from that copy and reads the kept tokens again, in front of the new draft. Caches that consist of attention
layers alone are cut instead. On a CPU, keys and values of all tokens are in pages (:mod:`foredraft.backends.state_pages`).

The cost: a round is one pass per row, not one per batch. Each pass reads up to ``READ_AGAIN`` tokens again and copies the recurrent
states (not the keys and values). A speed-up is possible at batch 1 only.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from foredraft.backends.base import Backend, ForwardPass, Overrides, PassOutput
from foredraft.backends.paged_attention import on_cpu
from foredraft.backends.state_pages import RowPages, StatePages, in_pages
from foredraft.backends.states import WORTH_KEEPING, RowMemory, State, StateStore, begins, shared_beginning
from foredraft.models.cache_names import cache_argument, cache_of
from foredraft.models.page_stores import pages_of
from foredraft.models.pages import PAGE
from foredraft.models.support import ModelFacts

READ_AGAIN = 32  # kept tokens read again in a pass; more of them get a pass of their own, after which the copy is renewed


@dataclass(eq=False)
class RollbackRow(RowPages):
    """One row: its committed ``text``, the ``drafted`` tokens of the round, the ``live`` state after the last pass, and the
    ``kept`` one, which has read committed text only. The two may be the same object. Both have their keys and values in the row's pages,
    whose first slots hold the text whichever of them has written it. Rows of equal ``key`` share stored states;
    a row without one shares nothing. ``stored`` is the number of the state that is stored for its prompt so far."""

    text: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    live: State | None = None
    kept: State | None = None
    key: Hashable = None
    stored: int | None = None

    def take(self, whole: Sequence[int], limit: int) -> State:
        """A state to continue from, which has read a beginning of ``whole`` of at most ``limit`` tokens; it becomes ``live``."""
        if self.live is not None and self.live.can_be_cut:
            shared = shared_beginning(self.live.tokens, whole, limit)
            if shared < len(self.live.tokens):
                self.live.cut(shared)
        elif self.live is None or not begins(whole, self.live.tokens, limit):
            self.live = self.kept if self.kept is not None and begins(whole, self.kept.tokens, limit) else None
        if self.live is None:
            self.live = State([], None)
        elif (self.live is self.kept or self.live.stored) and not self.live.can_be_cut:
            self.live = self.live.copy()
        return self.live


class RollbackCache:
    """The rows of a :class:`Rollback`; the same verbs as :class:`~foredraft.models.cache.TreeCache`."""

    def __init__(self) -> None:
        self.pages = StatePages()
        self.states = StateStore(self.pages)
        self.memory = RowMemory(self.states, lambda: self.lengths)
        self.rows: list[RollbackRow] = []
        self._opening: list[RollbackRow] = []
        self.entered: list[RollbackRow] = []  # rows of the pass just made

    @property
    def lengths(self) -> list[int]:
        return [len(row.text) for row in self.rows]

    # -- sharing ------------------------------------------------------------------------------------------------------

    def begin(
        self,
        texts: Sequence[Sequence[int]],
        live: Sequence[Sequence[int]],
        keys: Sequence[Hashable],
        *,
        share: bool = True,
        unread: int = 1,
        most: Sequence[int] | None = None,
    ) -> list[int]:
        """How many tokens of each of ``texts``, whose rows :meth:`open` is about to append, need not be read, because a stored state has
        read them. Arguments as of :class:`~foredraft.models.paged_cache.PagedCache`."""
        self._opening = []
        for text, key, limit in zip(texts, keys, most or map(len, texts)):
            known = min(limit, len(text) - unread)
            # a state that has also read the last token knows the logits after it: see `Rollback._read_prompt`
            state = self.states.find(key, text, known if most else limit) if share else None
            row = RollbackRow(list(text[: min(known, len(state.tokens))]) if state is not None else [], key=key if share else None)
            if state is not None and len(state.tokens) <= known:
                self.take_up(row, state)
            self._opening.append(row)
        return [len(row.text) for row in self._opening]

    def known(self, text: Sequence[int], key: Hashable) -> int:
        """Tokens at the beginning of ``text``, but for its last, that stored states of finished texts have read, for rows of ``key``."""
        state = self.states.find(key, text, len(text) - 1)
        return 0 if state is None else len(state.tokens)

    def leave(self, row: int, text: Sequence[int]) -> None:
        """Row ``row`` is about to be dropped: store its state for texts with the same beginning."""
        leaving = self.rows[row]
        if leaving.live is not None and leaving.live.can_be_cut:
            leaving.live.cut(shared_beginning(leaving.live.tokens, leaving.text, len(leaving.text)))
        states = [state for state in (leaving.live, leaving.kept) if state is not None]
        held = [state for state in states if begins(leaving.text, state.tokens, len(leaving.text))]
        if held and leaving.key is not None:
            self.store(leaving, max(held, key=lambda state: len(state.tokens)))

    def take_up(self, row: RollbackRow, state: State) -> None:
        """``row`` continues from a stored ``state``, on its pages."""
        row.live, row.kept = None, state
        self.pages.take_up(row, state.pages, len(state.tokens))

    def store(self, row: RollbackRow, state: State, instead: int | None = None) -> int | None:
        """Store a ``state`` of ``row``, as :meth:`StateStore.add`."""
        row.read = max(row.read, len(state.tokens))
        return self.states.add(row.key, state, instead, row.pages)

    def share_no_more(self) -> None:
        """Forget all states, and store none of the rows', since they were computed with other weights than what comes."""
        self.states.clear()
        for row in self.rows:
            row.key = None

    # -- how much room there is, in bytes instead of pages ------------------------------------------------------------------

    @property
    def pools(self) -> list[RowMemory]:
        return [self.memory]

    @property
    def unit_bytes(self) -> list[int]:
        return [1]

    def needed(self, text: Sequence[int], key: Hashable, nodes: int, written: int) -> list[int]:
        """Bytes that a row would take for ``text`` and ``nodes`` after it, without full pages that live rows hold."""
        state = self.states.find(key, text, len(text) - 1)
        full = [] if state is None else state.pages[: len(state.tokens) // PAGE]
        return [self.memory.row(len(text) + nodes) - self.pages.page_bytes * sum(self.pages.pool.rows(page) > 0 for page in full)]

    def whole(self, tokens: int, written: int) -> list[int]:
        """Bytes of a row of so many ``tokens``."""
        return [self.memory.row(tokens)]

    def growth(self, nodes: int, without: Sequence[int]) -> list[int]:
        """Bytes that live rows would take for ``nodes`` each, less those of the rows ``without``."""
        rows = [row for index, row in enumerate(self.rows) if index not in without]
        pages = len(set[int]().union(*(row.pages for row in rows)))
        pages += sum(max(0, pages_of(len(row.text) + nodes) - len(row.pages)) for row in rows)
        states = sum(self.memory.states(len(row.text) + nodes) for row in rows)
        return [states + pages * self.pages.page_bytes - self.memory.held]

    def limit(self, memory: int | None, beside: int) -> None:
        """As of :class:`~foredraft.models.paged_cache.PagedCache`."""
        self.memory.limit, self.memory.beside = memory, beside
        self.make_room([0])

    def make_room(self, more: Sequence[int]) -> bool:
        """Whether rows can take so many bytes ``more``; states are evicted for them."""
        return self.memory.make_room(more[0])

    def cost(self, counts: Sequence[int]) -> int:
        return counts[0]

    # -- rows ---------------------------------------------------------------------------------------------------------

    def open(self, lengths: Sequence[int]) -> None:
        """Append rows that hold what :meth:`begin` said, or fresh ones."""
        opening, self._opening = self._opening, []
        self.rows += opening or [RollbackRow() for _ in lengths]

    def reserve(self, tokens: int) -> None:
        """Nothing: transformers allocates as it goes."""

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
        """Keep nothing of these rows once they are dropped."""
        for row in rows:
            self.rows[row].key = None

    def compact(self, keep: Sequence[int]) -> None:
        for row in set(range(len(self.rows))).difference(keep):
            self.pages.drop(self.rows[row])
        self.rows = [self.rows[row] for row in keep]
        self.entered = []

    def forget(self) -> None:
        self.rows, self.entered, self._opening = [], [], []
        self.states.clear()
        self.pages.forget()


class Rollback(Backend):
    """Forward passes over chains, a row at a time, each as transformers' own ``generate`` would make it. A row beyond the model's
    context is not read; its logits, and those of filler, are zeros.

    ``reasons["pages"]`` says why no keys and values are in pages.

    Args:
        facts: a model that takes a cache and can read several tokens after it in one pass.
        chunk: most tokens of text read in one pass.
    """

    ragged = True

    def __init__(self, facts: ModelFacts, overrides: Overrides | None, reasons: dict[str, str], chunk: int):
        super().__init__(facts, overrides, reasons)
        self.model, self.chunk = facts.model, chunk
        self.cache = RollbackCache()
        parameters = inspect.signature(facts.model.forward).parameters
        self._cache_argument = cache_argument(type(facts.model))
        self._takes_positions = "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._paged = False
        why = None if on_cpu(facts.model) else "pages are for CPUs"
        if why is None and (self._cache_argument == "state" or not in_pages(self._empty(), self.cache.pages)):
            why = f"{facts.chains_only}; no layer of it keeps keys and values of all tokens"
        self._paged = why is None
        if why is not None:
            reasons["pages"] = why

    def forward(self, given: ForwardPass) -> PassOutput:
        tree, window, keep = given.tree, given.window, given.keep
        self.cache.entered = self.cache.rows[window.first : window.last]
        chains = tree.tokens.clamp(0, self.facts.vocab_size - 1).tolist()
        counts = [tree.nodes] * tree.rows if tree.valid is None else tree.valid.sum(-1).tolist()
        if keep is not None:
            counts = [node + 1 for node in keep]
        read = self._read if keep is None else self._read_prompt
        found = [read(row, chain[:count], window.before) for row, chain, count in zip(self.cache.entered, chains, counts)]
        logits = together([each[0] for each in found], window.nodes, last=keep is not None)
        if self.features is None:
            return PassOutput(logits)
        last = keep is not None and not self.features.whole
        return PassOutput(logits, together([each[1] for each in found], window.nodes, last=last))

    def _read(self, row: RollbackRow, drafted: list[int], before: int) -> tuple[Tensor, Tensor]:
        """``[n, V]`` logits and ``[n, F * d]`` hidden states at the n tokens of ``drafted`` from ``before`` on, after the row's text."""
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
                self._pass(row, state, whole[len(state.tokens) : end], 1)
            self._pass(row, state, whole[len(state.tokens) : text], 1)
            row.kept = state
            state = row.take(whole, text)
        return self._pass(row, state, whole[len(state.tokens) :], len(drafted) - before)

    def _read_prompt(self, row: RollbackRow, drafted: list[int], before: int) -> tuple[Tensor, Tensor]:
        """As :meth:`_read`, but only for the last token of ``drafted``, unless hidden states are wanted of all. Starts from a stored state
        of a text with the same beginning, if there is one, and stores the state of the row in the end."""
        whole, states = row.text + drafted, self.cache.states
        if row.key is None or (self.facts.context is not None and len(whole) > self.facts.context):
            return self._read(row, drafted, before)
        if self.features is not None and self.features.whole:
            found = self._read(row, drafted, before)
        else:
            known = states.find(row.key, whole, len(whole) - (self.features is not None))
            mine = max((len(each.tokens) for each in (row.live, row.kept) if each is not None), default=0)
            if known is not None and len(known.tokens) > mine:
                self.cache.take_up(row, known)
                if len(known.tokens) == len(whole):
                    assert known.logits is not None
                    row.drafted, row.live = drafted, known
                    return known.logits, known.logits.new_empty(1, 0)
            found = self._read_from(row, drafted)
        assert row.live is not None
        row.live.logits = found[0][-1:].clone()
        row.stored = self.cache.store(row, row.live.copy() if row.live.can_be_cut else row.live, row.stored)
        return found

    def _read_from(self, row: RollbackRow, drafted: list[int]) -> tuple[Tensor, Tensor]:
        """``[1, V]`` logits and hidden states at the last of ``drafted``. Stores a copy of the state where the text leaves another."""
        row.drafted, whole = drafted, row.text + drafted
        state = row.take(whole, len(whole) - 1)
        start, parting = len(state.tokens), self.cache.states.parting(row.key, whole)
        ends = {*range(start + self.chunk, len(whole), self.chunk), len(whole)}
        if start + WORTH_KEEPING <= parting < len(whole) and not state.can_be_cut:
            ends.add(parting)
        for end in sorted(ends):
            found = self._pass(row, state, whole[len(state.tokens) : end], 1)
            if end == parting < len(whole) and not state.can_be_cut:
                state.logits = found[0].clone()
                self.cache.store(row, state.copy())
        return found

    def _pass(self, row: RollbackRow, state: State, tokens: list[int], wanted: int) -> tuple[Tensor, Tensor]:
        """``[wanted, V]`` logits and ``[wanted, F * d]`` hidden states at the last of ``tokens``, which ``state`` of ``row`` reads."""
        start = len(state.tokens)
        if state.memory is None and self._cache_argument != "state":
            state.memory = self._empty()
        if self._paged:
            self.cache.pages.turn_to(row, start, len(tokens))
        arguments: dict[str, Any] = {self._cache_argument: state.memory}
        if self._takes_positions:
            arguments["position_ids"] = torch.arange(start, start + len(tokens), device=self.facts.device)[None]
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = wanted
        self.passes += 1
        with nullcontext() if self.features is None else self.features.catching() as caught:
            output = self.model(input_ids=torch.tensor([tokens], device=self.facts.device), use_cache=True, **arguments)
        state.memory = cache_of(output)
        state.tokens += tokens
        state.logits = None
        if self.cache.memory.sizes is None:
            self.cache.memory.sizes = state.sizes
            self.cache.pages.measure()
        logits = output.logits[0, -wanted:]
        return logits, logits.new_empty(wanted, 0) if caught is None else caught.hidden()[0, -wanted:]

    def _empty(self) -> DynamicCache:
        memory = DynamicCache(config=self.model.config.get_text_config())
        if self._paged:
            in_pages(memory, self.cache.pages)
        return memory

    def measure(self) -> None:
        """Learn how much memory a row takes, if no pass has shown it."""
        if self.cache.memory.sizes is None:
            with torch.inference_mode():
                self._pass(RollbackRow(), State([], None), [0, 0], 1)
            self.release()


def together(found: Sequence[Tensor], nodes: int, *, last: bool) -> Tensor:
    """``[R, nodes, *]`` what was ``found`` at the tokens of each row, padded with zeros; or the last of each row alone, ``[R, 1, *]``."""
    if last:
        return torch.stack([each[-1:] for each in found])
    whole = found[0].new_zeros(len(found), nodes, found[0].shape[-1])
    for line, each in zip(whole, found):
        line[: len(each)] = each
    return whole
