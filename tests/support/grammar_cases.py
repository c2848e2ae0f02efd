"""Grammars in trees: whose drafts they meet, tokens that they are made of, and a fault that they may have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from helpers import make_drafter, tiny

from foredraft import Speculator
from foredraft.drafters.base import DraftRequest
from foredraft.logits.processors import Pipeline
from foredraft.testing import ProbabilityTable, ScriptedDrafter
from foredraft.tree import TokenTree

LIST = r"\[-?[1-9][0-9]{0,2}(,-?[1-9][0-9]{0,2}){3,5}\]"
NEW = 30  # more tokens than the longest such text takes
STRINGS = [*"0123456789-,[]", *(f"{n}," for n in range(10)), *map(str, range(10, 99)), "[-", "],", ",,"]
CONFIGURATIONS = {
    "lookup": ("prompt-lookup", {"shape": "chain(5)"}),
    "chain": ("iid", {"shape": "chain(4)"}),
    "top-k": ("top-k", {"shape": "product(3,2,1)"}),
    "without-replacement": ("without-replacement", {"shape": "product(3,2,1)"}),
    "keyed": ("keyed", {"shape": "product(2,2,1)"}),
    "grown": ("top-k", {"shape": "dynamic(depth=4,k=3,total=10)"}),
}
MayFollow = Callable[[Sequence[int], int], bool]  # whether the grammar has a token after a history


def speculator(name: str, **options) -> Speculator:
    siblings, given = CONFIGURATIONS[name]
    drafter = siblings if name == "lookup" else make_drafter("draft-model", siblings=siblings)
    return Speculator(tiny(), drafter, **given, **options)


def constrained(table: ProbabilityTable, may_follow: MayFollow) -> ProbabilityTable:
    def masked(context: Sequence[int]) -> list[float]:
        p = table(context) * torch.tensor([may_follow(context, token) for token in range(table.vocab_size)])
        return (p / p.sum()).tolist()

    return ProbabilityTable(masked, table.vocab_size)


class DropsForbidden(ScriptedDrafter):
    """The planted fault: draws from q as it is, then removes what the grammar forbids."""

    def __init__(self, q: ProbabilityTable, may_follow: MayFollow, **options):
        super().__init__(q, **options)
        self.may_follow = may_follow

    def draft(self, request: DraftRequest) -> TokenTree:
        free = replace(request.sampler, pipelines=[Pipeline()] * len(request.rows))
        tree = super().draft(replace(request, sampler=free))
        valid = torch.ones_like(tree.tokens, dtype=torch.bool) if tree.valid is None else tree.valid.clone()
        for row, line in enumerate(request.rows):
            for node in range(1, tree.nodes):
                history = line.ids[:-1] + [int(tree.tokens[row, above]) for above in tree.path(row, node)]
                valid[row, node] &= valid[row, tree.parents[row, node]] & self.may_follow(history[:-1], history[-1])
        return replace(tree, valid=valid)
