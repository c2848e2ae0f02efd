"""What heads have in common that predict one token ahead each and end in an LM head: Medusa's, Hydra's, the recurrent one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from foredraft.errors import ConfigurationError, whole
from foredraft.heads.base import (
    EMBEDDINGS,
    LM_HEAD,
    LM_HEAD_BIAS,
    Batch,
    Head,
    HeadConfig,
    Losses,
    embeddings_of,
    lm_head_rows,
    refuse_unknown_options,
)
from foredraft.heads.losses import before, cross_entropy
from foredraft.heads.ngram_log_odds import NgramLogOdds, named
from foredraft.models.identity import shape_of
from foredraft.shapes import TreeShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typing_extensions import Self

LM_HEADS = ("own", "target", "low-rank")
LABELS = ("text", "target")
ODDS = "log_odds."
FOUND = ("target", "lm_head_bias", "embedding_size", "accuracies")  # what is no option but seen, or measured later

Config = TypeVar("Config", bound="VocabularyConfig")


@dataclass(frozen=True, eq=False)
class Guess:
    """What one head predicts from: ``states`` ``[M, d]`` that its LM head reads, and ``places`` ``[M]`` of the tokens to be predicted, as
    numbers in the flattened batch."""

    states: Tensor
    places: Tensor


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig(HeadConfig):
    """Attributes:

    lm_head: ``own``, a copy of the target's for every head; ``target``, the target's itself, frozen and not stored; ``low-rank``, one
        product of two matrices for all heads.
    rank: numbers between the two matrices; 0 unless ``low-rank``.
    lm_head_bias: the target's LM head has a bias, so that its copies have one too.
    decay: λ_k = decay^(k+1) weighs the loss of head k = 0, 1, ….
    labels: what is to be predicted: ``text``, the text's own token; ``target``, the target's distribution at that place.
    accuracies: ``accuracies[k][i]`` says how often the i-th guess of head k is right, as far as it was measured; see
        :mod:`foredraft.drafters.calibration`.
    """

    lm_head: str = "own"
    rank: int = 0
    lm_head_bias: bool = False
    decay: float = 0.8
    labels: str = "text"
    accuracies: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "accuracies", tuple(tuple(map(float, line)) for line in self.accuracies))  # JSON has lists
        one_of("lm_head", self.lm_head, LM_HEADS)
        one_of("labels", self.labels, LABELS)
        if self.lm_head == "low-rank":
            whole("rank", self.rank)
        elif self.rank != 0:
            raise ConfigurationError(f"rank={self.rank!r} goes with lm_head='low-rank', not with lm_head={self.lm_head!r}; leave rank out")
        if isinstance(self.decay, bool) or not isinstance(self.decay, (int, float)) or not 0 < self.decay <= 1:
            raise ConfigurationError(f"decay must be a number above 0 and at most 1, got {self.decay!r}")
        if self.tree:
            TreeShape.parse(self.tree)

    @property
    def predictions(self) -> int:
        """How many tokens ahead it learns to predict."""
        raise TypeError(f"{type(self).__name__} must define predictions")


def one_of(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def yes_or_no(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be True or False, got {value!r}")


def configured(made: type[Config], kind: str, model: PreTrainedModel, options: Mapping[str, Any]) -> Config:
    """A configuration for ``model``: ``options`` as given, the rest as the model has it.

    Raises:
        ConfigurationError: an unknown option, or a target whose LM head such a head cannot stand in for.
    """
    refuse_unknown_options(f"a {kind}", options, [each.name for each in fields(made) if each.name not in FOUND])
    shape, lm_head = shape_of(model), model.get_output_embeddings()
    width = lm_head_rows(lm_head).shape[1]
    if width != shape.hidden_size:
        raise ConfigurationError(
            f"the LM head of {shape.name or 'this target'} reads {width} numbers where its layers have "
            f"{shape.hidden_size}; a {kind} head needs a target without a projection between them"
        )
    found: dict[str, Any] = {"lm_head_bias": getattr(lm_head, "bias", None) is not None}
    if "embedding_size" in made.__dataclass_fields__:
        found["embedding_size"] = int(embeddings_of(model).weight.shape[1])
    return made(shape, **found, **options)


class VocabularyHead(Head):
    """Base of heads that predict k = 0, 1, … tokens beyond the root, each through an LM head.

    A head made of its configuration alone has no weights yet (they are on the meta device): they come from :meth:`for_target` or from a
    checkpoint, by ``load_state_dict(..., assign=True)``. What it shares with the target comes by :meth:`attach`.

    ``log_odds`` are counts of n-grams that the drafter adds to the logits, where there are some (Medusa's heads). They are not weights.
    """

    log_odds: NgramLogOdds | None = None
    lm_head_count = 0  # where they are its own; 0 for one per prediction

    config: VocabularyConfig
    config_class: ClassVar[type[VocabularyConfig]]

    def __init__(self, config: VocabularyConfig):
        super().__init__(config)
        self._lm_head: tuple[nn.Module, ...] = ()  # a tuple, so that neither is registered and stored
        self._embeddings: tuple[nn.Module, ...] = ()
        size, vocabulary, bias = config.target.hidden_size, config.target.vocab_size, config.lm_head_bias
        with torch.device("meta"):
            if config.lm_head == "own":
                count = self.lm_head_count or config.predictions
                self.lm_heads = nn.ModuleList(nn.Linear(size, vocabulary, bias=bias) for _ in range(count))
            elif config.lm_head == "low-rank":
                self.down = nn.Linear(size, config.rank, bias=False)
                self.up = nn.Linear(config.rank, vocabulary, bias=bias)

    @classmethod
    def for_target(cls, model: PreTrainedModel, **options: Any) -> Self:
        """A fresh head, which begins as the target's LM head. Options are the fields of its configuration that are not measured.

        Raises:
            ConfigurationError: an unknown option, a value of the wrong kind, or a target that does not fit.
        """
        head = cls(configured(cls.config_class, cls.kind, model, options))
        head.begin_as(model)
        head.attach(model)
        return head

    def attach(self, model: PreTrainedModel) -> None:
        self._lm_head = (model.get_output_embeddings(),)
        self._embeddings = (embeddings_of(model),)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def embed(self, ids: Tensor) -> Tensor:
        """The target's embeddings of ``ids``, frozen."""
        with torch.no_grad():
            return self._shared(self._embeddings, "embeddings")(ids).to(self.dtype)

    def logits(self, states: Tensor, k: int) -> Tensor:
        """``[..., V]`` of head ``k`` from what comes out of its own layers, ``[..., d]``."""
        if self.config.lm_head == "own":
            return self.lm_heads[min(k, len(self.lm_heads) - 1)](states)
        return self._together(states)

    def guessed(self, states: Tensor, k: int, before: Tensor) -> Tensor:
        """The logits ``[M, V]`` that head ``k`` drafts from, n-gram log-odds included, after the tokens ``before`` ``[M, 2]``, drafted or
        not, the last one last; -1 for none."""
        logits = self.logits(states, k)
        if self.log_odds is None:
            return logits
        self.log_odds = self.log_odds.to(logits.device)
        return self.log_odds.added(logits, before, k)

    def all_logits(self, states: Sequence[Tensor]) -> Tensor:
        """``[..., K, V]`` of heads 0 to K - 1 from ``states`` ``[..., d]`` of each; one product where they share an LM head."""
        if self.config.lm_head == "own":
            return torch.stack([self.logits(each, k) for k, each in enumerate(states)], -2)
        return self._together(torch.stack(list(states), -2))

    def _together(self, states: Tensor) -> Tensor:
        if self.config.lm_head == "low-rank":
            return self.up(self.down(states))
        lm_head: Any = self._shared(self._lm_head, "LM head")
        weight, bias = lm_head.weight, getattr(lm_head, "bias", None)
        if torch.is_grad_enabled():  # its weights stay as they are, whatever else of the target is trained
            dtype = weight.dtype if torch.is_autocast_enabled(states.device.type) else states.dtype
            return functional.linear(states, weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype))
        return lm_head(states)  # its forward may be that of packed weights

    def _shared(self, held: tuple[nn.Module, ...], what: str) -> nn.Module:
        if not held:
            raise ConfigurationError(f"this {self.kind} head shares the target's {what}: call head.attach(model) first")
        return held[0]

    # -- as training begins -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin_as(self, model: PreTrainedModel) -> None:
        """Fill every parameter: LM heads are the target's, or the product of ``rank`` that is nearest to it; linear layers are zero."""
        lm_head = model.get_output_embeddings()
        weight, bias = lm_head.weight, getattr(lm_head, "bias", None)
        self.to_empty(device=weight.device)
        self.to(model.dtype)
        for parameter in self.parameters():
            parameter.zero_()
        if self.config.lm_head == "own":
            for each in self.lm_heads:
                _fill(each, weight, bias)  # type: ignore[arg-type]
        elif self.config.lm_head == "low-rank":
            wide = weight.float()  # the largest directions of W are those of W'W, a matrix of d x d
            directions = torch.linalg.eigh(wide.T @ wide).eigenvectors[:, -self.config.rank :]
            self.down.weight.copy_(directions.T)
            _fill(self.up, wide @ directions, bias)

    def guesses(self, batch: Batch) -> Iterator[Guess]:
        """What head k = 0, 1, … says of every token of ``batch`` that is counted and that it has to predict, given the text before it."""
        raise TypeError(f"{type(self).__name__} must define guesses(batch)")

    def loss(self, batch: Batch) -> Losses:
        """Σ λ_k CE_k over k = 0, 1, …, each CE_k the mean over the tokens that head k has to predict; parts are ``loss_k`` and
        ``accuracy_k``, how often the likeliest token is right."""
        total = torch.zeros((), device=batch.ids.device)
        parts: dict[str, Tensor] = {}
        weight = torch.zeros((), device=batch.ids.device)
        ids, logits = batch.ids.flatten(), batch.logits.flatten(0, 1) if self.config.labels == "target" else None
        for k, guess in enumerate(self.guesses(batch)):
            places, before = guess.places, guess.places - 1  # the target's distribution at a place is what it says after the token before
            loss, right = cross_entropy(partial(self.logits, k=k), guess.states, ids[places], target=logits, places=before)
            count = max(len(places), 1)
            total = total + self.config.decay ** (k + 1) * loss / count
            parts[f"loss_{k}"], parts[f"accuracy_{k}"] = loss.detach() / count, right / count
            weight = weight if k else weight + len(places)
        if not total.requires_grad and torch.is_grad_enabled():  # nothing is counted: the gradient is zero, and there is one
            total = total + 0 * sum(parameter.sum() for parameter in self.parameters() if parameter.requires_grad)
        return Losses(total, parts, weight)

    def said(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        for k, guess in enumerate(self.guesses(batch)):
            yield self.guessed(guess.states, k, before(batch, guess.places)), guess.places - 1

    def frozen(self) -> dict[str, Tensor]:
        found = super().frozen()
        if self.config.lm_head == "target":
            lm_head: Any = self._shared(self._lm_head, "LM head")
            found[LM_HEAD] = lm_head.weight
            if getattr(lm_head, "bias", None) is not None:
                found[LM_HEAD_BIAS] = lm_head.bias
        if hasattr(self.config, "embedding_size"):
            embeddings: Any = self._shared(self._embeddings, "embeddings")
            found[EMBEDDINGS] = embeddings(torch.arange(len(embeddings.weight), device=embeddings.weight.device))  # some scale them
        counts = {} if self.log_odds is None else self.log_odds.tensors()[0]
        return {**found, **{ODDS + name: value for name, value in counts.items()}}

    def attach_frozen(self, frozen: Mapping[str, Tensor]) -> None:
        super().attach_frozen(frozen)
        if counts := {name.removeprefix(ODDS): value for name, value in frozen.items() if name.startswith(ODDS)}:
            self.log_odds = NgramLogOdds.of(counts, named(self.config.target.vocab_size), "what is frozen of the head")


def _fill(layer: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    layer.weight.copy_(weight)
    if bias is not None:
        layer.bias.copy_(bias)


class ResidualLayers(nn.Module):
    """x <- x + SiLU(W x), layer by layer, each with weights of its own."""

    def __init__(self, size: int, layers: int, *, bias: bool):
        super().__init__()
        with torch.device("meta"):
            self.layers = nn.ModuleList(nn.Linear(size, size, bias=bias) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + functional.silu(layer(x))
        return x
