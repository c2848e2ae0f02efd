"""Verification rules, by name. Adding one takes a file here and a line in the registry below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foredraft.errors import unknown
from foredraft.registry import Entry, entry, load

if TYPE_CHECKING:
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


def describe(name: str) -> Entry:
    """What is known of the rule called ``name``; imports nothing for the built-in ones.

    Raises:
        ConfigurationError: no such rule; the message lists those there are.
    """
    if name not in REGISTRY:
        raise unknown("unknown rule", name, ["auto", *REGISTRY])
    return entry(REGISTRY[name])


def create(name: str) -> Rule:
    """The rule called ``name``.

    Raises:
        ConfigurationError: no such rule; the message lists those there are.
    """
    rule: Rule = load(describe(name).home)()
    return rule


def automatic(proposal: Proposal, *, chain: bool) -> Rule:
    """The rule that ``rule="auto"`` stands for where siblings are chosen by ``proposal``, on chains or on any tree."""
    on_chains, on_trees = AUTO[proposal]
    return create(on_chains if chain else on_trees)


def __getattr__(name: str) -> Any:
    """Import on first use, so that the names of the rules need no torch."""
    if name == "Randomness":
        return load("foredraft.logits.noise:Randomness")
    if name in ("Rule", "Verdict"):
        return load(f"foredraft.verification.base:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
