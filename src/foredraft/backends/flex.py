"""Tree attention through FlexAttention: a block mask made from the tree, and grouped keys that are never repeated.

transformers' sdpa path takes a boolean mask ``[R, 1, N, W]`` and, with any mask, repeats the keys and values of grouped heads in
memory. FlexAttention takes the mask as a function (block_masks.py), reads grouped heads in place, and reads no block after the tree. Keys
and values in pages are read where they lie: the mask function finds out which slots of a row a page holds.

The attention function is registered under its own name, and a model uses it during a pass only. On CUDA it is compiled;
elsewhere torch runs it uncompiled, which is slow and exact. It is used on request only: no report from a GPU shows that it is faster.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedConfig

from foredraft.backends.base import ForwardPass, PassOutput, differs, failure, tree_window
from foredraft.backends.block_masks import BLOCK, NAME, in_pages, spanned, tree_mask
from foredraft.backends.eager import Eager
from foredraft.backends.self_test import SMALLEST, Trial, texts_of_test
from foredraft.device import spread
from foredraft.models.cache import Window
from foredraft.models.masks import MaskBuilder, MaskInputs
from foredraft.models.page_stores import PageStore
from foredraft.models.paged_cache import PagedCache
from foredraft.models.pages import PAGE
from foredraft.models.positions import uses_alibi
from foredraft.models.support import ModelFacts
from foredraft.tree import TokenTree

DECODE = 128  # fewer queries than this go to the kernel that splits the keys
TILE = 64  # rows of that kernel's tiles; more would not fit the registers
RECOMPILES = 64  # variants of the one compiled function: shapes, soft caps, sinks, windows


def refusal(facts: ModelFacts, execution: str) -> str | None:
    """Why a model cannot attend through FlexAttention; None if nothing speaks against it."""
    model = facts.model
    if facts.chains_only is not None:
        return facts.chains_only
    if not hasattr(flex_module, "AuxRequest"):
        return f"torch {torch.__version__} is older than 2.9"
    if execution not in ("auto", "eager"):
        return f"it takes the model's own layers, and execution={execution!r} was asked for; use execution='eager'"
    if uses_alibi(model):
        return "the model adds a bias by position to its mask, which a block mask does not hold"
    if spread(model):
        return "the model lies on several devices and a block mask on one"
    return None


# -- the attention function ---------------------------------------------------------------------------------------------


def kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None, softcap: float | None, sinks: bool, options: Any
) -> Any:
    """FlexAttention as the models want it; with ``sinks`` also the logarithm of the sum under the softmax."""
    return flex_module.flex_attention(
        query,
        key,
        value,
        score_mod=None if softcap is None else capped(softcap),
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=options,
        return_aux=flex_module.AuxRequest(lse=True) if sinks else None,
    )


def capped(limit: float) -> Callable[..., Tensor]:
    def soft(score: Tensor, row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)

    return soft


@cache
def compiled_kernel() -> Callable[..., Any]:
    """One per process. Every shape is a variant of it, so their number must not run into torch's limit of eight."""
    known = inspect.signature(torch.compile).parameters
    if "recompile_limit" not in known:  # torch 2.11 has it not, 2.13 has
        return torch._dynamo.config.patch(recompile_limit=RECOMPILES)(torch.compile(kernel, dynamic=False, fullgraph=True))
    options: dict[str, Any] = {"recompile_limit": RECOMPILES, "isolate_recompiles": True}
    return torch.compile(kernel, dynamic=False, fullgraph=True, **options)


def kernel_options(queries: int, heads: int, groups: int) -> dict[str, int] | None:
    """Tiles of the kernel that splits the keys: by default one tile would hold all queries of a group, which do not fit into registers.

    Other shapes go to the main kernel, with its own choice.
    """
    shared = heads // groups
    if queries >= DECODE or shared & (shared - 1):
        return None
    return {"BLOCK_M": max(shared, min(TILE, queries * shared)), "num_warps": 4}


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """An attention function in transformers' interface. ``query`` ``[R, H, N, D]``; ``key``, ``value`` ``[R, groups, span, D]``, or what
    :meth:`Flexed.write` returned.

    Raises:
        NotImplementedError: an option that has no counterpart here.
    """
    if not isinstance(attention_mask, flex_module.BlockMask):
        raise NotImplementedError(f"a layer asks for {type(attention_mask).__name__} as a mask, not for the block mask")
    if dropout or position_bias is not None:
        raise NotImplementedError("dropout" if dropout else "a bias by position")
    backend: Flexed = module.config.foredraft_flex
    backend.calls += 1
    nodes, queries = query.shape[2], attention_mask.shape[2]
    if nodes < queries:
        query = pad(query, (0, 0, 0, queries - nodes))
    run = compiled_kernel() if backend.compiled else kernel
    options = kernel_options(queries, query.shape[1], key.shape[1])
    if isinstance(backend.cache, PagedCache):
        key, value, attention_mask = backend.over_pages(key, value, attention_mask)
        options = {**(options or {}), "BLOCK_N": PAGE}
    found = run(query, key, value, attention_mask, scaling, softcap, s_aux is not None, options)
    if s_aux is not None:  # a sink is one more score under the softmax, without a value
        found, aux = found
        kept = torch.sigmoid(aux.lse.float() - s_aux.float().view(1, -1, 1))
        found = (found * kept[..., None]).to(query.dtype)
    return found[:, :, :nodes].transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)


# -- the backend --------------------------------------------------------------------------------------------------------


class Flexed(Eager):
    """Passes that need a mask attend through FlexAttention, others as the model does, and so do those of further shapes once torch has
    compiled as many as it may.

    Args:
        compiled: None compiles on CUDA only.

    Attributes:
        flexed: how many passes used FlexAttention.
        calls: of the attention function.
        given_up: torch could not compile it; then passes attend as the model does.
    """

    def __init__(self, facts: ModelFacts, reasons: dict[str, str], *, compiled: bool | None = None):
        super().__init__(facts, None, reasons)
        model = facts.model
        self.compiled = facts.device.type == "cuda" if compiled is None else compiled
        self.flexed, self.calls, self.given_up = 0, 0, False
        configs = [vars(module).get("config") for module in model.modules()]
        self._configs = list({id(each): each for each in configs if isinstance(each, PreTrainedConfig)}.values())
        self._masks = MaskBuilder(model.config.get_text_config(), NAME, model.dtype, builder=NAME)
        self._written: dict[int, tuple[Tensor, PageStore]] = {}  # by the id of the keys that layers were given
        self._paged: dict[tuple[PageStore, int], tuple[Tensor, Any]] = {}  # by the id of a mask: which pages are a row's, and its mask

    def forward(self, given: ForwardPass) -> PassOutput:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # takes a second to import

        window = given.window
        if self.given_up or (given.uniform_chain and (window.nodes == 1 or window.starts[0] == 0)):
            return super().forward(given)
        self.passes += 1
        self.flexed += 1
        wide = spanned(window)
        self.cache.enter(wide)
        positions = self.positions(given.tree, wide)
        mask = self.masks(given.tree, wide, positions)
        where = None if given.uniform_chain else MaskInputs(given.tree, wide, positions)
        try:
            with self.in_use():
                return self.called(given, wide, positions, mask, where)
        except (FailOnRecompileLimitHit, TorchDynamoException) as error:
            self.flexed -= 1
            self.given_up = not isinstance(error, FailOnRecompileLimitHit)
            why = f"torch could not compile it: {failure(error)}" if self.given_up else "torch compiles no more shapes of it"
            self.reasons["flex"] = f"{why}; passes {'' if self.given_up else 'of other shapes '}use the model's own attention"
            return self.plain(given)

    def masks(self, tree: TokenTree, window: Window, positions: Tensor) -> Any:
        """A block mask, or one per layer type, for the spanned ``window``, which the cache has entered."""
        block = PAGE if isinstance(self.cache, PagedCache) else BLOCK
        return self._masks(tree_mask(tree, window, positions, block), self.cache)

    def write(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write ``[R, heads, N, size]`` at the window's slots of a layer; returns all its pages, ``[1, heads, slots, size]``."""
        store, layer = self.cache.write(layer_idx, keys, values), self.cache.layers[layer_idx]
        found, others = (held.transpose(0, 1).flatten(1, 2)[None] for held in (layer.keys, layer.values))
        self._written[id(found)] = found, store
        return found, others

    def over_pages(self, key: Tensor, value: Tensor, mask: Any) -> tuple[Tensor, Tensor, Any]:
        """What :meth:`write` returned, and the block mask ``mask`` over it.

        Raises:
            NotImplementedError: keys that no layer has cached.
        """
        if (found := self._written.get(id(key))) is None:
            raise NotImplementedError("a layer attends over other keys than those that it has cached")
        store = found[1]
        if (store, id(mask)) not in self._paged:
            table = self.cache.places(store, key.device).table
            holds = table.new_full((len(table), store.room + 1), -1)
            holds.scatter_(1, table, torch.arange(table.shape[1], device=key.device).expand_as(table))
            holds[:, -1] = -1  # stands for pages that a row lacks
            self._paged[store, id(mask)] = holds, in_pages(mask, table, holds)
        holds, mask = self._paged[store, id(mask)]
        if not self.compiled:  # then torch reads every page, whatever blocks the mask lists
            own = (holds >= 0).repeat_interleave(PAGE, 1)[:, None, :, None]
            key, value = (torch.where(own, each, 0) for each in (key, value))
        return key, value, mask

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """For one pass, the model's attention is :func:`attend`."""
        before = [config.__dict__["_attn_implementation_internal"] for config in self._configs]
        try:
            for config in self._configs:
                config.__dict__.update(_attn_implementation_internal=NAME, foredraft_flex=self)
            if isinstance(self.cache, PagedCache):
                self.cache.reader = self
            yield
        finally:
            if isinstance(self.cache, PagedCache):
                self.cache.reader = None
            self._written, self._paged = {}, {}
            for config, implementation in zip(self._configs, before):
                config.__dict__["_attn_implementation_internal"] = implementation
                config.__dict__.pop("foredraft_flex", None)


@torch.inference_mode()
def attention_test(backend: Flexed) -> str | None:
    """Score a tree and a chain after two prefixes of unequal length through the model's own attention and through FlexAttention.

    Returns:
        Why FlexAttention is not to be used, None if the logits are the same.
    """
    facts = backend.facts
    if facts.context is not None and facts.context < SMALLEST:
        return f"a context of {facts.context} tokens has no room for the test"
    try:
        tree = Trial(backend, texts_of_test(facts)).tree()
        for each in (tree, TokenTree.from_chain(tree.tokens)):
            given = ForwardPass(each, tree_window(each, backend.cache.lengths), each.tokens)
            expected = backend.plain(given).logits
            backend.calls = 0
            difference = differs(facts.model, backend.forward(given).logits, expected)
            if backend.given_up:
                return backend.reasons["flex"]
            if difference is not None or not backend.calls:
                return difference or "its layers do not ask transformers' attention interface"
        return None
    except Exception as error:  # what a compiler, or a model that was given a block mask, raises has no common type
        return failure(error)
    finally:
        backend.flexed = 0
        backend.release()
