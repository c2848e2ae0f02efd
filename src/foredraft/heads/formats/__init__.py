"""The formats that heads are stored in: how each is recognised, and how it names the tensors.

A format translates both ways between a checkpoint (:class:`~foredraft.heads.formats.folders.Stored`) and what a head is made of
(:class:`Contents`): its kind, its configuration, and its tensors by the names of the head's ``state_dict``. It neither builds heads nor
checks tensors; :mod:`foredraft.heads.checkpoints` does, the same way for all.

A head of ours keeps its whole configuration under the key ``foredraft`` of ``config.json``, which other readers pass over. Where the
key is there, it counts; the other fields were written for others. A head of somebody else is described by their fields and by the shapes
of its tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foredraft import heads
from foredraft.errors import ConfigurationError
from foredraft.heads.base import Head, HeadConfig
from foredraft.heads.formats.folders import Stored
from foredraft.models.identity import TargetShape, shape_of

OURS, VERSION = "foredraft", 1
PREFIX = "foredraft-"  # of the model types of our own layout
REGISTRY = {
    "vllm": "foredraft.heads.formats.medusa:VllmMedusa",
    "medusa": "foredraft.heads.formats.medusa:PublishedMedusa",
    "speculators": "foredraft.heads.formats.eagle3:Speculators",
    "eagle3": "foredraft.heads.formats.eagle3:PublishedEagle3",
    "foredraft": "foredraft.heads.formats:Own",
}


@dataclass(frozen=True, eq=False)
class Contents:
    """What a head is made of. Tensors that the format does not know keep the names they have in the file."""

    kind: str
    config: HeadConfig
    tensors: dict[str, Tensor]


class Format(ABC):
    """One way to store heads of ``kinds`` (none named: all). ``without_tree`` says why its readers do not see a calibrated tree; "" where
    they do."""

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]] = ()
    without_tree: ClassVar[str] = ""

    @abstractmethod
    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether a ``config.json`` is one of this format."""

    @abstractmethod
    def read(self, stored: Stored, model: PreTrainedModel | None) -> Contents:
        """``model`` is the target, where it is known; a foreign file needs it, because it does not say whose head it is.

        Raises:
            ConfigurationError: fields or tensors contradict each other or ask for what we do not have, by name.
        """

    @abstractmethod
    def write(self, head: Head, about: Mapping[str, Any], target: str) -> Stored:
        """``target`` is where other readers find the target.

        Raises:
            ConfigurationError: the format cannot carry this head.
        """

    def spelled(self, name: str) -> str:
        """A name of the head's ``state_dict`` as the files have it, for messages."""
        return name

    def losses(self, head: Head) -> list[str]:
        """What of ``head`` readers of this format will not see, a sentence each."""
        if not self.without_tree:
            return []
        found = [f"the calibrated tree stays behind: {self.without_tree}"] if head.config.tree else []
        if getattr(head, "log_odds", None) is not None:
            found.append("its n-gram log-odds stay behind: other engines draft by the heads alone, and accept less")
        return found


def names() -> list[str]:
    return list(REGISTRY)


def find(name: str) -> Format:
    """Raises ConfigurationError for an unknown name, listing the known ones."""
    if name not in REGISTRY:
        raise ConfigurationError(f"unknown format {name!r}; choose {', '.join(REGISTRY)}")
    return resolve_name(REGISTRY[name])()


def recognise(stored: Stored) -> Format:
    """The format of a checkpoint.

    Raises:
        ConfigurationError: none of ours; the message says by what they are recognised.
    """
    for name in REGISTRY:
        if (found := find(name)).recognises(stored.config):
            return found
    kind = stored.config.get("model_type") or stored.config.get("architectures") or "nothing that is known"
    raise ConfigurationError(
        f"{stored.where} is not a readable head: its config.json says {kind!r}; a Medusa head has medusa_num_heads or model_type "
        "'medusa', an EAGLE-3 head speculators_model_type 'eagle3' or architectures ['LlamaForCausalLMEagle3']"
    )


def usual(head: Head) -> str:
    """How a head is stored where nothing else is asked for: as the engine that has such heads reads it, unless that wants a copy of the
    target's LM head in it."""
    if head.kind == "eagle3":
        return "speculators"
    return "vllm" if head.kind == "medusa" and getattr(head.config, "lm_head", None) == "own" else "foredraft"


def block(head: Head, about: Mapping[str, Any], config: HeadConfig | None = None) -> dict[str, Any]:
    """What stands under ``foredraft`` in the ``config.json`` of ``head``; ``config`` where what is written differs from it."""
    return {"format": VERSION, "kind": head.kind, "config": (config or head.config).to_dict(), "about": dict(about)}


def from_block(stored: Stored) -> HeadConfig | None:
    """The configuration of a head of ours; None for somebody else's.

    Raises:
        ConfigurationError: of another version, or with a field that is unknown.
    """
    if OURS not in stored.config:
        return None
    found = stored.config[OURS]
    where = f"{stored.where}: {OURS!r} in config.json"
    if not isinstance(found, dict) or found.get("format") != VERSION:
        version = found.get("format") if isinstance(found, dict) else None
        raise ConfigurationError(f"{where} has format {version!r}; this Foredraft reads {VERSION}")
    fields = {"format", "kind", "config", "about"}
    if differing := sorted(found.keys() ^ fields):
        raise ConfigurationError(f"{where} must have the fields {', '.join(sorted(fields))}; unknown or missing: {', '.join(differing)}")
    try:
        return heads.find(found["kind"]).config_class.from_dict(found["config"])
    except (ConfigurationError, TypeError) as error:
        raise ConfigurationError(f"{where}: {error}") from error


Config = TypeVar("Config", bound=HeadConfig)


def from_block_as(wanted: type[Config], stored: Stored) -> Config | None:
    """:func:`from_block` for a format that stores one kind of head."""
    found = from_block(stored)
    if found is not None and type(found) is not wanted:
        raise ConfigurationError(
            f"{stored.where}: {OURS!r} in config.json is about another kind of head, {type(found).__name__}, than the rest of it"
        )
    return found


def needs_target(stored: Stored, model: PreTrainedModel | None) -> TargetShape:
    """The shape of the target, which a file from another project does not give."""
    if model is None:
        raise ConfigurationError(f"{stored.where} does not say which target it belongs to; load it with its target (--target)")
    return shape_of(model)


def check_size(where: str, name: str, theirs: Any, shape: TargetShape) -> None:
    """Raise ConfigurationError if a file gives the size ``name`` of its target and ``shape`` has another."""
    ours = getattr(shape, name.removeprefix("target_"))
    if theirs is not None and theirs != ours:
        raise ConfigurationError(f"{where} is for a target with {name} {theirs}; {shape.name or 'this target'} has {ours}")


def same_weights(ours: Tensor, theirs: Tensor) -> bool | None:
    """Whether two matrices are equal once both have the narrower of their dtypes; None if the values of one are not available,
    because the target's weights were packed away for its passes."""
    if ours.is_meta or theirs.is_meta:
        return None
    if ours.shape != theirs.shape:
        return False
    dtype = min((ours.dtype, theirs.dtype), key=lambda dtype: torch.finfo(dtype).bits)
    return torch.equal(ours.detach().to("cpu", dtype), theirs.detach().to("cpu", dtype))


class Own(Format):
    """Our own layout, for heads that no other engine reads: the tensors under the names of the head's ``state_dict``."""

    name = "foredraft"

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return str(config.get("model_type", "")).startswith(PREFIX)

    def read(self, stored: Stored, model: PreTrainedModel | None) -> Contents:
        found = from_block(stored)
        if found is None:
            raise ConfigurationError(f"{stored.where}: config.json lacks {OURS!r}, which describes the head")
        return Contents(stored.config[OURS]["kind"], found, dict(stored.tensors))

    def write(self, head: Head, about: Mapping[str, Any], target: str) -> Stored:
        config = {"model_type": PREFIX + head.kind, "architectures": [type(head).__name__], OURS: block(head, about)}
        return Stored(config, dict(head.state_dict()))
