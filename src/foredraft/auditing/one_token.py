"""What a rule makes of one drafted token, by enumeration of every draw; and a rule that is not exact, to be shown beside the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from foredraft import verification
from foredraft.logits.noise import Purpose, Randomness
from foredraft.testing import Enumeration, enumerate_law
from foredraft.tree import Proposal, TokenTree
from foredraft.verification import Rule, Verdict

DRAWN: tuple[Proposal, ...] = ("keyed", "iid")  # from q: with the target's noise, or with noise of its own


class DrawAnew(Rule):
    """Draws from p and compares with the draft, which was drawn from q. Where they differ, it draws from p once more: that is wrong. The
    first draw must stand, because it was compared with the draft (as it does in ``match``)."""

    name = "draw anew"
    summary = "wrong: after a mismatch, draws from p once more"
    proposals = ("iid",)
    lossless = False

    def verify(self, tree: TokenTree, p: torch.Tensor, noise: Randomness) -> Verdict:
        same = noise.draw(p[:, 0], Purpose.MATCH) == tree.tokens[:, 1]
        return Verdict(tree.depths, same.long(), noise.draw(torch.where(same[:, None], p[:, 1], p[:, 0]), Purpose.RESIDUAL))


@dataclass(frozen=True)
class OneToken:
    """``chances`` of each token to come first in the text, and how often the draft is ``accepted``."""

    chances: list[float]
    accepted: float


def one_token(rule: Rule, proposal: Proposal, p: Sequence[float], q: Sequence[float]) -> OneToken:
    """A token drawn from q is verified against p."""

    def run(worlds: Enumeration) -> list[tuple[int, bool]]:
        count, noise = len(worlds.worlds), worlds.noise()
        # what follows an accepted draft is of no interest here, and certain
        at_nodes = torch.stack([torch.tensor(p, dtype=torch.float64), torch.eye(len(p), dtype=torch.float64)[0]]).expand(count, 2, -1)
        below = torch.tensor(q, dtype=torch.float64).expand(count, 1, -1)
        if proposal == "keyed":
            drafted = noise.race(below, torch.zeros(1, 1, dtype=torch.long))[:, 0]
        else:
            drafted = noise.draw(below[:, 0], Purpose.DRAFT)
        tree = TokenTree.from_chain(torch.stack([torch.zeros_like(drafted), drafted], 1), proposal=proposal, q=below)
        verdict = rule.verify(tree, at_nodes, noise)
        first = torch.where(verdict.accepted > 0, drafted, verdict.next_token)
        return list(zip(first.tolist(), (verdict.accepted > 0).tolist()))

    law = enumerate_law(run)
    chances = [law.get((token, True), 0.0) + law.get((token, False), 0.0) for token in range(len(p))]
    return OneToken(chances, sum(weight for (_, kept), weight in law.items() if kept))


def exact_rules() -> Iterator[tuple[Rule, Proposal]]:
    """The package's lossless rules, each with every way of drawing from q that it is exact for."""
    for name in verification.names():
        rule = verification.create(name)
        yield from ((rule, proposal) for proposal in DRAWN if rule.lossless and proposal in rule.proposals)
