"""Whether logits are the same bits whatever else is in a pass: other rows, a draft tree, more or less of the prompt.

The kernels in ``native`` add up every sum in an order that depends on the token and its text alone. torch's own products do not: oneDNN and
MKL choose another order for another number of tokens. So only a model that runs on the kernels throughout can pass, and whether it does is
found out by making the same logits in several ways.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from foredraft.backends.base import Backend
from foredraft.backends.described_pass import DescribedModel
from foredraft.backends.eager import Eager
from foredraft.backends.kernels import Kernels
from foredraft.backends.products import NATIVE
from foredraft.backends.self_test import Trial, some_text
from foredraft.models.cache import TreeCache
from foredraft.models.paged_cache import PagedCache
from foredraft.models.pages import PAGE
from foredraft.tree import TokenTree

TREE = (-1, 0, 0, 1, 1, 2, 5, 4, 6, 7, 9)  # parents; paths of up to six nodes are in scattered slots of two pages
LENGTH, SHORT = PAGE - 3, 5  # tokens in front of it
LEAST = 2 * PAGE  # context in which the test has room


def refusal(backend: Backend) -> str | None:
    """Why sums may be added up in different orders in different passes; None if the kernels make all of them."""
    facts, kernels = backend.facts, backend.overrides
    decoder = facts.model.get_decoder()
    if type(backend) is not Eager or not isinstance(kernels, Kernels) or not kernels.native:
        return f"passes are {backend.name}, and only the native kernels add up in one order"
    if kernels.unfused is not None:
        return kernels.unfused
    whole = vars(decoder).get("forward")
    if not isinstance(whole, DescribedModel) or facts.chains_only is not None:
        return f"the kernels are not made for all of {type(decoder).__name__}"
    if not whole.by_position:
        return "its rotary angles depend on the length of the text"
    asked = [each for each in (*decoder.modules(), facts.model.get_output_embeddings()) if isinstance(each, nn.Linear)]
    products = [getattr(vars(each).get("forward"), "product", None) for each in asked]
    if any(product is None or product.hint != NATIVE for product in products):
        return "some of its linear layers are not the kernels'"
    if facts.context is not None and facts.context < LEAST:
        return f"a context of {facts.context} tokens has no room for the test"
    return None


@torch.inference_mode()
def invariance_test(backend: Backend) -> str | None:
    """Logits at the nodes of a tree, beside another row, against those of plain decoding of each path, alone and after a prompt that is
    read in two pieces. ``backend`` is left as it was.

    Returns:
        What differed, or why that was not tried; None if all bits are the same.
    """
    if (why := refusal(backend)) is not None:
        return why
    facts, before, passes = backend.facts, backend.cache, backend.passes
    backend.cache = PagedCache([store.kind for store in before.stores]) if isinstance(before, PagedCache) else TreeCache()
    try:
        text, tokens = some_text(facts, LENGTH, 3), some_text(facts, len(TREE), 23)
        together = Trial(backend, [some_text(facts, SHORT, 1), text])
        tree = TokenTree(torch.tensor([some_text(facts, len(TREE), 29), tokens]), torch.tensor([TREE] * 2))
        found = together.score(tree)[1]
        chain = together.score(TokenTree.from_chain(tree.tokens))[1]
        backend.cache.compact([])
        alone = Trial(backend, [text[: LENGTH // 2]])
        alone.score(TokenTree.from_chain(torch.tensor([text[LENGTH // 2 :]])))
        alone.commit(None, [LENGTH - LENGTH // 2])
        if not torch.equal(chain, stepped(alone, tokens)):
            return "logits at the nodes of a chain are not those of plain decoding, bit for bit"
        paths = [tree.path(1, node) for node in range(len(TREE)) if node not in TREE]  # to the leaves
        if not all(torch.equal(found[path], stepped(alone, [tokens[node] for node in path])) for path in paths):
            return "logits at the nodes of a tree are not those of plain decoding, bit for bit"
        return None
    finally:
        backend.cache.forget()
        backend.cache, backend.passes = before, passes


def stepped(trial: Trial, tokens: list[int]) -> Tensor:
    """``[len(tokens), V]`` logits of plain decoding, which is then forgotten."""
    cache, found = trial.backend.cache, []
    for token in tokens:
        found.append(trial.score(TokenTree.root(torch.tensor([token])))[0, 0])
        trial.commit(None, [1])
    cache.rewind([length - len(tokens) for length in cache.lengths])
    return torch.stack(found)
