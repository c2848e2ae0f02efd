"""The loop: plan, draft, score, verify, commit. Plain decoding is the same loop with a drafter that proposes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from foredraft.checks import check_rows, check_tree
from foredraft.device import to_device
from foredraft.drafters.base import Drafter, DraftRequest, Feedback
from foredraft.logits.noise import Randomness
from foredraft.logits.sampler import Sampler
from foredraft.models.pages import PAGE
from foredraft.observer import NOTHING, Observer
from foredraft.outcome import Outcome, decide
from foredraft.planning import Planner
from foredraft.rows import Commit, CommittedIds, SessionRow
from foredraft.shapes import TreeShape
from foredraft.target import Target
from foredraft.traces import RoundTrace, trace_of
from foredraft.tree import Proposal, TokenTree
from foredraft.verification import Rule
from foredraft.verification.match import Match

MATCH = Match()


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
        self.committed = CommittedIds(self.target.device, room=self.planner.shape.depth + 1)

    def round(self, rows: list[SessionRow], *, together: bool) -> list[Commit]:
        """One round: every row gains the drafted tokens that survive and one of the target's own. ``together`` says that no others join
        the rows before they are done."""
        self.observer.begin(together=together)
        sampler = self.sampler(rows)
        shape = self._plan(rows, greedy=sampler.greedy, together=together)
        request = self._request(rows, shape, sampler)
        self.observer.planned(shape, request, sampler)

        tree = self._root(rows) if request is None else self._draft(request)
        self.observer.drafted(tree)

        logits = self.target.score(tree.with_safe_parents())
        self.observer.scored(logits)

        outcome = self._verify(self._rule(shape), rows, tree, logits, sampler)
        self.observer.verified()

        self.target.commit(outcome.path, [row.accepted + 1 for row in outcome.rows])
        commits = self._append(rows, tree, outcome, str(NOTHING if request is None else shape))
        self.observer.committed(rows, commits, outcome)

        self.drafter.observe(rows, self._feedback(tree, logits, outcome))
        self.observer.finished(rows, outcome)
        return commits

    def first_tokens(self, rows: list[SessionRow], prompts: Sequence[Sequence[int]], *, first: int) -> list[Commit]:
        """Prefill the ``prompts`` of ``rows``, which are those from ``first`` on, and choose a token after each."""
        sampler = self.sampler(rows)
        with self.observer.prefill(sampler):
            logits = self._prefill(rows, prompts, first)[:, None]
            tree = self._root(rows)
            outcome = self._verify(self.rule, rows, tree, logits, sampler)
        commits = self._append(rows, tree, outcome)
        self.observer.committed(rows, commits, outcome, counted=False)
        self._begin(rows)
        return commits

    def read_again(self, rows: list[SessionRow], *, first: int = 0) -> None:
        """Have target and drafter read the texts of ``rows``, which are those from ``first`` on: all of them but the last token, as after a
        prefill."""
        self.committed.clear()
        with self.observer.prefill(self.sampler(rows)):
            self._prefill(rows, [row.ids[:-1] for row in rows], first, unread=2)
        self._begin(rows)

    def read_piece(self, row: SessionRow, tokens: int, *, first: int) -> None:
        """Have the target, and a drafter that reads whole prompts, read the next ``tokens`` or a few more of a row that is to join behind
        ``first`` others, and leave them in the cache."""
        unread = self.target.unread(row.ids, row.isolation)
        assert unread is not None
        piece = row.ids[: -(-(len(row.ids) - unread + tokens) // PAGE) * PAGE]
        with self.observer.prefill(self.sampler([row])):
            self.target.open([piece], isolations=[row.isolation])
            self.target.prefill([piece], first=first)
            if self.drafter.companion is not None:
                assert self.target.prompt_hidden is not None
                self.drafter.read_ahead(piece, self.target.prompt_hidden[0])
            self.target.compact(range(first))

    def _prefill(self, rows: Sequence[SessionRow], prompts: Sequence[Sequence[int]], first: int, unread: int = 1) -> Tensor:
        room = self.drafter.written_nodes(self.planner.shape)
        reserve, sources = [row.capacity + room for row in rows], [row.source for row in rows]
        isolations = [row.isolation for row in rows]
        self.target.open([row.ids for row in rows], reserve=reserve, sources=sources, isolations=isolations, unread=unread)
        return self.target.prefill(prompts, first=first)

    def _begin(self, rows: Sequence[SessionRow]) -> None:
        if self.drafter.info.features:
            assert self.target.prompt_hidden is not None, "the drafter has features and asked the target for none"
            self.drafter.read(rows, self.target.prompt_hidden)
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

    def _plan(self, rows: Sequence[SessionRow], *, greedy: bool, together: bool) -> TreeShape:
        """The planner's shape. Where no row is to be drafted for it is not asked, and the rule is that of rounds that draft."""
        if all(row.parameters.max_draft == 0 for row in rows):
            return self.planner.shape
        return self.planner.plan(rows, greedy=greedy, together=together)

    def _request(self, rows: Sequence[SessionRow], shape: TreeShape, sampler: Sampler) -> DraftRequest | None:
        """As deep as the shape, the rows' limits and the context allow; None where nothing is to be drafted, or nothing can be."""
        most, greedy = shape.depth, sampler.greedy
        planned = self.planner.limits(rows) or [most] * len(rows)
        limits = [min(most, limit, row.room) for limit, row in zip(planned, rows)]
        depth = max(limits)
        if depth < 1:
            return None
        return DraftRequest(
            rows=rows,
            shape=shape.truncate(depth),
            depth=depth,
            limits=limits,
            proposal="deterministic" if greedy and self.proposal != "mixed" else self.proposal,
            needs_q=self.rule.needs_q and not greedy,
            vocab_size=self.target.vocab_size,
            device=self.target.device,
            sampler=sampler,
        )

    def _root(self, rows: Sequence[SessionRow]) -> TokenTree:
        return TokenTree.root(to_device([row.ids[-1] for row in rows], self.target.device))

    def _draft(self, request: DraftRequest) -> TokenTree:
        tree = self.drafter.draft(request)
        check_tree(tree, request, self.drafter.name, self.target, self.rule)
        return tree.truncate(request.limits)

    # -- verify and commit ----------------------------------------------------------------------------------------------

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

    def _append(self, rows: list[SessionRow], tree: TokenTree, outcome: Outcome, shape: str = str(NOTHING)) -> list[Commit]:
        """Append to every row what it keeps of a round of ``shape``."""
        check_rows(rows, tree, outcome, self.drafter.name, self.target.vocab_size)
        for name, vectors in outcome.vectors.items():  # along whole paths, cut below to what is returned
            for row, along in zip(rows, vectors):
                getattr(row, name).extend(along.split(1))
        commits = []
        for index, (row, kept) in enumerate(zip(rows, outcome.rows)):
            commit = row.append([*kept.tokens[1 : kept.accepted + 1], kept.bonus], kept.accepted, self.target.device)
            commit = replace(commit, drafted=sum(kept.drafted), trace=self._trace(index, outcome, commit, shape))
            self.committed.append(rows, index, commit.tokens)
            for name in self.record:
                del getattr(row, name)[len(row.ids) - row.prompt_length :]
            if outcome.logprobs is not None and row.parameters.logprobs is not None:
                row.logprobs.append(outcome.logprobs[index].cut(len(commit.tokens), row.parameters.logprobs))
                commit = replace(commit, logprobs=row.logprobs[-1])
            commits.append(commit)
        return commits

    def _trace(self, index: int, outcome: Outcome, commit: Commit, shape: str) -> RoundTrace | None:
        """What is to be told of the round of the row number ``index``, if anything."""
        if index not in outcome.traced:
            return None
        kept = outcome.rows[index]
        path = list(range(kept.accepted + 1)) if outcome.path is None else kept.path[: kept.accepted + 1]
        return trace_of(
            outcome.traced[index],
            path,
            kept.bonus,
            shape=shape,
            drafter=self.drafter.drafter_of(index),
            kept=len(commit.tokens),
            finish_reason=commit.finish_reason,
        )

    def _feedback(self, tree: TokenTree, logits: Tensor, outcome: Outcome) -> Feedback:
        info, accepted = self.drafter.info, [row.accepted for row in outcome.rows]
        return Feedback(tree, accepted, outcome.path, logits if info.needs_logits else None, self.target.hidden if info.features else None)
