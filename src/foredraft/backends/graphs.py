"""Passes from recordings, so that a pass costs the host one launch and not hundreds.

A recording is made for a bucket: rows, nodes and a span of the cache, of which the first two are padded with filler that the masks hide.
A bucket is recorded when it comes up for the second time. Its first runs are compared with eager passes: the second comparison shows an
input that was recorded as a constant by mistake. A caller gets an :class:`Outcome`, and makes an eager pass if there is no recording.

Prompts, and passes in which the cache grows, are eager. When the cache's buffers have moved, recordings over the old ones are dropped.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foredraft.backends import recorder as recorders
from foredraft.backends.base import ForwardPass, Overrides, PassOutput, differs, failure
from foredraft.backends.eager import Eager
from foredraft.backends.paged_attention import Paged
from foredraft.backends.recorder import CudaRecorder, Outputs
from foredraft.backends.self_test import SMALLEST, Trial, some_text
from foredraft.backends.static_pass import Bucket, PassFrame, StaticPass
from foredraft.models.cache import TreeCache, Window
from foredraft.models.changes import hooks_of
from foredraft.models.features import Features
from foredraft.models.paged_cache import PagedCache
from foredraft.models.support import ModelFacts
from foredraft.tree import TokenTree

PATIENCE = 2  # times that a bucket comes up before it is recorded
TRIALS = 2  # runs of a recording that are compared with the eager pass
MOST = 48  # recordings kept at most
FULL = 2  # times that memory may be too short for a recording or its comparison; then it is not tried again
TOKENS = 512  # of a recorded pass at most; beyond, arithmetic takes longer than launching it
SPAN = 512  # shortest span; the others are its doubles up to LONG, and multiples of that
LONG = 2048
STEPS = (1, 4, 8, 16, 32)  # nodes; beyond, multiples of 32. Few: a recording takes as long as dozens of passes, and filler next to nothing
ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(eq=False)
class Recording:
    """A ``frame``, the tensors that it reads, the function that replays it, and its output tensors; ``trials`` counts the runs that were
    compared.

    A frame has static inputs, a function over them, ``run()``, and ``cut(outputs)``, which cuts what was asked for out of the outputs
    for a whole bucket.
    """

    frame: Any
    inputs: list[torch.Tensor]
    play: Callable[[], Any]
    outputs: Outputs
    trials: int = 0


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of asking for a replay.

    Attributes:
        outputs: tensors that the caller owns; None if nothing was replayed.
        frame: what was played.
        trial: the outputs are to be compared with those of an eager pass first (:meth:`Recordings.refuse` if they differ). The cache is
            as it was before.
    """

    outputs: Outputs | None = None
    frame: Any = None
    trial: bool = False


class Recordings:
    """The recordings over one cache.

    Args:
        facts, cache, reasons: of the backend whose passes are recorded.
        recorder: makes them.

    Attributes:
        captures, replays: how many recordings were made, and how often one was played, trials left out.
        settling: how often something was asked for that is not ready to be played: it is to be recorded, or is compared.
    """

    def __init__(self, facts: ModelFacts, cache: TreeCache, reasons: dict[str, str], recorder: CudaRecorder):
        self.facts, self.cache, self.reasons, self.recorder = facts, cache, reasons, recorder
        self.passes = StaticPass(facts, cache)
        self.captures = self.replays = self.settling = 0
        self._kept: OrderedDict[Hashable, Recording] = OrderedDict()
        self._seen: Counter[Hashable] = Counter()
        self._full: Counter[Hashable] = Counter()  # how often memory was too short
        self._buffers: object = None
        self._ready = False
        self._hooks = hooks_of(facts.model)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def refused(self) -> str | None:
        """Why nothing is played any more; None while all is well."""
        return self.reasons.get("graphs")

    @property
    def settled(self) -> bool:
        """There are recordings, and all of them have been compared often enough."""
        return bool(self._kept) and all(each.trials >= TRIALS for each in self._kept.values())

    @property
    def ready(self) -> bool:
        """All buffers have the size that passes may ask for, and there are no hooks. Drops recordings over buffers that no longer
        exist."""
        cache = self.cache
        buffers = (cache.allocations, cache.capacity, cache.row_capacity, len(cache.layers))
        if buffers != self._buffers:
            self.drop()
            written = cache.written
            self._ready = bool(written) and all(map(cache.fits, written))
            self._buffers = buffers
        return self._ready and self.refused is None and torch.is_inference_mode_enabled() and not any(self._hooks)

    def play(self, key: Hashable, make: Callable[[], Any], load: Callable[[Any], None], *, rows: int, span: int, filler: int) -> Outcome:
        """Replay the recording of ``key``; make it first if ``key`` has come up often enough.

        Args:
            make, load: makes a frame, and copies the inputs of this pass into it.
            rows, span: of the cache, that it writes to; rows beyond the live ones lose what they hold from slot ``filler`` on.
        """
        if not self.ready or self._full[key] >= FULL:
            return Outcome()
        self.cache.spoil(rows, filler)
        found = self._kept.get(key)
        self.settling += found is None or found.trials < TRIALS
        if found is not None:
            self._kept.move_to_end(key)
            load(found.frame)
        else:
            self._seen[key] += 1
            if self._seen[key] < PATIENCE:
                return Outcome()
            frame = make()
            load(frame)
            try:
                play, outputs = self.recorder.capture(frame.run)
                found = Recording(frame, recorders.inputs_of(frame.run), play, outputs)
            except torch.OutOfMemoryError:
                self._full[key] += 1
                if not self._kept:
                    self.recorder.reset()
                return Outcome()
            except Exception as error:  # what a device or a model raises when it is recorded has no common type
                self.refuse(failure(error))
                return Outcome()
            self._keep(key, found)
        if found.trials >= TRIALS:
            found.play()
            self.replays += 1
            return Outcome(tuple(each.clone() for each in found.frame.cut(found.outputs)), frame=found.frame)
        found.trials += 1
        try:
            with self.cache.restored(rows, span):  # it may write anywhere there
                found.play()
                return Outcome(tuple(each.clone() for each in found.frame.cut(found.outputs)), frame=found.frame, trial=True)
        except torch.OutOfMemoryError:  # what is to be restored has no room beside it: tried another time
            found.trials -= 1
            self._full[key] += 1
            if self._full[key] >= FULL:
                del self._kept[key]
            return Outcome()

    def _keep(self, key: Hashable, made: Recording) -> None:
        self.captures += 1
        self._kept[key] = made
        while len(self._kept) > MOST:
            gone, _ = self._kept.popitem(last=False)
            del self._seen[gone]

    def refuse(self, why: str) -> None:
        """Use no recordings any more: their results differ, or they could not be made."""
        self.drop()
        self.recorder.reset()
        self.reasons["graphs"] = why

    def drop(self) -> None:
        """Forget every recording, and the buffers that they hold."""
        if self._kept:
            self._kept.clear()
            self.recorder.reset()
        self._seen.clear()
        self._full.clear()
        self._buffers = None

    def read(self, features: Features | None) -> None:
        """Have recorded passes return these hidden states from now on; all recordings so far are dropped."""
        self.drop()
        self.passes.features = features

    def has(self, key: Hashable) -> bool:
        """Whether the recording of ``key`` can be played and was compared often enough."""
        return key in self._kept and self._kept[key].trials >= TRIALS

    # -- sizes ----------------------------------------------------------------------------------------------------------

    def bucket(self, window: Window) -> Bucket | None:
        """The bucket of a pass; None if it is not to be recorded."""
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
        """Rows of the bucket for ``rows``, as far as the buffers reach; filler has no pages."""
        if isinstance(self.cache, PagedCache):
            return rounded(rows, ROWS)
        return min(rounded(rows, ROWS), max(rows, self.cache.row_capacity))

    def span(self, end: int) -> int | None:
        """The span of a pass whose last slot is ``end`` - 1; None where the cache has no room for it yet."""
        return None if end > self.cache.capacity else min(roomy(end), self.cache.capacity)


def roomy(tokens: int) -> int:
    """A capacity for ``tokens`` that probably suffices for the next calls too: when buffers move, all recordings are lost."""
    return max(SPAN, 1 << (tokens - 1).bit_length()) if tokens <= LONG else -(-tokens // LONG) * LONG


def rounded(count: int, steps: Sequence[int]) -> int:
    """The least of ``steps`` that ``count`` fits into; beyond them, multiples of 32."""
    return next((step for step in steps if count <= step), -(-count // 32) * 32)


class Recorded(Eager):
    """Passes from recordings where there are some, and eager ones.

    Args:
        facts, reasons: as in :class:`~foredraft.backends.base.Backend`.
        overrides: compiled layers, which are recorded then; None for the model's own.
        recorder: what makes recordings on this device.
        paged: how keys and values lie in pages; None if they do not.
    """

    def __init__(
        self,
        facts: ModelFacts,
        reasons: dict[str, str],
        recorder: CudaRecorder,
        paged: Paged | None = None,
        overrides: Overrides | None = None,
    ):
        super().__init__(facts, overrides, reasons)
        if paged is not None:
            paged.use(self)
        self.recordings = Recordings(facts, self.cache, reasons, recorder)
        if overrides is None and facts.model.config.get_text_config()._attn_implementation == "sdpa":
            self.recordings.passes.call.masks.additive = True  # sdpa would make such a mask of one of bools in every layer

    @property
    def name(self) -> str:
        return super().name if self.overrides is not None or self.recordings.refused is not None else "graphs"

    def forward(self, given: ForwardPass) -> PassOutput:
        if given.part is not None:  # some layers are no recording
            return super().forward(given)
        self.passes += 1
        outcome = Outcome() if given.keep is not None else self._play(given)
        if outcome.outputs is None:
            return self.plain(given)
        if not outcome.trial:
            return PassOutput(*outcome.outputs)
        expected = self.plain(given)
        pairs = zip(outcome.outputs, (expected.logits, expected.hidden), ("logits", "hidden states"))
        reasons = [differs(self.facts.model, found, theirs, what) for found, theirs, what in pairs if theirs is not None]
        if (why := next((each for each in reasons if each), None)) is not None:
            self.recordings.refuse(why)
        return expected

    @property
    def warm_up(self) -> int:  # type: ignore[override]
        return PATIENCE + TRIALS if self.recordings.refused is None else 0

    @property
    def settling(self) -> int:  # type: ignore[override]
        return self.recordings.settling

    def _play(self, given: ForwardPass) -> Outcome:
        window, recordings = given.window, self.recordings
        self.cache.enter(window)
        bucket = recordings.bucket(window)
        if bucket is None:
            return Outcome()
        return recordings.play(
            bucket,
            lambda: PassFrame(recordings.passes, bucket, given.tokens.device),
            lambda frame: frame.load(given.tree, window, given.tokens),
            rows=bucket.rows,
            span=bucket.span,
            filler=bucket.span - bucket.total,
        )

    def read(self, features: Features | None) -> None:
        super().read(features)
        self.recordings.read(features)

    def roomy(self, tokens: int) -> int:
        return roomy(tokens)

    def release(self) -> None:
        super().release()
        self.recordings.drop()


def refusal(facts: ModelFacts, overrides: Overrides | None = None) -> str | None:
    """Why the passes of a model with these ``overrides`` cannot be recorded, or None."""
    model, device = facts.model, facts.device
    if facts.chains_only is not None:
        return f"it keeps a cache of its own ({facts.chains_only})"
    if recorders.recorder_for(device) is None:
        return f"graphs are recorded on a CUDA device, and the model is on {device.type}"
    places = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if places != {device} or any(hasattr(module, "_hf_hook") for module in model.modules()):
        return "it lies on several devices, or hooks fetch its weights"
    replaced = [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]
    if any(getattr(each, "owner", None) is not overrides or overrides is None for each in replaced):
        return "its layers have overrides of their own already (another Speculator)"
    if any(hooks_of(model)):
        return "hooks look at its passes, and a recording calls none"
    return None


@torch.inference_mode()
def graph_test(backend: Recorded) -> str | None:
    """Record a tree, a chain and a single token after prefixes of unequal length, and replay them after others.

    Returns:
        Why passes are not to be recorded, None if their logits are those of eager passes.
    """
    facts, recordings = backend.facts, backend.recordings
    if facts.context is not None and facts.context < SMALLEST:
        return f"a context of {facts.context} tokens has no room for the test"
    try:
        trial = Trial(backend, [some_text(facts, 12, 3), some_text(facts, 4, 1)])
        for attempt in range(PATIENCE + TRIALS):
            tree = trial.tree()
            nodes = (tree.tokens + 5 * attempt) % facts.vocab_size
            for each in (TokenTree(nodes, tree.parents), TokenTree.from_chain(nodes[:, :4]), TokenTree.root(nodes[:, 0])):
                trial.score(each)
            trial.commit(None, (1, 0))
            if recordings.refused is not None or recordings.settled:
                break
        return recordings.refused
    finally:
        backend.release()
