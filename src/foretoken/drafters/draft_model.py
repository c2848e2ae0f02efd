"""A smaller causal language model as the drafter (Leviathan et al. 2023; Chen et al. 2023).

It has a cache of its own, one physical row per live row in the same order, and runs batched. After a round it rewinds
to the tokens that were kept; the next draft feeds it whatever it has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.drafters.base import Drafter, DraftRequest, Row
from foretoken.errors import ConfigurationError
from foretoken.loading import load_model, vocabulary_difference
from foretoken.sampler import fit_vocabulary
from foretoken.target import Target, unwrap
from foretoken.tree import Proposal, TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIBLINGS: dict[str, tuple[Proposal, ...]] = {
    "auto": ("iid", "keyed", "deterministic"),
    "iid": ("iid",),
    "keyed": ("keyed",),
    "top-k": ("deterministic",),
}


class DraftModel(Drafter):
    """Options:

    source: a causal language model with the target's tokenizer: a ``PreTrainedModel``, a path, a hub id or ``zoo:NAME``.
    siblings: how tokens are chosen when sampling: ``iid`` (from q, for the p/q rules), ``keyed`` (with the target's noise,
        for match), ``top-k`` (the most likely), or ``auto``: whichever the rule in use accepts best.
    dtype, device: where to load it, the target's by default; a model that is given is used as it is.
    """

    name = "draft-model"
    summary = "a smaller causal language model with the same tokenizer, KV-cached and batched"

    def __init__(
        self,
        source: str | PreTrainedModel,
        *,
        siblings: str = "auto",
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
    ):
        if siblings not in SIBLINGS:
            raise ConfigurationError(f"unknown siblings {siblings!r}; choose {', '.join(SIBLINGS)}")
        self.proposals = SIBLINGS[siblings]
        self.source, self.dtype, self.device = source, dtype, device
        self._target: Target | None = None
        self._slots: list[int] = []
        self._smaller = False

    @property
    def model(self) -> Target:
        """The draft model behind its own cache; bound when a Speculator is built."""
        if self._target is None:
            raise ConfigurationError("this draft model belongs to no Speculator yet; pass it as Speculator(..., drafter=...)")
        return self._target

    def bind(self, target: Target) -> None:
        draft = self.source
        if isinstance(draft, str):
            draft = load_model(draft, dtype=self.dtype or target.model.dtype, device=self.device or target.device)
        difference = vocabulary_difference(target.model, unwrap(draft))
        if difference:
            raise ConfigurationError(f"the draft model {draft.name_or_path!r} does not share the target's vocabulary: {difference}")
        self._target = Target(draft, reuse_prefix=target.reuse_prefix)
        self._smaller = self._target.vocab_size < target.vocab_size

    def begin(self, rows: Sequence[Row]) -> None:
        self.model.open([row.ids for row in rows], reserve=[row.capacity for row in rows])
        self._slots += [row.slot for row in rows]

    def draft(self, request: DraftRequest) -> TokenTree:
        limits = [min(limit, self._room(row)) for row, limit in zip(request.rows, request.limits)]
        depth = max(limits)
        if depth < 1:
            return TokenTree.root(request.roots())
        drafted: list[Tensor] = []
        qs: list[Tensor] = []
        roots = request.roots()
        logits = self._after(request.rows, roots)
        while True:
            token, q = request.choose(fit_vocabulary(logits.to(request.device), request.vocab_size), drafted)
            drafted.append(token)
            if q is not None:
                qs.append(q)
            if len(drafted) == depth:
                break
            logits = self._feed(token)
        tokens = torch.stack([roots, *drafted], 1)
        return TokenTree.from_chain(
            tokens, valid=request.within(limits, depth), proposal=request.proposal, q=torch.stack(qs, 1) if qs else None
        )

    def _after(self, rows: Sequence[Row], roots: Tensor) -> Tensor:
        """``[R, V]`` logits after each row's text, whatever this cache lacks of it: mostly the root alone."""
        if all(len(row.ids) == length + 1 for row, length in zip(rows, self.model.lengths)):
            return self._feed(roots)
        return self.model.prefill([row.ids for row in rows], first=0)

    def _feed(self, tokens: Tensor) -> Tensor:
        """``[R, V]`` logits after one more token ``[R]`` per row; one that only the target's padding knows is fed as another."""
        if self._smaller:
            tokens = tokens.clamp(max=self.model.vocab_size - 1)
        return self.model.advance(tokens.to(self.model.device))

    def observe(self, rows: Sequence[Row], accepted: Sequence[int]) -> None:
        """Forget what was rejected: the text but for its last token is the longest beginning that the cache can share."""
        self.model.rewind([min(length, len(row.ids) - 1) for length, row in zip(self.model.lengths, rows)])

    def end(self, rows: Sequence[Row]) -> None:
        gone = {row.slot for row in rows}
        keep = [index for index, slot in enumerate(self._slots) if slot not in gone]
        self.model.compact(keep)
        self._slots = [self._slots[index] for index in keep]

    def reset(self) -> None:
        if self._target is not None and self._slots:
            self._target.release()  # an interrupted round leaves drafted tokens behind
        self._slots = []

    def _room(self, row: Row) -> int:
        """How many tokens this model can still draft for ``row`` inside its own context."""
        return row.capacity if self.model.context is None else max(0, self.model.context - len(row.ids))
