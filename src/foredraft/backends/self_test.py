"""The test of a backend when a target is built: some architectures give wrong logits without an exception, and no list names them all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.backends.base import Backend, ForwardPass, tree_window
from foredraft.backends.rounding import explained
from foredraft.errors import UnsupportedModelError
from foredraft.models.cache import Window
from foredraft.models.encoder_decoder import Source, some_source, uncounted
from foredraft.models.support import ModelFacts, describe, is_half, is_routed, tolerance
from foredraft.tree import TokenTree

SMALLEST = 32  # smallest context in which a test has room
WINDOW = 512  # widest window that the self-test goes beyond
WINDOW_OPTIONS = ("sliding_window", "attention_chunk_size", "window_size")
TREE = (-1, 0, 0, 1, 1, 2)  # parents; two levels that branch
LEAVES = ((4, 5), (5,))  # of each row: leaves whose paths are compared
PATH = (0, 2, 5)  # the path that is kept: nodes that have to move
ATTEMPTS = 3  # each with other tokens, if rounding may choose other experts


class Trial:
    """A few rows of ``backend`` that hold ``texts``, which are read in one pass, with ``sources`` if the model has an encoder. ``seed``
    selects the tokens that are scored after them."""

    def __init__(self, backend: Backend, texts: Sequence[Sequence[int]], sources: Sequence[Source] = (), seed: int = 0):
        self.backend, self.device, self.sources, self.seed = backend, backend.facts.device, list(sources), seed
        lengths = [len(text) for text in texts]
        backend.open([0] * len(texts), sources)
        tokens = torch.tensor([[*text, *[0] * (max(lengths) - len(text))] for text in texts], device=self.device)
        window = Window(0, len(texts), (0,) * len(texts), max(lengths), counts=tuple(lengths))
        backend.forward(ForwardPass(TokenTree.from_chain(tokens), window, tokens, keep=[length - 1 for length in lengths]))
        backend.cache.commit(None, lengths)

    @cached_property
    def explained(self) -> float:
        """As :func:`~foredraft.backends.rounding.explained`."""
        return explained(self.backend.facts.model)

    def score(self, tree: TokenTree) -> Tensor:
        """``[R, N, V]``; advances nothing."""
        return self.backend.forward(ForwardPass(tree, tree_window(tree, self.backend.cache.lengths), tree.tokens)).logits

    def commit(self, path: Tensor | None, kept: Sequence[int]) -> None:
        self.backend.cache.commit(path, kept)

    def tree(self) -> TokenTree:
        """Two rows with a branching tree each."""
        facts, seed = self.backend.facts, self.seed
        nodes = torch.tensor([some_text(facts, len(TREE), seed + 23), some_text(facts, len(TREE), seed + 29)], device=self.device)
        return TokenTree(nodes, torch.tensor([TREE] * 2, device=self.device))


@torch.inference_mode()
def self_test(backend: Backend) -> str | None:
    """Score drafts after two prefixes of unequal length, keep part of them, score on, and compare with fresh passes.

    First a chain, then a tree that branches, then what is cached after a path of the tree was kept; where the model has an encoder, also
    after the first row has left. One prefix is longer
    than the model's window, if that is at most ``WINDOW`` tokens wide. Wider ones are not exceeded: a handful of passes over
    4096 tokens would take minutes on a CPU, and a wide window is made by the same code of the model as a narrow one. A context
    of fewer than ``SMALLEST`` tokens has no room for the test, and there is none.

    Returns:
        Why the model can only verify chains, None if it takes trees.

    Raises:
        UnsupportedModelError: the logits of a chain differ from those of one pass over the whole text.
    """
    facts = backend.facts
    if facts.context is not None and facts.context < SMALLEST:
        return facts.chains_only
    of_chain, of_tree = _attempts(backend)
    if (of_chain or of_tree) and backend.overrides is not None:
        why = f"in the self-test the kernels gave logits that differ from a plain pass by {of_chain or of_tree}"
        if backend.overrides.unfuse(why):
            backend.reasons["fused"] = why
            of_chain, of_tree = _attempts(backend)
    if of_chain is not None:
        raise UnsupportedModelError(
            f"{describe(facts.model)}: logits through a rolled-back cache differ from a plain pass by {of_chain}; generation "
            "would be wrong. If you know that it is rounding, pass self_test=False; else use model.generate"
        )
    if of_tree is not None:
        return f"in the self-test of {describe(facts.model)} a branching tree's logits differed from a plain pass by {of_tree}"
    return facts.chains_only


def _attempts(backend: Backend) -> tuple[str | None, str | None]:
    """:func:`_differences` of the last attempt."""
    found: tuple[str | None, str | None] = (None, None)
    for attempt in range(ATTEMPTS if _flips(backend.facts) else 1):
        found = _differences(backend, 37 * attempt)
        if found == (None, None):
            break
    return found


def _differences(backend: Backend, seed: int) -> tuple[str | None, str | None]:
    """How far the logits of a chain lie from those of a plain pass, and those of a tree, where that is too far."""
    facts = backend.facts
    texts = texts_of_test(facts, seed)
    try:
        trial = Trial(backend, texts, sources_of_test(facts), seed)
        of_chain = _chain_error(trial, texts, (1, 2))
        if of_chain is None and trial.sources:
            of_chain = _chain_error(trial, texts, (1, 1), nodes=1)  # such passes of LED's decoder know of no mask
        if of_chain is not None or facts.chains_only is not None:
            return of_chain, None
        return None, _tree_error(trial, texts) or _chain_error(trial, texts, (3, 0)) or _left_error(trial, texts)
    finally:
        backend.release()


def _flips(facts: ModelFacts) -> bool:
    """Whether rounding alone may send tokens to other experts."""
    return is_half(facts.model) and is_routed(facts.model)


def texts_of_test(facts: ModelFacts, seed: int = 0) -> list[list[int]]:
    """Two texts, one of them longer than the model's window, if that is at most ``WINDOW``."""
    return [some_text(facts, _beyond_window(facts.model), seed + 3), some_text(facts, 3, seed + 1)]


def sources_of_test(facts: ModelFacts) -> list[Source]:
    """Two sources of unequal lengths, one longer than the longest distance that the model distinguishes; none without an encoder."""
    if not facts.sourced:
        return []
    furthest = getattr(facts.model.config, "relative_attention_max_distance", 0)
    return [some_source(facts.model, 5, 1), some_source(facts.model, min(furthest, WINDOW) + 7, 2)]


def some_text(facts: ModelFacts, length: int, seed: int) -> list[int]:
    """Tokens that do not repeat soon, inside the vocabulary and the context."""
    room = length if facts.context is None else min(length, max(1, facts.context - 16))
    return [(seed + 2 + 7 * place + place * place) % facts.vocab_size for place in range(room)]


def _beyond_window(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    windows = [getattr(config, name, None) for name in WINDOW_OPTIONS]
    return max([window for window in windows if isinstance(window, int) and window <= WINDOW], default=0) + 5


def _chain_error(trial: Trial, texts: list[list[int]], kept: Sequence[int], *, nodes: int = 3) -> str | None:
    """Score a chain of so many ``nodes`` and keep ``kept[r]`` of it; the rows that keep some are compared."""
    facts = trial.backend.facts
    drafted = torch.tensor([some_text(facts, nodes, trial.seed + 11 + 6 * row) for row in range(len(texts))], device=facts.device)
    logits = trial.score(TokenTree.from_chain(drafted))
    trial.commit(None, kept)
    errors = []
    for row, count in enumerate(kept):
        tokens = drafted[row].tolist()
        if count:
            errors.append(_error(trial, row, logits[row], texts[row], tokens))
        texts[row] += tokens[:count]
    return next((error for error in errors if error), None)


def _left_error(trial: Trial, texts: list[list[int]]) -> str | None:
    """The first row leaves, and the other one moves into its place with the keys of its source."""
    if not trial.sources:
        return None
    trial.backend.cache.compact([1])
    del trial.sources[0], texts[0]
    return _chain_error(trial, texts, (1,))


def _tree_error(trial: Trial, texts: list[list[int]]) -> str | None:
    """Both rows have the same tree; the first keeps a branch, the second only its root."""
    facts, tree = trial.backend.facts, trial.tree()
    logits = trial.score(tree)
    trial.commit(torch.tensor([PATH] * 2, device=facts.device), (len(PATH), 1))
    errors = []
    for row, count in enumerate((len(PATH), 1)):
        for leaf in LEAVES[row]:
            path = tree.path(row, leaf)
            errors.append(_error(trial, row, logits[row, path], texts[row], tree.tokens[row, path].tolist()))
        texts[row] += tree.tokens[row, list(PATH[:count])].tolist()
    return next((error for error in errors if error), None)


def _error(trial: Trial, row: int, cached: Tensor, text: list[int], drafted: list[int]) -> str | None:
    """How far ``cached`` ``[D, V]`` lies from the logits of a plain pass at ``drafted`` ``[D]`` after ``text``, if that is too far. In
    half precision, rounding alone may send a token in four to other experts."""
    facts = trial.backend.facts
    ids = torch.tensor([text + drafted], device=facts.device)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if trial.sources:
        given = {**{name: each.to(facts.device) for name, each in trial.sources[row].inputs.items()}, "decoder_input_ids": ids}
    with uncounted(facts.model.get_decoder()) if facts.sourced else nullcontext():
        fresh = facts.model(**given, use_cache=False).logits[0, -len(drafted) :]
    errors = (cached.float() - fresh.float().to(cached.device)).abs().amax(-1)
    difference = errors.quantile(0.75 if _flips(facts) else 1.0, interpolation="lower")
    scale = fresh.float().abs().max().clamp(min=1e-6)
    found, allowed = float(difference / scale), tolerance(facts.model)
    if found <= allowed or found <= (allowed := max(allowed, trial.explained)):
        return None
    return f"{found:.1e} of their scale (allowed {allowed:.0e})"
