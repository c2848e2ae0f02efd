"""MTP layers for small models, and checkpoints that hold them as published ones do."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from foredraft.drafters.mtp import described


def known(model: Any) -> AbstractContextManager[None]:
    """Inside, transformers takes ``model`` for one that has an MTP layer."""
    kinds = (getattr(model.config, "layer_types", None) or ["full_attention"])[:1]
    return described(model.config, {"num_mtp_layers": 1, "mtp_layer_types": kinds, "mtp_mlp_layer_types": ["sparse"]})


def mtp_layers(model: Any, amount: float = 0.3, seed: int = 11) -> MtpModel:
    """A layer for ``model`` with weights so wide that every part of it shows in what it drafts."""
    with torch.random.fork_rng(), known(model):
        torch.manual_seed(seed)
        made = MtpModel(model, 1)
        with torch.no_grad():
            for weight in made.layers.parameters():
                weight.copy_(amount * torch.randn_like(weight) + (1 if weight.ndim == 1 else 0))
    made.layers.to(model.device, model.dtype).requires_grad_(False).eval()
    return made


def save(model: Any, layers: MtpModel, folder: Path) -> None:
    """``model`` with its MTP layer behind its last one, under the names of published checkpoints of DeepSeek-V3 and GLM-4.5."""
    model.save_pretrained(folder)
    block = layers.layers[0].mtp_block.state_dict()
    other = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
    found = {f"{ours}.weight": getattr(layers.layers[0], name).weight for name, ours in other.items()}
    found |= {name: each for name, each in block.items() if not name.startswith("mlp.experts.")}
    for number, (joined, down) in enumerate(zip(block["mlp.experts.gate_up_proj"], block["mlp.experts.down_proj"])):
        gate, up = joined.chunk(2)
        for name, each in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            found[f"mlp.experts.{number}.{name}.weight"] = each
    found |= {"embed_tokens.weight": layers.embed_tokens.weight, "shared_head.head.weight": layers.shared_head.weight}
    place = f"model.layers.{model.config.num_hidden_layers}."
    stored = load_file(folder / "model.safetensors")
    added = {place + name: each.detach().clone().contiguous() for name, each in found.items()}
    save_file({**stored, **added}, folder / "model.safetensors", {"format": "pt"})
