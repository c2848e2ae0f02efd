"""The target: an unmodified transformers model behind four verbs, open, prefill, score and commit.

The only module that calls the model; masks.py and cache.py beside it are the only ones that know its masks and caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from foredraft.backends import native
from foredraft.backends.compilation import Compilation
from foredraft.backends.compilation import refusal as compilation_refusal
from foredraft.backends.eager import TreeExecution
from foredraft.backends.flex import ATTENTIONS, Flex
from foredraft.backends.flex import refusal as flex_refusal
from foredraft.backends.graphs import Graphs, graph_test
from foredraft.backends.graphs import refusal as graph_refusal
from foredraft.backends.kernels import Kernels
from foredraft.backends.packing import HINTS, NATIVE
from foredraft.backends.packing import refusal as packing_refusal
from foredraft.backends.rollback import ReplayCache, ReplayExecution
from foredraft.errors import ConfigurationError, UnsupportedModelError
from foredraft.models.cache import TreeCache, Window
from foredraft.models.features import Features, PromptStates, Tap, features_of, stop_watching, taps_of
from foredraft.models.support import chains_only, check_model, context_of, describe, tolerance
from foredraft.models.weights import fingerprint, unwrap
from foredraft.target.prefixes import shared_beginnings
from foredraft.target.self_test import attention_test, self_test
from foredraft.tree import TokenTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foredraft.backends.kernel_pass import Direct

PREFILL_CHUNK = 1024  # tokens of one row in a prefill pass
PREFILL_TOKENS = 4096  # tokens of all rows in a prefill pass
RESERVE = 4096  # tokens per row allocated ahead of their use, at most
SAMPLE = 7  # tokens of the pass that packed weights are compared on
EXECUTIONS = ("auto", "eager", "packed", "native", "compiled", "graphs")


class Execution(Protocol):
    """How forward passes are made and what they leave behind; one per kind of cache."""

    passes: int
    features: Features | None
    hidden: Tensor | None

    @property
    def ragged(self) -> bool: ...

    @property
    def direct(self) -> Direct | None: ...

    @property
    def cache(self) -> TreeCache | ReplayCache: ...

    def forward(self, tree: TokenTree, window: Window, *, tokens: Tensor | None = None, keep: Sequence[int] | None = None) -> Tensor: ...


class Target:
    """A causal language model with a cache that can forget.

    Rows are physical: ``open`` appends them, ``compact`` drops some and moves later ones forward, and every call takes
    or returns them in that order.

    Args:
        model: a decoder-only ``PreTrainedModel`` with sdpa or eager attention; PEFT adapters and device maps are fine.
        test: run the self-test (a few passes over a handful of tokens).
        prefill_chunk: most tokens of a row in one prefill pass; bounds the memory of a long prompt.
        reuse_prefix: keep the cache of finished rows for prompts that begin alike.
        execution: ``eager`` runs the model as it is; ``packed`` lays its weights out for oneDNN's kernels first, ``native`` for
            kernels compiled on this machine; ``compiled`` compiles its decoder layers with torch.compile; ``graphs``, on CUDA, replays
            passes from recordings; ``auto`` takes what is measured to be fastest of the first three, and only where that can be done
            without holding the weights twice, and ``graphs`` where they pass their test.
        owned: nobody else holds the model, so that packed weights may replace the originals.
        attention: how passes that need a mask attend: ``model``, as the model was loaded; ``flex``, through FlexAttention; ``auto``
            takes FlexAttention on CUDA for the shapes that it is measured to be faster for.

    Attributes:
        execution: what is in use: ``eager``, ``packed``, ``native``, ``compiled`` or ``graphs``; ``unpacked`` says why weights are
            not packed, ``ungraphed`` why passes are not replayed.
        kernels: how the weights are laid out, None if they are as they were.
        compilation: the compiled layers, None if there are none.
        graphs: the recorded passes, None if there are none.
        flex: FlexAttention, its passes and trials; None if it is out of the question, and ``unflexed`` says why.
        chains_only: why this target can verify chains but no branching trees; None if it takes trees.
        context: most tokens a row may hold, None if the model sets no limit.
        prompt_hidden: hidden states of the prompts that were just prefilled, see :meth:`read`.

    Raises:
        UnsupportedModelError: the model cannot roll back, or fails the self-test.
        ConfigurationError: an execution or an attention that the model cannot have.
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
    ):
        self.model = unwrap(model)
        check_model(self.model)
        config = self.model.config.get_text_config()
        self.vocab_size: int = getattr(self.model.get_output_embeddings(), "out_features", None) or config.vocab_size
        self.context = context_of(config)
        self.device = self._input_device()
        self.prefill_chunk = prefill_chunk
        self.owner: object = None  # the session whose rows these are
        self.chains_only: str | None = chains_only(self.model)
        self._execution: Execution
        if self.chains_only is None:
            self._execution = TreeExecution(self.model, self.device, self.context)
        else:
            self._execution = ReplayExecution(self.model, self.device, self.vocab_size, prefill_chunk, self.context)
        self.reuse_prefix = reuse_prefix
        self._texts: list[Sequence[int]] = []  # of live rows
        self._dropped: dict[int, list[int]] = {}  # what physical rows past the live ones still hold
        self._weights: object = None
        self._taps: list[Tap | None] = []  # where hidden states come by, once that was asked
        self._reused_prefix = reuse_prefix  # before somebody read whole texts
        self.prompt_hidden: list[Tensor] | None = None
        self._check_mode()
        self.kernels: Kernels | None = None
        self.compilation: Compilation | None = None
        self.graphs: Graphs | None = None
        self.unpacked = self._pack(execution, owned)
        if test:
            self.chains_only = self_test(self)
        self.flex: Flex | None = None
        self._ungraphed = self._record(execution, attention, test)
        self.unflexed = self._attend(attention, test)
        self._execution.passes = 0

    # -- rows ---------------------------------------------------------------------------------------------------------

    @property
    def cache(self) -> TreeCache | ReplayCache:
        return self._execution.cache

    @property
    def passes(self) -> int:
        """Forward passes made so far, the self-test's left out."""
        return self._execution.passes

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
        self._check_mode()
        self._follow_weights()
        first = len(self.lengths)
        sources = self._shared_beginnings(texts, first)
        self.cache.open([length for _, length in sources])
        tokens = min(max(reserve, default=0), RESERVE)
        self.cache.reserve(tokens if self.graphs is None else self.graphs.roomy(tokens))
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
        self.cache.rewind(lengths)

    def reset(self) -> None:
        """Drop all rows; the buffers stay for the next call."""
        self.compact([])

    def release(self) -> None:
        """Drop all rows and give the memory back."""
        self.cache.forget()
        self._texts, self._dropped = [], {}
        self._execution.hidden = self.prompt_hidden = None
        if self.graphs is not None:
            self.graphs.drop()

    def close(self) -> None:
        """Release everything and leave the model as it was found; no more passes after this."""
        self.release()
        self.read(())
        if self.kernels is not None:
            self.kernels.undo()
            self.kernels = None
        if self.compilation is not None:
            self.compilation.undo()
            self.compilation = None
        self._replay(None)

    @property
    def execution(self) -> str:
        if self.compilation is not None:
            return "compiled"
        if self.graphs is not None and self.graphs.refused is None:
            return "graphs"
        if self.kernels is None:
            return "eager"
        return "native" if self.kernels.native else "packed"

    @property
    def ungraphed(self) -> str | None:
        """Why passes are not replayed from recordings, None if they are."""
        return self._ungraphed if self.graphs is None else self.graphs.refused

    @property
    def ragged(self) -> bool:
        """Rows of a pass over chains pay for their own nodes alone."""
        return self._execution.ragged

    @property
    def direct(self) -> Direct | None:
        """The model in one call of a kernel, where its weights are laid out for that and nobody watches."""
        return self._execution.direct

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
        if features:
            if not self._taps:
                ids = torch.arange(min(SAMPLE, self.context or SAMPLE), device=self.device)[None] % self.vocab_size
                self._taps = taps_of(self.model, ids)
            found = features_of(self.model, features, self._taps, whole=whole, device=self.device)
        before, self._execution.features = self._execution.features, found
        self._execution.hidden = self.prompt_hidden = None
        if before is None or not before.whole:
            self._reused_prefix = self.reuse_prefix
        self.reuse_prefix = self._reused_prefix and not (found is not None and whole)
        if self.graphs is not None:
            self.graphs.read(found)

    @property
    def features(self) -> tuple[int, ...]:
        """The hidden states that passes hand out, in their order; the number of the last layer is given as ``LAST``."""
        return () if self._execution.features is None else self._execution.features.numbers

    @property
    def hidden(self) -> Tensor | None:
        """``[R, N - first, F * d]`` the :attr:`features` at the nodes of the last pass, :meth:`score` or :meth:`advance`, in the model's
        dtype, on :attr:`device`; None if there are none. Of a chain's filler they may be anything. A tensor of the caller's own."""
        return self._execution.hidden

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
        self.prompt_hidden = None
        counts = None if first or tree.rows == 1 or self.device.type != "cpu" else tree.counts
        window = Window(0, len(self.lengths), tuple(length + first for length in self.lengths), tree.nodes - first, first, counts)
        return self._execution.forward(tree, window, tokens=tree.tokens[:, first:].clamp(0, self.vocab_size - 1))

    def advance(self, tokens: Tensor) -> Tensor:
        """Append one token ``[R]`` to every row; returns the logits after it, ``[R, V]``."""
        window = Window(0, len(self.lengths), tuple(self.lengths), 1)
        logits = self._execution.forward(TokenTree.root(tokens), window)[:, 0]
        self.cache.advance()
        return logits

    def commit(self, path: Tensor | None, kept: Sequence[int]) -> None:
        """Keep the first ``kept[r]`` nodes of ``path`` ``[R, D]`` (None: the first nodes in order) of the tree just scored.

        ``path`` names nodes of the whole tree, whatever passes it was scored in.
        """
        self.cache.commit(path, kept)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check_mode(self) -> None:
        if self.model.training:
            raise UnsupportedModelError("the model is in training mode (dropout would make every pass different); call model.eval()")
        stop_watching(self.model)

    def _pack(self, execution: str, owned: bool) -> str | None:
        """Pack the weights if that is asked for, or can be done without holding them twice; else returns why not."""
        if execution not in EXECUTIONS:
            raise ConfigurationError(f"unknown execution {execution!r}; choose {', '.join(EXECUTIONS)}")
        if execution == "eager":
            return "execution='eager' was asked for"
        if execution == "compiled":
            self._compile()
            return "execution='compiled' was asked for"
        if execution == "graphs":
            return "execution='graphs' was asked for"
        if execution == "auto" and not owned:
            return "the model was handed in, and packed weights would be held beside its own; execution='packed' accepts that"
        hints = self._hints(execution)
        why = packing_refusal(self.model, hints)
        if why is None:
            kernels = Kernels(self.model, self._sample, owned=owned, hints=hints)
            why = kernels.refused
            self.kernels = kernels if why is None else None
        if why is not None and execution != "auto":
            raise ConfigurationError(f"{describe(self.model)} cannot be packed: {why}; use execution='auto'")
        return why

    def _compile(self) -> None:
        why = compilation_refusal(self.model, self.chains_only)
        if why is None:
            self.compilation = Compilation(self.model, self._every_kind)
            why = self.compilation.refused
        if why is not None:
            self.compilation = None
            raise ConfigurationError(f"{describe(self.model)} cannot be compiled: {why}; use execution='auto'")

    @torch.inference_mode()
    def _every_kind(self) -> list[Tensor]:
        """The logits of one pass of each kind that is compiled: one node and several, of one row, of rows that stand alike and not."""
        found = []
        for lengths in ((4,), (4, 4), (4, 2)):
            texts = [[(3 + row + i) % self.vocab_size for i in range(length)] for row, length in enumerate(lengths)]
            self.open(texts)
            self.prefill(texts, first=0)
            for nodes in (1, 3):
                tokens = torch.arange(7, 7 + nodes, device=self.device).expand(len(lengths), -1) % self.vocab_size
                found.append(self.score(TokenTree.from_chain(tokens)))
            self.release()
        self._execution.passes = 0
        return found

    def _record(self, execution: str, attention: str, test: bool) -> str | None:
        """Replay passes from recordings if that is asked for, or passes the test; else returns why not."""
        if execution not in ("auto", "graphs"):
            return f"execution={execution!r} was asked for"
        why = graph_refusal(self.model, self.device, self.chains_only, attention)
        if why is None and isinstance(self._execution, TreeExecution):
            self._replay(Graphs.of(self.model, self._execution.cache, self.context, tolerance=tolerance(self.model), owner=self))
            why = graph_test(self) if test else None
        if why is None:
            return None
        self._replay(None)
        if execution == "graphs":
            raise ConfigurationError(f"passes of {describe(self.model)} cannot be replayed: {why}; use execution='auto'")
        return why

    def _replay(self, graphs: Graphs | None) -> None:
        if self.graphs is not None:
            self.graphs.drop()
        self.graphs = graphs
        if isinstance(self._execution, TreeExecution):
            self._execution.graphs = graphs

    def give_up(self, rows: int, slot: int) -> None:
        """Filler is about to overwrite what dropped rows before ``rows`` hold from ``slot`` on."""
        for row in range(len(self.lengths), rows):
            if row in self._dropped:
                del self._dropped[row][slot:]

    def read_again(self) -> None:
        """Fill the cache of every live row anew, after a pass that may have written anywhere."""
        texts = [list(text[:length]) for text, length in zip(self._texts, self.lengths)]
        self._dropped = {}
        self.cache.rewind([0] * len(texts))
        self.prefill(texts, first=0)

    def _attend(self, attention: str, test: bool) -> str | None:
        """Attend through FlexAttention if that is asked for, or may turn out to be faster; else returns why not."""
        if attention not in ATTENTIONS:
            raise ConfigurationError(f"unknown attention {attention!r}; choose {', '.join(ATTENTIONS)}")
        if attention == "model":
            return "attention='model' was asked for"
        if self.graphs is not None:
            return "passes are replayed from recordings"
        why = self.chains_only or flex_refusal(self.model, self.device, packed=self.kernels is not None, forced=attention == "flex")
        if why is None and isinstance(self._execution, TreeExecution):
            flex = Flex(self.model, self.device, forced=attention == "flex", tolerance=tolerance(self.model))
            why = attention_test(self, self._execution, flex) if flex.forced and test else None
            self.flex = self._execution.flex = flex if why is None else None
        if why is not None and attention == "flex":
            raise ConfigurationError(f"{describe(self.model)} cannot attend through FlexAttention: {why}; use attention='auto'")
        return why

    def _hints(self, execution: str) -> tuple[int, ...]:
        """The layouts to choose among."""
        missing = native.refusal(self.model.dtype)
        if execution == "native":
            if missing is not None:
                raise ConfigurationError(f"the native kernels cannot be used: {missing}; use execution='auto'")
            return (NATIVE,)
        return HINTS if execution == "packed" or missing is not None else (*HINTS, NATIVE)

    def _follow_weights(self) -> None:
        """Forget what was made from weights that have changed since."""
        if fingerprint(self.model) == self._weights:
            return
        if self._weights is not None:
            self._dropped = {}
            if self.graphs is not None:
                self.graphs.follow()
            if self.kernels is not None and not self.kernels.owned:
                self.kernels.undo()
                self.kernels = Kernels(self.model, self._sample, owned=False, hints=self.kernels.hints)
        self._weights = fingerprint(self.model)

    @torch.inference_mode()
    def _sample(self) -> Tensor:
        ids = torch.arange(min(SAMPLE, self.context or SAMPLE), device=self.device)[None] % self.vocab_size
        logits: Tensor = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        return logits

    def _shared_beginnings(self, texts: Sequence[Sequence[int]], first: int) -> list[tuple[int, int]]:
        """For each text the physical row that shares the longest beginning with it, and how long it is."""
        if not (self.reuse_prefix and self.cache.shares):
            return [(first, 0)] * len(texts)
        held = [(row, ids, self.lengths[row]) for row, ids in enumerate(self._texts)]
        held += [(row, ids, len(ids)) for row, ids in self._dropped.items()]
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
        last, features = row + len(prompts), self._execution.features
        states = None if features is None else PromptStates(len(prompts), whole=features.whole)
        while True:
            starts = tuple(self.lengths[row:last])
            counts = [min(len(prompt) - start, self.prefill_chunk) for prompt, start in zip(prompts, starts)]
            width = max(counts)
            chunk = [list(p[s : s + c]) + [0] * (width - c) for p, s, c in zip(prompts, starts, counts)]
            tokens = torch.tensor(chunk, device=self.device).clamp(max=self.vocab_size - 1)  # a draft may know fewer than its target
            window = Window(row, last, starts, width, counts=tuple(counts))
            logits = self._execution.forward(TokenTree.from_chain(tokens), window, keep=[count - 1 for count in counts])
            self.commit(None, counts)
            if states is not None and self.hidden is not None:
                states.add(self.hidden, counts)
            if self.lengths[row] == len(prompts[0]):
                return logits[:, 0], [] if states is None else states.rows()

    def _input_device(self) -> torch.device:
        """Where input ids go: the device of the embeddings, also under a device map."""
        embeddings = self.model.get_input_embeddings()
        device: torch.device = embeddings.weight.device if embeddings is not None else self.model.device
        if device.type != "meta":
            return device
        hook = getattr(embeddings, "_hf_hook", None)  # accelerate: an offloaded weight is nowhere until it is needed
        return torch.device(getattr(hook, "execution_device", None) or "cpu")
