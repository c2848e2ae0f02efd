"""What drafters have in common whose drafts come from heads on the target's last hidden state: Medusa, Hydra, the recurrent one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from foredraft import zoo
from foredraft.backends.narrow import is_quantised
from foredraft.device import to_device
from foredraft.drafters.base import DrafterInfo, DraftRequest, Feedback, Row
from foredraft.drafters.growth import Expand, Growth, grow, one_by_one
from foredraft.drafters.learning.drafter import LearningDrafter
from foredraft.drafters.learning.serving import LearnOptions, learning_of_head
from foredraft.drafters.siblings import SHARED, Offer, offered
from foredraft.errors import ConfigurationError
from foredraft.heads import find
from foredraft.heads.base import Head, refuse_another_target
from foredraft.heads.vocabulary import VocabularyHead
from foredraft.hub import named
from foredraft.quantization import check_quantization, quantize
from foredraft.shapes import StaticShape, TreeShape
from foredraft.target import Target
from foredraft.tree import TokenTree


class HeadDrafter(LearningDrafter):
    """Base of drafters with a head: loads it, keeps the last hidden state of every row, and drafts by :meth:`_expand`.

    Options:

    source: a trained head: a folder, a hub id, ``zoo:NAME`` or a head itself; unless given, the one that is embedded for the target.
    siblings: how tokens are chosen when sampling: ``keyed`` (with the target's noise, for match), ``iid`` (from the head's q, for the p/q
        rules), ``without-replacement`` (likewise, all different), ``top-k`` (the most likely), or ``auto``: whichever the rule in use
        accepts best in the shape in use.
    quantization: ``int8`` or ``int4`` makes the weights of a head that is loaded so many bits wide (torchao); the output distribution
        stays the target's.
    learn: whether the head learns from what it serves, in a process beside it (docs/online.md): true; ``idle``, between calls only; a
        folder for what is learnt; or a dictionary of such options. A head object is copied, and stays as it is.
    """

    kind: ClassVar[str]  # of its head
    auto: ClassVar[Offer] = SHARED  # what the option siblings means by auto
    info = DrafterInfo(proposals=SHARED.chains, branches=True, grows=True, runs_a_model=True)

    def __init__(
        self,
        source: str | Path | Head | None = None,
        *,
        siblings: str = "auto",
        quantization: str | None = None,
        learn: bool | str | Path | Mapping[str, Any] = False,
    ):
        source = named(source)
        if source is not None and not isinstance(source, (str, find(self.kind))):
            raise ConfigurationError(f"drafter {self.name!r} takes a {self.kind} head, a path or a name, not a {type(source).__name__}")
        check_quantization(quantization, source or "")
        self.learn = LearnOptions.of(learn)
        if self.learn is not None and quantization is not None:
            raise ConfigurationError("a quantized head cannot learn: leave quantization out, or learn=False")
        self.source, self.quantization = source, quantization
        self._offer = offered(siblings, self.auto)
        self.info = replace(self.info, proposals=self._offer.chains, needs_logits=self.learn is not None)
        self._head: Head | None = None
        self._hidden: Tensor | None = None  # [R, d] that each row's root was chosen from
        self._read: Tensor | None = None  # the same of rows about to begin

    @property
    def head(self) -> Any:
        """The head, as it drafts; bound when a Speculator is built."""
        if self._head is None:
            raise ConfigurationError(f"this {self.kind} head is not bound to a Speculator yet; pass it as Speculator(..., drafter=...)")
        return self._head

    def bind(self, target: Target) -> None:
        head = self._found(target)
        assert isinstance(head, VocabularyHead)
        fit = fitted(head, target)
        self._prepare_to_learn(fit, target)
        if self.quantization is not None:
            quantize(fit, self.quantization)
        self._adopt(fit)
        target.read(self.info.features)

    def _found(self, target: Target) -> Head:
        """The head for ``target``; nobody else's, where it is to learn."""
        if target.sourced and self.learn is not None:
            raise ConfigurationError(f"a {self.kind} head behind an encoder cannot learn while it serves yet: leave learn out")
        head = self.source if isinstance(self.source, Head) else self._load(self.source, target)
        if not isinstance(head, find(self.kind)):
            raise ConfigurationError(f"{self.source!r} is a {head.kind} head; use drafter '{head.kind}:{self.source}'")
        refuse_another_target(head.config, target.model)
        if self.learn is not None and head is self.source:
            if any(is_quantised(weight) for weight in head.parameters()):
                raise ConfigurationError("a quantized head cannot learn: pass it in floating-point numbers, or learn=False")
            return copied(head)
        return head

    def _prepare_to_learn(self, head: Head, target: Target) -> None:
        if self.learn is not None:
            self.learning = learning_of_head(head, target, self.learn)

    def rewrite(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in self.head.named_parameters():
            with torch.inference_mode(weight.is_inference()), torch.no_grad():
                weight.copy_(weights[name])

    def _adopt(self, head: VocabularyHead) -> None:
        """Draft with ``head`` as it is."""
        self._head = head
        tree = TreeShape.parse(head.config.tree) if head.config.tree else None
        self.info = replace(
            self.info,
            head=head,
            features=head.features,
            catches_up=not head.features,
            max_depth=getattr(head.config, "heads", None),
            rates=head.config.accuracies,
            calibrated=tree if isinstance(tree, StaticShape) else None,
        )

    def _load(self, source: str | None, target: Target) -> Head:
        """The head at ``source``, or the one that is embedded for the target."""
        from foredraft.heads import checkpoints

        embedded = zoo.head_for(target.model, self.kind) if source is None else source
        if embedded is None:
            raise ConfigurationError(
                f"no {self.kind} head is embedded for {target.model.name_or_path or 'this target'}; write '{self.name}:SOURCE' with the "
                f"folder or hub id of one that was trained for it (foredraft train {self.kind})"
            )
        return checkpoints.load(embedded, target.model)

    def refusal(self, shape: TreeShape) -> str | None:
        most = self.info.max_depth
        if most is None or shape.depth <= most:
            return None
        what = f"its head drafts {most} token{'s' if most > 1 else ''} in a row and shape {shape} is {shape.depth} deep"
        return f"drafter {self.name!r}: {what}; use shape='chain({most})', or a tree of {most} levels at most"

    # -- rows -----------------------------------------------------------------------------------------------------------------

    def read(self, rows: Sequence[Row], hidden: Sequence[Tensor]) -> None:
        self._read = torch.stack([each[-1] for each in hidden])

    def begin(self, rows: Sequence[Row]) -> None:
        super().begin(rows)
        if self.info.features:
            assert self._read is not None and len(self._read) == len(rows), "hidden states come before the rows they are of"
            self._hidden = self._read if self._hidden is None else torch.cat([self._hidden, self._read])
        if self.learning is not None:
            self.learning.begin(rows, () if self._read is None else list(self._read[:, None]))
        self._read = None

    def observe(self, rows: Sequence[Row], feedback: Feedback) -> None:
        if self.info.features:
            self._follow(feedback)
        self.learn_from(rows, feedback)

    def _follow(self, feedback: Feedback) -> None:
        """Keep what the bonus tokens were chosen from."""
        assert feedback.hidden is not None
        nodes = to_device(list(feedback.accepted), feedback.hidden.device)
        if feedback.path is not None:
            nodes = feedback.path.to(nodes.device).gather(1, nodes[:, None])[:, 0]
        self._hidden = feedback.hidden[torch.arange(len(nodes), device=nodes.device), nodes]

    def _keep(self, rows: list[int]) -> None:
        if self._hidden is not None:
            self._hidden = self._hidden[to_device(rows, self._hidden.device)] if rows else None

    def reset(self) -> None:
        super().reset()
        self._slots, self._hidden, self._read = [], None, None

    # -- drafting ---------------------------------------------------------------------------------------------------------------

    def draft(self, request: DraftRequest) -> TokenTree:
        most = self.info.max_depth
        depth = max(request.limits) if most is None else min(max(request.limits), most)
        if depth < 1:
            return TokenTree.root(request.roots())
        asked = replace(request, shape=request.shape.truncate(depth), depth=depth)
        grown = self._grow(asked, chain=request.shape.is_chain)
        self.expected_accepted = grown.expected
        return grown.tree.truncate(request.limits)

    def _grow(self, request: DraftRequest, *, chain: bool) -> Growth:
        """``chain`` says that the shape was asked for as a chain: a tree that was cut to one is drawn as a tree is."""
        expand = self._expand(request)
        if not chain:
            return grow(request, expand)
        return Growth(one_by_one(request, lambda path: expand(TokenTree.from_chain(torch.stack(path, 1)), len(path) - 1)[:, 0]), 0)

    def _expand(self, request: DraftRequest) -> Expand:
        """What the head says after the nodes of a tree; asked once per level."""
        raise TypeError(f"{type(self).__name__} must define _expand(request)")


def fitted(head: VocabularyHead, target: Target) -> VocabularyHead:
    """``head`` in the target's dtype and on its device, with what it shares with it: itself if it is so already, or else a copy."""
    device, dtype = target.model.get_input_embeddings().weight.device, target.model.dtype
    if any(parameter.device != device or parameter.dtype != dtype for parameter in head.parameters()):
        head = copied(head).to(device=device, dtype=dtype)
    head.attach(target.model)
    return head


AnyHead = TypeVar("AnyHead", bound=Head)


def copied(head: AnyHead) -> AnyHead:
    """A head with the same weights, attached to nothing."""
    other: Any = type(head)(head.config)
    other.load_state_dict({name: value.detach().clone() for name, value in head.state_dict().items()}, assign=True)
    if isinstance(head, VocabularyHead):
        other.log_odds = head.log_odds
    return other.eval()


class Levels:
    """The newest level of a tree that grows: which of the nodes of the level before its nodes hang below."""

    def __init__(self) -> None:
        self.first = 0

    def above(self, tree: TokenTree, first: int) -> Tensor:
        """``[R, n]`` where in the level before the parents of the nodes ``first``.. stand."""
        found = tree.parents[:, first:] - self.first
        self.first = first
        return found
