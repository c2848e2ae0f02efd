"""Token trees from lists on the host, for drafters that look continuations up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foredraft.drafters.base import DrafterInfo, DraftRequest
from foredraft.tree import TokenTree

# What drafters that look continuations up declare. A copy's second guesses bring less than a tree's pass costs in a batch.
LOOKS_UP = DrafterInfo(branches=True, auto_branches=False, learns_from_feedback=False)


@dataclass
class Trie:
    """Continuations of one row: node 0 is the row's last committed token, every other node hangs below an earlier one.

    Attributes:
        tokens: of all nodes but the root.
        parents: of the same nodes; 0 is the root, i the node of ``tokens[i - 1]``.
        depths: of all nodes, the root's 0 first.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=lambda: [0])

    def add(self, parent: int, token: int) -> int:
        """A node below ``parent``; returns its number. A sibling must not say the same token."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        return len(self.tokens)


def tree_of(request: DraftRequest, tries: Sequence[Trie]) -> TokenTree:
    """The token tree of ``tries``, one per row of ``request``; what is deeper than a row's limit is left out. Deterministic.

    Where all rows have chains, in a request for one or not, the tree is a chain.
    """
    rows = [_within(trie, limit) for trie, limit in zip(tries, request.limits)]
    if all(parents == list(range(len(parents))) for _, parents in rows):
        return request.chains([tokens for tokens, _ in rows])
    nodes = max(len(tokens) for tokens, _ in rows)
    padded = [[row.ids[-1], *tokens] + [0] * (nodes - len(tokens)) for row, (tokens, _) in zip(request.rows, rows)]
    parents = [[-1, *above] + [0] * (nodes - len(above)) for _, above in rows]
    valid = [[True] * (1 + len(tokens)) + [False] * (nodes - len(tokens)) for tokens, _ in rows]
    return TokenTree.from_lists(padded, parents, valid, device=request.device)


def _within(trie: Trie, limit: int) -> tuple[list[int], list[int]]:
    """``tokens`` and ``parents`` of the nodes at most ``limit`` deep."""
    if max(trie.depths) <= limit:
        return trie.tokens, trie.parents
    number: dict[int, int] = {0: 0}
    tokens: list[int] = []
    parents: list[int] = []
    for node, (token, parent) in enumerate(zip(trie.tokens, trie.parents), 1):
        if trie.depths[node] <= limit:
            number[node] = len(tokens) + 1
            tokens.append(token)
            parents.append(number[parent])
    return tokens, parents
