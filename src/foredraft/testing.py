"""Test doubles that ship with the package: a target that is a probability table, a drafter that draws from another one,
and exact enumeration of what a rule or the whole loop does with them.

With these, the output distribution of a configuration (its law) is computed, not estimated. :func:`enumerate_law` runs the code that
generates text once for every outcome of every draw, and adds up the probabilities in float64::

    target = TableTarget(ProbabilityTable.random(3, seed=1))
    drafter = ScriptedDrafter(ProbabilityTable.random(3, seed=2), proposal="iid")
    law = continuation_law(
        lambda randomness: Session(target, drafter, Rejection(), proposal="iid", planner=FixedPlanner("chain(2)"), randomness=randomness),
        prompt=[0],
        count=4,
    )
    assert distance(law, plain_law(target.table, [0], 4)) < 1e-9
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.base import Drafter, DrafterInfo, DraftRequest
from foredraft.drafters.growth import grow
from foredraft.logits.noise import Purpose, Randomness, row_key
from foredraft.models.skips import SkipSet
from foredraft.rows import RowParameters, successful
from foredraft.session import Session
from foredraft.tree import Proposal, TokenTree

Context = tuple[int, ...]
Law = dict[Any, float]
Box = dict[Hashable, tuple[float, float]]

RESOLUTION = 1e-13  # an outcome of less probability is taken for a rounding error


class ProbabilityTable:
    """Next-token distributions, one for each context.

    Args:
        table: returns the V probabilities after a context, a tuple of tokens; called once per context.
        vocab_size: V.
        order: a context is the last so many tokens of a text; None for the whole text.
        dtype: of what is looked up.
    """

    def __init__(
        self, table: Callable[[Context], Sequence[float]], vocab_size: int, *, order: int | None = None, dtype: torch.dtype = torch.float64
    ):
        self.table, self.vocab_size, self.order = table, vocab_size, order
        self._index: dict[Context, int] = {}
        self._rows = torch.empty(0, vocab_size, dtype=dtype)  # [contexts seen, V]

    @staticmethod
    def random(vocab_size: int, *, seed: int, order: int | None = 2, spread: float = 1.5) -> ProbabilityTable:
        """Independent random distributions, the softmax of ``spread`` times a Gaussian, that depend on ``seed`` alone."""

        def table(context: Context) -> list[float]:
            key = seed
            for token in (len(context), *context):
                key = row_key((key, token))
            gaussian = torch.randn(vocab_size, generator=torch.Generator().manual_seed(key), dtype=torch.float64)
            return torch.softmax(spread * gaussian, 0).tolist()

        return ProbabilityTable(table, vocab_size, order=order)

    def __call__(self, text: Sequence[int]) -> Tensor:
        """``[V]`` distribution after ``text``."""
        return self.batch([text])[0]

    def batch(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """``[len(texts), V]`` distributions after each text."""
        contexts = [self._context(text) for text in texts]
        new = [context for context in dict.fromkeys(contexts) if context not in self._index]
        if new:
            self._index.update((context, number) for number, context in enumerate(new, len(self._index)))
            self._rows = torch.cat([self._rows, torch.tensor([list(self.table(context)) for context in new], dtype=self._rows.dtype)])
        return self._rows[[self._index[context] for context in contexts]]

    def _context(self, text: Sequence[int]) -> Context:
        return tuple(text if self.order is None else text[max(0, len(text) - self.order) :])


class TableTarget:
    """A target that is a probability table, behind the interface of :class:`foredraft.target.Target`.

    Its methods do what those of ``Target`` do. Its cache is the list of tokens that were prefilled or committed, and the table sees nothing
    else, so a loop that commits the wrong path gets a wrong distribution. A hidden state, whatever its number, is the distribution itself.

    Args:
        table: the distribution after a text.
        context: tokens of the longest text, prompt included; None for no limit.
        early: what its lower layers predict after a text, for ``layer-skip``; several tables are those of its exits, from the first on.
    """

    def __init__(self, table: ProbabilityTable, *, context: int | None = None, early: ProbabilityTable | Sequence[ProbabilityTable] = ()):
        self.table, self.vocab_size, self.context = table, table.vocab_size, context
        self.trained = context
        self.outgrown = False
        self.device = torch.device("cpu")
        self.passes = 0
        self.warm_up = self.settling = 0
        self.single = False
        self.chains_only: str | None = None
        self.ragged = self.sourced = self.counts_sources = False
        self.routing = self.touched = None
        self.owner: object = None
        self.tokenizer: object = None
        self.pools: list[Any] = []
        self.page_bytes: list[int] = []
        self.budget = None
        self.version = 0
        self.cached: list[list[int]] = []
        self._tree: TokenTree | None = None
        self.features: tuple[int, ...] = ()
        self.hidden: Tensor | None = None
        self.prompt_hidden: list[Tensor] | None = None
        self._whole = False
        self.early = [early] if isinstance(early, ProbabilityTable) else list(early)
        self.layers = max(2, len(self.early) + 1)
        self.layer_tokens = [0] * self.layers
        self.kept: dict[int, Tensor] = {}
        self._keeping: tuple[int, ...] = ()

    def read(self, features: Sequence[int], *, whole: bool = False) -> None:
        self.features, self._whole, self.hidden, self.prompt_hidden = tuple(features), whole, None, None

    def follow(self) -> None:
        """A table does not change."""

    def needed(self, text: Sequence[int], isolation: str | None, nodes: int, source: None = None) -> list[int]:
        return []

    def whole(self, tokens: int, source: None = None) -> list[int]:
        return []

    def unread(self, text: Sequence[int], isolation: str | None, source: None = None) -> None:
        return None

    def cost(self, pages: Sequence[int]) -> int:
        return 0

    def make_room(self, pages: Sequence[int]) -> bool:
        return True

    def unlimited(self) -> AbstractContextManager[None]:
        return nullcontext()

    def growth(self, nodes: int, *, without: Sequence[int] = ()) -> list[int]:
        return []

    def some_sources(self, rows: int) -> list[None]:
        return [None] * rows

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.cached]

    def open(self, texts: Sequence[Sequence[int]], **others: object) -> None:
        self.cached += [[] for _ in texts]

    def prefill(self, prompts: Sequence[Sequence[int]], *, first: int, given: Sequence[int] = ()) -> Tensor:
        """``[len(prompts), V]`` log probabilities after each prompt."""
        self.passes += 1
        for row, prompt in enumerate(prompts, first):
            self.cached[row] = list(prompt)
        if self.features:
            ends = [range(1 if self._whole else len(prompt), len(prompt) + 1) for prompt in prompts]
            known = [self.table.batch([prompt[:end] for end in each]) for prompt, each in zip(prompts, ends)]
            self.prompt_hidden = [each.repeat(1, len(self.features)) for each in known]
        return self.table.batch(prompts).log()

    def score(self, tree: TokenTree, *, first: int = 0) -> Tensor:
        """``[R, N - first, V]`` log probabilities at the nodes from ``first`` on; filler is certain of token 0."""
        self.passes += 1
        self._tree = tree
        scores = read(self.table, self.cached, tree)[:, first:]
        self.hidden = scores.exp().repeat(1, 1, len(self.features)) if self.features else None
        self.kept = {layer: read(self.early[layer - 1], self.cached, tree) for layer in self._keeping}
        return scores

    def decode(self, tree: TokenTree, ids: Sequence[int], **how: Any) -> tuple[list[int], Tensor]:
        """One pass."""
        return [], self.score(tree)

    def score_early(self, tree: TokenTree, exit: int | SkipSet, *, first: int = 0, head: object = None) -> Tensor:
        """As :meth:`score`, by the table of the layers below ``exit``, or of what is left of them, which is the first table."""
        assert self.early, "this target has no early exit"
        return read(self.early[exit - 1 if isinstance(exit, int) else 0], self.cached, tree)[:, first:]

    def keep(self, layers: Sequence[int]) -> None:
        self._keeping = tuple(layers)

    def read_out(self, states: Tensor) -> Tensor:
        """What is kept of a layer are its log probabilities."""
        return states

    def rearrange_early(self, order: Tensor) -> None:
        """Nothing: what was read is looked up."""

    def commit(self, path: Tensor | None, kept: Sequence[int]) -> None:
        assert self._tree is not None, "commit comes after score"
        tokens = self._tree.tokens if path is None else self._tree.tokens.gather(1, path)
        for row, (line, count) in enumerate(zip(tokens.tolist(), kept)):
            self.cached[row] += line[:count]

    def wipe(self, rows: Sequence[int]) -> None:
        """Nothing: no row reads what another holds."""

    def compact(self, keep: Sequence[int]) -> None:
        self.cached = [self.cached[row] for row in keep]

    def rewind(self, lengths: Sequence[int]) -> None:
        self.cached = [row[:length] for row, length in zip(self.cached, lengths)]

    def reset(self) -> None:
        self.cached = []

    release = reset


class ScriptedDrafter(Drafter):
    """A drafter whose chains and trees follow a probability table.

    Args:
        q: the draft's distribution after a text.
        proposal: ``iid`` draws from q; ``without-replacement`` does too, but all siblings differ; ``keyed`` draws from q with the target's
            noise; ``deterministic`` takes the most likely tokens.
        depth: most tokens per draft; None for as many as the shape has.
        grow: called in a chain with the text so far, committed and drafted; False drafts no further token.
    """

    name = "scripted"
    summary = "follows a probability table; for tests"
    info = DrafterInfo(branches=True)

    def __init__(
        self,
        q: ProbabilityTable,
        *,
        proposal: Proposal = "iid",
        depth: int | None = None,
        grow: Callable[[Sequence[int]], bool] = lambda text: True,
    ):
        self.q, self.depth, self.grow = q, depth, grow
        self.info = replace(self.info, proposals=(proposal,))

    def draft(self, request: DraftRequest) -> TokenTree:
        if not request.shape.is_chain:
            return grow(request, lambda tree, first: read(self.q, [row.ids[:-1] for row in request.rows], tree)[:, first:]).tree
        texts = [list(row.ids) for row in request.rows]
        limits = [limit if self.depth is None else min(limit, self.depth) for limit in request.limits]
        lengths = [0] * len(texts)
        drafted: list[Tensor] = []
        qs: list[Tensor] = []
        while growing := [row for row, limit in enumerate(limits) if lengths[row] == len(drafted) < limit and self.grow(texts[row])]:
            filler = torch.ones(len(texts), dtype=torch.bool).index_fill_(0, torch.tensor(growing), False)
            tokens, q = request.choose(certain(self.q.batch(texts).log(), filler), drafted)
            drafted.append(tokens)
            if q is not None:
                qs.append(q)
            for row in growing:
                texts[row].append(int(tokens[row]))
                lengths[row] += 1
        return TokenTree.from_chain(
            torch.stack([request.roots(), *drafted], 1),
            valid=request.depth_mask(lengths, len(drafted)),
            proposal=request.proposal,
            q=torch.stack(qs, 1) if qs else None,
        )


def read(table: ProbabilityTable, prefixes: Sequence[Sequence[int]], tree: TokenTree) -> Tensor:
    """``[R, N, V]`` log probabilities at every node of ``tree`` behind ``prefixes``."""
    texts: list[list[int]] = []
    for prefix, tokens, parents in zip(prefixes, tree.tokens.tolist(), tree.parents.tolist()):
        first = len(texts)
        for token, parent in zip(tokens, parents):
            texts.append([*(prefix if parent < 0 else texts[first + parent]), token])
    scores = table.batch(texts).log().view(tree.rows, tree.nodes, -1)
    return scores if tree.valid is None else certain(scores, ~tree.valid)


def certain(scores: Tensor, where: Tensor) -> Tensor:
    """``scores`` ``[..., V]``, with all probability on token 0 ``where`` ``[...]`` is True. No verdict depends on filler, so enumeration
    need not branch there."""
    only = torch.full_like(scores[..., :1, :], float("-inf"))
    only[..., 0] = 0.0
    return torch.where(where[..., None], only, scores)


# -- enumeration ----------------------------------------------------------------------------------------------------------


class World:
    """One outcome of every draw.

    Every key of the noise stands for one uniform number. A world is a box: for each key, the interval that the outcomes so far imply.
    So draws under different keys are independent, and draws that share a key depend on each other as they do in real decoding.
    """

    def __init__(self, box: Box):
        self.box = dict(box)
        self.untried: list[Box] = []  # with this world, they make up the box that it began with

    @property
    def probability(self) -> float:
        return math.prod(high - low for low, high in self.box.values())

    def choose(self, key: Hashable, weights: Sequence[float]) -> int:
        """The outcome of the uniform under ``key``, where ``weights`` divide the unit interval.

        Where the box leaves several open, it shrinks to the first, and the others remain to be tried.
        """
        low, high = self.box.get(key, (0.0, 1.0))
        edges = [0.0, *accumulate(weights)]
        whole, parts = edges[-1], []
        for begin, end in pairwise(edges):
            begin, end = begin / whole, end / whole
            parts.append((begin if begin > low else low, end if end < high else high))
        widths = [end - begin for begin, end in parts]
        first, *others = [outcome for outcome, width in enumerate(widths) if width > RESOLUTION] or [widths.index(max(widths))]
        self.untried += [{**self.box, key: parts[outcome]} for outcome in others]
        self.box[key] = parts[first]
        return first


class Enumeration:
    """A batch of worlds, and the ``randomness`` of a session whose rows live in them.

    Attributes:
        worlds: the worlds.
        seeds: one per row, world by world; a row with seed ``(w, i)`` is row ``i`` of world ``w``.
    """

    def __init__(self, worlds: Sequence[World], rows: int = 1):
        self.worlds = list(worlds)
        self.seeds = [(world, row) for world in range(len(worlds)) for row in range(rows)]
        self._homes = {row_key((world, row)): (self.worlds[world], row) for world, row in self.seeds}

    def __call__(self, keys: Tensor, positions: Tensor) -> EnumeratedNoise:
        return EnumeratedNoise([(*self._homes[key], position) for key, position in zip(keys.tolist(), positions.tolist())])

    def noise(self, position: int = 0) -> EnumeratedNoise:
        """Noise for one round of all rows, with the root at ``position``."""
        return EnumeratedNoise([(self.worlds[world], row, position) for world, row in self.seeds])


class EnumeratedNoise:
    """The draws of :class:`foredraft.logits.noise.Noise`, under the same keys, with enumerated outcomes.

    Here ``race`` inverts the cumulative distribution where the real one takes the argmin of E / p. Both are functions of
    p and of noise keyed by position whose law is p, which is all that the match rule asks for.

    Args:
        rows: world, row in that world and position of the root, for each row of the round.
    """

    def __init__(self, rows: Sequence[tuple[World, int, int]]):
        self.rows = rows

    def race(self, p: Tensor, depths: Tensor) -> Tensor:
        below = depths.expand(p.shape[:2]).tolist()
        return torch.tensor(
            [
                [world.choose((row, root + depth + 1, Purpose.MATCH, 0), weights) for depth, weights in zip(*each)]
                for (world, row, root), *each in zip(self.rows, below, p.tolist())
            ]
        )

    def draw(self, weights: Tensor, purpose: Purpose, node: int = 0) -> Tensor:
        lines = zip(self.rows, weights.tolist())
        return torch.tensor([world.choose((row, root, purpose, node), line) for (world, row, root), line in lines])

    def rank(self, weights: Tensor, k: int, purpose: Purpose, nodes: Tensor) -> Tensor:
        return torch.tensor(
            [
                [self._in_order(world, (row, root, purpose, node), line, k) for node, line in zip(nodes.tolist(), lines)]
                for (world, row, root), lines in zip(self.rows, weights.tolist())
            ]
        )

    @staticmethod
    def _in_order(world: World, key: tuple[Hashable, ...], weights: Sequence[float], k: int) -> list[int]:
        """k draws one after the other from what is left; when nothing is, whatever comes first."""
        left = list(weights)
        order: list[int] = []
        while len(order) < k:
            token = world.choose((*key, len(order)) if order else key, left) if any(left) else -1
            if token < 0:
                token = next(each for each in range(len(left)) if each not in order)
            order.append(token)
            left[token] = 0.0
        return order

    def race_order(self, p: Tensor, depths: Tensor, k: int) -> Tensor:
        """The winner of :meth:`race`, then the likeliest: any function of p and of the same noise will do."""
        winner = self.race(p, depths)
        return p.scatter(2, winner[..., None], 2.0).topk(k, -1).indices

    def accept(self, probability: Tensor, node: int | Tensor = 0) -> Tensor:
        first = node.tolist() if isinstance(node, Tensor) else [node] * len(self.rows)
        return torch.tensor(
            [
                [world.choose((row, root, Purpose.ACCEPT, each), [value, 1 - value]) == 0 for each, value in enumerate(line, start)]
                for (world, row, root), line, start in zip(self.rows, probability.clamp(0, 1).tolist(), first)
            ]
        )


def enumerate_law(run: Callable[[Enumeration], Sequence[Hashable]], *, rows: int = 1, batch: int = 4096) -> Law:
    """The exact distribution of an outcome, over all outcomes of all draws.

    Args:
        run: runs the code under test in a batch of worlds, ``rows`` rows in each, and returns one outcome per world.
            The outcome in a world must be a function of the world's noise. It may also read noise that the outcome does not depend on,
            such as that of filler.
        rows: rows per world; more than one for the joint distribution of several rows.
        batch: worlds at once.

    Returns:
        The probability of every outcome; they add up to 1.

    Raises:
        ValueError: ``run`` returned another number of outcomes than there are worlds.
    """
    law: Law = defaultdict(float)
    boxes: list[Box] = [{}]
    while boxes:
        enumeration = Enumeration([World(box) for box in boxes[-batch:]], rows)
        del boxes[-batch:]
        outcomes = run(enumeration)
        if len(outcomes) != len(enumeration.worlds):
            raise ValueError(f"run returned {len(outcomes)} outcomes for {len(enumeration.worlds)} worlds")
        for outcome, world in zip(outcomes, enumeration.worlds):
            law[outcome] += world.probability
            boxes += world.untried
    return dict(law)


def continuations(session: Session, prompts: Sequence[Sequence[int]], parameters: Sequence[RowParameters]) -> list[Context]:
    """Add a row for each prompt, step until all are finished, and return what each gained."""
    texts: dict[int, list[int]] = {session.add(prompt, each): [] for prompt, each in zip(prompts, parameters)}
    while session.live:
        for commit in successful(session.step()):
            texts[commit.slot] += commit.tokens
    return [tuple(text) for text in texts.values()]


def continuation_law(make_session: Callable[[Callable[[Tensor, Tensor], Randomness]], Session], prompt: Sequence[int], count: int) -> Law:
    """The exact distribution of ``count`` sampled tokens after ``prompt``, from sessions that ``make_session`` makes for a randomness."""

    def run(enumeration: Enumeration) -> list[Context]:
        parameters = [RowParameters(max_new_tokens=count, do_sample=True, seed=seed) for seed in enumeration.seeds]
        return continuations(make_session(enumeration), [prompt] * len(parameters), parameters)

    return enumerate_law(run)


def plain_law(table: ProbabilityTable, prompt: Sequence[int], count: int) -> Law:
    """The exact distribution of ``count`` tokens of plain sampling after ``prompt``."""
    law: Law = {(): 1.0}
    for _ in range(count):
        law = {
            (*text, token): weight * probability
            for text, weight in law.items()
            for token, probability in enumerate(table([*prompt, *text]).tolist())
            if probability > 0
        }
    return law


def distance(a: Law, b: Law) -> float:
    """Total variation distance of two laws."""
    return sum(abs(a.get(outcome, 0.0) - b.get(outcome, 0.0)) for outcome in a.keys() | b.keys()) / 2
