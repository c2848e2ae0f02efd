"""What is trained, as one module: a head alone, or a head and the target that it reads (Cai et al. 2024: Medusa-1 and Medusa-2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from foredraft.errors import ConfigurationError
from foredraft.heads.base import Batch, Head
from foredraft.training.batches import Tokens
from foredraft.training.features import Reader
from foredraft.training.options import ALONE, DRAFT, Options

HEAD, BACKBONE = "head.", "backbone."


class Learner(nn.Module):
    """One forward pass is the loss of a micro-batch. accelerate wraps it, and gradients reach nothing outside.

    Args:
        head: float32, in training mode.
        reader: gives hidden states and logits; within the graph if ``backbone`` is trained.
        backbone: the target, where it is trained as well.
    """

    def __init__(self, head: Head, reader: Reader, options: Options, *, backbone: nn.Module | None = None):
        super().__init__()
        self.head, self.reader, self.options = head, reader, options
        self.backbone = backbone

    def forward(self, tokens: Tokens, step: int, steps: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The mean loss in step ``step`` of ``steps``, the tokens it is a mean of, and its parts."""
        with torch.autocast(tokens.ids.device.type, enabled=False) if self.backbone is None else torch.enable_grad():
            hidden, logits = self.reader(tokens)
        if self.options.precision == "float32":
            hidden, logits = hidden.float(), logits.float()
        batch = Batch(tokens.ids, tokens.valid, tokens.counted, hidden, logits)
        if self.backbone is None:
            losses = self.head.loss(batch)
            return losses.total, losses.weight, dict(losses.parts)
        own = language_loss(batch)
        losses = self.head.loss(replace(batch, logits=logits.detach()))
        parts = {"loss_heads": losses.total.detach(), "loss_backbone": own.detach(), **losses.parts}
        return own + self.options.head_share(step, steps) * losses.total, losses.weight, parts


def language_loss(batch: Batch) -> Tensor:
    """Mean cross-entropy of the counted tokens, each given those before it."""
    counted = batch.counted[:, 1:] & batch.valid[:, 1:]
    each = functional.cross_entropy(batch.logits[:, :-1][counted].float(), batch.ids[:, 1:][counted], reduction="sum")
    return each / counted.sum().clamp(min=1)


def open_backbone(model: PreTrainedModel, options: Options) -> Any:
    """Make a model trainable as ``options.backbone`` says, in place: weights in float32, or adapters in its linear layers.

    Returns:
        what stores it in the end: the model, or the adapters' wrapper around it.

    Raises:
        ConfigurationError: peft is missing, or finds nothing to adapt; or weights that cannot be trained.
    """
    what = "draft" if options.kind == DRAFT else "target"
    if model.config.is_encoder_decoder:
        raise ConfigurationError(f"a {what} with an encoder is not trained; leave --backbone out")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigurationError(f"the {what} has adapters already; merge them into it first")
    if getattr(model.config, "quantization_config", None) is not None and (options.backbone == "full" or options.kind in ALONE):
        raise ConfigurationError(f"quantized weights cannot be trained; pass a {what} that is not quantized")
    if options.backbone == "full":
        return model.float().requires_grad_()
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigurationError("--backbone lora needs peft; install it with: pip install 'foredraft[train]'") from error
    config = LoraConfig(r=options.lora_rank, lora_alpha=2 * options.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(options.seed)
        try:
            return get_peft_model(model, config)
        except ValueError as error:
            raise ConfigurationError(f"peft cannot adapt this {what}: {error}; use --backbone full") from error


def optimizer_of(learner: nn.Module, options: Options) -> torch.optim.Optimizer:
    """AdamW; a backbone learns at a rate of its own."""
    groups: list[dict[str, Any]] = []
    rates = {HEAD: options.learning_rate, BACKBONE: options.own_rate}
    for prefix, rate in rates.items():
        weights = [weight for name, weight in learner.named_parameters() if name.startswith(prefix) and weight.requires_grad]
        if weights:
            groups.append({"params": weights, "lr": rate, "peak": rate})
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=options.weight_decay, fused=True)


def learnt(state: Mapping[str, Tensor], learner: nn.Module) -> dict[str, Tensor]:
    """What a run changes, of a state of the learner: the whole head, and those weights of the backbone that are trained."""
    trained = {name for name, weight in learner.named_parameters() if weight.requires_grad}
    return {name: value for name, value in state.items() if name.startswith(HEAD) or name in trained}


def part(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights whose names begin with ``prefix``, without it."""
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
