"""An exit from a frozen target: what makes the states behind one of its layers readable for its LM head.

Without training, the lower layers of a model predict little (LayerSkip trains the whole model for that). Here a norm and a small gated
correction of its own stand between the layer and the target's LM head, and the target stays as it is. An attention block in front of them
lets an exit copy from the text (Kangaroo, Liu et al. 2024); here it is the attention of the target's next layer, as it is, whose keys and
values are in the target's cache already.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from foredraft.errors import ConfigurationError, whole
from foredraft.heads.base import Batch, Head, HeadConfig, Losses, lm_head_rows, refuse_unknown_options
from foredraft.heads.losses import cross_entropy, pairs
from foredraft.models.identity import shape_of
from foredraft.models.skips import SkipSet

WIDTH = 2  # numbers inside the correction, by default, over the hidden size


@dataclass(frozen=True, kw_only=True)
class ExitConfig(HeadConfig):
    """Attributes:

    exit: it reads what comes out of this decoder layer, counted from 1.
    width: numbers inside the correction.
    attention: the attention of the next layer stands in front.
    """

    exit: int
    width: int
    attention: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.exit, bool) or not isinstance(self.exit, int) or not 0 < self.exit < self.target.layers:
            raise ConfigurationError(f"exit must lie between 1 and {self.target.layers - 1} for this target, got {self.exit!r}")
        whole("width", self.width)
        if not isinstance(self.attention, bool):
            raise ConfigurationError(f"attention must be true or false, got {self.attention!r}")


class ExitHead(Head):
    """LM head(x + U SiLU(D x)) with x = w * h / rms(h), where h comes out of layer ``exit``. U begins as zero and w as the weight of the
    target's final norm, where it has one of that size: the bare exit. With ``attention``, x = w * n, where n is what the target's final
    norm makes of h with the next layer's attention added, and w begins as ones."""

    kind = "exit"
    drafter = "layer-skip"
    config: ExitConfig
    config_class = ExitConfig

    def __init__(self, config: ExitConfig):
        super().__init__(config)
        self._lm_head: tuple[nn.Module, ...] = ()  # a tuple, so that it is not registered and stored
        size = config.target.hidden_size
        with torch.device("meta"):
            self.norm = nn.Parameter(torch.empty(size))
            self.down = nn.Linear(size, config.width, bias=False)
            self.up = nn.Linear(config.width, size, bias=False)

    @property
    def features(self) -> tuple[int, ...]:
        return (self.config.exit,)

    @property
    def skip(self) -> SkipSet | None:
        if not self.config.attention:
            return None
        above = range(self.config.exit, self.config.target.layers)
        return SkipSet(attention=tuple(above[1:]), mlp=tuple(above))

    @classmethod
    def for_target(cls, model: PreTrainedModel, *, seed: int = 0, **options: Any) -> ExitHead:
        """Options: ``exit``, a third of the layers unless given; ``width``, twice the hidden size; ``attention``; ``seed``, that of D.

        Raises:
            ConfigurationError: an unknown option, or a value that cannot be.
        """
        refuse_unknown_options("an exit", options, [each.name for each in fields(ExitConfig) if each.name not in ("target", "tree")])
        shape = shape_of(model)
        given = {"exit": max(1, shape.layers // 3), "width": WIDTH * shape.hidden_size, **options}
        head = cls(ExitConfig(shape, **given))
        head.to_empty(device=model.get_output_embeddings().weight.device).to(model.dtype)  # type: ignore[arg-type]
        with torch.no_grad():
            head.norm.copy_(torch.ones(shape.hidden_size) if head.config.attention else final_norm(model))
            head.up.weight.zero_()
            bound, generator = shape.hidden_size**-0.5, torch.Generator().manual_seed(seed)
            head.down.weight.copy_(torch.empty(head.down.weight.shape).uniform_(-bound, bound, generator=generator))
        head.attach(model)
        return head

    def attach(self, model: PreTrainedModel) -> None:
        lm_head = model.get_output_embeddings()
        if lm_head_width(lm_head) != self.config.target.hidden_size:
            raise ConfigurationError("the target has a projection before its LM head; an exit head needs one without")
        self._lm_head = (lm_head,)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., V]`` logits after states ``[..., d]`` of layer ``exit``, or of a pass without :attr:`skip`."""
        if not self._lm_head:
            raise ConfigurationError("an exit head shares the target's LM head: call head.attach(model) first")
        return self._lm_head[0](self._readable(hidden))

    def _readable(self, hidden: Tensor) -> Tensor:
        """What the LM head reads, ``[..., d]``."""
        wide = hidden.float()
        if not self.config.attention:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        x = wide.to(self.norm.dtype) * self.norm
        return x + self.up(functional.silu(self.down(x)))

    def loss(self, batch: Batch) -> Losses:
        """Cross-entropy with the target's own distribution at the same place; ``agreement`` is how often both have the same likeliest
        token."""
        places, _ = pairs(batch, 1)
        logits, rows = batch.logits.flatten(0, 1), lm_head_rows(self._lm_head[0])
        bias = getattr(self._lm_head[0], "bias", None)
        states = self._readable(batch.hidden[:, :, 0].flatten(0, 1)[places])

        def read_out(each: Tensor) -> Tensor:
            return functional.linear(each, rows.to(each.dtype), None if bias is None else bias.to(each.dtype))

        total, right = cross_entropy(read_out, states, logits[places].argmax(-1), target=logits, places=places)
        count = max(len(places), 1)
        if not len(places):  # the gradient is zero, and there is one
            total = total + 0 * sum(parameter.sum() for parameter in self.parameters())
        return Losses(total / count, {"agreement": right / count}, torch.tensor(float(len(places)), device=total.device))


def final_norm(model: PreTrainedModel) -> Tensor:
    """``[d]`` the weight of the last norm of ``model``'s decoder, or ones."""
    size = shape_of(model).hidden_size
    found = [each.weight for each in model.base_model.children() if getattr(each, "weight", None) is not None and each.weight.ndim == 1]
    return found[-1].detach() if found and found[-1].shape == (size,) else torch.ones(size)


def lm_head_width(lm_head: nn.Module) -> int:
    """Numbers that it reads."""
    return int(getattr(lm_head, "in_features", 0) or lm_head.weight.shape[-1])  # type: ignore[union-attr, index]
