"""Rows in flight: they join with parameters of their own, advance together, and leave at any round.

``Speculator.generate`` drives a :class:`Session`, and so can a server: ``add``, ``step``, ``remove``. Rows are ragged: each keeps its own
number of tokens per round. What happens in a round is in :mod:`foredraft.round`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.admission import Admission
from foredraft.checks import NotFiniteError
from foredraft.device import host_by_default, wait_for
from foredraft.drafters.base import Drafter
from foredraft.errors import CacheMemoryError, ConfigurationError, ForedraftError, notice
from foredraft.logits.logprobs import check_logprobs
from foredraft.logits.noise import Noise, Randomness, row_key
from foredraft.models.encoder_decoder import check_padding, check_source
from foredraft.observer import Observer
from foredraft.planning import FixedPlanner, Planner
from foredraft.round import Loop
from foredraft.rows import Commit, RowParameters, SessionRow, read_lengths
from foredraft.shapes import TreeShape
from foredraft.stats import CacheMemory, RowStats, Stats
from foredraft.target import Target
from foredraft.tree import Proposal
from foredraft.turns import Turn
from foredraft.verification import Rule
from foredraft.verification.match import Match

PAUSE = 0.05  # seconds that live rows wait while others are read, about, or
SHARE = 1.0  # times what a round takes, if that is longer
LEAST = 16  # tokens that are read at a time: reading the weights for fewer costs nearly as much
FIRST_RATE = 1000.0  # tokens per second, before it is known


class Session:
    """Rows that one target and one drafter generate together. Rows can be added and removed between rounds.

    :meth:`foredraft.Speculator.session` makes one. Any thread may :meth:`add` rows at any time. Steps can be made in any thread, one after
    the other, and rows removed between them. While rows are under way, other threads cannot use the target, the drafter or their models.

    Args:
        target: the model that scores drafts.
        drafter: what proposes tokens; it is bound to ``target``.
        rule: the verification rule for rows that sample. Greedy rows use ``match``.
        proposal: how the drafter chooses tokens where a row samples.
        planner: chooses the shape of every round, and keeps what it learns for the next session. ``FixedPlanner("chain(5)")`` always
            chooses the same; :func:`~foredraft.planning.make_planner` makes one for "auto".
        stats: where counts and times go.
        record: which vectors to keep for every new token: ``scores`` (processed) and ``logits`` (raw).
        randomness: makes a round's draws from row keys and root positions; only tests replace :class:`Noise`.
        wait: while another thread is using the target, the drafter or a model of theirs, wait instead of raising
            :class:`~foredraft.BusyError`.
        keep_stats: keep the counts of rows that are over in ``stats.rows``, too. A server does not: they would grow for ever. Each
            :class:`~foredraft.rows.Commit` has those of its row.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        rule: Rule,
        *,
        proposal: Proposal,
        planner: Planner,
        stats: Stats | None = None,
        record: frozenset[str] = frozenset(),
        randomness: Callable[[Tensor, Tensor], Randomness] = Noise,
        wait: bool = False,
        keep_stats: bool = False,
    ):
        self.target, self.drafter, self.planner = target, drafter, planner
        self.stats = Stats(reproducible=repeats(rule, planner)) if stats is None else stats
        self.observer = Observer(self.stats, planner, target, drafter)
        self.loop = Loop(target, drafter, rule, proposal, planner, record, randomness, self.observer)
        self.rows: list[SessionRow] = []
        self.waiting: list[SessionRow] = []
        self._keep_stats = keep_stats
        self.turn = turn_of(target, drafter, wait=wait)
        self._token = object()  # says whose rows the target and the drafter have; they must not keep an abandoned session alive
        self._slots = itertools.count()
        self._read_at = (0, 0)  # the versions of target and drafter that have read the rows
        self.admission = Admission(target, self.loop.nodes)
        self._read_rate = FIRST_RATE  # tokens per second of prompts that are read while rows are live
        self._round = 0.0  # seconds of the last round
        self._joined = False  # rows were added while others were under way: more may come

    @property
    def shape(self) -> TreeShape:
        """The largest tree that may be drafted."""
        return self.planner.shape

    # -- rows -----------------------------------------------------------------------------------------------------------

    def add(self, ids: Sequence[int], parameters: RowParameters) -> int:
        """Queue a row; it is prefilled at the next step. Returns its slot.

        Raises:
            ConfigurationError: an empty prompt, an id outside the vocabulary, no room left in the model's context, or a source that an
                encoder cannot read.
            CacheMemoryError: the row can never fit into ``cache_memory``.
        """
        row = self._row(ids, parameters)
        self._joined = self._joined or bool(self.rows)
        self.stats.rows.append(row.stats)
        self.waiting.append(row)  # the last: another thread may be through with it before this returns
        return row.slot

    def check(self, ids: Sequence[int], parameters: RowParameters) -> int:
        """Raises what :meth:`add` would, and adds nothing; any thread may call it at any time. Returns how many tokens such a row has at
        most in the end, its prompt included."""
        return self._row(ids, parameters).capacity

    def fits(self, ids: Sequence[int], parameters: RowParameters) -> str:
        """``"now"`` if such a row would be prefilled in the next step, ``"later"`` if it would wait for other rows to leave.

        Raises:
            ConfigurationError, CacheMemoryError: as :meth:`add`.
            BusyError: another thread is using the target, as in :meth:`step`.
        """
        row = self._row(ids, parameters)
        with self._alone():
            return "now" if row in self.admission.joining(self.rows, [*self.waiting, row]) else "later"

    @property
    def memory(self) -> CacheMemory | None:
        """What the target's cache holds now; None where it has no pages."""
        return self.admission.memory

    def _row(self, ids: Sequence[int], parameters: RowParameters) -> SessionRow:
        context = self.target.context
        if not ids:
            raise ConfigurationError("the prompt is empty; give at least one token, for instance the BOS token")
        if not 0 <= min(ids) <= max(ids) < self.target.vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self.target.vocab_size)
            raise ConfigurationError(f"prompt token {wrong} is outside the target's vocabulary of {self.target.vocab_size}")
        if self.target.sourced != (parameters.source is not None):
            raise ConfigurationError(
                "the model has an encoder: give what it reads as RowParameters(source=Source.of(ids))"
                if self.target.sourced
                else "the model has no encoder, so a row has no source; leave RowParameters(source=...) out"
            )
        if parameters.source is not None:
            check_source(self.target.model, parameters.source)
            check_padding(self.target.model, ids)
            self.drafter.check_source(parameters.source)
        if context is not None and len(ids) >= context:
            raise ConfigurationError(f"the prompt has {len(ids)} tokens, but the model's context holds only {context}; shorten the prompt")
        if parameters.guesses and not isinstance(self.loop.rule, Match):
            raise ConfigurationError(f"guesses need rule='match', and this session has the rule {self.loop.rule.name!r}; leave them out")
        check_logprobs(parameters.logprobs, self.target.vocab_size)
        check_logprobs(parameters.prompt_logprobs, self.target.vocab_size, "prompt_logprobs")
        if parameters.max_new_tokens < 1:
            raise ConfigurationError(f"max_new_tokens must be at least 1, got {parameters.max_new_tokens}")
        limit, criteria = read_lengths(parameters.criteria, len(parameters.padding) + len(ids))
        parameters = replace(parameters, max_new_tokens=int(min(parameters.max_new_tokens, limit)), criteria=criteria)
        capacity = len(ids) + parameters.max_new_tokens
        row = SessionRow(
            slot=next(self._slots),
            ids=list(ids),
            prompt_length=len(ids),
            parameters=replace(parameters, pipeline=parameters.pipeline.begun(len(ids))),
            capacity=capacity if context is None else min(capacity, context),
            stats=RowStats(),
            key=row_key(parameters.seed),
        )
        self.admission.check(row)
        return row

    @torch.inference_mode()
    def remove(self, slot: int) -> None:
        """Remove a row between rounds; its text is final.

        Raises:
            KeyError: no such live row.
            BusyError: another thread is in a step.
        """
        with self._alone(models=bool(self.rows) and self.target.owner is self._token):
            row = next((row for row in (*self.waiting, *self.rows) if row.slot == slot), None)
            if row is None:
                raise KeyError(f"no live row in slot {slot}")
            row.stats.finish_reason = "removed"
            if row in self.waiting:
                self.waiting.remove(row)
                self._over([row])
            else:
                self._leave([row])

    @property
    def live(self) -> bool:
        return bool(self.rows or self.waiting)

    def close(self) -> None:
        """Remove every row; the target and the drafter stay usable.

        Raises:
            BusyError: another thread is in a step.
        """
        with self._alone(models=False):
            self._drop()

    def _drop(self) -> None:
        self.observer.settle()
        self._over([*self.rows, *self.waiting])
        self.rows, self.waiting = [], []
        self.loop.committed.clear()
        mine = self.turn.thread is not None  # else nobody keeps others from the models
        if mine and self.target.owner is self._token:
            self.target.reset()
        if mine and self.drafter.owner is self._token:
            self.drafter.reset()

    # -- a step ---------------------------------------------------------------------------------------------------------

    def step(self, *, follow: bool = True) -> list[Commit]:
        """Prefill waiting rows if there are any, else run one round. Returns the new tokens of every row that took part. While a single row
        is decoded plainly, a round may make several passes: up to 16 in a tenth of a second.

        A row fails alone, as :attr:`Commit.error <foredraft.rows.Commit>` says, where a processor or a stopping criterion of its own
        raises, or no token can be chosen from its scores. Anything else that goes wrong, a drafter that proposes nonsense for instance,
        is raised. After an exception every row is gone, and the target and the drafter are usable again. Where a cache in pages cannot grow
        and there are several rows, nothing is raised: they wait for each other.

        Args:
            follow: look whether the model has changed since the last step. If it has, rows under way are read again and go on with the
                model as it is now.

        Raises:
            ForedraftError: another session took the target over; this one is lost.
            BusyError: another thread is using the target, the drafter or a model of theirs. Nothing has changed; try again later.
        """
        if self.rows:
            self._own()  # refused before it takes its turn, which would end that of whoever took over
        with self._alone():
            self._own()
            try:
                if follow:
                    self._follow()
                if torch.is_inference_mode_enabled():
                    return self._step()
                with torch.inference_mode():
                    return self._step()
            except BaseException as error:
                short = isinstance(error, CacheMemoryError) and len(self.rows) > 1 and bool(self.target.pools)
                goes_on = short and self.target.limit_to_held()
                self.target.release()
                if goes_on:
                    self._all_aside()
                    return []
                self._drop()
                raise

    def _all_aside(self) -> None:
        """The device had no room for pages that the limit allowed. All rows wait, and are read again as far as there is room now."""
        notice("there was less memory for the key-value cache than thought; rows wait for each other, within what there is, from now on")
        self.drafter.reset()
        rows, self.rows = sorted(self.rows, key=lambda row: row.slot), []
        self.admission.set_aside += len(rows)
        self._joined, self.waiting[:0] = True, rows
        self.observer.settle()
        self.loop.committed.clear()

    @contextmanager
    def _alone(self, *, models: bool = True) -> Iterator[None]:
        """No other thread is in a step of this session inside; nor uses the target and the drafter, if ``models``, nor afterwards while
        rows are under way."""
        if models:
            self.turn.take()
        else:
            self.turn.resume()
        try:
            with host_by_default(self.target.device):
                yield
        finally:
            self.turn.rest(keep=bool(self.rows) and self.target.owner is self._token)

    def _own(self) -> None:
        """Take the target over from the session that had it last, for instance that of an abandoned stream."""
        if self.target.owner is self._token and self.drafter.owner is self._token:
            return
        if self.rows:
            raise ForedraftError("another generation was started on this Speculator, which runs one at a time, so this one was stopped")
        self.target.reset()
        self.drafter.reset()
        self.target.owner = self.drafter.owner = self._token

    def _follow(self) -> None:
        self.target.follow()
        read_at = self.target.version, self.drafter.follow()
        if self.rows and read_at != self._read_at:
            self.target.reset()
            self.drafter.reset()
            with torch.inference_mode():
                self.loop.read_again(self.rows)
        self._read_at = read_at

    def _step(self) -> list[Commit]:
        if excess := self.admission.excess(self.rows):
            self._set_aside(excess)
        joining = self.admission.joining(self.rows, self.waiting)
        if joining and self.rows:
            joining = self._in_time(joining)
        if joining:
            commits = self._join(joining)
        elif self.rows:
            begin = time.perf_counter()
            commits = self.loop.round(self.rows, together=not (self._joined or self.waiting), several=not self.waiting)
            self._round = (time.perf_counter() - begin) / self.observer.passes
        else:
            return []
        self._warn()
        first = len(self.rows) - len(commits)
        if spoiled := [first + index for index, commit in enumerate(commits) if isinstance(commit.error, NotFiniteError)]:
            self.target.wipe(spoiled)
        if done := [row for row in self.rows if row.stats.finish_reason]:
            self._leave(done)
        self.stats.clock()
        return commits

    def _in_time(self, rows: list[SessionRow]) -> list[SessionRow]:
        """Those of ``rows``, in their order, that can be read while the live rows wait for :data:`PAUSE` or :data:`SHARE` rounds, whichever
        is longer. If the first of them cannot, a piece of it is read; the next steps find that in the cache."""
        seconds = max(PAUSE, SHARE * self._round)
        allowed, found, total = max(LEAST, int(seconds * self._read_rate)), list[SessionRow](), 0
        for row in rows:
            unread = self.loop.unread(row)
            if unread is None:
                return rows
            total += unread
            if total > allowed:
                break
            found.append(row)
        if not found:
            begin = time.perf_counter()
            self.loop.read_piece(rows[0], allowed, first=len(self.rows))
            wait_for(self.target.device)
            self._read_rate = allowed / (time.perf_counter() - begin)
        return found

    def _join(self, rows: list[SessionRow]) -> list[Commit]:
        """``rows``, the first of those that wait, are prefilled, or read again after they were set aside; these go on with a round."""
        del self.waiting[: len(rows)]  # other threads may be adding more
        if rows[0].begun:
            first = len(self.rows)
            self.rows += rows
            self.loop.read_again(rows, first=first)
            return self.loop.round(self.rows, together=False, several=False)
        if not self.rows:
            self.observer.prepared(self.planner.prepare(self.target, self.drafter, len(rows)))
        first = len(self.rows)
        self._joined = self._joined or bool(first)  # of a call's rows, those that waited for memory
        self.rows += rows
        self.loop.committed.clear()
        return self.loop.first_tokens(rows, [row.ids for row in rows], first=first)

    def _warn(self) -> None:
        """Say, once per target, that a row has more tokens than the model was made for."""
        trained = self.target.trained
        if trained is not None and not self.target.outgrown and any(len(row.ids) > trained for row in self.rows):
            self.target.outgrown = True
            notice(f"the model was trained for {trained} tokens; a longer text goes on, as in transformers, but may become worse")

    def _set_aside(self, rows: Sequence[SessionRow]) -> None:
        """These rows wait, without their pages, until there is room to read them again."""
        self._joined = True
        self._close_up(rows)
        self.waiting[:0] = sorted(rows, key=lambda row: row.slot)

    def _leave(self, done: Sequence[SessionRow]) -> None:
        """These rows are over."""
        self.stats.memory = self.memory
        self._close_up(done)
        self._over(done)

    def _close_up(self, done: Sequence[SessionRow]) -> None:
        """Target and drafter drop these rows, and the others close up."""
        self.observer.settle()
        gone = {row.slot for row in done}
        keep = [index for index, row in enumerate(self.rows) if row.slot not in gone]
        if self.target.owner is self._token:
            self.drafter.end(done)
            self.target.compact(keep)
        self.rows = [self.rows[index] for index in keep]
        self.loop.committed.clear()

    def _over(self, rows: Sequence[SessionRow]) -> None:
        if not self._keep_stats:
            self.stats.drop([row.stats for row in rows])


def turn_of(target: Target, drafter: Drafter, *, wait: bool) -> Turn:
    """The turn of a generation with these; several targets of one thread may use the same model."""
    return Turn([target, drafter], [getattr(target, "model", target), *drafter.shared()], wait=wait)


def repeats(rule: Rule, planner: Planner) -> bool:
    """Whether a seed repeats the text: the noise of other rules than ``match`` depends on the shapes."""
    return isinstance(rule, Match) or isinstance(planner, FixedPlanner)
