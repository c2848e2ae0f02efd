"""What a drafter is: something that proposes tokens cheaply.

A drafter sees the committed text of each row and returns a :class:`~foredraft.tree.TokenTree`. It never decides what is
kept, so nothing it does can change the output law, as long as it says truthfully how it chose its tokens
(``request.proposal``). Rows begin and end at any round; what a drafter remembers about a row it keeps under the row's slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

from foredraft.device import to_device
from foredraft.logits.noise import Purpose, argmax
from foredraft.logits.sampler import Sampler
from foredraft.shapes import StaticShape, TreeShape
from foredraft.tree import Proposal, TokenTree

if TYPE_CHECKING:
    from foredraft.target import Target


class Row(Protocol):
    """What a drafter may know about a row; to be read, not changed."""

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


@dataclass(frozen=True, eq=False)
class DraftRequest:
    """One round's order.

    Attributes:
        rows: the live rows.
        shape: the tree wanted at most, no deeper than ``depth``; a chain for a drafter whose :meth:`Drafter.refusal` says so.
        depth: how deep to draft at most.
        limits: the same per row, at most ``depth``; a row close to its length limit drafts less.
        proposal: how tokens are to be chosen, one of the drafter's ``proposals``.
        needs_q: the rule compares with the draft's own distribution, so the tree must carry ``q``.
        vocab_size: of the target; every token must lie below it.
        device: where the tree is wanted.
        sampler: turns logits into choices; use :meth:`choose`.
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
        scores = self.sampler.scores_below(logits, drafted, self.limits)
        if self.proposal == "deterministic":
            return argmax(scores), None
        q = self.sampler.distribution(scores)
        depth, noise = len(drafted), self.sampler.noise
        assert noise is not None
        if self.proposal == "keyed":
            depths = torch.full((len(q), 1), depth, device=q.device)
            return noise.race(q[:, None], depths)[:, 0], q if self.needs_q else None
        return noise.draw(q, Purpose.DRAFT, depth), q if self.needs_q else None

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


@dataclass(frozen=True, eq=False)
class Feedback:
    """How a round ended for R rows.

    Attributes:
        tree: what was verified.
        accepted: per row, how many drafted tokens were kept.
        path: ``[R, D]`` nodes from the root down, the first ``accepted + 1`` of them kept; None if they are the first ones in order.
        logits: ``[R, N, V]`` the target's raw logits at every node of ``tree``, as its LM head made them, on its device and in its
            dtype; only for a drafter that ``wants_logits``. The next pass may overwrite them. Filler of a tree has logits as well, as
            long as the tree is no chain: of a chain's filler nothing need be computed.
        hidden: ``[R, N, F * d]`` the target's hidden states at every node of ``tree``, for the drafter's ``features`` in their order;
            only for a drafter that has some. Those of the last node kept, ``path[r][accepted[r]]``, are what the bonus token was chosen
            from. The tree may be another than the one it drafted: without a draft only the roots, among several drafters the merged one.
    """

    tree: TokenTree
    accepted: Sequence[int]
    path: Tensor | None
    logits: Tensor | None = None
    hidden: Tensor | None = None


class Drafter:
    """Base of drafters; a subclass sets the class variables and writes :meth:`draft`.

    ``proposals`` lists how it can choose tokens, best first; ``branches`` that it can draft trees, ``grows`` that it can do so by its
    own probabilities; ``hears`` that it learns from what became of its drafts, else a merged tree's feedback is not made into its own, and
    the rows' text is all it goes by; ``wants_logits`` that it learns from the target's logits at the nodes, its :class:`Feedback` then
    holds them;
    ``features`` are the hidden states that it wants of the target, numbered as in transformers' ``output_hidden_states`` with -1 for
    what the LM head reads, known once it is bound: it calls ``target.read(features, whole=whole_text)`` in :meth:`bind`, :meth:`read`
    and its feedback then bring them, ``whole_text`` at every token of a prompt;
    ``filler`` is how many nodes it may put behind those asked for, as a tree's ``extra``, known once it is bound. Its constructor's
    keyword arguments are its options.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    proposals: tuple[Proposal, ...] = ("deterministic",)
    branches: bool = False
    auto_branches: bool = True  # shape="auto" may ask for trees
    grows: bool = False
    wants_logits: bool = False
    hears: bool = True  # of what became of its drafts; one that does not learns from the rows' text alone
    features: tuple[int, ...] = ()
    whole_text: bool = False
    filler: int = 0
    owner: object = None  # the session whose rows these are
    keeps_up: bool = False  # a draft after rounds without one costs it no more than another: it reads nothing that it missed
    calibrated: StaticShape | None = None  # a tree that it was calibrated for; shape="auto" may use one as large
    rates: tuple[tuple[float, ...], ...] = ()  # how often its guess of each rank is right at each depth, as far as that was measured
    expected: float | None = None  # tokens per row that the last draft's own probabilities promise, where they chose its nodes

    def bind(self, target: Target) -> None:
        """Called once, before any row begins; refuse here what can not work with this target."""

    @property
    def deepest(self) -> int | None:
        """How many levels it can draft, known once it is bound; None for any number."""
        return None

    def proposals_for(self, shape: TreeShape) -> tuple[Proposal, ...]:
        """How it can choose tokens in trees of ``shape``, best first."""
        return self.proposals

    def refusal(self, shape: TreeShape) -> str | None:
        """Why it can not draft ``shape``, or None; asked once it is bound."""
        return None if shape.is_chain or self.branches else f"drafter {self.name!r} drafts chains only; use shape='chain({shape.depth})'"

    def makes_chains(self, shape: TreeShape) -> bool:
        """Whether its trees are chains under ``shape``."""
        return shape.is_chain

    def read(self, rows: Sequence[Row], hidden: Sequence[Tensor]) -> None:
        """Called right before :meth:`begin` with the same rows, for a drafter with ``features``: ``hidden[r]`` holds them at the last
        token of the prompt of ``rows[r]``, ``[1, F * d]``, or at all of them, ``[L, F * d]``, for one with ``whole_text``. What was
        generated since, the first token, has no hidden state yet."""

    def begin(self, rows: Sequence[Row]) -> None:
        """Rows have been prefilled and got their first token; they come after all live rows."""

    def draft(self, request: DraftRequest) -> TokenTree:
        """Propose a tree for ``request.rows``: the live rows, in the order in which they began."""
        raise TypeError(f"{type(self).__name__} must define draft(request)")

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        """A round is over; ``rows[r].ids`` holds the new text, which may end before what was accepted does."""

    def end(self, rows: Sequence[Row]) -> None:
        """These rows are gone; forget them."""

    def reset(self) -> None:
        """Forget every row, after an error or an abandoned stream."""

    def forget(self) -> None:
        """Forget what texts so far have taught it: as it was when it was bound, but for rows that live."""

    def close(self) -> None:
        """Called once, at the end: give back what was taken or changed at :meth:`bind`."""
