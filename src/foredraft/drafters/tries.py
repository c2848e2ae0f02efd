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


def tree_of(request: DraftRequest, tries: Sequence[Trie], windows: Sequence[Trie] = ()) -> TokenTree:
    """The token tree of ``tries``, one per row of ``request`` and no deeper than its limit, with ``windows`` as extra nodes behind.
    Deterministic.

    Where all rows have chains, in a request for one or not, and nothing is behind, the tree is a chain.
    """
    if not windows and all(trie.parents == list(range(len(trie.parents))) for trie in tries):
        return request.chains([trie.tokens for trie in tries])
    windows = windows or [Trie()] * len(tries)
    proposed, extra = (max(len(each.tokens) for each in group) for group in (tries, windows))
    tokens, parents, valid = [], [], []
    for row, trie, window in zip(request.rows, tries, windows):
        missing, spare = proposed - len(trie.tokens), extra - len(window.tokens)
        tokens.append([row.ids[-1], *trie.tokens, *[0] * missing, *window.tokens, *[0] * spare])
        below = [parent + proposed if parent else 0 for parent in window.parents]
        parents.append([-1, *trie.parents, *[0] * missing, *below, *[0] * spare])
        valid.append([True] * (1 + len(trie.tokens)) + [False] * (missing + extra))
    return TokenTree.from_lists(tokens, parents, valid, device=request.device, extra=extra)
