"""The exact law of sampled tokens in the loop, over tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foredraft import RowParameters, Session
from foredraft.drafters.base import Drafter
from foredraft.planning import FixedPlanner
from foredraft.testing import Enumeration, Law, ProbabilityTable, TableTarget, continuations, enumerate_law
from foredraft.verification import create


def law_of(
    table: ProbabilityTable, drafter: Drafter, rule: str, shape: str, *, prompt: Sequence[int] = (0, 1), count: int = 3, **given: Any
) -> Law:
    """Of ``count`` tokens after ``prompt``; ``given``: more parameters of the row."""

    def run(enumeration: Enumeration) -> list[tuple[int, ...]]:
        target: Any = TableTarget(table)
        proposal, planner = drafter.info.proposals[0], FixedPlanner(shape)
        session = Session(target, drafter, create(rule), proposal=proposal, planner=planner, randomness=enumeration)
        parameters = [RowParameters(count, do_sample=True, seed=seed, **given) for seed in enumeration.seeds]
        return continuations(session, [list(prompt)] * len(parameters), parameters)

    return enumerate_law(run)
