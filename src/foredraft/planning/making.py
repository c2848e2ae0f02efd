"""The planner that chooses a shape in every round, for a target, a drafter and a rule."""

from __future__ import annotations

from foredraft.drafters.base import Drafter
from foredraft.planning.costs import LEVEL, LOOK_UP, CostModel, timed_beforehand
from foredraft.planning.forecasts import GROWN_DEPTH, GROWN_K
from foredraft.planning.largest import largest_fitting
from foredraft.planning.planner import AutomaticPlanner
from foredraft.planning.profiles import profile
from foredraft.shapes import TreeShape
from foredraft.target import Target
from foredraft.tree import Proposal
from foredraft.verification import Rule


def make_planner(target: Target, drafter: Drafter, rule: Rule, proposal: Proposal) -> AutomaticPlanner:
    """A planner that chooses among all shapes that ``target`` and ``drafter`` can do and for which ``rule`` is exact with ``proposal``. The
    drafter is bound to the target."""

    def fits(shape: TreeShape) -> bool:
        how = {"chain": drafter.makes_chains(shape), "pruned": not shape.static}
        return proposal in drafter.proposals_for(shape) and rule.refusal(proposal, **how) is None

    info, largest, grows = drafter.info, largest_fitting(target, drafter, fits), []
    if info.grows and not largest.is_chain and target.device.type == "cpu":
        grows = [True, False] if fits(TreeShape.opt(largest.nodes, largest.depth, k=GROWN_K)) else [True]
    return AutomaticPlanner(
        largest,
        grows=grows,
        levels=GROWN_DEPTH if info.runs_a_model else largest.depth,
        costs=CostModel(level=LEVEL if timed_beforehand(drafter) else LOOK_UP),
        profile=profile(target, drafter),
        rates=info.rates,
        exits=info.exits,
        copies=info.copies,
    )
