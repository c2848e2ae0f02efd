"""From logits to distributions and choices, for the rows of one round.

The target and a sampled draft go through the same code: ``p`` and ``q`` are both what is left *after* temperature, top-k,
top-p and every other processor, each node with its own history. A greedy row's distribution is one-hot, so that one
batch can hold greedy and sampled rows under any rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from foredraft.device import one_thread, to_device
from foredraft.logits.histories import NodeHistories
from foredraft.logits.noise import Randomness
from foredraft.logits.processors import Pipeline, Stopwatch, process
from foredraft.tree import TokenTree

Failures = dict[tuple[int, int], Exception]  # by row and node


@dataclass(frozen=True, eq=False)
class Sampler:
    """How R rows turn logits into distributions in one round.

    Attributes:
        pipelines: one per row.
        sampled: per row, whether it samples; a row that does not takes the argmax.
        lengths: committed tokens per row, the root included.
        noise: the round's randomness; None if no row samples.
        committed: gives ``[R, width]`` committed ids with room for drafts behind; called only if a pipeline reads them.
        ends: per row the tokens that end it; empty for none. A processor of the user's own is not asked what follows them.
        watch: adds up the seconds that the user's own processors take, for the draft as for the target.
    """

    pipelines: Sequence[Pipeline]
    sampled: Sequence[bool]
    lengths: Sequence[int]
    noise: Randomness | None
    committed: Callable[[], Tensor]
    ends: Sequence[frozenset[int]] = ()
    watch: Stopwatch = field(default_factory=Stopwatch)

    @cached_property
    def greedy(self) -> bool:
        """No row samples."""
        return not any(self.sampled)

    @cached_property
    def plain(self) -> bool:
        """No row has a processor."""
        return all(pipeline.empty for pipeline in self.pipelines)

    @cached_property
    def needs_history(self) -> bool:
        return any(pipeline.needs_history for pipeline in self.pipelines)

    def scores(self, logits: Tensor, tree: TokenTree, first: int = 0, failures: Failures | None = None) -> Tensor:
        """``[R, N - first, V]`` float32 processed ``logits`` of that shape, at the nodes ``first``.. of ``tree``.

        A drafter grows its tree level by level: the nodes before ``first`` are there as the history of the new ones. A processor
        of the user's own is asked about every new node that is ``valid``, so a token that the processed distribution above it
        rules out has to be filler.

        A node at which a processor raises keeps its raw logits, and so do the nodes below. Where the exceptions are wanted, they are
        put into ``failures`` by row and node. A draft does not want them: if plain decoding gets there, the target's scores tell.
        """
        if self.plain:
            return widened(logits)
        try:
            return self._processed(logits, tree, first)
        except Exception:  # a user's processor raises what it likes
            return self._one_by_one(logits, tree, first, {} if failures is None else failures)

    def _processed(self, logits: Tensor, tree: TokenTree, first: int) -> Tensor:
        histories = NodeHistories(self.committed(), self.lengths, tree, first, self.ends) if self.needs_history else None
        return process(self.pipelines, logits, histories, watch=self.watch)

    def scores_below(self, logits: Tensor, tokens: Sequence[Tensor], limits: Sequence[int]) -> Tensor:
        """``[R, V]`` float32 processed ``logits`` ``[R, V]`` after the root and the drafted ``tokens``, each ``[R]``.

        A row whose chain is at most ``limits[r]`` long is over before some of them; a processor of the user's own is not asked there.
        """
        if not self.needs_history:
            if self.plain:
                return widened(logits)
            with suppress(Exception):  # NaN in a draft's logits, which some processors refuse: looked at row by row below
                return process(self.pipelines, logits[:, None])[:, 0]
        committed = self.committed()
        root = committed.gather(1, to_device(self.lengths, committed.device)[:, None] - 1)[:, 0]
        tree = TokenTree.from_chain(torch.stack([root, *tokens], 1)).truncate(limits)
        return self.scores(logits[:, None], tree, len(tokens))[:, 0]

    def _one_by_one(self, logits: Tensor, tree: TokenTree, first: int, failures: Failures) -> Tensor:
        """:meth:`scores` where a processor has raised: every row alone, and of a row where that fails again every node alone."""
        scores = widened(logits).clone()
        for row in range(tree.rows):
            alone, one = self._alone(row), slice(row, row + 1)
            valid = None if tree.valid is None else tree.valid[one]
            with suppress(Exception):
                own = TokenTree(tree.tokens[one], tree.parents[one], valid, chain=tree.chain)
                scores[row] = alone._processed(logits[one], own, first)[0]
                continue
            failed = set[int]()
            for node in range(first, tree.nodes):
                path = tree.path(row, node)
                if failed.intersection(path) or not (valid is None or valid[0, node]):
                    continue
                try:
                    here = slice(node - first, node - first + 1)
                    scores[one, here] = alone._processed(logits[one, here], TokenTree.from_chain(tree.tokens[one, path]), len(path) - 1)
                except Exception as error:
                    failures[row, node] = error
                    failed.add(node)
        return scores

    def _alone(self, row: int) -> Sampler:
        """For that row only."""
        one = slice(row, row + 1)
        return replace(
            self,
            pipelines=self.pipelines[one],
            sampled=self.sampled[one],
            lengths=self.lengths[one],
            noise=None,
            committed=lambda: self.committed()[one],
            ends=self.ends[one],
        )

    def distribution(self, scores: Tensor) -> Tensor:
        """``scores`` ``[R, V]`` or ``[R, n, V]`` as probabilities; one-hot where the row is greedy."""
        with one_thread(scores):
            p = torch.softmax(scores, -1)
            for row, sampled in enumerate(self.sampled):
                if not sampled:
                    p[row] = torch.zeros_like(p[row]).scatter_(-1, scores[row].argmax(-1, keepdim=True), 1.0)
            return p


def widened(logits: Tensor) -> Tensor:
    """As transformers, processors see float32; float64 stays, for exact enumeration."""
    with one_thread(logits):
        return logits if logits.dtype == torch.float64 else logits.float()


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """``logits`` ``[..., V']`` cut or padded to ``vocab_size``: models of one family pad their vocabularies differently. Tokens that are
    added have probability 0 exactly, unless the processors leave nothing else; with -inf all would be NaN then."""
    if logits.shape[-1] == vocab_size:
        return logits
    if logits.shape[-1] > vocab_size:
        return logits[..., :vocab_size]
    return torch.nn.functional.pad(widened(logits), (0, vocab_size - logits.shape[-1]), value=-1e30)
