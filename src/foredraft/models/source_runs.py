"""What is kept of the sources of models with an encoder, and the caches whose rows have a source each.

The keys and values that cross-attention makes of a source are its *run*: as many pages of 64 source tokens as it needs. They are taken at
once, because a source never grows, and allocated as one piece. Rows with equal sources hold the same run. When no row holds it any more,
it stays for later rows with an equal source, until the memory is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

from foredraft.errors import CacheMemoryError
from foredraft.models.cache import TreeCache
from foredraft.models.page_stores import Kind, pages_of
from foredraft.models.paged_cache import PagedCache
from foredraft.models.pages import PAGE, LimitedPool, PagePool

SPARE = 64  # pages of sources that may be kept in any case


@dataclass(eq=False)
class Encoded:
    """What is kept of a ``source`` (:class:`~foredraft.models.encoder_decoder.Source`).

    Attributes:
        states: ``[S, d]`` of the encoder, without padding.
        key: later rows find it by this.
        keys: by layer, the keys and values ``[heads, S, size]`` that the decoder makes of the states.
        rows: how many live rows hold it.
    """

    source: Any
    states: Tensor
    key: Hashable = None
    keys: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    rows: int = 0

    @property
    def pages(self) -> int:
        return pages_of(len(self.states))

    @property
    def page_bytes(self) -> int:
        """Of a page of a run like this one, states included."""
        held = [self.states, *(each for pair in self.keys for each in pair)]
        return PAGE * sum(each.nbytes for each in held) // len(self.states)

    def part(self) -> None:
        """Keep nothing alive of other sources that were read together with this one."""
        self.keys = [(_alone(keys), _alone(values)) for keys, values in self.keys]


class RunPool(LimitedPool):
    """Counts which runs rows hold, and keeps those that no row holds any more until others need their memory. All figures are pages.

    Attributes:
        spare: so many pages may be kept, or as many as rows ever held at once, as far as the limit allows.
        held: pages that some row holds.
        shared: pages that two or more rows hold.
        cached: pages that are kept and that no row holds.
        evicted: how many of those were given up.
    """

    def __init__(self) -> None:
        self.spare = SPARE
        self._limit = None
        self.clear()

    def clear(self) -> None:
        """Forget every run and row."""
        self._kept: dict[Hashable, Encoded] = {}  # by key; the least recently used first
        self.held = self.shared = self.cached = self.evicted = self._most_held = 0

    def forget(self) -> None:
        """Later rows find none of the runs. Live rows keep theirs."""
        self._kept, self.cached = {}, 0

    @property
    def kept(self) -> list[Encoded]:
        return list(self._kept.values())

    def find(self, key: Hashable) -> Encoded | None:
        """The run of a key, if it is kept; it counts as just used."""
        run = self._kept.pop(key, None)
        if run is not None:
            self._kept[key] = run
        return run

    def hold(self, run: Encoded) -> None:
        """One more row holds a run. Raises CacheMemoryError if there is no room for it; then nothing has changed."""
        if not run.rows:
            if self.room is not None and run.pages > self.room:
                raise CacheMemoryError(
                    f"the key-value cache has room for {self.room} more pages of {PAGE} tokens of sources, and {run.pages} are needed"
                )
            self.held += run.pages
            self.cached -= run.pages if run.key in self._kept else 0
        self._kept[run.key] = run
        run.rows += 1
        self.shared += run.pages if run.rows == 2 else 0
        self._most_held = max(self._most_held, self.held)
        self._shrink()

    def drop(self, run: Encoded) -> None:
        """One row fewer holds a run."""
        run.rows -= 1
        self.shared -= run.pages if run.rows == 1 else 0
        if not run.rows:
            self.held -= run.pages
            if self._kept.get(run.key) is run:
                self.cached += run.pages
                run.part()
                self._shrink()

    def _shrink(self) -> None:
        """Give up runs that no row holds, as far as they are too many."""
        allowed = max(self.spare, self._most_held)
        if self._limit is not None:
            allowed = min(allowed, max(0, self._limit - self.held))
        for key, run in list(self._kept.items()) if self.cached > allowed else ():
            if not run.rows and self.cached > allowed:
                del self._kept[key]
                self.cached -= run.pages
                self.evicted += run.pages


@dataclass(eq=False)
class CrossLayer:
    """Keys and values ``[R, heads, S, size]`` of one layer, as the rows of a pass read them."""

    keys: Tensor
    values: Tensor
    is_sliding = False

    def get_seq_length(self) -> int:
        return self.keys.shape[-2]


class CrossKeys(Cache):
    """The cross-attention half of a cache, for the rows of one pass of a model that runs its own layers.

    The rows of most passes are those of the last one. When they change, their keys are copied together again, and each source then keeps
    a view of the copy, so that nothing is held twice.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.clear()

    def clear(self) -> None:
        self.layers: list[CrossLayer] = []
        self.rows: list[Encoded] = []
        self.pointers: Any = None  # to the keys of `rows`, which kernels have made

    def over(self, rows: Sequence[Encoded]) -> bool:
        """Whether the last pass was over the same ``rows``. If not, forget what was made for it."""
        if len(rows) == len(self.rows) and all(a is b for a, b in zip(rows, self.rows)):
            return True
        self.clear()
        self.rows = list(rows)
        return False

    def enter(self, rows: Sequence[Encoded]) -> None:
        """The next pass is over ``rows``. Either all of them have keys, or none, and then the pass makes them."""
        if self.over(rows) and self.layers:
            return
        self.pointers = None
        self.layers = [self._together(layer) for layer in range(len(rows[0].keys))]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The keys and values that a layer has made of each row's states."""
        if layer_idx != len(self.layers):
            raise RuntimeError(f"cross-attention of layer {layer_idx} comes after {len(self.layers)} others")
        key_states, value_states = key_states.contiguous(), value_states.contiguous()
        self.layers.append(CrossLayer(key_states, value_states))
        for row, keys, values in zip(self.rows, key_states, value_states):
            length = len(row.states)
            row.keys.append((keys[:, :length], values[:, :length]))
        return key_states, value_states

    def _together(self, layer: int) -> CrossLayer:
        """Keys and values of all rows, shorter sources padded with zeros."""
        first, *others = (row.keys[layer] for row in self.rows)
        if all(row is self.rows[0] for row in self.rows):
            first = self.rows[0].keys[layer] = _alone(first[0]), _alone(first[1])  # others that it was read with may be gone
            return CrossLayer(*(each.expand(len(self.rows), *each.shape) for each in first))
        longest = max(len(row.states) for row in self.rows)
        stores = [each.new_zeros(len(self.rows), each.shape[0], longest, each.shape[2]) for each in first]
        for index, (keys, values) in enumerate([first, *others]):
            for store, held in zip(stores, (keys, values)):
                store[index, :, : held.shape[1]] = held
        for index, row in enumerate(self.rows):
            length = len(row.states)
            row.keys[layer] = stores[0][index, :, :length], stores[1][index, :, :length]
        return CrossLayer(*stores)


class SourcedCache(TreeCache):
    """A cache whose rows have a source each. What a row holds depends on it, so rows share beginnings only where their sources are equal.

    Attributes:
        runs: what is kept of sources.
        sources: of live rows.
        cross: the keys of the rows of a pass; ``both`` is what models get.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.runs, self.cross = RunPool(), CrossKeys()
        self.sources: list[Encoded] = []
        self._opening: list[Encoded] = []
        self.both = EncoderDecoderCache(self, self.cross)

    def hold(self, sources: Sequence[Any], keys: Sequence[Hashable], encode: Callable[[Sequence[Any]], Mapping[Any, Tensor]]) -> None:
        """Take the runs of ``sources``, whose rows :meth:`open` is about to append. Rows of equal ``keys`` have the same.

        Args:
            encode: returns the encoder's states ``[S, d]`` of sources whose runs are not kept.

        Raises:
            CacheMemoryError: there is no room for them; nothing has changed.
        """
        self.let_go()
        known: list[Encoded | None] = []
        try:
            for key in keys:
                known.append(self.runs.find(key))
                self._hold(known[-1])  # before others are made at its expense
            states = encode([source for source, run in zip(sources, known) if run is None])
            for index, (source, key) in enumerate(zip(sources, keys)):
                if known[index] is None:
                    run = self.runs.find(key) or Encoded(source, _alone(states[source]), key)
                    self._hold(run)
                    known[index] = run
        except BaseException:
            self.let_go()
            raise
        self._opening = [run for run in known if run is not None]  # in the order of rows

    def _hold(self, run: Encoded | None) -> None:
        if run is not None:
            self.runs.hold(run)
            self._opening.append(run)

    def let_go(self) -> None:
        """The rows that were about to be opened will not be."""
        for run in self._opening:
            self.runs.drop(run)
        self._opening = []

    def open(self, lengths: Sequence[int]) -> None:
        super().open(lengths)
        self.sources += self._opening
        self._opening = []

    def compact(self, keep: Sequence[int]) -> None:
        super().compact(keep)
        for row in set(range(len(self.sources))).difference(keep):
            self.runs.drop(self.sources[row])
        self.sources = [self.sources[row] for row in keep]
        self.cross.clear()

    def share_no_more(self) -> None:
        super().share_no_more()
        self.runs.forget()

    def forget(self) -> None:
        super().forget()
        self.sources, self._opening = [], []
        self.runs.clear()
        self.cross.clear()

    @property
    def bytes(self) -> int:
        return super().bytes + sum(each.nbytes for run in {*self.sources, *self.runs.kept} for pair in run.keys for each in pair)


class SourcedPages(SourcedCache, PagedCache):
    """A :class:`SourcedCache` in pages. The last of its :attr:`pools` is that of the sources.

    Args:
        run_bytes: of a page of a source.
    """

    def __init__(self, kinds: Sequence[Kind], *, run_bytes: int, handed: bool = False) -> None:
        self.run_bytes, self._beside_runs = run_bytes, 0
        super().__init__(kinds, handed=handed)

    def keep_to(self, other: PagedCache) -> None:
        super().keep_to(other)
        if isinstance(other, SourcedPages):
            self.runs.spare = other.runs.spare
            self.runs.keep_to(other.runs)

    @property
    def pools(self) -> list[PagePool | RunPool]:
        return [*super().pools, self.runs]

    @property
    def unit_bytes(self) -> list[int]:
        return [*super().unit_bytes, self.run_bytes]

    @property
    def _sizes(self) -> list[int]:
        *texts, runs = super()._sizes
        return [*texts, runs + self._beside_runs]

    def limit(self, memory: int | None, beside: int, beside_runs: int = 0) -> None:
        self._beside_runs = beside_runs
        super().limit(memory, beside)

    def begin(self, *given: Any, **named: Any) -> list[int]:
        try:
            return super().begin(*given, **named)
        except BaseException:
            self.let_go()
            raise

    def growth(self, nodes: int, without: Sequence[int]) -> list[int]:
        kept = {run for row, run in enumerate(self.sources) if row not in without}
        return [*super().growth(nodes, without), -sum(run.pages for run in {*self.sources} - kept)]


def new_cache(*, sourced: bool, kinds: Sequence[Kind] | None = None, run_bytes: int = 0, handed: bool = False) -> TreeCache:
    """A cache for a model, with an encoder if it is ``sourced``; in pages, if the ``kinds`` of its layers are given."""
    if kinds is None:
        return SourcedCache() if sourced else TreeCache()
    return SourcedPages(kinds, run_bytes=run_bytes, handed=handed) if sourced else PagedCache(kinds, handed=handed)


def _alone(part: Tensor) -> Tensor:
    """``part``, copied if it is a view of more."""
    return part.clone() if part.untyped_storage().nbytes() > part.nbytes else part
