"""How much memory a cache may take."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from foredraft.device import free_memory_of
from foredraft.errors import ConfigurationError
from foredraft.models.cache_sizes import parse_memory
from foredraft.models.pass_memory import pass_bytes

SPARE = 0.05  # of the free memory, which "auto" leaves to other programs, besides what a pass takes
UNKNOWN = 0.2  # of it, which "auto" leaves where that cannot be measured
AT_LEAST = 0.5  # of it, which "auto" takes in any case
SAMPLED = 16  # bytes for each logit, to choose tokens: copies in float32


def budget(memory: str | float, device: torch.device, margin: Callable[[], int | None]) -> tuple[bool, int | None]:
    """Whether an amount of memory was asked for, rather than "auto"; and the bytes that a cache on ``device`` may take, None for no limit.
    ``margin()`` says what passes take besides, if that is known.

    Raises:
        ConfigurationError: not an amount of memory, or a fraction where the system does not say how much is free.
    """
    wanted = parse_memory(memory)
    if isinstance(wanted, int):
        return True, wanted
    free = free_memory_of(device)
    if free is None and wanted is not None:
        raise ConfigurationError(
            f"cache_memory={memory!r} is a fraction of the free memory, and this system does not say how much is free; give a size such as "
            "'6GiB'"
        )
    if free is None:
        return False, None
    if wanted is not None:
        return True, int(free * wanted)
    needed = margin()
    taken = UNKNOWN * free if needed is None else SPARE * free + needed
    return False, int(max(free - taken, AT_LEAST * free))


def largest_pass(model: PreTrainedModel, rows: int, tokens: int, logits: int) -> int | None:
    """Bytes that a pass over ``rows`` texts of ``tokens`` tokens takes besides the cache, with so many ``logits``; None if that is not
    known."""
    found = pass_bytes(model, rows, tokens)
    return None if found is None else found + SAMPLED * logits
