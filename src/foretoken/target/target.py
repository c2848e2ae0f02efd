"""The target: an unmodified transformers model behind four verbs, open, prefill, score and commit.

The only module that calls the model; masks.py and cache.py beside it are the only ones that know its masks and caches.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.errors import UnsupportedModelError
from foretoken.target.alibi import alibi_from, uses_alibi
from foretoken.target.cache import TreeCache, Window
from foretoken.target.masks import MaskBuilder, layout
from foretoken.target.support import check_model, self_test
from foretoken.tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREFILL_CHUNK = 1024  # tokens of one row in a prefill pass
PREFILL_TOKENS = 4096  # tokens of all rows in a prefill pass
RESERVE = 4096  # tokens per row allocated ahead of their use, at most
WORTH_COPYING = 16  # a shorter shared beginning is computed again
CANDIDATES = 8  # rows compared with a prompt that begins as they do


class Target:
    """A causal language model with a cache that can forget.

    Rows are physical: ``open`` appends them, ``compact`` drops some and moves later ones forward, and every call takes
    or returns them in that order.

    Args:
        model: a decoder-only ``PreTrainedModel`` with sdpa or eager attention; PEFT adapters and device maps are fine.
        test: run the self-test (a few passes over a handful of tokens).
        prefill_chunk: most tokens of a row in one prefill pass; bounds the memory of a long prompt.
        reuse_prefix: keep the cache of finished rows for prompts that begin alike.

    Raises:
        UnsupportedModelError: the model cannot roll back, or fails the self-test.
    """

    def __init__(self, model: PreTrainedModel, *, test: bool = True, prefill_chunk: int = PREFILL_CHUNK, reuse_prefix: bool = True):
        self.model = unwrap(model)
        check_model(self.model)
        config = self.model.config.get_text_config()
        self.vocab_size: int = getattr(self.model.get_output_embeddings(), "out_features", None) or config.vocab_size
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self.device = self._input_device()
        self.prefill_chunk = prefill_chunk
        self.passes = 0
        self.owner: object = None  # the session whose rows these are
        self.cache = TreeCache()
        parameters = inspect.signature(self.model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._masks = MaskBuilder(config, config._attn_implementation, self.model.dtype)
        self._alibi = uses_alibi(self.model)
        self.reuse_prefix = reuse_prefix
        self._counting = torch.arange(1024, device=self.device)[None]
        self._texts: list[Sequence[int]] = []  # of live rows
        self._dropped: dict[int, list[int]] = {}  # what physical rows past the live ones still hold
        self._weights: object = None
        if self.model.training:
            raise UnsupportedModelError("the model is in training mode (dropout would make every pass different); call model.eval()")
        if test:
            self_test(self)
            self.passes = 0

    # -- rows ---------------------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> list[int]:
        """Tokens cached per live row."""
        return self.cache.lengths

    def open(self, texts: Sequence[Sequence[int]], *, reserve: Sequence[int] = ()) -> None:
        """Append a row for each text. What a row shares with the beginning of another row, live or recently dropped, is copied.

        Args:
            texts: the prompts; a list that its owner extends as tokens are committed.
            reserve: tokens each row will hold in the end, as far as that is known, so that the cache need not grow.
        """
        first = len(self.lengths)
        sources = self._shared_beginnings(texts, first)
        self.cache.open([length for _, length in sources])
        self.cache.reserve(min(max(reserve, default=0), RESERVE))
        self.cache.gather([row for row, _ in sources], [length for _, length in sources], first)
        self._texts += texts
        self._dropped = {row: text for row, text in self._dropped.items() if row >= len(self.lengths)}

    def compact(self, keep: Sequence[int]) -> None:
        """Drop every row not in ``keep``, ascending physical indices."""
        for row in range(len(keep), len(self.lengths)):  # these stay where they are, until a new row takes the place
            self._dropped[row] = list(self._texts[row][: self.lengths[row]])
        self.cache.compact(keep)
        self._texts = [self._texts[row] for row in keep]

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget every token behind the first ``lengths[r]`` of each row."""
        self.cache.lengths[:] = lengths

    def reset(self) -> None:
        """Drop all rows; the buffers stay for the next call."""
        self.compact([])
        self.cache.window = None

    def release(self) -> None:
        """Drop all rows and give the memory back."""
        self.cache.forget()
        self._texts, self._dropped = [], {}

    # -- passes -------------------------------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Sequence[int]], *, first: int) -> Tensor:
        """Fill rows ``first``, ``first + 1``, … with what their cache lacks of ``prompts``, in chunks.

        Returns:
            ``[len(prompts), V]`` logits after each prompt's last token, in the model's dtype.
        """
        logits: list[Tensor] = []
        row = first
        while row < first + len(prompts):
            last = self._group(prompts, row, first)
            logits.append(self._prefill_group(prompts[row - first : last - first], row))
            row = last
        return torch.cat(logits)

    def score(self, tree: TokenTree) -> Tensor:
        """``[R, N, V]`` logits at every node of ``tree``, behind the cached prefix of each row. Advances nothing.

        A token outside the vocabulary is scored as one inside: whoever made the tree has to be told, but not by a crash
        that takes a GPU with it.
        """
        window = Window(0, len(self.lengths), tuple(self.lengths), tree.nodes)
        return self._forward(tree, window, tokens=tree.tokens.clamp(0, self.vocab_size - 1))

    def advance(self, tokens: Tensor) -> Tensor:
        """Append one token ``[R]`` to every row; returns the logits after it, ``[R, V]``."""
        window = Window(0, len(self.lengths), tuple(self.lengths), 1)
        logits = self._forward(TokenTree.root(tokens), window)[:, 0]
        self.cache.commit(None, [1] * len(tokens))
        return logits

    def commit(self, path: Tensor | None, kept: Sequence[int]) -> None:
        """Keep the first ``kept[r]`` nodes of ``path`` ``[R, D]`` (None: the first nodes in order) of the last pass."""
        self.cache.commit(path, kept)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _shared_beginnings(self, texts: Sequence[Sequence[int]], first: int) -> list[tuple[int, int]]:
        """For each text the physical row that shares the longest beginning with it, and how long it is; at least one token
        stays to be computed, because its logits are wanted."""
        if not self.reuse_prefix:
            return [(first, 0)] * len(texts)
        if (weights := fingerprint(self.model)) != self._weights:
            self._weights, self._dropped = weights, {}
        held = [(row, ids, self.lengths[row]) for row, ids in enumerate(self._texts)]
        held += [(row, ids, len(ids)) for row, ids in self._dropped.items()]
        alike: dict[tuple[int, ...], list[tuple[int, Sequence[int], int]]] = {}
        for row, ids, length in held:
            if length >= WORTH_COPYING:
                alike.setdefault(tuple(ids[:WORTH_COPYING]), []).append((row, ids, length))
        found = []
        for text in texts:
            candidates = alike.get(tuple(text[:WORTH_COPYING]), [])[-CANDIDATES:]
            shared = [(common(ids, text, min(length, len(text) - 1)), row) for row, ids, length in candidates]
            length, row = max(shared, default=(0, first))
            found.append((row, length) if length >= WORTH_COPYING else (first, 0))
        return found

    def _group(self, prompts: Sequence[Sequence[int]], row: int, first: int) -> int:
        """Rows from ``row`` that go through one pass together: short ones batched, a long one alone in chunks."""
        missing = [len(prompt) - self.lengths[first + i] for i, prompt in enumerate(prompts)]
        widest, last = missing[row - first], row + 1
        if widest > self.prefill_chunk:
            return last
        while last < first + len(prompts) and missing[last - first] <= self.prefill_chunk:
            widest = max(widest, missing[last - first])
            if widest * (last + 1 - row) > PREFILL_TOKENS:
                break
            last += 1
        return last

    def _prefill_group(self, prompts: Sequence[Sequence[int]], row: int) -> Tensor:
        last = row + len(prompts)
        while True:
            starts = tuple(self.lengths[row:last])
            counts = [min(len(prompt) - start, self.prefill_chunk) for prompt, start in zip(prompts, starts)]
            width = max(counts)
            chunk = [list(p[s : s + c]) + [0] * (width - c) for p, s, c in zip(prompts, starts, counts)]
            tokens = torch.tensor(chunk, device=self.device).clamp(max=self.vocab_size - 1)  # a draft may know fewer than its target
            logits = self._forward(TokenTree.from_chain(tokens), Window(row, last, starts, width), keep=[c - 1 for c in counts])
            self.commit(None, counts)
            if self.lengths[row] == len(prompts[0]):
                return logits[:, 0]

    def _forward(self, tree: TokenTree, window: Window, *, tokens: Tensor | None = None, keep: Sequence[int] | None = None) -> Tensor:
        """One pass over ``tokens`` (None: the tree's). ``keep`` asks for the logits of one node per row only, ``[R, 1, V]``."""
        self.cache.enter(window)
        arguments: dict[str, Any] = {}
        bias: AbstractContextManager[None] = nullcontext()
        last_only = keep is not None and all(node == tree.nodes - 1 for node in keep)
        positions = self._positions(tree, window)
        if self._takes_positions:
            arguments["position_ids"] = positions
        if not (tree.chain and window.uniform):
            where = layout(tree, window, positions)
            arguments["attention_mask"] = self._masks(where, self.cache)
            if self._alibi:
                bias = alibi_from(self.model, where.keys)
        elif not self._alibi and (mask := self._masks.for_chain(window, self.device)) is not None:
            arguments["attention_mask"] = mask
        if keep is not None and self._takes_logits_to_keep:
            arguments["logits_to_keep"] = 1 if last_only else torch.tensor(sorted(set(keep)), device=self.device)
        self.passes += 1
        with bias:
            logits: Tensor = self.model(
                input_ids=tree.tokens if tokens is None else tokens, past_key_values=self.cache, use_cache=True, **arguments
            ).logits
        if keep is None:
            return logits
        return logits[:, -1:] if last_only else self._pick(logits, keep)

    def _pick(self, logits: Tensor, keep: Sequence[int]) -> Tensor:
        """``[R, 1, V]`` of ``logits`` at node ``keep[r]``, whether the model kept all nodes or the wanted ones only."""
        kept = sorted(set(keep)) if self._takes_logits_to_keep else list(range(logits.shape[1]))
        index = torch.tensor([kept.index(node) for node in keep], device=logits.device)
        return logits[torch.arange(len(keep), device=logits.device), index][:, None]

    def _positions(self, tree: TokenTree, window: Window) -> Tensor:
        """``[R, N]`` positions, filler kept inside the context so that learned position tables are not overrun."""
        if tree.chain and window.uniform:
            start = window.starts[0]
            if start + window.nodes > self._counting.shape[1]:
                self._counting = torch.arange(2 * (start + window.nodes), device=self.device)[None]
            positions = self._counting.narrow(1, start, window.nodes)
            if tree.rows > 1:
                positions = positions.expand(tree.rows, -1)
        else:
            positions = torch.tensor(window.starts, device=self.device)[:, None] + tree.depths
        if self.context is not None and window.width > self.context:
            positions = positions.clamp(max=self.context - 1)
        return positions

    def _input_device(self) -> torch.device:
        """Where input ids go: the device of the embeddings, also under a device map."""
        embeddings = self.model.get_input_embeddings()
        device: torch.device = embeddings.weight.device if embeddings is not None else self.model.device
        if device.type != "meta":
            return device
        hook = getattr(embeddings, "_hf_hook", None)  # accelerate: an offloaded weight is nowhere until it is needed
        return torch.device(getattr(hook, "execution_device", None) or "cpu")


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside a PEFT wrapper, adapters included, or the model itself.

    Raises:
        UnsupportedModelError: a PEFT method that puts virtual tokens into the cache.
    """
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        if getattr(model, "active_peft_config", None) is not None and model.active_peft_config.is_prompt_learning:
            raise UnsupportedModelError("prompt-learning adapters put virtual tokens into the cache; use LoRA, or model.generate")
        return model.get_base_model()
    if not hasattr(model, "generate") or not hasattr(model, "config"):
        raise UnsupportedModelError(f"expected a transformers causal language model, got {type(model).__name__}")
    return model


def common(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """How many of the first ``limit`` tokens are the same."""
    if a[:limit] == b[:limit]:
        return limit
    return next(index for index in range(limit) if a[index] != b[index])


def fingerprint(model: PreTrainedModel) -> object:
    """Changes when the weights were trained in place or another adapter was switched on, so that no stale cache is reused."""
    versions = tuple((id(each), 0 if each.is_inference() else each._version) for each in model.parameters())
    adapters = tuple(
        (str(module.active_adapters), bool(module.disable_adapters), str(module.merged_adapters))
        for module in model.modules()
        if hasattr(module, "merged_adapters") and hasattr(module, "active_adapters")
    )
    return versions, adapters
