"""What is measured of a session: clocks, counters, statistics, and what the planner is told. The loop calls it by name."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from foredraft.drafters.base import Drafter, DraftRequest
from foredraft.errors import notice
from foredraft.logits.sampler import Sampler
from foredraft.outcome import Outcome, RowOutcome
from foredraft.planning import Planner, Round
from foredraft.rows import Commit, SessionRow
from foredraft.shapes import TreeShape
from foredraft.stats import Stats
from foredraft.target import Target
from foredraft.tree import TokenTree

NOTHING = TreeShape.chain(0)


class Contention:
    """Says once that the machine is busy: the thread that makes the target's passes has waited for a core for most of their time."""

    SECONDS, SHARE = 2.0, 0.6  # of passes that are looked at together; of a core that the thread has on a quiet machine, and more

    def __init__(self) -> None:
        self.clock = self.processor = 0.0
        self.said = False

    def add(self, clock: float, processor: float) -> None:
        """Passes took so long by the clock, and so many seconds of this thread on a core."""
        self.clock, self.processor = self.clock + clock, self.processor + processor
        if self.said or self.clock < self.SECONDS:
            return
        share, self.clock, self.processor = self.processor / self.clock, 0.0, 0.0
        if share < self.SHARE:
            self.said = True
            notice(
                f"this machine is busy: the thread that decodes got {share:.0%} of a core, so a pass takes about "
                f"{1 / max(share, 0.01):.1f} times as long as on a quiet machine; stop other work, or take times measured now with care"
            )


contention = Contention()  # of the process


class Observer:
    """Times the phases of each round and counts what came of them. :meth:`begin` and the methods after it are called once per round, in
    the order in which they are defined here."""

    def __init__(self, stats: Stats, planner: Planner, target: Target, drafter: Drafter):
        self.stats, self.planner, self.target, self.drafter = stats, planner, target, drafter
        self._times: list[float] = []  # when the round began, and when each phase ended
        self._processor = 0.0  # seconds of this thread on a core, when the pass began
        self._passes, self._asked = 0, 0.0
        self._touched: float | None = None
        self._layer_tokens = list(target.layer_tokens)  # before the session
        self._request: DraftRequest | None = None
        self._tree: TokenTree | None = None
        self._guessed: Collection[int] = ()  # rows whose draft is not the drafter's
        self._sampler: Sampler | None = None
        self._on_gpu, self._together, self._unsettled = False, True, 0
        self.passes = 1  # of plain decoding that were made in one call in this round
        self._furthest, self._kept = 0, 0  # tokens of the row that has most of them, and of all rows in this round

    # -- before the first round -----------------------------------------------------------------------------------------

    def prepared(self, seconds: float) -> None:
        """The planner took so many seconds to measure the machine; no row is live."""
        self._furthest = 0
        counted = self.stats.layer_tokens or [0] * len(self.target.layer_tokens)
        self._layer_tokens = [count - before for count, before in zip(self.target.layer_tokens, counted)]  # without what was measured
        if seconds:
            self.stats.seconds["planning"] = self.stats.seconds.get("planning", 0.0) + seconds

    @contextmanager
    def prefill(self, sampler: Sampler) -> Iterator[None]:
        passes = self.target.passes
        with self.stats.timing("prefill"):
            yield
        self.stats.seconds["prefill"] -= sampler.watch.seconds
        self.stats.target_passes += self.target.passes - passes

    # -- a round --------------------------------------------------------------------------------------------------------

    def begin(self, *, together: bool = True) -> None:
        """``together``: no rows join those of the round before they are done."""
        self._times, self._together = [time.perf_counter()], together
        self._unsettled = self._count_unsettled()

    def planned(self, request: DraftRequest | None, sampler: Sampler) -> None:
        self._request, self._sampler = request, sampler
        self._times.append(time.perf_counter())

    def drafted(self, tree: TokenTree, shape: TreeShape, guessed: Collection[int] = ()) -> None:
        """``shape`` is what was to be drafted; of the rows ``guessed``, the drafter drafted nothing."""
        assert self._sampler is not None
        self._guessed = guessed
        self._shape, self._tree, self._asked, self._passes = str(shape), tree, self._sampler.watch.seconds, self.target.passes
        self._times.append(time.perf_counter())
        self._processor = time.thread_time()

    def scored(self, logits: Tensor, passes: int, *, single: bool) -> None:
        """``passes`` of plain decoding were made in one call, 1 in a round with a draft; a ``single`` one although several were allowed."""
        self.passes, self._single = passes, single
        self._on_gpu, self._touched = logits.device.type != "cpu", self.target.touched
        self._times.append(time.perf_counter())
        if logits.device.type == "cpu":
            contention.add(self._times[-1] - self._times[-2], time.thread_time() - self._processor)

    def verified(self) -> None:
        """On a GPU this is the first moment at which the pass is known to be over."""
        self._times.append(time.perf_counter())
        self.stats.target_passes += self.target.passes - self._passes

    def committed(self, rows: Sequence[SessionRow], commits: Sequence[Commit], outcome: Outcome, *, counted: bool = True) -> None:
        """Count what every row gained; ``counted`` says that the pass is a row-pass of the statistics, which a prefill is not."""
        now = self.stats.clock()
        self._count_layers()
        if self.stats.time_to_first_token is None:
            self.stats.time_to_first_token = now
        for row, commit, kept in zip(rows, commits, outcome.rows):
            row.stats.token_times += [now] * len(commit.tokens)
            drafted = kept.drafted if self.passes == 1 else ()
            passes = self._needed(commit) if counted else 0
            self.stats.count(row.stats, kept=len(commit.tokens), drafted=drafted, accepted=commit.accepted, passes=passes)
        self._kept = sum(len(commit.tokens) for commit in commits)
        if counted:
            self._plain = self._needed(commits[0])
            for shape in (self._shape, *(self._plain - 1) * (str(NOTHING),)):
                self.stats.shapes[shape] = self.stats.shapes.get(shape, 0) + 1
        self._times.append(time.perf_counter())

    def _needed(self, commit: Commit) -> int:
        """Passes of this round that plain decoding one by one would have made: it would have stopped where the text has ended."""
        return 1 if self.passes == 1 else max(1, len(commit.tokens))

    def finished(self, rows: Sequence[SessionRow], outcome: Outcome) -> None:
        """The drafter has observed the round: share out its seconds, and tell the planner."""
        begin, planned, drafted, scored, verified, committed = self._times
        end, sampler = time.perf_counter(), self._sampler
        assert sampler is not None
        self._count_layers()  # drafters may read something between rounds
        draft = drafted - planned + end - committed - self._asked
        target = verified - drafted - (sampler.watch.seconds - self._asked) if self._on_gpu else scored - drafted
        self.stats.seconds["draft"] += draft
        self.stats.seconds["target"] += target
        # drafts by the target's own layers cost so little more than plain rounds that the planner's first searches would show
        since = planned if self.drafter.info.shares_target else begin
        if self.planner.learns and not (self._request is None and self.planner.passes_over(len(rows), self.passes)):
            self.planner.observe(rows, self._round(rows, outcome, sampler, draft, target, end - since - draft - target))
        self._compare(rows, end - begin - draft, time.perf_counter() - begin)

    def _count_layers(self) -> None:
        self.stats.layer_tokens = [count - before for count, before in zip(self.target.layer_tokens, self._layer_tokens)]

    def settle(self) -> None:
        """Rows are over: work out the speed-up, and note what was learnt."""
        self.stats.learning = self.drafter.learnt
        self.stats.speedup.settle(self.planner.plain_seconds)

    def _compare(self, rows: Sequence[SessionRow], seconds: float, whole: float) -> None:
        """A round for the speed-up: it took ``whole``, and ``seconds`` without its draft. One that records something is left out."""
        assert self._tree is not None
        furthest = max(row.stats.kept for row in rows)
        passes = max(0, furthest - self._furthest) if self._together else self._kept / len(rows)
        self._furthest = max(furthest, self._furthest)
        if self._settling:
            return
        if self._tree.nodes > 1:
            self.stats.speedup.drafted_round(len(rows), passes, max(len(row.ids) for row in rows), whole)
            return
        self.stats.speedup.plain_round(len(rows), passes / self._plain, seconds / self._plain, whole, self._plain)

    def _round(self, rows: Sequence[SessionRow], outcome: Outcome, sampler: Sampler, draft: float, target: float, rest: float) -> Round:
        """The round as the planner sees it."""
        tree, request, lines = self._tree, self._request, outcome.rows
        plain = [self.passes > 1 or index in self._guessed for index in range(len(lines))]  # nothing is learnt of drafts
        assert tree is not None
        known = tree.static_parents is not None and not tree.chain
        return Round(
            shape=NOTHING if request is None else request.shape,
            asked=[0] * len(lines) if request is None else request.limits,
            drafted=[() if other else line.drafted for line, other in zip(lines, plain)],
            accepted=[0 if other else line.accepted for line, other in zip(lines, plain)],
            nodes=self._nodes(tree, lines),
            context=max(len(row.ids) for row in rows),
            draft=draft,
            target=target / self.passes,
            rest=rest / self.passes,
            split=not self._on_gpu,
            shared=self.drafter.info.shares_target,
            static_parents=tree.static_parents if known else None,
            paths=[line.path for line in lines] if known else (),
            greedy=sampler.greedy,
            expected=self.drafter.expected_accepted,
            touched=self._touched,
            settling=self._settling,
            passes=self.passes,
            single=self._single,
        )

    def _nodes(self, tree: TokenTree, lines: Sequence[RowOutcome]) -> float:
        """Per row, that a pass read."""
        ragged = tree.nodes > 1 and tree.chain and self.target.ragged
        return sum(1 + sum(line.drafted) for line in lines) / len(lines) if ragged else tree.nodes

    @property
    def _settling(self) -> bool:
        """Something was recorded in this round, or a recording was compared."""
        return self._count_unsettled() != self._unsettled

    def _count_unsettled(self) -> int:
        found = self.target.settling
        for each in self.drafter.draft_models:
            found += each.settling
        return found
