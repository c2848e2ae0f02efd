"""The one place that chooses how passes are made.

``auto`` follows measurements: on a CPU it uses packed weights or kernels, unless weights would be held twice; on a CUDA device recorded
passes; elsewhere the model as it is. FlexAttention and compiled layers are used on request only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from inspect import signature
from typing import TypeVar

import torch
from torch import Tensor, nn

from foredraft.backends import flex, graphs, native, packing, paged_attention, recorder
from foredraft.backends.base import Backend, Overrides
from foredraft.backends.compilation import Compilation
from foredraft.backends.compilation import refusal as compilation_refusal
from foredraft.backends.eager import Eager
from foredraft.backends.kernels import Kernels
from foredraft.backends.narrow import READ, bits_of, has_no_product, is_intx, is_quantised
from foredraft.backends.packing import HINTS
from foredraft.backends.paged_attention import Paged, attention_test
from foredraft.backends.products import NATIVE
from foredraft.backends.rollback import Rollback
from foredraft.backends.self_test import Trial, self_test, some_text
from foredraft.caching import warn_once
from foredraft.errors import ConfigurationError, UnsupportedModelError
from foredraft.models.encoder_decoder import plain_arguments
from foredraft.models.paged_cache import PagedCache
from foredraft.models.support import ModelFacts, describe
from foredraft.tree import TokenTree

EXECUTIONS = ("auto", "eager", "packed", "native", "compiled", "graphs")
ATTENTIONS = ("auto", "model", "flex")
SAMPLE = 7  # tokens of the pass that packed weights are compared on
ENCODER = "the model has an encoder, and passes of such models are packed or eager"
OTHER_WAYS = {
    "compiled": "compiled layers copy keys and values from their pages in every pass",
    "graphs": "recorded passes copy keys and values from their pages",
    "flex": "FlexAttention reads pages in place, and passes that need no mask copy keys and values from their pages",
}
UNPROVEN = "no report from a GPU shows that it is equal and faster there; {} uses it all the same"

Way = TypeVar("Way", bound=Backend)


def choose(facts: ModelFacts, *, execution: str, attention: str, owned: bool, test: bool, chunk: int, paged: bool) -> Backend:
    """The backend for a model.

    Args:
        execution, attention, owned, test, paged: as in :class:`~foredraft.target.Target`.
        chunk: most tokens of text that a model is given in one pass.

    Returns:
        A backend whose ``facts`` say whether the model takes trees, and whose ``reasons`` say why other ways are not in use.

    Raises:
        ConfigurationError: an unknown name, or a way that was asked for and is not available.
        UnsupportedModelError: the model fails the self-test, or has weights that are not multiplied on a CPU.
    """
    for what, asked, known in (("execution", execution, EXECUTIONS), ("attention", attention, ATTENTIONS)):
        if asked not in known:
            raise ConfigurationError(f"unknown {what} {asked!r}; choose {', '.join(known)}")
    reasons: dict[str, str] = {}
    why_no_flex = ENCODER if facts.sourced else flex.refusal(facts, execution)
    if facts.sourced and execution in ("compiled", "graphs"):
        raise ConfigurationError(f"passes of {describe(facts.model)} cannot be {execution}: {ENCODER}; use execution='auto'")
    if attention == "flex" and why_no_flex is not None:
        raise ConfigurationError(f"{describe(facts.model)} cannot attend through FlexAttention: {why_no_flex}; use attention='auto'")
    if (odd := next((each for each in facts.model.parameters() if has_no_product(each)), None)) is not None:
        raise UnsupportedModelError(
            f"{describe(facts.model)} has weights in torchao's {type(odd).__name__}, which no CPU multiplies. Foredraft reads {READ}"
        )
    why_not_recorded = ENCODER if facts.sourced else graphs.refusal(facts)
    may_record = execution in ("auto", "compiled") and attention != "flex" and why_not_recorded is None
    recorded = execution == "graphs" or may_record
    way = "graphs" if recorded and execution == "auto" else execution
    pages = _pages_of_other_ways(facts, way, attention, test, reasons) if paged else None
    overrides = _pack(facts, execution, attention, owned, reasons) or _compile(facts, execution, reasons, pages)
    with ExitStack() as undo:  # a model that is refused, or after Ctrl-C, is left as it was
        if overrides is not None:
            undo.callback(overrides.undo)
        backend: Backend = _over_pages(Eager(facts, overrides, reasons), pages)
        if facts.chains_only is not None and not facts.sourced:
            backend = Rollback(facts, overrides, reasons, chunk)
        if test:
            with nullcontext() if execution == "compiled" else packing.one_thread(facts.model):  # code is compiled for a number of threads
                backend.facts = facts = replace(facts, chains_only=self_test(backend))
        if recorded and (overrides is None or execution == "compiled"):
            backend = _record(facts, execution, test, reasons, pages, overrides) or backend
            if pages is not None and type(backend) is Eager:
                reasons["paged_attention"] = "its passes are not recorded, and copy keys and values from their pages"
        elif execution in ("auto", "compiled"):
            reasons["graphs"] = why_not_recorded or "attention='flex' was asked for"
        else:
            reasons["graphs"] = f"execution={execution!r} was asked for"
        if attention == "flex":
            flexed = _over_pages(flex.Flexed(facts, reasons), pages)
            if (why := flex.attention_test(flexed) if test else facts.chains_only) is not None:
                raise ConfigurationError(f"{describe(facts.model)} cannot attend through FlexAttention: {why}; use attention='auto'")
            backend = flexed
        else:
            asked_for = "attention='model' was asked for" if attention == "model" else None
            reasons["flex"] = asked_for or why_no_flex or UNPROVEN.format("attention='flex'")
        _page(backend, backend.name if recorded else execution, attention, test, paged)
        if isinstance(backend, Rollback):
            backend.measure()
        undo.pop_all()
    backend.passes = 0
    return backend


def _pack(facts: ModelFacts, execution: str, attention: str, owned: bool, reasons: dict[str, str]) -> Overrides | None:
    """Packed weights, if they are asked for or can be had without holding weights twice."""
    if execution not in ("auto", "packed", "native"):
        reasons["packed"] = f"execution={execution!r} was asked for"
    elif attention == "flex":
        reasons["packed"] = "attention='flex' was asked for, and it is not used with packed weights"
    elif execution == "auto" and not owned:
        reasons["packed"] = "the model was handed in, and packed weights would be held beside its own; execution='native' accepts that"
    model = facts.model
    if "packed" in reasons:
        if execution == "auto" and facts.device.type == "cpu":
            _warn_of_widening(model, reasons)
        return None
    hints = _hints(facts, execution, reasons) if facts.device.type == "cpu" else HINTS  # compiles the kernels, which a GPU does not need
    why = packing.refusal(model, hints)
    kernels = None
    if why is None:
        try:
            kernels = Kernels(model, sample_of(facts), owned=owned, hints=hints)
        except native.Unavailable as error:  # those for a part in another dtype, such as a router in float32
            why = str(error)
    if kernels is not None and kernels.refused is None:
        if kernels.unfused is not None:
            reasons.setdefault("fused", kernels.unfused)
        return kernels
    reasons["packed"] = why or (kernels and kernels.refused) or ""
    if execution != "auto":
        raise ConfigurationError(f"{describe(model)} cannot be packed: {reasons['packed']}; use execution='auto'")
    _warn_of_widening(model, reasons)
    return None


def _warn_of_widening(model: nn.Module, reasons: dict[str, str]) -> None:
    """Say that torch multiplies quantised weights, if it does."""
    weights = [each for each in model.parameters() if is_quantised(each)]
    if not weights:
        return
    why = reasons.get("fused", reasons["packed"])
    if "fused" in reasons and model.dtype == torch.float16 and native.refusal(torch.bfloat16) is None:
        why += "; load the model with dtype='bfloat16'"
    gained = "no time" + ", and int4 no memory beside int8" * any(is_intx(each) and bits_of(each) == 4 for each in weights)
    warn_once(f"torch widens the quantized weights of {describe(model)} in every product, which saves {gained}: {why}")


def _page(backend: Backend, execution: str, attention: str, test: bool, paged: bool) -> None:
    """Keys and values in pages, if the model computes the same with them."""
    if isinstance(backend.cache, PagedCache) or isinstance(backend, Rollback) or "pages" in backend.reasons:
        return
    found = paged_attention.refusal(backend.facts, execution, attention, paged) or _compared(backend, test)
    if isinstance(found, str):
        backend.reasons["pages"] = found
        return
    found.use(backend)
    if found.handed is not None:
        backend.reasons["paged_attention"] = found.price


def _pages_of_other_ways(facts: ModelFacts, execution: str, attention: str, test: bool, reasons: dict[str, str]) -> Paged | None:
    """How keys and values lie in pages where passes are compiled, recorded or through FlexAttention, which need to know it before they are
    made. None if they do not; ``reasons`` then says why."""
    way = next((each for each in (execution, attention) if each in OTHER_WAYS), None)
    if way is None:
        return None
    found = paged_attention.refusal(facts, execution, attention, True) or _compared(Eager(facts, None, reasons), test, OTHER_WAYS[way])
    if isinstance(found, str):
        reasons["pages"] = found
        return None
    reasons["paged_attention"] = OTHER_WAYS[way]
    return found


def _compared(backend: Backend, test: bool, handed: str | None = None) -> Paged | str:
    """As :func:`attention_test`."""
    if not test:
        return "there is no comparison with the model's own attention (self_test=False)"
    with packing.one_thread(backend.facts.model):
        return attention_test(backend, handed)


def _over_pages(backend: Way, pages: Paged | None) -> Way:
    if pages is not None:
        pages.use(backend)
    return backend


def _hints(facts: ModelFacts, execution: str, reasons: dict[str, str]) -> tuple[int, ...]:
    """The layouts to choose among."""
    missing = native.refusal(facts.model.dtype)
    if missing is not None:
        reasons["fused"] = f"the native kernels cannot be used: {missing}"
    if execution == "native":
        if missing is not None:
            raise ConfigurationError(f"the native kernels cannot be used: {missing}; use execution='auto'")
        return (NATIVE,)
    return HINTS if execution == "packed" or missing is not None else (*HINTS, NATIVE)


def sample_of(facts: ModelFacts) -> Callable[[], Tensor]:
    """A pass over a few tokens, without a cache, that returns the logits. Where the model has an encoder, its states are given.

    With rotary positions they are the last ones that the model was made for: some models scale queries from some position on.
    """
    ids = torch.tensor([some_text(facts, SAMPLE, seed=1000)], device=facts.device)  # the first ones of a vocabulary may never occur
    given = plain_arguments(facts.model, ids)
    count, end = ids.shape[1], facts.trained
    if facts.context is None and end is not None and end > count and "position_ids" in signature(facts.model.forward).parameters:
        given["position_ids"] = torch.arange(end - count, end, device=facts.device)[None]

    @torch.inference_mode()
    def sample() -> Tensor:
        return facts.model(**given, use_cache=False).logits

    return sample


def _compile(facts: ModelFacts, execution: str, reasons: dict[str, str], pages: Paged | None) -> Overrides | None:
    if execution != "compiled":
        return None
    why = compilation_refusal(facts.model, facts.chains_only)
    if why is None:
        compilation = Compilation(facts.model, lambda: every_kind(_over_pages(Eager(facts, None, reasons), pages)))
        why = compilation.refused
    if why is not None:
        raise ConfigurationError(f"{describe(facts.model)} cannot be compiled: {why}; use execution='auto'")
    return compilation


@torch.inference_mode()
def every_kind(backend: Backend) -> list[Tensor]:
    """The logits of one pass of each kind that is compiled: one node and several; one row, rows of equal lengths, and of unequal ones."""
    vocab_size, found = backend.facts.vocab_size, []
    for lengths in ((4,), (4, 4), (4, 2)):
        trial = Trial(backend, [[(3 + row + i) % vocab_size for i in range(length)] for row, length in enumerate(lengths)])
        for nodes in (1, 3):
            tokens = torch.arange(7, 7 + nodes, device=backend.facts.device).expand(len(lengths), -1) % vocab_size
            found.append(trial.score(TokenTree.from_chain(tokens)))
        backend.release()
    return found


def _record(
    facts: ModelFacts, execution: str, test: bool, reasons: dict[str, str], pages: Paged | None, overrides: Overrides | None
) -> Backend | None:
    """Recorded passes, if they can be had."""
    why, made = graphs.refusal(facts, overrides), recorder.recorder_for(facts.device)  # the self-test may have found something
    if why is None and made is not None:
        recorded = graphs.Recorded(facts, reasons, made, pages, overrides)
        why = graphs.graph_test(recorded) if test else None
        if why is None:
            return recorded
    if execution == "graphs":
        raise ConfigurationError(f"passes of {describe(facts.model)} cannot be recorded: {why}; use execution='auto'")
    reasons["graphs"] = str(why)
    return None
