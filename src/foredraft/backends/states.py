"""States of models that cannot branch, kept for later texts with the same beginning.

A recurrent state cannot be turned back to an earlier token, so a text can only continue from a state that was copied exactly there.
Copies are kept of the ends of prompts, of the ends of texts, and of the points where texts were seen to diverge: of three
requests that begin with the same instructions, the second shows where they diverge, and the third does not read the instructions again
(Pan et al. 2024, "Marconi: Prefix Caching for the Era of Hybrid LLMs").
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from foredraft.backends.state_pages import PagedLayer, StatePages
from foredraft.models.page_stores import pages_of
from foredraft.models.pages import PAGE

WORTH_KEEPING = 16  # tokens; shorter beginnings are read again
KEPT = 32  # states without a limit of memory


class State:
    """What a model remembers after reading ``tokens``: a transformers ``Cache``, or a list of tensors (rwkv); None at first.

    Attributes:
        logits: ``[1, V]`` after the last of ``tokens``, if they are known.
        stored: other texts may continue from it, so it must not be written to.
        pages: if it is stored, those that hold its keys and values; otherwise, its row has them.
    """

    def __init__(self, tokens: list[int], memory: Any, logits: Tensor | None = None, pages: Sequence[int] = ()):
        self.tokens, self.memory, self.logits, self.pages, self.stored = tokens, memory, logits, pages, False

    def copy(self) -> State:
        return State(list(self.tokens), copied(self.memory), self.logits, self.pages)

    @property
    def can_be_cut(self) -> bool:
        """Whether every layer holds keys and values of all tokens."""
        return isinstance(self.memory, DynamicCache) and all(type(layer) in (DynamicLayer, PagedLayer) for layer in self.memory.layers)

    def cut(self, length: int) -> None:
        """Forget the tokens after the first ``length``."""
        if length < len(self.tokens):
            for layer in self.memory.layers:
                if type(layer) is DynamicLayer:
                    layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
            del self.tokens[length:]
            self.logits = None

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes that do not depend on how many tokens it has read, and bytes of each token. Pages are in neither."""
        layers = self.memory.layers if isinstance(self.memory, DynamicCache) else []
        held = [each for layer in layers for each in (getattr(layer, "keys", None), getattr(layer, "values", None)) if each is not None]
        held = [each for each in held if each.numel()]
        return self.bytes - sum(each.nbytes for each in held), sum(each.nbytes // each.shape[-2] for each in held)

    @property
    def bytes(self) -> int:
        """What it takes beside its pages."""
        return sum(each.nbytes for each in tensors_in(self.memory)) + (0 if self.logits is None else self.logits.nbytes)


class StateStore:
    """States of texts, by the keys of their rows. They must not be written to. The least recently used one is evicted first.

    Args:
        pages: where the keys and values of states and rows are.

    Attributes:
        limit: bytes of all states together; None for at most :data:`KEPT` of them.
        evicted: how many have been evicted for others.
    """

    def __init__(self, pages: StatePages | None = None) -> None:
        self.pages = StatePages() if pages is None else pages
        self.limit: int | None = None
        self._states: dict[Hashable, dict[int, tuple[State, int]]] = {}  # by key and number: states and their bytes; oldest first
        self._order: dict[int, Hashable] = {}  # keys by number, the least recently used first
        self._next = self._bytes = self.evicted = 0

    def clear(self) -> None:
        while self._states:  # not by `_order`, from which an interrupt can have taken a state alone
            _, states = self._states.popitem()
            for state, _ in states.values():
                self.pages.pool.give_up(state.pages)
        self._order, self._bytes = {}, 0

    def __len__(self) -> int:
        return len(self._order)

    @property
    def bytes(self) -> int:
        """What they take, with the pages that no row holds."""
        return self._bytes + self.pages.pool.cached * self.pages.page_bytes

    def add(self, key: Hashable, state: State, instead: int | None = None, pages: Sequence[int] = ()) -> int | None:
        """Store ``state``, which must not be written to from now on, in place of number ``instead``. Returns its number, or None.

        Args:
            pages: of its row, whose first slots hold the keys and values of its tokens.
        """
        if instead in self._order:
            self._remove(instead)
        if len(state.tokens) < WORTH_KEEPING:
            return None
        for number, (other, _) in self._states.get(key, {}).items():
            if other.tokens == state.tokens:
                self._use(number)
                other.logits = state.logits if other.logits is None else other.logits
                return None
        state.stored, state.pages = True, pages[: pages_of(len(state.tokens))]
        self.pages.pool.keep(state.pages)
        number, size = self._next, state.bytes
        self._next += 1
        self._states.setdefault(key, {})[number] = state, size
        self._order[number] = key
        self._bytes += size
        self.shrink()
        return number

    def shrink(self) -> None:
        """Evict states beyond the limit, but for the one that was used last: a prompt that is read in pieces continues from it."""
        while len(self._order) > 1 and (len(self._order) > KEPT if self.limit is None else self.bytes > self.limit):
            self._remove(next(iter(self._order)))
            self.evicted += 1

    def find(self, key: Hashable, text: Sequence[int], most: int) -> State | None:
        """The state that has read the longest part of ``text[:most]`` and nothing else; all of ``text`` only if it has the logits after it.
        It must not be written to."""
        best, found = WORTH_KEEPING - 1, None
        for number, (state, _) in self._states.get(key, {}).items():
            length = len(state.tokens)
            if state.can_be_cut:
                length = shared_beginning(state.tokens, text, most)
                length -= length == len(text) and (state.logits is None or length < len(state.tokens))
            elif length == len(text) and state.logits is None:
                continue
            if length > best and (state.can_be_cut or begins(text, state.tokens, most)):
                best, found = length, number
        if found is None:
            return None
        self._use(found)
        state = self._states[key][found][0]
        if state.can_be_cut:  # only a copy is cut
            state = state.copy()
            state.cut(best)
        return state

    def parting(self, key: Hashable, text: Sequence[int]) -> int:
        """The length of the longest beginning that ``text`` has in common with a stored text."""
        return max((shared_beginning(state.tokens, text, len(text)) for state, _ in self._states.get(key, {}).values()), default=0)

    def _use(self, number: int) -> None:
        self._order[number] = self._order.pop(number)

    def _remove(self, number: int) -> None:
        key = self._order.pop(number)
        state, size = self._states[key].pop(number)
        self.pages.pool.give_up(state.pages)
        self._bytes -= size
        if not self._states[key]:
            del self._states[key]


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


def tensors_in(memory: Any) -> Iterator[Tensor]:
    if isinstance(memory, Tensor):
        yield memory
    elif isinstance(memory, (list, tuple, dict)):
        for each in memory.values() if isinstance(memory, dict) else memory:
            yield from tensors_in(each)
    elif isinstance(memory, DynamicCache):
        for layer in memory.layers:
            yield from tensors_in(vars(layer))


class RowMemory:
    """The memory of live rows, in bytes rather than in pages, and what it leaves for the states of ``store``. A row that is read
    holds two states: the one after its last pass, and one to roll back to. Both have their keys and values in the row's pages.

    Args:
        lengths: of the live rows, in tokens.

    Attributes:
        limit: bytes of rows and states together; None for no limit.
        sizes: as :attr:`State.sizes`; None before anything was read.
    """

    def __init__(self, store: StateStore, lengths: Callable[[], Sequence[int]]) -> None:
        self.store, self.pages, self._lengths = store, store.pages, lengths
        self.limit: int | None = None
        self.sizes: tuple[int, int] | None = None
        self.beside = 0  # bytes that a draft keeps for each page of tokens

    def states(self, tokens: int) -> int:
        """Bytes of a row of so many ``tokens``, pages left out."""
        fixed, each = self.sizes or (0, 0)
        return 2 * (fixed + tokens * each) + tokens * self.beside // PAGE

    def row(self, tokens: int) -> int:
        """Bytes of a row of so many ``tokens`` that shares no pages."""
        return self.states(tokens) + pages_of(tokens) * self.pages.page_bytes

    @property
    def held(self) -> int:
        """Bytes that rows take."""
        return sum(map(self.states, self._lengths())) + self.pages.pool.held * self.pages.page_bytes

    @property
    def shared(self) -> int:
        """Of these, bytes of pages that two or more rows hold."""
        return self.pages.pool.shared * self.pages.page_bytes

    def make_room(self, more: int) -> bool:
        """Whether rows can take so many bytes ``more``. If so, states that this leaves no room for are evicted."""
        if self.limit is not None:
            if self.held + more > self.limit:
                return False
            self.store.limit = self.limit - self.held - max(0, more)
            self.store.shrink()
        return True

    @property
    def cached(self) -> int:
        """Bytes of states of texts, and of pages that only they hold."""
        return self.store.bytes

    @property
    def evicted(self) -> int:
        """States that were evicted for others."""
        return self.store.evicted

    def unlimited(self) -> AbstractContextManager[None]:
        return nullcontext()
