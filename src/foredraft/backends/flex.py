"""Tree attention through FlexAttention: a block mask made from the tree, and grouped keys that are never repeated.

transformers' sdpa path takes a boolean mask ``[R, 1, N, W]`` and, with any mask, repeats the keys and values of grouped heads in
memory. FlexAttention takes the mask as a function (block_masks.py), reads grouped heads where they lie and no block behind the tree.

The attention function is registered under a name of its own, and a model uses it for the length of a pass only. Whether it is faster
is measured, on CUDA; elsewhere torch runs it uncompiled, which is slow and exact.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex_module
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedConfig

from foredraft.backends.block_masks import NAME, Shape, shape_of, tree_mask
from foredraft.models.alibi import uses_alibi
from foredraft.models.cache import TreeCache, Window
from foredraft.models.masks import MaskBuilder
from foredraft.tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTIONS = ("auto", "model", "flex")
DECODE = 128  # fewer queries than this go to the kernel that splits the keys
TILE = 64  # rows of that kernel's tiles; more would not fit the registers
WORTH = 2048  # shortest span at which "auto" tries; below it attention is a small part of a pass
PATIENCE = 8  # passes of one shape before it is compiled
TRIALS = 12  # shapes compiled at most
REPEATS = 3  # timed passes of either side in a trial
RECOMPILES = 64  # variants of the one compiled function: shapes, soft caps, sinks, windows

Pass = Callable[[], Tensor]  # makes the pass and returns its logits


def refusal(model: PreTrainedModel, device: torch.device, *, packed: bool, forced: bool) -> str | None:
    """Why ``model`` cannot, or unless ``forced`` should not, attend through FlexAttention; None if nothing speaks against it."""
    if not hasattr(flex_module, "AuxRequest"):
        return f"torch {torch.__version__} is older than 2.9"
    if not forced and device.type != "cuda":
        return f"it is compiled for CUDA, and on {device.type} it would be slower; attention='flex' uses it all the same"
    if packed:
        return "the packed layers attend by themselves; use execution='eager'"
    if uses_alibi(model):
        return "the model adds a bias by position to its mask, which a block mask does not hold"
    if len(set((getattr(model, "hf_device_map", None) or {"": device}).values())) > 1:
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
    wanted = {"isolate_recompiles": True, "recompile_limit": RECOMPILES}  # later than torch 2.9
    known = inspect.signature(torch.compile).parameters
    options: dict[str, Any] = {name: value for name, value in wanted.items() if name in known}
    return torch.compile(kernel, dynamic=False, fullgraph=True, **options)


def kernel_options(queries: int, heads: int, groups: int) -> dict[str, int] | None:
    """Tiles of the kernel that splits the keys: by default one would hold all queries of a group, more than the registers do.

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
    """An attention function in transformers' interface. ``query`` ``[R, H, N, D]``; ``key``, ``value`` ``[R, groups, span, D]``.

    Raises:
        NotImplementedError: an option that has no counterpart here.
    """
    if not isinstance(attention_mask, flex_module.BlockMask):
        raise NotImplementedError(f"a layer asks for {type(attention_mask).__name__} as a mask, not for the block mask")
    if dropout or position_bias is not None:
        raise NotImplementedError("dropout" if dropout else "a bias by position")
    flex: Flex = module.config.foredraft_flex
    flex.calls += 1
    nodes, queries = query.shape[2], attention_mask.shape[2]
    if nodes < queries:
        query = pad(query, (0, 0, 0, queries - nodes))
    run = compiled_kernel() if flex.compiled else kernel
    options = kernel_options(queries, query.shape[1], key.shape[1])
    found = run(query, key, value, attention_mask, scaling, softcap, s_aux is not None, options)
    if s_aux is not None:  # a sink is one more score under the softmax, with nothing behind it
        found, aux = found
        kept = torch.sigmoid(aux.lse.float() - s_aux.float().view(1, -1, 1))
        found = (found * kept[..., None]).to(query.dtype)
    return found[:, :, :nodes].transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)


# -- when it is used ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """Median seconds of a pass through the model's own attention and through FlexAttention."""

    model: float
    flex: float

    @property
    def faster(self) -> bool:
        return self.flex < self.model


class Flex:
    """FlexAttention for the passes of one model, where it is asked for or measured to be faster.

    Args:
        forced: every pass that needs a mask; otherwise a shape is tried once it has come up ``PATIENCE`` times behind a long context:
            compiled, compared with the model's own attention and timed in turns with it.
        tolerance: how far logits may differ, in parts of the largest.
        compiled: None compiles on CUDA only.
        clock: seconds; for tests.

    Attributes:
        passes: how many were made so, trials left out.
        calls: of the attention function.
        trials: what was measured, per shape (rows, queries, words of ancestors, span, whether it is a chain).
        refused: why no further shape is tried.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        *,
        forced: bool,
        tolerance: float,
        compiled: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.device, self.forced, self.tolerance, self._clock = device, forced, tolerance, clock
        self.compiled = device.type == "cuda" if compiled is None else compiled
        self.passes = self.calls = 0
        self.trials: dict[Shape, Trial] = {}
        self.refused: str | None = None
        self._half = model.dtype not in (torch.float32, torch.float64)
        self._seen: Counter[Shape] = Counter()
        configs = [vars(module).get("config") for module in model.modules()]
        self._configs = list({id(each): each for each in configs if isinstance(each, PreTrainedConfig)}.values())
        self._masks = MaskBuilder(model.config.get_text_config(), NAME, model.dtype, builder=NAME)

    def masks(self, tree: TokenTree, window: Window, positions: Tensor, cache: TreeCache) -> Any:
        """A block mask, or one per layer type, for ``cache`` that has entered the spanned ``window``."""
        return self._masks(tree_mask(tree, window, positions), cache)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """For one pass, the model's attention is :func:`attend`."""
        before = [config.__dict__["_attn_implementation_internal"] for config in self._configs]
        for config in self._configs:
            config.__dict__.update(_attn_implementation_internal=NAME, foredraft_flex=self)
        try:
            yield
        finally:
            for config, implementation in zip(self._configs, before):
                config.__dict__["_attn_implementation_internal"] = implementation
                del config.__dict__["foredraft_flex"]

    def run(self, tree: TokenTree, window: Window, model_pass: Pass, flex_pass: Pass, *, timed: bool) -> Tensor:
        """The logits of a pass, by whichever way is the faster for its shape; the model's own if it is none to be ``timed``."""
        if self.forced or (timed and self._wins(shape_of(tree, window), model_pass, flex_pass)):
            self.passes += 1
            return flex_pass()
        return model_pass()

    def _wins(self, shape: Shape, model_pass: Pass, flex_pass: Pass) -> bool:
        if shape not in self.trials:
            if self.refused is not None or shape[3] < WORTH or len(self.trials) >= TRIALS:
                return False
            self._seen[shape] += 1
            if self._seen[shape] < PATIENCE:
                return False
            trial = self._try(model_pass, flex_pass)
            if trial is None:
                return False
            self.trials[shape] = trial
        return self.trials[shape].faster

    def _try(self, model_pass: Pass, flex_pass: Pass) -> Trial | None:
        """Time one pass both ways, in turns; None, and the reason kept, if FlexAttention fails or computes something else."""
        try:
            self.refused = self.differs(flex_pass(), model_pass())
        except Exception as error:  # what a compiler raises has no common type, and the other way remains
            self.refused = failure(error)
        if self.refused is not None:
            return None
        seconds: dict[Pass, list[float]] = {model_pass: [], flex_pass: []}
        for _ in range(REPEATS):
            for each, taken in seconds.items():
                self._settle()
                began = self._clock()
                each()
                self._settle()
                taken.append(self._clock() - began)
        return Trial(*map(statistics.median, seconds.values()))

    def differs(self, found: Tensor, expected: Tensor) -> str | None:
        """By how much ``found`` ``[R, N, V]`` differs from ``expected``, if that is too much; NaN is.

        In half precision a quarter of the nodes may differ by more: experts are chosen by scores that rounding may reorder.
        """
        errors = (found.float() - expected.float()).abs().amax(-1).flatten() / expected.float().abs().max().clamp(min=1e-6)
        difference = float(errors.quantile(0.75 if self._half else 1.0, interpolation="lower"))
        if difference <= self.tolerance:
            return None
        return f"its logits differ from those of the model's own attention by {difference:.1e} of their scale"

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def failure(error: Exception) -> str:
    """The first line of ``error``; a compiler's goes on for pages."""
    return f"a pass through it failed with {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
