"""Verification rules, by name. Adding one takes a file here and a line in the registry below."""

from __future__ import annotations

from importlib import import_module

from foredraft.errors import ConfigurationError
from foredraft.logits.noise import Randomness
from foredraft.tree import Proposal
from foredraft.verification.base import Rule, Verdict

__all__ = ["Randomness", "Rule", "Verdict", "automatic", "create", "names"]

REGISTRY = {
    "match": "foredraft.verification.match:Match",
    "rejection": "foredraft.verification.rejection:Rejection",
    "block": "foredraft.verification.block:Block",
    "multi-candidate": "foredraft.verification.multi_candidate:MultiCandidate",
    "k-seq": "foredraft.verification.k_seq:KSeq",
    "traversal": "foredraft.verification.traversal:Traversal",
    "typical": "foredraft.verification.typical:Typical",
}

# The exact rule that accepts most, for each kind of proposal: on chains, and on trees.
AUTO: dict[Proposal, tuple[str, str]] = {
    "deterministic": ("match", "match"),
    "mixed": ("match", "match"),
    "keyed": ("match", "match"),
    "iid": ("block", "traversal"),
    "without-replacement": ("traversal", "traversal"),
}


def names() -> list[str]:
    """The names of all verification rules; ``"auto"`` picks one of them for the drafter in use."""
    return list(REGISTRY)


def create(name: str) -> Rule:
    """The rule called ``name``.

    Raises:
        ConfigurationError: no such rule; the message lists those there are.
    """
    if name not in REGISTRY:
        raise ConfigurationError(f"unknown rule {name!r}; choose auto, {', '.join(REGISTRY)}")
    module, _, attribute = REGISTRY[name].partition(":")
    rule: Rule = getattr(import_module(module), attribute)()
    return rule


def automatic(proposal: Proposal, *, chain: bool) -> Rule:
    """The rule that ``rule="auto"`` stands for where siblings are chosen by ``proposal``, on chains or on any tree."""
    on_chains, on_trees = AUTO[proposal]
    return create(on_chains if chain else on_trees)
