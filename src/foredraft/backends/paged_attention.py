"""Attention by the kernels in ``native`` over keys and values in pages, in models whose other layers stay their own.

Most families call their attention through transformers' ``AttentionInterface``. A function is registered there under its own name, and a
model uses it during a pass only. The cache then writes keys and values into pages and returns placeholders without numbers, by which the
function finds what was written; the kernels read the pages in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import causal_mask_function, sdpa_mask

from foredraft.backends import native
from foredraft.backends.base import Backend, ForwardPass, differs, failure, tree_window
from foredraft.backends.kernel_pass import Places, fits
from foredraft.backends.self_test import PATH, SMALLEST, TREE, some_text, sources_of_test
from foredraft.models.cache import Window
from foredraft.models.cache_sizes import in_words
from foredraft.models.masks import MaskBuilder
from foredraft.models.page_stores import Kind
from foredraft.models.paged_cache import PagedCache
from foredraft.models.pages import PAGE
from foredraft.models.positions import uses_alibi
from foredraft.models.source_runs import new_cache
from foredraft.models.support import ModelFacts
from foredraft.models.windows import kinds_of
from foredraft.tree import TokenTree

NAME = "foredraft_pages"
VECTOR = 16  # numbers; a head is a multiple of it
ASK = "a size or a fraction as cache_memory gives it pages all the same"


def refusal(facts: ModelFacts, execution: str, attention: str, paged: bool) -> str | None:
    """Why the keys and values of a model cannot lie in pages; None if nothing speaks against it.

    Args:
        execution, attention, paged: as of :func:`~foredraft.backends.choice.choose`.
    """
    if facts.chains_only is not None:
        return facts.chains_only
    here = on_cpu(facts.model)
    if paged and (here or not facts.sourced):
        return None
    if execution in ("compiled", "graphs"):
        return f"its {'layers are compiled' if execution == 'compiled' else 'passes are recorded'}; {ASK}"
    if attention == "flex":
        return f"attention='flex' was asked for; {ASK}"
    if facts.sourced:
        return f"the model has an encoder, and each pass would copy what it reads; {ASK}" if here else "the model has an encoder"
    if not here:
        return f"no report from a GPU shows that they are equal and as fast there; {ASK}"
    return None


def on_cpu(model: Any) -> bool:
    """Whether a model's weights are in main memory."""
    return all(each.device.type in ("cpu", "meta") for each in model.parameters())  # packed weights leave placeholders


def refusal_in_place(model: Any) -> str | None:
    """Why the kernels cannot attend over pages for a model that has some; None if nothing speaks against it."""
    if model.config.get_text_config()._attn_implementation not in ("sdpa", "eager"):
        return f"its attention is {model.config._attn_implementation!r}"
    if model.config.is_encoder_decoder:
        return "the model has an encoder"
    if uses_alibi(model):
        return "the model adds a bias by position to its scores"
    if not on_cpu(model):
        return "the kernels are for CPUs"
    return native.refusal(model.dtype)


class PagedAttention:
    """The attention of one model over a cache in pages.

    Attributes:
        masks: for passes that use it.
        calls, writes: how often the attention function was called, and how often a layer cached keys and values for it.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.calls, self.writes = model, 0, 0
        configs = [vars(module).get("config") for module in model.modules()]
        self._configs = list({id(each): each for each in configs if isinstance(each, PreTrainedConfig)}.values())
        self.masks = MaskBuilder(model.config.get_text_config(), NAME, model.dtype)
        self._library, self._dtype = native.library(model.dtype), model.dtype
        self._about, self._layer = native.Pass(), native.Layer()
        self._window: Window | None = None  # of `_about`
        self._heads = self._size = 0  # how many queries' heads, and of what size, its scratch is for
        self._held: Any = None  # keeps alive what it refers to
        self._scratch = torch.empty(0)
        self._nothing = torch.full((), torch.nan, dtype=model.dtype, device="cpu")
        self._placed, self._pointers = -1, (0, 0)  # the layer that `_about` describes, and where its keys and values begin
        self._cache: PagedCache | None = None
        self._written: dict[int, tuple[Tensor, Tensor, int, Tensor, Tensor]] = {}  # by the id of the keys that layers were given

    @property
    def serves(self) -> bool:
        """Nothing is asked for that only the model's own attention returns."""
        return serves(self.model)

    @contextmanager
    def in_use(self, cache: PagedCache) -> Iterator[None]:
        """For one pass over ``cache``, whose window it has entered, the model's attention is :meth:`attended`."""
        before = [config.__dict__["_attn_implementation_internal"] for config in self._configs]
        try:
            for config in self._configs:
                config.__dict__.update(_attn_implementation_internal=NAME, foredraft_pages=self)
            cache.reader, self._cache = self, cache
            yield
        finally:
            cache.reader = self._cache = self._window = None
            self._written.clear()
            for config, implementation in zip(self._configs, before):
                config.__dict__["_attn_implementation_internal"] = implementation
                config.__dict__.pop("foredraft_pages", None)

    def write(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write ``[R, heads, N, size]`` at the window's slots of a layer. Returns placeholders with the shapes of keys and values up to the
        window's width. They are NaN, so that computing with them shows, and :meth:`attended` finds by them what was written.

        Raises:
            NotImplementedError: keys or values that the kernels do not read.
        """
        assert self._cache is not None
        if {keys.dtype, values.dtype} != {self._dtype} or keys.shape != values.shape:
            raise NotImplementedError(f"a layer caches keys and values that are no {self._dtype}, or of unequal sizes")
        self.writes += 1
        rows, heads, _, size = keys.shape
        about = self._pass(self._cache.window, size)
        keys, values = (each if each.stride(3) == 1 else each.contiguous() for each in (keys, values))
        to_keys, to_values = self._stores(about, layer_idx)
        from_keys, from_values = ((each.data_ptr(), *each.stride()[:3]) for each in (keys, values))
        self._library.write_over(about, heads, size, *from_keys, to_keys, *from_values, to_values)
        given = self._nothing.expand(rows, heads, about.width, size), self._nothing.expand(rows, heads, about.width, size)
        self._written[id(given[0])] = *given, layer_idx, keys, values
        return given

    def attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """``[R, N, heads, size]`` for ``query`` ``[R, heads, N, size]`` over ``key`` and ``value`` that :meth:`write` has returned.

        Args:
            mask: bool ``[R or 1, 1, N, width]``; None where a node sees every slot up to its own.
            softcap: scores become softcap * tanh(score / softcap).
            sinks: ``[heads]`` one more score of each head, without a value.

        Raises:
            NotImplementedError: keys, values or a mask that the kernels do not read.
        """
        found = self._written.get(id(key))
        if self._cache is None or found is None or found[0] is not key or found[1] is not value:
            raise NotImplementedError("a layer attends over other keys or values than those that it has cached")
        (rows, heads, nodes, size), layer_idx, layer = query.shape, found[2], self._layer
        if (rows, nodes, size) != (len(key), found[3].shape[2], key.shape[3]) or heads % key.shape[1] or query.dtype != self._dtype:
            raise NotImplementedError("a layer's queries are not those of the tokens whose keys it has cached")
        about = self._pass(self._cache.window, size)
        stores = self._stores(about, layer_idx)
        if mask is not None and not (fits(mask) and mask.shape[0] in (1, rows) and mask.shape[2:] == (nodes, about.width)):
            raise NotImplementedError("a mask is no mask of bools, or not the same for every head")
        self.calls += 1
        layer.heads, layer.key_heads, layer.size = heads, key.shape[1], size
        if heads != self._heads:
            native.make_room_for_segments(about, layer, rows * nodes, int(about.width))
            self._heads = heads
        layer.scaling, layer.cap = size**-0.5 if scaling is None else scaling, softcap or 0.0
        apart = None if sinks is None else sinks.detach().float().contiguous()
        layer.sinks = None if apart is None else apart.data_ptr()
        if mask is not None:
            about.mask_row_stride, about.mask_stride = 0 if mask.shape[0] == 1 else mask.stride(0), mask.stride(2)
        asked = query.transpose(1, 2).contiguous()
        out = query.new_empty(rows, nodes, heads, size)
        about.projected, about.attended = asked.data_ptr(), out.data_ptr()
        self._library.attend_over(layer, about, None if mask is None else mask.data_ptr(), *stores)
        return out

    def _stores(self, about: native.Pass, layer_idx: int) -> tuple[int, int]:
        """Where the keys and the values of a layer begin, which ``about`` then describes."""
        if layer_idx != self._placed:
            assert self._cache is not None
            layer, offset = self._cache.layers[layer_idx], self._cache.place(about, layer_idx) * self._dtype.itemsize
            self._placed, self._pointers = layer_idx, (layer.keys.data_ptr() + offset, layer.values.data_ptr() + offset)
        return self._pointers

    def _pass(self, window: Any, size: int) -> native.Pass:
        """About ``window``, with scratch for heads of ``size``."""
        about = self._about
        if window is self._window and size == self._size:
            return about
        if window is not self._window:
            places = Places(window, ragged=False)
            about.threads, about.rows, about.tokens = torch.get_num_threads(), window.rows, places.count
            about.nodes, about.width = window.nodes, window.width
            self._held, self._window, self._placed = (places.begins, places.rows, places.slots), window, -1
            about.begins, about.row_of, about.slots = (each.data_ptr() for each in self._held)
        self._heads, self._size = 0, size
        needed = int(about.threads) * native.scratch(size)
        if len(self._scratch) < needed:
            self._scratch = torch.empty(needed, dtype=torch.float32)
        about.scratch = self._scratch.data_ptr()
        return about


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
    is_causal: bool | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """:meth:`PagedAttention.attended` in transformers' interface.

    Raises:
        NotImplementedError: an option that has no counterpart here.
    """
    if dropout or position_bias is not None or is_causal is False:
        raise NotImplementedError("dropout" if dropout else "a bias by position" if position_bias is not None else "no causality")
    pages: PagedAttention = module.config.foredraft_pages
    return pages.attended(query, key, value, attention_mask, scaling, softcap, s_aux), None


def mask(
    *,
    kv_length: int,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **others: Any,
) -> Tensor | None:
    """A mask builder in transformers' interface: that of sdpa, and none where a node sees every slot up to its own."""
    everything = mask_function is causal_mask_function and (local_size is None or kv_length <= local_size)
    if everything and attention_mask is None and allow_is_causal_skip:
        return None
    given = {"mask_function": mask_function, "attention_mask": attention_mask, "local_size": local_size}
    return sdpa_mask(kv_length=kv_length, allow_is_causal_skip=allow_is_causal_skip, **given, **others)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask)


def serves(model: Any) -> bool:
    """Whether nothing is asked for that only the model's own attention returns."""
    return not (model.config.output_attentions or model.training or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))


# -- the comparison -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paged:
    """How the keys and values of a model lie in pages.

    Attributes:
        kinds: of its layers.
        run_bytes: of a page of a source, if the model has an encoder.
        handed: why the cache returns keys and values to its layers, most of the time as copies; None if the kernels read pages in place.
    """

    kinds: list[Kind]
    run_bytes: int
    handed: str | None = None

    def use(self, backend: Backend) -> None:
        """``backend``, which has no rows, keeps keys and values in pages from now on."""
        handed = self.handed is not None
        backend.cache = new_cache(sourced=backend.facts.sourced, kinds=self.kinds, run_bytes=self.run_bytes, handed=handed)
        backend.pages = PagedAttention(backend.facts.model) if self.handed is None else None

    @property
    def price(self) -> str:
        size = in_words(sum(kind.page_bytes for kind in self.kinds) // PAGE)
        return (
            f"{self.handed}; so every pass copies keys and values from their pages, {size} per token, unless a row is alone and its pages "
            "are neighbours"
        )


@torch.inference_mode()
def attention_test(backend: Backend, handed: str | None = None) -> Paged | str:
    """Make the same passes through the model's own attention and over pages: a chain, a tree after rows of unequal length, and a token of
    one row after a path of the tree was kept. ``backend`` is left as it was.

    Args:
        handed: why the kernels are not to read pages in place, None if they may.

    Returns:
        How it has pages; or why it has none.
    """
    facts, before = backend.facts, backend.cache
    if facts.context is not None and facts.context < SMALLEST:
        return f"a context of {facts.context} tokens has no room for the test"
    try:
        backend.cache = new_cache(sourced=facts.sourced)
        passes = logits_of_test(backend)
        expected = [next(passes)]
        sizes = [(layer.keys.shape[3], layer.values.shape[3]) for layer in backend.cache.written]
        expected += passes
        kinds = kinds_of(facts.model, backend.cache.layers)
        run_bytes = backend.cache.sources[0].page_bytes if facts.sourced else 0
        if not serves(facts.model):
            return "the target is built where its attention cannot be compared: under autocast, with gradients or output_attentions"
        why = handed or refusal_in_place(facts.model) or _refused_sizes(sizes) or _compared(backend, Paged(kinds, run_bytes), expected)
        if why is None:
            return Paged(kinds, run_bytes)
        return _compared(backend, Paged(kinds, run_bytes, why), expected) or Paged(kinds, run_bytes, why)
    except Exception as error:  # what a model raises that was given another cache has no common type
        return failure(error)
    finally:
        backend.cache, backend.pages = before, None


def _refused_sizes(sizes: Sequence[tuple[int, int]]) -> str | None:
    """Why the kernels cannot read keys and values of such ``sizes`` per head."""
    if any(keys != values for keys, values in sizes):
        return "its keys and values have unequal sizes"
    odd = [keys for keys, _ in sizes if keys % VECTOR]
    return f"its heads have {min(odd)} numbers, and the kernels take multiples of {VECTOR}" if odd else None


def _compared(backend: Backend, paged: Paged, expected: Sequence[Tensor]) -> str | None:
    """Why pages are not to be used in this way."""
    paged.use(backend)
    try:
        found = list(logits_of_test(backend))
    except Exception as error:  # what a model raises that was given another attention has no common type
        return failure(error)
    if backend.pages is not None and backend.pages.writes and not backend.pages.calls:  # without either, all layers are kernels
        return "its layers do not ask transformers' attention interface"
    differences = [differs(backend.facts.model, *pair) for pair in zip(found, expected)]
    return next((each for each in differences if each is not None), None)


def logits_of_test(backend: Backend) -> Iterator[Tensor]:
    """``[R, N, V]`` logits of each pass of :func:`attention_test`. Rows begin shortly before a page ends, after keys that are zero."""
    facts = backend.facts
    behind = PAGE - 4 if facts.context is None or facts.context >= 2 * PAGE else 0
    backend.open([behind] * 2, sources_of_test(facts))

    def score(tree: TokenTree) -> Tensor:
        return backend.forward(ForwardPass(tree, tree_window(tree, backend.cache.lengths), tree.tokens)).logits

    tokens = torch.tensor([some_text(facts, 9, 3), some_text(facts, 9, 13)], device=facts.device)
    yield score(TokenTree.from_chain(tokens))
    backend.cache.commit(None, (9, 3))
    yield score(TokenTree(tokens[:, : len(TREE)], torch.tensor([TREE] * 2, device=facts.device)))
    backend.cache.commit(torch.tensor([PATH] * 2, device=facts.device), (len(PATH), 1))
    backend.cache.compact([0])
    yield score(TokenTree.root(tokens[:1, 0]))
    chain = TokenTree.from_chain(tokens[:1])
    given = ForwardPass(chain, tree_window(chain, backend.cache.lengths), chain.tokens, keep=[chain.nodes - 1])
    yield backend.forward(given).logits
