"""What a round costs by the nodes that it verifies, measured: for choosing a tree once and for all."""

from __future__ import annotations

from collections.abc import Callable

import torch

from foredraft.drafters.base import Drafter
from foredraft.planning.costs import BUDGET, PROMPT, CostModel, measure
from foredraft.planning.largest import DEPTH, largest_shape
from foredraft.planning.search import widths
from foredraft.target import Target


@torch.inference_mode()
def tree_costs(target: Target, drafter: Drafter, *, most_nodes: int = 64, seconds: float = BUDGET) -> Callable[[int], float]:
    """Times passes and drafts as the planner does, and returns the seconds of a round by its drafted nodes per row, draft included; 0 is
    a round without a draft. The drafter is bound to the target, and neither has rows; measuring takes ``seconds``."""
    depth = min(drafter.info.max_depth or DEPTH, most_nodes)
    largest = largest_shape(branches=True, depth=depth, nodes=most_nodes)
    costs = CostModel()
    measure(costs, target, drafter, rows=1, largest=largest, seconds=seconds)
    verify = costs.verify(1, range(1, most_nodes + 2), PROMPT)
    draft = costs.draft_seconds(1, widths(largest))

    def cost(nodes: int) -> float:
        return verify[nodes] + (draft if nodes else 0.0)

    return cost
