"""What the formats of Medusa heads share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foredraft.errors import ConfigurationError
from foredraft.heads.medusa import MedusaConfig, MedusaHead

if TYPE_CHECKING:
    from foredraft.heads.base import Head, TargetShape
    from foredraft.heads.formats import Stored

SHARED = "lm_head.weight"  # one LM head for all


def config_from_tensors(stored: Stored, tensors: Mapping[str, Tensor], shape: TargetShape) -> MedusaConfig:
    """The configuration of somebody else's heads, ``tensors`` under our names. Published files hold more heads than their ``config.json``
    says, so that the tensors count; what the configuration says besides must agree with them.

    Raises:
        ConfigurationError: there are no heads in it, or fewer or other ones than ``config.json`` says.
    """
    found = [match for name in tensors if (match := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.weight", name))]
    if not found:
        raise ConfigurationError(f"{stored.where} holds no Medusa heads: it has {', '.join(sorted(tensors)[:5]) or 'no tensors'}")
    heads, layers = (1 + max(int(match[group]) for match in found) for group in (1, 2))
    said = {"heads": _said(stored, "medusa_num_heads", "num_heads"), "layers": _said(stored, "medusa_num_layers", "num_hidden_layers")}
    if (said["heads"] or 0) > heads or said["layers"] not in (None, layers):
        raise ConfigurationError(
            f"{stored.where}: config.json describes {said['heads']} heads of {said['layers']} layers, "
            f"the tensors are {heads} heads of {layers}"
        )
    for name in ("hidden_size", "vocab_size"):
        theirs = stored.config.get(name)
        if theirs is not None and theirs != getattr(shape, name):
            raise ConfigurationError(
                f"{stored.where} is for a target with {name} {theirs}, {shape.name or 'this target'} has {getattr(shape, name)}"
            )
    bias = any(re.fullmatch(r"blocks\.\d+\.layers\.\d+\.bias", name) for name in tensors)
    return MedusaConfig(shape, heads=heads, layers=layers, bias=bias)


def _said(stored: Stored, *names: str) -> int | None:
    """The first of these fields that ``config.json`` has."""
    for name in names:
        if name in stored.config:
            value = stored.config[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{stored.where}: {name} must be a whole number from 1 on, got {value!r}")
            return value
    return None


def one_lm_head(head: MedusaHead) -> Tensor:
    """``[V, d]`` the LM head that all of them share: the target's, or the product of low rank.

    Raises:
        ConfigurationError: it is the target's, and no target is attached.
    """
    if head.config.lm_head == "low-rank":
        product = head.up.weight.detach().float() @ head.down.weight.detach().float()
        return product.to(head.dtype)
    if not head._lm_head:
        raise ConfigurationError(
            "this head uses the target's LM head, which the format stores too: load the head with its target (--target)"
        )
    weight = head._lm_head[0].weight
    if not isinstance(weight, Tensor) or weight.is_meta:
        raise ConfigurationError("the target's weights were packed away for its passes; store the head with the target as it was loaded")
    return weight.detach().to(head.dtype)


def refuse_bias(head: MedusaHead, readers: str) -> None:
    if head.config.lm_head_bias:
        raise ConfigurationError(f"{readers} has LM heads without a bias, and this head's have one")


def with_own_lm_heads(head: MedusaHead, *, bias: bool | None = None) -> MedusaConfig:
    """The configuration of ``head`` once its LM heads are written out."""
    return replace(head.config, lm_head="own", rank=0, bias=head.config.bias if bias is None else bias)


def tree_is_lost(head: Head, because: str) -> list[str]:
    found = [f"the calibrated tree stays behind: {because}"] if head.config.tree else []
    if getattr(head, "successors", None) is not None:
        found.append("its successors stay behind: other engines draft by the heads alone, and accept less")
    return found


def zeros_like_bias(weight: Tensor) -> Tensor:
    return torch.zeros(weight.shape[0], dtype=weight.dtype)
