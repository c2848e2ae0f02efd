"""What a drafter is: something that proposes tokens cheaply.

A drafter sees the committed text of each row and returns a :class:`~foredraft.tree.TokenTree`. It never decides what is
kept, so it cannot change the output distribution, as long as it reports truthfully how it chose its tokens
(``request.proposal``). Rows begin and end at any round; what a drafter remembers about a row it keeps under the row's slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from foredraft.describing import Described
from foredraft.device import to_device
from foredraft.drafters.exits import Exits
from foredraft.drafters.siblings import Offer
from foredraft.logits.noise import Purpose, argmax
from foredraft.logits.sampler import Sampler, widened
from foredraft.shapes import StaticShape, TreeShape
from foredraft.tree import Proposal, TokenTree

if TYPE_CHECKING:
    from foredraft.models.encoder_decoder import Source
    from foredraft.target import Target
    from foredraft.target.prefixes import Companion


class Row(Protocol):
    """What a drafter can read of a row. Do not change it."""

    @property
    def slot(self) -> int:
        """Names the row for as long as it lives."""

    @property
    def ids(self) -> list[int]:
        """Committed tokens, prompt first; the last one is the root of the next tree."""

    @property
    def prompt_length(self) -> int: ...

    @property
    def capacity(self) -> int:
        """Tokens that the row will hold at most."""

    @property
    def source(self) -> Source | None:
        """What the encoder reads for the row; None where the target has no encoder."""

    @property
    def isolation(self) -> str | None:
        """Rows that differ in this must not share what was computed for their texts."""


@dataclass(frozen=True, eq=False)
class DraftRequest:
    """What a drafter is asked for in one round.

    Attributes:
        rows: the live rows.
        shape: the largest tree, no deeper than ``depth``; a chain for a drafter that refuses other shapes.
        depth: how deep to draft at most.
        limits: most draft tokens per row, at most ``depth``; fewer for a row close to its length limit.
        proposal: how tokens are to be chosen, one of the drafter's proposals.
        needs_q: the draft's distribution q is wanted, so the tree carries ``q``: the rule needs it, or a trace shows it.
        vocab_size: of the target; every token must lie below it.
        device: where the tree must be.
        sampler: turns logits into choices; use :meth:`choose`.
        partial: the draft's logits are -inf at tokens that it cannot draft. Where a row's processors leave only these, nothing is drafted.
        thresholds: per row, how likely a drafted token must be by the draft's raw softmax for the draft to go on below it; None for no
            such limit. Set by :class:`~foredraft.drafters.stopping.Stopping`.
    """

    rows: Sequence[Row]
    shape: TreeShape
    depth: int
    limits: Sequence[int]
    proposal: Proposal
    needs_q: bool
    vocab_size: int
    device: torch.device
    sampler: Sampler
    thresholds: Sequence[float] | None = None
    partial: bool = False

    def roots(self) -> Tensor:
        """``[R]`` last committed tokens."""
        return to_device([row.ids[-1] for row in self.rows], self.device)

    def choose(self, logits: Tensor, drafted: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The next token of each row, and the distribution it came from where the rule needs it.

        Args:
            logits: ``[R, V]`` draft logits after the root and the ``drafted`` tokens (``[R]`` each).

        Returns:
            tokens ``[R]``, and q ``[R, V]`` float32 or None.
        """
        return pick(self, self.sampler.scores_below(logits, drafted, self.limits), len(drafted))

    def goes_on(self, logits: Tensor, tokens: Tensor, above: Tensor) -> Tensor:
        """``[R, c]`` bool: below which of ``tokens`` ``[R, c]`` the ``thresholds`` allow more; ``logits`` ``[R, n, V]`` are the draft's raw
        ones, and token i follows the node ``above[i]`` of them."""
        assert self.thresholds is not None
        wide, rows = widened(logits), torch.arange(len(tokens), device=tokens.device)[:, None]
        likely = (wide[rows, above, tokens] - wide.logsumexp(-1)[:, above]).exp()
        return likely >= torch.tensor(self.thresholds, dtype=likely.dtype, device=likely.device)[:, None]

    def chains(self, drafts: Sequence[Sequence[int]]) -> TokenTree:
        """A tree of one deterministic chain per row, from host lists of any lengths, cut to the row's limit."""
        cut = [list(draft[:limit]) for draft, limit in zip(drafts, self.limits)]
        nodes = 1 + max(len(draft) for draft in cut)
        tokens = [[row.ids[-1], *draft] + [0] * (nodes - 1 - len(draft)) for row, draft in zip(self.rows, cut)]
        return TokenTree.from_chain(to_device(tokens, self.device), valid=self.depth_mask([len(draft) for draft in cut], nodes - 1))

    def depth_mask(self, lengths: Sequence[int], depth: int) -> Tensor | None:
        """``[R, depth + 1]`` bool: the nodes of chains of ``lengths`` drafted tokens; None if all are ``depth`` long."""
        if min(lengths) == depth:
            return None
        return torch.arange(depth + 1, device=self.device)[None] <= to_device(lengths, self.device)[:, None]


def pick(request: DraftRequest, scores: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
    """What :meth:`DraftRequest.choose` gives, by processed ``scores`` ``[R, V]``, with ``depth`` tokens drafted already."""
    if request.proposal == "deterministic":
        return argmax(scores), None
    q = request.sampler.distribution(scores)
    noise = request.sampler.noise
    assert noise is not None
    if request.proposal == "keyed":
        depths = torch.full((len(q), 1), depth, device=q.device)
        return noise.race(q[:, None], depths)[:, 0], q if request.needs_q else None
    return noise.draw(q, Purpose.DRAFT, depth), q if request.needs_q else None


def is_over(row: Row) -> bool:
    """Whether a row that left has ended; one that was set aside for want of memory comes back."""
    return getattr(getattr(row, "stats", None), "finish_reason", "over") is not None


@dataclass(frozen=True, eq=False)
class Feedback:
    """How a round ended for R rows.

    Attributes:
        tree: what was verified.
        accepted: per row, how many tokens of the tree were kept.
        path: ``[R, D]`` nodes from the root down, the first ``accepted + 1`` of them kept; None if they are the first ones in order.
        logits: ``[R, N, V]`` the target's raw logits at every node of ``tree``, as its LM head made them, on its device and in its
            dtype; only for a drafter with ``info.needs_logits``. The next pass may overwrite them. Filler of a tree has logits as well, as
            long as the tree is no chain: of a chain's filler nothing need be computed.
        hidden: ``[R, N, F * d]`` the target's hidden states at every node of ``tree``, for the drafter's ``info.features`` in their
            order; only for a drafter that has some. The bonus token was chosen from those of the last node kept,
            ``path[r][accepted[r]]``. The tree may be another than the one it drafted: without a draft only the roots, among several
            drafters the merged one.
        failed: the rows, by their number, that ended in an error. Their logits are zeros, and their hidden states may be NaN.
        drafted: False for a tree of tokens that the target alone has chosen, in several passes of plain decoding: nothing is learnt of how
            often drafts are right.
    """

    tree: TokenTree
    accepted: Sequence[int]
    path: Tensor | None
    logits: Tensor | None = None
    hidden: Tensor | None = None
    failed: frozenset[int] = frozenset()
    drafted: bool = True


@dataclass(frozen=True)
class DrafterInfo:
    """What a drafter can do and what it needs. Declared as :attr:`Drafter.info`; a drafter replaces it in its constructor or in
    :meth:`Drafter.bind` where it depends on options or on the target. The loop and the planner read it from then on.

    Attributes:
        proposals: how the drafter can choose tokens, best first.
        branches: it can draft trees.
        auto_branches: ``shape="auto"`` may ask it for trees.
        grows: it can choose the nodes of a tree by its own probabilities, so that it takes dynamic shapes.
        max_depth: how many levels it can draft; None for any number.
        learns_from_feedback: :meth:`Drafter.observe` reads its feedback. If False, and it needs neither logits nor hidden states, the
            text of the rows is all it goes by, and its part of a merged tree is not reconstructed for it.
        needs_logits: its feedback holds the target's logits at every node.
        features: the target's hidden states that it needs, numbered as in transformers' ``output_hidden_states``, -1 for what the LM
            head reads. :meth:`Drafter.bind` must call ``target.read(features, whole=whole_prompt)``.
        whole_prompt: it needs the features at every token of a prompt, not only at the last one.
        extra_nodes: how many nodes it may add behind those asked for, as a tree's ``extra``.
        draft_model, head: the model or the head whose passes make its drafts. The planner times such drafts before the first round.
        runs_a_model: a draft takes forward passes, its own or those of drafters that it is made of.
        exits: the layers at which its drafts may leave the target; the planner chooses one. None if there is no choice.
        shares_target: its drafts run some of the target's layers and write to the target's cache; verification then runs only the other
            layers. ``several`` refuses such a drafter.
        catches_up: after rounds without a draft the next one costs more, because the drafter first reads what it missed.
        calibrated: a tree that it was calibrated for; ``shape="auto"`` may use one as large.
        rates: how often its guess of each rank is right at each depth, as far as that was measured.
    """

    proposals: tuple[Proposal, ...] = ("deterministic",)
    branches: bool = False
    auto_branches: bool = True
    grows: bool = False
    max_depth: int | None = None
    learns_from_feedback: bool = True
    needs_logits: bool = False
    features: tuple[int, ...] = ()
    whole_prompt: bool = False
    extra_nodes: int = 0
    draft_model: Target | None = None
    head: torch.nn.Module | None = None
    runs_a_model: bool = False
    exits: Exits | None = None
    shares_target: bool = False
    catches_up: bool = False
    calibrated: StaticShape | None = None
    rates: tuple[tuple[float, ...], ...] = ()

    @property
    def copies(self) -> bool:
        """Its drafts are copied from texts: ``shape="auto"`` follows them as chains, though it could draft trees."""
        return self.branches and not self.auto_branches


class DrafterHooks:
    """What a drafter may override besides the five methods of :class:`Drafter`; the defaults suit most."""

    name: ClassVar[str]
    info: DrafterInfo = DrafterInfo()
    _offer: Offer | None = None  # proposals by shape, of a drafter with the option ``siblings``

    @property
    def part(self) -> object:
        """Which part of the target drafts, where ``info.shares_target``; measured costs are kept for each."""
        return None

    @property
    def learnt(self) -> dict[str, Any] | None:
        """What came of learning while serving, for ``stats.learning``; None for a drafter that does not."""
        return None

    @property
    def keeps_texts(self) -> bool:
        """Whether it drafts by what it keeps of earlier texts."""
        return self.learnt is not None

    @property
    def draft_models(self) -> Sequence[Target]:
        """The models that it drafts with, those of its members too."""
        return [] if self.info.draft_model is None else [self.info.draft_model]

    @property
    def page_bytes(self) -> int:
        """Bytes of keys and values that it keeps beside each page of a text in the target's cache."""
        draft = self.info.draft_model
        return 0 if draft is None else sum(draft.page_bytes) - draft.source_bytes

    @property
    def source_bytes(self) -> int:
        """The same beside each page of a source, where the target has an encoder."""
        return 0 if self.info.draft_model is None else self.info.draft_model.source_bytes

    def written_nodes(self, shape: TreeShape) -> int:
        """Nodes that a round writes behind a row at most, the root included, into the target's cache or one that its budget counts."""
        return 1 + self.info.extra_nodes + (shape.grown_nodes if self.info.shares_target or self.page_bytes else shape.nodes)

    @property
    def companion(self) -> Companion | None:
        """What it passes to ``target.read`` if it reads whole prompts, and keeps what it makes of a beginning for the next text."""
        return None

    def proposals_for(self, shape: TreeShape) -> tuple[Proposal, ...]:
        """How it can choose tokens in trees of ``shape``, best first."""
        return self.info.proposals if self._offer is None else self._offer.of(shape)

    def refusal(self, shape: TreeShape) -> str | None:
        """Why it cannot draft ``shape``, or None; called once it is bound."""
        if shape.is_chain or self.info.branches:
            return None
        return f"drafter {self.name!r} drafts chains only; use shape='chain({shape.depth})'"

    def drafter_of(self, row: int) -> str:
        """The name of the drafter that proposed for the row number ``row`` of the newest draft, which may be one of several."""
        return self.name

    def makes_chains(self, shape: TreeShape) -> bool:
        """Whether its trees are chains under ``shape``."""
        return shape.is_chain

    def check_source(self, source: Source) -> None:
        """Raise ConfigurationError if it cannot read the source of a row that is about to be added; any thread may call it."""

    def read(self, rows: Sequence[Row], hidden: Sequence[Tensor]) -> None:
        """Called right before :meth:`Drafter.begin` with the same rows if ``info.features`` names any. ``hidden[r]`` holds them at the
        last token of the prompt of ``rows[r]``, ``[1, F * d]``, or at every token, ``[L, F * d]``, with ``info.whole_prompt``; then only
        behind the beginning that the target has reused, if there is a :attr:`companion`. The first generated token has no hidden state
        yet."""

    def read_ahead(self, row: Row, text: Sequence[int], hidden: Tensor | None) -> None:
        """The target has read ``text``, the beginning of the prompt of a ``row`` that is yet to begin. A drafter that reads prompts, too,
        reads it now: live rows wait between two pieces no longer than necessary. A :attr:`companion` has opened a row for it; ``hidden``
        ``[n, F * d]`` are the states of its last n tokens, None unless there is a companion."""

    def shared(self) -> list[object]:
        """What others may use as well, but no two threads at once: models, heads, stores that were handed in; called once it is bound."""
        used = (self.info.draft_model and self.info.draft_model.model, self.info.head)
        return [each for each in used if each is not None]

    def reset(self) -> None:
        """Forget every row, after an error or an abandoned stream."""

    def follow(self) -> int:
        """Called between rounds: look whether a model of its own has changed. A number that is another once it has; all rows then begin
        anew, after :meth:`reset`."""
        return 0

    def release(self) -> None:
        """Forget every row, and give back memory that is taken again when rows begin."""
        self.reset()

    def forget(self) -> None:
        """Forget what past texts have taught it, as if it had just been bound; rows that live are kept."""

    def close(self) -> None:
        """Called once, at the end: give back what :meth:`Drafter.bind` took or changed."""


class Drafter(DrafterHooks, Described):
    """Base of drafters. A subclass sets ``name``, ``summary`` and ``info`` and writes :meth:`draft`; one with state also writes
    :meth:`bind`, :meth:`begin`, :meth:`observe` and :meth:`end`. :class:`DrafterHooks` lists the optional rest. The keyword arguments of
    its constructor are its options.

    Attributes:
        expected_accepted: accepted tokens per row that the newest draft's own probabilities predict; None where they did not choose its
            nodes. Set by :meth:`draft`.
        owner: the session whose rows these are. Set by the loop.
    """

    summary: ClassVar[str]
    expected_accepted: float | None = None
    owner: object = None

    def facts(self, *, all: bool = False) -> dict[str, Any]:
        source = getattr(self, "source", None)
        named = source if isinstance(source, (str, Path)) else getattr(source, "name_or_path", None) or type(source).__name__
        few = {} if source is None else {"source": named}
        return {**few, "summary": self.summary, **vars(self.info)} if all else few

    def bind(self, target: Target) -> None:
        """Called once, before any row begins. Raise ConfigurationError here if this target cannot be drafted for."""

    def begin(self, rows: Sequence[Row]) -> None:
        """Rows have been prefilled and got their first token; they come after all live rows."""

    def draft(self, request: DraftRequest) -> TokenTree:
        """Propose a tree for ``request.rows``: the live rows, in the order in which they began."""
        raise TypeError(f"{type(self).__name__} must define draft(request)")

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        """A round is over; ``rows[r].ids`` holds the new text, which may end before what was accepted does."""

    def end(self, rows: Sequence[Row]) -> None:
        """These rows are gone; forget them."""
