"""The loop: plan, draft, score, verify, commit; for one row or many, which join and leave at any round.

``Speculator.generate`` drives a :class:`Session`, and so can a server: ``add`` a row with parameters of its own, ``step``,
``remove``. Rows are ragged, each keeps its own number of tokens per round; finished rows leave and the others close up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.checks import check_rows, check_tree
from foredraft.device import to_device
from foredraft.drafters.base import Drafter, DraftRequest, Feedback
from foredraft.errors import ConfigurationError, ForedraftError
from foredraft.logits.logprobs import check_logprobs
from foredraft.logits.noise import Noise, Randomness, row_key
from foredraft.logits.sampler import Sampler
from foredraft.outcome import Outcome, decide
from foredraft.planning import AUTO, AutomaticPlanner, CostModel, FixedPlanner, Planner, Round
from foredraft.planning.costs import LEVEL, LOOK_UP, timed_beforehand
from foredraft.planning.forecasts import GROWN_DEPTH
from foredraft.planning.largest import largest_fitting
from foredraft.planning.profiles import profile
from foredraft.rows import Commit, RowParameters, SessionRow
from foredraft.shapes import TreeShape
from foredraft.stats import RowStats, Stats
from foredraft.target import Target
from foredraft.tree import Proposal, TokenTree
from foredraft.verification import Rule
from foredraft.verification.match import Match

MATCH = Match()
NOTHING = TreeShape.chain(0)


class Session:
    """Rows in flight over one target and one drafter.

    Args:
        target, drafter, rule: the configuration; ``proposal`` is how the drafter chooses tokens when a row samples.
        shape: the largest tree that is drafted, a :class:`~foredraft.shapes.TreeShape` or a string; "auto" for one that is chosen in
            every round, by measured costs and by what was accepted so far.
        planner: chooses shapes, in place of ``shape``; keeps what it learns for the next session.
        stats: where counts and times go.
        record: which per-token vectors to keep on the rows, ``scores`` (processed) and ``logits`` (raw).
        randomness: makes a round's draws from row keys and root positions; another than :class:`Noise` only in tests.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        rule: Rule,
        *,
        proposal: Proposal,
        shape: TreeShape | str = AUTO,
        planner: Planner | None = None,
        stats: Stats | None = None,
        record: frozenset[str] = frozenset(),
        randomness: Callable[[Tensor, Tensor], Randomness] = Noise,
    ):
        self.target, self.drafter, self.rule = target, drafter, rule
        self.proposal, self.record = proposal, record
        self.planner = self._planner(shape) if planner is None else planner
        self.randomness = randomness
        self.stats = Stats() if stats is None else stats
        self.rows: list[SessionRow] = []
        self.waiting: list[SessionRow] = []
        self._slots = 0
        self._joined = False  # rows were added while others were under way: more may come
        self._committed: Tensor | None = None  # [R, capacity] ids on the device, kept only while a pipeline reads them

    def _planner(self, shape: TreeShape | str) -> Planner:
        if shape != AUTO:
            return FixedPlanner(TreeShape.parse(shape))
        largest = largest_fitting(self.target, self.drafter, self._fits)
        costs = CostModel(level=LEVEL if timed_beforehand(self.drafter) else LOOK_UP)
        info = self.drafter.info
        levels = GROWN_DEPTH if info.runs_a_model else largest.depth
        grows = info.grows and not largest.is_chain and self.target.device.type == "cpu"
        kept = profile(self.target, self.drafter)
        return AutomaticPlanner(largest, grows=grows, levels=levels, costs=costs, profile=kept, rates=info.rates)

    def _fits(self, shape: TreeShape) -> bool:
        """Whether the rule is exact for what the drafter makes of ``shape``."""
        offered = self.proposal in self.drafter.proposals_for(shape)
        return offered and self.rule.refusal(self.proposal, chain=self.drafter.makes_chains(shape)) is None

    @property
    def shape(self) -> TreeShape:
        """The largest tree that may be drafted."""
        return self.planner.shape

    # -- rows -----------------------------------------------------------------------------------------------------------

    def add(self, ids: Sequence[int], parameters: RowParameters) -> int:
        """Queue a row; it is prefilled at the next step. Returns its slot.

        Raises:
            ConfigurationError: an empty prompt, an id outside the vocabulary, or no room left in the model's context.
        """
        context = self.target.context
        if not ids:
            raise ConfigurationError("the prompt is empty; give at least one token, for instance the BOS token")
        if not 0 <= min(ids) <= max(ids) < self.target.vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self.target.vocab_size)
            raise ConfigurationError(f"prompt token {wrong} is outside the target's vocabulary of {self.target.vocab_size}")
        if context is not None and len(ids) >= context:
            raise ConfigurationError(f"the prompt has {len(ids)} tokens, but the model's context holds only {context}; shorten the prompt")
        check_logprobs(parameters.logprobs, self.target.vocab_size)
        if parameters.max_new_tokens < 1:
            raise ConfigurationError(f"max_new_tokens must be at least 1, got {parameters.max_new_tokens}")
        capacity = len(ids) + parameters.max_new_tokens
        row = SessionRow(
            slot=self._slots,
            ids=list(ids),
            prompt_length=len(ids),
            parameters=parameters,
            capacity=capacity if context is None else min(capacity, context),
            stats=RowStats(),
            key=row_key(parameters.seed),
        )
        self._slots += 1
        self._joined = self._joined or bool(self.rows)
        self.waiting.append(row)
        self.stats.rows.append(row.stats)
        return row.slot

    @torch.inference_mode()
    def remove(self, slot: int) -> None:
        """Take a row out at any round; what it has is final.

        Raises:
            KeyError: no such live row.
        """
        for row in self.waiting:
            if row.slot == slot:
                row.stats.finish_reason = "removed"
                self.waiting.remove(row)
                return
        for row in self.rows:
            if row.slot == slot:
                row.stats.finish_reason = "removed"
                self._leave([row])
                return
        raise KeyError(f"no live row in slot {slot}")

    @property
    def live(self) -> bool:
        return bool(self.rows or self.waiting)

    def close(self) -> None:
        """Drop every row; the target and the drafter stay usable."""
        self.rows, self.waiting, self._committed = [], [], None
        if self.target.owner is self:
            self.target.reset()
        if self.drafter.owner is self:
            self.drafter.reset()

    # -- a step ---------------------------------------------------------------------------------------------------------

    def step(self) -> list[Commit]:
        """Prefill what waits, or else run one round; returns what every row that took part gained.

        After an exception every row is gone, and the target and the drafter are usable again.

        Raises:
            ForedraftError: another session took the target over; this one is lost.
        """
        self._own()
        try:
            if torch.is_inference_mode_enabled():
                return self._prefill() if self.waiting else self._round()
            with torch.inference_mode():
                return self._prefill() if self.waiting else self._round()
        except BaseException:
            self.target.release()
            self.close()
            raise

    def _own(self) -> None:
        """Take the target over from the session that had it last, for instance that of an abandoned stream."""
        if self.target.owner is self and self.drafter.owner is self:
            return
        if self.rows:
            raise ForedraftError("another generation was started on this Speculator, which runs one at a time, so this one was stopped")
        self.target.reset()
        self.drafter.reset()
        self.target.owner = self.drafter.owner = self

    def _prefill(self) -> list[Commit]:
        rows, self.waiting = self.waiting, []
        if not self.rows and (spent := self.planner.prepare(self.target, self.drafter, len(rows))):
            self.stats.seconds["planning"] = self.stats.seconds.get("planning", 0.0) + spent
        passes, first = self.target.passes, len(self.rows)
        with self.stats.timing("prefill"):
            texts = [row.ids for row in rows]
            self.target.open(texts, reserve=[row.capacity + self.shape.nodes + self.drafter.info.extra_nodes + 1 for row in rows])
            logits = self.target.prefill(texts, first=first)[:, None]
            self.rows += rows
            self._committed = None
            tree = TokenTree.root(to_device([row.ids[-1] for row in rows], self.target.device))
            sampler = self._sampler(rows)
            outcome = decide(self.rule, tree, logits, sampler, record=self.record, top=self._top(rows))
        self.stats.seconds["prefill"] -= sampler.watch.seconds
        self.stats.target_passes += self.target.passes - passes
        check_rows(rows, tree, outcome, self.drafter.name, self.target.vocab_size)
        commits = self._settle(rows, outcome)
        if self.drafter.info.features:
            assert self.target.prompt_hidden is not None, "the drafter has features and asked the target for none"
            self.drafter.read(rows, self.target.prompt_hidden)
        self.drafter.begin(rows)
        self._depart()
        return commits

    def _round(self) -> list[Commit]:
        rows = self.rows
        if not rows:
            return []
        seconds, clock = self.stats.seconds, time.perf_counter
        begin = clock()
        sampler = self._sampler(rows)
        shape = self.planner.plan(rows, greedy=sampler.greedy, together=not self._joined)
        request = self._request(rows, shape, sampler)
        planned = clock()
        tree = self._root(rows) if request is None else self._draft(request)
        drafted, asked, passes = clock(), sampler.watch.seconds, self.target.passes
        logits = self.target.score(tree.with_safe_parents())
        scored = clock()
        outcome = decide(self._rule(shape), tree, logits, sampler, record=self.record, top=self._top(rows))  # on a GPU waits for the pass
        judged = clock()
        self.stats.target_passes += self.target.passes - passes
        accepted = [line.accepted for line in outcome.rows]
        self.target.commit(outcome.path, [count + 1 for count in accepted])
        check_rows(rows, tree, outcome, self.drafter.name, self.target.vocab_size)
        commits = self._settle(rows, outcome, counted=True)
        settled = clock()
        raw, hidden = logits if self.drafter.info.needs_logits else None, self.target.hidden if self.drafter.info.features else None
        self.drafter.observe(rows, Feedback(tree, accepted, outcome.path, raw, hidden))
        end = clock()
        draft = drafted - planned + end - settled - asked
        target = judged - drafted - (sampler.watch.seconds - asked) if logits.is_cuda else scored - drafted
        seconds["draft"] += draft
        seconds["target"] += target
        if self.planner.learns and not (request is None and self.planner.passes_over(len(rows))):
            spent = draft, target, end - begin - draft - target
            self.planner.observe(rows, self._done(request, tree, outcome, *spent, split=not logits.is_cuda, greedy=sampler.greedy))
        self._depart()
        self.stats.clock()
        return commits

    def _done(
        self,
        request: DraftRequest | None,
        tree: TokenTree,
        outcome: Outcome,
        draft: float,
        target: float,
        rest: float,
        *,
        split: bool,
        greedy: bool,
    ) -> Round:
        """The round as the planner sees it."""
        lines, known = outcome.rows, tree.static_parents is not None and not tree.chain
        return Round(
            shape=NOTHING if request is None else request.shape,
            asked=[0] * len(lines) if request is None else request.limits,
            drafted=[line.drafted for line in lines],
            accepted=[line.accepted for line in lines],
            nodes=sum(1 + sum(line.drafted) for line in lines) / len(lines) if tree.chain and self.target.ragged else tree.nodes,
            context=max(len(row.ids) for row in self.rows),
            draft=draft,
            target=target,
            rest=rest,
            split=split,
            static_parents=tree.static_parents if known else None,
            paths=[line.path for line in lines] if known else (),
            greedy=greedy,
            expected=self.drafter.expected_accepted,
        )

    def _rule(self, shape: TreeShape) -> Rule:
        """Where nothing is to be drafted every lossless rule draws from p, and match does so at once. Its noise is keyed by the position
        of the token alone, which is chosen once, and no rule that compares with q looks at it. A row that merely has no room left is
        not meant: whether the others have any must not change what it draws."""
        return MATCH if shape.nodes == 0 and self.rule.needs_q and self.rule.lossless else self.rule

    def _sampler(self, rows: Sequence[SessionRow]) -> Sampler:
        sampled = [row.parameters.do_sample for row in rows]
        return Sampler(
            pipelines=[row.parameters.pipeline for row in rows],
            sampled=sampled,
            lengths=[len(row.ids) for row in rows],
            noise=self._noise(rows) if True in sampled else None,
            committed=lambda: self._committed_ids(rows),
            ends=[row.parameters.eos for row in rows],
        )

    @staticmethod
    def _top(rows: Sequence[SessionRow]) -> int | None:
        """How many of the likeliest tokens any row wants log-probabilities of; None if no row wants any."""
        return max((row.parameters.logprobs for row in rows if row.parameters.logprobs is not None), default=None)

    def _noise(self, rows: Sequence[SessionRow]) -> Randomness:
        device = self.target.device
        keys = to_device([row.key for row in rows], device)
        return self.randomness(keys, to_device([len(row.ids) - 1 for row in rows], device))

    def _committed_ids(self, rows: Sequence[SessionRow]) -> Tensor:
        """``[R, capacity]`` ids of ``rows`` with room for a draft behind; kept up to date from round to round."""
        if self._committed is None or rows is not self.rows:
            width = max(row.capacity for row in rows) + self.shape.depth + 1
            committed = torch.zeros(len(rows), width, dtype=torch.long)
            for line, row in zip(committed, rows):
                line[: len(row.ids)] = torch.tensor(row.ids)
            committed = committed.to(self.target.device)
            if rows is not self.rows:
                return committed
            self._committed = committed
        return self._committed

    def _root(self, rows: Sequence[SessionRow]) -> TokenTree:
        return TokenTree.root(to_device([row.ids[-1] for row in rows], self.target.device))

    def _request(self, rows: Sequence[SessionRow], shape: TreeShape, sampler: Sampler) -> DraftRequest | None:
        """As deep as the shape, the rows' limits and the context allow; None where nothing is to be drafted, or nothing can be."""
        most, shapes = shape.depth, self.stats.shapes
        planned = self.planner.limits(rows) or [most] * len(rows)
        limits = [min(most, limit, row.remaining - 1) for limit, row in zip(planned, rows)]
        depth, greedy = max(limits), sampler.greedy
        label = str(shape) if depth > 0 else "chain(0)"
        shapes[label] = shapes.get(label, 0) + 1
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

    def _draft(self, request: DraftRequest) -> TokenTree:
        tree = self.drafter.draft(request)
        check_tree(tree, request, self.drafter.name, self.target, self.rule)
        return tree.truncate(request.limits)

    def _settle(self, rows: Sequence[SessionRow], outcome: Outcome, *, counted: bool = False) -> list[Commit]:
        """Append to every row what its verdict keeps; ``counted`` says that the pass is a row-pass of the statistics."""
        now = self.stats.clock()
        if self.stats.time_to_first_token is None:
            self.stats.time_to_first_token = now
        for name, vectors in outcome.vectors.items():  # along whole paths; `_append` cuts them to what is returned
            for row, along in zip(rows, vectors):
                getattr(row, name).extend(along.unbind(0))
        commits = []
        for index, (row, line) in enumerate(zip(rows, outcome.rows)):
            commit = self._append(row, [*line.tokens[1 : line.accepted + 1], line.bonus], line.accepted)
            if outcome.logprobs is not None and row.parameters.logprobs is not None:
                row.logprobs.append(outcome.logprobs[index].cut(len(commit.tokens), row.parameters.logprobs))
                commit = replace(commit, logprobs=row.logprobs[-1])
            row.stats.token_times += [now] * len(commit.tokens)
            self._count(row, commit, line.drafted, counted)
            commits.append(commit)
        return commits

    def _append(self, row: SessionRow, tokens: Sequence[int], accepted: int) -> Commit:
        """Commit ``tokens`` one by one, as plain decoding would, up to the first that ends the row."""
        start, reason = len(row.ids), None
        criteria = row.parameters.criteria
        text = to_device([[*row.ids, *tokens]], self.target.device) if criteria else None
        for token in tokens:
            row.ids.append(token)
            reason = self._reason(row, token, None if text is None else text[:, : len(row.ids)])
            if reason:
                break
        kept = row.ids[start:]
        if self._committed is not None and row in self.rows:
            self._committed[self.rows.index(row), start : len(row.ids)] = to_device(kept, self._committed.device)
        for name in self.record:
            del getattr(row, name)[len(row.ids) - row.prompt_length :]
        row.stats.finish_reason = reason
        return Commit(row.slot, kept, min(accepted, len(kept)), reason)

    @staticmethod
    def _reason(row: SessionRow, token: int, text: Tensor | None) -> str | None:
        if token in row.parameters.eos:
            return "eos"
        if text is not None and any(bool(torch.as_tensor(done(text, None)).any()) for done in row.parameters.criteria):
            return "stop"
        if row.remaining > 0:
            return None
        return "length" if len(row.ids) - row.prompt_length == row.parameters.max_new_tokens else "context"

    def _count(self, row: SessionRow, commit: Commit, drafted: Sequence[int], counted: bool) -> None:
        stats, mine, kept = self.stats, row.stats, len(commit.tokens)
        stats.new_tokens += kept
        mine.tokens += kept
        if not counted:
            return
        for each in (stats, mine):
            each.kept += kept
            each.drafted += sum(drafted)
            each.accepted += commit.accepted
        stats.row_passes += 1
        mine.passes += 1
        stats.count_depths(drafted, commit.accepted)

    def _depart(self) -> None:
        """Finished rows leave and the others close up."""
        done = [row for row in self.rows if row.stats.finish_reason]
        if done:
            self._leave(done)

    def _leave(self, done: Sequence[SessionRow]) -> None:
        gone = {row.slot for row in done}
        keep = [index for index, row in enumerate(self.rows) if row.slot not in gone]
        if self.target.owner is self:
            self.drafter.end(done)
            self.target.compact(keep)
        self.rows = [self.rows[index] for index in keep]
        self._committed = None
