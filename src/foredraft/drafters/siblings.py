"""What drafters that know their q offer to do with it: draw tokens from it, share the target's noise, or take the most likely."""

from __future__ import annotations

from dataclasses import dataclass

from foredraft.errors import ConfigurationError
from foredraft.shapes import TreeShape
from foredraft.tree import Proposal

NAMED: dict[str, Proposal] = {"iid": "iid", "without-replacement": "without-replacement", "keyed": "keyed", "top-k": "deterministic"}


@dataclass(frozen=True)
class Offer:
    """The proposals a drafter can make, best first: on chains, on static trees, and where nodes are dropped for their probability."""

    chains: tuple[Proposal, ...]
    static: tuple[Proposal, ...]
    pruned: tuple[Proposal, ...]

    def of(self, shape: TreeShape) -> tuple[Proposal, ...]:
        if shape.is_chain:
            return self.chains
        return self.static if shape.static else self.pruned


WRITTEN = Offer(("deterministic",), ("deterministic",), ("deterministic",))
PRUNED: tuple[Proposal, ...] = ("keyed", "deterministic")
# Whose q is close to p loses little to the p/q rules, and draws from it; whose q is not is accepted more often by match.
DRAWN = Offer(("iid", "keyed", "deterministic", "without-replacement"), ("without-replacement", "iid", "keyed", "deterministic"), PRUNED)
SHARED = Offer(("keyed", "iid", "deterministic", "without-replacement"), ("keyed", "without-replacement", "iid", "deterministic"), PRUNED)


def offered(siblings: str, auto: Offer) -> Offer:
    """What the option ``siblings`` means, ``auto`` where it leaves the choice.

    Raises:
        ConfigurationError: no such siblings.
    """
    if siblings == "auto":
        return auto
    if siblings not in NAMED:
        raise ConfigurationError(f"unknown siblings {siblings!r}; choose auto, {', '.join(NAMED)}")
    only = (NAMED[siblings],)
    return Offer(only, only, only)
