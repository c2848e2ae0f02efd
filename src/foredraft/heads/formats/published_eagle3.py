"""EAGLE-3 heads as their authors published them: a llama's ``config.json``, the decoder layer ``midlayer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.eagle3_config import Eagle3Config
from foredraft.heads.formats import OURS, Contents, Format, Stored, block, from_block_as, needs_target
from foredraft.heads.formats.eagle3_parts import config_from, layer_config, tensors_in, tensors_of, tree_is_lost

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foredraft.heads.base import Head

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
AUX = "eagle_aux_hidden_state_layer_ids"


class PublishedEagle3(Format):
    name = "eagle3"
    kinds = ("eagle3",)

    def recognises(self, config: Mapping[str, Any]) -> bool:
        architectures = config.get("architectures") or ()
        return "speculators_model_type" not in config and (
            "draft_vocab_size" in config or any(each in ARCHITECTURES for each in architectures)
        )

    def read(self, stored: Stored, model: PreTrainedModel | None) -> Contents:
        found, config = from_block_as(Eagle3Config, stored), stored.config
        if found is None:
            eagle = config.get("eagle_config") or {}
            aux = config.get(AUX) or eagle.get(AUX)
            described = config_from(config, {**config, **eagle}, aux, {}, needs_target(stored, model), stored.where)
        else:
            described = found
        return Contents("eagle3", described, tensors_in(stored, described, model))

    def write(self, head: Head, about: Mapping[str, Any], target: str) -> Stored:
        assert isinstance(head, Eagle3Head)
        ours = head.config
        flags = {name: getattr(ours, name) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
        config = {
            "architectures": [ARCHITECTURES[0]],
            **layer_config(ours, head.fc.weight.dtype),
            "draft_vocab_size": ours.draft_vocab_size,
            "target_hidden_size": ours.target.hidden_size,
            **flags,
            "eagle_config": {AUX: list(ours.aux_layers), "use_aux_hidden_state": True, "norm_before_fc": ours.norm_before_fc},
            OURS: block(head, about),
        }
        return Stored(config, tensors_of(head))

    def losses(self, head: Head) -> list[str]:
        assert isinstance(head, Eagle3Head)
        return tree_is_lost(head)
