"""Passes that are replayed from recordings, so that a pass costs the host one launch and not hundreds.

A recording is made for a bucket: rows, nodes and a span of the cache, of which the first two are padded with filler that the masks hide.
A bucket is recorded when it has come up before, and checked against the eager pass when it is recorded and once more with other inputs:
what was baked in by mistake shows then. Whatever goes wrong, the eager pass is what remains, and :attr:`Graphs.refused` says why.

Prompts, and passes in which the cache grows, are eager. When the cache's buffers have moved, recordings over the old ones are dropped.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from foredraft.backends import recorder as recorders
from foredraft.backends.flex import failure
from foredraft.backends.grouped import Grouped
from foredraft.backends.recorder import Outputs, Recorder
from foredraft.backends.static_pass import Bucket, PassFrame, StaticPass
from foredraft.models.cache import TreeCache, Window
from foredraft.tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foredraft.models.features import Features
    from foredraft.target.target import Target

PATIENCE = 2  # times that a bucket comes up before it is recorded
TRIALS = 2  # replays of a recording that are compared with the eager pass
MOST = 48  # recordings kept at most
TOKENS = 512  # of a recorded pass at most; beyond, arithmetic takes longer than launching it
SMALLEST = 32  # context in which the test has room
TREE = (-1, 0, 0, 1, 1, 2)  # parents
SPAN = 256  # shortest span; the others are its doubles
STEPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)  # nodes; beyond, multiples of 32
ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class Frame(Protocol):
    """Static inputs and a function over them."""

    def run(self) -> Outputs: ...


@dataclass(eq=False)
class Recording:
    """A frame, what it reads, what replays it and where that leaves its outputs; ``trials`` counts the replays that were compared."""

    frame: Any
    inputs: list[Tensor]
    replay: Callable[[], Any]
    outputs: Outputs
    trials: int = 0


class Graphs:
    """The recordings of one target.

    Args:
        model, cache, context: as in :class:`~foredraft.backends.eager.TreeExecution`.
        tolerance: how far logits may differ from those of an eager pass, in parts of the largest.
        owner: whose cache it is; asked to give up what filler overwrites, and to read its texts again after a recording went wrong.

    Attributes:
        refused: why nothing is replayed any more; None while all is well.
        ungrouped: why heads that share keys have them repeated; None if they have not.
        captures, replays: how many there were.
    """

    def __init__(
        self, model: PreTrainedModel, cache: TreeCache, context: int | None, recorder: Recorder, *, tolerance: float, owner: Target
    ):
        self.model, self.cache, self.context, self.recorder = model, cache, context, recorder
        self.tolerance, self.owner = tolerance, owner
        self.refused: str | None = None
        self.ungrouped: str | None = None
        self.passes = StaticPass(model, cache, context, Grouped.of(model))
        self.captures = self.replays = 0
        self._half = model.dtype not in (torch.float32, torch.float64)
        self._kept: OrderedDict[Hashable, Recording] = OrderedDict()
        self._seen: Counter[Hashable] = Counter()
        self._buffers: object = None
        self._ready = self._paused = False
        self._hooks: list[Any] = []
        self.follow()

    @staticmethod
    def of(model: PreTrainedModel, cache: TreeCache, context: int | None, *, tolerance: float, owner: Target) -> Graphs | None:
        """None where nothing can be recorded."""
        recorder = recorders.recorder_for(owner.device)
        return None if recorder is None else Graphs(model, cache, context, recorder, tolerance=tolerance, owner=owner)

    def __len__(self) -> int:
        return len(self._kept)

    # -- passes ---------------------------------------------------------------------------------------------------------

    def run(self, tree: TokenTree, window: Window, tokens: Tensor, eager: Callable[[], Outputs]) -> Outputs:
        """What ``eager`` gives for a pass over ``tokens``, by a replay or by itself: ``[R, N, V]`` logits, and hidden states where some are
        wanted; tensors of the caller's own."""
        self.cache.enter(window)
        bucket = self.bucket(window) if self.ready else None
        if bucket is None:
            return eager()

        def load(frame: PassFrame) -> None:
            frame.load(tree, window, tokens)

        found = self.recorded(bucket, lambda: PassFrame(self.passes, bucket, tokens.device), load, bucket.rows, bucket.span - bucket.total)
        if found is None:
            return eager()
        found.replay()
        outputs = tuple(each[: window.rows, : window.nodes].clone() for each in found.outputs)  # the next replay overwrites them
        if found.trials >= TRIALS:
            self.replays += 1
            return outputs
        expected = eager()
        found.trials += 1
        reasons = [self.differs(ours, theirs, what) for ours, theirs, what in zip(outputs, expected, ("logits", "hidden states"))]
        if (why := next((each for each in reasons if each), None)) is not None:
            self.fail(why)
            if window.before == 0:
                self.owner.read_again()
                expected = eager()
        return expected

    def bucket(self, window: Window) -> Bucket | None:
        """What a pass is recorded as; None if it is not to be."""
        nodes = rounded(window.nodes, STEPS)
        rows = self.rows(window.rows)
        before = window.before
        if rows * nodes > TOKENS or window.first:
            return None
        for padded in (nodes, window.nodes):  # without filler where that would not fit
            total = rounded(before + padded, STEPS) if before else padded
            span = self.span(max(window.starts) - before + total)
            if span is not None:
                return Bucket(rows, padded, total, span)
        return None

    def rows(self, rows: int) -> int:
        """Rows of the bucket for ``rows``, as far as the buffers reach."""
        return min(rounded(rows, ROWS), max(rows, self.cache.row_capacity))

    def roomy(self, tokens: int) -> int:
        """A capacity for ``tokens`` that the next calls are likely to fit into as well: buffers that move cost every recording."""
        span = SPAN
        while span < tokens:
            span *= 2
        return span

    def span(self, end: int) -> int | None:
        """The span of a pass whose last slot is ``end`` - 1; None where the cache has no room for it yet."""
        if end > self.cache.capacity:
            return None
        return min(self.roomy(end), self.cache.capacity)

    @property
    def ready(self) -> bool:
        """All buffers are there in the size that passes may ask for, and nobody looks at the passes. Recordings over buffers that are
        gone are dropped here."""
        cache = self.cache
        buffers = (cache.allocations, cache.capacity, cache.row_capacity, len(cache.layers))
        if buffers != self._buffers:
            self.drop()
            written = cache.written
            self._ready = bool(written) and all(
                len(layer.keys) >= cache.row_capacity and layer.keys.shape[2] >= cache.capacity for layer in written
            )
            self._buffers = buffers
        return self._ready and not self._paused and self.refused is None and torch.is_inference_mode_enabled() and not any(self._hooks)

    # -- recordings -----------------------------------------------------------------------------------------------------

    def recorded(self, key: Hashable, make: Callable[[], Any], load: Callable[[Any], None], rows: int, filler: int) -> Recording | None:
        """The recording of ``key``, loaded and ready to be replayed; None before its time and where it fails. To be asked where
        :attr:`ready` was just seen to be True.

        Args:
            make, load: a :class:`Frame`, and what copies the inputs of this pass into it.
            rows: of the cache that it writes to; those beyond the live ones lose what they hold from slot ``filler`` on.
        """
        if rows > len(self.cache.lengths):
            self.owner.give_up(rows, filler)
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            load(found.frame)
            return found
        self._seen[key] += 1
        if self._seen[key] < PATIENCE:
            return None
        frame = make()
        load(frame)
        try:
            found = Recording(frame, recorders.inputs_of(frame.run), *self.recorder.capture(frame.run))
        except Exception as error:  # what a device or a model raises when it is recorded has no common type
            self.fail(failure(error))
            return None
        self.captures += 1
        self._kept[key] = found
        while len(self._kept) > MOST:
            gone, _ = self._kept.popitem(last=False)
            del self._seen[gone]
        return found

    def fail(self, why: str) -> None:
        """Without attention of our own at first; then without recordings."""
        self.drop()
        self.recorder.reset()
        if self.passes.grouped is not None:
            self.ungrouped, self.passes.grouped = why, None
        else:
            self.refused = why

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, every pass is eager."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def follow(self) -> None:
        """The model's modules or weights are others now."""
        self.drop()
        self._hooks = [hooks for module in self.model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)]

    @property
    def settled(self) -> bool:
        """There are recordings, and all of them have been compared as often as they have to be."""
        return bool(self._kept) and all(each.trials >= TRIALS for each in self._kept.values())

    def drop(self) -> None:
        """Forget every recording, and the buffers that they hold."""
        if self._kept:
            self._kept.clear()
            self.recorder.reset()
        self._seen.clear()
        self._buffers = None

    def read(self, features: Features | None) -> None:
        """Passes are to hand out these hidden states from now on; recordings that do not are dropped."""
        self.drop()
        self.passes.features = features

    def differs(self, found: Tensor, expected: Tensor, what: str = "logits") -> str | None:
        """By how much ``found`` ``[R, N, V]`` differs from ``expected``, if that is too much; NaN is.

        In half precision a quarter of the nodes may differ by more: experts are chosen by scores that rounding may reorder.
        """
        errors = (found.float() - expected.float()).abs().amax(-1).flatten() / expected.float().abs().max().clamp(min=1e-6)
        difference = float(errors.quantile(0.75 if self._half else 1.0, interpolation="lower"))
        return None if difference <= self.tolerance else f"its {what} differ from those of an eager pass by {difference:.1e} of their scale"


def rounded(count: int, steps: Sequence[int]) -> int:
    """The least of ``steps`` that ``count`` fits into; beyond them, multiples of 32."""
    return next((step for step in steps if count <= step), -(-count // 32) * 32)


def refusal(model: PreTrainedModel, device: torch.device, chains_only: str | None, attention: str) -> str | None:
    """Why the passes of ``model`` cannot be recorded, or None."""
    if chains_only is not None:
        return f"it keeps a cache of its own ({chains_only})"
    if recorders.recorder_for(device) is None:
        return f"graphs are recorded on a CUDA device, and the model is on {device.type}"
    places = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if places != {device} or any(hasattr(module, "_hf_hook") for module in model.modules()):
        return "it lies on several devices, or hooks fetch its weights"
    if any("forward" in vars(module) for module in model.modules()):
        return "its layers have overrides of their own already (another Speculator)"
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return "hooks look at its passes, and a replay calls none"
    if attention == "flex":
        return "attention='flex' was asked for, whose masks are made by the host"
    return None


@torch.inference_mode()
def graph_test(target: Target) -> str | None:
    """Record a tree, a chain and a single token behind prefixes of unequal length, and replay them behind others.

    Returns:
        Why passes are not to be replayed, None if their logits are those of eager passes.
    """
    graphs = target.graphs
    assert graphs is not None
    if target.context is not None and target.context < SMALLEST:
        return f"a context of {target.context} tokens has no room for the test"
    texts = [[(row + 3 * place * place) % target.vocab_size for place in range(12 - 8 * row)] for row in range(2)]
    parents = torch.tensor([TREE] * 2, device=target.device)
    target.open(texts)
    try:
        target.prefill(texts, first=0)
        for attempt in range(2 * (PATIENCE + TRIALS)):  # twice: once more without grouped attention, should that be what fails
            nodes = torch.arange(2 * len(TREE), device=target.device).view(2, -1) * (attempt + 2) % target.vocab_size
            for tree in (TokenTree(nodes, parents), TokenTree.from_chain(nodes[:, :4]), TokenTree.root(nodes[:, 0])):
                target.score(tree)
            target.commit(None, (1, 0))
            texts[0].append(int(nodes[0, 0]))
            if graphs.refused is not None or graphs.settled:
                break
        return graphs.refused
    finally:
        target.release()
