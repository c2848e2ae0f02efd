"""What the drafts of one drafter among several take, timed beforehand: a few drafts and passes on random tokens, once, when it is bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

from foredraft.drafters.base import Drafter, DraftRequest, Feedback
from foredraft.logits.processors import Pipeline
from foredraft.logits.sampler import Sampler
from foredraft.shapes import TreeShape
from foredraft.tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor

    from foredraft.target import Target

PROMPT, DEEP, REPEATS = 16, 4, 3


@dataclass
class StandIn:
    """A row that is only timed."""

    ids: list[int]
    capacity: int
    slot: int = -1
    prompt_length: int = PROMPT


@dataclass(frozen=True)
class DraftSeconds:
    """Seconds of a draft, ``fixed`` and per ``level``, of each token that was missed (``unread``), and of a plain pass of the target."""

    fixed: float
    level: float
    unread: float
    plain: float

    def of(self, depth: int, missed: int = 0) -> float:
        return self.fixed + self.level * depth + self.unread * missed


def time_drafts(drafter: Drafter, target: Target, clock: Callable[[], float]) -> DraftSeconds:
    """Time chains of ``drafter``, which is bound and has no rows, and passes of ``target``; both are left without any."""
    room = min(each for each in (target.context, 10**9) if each is not None)
    length = max(1, min(PROMPT, room - DEEP - 1))
    deep = max(1, min(DEEP, room - length - 1))
    ids = torch.randint(0, target.vocab_size, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    row = StandIn(ids, length + deep + 1)
    sampler = Sampler([Pipeline()], [False], [length], None, _no_history)

    def timed(call: Callable[[], object]) -> float:
        _wait(target.device)
        begin = clock()
        call()
        _wait(target.device)
        return clock() - begin

    def draft(depth: int) -> Callable[[], None]:
        shape = TreeShape.chain(depth)
        request = DraftRequest([row], shape, depth, [depth], "deterministic", False, target.vocab_size, target.device, sampler)

        def call() -> None:
            tree = drafter.draft(request)
            path = None if tree.chain else torch.zeros(1, depth + 1, dtype=torch.long, device=tree.tokens.device)
            drafter.observe([row], Feedback(tree, [0], path))

        return call

    with torch.inference_mode():
        try:
            for _ in range(2):  # the first time warms up
                drafter.begin([row])
                unread = timed(draft(1))
                one = [timed(draft(1)) for _ in range(REPEATS)]
                more = [timed(draft(deep)) for _ in range(REPEATS)]
                drafter.end([row])
            target.open([ids], reserve=[row.capacity])
            target.prefill([ids], first=0)
            root = TokenTree.root(torch.tensor(ids[-1:], device=target.device))
            plain = median([timed(lambda: target.score(root)) for _ in range(1 + REPEATS)][1:])
        finally:
            drafter.reset()
            target.reset()
    first = median(one)
    level = max(0.0, (median(more) - first) / (deep - 1)) if deep > 1 else first
    return DraftSeconds(max(0.0, first - level), level, max(0.0, unread - first) / max(1, length - 1), plain)


def _no_history() -> Tensor:
    raise AssertionError("no processor reads a history here")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
