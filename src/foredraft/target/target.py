"""The target: an unmodified transformers model behind a few verbs, open, prefill, score, advance and commit.

How its passes are made is the business of a backend (:mod:`foredraft.backends`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.backends.base import ForwardPass
from foredraft.backends.choice import SAMPLE, choose
from foredraft.backends.invariance import invariance_test
from foredraft.backends.rollback import RollbackCache
from foredraft.backends.states import RowMemory
from foredraft.device import autocast_on, can_reserve, to_device, without_autocast
from foredraft.errors import ConfigurationError
from foredraft.models.cache import Window
from foredraft.models.cache_sizes import in_words, parse_memory
from foredraft.models.changes import STRUCTURE, ModelState
from foredraft.models.encoder_decoder import Source, routers, some_source
from foredraft.models.features import Features, PromptStates, Tap, features_of, taps_of
from foredraft.models.layers import layer_count
from foredraft.models.page_stores import pages_of
from foredraft.models.paged_cache import PagedCache
from foredraft.models.pages import PAGE, PagePool
from foredraft.models.source_runs import RunPool, SourcedPages
from foredraft.models.support import ModelFacts, describe, unwrap
from foredraft.target.budgets import budget, largest_pass
from foredraft.target.passes import Passes
from foredraft.target.prefixes import KEEPING, Companion, Texts
from foredraft.tree import TokenTree
from foredraft.turns import Turn

PREFILL_CHUNK = 1024  # tokens of one row in a prefill pass
PREFILL_TOKENS = 4096  # tokens of all rows in a prefill pass
SCORED = 1 << 24  # most logits of a scored prompt in one pass
SOURCE = 64  # tokens of the source with which a model is timed
RESERVE = 4096  # tokens per row allocated ahead of their use, at most
FAR = 1 << 30  # tokens of a text of which no window sees all


def nothing_beside() -> tuple[int, int]:
    return 0, 0


def _group(isolation: str | None, source: Source | None) -> Hashable:
    """What rows that share beginnings have in common."""
    return isolation if source is None else (isolation, source.key)


class Target(Passes):
    """A language model, causal or with an encoder, whose cache can forget.

    Rows are physical: ``open`` appends them, ``compact`` drops some and moves later ones forward, and every call takes
    or returns them in that order.

    Args:
        model: a ``PreTrainedModel`` with sdpa or eager attention; PEFT adapters and device maps are fine.
        test: run the self-test (a few passes over a handful of tokens).
        prefill_chunk: as in :class:`~foredraft.Speculator`. Within a budget, layers with a window may make it smaller.
        reuse_prefix: as in :class:`~foredraft.Speculator`.
        execution: as in :class:`~foredraft.Speculator`.
        attention: as in :class:`~foredraft.Speculator`.
        wait: as in :class:`~foredraft.Speculator`.
        cache_memory: as in :class:`~foredraft.Speculator`; None for no limit.
        paged: have keys and values in pages even where they must then be copied in every pass. A limit of memory asks for that, too.
        owned: nobody else holds the model, so that packed weights may replace the originals.

    Attributes:
        context: most tokens that a row may hold; None if the model sets no limit.
        trained: tokens that the model was made for; None if it does not say.
        outgrown: a session has warned that a row is longer than that.
        backend: what makes the passes.
        kept: by layer, ``[R, N, d]`` its outputs at the nodes of the last tree that was scored, see :meth:`keep`.
        tokenizer: of the model, where the user has given one.
        sourced: the model has an encoder, so that every row has a source.
        layer_tokens: per decoder layer, the tokens that it has read in all passes so far, filler of ragged rows included.
        version: grows whenever the model was found changed; rows from before are gone then.
        prompt_hidden: hidden states of the prompts that were just prefilled, see :meth:`read`.
        single: the last call of :meth:`decode` made one pass although it was asked for more, and later ones will do so, too.
        hidden: ``[R, N - first, F * d]`` the :attr:`features` at the nodes of the last pass, :meth:`score` or :meth:`advance`, in the
            model's dtype, on :attr:`device`; None if there are none. Values at filler of a chain are arbitrary. The caller owns it.

    Raises:
        UnsupportedModelError: the model cannot roll back, or fails the self-test.
        ConfigurationError: an execution or an attention that the model cannot have.
        BusyError: another thread is using the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        test: bool = True,
        prefill_chunk: int = PREFILL_CHUNK,
        reuse_prefix: bool = True,
        execution: str = "auto",
        owned: bool = False,
        attention: str = "auto",
        wait: bool = False,
        cache_memory: str | float | None = "auto",
        paged: bool = False,
    ):
        facts = ModelFacts.of(unwrap(model))
        super().__init__(facts)
        self.wait, self.outgrown = wait, False
        self.tokenizer: Any = None
        self.prefill_chunk = self._asked_chunk = prefill_chunk
        self.owner: object = None  # a token of the session whose rows these are
        counted = facts.sourced and routers(facts.model.get_decoder())  # what tokens experts take then depends on the whole prompt
        self.reuse_prefix = reuse_prefix and not counted
        self._texts = Texts()
        self._companion: Companion | None = None  # must be told of every token that it does not hold
        self.version = 0
        self._taps: list[Tap | None] = []  # where hidden states can be caught, once that was asked
        self._reused_prefix = self.reuse_prefix  # as it was before a drafter asked for states of whole texts
        self._state = ModelState.of(self.model)
        self._invariance: tuple[Any, str | None] = (None, None)  # the backend that was tested, and why it has none
        self._how: dict[str, Any] = {"execution": execution, "attention": attention, "owned": owned, "test": test, "chunk": prefill_chunk}
        self._how["paged"] = paged or (cache_memory is not None and parse_memory(cache_memory) is not None)
        self._autocast: torch.dtype | None = None  # as it was when the rows were read
        with Turn([], [self.model], wait=wait), without_autocast(self.device):
            self._state.look({})
            self._dtype, self.backend = self.model.dtype, choose(facts, **self._how)
        self._seen = dict(self._state.counts)
        self._beside: Callable[[], tuple[int, int]] = nothing_beside  # bytes that a drafter keeps for each page
        try:
            self._asked = cache_memory
            self._take_budget()
        except ConfigurationError:
            self.backend.close()
            raise

    # -- a model that changes -----------------------------------------------------------------------------------------

    def follow(self) -> None:
        """If the model has changed since the last call, drop all rows, and what was made from the model as it was. See
        :mod:`foredraft.models.changes` for what is seen.

        Raises:
            ConfigurationError: the change cannot be followed.
            UnsupportedModelError: the model cannot be served as it is now.
        """
        changed, before, self._autocast = self._state.look(self._seen), self._autocast, autocast_on(self.device)
        if self._autocast != before:  # what is cached was computed in another dtype
            self.release()
            self.version += 1
        if not changed:
            return
        facts = ModelFacts.of(self.model)
        if facts.vocab_size != self.vocab_size:
            raise ConfigurationError(
                f"the vocabulary of {describe(self.model)} had {self.vocab_size} tokens and has {facts.vocab_size} now "
                "(resize_token_embeddings), but what drafts for it was made for the former; build a new Speculator"
            )
        if facts.device != self.device:
            raise ConfigurationError(f"{describe(self.model)} was moved from {self.device} to {facts.device}; build a new Speculator")
        self.release()
        self.version += 1
        with torch.inference_mode(False), torch.no_grad():
            if changed & STRUCTURE or self.model.dtype != self._dtype:
                self._rebuild(facts)
            else:
                self.backend.forget_model()
        self._seen = dict(self._state.counts)

    def _rebuild(self, facts: ModelFacts) -> None:
        """Choose anew how passes are made."""
        before = self.backend.features
        self.backend.close()
        self._dtype, self.context, self.trained, self._taps = self.model.dtype, facts.context, facts.trained, []
        layers = layer_count(self.model)
        self.layer_tokens = [*self.layer_tokens, *[0] * layers][:layers]  # callers take differences of these counts
        with without_autocast(self.device):
            self.backend = choose(facts, **self._how)
        self._limit()
        if before is not None:
            self.reuse_prefix = self._reused_prefix  # until states of whole texts are asked for again
            self.read(before.numbers, whole=before.whole, companion=self._companion)

    @property
    def batch_invariant(self) -> bool:
        """Whether logits have the same bits whatever else is in a pass: other rows, a tree or chain of drafts, more or less of the prompt.
        With the rule ``match``, a text then depends on nothing else either. A few passes test this when it is asked for first;
        ``reasons["batch_invariant"]`` says why not."""
        if self._invariance[0] is not self.backend:
            self._invariance = self.backend, invariance_test(self.backend)
            if self._invariance[1] is not None:
                self.backend.reasons["batch_invariant"] = self._invariance[1]
        return self._invariance[1] is None

    def share_budget(self, page_bytes: Callable[[], tuple[int, int]]) -> None:
        """``cache_memory`` is also for what a drafter keeps of as many tokens: ``page_bytes()`` beside each page of a text, and beside each
        page of a source. Its weights are loaded, so that they no longer count as free memory."""
        self._beside = page_bytes
        self._take_budget()

    def _take_budget(self) -> None:
        self._cache_memory = (False, None) if self._asked is None else budget(self._asked, self.device, self._largest_pass)
        self._limit()

    def _largest_pass(self) -> int | None:
        """Bytes that a pass takes at most besides the cache; None if that is not known."""
        if self._counted is None:
            return 0  # nothing is limited
        if not isinstance(self.cache, PagedCache):
            return None
        tokens = min(self._asked_chunk, self.trained or self._asked_chunk)
        logits = min(SCORED, PREFILL_TOKENS * self.vocab_size)
        return largest_pass(self.model, max(1, PREFILL_TOKENS // tokens), tokens, logits)

    def _limit(self) -> None:
        """The cache may have so many pages.

        Raises:
            ConfigurationError: a limit was asked for, and the cache has no pages, or not one fits.
        """
        (asked, size), cache = self._cache_memory, self._counted
        if cache is None and asked:
            raise ConfigurationError(
                f"cache_memory needs a cache in pages, and that of {describe(self.model)} has none: {self.reasons['pages']}; "
                "leave cache_memory out"
            )
        if cache is None:
            return
        beside, beside_runs = self._beside()
        if isinstance(cache, SourcedPages):
            cache.limit(size, beside, beside_runs)
        else:
            cache.limit(size, beside)
        paged = isinstance(cache, PagedCache)
        if asked and isinstance(cache, PagedCache):
            cache.fill()
        self.prefill_chunk = self._chunk_within(size)
        least, what = (self.cost([1] * len(self.pools)), "one page of 64 tokens") if paged else (self.cost(self.whole(1)), "one row")
        if size is not None and size < least:
            raise ConfigurationError(f"cache_memory has no room for {what}, which takes {in_words(least)} here; allow more")

    def _chunk_within(self, size: int | None) -> int:
        """How many tokens of a row a prefill pass reads at most, so that layers with a window take an eighth of the budget for them at
        most. Other layers keep them anyway."""
        chunk, cache = self._asked_chunk, self._counted
        assert cache is not None
        least = cache.cost(cache.whole(FAR, PAGE))
        while size is not None and chunk > PAGE and 8 * (cache.cost(cache.whole(FAR, chunk)) - least) > size:
            chunk = max(PAGE, chunk // 2)
        return chunk

    # -- rows ---------------------------------------------------------------------------------------------------------

    def open(
        self,
        texts: Sequence[Sequence[int]],
        *,
        reserve: Sequence[int] = (),
        sources: Sequence[Source | None] = (),
        isolations: Sequence[str | None] = (),
        unread: int = 1,
        share: bool = True,
    ) -> None:
        """Append a row for each text. What the cache holds of its beginning, from live or finished rows, is not computed again. They share
        beginnings with each other, too, so they must be read, in this order, before anything else happens to their rows.

        Args:
            texts: the prompts; a list that its owner extends as tokens are committed.
            reserve: tokens each row will hold in the end, as far as that is known, so that the cache need not grow.
            sources: what the encoder reads for each row, where the model has one. It reads equal sources once.
            isolations: rows that differ in these share nothing; None for all unless given.
            unread: so many tokens of each text must be computed in any case, because their outputs are wanted.
            share: whether they may share beginnings; otherwise they need not be read at once.

        Raises:
            CacheMemoryError: the cache has no room for them; nothing has changed.
        """
        self.follow()
        first, isolations = len(self.lengths), isolations or [None] * len(texts)
        share, most = share and self.reuse_prefix, None
        groups = [_group(*each) for each in zip(isolations, sources or [None] * len(texts), strict=True)]
        if self.sourced:
            self.backend.encode([source for source in sources if source is not None], groups)
        if self._companion is not None:
            most = self._companion.open(texts, groups, share=share, unread=unread)
        rows, lengths = self._texts.find(self.cache, texts, groups, share=share, unread=unread, most=most)
        self.backend.open(lengths)
        self.cache.reserve(self.backend.roomy(min(max(reserve, default=0), RESERVE)))
        if rows:
            self.cache.gather(rows, lengths, first)
        self._texts.add(texts, groups)

    @property
    def _counted(self) -> PagedCache | RollbackCache | None:
        """The cache, if it counts the memory of rows: in pages, or in bytes if it keeps states."""
        return self.cache if isinstance(self.cache, KEEPING) else None

    @property
    def pools(self) -> Sequence[PagePool | RunPool | RowMemory]:
        """The pools of pages of each kind of layer, and last of sources; or of bytes; none if the cache does not count memory."""
        return [] if self._counted is None else self._counted.pools

    @property
    def page_bytes(self) -> list[int]:
        """Bytes of a page of each kind of layer, and last of a source; 1 if bytes are counted; none if the cache does not count memory."""
        return [] if self._counted is None else self._counted.unit_bytes

    @property
    def source_bytes(self) -> int:
        """Bytes of a page of a source; 0 if sources are not counted."""
        return self.page_bytes[-1] if self.counts_sources else 0

    @property
    def counts_sources(self) -> bool:
        """Whether the last of :attr:`pools` is that of sources."""
        return isinstance(self.cache, SourcedPages)

    @property
    def budget(self) -> int | None:
        """Bytes that the cache may take, including what a drafter keeps beside it; None for no limit."""
        return self._cache_memory[1]

    def needed(self, text: Sequence[int], isolation: str | None, nodes: int, source: Source | None = None) -> list[int]:
        """Pages of each kind that a row would take for ``text`` and ``nodes`` after it, and for its source, beyond those that live rows
        hold."""
        if self._counted is None:
            return []
        group = _group(isolation, source)
        if not self.reuse_prefix:
            pages = self._counted.whole(len(text) + nodes, max(nodes, self.prefill_chunk))
        else:
            pages = self._texts.needed(self._counted, text, group, nodes, max(nodes, self.prefill_chunk))
            if self._companion is not None and isinstance(self.cache, PagedCache):
                pages[0] = max(pages[0], self._companion.needed(text, group, nodes))
        return [*pages, *self._of_source(source, group)]

    def whole(self, tokens: int, source: Source | None = None) -> list[int]:
        """Pages of each kind that a row of so many ``tokens``, and its source, take at most."""
        return [] if self._counted is None else [*self._counted.whole(tokens, self.prefill_chunk), *self._of_source(source)]

    def _of_source(self, source: Source | None, group: Hashable = None) -> list[int]:
        """Pages that a source takes, none if a live row of the ``group`` holds them; nothing where these are not counted."""
        if source is None or not isinstance(self.cache, SourcedPages):
            return []
        run = self.cache.runs.find(group)
        return [0 if run is not None and run.rows else pages_of(self.backend.source_length(source))]

    def cost(self, pages: Sequence[int]) -> int:
        """Bytes of ``cache_memory`` for so many ``pages`` of each kind."""
        return 0 if self._counted is None else self._counted.cost(pages)

    def reserve_cache(self) -> None:
        """Have room for all of ``cache_memory`` when the cache first grows. Else its tensors double again and again as texts come, and all
        rows wait while they are copied. For a CPU with Linux; elsewhere this does nothing."""
        if isinstance(self.cache, PagedCache) and self.device.type == "cpu" and can_reserve():
            for store in self.cache.stores:
                store.at_once = True

    def limit_to_held(self) -> bool:
        """After an allocation failed: the cache may take no more from now on than there was memory for. Whether that is less than before,
        and leaves pages for a row."""
        if not isinstance(self.cache, PagedCache):
            return False
        size = self.cost([store.room for store in self.cache.stores])
        if size < self.cost([1] * len(self.pools)) or (self.budget is not None and size >= self.budget):
            return False
        self._cache_memory = self._cache_memory[0], size
        self._limit()
        return True

    def make_room(self, pages: Sequence[int]) -> bool:
        """Whether rows can take so many more ``pages`` of each kind."""
        return self._counted is None or self._counted.make_room(pages)

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        """Inside, pages may be made beyond their limit."""
        with ExitStack() as every:
            for pool in self.pools:
                every.enter_context(pool.unlimited())
            yield

    def unread(self, text: Sequence[int], isolation: str | None, source: Source | None = None) -> int | None:
        """Tokens of ``text`` that its row would have to read; None if the cache would not find a part of it that was read before."""
        if self._counted is None or not self.reuse_prefix or (self._companion is not None and not isinstance(self.cache, PagedCache)):
            return None
        group = _group(isolation, source)
        known = self._texts.known(self._counted, text, group)
        return len(text) - (known if self._companion is None else min(known, self._companion.known(text, group)))

    def growth(self, nodes: int, *, without: Sequence[int] = ()) -> list[int]:
        """Pages of each kind that the live rows would take for ``nodes`` each, less what dropping the rows ``without`` would free."""
        return [] if self._counted is None else self._counted.growth(nodes, without)

    def some_sources(self, rows: int) -> list[Source | None]:
        """Sources to try ``rows`` rows with; None for each where the model has no encoder."""
        return [some_source(self.model, SOURCE) if self.sourced else None] * rows

    def compact(self, keep: Sequence[int]) -> None:
        """Drop every row not in ``keep``, ascending physical indices."""
        self._early = None
        self._texts.compact(self.cache, keep, share=self.reuse_prefix)

    def wipe(self, rows: Sequence[int]) -> None:
        """These rows, physical indices, may hold NaN and are about to be dropped: no later row shares or reads what they hold. A mask
        alone does not keep NaN out, because zero times NaN is NaN."""
        self._texts.wipe(self.cache, rows)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget every token after the first ``lengths[r]`` of each row."""
        self.cache.rewind(lengths)

    def reset(self) -> None:
        """Drop all rows; the buffers stay for the next call."""
        self.compact([])

    def release(self) -> None:
        """Drop all rows and give the memory back."""
        self.backend.release()
        self._texts.clear()
        self.hidden, self.prompt_hidden, self.kept = None, None, {}

    def unpack(self) -> None:
        """Release everything that was made from the model, packed weights included, which are made anew for the next rows."""
        self.release()
        self._state.mark("weights")
        if self.backend.overrides is not None:
            self.backend.overrides.unpack()

    @contextmanager
    def unpacked(self) -> Iterator[None]:
        """Inside, the model holds its own weights, whatever layout passes read."""
        overrides = self.backend.overrides
        with torch.inference_mode(False), torch.no_grad():
            if overrides is not None:
                overrides.unpack()
            try:
                yield
            finally:
                if overrides is not None:
                    overrides.pack()

    def rewrite(self, weights: Mapping[str, Tensor]) -> None:
        """Give the model's parameters other numbers, by name, between two passes. Rows stay as they are, with the keys and values that
        were made with the former numbers; no later row copies these."""
        with self.unpacked():
            parameters = dict(self.model.named_parameters())
            for name, numbers in weights.items():
                with torch.inference_mode(parameters[name].is_inference()), torch.no_grad():
                    parameters[name].copy_(numbers)
        self._state.mark("weights")
        self._state.note()
        self._seen = dict(self._state.counts)
        self._texts.share_no_more(self.cache)

    def close(self) -> None:
        """Release everything and leave the model as it was found; no more passes after this."""
        self.release()
        self.read(())
        self.backend.close()
        self._beside = nothing_beside  # or the Speculator would be held by its own target

    # -- hidden states ------------------------------------------------------------------------------------------------

    def read(self, features: Sequence[int], *, whole: bool = False, companion: Companion | None = None) -> None:
        """Have passes return hidden states from now on; with no ``features`` they return none, at no cost. Replaces earlier requests.

        :attr:`hidden` are those of the nodes of a pass, :attr:`prompt_hidden` those of prompts: ``[1, F * d]`` per row at its last token.

        Args:
            features: numbers as in transformers' ``output_hidden_states``, :data:`~foredraft.models.features.LAST` for what the LM head
                reads; they are concatenated in this order.
            whole: return those of prompts at every token that is computed, ``[n, F * d]`` per row. They are not known for a beginning that
                is shared with another row. So **no beginning is reused**, and n is the length of the prompt, unless there is a
                ``companion``. A later call without ``whole`` restores ``reuse_prefix``.
            companion: reads them, and keeps what it made from the hidden states of every beginning that is reused.

        Raises:
            ConfigurationError: a number without a hidden state.
            UnsupportedModelError: a hidden state that cannot be returned.
        """
        found: Features | None = None
        if features:
            if not self._taps:
                ids = torch.arange(min(SAMPLE, self.context or SAMPLE), device=self.device)[None] % self.vocab_size
                self._taps = taps_of(self.model, ids)
            found = features_of(self.model, features, self._taps, whole=whole, device=self.device)
        before = self.backend.features
        self.backend.read(found)
        self.hidden = self.prompt_hidden = None
        self._companion = companion if found is not None and whole else None
        if before is None or not before.whole:
            self._reused_prefix = self.reuse_prefix
        self.reuse_prefix = self._reused_prefix and not (found is not None and whole and companion is None)

    # -- passes -------------------------------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Sequence[int]], *, first: int, given: Sequence[int] = ()) -> Tensor:
        """Fill rows ``first``, ``first + 1``, … with what their cache lacks of ``prompts``, in chunks. The first ``given[r]`` tokens of a
        prompt are the user's, all unless given; those behind them were generated one by one.

        Returns:
            ``[len(prompts), V]`` logits after each prompt's last token, in the model's dtype. Where hidden states are read,
            :attr:`prompt_hidden` holds one tensor per prompt, until the next pass.
        """
        logits: list[Tensor] = []
        hidden: list[Tensor] = []
        row = first
        while row < first + len(prompts):
            last = self._group(prompts, row, first)
            found, states = self._prefill_group(prompts[row - first : last - first], row, given=given[row - first : last - first])
            logits.append(found)
            hidden += states
            row = last
        self.prompt_hidden = hidden if self.features else None
        return torch.cat(logits)

    def prefill_scored(self, prompt: Sequence[int], seen: Callable[[int, Tensor], None], *, row: int) -> Tensor:
        """As :meth:`prefill`, ``[1, V]``, for the one ``row``. For each piece that is read, ``seen`` is called with the place of its first
        token and with the logits ``[n, V]`` after each of its tokens, of which there are never more than :data:`SCORED` numbers."""
        logits, hidden = self._prefill_group([prompt], row, seen)
        self.prompt_hidden = hidden if self.features else None
        return logits

    # -- inside -------------------------------------------------------------------------------------------------------

    def _group(self, prompts: Sequence[Sequence[int]], row: int, first: int) -> int:
        """Rows from ``row`` that go through one pass together: short ones batched, a long one alone in chunks."""
        missing = [len(prompt) - self.lengths[first + i] for i, prompt in enumerate(prompts)]
        widest, last = missing[row - first], row + 1
        if widest > self.prefill_chunk:
            return last
        while last < first + len(prompts) and missing[last - first] <= self.prefill_chunk:
            widest = max(widest, missing[last - first])
            if widest * (last + 1 - row) > PREFILL_TOKENS:
                break
            last += 1
        return last

    def _prefill_group(
        self,
        prompts: Sequence[Sequence[int]],
        row: int,
        seen: Callable[[int, Tensor], None] | None = None,
        given: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        last, features = row + len(prompts), self.backend.features
        most = self.prefill_chunk if seen is None else max(1, min(self.prefill_chunk, SCORED // self.vocab_size))
        states = None if features is None else PromptStates(len(prompts), whole=features.whole)
        while True:
            starts = tuple(self.lengths[row:last])
            counts = [min(len(prompt) - start, most) for prompt, start in zip(prompts, starts)]
            width = max(counts)
            chunk = [list(p[s : s + c]) + [0] * (width - c) for p, s, c in zip(prompts, starts, counts)]
            tokens = to_device(chunk, self.device).clamp(max=self.vocab_size - 1)  # a draft may know fewer than its target
            window = Window(row, last, starts, width, counts=tuple(counts))
            keep = None if seen else [count - 1 for count in counts]
            users = [max(0, min(count, own - start)) for count, own, start in zip(counts, given or map(len, prompts), starts)]
            ends = seen is not None or starts[0] + counts[0] == len(prompts[0])
            logits = self._forward(ForwardPass(TokenTree.from_chain(tokens), window, tokens, keep=keep, prompts=users, ends=ends))
            self.commit(None, counts)
            if seen is not None:
                seen(starts[0], logits[0])
            if states is not None and self.hidden is not None:
                states.add(self.hidden if features is None or features.whole else self.hidden[:, -1:], counts)
            if self.lengths[row] == len(prompts[0]):
                return logits[:, -1], [] if states is None else states.rows()
