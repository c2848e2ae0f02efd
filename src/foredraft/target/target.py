"""The target: an unmodified transformers model behind a few verbs, open, prefill, score, advance and commit.

How its passes are made is the business of a backend (:mod:`foredraft.backends`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foredraft.backends.base import ForwardPass, Part, PassOutput, tree_window
from foredraft.backends.choice import SAMPLE, choose
from foredraft.backends.eager import Eager
from foredraft.device import to_device
from foredraft.errors import ConfigurationError, UnsupportedModelError
from foredraft.models.cache import Window
from foredraft.models.changes import STRUCTURE, ModelState
from foredraft.models.encoder_decoder import Source, some_source
from foredraft.models.features import Features, PromptStates, Tap, features_of, taps_of
from foredraft.models.layers import LayerRanges, layer_count
from foredraft.models.skips import SkipSet, Sublayers
from foredraft.models.support import ModelFacts, describe, unwrap
from foredraft.target.prefixes import shared_beginnings
from foredraft.tree import TokenTree
from foredraft.turns import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(eq=False)
class Early:
    """Nodes of a tree that the layers below ``exit`` have read: ``states[exit]`` ``[R, n, d]`` is what came out of these, and the others
    are what came out of layers on the way that are kept."""

    exit: int
    states: dict[int, Tensor]


PREFILL_CHUNK = 1024  # tokens of one row in a prefill pass
PREFILL_TOKENS = 4096  # tokens of all rows in a prefill pass
SOURCE = 64  # tokens of a source that a model is timed behind
RESERVE = 4096  # tokens per row allocated ahead of their use, at most


class Target:
    """A language model, causal or with an encoder, whose cache can forget.

    Rows are physical: ``open`` appends them, ``compact`` drops some and moves later ones forward, and every call takes
    or returns them in that order.

    Args:
        model: a ``PreTrainedModel`` with sdpa or eager attention; PEFT adapters and device maps are fine.
        test: run the self-test (a few passes over a handful of tokens).
        prefill_chunk: most tokens of a row in one prefill pass; bounds the memory of a long prompt.
        reuse_prefix: keep the cache of finished rows for prompts that begin alike.
        execution: ``eager`` runs the model as it is. ``packed`` lays its weights out for oneDNN, ``native`` for kernels that are compiled
            on this machine. ``compiled`` compiles its decoder layers with torch.compile. ``graphs`` records passes, on CUDA. ``auto``
            takes the fastest of the first three on a CPU, where weights need not be held twice, and ``eager`` on CUDA.
        owned: nobody else holds the model, so that packed weights may replace the originals.
        attention: how passes that need a mask attend: ``model`` and ``auto``, as the model was loaded; ``flex``, through FlexAttention.
        wait: where another thread is using the model, wait until it is done.

    Attributes:
        context: most tokens that a row may hold; None if the model sets no limit.
        trained: tokens that the model was made for; None if it does not say.
        outgrown: a session has warned that a row goes on beyond that.
        backend: what makes the passes.
        kept: by layer, ``[R, N, d]`` what came out of it at the nodes of the last tree that was scored, see :meth:`keep`.
        tokenizer: of the model, where the user has given one.
        sourced: the model has an encoder, so that every row has a source.
        layer_tokens: per decoder layer, the tokens that passes have led through it so far, filler of ragged rows included.
        version: grows whenever the model was found changed; rows from before are gone then.
        prompt_hidden: hidden states of the prompts that were just prefilled, see :meth:`read`.
        hidden: ``[R, N - first, F * d]`` the :attr:`features` at the nodes of the last pass, :meth:`score` or :meth:`advance`, in the
            model's dtype, on :attr:`device`; None if there are none. Filler of a chain may have any. A tensor of the caller's own.

    Raises:
        UnsupportedModelError: the model cannot roll back, or fails the self-test.
        ConfigurationError: an execution or an attention that the model cannot have.
        BusyError: another thread is using the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        test: bool = True,
        prefill_chunk: int = PREFILL_CHUNK,
        reuse_prefix: bool = True,
        execution: str = "auto",
        owned: bool = False,
        attention: str = "auto",
        wait: bool = False,
    ):
        self.model, self.wait = unwrap(model), wait
        self.tokenizer: Any = None
        facts = ModelFacts.of(self.model)
        self.vocab_size, self.context, self.device = facts.vocab_size, facts.context, facts.device
        self.trained, self.outgrown, self.sourced = facts.trained, False, facts.sourced
        self.prefill_chunk = prefill_chunk
        self.owner: object = None  # a token of the session whose rows these are
        self.reuse_prefix = reuse_prefix
        self._texts: list[Sequence[int]] = []  # of live rows
        self._dropped: dict[int, list[int]] = {}  # what physical rows past the live ones held when they were dropped
        self.version = 0
        self._taps: list[Tap | None] = []  # where hidden states come by, once that was asked
        self._reused_prefix = reuse_prefix  # before somebody read whole texts
        self.hidden: Tensor | None = None
        self.prompt_hidden: list[Tensor] | None = None
        self.layer_tokens = [0] * layer_count(self.model)
        self._early: Early | None = None  # the tree of this round as far as lower layers have read it
        self._keeping: tuple[int, ...] = ()
        self.kept: dict[int, Tensor] = {}
        self._state = ModelState.of(self.model)
        self._how: dict[str, Any] = {"execution": execution, "attention": attention, "owned": owned, "test": test, "chunk": prefill_chunk}
        with Turn([], [self.model], wait=wait):
            self._state.look({})
            self._dtype, self.backend = self.model.dtype, choose(facts, **self._how)
        self._seen = dict(self._state.counts)

    @property
    def chains_only(self) -> str | None:
        """Why this target can verify chains but no branching trees; None if it takes trees."""
        return self.backend.facts.chains_only

    @property
    def reasons(self) -> Mapping[str, str]:
        """Why other ways to make passes are not in use: ``packed``, ``fused``, ``graphs`` or ``flex``, and the reason."""
        return MappingProxyType(self.backend.reasons)

    @property
    def execution(self) -> str:
        """What is in use: ``eager``, ``packed``, ``native``, ``compiled`` or ``graphs``."""
        return self.backend.name

    # -- a model that changes -----------------------------------------------------------------------------------------

    def follow(self) -> None:
        """If the model has changed since the last call, drop all rows, and what was made from the model as it was. See
        :mod:`foredraft.models.changes` for what is seen.

        Raises:
            ConfigurationError: the change cannot be followed.
            UnsupportedModelError: the model cannot be served as it is now.
        """
        changed = self._state.look(self._seen)
        if not changed:
            return
        facts = ModelFacts.of(self.model)
        if facts.vocab_size != self.vocab_size:
            raise ConfigurationError(
                f"the vocabulary of {describe(self.model)} had {self.vocab_size} tokens and has {facts.vocab_size} now "
                "(resize_token_embeddings), but what drafts for it was made for the former; build a new Speculator"
            )
        if facts.device != self.device:
            raise ConfigurationError(f"{describe(self.model)} was moved from {self.device} to {facts.device}; build a new Speculator")
        self.release()
        self.version += 1
        with torch.inference_mode(False), torch.no_grad():
            if changed & STRUCTURE or self.model.dtype != self._dtype:
                self._rebuild(facts)
            else:
                self.backend.forget_model()
        self._seen = dict(self._state.counts)

    def _rebuild(self, facts: ModelFacts) -> None:
        """Choose anew how passes are made."""
        before = self.backend.features
        self.backend.close()
        self._dtype, self.context, self.trained, self._taps = self.model.dtype, facts.context, facts.trained, []
        layers = layer_count(self.model)
        self.layer_tokens = [*self.layer_tokens, *[0] * layers][:layers]  # who counts on from before must not lose any
        self.backend = choose(facts, **self._how)
        if before is not None:
            self.read(before.numbers, whole=before.whole)

    # -- rows ---------------------------------------------------------------------------------------------------------

    @property
    def cache(self) -> Any:
        """The backend's: a ``TreeCache``, or one of the same verbs for models that can roll back but not branch."""
        return self.backend.cache

    @property
    def passes(self) -> int:
        """Forward passes made so far, the self-test's left out."""
        return self.backend.passes

    @property
    def lengths(self) -> list[int]:
        """Tokens cached per live row."""
        lengths: list[int] = self.cache.lengths
        return lengths

    def open(self, texts: Sequence[Sequence[int]], *, reserve: Sequence[int] = (), sources: Sequence[Source | None] = ()) -> None:
        """Append a row for each text. What a row shares with the beginning of another row, live or recently dropped, is copied.

        Args:
            texts: the prompts; a list that its owner extends as tokens are committed.
            reserve: tokens each row will hold in the end, as far as that is known, so that the cache need not grow.
            sources: what the encoder reads for each row, where the model has one. It reads equal sources once.
        """
        self.follow()
        first = len(self.lengths)
        beginnings = self._shared_beginnings(texts, first)
        self.backend.open([length for _, length in beginnings], [source for source in sources if source is not None])
        self.cache.reserve(self.backend.roomy(min(max(reserve, default=0), RESERVE)))
        self.cache.gather([row for row, _ in beginnings], [length for _, length in beginnings], first)
        self._texts += texts
        self._dropped = {row: text for row, text in self._dropped.items() if row >= len(self.lengths)}

    def some_sources(self, rows: int) -> list[Source | None]:
        """Sources to try ``rows`` rows with; None for each where the model has no encoder."""
        return [some_source(self.model, SOURCE) if self.sourced else None] * rows

    def compact(self, keep: Sequence[int]) -> None:
        """Drop every row not in ``keep``, ascending physical indices."""
        for row in range(len(keep), len(self.lengths)):  # these stay where they are, until a new row takes the place
            self._dropped[row] = list(self._texts[row][: self.lengths[row]])
        self._early = None
        self.cache.compact(keep)
        self._texts = [self._texts[row] for row in keep]

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget every token behind the first ``lengths[r]`` of each row."""
        self.cache.rewind(lengths)

    def reset(self) -> None:
        """Drop all rows; the buffers stay for the next call."""
        self.compact([])

    def release(self) -> None:
        """Drop all rows and give the memory back."""
        self.backend.release()
        self._texts, self._dropped = [], {}
        self.hidden, self.prompt_hidden, self.kept = None, None, {}

    def unpack(self) -> None:
        """Release everything that was made from the model, packed weights included, which are made anew for the next rows."""
        self.release()
        self._state.mark("weights")
        if self.backend.overrides is not None:
            self.backend.overrides.unpack()

    @contextmanager
    def unpacked(self) -> Iterator[None]:
        """The model holds its own weights meanwhile, in whatever layout passes read them."""
        overrides = self.backend.overrides
        with torch.inference_mode(False), torch.no_grad():
            if overrides is not None:
                overrides.unpack()
            try:
                yield
            finally:
                if overrides is not None:
                    overrides.pack()

    def rewrite(self, weights: Mapping[str, Tensor]) -> None:
        """Give the model's parameters other numbers, by name, between two passes. Rows stay as they are, with the keys and values that
        were made with the former numbers; no later row copies these."""
        with self.unpacked():
            parameters = dict(self.model.named_parameters())
            for name, numbers in weights.items():
                parameters[name].copy_(numbers)
        self._state.mark("weights")
        self._state.note()
        self._seen = dict(self._state.counts)
        self._texts, self._dropped = [[] for _ in self._texts], {}

    def close(self) -> None:
        """Release everything and leave the model as it was found; no more passes after this."""
        self.release()
        self.read(())
        self.backend.close()

    @property
    def ragged(self) -> bool:
        """Rows of a pass over chains pay for their own nodes alone."""
        return self.backend.ragged

    # -- hidden states ------------------------------------------------------------------------------------------------

    def read(self, features: Sequence[int], *, whole: bool = False) -> None:
        """Have passes hand out hidden states from now on; of no ``features``, none, which costs nothing. Replaces what was asked before.

        :attr:`hidden` are those of the nodes of a pass, :attr:`prompt_hidden` those of prompts: ``[1, F * d]`` per row at its last token.

        Args:
            features: numbers as in transformers' ``output_hidden_states``, :data:`~foredraft.models.features.LAST` for what the LM head
                reads; they are concatenated in this order.
            whole: hand out those of prompts at every token, ``[L, F * d]`` per row. **No prefix is reused then**: of a beginning that was
                copied from another row no hidden states are known. ``reuse_prefix`` is what it was once nobody reads whole texts.

        Raises:
            ConfigurationError: a number that there is no hidden state for.
            UnsupportedModelError: a hidden state that cannot be handed out.
        """
        found: Features | None = None
        if features and self.sourced:
            raise UnsupportedModelError(
                f"hidden states of {describe(self.model)}, which has an encoder, are not read yet; use another drafter"
            )
        if features:
            if not self._taps:
                ids = torch.arange(min(SAMPLE, self.context or SAMPLE), device=self.device)[None] % self.vocab_size
                self._taps = taps_of(self.model, ids)
            found = features_of(self.model, features, self._taps, whole=whole, device=self.device)
        before = self.backend.features
        self.backend.read(found)
        self.hidden = self.prompt_hidden = None
        if before is None or not before.whole:
            self._reused_prefix = self.reuse_prefix
        self.reuse_prefix = self._reused_prefix and not (found is not None and whole)

    @property
    def features(self) -> tuple[int, ...]:
        """The hidden states that passes hand out, in their order; the number of the last layer is given as ``LAST``."""
        return () if self.backend.features is None else self.backend.features.numbers

    # -- passes -------------------------------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Sequence[int]], *, first: int) -> Tensor:
        """Fill rows ``first``, ``first + 1``, … with what their cache lacks of ``prompts``, in chunks.

        Returns:
            ``[len(prompts), V]`` logits after each prompt's last token, in the model's dtype. Where hidden states are read,
            :attr:`prompt_hidden` holds one tensor per prompt, until the next pass.
        """
        logits: list[Tensor] = []
        hidden: list[Tensor] = []
        row = first
        while row < first + len(prompts):
            last = self._group(prompts, row, first)
            found, states = self._prefill_group(prompts[row - first : last - first], row)
            logits.append(found)
            hidden += states
            row = last
        self.prompt_hidden = hidden if self.features else None
        return torch.cat(logits)

    def score(self, tree: TokenTree, *, first: int = 0) -> Tensor:
        """``[R, N - first, V]`` logits at the nodes of ``tree`` from ``first`` on, behind each row's prefix. Advances nothing.

        A tree may be scored in several passes, level by level as it grows: the nodes before ``first`` were written by
        earlier passes over the same tree, in the same order, since the last ``commit``.

        A token outside the vocabulary is scored as one inside: whoever made the tree has to be told, but not by a crash
        that takes a GPU with it.

        Raises:
            ValueError: more nodes than the context holds, or no node to score.
            UnsupportedModelError: a tree that branches, for a model that can only verify chains.
        """
        if self.chains_only is not None and not tree.chain and tree.nodes > 1:
            raise UnsupportedModelError(f"{describe(self.model)} can only verify chains: {self.chains_only}")
        if self.context is not None and tree.nodes > self.context:
            raise ValueError(
                f"the tree has {tree.nodes} nodes per row, but the model's context holds only {self.context}; draft fewer nodes"
            )
        if not 0 <= first < tree.nodes:
            raise ValueError(f"first must name one of the {tree.nodes} nodes of the tree, got {first}")
        if tree.rows != len(self.lengths):
            raise ValueError(f"the tree has {tree.rows} rows and the cache {len(self.lengths)}")
        self.prompt_hidden, self.kept = None, {}
        early, self._early = self._early, None
        if early is None or not early.exit:
            early = Early(0, {})
        if first == 0 and (early.exit or self._keeping):
            return self._finish(tree, early)
        return self._forward(self._pass(tree, first))

    def keep(self, layers: Sequence[int]) -> None:
        """From the next tree on, :meth:`score` leaves in :attr:`kept` what comes out of these decoder layers, ascending and counted from 1;
        of no ``layers``, nothing. A pass is made in as many parts, so this costs a little time."""
        self._keeping = tuple(layers)

    def read_out(self, states: Tensor) -> Tensor:
        """``[n, V]`` what the model's final norm and LM head make of ``states`` ``[n, d]`` behind any layers."""
        return self._ranges.read_out(states)

    def score_early(
        self, tree: TokenTree, exit: int | SkipSet, *, first: int = 0, head: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """``[R, N - first, V]`` what ``head``, or the model's final norm and LM head, make of the states ``[R, N - first, d]`` behind
        layer ``exit``, at the nodes from ``first`` on; or, of a pass that leaves a set of sublayers out, the logits, or what ``head`` makes
        of the states behind the final norm. The next :meth:`score` of a tree that begins with these nodes reads them in the layers from
        ``exit``, or the first of the set, on only.

        Nodes before ``first`` were read by earlier calls with the same ``exit``, in the same order, since the last ``commit``.
        """
        skip, last = (exit, exit.first) if isinstance(exit, SkipSet) else (None, exit)
        part = Part(0, last if skip is None else self.layers, logits=head is None, skip=skip)
        if first == 0:
            self._early = None
        output, states = self._run(tree, first, part)
        assert (first == 0) == (self._early is None)
        self._early = Early(last, states if self._early is None else _joined(self._early.states, states))
        return output.logits if head is None else head(states[last] if skip is None else output.logits)

    def rearrange_early(self, order: Tensor) -> None:
        """The tree that comes begins with nodes ``order`` ``[R, n]`` of those that lower layers have read."""
        assert self._early is not None, "score_early comes first"
        self.cache.commit(order, [order.shape[1]] * len(order))
        self.cache.rewind([length - order.shape[1] for length in self.lengths])
        rows = torch.arange(len(order))[:, None]
        self._early.states = {
            layer: states[rows.to(states.device), order.to(states.device)] for layer, states in self._early.states.items()
        }

    def _finish(self, tree: TokenTree, early: Early) -> Tensor:
        """Logits at the nodes of ``tree``, of which some have been through the lower layers."""
        states, exit = early.states, early.exit
        read = states[exit].shape[1] if exit else tree.nodes
        if read < tree.nodes:
            states = _joined(states, self._run(tree, read, Part(0, exit, logits=False))[1])
        states = {layer: each[:, : tree.nodes] for layer, each in states.items()}
        output, upper = self._run(tree, 0, Part(exit, self.layers, states.get(exit)))
        self.hidden, self.kept = output.hidden, {layer: each for layer, each in (states | upper).items() if layer in self._keeping}
        return output.logits

    def _run(self, tree: TokenTree, first: int, part: Part) -> tuple[PassOutput, dict[int, Tensor]]:
        """``part`` of a pass over the nodes from ``first`` on; and what came out of its last layer, unless that is the model's last, and
        of those before it that are kept."""
        found: dict[int, Tensor] = {}
        between = [] if part.skip is not None else [layer for layer in self._keeping if part.begin < layer < part.end]
        for layer in [*between, part.end]:
            output = self._made(self._pass(tree, first, replace(part, end=layer, logits=part.logits and layer == part.end)))
            if output.hidden is not None:
                found[layer if part.skip is None else part.skip.first] = output.hidden
            part = replace(part, begin=layer, states=output.hidden)
        return output, found

    def _pass(self, tree: TokenTree, first: int, part: Part | None = None) -> ForwardPass:
        tokens = tree.tokens[:, first:].clamp(0, self.vocab_size - 1)
        return ForwardPass(tree, tree_window(tree, self.lengths, first), tokens, part=part)

    @property
    def layers(self) -> int:
        """Decoder layers, for passes of a part of them.

        Raises:
            UnsupportedModelError: they cannot be run in part.
        """
        return self._ranges.count

    @property
    def _ranges(self) -> LayerRanges:
        if self.sourced:
            raise UnsupportedModelError(
                f"the decoder layers of {describe(self.model)}, which has an encoder, are not run in part yet; use another drafter"
            )
        if type(self.backend) is not Eager or self.chains_only:
            passes = f"{type(self.backend).__name__} makes whole passes; use execution='auto' and attention='auto', or another drafter"
            why = f"{self.chains_only}; use another drafter" if self.chains_only else passes
            raise UnsupportedModelError(f"the decoder layers of {describe(self.model)} cannot be run in part: {why}")
        return self.backend.call.ranges

    @property
    def sublayers(self) -> Sublayers:
        """Those of the decoder layers, for passes without some of them.

        Raises:
            UnsupportedModelError: they cannot be left out.
        """
        assert self.layers and isinstance(self.backend, Eager)
        return self.backend.call.sublayers

    def apart(self, ids: Tensor, skip: SkipSet | None = None) -> Tensor:
        """``[1, L, V]`` logits at every token of ``ids`` ``[1, L]``, read as a text of its own: cache and rows stay as they are. The pass
        leaves the sublayers ``skip`` out, if they are given."""
        for layer in set(range(self.layers)).difference(() if skip is None else skip.whole):
            self.layer_tokens[layer] += ids.numel()
        with nullcontext() if skip is None else self.sublayers.left_out(skip):
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits

    def advance(self, tokens: Tensor) -> Tensor:
        """Append one token ``[R]`` to every row; returns the logits after it, ``[R, V]``."""
        root, window = TokenTree.root(tokens), Window(0, len(self.lengths), tuple(self.lengths), 1)
        logits = self._forward(ForwardPass(root, window, root.tokens))[:, 0]
        self.cache.advance()
        return logits

    def commit(self, path: Tensor | None, kept: Sequence[int]) -> None:
        """Keep the first ``kept[r]`` nodes of ``path`` ``[R, D]`` (None: the first nodes in order) of the tree just scored.

        ``path`` names nodes of the whole tree, whatever passes it was scored in.
        """
        self._early = None
        self.cache.commit(path, kept)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _made(self, given: ForwardPass) -> PassOutput:
        part = given.part or Part(0, len(self.layer_tokens))
        for layer in set(range(part.begin, part.end)).difference(part.skip.whole if part.skip is not None else ()):
            self.layer_tokens[layer] += given.tokens.numel()
        return self.backend.forward(given)

    def _forward(self, given: ForwardPass) -> Tensor:
        output = self._made(given)
        self.hidden = output.hidden
        return output.logits

    def _shared_beginnings(self, texts: Sequence[Sequence[int]], first: int) -> list[tuple[int, int]]:
        """For each text the physical row that shares the longest beginning with it, and how long it is."""
        if not (self.reuse_prefix and self.cache.shares):
            return [(first, 0)] * len(texts)
        held = [(row, ids, self.lengths[row]) for row, ids in enumerate(self._texts)]
        spoiled = self.cache.spoiled
        held += [(row, ids, min(len(ids), spoiled.get(row, len(ids)))) for row, ids in self._dropped.items()]
        return shared_beginnings(texts, held, first)

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

    def _prefill_group(self, prompts: Sequence[Sequence[int]], row: int) -> tuple[Tensor, list[Tensor]]:
        last, features = row + len(prompts), self.backend.features
        states = None if features is None else PromptStates(len(prompts), whole=features.whole)
        while True:
            starts = tuple(self.lengths[row:last])
            counts = [min(len(prompt) - start, self.prefill_chunk) for prompt, start in zip(prompts, starts)]
            width = max(counts)
            chunk = [list(p[s : s + c]) + [0] * (width - c) for p, s, c in zip(prompts, starts, counts)]
            tokens = to_device(chunk, self.device).clamp(max=self.vocab_size - 1)  # a draft may know fewer than its target
            window = Window(row, last, starts, width, counts=tuple(counts))
            logits = self._forward(ForwardPass(TokenTree.from_chain(tokens), window, tokens, keep=[count - 1 for count in counts]))
            self.commit(None, counts)
            if states is not None and self.hidden is not None:
                states.add(self.hidden, counts)
            if self.lengths[row] == len(prompts[0]):
                return logits[:, 0], [] if states is None else states.rows()


def _joined(before: Mapping[int, Tensor], after: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The states behind each layer at some nodes, and at those that come after them."""
    return {layer: torch.cat([states, after[layer]], 1) for layer, states in before.items()}
