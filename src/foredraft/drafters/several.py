"""Several drafters at once: their proposals become one tree under one budget of nodes, the likeliest first.

Each drafts as if it were alone. How likely a node is to be accepted is known from what became of its drafter's earlier proposals, by
depth, rank among siblings and, where the drafter can tell, the length of the match that it copies from. The first drafter that runs no
model is asked in every round, the others where that pays: where the copy is long, the text is copied; otherwise another copy, or a
model, is asked too.

Merged nodes come from different sources and lose any common q, so the proposal is ``mixed`` and the match rule verifies it; drafters
that can share the target's noise do. The rule is exact whatever is dropped, asked or not; and what is asked depends on the past alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from foredraft.drafters.base import Drafter, DrafterInfo, DraftRequest, Feedback, Row
from foredraft.drafters.draft_seconds import time_drafts
from foredraft.drafters.merging import SUREST, Line, Merged, assembled, heard_by, lines_of, merge_row, merged, places, seen_by
from foredraft.drafters.track_records import Credit, Pace, Record, Worth
from foredraft.errors import ConfigurationError
from foredraft.shapes import DynamicShape, TreeShape
from foredraft.target import Target
from foredraft.tree import Proposal, TokenTree

if TYPE_CHECKING:
    from foredraft.drafters.merging import Rates

SUITS_MATCH: tuple[Proposal, ...] = ("keyed", "mixed", "deterministic", "without-replacement", "iid")
ASKS = ("auto", "always")


@runtime_checkable
class Matching(Protocol):
    """A drafter that copies, and can tell how sure it is."""

    def matched(self, rows: Sequence[Row]) -> list[int]:
        """How many tokens the match has that each row's newest draft copies from; 0 without one."""


class Member:
    """One of the drafters, and what is known of it."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.record, self.worth, self.credit = Record(), Worth(), Credit()
        self.read: dict[int, int] = {}  # tokens of each row that it knew when it was asked last, by slot

    def missed(self, rows: Sequence[Row]) -> int:
        """Tokens that it has not read, the roots left out, of all rows."""
        return sum(max(0, len(row.ids) - 1 - self.read.get(row.slot, 0)) for row in rows)

    @property
    def costly(self) -> bool:
        """Its drafts take forward passes of a model."""
        return self.drafter.info.draft_model is not None

    @property
    def steady(self) -> bool:
        """It learns from every round, or goes on from it, and so is asked in all of them."""
        info = self.drafter.info
        return info.needs_logits or info.extra_nodes > 0 or bool(info.features)


@dataclass(eq=False)
class Part:
    """One member's part in a round: its ``tree``, how long the ``matched`` texts are, the seconds ``spent`` on it, its rows on the host
    as far as they are there, and where its nodes ``went`` in the merged tree, None where that is its own."""

    member: Member
    tree: TokenTree
    matched: list[int]
    spent: float
    lines: list[Line] | None = None
    went: list[list[int]] | Tensor | None = None

    def read(self) -> list[Line]:
        if self.lines is None:
            self.lines = lines_of(self.tree)
        return self.lines


@dataclass(frozen=True, eq=False)
class Considered:
    """A costly member that may have been asked: the accepted tokens that each row might hope for without it, the trees there were by
    then, and the tokens that it had missed."""

    member: Member
    hopes: list[float]
    rows: list[Merged] | None
    missed: int


@dataclass(eq=False)
class Drafted:
    """A round under way: the ``parts`` of those that were asked, the lengths of the rows' texts, how deep it was drafted, which costly
    members were ``considered``, and when the draft began and was ready."""

    parts: list[Part]
    lengths: list[int]
    depth: int
    begin: float
    considered: list[Considered] = field(default_factory=list)
    ready: float = 0.0

    def part_of(self, member: Member) -> Part | None:
        return next((part for part in self.parts if part.member is member), None)


class Several(Drafter):
    """Options:

    source: the drafters, as in ``several:prompt-lookup,draft-model:PATH``; a list may hold names, Drafter instances, and pairs of a
        name and its options. Where two propose the same continuation the nodes are shared.
    nodes: drafted nodes per row at most, all drafters together; as many as the shape has if None.
    ask: whether all drafters are asked in every round, ``always``, or those behind the first only where what they add is worth the
        seconds that they take, ``auto``.
    """

    name = "several"
    summary = "merges the drafts of several drafters into one tree"
    info = DrafterInfo(proposals=("mixed",), branches=True)

    def __init__(
        self,
        source: str | Sequence[str | Drafter | tuple[str, dict[str, Any]]],
        *,
        nodes: int | None = None,
        ask: str = "auto",
    ):
        given = [part.strip() for part in source.split(",")] if isinstance(source, str) else list(source)
        if not given or not all(given):
            raise ConfigurationError("several needs the drafters to merge, for instance 'several:prompt-lookup,ngram'")
        if nodes is not None and nodes < 1:
            raise ConfigurationError(f"several needs nodes of at least 1, got {nodes}; leave it out for as many as the shape has")
        if ask not in ASKS:
            raise ConfigurationError(f"unknown ask {ask!r}; choose {' or '.join(ASKS)}")
        self.drafters = [_made(each) for each in given]
        if len({id(each) for each in self.drafters}) < len(self.drafters):
            raise ConfigurationError("several was given the same drafter twice, which keeps the state of one; make two")
        self.nodes, self.ask = nodes, ask
        infos = [drafter.info for drafter in self.drafters]
        branches = any(info.auto_branches for info in infos)  # copies alone are followed as chains
        self.info = replace(
            self.info,
            needs_logits=any(info.needs_logits for info in infos),
            runs_a_model=any(info.runs_a_model for info in infos),
            auto_branches=branches,
            grows=branches,
        )
        self.members = [Member(drafter) for drafter in self.drafters]
        self.pace = Pace()
        self.clock = time.perf_counter
        self._chains_only = False
        self._drafted: Drafted | None = None

    def bind(self, target: Target) -> None:
        for drafter in self.drafters:
            drafter.bind(target)
        self._read_for_members(target)
        for member in self.members:
            if member.costly and self.ask == "auto" and len(self.members) > 1:
                member.worth.timed = time_drafts(member.drafter, target, self.clock)
        self.info = replace(self.info, extra_nodes=sum(drafter.info.extra_nodes for drafter in self.drafters))
        self._chains_only = target.chains_only is not None

    def _read_for_members(self, target: Target) -> None:
        """Have the target hand out what any member reads, in place of what each asked for by itself."""
        wanted = [drafter.info for drafter in self.drafters]
        features = tuple(dict.fromkeys(number for each in wanted for number in each.features))
        whole = any(each.whole_prompt for each in wanted if each.features)
        self.info = replace(self.info, features=features, whole_prompt=whole)
        if features:
            target.read(features, whole=whole)

    def _share(self, drafter: Drafter, hidden: Tensor) -> Tensor:
        """The ``features`` of one member of ``hidden`` ``[..., F * d]``, those of all."""
        features = self.info.features
        if drafter.info.features == features:
            return hidden
        each = hidden.view(*hidden.shape[:-1], len(features), -1)
        return torch.cat([each[..., features.index(number), :] for number in drafter.info.features], -1)

    def refusal(self, shape: TreeShape) -> str | None:
        return next((why for drafter in self.drafters if (why := drafter.refusal(self._own(drafter, shape)))), None)

    def makes_chains(self, shape: TreeShape) -> bool:
        if len(self.drafters) == 1:
            return self.drafters[0].makes_chains(shape)
        return self._chains_only and shape.is_chain

    def read(self, rows: Sequence[Row], hidden: Sequence[Tensor]) -> None:
        for drafter in self.drafters:
            if drafter.info.features:
                mine = [self._share(drafter, each if drafter.info.whole_prompt else each[-1:]) for each in hidden]
                drafter.read(rows, mine)

    def begin(self, rows: Sequence[Row]) -> None:
        for drafter in self.drafters:
            drafter.begin(rows)

    # -- drafting -------------------------------------------------------------------------------------------------------

    def draft(self, request: DraftRequest) -> TokenTree:
        self._drafted, self.expected_accepted = None, None
        if len(self.members) == 1 and self.nodes is None:
            return replace(self._ask(self.members[0], request).tree, proposal="mixed", q=None)
        drafted = Drafted([], [len(row.ids) for row in request.rows], request.depth, self.clock())
        drafted.parts = self._ask_on_host(request)
        rows: list[Merged] | None = None
        for member in sorted((each for each in self.members if each.costly), key=lambda each: each.worth.seconds(request.depth)):
            if self.ask == "always":
                drafted.parts.append(self._ask(member, request))
                continue
            if rows is None and drafted.parts:
                rows = self._merge(drafted.parts, request)
            hopes = [row.hope for row in rows] if rows else [0.0] * len(request.rows)
            alone = member.record.expected(0, request.depth)
            missed = member.missed(request.rows)
            drafted.considered.append(Considered(member, hopes, rows, missed))
            if member.worth.pays(hopes, alone, self.pace.rate, depth=request.depth, missed=missed):
                drafted.parts.append(self._ask(member, request))
                rows = None
        tree = self._joined(drafted, rows, request)
        drafted.ready = self.clock()
        self._drafted = drafted
        return tree

    def _ask_on_host(self, request: DraftRequest) -> list[Part]:
        """The members that run no model: the first one, and the others where what they add to it is worth their time."""
        members = [member for member in self.members if not member.costly]
        if not members:
            return []
        first, rate = self._ask(members[0], request), self.pace.rate
        parts = [first]
        for member in members[1:]:
            if self.ask == "always" or member.steady or member.credit.pays(first.matched, rate):
                parts.append(self._ask(member, request))
        return parts

    def _ask(self, member: Member, request: DraftRequest) -> Part:
        drafter = member.drafter
        shape = self._own(drafter, request.shape)
        offered = drafter.proposals_for(shape)
        proposal = "deterministic" if request.sampler.greedy else next(each for each in SUITS_MATCH if each in offered)
        begin = self.clock()
        tree = drafter.draft(replace(request, shape=shape, proposal=proposal, needs_q=False))
        if member.costly:
            member.read.update((row.slot, len(row.ids)) for row in request.rows)
        spent = self.clock() - begin
        matched = drafter.matched(request.rows) if isinstance(drafter, Matching) else [0] * len(request.rows)
        return Part(member, tree, matched, spent)

    def _joined(self, drafted: Drafted, rows: list[Merged] | None, request: DraftRequest) -> TokenTree:
        """The tree of all parts. Models on another device are not waited for; everything else is quicker on the host."""
        parts = drafted.parts
        if not parts:
            return TokenTree.root(request.roots())
        if len(parts) == 1 and len(request.rows) == 1 and parts[0].tree.chain and not self._would_wait(parts, request):
            return self._alone(parts[0], request)
        if self._would_wait(parts, request) and not self._chains_only and not any(part.tree.extra for part in parts):
            rates = [
                torch.tensor([part.member.record.rates(each)[: request.depth] for each in part.matched], device=request.device)
                for part in parts
            ]
            trees = [part.tree.truncate(request.limits) for part in parts]
            budget, floor = self.nodes or request.shape.nodes, _floor(request.shape)
            tree, went = merged(trees, request.depth, budget=budget, floor=floor, rates=rates)
            for part, where in zip(parts, went):
                part.went = where
            return tree
        rows = self._merge(parts, request) if rows is None else rows
        self.expected_accepted = sum(row.hope for row in rows) / len(rows)
        for row in rows:
            row.lead()
        trees = [part.tree for part in parts]
        tree = assembled(rows, trees, request.device)
        for part, where_ in zip(parts, places(rows, trees, tree.nodes)):
            part.went = where_
        return tree

    def _alone(self, part: Part, request: DraftRequest) -> TokenTree:
        """The one row's tree where the only draft is a chain: there is nothing to merge, and only its length to choose."""
        shape, nodes = request.shape, part.tree.nodes - 1
        if part.tree.valid is not None:
            nodes = int(part.tree.valid.sum()) - 1
        nodes = min(nodes, self.nodes or shape.nodes)
        reach, weights, rates = 1.0, list[float](), part.member.record.rates(part.matched[0], shape.depth)
        for level in range(nodes):
            reach *= min(rates[min(level, len(rates) - 1)][0], SUREST)
            if reach < _floor(shape):
                break
            weights.append(reach)
        if isinstance(shape, DynamicShape) and shape.prices:
            del weights[shape.worthwhile([math.log(weight) for weight in weights]) :]
        self.expected_accepted = sum(weights)
        return TokenTree.from_chain(part.tree.tokens[:, : 1 + len(weights)], proposal="mixed", pruned=True)

    @staticmethod
    def _would_wait(parts: Sequence[Part], request: DraftRequest) -> bool:
        """Whether reading the drafts would wait for a device."""
        return request.device.type != "cpu" and any(part.member.costly for part in parts)

    def _merge(self, parts: Sequence[Part], request: DraftRequest) -> list[Merged]:
        shape, lines = request.shape, [part.read() for part in parts]
        rates: list[list[Rates]] = [[part.member.record.rates(matched, shape.depth) for matched in part.matched] for part in parts]
        options: dict[str, Any] = {"budget": self.nodes or shape.nodes, "floor": _floor(shape), "branches": not self._chains_only}
        rows = [
            merge_row([each[row] for each in lines], [each[row] for each in rates], depth=limit, **options)
            for row, limit in enumerate(request.limits)
        ]
        if isinstance(shape, DynamicShape) and shape.prices:
            worthwhile = max(shape.worthwhile([math.log(weight) for weight in row.weights[1:]]) for row in rows)
            for row in rows:
                row.cut(worthwhile)
        return rows

    # -- after a round --------------------------------------------------------------------------------------------------

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        drafted, self._drafted = self._drafted, None
        if drafted is None:  # one drafter alone, or a round without a draft
            for member in self.members:
                member.drafter.observe(rows, self._whole_of(member, feedback))
            return
        outside = self.clock() - drafted.ready
        texts = [row.ids[length:] for row, length in zip(rows, drafted.lengths)]
        paths = _paths(feedback) if any(isinstance(part.went, list) for part in drafted.parts) else []
        for member in self.members:
            begin, part = self.clock(), drafted.part_of(member)
            member.drafter.observe(rows, self._heard(member, part, feedback, paths))
            if part is not None:
                part.spent += self.clock() - begin
        self._give_credit(drafted.parts, paths)
        self._learn(drafted, texts, outside)

    def _heard(self, member: Member, part: Part | None, feedback: Feedback, paths: list[list[int]]) -> Feedback:
        """What one member is told: of its own nodes, or of a round without a draft. One that reads hidden states is told of the merged
        tree, asked or not: it needs those of every node that was kept, whoever proposed it."""
        info = member.drafter.info
        if not (info.learns_from_feedback or info.needs_logits or info.features):
            return feedback
        told = self._whole_of(member, feedback)
        if info.features:
            return told
        if part is None:
            logits = None if told.logits is None else told.logits[:, :1]
            return Feedback(TokenTree.root(feedback.tree.tokens[:, 0]), [0] * feedback.tree.rows, None, logits)
        if isinstance(part.went, Tensor):
            return seen_by(part.tree, part.went, told)
        return replace(told, tree=part.tree) if part.went is None else heard_by(part.tree, part.went, told, paths)

    def _whole_of(self, member: Member, feedback: Feedback) -> Feedback:
        """``feedback`` with what the member learns from."""
        drafter, hidden = member.drafter, feedback.hidden
        mine = self._share(drafter, hidden) if drafter.info.features and hidden is not None else None
        return replace(feedback, logits=feedback.logits if drafter.info.needs_logits else None, hidden=mine)

    @staticmethod
    def _give_credit(parts: Sequence[Part], paths: Sequence[Sequence[int]]) -> None:
        """Every accepted node to the first of those that proposed it, in the order in which they were asked."""
        given: list[set[int]] = [set() for _ in paths]
        for number, part in enumerate(parts):
            if not isinstance(part.went, list) or part.member.costly:
                continue
            own = [set(path[1:]).intersection(went) for path, went in zip(paths, part.went)]
            if number:
                added = [len(nodes - already) for nodes, already in zip(own, given)]
                part.member.credit.was_asked(parts[0].matched, added, part.spent)
            given = [already | nodes for already, nodes in zip(given, own)]

    def _learn(self, drafted: Drafted, texts: Sequence[Sequence[int]], outside: float) -> None:
        """From the ``texts`` that the rows gained, and the seconds that the round took outside the draft."""
        for part in drafted.parts:
            for line, matched, text in zip(part.read(), part.matched, texts):
                part.member.record.observe(matched, line.along(text))
        self.pace.add(sum(map(len, texts)), drafted.ready - drafted.begin + outside)
        for each in drafted.considered:
            asked = drafted.part_of(each.member)
            if asked is None:
                each.member.worth.was_not_asked(outside)
                continue
            reached = [row.reach(text) for row, text in zip(each.rows, texts)] if each.rows else [0] * len(texts)
            added = [len(text) - 1 - min(count, len(text) - 1) for count, text in zip(reached, texts)]
            each.member.worth.was_asked(each.hopes, added, asked.spent, outside, depth=drafted.depth, missed=each.missed)

    # -- the rest -------------------------------------------------------------------------------------------------------

    def end(self, rows: Sequence[Row]) -> None:
        for member in self.members:
            member.drafter.end(rows)
            for row in rows:
                member.read.pop(row.slot, None)

    def reset(self) -> None:
        self._drafted = None
        for member in self.members:
            member.drafter.reset()
            member.read.clear()

    def forget(self) -> None:
        """What each has learned, and how far each is to be trusted; how long a draft takes is kept."""
        for member in self.members:
            member.drafter.forget()
            member.record, member.worth, member.credit = Record(), Worth(member.worth.timed), Credit(member.credit.seconds)

    def close(self) -> None:
        for drafter in self.drafters:
            drafter.close()

    def _own(self, drafter: Drafter, shape: TreeShape) -> TreeShape:
        """What a drafter among several is asked for: no more levels than it can draft, and by one that makes chains only a chain."""
        info = drafter.info
        shape = shape if info.max_depth is None else shape.truncate(info.max_depth)
        return shape if info.branches and not self._chains_only else TreeShape.chain(shape.depth)


def _floor(shape: TreeShape) -> float:
    """How likely a path has to be to be proposed."""
    return shape.floor if isinstance(shape, DynamicShape) else 0.0


def _paths(feedback: Feedback) -> list[list[int]]:
    """The nodes kept per row, root first."""
    if feedback.path is None:
        return [list(range(count + 1)) for count in feedback.accepted]
    nodes: list[list[int]] = feedback.path.tolist()
    return [path[: count + 1] for path, count in zip(nodes, feedback.accepted)]


def _made(given: str | Drafter | tuple[str, dict[str, Any]]) -> Drafter:
    from foredraft import drafters  # the registry lists this drafter too

    if isinstance(given, Drafter):
        return given
    name, options = (given, {}) if isinstance(given, str) else given
    drafter: Drafter = drafters.create(name, options)
    return drafter
