"""Verification rules, by name. Adding one takes a file here and a line in the registry below."""

from __future__ import annotations

import re
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from foredraft.errors import ConfigurationError, unknown
from foredraft.registry import Entry, entry

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
    "lenient": "foredraft.verification.lenient:Lenient",
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


def parse(rule: str) -> tuple[Entry, dict[str, float]]:
    """What is known of a rule, given by name or with options, as in ``lenient(epsilon=0.3)``, and the options; imports nothing for the
    built-in ones.

    Raises:
        ConfigurationError: no such rule or option; the message lists those there are.
    """
    match = re.fullmatch(r"\s*([^()]+?)\s*(?:\((.*)\)\s*)?", rule)
    if match is None or match[1] not in REGISTRY:
        raise unknown("unknown rule", rule, ["auto", *REGISTRY], match and match[1])
    known, options = entry(REGISTRY[match[1]]), {}
    for part in filter(None, (match[2] or "").split(",")):
        name, _, value = (each.strip() for each in part.partition("="))
        if name not in known.options:
            raise ConfigurationError(f"rule {match[1]!r} has no option {name!r}; it has {', '.join(known.options) or 'none'}")
        try:
            options[name] = float(value)
        except ValueError:
            raise ConfigurationError(f"rule {match[1]!r}: {name} must be a number, got {value!r}") from None
    return known, options


def describe(name: str) -> Entry:
    """What is known of the rule called ``name``; raises as :func:`parse` does."""
    return parse(name)[0]


def create(name: str) -> Rule:
    """The rule called ``name``, with options where they are given; raises as :func:`parse` does, or for a value that cannot be."""
    known, options = parse(name)
    return resolve_name(known.home)(**options)


def automatic(proposal: Proposal, *, chain: bool) -> Rule:
    """The rule that ``rule="auto"`` stands for where siblings are chosen by ``proposal``, on chains or on any tree."""
    on_chains, on_trees = AUTO[proposal]
    return create(on_chains if chain else on_trees)


def __getattr__(name: str) -> Any:
    """Import on first use, so that the names of the rules need no torch."""
    if name == "Randomness":
        return resolve_name("foredraft.logits.noise:Randomness")
    if name in ("Rule", "Verdict"):
        return resolve_name(f"foredraft.verification.base:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
