"""``foredraft suggest``: a draft model for a model, by its configuration alone: no weights are read. And drafters that suit any model."""

from __future__ import annotations

import shlex
from typing import Any

from foredraft import hub, zoo
from foredraft.cli.pairs import Pair, pair_for
from foredraft.errors import ConfigurationError, UnsupportedModelError
from foredraft.models.kinds import RECURRENT, RECURRENT_IN_STEPS, ROLLS_BACK, SLOT_POSITIONS

SMALLER = 3  # so many times larger than its draft a target must be
PLAIN_MLP = {"gpt2", "opt", "gpt_neox", "bloom", "starcoder2", "gpt_neo", "mpt", "falcon", "phi"}  # two matrices; others have three


def suggest(source: str) -> list[str]:
    """Lines for people.

    Raises:
        ConfigurationError: there is no such model, or it has no configuration.
        UnsupportedModelError: it cannot be a target.
    """
    if source.startswith(zoo.PREFIX):
        zoo.find_model(source)
    whole = hub.config_of(source)
    config = {"model_type": whole.get("model_type"), **whole.get("text_config", whole)}
    kind = config["model_type"]
    if kind is None:
        raise ConfigurationError(f"{source!r} has no config.json with a model_type; give a model in the format of transformers")
    hub.check_decoder(source, whole)
    if kind in RECURRENT:
        why = "keeps a recurrent state that cannot roll back a rejected token"
        raise UnsupportedModelError(f"{source!r} ({kind}) {why}; use model.generate")
    billions = parameters(source, config)
    types = set(config.get("layer_types") or ())
    chains = kind in SLOT_POSITIONS or (kind in RECURRENT_IN_STEPS and not (types and types <= {*ROLLS_BACK, "attention"}))
    layers, vocab = number(config, "num_hidden_layers", "n_layer"), number(config, "vocab_size")
    facts = [str(kind), f"{layers} layers", f"a vocabulary of {vocab:,}", f"about {billions:.2g} B parameters"]
    lines = [f"{source}: {', '.join(facts)}", "Drafts may be chains only." if chains else "Drafts may be chains and trees.", ""]
    found, specs = pair_for(source, config), ["suffix", "prompt-lookup"]
    if found is not None and fits(found, billions):
        specs.insert(0, f"draft-model:{found.draft}")
    if number(config, "num_nextn_predict_layers", "num_mtp_layers"):
        lines.append("mtp                 any text; the checkpoint's own MTP layer, if transformers can read it; nothing else to download")
        specs.insert(0, "mtp")
    lines += [*_draft_model(found, billions), "", "The same for every model, to be chosen by what is written:", *_any_model(), ""]
    measure = " ".join(["foredraft tune --target", shlex.quote(source), *(f"--drafter {spec}" for spec in specs)])
    return [*lines, f"Which is faster here: {measure}"]


def fits(pair: Pair, billions: float) -> bool:
    """Whether the draft is much smaller than a target of so many parameters."""
    return billions >= SMALLER * pair.billions


def _draft_model(found: Pair | None, billions: float) -> list[str]:
    if found is None:
        return [
            "draft-model:SOURCE  no draft is known for this family; a model of a tenth of the size fits, best one with the same tokenizer"
        ]
    if not fits(found, billions):
        return [f"draft-model:SOURCE  the smallest of the family, {found.draft} ({found.billions:g} B), is too large for this model"]
    tried = "tried" if found.tried else "not tried here; the tokenizers are compared when it is loaded"
    return [f"draft-model:{found.draft}  any text; {found.billions:g} B parameters, {tried}"]


def _any_model() -> list[str]:
    return [
        "suffix              outputs that repeat the prompt or earlier outputs: edits, summaries, agents; nothing to download",
        "prompt-lookup       outputs that repeat the prompt; nothing to download",
        "eagle3:HEAD         any text, with a head that was trained for this model (foredraft train, or a published one)",
    ]


def parameters(source: str, config: dict[str, Any]) -> float:
    """Billions of parameters, estimated."""
    if source.startswith(zoo.PREFIX):
        return zoo.find_model(source).parameters / 1e9
    hidden, layers = number(config, "hidden_size", "n_embd", "d_model"), number(config, "num_hidden_layers", "n_layer")
    heads = number(config, "num_attention_heads", "n_head") or 1
    groups, width = number(config, "num_key_value_heads") or heads, number(config, "head_dim") or hidden // heads
    experts = number(config, "num_experts", "num_local_experts", "n_routed_experts") or 1
    inner = number(config, *(["moe_intermediate_size"] if experts > 1 else []), "intermediate_size", "ffn_dim") or 4 * hidden
    mlp = (2 if config["model_type"] in PLAIN_MLP else 3) * hidden * inner * experts
    embeddings = number(config, "vocab_size") * hidden * (1 if config.get("tie_word_embeddings", True) else 2)
    return (layers * (2 * hidden * width * (heads + groups) + mlp) + embeddings) / 1e9


def number(config: dict[str, Any], *names: str) -> int:
    """The first of these that the configuration has; 0 for none."""
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), 0)
