"""Measured costs, kept between runs: one JSON file for each model, drafter, machine, dtype, device, threads, version of torch
and kernels.

They lie in ``$FOREDRAFT_CACHE``, or else in ``foredraft`` under ``$XDG_CACHE_HOME`` or ``~/.cache``; ``FOREDRAFT_CACHE=off`` keeps
none. A file that cannot be used is measured anew, with a note in the log.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foredraft.backends import native
from foredraft.caching import cache_folder, private_place
from foredraft.drafters.base import Drafter
from foredraft.files import replacing
from foredraft.planning.costs import CostModel, timed_beforehand
from foredraft.target import Target

SCHEMA = 4

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Profile:
    """One file, and the ``key`` that it must name to count."""

    path: Path
    key: dict[str, Any]

    def read(self, costs: CostModel) -> bool:
        """Fill ``costs`` from the file; whether there was one that fits."""
        try:
            plain = json.loads(self.path.read_text(encoding="utf-8"))
            if plain["schema"] != SCHEMA or plain["key"] != self.key:
                raise ValueError("it was written by another version, or for another key")
            costs.load(plain["costs"])
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("the cost profile %s cannot be used, costs are measured anew: %s", self.path, error)
            return False
        return True

    def write(self, costs: CostModel) -> bool:
        """Replace the file in one step; where that is not possible, say so in the log and go on."""
        text = json.dumps({"schema": SCHEMA, "key": self.key, "costs": costs.to_dict()}, indent=1)
        try:
            with replacing(self.path) as new:
                new.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            log.warning("the cost profile %s cannot be written: %s", self.path, error)
            return False
        return True


def profile(target: Target, drafter: Drafter) -> Profile | None:
    """That of this configuration on this machine; None where none are kept."""
    if cache_folder() is None:
        return None
    key = json.loads(json.dumps(describe(target, drafter)))  # as it is read again: JSON has no tuples
    place = private_place("profiles", key)
    return None if place is None else Profile(place.with_suffix(".json"), key)


def describe(target: Target, drafter: Drafter) -> dict[str, Any]:
    """What costs depend on, as plain values."""
    device = target.device
    return {
        "target": model_of(target),
        "drafter": {"name": drafter.name, "model": network_of(drafter)},
        "machine": {
            "host": platform.node(),
            "processor": f"{platform.machine()} {os.cpu_count()}",
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        },
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "kernels": native.revision(),
        "instructions": os.environ.get("FOREDRAFT_INSTRUCTIONS", ""),
    }


def network_of(drafter: Drafter) -> dict[str, Any] | None:
    """What a draft runs, as far as its speed goes; None for a mere look-up."""
    if drafter.info.shares_target:
        return {"part": str(drafter.part)}
    if not timed_beforehand(drafter):
        return None
    head: Any = drafter.info.head
    if drafter.info.draft_model is not None:
        return model_of(drafter.info.draft_model)
    about = {name: value for name, value in head.config.to_dict().items() if name not in ("target", "tree", "accuracies")}
    weights = {f"{parameter.dtype} {list(parameter.shape)}" for parameter in head.parameters()}
    return {"kind": head.kind, "config": about, "weights": sorted(weights)}


def model_of(target: Target) -> dict[str, Any]:
    """A model as far as its speed goes: what it is made of, not what it knows."""
    model = target.model
    config = model.config.get_text_config()
    sizes = {
        name: getattr(config, name, None)
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    }
    weights = sum(parameter.numel() for parameter in model.parameters())
    kinds = sorted({type(parameter).__name__ for parameter in model.parameters()})  # quantised ones have classes of their own
    execution = str(getattr(target, "execution", "") or "")
    about = {"class": type(model).__name__, "weights": weights, "kinds": kinds, "dtype": str(model.dtype), "execution": execution}
    return {**about, **sizes}
