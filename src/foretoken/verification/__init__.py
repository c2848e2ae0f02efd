"""Verification rules, by name. Adding one takes a file here and a line in the registry below."""

from __future__ import annotations

from importlib import import_module

from foretoken.errors import ConfigurationError
from foretoken.sampling import Randomness
from foretoken.verification.base import Rule, Verdict

__all__ = ["Randomness", "Rule", "Verdict", "create", "names"]

REGISTRY = {
    "match": "foretoken.verification.match:Match",
    "rejection": "foretoken.verification.rejection:Rejection",
    "block": "foretoken.verification.block:Block",
    "multi-candidate": "foretoken.verification.multi_candidate:MultiCandidate",
    "k-seq": "foretoken.verification.k_seq:KSeq",
    "traversal": "foretoken.verification.traversal:Traversal",
}

# The exact rule that accepts most, for each kind of proposal.
AUTO = {
    "deterministic": "match",
    "mixed": "match",
    "keyed": "match",
    "iid": "rejection",
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


def automatic(proposal: str) -> Rule:
    """The rule that ``rule="auto"`` stands for."""
    return create(AUTO[proposal])
