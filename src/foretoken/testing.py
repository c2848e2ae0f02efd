"""Test doubles that ship with the package: a target that is a probability table, a drafter that follows a script, and
exact enumeration of what a rule or the whole loop would do.

With them the law of a configuration is *computed*, not estimated: :func:`enumerate_law` runs the same code as
generation, once for every outcome of every draw, and adds up probabilities in float64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from foretoken.drafters.base import Drafter, DraftRequest
from foretoken.sampling import Purpose
from foretoken.tree import Proposal, TokenTree

Context = tuple[int, ...]
Law = dict[Context, float]


class Table(Protocol):
    """The next-token distribution after a context, a list of V probabilities."""

    def __call__(self, context: Context) -> Sequence[float]: ...


class TableTarget:
    """A target that is a probability table, behind the interface of :class:`foretoken.target.Target`.

    Args:
        table: gives the distribution after a context: the last ``order`` tokens.
        vocab_size: V.
        order: how much of the text the table sees; None for all of it.
        context: longest text, prompt included, or None.
    """

    def __init__(self, table: Table, vocab_size: int, *, order: int | None = None, context: int | None = None):
        self.table, self.vocab_size, self.order, self.context = table, vocab_size, order, context
        self.device = torch.device("cpu")
        self.passes = 0
        self.cached: list[list[int]] = []
        self._tree: TokenTree | None = None

    @staticmethod
    def random(vocab_size: int, *, seed: int, order: int | None = 2, spread: float = 1.5) -> TableTarget:
        """A table of independent random distributions, one for each context, from ``seed``."""
        memory: dict[Context, list[float]] = {}

        def table(context: Context) -> list[float]:
            if context not in memory:
                generator = torch.Generator().manual_seed(hash((seed, *context)) % 2**63)
                memory[context] = torch.softmax(spread * torch.randn(vocab_size, generator=generator, dtype=torch.float64), 0).tolist()
            return memory[context]

        return TableTarget(table, vocab_size, order=order)

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.cached]

    def p(self, text: Sequence[int]) -> Tensor:
        """``[V]`` float64 distribution after ``text``."""
        context = tuple(text if self.order is None else text[len(text) - min(self.order, len(text)) :])
        return torch.tensor(self.table(context), dtype=torch.float64)

    def open(self, texts: Sequence[Sequence[int]], *, reserve: Sequence[int] = ()) -> None:
        self.cached += [[] for _ in texts]

    def prefill(self, prompts: Sequence[Sequence[int]], *, first: int) -> Tensor:
        self.passes += 1
        for row, prompt in enumerate(prompts, first):
            self.cached[row] = list(prompt)
        return torch.stack([self.p(prompt) for prompt in prompts]).log()

    def score(self, tree: TokenTree) -> Tensor:
        """``[R, N, V]`` float64 log probabilities at every node."""
        self.passes += 1
        self._tree = tree
        return torch.stack([torch.stack([self.p(self._text(row, node)) for node in range(tree.nodes)]) for row in range(tree.rows)]).log()

    def commit(self, path: Tensor | None, kept: Sequence[int]) -> None:
        assert self._tree is not None
        tokens = self._tree.tokens if path is None else self._tree.tokens.gather(1, path)
        for row, count in enumerate(kept):
            self.cached[row] += tokens[row, :count].tolist()

    def compact(self, keep: Sequence[int]) -> None:
        self.cached = [self.cached[row] for row in keep]

    def rewind(self, lengths: Sequence[int]) -> None:
        self.cached = [row[:length] for row, length in zip(self.cached, lengths)]

    def reset(self) -> None:
        self.cached = []

    release = reset

    def _text(self, row: int, node: int) -> list[int]:
        assert self._tree is not None
        tokens = self._tree.tokens[row].tolist()
        return self.cached[row] + [tokens[each] for each in self._tree.path(row, node)]


class ScriptedDrafter(Drafter):
    """A drafter whose proposals follow a script.

    Args:
        q: the draft's distribution after a text, ``[V]``; tokens are chosen from it as ``proposal`` says.
        proposal: ``iid`` draws from q, ``keyed`` with the target's noise, ``deterministic`` takes the most likely token.
        depth: tokens per draft, or a function of the text that says so for each row.
    """

    name = "scripted"
    summary = "follows a script; for tests"

    def __init__(
        self, q: Callable[[Sequence[int]], Tensor], *, proposal: Proposal = "iid", depth: int | Callable[[Sequence[int]], int] | None = None
    ):
        self.q, self.depth = q, depth
        self.proposals = (proposal,)

    def draft(self, request: DraftRequest) -> TokenTree:
        wanted = [self._depth(row.ids, limit) for row, limit in zip(request.rows, request.limits)]
        depth = max(wanted)
        drafted: list[Tensor] = []
        qs: list[Tensor] = []
        for _ in range(depth):
            texts = [[*row.ids, *(int(token[index]) for token in drafted)] for index, row in enumerate(request.rows)]
            token, q = request.choose(torch.stack([self.q(text) for text in texts]).log(), drafted)
            drafted.append(token)
            if q is not None:
                qs.append(q)
        tokens = torch.stack([request.roots(), *drafted], 1)
        return TokenTree.from_chain(
            tokens, valid=request.within(wanted, depth), proposal=request.proposal, q=torch.stack(qs, 1) if qs else None
        )

    def _depth(self, text: Sequence[int], limit: int) -> int:
        wanted = limit if self.depth is None else self.depth(text) if callable(self.depth) else self.depth
        return min(wanted, limit)


class Branches:
    """Draws whose outcomes are enumerated: every call of :meth:`choose` takes the next branch of a depth-first search."""

    def __init__(self) -> None:
        self._script: list[tuple[int, list[float]]] = []
        self._at = 0
        self.probability = 1.0

    def choose(self, weights: Sequence[float]) -> int:
        """An index with positive weight; :meth:`runs` comes back for the others."""
        total = sum(weights)
        if self._at == len(self._script):
            first = next(index for index, weight in enumerate(weights) if weight > 0)
            self._script.append((first, list(weights)))
        chosen = self._script[self._at][0]
        self._at += 1
        self.probability *= weights[chosen] / total
        return chosen

    def advance(self) -> bool:
        """Move on to the next untried combination; False when there is none."""
        self._at, self.probability = 0, 1.0
        while self._script:
            chosen, weights = self._script.pop()
            following = [index for index in range(chosen + 1, len(weights)) if weights[index] > 0]
            if following:
                self._script.append((following[0], weights))
                return True
        return False


class EnumeratedNoise:
    """The interface of :class:`foretoken.sampling.Noise` for one row, every draw a branch.

    ``race`` remembers what it drew at a position, so that a keyed draft and the verifier see the same noise only through
    :meth:`keyed`; independent draws are independent branches.
    """

    def __init__(self, branches: Branches):
        self.branches = branches

    def race(self, p: Tensor, depths: Tensor) -> Tensor:
        return torch.tensor([[self.branches.choose(node.tolist()) for node in row] for row in p])

    def draw(self, weights: Tensor, purpose: Purpose, node: int = 0) -> Tensor:
        return torch.tensor([self.branches.choose(row.tolist()) for row in weights])

    def accept(self, probability: Tensor, node: int = 0) -> Tensor:
        capped = probability.clamp(0, 1)
        return torch.tensor([[self.branches.choose([1 - value, value]) == 1 for value in row] for row in capped.tolist()])


def enumerate_law(run: Callable[[EnumeratedNoise], Any]) -> Law:
    """The law of ``run(noise)``, whose result is hashable or a sequence of ints, over all outcomes of all draws."""
    law: dict[Any, float] = defaultdict(float)
    branches = Branches()
    while True:
        outcome = run(EnumeratedNoise(branches))
        law[tuple(outcome) if isinstance(outcome, (list, tuple)) else outcome] += branches.probability
        if not branches.advance():
            return dict(law)


def plain_law(target: TableTarget, prompt: Sequence[int], count: int) -> Law:
    """The law of ``count`` tokens of plain sampling after ``prompt``."""
    law: Law = {(): 1.0}
    for _ in range(count):
        law = {
            (*text, token): weight * probability
            for text, weight in law.items()
            for token, probability in enumerate(target.p([*prompt, *text]).tolist())
            if probability > 0
        }
    return law


def distance(a: Law, b: Law) -> float:
    """Largest difference between two laws at any outcome."""
    return max(abs(a.get(outcome, 0.0) - b.get(outcome, 0.0)) for outcome in a.keys() | b.keys())
