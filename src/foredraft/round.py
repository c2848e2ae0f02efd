"""The loop: plan, draft, score, verify, commit. Plain decoding is the same loop with a drafter that proposes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from foredraft.checks import check_tree, failures
from foredraft.device import to_device
from foredraft.drafters.base import Drafter, DraftRequest, Feedback
from foredraft.drafters.growth import draws_of
from foredraft.drafters.merging import Part, kept_paths, member_feedback, merged
from foredraft.guesses import MOST, Guessed
from foredraft.logits.logprobs import LogProbs
from foredraft.logits.noise import Randomness
from foredraft.logits.sampler import Sampler
from foredraft.observer import NOTHING, Observer
from foredraft.outcome import Outcome, decide
from foredraft.planning import Planner
from foredraft.planning.rounds import FOREVER
from foredraft.rows import Commit, CommittedIds, SessionRow
from foredraft.shapes import TreeShape
from foredraft.target import Target
from foredraft.traces import RoundTrace, trace_of
from foredraft.tree import DRAWN, Proposal, TokenTree
from foredraft.verification import Rule
from foredraft.verification.match import Match

MATCH = Match()


@dataclass(frozen=True, eq=False)
class Draft:
    """What a round verifies.

    Attributes:
        tree: of all rows.
        shape: what was to be drafted.
        guessed: the rows, by their number, that have a guess in place of the drafter's.
        part: where there are such rows, what the drafter drafted for the others; None if it was not asked.
        passes: of plain decoding that were made in one call; the tree has the tokens that the target has chosen in them.
        single: several were allowed, and only one could be made.
    """

    tree: TokenTree
    shape: TreeShape = NOTHING
    guessed: Mapping[int, Guessed] = field(default_factory=dict)
    part: Part | None = None
    passes: int = 1
    single: bool = False


@dataclass(eq=False)
class Loop:
    """What turns a session's rows into longer ones, round by round.

    Attributes:
        target, drafter, rule, proposal, planner, record, randomness: as in :class:`~foredraft.session.Session`.
        observer: keeps time and counts.
        committed: the rows' ids on the target's device, for logits processors.
    """

    target: Target
    drafter: Drafter
    rule: Rule
    proposal: Proposal
    planner: Planner
    record: frozenset[str]
    randomness: Callable[[Tensor, Tensor], Randomness]
    observer: Observer
    committed: CommittedIds = field(init=False)

    def __post_init__(self) -> None:
        self.committed = CommittedIds(self.target.device, room=max(self.planner.shape.depth, self.most_guessed) + 1)

    @property
    def most_guessed(self) -> int:
        """Tokens of a guess that are drafted in a round at most: no more nodes than the planner may ask for, unless these are few."""
        return max(self.planner.shape.nodes, MOST)

    def nodes(self, rows: Sequence[SessionRow]) -> int:
        """That a round writes behind each of ``rows`` at most, the root included."""
        if not any(row.guesses.guesses for row in rows):
            return self.drafter.written_nodes(self.planner.shape)
        return self.most_nodes

    @property
    def most_nodes(self) -> int:
        """The same for any rows, those with guesses too."""
        return max(self.drafter.written_nodes(self.planner.shape), 1 + self.drafter.info.extra_nodes + self.most_guessed)

    def round(self, rows: list[SessionRow], *, together: bool, several: bool = True) -> list[Commit]:
        """One round: every row gains the drafted tokens that survive and one of the target's own. ``together`` says that no others join
        the rows before they are done, ``several`` that several passes may be made where nothing is drafted."""
        self.observer.begin(together=together)
        sampler, guessed = self.sampler(rows), self._guesses(rows)
        shape = self._plan(rows, guessed, greedy=sampler.greedy, together=together)
        request = self._request(rows, shape, sampler, guessed)
        self.observer.planned(request, sampler)

        draft = self._draft(rows, shape, request, sampler, guessed)
        self.observer.drafted(draft.tree, draft.shape, guessed)

        draft, logits = self._score(rows, draft, shape, sampler, several=several)
        self.observer.scored(logits, draft.passes, single=draft.single)

        outcome = self._verify(self._rule(shape), rows, draft.tree, logits, sampler)
        self.observer.verified()

        self.target.commit(outcome.path, [row.accepted + 1 for row in outcome.rows])
        commits = self._append(rows, draft, outcome)
        self.observer.committed(rows, commits, outcome)

        self.drafter.observe(rows, self._feedback(draft, logits, outcome, commits))
        self.observer.finished(rows, outcome)
        return commits

    def first_tokens(self, rows: list[SessionRow], prompts: Sequence[Sequence[int]], *, first: int) -> list[Commit]:
        """Prefill the ``prompts`` of ``rows``, which are those from ``first`` on, and choose a token after each."""
        sampler = self.sampler(rows)
        with self.observer.prefill(sampler):
            logits = self._prefill(rows, prompts, first)[:, None]
            draft = Draft(self._root(rows))
            outcome = self._verify(self.rule, rows, draft.tree, logits, sampler)
        commits = self._append(rows, draft, outcome)
        self.observer.committed(rows, commits, outcome, counted=False)
        self._begin(rows)
        wanted = [row.parameters.prompt_logprobs for row in rows]
        return [
            commit if top is None else replace(commit, prompt_logprobs=LogProbs.joined(row.prompt_logprobs or [LogProbs.none(top)]))
            for commit, row, top in zip(commits, rows, wanted)
        ]

    def read_again(self, rows: list[SessionRow], *, first: int = 0) -> None:
        """Have target and drafter read the texts of ``rows``, which are those from ``first`` on: all of them but the last token, as after a
        prefill."""
        self.committed.clear()
        with self.observer.prefill(self.sampler(rows)):
            self._prefill(rows, [row.ids[:-1] for row in rows], first, unread=2)
        self._begin(rows)

    def unread(self, row: SessionRow) -> int | None:
        """Tokens that the target would read of a row's text if it joined; None where a part that is read before is not found again."""
        unread = self.target.unread(row.ids, row.isolation, row.source)
        return unread if unread is None or row.scored is None else max(unread, len(row.ids) - row.scored)

    def read_piece(self, row: SessionRow, tokens: int, *, first: int) -> None:
        """Have the target, and a drafter that reads prompts, read the next ``tokens`` of a row that is to join behind ``first`` others, and
        leave them in the cache."""
        unread = self.unread(row)
        assert unread is not None
        piece = row.ids[: len(row.ids) - unread + tokens]
        with self.observer.prefill(self.sampler([row])):
            self._read([row], [piece], [piece], first)
            hidden = self.target.prompt_hidden if self.drafter.companion is not None else None
            self.drafter.read_ahead(row, piece, hidden[0] if hidden else None)
            self.target.compact(range(first))

    def _prefill(self, rows: Sequence[SessionRow], prompts: Sequence[Sequence[int]], first: int, unread: int = 1) -> Tensor:
        """``[R, V]`` logits after ``prompts``. Rows whose prompts are scored are read by themselves."""
        reserve, logits, hidden = [row.capacity + self.nodes(rows) for row in rows], list[Tensor](), list[Tensor]()
        begin = 0
        for _, group in groupby(range(len(rows)), lambda index: index if rows[index].scored is not None else -1):
            end = begin + len(list(group))
            those = rows[begin:end]
            logits.append(self._read(those, [row.ids for row in those], prompts[begin:end], first + begin, unread, reserve[begin:end]))
            hidden += self.target.prompt_hidden or ()
            begin = end
        if len(logits) > 1 and self.target.prompt_hidden is not None:
            self.target.prompt_hidden = hidden
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _read(
        self,
        rows: Sequence[SessionRow],
        texts: Sequence[Sequence[int]],
        prompts: Sequence[Sequence[int]],
        first: int,
        unread: int = 1,
        reserve: Sequence[int] = (),
    ) -> Tensor:
        """Open rows of the target for ``texts``, and read of them what their cache lacks of ``prompts``."""
        scored, sources, isolations = rows[0].scored, [row.source for row in rows], [row.isolation for row in rows]
        unread = unread if scored is None else max(unread, len(texts[0]) - scored)
        self.target.open(texts, reserve=reserve, sources=sources, isolations=isolations, unread=unread)
        for row, reused in zip(rows, self.target.lengths[first:]):
            self.observer.stats.count_prompt(row.stats, row.prompt_length, reused)
        if scored is None:
            return self.target.prefill(prompts, first=first, given=[row.prompt_length for row in rows])
        return self.target.prefill_scored(prompts[0], rows[0].score_prompt, row=first)

    def _begin(self, rows: Sequence[SessionRow]) -> None:
        if self.drafter.info.features:
            assert self.target.prompt_hidden is not None, "the drafter has features and asked the target for none"
            hidden = [  # no drafter shall keep NaN
                each.nan_to_num(0.0, 0.0, 0.0) if row.stats.finish_reason == "error" else each
                for row, each in zip(rows, self.target.prompt_hidden)
            ]
            self.drafter.read(rows, hidden)
        with self.observer.stats.timing("draft"):  # a draft model's encoder reads the sources
            self.drafter.begin(rows)

    # -- plan and draft -------------------------------------------------------------------------------------------------

    def sampler(self, rows: Sequence[SessionRow]) -> Sampler:
        sampled = [row.parameters.do_sample for row in rows]
        return Sampler(
            pipelines=[row.parameters.pipeline for row in rows],
            sampled=sampled,
            lengths=[len(row.ids) for row in rows],
            noise=self._noise(rows) if True in sampled else None,
            committed=lambda: self.committed.of(rows),
            ends=[row.parameters.eos for row in rows],
        )

    def _noise(self, rows: Sequence[SessionRow]) -> Randomness:
        device = self.target.device
        keys = to_device([row.key for row in rows], device)
        return self.randomness(keys, to_device([len(row.ids) - 1 for row in rows], device))

    def _guesses(self, rows: Sequence[SessionRow]) -> dict[int, Guessed]:
        """Of the rows that have one for this round."""
        most, vocab_size, found = self.most_guessed, self.target.vocab_size, dict[int, Guessed]()
        for index, row in enumerate(rows):
            guess = row.guesses.after(row.ids, row.prompt_length, most=min(row.room, most), vocab_size=vocab_size)
            if guess is not None:
                found[index] = guess
        return found

    def _plan(self, rows: Sequence[SessionRow], guessed: Mapping[int, Guessed], *, greedy: bool, together: bool) -> TreeShape:
        """The planner's shape. Where the drafter has no row to draft for it is not asked, and the rule is that of rounds that draft."""
        if all(row.parameters.max_draft == 0 or index in guessed for index, row in enumerate(rows)):
            return self.planner.shape
        return self.planner.plan(rows, greedy=greedy, together=together)

    def _request(
        self, rows: Sequence[SessionRow], shape: TreeShape, sampler: Sampler, guessed: Mapping[int, Guessed]
    ) -> DraftRequest | None:
        """As deep as the shape, the rows' limits and the context allow; None where nothing is to be drafted, or nothing can be. Rows with a
        guess are left out. Next to them, a drafter that shares the target's cache drafts for nobody: it wrote other nodes there."""
        if guessed and self.drafter.info.shares_target:
            return None
        planned = self.planner.limits(rows) or [shape.depth] * len(rows)
        limits = [min(shape.depth, limit, row.room) for limit, row in zip(planned, rows)]
        limits = [0 if index in guessed else limit for index, limit in enumerate(limits)]
        return self._asking(rows, shape, limits, sampler) if max(limits) > 0 else None

    def _asking(self, rows: Sequence[SessionRow], shape: TreeShape, limits: Sequence[int], sampler: Sampler) -> DraftRequest:
        depth, greedy = max(limits), sampler.greedy
        shown = self.proposal in DRAWN and any(row.parameters.trace for row in rows)
        return DraftRequest(
            rows=rows,
            shape=shape.truncate(depth),
            depth=depth,
            limits=limits,
            proposal="deterministic" if greedy and self.proposal != "mixed" else self.proposal,
            needs_q=(self.rule.needs_q or shown) and not greedy,
            vocab_size=self.target.vocab_size,
            device=self.target.device,
            sampler=sampler,
        )

    def _root(self, rows: Sequence[SessionRow]) -> TokenTree:
        return TokenTree.root(to_device([row.ids[-1] for row in rows], self.target.device))

    def _draft(
        self,
        rows: Sequence[SessionRow],
        shape: TreeShape,
        request: DraftRequest | None,
        sampler: Sampler,
        guessed: Mapping[int, Guessed],
    ) -> Draft:
        """The drafter's tree of ``shape``, with guesses in place of it where there are any."""
        if request is None and not guessed:
            return Draft(self._root(rows))
        if request is not None:
            tree = self.drafter.draft(request)
            check_tree(tree, request, self.drafter.name, self.target, self.rule)
            tree = tree.truncate(request.limits)
        if not guessed:
            return Draft(tree, shape)
        lengths = [len(guessed[index].tokens) if index in guessed else 0 for index in range(len(rows))]
        asking = self._asking(rows, TreeShape.chain(max(lengths)), lengths, sampler)
        chains = asking.chains([guessed[index].tokens if index in guessed else () for index in range(len(rows))])
        if request is None:
            return Draft(chains, asking.shape, guessed)
        part = Part(self.drafter, tree)
        part.rows = [index for index in part.proposing() if index not in guessed]
        return Draft(merged([part, Part(self.drafter, chains, list(guessed))], self.target.device), shape, guessed, part)

    # -- score, verify and commit ---------------------------------------------------------------------------------------

    def _score(
        self, rows: Sequence[SessionRow], draft: Draft, shape: TreeShape, sampler: Sampler, *, several: bool
    ) -> tuple[Draft, Tensor]:
        """The target's logits at the draft's nodes. While nothing is drafted for a single row, the target may decode several tokens at
        once, and these are the draft."""
        row, tree = rows[0], draft.tree.with_safe_parents()
        if len(rows) > 1 or tree.nodes > 1 or row.guesses.guesses:
            return draft, self.target.score(tree)
        resting = FOREVER if row.parameters.max_draft == 0 else self.planner.resting
        most = min(1 + resting, row.remaining) if several and not row.parameters.trace else 1
        if not (sampler.plain if sampler.greedy else isinstance(self._rule(shape), Match)):  # the next token cannot be foreseen
            return replace(draft, single=most > 1), self.target.score(tree)
        draws = None if sampler.greedy else partial(draws_of, sampler, vocab_size=self.target.vocab_size)
        read, logits = self.target.decode(tree, row.ids, most=most, ends=row.parameters.eos, draws=draws)
        if not read:
            return replace(draft, single=self.target.single), logits
        chain = TokenTree.from_chain(to_device([[row.ids[-1], *read]], self.target.device))
        return Draft(chain, draft.shape, passes=1 + len(read)), logits

    def _rule(self, shape: TreeShape) -> Rule:
        """Where nothing is to be drafted every lossless rule draws from p, and match does so at once. Its noise is keyed by the position
        of the token alone, which is chosen once, and no rule that compares with q looks at it. A row that merely has no room left is
        not meant: whether the others have any must not change what it draws."""
        return MATCH if shape.nodes == 0 and self.rule.needs_q and self.rule.lossless else self.rule

    def _verify(self, rule: Rule, rows: Sequence[SessionRow], tree: TokenTree, logits: Tensor, sampler: Sampler) -> Outcome:
        """On a GPU this waits for the pass. Log-probabilities are recorded as far as any row wants them."""
        top = max((row.parameters.logprobs for row in rows if row.parameters.logprobs is not None), default=None)
        traced = [index for index, row in enumerate(rows) if row.parameters.trace]
        return decide(rule, tree, logits, sampler, record=self.record, top=top, traced=traced)

    def _append(self, rows: list[SessionRow], draft: Draft, outcome: Outcome) -> list[Commit]:
        """Append to every row what it keeps."""
        failed = failures(rows, draft.tree, outcome, self.drafter.name, self.target.vocab_size)
        for name, vectors in outcome.vectors.items():  # along whole paths, cut below to what is returned
            for row, along, kept in zip(rows, vectors, outcome.rows):  # copies: a view would hold all of the round's vectors
                getattr(row, name).extend(each.clone() for each in along[: kept.accepted + 1].split(1))
        commits = []
        for index, (row, kept) in enumerate(zip(rows, outcome.rows)):
            guess = draft.guessed.get(index)
            drafter = self.drafter.drafter_of(index) if guess is None else guess.name
            failure = failed[index]
            accepted = kept.accepted if failure is None else failure.depth
            tokens = [*kept.tokens[1 : accepted + 1], *([kept.bonus] if failure is None else ())]
            error = None if failure is None else failure.error
            confirmed, drafted = (accepted, kept.drafted) if draft.passes == 1 else (0, ())
            commit = row.append(tokens, confirmed, self.target.device, error, drafter=drafter, drafted=drafted)
            self.committed.append(rows, index, commit.tokens)
            for name in self.record:
                del getattr(row, name)[len(row.ids) - row.prompt_length :]
            if outcome.logprobs is not None and row.parameters.logprobs is not None:
                row.logprobs.append(outcome.logprobs[index].cut(len(commit.tokens), row.parameters.logprobs))
                commit = replace(commit, logprobs=row.logprobs[-1])
            if guess is not None:
                row.guesses.observe(guess, kept.accepted, self.most_guessed)
                commit = replace(commit, guesses_drafted=len(guess.tokens), guessed=commit.accepted)
            if index in outcome.traced:
                commit = replace(commit, trace=self._trace(index, draft, outcome, commit))
            commits.append(commit)
        return commits

    def _trace(self, index: int, draft: Draft, outcome: Outcome, commit: Commit) -> RoundTrace:
        """Of the row number ``index``."""
        kept = outcome.rows[index]
        return trace_of(
            outcome.traced[index],
            list(range(kept.accepted + 1)) if outcome.path is None else kept.path[: kept.accepted + 1],
            kept.bonus,
            shape=str(draft.shape),
            drafter=commit.drafter,
            kept=len(commit.tokens),
            finish_reason=commit.finish_reason,
        )

    def _feedback(self, draft: Draft, logits: Tensor, outcome: Outcome, commits: Sequence[Commit]) -> Feedback:
        info, accepted = self.drafter.info, [row.accepted for row in outcome.rows]
        failed = frozenset(index for index, commit in enumerate(commits) if commit.error is not None)
        known = without_failed(logits, failed) if info.needs_logits else None
        hidden = self.target.hidden if info.features else None
        feedback = Feedback(draft.tree, accepted, outcome.path, known, hidden, failed)
        if draft.passes > 1:
            return replace(feedback, drafted=False)
        return member_feedback(info, draft.part, feedback, kept_paths(feedback)) if draft.guessed else feedback


def without_failed(logits: Tensor, failed: Collection[int]) -> Tensor:
    """``logits`` ``[R, N, V]`` with zeros for rows that have ``failed``: no drafter shall keep NaN."""
    return logits.index_fill(0, to_device(list(failed), logits.device), 0) if failed else logits
