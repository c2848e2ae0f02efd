"""What a head is: a small module that reads what the target computes anyway and proposes the tokens that follow.

A head is trained by :mod:`foredraft.training`, stored and read by :mod:`foredraft.heads.checkpoints`, and drafts through the drafter of
its kind. It never holds the target: embeddings and LM head that it shares with the target are handed to it.

Hidden states are named as ``transformers`` numbers them in ``output_hidden_states``: 0 are the embeddings, i the output of decoder
layer i (the input of layer i + 1). :data:`~foredraft.models.features.LAST` is what the LM head reads, behind the final norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from foredraft.errors import ConfigurationError
from foredraft.models.features import LAST
from foredraft.models.identity import TargetShape, refuse_another_model
from foredraft.models.skips import SkipSet

BUFFER, EMBEDDINGS, LM_HEAD, LM_HEAD_BIAS = "buffer.", "embeddings", "lm_head.weight", "lm_head.bias"  # names of what is frozen


@dataclass(frozen=True)
class HeadConfig:
    """Base of the configurations of heads: plain numbers and strings, stored as JSON beside the weights.

    ``tree`` is the calibrated tree in the notation of :mod:`foredraft.shapes`, "" if there is none.
    """

    target: TargetShape
    tree: str = field(default="", kw_only=True)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HeadConfig:
        """Raises ConfigurationError for an unknown or a missing field, by name."""
        known = {each.name for each in fields(cls)}
        if unknown := sorted(values.keys() - known):
            raise ConfigurationError(
                f"a head's configuration has unknown fields {', '.join(map(repr, unknown))}; known: {', '.join(sorted(known))}"
            )
        try:
            return cls(**{**values, "target": TargetShape(**values["target"])})
        except (KeyError, TypeError) as error:
            raise ConfigurationError(f"a head's configuration lacks a field: {error}") from error


@dataclass(frozen=True, eq=False)
class Batch:
    """What a training step sees of B texts of S tokens, all on one device.

    Attributes:
        ids: ``[B, S]``.
        valid: ``[B, S]`` bool, tokens that are no padding; padding is behind the text.
        counted: ``[B, S]`` bool, tokens that a loss may predict: the answers, not the prompts.
        hidden: ``[B, S, F, d]`` the target's hidden states at every token, for the head's ``features`` in their order; no gradient, unless
            the backbone is trained as well.
        logits: ``[B, S, V]`` the target's logits after every token, in its dtype; no gradient.
    """

    ids: Tensor
    valid: Tensor
    counted: Tensor
    hidden: Tensor
    logits: Tensor


@dataclass(frozen=True, eq=False)
class Losses:
    """``total`` is a scalar with a gradient; ``parts`` are detached scalars for the log, ``weight`` the tokens that were counted."""

    total: Tensor
    parts: Mapping[str, Tensor]
    weight: Tensor


class Head(nn.Module):
    """Base of heads. A subclass sets ``kind``, ``config`` and the class of that, and writes :meth:`loss`.

    ``features`` are the hidden states it reads of the target. ``drafter`` is the name of the drafter that it drafts through, its kind
    unless set.
    """

    kind: ClassVar[str]
    drafter: ClassVar[str]
    config_class: ClassVar[type[HeadConfig]]
    config: HeadConfig

    def __init__(self, config: Any):
        super().__init__()
        self.config = config

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls) and "drafter" not in vars(cls):
            cls.drafter = cls.kind

    @property
    def features(self) -> tuple[int, ...]:
        return (LAST,)

    @property
    def skip(self) -> SkipSet | None:
        """What a pass leaves out whose last state, behind the final norm, it reads in place of ``features``; None for whole passes."""
        return None

    @classmethod
    def for_target(cls, model: PreTrainedModel, **options: Any) -> Head:
        """A fresh head for ``model``, in its dtype and on its device, as training begins with it."""
        raise TypeError(f"{cls.__name__} must define for_target(model, **options)")

    @property
    def drafter_options(self) -> dict[str, Any]:
        """What makes its drafter draft with this very head."""
        return {"source": self}

    def attach(self, model: PreTrainedModel) -> None:
        """Take what is shared with the target (embeddings, LM head), without copying, registering or storing it."""

    def loss(self, batch: Batch) -> Losses:
        """The training loss of one batch."""
        raise TypeError(f"{type(self).__name__} must define loss(batch)")

    # -- for a process that learns and has no target -------------------------------------------------------------------------

    def said(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """What it drafts one token ahead, two, and so on, where these are counted: logits ``[M, V]`` over the target's vocabulary, and the
        places ``[M]`` after which the target says the same token, as numbers in the flattened batch."""
        raise TypeError(f"{type(self).__name__} must define said(batch)")

    def frozen(self) -> dict[str, Tensor]:
        """What it computes with besides its weights, by name: buffers, and what it shares with the target."""
        return {BUFFER + name: value for name, value in self.named_buffers()}

    def attach_frozen(self, frozen: Mapping[str, Tensor]) -> None:
        """Take what :meth:`frozen` gave, in place of a target."""
        buffers = {name.removeprefix(BUFFER): value for name, value in frozen.items() if name.startswith(BUFFER)}
        self.load_state_dict(buffers, strict=False, assign=True)
        embeddings = lm_head = None
        if EMBEDDINGS in frozen:
            table = frozen[EMBEDDINGS]
            embeddings = nn.Embedding(table.shape[0], table.shape[1], _weight=table, _freeze=True)
        if LM_HEAD in frozen:
            weight, bias = frozen[LM_HEAD], frozen.get(LM_HEAD_BIAS)
            lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
            lm_head.load_state_dict({"weight": weight.float(), **({} if bias is None else {"bias": bias.float()})}, assign=True)
        lender: Any = SimpleNamespace(get_input_embeddings=lambda: embeddings, get_output_embeddings=lambda: lm_head)
        self.attach(lender)


def embeddings_of(model: PreTrainedModel) -> Any:
    """What ``model`` embeds the tokens of its texts with; a decoder may have other embeddings than the encoder."""
    sourced = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return (model.get_decoder() if sourced else model).get_input_embeddings()


def lm_head_rows(lm_head: nn.Module) -> Tensor:
    """``[V, d]`` the weights of a target's LM head, without a gradient.

    Raises:
        ConfigurationError: they were packed for a backend's kernels.
    """
    rows = lm_head.weight
    if not isinstance(rows, Tensor) or rows.is_meta:
        raise ConfigurationError(
            "the target's weights were packed for its kernels; make or store the head before the Speculator, or with a freshly loaded model"
        )
    return rows.detach()


def refuse_unknown_options(what: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises ConfigurationError if a head, such as ``a medusa``, is given other options than ``known``, and names them."""
    if unknown := sorted(options.keys() - set(known)):
        raise ConfigurationError(f"{what} head has no option {', '.join(map(repr, unknown))}; its options: {', '.join(known)}")


def refuse_another_target(config: HeadConfig, model: PreTrainedModel) -> None:
    """Raises ConfigurationError if the head was made for a target of another shape, or of another vocabulary as far as both are known."""
    refuse_another_model("the head was trained", config.target, model, "train a head for this one (foredraft train)")
