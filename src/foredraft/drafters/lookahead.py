"""Lookahead decoding: the target drafts for itself, in passes that it makes anyway (Fu et al. 2024).

Beside the root and what is proposed, every pass scores a window of guesses of the W places to come. What the target would say there, were
the guesses right, makes the guesses of the next round (a Jacobi iteration), and what was guessed for one place in N - 1 rounds makes an
n-gram. N-grams go into a pool; those that begin with the last committed token are proposed.

The window of a row has W columns of N - 1 tokens. Column i begins at place i behind the root (column 0 with the root itself) and goes on
with one token for each of its iterations, so that its token of level l stands at place i + l. The tokens of level 0 are a chain below
the root, and the others of a column hang below its first one: each sees the text, level 0 up to its column, and its own column, which is
what Figure 2(b) of the paper lets it see. That is a tree, and a node's depth is its place, so that the window needs no mask of its own: it
is the ``extra`` part of the token tree. After a pass the argmax at the end of a column is the token at place i + N - 1; with the column it
makes an n-gram, and the column's first token is dropped, which moves the window on by one place.

Where a round keeps more than one token the window is behind the text by the others. ``shift`` says what happens then: "align" takes as
many columns from its front, whose places are past, and puts fresh ones of random prompt tokens behind; "stay" takes the guesses to be
for the places one further than they were made for, as the authors' code does by default.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foredraft.drafters.base import Drafter, DrafterInfo, DraftRequest, Feedback, Row
from foredraft.drafters.tries import Trie, tree_of
from foredraft.errors import ConfigurationError, whole
from foredraft.logits.sampler import widened
from foredraft.shapes import TreeShape
from foredraft.target import Target
from foredraft.tree import TokenTree

SIZES = {"cpu": (5, 4, 5), "cuda": (15, 5, 15)}  # W, N and G by default: where nodes cost what they weigh, and the paper's for a GPU
SHIFTS = ("align", "stay")


class Lookahead(Drafter):
    """Options:

    window: W, the columns of the window; by default 5 on a CPU and 15 on a GPU.
    ngram: N, tokens of an n-gram; N - 1 at most are proposed. 4 and 5.
    guesses: G, n-grams kept for a first token, the oldest leave first, and proposed at once, as far as the shape has room. 5 and 15.
    text: the committed text, prompt first, goes into the pool as well.
    shift: what happens to the window where a round keeps several tokens, "align" or "stay".
    seed: of the random prompt tokens that a window begins with.

    The shape and its limits are about what is proposed. The window is (W - 1) + W (N - 2) nodes more in every pass of which something
    was asked for, proposed or not; in rounds without a draft it stands still. It ends where the row does.
    """

    name = "lookahead"
    summary = "n-grams from a Jacobi window that the target scores beside the draft"
    info = DrafterInfo(branches=True, needs_logits=True)

    def __init__(
        self,
        *,
        window: int | None = None,
        ngram: int | None = None,
        guesses: int | None = None,
        text: bool = True,
        shift: str = "stay",
        seed: int = 0,
    ):
        for name, value, least in (("window", window, 1), ("ngram", ngram, 2), ("guesses", guesses, 1)):
            if value is not None:
                whole(f"lookahead's {name}", value, least=least)
        if shift not in SHIFTS:
            raise ConfigurationError(f"lookahead's shift is one of {', '.join(SHIFTS)}, got {shift!r}")
        self._given = window, ngram, guesses
        self.window, self.ngram, self.guesses = (a if a is not None else b for a, b in zip(self._given, SIZES["cpu"]))
        self.text, self.shift, self.seed = text, shift, seed
        self.chains_only = False
        self._context: int | None = None
        self._rows: dict[int, RowState] = {}
        self._places: list[list[int]] = []  # of each row of the last tree, the nodes at the ends of its columns
        self._nodes = 0  # of that tree

    def bind(self, target: Target) -> None:
        usual = SIZES.get(target.device.type, SIZES["cuda"])
        self.window, self.ngram, self.guesses = (a if a is not None else b for a, b in zip(self._given, usual))
        self.chains_only, self._context = target.chains_only is not None, target.trained
        extra = 0 if self.chains_only else (self.window - 1) + self.window * (self.ngram - 2)
        self.info = replace(self.info, extra_nodes=extra)
        if self.chains_only and not self.text:
            raise ConfigurationError(
                f"the target can only verify chains ({target.chains_only}), so lookahead has no window, and with text=False "
                "no n-grams; use text=True or another drafter"
            )

    def makes_chains(self, shape: TreeShape) -> bool:
        return shape.is_chain and self.chains_only

    def begin(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._rows[row.slot] = RowState(Pool(self.ngram, self.guesses), random.Random(self.seed))
            if self.text:
                self._rows[row.slot].pool.read(row.ids)

    def draft(self, request: DraftRequest) -> TokenTree:
        tries, windows = [], []
        guesses = 1 if request.shape.is_chain else self.guesses
        for row, limit in zip(request.rows, request.limits):
            state = self._rows[row.slot]
            if self.text:
                state.pool.read(row.ids)
            tries.append(state.pool.trie(row.ids[-1], guesses, min(limit, self.ngram - 1), request.shape.nodes))
            windows.append(self._window(row, limit, 1 + request.shape.nodes))
        self._places, self._nodes = [], 0
        if not any(ends for _, ends in windows):
            return tree_of(request, tries)
        tree = tree_of(request, tries, [window for window, _ in windows])
        proposed = tree.nodes - tree.extra - 1
        self._places = [[node + proposed if node else 0 for node in ends] for _, ends in windows]
        self._nodes = tree.nodes
        return tree

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        if self._places and feedback.logits is not None and feedback.logits.shape[1] == feedback.tree.nodes == self._nodes:
            for row, said in zip(rows, choices_at(feedback.logits, self._places)):
                if said:
                    self._rows[row.slot].advance(said)
        self._places, self._nodes = [], 0

    def end(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._rows.pop(row.slot, None)

    def reset(self) -> None:
        self._rows.clear()
        self._places, self._nodes = [], 0

    def _window(self, row: Row, limit: int, nodes: int) -> tuple[Trie, list[int]]:
        """The row's window as nodes below the root, and the nodes at the ends of its columns; none where nothing was asked for, in a row
        that is about to end, or where ``nodes`` that are proposed leave no room in the model's context."""
        room = row.capacity - len(row.ids) - (self.ngram - 2)  # of column 0, the last place that its end may stand at
        if limit < 1 or room < 0 or self.chains_only or (self._context is not None and nodes + self.info.extra_nodes > self._context):
            return Trie(), []
        state = self._rows[row.slot]
        state.move(row.ids, row.prompt_length, min(self.window, 1 + room), self.ngram - 1, aligned=self.shift == "align")
        return state.nodes()


class Pool:
    """N-grams by their first token; ``guesses`` of each, the most recent last."""

    def __init__(self, ngram: int, guesses: int):
        self.ngram, self.guesses = ngram, guesses
        self.grams: dict[int, dict[tuple[int, ...], None]] = {}
        self._read = 0  # n-grams of the text that begin before this place are in

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        """One n-gram, which becomes the most recent one."""
        held = self.grams.setdefault(first, {})
        held.pop(rest, None)
        held[rest] = None
        if len(held) > self.guesses:
            del held[next(iter(held))]

    def read(self, ids: Sequence[int]) -> None:
        """Every n-gram of a text that has grown since the last time."""
        end = max(self._read, len(ids) - self.ngram + 1)
        for place in range(self._read, end):
            self.add(ids[place], tuple(ids[place + 1 : place + self.ngram]))
        self._read = end

    def trie(self, first: int, guesses: int, depth: int, nodes: int) -> Trie:
        """What followed ``first``, shared beginnings once: the ``guesses`` most recent n-grams, the latest first, as far as ``nodes``
        nodes and ``depth`` levels go."""
        trie, known = Trie(), dict[tuple[int, int], int]()
        for rest in list(reversed(self.grams.get(first, ())))[:guesses]:
            node = 0
            for token in rest[:depth]:
                below = known.get((node, token))
                if below is None:
                    if len(trie.tokens) >= nodes:
                        return trie
                    below = known[node, token] = trie.add(node, token)
                node = below
        return trie


@dataclass
class RowState:
    """A row's pool and its window.

    Attributes:
        columns: N - 1 tokens each, that of level 0 first; column 0's is not looked at, the root stands there.
        ages: iterations that each column has gone through.
        base: the length of the text that column 0 begins at the end of.
    """

    pool: Pool
    random: random.Random
    columns: list[list[int]] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    base: int = 0
    root: int = -1

    def move(self, ids: Sequence[int], prompt_length: int, width: int, levels: int, *, aligned: bool) -> None:
        """To the end of the text ``ids``, with ``width`` columns of ``levels`` tokens."""
        if aligned:
            past = len(ids) - self.base
            del self.columns[:past], self.ages[:past]
        while len(self.columns) < width:
            self.columns.append([ids[self.random.randrange(prompt_length)] for _ in range(levels)])
            self.ages.append(0)
        del self.columns[width:], self.ages[width:]
        self.base, self.root = len(ids), ids[-1]

    def nodes(self) -> tuple[Trie, list[int]]:
        """The window below the root, and for each column the node at its end."""
        trie, starts = Trie(), [0]
        for column in self.columns[1:]:
            starts.append(trie.add(starts[-1], column[0]))
        ends = []
        for node, column in zip(starts, self.columns):
            for token in column[1:]:
                node = trie.add(node, token)
            ends.append(node)
        return trie, ends

    def advance(self, said: Sequence[int]) -> None:
        """The target said ``said[i]`` at the end of column i. Columns of which no token but the first is random make an n-gram."""
        for index, token in enumerate(said):
            column = self.columns[index]
            if self.ages[index] >= len(column) - 1:
                self.pool.add(column[0] if index else self.root, (*column[1:], token))
            self.columns[index] = [*column[1:], token]
            self.ages[index] += 1
        self.base += 1


def choices_at(logits: Tensor, places: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each row the argmax of its ``logits`` ``[R, N, V]`` at the nodes ``places[r]``; one wait for a device."""
    flat = [row * logits.shape[1] + node for row, nodes in enumerate(places) for node in nodes]
    lines = logits.flatten(0, 1)
    if logits.device.type == "cpu":  # there NumPy is several times as fast, and nothing is copied together
        found = [int(widened(lines[node]).numpy().argmax()) for node in flat]
    else:
        found = lines[torch.tensor(flat, device=logits.device)].argmax(-1).tolist()
    said, first = [], 0
    for nodes in places:
        said.append(found[first : first + len(nodes)])
        first += len(nodes)
    return said
