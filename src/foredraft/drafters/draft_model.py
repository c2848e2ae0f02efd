"""A smaller causal language model as the drafter (Leviathan et al. 2023; Chen et al. 2023).

It has a cache of its own, one physical row per live row in the same order, and runs batched. A chain is decoded token by token;
a tree is scored level by level, one pass each. After a round it keeps what was accepted of what it has seen; the next draft feeds
it the rest.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft.backends.eager import Eager
from foredraft.device import to_device
from foredraft.drafters.base import DrafterInfo, DraftRequest, Feedback, Row
from foredraft.drafters.draft_loops.kernels import KernelLoop
from foredraft.drafters.draft_loops.recorded import RecordedLoop
from foredraft.drafters.foreign import VOCABULARIES, Foreign, foreign
from foredraft.drafters.growth import Expand, Growth, grow, one_by_one
from foredraft.drafters.learning.drafter import LearningDrafter
from foredraft.drafters.learning.serving import LearnOptions, learning_of
from foredraft.drafters.siblings import DRAWN, WRITTEN, offered
from foredraft.drafters.spelling import Spelling
from foredraft.drafters.vocabularies import Reading, checked_template
from foredraft.errors import ConfigurationError, unknown
from foredraft.hub import named
from foredraft.loading import load_model, name_of
from foredraft.models.encoder_decoder import (
    Source,
    borrow_encoder,
    fitted,
    same_encoder,
    start_of,
    window_of,
    with_encoder_of,
)
from foredraft.models.paged_cache import PagedCache
from foredraft.quantization import check_quantization
from foredraft.shapes import TreeShape, depths_of
from foredraft.target import Target, unwrap
from foredraft.tree import TokenTree

log = logging.getLogger(__name__)

BACK = 3  # tokens at the end of a text that a draft by text may write otherwise
FEW = 16  # tokens that are read in one pass with these


class DraftModel(LearningDrafter):
    """Options:

    source: a causal language model, or for a target with an encoder a smaller model with an encoder of its own: a ``PreTrainedModel``, a
        path, a hub id or ``zoo:NAME``.
    vocabulary: how it drafts if its tokenizer is not the target's. ``intersection``: the tokens that both know, by their bytes; its
        logits count at these alone. In a chain it looks ahead as well, for the target's tokens that it writes in several. ``text``: what it
        writes is tokenised again as the target would; chains, with rule match. ``auto``: ``intersection`` if the draft gives what both know
        enough of its probability, else ``text``.
    tokenizer: that of the draft model, if none is found under its name. Pass the target's as ``Speculator(..., tokenizer=...)``.
    siblings: how tokens are chosen when sampling: ``iid`` (from q, for the p/q rules), ``without-replacement`` (likewise, all
        different), ``keyed`` (with the target's noise, for match), ``top-k`` (the most likely), or ``auto``: whichever the rule in
        use accepts best in the shape in use.
    execution: how its passes are made, as in :class:`~foredraft.Speculator`.
    encoder: ``target`` gives it the states of the target's encoder, as suits a draft that was made from the target; ``own`` has its own
        encoder read the source; ``auto`` is ``target`` if both encoders have the same weights. A Whisper without an encoder always gets
        the target's states.
    template: for a target with an encoder, what a causal language model reads in front of the text, with ``{source}`` where the text of the
        source stands, such as ``"English: {source} German:"``. ``{text}`` may stand at its end.
    dtype, device: where to load it, the target's by default; a model object is used as it is.
    quantization: ``int8`` or ``int4`` loads it with weights of so many bits (torchao); the output distribution stays the target's.
    learn: whether the draft learns from what it serves, in a process beside it (docs/online.md): true; ``idle``, between calls only; a
        folder for what is learnt; or a dictionary of such options. A model object is copied, and stays as it is.
    """

    name = "draft-model"
    summary = "a smaller causal language model, KV-cached and batched; chains and trees"
    info = DrafterInfo(proposals=DRAWN.chains, branches=True, grows=True, runs_a_model=True, catches_up=True)

    def __init__(
        self,
        source: str | Path | PreTrainedModel,
        *,
        siblings: str = "auto",
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        execution: str = "auto",
        quantization: str | None = None,
        learn: bool | str | Path | Mapping[str, Any] = False,
        vocabulary: str = "auto",
        tokenizer: Any = None,
        encoder: str = "auto",
        template: str | None = None,
    ):
        source = named(source)
        if encoder not in ("auto", "own", "target"):
            raise unknown("unknown encoder", encoder, ("auto", "own", "target"))
        self.template = checked_template(template)
        self._states: Target | None = None  # whose encoder's states it reads, where these are not its own
        self._encoder = encoder
        check_quantization(quantization, source)
        self.learn = LearnOptions.of(learn)
        if self.learn is not None and quantization is not None:
            raise ConfigurationError("a quantized draft cannot learn: leave quantization out, or learn=False")
        self._offer = offered(siblings, DRAWN if vocabulary != "text" else WRITTEN)
        self.info = replace(self.info, proposals=self._offer.chains, needs_logits=self.learn is not None)
        self.source, self.dtype, self.device, self.execution = source, dtype, device, execution
        self.quantization = quantization
        if vocabulary not in VOCABULARIES:
            raise unknown("unknown vocabulary", vocabulary, VOCABULARIES)
        if vocabulary == "text" and siblings not in ("auto", "top-k"):
            raise ConfigurationError(f"a draft by text has no siblings {siblings!r}: leave siblings out, or take vocabulary='intersection'")
        self.vocabulary, self._tokenizer = vocabulary, tokenizer
        self.foreign: Foreign | None = None  # how it drafts across vocabularies, where its tokenizer is not the target's
        self._target: Target | None = None
        self._bound: Target | None = None  # the one that it drafts for
        self._loops: tuple[KernelLoop | RecordedLoop, ...] = ()  # that make whole drafts
        self._smaller, self._beside = False, True
        self._grown: Growth | None = None  # the tree of the round under way
        self._begun: list[int] = []  # tokens in front of the root of the chain under way, per row

    @property
    def model(self) -> Target:
        """The draft model behind its own cache; bound when a Speculator is built."""
        if self._target is None:
            raise ConfigurationError("this draft model is not bound to a Speculator yet; pass it as Speculator(..., drafter=...)")
        return self._target

    def bind(self, target: Target) -> None:
        draft = self.source
        if isinstance(draft, str):
            dtype, device = self.dtype or target.model.dtype, self.device or target.device
            draft = load_model(draft, dtype=dtype, device=device, quantization=self.quantization, encoders=target.sourced)
        given_states = self._encoder == "target"
        if target.sourced and type(unwrap(draft)).__name__ == "WhisperForCausalLM":
            draft, given_states = with_encoder_of(target.model, unwrap(draft)), True
        elif self._encoder == "auto" and target.sourced and _same_encoder(target, unwrap(draft)):
            given_states = True
            if isinstance(self.source, str):
                borrow_encoder(unwrap(draft), target.model)
        self._states = target if given_states else None
        self._check_encoders(target, unwrap(draft))
        self.foreign = foreign(target, unwrap(draft), self._tokenizer, self.vocabulary, self.template)
        if self.foreign is None and target.sourced and len({start_of(target.model), start_of(unwrap(draft))} - {None}) > 1:
            raise ConfigurationError(
                f"the target's texts start with token {start_of(target.model)}, and those of the draft {name_of(unwrap(draft))} with "
                f"{start_of(unwrap(draft))}; pass vocabulary='intersection'"
            )
        owned = isinstance(self.source, str)
        if self.learn is not None and self.foreign is not None:
            raise ConfigurationError("a draft with another tokenizer than the target's cannot learn from it: leave learn out")
        if self.learn is not None:
            draft, owned = draft if owned else copy.deepcopy(unwrap(draft)), True
            self.learning = learning_of(draft, target.model, self.learn)
        try:
            self._target = Target(
                draft,
                reuse_prefix=target.reuse_prefix,
                execution=self.execution,
                owned=owned,
                wait=target.wait,
                cache_memory=None,
                paged=isinstance(target.cache, PagedCache) and unwrap(draft).device.type == target.device.type,
            )
        except BaseException:
            if self.learning is not None:
                self.learning.close()
            raise
        self.info = replace(self.info, draft_model=self._target)
        if self.foreign is not None:
            log.warning("draft model %s: vocabulary %s", name_of(unwrap(draft)), self.foreign)
            if self.foreign.by == "text":
                self._offer = offered("auto", WRITTEN)
                self.info = replace(self.info, proposals=self._offer.chains, branches=False, grows=False)
        self._loops = () if self.foreign is not None else (KernelLoop(self._target), RecordedLoop(self._target))  # tried in this order
        self._smaller, self._bound = self._target.vocab_size < target.vocab_size, target
        self._beside = self._target.device == target.device

    @property
    def page_bytes(self) -> int:
        return super().page_bytes if self._beside else 0  # the budget is of the target's device

    @property
    def source_bytes(self) -> int:
        if self.template is not None:
            return self.page_bytes  # it reads the source as a part of its text
        return super().source_bytes if self._beside else 0

    def _check_encoders(self, target: Target, draft: PreTrainedModel) -> None:
        encoder = bool(draft.config.is_encoder_decoder)
        if encoder and not target.sourced:
            raise ConfigurationError(f"the draft {name_of(draft)} has an encoder and the target has none; give a decoder-only draft")
        if target.sourced and not encoder and self.template is None:
            raise ConfigurationError(
                f"the draft {name_of(draft)} has no encoder to read the target's source with; give a smaller model with an encoder, or, "
                "where sources are text, a template: drafter_options={'template': 'English: {source} German:'}, on the command line "
                "--drafter-option 'template=English: {source} German:'"
            )
        if self.template is not None and (encoder or not target.sourced or target.model.main_input_name != "input_ids"):
            raise ConfigurationError("a template is for a draft without an encoder, and a target that reads text with one: leave it out")
        if self._states is not None:
            widths = [model.get_encoder().config.hidden_size for model in (target.model, draft)] if encoder and target.sourced else [0, 1]
            if len(set(widths)) > 1:
                raise ConfigurationError("encoder='target' needs a target and a draft with encoders whose states have the same width")
        elif target.sourced and encoder and draft.main_input_name != target.model.main_input_name:
            raise ConfigurationError(
                f"the encoder of the draft {name_of(draft)} reads {draft.main_input_name}, and the target's {target.model.main_input_name}"
            )
        elif target.sourced and encoder and (theirs := window_of(target.model)) != (own := window_of(draft)):
            raise ConfigurationError(
                f"the encoder of the draft {name_of(draft)} reads {own} mel bins and states, and the target's {theirs}"
            )
        if target.sourced and self.learn is not None:
            raise ConfigurationError("a draft with an encoder cannot learn while it serves yet: leave learn out")

    def facts(self, *, all: bool = False) -> dict[str, Any]:
        facts = super().facts(all=all)
        return facts if self.foreign is None else {**facts, "vocabulary": self.foreign}

    def refusal(self, shape: TreeShape) -> str | None:
        if shape.is_chain:
            return None
        if self.foreign is not None and self.foreign.by == "text":
            return f"a draft by text is a chain; use shape='chain({shape.depth})' or the option vocabulary='intersection'"
        if self.model.chains_only:
            return f"the draft model can only draft chains: {self.model.chains_only}; use shape='chain({shape.depth})'"
        grown = shape.grown_nodes
        if self.model.trained is not None and grown >= self.model.trained:
            return f"shape {shape} grows {grown} nodes, but the draft model's context holds only {self.model.trained}; draft fewer"
        return None

    def check_source(self, source: Source) -> None:
        if self.foreign is not None and self._states is None:
            self.foreign.vocabularies.text(source)
        elif self._states is None:
            source.read_anew()

    def begin(self, rows: Sequence[Row]) -> None:
        """The next draft opens them, and reads them at once, in the order in which they share. Sources are read now: what an encoder takes
        is no part of a draft."""
        own = rows if self.foreign is None else self.foreign.begin(rows)
        if self.model.sourced:
            self._append(rows, own, share=False)
        super().begin(rows)
        if self.learning is not None:
            self.learning.begin(rows)

    def read_ahead(self, row: Row, text: Sequence[int], hidden: Tensor | None) -> None:
        """Leaves it in the cache, where there are pages for it."""
        model = self.model
        within = model.trained is None or len(text) <= model.trained
        if self.foreign is None and not model.sourced and within and model.reuse_prefix and isinstance(model.cache, PagedCache):
            self._keep_to_budget()
            first = len(model.lengths)
            model.open([text], reserve=[row.capacity], isolations=[row.isolation])
            model.prefill([text], first=first)
            model.compact(range(first))

    def _open(self, rows: Sequence[Row], own: Sequence[Row]) -> bool:
        """Open what is not open yet of ``rows``, which are ``own`` in this model's tokens. Whether there was any; it must be read now."""
        if len(self.model.lengths) == len(rows):
            return False
        self.model.follow()
        first = len(self.model.lengths)
        self._append(rows[first:], own[first:])
        return True

    def _append(self, rows: Sequence[Row], own: Sequence[Row], *, share: bool = True) -> None:
        reserve, isolations = [row.capacity for row in rows], [row.isolation for row in rows]
        unread = 1 if self.model.chains_only else 2  # a draft may read the last tokens again
        texts, sources = [row.ids for row in own], self._sources(rows)
        self.model.open(texts, reserve=reserve, sources=sources, isolations=isolations, unread=unread, share=share)

    def _keep_to_budget(self) -> None:
        """Of the target's device; on another one, nothing counts what the draft model keeps."""
        if (
            self._beside
            and self._bound is not None
            and isinstance(self.model.cache, PagedCache)
            and isinstance(self._bound.cache, PagedCache)
        ):
            self.model.cache.keep_to(self._bound.cache)

    def _sources(self, rows: Sequence[Row]) -> list[Source | None]:
        """What the draft model reads for ``rows``, where it has an encoder."""
        given = [row.source for row in rows if row.source is not None and self.template is None]
        if not given:
            return []
        if self._states is None:
            draft = self.model.model
            return [fitted(draft, each.read_anew() if self.foreign is None else self.foreign.source(each)) for each in given]
        assert isinstance(self._states.backend, Eager)
        encoded, dtype = self._states.backend.encoded(given), self.model.model.dtype
        return [Source({}, each.states[None].to(dtype), each.source.ids) for each in encoded]

    def draft(self, request: DraftRequest) -> TokenTree:
        own = self._own(request.rows)
        limits = [min(limit, self._room(row)) for row, limit in zip(own, request.limits)]
        depth = max(limits)
        self.expected_accepted = None
        if depth < 1:
            return TokenTree.root(request.roots())
        self._keep_to_budget()
        opened, chain = self._open(request.rows, own), request.shape.is_chain
        request = replace(request, shape=request.shape.truncate(depth), depth=depth, limits=limits, partial=self.foreign is not None)
        if self.foreign is not None and self.foreign.by == "text":
            return self._write(request, own, self.foreign, opened=opened)
        self._grown = next((grown for loop in self._loops if (grown := loop.draft(request, chain=chain)) is not None), None)
        by_level = self._grown is None
        if self._grown is None and chain:
            return self._chain(request, own, opened=opened)
        self._grown = self._grown or grow(request, self._expand(own))
        self.expected_accepted = self._grown.expected
        return self._grown.tree.truncate(limits) if by_level else self._grown.tree

    def _chain(self, request: DraftRequest, own: Sequence[Row], *, opened: bool) -> TokenTree:
        self._begun = [len(row.ids) - 1 for row in own]
        if self.foreign is not None and not self.model.chains_only:
            readings = [self.foreign.readings[row.slot] for row in own]
            spelling = Spelling(self.foreign, self.model, readings, self._ends(own, request.roots(), opened=opened), request.limits)
            tree = one_by_one(request, spelling.after)
            spelling.end()
            return tree

        def after(path: list[Tensor]) -> Tensor:
            return self._said(self._feed(self._known(path[-1])) if len(path) > 1 else self._after(own, path[0]))

        return one_by_one(request, after)

    def _write(self, request: DraftRequest, own: Sequence[Row], foreign: Foreign, *, opened: bool) -> TokenTree:
        """A chain of what the draft writes greedily, in the target's tokens."""
        self._begun = [len(row.ids) - 1 for row in own]
        ends = self._ends(own, request.roots(), opened=opened)
        found = [foreign.first(row, each) for row, each in zip(own, ends)]
        backs = [back for _, back in found]
        self.model.rewind([length - back for length, back in zip(self.model.lengths, backs)])
        steps = [to_device([token for token, _ in found], request.device)]
        for _ in range(request.depth):  # one token more, for the last one seldom stands
            steps.append(self._feed(steps[-1]).argmax(-1))
        return request.chains(foreign.written(request.rows, torch.stack(steps, 1).tolist(), backs))

    def _ends(self, own: Sequence[Row], roots: Tensor, *, opened: bool) -> Sequence[Tensor]:
        """Per row ``[n, V]`` logits at the last tokens of its text, in this model's tokens: :data:`BACK` + 1 or more of them where one pass
        reads few others, else the last one."""
        begins = [min(length, max(0, len(row.ids) - 1 - BACK)) for length, row in zip(self.model.lengths, own)]
        width = max(len(row.ids) - begin for row, begin in zip(own, begins))
        if width > FEW or self.model.chains_only or opened:
            return list(self._after(own, roots)[:, None])
        self.model.rewind(begins)
        if list(self.model.lengths) != begins:  # some layers have given back what they had read
            return list(self._after(own, roots)[:, None])
        fresh = [row.ids[begin:] for row, begin in zip(own, begins)]
        tokens = to_device([[*ids, *[0] * (width - len(ids))] for ids in fresh], self.model.device)
        logits = self.model.score(TokenTree.from_chain(tokens))
        self.model.commit(None, [len(ids) for ids in fresh])
        return [each[: len(ids)] for each, ids in zip(logits, fresh)]

    def _own(self, rows: Sequence[Row]) -> Sequence[Row]:
        """``rows`` in this model's tokens, its cache cut back to where these are still the same."""
        if self.foreign is None:
            return rows
        own, same = self.foreign.follow(rows)
        self.model.rewind([min(pair) for pair in zip(self.model.lengths, same)])
        return own

    def _known(self, tokens: Tensor) -> Tensor:
        """This model's tokens for the target's; one that only the target's padding knows is fed as another."""
        if self.foreign is not None:
            return self.foreign.known[tokens]
        return tokens.clamp(max=self.model.vocab_size - 1) if self._smaller else tokens

    def _said(self, logits: Tensor) -> Tensor:
        """This model's ``logits`` at the target's tokens."""
        return logits if self.foreign is None else self.foreign.intersection.scattered(logits)

    def _expand(self, rows: Sequence[Row]) -> Expand:
        """What this model says after the nodes of a tree. The root comes first, with whatever else its cache lacks; it is then taken
        for uncommitted, so that the levels below it are later nodes of one tree."""

        def expand(tree: TokenTree, first: int) -> Tensor:
            if first == 0:
                logits = self._said(self._after(rows, tree.tokens[:, 0]))[:, None]
                self.model.rewind([len(row.ids) - 1 for row in rows])
                return logits
            known = self._known(tree.tokens)
            if known is not tree.tokens:
                tree = replace(tree, tokens=known)
            return self._said(self.model.score(_moved(tree, self.model.device), first=first))

        return expand

    def _after(self, rows: Sequence[Row], roots: Tensor) -> Tensor:
        """``[R, V]`` logits after each row's text, whatever this cache lacks of it: mostly the root alone."""
        if all(len(row.ids) == length + 1 for row, length in zip(rows, self.model.lengths)):
            return self._feed(self._known(roots) if self.foreign is None else to_device([row.ids[-1] for row in rows], roots.device))
        return self.model.prefill([row.ids for row in rows], first=0)

    def _feed(self, tokens: Tensor) -> Tensor:
        """``[R, V]`` logits after one more token ``[R]`` per row."""
        return self.model.advance(tokens.to(self.model.device))

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        """Keep what was accepted of what was seen; the text but for its last token is the longest beginning that counts."""
        if self._grown is not None:
            self._commit(self._grown, feedback)
        if self.foreign is not None:
            if self._grown is not None or (self._begun and self.model.chains_only and self.foreign.by != "text"):
                self.foreign.drafted(rows, feedback)
            if self._grown is not None or self._begun:
                self._own(rows)
            self._grown, self._begun = None, []
            return
        self._grown = None
        lengths = [min(length, len(row.ids) - 1) for length, row in zip(self.model.lengths, rows)]
        if self._begun:  # where other drafters take part, what was accepted need not be what this one drafted
            kept = [begun + 1 + count for begun, count in zip(self._begun, feedback.accepted)]
            lengths, self._begun = [min(pair) for pair in zip(lengths, kept)], []
        self.model.rewind(lengths)
        self.learn_from(rows, feedback)

    def rewrite(self, weights: Mapping[str, Tensor]) -> None:
        self.model.rewrite(weights)

    def rewritten(self, rows: Sequence[Row]) -> None:
        """The texts are read again where that pays."""
        learning = self.learning
        assert learning is not None
        if learning.reads_again(rows) and all(self._room(row) > 0 for row in rows):
            begin = learning.clock()
            self.model.compact([])
            self._open(rows, rows)
            self.model.prefill([row.ids[:-1] for row in rows], first=0)
            learning.read_again(sum(len(row.ids) for row in rows), learning.clock() - begin)

    def _commit(self, grown: Growth, feedback: Feedback) -> None:
        """Commit the accepted path to this cache, as far as its nodes were fed: all but its last one at most."""
        if grown.seen == 1 or (feedback.path is None and not grown.tree.chain):
            self.model.rewind([length + 1 for length in self.model.lengths])
            return
        if feedback.path is None:
            self.model.commit(None, [min(count + 1, grown.seen) for count in feedback.accepted])
            return
        if grown.own is None:
            path, deepest = feedback.path.clamp(max=grown.seen - 1), max(depths_of((grown.tree.static_parents or ())[: grown.seen]))
            kept = [min(count, deepest) + 1 for count in feedback.accepted]
        else:
            own, last = grown.own.tolist(), grown.seen - 1
            numbered = [[mine[node] for node in nodes] for mine, nodes in zip(own, feedback.path.tolist())]
            kept = [sum(number <= last for number in row[: count + 1]) for row, count in zip(numbered, feedback.accepted)]
            path = torch.tensor([[min(number, last) for number in row] for row in numbered])
        self.model.commit(path.to(self.model.device), kept)

    def end(self, rows: Sequence[Row]) -> None:
        if self.foreign is not None:
            self.foreign.end({row.slot for row in rows})
        super().end(rows)

    def _keep(self, rows: list[int]) -> None:
        self.model.compact([row for row in rows if row < len(self.model.lengths)])

    def reset(self) -> None:
        super().reset()
        if self._target is not None and (self._slots or self._target.lengths):
            self._target.release()  # an interrupted round leaves drafted tokens behind
        self._slots, self._grown, self._begun = [], None, []
        if self.foreign is not None:
            self.foreign.readings.clear()

    def follow(self) -> int:
        self.model.follow()
        return self.model.version

    def release(self) -> None:
        self.reset()
        self.model.unpack()

    def close(self) -> None:
        super().close()
        self.model.close()

    def _room(self, row: Row) -> int:
        """How many tokens this model can still draft for ``row`` inside its own context."""
        if isinstance(row, Reading) and row.behind:
            return 0
        return row.capacity if self.model.trained is None else max(0, self.model.trained - len(row.ids))


def _same_encoder(target: Target, draft: PreTrainedModel) -> bool:
    """Whether ``draft`` has kept the encoder of the model that it was made from. The target's packed layers are unpacked only if all else
    is the same."""
    if not draft.config.is_encoder_decoder or draft.device != target.device or not same_encoder(target.model, draft, known=False):
        return False
    with target.unpacked():
        return same_encoder(target.model, draft)


def _moved(tree: TokenTree, device: torch.device) -> TokenTree:
    if tree.tokens.device == device:
        return tree
    return replace(
        tree, tokens=tree.tokens.to(device), parents=tree.parents.to(device), valid=None if tree.valid is None else tree.valid.to(device)
    )
