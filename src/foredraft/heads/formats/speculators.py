"""EAGLE-3 heads in the format of speculators, which vLLM reads: the head, its decoder layer and its target in one ``config.json``.

Readers disagree about what a field means that is not there (``norm_before_residual`` is true to one and false to another), so that every
one is written out. The decoder layer is ``layers.0``; ``midlayer`` is read too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from foredraft.errors import ConfigurationError
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.eagle3_config import Eagle3Config
from foredraft.heads.formats import OURS, Contents, Format, Stored, block, from_block_as, needs_target
from foredraft.heads.formats.eagle3_parts import config_from, layer_config, tensors_in, tensors_of, tree_is_lost

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from foredraft.heads.base import Head

DEFAULTS = {"norm_before_residual": True}  # what vLLM takes a missing field for
TOKENS = 5  # drafted in a row, at most, where nobody says otherwise


class Speculators(Format):
    name = "speculators"
    kinds = ("eagle3",)

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return "speculators_model_type" in config

    def read(self, stored: Stored, model: PreTrainedModel | None) -> Contents:
        config = stored.config
        if config["speculators_model_type"] != "eagle3":
            raise ConfigurationError(
                f"{stored.where} is a speculator of type {config['speculators_model_type']!r}; only 'eagle3' is supported"
            )
        found = from_block_as(Eagle3Config, stored)
        if found is None:
            layer = config.get("transformer_layer_config")
            if not isinstance(layer, Mapping):
                raise ConfigurationError(f"{stored.where}: config.json lacks transformer_layer_config")
            aux = config.get("eagle_aux_hidden_state_layer_ids")
            described = config_from(layer, config, aux, DEFAULTS, needs_target(stored, model), stored.where)
        else:
            described = found
        return Contents("eagle3", described, tensors_in(stored, described, model))

    def write(self, head: Head, about: Mapping[str, Any], target: str) -> Stored:
        assert isinstance(head, Eagle3Head)
        ours = head.config
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": min(TOKENS, ours.steps),
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": target, "architectures": []},
            },
            "transformer_layer_config": layer_config(ours, head.fc.weight.dtype),
            "draft_vocab_size": ours.draft_vocab_size,
            "target_hidden_size": ours.target.hidden_size,
            "eagle_aux_hidden_state_layer_ids": list(ours.aux_layers),
            "norm_before_residual": ours.norm_before_residual,
            "norm_before_fc": ours.norm_before_fc,
            "fc_norm": ours.fc_norm,
            "norm_output": ours.norm_output,
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
            "dtype": str(head.fc.weight.dtype).removeprefix("torch."),
            OURS: block(head, about),
        }
        return Stored(config, {self.spelled(name): tensor for name, tensor in tensors_of(head).items()})

    def spelled(self, name: str) -> str:
        return re.sub(r"^midlayer\.", "layers.0.", name)

    def losses(self, head: Head) -> list[str]:
        assert isinstance(head, Eagle3Head)
        return tree_is_lost(head)
