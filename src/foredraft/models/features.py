"""Hidden states of the target, caught while it runs, for drafters that read them.

They are numbered as ``transformers`` numbers them in ``output_hidden_states``: 0 are the embeddings, i is the output of decoder layer i,
and :data:`LAST` is what the LM head reads, after the final norm (the number of the last layer says the same, as it does there).

A pass over a few tokens finds once where each hidden state is in a model: the module whose output, or whose input, is the very
tensor that transformers returns under that number. From then on, a hook on that module keeps it, during a pass only. Models that are one
call of a kernel (``kernel_pass.py``) write them out themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.device import to_device
from foredraft.errors import ConfigurationError, UnsupportedModelError
from foredraft.models.encoder_decoder import plain_arguments, uncounted
from foredraft.models.support import describe

LAST = -1
INSTALLED = "_output_capturing_hooks_installed"  # transformers' mark on models whose layers it watches
CAPTURING = "transformers.utils.output_capturing"  # where its hooks come from


@dataclass(frozen=True)
class Tap:
    """Where a hidden state is found: what ``module`` returns (``after``) or is called with, in its call number ``call`` of a pass."""

    module: nn.Module
    after: bool
    call: int
    width: int


class Features:
    """The hidden states that passes return.

    Args:
        numbers: which, in the order in which they are concatenated.
        whole: at every token of a prompt, not at its last one only.
        taps: where they are found.
        device, dtype: of what is returned.
    """

    def __init__(self, numbers: Sequence[int], *, whole: bool, taps: Sequence[Tap], device: torch.device, dtype: torch.dtype):
        self.numbers, self.whole, self.taps = tuple(numbers), whole, tuple(taps)
        self.device, self.dtype = device, dtype
        self.width = sum(tap.width for tap in taps)

    @contextmanager
    def catching(self) -> Iterator[Caught]:
        """Inside, one pass of the model leaves its hidden states in what this yields."""
        caught = Caught(self)
        handles = [
            tap.module.register_forward_hook(caught.keep_output)
            if tap.after
            else tap.module.register_forward_pre_hook(caught.keep_input, with_kwargs=True)
            for tap in {(tap.module, tap.after): tap for tap in self.taps}.values()
        ]
        try:
            yield caught
        finally:
            for handle in handles:
                handle.remove()

    def read(self, model: PreTrainedModel, ids: Tensor, source: Mapping[str, Tensor] = MappingProxyType({})) -> tuple[Tensor, Tensor]:
        """``[B, S, F, d]`` at every token of ``ids`` ``[B, S]``, and the logits ``[B, S, V]``. Padding must be at the end of texts, where
        no token sees it. ``source`` are the arguments of the encoder, if there is one."""
        given: dict[str, Any] = {"input_ids": ids}
        if source:
            read: Any = model.get_encoder()(**source, return_dict=True)
            given = {"decoder_input_ids": ids, "encoder_outputs": read, "attention_mask": source.get("attention_mask")}
        with self.catching() as caught, uncounted(model.get_decoder()) if source else nullcontext():
            logits: Tensor = model(**given, use_cache=False).logits
        return caught.hidden().view(*ids.shape, len(self.taps), -1) if self.taps else logits[:, :, None, :0], logits


class Caught:
    """The hidden states of one pass, as the hooks saw them."""

    def __init__(self, features: Features):
        self.features = features
        self._seen: dict[tuple[nn.Module, bool], list[Tensor]] = {}

    def keep_output(self, module: nn.Module, given: Any, output: Any) -> None:
        self._seen.setdefault((module, True), []).append(first_tensor(output))

    def keep_input(self, module: nn.Module, given: Any, named: Any) -> None:
        self._seen.setdefault((module, False), []).append(first_tensor(given, named))

    def hidden(self, keep: Sequence[int] | None = None) -> Tensor:
        """``[R, N, F * d]``; of node ``keep[r]`` of each row alone, ``[R, 1, F * d]``."""
        features = self.features
        states = [self._seen[tap.module, tap.after][tap.call] for tap in features.taps]
        if keep is not None:
            states = [picked(state, keep) for state in states]
        states = [state.to(device=features.device, dtype=features.dtype) for state in states]
        return torch.cat(states, -1) if len(states) > 1 else states[0]


class PromptStates:
    """The hidden states of prompts that are read in chunks."""

    def __init__(self, rows: int, *, whole: bool):
        self.whole = whole
        self._chunks: list[list[Tensor]] = [[] for _ in range(rows)]

    def add(self, hidden: Tensor, counts: Sequence[int]) -> None:
        """Of one chunk: ``hidden`` ``[R, N, F * d]`` the first ``counts[r]`` of them real, or ``[R, 1, F * d]`` at the last one."""
        for chunks, line, count in zip(self._chunks, hidden, counts):
            if not self.whole:
                chunks.clear()
            chunks.append(line[:count])

    def rows(self) -> list[Tensor]:
        """Per row ``[L, F * d]``, or ``[1, F * d]``."""
        return [chunks[0] if len(chunks) == 1 else torch.cat(chunks) for chunks in self._chunks]


def picked(states: Tensor, keep: Sequence[int]) -> Tensor:
    """``[R, 1, d]`` of ``states`` ``[R, N, d]`` at node ``keep[r]``."""
    if all(node == keep[0] for node in keep):
        return states[:, keep[0] : keep[0] + 1]
    rows = torch.arange(len(keep), device=states.device)
    return states[rows, to_device(list(keep), states.device)][:, None]


def first_tensor(given: Any, named: Any = None) -> Any:
    """What a module was called with, or returned, first: decoder layers and decoders put the hidden states there."""
    if isinstance(given, Tensor):
        return given
    if named and not given:
        return named.get("hidden_states")
    try:
        return given[0]
    except (TypeError, KeyError, IndexError):
        return None


# -- where they are found ---------------------------------------------------------------------------------------------------


def features_of(
    model: PreTrainedModel, numbers: Sequence[int], taps: Sequence[Tap | None], *, whole: bool, device: torch.device
) -> Features:
    """The hidden states ``numbers``, by what :func:`taps_of` found.

    Raises:
        ConfigurationError: a number that the model has no hidden state for.
        UnsupportedModelError: a hidden state that cannot be caught, or is no vector of the model's hidden size per token.
    """
    last = len(taps) - 1
    if wrong := [number for number in numbers if not LAST <= number <= last]:
        raise ConfigurationError(
            f"{describe(model)} has hidden states 0 to {last}, and {LAST} for the last one; {wrong[0]} is not one of them"
        )
    plain = [LAST if number == last else number for number in numbers]
    size, found = model.config.get_text_config().hidden_size, []
    for number in plain:
        tap = taps[number]
        if tap is None or tap.width != size:
            what = "does not come by any module of it" if tap is None else f"has {tap.width} numbers per token, not {size}"
            other = "the last one alone, such as medusa" if taps[LAST] and number != LAST else "none"
            raise UnsupportedModelError(
                f"hidden state {number} of {describe(model)} cannot be passed to a drafter: it {what}; use a drafter that reads {other}"
            )
        found.append(tap)
    return Features(plain, whole=whole, taps=found, device=device, dtype=model.dtype)


def features_of_texts(model: PreTrainedModel, numbers: Sequence[int]) -> Features:
    """As :func:`features_of`, at every token; the model makes a pass to find them."""
    few = torch.arange(3, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    return features_of(model, numbers, taps_of(model, few), whole=True, device=model.device)


@torch.inference_mode()
def taps_of(model: PreTrainedModel, ids: Tensor) -> list[Tap | None]:
    """Where each hidden state of ``model`` is found in a pass over ``ids`` ``[1, n]``; None for one that no module has.

    Raises:
        UnsupportedModelError: the model returns no hidden states.
    """
    names, given = {module: name for name, module in model.named_modules() if name}, plain_arguments(model, ids)
    seen: list[tuple[Tensor, nn.Module, bool, int]] = []
    calls: Counter[tuple[nn.Module, bool]] = Counter()

    def note(tensor: Any, module: nn.Module, after: bool) -> None:
        if isinstance(tensor, Tensor) and tensor.shape[:2] == ids.shape and tensor.ndim == 3:
            seen.append((tensor, module, after, calls[module, after]))
        calls[module, after] += 1

    handles = []
    for module in names:
        handles.append(module.register_forward_hook(lambda module, given, output: note(first_tensor(output), module, True)))
        handles.append(
            module.register_forward_pre_hook(lambda module, given, named: note(first_tensor(given, named), module, False), with_kwargs=True)
        )
    try:
        output = model(**given, use_cache=False, output_hidden_states=True)
    finally:
        for handle in handles:
            handle.remove()
        stop_watching(model, anywhere=True)
    sourced = bool(model.config.is_encoder_decoder)
    states = getattr(output, "decoder_hidden_states" if sourced else "hidden_states", None)
    if not states:
        raise UnsupportedModelError(f"{describe(model)} returns no hidden states, which the drafter reads; use a drafter that reads none")

    last = [tensor for tensor, module, after, _ in seen if module is model.base_model and after]
    if states[-1].ndim != 3 and last:  # streams, of a model that joins them after its last layer
        states = (*states[:-1], last[-1])
    read = [tensor for tensor, module, after, _ in seen if module is model.get_output_embeddings() and not after]
    if sourced and not torch.equal(states[-1], read[-1]):  # T5 scales it for a tied LM head
        states = (*states[:-1], read[-1])

    def outermost(state: Tensor) -> Tap | None:
        """The outermost module: inner ones may not be called if a layer is a kernel, or compiled."""
        found = [(names[module].count("."), not after, module, call) for tensor, module, after, call in seen if tensor is state]
        if not found:
            return None
        _, before, module, call = min(found, key=lambda each: each[:2])
        return Tap(module, not before, call, state.shape[-1])

    return [outermost(state) for state in states]


def stop_watching(model: PreTrainedModel, *, anywhere: bool = False) -> None:
    """Remove the hooks that transformers left on the layers of ``model`` when it was asked for hidden states: they stay for good, do
    nothing by themselves, and would keep passes off the kernels and recordings, which call no hooks. It hooks the layers again when it
    is asked again. ``anywhere``: also those that only a model inside was asked for."""
    if not anywhere and not any(INSTALLED in vars(each) for each in (model, model.base_model)):
        return
    for module in model.modules():
        for key in [key for key, hook in module._forward_hooks.items() if getattr(hook, "__module__", None) == CAPTURING]:
            del module._forward_hooks[key]
        vars(module).pop(INSTALLED, None)
