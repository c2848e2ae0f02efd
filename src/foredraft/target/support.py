"""Which models can be verified and how, and the self-test that makes sure.

A model takes trees if its cache is a key-value cache over attention layers of the types transformers masks for us (full,
sliding, chunked), so that rejected tokens can be forgotten and siblings kept apart. Some others can verify chains. Names
below are those known to differ; the self-test catches what no list knows, because several architectures give wrong logits
without an exception.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foredraft.errors import UnsupportedModelError
from foredraft.target.flex import failure
from foredraft.tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from foredraft.target.execution import TreeExecution
    from foredraft.target.flex import Flex
    from foredraft.target.target import Target

ROLLS_BACK = {"full_attention", "sliding_attention", "chunked_attention"}
REPLAYED = {  # recurrent, and able to read several tokens from a state in one pass
    "bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "mamba2", "nemotron_h", "qwen3_5", "qwen3_5_text", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_next", "rwkv", "zamba2",
}  # fmt: skip
RECURRENT = {"falcon_mamba", "jamba", "mamba", "minimax", "recurrent_gemma", "xlstm", "zamba"}
SLOT_POSITIONS = {"gpt_neo": "its local attention mask", "mpt": "its position bias"}
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
SMALLEST = 32  # context in which the self-test has room
WINDOW = 512  # widest window that the self-test goes beyond
WINDOW_OPTIONS = ("sliding_window", "attention_chunk_size", "window_size")
TREE = (-1, 0, 0, 1, 1, 2)  # parents; two levels that branch
LEAVES = ((4, 5), (5,))  # of each row, whose paths are compared
PATH = (0, 2, 5)  # what is kept of it: nodes that have to move


def describe(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} ({model.config.get_text_config().model_type})"


def check_model(model: PreTrainedModel) -> None:
    """Refuse by name what cannot work.

    Raises:
        UnsupportedModelError: says why and what to do instead.
    """
    config = model.config.get_text_config()
    name = describe(model)
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; Foredraft speeds up decoder-only language models")
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no language-modelling head; load it with AutoModelForCausalLM")
    kinds = set(getattr(config, "layer_types", None) or ())
    recurrent = config.model_type in RECURRENT or getattr(model, "_is_stateful", False) or kinds - ROLLS_BACK
    if recurrent and config.model_type not in REPLAYED:
        odd = f" (layers: {', '.join(sorted(kinds - ROLLS_BACK))})" if kinds - ROLLS_BACK else ""
        raise UnsupportedModelError(f"{name} keeps a recurrent state{odd} that cannot roll back a rejected token; use model.generate")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise UnsupportedModelError(
            f"{name} is loaded with attn_implementation={config._attn_implementation!r}, which takes no tree mask; "
            "load it with attn_implementation='sdpa' (or 'eager')"
        )


def context_of(config: PreTrainedConfig) -> int | None:
    """Most tokens that a row may hold; None if the model sets no limit.

    With longrope the whole pass is rotated in another way once any position lies beyond the original context: a draft that
    reaches beyond it would change the logits before it, and what is cached would no longer fit. Such a model ends there, and
    says so.
    """
    longest: int | None = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *ropes.values()]:
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            boundary = rope.get("original_max_position_embeddings") or longest
            if boundary is not None and (longest is None or boundary < longest):
                warnings.warn(
                    f"{config.model_type} with longrope rotates every token in another way beyond {boundary} tokens; Foredraft serves it "
                    f"up to there (of {longest})",
                    stacklevel=3,
                )
                longest = boundary
    return longest


def chains_only(model: PreTrainedModel) -> str | None:
    """Why ``model``, which passed :func:`check_model`, can verify chains but no branching trees; None if it takes trees."""
    config = model.config.get_text_config()
    name = describe(model)
    if config.model_type in REPLAYED:
        return f"{name} keeps a recurrent state, which reads tokens one after the other and can not branch"
    if config.model_type in SLOT_POSITIONS:
        return f"{name} computes {SLOT_POSITIONS[config.model_type]} from cache slots, which are no positions once a tree branches"
    if config.model_type == "falcon" and getattr(config, "alibi", False):
        return f"{name} with alibi computes its position bias from cache slots, which are no positions once a tree branches"
    return None


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


def tolerance(model: PreTrainedModel) -> float:
    """What logits of two ways to compute the same may differ by, in parts of the largest."""
    return TOLERANCE.get(model.dtype, 0.1)  # half precision and quantised weights round differently per shape


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
