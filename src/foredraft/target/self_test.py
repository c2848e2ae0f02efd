"""The self-test of a target: several architectures give wrong logits without an exception, and no list names them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foredraft.backends.flex import failure
from foredraft.errors import UnsupportedModelError
from foredraft.models.support import describe, tolerance
from foredraft.tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foredraft.backends.eager import TreeExecution
    from foredraft.backends.flex import Flex
    from foredraft.target.target import Target

SMALLEST = 32  # context in which the self-test has room
WINDOW = 512  # widest window that the self-test goes beyond
WINDOW_OPTIONS = ("sliding_window", "attention_chunk_size", "window_size")
TREE = (-1, 0, 0, 1, 1, 2)  # parents; two levels that branch
LEAVES = ((4, 5), (5,))  # of each row, whose paths are compared
PATH = (0, 2, 5)  # what is kept of it: nodes that have to move


@torch.inference_mode()
def self_test(target: Target) -> str | None:
    """Score drafts behind two prefixes of unequal length, keep part of them, score on, and compare with fresh passes.

    First a chain, then a tree that branches, then what is cached after a path of the tree was kept. One prefix is longer
    than the model's window, if that is at most ``WINDOW`` tokens wide. Wider ones are not exceeded: a handful of passes over
    4096 tokens would take minutes on a CPU, and a wide window is made by the same code of the model as a narrow one. A context
    of fewer than ``SMALLEST`` tokens has no room for the test, and there is none.

    Returns:
        Why the target can only verify chains, None if it takes trees.

    Raises:
        UnsupportedModelError: the logits of a chain differ from those of one pass over the whole text.
    """
    if target.context is not None and target.context < SMALLEST:
        return target.chains_only
    texts = [_text(target, _beyond_window(target.model), 3), _text(target, 3, 1)]
    target.open(texts)
    try:
        target.prefill(texts, first=0)
        difference = _chain_error(target, texts, (1, 2))
        if difference is not None:
            raise UnsupportedModelError(
                f"{describe(target.model)}: logits through a rolled-back cache differ from a plain pass by {difference}; generation "
                "would be wrong. If you know that it is rounding, pass self_test=False; else use model.generate"
            )
        if target.chains_only is not None:
            return target.chains_only
        difference = _tree_error(target, texts) or _chain_error(target, texts, (3, 0))
        if difference is not None:
            return f"in the self-test of {describe(target.model)} a branching tree's logits differed from a plain pass by {difference}"
        return None
    finally:
        target.release()


@torch.inference_mode()
def attention_test(target: Target, execution: TreeExecution, flex: Flex) -> str | None:
    """Score a tree and a chain behind two prefixes of unequal length through the model's own attention and through ``flex``.

    Returns:
        Why ``flex`` is not to be used, None if the logits are the same.
    """
    if target.context is not None and target.context < SMALLEST:
        return f"a context of {target.context} tokens has no room for the test"
    texts = [_text(target, _beyond_window(target.model), 3), _text(target, 3, 1)]
    nodes = torch.tensor([_text(target, len(TREE), 23), _text(target, len(TREE), 29)], device=target.device)
    target.open(texts)
    try:
        target.prefill(texts, first=0)
        for tree in (TokenTree(nodes, torch.tensor([TREE] * 2, device=target.device)), TokenTree.from_chain(nodes)):
            execution.flex = None
            expected = target.score(tree)
            execution.flex, flex.calls = flex, 0
            difference = flex.differs(target.score(tree), expected)
            if difference is not None or not flex.calls:
                return difference or "its layers do not ask transformers' attention interface"
        return None
    except Exception as error:  # what a compiler, or a model that was given a block mask, raises has no common type
        return failure(error)
    finally:
        execution.flex = None
        flex.passes = 0
        target.release()


def _beyond_window(model: PreTrainedModel) -> int:
    """A length that some tokens lie out of sight at."""
    config = model.config.get_text_config()
    windows = [getattr(config, name, None) for name in WINDOW_OPTIONS]
    return max([window for window in windows if isinstance(window, int) and window <= WINDOW], default=0) + 5


def _text(target: Target, length: int, seed: int) -> list[int]:
    """Tokens that do not repeat soon, inside the vocabulary and the context."""
    room = length if target.context is None else min(length, max(1, target.context - 16))
    return [(seed + 2 + 7 * place + place * place) % target.vocab_size for place in range(room)]


def _chain_error(target: Target, texts: list[list[int]], kept: Sequence[int]) -> str | None:
    """Score a chain and keep ``kept[r]`` of it; the rows that keep some are compared."""
    drafted = torch.tensor([_text(target, 3, 11), _text(target, 3, 17)], device=target.device)
    logits = target.score(TokenTree.from_chain(drafted))
    target.commit(None, kept)
    errors = []
    for row, count in enumerate(kept):
        tokens = drafted[row].tolist()
        if count:
            errors.append(_error(target, logits[row], texts[row], tokens))
        texts[row] += tokens[:count]
    return next((error for error in errors if error), None)


def _tree_error(target: Target, texts: list[list[int]]) -> str | None:
    """Both rows have the same tree; the first keeps a branch, the second only its root."""
    nodes = torch.tensor([_text(target, len(TREE), 23), _text(target, len(TREE), 29)], device=target.device)
    tree = TokenTree(nodes, torch.tensor([TREE] * 2, device=target.device))
    logits = target.score(tree)
    target.commit(torch.tensor([PATH] * 2, device=target.device), (len(PATH), 1))
    errors = []
    for row, count in enumerate((len(PATH), 1)):
        for leaf in LEAVES[row]:
            path = tree.path(row, leaf)
            errors.append(_error(target, logits[row, path], texts[row], nodes[row, path].tolist()))
        texts[row] += nodes[row, list(PATH[:count])].tolist()
    return next((error for error in errors if error), None)


def _error(target: Target, cached: Tensor, text: list[int], drafted: list[int]) -> str | None:
    """How far ``cached`` ``[D, V]`` lies from the logits of a plain pass at ``drafted`` ``[D]`` behind ``text``, if that is too far."""
    ids = torch.tensor([text + drafted], device=target.device)
    fresh = target.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, -len(drafted) :]
    difference = (cached.float() - fresh.float().to(cached.device)).abs().max()
    scale = fresh.float().abs().max().clamp(min=1e-6)
    allowed = tolerance(target.model)
    if bool(difference <= allowed * scale):
        return None
    return f"{float(difference / scale):.1e} of their scale (allowed {allowed:.0e})"
