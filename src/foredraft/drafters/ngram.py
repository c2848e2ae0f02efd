"""A back-off n-gram model as the drafter, counted from a text, from a file, or from the target's own outputs while they are generated.

Deterministic drafts follow the most frequent successor of the longest context seen, again and again, or branch by probability. Where
rows sample, tokens can be drawn from the model's own distribution q instead (Witten and Bell's back-off), so that rules that compare
with q accept them more often. A bigram model is order 2.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from foredraft import zoo
from foredraft.drafters.base import Drafter, DraftRequest, Row, is_over
from foredraft.drafters.growth import grow
from foredraft.drafters.isolated import Isolated
from foredraft.drafters.ngram_model import NGramModel
from foredraft.drafters.siblings import SHARED, offered
from foredraft.drafters.stores import Tokenizer, name_of, refuse_another_tokenizer, tokens_of
from foredraft.drafters.tries import LOOKS_UP, Trie, tree_of
from foredraft.errors import ConfigurationError
from foredraft.loading import fingerprint_of
from foredraft.target import Target
from foredraft.tree import TokenTree

DENSE = 1 << 15  # tokens of a vocabulary up to which "auto" makes distributions over all of it; above, they cost more than they gain
LIKELY = replace(SHARED, chains=("deterministic", "keyed", "iid", "without-replacement"))  # of few counts, which are no good q
BRANCHES = 4  # successors that a node of a deterministic tree may have
REMEMBERED = 1 << 14  # contexts of a model that does not change whose successors are kept
LEAST = 0.01  # probability of a path that is worth a node of it


class NGram(Drafter):
    """Options:

    source: a file written by ``save``, a text file to count (with ``tokenizer``), ``zoo:NAME``, or an ``NGramModel``.
    order: longest n-gram counted, context and successor together; 2 is the bigram model. Fixed by a loaded file.
    learn: also count the text of every row, prompt included: what is new of it with every draft, and the rest when the row ends. Rows of
        each isolation are counted in a model of their own, which begins as the ``source`` is; the least recently used of these go first.
    min_context: draft only while at least so many of the last tokens were seen in a row; more is safer and shorter. Trees of tokens that
        are drawn do not heed it.
    tokenizer: turns a text file into token ids; a callable, or a tokenizer of transformers.
    siblings: how tokens are chosen when sampling: ``iid`` (from the model's q, for the p/q rules), ``without-replacement`` (likewise,
        all different), ``keyed`` (with the target's noise, for match), ``top-k`` (the most likely), or ``auto``: keyed where the rule is
        match, but the most likely where the vocabulary is large, and in chains without a ``source``.
    most: n-grams that learning may add to the source's; beyond it the rarest are forgotten. The models of isolated rows have
        as many, all together.
    """

    name = "ngram"
    summary = "a back-off n-gram model counted from a text, a file or the target's own outputs; chains and trees"
    info = replace(LOOKS_UP, proposals=LIKELY.chains)

    def __init__(
        self,
        *,
        source: str | Path | NGramModel | None = None,
        order: int | None = None,
        learn: bool | None = None,
        min_context: int = 1,
        tokenizer: Tokenizer | None = None,
        siblings: str = "auto",
        most: int = 1_000_000,
    ):
        if min_context < 0:
            raise ConfigurationError(f"min_context must not be negative, got {min_context}")
        if most < 1:
            raise ConfigurationError(f"most must be at least 1, got {most}")
        self.model = self._load(source, order, tokenizer)
        self._made_from = source, order, tokenizer
        self.learn = source is None if learn is None else learn
        self.min_context, self.siblings, self.most = min_context, siblings, most
        self._isolated = self._models() if self.learn else None
        self._offer = offered(siblings, LIKELY if source is None else SHARED)
        self.info = replace(self.info, proposals=self._offer.chains)
        self._counted: dict[int, int] = {}
        self._known: dict[tuple[int, ...], list[tuple[int, float]]] = {}
        self._target: Target | None = None

    def save(self, path: str | Path) -> None:
        """Write the counts, those learned online included, but not from isolated rows; ``source=path`` loads them again."""
        if not self.model.fingerprint and self._target is not None:
            self.model.fingerprint = fingerprint_of(self._target.model) or ""
        self.model.save(path)

    def bind(self, target: Target) -> None:
        refuse_another_tokenizer("the n-gram model", self.model.vocab_size, self.model.fingerprint, target)
        if self.learn and self.model.vocab_size is not None and self.model.vocab_size < target.vocab_size:
            self.model.vocab_size = target.vocab_size  # texts that it learns from may have more tokens than its source
            self._isolated = self._models()
        self._target = target

    @property
    def keeps_texts(self) -> bool:
        return self.learn

    def shared(self) -> list[object]:
        return [self.model] if self.learn else []

    def draft(self, request: DraftRequest) -> TokenTree:
        if self._isolated is not None:
            self._isolated.keep(request.rows)
        self._count(request.rows)
        large = self.siblings == "auto" and request.vocab_size > DENSE and not request.needs_q
        if request.proposal != "deterministic" and not large:
            return self._chain(request) if request.shape.is_chain else grow(request, self._expand(request)).tree.truncate(request.limits)
        if request.shape.is_chain:
            return request.chains([self._continue(row, limit, request.vocab_size) for row, limit in zip(request.rows, request.limits)])
        nodes = request.shape.nodes
        return tree_of(request, [self._trie(row, limit, nodes, request.vocab_size) for row, limit in zip(request.rows, request.limits)])

    def end(self, rows: Sequence[Row]) -> None:
        self._count(rows)
        for row in rows:
            if is_over(row):
                self._counted.pop(row.slot, None)

    def reset(self) -> None:
        self._counted.clear()

    def forget(self) -> None:
        """What was learned; rows that live are counted anew.

        Raises:
            ConfigurationError: it was given an ``NGramModel`` to teach, of which there is no other copy.
        """
        if not self.learn:
            return
        if isinstance(self._made_from[0], NGramModel):
            raise ConfigurationError("ngram cannot forget what it added to an NGramModel object; save the model first and pass the file")
        size = self.model.vocab_size
        self.model = self._load(*self._made_from)
        self.model.vocab_size = None if self.model.vocab_size is None else size  # which may be the target's
        self._isolated = self._models()
        self._counted.clear()

    def _count(self, rows: Sequence[Row]) -> None:
        if not self.learn:
            return
        for row in rows:
            model = self._model_of(row)
            model.update(row.ids, self._counted.get(row.slot, 0))
            self._counted[row.slot] = len(row.ids)
            if model.size > self._given + self.most:
                model.shrink(self.most, keep=self._given)

    def _model_of(self, row: Row) -> NGramModel:
        return self.model if self._isolated is None else self._isolated.of(row, self.model)

    def _models(self) -> Isolated[NGramModel]:
        """For isolated rows; they begin as the model is now."""
        first = self.model.copy()
        self._given = first.size
        return Isolated(first.copy, lambda model: model.size - first.size if model.size >= first.size else model.size, self.most)

    # -- the most likely tokens -------------------------------------------------------------------------------------------

    def _continue(self, row: Row, count: int, vocab_size: int) -> list[int]:
        model = self._model_of(row)
        reach = model.order - 1
        context = list(row.ids[-reach:])
        draft: list[int] = []
        while len(draft) < count and model.matched(context[-reach:]) >= self.min_context:
            token = model.predict(context[-reach:])
            if token is None or token >= vocab_size:
                break
            draft.append(token)
            context.append(token)
        return draft

    def _trie(self, row: Row, depth: int, budget: int, vocab_size: int) -> Trie:
        """The likeliest ``budget`` continuations, best first."""
        model = self._model_of(row)
        reach, trie = model.order - 1, Trie()
        queue: list[tuple[float, int, int, int, list[int]]] = []  # -probability, order found, parent, token, context below
        found = 0

        def expand(node: int, context: list[int], probability: float) -> None:
            nonlocal found
            if trie.depths[node] >= depth:
                return
            for token, share in self._likeliest(model, context):
                if token < vocab_size and probability * share >= LEAST:
                    heapq.heappush(queue, (-probability * share, found, node, token, [*context, token][-reach:]))
                    found += 1

        expand(0, list(row.ids[-reach:]), 1.0)
        while queue and len(trie.tokens) < budget:
            probability, _, parent, token, context = heapq.heappop(queue)
            node = trie.add(parent, token)
            if len(trie.tokens) < budget:
                expand(node, context, -probability)
        return trie

    def _likeliest(self, model: NGramModel, context: list[int]) -> list[tuple[int, float]]:
        """Successors and their probabilities; none where too little of the context was seen. A model that does not change is asked once."""
        if self.learn:
            return model.likeliest(context, BRANCHES, seen=self.min_context)
        key = tuple(context)
        if key not in self._known:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[key] = model.likeliest(context, BRANCHES, seen=self.min_context)
        return self._known[key]

    # -- tokens drawn from q ----------------------------------------------------------------------------------------------

    def _chain(self, request: DraftRequest) -> TokenTree:
        """A row's chain ends where its context was not seen: before a token is drawn there, so that whatever is drawn stays."""
        reach, going = self.model.order - 1, list(request.limits)
        contexts = [list(row.ids[-reach:]) for row in request.rows]
        models = [self._model_of(row) for row in request.rows]
        drafted: list[Tensor] = []
        qs: list[Tensor] = []
        while True:
            depth = len(drafted)
            for row, context in enumerate(contexts):
                if going[row] > depth and models[row].matched(context) < self.min_context:
                    going[row] = depth
            if max(going) <= depth:
                break
            laws = [context if going[row] > depth else None for row, context in enumerate(contexts)]
            token, q = request.choose(self._logits([[law] for law in laws], request)[:, 0], drafted)
            drafted.append(token)
            if q is not None:
                qs.append(q)
            contexts = [[*context, new][-reach:] for context, new in zip(contexts, token.tolist())]
        if not drafted:
            return TokenTree.root(request.roots())
        tokens, valid = torch.stack([request.roots(), *drafted], 1), request.depth_mask(going, len(drafted))
        return TokenTree.from_chain(tokens, valid=valid, proposal=request.proposal, q=torch.stack(qs, 1) if qs else None)

    def _expand(self, request: DraftRequest) -> Callable[[TokenTree, int], Tensor]:
        """The model's log-probabilities after the nodes of a tree; filler gets none of its own."""
        reach = self.model.order - 1

        def expand(tree: TokenTree, first: int) -> Tensor:
            parents = tree.parent_lists or tree.parents.tolist()
            valid = [[True] * tree.nodes] * tree.rows if tree.valid is None else tree.valid.tolist()
            lines: list[list[list[int] | None]] = []
            for row, tokens, above, real in zip(request.rows, tree.tokens.tolist(), parents, valid):
                contexts = [list(row.ids[-reach:])]
                for node in range(1, tree.nodes):
                    contexts.append([*contexts[above[node]], tokens[node]][-reach:])
                lines.append([context if real[node] else None for node, context in enumerate(contexts)][first:])
            return self._logits(lines, request)

        return expand

    def _logits(self, lines: Sequence[Sequence[list[int] | None]], request: DraftRequest) -> Tensor:
        """``[R, n, V]`` log-probabilities after each context of each line; zeros where there is none."""
        size = request.vocab_size
        laws = np.zeros((len(lines), len(lines[0]), size), np.float32)
        for row, law, line in zip(request.rows, laws, lines):
            model = self._model_of(row)
            for place, context in enumerate(line):
                if context is not None:
                    np.log(model.distribution(context, size), out=law[place])
        return torch.from_numpy(laws).to(request.device)

    @staticmethod
    def _load(source: str | Path | NGramModel | None, order: int | None, tokenizer: Tokenizer | None) -> NGramModel:
        if source is None:
            return NGramModel(4 if order is None else order)
        if isinstance(source, NGramModel):
            return source
        if str(source).startswith(zoo.PREFIX):
            source = zoo.path(str(source)) / "ngram.safetensors"
        path = Path(source)
        if path.suffix == ".safetensors" and path.is_file():
            model = NGramModel.load(path)
            if order is not None and order != model.order:
                raise ConfigurationError(f"{str(path)!r} holds an n-gram model of order {model.order}, not {order}; leave order out")
            return model
        counted = NGramModel.from_tokens([tokens_of(path, tokenizer)], 4 if order is None else order)
        counted.fingerprint = name_of(tokenizer) or ""
        return counted
