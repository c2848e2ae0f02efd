"""Retrieval from a datastore (REST, He et al. 2023): what followed the longest ending of the text in a corpus, the most frequent first.

The corpus is a :class:`~foredraft.drafters.datastore.Datastore`, made by ``foredraft datastore build``. Costs no model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.drafters.base import Drafter, DraftRequest, Row
from foredraft.drafters.datastore import SORTED, Datastore, most_frequent
from foredraft.drafters.stores import refuse_another_tokenizer
from foredraft.drafters.tries import LOOKS_UP, Trie, tree_of
from foredraft.errors import ConfigurationError
from foredraft.tree import TokenTree

if TYPE_CHECKING:
    from foredraft.target import Target


class Rest(Drafter):
    """Options:

    source: a file made by ``foredraft datastore build`` or ``Datastore.save``, or a ``Datastore``.
    max_match, min_match: the longest and the shortest ending of the text that is looked for.
    occurrences: so many at most are looked at, spread evenly over all there are.
    """

    name = "rest"
    summary = "the most frequent continuations of the last tokens in a datastore of texts"
    info = LOOKS_UP

    def __init__(self, source: str | Path | Datastore, *, max_match: int = 16, min_match: int = 1, occurrences: int = 512):
        if not 1 <= min_match <= max_match < SORTED:
            raise ConfigurationError(f"rest needs 1 <= min_match <= max_match < {SORTED}, got {min_match} and {max_match}")
        if occurrences < 1:
            raise ConfigurationError(f"rest needs occurrences of at least 1, got {occurrences}")
        self.source = "the datastore" if isinstance(source, Datastore) else f"the datastore {str(source)!r}"
        self.store = source if isinstance(source, Datastore) else load(source)
        self.max_match, self.min_match, self.occurrences = max_match, min_match, occurrences

    def bind(self, target: Target) -> None:
        refuse_another_tokenizer(self.source, self.store.vocab_size, self.store.fingerprint, target)

    def draft(self, request: DraftRequest) -> TokenTree:
        budget, chain = request.shape.nodes, request.shape.is_chain
        return tree_of(
            request, [self._trie(row, limit, budget, chain, request.vocab_size) for row, limit in zip(request.rows, request.limits)]
        )

    def _trie(self, row: Row, depth: int, budget: int, chain: bool, vocab_size: int) -> Trie:
        trie = Trie()
        found = self.store.find(row.ids[-self.max_match :], longest=self.max_match, shortest=self.min_match) if depth > 0 else None
        if found:
            followers = self.store.followers(found, depth, self.occurrences)
            most_frequent(trie, followers, min(self.store.separator, vocab_size), budget=budget, chain=chain)
        return trie


def load(path: str | Path) -> Datastore:
    """Raises:
    ConfigurationError: there is no datastore that can be read at ``path``.
    """
    try:
        return Datastore.load(path)
    except FileNotFoundError as error:
        raise ConfigurationError(f"{error}; make one with 'foredraft datastore build FILES... --out {path}'") from None
    except (ValueError, OSError) as error:
        raise ConfigurationError(str(error)) from None
