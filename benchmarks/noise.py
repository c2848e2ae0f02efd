"""What keyed noise costs: the match race over a large vocabulary against one forward pass of the target.

Measured as it happens in a round, the race right after a pass. ``torch.multinomial`` over the same distribution stands beside it:
what sampling costs anyone. The pass has the target's own vocabulary; one with an output layer as large as the race's would take
longer, so the share that is reported is an upper bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.passes import synchroniser
from foredraft.logits.noise import Noise, row_key
from foredraft.target import Target
from foredraft.tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LIMIT = 0.02  # of a pass


@torch.inference_mode()
def measure(
    model: PreTrainedModel, prompt: list[int], *, vocab_size: int, nodes: tuple[int, ...], repeats: int, advance: Callable[[], None]
) -> list[dict[str, Any]]:
    """For every number of nodes N: seconds of a pass, of the race and of multinomial, one row of N positions each."""
    target = Target(model, test=False, reuse_prefix=False)
    target.open([prompt], reserve=[len(prompt) + max(nodes)])
    target.prefill([prompt], first=0)
    return [_measure(target, prompt, vocab_size, count, repeats, advance) for count in nodes]


def _measure(target: Target, prompt: list[int], vocab_size: int, nodes: int, repeats: int, advance: Callable[[], None]) -> dict[str, Any]:
    device, wait = target.device, synchroniser(target.device)
    generator = torch.Generator().manual_seed(0)
    p = torch.softmax(4 * torch.randn(1, nodes, vocab_size, generator=generator), -1).to(device)
    depths = torch.arange(nodes, device=device)[None]
    tree = TokenTree.from_chain(torch.tensor([(prompt * nodes)[:nodes]], device=device))
    noise = Noise(torch.tensor([row_key((0, 0))], device=device), torch.tensor([len(prompt)], device=device))
    work: dict[str, Callable[[], object]] = {
        "pass": lambda: target.score(tree),
        "race": lambda: noise.race(p, depths),
        "multinomial": lambda: torch.multinomial(p[0], 1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(repeats + 1):
        for name in ("pass", "race", "pass", "multinomial"):
            wait()
            begin = time.perf_counter()
            work[name]()
            wait()
            if repeat:  # the first is the warm-up
                seconds[name].append(time.perf_counter() - begin)
        advance()
    medians = {name: median(values) for name, values in seconds.items()}
    return {
        "nodes": nodes,
        "vocab_size": vocab_size,
        "seconds": seconds,
        "median_seconds": medians,
        "share": medians["race"] / medians["pass"],
        "multinomial_share": medians["multinomial"] / medians["pass"],
    }
