"""Our own layout, for heads that no other engine reads: the tensors under the names of the head's ``state_dict``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from foredraft.errors import ConfigurationError
from foredraft.heads.formats import OURS, Contents, Format, Stored, block, from_block

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foredraft.heads.base import Head

PREFIX = "foredraft-"


class Own(Format):
    name = "foredraft"

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return str(config.get("model_type", "")).startswith(PREFIX)

    def read(self, stored: Stored, model: PreTrainedModel | None) -> Contents:
        found = from_block(stored)
        if found is None:
            raise ConfigurationError(f"{stored.where}: config.json lacks {OURS!r}, which says what the head is")
        return Contents(stored.config[OURS]["kind"], found, dict(stored.tensors))

    def write(self, head: Head, about: Mapping[str, Any], target: str) -> Stored:
        config = {"model_type": PREFIX + head.kind, "architectures": [type(head).__name__], OURS: block(head, about)}
        return Stored(config, dict(head.state_dict()))
