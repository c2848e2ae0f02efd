"""What a :class:`~foredraft.Speculator` is made of, from what users write: the drafter, the shape, and a rule that is exact for both."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from foredraft import drafters, verification
from foredraft.drafters.base import Drafter
from foredraft.errors import ConfigurationError
from foredraft.models.cache_sizes import in_words
from foredraft.planning import AUTO
from foredraft.planning.largest import largest_shape
from foredraft.shapes import StaticShape, TreeShape
from foredraft.target import Target
from foredraft.tree import Proposal
from foredraft.verification import Rule


def choose_drafter(drafter: Drafter | PreTrainedModel | str, options: dict[str, Any] | None) -> Drafter:
    """The drafter: as it is, by name with ``options``, or one that drafts with a model.

    Raises:
        ConfigurationError: an unknown name or option, or options for a drafter that is there already.
    """
    if isinstance(drafter, str):
        return drafters.create(drafter, options)
    wrapped = hasattr(drafter, "get_base_model") or hasattr(drafter, "_orig_mod")  # by PEFT, by torch.compile
    if isinstance(drafter, PreTrainedModel) or wrapped:
        return drafters.create("draft-model", {"source": drafter, **(options or {})})
    if not isinstance(drafter, Drafter):
        raise ConfigurationError(f"drafter must be a Drafter, a model, a name or 'NAME:SOURCE', got {type(drafter).__name__}")
    if options:
        raise ConfigurationError("drafter_options need a drafter given by name; pass the options to the drafter's constructor instead")
    return drafter


def choose_shape(shape: TreeShape | str | None, draft_length: int | None) -> TreeShape | None:
    """The shape asked for, by ``shape`` or as a chain of ``draft_length`` tokens; None for one that is chosen in every round."""
    if draft_length is None:
        return None if shape in (None, AUTO) else TreeShape.parse(shape)
    if shape is not None:
        raise ConfigurationError(f"draft_length={draft_length!r} means shape='chain({draft_length})'; pass either draft_length or shape")
    if isinstance(draft_length, bool) or not isinstance(draft_length, int) or draft_length < 0:
        raise ConfigurationError(f"draft_length must be a whole number of at least 0, got {draft_length!r}")
    return TreeShape.chain(draft_length)


def choose_rule(rule: Rule | str, drafter: Drafter, shape: TreeShape | None, *, lossless: bool = True) -> tuple[Rule, Proposal]:
    """The rule, and how the drafter is to choose its tokens so that the rule is exact; for any shape if None: for trees, if the drafter
    makes any and the rule takes them, or else for chains.

    Raises:
        ConfigurationError: no way of proposing that the drafter has in this shape is exact under the rule, or the rule is lossy and
            ``lossless`` was not given as False.
    """
    if shape is None and drafter.info.branches:
        try:
            return choose_rule(rule, drafter, largest_shape(branches=True), lossless=lossless)
        except ConfigurationError:  # not for trees; what is wrong for chains too is said below
            pass
    shape = largest_shape(branches=False) if shape is None else shape
    offered, chain = drafter.proposals_for(shape), drafter.makes_chains(shape)
    pruned = not shape.static
    if rule == "auto":
        automatic = verification.automatic(offered[0], chain=chain)
        if automatic.refusal(offered[0], chain=chain, pruned=pruned) is None:
            return automatic, offered[0]
        return verification.create("match"), offered[0]
    chosen = verification.create(rule) if isinstance(rule, str) else rule
    if not isinstance(chosen, Rule):
        raise ConfigurationError(f"rule must be 'auto', one of {', '.join(verification.names())}, or a Rule; got {rule!r}")
    if lossless and not chosen.lossless:
        raise ConfigurationError(f"rule {chosen.name!r} is lossy: it changes the output distribution; pass lossless=False to allow that")
    for proposal in chosen.proposals:
        if proposal in offered and chosen.refusal(proposal, chain=chain, pruned=pruned) is None:
            return chosen, proposal
    fitting = next((proposal for proposal in chosen.proposals if proposal in offered), offered[0])
    raise ConfigurationError(
        f"{chosen.refusal(fitting, chain=chain, pruned=pruned)}; drafter {drafter.name!r} makes {', '.join(offered)} "
        f"proposals in shape {shape}. Use rule='auto'"
    )


def check_shape(shape: TreeShape, target: Target, drafter: Drafter) -> None:
    """Refuse a shape that the target or the drafter cannot do.

    Raises:
        ConfigurationError: says which, why, and what would do.
    """
    refusal = drafter.refusal(shape)
    if refusal:
        raise ConfigurationError(refusal)
    if target.chains_only and not drafter.makes_chains(shape):
        raise ConfigurationError(f"the target can only verify chains: {target.chains_only}; use shape='chain({shape.depth})'")
    if target.trained is not None and shape.nodes >= target.trained:
        raise ConfigurationError(f"shape {shape} has {shape.nodes} nodes, but the model's context holds only {target.trained}; draft fewer")
    least = target.cost(target.whole(3 + shape.nodes))  # a token of the prompt, one that is new, and the tree with its root
    if target.budget is not None and least > target.budget:
        raise ConfigurationError(
            f"cache_memory has no room for a row of two tokens and a draft of shape {shape}, which take {in_words(least)} here; "
            "allow more, or draft fewer tokens"
        )
    siblings = shape.siblings if isinstance(shape, StaticShape) else 1
    if siblings > target.vocab_size:
        raise ConfigurationError(
            f"shape {shape} needs {siblings} different siblings, but the vocabulary has only {target.vocab_size} tokens"
        )
