"""Which model something was made for, as far as its shape and its vocabulary say."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from foredraft.errors import ConfigurationError
from foredraft.loading import fingerprint_of
from foredraft.models.layers import layer_count


@dataclass(frozen=True)
class TargetShape:
    """What must agree between a model and what was made for it, a head or a skip set, and is stored with that.

    Attributes:
        hidden_size, vocab_size, layers: of the target; ``vocab_size`` counts the rows of its LM head.
        name: where it came from, for messages and for the engine that loads an export; not compared.
        vocabulary: a hash of its tokenizer's vocabulary, "" where none was found; compared where both are known.
    """

    hidden_size: int
    vocab_size: int
    layers: int
    name: str = ""
    vocabulary: str = ""


def shape_of(model: PreTrainedModel) -> TargetShape:
    """Of a model, as what is made for it remembers it."""
    config = model.config.get_text_config()
    return TargetShape(
        hidden_size=config.hidden_size,
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
        layers=layer_count(model),
        name=str(model.name_or_path or ""),
        vocabulary=fingerprint_of(model) or "",
    )


def refuse_another_model(made: str, theirs: TargetShape, model: PreTrainedModel, instead: str) -> None:
    """Raises ConfigurationError if ``theirs`` is another shape than that of ``model``, or another vocabulary as far as both are known.

    Args:
        made: what was made for it, as in "the head was trained".
        instead: what to do other than using that model.
    """
    ours = shape_of(model)
    for what in ("hidden_size", "vocab_size", "layers"):
        if getattr(theirs, what) != getattr(ours, what):
            raise ConfigurationError(
                f"{made} for {theirs.name or 'a target'} with {what} {getattr(theirs, what)}; "
                f"{ours.name or 'this target'} has {getattr(ours, what)}: use that target, or {instead}"
            )
    if theirs.vocabulary and ours.vocabulary and theirs.vocabulary != ours.vocabulary:
        raise ConfigurationError(
            f"{made} for {theirs.name or 'a target'} with another tokenizer than that of {ours.name}: the same ids stand for "
            f"other text; use that target, or {instead}"
        )
