"""The whole draft of a draft model as one recording: every level's pass, and the choice of its tokens.

A loop is recorded for a number of rows, a static shape, a span of the cache and a way to choose: the same code that drafts level by level
(:meth:`DraftRequest.choose`, :func:`grow_static`) runs over static inputs. Its first pass reads the last two tokens of every row, the
root and the one before: a draft model whose proposals were all accepted lacks two, any other the root alone, and reading one token twice
costs nothing next to a pass of its own.

Processors that look at histories are run by the host, rows with processors of their own would need indices from it: they, a dynamic
shape, and rows of which the cache lacks more, are drafted level by level.

A chain that has no recording of its own yet, as where a text ends, is cut from a longer one that has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foredraft.backends.base import ForwardPass, differs, tree_window
from foredraft.backends.graphs import Recorded, Recordings
from foredraft.backends.static_pass import StaticPass, upload
from foredraft.device import to_device
from foredraft.drafters.base import DraftRequest
from foredraft.drafters.growth import Growth, grow_from
from foredraft.logits.noise import Noise
from foredraft.logits.sampler import Sampler, fit_vocabulary
from foredraft.shapes import StaticShape, TreeShape
from foredraft.target import Target, Window
from foredraft.tree import TokenTree, chain_layout, static_ancestors, static_depths

SELDOM = 16  # times that a chain is cut from a longer one before it is recorded itself
DEEPEST = 16  # levels of such a longer chain at most
AGREE = 0.9  # of the tokens in a trial; nearly tied scores may be rounded to another order where rows were padded


class LoopFrame:
    """Static inputs of one loop: of each row the last two tokens, the root's slot, its pages and the key of its noise."""

    def __init__(self, target: Target, passes: StaticPass, request: DraftRequest, chain: bool, rows: int, span: int):
        device = request.device
        self.passes, self.chain, self.rows, self.span = passes, chain, rows, span
        self._loaded = rows
        self.vocab_size, self.own_vocabulary = request.vocab_size, target.vocab_size
        self.inputs = torch.zeros(3, rows, dtype=torch.long, device=device)  # the token before the root, the root, its slot
        self.noise = torch.zeros(2, rows, dtype=torch.long, device=device)  # keys and positions
        self.tables = passes.tables(rows, span, device)
        sampler = request.sampler
        static = Sampler(
            pipelines=[sampler.pipelines[0]] * rows,
            sampled=[sampler.sampled[0]] * rows,
            lengths=[1] * rows,
            noise=None if sampler.noise is None else Noise(self.noise[0], self.noise[1]),
            committed=_no_history,
        )
        self.request = replace(request, rows=(), limits=[request.depth] * rows, sampler=static)

    def load(self, request: DraftRequest) -> None:
        self._loaded = len(request.rows)
        filler = self.rows - len(request.rows)
        lines = [[row.ids[-2], row.ids[-1], len(row.ids) - 1] for row in request.rows]
        lines += [[0, 0, self.span - request.shape.nodes - 1]] * filler
        upload(self.inputs, [list(column) for column in zip(*lines)])
        for store, table in self.tables.items():
            upload(table, store.until([len(row.ids) + request.shape.nodes for row in request.rows], *table.shape))
        if isinstance(noise := request.sampler.noise, Noise):
            self.noise[0, : len(request.rows)].copy_(noise.keys)
            self.noise[1, : len(request.rows)].copy_(noise.positions)

    def run(self) -> tuple[Tensor, ...]:
        """The tokens ``[R, N]``, root included, of what :func:`drafted` gives; whether they are possible and their q where it gives
        these; and the draft model's logits ``[R, n, V]`` after every node that it was fed."""
        logits: list[Tensor] = []

        def expand(tree: TokenTree, first: int) -> Tensor:
            logits.append(self._begin() if first == 0 else self._pass(tree, first))
            return logits[-1]

        tree = drafted(self.request, self.chain, self.inputs[1], expand)
        return (tree.tokens, *(each for each in (tree.valid, tree.q) if each is not None), torch.cat(logits, 1))

    def cut(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Of the rows that were loaded."""
        return tuple(each[: self._loaded] for each in outputs)

    def tree(self, outputs: tuple[Tensor, ...], depth: int) -> TokenTree:
        """The tree in what :meth:`run` left behind; of a chain, the first ``depth`` tokens."""
        tokens, *rest = outputs[:-1]
        valid = rest.pop(0) if rest and rest[0].dtype == torch.bool else None
        q = rest.pop(0) if rest else None
        shape, proposal = self.request.shape, self.request.proposal
        assert isinstance(shape, StaticShape)
        if self.chain:
            assert valid is None
            return TokenTree.from_chain(tokens[:, : depth + 1], proposal=proposal, q=None if q is None else q[:, :depth])
        return TokenTree.from_parents(tokens, shape.parents, valid=valid, proposal=proposal, q=q)

    def _begin(self) -> Tensor:
        device = self.inputs.device
        tokens = self._known(self.inputs[:2].t())
        before = self.inputs[2] - 1
        two, zero = chain_layout(2), torch.zeros_like(before)
        depths, ancestors = static_depths(two, device), static_ancestors(two, device)
        return self.passes(tokens, before, zero, depths, ancestors, self.span, self.tables).logits[:, 1:]

    def _pass(self, tree: TokenTree, first: int) -> Tensor:
        tokens, slots = self._known(tree.tokens[:, first:]), self.inputs[2]
        below = torch.full_like(slots, first)
        return self.passes(tokens, slots, below, tree.depths, tree.ancestors[:, first:], self.span, self.tables).logits

    def _known(self, tokens: Tensor) -> Tensor:
        """A token that only the target's padding knows is fed as another."""
        return tokens.clamp(max=self.own_vocabulary - 1) if self.own_vocabulary < self.vocab_size else tokens


def drafted(request: DraftRequest, chain: bool, roots: Tensor, expand: Callable[[TokenTree, int], Tensor]) -> TokenTree:
    """What is drafted below ``roots`` ``[R]``, whatever the rows' limits, as level by level; nothing here looks at a value.

    ``chain`` says that the shape was asked for as a chain: a tree that was cut to one is drawn as a tree is."""
    shape = request.shape
    assert isinstance(shape, StaticShape)
    if not chain:
        return grow_from(TokenTree.root(roots), request, shape, expand)
    path, qs = [roots], []
    for depth in range(request.depth):
        tree = TokenTree.from_chain(torch.stack(path, 1))
        logits = fit_vocabulary(expand(tree, depth)[:, -1], request.vocab_size)
        token, q = request.choose(logits, path[1:])
        path.append(token)
        qs += [] if q is None else [q]
    return TokenTree.from_chain(torch.stack(path, 1), proposal=request.proposal, q=torch.stack(qs, 1) if qs else None)


class RecordedLoop:
    """The recorded drafts of one draft model.

    Attributes:
        drafts: how many were played, trials left out.
    """

    def __init__(self, target: Target):
        self.target = target
        self.drafts = 0
        self._cut: Counter[Hashable] = Counter()  # how often a chain was cut from a longer one

    def draft(self, request: DraftRequest, *, chain: bool) -> Growth | None:
        """As of :class:`~foredraft.drafters.draft_loops.kernels.KernelLoop`."""
        backend = self.target.backend
        if not isinstance(backend, Recorded) or not self._fits(request):
            return None
        recordings = backend.recordings
        self._catch_up(request)
        starts = tuple(len(row.ids) - 1 for row in request.rows)
        window = Window(0, len(starts), starts, request.shape.nodes + 1)
        played, key = self._played(request, chain, recordings)
        if key is None:
            return None
        nodes = played.shape.nodes
        self.target.cache.enter(Window(0, len(starts), tuple(start - 1 for start in starts), nodes + 2))  # with the token before
        _, _, rows, span, *_ = key
        outcome = recordings.play(
            key,
            lambda: LoopFrame(self.target, recordings.passes, played, chain, rows, span),
            lambda frame: frame.load(played),
            rows=rows,
            span=span,
            filler=span - nodes - 2,
        )
        if outcome.outputs is None:
            return None
        tree = outcome.frame.tree(outcome.outputs, request.depth)
        if outcome.trial:
            if (why := self._differs(request, backend, outcome.outputs[-1], tree)) is not None:
                recordings.refuse(why)
                return None
        else:
            self.drafts += 1
        self.target.rewind(starts)
        self.target.cache.enter(window)
        own = torch.arange(tree.nodes).expand(tree.rows, -1) if chain else None
        return Growth(replace(tree, valid=within(tree, request)), self._fed(request), own)

    def _key(self, request: DraftRequest, chain: bool, recordings: Recordings) -> tuple[Any, ...] | None:
        """Of the recording of a draft; None where the cache has no room for it yet."""
        rows = recordings.rows(len(request.rows))
        span = recordings.span(max(len(row.ids) for row in request.rows) + request.shape.nodes)
        return None if span is None else ("loop", chain, rows, span, *self._way(request))

    def _played(self, request: DraftRequest, chain: bool, recordings: Recordings) -> tuple[DraftRequest, tuple[Any, ...] | None]:
        """What is played for a request, and its key: the request itself or, for a chain without a recording, the shortest longer one that
        has one. The time of that says nothing of the request's own."""
        key = self._key(request, chain, recordings)
        if not chain or recordings.has(key) or self._cut[key] >= SELDOM:
            return request, key
        for depth in range(request.depth + 1, DEEPEST + 1):
            longer = replace(request, shape=TreeShape.chain(depth), depth=depth)
            if recordings.has(other := self._key(longer, chain, recordings)):
                self._cut[key] += 1
                recordings.settling += 1
                return longer, other
        return request, key

    def _fits(self, request: DraftRequest) -> bool:
        """Nothing that has to be known is known to the host alone."""
        sampler, shape = request.sampler, request.shape
        pipeline = sampler.pipelines[0]
        return (
            isinstance(shape, StaticShape)
            and shape.depth == request.depth
            and self.target.device == request.device
            and (sampler.noise is None or type(sampler.noise) is Noise)
            and not any(stage.foreign or stage.kind.reads != "nothing" or stage.kind.strict for stage in pipeline.stages)
            and not any(isinstance(stage.key, int) for stage in pipeline.stages)  # of this request alone: nothing recorded would come again
            and all(each == pipeline for each in sampler.pipelines)
            and len(set(sampler.sampled)) == 1
            and all(len(row.ids) > 1 for row in request.rows)
        )

    def _catch_up(self, request: DraftRequest) -> None:
        """Have the cache lack the last two tokens of each row at most."""
        texts, lengths = [row.ids for row in request.rows], self.target.lengths
        if any(len(text) - length > 2 for text, length in zip(texts, lengths)):
            self.target.rewind([min(length, len(text) - 2) for text, length in zip(texts, lengths)])
            self.target.prefill([text[:-1] for text in texts], first=0)

    @staticmethod
    def _way(request: DraftRequest) -> tuple[object, ...]:
        """What a recording depends on besides sizes."""
        sampler, shape = request.sampler, request.shape
        assert isinstance(shape, StaticShape)
        return shape.parents, request.proposal, request.needs_q, request.vocab_size, sampler.sampled[0], sampler.pipelines[0]

    @staticmethod
    def _fed(request: DraftRequest) -> int:
        assert isinstance(request.shape, StaticShape)
        return request.shape.levels[-1].first

    def _differs(self, request: DraftRequest, backend: Recorded, logits: Tensor, tree: TokenTree) -> str | None:
        """Compare the choices with those made of the same ``logits`` now, and the logits with those of eager passes, which leave in the
        cache what the recording would have left there."""
        target, fed = self.target, self._fed(request)
        eager = replace(request, limits=[request.depth] * len(request.rows))
        chosen = drafted(eager, tree.chain, tree.tokens[:, 0], lambda grown, first: logits[:, first : grown.nodes])
        agreed = float((chosen.tokens == tree.tokens).float().mean())
        if agreed < AGREE:
            return f"only {agreed:.0%} of the tokens in a recorded draft are those that its scores say"
        if tree.tokens[:, 0].tolist() != [row.ids[-1] for row in request.rows]:
            return "a recorded draft began at other roots"
        texts = [row.ids[:-1] for row in request.rows]
        target.rewind([min(length, len(text) - 1) for text, length in zip(texts, target.lengths)])
        target.prefill(texts, first=0)
        known = tree.tokens[:, :fed].clamp(max=target.vocab_size - 1)
        if tree.chain:
            seen = TokenTree.from_chain(known)
        else:
            assert isinstance(request.shape, StaticShape)
            seen = TokenTree.from_parents(known, request.shape.parents[:fed])
        given = ForwardPass(seen, tree_window(seen, target.lengths), seen.tokens)
        return differs(target.model, logits, backend.plain(given).logits)


def within(tree: TokenTree, request: DraftRequest) -> Tensor | None:
    """``tree.valid`` with nodes beyond a row's limit as filler, without waiting for the device as :meth:`TokenTree.truncate` does."""
    if min(request.limits) >= request.depth:
        return tree.valid
    allowed = tree.depths <= to_device(request.limits, tree.tokens.device)[:, None]
    return allowed if tree.valid is None else tree.valid & allowed


def _no_history() -> Tensor:
    raise RuntimeError("a recorded draft has no histories")
